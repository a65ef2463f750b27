"""The consumer's loop of the Hopper matrix kernel for 32-bit operands with m, not k, contiguous.

``wgmma`` takes 32-bit elements from shared memory with k contiguous only, but its first operand may come from
registers. So A's tile (lines of k, 32 elements of m each, swizzled by the copy engine) is read by ordinary loads,
rounded to TF32 on the way, and multiplied from there. A product A B whose B lies that way is C^T = B^T A^T.

A fragment's row may stand for any row of A: that only decides where its sums belong in C. Here rows g and g + 8 of a
warp's fragment are rows 2 g and 2 g + 1 of its part of the tile. One 8-byte load brings both, and the sums of both are
neighbours where C's columns are contiguous.

Sources: the register fragments: PTX ISA 9.7.15.5.1; when registers may be written again: the waits of CUTLASS's
``sm90_mma_tma_gmma_rs_warpspecialized``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda import types

from tilewright.kernels.gemm.hopper.wgmma_config import (
    ROWS_PER_WARPGROUP,
    STAGE_DEPTH_NBYTES,
    STEPS,
    SWIZZLE_NBYTES,
    WARPGROUP,
    Config,
)
from tilewright.kernels.gemm.hopper.wgmma_mainloop import b_tile, next_place
from tilewright.kernels.ptx import barriers, floats, memory, warpgroup_mma
from tilewright.kernels.ptx.unroll import unroll

WORDS_PER_STEP = 4
"""Registers of A that one ``wgmma`` takes of a thread."""
HALF_STEP = 4
"""Lines of k between the two that a lane reads in a step of eight."""
OTHER_HALF = HALF_STEP * STAGE_DEPTH_NBYTES | HALF_STEP << 4
"""The bits in which the places of a lane's two lines differ: four lines, and what that changes in the swizzle."""


def fragment_place() -> Callable[..., Any]:
    """``place(thread)``: from the beginning of a warpgroup's 64 rows in a stage to what a thread reads first.

    ``thread`` counts in the warpgroup. The bytes there are rows 2 g and 2 g + 1 (g = lane / 4) of the warp's 16 in
    line t = lane % 4 of k, or t + 4 for the lanes whose g has bit 1 set; those of the other line lie at this place XOR
    OTHER_HALF, those of step s 1024 s bytes further. A line's 16-byte chunks lie at their number XOR the line's, so the
    16 lanes that an 8-byte access serves at a time (four lines, and two chunks that would share banks without the
    exception for bit 1) read from all 32 banks.
    """
    u32 = types.uint32

    @cuda.jit(device=True, inline="always")
    def place(thread):  # type: ignore[no-untyped-def]
        lane, warp = u32(thread) & u32(31), u32(thread) >> u32(5)
        g = lane >> u32(2)
        line = (lane & u32(3)) | ((g & u32(2)) << u32(1))
        chunk = ((warp & u32(1)) << u32(2)) | (g >> u32(1))
        # Boxes of 32 rows follow each other: two warps read from each.
        box = (warp >> u32(1)) * u32(ROWS_PER_WARPGROUP // 2 * STAGE_DEPTH_NBYTES)
        return u32(
            box + line * u32(STAGE_DEPTH_NBYTES) + ((chunk ^ line) << u32(4)) + ((g & u32(1)) << u32(3))
        )

    return place


def register_multiplier(config: Config) -> Callable[..., Any]:
    """As ``wgmma_mainloop.plane_multiplier``, with A from registers.

    Each consumer reads a stage of A into one of two sets of registers while the products of the stage before, from
    the other set, are under way. It waits for those products before it gives their stage back, and so before it writes
    their registers again.
    """
    stages, stage_nbytes, cluster = config.stages, config.stage_nbytes, config.cluster
    tile_b, following, first_place = b_tile(config), next_place(config), fragment_place()
    multiply = warpgroup_mma.wgmma_registers(config.tile_n, STEPS)
    wait_all, wait_all_but_one = warpgroup_mma.wgmma_wait(0), warpgroup_mma.wgmma_wait(1)
    rows_nbytes = ROWS_PER_WARPGROUP * STAGE_DEPTH_NBYTES
    words = WORDS_PER_STEP * STEPS
    u32 = types.uint32

    @cuda.jit(device=True, inline="always")
    def load_step(i, fragments, here, there, crossed):  # type: ignore[no-untyped-def]
        low, high = memory.load_shared_pair(here + u32(SWIZZLE_NBYTES * i))
        other_low, other_high = memory.load_shared_pair(there + u32(SWIZZLE_NBYTES * i))
        low, high = floats.tf32_operand(low), floats.tf32_operand(high)
        other_low, other_high = floats.tf32_operand(other_low), floats.tf32_operand(other_high)
        fragments[4 * i] = other_low if crossed else low
        fragments[4 * i + 1] = other_high if crossed else high
        fragments[4 * i + 2] = low if crossed else other_low
        fragments[4 * i + 3] = high if crossed else other_high

    @cuda.jit(device=True, inline="always")
    def multiply_stage(sums, fragments, ring, first, crossed, step, place, parity):  # type: ignore[no-untyped-def]
        barriers.barrier_wait(ring + u32(stages * stage_nbytes) + u32(8) * place, parity)
        here = u32(ring + place * u32(stage_nbytes) + first)
        unroll(load_step, STEPS, (fragments, here, u32(here ^ u32(OTHER_HALF)), crossed))
        warpgroup_mma.wgmma_fence()
        multiply(sums, fragments, tile_b(ring, place), types.int32(step))
        warpgroup_mma.wgmma_commit()
        wait_all_but_one()

    @cuda.jit(device=True, inline="always")
    def multiply_plane(sums, ring, k_steps, warpgroup, lane, place, parity):  # type: ignore[no-untyped-def]
        even = cuda.local.array(words, u32)
        odd = cuda.local.array(words, u32)
        thread = u32(cuda.threadIdx.x) & u32(WARPGROUP - 1)
        crossed = (thread & u32(8)) != u32(0)  # bit 1 of g
        first = u32(first_place(thread) + u32(warpgroup) * u32(rows_nbytes))
        empty = ring + u32(stages * (stage_nbytes + 8))
        previous = empty
        for step in range(0, k_steps - 1, 2):
            multiply_stage(sums, even, ring, first, crossed, step, place, parity)
            if step > 0 and lane < cluster:
                barriers.barrier_arrive(previous, lane)
            previous = empty + u32(8) * place
            place, parity = following(place, parity)
            multiply_stage(sums, odd, ring, first, crossed, 1, place, parity)
            if lane < cluster:
                barriers.barrier_arrive(previous, lane)
            previous = empty + u32(8) * place
            place, parity = following(place, parity)
        if k_steps % 2 != 0:
            multiply_stage(sums, even, ring, first, crossed, k_steps - 1, place, parity)
            if k_steps > 1 and lane < cluster:
                barriers.barrier_arrive(previous, lane)
            previous = empty + u32(8) * place
            place, parity = following(place, parity)
        wait_all()
        if lane < cluster:
            barriers.barrier_arrive(previous, lane)
        return place, parity

    return multiply_plane
