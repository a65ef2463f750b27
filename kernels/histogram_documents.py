"""Thousands of documents in one launch: a warp counts whole documents, in counters of eight bits.

A document of four kilobytes cannot pay for clearing and adding up 32 bits for each byte value and lane. So
four byte values share a word, every lane has a column of 64 such words, and 8 KiB serve a warp: few enough
for 28 warps on a multiprocessor. A lane counts at most 12 × 16 + 2 bytes before the warp adds the columns up
into registers, so that no counter of eight bits overflows. As in `tilewright.kernels.histogram_bytes`, a lane
meets no other in its bank, whatever the text.

Work is cut by weight: a document weighs its bytes and `OVERHEAD` for its row of counts. The weight ahead of
document d is ``offsets[d] - offsets[0] + d * OVERHEAD``, which a binary search inverts, so three-byte
documents and gigabyte documents share out evenly without a list of work. A document of up to `LARGE` bytes
belongs to the slice in which it begins, whose warp writes its row; a larger one to every slice it reaches
into, whose warps add to its row, which was cleared before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, int64, types, uint8, uint32, uint64

from tilewright.kernels import launch
from tilewright.kernels.histogram_bytes import VECTOR, WORDS, multiprocessors
from tilewright.kernels.histogram_tokens import LETTER, LETTERS, Kind
from tilewright.kernels.launch import ceil_div
from tilewright.kernels.ptx import (
    byte_permute,
    global_array,
    load_vector,
    shared_add,
    shared_address,
    shift_left_wrapped,
    store_vector,
)

WARP = 32
WARPS = 4
THREADS = WARP * WARPS
ROWS = 64
"""Words of a column: four byte values each."""
TABLE_WORDS = ROWS * WARP
GROUP = 4
"""Vectors that a lane has under way at once."""
GROUPS = 3
"""Groups between two additions of the columns: 3 × 4 × 16 bytes and two more stay below 256."""
OVERHEAD = 2048
"""What a document's row costs, in bytes of text that are counted in the same time."""
LARGE = 32 << 10
"""Above this, several warps count one document."""
MIN_SLICE = 4096
BLOCKS_PER_MULTIPROCESSOR = 7
ROUNDS = 3
"""Slices for each warp that fits the GPU: with more than one, those that finish early take what is left."""
REGISTERS = GROUP * WORDS
SUMS = 8
"""Byte values that a lane adds up: two words of each column."""


@cuda.jit(device=True, inline="always")
def count_packed(bits, shift, column, table):  # type: ignore[no-untyped-def]
    """Count a byte: bits 7 to 12 of ``bits`` are its upper six, which choose the row, and the lowest five of
    ``shift`` are eight times its lower two, which choose the counter.
    """
    shared_add(((bits & uint32(0x1F80)) | column) + table, shift_left_wrapped(uint32(1), shift))


@cuda.jit(device=True, inline="always")
def count_word(word, column, table):  # type: ignore[no-untyped-def]
    shifts = (word & uint32(0x03030303)) << uint32(3)
    count_packed(word << uint32(5), shifts, column, table)
    count_packed(word >> uint32(3), shifts >> uint32(8), column, table)
    count_packed(word >> uint32(11), shifts >> uint32(16), column, table)
    count_packed(word >> uint32(19), shifts >> uint32(24), column, table)


@cuda.jit(device=True, inline="always")
def count_byte(value, column, table):  # type: ignore[no-untyped-def]
    byte = uint32(value)
    count_packed(byte << uint32(5), (byte & uint32(3)) << uint32(3), column, table)


@cuda.jit(device=True, inline="always")
def clear_table(words, begin, lane, zeros):  # type: ignore[no-untyped-def]
    """Clear the warp's table, four words at a time."""
    for turn in range(TABLE_WORDS // (4 * WARP)):
        store_vector(words, begin + uint32(turn * 4 * WARP) + lane * uint32(4), zeros, uint32(0))


@cuda.jit(device=True, inline="always")
def add_columns(words, begin, lane, sums, part):  # type: ignore[no-untyped-def]
    """Add rows ``lane`` and ``lane + 32`` of the warp's table, all columns, to ``sums``.

    Neighbouring lanes begin four columns apart, so that eight of them read all 32 banks at once. Two counters
    are added in one register of 16-bit halves: 32 columns of at most 255 fit.
    """
    pairs = uint32(0x00FF00FF)
    for half in range(2):
        even = uint32(0)
        odd = uint32(0)
        row = begin + (lane + uint32(half * WARP)) * uint32(WARP)
        for turn in range(8):
            load_vector(part, uint32(0), words, row + ((lane + uint32(turn)) & uint32(7)) * uint32(4))
            for word in range(4):
                even += part[word] & pairs
                odd += byte_permute(part[word], uint32(0), uint32(0x4341))  # its second and fourth byte
        sums[4 * half] += even & uint32(0xFFFF)
        sums[4 * half + 1] += odd & uint32(0xFFFF)
        sums[4 * half + 2] += even >> uint32(16)
        sums[4 * half + 3] += odd >> uint32(16)


def source() -> Callable[..., None]:
    """``documents(address, offsets, weight, code, bins, counts)``: a slice of ``weight`` for every warp of
    the grid.

    ``address`` is the text's; ``counts`` is int64[documents * bins], rows side by side. Rows of documents up
    to `LARGE` are written whole, an empty one's too; larger ones are added to. Block: `THREADS`; shared
    memory: 32 KiB.
    """

    def documents(address, offsets, weight, code, bins, counts):  # type: ignore[no-untyped-def]
        words = cuda.shared.array(SHARED_WORDS, uint32)
        lane = uint32(cuda.threadIdx.x) & uint32(WARP - 1)
        warp = uint32(cuda.threadIdx.x) // uint32(WARP)
        begin_table = warp * uint32(TABLE_WORDS)
        table = shared_address(words)
        # The table's address stays apart: it is a constant that the addition's own address arithmetic takes.
        column = (begin_table + lane) * uint32(4)
        zeros = cuda.local.array(WORDS, uint32)
        part = cuda.local.array(WORDS, uint32)
        registers = cuda.local.array(REGISTERS, uint32)
        sums = cuda.local.array(SUMS, uint32)
        wide = cuda.local.array(SUMS, int64)
        for word in range(WORDS):
            zeros[word] = uint32(0)
        clear_table(words, begin_table, lane, zeros)
        cuda.syncwarp()  # the table is clear before any lane counts

        last = int64(offsets.shape[0] - 1)
        origin = offsets[uint64(0)]
        total = offsets[uint64(last)] - origin + last * int64(OVERHEAD)
        slice_begin = (int64(cuda.blockIdx.x) * int64(WARPS) + int64(warp)) * weight
        slice_end = min(slice_begin + weight, total)

        # The last document that begins, by weight, at or before the slice.
        document = int64(0)
        upper = last
        while upper - document > 1:
            middle = (document + upper) >> 1
            if offsets[uint64(middle)] - origin + middle * int64(OVERHEAD) <= slice_begin:
                document = middle
            else:
                upper = middle

        while document < last:
            lo = offsets[uint64(document)]
            hi = offsets[uint64(document) + uint64(1)]
            ahead = lo - origin + document * int64(OVERHEAD)
            if ahead >= slice_end:
                break
            whole = hi - lo <= LARGE
            begin = lo
            end = hi
            wanted = ahead >= slice_begin
            if not whole:
                begin = lo + max(int64(0), slice_begin - ahead)
                end = lo + min(hi - lo, slice_end - ahead)
                wanted = begin < end
            if wanted:
                for place in range(SUMS):
                    sums[place] = uint32(0)
                first = uint64(address) + uint64(begin)
                length = uint64(end - begin)
                head = min((~first + uint64(1)) & uint64(VECTOR - 1), length)
                vectors = (length - head) // uint64(VECTOR)
                text = global_array(first, uint8)
                body = global_array(first + head, uint32)
                done = uint64(0)
                more = length > uint64(0)
                while more:
                    for _ in range(GROUPS):
                        base = done + uint64(lane)
                        if done < vectors:
                            for turn in range(GROUP):
                                place = base + uint64(turn * WARP)
                                if place < vectors:
                                    load_vector(registers, uint32(turn * WORDS), body, place * uint64(WORDS))
                            for turn in range(GROUP):
                                if base + uint64(turn * WARP) < vectors:
                                    for word in range(WORDS):
                                        count_word(registers[turn * WORDS + word], column, table)
                        done += uint64(GROUP * WARP)
                    more = done < vectors
                    if not more:  # the bytes ahead of the first whole vector and behind the last
                        if uint64(lane) < head:
                            count_byte(text[uint64(lane)], column, table)
                        tail = head + vectors * uint64(VECTOR) + uint64(lane)
                        if tail < length:
                            count_byte(text[tail], column, table)
                    cuda.syncwarp()  # every lane's counts are in before they are added up
                    add_columns(words, begin_table, lane, sums, part)
                    cuda.syncwarp()  # and read before they are cleared
                    clear_table(words, begin_table, lane, zeros)
                    cuda.syncwarp()  # and cleared before the next is counted
                row = uint64(document) * uint64(bins)
                if code == LETTER:
                    # The two cases of a letter lie in different lanes: they meet in the table, borrowed for
                    # it.
                    for half in range(2):
                        for counter in range(4):
                            words[begin_table + uint32(128 * half) + lane * uint32(4) + uint32(counter)] = (
                                sums[4 * half + counter]
                            )
                    cuda.syncwarp()  # all 256 sums are there before they are read
                    if lane < uint32(LETTERS):
                        letter = int64(words[begin_table + uint32(0x41) + lane]) + int64(
                            words[begin_table + uint32(0x61) + lane]
                        )
                        if whole:
                            counts[row + uint64(lane)] = letter
                        elif letter > 0:
                            cuda.atomic.add(counts, row + uint64(lane), letter)
                    cuda.syncwarp()  # and read before the table is cleared again
                    for half in range(2):
                        store_vector(
                            words, begin_table + uint32(128 * half) + lane * uint32(4), zeros, uint32(0)
                        )
                    cuda.syncwarp()  # and cleared before the next document is counted
                else:
                    for place in range(SUMS):
                        wide[place] = int64(sums[place])
                    for half in range(2):
                        at = row + uint64(128 * half) + uint64(lane) * uint64(4)
                        if uint32(128 * half) < uint32(bins):
                            if whole:
                                store_vector(counts, at, wide, uint32(4 * half))
                                store_vector(counts, at + uint64(2), wide, uint32(4 * half + 2))
                            else:
                                for counter in range(4):
                                    if wide[4 * half + counter] > 0:
                                        cuda.atomic.add(
                                            counts, at + uint64(counter), wide[4 * half + counter]
                                        )
            document += 1

    return documents


SHARED_WORDS = WARPS * TABLE_WORDS
SIGNATURE = types.void(
    types.uint64,
    types.Array(types.int64, 1, "C"),
    types.int64,
    types.int32,
    types.int32,
    types.Array(types.int64, 1, "C"),
)


LAUNCH_BOUNDS = (THREADS, BLOCKS_PER_MULTIPROCESSOR)


@functools.cache
def kernel() -> Any:
    return cuda.jit(SIGNATURE, launch_bounds=LAUNCH_BOUNDS)(source())


@cuda.jit
def clear_rows(rows, counts):  # type: ignore[no-untyped-def]
    """Block b clears row ``rows[b]`` of ``counts``, int64[(documents, bins)]."""
    row = rows[cuda.blockIdx.x]
    for place in range(cuda.threadIdx.x, counts.shape[1], cuda.blockDim.x):
        counts[row, place] = 0


def launch_documents(data: Any, offsets: np.ndarray, kind: Kind, counts: Any, stream: Any) -> None:
    """Write the counts of every document, int64[(documents, bins)], whatever was there before, on ``stream``.

    ``kind`` is byte, ascii or letter; ``offsets`` lies on the host.
    """
    lengths = np.diff(offsets)
    if lengths.max(initial=0) > LARGE:
        large = np.flatnonzero(lengths > LARGE)
        clear_rows[len(large), THREADS, stream](cuda.to_device(large, stream=stream), counts)
    places = cuda.to_device(offsets, stream=stream)
    launch_slices(data, places, int(offsets[-1] - offsets[0]), kind, counts, stream)


def launch_slices(data: Any, offsets: Any, nbytes: int, kind: Kind, counts: Any, stream: Any) -> None:
    """The launch alone: ``offsets`` lies on the device, ``nbytes`` is from the first to the last, and the
    rows of documents above `LARGE` are clear.
    """
    documents = offsets.shape[0] - 1
    total = nbytes + documents * OVERHEAD
    most = ROUNDS * BLOCKS_PER_MULTIPROCESSOR * WARPS * multiprocessors(launch.current_device())
    weight = max(MIN_SLICE, ceil_div(total, most))
    blocks = ceil_div(total, weight * WARPS)
    flat = launch.strided_view(counts, (documents * kind.bins,), (8,))
    launch.enqueue(
        kernel(),
        blocks,
        THREADS,
        stream,
        0,
        launch.address(data),
        offsets,
        weight,
        kind.code,
        kind.bins,
        flat,
    )
