"""How a block adds up its products: in what type, by how many threads, in which order. Both first passes share it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda, types

from tilewright.kernels.gpu.device_choice import SIMULATOR

THREADS = 32 if SIMULATOR else 256
MAX_BLOCKS = 1056
"""Eight blocks for each of 132 multiprocessors, the most a current GPU has; smaller GPUs run them in turn."""


def accumulator_type(result: np.dtype) -> Any:
    """The Numba type in which products are added up: integers modulo 2^32 or 2^64, all else in double
    precision.
    """
    if result.kind in "iu":
        narrow, wide = (types.int32, types.int64) if result.kind == "i" else (types.uint32, types.uint64)
        return wide if result.itemsize == 8 else narrow
    return types.complex128 if result.kind == "c" else types.float64


@functools.cache
def block_sum_of(accumulator: Any) -> Any:
    """``block_sum(value)`` of a block of `THREADS`: the sum of every thread's value, by halves, in thread
    0."""

    @cuda.jit(device=True, inline="always")
    def block_sum(value):  # type: ignore[no-untyped-def]
        shared = cuda.shared.array(THREADS, accumulator)
        thread = cuda.threadIdx.x
        shared[thread] = value
        half = THREADS // 2
        while half > 0:
            cuda.syncthreads()  # the upper half's sums are in before the lower half reads them
            if thread < half:
                shared[thread] += shared[thread + half]
            half //= 2
        return shared[0]

    return block_sum
