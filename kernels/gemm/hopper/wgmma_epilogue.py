"""How the matrix kernels write the sums of tensor cores to C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from numba import cuda
from numba.cuda import types

from tilewright.kernels.gemm.hopper.wgmma_config import C_BOX_NBYTES, C_LINE_NBYTES, Config
from tilewright.kernels.ptx import bulk_copy, floats, memory, warp_mma
from tilewright.kernels.ptx.unroll import unroll

ADDED_TOGETHER = 4
"""Groups of eight columns of C that are read before the first is added to."""
SCALED_TOGETHER = 4
"""The same of sums that are scaled."""
Conversions = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
"""Functions that convert a sum to an element of C, a sum to a term, and an element of C to a term."""


class Converted(Protocol):
    """What is to be known of a kernel's configuration."""

    @property
    def c_type(self) -> Any: ...
    @property
    def integer(self) -> bool: ...
    @property
    def bfloat16_c(self) -> bool: ...


def conversions(config: Converted) -> Conversions:
    """Those of the sums of floats, or of integers whose type is C's."""
    if not config.bfloat16_c:
        wide_type = config.c_type if config.integer else types.float32
        return config.c_type, wide_type, wide_type

    @cuda.jit(device=True, inline="always")
    def narrow(value):  # type: ignore[no-untyped-def]
        return floats.bfloat_bits(value)

    @cuda.jit(device=True, inline="always")
    def widened(element):  # type: ignore[no-untyped-def]
        return floats.bits_float(types.uint32(element) << types.uint32(16))

    return narrow, types.float32, widened


def line_scale(columns: int) -> Callable[..., Any]:
    """``scale(sums, powers, row, column, m, n)``: a thread's sums of ``columns`` columns, as `sum_store` has them,
    divided by the powers of two of their rows and columns; int32 at ``powers``, of the m rows and then of the columns.
    """
    pairs = columns // 8
    i32, u32, f32 = types.int32, types.uint32, types.float32

    @cuda.jit(device=True, inline="always")
    def divided(value, power):  # type: ignore[no-untyped-def]
        # In two steps: 2**power may be no float32. A result that is subnormal is rounded in the second alone.
        half = power >> i32(1)
        value = f32(value * floats.bits_float(u32(i32(127) - half) << u32(23)))
        return f32(value * floats.bits_float(u32(i32(127) - (power - half)) << u32(23)))

    @cuda.jit(device=True, inline="always")
    def scale_pair(j, sums, powers, upper, lower, left):  # type: ignore[no-untyped-def]
        for side in range(2):
            across = powers[min(i32(8 * j + side), left)]
            sums[4 * j + side] = divided(sums[4 * j + side], i32(upper + across))
            sums[4 * j + 2 + side] = divided(sums[4 * j + 2 + side], i32(lower + across))
        if j % SCALED_TOGETHER == SCALED_TOGETHER - 1:
            cuda.syncwarp()  # the compiler would read all powers before it multiplies by one, and lack registers

    @cuda.jit(device=True, inline="always")
    def scale(sums, powers, row, column, m, n):  # type: ignore[no-untyped-def]
        held = memory.global_array(powers, i32)
        upper, lower = held[min(row, m - 1)], held[min(row + 8, m - 1)]
        # Beyond C's last column its power is taken again.
        first = min(column, n - 1)
        of_columns = memory.global_array(types.uint64(powers) + types.uint64(4 * (m + first)), i32)
        unroll(scale_pair, pairs, (sums, of_columns, upper, lower, i32(n - 1 - first)))

    return scale


def sum_store(
    columns: int, conversions: Conversions, *, flagged_only: bool = False, second_row: int = 8
) -> Callable[..., Any]:
    """``store(sums, base, out, row, column, ...)``: a thread's sums of ``columns`` columns to C, or added to
    it.

    A thread holds rows ``row`` and ``row`` + ``second_row`` and, of every eight columns, two neighbours, from
    ``sums[base]`` on (PTX ISA, the accumulator layout of ``wgmma``, and of ``mma.m16n8`` side by side). Whole
    tiles of a row-major C are written in pairs: four lanes then fill a sector of 32 bytes, or two.
    """
    pairs = columns // 8
    c_type, wide_type, widened = conversions

    @cuda.jit(device=True, inline="always")
    def store_pair(j, sums, first, out, start):  # type: ignore[no-untyped-def]
        memory.store_pair(out, start + 8 * j, c_type(sums[4 * j + first]), c_type(sums[4 * j + first + 1]))

    @cuda.jit(device=True, inline="always")
    def add_pair(j, sums, first, out, start):  # type: ignore[no-untyped-def]
        left, right = memory.load_pair(out, start + 8 * j)
        left, right = (
            widened(left) + wide_type(sums[4 * j + first]),
            widened(right) + wide_type(sums[4 * j + first + 1]),
        )
        memory.store_pair(out, start + 8 * j, c_type(left), c_type(right))

    @cuda.jit(device=True, inline="always")
    def store_elements(  # type: ignore[no-untyped-def]
        j, sums, first, out, start, stride, columns, accumulate, flags, row_flag
    ):
        for side in range(2):
            if 8 * j + side < columns and (not flagged_only or row_flag != 0 or flags[8 * j + side] != 0):
                place = start + (8 * j + side) * stride
                value = wide_type(sums[4 * j + first + side])
                if accumulate != 0:
                    value += widened(out[place])
                out[place] = c_type(value)

    @cuda.jit(device=True, inline="always")
    def store_row(  # type: ignore[no-untyped-def]
        sums, first, out, start, stride, columns, accumulate, paired, flags, row_flag
    ):
        if paired and accumulate == 0 and not flagged_only:
            unroll(store_pair, pairs, (sums, first, out, start))
        elif paired and not flagged_only:
            unroll(add_pair, pairs, (sums, first, out, start))
        else:
            unroll(
                store_elements,
                pairs,
                (sums, first, out, start, stride, columns, accumulate, flags, row_flag),
            )

    @cuda.jit(device=True, inline="always")
    def store(  # type: ignore[no-untyped-def]
        sums, base, out, row, column, row_stride, column_stride, m, n, paired, accumulate, workspace
    ):
        start = row * row_stride + column * column_stride
        row_flags = memory.global_array(workspace, types.uint8)
        flags = memory.global_array(workspace + types.uint64(m + column), types.uint8)
        if row < m:
            row_flag = row_flags[row] if flagged_only else types.uint8(0)
            store_row(sums, base, out, start, column_stride, n - column, accumulate, paired, flags, row_flag)
        if row + second_row < m:
            row_flag = row_flags[row + second_row] if flagged_only else types.uint8(0)
            start += second_row * row_stride
            store_row(
                sums, base + 2, out, start, column_stride, n - column, accumulate, paired, flags, row_flag
            )

    return store


def column_store(columns: int, conversions: Conversions) -> Callable[..., Any]:
    """``store``, called as ``sum_store``'s, of sums to a C with contiguous columns.

    A thread holds rows ``row`` and ``row`` + 1 and, of every eight columns, two neighbours: as
    `wgmma_registers` orders the rows. Where all the rows of a warp are in C, a pair of rows is written at once:
    four lanes then fill a sector of 32 bytes.
    """
    steps = columns // 8
    together = ADDED_TOGETHER
    batches, words = steps // together, 4 * together
    c_type, wide_type, widened = conversions

    @cuda.jit(device=True, inline="always")
    def store_step(i, batch, sums, out, start, stride, columns):  # type: ignore[no-untyped-def]
        j = batch * together + i
        for side in range(2):
            if 8 * j + side < columns:
                place = start + (8 * j + side) * stride
                memory.store_pair(out, place, c_type(sums[4 * j + side]), c_type(sums[4 * j + 2 + side]))

    @cuda.jit(device=True, inline="always")
    def load_step(i, batch, found, out, start, stride, columns):  # type: ignore[no-untyped-def]
        j = batch * together + i
        for side in range(2):
            if 8 * j + side < columns:
                upper, lower = memory.load_pair(out, start + (8 * j + side) * stride)
                found[4 * i + side], found[4 * i + 2 + side] = widened(upper), widened(lower)

    @cuda.jit(device=True, inline="always")
    def add_step(i, batch, sums, found):  # type: ignore[no-untyped-def]
        for place in range(4):
            sums[4 * (batch * together + i) + place] += found[4 * i + place]

    @cuda.jit(device=True, inline="always")
    def store_batch(batch, sums, out, start, stride, columns):  # type: ignore[no-untyped-def]
        unroll(store_step, together, (batch, sums, out, start, stride, columns))

    @cuda.jit(device=True, inline="always")
    def add_batch(batch, sums, found, out, start, stride, columns):  # type: ignore[no-untyped-def]
        # The compiler does not know the stride, so it keeps each load after the store before it: a batch reads ahead.
        unroll(load_step, together, (batch, found, out, start, stride, columns))
        unroll(add_step, together, (batch, sums, found))
        unroll(store_step, together, (batch, sums, out, start, stride, columns))

    @cuda.jit(device=True, inline="always")
    def store_elements(  # type: ignore[no-untyped-def]
        j, sums, out, start, row_stride, column_stride, rows, columns, accumulate
    ):
        for side in range(2):
            for half in range(2):
                if 8 * j + side < columns and half < rows:
                    place = start + (8 * j + side) * column_stride + half * row_stride
                    value = wide_type(sums[4 * j + 2 * half + side])
                    if accumulate != 0:
                        value += widened(out[place])
                    out[place] = c_type(value)

    @cuda.jit(device=True, inline="always")
    def store(  # type: ignore[no-untyped-def]
        sums, base, out, row, column, row_stride, column_stride, m, n, paired, accumulate, workspace
    ):
        start = row * row_stride + column * column_stride
        if paired:
            inside = types.int32(n - column)
            if accumulate == 0:
                unroll(store_batch, batches, (sums, out, start, column_stride, inside))
            else:
                found = cuda.local.array(words, wide_type)
                unroll(add_batch, batches, (sums, found, out, start, column_stride, inside))
        else:
            unroll(
                store_elements,
                steps,
                (sums, out, start, row_stride, column_stride, m - row, n - column, accumulate),
            )

    return store


def box_store(config: Config) -> Callable[..., Any]:
    """``store_boxes(sums, staging, map_c, row, column, lane)``: a warp's 16 rows of a tile through shared memory.

    The warp writes box after box (16 rows × 128 bytes, swizzled as the tensor map says) into its own
    ``config.boxes`` places at ``staging``; the copy engine carries them to C while the warp goes on, so the warp waits
    for a place only when its turn comes again. ``row``, ``column``: of the warp's first element. What lies outside C is
    not written. A C of 32-bit elements can also be written from registers, which fill whole sectors: an instruction
    then writes to eight lines, though, and takes as long as for eight whole ones.
    """
    boxes = config.boxes
    pack = floats.bfloat_pair if config.bfloat16_c else floats.half_pair
    wide = boxes > 0 and config.c_type.bitwidth == 32
    word = types.uint32 if config.integer else floats.float_word
    columns = config.box_c[0]
    count, steps = config.tile_n // columns, columns // (8 if wide else 16)
    free_place = bulk_copy.bulk_wait(max(boxes - 1, 0), read=True)
    i32, u32 = types.int32, types.uint32

    @cuda.jit(device=True, inline="always")
    def write_16_columns(i, box, sums, line, lane):  # type: ignore[no-untyped-def]
        # Four 8 × 8 matrices: rows 0 to 7 and 8 to 15 of eight columns, then of the next eight. A line's 16-byte chunks
        # lie at their number XOR the line's: the addresses of a matrix lie in different banks.
        first = 32 * box + 8 * i
        chunk = u32(2 * i) + (lane >> u32(4))
        warp_mma.store_matrices(
            line + ((chunk ^ (lane & u32(7))) << u32(4)),
            pack(sums[first], sums[first + 1]),
            pack(sums[first + 2], sums[first + 3]),
            pack(sums[first + 4], sums[first + 5]),
            pack(sums[first + 6], sums[first + 7]),
        )

    @cuda.jit(device=True, inline="always")
    def write_8_columns(i, box, sums, line, lane):  # type: ignore[no-untyped-def]
        # Lanes of odd rows write the eight columns that are 16 further, or before: the sixteen lanes that an 8-byte
        # access serves at a time, of four rows, then write to different banks.
        row, pair = lane >> u32(2), lane & u32(3)
        odd = (row & u32(1)) != u32(0)
        first, other = 16 * box + 4 * i, 16 * box + 4 * (i ^ 2)
        crossed = ((row & u32(1)) << u32(2)) ^ (pair >> u32(1)) ^ row
        place = line + ((u32(2 * i) ^ crossed) << u32(4)) + ((pair & u32(1)) << u32(3))
        memory.store_shared_words(
            place,
            word(sums[other] if odd else sums[first]),
            word(sums[other + 1] if odd else sums[first + 1]),
        )
        memory.store_shared_words(
            place + u32(8 * C_LINE_NBYTES),
            word(sums[other + 2] if odd else sums[first + 2]),
            word(sums[other + 3] if odd else sums[first + 3]),
        )

    write_columns = write_8_columns if wide else write_16_columns

    @cuda.jit(device=True, inline="always")
    def write_box(box, sums, staging, line, map_c, row, column, lane):  # type: ignore[no-untyped-def]
        offset = u32(box % boxes * C_BOX_NBYTES)
        if lane == 0:
            free_place()
        cuda.syncwarp()  # the copy engine has read what was here before
        unroll(write_columns, steps, (box, sums, line + offset, lane))
        bulk_copy.copy_engine_fence()
        cuda.syncwarp()  # the box is complete
        if lane == 0:
            bulk_copy.tensor_store(map_c, staging + offset, i32(column + box * columns), row, i32(0))
            bulk_copy.bulk_commit()

    @cuda.jit(device=True, inline="always")
    def store_boxes(sums, staging, map_c, row, column, lane):  # type: ignore[no-untyped-def]
        lane = u32(lane)
        # The line whose address this lane gives, or to which it writes.
        line = staging + (lane >> u32(2) if wide else lane & u32(15)) * u32(C_LINE_NBYTES)
        unroll(write_box, count, (sums, staging, line, map_c, row, column, lane))

    return store_boxes
