"""``precision="split"`` of complex numbers: a product of real ones, twice as deep and twice as wide.

A complex number lies in memory as two real ones, side by side. So A, m × k by rows, is a real matrix of m × 2k as it
lies, and C one of m × 2n; between them stands B with each of its numbers x + iy written as the rows (x, y) and (-y, x):
2k × 2n. These products are as many as those of complex numbers, four real ones for each, and are left to the kernels
that multiply float64 by residues and float32 in parts. What is written anew is B, and A where its columns are
contiguous, panel by panel.

The answer is as far off as that of sums in the parts' own precision may be: each part of C is a sum of 2k real
products. NaN and infinity give what arithmetic with parts gives.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import cuda

from tilewright.kernels.gemm.base import Capability, GemmKernel, Operand, Problem, Variant
from tilewright.kernels.gemm.cores.repitch import Matrix, matrix
from tilewright.kernels.gemm.exact.split_residues import SPLIT_RESIDUES, SPLIT_RESIDUES_MMA
from tilewright.kernels.gemm.hopper.split_float import SPLIT
from tilewright.kernels.gemm.scratch import borrowed
from tilewright.kernels.gemm.tensor.float_mma import SPLIT_MMA
from tilewright.kernels.gpu.device_choice import capability, current_device
from tilewright.kernels.numbers import ceil_div, round_up
from tilewright.kernels.passes.launcher import Launcher

PARTS: dict[np.dtype, np.dtype] = {
    np.dtype(np.complex64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.float64),
}
"""What complex numbers consist of."""
REAL = (SPLIT_RESIDUES, SPLIT, SPLIT_RESIDUES_MMA, SPLIT_MMA)
"""Kernels of real numbers, as the ladder prefers them."""
PANEL_DEPTH = 4096
"""The most of k that is written anew at once: as real numbers they are as deep as products by residues are."""
COPY_NBYTES = 1 << 30
"""What B, written anew, may take at once; and A."""
DEPTH_UNIT, SIDE_UNIT = 64, 256
"""Panels are multiples of these, but for the last."""
THREADS, EACH = 256, 8
"""Of the pass: real numbers of a thread, all of them read before the first is written."""
ROWS, COLUMNS, APART = "rows", "columns", "apart"
"""How the pass writes a line of complex numbers x + iy as two of real ones: as rows of B, (x, y ...) and (-y, x ...);
as its columns, (x, -y ...) and (y, x ...); or as columns of A, (x ...) and (y ...)."""
LINE_NBYTES = 256
OPERANDS = "operands"
"""Scratch memory of their own: the kernels of real numbers borrow some, too, meanwhile."""


def pass_function(form: str, part: np.dtype) -> Callable[..., None]:
    """The plain function of the kernel that writes lines anew in a form.

    source: real numbers (lines, 2 length); target: (2 lines, 2 length), or (2 lines, length) where parts lie apart.
    Grid: lines times ceil(2 length / (THREADS EACH)). Block: THREADS.
    """
    number, u32, u64 = numba.from_dtype(part), numba.uint32, numba.uint64
    apart = form == APART
    # By which the imaginary parts are multiplied in the first line, and in the second.
    first_sign, second_sign = (part.type(1), part.type(-1)) if form == ROWS else (part.type(-1), part.type(1))

    def write_lines(source: Any, target: Any) -> None:
        held = cuda.local.array(EACH, number)
        width = u32(source.shape[1])
        across = u32((width + u32(THREADS * EACH - 1)) // u32(THREADS * EACH))
        block, thread = u32(cuda.blockIdx.x), u32(cuda.threadIdx.x)
        line, begin = u32(block // across), u32(block % across * u32(THREADS * EACH))
        for i in range(EACH):
            place = u32(begin + u32(i * THREADS) + thread)
            held[i] = number(0)
            if place < width:
                held[i] = source[u64(line), u64(place)]
        for i in range(EACH):
            place = u32(begin + u32(i * THREADS) + thread)
            if place >= width:
                continue
            imaginary, value = u32(place & u32(1)), held[i]
            if apart:
                target[u64(u32(2) * line + imaginary), u64(place >> u32(1))] = value
            elif imaginary:
                target[u64(u32(2) * line), u64(place)] = first_sign * value
                target[u64(u32(2) * line + u32(1)), u64(place - u32(1))] = second_sign * value
            else:
                target[u64(u32(2) * line), u64(place)] = value
                target[u64(u32(2) * line + u32(1)), u64(place + u32(1))] = value

    return write_lines


def _signature(_: str, part: np.dtype) -> Any:
    strided = numba.types.Array(numba.from_dtype(part), 2, "A")
    return numba.void(strided, strided)


PASS = Launcher(pass_function, _signature)


class Cut(NamedTuple):
    """How much of each side is multiplied at once."""

    rows: int
    columns: int
    depth: int

    def pieces(
        self, m: int, n: int, k: int
    ) -> Iterator[tuple[tuple[int, int], tuple[int, int], tuple[int, int]]]:
        """(first, length) of each side, of k and n before m: what is written of B serves all rows."""
        for k_part, n_part, m_part in itertools.product(
            _parts(k, self.depth), _parts(n, self.columns), _parts(m, self.rows)
        ):
            yield m_part, n_part, k_part


def _parts(length: int, most: int) -> list[tuple[int, int]]:
    return [(first, min(most, length - first)) for first in range(0, length, most)]


def _even(length: int, most: int, unit: int) -> int:
    """A length of parts, at most ``most`` where that is a unit or more, all about equally long."""
    return min(length, round_up(ceil_div(length, ceil_div(length, max(most, unit))), unit))


def cut(m: int, n: int, k: int, part: np.dtype, *, copies_a: bool) -> Cut:
    """How a product is cut. part: what the complex numbers consist of. copies_a: whether A is written anew."""
    depth = _even(k, PANEL_DEPTH, DEPTH_UNIT)
    columns = _even(n, COPY_NBYTES // (4 * depth * part.itemsize), SIDE_UNIT)
    rows = _even(m, COPY_NBYTES // (2 * depth * part.itemsize), SIDE_UNIT) if copies_a else m
    return Cut(rows, columns, depth)


def most_nbytes(m: int, n: int, k: int, dtype: np.dtype) -> int:
    """An upper bound for what is written anew of a product of these sides or smaller ones, whatever its layouts; beside
    what real products of `real_sides` take."""
    part = PARTS[dtype]
    depth = min(k, PANEL_DEPTH) + DEPTH_UNIT
    of_b = 4 * depth * (max(m, n) + SIDE_UNIT) * part.itemsize
    of_a = 2 * depth * (max(m, n) + SIDE_UNIT) * part.itemsize
    slack = 4 * depth * SIDE_UNIT * part.itemsize  # parts are rounded up
    return min(of_b, COPY_NBYTES + slack) + min(of_a, COPY_NBYTES + slack) + 2 * LINE_NBYTES


def real_sides(m: int, n: int, k: int) -> tuple[int, int, int]:
    """Sides that no real product of a complex one exceeds, whichever of its factors is written anew."""
    return 2 * m, 2 * n, 2 * min(k, PANEL_DEPTH + DEPTH_UNIT)


class _Sides(NamedTuple):
    """A product whose C has contiguous rows."""

    a: Any
    b: Any
    c: Any
    copies_a: bool
    b_by_rows: bool


def _oriented(a: Any, b: Any, c: Any) -> _Sides | None:
    """The product, or its transpose where C has contiguous columns; None where not all lines are contiguous. Of
    operands or matrices, whose strides are in elements or bytes."""
    unit = 1 if isinstance(c, Operand) else c.dtype.itemsize
    if c.strides[1] != unit:
        a, b, c = _transposed(b), _transposed(a), _transposed(c)
    contiguous = c.strides[1] == unit and all(unit in each.strides for each in (a, b))
    if not contiguous or min(*a.strides, *b.strides, *c.strides) <= 0:
        return None
    return _Sides(a, b, c, a.strides[1] != unit, b.strides[1] == unit)


def _transposed(each: Any) -> Any:
    if not isinstance(each, Operand):
        return each.transposed()
    return Operand(each.columns, each.rows, each.dtype, each.strides[::-1], each.alignment)


def supports(problem: Problem) -> bool:
    """complex64 or complex128 throughout, by contiguous lines, the caller said ``precision="split"``, and a kernel of
    real numbers takes every piece."""
    every = (problem.a, problem.b, problem.c)
    part = PARTS.get(problem.c.dtype)
    if problem.precision != "split" or part is None or any(each.dtype != problem.c.dtype for each in every):
        return False
    sides = _oriented(*every)
    if sides is None or problem.capability is None:
        return False
    lengths = sides.c.rows, sides.c.columns, sides.a.columns
    pieces = cut(*lengths, part, copies_a=sides.copies_a)
    distinct = [
        {length for _, length in _parts(whole, most)} for whole, most in zip(lengths, pieces, strict=True)
    ]
    kinds = sides.copies_a, sides.b_by_rows, problem.capability
    return all(
        _real_kernel(part, rows, columns, depth, *kinds)
        for rows, columns, depth in itertools.product(*distinct)
    )


def _real_kernel(
    part: np.dtype, m: int, n: int, k: int, copies_a: bool, b_by_rows: bool, capable: Capability | None
) -> GemmKernel | None:
    """The kernel that multiplies a piece of so many complex numbers as real ones."""
    width_a, width_b = _width(m if copies_a else 2 * k, part), _width(2 * n if b_by_rows else 2 * k, part)
    of_a = Operand(m, 2 * k, part, (1, width_a) if copies_a else (width_a, 1), part.itemsize)
    of_b = Operand(2 * k, 2 * n, part, (width_b, 1) if b_by_rows else (1, width_b), part.itemsize)
    of_c = Operand(m, 2 * n, part, (2 * n, 1), part.itemsize)
    real = Problem(of_a, of_b, of_c, True, "split", capable)
    return next((kernel for kernel in REAL if kernel.supports(real)), None)


def _width(length: int, part: np.dtype) -> int:
    """Elements from one line that is written anew to the next."""
    return round_up(length * part.itemsize, LINE_NBYTES) // part.itemsize


def launch(a: Any, b: Any, c: Any, accumulate: bool, stream: Any) -> None:
    """See ``GemmKernel.launch``."""
    part = PARTS[c.dtype]
    sides = _oriented(matrix(a), matrix(b), matrix(c))
    assert sides is not None, "supports has seen the strides"
    (m, n), k = sides.c.shape, sides.a.shape[1]
    how = cut(m, n, k, part, copies_a=sides.copies_a)
    kinds = sides.copies_a, sides.b_by_rows, capability(current_device())
    lines, width = (how.depth, 2 * how.columns) if sides.b_by_rows else (how.columns, 2 * how.depth)
    of_b = 2 * lines * _width(width, part) * part.itemsize
    of_a = 2 * how.depth * _width(how.rows, part) * part.itemsize if sides.copies_a else 0
    with borrowed(of_a + of_b, stream, OPERANDS) as place:
        written: Any = None
        for rows, columns, depth in how.pieces(m, n, k):
            kernel = _real_kernel(part, rows[1], columns[1], depth[1], *kinds)
            assert kernel is not None, "supports has asked for every piece"
            if written != (columns, depth):
                form = ROWS if sides.b_by_rows else COLUMNS
                real_b = _written(sides.b.slice(*depth, *columns), form, part, place, stream)
                written = columns, depth
            piece = sides.a.slice(*rows, *depth)
            real_a = (
                _written(piece, APART, part, place + of_b, stream)
                if sides.copies_a
                else _as_real(piece, part)
            )
            real_c = _as_real(sides.c.slice(*rows, *columns), part)
            kernel.launch(real_a, real_b, real_c, accumulate or depth[0] > 0, stream)


def _as_real(piece: Matrix, part: np.dtype) -> Matrix:
    """Complex numbers with contiguous rows as the real ones that they consist of."""
    rows, columns = piece.shape
    return Matrix(piece.pointer, (rows, 2 * columns), (piece.strides[0], part.itemsize), part)


def _written(piece: Matrix, form: str, part: np.dtype, place: Any, stream: Any) -> Matrix:
    """A piece, written anew at an address: of B, or of A where columns are contiguous."""
    by_rows = form == ROWS
    source = _as_real(piece if by_rows else piece.transposed(), part)
    lines, width = source.shape
    length = width // 2 if form == APART else width
    pitch = _width(length, part) * part.itemsize
    target = Matrix(place, (2 * lines, length), (pitch, part.itemsize), part)
    PASS.enqueue((form, part), lines * ceil_div(width, THREADS * EACH), THREADS, stream, source, target)
    return target if by_rows else target.transposed()


def variants() -> Iterable[Variant]:
    """The passes; the products are those of real numbers."""
    for form, part in itertools.product((ROWS, COLUMNS, APART), PARTS.values()):
        yield PASS.variant(f"complex numbers to {form} of {part}", form, part)


SPLIT_COMPLEX = GemmKernel(
    name="split-complex-tensor_core",
    summary="complex numbers as real ones, twice as deep and twice as wide, by the kernels of split precision",
    supports=supports,
    launch=launch,
    variants=variants,
)
