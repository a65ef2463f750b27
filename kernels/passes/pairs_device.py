"""Forming the elements of a tile on a GPU from several sums over the pairs that are both there: the twin of NumPy's
definition in `pipeline/plan/pairs.py`, to the bit.

One pass at the speed of memory, in float64 whatever the sums are of. Every operation is rounded by itself
(`ptx/floats.py`): where a multiplication and a subtraction are one, an element and its mirror image may differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numba
import numpy as np
from numba import cuda

from tilewright.kernels.elements import conversion, numba_type
from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.passes.launcher import Launcher
from tilewright.kernels.passes.transform_device import EACH, THREADS, dealt, operations_of

CENTERED, SCALED, OWN, CONSTANT_IS_ZERO = 1, 2, 4, 8
"""Flags of a launch, as the fields of `Pairwise`."""

SUMS = tuple(np.dtype(code) for code in ("f4", "f8"))
"""Dtypes of sums, and of what they become."""


def combine_function(sums: np.dtype, stored: np.dtype) -> Any:
    """The plain function of the kernel that forms a tile: see `combine`. Grid and block as for
    `transform_device.transform_function`."""
    wide = np.dtype(np.float64)
    add, subtract, multiply = operations_of(wide)
    widen = conversion(wide)
    u64, i64, number = numba.uint64, numba.int64, numba.float64

    def combine_kernel(
        products: Any,
        counts: Any,
        left: Any,
        right: Any,
        left_squares: Any,
        right_squares: Any,
        target: Any,
        unit: Any,
        margin: Any,
        ddof: Any,
        diagonal: Any,
        flags: Any,
        width: Any,
    ) -> None:
        rows, columns = u64(products.shape[0]), u64(products.shape[1])
        lines = u64(THREADS) // u64(width)
        x, y = u64(cuda.threadIdx.x) % u64(width), u64(cuda.threadIdx.x) // u64(width)
        tall = lines * u64(EACH)
        across = (columns + u64(width) - u64(1)) // u64(width)
        pieces = (rows + tall - u64(1)) // tall * across
        piece = u64(cuda.blockIdx.x)
        while piece < pieces:
            first, column = piece // across * tall + y, piece % across * u64(width) + x
            for i in range(EACH):
                row = first + u64(i) * lines
                if row < rows and column < columns:
                    value, n = widen(products[row, column]), widen(counts[row, column])
                    divisor = subtract(n, ddof)
                    constant = False
                    if flags & CENTERED:
                        u, v = widen(left[row, column]), widen(right[row, column])
                        value = subtract(multiply(n, value), multiply(u, v))
                        if flags & SCALED:
                            p = multiply(n, widen(left_squares[row, column]))
                            q = multiply(n, widen(right_squares[row, column]))
                            a, b = subtract(p, multiply(u, u)), subtract(q, multiply(v, v))
                            most = multiply(unit, add(margin, math.sqrt(n)))
                            constant = a <= multiply(most, p) or b <= multiply(most, q)
                            divisor = number(0)
                            if a > number(0) and b > number(0):
                                divisor = multiply(math.sqrt(a), math.sqrt(b))
                        else:
                            divisor = multiply(n, divisor)
                    result = number(math.nan)
                    if divisor > number(0):
                        result = value / divisor
                    if flags & SCALED:
                        if result > number(1):
                            result = number(1)
                        if result < number(-1):
                            result = number(-1)
                        if flags & OWN and i64(row) - i64(column) == diagonal and result == result:
                            result = number(1)
                        if constant:
                            result = number(math.nan)
                            if flags & CONSTANT_IS_ZERO and n > number(0):
                                result = number(0)
                    target[row, column] = result
            piece += u64(cuda.gridDim.x)

    return combine_kernel


def combine_signature(sums: np.dtype, stored: np.dtype) -> Any:
    block = numba.types.Array(numba_type(sums), 2, "A")
    target = numba.types.Array(numba_type(stored), 2, "A")
    return numba.void(*[block] * 6, target, *[numba.float64] * 3, numba.int64, numba.int32, numba.int32)


COMBINE = Launcher(combine_function, combine_signature)


def combine(
    sums: tuple[Any, Any, Any, Any, Any, Any],
    target: Any,
    unit: float,
    margin: float,
    ddof: int,
    diagonal: int,
    flags: int,
    stream: Any,
) -> None:
    """Enqueue what `pairs.combined` says of a block.

    sums: of products, of pairs, of the left and of the right variable's numbers, and of their squares; device memory of
    float32 or float64, rows × columns of any strides; any of them stands for what the flags leave out. target: of
    float32 or float64, written; it may be where one of the sums is, of elements of the same size. unit: the last place
    of 1 in the sums' dtype. margin: `pairs.CONSTANT_MARGIN`. diagonal: row less column, in the block, of what is on C's
    diagonal, with `OWN`. An empty side does nothing.
    """
    rows, columns = target.shape
    if rows * columns == 0:
        return
    dtypes = np.dtype(sums[0].dtype), np.dtype(target.dtype)
    grid, width = dealt(rows, columns)
    arguments = *sums, target, float(unit), float(margin), float(ddof), diagonal, flags, width
    COMBINE.enqueue(dtypes, grid, THREADS, stream, *arguments)


def variants() -> Iterable[Variant]:
    """What tests compile to machine code."""
    for sums in SUMS:
        for stored in SUMS:
            yield COMBINE.variant(f"pairs of {sums} to {stored}", sums, stored)
