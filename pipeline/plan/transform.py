"""What is made of a factor's elements before they are multiplied, and of the sums before they are stored.

Both are values, which the worker that multiplies, the check, and the record of finished tiles are made from. Nothing
transformed is ever stored. The NumPy functions here are the definition, which the kernels of a device are compared
with.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np


def _digest(value: Any) -> str:
    """Of all fields of a dataclass, arrays by their dtype, shape and bytes."""
    digest = hashlib.sha256()
    for field in fields(value):
        held = getattr(value, field.name)
        digest.update(field.name.encode())
        if isinstance(held, np.ndarray):
            digest.update(f"{held.dtype.str}{held.shape}".encode())
            digest.update(np.ascontiguousarray(held).tobytes())
        else:
            digest.update(repr(held).encode())
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Transform:
    """What an element of a stored matrix (rows × columns) becomes as a factor:

        (x[i, j] - row_offsets[i] - column_offsets[j] - offset) * (row_factors[i] * column_factors[j])

    formed in ``dtype``, in this order; an offset or factor that is None is left out. An element that is missing becomes
    0, whatever the offsets: the mean of its line where those are the means.
    """

    dtype: np.dtype
    """Of what is multiplied: a float, or a complex type for a complex matrix."""
    row_offsets: np.ndarray | None = None
    """One a row of the matrix as stored, of ``dtype``; so are the others, one a row or column."""
    column_offsets: np.ndarray | None = None
    offset: float = 0.0
    row_factors: np.ndarray | None = None
    column_factors: np.ndarray | None = None
    missing: int | float | Literal["nan"] | None = None
    """The number that stands for a missing element, as stored; ``nan`` for NaN in either part; None: none is."""
    conjugate: bool = False
    """Whether the conjugate of the result is taken (the left factor of a Hermitian product)."""

    def digest(self) -> str:
        """Hexadecimal, equal for transforms that do the same."""
        return _digest(self)


def transformed(transform: Transform, block: np.ndarray, rows: slice, columns: slice) -> np.ndarray:
    """A block of a stored matrix as it is multiplied: a new array of ``transform.dtype``.

    block: the matrix's elements at these rows and columns, of any numeric dtype.

    >>> t = Transform(np.dtype("f4"), column_offsets=np.array([1, 2], "f4"), missing=-1)
    >>> transformed(t, np.array([[3, 3], [-1, 2]], "i1"), slice(0, 2), slice(0, 2)).tolist()
    [[2.0, 1.0], [0.0, 0.0]]
    """
    result = block.astype(transform.dtype)
    if transform.row_offsets is not None:
        result -= transform.row_offsets[rows, np.newaxis]
    if transform.column_offsets is not None:
        result -= transform.column_offsets[columns]
    if transform.offset:
        result -= transform.dtype.type(transform.offset)
    if transform.row_factors is not None and transform.column_factors is not None:
        result *= transform.row_factors[rows, np.newaxis] * transform.column_factors[columns]
    elif transform.row_factors is not None:
        result *= transform.row_factors[rows, np.newaxis]
    elif transform.column_factors is not None:
        result *= transform.column_factors[columns]
    if transform.missing is not None:
        there = block == block if transform.missing == "nan" else block != transform.missing
        result[~there] = 0
    return np.conjugate(result, out=result) if transform.conjugate else result


@dataclass(frozen=True, eq=False)
class Epilogue:
    """What an element of C becomes of its sum over k:

        alpha * (row_factors[i] * column_factors[j]) * (sum - pair_weight * (row_pairs[i] * column_pairs[j]))
            + (row_offsets[i] + column_offsets[j]) + offset + beta * before[i, j]

    formed in C's dtype, or in float64 where C holds floats and the sums are integers, in this order; what is None, or 0
    for pairs, offset and beta, is left out. Of a symmetric product, whose vectors are alike on both sides, the result
    is symmetric to the bit. The pairs correct the sums of numbers that should have been centred.
    """

    alpha: float | complex = 1.0
    row_factors: np.ndarray | None = None
    """One a row of C, float64 or complex128, or integers where C holds integers; so are the others, one a row or
    column."""
    column_factors: np.ndarray | None = None
    row_pairs: np.ndarray | None = None
    column_pairs: np.ndarray | None = None
    pair_weight: float = 0.0
    row_offsets: np.ndarray | None = None
    column_offsets: np.ndarray | None = None
    offset: float | complex = 0.0
    beta: float | complex = 0.0
    """What C held before, which the request's ``before`` names, is multiplied by this and added."""

    def digest(self) -> str:
        """Hexadecimal, equal for epilogues that do the same."""
        return _digest(self)


def finished(
    epilogue: Epilogue,
    sums: np.ndarray,
    rows: slice,
    columns: slice,
    dtype: np.dtype,
    before: np.ndarray | None = None,
) -> np.ndarray:
    """Sums of a block of C as they are stored: a new array of this dtype.

    sums: those at these rows and columns of C. before: what C held there, if ``beta`` is not 0.

    >>> e = Epilogue(alpha=0.5, row_offsets=np.array([1.0, 2.0]))
    >>> finished(e, np.array([[4], [6]]), slice(0, 2), slice(0, 1), np.dtype("f8")).tolist()
    [[3.0], [5.0]]
    """
    wide = np.dtype(np.float64) if dtype.kind == "f" and sums.dtype.kind in "iu" else dtype
    result = sums.astype(wide)
    if epilogue.row_pairs is not None and epilogue.column_pairs is not None:
        pairs = epilogue.row_pairs[rows, np.newaxis] * epilogue.column_pairs[columns]
        result -= (epilogue.pair_weight * pairs).astype(wide)
    factors: Any = None
    if epilogue.row_factors is not None:
        factors = epilogue.row_factors[rows, np.newaxis]
    if epilogue.column_factors is not None:
        across = epilogue.column_factors[columns]
        factors = across if factors is None else factors * across
    if factors is not None:
        result *= (epilogue.alpha * factors).astype(wide)
    elif epilogue.alpha != 1:
        result *= np.asarray(epilogue.alpha).astype(wide)
    offsets: Any = None
    if epilogue.row_offsets is not None:
        offsets = epilogue.row_offsets[rows, np.newaxis]
    if epilogue.column_offsets is not None:
        across = epilogue.column_offsets[columns]
        offsets = across if offsets is None else offsets + across
    if offsets is not None:
        result += offsets.astype(wide)
    if epilogue.offset:
        result += np.asarray(epilogue.offset).astype(wide)
    if epilogue.beta and before is not None:
        result += np.asarray(epilogue.beta).astype(wide) * before.astype(wide)
    return result.astype(dtype, copy=False)
