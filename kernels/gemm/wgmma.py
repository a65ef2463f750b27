"""The Hopper matrix kernel: bulk copies, barriers in shared memory, warpgroup tensor cores, persistent
blocks.

One warpgroup (the producer) keeps a ring of stages in shared memory full; the others (consumers) multiply
64 rows each and write their part of C. Two blocks form a cluster, lie below each other in C, and share B:
each loads half of B's tile and the copy engine writes it to both. The blocks are persistent and walk C in
columns of a few cluster tiles, so that what the blocks read at one time stays in the second-level cache.

Sources: the structure is CUTLASS's warp-specialised cooperative kernel for sm_90; the steps, one by one,
are told in P. Shankhdhar, "Outperforming cuBLAS on H100: a worklog" (2024). The instructions: PTX ISA 9.7.9
(bulk copies), 9.7.13 (mbarrier), 9.7.15 (wgmma).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numba.cuda import types

from tilewright.kernels import ptx
from tilewright.kernels.gemm.residue_epilogue import WORKSPACE_NBYTES, residue_epilogue
from tilewright.kernels.gemm.residues import PLAN_KIND, PLAN_PLANES, RESIDUES

WARPGROUP = 128
ROWS_PER_WARPGROUP = 64
STAGE_DEPTH_NBYTES = 128
"""Bytes of k in a stage: the width of the widest swizzle."""
SWIZZLE_NBYTES = 1024
"""A swizzled tile repeats every eight rows of 128 bytes; stages begin at multiples of it."""
STEP_NBYTES = 32
PRODUCER_REGISTERS = 56
CONSUMER_REGISTERS = 224
OPERAND_NBYTES = {"s8": 1, "u8": 1, "bf16": 2, "f16": 2, "tf32": 4}


@dataclass(frozen=True)
class Config:
    """One compiled variant. ``kind_a`` and ``kind_b`` are PTX operand types; C's type is ``c_type``."""

    kind_a: str
    kind_b: str
    c_type: Any
    """Numba scalar type of C's elements."""
    n_major_b: bool = False
    """B lies in memory with n, not k, side by side (16-bit operands only)."""
    plan_kind: int = -1
    """If not negative: read the plan first, and return unless its kind is this."""
    tile_n: int = 256
    consumers: int = 2
    stages: int = 4
    cluster: int = 2
    group: int = 8
    """Cluster tiles side by side in m before the walk moves on in n."""

    @property
    def tile_m(self) -> int:
        return self.consumers * ROWS_PER_WARPGROUP

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP

    @property
    def depth(self) -> int:
        """Elements of k in a stage."""
        return STAGE_DEPTH_NBYTES // OPERAND_NBYTES[self.kind_a]

    @property
    def stage_nbytes(self) -> int:
        return (self.tile_m + self.tile_n) * STAGE_DEPTH_NBYTES

    @property
    def shared_nbytes(self) -> int:
        """Dynamic shared memory: the ring, its barriers, and room to begin at a multiple of the swizzle."""
        return self.stages * (self.stage_nbytes + 16) + SWIZZLE_NBYTES

    @property
    def box_a(self) -> tuple[int, int]:
        """(elements side by side, lines) of one bulk copy of A."""
        return self.depth, self.tile_m

    @property
    def box_b(self) -> tuple[int, int]:
        return (self.depth, self.depth) if self.n_major_b else (self.depth, self.tile_n // self.cluster)

    @property
    def integer(self) -> bool:
        return OPERAND_NBYTES[self.kind_a] == 1


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
)
"""What every variant takes: scalars only, so that one compilation serves all layouts."""


@cuda.jit(device=True, forceinline=True)
def cluster_tile(index: Any, tiles_m: Any, tiles_n: Any, group: Any) -> Any:
    """Where in C, in cluster tiles, step ``index`` of the walk lies: columns of ``group`` tiles, left to
    right."""
    per_band = group * tiles_n
    band = index // per_band
    first = band * group
    height = min(tiles_m - first, group)
    within = index - band * per_band
    column = within // height
    return first + within - column * height, column


def kernel_function(config: Config) -> Callable[..., Any]:
    """The kernel of ``config`` as a Python function of ``ARGUMENTS``, for ``cuda.jit`` or
    ``cuda.compile_ptx``.

    A is m × k and B is k × n behind tensor maps with boxes ``config.box_a`` and ``config.box_b``; both are
    k-major unless ``config.n_major_b``. C is m × n with the given strides; every element is written (added
    to when ``accumulate``). Whatever lies outside A and B counts as zero, so ragged sides need no care.
    Grid: a multiple of ``config.cluster`` blocks, one a multiprocessor. Block: ``config.threads``. Shared:
    ``config.shared_nbytes``. Registers: 168 at entry, then 224 a consumer and 56 a producer, no spills.
    """
    consumers, stages, cluster, group = config.consumers, config.stages, config.cluster, config.group
    tile_m, tile_n, depth = config.tile_m, config.tile_n, config.depth
    registers = tile_n // 2
    stage_nbytes = config.stage_nbytes
    a_nbytes = tile_m * STAGE_DEPTH_NBYTES
    half_nbytes = tile_n * STAGE_DEPTH_NBYTES // cluster
    half_n = tile_n // cluster
    n_major_b = config.n_major_b
    boxes_b = half_n // depth if n_major_b else 1
    box_nbytes = half_nbytes // boxes_b
    everyone = (1 << cluster) - 1
    shared_by_cluster = cluster > 1
    integer, config_kind = config.integer, config.plan_kind
    guarded, residues = config_kind >= 0, config_kind == RESIDUES
    kept_words = WORKSPACE_NBYTES // 4
    c_type = config.c_type
    sum_type = types.int32 if integer else types.float32
    wide_type = c_type if integer else types.float32
    steps = STAGE_DEPTH_NBYTES // STEP_NBYTES
    # 16-bit operands in n-major tiles: a step of 16 k is two groups of eight rows; 64 columns further is
    # the next box.
    advance_b = 2 * SWIZZLE_NBYTES if n_major_b else STEP_NBYTES
    leading_b = depth * STAGE_DEPTH_NBYTES if n_major_b else 16
    tile_bits_a = ptx.shared_tile(0, 16, SWIZZLE_NBYTES)
    tile_bits_b = ptx.shared_tile(0, leading_b, SWIZZLE_NBYTES)
    kind = ("s32." if integer else "f32.") + f"{config.kind_a}.{config.kind_b}"
    multiply = ptx.wgmma(tile_n, kind, steps, advance_b=advance_b, transpose_b=n_major_b)
    give_registers = ptx.register_budget(PRODUCER_REGISTERS, grow=False)
    take_registers = ptx.register_budget(CONSUMER_REGISTERS, grow=True)
    wait_all, wait_all_but_one = ptx.wgmma_wait(0), ptx.wgmma_wait(1)

    pairs = tile_n // 8
    keep_residues, add_residues = residue_epilogue(consumers, tile_n, c_type)

    @cuda.jit(device=True, forceinline=True)
    def store_upper_pair(j, sums, out, start):  # type: ignore[no-untyped-def]
        ptx.store_pair(out, start + 8 * j, c_type(sums[4 * j]), c_type(sums[4 * j + 1]))

    @cuda.jit(device=True, forceinline=True)
    def store_lower_pair(j, sums, out, start):  # type: ignore[no-untyped-def]
        ptx.store_pair(out, start + 8 * j, c_type(sums[4 * j + 2]), c_type(sums[4 * j + 3]))

    @cuda.jit(device=True, forceinline=True)
    def store_elements(j, sums, out, start, stride, columns, accumulate, half):  # type: ignore[no-untyped-def]
        for side in range(2):
            if 8 * j + side < columns:
                place = start + (8 * j + side) * stride
                value = wide_type(sums[4 * j + side] if half == 0 else sums[4 * j + 2 + side])
                if accumulate != 0:
                    value += wide_type(out[place])
                out[place] = c_type(value)

    def kernel(
        map_a,
        map_b,
        c,
        row_stride,
        column_stride,
        m,
        n,
        k_steps,
        paired,
        accumulate,
        plan,
        workspace,
    ):  # type: ignore[no-untyped-def]
        planes = types.int64(1)
        if guarded:
            if ptx.global_array(plan, types.int64)[PLAN_KIND] != config_kind:
                return
            planes = ptx.global_array(plan, types.int64)[PLAN_PLANES]
        ring = (ptx.shared_address(cuda.shared.array(0, types.uint8)) + 1023) & 0xFFFFFC00
        ring = types.uint32(ring)
        full = types.uint32(ring + stages * stage_nbytes)
        empty = types.uint32(full + 8 * stages)
        thread = cuda.threadIdx.x
        rank = ptx.cluster_rank()
        if thread == 0:
            for stage in range(stages):
                ptx.barrier_init(full + 8 * stage, 1)
                # One arrival a consumer warp of every block that writes here: all have read before any
                # refills.
                ptx.barrier_init(empty + 8 * stage, 4 * consumers * cluster)
            ptx.barrier_init_fence()
        # No block may signal another's barriers before they are initialised.
        ptx.cluster_barrier()

        tiles_m = types.int32((m + cluster * tile_m - 1) // (cluster * tile_m))
        tiles_n = types.int32((n + tile_n - 1) // tile_n)
        tiles = tiles_m * tiles_n
        first_tile = types.int32(cuda.blockIdx.x // cluster)
        tile_stride = types.int32(cuda.gridDim.x // cluster)
        stage = types.uint32(0)
        parity = types.uint32(0)

        if thread < WARPGROUP:
            give_registers()
            if thread == 0:
                ptx.tensor_map_acquire(map_a)
                ptx.tensor_map_acquire(map_b)
                for tile in range(first_tile, tiles, tile_stride):
                    tile_row, tile_column = cluster_tile(tile, tiles_m, tiles_n, group)
                    row = (tile_row * cluster + rank) * tile_m
                    column = tile_column * tile_n + rank * half_n
                    for plane in range(planes):
                        for step in range(k_steps):
                            ptx.barrier_wait(empty + 8 * stage, parity ^ 1)
                            arrived = full + 8 * stage
                            target = ring + stage * stage_nbytes
                            ptx.barrier_expect(arrived, stage_nbytes)
                            ptx.tensor_load(target, map_a, arrived, step * depth, row, plane)
                            target = target + a_nbytes + rank * half_nbytes
                            for box in range(boxes_b):
                                x = column + box * depth if n_major_b else step * depth
                                y = step * depth if n_major_b else column
                                into = target + box * box_nbytes
                                if shared_by_cluster:
                                    ptx.tensor_load_multicast(into, map_b, arrived, x, y, plane, everyone)
                                else:
                                    ptx.tensor_load(into, map_b, arrived, x, y, plane)
                            stage += types.uint32(1)
                            if stage == stages:
                                stage = types.uint32(0)
                                parity ^= types.uint32(1)
        else:
            take_registers()
            warpgroup = thread // WARPGROUP - 1
            lane = thread % 32
            sums = cuda.local.array(registers, sum_type)
            out = ptx.global_array(c, c_type)
            kept = ptx.global_array(workspace, types.uint32)
            kept_first = cuda.blockIdx.x * kept_words + 4 * (thread - WARPGROUP)
            for tile in range(first_tile, tiles, tile_stride):
                for plane in range(planes):
                    previous = empty
                    for step in range(k_steps):
                        ptx.barrier_wait(full + 8 * stage, parity)
                        base = ring + stage * stage_nbytes
                        # Above bit 17 a block's addresses hold its rank in the cluster, which no descriptor
                        # takes.
                        rows_above = warpgroup * (ROWS_PER_WARPGROUP * STAGE_DEPTH_NBYTES)
                        a = tile_bits_a | types.uint64(((base + rows_above) & 0x3FFFF) >> 4)
                        b = tile_bits_b | types.uint64(((base + a_nbytes) & 0x3FFFF) >> 4)
                        ptx.wgmma_fence()
                        multiply(sums, a, b, types.int32(step))
                        ptx.wgmma_commit()
                        # The products of the stage before are done, so its place may be filled again.
                        wait_all_but_one()
                        if step > 0 and lane < cluster:
                            ptx.barrier_arrive(previous, lane)
                        previous = empty + 8 * stage
                        stage += types.uint32(1)
                        if stage == stages:
                            stage = types.uint32(0)
                            parity ^= types.uint32(1)
                    wait_all()
                    if lane < cluster:
                        ptx.barrier_arrive(previous, lane)
                    if residues:
                        keep_residues(sums, plane, planes, kept, kept_first)
                tile_row, tile_column = cluster_tile(tile, tiles_m, tiles_n, group)
                row = types.int64(
                    (tile_row * cluster + rank) * tile_m
                    + warpgroup * ROWS_PER_WARPGROUP
                    + (thread % WARPGROUP) // 32 * 16
                    + lane // 4
                )
                column = types.int64(tile_column * tile_n + 2 * (lane % 4))
                whole = paired != 0 and accumulate == 0 and (tile_column + 1) * tile_n <= n
                if residues:
                    for quarter in range(tile_n // 32):
                        add_residues(
                            quarter,
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
                        )
                    continue
                for half in range(2):
                    if row + 8 * half < m:
                        start = (row + 8 * half) * row_stride + column * column_stride
                        if whole and half == 0:
                            ptx.unroll(store_upper_pair, pairs, (sums, out, start))
                        elif whole:
                            ptx.unroll(store_lower_pair, pairs, (sums, out, start))
                        else:
                            ptx.unroll(
                                store_elements,
                                pairs,
                                (sums, out, start, column_stride, n - column, accumulate, half),
                            )
        # A block must not end while another may still signal its barriers or write its ring.
        ptx.cluster_barrier()

    return kernel
