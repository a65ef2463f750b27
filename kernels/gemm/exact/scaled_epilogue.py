"""What a matrix kernel does with its sums in a float64 product by residues (`scaled_residues`), beside what
`residue_epilogue` says: C is put together as a fraction of P, and scaled. And of a sample's product, the least sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from tilewright.kernels.gemm.exact.residue_epilogue import reduced, reduction_table
from tilewright.kernels.gemm.exact.residues import MODULI, PLAN_LEAST, PLAN_SHIFTS_A, PLAN_SHIFTS_B
from tilewright.kernels.gemm.exact.scaled_residues import (
    COUNTS,
    LOW_BITS,
    MIDDLE_BITS,
    NOTHING,
    fractions,
    unit,
)
from tilewright.kernels.numbers import WARP
from tilewright.kernels.ptx import floats, memory
from tilewright.kernels.ptx.unroll import unroll

BATCH = 2
"""Moduli whose residues are loaded together; tables are padded with zeros to it."""
OWN_WORDS = 2
"""Words of residues that a thread keeps in one access: of eight elements. With more, registers would not hold what is
added up for all of them."""


def fraction_tables() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For each number of moduli of a float64 product: low, middle and high bits of 1 / p of each (uint32, uint64,
    uint32), padded with zeros; and P in units of the fractions' last place, as the sum of two float64 numbers."""
    size = len(MODULI)
    shape = (size + 1, size)
    lows, middles, highs = np.zeros(shape, np.uint32), np.zeros(shape, np.uint64), np.zeros(shape, np.uint32)
    units = np.zeros((size + 1, 2), np.float64)
    for count in itertools.chain(*COUNTS.values()):
        for i, (low, middle, high) in enumerate(fractions(count)):
            lows[count, i], middles[count, i], highs[count, i] = low, middle, high
        units[count] = unit(count)
    return lows, middles, highs, units


def scaled_epilogue(
    threads: int, columns: int, strips: int, c_type: Any
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The device functions ``keep_residues`` and ``add_residues``, as `residue_epilogue`'s but for C of floats, and for
    the workspace: a thread's accesses are of two words, eight elements.

    The last arguments of ``add_residues`` are the plan, which says where the powers of two of rows and columns lie, and
    the thread's first row and column in C. 64 accumulating bits are in use for each element of the eight, and 32 twice.
    """
    reduction = reduction_table()
    low_bits, middle_bits, high_bits, units = fraction_tables()
    strip_parts = columns // 16
    parts = strips * strip_parts
    part_words = OWN_WORDS * threads
    plane_words = parts * part_words
    batch_words = OWN_WORDS * BATCH
    over, low_mask = MIDDLE_BITS - 32, (1 << LOW_BITS) - 1
    i32, u32, u64 = types.int32, types.uint32, types.uint64

    @cuda.jit(device=True, inline="always")
    def keep_part(part, sums, kept, first, p, offset, magic):  # type: ignore[no-untyped-def]
        word, second = u32(0), u32(0)
        for e in range(4):
            word |= u32(reduced(sums[8 * part + e], p, offset, magic) << (8 * e))
            second |= u32(reduced(sums[8 * part + 4 + e], p, offset, magic) << (8 * e))
        memory.store_pair(kept, first + part * part_words, word, second)

    @cuda.jit(device=True, inline="always")
    def keep_residues(sums, plane, planes, kept, first):  # type: ignore[no-untyped-def]
        p, offset, magic = reduction[plane, 0], reduction[plane, 1], reduction[plane, 2]
        unroll(keep_part, parts, (sums, kept, first + plane * plane_words, p, offset, magic))

    @cuda.jit(device=True, inline="always")
    def add_part(  # type: ignore[no-untyped-def]
        part, planes, kept, first, out, start, row_stride, column_stride, rows, columns, accumulate, plan, at_row,
        at_column,
    ):  # fmt: skip
        lows = cuda.local.array(8, u32)
        middles = cuda.local.array(8, u64)
        highs = cuda.local.array(8, u32)
        words = cuda.local.array(batch_words, u32)
        for e in range(8):
            lows[e], middles[e], highs[e] = u32(0), u64(0), u32(0)
        place = first + part * part_words
        for plane in range(0, planes, BATCH):
            for i in range(BATCH):
                # Beyond the last plane this reads what an earlier tile left; the tables multiply that by zero.
                word, second = memory.load_pair(kept, place + (plane + i) * plane_words)
                words[2 * i], words[2 * i + 1] = word, second
            for i in range(BATCH):
                low, high = low_bits[planes, plane + i], high_bits[planes, plane + i]
                middle = middle_bits[planes, plane + i]
                for e in range(8):
                    residue = (words[2 * i + e // 4] >> u32(8 * (e % 4))) & u32(255)
                    lows[e] += u32(residue * low)
                    middles[e] += u64(residue) * middle
                    highs[e] += u32(residue * high)
        addresses = memory.global_array(plan, u64)
        row_shifts = memory.global_array(addresses[PLAN_SHIFTS_A] + u64(4 * at_row), i32)
        column_shifts = memory.global_array(addresses[PLAN_SHIFTS_B] + u64(4 * at_column), i32)
        unit_high, unit_low = units[planes, 0], units[planes, 1]
        if strips == 1:  # the compiler does not know that all parts then lie in the first strip
            top, left = 0, 16 * part
        else:
            top, left = part // strip_parts * 16, part % strip_parts * 16
        # Addresses are counted on from the part's first: their offsets, the same for all parts, would else be kept in
        # registers throughout.
        across = start + top * row_stride + left * column_stride
        for pair in range(2):
            for side in range(2):
                column = left + 8 * pair + side
                target = across
                for half in range(2):
                    e, row = 4 * pair + 2 * half + side, top + 8 * half
                    if row < rows and column < columns:
                        shift = row_shifts[row] + column_shifts[column]
                        middle = middles[e] + u64(lows[e] >> u32(LOW_BITS))
                        value = scaled_back(
                            highs[e] + u32(middle >> u64(MIDDLE_BITS)),
                            u32(middle >> u64(over)),
                            u32(middle << u64(LOW_BITS)) | (lows[e] & u32(low_mask)),
                            unit_high,
                            unit_low,
                            shift,
                        )
                        if accumulate != 0:
                            out[target] += c_type(value)
                        else:
                            out[target] = c_type(value)
                    target += 8 * row_stride
                across += column_stride
            across += 6 * column_stride

    @cuda.jit(device=True, inline="always")
    def add_residues(  # type: ignore[no-untyped-def]
        planes,
        kept,
        first,
        out,
        start,
        row_stride,
        column_stride,
        rows,
        columns,
        accumulate,
        plan,
        row,
        column,
    ):
        for part in range(parts):
            add_part(
                part, planes, kept, first, out, start, row_stride, column_stride, rows, columns, accumulate, plan,
                row, column,
            )  # fmt: skip

    return keep_residues, add_residues


@cuda.jit(device=True, inline="always")
def power_of_two(exponent: Any) -> Any:
    """2**exponent as float64, for exponents from -1022 to 1023."""
    return floats.bits_double((types.int64(exponent) + types.int64(1023)) << types.int64(52))


@cuda.jit(device=True, inline="always")
def scaled_back(high: Any, middle: Any, low: Any, unit_high: Any, unit_low: Any, shift: Any) -> Any:
    """A fraction of P, three words, as a number: rounded once, but for about one in 2**40; then divided by
    2**shift."""
    top = types.int64((types.uint64(high) << types.uint64(32)) | types.uint64(middle))
    first = types.float64(top)
    # |top| is less than 2**63 by one part in a thousand, so that the rounded number fits too.
    second = types.float64(top - floats.nearest_wide(first)) * 4294967296.0 + types.float64(low)
    first *= 4294967296.0
    product = first * unit_high
    error = cuda.fma(first, unit_high, -product)
    value = product + (error + cuda.fma(first, unit_low, second * unit_high))
    shift = min(shift, 2000)  # beyond, nothing is left either way
    half = -shift // 2
    return value * power_of_two(half) * power_of_two(-shift - half)


def least_report(columns: int, strips: int) -> Callable[..., Any]:
    """The device function ``report_least(sums, plan, rows, columns)``: of a thread's sums, laid out as for
    `residue_epilogue`, the least within ``rows`` rows and ``columns`` columns from its first on goes into the plan, if
    it is less than what is there. All threads of a warp call it."""
    groups = columns // 8
    all_groups = strips * groups

    @cuda.jit(device=True, inline="always")
    def look(i, sums, least, rows, columns):  # type: ignore[no-untyped-def]
        top, left = i // groups * 16, i % groups * 8
        for e in range(4):
            if top + 8 * (e // 2) < rows and left + e % 2 < columns:
                least[0] = min(least[0], sums[4 * i + e])

    @cuda.jit(device=True, inline="always")
    def report_least(sums, plan, rows, columns):  # type: ignore[no-untyped-def]
        settings = memory.global_array(plan, types.int64)
        least = cuda.local.array(1, types.int32)
        least[0] = types.int32(NOTHING)
        unroll(look, all_groups, (sums, least, rows, columns))
        found = least[0]
        for lanes in (16, 8, 4, 2, 1):
            found = min(found, cuda.shfl_xor_sync(0xFFFFFFFF, found, lanes))
        if cuda.threadIdx.x % WARP == 0:
            cuda.atomic.min(settings, PLAN_LEAST, types.int64(found))

    return report_least
