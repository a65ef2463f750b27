"""float64 and complex128 on the float64 tensor cores: which products, in which tiles, and what is left for others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tilewright.kernels.gemm.base import GemmKernel, Operand, Problem, Variant
from tilewright.kernels.gemm.cores import repitch, skinny_launch
from tilewright.kernels.gemm.cores.repitch import Matrix, matrix
from tilewright.kernels.gemm.scratch import borrowed
from tilewright.kernels.gemm.tensor.double_mma import CHUNK, ITEM, SIGNATURE, Layout, Tile, kernel_function
from tilewright.kernels.gemm.tensor.double_mma_launch import (
    CAPABILITIES,
    NATIVE,
    contiguous,
    enqueue_tile,
    fitting,
)
from tilewright.kernels.gpu.compiled import multiprocessors
from tilewright.kernels.gpu.device_choice import current_device
from tilewright.kernels.numbers import ceil_div, round_up

FLOAT64 = np.dtype(np.float64)
COMPLEX128 = np.dtype(np.complex128)

REAL_TILES = (
    Tile(m=128, n=128, depth=16, warps=(2, 4), step=8, stages=4),
    Tile(m=64, n=64, depth=16, warps=(2, 2), step=8, stages=4, blocks=2),
)
"""For float64, the largest first."""
SHORT_TILE = Tile(m=64, n=128, depth=16, warps=(2, 2), step=4, stages=3, blocks=2)
"""For float64 where k is no longer than `SHORT_K`: the other block of a multiprocessor multiplies while one fills its
pipeline, or writes."""
SHORT_K = 256
"""k = 64, 128 and 256 then run at 1.12, 1.17 and 1.10 times the rate of the largest tile, n = 16384 on an H200."""
COMPLEX_TILES = (
    Tile(m=64, n=128, depth=16, warps=(2, 4), step=4, stages=4),
    Tile(m=32, n=64, depth=16, warps=(2, 2), step=4, stages=4, blocks=2),
)
"""For complex128, the largest first."""


def choose_tile(parts: int, m: int, n: int, k: int, multiprocessors: int) -> Tile:
    """The largest tile of which there are enough to occupy every multiprocessor; else the smallest."""
    tiles = REAL_TILES if parts == 1 else COMPLEX_TILES
    if parts == 1 and k <= SHORT_K:
        tiles = (SHORT_TILE, tiles[-1])
    for tile in tiles:
        if ceil_div(m, tile.m) * ceil_div(n, tile.n) >= multiprocessors * tile.blocks:
            return tile
    return tiles[-1]


def whole_part(m: int, n: int, tile: Tile, processors: int) -> tuple[int, int]:
    """The rows and columns of C that the tiles compute; what is left are strips of up to
    `skinny_launch.THIN_STRIPS`, for the kernel of thin products, where that saves a wave.

    Tiles at the edges take as long as whole ones: n = 4097 in tiles of 128 are 1089 tiles, nine waves on 132
    multiprocessors, where 4096 take eight.
    """

    def waves(rows: int, columns: int) -> int:
        return ceil_div(ceil_div(rows, tile.m) * ceil_div(columns, tile.n), processors * tile.blocks)

    best = (m, n)
    for rows, columns in ((m, n - n % tile.n), (m - m % tile.m, n), (m - m % tile.m, n - n % tile.n)):
        thin = max(m - rows, n - columns) <= skinny_launch.THIN_STRIPS
        if thin and rows and columns and waves(rows, columns) < waves(*best):
            best = rows, columns
    return best


def _by_lines(operand: Matrix) -> tuple[Matrix, bool]:
    """The operand or its transpose, whichever has contiguous lines, and whether it is the operand itself."""
    by_rows, _ = contiguous(operand.strides, *operand.shape, operand.dtype.itemsize)  # type: ignore[misc]
    return (operand if by_rows else operand.transposed()), by_rows


def _pays_to_copy(operand: Matrix, used: int) -> bool:
    """Whether panels of an operand are copied to aligned lines first (`repitch`), each element used that often.

    complex128 never is: its elements are whole chunks.
    """
    lines, _ = _by_lines(operand)
    return operand.dtype == FLOAT64 and used >= repitch.LEAST_SIDE and not lines.whole(by_rows=True)


def _multiply(
    a: Matrix, b: Matrix, c: Matrix, accumulate: bool, stream: Any, tile: Tile, lower: bool
) -> None:
    """Enqueue ``c (+)= a b`` with a tile, from aligned copies of panels of the operands where that pays."""
    k = a.shape[1]
    copies = _pays_to_copy(a, c.shape[1]), _pays_to_copy(b, c.shape[0])
    # Copies along k are padded to whole chunks: k is rounded up, so that the scratch memory has room for that too.
    k_nbytes = sum(side * ITEM for side, copied in zip(c.shape, copies, strict=True) if copied)
    k_nbytes += CHUNK * ITEM if any(copies) else 0
    depth = repitch.panel_depth(round_up(k, CHUNK), k_nbytes)
    if depth is None:
        enqueue_tile(a, b, c, accumulate, stream, tile, lower=lower)
        return
    with borrowed(depth * k_nbytes, stream) as scratch:
        for first, length in repitch.panels(k, depth):
            panels, place = [], scratch
            for panel, copied in (
                (a.slice(0, a.shape[0], first, length), copies[0]),
                (b.slice(first, length, 0, b.shape[1]), copies[1]),
            ):
                if copied:
                    lines, by_rows = _by_lines(panel)
                    lines = repitch.copy(lines, place, stream)
                    place += lines.shape[0] * lines.strides[0]
                    panels.append(lines if by_rows else lines.transposed())
                else:
                    panels.append(panel)
            add = accumulate or first > 0
            enqueue_tile(panels[0], panels[1], c, add, stream, tile, padded=copies, lower=lower)


def launch(a: Any, b: Any, c: Any, accumulate: bool, stream: Any, *, lower: bool = False) -> None:
    """Enqueue ``c (+)= a b``. lower: as ``GemmKernel`` says."""
    left, right, target = matrix(a), matrix(b), matrix(c)
    if target.strides[1] != target.dtype.itemsize and target.shape[1] > 1:
        left, right, target = right.transposed(), left.transposed(), target.transposed()
        lower = False  # it would be the upper half
    (m, k), n, processors = left.shape, target.shape[1], multiprocessors(current_device())
    tile = choose_tile(target.dtype.itemsize // ITEM, m, n, k, processors)
    rows, columns = whole_part(m, n, tile, processors)
    if (rows, columns) == (m, n):
        _multiply(left, right, target, accumulate, stream, tile, lower)
        return
    above, before = left.slice(0, rows, 0, k), right.slice(0, k, 0, columns)
    _multiply(above, before, target.slice(0, rows, 0, columns), accumulate, stream, tile, lower)
    if columns < n:
        strip = right.slice(0, k, columns, n - columns)
        skinny_launch.launch(above, strip, target.slice(0, rows, columns, n - columns), accumulate, stream)
    if rows < m:
        strip = left.slice(rows, m - rows, 0, k)
        skinny_launch.launch(strip, right, target.slice(rows, m - rows, 0, n), accumulate, stream)


def _fits(operand: Operand) -> bool:
    itemsize = operand.dtype.itemsize
    strides = (operand.strides[0] * itemsize, operand.strides[1] * itemsize)
    # complex128 is copied by whole elements; NumPy and CUDA align it to 16, but a view into a record may not
    # be.
    aligned = operand.dtype == FLOAT64 or operand.alignment >= itemsize
    return contiguous(strides, operand.rows, operand.columns, itemsize) is not None and aligned


def supports(problem: Problem) -> bool:
    """float64 or complex128 throughout, one contiguous side each, sides below 2^31, a GPU with the tensor
    cores."""
    operands = (problem.a, problem.b, problem.c)
    return (
        problem.capability in CAPABILITIES
        and problem.c.dtype in (FLOAT64, COMPLEX128)
        and all(operand.dtype == problem.c.dtype and _fits(operand) for operand in operands)
        and max(problem.m, problem.n, problem.k) < 2**31 - 2**16
    )


def variants() -> Iterable[Variant]:
    """Both dtypes, all four layouts of A and B, with and without whole chunks, for 9.0 and 8.0."""
    for parts, tiles in ((1, (*REAL_TILES, SHORT_TILE)), (2, COMPLEX_TILES)):
        for tile in tiles:
            for a_along_k in (True, False):
                for b_along_k in (True, False):
                    for whole in (True, False) if parts == 1 else (True,):
                        for native in (True, False):
                            layout = Layout(parts, a_along_k, b_along_k, whole, whole, whole, native)
                            yield Variant(
                                f"double_tensor_core {tile} {layout}",
                                kernel_function(fitting(tile, layout), layout),
                                SIGNATURE,
                                NATIVE if native else CAPABILITIES[0],
                                {"launch_bounds": (tile.threads, tile.blocks)},
                            )


DOUBLE_TENSOR_CORE = GemmKernel(
    name="double_tensor_core",
    summary="float64 and complex128 on the float64 tensor cores, fed by a pipeline of asynchronous copies",
    supports=supports,
    launch=launch,
    recordable=True,
    halves=True,
    variants=variants,
)
