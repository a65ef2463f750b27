"""Barriers and errors in the simulator, whose threads `tests.simulated_blocks` waits for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import cuda

pytestmark = pytest.mark.simulator


def test_a_barrier_waits_for_all_threads_that_have_not_ended() -> None:
    @cuda.jit
    def rotate(out: Any) -> None:
        shared = cuda.shared.array(32, "int64")
        place = cuda.threadIdx.x
        shared[place] = 0
        if place >= 24:
            return
        for step in range(50):
            cuda.syncthreads()
            seen = shared[(place + 1) % 24]
            cuda.syncthreads()
            shared[place] = seen + 1
            out[place] += seen == step

    out = np.zeros(24, np.int64)
    rotate[1, 32](out)
    assert out.tolist() == 24 * [50]


def test_an_error_ends_the_threads_that_wait_at_a_barrier() -> None:
    @cuda.jit
    def fails(out: Any) -> None:
        if cuda.threadIdx.x == 5:
            raise ValueError("five")
        cuda.syncthreads()
        out[cuda.threadIdx.x] = 1

    out = np.zeros(8, np.int64)
    with pytest.raises(ValueError, match=r"tid=\[5, 0, 0\] ctaid=\[0, 0, 0\]: five"):
        fails[1, 8](out)
    assert not out.any()
