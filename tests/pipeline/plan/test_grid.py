"""Tiles that are cut into smaller ones: no old tile lies in two new ones, whatever the sides and the memory."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from itertools import chain, pairwise
from random import Random
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tilewright.pipeline.errors import PlanError
from tilewright.pipeline.plan import tiling
from tilewright.pipeline.plan.grid import Cuts, Tile, TileGrid, nest
from tilewright.pipeline.plan.inputs import Geometry, Limits, StoredMatrix
from tilewright.pipeline.plan.memory import LINE_NBYTES
from tilewright.pipeline.plan.product import MatmulPlan, plan_tiles

F4 = np.dtype("f4")

strides = st.lists(st.integers(1, 60), min_size=1, max_size=4).map(
    lambda each: tuple(sorted(each, reverse=True))
)


def cut(length: int, strides: tuple[int, ...]) -> list[int]:
    """Where stretches begin, one at a time."""
    if not strides:
        return [0] if length else []
    return [
        start + inner
        for start in range(0, length, strides[0])
        for inner in cut(min(strides[0], length - start), strides[1:])
    ]


@given(st.integers(0, 200), strides)
def test_a_side_is_cut_stretch_by_stretch(length: int, strides: tuple[int, ...]) -> None:
    cuts, expected = Cuts(length, strides), cut(length, strides)
    assert cuts.starts() == [*expected, length]
    assert cuts.count == len(expected)
    assert [cuts.start(place) for place in range(cuts.count + 1)] == [*expected, length]
    for place, (start, stop) in enumerate(pairwise(cuts.starts())):
        assert {cuts.place(element) for element in range(start, stop)} == {place}


@given(st.tuples(st.integers(0, 150), st.integers(0, 150)), st.tuples(strides, strides))
def test_larger_tiles_whose_cuts_follow_are_left_out(
    sides: tuple[int, int], strides: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    levels = list(zip(*strides, strict=False))
    kept = nest(sides, levels[:-1], levels[-1])
    assert set(kept) <= set(levels)
    for axis, side in enumerate(sides):
        every, few = (tuple(level[axis] for level in each) for each in (levels, [*kept, levels[-1]]))
        assert Cuts(side, few).starts() == Cuts(side, every).starts()
    halves = [(each[0] * 2, each[1] * 2) for each in levels[-1:]]
    assert nest(sides, halves, levels[-1]) == (), "a grid as any other"


def plan_of(
    sides: tuple[int, int, int],
    units: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
    limits: Limits,
    keep: Geometry | None = None,
    *,
    symmetric: bool,
) -> MatmulPlan:
    m, n, k = sides
    a = StoredMatrix(m, k, F4, units[0])
    b = a.transposed if symmetric else StoredMatrix(k, n, F4, units[1])
    return plan_tiles(a, b, F4, units[2], limits, transpose_b=symmetric, symmetric=symmetric, keep=keep)


unit = st.tuples(st.integers(1, 15), st.integers(1, 15))
shares = st.floats(0.05, 0.95)


@pytest.mark.sample(2)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("on_host", [False, True])
@given(
    st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 60)),
    st.tuples(unit, unit, unit),
    st.integers(1, 9),
    st.integers(500, 60_000),
    st.lists(shares, min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_earlier_tiles_are_whole_new_ones_and_none_is_computed_twice(
    symmetric: bool,
    on_host: bool,
    sides: tuple[int, int, int],
    units: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
    workers: int,
    nbytes: int,
    less: list[float],
    chance: Random,
) -> None:
    """Through several runs, each with less memory than the one before it, of which each computes some tiles."""
    if symmetric:
        sides = (sides[0], sides[0], sides[2])
    m, n, _ = sides
    line_nbytes = 1 if on_host else LINE_NBYTES
    limits = Limits(workers, nbytes, panel_nbytes=5000, line_nbytes=line_nbytes, on_host=on_host)
    computed, looked_a, looked_b = (np.zeros(shape, int) for shape in ((m, n), m, n))
    with mock.patch.multiple(tiling, TILE_OPERATIONS=10**4, SPLIT_NBYTES=10**4):
        try:
            plans = [plan_of(sides, units, limits, symmetric=symmetric)]
        except PlanError:
            assume(False)
        for share in less:
            limits = replace(limits, device_nbytes=int(share * limits.device_nbytes))
            try:
                plans.append(plan_of(sides, units, limits, plans[-1].geometry, symmetric=symmetric))
            except PlanError:
                # No other plan fits in such stored pieces either; but padding may leave room for other tiles.
                with pytest.raises(PlanError) if on_host else suppress(PlanError):
                    plan_of(sides, units, limits, symmetric=symmetric)
                break
            assert plans[-1].device_peak_nbytes <= limits.device_nbytes
    finished: set[int] = set()
    before = plans[0]
    for run, plan in enumerate(plans):
        grid = plan.tile_grid
        assert grid.refines(before.tile_grid)
        assert not symmetric or all(tile.rows <= tile.columns for tile in plan.tiles()), (
            "its mirror image fits beside it"
        )
        assert [grid.index(tile.i, tile.j) for tile in plan.tiles()] == list(range(plan.tile_count))
        positions = np.stack(grid.positions(), axis=1).tolist()
        assert positions == [[tile.i, tile.j] for tile in plan.tiles()]
        for tile in plan.tiles():
            regions = plan.regions(tile)
            corners = {(rows.start, columns.start) for rows, columns in regions}
            corners |= {(rows.stop - 1, columns.stop - 1) for rows, columns in regions}
            assert {grid.holding(*corner) for corner in corners} == {tile.index}
        if plan.geometry != before.geometry:
            tiles = list(plan.tiles())
            pieces = [grid.inside(tile) for tile in before.tiles()]
            assert sorted(chain(*pieces)) == list(range(plan.tile_count)), "each tile is a piece of one"
            for tile, indices in zip(before.tiles(), pieces, strict=True):
                ours = stored_by(plan, [tiles[index] for index in indices], units[2])
                assert ours == stored_by(before, [tile], units[2])
            finished = {piece for index in finished for piece in pieces[index]}
        left = [tile for tile in plan.tiles() if tile.index not in finished]
        last = run == len(plans) - 1
        now = left if last else [tile for tile in left if chance.random() < 0.5]
        for tile in now:
            for rows, columns in plan.regions(tile):
                computed[rows, columns] += 1
            look_a, look_b = plan.looks(tile)
            looked_a[tile.row_start : tile.row_stop] += look_a
            looked_b[tile.column_start : tile.column_stop] += look_b
        finished |= {tile.index for tile in now}
        before = plan
    assert (computed == 1).all()
    assert (looked_a == 1).all()
    assert (looked_b == (0 if symmetric else 1)).all()


def stored_by(plan: MatmulPlan, tiles: list[Tile], c_unit: tuple[int, int]) -> list[tuple[int, int]]:
    """The stored pieces of C that some tiles write, each as often as it is written; whole ones all."""
    pieces = []
    for tile in tiles:
        for region in plan.regions(tile):
            for part, side, unit in zip(region, (plan.m, plan.n), c_unit, strict=True):
                assert part.start % unit == 0
                assert part.stop % unit == 0 or part.stop == side
            rows, columns = (
                range(part.start // unit, math.ceil(part.stop / unit))
                for part, unit in zip(region, c_unit, strict=True)
            )
            pieces += [(row, column) for row in rows for column in columns]
    return sorted(pieces)


def test_a_tile_of_a_prime_number_of_pieces_is_cut_into_nearly_equal_ones() -> None:
    """Rather than into tiles of one piece each, which read seven times as much."""
    a = StoredMatrix(14 * 64, 1000, F4, (64, 100))
    c_unit = (64, 64)
    keep = Geometry(7 * 64, 7 * 64, 100, 1, 7 * 64, 7 * 64)
    limits = Limits(1, 4 * (4 * 64) ** 2 + 4 * 4 * 100 * 4 * 64, panel_nbytes=1)
    plan = plan_tiles(a, a.transposed, F4, c_unit, limits, keep=keep)
    assert (plan.tile_rows, plan.tile_columns) == (4 * 64, 4 * 64)
    assert plan.within == ((7 * 64, 7 * 64),)
    assert [start // 64 for start in plan.tile_grid.rows.starts()] == [0, 4, 7, 11, 14]
    assert plan.tile_count == 16
    assert "cut from an earlier run's of 448 × 448" in str(plan)
    assert plan.to_json()["within"] == ((448, 448),)


def test_tiles_that_divide_earlier_ones_make_a_grid_like_any_other() -> None:
    a = StoredMatrix(1024, 1000, F4, (64, 100))
    keep = Geometry(512, 256, 100, 1, 512, 256)
    plan = plan_tiles(a, a.transposed, F4, (64, 64), Limits(1, 700_000, panel_nbytes=1), keep=keep)
    assert (plan.tile_rows, plan.tile_columns) == (256, 256)
    assert plan.within == ()
    assert plan.tile_grid == TileGrid.of((1024, 1024), Geometry(*plan.geometry[:6]))


def test_an_empty_c_has_no_tiles_to_cut() -> None:
    a = StoredMatrix(0, 10, F4, (5, 5))
    first = plan_tiles(a, a.transposed, F4, (5, 5), Limits(1, 10**6))
    again = plan_tiles(a, a.transposed, F4, (5, 5), Limits(1, 10**6), keep=first.geometry)
    assert first.geometry == again.geometry
    assert list(again.tiles()) == []
