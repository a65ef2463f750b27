"""A table of tokens and their counts in a GPU's memory: how kernels add to it, and how it is drained.

It is open-addressed; a slot is two words, a key (`device_keys.py`) and a count. Each block has a small one in its
shared memory that is asked first, in which a key has one place, and whoever comes first stays; what it holds is added
to the table when the block has no more text. So the most frequent tokens, of which a text mostly consists, do not queue
for a few addresses of device memory. That is how Karnagel, Müller and Lohman group on GPUs (Optimizing GPU-accelerated
Group-By and Aggregation, ADMS 2015).

A token that finds no slot within the probes is written behind the table, as a slot of its own, and `FULL` is set: no
block takes more text then, and there is room for all that blocks have in hand. Nothing is rehashed: the table is
drained, and cleared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
from numba import cuda

from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.histograms.tables.device_keys import LENGTH_BITS, arithmetic, keys
from tilewright.kernels.passes.launcher import Launcher

CACHE = 16 if SIMULATOR else 2048
"""Slots of a block's own table: 24 KiB, of which a multiprocessor has six and leaves as much to the first cache."""
MOST_PROBES = 1024
"""Slots that are looked at for a token. A table with a slot in four left free has runs of less than a hundred."""
EARLY = 8
"""No more text is taken once a token had to look at a part of the most slots, one in so many."""
PREFIXES = 1 << 16
"""First two bytes of tokens, by which a table is drained."""

NEXT, FULL, LEFT, LONG, LOST, CONTROLS = range(6)
"""Places in the table's numbers: the next tile; whether there was no room; slots behind the table; tokens that are too
long; malformed sequences."""


@functools.cache
def adding(ngrams: bool) -> tuple[Any, Any]:
    """Inside a kernel: ``insert(text, key, hashed, count, table)`` adds to the count of a key, and ``count_once(text,
    key, hashed, table, own)`` counts a token by way of the block's own table.

    table: (slots, slot_count, probes, control); own: (keys, counts), in shared memory.
    """
    word, _, whole = arithmetic()
    is_same = keys(ngrams).is_same

    @cuda.jit(device=True, inline="always")
    def insert(text: Any, key: Any, hashed: Any, count: Any, table: Any) -> Any:
        slots, slot_count, probes, control = table
        mask = word(slot_count - 1)
        at = hashed & mask
        probe = whole(0)
        while probe < probes:
            # A line in the first cache may be of before others claimed the slot; what is swapped tells.
            held = word(slots[at << word(1)])
            if held == word(0):
                held = word(cuda.atomic.cas(slots, at << word(1), word(0), key))
                if held == word(0):
                    held = key
            if is_same(text, key, held):
                break
            at = (at + word(1)) & mask
            probe += 1
        if probe < probes:
            cuda.atomic.add(slots, (at << word(1)) + word(1), count)
        else:
            left = word(slot_count) + word(cuda.atomic.add(control, LEFT, 1))
            slots[left << word(1)] = key
            slots[(left << word(1)) + word(1)] = count
        if probe >= probes // EARLY:
            cuda.atomic.max(control, FULL, 1)

    @cuda.jit(device=True, inline="always")
    def count_once(text: Any, key: Any, hashed: Any, table: Any, own: Any) -> Any:
        own_keys, own_counts = own
        line = hashed >> word(32) & word(CACHE - 1)
        held = word(own_keys[line])
        if held == word(0):
            held = word(cuda.atomic.cas(own_keys, line, word(0), key))
            if held == word(0):
                held = key
        if is_same(text, key, held):
            cuda.atomic.add(own_counts, line, 1)
        else:
            insert(text, key, hashed, word(1), table)

    return insert, count_once


def measure_function(ngrams: bool) -> Callable[..., None]:
    """The plain function of the kernel that measures what a table holds, by its tokens' first two bytes.

    Of the first ``used`` slots those with a key are counted: to ``sizes``, int64[2 * PREFIXES], are added how many
    begin so, and in the second half their bytes. The text is as of `device_tokens.count_function`. Any grid and block.
    """
    word, _, whole = arithmetic()
    of = keys(ngrams)
    length_of, prefix_of = of.length_of, of.prefix_of

    def measure(data: Any, edges: Any, n: Any, letters: Any, slots: Any, used: Any, sizes: Any) -> None:
        text = (data, edges, n, letters, word(0))
        at = whole(cuda.grid(1))
        while at < used:
            key = word(slots[word(2 * at)])
            if key != word(0):
                prefix = prefix_of(text, key)
                cuda.atomic.add(sizes, prefix, 1)
                cuda.atomic.add(sizes, prefix + PREFIXES, length_of(key))
            at += whole(cuda.gridsize(1))

    return measure


def drain_function(ngrams: bool) -> Callable[..., None]:
    """The plain function of the kernel that lists what a table holds.

    Of the first ``used`` slots those with a key are written, with their first two bytes in order: the tokens' bytes to
    ``out``; to ``told``, uint64, where each begins there, and in the lowest `LENGTH_BITS` its length; to ``counts``,
    uint32, its count. ``places``, int64[2 * PREFIXES], says where those go that begin so, the first of them; it is
    written. Any grid and block.
    """
    word, _, whole = arithmetic()
    of = keys(ngrams)
    length_of, prefix_of, copy = of.length_of, of.prefix_of, of.copy

    def drain(
        data: Any,
        edges: Any,
        n: Any,
        letters: Any,
        slots: Any,
        used: Any,
        places: Any,
        out: Any,
        told: Any,
        counts: Any,
    ) -> None:
        text = (data, edges, n, letters, word(0))
        at = whole(cuda.grid(1))
        while at < used:
            key = word(slots[word(2 * at)])
            if key != word(0):
                prefix, length = prefix_of(text, key), length_of(key)
                entry = whole(cuda.atomic.add(places, prefix, 1))
                place = whole(cuda.atomic.add(places, prefix + PREFIXES, length))
                told[word(entry)] = word(place) << word(LENGTH_BITS) | word(length)
                counts[word(entry)] = word(slots[word(2 * at + 1)])
                copy(text, key, out, place)
            at += whole(cuda.gridsize(1))

    return drain


BYTES, PLACES = numba.types.Array(numba.uint8, 1, "C"), numba.types.Array(numba.int64, 1, "C")
SLOTS, NUMBER = numba.types.Array(numba.uint64, 1, "C"), numba.int64
_COUNTS = numba.types.Array(numba.uint32, 1, "C")
_TEXT = (BYTES, PLACES, NUMBER, BYTES)

MEASURE = Launcher(measure_function, lambda ngrams: numba.void(*_TEXT, SLOTS, NUMBER, PLACES))
DRAIN = Launcher(
    drain_function, lambda ngrams: numba.void(*_TEXT, SLOTS, NUMBER, PLACES, BYTES, SLOTS, _COUNTS)
)
