"""The texts of one field of JSON lines that lie in a GPU's memory, decoded one behind the other.

A warp takes a line. It goes through what stands outside of strings as `json_lines.py` does, all lanes at the same byte,
and through strings four bytes a lane. Quotation marks, backslashes and control characters are found among four bytes by
the method of Warren (Hacker's Delight, 2nd edition, 6-1). Which bytes backslashes escape is told as Langdale and Lemire
do (Parsing gigabytes of JSON per second, 2019), by runs of odd length, but over a warp: a lane with any other byte
decides what is behind it, and a lane of four backslashes passes on what is before it; two votes say both of all lanes.
They find all strings of a text first, and what stands between them afterwards. Here most bytes of a line are those of
one string, so the warp passes over them in either way, and which string is wanted is known when it begins. Decoded,
each lane's bytes go behind those of the lanes before it.

Whatever is not a line with a text, or without one, is left to the loop on the cores: lines with a fault, values that
are no text, lists and objects more than `DEEPEST` deep, and keys with escapes at the top. Nothing is written of those,
and where they stand is told. So this decides nothing otherwise than the loop, which says what is wrong with a line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import cuda

from tilewright.kernels.duplicates import device_lines
from tilewright.kernels.duplicates.device_hashing import halves
from tilewright.kernels.duplicates.device_lines import as_words, find_newlines
from tilewright.kernels.duplicates.device_rooms import Rooms
from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.gpu.compiled import device_function, multiprocessors
from tilewright.kernels.gpu.device_choice import SIMULATOR, current_device
from tilewright.kernels.gpu.transfer import download
from tilewright.kernels.histograms.select import clear
from tilewright.kernels.histograms.tables.device_keys import arithmetic
from tilewright.kernels.numbers import ceil_div, round_up
from tilewright.kernels.passes.launcher import Launcher
from tilewright.kernels.records import json_lines
from tilewright.kernels.records.span_numbers import CURSOR_AND_ENDS, MOST_UNDECIDED, ROW_LENGTH, listed

WARP = 4 if SIMULATOR else 32
THREADS = WARP if SIMULATOR else 256
"""In the simulator lanes meet as the threads of a block do."""
WARPS = THREADS // WARP
BLOCKS_PER_MULTIPROCESSOR = 8
DEEPEST = 64
"""Lists and objects within each other: a bit of a word says of each which it is."""
LEAD = 16
"""Bytes before the first text, all `sources.SEPARATOR`: so one stands before every text, as one stands behind it."""
SLACK = 4 * WARP
"""Bytes behind the last line that may be read."""
ALIGNMENT = 16
"""Of the first line of a span."""

RECORDS, DECODED, LOST, WITHOUT, NULL, UNDECIDED = range(6)
"""Places in a row of what is found: lines that hold an object; bytes of their texts; halves of surrogate pairs, which
became U+FFFD; lines without the field, and with null there, whose texts are empty; lines that are left to the cores,
which are not counted among the others."""
assert UNDECIDED == ROW_LENGTH - 1

_MISSING, _TEXT, _NULL, _NUMBER, _TRUTH, _OBJECT, _LIST = range(7)
"""As in `json_lines`: the kernel's Numba takes constants from the module that it is written in."""
assert (_MISSING, _TEXT, _NULL, _NUMBER, _TRUTH, _OBJECT, _LIST) == (
    json_lines.MISSING, json_lines.TEXT, json_lines.NULL, json_lines.NUMBER, json_lines.TRUTH,
    json_lines.OBJECT, json_lines.LIST,
)  # fmt: skip
_UNKNOWN = -1
"""The kind of a value of a line that is left to the cores."""

_VALUE, _VALUE_OR_END, _COMMA_OR_END, _KEY_OR_END, _KEY = range(5)
"""What may come next in a line; keys last."""

_QUOTE, _BACKSLASH, _NO_DIGIT = 0x22, 0x5C, 1 << 16
_FOUR_QUOTES, _FOUR_BACKSLASHES, _ABOVE_CONTROL = 0x22222222, 0x5C5C5C5C, 0xE0E0E0E0
_LOW_BITS, _HIGH_BITS = 0x7F7F7F7F, 0x80808080
_GATHERING = 1 << 28 | 1 << 21 | 1 << 14 | 1 << 7
"""Times the lowest bits of four bytes, these are the four highest."""
_SURROGATES, _LOW_SURROGATES, _BEHIND_SURROGATES, _REPLACEMENT = 0xD800, 0xDC00, 0xE000, 0xFFFD
_LOST = 1 << 24
"""No character: half of a pair without the other one."""


def _packed(word: bytes) -> int:
    return int.from_bytes(word, "little")


_TRUE, _FALSE, _NOTHING, _NAN = map(_packed, (b"true", b"false", b"null", b"NaN"))
_INFINITY = _packed(b"Infinity")


class _Meeting(NamedTuple):
    """Inside a kernel, called by all lanes of a warp. sums: int64[WARP] of shared memory."""

    earliest: Any
    """``earliest(sums, lane, mine, none)``: the least of what the lanes have, of which all below ``none`` ascend."""
    flags: Any
    """``flags(sums, lane, flag)``: a bit for each lane that has a flag."""
    before: Any
    """``before(sums, lane, value, carry)``: what the lane before has, a number of 32 bits; of the first lane carry."""
    of_lane: Any
    """``of_lane(sums, lane, value, which)``: what a lane has."""
    summed: Any
    """``summed(sums, lane, value)``: the sum of what this lane has and those before it, a number of 32 bits."""
    highest: Any
    """``highest(bits)``: the place of the highest of bits, of which there is one."""
    together: Any
    """``together()``: each lane sees afterwards what the others wrote."""


@functools.cache
def _meeting() -> _Meeting:
    if SIMULATOR:

        @device_function
        def gathered(sums: Any, lane: Any, value: Any) -> Any:
            sums[lane] = value
            cuda.syncthreads()  # all have written before any reads
            found = [int(sums[k]) for k in range(WARP)]
            cuda.syncthreads()  # and all have read before any writes again
            return found

        @device_function
        def together() -> None:
            cuda.syncthreads()  # all that lanes wrote is there

        return _Meeting(
            lambda sums, lane, mine, none: min(none, *gathered(sums, lane, mine)),
            lambda sums, lane, flag: sum(
                each << k for k, each in enumerate(gathered(sums, lane, 1 if flag else 0))
            ),
            lambda sums, lane, value, carry: [carry, *gathered(sums, lane, value)][lane],
            lambda sums, lane, value, which: gathered(sums, lane, value)[which],
            lambda sums, lane, value: sum(gathered(sums, lane, value)[: lane + 1]),
            lambda bits: int(bits).bit_length() - 1,
            together,
        )

    full = 0xFFFFFFFF
    last_lane = WARP - 1

    @device_function
    def earliest(sums: Any, lane: Any, mine: Any, none: Any) -> Any:
        votes = numba.uint32(cuda.ballot_sync(full, mine < none))
        if votes == numba.uint32(0):
            return none
        first = numba.int32(cuda.ffs(votes)) - numba.int32(1)
        return numba.int64(cuda.shfl_sync(full, numba.int32(mine), first))

    @device_function
    def flags(sums: Any, lane: Any, flag: Any) -> Any:
        return numba.uint32(cuda.ballot_sync(full, flag))

    @device_function
    def before(sums: Any, lane: Any, value: Any, carry: Any) -> Any:
        found = numba.int64(cuda.shfl_up_sync(full, numba.int32(value), 1))
        if lane == 0:
            found = numba.int64(carry)
        return found

    @device_function
    def of_lane(sums: Any, lane: Any, value: Any, which: Any) -> Any:
        return cuda.shfl_sync(full, value, which)

    @device_function
    def summed(sums: Any, lane: Any, value: Any) -> Any:
        total = numba.int32(value)
        for power in range(5):
            other = cuda.shfl_up_sync(full, total, 1 << power)
            if lane >= 1 << power:
                total = numba.int32(total + other)
        return numba.int64(total)

    @device_function
    def highest(bits: Any) -> Any:
        return numba.int64(last_lane) - numba.int64(cuda.clz(numba.uint32(bits)))

    @device_function
    def warp_together() -> None:
        cuda.syncwarp()  # all that lanes wrote is there

    return _Meeting(earliest, flags, before, of_lane, summed, highest, warp_together)


def _scanning() -> tuple[Any, Any, Any, Any, Any]:
    """Inside a kernel: ``byte_at``, ``hexadecimal``, ``marks_of``, ``escapes_of`` and ``string_end``, as they say of
    themselves. Four bytes are a lane's, the lowest first, and what is said of them has a bit for each."""
    half, (word, _, whole) = halves(), arithmetic()
    meeting = _meeting()
    earliest, flags, highest = meeting.earliest, meeting.flags, meeting.highest

    @device_function
    def byte_at(text: Any, i: Any) -> Any:
        return whole(text[word(i)])

    @device_function
    def zeros_of(four: Any) -> Any:
        """Which of four bytes are zero."""
        low = half(half(four & half(_LOW_BITS)) + half(_LOW_BITS))
        found = half(half(~half(low | four) & half(_HIGH_BITS)) >> half(7))
        return whole(half(half(found * half(_GATHERING)) >> half(28)))

    @device_function
    def marks_of(four: Any) -> Any:
        """Which are quotation marks, backslashes, and control characters."""
        return (
            zeros_of(half(four ^ half(_FOUR_QUOTES))),
            zeros_of(half(four ^ half(_FOUR_BACKSLASHES))),
            zeros_of(half(four & half(_ABOVE_CONTROL))),
        )

    @device_function
    def escapes_of(backslashes: Any, carry: Any, sums: Any, lane: Any) -> Any:
        """Which are behind a backslash that is not behind another such one; and whether the first byte after the last
        lane's is. carry: whether the first lane's first byte is.

        A lane that has other bytes than backslashes decides by itself what is behind it, by how many end it.
        """
        odd = (backslashes & 8) != 0 and ((backslashes & 4) == 0 or (backslashes & 2) != 0)
        deciding = word(flags(sums, lane, backslashes != 15))
        odds = word(flags(sums, lane, odd))
        earlier = word(deciding & word((word(1) << word(lane)) - word(1)))
        escaped = whole(carry)
        if earlier != word(0):
            escaped = whole(odds >> word(highest(earlier))) & 1
        found = escaped
        for k in range(3):
            escaped = (backslashes >> k) & 1 & ~escaped
            found |= escaped << (k + 1)
        behind = whole(carry)
        if deciding != word(0):
            behind = whole(odds >> word(highest(deciding))) & 1
        return found, behind

    @device_function
    def digit(byte: Any) -> Any:
        if 0x30 <= byte <= 0x39:
            return whole(byte - 0x30)
        letter = whole((byte | 0x20) - 0x61)
        if 0 <= letter < 6:
            return whole(letter + 10)
        return whole(_NO_DIGIT)

    @device_function
    def hexadecimal(text: Any, i: Any) -> Any:
        """The number that the four digits at ``i`` make, `_NO_DIGIT` or more where one of them is none."""
        return (
            digit(byte_at(text, i)) << 12
            | digit(byte_at(text, i + 1)) << 8
            | digit(byte_at(text, i + 2)) << 4
            | digit(byte_at(text, i + 3))
        )

    @device_function
    def is_malformed(text: Any, i: Any, stop: Any) -> Any:
        """Whether the byte at ``i``, behind a backslash, makes no escape, or the line is too short for it."""
        byte = byte_at(text, i)
        if byte == 0x75:
            return i + 5 > stop or hexadecimal(text, i + 1) >= _NO_DIGIT
        return not (
            byte == 0x22 or byte == 0x5C or byte == 0x2F or byte == 0x62
            or byte == 0x66 or byte == 0x6E or byte == 0x72 or byte == 0x74
        )  # fmt: skip

    @device_function
    def string_end(text: Any, words: Any, i: Any, stop: Any, sums: Any, lane: Any) -> Any:
        """Where the string whose first character is at ``i`` has its closing quotation mark, -1 where it is malformed,
        and whether it holds escapes."""
        base = whole(i >> 2) << 2
        carry, any_escape = whole(0), False
        mine = whole(15)
        if lane == 0:
            mine = whole(15 << (i & 3)) & 15  # what is before the string is of no interest
        while base < stop:
            at = whole(base + 4 * lane)
            quotes, backslashes, controls = marks_of(half(words[word(at >> 2)]))
            quotes, backslashes, controls = quotes & mine, backslashes & mine, controls & mine
            mine = whole(15)
            escaped = whole(0)
            there = carry != 0 or flags(sums, lane, backslashes != 0) != 0
            if there:
                escaped, carry = escapes_of(backslashes, carry, sums, lane)
            ends = quotes & ~escaped
            none = whole(4 * WARP)
            first = none
            if ends != 0:
                first = whole(4 * lane + whole(cuda.popc(half(~ends & (ends - 1)))))
            first = earliest(sums, lane, first, none)
            inside = first - 4 * lane  # how many of the lane's bytes are in the string
            within = whole(0) if inside <= 0 else (whole(15) if inside >= 4 else whole((1 << inside) - 1))
            fault = (controls & within) != 0
            if there:
                any_escape = any_escape or flags(sums, lane, (backslashes & within) != 0) != 0
                escaped &= within
                for k in range(4):
                    if (escaped >> k) & 1 != 0:
                        fault = fault or is_malformed(text, at + k, stop)
            if flags(sums, lane, fault) != 0:
                return whole(-1), any_escape
            if first < none:
                end = whole(base + first)
                return (end if end < stop else whole(-1)), any_escape
            base += 4 * WARP
        return whole(-1), any_escape

    return byte_at, hexadecimal, marks_of, escapes_of, string_end


def _values(byte_at: Any) -> tuple[Any, Any]:
    """Inside a kernel: ``behind_blanks(text, i, stop)``; ``scalar_end(text, i, stop)``, where what is neither text,
    list nor object ends, or -1, and its kind."""
    _, _, whole = arithmetic()

    @device_function
    def behind_blanks(text: Any, i: Any, stop: Any) -> Any:
        while i < stop:
            byte = byte_at(text, i)
            if not (byte == 0x20 or byte == 0x09 or byte == 0x0D or byte == 0x0A):
                break
            i += 1
        return i

    @device_function
    def digits_end(text: Any, i: Any, stop: Any) -> Any:
        while i < stop and 0x30 <= byte_at(text, i) <= 0x39:
            i += 1
        return i

    @device_function
    def word_end(text: Any, i: Any, stop: Any, wanted: Any, length: Any) -> Any:
        """Where a word of so many bytes ends, the first of them lowest, or -1."""
        if i + length > stop:
            return whole(-1)
        for j in range(length):
            if byte_at(text, i + j) != whole(wanted >> (8 * j)) & 0xFF:
                return whole(-1)
        return whole(i + length)

    @device_function
    def number_end(text: Any, i: Any, stop: Any) -> Any:
        if byte_at(text, i) == 0x2D:
            i += 1
            if i < stop and byte_at(text, i) == 0x49:
                return word_end(text, i, stop, _INFINITY, 8)
        end = digits_end(text, i, stop)
        if end == i:
            return whole(-1)
        if byte_at(text, i) == 0x30:
            end = i + 1  # a zero stands alone
        i = end
        if i < stop and byte_at(text, i) == 0x2E:
            end = digits_end(text, i + 1, stop)
            if end == i + 1:
                return whole(-1)
            i = end
        if i < stop and (byte_at(text, i) | 0x20) == 0x65:
            j = i + 1
            if j < stop and (byte_at(text, j) == 0x2B or byte_at(text, j) == 0x2D):
                j += 1
            end = digits_end(text, j, stop)
            if end == j:
                return whole(-1)
            i = end
        return i

    @device_function
    def scalar_end(text: Any, i: Any, stop: Any) -> Any:
        byte = byte_at(text, i)
        if byte == 0x2D or 0x30 <= byte <= 0x39:
            return number_end(text, i, stop), _NUMBER
        if byte == 0x74:
            return word_end(text, i, stop, _TRUE, 4), _TRUTH
        if byte == 0x66:
            return word_end(text, i, stop, _FALSE, 5), _TRUTH
        if byte == 0x6E:
            return word_end(text, i, stop, _NOTHING, 4), _NULL
        if byte == 0x4E:
            return word_end(text, i, stop, _NAN, 3), _NUMBER
        if byte == 0x49:
            return word_end(text, i, stop, _INFINITY, 8), _NUMBER
        return whole(-1), _NUMBER

    return behind_blanks, scalar_end


def _line_function(byte_at: Any, string_end: Any) -> tuple[Any, Any]:
    """Inside a kernel: ``behind_blanks``, and ``value_of(text, words, i, stop, key, key_nbytes, sums, lane)``: of the
    line that begins with the byte at ``i``, which is no blank, the kind of the key's value, or _UNKNOWN, and where a
    text begins and ends."""
    word, _, whole = arithmetic()
    earliest = _meeting().earliest
    behind_blanks, scalar_end = _values(byte_at)

    @device_function
    def is_key(text: Any, i: Any, end: Any, key: Any, length: Any, sums: Any, lane: Any) -> Any:
        if end - i != length:
            return False
        differs = whole(WARP)
        for j in range(lane, length, WARP):
            if whole(key[word(j)]) != byte_at(text, i + j):
                differs = whole(lane)
        return earliest(sums, lane, differs, whole(WARP)) == WARP

    @device_function
    def value_of(
        text: Any, words: Any, i: Any, stop: Any, key: Any, key_nbytes: Any, sums: Any, lane: Any
    ) -> Any:
        kind, begin, end = whole(_MISSING), whole(0), whole(0)
        depth, objects = whole(0), word(0)
        wanted = False
        state = whole(_VALUE)
        while True:
            i = behind_blanks(text, i, stop)
            if i >= stop:
                return whole(_UNKNOWN), begin, end
            byte = byte_at(text, i)
            if state >= _KEY_OR_END:
                if byte == _QUOTE:
                    key_end, escaped = string_end(text, words, i + 1, stop, sums, lane)
                    if key_end < 0 or (escaped and depth == 1):
                        return whole(_UNKNOWN), begin, end
                    if depth == 1:
                        wanted = is_key(text, i + 1, key_end, key, key_nbytes, sums, lane)
                    i = behind_blanks(text, key_end + 1, stop)
                    if i >= stop or byte_at(text, i) != 0x3A:
                        return whole(_UNKNOWN), begin, end
                    i += 1
                    state = whole(_VALUE)
                    continue
                if byte != 0x7D or state == _KEY:
                    return whole(_UNKNOWN), begin, end
                ends = True
            elif state == _COMMA_OR_END:
                in_object = (objects >> word(depth - 1)) & word(1) != word(0)
                if byte == 0x2C:
                    i += 1
                    state = whole(_KEY) if in_object else whole(_VALUE)
                    continue
                if byte != (0x7D if in_object else 0x5D):
                    return whole(_UNKNOWN), begin, end
                ends = True
            else:
                ends = state == _VALUE_OR_END and byte == 0x5D
            if ends:
                depth -= 1
                i += 1
                state = whole(_COMMA_OR_END)
                if depth == 0:
                    break
                continue
            if byte == 0x7B or byte == 0x5B:
                is_object = byte == 0x7B
                if depth == DEEPEST or (depth == 0 and not is_object):
                    return whole(_UNKNOWN), begin, end
                if depth == 1 and wanted:
                    kind = whole(_OBJECT) if is_object else whole(_LIST)
                bit = word(word(1) << word(depth))
                objects = word(objects | bit) if is_object else word(objects & word(~bit))
                depth += 1
                i += 1
                state = whole(_KEY_OR_END) if is_object else whole(_VALUE_OR_END)
                continue
            if depth == 0:
                return whole(_UNKNOWN), begin, end
            if byte == _QUOTE:
                behind, _ = string_end(text, words, i + 1, stop, sums, lane)
                if behind < 0:
                    return whole(_UNKNOWN), begin, end
                if depth == 1 and wanted:
                    kind, begin, end = whole(_TEXT), i + 1, behind
                i = behind + 1
            else:
                behind, its_kind = scalar_end(text, i, stop)
                if behind < 0:
                    return whole(_UNKNOWN), begin, end
                if depth == 1 and wanted:
                    kind = whole(its_kind)
                i = behind
            state = whole(_COMMA_OR_END)
        if behind_blanks(text, i, stop) < stop or kind > _NULL:
            return whole(_UNKNOWN), begin, end
        return kind, begin, end

    return behind_blanks, value_of


def _decoding(byte_at: Any, hexadecimal: Any, marks_of: Any, escapes_of: Any) -> Any:
    """Inside a kernel: ``decode(text, words, i, end, out, to, sums, lane)`` writes what the characters of a good string
    from ``i`` to ``end`` stand for, at most as many bytes; returns where that ends, and how many that this lane wrote
    were halves of pairs."""
    half, (word, _, whole) = halves(), arithmetic()
    meeting = _meeting()
    flags, before, of_lane, summed = meeting.flags, meeting.before, meeting.of_lane, meeting.summed

    @device_function
    def meaning(byte: Any) -> Any:
        """What a byte behind a backslash stands for."""
        if byte == 0x6E:
            return whole(0x0A)
        if byte == 0x74:
            return whole(0x09)
        if byte == 0x72:
            return whole(0x0D)
        if byte == 0x62:
            return whole(0x08)
        if byte == 0x66:
            return whole(0x0C)
        return whole(byte)

    @device_function
    def is_behind_high(text: Any, begin: Any, i: Any) -> Any:
        """Whether the escape whose backslash is at ``i`` follows one of the first half of a pair."""
        at = whole(i - 6)
        if at < begin or byte_at(text, at) != _BACKSLASH or byte_at(text, at + 1) != 0x75:
            return False
        if not _SURROGATES <= hexadecimal(text, at + 2) < _LOW_SURROGATES:
            return False
        first = at
        while first > begin and byte_at(text, first - 1) == _BACKSLASH:
            first -= 1
        return (at - first) & 1 == 0  # or that backslash is what another one stands before

    @device_function
    def character_of(text: Any, begin: Any, i: Any, end: Any) -> Any:
        """What the escape with the ``u`` at ``i`` stands for, -1 for the second half of a pair, which is the first
        one's."""
        code = hexadecimal(text, i + 1)
        if code < _SURROGATES or code >= _BEHIND_SURROGATES:
            return code
        if code >= _LOW_SURROGATES:
            return whole(-1) if is_behind_high(text, begin, i - 1) else whole(_LOST)
        if i + 5 < end and byte_at(text, i + 5) == _BACKSLASH and byte_at(text, i + 6) == 0x75:
            low = hexadecimal(text, i + 7)
            if _LOW_SURROGATES <= low < _BEHIND_SURROGATES:
                return whole(0x10000 + ((code - _SURROGATES) << 10 | (low - _LOW_SURROGATES)))
        return whole(_LOST)

    @device_function
    def decode(text: Any, words: Any, i: Any, end: Any, out: Any, to: Any, sums: Any, lane: Any) -> Any:
        lost, carry, carried = whole(0), whole(0), whole(0)
        base = whole(i >> 2) << 2
        while base < end:
            at = whole(base + 4 * lane)
            four = half(words[word(at >> 2)])
            inside, outside = end - at, i - at
            mine = whole(0) if inside <= 0 else (whole(15) if inside >= 4 else whole((1 << inside) - 1))
            if outside > 0:
                mine = whole(0) if outside >= 4 else whole(mine & (15 << outside))
            _, backslashes, _ = marks_of(four)
            backslashes &= mine
            if carry == 0 and carried == 0 and flags(sums, lane, backslashes != 0) == 0:
                place = whole(to + at - max(base, i))
                for k in range(4):
                    if (mine >> k) & 1 != 0:
                        out[word(place + k)] = (whole(four) >> (8 * k)) & 0xFF
                to += min(end, base + 4 * WARP) - max(base, i)
                base += 4 * WARP
                continue
            escaped, carry = escapes_of(backslashes, carry, sums, lane)
            escaped &= mine
            letters = whole(0)
            for k in range(4):
                if (escaped >> k) & 1 != 0 and (whole(four) >> (8 * k)) & 0xFF == 0x75:
                    letters |= 1 << k
            # The four bytes behind a u are its digits.
            both = letters << 4 | before(sums, lane, letters, carried)
            carried = whole(of_lane(sums, lane, letters, WARP - 1))
            digits = (both << 1 | both << 2 | both << 3 | both << 4) >> 4
            plain = mine & ~(backslashes & ~escaped) & ~digits & ~letters & 15
            code, length = whole(-1), whole(0)
            if letters != 0:  # there is one at most: an escape of that kind has six bytes
                code = character_of(text, i, at + whole(cuda.popc(half(~letters & (letters - 1)))), end)
                if code == _LOST:
                    lost += 1
                    code = whole(_REPLACEMENT)
                if code >= 0:
                    length = whole(1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000))
            mine_nbytes = whole(cuda.popc(half(plain))) + length
            through = summed(sums, lane, mine_nbytes)
            place = whole(to + through - mine_nbytes)
            for k in range(4):
                byte = (whole(four) >> (8 * k)) & 0xFF
                if (plain >> k) & 1 != 0:
                    out[word(place)] = meaning(byte) if (escaped >> k) & 1 != 0 else byte
                    place += 1
                elif (letters >> k) & 1 != 0:
                    for j in range(length):
                        byte = (code >> (6 * (length - 1 - j))) & 0x3F | 0x80
                        if j == 0:
                            byte = (
                                code if length == 1 else code >> (6 * (length - 1)) | (0xF00 >> length & 0xFF)
                            )
                        out[word(place + j)] = byte
                    place += length
            to += whole(of_lane(sums, lane, through, WARP - 1))
            base += 4 * WARP
        return to, lost

    return decode


def texts_function() -> Callable[..., None]:
    """The plain function of the kernel that finds the texts of lines, and decodes them.

    text, words: the same memory, uint8 and uint32, with `SLACK` bytes behind the first ``stop``, the lines. places:
    int64[newlines], as `device_lines.LINES` writes them. key: uint8, of which the first ``key_nbytes`` are
    the field's name in UTF-8. out: uint8, `LEAD` bytes larger
    than the lines of all launches, of which the first `LEAD` are 0; written are the texts, each with zeros behind it,
    in any order. cursor: int64[1], the bytes of ``out`` behind these that are in use. found: int64[ROW_LENGTH], added
    to. undecided: int64[2 * most], written: where the first ``most`` of lines that are left to the cores begin and end.
    ends: int64[512], added to where ``pairs`` is 1: how many texts begin with each byte, and end with it. Block:
    THREADS; grid: any.
    """
    word, _, whole = arithmetic()
    meeting = _meeting()
    of_lane, together = meeting.of_lane, meeting.together
    byte_at, hexadecimal, marks_of, escapes_of, string_end = _scanning()
    behind_blanks, value_of = _line_function(byte_at, string_end)
    decode = _decoding(byte_at, hexadecimal, marks_of, escapes_of)

    def texts(
        text: Any, words: Any, places: Any, newlines: Any, stop: Any, key: Any, key_nbytes: Any, out: Any,
        cursor: Any, found: Any, undecided: Any, most: Any, ends: Any, pairs: Any,
    ) -> None:  # fmt: skip
        sums = cuda.shared.array(WARP, numba.int64)
        thread = whole(cuda.threadIdx.x)
        lane = thread % WARP
        warp = whole(cuda.blockIdx.x) * WARPS + thread // WARP
        records, decoded, lost, without, null = whole(0), whole(0), whole(0), whole(0), whole(0)
        for line in range(warp, newlines + 1, whole(cuda.gridDim.x) * WARPS):
            begin, end = whole(0), whole(stop)
            if line > 0:
                begin = (whole(places[word(line - 1)]) >> 1) + 1
            if line < newlines:
                end = whole(places[word(line)]) >> 1
            first = behind_blanks(text, begin, end)
            if first == end:
                continue
            kind, start, behind = value_of(text, words, first, end, key, key_nbytes, sums, lane)
            if kind == _UNKNOWN:
                if lane == 0:
                    number = whole(cuda.atomic.add(found, UNDECIDED, 1))
                    if number < most:
                        undecided[word(2 * number)] = begin
                        undecided[word(2 * number + 1)] = end
                continue
            records += 1
            if kind != _TEXT:
                without += kind == _MISSING
                null += kind == _NULL
                continue
            length = behind - start
            at = whole(0)
            if lane == 0:
                at = whole(cuda.atomic.add(cursor, 0, length + 1))
            at = whole(of_lane(sums, lane, at, 0)) + LEAD
            to, halves_of_pairs = decode(text, words, start, behind, out, at, sums, lane)
            for k in range(to + lane, at + length + 1, WARP):
                out[word(k)] = 0
            decoded += to - at
            lost += halves_of_pairs
            if pairs == 1:
                together()  # the first lane reads what others wrote
                if lane == 0 and to > at:
                    cuda.atomic.add(ends, byte_at(out, at), 1)
                    cuda.atomic.add(ends, 256 + byte_at(out, to - 1), 1)
        if lost > 0:
            cuda.atomic.add(found, LOST, lost)
        if lane == 0:
            cuda.atomic.add(found, RECORDS, records)
            cuda.atomic.add(found, DECODED, decoded)
            cuda.atomic.add(found, WITHOUT, without)
            cuda.atomic.add(found, NULL, null)

    return texts


_BYTES, _WORDS = numba.types.Array(numba.uint8, 1, "C"), numba.types.Array(numba.uint32, 1, "C")
_NUMBERS = numba.types.Array(numba.int64, 1, "C")
TEXTS = Launcher(
    texts_function,
    lambda: numba.void(
        _BYTES, _WORDS, _NUMBERS, numba.int64, numba.int64, _BYTES, numba.int64, _BYTES,
        _NUMBERS, _NUMBERS, _NUMBERS, numba.int64, _NUMBERS, numba.int64,
    ),
)  # fmt: skip


class Texts(NamedTuple):
    """What was found of the lines of spans, without those that are left to the cores."""

    filled: int
    """Bytes of the memory given that are in use: `LEAD` zeros, and the texts with zeros behind each, in any order."""
    rows: np.ndarray
    """int64[(spans, ROW_LENGTH)]."""
    undecided: list[np.ndarray]
    """Of each span the lines that are left to the cores, int64[(lines, 2)]: where each begins and ends in it. Of more
    than `MOST_UNDECIDED` no others."""
    ends: np.ndarray
    """int64[(2, 256)]: how many texts begin with each byte, and end with it; zeros where that was not asked for."""


class TooManyLinesError(Exception):
    """A span has more lines than were allowed; its argument is the span's place."""


class TextFinder:
    """Finds the texts of one field, on a stream of its own; used by one thread at a time."""

    def __init__(self, field: str) -> None:
        self.stream = cuda.stream()
        key, _ = json_lines.packed_keys([field])
        self._key_nbytes = len(key)
        self._key = cuda.to_device(np.append(key, np.uint8(0)))
        self._rooms = Rooms()

    def find(
        self,
        text: Any,
        spans: Sequence[tuple[int, int]],
        out: Any,
        most_lines: int,
        *,
        pairs: bool = False,
        cursor: Any = None,
    ) -> Texts:
        """The texts of lines that lie in device memory, once the stream has passed what was given to it before.

        text: uint8, with at least `SLACK` bytes behind the last span. spans: where each begins, at a multiple of
        `ALIGNMENT`, and how many bytes it has: whole lines, of which the last needs no newline. out: uint8, `LEAD`
        bytes larger than all spans; gets the texts. pairs: whether `Texts.ends` are wanted. cursor: int64[1] on the
        device, how many bytes behind its `LEAD` are in use, where others write to the same memory, also at the same
        time; then ``filled`` says nothing. Raises TooManyLinesError where a span has more than ``most_lines``.
        """
        stream, count = self.stream, len(spans)
        head = listed(count, 0)
        numbers = self._rooms.of("numbers", listed(count, count), np.int64)
        clear(numbers[:head], stream)
        ends = numbers[1:CURSOR_AND_ENDS]
        if cursor is None:
            clear(out[:LEAD], stream)
            cursor = numbers[:1]
        for place, (begin, nbytes) in enumerate(spans):
            if not nbytes:
                continue
            here = text[begin : begin + round_up(nbytes + SLACK, 4)]
            newlines = find_newlines(here, nbytes, self._rooms, stream, most_lines)
            if newlines is None:
                raise TooManyLinesError(place)
            row = CURSOR_AND_ENDS + ROW_LENGTH * place
            TEXTS.enqueue(
                (), _grid(newlines[1] + 1), THREADS, stream,
                here, as_words(here), newlines[0], newlines[1], nbytes, self._key, self._key_nbytes, out,
                cursor, numbers[row : row + ROW_LENGTH], numbers[listed(count, place) : listed(count, place + 1)],
                MOST_UNDECIDED, ends, int(pairs),
            )  # fmt: skip
        told = download(numbers[:head], stream)
        rows = told[CURSOR_AND_ENDS:].reshape(-1, ROW_LENGTH)
        undecided = [
            self._undecided(numbers, listed(count, place), min(int(lines), MOST_UNDECIDED))
            for place, lines in enumerate(rows[:, UNDECIDED])
        ]
        return Texts(LEAD + int(told[0]), rows, undecided, told[1:CURSOR_AND_ENDS].reshape(2, 256))

    def _undecided(self, numbers: Any, begin: int, count: int) -> np.ndarray:
        if not count:
            return np.empty((0, 2), np.int64)
        return download(numbers[begin : begin + 2 * count], self.stream).reshape(-1, 2)


def _grid(lines: int) -> int:
    """Blocks for so many lines."""
    if SIMULATOR:
        return min(lines, 2)
    return min(ceil_div(lines, WARPS), BLOCKS_PER_MULTIPROCESSOR * multiprocessors(current_device()))


def prepare() -> None:
    """Compile and load the kernels."""
    TEXTS.prepare()
    device_lines.prepare()


def variants() -> list[Variant]:
    """What tests compile to machine code."""
    return [TEXTS.variant("texts of JSON lines")]
