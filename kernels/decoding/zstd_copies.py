"""Device code that puts decoded blocks of Zstandard together: where each goes, what it copies of literals, and of what
is there already.

Method: RFC 8878, 3.1.1.4 and 3.1.1.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tilewright.kernels.decoding.lz4 import copier
from tilewright.kernels.decoding.zstd_tables import (
    BLOCKS,
    COUNT,
    ENCODED,
    FIRST,
    KIND,
    LENGTH_BITS,
    LITERAL_NBYTES,
    LITERALS,
    RAW,
    ROOM,
    SEQUENCES,
    SOURCE,
    TARGET,
)
from tilewright.kernels.deferred import numba

HEAD_WORDS, SEQUENCE_WORDS = 4, 5
"""Of the words that a warp shares: the last three distances and the group's end; then of each sequence its literals,
match, distance, and where it begins in the frame and in the literals."""
HELD_NBYTES = 2048
SHORT = 32
"""Literals up to so many are copied by one thread, those of all sequences of a group at once."""


class Copies(NamedTuple):
    """The device code, compiled by one compiler; what each takes and does is said where it is written."""

    positions: Any
    spread: Any
    frame: Any


def copies(jit: Callable[[Any], Any], barrier: Any) -> Copies:
    """The device code. jit: compiles a function that others call. barrier: waits for all threads of the block."""
    i64, u64 = numba.int64, numba.uint64
    copy_bytes = copier(jit)

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
            copy_bytes(literal, source, out, to, nbytes, lane, lanes)
        elif kind == RAW:
            copy_bytes(stored, source, out, to, nbytes, lane, lanes)
        else:
            for place in range(lane, nbytes, lanes):
                out[to + place] = stored[source]

    @jit
    def distances(several: Any, at: Any, source: Any, begin: Any, work: Any) -> Any:
        """Resolve a group of sequences, by one thread: distances for offsets, and where each begins in the frame and in
        the literals. Returns where the group ends, or -1 if a distance reaches before the frame's begin."""
        place = at
        near, next_near, far = i64(work[0]), i64(work[1]), i64(work[2])
        for other in range(several):
            slot = HEAD_WORDS + SEQUENCE_WORDS * other
            length, match, value = i64(work[slot]), i64(work[slot + 1]), i64(work[slot + 2])
            distance = value - 3
            if value <= 3:
                which = value if length == 0 else value - 1
                distance = near
                if which == 1:
                    distance = next_near
                elif which == 2:
                    distance = far
                elif which == 3:
                    distance = near - 1
                if which > 0:
                    if which > 1:
                        far = next_near
                    next_near = near
            else:
                far, next_near = next_near, near
            near = distance
            if distance < 1 or distance > place + length - begin:
                return i64(-1)
            work[slot + 2], work[slot + 3], work[slot + 4] = distance, place, source
            place += length + match
            source += length
        work[0], work[1], work[2] = near, next_near, far
        return place

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
        held: Any,
        lane: Any,
        lanes: Any,
    ) -> Any:
        """Put those blocks of a frame in their places that have sequences, once all others are there; whether that was
        possible. By all threads of a warp, which agree in every branch that has a barrier. work:
        int64[HEAD_WORDS + SEQUENCE_WORDS * lanes], held: uint8[HELD_NBYTES], shared: a group's bytes, where they are so
        few, until all are there: matches refer to what was written just before."""
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
                if lane < several:
                    word = u64(sequence[first + group + lane])
                    slot = HEAD_WORDS + SEQUENCE_WORDS * lane
                    work[slot] = i64(word & u64(2**LENGTH_BITS - 1))
                    work[slot + 1] = i64((word >> u64(LENGTH_BITS)) & u64(2**LENGTH_BITS - 1))
                    work[slot + 2] = i64(word >> u64(2 * LENGTH_BITS))
                barrier()  # the group's words are in
                if lane == 0:
                    work[3] = distances(several, at, source, begin, work)
                barrier()  # and resolved
                end = i64(work[3])
                if end < 0:
                    return False
                few = end - at <= HELD_NBYTES
                if lane < several:
                    slot = HEAD_WORDS + SEQUENCE_WORDS * lane
                    length, place, mine = i64(work[slot]), i64(work[slot + 3]), i64(work[slot + 4])
                    if length <= SHORT:
                        for byte in range(length):
                            if few:
                                held[place - at + byte] = literal[mine + byte]
                            else:
                                out[place + byte] = literal[mine + byte]
                for other in range(several):
                    slot = HEAD_WORDS + SEQUENCE_WORDS * other
                    length, match, distance = i64(work[slot]), i64(work[slot + 1]), i64(work[slot + 2])
                    place, mine = i64(work[slot + 3]), i64(work[slot + 4])
                    if length > SHORT:
                        for byte in range(lane, length, lanes):
                            if few:
                                held[place - at + byte] = literal[mine + byte]
                            else:
                                out[place + byte] = literal[mine + byte]
                    barrier()  # all literals so far, and the matches before, are in
                    place += length
                    for byte in range(lane, match, lanes):
                        from_ = place - distance + (byte if byte < distance else byte % distance)
                        if few:
                            held[place - at + byte] = held[from_ - at] if from_ >= at else out[from_]
                        else:
                            out[place + byte] = out[from_]
                    source += length
                barrier()  # the whole group is in
                if few:
                    for byte in range(lane, end - at, lanes):
                        out[at + byte] = held[byte]
                at = end
                group += several
            copy_bytes(literal, source, out, at, stop_literals - source, lane, lanes)
            barrier()  # the block is in before the next one refers to it
        return True

    return Copies(positions, spread, frame)
