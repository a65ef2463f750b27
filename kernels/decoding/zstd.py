"""The device code that decodes Zstandard's frames on a GPU: entropy first, of all blocks at once, then each frame's
copies, block after block.

Every block's literals and sequences are decoded by a block of threads of their own: literals are four streams, which
four threads go along, sequences are one. Blocks do not depend on each other there, but for tables that an earlier one
of the frame defines: whoever needs such a table reads its definition again. What is decoded lies in memory of its own
until all lengths are known. Then a block of threads goes through each frame and copies literals and matches to
their places. Floats hold hardly any matches, so that one large chunk keeps much of a GPU busy.

Nothing that is read from a frame is trusted: a length, an offset or a symbol that does not fit ends the block, or the
frame, with a status. So any bytes can be decoded, and none is read or written outside of what the tables name.

The same functions, compiled for the CPU with one thread to a block, are what tests compare with libzstd
(`zstd_host.py`). Method: RFC 8878, and the format's educational decoder; the division of labour after Weißenborn
et al., "Massively-Parallel Lossless Data Decompression" (2016), where copies wait for entropy decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np

from tilewright.kernels.decoding.zstd_tables import (
    BLOCKS,
    COUNT,
    ENCODED,
    FIRST,
    KIND,
    LENGTHS,
    LITERAL_NBYTES,
    LITERALS,
    NBYTES,
    RAW,
    ROOM,
    SEQUENCES,
    SOURCE,
    TARGET,
    TREE,
)

MOST_BLOCK_NBYTES = 2**17
MOST_TREE_BITS = 11
TREE_ENTRIES = 2**MOST_TREE_BITS
SYMBOLS = 256
STREAMS = 4

LENGTH_LOG, OFFSET_LOG, MATCH_LOG, WEIGHT_LOG = 9, 8, 9, 6
"""The largest tables, as powers of two."""
WEIGHT_ENTRIES = 2**WEIGHT_LOG
LENGTH_CODES, OFFSET_CODES, MATCH_CODES = 36, 32, 53
MOST_OFFSET_CODE = 27

GOOD, BAD = 0, 1

LENGTH_BITS = 18
"""Of a literals' or match's length in a word that holds a sequence; the offset is above both."""

_LENGTHS_BITS = [0] * 16 + [1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
_MATCHES_BITS = [0] * 32 + [1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
_LENGTHS_NORM = [
    4,
    3,
    2,
    2,
    2,
    2,
    2,
    2,
    2,
    2,
    2,
    2,
    2,
    1,
    1,
    1,
    2,
    2,
    2,
    2,
    2,
    2,
    2,
    2,
    2,
    3,
    2,
    1,
    1,
    1,
    1,
    1,
]
_LENGTHS_NORM += [-1, -1, -1, -1]
_MATCHES_NORM = [1, 4, 3, 2, 2, 2, 2, 2, 2] + [1] * 37 + [-1] * 7
_OFFSETS_NORM = [1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1]


def _bases(bits: list[int], first: int) -> list[int]:
    found, next_one = [], first
    for count in bits:
        found.append(next_one)
        next_one += 1 << count
    return found


def constants() -> np.ndarray:
    """int32: what the format fixes, in sections that begin at `AT`."""
    sections = (
        _bases(_LENGTHS_BITS, 0),
        _LENGTHS_BITS,
        _bases(_MATCHES_BITS, 3),
        _MATCHES_BITS,
        _LENGTHS_NORM,
        _OFFSETS_NORM,
        _MATCHES_NORM,
    )
    return np.array([number for section in sections for number in section], np.int32)


LENGTH_BASE_AT, LENGTH_BITS_AT = 0, 36
MATCH_BASE_AT, MATCH_BITS_AT = 72, 125
LENGTH_NORM_AT, OFFSET_NORM_AT, MATCH_NORM_AT = 178, 214, 243
CONSTANT_COUNT = 296

WORK_WORDS = 64
"""Of 32 bits: what threads of a block tell each other."""


class Functions(NamedTuple):
    """The device code, compiled by one compiler."""

    literals: Any
    sequences: Any
    positions: Any
    spread: Any
    frame: Any
    """What they take and do is said where they are written."""


def functions(jit: Callable[[Any], Any], barrier: Any) -> Functions:
    """The device code. jit: compiles a function that others call. barrier: waits for all threads of the block."""
    i64, u64 = numba.int64, numba.uint64

    @jit
    def high_bit(value: Any) -> Any:
        """The number of the highest bit that is set, of a positive number."""
        found = i64(0)
        while value > 1:
            value >>= 1
            found += 1
        return found

    @jit
    def forward(stored: Any, at: Any, stop: Any, count: Any) -> Any:
        """``count`` bits, at most 16, from a bit's place in bytes on, upwards; zeros behind ``stop``, in bytes."""
        found = i64(0)
        first = at >> 3
        for place in range(3):
            if first + place < stop:
                found |= i64(stored[first + place]) << i64(8 * place)
        return (found >> (at & 7)) & ((i64(1) << count) - 1)

    @jit
    def held_bits(words: Any, at: Any) -> Any:
        """The 64 bits of memory from which reading downwards goes on at a bit's place, and the first one's place."""
        base = ((at + 31) >> 5 << 5) - 64
        if base < 0:
            base = i64(0)
        word = base >> 5
        return u64(words[word]) | (u64(words[word + 1]) << u64(32)), base

    @jit
    def below(words: Any, at: Any, low: Any, count: Any) -> Any:
        """The ``count`` bits, at most 32, below a place, with zeros below ``low``."""
        if count == 0 or at <= low:
            return i64(0)
        held, base = held_bits(words, at)
        short = i64(0)
        begin = at - count
        if begin < low:
            short, begin = low - begin, low
        value = i64((held >> u64(begin - base)) & ((u64(1) << u64(at - begin)) - u64(1)))
        return value << short

    @jit
    def stream_end(stored: Any, begin: Any, nbytes: Any) -> Any:
        """Where reading a stream downwards begins: below the highest bit set in its last byte; -1 if there is none."""
        if nbytes < 1:
            return i64(-1)
        last = i64(stored[begin + nbytes - 1])
        if last == 0:
            return i64(-1)
        return 8 * (begin + nbytes - 1) + high_bit(last)

    @jit
    def read_norm(stored: Any, at: Any, stop: Any, most_log: Any, most: Any, norm: Any) -> Any:
        """A table's distribution: the number of symbols, the table's log, and where the bytes behind it begin; the
        first is -1 where it is none."""
        place = 8 * at
        log = forward(stored, place, stop, i64(4)) + 5
        place += 4
        if log > most_log:
            return i64(-1), log, at
        left = i64(1) << log
        count = i64(0)
        while left > 0:
            if count >= most or place > 8 * stop:
                return i64(-1), log, at
            bits = high_bit(left + 1) + 1
            value = forward(stored, place, stop, bits)
            place += bits
            mask = (i64(1) << (bits - 1)) - 1
            threshold = (i64(1) << bits) - 1 - (left + 1)
            if value & mask < threshold:
                place -= 1
                value &= mask
            elif value > mask:
                value -= threshold
            share = value - 1
            left -= 1 if share < 0 else share
            norm[count] = share
            count += 1
            if share == 0:
                again = i64(3)
                while again == 3:
                    again = forward(stored, place, stop, i64(2))
                    place += 2
                    for _ in range(again):
                        if count >= most:
                            return i64(-1), log, at
                        norm[count] = 0
                        count += 1
                    if place > 8 * stop:
                        return i64(-1), log, at
        behind = (place + 7) >> 3
        if left != 0 or behind > stop:
            return i64(-1), log, at
        return count, log, behind

    @jit
    def build_table(norm: Any, count: Any, log: Any, table: Any, first: Any, following: Any) -> Any:
        """Fill a table from a distribution: for each state its symbol, the bits to read, and what to add to them.
        following: scratch, of each symbol. Whether the distribution fills the table."""
        size = i64(1) << log
        high = size
        for symbol in range(count):
            following[symbol] = norm[symbol]
            if norm[symbol] == -1:
                high -= 1
                if high < 0:
                    return False
                table[first + high] = symbol
                following[symbol] = 1
        step, place = (size >> 1) + (size >> 3) + 3, i64(0)
        for symbol in range(count):
            for _ in range(norm[symbol]):
                table[first + place] = symbol
                place = (place + step) & (size - 1)
                while place >= high and high > 0:
                    place = (place + step) & (size - 1)
        if place != 0:
            return False
        for state in range(size):
            symbol = i64(table[first + state]) & 255
            number = i64(following[symbol])
            following[symbol] += 1
            if number < 1:
                return False
            bits = log - high_bit(number)
            table[first + state] = symbol | (bits << 8) | (((number << bits) - size) << 16)
        return True

    @jit
    def read_weights(
        stored: Any, words: Any, at: Any, stop: Any, weights: Any, norm: Any, table: Any, following: Any
    ) -> Any:
        """The weights that a tree is made of: how many there are, or -1, and where the bytes behind them begin."""
        if at >= stop:
            return i64(-1), at
        head = i64(stored[at])
        at += 1
        if head >= 128:
            count = head - 127
            nbytes = (count + 1) >> 1
            if at + nbytes > stop:
                return i64(-1), at
            for place in range(count):
                both = i64(stored[at + (place >> 1)])
                weights[place] = both & 15 if place & 1 else both >> 4
            return count, at + nbytes
        behind = at + head
        if head < 2 or behind > stop:
            return i64(-1), at
        symbols, log, begin = read_norm(stored, at, behind, i64(WEIGHT_LOG), i64(MOST_TREE_BITS + 2), norm)
        if symbols < 0 or not build_table(norm, symbols, log, table, i64(0), following):
            return i64(-1), at
        place = stream_end(stored, begin, behind - begin)
        low = 8 * begin
        if place < low + 2 * log:
            return i64(-1), at
        one = below(words, place, low, log)
        place -= log
        other = below(words, place, low, log)
        place -= log
        count = i64(0)
        while count < 254:
            entry = i64(table[one])
            weights[count] = entry & 255
            count += 1
            bits = (entry >> 8) & 255
            one = (entry >> 16) + below(words, place, low, bits)
            place -= bits
            if place < low:
                weights[count] = i64(table[other]) & 255
                return count + 1, behind
            one, other = other, one
        return i64(-1), at

    @jit
    def plan_tree(weights: Any, count: Any, starts: Any, ranks: Any) -> Any:
        """The bits of a tree's longest code, and where each symbol's entries begin in its table; -1 for weights that
        make no tree. The last symbol's weight, which is not stored, is added."""
        total = i64(0)
        for symbol in range(count):
            weight = i64(weights[symbol])
            if weight > MOST_TREE_BITS:
                return i64(-1)
            if weight > 0:
                total += i64(1) << (weight - 1)
        if total == 0:
            return i64(-1)
        bits = high_bit(total) + 1
        left = (i64(1) << bits) - total
        last = high_bit(left)
        if bits > MOST_TREE_BITS or left != i64(1) << last:
            return i64(-1)
        weights[count] = last + 1
        for weight in range(MOST_TREE_BITS + 2):
            ranks[weight] = 0
        for symbol in range(count + 1):
            weight = i64(weights[symbol])
            if weight > 0:
                ranks[weight] += 1 << (weight - 1)
        begin = i64(0)  # from the longest codes on, which have the least weight
        for weight in range(1, MOST_TREE_BITS + 2):
            here = i64(ranks[weight])
            ranks[weight] = begin
            begin += here
        if begin != i64(1) << bits:
            return i64(-1)
        for symbol in range(count + 1):
            weight = i64(weights[symbol])
            if weight > 0:
                starts[symbol] = ranks[weight]
                ranks[weight] += 1 << (weight - 1)
        return bits

    @jit
    def literals_head(stored: Any, at: Any, stop: Any) -> Any:
        """Kind, decoded and stored bytes of a block's literals, how many streams they are, and where they begin; the
        kind is -1 where the block is too short."""
        if at >= stop:
            return i64(-1), i64(0), i64(0), i64(0), at
        first = i64(stored[at])
        kind, form = first & 3, (first >> 2) & 3
        if kind < 2:
            head = i64(1)
            if form & 1:
                head = i64(2) if form == 1 else i64(3)
        else:
            head = i64(3) if form < 2 else form + 2
        if at + head > stop:
            return i64(-1), i64(0), i64(0), i64(0), at
        number = i64(0)
        for place in range(head):
            number |= i64(stored[at + place]) << i64(8 * place)
        if kind < 2:
            held = number >> (i64(3) if head == 1 else i64(4))
            return kind, held, held if kind == 0 else i64(1), i64(1), at + head
        bits = i64(10) if form < 2 else (i64(14) if form == 2 else i64(18))
        sizes = number >> 4
        held, taken = sizes & ((i64(1) << bits) - 1), sizes >> bits
        return kind, held, taken, i64(1) if form == 0 else i64(4), at + head

    @jit
    def decode_stream(
        stored: Any, words: Any, begin: Any, nbytes: Any, tree: Any, bits: Any, out: Any, at: Any, count: Any
    ) -> Any:
        """Decode one stream of symbols; whether it ends where it should."""
        place = stream_end(stored, begin, nbytes)
        low = 8 * begin
        if place < low:
            return False
        held, base = held_bits(words, place)
        mask = (u64(1) << u64(bits)) - u64(1)
        stop = at + count
        while at < stop and place - bits >= low:
            if place - bits < base:
                held, base = held_bits(words, place)
            entry = i64(tree[(held >> u64(place - bits - base)) & mask])
            out[at] = entry & 255
            at += 1
            place -= entry >> 8
        while at < stop:
            entry = i64(tree[below(words, place, low, bits)])
            out[at] = entry & 255
            at += 1
            place -= entry >> 8
            if place < low:
                return False
        return place == low

    @jit
    def literals(
        stored: Any,
        words: Any,
        blocks: Any,
        number: Any,
        out: Any,
        tree: Any,
        weights: Any,
        table: Any,
        norm: Any,
        work: Any,
        lane: Any,
        lanes: Any,
    ) -> None:
        """Decode a block's literals; ``work[0]`` tells whether they are good. tree: uint16[TREE_ENTRIES], weights:
        uint8[SYMBOLS], table, norm: int32, work: int32[WORK_WORDS]: all shared by the threads of the block."""
        row = blocks[number]
        at, stop = i64(row[SOURCE]), i64(row[SOURCE] + row[NBYTES])
        kind, held, taken, streams, begin = literals_head(stored, at, stop)
        to = i64(row[LITERALS])
        good = (
            kind >= 0 and held == row[LITERAL_NBYTES] and held <= MOST_BLOCK_NBYTES and begin + taken <= stop
        )
        if lane == 0:
            work[0] = GOOD if good else BAD
        if good and kind == 0:
            for place in range(lane, held, lanes):
                out[to + place] = stored[begin + place]
        elif good and kind == 1:
            for place in range(lane, held, lanes):
                out[to + place] = stored[begin]
        elif good:
            if lane == 0:
                # work: 1, bits of the longest code; 2, symbols; 3, bytes of the tree's definition, if it is here;
                # from 4 on, where each weight's entries begin; norm has where each symbol's do.
                work[1] = 0
                owner = i64(row[TREE]) if kind == 3 else i64(number)
                if owner >= 0:
                    here, behind = begin, begin + taken
                    if kind == 3:
                        one = blocks[owner]
                        its_stop = i64(one[SOURCE] + one[NBYTES])
                        its_kind, _, its_taken, _, here = literals_head(stored, i64(one[SOURCE]), its_stop)
                        behind = here + its_taken
                        if its_kind != 2 or behind > its_stop:
                            owner = i64(-1)
                    if owner >= 0:
                        count, after = read_weights(
                            stored, words, here, behind, weights, norm, table, work[4 : 4 + 32]
                        )
                        if count > 0:
                            bits = plan_tree(weights, count, norm, work[4 : 4 + 32])
                            if bits > 0:
                                work[1], work[2] = bits, count + 1
                                work[3] = after - here if kind == 2 else 0
            barrier()  # the tree is planned before its table is filled
            bits = i64(work[1])
            if bits > 0:
                for symbol in range(lane, i64(work[2]), lanes):
                    weight = i64(weights[symbol])
                    if weight > 0:
                        entry = symbol | ((bits + 1 - weight) << 8)
                        for place in range(norm[symbol], norm[symbol] + (1 << (weight - 1))):
                            tree[place] = entry
            barrier()  # and filled before streams are read with it
            first = begin + work[3]
            nbytes = begin + taken - first
            if bits <= 0 or nbytes < 1 or (streams == 4 and nbytes < 10):
                if lane == 0:
                    work[0] = BAD
            elif streams == 1:
                if lane == 0 and not decode_stream(stored, words, first, nbytes, tree, bits, out, to, held):
                    work[0] = BAD
            else:
                each = (held + 3) >> 2
                for stream in range(lane, STREAMS, lanes):
                    place, size = first + 6, i64(0)
                    total = i64(0)
                    for other in range(3):
                        size = i64(stored[first + 2 * other]) | (i64(stored[first + 2 * other + 1]) << i64(8))
                        total += size
                        if other < stream:
                            place += size
                    if stream < 3:
                        size = i64(stored[first + 2 * stream]) | (
                            i64(stored[first + 2 * stream + 1]) << i64(8)
                        )
                    else:
                        size = nbytes - 6 - total
                    count = each if stream < 3 else held - 3 * each
                    if (
                        size < 1
                        or count < 0
                        or place + size > first + nbytes
                        or not decode_stream(
                            stored, words, place, size, tree, bits, out, to + stream * each, count
                        )
                    ):
                        work[0] = BAD
        barrier()  # all streams are done before anyone asks

    @jit
    def sequences_head(stored: Any, at: Any, stop: Any) -> Any:
        """How many sequences there are, the modes of their tables, and where those are defined; -1 where the block is
        too short."""
        if at >= stop:
            return i64(-1), i64(0), at
        first = i64(stored[at])
        if first == 0:
            return i64(0), i64(0), at + 1
        head = i64(1) if first < 128 else (i64(2) if first < 255 else i64(3))
        if at + head + 1 > stop:
            return i64(-1), i64(0), at
        count = first
        if head == 2:
            count = ((first - 128) << 8) + i64(stored[at + 1])
        elif head == 3:
            count = i64(stored[at + 1]) + (i64(stored[at + 2]) << i64(8)) + 0x7F00
        return count, i64(stored[at + head]), at + head + 1

    @jit
    def read_table(
        stored: Any,
        which: Any,
        mode: Any,
        at: Any,
        stop: Any,
        constant: Any,
        table: Any,
        first: Any,
        norm: Any,
        following: Any,
        build: Any,
    ) -> Any:
        """One table of sequences: its log, or -1, and where the bytes behind its definition begin. build: whether it
        is wanted, not only passed over. which: 0 for literals' lengths, 1 offsets, 2 matches' lengths."""
        most_log = i64(OFFSET_LOG) if which == 1 else i64(LENGTH_LOG)
        most = i64(LENGTH_CODES) if which == 0 else (i64(OFFSET_CODES) if which == 1 else i64(MATCH_CODES))
        if mode == 0:
            log = i64(5) if which == 1 else i64(6)
            begin = LENGTH_NORM_AT if which == 0 else (OFFSET_NORM_AT if which == 1 else MATCH_NORM_AT)
            count = i64(LENGTH_CODES) if which == 0 else (i64(29) if which == 1 else i64(MATCH_CODES))
            if build:
                for symbol in range(count):
                    norm[symbol] = constant[begin + symbol]
                if not build_table(norm, count, log, table, first, following):
                    return i64(-1), at
            return log, at
        if mode == 1:
            if at >= stop or i64(stored[at]) >= most:
                return i64(-1), at
            if build:
                table[first] = i64(stored[at])
            return i64(0), at + 1
        count, log, behind = read_norm(stored, at, stop, most_log, most, norm)
        if count < 0:
            return i64(-1), at
        if build and not build_table(norm, count, log, table, first, following):
            return i64(-1), at
        return log, behind

    @jit
    def find_table(
        stored: Any,
        blocks: Any,
        owner: Any,
        which: Any,
        constant: Any,
        table: Any,
        first: Any,
        norm: Any,
        following: Any,
    ) -> Any:
        """The table that another block defines: its log, or -1."""
        if owner < 0:
            return i64(-1)
        row = blocks[owner]
        stop = i64(row[SOURCE] + row[NBYTES])
        kind, _, taken, _, begin = literals_head(stored, i64(row[SOURCE]), stop)
        if kind < 0 or begin + taken > stop:
            return i64(-1)
        count, modes, at = sequences_head(stored, begin + taken, stop)
        if count < 1:
            return i64(-1)
        for other in range(which + 1):
            mode = (modes >> (6 - 2 * other)) & 3
            if mode == 3:
                if other == which:
                    return i64(-1)
                continue
            log, at = read_table(
                stored, i64(other), mode, at, stop, constant, table, first, norm, following, other == which
            )
            if log < 0:
                return i64(-1)
        return log

    @jit
    def sequences(
        stored: Any,
        words: Any,
        blocks: Any,
        number: Any,
        out: Any,
        constant: Any,
        table: Any,
        norm: Any,
        following: Any,
    ) -> Any:
        """Decode a block's sequences, by one thread; returns how many bytes it holds with them, or -1. out: uint64:
        a word for each. table: int32, of `SEQUENCE_ENTRIES`; norm, following: int32, of `MATCH_CODES`."""
        row = blocks[number]
        stop = i64(row[SOURCE] + row[NBYTES])
        kind, held, taken, _, begin = literals_head(stored, i64(row[SOURCE]), stop)
        if kind < 0 or begin + taken > stop or held != row[LITERAL_NBYTES]:
            return i64(-1)
        count, modes, at = sequences_head(stored, begin + taken, stop)
        if count != row[COUNT] or modes & 3:
            return i64(-1)
        if count == 0:
            return held if at == stop else i64(-1)
        logs0, logs1, logs2 = i64(0), i64(0), i64(0)
        for which in range(3):
            mode = (modes >> (6 - 2 * which)) & 3
            first = i64(0) if which == 0 else (i64(512) if which == 1 else i64(768))
            if mode == 3:
                log = find_table(
                    stored,
                    blocks,
                    i64(row[LENGTHS + which]),
                    i64(which),
                    constant,
                    table,
                    first,
                    norm,
                    following,
                )
            else:
                log, at = read_table(
                    stored, i64(which), mode, at, stop, constant, table, first, norm, following, True
                )
            if log < 0:
                return i64(-1)
            if which == 0:
                logs0 = log
            elif which == 1:
                logs1 = log
            else:
                logs2 = log
        place = stream_end(stored, at, stop - at)
        low = 8 * at
        if place < low + logs0 + logs1 + logs2:
            return i64(-1)
        place -= logs0
        length_state = below(words, place + logs0, low, logs0)
        place -= logs1
        offset_state = below(words, place + logs1, low, logs1)
        place -= logs2
        match_state = below(words, place + logs2, low, logs2)
        to, used, total = i64(row[SEQUENCES]), i64(0), held
        for sequence in range(count):
            length_entry, offset_entry, match_entry = (
                i64(table[length_state]),
                i64(table[512 + offset_state]),
                i64(table[768 + match_state]),
            )
            offset_code, length_code, match_code = offset_entry & 255, length_entry & 255, match_entry & 255
            if offset_code > MOST_OFFSET_CODE or length_code >= LENGTH_CODES or match_code >= MATCH_CODES:
                return i64(-1)
            offset = (i64(1) << offset_code) + below(words, place, low, offset_code)
            place -= offset_code
            bits = i64(constant[MATCH_BITS_AT + match_code])
            match = i64(constant[MATCH_BASE_AT + match_code]) + below(words, place, low, bits)
            place -= bits
            bits = i64(constant[LENGTH_BITS_AT + length_code])
            length = i64(constant[LENGTH_BASE_AT + length_code]) + below(words, place, low, bits)
            place -= bits
            if sequence + 1 < count:
                bits = (length_entry >> 8) & 255
                length_state = (length_entry >> 16) + below(words, place, low, bits)
                place -= bits
                bits = (match_entry >> 8) & 255
                match_state = (match_entry >> 16) + below(words, place, low, bits)
                place -= bits
                bits = (offset_entry >> 8) & 255
                offset_state = (offset_entry >> 16) + below(words, place, low, bits)
                place -= bits
            used, total = used + length, total + match
            if place < low or used > held or total > MOST_BLOCK_NBYTES:
                return i64(-1)
            out[to + sequence] = u64(length | (match << LENGTH_BITS) | (offset << (2 * LENGTH_BITS)))
        return total if place == low else i64(-1)

    @jit
    def positions(blocks: Any, frames: Any, number: Any, lengths: Any, targets: Any) -> Any:
        """Where each block of a frame goes, by one thread; whether all of them are good, and as long as the frame says.
        lengths: int64: what each block holds, or -1. targets: int64, written: -1 for those of a bad frame."""
        row = frames[number]
        at, stop = i64(row[TARGET]), i64(row[TARGET] + row[ROOM])
        first, behind = i64(row[FIRST]), i64(row[FIRST] + row[BLOCKS])
        good = True
        for block in range(first, behind):
            nbytes = i64(lengths[block])
            targets[block] = at
            if nbytes < 0 or at + nbytes > stop:
                good = False
                break
            at += nbytes
        if not good or at != stop:
            for block in range(first, behind):
                targets[block] = -1
            return False
        return True

    @jit
    def spread(
        stored: Any,
        blocks: Any,
        number: Any,
        literal: Any,
        lengths: Any,
        targets: Any,
        out: Any,
        lane: Any,
        lanes: Any,
    ) -> None:
        """Put a block without sequences in its place, by all threads of a block."""
        row = blocks[number]
        to, nbytes, kind = i64(targets[number]), i64(lengths[number]), i64(row[KIND])
        if to < 0 or (kind == ENCODED and row[COUNT] > 0):
            return
        source = i64(row[LITERALS] if kind == ENCODED else row[SOURCE])
        if kind == ENCODED:
            for place in range(lane, nbytes, lanes):
                out[to + place] = literal[source + place]
        elif kind == RAW:
            for place in range(lane, nbytes, lanes):
                out[to + place] = stored[source + place]
        else:
            for place in range(lane, nbytes, lanes):
                out[to + place] = stored[source]

    @jit
    def distances(sequence: Any, first: Any, several: Any, at: Any, begin: Any, work: Any) -> Any:
        """The distances and places of a group of sequences, by one thread; whether all are behind the frame's begin.
        work: int64: three last distances, and from 4 on, four words a sequence, written: literals, match, distance,
        place."""
        good = True
        place = at
        for other in range(several):
            word = u64(sequence[first + other])
            length = i64(word & u64(2**LENGTH_BITS - 1))
            match = i64((word >> u64(LENGTH_BITS)) & u64(2**LENGTH_BITS - 1))
            value = i64(word >> u64(2 * LENGTH_BITS))
            if value > 3:
                distance = value - 3
                work[2] = work[1]
                work[1] = work[0]
                work[0] = distance
            else:
                which = value if length == 0 else value - 1
                distance = i64(work[0])
                if which == 1:
                    distance = i64(work[1])
                    work[1] = work[0]
                    work[0] = distance
                elif which > 1:
                    distance = i64(work[2]) if which == 2 else i64(work[0]) - 1
                    work[2] = work[1]
                    work[1] = work[0]
                    work[0] = distance
            if distance < 1 or distance > place + length - begin:
                good = False
            slot = 4 + 4 * other
            work[slot], work[slot + 1], work[slot + 2], work[slot + 3] = length, match, distance, place
            place += length + match
        return good

    @jit
    def frame(
        blocks: Any,
        frames: Any,
        number: Any,
        literal: Any,
        sequence: Any,
        targets: Any,
        out: Any,
        work: Any,
        lane: Any,
        lanes: Any,
    ) -> Any:
        """Put those blocks of a frame in their places that have sequences, once all others are there; whether that was
        possible. By all threads of a warp, which agree in every branch that has a barrier. work: int64[4 + 4 * lanes],
        shared."""
        row = frames[number]
        begin = i64(row[TARGET])
        if lane == 0:
            work[0], work[1], work[2] = 1, 4, 8
        for block in range(i64(row[FIRST]), i64(row[FIRST] + row[BLOCKS])):
            one = blocks[block]
            at, count = i64(targets[block]), i64(one[COUNT])
            if at < 0:
                return False
            if one[KIND] != ENCODED or count == 0:
                continue
            source, first = i64(one[LITERALS]), i64(one[SEQUENCES])
            stop_literals = source + i64(one[LITERAL_NBYTES])
            group = i64(0)
            while group < count:
                several = min(i64(lanes), count - group)
                barrier()  # nobody needs the last group's words any more
                if lane == 0:
                    work[3] = GOOD if distances(sequence, first + group, several, at, begin, work) else BAD
                barrier()  # the group's words are in
                if work[3] != GOOD:
                    return False
                mine = source
                for other in range(lane):
                    if other < several:
                        mine += i64(work[4 + 4 * other])
                if lane < several:
                    length, place = i64(work[4 + 4 * lane]), i64(work[7 + 4 * lane])
                    for byte in range(length):
                        out[place + byte] = literal[mine + byte]
                for other in range(several):
                    barrier()  # all literals, and the matches before, are in
                    length, match = i64(work[4 + 4 * other]), i64(work[5 + 4 * other])
                    distance, place = i64(work[6 + 4 * other]), i64(work[7 + 4 * other]) + length
                    for byte in range(lane, match, lanes):
                        out[place + byte] = out[place - distance + byte % distance]
                    source += length
                last = 4 * (several - 1)
                at = i64(work[7 + last]) + i64(work[4 + last]) + i64(work[5 + last])
                group += several
            for place in range(lane, stop_literals - source, lanes):
                out[at + place] = literal[source + place]
            barrier()  # the block is in before the next one refers to it
        return True

    return Functions(literals, sequences, positions, spread, frame)


SEQUENCE_ENTRIES = 512 + 256 + 512
"""Of the tables of literals' lengths, offsets and matches' lengths."""
