"""Where the lines of a text in a GPU's memory end.

Two launches: one counts the newlines of each tile, and once the host has added these up, another writes where they are.
A thread takes `SPAN` bytes, four at a time, and finds newlines among four by the method of Warren (Hacker's Delight,
2nd edition, 6-1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import cuda

from tilewright.kernels.duplicates.device_hashing import halves
from tilewright.kernels.duplicates.device_rooms import Rooms
from tilewright.kernels.duplicates.device_units import scanning
from tilewright.kernels.duplicates.line_tiles import SPAN, THREADS, TILE
from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.gpu.device_array import strided_view
from tilewright.kernels.gpu.transfer import download
from tilewright.kernels.histograms.tables.device_keys import arithmetic
from tilewright.kernels.numbers import ceil_div
from tilewright.kernels.passes.launcher import Launcher

NEWLINE, RETURN = 0x0A, 0x0D
_FOUR_NEWLINES, _LOW_BITS, _HIGH_BITS = NEWLINE * 0x01010101, 0x7F7F7F7F, 0x80808080


def lines_function(writes: bool) -> Callable[..., None]:
    """The plain function of the kernel that looks for newlines.

    text: uint32, whose first ``stop`` bytes are looked at. Without ``writes``, totals, int64[blocks], are written: how
    many newlines each tile has. With it they say how many are before each tile, and written is places, int64: of every
    newline, in order, twice where it is, and 1 more where a carriage return is before it in the text. Block: THREADS, a
    tile each; shared memory: 1 KiB.
    """
    half, (_, _, whole) = halves(), arithmetic()
    scanned = scanning(THREADS)

    def lines(text: Any, stop: Any, totals: Any, places: Any) -> None:
        added = cuda.shared.array(THREADS, numba.uint32)
        thread = whole(cuda.threadIdx.x)
        tile = whole(cuda.blockIdx.x)
        first = tile * TILE + thread * SPAN
        last = min(first + SPAN, stop)
        mine = whole(0)
        at = first
        while at < last:
            other = half(half(text[at >> 2]) ^ half(_FOUR_NEWLINES))
            low = half(half(other & half(_LOW_BITS)) + half(_LOW_BITS))
            ends = half(~half(low | other | half(_LOW_BITS)) & half(_HIGH_BITS))
            if last - at < 4:
                ends = half(ends & half((1 << (8 * (last - at))) - 1))
            mine += whole(cuda.popc(ends))
            at += 4
        through = whole(scanned(added, thread, numba.uint32(mine)))
        if not writes:
            if thread == THREADS - 1:
                totals[tile] = through
        elif mine > 0:
            place = whole(totals[tile]) + through - mine
            for i in range(first, last):
                byte = whole(half(text[i >> 2])) >> (8 * (i & 3)) & 0xFF
                if byte == NEWLINE:
                    told = 2 * i
                    before = i - 1
                    if i > 0 and whole(half(text[before >> 2])) >> (8 * (before & 3)) & 0xFF == RETURN:
                        told += 1
                    places[place] = told
                    place += 1

    return lines


_PLACES = numba.types.Array(numba.int64, 1, "C")
LINES = Launcher(
    lines_function,
    lambda writes: numba.void(numba.types.Array(numba.uint32, 1, "C"), numba.int64, _PLACES, _PLACES),
)


class Newlines(NamedTuple):
    """The newlines of a text, in order."""

    places: np.ndarray
    """int64."""
    returns: np.ndarray
    """bool: whether a carriage return stands before it."""


def find_newlines(text: Any, stop: int, rooms: Rooms, stream: Any, most: int) -> tuple[Any, int] | None:
    """Find the newlines among the first ``stop`` bytes of a text in device memory, uint8[n], n a multiple of 4, which
    the stream brings there. rooms: for what it takes of the device's memory.

    Returns what `LINES` writes of them, int64 on the device, which may hold more, and how many there are. None where
    there are more than ``most``: then no memory is taken for them.
    """
    tiles = ceil_div(stop, TILE)
    if not tiles:
        return rooms.of("newlines", 1, np.int64), 0
    words = as_words(text)
    totals = rooms.of("newlines of tiles", tiles, np.int64)
    LINES.enqueue((False,), tiles, THREADS, stream, words, stop, totals, totals)
    found = download(totals[:tiles], stream)
    ends = found.cumsum()
    count = int(ends[-1])
    if count > most:
        return None
    places = rooms.of("newlines", max(1, count), np.int64)
    if count:
        rooms.uploaded("newlines of tiles", ends - found, stream)
        LINES.enqueue((True,), tiles, THREADS, stream, words, stop, totals, places)
    return places, count


def newlines_of(text: Any, stop: int, rooms: Rooms, stream: Any, most: int) -> Newlines | None:
    """The newlines of a text, as `find_newlines` finds them; None where there are too many."""
    found = find_newlines(text, stop, rooms, stream, most)
    if found is None:
        return None
    places, count = found
    if not count:
        return Newlines(np.empty(0, np.int64), np.empty(0, np.bool_))
    told = download(places[:count], stream)
    return Newlines(told >> 1, (told & 1).astype(np.bool_))


def as_words(text: Any) -> Any:
    """The words of four bytes of device memory, uint8[n]; what is left of it behind the last is in none."""
    return strided_view(text, (text.size // 4,), (4,), np.dtype(np.uint32))


def prepare() -> None:
    """Compile and load the kernels."""
    for writes in (False, True):
        LINES.prepare(writes)


def variants() -> list[Variant]:
    """What tests compile to machine code."""
    return [LINES.variant(f"{'write' if writes else 'count'} newlines", writes) for writes in (False, True)]
