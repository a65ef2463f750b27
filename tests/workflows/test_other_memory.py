"""A stopped run goes on with any memory, number of workers and kind of device: no finished tile is computed again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster

import tilewright as tw
from tests.workflows.products import (
    TIGHT,
    assert_product,
    intercept_writes,
    numbers,
    put,
    stop_at,
)
from tilewright.pipeline.errors import PlanError
from tilewright.pipeline.events import Caution, Event, Notice, UnitDone, WorkPlanned
from tilewright.pipeline.plan.grid import TileGrid
from tilewright.pipeline.plan.inputs import Geometry
from tilewright.pipeline.product import job, ledger, mend
from tilewright.pipeline.product import output as outputs
from tilewright.pipeline.product.request import Request
from tilewright.pipeline.sealed_lines import sealed

DONE = 12
"""Tiles that the stopped run finishes, of 16 of 24 × 16 in pieces of 8 × 16."""
LESS = 6_000
"""Memory for tiles of a cell each, 8 × 16, so with the same bits."""
LEAST = 2_000
"""Memory for these with shallower panels alone."""


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The first row and column of every stored piece of C that is written."""
    places: list[tuple[int, int]] = []

    def note(top: int, left: int, data: np.ndarray) -> np.ndarray:
        places.append((top, left))
        return data

    intercept_writes(monkeypatch, note)
    return places


def two_factors(rng: np.random.Generator, folder: Path, dtype: str) -> tuple[np.ndarray, ...]:
    a, b = numbers(rng, (96, 80), dtype), numbers(rng, (80, 64), dtype)
    put(folder / "a", a), put(folder / "b", b)
    return a, b


def alter_head(out: Path, **changes: Any) -> None:
    """Change what the record of a stopped run says of its plan."""
    path = outputs.partial_path(out) / ledger.FILE_NAME
    head, *rest = path.read_text().splitlines()
    known = json.loads(head) | changes
    del known["check"]
    path.write_text("".join(f"{line}\n" for line in [sealed(known), *rest]))


def told(events: list[Event]) -> str:
    return "\n".join(event.message for event in events if isinstance(event, Notice))


def assert_only_the_rest_was_computed(
    run: Any, written: list[tuple[int, int]], before: set[tuple[int, int]], unit: tuple[int, int]
) -> None:
    assert not before & set(written), "a piece of a finished tile was computed again"
    assert len(written) == len(set(written)), "a piece was computed twice"
    rows, columns = (range(0, side, step) for side, step in zip((run.plan.m, run.plan.n), unit, strict=True))
    assert before | set(written) == {(row, column) for row in rows for column in columns}


CHANGES: dict[str, tuple[int, dict[str, int], bool, bool]] = {
    "least memory": (LEAST, {}, False, False),
    "more tiles": (TIGHT, {"tilewright.tiles": 200}, True, True),
    "another profile with more memory": (10**6, {}, True, True),
    "another device with less memory": (LESS, {}, False, False),
    "less memory": (LESS, {}, False, True),
    "more memory": (10**6, {}, True, True),
    "fewer tiles": (TIGHT, {"tilewright.tiles": 3}, True, True),
    "another profile": (TIGHT, {}, True, True),
    "another device": (TIGHT, {}, True, False),
}
"""By what changes: the memory, what is set, whether the tiles are those of the earlier run, and whether the bits are
those of one plan. What may change of the inputs is in `test_inputs_by_content.py`."""
BY_ITSELF = [*CHANGES][4:]
"""What changes in the others too, beside something else or the other way round."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["f4", pytest.param("i4", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "change",
    [pytest.param(change, marks=pytest.mark.slow) if change in BY_ITSELF else change for change in CHANGES],
)
def test_twelve_of_twelve_tiles_are_kept(
    change: str,
    dtype: str,
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    rng: np.random.Generator,
    written: list[tuple[int, int]],
) -> None:
    a, b = two_factors(rng, tmp_path, dtype)
    out, events = tmp_path / "c", list[Event]()
    options: dict[str, Any] = {"cluster": client, "device": "cpu"}
    stop_at(DONE, tmp_path / "a", tmp_path / "b", out, device_memory=TIGHT, **options)
    past = recorded(out)
    assert len(past.finished) == DONE
    count = tw.plan_matmul(tmp_path / "a", tmp_path / "b", device="cpu", device_memory=TIGHT).tile_count
    memory, settings, same_tiles, same_bits = CHANGES[change]
    if "device" in change:
        alter_head(out, device="cuda")
    if "profile" in change:
        options["cluster"] = "local"
    before = pieces_of(past, (96, 64))
    written.clear()
    with dask.config.set(settings):
        run = tw.matmul(
            tmp_path / "a", tmp_path / "b", out, device_memory=memory, listener=events.append, **options
        )
    assert f"an earlier run finished {DONE} of {count} tiles" in told(events)
    assert same_tiles is False or run.resumed == DONE
    assert dtype != "f4" or (run.plan.geometry == past.geometry) is same_tiles
    planned = next(event for event in events if isinstance(event, WorkPlanned) and event.name == "matmul")
    assert (planned.done, planned.total) == (run.resumed, run.plan.tile_count)
    assert_only_the_rest_was_computed(run, written, before, past.c_unit)
    assert ("in the last bits" in told(events)) is (dtype == "f4" and not same_bits)
    assert run.verification is not None
    assert run.verification.passed
    assert_product(zarr.open_array(out)[...], a, b)


def recorded(out: Path) -> ledger.Past:
    past = ledger.read_record(outputs.partial_path(out) / ledger.FILE_NAME)
    assert past is not None
    return past


def pieces_of(past: ledger.Past, sides: tuple[int, int], *, symmetric: bool = False) -> set[tuple[int, int]]:
    """The first row and column of every stored piece in the finished tiles."""
    grid = TileGrid.of(sides, past.geometry, symmetric=symmetric)
    return {
        (row, column)
        for tile in grid.tiles(past.finished)
        for rows, columns in grid.regions(tile)
        for row in range(rows.start, rows.stop, past.c_unit[0])
        for column in range(columns.start, columns.stop, past.c_unit[1])
    }


@pytest.mark.more
def test_another_number_of_workers_keeps_all_tiles(
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    rng: np.random.Generator,
    written: list[tuple[int, int]],
) -> None:
    a, b = two_factors(rng, tmp_path, "f4")
    paths, out = (tmp_path / "a", tmp_path / "b"), tmp_path / "c"
    stop_at(DONE, *paths, out, cluster=client, device="cpu", device_memory=TIGHT)
    past = recorded(out)
    before = pieces_of(past, (96, 64))
    written.clear()
    with (
        LocalCluster(n_workers=3, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as own,
    ):
        run = tw.matmul(*paths, out, cluster=own, device="cpu", device_memory=TIGHT, same_bits=True)
    assert run.plan.workers == 3
    assert run.resumed == DONE
    assert run.plan.geometry == past.geometry
    assert_only_the_rest_was_computed(run, written, before, past.c_unit)
    assert_product(zarr.open_array(out)[...], a, b)


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [False, True])
def test_tiles_are_cut_and_cut_again(
    symmetric: bool,
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    rng: np.random.Generator,
    written: list[tuple[int, int]],
) -> None:
    """Each run has less memory than the one before, the last as much as the first: it keeps the smallest tiles."""
    m = 128 if symmetric else 112
    a, b = numbers(rng, (m, 80), "f4"), numbers(rng, (80, 64), "f4")
    put(tmp_path / "a", a, (8, 16)), put(tmp_path / "b", b)
    paths = (tmp_path / "a", tmp_path / "a" if symmetric else tmp_path / "b")
    out, sides = tmp_path / "c", (m, m if symmetric else 64)
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "same_bits": True}
    options["transpose_b"] = symmetric
    memories = (60_000, 20_000, 8_000) if symmetric else (20_000, 15_000, 10_000)
    tiles = [(64, 64), (32, 32), (16, 16)] if symmetric else [(56, 32), (32, 32), (16, 32)]
    plans: list[Geometry] = []
    for memory in memories:
        done = pieces_of(recorded(out), sides, symmetric=symmetric) if plans else set()
        written.clear()
        stop_at(1, *paths, out, device_memory=memory, **options)
        past = recorded(out)
        after = pieces_of(past, sides, symmetric=symmetric)
        assert done < after
        assert not done & set(written)
        plans.append(past.geometry)
    assert [geometry[:2] for geometry in plans] == tiles
    assert plans[-1].within == (() if symmetric else (tiles[0],)), "seven pieces are cut into four and three"
    written.clear()
    run = tw.matmul(*paths, out, device_memory=memories[0], **options)
    assert run.plan.geometry == plans[-1]
    assert_only_the_rest_was_computed(run, written, after, past.c_unit)
    assert_product(zarr.open_array(out)[...], a, a.T if symmetric else b)
    anew = tw.matmul(*paths, tmp_path / "anew", device_memory=memories[0], **options)
    assert anew.plan.geometry == plans[0]
    np.testing.assert_array_equal(zarr.open_array(out)[...], zarr.open_array(tmp_path / "anew")[...])


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("lost", ["nothing", "a piece", "a number of A"])
def test_what_was_found_is_counted_once(
    lost: str, symmetric: bool, client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    """By the larger tiles, or by the smaller ones that are computed in the place of those that lost a piece."""
    a, b = (rng.integers(-99, 99, shape, dtype="i8") for shape in ((96, 80), (80, 64)))
    a[rng.random(a.shape) < 0.1] = -1
    b[rng.random(b.shape) < 0.1] = -1
    for name, data in (("a", a), ("b", b)):
        put(tmp_path / name, data, attributes={"missing_value": -1})
    out, paths = tmp_path / "c", (tmp_path / "a", tmp_path / "a" if symmetric else tmp_path / "b")
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "transpose_b": symmetric}
    stop_at(5, *paths, out, device_memory=40_000 if symmetric else 2 * TIGHT, **options)
    stop_at(2, *paths, out, device_memory=10_000 if symmetric else TIGHT, **options)
    grouped = {index: stored for index, stored in recorded(out).finished.items() if stored.group is not None}
    assert len(grouped) > 1
    if lost == "a number of A":  # that only the first pieces of larger tiles are computed from
        a[0, 0] = -1 if a[0, 0] != -1 else 5
        zarr.open_array(paths[0], mode="r+")[0, 0] = a[0, 0]
    if lost == "a piece":
        past = recorded(out)
        (row, column), *_ = sorted(pieces_of(past, (96, 96 if symmetric else 64)))
        place = row // past.c_unit[0], column // past.c_unit[1]
        (outputs.partial_path(out) / "c" / str(place[0]) / str(place[1])).unlink()
    events: list[Event] = []
    run = tw.matmul(*paths, out, device_memory=TIGHT, listener=events.append, **options)
    assert ("lost stored pieces" in told(events)) is (lost == "a piece")
    assert ("holds other numbers" in told(events)) is (lost == "a number of A")
    assert run.masked == {"A": (a == -1).sum(), "B": ((a if symmetric else b) == -1).sum()}
    np.testing.assert_array_equal(zarr.open_array(out)[...], a @ (a.T if symmetric else b))


@pytest.mark.more
def test_a_damaged_piece_takes_its_larger_tile_with_it(
    client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    a, b = rng.standard_normal((96, 80)).astype("f4"), rng.standard_normal((80, 64)).astype("f4")
    paths = [
        put(tmp_path / name, data, compressors=zarr.codecs.ZstdCodec()) for name, data in (("a", a), ("b", b))
    ]
    out, options = tmp_path / "c", {"cluster": client, "device": "cpu"}
    stop_at(DONE, *paths, out, device_memory=TIGHT, **options)
    chunk = outputs.partial_path(out) / "c" / "0" / "0"
    events: list[Event] = []

    def damage(event: Event) -> None:  # behind the look that a run has at what it keeps
        events.append(event)
        if [one.name for one in events if isinstance(one, WorkPlanned)] == ["matmul", "verify"]:
            chunk.write_bytes(bytes(len(chunk.read_bytes())))

    tw.matmul(*paths, out, device_memory=LESS, listener=damage, **options)  # type: ignore[arg-type]
    assert "1 of 48 tiles is bad" in "\n".join(
        event.message for event in events if isinstance(event, Notice | Caution)
    )
    computed = [event for event in events if isinstance(event, UnitDone) and event.name == "matmul"]
    assert len(computed) == 48 - 3 * DONE + 3
    assert_product(zarr.open_array(out)[...], a, b)


def test_a_wrong_tile_that_was_cut_from_a_larger_one_is_found(
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such tiles do not lie at multiples of their sides."""
    a, b = numbers(rng, (112, 80), "f4"), numbers(rng, (80, 64), "f4")
    paths, out = (put(tmp_path / "a", a, (8, 16)), put(tmp_path / "b", b)), tmp_path / "c"
    options: dict[str, Any] = {"cluster": client, "device": "cpu"}
    stop_at(1, *paths, out, device_memory=20_000, **options)
    spoiled: list[int] = []

    def spoil(top: int, left: int, data: np.ndarray) -> np.ndarray:
        if (top, left) != (104, 48) or spoiled:
            return data
        spoiled.append(top)
        return data + 1

    intercept_writes(monkeypatch, spoil)
    events: list[Event] = []
    run = tw.matmul(*paths, out, device_memory=15_000, listener=events.append, **options)
    assert run.plan.within == ((56, 32),)
    assert run.plan.tile_rows == 32
    told = [event.message for event in events if isinstance(event, Notice | Caution)]
    assert any("1 of 8 tiles is bad" in text and "wrong numbers" in text for text in told), told
    assert_product(zarr.open_array(out)[...], a, b)


@pytest.mark.more
def test_same_bits_refuses_what_one_plan_would_round_otherwise(
    client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    two_factors(rng, tmp_path, "f4")
    paths, out = (tmp_path / "a", tmp_path / "b"), tmp_path / "c"
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "same_bits": True}
    stop_at(DONE, *paths, out, device_memory=TIGHT, **options)
    before = (outputs.partial_path(out) / ledger.FILE_NAME).read_text()
    less = (
        r"8 × 16 at once, by panels of depth 16, on a CPU.*of depth 4, on a CPU.*--device-memory.*--no-resume"
    )
    with pytest.raises(PlanError, match=less):
        tw.matmul(*paths, out, device_memory=LEAST, **options)
    events: list[Event] = []
    job.plan_only(Request(*paths, out, device_memory=LEAST, listener=events.append, **options))
    assert "without --plan-only this would be refused: same_bits" in told(events)
    planned: list[Event] = []
    options["same_bits"] = False
    job.plan_only(Request(*paths, out, device_memory=LEAST, listener=planned.append, **options))
    assert (
        "finished 12 of 16 tiles, which would be kept, and the rest computed in smaller ones of 8 × 16"
        in told(planned)
    )
    options["same_bits"] = True
    alter_head(out, device="cuda")
    with pytest.raises(PlanError, match=r"on a GPU.*on a CPU.*use GPUs as then \(--device\)"):
        tw.matmul(*paths, out, device_memory=TIGHT, **options)
    alter_head(out, device="cpu")
    assert (outputs.partial_path(out) / ledger.FILE_NAME).read_text() == before, "nothing was touched"
    stop_at(1, *paths, out, device_memory=LESS, **options)
    stop_at(1, *paths, out, device_memory=LEAST, **options | {"same_bits": False})
    with pytest.raises(PlanError, match="already of several plans"):
        tw.matmul(*paths, out, device_memory=LEAST, **options)
    assert tw.matmul(*paths, out, device_memory=LEAST, **options, resume=False).resumed == 0


@pytest.mark.more
def test_integers_have_the_same_bits_by_any_plan(
    client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    a, b = two_factors(rng, tmp_path, "i4")
    paths, out = (tmp_path / "a", tmp_path / "b"), tmp_path / "c"
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "same_bits": True}
    stop_at(DONE, *paths, out, device_memory=TIGHT, **options)
    depth = recorded(out).geometry.panel_depth
    run = tw.matmul(*paths, out, device_memory=LEAST, **options)
    assert run.plan.panel_depth < depth
    assert run.resumed >= DONE
    assert_product(zarr.open_array(out)[...], a, b)


@pytest.mark.more
def test_finished_tiles_are_not_given_up_where_their_pieces_do_not_fit(
    client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    a, b = two_factors(rng, tmp_path, "f4")
    paths, out = (tmp_path / "a", tmp_path / "b"), tmp_path / "c"
    options: dict[str, Any] = {"cluster": client, "device": "cpu"}
    stop_at(DONE, *paths, out, device_memory=TIGHT, **options)
    with pytest.raises(PlanError, match=r"no tile fits.*finished 12 tiles of C in such pieces.*--no-resume"):
        tw.matmul(*paths, out, device_memory=600, **options)
    assert tw.matmul(*paths, out, device_memory=TIGHT, **options).resumed == DONE
    assert_product(zarr.open_array(out)[...], a, b)


@pytest.mark.more
def test_a_gpus_tiles_are_checked_as_precisely_as_was_asked_for(
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU that goes on with tiles of tensor cores computes its own in full."""
    a, b = two_factors(rng, tmp_path, "f4")
    paths, out = (tmp_path / "a", tmp_path / "b"), tmp_path / "c"
    options: dict[str, Any] = {
        "cluster": client,
        "device": "cpu",
        "device_memory": TIGHT,
        "precision": "tf32",
    }
    asked: list[str] = []
    verify = mend.verify_product

    def noting(*arguments: Any, precision: str, **others: Any) -> Any:
        asked.append(precision)
        return verify(*arguments, precision=precision, **others)

    monkeypatch.setattr(mend, "verify_product", noting)
    stop_at(3, *paths, out, **options)
    alter_head(out, device="cuda")
    assert tw.matmul(*paths, out, **options).resumed == 3
    tw.matmul(*paths, tmp_path / "d", **options)
    assert asked == ["tf32", "full"]
    assert_product(zarr.open_array(out)[...], a, b)
