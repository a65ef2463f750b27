"""Products of a stored block with a few vectors, on the CPU, in one pass and without a widened copy of the block.

The check of a product (`tilewright.pipeline.verify`) multiplies every matrix once with a handful of vectors, in
float64, complex128 or wrapping 64-bit integers whatever the block's own dtype is. BLAS would first need the block
widened, and would share its threads with the callers'; these loops read each element once, widen it in a register,
and release the interpreter's lock, so that one call runs on each of many threads.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np

from tilewright.kernels.deferred import numba

WIDE_DTYPES = {
    "i": np.dtype(np.int64),
    "u": np.dtype(np.int64),
    "f": np.dtype(np.float64),
    "c": np.dtype(np.complex128),
}
"""By the kind of a dtype, what it is summed in. Unsigned integers too go modulo 2^64: the bits are the same."""


def widen(block: np.ndarray, wide: np.dtype) -> np.ndarray:
    """The block as the compiled loops take it, to be summed in ``wide``.

    They do not know float16, which becomes float32. The bits of uint64 count as int64 where sums go modulo 2^64;
    where they are floating point its values count.
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


def add_thin_product(
    block: np.ndarray,
    vectors: np.ndarray,
    out: np.ndarray,
    square_vectors: np.ndarray,
    square_out: np.ndarray,
) -> None:
    """``out += block @ vectors.T`` and ``square_out += |block|² @ square_vectors.T``, reading ``block`` once.

    block: rows × columns, any strides, widened. vectors: count × columns, C-ordered, of the wide dtype; out: rows ×
    count of the same. square_vectors: count × columns and square_out: rows × count, both float64; a count of 0 leaves
    that part out. Both outs are written. Integers wrap modulo 2^64. Sums are taken in vector registers, so their
    order is not that of the columns; NaN and infinity propagate.
    """
    with _loop_lock:
        loop = _compiled_loop()
    loop(block, vectors, out, square_vectors, square_out)


_loop_lock = threading.Lock()
"""Else each of the threads that come first at once would get, and compile or load, a loop of its own."""


@functools.cache
def _compiled_loop() -> Any:
    return numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})(_add_thin_product)


def _add_thin_product(block: Any, vectors: Any, out: Any, square_vectors: Any, square_out: Any) -> None:
    rows, columns = block.shape
    wide = np.empty((BLOCK_ROWS, BLOCK_COLUMNS), vectors.dtype)
    squares = np.empty(BLOCK_COLUMNS, np.float64)
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
                if square_vectors.shape[0] > 0:
                    for j in range(width):
                        squares[j] = row[j].real * row[j].real + row[j].imag * row[j].imag
                    for t in range(square_vectors.shape[0]):
                        vector_squares = square_vectors[t, left : left + width]
                        total_squares = square_out[top + i, t]
                        for j in range(width):
                            total_squares += squares[j] * vector_squares[j]
                        square_out[top + i, t] = total_squares
