"""The inner loops of the Hopper matrix kernel: one fills the ring of stages, the others multiply from it.

The ring has ``stages`` places and two barriers a place: ``full`` completes when a stage's bytes have
arrived, ``empty`` when every warp that reads them has done so. Both sides count places and the parity of
their rounds; the functions take the place and the parity and return those that come next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from numba import cuda
from numba.cuda import types

from tilewright.kernels.gemm.exact.residues import SINGLE_KINDS
from tilewright.kernels.gemm.hopper.wgmma_config import (
    LOW_SHIFT,
    ROWS_PER_WARPGROUP,
    STAGE_DEPTH_NBYTES,
    STEP_NBYTES,
    STEPS,
    SWIZZLE_NBYTES,
    Config,
)
from tilewright.kernels.ptx import barriers, bulk_copy, warpgroup_mma
from tilewright.kernels.ptx.unroll import unroll

ADDRESS_BITS = 0x3FFFF
"""The bits of a shared address that a descriptor keeps: above them is the block's rank in the cluster."""


def next_place(config: Config) -> Callable[..., Any]:
    stages = config.stages

    @cuda.jit(device=True, inline="always")
    def following(place, parity):  # type: ignore[no-untyped-def]
        last = place == types.uint32(stages - 1)
        return (
            types.uint32(0) if last else types.uint32(place + 1),
            types.uint32(parity ^ 1) if last else types.uint32(parity),
        )

    return following


def filler(config: Config) -> Callable[..., Any]:
    """The producer's loop over one tile of C: ``fill(maps, ring, ..., place, parity)``; one thread runs it.

    With a cluster, each block loads its own tile of A and a share of B's, which the copy engine writes into
    the shared memory of every block; a block's ``full`` barrier waits for all shares.
    """
    cluster, parts = config.cluster, config.parts
    tile_m, depth, stages = config.tile_m, config.depth, config.stages
    a_nbytes, stage_nbytes = config.a_nbytes, config.stage_nbytes
    m_major_a, n_major_b = config.m_major_a, config.n_major_b
    share_n = config.tile_n // cluster
    share_nbytes = share_n * STAGE_DEPTH_NBYTES
    boxes_a = tile_m // depth if m_major_a else 1
    boxes_b = share_n // depth if n_major_b else 1
    box_a_nbytes, box_b_nbytes = a_nbytes // boxes_a, share_nbytes // boxes_b
    everyone = (1 << cluster) - 1
    order = tuple(reversed(range(parts)))  # the smaller parts first
    multicast = cluster > 1
    following = next_place(config)
    i32, u32 = types.int32, types.uint32

    @cuda.jit(device=True, inline="always")
    def load(map_a, map_b, ring, row, column, k, plane, rank, place, parity):  # type: ignore[no-untyped-def]
        full = ring + u32(stages * stage_nbytes) + u32(8) * place
        barriers.barrier_wait(full + u32(8 * stages), parity ^ u32(1))
        barriers.barrier_expect(full, stage_nbytes)
        target = ring + place * u32(stage_nbytes)
        for box in range(boxes_a):
            x = row + box * depth if m_major_a else k
            y = k if m_major_a else row
            bulk_copy.tensor_load(target + u32(box * box_a_nbytes), map_a, full, x, y, plane)
        target = target + u32(a_nbytes) + rank * u32(share_nbytes)
        for box in range(boxes_b):
            x = column + box * depth if n_major_b else k
            y = k if n_major_b else column
            into = target + u32(box * box_b_nbytes)
            if multicast:
                bulk_copy.tensor_load_multicast(into, map_b, full, x, y, plane, everyone)
            else:
                bulk_copy.tensor_load(into, map_b, full, x, y, plane)

    @cuda.jit(device=True, inline="always")
    def fill(  # type: ignore[no-untyped-def]
        map_a, map_b, ring, row, column, planes, k_steps, rank, place, parity
    ):
        column = i32(column + rank * share_n)
        if parts == 1:
            for plane in range(planes):
                for step in range(k_steps):
                    load(map_a, map_b, ring, row, column, i32(step * depth), plane, rank, place, parity)
                    place, parity = following(place, parity)
        else:
            for step in range(k_steps):
                for part in order:
                    load(map_a, map_b, ring, row, column, i32(step * depth), part, rank, place, parity)
                    place, parity = following(place, parity)
        return place, parity

    return fill


def b_tile(config: Config) -> Callable[..., Any]:
    """``tile_b(ring, place)``: the descriptor of B's tile in a stage."""
    stage_nbytes, a_nbytes = config.stage_nbytes, config.a_nbytes
    leading = config.depth * STAGE_DEPTH_NBYTES if config.n_major_b else 16
    bits = warpgroup_mma.shared_tile(0, leading, SWIZZLE_NBYTES)
    u32, u64 = types.uint32, types.uint64

    @cuda.jit(device=True, inline="always")
    def tile_b(ring, place):  # type: ignore[no-untyped-def]
        address = ring + place * u32(stage_nbytes) + u32(a_nbytes)
        return u64(bits) | u64((address & u32(ADDRESS_BITS)) >> u32(4))

    return tile_b


def _descriptors(config: Config) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """``tile_a(ring, place, warpgroup)``, ``tile_b(ring, place)`` and the products ``multiply(sums, a, b,
    keep)``."""
    stage_nbytes = config.stage_nbytes
    # A tile with m or n contiguous is made of boxes of 64 lines of k: a step of 16 k is two groups of eight lines, and
    # 64 columns further begins the next box.
    box_nbytes = config.depth * STAGE_DEPTH_NBYTES
    advance = {False: STEP_NBYTES, True: 2 * SWIZZLE_NBYTES}
    leading = {False: 16, True: box_nbytes}
    bits_a = warpgroup_mma.shared_tile(0, leading[config.m_major_a], SWIZZLE_NBYTES)
    # Either way a warpgroup's 64 rows of A begin at multiples of this: 64 lines of 128 bytes, or one box.
    rows_nbytes = ROWS_PER_WARPGROUP * STAGE_DEPTH_NBYTES
    u32, u64 = types.uint32, types.uint64
    multiply = warpgroup_mma.wgmma(
        config.tile_n,
        ("s32." if config.integer else "f32.") + f"{config.kind_a}.{config.kind_b}",
        STEPS,
        advance_a=advance[config.m_major_a],
        advance_b=advance[config.n_major_b],
        transpose_a=config.m_major_a,
        transpose_b=config.n_major_b,
    )

    @cuda.jit(device=True, inline="always")
    def tile_a(ring, place, warpgroup):  # type: ignore[no-untyped-def]
        address = ring + place * u32(stage_nbytes) + u32(warpgroup) * u32(rows_nbytes)
        return u64(bits_a) | u64((address & u32(ADDRESS_BITS)) >> u32(4))

    return tile_a, b_tile(config), multiply


def planned_multiplier(config: Config) -> Callable[..., Any]:
    """As `plane_multiplier`, of bytes that are signed or not as a plan's kind says, which is the first argument."""
    of_kind = [
        plane_multiplier(replace(config, kind_a=kind_a, kind_b=kind_b)) for kind_a, kind_b in SINGLE_KINDS
    ]
    signed, unsigned_a, unsigned_b, unsigned = of_kind

    @cuda.jit(device=True, inline="always")
    def multiply_plane(kind, sums, ring, k_steps, warpgroup, lane, place, parity):  # type: ignore[no-untyped-def]
        # Apart, not a branch for each stage: the assembler lets products overlap only within straight loops.
        if kind == 0:
            place, parity = signed(sums, ring, k_steps, warpgroup, lane, place, parity)
        elif kind == 1:
            place, parity = unsigned_a(sums, ring, k_steps, warpgroup, lane, place, parity)
        elif kind == 2:
            place, parity = unsigned_b(sums, ring, k_steps, warpgroup, lane, place, parity)
        else:
            place, parity = unsigned(sums, ring, k_steps, warpgroup, lane, place, parity)
        return place, parity

    return multiply_plane


def plane_multiplier(config: Config) -> Callable[..., Any]:
    """A consumer's loop over one plane of one tile: afterwards ``sums`` holds its 64 × tile_n products.

    The products of a stage stay under way while those of the next are issued, so the tensor cores never wait.
    """
    stages, stage_nbytes, cluster = config.stages, config.stage_nbytes, config.cluster
    tile_a, tile_b, multiply = _descriptors(config)
    following = next_place(config)
    wait_all, wait_all_but_one = warpgroup_mma.wgmma_wait(0), warpgroup_mma.wgmma_wait(1)
    u32 = types.uint32

    @cuda.jit(device=True, inline="always")
    def multiply_plane(sums, ring, k_steps, warpgroup, lane, place, parity):  # type: ignore[no-untyped-def]
        full = ring + u32(stages * stage_nbytes)
        empty = full + u32(8 * stages)
        previous = empty
        for step in range(k_steps):
            barriers.barrier_wait(full + u32(8) * place, parity)
            warpgroup_mma.wgmma_fence()
            multiply(sums, tile_a(ring, place, warpgroup), tile_b(ring, place), types.int32(step))
            warpgroup_mma.wgmma_commit()
            # The products of the stage before are done, so its place may be filled again.
            wait_all_but_one()
            if step > 0 and lane < cluster:
                barriers.barrier_arrive(previous, lane)
            previous = empty + u32(8) * place
            place, parity = following(place, parity)
        wait_all()
        if lane < cluster:
            barriers.barrier_arrive(previous, lane)
        return place, parity

    return multiply_plane


@cuda.jit(device=True, inline="always")
def clear_total(i, totals):  # type: ignore[no-untyped-def]
    totals[i] = types.float32(0)


@cuda.jit(device=True, inline="always")
def add_to_total(i, totals, sums):  # type: ignore[no-untyped-def]
    """In ordinary float32 arithmetic, which rounds where the tensor cores truncate."""
    totals[i] += sums[i]


def promoted_multiplier(config: Config) -> Callable[..., Any]:
    """A consumer's loop over one tile of float8: afterwards ``totals`` holds the products.

    Of sums of float8 products the tensor cores keep some 14 bits. So they only ever add up ``config.promoted`` stages
    of k, and those sums are added to ``totals`` in ordinary float32 arithmetic. Meanwhile the tensor cores have the
    products of the block's other consumer: each waits for its own, so that they take turns.
    """
    stages, stage_nbytes, cluster = config.stages, config.stage_nbytes, config.cluster
    interval = config.promoted
    tile_a, tile_b, multiply = _descriptors(config)
    following = next_place(config)
    wait_all, wait_all_but_one = warpgroup_mma.wgmma_wait(0), warpgroup_mma.wgmma_wait(1)
    registers = config.tile_n // 2
    u32 = types.uint32

    @cuda.jit(device=True, inline="always")
    def multiply_stage(sums, ring, warpgroup, place, parity, keep):  # type: ignore[no-untyped-def]
        barriers.barrier_wait(ring + u32(stages * stage_nbytes) + u32(8) * place, parity)
        warpgroup_mma.wgmma_fence()
        multiply(sums, tile_a(ring, place, warpgroup), tile_b(ring, place), types.int32(keep))
        warpgroup_mma.wgmma_commit()

    @cuda.jit(device=True, inline="always")
    def multiply_promoted(totals, sums, ring, k_steps, warpgroup, lane, place, parity):  # type: ignore[no-untyped-def]
        empty = ring + u32(stages * (stage_nbytes + 8))
        unroll(clear_total, registers, (totals,))
        for first in range(0, k_steps, interval):
            multiply_stage(sums, ring, warpgroup, place, parity, 0)
            previous = empty + u32(8) * place
            place, parity = following(place, parity)
            if interval > 1:
                for _ in range(min(interval, k_steps - first) - 1):
                    multiply_stage(sums, ring, warpgroup, place, parity, 1)
                    wait_all_but_one()
                    if lane < cluster:
                        barriers.barrier_arrive(previous, lane)
                    previous = empty + u32(8) * place
                    place, parity = following(place, parity)
            wait_all()
            if lane < cluster:
                barriers.barrier_arrive(previous, lane)
            unroll(add_to_total, registers, (totals, sums))
        return place, parity

    return multiply_promoted


def part_multiplier(config: Config) -> Callable[..., Any]:
    """A consumer's loop over one tile of split float32 numbers: afterwards ``totals`` holds the products.

    The tensor cores truncate sums and do not round them. So they only ever add up 64 elements of k, the products of the
    smaller parts first, and those sums are added to ``totals`` in ordinary float32 arithmetic. The lowest parts are not
    needed after the first group of products, nor the middle ones after the second.
    """
    stages, stage_nbytes, cluster = config.stages, config.stage_nbytes, config.cluster
    tile_a, tile_b, multiply = _descriptors(config)
    following = next_place(config)
    wait_two, wait_one, wait_none = (warpgroup_mma.wgmma_wait(pending) for pending in (2, 1, 0))
    registers = config.tile_n // 2
    u32 = types.uint32

    @cuda.jit(device=True, inline="always")
    def multiply_parts(totals, sums, ring, k_steps, warpgroup, lane, place, parity):  # type: ignore[no-untyped-def]
        full = ring + u32(stages * stage_nbytes)
        empty = full + u32(8 * stages)
        unroll(clear_total, registers, (totals,))
        for _ in range(k_steps):
            low = place
            barriers.barrier_wait(full + u32(8) * low, parity)
            middle, parity = following(low, parity)
            barriers.barrier_wait(full + u32(8) * middle, parity)
            high, parity = following(middle, parity)
            barriers.barrier_wait(full + u32(8) * high, parity)
            place, parity = following(high, parity)
            a_low, a_middle, a_high = (
                tile_a(ring, low, warpgroup),
                tile_a(ring, middle, warpgroup),
                tile_a(ring, high, warpgroup),
            )
            b_low, b_middle, b_high = tile_b(ring, low), tile_b(ring, middle), tile_b(ring, high)
            warpgroup_mma.wgmma_fence()
            multiply(sums, a_low, b_high, 0)
            multiply(sums, a_high, b_low, 1)
            warpgroup_mma.wgmma_commit()
            multiply(sums, a_middle, b_middle, 1)
            multiply(sums, a_middle, b_high, 1)
            multiply(sums, a_high, b_middle, 1)
            warpgroup_mma.wgmma_commit()
            multiply(sums, a_high, b_high, 1)
            warpgroup_mma.wgmma_commit()
            wait_two()
            if lane < cluster:
                barriers.barrier_arrive(empty + u32(8) * low, lane)
            wait_one()
            if lane < cluster:
                barriers.barrier_arrive(empty + u32(8) * middle, lane)
            wait_none()
            if lane < cluster:
                barriers.barrier_arrive(empty + u32(8) * high, lane)
            unroll(add_to_total, registers, (totals, sums))
        return place, parity

    return multiply_parts


def half_multiplier(config: Config) -> Callable[..., Any]:
    """A consumer's loop over one tile of float32 numbers in two float16 parts: afterwards ``totals`` holds the products
    of numbers as they are scaled.

    The low parts are 2**LOW_SHIFT times what they stand for. So products with them are added up by themselves, 64
    elements of k at a time, and so are those of the high parts; both sums are added to ``totals`` in ordinary float32
    arithmetic. Meanwhile the tensor cores have the products of the block's other consumer.
    """
    stages, stage_nbytes, cluster = config.stages, config.stage_nbytes, config.cluster
    tile_a, tile_b, multiply = _descriptors(config)
    following = next_place(config)
    wait_none = warpgroup_mma.wgmma_wait(0)
    registers = config.tile_n // 2
    low_scale = 2.0**-LOW_SHIFT
    u32, f32 = types.uint32, types.float32

    @cuda.jit(device=True, inline="always")
    def add_low(i, totals, sums):  # type: ignore[no-untyped-def]
        totals[i] += f32(sums[i] * f32(low_scale))

    @cuda.jit(device=True, inline="always")
    def multiply_halves(totals, sums, ring, k_steps, warpgroup, lane, place, parity):  # type: ignore[no-untyped-def]
        full = ring + u32(stages * stage_nbytes)
        empty = full + u32(8 * stages)
        unroll(clear_total, registers, (totals,))
        for _ in range(k_steps):
            low = place
            barriers.barrier_wait(full + u32(8) * low, parity)
            high, parity = following(low, parity)
            barriers.barrier_wait(full + u32(8) * high, parity)
            place, parity = following(high, parity)
            warpgroup_mma.wgmma_fence()
            multiply(sums, tile_a(ring, low, warpgroup), tile_b(ring, high), 0)
            multiply(sums, tile_a(ring, high, warpgroup), tile_b(ring, low), 1)
            warpgroup_mma.wgmma_commit()
            wait_none()
            if lane < cluster:
                barriers.barrier_arrive(empty + u32(8) * low, lane)
            unroll(add_low, registers, (totals, sums))
            warpgroup_mma.wgmma_fence()
            multiply(sums, tile_a(ring, high, warpgroup), tile_b(ring, high), 0)
            warpgroup_mma.wgmma_commit()
            wait_none()
            if lane < cluster:
                barriers.barrier_arrive(empty + u32(8) * high, lane)
            unroll(add_to_total, registers, (totals, sums))
        return place, parity

    return multiply_halves
