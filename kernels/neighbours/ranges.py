"""Items whose lengths leave the range in which cosines are formed, brought back by powers of two.

A cosine does not depend on how long its items are, but the sum of products and the reciprocals of lengths that it is
made of do: of two items of float32 that are shorter than about 1e-19, or longer than 1e19, they underflow or overflow.
A power of two rounds nothing, so that such items have the cosines that others in the same direction have. Items in
range stay as they are.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.cpu.loops import blocks
from tilewright.kernels.neighbours.nan_items import BLOCK_NBYTES
from tilewright.kernels.neighbours.order import DOUBLE, FLOAT

MOST_EXPONENT = {FLOAT: 40, DOUBLE: 400}
"""By the dtype of the sums: an item is in range if its largest element is from 2^-(n + 1) up to 2^n. Then products of
two lengths, of up to 2^30 elements, and the sums of their squares in float64, are far from both ends of the dtype's
range, and what products lose by underflow is less than their rounding."""


def largest_of(items: np.ndarray, threads: int = 1) -> np.ndarray:
    """The largest absolute value of each item: (items,), float32 or float64. NaN where there is one.

    items: (items, elements), bfloat16, float32 or float64, of any layout.
    """
    dtype = items.dtype.newbyteorder("=")
    word = np.dtype(f"u{dtype.itemsize}")
    found = np.zeros(len(items), word)

    def look(rows: slice) -> None:
        # Without the sign, floats are in the order of their bits, and NaN comes last.
        bits = np.asarray(items[rows], dtype).view(word) & word.type(np.iinfo(word).max >> 1)
        bits.max(1, out=found[rows])

    if items.size:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(look, blocks(len(items), _together(items))):
                pass
    if dtype == BFLOAT16:
        return (found.astype(np.uint32) << 16).view(np.float32)
    return found.view(dtype)


def may_leave(items: np.dtype, sums: np.dtype) -> bool:
    """Whether an item of this dtype may be out of range: integers and float16 are not."""
    return sums in MOST_EXPONENT and (items == BFLOAT16 or (items.kind == "f" and items.itemsize >= 4))


def exponents_of(largest: np.ndarray, sums: np.dtype) -> np.ndarray:
    """The power of two by which each item is divided: (items,), int32. 0 for those in range, and where there is nothing
    to divide: zeros, NaN and infinity.

    largest: as `largest_of` gives it. sums: of items.
    """
    _, exponents = np.frexp(largest)
    within = np.abs(exponents) <= MOST_EXPONENT[sums]
    exponents[within | ~np.isfinite(largest)] = 0
    return exponents


def bring_into_range(items: np.ndarray, sums: np.dtype, threads: int = 1) -> None:
    """Divide those of some items, (items, elements), that are out of range; they are written.

    sums: the dtype in which their products are summed, as `order.sum_dtype` says.

    >>> items = np.array([[3e-30, 4e-30], [3.0, 4.0]], np.float32)
    >>> bring_into_range(items, np.dtype(np.float32))
    >>> items.round(3)
    array([[0.475, 0.634],
           [3.   , 4.   ]], dtype=float32)
    """
    if not may_leave(items.dtype.newbyteorder("="), sums):
        return
    exponents = exponents_of(largest_of(items, threads), sums)
    found = np.flatnonzero(exponents)
    for part in blocks(len(found), _together(items)) if len(found) else ():
        some = found[part]
        items[some] = _divided(items[some], exponents[some, np.newaxis])


def _together(items: np.ndarray) -> int:
    """Items that are looked at at a time."""
    return max(1, BLOCK_NBYTES // (max(1, items.shape[1]) * items.dtype.itemsize))


def _divided(items: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    wide = items.astype(np.float32) if items.dtype == BFLOAT16 else items
    return np.ldexp(wide, -exponents).astype(items.dtype, copy=False)


class Ranges:
    """The same of items that come in parts of their elements, whose products are added up meanwhile.

    count: of items. sums: as for `bring_into_range`.
    """

    def __init__(self, count: int, sums: np.dtype) -> None:
        self._sums = sums
        self._largest, self._exponents = np.zeros(count), np.zeros(count, np.int32)

    def take(self, part: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The next elements of all items, (items, some), divided where these are out of range; and the powers of two by
        which what came of the elements before is to be multiplied, (items,), int32; None where it stays."""
        if not may_leave(part.dtype.newbyteorder("="), self._sums):
            return part, None
        before = self._exponents
        self._largest = np.maximum(self._largest, largest_of(part))
        self._exponents = exponents_of(self._largest, self._sums)
        if self._exponents.any():
            part = _divided(part, self._exponents[:, np.newaxis])
        change = before - self._exponents
        return part, change if change.any() else None


def multiply_by_powers(numbers: np.ndarray, exponents: np.ndarray) -> None:
    """``numbers *= 2.0**exponents``, without an overflow on the way. exponents: int32, of a shape that broadcasts."""
    with np.errstate(over="ignore"):  # of items with NaN or infinity, which are nobody's neighbours
        numbers[:] = np.ldexp(numbers, exponents)
