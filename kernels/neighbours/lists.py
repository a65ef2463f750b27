"""Kernels over the lists of a GPU: what a product's epilogue has kept, merged into the best of each row.

An entry is a word of 64 bits, its score's order above the complement of its column's number, so that of two the larger
is the better one, and none is 0 (`tilewright.kernels.gemm.hopper.selection`). The best of a row are kept in falling
order. Nothing here is a float: a bound is handled as the 32 bits of its order, and written as those of the number.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.elements import numba_type
from tilewright.kernels.gemm.hopper.selection import COSINE, DOT, FARTHER, L2, order_of
from tilewright.kernels.neighbours.words import numbers_of
from tilewright.kernels.passes.launcher import Launcher
from tilewright.kernels.ptx import floats

WARP = 32
LOWEST_FLOAT, LOWEST_INTEGER = 0x007FFFFF, 1
"""The orders of -infinity, and of the least sum: an int32 less is none, as NaN is no score."""
HIGHEST_FLOAT = 0xFF800000
"""That of infinity; what follows is NaN's."""
FILTER_THREADS = 128
FILTER_COLUMNS = 4096
"""Of a row of products that a block looks at."""
SQUARES_THREADS = 128
MOVE_THREADS = 256
TOGETHER = 256
"""Places of a tile: rows that lie far from each other."""


def lowest_bound(dtype: np.dtype) -> Any:
    """The bound, float32 or int32, that lets every score through."""
    order = LOWEST_INTEGER if dtype.kind == "i" else LOWEST_FLOAT
    return numbers_of(np.array([order], np.uint32), dtype)[0]


def merge_function(capacity: int, kept: int, integer: bool) -> Any:
    """The plain function of the kernel that merges each row's list into its best, and sets its bound.

    words: (rows, capacity), as many of a row as its counter says, if there are so many. best: (rows, kept) in falling
    order, 0 where there is none. bounds: uint32 (3, rows), the bits of each row's bound, its factor's, its counter.
    floors: uint32 (rows,), orders below which a bound must not fall. overflow: uint32, two words
    for each launch, written where a list was too short: in the first half the last such row + 1, in the second
    2**32 - 1 less the first. mode: 0: bounds admit what equals the worst of the best; 1: they do not, where all
    columns to come have larger numbers; 2: only floors are set, by the worst of these lists, and the best stay empty.

    A list may hold what is among the best already. One block of a warp a row, from row ``first`` on; shared memory for
    the list, up to the next power of two, and for the best.
    """
    lowest, highest = (LOWEST_INTEGER, 0xFFFFFFFF) if integer else (LOWEST_FLOAT, HIGHEST_FLOAT)
    u32, u64 = types.uint32, types.uint64

    @cuda.jit(device=True, inline="always")
    def larger(words, first, size, word):  # type: ignore[no-untyped-def]
        # How many of so many words in falling order, from the first on, are larger.
        low, high = 0, size
        while low < high:
            middle = (low + high) // 2
            if words[first + middle] > word:
                low = middle + 1
            else:
                high = middle
        return low

    def merge(words, best, bounds, floors, overflow, launch, mode, first):  # type: ignore[no-untyped-def]
        row, lane = first + cuda.blockIdx.x, cuda.threadIdx.x
        room = cuda.shared.array(0, u64)
        found = types.int32(bounds[2, row])
        held = min(found, capacity)
        size = 1
        while size < held:
            size *= 2
        for i in range(lane, kept, WARP):
            room[capacity + i] = best[row, i]
        cuda.syncthreads()
        for i in range(lane, size, WARP):
            word = words[row, i] if i < held else u64(0)
            if word != 0:
                place = larger(room, capacity, kept, word)
                if place < kept and room[capacity + place] == word:
                    word = u64(0)  # it is there already
            room[i] = word
        cuda.syncthreads()
        # Batcher's bitonic network: in each step every pair of places at one distance is put in order.
        width = 2
        while width <= size:
            distance = width // 2
            while distance > 0:
                for i in range(lane, size // 2, WARP):
                    within = i & (distance - 1)
                    left = 2 * (i - within) + within
                    right = left + distance
                    falling = left & width == 0
                    if (room[left] < room[right]) == falling:
                        room[left], room[right] = room[right], room[left]
                cuda.syncthreads()
                distance //= 2
            width *= 2
        if found > 0:
            for i in range(lane, kept, WARP):
                word = room[capacity + i]
                place = i + larger(room, 0, size, word)
                if place < kept:
                    best[row, place] = word
            for i in range(lane, min(size, kept), WARP):
                word = room[i]
                if word != 0:
                    place = i + larger(room, capacity, kept, word)
                    if place < kept:
                        best[row, place] = word
        cuda.syncthreads()
        if lane == 0:
            worst = u32(best[row, kept - 1] >> u64(32))
            if mode == 2:
                floors[row] = max(worst, u32(lowest))
            if mode == 1 and worst != 0 and worst < u32(highest):
                worst = u32(worst + u32(1))
            order = max(max(worst, floors[row]), u32(lowest))
            if integer or order >> u32(31) != 0:
                bounds[0, row] = order ^ u32(1 << 31)
            else:
                bounds[0, row] = order ^ u32(0xFFFFFFFF)
            bounds[2, row] = 0
            if found > capacity:
                cuda.atomic.max(overflow, launch, u32(row + 1))
                cuda.atomic.max(overflow, overflow.size // 2 + launch, u32(0xFFFFFFFF) - u32(row))
        cuda.syncthreads()
        if mode == 2:
            for i in range(lane, kept, WARP):
                best[row, i] = u64(0)

    return merge


def merge_signature(capacity: int, kept: int, integer: bool) -> Any:
    words = types.Array(types.uint64, 2, "C")
    line = types.Array(types.uint32, 1, "C")
    bounds = types.Array(types.uint32, 2, "C")
    return types.void(words, words, bounds, line, line, types.int32, types.int32, types.int64)


def merge_nbytes(capacity: int, kept: int) -> int:
    """Shared memory of a block."""
    return 8 * (capacity + kept)


def filter_function(form: str, integer: bool) -> Any:
    """The plain function of the kernel that keeps what reaches its row's bound of products that are there.

    products: (rows, columns) of any strides, float32 or int32. words, bounds: as `merge_function` has them, of lists of
    ``capacity`` places; or where ``rows_found`` has any elements, one list, with the rows there. numbers: ``bounds`` as
    the products' type. of_columns: (columns,). top: of which of the bounds the first row of products is. first: the
    number of the first column. left_out: column - row, in ``products``, of elements that are left out. last: only
    columns up to row + it are wanted. Blocks: (rows, pieces of a row).
    """
    metric, farther = form.removeprefix(FARTHER), form.startswith(FARTHER)
    number = np.int32 if integer else np.float32
    zero = number(0)
    order = order_of(integer=integer)

    def keep(  # type: ignore[no-untyped-def]
        products, words, rows_found, bounds, numbers, of_columns, capacity, top, first, left_out, last
    ):
        row = cuda.blockIdx.x
        place_of_row = top + row
        single = rows_found.size > 0
        counter = 0 if single else place_of_row
        bound, of_row = numbers[0, place_of_row], numbers[1, place_of_row]
        start = cuda.blockIdx.y * FILTER_COLUMNS
        stop = min(products.shape[1], start + FILTER_COLUMNS, row + last + 1)
        for column in range(start + cuda.threadIdx.x, stop, FILTER_THREADS):
            score = products[row, column]
            if metric == COSINE:
                score = score * (of_row * of_columns[column])
            elif metric == L2:
                score = number(2) * score - (of_row + of_columns[column])
                if score > zero:
                    score = zero
            if farther:
                score = -score
            if score >= bound and column - row != left_out:
                place = cuda.atomic.add(bounds, (2, counter), 1)
                if place < capacity:
                    score = score + zero  # of -0 it is 0
                    bits = np.uint32(order(score))
                    word = np.uint64(bits) << np.uint64(32) | np.uint64(
                        np.uint32(0xFFFFFFFF) - np.uint32(first + column)
                    )
                    if single:
                        words[0, place], rows_found[place] = word, place_of_row
                    else:
                        words[place_of_row, place] = word

    return keep


def filter_signature(form: str, integer: bool) -> Any:
    number = types.int32 if integer else types.float32
    return types.void(
        types.Array(number, 2, "A"),
        types.Array(types.uint64, 2, "C"),
        types.Array(types.int32, 1, "C"),
        types.Array(types.uint32, 2, "C"),
        types.Array(number, 2, "C"),
        types.Array(number, 1, "C"),
        types.int32,
        types.int64,
        types.int64,
        types.int64,
        types.int64,
    )


def factors_function(dtype: np.dtype, metric: str, integer: bool) -> Any:
    """The plain function of the kernel that finds what a metric needs of each row (`order.row_factors`), as float32 or,
    of integers, int32. matrix: (rows, depth), of any strides. Squares are added by a warp a row, in one order."""
    bfloat = dtype == BFLOAT16
    cosine = metric == COSINE
    number = np.int32 if integer else np.float32

    def factors(matrix, found):  # type: ignore[no-untyped-def]
        row = cuda.blockIdx.x * (SQUARES_THREADS // WARP) + cuda.threadIdx.x // WARP
        lane = cuda.threadIdx.x % WARP
        if row >= matrix.shape[0]:
            return
        total = np.int64(0) if integer else np.float64(0)
        for i in range(lane, matrix.shape[1], WARP):
            if integer:
                exact = np.int64(matrix[row, i])
                total += exact * exact
            else:
                element = np.float64(_bfloat_value(matrix[row, i]) if bfloat else matrix[row, i])
                total += element * element
        distance = WARP // 2
        while distance > 0:
            total += cuda.shfl_xor_sync(0xFFFFFFFF, total, distance)
            distance //= 2
        if lane == 0:
            if cosine:
                found[row] = number(0) if total == 0 else number(1.0 / math.sqrt(np.float64(total)))
            else:
                found[row] = number(total)

    return factors


@cuda.jit(device=True, inline="always")
def _bfloat_value(bits):  # type: ignore[no-untyped-def]
    return floats.bits_float(types.uint32(bits) << types.uint32(16))


def factors_signature(dtype: np.dtype, metric: str, integer: bool) -> Any:
    return types.void(
        types.Array(numba_type(dtype), 2, "A"),
        types.Array(types.int32 if integer else types.float32, 1, "C"),
    )


def gather_function() -> Any:
    """The plain function of the kernel that takes every ``step``-th of some words of 32 bits."""

    def gather(source, step, target):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        if i < target.size:
            target[i] = source[i * step]

    return gather


def gather_signature() -> Any:
    line = types.Array(types.uint32, 1, "C")
    return types.void(line, types.int64, line)


def name_of(place: Any, step: Any, turn: Any) -> Any:
    """Which row comes at a place of an order that is none: of every ``TOGETHER`` places each row lies ``step`` behind
    the one before, and the first ``turn`` behind that of the places before, modulo ``step``."""
    if place >= TOGETHER * step:
        return place
    return place // TOGETHER * turn % step + place % TOGETHER * step


def turn_of(step: int) -> int:
    """The number that has no divisor in common with ``step`` and is nearest to its golden section: multiples of it,
    modulo ``step``, come to all, and each stretch of them is spread evenly (D. E. Knuth, The Art of Computer
    Programming 3, 6.4).

    >>> turn_of(13), turn_of(1)
    (8, 1)
    """
    turn = max(1, round(step * (math.sqrt(5) - 1) / 2))
    while math.gcd(turn, step) != 1:
        turn += 1
    return turn


def names_function() -> Any:
    """The plain function of the kernel that writes which row each place of an order has, from place ``first`` on, to
    all of names. step: 0, and rows keep their places; else the number of places by ``TOGETHER``. turn: `turn_of`."""
    name = cuda.jit(device=True, inline="always")(name_of)

    def write(names, first, step, turn):  # type: ignore[no-untyped-def]
        place = types.int64(cuda.grid(1))
        if place < names.size:
            names[place] = first + name(place, step, turn)

    return write


def names_signature() -> Any:
    return types.void(types.Array(types.uint32, 1, "C"), types.int64, types.int64, types.int64)


def move_function(dtype: np.dtype, put: bool) -> Any:
    """The plain function of the kernel that brings rows to other places, a warp a row: row names[i] of source becomes
    row i of target or, with ``put``, row i of source row names[i]."""

    def move(source, names, target):  # type: ignore[no-untyped-def]
        row = cuda.blockIdx.x * (MOVE_THREADS // WARP) + cuda.threadIdx.x // WARP
        if row >= names.size:
            return
        other = types.int64(names[row])
        for i in range(cuda.threadIdx.x % WARP, source.shape[1], WARP):
            if put:
                target[other, i] = source[row, i]
            else:
                target[row, i] = source[other, i]

    return move


def move_signature(dtype: np.dtype, put: bool) -> Any:
    matrix = types.Array(numba_type(dtype), 2, "A")
    return types.void(matrix, types.Array(types.uint32, 1, "C"), matrix)


NAMES = Launcher(names_function, names_signature)
MOVE = Launcher(move_function, move_signature)
FILTER = Launcher(filter_function, filter_signature)
FACTORS = Launcher(factors_function, factors_signature)
GATHER = Launcher(gather_function, gather_signature)
FORMS = (DOT, COSINE, L2, FARTHER + DOT, FARTHER + COSINE, FARTHER + L2)
