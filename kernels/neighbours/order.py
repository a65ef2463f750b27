"""What neighbours are: the values of pairs by metric, their dtypes, and the one order that decides.

For rows a of A and b of B, with the exact or rounded sum ``s = sum a b`` over the row's elements:

========  ========================  =======================================  ==================
metric    value                     key, of which the larger is the nearer   needs of each row
========  ========================  =======================================  ==================
dot       s                         s                                        nothing
cosine    s (|a|^-1 |b|^-1)         the value                                ``1 / |x|``, or 0
l2        sqrt(max(0, d)), with     -max(0, d)                               ``|x|^2``
          d = (|a|^2 + |b|^2) - 2 s
========  ========================  =======================================  ==================

Operations are rounded one by one, in the order of the brackets, in the dtype of `value_dtype`; none is fused with
another. All are symmetric in a and b, so that a pair has one value whichever of the two is the row.

* Of two pairs of a row, that with the larger key is the nearer, and of equal keys that with the smaller index. For l2
  that is the squared distance: roots of two different ones may be rounded to one value.
* A row of zeros has the cosine 0 with every row. It takes part like any other.
* For cosines a row of floats whose largest element is very small or very large is first divided by a power of two
  (`ranges.bring_into_range`), so that no sum leaves its dtype's range. That rounds nothing; other rows stay as they
  are.
* A pair whose value is NaN is no neighbour and no pair beyond a threshold: a row with NaN has none. Where a row has
  fewer than k neighbours, the rest of its indices are `NO_INDEX` and of its values NaN.
* Floats of at most 32 bits have sums, factors and values of float32, float64 has float64. Sums of integers are exact,
  int64: `sums_fit` says of which dtypes and widths that holds. Their dot products are int64, their squared distances
  are compared as int64 and their roots are float64, their cosines are float64.
* Factors of rows (`row_factors`) are summed in float64, element after element, and rounded once.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from tilewright.kernels.bfloat16 import BFLOAT16

MetricName: TypeAlias = Literal["dot", "cosine", "l2"]
METRICS: tuple[MetricName, ...] = get_args(MetricName)

NO_INDEX = -1
"""The index where a row has no further neighbour."""

FLOAT, DOUBLE, INTEGER = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int64)

MOST_SUM = 2**63 - 1
"""Of int64, in which integers are summed."""


class Neighbours(NamedTuple):
    """The k nearest of some rows."""

    indices: np.ndarray
    """int64 (rows, k), the nearest first."""
    values: np.ndarray
    """(rows, k), of `value_dtype`."""


class Pairs(NamedTuple):
    """Pairs beyond a threshold, in the order of their rows, then of their columns; all (pairs,)."""

    row: np.ndarray
    """int64."""
    column: np.ndarray
    """int64."""
    value: np.ndarray
    """Of `value_dtype`."""


def is_integer(dtype: np.dtype) -> bool:
    """Whether numbers are summed exactly; bool counts as 0 and 1."""
    return dtype.kind in "iub"


def sum_dtype(a: np.dtype, b: np.dtype) -> np.dtype:
    """The dtype in which products of rows of these dtypes are summed: float32, float64 or int64."""
    if is_integer(a) and is_integer(b):
        return INTEGER
    wide = {np.dtype(np.float64)}
    wide |= {
        np.dtype(f"{sign}{size}") for sign in "iu" for size in (4, 8)
    }  # beside floats: float32 lacks their bits
    return DOUBLE if {a, b} & wide else FLOAT


def value_dtype(sums: np.dtype, metric: MetricName) -> np.dtype:
    """The dtype of a pair's value: that of its sum, but float64 for the cosines and distances of integers."""
    return DOUBLE if sums == INTEGER and metric != "dot" else sums


def is_known(dtype: np.dtype) -> bool:
    """Whether rows of this dtype can be compared: bool, integers, float16, bfloat16, float32 and float64."""
    return dtype == BFLOAT16 or is_integer(dtype) or (dtype.kind == "f" and dtype.itemsize in (2, 4, 8))


def largest(dtype: np.dtype) -> int:
    """The largest absolute value of an integer dtype."""
    if dtype.kind == "b":
        return 1
    limits = np.iinfo(dtype)
    return max(-int(limits.min), int(limits.max))


def sums_fit(a: np.dtype, b: np.dtype, depth: int, metric: MetricName) -> bool:
    """Whether no exact sum of rows of ``depth`` elements leaves int64, whatever the numbers: for l2 that of
    ``|a|^2 + |b|^2 - 2 s``, at most ``depth (max |a| + max |b|)^2``."""
    first, second = largest(a), largest(b)
    if metric == "dot":
        return depth * first * second <= MOST_SUM
    if metric == "cosine":
        return depth * max(first, second) ** 2 <= MOST_SUM
    return depth * (first + second) ** 2 <= MOST_SUM


def factor_dtype(sums: np.dtype, metric: MetricName) -> np.dtype:
    """The dtype of `row_factors`: that in which values are computed; of exact squares int64."""
    return INTEGER if sums == INTEGER and metric == "l2" else value_dtype(sums, metric)


def row_factors(squares: np.ndarray, sums: np.dtype, metric: MetricName) -> np.ndarray:
    """What a metric needs of each row, from its sum of squares.

    squares: (rows,), float64, or int64 where ``sums`` is int64. Returns (rows,) of `factor_dtype`: for cosine
    ``1 / sqrt(squares)``, and 0 for a row of zeros; for l2 the squares; for dot, which needs none, nothing but zeros.
    """
    dtype = factor_dtype(sums, metric)
    if metric == "l2":
        return squares.astype(dtype)
    if metric == "dot":
        return np.zeros(len(squares), dtype)
    with np.errstate(all="ignore"):
        roots = np.sqrt(squares.astype(np.float64))
        return np.where(roots == 0, 0.0, 1.0 / roots).astype(dtype)


def values_of(sums: np.ndarray, of_a: np.ndarray, of_b: np.ndarray, metric: MetricName) -> np.ndarray:
    """The definition, in NumPy: the values of all pairs of a block, from their sums and the rows' factors.

    sums: (m, n). of_a: (m,), of_b: (n,), both as `row_factors` gives them. Returns (m, n) of `value_dtype`.
    """
    if metric == "dot":
        return sums
    with np.errstate(all="ignore"):
        if metric == "cosine":
            return sums.astype(of_a.dtype) * (of_a[:, None] * of_b[None, :])
        squared = (of_a[:, None] + of_b[None, :]) - 2 * sums
        squared = np.where(squared < 0, squared.dtype.type(0), squared)  # a NaN stays one
        return np.sqrt(squared)


def keys_of(sums: np.ndarray, of_a: np.ndarray, of_b: np.ndarray, metric: MetricName) -> np.ndarray:
    """The definition, in NumPy: what decides between the pairs of a row, the larger the nearer; as `values_of`."""
    if metric != "l2":
        return values_of(sums, of_a, of_b, metric)
    with np.errstate(all="ignore"):
        squared = (of_a[:, None] + of_b[None, :]) - 2 * sums
        return -np.where(squared < 0, squared.dtype.type(0), squared)


def values_of_keys(keys: np.ndarray, sums: np.dtype, metric: MetricName) -> np.ndarray:
    """The values of pairs by their keys; of `value_dtype`."""
    if metric != "l2":
        return keys
    with np.errstate(invalid="ignore"):
        # Of a key of 0 the value is 0, not -0.
        roots = np.sqrt(np.abs(keys).astype(value_dtype(sums, metric)))
    return np.where(np.isnan(keys), keys, roots) if keys.dtype.kind == "f" else roots


class Bound(NamedTuple):
    """Which pairs are wanted, by their keys: those that are not below ``key``, or where ``farther`` those not above."""

    key: int | float
    farther: bool

    def admits(self, keys: np.ndarray) -> np.ndarray:
        """NaN is on neither side."""
        with np.errstate(invalid="ignore"):
            return keys <= self.key if self.farther else keys >= self.key


def key_bound(threshold: float, above: bool, sums: np.dtype, metric: MetricName) -> Bound | None:
    """The pairs whose value is at least the threshold (``above``), or at most; None where no value is.

    The bound is a number of the keys' dtype, found by halving its range: so comparing keys gives just the pairs whose
    values, as they are stored, are on that side of the threshold.
    """
    farther = above == (metric == "l2")
    dtype = sums if metric == "l2" else value_dtype(sums, metric)

    def admitted(place: int) -> bool:
        key = np.array([_number_at(place, dtype)], dtype)
        value = values_of_keys(key, sums, metric)[0].item()  # compared exactly, whatever the types
        return value >= threshold if above else value <= threshold

    low, high = _ends(dtype, metric)
    near, far = (high, low) if not farther else (low, high)
    # Of admitted keys ``near`` is the surest: all between it and the bound are admitted.
    if not admitted(near):
        return None
    if admitted(far):
        return Bound(_number_at(far, dtype), farther)
    while abs(near - far) > 1:
        middle = (near + far) // 2
        if admitted(middle):
            near = middle
        else:
            far = middle
    return Bound(_number_at(near, dtype), farther)


def _ends(dtype: np.dtype, metric: MetricName) -> tuple[int, int]:
    """The places of the least and the largest key."""
    if dtype.kind == "i":
        return (-MOST_SUM, 0) if metric == "l2" else (-MOST_SUM - 1, MOST_SUM)
    infinity = int(np.array(np.inf, dtype).view(f"i{dtype.itemsize}"))
    return -infinity, 0 if metric == "l2" else infinity


def _number_at(place: int, dtype: np.dtype) -> int | float:
    """The number at a place in the order of a dtype's numbers: an integer's is itself, that of a float of no sign its
    bits."""
    if dtype.kind == "i":
        return place
    size = float(np.array(abs(place), f"i{dtype.itemsize}").view(dtype))
    return size if place >= 0 else -size
