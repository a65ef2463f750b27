"""Device code that puts decoded blocks of Zstandard together: where each goes, what it copies of literals, and of what
is there already.

Method: RFC 8878, 3.1.1.4 and 3.1.1.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tilewright.kernels.decoding.zstd_tables import (
    BAD,
    BLOCKS,
    COUNT,
    ENCODED,
    FIRST,
    GOOD,
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


class Copies(NamedTuple):
    """The device code, compiled by one compiler; what each takes and does is said where it is written."""

    positions: Any
    spread: Any
    frame: Any


def copies(jit: Callable[[Any], Any], barrier: Any) -> Copies:
    """The device code. jit: compiles a function that others call. barrier: waits for all threads of the block."""
    i64, u64 = numba.int64, numba.uint64

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

    return Copies(positions, spread, frame)
