"""Inputs are known by their numbers: what only looks otherwise costs no tile, and what is another number is seen."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

import tilewright as tw
from tests.workflows.products import TIGHT, assert_product, numbers, put, stop_at
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.events import Event, Notice, UnitDone
from tilewright.pipeline.product import ledger
from tilewright.pipeline.product import output as outputs

pytestmark = pytest.mark.usefixtures("small_chunks")

Factors = tuple[np.ndarray, np.ndarray, Path, Path]

FINISHED = 12
"""Of the 16 tiles, four in a row: those of the first three rows."""


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def touch(a: Path) -> Path:
    for file in files_of(a):
        os.utime(file)
    return a


def touch_in_the_future(a: Path) -> Path:
    for file in files_of(a):
        os.utime(file, (time.time() + 1e6,) * 2)
    return a


def copy_without_times(a: Path) -> Path:
    """Each file put in place of the old one."""
    for file in files_of(a):
        draft = file.with_name(".draft")
        shutil.copyfile(file, draft)
        draft.replace(file)
    return a


def copy_folder_without_times(a: Path) -> Path:
    shutil.copytree(a, a.with_name("copy"), copy_function=shutil.copyfile)
    shutil.rmtree(a)
    a.with_name("copy").rename(a)
    return a


def link(a: Path) -> Path:
    a.with_name("link.zarr").symlink_to(a)
    return a.with_name("link.zarr")


def move(a: Path) -> Path:
    return a.rename(a.with_name("moved.zarr"))


def add_an_attribute(a: Path) -> Path:
    zarr.open_array(a, mode="r+").attrs["units"] = "m"
    return a


def leave_strays(a: Path) -> Path:
    for name in (
        ".nfs000000012",
        "c/.nfs000000013",
        "c/0/.0.swp",
        "c/0/0~",
        "c/0/0.bak",
        ".DS_Store",
        "notes.txt",
    ):
        (a / name).write_text("x")
    return a


def store_otherwise(a: Path) -> Path:
    """With other chunks, codec and order of bytes, in the other format."""
    data = zarr.open_array(a)[...]
    shutil.rmtree(a)
    return put(a, data.astype(">f4"), (7, 80), zarr_format=2, compressors=None)


QUICKLY_SEEN = [add_an_attribute, leave_strays]
"""What is seen to change no number without a look at the numbers."""
MEANWHILE = [touch, copy_without_times, touch_in_the_future]
BEFORE_THE_NEXT_RUN = [
    touch,
    copy_without_times,
    copy_folder_without_times,
    touch_in_the_future,
    move,
    link,
]
"""What is seen to change none by the numbers."""


def one_after_another(changes: list[Callable[[Path], Path]]) -> Callable[[Path], Path]:
    def change_all(a: Path) -> Path:
        for change in changes:
            a = change(a)
        return a

    return change_all


def each_way(changes: list[Callable[[Path], Path]], *others: Callable[[Path], Path]) -> pytest.MarkDecorator:
    """The changes, and whether they are seen without a look at the numbers: one after another, and, which shows no more
    where that passes, each by itself."""
    cases = [pytest.param(other, False, id=other.__name__) for other in others]
    for quick, some in ((False, changes), (True, QUICKLY_SEEN)):
        together = "quickly seen" if quick else "seen by the numbers"
        cases.append(pytest.param(one_after_another(some), quick, id=together))
        cases += [pytest.param(one, quick, id=one.__name__, marks=pytest.mark.slow) for one in some]
    return pytest.mark.parametrize(("change", "quick"), cases)


def options_with(client: Client) -> dict[str, Any]:
    return {"cluster": client, "device": "cpu", "device_memory": TIGHT, "verify": False}


def told(events: list[Event]) -> str:
    return "\n".join(event.message for event in events if isinstance(event, Notice))


def computed(events: list[Event]) -> int:
    return sum(isinstance(event, UnitDone) and event.name == "matmul" for event in events)


@pytest.mark.sample(2)
@each_way(BEFORE_THE_NEXT_RUN, store_otherwise)
def test_what_changes_no_number_between_two_runs_costs_no_tile(
    change: Callable[[Path], Path],
    quick: bool,
    factors: Factors,
    client: Client,
    tmp_path: Path,
    events: list[Event],
) -> None:
    a, b, a_path, b_path = factors
    options, out = options_with(client), tmp_path / "c.zarr"
    stop_at(FINISHED, a_path, b_path, out, **options)
    run = tw.matmul(change(a_path), b_path, out, listener=events.append, **options)
    assert run.resumed == FINISHED
    assert computed(events) == run.plan.tile_count - FINISHED
    assert_product(zarr.open_array(out)[...], a, b)
    assert ("all of it is the same, and every tile is kept" in told(events)) is not quick
    assert ("A, " in told(events)) is not quick


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("transposed", [(True, True), (True, False), (False, True)])
def test_what_transposed_factors_held_is_known_too(
    transposed: tuple[bool, bool],
    client: Client,
    tmp_path: Path,
    rng: np.random.Generator,
    events: list[Event],
) -> None:
    a, b = numbers(rng, (96, 80), "f4"), numbers(rng, (80, 64), "f4")
    paths = [
        put(tmp_path / f"{name}.zarr", data.T if turned else data, (16, 8))
        for name, data, turned in zip("ab", (a, b), transposed, strict=True)
    ]
    options = options_with(client) | {"transpose_a": transposed[0], "transpose_b": transposed[1]}
    out = tmp_path / "c.zarr"
    stop_at(8, *paths, out, **options)
    for path in paths:
        touch(path)
    run = tw.matmul(*paths, out, listener=events.append, **options)
    assert run.resumed == 8
    assert "of A and B were compared" in told(events)
    assert_product(zarr.open_array(out)[...], a, b)


@pytest.mark.sample(1)
@each_way(MEANWHILE)
def test_what_changes_no_number_during_a_run_does_not_refuse_the_product(
    change: Callable[[Path], Path],
    quick: bool,
    factors: Factors,
    client: Client,
    tmp_path: Path,
    events: list[Event],
) -> None:
    a, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"

    def listener(event: Event) -> None:
        events.append(event)
        if isinstance(event, UnitDone) and computed(events) == 3:
            change(b_path)

    run = tw.matmul(a_path, b_path, out, listener=listener, **options_with(client))
    assert computed(events) == run.plan.tile_count
    assert_product(zarr.open_array(out)[...], a, b)
    assert ("B, " in told(events) and "all of it is the same" in told(events)) is not quick


def change_a_number(path: Path, row: int, column: int) -> None:
    """And put the times back."""
    times = {file: file.stat() for file in files_of(path)}
    array = zarr.open_array(path, mode="r+")
    array[row, column] = 1000
    for file, facts in times.items():
        os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("touched", [False, True])
def test_a_number_changed_under_its_old_time_is_seen_where_read_again(
    touched: bool,
    factors: Factors,
    client: Client,
    tmp_path: Path,
    events: list[Event],
) -> None:
    """The tiles that are left need all of B; with new times of B's other files it is seen before they are computed."""
    a, _, a_path, _ = factors
    b_path = put(tmp_path / "plain.zarr", factors[1], compressors=None)
    options, out = options_with(client), tmp_path / "c.zarr"
    stop_at(FINISHED, a_path, b_path, out, **options)
    change_a_number(b_path, 70, 5)
    if touched:
        os.utime(b_path / "c" / "0" / "0")
    run = tw.matmul(a_path, b_path, out, listener=events.append, **options)
    assert run.resumed == FINISHED - 3, "each row of tiles has one that needs the first columns of B"
    assert computed(events) == run.plan.tile_count - run.resumed
    assert_product(zarr.open_array(out)[...], a, zarr.open_array(b_path)[...])
    text = told(events)
    assert "B holds other numbers in chunk (4, 0) (rows 64 to 79, columns 0 to 15)" in text
    assert ("3 of 12 finished tiles are computed again" in text) is touched
    assert ("3 finished tiles of that run are computed again" in text) is not touched
    assert run.stages["compute"] > 0
    assert run.write_nbytes == 7 * 24 * 16 * 4


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("memory", "role", "place", "lost"),
    [(6_000, "a", (50, 3), 2), (2_000, "b", (3, 5), 3)],
    ids=["smaller tiles", "shallower panels"],
)
def test_a_number_changed_under_its_old_time_is_seen_where_it_is_read_in_other_parts(
    memory: int,
    role: str,
    place: tuple[int, int],
    lost: int,
    factors: Factors,
    client: Client,
    tmp_path: Path,
    events: list[Event],
) -> None:
    """And the tiles that are computed since are known to be of the new one, whatever is compared later."""
    paths = [
        put(tmp_path / f"plain {name}", data, compressors=None)
        for name, data in zip("ab", factors[:2], strict=True)
    ]
    options, out = options_with(client), tmp_path / "c.zarr"
    stop_at(10, *paths, out, **options)
    change_a_number(paths["ab".index(role)], *place)
    options["device_memory"] = memory
    stop_at(1, *paths, out, **options)
    past = ledger.read_record(outputs.partial_path(out) / ledger.FILE_NAME)
    assert past is not None
    pieces = 3
    """Of each tile of the first run."""
    assert len(past.finished) == (10 - lost) * pieces + 1
    for path in paths:
        touch(path)
    run = tw.matmul(*paths, out, listener=events.append, **options)
    assert run.resumed == len(past.finished)
    assert_product(zarr.open_array(out)[...], *(zarr.open_array(path)[...] for path in paths))


def test_only_tiles_that_depend_on_a_changed_number_are_computed_again(
    factors: Factors,
    client: Client,
    tmp_path: Path,
    events: list[Event],
) -> None:
    _, b, a_path, b_path = factors
    options, out = options_with(client), tmp_path / "c.zarr"
    stop_at(FINISHED, a_path, b_path, out, **options)
    zarr.open_array(a_path, mode="r+")[30, 79] = 1000
    run = tw.matmul(a_path, b_path, out, listener=events.append, **options)
    assert run.resumed == FINISHED - 4
    assert_product(zarr.open_array(out)[...], zarr.open_array(a_path)[...], b)
    assert "A holds other numbers in chunk (1, 4) (rows 24 to 31, columns 64 to 79); 4 of 12" in told(events)


@pytest.mark.sample(1)
@pytest.mark.parametrize("then", ["stays", "is put back"])
def test_an_input_changed_during_a_run_keeps_independent_tiles(
    then: str,
    factors: Factors,
    client: Client,
    tmp_path: Path,
    events: list[Event],
) -> None:
    """Also where it is put back with its times: nothing but its numbers says then which tiles are of it."""
    a, _, a_path, b_path = factors
    options, out = options_with(client), tmp_path / "c.zarr"
    shutil.copytree(b_path, tmp_path / "backup")

    def listener(event: Event) -> None:
        events.append(event)
        if isinstance(event, UnitDone) and computed(events) == 6:
            zarr.open_array(b_path, mode="r+")[0, 63] = 1000

    match = r"^B, .*b\.zarr, changed .*\(B holds other numbers in chunk \(0, 3\) \(rows 0 to 15, columns 48 to 63\)\)"
    with pytest.raises(StoreError, match=match):
        tw.matmul(a_path, b_path, out, listener=listener, **options)
    if then == "is put back":
        shutil.copytree(tmp_path / "backup", b_path, dirs_exist_ok=True)
    run = tw.matmul(a_path, b_path, out, **options)
    assert run.resumed >= 4, "of the first six tiles at most two are in the last column"
    assert_product(zarr.open_array(out)[...], a, zarr.open_array(b_path)[...])


def test_a_sum_of_parts_of_k_is_known_by_what_all_parts_read(
    client: Client,
    tmp_path: Path,
    rng: np.random.Generator,
    events: list[Event],
    split_k: None,
) -> None:
    a, b = numbers(rng, (16, 640), "f4"), numbers(rng, (640, 16), "f4")
    a_path, b_path = put(tmp_path / "a.zarr", a), put(tmp_path / "b.zarr", b)
    options, out = options_with(client), tmp_path / "c.zarr"

    def listener(event: Event) -> None:
        events.append(event)
        if isinstance(event, UnitDone):
            touch(a_path)

    run = tw.matmul(a_path, b_path, out, listener=listener, **options)
    assert run.plan.k_parts > 1
    assert "40 KiB of A were compared" in told(events)
    assert_product(zarr.open_array(out)[...], a, b)


def test_tiles_without_a_record_are_computed_again_where_an_input_changed(
    factors: Factors,
    client: Client,
    tmp_path: Path,
    events: list[Event],
) -> None:
    """As where the lines of the record that said so are damaged."""
    a, b, a_path, b_path = factors
    options, out = options_with(client), tmp_path / "c.zarr"
    stop_at(FINISHED, a_path, b_path, out, **options)
    record = outputs.partial_path(out) / ledger.FILE_NAME
    lines = record.read_text().splitlines()
    kept = [line for line in lines if json.loads(line).get("read") != "A"]
    record.write_text("".join(f"{line}\n" for line in kept))
    assert len(kept) < len(lines)
    touch(a_path)
    run = tw.matmul(a_path, b_path, out, listener=events.append, **options)
    assert run.resumed == 0
    assert "of 12 tiles it is not recorded what was read" in told(events)
    assert_product(zarr.open_array(out)[...], a, b)


@pytest.mark.more
def test_tiles_of_another_product_s_inputs_are_all_computed_again(
    factors: Factors,
    client: Client,
    tmp_path: Path,
    events: list[Event],
) -> None:
    a, b, a_path, b_path = factors
    options, out = options_with(client), tmp_path / "c.zarr"
    stop_at(FINISHED, a_path, b_path, out, **options)
    run = tw.matmul(put(tmp_path / "other.zarr", -a), b_path, out, listener=events.append, **options)
    assert run.resumed == 0
    assert "it lies elsewhere" in told(events)
    assert "12 of 12 finished tiles are computed again" in told(events)
    assert_product(zarr.open_array(out)[...], -a, b)


@pytest.mark.more
def test_both_factors_of_a_symmetric_product_are_one_input(
    client: Client,
    tmp_path: Path,
    events: list[Event],
    rng: np.random.Generator,
) -> None:
    x = rng.standard_normal((96, 64)).astype("f4")
    path, out = put(tmp_path / "x.zarr", x, compressors=None), tmp_path / "c.zarr"
    options = options_with(client) | {"transpose_b": True}
    stop_at(8, path, path, out, **options)
    touch(path)
    assert tw.matmul(path, path, out, listener=events.append, **options).resumed == 8
    assert "of A were compared" in told(events)
    shutil.rmtree(out)
    stop_at(8, path, path, out, **options)
    zarr.open_array(path, mode="r+")[0, 0] = 1000
    run = tw.matmul(path, path, out, **options)
    assert 0 < run.resumed < 8
    x[0, 0] = 1000
    assert_product(zarr.open_array(out)[...], x, x.T)
