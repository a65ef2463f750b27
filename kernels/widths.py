"""How wide sums of products of integers have to be: arithmetic on dtypes, lengths and ranges alone, which looks at no
data."""

from __future__ import annotations

import numpy as np

SUM_DTYPES = tuple(np.dtype(code) for code in ("i4", "u4", "i8", "u8"))
"""The types of sums of stored integers, smallest first."""


def is_integer(*dtypes: np.dtype) -> bool:
    """Whether all of them are integer types."""
    return all(dtype.kind in "iu" for dtype in dtypes)


def largest_value(dtype: np.dtype) -> int:
    """The largest absolute value of an integer type: 128 of int8, 255 of uint8."""
    limits = np.iinfo(dtype)
    return max(-int(limits.min), int(limits.max))


def largest_sum(k: int, most_a: int, most_b: int) -> int:
    """No sum of k products of integers a and b, with |a| <= most_a and |b| <= most_b, is larger in absolute value.

    >>> largest_sum(4000, 128, 128)
    65536000
    """
    return k * most_a * most_b


def largest_sum_of(a: np.dtype, b: np.dtype, k: int) -> int:
    """The same for any values that two integer types hold."""
    return largest_sum(k, largest_value(a), largest_value(b))


def can_wrap(dtype: np.dtype, largest: int) -> bool:
    """Whether sums of up to ``largest`` in absolute value may wrap in ``dtype``; never where it is no integer type.

    For an unsigned type they are taken to be sums of unsigned integers: no others are cast to it.

    >>> can_wrap(np.dtype("int8"), 128), can_wrap(np.dtype("uint8"), 128), can_wrap(np.dtype("float32"), 128)
    (True, False, False)
    """
    return is_integer(dtype) and largest > np.iinfo(dtype).max


def safe_dtype(a: np.dtype, b: np.dtype, largest: int) -> np.dtype | None:
    """The smallest of `SUM_DTYPES` in which sums of products of two integer types wrap nowhere, given that they are at
    most ``largest`` in absolute value; None where they may wrap in each. A signed one where a or b is signed.

    >>> safe_dtype(np.dtype("uint8"), np.dtype("uint8"), 3_000_000_000)
    dtype('uint32')
    >>> safe_dtype(np.dtype("uint8"), np.dtype("int8"), 3_000_000_000)
    dtype('int64')
    >>> safe_dtype(np.dtype("int64"), np.dtype("int64"), 2**63) is None
    True
    """
    signed = "i" in (a.kind, b.kind)
    wide = (dtype for dtype in SUM_DTYPES if not (signed and dtype.kind == "u"))
    return next((dtype for dtype in wide if not can_wrap(dtype, largest)), None)


def sum_dtype(a: np.dtype, b: np.dtype, k: int) -> np.dtype:
    """The type of sums of k products of elements of types a and b where nobody asked for another.

    For integers the smallest of `SUM_DTYPES` that holds the k-fold of the largest product, and all that NumPy's result
    type holds; NumPy's widened to 64 bits where none does. For all else NumPy's, ``numpy.result_type``: float64 for
    uint64 with a signed type. The values do not matter, so the type is known before they are read.

    >>> sum_dtype(np.dtype("int8"), np.dtype("int8"), 4000)
    dtype('int32')
    >>> sum_dtype(np.dtype("int8"), np.dtype("int8"), 200_000)
    dtype('int64')
    >>> sum_dtype(np.dtype("uint8"), np.dtype("uint8"), 40_000)
    dtype('uint32')
    >>> sum_dtype(np.dtype("uint32"), np.dtype("uint32"), 1000)
    dtype('uint64')
    """
    numpys = np.result_type(a, b)
    if not is_integer(a, b, numpys):
        return numpys
    # Without any products (k = 0) NumPy's own range is what is to be held.
    least = max(largest_sum_of(a, b, k), int(np.iinfo(numpys).max))
    return safe_dtype(a, b, least) or np.dtype(f"{numpys.kind}8")
