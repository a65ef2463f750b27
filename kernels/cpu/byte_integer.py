"""Exact products of integers of at most eight bits, on CPUs that multiply bytes and add four products at once.

AVX-512 VNNI multiplies four unsigned bytes by four signed ones and adds the products to a 32-bit word, sixteen such
words at a time (``vpdpbusd``; Intel's Intrinsics Guide): four times as many multiply-adds an instruction as of float32.
Whatever the dtype, numbers that lie within 255 of each other are such bytes beside one number that is taken off each.
With a = a' + s and b = b' + t, where 0 <= a' < 256 and -128 <= b' < 128,

    sum a b = sum a' b' + t sum a' + s sum b' + k s t,

and the sums of lines are made while the operands are packed. No product of four bytes exceeds 2**17 and a block's k is
at most `DEPTH`, so that no 32-bit sum wraps.

The loops are Goto's, as those of `tilewright.kernels.cpu.integer` are.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from tilewright.kernels.cpu.loops import by_memory, compiled, on_threads, target_type
from tilewright.kernels.cpu.vector_code import (
    CACHE_LINE,
    INT32,
    Loop,
    broadcast,
    has_features,
    load,
    pointer,
    prefetch,
)
from tilewright.kernels.numbers import Extent, ceil_div

FEATURES = ("avx512f", "avx512vnni")
"""LLVM's names for the instruction sets."""
COST = 0.1
"""Time of one multiply-add, relative to float64's in BLAS, packing included."""
LANES = 16
"""32-bit words of a vector."""
GROUP = 4
"""Steps of k that an instruction multiplies and adds."""
ROWS, COLUMNS = 8, 48
"""Of a tile of the product: 24 sums, 3 vectors of B and one of A lie in the 32 vector registers."""
DEPTH = 2560
"""The longest k of a block: a panel of B stays in the L2 cache while those of A pass."""
PREFETCH_STEPS = 16
"""Groups of k by which the panel of A is fetched ahead; two are one cache line."""


class Packed(NamedTuple):
    """An operand in panels of lines: (panels, groups of k, lines) words of four bytes; and the sum of each line's
    bytes, (panels, lines)."""

    words: np.ndarray
    sums: np.ndarray
    depth: int


@functools.cache
def available() -> bool:
    """Whether Numba compiles for a CPU that has the instructions."""
    return has_features(*FEATURES)


def fits(a: Extent, b: Extent) -> bool:
    """Whether numbers of these extents can be bytes."""
    return a.most - a.least <= 255 and b.most - b.least <= 255


_SUMS = ir.VectorType(INT32, LANES)


def _byte_tile() -> Any:
    """The intrinsic ``tile(a, b, groups, sums)``: one tile of the product over ``groups`` >= 1 groups of k.

    a, b: addresses of a panel of each operand. sums: address of `ROWS` × `COLUMNS` 32-bit words, written.
    """
    vectors = COLUMNS // LANES

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, groups, sums = arguments
        multiply = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_SUMS, (_SUMS, _SUMS, _SUMS)), "llvm.x86.avx512.vpdpbusd.512"
        )
        loop = Loop(builder, groups, (a, GROUP * ROWS), (b, GROUP * COLUMNS))
        here_a, here_b = loop.places
        before = [[loop.sum_of(_SUMS) for _ in range(vectors)] for _ in range(ROWS)]
        totals = []
        prefetch(builder, here_a, PREFETCH_STEPS * GROUP * ROWS)
        bytes_b = [load(builder, here_b, CACHE_LINE * v, _SUMS, CACHE_LINE) for v in range(vectors)]
        for i, row in enumerate(before):
            word = broadcast(builder, load(builder, here_a, GROUP * i, INT32, GROUP), _SUMS)
            new = [builder.call(multiply, (row[v], word, bytes_b[v])) for v in range(vectors)]
            for total, value in zip(row, new, strict=True):
                loop.carry(total, value)
            totals.append(new)
        loop.end()
        for i, row in enumerate(totals):
            for v, total in enumerate(row):
                place = pointer(builder, sums, 4 * (i * COLUMNS + v * LANES), _SUMS)
                builder.store(total, place).align = 4
        return context.get_dummy_value()

    def tile(typing_context: Any, a: Any, b: Any, groups: Any, sums: Any) -> Any:
        address, integer = numba.types.uint64, numba.types.int64
        return numba.types.void(address, address, integer, address), lower

    return intrinsic(tile)


byte_tile = _byte_tile()


def _pack_across(source: Any, is_signed: bool, words: Any, sums: Any, start: int, stop: int) -> None:
    """Write panels start to stop of an operand whose lines lie beside each other in memory. source: (k, lines) bytes;
    k is a multiple of `GROUP`."""
    lines = words.shape[2]
    for panel in range(start, stop):
        base = panel * lines
        count = min(lines, source.shape[1] - base)
        sums[panel] = 0
        if count < lines:
            words[panel] = 0
        for group in range(words.shape[1]):
            line = words[panel, group]
            first, second = source[4 * group, base : base + count], source[4 * group + 1, base : base + count]
            third, last = (
                source[4 * group + 2, base : base + count],
                source[4 * group + 3, base : base + count],
            )
            for i in range(count):
                line[i] = (
                    np.uint32(first[i])
                    | np.uint32(second[i]) << np.uint32(8)
                    | np.uint32(third[i]) << np.uint32(16)
                    | np.uint32(last[i]) << np.uint32(24)
                )
            if is_signed:
                for i in range(count):
                    sums[panel, i] += (
                        np.int32(np.int8(first[i]))
                        + np.int32(np.int8(second[i]))
                        + np.int32(np.int8(third[i]))
                        + np.int32(np.int8(last[i]))
                    )
            else:
                for i in range(count):
                    sums[panel, i] += (
                        np.int32(first[i]) + np.int32(second[i]) + np.int32(third[i]) + np.int32(last[i])
                    )


def _pack_along(source: Any, is_signed: bool, words: Any, sums: Any, start: int, stop: int) -> None:
    """Write panels start to stop of an operand of which each line is contiguous. source: (lines, groups of k) words."""
    lines = words.shape[2]
    for panel in range(start, stop):
        base = panel * lines
        count = min(lines, source.shape[0] - base)
        sums[panel] = 0
        if count < lines:
            words[panel] = 0
        for i in range(count):
            total = np.int32(0)
            for group in range(words.shape[1]):
                word = source[base + i, group]
                words[panel, group, i] = word
                if is_signed:
                    total += (
                        np.int32(np.int8(word))
                        + np.int32(np.int8(word >> np.uint32(8)))
                        + np.int32(np.int8(word >> np.uint32(16)))
                        + np.int32(np.int8(word >> np.uint32(24)))
                    )
                else:
                    total += (
                        np.int32(np.uint8(word))
                        + np.int32(np.uint8(word >> np.uint32(8)))
                        + np.int32(np.uint8(word >> np.uint32(16)))
                        + np.int32(np.uint8(word >> np.uint32(24)))
                    )
            sums[panel, i] = total


def _multiply(
    left: Any,
    sums_left: Any,
    shift_left: int,
    right: Any,
    sums_right: Any,
    shift_right: int,
    depth: int,
    target: Any,
    reach: int,
    start: int,
    stop: int,
) -> None:
    """Add left × right into target, wrapping; panels start to stop of the left. Tiles all of whose elements lie more
    than ``reach`` columns right of the diagonal are left out."""
    sums = np.empty((ROWS, COLUMNS), np.int32)
    place = numba.uint64(sums.ctypes.data)
    groups = left.shape[1]
    shifts = depth * shift_left * shift_right
    for across in range(right.shape[0]):
        b = numba.uint64(right[across].ctypes.data)
        j0 = across * COLUMNS
        for down in range(start, stop):
            i0 = down * ROWS
            if j0 > i0 + ROWS - 1 + reach:
                continue
            byte_tile(numba.uint64(left[down].ctypes.data), b, groups, place)
            # A slice, so that the compiler sees that no index is negative.
            its = target[i0 : i0 + ROWS, j0 : j0 + COLUMNS]
            for i in range(its.shape[0]):
                beside = shifts + shift_right * np.int64(sums_left[down, i])
                for j in range(its.shape[1]):
                    its[i, j] += np.int64(sums[i, j]) + beside + shift_left * np.int64(sums_right[across, j])


class ByteProduct:
    """Exact products of integer blocks whose elements lie in two extents, with the scratch memory that they share: two
    bytes an element of A and of B.

    The operands are views whose values, as signed numbers, are right modulo 2**64.
    """

    def __init__(self, a: Extent, b: Extent, m: int, n: int, k: int, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        # Numbers that are bytes as they are stay so: nothing is added for them then.
        self._shift_a = 0 if a.least >= 0 and a.most <= 255 else a.least
        self._shift_b = 0 if b.least >= -128 and b.most <= 127 else b.least + 128
        groups = ceil_div(k, GROUP)
        self._scratch = [
            (np.empty(lines * groups * GROUP, np.uint8), aligned(ceil_div(lines, its) * groups * its))
            for lines, its in ((m, ROWS), (n, COLUMNS))
        ]

    def left(self, block: np.ndarray) -> Packed:
        """The packed left operand."""
        return self._packed(block, self._shift_a, ROWS, False, *self._scratch[0])

    def right(self, block: np.ndarray) -> Packed:
        return self._packed(block.T, self._shift_b, COLUMNS, True, *self._scratch[1])

    def _packed(
        self,
        block: np.ndarray,
        shift: int,
        lines: int,
        is_signed: bool,
        scratch: np.ndarray,
        memory: np.ndarray,
    ) -> Packed:
        """block: lines × k."""
        count, k = block.shape
        groups = ceil_div(k, GROUP)
        panels = ceil_div(count, lines)
        words = memory[: panels * groups * lines].reshape(panels, groups, lines)
        sums = np.empty((panels, lines), np.int32)
        source = scratch[: count * groups * GROUP]
        kinds = numba.boolean, numba.uint32[:, :, ::1], numba.int32[:, ::1], numba.int64, numba.int64
        if by_memory(block) is block:
            source = source.reshape(count, groups * GROUP)
            source[:, k:] = 0
            on_threads(self._pool, _bytes_of, count, block, shift, source)
            pack = compiled(_pack_along, numba.uint32[:, ::1], *kinds)
            on_threads(self._pool, pack, panels, source.view(np.uint32), is_signed, words, sums)
        else:
            source = source.reshape(groups * GROUP, count)
            source[k:] = 0
            on_threads(self._pool, _bytes_of, k, block.T, shift, source)
            pack = compiled(_pack_across, numba.uint8[:, ::1], *kinds)
            on_threads(self._pool, pack, panels, source, is_signed, words, sums)
        return Packed(words, sums, k)

    def add(self, left: Packed, right: Packed, target: np.ndarray, reach: int | None = None) -> None:
        """Add left × right into a target. reach: by how many columns those that are wanted of a row may lie right of
        the target's diagonal; all are where it is left out."""
        integer, words, sums = numba.int64, numba.uint32[:, :, ::1], numba.int32[:, ::1]
        kinds = words, sums, integer, words, sums, integer, integer, target_type(target.dtype), integer
        multiply = compiled(_multiply, *kinds, integer, integer)
        on_threads(
            self._pool,
            multiply,
            len(left.words),
            left.words,
            left.sums,
            self._shift_a,
            right.words,
            right.sums,
            self._shift_b,
            left.depth,
            target,
            target.shape[1] if reach is None else reach,
        )


def _bytes_of(block: np.ndarray, shift: int, target: np.ndarray, start: int, stop: int) -> None:
    """Write the lowest byte of each number less a shift, lines start to stop; all but the lowest byte may wrap."""
    part = block[start:stop]
    its = target[start:stop, : block.shape[1]]
    if part.dtype.itemsize == 1:
        its = its.view(part.dtype)
    offset = np.array(shift).astype(part.dtype)
    with np.errstate(all="ignore"):
        if shift:
            np.subtract(part, offset, out=its, casting="unsafe")
        else:
            np.copyto(its, part, casting="unsafe")


def aligned(words: int) -> np.ndarray:
    """Words of 32 bits from a cache line's beginning on."""
    memory = np.empty(words + CACHE_LINE // 4, np.uint32)
    skip = -memory.ctypes.data % CACHE_LINE // 4
    return memory[skip : skip + words]
