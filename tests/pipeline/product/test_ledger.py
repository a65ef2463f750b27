"""What the record of a stopped run says, also when it was torn."""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.storage import ZipStore

from tilewright.kernels.passes.contents import Contents
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.plan.inputs import Limits, StoredMatrix
from tilewright.pipeline.plan.product import MatmulPlan, plan_tiles
from tilewright.pipeline.plan.stored import StoredObject
from tilewright.pipeline.plan.told import Found
from tilewright.pipeline.product.kept import with_their_groups
from tilewright.pipeline.product.ledger import (
    CHECKSUMS_NAME,
    FILE_NAME,
    VERSION,
    Fingerprint,
    Group,
    Ledger,
    Stored,
    changed_inputs,
    fingerprint,
    read_past,
    read_record,
    sealed,
    unsealed,
)


def tile_of(nbytes: int, *, synced: bool = True) -> Stored:
    """A tile of one object."""
    return Stored((StoredObject((nbytes % 7, 3), nbytes, nbytes << 50),), synced=synced)


@pytest.fixture
def plan() -> MatmulPlan:
    matrix = StoredMatrix(40, 40, np.dtype("f4"), (10, 10))
    return plan_tiles(matrix, matrix, np.dtype("f4"), (10, 10), Limits(1, 4000))


def test_what_was_recorded_is_read(plan: MatmulPlan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "abc", plan)
    for index in (3, 0, 7):
        ledger.record(index, tile_of(100 + index))
    ledger.close()
    past = read_past(tmp_path, "abc")
    assert past is not None
    assert past.finished == {index: tile_of(100 + index) for index in (0, 3, 7)}
    assert past.geometry == plan.geometry
    assert past.c_unit == (10, 10)
    assert read_past(tmp_path, "another product") is None
    ledger.remove(tmp_path)
    assert read_past(tmp_path, "abc") is None


def test_the_fingerprint_sees_a_zip_file_that_was_written_again(tmp_path: Path) -> None:
    """Its metadata are the same, and tiles of both would make up one product."""
    path = tmp_path / "a.zip"

    def seen(value: int) -> Fingerprint:
        with ZipStore(path, mode="w") as file:
            zarr.create_array(file, shape=(4, 4), chunks=(2, 2), dtype="f4")[...] = value
        os.utime(path, ns=(value, value))
        with ZipStore(path, mode="r") as file:
            array = zarr.open_array(file, mode="r")
            assert fingerprint(array, array, {}) == fingerprint(array, array, {})
            return fingerprint(array, array, {})

    assert seen(1) != seen(2)
    with ZipStore(path, mode="r") as file:
        array = zarr.open_array(file, mode="r")
        path.unlink()
        with pytest.raises(StoreError, match=r"cannot look at .*a\.zip"):
            fingerprint(array, array, {})


@pytest.mark.parametrize("torn", range(1, 12))
def test_a_torn_last_line_loses_one_tile_and_no_later_one(
    torn: int, plan: MatmulPlan, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path, "abc", plan)
    for index in (1, 2, 3):
        ledger.record(index, tile_of(10))
    ledger.close()
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-torn])
    past = read_past(tmp_path, "abc")
    assert past is not None
    assert past.finished == dict.fromkeys((1, 2, 3) if torn == 1 else (1, 2), tile_of(10))
    again = Ledger(
        tmp_path, "abc", plan, past.finished
    )  # going on behind a torn line must not lose what comes
    again.record(9, tile_of(11))
    again.close()
    last = read_past(tmp_path, "abc")
    assert last is not None
    assert last.finished == {**past.finished, 9: tile_of(11)}


def test_the_fingerprint_sees_what_decides_the_bytes(tmp_path: Path) -> None:
    def array(name: str, **options: Any) -> zarr.Array[Any]:
        made = zarr.create_array(
            tmp_path / name, shape=(4, 4), chunks=(2, 2), dtype="f4", overwrite=True, **options
        )
        made[...] = 1
        return made

    a, b = array("a"), array("b")
    base = fingerprint(a, b, {"precision": "full"})
    assert fingerprint(a, b, {"precision": "full"}) == base
    assert fingerprint(a, b, {"precision": "tf32"}) != base
    assert fingerprint(b, a, {"precision": "full"}) != base
    a[0, 0] = 5
    assert fingerprint(a, b, {"precision": "full"}) != base
    odd = array("no UTF-8: \udcff")
    assert fingerprint(odd, b, {}) != fingerprint(array("no UTF-8: \udcfe"), b, {})


def test_the_input_that_changed_is_known(tmp_path: Path) -> None:
    arrays = [
        zarr.create_array(tmp_path / name, shape=(4, 4), chunks=(2, 2), dtype="f4", fill_value=1)
        for name in "ab"
    ]
    base = fingerprint(*arrays, {"precision": "full"})
    assert changed_inputs(base, *arrays) == []
    arrays[1][0, 0] = 5
    assert changed_inputs(base, *arrays) == ["B"]
    arrays[0][0, 0] = 5
    assert changed_inputs(base, *arrays) == ["A", "B"]


def test_tiles_of_two_releases_do_not_meet_in_one_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their kernels may sum in other orders."""
    a = zarr.create_array(tmp_path / "a", shape=(4, 4), chunks=(2, 2), dtype="f4")
    base = fingerprint(a, a, {})
    monkeypatch.setattr("tilewright.pipeline.product.ledger.__version__", "0.0.1")
    assert fingerprint(a, a, {}).digest != base.digest
    assert changed_inputs(base, a, a) == [], "the inputs are what they were"


@pytest.fixture
def chunked(tmp_path: Path) -> zarr.Array[Any]:
    array = zarr.create_array(tmp_path / "a", shape=(4, 4), chunks=(2, 2), dtype="f4", compressors=None)
    array[...] = np.arange(16).reshape(4, 4)
    return zarr.open_array(tmp_path / "a", mode="r")


def test_the_fingerprint_sees_a_chunk_that_an_older_one_replaced(
    chunked: zarr.Array[Any], tmp_path: Path
) -> None:
    """Neither the number of files, nor their bytes, nor the newest time changes by that."""
    base, folder = fingerprint(chunked, chunked, {}), tmp_path / "a" / "c"
    old = tmp_path / "old"
    old.write_bytes(bytes(16))
    os.utime(old, ns=(10**18, 10**18))
    shutil.copy2(old, folder / "0" / "1")
    replaced = fingerprint(chunked, chunked, {})
    assert replaced != base
    (folder / "0" / "1").rename(tmp_path / "x")
    (folder / "1" / "1").rename(folder / "0" / "1")
    (tmp_path / "x").rename(folder / "1" / "1")
    assert fingerprint(chunked, chunked, {}) not in (base, replaced), "two chunks changed places"


@pytest.mark.parametrize("linked", ["c", "c/1", "c/1/0"])
def test_the_fingerprint_sees_what_links_lead_to(
    linked: str, chunked: zarr.Array[Any], tmp_path: Path
) -> None:
    inside, outside = tmp_path / "a" / linked, tmp_path / "other disk"
    inside.rename(outside)
    inside.symlink_to(outside)
    base = fingerprint(chunked, chunked, {})
    assert fingerprint(chunked, chunked, {}) == base
    os.utime(tmp_path / "a" / "c" / "1" / "0", ns=(10**18, 10**18))
    assert fingerprint(chunked, chunked, {}) != base


def test_the_fingerprint_of_links_in_a_circle_has_an_end(chunked: zarr.Array[Any], tmp_path: Path) -> None:
    folder = tmp_path / "a" / "c"
    for number in range(8):  # paths that go through all of them would be too many
        (folder / "0" / f"up{number}").symlink_to(folder)
        (folder / "1" / f"over{number}").symlink_to("../0")
    base = fingerprint(chunked, chunked, {})
    assert fingerprint(chunked, chunked, {}) == base
    os.utime(folder / "1" / "1", ns=(10**18, 10**18))
    assert fingerprint(chunked, chunked, {}) != base


@pytest.mark.parametrize("lost", ["link", "file", "folder"])
def test_what_vanishes_from_an_input_changes_its_fingerprint(
    lost: str, chunked: zarr.Array[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that leads nowhere, and what goes away while it is looked at, are as good as chunks never written."""
    base, folder = fingerprint(chunked, chunked, {}), tmp_path / "a" / "c"
    if lost == "link":
        (folder / "1" / "0").unlink()
        (folder / "1" / "0").symlink_to("nowhere")
        dangling = fingerprint(chunked, chunked, {})
        assert dangling == fingerprint(chunked, chunked, {}) != base
        return
    scandir = os.scandir

    def vanishing(path: str) -> Any:
        with scandir(path) as listing:
            entries = list(listing)
        if lost == "file" and str(path).endswith("c/1"):
            (folder / "1" / "0").unlink(missing_ok=True)
        if lost == "folder" and str(path).endswith("/a/c"):
            shutil.rmtree(folder / "1", ignore_errors=True)
        return nullcontext(entries)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert fingerprint(chunked, chunked, {}) != base


def test_an_input_that_cannot_be_looked_at_is_named(chunked: zarr.Array[Any], tmp_path: Path) -> None:
    victim = tmp_path / "a" / "c" / "1" / "0"
    victim.unlink()
    victim.symlink_to("0")  # to itself
    with pytest.raises(StoreError, match=r"cannot look at .*a/c/1/0: Too many levels.*read every folder"):
        fingerprint(chunked, chunked, {})


def test_a_record_of_another_version_is_none(plan: MatmulPlan, tmp_path: Path) -> None:
    Ledger(tmp_path, "abc", plan).close()
    path = tmp_path / FILE_NAME
    head = json.loads(path.read_text())
    del head["check"]
    path.write_text(sealed(head | {"version": VERSION - 1}) + "\n")
    assert read_past(tmp_path, "abc") is None


@pytest.mark.parametrize(
    "entry",
    [
        {"til": 3},
        {"tile": -1, "objects": []},
        {"tile": "x", "objects": []},
        {"tile": 1, "objects": None},
        {"tile": 1, "objects": [[0, 0, -1, "00"]]},
        {"tile": 1, "objects": [[0, 0, 1, "no number"]]},
        {"tile": 1, "objects": [], "found": [[1, "x", 0, 0, 0]] * 3},
    ],
)
def test_what_no_line_says_is_no_record(entry: dict[str, Any], plan: MatmulPlan, tmp_path: Path) -> None:
    Ledger(tmp_path, "abc", plan).close()
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes() + f"{sealed(entry)}\n".encode())
    assert read_past(tmp_path, "abc") is None


@pytest.mark.parametrize("head", [b"\xff\xfe", b"", b"[1]", b"5", b"{}", b'{"version": 6}'])
def test_without_its_first_line_a_record_is_none(head: bytes, plan: MatmulPlan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "abc", plan)
    ledger.record(5, tile_of(10))
    ledger.close()
    path = tmp_path / FILE_NAME
    path.write_bytes(head + path.read_bytes()[path.read_bytes().index(b"\n") :])
    assert read_past(tmp_path, "abc") is None


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), flipped=st.integers(0, 7))
def test_a_flipped_bit_costs_no_more_than_its_line(
    place: float, flipped: int, plan: MatmulPlan, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path, "abc", plan)
    tiles = {index: tile_of(100 + index, synced=index % 2 == 0) for index in range(8)}
    for index, stored in tiles.items():
        ledger.record(index, stored)
    ledger.close()
    path = tmp_path / FILE_NAME
    data = bytearray(path.read_bytes())
    at = int(place * len(data))
    data[at] ^= 1 << flipped
    path.write_bytes(data)
    past = read_past(tmp_path, "abc")
    if at <= path.read_bytes().index(b"\n"):
        assert past is None
        return
    assert past is not None
    assert past.finished.items() <= tiles.items(), "what is left says what it said"
    # A flipped end of a line costs the two that it joins.
    assert len(past.finished) >= 6
    assert past.bad_lines >= 1 or at >= len(data) - 1 or len(past.finished) == 7


def test_a_tile_counts_as_on_disk_once_it_was_settled(plan: MatmulPlan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "abc", plan)
    for index in (1, 2, 3):
        ledger.record(index, tile_of(10, synced=False))
    ledger.withdraw(2)
    ledger.settle([1, 2])
    ledger.close()
    past = read_past(tmp_path, "abc")
    assert past is not None
    assert {index: stored.synced for index, stored in past.finished.items()} == {1: True, 3: False}


def test_the_record_of_a_finished_product_is_kept_without_what_was_found(
    plan: MatmulPlan, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path, "abc", plan)
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
    ledger = Ledger(tmp_path, "abc", plan)
    ledger.record(5, tile_of(10))
    ledger.close()
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes() + line + b"\n")
    past = read_past(tmp_path, "abc")
    assert past is not None
    assert past.finished == {5: tile_of(10)}


def test_a_line_without_its_seal_is_left_out(plan: MatmulPlan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "abc", plan)
    ledger.record(5, tile_of(10))
    ledger.close()
    path = tmp_path / FILE_NAME
    path.write_text(path.read_text() + '{"tile": 6}\n')
    past = read_past(tmp_path, "abc")
    assert past is not None
    assert past.finished == {5: tile_of(10)}


def test_a_tile_that_was_withdrawn_counts_once_it_is_stored_again(plan: MatmulPlan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "abc", plan)
    ledger.record(5, tile_of(10))
    ledger.record(6, tile_of(10))
    for index in (2, 5, 6):  # 2: it was stored by the run that finds it damaged, or by nobody
        ledger.withdraw(index)
    ledger.record(6, tile_of(11))
    ledger.close()
    past = read_past(tmp_path, "abc")
    assert past is not None
    assert past.finished == {6: tile_of(11)}


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_record_that_cannot_be_read_now_is_not_taken_for_none(
    number: int, plan: MatmulPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tiles would be removed."""
    Ledger(tmp_path, "abc", plan).close()

    def failing(*arguments: Any, **options: Any) -> str:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", failing)
        match = rf"{FILE_NAME}: {os.strerror(number)}; nothing was removed: .*--no-resume"
        with pytest.raises(StoreError, match=match):
            read_past(tmp_path, "abc")
    assert read_past(tmp_path, "abc") is not None
    assert read_past(tmp_path / "nowhere", "abc") is None
    assert read_past(tmp_path / FILE_NAME, "abc") is None, "there is a file in place of the folder"


def test_a_full_disk_is_named(plan: MatmulPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    ledger = Ledger(tmp_path, "abc", plan)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"record of finished tiles.*No space left"):
        ledger.record(3, tile_of(10))
    ledger.close()
    with pytest.raises(StoreError, match=r"record of finished tiles.*No space left"):
        Ledger(tmp_path, "abc", plan)


def test_pieces_of_larger_tiles_are_read_with_their_group_and_how_they_were_computed(
    plan: MatmulPlan, tmp_path: Path
) -> None:
    earlier = plan.recipe._replace(on_host=not plan.on_host)
    pieces = {index: Stored((), group=Group(2, 3)) for index in (2, 3, 5)}
    Ledger(tmp_path, "abc", plan, pieces, earlier=(earlier, plan.recipe)).close()
    past = read_past(tmp_path, "abc")
    assert past is not None
    assert past.recipes == (earlier, plan.recipe)
    assert past.geometry == plan.geometry
    assert past.finished == pieces
    assert with_their_groups(past.finished, []) == set()
    assert with_their_groups(past.finished, [3]) == {2, 3, 5}
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-9])
    torn = read_past(tmp_path, "abc")
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
    assert read_past(tmp_path, "abc") is None
