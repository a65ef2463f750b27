"""Device passes that write float matrices as Hopper's tensor cores take them: narrower, aligned, or in parts.

A matrix is ``lines`` of ``width`` elements, contiguous or with any stride; a pass keeps that order, since 16-bit
operands may come either way. Only TF32 must have k contiguous: its pass can turn the matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda import types

from tilewright.kernels.float8 import PTX_KINDS
from tilewright.kernels.gemm.exact.residues import PLAN_KIND, PLAN_PLANES
from tilewright.kernels.gemm.hopper.wgmma import cluster_tile
from tilewright.kernels.gemm.hopper.wgmma_config import LOW_SHIFT
from tilewright.kernels.ptx import floats, memory
from tilewright.kernels.ptx.unroll import unroll

THREADS = 256
QUAD = 4
BATCH = 4
"""Quads of a segment of a line that a thread reads before it writes any."""
SEGMENT = THREADS * QUAD * BATCH
"""Elements of a line that a block takes at a time."""
TURN_SIDE = 64
"""Lines and places of a tile that is turned in shared memory."""
TURN_BAND = 32
"""Such tiles below each other before the walk moves on to the next places."""
NONFINITE = 1
"""The plan kind that says that there is an infinity or a NaN."""
PARTS_PLAN = 16
"""Where in the plan, in words, a second one begins: its kind says which parts float32 numbers are split into."""
HALVES, THIRDS = 2, 3
"""Kinds of that: two float16 parts of scaled numbers, or three bfloat16 parts of numbers as they are."""
EXPONENT = 0x7F800000
ONE = 0x3F80
"""1.0 as a bfloat16."""

ARGUMENTS = (
    types.uint64,  # source: address of element (line 0, place 0)
    types.int64,  # line_stride, in elements
    types.int64,  # stride from element to element of a line
    types.int32,  # lines
    types.int32,  # width
    types.uint64,  # target
    types.int64,  # target_line: elements from line to line
    types.int64,  # plane: elements from plane to plane
    types.uint64,  # plan
    types.uint64,  # flags: one byte a line (or place) of the matrix
    types.int32,  # flag_lines: whether flags, and powers, count lines, not places
    types.uint64,  # powers: int32 a line (or place); of "halves" alone
)
RESET_ARGUMENTS = (types.uint64, types.uint64, types.int32)


@cuda.jit(device=True, inline="always")
def bfloat16_bits(value):  # type: ignore[no-untyped-def]
    """The nearest bfloat16 of a finite number, ties to even; never infinity, which the largest would round
    to."""
    bits = floats.float_bits(value)
    rounded = types.uint32(bits + types.uint32(0x7FFF) + ((bits >> types.uint32(16)) & types.uint32(1)))
    if (rounded & types.uint32(EXPONENT)) == types.uint32(EXPONENT):
        rounded = bits
    return types.uint32(rounded >> types.uint32(16))


@cuda.jit(device=True, inline="always")
def is_finite(value):  # type: ignore[no-untyped-def]
    return (floats.float_bits(value) & types.uint32(EXPONENT)) != types.uint32(EXPONENT)


@cuda.jit(device=True, inline="always")
def bfloat16_or_special(value):  # type: ignore[no-untyped-def]
    """The nearest bfloat16, as IEEE rounds: infinity from what is too large, NaN stays NaN.

    As `tilewright.kernels.bfloat16.device_functions` gives it, which does without PTX for the simulator's sake: with
    that one the pass would become other machine code.
    """
    bits = floats.float_bits(value)
    if value != value:
        return types.uint32(0x7FC0)
    rounded = types.uint32(bits + types.uint32(0x7FFF) + ((bits >> types.uint32(16)) & types.uint32(1)))
    return types.uint32(rounded >> types.uint32(16))


@cuda.jit(device=True, inline="always")
def half_of_e4m3(code):  # type: ignore[no-untyped-def]
    """The bits of the float16 equal to a float8 of kind e4m3fn. Its exponent and mantissa, put into float32's, give
    2**-120 of the number, subnormal ones too."""
    u32 = types.uint32
    rest = u32(code) & u32(0x7F)
    small = floats.word_float(((u32(code) & u32(0x80)) << u32(24)) | (rest << u32(20)))
    bits = u32(floats.half_bits(small * types.float32(2.0**120)))
    return u32(0x7E00) if rest == u32(0x7F) else bits


@cuda.jit(device=True, inline="always")
def sign_bits(value):  # type: ignore[no-untyped-def]
    """0, plus or minus 1 as bfloat16 for finite numbers; infinities and NaN as they are."""
    bits = floats.float_bits(value)
    sign = (bits >> types.uint32(16)) & types.uint32(0x8000)
    if value != value:
        return types.uint32(0x7FC0)
    if not is_finite(value):
        return types.uint32(bits >> types.uint32(16))
    return types.uint32(0) if value == types.float32(0) else types.uint32(sign | types.uint32(ONE))


def pass_function(form: str) -> Callable[..., Any]:
    """The pass to ``form`` as a function of ``ARGUMENTS``: any grid, ``THREADS`` threads a block, best a block for
    each segment of a line.

    form: ``bf16``, ``f16``, ``tf32``: rounded to nearest. ``copy``: 16-bit elements as they are. ``e4m3``, ``e5m2``:
    float8 of that kind, widened to float16. ``split``: three
    bfloat16 planes whose sum is the number. ``halves``: two float16 planes, of the number times 2**power of its line
    and, times 2**LOW_SHIFT, of what is left of it. ``signs``: what decides how infinities and NaN come out of a
    product.

    Source: float32, but 16-bit elements for ``copy``, and bytes for float8. Target: 16-bit elements, but 32-bit for
    ``tf32``; planes of lines, each beginning at a multiple of 16 bytes; up to three places after a line are written
    too, and never read. ``split`` and ``halves`` run only where the plan says so (THIRDS, HALVES); they take infinities
    and NaN as zero, flag their lines, and say NONFINITE in the plan; ``signs`` runs only then.

    A thread has BATCH quads of a segment under way at a time, read as vectors of 16 bytes where lines lie so, of float8
    as words.
    Fewer than 2**31 segments. Registers: up to 64, no spills.
    """
    narrow = form in PTX_KINDS.values()
    element = types.uint8 if narrow else types.uint16 if form == "copy" else types.float32
    split, halves, signs, wide = form == "split", form == "halves", form == "signs", form == "tf32"
    parted, parts_kind, low_scale = split or halves, THIRDS if split else HALVES, 2.0**LOW_SHIFT
    word = types.uint32 if wide else types.uint64
    vectors, registers, stretch = element == types.float32, QUAD * BATCH, QUAD * THREADS
    u8, i32, u32, u64, f32 = types.uint8, types.int32, types.uint32, types.uint64, types.float32

    @cuda.jit(device=True, inline="always")
    def encoded(value):  # type: ignore[no-untyped-def]
        if form == "copy":
            return u32(value)
        if form == "e5m2":  # float16's upper byte
            return u32(u32(value) << u32(8))
        if form == "e4m3":
            return half_of_e4m3(value)
        if form == "bf16":
            return bfloat16_or_special(value)
        if form == "f16":
            return u32(floats.half_bits(value))
        if form == "signs":
            return sign_bits(value)
        return floats.tf32_bits(value)

    @cuda.jit(device=True, inline="always")
    def write_quad(  # type: ignore[no-untyped-def]
        q,
        values,
        words,
        first,
        width,
        line_start,
        plane,
        settings,
        marks,
        line,
        flag_lines,
        powers,
        line_power,
    ):
        place = first + q * stretch
        if place < width:
            into = line_start + place
            high, middle, low = u64(0), u64(0), u64(0)
            wide_words = cuda.local.array(QUAD, u32)
            for e in range(QUAD):
                value = values[QUAD * q + e]
                if parted and not is_finite(value):
                    value = f32(0)
                    settings[PLAN_KIND] = NONFINITE
                    marks[line if flag_lines != 0 else min(place + e, width - 1)] = 1
                if wide:
                    wide_words[e] = encoded(value)
                elif halves:
                    power = line_power if flag_lines != 0 else powers[min(place + e, width - 1)]
                    value = f32(value * floats.bits_float(u32(i32(127) + power) << u32(23)))
                    first_part = u32(floats.half_bits(value))
                    rest = f32(f32(value - floats.half_value(first_part)) * f32(low_scale))
                    high |= u64(first_part) << u64(16 * e)
                    middle |= u64(floats.half_bits(rest)) << u64(16 * e)
                elif split:
                    first_part = bfloat16_bits(value)
                    rest = value - floats.bits_float(first_part << u32(16))
                    second_part = bfloat16_bits(rest)
                    rest -= floats.bits_float(second_part << u32(16))
                    high |= u64(first_part) << u64(16 * e)
                    middle |= u64(second_part) << u64(16 * e)
                    low |= u64(bfloat16_bits(rest)) << u64(16 * e)
                else:
                    high |= u64(encoded(value)) << u64(16 * e)
            if wide:
                memory.store_vector(words, into, wide_words, 0)
            else:
                words[into >> 2] = high
            if parted:
                words[(plane + into) >> 2] = middle
            if split:
                words[(2 * plane + into) >> 2] = low

    def convert(  # type: ignore[no-untyped-def]
        source, line_stride, stride, lines, width, target, target_line, plane, plan, flags, flag_lines, powers
    ):
        elements = memory.global_array(source, element)
        words = memory.global_array(target, word)
        settings = memory.global_array(plan, types.int64)
        marks = memory.global_array(flags, types.uint8)
        line_powers = memory.global_array(powers, types.int32)
        values = cuda.local.array(registers, element)
        if signs and settings[PLAN_KIND] != NONFINITE:
            return
        if parted and settings[PARTS_PLAN + PLAN_KIND] != parts_kind:
            return
        together = (source | u64(4 * line_stride)) & u64(15) == 0 and stride == 1 and width & 3 == 0
        in_words = (source | u64(line_stride)) & u64(3) == 0 and stride == 1 and width & 3 == 0
        source_words = memory.global_array(source, u32)
        segments = u32((width + SEGMENT - 1) // SEGMENT)
        for item in range(cuda.blockIdx.x, lines * segments, cuda.gridDim.x):
            line = i32(u32(item) // segments)
            first = i32(item - line * segments) * SEGMENT + QUAD * cuda.threadIdx.x
            start = line * line_stride
            line_power = line_powers[line] if halves and flag_lines != 0 else i32(0)
            # Nothing is read beyond the line: the last quad, or element, is read again instead, without a branch.
            if vectors and together:
                for q in range(BATCH):
                    memory.load_vector(
                        values, QUAD * q, elements, start + min(first + q * stretch, width - QUAD)
                    )
            elif narrow and in_words:
                for q in range(BATCH):
                    codes = source_words[(start + min(first + q * stretch, width - QUAD)) >> 2]
                    for e in range(QUAD):
                        values[QUAD * q + e] = u8(codes >> u32(8 * e))
            else:
                for q in range(BATCH):
                    for e in range(QUAD):
                        inside = min(first + q * stretch + e, width - 1)
                        values[QUAD * q + e] = elements[start + inside * stride]
            unroll(
                write_quad,
                BATCH,
                (
                    values,
                    words,
                    first,
                    width,
                    line * target_line,
                    plane,
                    settings,
                    marks,
                    line,
                    flag_lines,
                    line_powers,
                    line_power,
                ),
            )

    return convert


def turn_function() -> Callable[..., Any]:
    """The pass to ``tf32`` that turns: lines of the target are places of the source. ``ARGUMENTS`` as above, with
    ``lines`` and ``width`` those of the target; lines lie side by side (``line_stride`` 1), and lines of the target
    begin at multiples of 16 bytes.

    Grid: a block of ``THREADS`` threads for each tile of ``TURN_SIDE`` × ``TURN_SIDE`` elements, in bands, so that
    reads and writes at one time cover stretches of memory of about equal length. A thread reads four places of four
    lines, all under way together, and turns them in its registers; the tile is turned in shared memory (16 KiB) by
    whole vectors: chunk c of line l lies at chunk c XOR (l / 4 mod 8), so that the chunks that eight threads write, or
    read, at once lie in different banks. Registers: 40, no spills. Up to three elements beyond a line's width are
    written too.
    """
    side, quads, area, block = TURN_SIDE, TURN_SIDE // QUAD, TURN_SIDE**2, QUAD**2
    assert quads * quads == THREADS
    i32, i64, u32 = types.int32, types.int64, types.uint32

    def turn(  # type: ignore[no-untyped-def]
        source, line_stride, stride, lines, width, target, target_line, plane, plan, flags, flag_lines, powers
    ):
        elements = memory.global_array(source, u32)
        words = memory.global_array(target, u32)
        tile = cuda.shared.array(area, u32, alignment=16)
        values = cuda.local.array(block, u32)
        line_values = cuda.local.array(QUAD, u32)
        # Without signs: divisions and remainders of signed numbers take several times the instructions.
        thread = u32(cuda.threadIdx.x)
        tiles_down, tiles_across = u32((lines + side - 1) >> 6), u32((width + side - 1) >> 6)
        tile_line, tile_place = cluster_tile(u32(cuda.blockIdx.x), tiles_down, tiles_across, u32(TURN_BAND))
        first_line, first_place = i32(tile_line) * side, i32(tile_place) * side
        whole = first_line + side <= lines and first_place + side <= width

        # Eight threads read 128 contiguous bytes; a warp reads those of four quads of places.
        line_quad = i32((thread & u32(7)) | ((thread >> u32(2)) & u32(8)))
        place_quad = i32(((thread >> u32(3)) & u32(3)) | ((thread >> u32(4)) & u32(12)))
        line, place = first_line + QUAD * line_quad, first_place + QUAD * place_quad
        if whole and (source | types.uint64(QUAD * stride)) & types.uint64(15) == 0:
            start = i64(line) + place * stride
            for j in range(QUAD):
                memory.load_vector(values, QUAD * j, elements, start + j * stride)
        else:
            for j in range(QUAD):
                start = min(place + j, width - 1) * stride
                for i in range(QUAD):
                    values[QUAD * j + i] = elements[start + min(line + i, lines - 1)]
        chunk = place_quad ^ (line_quad & 7)
        for i in range(QUAD):
            for j in range(QUAD):
                line_values[j] = floats.tf32_bits(floats.bits_float(values[QUAD * j + i]))
            memory.store_vector(tile, (QUAD * line_quad + i) * side + QUAD * chunk, line_values, 0)
        cuda.syncthreads()  # the tile is complete

        down, place_quad = i32(thread >> u32(4)), i32(thread & u32(15))
        for j in range(QUAD):
            line = down + quads * j
            chunk = place_quad ^ (line >> 2 & 7)
            memory.load_vector(values, QUAD * j, tile, line * side + QUAD * chunk)
        place = first_place + QUAD * place_quad
        start = (first_line + down) * target_line + place
        for j in range(QUAD):
            if whole or (first_line + down + quads * j < lines and place < width):
                memory.store_vector(words, start + quads * j * target_line, values, QUAD * j)

    return turn


def reset_function() -> Callable[..., Any]:
    """Clear the flags, and have the plan say that all is finite, and to be split into three parts; any grid."""

    def reset(plan, flags, count):  # type: ignore[no-untyped-def]
        marks = memory.global_array(flags, types.uint8)
        first = cuda.grid(1)
        if first == 0:
            settings = memory.global_array(plan, types.int64)
            settings[PLAN_KIND] = 0
            settings[PLAN_PLANES] = 1
            settings[PARTS_PLAN + PLAN_KIND] = THIRDS
            settings[PARTS_PLAN + PLAN_PLANES] = 1
        for i in range(first, count, cuda.gridsize(1)):
            marks[i] = 0

    return reset


def itemsize(form: str) -> int:
    """Bytes of an element of the target."""
    return 4 if form == "tf32" else 2
