"""Exact products of wide integers on CPUs that multiply 52-bit numbers and keep either half of the product.

AVX-512 IFMA multiplies the low 52 bits of two words and adds the low or the high 52 bits of the product to a
64-bit word, eight at a time (``vpmadd52luq``, ``vpmadd52huq``); AVX-512 VNNI adds the two products of a pair
of 16-bit numbers to a 32-bit word, sixteen at a time (``vpdpwssd``). Both come from Intel's Intrinsics Guide.
Modulo 2**64, with a = a0 + 2**52 a1 and b = b0 + 2**52 b1 (a0, b0 < 2**52; a1, b1 < 2**12),

    sum a b = sum low(a0 b0) + 2**52 (sum high(a0 b0) + sum (a1 b0 + a0 b1)),

and what is in parentheses is needed modulo 2**12 only. So the cross terms are products of pairs of the lowest
16 bits and of the bits from 52 on, one instruction for both and for twice as many columns: five instructions
multiply and add one element of A and sixteen of B. No sum has to be kept from wrapping, so k may be of any
length. Results of up to 32 bits need the first sum alone.

The loops are Goto's (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008): both
operands are packed into panels, and a tile of the product stays in registers while k passes. The digits of
`tilewright.kernels.gemm.exact.digits` do the same work where a CPU lacks the instructions, or numbers are small.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from tilewright.kernels.cpu.loops import compiled, on_threads, source_type, target_type
from tilewright.kernels.cpu.vector_code import (
    CACHE_LINE,
    INT32,
    INT64,
    Loop,
    broadcast,
    has_features,
    load,
    pointer,
    prefetch,
)
from tilewright.kernels.numbers import ceil_div

FEATURES = ("avx512f", "avx512ifma", "avx512vnni")
"""LLVM's names for the instruction sets."""
LIMB = 52
"""Bits of a number that IFMA multiplies."""
LANES = 8
"""64-bit words of a vector."""
PREFETCH_STEPS = 32
"""Steps of k by which the panel of A is fetched ahead; each is one cache line. B's stays in the L2 cache."""

WORDS_A = 8
"""64-bit words of one step of k in a panel of A: a cache line."""
WORDS_B = 24


@dataclass(frozen=True)
class Tiling:
    """A tile of the product as it lies in the 32 vector registers, and what it costs."""

    rows: int
    columns: int
    pairs: bool
    """Whether the panels hold the pairs of 16-bit numbers too, after the words."""
    cost: float
    """Time of one multiply-add, relative to float64's in BLAS, packing included: measured where a core starts
    two vector instructions of either kind a cycle."""
    halve: bool
    """Whether seven products of halves in place of eight save more than they cost."""


WIDE = Tiling(5, 16, pairs=True, cost=2.7, halve=True)
"""25 sums, 3 vectors of B and one of A. Results of 64 bits."""
NARROW = Tiling(8, 24, pairs=False, cost=1.2, halve=False)
"""24 sums, 3 vectors of B and one of A. Results of up to `LIMB` bits."""


@functools.cache
def available() -> bool:
    """Whether Numba compiles for a CPU that has the instructions."""
    return has_features(*FEATURES)


def tiling(bits: int) -> Tiling:
    """The tiling for results modulo 2**bits."""
    return NARROW if bits <= LIMB else WIDE


_WORDS, _PAIRS = ir.VectorType(INT64, LANES), ir.VectorType(INT32, 2 * LANES)


def _tile(shape: Tiling) -> Any:
    """The intrinsic ``tile(a, b, steps, sums)``: one tile of the product over ``steps`` >= 1 steps of k.

    a, b: addresses of a panel of each operand, as `_pack` lays them out. sums: address of rows × columns
    64-bit words, written. The sums of the loop are SSA values, and so stay in registers.
    """
    vectors = shape.columns // LANES
    kinds = [_WORDS] * vectors * (2 if shape.pairs else 1) + [_PAIRS] * (vectors // 2 if shape.pairs else 0)

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, steps, sums = arguments

        def instruction(name: str, kind: Any) -> Any:
            function = ir.FunctionType(kind, (kind, kind, kind))
            return cgutils.get_or_insert_function(builder.module, function, f"llvm.x86.avx512.{name}.512")

        low, high = instruction("vpmadd52l.uq", _WORDS), instruction("vpmadd52h.uq", _WORDS)
        cross = instruction("vpdpwssd", _PAIRS)
        loop = Loop(builder, steps, (a, 8 * WORDS_A), (b, 8 * WORDS_B))
        here_a, here_b = loop.places
        totals = [[loop.sum_of(kind) for kind in kinds] for _ in range(shape.rows)]
        prefetch(builder, here_a, PREFETCH_STEPS * WORDS_A * 8)
        words_b = [load(builder, here_b, CACHE_LINE * v, _WORDS, CACHE_LINE) for v in range(vectors)]
        pairs_b = [
            load(builder, here_b, CACHE_LINE * (vectors + v), _PAIRS, CACHE_LINE)
            for v in range(len(kinds) - 2 * vectors)
        ]
        for i, row in enumerate(totals):
            word = broadcast(builder, load(builder, here_a, 8 * i, INT64, 8), _WORDS)
            new = [builder.call(low, (row[v], word, words_b[v])) for v in range(vectors)]
            if shape.pairs:
                new += [builder.call(high, (row[vectors + v], word, words_b[v])) for v in range(vectors)]
                pair = load(builder, here_a, 8 * shape.rows + 4 * i, INT32, 4)
                pair = broadcast(builder, pair, _PAIRS)
                new += [
                    builder.call(cross, (row[2 * vectors + v], pair, pairs_b[v])) for v in range(len(pairs_b))
                ]
            for total, value in zip(row, new, strict=True):
                loop.carry(total, value)
            totals[i] = new
        loop.end()
        shift = ir.Constant(_WORDS, [LIMB] * LANES)
        for i, row in enumerate(totals):
            for v in range(vectors):
                total = row[v]
                if shape.pairs:
                    # Half a vector of cross terms for each vector of words.
                    half = ir.Constant(ir.VectorType(INT32, LANES), [v % 2 * LANES + j for j in range(LANES)])
                    terms = row[2 * vectors + v // 2]
                    terms = builder.shuffle_vector(terms, ir.Constant(_PAIRS, ir.Undefined), half)
                    upper = builder.add(row[vectors + v], builder.zext(terms, _WORDS))
                    total = builder.add(total, builder.shl(upper, shift))
                place = pointer(builder, sums, 8 * (i * shape.columns + v * LANES), _WORDS)
                builder.store(total, place).align = 8
        return context.get_dummy_value()

    def tile(typing_context: Any, a: Any, b: Any, steps: Any, sums: Any) -> Any:
        address, integer = numba.types.uint64, numba.types.int64
        return numba.types.void(address, address, integer, address), lower

    return intrinsic(tile)


_wide_tile = _tile(WIDE)
_narrow_tile = _tile(NARROW)


def _pack(
    first: Any,
    second: Any,
    sign: int,
    lines: int,
    order: int,
    packed: Any,
    halves: Any,
    start: int,
    stop: int,
) -> None:
    """Write panels start to stop of ``first + sign * second``: each has ``lines`` rows, k beside k.

    first, second: integers, rows × k, at most as large as the panels; missing elements count as zero. packed: (panels,
    k, `WORDS_A` or `WORDS_B`) 64-bit words, written: at each step of k the words of all lines, and with ``order`` 1 or
    2 then their pairs, 32 bits each: (bits from `LIMB` on, lowest 16 bits) or the other way round, so that a pair of
    one order times a pair of the other makes both cross terms. halves: the same memory in 32-bit words. Words are
    stored whole, since IFMA ignores all but their lowest 52 bits.
    """
    for panel in range(start, stop):
        base = panel * lines
        rows = min(lines, first.shape[0] - base)
        if rows < lines or first.shape[1] < packed.shape[1]:
            packed[panel] = 0
        for step in range(first.shape[1]):
            for i in range(rows):
                packed[panel, step, i] = numba.uint64(numba.int64(first[base + i, step]))
        for step in range(second.shape[1]):
            for i in range(min(lines, second.shape[0] - base)):
                packed[panel, step, i] += numba.uint64(sign * numba.int64(second[base + i, step]))
        if order:
            for step in range(packed.shape[1]):
                for i in range(lines):
                    word = packed[panel, step, i]
                    top = word >> numba.uint64(LIMB)
                    if order == 1:
                        pair = top | word << numba.uint64(16)
                    else:
                        pair = word & numba.uint64(0xFFFF) | top << numba.uint64(16)
                    halves[panel, step, 2 * lines + i] = numba.uint32(pair)


def _multiply(
    left: Any,
    right: Any,
    rows: int,
    columns: int,
    pairs: bool,
    first: Any,
    first_sign: int,
    second: Any,
    second_sign: int,
    start: int,
    stop: int,
) -> None:
    """Add ``sign * left × right`` into one or two targets, wrapping; panels start to stop of the left.

    left, right: packed panels. Targets: signed integers, at most as large as the panels are together.
    """
    sums = np.empty((rows, columns), np.uint64)
    place = numba.uint64(sums.ctypes.data)
    steps = left.shape[1]
    for across in range(right.shape[0]):
        b = numba.uint64(right[across].ctypes.data)
        j0 = across * columns
        for down in range(start, stop):
            a = numba.uint64(left[down].ctypes.data)
            if pairs:
                _wide_tile(a, b, steps, place)
            else:
                _narrow_tile(a, b, steps, place)
            i0 = down * rows
            # Slices, so that the compiler sees that no index is negative.
            target = first[i0 : i0 + rows, j0 : j0 + columns]
            for i in range(target.shape[0]):
                for j in range(target.shape[1]):
                    target[i, j] += first_sign * numba.int64(sums[i, j])
            target = second[i0 : i0 + rows, j0 : j0 + columns]
            for i in range(target.shape[0]):
                for j in range(target.shape[1]):
                    target[i, j] += second_sign * numba.int64(sums[i, j])


def _panels(scratch: np.ndarray, count: int, k: int, words: int) -> np.ndarray:
    """Panels in scratch memory, from a cache line's beginning on."""
    skip = -scratch.ctypes.data % CACHE_LINE // 8
    return scratch[skip : skip + count * k * words].reshape(count, k, words)


class IfmaProduct:
    """Exact products of integer blocks, with the scratch memory that they share: 12.8 bytes an element of A,
    12 of B (`WIDE`), or 8 (`NARROW`).

    The operands are views whose values, as signed numbers, are right modulo 2**64 or modulo 2**(the result's bits).
    """

    def __init__(self, tiling: Tiling, m: int, n: int, k: int, pool: ThreadPoolExecutor) -> None:
        self._tiling, self._pool = tiling, pool
        spare = CACHE_LINE // 8
        self._a = np.empty(ceil_div(m, tiling.rows) * k * WORDS_A + spare, np.uint64)
        self._b = np.empty(ceil_div(n, tiling.columns) * k * WORDS_B + spare, np.uint64)

    def left(self, shape: tuple[int, int], first: np.ndarray, *second: tuple[np.ndarray, int]) -> np.ndarray:
        """The packed left operand ``first``, or ``first + sign * second``, filled up to shape with zeros."""
        m, k = shape
        panels = _panels(self._a, ceil_div(m, self._tiling.rows), k, WORDS_A)
        other, sign = second[0] if second else (first[:0, :0], 0)
        return self._packed(panels, self._tiling.rows, 1, first, other, sign)

    def right(self, shape: tuple[int, int], first: np.ndarray, *second: tuple[np.ndarray, int]) -> np.ndarray:
        k, n = shape
        panels = _panels(self._b, ceil_div(n, self._tiling.columns), k, WORDS_B)
        other, sign = second[0] if second else (first[:0, :0], 0)
        return self._packed(panels, self._tiling.columns, 2, first.T, other.T, sign)

    def _packed(
        self, panels: np.ndarray, lines: int, order: int, first: np.ndarray, other: np.ndarray, sign: int
    ) -> np.ndarray:
        order = order if self._tiling.pairs else 0
        integer, source = numba.int64, source_type(first.dtype)
        words, halves = numba.uint64[:, :, ::1], numba.uint32[:, :, ::1]
        pack = compiled(_pack, source, source, integer, integer, integer, words, halves, integer, integer)
        in_halves = panels.view(np.uint32)
        on_threads(self._pool, pack, len(panels), first, other, sign, lines, order, panels, in_halves)
        return panels

    def add(self, left: np.ndarray, right: np.ndarray, *targets: tuple[np.ndarray, int]) -> None:
        """Add left × right, times a sign, into each of one or two targets."""
        (first, first_sign), (second, second_sign) = (*targets, (targets[0][0][:0, :0], 0))[:2]
        integer, words, target = numba.int64, numba.uint64[:, :, ::1], target_type(first.dtype)
        multiply = compiled(
            _multiply,
            words,
            words,
            integer,
            integer,
            numba.boolean,
            target,
            integer,
            target,
            integer,
            integer,
            integer,
        )
        rows, columns = self._tiling.rows, self._tiling.columns
        on_threads(
            self._pool,
            multiply,
            len(left),
            left,
            right,
            rows,
            columns,
            self._tiling.pairs,
            first,
            first_sign,
            second,
            second_sign,
        )
