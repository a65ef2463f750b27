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


def functions(jit: Callable[[Any], Any], barrier: Any) -> Any:
    """The device code: (stored, table, number, out, lane, lanes) -> whether the block fills what it has to. jit:
    compiles it. barrier: waits for all threads of the block, which agree in every branch that has one."""
    i64 = numba.int64

    @jit
    def block(stored: Any, table: Any, number: Any, out: Any, lane: Any, lanes: Any) -> Any:
        row = table[number]
        at, to, begin = i64(row[SOURCE]), i64(row[TARGET]), i64(row[TARGET])
        stop, end = at + i64(row[NBYTES]), to + i64(row[ROOM])
        while at < stop:
            token = i64(stored[at])
            at += 1
            length = token >> 4
            if length == LONG:
                more = i64(255)
                while more == 255:
                    if at >= stop:
                        return False
                    more = i64(stored[at])
                    at += 1
                    length += more
            if length > stop - at or length > end - to:
                return False
            for place in range(lane, length, lanes):
                out[to + place] = stored[at + place]
            at, to = at + length, to + length
            if at == stop:
                return to == end  # the last sequence has no match
            if at + 2 > stop:
                return False
            distance = i64(stored[at]) | (i64(stored[at + 1]) << i64(8))
            at += 2
            match = token & 15
            if match == LONG:
                more = i64(255)
                while more == 255:
                    if at >= stop:
                        return False
                    more = i64(stored[at])
                    at += 1
                    match += more
            match += LEAST_MATCH
            if distance < 1 or distance > to - begin or match > end - to:
                return False
            barrier()  # what was written so far is there for all threads
            for place in range(lane, match, lanes):
                out[to + place] = out[to - distance + place % distance]
            to += match
        return False

    return block
