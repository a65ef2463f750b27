"""Transposing in place on a GPU: the twin of `transpose_host.py`.

Through shared memory, so that both reads and writes of global memory run along lines (after Ruetsch and Micikevicius,
"Optimizing Matrix Transpose in CUDA", 2009). A tile of C changes into its mirror image where it lies, so that neither a
second tile nor a second way to the files is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numba
import numpy as np
from numba import cuda

from tilewright.kernels.elements import conversion
from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.numbers import ceil_div
from tilewright.kernels.passes.launcher import Launcher

SIDE = 32
"""Side of the blocks: a warp reads and writes whole lines of one."""
LINES = 8
"""Lines of a block that its threads move at once."""
PITCH = SIDE + 1
"""A block is read along rows and written along columns: with a column more, those lie in different banks."""


def transpose_function(dtype: np.dtype) -> Any:
    """The plain function of the kernel: see `transpose`.

    Grid: ceil(rows / SIDE) times ceil(columns / SIDE). Block: SIDE × LINES. Shared memory: two blocks of SIDE × PITCH
    elements, 33 KiB at most.
    """
    number = numba.from_dtype(dtype)
    zero = conversion(np.zeros(0, dtype).real.dtype)

    if dtype.kind == "c":

        @cuda.jit(device=True, inline="always")
        def turned(value: Any, conjugate: Any) -> Any:
            return complex(value.real, -value.imag) if conjugate else value

        @cuda.jit(device=True, inline="always")
        def on_diagonal(value: Any, swap: Any) -> Any:
            return complex(value.real, -value.imag if swap else zero(0))

    else:

        @cuda.jit(device=True, inline="always")
        def turned(value: Any, conjugate: Any) -> Any:
            return value

        @cuda.jit(device=True, inline="always")
        def on_diagonal(value: Any, swap: Any) -> Any:
            return value

    def transpose_kernel(lower: Any, upper: Any, swap: Any, same: Any, conjugate: Any) -> None:
        below = cuda.shared.array((SIDE, PITCH), number)
        above = cuda.shared.array((SIDE, PITCH), number)
        rows, columns = lower.shape[0], lower.shape[1]
        across = (columns + SIDE - 1) // SIDE
        first_row = cuda.blockIdx.x // across * SIDE
        first_column = cuda.blockIdx.x % across * SIDE
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        # Blocks above the diagonal are those below it, seen from the other side. All threads of a block agree, so none
        # waits at the barrier for another.
        if not same or first_column <= first_row:
            for line in range(y, SIDE, LINES):
                i, j = first_row + line, first_column + x
                if i < rows and j < columns:
                    below[line, x] = lower[i, j]
                i, j = first_row + x, first_column + line
                if swap and i < rows and j < columns:
                    above[line, x] = upper[j, i]
            cuda.syncthreads()  # both blocks are read before any element of them is written
            for line in range(y, SIDE, LINES):
                i, j = first_row + x, first_column + line
                if i < rows and j < columns and (not same or i > j):
                    upper[j, i] = turned(below[x, line], conjugate)
                i, j = first_row + line, first_column + x
                if swap and i < rows and j < columns and (not same or i > j):
                    lower[i, j] = turned(above[x, line], conjugate)
                if same and conjugate and i == j and i < rows:
                    lower[i, i] = on_diagonal(below[line, x], swap)

    return transpose_kernel


def signature(dtype: np.dtype) -> Any:
    strided = numba.types.Array(numba.from_dtype(dtype), 2, "A")
    return numba.void(strided, strided, *[numba.types.boolean] * 3)


KERNELS = Launcher(transpose_function, signature)


def transpose(
    lower: Any, upper: Any, stream: Any, *, swap: bool, same: bool, conjugate: bool = False
) -> None:
    """Enqueue ``upper[j, i] = lower[i, j]``; with ``swap`` also ``lower[i, j] = upper[j, i]``, as it was before.

    lower: rows × columns; upper: columns × rows, written; lower is too with ``swap``. Numba device arrays of one dtype
    and any strides; the bits stay as they are. They do not overlap, or (``same``) are one square matrix, of which then
    only elements with i > j move: below the diagonal to above it.

    conjugate: of complex numbers, what is written becomes the conjugate of that, also on the diagonal with ``swap``.
    Without, the diagonal becomes real.
    """
    rows, columns = lower.shape
    if not rows or not columns:
        return
    grid = ceil_div(rows, SIDE) * ceil_div(columns, SIDE)
    KERNELS.enqueue(
        (np.dtype(lower.dtype),), grid, (SIDE, LINES), stream, lower, upper, swap, same, conjugate
    )


def variants(dtypes: Iterable[np.dtype]) -> Iterable[Variant]:
    for dtype in dtypes:
        yield KERNELS.variant(f"transpose {dtype}", dtype)
