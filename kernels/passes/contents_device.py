"""`Contents` of a matrix on a GPU, counted by a kernel that adds to a few words of device memory.

Nothing waits: a product's panels are looked at on the stream that multiplies them, while they are there anyway. A panel
is read once more, at the memory's speed, some sixty times that of the bus that brought it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numba
import numpy as np
from numba import cuda

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.elements import numba_type
from tilewright.kernels.gemm.base import COMPLEX, FLOATS, INTEGERS, Variant
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.numbers import ceil_div
from tilewright.kernels.passes.contents import Contents, Sought
from tilewright.kernels.passes.launcher import Launcher
from tilewright.kernels.passes.masked import Masks

THREADS = 32 if SIMULATOR else 256
EACH = 8
"""Elements of a stretch that a thread looks at, all of them read before the first is used."""
MOST_BLOCKS = 1056
"""Eight for each of 132 multiprocessors: each ends with a few atomic operations on the same words."""
WORDS = 5
"""64-bit words that the contents of one matrix take: least, most, NaN, infinite, masked."""
DTYPES = tuple(dtype for dtype in INTEGERS + FLOATS + COMPLEX if dtype != BFLOAT16)


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """What the range of integers of a dtype is kept in."""
    return np.dtype(np.uint64 if dtype.kind == "u" else np.int64)


def empty_words(dtype: np.dtype) -> np.ndarray:
    """The words of a matrix of this dtype of which nothing was looked at yet: int64, `WORDS` of them."""
    words = np.zeros(WORDS, np.int64)
    limits = np.iinfo(wide_dtype(dtype))
    words[:2].view(wide_dtype(dtype))[:] = limits.max, limits.min
    return words


def contents_from(words: np.ndarray, dtype: np.dtype, sought: Sought) -> Contents:
    """What the words of a matrix say."""
    least, most = (int(word) for word in words[:2].view(wide_dtype(dtype)))
    looked = sought.extent and dtype.kind in "iu" and least <= most
    nan, infinite, masked = (int(word) for word in words[2:])
    return Contents(least if looked else None, most if looked else None, nan, infinite, masked)


def contents_function(dtype: np.dtype) -> Any:
    """The plain function of the kernel that looks through a matrix and adds what it finds to ``words``.

    matrix: rows × columns, contiguous lines. values: elements that count as masked; limits: so does what is below the
    first of these two or above the second, and where the first is above the second, what lies between (not for complex
    numbers). overflow: absolute values from here on count as
    infinite. extent (the range of integers, 2) and counts (NaN, infinite, masked) are read and written by atomic
    operations. Stretches of THREADS × EACH elements of a line are dealt to the blocks in turn. Block: THREADS; shared
    memory: five words a thread. NaN and infinity are looked for among floats, the range among integers.
    """
    number = numba_type(dtype)
    integers, complex_numbers = dtype.kind in "iu", dtype.kind == "c"
    wide = numba_type(wide_dtype(dtype))
    part = numba.float64 if dtype.itemsize // (1 + complex_numbers) == 8 else numba.float32
    widest = np.iinfo(wide_dtype(dtype))
    most_wide, least_wide = widest.max, widest.min
    half = dtype == np.float16
    i64, u32, u64 = numba.int64, numba.uint32, numba.uint64

    @cuda.jit(device=True, inline="always")
    def comparable(value: Any) -> Any:
        return part(value) if half else value  # Numba compares no float16

    def contents_kernel(
        matrix: Any, values: Any, limits: Any, overflow: Any, extent: Any, counts: Any
    ) -> None:
        held = cuda.local.array(EACH, number)
        rows, columns = u64(matrix.shape[0]), u64(matrix.shape[1])
        span = u64(THREADS * EACH)
        across = u64((columns + span - u64(1)) // span)
        low, high = wide(most_wide), wide(least_wide)
        nan, infinite, masked = i64(0), i64(0), i64(0)
        stretch = u64(cuda.blockIdx.x)
        while stretch < rows * across:
            row, first = u64(stretch // across), u64(stretch % across * span)
            for i in range(EACH):
                column = u64(first + u64(i * THREADS) + u64(cuda.threadIdx.x))
                if column < columns:
                    held[i] = matrix[row, column]
            for i in range(EACH):
                column = u64(first + u64(i * THREADS) + u64(cuda.threadIdx.x))
                if column < columns:
                    value = held[i]
                    if integers:
                        low, high = min(low, wide(value)), max(high, wide(value))
                    elif complex_numbers:
                        real, imaginary = part(value.real), part(value.imag)
                        if real != real or imaginary != imaginary:
                            nan += i64(1)
                        elif not (abs(real) < overflow and abs(imaginary) < overflow):
                            infinite += i64(1)
                    else:
                        if comparable(value) != comparable(value):
                            nan += i64(1)
                        elif not abs(comparable(value)) < overflow:
                            infinite += i64(1)
                    hit = False
                    for place in range(values.shape[0]):
                        if comparable(value) == comparable(values[place]):
                            hit = True
                    if not complex_numbers:
                        below = comparable(value) < comparable(limits[0])
                        above = comparable(value) > comparable(limits[1])
                        around = comparable(limits[0]) > comparable(limits[1])
                        hit = hit or ((below and above) if around else (below or above))
                    if hit:
                        masked += i64(1)
            stretch += u64(cuda.gridDim.x)
        # A line each: the simulator tells shared arrays apart by the line that asks for them.
        lows = cuda.shared.array(THREADS, wide)
        highs = cuda.shared.array(THREADS, wide)
        nans = cuda.shared.array(THREADS, i64)
        infinites = cuda.shared.array(THREADS, i64)
        maskeds = cuda.shared.array(THREADS, i64)
        thread = u32(cuda.threadIdx.x)
        lows[thread], highs[thread] = low, high
        nans[thread], infinites[thread], maskeds[thread] = nan, infinite, masked
        width = THREADS // 2
        while width > 0:
            cuda.syncthreads()  # the upper half's counts are in before the lower half reads them
            if thread < u32(width):
                other = u32(thread + u32(width))
                lows[thread] = min(lows[thread], lows[other])
                highs[thread] = max(highs[thread], highs[other])
                nans[thread] += nans[other]
                infinites[thread] += infinites[other]
                maskeds[thread] += maskeds[other]
            width //= 2
        if thread == u32(0):
            if integers:
                cuda.atomic.min(extent, 0, lows[0])
                cuda.atomic.max(extent, 1, highs[0])
            if nans[0] > 0:
                cuda.atomic.add(counts, 0, nans[0])
            if infinites[0] > 0:
                cuda.atomic.add(counts, 1, infinites[0])
            if maskeds[0] > 0:
                cuda.atomic.add(counts, 2, maskeds[0])

    return contents_kernel


def signature(dtype: np.dtype) -> Any:
    number = numba_type(dtype)
    line, words = numba.types.Array(number, 1, "A"), numba_type(wide_dtype(dtype))
    part = numba.float64 if dtype.itemsize // (2 if dtype.kind == "c" else 1) == 8 else numba.float32
    return numba.void(
        numba.types.Array(number, 2, "A"),
        line,
        line,
        part,
        numba.types.Array(words, 1, "A"),
        numba.types.Array(numba.int64, 1, "A"),
    )


KERNELS = Launcher(contents_function, signature)


def mask_arrays(dtype: np.dtype, masks: Masks | None) -> tuple[np.ndarray, np.ndarray]:
    """The values and the limits that the kernel compares elements with, of the matrix's dtype."""
    values = np.array(masks.values if masks is not None else (), dtype)
    if dtype.kind == "c":
        return values, np.zeros(2, dtype)
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    least, most = (limits.min, limits.max) if limits is not None else (-math.inf, math.inf)
    if masks is not None:
        least = least if masks.least is None else masks.least
        most = most if masks.most is None else masks.most
    return values, np.array([least, most], dtype)


def add_contents(
    matrix: Any, values: Any, limits: Any, overflow: float, extent: Any, counts: Any, stream: Any
) -> None:
    """Enqueue the look through a matrix (device memory, rows × columns, lines contiguous).

    values, limits: `mask_arrays` on the device. extent, counts: the first two and the last three of its words there;
    ``extent`` of `wide_dtype`, ``counts`` int64.
    """
    rows, columns = matrix.shape
    if rows * columns == 0:
        return
    grid = min(MOST_BLOCKS, rows * ceil_div(columns, THREADS * EACH))
    arguments = matrix, values, limits, overflow, extent, counts
    KERNELS.enqueue((np.dtype(matrix.dtype),), grid, THREADS, stream, *arguments)


def variants() -> Iterable[Variant]:
    """What tests compile to machine code: a kernel for each dtype of a stored matrix."""
    for dtype in DTYPES:
        yield KERNELS.variant(f"contents {dtype}", dtype)
