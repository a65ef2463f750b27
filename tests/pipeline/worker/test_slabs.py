"""Tiles that are finished slab by slab: what is stored, in which order, and what happens where a slab fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.pipeline.worker.held_contents import assert_contents
from tilewright.pipeline.plan import slabs
from tilewright.pipeline.plan.inputs import Geometry, Limits, StoredMatrix
from tilewright.pipeline.plan.memory import LINE_NBYTES
from tilewright.pipeline.plan.product import MatmulPlan, plan_tiles
from tilewright.pipeline.plan.slabs import SLAB_PANELS, cuts_of, slabs_of
from tilewright.pipeline.plan.told import Product
from tilewright.pipeline.store.arrays import as_stored_matrix
from tilewright.pipeline.worker.compute_stage import ComputeStage
from tilewright.pipeline.worker.panels import Placed
from tilewright.pipeline.worker.stream import TileEngine
from tilewright.pipeline.worker.units import Move, _cells

SIDE, K, DEPTH = 640, 192, 32
"""Two tiles of 320 along each side, in five chunks of 64 each."""

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "LEAST_SLAB_ROWS", 64)


@pytest.fixture
def engine(tmp_path: Path, rng: np.random.Generator) -> Iterator[Callable[..., Any]]:
    """Makes engines that multiply as a GPU's do, on whichever device, and what they multiply."""
    made: list[TileEngine] = []

    def make(
        device: str,
        dtype: str = "f8",
        *,
        symmetric: bool = False,
        chunks: tuple[int, int] = (64, 64),
        cell: int = 320,
        side: int = SIDE,
    ) -> tuple[TileEngine, MatmulPlan, zarr.Array[Any], np.ndarray, list[zarr.Array[Any]]]:
        factors = [rng.standard_normal((side, K)), rng.standard_normal((side, K))]
        if dtype == "i8":
            factors = [np.rint(8 * factor) for factor in factors]
        arrays = []
        for name, factor in zip("xy", factors, strict=True):
            array = zarr.create_array(
                tmp_path / f"{len(made)}{name}", shape=factor.shape, chunks=(64, 32), dtype=dtype
            )
            array[...] = factor
            arrays.append(array)
        x, y = arrays[0], arrays[0] if symmetric else arrays[1]
        c = zarr.create_array(
            tmp_path / f"{len(made)}c", shape=(side, side), chunks=chunks, dtype=dtype, fill_value=7
        )
        plan = plan_tiles(
            as_stored_matrix(x),
            as_stored_matrix(y, transpose=True),
            np.dtype(dtype),
            chunks,
            Limits(1, 10**8, line_nbytes=LINE_NBYTES),
            transpose_b=True,
            symmetric=symmetric,
            keep=Geometry(320, 320, DEPTH, 1, cell, cell),
        )
        plan = replace(plan, read_threads=2, write_threads=2)
        made.append(TileEngine(Product(x, y, c, plan, device, "full", f"slabs-{len(made)}"), "here"))
        wanted = x[...].astype("f8") @ y[...].astype("f8").T
        return made[-1], plan, c, wanted, [x, y]

    yield make
    for one in made:
        one.close()


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i8"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("cell", [320, 192])
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_stored_slab_by_slab(
    device: str, cell: int, symmetric: bool, dtype: str, engine: Any
) -> None:
    worker, plan, c, wanted, arrays = engine(device, dtype, symmetric=symmetric, cell=cell)
    told = [(tile, worker.multiply(tile)) for tile in plan.tiles()]
    tolerance = {"f2": 2e-2, "f4": 1e-3, "f8": 1e-11, "i8": 0}[dtype]
    np.testing.assert_allclose(c[...].astype("f8"), wanted, rtol=tolerance, atol=tolerance)
    assert_contents(told, plan, tuple(arrays))
    stored = sorted(one.place for _, report in told for one in report.stored)
    assert stored == [(i, j) for i in range(10) for j in range(10)]
    assert len(slabs_of(plan, list(plan.tiles())[2])) > 1


def test_where_a_tile_is_one_slab(engine: Any) -> None:
    _, plan, *_ = engine("cpu", symmetric=True)
    diagonal, _, below = plan.tiles()
    assert slabs_of(plan, below) == [slice(first, min(first + 128, 320)) for first in (0, 128, 256)]
    assert slabs_of(plan, diagonal) == [slice(0, 320)]
    assert slabs_of(replace(plan, on_host=True), below) == [slice(0, 320)]
    assert slabs_of(replace(plan, finished=True), below) == [slice(0, 320)]
    _, plan, *_ = engine("cpu", symmetric=True, chunks=(64, 32))
    assert slabs_of(plan, below) == [slice(0, 320)], "whose mirror image is in other chunks"
    _, plan, *_ = engine("cpu", symmetric=True, side=600)
    assert slabs_of(plan, list(plan.tiles())[2]) == [slice(0, 280)], (
        "whose chunks are no squares at the end of C"
    )


def products_of_last_panels(plan: MatmulPlan) -> list[tuple[float, tuple[int, ...], bool]]:
    """What is multiplied at a time: its first element's place in C, its shape, and whether its lower half alone is."""
    found = []
    depth, lines = plan.panel_depth, plan.layout
    for tile in plan.tiles():
        rows, columns = tile.region
        flat = np.empty(tile.rows * lines.c().pitch(tile.columns))
        target = Placed(flat, (tile.rows, tile.columns), lines.c())
        whole = target.cut(slice(0, tile.rows), slice(0, tile.columns))
        whole[...] = np.arange(rows.start, rows.stop)[:, None] * 10_000.0 + np.arange(
            columns.start, columns.stop
        )
        a = Placed(np.empty(tile.rows * depth), (tile.rows, depth), lines.a())
        b = Placed(np.empty(tile.columns * depth), (tile.columns, depth), lines.b())
        for slab in cuts_of(plan, tile.rows):
            for _, _, cell, lower in _cells(plan, a, b, target, plan.on_diagonal(tile), slab):
                found.append((cell[0, 0], cell.shape, lower))
    return sorted(found)


@pytest.mark.parametrize("side", [640, 600])
@pytest.mark.parametrize("symmetric", [True, False])
def test_cells_are_cut_alike_in_tiles_of_any_size(symmetric: bool, side: int) -> None:
    """How many cells a tile has depends on the number of workers, and no bit of C may. At the end of C, and on the
    diagonal, tiles are not stored slab by slab."""
    x = StoredMatrix(side, K, np.dtype("f8"), (64, 32))
    found = []
    for tile in (128, 256, 640):
        plan = plan_tiles(
            x,
            x.transposed,
            x.dtype,
            (64, 64),
            Limits(1, 10**8, line_nbytes=LINE_NBYTES),
            transpose_b=True,
            symmetric=symmetric,
            keep=Geometry(tile, tile, DEPTH, 1, 128, 128),
        )
        assert len(cuts_of(plan, plan.tile_rows)) == tile // 64
        found.append(products_of_last_panels(plan))
    assert len(found[0]) == len(set(found[0]))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("device", DEVICES)
def test_a_tile_has_the_same_bits_whether_its_last_panels_came_at_once(
    device: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, plan, c, _, _ = engine(device)
    tiles, order = list(plan.tiles()), []
    multiply = worker.unit.multiply

    def noting(*args: Any) -> Any:
        order.append(args[-1])
        if order == [None]:
            time.sleep(0.2)  # all that is held is handed on meanwhile
        return multiply(*args)

    rows = slabs_of(plan, tiles[0])
    worker.unit.multiply = noting
    for tile in tiles[:3]:
        worker.multiply(tile)
    order.clear()
    worker.multiply(tiles[3])  # of panels that are held
    first = K // DEPTH - SLAB_PANELS
    assert order == [None] * first + [slab for slab in rows for _ in range(SLAB_PANELS)]
    at_once, c[...] = c[...], 7

    order.clear()
    monkeypatch.setattr(ComputeStage, "_with_the_last", lambda stage, pair, loaded: [pair])
    for tile in tiles:
        worker.multiply(tile)
    assert order[-len(rows) :] == rows
    np.testing.assert_array_equal(c[...], at_once)


@pytest.mark.parametrize("what", ["multiplying", "storing"])
@pytest.mark.parametrize("device", DEVICES)
def test_where_a_slab_fails_the_tile_does_and_the_next_does_not(device: str, what: str, engine: Any) -> None:
    worker, plan, c, wanted, _ = engine(device, symmetric=True)
    tile = list(plan.tiles())[2]
    name = {"multiplying": "multiply", "storing": "save"}[what]
    call, calls = getattr(worker.unit, name), []

    def failing(*args: Any) -> frozenset[str] | Move:
        calls.append(args)
        second = args[-1] is not None and args[-1].start > 0 if what == "multiplying" else len(calls) == 7
        if second:
            raise RuntimeError("the second slab")
        return call(*args)

    setattr(worker.unit, name, failing)
    with pytest.raises(RuntimeError, match="the second slab"):
        worker.multiply(tile)
    setattr(worker.unit, name, call)
    worker.multiply(tile)
    np.testing.assert_allclose(c[tile.region], wanted[tile.region], rtol=1e-11, atol=1e-11)
