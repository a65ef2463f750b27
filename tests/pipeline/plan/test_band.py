"""Plans of a band of C, as arithmetic: each element of the band once, no tile beside it, honest figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.pipeline.plan.test_triangle import read_by_workers
from tilewright.pipeline.errors import PlanError
from tilewright.pipeline.plan.band import Band
from tilewright.pipeline.plan.band_tiling import band_chunks
from tilewright.pipeline.plan.grid import Cuts, TileGrid
from tilewright.pipeline.plan.inputs import Geometry, Limits, StoredMatrix
from tilewright.pipeline.plan.product import MatmulPlan, plan_tiles
from tilewright.pipeline.product.placement import divide

F4 = np.dtype("f4")

sides = st.integers(1, 60)
bands = st.builds(Band, st.integers(0, 70), st.integers(0, 70))


def mask(m: int, n: int, band: Band) -> np.ndarray:
    """Which elements of C are in the band."""
    rows, columns = np.indices((m, n))
    return (columns - rows >= -band.before) & (columns - rows <= band.after)


@given(sides, sides, bands, st.data())
def test_what_lies_in_a_band_is_what_a_mask_says(m: int, n: int, band: Band, data: st.DataObject) -> None:
    inside = mask(m, n, band)
    top, left = data.draw(st.integers(0, m)), data.draw(st.integers(0, n))
    region = slice(top, data.draw(st.integers(top, m))), slice(left, data.draw(st.integers(left, n)))
    assert band.touches(region) == inside[region].any()
    assert not inside[region].size or band.holds(region) == inside[region].all()
    for row in range(m):
        assert np.flatnonzero(inside[row]).tolist() == [*range(n)][band.columns(row, n)]
    unit = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    stored = sum(
        inside[i : i + unit[0], j : j + unit[1]].size
        for i in range(0, m, unit[0])
        for j in range(0, n, unit[1])
        if inside[i : i + unit[0], j : j + unit[1]].any()
    )
    assert band.area((slice(0, m), slice(0, n)), unit) == stored
    block = np.ones((m, n), int)
    band.clear_outside(block, 0, 0)
    np.testing.assert_array_equal(block, inside)


@given(sides, sides, bands, st.integers(1, 20), st.sampled_from([1, 2, 3]), st.booleans())
def test_the_tiles_are_those_that_touch_the_band(
    m: int, n: int, band: Band, side: int, halved: int, symmetric: bool
) -> None:
    """Also of tiles that were cut from larger ones, each once, in the order of their indices."""
    if symmetric:
        n, band = m, Band(band.before, band.before)
    geometry = Geometry(side, side, 1, 1, side, side, ((side * halved + side // 2,) * 2,))
    whole = TileGrid.of((m, n), geometry, symmetric=symmetric)
    grid = replace(whole, band=band)
    tiles = list(grid.tiles())
    assert [tile.index for tile in tiles] == list(range(grid.count))
    assert [grid.index(tile.i, tile.j) for tile in tiles] == list(range(grid.count))
    assert {(tile.i, tile.j) for tile in tiles} == {
        (tile.i, tile.j) for tile in whole.tiles() if band.touches(tile.region)
    }
    for tile in tiles:
        assert grid.holding(tile.row_start, tile.column_start) == tile.index
        assert list(grid.tiles([tile.index])) == [tile]
    outer = TileGrid.of(
        (m, n),
        geometry._replace(tile_rows=geometry.within[0][0], tile_columns=geometry.within[0][0], within=()),
        symmetric=symmetric,
        band=band,
    )
    assert grid.refines(outer)
    pieces = [index for tile in outer.tiles() for index in grid.inside(tile)]
    assert sorted(pieces) == list(range(grid.count))


def plan_of(
    m: int, n: int, k: int, band: Band, limits: Limits, unit: int, *, symmetric: bool, **options: Any
) -> MatmulPlan:
    a = StoredMatrix(m, k, F4, (7, 5), True)
    b = a.transposed if symmetric else StoredMatrix(k, n, F4, (5, 9), True)
    return plan_tiles(
        a, b, F4, (unit, unit), limits, transpose_b=symmetric, symmetric=symmetric, band=band, **options
    )


limits = st.builds(
    Limits,
    workers=st.sampled_from([1, 1, 2, 5]),
    device_nbytes=st.sampled_from([3_000, 9_000, 30_000, 10**8]),
    on_host=st.booleans(),
    panel_nbytes=st.sampled_from([200, 2_000, 10**6]),
    tiles=st.sampled_from([1, 16]),
)


@settings(max_examples=100)
@given(sides, sides, st.integers(0, 40), bands, limits, st.integers(1, 12), st.booleans())
def test_a_plan_counts_what_its_tiles_are(
    m: int, n: int, k: int, band: Band, limits: Limits, unit: int, symmetric: bool
) -> None:
    if symmetric:
        n, band = m, Band(band.before, band.before)
    try:
        plan = plan_of(m, n, k, band, limits, unit, symmetric=symmetric)
    except PlanError:
        assume(False)
    tiles = list(plan.tiles())
    assert plan.k_parts == 1
    assert plan.tile_count == len(tiles)
    assert plan.operations == sum(map(plan.tile_operations, tiles))
    assert plan.write_nbytes == sum(map(plan.tile_write_nbytes, tiles))
    assert plan.device_peak_nbytes <= limits.device_nbytes
    assert plan.bound_nbytes <= plan.read_nbytes
    given = np.zeros((m, n), int)
    for tile in tiles:
        for region in plan.regions(tile):
            given[region] += 1
    assert given.max(initial=0) <= 1
    assert (given[mask(m, n, band)] == 1).all()
    # Each row of A that any tile needs is looked at by one tile, and each column of B.
    for operand, axis in ((0, "i"), (1, "j")):
        looking = [getattr(tile, axis) for tile in tiles if plan.looks(tile)[operand]]
        wanted = {getattr(tile, axis) for tile in tiles} if not (symmetric and operand) else set()
        assert sorted(looking) == sorted(wanted)
    shares = divide(plan, tiles, limits.workers)
    assert sorted(tile.index for share in shares for tile in share) == list(range(len(tiles)))
    assert read_by_workers(plan, limits.workers) <= plan.read_nbytes
    if plan.tile_rows > unit and max(plan.tile_rows, plan.tile_columns) < max(m, n):
        _check_cut_finer(plan, limits, band, unit, symmetric=symmetric)


def _check_cut_finer(plan: MatmulPlan, limits: Limits, band: Band, unit: int, *, symmetric: bool) -> None:
    """With less memory each tile is cut into smaller ones, and what looked once looks once."""
    less = replace(limits, device_nbytes=plan.device_peak_nbytes // 2)
    try:
        finer = plan_of(plan.m, plan.n, plan.k, band, less, unit, symmetric=symmetric, keep=plan.geometry)
    except PlanError:
        return
    assert finer.tile_grid.refines(plan.tile_grid)
    for tile in plan.tiles():
        inside = set(plan_pieces(finer, plan, tile.index))
        looks = [finer.looks(piece) for piece in finer.tile_grid.tiles(sorted(inside))]
        for operand in (0, 1):
            assert plan.looks(tile)[operand] or not any(look[operand] for look in looks)


def plan_pieces(finer: MatmulPlan, plan: MatmulPlan, index: int) -> list[int]:
    (tile,) = plan.tile_grid.tiles([index])
    return finer.tile_grid.inside(tile)


def test_a_narrow_band_of_a_large_product_takes_little() -> None:
    """Of 100,000 variables, each with the 500 before and behind it: tiles of about the band's width, a hundredth of the
    arithmetic, and each column read once by a GPU that has room for its neighbours."""
    x = StoredMatrix(100_000, 5_000, np.dtype("i1"), (1000, 1000), False)
    band = Band(500, 500)
    unit = band_chunks((2000, 2000), band)
    assert unit == (1000, 1000)
    limits = Limits(1, 4 * 2**30)
    plan = plan_tiles(
        x, x.transposed, np.dtype("i4"), unit, limits, transpose_b=True, symmetric=True, band=band
    )
    assert plan.tile_rows == 1000
    assert plan.operations < 0.03 * x.rows * (x.rows + 1) * x.columns
    assert plan.read_nbytes == x.nbytes
    assert plan.decoded_nbytes == x.nbytes
    assert plan.bound_nbytes == x.nbytes
    assert "500 columns before the diagonal to 500 behind it" in str(plan)
    whole = plan_tiles(x, x.transposed, np.dtype("i4"), unit, limits, transpose_b=True, symmetric=True)
    assert plan.write_nbytes < 0.04 * whole.write_nbytes


@pytest.mark.parametrize(
    ("sides", "symmetric"), [((300, 300), True), ((300, 170), False), ((90, 300), False)]
)
def test_the_cuts_do_not_depend_on_the_workers(sides: tuple[int, int], symmetric: bool) -> None:
    found = {
        plan_of(*sides, 40, Band(20, 20), Limits(workers, 60_000, tiles=16), 8, symmetric=symmetric).geometry
        for workers in (1, 2, 3, 8, 16)
    }
    assert len(found) == 1


def test_cuts_of_a_band_are_squares() -> None:
    plan = plan_of(200, 90, 40, Band(30, 4), Limits(1, 20_000), 8, symmetric=False)
    assert plan.tile_rows == plan.tile_columns
    assert Cuts(200, (plan.tile_rows,)).starts()[:4] == Cuts(90, (plan.tile_columns,)).starts()[:4]
