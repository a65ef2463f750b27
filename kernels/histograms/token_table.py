"""Tables from tokens to counts on the CPU: open addressing, with every token that is found compared by its bytes.

A slot holds a key of 128 bits and the number of an entry. Tokens of up to 15 bytes are their key: the bytes and the
length. Of a longer one the key holds a hash of 64 bits and the length, and its bytes are compared with those that were
stored when it came first: two tokens are never taken for one. Keys of n-grams are the numbers of their units. Entries
are numbered as tokens come, so that the counts of frequent tokens lie together.

The compiled functions know a table by its arrays. None allocates: where there is no room they return, and the caller
makes room (`Table.make_room`) and goes on where they stopped.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.vectors import load_word

SLOT = 4
"""Numbers of a slot, of which the last is not used: a slot never lies on two lines of the cache."""
FIRST_SLOTS = 1 << 12
FIRST_ARENA = 1 << 16
LONG = 16
"""Bytes from which on a token's key does not hold all of it."""

USED, ARENA_USED, TOUCHED = range(3)
"""Places in `Table.state`: entries, bytes of tokens, and entries whose counts are not zero."""

_MIX_1 = 0x9E3779B97F4A7C15
_MIX_2 = 0xC2B2AE3D27D4EB4F
_MIX_3 = 0x165667B19E3779F9


@kept
@njit(nogil=True)
def hash_of(data, start, n):  # type: ignore[no-untyped-def]
    """64 bits of the n bytes from ``start`` on, n >= 16: two chains of multiplications, eight bytes each a step."""
    a = uint64(n) * uint64(_MIX_1)
    b = uint64(_MIX_2)
    i = start
    end = start + n
    while i + 16 <= end:
        a = (a ^ load_word(data, i)) * uint64(_MIX_1)
        b = (b ^ load_word(data, i + 8)) * uint64(_MIX_2)
        a ^= a >> uint64(29)
        b ^= b >> uint64(31)
        i += 16
    if i < end:
        a = (a ^ load_word(data, end - 16)) * uint64(_MIX_1)
        b = (b ^ load_word(data, end - 8)) * uint64(_MIX_2)
    a ^= a >> uint64(32)
    return (a * uint64(_MIX_3)) ^ b ^ (b >> uint64(32))


@kept
@njit(nogil=True)
def key_of(data, start, n):  # type: ignore[no-untyped-def]
    """The key (k0, k1) of the token ``data[start:start + n]``. k1 holds the length in its low byte, or 255."""
    if n >= LONG:
        return hash_of(data, start, n), uint64(n) << uint64(8) | uint64(0xFF)
    end = start + n
    if n > 8:
        # The last n - 8 bytes are on top of the word that ends with the token.
        spare = uint64(8 * (16 - n))
        rest = load_word(data, end - 8) >> spare << spare
        return load_word(data, start), rest | uint64(n)
    if n == 0:
        return uint64(0), uint64(0)
    spare = uint64(8 * (8 - n))
    if start + 8 <= len(data):
        return load_word(data, start) << spare, uint64(n)
    if end >= 8:
        return load_word(data, end - 8) >> spare << spare, uint64(n)
    word = uint64(0)
    for k in range(n):
        word |= uint64(data[start + k]) << uint64(8 * k)
    return word << spare, uint64(n)


@kept
@njit(nogil=True)
def slot_of(k0, k1, shift):  # type: ignore[no-untyped-def]
    """The slot at which the search for a key begins, of ``2 ** (64 - shift)``."""
    h = (k0 ^ (k1 * uint64(_MIX_2))) * uint64(_MIX_1)
    h ^= h >> uint64(32)
    return (h * uint64(_MIX_3)) >> shift


@kept
@njit(nogil=True)
def same_bytes(data, start, arena, place, n):  # type: ignore[no-untyped-def]
    """Whether two tokens of n >= 16 bytes are the same."""
    i = 0
    while i + 8 <= n:
        if load_word(data, start + i) != load_word(arena, place + i):
            return False
        i += 8
    return load_word(data, start + n - 8) == load_word(arena, place + n - 8)


@kept
@njit(nogil=True)
def entry_of(data, start, n, slots, shift, starts, lengths, arena, state):  # type: ignore[no-untyped-def]
    """The entry of the token ``data[start:start + n]``, a new one if need be; -1 where there is no room for that."""
    k0, k1 = key_of(data, start, n)
    mask = uint64(len(slots) // SLOT - 1)
    j = slot_of(k0, k1, shift)
    while True:
        at = j * uint64(SLOT)
        found = slots[at + uint64(2)]
        if found == 0:
            break
        if slots[at] == k0 and slots[at + uint64(1)] == k1:
            entry = np.int64(found) - 1
            if n < LONG or same_bytes(data, start, arena, starts[entry], n):
                return entry
        j = (j + uint64(1)) & mask
    entry = state[USED]
    place = state[ARENA_USED]
    if entry >= len(starts) or place + n > len(arena):
        return np.int64(-1)
    slots[at] = k0
    slots[at + uint64(1)] = k1
    slots[at + uint64(2)] = uint64(entry + 1)
    starts[entry] = place
    lengths[entry] = n
    for k in range(n):
        arena[place + k] = data[start + k]
    state[USED] = entry + 1
    state[ARENA_USED] = place + n
    return entry


@kept
@njit(nogil=True)
def key_entry(k0, k1, slots, shift, room, state):  # type: ignore[no-untyped-def]
    """The entry of a key by itself, a new one if need be; -1 where ``room`` entries are taken."""
    mask = uint64(len(slots) // SLOT - 1)
    j = slot_of(k0, k1, shift)
    while True:
        at = j * uint64(SLOT)
        found = slots[at + uint64(2)]
        if found == 0:
            break
        if slots[at] == k0 and slots[at + uint64(1)] == k1:
            return np.int64(found) - 1
        j = (j + uint64(1)) & mask
    entry = state[USED]
    if entry >= room:
        return np.int64(-1)
    slots[at] = k0
    slots[at + uint64(1)] = k1
    slots[at + uint64(2)] = uint64(entry + 1)
    state[USED] = entry + 1
    return entry


@kept
@njit(nogil=True)
def add_at(entry, count, counts, touched, state):  # type: ignore[no-untyped-def]
    """Add to the count of an entry; ``touched`` lists the entries whose counts are not zero."""
    if counts[entry] == 0:
        touched[state[TOUCHED]] = entry
        state[TOUCHED] += 1
    counts[entry] += count


@kept
@njit(nogil=True)
def _rehash(old, slots, shift):  # type: ignore[no-untyped-def]
    mask = uint64(len(slots) // SLOT - 1)
    for at in range(0, len(old), SLOT):
        if old[at + 2] == 0:
            continue
        j = slot_of(old[at], old[at + 1], shift)
        while slots[j * uint64(SLOT) + uint64(2)] != 0:
            j = (j + uint64(1)) & mask
        for k in range(3):
            slots[j * uint64(SLOT) + uint64(k)] = old[at + k]


@kept
@njit(nogil=True)
def _add_tokens(  # type: ignore[no-untyped-def]
    data, offsets, values, first, entries, slots, shift, starts, lengths, arena, counts, touched, state
):
    """Add ``values`` to the counts of tokens from number ``first`` on; returns the first that there is no room for."""
    for token in range(first, len(offsets) - 1):
        n = offsets[token + 1] - offsets[token]
        entry = entry_of(data, offsets[token], n, slots, shift, starts, lengths, arena, state)
        if entry < 0:
            return token
        entries[token] = entry
        if values[token]:
            add_at(entry, values[token], counts, touched, state)
    return len(offsets) - 1


@kept
@njit(nogil=True)
def _keys(slots, used):  # type: ignore[no-untyped-def]
    """The keys of all entries, uint64[(entries, 2)]."""
    keys = np.empty((used, 2), np.uint64)
    for at in range(0, len(slots), SLOT):
        if slots[at + 2]:
            keys[np.int64(slots[at + 2]) - 1, 0] = slots[at]
            keys[np.int64(slots[at + 2]) - 1, 1] = slots[at + 1]
    return keys


class Table:
    """Counts by token; ``with_bytes`` tells tokens by their bytes, else they are keys."""

    def __init__(self, *, with_bytes: bool) -> None:
        self._with_bytes = with_bytes
        self.slots = np.zeros(FIRST_SLOTS * SLOT, np.uint64)
        room = FIRST_SLOTS // 2
        self.counts = np.zeros(room, np.int64)
        self.touched = np.empty(room, np.int64)
        self.starts = np.empty(room if with_bytes else 0, np.int64)
        self.lengths = np.empty(room if with_bytes else 0, np.int64)
        self.arena = np.empty(FIRST_ARENA if with_bytes else 0, np.uint8)
        self.state = np.zeros(3, np.int64)

    @property
    def shift(self) -> np.uint64:
        return np.uint64(64 - (len(self.slots) // SLOT).bit_length() + 1)

    @property
    def used(self) -> int:
        """Entries."""
        return int(self.state[USED])

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        arrays = (self.slots, self.counts, self.touched, self.starts, self.lengths, self.arena)
        return sum(array.nbytes for array in arrays)

    def make_room(self) -> None:
        """More room, of what there is no more of: entries, or else bytes, of which the next token may need still more."""
        if self.used < len(self.counts):
            self.arena = _longer(self.arena, 2 * len(self.arena))
            return
        before, self.slots = self.slots, np.zeros(2 * len(self.slots), np.uint64)
        _rehash(before, self.slots, self.shift)
        room = len(self.slots) // SLOT // 2
        self.counts = _longer(self.counts, room)
        self.touched = _longer(self.touched, room)
        if self._with_bytes:
            self.starts = _longer(self.starts, room)
            self.lengths = _longer(self.lengths, room)

    def add(self, data: np.ndarray, offsets: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Add counts, int64, of the tokens ``data[offsets[i]:offsets[i + 1]]``; returns their entries, int64."""
        tokens = len(offsets) - 1
        entries = np.empty(tokens, np.int64)
        done = 0
        while done < tokens:
            done = _add_tokens(
                data,
                offsets,
                values,
                done,
                entries,
                self.slots,
                self.shift,
                self.starts,
                self.lengths,
                self.arena,
                self.counts,
                self.touched,
                self.state,
            )
            if done < tokens:
                self.make_room()
        return entries

    def keys(self) -> np.ndarray:
        """uint64[(entries, 2)]."""
        found: np.ndarray = _keys(self.slots, self.used)
        return found

    def entries_counted(self) -> np.ndarray:
        """The entries whose counts are not zero, in the order in which they became so."""
        return self.touched[: self.state[TOUCHED]]

    def take_row(self) -> tuple[np.ndarray, np.ndarray]:
        """The entries whose counts are not zero, ascending, and their counts, which become zero."""
        entries = np.sort(self.entries_counted())
        values = self.counts[entries]
        self.counts[entries] = 0
        self.state[TOUCHED] = 0
        return entries, values


def _longer(array: np.ndarray, length: int) -> np.ndarray:
    longer = np.zeros(length, array.dtype)
    longer[: len(array)] = array
    return longer
