"""How many bytes a lane holds, and how many of them a reading thread moves at once from plain files to a GPU, given all
reading threads of its host."""

from __future__ import annotations

LANE_NBYTES = 8 * 2**20
"""Pinned memory through which one thread of a GPU worker moves parts of panels, of a finished tile, or of a text."""

UNDER_WAY_NBYTES = 128 * 2**20
"""What all reading threads of a host may have in pinned blocks, two for each thread: less than half of the 300 MiB of
cache that an H200's host has. With more, bytes have left the cache when the copy fetches them, and go to memory and
back once more."""

LEAST_MOVE_NBYTES = 2**20
"""A copy over the bus costs 3 µs besides its bytes: a sixth of what 1 MiB takes."""

MOST_MOVE_NBYTES = LANE_NBYTES // 2


def move_nbytes(threads: int, neighbours: int) -> int:
    """Bytes that each of a worker's ``threads`` reading threads moves at once, a power of two.

    neighbours: workers on its host, itself among them.
    """
    share = UNDER_WAY_NBYTES // (2 * max(1, threads) * max(1, neighbours))
    return min(MOST_MOVE_NBYTES, max(LEAST_MOVE_NBYTES, 1 << share.bit_length() - 1))
