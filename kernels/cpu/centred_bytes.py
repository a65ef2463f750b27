"""Products of bytes that are centred, some of which are missing, on CPUs that multiply bytes: genotypes, for one.

With the number u that a step of k is centred by, its nearest integer r and d = u - r, a number x is y = x - r, a byte,
and a missing one y = 0. With n = 1 where a number is missing, and 0 elsewhere, y - d + d n is multiplied, which is
x - u or 0. So a sum over k is

    Σ z_i z_j = Σ y_i y_j - t_i - t_j + Σ d² + L_ij + K_ij,
    t_i = Σ d (y_i + d n_i),   L_ij = Σ d (y_j + d n_j) over what i lacks,   K_ij = Σ d y_i over what j lacks.

The first sum is an exact one of bytes (`byte_integer.py`), four times as fast as one of float32. L and K take a
multiply-add of float32 for each missing number and each line of the other side, in the order of k. All else is a sum of
a line, in float64. So the bits of an element follow from its two lines alone, wherever they lie in an operand, and from
where k is cut.

Lines are taken in blocks of `SIDE`: what a pair of blocks needs stays in a core's second cache.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from tilewright.kernels.cpu.byte_integer import ROWS, available, byte_tile
from tilewright.kernels.cpu.centred_panel import ALIGNMENT, GROUP, SIDE, parts_nbytes, pieces_of
from tilewright.kernels.cpu.loops import compiled, on_threads, target_type
from tilewright.kernels.cpu.vector_code import INT32, INT64, Loop, broadcast, load, pointer
from tilewright.kernels.cpu.vectors import trailing_zeros
from tilewright.kernels.numbers import ceil_div, round_up

__all__ = ["Packed", "available", "multiply", "pack"]

LANES = 16
"""Numbers of four bytes in a vector."""
SIGN = 0x80808080
"""Turns four signed bytes into what they are more than -128, as bytes of the left operand have to be unsigned."""

_BYTE, _FLOAT, _DOUBLE = ir.IntType(8), ir.FloatType(), ir.DoubleType()
_BYTES, _INTS = ir.VectorType(_BYTE, LANES), ir.VectorType(INT32, LANES)
_FLOATS, _DOUBLES = ir.VectorType(_FLOAT, LANES), ir.VectorType(_DOUBLE, LANES)


class Packed(NamedTuple):
    """A piece of an operand, of k steps, in blocks of `SIDE` lines, the last filled up, with all that either side of a
    product needs. Steps are filled up to whole groups of `GROUP`, with zeros."""

    left: np.ndarray
    """(blocks, panels of `ROWS` lines, groups, lines) words of four unsigned bytes: y + 128."""
    right: np.ndarray
    """(blocks, groups, lines) words of four signed bytes: y."""
    values: np.ndarray
    """(blocks, k, lines) signed bytes: y."""
    masks: np.ndarray
    """(blocks, k) uint64: a bit for each line, which is set where it lacks the step."""
    gone: np.ndarray
    """(blocks, lines, k) uint16: the steps that a line lacks, in their order."""
    counts: np.ndarray
    """(blocks, lines): how many these are."""
    shares: np.ndarray
    """(2, blocks, lines) float64: t, and t + 128 Σ y, as a line of the left operand and of the right one."""
    offsets: np.ndarray
    """(k,) float32: d."""


def _fma(builder: Any, kind: Any, name: str) -> Any:
    """LLVM's fused multiply-add of vectors of this kind."""
    function = ir.FunctionType(kind, (kind, kind, kind))
    return cgutils.get_or_insert_function(builder.module, function, f"llvm.fma.{name}")


def _line() -> Any:
    """The intrinsic ``line(values, sums, shares, middle, offset, missing)``: one step of k of a block. Returns a
    bit for each line, which is set where it lacks the step.

    values: address of the block's numbers, replaced by y. sums, shares: addresses of Σ y, int32, and t, float64, which
    are added to. middle, offset: r and d. missing: what stands for a missing number; more than a byte where nothing
    does.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, sums, shares, middle, offset, missing = arguments
        multiply_add = _fma(builder, _DOUBLES, "v16f64")
        middles = broadcast(builder, builder.trunc(middle, _BYTE), _BYTES)
        code = broadcast(builder, builder.trunc(missing, _BYTE), _BYTES)
        some = builder.icmp_unsigned("<", missing, ir.Constant(INT64, 256))
        offsets = broadcast(builder, offset, _FLOATS)
        factors = broadcast(builder, builder.fpext(offset, _DOUBLE), _DOUBLES)
        mask = ir.Constant(INT64, 0)
        for v in range(SIDE // LANES):
            found = load(builder, values, LANES * v, _BYTES, 1)
            gone = builder.icmp_signed("==", found, code)
            gone = builder.and_(gone, broadcast(builder, some, gone.type))
            bits = builder.zext(builder.bitcast(gone, ir.IntType(LANES)), INT64)
            mask = builder.or_(mask, builder.shl(bits, ir.Constant(INT64, LANES * v)))
            value = builder.select(gone, ir.Constant(_BYTES, None), builder.sub(found, middles))
            _store(builder, value, values, LANES * v, 1)
            whole = builder.sext(value, _INTS)
            total = load(builder, sums, 4 * LANES * v, _INTS, 4)
            _store(builder, builder.add(total, whole), sums, 4 * LANES * v, 4)
            entry = builder.fpext(builder.select(gone, offsets, builder.sitofp(whole, _FLOATS)), _DOUBLES)
            share = load(builder, shares, 8 * LANES * v, _DOUBLES, 8)
            _store(builder, builder.call(multiply_add, (factors, entry, share)), shares, 8 * LANES * v, 8)
        return mask

    def line(typing: Any, values: Any, sums: Any, shares: Any, middle: Any, offset: Any, missing: Any) -> Any:
        address, integer = numba.types.uint64, numba.types.int64
        kinds = address, address, address, integer, numba.types.float32, integer
        return numba.types.uint64(*kinds), build

    return intrinsic(line)


def _store(builder: Any, value: Any, address: Any, offset: int, alignment: int) -> None:
    builder.store(value, pointer(builder, address, offset, value.type)).align = alignment


def _lacking(masked: bool) -> Any:
    """The intrinsic ``lacking(gone, count, offsets, values, masks, sums)``: for the ``count`` >= 1 steps that a line
    lacks, the sum of d times a block's y; ``masked``, of d times what takes d in the place of what that block lacks.

    gone: address of these steps. offsets: of d. values, masks: of what `Packed` has of the block. sums: of `SIDE`
    float32, written.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        gone, count, offsets, values, masks, sums = arguments
        multiply_add = _fma(builder, _FLOATS, "v16f32")
        loop = Loop(builder, count, (gone, 2))
        (here,) = loop.places
        before = [loop.sum_of(_FLOATS) for _ in range(SIDE // LANES)]
        step = builder.zext(load(builder, here, 0, ir.IntType(16), 2), INT64)
        its_offset = builder.add(offsets, builder.shl(step, ir.Constant(INT64, 2)))
        factor = broadcast(builder, load(builder, its_offset, 0, _FLOAT, 4), _FLOATS)
        line = builder.add(values, builder.mul(step, ir.Constant(INT64, SIDE)))
        mask = builder.add(masks, builder.shl(step, ir.Constant(INT64, 3)))
        totals = []
        for v, total in enumerate(before):
            its = builder.sext(load(builder, line, LANES * v, _BYTES, 1), _INTS)
            its = builder.sitofp(its, _FLOATS)
            if masked:
                bits = load(builder, mask, LANES // 8 * v, ir.IntType(LANES), 2)
                its = builder.select(builder.bitcast(bits, ir.VectorType(ir.IntType(1), LANES)), factor, its)
            totals.append(builder.call(multiply_add, (factor, its, total)))
            loop.carry(total, totals[-1])
        loop.end()
        for v, total in enumerate(totals):
            _store(builder, total, sums, 4 * LANES * v, 4)
        return context.get_dummy_value()

    def lacking(typing: Any, gone: Any, count: Any, offsets: Any, values: Any, masks: Any, sums: Any) -> Any:
        address, integer = numba.types.uint64, numba.types.int64
        return numba.types.void(address, integer, address, address, address, address), build

    return intrinsic(lacking)


@intrinsic
def _add_turned(typing: Any, other: Any, sums: Any) -> Any:
    """Add the transpose of a square of `LANES` float32 to another. Addresses of both, in blocks of `SIDE` lines."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        other, sums = arguments
        lines = [load(builder, other, 4 * SIDE * i, _FLOATS, 4) for i in range(LANES)]
        step = 1
        # Each pass exchanges the squares of this side beside the diagonal of each square of twice that.
        while step < LANES:
            from_both = [i if not i & step else LANES + i - step for i in range(LANES)]
            from_ends = [i + step if not i & step else LANES + i for i in range(LANES)]
            for i in range(LANES):
                if not i & step:
                    one, two = lines[i], lines[i + step]
                    lines[i] = _shuffled(builder, one, two, from_both)
                    lines[i + step] = _shuffled(builder, one, two, from_ends)
            step *= 2
        for i, line in enumerate(lines):
            total = load(builder, sums, 4 * SIDE * i, _FLOATS, 4)
            _store(builder, builder.fadd(total, line), sums, 4 * SIDE * i, 4)
        return context.get_dummy_value()

    address = numba.types.uint64
    return numba.types.void(address, address), build


def _shuffled(builder: Any, one: Any, other: Any, places: list[int]) -> Any:
    return builder.shuffle_vector(one, other, ir.Constant(_INTS, places))


@intrinsic
def _finish_line(typing: Any, exact: Any, beside: Any, shares: Any, share: Any, target: Any) -> Any:
    """Add a line of a block to that of C: what is exact, the shares of both lines, in float64, and what is beside.

    Addresses of `SIDE` int32, float32, float64 and, written, float32; the share of the line itself.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        exact, beside, shares, share, target = arguments
        own = broadcast(builder, share, _DOUBLES)
        for v in range(SIDE // LANES):
            value = builder.sitofp(load(builder, exact, 4 * LANES * v, _INTS, 4), _DOUBLES)
            value = builder.fadd(value, builder.fsub(own, load(builder, shares, 8 * LANES * v, _DOUBLES, 8)))
            more = builder.fpext(load(builder, beside, 4 * LANES * v, _FLOATS, 4), _DOUBLES)
            value = builder.fptrunc(builder.fadd(value, more), _FLOATS)
            total = load(builder, target, 4 * LANES * v, _FLOATS, 4)
            _store(builder, builder.fadd(total, value), target, 4 * LANES * v, 4)
        return context.get_dummy_value()

    address, number = numba.types.uint64, numba.types.float64
    return numba.types.void(address, address, address, number, address), build


_pack_line = _line()
_lacking_plain, _lacking_masked = _lacking(False), _lacking(True)


def _pack(
    source: Any,
    missing: int,
    middles: Any,
    offsets: Any,
    left: Any,
    right: Any,
    values: Any,
    masks: Any,
    gone: Any,
    counts: Any,
    shares: Any,
    start: int,
    stop: int,
) -> None:
    """Write blocks start to stop of an operand. source: (k, lines) bytes. middles, offsets: r and d, of all steps of
    whole groups. The others are those of `Packed`, written."""
    k, lines = source.shape
    sums = np.empty(SIDE, np.int32)
    of_sums = numba.uint64(sums.ctypes.data)
    for block in range(start, stop):
        base = block * SIDE
        count = min(SIDE, lines - base)
        its = values[block]
        if count < SIDE:
            its[:] = 0
        for step in range(k):
            here, found = its[step, :count], source[step, base : base + count]
            for i in range(count):
                here[i] = found[i]
        its[k:] = 0
        sums[:] = 0
        counts[block] = 0
        shares[0, block] = 0.0
        there = (np.uint64(1) << np.uint64(count)) - np.uint64(1)
        of_shares = numba.uint64(shares[0, block].ctypes.data)
        for step in range(its.shape[0]):
            lacks = _pack_line(
                numba.uint64(its[step].ctypes.data),
                of_sums,
                of_shares,
                middles[step],
                offsets[step],
                missing if step < k else 256,
            )
            lacks &= there
            masks[block, step] = lacks
            while lacks:
                i = trailing_zeros(lacks)
                gone[block, i, counts[block, i]] = step
                counts[block, i] += 1
                lacks &= lacks - np.uint64(1)
        for i in range(SIDE):
            shares[1, block, i] = shares[0, block, i] + 128.0 * np.float64(sums[i])
        for group in range(right.shape[1]):
            words = right[block, group]
            first, second, third, last = (
                its[4 * group],
                its[4 * group + 1],
                its[4 * group + 2],
                its[4 * group + 3],
            )
            for i in range(SIDE):
                words[i] = (
                    np.uint32(first[i])
                    | np.uint32(second[i]) << np.uint32(8)
                    | np.uint32(third[i]) << np.uint32(16)
                    | np.uint32(last[i]) << np.uint32(24)
                )
            for panel in range(SIDE // ROWS):
                unsigned = left[block, panel, group]
                for i in range(ROWS):
                    unsigned[i] = words[panel * ROWS + i] ^ np.uint32(SIGN)


def _multiply(
    left: Any,
    values_left: Any,
    gone_left: Any,
    counts_left: Any,
    shares_left: Any,
    right: Any,
    values_right: Any,
    masks: Any,
    gone_right: Any,
    counts_right: Any,
    shares_right: Any,
    offsets: Any,
    corner: float,
    target: Any,
    lower: bool,
    start: int,
    stop: int,
) -> None:
    """Add left × right into target; blocks start to stop of the left. lower: of a square, blocks right of the diagonal
    are left out."""
    groups = right.shape[1]
    exact = np.empty((SIDE, SIDE), np.int32)
    beside = np.empty((SIDE, SIDE), np.float32)
    other = np.empty((SIDE, SIDE), np.float32)
    line = np.zeros(SIDE, np.float32)
    of_offsets = numba.uint64(offsets.ctypes.data)
    for across in range(right.shape[0]):
        j0 = across * SIDE
        width = min(SIDE, target.shape[1] - j0)
        words = numba.uint64(right[across].ctypes.data)
        of_right = numba.uint64(values_right[across].ctypes.data)
        of_masks = numba.uint64(masks[across].ctypes.data)
        first = max(start, across) if lower else start
        for down in range(first, stop):
            i0 = down * SIDE
            height = min(SIDE, target.shape[0] - i0)
            for panel in range(SIDE // ROWS):
                place = numba.uint64(exact[ROWS * panel].ctypes.data)
                byte_tile(numba.uint64(left[down, panel].ctypes.data), words, groups, place)
            for i in range(height):
                count = counts_left[down, i]
                if count:
                    lacks = numba.uint64(gone_left[down, i].ctypes.data)
                    place = numba.uint64(beside[i].ctypes.data)
                    _lacking_masked(lacks, count, of_offsets, of_right, of_masks, place)
                else:
                    beside[i] = 0
            of_left = numba.uint64(values_left[down].ctypes.data)
            for j in range(width):
                count = counts_right[across, j]
                if count:
                    lacks = numba.uint64(gone_right[across, j].ctypes.data)
                    place = numba.uint64(other[j].ctypes.data)
                    _lacking_plain(lacks, count, of_offsets, of_left, of_masks, place)
                else:
                    other[j] = 0
            for i in range(0, SIDE, LANES):
                for j in range(0, SIDE, LANES):
                    place = numba.uint64(beside[i, j:].ctypes.data)
                    _add_turned(numba.uint64(other[j, i:].ctypes.data), place)
            its_shares = numba.uint64(shares_right[1, across].ctypes.data)
            for i in range(height):
                its = target[i0 + i, j0 : j0 + width]
                for j in range(width):
                    line[j] = its[j]
                _finish_line(
                    numba.uint64(exact[i].ctypes.data),
                    numba.uint64(beside[i].ctypes.data),
                    its_shares,
                    corner - shares_left[0, down, i],
                    numba.uint64(line.ctypes.data),
                )
                for j in range(width):
                    its[j] = line[j]


def pack(
    source: np.ndarray,
    centres: np.ndarray | None,
    missing: int | None,
    memory: np.ndarray,
    pool: ThreadPoolExecutor,
) -> list[Packed]:
    """An operand as it is multiplied, in pieces along k.

    source: k × lines of int8 or uint8, any strides. centres: (k,) float32, what each step is centred by; None: 0. No
    number that is there differs from the integer nearest to its step's centre by more than `MOST_APART`. missing: what
    stands for a missing number, if anything does. memory: uint8, `centred_panel.packed_nbytes` long, which the result
    is in.
    """
    memory = memory[-memory.ctypes.data % ALIGNMENT :]
    pieces = []
    for steps in pieces_of(source.shape[0]):
        parts = []
        for size in parts_nbytes(source.shape[1], steps.stop - steps.start):
            parts.append(memory[:size])
            memory = memory[round_up(size, ALIGNMENT) :]
        its = None if centres is None else centres[steps]
        pieces.append(_packed(source[steps], its, missing, parts, pool))
    return pieces


def _packed(
    source: np.ndarray,
    centres: np.ndarray | None,
    missing: int | None,
    parts: list[np.ndarray],
    pool: ThreadPoolExecutor,
) -> Packed:
    k, lines = source.shape
    count, groups = ceil_div(lines, SIDE), ceil_div(k, GROUP)
    steps = groups * GROUP
    middles, offsets = np.zeros(steps, np.int64), np.zeros(steps, np.float32)
    if centres is not None:
        middles[:k] = np.rint(centres)
        offsets[:k] = centres - middles[:k]  # exact
    held = Packed(
        parts[0].view(np.uint32).reshape(count, SIDE // ROWS, groups, ROWS),
        parts[1].view(np.uint32).reshape(count, groups, SIDE),
        parts[2].reshape(count, steps, SIDE),
        parts[3].view(np.uint64).reshape(count, steps),
        parts[4].view(np.uint16).reshape(count, SIDE, steps),
        np.empty((count, SIDE), np.int64),
        np.empty((2, count, SIDE)),
        offsets,
    )
    types = numba.types
    layout = "C" if source.flags.c_contiguous else "A"
    loop = compiled(
        _pack,
        types.Array(types.uint8, 2, layout, readonly=True),
        types.int64,
        types.int64[::1],
        types.float32[::1],
        types.uint32[:, :, :, ::1],
        types.uint32[:, :, ::1],
        types.uint8[:, :, ::1],
        types.uint64[:, ::1],
        types.uint16[:, :, ::1],
        types.int64[:, ::1],
        types.float64[:, :, ::1],
        types.int64,
        types.int64,
    )
    code = 256 if missing is None else missing % 256
    found = source.view(np.uint8)
    on_threads(pool, loop, count, found, code, middles, offsets, *held[:-1])
    return held


def multiply(
    left: list[Packed],
    right: list[Packed],
    out: np.ndarray,
    pool: ThreadPoolExecutor,
    *,
    accumulate: bool,
    lower: bool,
) -> None:
    """``out (+)= left rightᵀ`` of operands of the same steps.

    out: float32, lines of the left × lines of the right, any strides, written. lower: of a square out only elements on
    and below the diagonal are wanted; blocks above it are left out, and keep what they hold, but where they are part of
    a block on it.
    """
    if not accumulate:
        out[...] = 0
    types = numba.types
    lacks = types.uint16[:, :, ::1], types.int64[:, ::1], types.float64[:, :, ::1]
    loop = compiled(
        _multiply,
        types.uint32[:, :, :, ::1],
        types.uint8[:, :, ::1],
        *lacks,
        types.uint32[:, :, ::1],
        types.uint8[:, :, ::1],
        types.uint64[:, ::1],
        *lacks,
        types.float32[::1],
        types.float64,
        types.Array(types.float32, 2, "C") if out.flags.c_contiguous else target_type(out.dtype),
        types.boolean,
        types.int64,
        types.int64,
    )
    for one, other in zip(left, right, strict=True):
        corner = float(np.square(one.offsets, dtype=np.float64).sum())
        of_left = one.left, one.values, one.gone, one.counts, one.shares
        of_right = other.right, other.values, other.masks, other.gone, other.counts, other.shares
        on_threads(pool, loop, len(one.left), *of_left, *of_right, one.offsets, corner, out, lower)
