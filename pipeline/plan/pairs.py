"""What is made of several sums over one pair of panels, where each element of C is formed of the pairs of numbers that
are both there.

Beside X̃ᵀỸ, in which a missing number counts as 0, a tile then sums products of other *forms* of the same panels: of
whether a number is there, and of squares. Means and deviations over just those elements that a pair of variables has in
common follow from these sums, as pandas' ``DataFrame.cov`` and ``corr`` have them. The numbers should have been shifted
by about their means first, and scaled to about 1 where they are squared: neither changes the result, and then little
cancels. The function here is the definition, which the kernel of a device is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

Form: TypeAlias = Literal["values", "squares", "presence"]
"""What of a panel is multiplied: its numbers, their squares, or 1 where a number is there; 0 where none is."""
Forms: TypeAlias = tuple[Form, Form]
"""Of a panel of A, and of one of B."""

PRODUCT: Forms = ("values", "values")
COUNT: Forms = ("presence", "presence")
LEFT: Forms = ("values", "presence")
RIGHT: Forms = ("presence", "values")
LEFT_SQUARES: Forms = ("squares", "presence")
RIGHT_SQUARES: Forms = ("presence", "squares")
"""What is summed: the products, the number of pairs; the numbers of the left variable whose partner is there, those of
the right one; and their squares."""

ONLY_PRODUCT: tuple[Forms, ...] = (PRODUCT,)

COUNT_DTYPE = np.dtype(np.int64)
"""Of numbers of pairs where they are stored."""

CONSTANT_MARGIN = 4.0
"""A variable's squared deviations from its mean over n pairs count as 0 up to this many, and √n more, units of the last
place of the sum of its squares: sums of rounded numbers are no more precise."""


@dataclass(frozen=True)
class Pairwise:
    """What an element of C becomes of sums over the n pairs of numbers x, y that are both there:

    the sum of x y, by n - ``ddof``; ``centered`` that of the products of what x and y deviate from their means over
    these pairs; and ``scaled``, which includes ``centered``, that by the square root of both sums of squared
    deviations, from -1 to 1. It is NaN where the divisor is not above 0: without pairs, and ``scaled`` where x or y is
    constant over the pairs.
    """

    centered: bool = False
    scaled: bool = False
    ddof: int = 0
    constant_is_zero: bool = False
    """Whether a correlation with what is constant over its pairs is 0, not NaN."""
    own: bool = False
    """Whether C's rows and columns are the same variables: then what varies correlates with itself by 1 exactly."""
    without: tuple[int, int] = field(default=(0, 0), repr=False, compare=False)
    """How many rows and columns of C are of variables without any number, as somebody has told; for messages alone."""

    @property
    def forms(self) -> tuple[Forms, ...]:
        """What is summed. In this order one panel at a time has to be kept of each operand, in one form, and few are
        formed twice."""
        if self.scaled:
            return PRODUCT, LEFT, LEFT_SQUARES, COUNT, RIGHT, RIGHT_SQUARES
        if self.centered:
            return PRODUCT, LEFT, COUNT, RIGHT
        return PRODUCT, COUNT

    def digest(self) -> str:
        """Equal for those that do the same."""
        return repr(self)


def unit_of(sums: np.dtype) -> float:
    """The last place of 1 in this dtype."""
    return float(np.finfo(sums).eps)


def combined(
    pairwise: Pairwise, sums: Mapping[Forms, np.ndarray], rows: slice, columns: slice, dtype: np.dtype
) -> np.ndarray:
    """Sums of a block of C as they are stored: a new array of this dtype, formed in float64, each operation rounded.

    sums: those at these rows and columns of C, of float32 or float64.

    >>> values = {PRODUCT: np.array([[14.0, 3.0]]), COUNT: np.array([[3.0, 0.0]])}
    >>> combined(Pairwise(ddof=1), values, slice(0, 1), slice(0, 2), np.dtype("f8")).tolist()
    [[7.0, nan]]
    """
    with np.errstate(all="ignore"):
        wide = {forms: block.astype(np.float64) for forms, block in sums.items()}
        product, n = wide[PRODUCT], wide[COUNT]
        if not pairwise.centered and not pairwise.scaled:
            result = _divided(product, n - pairwise.ddof)
        else:
            left, right = wide[LEFT], wide[RIGHT]
            result = n * product - left * right  # n times the sum of the products of deviations
            if pairwise.scaled:
                unit = unit_of(next(iter(sums.values())).dtype)
                result = _correlation(pairwise, result, wide, unit, rows, columns)
            else:
                result = _divided(result, n * (n - pairwise.ddof))
        return result.astype(dtype)


def _divided(sums: np.ndarray, divisor: np.ndarray) -> np.ndarray:
    return np.where(divisor > 0, sums / divisor, np.nan)


def _correlation(
    pairwise: Pairwise,
    products: np.ndarray,
    sums: Mapping[Forms, np.ndarray],
    unit: float,
    rows: slice,
    columns: slice,
) -> np.ndarray:
    n = sums[COUNT]
    margin = unit * (CONSTANT_MARGIN + np.sqrt(n))
    deviations: list[Any] = []
    constant = np.zeros(n.shape, bool)
    for squares, whole in ((sums[LEFT_SQUARES], sums[LEFT]), (sums[RIGHT_SQUARES], sums[RIGHT])):
        of_squares = n * squares
        spread = of_squares - whole * whole
        constant |= spread <= margin * of_squares
        deviations.append(np.sqrt(spread))
    result = products / (deviations[0] * deviations[1])
    result = np.where(result > 1, 1.0, np.where(result < -1, -1.0, result))
    if pairwise.own:
        height, width = n.shape
        top, left = rows.start or 0, columns.start or 0
        places = np.arange(max(top, left), min(top + height, left + width))
        here = places - top, places - left
        result[here] = np.where(np.isnan(result[here]), np.nan, 1.0)
    nothing = np.where(n > 0, 0.0, np.nan) if pairwise.constant_is_zero else np.nan
    return np.where(constant, nothing, result)
