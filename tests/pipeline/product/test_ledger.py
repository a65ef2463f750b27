"""What the record of a stopped run says, also when it was torn."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewright.kernels.passes.contents import Contents
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.plan.inputs import Limits, StoredMatrix
from tilewright.pipeline.plan.product import MatmulPlan, plan_tiles
from tilewright.pipeline.plan.told import Found, StoredObject
from tilewright.pipeline.product.kept import with_their_groups
from tilewright.pipeline.product.ledger import (
    FILE_NAME,
    VERSION,
    Group,
    Ledger,
    Stored,
    read_record,
)
from tilewright.pipeline.product.output import CHECKSUMS_NAME
from tilewright.pipeline.sealed_lines import sealed, unsealed
from tilewright.pipeline.store.appearance import Appearance
from tilewright.pipeline.store.journal import FileJournal

PRODUCT = "abc"


def tile_of(nbytes: int, *, synced: bool = True) -> Stored:
    """A tile of one object."""
    return Stored((StoredObject((nbytes % 7, 3), nbytes, nbytes << 50),), synced=synced)


@pytest.fixture(autouse=True)
def no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here is one file; when its copy is read, is in tests/workflows/test_lost_records.py."""
    monkeypatch.setattr(FileJournal, "twin", lambda journal: None)


@pytest.fixture
def plan() -> MatmulPlan:
    matrix = StoredMatrix(40, 40, np.dtype("f4"), (10, 10))
    return plan_tiles(matrix, matrix, np.dtype("f4"), (10, 10), Limits(1, 4000))


def test_what_was_recorded_is_read(plan: MatmulPlan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, PRODUCT, plan, request={"dtype": "float32"})
    for index in (3, 0, 7):
        ledger.record(index, tile_of(100 + index))
    ledger.close()
    past = read_record(tmp_path / FILE_NAME)
    assert past is not None
    assert past.finished == {index: tile_of(100 + index) for index in (0, 3, 7)}
    assert past.geometry == plan.geometry
    assert past.c_unit == (10, 10)
    assert past.request == {"dtype": "float32"}
    ledger.remove(tmp_path)
    assert read_record(tmp_path / FILE_NAME) is None


def test_a_record_whose_folder_is_gone_was_taken_over(plan: MatmulPlan, tmp_path: Path) -> None:
    """By a run that does not see the lock of this one, and has put the output in its place meanwhile."""
    with pytest.raises(StoreError, match=r"output: another run has taken .* over, .*or it was removed"):
        Ledger(tmp_path / "C.zarr.partial", PRODUCT, plan)


def test_what_was_read_of_the_inputs_is_kept(
    plan: MatmulPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lines of so many parts; the last hash of a part counts."""
    monkeypatch.setattr("tilewright.pipeline.product.ledger.PARTS_OF_A_LINE", 2)
    looks = Appearance("here", "f4", "1"), Appearance("there", "f4", "2")
    parts = {(0, 2, 2 * i, 2 * i + 2): 2**64 - 1 - i for i in range(5)}
    first = Ledger(tmp_path, "abc", plan, inputs=looks, read={"A": {(0, 2, 0, 2): 7}, "B": {}})
    first.add_read("A", parts)
    first.add_read("B", {(0, 1, 0, 1): 0})
    first.record(3, tile_of(10))
    first.close()
    past = read_record(tmp_path / FILE_NAME)
    assert past is not None
    assert past.inputs == looks
    assert past.read == {"A": parts, "B": {(0, 1, 0, 1): 0}}
    again = Ledger(tmp_path, "abc", plan, past.finished, inputs=past.inputs, read=past.read)
    assert read_record(tmp_path / FILE_NAME) == past
    again.doubt_inputs()
    again.close()
    doubted = read_record(tmp_path / FILE_NAME)
    assert doubted is not None
    assert doubted.inputs is None
    assert (doubted.read, doubted.finished) == (past.read, past.finished)


@pytest.mark.parametrize("torn", range(1, 12))
def test_a_torn_last_line_loses_one_tile_and_no_later_one(
    torn: int, plan: MatmulPlan, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path, PRODUCT, plan)
    for index in (1, 2, 3):
        ledger.record(index, tile_of(10))
    ledger.close()
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-torn])
    past = read_record(tmp_path / FILE_NAME)
    assert past is not None
    assert past.finished == dict.fromkeys((1, 2, 3) if torn == 1 else (1, 2), tile_of(10))
    again = Ledger(
        tmp_path, PRODUCT, plan, past.finished
    )  # going on behind a torn line must not lose what comes
    again.record(9, tile_of(11))
    again.close()
    last = read_record(tmp_path / FILE_NAME)
    assert last is not None
    assert last.finished == {**past.finished, 9: tile_of(11)}


def test_a_record_of_another_version_is_none(plan: MatmulPlan, tmp_path: Path) -> None:
    Ledger(tmp_path, PRODUCT, plan).close()
    path = tmp_path / FILE_NAME
    head = json.loads(path.read_text().splitlines()[0])
    del head["check"]
    path.write_text(sealed(head | {"version": VERSION - 1}) + "\n")
    assert read_record(tmp_path / FILE_NAME) is None


@pytest.mark.parametrize(
    "entry",
    [
        {"til": 3},
        {"read": "C", "parts": []},
        {"read": "A", "parts": [[0, 2, 0, 2]]},
        {"read": "A", "parts": [[2, 2, 0, 2, "ff"]]},
        {"read": "A", "parts": [[0, 2, -1, 2, "ff"]]},
        {"read": "A", "parts": [[0, 2, 0, 2, "no hash"]]},
        {"tile": -1, "objects": []},
        {"tile": "x", "objects": []},
        {"tile": 1, "objects": None},
        {"tile": 1, "objects": [[0, 0, -1, "00"]]},
        {"tile": 1, "objects": [[0, 0, 1, "no number"]]},
        {"tile": 1, "objects": [], "found": [[1, "x", 0, 0, 0]] * 3},
    ],
)
def test_what_no_line_says_is_no_record(entry: dict[str, Any], plan: MatmulPlan, tmp_path: Path) -> None:
    Ledger(tmp_path, PRODUCT, plan).close()
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes() + f"{sealed(entry)}\n".encode())
    assert read_record(tmp_path / FILE_NAME) is None


@pytest.mark.parametrize("head", [b"\xff\xfe", b"", b"[1]", b"5", b"{}", b'{"version": 7}'])
def test_without_its_first_line_a_record_is_none(head: bytes, plan: MatmulPlan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, PRODUCT, plan)
    ledger.record(5, tile_of(10))
    ledger.close()
    path = tmp_path / FILE_NAME
    path.write_bytes(head + path.read_bytes()[path.read_bytes().index(b"\n") :])
    assert read_record(tmp_path / FILE_NAME) is None


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), flipped=st.integers(0, 7))
def test_a_flipped_bit_costs_no_more_than_its_line(
    place: float, flipped: int, plan: MatmulPlan, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path, PRODUCT, plan)
    tiles = {index: tile_of(100 + index, synced=index % 2 == 0) for index in range(8)}
    for index, stored in tiles.items():
        ledger.record(index, stored)
    ledger.close()
    path = tmp_path / FILE_NAME
    data = bytearray(path.read_bytes())
    at = int(place * len(data))
    data[at] ^= 1 << flipped
    path.write_bytes(data)
    past = read_record(tmp_path / FILE_NAME)
    if at <= path.read_bytes().index(b"\n"):
        assert past is None
        return
    assert past is not None
    assert past.finished.items() <= tiles.items(), "what is left says what it said"
    # A flipped end of a line costs the two that it joins.
    assert len(past.finished) >= 6
    assert past.bad_lines >= 1 or at >= len(data) - 1 or len(past.finished) == 7


def test_a_tile_counts_as_on_disk_once_it_was_settled(plan: MatmulPlan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, PRODUCT, plan)
    stored = {index: tile_of(10, synced=False) for index in (1, 2, 3, 4)}
    for index, one in stored.items():
        ledger.record(index, one)
    ledger.withdraw(2)
    ledger.withdraw(4)
    ledger.record(4, tile_of(10, synced=False))  # the same bytes, and not on disk yet
    ledger.settle((index, stored[index]) for index in (1, 2, 4))
    ledger.close()
    past = read_record(tmp_path / FILE_NAME)
    assert past is not None
    assert {index: stored.synced for index, stored in past.finished.items()} == {1: True, 3: False, 4: False}


def test_a_tile_that_cannot_be_forced_to_disk_counts_no_more(plan: MatmulPlan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, PRODUCT, plan)
    stored = {index: tile_of(10, synced=False) for index in (1, 2, 3)}
    for index, one in stored.items():
        ledger.record(index, one)
    ledger.record(2, tile_of(10, synced=False))  # in another file
    ledger.lose((index, stored[index]) for index in (1, 2))
    ledger.close()
    past = read_record(tmp_path / FILE_NAME)
    assert past is not None
    assert sorted(past.finished) == [2, 3]


def test_the_record_of_a_finished_product_is_kept_without_what_was_found(
    plan: MatmulPlan, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path, PRODUCT, plan)
    ledger.record(1, tile_of(10)._replace(found=Found(c=Contents(nan=1))))
    ledger.keep()
    ledger.remove(tmp_path)
    kept = read_record(tmp_path / CHECKSUMS_NAME)
    assert kept is not None
    assert kept.finished == {1: tile_of(10)}
    assert kept.geometry == plan.geometry
    assert kept.digest == "abc"
    assert os.listdir(tmp_path) == [CHECKSUMS_NAME]


@pytest.mark.parametrize(
    "line", [b'{"tile": ' + b"9" * 6000 + b"}", b"[" * 200_000], ids=["digits", "brackets"]
)
def test_a_line_past_what_python_reads_is_torn(line: bytes, plan: MatmulPlan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, PRODUCT, plan)
    ledger.record(5, tile_of(10))
    ledger.close()
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes() + line + b"\n")
    past = read_record(tmp_path / FILE_NAME)
    assert past is not None
    assert past.finished == {5: tile_of(10)}


def test_a_line_without_its_seal_is_left_out(plan: MatmulPlan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, PRODUCT, plan)
    ledger.record(5, tile_of(10))
    ledger.close()
    path = tmp_path / FILE_NAME
    path.write_text(path.read_text() + '{"tile": 6}\n')
    past = read_record(tmp_path / FILE_NAME)
    assert past is not None
    assert past.finished == {5: tile_of(10)}


def test_a_tile_that_was_withdrawn_counts_once_it_is_stored_again(plan: MatmulPlan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, PRODUCT, plan)
    ledger.record(5, tile_of(10))
    ledger.record(6, tile_of(10))
    for index in (2, 5, 6):  # 2: it was stored by the run that finds it damaged, or by nobody
        ledger.withdraw(index)
    ledger.record(6, tile_of(11))
    ledger.close()
    past = read_record(tmp_path / FILE_NAME)
    assert past is not None
    assert past.finished == {6: tile_of(11)}


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_record_that_cannot_be_read_now_is_not_taken_for_none(
    number: int, plan: MatmulPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tiles would be removed."""
    Ledger(tmp_path, PRODUCT, plan).close()

    def failing(*arguments: Any, **options: Any) -> str:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", failing)
        match = rf"{FILE_NAME}: {os.strerror(number)}; nothing was removed: .*--no-resume"
        with pytest.raises(StoreError, match=match):
            read_record(tmp_path / FILE_NAME)
    assert read_record(tmp_path / FILE_NAME) is not None
    assert read_record(tmp_path / "nowhere" / FILE_NAME) is None
    assert read_record(tmp_path / FILE_NAME / FILE_NAME) is None, "there is a file in place of the folder"


def test_a_full_disk_is_named(plan: MatmulPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    ledger = Ledger(tmp_path, PRODUCT, plan)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"record of finished tiles.*No space left"):
        ledger.record(3, tile_of(10))
    ledger.close()
    with pytest.raises(StoreError, match=r"record of finished tiles.*No space left"):
        Ledger(tmp_path, "abc", plan)


def test_pieces_of_larger_tiles_are_read_with_their_group_and_recipe(
    plan: MatmulPlan, tmp_path: Path
) -> None:
    earlier = plan.recipe._replace(on_host=not plan.on_host)
    pieces = {index: Stored((), group=Group(2, 3)) for index in (2, 3, 5)}
    Ledger(tmp_path, "abc", plan, pieces, earlier=(earlier, plan.recipe)).close()
    past = read_record(tmp_path / FILE_NAME)
    assert past is not None
    assert past.recipes == (earlier, plan.recipe)
    assert past.geometry == plan.geometry
    assert past.finished == pieces
    assert with_their_groups(past.finished, []) == set()
    assert with_their_groups(past.finished, [3]) == {2, 3, 5}
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-9])
    torn = read_record(tmp_path / FILE_NAME)
    assert torn is not None
    assert with_their_groups(torn.finished, []) == {2, 3}, (
        "what the third held may be counted with one of them"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "tpu"),
        ("within", [[0, 10]]),
        ("within", [10]),
        ("cell", [10]),
        ("panel_depth", True),
        ("earlier", None),
        ("earlier", [{"cell": [1, 1]}]),
    ],
)
def test_a_head_that_says_what_no_plan_is_is_no_record(
    name: str, value: Any, plan: MatmulPlan, tmp_path: Path
) -> None:
    Ledger(tmp_path, "abc", plan).close()
    path = tmp_path / FILE_NAME
    head = unsealed(path.read_text().splitlines()[0])
    assert head is not None
    del head["check"]
    path.write_text(sealed(head | {name: value}) + "\n")
    assert read_record(tmp_path / FILE_NAME) is None
