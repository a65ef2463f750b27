"""What happens on a GPU to decoded chunks: blocks moved to where they belong, and each chunk's wanted rectangle put in
its place in a matrix, with Blosc's shuffling undone, bytes swapped and columns turned into rows on the way.

Methods: Blosc 1's shuffle and bitshuffle (c-blosc, shuffle.c; Masui et al., "A compression scheme for radio data in
high performance computing", 2015). Both work on blocks of a chunk, each by itself: of a block's elements first come all
first bytes, then all second ones; or all lowest bits, packed, then all second ones. What is left of a block behind its
last whole element stays as it is, and so does a block whose elements are no multiple of eight, where bits are shuffled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numba
import numpy as np
from numba import cuda

from tilewright.kernels.decoding.numbers import Numbers
from tilewright.kernels.decoding.tables import (
    BLOCK_NBYTES,
    CHUNK_NBYTES,
    COLUMN_STEP,
    ELEMENT,
    FROM,
    HEIGHT,
    LEFT,
    NBYTES,
    PITCH,
    ROW_STEP,
    SHUFFLE,
    SOURCE,
    TARGET,
    TO,
    TOP,
    WIDTH,
)
from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.numbers import ceil_div
from tilewright.kernels.passes.launcher import Launcher

THREADS = 256
WORDS_A_THREAD = 8
"""About how many numbers, or bytes, each thread moves: enough that starting a block of threads costs little."""


def word_dtype(unit: int) -> np.dtype:
    return np.dtype(f"u{unit}")


def copy_kernel(source: Any, target: Any, table: Any) -> None:
    """Move bytes: ``target[to:to + n] = source[from:from + n]`` for each row of a table.

    source, target: flat, uint8, the latter written. table: int64, rows × COPY_WORDS. Grid: any × rows. Block: THREADS.
    No shared memory, no barrier: each thread writes bytes of its own.
    """
    number = cuda.blockIdx.y
    first, to, nbytes = table[number, FROM], table[number, TO], table[number, NBYTES]
    at = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    step = cuda.gridDim.x * cuda.blockDim.x
    while at < nbytes:
        target[to + at] = source[first + at]
        at += step


def _reader(numbers: Numbers) -> Any:
    """Inside a kernel: a number of a chunk by its index."""
    unit = numbers.unit
    word = numba.from_dtype(word_dtype(unit)) if not SIMULATOR else word_dtype(unit).type
    wide = numba.uint64 if not SIMULATOR else np.uint64
    bits = 8 * unit

    @cuda.jit(device=True, inline="always")
    def turned(value: Any) -> Any:
        if not numbers.swapped or unit == 1:
            return value
        given, swapped = wide(value), wide(0)
        for byte in range(unit):
            swapped |= ((given >> wide(8 * byte)) & wide(255)) << wide(bits - 8 - 8 * byte)
        return word(swapped)

    if not numbers.shuffled:

        @cuda.jit(device=True, inline="always")
        def read(decoded: Any, table: Any, number: Any, index: Any) -> Any:
            return turned(decoded[table[number, SOURCE] // unit + index])

        return read

    @cuda.jit(device=True, inline="always")
    def byte_at(
        decoded: Any, begin: Any, length: Any, shuffle: Any, element: Any, side: Any, place: Any
    ) -> Any:
        """The byte of a chunk that was at a place before it was shuffled."""
        first = place // side * side
        inside = place - first
        held = min(side, length - first)
        count = held // element
        if shuffle == 0 or inside >= count * element or (shuffle == 2 and count % 8 != 0):
            return wide(decoded[begin + place])
        item, part = inside // element, inside % element
        if shuffle == 1:
            return wide(decoded[begin + first + part * count + item])
        found = wide(0)
        row = count // 8
        for bit in range(8):
            packed = wide(decoded[begin + first + (part * 8 + bit) * row + item // 8])
            found |= ((packed >> wide(item % 8)) & wide(1)) << wide(bit)
        return found

    @cuda.jit(device=True, inline="always")
    def read_shuffled(decoded: Any, table: Any, number: Any, index: Any) -> Any:
        begin, length = table[number, SOURCE], table[number, CHUNK_NBYTES]
        shuffle, element, side = table[number, SHUFFLE], table[number, ELEMENT], table[number, BLOCK_NBYTES]
        found = wide(0)
        for byte in range(unit):
            value = byte_at(decoded, begin, length, shuffle, element, side, index * unit + byte)
            found |= value << wide(8 * byte)
        return turned(word(found))

    return read_shuffled


def place_function(numbers: Numbers) -> Any:
    """The plain function of the kernel that puts decoded chunks in their places.

    decoded: flat, of numbers, or of bytes where chunks may be shuffled, read. matrix: flat, of numbers, written. table:
    int64, rows × PLACE_WORDS. Grid: any × rows. Block: THREADS. No shared memory, no barrier: each thread writes
    numbers of its own, neighbours side by side.
    """
    read, parts = _reader(numbers), numbers.parts

    def place_kernel(decoded: Any, matrix: Any, table: Any) -> None:
        number = cuda.blockIdx.y
        across = table[number, WIDTH] * parts
        count = table[number, HEIGHT] * across
        at = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        step = cuda.gridDim.x * cuda.blockDim.x
        while at < count:
            row, column = at // across, at % across
            element = (table[number, TOP] + row) * table[number, ROW_STEP]
            element += (table[number, LEFT] + column // parts) * table[number, COLUMN_STEP]
            value = read(decoded, table, number, element * parts + column % parts)
            matrix[table[number, TARGET] + row * table[number, PITCH] + column] = value
            at += step

    return place_kernel


_TABLE = numba.types.Array(numba.int64, 2, "C")


def _flat(dtype: np.dtype) -> Any:
    return numba.types.Array(numba.from_dtype(dtype), 1, "C")


def place_signature(numbers: Numbers) -> Any:
    words = _flat(word_dtype(numbers.unit))
    return numba.void(_flat(word_dtype(1)) if numbers.shuffled else words, words, _TABLE)


COPIES = Launcher(lambda: copy_kernel, lambda: numba.void(*[_flat(word_dtype(1))] * 2, _TABLE))
PLACES = Launcher(place_function, place_signature)


def _grid(count: int, most: int) -> tuple[int, int]:
    """For ``count`` rows of a table, the longest of which has so many numbers."""
    return max(1, ceil_div(most, THREADS * WORDS_A_THREAD)), count


def copy(source: Any, target: Any, table: Any, count: int, most_nbytes: int, stream: Any) -> None:
    """Enqueue `copy_kernel` for the first ``count`` rows of a table, the longest of so many bytes. Memory that is read
    by one row must not be written by another."""
    if count:
        COPIES.enqueue((), _grid(count, most_nbytes), THREADS, stream, source, target, table)


def place(
    numbers: Numbers, decoded: Any, matrix: Any, table: Any, count: int, most: int, stream: Any
) -> None:
    """Enqueue the placing of ``count`` chunks, of whose rectangles the largest has ``most`` elements.

    decoded: flat device memory, of `word_dtype`, or of uint8 where ``numbers.shuffled``; matrix: flat, of `word_dtype`.
    """
    if count:
        grid = _grid(count, most * numbers.parts)
        PLACES.enqueue((numbers,), grid, THREADS, stream, decoded, matrix, table)


def variants() -> Iterable[Variant]:
    """What tests compile to machine code."""
    yield COPIES.variant("copy blocks")
    for numbers in every_kind():
        yield PLACES.variant(f"place {numbers}", numbers)


def every_kind() -> Iterable[Numbers]:
    for unit, parts in ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (8, 2)):
        for swapped in (False, True) if unit > 1 else (False,):
            for shuffled in (False, True):
                yield Numbers(unit, parts, swapped, shuffled)
