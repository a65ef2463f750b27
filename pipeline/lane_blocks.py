"""How much a thread that reads moves at once from plain files to a GPU, among all those of its host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from distributed.comm import get_address_host

from tilewright.pipeline.plan import LANE_NBYTES

UNDER_WAY_NBYTES = 128 * 2**20
"""What all threads of a host that read may have in pinned blocks, of which each has two: less than half of the 300 MiB
that the cache of an H200's host has. What was read into more has left the cache when the copy comes for it, and goes to
memory and back once more."""

LEAST_MOVE_NBYTES = 2**20
"""A copy over the bus takes 3 µs beside its bytes, a sixth of what 1 MiB takes."""

MOST_MOVE_NBYTES = LANE_NBYTES // 2


def move_nbytes(threads: int, neighbours: int) -> int:
    """Bytes that each of so many threads of a worker that read moves at once, a power of two.

    neighbours: workers on its host, itself among them.
    """
    share = UNDER_WAY_NBYTES // (2 * max(1, threads) * max(1, neighbours))
    return min(MOST_MOVE_NBYTES, max(LEAST_MOVE_NBYTES, 1 << share.bit_length() - 1))


def most_neighbours(addresses: Iterable[str]) -> int:
    """How many of the workers with these addresses the host with most of them has; 1 for none."""
    return max(Counter(map(get_address_host, addresses)).values(), default=1)
