"""Products of a few items with many, in double precision: what the check of neighbours compares them with; and which of
the many are nearest by them.

BLAS is not asked. Its threads go on spinning after each product, and here many small ones are formed beside other work
of the same cores: a million items of 384 elements took 22 seconds of processor time, with this loop 4.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from numba import njit

from tilewright.kernels.cpu.loops import blocks, kept, read_only
from tilewright.kernels.neighbours.order import METRICS, MetricName
from tilewright.kernels.numbers import round_up

_DOT, _COSINE, _L2 = range(len(METRICS))
"""The metrics in the loop, in the order of `METRICS`."""

TOGETHER = 4
"""Items whose sums are formed side by side: what is loaded of the sample serves all of them."""

WIDE_NBYTES = 2**20
"""Of items in double precision, at a time: they stay in a core's cache."""


@kept
@njit(nogil=True, fastmath={"contract"})
def _form(sampled, items, sums, squares):  # type: ignore[no-untyped-def]
    """sampled: (elements, some), so that the innermost loops are of vectors. items: (many, elements), many a multiple
    of `TOGETHER`."""
    elements, some = sampled.shape
    first_sums, second_sums, third_sums, fourth_sums = np.empty((TOGETHER, some))
    for item in range(0, items.shape[0], TOGETHER):
        first_sums[:] = 0.0
        second_sums[:] = 0.0
        third_sums[:] = 0.0
        fourth_sums[:] = 0.0
        for element in range(0, elements - 1, 2):
            this, after = sampled[element], sampled[element + 1]
            a, b = items[item, element], items[item, element + 1]
            c, d = items[item + 1, element], items[item + 1, element + 1]
            e, f = items[item + 2, element], items[item + 2, element + 1]
            g, h = items[item + 3, element], items[item + 3, element + 1]
            for one in range(some):
                left, right = this[one], after[one]
                first_sums[one] += a * left + b * right
                second_sums[one] += c * left + d * right
                third_sums[one] += e * left + f * right
                fourth_sums[one] += g * left + h * right
        for element in range(elements // 2 * 2, elements):
            last = sampled[element]
            a, c, e, g = items[item : item + TOGETHER, element]
            for one in range(some):
                first_sums[one] += a * last[one]
                second_sums[one] += c * last[one]
                third_sums[one] += e * last[one]
                fourth_sums[one] += g * last[one]
        for one in range(some):
            sums[one, item] += first_sums[one]
            sums[one, item + 1] += second_sums[one]
            sums[one, item + 2] += third_sums[one]
            sums[one, item + 3] += fourth_sums[one]
    for item in range(items.shape[0]):
        for element in range(elements):
            squares[item] += items[item, element] * items[item, element]


def add_sampled_sums(sampled: np.ndarray, items: np.ndarray, sums: np.ndarray, squares: np.ndarray) -> None:
    """``sums += sampled @ items.T`` and ``squares += (items * items).sum(1)``, each summed in float64 in the order of
    the elements, by this thread alone.

    Parameters
    ----------
    sampled
        (some, elements).
    items
        (many, elements). Both of real numbers, which are converted to float64.
    sums, squares
        float64, (some, many) and (many,).

    Examples
    --------
    >>> import numpy as np
    >>> sums, squares = np.zeros((1, 2)), np.zeros(2)
    >>> add_sampled_sums(np.array([[1, 2]]), np.array([[3, 4], [5, 6]]), sums, squares)
    >>> sums.tolist(), squares.tolist()
    ([[11.0, 17.0]], [25.0, 61.0])
    """
    turned = np.ascontiguousarray(sampled.T, np.float64)
    step = _together(items)
    wide = np.empty((step, items.shape[1]))
    for part in blocks(len(items), step) if len(items) else ():
        mine = wide[: part.stop - part.start]
        mine[:] = items[part]
        _add_wide(turned, mine, sums[:, part], squares[part])


def _together(items: np.ndarray) -> int:
    """How many items are looked at at a time."""
    return round_up(max(1, WIDE_NBYTES // (8 * max(1, items.shape[1]))), TOGETHER)


def _add_wide(turned: np.ndarray, wide: np.ndarray, sums: np.ndarray, squares: np.ndarray) -> None:
    """As `add_sampled_sums`, of the sample turned, (elements, some), and items in float64."""
    many = len(wide) // TOGETHER * TOGETHER
    _form(turned, wide[:many], sums[:, :many], squares[:many])
    if many < len(wide):
        rest = np.zeros((TOGETHER, wide.shape[1]))
        rest[: len(wide) - many] = wide[many:]
        more, its_squares = np.zeros((len(sums), TOGETHER)), np.zeros(TOGETHER)
        _form(turned, rest, more, its_squares)
        sums[:, many:] += more[:, : len(wide) - many]
        squares[many:] += its_squares[: len(wide) - many]


class Allowance(NamedTuple):
    """How far a key that a search has found may be from the exact one: its sum by ``scale`` times the product of both
    items' lengths, plus ``offset``, plus ``per_size`` times the sum of the absolute values of both's elements; and the
    key by ``rounding``, relative to the largest that a cosine, or the square of a distance of such items, can be."""

    scale: float
    offset: float
    per_size: float
    rounding: float
    largest: float
    """Of products of lengths the half of which is more, nothing is known: the search could not sum them."""


@njit(nogil=True)
def _next_to_go(least, columns):  # type: ignore[no-untyped-def]
    """Where the least of some keys is, and of equal ones the last item's."""
    place = 0
    for other in range(1, len(least)):
        key, bar = least[other], least[place]
        if key < bar or (key == bar and columns[other] > columns[place]):
            place = other
    return place


@kept
@njit(nogil=True)
def _keep(  # type: ignore[no-untyped-def]
    sums, squares_a, squares_b, elements, metric, allowance, first, columns, least
):
    scale, offset, per_size, rounding, largest = allowance
    lengths_b = np.sqrt(squares_b)
    for one in range(sums.shape[0]):
        length_a, size_a = math.sqrt(squares_a[one]), math.sqrt(elements * squares_a[one])
        place = _next_to_go(least[one], columns[one])
        bar = least[one, place]
        for item in range(sums.shape[1]):
            value, length = sums[one, item], length_a * lengths_b[item]
            if not length * 2 <= largest:  # or NaN
                continue
            allowed = scale * length + offset + per_size * (size_a + math.sqrt(elements) * lengths_b[item])
            if metric == _COSINE:
                value = value / length if length != 0 else 0.0
                allowed = rounding + (allowed / length if length != 0 else 0.0)
            elif metric == _L2:
                both = squares_a[one] + squares_b[item]
                value = -max(both - 2 * value, 0.0)
                allowed = rounding * both + 2 * allowed
            if value - allowed > bar:
                least[one, place], columns[one, place] = value - allowed, first + item
                place = _next_to_go(least[one], columns[one])
                bar = least[one, place]


@functools.cache
def _numbers_of(dtype: np.dtype) -> np.ndarray:
    """The numbers, float64, of all elements of 16 bits, by their bits; of others none."""
    if dtype.itemsize != 2:
        return np.empty(0)
    with np.errstate(invalid="ignore"):  # of NaN that signal
        return np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float64)


@kept
@njit(nogil=True)
def _look(  # type: ignore[no-untyped-def]
    turned, items, numbers, squares_a, step, metric, allowance, first, columns, least
):
    """`_form` and `_keep` of ``step`` items at a time, a multiple of `TOGETHER`. numbers: of the elements' bits, which
    ``items`` then has, or nothing where it has numbers."""
    elements, some = turned.shape
    wide, sums, squares = np.empty((step, elements)), np.empty((some, step)), np.empty(step)
    for start in range(0, len(items), step):
        count = min(step, len(items) - start)
        lines = (count + TOGETHER - 1) // TOGETHER * TOGETHER
        if len(numbers):
            for item in range(count):
                for element in range(elements):
                    wide[item, element] = numbers[np.int64(items[start + item, element])]
        else:
            for item in range(count):
                for element in range(elements):
                    wide[item, element] = items[start + item, element]
        wide[count:lines] = 0.0
        sums[:] = 0.0
        squares[:] = 0.0
        _form(turned, wide[:lines], sums[:, :lines], squares[:lines])
        _keep(
            sums[:, :count],
            squares_a,
            squares[:count],
            np.float64(elements),
            metric,
            allowance,
            first + start,
            columns,
            least,
        )


def keep_nearest(
    sampled: np.ndarray,
    items: np.ndarray,
    columns: np.ndarray,
    least: np.ndarray,
    *,
    first: int,
    metric: MetricName,
    allowance: Allowance,
) -> None:
    """Have each of a few items keep those of many that are surely nearest to it, beside those that it has: by the least
    that their keys can be, the larger the nearer (the product, its cosine, or minus the square of the distance). Of
    equal ones the earlier stay. By this thread alone.

    Parameters
    ----------
    sampled, items
        (some, elements) and (many, elements), real numbers, which are converted to float64. An item with NaN, or whose
        length is infinite, is nobody's neighbour.
    columns, least
        (some, kept): numbers of items, -1 where there is none yet, and the least of their keys, minus infinity there.
        Written, in no order.
    first
        The number of the first of the items.

    Examples
    --------
    >>> import numpy as np
    >>> columns, least = np.full((1, 2), -1), np.full((1, 2), -np.inf)
    >>> exact = Allowance(0, 0, 0, 0, np.inf)
    >>> items = np.array([[1, 0], [3, 0], [2, 0]])
    >>> keep_nearest(items[:1], items, columns, least, first=10, metric="dot", allowance=exact)
    >>> sorted(columns[0].tolist())
    [11, 12]
    """
    sampled = np.ascontiguousarray(sampled, np.float64)
    turned, squares_a = np.ascontiguousarray(sampled.T), np.einsum("ij,ij->i", sampled, sampled)
    if not len(items):
        return
    dtype = items.dtype.newbyteorder("=")
    items = np.ascontiguousarray(items, dtype)
    numbers = _numbers_of(dtype)
    # One call for all of them: dozens of threads that came back for every few items would wait for the interpreter's
    # lock most of the time, and the one that tells a GPU what to do with them.
    _look(
        turned,
        read_only(items.view(np.uint16) if len(numbers) else items),
        numbers,
        squares_a,
        min(_together(items), round_up(len(items), TOGETHER)),
        METRICS.index(metric),
        tuple(map(float, allowance)),
        first,
        columns,
        least,
    )
