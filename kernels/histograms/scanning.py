"""The loops that find words, lines and n-grams in a text and count them in tables.

A loop is given ``data[i:hi]`` and counts the tokens that begin before ``limit``, where none is under way at ``i``. It
stops where it cannot go on, and returns why (`DONE`, `MORE`, `ROOM`, `FULL`) and where the next call is to begin.
``final`` says that the document ends at ``hi``; else a token that reaches ``hi`` may go on behind it.

Words are found 64 bytes at a time, in masks with a bit a byte. Bytes of ASCII get theirs from vector instructions, all
others from the decoder of UTF-8.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.vectors import LANES, break_mask, high_mask, trailing_zeros, word_mask
from tilewright.kernels.histograms.host import character_at
from tilewright.kernels.histograms.token_table import add_at, entry_of, key_entry
from tilewright.kernels.histograms.tokens import CODE_BITS, CODE_MASK, REPLACEMENT

DONE, MORE, ROOM, FULL = range(4)
"""Why a loop returned: all is counted; the token that begins there needs bytes behind ``hi``; the table has no room for
the token that begins there; the array of units is full."""

CUT = 1 << 31
"""In what `step_at` returns: the sequence is whole so far, and ends with the data."""


@kept
@njit(nogil=True)
def step_at(data, p, hi):  # type: ignore[no-untyped-def]
    """The step of the UTF-8 decoder that begins at byte p, in the form of `tokens.character_at`, and with `CUT` where
    more bytes might make it another one."""
    first = np.int64(data[p])
    if first < 0x80:
        return np.int64(1 << CODE_BITS | first)
    if first < 0xC2 or first > 0xF4:
        return np.int64(1 << CODE_BITS | REPLACEMENT)
    low = 0x80
    high = 0xBF
    following = 1
    if first >= 0xE0:
        following = 2
    if first >= 0xF0:
        following = 3
    if first == 0xE0:
        low = 0xA0
    elif first == 0xED:
        high = 0x9F
    elif first == 0xF0:
        low = 0x90
    elif first == 0xF4:
        high = 0x8F
    code = first & (0x3F >> following)
    length = 1
    while length <= following:
        if p + length >= hi:
            return np.int64(CUT | length << CODE_BITS | REPLACEMENT)
        byte = np.int64(data[p + length])
        if byte < low or byte > high:
            return np.int64(length << CODE_BITS | REPLACEMENT)
        code = code << 6 | byte & 0x3F
        low = 0x80
        high = 0xBF
        length += 1
    return np.int64(length << CODE_BITS | code)


@kept
@njit(nogil=True)
def scan_words(  # type: ignore[no-untyped-def]
    data, i, hi, limit, final, letters, units, m, slots, shift, starts, lengths, arena, counts, touched, state
):
    """Count words. Where ``units`` has a length, their entries go there from place ``m`` on.

    Returns why it stopped, where to go on, and the place behind the last unit.
    """
    wanted = len(units)
    inside = False  # whether a word is under way, which began at `start`
    start = i
    block = i
    following = i  # the first byte behind the last character that is not ASCII ...
    covered = i  # ... and the same if it belongs to a word
    while block < hi and (inside or block < limit):
        size = hi - block
        if size >= LANES:
            size = LANES
            mask = word_mask(data, block)
            high = high_mask(data, block)
        else:
            mask = uint64(0)
            high = uint64(0)
            for k in range(size):
                byte = data[block + k]
                if byte >= 0x80:
                    high |= uint64(1) << uint64(k)
                elif letters[byte >> 3] >> (byte & 7) & 1:
                    mask |= uint64(1) << uint64(k)
        if high:
            if covered > block:
                mask |= (uint64(1) << uint64(covered - block)) - uint64(1)
            while high:
                p = block + np.int64(trailing_zeros(high))
                high &= high - uint64(1)
                if p < following:
                    continue
                step = step_at(data, p, hi)
                if step & CUT and not final:
                    # What is behind p is not there yet.
                    hi = p
                    size = p - block
                    if size < LANES:
                        mask &= (uint64(1) << uint64(size)) - uint64(1)
                    break
                length = (step & (CUT - 1)) >> CODE_BITS
                following = p + length
                code = step & CODE_MASK
                if letters[code >> 3] >> (code & 7) & 1:
                    covered = following
                    k = uint64(p - block)
                    mask |= ((uint64(1) << uint64(length)) - uint64(1)) << k
        # A bit for each place where a word begins or ends.
        edges = mask ^ (mask << uint64(1) | (uint64(1) if inside else uint64(0)))
        if size < LANES:
            edges &= (uint64(1) << uint64(size)) - uint64(1)
        while edges:
            p = block + np.int64(trailing_zeros(edges))
            edges &= edges - uint64(1)
            if not inside:
                if p >= limit:
                    return DONE, p, m
                start = p
                inside = True
                if edges == 0:
                    break
                p = block + np.int64(trailing_zeros(edges))
                edges &= edges - uint64(1)
            inside = False
            if wanted and m == wanted:
                return FULL, start, m
            entry = entry_of(data, start, p - start, slots, shift, starts, lengths, arena, state)
            if entry < 0:
                return ROOM, start, m
            add_at(entry, 1, counts, touched, state)
            if wanted:
                units[m] = entry
                m += 1
        block += LANES
    if inside:
        if not final:
            return MORE, start, m
        if wanted and m == wanted:
            return FULL, start, m
        entry = entry_of(data, start, hi - start, slots, shift, starts, lengths, arena, state)
        if entry < 0:
            return ROOM, start, m
        add_at(entry, 1, counts, touched, state)
        if wanted:
            units[m] = entry
            m += 1
        return DONE, hi, m
    if hi < limit and not final:
        return MORE, hi, m  # a character that is cut off, or nothing
    return DONE, max(min(block, hi), following), m


@kept
@njit(nogil=True)
def scan_lines(  # type: ignore[no-untyped-def]
    data, i, hi, limit, final, slots, shift, starts, lengths, arena, counts, touched, state
):
    """Count lines as `scan_words` counts words: one begins at ``i``. Returns why it stopped, and where to go on."""
    start = i
    block = i
    while block < hi and start < limit:
        size = hi - block
        if size >= LANES:
            mask = break_mask(data, block)
        else:
            mask = uint64(0)
            for k in range(size):
                if data[block + k] == 10 or data[block + k] == 13:
                    mask |= uint64(1) << uint64(k)
        while mask:
            p = block + np.int64(trailing_zeros(mask))
            mask &= mask - uint64(1)
            if p < start:
                continue  # the line feed behind a carriage return
            if start >= limit:
                return DONE, start
            after = p + 1
            if data[p] == 13:
                if after < hi:
                    if data[after] == 10:
                        after += 1
                elif not final:
                    return MORE, start
            entry = entry_of(data, start, p - start, slots, shift, starts, lengths, arena, state)
            if entry < 0:
                return ROOM, start
            add_at(entry, 1, counts, touched, state)
            start = after
        block += LANES
    if start < hi and start < limit:
        if not final:
            return MORE, start
        entry = entry_of(data, start, hi - start, slots, shift, starts, lengths, arena, state)
        if entry < 0:
            return ROOM, start
        add_at(entry, 1, counts, touched, state)
        start = hi
    if start < limit and not final:
        return MORE, start
    return DONE, start


@kept
@njit(nogil=True)
def decode_characters(data, i, hi, limit, final, units):  # type: ignore[no-untyped-def]
    """Put the code points of the characters that begin in ``data[i:min(hi, limit)]`` into ``units``, uint32; a
    character begins at ``i``. Returns why it stopped, where to go on, and how many there are."""
    m = 0
    end = min(hi, limit)
    while i < end:
        if m == len(units):
            return FULL, i, m
        if data[i] < 0x80:
            units[m] = data[i]
            i += 1
        else:
            step = step_at(data, i, hi)
            if step & CUT and not final:
                return MORE, i, m
            units[m] = step & CODE_MASK
            i += (step & (CUT - 1)) >> CODE_BITS
        m += 1
    if hi < limit and not final:
        return MORE, i, m
    return DONE, i, m


@kept
@njit(nogil=True)
def count_ngrams(  # type: ignore[no-untyped-def]
    units, first, last, n, bits, rolling, slots, shift, counts, touched, state
):
    """Count the n-grams that end in ``units[first:last]``, by keys of n numbers of ``bits`` bits each.

    ``rolling``, uint64[3], holds the key (k1, k0) of the last units, and how many of them there are. Returns the place
    of the first unit whose n-gram has no room.
    """
    k1 = rolling[0]
    k0 = rolling[1]
    have = np.int64(rolling[2])
    width = n * bits
    one = uint64(1)
    if width >= 64:
        mask_0 = ~uint64(0)
        mask_1 = (one << uint64(width - 64)) - one
    else:
        mask_0 = (one << uint64(width)) - one
        mask_1 = uint64(0)
    room = len(counts)
    place = first
    while place < last:
        new_1 = (k1 << uint64(bits) | k0 >> uint64(64 - bits)) & mask_1
        new_0 = (k0 << uint64(bits) | uint64(units[place])) & mask_0
        if have >= n - 1:
            entry = key_entry(new_0, new_1, slots, shift, room, state)
            if entry < 0:
                break
            add_at(entry, 1, counts, touched, state)
        k1 = new_1
        k0 = new_0
        have += 1
        place += 1
    rolling[0] = k1
    rolling[1] = k0
    rolling[2] = uint64(have)
    return place


@kept
@njit(nogil=True)
def first_character(data, i):  # type: ignore[no-untyped-def]
    """The first place from byte i on at which a character begins, and the code of the one before it, -1 where there is
    none. ``data`` begins eight bytes before i, or with the document."""
    for j in range(i - 1, max(i - 5, -1), -1):
        step = character_at(data, j, 0, len(data))
        if step:
            return max(i, j + (step >> CODE_BITS)), step & CODE_MASK
    return i, -1


@kept
@njit(nogil=True)
def first_outside_word(data, i, hi, letters):  # type: ignore[no-untyped-def]
    """The first place from byte i on, of a part as of `first_character`, at which no word is under way that began
    before i; ``hi`` or above where it goes on as far as there are bytes."""
    if i == 0:
        return i
    i, before = first_character(data, i)
    if before < 0 or not letters[before >> 3] >> (before & 7) & 1:
        return i
    while i < hi:
        step = step_at(data, i, hi)
        code = step & CODE_MASK
        if step & CUT or not letters[code >> 3] >> (code & 7) & 1:
            return hi if step & CUT else i
        i += step >> CODE_BITS
    return i


@kept
@njit(nogil=True)
def first_line(data, i, hi):  # type: ignore[no-untyped-def]
    """The first place from byte i on, of a part as of `first_character`, at which a line begins; ``hi`` or above where
    none does."""
    if i == 0 or data[i - 1] == 10 or (data[i - 1] == 13 and (i >= hi or data[i] != 10)):
        return i
    while i < hi:
        if data[i] == 10:
            return i + 1
        if data[i] == 13:
            return i + 2 if i + 1 >= hi or data[i + 1] == 10 else i + 1
        i += 1
    return i
