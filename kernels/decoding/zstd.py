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

from tilewright.kernels.decoding.fse import MOST_TREE_BITS, WEIGHT_LOG, codes
from tilewright.kernels.decoding.zstd_tables import (
    BAD,
    COUNT,
    GOOD,
    LENGTH_BITS,
    LENGTHS,
    LITERAL_NBYTES,
    LITERALS,
    NBYTES,
    SEQUENCES,
    SOURCE,
    TREE,
)

MOST_BLOCK_NBYTES = 2**17
TREE_ENTRIES = 2**MOST_TREE_BITS
SYMBOLS = 256
STREAMS = 4

LENGTH_LOG, OFFSET_LOG, MATCH_LOG = 9, 8, 9
"""The largest tables, as powers of two."""
WEIGHT_ENTRIES = 2**WEIGHT_LOG
LENGTH_ENTRIES, OFFSET_ENTRIES, MATCH_ENTRIES = 2**LENGTH_LOG, 2**OFFSET_LOG, 2**MATCH_LOG
SEQUENCE_ENTRIES = LENGTH_ENTRIES + OFFSET_ENTRIES + MATCH_ENTRIES
LENGTH_CODES, OFFSET_CODES, MATCH_CODES = 36, 32, 53
MOST_OFFSET_CODE = 27

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

WORK_WORDS = 64
"""Of 32 bits: what threads of a block tell each other."""


class Functions(NamedTuple):
    """The device code, compiled by one compiler."""

    literals: Any
    sequences: Any
    """What they take and do is said where they are written."""


def functions(jit: Callable[[Any], Any], barrier: Any) -> Functions:
    """The device code. jit: compiles a function that others call. barrier: waits for all threads of the block."""
    i64, u64 = numba.int64, numba.uint64
    below, stream_end, read_norm, build_table, read_weights, plan_tree = codes(jit)

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
        stored: Any,
        words: Any,
        begin: Any,
        nbytes: Any,
        tree: Any,
        bits: Any,
        out: Any,
        out_words: Any,
        at: Any,
        count: Any,
    ) -> Any:
        """Decode one stream of symbols; whether it ends where it should.

        Four symbols at a time, from 64 bits that are loaded once for them: so that the threads of a warp, each with a
        stream, load and store together."""
        place = stream_end(stored, begin, nbytes)
        low = 8 * begin
        if place < low:
            return False
        mask = (u64(1) << u64(bits)) - u64(1)
        stop = at + count
        while at < stop and at & 3 != 0:
            entry = i64(tree[below(words, place, low, bits)])
            out[at] = entry & 255
            at += 1
            place -= entry >> 8
        least = max(low + 4 * MOST_TREE_BITS, i64(64))
        while at + 4 <= stop and place >= least:
            base = ((place + 7) >> 3 << 3) - 64
            word, shift = base >> 5, base & 31
            held = (u64(words[word]) | (u64(words[word + 1]) << u64(32))) >> u64(shift)
            if shift > 0:
                held |= u64(words[word + 2]) << u64(64 - shift)
            left = place - base - bits
            entry = i64(tree[(held >> u64(left)) & mask])
            four, left = entry & 255, left - (entry >> 8)
            entry = i64(tree[(held >> u64(left)) & mask])
            four, left = four | ((entry & 255) << 8), left - (entry >> 8)
            entry = i64(tree[(held >> u64(left)) & mask])
            four, left = four | ((entry & 255) << 16), left - (entry >> 8)
            entry = i64(tree[(held >> u64(left)) & mask])
            four, left = four | ((entry & 255) << 24), left - (entry >> 8)
            out_words[at >> 2] = four
            place = left + base + bits
            at += 4
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
        out_words: Any,
        tree: Any,
        weights: Any,
        table: Any,
        norm: Any,
        work: Any,
        lane: Any,
        lanes: Any,
    ) -> None:
        """Decode a block's literals; ``work[0]`` tells whether they are good. out, out_words: the same memory,
        uint8 and uint32. tree: uint16[TREE_ENTRIES], weights:
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
            else:
                each = (held + 3) >> 2 if streams == 4 else held
                for stream in range(lane, streams, lanes):
                    place, size, count = first, nbytes, held
                    if streams == 4:
                        place, size, count = first + 6, nbytes - 6, each
                        for other in range(3):
                            its_size = i64(stored[first + 2 * other]) | (
                                i64(stored[first + 2 * other + 1]) << i64(8)
                            )
                            if other < stream:
                                place, size = place + its_size, size - its_size
                            elif other == stream:
                                size = its_size
                        if stream == 3:
                            count = held - 3 * each
                    if (
                        size < 1
                        or count < 0
                        or place + size > first + nbytes
                        or not decode_stream(
                            stored, words, place, size, tree, bits, out, out_words, to + stream * each, count
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
        if mode == 1:
            if at >= stop or i64(stored[at]) >= most:
                return i64(-1), at
            if build:
                table[first] = i64(stored[at])
            return i64(0), at + 1
        if mode == 0:
            log, behind = i64(5) if which == 1 else i64(6), at
            begin = LENGTH_NORM_AT if which == 0 else (OFFSET_NORM_AT if which == 1 else MATCH_NORM_AT)
            count = i64(29) if which == 1 else most
            if build:
                for symbol in range(count):
                    norm[symbol] = constant[begin + symbol]
        else:
            count, log, behind = read_norm(stored, at, stop, most_log, most, norm)
        if count < 0 or (build and not build_table(norm, count, log, table, first, following)):
            return i64(-1), at
        return log, behind

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
        held = i64(row[LITERAL_NBYTES])
        logs0, logs1, logs2 = i64(0), i64(0), i64(0)
        at, stop, modes, count = i64(0), i64(0), i64(0), i64(0)
        # Once for the block's own heads, then for each table, which another block may define, then for where its own
        # definitions end.
        for turn in range(5):
            which = turn - 1
            owner, first = i64(number), i64(0)
            if which == 1:
                first = i64(LENGTH_ENTRIES)
            elif which == 2:
                first = i64(LENGTH_ENTRIES + OFFSET_ENTRIES)
            if 0 <= which < 3 and (modes >> (6 - 2 * which)) & 3 == 3:
                owner = i64(row[LENGTHS + which])
                if owner < 0:
                    return i64(-1)
            one = blocks[owner]
            stop = i64(one[SOURCE] + one[NBYTES])
            kind, its_held, taken, _, begin = literals_head(stored, i64(one[SOURCE]), stop)
            if kind < 0 or begin + taken > stop:
                return i64(-1)
            its_count, its_modes, at = sequences_head(stored, begin + taken, stop)
            if turn == 0:
                count, modes = its_count, its_modes
                if its_held != held or count != row[COUNT] or modes & 3:
                    return i64(-1)
                if count == 0:
                    return held if at == stop else i64(-1)
            elif its_count < 1:
                return i64(-1)
            for other in range(min(turn, 3)):
                mode = (its_modes >> (6 - 2 * other)) & 3
                if mode == 3:
                    if other == which:
                        return i64(-1)
                    continue
                log, at = read_table(
                    stored,
                    i64(other),
                    mode,
                    at,
                    stop,
                    constant,
                    table,
                    first,
                    norm,
                    following,
                    other == which,
                )
                if log < 0:
                    return i64(-1)
                if other == which:
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
        logs = logs0 + logs1 + logs2
        states = below(words, place, low, logs)
        place -= logs
        length_state = states >> (logs1 + logs2)
        offset_state = (states >> logs2) & ((i64(1) << logs1) - 1)
        match_state = states & ((i64(1) << logs2) - 1)
        to, used, total = i64(row[SEQUENCES]), i64(0), held
        for sequence in range(count):
            length_entry, offset_entry, match_entry = (
                i64(table[length_state]),
                i64(table[LENGTH_ENTRIES + offset_state]),
                i64(table[LENGTH_ENTRIES + OFFSET_ENTRIES + match_state]),
            )
            offset_code, length_code, match_code = offset_entry & 255, length_entry & 255, match_entry & 255
            if offset_code > MOST_OFFSET_CODE or length_code >= LENGTH_CODES or match_code >= MATCH_CODES:
                return i64(-1)
            offset = (i64(1) << offset_code) + below(words, place, low, offset_code)
            place -= offset_code
            # Of both lengths at most 32 bits, and of the three next states at most 26.
            bits, more = (
                i64(constant[MATCH_BITS_AT + match_code]),
                i64(constant[LENGTH_BITS_AT + length_code]),
            )
            both = below(words, place, low, bits + more)
            place -= bits + more
            match = i64(constant[MATCH_BASE_AT + match_code]) + (both >> more)
            length = i64(constant[LENGTH_BASE_AT + length_code]) + (both & ((i64(1) << more) - 1))
            if sequence + 1 < count:
                bits0, bits1 = (length_entry >> 8) & 255, (match_entry >> 8) & 255
                bits2 = (offset_entry >> 8) & 255
                all_bits = bits0 + bits1 + bits2
                states = below(words, place, low, all_bits)
                place -= all_bits
                length_state = (length_entry >> 16) + (states >> (bits1 + bits2))
                match_state = (match_entry >> 16) + ((states >> bits2) & ((i64(1) << bits1) - 1))
                offset_state = (offset_entry >> 16) + (states & ((i64(1) << bits2) - 1))
            used, total = used + length, total + match
            if place < low or used > held or total > MOST_BLOCK_NBYTES:
                return i64(-1)
            out[to + sequence] = u64(length | (match << LENGTH_BITS) | (offset << (2 * LENGTH_BITS)))
        return total if place == low else i64(-1)

    return Functions(literals, sequences)
