"""Device passes that make planes of bytes, with k contiguous, of a matrix of integers, for the int8 tensor cores.

The first pass keeps the lowest byte of every element, which is all of it when the values are small, and
finds the smallest and the largest value on the way: one reading of the matrix serves both. The second,
which runs only where one byte is not enough, writes a plane of residues for every modulus. Lines of a plane
are rows of A or columns of B; a matrix whose k is not contiguous in memory is turned in shared memory on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from tilewright.kernels.gemm.exact.residues import (
    MODULI,
    PLAN_KIND,
    PLAN_MAX_A,
    PLAN_MAX_B,
    PLAN_MIN_A,
    PLAN_MIN_B,
    PLAN_PLANES,
    PLAN_SHIFTS_A,
    RESIDUES,
    byte_weights,
    capacities,
    modulus_set,
)
from tilewright.kernels.gemm.exact.scaled_epilogue import power_of_two
from tilewright.kernels.gemm.hopper.wgmma import cluster_tile
from tilewright.kernels.numbers import WARP
from tilewright.kernels.ptx import floats, integers, memory

THREADS = 256
WARPS = THREADS // WARP
QUAD = 4
"""Elements along k whose bytes a thread packs into one word."""
TURN_LINES = 64
TURN_QUADS = 32
"""A tile that is turned in shared memory: 64 lines by 128 elements of k."""
TURN_SIDE = 128
"""Lines, and elements of k, of a tile of bytes that is turned by vectors."""
TURN_BAND = 32
"""Such tiles below each other before the walk moves on in k."""
ALL_LANES = 0xFFFFFFFF
WHOLE, WHOLE_BITS = 3.0 * 2**22, 0x4B400000
"""A float32 at which numbers have steps of 1, and its bits: what is added to one of the two appears in the other, and
the lowest 22 bits are 0."""
NOT_WHOLE = -(1 << 31)
"""Stands in the range of floats for one that is no whole number, or too large to be a byte."""
BOTH = 2
"""The side of a matrix whose lines are those of A and of B."""

ARGUMENTS = (
    types.uint64,  # source: address of element (line 0, k 0)
    types.int64,  # line_stride, in elements
    types.int64,  # k_stride
    types.int32,  # lines
    types.int32,  # depth: elements of k
    types.uint64,  # target
    types.int32,  # target_line_words: 32-bit words from line to line
    types.int64,  # plane_words
    types.uint64,  # plan
    types.int32,  # side: 0 for A, 1 for B; BOTH for the range of a matrix that is both
)


def residue_table() -> np.ndarray:
    """[side, count, plane] -> (weights of the low bytes, of the high bytes, bias, p): 32 bits each, packed as dp4a
    takes them. The bias has the bits of `WHOLE` beside.

    Side 0 is A, whose residues carry the weight of the Chinese remainder theorem, side 1 is B.
    """
    size = len(MODULI)
    table = np.zeros((2, size + 1, size, 4), np.uint32)
    for count in range(1, size + 1):
        for plane, modulus in enumerate(modulus_set(count).moduli):
            for side in range(2):
                weights, bias = byte_weights(modulus, weighted=side == 0)
                low, high = np.array(weights, np.int8).view(np.uint32)
                table[side, count, plane] = low, high, WHOLE_BITS + bias, modulus.p
    return table


def inverse_table() -> np.ndarray:
    """[count, plane] -> 1 / p, float32."""
    size = len(MODULI)
    table = np.zeros((size + 1, size), np.float32)
    for count in range(1, size + 1):
        table[count, :count] = np.float32(1) / np.array(MODULI[:count], np.float32)
    return table


def _values(dtype: np.dtype) -> Any:
    return types.int64 if dtype.itemsize == 8 and dtype.kind in "iu" else getattr(types, dtype.name)


@cuda.jit(device=True, inline="always")
def _same(value, low_factor, high_factor):  # type: ignore[no-untyped-def]
    return types.int64(value)


@cuda.jit(device=True, inline="always")
def _whole_float(value, low_factor, high_factor):  # type: ignore[no-untyped-def]
    """The number if it is whole and below 2**21, else NOT_WHOLE. Adding 3 2**22, at which float32 has steps of 1,
    rounds it to a whole number that stands in the low bits; conversions would take several times as long."""
    moved = floats.add32(value, types.float32(WHOLE))
    whole = floats.subtract32(moved, types.float32(WHOLE)) == value and abs(value) < types.float32(2097152.0)
    number = types.int64(types.int32(floats.float_bits(moved)) - types.int32(WHOLE_BITS))
    return number if whole else types.int64(NOT_WHOLE)


@cuda.jit(device=True, inline="always")
def _whole_double(value, low_factor, high_factor):  # type: ignore[no-untyped-def]
    """The same of float64, by 3 2**51."""
    moved = floats.add64(value, 6755399441055744.0)
    whole = floats.subtract64(moved, 6755399441055744.0) == value and abs(value) < 2097152.0
    return types.int64(types.int32(floats.double_bits(moved))) if whole else types.int64(NOT_WHOLE)


@cuda.jit(device=True, inline="always")
def _scaled(value, low_factor, high_factor):  # type: ignore[no-untyped-def]
    """The nearest integer of a number times two powers of two."""
    return floats.nearest_wide(types.float64(value) * low_factor * high_factor)


@cuda.jit(device=True, inline="always")
def line_factors(shifts, line):  # type: ignore[no-untyped-def]
    """Two powers of two, whose product is that by which the line is multiplied."""
    shift = shifts[line]
    half = shift // 2
    return power_of_two(half), power_of_two(shift - half)


def pass_function(dtype: np.dtype, *, turned: bool, residues: bool) -> Callable[..., Any]:
    """The pass over a matrix of ``dtype`` as a function of ``ARGUMENTS``; any grid, ``THREADS`` threads a
    block.

    ``turned``: neighbours in memory are neighbouring lines (B row-major), not neighbours in k. ``residues``: write a
    plane for every modulus of the plan, if that is what it asks for; else write the lowest byte and find the range.
    Up to three bytes of a line beyond ``depth`` are written too. 64-bit elements are read as signed, whatever they are:
    modulo 2**64 that is the same matrix. Shared memory: 8,448 bytes if turned.

    Of floats the pass that finds the range looks for whole numbers: it ends where it, or another, has met one that is
    none, and the range then has NOT_WHOLE for its least value. Residues of floats are those of the integers that
    `scaled_residues` says, by the powers of two (int32 a line) whose addresses are in the plan.
    """
    element = _values(dtype)
    floating = dtype.kind == "f"
    scaled, looking = floating and residues, floating and not residues
    if not floating:
        integer_of = _same
    elif residues:
        integer_of = _scaled
    else:
        integer_of = _whole_double if dtype.itemsize == 8 else _whole_float
    table, inverses = residue_table(), inverse_table()
    wide_minimum, wide_maximum = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    u32, i64, u64 = types.uint32, types.int64, types.uint64
    batch = TURN_LINES // 32 * (TURN_QUADS // WARPS)
    batch_values = QUAD * batch
    padded_quads = TURN_QUADS + 1  # one word more, so that a column of the tile is spread over all banks
    turn_lines, turn_quads, warps = TURN_LINES, TURN_QUADS, WARPS

    @cuda.jit(device=True, inline="always")
    def word_of(values, first, low, high, bias, p, inverse):  # type: ignore[no-untyped-def]
        """The bytes of four values: residues, or without ``residues`` the lowest ones."""
        rests = cuda.local.array(4, u32)
        for e in range(4):
            if residues:
                shifted = u64(values[first + e]) ^ u64(0x8000000000000000)
                # The bits of WHOLE and a sum of less than 2**19, hence the float32 that is their sum: no conversion.
                total = integers.dot_of_bytes(u32(shifted >> u64(32)), high, bias)
                total = integers.dot_of_bytes(u32(shifted), low, total)
                number = floats.subtract32(floats.word_float(total), types.float32(WHOLE))
                # WHOLE and the nearest quotient; the sum over p is never so near to a half that it could be wrong.
                quotient = cuda.fma(number, inverse, types.float32(WHOLE))
                rests[e] = total - floats.float_word(quotient) * p
            else:
                rests[e] = u32(values[first + e])
        front = integers.byte_permute(rests[0], rests[1], u32(0x0040))
        back = integers.byte_permute(rests[2], rests[3], u32(0x0040))
        return integers.byte_permute(front, back, u32(0x5410))

    @cuda.jit(device=True, inline="always")
    def report_range(low, high, plan, side):  # type: ignore[no-untyped-def]
        for shift in (16, 8, 4, 2, 1):
            low = min(low, cuda.shfl_xor_sync(ALL_LANES, low, shift))
            high = max(high, cuda.shfl_xor_sync(ALL_LANES, high, shift))
        if cuda.threadIdx.x % WARP == 0:
            if side != 1:
                cuda.atomic.min(plan, PLAN_MIN_A, low)
                cuda.atomic.max(plan, PLAN_MAX_A, high)
            if side != 0:
                cuda.atomic.min(plan, PLAN_MIN_B, low)
                cuda.atomic.max(plan, PLAN_MAX_B, high)

    def straight(  # type: ignore[no-untyped-def]
        source, line_stride, k_stride, lines, depth, target, target_line_words, plane_words, plan, side
    ):
        elements = memory.global_array(source, element)
        words = memory.global_array(target, u32)
        settings = memory.global_array(plan, i64)
        planes = i64(1)
        if residues:
            if settings[PLAN_KIND] != RESIDUES:
                return
            planes = settings[PLAN_PLANES]
        values = cuda.local.array(4, i64)
        low, high = i64(wide_maximum), i64(wide_minimum)
        shifts = memory.global_array(settings[PLAN_SHIFTS_A + side] if scaled else i64(0), types.int32)
        factors = (types.float64(1), types.float64(1))
        for line in range(cuda.blockIdx.x, lines, cuda.gridDim.x):
            if scaled:
                factors = line_factors(shifts, line)
            if looking:
                met = low == NOT_WHOLE
                met |= memory.load_fresh(plan + u64(8 * PLAN_MIN_A)) == NOT_WHOLE
                met |= memory.load_fresh(plan + u64(8 * PLAN_MIN_B)) == NOT_WHOLE
                if cuda.any_sync(ALL_LANES, met):  # all of a warp leave, or none
                    break
            for quad in range(cuda.threadIdx.x, (depth + 3) // 4, THREADS):
                start = line * line_stride
                for e in range(4):
                    # Beyond the end the last element is read again: it changes no range, its byte is never read there,
                    # and no branch separates the loads.
                    values[e] = integer_of(
                        elements[start + min(4 * quad + e, depth - 1) * k_stride], factors[0], factors[1]
                    )
                place = line * i64(target_line_words) + quad
                if residues:
                    for plane in range(planes):
                        entry = table[side, planes, plane]
                        words[plane * plane_words + place] = word_of(
                            values, 0, entry[0], entry[1], entry[2], entry[3], inverses[planes, plane]
                        )
                else:
                    words[place] = word_of(values, 0, u32(0), u32(0), u32(0), u32(0), types.float32(0))
                    for e in range(4):
                        low, high = min(low, values[e]), max(high, values[e])
        if not residues:
            report_range(low, high, settings, side)

    def turning(  # type: ignore[no-untyped-def]
        source, line_stride, k_stride, lines, depth, target, target_line_words, plane_words, plan, side
    ):
        elements = memory.global_array(source, element)
        words = memory.global_array(target, u32)
        settings = memory.global_array(plan, i64)
        planes = i64(1)
        if residues:
            if settings[PLAN_KIND] != RESIDUES:
                return
            planes = settings[PLAN_PLANES]
        tile = cuda.shared.array((turn_lines, padded_quads), u32)
        values = cuda.local.array(batch_values, i64)
        low, high = i64(wide_maximum), i64(wide_minimum)
        shifts = memory.global_array(settings[PLAN_SHIFTS_A + side] if scaled else i64(0), types.int32)
        factors = (types.float64(1), types.float64(1))
        lane, warp = cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP
        quads = (depth + 3) // 4
        across = (lines + turn_lines - 1) // turn_lines
        tiles = across * ((quads + turn_quads - 1) // turn_quads)
        for index in range(cuda.blockIdx.x, tiles, cuda.gridDim.x):
            first_line = index % across * turn_lines
            first_quad = index // across * turn_quads
            if looking:
                if cuda.any_sync(ALL_LANES, low == NOT_WHOLE) and lane == 0:
                    cuda.atomic.min(settings, PLAN_MIN_B if side == 1 else PLAN_MIN_A, i64(NOT_WHOLE))
                met = memory.load_fresh(plan + u64(8 * PLAN_MIN_A)) == NOT_WHOLE
                met |= memory.load_fresh(plan + u64(8 * PLAN_MIN_B)) == NOT_WHOLE
                if cuda.syncthreads_or(types.int32(met)) != 0:  # all leave, or none: barriers follow
                    break
            for i in range(batch):
                line = min(first_line + lane + 32 * (i % 2), lines - 1)
                quad = first_quad + warp + warps * (i // 2)
                start = line * line_stride
                if scaled:
                    factors = line_factors(shifts, line)
                for e in range(4):
                    values[4 * i + e] = integer_of(
                        elements[start + min(4 * quad + e, depth - 1) * k_stride], factors[0], factors[1]
                    )
            if not residues:
                for i in range(batch_values):
                    low, high = min(low, values[i]), max(high, values[i])
            for plane in range(planes):
                if residues:
                    entry = table[side, planes, plane]
                    low_weights, high_weights, bias, p = entry[0], entry[1], entry[2], entry[3]
                    inverse = inverses[planes, plane]
                else:
                    low_weights, high_weights, bias, p = u32(0), u32(0), u32(0), u32(0)
                    inverse = types.float32(0)
                cuda.syncthreads()  # the plane before has been written out
                for i in range(batch):
                    tile[lane + 32 * (i % 2), warp + warps * (i // 2)] = word_of(
                        values, 4 * i, low_weights, high_weights, bias, p, inverse
                    )
                cuda.syncthreads()  # the tile is complete
                quad = first_quad + lane
                place = plane * plane_words + (first_line + warp) * i64(target_line_words) + quad
                for i in range(turn_lines // warps):
                    if first_line + warp + warps * i < lines and quad < quads:
                        words[place] = tile[warp + warps * i, lane]
                    place += warps * target_line_words
        if not residues:
            report_range(low, high, settings, side)

    return turning if turned else straight


@cuda.jit(device=True, inline="always")
def turn_words(values, first):  # type: ignore[no-untyped-def]
    """Four words of four bytes, ``values[first]`` and every fourth from there, as the words of their first, second,
    third and fourth bytes."""
    u32 = types.uint32
    front = integers.byte_permute(values[first], values[first + 4], u32(0x5140))
    back = integers.byte_permute(values[first], values[first + 4], u32(0x7362))
    front_below = integers.byte_permute(values[first + 8], values[first + 12], u32(0x5140))
    back_below = integers.byte_permute(values[first + 8], values[first + 12], u32(0x7362))
    return (
        integers.byte_permute(front, front_below, u32(0x5410)),
        integers.byte_permute(front, front_below, u32(0x7632)),
        integers.byte_permute(back, back_below, u32(0x5410)),
        integers.byte_permute(back, back_below, u32(0x7632)),
    )


def turn_function() -> Callable[..., Any]:
    """The pass over a matrix of bytes that only turns it, as a function of ``ARGUMENTS``: neighbours in memory are
    neighbouring lines, those of every k begin at a multiple of 16 bytes, and the range is not wanted.

    Grid: a block of ``THREADS`` threads for each tile of ``TURN_SIDE`` × ``TURN_SIDE`` bytes, in bands, so that reads
    and writes at one time cover stretches of memory of about equal length. A thread reads 16 lines of four elements of
    k, all under way together, and turns them in its registers; the words of a line meet in shared memory (16 KiB),
    where chunk c of line l lies at chunk c XOR (l / 16 mod 8): what a warp writes, and what eight threads read at once,
    lies in different banks. Registers: up to 64, no spills. Up to 15 bytes of a line beyond ``depth`` are written too;
    lines of the target begin at multiples of 16 bytes.
    """
    extent, area, words_a_line, block = TURN_SIDE, TURN_SIDE**2 // 4, TURN_SIDE // 4, 4 * QUAD
    assert THREADS * 4 * 16 == TURN_SIDE**2
    i32, i64, u32 = types.int32, types.int64, types.uint32

    def turn(  # type: ignore[no-untyped-def]
        source, line_stride, k_stride, lines, depth, target, target_line_words, plane_words, plan, side
    ):
        vectors = memory.global_array(source, u32)
        elements = memory.global_array(source, types.uint8)
        words = memory.global_array(target, u32)
        tile = cuda.shared.array(area, u32, alignment=16)
        values = cuda.local.array(block, u32)
        # Without signs: divisions and remainders of signed numbers take several times the instructions.
        thread = u32(cuda.threadIdx.x)
        tiles_down, tiles_across = u32((lines + extent - 1) >> 7), u32((depth + extent - 1) >> 7)
        tile_line, tile_k = cluster_tile(u32(cuda.blockIdx.x), tiles_down, tiles_across, u32(TURN_BAND))
        first_line, first_k = i32(tile_line) * extent, i32(tile_k) * extent
        whole = first_line + extent <= lines and first_k + extent <= depth

        if whole:
            # Eight threads read 128 contiguous bytes; a warp reads those of four quads of k.
            group, quad = i32(thread & u32(7)), i32(thread >> u32(3))
            start = (i64(first_line + 16 * group) + (first_k + QUAD * quad) * k_stride) >> 2
            for j in range(QUAD):
                memory.load_vector(values, 4 * j, vectors, start + j * (k_stride >> 2))
            place = 16 * group * words_a_line + (quad ^ (4 * group))
            for w in range(4):
                word_0, word_1, word_2, word_3 = turn_words(values, w)
                tile[place + (4 * w) * words_a_line] = word_0
                tile[place + (4 * w + 1) * words_a_line] = word_1
                tile[place + (4 * w + 2) * words_a_line] = word_2
                tile[place + (4 * w + 3) * words_a_line] = word_3
        else:
            for i in range(area // THREADS):
                index = i32(thread) + THREADS * i
                line, quad = index & (extent - 1), index >> 7
                start = i64(min(first_line + line, lines - 1))
                word = u32(0)
                for e in range(QUAD):
                    k = min(first_k + QUAD * quad + e, depth - 1)
                    word |= u32(elements[start + k * k_stride]) << u32(8 * e)
                tile[line * words_a_line + (quad ^ (4 * (line >> 4)))] = word
        cuda.syncthreads()  # the tile is complete

        down, chunk = i32(thread >> u32(3)), i32(thread & u32(7))
        for j in range(4):
            line = down + 32 * j
            memory.load_vector(values, 4 * j, tile, line * words_a_line + 4 * (chunk ^ (line >> 4 & 7)))
        k = first_k + 16 * chunk
        start = i64(first_line + down) * target_line_words + (k >> 2)
        for j in range(4):
            if whole or (first_line + down + 32 * j < lines and k < depth):
                memory.store_vector(words, start + 32 * j * i64(target_line_words), values, 4 * j)

    return turn


def reset_function() -> Callable[..., Any]:
    """Empty ranges in the plan; one thread."""
    wide_minimum, wide_maximum = np.iinfo(np.int64).min, np.iinfo(np.int64).max

    def reset(plan):  # type: ignore[no-untyped-def]
        settings = memory.global_array(plan, types.int64)
        settings[PLAN_MIN_A] = settings[PLAN_MIN_B] = wide_maximum
        settings[PLAN_MAX_A] = settings[PLAN_MAX_B] = wide_minimum

    return reset


def plan_function() -> Callable[..., Any]:
    """Decides the kind of product and its planes from the ranges found, on the device; one thread.

    The same rule as ``residues.plan``, which the tests compare it with.
    """
    limits = capacities()

    def decide(plan, depth):  # type: ignore[no-untyped-def]
        settings = memory.global_array(plan, types.int64)
        low_a, high_a = settings[PLAN_MIN_A], settings[PLAN_MAX_A]
        low_b, high_b = settings[PLAN_MIN_B], settings[PLAN_MAX_B]
        signed_a, unsigned_a = low_a >= -128 and high_a <= 127, low_a >= 0 and high_a <= 255
        signed_b, unsigned_b = low_b >= -128 and high_b <= 127, low_b >= 0 and high_b <= 255
        if (signed_a or unsigned_a) and (signed_b or unsigned_b):
            settings[PLAN_KIND] = (0 if signed_a else 1) + (0 if signed_b else 2)
            settings[PLAN_PLANES] = 1
        else:
            bound = types.float64(depth)
            bound *= max(-types.float64(low_a), types.float64(high_a))
            bound *= max(-types.float64(low_b), types.float64(high_b))
            count = 1
            while limits[count] <= bound:
                count += 1
            settings[PLAN_KIND] = RESIDUES
            settings[PLAN_PLANES] = count

    return decide


PLAN_ARGUMENTS = (types.uint64, types.int32)
RESET_ARGUMENTS = (types.uint64,)
