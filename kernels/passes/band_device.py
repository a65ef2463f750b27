"""Putting zeros for what lies outside a band of a matrix, where it lies on a GPU. The host's twin is
``pipeline.plan.band.Band.clear_outside``, which needs no kernel."""

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
"""Side of the squares that blocks of threads clear: a warp writes a line of one."""
LINES = 8
"""Lines of a square that its threads clear at once."""


def clear_function(dtype: np.dtype) -> Any:
    """The plain function of the kernel: see `clear_outside`.

    Grid: ceil(rows / SIDE) times ceil(columns / SIDE). Block: SIDE × LINES. No shared memory, no barrier: each thread
    writes elements of its own.
    """
    converted = conversion(dtype)

    def clear_kernel(matrix: Any, least: Any, most: Any) -> None:
        rows, columns = matrix.shape[0], matrix.shape[1]
        across = (columns + SIDE - 1) // SIDE
        first_row = cuda.blockIdx.x // across * SIDE
        j = cuda.blockIdx.x % across * SIDE + cuda.threadIdx.x
        for line in range(cuda.threadIdx.y, SIDE, LINES):
            i = first_row + line
            if i < rows and j < columns and (j - i < least or j - i > most):
                matrix[i, j] = converted(0)

    return clear_kernel


def signature(dtype: np.dtype) -> Any:
    strided = numba.types.Array(numba.from_dtype(dtype), 2, "A")
    return numba.void(strided, numba.types.int64, numba.types.int64)


KERNELS = Launcher(clear_function, signature)


def clear_outside(matrix: Any, least: int, most: int, stream: Any) -> None:
    """Enqueue ``matrix[i, j] = 0`` wherever j - i is below ``least`` or above ``most``.

    matrix: rows × columns, a Numba device array of any strides, written. An empty one is left alone.
    """
    rows, columns = matrix.shape
    if not rows or not columns:
        return
    grid = ceil_div(rows, SIDE) * ceil_div(columns, SIDE)
    KERNELS.enqueue((np.dtype(matrix.dtype),), grid, (SIDE, LINES), stream, matrix, least, most)


def variants(dtypes: Iterable[np.dtype]) -> Iterable[Variant]:
    for dtype in dtypes:
        yield KERNELS.variant(f"clear outside a band {dtype}", dtype)
