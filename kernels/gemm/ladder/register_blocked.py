"""The third rung: 8 × 8 elements of C in each thread's registers, 128-bit loads. Read it before the warp
tiles.

A shared-memory kernel reads two values for each multiply-add; a thread that holds an 8 × 8 block of C reads
sixteen for sixty-four. That moves the limit from shared memory to the arithmetic, and nothing else is done
here: one slab at a time, two barriers a slab. `warp_tiled` goes on from there.

Source: Volkov and Demmel, "Benchmarking GPUs to tune dense linear algebra" (2008).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numba
import numpy as np
from numba import cuda

from tilewright.kernels.gemm.base import GemmKernel, Operand, Problem, Variant, strided_signature
from tilewright.kernels.gpu.compiled import compile_kernel
from tilewright.kernels.gpu.launch import enqueue
from tilewright.kernels.numbers import ceil_div
from tilewright.kernels.ptx import memory

DTYPES = tuple(np.dtype(code) for code in ("f4", "i4", "u4"))
TILE = 128
"""Side of a block's tile of C."""
DEPTH = 8
"""Depth of a slab."""
THREADS = 256
SIDE = 16
"""Threads along each side of the tile."""
VECTOR = 4
"""Elements of a 128-bit access."""
GROUPS = 2
"""Vectors of a thread along each side of C, 64 elements apart: neighbouring threads then read neighbouring vectors of
shared memory, without bank conflicts."""
BLOCK = GROUPS * VECTOR
"""Side of a thread's block of C."""
TOTALS = BLOCK * BLOCK
FAR = TILE // GROUPS
PADDED = TILE + VECTOR
"""Length of a line of A in shared memory: a vector longer, so that transposing stores spread over the
banks.
"""


@functools.cache
def register_blocked_function(dtype: np.dtype) -> Any:
    """The kernel's plain function: ``c (+)= a b`` for a (m × k), b (k × n), c (m × n, written).

    All of ``dtype``, rows contiguous and aligned to 16 bytes, k and n multiples of four. Grid: one block a
    tile of C, tiles of a row of C first. Block: 256. Shared memory: 8 × (132 + 128) elements. Expected
    registers: under 128, so that two blocks share a multiprocessor. What lies outside A or B enters as
    zero, what lies outside C is not written.
    """
    number = numba.from_dtype(dtype)
    u32, u64 = numba.uint32, numba.uint64

    def register_blocked_kernel(a: Any, b: Any, c: Any, accumulate: bool) -> None:
        a_slab = cuda.shared.array((DEPTH, PADDED), number, alignment=16)
        b_slab = cuda.shared.array((DEPTH, TILE), number, alignment=16)
        total = cuda.local.array(TOTALS, number)
        left = cuda.local.array(BLOCK, number)
        right = cuda.local.array(BLOCK, number)
        moving = cuda.local.array(VECTOR, number)

        m, n, k = u64(c.shape[0]), u64(c.shape[1]), u64(a.shape[1])
        a_line, b_line = u64(a.strides[0]) // u64(a.itemsize), u64(b.strides[0]) // u64(b.itemsize)
        c_line = u64(c.strides[0]) // u64(c.itemsize)
        across = (n + u64(TILE - 1)) // u64(TILE)
        row0 = u64(cuda.blockIdx.x) // across * u64(TILE)
        column0 = u64(cuda.blockIdx.x) % across * u64(TILE)
        thread = u32(cuda.threadIdx.x)
        # A slab of A is 128 rows of two vectors, one of B eight rows of 32 vectors: one vector a thread.
        a_row, a_k = u64(thread // u32(2)), u64(thread % u32(2)) * u64(VECTOR)
        b_k, b_column = u64(thread // u32(32)), u64(thread % u32(32)) * u64(VECTOR)
        x, y = u64(thread % u32(SIDE)) * u64(VECTOR), u64(thread // u32(SIDE)) * u64(VECTOR)

        for t in range(TOTALS):
            total[t] = number(0)

        for k0 in range(u64(0), k, u64(DEPTH)):
            for v in range(VECTOR):
                moving[v] = number(0)
            if row0 + a_row < m and k0 + a_k < k:
                memory.load_vector(moving, 0, a, (row0 + a_row) * a_line + k0 + a_k)
            for v in range(VECTOR):
                a_slab[a_k + u64(v), a_row] = moving[v]
            for v in range(VECTOR):
                moving[v] = number(0)
            if k0 + b_k < k and column0 + b_column < n:
                memory.load_vector(moving, 0, b, (k0 + b_k) * b_line + column0 + b_column)
            memory.store_vector(b_slab, b_k * u64(TILE) + b_column, moving, 0)
            cuda.syncthreads()  # both slabs are complete before any thread reads them

            for p in range(DEPTH):
                for g in range(GROUPS):
                    memory.load_vector(left, g * VECTOR, a_slab, u64(p * PADDED + g * FAR) + y)
                    memory.load_vector(right, g * VECTOR, b_slab, u64(p * TILE + g * FAR) + x)
                for i in range(BLOCK):
                    for j in range(BLOCK):
                        # Narrowed at once: Numba would widen 32-bit integers to 64.
                        total[i * BLOCK + j] = number(total[i * BLOCK + j] + left[i] * right[j])
            cuda.syncthreads()  # every thread has read these slabs before the next ones overwrite them

        for i in range(BLOCK):
            row = row0 + y + u64(i // VECTOR * FAR + i % VECTOR)
            for g in range(GROUPS):
                column = column0 + x + u64(g * FAR)
                if row < m and column < n:
                    place = row * c_line + column
                    if accumulate:
                        memory.load_vector(moving, 0, c, place)
                        for v in range(VECTOR):
                            slot = i * BLOCK + g * VECTOR + v
                            total[slot] = number(total[slot] + moving[v])
                    memory.store_vector(c, place, total, i * BLOCK + g * VECTOR)

    return register_blocked_kernel


def _aligned(operand: Operand) -> bool:
    """Whether every row starts at a multiple of 16 bytes and is a whole number of vectors."""
    return (
        operand.strides[1] == 1
        and operand.strides[0] >= 0
        and operand.strides[0] % VECTOR == 0
        and operand.columns % VECTOR == 0
        and operand.alignment >= memory.VECTOR_NBYTES
    )


def supports(problem: Problem) -> bool:
    operands = (problem.a, problem.b, problem.c)
    return (
        problem.c.dtype in DTYPES
        and all(operand.dtype == problem.c.dtype and _aligned(operand) for operand in operands)
        and problem.precision == "full"
        and problem.capability is not None
    )


@functools.cache
def _kernel(dtype: np.dtype) -> Any:
    signature = strided_signature(dtype, dtype, dtype)
    return compile_kernel(register_blocked_function(dtype), signature, launch_bounds=(THREADS, 2))


def launch(a: Any, b: Any, c: Any, accumulate: bool, stream: Any) -> None:
    """Enqueue ``c (+)= a b``."""
    m, n = c.shape
    grid = ceil_div(m, TILE) * ceil_div(n, TILE)
    enqueue(_kernel(c.dtype), grid, THREADS, stream, 0, a, b, c, accumulate)


def variants() -> Iterable[Variant]:
    for dtype in DTYPES:
        yield Variant(
            f"register-blocked {dtype}",
            register_blocked_function(dtype),
            strided_signature(dtype, dtype, dtype),
            options={"launch_bounds": (THREADS, 2)},
        )


REGISTER_BLOCKED = GemmKernel(
    name="register-blocked",
    summary="8 x 8 elements of C in a thread's registers, 128-bit loads; aligned row-major operands",
    supports=supports,
    launch=launch,
    recordable=True,
    variants=variants,
)
