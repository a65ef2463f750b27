"""Means and centred second moments of many lines at once, merged from parts.

Parts of a sum are merged as Chan, Golub and LeVeque (1983) do, by the difference of their means, so that no digits are
lost where the mean is large beside the deviations. That difference needs more digits of means than double precision
has: what rounding takes of each is kept beside it. Sums of integers are exact.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from tilewright.kernels.cpu.loops import blocks, by_memory, compiled
from tilewright.kernels.deferred import numba

CELL = (256, 512)
"""Rows and columns of what is looked at at a time: in double precision it stays in a core's cache."""

NARROW_NBYTES = 2
"""Integers up to this size are squared and summed as integers, exactly and without a widened copy."""
NARROW_LENGTH = 2**15
"""The longest piece of a line of theirs: its length times its sum of squares is an int64."""

HALF_BITS = 32
"""Sums of 64-bit integers are kept in two, of their upper and lower halves."""


@dataclass(frozen=True)
class Moments:
    """What is known of each of some lines (columns, or rows) from those of their elements that were looked at.

    All are vectors with one number a line. A line's elements count that are present and whose weight is not 0.
    """

    count: np.ndarray
    """Elements, int64."""
    weight: np.ndarray
    """The sum of their weights, float64: the count, where there are none."""
    mean: np.ndarray
    """Weighted; float64 or complex128. Of no elements 0."""
    second: np.ndarray
    """The weighted sum of the squared distances from the mean, float64."""
    least: np.ndarray
    """The smallest element, of the matrix's dtype; of complex numbers that of each part. Of no elements the largest
    number there is."""
    most: np.ndarray
    negative: np.ndarray
    """The largest element below 0, of complex numbers that of each part. Where there is none, the smallest number there
    is. A line whose ``least`` it is too has no other number below 0."""
    high: np.ndarray
    """Of integers without weights, the exact sum is ``high * 2**32 + low``; int64."""
    low: np.ndarray
    rest: np.ndarray
    """What the mean is more than ``mean`` says, of the same dtype."""

    @classmethod
    def of_nothing(cls, lines: int, dtype: np.dtype) -> Moments:
        """Those of so many lines of a matrix of this dtype, before anything was looked at."""
        least, most = _ends(dtype)
        return cls(
            np.zeros(lines, np.int64),
            np.zeros(lines),
            np.zeros(lines, np.complex128 if dtype.kind == "c" else np.float64),
            np.zeros(lines),
            np.full(lines, most, dtype),
            np.full(lines, least, dtype),
            np.full(lines, least, dtype),
            np.zeros(lines, np.int64),
            np.zeros(lines, np.int64),
            np.zeros(lines, np.complex128 if dtype.kind == "c" else np.float64),
        )

    def part(self, lines: slice) -> Moments:
        """Views of some lines."""
        return Moments(*(getattr(self, field.name)[lines] for field in fields(self)))

    def add(self, more: Moments) -> None:
        """Take in what is known of the same lines from other elements; writes into these vectors."""
        total = self.weight + more.weight
        share = np.divide(more.weight, total, out=np.zeros_like(total), where=total > 0)
        with np.errstate(invalid="ignore", over="ignore"):  # infinities of the matrix, or far numbers
            apart, beside = _sum_and_rest(more.mean, -self.mean)
            beside, both = beside + (more.rest - self.rest), self.weight * share
            self.second[:] += more.second
            squares = _squared(apart + beside)
            self.second[:] += np.multiply(squares, both, out=np.zeros_like(both), where=both > 0)
            mean, lost = _sum_and_rest(self.mean, apart * share)
            self.mean[:], self.rest[:] = _sum_and_rest(mean, self.rest + lost + beside * share)
        self.weight[:] = total
        self.count[:] += more.count
        self.high[:] += more.high
        self.low[:] += more.low
        _take(self.least, more.least, np.minimum)
        _take(self.most, more.most, np.maximum)
        _take(self.negative, more.negative, np.maximum)

    @property
    def exact_sums(self) -> list[int]:
        """Of integers without weights."""
        return [
            (high << HALF_BITS) + low for high, low in zip(self.high.tolist(), self.low.tolist(), strict=True)
        ]

    @property
    def largest(self) -> int | float:
        """The largest absolute value of all lines, of integers or floats; 0 of no elements."""
        there = self.count > 0
        if not there.any():
            return 0
        return max(abs(self.least[there].min().item()), abs(self.most[there].max().item()))

    @property
    def spread(self) -> np.ndarray:
        """How far the smallest and the largest element of each line are apart as double precision has them, float64; of
        complex numbers the smallest and largest parts. Of no elements 0."""
        wide = np.complex128 if self.least.dtype.kind == "c" else np.float64
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(self.most.astype(wide) - self.least.astype(wide))
        return np.where(self.count > 0, apart, 0.0)

    @property
    def constant(self) -> np.ndarray:
        """Whether a line has no two different elements, or no variance that double precision can hold."""
        alike = (self.least == self.most) & ~np.isnan(self.second)
        return (self.count > 0) & (alike | (self.second == 0))


def moments_of(
    block: np.ndarray,
    axis: int,
    missing: int | float | Literal["nan"] | None = None,
    weights: np.ndarray | None = None,
) -> Moments:
    """Those of a block's lines, along which ``axis`` runs: 0 for its columns.

    block: numbers of any dtype. missing: the number that stands for a missing element; ``nan`` for NaN, in either part
    of a complex number. weights: one for each element of a line.

    >>> moments_of(np.array([[1, 5], [3, 5]], "i1"), axis=0).mean.tolist()
    [2.0, 5.0]
    """
    found = Moments.of_nothing(block.shape[1 - axis], block.dtype)
    if block.dtype.kind in "iu" and block.dtype.itemsize <= NARROW_NBYTES and weights is None:
        for along in blocks(block.shape[axis], NARROW_LENGTH) if block.size else ():
            found.add(_of_narrow(block[along] if axis == 0 else block[:, along], axis, missing))
        return found
    for cell in _cells(block.shape):
        of_lines, along = cell[1 - axis], cell[axis]
        held = block[cell] if axis == 0 else block[cell].T
        found.part(of_lines).add(_of_cell(held, missing, weights[along] if weights is not None else None))
    return found


def _cells(shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    if 0 in shape:
        return
    rows, columns = (list(blocks(side, most)) for side, most in zip(shape, CELL, strict=True))
    yield from ((down, across) for down in rows for across in columns)


def _of_cell(cell: np.ndarray, missing: Any, weights: np.ndarray | None) -> Moments:
    """Of the columns of a few elements."""
    if missing is None:
        there = np.ones(cell.shape, bool)
    else:
        there = np.ascontiguousarray(cell == cell if missing == "nan" else cell != missing)
    heights = np.ones(cell.shape[0]) if weights is None else weights
    if not heights.all():
        there &= (heights != 0)[:, np.newaxis]
    if cell.dtype.kind != "c":
        found = _of_reals(cell, there, heights)
    else:
        real, imaginary = (_of_reals(part, there, heights) for part in (cell.real, cell.imag))
        found = replace(
            real,
            mean=_of_parts(real.mean, imaginary.mean),
            rest=_of_parts(real.rest, imaginary.rest),
            second=real.second + imaginary.second,
            least=_of_parts(real.least, imaginary.least),
            most=_of_parts(real.most, imaginary.most),
            negative=_of_parts(real.negative, imaginary.negative),
        )
    if cell.dtype.kind in "iu" and weights is None:
        found.high[:], found.low[:] = _exact_sums(cell, there)
    if cell.dtype.kind in "iu" and cell.dtype.itemsize == 8:  # which double precision does not tell apart
        lowest, highest = _ends(cell.dtype)
        return replace(
            found,
            least=np.where(there, cell, highest).min(0),
            most=np.where(there, cell, lowest).max(0),
            negative=np.where(there & (cell < 0), cell, lowest).max(0),
        )
    return found


def _of_narrow(block: np.ndarray, axis: int, missing: Any) -> Moments:
    """Of the lines of narrow integers, by exact sums."""
    found = Moments.of_nothing(block.shape[1 - axis], block.dtype)
    squares = np.zeros_like(found.low)
    held = by_memory(block)
    along_rows = axis == (1 if held is block else 0)
    never = 1 << 40
    whole = missing not in (None, "nan") and math.isfinite(missing) and missing == int(missing)
    gone = int(missing) if whole and abs(missing) < never else never
    with _loop_lock:
        loop = _compiled_narrow_loop(_along_rows if along_rows else _down_columns, block.dtype)
    ends = found.least, found.most, found.negative
    loop(np.ascontiguousarray(held), gone, found.count, found.low, squares, *ends)
    found.weight[:] = found.count
    some = found.count > 0
    np.divide(found.low, found.count, out=found.mean, where=some)
    np.divide(found.count * squares - found.low**2, found.count, out=found.second, where=some)
    return found


@functools.cache
def _compiled_narrow_loop(function: Any, dtype: np.dtype) -> Any:
    types, element = numba.types, numba.from_dtype(dtype)
    ends, sums = types.Array(element, 1, "C"), types.Array(types.int64, 1, "C")
    return compiled(function, types.Array(element, 2, "C"), types.int64, sums, sums, sums, ends, ends, ends)


def _along_rows(
    block: Any, gone: Any, count: Any, sums: Any, squares: Any, least: Any, most: Any, negative: Any
) -> None:
    """Fill the six vectors, which come as of no elements, of lines that are the block's rows."""
    for i in range(block.shape[0]):
        number: Any = 0
        total: Any = 0
        square: Any = 0
        low, high, below = least[i], most[i], negative[i]
        none = below  # not `below` itself, of which the compiler makes no vectors
        for j in range(block.shape[1]):
            element = block[i, j]
            value: Any = np.int64(element)
            there = value != gone
            value = value if there else 0
            number += there
            total += value
            square += value * value
            low = min(low, element if there else low)
            high = max(high, element if there else high)
            below = max(below, element if value < 0 else none)
        count[i], sums[i], squares[i] = number, total, square
        least[i], most[i], negative[i] = low, high, below


def _down_columns(
    block: Any, gone: Any, count: Any, sums: Any, squares: Any, least: Any, most: Any, negative: Any
) -> None:
    """The same of lines that are the block's columns."""
    for i in range(block.shape[0]):
        for j in range(block.shape[1]):
            element = block[i, j]
            value: Any = np.int64(element)
            there = value != gone
            value = value if there else 0
            count[j] += there
            sums[j] += value
            squares[j] += value * value
            least[j] = min(least[j], element if there else least[j])
            most[j] = max(most[j], element if there else most[j])
            negative[j] = max(negative[j], element if value < 0 else negative[j])


def _of_parts(real: np.ndarray, imaginary: np.ndarray) -> np.ndarray:
    """Complex numbers; adding an infinite imaginary part would make the real one NaN."""
    result = np.empty(real.shape, np.complex128)
    result.real, result.imag = real, imaginary
    return result


def _of_reals(cell: np.ndarray, there: np.ndarray, weights: np.ndarray) -> Moments:
    found = Moments.of_nothing(cell.shape[1], np.dtype(np.float64))
    with _loop_lock:
        loop = _compiled_loop()
    wide = np.ascontiguousarray(cell, np.float64)
    ends = found.least, found.most, found.negative
    vectors = found.count, found.weight, found.mean, found.rest, found.second, *ends
    loop(wide, there, np.ascontiguousarray(weights), *vectors)
    if cell.dtype.kind in "iu" and cell.dtype.itemsize < 8:
        info = np.iinfo(cell.dtype)
        least, most, negative = (
            np.where(np.isfinite(end), end, none).astype(cell.dtype)
            for end, none in zip(ends, (info.max, info.min, info.min), strict=True)
        )
        return replace(found, least=least, most=most, negative=negative)
    return found


_loop_lock = threading.Lock()
"""Without it, threads that start together would each compile, or load, a loop of their own."""


@functools.cache
def _compiled_loop() -> Any:
    matrix = numba.types.Array(numba.types.float64, 2, "C")
    vector = numba.types.Array(numba.types.float64, 1, "C")
    counts = numba.types.Array(numba.types.int64, 1, "C")
    mask = numba.types.Array(numba.types.boolean, 2, "C")
    return compiled(_columns, matrix, mask, vector, counts, *[vector] * 7)


def _columns(
    cell: Any,
    there: Any,
    weights: Any,
    count: Any,
    weight: Any,
    mean: Any,
    rest: Any,
    second: Any,
    least: Any,
    most: Any,
    negative: Any,
) -> Any:
    """Fill the eight vectors, which come as of no elements; the means are found first, and corrected by what they leave
    of the sum of the distances."""
    rows, columns = cell.shape
    for i in range(rows):
        w = weights[i]
        for j in range(columns):
            if there[i, j]:
                value = cell[i, j]
                count[j] += 1
                weight[j] += w
                mean[j] += w * value
                least[j] = min(least[j], value)
                most[j] = max(most[j], value)
                if value < 0:
                    negative[j] = max(negative[j], value)
    for j in range(columns):
        if weight[j] > 0:
            mean[j] /= weight[j]
    left = np.zeros(columns)
    for i in range(rows):
        w = weights[i]
        for j in range(columns):
            if there[i, j]:
                apart = cell[i, j] - mean[j]
                left[j] += w * apart
                second[j] += w * apart * apart
    for j in range(columns):
        if weight[j] > 0:
            left[j] /= weight[j]
            whole = mean[j] + left[j]
            if second[j] < np.inf:
                rest[j] = left[j] - (whole - mean[j])
            mean[j] = whole
            if second[j] < np.inf:
                second[j] -= left[j] * left[j] * weight[j]
            if second[j] < 0:
                second[j] = 0.0


def _exact_sums(cell: np.ndarray, there: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the columns of integers in two parts, as in `Moments`."""
    held = cell if there.all() else np.where(there, cell, cell.dtype.type(0))
    if cell.dtype.itemsize < 8:
        return np.zeros(cell.shape[1], np.int64), held.sum(0, dtype=np.int64)
    high = (held >> HALF_BITS).sum(0, dtype=np.int64)
    return high, (held & held.dtype.type(2**HALF_BITS - 1)).sum(0, dtype=np.int64)


def _sum_and_rest(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``one + other`` rounded, and what rounding took (Knuth's TwoSum); 0 where that is not finite."""
    whole = one + other
    share = whole - one
    rest = (one - (whole - share)) + (other - share)
    return whole, np.where(np.isfinite(rest), rest, 0)


def _squared(values: np.ndarray) -> np.ndarray:
    """Squares, of complex numbers those of their absolute values."""
    if values.dtype.kind == "c":
        result: np.ndarray = values.real**2 + values.imag**2
        return result
    return values * values


def _take(own: np.ndarray, more: np.ndarray, function: np.ufunc) -> None:
    """The smaller, or larger, of each two numbers, written into the first vector."""
    if own.dtype.kind == "c":
        _take(own.real, more.real, function)
        _take(own.imag, more.imag, function)
        return
    function(own, more, out=own)


def _ends(dtype: np.dtype) -> tuple[Any, Any]:
    """The least and the largest number of a dtype; of complex ones, as both parts."""
    if dtype.kind == "c":
        return complex(-np.inf, -np.inf), complex(np.inf, np.inf)
    if dtype.kind == "f":
        return -np.inf, np.inf
    info = np.iinfo(dtype)
    return info.min, info.max
