"""How much threads of a GPU's workers move at once."""

from __future__ import annotations

import pytest

from tilewright.pipeline.transfer.lane_blocks import (
    LEAST_MOVE_NBYTES,
    MOST_MOVE_NBYTES,
    UNDER_WAY_NBYTES,
    move_nbytes,
)

MIB = 2**20


@pytest.mark.parametrize(("neighbours", "expected"), [(1, 4 * MIB), (2, 2 * MIB), (4, MIB), (8, MIB)])
def test_twelve_threads_of_each_worker_move_what_was_fastest(neighbours: int, expected: int) -> None:
    assert move_nbytes(12, neighbours) == expected


def test_what_is_under_way_stays_in_cache_above_the_smallest_blocks() -> None:
    for threads in range(1, 70):
        for neighbours in range(1, 9):
            moved = move_nbytes(threads, neighbours)
            assert LEAST_MOVE_NBYTES <= moved <= MOST_MOVE_NBYTES
            assert moved.bit_count() == 1
            if moved > LEAST_MOVE_NBYTES:
                assert 2 * threads * neighbours * moved <= UNDER_WAY_NBYTES
            if moved < MOST_MOVE_NBYTES:
                assert 2 * threads * neighbours * 2 * moved > UNDER_WAY_NBYTES, "twice as much would not fit"
