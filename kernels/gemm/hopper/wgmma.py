"""The Hopper matrix kernel: bulk copies, barriers in shared memory, warpgroup tensor cores, persistent
blocks.

One warpgroup (the producer) keeps a ring of stages in shared memory full; the others (consumers) multiply
64 rows each and write their part of C. Two blocks form a cluster, lie below each other in C, and share B:
each loads half of B's tile and the copy engine writes it to both. The blocks are persistent and walk C in
bands a few cluster tiles high, so that what they read at one time stays in the second-level cache.

Sources: the structure is CUTLASS's warp-specialised cooperative kernel for sm_90; the steps, one by one,
are explained in P. Shankhdhar, "Outperforming cuBLAS on H100: a worklog" (2024). The instructions: PTX ISA 9.7.9 (bulk
copies), 9.7.13 (mbarrier), 9.7.15 (wgmma).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda import types

from tilewright.kernels.gemm.exact.residue_epilogue import WORKSPACE_NBYTES, residue_epilogue
from tilewright.kernels.gemm.exact.residues import ANY_SINGLE, PLAN_KIND, PLAN_PLANES, RESIDUES
from tilewright.kernels.gemm.exact.scaled_epilogue import OWN_WORDS, least_report, scaled_epilogue
from tilewright.kernels.gemm.hopper.selection import selection
from tilewright.kernels.gemm.hopper.wgmma_config import (
    C_BOX_LINES,
    ROWS_PER_WARPGROUP,
    WARPGROUP,
    Config,
)
from tilewright.kernels.gemm.hopper.wgmma_epilogue import (
    box_store,
    column_store,
    conversions,
    line_scale,
    sum_store,
)
from tilewright.kernels.gemm.hopper.wgmma_mainloop import (
    filler,
    half_multiplier,
    part_multiplier,
    plane_multiplier,
    planned_multiplier,
    promoted_multiplier,
)
from tilewright.kernels.gemm.hopper.wgmma_registers import register_multiplier
from tilewright.kernels.numbers import WARP
from tilewright.kernels.ptx import barriers, bulk_copy, memory, warpgroup_mma

PRODUCER_REGISTERS = 56
CONSUMER_REGISTERS = 224

ARGUMENTS = (
    types.uint64,  # map_a
    types.uint64,  # map_b
    types.uint64,  # c
    types.int64,  # row_stride, in elements
    types.int64,  # column_stride
    types.int32,  # m
    types.int32,  # n
    types.int32,  # k_steps
    types.int32,  # paired
    types.int32,  # accumulate
    types.uint64,  # plan
    types.uint64,  # workspace
    types.uint64,  # map_c
    types.int32,  # steps
    types.int32,  # diagonal
    types.int32,  # first_step
    types.int32,  # last_step
)
"""What every variant takes: scalars only, so that one compilation serves all layouts."""


@cuda.jit(device=True, inline="always")
def cluster_tile(index: Any, tiles_m: Any, tiles_n: Any, group: Any) -> Any:
    """Where in C, in cluster tiles, step ``index`` of the walk lies: down a band of ``group`` tiles, then
    right."""
    per_band = group * tiles_n
    band = index // per_band
    first = band * group
    height = min(tiles_m - first, group)
    within = index - band * per_band
    column = within // height
    return first + within - column * height, column


@cuda.jit(device=True, inline="always")
def lower_tile(
    index: Any, tiles_m: Any, tiles_n: Any, group: Any, tile_m: Any, tile_n: Any, diagonal: Any
) -> Any:
    """The same of a walk that leaves out what lies right of a band's last row + ``diagonal``: see `lower_tiles`."""
    first = 0
    height = min(tiles_m, group)
    across = reach(height, tiles_n, tile_m, tile_n, diagonal)
    while index >= height * across:
        index -= height * across
        first += group
        height = min(tiles_m - first, group)
        across = reach(first + height, tiles_n, tile_m, tile_n, diagonal)
    column = index // height
    return first + index - column * height, column


def _reach(last: Any, tiles_n: Any, tile_m: Any, tile_n: Any, diagonal: Any) -> Any:
    """Tiles along a row of C that begin at or before the last column wanted, of rows of tiles above number ``last``."""
    wanted = last * tile_m + diagonal
    return 0 if wanted <= 0 else min(tiles_n, (wanted + tile_n - 1) // tile_n)


reach = cuda.jit(device=True, inline="always")(_reach)


def lower_tiles(tiles_m: int, tiles_n: int, group: int, tile_m: int, tile_n: int, diagonal: int) -> int:
    """Steps of the walk of `lower_tile`: down each band of ``group`` rows of tiles, as far right as its last row wants.

    >>> lower_tiles(4, 4, 2, 128, 128, 0)
    12
    """
    ends = [min(first + group, tiles_m) for first in range(0, tiles_m, group)]
    heights = [end - first for end, first in zip(ends, range(0, tiles_m, group), strict=True)]
    return sum(
        height * _reach(end, tiles_n, tile_m, tile_n, diagonal)
        for end, height in zip(ends, heights, strict=True)
    )


def kernel_function(config: Config) -> Callable[..., Any]:
    """The kernel of ``config`` as a function of ``ARGUMENTS``, for ``cuda.jit`` or ``cuda.compile_ptx``.

    A is m × k and B is k × n, given by tensor maps with boxes ``config.box_a`` and ``config.box_b``, one plane or
    several. C is m × n with the given strides; every element is written (added to when ``accumulate``), unless the plan
    says that the work is another kernel's. What lies outside A and B counts as zero, so ragged sides need no special
    case. ``paired``: two neighbours in a row of C (in a column, where ``config.c_by_columns``) can be written at once.
    ``map_c``: C's tensor map with boxes ``config.box_c``; 0: C is written from registers.
    ``steps``: 0, or those of `lower_tiles`: then tiles are left out whose elements all lie in columns beyond their row
    + ``diagonal``. ``first_step``, ``last_step``: the steps of the walk that are taken, the last one excluded; there
    may be fewer. Where ``config.selection`` is set, C's arguments are what `selection` says.
    ``workspace``: WORKSPACE_NBYTES a block for residues; m + n flags (bytes) where only flagged lines are written;
    m + n powers of two (int32) of lines in two parts.

    Grid: a multiple of ``config.cluster`` blocks, one a multiprocessor. Block: ``config.threads``. Shared:
    ``config.shared_nbytes``. Registers: 168 at entry, then 224 a consumer and 56 a producer, no spills.
    """
    consumers, stages, cluster, group = config.consumers, config.stages, config.cluster, config.group
    tile_m, tile_n, stage_nbytes, parts = config.tile_m, config.tile_n, config.stage_nbytes, config.parts
    registers = tile_n // 2
    config_kind = config.plan_kind
    guarded, residues, any_single = config_kind >= 0, config_kind == RESIDUES, config_kind == ANY_SINGLE
    kept_words = WORKSPACE_NBYTES // 4
    c_type = config.c_type
    sum_type = types.int32 if config.integer else types.float32
    in_totals = parts != 1 or config.promoted > 0
    fill = filler(config)
    if config.promoted:
        multiply_parts = promoted_multiplier(config)
    else:
        multiply_parts = half_multiplier(config) if parts == 2 else part_multiplier(config)
    in_registers, by_columns = config.a_in_registers, config.c_by_columns
    multiply_plane = register_multiplier(config) if in_registers else plane_multiplier(config)
    multiply_planned = planned_multiplier(config) if any_single else multiply_plane
    row_step, second_row = (2, 1) if in_registers else (1, 8)
    boxed, boxes_offset = config.boxes > 0, config.boxes_offset
    selects = config.selection != ""
    warp_nbytes = config.warp_nbytes
    if by_columns:
        store = column_store(tile_n, conversions(config))
    else:
        store = sum_store(
            tile_n, conversions(config), flagged_only=config.flagged_only, second_row=second_row
        )
    store_boxes = box_store(config)
    scaled, scale = parts == 2, line_scale(tile_n)
    prepare, select, put_away = selection(
        tile_n, config.selection, integer=config.integer, mutual=config.mutual
    )
    wait_stores = bulk_copy.bulk_wait(0, read=False)
    if residues and c_type in (types.float32, types.float64):
        keep_residues, add_residues = scaled_epilogue(WARPGROUP * consumers, tile_n, 1, c_type)
        own_words = OWN_WORDS
    else:
        keep_residues, add_residues = residue_epilogue(WARPGROUP * consumers, tile_n, 1, c_type)
        own_words = 4
    finds_least, mutual = config.least, config.mutual
    report_least = least_report(tile_n, 1)
    give_registers = warpgroup_mma.register_budget(PRODUCER_REGISTERS, grow=False)
    take_registers = warpgroup_mma.register_budget(CONSUMER_REGISTERS, grow=True)
    i32, i64, u32, u64 = types.int32, types.int64, types.uint32, types.uint64
    cluster_m = cluster * tile_m

    @cuda.jit(device=True, inline="always")
    def tile_at(index: Any, tiles_m: Any, tiles_n: Any, steps: Any, diagonal: Any) -> Any:
        if steps > 0:
            row, column = lower_tile(index, tiles_m, tiles_n, group, cluster_m, tile_n, diagonal)
        else:
            row, column = cluster_tile(index, tiles_m, tiles_n, group)
        return i32(row), i32(column)

    @cuda.jit(device=True, inline="always")
    def first_row(tile_row: Any, rank: Any, thread: Any) -> Any:
        """Of the 16 rows of C that a consumer warp holds."""
        of_warp = (thread // WARPGROUP - 1) * ROWS_PER_WARPGROUP + thread % WARPGROUP // WARP * C_BOX_LINES
        return (tile_row * cluster + rank) * tile_m + of_warp

    @cuda.jit(device=True, inline="always")
    def is_above(row: Any, column: Any, steps: Any, diagonal: Any) -> Any:
        return steps > 0 and i32(column * tile_n) > i32((row + 1) * cluster_m - 1 + diagonal)

    def kernel(  # type: ignore[no-untyped-def]
        map_a, map_b, c, row_stride, column_stride, m, n, k_steps, paired, accumulate, plan, workspace, map_c,
        steps, diagonal, first_step, last_step,
    ):  # fmt: skip
        planes, plan_kind = i64(1), i64(0)
        if guarded:
            settings = memory.global_array(plan, i64)
            plan_kind = settings[PLAN_KIND]
            if plan_kind >= RESIDUES if any_single else plan_kind != config_kind:
                return
            planes = settings[PLAN_PLANES]
        ring = u32((memory.shared_address(cuda.shared.array(0, types.uint8)) + u32(1023)) & u32(0xFFFFFC00))
        thread = cuda.threadIdx.x
        rank = barriers.cluster_rank()
        if thread == 0:
            full = ring + u32(stages * stage_nbytes)
            for stage in range(stages):
                barriers.barrier_init(full + u32(8 * stage), 1)
                # One arrival for each consumer warp of all blocks of the cluster: all have read the stage before it is
                # refilled.
                barriers.barrier_init(full + u32(8 * stages + 8 * stage), 4 * consumers * cluster)
            barriers.barrier_init_fence()
        # No block may signal another's barriers before they are initialised.
        barriers.cluster_barrier()

        tiles_m = i32((m + cluster * tile_m - 1) // (cluster * tile_m))
        tiles_n = i32((n + tile_n - 1) // tile_n)
        walked = i32(min(steps if steps > 0 else i32(tiles_m * tiles_n), last_step))
        first_tile, tile_stride = i32(first_step + cuda.blockIdx.x // cluster), i32(cuda.gridDim.x // cluster)
        place, parity = u32(0), u32(0)
        if thread < WARPGROUP:
            give_registers()
            if thread == 0:
                bulk_copy.tensor_map_acquire(map_a)
                bulk_copy.tensor_map_acquire(map_b)
                for tile in range(first_tile, walked, tile_stride):
                    tile_row, tile_column = tile_at(tile, tiles_m, tiles_n, steps, diagonal)
                    if is_above(tile_row, tile_column, steps, diagonal):
                        continue
                    place, parity = fill(
                        map_a,
                        map_b,
                        ring,
                        i32((tile_row * cluster + rank) * tile_m),
                        i32(tile_column * tile_n),
                        planes,
                        k_steps,
                        rank,
                        place,
                        parity,
                    )
        else:
            take_registers()
            warpgroup, lane = thread // WARPGROUP - 1, thread % WARP
            sums = cuda.local.array(registers, sum_type)
            totals = cuda.local.array(registers, sum_type)
            if boxed and map_c != 0:
                bulk_copy.tensor_map_acquire(map_c)
            out = memory.global_array(c, c_type)
            kept = memory.global_array(workspace, u32)
            kept_first = cuda.blockIdx.x * kept_words + own_words * (thread - WARPGROUP)
            staging = ring + u32(boxes_offset) + u32((thread - WARPGROUP) // WARP) * u32(warp_nbytes)
            waiting, lists = i32(0), i64(map_c) if mutual else i64(m)
            names = u64(plan) + u64(12) * u64(lists) if mutual else u64(map_c)
            for tile in range(first_tile, walked, tile_stride):
                tile_row, tile_column = tile_at(tile, tiles_m, tiles_n, steps, diagonal)
                if is_above(tile_row, tile_column, steps, diagonal):
                    continue  # as the producer does, and the other block of the cluster
                if selects:
                    lines = prepare(
                        staging,
                        lane,
                        column_stride,
                        accumulate,
                        plan,
                        workspace,
                        lists,
                        i64(first_row(tile_row, rank, thread) + lane // 4),
                        i64(tile_column * tile_n),
                        m,
                    )
                if not in_totals:
                    for plane in range(planes):
                        if any_single:
                            place, parity = multiply_planned(
                                plan_kind, sums, ring, k_steps, warpgroup, lane, place, parity
                            )
                        else:
                            place, parity = multiply_plane(
                                sums, ring, k_steps, warpgroup, lane, place, parity
                            )
                        if residues:
                            keep_residues(sums, plane, planes, kept, kept_first)
                else:
                    place, parity = multiply_parts(
                        totals, sums, ring, k_steps, warpgroup, lane, place, parity
                    )
                # Not before the products, which need the registers.
                warp_row, tile_first = first_row(tile_row, rank, thread), tile_column * tile_n
                row, column = i64(warp_row + row_step * (lane // 4)), i64(tile_first + 2 * (lane % 4))
                if selects:
                    waiting = select(
                        totals if in_totals else sums,
                        lines,
                        staging,
                        waiting,
                        lane,
                        c,
                        row_stride,
                        column_stride,
                        paired,
                        accumulate,
                        plan,
                        lists,
                        names,
                        row,
                        column,
                        m,
                        n,
                        steps,
                        diagonal,
                    )
                elif residues:
                    add_residues(
                        planes,
                        kept,
                        kept_first,
                        out,
                        row * row_stride + column * column_stride,
                        row_stride,
                        column_stride,
                        m - row,
                        n - column,
                        accumulate,
                        plan,
                        row,
                        column,
                    )
                elif finds_least:
                    report_least(sums, plan, m - row, n - column)
                elif boxed and map_c != 0:
                    store_boxes(
                        totals if in_totals else sums, staging, map_c, i32(warp_row), i32(tile_first), lane
                    )
                else:
                    whole = warp_row + C_BOX_LINES <= m if by_columns else tile_first + tile_n <= n
                    in_pairs = paired != 0 and whole
                    if scaled:
                        scale(totals, workspace, row, column, m, n)
                    store(
                        totals if in_totals else sums,
                        0,
                        out,
                        row,
                        column,
                        row_stride,
                        column_stride,
                        m,
                        n,
                        in_pairs,
                        accumulate,
                        workspace,
                    )
            if selects:
                put_away(staging, i32(0), waiting, lane, c, row_stride, paired, plan, lists, names)
            if boxed and map_c != 0 and lane == 0:
                wait_stores()
        # A block must not end while another may still signal its barriers or write its ring.
        barriers.cluster_barrier()

    return kernel
