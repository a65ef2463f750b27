"""Products of a stored block with a few vectors, on the CPU, in one pass and without a widened copy of the block.

The check of a product (`pipeline/check/freivalds.py`) multiplies every matrix once with a handful of vectors, in
float64, complex128 or wrapping integers whatever the block's own dtype is. BLAS would first need the block widened, and
would share its threads with the callers'; these loops read each element once, widen it in a register, and release the
interpreter's lock, so that one call runs on each of many threads. Two more loops find NaN and infinity, and look at
what they leave in a product.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tilewright.kernels.cpu.loops import Allowance, kept
from tilewright.kernels.deferred import numba
from tilewright.kernels.numbers import ceil_div

NUMBER, INFINITE, NAN = 0, 1, 2
"""What a line of a matrix holds, as uint8: numbers alone, also infinity, also NaN (with or without infinity). Of two
such lines the larger decides what a product holds where they meet."""


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """What products of this dtype are summed in.

    Integers are summed modulo 2^32 if they have at most 32 bits, else modulo 2^64. Unsigned ones are summed as signed
    ones: the bits are the same.
    """
    if dtype.kind in "iu":
        return np.dtype(np.int64 if dtype.itemsize == 8 else np.int32)
    return np.dtype(np.complex128 if dtype.kind == "c" else np.float64)


def widen(block: np.ndarray, wide: np.dtype) -> np.ndarray:
    """The block as the compiled loops take it, to be summed in ``wide``.

    They do not know float16, which becomes float32. uint64 is viewed as int64 where sums are integers, and converted to
    float64 where they are floating point.
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

PADDING_NBYTES = 64
"""A cache line between the rows of a block: columns of a transposed one are written down these rows, and at multiples
of 4 KB all of a column would have their place in the same few lines of the first-level cache."""


STRIPE_ROWS = 256
"""Rows of a block whose columns are lines in memory whose sums are formed together: of a dozen vectors they stay in the
first-level cache."""
BAND_NBYTES = 2**19
"""About how much of a block with gaps between its lines is copied at once: half of a second-level cache."""

VECTORS_AT_ONCE = 4
"""Vectors that a row is multiplied by in one go: each element is loaded once for all of them."""

FEW_COLUMNS = 8
"""One column in so many is looked at by itself; where more are special, all are, many at once in vector registers."""

LEAST_SQUARES, MOST_SQUARES = 2.0**-900, 2.0**1000
"""Sums of squares between these are used as they are: what underflowed is too small to matter, and nothing overflowed.
Others are formed again with every term scaled by a power of two."""


NUMPY_ELEMENTS = 2**24
"""Elements, in all blocks together, that a process multiplies by NumPy before it loads a loop, at a few nanoseconds
each: setting Numba up for the CPU takes a third of a second, and a loop that is not kept on disk one more to
compile."""


def add_thin_product(
    block: np.ndarray,
    vectors: np.ndarray,
    out: np.ndarray,
    norm_vectors: np.ndarray,
    norm_out: np.ndarray,
    column_squares: np.ndarray,
) -> None:
    """``out += block @ vectors.T``, the norms of rows weighted by vectors, and squares by column, in one pass.

    block: rows × columns, any strides, widened. vectors: count × columns, C-ordered, of the wide dtype, or float64
    where that is complex128; out: rows × count of the wide dtype. norm_vectors: count × columns, none negative, and
    norm_out: rows × count, both float64: norm_out[i, t] becomes sqrt(norm_out[i, t]² + sum over j of |block[i, j]
    norm_vectors[t, j]|²), without overflow or underflow on the way as long as these products and the result have none.
    column_squares: columns, float64, to which the sum over i of |block[i, j]|² is added; these may overflow and
    underflow. A count of 0, and no column squares, leave that part out. All three outs are written. Integers wrap
    modulo 2^32 or 2^64. NaN and infinity propagate.

    The products of ``BLOCK_COLUMNS`` columns are added up in any order (in vector registers), and each such sum is
    added to ``out``.

    Source: the scaled sums follow J. L. Blue, "A portable Fortran program to find the Euclidean norm of a vector",
    ACM Transactions on Mathematical Software 4 (1978), with one scale for each piece of a row in place of three.
    """
    exact = out.dtype.kind == "i" and not norm_vectors.size and not column_squares.size
    if exact and _numpy_serves(_add_thin_product, block):
        out += block.astype(out.dtype) @ vectors.T
        return
    real = block.dtype.kind == "f" and out.dtype == np.float64
    if (
        (real or (block.dtype.kind == "c" and out.dtype == np.complex128))
        and _numpy_serves(_add_rows if real else _add_thin_product, block)
        and add_by_numpy(block, vectors, out, norm_vectors, norm_out, column_squares)
    ):
        return
    lines, turned = _by_lines(block)
    if real and not turned:
        _add_by_rows(lines, vectors, out, norm_vectors, norm_out, column_squares)
    elif real and not column_squares.size:
        _add_by_columns(lines, vectors, out, norm_vectors, norm_out)
    else:
        lengths: Any = (norm_vectors, norm_out, column_squares)
        if exact:
            lengths = (None, None, None)  # for which Numba compiles none of their code
        _loop(_add_thin_product)(lines, turned, vectors, out, *lengths)


def _add_by_rows(
    lines: np.ndarray,
    vectors: np.ndarray,
    out: np.ndarray,
    norm_vectors: np.ndarray,
    norm_out: np.ndarray,
    column_squares: np.ndarray,
) -> None:
    """`add_thin_product` of real floats, whose rows are lines in memory."""
    for rows, band in _bands(lines):
        norms = norm_out[rows]
        unusual = np.zeros((band.shape[0], ceil_div(band.shape[1], BLOCK_COLUMNS)), np.bool_)
        _loop(_add_rows)(band, vectors, out[rows], norm_vectors, norms, column_squares, unusual)
        for place in np.flatnonzero(unusual.any(0)):
            across, which = _stretch(int(place), BLOCK_COLUMNS), np.flatnonzero(unusual[:, place])
            found = norms[which]
            _add_norms(band[which, across], False, norm_vectors[:, across], found)
            norms[which] = found


def _add_by_columns(
    lines: np.ndarray,
    vectors: np.ndarray,
    out: np.ndarray,
    norm_vectors: np.ndarray,
    norm_out: np.ndarray,
) -> None:
    """The same of a block whose columns are lines in memory, without column squares."""
    for columns, band in _bands(lines):
        weights = np.ascontiguousarray(norm_vectors[:, columns])
        unusual = np.zeros(
            (ceil_div(band.shape[0], BLOCK_COLUMNS), ceil_div(band.shape[1], STRIPE_ROWS)), np.bool_
        )
        _loop(_add_columns)(band, np.ascontiguousarray(vectors[:, columns]), out, weights, norm_out, unusual)
        for place, stripe in np.argwhere(unusual):
            across, down = _stretch(place, BLOCK_COLUMNS), _stretch(stripe, STRIPE_ROWS)
            _add_norms(band[across, down], True, weights[:, across], norm_out[down])


def _add_norms(lines: np.ndarray, turned: bool, norm_vectors: np.ndarray, norm_out: np.ndarray) -> None:
    """`add_thin_product` without products and column squares, whatever the sizes of the numbers."""
    part, weights = np.ascontiguousarray(lines), np.ascontiguousarray(norm_vectors)
    none = np.zeros((0, weights.shape[1])), np.zeros((norm_out.shape[0], 0))
    _loop(_add_thin_product)(part, turned, *none, weights, norm_out, np.zeros(0))


def _stretch(place: int, length: int) -> slice:
    return slice(place * length, (place + 1) * length)


def _bands(lines: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Lines in bands without gaps between them, copied where there are some: a loop that does not know how far apart
    elements are would load each by itself."""
    step = lines.shape[0]
    if not lines.flags.c_contiguous:
        step = BLOCK_COLUMNS * ceil_div(BAND_NBYTES, BLOCK_COLUMNS * lines.shape[1] * lines.itemsize)
    for start in range(0, lines.shape[0], max(1, step)):
        band = slice(start, min(start + step, lines.shape[0]))
        yield band, np.ascontiguousarray(lines[band])


def add_by_numpy(
    block: np.ndarray,
    vectors: np.ndarray,
    out: np.ndarray,
    norm_vectors: np.ndarray,
    norm_out: np.ndarray,
    column_squares: np.ndarray,
) -> bool:
    """`add_thin_product` of floats or complex numbers without a loop to compile, in a few passes and with widened
    copies. False, and nothing is done, where anything is not finite, or squares leave the range in which they need no
    scale."""
    wide = block.astype(out.dtype, order="C")
    with np.errstate(all="ignore"):
        sums = wide @ vectors.T
        parts = wide.view(np.float64)  # real and imaginary parts count as elements of their own
        each = wide.itemsize // parts.itemsize
        np.abs(parts, out=parts)
        squares = np.empty_like(norm_out)
        for t, weights in enumerate(norm_vectors):
            terms = parts * np.repeat(weights, each)
            zero = ~terms.any(axis=1)
            squares[:, t] = np.einsum("ij,ij->i", terms, terms)
            usual = (squares[:, t] >= LEAST_SQUARES) & (squares[:, t] <= MOST_SQUARES)
            if not (usual | zero).all():
                return False
        before = norm_out * norm_out
    if not (np.isfinite(sums).all() and (before <= MOST_SQUARES).all()):
        return False
    out += sums
    np.copyto(norm_out, np.sqrt(before + squares), where=squares > 0)
    if column_squares.size:
        column_squares += np.einsum("ij,ij->j", parts, parts).reshape(-1, each).sum(1)
    return True


_allowance = Allowance(NUMPY_ELEMENTS)


def _numpy_serves(loop: Callable[..., None], block: np.ndarray) -> bool:
    """Whether a block is one of the few for which a loop need not be loaded, and it is not loaded yet."""
    return loop not in _loaded and _allowance.takes(block.size)


def add_chosen_sums(block: np.ndarray, masks: np.ndarray, out: np.ndarray) -> None:
    """Add to ``out`` the sums of those elements of each row that masks choose.

    block: rows × columns of integers, any strides, widened. masks: count × columns, C-ordered, of the wide dtype: -1,
    which is all bits, where an element is chosen, else 0. out: rows × count of the wide dtype; sums wrap. A quarter of
    the work of a multiplication where processors have none for 64-bit integers in vector registers.
    """
    if _numpy_serves(_add_chosen_sums, block):
        wide = block.astype(out.dtype)
        for t, mask in enumerate(masks):
            out[:, t] += (wide & mask).sum(1, dtype=out.dtype)
        return
    _loop(_add_chosen_sums)(*_by_lines(block), masks, out)


def find_special_columns(block: np.ndarray, suspected: np.ndarray) -> np.ndarray:
    """What each column of a block holds: ``NUMBER``, ``INFINITE`` or ``NAN``; uint8.

    block: rows × columns of floats or complex numbers, any strides, widened. suspected: bool, one a column, true where
    it may hold NaN or infinity.
    """
    kinds = np.zeros(block.shape[1], np.uint8)
    if suspected.any():
        _loop(_find_special_columns)(block, np.flatnonzero(suspected), kinds)
    return kinds


def settle_special(block: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """For each row of a block of a product, whether it holds a number where NaN or infinity in a factor leaves none;
    bool. What NaN or infinity decides becomes 0 in the block.

    block: rows × columns of floats or complex numbers, widened; written. rows, columns: what those of the factors hold,
    uint8. Where one holds NaN the product must be NaN, where one holds infinity it must not be finite.
    """
    strays = np.zeros(block.shape[0], bool)
    _loop(_settle_special)(block, rows, columns, np.flatnonzero(columns), strays)
    return strays


def clear_columns(block: np.ndarray, columns: np.ndarray) -> None:
    """Set those columns of a block to 0 that, uint8, are not ``NUMBER``."""
    _loop(_clear_columns)(block, columns, np.flatnonzero(columns))


_loop_lock = threading.Lock()
"""Without it, threads that start together would each compile, or load, a loop of their own."""
_loaded: set[Callable[..., None]] = set()
"""Functions of loops that this process has asked for."""


def _loop(function: Callable[..., None]) -> Any:
    with _loop_lock:
        _loaded.add(function)
        return _compiled_loop(function)


@functools.cache
def _compiled_loop(function: Callable[..., None]) -> Any:
    return kept(numba.njit(nogil=True, fastmath={"reassoc", "contract", "nsz"})(function))


def _by_lines(block: np.ndarray) -> tuple[np.ndarray, bool]:
    """A block or its transpose, whichever has neighbours in memory next to each other in its rows, and whether it is
    the transpose. A loop is compiled for each layout, a second or so long: this way not for both orders."""
    turned = block.strides[0] < block.strides[1]
    return (block.T if turned else block), turned


def _add_thin_product(
    lines: Any, turned: bool, vectors: Any, out: Any, norm_vectors: Any, norm_out: Any, column_squares: Any
) -> None:
    columns, rows = lines.shape if turned else (lines.shape[1], lines.shape[0])
    wide = np.empty((BLOCK_ROWS, BLOCK_COLUMNS + PADDING_NBYTES // out.itemsize), out.dtype)
    zero = out.dtype.type(0)
    together = vectors.shape[0] - vectors.shape[0] % VECTORS_AT_ONCE
    parts = np.empty(BLOCK_COLUMNS, np.float64)
    terms = np.empty(BLOCK_COLUMNS + 1, np.float64)  # one more for the norm so far
    part_count = 0
    if norm_vectors is not None and norm_vectors.shape[0] + column_squares.shape[0] > 0:
        part_count = max(out.itemsize // 8, 1)
    for top in range(0, rows, BLOCK_ROWS):
        height = min(BLOCK_ROWS, rows - top)
        for left in range(0, columns, BLOCK_COLUMNS):
            width = min(BLOCK_COLUMNS, columns - left)
            if turned:
                for j in range(width):
                    for i in range(height):
                        wide[i, j] = lines[left + j, top + i]
            else:
                for i in range(height):
                    for j in range(width):
                        wide[i, j] = lines[top + i, left + j]
            for i in range(height):
                row = wide[i, :width]
                for t in range(0, together, VECTORS_AT_ONCE):
                    first, second = vectors[t, left : left + width], vectors[t + 1, left : left + width]
                    third, fourth = vectors[t + 2, left : left + width], vectors[t + 3, left : left + width]
                    total, total1, total2, total3 = zero, zero, zero, zero
                    for j in range(width):
                        total += row[j] * first[j]
                        total1 += row[j] * second[j]
                        total2 += row[j] * third[j]
                        total3 += row[j] * fourth[j]
                    out[top + i, t] += total
                    out[top + i, t + 1] += total1
                    out[top + i, t + 2] += total2
                    out[top + i, t + 3] += total3
                for t in range(together, vectors.shape[0]):
                    vector = vectors[t, left : left + width]
                    total = zero
                    for j in range(width):
                        total += row[j] * vector[j]
                    out[top + i, t] += total
                if norm_vectors is not None:
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
                            norm = norm_out[top + i, t]
                            if not math.isfinite(norm):
                                continue
                            weights = norm_vectors[t, left : left + width]
                            squares = 0.0
                            for j in range(width):
                                term = parts[j] * weights[j]
                                # Never true; but it keeps the compiler, which may reassociate, from multiplying the
                                # squares of the factors instead: these may overflow or underflow where products do not.
                                term = 0.0 if term < 0.0 else term
                                squares += term * term
                            if math.isnan(squares):  # no sum of squares is one unless a product is
                                norm_out[top + i, t] = squares
                                continue
                            before = norm * norm
                            if LEAST_SQUARES <= squares <= MOST_SQUARES and before <= MOST_SQUARES:
                                norm_out[top + i, t] = math.sqrt(before + squares)
                                continue
                            size = 0.0
                            for j in range(width):
                                terms[j] = parts[j] * weights[j]
                                size += terms[j]
                            if size == 0.0:
                                continue
                            terms[width] = norm
                            largest = 0.0
                            for j in range(width + 1):
                                if terms[j] > largest:
                                    largest = terms[j]
                                    if largest == math.inf:
                                        break
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


def _add_rows(
    lines: Any,
    vectors: Any,
    out: Any,
    norm_vectors: Any,
    norm_out: Any,
    column_squares: Any,
    unusual: Any,
) -> None:
    """unusual: rows by parts of ``BLOCK_COLUMNS`` columns; true where squares leave the range in which they need no
    scale, or are not finite: norms of such a part are left as they are."""
    rows, columns = lines.shape
    count, norms = vectors.shape[0], norm_vectors.shape[0]
    # What a row of B, or of C, needs of one group, in a single pass.
    together = count >= 2 and norms >= 1 and column_squares.shape[0] > 0
    squares = np.empty(norms)
    for place in range(unusual.shape[1]):
        left, right = place * BLOCK_COLUMNS, min((place + 1) * BLOCK_COLUMNS, columns)
        width = right - left
        for i in range(rows):
            line = lines[i, left:right]
            first, measured = 0, 0
            if together:
                first, measured = 2, 1
                vector, vector1 = vectors[0, left:right], vectors[1, left:right]
                weights, square = norm_vectors[0, left:right], column_squares[left:right]
                total, total1, norm = 0.0, 0.0, 0.0
                for j in range(width):
                    element = np.float64(line[j])
                    total += element * vector[j]
                    total1 += element * vector1[j]
                    size = abs(element)
                    square[j] += size * size
                    term = size * weights[j]
                    # Never true; as in `_add_thin_product`, here and below.
                    term = 0.0 if term < 0.0 else term
                    norm += term * term
                out[i, 0] += total
                out[i, 1] += total1
                squares[0] = norm
            elif column_squares.shape[0] > 0:
                square = column_squares[left:right]
                for j in range(width):
                    size = abs(np.float64(line[j]))
                    square[j] += size * size
            for t in range(first, count - 1, 2):
                vector, vector1 = vectors[t, left:right], vectors[t + 1, left:right]
                total, total1 = 0.0, 0.0
                for j in range(width):
                    element = np.float64(line[j])
                    total += element * vector[j]
                    total1 += element * vector1[j]
                out[i, t] += total
                out[i, t + 1] += total1
            if count % 2:
                vector, total = vectors[count - 1, left:right], 0.0
                for j in range(width):
                    total += np.float64(line[j]) * vector[j]
                out[i, count - 1] += total
            for t in range(measured, norms):
                weights, norm = norm_vectors[t, left:right], 0.0
                for j in range(width):
                    term = abs(np.float64(line[j])) * weights[j]
                    term = 0.0 if term < 0.0 else term
                    norm += term * term
                squares[t] = norm
            usual = True
            for t in range(norms):
                norm = norm_out[i, t]
                in_range = (squares[t] >= LEAST_SQUARES) & (squares[t] <= MOST_SQUARES)
                if squares[t] == 0.0:  # in range unless terms have underflowed
                    in_range = True
                    for j in range(width):
                        in_range &= (line[j] == 0) | (norm_vectors[t, left + j] == 0)
                usual &= in_range & (norm * norm <= MOST_SQUARES)
            unusual[i, place] = not usual
            for t in range(norms if usual else 0):
                norm = norm_out[i, t]
                # Nothing is added to a norm whose square may be 0, though it is not.
                norm_out[i, t] = math.sqrt(norm * norm + squares[t]) if squares[t] > 0.0 else norm


def _add_columns(lines: Any, vectors: Any, out: Any, norm_vectors: Any, norm_out: Any, unusual: Any) -> None:
    """unusual: parts of ``BLOCK_COLUMNS`` columns by ``STRIPE_ROWS`` rows; true where squares leave the range in which
    they need no scale, or are not finite: norms of such a part are left as they are."""
    columns, rows = lines.shape
    count, norms = vectors.shape[0], norm_vectors.shape[0]
    totals, squares = np.empty((count, STRIPE_ROWS)), np.empty((norms, STRIPE_ROWS))
    for place in range(unusual.shape[0]):
        left, right = place * BLOCK_COLUMNS, min((place + 1) * BLOCK_COLUMNS, columns)
        by_fours = right - (right - left) % 4
        for stripe in range(unusual.shape[1]):
            top = stripe * STRIPE_ROWS
            height = min(STRIPE_ROWS, rows - top)
            totals[:] = 0
            squares[:] = 0
            for j in range(left, by_fours, 4):
                # Four lines at once: each sum is loaded and stored once for all of them.
                line, line1 = lines[j, top : top + height], lines[j + 1, top : top + height]
                line2, line3 = lines[j + 2, top : top + height], lines[j + 3, top : top + height]
                for t in range(count):
                    total = totals[t]
                    w, w1, w2, w3 = vectors[t, j], vectors[t, j + 1], vectors[t, j + 2], vectors[t, j + 3]
                    for i in range(height):
                        total[i] += (np.float64(line[i]) * w + np.float64(line1[i]) * w1) + (
                            np.float64(line2[i]) * w2 + np.float64(line3[i]) * w3
                        )
                for t in range(norms):
                    square = squares[t]
                    w, w1, w2, w3 = (
                        norm_vectors[t, j],
                        norm_vectors[t, j + 1],
                        norm_vectors[t, j + 2],
                        norm_vectors[t, j + 3],
                    )
                    for i in range(height):
                        term, term1 = abs(np.float64(line[i])) * w, abs(np.float64(line1[i])) * w1
                        term2, term3 = abs(np.float64(line2[i])) * w2, abs(np.float64(line3[i])) * w3
                        # Never true; as in `_add_thin_product`.
                        term, term1 = 0.0 if term < 0.0 else term, 0.0 if term1 < 0.0 else term1
                        term2, term3 = 0.0 if term2 < 0.0 else term2, 0.0 if term3 < 0.0 else term3
                        square[i] += (term * term + term1 * term1) + (term2 * term2 + term3 * term3)
            for j in range(by_fours, right):
                line = lines[j, top : top + height]
                for t in range(count):
                    total, w = totals[t], vectors[t, j]
                    for i in range(height):
                        total[i] += np.float64(line[i]) * w
                for t in range(norms):
                    square, w = squares[t], norm_vectors[t, j]
                    for i in range(height):
                        term = abs(np.float64(line[i])) * w
                        term = 0.0 if term < 0.0 else term
                        square[i] += term * term
            usual = True
            for t in range(norms):
                for i in range(height):
                    norm = norm_out[top + i, t]
                    in_range = (squares[t, i] >= LEAST_SQUARES) & (squares[t, i] <= MOST_SQUARES)
                    if squares[t, i] == 0.0:  # in range unless terms have underflowed
                        in_range = True
                        for j in range(left, right):
                            in_range &= (lines[j, top + i] == 0) | (norm_vectors[t, j] == 0)
                    usual &= in_range & (norm * norm <= MOST_SQUARES)
            unusual[place, stripe] = not usual
            for t in range(count):
                for i in range(height):
                    out[top + i, t] += totals[t, i]
            for t in range(norms if usual else 0):
                for i in range(height):
                    norm = norm_out[top + i, t]
                    more = squares[t, i]
                    norm_out[top + i, t] = math.sqrt(norm * norm + more) if more > 0.0 else norm


def _add_chosen_sums(lines: Any, turned: bool, masks: Any, out: Any) -> None:
    columns, rows = lines.shape if turned else (lines.shape[1], lines.shape[0])
    wide = np.empty((BLOCK_ROWS, BLOCK_COLUMNS + PADDING_NBYTES // out.itemsize), out.dtype)
    zero = out.dtype.type(0)
    together = masks.shape[0] - masks.shape[0] % VECTORS_AT_ONCE
    for top in range(0, rows, BLOCK_ROWS):
        height = min(BLOCK_ROWS, rows - top)
        for left in range(0, columns, BLOCK_COLUMNS):
            width = min(BLOCK_COLUMNS, columns - left)
            if turned:
                for j in range(width):
                    for i in range(height):
                        wide[i, j] = lines[left + j, top + i]
            else:
                for i in range(height):
                    for j in range(width):
                        wide[i, j] = lines[top + i, left + j]
            for i in range(height):
                row = wide[i, :width]
                for t in range(0, together, VECTORS_AT_ONCE):
                    first, second = masks[t, left : left + width], masks[t + 1, left : left + width]
                    third, fourth = masks[t + 2, left : left + width], masks[t + 3, left : left + width]
                    total, total1, total2, total3 = zero, zero, zero, zero
                    for j in range(width):
                        total += row[j] & first[j]
                        total1 += row[j] & second[j]
                        total2 += row[j] & third[j]
                        total3 += row[j] & fourth[j]
                    out[top + i, t] += total
                    out[top + i, t + 1] += total1
                    out[top + i, t + 2] += total2
                    out[top + i, t + 3] += total3
                for t in range(together, masks.shape[0]):
                    mask = masks[t, left : left + width]
                    total = zero
                    for j in range(width):
                        total += row[j] & mask[j]
                    out[top + i, t] += total


def _find_special_columns(block: Any, suspected: Any, kinds: Any) -> None:
    rows, columns = block.shape
    count = suspected.shape[0]
    if block.strides[0] < block.strides[1]:
        for s in range(count):
            j = suspected[s]
            for i in range(rows):
                element = block[i, j]
                if math.isnan(element.real) or math.isnan(element.imag):
                    kinds[j] = NAN
                    break
                if math.isinf(element.real) or math.isinf(element.imag):
                    kinds[j] = INFINITE
        return
    for i in range(rows):
        if count > columns // FEW_COLUMNS:  # without branches, for vector registers
            for j in range(columns):
                element = block[i, j]
                nan = (element.real != element.real) | (element.imag != element.imag)
                infinite = (abs(element.real) == math.inf) | (abs(element.imag) == math.inf)
                kinds[j] |= np.uint8(NAN) * np.uint8(nan) | np.uint8(INFINITE) * np.uint8(infinite)
            continue
        s = 0
        while s < count:
            j = suspected[s]
            element = block[i, j]
            if math.isnan(element.real) or math.isnan(element.imag):
                kinds[j] = NAN  # which nothing further changes
                count -= 1
                suspected[s] = suspected[count]
                continue
            if math.isinf(element.real) or math.isinf(element.imag):
                kinds[j] = INFINITE
            s += 1
    for j in range(columns):
        if kinds[j] & NAN:
            kinds[j] = NAN


def _settle_special(block: Any, rows: Any, columns: Any, special: Any, strays: Any) -> None:
    width = block.shape[1]
    zero = block.dtype.type(0)
    for i in range(block.shape[0]):
        row_nan = np.uint8(rows[i] == NAN)
        wrong: Any = 0
        if rows[i] != NUMBER:
            for j in range(width):
                element = block[i, j]
                number = (element.real == element.real) & (element.imag == element.imag)
                finite = (abs(element.real) < math.inf) & (abs(element.imag) < math.inf)
                must_be_nan = row_nan | np.uint8(columns[j] == NAN)
                wrong += np.uint8(number) & (np.uint8(finite) | must_be_nan)
            for j in range(width):
                block[i, j] = 0
        elif special.shape[0] > width // FEW_COLUMNS:  # without branches, for vector registers
            for j in range(width):
                element = block[i, j]
                number = (element.real == element.real) & (element.imag == element.imag)
                finite = (abs(element.real) < math.inf) & (abs(element.imag) < math.inf)
                decided = np.uint8(number) & (np.uint8(finite) | np.uint8(columns[j] == NAN))
                wrong += np.uint8(columns[j] != NUMBER) & decided
            for j in range(width):
                block[i, j] = zero if columns[j] != NUMBER else block[i, j]
        else:
            for s in range(special.shape[0]):
                j = special[s]
                element = block[i, j]
                number = (element.real == element.real) & (element.imag == element.imag)
                finite = (abs(element.real) < math.inf) & (abs(element.imag) < math.inf)
                wrong += np.uint8(number) & (np.uint8(finite) | np.uint8(columns[j] == NAN))
                block[i, j] = 0
        strays[i] = wrong != 0


def _clear_columns(block: Any, columns: Any, special: Any) -> None:
    width = block.shape[1]
    zero = block.dtype.type(0)
    if block.strides[0] < block.strides[1]:
        for s in range(special.shape[0]):
            for i in range(block.shape[0]):
                block[i, special[s]] = zero
        return
    for i in range(block.shape[0]):
        if special.shape[0] > width // FEW_COLUMNS:  # without branches, for vector registers
            for j in range(width):
                block[i, j] = zero if columns[j] != NUMBER else block[i, j]
        else:
            for s in range(special.shape[0]):
                block[i, special[s]] = zero
