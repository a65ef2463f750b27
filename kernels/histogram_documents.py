"""Thousands of documents in one launch: a warp counts whole documents, in counters of eight bits.

A document of four kilobytes cannot pay for clearing and adding up 32 bits for each byte value and lane. So
four byte values share a word, every lane has a column of 64 such words, and 8 KiB serve a warp: few enough
for 24 warps on a multiprocessor. A lane counts at most 12 × 16 + 2 bytes before the warp adds the columns up
into registers, so that no counter of eight bits overflows. As in `tilewright.kernels.histogram_bytes`, a lane
meets no other in its bank, whatever the text.

What limits this kernel is not the memory but the unit for shifts and logic, which takes one instruction in
two cycles. Three things spare it. The tables of eight warps interleave, so that a row is 1024 bytes long and
a byte of text becomes a counter's place by one permutation of bytes; another makes the amount to add of its
lowest bits. Columns are added up by dot products of bytes, which run elsewhere. And a row is cleared as it is
read. The text is loaded ahead, across documents: while columns are added up, the next document arrives.

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

from numba import cuda, int32, int64, types, uint8, uint32, uint64

from tilewright.kernels import launch
from tilewright.kernels.compiled import compile_kernel
from tilewright.kernels.histogram_bytes import VECTOR, WORDS, multiprocessors
from tilewright.kernels.histogram_tokens import BYTE, LETTER, LETTERS, Kind
from tilewright.kernels.launch import ceil_div
from tilewright.kernels.ptx import (
    byte_dot,
    byte_permute,
    byte_rotate,
    global_array,
    load_vector,
    shared_add,
    shared_address,
    store_vector,
)

WARP = 32
WARPS = 8
"""Warps of a block: a row of each one's table fills 128 of the 1024 bytes after which its next row begins."""
THREADS = WARP * WARPS
ROWS = 64
"""Words of a column: four byte values each."""
ROW_WORDS = WARPS * WARP
"""From a row of a warp's table to the next."""
SHARED_NBYTES = 4 * ROWS * ROW_WORDS
GROUP = 4
"""Vectors that a lane has under way at once."""
GROUPS = 3
"""Groups between two additions of the columns: 3 × 4 × 16 bytes and two more stay below 256."""
OVERHEAD = 2048
"""What a document's row costs, in bytes of text that are counted in the same time."""
LARGE = 32 << 10
"""Above this, several warps count one document."""
MIN_SLICE = 4096
BLOCKS_PER_MULTIPROCESSOR = 3
ROUNDS = 4
"""Slices for each warp that fits the GPU: with more than one, those that finish early take what is left."""
DOTS = True
"""Whether columns are added up by dot products of bytes instead of masks and shifts."""
AHEAD = True
"""Whether a document's first vectors are loaded before the columns of the one before are added up."""
SUMS = 8
"""Byte values that a lane adds up: two words of each column."""
TURNS = WARP // WORDS
"""Loads of a row by one lane."""
ABREAST = 4
"""Loads of a row under way at once."""
PARTS = ABREAST * WORDS
NONE = 256
"""What stands for no byte."""


@cuda.jit(device=True, inline="always")
def count_packed(rows, shifted, selector, column, one, table):  # type: ignore[no-untyped-def]
    """Count a byte: ``selector`` chooses the row, times four, out of ``rows``, and the lowest two bits of
    ``shifted`` are those of the byte, which choose the counter.
    """
    shared_add(byte_permute(rows, column, selector) + table, byte_rotate(one, uint32(0), shifted))


@cuda.jit(device=True, inline="always")
def count_word(word, column, pair, one, table):  # type: ignore[no-untyped-def]
    """Count the four bytes of ``word``.

    A counter's place is, from the lowest bit on: nothing in a word (2 bits), the lane (5), the warp (3), the
    byte's upper six bits. ``column`` is the first byte of it and ``pair`` the lowest two bits of the second,
    in each byte. ``one`` is 1.
    """
    rows = (word & uint32(0xFCFCFCFC)) | pair
    count_packed(rows, word, uint32(0x5504), column, one, table)
    count_packed(rows, word >> uint32(8), uint32(0x5514), column, one, table)
    count_packed(rows, word >> uint32(16), uint32(0x5524), column, one, table)
    count_packed(rows, word >> uint32(24), uint32(0x5534), column, one, table)


@cuda.jit(device=True, inline="always")
def count_byte(value, column, pair, one, table):  # type: ignore[no-untyped-def]
    count_packed((value & uint32(0xFC)) | pair, value, uint32(0x5504), column, one, table)


@cuda.jit(device=True, inline="always")
def weight_ahead(offset, origin, document):  # type: ignore[no-untyped-def]
    """The weight of all documents ahead of one that begins at ``offset``."""
    return offset - origin + document * int64(OVERHEAD)


@cuda.jit(device=True, inline="always")
def exchanged(value):  # type: ignore[no-untyped-def]
    """The neighbouring lane's value: each even lane and the odd one behind it swap."""
    return uint32(cuda.shfl_xor_sync(0xFFFFFFFF, int32(value), 1))


@cuda.jit(device=True, inline="always")
def fetched(value, lane):  # type: ignore[no-untyped-def]
    """The value of lane ``lane``."""
    return uint32(cuda.shfl_sync(0xFFFFFFFF, int32(value), int32(lane)))


def source(
    group: int = GROUP, groups: int = GROUPS, dots: bool = DOTS, early: bool = AHEAD
) -> Callable[..., None]:
    """``documents(address, offsets, weight, code, bins, counts)``: a slice of ``weight`` for every warp of
    the grid.

    ``address`` is the text's; ``counts`` is int64[documents * bins], rows side by side, its address a
    multiple of 16. Rows of documents up to `LARGE` are written whole, an empty one's too; larger ones are
    added to. Block: `THREADS`; dynamic shared memory: `SHARED_NBYTES`.
    """
    registers_needed = group * WORDS
    stride = group * WARP

    @cuda.jit(device=True, inline="always")
    def begin_part(address, begin, end, lane, registers):  # type: ignore[no-untyped-def]
        """Load the first vectors of the text's bytes ``begin`` to ``end``, and those ahead of the first whole
        vector and behind the last.

        Returns the first whole vector's address, how many there are, and this lane's byte ahead and behind.
        """
        first = uint64(address) + uint64(begin)
        length = uint64(end - begin)
        head = min((~first + uint64(1)) & uint64(VECTOR - 1), length)
        vectors = uint32((length - head) // uint64(VECTOR))
        text = global_array(first, uint8)
        words = global_array(first + head, uint32)
        for turn in range(group):
            place = uint32(lane + uint32(turn * WARP))
            if place < vectors:
                load_vector(registers, uint32(turn * WORDS), words, uint64(place) * uint64(WORDS))
        ahead = uint32(NONE)
        if uint64(lane) < head:
            ahead = uint32(text[uint64(lane)])
        behind = uint32(NONE)
        tail = head + uint64(vectors) * uint64(VECTOR) + uint64(lane)
        if tail < length:
            behind = uint32(text[tail])
        return first + head, vectors, ahead, behind

    @cuda.jit(device=True, inline="always")
    def add_row(words, row, lane, zeros, part, sums, half):  # type: ignore[no-untyped-def]
        """Add the columns of the row at ``row`` to the lane's ``sums`` and clear them.

        Neighbouring lanes begin four columns apart, so that eight of them read all 32 banks at once.
        """
        even = uint32(0)
        odd = uint32(0)
        for first in range(0, TURNS, ABREAST):
            for turn in range(ABREAST):
                place = row + ((lane + uint32(first + turn)) & uint32(TURNS - 1)) * uint32(WORDS)
                load_vector(part, uint32(turn * WORDS), words, place)
                store_vector(words, place, zeros, uint32(0))
            for word in range(PARTS):
                if dots:
                    for counter in range(4):
                        sums[4 * half + counter] = byte_dot(
                            part[word], uint32(1 << 8 * counter), sums[4 * half + counter]
                        )
                else:
                    # Two counters in one register of 16-bit halves: 32 columns of at most 255 fit. What the
                    # second adds to the other two is taken off at the end.
                    even += part[word] & uint32(0x00FF00FF)
                    odd += part[word] >> uint32(8)
        if not dots:
            odd -= (even >> uint32(16)) << uint32(8)
            sums[4 * half] += even & uint32(0xFFFF)
            sums[4 * half + 1] += odd & uint32(0xFFFF)
            sums[4 * half + 2] += even >> uint32(16)
            sums[4 * half + 3] += odd >> uint32(16)

    def documents(address, offsets, weight, code, bins, counts):  # type: ignore[no-untyped-def]
        words = cuda.shared.array(0, uint32)
        lane = uint32(cuda.threadIdx.x) & uint32(WARP - 1)
        warp = uint32(cuda.threadIdx.x) // uint32(WARP)
        # The table's address stays apart: the addition's own address arithmetic takes it.
        table = shared_address(words)
        column = (lane << uint32(2)) | ((warp & uint32(1)) << uint32(7))
        pair = (warp >> uint32(1)) * uint32(0x01010101)
        rows = warp * uint32(WARP)
        zeros = cuda.local.array(WORDS, uint32)
        part = cuda.local.array(PARTS, uint32)
        registers = cuda.local.array(registers_needed, uint32)
        sums = cuda.local.array(SUMS, uint32)
        wide = cuda.local.array(SUMS, int64)
        for word in range(WORDS):
            zeros[word] = uint32(0)
        for half in range(2):
            for turn in range(TURNS):
                place = (lane + uint32(half * WARP)) * uint32(ROW_WORDS)
                turned = ((lane + uint32(turn)) & uint32(TURNS - 1)) * uint32(WORDS)
                store_vector(words, rows + place + turned, zeros, uint32(0))
        cuda.syncwarp()  # the table is clear before any lane counts

        last = int64(offsets.shape[0] - 1)
        origin = offsets[uint64(0)]
        # 1, which the compiler cannot know: it would load the constant anew for every byte.
        one = uint32(1) + (uint32(origin >> int64(32)) >> uint32(31))
        total = weight_ahead(offsets[uint64(last)], origin, last)
        slice_begin = (int64(cuda.blockIdx.x) * int64(WARPS) + int64(warp)) * weight
        slice_end = min(slice_begin + weight, total)

        # The last document that begins, by weight, at or before the slice.
        document = int64(0)
        upper = last
        while upper - document > 1:
            middle = (document + upper) >> 1
            if weight_ahead(offsets[uint64(middle)], origin, middle) <= slice_begin:
                document = middle
            else:
                upper = middle
        lo = offsets[uint64(document)]
        hi = offsets[uint64(document) + uint64(1)]
        begin = lo + max(int64(0), slice_begin - weight_ahead(lo, origin, document))
        if begin > lo and (hi - lo <= LARGE or begin >= hi):  # the slice before has it, or all that is left
            document += 1
            lo = hi
            begin = hi
            hi = offsets[uint64(min(document + 1, last))]

        ahead = weight_ahead(lo, origin, document)
        active = document < last and ahead < slice_end
        whole = hi - lo <= LARGE
        end = hi if whole else lo + min(hi - lo, slice_end - ahead)
        if not active:
            end = begin
        body, vectors, byte_ahead, byte_behind = begin_part(address, begin, end, lane, registers)
        later = offsets[uint64(min(document + 2, last))]
        while active:
            row = uint64(document) * uint64(bins)
            row_whole = whole
            empty = begin == end
            for place in range(SUMS):
                sums[place] = uint32(0)
            document += 1  # and what is known of it is the next one's from here on
            lo = hi
            hi = later
            later = offsets[uint64(min(document + 2, last))]
            ahead = weight_ahead(lo, origin, document)
            active = document < last and ahead < slice_end
            whole = hi - lo <= LARGE
            begin = lo
            end = hi if whole else lo + min(hi - lo, slice_end - ahead)
            if not active:
                end = begin
            done = uint32(0)
            more = True
            while more:
                text = global_array(body, uint32)
                for _ in range(groups):
                    if done < vectors:
                        for turn in range(group):
                            place = uint32(done + lane + uint32(turn * WARP))
                            if place < vectors:
                                for word in range(WORDS):
                                    count_word(registers[turn * WORDS + word], column, pair, one, table)
                            place = uint32(place + uint32(stride))
                            if place < vectors:
                                load_vector(
                                    registers, uint32(turn * WORDS), text, uint64(place) * uint64(WORDS)
                                )
                        done = uint32(done + uint32(stride))
                more = done < vectors
                if not more:
                    if byte_ahead < uint32(NONE):
                        count_byte(byte_ahead, column, pair, one, table)
                    if byte_behind < uint32(NONE):
                        count_byte(byte_behind, column, pair, one, table)
                    if early:
                        body, vectors, byte_ahead, byte_behind = begin_part(
                            address, begin, end, lane, registers
                        )
                if not empty:
                    cuda.syncwarp()  # every lane's counts are in before they are added up
                    add_row(words, rows + lane * uint32(ROW_WORDS), lane, zeros, part, sums, 0)
                    second = rows + (lane + uint32(WARP)) * uint32(ROW_WORDS)
                    if code == BYTE:
                        add_row(words, second, lane, zeros, part, sums, 1)
                    else:  # only ASCII is asked for
                        for turn in range(TURNS):
                            turned = ((lane + uint32(turn)) & uint32(TURNS - 1)) * uint32(WORDS)
                            store_vector(words, second + turned, zeros, uint32(0))
                    cuda.syncwarp()  # and cleared before the next is counted
            if code == LETTER:
                # The two cases of a letter lie eight lanes apart, from lanes 16 and 24 on; each letter is
                # brought to the lane of its own number.
                giver = uint32(WARP // 2) + ((lane + uint32(1)) >> uint32(2))
                letter = uint32(0)
                for counter in range(4):
                    both = sums[counter] + fetched(sums[counter], (lane + uint32(8)) & uint32(WARP - 1))
                    given = fetched(both, giver & uint32(WARP - 1))
                    if ((lane + uint32(1)) & uint32(3)) == uint32(counter):
                        letter = given
                if lane < uint32(LETTERS):
                    if row_whole:
                        counts[row + uint64(lane)] = int64(letter)
                    elif letter > uint32(0):
                        cuda.atomic.add(counts, row + uint64(lane), int64(letter))
            else:
                odd_lane = (lane & uint32(1)) != uint32(0)
                for half in range(2):
                    if half == 0 or code == BYTE:
                        if row_whole:
                            # Two neighbours hold 64 bytes of the row. They swap halves, so that each store
                            # of theirs fills 32 bytes side by side, which the memory takes as one.
                            low = exchanged(sums[4 * half] if odd_lane else sums[4 * half + 2])
                            high = exchanged(sums[4 * half + 1] if odd_lane else sums[4 * half + 3])
                            wide[0] = int64(low if odd_lane else sums[4 * half])
                            wide[1] = int64(high if odd_lane else sums[4 * half + 1])
                            wide[2] = int64(sums[4 * half + 2] if odd_lane else low)
                            wide[3] = int64(sums[4 * half + 3] if odd_lane else high)
                            at = row + uint64(128 * half) + uint64((lane >> uint32(1)) * uint32(8))
                            at += uint64((lane & uint32(1)) * uint32(2))
                            store_vector(counts, at, wide, uint32(0))
                            store_vector(counts, at + uint64(4), wide, uint32(2))
                        else:
                            at = row + uint64(128 * half) + uint64(lane * uint32(4))
                            for counter in range(4):
                                if sums[4 * half + counter] > uint32(0):
                                    cuda.atomic.add(
                                        counts, at + uint64(counter), int64(sums[4 * half + counter])
                                    )
            if not early:
                body, vectors, byte_ahead, byte_behind = begin_part(address, begin, end, lane, registers)

    return documents


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
def kernel(group: int = GROUP, groups: int = GROUPS, dots: bool = DOTS, early: bool = AHEAD) -> Any:
    return compile_kernel(source(group, groups, dots, early), SIGNATURE, launch_bounds=LAUNCH_BOUNDS)


def clear_large(offsets, bins, counts):  # type: ignore[no-untyped-def]
    """Clear the rows of documents above `LARGE`; ``counts`` as above. Any grid and block."""
    documents = offsets.shape[0] - 1
    for document in range(cuda.blockIdx.x, documents, cuda.gridDim.x):
        if offsets[document + 1] - offsets[document] > LARGE:
            for place in range(cuda.threadIdx.x, bins, cuda.blockDim.x):
                counts[document * bins + place] = 0


CLEAR_SIGNATURE = types.void(types.Array(types.int64, 1, "C"), types.int32, types.Array(types.int64, 1, "C"))
CLEAR_BLOCKS = 4096


@functools.cache
def _clear_kernel() -> Any:
    return compile_kernel(clear_large, CLEAR_SIGNATURE)


def launch_documents(
    data: Any, offsets: Any, nbytes: int, large: bool, kind: Kind, counts: Any, stream: Any
) -> None:
    """Write the counts of every document, int64[(documents, bins)], whatever was there before, on ``stream``.

    ``kind`` is byte, ascii or letter; ``offsets`` lies on the device, ``nbytes`` is from the first to the
    last; ``large`` says whether any document may be above `LARGE`.
    """
    if large:
        documents = offsets.shape[0] - 1
        flat = launch.strided_view(counts, (documents * kind.bins,), (8,))
        blocks = min(documents, CLEAR_BLOCKS)
        launch.enqueue(_clear_kernel(), blocks, THREADS, stream, 0, offsets, kind.bins, flat)
    launch_slices(data, offsets, nbytes, kind, counts, stream)


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
    launch.allow_dynamic_shared(kernel(), SHARED_NBYTES)
    launch.enqueue(
        kernel(),
        blocks,
        THREADS,
        stream,
        SHARED_NBYTES,
        launch.address(data),
        offsets,
        weight,
        kind.code,
        kind.bins,
        flat,
    )
