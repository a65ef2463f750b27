"""The checks of a product's arguments, all made before anything is launched."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilewright.kernels.arguments import check_choice, shown
from tilewright.kernels.bfloat16 import BFLOAT16, dtype_name, is_bfloat16
from tilewright.kernels.choices import PRECISIONS
from tilewright.kernels.errors import DTypeError, OptionError, OutputError, ShapeError
from tilewright.kernels.float8 import FLOAT8, NAMES, float8_of
from tilewright.kernels.gemm.base import ELEMENTS, FACTORS
from tilewright.kernels.widths import sum_dtype


def product_shape(
    a: tuple[int, ...], b: tuple[int, ...], transpose_a: bool, transpose_b: bool
) -> tuple[int, int, int]:
    """(m, n, k) of op(A) op(B), or ShapeError."""
    for name, shape in (("a", a), ("b", b)):
        if len(shape) != 2:
            raise ShapeError(
                f"{name} has {len(shape)} dimension(s), shape {tuple(shape)}; a product takes matrices "
                "(multiply a stack's members one by one; reshape a vector to a row or a column)"
            )
    m, k = reversed(a) if transpose_a else a
    k_of_b, n = reversed(b) if transpose_b else b
    if k != k_of_b:
        raise ShapeError(
            f"the inner sides differ: op(A) is {m} × {k} and op(B) is {k_of_b} × {n} (a: {tuple(a)}, "
            f"transpose_a={transpose_a}; b: {tuple(b)}, transpose_b={transpose_b})"
        )
    return int(m), int(n), int(k)


def half(m: int, n: int, lower: bool) -> None:
    """ShapeError where only half of a product is wanted that has no diagonal from corner to corner."""
    if lower and m != n:
        raise ShapeError(f"lower=True is for square products, and this one is {m} × {n}; leave it out")


def result_dtype(
    a: np.dtype,
    b: np.dtype,
    dtype: Any = None,
    names: tuple[str, str] = ("a", "b"),
    elements: Sequence[np.dtype] = ELEMENTS,
    k: int | None = None,
    remedy: Callable[[], str] | None = None,
) -> np.dtype:
    """The product's element type: numpy.result_type's, or ``dtype`` where both inputs cast to it ``same_kind``.

    With the length ``k`` of the sums, integers have a type that holds them in place of NumPy's: `widths.sum_dtype`.

    ``same_kind`` allows any width, also a smaller one: unsigned integers to any type, signed ones to any but unsigned,
    floats to any floats or complex numbers, complex numbers to complex ones.

    bfloat16 with itself and with 8-bit integers gives bfloat16, with wider floats and complex numbers their type. With
    anything else it has no common type (nor has it in ml_dtypes), so ``dtype`` must be given.
    Where ``elements`` is left out, float8 is multiplied too, of either kind by either; its products are float32.
    Booleans are refused: numpy.matmul forms their logical product, which cannot be accumulated.
    names: what errors call the factors. elements: the allowed types, which errors list. remedy: what the error for
    a ``dtype`` that a factor does not cast to says to do, where leaving it out may be refused as well.

    Raises
    ------
    DTypeError
        A factor's type or ``dtype`` is not among ``elements``, the factors have no common type, or one of them does not
        cast to ``dtype``.
    """
    allowed = FACTORS if elements is ELEMENTS else elements
    for name, found in zip(names, (a, b), strict=True):
        if found.newbyteorder("=") not in allowed:
            raise DTypeError(
                f"{name} holds {dtype_name(found)}, which cannot be multiplied here; allowed are "
                f"{_listed(allowed)}{_hint(name, found, allowed)}"
            )
    if a in FLOAT8 or b in FLOAT8:
        return _of_float8(a, b, dtype, names)
    if dtype is None:
        return _default(a, b, names, k)
    wanted = element(dtype, elements)
    for name, found in zip(names, (a, b), strict=True):
        if not np.can_cast(_as_numpy_knows(found), _as_numpy_knows(wanted), "same_kind"):
            told = (
                f"leave dtype out for {dtype_name(_default(a, b, names, k))}" if remedy is None else remedy()
            )
            raise DTypeError(
                f"{name} holds {dtype_name(found)}, which does not cast to dtype={dtype_name(wanted)} within its "
                f"kind; {told}, or convert it first"
            )
    return wanted


def _hint(name: str, found: np.dtype, allowed: Sequence[np.dtype]) -> str:
    """What to do about a factor of a type that is not allowed, for the end of a message; empty where nothing is to be
    said."""
    if found == np.bool_:
        return f"; view it as uint8: {name}.view(numpy.uint8)"
    if found in FLOAT8:
        return f"; of float8, tilewright.kernels.matmul makes products: convert it first, {name}.astype(numpy.float16)"
    if "float8" in str(found) and FLOAT8[0] in allowed:
        return f"; of float8 only {' and '.join(NAMES)}: convert it first, {name}.astype(numpy.float32)"
    return ""


def _of_float8(a: np.dtype, b: np.dtype, dtype: Any, names: tuple[str, str]) -> np.dtype:
    """float32, or DTypeError where only one factor is float8, or another type is wanted."""
    if a not in FLOAT8 or b not in FLOAT8:
        narrow = names[0] if a in FLOAT8 else names[1]
        raise DTypeError(
            f"{names[0]} holds {dtype_name(a)} and {names[1]} {dtype_name(b)}; float8 is multiplied by float8 "
            f"({' or '.join(NAMES)}) alone: convert {narrow} first, to float16 without a loss"
        )
    result = np.dtype(np.float32)
    if dtype is not None and element(dtype) != result:
        raise DTypeError(
            f"dtype={dtype_name(element(dtype))} is not what float8 products have: they are float32; leave dtype out"
        )
    return result


def element(dtype: Any, elements: Sequence[np.dtype] = ELEMENTS) -> np.dtype:
    """What a caller's ``dtype`` means, or DTypeError where that is no element type, or none of ``elements``."""
    try:
        narrow = BFLOAT16 if is_bfloat16(dtype) else float8_of(dtype)
        wanted = np.dtype(dtype) if narrow is None else narrow
    except Exception:  # NumPy has one for each way of spelling a type wrong
        raise DTypeError(
            f"dtype={shown(dtype)} is not an element type; allowed are {_listed(elements)}"
        ) from None
    if wanted not in elements:
        raise DTypeError(
            f"dtype={dtype_name(wanted)} cannot be a product's type; allowed are {_listed(elements)}"
        )
    return wanted


def _listed(elements: Sequence[np.dtype]) -> str:
    return ", ".join(dtype_name(one) for one in elements)


def _as_numpy_knows(dtype: np.dtype) -> np.dtype:
    """The dtype; for bfloat16, which NumPy does not have, float32, which is of the same kind."""
    return np.dtype(np.float32) if dtype == BFLOAT16 else dtype


def _default(a: np.dtype, b: np.dtype, names: tuple[str, str], k: int | None) -> np.dtype:
    """The type of the product where nobody asked for one: that to which both promote, or DTypeError; for integers whose
    sums have a known length, one that holds them."""
    if BFLOAT16 not in (a, b):
        return np.result_type(a, b) if k is None else sum_dtype(a, b, k)
    other = b if a == BFLOAT16 else a
    if other == BFLOAT16 or other.itemsize == 1:
        return BFLOAT16
    if other.kind in "fc" and other.itemsize > BFLOAT16.itemsize:
        return other.newbyteorder("=")
    raise DTypeError(
        f"{names[0]} holds {dtype_name(a)} and {names[1]} {dtype_name(b)}, which have no common type; pass"
        " dtype='float32' or another"
    )


SPLIT = tuple(np.dtype(code) for code in ("f4", "f8", "c8", "c16"))
"""Products that may be split."""


def precision(name: str, result: np.dtype) -> None:
    check_choice("precision", name, PRECISIONS)
    if name == "full" or result == np.float32 or (name == "split" and result in SPLIT):
        return
    kinds = "float32, float64, complex64 and complex128" if name == "split" else "float32"
    raise OptionError(
        f"precision={name!r} is a choice for {kinds} products; this one is {dtype_name(result)}: "
        "use precision='full'"
    )


def layout(name: str, strides: tuple[int, ...], dtype: np.dtype) -> None:
    """ShapeError where strides are not whole numbers of elements (a field of a structured array)."""
    if any(stride % dtype.itemsize for stride in strides):
        raise ShapeError(
            f"{name} has strides {tuple(strides)} bytes, which are no multiples of its {dtype.itemsize}-byte "
            f"elements; copy it first"
        )


def output(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype, m: int, n: int, result: np.dtype
) -> None:
    """OutputError unless an array of this shape, strides (bytes) and dtype can hold an m × n product."""
    if tuple(shape) != (m, n):
        raise OutputError(f"out has shape {tuple(shape)}, but the product has {(m, n)}")
    if dtype != result:
        raise OutputError(
            f"out holds {dtype_name(dtype)}, the product is {dtype_name(result)}; pass an out of {dtype_name(result)}, "
            f"or dtype={dtype_name(dtype)!r}"
        )
    if m * n and not elements_apart(m, n, strides[0], strides[1], dtype.itemsize):
        raise OutputError(
            f"out has strides {tuple(strides)} bytes for shape {tuple(shape)}: elements of it share memory; "
            "pass an array whose elements lie apart"
        )


def elements_apart(m: int, n: int, down: int, across: int, itemsize: int) -> bool:
    """Whether no two elements of an m × n array share a byte; ``down`` and ``across`` are its strides (bytes).

    No side is 0. The sign of a stride does not matter: it says from which end elements are counted.
    """
    down, across = abs(down), abs(across)
    if m == 1 or n == 1:
        return (m == 1 or down >= itemsize) and (n == 1 or across >= itemsize)
    if min(down, across) < itemsize:
        return False
    if down >= (n - 1) * across + itemsize or across >= (m - 1) * down + itemsize:
        return True  # whole rows, or whole columns, lie one behind the other
    if down % itemsize == across % itemsize == 0:
        # i rows down is where j columns across is: first for i = across / step and j = down / step.
        step = math.gcd(down, across)
        return across // step >= m or down // step >= n
    if m > n:
        m, n, down, across = n, m, across, down
    # Each row's first element, and the elements of the first row before and behind its place.
    column, beyond = np.divmod(np.arange(1, m, dtype=np.int64) * down, across)
    before = (column < n) & (beyond < itemsize)
    behind = (column + 1 < n) & (across - beyond < itemsize)
    return not (before | behind).any()


class _Memory:
    """An array's memory as numbers, so that NumPy can compare two regions without touching them."""

    def __init__(
        self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype
    ) -> None:
        self.__array_interface__ = {
            "data": (pointer, True),
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": f"|V{dtype.itemsize}",  # of any type: NumPy knows no float8's
            "version": 3,
        }


def span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Where an array's memory begins and ends, in bytes from its first element; (0, 0) when it is empty."""
    if 0 in shape:
        return (0, 0)
    reach = [(side - 1) * stride for side, stride in zip(shape, strides, strict=True)]
    return sum(min(distance, 0) for distance in reach), sum(max(distance, 0) for distance in reach) + itemsize


def overlap(
    name: str,
    pointer: int,
    array: Any,
    extent: tuple[int, int],
    out_pointer: int,
    out: Any,
    out_extent: tuple[int, int],
) -> None:
    """OutputError if ``out`` shares memory with an operand; extents as `span` gives them."""
    if (
        pointer + extent[1] <= out_pointer + out_extent[0]
        or out_pointer + out_extent[1] <= pointer + extent[0]
        or extent == (0, 0)
        or out_extent == (0, 0)
    ):
        return
    first = np.asarray(_Memory(pointer, array.shape, array.strides, array.dtype))
    second = np.asarray(_Memory(out_pointer, out.shape, out.strides, out.dtype))
    if np.shares_memory(first, second):
        raise OutputError(
            f"out overlaps {name} in memory: the product would overwrite what it still has to read; "
            "pass an out of its own"
        )
