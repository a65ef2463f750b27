"""Powers of two that bring the lines of float32 matrices into the range of float16.

A line (a row of A, a column of B) is scaled so that its largest absolute value lies in [2**14, 2**15), below float16's
largest. Two float16 parts then hold a number x of it to within 2**-23 of x, if x is at least 2**-27 of that largest:
smaller ones to within 2**-50 of the largest, since float16 ends. The least that a line may have, other than zero, is
2**-MOST_APART of its largest: what is lost of such a number is at most 2**-17 of it, less than float32 may round off as
it adds up the 512 products that there are at least (2**-15 of their absolute values). In millions of numbers that are
distributed continuously there are always a few so small; they weigh nothing beside the others.

Where one line of either matrix is not so, or its largest is so small that 2**-MOST_APART of it is no normal float32,
the plan says that numbers are split in another way (`float_planes.THIRDS`).

Infinities and NaN do not count: they are flagged where the parts are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda import types

from tilewright.kernels.gemm.exact.residues import PLAN_KIND
from tilewright.kernels.gemm.hopper.float_planes import HALVES, PARTS_PLAN, THIRDS
from tilewright.kernels.numbers import WARP
from tilewright.kernels.ptx import floats, memory

THREADS = 256
QUAD = 4
BATCH = 8
"""Elements that a thread reads before it compares any, where neighbours in memory are places of k."""
DEPTH = 64
"""Places of k that a thread walks, where neighbours in memory are lines."""
TOP = 14
"""A line's largest absolute value is at least 2**TOP, and less than twice that, once it is scaled."""
MOST_APART = 33
"""How many powers of two below a line's largest value the least one may be."""
LEAST_TOP = MOST_APART - 126
"""The exponent of the largest value of a line that is scaled, at least: its least one is a normal float32 then, which
the GPU does not take for zero."""
NOTHING = 0x7FFFFFFF
EXPONENT = 0x7F800000
BIAS = 127

BEGIN_ARGUMENTS = (
    types.uint64,  # plan
    types.uint64,  # most: int32 a line, of A and then of B
    types.uint64,  # least: the same
    types.int32,  # count: lines of both
)
RANGE_ARGUMENTS = (
    types.uint64,  # source: address of element (line 0, k 0)
    types.int64,  # line_stride, in elements
    types.int64,  # k_stride
    types.int32,  # lines
    types.int32,  # depth
    types.uint64,  # most
    types.uint64,  # least
)
POWER_ARGUMENTS = (
    types.uint64,  # plan
    types.uint64,  # most
    types.uint64,  # least
    types.uint64,  # powers: int32 a line
    types.int32,  # count
)


def begin_function() -> Callable[..., Any]:
    """``begin(plan, most, least, count)``: nothing found yet, and no line that cannot be scaled; any grid."""

    def begin(plan, most, least, count):  # type: ignore[no-untyped-def]
        largest, smallest = memory.global_array(most, types.int32), memory.global_array(least, types.int32)
        first = cuda.grid(1)
        if first == 0:
            memory.global_array(plan, types.int64)[PARTS_PLAN + PLAN_KIND] = HALVES
        for i in range(first, count, cuda.gridsize(1)):
            largest[i] = 0
            smallest[i] = NOTHING

    return begin


def range_function(*, turned: bool) -> Callable[..., Any]:
    """The largest and the least absolute value of each line, but for zeros and what is not finite, as a function of
    ``RANGE_ARGUMENTS``. ``most`` and ``least`` are the bits of the values, which are ordered as these are.

    Not ``turned``: a grid of (lines, stretches of k), ``THREADS`` threads a block, which walk k together. ``turned``,
    where neighbours in memory are neighbouring lines: a grid of (``THREADS`` lines each, stretches of ``DEPTH`` places
    of k), a thread a line.
    """
    i32, i64 = types.int32, types.int64
    threads, batch, depth_each, warps = THREADS, BATCH, DEPTH, THREADS // WARP

    @cuda.jit(device=True, inline="always")
    def with_largest(bits, largest):  # type: ignore[no-untyped-def]
        size = i32(bits & i32(0x7FFFFFFF))
        return max(largest, size) if size < i32(EXPONENT) else largest

    @cuda.jit(device=True, inline="always")
    def with_smallest(bits, smallest):  # type: ignore[no-untyped-def]
        size = i32(bits & i32(0x7FFFFFFF))
        return min(smallest, size) if size != i32(0) and size < i32(EXPONENT) else smallest

    def across(source, line_stride, k_stride, lines, depth, most, least):  # type: ignore[no-untyped-def]
        words = memory.global_array(source, i32)
        line = i64(cuda.blockIdx.x) * threads + cuda.threadIdx.x
        if line >= lines:
            return
        values = cuda.local.array(batch, i32)
        largest, smallest = i32(0), i32(NOTHING)
        first = i64(cuda.blockIdx.y) * depth_each
        last = min(i64(depth), first + depth_each)
        for start in range(first, last, batch):
            for e in range(batch):
                values[e] = words[line * line_stride + min(start + e, last - 1) * k_stride]
            for e in range(batch):
                largest, smallest = with_largest(values[e], largest), with_smallest(values[e], smallest)
        cuda.atomic.max(memory.global_array(most, i32), line, largest)
        cuda.atomic.min(memory.global_array(least, i32), line, smallest)

    def along(source, line_stride, k_stride, lines, depth, most, least):  # type: ignore[no-untyped-def]
        words = memory.global_array(source, i32)
        values = cuda.local.array(batch, i32)
        shared = cuda.shared.array((2, warps), i32)
        largest, smallest = i32(0), i32(NOTHING)
        thread, line = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        step = i64(threads * batch)
        for start in range(i64(cuda.blockIdx.y) * step + thread, i64(depth), i64(cuda.gridDim.y) * step):
            for e in range(batch):
                values[e] = words[line * line_stride + min(start + e * threads, i64(depth) - 1) * k_stride]
            for e in range(batch):
                largest, smallest = with_largest(values[e], largest), with_smallest(values[e], smallest)
        for lanes in (16, 8, 4, 2, 1):
            largest = max(largest, i32(cuda.shfl_xor_sync(0xFFFFFFFF, largest, lanes)))
            smallest = min(smallest, i32(cuda.shfl_xor_sync(0xFFFFFFFF, smallest, lanes)))
        if thread % WARP == 0:
            shared[0, thread // WARP], shared[1, thread // WARP] = largest, smallest
        cuda.syncthreads()  # what all warps have found is there
        if thread == 0:
            for warp in range(warps):
                largest, smallest = max(largest, shared[0, warp]), min(smallest, shared[1, warp])
            cuda.atomic.max(memory.global_array(most, i32), line, largest)
            cuda.atomic.min(memory.global_array(least, i32), line, smallest)

    return across if turned else along


def power_function() -> Callable[..., Any]:
    """The power of two of each line, and whether all lines can be scaled, as a function of ``POWER_ARGUMENTS``; a
    thread a line."""
    i32, u32 = types.int32, types.uint32

    def power(plan, most, least, powers, count):  # type: ignore[no-untyped-def]
        largest, smallest = memory.global_array(most, i32), memory.global_array(least, i32)
        line = cuda.grid(1)
        if line >= count:
            return
        top = (largest[line] >> i32(23)) - i32(BIAS)
        found = largest[line] != 0
        if found and (
            top < i32(LEAST_TOP)
            or floats.bits_float(u32(smallest[line]))
            < floats.bits_float(u32(top + i32(BIAS - MOST_APART)) << u32(23))
        ):
            memory.global_array(plan, types.int64)[PARTS_PLAN + PLAN_KIND] = THIRDS
            found = False
        memory.global_array(powers, i32)[line] = i32(TOP) - top if found else i32(0)

    return power
