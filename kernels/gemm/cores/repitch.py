"""Copies of panels of an operand whose lines are not aligned to 16 bytes, with lines that are.

An operand with an odd pitch can only be copied to shared memory element by element, which costs the fast kernels a
twentieth (float32) to a fifth (float64) of their time. A copy through global memory moves each element twice, and a
large product uses it thousands of times. No operand is copied whole: the product walks k in panels as deep as scratch
memory of `SCRATCH_NBYTES` holds, and from the second on adds to C. Where panels would be so shallow that the adding
costs more than the copies save, nothing is copied.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import cuda

from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.gpu.compiled import compile_kernel
from tilewright.kernels.gpu.device_array import address
from tilewright.kernels.gpu.launch import enqueue
from tilewright.kernels.numbers import ceil_div, round_up
from tilewright.kernels.ptx.memory import VECTOR_NBYTES

SCRATCH_NBYTES = 272 * 2**20
"""Scratch memory for the panels of a product's operands: both of a float64 product with sides of 4097 just fit."""
LEAST_SIDE = 2048
"""A copy moves each element twice; it pays if the product uses each for this many lines of the other operand."""
LEAST_DEPTH = 1024
"""Panels are at least this deep, unless k is less: each but the first reads and writes C once more."""
DEPTH_UNIT = 64
"""Panels are whole slabs of k, but for a ragged last one. If that were less than a slab, it becomes one slab, and the
panel before it is ragged."""
DTYPES = tuple(np.dtype(code) for code in ("f4", "u4", "f8"))
"""Of operands for which a copy was measured to pay."""


class Matrix(NamedTuple):
    """Device memory as a matrix: what `enqueue` reads of a device array, but cheap to make and to slice."""

    pointer: int
    shape: tuple[int, int]
    strides: tuple[int, int]
    """In bytes."""
    dtype: np.dtype

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def device_ctypes_pointer(self) -> Any:
        return ctypes.c_void_p(self.pointer)

    def lines(self, by_rows: bool) -> tuple[int, int, int]:
        """``(pitch, length, count)`` of its rows, or else columns: bytes from one to the next, elements of one, and how
        many there are."""
        rows, columns = self.shape
        return (self.strides[0], columns, rows) if by_rows else (self.strides[1], rows, columns)

    def whole(self, by_rows: bool) -> bool:
        """Whether all lines, contiguous ones, come in chunks of 16 bytes: aligned, and none ends in the middle."""
        pitch, length, count = self.lines(by_rows)
        return lines_aligned(self.pointer, pitch, count) and length * self.dtype.itemsize % VECTOR_NBYTES == 0

    def transposed(self) -> Matrix:
        return Matrix(self.pointer, self.shape[::-1], self.strides[::-1], self.dtype)

    def slice(self, row: int, rows: int, column: int, columns: int) -> Matrix:
        pointer = self.pointer + row * self.strides[0] + column * self.strides[1]
        return Matrix(pointer, (rows, columns), self.strides, self.dtype)


def lines_aligned(pointer: int, pitch: int, count: int) -> bool:
    """Whether so many lines, ``pitch`` bytes from one to the next, all begin at multiples of 16 bytes."""
    return pointer % VECTOR_NBYTES == 0 and (pitch % VECTOR_NBYTES == 0 or count == 1)


def as_unsigned(dtype: np.dtype) -> np.dtype:
    """The dtype, or for signed integers the unsigned one, whose sums and products have the same bits."""
    return np.dtype(f"u{dtype.itemsize}") if dtype.kind == "i" else dtype


def matrix(array: Any) -> Matrix:
    """A device array as a matrix; integers as unsigned ones."""
    return Matrix(address(array), array.shape, array.strides, as_unsigned(array.dtype))


def as_bits(array: Any) -> Any:
    """A device array, or a matrix, as unsigned integers of its elements' size, where there are such: for what moves
    elements and does not look at them."""
    found = array if isinstance(array, Matrix) else matrix(array)
    size = found.dtype.itemsize
    dtype = np.dtype(f"u{size}") if size <= 8 else found.dtype
    return Matrix(found.pointer, found.shape, found.strides, dtype)


def pitch(length: int, itemsize: int) -> int:
    """Bytes from one line of a copy to the next."""
    return round_up(length * itemsize, VECTOR_NBYTES)


def panel_depth(k: int, nbytes: int) -> int | None:
    """The depth of panels that take ``nbytes`` for each element of k; None where it would be too little.

    Panels are as even as `DEPTH_UNIT` lets them be.
    """
    if nbytes == 0:
        return None
    affordable = SCRATCH_NBYTES // nbytes
    if k <= affordable:
        return k
    affordable = affordable // DEPTH_UNIT * DEPTH_UNIT
    if affordable < LEAST_DEPTH:
        return None
    even = ceil_div(k, ceil_div(k, affordable))
    return round_up(even, DEPTH_UNIT)


def panels(k: int, depth: int) -> Iterable[tuple[int, int]]:
    """Where panels of at most this depth begin, and how deep each is: the last at least a slab, if k is."""
    first = 0
    while first < k:
        left = k - first
        length = left - DEPTH_UNIT if depth < left < depth + DEPTH_UNIT else min(depth, left)
        yield first, length
        first += length


def most_nbytes(m: int, n: int, k: int, dtype: np.dtype) -> int:
    """An upper bound for the scratch memory of a product, whatever the layouts of its operands."""
    if np.dtype(f"u{dtype.itemsize}" if dtype.kind == "i" else dtype) not in DTYPES:
        return 0
    most = 0
    for lines, used in ((m, n), (n, m)):
        if used >= LEAST_SIDE:
            # Padded both ways: the lines may run along k or across.
            most += (pitch(lines, dtype.itemsize) + VECTOR_NBYTES) * (k + VECTOR_NBYTES // dtype.itemsize)
    return min(most, SCRATCH_NBYTES)


COPY_THREADS = 256
COPY_EACH = 8
"""Elements of a thread, all of them read before the first is written."""


def copy_function(dtype: np.dtype) -> Any:
    """The plain function of the kernel that copies a matrix to lines of another pitch.

    ``target[...] = source[...]`` for source (rows × columns) and target (rows × at least as many, written), both with
    contiguous lines; the target's further columns become zero. Grid: ceil(target columns / (COPY_THREADS COPY_EACH))
    times rows. Block: COPY_THREADS. Neighbouring threads copy neighbours: whole sectors, whatever the alignment.
    """
    number = numba.from_dtype(dtype)
    u32, u64 = numba.uint32, numba.uint64

    def repitch_kernel(source: Any, target: Any) -> None:
        held = cuda.local.array(COPY_EACH, number)
        rows, columns, padded = u32(source.shape[0]), u32(source.shape[1]), u32(target.shape[1])
        across = u32((padded + u32(COPY_THREADS * COPY_EACH - 1)) // u32(COPY_THREADS * COPY_EACH))
        block = u32(cuda.blockIdx.x)
        row, first = u32(block // across), u32(block % across * u32(COPY_THREADS * COPY_EACH))
        if row < rows:
            for i in range(COPY_EACH):
                column = u32(first + u32(i * COPY_THREADS) + u32(cuda.threadIdx.x))
                held[i] = number(0)
                if column < columns:
                    held[i] = source[u64(row), u64(column)]
            for i in range(COPY_EACH):
                column = u32(first + u32(i * COPY_THREADS) + u32(cuda.threadIdx.x))
                if column < padded:
                    target[u64(row), u64(column)] = held[i]

    return repitch_kernel


@functools.cache
def signature(dtype: np.dtype) -> Any:
    strided = numba.types.Array(numba.from_dtype(dtype), 2, "A")
    return numba.void(strided, strided)


@functools.cache
def kernel(dtype: np.dtype) -> Any:
    return compile_kernel(copy_function(dtype), signature(dtype))


def copy(panel: Matrix, scratch: int, stream: Any) -> Matrix:
    """Enqueue the copy of a panel with contiguous lines into scratch memory; returns the copy, of the same sides."""
    (lines, length), itemsize = panel.shape, panel.dtype.itemsize
    strides = pitch(length, itemsize), itemsize
    padded = Matrix(scratch, (lines, strides[0] // itemsize), strides, panel.dtype)
    grid = lines * ceil_div(padded.shape[1], COPY_THREADS * COPY_EACH)
    enqueue(kernel(panel.dtype), grid, COPY_THREADS, stream, 0, panel, padded)
    return Matrix(scratch, panel.shape, strides, panel.dtype)


def variants() -> Iterable[Variant]:
    for dtype in DTYPES:
        yield Variant(f"repitch {dtype}", copy_function(dtype), signature(dtype))
