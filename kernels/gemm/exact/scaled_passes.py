"""Device passes over float matrices before their residues are made: norms of lines, a sample of them, and the powers
of two that scale them (`scaled_residues` says what for)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from tilewright.kernels.gemm.exact.residues import (
    MODULI,
    PLAN_KIND,
    PLAN_LEAST,
    PLAN_NONFINITE,
    PLAN_PLANES,
    PLAN_SHIFTS_A,
    PLAN_SHIFTS_B,
    RESIDUES,
)
from tilewright.kernels.gemm.exact.scaled_epilogue import power_of_two
from tilewright.kernels.gemm.exact.scaled_residues import (
    COUNTS,
    NOTHING,
    SAMPLE_BLOCK,
    SAMPLE_LARGEST,
    SAMPLE_SCALE,
    largest_norm,
    sample_block,
)
from tilewright.kernels.numbers import WARP
from tilewright.kernels.ptx import floats, memory

THREADS = 256
WARPS = THREADS // WARP
BATCH = 8
"""Elements that a thread has under way at a time."""
CHUNK = 512
"""Places of k whose squares a thread adds up, where neighbours in memory are neighbouring lines."""
SIZES = 3
"""Sums of squares of a line: of large, of middling and of small numbers, so that no square overflows or underflows
(J. Blue, "A portable Fortran program to find the Euclidean norm of a vector", 1978; the bounds are LAPACK's)."""
LARGE, SMALL = 2.0**486, 2.0**-511
LARGE_SHIFT, SMALL_SHIFT = 538, -600
"""The norm of large numbers is 2**538 times that of what is added up, and so on."""
FROM_LARGE, FROM_SMALL = 2.0**-LARGE_SHIFT, 2.0**-SMALL_SHIFT
MOST_SQUARE = 2.0**1000
"""Sums of squares of finite numbers are less."""

NORM_ARGUMENTS = (
    types.uint64,  # source: address of element (line 0, k 0)
    types.int64,  # line_stride, in elements
    types.int64,  # k_stride
    types.int32,  # lines
    types.int32,  # depth
    types.uint64,  # sums: float64, [size, chunk, line]
)
JOIN_ARGUMENTS = (types.uint64, types.int32, types.int32, types.uint64, types.uint64)
SAMPLE_ARGUMENTS = (
    *NORM_ARGUMENTS[:5],
    types.uint64,  # target: bytes
    types.int32,  # blocks of a line of the target
    types.int32,  # stride: blocks of k for one of them
    types.uint64,  # norms
)
SHIFT_ARGUMENTS = (types.uint64, types.int32, types.uint64, types.uint64, types.int32)
BEGIN_ARGUMENTS = (types.uint64, types.uint64, types.uint64)

block_of = cuda.jit(device=True, inline="always")(sample_block)


@cuda.jit(device=True, inline="always")
def _add_square(size, sums):  # type: ignore[no-untyped-def]
    """The square of an absolute value to the sum of its size; NaN counts as large."""
    if size >= SMALL and size <= LARGE:
        sums[1] += size * size
    elif size < SMALL:
        size *= FROM_SMALL
        sums[2] += size * size
    else:
        size *= FROM_LARGE
        sums[0] += size * size


def norm_function(dtype: np.dtype, *, turned: bool) -> Callable[..., Any]:
    """The pass that adds up squares, as a function of ``NORM_ARGUMENTS``; ``THREADS`` threads a block.

    Not ``turned``: any grid, a block a line; one chunk. ``turned``, where neighbours in memory are neighbouring lines:
    a grid of (``THREADS`` lines each, chunks of ``CHUNK`` places of k), a thread a line. The order of each sum depends
    on the depth and on ``turned`` alone.
    """
    i64, f64, element = types.int64, types.float64, getattr(types, dtype.name)
    threads, warps, batch, chunk, sizes = THREADS, WARPS, BATCH, CHUNK, SIZES

    def across(source, line_stride, k_stride, lines, depth, sums):  # type: ignore[no-untyped-def]
        elements, found = memory.global_array(source, element), memory.global_array(sums, f64)
        line = i64(cuda.blockIdx.x) * threads + cuda.threadIdx.x
        if line >= lines:
            return
        partial = cuda.local.array(sizes, f64)
        values = cuda.local.array(batch, f64)
        for size in range(sizes):
            partial[size] = 0.0
        first = i64(cuda.blockIdx.y) * chunk
        last = min(i64(depth), first + chunk)
        for start in range(first, last, batch):
            for e in range(batch):
                values[e] = abs(f64(elements[line * line_stride + min(start + e, last - 1) * k_stride]))
            for e in range(batch):
                _add_square(values[e] if start + e < last else 0.0, partial)
        for size in range(sizes):
            found[(size * i64(cuda.gridDim.y) + cuda.blockIdx.y) * lines + line] = partial[size]

    def along(source, line_stride, k_stride, lines, depth, sums):  # type: ignore[no-untyped-def]
        elements, found = memory.global_array(source, element), memory.global_array(sums, f64)
        partial = cuda.local.array(sizes, f64)
        values = cuda.local.array(batch, f64)
        shared = cuda.shared.array((sizes, warps), f64)
        thread = cuda.threadIdx.x
        for line in range(cuda.blockIdx.x, lines, cuda.gridDim.x):
            for size in range(sizes):
                partial[size] = 0.0
            for start in range(thread, depth, threads * batch):
                for e in range(batch):
                    place = min(start + e * threads, depth - 1)
                    values[e] = abs(f64(elements[line * line_stride + place * k_stride]))
                for e in range(batch):
                    _add_square(values[e] if start + e * threads < depth else 0.0, partial)
            for size in range(sizes):
                total = partial[size]
                for lanes in (16, 8, 4, 2, 1):
                    total += cuda.shfl_xor_sync(0xFFFFFFFF, total, lanes)
                if thread % WARP == 0:
                    shared[size, thread // WARP] = total
            cuda.syncthreads()  # the sums of all warps are there
            if thread < sizes:
                total = 0.0
                for warp in range(warps):
                    total += shared[thread, warp]
                found[thread * i64(lines) + line] = total
            cuda.syncthreads()  # before the next line's are written

    return across if turned else along


def join_function() -> Callable[..., Any]:
    """The norms of lines, of their sums: ``join(sums, chunks, lines, norms, plan)``; a thread a line.

    norms: float64, [2, line]: a sum of squares s, and e, such that the norm is 2**e sqrt(s). Infinities and NaN are
    told in the plan.
    """
    f64 = types.float64

    def join(sums, chunks, lines, norms, plan):  # type: ignore[no-untyped-def]
        found, results = memory.global_array(sums, f64), memory.global_array(norms, f64)
        line = cuda.grid(1)
        if line >= lines:
            return
        large, middle, small = 0.0, 0.0, 0.0
        for chunk in range(chunks):
            large += found[chunk * types.int64(lines) + line]
            middle += found[(chunks + chunk) * types.int64(lines) + line]
            small += found[(2 * chunks + chunk) * types.int64(lines) + line]
        if large != 0.0:  # also where it is NaN
            square, exponent = large + middle * FROM_LARGE * FROM_LARGE, f64(LARGE_SHIFT)
        elif middle > 0.0:
            square, exponent = middle, f64(0)
        else:
            square, exponent = small, f64(SMALL_SHIFT)
        if not square < MOST_SQUARE:
            memory.global_array(plan, types.int64)[PLAN_NONFINITE] = 1
        results[line] = square
        results[lines + line] = exponent

    return join


def sample_function(dtype: np.dtype, *, turned: bool) -> Callable[..., Any]:
    """The pass that writes a sample of absolute values, as a function of ``SAMPLE_ARGUMENTS``; ``THREADS`` threads a
    block. Lines of zeros have the largest value throughout: they have no part in the least sum.

    Not ``turned``: any grid, a block a line. ``turned``: a grid of (``THREADS`` lines each, blocks of the target).
    """
    i32, i64, u32, f64 = types.int32, types.int64, types.uint32, types.float64
    element = getattr(types, dtype.name)
    threads, side, largest, steps = THREADS, SAMPLE_BLOCK, SAMPLE_LARGEST, SAMPLE_SCALE

    @cuda.jit(device=True, inline="always")
    def factors_of(norms, line, lines, depth):  # type: ignore[no-untyped-def]
        found = memory.global_array(norms, f64)
        square = found[line]
        inverse = f64(steps) * floats.root64(f64(depth)) / floats.root64(square) if square > 0.0 else 0.0
        return power_of_two(-i64(found[lines + line])), inverse

    @cuda.jit(device=True, inline="always")
    def step_of(value, scale, inverse):  # type: ignore[no-untyped-def]
        if inverse == 0.0:
            return u32(largest)
        return u32(i32(min(abs(value) * scale * inverse, f64(largest))))

    def across(  # type: ignore[no-untyped-def]
        source, line_stride, k_stride, lines, depth, target, blocks, stride, norms
    ):
        elements, words = memory.global_array(source, element), memory.global_array(target, u32)
        line = i64(cuda.blockIdx.x) * threads + cuda.threadIdx.x
        if line >= lines:
            return
        scale, inverse = factors_of(norms, line, lines, depth)
        number = i32(cuda.blockIdx.y)
        first = i64(block_of(number, stride, (depth + side - 1) // side)) * side
        values = cuda.local.array(16, f64)
        packed = cuda.local.array(4, u32)
        for start in range(0, side, 16):
            for e in range(16):
                place = min(first + start + e, i64(depth) - 1)
                values[e] = f64(elements[line * line_stride + place * k_stride])
            for w in range(4):
                packed[w] = 0
                for e in range(4):
                    value = values[4 * w + e] if first + start + 4 * w + e < depth else 0.0
                    packed[w] |= step_of(value, scale, inverse) << u32(8 * e)
            memory.store_vector(words, (line * blocks + number) * (side // 4) + start // 4, packed, 0)

    def along(  # type: ignore[no-untyped-def]
        source, line_stride, k_stride, lines, depth, target, blocks, stride, norms
    ):
        elements, words = memory.global_array(source, element), memory.global_array(target, u32)
        all_blocks = (depth + side - 1) // side
        for line in range(cuda.blockIdx.x, lines, cuda.gridDim.x):
            scale, inverse = factors_of(norms, line, lines, depth)
            for word in range(cuda.threadIdx.x, blocks * (side // 4), threads):
                number = word // (side // 4)
                first = i64(block_of(number, stride, all_blocks)) * side + word % (side // 4) * 4
                packed = u32(0)
                for e in range(4):
                    value = f64(elements[line * line_stride + min(first + e, i64(depth) - 1) * k_stride])
                    value = value if first + e < depth else 0.0
                    packed |= step_of(value, scale, inverse) << u32(8 * e)
                words[i64(line) * blocks * (side // 4) + word] = packed

    return across if turned else along


def square_limits() -> np.ndarray:
    """For each number of moduli the largest square of a line's norm, in units of 2**64 (float64)."""
    limits = np.zeros(len(MODULI) + 1)
    for count in itertools.chain(*COUNTS.values()):
        limits[count] = largest_norm(count) ** 2 * 2.0**-64
    return limits


def shift_function() -> Callable[..., Any]:
    """The powers of two of lines: ``shift(norms, lines, shifts, plan, count)``; a thread a line. The first also tells
    the plan how many moduli there are."""
    limits = square_limits()
    i32, i64, f64 = types.int32, types.int64, types.float64

    def shift(norms, lines, shifts, plan, count):  # type: ignore[no-untyped-def]
        found, results = memory.global_array(norms, f64), memory.global_array(shifts, i32)
        line = cuda.grid(1)
        if line == 0:
            memory.global_array(plan, i64)[PLAN_PLANES] = count
        if line >= lines:
            return
        square, exponent = found[line], i32(found[lines + line])
        if square == 0.0:
            results[line] = 0
            return
        # square = f 2**top with 1 <= f < 2; the largest power of two whose square times it is within the limit.
        top = i32((floats.double_bits(square) >> i64(52)) & i64(2047)) - 1023
        most = 64 + i32((floats.double_bits(limits[count]) >> i64(52)) & i64(2047)) - 1023
        power = (most - top) // 2 + 1
        fraction = square * power_of_two(-top)
        while fraction * power_of_two(top + 2 * power - 64) > limits[count]:
            power -= 1
        results[line] = power - exponent

    return shift


def begin_function() -> Callable[..., Any]:
    """``begin(plan, shifts_a, shifts_b)``: a plan that knows nothing yet; one thread."""

    def begin(plan, shifts_a, shifts_b):  # type: ignore[no-untyped-def]
        settings = memory.global_array(plan, types.int64)
        settings[PLAN_KIND] = RESIDUES
        settings[PLAN_PLANES] = 0
        settings[PLAN_SHIFTS_A] = types.int64(shifts_a)
        settings[PLAN_SHIFTS_B] = types.int64(shifts_b)
        settings[PLAN_LEAST] = NOTHING
        settings[PLAN_NONFINITE] = 0

    return begin
