"""The warp-tiled kernel's record, and how the parts of a product are launched."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numba
import numpy as np

from tilewright.kernels.gemm.base import GemmKernel, Variant
from tilewright.kernels.gemm.cores import partial_sums, repitch, skinny_launch
from tilewright.kernels.gemm.cores.partial_sums import enqueue_sum
from tilewright.kernels.gemm.cores.repitch import Matrix, matrix
from tilewright.kernels.gemm.cores.warp_tiled import warp_tiled_function
from tilewright.kernels.gemm.cores.warp_tiled_cut import (
    DTYPES,
    SHORT,
    Part,
    candidates,
    cut,
    supports,
)
from tilewright.kernels.gemm.cores.warp_tiling import (
    ALONG_K,
    ALONG_OUTER,
    LAYOUTS,
    VECTOR,
    Tiling,
    shared_nbytes,
    vector_elements,
)
from tilewright.kernels.gemm.scratch import borrowed
from tilewright.kernels.gpu.compiled import compile_kernel, multiprocessors
from tilewright.kernels.gpu.device_choice import current_device
from tilewright.kernels.gpu.launch import enqueue
from tilewright.kernels.numbers import ceil_div
from tilewright.kernels.ptx.memory import VECTOR_NBYTES


def layout(outer: int, outer_stride: int, k_stride: int, pointer: int, itemsize: int) -> str:
    """How an operand is read, from its extent, strides (bytes) and address. One stride is an element's."""
    if outer_stride != itemsize:
        return ALONG_K
    aligned = pointer % VECTOR_NBYTES == 0 and k_stride % VECTOR_NBYTES == 0
    return VECTOR if aligned and outer % vector_elements(itemsize) == 0 else ALONG_OUTER


def layouts(a: Matrix, b: Matrix) -> tuple[str, str]:
    itemsize = a.dtype.itemsize
    return (
        layout(a.shape[0], a.strides[0], a.strides[1], a.pointer, itemsize),
        layout(b.shape[1], b.strides[1], b.strides[0], b.pointer, itemsize),
    )


EVERYTHING = 2**40
"""A diagonal that every element lies below."""


@functools.cache
def signature(dtype: np.dtype) -> Any:
    strided = numba.types.Array(numba.from_dtype(dtype), 2, "A")
    flags = numba.boolean, numba.boolean
    return numba.void(strided, strided, strided, numba.int64, *flags, numba.int64)


@functools.cache
def _kernel(dtype: np.dtype, tiling: Tiling, a_layout: str, b_layout: str, short: bool) -> tuple[Any, int]:
    """The kernel, and its bytes of shared memory."""
    function = warp_tiled_function(dtype, tiling, a_layout, b_layout, short)
    nbytes = shared_nbytes(tiling, dtype.itemsize)
    bounds = tiling.launch_bounds
    return compile_kernel(function, signature(dtype), launch_bounds=bounds, shared_nbytes=nbytes), nbytes


def _multiply(
    a: Matrix,
    b: Matrix,
    c: Matrix,
    part: Part,
    accumulate: bool,
    stream: Any,
    ways: tuple[str, str] | None = None,
    *,
    lower: bool = False,
) -> None:
    """Enqueue one part, ``c`` being where its (or its splits') products go.

    ``ways`` are the layouts of A and B where these do not follow from their sides and strides: for padded copies.
    lower: of all of C, only what is on and below the diagonal is wanted.
    """
    m, n, itemsize, tiling = a.shape[0], b.shape[1], a.dtype.itemsize, part.tiling
    c_vectors = (
        c.pointer % VECTOR_NBYTES == 0
        and c.strides[0] % VECTOR_NBYTES == 0
        and n % vector_elements(itemsize) == 0
    )
    kernel, nbytes = _kernel(a.dtype, tiling, *(ways or layouts(a, b)), a.shape[1] < tiling.block_k)
    grid = (ceil_div(m, tiling.block_m) * ceil_div(n, tiling.block_n), 1, part.splits)
    diagonal = part.row - part.column if lower else EVERYTHING
    enqueue(
        kernel, grid, tiling.threads, stream, nbytes, a, b, c, part.depth, accumulate, c_vectors, diagonal
    )


def launch_part(
    a: Matrix, b: Matrix, c: Matrix, part: Part, accumulate: bool, stream: Any, *, lower: bool = False
) -> None:
    """Enqueue one part of ``c (+)= a b``; the matrices are the whole ones, C with contiguous rows."""
    rows, columns, target = a, b, c
    if (part.m, part.n) != c.shape:
        k = a.shape[1]
        rows, columns = a.slice(part.row, part.m, 0, k), b.slice(0, k, part.column, part.n)
        target = c.slice(part.row, part.m, part.column, part.n)
    if part.splits == 1:
        _multiply(rows, columns, target, part, accumulate, stream, lower=lower)
        return
    itemsize, lines = c.dtype.itemsize, part.splits * part.m
    with borrowed(lines * part.n * itemsize, stream) as scratch:
        partial = Matrix(scratch, (lines, part.n), (part.n * itemsize, itemsize), c.dtype)
        _multiply(rows, columns, partial, part, False, stream, lower=lower)
        enqueue_sum(partial, target, part.splits, accumulate, stream)


def _thin(part: Part, c: Matrix) -> bool:
    return (
        min(part.m, part.n) <= skinny_launch.THIN_STRIPS < max(part.m, part.n)
        and c.dtype.kind in "fc"
        and (part.m, part.n) != c.shape
    )


def _launch_thin(a: Matrix, b: Matrix, c: Matrix, part: Part, accumulate: bool, stream: Any) -> None:
    k = a.shape[1]
    skinny_launch.launch(
        a.slice(part.row, part.m, 0, k),
        b.slice(0, k, part.column, part.n),
        c.slice(part.row, part.m, part.column, part.n),
        accumulate,
        stream,
    )


def _copied(a: Matrix, b: Matrix, part: Part) -> tuple[bool, bool]:
    """Which of A (as k × m) and B are copied to aligned lines first: those whose lines across k are not aligned, where
    each element is used often enough and has four bytes. For wider elements a copy did not pay.
    """
    return tuple(  # type: ignore[return-value]
        part.splits == 1
        and used >= repitch.LEAST_SIDE
        and operand.dtype.itemsize == 4
        and layout(operand.shape[1], operand.strides[1], operand.strides[0], operand.pointer, 4)
        == ALONG_OUTER
        for operand, used in ((a, part.n), (b, part.m))
    )


def _launch_part_aligned(
    a: Matrix, b: Matrix, c: Matrix, part: Part, accumulate: bool, stream: Any, lower: bool
) -> None:
    """Enqueue one part, from aligned copies of panels of operands where that pays."""
    k = a.shape[1]
    left, right = a.slice(part.row, part.m, 0, k).transposed(), b.slice(0, k, part.column, part.n)
    copies = _copied(left, right, part)
    line_nbytes = sum(
        repitch.pitch(operand.shape[1], operand.dtype.itemsize)
        for operand, copied in zip((left, right), copies, strict=True)
        if copied
    )
    depth = repitch.panel_depth(k, line_nbytes)
    if not any(copies) or depth is None:
        launch_part(a, b, c, part, accumulate, stream, lower=lower)
        return
    target = c.slice(part.row, part.m, part.column, part.n)
    with borrowed(depth * line_nbytes, stream) as scratch:
        for first, length in repitch.panels(k, depth):
            panels, place = [], scratch
            for operand, copied in zip((left, right), copies, strict=True):
                panel = operand.slice(first, length, 0, operand.shape[1])
                if copied:
                    panel = repitch.copy(panel, place, stream)
                    place += length * panel.strides[0]
                panels.append(panel)
            rows, columns = panels[0].transposed(), panels[1]
            ways = [
                VECTOR if copied else found
                for copied, found in zip(copies, layouts(rows, columns), strict=True)
            ]
            add, layer = accumulate or first > 0, replace(part, depth=length)
            _multiply(rows, columns, target, layer, add, stream, (ways[0], ways[1]), lower=lower)


def launch(a: Any, b: Any, c: Any, accumulate: bool, stream: Any, *, lower: bool = False) -> None:
    """Enqueue ``c (+)= a b``. lower: as ``GemmKernel`` says."""
    left, right, target = matrix(a), matrix(b), matrix(c)
    if target.strides[1] != target.dtype.itemsize:
        # The transposed product: the kernel stores C by rows.
        left, right, target = right.transposed(), left.transposed(), target.transposed()
        lower = False  # it would be the upper half
    (m, k), n = left.shape, right.shape[1]
    processors = multiprocessors(current_device())
    for part in cut(m, n, k, target.dtype, layouts(left, right), processors, lower):
        if _thin(part, target):
            _launch_thin(left, right, target, part, accumulate, stream)
        else:
            _launch_part_aligned(left, right, target, part, accumulate, stream, lower)


def variants() -> Iterable[Variant]:
    yield from repitch.variants()
    for dtype in DTYPES:
        yield from partial_sums.variants(dtype)
        for a_layout in LAYOUTS:
            for b_layout in LAYOUTS:
                tilings = [(candidate.tiling, False) for candidate in candidates(dtype, a_layout, b_layout)]
                for tiling, short in [*tilings, (SHORT[dtype].tiling, True)]:
                    yield Variant(
                        f"warp-tiled {dtype} {tiling.block_m}x{tiling.block_n} {a_layout} {b_layout}"
                        + short * " short",
                        warp_tiled_function(dtype, tiling, a_layout, b_layout, short),
                        signature(dtype),
                        options={"launch_bounds": tiling.launch_bounds},
                    )


WARP_TILED = GemmKernel(
    name="warp-tiled",
    summary="warp tiles, multi-stage asynchronous copies, fragments in registers; the ordinary cores",
    supports=supports,
    launch=launch,
    recordable=True,
    halves=True,
    variants=variants,
)
