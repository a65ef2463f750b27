"""Thousands of documents in one launch: half a warp counts whole documents, in counters of eight bits.

A document of four kilobytes cannot pay for clearing and adding up 32 bits for each byte value and lane. So
four byte values share a word, every lane has a column of 64 such words, and the 16 lanes of half a warp take
a document: 4 KiB of counters for 4 KiB of text. As in `tilewright.kernels.histograms.bytes`, a lane meets no
other in its bank, whatever the text.

A lane counts up to 16 × 16 + 2 bytes before the columns are added up, which a counter of eight bits does not
hold if nearly all of them are alike. Where they might be, because one of the first words of the lane's first
vector comes again in its thirteenth, the columns are added up before the thirteenth.

This kernel is limited not by memory but by instructions, above all those of the unit for shifts and logic, which takes
one in two cycles. So as much as possible is left to dot products of bytes, which run elsewhere: they shift a byte down,
so that a permutation turns its lowest two bits into the amount to add, and they add up the columns. Another permutation
forms the counter's address: a row of the eight interleaved tables of a block is 256 times four bytes long, so the
byte's upper six bits, in place, are the address's second byte. Both halves of a warp go through the same instructions,
each with a document of its own. A row is cleared as it is read; for text without bytes above 127 only the lower half of
the rows is. Text is loaded ahead, across documents: while columns are added up, the next document arrives.

Work is cut by weight: a document weighs its bytes and `OVERHEAD` for its row of counts. The weight before document d is
``offsets[d] - offsets[0] + d * OVERHEAD``, which a search by 16 lanes at once inverts, so three-byte and gigabyte
documents are shared out evenly without a list of work. A document of up to `LARGE` bytes belongs to the slice in which
it begins, whose half warp writes its row; a larger one to every slice it reaches into, whose half warps add to its row,
which was cleared before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda, int32, int64, types, uint8, uint32, uint64

from tilewright.kernels.gpu import launch
from tilewright.kernels.gpu.compiled import compile_kernel, multiprocessors
from tilewright.kernels.gpu.device_array import address, strided_view
from tilewright.kernels.gpu.device_choice import current_device
from tilewright.kernels.histograms.bytes import VECTOR, WORDS
from tilewright.kernels.histograms.tokens import ASCII, BYTE, LETTER, LETTERS, Kind
from tilewright.kernels.numbers import WARP, ceil_div
from tilewright.kernels.ptx.integers import byte_dot, byte_permute, byte_rotate
from tilewright.kernels.ptx.memory import global_array, load_vector, shared_add, shared_address, store_vector

WARPS = 8
"""Warps of a block. Their tables interleave: a row takes 128 bytes of each, so the next row begins 1024 bytes further.
A byte's upper six bits, in place, step by 4; one byte higher, where a permutation puts them, that is 1024."""
THREADS = WARP * WARPS
HALF = WARP // 2
"""Lanes that count a document: those whose number has the same third bit, so that any eight neighbours read all banks
when columns are added up."""
HALF_LANES = 0x0F0F0F0F
"""The lanes of the first half, as bits of a vote; those of the second are four bits higher."""
FULL_MASK = 0xFFFFFFFF
ROWS = 64
"""Words of a column: four byte values each."""
ROW_WORDS = WARP * WARPS
SHARED_NBYTES = 4 * ROWS * ROW_WORDS
GROUP = 4
"""Vectors that a lane has under way at once."""
REGISTERS = GROUP * WORDS
STRIDE = GROUP * HALF
"""Vectors that half a warp has under way at once."""
GROUPS = 4
"""Groups between two additions of the columns; one less where counters could overflow: 3 × 4 × 16 bytes and two more
stay below 256."""
OVERHEAD = 2048
"""What a document's row costs, in bytes of text that are counted in the same time."""
LARGE = 32 << 10
"""Above this, several half warps count one document."""
MIN_SLICE = 4096
WARPS_PER_MULTIPROCESSOR = 24
ROUNDS = 2
"""Slices for each half warp that fits the GPU: with more than one, those that finish early take what is left."""
SUMS = 16
"""Byte values that a lane adds up: four words of each column of its half."""
QUADS = HALF // WORDS
"""Loads of a row by one lane."""
ABREAST = 4
"""Loads of a row under way at once."""
PARTS = ABREAST * WORDS
BANDS = ROWS // HALF
"""Rows that a lane adds up."""
BAND_WORDS = HALF * ROW_WORDS
NONE = 256
"""What stands for no byte."""
UPPER = 0x80808080
"""The bits that only bytes above 127 have."""


BLOCKS_PER_MULTIPROCESSOR = WARPS_PER_MULTIPROCESSOR // WARPS


@cuda.jit(device=True, inline="always")
def amount(one, value):  # type: ignore[no-untyped-def]
    """The addend that counts a byte in its word: 1 in the place that its lowest two bits choose. ``one`` is 1."""
    return byte_rotate(one, uint32(0), value)


@cuda.jit(device=True, inline="always")
def count_word(word, column, pair, one, table):  # type: ignore[no-untyped-def]
    """Count the four bytes of ``word``.

    A counter's address in the table is, from the lowest bit on: 0 (2 bits, within a word), the lane (5), the warp (3),
    the byte's upper six bits. ``column`` is its first byte and ``pair`` the lowest two bits of its second, in each
    byte. The table's address is added last, which the addition's own address arithmetic does.
    """
    rows = (word & uint32(0xFCFCFCFC)) | pair
    for place in range(4):
        target = byte_permute(rows, column, uint32(0x5504 + 16 * place)) + table
        # A dot product shifts the byte down; what is above it does not matter.
        value = byte_dot(word, uint32(1 << 8 * place), uint32(0)) if place else word
        shared_add(target, amount(one, value))


@cuda.jit(device=True, inline="always")
def count_byte(value, column, pair, one, table):  # type: ignore[no-untyped-def]
    rows = (value & uint32(0xFC)) | pair
    shared_add(byte_permute(rows, column, uint32(0x5504)) + table, amount(one, value))


@cuda.jit(device=True, inline="always")
def weight_ahead(offset, origin, document):  # type: ignore[no-untyped-def]
    """The weight of all documents before one that begins at ``offset``."""
    return offset - origin + document * int64(OVERHEAD)


@cuda.jit(device=True, inline="always")
def exchanged(value):  # type: ignore[no-untyped-def]
    """The neighbouring lane's value: each even lane and the odd one after it swap."""
    return uint32(cuda.shfl_xor_sync(FULL_MASK, int32(value), 1))


@cuda.jit(device=True, inline="always")
def other_case(value):  # type: ignore[no-untyped-def]
    """The value of the lane that has the rows 8 further or back: upper and lower case of a letter."""
    return uint32(cuda.shfl_xor_sync(FULL_MASK, int32(value), HALF))


@cuda.jit(device=True, inline="always")
def vote(flag):  # type: ignore[no-untyped-def]
    """The lanes of the warp for which ``flag`` holds, a bit each."""
    return uint32(cuda.ballot_sync(FULL_MASK, flag))


def source() -> Callable[..., None]:
    """``documents(address, offsets, weight, code, bins, counts)``: a slice of ``weight`` for every half warp of
    the grid.

    ``address`` is the text's; ``counts`` is int64[documents * bins], rows side by side, its address a
    multiple of 16. Rows of documents up to `LARGE` are written whole, an empty one's too; larger ones are
    added to. Block: `THREADS`; dynamic shared memory: `SHARED_NBYTES`.
    """

    @cuda.jit(device=True, inline="always")
    def begin_part(address, begin, end, index, registers):  # type: ignore[no-untyped-def]
        """Load the first vectors of the text's bytes ``begin`` to ``end``, and those before the first whole vector and
        after the last.

        Returns the address of the lane's first vector, how many there are for all lanes, and this lane's byte ahead
        and behind.
        """
        first = uint64(address) + uint64(begin)
        length = uint64(end - begin)
        head = min((~first + uint64(1)) & uint64(VECTOR - 1), length)
        vectors = int32((length - head) // uint64(VECTOR))
        text = global_array(first, uint8)
        cursor = first + head + uint64(index) * uint64(VECTOR)
        words = global_array(cursor, uint32)
        for turn in range(GROUP):
            if int32(vectors - int32(index)) > int32(turn * HALF):
                load_vector(registers, uint32(turn * WORDS), words, uint64(turn * HALF * WORDS))
        ahead = uint32(NONE)
        if uint64(index) < head:
            ahead = uint32(text[uint64(index)])
        behind = uint32(NONE)
        tail = head + uint64(uint32(vectors)) * uint64(VECTOR) + uint64(index)
        if tail < length:
            behind = uint32(text[tail])
        return cursor, vectors, ahead, behind

    @cuda.jit(device=True, inline="always")
    def count_vector(registers, turn, column, pair, one, table, seen):  # type: ignore[no-untyped-def]
        """Count the 16 bytes of a vector; returns ``seen`` with their bits set."""
        for word in range(WORDS):
            count_word(registers[turn * WORDS + word], column, pair, one, table)
            seen |= registers[turn * WORDS + word]
        return seen

    @cuda.jit(device=True, inline="always")
    def load_next(registers, turn, words_ahead, left):  # type: ignore[no-untyped-def]
        """Load the vector that replaces the one just counted, if the lane's ``left`` reaches that far."""
        if left > int32(STRIDE + turn * HALF):
            load_vector(registers, uint32(turn * WORDS), words_ahead, uint64((STRIDE + turn * HALF) * WORDS))

    @cuda.jit(device=True, inline="always")
    def add_row(words, row, index, zeros, part, sums, band):  # type: ignore[no-untyped-def]
        """Add the columns of the half's row at ``row`` to the lane's ``sums`` and clear them.

        The half has every second group of four columns; neighbouring lanes begin with different ones.
        """
        for first in range(0, QUADS, ABREAST):
            for turn in range(ABREAST):
                place = row + ((index + uint32(first + turn)) & uint32(QUADS - 1)) * uint32(2 * WORDS)
                load_vector(part, uint32(turn * WORDS), words, place)
                store_vector(words, place, zeros, uint32(0))
            for word in range(PARTS):
                for counter in range(4):
                    sums[4 * band + counter] = byte_dot(
                        part[word], uint32(1 << 8 * counter), sums[4 * band + counter]
                    )

    @cuda.jit(device=True, inline="always")
    def clear_row(words, row, index, zeros):  # type: ignore[no-untyped-def]
        for turn in range(QUADS):
            place = row + ((index + uint32(turn)) & uint32(QUADS - 1)) * uint32(2 * WORDS)
            store_vector(words, place, zeros, uint32(0))

    @cuda.jit(device=True, inline="always")
    def first_document(offsets, origin, last, slice_begin, index, half):  # type: ignore[no-untyped-def]
        """The last document that begins, by weight, at or before the slice: every lane of the half looks at one of 16
        in between. ``index`` is the lane's number in its ``half``; both halves of a warp search together.
        """
        document = int64(0)
        upper = last
        while vote(upper - document > 1) != uint32(0):
            step = (upper - document + int64(HALF - 1)) // int64(HALF)
            probe = document + int64(index + uint32(1)) * step
            behind_it = False
            if probe < upper:
                behind_it = weight_ahead(offsets[uint64(probe)], origin, probe) <= slice_begin
            passed = int64(cuda.popc(vote(behind_it) & (uint32(HALF_LANES) << (half * uint32(4)))))
            upper = min(upper, document + (passed + 1) * step)
            document += passed * step
        return document

    @cuda.jit(device=True, inline="always")
    def write_row(counts, row, row_whole, finished, sums, wide, code, lane, index):  # type: ignore[no-untyped-def]
        """Write the ``sums`` of a half to its row, if it has ``finished`` a document, or add them where the row is not
        ``row_whole``: others count that document too. All lanes of a warp take part.
        """
        if code == LETTER:
            for counter in range(4):
                letter = sums[4 + counter] + other_case(sums[4 + counter])
                number = uint32(index * uint32(4) + uint32(counter) - uint32(1))
                if finished and index < uint32(HALF // 2) and number < uint32(LETTERS):
                    if row_whole:
                        counts[row + uint64(number)] = int64(letter)
                    elif letter > uint32(0):
                        cuda.atomic.add(counts, row + uint64(number), int64(letter))
        else:
            odd_lane = (lane & uint32(1)) != uint32(0)
            at = row + uint64(index * uint32(4))
            # Two neighbours hold 64 bytes of the row. They swap halves, so that each store of theirs fills 32
            # contiguous bytes, which the memory takes as one access.
            pair_at = row + uint64((index >> uint32(1)) * uint32(8) + (index & uint32(1)) * uint32(2))
            shared_row = vote(finished and not row_whole) != uint32(0)
            for band in range(BANDS):
                if band < BANDS // 2 or code == BYTE:
                    if shared_row and finished and not row_whole:
                        for counter in range(4):
                            if sums[4 * band + counter] > uint32(0):
                                to = at + uint64(4 * HALF * band + counter)
                                cuda.atomic.add(counts, to, int64(sums[4 * band + counter]))
                    low = exchanged(sums[4 * band] if odd_lane else sums[4 * band + 2])
                    high = exchanged(sums[4 * band + 1] if odd_lane else sums[4 * band + 3])
                    wide[0] = int64(low if odd_lane else sums[4 * band])
                    wide[1] = int64(high if odd_lane else sums[4 * band + 1])
                    wide[2] = int64(sums[4 * band + 2] if odd_lane else low)
                    wide[3] = int64(sums[4 * band + 3] if odd_lane else high)
                    if finished and row_whole:
                        store_vector(counts, pair_at + uint64(4 * HALF * band), wide, uint32(0))
                        store_vector(counts, pair_at + uint64(4 * HALF * band + 4), wide, uint32(2))

    def documents(address, offsets, weight, code, bins, counts):  # type: ignore[no-untyped-def]
        words = cuda.shared.array(0, uint32)
        lane = uint32(cuda.threadIdx.x) & uint32(WARP - 1)
        warp = uint32(cuda.threadIdx.x) // uint32(WARP)
        half = (lane >> uint32(2)) & uint32(1)
        index = (lane & uint32(3)) | ((lane >> uint32(1)) & uint32(12))  # the lane's number in its half
        table = shared_address(words)
        column = (lane << uint32(2)) | ((warp & uint32(1)) << uint32(7))
        pair = (warp >> uint32(1)) * uint32(0x01010101)
        # where this lane adds up
        rows = warp * uint32(WARP) + half * uint32(WORDS) + index * uint32(ROW_WORDS)
        zeros = cuda.local.array(WORDS, uint32)
        part = cuda.local.array(PARTS, uint32)
        registers = cuda.local.array(REGISTERS, uint32)
        sums = cuda.local.array(SUMS, uint32)
        wide = cuda.local.array(WORDS, int64)
        for word in range(WORDS):
            zeros[word] = uint32(0)
        for band in range(BANDS):
            clear_row(words, rows + uint32(band * BAND_WORDS), index, zeros)
        for place in range(SUMS):
            sums[place] = uint32(0)
        cuda.syncwarp()  # the table is clear before any lane counts

        last = int64(offsets.shape[0] - 1)
        origin = offsets[uint64(0)]
        total = weight_ahead(offsets[uint64(last)], origin, last)
        unit = (int64(cuda.blockIdx.x) * int64(WARPS) + int64(warp)) * int64(2) + int64(half)
        slice_begin = unit * weight
        slice_end = min(slice_begin + weight, total)

        document = first_document(offsets, origin, last, slice_begin, index, half)
        lo = offsets[uint64(document)]
        hi = offsets[uint64(document) + uint64(1)]
        begin = lo + max(int64(0), slice_begin - weight_ahead(lo, origin, document))
        if begin > lo and (hi - lo <= LARGE or begin >= hi):  # the slice before counts it, or the rest of it
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
        cursor, rest, byte_ahead, byte_behind = begin_part(address, begin, end, index, registers)
        later = offsets[uint64(min(document + 2, last))]
        # 1, but the compiler must not know that, nor that it is the same in every lane: it would make the constant anew
        # for every byte.
        one = uint32(1) + (uint32(lo >> int64(32)) >> uint32(31))
        while vote(active) != uint32(0):
            first0 = registers[0]
            first1 = registers[1]
            first2 = registers[2]
            seen = uint32(0)
            full = vote(begin != end) != uint32(0)
            turns = uint32(0)
            more = vote(rest > int32(0)) != uint32(0)
            while more:
                left = int32(rest - int32(index))
                words_ahead = global_array(cursor, uint32)
                # Testing for each vector whether it exists splits the code into pieces, which can neither share
                # constants nor wait for memory together.
                if vote(rest > int32(0) and rest < int32(STRIDE)) == uint32(0):
                    if rest > int32(0):
                        for turn in range(GROUP):
                            seen = count_vector(registers, turn, column, pair, one, table, seen)
                            load_next(registers, turn, words_ahead, left)
                else:
                    for turn in range(GROUP):
                        if left > int32(turn * HALF):
                            seen = count_vector(registers, turn, column, pair, one, table, seen)
                        load_next(registers, turn, words_ahead, left)
                cursor += uint64(STRIDE * VECTOR)
                rest = int32(rest - int32(STRIDE))
                turns = uint32(turns + uint32(1))
                more = turns < uint32(GROUPS) and vote(rest > int32(0)) != uint32(0)
                if more and turns == uint32(GROUPS - 1):
                    # Of 258 bytes all but two are alike only where one of these words comes again.
                    again = registers[0] == first0 or registers[1] == first1 or registers[2] == first2
                    more = vote(again and rest > int32(index)) == uint32(0)

            row = uint64(document) * uint64(bins)
            row_whole = whole
            finished = active and rest <= int32(0)
            if finished:
                if byte_ahead < uint32(NONE):
                    count_byte(byte_ahead, column, pair, one, table)
                    seen |= byte_ahead
                if byte_behind < uint32(NONE):
                    count_byte(byte_behind, column, pair, one, table)
                    seen |= byte_behind
                document += 1  # from here on the variables describe the next document
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
                cursor, rest, byte_ahead, byte_behind = begin_part(address, begin, end, index, registers)

            if full:
                both = vote((seen & uint32(UPPER)) != uint32(0)) != uint32(0)
                cuda.syncwarp()  # every lane's counts are in before they are added up
                for band in range(BANDS // 2):
                    add_row(words, rows + uint32(band * BAND_WORDS), index, zeros, part, sums, band)
                if both:
                    for band in range(BANDS // 2, BANDS):
                        if code == BYTE:
                            add_row(words, rows + uint32(band * BAND_WORDS), index, zeros, part, sums, band)
                        else:  # only ASCII is asked for
                            clear_row(words, rows + uint32(band * BAND_WORDS), index, zeros)
                cuda.syncwarp()  # and cleared before the next is counted

            if vote(finished) != uint32(0):
                write_row(counts, row, row_whole, finished, sums, wide, code, lane, index)
                if finished:
                    for place in range(SUMS):
                        sums[place] = uint32(0)

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
def kernel() -> Any:
    return compile_kernel(source(), SIGNATURE, launch_bounds=LAUNCH_BOUNDS, shared_nbytes=SHARED_NBYTES)


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
        flat = strided_view(counts, (documents * kind.bins,), (8,))
        blocks = min(documents, CLEAR_BLOCKS)
        launch.enqueue(_clear_kernel(), blocks, THREADS, stream, 0, offsets, kind.bins, flat)
    launch_slices(data, offsets, nbytes, kind, counts, stream)


def launch_slices(data: Any, offsets: Any, nbytes: int, kind: Kind, counts: Any, stream: Any) -> None:
    """The launch alone: ``offsets`` lies on the device, ``nbytes`` is from the first to the last, and the
    rows of documents above `LARGE` are clear.
    """
    if kind.code not in (BYTE, ASCII, LETTER):
        raise ValueError(f"this kernel counts byte, ascii and letter; a row of {kind.name} has other bins")
    documents = offsets.shape[0] - 1
    total = nbytes + documents * OVERHEAD
    most = ROUNDS * 2 * WARPS_PER_MULTIPROCESSOR * multiprocessors(current_device())
    weight = max(MIN_SLICE, ceil_div(total, most))
    blocks = ceil_div(total, weight * 2 * WARPS)
    flat = strided_view(counts, (documents * kind.bins,), (8,))
    launch.enqueue(
        kernel(),
        blocks,
        THREADS,
        stream,
        SHARED_NBYTES,
        address(data),
        offsets,
        weight,
        kind.code,
        kind.bins,
        flat,
    )
