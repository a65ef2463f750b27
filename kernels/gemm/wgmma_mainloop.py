"""The inner loops of the Hopper matrix kernel: one fills the ring of stages, the others multiply what is in
it.

The ring has ``stages`` places and two barriers a place: ``full`` completes when a stage's bytes have
arrived, ``empty`` when every warp that reads them has done so. Both sides count places and the parity of
their rounds; the functions take the place and the parity and return those that come next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda import types

from tilewright.kernels import ptx
from tilewright.kernels.gemm.wgmma_config import (
    ROWS_PER_WARPGROUP,
    STAGE_DEPTH_NBYTES,
    STEP_NBYTES,
    STEPS,
    SWIZZLE_NBYTES,
    WARPGROUP,
    Config,
)

ADDRESS_BITS = 0x3FFFF
"""What a descriptor keeps of a shared address: above it stands the block's rank in the cluster."""


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

    With a cluster, blocks below each other load a share of B's tile each, which the copy engine writes into the
    shared memory of all of them, and blocks side by side a share of A's; a block's ``full`` barrier waits for all
    shares.
    """
    cluster, cluster_n, parts = config.cluster, config.cluster_n, config.parts
    tile_m, depth, stages = config.tile_m, config.depth, config.stages
    a_nbytes, stage_nbytes = config.a_nbytes, config.stage_nbytes
    m_major_a, n_major_b = config.m_major_a, config.n_major_b
    share_m, share_n = tile_m // cluster_n, config.tile_n // cluster
    share_a_nbytes, share_b_nbytes = share_m * STAGE_DEPTH_NBYTES, share_n * STAGE_DEPTH_NBYTES
    boxes_a = share_m // depth if m_major_a else 1
    boxes_b = share_n // depth if n_major_b else 1
    box_a_nbytes, box_b_nbytes = share_a_nbytes // boxes_a, share_b_nbytes // boxes_b
    column_blocks = (1 << cluster) - 1
    row_blocks = sum(1 << cluster * j for j in range(cluster_n))
    multicast_a, multicast_b = cluster_n > 1, cluster > 1
    following = next_place(config)
    i32, u32 = types.int32, types.uint32

    @cuda.jit(device=True, inline="always")
    def load(  # type: ignore[no-untyped-def]
        map_a, map_b, ring, row, column, k, plane, rank_m, rank_n, place, parity
    ):
        full = ring + u32(stages * stage_nbytes) + u32(8) * place
        ptx.barrier_wait(full + u32(8 * stages), parity ^ u32(1))
        ptx.barrier_expect(full, stage_nbytes)
        first = ring + place * u32(stage_nbytes)
        target = first + rank_n * u32(share_a_nbytes)
        for box in range(boxes_a):
            x = row + box * depth if m_major_a else k
            y = k if m_major_a else row
            into = target + u32(box * box_a_nbytes)
            if multicast_a:
                ptx.tensor_load_multicast(into, map_a, full, x, y, plane, u32(row_blocks) << rank_m)
            else:
                ptx.tensor_load(into, map_a, full, x, y, plane)
        target = first + u32(a_nbytes) + rank_m * u32(share_b_nbytes)
        for box in range(boxes_b):
            x = column + box * depth if n_major_b else k
            y = k if n_major_b else column
            into = target + u32(box * box_b_nbytes)
            if multicast_b:
                peers = u32(column_blocks) << (u32(cluster) * rank_n)
                ptx.tensor_load_multicast(into, map_b, full, x, y, plane, peers)
            else:
                ptx.tensor_load(into, map_b, full, x, y, plane)

    @cuda.jit(device=True, inline="always")
    def fill(  # type: ignore[no-untyped-def]
        map_a, map_b, ring, row, column, planes, k_steps, rank_m, rank_n, place, parity
    ):
        row = i32(row + rank_n * share_m)
        column = i32(column + rank_m * share_n)
        if parts == 1:
            for plane in range(planes):
                for step in range(k_steps):
                    k = i32(step * depth)
                    load(map_a, map_b, ring, row, column, k, plane, rank_m, rank_n, place, parity)
                    place, parity = following(place, parity)
        else:
            for step in range(k_steps):
                for part in (2, 1, 0):
                    k = i32(step * depth)
                    load(map_a, map_b, ring, row, column, k, part, rank_m, rank_n, place, parity)
                    place, parity = following(place, parity)
        return place, parity

    return fill


def peer(config: Config) -> Callable[..., Any]:
    """``of_lane(lane, rank)``: the block whose producer a lane tells that a stage was read, for lanes below
    ``config.peers``: the blocks below each other first, then those side by side."""
    cluster, one_column = config.cluster, config.cluster_n == 1
    u32 = types.uint32

    @cuda.jit(device=True, inline="always")
    def of_lane(lane, rank):  # type: ignore[no-untyped-def]
        if one_column:
            return u32(lane)
        rank_n = rank // u32(cluster)
        if lane < cluster:
            return u32(lane + cluster * rank_n)
        other = lane - cluster
        return u32(rank % u32(cluster) + cluster * (other + (1 if other >= rank_n else 0)))

    return of_lane


def b_tile(config: Config) -> Callable[..., Any]:
    """``tile_b(ring, place)``: the descriptor of B's tile in a stage."""
    stage_nbytes, a_nbytes = config.stage_nbytes, config.a_nbytes
    leading = config.depth * STAGE_DEPTH_NBYTES if config.n_major_b else 16
    bits = ptx.shared_tile(0, leading, SWIZZLE_NBYTES)
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
    # A tile with m or n side by side is made of boxes of 64 lines of k: a step of 16 k is two groups of eight
    # lines, and 64 columns further begins the next box.
    box_nbytes = config.depth * STAGE_DEPTH_NBYTES
    advance = {False: STEP_NBYTES, True: 2 * SWIZZLE_NBYTES}
    leading = {False: 16, True: box_nbytes}
    bits_a = ptx.shared_tile(0, leading[config.m_major_a], SWIZZLE_NBYTES)
    # Either way a warpgroup's 64 rows of A begin here: 64 lines of 128 bytes, or one box.
    rows_nbytes = ROWS_PER_WARPGROUP * STAGE_DEPTH_NBYTES
    u32, u64 = types.uint32, types.uint64
    multiply = ptx.wgmma(
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


def plane_multiplier(config: Config) -> Callable[..., Any]:
    """A consumer's loop over one plane of one tile: afterwards ``sums`` holds its 64 × tile_n products.

    The products of a stage stay under way while those of the next are issued, so the tensor cores never wait.
    """
    stages, stage_nbytes, peers = config.stages, config.stage_nbytes, config.peers
    tile_a, tile_b, multiply = _descriptors(config)
    following = next_place(config)
    wait_all, wait_all_but_one = ptx.wgmma_wait(0), ptx.wgmma_wait(1)
    lead, consumer_threads = config.lead, WARPGROUP * config.consumers
    first_goes, first_went = (ptx.named_barrier(1, consumer_threads, wait=wait) for wait in (False, True))
    u32 = types.uint32

    @cuda.jit(device=True, inline="always")
    def multiply_plane(sums, ring, k_steps, warpgroup, lane, peer, place, parity):  # type: ignore[no-untyped-def]
        full = ring + u32(stages * stage_nbytes)
        empty = full + u32(8 * stages)
        previous = empty
        # The ring keeps the first consumer from meeting the others a tile later only if it is shorter than a tile.
        apart = lead > 0 and k_steps > stages
        if apart and warpgroup != 0:
            first_went()
        for step in range(k_steps):
            ptx.barrier_wait(full + u32(8) * place, parity)
            ptx.wgmma_fence()
            multiply(sums, tile_a(ring, place, warpgroup), tile_b(ring, place), types.int32(step))
            ptx.wgmma_commit()
            # The products of the stage before are done, so its place may be filled again.
            wait_all_but_one()
            if step > 0 and lane < peers:
                ptx.barrier_arrive(previous, peer)
            if apart and warpgroup == 0 and step == lead - 1:
                first_goes()
            previous = empty + u32(8) * place
            place, parity = following(place, parity)
        wait_all()
        if lane < peers:
            ptx.barrier_arrive(previous, peer)
        return place, parity

    return multiply_plane


def part_multiplier(config: Config) -> Callable[..., Any]:
    """A consumer's loop over one tile of split float32 numbers: afterwards ``totals`` holds the products.

    The tensor cores cut off, and do not round, what a sum cannot hold. So they only ever add up 64 elements
    of k, the products of the smaller parts first, and those sums are added to ``totals`` in ordinary
    float32 arithmetic. The lowest parts are not needed after the first group of products, nor the middle
    ones after the second.
    """
    stages, stage_nbytes, peers = config.stages, config.stage_nbytes, config.peers
    tile_a, tile_b, multiply = _descriptors(config)
    following = next_place(config)
    wait_two, wait_one, wait_none = ptx.wgmma_wait(2), ptx.wgmma_wait(1), ptx.wgmma_wait(0)
    registers = config.tile_n // 2
    u32 = types.uint32

    @cuda.jit(device=True, inline="always")
    def clear(i, totals):  # type: ignore[no-untyped-def]
        totals[i] = types.float32(0)

    @cuda.jit(device=True, inline="always")
    def add(i, totals, sums):  # type: ignore[no-untyped-def]
        totals[i] += sums[i]

    @cuda.jit(device=True, inline="always")
    def multiply_parts(  # type: ignore[no-untyped-def]
        totals, sums, ring, k_steps, warpgroup, lane, peer, place, parity
    ):
        full = ring + u32(stages * stage_nbytes)
        empty = full + u32(8 * stages)
        ptx.unroll(clear, registers, (totals,))
        for _ in range(k_steps):
            low = place
            ptx.barrier_wait(full + u32(8) * low, parity)
            middle, parity = following(low, parity)
            ptx.barrier_wait(full + u32(8) * middle, parity)
            high, parity = following(middle, parity)
            ptx.barrier_wait(full + u32(8) * high, parity)
            place, parity = following(high, parity)
            a_low, a_middle, a_high = (
                tile_a(ring, low, warpgroup),
                tile_a(ring, middle, warpgroup),
                tile_a(ring, high, warpgroup),
            )
            b_low, b_middle, b_high = tile_b(ring, low), tile_b(ring, middle), tile_b(ring, high)
            ptx.wgmma_fence()
            multiply(sums, a_low, b_high, 0)
            multiply(sums, a_high, b_low, 1)
            ptx.wgmma_commit()
            multiply(sums, a_middle, b_middle, 1)
            multiply(sums, a_middle, b_high, 1)
            multiply(sums, a_high, b_middle, 1)
            ptx.wgmma_commit()
            multiply(sums, a_high, b_high, 1)
            ptx.wgmma_commit()
            wait_two()
            if lane < peers:
                ptx.barrier_arrive(empty + u32(8) * low, peer)
            wait_one()
            if lane < peers:
                ptx.barrier_arrive(empty + u32(8) * middle, peer)
            wait_none()
            if lane < peers:
                ptx.barrier_arrive(empty + u32(8) * high, peer)
            ptx.unroll(add, registers, (totals, sums))
        return place, parity

    return multiply_parts
