"""Plans of symmetric products, as arithmetic: each element once, square tiles of whole pieces, honest figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline.errors import PlanError
from tilewright.pipeline.plan import tiling
from tilewright.pipeline.plan.grid import Tile, triangle_area, triangle_count, triangle_position
from tilewright.pipeline.plan.inputs import Geometry, Limits, StoredMatrix
from tilewright.pipeline.plan.memory import LINE_NBYTES
from tilewright.pipeline.plan.product import MatmulPlan, plan_tiles
from tilewright.pipeline.product.placement import Placement, divide
from tilewright.pipeline.worker.panels import PanelCache

F4, F8 = np.dtype("f4"), np.dtype("f8")


def plan_of(x: StoredMatrix, c_unit: tuple[int, int], limits: Limits, **options: object) -> MatmulPlan:
    """Of X Xᵀ, stored as it is."""
    return plan_tiles(x, x.transposed, x.dtype, c_unit, limits, transpose_b=True, symmetric=True, **options)  # type: ignore[arg-type]


def read_by_workers(plan: MatmulPlan, workers: int) -> int:
    """Bytes that workers read who take the tiles in turns, each with the panels that the plan lets it hold."""
    read = 0
    for worker in range(workers):
        held = PanelCache(plan.a_buffers, object), PanelCache(plan.b_buffers, object)
        if plan.shares_panels:
            held = held[0], held[0]
        for tile in list(plan.tiles())[worker::workers]:
            for part in range(plan.k_tasks):
                for start, stop in plan.panels(part):
                    sides = [(tile.i, tile.rows), (tile.j, tile.columns)]
                    for cache, (place, side) in zip(held, sides[: 2 - (tile.i == tile.j)], strict=False):
                        buffer, there = cache.take((place, start))
                        cache.let_go(buffer)
                        read += 0 if there else side * (stop - start) * np.dtype(plan.a_dtype).itemsize
    return read


@given(st.integers(1, 60))
def test_the_walk_meets_every_tile_once(grid: int) -> None:
    walk = [triangle_position(index) for index in range(triangle_count(grid))]
    assert sorted(walk) == [(i, j) for i in range(grid) for j in range(i + 1)]
    for (i, j), (next_i, next_j) in pairwise(walk):
        assert i == next_i or j == next_j == 0 or (i == j and next_i == next_j == i + 1)


@given(st.integers(0, 200), st.integers(1, 60))
def test_the_area_is_that_of_the_tiles(side: int, tile: int) -> None:
    blocks = [min(tile, side - start) for start in range(0, side, tile)]
    assert triangle_area(side, tile) == sum(
        blocks[i] * blocks[j] for i in range(len(blocks)) for j in range(i + 1)
    )


@pytest.mark.parametrize("operations", [tiling.TILE_OPERATIONS, 10**4])
@given(
    st.integers(0, 200),
    st.integers(0, 200),
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
    st.tuples(st.integers(1, 30), st.integers(1, 30)),
    st.integers(1, 7),
    st.integers(200, 10**6),
    st.booleans(),
)
def test_every_plan_covers_everything_once_and_fits(
    operations: int,
    n: int,
    k: int,
    x_unit: tuple[int, int],
    c_unit: tuple[int, int],
    workers: int,
    nbytes: int,
    plain: bool,
) -> None:
    """operations: as few make so small a product worth cutting into several tiles, and k into parts, as a large one."""
    x = StoredMatrix(n, k, F4, x_unit, plain)
    limits = Limits(workers=workers, device_nbytes=nbytes, panel_nbytes=5000, line_nbytes=LINE_NBYTES)
    unit = max(1, min(math.lcm(*c_unit), n))
    with mock.patch.multiple(tiling, TILE_OPERATIONS=operations, SPLIT_NBYTES=operations):
        try:
            plan = plan_of(x, c_unit, limits)
        except PlanError:
            panels = 2 * unit * 4 if unit == n else 4 * unit * 4
            smallest = unit * unit * 4 + panels
            assert smallest + 5 * LINE_NBYTES * (unit + 1) > nbytes, "the smallest tile fits, and was refused"
            return
        on_host = plan_of(x, c_unit, replace(limits, on_host=True, line_nbytes=1))
    assert plan.symmetric
    assert plan.device_peak_nbytes <= nbytes
    for planned in (plan, on_host):
        check_cover(planned, c_unit)
        found = read_by_workers(planned, workers)
        exact = workers == 1 and planned.k_parts == 1
        assert found == planned.read_nbytes if exact else found <= planned.read_nbytes
        assert planned.read_nbytes <= sum(planned.tile_read_nbytes(tile) for tile in planned.tiles())
        assert planned.decoded_nbytes >= planned.read_nbytes
        assert planned.bound_nbytes <= max(planned.read_nbytes, 1)
        assert not planned.grid[0] or planned.read_nbytes >= x.nbytes


def check_cover(plan: MatmulPlan, c_unit: tuple[int, int]) -> None:
    """Every element is stored once, in whole stored pieces, from square cells."""
    n, k = plan.n, plan.k
    written = np.zeros((n, n), int)
    computed = np.zeros((n, n), int)
    stored: set[tuple[int, int]] = set()
    for tile in plan.tiles():
        assert tile.i >= tile.j
        regions = plan.regions(tile)
        assert len(regions) == (1 if tile.i == tile.j else 2)
        for rows, columns in regions:
            written[rows, columns] += 1
            for side, part, unit in zip((n, n), (rows, columns), c_unit, strict=True):
                assert part.start % unit == 0, "a stored piece is cut"
                assert part.stop % unit == 0 or part.stop == side, "a stored piece is cut"
            pieces = {
                (row, column)
                for row in range(rows.start // c_unit[0], ceil_div(rows.stop, c_unit[0]))
                for column in range(columns.start // c_unit[1], ceil_div(columns.stop, c_unit[1]))
            }
            assert not stored & pieces, "two regions share a stored piece"
            stored |= pieces
        for rows, columns in plan.cells(tile.rows, tile.columns):
            assert rows.start % plan.cell_rows == columns.start % plan.cell_rows == 0
            if tile.i != tile.j or columns.start <= rows.start:
                row, column = tile.row_start, tile.column_start
                computed[
                    row + rows.start : row + rows.stop, column + columns.start : column + columns.stop
                ] += 1
    assert (written == 1).all()
    assert (np.tril(computed) == np.tril(np.ones((n, n), int))).all(), (
        "every element is computed once, below the diagonal"
    )
    assert plan.tile_rows == plan.tile_columns
    assert plan.cell_rows == plan.cell_columns
    assert plan.tile_rows % plan.cell_rows == 0 or plan.tile_rows == n
    assert plan.cell_rows % c_unit[0] == plan.cell_rows % c_unit[1] == 0 or plan.cell_rows == n or n == 0
    tiles = list(plan.tiles())
    assert [tile.index for tile in tiles] == list(range(plan.tile_count))
    item = np.dtype(plan.c_dtype).itemsize
    assert sum(map(plan.tile_write_nbytes, tiles)) == plan.write_nbytes == n * n * item
    assert sum(map(plan.tile_operations, tiles)) == plan.operations == n * (n + 1) * k
    a = np.dtype(plan.a_dtype).itemsize
    assert sum(map(plan.tile_read_nbytes, tiles)) == plan.grid[0] * n * k * a, (
        "each block with each, and the diagonal"
    )


@pytest.mark.sample(75)
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("spare", [0, 10, 40, 70, 90, 130, 300])
@pytest.mark.parametrize("panels", [1, 2, 4])
@pytest.mark.parametrize("grid", [1, 2, 3, 6, 7])
def test_memory_that_is_left_over_holds_panels(grid: int, panels: int, spare: int, workers: int) -> None:
    """With so many units of 16 × 16 floats beside what tiles of 64 × 64 and panels of 16 need; the last is narrower."""
    x = StoredMatrix(64 * grid - 5, 16 * panels, F4, (16, 16))
    unit = 16 * 16 * 4
    limits = Limits(workers, (2 * 16 + 4 * 4 + spare) * unit)
    plan = plan_of(x, (64, 64), limits, keep=Geometry(64, 64, 16, 1, 64, 64))
    assert plan.grid == (grid, grid)
    assert plan.device_peak_nbytes <= limits.device_nbytes
    assert plan.device_peak_nbytes == (16 * plan.c_buffers + 4 * (plan.a_buffers + plan.b_buffers)) * unit
    whole = (grid * panels - 4) * 4 <= spare
    assert plan.shares_panels == (grid == 1 or (whole and panels > 0)), "A's panels serve as B's"
    found = read_by_workers(plan, workers)
    assert found == plan.read_nbytes if workers == 1 else found <= plan.read_nbytes
    if spare == 300 and workers == 1 and grid > 1:
        assert plan.read_nbytes == x.rows * x.columns * 4, "once"


def test_a_kept_geometry_must_be_square_and_of_whole_pieces() -> None:
    x = StoredMatrix(120, 48, F4, (12, 12))
    limits = Limits(1, 10**6)
    square = Geometry(24, 24, 12, 1, 24, 24)
    assert plan_of(x, (8, 12), limits, keep=square).geometry == square
    for keep in (
        Geometry(24, 48, 12, 1, 24, 24),
        Geometry(48, 48, 12, 1, 48, 24),
        Geometry(36, 36, 12, 1, 36, 36),
    ):
        plan = plan_of(x, (8, 12), limits, keep=keep)
        assert plan.geometry != keep
        check_cover(plan, (8, 12))
    short = replace(limits, device_nbytes=24 * 24 * 4)
    with pytest.raises(PlanError, match=r"no tile fits"):
        plan_of(x, (8, 12), short, keep=square)


def test_odd_pieces_of_c_are_refused_only_where_their_square_does_not_fit() -> None:
    x = StoredMatrix(1000, 40, F4, (100, 40))
    limits = Limits(1, 60_000)
    assert plan_of(x, (30, 20), limits).tile_rows == 60
    with pytest.raises(PlanError) as caught:
        plan_of(x, (70, 60), limits)
    text = str(caught.value)
    assert (
        "the smallest, 420 × 420 (square, since C is symmetric, of whole stored pieces of C, 70 × 60)" in text
    )
    assert "105 × 105 and smaller ones fit" in text
    assert plan_of(x, (105, 105), limits).tile_rows == 105
    # Where C is no larger than that square, it is one tile.
    whole = StoredMatrix(100, 40, F4, (100, 40))
    assert plan_of(whole, (70, 60), limits).grid == (1, 1)


@given(
    st.integers(1, 10**5),
    st.integers(1, 10**5),
    st.integers(1, 10**4),
    st.integers(10, 36),
    st.sampled_from([1, 4, 16]),
)
def test_a_c_of_our_own_has_square_chunks(n: int, k: int, unit: int, exponent: int, itemsize: int) -> None:
    x = StoredMatrix(n, k, F4, (unit, 7))
    side, other = tiling.output_chunks(x, x.transposed, itemsize, 2**exponent, square=True)
    assert side == other
    most = max(tiling.SMALL_CHUNK_NBYTES, min(tiling.MOST_CHUNK_NBYTES, 2**exponent // 8))
    assert side * side * itemsize <= most
    assert side <= n
    least = min(tiling.LEAST_CHUNK_NBYTES, most)
    assert side == n or 4 * side * side * itemsize >= least // 4


def test_the_bound_is_that_of_a_symmetric_product() -> None:
    """n²k/sqrt(2M): 0.707 of half a product's. Square tiles read at most sqrt(2) times that, where they fill memory."""
    side, nbytes = 100_000, 2**30
    x = StoredMatrix(side, side, F4, (500, 500), plain=True)
    limits = Limits(1, nbytes)
    plan = plan_of(x, (500, 500), limits)
    other = plan_tiles(x, x.transposed, F4, (500, 500), limits, transpose_b=True)
    assert plan.bound_nbytes == pytest.approx(side**3 / math.sqrt(2 * nbytes / 4) * 4, rel=1e-6)
    assert plan.bound_nbytes == pytest.approx(other.bound_nbytes / math.sqrt(8), rel=1e-6)
    assert 1 <= plan.read_ratio < 1.1 * math.sqrt(2) * other.read_ratio
    assert plan.read_nbytes < 0.55 * other.read_nbytes
    assert plan.operations == side * (side + 1) * side
    text = str(plan)
    assert f"the {plan.tile_count} on and below the diagonal computed and mirrored" in text
    assert "n²k/√(2M), and A once at least" in text
    assert "float32, symmetric" in text
    single = plan_of(StoredMatrix(300, 10**6, F4, (300, 1000)), (300, 300), replace(limits, tiles=1))
    assert single.read_nbytes == single.bound_nbytes == 300 * 10**6 * 4, "A is read once"
    assert "mirrored" not in str(single)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8, 16])
def test_cells_and_panels_do_not_depend_on_the_workers(workers: int) -> None:
    x = StoredMatrix(60_000, 20_000, F4, (500, 500), plain=True)
    for nbytes in (2**27, 2**29, 2**31, 2**33):
        one, many = (
            plan_of(x, (500, 500), Limits(count, nbytes, line_nbytes=LINE_NBYTES)) for count in (1, workers)
        )
        assert (one.panel_depth, one.k_parts, one.cell_rows) == (
            many.panel_depth,
            many.k_parts,
            many.cell_rows,
        )
        assert many.tile_count * many.k_parts >= workers * 15 // 16


@given(
    st.integers(1, 40),
    st.integers(1, 9),
    st.sets(st.integers(0, 819), max_size=60),
    st.sampled_from([0, 10, 300]),
)
def test_shares_of_a_triangle_are_even(grid: int, workers: int, finished: set[int], spare: int) -> None:
    x = StoredMatrix(64 * grid - 3, 64, F4, (16, 16))
    limits = Limits(workers, (2 * 16 + 4 * 4 + spare) * 1024)
    plan = plan_of(x, (64, 64), limits, keep=Geometry(64, 64, 16, 1, 64, 64))
    tiles = [tile for tile in plan.tiles() if tile.index not in finished]
    assume(tiles)
    shares = divide(plan, tiles, workers)
    assert sorted(tile.index for share in shares for tile in share) == sorted(tile.index for tile in tiles)
    work = [
        sum(tile.rows * tile.columns / (1 + plan.on_diagonal(tile)) for tile in share) for share in shares
    ]
    assert max(work) < sum(work) / workers + 64 * 64


@pytest.mark.parametrize(("grid", "workers"), [(4, 2), (4, 4), (8, 2), (8, 4), (8, 8)])
def test_an_even_triangle_is_shared_evenly(grid: int, workers: int) -> None:
    """A tile on the diagonal is half of the work of others."""
    x = StoredMatrix(64 * grid, 64, F4, (16, 16))
    plan = plan_of(x, (64, 64), Limits(workers, 10**6), keep=Geometry(64, 64, 16, 1, 64, 64))
    shares = divide(plan, plan.tiles(), workers)
    assert {sum(2 - plan.on_diagonal(tile) for tile in share) for share in shares} == {grid * grid // workers}


@pytest.mark.parametrize("nbytes", [80_000, 200_000])
def test_workers_share_the_panels_that_their_tiles_have_in_common(nbytes: int) -> None:
    """Where all panels are held, whoever needs a block has it, as rows of A or columns of B; else a tile on the
    diagonal needs none of B's."""
    x = StoredMatrix(5 * 64, 64, F4, (16, 16))
    plan = plan_of(x, (64, 64), Limits(3, nbytes), keep=Geometry(64, 64, 16, 1, 64, 64))
    assert plan.shares_panels == (nbytes > 100_000)
    placement = Placement(plan, plan.tiles())
    workers = [f"tcp://host:{number}" for number in range(3)]
    placement.share_among(workers)
    shares = {worker: list(share) for worker, share in placement._shares.items()}

    def having(wanted: Callable[[Tile], bool]) -> list[str]:
        return sorted(worker for worker, share in shares.items() if any(map(wanted, share)))

    for tile in plan.tiles():
        sharers = placement.sharers(tile, workers[0], frozenset(workers))
        of_row, of_column = (
            having(lambda other, block=block: block in (other.i, other.j)) for block in (tile.i, tile.j)
        )
        if not plan.shares_panels:
            of_row = having(lambda other, tile=tile: other.i == tile.i)
            of_column = having(lambda other, tile=tile: other.j == tile.j and other.i != tile.j)
        assert sorted(sharers.a) == of_row
        assert sorted(sharers.b) == of_column
