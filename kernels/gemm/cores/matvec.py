"""A matrix times a vector, or a few: the matrix streamed once from global memory straight into registers.

Nothing of the matrix is used twice, so shared memory, its barriers and its stages only add latency. With A
along k a warp takes a few rows at once: each lane loads 16 bytes of every row, several deep, and as much of the
vector, which the caches hold; the lanes' sums are added by shuffles in a fixed order. With A along m a thread
takes the rows of one 16-byte chunk and walks k. Where there are too few rows to fill the GPU, k is cut into
ranges whose partial results are added up afterwards, in their order.

The floor is reading A: m k itemsize bytes at the memory's bandwidth.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numba import cuda
from numba.cuda import types

from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.gemm.cores.register_arithmetic import product_adder, real_dtype
from tilewright.kernels.gpu.compiled import compile_kernel
from tilewright.kernels.numbers import WARP, ceil_div
from tilewright.kernels.ptx import memory

CHUNK_NBYTES = 16
WARPS = 8
"""Of a block."""
ROWS = 4
"""Rows of a warp, A along k: the vector is read once for all of them."""
DEEP_NBYTES = 128
"""What a thread loads of A before it uses any, with A along k or along m."""
FULL_MASK = 0xFFFFFFFF
DTYPES = tuple(np.dtype(name) for name in ("float32", "float64", "complex64", "complex128"))

# Inlined before type inference: local arrays that cross a call would live in memory instead of registers.
inlined = cuda.jit(device=True, inline="always")


@dataclass(frozen=True)
class Layout:
    """What is decided when the kernel is compiled."""

    dtype: str
    along_k: bool
    """Whether neighbours in A's memory are neighbours in k; else along m."""
    whole: bool
    """Whether A comes in 16-byte chunks: address and pitch multiples of 16, contiguous side too."""

    @property
    def real(self) -> np.dtype:
        return real_dtype(np.dtype(self.dtype))

    @property
    def parts(self) -> int:
        """Numbers in an element."""
        return np.dtype(self.dtype).itemsize // self.real.itemsize

    @property
    def elements(self) -> int:
        """Elements that a thread loads at once."""
        return CHUNK_NBYTES // np.dtype(self.dtype).itemsize if self.whole else 1

    @property
    def deep(self) -> int:
        """Loads of A that a thread has under way, for each of its rows where A lies along k."""
        nbytes = self.elements * np.dtype(self.dtype).itemsize
        loads = min(16, DEEP_NBYTES // nbytes)
        return loads // ROWS if self.along_k else loads

    @property
    def block_rows(self) -> int:
        return WARPS * ROWS if self.along_k else WARPS * WARP * self.elements

    @property
    def step(self) -> int:
        """Elements of k that a block walks at once."""
        return self.deep * (WARP * self.elements if self.along_k else 1)


LEAST_K = 1024
"""With A along k a warp's lanes share a row, and shorter rows end before all lanes are busy."""


def preferred(dtype: np.dtype, along_k: bool, k: int) -> bool:
    """Whether this kernel is faster than the one that streams through shared memory, as measured on an H200.

    With A along m it is for every dtype; along k for float32, whose unaligned rows that one copies four bytes at a
    time, but not for wider elements, and not for short rows.
    """
    return not along_k or (dtype == np.float32 and k >= LEAST_K)


def kernel_function(layout: Layout) -> Any:
    """The kernel as a plain function, for `cuda.jit` and `cuda.compile_ptx`.

    ``c (+)= a b`` for a m × k, b and c vectors of k and m elements with steps ``b_step`` and ``c_step``; all
    pitches and steps in bytes. With ``gridDim.y`` > 1, k is cut into ranges of ``split_k`` (a multiple of
    ``layout.elements``), and range y is written ``c_split`` bytes · y behind c.

    Grid: (blocks of ``layout.block_rows`` rows, ranges of k). Block: 32 ``WARPS``. No shared memory. The order
    of the sums is fixed by the layout and ``split_k``. Error of an element: at most k + 5 units in the last
    place of the sum of its products' magnitudes.
    """
    parts, elements, deep, along_k, whole = (
        layout.parts,
        layout.elements,
        layout.deep,
        layout.along_k,
        layout.whole,
    )
    real, itemsize = numba.from_dtype(layout.real), np.dtype(layout.dtype).itemsize
    numbers = elements * parts
    rows = ROWS if along_k else elements
    a_count, b_count = (deep * ROWS * numbers, deep * numbers) if along_k else (deep * numbers, deep * parts)
    sums_count = rows * parts
    step, block_rows = layout.step, layout.block_rows
    span = WARP * elements
    load, global_array = memory.load_vector, memory.global_array
    add_product = product_adder(parts)
    i32, i64, u64 = types.int32, types.int64, types.uint64

    @inlined
    def load_chunk(registers, first, address):  # type: ignore[no-untyped-def]
        source = global_array(address, real)
        if whole:
            load(registers, first, source, u64(0))
        else:
            for p in range(parts):
                registers[first + p] = source[u64(p)]

    @inlined
    def load_elements(registers, first, address, stride):  # type: ignore[no-untyped-def]
        for e in range(elements):
            source = global_array(address + i64(e) * stride, real)
            for p in range(parts):
                registers[first + e * parts + p] = source[u64(p)]

    @inlined
    def load_rows(a, b, a_at, a_pitch, b_at, b_step, last_row, u, k):  # type: ignore[no-untyped-def]
        """Load the u-th chunk of k for all of a warp's rows."""
        for i in range(ROWS):
            row = i64(min(i32(i), last_row))
            load_chunk(a, (u * ROWS + i) * numbers, a_at + row * a_pitch + i64(k) * itemsize)
        load_elements(b, u * numbers, b_at + i64(k) * b_step, b_step)

    @inlined
    def multiply(sums, a, b, u):  # type: ignore[no-untyped-def]
        for e in range(elements):
            for i in range(ROWS):
                add_product(
                    sums, i * parts, a, ((u * ROWS + i) * elements + e) * parts, b, (u * elements + e) * parts
                )

    def matvec_kernel(  # type: ignore[no-untyped-def]
        a_address, a_pitch, b_address, b_step, c_address, c_step, c_split, m, k, split_k, accumulate
    ):
        a = cuda.local.array(a_count, real)
        b = cuda.local.array(b_count, real)
        sums = cuda.local.array(sums_count, real)
        for s in range(sums_count):
            sums[s] = real(0)
        thread = i32(cuda.threadIdx.x)
        first_k = i32(cuda.blockIdx.y * split_k)
        length = i32(min(split_k, k - first_k))
        b_at = i64(b_address) + i64(first_k) * b_step
        full = i32(length // step * step)
        if along_k:
            lane = i32(thread % WARP)
            row0 = i32(cuda.blockIdx.x * block_rows + (thread // WARP) * ROWS)
            last_row = i32(m - 1 - row0)
            if last_row < 0:
                return  # the whole warp
            a_at = i64(a_address) + i64(row0) * a_pitch + i64(first_k) * itemsize
            for base in range(lane * elements, full, step):
                for u in range(deep):
                    load_rows(a, b, a_at, a_pitch, b_at, b_step, last_row, u, base + u * span)
                for u in range(deep):
                    multiply(sums, a, b, u)
            for base in range(full + lane * elements, length, span):
                load_rows(a, b, a_at, a_pitch, b_at, b_step, last_row, 0, base)
                multiply(sums, a, b, 0)
            for s in range(sums_count):
                for power in range(5):
                    sums[s] += cuda.shfl_xor_sync(FULL_MASK, sums[s], 16 >> power)
            writes = lane == 0
        else:
            row0 = i32(cuda.blockIdx.x * block_rows + thread * elements)
            if row0 >= m:
                return
            a_at = i64(a_address) + i64(first_k) * a_pitch + i64(row0) * itemsize
            for base in range(0, full, step):
                for u in range(deep):
                    load_chunk(a, u * numbers, a_at + i64(base + u) * a_pitch)
                    source = global_array(b_at + i64(base + u) * b_step, real)
                    for p in range(parts):
                        b[u * parts + p] = source[u64(p)]
                for u in range(deep):
                    for e in range(elements):
                        add_product(sums, e * parts, a, (u * elements + e) * parts, b, u * parts)
            for base in range(full, length):
                load_chunk(a, 0, a_at + i64(base) * a_pitch)
                source = global_array(b_at + i64(base) * b_step, real)
                for p in range(parts):
                    b[p] = source[u64(p)]
                for e in range(elements):
                    add_product(sums, e * parts, a, e * parts, b, 0)
            writes = True
        if writes:
            for i in range(rows):
                if row0 + i < m:
                    at = i64(c_address) + i64(cuda.blockIdx.y) * c_split + i64(row0 + i) * c_step
                    out = global_array(at, real)
                    for p in range(parts):
                        value = sums[i * parts + p]
                        if accumulate:
                            value += out[u64(p)]
                        out[u64(p)] = value

    return matvec_kernel


SIGNATURE = types.void(*(types.uint64, types.int64) * 3, types.int64, *(types.int32,) * 3, types.boolean)
"""Address and pitch of A, address and step of b and of c; c_split; m, k, split_k; accumulate."""
BLOCKS_AT_ONCE = 3
"""Blocks of a multiprocessor: they leave 80 registers a thread, enough for the loads under way, without spilling."""
LAUNCH_BOUNDS = (WARPS * WARP, BLOCKS_AT_ONCE)


@functools.cache
def compiled(layout: Layout) -> Any:
    """The kernel, compiled for a GPU by its first launch there."""
    return compile_kernel(kernel_function(layout), SIGNATURE, launch_bounds=LAUNCH_BOUNDS)


LEAST_STEPS = 4
"""A range of k is at least this many steps of a block, so that its start-up is a small part of it."""


def split(layout: Layout, m: int, k: int, multiprocessors: int, most: int) -> tuple[int, int]:
    """``(ranges of k, the length of each)``: whole waves of blocks, as near as k allows."""
    blocks, steps = ceil_div(m, layout.block_rows), ceil_div(k, layout.step)
    slots = multiprocessors * BLOCKS_AT_ONCE
    limit = max(1, min(most, steps // LEAST_STEPS))
    # Two waves even out differences between the memory's channels; with one block more than a wave it would take two
    # anyway.
    wanted = 1 if blocks >= 2 * slots else min(limit, max(1, 2 * slots // blocks))
    length = ceil_div(steps, wanted) * layout.step
    return ceil_div(k, length), length


def variants() -> Iterable[Variant]:
    """Every dtype in the layouts it is used for, with and without whole chunks."""
    for dtype in DTYPES:
        for along_k in (True, False) if preferred(dtype, True, LEAST_K) else (False,):
            for whole in (True, False):
                layout = Layout(dtype.name, along_k, whole)
                yield Variant(
                    f"matvec {layout}",
                    kernel_function(layout),
                    SIGNATURE,
                    options={"launch_bounds": LAUNCH_BOUNDS},
                )
