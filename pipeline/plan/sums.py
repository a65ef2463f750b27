"""What a user is told of the type of sums of integer products: why it is what it is, and whether they can wrap in it.

The arithmetic is `tilewright.kernels.widths`.
"""

from __future__ import annotations

import numpy as np

from tilewright.kernels.numbers import counted
from tilewright.kernels.widths import (
    SUM_DTYPES,
    can_wrap,
    is_integer,
    largest_sum,
    largest_sum_of,
    safe_dtype,
    sum_dtype,
)

MOST_DIGITS = 2**64
"""Larger numbers are given to three digits."""


def dtype_reason(
    result: np.dtype,
    a: np.dtype,
    b: np.dtype,
    k: int,
    numpys: str = "numpy.matmul",
    *,
    finished: bool = False,
) -> str:
    """One line: the type of sums of k products of elements of types a and b, and why they have it. Empty where a or b
    is no integer type. numpys: the function of NumPy whose type is named where sums could wrap in it. finished: whether
    the sums are multiplied by something, or something is added, of which they may need a wider type.

    >>> dtype_reason(np.dtype("int32"), np.dtype("int8"), np.dtype("int8"), 4000)
    "int32: 4000 products of int8 by int8 reach 65536000 at most, and numpy.matmul's int8 holds up to 127"
    """
    if not is_integer(a, b):
        return ""
    common, most = np.result_type(a, b), largest_sum_of(a, b, k)
    asked = ""
    if result != sum_dtype(a, b, k):
        asked = ", as asked for" if not finished else ", for what becomes of the sums, or as asked for"
    if not is_integer(result):
        why = asked or f", the type to which {a} and {b} promote"
        return f"{result}{why}: sums are rounded"
    products = f"{counted(k, 'product')} of {a} by {b}"
    if can_wrap(result, most):
        why = asked or ", which has the most bits there are"
        return f"{result}{why}: {products} could reach {_short(most)}, and it holds up to {_limit(result)}"
    reach = f"{result}{asked}: {products} {'reaches' if k == 1 else 'reach'} {_short(most)} at most"
    if can_wrap(common, most):
        reach += f", and {numpys}'s {common} holds up to {_limit(common)}"
    return reach


def can_wrap_by_dtype(result: np.dtype, a: np.dtype, b: np.dtype, k: int) -> bool:
    """Whether sums of k products of elements of types a and b wrap in ``result`` for some values that a and b hold.
    Only then is there anything to find out about the values."""
    return is_integer(a, b) and can_wrap(result, largest_sum_of(a, b, k))


def planned_wrap(
    what: str, result: np.dtype, a: np.dtype, b: np.dtype, k: int, *, finished: bool = False
) -> str | None:
    """One sentence where sums of k products can wrap in ``result`` for some values that a and b hold, else None.

    what: what is made of the sums, such as ``C``. finished: whether the sums have an epilogue, for which they are of
    integers whatever C holds.
    """
    if not can_wrap_by_dtype(result, a, b, k):
        return None
    most = largest_sum_of(a, b, k)
    return (
        f"{what} could wrap modulo {_modulus(result)}: {k} products of {a} by {b} reach"
        f" {_short(most)} at most, and {result} holds up to {_limit(result)}; that is a bound of the"
        f" dtypes and k alone, and the run looks at the true ranges"
        f"{_remedy(a, b, most, finished)}"
    )


def found_wrap(
    what: str,
    result: np.dtype,
    a: np.dtype,
    b: np.dtype,
    k: int,
    most_a: int,
    most_b: int,
    *,
    finished: bool = False,
) -> str | None:
    """One sentence where sums of k products can wrap in ``result``, given that no element of the factors, of types a
    and b, is larger in absolute value than most_a and most_b; else None: then no sum has wrapped. finished: as for
    `planned_wrap`."""
    most = largest_sum(k, most_a, most_b)
    if not can_wrap_by_dtype(result, a, b, k) or not can_wrap(result, most):
        return None
    return (
        f"{what} may have wrapped modulo {_modulus(result)}: with the largest absolute values found, {most_a} and"
        f" {most_b}, {counted(k, 'product')} can reach {_short(most)}, and {result} holds up to"
        f" {_limit(result)}{_remedy(a, b, most, finished)}"
    )


def finished_wrap(result: np.dtype, ends: tuple[int, int], of: str, a: np.dtype, b: np.dtype) -> str | None:
    """One sentence where what becomes of sums of products of types a and b wraps in C's dtype, else None. ends: the
    least and the largest of it. of: the sums, in words."""
    limits = np.iinfo(result)
    if limits.min <= ends[0] and ends[1] <= limits.max:
        return None
    signed = "i" in (a.kind, b.kind)  # such factors cast to no unsigned type
    wide = (
        dtype
        for dtype in SUM_DTYPES
        if not (signed and dtype.kind == "u")
        and np.iinfo(dtype).min <= ends[0]
        and ends[1] <= np.iinfo(dtype).max
    )
    safe = next(wide, None)
    remedy = (
        f"; --dtype {safe} (dtype={safe.name!r}) is safe"
        if safe is not None
        else "; no integer type is safe, and --dtype float64 (dtype='float64') gives rounded numbers"
    )
    return (
        f"with what they are multiplied by and what is added, {of} reach from {_short(ends[0])} to {_short(ends[1])} at"
        f" most, and {result} holds {int(limits.min)} to {int(limits.max)}, beyond which C wraps modulo"
        f" {_modulus(result)}{remedy}"
    )


def _remedy(a: np.dtype, b: np.dtype, most: int, finished: bool) -> str:
    if (safe := safe_dtype(a, b, most)) is not None:
        return f"; --dtype {safe} (dtype={safe.name!r}) is safe"
    if finished:
        return "; no integer type is safe, and a factor that is stored as float64 gives rounded sums"
    return "; no integer type is safe, and --dtype float64 (dtype='float64') gives rounded sums"


def _modulus(dtype: np.dtype) -> str:
    return f"2^{8 * dtype.itemsize}"


def _limit(dtype: np.dtype) -> int:
    return int(np.iinfo(dtype).max)


def _short(number: int) -> str:
    return str(number) if abs(number) < MOST_DIGITS else f"{number:.2e}"
