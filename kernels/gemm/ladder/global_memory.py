"""The first rung: one thread an element of C, every operand read straight from global memory.

It exists to be read and to be measured against: each element of A is fetched n times and each of B m times,
so the caches decide its speed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numba
import numpy as np
from numba import cuda

from tilewright.kernels.elements import conversion, reading
from tilewright.kernels.gemm.base import (
    ELEMENTS,
    GemmKernel,
    Problem,
    Variant,
    compute_dtype,
    strided_signature,
)
from tilewright.kernels.gpu.compiled import compile_kernel
from tilewright.kernels.gpu.launch import enqueue
from tilewright.kernels.numbers import ceil_div

BLOCK = (32, 8)
"""Threads along a row of C and along a column: a warp writes 32 neighbours of a row-major C."""


@functools.cache
def element_function(a_dtype: np.dtype, b_dtype: np.dtype, result: np.dtype) -> Any:
    """The kernel's plain function for the dtypes of a, b and c.

    ``c[i, j] (+)= sum over p of a[i, p] * b[p, j]`` for a (m × k), b (k × n), c (m × n, written) of any
    strides. Grid: one-dimensional, blocks along a row of C first. No shared memory.
    """
    compute = compute_dtype(result)
    number, element = conversion(compute), conversion(result)
    from_a, from_b, from_c = (reading(dtype, compute) for dtype in (a_dtype, b_dtype, result))
    index = numba.uint64  # unsigned: Numba would test a signed index for wrap-around at every access

    def global_memory_kernel(a: Any, b: Any, c: Any, accumulate: bool) -> None:
        m, n = c.shape
        k = a.shape[1]
        across = (n + cuda.blockDim.x - 1) // cuda.blockDim.x
        i = (cuda.blockIdx.x // across) * cuda.blockDim.y + cuda.threadIdx.y
        j = (cuda.blockIdx.x % across) * cuda.blockDim.x + cuda.threadIdx.x
        if i < m and j < n:
            total = number(0)
            for p in range(k):
                # Narrowed at once: Numba would widen 32-bit integers to 64 and carry the sum there.
                total = number(total + from_a(a[index(i), index(p)]) * from_b(b[index(p), index(j)]))
            if accumulate:
                total = number(total + from_c(c[index(i), index(j)]))
            c[index(i), index(j)] = element(total)

    return global_memory_kernel


@functools.cache
def _kernel(a: np.dtype, b: np.dtype, c: np.dtype) -> Any:
    return compile_kernel(element_function(a, b, c), strided_signature(a, b, c))


def supports(problem: Problem) -> bool:
    return problem.c.dtype in ELEMENTS


def launch(a: Any, b: Any, c: Any, accumulate: bool, stream: Any) -> None:
    m, n = c.shape
    if m * n:
        blocks = ceil_div(n, BLOCK[0]) * ceil_div(m, BLOCK[1])
        enqueue(_kernel(a.dtype, b.dtype, c.dtype), blocks, BLOCK, stream, 0, a, b, c, accumulate)


def variants() -> Iterable[Variant]:
    for dtype in ELEMENTS:
        signature = strided_signature(dtype, dtype, dtype)
        yield Variant(f"global-memory {dtype}", element_function(dtype, dtype, dtype), signature)


GLOBAL_MEMORY = GemmKernel(
    name="global-memory",
    summary="one thread an element of C, operands from global memory",
    supports=supports,
    launch=launch,
    portable=True,
    recordable=True,
    variants=variants,
)
