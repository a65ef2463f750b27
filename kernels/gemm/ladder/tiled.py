"""The second rung: tiles of A and B staged in shared memory. Any shape, any dtype, any strides.

It is the portable sibling of every faster kernel: it runs in the simulator, on any GPU, and serves whatever
the others do not take. The method is the textbook's (CUDA C++ Programming Guide, "Shared Memory"; Volkov,
"Better performance at lower occupancy", 2010, for several outputs a thread).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numba import cuda

from tilewright.kernels.elements import conversion, numba_type, reading
from tilewright.kernels.gemm.base import (
    ELEMENTS,
    GemmKernel,
    Problem,
    Variant,
    compute_dtype,
    strided_signature,
)
from tilewright.kernels.gpu.compiled import compile_kernel
from tilewright.kernels.gpu.device_array import transposed
from tilewright.kernels.gpu.launch import enqueue
from tilewright.kernels.numbers import ceil_div


@dataclass(frozen=True)
class Tile:
    """The shape of the work of one block: a square of C, walked over k in steps of the same side."""

    side: int = 32
    """A warp's width, so that one warp loads or reads one line of a tile."""
    rows_per_thread: int = 8
    """Elements of C that a thread adds up: each element of B read from shared memory serves that many."""

    @property
    def lines(self) -> int:
        """Threads along a column of the tile."""
        return self.side // self.rows_per_thread

    @property
    def block(self) -> tuple[int, int]:
        return (self.side, self.lines)


TILE = Tile()


@functools.cache
def tile_function(
    a_dtype: np.dtype, b_dtype: np.dtype, result: np.dtype, tile: Tile, a_by_rows: bool, b_by_rows: bool
) -> Any:
    """The kernel's plain function, specialised at compile time.

    ``c (+)= a b`` for a (m × k), b (k × n), c (m × n, written), of any strides and dtypes that cast to
    ``result``, c's. Elements are converted to the compute type as they enter shared memory, so mixed dtypes
    need no copy. ``a_by_rows`` says that the neighbours in memory are those of a row, ``b_by_rows`` likewise,
    and decides which way a warp walks a tile while loading: along memory, so that its 32 loads coalesce.

    Grid: one block a tile of C, one-dimensional (a second grid axis ends at 65,535 blocks), tiles of a row of
    C first. Block: ``tile.block``. Shared memory: two tiles of side × (side + 1) elements. Ragged edges: what
    lies outside A or B enters as zero, what lies outside C is not written; k = 0 gives zeros.
    """
    side, rows, lines = tile.side, tile.rows_per_thread, tile.lines
    # One column more than used: a tile filled by columns then steps side + 1 elements, through all banks.
    padded = side + 1
    compute = compute_dtype(result)
    kind = numba_type(compute)
    number, element = conversion(compute), conversion(result)
    from_a, from_b, from_c = (reading(dtype, compute) for dtype in (a_dtype, b_dtype, result))
    index = numba.uint64  # unsigned: Numba would test a signed index for wrap-around at every access

    def tiled_kernel(a: Any, b: Any, c: Any, accumulate: bool) -> None:
        tile_a = cuda.shared.array((side, padded), kind)
        tile_b = cuda.shared.array((side, padded), kind)
        total = cuda.local.array(rows, kind)  # constant size, unrolled loops: registers

        m, n = c.shape
        k = a.shape[1]
        x = cuda.threadIdx.x
        y = cuda.threadIdx.y
        across = (n + side - 1) // side
        row0 = (cuda.blockIdx.x // across) * side
        column0 = (cuda.blockIdx.x % across) * side

        for r in range(rows):
            total[r] = number(0)

        for k0 in range(0, k, side):
            for r in range(rows):
                line = y + r * lines
                if a_by_rows:
                    if row0 + line < m and k0 + x < k:
                        tile_a[line, x] = from_a(a[index(row0 + line), index(k0 + x)])
                    else:
                        tile_a[line, x] = number(0)
                else:
                    if row0 + x < m and k0 + line < k:
                        tile_a[x, line] = from_a(a[index(row0 + x), index(k0 + line)])
                    else:
                        tile_a[x, line] = number(0)
                if b_by_rows:
                    if k0 + line < k and column0 + x < n:
                        tile_b[line, x] = from_b(b[index(k0 + line), index(column0 + x)])
                    else:
                        tile_b[line, x] = number(0)
                else:
                    if k0 + x < k and column0 + line < n:
                        tile_b[x, line] = from_b(b[index(k0 + x), index(column0 + line)])
                    else:
                        tile_b[x, line] = number(0)
            cuda.syncthreads()  # both tiles are complete before any thread reads them

            for p in range(side):
                # A warp reads 32 neighbours of B's line: no conflict; and one element of A: a broadcast.
                right = tile_b[p, x]
                for r in range(rows):
                    # Narrowed at once: Numba would widen 32-bit integers to 64.
                    total[r] = number(total[r] + tile_a[y + r * lines, p] * right)
            cuda.syncthreads()  # every thread has read these tiles before the next ones overwrite them

        if column0 + x < n:
            for r in range(rows):
                row = row0 + y + r * lines
                if row < m:
                    if accumulate:
                        total[r] = number(total[r] + from_c(c[index(row), index(column0 + x)]))
                    c[index(row), index(column0 + x)] = element(total[r])

    return tiled_kernel


@functools.cache
def _kernel(a: np.dtype, b: np.dtype, c: np.dtype, tile: Tile, a_by_rows: bool, b_by_rows: bool) -> Any:
    function = tile_function(a, b, c, tile, a_by_rows, b_by_rows)
    return compile_kernel(function, strided_signature(a, b, c))


def _by_rows(array: Any) -> bool:
    """Whether a step along a row is the shorter step in memory."""
    return abs(array.strides[1]) <= abs(array.strides[0])


def supports(problem: Problem) -> bool:
    return problem.c.dtype in ELEMENTS


def launch(a: Any, b: Any, c: Any, accumulate: bool, stream: Any) -> None:
    """Enqueue ``c (+)= a b``. k = 0 is allowed here: it gives zeros."""
    m, n = c.shape
    if not m * n:
        return
    if not _by_rows(c) and m > 1:
        # The transposed product, so that a warp's 32 stores are neighbours in a column-major C too.
        a, b, c, m, n = transposed(b), transposed(a), transposed(c), n, m
    tile = TILE
    kernel = _kernel(a.dtype, b.dtype, c.dtype, tile, _by_rows(a), _by_rows(b))
    blocks = ceil_div(m, tile.side) * ceil_div(n, tile.side)
    enqueue(kernel, blocks, tile.block, stream, 0, a, b, c, accumulate)


def variants() -> Iterable[Variant]:
    for dtype in ELEMENTS:
        # How a tile is loaded does not depend on the dtype: both ways, for one dtype only.
        for a_by_rows, b_by_rows in ((True, True), (False, False))[: 2 if dtype == np.float32 else 1]:
            yield Variant(
                f"tiled {dtype} a_by_rows={a_by_rows} b_by_rows={b_by_rows}",
                tile_function(dtype, dtype, dtype, TILE, a_by_rows, b_by_rows),
                strided_signature(dtype, dtype, dtype),
            )


TILED = GemmKernel(
    name="tiled",
    summary="tiles of A and B in shared memory, eight rows of C a thread; any shape, dtype and strides",
    supports=supports,
    launch=launch,
    portable=True,
    recordable=True,
    variants=variants,
)
