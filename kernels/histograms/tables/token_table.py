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
from tilewright.kernels.cpu.spare import give_back, take
from tilewright.kernels.cpu.vectors import (
    load_byte,
    load_int,
    load_word,
    prefetch,
    store_byte,
    store_int,
    store_word,
)
from tilewright.kernels.histograms.tables.radix import DIGIT_BITS, sort_by_digits

SLOT_NBYTES = 32
"""Key, number of the entry plus 1, and where its bytes lie: no slot lies on two lines of the cache."""
BATCH = 64
"""Tokens that are looked for together: their slots are fetched from memory at the same time."""
FIRST_SLOTS = 1 << 12
FIRST_ARENA = 1 << 16
LONG = 16
"""Bytes from which on a token's key does not hold all of it."""
FEW = 64
"""Entries of a row below which comparing them sorts it sooner than their digits do."""

(
    SLOTS,
    SHIFT,
    MASK,
    ROOM,
    STARTS,
    LENGTHS,
    ARENA,
    ARENA_ROOM,
    COUNTS,
    TOUCHED,
    USED,
    ARENA_USED,
    TOUCHED_USED,
    SCRATCH,
) = range(0, 112, 8)
"""Where the numbers of `Table.state` lie, in bytes: addresses of the table's arrays, how large they are, and how much
of them is used. The slots are ``2 ** (64 - shift)``, and the mask is one less."""
STATE_NUMBERS = 14
_BEGINS, _LENGTHS, _KEYS_0, _KEYS_1, _PLACES, ENTRIES, _LONG = range(0, 56 * BATCH, 8 * BATCH)
"""Where the arrays of a batch lie in the scratch memory: tokens, their keys, slots and entries, and the slots of those
whose bytes are compared."""

_MIX_1 = 0x9E3779B97F4A7C15
_MIX_2 = 0xC2B2AE3D27D4EB4F
_MIX_3 = 0x165667B19E3779F9


@njit(nogil=True)
def _hash_of(start, n):  # type: ignore[no-untyped-def]
    """64 bits of the n bytes at ``start``, n >= 16: two chains of multiplications, eight bytes each a step."""
    a = uint64(n) * uint64(_MIX_1)
    b = uint64(_MIX_2)
    i = start
    end = start + n
    while i + 16 <= end:
        a = (a ^ load_word(i)) * uint64(_MIX_1)
        b = (b ^ load_word(i + 8)) * uint64(_MIX_2)
        a ^= a >> uint64(29)
        b ^= b >> uint64(31)
        i += 16
    if i < end:
        a = (a ^ load_word(end - 16)) * uint64(_MIX_1)
        b = (b ^ load_word(end - 8)) * uint64(_MIX_2)
    a ^= a >> uint64(32)
    return (a * uint64(_MIX_3)) ^ b ^ (b >> uint64(32))


@njit(nogil=True)
def _key_of(start, n, lo, hi):  # type: ignore[no-untyped-def]
    """The key (k0, k1) of the n bytes at ``start``, in a text from ``lo`` to ``hi``. k1 holds the length in its low
    byte, or 255."""
    if n <= 8:
        spare = uint64(64 - 8 * n)
        if n == 0:
            return uint64(0), uint64(0)
        if start + 8 <= hi:
            return load_word(start) << spare, uint64(n)
        if start + n - 8 >= lo:
            return load_word(start + n - 8) >> spare << spare, uint64(n)
        word = uint64(0)
        for k in range(n):
            word |= uint64(load_byte(start + k)) << uint64(8 * k)
        return word << spare, uint64(n)
    if n < LONG:
        # The last n - 8 bytes are on top of the word that ends with the token.
        spare = uint64(128 - 8 * n)
        return load_word(start), load_word(start + n - 8) >> spare << spare | uint64(n)
    return _hash_of(start, n), uint64(n) << uint64(8) | uint64(0xFF)


@njit(nogil=True)
def _slot_of(k0, k1, shift):  # type: ignore[no-untyped-def]
    """The slot at which the search for a key begins."""
    h = (k0 ^ (k1 * uint64(_MIX_2))) * uint64(_MIX_1)
    h ^= h >> uint64(32)
    return np.int64((h * uint64(_MIX_3)) >> shift)


@njit(nogil=True)
def _same_bytes(a, b, n):  # type: ignore[no-untyped-def]
    """Whether two tokens of n >= 16 bytes are the same."""
    i = 0
    while i + 8 <= n:
        if load_word(a + i) != load_word(b + i):
            return False
        i += 8
    return load_word(a + n - 8) == load_word(b + n - 8)


@njit(nogil=True)
def _new_slot(at, k0, k1, entry, place):  # type: ignore[no-untyped-def]
    store_word(at, k0)
    store_word(at + 8, k1)
    store_int(at + 16, entry + 1)
    store_int(at + 24, place)


@njit(nogil=True)
def _entry_at(table, at, k0, k1, start, n):  # type: ignore[no-untyped-def]
    """The entry of the token of the n bytes at ``start``, whose keys these are, and whose search begins at the slot
    ``at``: a new one if need be; -1 where there is no room for that."""
    slots = load_int(table + SLOTS)
    end = slots + (load_int(table + MASK) + 1) * SLOT_NBYTES
    found = load_int(at + 16)
    while found:
        if (
            load_word(at) == k0
            and load_word(at + 8) == k1
            and (n < LONG or _same_bytes(start, load_int(table + ARENA) + load_int(at + 24), n))
        ):
            return found - 1
        at += SLOT_NBYTES
        if at == end:
            at = slots
        found = load_int(at + 16)
    entry = load_int(table + USED)
    place = load_int(table + ARENA_USED)
    if entry >= load_int(table + ROOM) or place + n > load_int(table + ARENA_ROOM):
        return np.int64(-1)
    _new_slot(at, k0, k1, entry, place)
    store_int(load_int(table + STARTS) + 8 * entry, place)
    store_int(load_int(table + LENGTHS) + 8 * entry, n)
    arena = load_int(table + ARENA) + place
    if n < 8:
        for k in range(n):
            store_byte(arena + k, load_byte(start + k))
    else:
        for k in range(0, n - 8, 8):
            store_word(arena + k, load_word(start + k))
        store_word(arena + n - 8, load_word(start + n - 8))
    store_int(table + USED, entry + 1)
    store_int(table + ARENA_USED, place + n)
    return entry


@njit(nogil=True)
def add_at(table, entry, count):  # type: ignore[no-untyped-def]
    """Add to the count of an entry; `Table.touched` lists the entries whose counts are not zero."""
    place = load_int(table + COUNTS) + 8 * entry
    before = load_int(place)
    if before == 0:
        touched = load_int(table + TOUCHED_USED)
        store_int(load_int(table + TOUCHED) + 8 * touched, entry)
        store_int(table + TOUCHED_USED, touched + 1)
    store_int(place, before + count)


@njit(nogil=True)
def put_in_batch(table, k, start, n):  # type: ignore[no-untyped-def]
    """Have the n bytes at ``start`` be token k of the next batch. ``table`` is the address of its `Table.state`."""
    scratch = load_int(table + SCRATCH) + 8 * k
    store_int(scratch + _BEGINS, start)
    store_int(scratch + _LENGTHS, n)


@njit(nogil=True)
def begin_of(table, k):  # type: ignore[no-untyped-def]
    """Where token k of the batch begins."""
    return load_int(load_int(table + SCRATCH) + 8 * k + _BEGINS)


@kept
@njit(nogil=True)
def count_batch(table, tokens, lo, hi):  # type: ignore[no-untyped-def]
    """Count the tokens of the batch, in a text from ``lo`` to ``hi``, and put their entries into the scratch memory.
    Returns the first that there is no room for, or how many there are."""
    scratch = load_int(table + SCRATCH)
    slots = load_int(table + SLOTS)
    shift = load_word(table + SHIFT)
    counts = load_int(table + COUNTS)
    arena = load_int(table + ARENA)
    long = scratch + _LONG
    for at in range(scratch, scratch + 8 * tokens, 8):
        n = load_int(at + _LENGTHS)
        k0, k1 = _key_of(load_int(at + _BEGINS), n, lo, hi)
        slot = slots + _slot_of(k0, k1, shift) * SLOT_NBYTES
        prefetch(slot)
        store_word(at + _KEYS_0, k0)
        store_word(at + _KEYS_1, k1)
        store_int(at + _PLACES, slot)
        if n >= LONG:
            store_int(long, slot)
            long += 8
    for at in range(scratch + _LONG, long, 8):
        prefetch(arena + load_int(load_int(at) + 24))
    for at in range(scratch, scratch + 8 * tokens, 8):
        slot = load_int(at + _PLACES)
        k0 = load_word(at + _KEYS_0)
        k1 = load_word(at + _KEYS_1)
        entry = load_int(slot + 16) - 1
        # Most tokens are short, not the first of their kind, and in the slot where the search for them begins.
        if load_word(slot) == k0 and load_word(slot + 8) == k1 and k1 & uint64(0xFF) != 0xFF and entry >= 0:
            place = counts + 8 * entry
            before = load_int(place)
            if before:
                store_int(place, before + 1)
                store_int(at + ENTRIES, entry)
                continue
        else:
            entry = _entry_at(table, slot, k0, k1, load_int(at + _BEGINS), load_int(at + _LENGTHS))
            if entry < 0:
                return (at - scratch) >> 3
        add_at(table, entry, 1)
        store_int(at + ENTRIES, entry)
    return tokens


@njit(nogil=True)
def _entry_of(table, start, n, lo, hi):  # type: ignore[no-untyped-def]
    """The entry of the token of the n bytes at ``start``, in a text from ``lo`` to ``hi``: a new one if need be; -1
    where there is no room for that."""
    k0, k1 = _key_of(start, n, lo, hi)
    at = load_int(table + SLOTS) + _slot_of(k0, k1, load_word(table + SHIFT)) * SLOT_NBYTES
    return _entry_at(table, at, k0, k1, start, n)


@njit(nogil=True)
def key_entry(table, k0, k1):  # type: ignore[no-untyped-def]
    """The entry of a key by itself, a new one if need be; -1 where there is no room for that."""
    slots = load_int(table + SLOTS)
    mask = load_int(table + MASK)
    j = _slot_of(k0, k1, load_word(table + SHIFT))
    at = slots + j * SLOT_NBYTES
    found = load_int(at + 16)
    while found:
        if load_word(at) == k0 and load_word(at + 8) == k1:
            return found - 1
        j = (j + 1) & mask
        at = slots + j * SLOT_NBYTES
        found = load_int(at + 16)
    entry = load_int(table + USED)
    if entry >= load_int(table + ROOM):
        return np.int64(-1)
    _new_slot(at, k0, k1, entry, 0)
    store_int(table + USED, entry + 1)
    return entry


@njit(nogil=True)
def fetch_key(table, k0, k1):  # type: ignore[no-untyped-def]
    """Have the slot of a key fetched from memory, for a `key_entry` that comes later."""
    prefetch(load_int(table + SLOTS) + _slot_of(k0, k1, load_word(table + SHIFT)) * SLOT_NBYTES)


@njit(nogil=True)
def put_row(table, columns, values, place):  # type: ignore[no-untyped-def]
    """Put the entries whose counts are not zero, ascending, and their counts, which become zero, into ``columns`` and
    ``values``, uint64, from ``place`` on. Returns the place behind them, or -1 where there is no room for all."""
    touched = load_int(table + TOUCHED)
    number = load_int(table + TOUCHED_USED)
    if place + number > len(columns):
        return np.int64(-1)
    row = columns[place : place + number]
    for k in range(number):
        row[k] = load_word(touched + 8 * k)
    if number < FEW:
        # Most come as they are numbered, or nearly so.
        for k in range(1, number):
            entry = row[k]
            j = k
            while j > 0 and row[j - 1] > entry:
                row[j] = row[j - 1]
                j -= 1
            row[j] = entry
    else:
        passes = 1
        while load_int(table + USED) >> (passes * DIGIT_BITS):
            passes += 1
        if sort_by_digits(row, values[place : place + number], passes):
            row[:] = values[place : place + number]
    counts = load_int(table + COUNTS)
    for k in range(number):
        at = counts + 8 * np.int64(row[k])
        values[place + k] = load_word(at)
        store_word(at, uint64(0))
    store_int(table + TOUCHED_USED, 0)
    return place + number


@kept
@njit(nogil=True)
def _rehash(old, slots, shift):  # type: ignore[no-untyped-def]
    """Put the slots of one array, uint64, into another, whose shift is given."""
    mask = len(slots) // 4 - 1
    for at in range(0, len(old), 4):
        if old[at + 2] == 0:
            continue
        j = _slot_of(old[at], old[at + 1], shift)
        while slots[4 * j + 2] != 0:
            j = (j + 1) & mask
        for k in range(4):
            slots[4 * j + k] = old[at + k]


@kept
@njit(nogil=True)
def _add_tokens(table, data, nbytes, offsets, values, first, entries):  # type: ignore[no-untyped-def]
    """Add ``values`` to the counts of tokens from number ``first`` on; returns the first that there is no room for."""
    for token in range(first, len(offsets) - 1):
        n = offsets[token + 1] - offsets[token]
        entry = _entry_of(table, data + offsets[token], n, data, data + nbytes)
        if entry < 0:
            return token
        entries[token] = entry
        if values[token]:
            add_at(table, entry, values[token])
    return len(offsets) - 1


@kept
@njit(nogil=True)
def _find_tokens(table, data, nbytes, starts, lengths, first, entries):  # type: ignore[no-untyped-def]
    """Count tokens from number ``first`` on, and write their entries; returns the first that there is no room for."""
    while first < len(starts):
        tokens = min(BATCH, len(starts) - first)
        for k in range(tokens):
            put_in_batch(table, k, data + starts[first + k], lengths[first + k])
        done = count_batch(table, tokens, data, data + nbytes)
        found = load_int(table + SCRATCH) + ENTRIES
        for k in range(done):
            entries[first + k] = load_int(found + 8 * k)
        first += done
        if done < tokens:
            break
    return first


@kept
@njit(nogil=True)
def _keys(slots, used):  # type: ignore[no-untyped-def]
    """The keys of all entries: their lower and their upper 64 bits."""
    low = np.empty(used, np.uint64)
    high = np.empty(used, np.uint64)
    for at in range(0, len(slots), 4):
        if slots[at + 2]:
            low[np.int64(slots[at + 2]) - 1] = slots[at]
            high[np.int64(slots[at + 2]) - 1] = slots[at + 1]
    return low, high


class Table:
    """Counts by token; ``with_bytes`` tells tokens by their bytes, else they are keys."""

    def __init__(self, *, with_bytes: bool) -> None:
        self._with_bytes = with_bytes
        self.state = np.zeros(STATE_NUMBERS, np.int64)
        self._slots = take(4 * FIRST_SLOTS, np.uint64, zeros=True)
        room = FIRST_SLOTS // 2
        self.counts = take(room, np.int64, zeros=True)
        self.touched = take(room, np.int64)
        self.starts = take(room if with_bytes else 0, np.int64)
        self.lengths = take(room if with_bytes else 0, np.int64)
        self.arena = take(FIRST_ARENA if with_bytes else 0, np.uint8)
        self._scratch = np.zeros(7 * BATCH, np.int64)
        self._describe()

    def _describe(self) -> None:
        """Note the arrays for the loops."""
        slots = len(self._slots) // 4
        for place, number in (
            (SLOTS, self._slots.ctypes.data),
            (SHIFT, 65 - slots.bit_length()),
            (MASK, slots - 1),
            (ROOM, len(self.counts)),
            (STARTS, self.starts.ctypes.data),
            (LENGTHS, self.lengths.ctypes.data),
            (ARENA, self.arena.ctypes.data),
            (ARENA_ROOM, len(self.arena)),
            (COUNTS, self.counts.ctypes.data),
            (TOUCHED, self.touched.ctypes.data),
            (SCRATCH, self._scratch.ctypes.data),
        ):
            self.state[place // 8] = number

    @property
    def address(self) -> int:
        """What loops know the table by."""
        return self.state.ctypes.data

    @property
    def used(self) -> int:
        """Entries."""
        return int(self.state[USED // 8])

    @property
    def bytes_used(self) -> np.ndarray:
        """uint8: the bytes of all tokens."""
        return self.arena[: self.state[ARENA_USED // 8]]

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        arrays = (self._slots, self.counts, self.touched, self.starts, self.lengths, self.arena)
        return sum(array.nbytes for array in arrays)

    def make_room(self) -> None:
        """More room, for entries if there is none, else for bytes, of which the next token may need still more."""
        if self.used < len(self.counts):
            self.arena = _longer(self.arena, 2 * len(self.arena))
        else:
            before, self._slots = self._slots, take(2 * len(self._slots), np.uint64, zeros=True)
            room = len(self._slots) // 8
            _rehash(before, self._slots, np.uint64(65 - (2 * room).bit_length()))
            give_back(before)
            self.counts = _longer(self.counts, room, zeros=True)
            self.touched = _longer(self.touched, room)
            if self._with_bytes:
                self.starts = _longer(self.starts, room)
                self.lengths = _longer(self.lengths, room)
        self._describe()

    def close(self) -> None:
        """Let others have its memory. It is of no use any more."""
        give_back(self._slots, self.counts, self.touched, self.starts, self.lengths, self.arena)

    def add(self, data: np.ndarray, offsets: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Add counts, int64, of the tokens ``data[offsets[i]:offsets[i + 1]]``; returns their entries, int64."""
        tokens = len(offsets) - 1
        entries = np.empty(tokens, np.int64)
        done = 0
        while done < tokens:
            done = _add_tokens(self.address, data.ctypes.data, len(data), offsets, values, done, entries)
            if done < tokens:
                self.make_room()
        return entries

    def entries_of(self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Count the tokens ``data[starts[i]:starts[i] + lengths[i]]``; returns their entries, int64."""
        tokens = len(starts)
        entries = np.empty(tokens, np.int64)
        done = 0
        while done < tokens:
            done = _find_tokens(self.address, data.ctypes.data, len(data), starts, lengths, done, entries)
            if done < tokens:
                self.make_room()
        return entries

    def keys(self) -> tuple[np.ndarray, np.ndarray]:
        """Their lower and their upper 64 bits, uint64[entries] each."""
        low, high = _keys(self._slots, self.used)
        return low, high

    @property
    def touched_used(self) -> int:
        """Entries whose counts are not zero."""
        return int(self.state[TOUCHED_USED // 8])

    def take_row(self) -> tuple[np.ndarray, np.ndarray]:
        """The entries whose counts are not zero, ascending, and their counts, which become zero."""
        entries = np.sort(self.touched[: self.touched_used])
        values = self.counts[entries]
        self.counts[entries] = 0
        self.state[TOUCHED_USED // 8] = 0
        return entries, values


def _longer(array: np.ndarray, length: int, *, zeros: bool = False) -> np.ndarray:
    """Its contents in a longer array, which it is given back for. zeros: what is behind them."""
    longer = take(length, array.dtype)
    longer[: len(array)] = array
    if zeros:
        longer[len(array) :] = 0
    give_back(array)
    return longer
