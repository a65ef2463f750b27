"""Words, lines, and n-grams of characters and of bytes, found in a text on a GPU and counted in a table there.

One launch goes over the text. Every thread takes `SPAN` bytes, finds the tokens that begin there, by the rules and the
tables of the CPU's loops, and adds one to each in the table: an open-addressed one of slots of two words, a key and a
count. The key tells a token exactly, by one of two forms, so that no hash is believed:

- up to `INLINE` bytes are in the key themselves, with how many they are;
- of a longer token the key holds where it stands in the text, how long it is, and 16 bits of its hash. Where these and
  the length are the same, the bytes are compared: those of the token that has the slot are in the text still.

A key is one word of 64 bits, claimed by one compare-and-swap, and nothing has to be published behind it: nobody waits.
The same table in small, in a block's shared memory, is asked first. It has no second place for a key, whoever comes
first stays, and what it holds is added to the table when the block has no more text. So the most frequent tokens, of
which a text mostly consists, do not queue for a few addresses of device memory.

Where a token finds no slot within `MOST_PROBES`, it is written behind the table, as a slot of its own, and no block
takes more text: there is room for all that blocks have in hand. The caller drains the table, clears it, and goes on
with the next tile. A token of more than ``longest`` bytes is only noted, for the CPU to count.

The method of counting in two levels, shared memory before an open-addressed table in device memory, is that of
group-by's on GPUs (Karnagel, Müller and Lohman, Optimizing GPU-accelerated Group-By and Aggregation, ADMS 2015).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numba
from numba import cuda

from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.histograms import tokens
from tilewright.kernels.histograms.token_kinds import word_table
from tilewright.kernels.histograms.tokens import CODE_BITS, CODE_MASK, REPLACEMENT
from tilewright.kernels.passes.launcher import Launcher

THREADS = 8 if SIMULATOR else 256
SPAN = 8 if SIMULATOR else 32
"""Bytes whose tokens a thread counts of a tile."""
TILE = THREADS * SPAN
CACHE = 16 if SIMULATOR else 2048
"""Slots of a block's own table: 24 KiB, of which a multiprocessor has six and leaves as much to the first cache."""
BLOCKS_PER_MULTIPROCESSOR = 6

UNITS = ("word", "line", "character", "byte")
INLINE = 7
"""Bytes of a token that is in its key."""
PLACE_BITS, LENGTH_BITS = 31, 16
MOST_TEXT_NBYTES = 1 << PLACE_BITS
"""Of a text, so that keys can say where a token stands."""
LONGEST = (1 << LENGTH_BITS) - 2
"""Bytes of a token that a GPU counts; a text has as many behind what is counted, and `AFTER` more."""
AFTER = LONGEST + 32
MOST_PROBES = 1024
"""Slots that are looked at for a token. A table with a slot in four left free has runs of less than a hundred."""
EARLY = 8
"""No more text is taken once a token had to look at a part of the most slots, one in so many."""

PREFIXES = 1 << 16
"""First two bytes of tokens, by which a table is drained."""

NEXT, FULL, LEFT, LONG, LOST, CONTROLS = range(6)
"""Places in the table's numbers: the next tile; whether there was no room; slots behind the table; tokens that are too
long; malformed sequences."""

WORD = 2**64 - 1
FNV_PRIME, FNV_BASIS = 0x100000001B3, 0xCBF29CE484222325
"""Of the hash of bytes by Fowler, Noll and Vo, of which only the last step is another here."""
MIX_1, MIX_2 = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
"""Of MurmurHash3's last step, which makes every bit depend on all."""


@functools.cache
def _arithmetic() -> tuple[Any, Any, Any]:
    """Inside a kernel: numbers as words of 64 bits, the product of two whose overflow is lost, and numbers with a sign.
    The simulator runs kernels as Python, where NumPy's words would warn of overflow."""
    if SIMULATOR:

        def as_word(value: Any) -> int:
            return int(value) & WORD

        def product(left: int, right: int) -> int:
            return (left * right) & WORD

        return as_word, product, int
    u64 = numba.uint64

    @cuda.jit(device=True, inline="always")
    def times(left: Any, right: Any) -> Any:
        return u64(left) * u64(right)

    return u64, times, numba.int64


@functools.cache
def _table_functions() -> tuple[Any, Any, Any]:
    """Inside a kernel: the key and the hash of a token, the hash of a key, and how a count is added for a key."""
    word, times, whole = _arithmetic()

    @cuda.jit(device=True, inline="always")
    def mixed(value: Any, hash_mask: Any) -> Any:
        value ^= value >> word(33)
        value = times(value, word(MIX_1))
        value ^= value >> word(33)
        value = times(value, word(MIX_2))
        value ^= value >> word(33)
        return value & hash_mask

    @cuda.jit(device=True, inline="always")
    def bytes_hash(data: Any, start: Any, length: Any, hash_mask: Any) -> Any:
        found = word(FNV_BASIS)
        for k in range(length):
            found = times(found ^ word(data[word(start + k)]), word(FNV_PRIME))
        return mixed(found, hash_mask)

    @cuda.jit(device=True, inline="always")
    def key_of(data: Any, start: Any, length: Any, hash_mask: Any) -> Any:
        """Its lowest bit is 0 for a token that is in it: its bytes, the first on top, and one more than their number.
        Else that bit is 1, with the place above it, the length, and bits of the hash."""
        if length <= INLINE:
            key = word(0)
            for k in range(length):
                key |= word(data[word(start + k)]) << word(56 - 8 * k)
            key |= word(length + 1) << word(1)
            return key, mixed(key, hash_mask)
        hashed = bytes_hash(data, start, length, hash_mask)
        key = word(1) | word(start) << word(1) | word(length) << word(PLACE_BITS + 1)
        return key | hashed >> word(48) << word(48), hashed

    @cuda.jit(device=True, inline="always")
    def hash_of(data: Any, key: Any, hash_mask: Any) -> Any:
        if key & word(1) == word(0):
            return mixed(key, hash_mask)
        start = whole(key >> word(1) & word(MOST_TEXT_NBYTES - 1))
        return bytes_hash(data, start, whole(key >> word(PLACE_BITS + 1) & word(0xFFFF)), hash_mask)

    @cuda.jit(device=True, inline="always")
    def is_same(data: Any, key: Any, other: Any) -> Any:
        """Whether two keys are of the same token."""
        if key == other:
            return True
        if key & other & word(1) == word(0) or (key ^ other) >> word(PLACE_BITS + 1) != word(0):
            return False
        mine = key >> word(1) & word(MOST_TEXT_NBYTES - 1)
        theirs = other >> word(1) & word(MOST_TEXT_NBYTES - 1)
        for k in range(whole(key >> word(PLACE_BITS + 1) & word(0xFFFF))):
            if data[mine + word(k)] != data[theirs + word(k)]:
                return False
        return True

    @cuda.jit(device=True, inline="always")
    def insert(
        data: Any, key: Any, hashed: Any, count: Any, slots: Any, slot_count: Any, probes: Any, control: Any
    ) -> Any:
        """Add to the count of a key."""
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
            if is_same(data, key, held):
                cuda.atomic.add(slots, (at << word(1)) + word(1), count)
                if probe >= probes // EARLY:
                    cuda.atomic.max(control, FULL, 1)
                return
            at = (at + word(1)) & mask
            probe += 1
        left = word(slot_count) + word(cuda.atomic.add(control, LEFT, 1))
        slots[left << word(1)] = key
        slots[(left << word(1)) + word(1)] = count
        cuda.atomic.max(control, FULL, 1)

    @cuda.jit(device=True, inline="always")
    def add(
        data: Any,
        start: Any,
        length: Any,
        hash_mask: Any,
        slots: Any,
        slot_count: Any,
        probes: Any,
        control: Any,
        cache_keys: Any,
        cache_counts: Any,
    ) -> Any:
        """Count the token ``data[start:start + length]`` once."""
        key, hashed = key_of(data, start, length, hash_mask)
        line = hashed >> word(32) & word(CACHE - 1)
        held = word(cache_keys[line])
        if held == word(0):
            held = word(cuda.atomic.cas(cache_keys, line, word(0), key))
            if held == word(0):
                held = key
        if is_same(data, key, held):
            cuda.atomic.add(cache_counts, line, 1)
        else:
            insert(data, key, hashed, word(1), slots, slot_count, probes, control)

    return add, hash_of, insert


def _segment_function(unit: str) -> Any:
    """Inside a kernel: count the tokens that begin in ``data[a:b]`` of the document ``data[lo:hi]``."""
    word, _, whole = _arithmetic()
    add, _, _ = _table_functions()
    character_at = cuda.jit(device=True, inline="always")(tokens.character_at)
    low_letters, high_letters = (int.from_bytes(word_table()[k : k + 8].tobytes(), "little") for k in (0, 8))

    @cuda.jit(device=True, inline="always")
    def letter(code: Any, letters: Any) -> Any:
        """Whether a character belongs to words."""
        if code < 64:
            return word(low_letters) >> word(code) & word(1) != word(0)
        if code < 128:
            return word(high_letters) >> word(code - 64) & word(1) != word(0)
        return whole(letters[word(code >> 3)]) >> (code & 7) & 1 != 0

    @cuda.jit(device=True, inline="always")
    def step_from(data: Any, i: Any, hi: Any) -> Any:
        """As `tokens.character_at`, where a step begins for certain."""
        first = whole(data[word(i)])
        if first < 0x80:
            return whole(1 << CODE_BITS) | first
        return whole(character_at(data, i, i, hi))

    @cuda.jit(device=True, inline="always")
    def first_step(data: Any, i: Any, b: Any, lo: Any, hi: Any) -> Any:
        """The first place from ``i`` on at which a step begins; ``b`` or above where none does."""
        while i < b and whole(data[word(i)]) >= 0x80 and whole(character_at(data, i, lo, hi)) == 0:
            i += 1
        return i

    @cuda.jit(device=True, inline="always")
    def word_end(data: Any, i: Any, hi: Any, most: Any, letters: Any) -> Any:
        """Where a word ends that goes on at ``i``; ``most`` or above where it goes on there."""
        while i < most and i < hi:
            step = step_from(data, i, hi)
            if not letter(step & CODE_MASK, letters):
                break
            i += step >> CODE_BITS
        return i

    @cuda.jit(device=True, inline="always")
    def in_words(
        data: Any, a: Any, b: Any, lo: Any, hi: Any, n: Any, longest: Any, letters: Any, hash_mask: Any,
        slots: Any, slot_count: Any, probes: Any, longs: Any, control: Any, cache_keys: Any, cache_counts: Any,
    ) -> Any:  # fmt: skip
        i = first_step(data, a, b, lo, hi)
        if lo < i < b:
            before = i - 1
            while whole(data[word(before)]) >= 0x80 and whole(character_at(data, before, lo, hi)) == 0:
                before -= 1
            if letter(step_from(data, before, hi) & CODE_MASK, letters):
                i = word_end(data, i, hi, b, letters)
        while i < b:
            step = step_from(data, i, hi)
            if not letter(step & CODE_MASK, letters):
                i += step >> CODE_BITS
                continue
            end = word_end(data, i, hi, i + longest + 1, letters)
            if end - i > longest:
                longs[word(cuda.atomic.add(control, LONG, 1))] = i
                i = word_end(data, end, hi, b, letters)
            else:
                add(
                    data, i, end - i, hash_mask, slots, slot_count, probes, control, cache_keys, cache_counts,
                )  # fmt: skip
                i = end

    @cuda.jit(device=True, inline="always")
    def in_lines(
        data: Any, a: Any, b: Any, lo: Any, hi: Any, n: Any, longest: Any, letters: Any, hash_mask: Any,
        slots: Any, slot_count: Any, probes: Any, longs: Any, control: Any, cache_keys: Any, cache_counts: Any,
    ) -> Any:  # fmt: skip
        i = a
        while i < b:
            begins = i == lo
            if not begins:
                before = whole(data[word(i - 1)])
                begins = before == 10 or (before == 13 and whole(data[word(i)]) != 10)
            if not begins:
                i += 1
                continue
            end = i
            while end < hi and end <= i + longest:
                byte = whole(data[word(end)])
                if byte == 10 or byte == 13:
                    break
                end += 1
            if end - i > longest:
                longs[word(cuda.atomic.add(control, LONG, 1))] = i
            else:
                add(
                    data, i, end - i, hash_mask, slots, slot_count, probes, control, cache_keys, cache_counts,
                )  # fmt: skip
            i = max(i + 1, end)

    @cuda.jit(device=True, inline="always")
    def in_characters(
        data: Any, a: Any, b: Any, lo: Any, hi: Any, n: Any, longest: Any, letters: Any, hash_mask: Any,
        slots: Any, slot_count: Any, probes: Any, longs: Any, control: Any, cache_keys: Any, cache_counts: Any,
    ) -> Any:  # fmt: skip
        i = first_step(data, a, b, lo, hi)
        # The n characters from i on end at ``end``, of which `have` are known.
        end = i
        have = whole(0)
        while i < b:
            while have < n and end < hi:
                end += step_from(data, end, hi) >> CODE_BITS
                have += 1
            if have < n:
                break
            add(
                data, i, end - i, hash_mask, slots, slot_count, probes, control, cache_keys, cache_counts,
            )  # fmt: skip
            i += step_from(data, i, hi) >> CODE_BITS
            have -= 1

    @cuda.jit(device=True, inline="always")
    def in_bytes(
        data: Any, a: Any, b: Any, lo: Any, hi: Any, n: Any, longest: Any, letters: Any, hash_mask: Any,
        slots: Any, slot_count: Any, probes: Any, longs: Any, control: Any, cache_keys: Any, cache_counts: Any,
    ) -> Any:  # fmt: skip
        for i in range(a, min(b, hi - n + 1)):
            add(data, i, n, hash_mask, slots, slot_count, probes, control, cache_keys, cache_counts)

    return dict(zip(UNITS, (in_words, in_lines, in_characters, in_bytes), strict=True))[unit]


def count_function(unit: str) -> Callable[..., None]:
    """The plain function of the kernel that counts tokens of a unit, by itself or by n.

    data: uint8, the text. edges: int64[documents + 1], where each document begins and the last ends. Counted are the
    tokens that begin in ``data[start:stop]``, from tile ``control[NEXT]`` on. longest: bytes of a token, at most
    `LONGEST`; where the last document goes on behind its edge, it has `AFTER` bytes behind ``stop``. letters:
    `word_table`, of words alone. hash_mask: all ones; less makes tokens collide. slots: uint64[2 * (slot_count + left)]
    with ``slot_count`` a power of two and ``left`` what `left_slots` says; a key and a count each, of which new ones
    are zero. probes: slots that are looked at. longs: int64, places of tokens that are too long, room for
    `most_longs`. control: int64[CONTROLS]. Block: THREADS; shared memory: 24 KiB; any number of blocks.
    """
    word, _, whole = _arithmetic()
    _, hash_of, insert = _table_functions()
    segment = _segment_function(unit)
    u64, i32, i64 = numba.uint64, numba.int32, numba.int64
    document_at = cuda.jit(device=True, inline="always")(tokens.document_at)

    def count_tokens(
        data: Any, edges: Any, start: Any, stop: Any, n: Any, longest: Any, letters: Any, hash_mask: Any,
        slots: Any, slot_count: Any, probes: Any, longs: Any, control: Any,
    ) -> None:  # fmt: skip
        cache_keys = cuda.shared.array(CACHE, u64)
        cache_counts = cuda.shared.array(CACHE, i32)
        turn = cuda.shared.array(1, i64)
        thread = whole(cuda.threadIdx.x)
        every = word(hash_mask)
        for line in range(thread, CACHE, THREADS):
            cache_keys[line] = word(0)
            cache_counts[line] = 0
        while True:
            if thread == 0:
                turn[0] = -1
                if cuda.atomic.add(control, FULL, 0) == 0:
                    turn[0] = cuda.atomic.add(control, NEXT, 1)
            cuda.syncthreads()  # the turn is known, and in the beginning the block's table empty
            tile = whole(turn[0])
            cuda.syncthreads()  # all know it before the next one is taken
            if tile < 0 or start + tile * TILE >= stop:
                break
            i = start + tile * TILE + thread * SPAN
            b = min(i + SPAN, stop)
            document = whole(0)
            if i < b:
                document = whole(document_at(edges, i))
            while i < b:
                lo, hi = whole(edges[word(document)]), whole(edges[word(document + 1)])
                if i < hi:
                    segment(
                        data, i, min(b, hi), lo, hi, n, longest, letters, every, slots, slot_count, probes,
                        longs, control, cache_keys, cache_counts,
                    )  # fmt: skip
                    i = min(b, hi)
                document += 1
        # The barrier above has let all threads finish their tokens.
        for line in range(thread, CACHE, THREADS):
            key = word(cache_keys[line])
            if key != word(0):
                count = word(cache_counts[line])
                insert(data, key, hash_of(data, key, every), count, slots, slot_count, probes, control)

    return count_tokens


def lost_function() -> Callable[..., None]:
    """The plain function of the kernel that counts malformed sequences of UTF-8 that begin in ``data[start:stop]``,
    and adds their number to ``control[LOST]``. Arguments as of `count_function`."""
    word, _, whole = _arithmetic()
    character_at = cuda.jit(device=True, inline="always")(tokens.character_at)
    document_at = cuda.jit(device=True, inline="always")(tokens.document_at)

    def count_lost(data: Any, edges: Any, start: Any, stop: Any, control: Any) -> None:
        lost = whole(0)
        begin = start + whole(cuda.grid(1)) * SPAN
        while begin < stop:
            document = whole(-1)
            for i in range(begin, min(begin + SPAN, stop)):
                first = whole(data[word(i)])
                if first >= 0x80:
                    if document < 0:
                        document = whole(document_at(edges, i))
                    while whole(edges[word(document + 1)]) <= i:
                        document += 1
                    lo, hi = whole(edges[word(document)]), whole(edges[word(document + 1)])
                    step = whole(character_at(data, i, lo, hi))
                    # U+FFFD itself has three bytes and begins with EF, as no other sequence that is read so.
                    if step & CODE_MASK == REPLACEMENT and not (step >> CODE_BITS == 3 and first == 0xEF):
                        lost += 1
            begin += whole(cuda.gridsize(1)) * SPAN
        if lost:
            cuda.atomic.add(control, LOST, lost)

    return count_lost


@functools.cache
def _entry_functions() -> tuple[Any, Any, Any]:
    """Inside a kernel: of a key its token's length, its first two bytes, and the token itself."""
    word, _, whole = _arithmetic()

    @cuda.jit(device=True, inline="always")
    def length_of(key: Any) -> Any:
        if key & word(1) == word(0):
            return whole(key >> word(1) & word(0xF)) - 1
        return whole(key >> word(PLACE_BITS + 1) & word(0xFFFF))

    @cuda.jit(device=True, inline="always")
    def prefix_of(data: Any, key: Any) -> Any:
        """Its first two bytes, as far as there are, as a number that grows as they do."""
        if key & word(1) == word(0):
            return whole(key >> word(48))
        start = key >> word(1) & word(MOST_TEXT_NBYTES - 1)
        return whole(data[start]) << 8 | whole(data[start + word(1)])

    @cuda.jit(device=True, inline="always")
    def copy_token(data: Any, key: Any, length: Any, out: Any, place: Any) -> Any:
        if key & word(1) == word(0):
            for k in range(length):
                out[word(place + k)] = key >> word(56 - 8 * k) & word(0xFF)
            return
        start = whole(key >> word(1) & word(MOST_TEXT_NBYTES - 1))
        for k in range(length):
            out[word(place + k)] = data[word(start + k)]

    return length_of, prefix_of, copy_token


def measure_function() -> Callable[..., None]:
    """The plain function of the kernel that measures what a table holds, by its tokens' first two bytes.

    Of the first ``used`` slots those with a key are counted: to ``sizes``, int64[2 * PREFIXES], are added how many
    begin so, and in the second half their bytes. Any grid and block.
    """
    word, _, whole = _arithmetic()
    length_of, prefix_of, _ = _entry_functions()

    def measure(data: Any, slots: Any, used: Any, sizes: Any) -> None:
        at = whole(cuda.grid(1))
        while at < used:
            key = word(slots[word(2 * at)])
            if key != word(0):
                prefix = prefix_of(data, key)
                cuda.atomic.add(sizes, prefix, 1)
                cuda.atomic.add(sizes, prefix + PREFIXES, length_of(key))
            at += whole(cuda.gridsize(1))

    return measure


def drain_function() -> Callable[..., None]:
    """The plain function of the kernel that lists what a table holds.

    Of the first ``used`` slots those with a key are written, with their first two bytes in order: the tokens' bytes to
    ``out``, and to ``entries``, int64[(slots, 3)], where each begins there, its length and its count. ``places``,
    int64[2 * PREFIXES], says where those go that begin so, the first of them; it is written. Any grid and block.
    """
    word, _, whole = _arithmetic()
    length_of, prefix_of, copy_token = _entry_functions()

    def drain(data: Any, slots: Any, used: Any, places: Any, out: Any, entries: Any) -> None:
        at = whole(cuda.grid(1))
        while at < used:
            key = word(slots[word(2 * at)])
            if key != word(0):
                prefix, length = prefix_of(data, key), length_of(key)
                entry = whole(cuda.atomic.add(places, prefix, 1))
                place = whole(cuda.atomic.add(places, prefix + PREFIXES, length))
                entries[word(entry), 0] = place
                entries[word(entry), 1] = length
                entries[word(entry), 2] = whole(slots[word(2 * at + 1)])
                copy_token(data, key, length, out, place)
            at += whole(cuda.gridsize(1))

    return drain


_BYTES, _PLACES = numba.types.Array(numba.uint8, 1, "C"), numba.types.Array(numba.int64, 1, "C")
_SLOTS, _NUMBER = numba.types.Array(numba.uint64, 1, "C"), numba.int64
_ROWS = numba.types.Array(numba.int64, 2, "C")


def count_signature(unit: str) -> Any:
    numbers = (_NUMBER, _NUMBER, _NUMBER, _NUMBER)
    table = (numba.uint64, _SLOTS, _NUMBER, _NUMBER, _PLACES, _PLACES)
    return numba.void(_BYTES, _PLACES, *numbers, _BYTES, *table)


COUNT = Launcher(count_function, count_signature)
LOSSES = Launcher(lost_function, lambda: numba.void(_BYTES, _PLACES, _NUMBER, _NUMBER, _PLACES))
MEASURE = Launcher(measure_function, lambda: numba.void(_BYTES, _SLOTS, _NUMBER, _PLACES))
DRAIN = Launcher(drain_function, lambda: numba.void(_BYTES, _SLOTS, _NUMBER, _PLACES, _BYTES, _ROWS))


def left_slots(blocks: int) -> int:
    """Slots behind a table that so many blocks may need: of each, the tokens of a tile and its own table."""
    return blocks * (TILE + CACHE)


def most_longs(longest: int) -> int:
    """Tokens that are too long, of a text: each begins behind the one before it."""
    return MOST_TEXT_NBYTES // max(1, longest) + 2


def variants() -> Iterable[Variant]:
    """What tests compile to machine code."""
    for unit in UNITS:
        yield COUNT.variant(f"count tokens: {unit}", unit)
    yield LOSSES.variant("malformed sequences")
    yield MEASURE.variant("measure a table of tokens")
    yield DRAIN.variant("drain a table of tokens")
