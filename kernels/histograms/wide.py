"""Pairs of bytes and Unicode characters: tables that fill the shared memory of one block.

A table of 65,536 counters of 32 bits would need 256 KiB, more than a multiprocessor has, so two counters
share a word. A counter that reaches 2^15 is emptied into device memory at once: whoever sees the bit set
after an addition clears it atomically, and the one that finds it still set adds 2^15 to the count. A thread checks
after every `VECTOR` additions at the latest, so a block adds at most 1024 × 16 = 2^14 to a counter whose bit is set,
and none ever overflows into its neighbour.

ASCII, which is most of what texts consist of, has counters of 32 bits beside that table. They need no such
care, and adding one without asking for the sum has a second advantage: lanes that meet in one counter are
counted together, while additions that return a value take turns.

Characters of several bytes, and malformed ones, are found in sixteen places at once: the bits of the bytes
around a vector are turned into masks of one bit for each byte, and a few logical operations on these hold all the rules
of UTF-8, also those for the length of malformed sequences. Malformed ones are then only a number of set bits, which
each thread adds up by itself: in noise they are a third of all bytes, and one counter for all would make every lane
wait for every other. Well-formed ones are decoded without further checks.

The bank of a counter mixes both bytes of its value. In the order of the values, the pairs of one letter would
lie side by side, or the pairs that begin with a blank all in one bank, and lanes would wait for each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda, int32, int64, types, uint8, uint32, uint64

from tilewright.kernels.gpu import launch
from tilewright.kernels.gpu.compiled import compile_kernel, multiprocessors
from tilewright.kernels.gpu.device_array import address
from tilewright.kernels.gpu.device_choice import current_device
from tilewright.kernels.histograms import bytes as narrow
from tilewright.kernels.histograms import tokens
from tilewright.kernels.histograms.bytes import (
    BYTES,
    COLUMNS,
    VECTOR,
    WORDS,
    count_byte,
    count_word,
)
from tilewright.kernels.histograms.tokens import BIGRAM, CODE_MASK, REPLACEMENT, Kind
from tilewright.kernels.numbers import ceil_div
from tilewright.kernels.ptx.integers import byte_dot, byte_permute, funnel_right
from tilewright.kernels.ptx.memory import (
    global_array,
    load_vector,
    shared_add,
    shared_address,
    shared_fetch_add,
    shared_fetch_and,
)

VALUES = 1 << 16
PACKED_WORDS = VALUES // 2
PACKED_NBYTES = PACKED_WORDS * 4
FULL = 0x8000
"""What a counter holds when it is emptied."""
FULL_BITS = 0x80008000
ASCII_END = 0x80
SECOND_STEP = 131
"""Words from one second byte to the next in the table of ASCII pairs: above 127, so that no two pairs share a
word, and of the numbers below 256 the one that spreads English text best over the banks (3.0 lanes to a bank
on average where 128 gives 4.5 and chance 3.5)."""
ASCII_WORDS = (ASCII_END - 1) * (SECOND_STEP + 1) + 1
HIGH_BITS = 0x80808080
THREADS = 1024
ASCII_VALUES = ASCII_END * ASCII_END
WORDS_AND_NEXT = WORDS + 1
"""The words of a vector and the byte after it."""
WORDS_AROUND = WORDS + 2
"""The word before a vector, its own, and the one after it."""
BYTES_AHEAD = 4
"""Bits of a mask that stand for bytes before the vector."""
PLACES = (1 << VECTOR) - 1
REPLACED_ROW = BYTES
"""The row of the byte table, after those of the byte values, that counts malformed characters."""
BYTE_WORDS = narrow.TABLE_WORDS + COLUMNS

character_at = cuda.jit(device=True, inline="always")(tokens.character_at)


@cuda.jit(device=True, inline="always")
def place_of(value):  # type: ignore[no-untyped-def]
    """The byte address, within the table, of the word that counts ``value``; bits above the 16 are
    ignored."""
    return ((value << uint32(1)) & uint32(0x1FFFC)) ^ ((value >> uint32(6)) & uint32(0x7C))


@cuda.jit(device=True, inline="always")
def one_of(value):  # type: ignore[no-untyped-def]
    """One, in the half of the word that counts ``value``."""
    return uint32(0x10000) if value & uint32(1) else uint32(1)


@cuda.jit(device=True, inline="always")
def swapped(value):  # type: ignore[no-untyped-def]
    """First and second byte exchanged: a pair as it lies in memory, and as its bin is numbered."""
    return (value >> uint32(8)) & uint32(0xFF) | (value & uint32(0xFF)) << uint32(8)


@cuda.jit(device=True, inline="always")
def empty_if_full(table, value, target, counts):  # type: ignore[no-untyped-def]
    """Move 2^15 from the counter of ``value`` to ``counts[target]``, unless another thread has done it."""
    full = one_of(value) << uint32(15)
    before = shared_fetch_and(table + place_of(value), ~full)
    if before & full:
        cuda.atomic.add(counts, target, int64(FULL))


@cuda.jit(device=True, inline="always")
def count_pair(table, value, counts):  # type: ignore[no-untyped-def]
    """Count one pair, as it lies in memory."""
    one = one_of(value)
    after = shared_fetch_add(table + place_of(value), one) + one
    if after & uint32(FULL_BITS):
        empty_if_full(table, value, swapped(value), counts)


@cuda.jit(device=True, inline="always")
def count_value(table, value, counts):  # type: ignore[no-untyped-def]
    """Count one character below 2^16."""
    one = one_of(value)
    after = shared_fetch_add(table + place_of(value), one) + one
    if after & uint32(FULL_BITS):
        empty_if_full(table, value, value, counts)


@cuda.jit(device=True, inline="always")
def word_ahead(address, data, i, lo):  # type: ignore[no-untyped-def]
    """The four bytes before ``data[i]``, whose address is a multiple of 4; 0 for those before ``data[lo]``."""
    if i - lo >= 4:
        words = global_array(uint64(address) + uint64(i) - uint64(4), uint32)
        return words[uint64(0)]
    word = uint32(0)
    for distance in range(1, 4):
        if i - distance >= lo:
            word |= uint32(data[i - distance]) << uint32(32 - 8 * distance)
    return word


@cuda.jit(device=True, inline="always")
def word_behind(address, data, i, hi):  # type: ignore[no-untyped-def]
    """The four bytes from ``data[i]`` on, whose address is a multiple of 4; 0 for ``data[hi]`` and those after it."""
    if hi - i >= 4:
        words = global_array(uint64(address) + uint64(i), uint32)
        return words[uint64(0)]
    word = uint32(0)
    for distance in range(3):
        if i + distance < hi:
            word |= uint32(data[i + distance]) << uint32(8 * distance)
    return word


@cuda.jit(device=True, inline="always")
def four_bytes(words, place, behind):  # type: ignore[no-untyped-def]
    """The bytes of a vector from ``place`` on, the first lowest: its ``words`` in memory, where a thread can index
    them, and the word ``behind`` it, whose memory may not be the text's.
    """
    word = place >> uint32(2)
    following = behind
    if word < uint32(WORDS - 1):
        following = words[uint64(word + uint32(1))]
    return funnel_right(words[uint64(word)], following, (place & uint32(3)) << uint32(3))


@cuda.jit(device=True, inline="always")
def plane(around, bit):  # type: ignore[no-untyped-def]
    """Bit ``bit`` of each of the 24 bytes ``around`` as a mask, the first byte's lowest.

    A dot product of bytes with powers of two brings those of four bytes together.
    """
    mask = uint32(0x01010101 << bit)
    low = uint32(0x08040201)
    high = uint32(0x80402010)
    first = byte_dot(around[1] & mask, high, byte_dot(around[0] & mask, low, uint32(0)))
    second = byte_dot(around[3] & mask, high, byte_dot(around[2] & mask, low, uint32(0)))
    third = byte_dot(around[5] & mask, high, byte_dot(around[4] & mask, low, uint32(0)))
    return uint32(first | second << uint32(8) | third << uint32(16)) >> uint32(bit)


@cuda.jit(device=True, inline="always")
def characters_in(around):  # type: ignore[no-untyped-def]
    """Where, in the vector in the middle of ``around``, well-formed characters of several bytes begin, and where
    malformed ones: two masks with the first byte's bit lowest.

    As `histogram_tokens.character_at`, for all places at once: in masks of 24 bits, ``mask >> n`` says of each byte
    what ``mask`` says of the n-th after it.
    """
    bit0 = plane(around, 0)
    bit1 = plane(around, 1)
    bit2 = plane(around, 2)
    bit3 = plane(around, 3)
    bit4 = plane(around, 4)
    bit5 = plane(around, 5)
    bit6 = plane(around, 6)
    bit7 = plane(around, 7)
    continues = bit7 & ~bit6
    leads = bit7 & bit6
    some = bit1 | bit2 | bit3
    of_two = leads & ~bit5 & (bit4 | some)  # not C0 and C1
    of_three = leads & bit5 & ~bit4
    of_four = leads & bit5 & bit4 & ~bit3 & ~(bit2 & (bit1 | bit0))  # up to F4
    # Second bytes that would make overlong forms (E0, F0), surrogates (ED), and what lies above U+10FFFF (F4).
    nothing = ~(some | bit0)
    from_a0 = bit5 >> uint32(1)
    from_90 = (bit5 | bit4) >> uint32(1)
    barred = of_three & (nothing & ~from_a0 | bit3 & bit2 & ~bit1 & bit0 & from_a0)
    barred |= of_four & (nothing & ~from_90 | bit2 & from_90)
    second = (continues >> uint32(1)) & ~barred
    third = second & (continues >> uint32(2))
    fourth = third & (continues >> uint32(3))
    long = of_three | of_four
    # Continuations that belong to what began before them, well-formed or not.
    taken = ((of_two | long) & second) << uint32(1) | (long & third) << uint32(2)
    taken |= (of_four & fourth) << uint32(3)
    good = of_two & second | of_three & third | of_four & fourth
    bad = leads & ~good | continues & ~taken
    return (
        uint32(good >> uint32(BYTES_AHEAD) & uint32(PLACES)),
        uint32(bad >> uint32(BYTES_AHEAD) & uint32(PLACES)),
    )


@cuda.jit(device=True, inline="always")
def decoded(four):  # type: ignore[no-untyped-def]
    """The code of the well-formed character of two to four bytes that begins with the lowest byte of ``four``."""
    if four & uint32(0x20) == uint32(0):
        return (four & uint32(0x1F)) << uint32(6) | (four >> uint32(8)) & uint32(0x3F)
    if four & uint32(0x10) == uint32(0):
        return (
            (four & uint32(0xF)) << uint32(12)
            | (four >> uint32(2)) & uint32(0xFC0)
            | (four >> uint32(16)) & uint32(0x3F)
        )
    return (
        (four & uint32(0x7)) << uint32(18)
        | (four << uint32(4)) & uint32(0x3F000)
        | (four >> uint32(10)) & uint32(0xFC0)
        | (four >> uint32(24)) & uint32(0x3F)
    )


@cuda.jit(device=True, inline="always")
def count_code(table, code, counts):  # type: ignore[no-untyped-def]
    """Count one character."""
    if code >= uint32(VALUES):
        cuda.atomic.add(counts, int64(code), int64(1))
    else:
        count_value(table, code, counts)


@cuda.jit(device=True, inline="always")
def count_character(table, data, i, lo, hi, counts):  # type: ignore[no-untyped-def]
    """Count the character whose first byte, not ASCII, is ``data[i]``, if one begins there."""
    character = character_at(data, i, lo, hi)
    if character == 0:
        return
    count_code(table, uint32(character & CODE_MASK), counts)


@cuda.jit(device=True, inline="always")
def count_ascii_pairs(word, following, table):  # type: ignore[no-untyped-def]
    """Count the four pairs that begin in ``word``, all of ASCII; ``following`` is the word after it.

    A dot product of bytes makes a counter's number, first + SECOND_STEP * second, in one instruction.
    """
    first_two = uint32(SECOND_STEP << 8 | 1)
    last = funnel_right(word, following, uint32(24))
    shared_add((byte_dot(word, first_two, uint32(0)) << uint32(2)) + table, uint32(1))
    shared_add((byte_dot(word, first_two << uint32(8), uint32(0)) << uint32(2)) + table, uint32(1))
    shared_add((byte_dot(word, first_two << uint32(16), uint32(0)) << uint32(2)) + table, uint32(1))
    shared_add((byte_dot(last, first_two, uint32(0)) << uint32(2)) + table, uint32(1))


@cuda.jit(device=True, inline="always")
def clear(words, count, thread):  # type: ignore[no-untyped-def]
    for place in range(thread, uint32(count), uint32(THREADS)):
        words[place] = uint32(0)


@cuda.jit(device=True, inline="always")
def counted(words, value):  # type: ignore[no-untyped-def]
    """What the table holds for ``value``."""
    word = words[place_of(value) >> uint32(2)]
    return word >> uint32(16) if value & uint32(1) else word & uint32(0xFFFF)


def bigram_source() -> Callable[..., None]:
    """``bigrams(address, start, stop, counts)``, a plain function.

    Adds the pairs that begin at ``address + start`` up to ``address + stop`` (exclusive) to ``counts``.

    The second byte of the last pair must be readable. Block: `THREADS`; dynamic shared memory: `BIGRAM_NBYTES`; any
    number of blocks.
    """

    def bigrams(address, start, stop, counts):  # type: ignore[no-untyped-def]
        words = cuda.shared.array(0, uint32)
        table = shared_address(words)
        ascii_table = table + uint32(PACKED_NBYTES)
        thread = uint32(cuda.threadIdx.x)
        clear(words, PACKED_WORDS + ASCII_WORDS, thread)
        cuda.syncthreads()  # all counters are zero before any thread counts

        first = uint64(address) + uint64(start)
        length = uint64(stop - start)
        head = min((~first + uint64(1)) & uint64(VECTOR - 1), length)
        vectors = (length - head) // uint64(VECTOR)
        text = global_array(first, uint8)
        body = global_array(first + head, uint32)
        registers = cuda.local.array(WORDS_AND_NEXT, uint32)
        pairs = cuda.local.array(VECTOR, uint32)
        step = uint64(cuda.gridDim.x) * uint64(THREADS)
        vector = uint64(cuda.blockIdx.x) * uint64(THREADS) + uint64(thread)
        while vector < vectors:
            load_vector(registers, uint32(0), body, vector * uint64(WORDS))
            registers[WORDS] = uint32(text[head + (vector + uint64(1)) * uint64(VECTOR)])
            high = registers[WORDS]
            for word in range(WORDS):
                high |= registers[word]
            if high & uint32(HIGH_BITS) == uint32(0):
                for word in range(WORDS):
                    count_ascii_pairs(registers[word], registers[word + 1], ascii_table)
            else:
                for word in range(WORDS):
                    low = registers[word]
                    pairs[4 * word] = low
                    pairs[4 * word + 1] = low >> uint32(8)
                    pairs[4 * word + 2] = low >> uint32(16)
                    pairs[4 * word + 3] = funnel_right(low, registers[word + 1], uint32(24))
                # One byte repeated, as padding is: sixteen equal pairs are counted as one addition of
                # sixteen.
                same = registers[0] == byte_permute(registers[0], uint32(0), uint32(0))
                for word in range(1, WORDS):
                    same = same and registers[word] == registers[0]
                same = same and registers[WORDS] == registers[0] & uint32(0xFF)
                seen = uint32(0)
                if same:
                    amount = one_of(pairs[0]) << uint32(4)
                    seen = shared_fetch_add(table + place_of(pairs[0]), amount) + amount
                    if seen & uint32(FULL_BITS):
                        empty_if_full(table, pairs[0], swapped(pairs[0]), counts)
                else:
                    for pair in range(VECTOR):
                        one = one_of(pairs[pair])
                        seen |= shared_fetch_add(table + place_of(pairs[pair]), one) + one
                    if seen & uint32(FULL_BITS):
                        for pair in range(VECTOR):
                            empty_if_full(table, pairs[pair], swapped(pairs[pair]), counts)
            vector += step
        if cuda.blockIdx.x == 0:  # the pairs before the first whole vector and after the last
            place = uint64(thread)
            if place < head:
                count_pair(table, uint32(text[place]) | uint32(text[place + uint64(1)]) << uint32(8), counts)
            place = head + vectors * uint64(VECTOR) + uint64(thread)
            if place < length:
                count_pair(table, uint32(text[place]) | uint32(text[place + uint64(1)]) << uint32(8), counts)
        cuda.syncthreads()  # every pair is in before the tables are read

        for value in range(thread, uint32(VALUES), uint32(THREADS)):
            total = counted(words, value)
            if total:
                cuda.atomic.add(counts, swapped(value), int64(total))
        for pair in range(thread, uint32(ASCII_VALUES), uint32(THREADS)):
            before, behind = pair & uint32(ASCII_END - 1), pair // uint32(ASCII_END)
            total = words[uint32(PACKED_WORDS) + before + behind * uint32(SECOND_STEP)]
            if total:
                cuda.atomic.add(counts, before << uint32(8) | behind, int64(total))

    return bigrams


def codepoint_source() -> Callable[..., None]:
    """``codepoints(address, start, stop, lo, hi, counts)``, a plain function.

    Adds the characters that begin at ``data[start:stop]`` of the document ``data[lo:hi]`` to ``counts``.

    ``data`` begins at ``address``. Every byte is counted in a table like the byte kernel's, of which only
    ASCII is used in the end; for the others, `characters_in` finds where characters begin, a vector at a time. Each
    thread counts the malformed ones by itself. Block: `THREADS`; dynamic shared memory: `CODEPOINT_NBYTES`; any number
    of blocks.
    """

    def codepoints(address, start, stop, lo, hi, counts):  # type: ignore[no-untyped-def]
        words = cuda.shared.array(0, uint32)
        table = shared_address(words)
        byte_words = words[PACKED_WORDS:]
        byte_table = table + uint32(PACKED_NBYTES)
        thread = uint32(cuda.threadIdx.x)
        clear(words, PACKED_WORDS + BYTE_WORDS, thread)
        cuda.syncthreads()  # all counters are zero before any thread counts

        column = narrow.column_of(thread)
        first = uint64(address) + uint64(start)
        length = uint64(stop - start)
        head = min((~first + uint64(1)) & uint64(VECTOR - 1), length)
        vectors = (length - head) // uint64(VECTOR)
        data = global_array(address, uint8)
        body = global_array(first + head, uint32)
        around = cuda.local.array(WORDS_AROUND, uint32)
        replaced = uint32(0)
        step = uint64(cuda.gridDim.x) * uint64(THREADS)
        vector = uint64(cuda.blockIdx.x) * uint64(THREADS) + uint64(thread)
        while vector < vectors:
            load_vector(around, uint32(1), body, vector * uint64(WORDS))
            high = uint32(0)
            for word in range(1, WORDS + 1):
                count_word(around[word], column, byte_table)
                high |= around[word]
            if high & uint32(HIGH_BITS):
                here = start + int64(head + vector * uint64(VECTOR))
                around[0] = word_ahead(address, data, here, lo)
                around[WORDS + 1] = word_behind(address, data, here + int64(VECTOR), hi)
                here_words = global_array(uint64(address) + uint64(here), uint32)
                good, bad = characters_in(around)
                replaced += uint32(cuda.popc(bad))
                while good:
                    place = uint32(cuda.ffs(int32(good)) - 1)
                    four = four_bytes(here_words, place, around[WORDS + 1])
                    count_code(table, uint32(decoded(four)), counts)
                    good = uint32(good & (good - uint32(1)))
            vector += step
        shared_add(byte_table + uint32(4 * COLUMNS * REPLACED_ROW) + column, replaced)
        if cuda.blockIdx.x == 0:  # the bytes before the first whole vector and after the last
            for turn in range(2):
                place = uint64(thread) + (head + vectors * uint64(VECTOR) if turn else uint64(0))
                if place < (length if turn else head):
                    i = start + int64(place)
                    if data[i] < uint8(ASCII_END):
                        count_byte(data[i], column, byte_table)
                    else:
                        count_character(table, data, i, lo, hi, counts)
        cuda.syncthreads()  # every character is in before the tables are read

        for value in range(thread, uint32(VALUES), uint32(THREADS)):
            total = counted(words, value)
            if total:
                cuda.atomic.add(counts, value, int64(total))
        if thread <= uint32(ASCII_END):
            malformed = thread == uint32(ASCII_END)
            row_total = narrow.row_sum(byte_words, uint32(REPLACED_ROW) if malformed else thread)
            if row_total:
                cuda.atomic.add(counts, uint32(REPLACEMENT) if malformed else thread, int64(row_total))

    return codepoints


BIGRAM_NBYTES = PACKED_NBYTES + 4 * ASCII_WORDS
CODEPOINT_NBYTES = PACKED_NBYTES + 4 * BYTE_WORDS
_PLACE, _COUNTS = types.int64, types.Array(types.int64, 1, "C")
BIGRAM_SIGNATURE = types.void(types.uint64, _PLACE, _PLACE, _COUNTS)
CODEPOINT_BOUNDS = (THREADS, 1)
CODEPOINT_SIGNATURE = types.void(types.uint64, _PLACE, _PLACE, _PLACE, _PLACE, _COUNTS)


@functools.cache
def bigram_kernel() -> Any:
    return compile_kernel(bigram_source(), BIGRAM_SIGNATURE, shared_nbytes=BIGRAM_NBYTES)


@functools.cache
def codepoint_kernel() -> Any:
    return compile_kernel(
        codepoint_source(),
        CODEPOINT_SIGNATURE,
        launch_bounds=CODEPOINT_BOUNDS,
        shared_nbytes=CODEPOINT_NBYTES,
    )


def launch_wide(
    data: Any, start: int, stop: int, lo: int, hi: int, kind: Kind, counts: Any, stream: Any
) -> None:
    """Add the pairs or characters that begin in ``data[start:stop]`` of the document ``data[lo:hi]`` to
    ``counts``, a device array int64[bins], on ``stream``.
    """
    if kind.code == BIGRAM:
        compiled, nbytes = bigram_kernel(), BIGRAM_NBYTES
        stop = min(stop, hi - 1)
        arguments: tuple[int, ...] = (start, stop)
    else:
        compiled, nbytes = codepoint_kernel(), CODEPOINT_NBYTES
        arguments = (start, stop, lo, hi)
    if stop <= start:
        return
    blocks = min(ceil_div(stop - start, THREADS * VECTOR), multiprocessors(current_device()))
    launch.enqueue(compiled, blocks, THREADS, stream, nbytes, address(data), *arguments, counts)
