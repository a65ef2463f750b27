"""Device passes that write float matrices as the Hopper tensor cores take them: narrower, aligned, or in
parts.

A matrix is ``lines`` of ``width`` elements that lie side by side (or with any stride); a pass keeps that
order, since 16-bit operands may come either way. Only TF32 must have k side by side: its pass can turn the
matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from tilewright.kernels import ptx
from tilewright.kernels.gemm.residues import PLAN_KIND, PLAN_PLANES

THREADS = 256
QUAD = 4
TURN_SIDE = 64
"""Lines and places of a tile that is turned in shared memory."""
FORMS = ("bf16", "f16", "tf32", "copy", "split", "signs")
"""``bf16``, ``f16``, ``tf32``: rounded to nearest. ``copy``: 16-bit elements as they are. ``split``: three
bfloat16 planes whose sum is the number. ``signs``: what decides how infinities and NaN come out of a
product."""
NONFINITE = 1
"""The plan kind that says: there is an infinity or a NaN."""
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
    types.int32,  # flag_lines: whether flags count lines, not places
)
RESET_ARGUMENTS = (types.uint64, types.uint64, types.int32)


@cuda.jit(device=True, inline="always")
def bfloat16_bits(value):  # type: ignore[no-untyped-def]
    """The nearest bfloat16 of a finite number, ties to even; never infinity, which the largest would round
    to."""
    bits = ptx.float_bits(value)
    rounded = types.uint32(bits + types.uint32(0x7FFF) + ((bits >> types.uint32(16)) & types.uint32(1)))
    if (rounded & types.uint32(EXPONENT)) == types.uint32(EXPONENT):
        rounded = bits
    return types.uint32(rounded >> types.uint32(16))


@cuda.jit(device=True, inline="always")
def is_finite(value):  # type: ignore[no-untyped-def]
    return (ptx.float_bits(value) & types.uint32(EXPONENT)) != types.uint32(EXPONENT)


@cuda.jit(device=True, inline="always")
def bfloat16_or_special(value):  # type: ignore[no-untyped-def]
    """The nearest bfloat16, as IEEE rounds: infinity from what is too large, NaN stays NaN."""
    bits = ptx.float_bits(value)
    if value != value:
        return types.uint32(0x7FC0)
    rounded = types.uint32(bits + types.uint32(0x7FFF) + ((bits >> types.uint32(16)) & types.uint32(1)))
    return types.uint32(rounded >> types.uint32(16))


@cuda.jit(device=True, inline="always")
def sign_bits(value):  # type: ignore[no-untyped-def]
    """0, plus or minus 1 as bfloat16 for finite numbers; infinities and NaN as they are."""
    bits = ptx.float_bits(value)
    sign = (bits >> types.uint32(16)) & types.uint32(0x8000)
    if value != value:
        return types.uint32(0x7FC0)
    if not is_finite(value):
        return types.uint32(bits >> types.uint32(16))
    return types.uint32(0) if value == types.float32(0) else types.uint32(sign | types.uint32(ONE))


def pass_function(form: str) -> Callable[..., Any]:
    """The pass to ``form``, one of FORMS, as a function of ``ARGUMENTS``: any grid, ``THREADS`` threads a
    block.

    Source: float32, but 16-bit elements for ``copy``. Target: 16-bit elements, but 32-bit for ``tf32``;
    planes of lines, each beginning at a multiple of four elements; up to three places behind a line become
    zero. ``split`` takes infinities and NaN as zero, flags their lines, and says NONFINITE in the plan;
    ``signs`` runs only then.
    """
    element = types.uint16 if form == "copy" else types.float32
    split, signs, wide = form == "split", form == "signs", form == "tf32"
    word = types.uint32 if wide else types.uint64
    u32, u64, f32 = types.uint32, types.uint64, types.float32

    @cuda.jit(device=True, inline="always")
    def encoded(value):  # type: ignore[no-untyped-def]
        if form == "copy":
            return u32(value)
        if form == "bf16":
            return bfloat16_or_special(value)
        if form == "f16":
            return u32(ptx.half_bits(value))
        if form == "signs":
            return sign_bits(value)
        return ptx.tf32_bits(value)

    def convert(  # type: ignore[no-untyped-def]
        source, line_stride, stride, lines, width, target, target_line, plane, plan, flags, flag_lines
    ):
        elements = ptx.global_array(source, element)
        words = ptx.global_array(target, word)
        settings = ptx.global_array(plan, types.int64)
        marks = ptx.global_array(flags, types.uint8)
        if signs and settings[PLAN_KIND] != NONFINITE:
            return
        for line in range(cuda.blockIdx.x, lines, cuda.gridDim.x):
            for quad in range(cuda.threadIdx.x, (width + 3) // 4, THREADS):
                place = 4 * quad
                start = line * line_stride
                into = line * target_line + place
                high, middle, low = u64(0), u64(0), u64(0)
                for e in range(4):
                    # Behind the line the last element comes again; nobody reads it there, and no branch is
                    # needed.
                    inside = min(place + e, width - 1)
                    value = elements[start + inside * stride]
                    if wide:
                        words[into + e] = encoded(value)
                    elif split:
                        if not is_finite(value):
                            value = f32(0)
                            settings[PLAN_KIND] = NONFINITE
                            marks[line if flag_lines != 0 else inside] = 1
                        first = bfloat16_bits(value)
                        rest = value - ptx.bits_float(first << u32(16))
                        second = bfloat16_bits(rest)
                        rest -= ptx.bits_float(second << u32(16))
                        high |= u64(first) << u64(16 * e)
                        middle |= u64(second) << u64(16 * e)
                        low |= u64(bfloat16_bits(rest)) << u64(16 * e)
                    else:
                        high |= u64(encoded(value)) << u64(16 * e)
                if not wide:
                    words[into // 4] = high
                if split:
                    words[(plane + into) // 4] = middle
                    words[(2 * plane + into) // 4] = low

    return convert


def turn_function() -> Callable[..., Any]:
    """The pass to ``tf32`` that turns: lines of the target are places of the source. ``ARGUMENTS`` as
    above, with ``lines`` and ``width`` those of the target and ``stride`` 1 from line to line of it.
    ``THREADS`` threads a block.
    """
    side = TURN_SIDE
    padded = TURN_SIDE + 1  # one more, so that a column of the tile is spread over all banks
    warps = THREADS // 32
    halves = TURN_SIDE // 32
    batch = halves * (TURN_SIDE // warps)

    def turn(  # type: ignore[no-untyped-def]
        source, line_stride, stride, lines, width, target, target_line, plane, plan, flags, flag_lines
    ):
        elements = ptx.global_array(source, types.float32)
        words = ptx.global_array(target, types.uint32)
        tile = cuda.shared.array((side, padded), types.uint32)
        values = cuda.local.array(batch, types.float32)
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        across = (lines + side - 1) // side
        tiles = across * ((width + side - 1) // side)
        for index in range(cuda.blockIdx.x, tiles, cuda.gridDim.x):
            first_line, first_place = index % across * side, index // across * side
            for i in range(batch):  # all under way before any is waited for
                line = min(first_line + lane + 32 * (i % halves), lines - 1)
                place = min(first_place + warp + warps * (i // halves), width - 1)
                values[i] = elements[line * line_stride + place * stride]
            cuda.syncthreads()  # the tile before has been written out
            for i in range(batch):
                tile[lane + 32 * (i % halves), warp + warps * (i // halves)] = ptx.tf32_bits(values[i])
            cuda.syncthreads()  # the tile is complete
            for i in range(batch):
                down, right = warp + warps * (i // halves), lane + 32 * (i % halves)
                line, place = first_line + down, first_place + right
                if line < lines and place < width:
                    words[line * target_line + place] = tile[down, right]

    return turn


def reset_function() -> Callable[..., Any]:
    """No flags, and a plan that knows of nothing that is not finite; any grid."""

    def reset(plan, flags, count):  # type: ignore[no-untyped-def]
        marks = ptx.global_array(flags, types.uint8)
        first = cuda.grid(1)
        if first == 0:
            settings = ptx.global_array(plan, types.int64)
            settings[PLAN_KIND] = 0
            settings[PLAN_PLANES] = 1
        for i in range(first, count, cuda.gridsize(1)):
            marks[i] = 0

    return reset


def itemsize(form: str) -> int:
    """Bytes of an element of the target."""
    return 4 if form == "tf32" else 2


def source_dtypes(form: str) -> tuple[np.dtype, ...]:
    return (np.dtype(np.float16),) if form == "copy" else (np.dtype(np.float32),)
