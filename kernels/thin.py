"""Products of a stored block with a few vectors, on the CPU, in one pass and without a widened copy of the block.

The check of a product (`tilewright.pipeline.freivalds`) multiplies every matrix once with a handful of vectors, in
float64, complex128 or wrapping 64-bit integers whatever the block's own dtype is. BLAS would first need the block
widened, and would share its threads with the callers'; these loops read each element once, widen it in a register,
and release the interpreter's lock, so that one call runs on each of many threads.
"""

from __future__ import annotations

import functools
import math
import threading
from typing import Any

import numpy as np

from tilewright.kernels.deferred import numba
from tilewright.kernels.host_loops import kept

WIDE_DTYPES = {
    "i": np.dtype(np.int64),
    "u": np.dtype(np.int64),
    "f": np.dtype(np.float64),
    "c": np.dtype(np.complex128),
}
"""What each kind of dtype is summed in. Unsigned integers are summed as signed ones: modulo 2^64 the bits are the
same."""


def widen(block: np.ndarray, wide: np.dtype) -> np.ndarray:
    """The block as the compiled loops take it, to be summed in ``wide``.

    They do not know float16, which becomes float32. uint64 is viewed as int64 where sums wrap modulo 2^64, and
    converted to float64 where they are floating point.
    """
    if block.dtype == np.float16:
        return block.astype(np.float32)
    if block.dtype == np.uint64:
        return block.view(np.int64) if wide.kind == "i" else block.astype(np.float64)
    return block


BLOCK_ROWS = 16
"""Rows widened together: 16 float32 of a column are one cache line, so a transposed block is read as quickly."""
BLOCK_COLUMNS = 512
"""Columns widened together: with 16 rows 64 KB, which stays in the second-level cache."""


LEAST_SQUARES, MOST_SQUARES = 2.0**-900, 2.0**1000
"""Sums of squares between these are used as they are: what underflowed is too small to matter, and nothing overflowed.
Others are formed again with every term scaled by a power of two."""


def add_thin_product(
    block: np.ndarray,
    vectors: np.ndarray,
    out: np.ndarray,
    norm_vectors: np.ndarray,
    norm_out: np.ndarray,
    column_squares: np.ndarray,
) -> None:
    """``out += block @ vectors.T``, the norms of rows weighted by vectors, and squares by column, in one pass.

    block: rows × columns, any strides, widened. vectors: count × columns, C-ordered, of the wide dtype; out: rows ×
    count of the same. norm_vectors: count × columns, none negative, and norm_out: rows × count, both float64:
    norm_out[i, t] becomes sqrt(norm_out[i, t]² + sum over j of |block[i, j] norm_vectors[t, j]|²), without overflow or
    underflow on the way as long as these products and the result have none. column_squares: columns, float64, to
    which the sum over i of |block[i, j]|² is added; these may overflow and underflow. A count of 0, and no column
    squares, leave that part out. All three outs are written. Integers wrap modulo 2^64. Sums are taken in vector
    registers, so their order is not that of the columns; NaN and infinity propagate.

    Source: the scaled sums follow J. L. Blue, "A portable Fortran program to find the Euclidean norm of a vector",
    ACM Transactions on Mathematical Software 4 (1978), with one scale for each piece of a row in place of three.
    """
    with _loop_lock:
        loop = _compiled_loop()
    loop(block, vectors, out, norm_vectors, norm_out, column_squares)


_loop_lock = threading.Lock()
"""Without it, threads that start together would each compile, or load, a loop of their own."""


@functools.cache
def _compiled_loop() -> Any:
    return kept(numba.njit(nogil=True, fastmath={"reassoc", "contract", "nsz"})(_add_thin_product))


def _add_thin_product(
    block: Any, vectors: Any, out: Any, norm_vectors: Any, norm_out: Any, column_squares: Any
) -> None:
    rows, columns = block.shape
    wide = np.empty((BLOCK_ROWS, BLOCK_COLUMNS), vectors.dtype)
    parts = np.empty(BLOCK_COLUMNS, np.float64)
    terms = np.empty(BLOCK_COLUMNS + 1, np.float64)  # one more for the norm so far
    part_count = vectors.itemsize // 8 if norm_vectors.shape[0] + column_squares.shape[0] > 0 else 0
    by_column = block.strides[0] < block.strides[1]
    for top in range(0, rows, BLOCK_ROWS):
        height = min(BLOCK_ROWS, rows - top)
        for left in range(0, columns, BLOCK_COLUMNS):
            width = min(BLOCK_COLUMNS, columns - left)
            if by_column:
                for j in range(width):
                    for i in range(height):
                        wide[i, j] = block[top + i, left + j]
            else:
                for i in range(height):
                    for j in range(width):
                        wide[i, j] = block[top + i, left + j]
            for i in range(height):
                row = wide[i, :width]
                for t in range(vectors.shape[0]):
                    vector = vectors[t, left : left + width]
                    total = out[top + i, t]
                    for j in range(width):
                        total += row[j] * vector[j]
                    out[top + i, t] = total
                for part in range(part_count):  # real and imaginary parts count as elements of their own
                    if part == 0:
                        for j in range(width):
                            parts[j] = abs(row[j].real)
                    else:
                        for j in range(width):
                            parts[j] = abs(row[j].imag)
                    if column_squares.shape[0] > 0:
                        square = column_squares[left : left + width]
                        for j in range(width):
                            square[j] += parts[j] * parts[j]
                    for t in range(norm_vectors.shape[0]):
                        weights = norm_vectors[t, left : left + width]
                        squares = 0.0
                        for j in range(width):
                            term = parts[j] * weights[j]
                            # Never true; but it keeps the compiler, which may reassociate, from multiplying the
                            # squares of the factors instead: these may overflow or underflow where products do not.
                            term = 0.0 if term < 0.0 else term
                            squares += term * term
                        norm = norm_out[top + i, t]
                        before = norm * norm
                        if LEAST_SQUARES <= squares <= MOST_SQUARES and before <= MOST_SQUARES:
                            norm_out[top + i, t] = math.sqrt(before + squares)
                            continue
                        size = 0.0
                        for j in range(width):
                            terms[j] = parts[j] * weights[j]
                            size += terms[j]
                        if size == 0.0 or not math.isfinite(norm):
                            continue
                        terms[width] = norm
                        largest = 0.0
                        for j in range(width + 1):
                            if terms[j] > largest or terms[j] != terms[j]:  # a NaN stays: none is above it
                                largest = terms[j]
                        if math.isfinite(largest):
                            # 2^1000 already lifts the smallest number to where its square is one.
                            scale = math.ldexp(1.0, min(-math.frexp(largest)[1], 1000))
                            for j in range(width + 1):
                                terms[j] *= scale
                            squares = 0.0
                            for j in range(width + 1):
                                squares += terms[j] * terms[j]
                            largest = math.sqrt(squares) / scale
                        norm_out[top + i, t] = largest
