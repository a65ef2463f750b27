"""The sum of partial products, where k is cut into ranges that different blocks multiply: always in one order."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numba
import numpy as np
from numba import cuda

from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.gemm.cores.repitch import Matrix
from tilewright.kernels.gpu.compiled import compile_kernel
from tilewright.kernels.gpu.launch import enqueue
from tilewright.kernels.numbers import ceil_div

REDUCING_THREADS = 256


def sum_function(dtype: np.dtype) -> Any:
    """The plain function of the kernel that adds split products, in the order of k.

    ``c (+)= partial[0] + partial[1] + ...`` for partial (splits × m × n, contiguous), c (m × n, any strides,
    written). Grid: ceil(m n / REDUCING_THREADS). Block: REDUCING_THREADS.
    """
    number = numba.from_dtype(dtype)

    def sum_kernel(partial: Any, c: Any, splits: int, accumulate: bool) -> None:
        m, n = numba.uint64(c.shape[0]), numba.uint64(c.shape[1])
        i = numba.uint64(cuda.blockIdx.x) * numba.uint64(REDUCING_THREADS) + numba.uint64(cuda.threadIdx.x)
        if i < m * n:
            row, column = i // n, i % n
            total = partial[row, column]
            for s in range(1, splits):
                total = number(total + partial[numba.uint64(s) * m + row, column])
            if accumulate:
                total = number(c[row, column] + total)
            c[row, column] = total

    return sum_kernel


SUM_WAYS = 16
"""Threads that share the partial sums of an element where there are many."""
MANY_SPLITS = 16
"""From this many partial sums on, one thread that adds them one by one waits longer for memory than the product
took."""


def shared_sum_function(dtype: np.dtype) -> Any:
    """The same for many partial sums: `SUM_WAYS` threads an element, each adding every `SUM_WAYS`-th of them.

    ``c (+)= partial[0] + partial[1] + ...`` as `sum_function`; thread w adds partials w, w + SUM_WAYS, ..., and the
    threads' sums are added in the order of w: the order of all is fixed by ``splits``. Grid:
    ceil(m n SUM_WAYS / REDUCING_THREADS). Block: REDUCING_THREADS. Shared memory: an element a thread.
    """
    number = numba.from_dtype(dtype)
    columns = REDUCING_THREADS // SUM_WAYS

    def shared_sum_kernel(partial: Any, c: Any, splits: int, accumulate: bool) -> None:
        sums = cuda.shared.array(REDUCING_THREADS, number)
        m, n = numba.uint64(c.shape[0]), numba.uint64(c.shape[1])
        thread = numba.uint64(cuda.threadIdx.x)
        way = thread // numba.uint64(columns)
        i = numba.uint64(cuda.blockIdx.x) * numba.uint64(columns) + thread % numba.uint64(columns)
        row, column = i // n, i % n
        total = number(0)
        if i < m * n:
            for s in range(way, numba.uint64(splits), numba.uint64(SUM_WAYS)):
                total = number(total + partial[s * m + row, column])
        sums[thread] = total
        cuda.syncthreads()  # every thread's sum has been written
        if way == 0 and i < m * n:
            for w in range(1, SUM_WAYS):
                total = number(total + sums[thread + numba.uint64(w * columns)])
            if accumulate:
                total = number(c[row, column] + total)
            c[row, column] = total

    return shared_sum_kernel


@functools.cache
def sum_signature(dtype: np.dtype) -> Any:
    strided = numba.types.Array(numba.from_dtype(dtype), 2, "A")
    return numba.void(strided, strided, numba.int64, numba.boolean)


@functools.cache
def _sum_kernel(dtype: np.dtype) -> Any:
    return compile_kernel(sum_function(dtype), sum_signature(dtype))


@functools.cache
def _shared_sum_kernel(dtype: np.dtype) -> Any:
    return compile_kernel(shared_sum_function(dtype), sum_signature(dtype))


def enqueue_sum(partial: Matrix, c: Matrix, splits: int, accumulate: bool, stream: Any) -> None:
    """Enqueue ``c (+)=`` the sum of ``splits`` partial products, which follow each other in memory."""
    many = splits >= MANY_SPLITS
    kernel = (_shared_sum_kernel if many else _sum_kernel)(c.dtype)
    grid = ceil_div(c.size * (SUM_WAYS if many else 1), REDUCING_THREADS)
    enqueue(kernel, grid, REDUCING_THREADS, stream, 0, partial, c, splits, accumulate)


def variants(dtype: np.dtype) -> Iterable[Variant]:
    yield Variant(f"{dtype} sum of splits", sum_function(dtype), sum_signature(dtype))
    yield Variant(f"{dtype} shared sum of splits", shared_sum_function(dtype), sum_signature(dtype))
