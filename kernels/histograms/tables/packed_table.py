"""Counts of n-grams of bytes and characters on the CPU, by keys of up to 64 bits that hold the whole n-gram: no bytes
are compared, and nothing is looked up to write them.

A slot of the table is a key and its count, on one line of the cache; slots are fetched from memory a batch ahead. Of a
long text n-grams of up to three units below 256 have a count each, in an array that they are the index of.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint32, uint64

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.vectors import prefetch
from tilewright.kernels.histograms.tables.radix import sort_pairs

SLOT_NBYTES = 16
FIRST_SLOTS = 1 << 12
BATCH = 32
NOWHERE = np.empty(0, np.int64)
"""N-grams whose slots are fetched at the same time."""
SMALL_BITS = 8
MOST_DIRECT_BITS = 24
"""Bits of the index of a count: the array takes 64 MiB, of which text touches what fits a core's second cache."""
LEAST_DIRECT = 1 << 21
"""Units from which on that array is worth being cleared and searched for what is not zero."""
MOST_DIRECT = 1 << 31
"""Units after which a count of 32 bits might overflow."""

_MIX_1 = 0x9E3779B97F4A7C15
_MIX_2 = 0xC2B2AE3D27D4EB4F
_USED, _SINCE, _KEY, _HAVE = range(4)


@njit(nogil=True)
def _slot_of(key, shift):  # type: ignore[no-untyped-def]
    h = key * uint64(_MIX_1)
    h ^= h >> uint64(32)
    return (h * uint64(_MIX_2)) >> shift


@kept
@njit(nogil=True)
def _count(slots, address, shift, room, direct, units, first, last, n, bits, state, keys, places):  # type: ignore[no-untyped-def]
    """Count the n-grams that end in ``units[first:last]``. Returns the first place that is not counted, because there
    may be no room.

    ``slots``, uint64[2 * slots], lie at ``address``; ``direct`` is uint32[2 ** (8 n)] or has no length. ``keys`` and
    ``places`` are scratch, uint64[BATCH]. ``state``, uint64[4]: slots that are used; how many of the last units are
    below 256; the key of the last units; how many of them there are.
    """
    used = np.int64(state[_USED])
    since = np.int64(state[_SINCE])
    key = state[_KEY]
    have = np.int64(state[_HAVE])
    mask = ~uint64(0)
    if n * bits < 64:
        mask = (uint64(1) << uint64(n * bits)) - uint64(1)
    slot_mask = (uint64(1) << (uint64(64) - shift)) - uint64(1)
    small = uint64(0)
    small_mask = uint64(0)
    if len(direct):
        small_mask = uint64(len(direct) - 1)
        for k in range(n - 1, -1, -1):
            small = small << uint64(SMALL_BITS) | key >> uint64(bits * k) & uint64(0xFF)
    place = first
    while place < last and used + BATCH <= room:
        waiting = 0
        end = min(last, place + BATCH)
        if len(direct):
            # A run of small units, of any length: no slot is needed.
            while place < last:
                unit = uint64(units[place])
                if unit > uint64(0xFF) or since < n - 1:
                    break
                small = (small << uint64(SMALL_BITS) | unit) & small_mask
                direct[small] += uint32(1)
                key = (key << uint64(bits) | unit) & mask
                since += 1
                have += 1
                place += 1
            end = min(last, place + BATCH)
        while place < end:
            unit = uint64(units[place])
            key = (key << uint64(bits) | unit) & mask
            have += 1
            place += 1
            if len(direct):
                small = (small << uint64(SMALL_BITS) | unit) & small_mask
                since = since + 1 if unit <= uint64(0xFF) else 0
                if since >= n:
                    direct[small] += uint32(1)
                    break
            if have >= n:
                slot = _slot_of(key, shift)
                prefetch(address + np.int64(slot) * SLOT_NBYTES)
                keys[waiting] = key
                places[waiting] = slot
                waiting += 1
        for k in range(waiting):
            slot = places[k]
            wanted = keys[k]
            while True:
                at = uint64(2) * slot
                count = slots[at + uint64(1)]
                if count == 0:
                    slots[at] = wanted
                    slots[at + uint64(1)] = uint64(1)
                    used += 1
                    break
                if slots[at] == wanted:
                    slots[at + uint64(1)] = count + uint64(1)
                    break
                slot = (slot + uint64(1)) & slot_mask
    state[_USED] = uint64(used)
    state[_SINCE] = uint64(since)
    state[_KEY] = key
    state[_HAVE] = uint64(have)
    return place


@kept
@njit(nogil=True)
def _count_between(  # type: ignore[no-untyped-def]
    slots, address, shift, room, direct, units, first, last, begins, begin, n, bits, state, keys, places
):
    """`_count` of documents: ``begins[begin:]`` are the places at which one begins, ascending. Returns also how many of
    these have been passed."""
    while True:
        while begin < len(begins) and begins[begin] == first:
            state[1:] = 0
            begin += 1
        if first >= last:
            return first, begin
        stop = last
        if begin < len(begins):
            stop = min(last, begins[begin])
        first = _count(slots, address, shift, room, direct, units, first, stop, n, bits, state, keys, places)
        if first < stop:
            return first, begin


@kept
@njit(nogil=True)
def _rehash(old, slots, shift):  # type: ignore[no-untyped-def]
    """Put the slots of one array into another, whose shift is given."""
    slot_mask = (uint64(1) << (uint64(64) - shift)) - uint64(1)
    for at in range(0, len(old), 2):
        if old[at + 1] == 0:
            continue
        slot = _slot_of(old[at], shift)
        while slots[uint64(2) * slot + uint64(1)] != 0:
            slot = (slot + uint64(1)) & slot_mask
        slots[uint64(2) * slot] = old[at]
        slots[uint64(2) * slot + uint64(1)] = old[at + 1]


@kept
@njit(nogil=True)
def _entries(slots, direct, n, bits, keys, counts):  # type: ignore[no-untyped-def]
    """Write the keys that occur and their counts, if there is room for any. Returns how many there are; one that stands
    in both places is there twice."""
    write = len(keys) > 0
    entries = 0
    for at in range(0, len(slots), 2):
        if slots[at + 1]:
            if write:
                keys[entries] = slots[at]
                counts[entries] = slots[at + 1]
            entries += 1
    for index in range(len(direct)):
        if direct[index]:
            if write:
                key = uint64(0)
                for k in range(n - 1, -1, -1):
                    key = key << uint64(bits) | uint64(index) >> uint64(SMALL_BITS * k) & uint64(0xFF)
                keys[entries] = key
                counts[entries] = direct[index]
            entries += 1
    return entries


@kept
@njit(nogil=True)
def _joined(keys, counts):  # type: ignore[no-untyped-def]
    """Add up the counts of equal keys, which are neighbours. Returns how many different ones there are."""
    last = -1
    for place in range(len(keys)):
        if last >= 0 and keys[last] == keys[place]:
            counts[last] += counts[place]
        else:
            last += 1
            keys[last] = keys[place]
            counts[last] = counts[place]
    return last + 1


class PackedTable:
    """Counts of the n-grams of units of so many bits, n times bits at most 64."""

    def __init__(self, n: int, bits: int) -> None:
        self._n, self._bits = n, bits
        self._slots = _slots(FIRST_SLOTS)
        self._direct = np.empty(0, np.uint32)
        self._state = np.zeros(4, np.uint64)
        self._scratch = np.zeros((2, BATCH), np.uint64)
        self._units = 0

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        return self._slots.nbytes + self._direct.nbytes

    @property
    def is_full(self) -> bool:
        """Whether counts might overflow."""
        return self._units >= MOST_DIRECT

    @property
    def under_way(self) -> int:
        """Units of the document that is under way."""
        return int(self._state[_HAVE])

    def begin(self) -> None:
        """What comes next is of another document."""
        self._state[1:] = 0

    def emptied(self) -> PackedTable:
        """A new table, of the same document."""
        table = PackedTable(self._n, self._bits)
        table._state[1:] = self._state[1:]
        return table

    def count(self, units: np.ndarray, first: int, last: int, begins: np.ndarray = NOWHERE) -> None:
        """Count the n-grams that end in ``units[first:last]``. begins: int64, ascending, the places at which documents
        begin; without any all is of the one that is under way."""
        self._units += last - first
        if self._units >= LEAST_DIRECT and SMALL_BITS * self._n <= MOST_DIRECT_BITS and not len(self._direct):
            self._direct = np.zeros(1 << SMALL_BITS * self._n, np.uint32)
        begin = 0
        while first < last or begin < len(begins):
            count = len(self._slots) // 2
            first, begin = _count_between(
                self._slots,
                self._slots.ctypes.data,
                _shift(count),
                count // 2,
                self._direct,
                units,
                first,
                last,
                begins,
                begin,
                self._n,
                self._bits,
                self._state,
                self._scratch[0],
                self._scratch[1],
            )
            if first < last:
                before, self._slots = self._slots, _slots(2 * count)
                _rehash(before, self._slots, _shift(2 * count))

    def in_order(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys, uint64, ascending, and their counts, int64."""
        none = np.empty(0, np.uint64)
        given = (self._slots, self._direct, self._n, self._bits)
        entries = _entries(*given, none, none)
        keys, counts = np.empty(entries, np.uint64), np.empty(entries, np.uint64)
        if entries:
            _entries(*given, keys, counts)
        keys, counts = sort_pairs(keys, counts, self._n * self._bits)
        used = _joined(keys, counts)
        return keys[:used], counts[:used].view(np.int64)


def _shift(slots: int) -> np.uint64:
    return np.uint64(65 - slots.bit_length())


def _slots(count: int) -> np.ndarray:
    """Empty slots, none of which lies on two lines of the cache."""
    memory = np.zeros(2 * count + 8, np.uint64)
    skip = -memory.ctypes.data % 64 // 8
    return memory[skip : skip + 2 * count]
