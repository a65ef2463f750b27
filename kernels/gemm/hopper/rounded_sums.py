"""Sums that were collected in float32 on their way to a C of 16 bits: rounded once, after all of k."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numba
import numpy as np
from numba import cuda

from tilewright.kernels.bfloat16 import dtype_name
from tilewright.kernels.elements import conversion, numba_type, reading
from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.gemm.cores.repitch import Matrix
from tilewright.kernels.gpu.compiled import compile_kernel
from tilewright.kernels.gpu.launch import enqueue
from tilewright.kernels.numbers import ceil_div

FLOAT32 = np.dtype(np.float32)
THREADS = 256
EACH = 8
"""Elements of a thread, all of them read before the first is written."""


def round_function(dtype: np.dtype) -> Any:
    """The kernel's plain function: ``c[...] (+)= sums[...]``, formed in float32 and rounded to ``dtype``.

    sums (float32) and c (written, of ``dtype``) are m × n with any strides. Grid: m times ceil(n / (THREADS EACH)).
    Block: THREADS. No shared memory; what lies outside is neither read nor written.
    """
    number, element, from_c = conversion(FLOAT32), conversion(dtype), reading(dtype, FLOAT32)
    kind = numba.float32
    index = numba.uint64  # unsigned: Numba would test a signed index for wrap-around at every access

    def rounded_sums_kernel(sums: Any, c: Any, accumulate: bool) -> None:
        held = cuda.local.array(EACH, kind)
        across = (c.shape[1] + THREADS * EACH - 1) // (THREADS * EACH)
        row = cuda.blockIdx.x // across
        first = cuda.blockIdx.x % across * (THREADS * EACH) + cuda.threadIdx.x
        for i in range(EACH):
            column = first + i * THREADS
            if column < c.shape[1]:
                held[i] = sums[index(row), index(column)]
                if accumulate:
                    held[i] = number(held[i] + from_c(c[index(row), index(column)]))
        for i in range(EACH):
            column = first + i * THREADS
            if column < c.shape[1]:
                c[index(row), index(column)] = element(held[i])

    return rounded_sums_kernel


@functools.cache
def signature(dtype: np.dtype) -> Any:
    arrays = [numba.types.Array(numba_type(each), 2, "A") for each in (FLOAT32, dtype)]
    return numba.void(*arrays, numba.boolean)


@functools.cache
def _kernel(dtype: np.dtype) -> Any:
    return compile_kernel(round_function(dtype), signature(dtype))


def round_sums(sums: Any, c: Any, accumulate: bool, stream: Any) -> None:
    """Enqueue ``c (+)= sums`` for two device matrices of one shape."""
    grid = c.shape[0] * ceil_div(c.shape[1], THREADS * EACH)
    enqueue(_kernel(c.dtype), grid, THREADS, stream, 0, sums, c, accumulate)


def variants(dtype: np.dtype) -> Iterable[Variant]:
    yield Variant(f"rounded sums, {dtype_name(dtype)}", round_function(dtype), signature(dtype))


def matrix_of(output: Any, dtype: np.dtype) -> Matrix:
    """An `Output` of the tensor cores as a device matrix."""
    size = dtype.itemsize
    strides = output.row_stride * size, output.column_stride * size
    return Matrix(output.address, (output.rows, output.columns), strides, dtype)
