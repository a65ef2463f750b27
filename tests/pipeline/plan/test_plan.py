"""The planner is arithmetic, so it is tested as arithmetic: with primes, so that no missing term can cancel."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import FrameType
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.gemm.cores import skinny_launch, warp_tiled_cut
from tilewright.kernels.gemm.workspace import Parent, workspace_nbytes
from tilewright.kernels.numbers import format_nbytes
from tilewright.pipeline.errors import PlanError, ShapeError
from tilewright.pipeline.plan import product as plan_module
from tilewright.pipeline.plan import tiling
from tilewright.pipeline.plan.inputs import Geometry, Limits, StoredMatrix
from tilewright.pipeline.plan.memory import LINE_NBYTES, PANEL_BUFFERS, Memory, hold, reads
from tilewright.pipeline.plan.product import (
    BARE_PROCESS_NBYTES,
    CODER_NBYTES,
    CUDA_NBYTES,
    MOST_TILES,
    PROCESS_NBYTES,
    MatmulPlan,
    fitting_unit,
    plan_tiles,
)
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES
from tilewright.pipeline.worker.panels import PanelCache
from tilewright.pipeline.worker.units import tile_slots

F4, F8, I2, I8 = (np.dtype(code) for code in ("f4", "f8", "i2", "i8"))


def matrix(rows: int, columns: int, unit: tuple[int, int], dtype: np.dtype = F4) -> StoredMatrix:
    return StoredMatrix(rows, columns, dtype, unit)


sides = st.integers(0, 200)
units = st.tuples(st.integers(1, 60), st.integers(1, 60))


@pytest.mark.parametrize("operations", [tiling.TILE_OPERATIONS, 10**4])
@given(sides, sides, sides, units, units, units, st.integers(1, 7), st.integers(200, 10**6))
def test_every_plan_covers_everything_once_and_fits(
    operations: int,
    m: int,
    n: int,
    k: int,
    a_unit: tuple[int, int],
    b_unit: tuple[int, int],
    c_unit: tuple[int, int],
    workers: int,
    nbytes: int,
) -> None:
    """operations: as few make so small a product worth cutting into several tiles, and k into parts, as a large one."""
    with mock.patch.multiple(tiling, TILE_OPERATIONS=operations, SPLIT_NBYTES=operations):
        check_plan(m, n, k, a_unit, b_unit, c_unit, workers, nbytes)


def check_plan(
    m: int,
    n: int,
    k: int,
    a_unit: tuple[int, int],
    b_unit: tuple[int, int],
    c_unit: tuple[int, int],
    workers: int,
    nbytes: int,
) -> None:
    a, b = matrix(m, k, a_unit, F8), matrix(k, n, b_unit)
    limits = Limits(workers=workers, device_nbytes=nbytes, panel_nbytes=5000)
    try:
        plan = plan_tiles(a, b, F8, c_unit, limits)
    except PlanError:
        smallest = min(c_unit[0], m) * min(c_unit[1], n) * 8 + 2 * (
            min(c_unit[0], m) * 8 + min(c_unit[1], n) * 4
        )
        assert smallest > nbytes, "a plan was refused although the smallest tile with panels of depth 1 fits"
        return
    assert plan.device_peak_nbytes <= nbytes
    written = np.zeros((m, n), int)
    for tile in plan.tiles():
        written[tile.row_start : tile.row_stop, tile.column_start : tile.column_stop] += 1
        assert tile.row_start % c_unit[0] == 0 or tile.rows == m, "two tiles would write one stored piece"
        assert tile.column_start % c_unit[1] == 0 or tile.columns == n, (
            "two tiles would write one stored piece"
        )
    assert (written == 1).all()
    assert [tile.index for tile in plan.tiles()] == list(range(plan.tile_count if m and n else 0))
    stretches = [stretch for part in range(plan.k_tasks) for stretch in plan.panels(part)]
    assert [start for start, _ in stretches] == [0, *(stop for _, stop in stretches)][: len(stretches)]
    assert sum(stop - start for start, stop in stretches) == k
    for planned in (plan, plan_tiles(a, b, F8, c_unit, replace(limits, on_host=True))):
        found = read_by_workers(planned, workers)
        exact = workers == 1 and planned.k_parts == 1
        assert found == planned.read_nbytes if exact else found <= planned.read_nbytes
        assert planned.read_nbytes <= sum(planned.tile_read_nbytes(tile) for tile in planned.tiles())
    assert plan.decoded_nbytes >= plan.read_nbytes
    assert plan.bound_nbytes <= max(plan.read_nbytes, 1)


@given(
    st.tuples(sides, sides),
    sides,
    units,
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from([I2, F4, np.dtype("c16")]),
    st.integers(1, 7),
)
def test_cells_begin_at_aligned_places_of_memory_that_was_counted(
    shape: tuple[int, int],
    k: int,
    c_unit: tuple[int, int],
    pieces: tuple[int, int],
    cells: tuple[int, int],
    transposed: tuple[bool, bool],
    dtype: np.dtype,
    workers: int,
) -> None:
    """Of any cells, so many stored pieces each, and any tiles, so many cells each."""
    m, n = shape
    nbytes = 10**8
    limits = Limits(workers, nbytes, line_nbytes=LINE_NBYTES)
    a, b = matrix(m, k, (16, 10), dtype), matrix(k, n, (10, 16), dtype)
    cell = c_unit[0] * pieces[0], c_unit[1] * pieces[1]
    keep = Geometry(cell[0] * cells[0], cell[1] * cells[1], 10, 1, *cell)
    plan = plan_tiles(
        a, b, dtype, c_unit, limits, transpose_a=transposed[0], transpose_b=transposed[1], keep=keep
    )
    assert plan.geometry[4:6] == cell, "there is memory for them"
    layout, depth, item = plan.layout, min(plan.panel_depth, k), dtype.itemsize
    taken = plan.a_buffers * layout.a_size(plan.tile_rows, depth) * item
    taken += plan.b_buffers * layout.b_size(plan.tile_columns, depth) * item
    taken += plan.c_buffers * layout.c_size(plan.tile_rows, plan.tile_columns) * layout.items[2]
    assert not (m and n) or taken <= plan.device_peak_nbytes <= nbytes
    for tile in plan.tiles():
        for rows, columns in plan.cells(tile.rows, tile.columns):
            found = (
                (layout.a(), layout.a_shape(tile.rows, depth), layout.a_shape(rows.start, 0), item),
                (layout.b(), layout.b_shape(tile.columns, depth), layout.b_shape(columns.start, 0), item),
                (layout.c(), (tile.rows, tile.columns), (rows.start, columns.start), layout.items[2]),
            )
            for lines, shape, (row, column), each in found:
                first = (row * lines.pitch(shape[1]) + lines.place(column)) * each
                assert (
                    lines.unit == 1 or first % LINE_NBYTES == lines.pitch(shape[1]) * each % LINE_NBYTES == 0
                )
        elements = [layout.c().place(column) for column in range(tile.columns)]
        pieces = layout.c().stretches(0, tile.columns)
        assert elements == [
            layout.c().place(start) + i for start, stop in pieces for i in range(stop - start)
        ]
        assert not elements or elements[-1] < layout.c().pitch(tile.columns)


def read_by_workers(plan: MatmulPlan, workers: int) -> int:
    """Bytes that workers read who take the tiles in turns, each with the panels that the plan lets it hold."""
    read = 0
    for worker in range(workers):
        held = PanelCache(plan.a_buffers, object), PanelCache(plan.b_buffers, object)
        for tile in list(plan.tiles())[worker::workers]:
            for part in range(plan.k_tasks):
                for start, stop in plan.panels(part):
                    sides = (tile.i, tile.rows, plan.a_dtype), (tile.j, tile.columns, plan.b_dtype)
                    for cache, (place, side, dtype) in zip(held, sides, strict=True):
                        buffer, there = cache.take((place, start))
                        cache.let_go(buffer)
                        read += 0 if there else side * (stop - start) * np.dtype(dtype).itemsize
    return read


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("spare", [0, 10, 40, 70, 90, 130, 300])
def test_memory_that_is_left_over_holds_panels(spare: int, workers: int) -> None:
    """With so many units of 16 × 16 floats beside what tiles of 64 × 64 and panels of 16 need."""
    a = matrix(320, 64, (16, 16))
    unit = 16 * 16 * 4
    limits = Limits(workers, (2 * 16 + 2 * 8 + spare) * unit)
    plan = plan_tiles(a, a.transposed, F4, (64, 64), limits, keep=Geometry(64, 64, 16, 1, 64, 64))
    assert plan.grid == (5, 5)
    assert plan.device_peak_nbytes <= limits.device_nbytes
    assert plan.device_peak_nbytes == (16 * plan.c_buffers + 4 * (plan.a_buffers + plan.b_buffers)) * unit
    assert plan.c_buffers == (2 if spare < 130 else 4), "more tiles only of what the panels leave"
    # Of four panels of a tile a third is held where nothing better can be made of the memory.
    assert plan.a_buffers == (2 + 4 if spare >= 16 else 3 if spare >= 8 else 2)
    found = read_by_workers(plan, workers)
    assert found == plan.read_nbytes if workers == 1 else found <= plan.read_nbytes
    if spare == 300:
        assert plan.b_buffers == 5 * 4
        assert read_by_workers(plan, 1) == 2 * a.nbytes
        assert plan.read_nbytes == 2 * a.nbytes * min(workers, 5)


@pytest.mark.parametrize(("workers", "expected"), [(1, 4), (2, 4), (4, 3), (5, 2), (9, 2)])
def test_no_worker_holds_more_tiles_than_fall_to_it(workers: int, expected: int) -> None:
    a = matrix(192, 48, (16, 16))
    plan = plan_tiles(
        a, a.transposed, F4, (64, 64), Limits(workers, 10**6), keep=Geometry(64, 64, 16, 1, 64, 64)
    )
    assert (plan.tile_count, plan.c_buffers) == (9, expected)
    on_host = Limits(workers, 10**6, on_host=True)
    assert (
        plan_tiles(a, a.transposed, F4, (64, 64), on_host, keep=Geometry(64, 64, 16, 1, 64, 64)).c_buffers
        == 2
    )


def test_memory_of_a_plan_is_the_sum_of_its_buffers() -> None:
    # All sizes are distinct primes: tile 7 × 11, depth 13 of k = 13, items of 8 (A), 4 (B) and 8 bytes (C).
    a, b = matrix(7, 13, (7, 13), F8), matrix(13, 11, (13, 11))
    limits = Limits(1, device_nbytes=10**6, tiles=1, read_threads=17, write_threads=19)
    plan = plan_tiles(a, b, F8, (7, 11), limits)
    panels = PANEL_BUFFERS * 13 * (7 * 8 + 11 * 4)
    assert (plan.tile_rows, plan.tile_columns, plan.panel_depth, plan.c_buffers) == (7, 11, 13, 2)
    assert plan.device_peak_nbytes == panels + 2 * 7 * 11 * 8
    decoding, writing = 17 * 2 * 7 * 13 * 8, 19 * 2 * 7 * 11 * 8
    lanes = (17 + 19) * (LANE_NBYTES + CODER_NBYTES)
    assert plan.host_peak_nbytes == PROCESS_NBYTES + CUDA_NBYTES + lanes + decoding + writing
    plain = plan_tiles(replace(a, plain=True), replace(b, plain=True), F8, (7, 11), limits)
    assert plain.host_peak_nbytes == plan.host_peak_nbytes - decoding, "nothing to decode"
    half = plan_tiles(replace(a, plain=True), b, F8, (7, 11), limits)
    assert half.host_peak_nbytes == plain.host_peak_nbytes + 17 * 2 * 13 * 11 * 4
    on_host = plan_tiles(a, b, F8, (7, 11), replace(limits, on_host=True))
    assert on_host.host_peak_nbytes == PROCESS_NBYTES + on_host.device_peak_nbytes + decoding + writing
    # Of threads that take turns with 20 lanes, 17 may decode what is larger, and three encode.
    turns = plan_tiles(a, b, F8, (7, 11), replace(limits, lanes=20))
    assert turns.host_peak_nbytes == PROCESS_NBYTES + CUDA_NBYTES + 20 * (
        LANE_NBYTES + CODER_NBYTES
    ) + 2 * 8 * 7 * (17 * 13 + 3 * 11)
    assert (plan.lanes, turns.lanes) == (36, 20)
    assert "17 threads for reading and 19 for writing, 20 of them at once" in str(turns)
    assert "at once" not in str(plan)
    single = plan_tiles(a, b, F8, (7, 11), replace(limits, read_threads=1, write_threads=1))
    assert "with 1 thread for reading and 1 for writing" in str(single)


def test_tiles_of_float16_take_the_memory_of_their_float32_sums() -> None:
    halves = np.dtype("f2")
    a, b = matrix(70, 13, (7, 13), halves), matrix(13, 11, (13, 11), halves)
    panels = PANEL_BUFFERS * 13 * (7 + 11) * 2
    for tiles in (1, 2, 3, 4):
        most = panels + tiles * 7 * 11 * 4
        plan = plan_tiles(a, b, halves, (7, 11), Limits(1, most), keep=Geometry(7, 11, 13, 1, 7, 11))
        assert (plan.c_buffers, plan.device_peak_nbytes) == (tiles, most)
        slots = tile_slots(plan, np.empty)
        assert sum(slot.nbytes for slot in slots) == most - panels
    assert plan.write_nbytes == 70 * 11 * 2
    with pytest.raises(PlanError, match=r"no tile fits"):
        plan_tiles(a, b, halves, (7, 11), Limits(1, 2 * (7 + 11) * 2 + 7 * 11 * 2))


def test_the_kernels_workspace_is_part_of_the_memory() -> None:
    a = matrix(512, 512, (64, 64), F8)

    def workspace(rows: int, columns: int, depth: int) -> int:
        return 9 * depth * (rows + columns)

    free = plan_tiles(a, a, F8, (64, 64), Limits(1, 2_000_000, tiles=1))
    taken = plan_tiles(a, a, F8, (64, 64), Limits(1, 2_000_000, tiles=1, workspace_nbytes=workspace))
    assert taken.device_peak_nbytes <= 2_000_000
    assert taken.tile_count > free.tile_count
    panels = PANEL_BUFFERS * taken.panel_depth * (taken.tile_rows + taken.tile_columns) * 8
    tiles = taken.c_buffers * taken.tile_rows * taken.tile_columns * 8
    borrowed = workspace(taken.tile_rows, taken.tile_columns, taken.panel_depth)
    assert taken.device_peak_nbytes == panels + tiles + borrowed


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_what_is_borrowed_to_copy_cells_is_counted(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of 7500 columns of float32 is aligned to 16 bytes, and its second cell of 3750 is not."""
    for module in (skinny_launch, warp_tiled_cut):  # partial sums would be counted for both
        monkeypatch.setattr(module, "MAX_PARTIAL_NBYTES", 0)
    side = 30_000
    stored = StoredMatrix(side, side, F4, (1000, 1000), plain=True)
    parent = Parent(side, side, side, transpose_a=True, transpose_b=False)
    workspace = partial(workspace_nbytes, dtype=F4, precision="full", parent=parent)
    limits = Limits(workers, side * side * 4 // 5, workspace_nbytes=workspace)
    plan = plan_tiles(stored, stored, F4, (750, 750), limits, transpose_a=True)
    assert workspace(plan.tile_rows, plan.tile_columns, plan.panel_depth) == 0
    borrowed = workspace(plan.cell_rows, plan.cell_columns, plan.panel_depth)
    assert borrowed > 0
    panels = plan.panel_depth * (plan.tile_rows * plan.a_buffers + plan.tile_columns * plan.b_buffers)
    tiles = plan.c_buffers * plan.tile_rows * plan.tile_columns
    assert plan.device_peak_nbytes == (panels + tiles) * 4 + borrowed
    assert plan.device_peak_nbytes <= limits.device_nbytes
    kept = plan_tiles(stored, stored, F4, (750, 750), limits, transpose_a=True, keep=plan.geometry)
    assert kept.device_peak_nbytes == plan.device_peak_nbytes
    short = replace(limits, device_nbytes=(4 * plan.panel_depth + plan.tile_rows) * plan.tile_columns * 4)
    anew = plan_tiles(stored, stored, F4, (750, 750), short, transpose_a=True, keep=plan.geometry)
    assert anew.device_peak_nbytes <= short.device_nbytes


def test_where_no_cells_fit_the_grid_is_one_for_any_workers() -> None:
    stored = matrix(1000, 1000, (10, 10))
    cell_nbytes = 10**6

    def workspace(rows: int, columns: int, depth: int) -> int:
        return 0 if rows == columns == 200 else cell_nbytes

    plans = [
        plan_tiles(stored, stored, F4, (200, 200), Limits(workers, 400_000, workspace_nbytes=workspace))
        for workers in (1, 2, 3, 16)
    ]
    assert {plan.geometry for plan in plans} == {Geometry(200, 200, plans[0].panel_depth, 1, 200, 200)}


@pytest.mark.sample(16)
@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("gibibytes", [8, 16, 30, 60, 110])
@pytest.mark.parametrize(("side", "chunk"), [(200_000, 2000), (300_000, 2000), (131_072, 4096)])
def test_every_worker_gets_a_tile(side: int, chunk: int, gibibytes: int, workers: int) -> None:
    """Also where memory alone cuts C into cells; to a sixteenth where C is cut alike for any few workers."""
    stored = matrix(side, side, (chunk, chunk))
    plan = plan_tiles(stored, stored, F4, (chunk, chunk), Limits(workers, gibibytes * 2**30, line_nbytes=128))
    assert plan.tile_count * plan.k_parts >= workers * 15 // 16
    rounds = math.ceil(plan.tile_count * plan.k_parts / workers)
    evenly = side * side / workers
    assert rounds * plan.tile_rows * plan.tile_columns / plan.k_parts < 1.6 * evenly, "and shared evenly"


@pytest.mark.parametrize("tiles", [8, 16, 24, 32, 48, 64, 100, 128, 200, 256])
@pytest.mark.parametrize("gibibytes", [1, 4, 60])
def test_a_cpu_cuts_c_into_more_tiles_where_more_are_asked_for(gibibytes: int, tiles: int) -> None:
    stored = matrix(200_000, 200_000, (2000, 2000))
    limits = Limits(16, gibibytes * 2**30, on_host=True, tiles=tiles)
    plan = plan_tiles(stored, stored, F4, (2000, 2000), limits)
    assert plan.tile_count >= max(16, 0.9 * tiles)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("workers", [1, 64])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_as_many_tiles_are_made_as_are_asked_for(
    on_host: bool, symmetric: bool, workers: int, dtype: str
) -> None:
    """Also where memory alone cuts C into several: a thousand that somebody asked for became twenty."""
    kind = np.dtype(dtype)
    a = matrix(100_000, 100_000, (500, 500), kind)
    for tiles in (100, 1000):
        limits = Limits(workers, 4 * 2**30, on_host=on_host, tiles=tiles)
        b = a.transposed if symmetric else a
        plan = plan_tiles(a, b, kind, (500, 500), limits, transpose_b=symmetric, symmetric=symmetric)
        assert tiles <= 2 * plan.tile_count <= 4 * tiles
        assert plan.k_parts == 1, "what is recorded are whole tiles"


def test_a_plan_says_how_many_workers_get_no_tile() -> None:
    stored = matrix(1000, 1000, (500, 500))
    with mock.patch.multiple(tiling, TILE_OPERATIONS=1, SPLIT_NBYTES=2**40):
        few, enough = (plan_tiles(stored, stored, F4, (500, 500), Limits(count, 2**30)) for count in (7, 4))
    assert "2 × 2 of 500 × 500 for 7 workers, 3 of which get no tile" in str(few)
    assert "no tile" not in str(enough)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 16])
def test_sums_over_parts_of_k_are_counted(workers: int) -> None:
    """What tasks under way leave on one worker, in any order in which they are dealt out evenly."""
    a, b = matrix(4096, 2**20, (1024, 1024)), matrix(2**20, 4096, (1024, 1024))
    cut = plan_tiles(a, b, F4, (1024, 1024), Limits(workers, 2**28, on_host=True))
    assert cut.k_parts > 1
    tile_nbytes = cut.tile_rows * cut.tile_columns * 4
    assert cut.k_tasks == (1 if workers == 1 else cut.k_parts), "a CPU alone sums one part after the other"
    own = math.ceil(cut.sums_under_way * cut.k_parts / workers) if workers > 1 else 0
    others = cut.k_parts if workers > 1 else 0
    without = PROCESS_NBYTES + cut.device_peak_nbytes
    assert cut.host_peak_nbytes >= without + (own + others + 1) * tile_nbytes
    assert cut.sums_under_way * cut.k_parts >= 2 * workers, "every worker has a part to go on with"


def test_panels_are_whole_chunks_of_both_factors() -> None:
    a, b = matrix(1000, 6000, (100, 40)), matrix(6000, 1000, (60, 100))
    plan = plan_tiles(a, b, F4, (100, 100), Limits(1, 2**26, panel_nbytes=2**20))
    assert plan.panel_depth % 120 == 0  # lcm(40, 60): no chunk of either is read twice within a tile
    assert plan.decoded_nbytes == plan.read_nbytes


def test_plain_chunks_are_cut_where_memory_is_short() -> None:
    coded, plain = matrix(4096, 4096, (4096, 4096)), replace(matrix(4096, 4096, (4096, 4096)), plain=True)
    limits = Limits(1, 2**27, panel_nbytes=2**24)
    assert plan_tiles(plain, plain, F4, (256, 256), limits).panel_depth < 4096
    assert plan_tiles(plain, plain, F4, (256, 256), limits).decoded_nbytes == (
        plan_tiles(plain, plain, F4, (256, 256), limits).read_nbytes
    )
    assert plan_tiles(coded, coded, F4, (256, 256), limits).panel_depth == 4096


def test_chunks_that_do_not_line_up_are_counted() -> None:
    # Panels of 7 (B's chunks) cut A's chunks of 1000 apart: each panel decodes a whole chunk of A.
    a, b = matrix(10, 1000, (10, 1000)), matrix(1000, 10, (7, 10))
    plan = plan_tiles(a, b, F4, (10, 10), Limits(1, 5000, panel_nbytes=560))
    assert plan.panel_depth < 1000
    assert plan.decoded_nbytes > plan.read_nbytes
    assert "do not line up" in str(plan)


@given(st.integers(0, 90), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_what_is_touched_is_counted_in_whole_units(side: int, stride: int, unit: int, by_rows: bool) -> None:
    stored = matrix(side, 7, (unit, 3)) if by_rows else matrix(7, side, (3, unit))
    expected = 0
    for start in range(0, side, stride):
        stretch = range(start, min(start + stride, side))
        expected += sum(min(unit, side - first) for first in {element // unit * unit for element in stretch})
    assert stored.touched(0 if by_rows else 1, stride) == expected


@given(st.data())
def test_what_is_read_is_counted_as_if_column_by_column(data: st.DataObject) -> None:
    """Of any tiles, cells, stored units and holdings; the counting itself takes all columns of tiles at once."""
    draw = data.draw
    m, n, k = (draw(st.integers(0, 150)) for _ in range(3))
    tile = draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    cell = draw(st.none() | st.tuples(st.integers(1, 40), st.integers(1, 40)))
    depth, workers = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    a, b = matrix(m, k, draw(units)), matrix(k, n, draw(units))
    transposed, line_nbytes = (
        draw(st.tuples(st.booleans(), st.booleans())),
        draw(st.sampled_from([1, 12, 128])),
    )
    limits = Limits(workers, 0, line_nbytes=line_nbytes)
    memory = Memory((m, n), (4, 4, 4), depth, transposed, limits, cell)
    limits = replace(limits, device_nbytes=memory.nbytes(*tile, 1) + draw(st.integers(0, 200_000)))
    memory = replace(memory, limits=limits)
    geometry = Geometry(*tile, depth, draw(st.integers(1, 2)), *(cell or tile))
    held = hold(memory, geometry, math.ceil(k / depth), workers)

    columns = list(range(0, n, tile[1]))
    times = [alike.reads for alike in held.b_reads for _ in range(alike.number)]
    assert len(times) == len(columns)
    assert held.b_reads_of_all == sum(times)
    stride_a, stride_b = memory.strides(*tile)
    read = m * k * 4 * held.a_reads
    decoded = a.touched(0, stride_a) * a.touched(1, depth) * 4 * held.a_reads
    for start, each in zip(columns, times, strict=True):
        stop = min(start + tile[1], n)
        read += each * k * (stop - start) * 4
        for cut in range(start, stop, stride_b):
            in_units = {column // b.unit[1] for column in range(cut, min(cut + stride_b, stop))}
            touched = sum(min(b.unit[1], n - unit * b.unit[1]) for unit in in_units)
            decoded += each * touched * b.touched(0, depth) * 4
    assert reads(a, b, memory, geometry, held) == (read, decoded if m and n else 0)


@given(st.integers(1, 20_000), st.integers(1, 50), st.data())
def test_all_sides_of_tiles_are_tried_but_those_close_to_others(
    length: int, unit: int, data: st.DataObject
) -> None:
    with mock.patch.object(tiling, "SIDES_APART", data.draw(st.sampled_from([2, 16, 512]))):
        side = tiling._Side.of(length, unit)
        first = data.draw(st.integers(1, side.units))
        tried = list(side.cuts(first))
        every = {side.tile(parts) for parts in range(first, side.units + 1)}
        lengths = [side.tile(parts) for parts in tried]
        assert lengths == sorted(set(lengths), reverse=True)
        assert (lengths[0], lengths[-1]) == (max(every), min(every))
        if side.units <= tiling.SIDES_APART**2:
            assert set(lengths) == every
        for parts, following in pairwise(tried):
            skipped = len({side.tile(between) for between in range(parts, following + 1)}) > 2
            assert not skipped or (
                parts >= tiling.SIDES_APART and following <= parts * (1 + 1 / tiling.SIDES_APART)
            )


MOST_CALLS = 600_000
"""Calls of functions that a plan may take: those below take up to 420,000."""


@pytest.mark.sample(8)
@pytest.mark.parametrize("exponent", [5, 7, 9, 12, 18])
@pytest.mark.parametrize("workers", [1, 64])
@pytest.mark.parametrize(
    ("chunk", "c_unit", "nbytes", "on_host"),
    [
        (1000, (500, 500), 10**7, True),
        (1000, (500, 500), 10**7, False),
        (4096, (1448, 1448), 10**8, False),
        (10, (640, 640), 10**11, True),
        (1000, (1, 1000), 10**9, True),
    ],
)
def test_the_work_of_planning_does_not_grow_with_the_number_of_tiles(
    chunk: int, c_unit: tuple[int, int], nbytes: int, on_host: bool, workers: int, exponent: int
) -> None:
    side = 10**exponent
    square, flat, thin = (matrix(*sides, (chunk, chunk)) for sides in ((side, side), (1000, side), (side, 7)))
    limits = Limits(workers, nbytes, on_host=on_host, line_nbytes=1 if on_host else LINE_NBYTES)
    for a, b in ((square, square), (flat, square), (square, thin)):
        with mock.patch.object(plan_module, "MOST_TILES", math.inf), at_most_calls(MOST_CALLS):
            plan = plan_tiles(a, b, F4, c_unit, limits)
        assert plan.device_peak_nbytes <= nbytes


@pytest.mark.parametrize("symmetric", [False, True])
@given(st.integers(1, 5000), st.integers(1, 5000), units, units, units, st.booleans())
def test_a_product_that_fits_whole_is_one_tile_and_searched_for_no_other(
    symmetric: bool,
    m: int,
    k: int,
    a_unit: tuple[int, int],
    b_unit: tuple[int, int],
    c_unit: tuple[int, int],
    on_host: bool,
) -> None:
    a = matrix(m, k, a_unit, I2)
    b = a.transposed if symmetric else matrix(k, m, b_unit, I2)
    limits = Limits(1, 2**40, on_host=on_host, tiles=1, line_nbytes=1 if on_host else LINE_NBYTES)
    with at_most_calls(3000):
        plan = plan_tiles(a, b, I8, c_unit, limits, transpose_b=symmetric, symmetric=symmetric)
    assert (plan.tile_rows, plan.tile_columns) == (plan.cell_rows, plan.cell_columns) == (m, m)
    assert plan.read_nbytes == (a.nbytes if symmetric else a.nbytes + b.nbytes)


@contextmanager
def at_most_calls(most: int) -> Iterator[None]:
    """Fail once more functions have been called, or generators resumed, than that."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")
        if calls > most:
            sys.setprofile(None)
            raise AssertionError(f"more than {most} calls")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("on_host", [False, True])
def test_more_tiles_than_a_run_can_keep_track_of_are_refused(on_host: bool) -> None:
    stored = matrix(10**7, 10**7, (1000, 1000))
    limits = Limits(1, 10**7, on_host=on_host)
    with pytest.raises(
        PlanError, match=r"cut into 400000000 tiles of 500 × 500.* raise --device-memory"
    ) as error:
        plan_tiles(stored, stored, F4, (500, 500), limits)
    advised = re.search(r"to about ([\d.]+) MiB", str(error.value))
    assert advised is not None
    enough = replace(limits, device_nbytes=int(float(advised[1]) * 2**20))
    assert plan_tiles(stored, stored, F4, (500, 500), enough).tile_count <= MOST_TILES


def test_more_tiles_than_a_run_can_track_are_refused_if_asked_for() -> None:
    stored = matrix(10**6, 10**6, (100, 100))
    limits = Limits(1, 2**44, on_host=True, tiles=5 * 10**7)
    with pytest.raises(
        PlanError, match=r"lower tilewright.tiles, now 50000000, or use fewer workers, now 1$"
    ):
        plan_tiles(stored, stored, F4, (100, 100), limits)


def decoded_by_square_tiles(a: StoredMatrix, b: StoredMatrix, depth: int, nbytes: int) -> int:
    """Bytes that are decoded where tiles are as large as fit beside panels of this depth, and nothing is held."""
    side = next(side for side in range(a.rows, 0, -1) if 4 * (side * side + 4 * side * depth) <= nbytes)
    grid = -(-a.rows // side)
    return 4 * grid * (a.touched(0, side) * a.touched(1, depth) + b.touched(1, side) * b.touched(0, depth))


@pytest.mark.parametrize(
    ("a_unit", "b_unit", "depth", "at_most"),
    [
        ((128, 8192), (128, 8192), 2048, 0.6),  # bands of rows: tiles take all columns
        ((8192, 128), (8192, 128), 2048, 0.6),
        ((128, 8192), (8192, 128), 8192, 0.9),  # bands along k: panels cut them, and leave room for tiles
        ((375, 875), (375, 875), 2625, 0.6),  # panels of A's chunks or of B's, and not of both
        ((1250, 1250), (1250, 1250), 1250, 1.0),
    ],
)
def test_tiles_follow_chunks_so_that_little_is_decoded(
    a_unit: tuple[int, int], b_unit: tuple[int, int], depth: int, at_most: float
) -> None:
    a, b = matrix(8192, 8192, a_unit), matrix(8192, 8192, b_unit)
    nbytes = 2**26
    c_unit = tiling.output_chunks(a, b, 4, nbytes)
    plan = plan_tiles(a, b, F4, c_unit, Limits(1, nbytes))
    assert plan.decoded_nbytes <= at_most * decoded_by_square_tiles(a, b, depth, nbytes)
    assert {plan_tiles(a, b, F4, c_unit, Limits(n, nbytes)).panel_depth for n in (2, 4, 9)} == {
        plan.panel_depth
    }


@pytest.mark.parametrize("mebibytes", [900, 1000, 1100])
def test_panels_are_not_cut_for_what_one_worker_alone_would_hold(mebibytes: int) -> None:
    a = b = matrix(20000, 20000, (512, 512), np.dtype("f2"))
    for workers in (1, 2, 4):
        plan = plan_tiles(a, b, np.dtype("f2"), (512, 512), Limits(workers, mebibytes * 2**20))
        assert plan.grid == (2, 2)
        assert plan.decoded_nbytes == 2 * (a.nbytes + b.nbytes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("tiles", [16, 4096])
def test_a_plan_of_millions_of_chunks_tries_few_tiles(tiles: int) -> None:
    side, dtype = 10**6, np.dtype("i8")
    a = b = matrix(side, side, (500, 300), dtype)
    workspace = partial(
        workspace_nbytes, dtype=dtype, precision="full", parent=Parent(side, side, side, False, False)
    )
    limits = Limits(1, 2**26, tiles=tiles, workspace_nbytes=workspace, line_nbytes=LINE_NBYTES)
    with mock.patch.object(Memory, "nbytes", autospec=True, side_effect=Memory.nbytes) as tried:
        plan_tiles(a, b, dtype, (500, 300), limits)
    # Every depth and width one by one would be 1.1 million.
    assert tried.call_count < 50_000


def test_plain_chunks_are_not_cut_where_whole_ones_fit() -> None:
    # By their size alone panels would be 5 × 1024 + 512 deep: plain chunks can be cut there.
    plain = StoredMatrix(16384, 16384, F4, (4096, 4096), plain=True)
    limits = Limits(1, device_nbytes=2**34, panel_nbytes=2 * 5800 * 5632 * 4)
    assert plan_tiles(plain, plain, F4, (4096, 4096), limits).panel_depth == 4096
    narrow = StoredMatrix(16384, 16384, F4, (4096, 3072), plain=True)
    assert plan_tiles(narrow, plain, F4, (4096, 4096), limits).panel_depth % 1024 == 0


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "float64", "int64", "complex128"])
def test_panels_of_large_elements_are_as_deep_as_float32s(dtype: str) -> None:
    stored = StoredMatrix(32768, 32768, np.dtype(dtype), (512, 512), plain=True)
    item = stored.dtype.itemsize
    plan = plan_tiles(stored, stored, stored.dtype, (512, 512), Limits(4, 2**37))
    assert (plan.tile_rows, plan.tile_columns) == (8192, 8192)
    assert plan.panel_depth == {1: 32768, 2: 16384}.get(item, 8192)


def test_depth_of_panels_does_not_depend_on_the_workers() -> None:
    a, b = matrix(4096, 4096, (256, 256)), matrix(4096, 4096, (256, 256))
    depths = {
        plan_tiles(a, b, F4, (256, 256), Limits(w, 2**24, panel_nbytes=2**20)).panel_depth
        for w in (1, 2, 3, 8)
    }
    assert len(depths) == 1


lengths = st.sampled_from([500, 1000, 3000, 16384, 10**5])
pieces = st.sampled_from([64, 100, 500, 1024, 4096])


@given(lengths, lengths, lengths, pieces, pieces, pieces, st.sampled_from([F4, F8]), st.integers(20, 36))
def test_sums_are_cut_in_the_same_places_for_any_few_workers(
    m: int, n: int, k: int, rows: int, columns: int, depth: int, dtype: np.dtype, memory: int
) -> None:
    a, b = replace(matrix(m, k, (rows, depth), dtype), plain=True), matrix(k, n, (depth, columns), dtype)
    cuts = set()
    for workers in (1, 2, 3, 4, 8, 16):
        try:
            plan = plan_tiles(a, b, dtype, (min(rows, m), min(columns, n)), Limits(workers, 2**memory))
        except PlanError:
            return
        cuts.add((plan.panel_depth, plan.k_parts))
    assert len(cuts) == 1


def test_a_deep_product_has_panels_for_all_its_tasks() -> None:
    x = matrix(1000, 10**6, (1000, 10_000))
    plan = plan_tiles(x, x.transposed, F4, (1000, 1000), Limits(16, 4 * 2**30))
    assert (plan.tile_count, plan.k_parts) == (1, 16)
    ahead = (plan.a_buffers + plan.b_buffers - 2 * PANEL_BUFFERS) * 1000 * plan.panel_depth * 4
    assert plan.device_peak_nbytes - ahead < 2**29, (
        "a tile is no smaller than what is stored of C, and neither are its panels"
    )


def test_the_grid_is_the_same_for_any_few_workers_and_shared_evenly() -> None:
    a, b = matrix(8192, 8192, (512, 512)), matrix(8192, 8192, (512, 512))
    plans = [plan_tiles(a, b, F4, (512, 512), Limits(workers, 2**34)) for workers in (1, 2, 3, 4, 8, 16)]
    assert len({(plan.tile_rows, plan.tile_columns, plan.panel_depth) for plan in plans}) == 1
    assert plans[0].tile_count == 16
    assert plan_tiles(a, b, F4, (512, 512), Limits(32, 2**34)).tile_count == 32


def test_reads_stay_near_the_lower_bound_when_memory_is_short() -> None:
    a = b = replace(matrix(65536, 65536, (4096, 4096)), plain=True)
    plan = plan_tiles(a, b, F4, (1024, 1024), Limits(1, 4 * 2**30))
    assert plan.device_peak_nbytes <= 4 * 2**30
    assert plan.read_ratio <= 1.3
    shared = plan_tiles(a, b, F4, (1024, 1024), Limits(4, 4 * 2**30))
    assert shared.tile_count % 4 == 0, "an idle worker costs more than what is read twice"


def test_a_small_product_in_little_memory_is_written_while_computed() -> None:
    x = replace(matrix(4096, 4096, (512, 512)), plain=True)
    plan = plan_tiles(x, x, F4, (512, 512), Limits(1, 64 * 2**20))
    assert plan.tile_count == 8, "as many as there is work for, though two would read less"
    assert plan.c_buffers > 1


def test_a_plan_that_cannot_fit_says_what_it_needs() -> None:
    a, b = matrix(100, 100, (10, 10)), matrix(100, 100, (10, 10))
    with pytest.raises(PlanError, match=r"no tile fits into 100 B.*10 × 10.*needs 560 B \(560 bytes\)"):
        plan_tiles(a, b, F4, (10, 10), Limits(1, 100))
    plan_tiles(a, b, F4, (10, 10), Limits(1, 560))  # and what it names is enough


@pytest.mark.parametrize("limit", [16, 100, 559, 600, 10**4])
def test_a_plan_that_cannot_fit_says_which_chunks_of_c_would(limit: int) -> None:
    a = matrix(100, 100, (10, 10))
    limits = Limits(1, limit)
    fitting = fitting_unit(a, a, F4, (30, 20), limits, (False, False))
    if fitting is None:
        assert limit == 16
        with pytest.raises(
            PlanError, match=r"smaller chunks \(--chunks, and --shards where it has shards\)$"
        ):
            plan_tiles(a, a, F4, (30, 20), limits)
        return
    plan_tiles(a, a, F4, fitting, limits)
    if fitting != (30, 20):
        with pytest.raises(
            PlanError, match=rf"smaller chunks.*: {fitting[0]} × {fitting[1]} and smaller ones"
        ):
            plan_tiles(a, a, F4, (30, 20), limits)


@pytest.mark.parametrize(("m", "n", "k"), [(7, 5, 0), (0, 5, 3), (7, 0, 3), (0, 0, 0)])
def test_chunks_of_a_c_of_nothing_fit(m: int, n: int, k: int) -> None:
    a, b = matrix(m, k, (3, 2)), matrix(k, n, (2, 3))
    found = fitting_unit(a, b, F4, (3, 3), Limits(1, 1000), (True, True))
    assert found == (max(1, min(3, m)), max(1, min(3, n)))


def test_host_memory_is_a_bound_too() -> None:
    a = matrix(100, 100, (100, 100))
    with pytest.raises(PlanError, match=r"host memory.* 640 MiB of it for the process itself.*read-threads"):
        plan_tiles(a, a, F4, (100, 100), Limits(1, 10**6, host_nbytes=PROCESS_NBYTES))


def test_a_small_c_with_a_long_k_is_shared_by_parts_of_k() -> None:
    x = matrix(2048, 10**7, (2048, 4096))
    plan = plan_tiles(x, x.transposed, F4, (512, 512), Limits(1, 2**36))
    assert (plan.tile_count, plan.k_parts) == (1, 16)
    assert plan.read_nbytes == 2 * x.nbytes, "nothing is read twice"
    stretches = [stretch for part in range(plan.k_parts) for stretch in plan.panels(part)]
    assert [start for start, _ in stretches] == list(range(0, 10**7, plan.panel_depth))
    assert stretches[-1][1] == 10**7
    assert plan_tiles(x, x.transposed, F4, (512, 512), Limits(4, 2**36)).geometry == plan.geometry
    assert "16 tasks a tile" in str(plan)


@pytest.mark.parametrize("on_host", [False, True])
def test_sums_over_parts_of_k_count_as_host_memory(on_host: bool) -> None:
    """A worker holds at least a part's sum while it adds it to the tile's, and a CPU alone that of the parts before."""
    x = matrix(2048, 10**5, (2048, 1000))
    limits = Limits(1, 2**32, on_host=on_host)
    one, parts = (
        plan_tiles(
            x, x.transposed, F4, (512, 512), limits, keep=Geometry(2048, 2048, 1000, count, 2048, 2048)
        )
        for count in (1, 4)
    )
    assert (one.k_parts, parts.k_parts) == (1, 4)
    assert parts.device_peak_nbytes == one.device_peak_nbytes
    assert parts.host_peak_nbytes - one.host_peak_nbytes >= (1 if on_host else 2) * 2048 * 2048 * F4.itemsize
    between = replace(limits, host_nbytes=one.host_peak_nbytes)
    with pytest.raises(PlanError, match=r"needs .* of host memory"):
        plan_tiles(x, x.transposed, F4, (512, 512), between, keep=parts.geometry)


def test_k_is_not_cut_where_it_does_not_pay() -> None:
    small = matrix(100, 5000, (100, 100))
    assert plan_tiles(small, small.transposed, F4, (100, 100), Limits(4, 2**30)).k_parts == 1
    square = matrix(8192, 8192, (1024, 1024))
    assert plan_tiles(square, square, F4, (1024, 1024), Limits(4, 2**36)).k_parts == 1
    large = StoredMatrix(32768, 32768, F8, (4096, 4096))
    for workers in (8, 16, 32, 64):
        assert plan_tiles(large, large, F8, (4096, 4096), Limits(workers, 2**37)).k_parts == 1, workers


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("m", "n"), [(0, 100), (100, 0), (0, 0)])
def test_c_may_be_empty_where_k_is_cut(m: int, n: int, transposed: bool) -> None:
    a, b = matrix(m, 10**6, (10, 10)), matrix(10**6, n, (10, 10))
    limits = Limits(1, 10**6, line_nbytes=LINE_NBYTES)
    plan = plan_tiles(a, b, F4, (10, 10), limits, transpose_a=transposed, transpose_b=transposed)
    assert plan.tile_count == 0
    assert plan.panel_count > 1


def test_inner_sides_must_agree() -> None:
    with pytest.raises(ShapeError, match=r"3 × 4.*5 × 6"):
        plan_tiles(matrix(3, 4, (1, 1)), matrix(5, 6, (1, 1)), F4, (1, 1), Limits(1, 10**6))


def test_a_plan_keeps_the_tiles_of_an_earlier_run_if_they_fit() -> None:
    a = matrix(100, 100, (10, 10))
    kept = plan_tiles(a, a, F4, (10, 10), Limits(1, 10**6), keep=Geometry(20, 30, 40, 1, 20, 30))
    assert kept.geometry == Geometry(20, 30, 40, 1, 20, 30)
    anew = plan_tiles(a, a, F4, (10, 10), Limits(1, 600), keep=Geometry(20, 30, 40, 1, 20, 30))
    assert anew.device_peak_nbytes <= 600


@pytest.mark.parametrize(
    ("cell", "kept"), [((64, 64), True), ((128, 128), True), ((30, 30), False), ((128, 50), False)]
)
def test_a_plan_keeps_no_cells_that_would_share_a_stored_piece(cell: tuple[int, int], kept: bool) -> None:
    a = matrix(300, 300, (10, 10))
    keep = Geometry(128, 128, 40, 1, *cell)
    plan = plan_tiles(a, a, F4, (64, 64), Limits(1, 10**6), keep=keep)
    assert (plan.geometry == keep) is kept
    assert plan.cell_rows in (300, *range(64, 300, 64))
    assert plan.cell_columns in (300, *range(64, 300, 64))


@pytest.mark.parametrize(
    ("side", "deepest"), [(600, 600), (1024, 1024), (3000, 1024), (4096, 1024), (16384, 2048)]
)
def test_panels_on_a_cpu_are_no_deeper_than_pays(side: int, deepest: int) -> None:
    """However much memory there is: 1024, or half of a tile's side."""
    a = matrix(side, side, (256, 256))
    plan = plan_tiles(a, a, F4, (256, 256), Limits(2, 2**36, on_host=True))
    assert plan.panel_depth == min(side, max(1024, min(plan.tile_rows, plan.tile_columns) // 2 // 256 * 256))
    assert plan.panel_depth == deepest
    assert plan_tiles(a, a, F4, (256, 256), Limits(2, 2**36)).panel_depth == side


@pytest.mark.parametrize("workers", [1, 2, 16])
def test_tiles_on_a_cpu_are_no_larger_than_pays(workers: int) -> None:
    """Sixteen where memory holds them, though it holds four as well, which read half as much and take three times of
    it; where it cuts C into more, the largest it holds."""
    a = matrix(8192, 8192, (2048, 2048))
    limits = Limits(workers, 2**28, on_host=True)
    plan = plan_tiles(a, a, F4, (2048, 2048), limits)
    assert (plan.tile_rows, plan.tile_columns, plan.panel_depth, plan.k_parts) == (2048, 2048, 2048, 1)
    assert plan.device_peak_nbytes == 6 * 2048**2 * 4
    on_gpu = plan_tiles(a, a, F4, (2048, 2048), replace(limits, on_host=False, workers=1))
    assert (on_gpu.tile_rows, on_gpu.tile_columns) == (4096, 4096)
    large = matrix(65536, 65536, (2048, 2048))
    assert plan_tiles(large, large, F4, (2048, 2048), limits).tile_rows > 2048
    wide = plan_tiles(a, a, F4, (2048, 4096), limits)
    assert wide.k_parts == 1, "eight pieces of C are not cut along k to be sixteen"


def test_a_worker_that_cannot_write_and_multiply_at_once_holds_one_tile() -> None:
    a = matrix(8192, 8192, (2048, 2048))
    limits = Limits(2, 2**28, on_host=True)
    two, one = (plan_tiles(a, a, F4, (2048, 2048), replace(limits, tile_buffers=most)) for most in (4, 1))
    assert (two.c_buffers, one.c_buffers) == (2, 1)
    assert two.device_peak_nbytes - one.device_peak_nbytes == 2048**2 * 4
    assert two.geometry == one.geometry


def test_a_plan_keeps_no_tiles_that_would_share_a_stored_piece() -> None:
    a = matrix(100, 70, (10, 10))
    whole = plan_tiles(
        a, a.transposed, F4, (20, 30), Limits(1, 10**6), keep=Geometry(40, 100, 40, 1, 40, 100)
    )
    assert whole.geometry == Geometry(40, 100, 40, 1, 40, 100), (
        "the last tile, and the only one, may end where C does"
    )
    for tile in ((50, 30), (40, 40)):
        plan = plan_tiles(a, a.transposed, F4, (20, 30), Limits(1, 10**6), keep=Geometry(*tile, 40, 1, *tile))
        assert plan.tile_rows % 20 == 0 or plan.tile_rows == 100
        assert plan.tile_columns % 30 == 0 or plan.tile_columns == 100


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**40, "1 TiB"), (2**51, "2048 TiB")],
)
def test_bytes_for_people(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


def test_a_plan_is_json() -> None:
    import json

    plan = plan_tiles(matrix(5, 7, (2, 3)), matrix(7, 3, (3, 2), I2), F4, (2, 2), Limits(1, 10**6))
    loaded = json.loads(json.dumps(plan.to_json()))
    assert loaded["m"] == 5
    assert loaded["grid"] == list(plan.grid)


@given(units=st.tuples(*[st.integers(1, 5000)] * 4), itemsize=st.sampled_from([1, 2, 4, 8, 16]))
def test_chunks_of_an_output_are_neither_tiny_nor_huge(
    units: tuple[int, int, int, int], itemsize: int
) -> None:
    dtype = np.dtype(f"V{itemsize}")
    a, b = StoredMatrix(5000, 9, dtype, units[:2]), StoredMatrix(9, 4000, dtype, units[2:])
    for memory in (1, 2**10, 2**17, 2**20, 2**23, 2**25, 2**40):
        rows, columns = tiling.output_chunks(a, b, itemsize, memory)
        assert 1 <= rows <= 5000
        assert 1 <= columns <= 4000
        most = max(tiling.SMALL_CHUNK_NBYTES, min(tiling.MOST_CHUNK_NBYTES, memory // 8))
        least = min(tiling.LEAST_CHUNK_NBYTES // 2, most // 8)
        assert least <= rows * columns * itemsize <= most


@pytest.mark.parametrize(
    ("a_unit", "b_unit"), [((77, 131), (1000, 50)), ((1200, 50), (1000, 50)), ((64, 1000), (64, 900))]
)
@pytest.mark.parametrize("plain", [False, True])
def test_a_little_more_memory_never_makes_a_plan_much_worse(
    a_unit: tuple[int, int], b_unit: tuple[int, int], plain: bool
) -> None:
    a = replace(matrix(1200, 1000, a_unit), plain=plain)
    b = replace(matrix(1000, 900, b_unit), plain=plain)
    least = math.inf
    for nbytes in range(300_000, 2_400_000, 100_000):
        c_unit = tiling.output_chunks(a, b, 4, nbytes)
        decoded = plan_tiles(a, b, F4, c_unit, Limits(1, nbytes, on_host=True)).decoded_nbytes
        assert decoded < 2 * least, nbytes
        least = min(least, decoded)


def test_who_is_told_of_chunks_that_do_not_line_up_hears_what_would_help() -> None:
    a, b = matrix(6007, 5003, (700, 900)), matrix(5003, 4999, (333, 1111))
    told = {
        nbytes: dict(plan_tiles(a, b, F4, (700, 1111), Limits(1, nbytes, on_host=True)).table())["chunks"]
        for nbytes in (10**7, 2**29)
    }
    assert told[10**7].endswith("or raise the device memory")
    assert told[2**29].endswith("or cut C into fewer tiles (tilewright.tiles)")


@pytest.mark.parametrize("on_host", [True, False])
def test_the_check_of_a_product_has_to_fit_too(on_host: bool) -> None:
    a, b = matrix(7, 13, (7, 13), F8), matrix(13, 11, (13, 11))
    limits = Limits(1, device_nbytes=10**6, tiles=1, on_host=on_host)
    without = plan_tiles(a, b, F8, (7, 11), limits)
    small = plan_tiles(a, b, F8, (7, 11), replace(limits, check_nbytes=1))
    assert small == without
    held = PROCESS_NBYTES + (0 if on_host else CUDA_NBYTES + 20 * LANE_NBYTES)
    checked = replace(limits, check_nbytes=10**9 + 7)
    assert plan_tiles(a, b, F8, (7, 11), checked).host_peak_nbytes == held + 10**9 + 7
    enough = replace(checked, host_nbytes=held + 10**9 + 7)
    plan_tiles(a, b, F8, (7, 11), enough)
    with pytest.raises(
        PlanError, match=r"the check of the product needs .*--no-verify, verify=False.*verify-rounds"
    ):
        plan_tiles(a, b, F8, (7, 11), replace(enough, host_nbytes=held + 10**9 + 6))


def test_what_makes_dask_pause_a_worker_is_refused() -> None:
    a, limits = matrix(1000, 1000, (100, 100), F8), Limits(1, 10**7, on_host=True)
    plan = plan_tiles(a, a, F8, (100, 100), limits)
    held = plan.host_peak_nbytes - PROCESS_NBYTES + BARE_PROCESS_NBYTES
    assert held > plan.device_peak_nbytes
    enough = replace(limits, host_nbytes=plan.host_peak_nbytes, pause_nbytes=held)
    assert plan_tiles(a, a, F8, (100, 100), enough) == plan
    with pytest.raises(PlanError, match=r"no more tasks to a worker that holds .* lower the device memory"):
        plan_tiles(a, a, F8, (100, 100), replace(enough, pause_nbytes=held - 1))


@pytest.mark.parametrize("on_host", [True, False])
def test_the_table_names_memory_by_what_bounds_it(on_host: bool) -> None:
    a = matrix(70, 50, (8, 8))
    plan = plan_tiles(a, matrix(50, 30, (8, 8)), F4, (8, 8), Limits(1, 40_000, on_host=on_host))
    rows = dict(plan.table())
    assert rows["device memory"].startswith(
        f"{format_nbytes(plan.device_peak_nbytes)} of {format_nbytes(40_000)} a worker"
    )
    assert rows["host memory"].startswith(f"{format_nbytes(plan.host_peak_nbytes)} a worker, ")
    assert ("the device memory included" in rows["host memory"]) == on_host
    assert "process memory" not in rows


def test_the_depth_of_panels_does_not_follow_the_default_number_of_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It decides how floats are rounded: the same setting gives the same bits, whatever it is by default."""
    a = StoredMatrix(2000, 4000, F4, (250, 4000), False)
    b = StoredMatrix(4000, 8000, F4, (100, 8000), False)
    limits = Limits(1, 2**26, tiles=64)
    depth = partial(tiling.panel_depth, a, b, (4, 4, 4), (False, False), (256, 256))
    assert depth(limits) == 1000
    assert depth(replace(limits, tiles=4)) != 1000, "the number of tiles matters here"
    monkeypatch.setattr(Limits, "tiles", 4)
    assert depth(limits) == 1000
