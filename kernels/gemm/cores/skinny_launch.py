"""Products with a thin side (m or n up to 64): as fast as the large operand can be read, for every float
dtype, and integers of 32 and 64 bits, which wrap.

With n <= 64 columns, A (m × k) is read once and nearly all that is moved is A: below some n (about 20 for
float32 on an H200) memory is the limit, above it the arithmetic. So the design is one for streaming,
through shared memory (`tilewright.kernels.gemm.cores.skinny`) or, for a single column, straight into registers
(`tilewright.kernels.gemm.cores.matvec`).

Where m / block rows gives too few blocks to fill the GPU (matrix-vector products, and Gram matrices, where m
and n are both small and k is huge), k is cut into ranges. Each range writes its partial product to a
workspace, and a second kernel adds them up in their order, so that the answer is the same bits every time.

m thin is the same with the transposed product, C' = B' A'. float64 and complex128 with more than a few
columns go to the narrow tiles of the tensor-core kernel; there k is dealt out slab by slab instead of in ranges. That
kernel writes C by rows. So where C's long side is contiguous, as in a short, wide C by rows, the tiles are short and
wide instead of tall and narrow, and C is written where it lies.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from tilewright.kernels.gemm.base import GemmKernel, Problem, Variant
from tilewright.kernels.gemm.cores import matvec, skinny
from tilewright.kernels.gemm.cores.partial_sums import enqueue_sum
from tilewright.kernels.gemm.cores.repitch import Matrix, as_unsigned, matrix
from tilewright.kernels.gemm.cores.skinny import (
    CHUNK_NBYTES,
    LINE_CHUNKS,
    LINE_NBYTES,
    Layout,
    Tile,
    shared_nbytes,
)
from tilewright.kernels.gemm.cores.warp_tiled_cut import MAX_PARTIAL_NBYTES
from tilewright.kernels.gemm.cores.warp_tiled_cut import supports as tiled_supports
from tilewright.kernels.gemm.scratch import borrowed
from tilewright.kernels.gemm.tensor import double_mma as tensor
from tilewright.kernels.gemm.tensor import double_mma_launch as tensor_launch
from tilewright.kernels.gpu.compiled import multiprocessors
from tilewright.kernels.gpu.device_choice import capability, current_device
from tilewright.kernels.gpu.launch import enqueue
from tilewright.kernels.numbers import WARP, ceil_div, power_of_two

WIDEST = 64
"""The thin side's greatest length."""
THIN_STRIPS = 32
"""Strips of C of up to this many rows or columns go to the kernel of thin products, where it takes the dtype: those of
`double_tensor_core` too. How wide a strip is cut off here, for whichever kernel, is `warp_tiled_cut.STRIP`."""
INTEGERS = tuple(np.dtype(name) for name in ("uint32", "uint64"))
"""Signed ones have the same sums and products, bit for bit."""
DTYPES = matvec.DTYPES + INTEGERS

MAX_SPLITS = 1024
FILL_STAGES = 6
"""What starting and ending a block costs, in stages of k."""
SUM_STAGES = 4
"""What the launch that adds up split products costs, in the same unit: where k is short, more than splitting saves."""
SHORT_ROWS = 64
"""Rows of a block where m is no larger."""
LONG_ROWS = 256
MAX_THREADS = 256


def choose_tile(dtype: np.dtype, m: int, n: int, a_along_k: bool) -> Tile:
    """The tile for m rows and n <= WIDEST columns: n rounded up to a power of two, so that little is
    wasted."""
    parts = 2 if dtype.kind == "c" else 1
    padded = power_of_two(n)
    columns = min(padded, 8 // parts)
    least_rows = 1 if a_along_k else CHUNK_NBYTES // dtype.itemsize
    single = dtype.itemsize // parts == 4
    rows = max(8 if single and padded >= 16 else 4, least_rows)
    if a_along_k and padded <= 2:
        rows = 2  # little arithmetic: more threads, to issue the copies
    height = SHORT_ROWS if m <= SHORT_ROWS else LONG_ROWS
    if max(m, n) <= SHORT_ROWS // 2:
        # Rows beyond m would be multiplied for nothing. Threads down share a swizzle by eights.
        height = max(LINE_CHUNKS * least_rows, power_of_two(max(m, n)))
        rows = min(rows, height // LINE_CHUNKS)
        while columns > 1 and height // rows * (padded // columns) < WARP:
            columns //= 2
    while height // rows * (padded // columns) < WARP:
        if columns > 1:
            columns //= 2
        elif rows > least_rows:
            rows //= 2
        else:
            height *= 2
    while height // rows * (padded // columns) > MAX_THREADS:
        height //= 2
    return Tile(m=height, n=padded, rows=rows, columns=columns)


def choose_splits(blocks: int, depths: int, slots: int, partial_nbytes: int) -> int:
    """Into how many ranges to cut k (``depths`` stages): the number that keeps the GPU busy for the shortest
    time.

    There are ``blocks`` without cutting, ``slots`` run at once, and each range costs ``partial_nbytes``. Time is
    counted in stages of a block: waves of blocks times the stages of each, the start of each, and the sum.
    """
    most = max(1, min(MAX_SPLITS, depths, MAX_PARTIAL_NBYTES // partial_nbytes))

    def stages(splits: int) -> int:
        summed = SUM_STAGES if splits > 1 else 0
        return ceil_div(blocks * splits, slots) * (ceil_div(depths, splits) + FILL_STAGES) + summed

    return min(range(1, most + 1), key=stages)


TENSOR_COLUMNS = {np.dtype(np.float64): 2, np.dtype(np.complex128): 0}
"""Beyond this many columns the tensor cores take over from the ordinary cores."""
SINGLE_COLUMNS = 16
"""Beyond this many columns, products on the ordinary cores (float32, complex64, integers) are limited by arithmetic,
and the warp-tiled kernel is faster."""
SHORT_SIDE = 32
"""Where neither side is longer, that kernel's tiles are too large for C, and this one is faster again."""


def tensor_tile(parts: int, m: int, n: int) -> tensor.Tile:
    """A narrow tile of the tensor-core kernel, for m rows and n <= WIDEST columns."""
    padded = max(16, power_of_two(n))
    if parts == 1 and m <= SHORT_ROWS:
        # Rows beyond m would be multiplied for nothing, and arithmetic is the limit here. Deep stages keep all of a
        # block's memory busy with copies.
        if padded == WIDEST:
            return tensor.Tile(m=64, n=64, depth=32, warps=(2, 2), step=8, stages=3, blocks=2)
        stages = 4 if padded == 32 else 5
        return tensor.Tile(m=64, n=padded, depth=32, warps=(4, 1), step=8, stages=stages, blocks=2)
    # Tall warp tiles, so that a warp reads no row of A that another reads too; complex sums take twice the
    # registers, so from 32 columns on two warps share the columns.
    if parts == 1:
        step = 4 if padded == WIDEST else 8  # 64 sums a thread leave no room for deeper fragments
        return tensor.Tile(m=128, n=padded, depth=16, warps=(4, 1), step=step, stages=4, blocks=2)
    warps = (2, 2) if padded >= 32 else (4, 1)
    return tensor.Tile(m=64, n=padded, depth=16, warps=warps, step=4, stages=4, blocks=2)


def turned(tile: tensor.Tile, parts: int) -> tensor.Tile:
    """The tile for the transposed product, with the same sums: as many rows as the other has columns."""
    # Fragments of complex numbers are read twice from B, so its columns are what warps do not share.
    warps = tile.warps[::-1] if parts == 1 else (1, tile.warps[0] * tile.warps[1])
    return replace(tile, m=tile.n, n=tile.m, warps=warps)


SHARED_NBYTES = 227 * 1024
"""What the blocks of a multiprocessor share, on Hopper."""
RESERVED_NBYTES = 1024
"""What the system takes of it for each block."""


def _lies_along_k(a: Matrix) -> bool:
    """Whether A's rows are contiguous; for a single row or column its other side decides."""
    k = a.shape[1]
    by_rows = a.strides[1] == a.dtype.itemsize or k == 1
    return by_rows and not (k == 1 and a.strides[0] == a.dtype.itemsize)


def _layout(a: Matrix, b: Matrix, tile: Tile) -> Layout:
    n, itemsize, along_k = b.shape[1], a.dtype.itemsize, _lies_along_k(a)
    b_along_k = abs(b.strides[0]) <= abs(b.strides[1])
    aligned = b.pointer % CHUNK_NBYTES == b.strides[0] % CHUNK_NBYTES == n * itemsize % CHUNK_NBYTES == 0
    return Layout(
        dtype=a.dtype.name,
        a_along_k=along_k,
        a_whole=a.whole(along_k),
        b_along_k=b_along_k,
        b_whole=aligned and not b_along_k and b.strides[1] == itemsize and tile.n * itemsize >= CHUNK_NBYTES,
    )


def _enqueue_tile(
    a: Matrix, b: Matrix, c: Matrix, accumulate: bool, stream: Any, tile: Tile, splits: int, split_k: int
) -> None:
    """Enqueue ``c (+)= a b``; range r of k goes to rows r m to (r + 1) m of ``c``."""
    (m, k), n = a.shape, b.shape[1]
    layout = _layout(a, b, tile)
    enqueue(
        skinny.compiled(tile, layout),
        (ceil_div(m, tile.m), splits),
        tile.threads,
        stream,
        shared_nbytes(tile, layout),
        a.pointer,
        a.lines(layout.a_along_k)[0],
        b.pointer,
        *b.strides,
        c.pointer,
        *c.strides,
        m * c.strides[0],
        m,
        n,
        k,
        split_k,
        accumulate,
    )


@functools.lru_cache(maxsize=4096)
def _cut(
    dtype: np.dtype, m: int, n: int, k: int, a_along_k: bool, on_tensor_cores: bool, multiprocessors: int
) -> tuple[Any, int, int]:
    """The tile, the ranges of k and the length of each; on the tensor cores, which deal k out, only the number of
    ranges counts."""
    parts = 2 if dtype.kind == "c" else 1
    tile: Any
    if on_tensor_cores:
        tile = tensor_tile(parts, m, n)
        depth, nbytes = tile.depth // parts, tile.shared_nbytes(parts)
    else:
        tile = choose_tile(dtype, m, n, a_along_k)
        depth = LINE_NBYTES // dtype.itemsize
        nbytes = shared_nbytes(tile, Layout(dtype.name, a_along_k, True, True))
    depths = ceil_div(k, depth)
    slots = multiprocessors * (SHARED_NBYTES // (nbytes + RESERVED_NBYTES))
    splits = choose_splits(ceil_div(m, tile.m), depths, slots, m * n * dtype.itemsize)
    split_k = ceil_div(depths, splits) * depth
    return tile, ceil_div(k, split_k), split_k


def _multiply_vector(a: Matrix, b: Matrix, c: Matrix, accumulate: bool, stream: Any) -> None:
    """Enqueue ``c (+)= a b`` for a single column."""
    (m, k), dtype, itemsize = a.shape, a.dtype, a.dtype.itemsize
    along_k = _lies_along_k(a)
    layout = matvec.Layout(dtype.name, along_k, a.whole(along_k))
    kernel = matvec.compiled(layout)
    most = min(MAX_SPLITS, MAX_PARTIAL_NBYTES // (m * itemsize))
    splits, split_k = matvec.split(layout, m, k, multiprocessors(current_device()), most)
    grid = (ceil_div(m, layout.block_rows), splits)

    pitch, _, _ = a.lines(along_k)

    def multiply(out: int, step: int, add: bool) -> None:
        places = (a.pointer, pitch, b.pointer, b.strides[0], out, step, m * step)
        enqueue(kernel, grid, matvec.WARPS * WARP, stream, 0, *places, m, k, split_k, add)

    if splits == 1:
        multiply(c.pointer, c.strides[0], accumulate)
        return
    with borrowed(splits * m * itemsize, stream) as scratch:
        multiply(scratch, itemsize, False)
        partial = Matrix(scratch, (splits * m, 1), (itemsize, itemsize), dtype)
        enqueue_sum(partial, c, splits, accumulate, stream)


def launch(a: Any, b: Any, c: Any, accumulate: bool, stream: Any) -> None:
    """Enqueue ``c (+)= a b`` for m or n up to `WIDEST`."""
    left, right, target = matrix(a), matrix(b), matrix(c)
    if target.shape[0] < target.shape[1]:
        left, right, target = right.transposed(), left.transposed(), target.transposed()
    (m, n), k, dtype = target.shape, left.shape[1], target.dtype
    itemsize = dtype.itemsize
    if n == 1 and dtype in matvec.DTYPES and matvec.preferred(dtype, _lies_along_k(left), k):
        _multiply_vector(left, right, target, accumulate, stream)
        return
    on_tensor_cores = n > TENSOR_COLUMNS.get(dtype, WIDEST) and _tensor_accepts(left, right)
    tile, splits, split_k = _cut(
        dtype,
        m,
        n,
        k,
        _lies_along_k(left),
        on_tensor_cores,
        multiprocessors(current_device()),
    )

    by_rows = target.strides[1] == itemsize or n == 1
    if on_tensor_cores and not by_rows and target.strides[0] == itemsize:
        tile = turned(tile, itemsize // tensor.ITEM)
        left, right, target = right.transposed(), left.transposed(), target.transposed()
        m, n, by_rows = n, m, True

    def multiply(rows: Matrix, out: Matrix, add: bool) -> None:
        if on_tensor_cores:
            tensor_launch.enqueue_tile(rows, right, out, add, stream, tile, splits)
        else:
            _enqueue_tile(rows, right, out, add, stream, tile, splits, split_k)

    if splits == 1 and (by_rows or not on_tensor_cores):
        multiply(left, target, accumulate)
        return
    # Partial products are few enough for all rows at once. With one, and neither side of C contiguous, they may not be.
    most = m if splits > 1 else max(1, MAX_PARTIAL_NBYTES // (n * itemsize))
    for first in range(0, m, most):
        length = min(most, m - first)
        with borrowed(splits * length * n * itemsize, stream) as scratch:
            partial = Matrix(scratch, (splits * length, n), (n * itemsize, itemsize), dtype)
            multiply(left.slice(first, length, 0, k), partial.slice(0, length, 0, n), False)
            enqueue_sum(partial, target.slice(first, length, 0, n), splits, accumulate, stream)


def most_nbytes(m: int, n: int, k: int, dtype: np.dtype) -> int:
    """An upper bound for the scratch memory of a product of these sides or smaller ones, or of a strip of one up to
    `WIDEST` wide, whatever its layouts and the GPU."""
    if as_unsigned(dtype) not in DTYPES:
        return 0
    splits = min(MAX_SPLITS, ceil_div(k, LINE_NBYTES // dtype.itemsize))
    if splits == 1 and dtype not in TENSOR_COLUMNS:
        return 0
    return min(MAX_PARTIAL_NBYTES, splits * min(m, n, WIDEST) * max(m, n) * dtype.itemsize)


def _tensor_accepts(a: Matrix, b: Matrix) -> bool:
    if capability(current_device()) not in tensor_launch.CAPABILITIES:
        return False
    return all(
        tensor_launch.contiguous(x.strides, x.shape[0], x.shape[1], x.dtype.itemsize) is not None
        and (x.dtype.kind != "c" or x.pointer % x.dtype.itemsize == 0)
        for x in (a, b)
    )


def supports(problem: Problem) -> bool:
    """One dtype throughout, m or n up to `WIDEST` and the operand across it contiguous one way."""
    a, b, c = problem.a, problem.b, problem.c
    if problem.capability is None or problem.capability < (8, 0):
        return False
    if as_unsigned(c.dtype) not in DTYPES or not a.dtype == b.dtype == c.dtype:
        return False
    thin_side, long_side = sorted((c.rows, c.columns))
    ordinary = c.dtype in (np.float32, np.complex64) or c.dtype.kind in "iu"
    better_tiled = ordinary and thin_side > SINGLE_COLUMNS and long_side > SHORT_SIDE
    if thin_side > WIDEST or (better_tiled and tiled_supports(replace(problem, precision="full"))):
        return False
    large = b if c.rows < c.columns else a
    # Sides are 32-bit numbers in the kernel, with room for the last, ragged panel.
    sides = max(problem.m, problem.n, problem.k) < 2**31 - 2**16
    aligned = min(a.alignment, b.alignment) >= c.dtype.itemsize
    return sides and aligned and (large.row_major or large.column_major)


def variants() -> Iterable[Variant]:
    """Every dtype at a few widths, both layouts of A and B, with and without whole chunks."""
    yield from matvec.variants()
    for dtype in DTYPES:
        parts = 2 if dtype.kind == "c" else 1
        for n, m in ((1, 10**6), (3, WIDEST), (8, 10**6), (16, WIDEST), (64, 10**6)):
            for along_k in (True, False):
                tile = choose_tile(dtype, m, n, along_k)
                for whole in (True, False):
                    layout = Layout(dtype.name, along_k, whole, n == 8, whole and n >= 16)
                    yield Variant(
                        f"skinny {tile} {layout}",
                        skinny.kernel_function(tile, layout),
                        skinny.SIGNATURE,
                        options={"launch_bounds": (tile.threads, 1)},
                    )
        if dtype in TENSOR_COLUMNS:
            # Complex tiles are the same for any rows.
            narrow = [tensor_tile(parts, m, n) for m in (WIDEST, 10**6) for n in (16, 32, 64)]
            tiles = dict.fromkeys(narrow + [turned(tile, parts) for tile in narrow])
            for shape, along_k in itertools.product(tiles, (True, False)):
                yield Variant(
                    f"skinny tensor {shape} a_along_k={along_k}",
                    tensor.kernel_function(
                        shape, tensor.Layout(parts, along_k, not along_k, True, True, True, True, dealt=True)
                    ),
                    tensor.SIGNATURE,
                    tensor_launch.NATIVE,
                    {"launch_bounds": (shape.threads, shape.blocks)},
                )


SKINNY = GemmKernel(
    name="skinny",
    summary="m or n up to 64: the large operand streamed once through shared memory, k cut where m is short",
    supports=supports,
    launch=launch,
    recordable=True,
    variants=variants,
)
