"""Products of a few items with many, in double precision: what the check of neighbours compares them with; and which of
the many are nearest by them.

BLAS is not asked. Its threads go on spinning after each product, and here many small ones are formed beside other work
of the same cores: a million items of 384 elements took 22 seconds of processor time. The products are those of
`tilewright.kernels.cpu.ordered_floats`, formed by the thread that asks.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from numba import njit

from tilewright.kernels.cpu.loops import blocks, kept, read_only
from tilewright.kernels.cpu.ordered_floats import add_product, packed, tiling
from tilewright.kernels.neighbours.order import METRICS, MetricName
from tilewright.kernels.numbers import ceil_div, round_up

_DOT, _COSINE, _L2 = range(len(METRICS))
"""The metrics in the loop, in the order of `METRICS`."""

WIDE_NBYTES = 2**20
"""Of items in double precision, at a time: they stay in a core's cache."""


@kept
@njit(nogil=True)
def _pack_items(items, numbers, panels, squares):  # type: ignore[no-untyped-def]
    """Write items, (many, elements), as `add_product` takes a left operand, lines behind the last zero, and the sums of
    their squares. numbers: of the elements' bits, which ``items`` then has, or nothing where it has numbers."""
    width = panels.shape[2]
    for panel in range(panels.shape[0]):
        count = min(width, len(items) - panel * width)
        mine = squares[panel * width : panel * width + count]
        mine[:] = 0.0
        if count < width:
            panels[panel] = 0.0
        for element in range(panels.shape[1]):
            line = panels[panel, element]
            for i in range(count):
                if len(numbers):
                    line[i] = numbers[np.int64(items[panel * width + i, element])]
                else:
                    line[i] = items[panel * width + i, element]
            for i in range(count):
                mine[i] += line[i] * line[i]


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
    sample, rows, step = _right(np.asarray(sampled, np.float64)), tiling().rows, _together(items)
    left = np.empty((ceil_div(min(step, len(items)), rows), items.shape[1], rows))
    for part in blocks(len(items), step) if len(items) else ():
        mine = np.ascontiguousarray(items[part], np.float64)
        panels, lengths = left[: ceil_div(len(mine), rows)], np.empty(len(mine))
        products = np.zeros((len(panels) * rows, len(sample) * sample.shape[2]))
        _pack_items(mine, np.empty(0), panels, lengths)
        add_product(panels, sample, products)
        sums[:, part] += products[: len(mine), : len(sums)].T
        squares[part] += lengths


def _right(sampled: np.ndarray) -> np.ndarray:
    """The sample, (some, elements) of float64, as `add_product` takes a right operand."""
    return packed(sampled, tiling().columns(sampled.dtype))


def _together(items: np.ndarray) -> int:
    """How many items are looked at at a time."""
    return round_up(max(1, WIDE_NBYTES // (8 * max(1, items.shape[1]))), tiling().rows)


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
    some, to_size = squares_a.shape[0], math.sqrt(elements)
    lengths_a, places, bars = np.sqrt(squares_a), np.empty(some, np.int64), np.empty(some)
    for one in range(some):
        places[one] = _next_to_go(least[one], columns[one])
        bars[one] = least[one, places[one]]
    for item in range(len(squares_b)):
        length_b = math.sqrt(squares_b[item])
        for one in range(some):
            value, length = sums[item, one], lengths_a[one] * length_b
            if not length * 2 <= largest:  # or NaN
                continue
            allowed = scale * length + offset + per_size * to_size * (lengths_a[one] + length_b)
            if metric == _COSINE:
                value = value / length if length != 0 else 0.0
                allowed = rounding + (allowed / length if length != 0 else 0.0)
            elif metric == _L2:
                both = squares_a[one] + squares_b[item]
                value = -max(both - 2 * value, 0.0)
                allowed = rounding * both + 2 * allowed
            if value - allowed > bars[one]:
                least[one, places[one]], columns[one, places[one]] = value - allowed, first + item
                places[one] = _next_to_go(least[one], columns[one])
                bars[one] = least[one, places[one]]


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
    sample, items, numbers, squares_a, left, metric, allowance, first, columns, least
):
    """`_pack_items`, `add_product` and `_keep` of as many items at a time as ``left`` takes. sample: a right operand.
    numbers: as of `_pack_items`."""
    panels, elements, rows = left.shape
    step = panels * rows
    sums, squares = np.empty((step, sample.shape[0] * sample.shape[2])), np.empty(step)
    for start in range(0, len(items), step):
        count = min(step, len(items) - start)
        some = left[: (count + rows - 1) // rows]
        _pack_items(items[start : start + count], numbers, some, squares)
        sums[:] = 0.0
        add_product(some, sample, sums)
        _keep(
            sums,
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
    squares_a, rows = np.einsum("ij,ij->i", sampled, sampled), tiling().rows
    if not len(items):
        return
    dtype = items.dtype.newbyteorder("=")
    items = np.ascontiguousarray(items, dtype)
    numbers = _numbers_of(dtype)
    # One call for all of them: dozens of threads that came back for every few items would wait for the interpreter's
    # lock most of the time, and the one that tells a GPU what to do with them.
    _look(
        _right(sampled),
        read_only(items.view(np.uint16) if len(numbers) else items),
        numbers,
        squares_a,
        np.empty((ceil_div(min(_together(items), len(items)), rows), items.shape[1], rows)),
        METRICS.index(metric),
        tuple(map(float, allowance)),
        first,
        columns,
        least,
    )
