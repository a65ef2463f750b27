"""Products of floats whose every sum is formed in the order of k, whatever the block, the tile or the thread.

BLAS adds up in an order that depends on the sides of a block, on where in it an element lies, and on its threads; so
two equal rows of B may come to two values. Here each element of a product is one chain of fused multiply-adds, first k
first, begun with what its target holds: the same bits however the sides and k are cut. Equal rows give equal values,
and x·y is y·x.

The loops are Goto's, as those of `tilewright.kernels.cpu.integer` are, with tiles that fill the vector registers of the
CPU that Numba compiles for. Vectors are LLVM's; on a CPU of another kind they are lowered to what it has.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import njit, uint64
from numba.core import cgutils
from numba.extending import intrinsic

from tilewright.kernels.cpu.loops import compiled, kept, on_threads, source_type
from tilewright.kernels.cpu.vector_code import (
    CACHE_LINE,
    Loop,
    broadcast,
    has_features,
    load,
    pointer,
    prefetch,
)
from tilewright.kernels.numbers import ceil_div

PREFETCH_NBYTES = 16 * CACHE_LINE
"""How far ahead in the panel of A a cache line is fetched."""


class Tiling(NamedTuple):
    """The tile of a product that the registers hold."""

    rows: int
    vectors: int
    """Across."""
    nbytes: int
    """Of a vector."""

    def columns(self, dtype: np.dtype) -> int:
        return self.vectors * self.nbytes // dtype.itemsize


@functools.cache
def tiling() -> Tiling:
    """For the CPU that Numba compiles for: of 32 registers 24 hold sums and 2 a line of B; of 16 registers 12 and 2."""
    if has_features("avx512f"):
        return Tiling(12, 2, 64)
    return Tiling(6, 2, 32 if has_features("avx") else 16)


@intrinsic
def _tile(typing_context: Any, a: Any, b: Any, steps: Any, sums: Any, stride: Any, number: Any) -> Any:
    """One tile of the product over ``steps`` >= 1 steps of k.

    a, b: addresses of a panel of each operand. sums: address of the tile in the target, of which a row lies ``stride``
    bytes behind the one before, added to. number: any of the operands' numbers, float32 or float64.
    """
    rows, across, nbytes = tiling()
    itemsize = number.bitwidth // 8
    scalar = ir.FloatType() if itemsize == 4 else ir.DoubleType()
    vector = ir.VectorType(scalar, nbytes // itemsize)
    name = f"llvm.fma.v{vector.count}f{8 * itemsize}"

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, steps, sums, stride, _ = arguments
        fused = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, (vector, vector, vector)), name
        )
        lines = [builder.add(sums, builder.mul(stride, ir.Constant(stride.type, i))) for i in range(rows)]
        held = [[load(builder, line, nbytes * v, vector, itemsize) for v in range(across)] for line in lines]
        loop = Loop(builder, steps, (a, itemsize * rows), (b, nbytes * across))
        here_a, here_b = loop.places
        before = [[loop.sum_from(value) for value in row] for row in held]
        prefetch(builder, here_a, PREFETCH_NBYTES)
        of_b = [load(builder, here_b, nbytes * v, vector, itemsize) for v in range(across)]
        totals = []
        for i, row in enumerate(before):
            of_a = broadcast(builder, load(builder, here_a, itemsize * i, scalar, itemsize), vector)
            new = [builder.call(fused, (of_a, of_b[v], row[v])) for v in range(across)]
            for total, value in zip(row, new, strict=True):
                loop.carry(total, value)
            totals.append(new)
        loop.end()
        for line, row in zip(lines, totals, strict=True):
            for v, total in enumerate(row):
                builder.store(total, pointer(builder, line, nbytes * v, vector)).align = itemsize
        return context.get_dummy_value()

    address, integer = numba.types.uint64, numba.types.int64
    return numba.types.void(address, address, integer, address, integer, number), lower


PACK_STEPS = 16
"""Steps of k that are packed at a time, so that what is written stays in the nearest cache."""


def _pack(source: Any, panels: Any, start: int, stop: int) -> None:
    """Write panels start to stop of an operand. source: (lines, k), any strides."""
    width = panels.shape[2]
    depth = panels.shape[1]
    for panel in range(start, stop):
        base = panel * width
        count = min(width, source.shape[0] - base)
        if count < width:
            panels[panel] = 0
        for first in range(0, depth, PACK_STEPS):
            last = min(first + PACK_STEPS, depth)
            for i in range(count):
                for step in range(first, last):
                    panels[panel, step, i] = source[base + i, step]


def packed(source: np.ndarray, width: int, pool: ThreadPoolExecutor | None = None) -> np.ndarray:
    """An operand in panels of ``width`` lines: (panels, k, width), lines behind the last zero.

    source: (lines, k), float32 or float64, any strides. Without a pool it is packed by this thread.
    """
    lines, depth = source.shape
    panels = np.empty((ceil_div(lines, width), depth, width), source.dtype)
    if panels.size:
        number = numba.from_dtype(source.dtype)
        pack = compiled(_pack, source_type(source.dtype), number[:, :, ::1], numba.int64, numba.int64)
        if pool is None:
            pack(source, panels, 0, len(panels))
        else:
            on_threads(pool, pack, len(panels), source, panels)
    return panels


@kept
@njit(nogil=True)
def add_product(left, right, target):  # type: ignore[no-untyped-def]
    """``target += left right``, of operands as `packed` gives them. target: (at least panels × rows, at least panels ×
    columns), with rows contiguous."""
    if left.size == 0 or right.size == 0:
        return
    steps = left.shape[1]
    stride = target.strides[0]
    number = left[0, 0, 0]
    for across in range(right.shape[0]):
        b = uint64(right[across].ctypes.data)
        for down in range(left.shape[0]):
            place = uint64(target[down * left.shape[2] :, across * right.shape[2] :].ctypes.data)
            _tile(uint64(left[down].ctypes.data), b, steps, place, stride, number)
