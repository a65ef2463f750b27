"""Words, lines and n-grams found in a text on a GPU, and counted in a table there (`tables/device_table.py`).

One launch goes over the text. Every thread takes `SPAN` bytes and counts the tokens that begin there, by the rules and
the tables of the CPU's loops: what a token is does not depend on where threads, tiles or parts of a text begin. A token
of more than ``longest`` bytes is only noted, for the CPU to count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numba
from numba import cuda

from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.gpu.compiled import device_function
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.histograms import tokens
from tilewright.kernels.histograms.tables.device_keys import (
    BLANK,
    FNV_BASIS,
    LONGEST,
    arithmetic,
    keys,
    reading,
)
from tilewright.kernels.histograms.tables.device_table import (
    BYTES,
    CACHE,
    DRAIN,
    FULL,
    LONG,
    LOST,
    MEASURE,
    NEXT,
    NUMBER,
    PLACES,
    SLOTS,
    adding,
)
from tilewright.kernels.histograms.tokens import CODE_BITS, CODE_MASK, REPLACEMENT
from tilewright.kernels.passes.launcher import Launcher

THREADS = 8 if SIMULATOR else 256
SPAN = 8 if SIMULATOR else 32
"""Bytes whose tokens a thread counts of a tile."""
TILE = THREADS * SPAN
BLOCKS_PER_MULTIPROCESSOR = 6
MOST_BLOCKS = 1056
"""Eight for each of 132 multiprocessors: each takes room behind the table."""
AFTER = LONGEST + 32
"""Bytes that a text has behind what is counted, unless the document ends: of a token that has a key, and two steps of
the UTF-8 decoder more."""

FORMS = ("word", "words", "line", "character", "byte")
"""What kernels find: units by themselves, n-grams of words, lines, n-grams of characters and of bytes."""


def form_of(unit: str, n: int) -> str:
    return "words" if unit == "word" and n > 1 else unit


def _segment_function(form: str) -> Any:
    """Inside a kernel: count the tokens that begin in ``data[a:b]`` of the document ``data[lo:hi]``."""
    word, _, whole = arithmetic()
    step_from, is_letter, follows_letter, _ = reading()
    of = keys(form == "words")
    key_of, push, finish = of.key_of, of.push, of.finish
    count_once = adding(form == "words")[1]
    character_at = device_function(tokens.character_at)

    @device_function
    def first_step(data: Any, i: Any, b: Any, lo: Any, hi: Any) -> Any:
        """The first place from ``i`` on at which a step begins; ``b`` or above where none does."""
        while i < b and whole(data[word(i)]) >= 0x80 and whole(character_at(data, i, lo, hi)) == 0:
            i += 1
        return i

    @device_function
    def word_end(data: Any, i: Any, hi: Any, most: Any, letters: Any) -> Any:
        """Where a word ends that goes on at ``i``; ``most`` or above where it goes on there."""
        while i < most and i < hi:
            step = step_from(data, i, hi)
            if not is_letter(step, letters):
                break
            i += step >> CODE_BITS
        return i

    @device_function
    def in_words(
        text: Any, a: Any, b: Any, lo: Any, hi: Any, longest: Any, longs: Any, table: Any, own: Any
    ) -> Any:
        data, _, _, letters, hash_mask = text
        i = first_step(data, a, b, lo, hi)
        if i < b and follows_letter(data, i, lo, hi, letters):
            i = word_end(data, i, hi, b, letters)
        while i < b:
            step = step_from(data, i, hi)
            if not is_letter(step, letters):
                i += step >> CODE_BITS
                continue
            end = word_end(data, i, hi, i + longest + 1, letters)
            if end - i > longest:
                longs[word(cuda.atomic.add(table[3], LONG, 1))] = i
                i = word_end(data, end, hi, b, letters)
            else:
                key, hashed = key_of(data, i, end - i, hash_mask)
                count_once(text, key, hashed, table, own)
                i = end

    @device_function
    def in_ngrams_of_words(
        text: Any, a: Any, b: Any, lo: Any, hi: Any, longest: Any, longs: Any, table: Any, own: Any
    ) -> Any:
        data, _, n, letters, hash_mask = text
        start = first_step(data, a, b, lo, hi)
        passing = start < b and follows_letter(data, start, lo, hi, letters)
        while start < b:
            # From where a word begins to the end of the n-th, or where none begins, one character.
            i = start
            words, length = whole(0), whole(0)
            following = whole(-1)  # behind the first word, or the character
            key, hashed = word(0), word(FNV_BASIS)
            before, ends, is_long = False, False, False
            while not ends:
                inside = False
                step_length = whole(1)
                if i < hi:
                    step = step_from(data, i, hi)
                    inside = is_letter(step, letters)
                    step_length = step >> CODE_BITS
                if i == start and (passing or not inside):
                    passing = passing and inside
                    following = i + step_length
                    ends = True
                elif inside:
                    if not before and words > 0:
                        key, hashed, length = push(BLANK, key, hashed, length)
                    for k in range(step_length):
                        key, hashed, length = push(data[word(i + k)], key, hashed, length)
                    before = True
                    if i + step_length - start > longest:
                        ends, is_long = True, True
                else:
                    if before:
                        words += 1
                        if words == 1:
                            following = i
                    before = False
                    if words == n or i >= hi:
                        ends = True
                    elif i - start > longest:
                        ends, is_long = True, True
                i += step_length
            if words == n:
                key, hashed = finish(start, key, hashed, length, hash_mask)
                count_once(text, key, hashed, table, own)
            elif is_long:
                longs[word(cuda.atomic.add(table[3], LONG, 1))] = start
            if following < 0:
                following = i
                passing = True
            start = following

    @device_function
    def in_lines(
        text: Any, a: Any, b: Any, lo: Any, hi: Any, longest: Any, longs: Any, table: Any, own: Any
    ) -> Any:
        data, _, _, _, hash_mask = text
        i = a
        while i < b:
            begins = i == lo
            if not begins:
                before = whole(data[word(i - 1)])
                begins = before == 10 or (before == 13 and whole(data[word(i)]) != 10)
            if begins:
                end = i
                key, hashed, length = word(0), word(FNV_BASIS), whole(0)
                while end < hi and length <= longest:
                    byte = whole(data[word(end)])
                    if byte == 10 or byte == 13:
                        break
                    key, hashed, length = push(byte, key, hashed, length)
                    end += 1
                if length > longest:
                    longs[word(cuda.atomic.add(table[3], LONG, 1))] = i
                else:
                    key, hashed = finish(i, key, hashed, length, hash_mask)
                    count_once(text, key, hashed, table, own)
                i = max(i + 1, end)
            else:
                i += 1

    @device_function
    def in_characters(
        text: Any, a: Any, b: Any, lo: Any, hi: Any, longest: Any, longs: Any, table: Any, own: Any
    ) -> Any:
        data, _, n, _, hash_mask = text
        i = first_step(data, a, b, lo, hi)
        # Of the n characters from i on, that end at `end`, `have` are known.
        end = i
        have = whole(0)
        while i < b:
            while have < n and end < hi:
                end += step_from(data, end, hi) >> CODE_BITS
                have += 1
            if have < n:
                break
            key, hashed = key_of(data, i, end - i, hash_mask)
            count_once(text, key, hashed, table, own)
            i += step_from(data, i, hi) >> CODE_BITS
            have -= 1

    @device_function
    def in_bytes(
        text: Any, a: Any, b: Any, lo: Any, hi: Any, longest: Any, longs: Any, table: Any, own: Any
    ) -> Any:
        data, _, n, _, hash_mask = text
        for i in range(a, min(b, hi - n + 1)):
            key, hashed = key_of(data, i, n, hash_mask)
            count_once(text, key, hashed, table, own)

    found = (in_words, in_ngrams_of_words, in_lines, in_characters, in_bytes)
    return dict(zip(FORMS, found, strict=True))[form]


def count_function(form: str) -> Callable[..., None]:
    """The plain function of the kernel that counts tokens of a form, n-grams of n units.

    data: uint8, the text. edges: int64[documents + 1], where each document begins and the last ends. Counted are the
    tokens that begin in ``data[start:stop]``, from tile ``control[NEXT]`` on. longest: bytes of a token, at most
    `LONGEST`; where the last document goes on behind its edge, it has `AFTER` bytes behind ``stop``. letters:
    `word_table`, of words alone. hash_mask: all ones; less makes tokens collide. slots: uint64[2 * (slot_count + left)]
    with ``slot_count`` a power of two and ``left`` what `left_slots` says; a key and a count each, of which new ones
    are zero. probes: slots that are looked at. longs: int64, written: places of tokens that are too long, room for
    `most_longs`. control: int64[CONTROLS]. Block: THREADS; shared memory: 24 KiB; any number of blocks.
    """
    word, _, whole = arithmetic()
    hash_of = keys(form == "words").hash_of
    insert = adding(form == "words")[0]
    document_at = reading().document_at
    segment = _segment_function(form)
    u64, i32, i64 = numba.uint64, numba.int32, numba.int64

    def count_tokens(
        data: Any, edges: Any, start: Any, stop: Any, n: Any, longest: Any, letters: Any, hash_mask: Any,
        slots: Any, slot_count: Any, probes: Any, longs: Any, control: Any,
    ) -> None:  # fmt: skip
        own_keys = cuda.shared.array(CACHE, u64)
        own_counts = cuda.shared.array(CACHE, i32)
        turn = cuda.shared.array(1, i64)
        thread = whole(cuda.threadIdx.x)
        text = (data, edges, n, letters, word(hash_mask))
        table = (slots, slot_count, probes, control)
        own = (own_keys, own_counts)
        for line in range(thread, CACHE, THREADS):
            own_keys[line] = word(0)
            own_counts[line] = 0
        while True:
            # All know the last turn, and have put its tokens into the table, or behind it and said so: of one tile at
            # most a block has tokens there. In the beginning its own table is empty.
            cuda.syncthreads()
            if thread == 0:
                turn[0] = -1
                if cuda.atomic.add(control, FULL, 0) == 0:
                    turn[0] = cuda.atomic.add(control, NEXT, 1)
            cuda.syncthreads()
            tile = whole(turn[0])
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
                    segment(text, i, min(b, hi), lo, hi, longest, longs, table, own)
                    i = min(b, hi)
                document += 1
        # The barriers above have let all threads finish their tokens.
        for line in range(thread, CACHE, THREADS):
            key = word(own_keys[line])
            if key != word(0):
                insert(text, key, hash_of(text, key), word(own_counts[line]), table)

    return count_tokens


def lost_function() -> Callable[..., None]:
    """The plain function of the kernel that counts malformed sequences of UTF-8 that begin in ``data[start:stop]``,
    and adds their number to ``control[LOST]``. Arguments as of `count_function`. Any grid and block."""
    word, _, whole = arithmetic()
    character_at = device_function(tokens.character_at)
    document_at = reading().document_at

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


def count_signature(form: str) -> Any:
    numbers = (NUMBER, NUMBER, NUMBER, NUMBER)
    table = (numba.uint64, SLOTS, NUMBER, NUMBER, PLACES, PLACES)
    return numba.void(BYTES, PLACES, *numbers, BYTES, *table)


COUNT = Launcher(count_function, count_signature)
LOSSES = Launcher(lost_function, lambda: numba.void(BYTES, PLACES, NUMBER, NUMBER, PLACES))


def left_slots(blocks: int) -> int:
    """Slots behind a table that so many blocks may need: of each, the tokens of a tile and its own table."""
    return blocks * (TILE + CACHE)


def most_longs(nbytes: int, n: int, longest: int) -> int:
    """How many tokens of a text may be too long. Of the n units of one and what is between them, one is longer than its
    share; that is in n of them at most."""
    return min(nbytes, n * (nbytes // (longest // (2 * n) + 1) + 1))


def variants() -> Iterable[Variant]:
    """What tests compile to machine code."""
    for form in FORMS:
        yield COUNT.variant(f"count tokens: {form}", form)
    yield LOSSES.variant("malformed sequences")
    for ngrams in (False, True):
        yield MEASURE.variant(f"measure a table of tokens{', of words' if ngrams else ''}", ngrams)
        yield DRAIN.variant(f"drain a table of tokens{', of words' if ngrams else ''}", ngrams)
