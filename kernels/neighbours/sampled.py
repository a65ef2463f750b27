"""Products of a few items with many, in double precision: what the check of neighbours compares them with.

BLAS is not asked. Its threads go on spinning after each product, and here many small ones are formed beside other work
of the same cores: a million items of 384 elements took 22 seconds of processor time, with this loop 4.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.numbers import round_up

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
    step = round_up(max(1, WIDE_NBYTES // (8 * max(1, items.shape[1]))), TOGETHER)
    for start in range(0, len(items), step):
        wide = np.ascontiguousarray(items[start : start + step], np.float64)
        many, stop = len(wide) // TOGETHER * TOGETHER, start + len(wide)
        _form(turned, wide[:many], sums[:, start : start + many], squares[start : start + many])
        if many < len(wide):
            rest = np.zeros((TOGETHER, wide.shape[1]))
            rest[: len(wide) - many] = wide[many:]
            more, its_squares = np.zeros((len(sums), TOGETHER)), np.zeros(TOGETHER)
            _form(turned, rest, more, its_squares)
            sums[:, start + many : stop] += more[:, : len(wide) - many]
            squares[start + many : stop] += its_squares[: len(wide) - many]
