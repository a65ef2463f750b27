"""What is made of a factor's elements before they are multiplied, and of the sums before they are stored.

Both are values, which the worker that multiplies, the check, and the record of finished tiles are made from. Nothing
transformed is ever stored. The NumPy functions here are the definition, which the kernels of a device are compared
with. Each operation is rounded by itself; a product of complex numbers is formed of its parts, since NumPy's own
depends on the processor's instructions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from tilewright.pipeline.plan.pairs import ONLY_PRODUCT, Form, Forms, Pairwise

TRANSFORMED = tuple(np.dtype(code) for code in ("f4", "f8", "c8", "c16"))
"""What a transform may form."""


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


def _vectors_nbytes(value: Any) -> int:
    held = (getattr(value, field.name) for field in fields(value))
    return sum(one.nbytes for one in held if isinstance(one, np.ndarray))


@dataclass(frozen=True)
class Counted:
    """What is known of the integers of a whole matrix, from a pass over it."""

    missing: int
    """How many elements are missing."""
    least: int
    """Of those that are there; of none the largest number of the dtype."""
    most: int


@dataclass(frozen=True, eq=False)
class Transform:
    """What an element of a stored matrix (rows × columns) becomes as a factor:

        (x[i, j] - row_offsets[i] - column_offsets[j] - offset) * (row_factors[i] * column_factors[j])

    formed in ``dtype``, in this order; an offset or factor that is None is left out. An element that is missing becomes
    0, whatever the offsets: the mean of its line where those are the means.
    """

    dtype: np.dtype
    """Of what is multiplied: one of `TRANSFORMED`, a complex one for a complex matrix."""
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
    counted: Counted | None = None
    """Of a matrix of integers, where somebody has looked: a CPU may multiply them as such (`centred.py`)."""

    def digest(self) -> str:
        """Hexadecimal, equal for transforms that do the same."""
        return _digest(self)

    @property
    def nbytes(self) -> int:
        """Of its vectors."""
        return _vectors_nbytes(self)


def missing_element(transform: Transform, dtype: np.dtype) -> Any:
    """The number of this dtype that stands for a missing element of a stored matrix; None where no number does.

    >>> missing_element(Transform(np.dtype("f4"), missing=-1.0), np.dtype("i1"))
    np.int8(-1)
    >>> missing_element(Transform(np.dtype("f4"), missing=0.5), np.dtype("i1")) is None
    True
    """
    missing = transform.missing
    if missing is None or missing == "nan" or missing != missing:
        return None
    if dtype.kind not in "iu":
        with np.errstate(over="ignore"):
            return dtype.type(missing)
    limits = np.iinfo(dtype)
    if missing in (np.inf, -np.inf) or int(missing) != missing or not limits.min <= missing <= limits.max:
        return None
    return dtype.type(int(missing))


def transformed(
    transform: Transform, block: np.ndarray, rows: slice, columns: slice, form: Form = "values"
) -> np.ndarray:
    """A block of a stored matrix as it is multiplied: a new array of ``transform.dtype``.

    block: the matrix's elements at these rows and columns, of any numeric dtype. form: what is made of the results;
    complex numbers have no other than their values.

    >>> t = Transform(np.dtype("f4"), column_offsets=np.array([1, 2], "f4"), missing=-1)
    >>> transformed(t, np.array([[3, 3], [-1, 2]], "i1"), slice(0, 2), slice(0, 2)).tolist()
    [[2.0, 1.0], [0.0, 0.0]]
    """
    with np.errstate(all="ignore"):
        result = block.astype(transform.dtype)
        if transform.row_offsets is not None:
            result -= transform.row_offsets[rows, np.newaxis]
        if transform.column_offsets is not None:
            result -= transform.column_offsets[columns]
        if transform.offset:
            result -= transform.dtype.type(transform.offset)
        factors = None
        if transform.row_factors is not None:
            factors = transform.row_factors[rows, np.newaxis]
        if transform.column_factors is not None:
            across = transform.column_factors[columns]
            factors = across if factors is None else times(factors, across)
        if factors is not None:
            result = times(result, factors)
        if form == "squares":
            result *= result
        elif form == "presence":
            result[...] = 1
    if transform.missing == "nan":
        result[block != block] = 0
    elif (element := missing_element(transform, block.dtype)) is not None:
        result[block == element] = 0
    return np.conjugate(result, out=result) if transform.conjugate else result


def times(one: Any, other: Any) -> Any:
    """The product of two arrays or numbers of NumPy's, element by element; of complex ones by four products of their
    parts and two sums."""
    if np.result_type(one, other).kind != "c":
        return one * other
    one, other = (
        value if np.iscomplexobj(value) else np.asarray(value).astype(np.result_type(one, other))
        for value in (one, other)
    )
    result = np.empty(np.broadcast_shapes(np.shape(one), np.shape(other)), np.result_type(one, other))
    result.real = one.real * other.real - one.imag * other.imag
    result.imag = one.real * other.imag + one.imag * other.real
    return result


@dataclass(frozen=True, eq=False)
class Epilogue:
    """What an element of C becomes of its sum over k:

        alpha * (row_factors[i] * column_factors[j]) * (sum - pair_weight * (row_pairs[i] * column_pairs[j]))
            + (row_offsets[i] + column_offsets[j]) + offset + beta * before[i, j]

    formed in C's dtype, or in float64 where C holds floats and the sums are integers, in this order; what is None, or 0
    for pairs, offset and beta, is left out. float16 is rounded from what float32 would be. Of a symmetric product,
    whose vectors are alike on both sides, the result is symmetric to the bit. The pairs correct the sums of numbers
    that should have been centred.
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
    diagonal: np.ndarray | None = None
    """Of a square C, float64 or complex128: what its diagonal holds, whatever the sums there. It is for numbers that
    are known, and that the sums come close to: the ones of a correlation matrix."""

    def digest(self) -> str:
        """Hexadecimal, equal for epilogues that do the same."""
        return _digest(self)

    @property
    def nbytes(self) -> int:
        """Of its vectors."""
        return _vectors_nbytes(self)

    @property
    def has_pairs(self) -> bool:
        return self.row_pairs is not None and self.column_pairs is not None


def reach(epilogue: Epilogue, least: int, most: int) -> tuple[int, int]:
    """The least and the largest number that an epilogue of integers alone can make of sums from ``least`` to ``most``,
    without what C held before.

    >>> reach(Epilogue(alpha=-3, row_offsets=np.array([0, 5])), 0, 10)
    (-30, 5)
    """
    ends = [int(epilogue.alpha.real) * end for end in (least, most)]
    for vector in (epilogue.row_factors, epilogue.column_factors):
        ends = [end * factor for end in ends for factor in _ends(vector, 1)]
    low, high = min(ends), max(ends)
    for vector in (epilogue.row_offsets, epilogue.column_offsets):
        lowest, highest = _ends(vector, 0)
        low, high = low + lowest, high + highest
    offset = int(epilogue.offset.real)
    return low + offset, high + offset


def _ends(vector: np.ndarray | None, absent: int) -> tuple[int, int]:
    """The least and the largest of some integers; of none what stands for them."""
    if vector is None or not np.size(vector):
        return absent, absent
    return int(np.min(vector)), int(np.max(vector))


def wide_dtype(dtype: np.dtype, sums: np.dtype) -> np.dtype:
    """What an epilogue is formed in, for a C of this dtype and sums of that."""
    if dtype.kind == "f" and sums.kind in "iu":
        return np.dtype(np.float64)
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def number_dtype(wide: np.dtype) -> np.dtype:
    """Of an epilogue's vectors and numbers, before they are converted to what it is formed in."""
    return wide if wide.kind in "iu" else np.dtype(np.complex128 if wide.kind == "c" else np.float64)


def as_number(value: Any, dtype: np.dtype) -> Any:
    """A number of an epilogue, of `number_dtype`; integers wrap.

    >>> as_number(300.0, np.dtype("u1"))
    np.uint8(44)
    """
    if dtype.kind not in "iu":
        return dtype.type(value)
    return np.asarray(int(value) % 2**64, np.uint64).astype(dtype)[()]


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
    with np.errstate(all="ignore"):
        wide = wide_dtype(dtype, sums.dtype)
        result = _finished(epilogue, sums, rows, columns, wide, before)
        if dtype == np.float16:
            result = result.astype(np.float32, copy=False)
        return result.astype(dtype, copy=False)


def _finished(
    epilogue: Epilogue,
    sums: np.ndarray,
    rows: slice,
    columns: slice,
    wide: np.dtype,
    before: np.ndarray | None,
) -> np.ndarray:
    number = number_dtype(wide)

    def of(vector: np.ndarray | None, part: Any) -> Any:
        return None if vector is None else vector[part].astype(number, copy=False)

    down, across = (rows, np.newaxis), columns
    result: Any = sums.astype(wide)
    if epilogue.has_pairs:
        pairs = times(of(epilogue.row_pairs, down), of(epilogue.column_pairs, across))
        result -= times(as_number(epilogue.pair_weight, number), pairs).astype(wide)
    factors, more = of(epilogue.row_factors, down), of(epilogue.column_factors, across)
    if factors is None or more is None:
        factors = more if factors is None else factors
    else:
        factors = times(factors, more)
    alpha = as_number(epilogue.alpha, number)
    if factors is not None:
        result = times(result, times(alpha, factors).astype(wide))
    elif epilogue.alpha != 1:
        result = times(result, alpha.astype(wide))
    offsets, more = of(epilogue.row_offsets, down), of(epilogue.column_offsets, across)
    if offsets is None or more is None:
        offsets = more if offsets is None else offsets
    else:
        offsets = offsets + more
    if offsets is not None:
        result += offsets.astype(wide)
    if epilogue.offset:
        result += as_number(epilogue.offset, number).astype(wide)
    if epilogue.beta and before is not None:
        result += times(as_number(epilogue.beta, number).astype(wide), before.astype(wide))
    if epilogue.diagonal is not None:
        put_diagonal(result, epilogue.diagonal, rows.start or 0, columns.start or 0)
    return np.asarray(result)


def put_diagonal(block: np.ndarray, diagonal: np.ndarray, top: int, left: int) -> None:
    """Write what of a square matrix's diagonal lies in a block whose first element is at ``top`` and ``left``.

    >>> block = np.zeros((2, 3))
    >>> put_diagonal(block, np.array([5.0, 6.0, 7.0]), 1, 0)
    >>> block.tolist()
    [[0.0, 6.0, 0.0], [0.0, 0.0, 7.0]]
    """
    height, width = block.shape
    places = np.arange(max(top, left), min(top + height, left + width))
    block[places - top, places - left] = diagonal[places]


@dataclass(frozen=True, eq=False)
class Fused:
    """What a product does besides multiplying: the transforms of A and of B, and what is made of its sums, by an
    epilogue or pair by pair."""

    transforms: tuple[Transform | None, Transform | None] = (None, None)
    epilogue: Epilogue | None = None
    pairwise: Pairwise | None = None
    """Needs both transforms, of real numbers, and no epilogue."""

    def __bool__(self) -> bool:
        return self.epilogue is not None or self.pairwise is not None or self.transforms != (None, None)

    @property
    def forms(self) -> tuple[Forms, ...]:
        """What a tile sums, each in an accumulator of its own: the forms of the panels of A and of B."""
        return ONLY_PRODUCT if self.pairwise is None else self.pairwise.forms

    @property
    def nbytes(self) -> int:
        """Of all vectors; those of a transform that is both A's and B's count once."""
        held = {id(one): one for one in (*self.transforms, self.epilogue) if one is not None}
        return sum(one.nbytes for one in held.values())

    def digests(self) -> list[str]:
        """Equal for products that do the same."""
        digests = [one.digest() if one is not None else "" for one in (*self.transforms, self.epilogue)]
        return digests if self.pairwise is None else [*digests, self.pairwise.digest()]


NOT_FUSED = Fused()
"""Nothing but the product."""
