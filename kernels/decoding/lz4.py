"""The device code that decodes blocks of LZ4 on a GPU, a warp each.

All threads read the same tokens, and copy what those say together. Nothing that is read from a block is trusted: what
does not fit ends it with a status. Method: LZ4's block format description.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewright.kernels.deferred import numba

SOURCE, NBYTES, TARGET, ROOM = range(4)
"""Columns of the table: where a block lies in the stored bytes, its length, where it is decoded to, and the bytes that
it has to fill."""
WORDS = 4
LEAST_MATCH = 4
LONG = 15
"""In a token: more bytes of the length follow."""


WINDOW_NBYTES = 512
"""Stored bytes that a warp has in shared memory: tokens are read one after the other."""
RING_NBYTES = 4096
"""Decoded bytes that it has there, the last ones: matches mostly refer to those."""


def functions(jit: Callable[[Any], Any], barrier: Any) -> Any:
    """The device code: (stored, table, number, out, window, ring, lane, lanes) -> whether the block fills what it has
    to. window: uint8[WINDOW_NBYTES], ring: uint8[RING_NBYTES], shared by the threads of the block. jit: compiles it.
    barrier: waits for all threads of the block, which agree in every branch that has one."""
    i64 = numba.int64
    copy_bytes = copier(jit)

    @jit
    def peek(stored: Any, window: Any, base: Any, at: Any, stop: Any, lane: Any, lanes: Any) -> Any:
        """A stored byte, and where the window begins that holds it. at: before ``stop``, not before the window."""
        if at >= base + WINDOW_NBYTES:
            barrier()  # nobody reads the last window any more
            base = at
            for place in range(lane, min(i64(WINDOW_NBYTES), stop - base), lanes):
                window[place] = stored[base + place]
            barrier()  # the window is in
        return i64(window[at - base]), base

    @jit
    def block(
        stored: Any, table: Any, number: Any, out: Any, window: Any, ring: Any, lane: Any, lanes: Any
    ) -> Any:
        row = table[number]
        at, to, begin = i64(row[SOURCE]), i64(row[TARGET]), i64(row[TARGET])
        stop, end = at + i64(row[NBYTES]), to + i64(row[ROOM])
        base = at - WINDOW_NBYTES
        while at < stop:
            token, base = peek(stored, window, base, at, stop, lane, lanes)
            at += 1
            length, match, distance = token >> 4, token & 15, i64(0)
            # First what there is of literals, then what there is of a match: both lengths may go on.
            for turn in range(2):
                found = length if turn == 0 else match
                if turn == 1:
                    if at + 2 > stop:
                        return False
                    low, base = peek(stored, window, base, at, stop, lane, lanes)
                    high, base = peek(stored, window, base, at + 1, stop, lane, lanes)
                    distance = low | (high << 8)
                    at += 2
                if found == LONG:
                    more = i64(255)
                    while more == 255:
                        if at >= stop:
                            return False
                        more, base = peek(stored, window, base, at, stop, lane, lanes)
                        at += 1
                        found += more
                if turn == 1:
                    match = found + LEAST_MATCH
                    continue
                length = found
                if length > stop - at or length > end - to:
                    return False
                copy_bytes(stored, at, out, to, length, lane, lanes)
                first = max(i64(0), length - RING_NBYTES)
                near = at + length <= base + WINDOW_NBYTES
                for place in range(first + lane, length, lanes):
                    value = window[at + place - base] if near else stored[at + place]
                    ring[(to + place) & (RING_NBYTES - 1)] = value
                at, to = at + length, to + length
                if at == stop:
                    return to == end  # the last sequence has no match
            if distance < 1 or distance > to - begin or match > end - to:
                return False
            barrier()  # what was decoded so far is there for all threads
            near = distance + match <= RING_NBYTES
            for place in range(lane, match, lanes):
                from_ = to - distance + (place if place < distance else place % distance)
                value = ring[from_ & (RING_NBYTES - 1)] if near else out[from_]
                out[to + place] = value
                if near:
                    ring[(to + place) & (RING_NBYTES - 1)] = value
            barrier()  # nobody reads what the ring loses next
            if not near:
                first = max(i64(0), match - RING_NBYTES)
                for place in range(first + lane, match, lanes):
                    ring[(to + place) & (RING_NBYTES - 1)] = out[to + place]
            to += match
        return False

    return block


AT_ONCE = 8
"""Bytes that a thread loads before it stores the first of them: the compiler cannot know that both arrays are apart,
and would wait for each load."""


def copier(jit: Callable[[Any], Any]) -> Any:
    """Device code: (source, begin, target, to, count, lane, lanes) copies bytes between arrays that are apart."""

    @jit
    def copy_bytes(source: Any, begin: Any, target: Any, to: Any, count: Any, lane: Any, lanes: Any) -> None:
        place = lane
        while place + (AT_ONCE - 1) * lanes < count:
            one = source[begin + place]
            two = source[begin + place + lanes]
            three = source[begin + place + 2 * lanes]
            four = source[begin + place + 3 * lanes]
            five = source[begin + place + 4 * lanes]
            six = source[begin + place + 5 * lanes]
            seven = source[begin + place + 6 * lanes]
            eight = source[begin + place + 7 * lanes]
            target[to + place] = one
            target[to + place + lanes] = two
            target[to + place + 2 * lanes] = three
            target[to + place + 3 * lanes] = four
            target[to + place + 4 * lanes] = five
            target[to + place + 5 * lanes] = six
            target[to + place + 6 * lanes] = seven
            target[to + place + 7 * lanes] = eight
            place += AT_ONCE * lanes
        while place < count:
            target[to + place] = source[begin + place]
            place += lanes

    return copy_bytes
