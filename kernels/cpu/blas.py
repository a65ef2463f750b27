"""Products that BLAS adds to what is there (β = 1), and halves of symmetric ones: what NumPy has BLAS do, but offers
nobody.

The functions are those of the library that NumPy itself calls, so that a process has one BLAS and one pool of its
threads, and needs no package for it. They let go of the interpreter's lock, and may be called by several threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

NAMES = (
    ("scipy_cblas_{}64_", ctypes.c_int64),  # in NumPy's own wheels
    ("cblas_{}64_", ctypes.c_int64),
    ("scipy_cblas_{}", ctypes.c_int32),
    ("cblas_{}", ctypes.c_int32),  # as a system's or Conda's NumPy is built
)
"""What CBLAS's functions are called in the libraries that NumPy is built with, and how wide their integers are."""

LETTERS = {"f4": "s", "f8": "d", "c8": "c", "c16": "z"}
"""Of dtypes that BLAS computes in, by which its functions begin."""

# Values of CBLAS's enumerations, which are the same in all libraries.
ROW_MAJOR, AS_STORED, TRANSPOSED, LOWER = 101, 111, 112, 122


class Blas(NamedTuple):
    """The functions for one dtype."""

    gemm: Callable[..., None]
    syrk: Callable[..., None]
    scalar: Callable[[float], Any]
    """α or β, as they take it."""
    longest: int
    """The longest side, or line, in elements that they can be told of."""


@functools.cache
def blas_for(dtype: np.dtype) -> Blas | None:
    """What BLAS has for a dtype; None where NumPy was built without a BLAS whose functions can be found by name."""
    letter = LETTERS.get(dtype.str[1:]) if dtype.isnative else None
    if letter is None:
        return None
    library = ctypes.CDLL(_extension())  # that it is loaded from; names are also looked for in what it needs
    for name, integer in NAMES:
        gemm = getattr(library, name.format(f"{letter}gemm"), None)
        syrk = getattr(library, name.format(f"{letter}syrk"), None)
        if gemm is not None and syrk is not None:
            return _declared(gemm, syrk, integer, dtype)
    return None


def _extension() -> str:
    """The file of NumPy's extension module that calls BLAS."""
    package = getattr(np, "_core", None) or np.core  # the latter up to NumPy 1.26
    return str(package._multiarray_umath.__file__)


def _declared(gemm: Any, syrk: Any, integer: Any, dtype: np.dtype) -> Blas:
    choice, array = ctypes.c_int, ctypes.c_void_p
    if dtype.kind == "c":
        number: Any = ctypes.c_void_p
        parts = ctypes.c_float if dtype.itemsize == 8 else ctypes.c_double

        def scalar(value: float) -> Any:
            return ctypes.byref((parts * 2)(value, 0))
    else:
        number = ctypes.c_float if dtype.itemsize == 4 else ctypes.c_double
        scalar = number
    line, lines = (array, integer), (integer,) * 2
    gemm.argtypes = (choice, choice, choice, *lines, integer, number, *line, *line, number, *line)
    syrk.argtypes = (choice, choice, choice, *lines, number, *line, number, *line)
    gemm.restype = syrk.restype = None
    return Blas(gemm, syrk, scalar, 2 ** (8 * ctypes.sizeof(integer) - 1) - 1)


def takes(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> bool:
    """Whether BLAS can be given these matrices as they lie in memory: of one dtype that it computes in, none of them
    empty, with lines without gaps between elements, and those of ``out`` its rows."""
    blas = blas_for(out.dtype)
    return (
        blas is not None
        and a.dtype == b.dtype == out.dtype
        and _line(out, blas) is not None
        and all(_line(one, blas) is not None or _line(one.T, blas) is not None for one in (a, b))
    )


def _line(matrix: np.ndarray, blas: Blas) -> int | None:
    """The distance between rows in elements; None where they are no lines as BLAS reads them."""
    (rows, columns), (apart, step), size = matrix.shape, matrix.strides, matrix.itemsize
    if 0 in matrix.shape or (step != size and columns > 1) or not matrix.flags.aligned:
        return None
    line = columns if rows == 1 else apart // size
    if (rows > 1 and apart % size) or line < columns or max(rows, columns, line) > blas.longest:
        return None
    return line


def _operand(matrix: np.ndarray, blas: Blas) -> tuple[int, int]:
    """Whether BLAS reads a matrix as it is stored, or transposed, and the distance between its lines."""
    if (line := _line(matrix, blas)) is not None:
        return AS_STORED, line
    line = _line(matrix.T, blas)
    assert line is not None, "`takes` was asked"
    return TRANSPOSED, line


def multiply(a: np.ndarray, b: np.ndarray, out: np.ndarray, *, accumulate: bool) -> None:
    """``out (+)= a b`` by one call of gemm, of matrices that `takes` has accepted.

    a: m × k, b: k × n, out: m × n, written; nothing overlaps. No scratch memory but what BLAS packs.
    """
    blas = blas_for(out.dtype)
    assert blas is not None, "`takes` was asked"
    (turn_a, line_a), (turn_b, line_b) = _operand(a, blas), _operand(b, blas)
    (m, n), k = out.shape, a.shape[1]
    of_out = out.ctypes.data, _line(out, blas)
    blas.gemm(
        ROW_MAJOR, turn_a, turn_b, m, n, k, blas.scalar(1), a.ctypes.data, line_a, b.ctypes.data, line_b,
        blas.scalar(accumulate), *of_out,
    )  # fmt: skip


def multiply_lower(a: np.ndarray, out: np.ndarray, *, accumulate: bool) -> None:
    """``out (+)= a aᵀ`` on and below the diagonal by one call of syrk; what is above it stays.

    a: n × k, out: n × n, written; `takes` has accepted a, aᵀ and out. No scratch memory but what BLAS packs.
    """
    blas = blas_for(out.dtype)
    assert blas is not None, "`takes` was asked"
    (turn, line), (n, k) = _operand(a, blas), a.shape
    of_out = out.ctypes.data, _line(out, blas)
    blas.syrk(
        ROW_MAJOR, LOWER, turn, n, k, blas.scalar(1), a.ctypes.data, line, blas.scalar(accumulate), *of_out
    )
