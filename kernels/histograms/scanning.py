"""The loops that find words, lines and n-grams in a text and count them in tables.

A loop is given the bytes from ``i`` to ``hi`` and counts the tokens that begin before ``limit``, where none is under
way at ``i``. It stops where it cannot go on, and returns why (`DONE`, `MORE`, `ROOM`, `FULL`) and where the next call
is to begin. ``final`` says that the document ends at ``hi``; else a token that reaches ``hi`` may go on behind it.

Words are found 64 bytes at a time, in masks with a bit a byte. Bytes of ASCII get theirs from vector instructions, all
others from the decoder of UTF-8.

Texts and tables are given by their addresses (`tilewright.kernels.cpu.vectors` says why): ``i``, ``hi``, ``limit`` and
what is returned are addresses, too.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.vectors import (
    LANES,
    break_mask,
    high_mask,
    load_byte,
    load_int,
    trailing_zeros,
    word_mask,
)
from tilewright.kernels.histograms.host import character_at, whole_characters
from tilewright.kernels.histograms.tables.token_table import (
    BATCH,
    ENTRIES,
    SCRATCH,
    add_at,
    begin_of,
    count_batch,
    fetch_key,
    key_entry,
    put_in_batch,
    put_row,
)
from tilewright.kernels.histograms.tokens import CODE_BITS, CODE_MASK, REPLACEMENT

DONE, MORE, ROOM, FULL, NGRAMS = range(5)
"""Why a loop returned: all is counted; the token that begins there needs bytes behind ``hi``; the table has no room for
the token that begins there; the array of units, or that of rows, is full; the table of n-grams has no room."""

DOCUMENT, AT, FIRST, LAST, PLACE = range(5)
"""Where a loop of rows goes on: the document, the address there, the units that are found and not counted yet, and how
many entries of rows there are."""
STATE_LENGTH = 5

NO_WORD = 0xFFFFFFFF
"""Among numbers of words: a document ends here."""

CUT = 1 << 31
"""In what `step_at` returns: the sequence is whole so far, and ends with the data."""


@njit(nogil=True)
def step_at(p, hi):  # type: ignore[no-untyped-def]
    """The step of the UTF-8 decoder that begins at byte p, in the form of `tokens.character_at`, and with `CUT` where
    more bytes might make it another one."""
    first = load_byte(p)
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
        byte = load_byte(p + length)
        if byte < low or byte > high:
            return np.int64(length << CODE_BITS | REPLACEMENT)
        code = code << 6 | byte & 0x3F
        low = 0x80
        high = 0xBF
        length += 1
    return np.int64(length << CODE_BITS | code)


@njit(nogil=True)
def _of_words(block, two, three, four, letters):  # type: ignore[no-untyped-def]
    """A mask of the bytes of characters of two to four bytes that belong to words."""
    one = uint64(1)
    mask = uint64(0)
    while two:
        k = trailing_zeros(two)
        two &= two - one
        code = (load_byte(block + k) & 0x1F) << 6 | load_byte(block + k + 1) & 0x3F
        mask |= uint64(3 * (load_byte(letters + (code >> 3)) >> (code & 7) & 1)) << uint64(k)
    while three | four:
        k = trailing_zeros(three | four)
        code = step_at(block + k, block + LANES) & CODE_MASK
        is_word = load_byte(letters + (code >> 3)) >> (code & 7) & 1
        mask |= uint64((7 if three >> uint64(k) & one else 15) * is_word) << uint64(k)
        three &= ~(one << uint64(k))
        four &= ~(one << uint64(k))
    return mask


@njit(nogil=True)
def _count(table, tokens, lo, end, units, m):  # type: ignore[no-untyped-def]
    """Count the tokens of a batch, and put their entries into ``units`` from place m on where it has a length. Returns
    how many had room, and the place behind the last unit."""
    done = count_batch(table, tokens, lo, end)
    if len(units):
        entries = load_int(table + SCRATCH) + ENTRIES
        for k in range(done):
            units[m + k] = load_int(entries + 8 * k)
        m += done
    return done, m


@kept
@njit(nogil=True)
def scan_words(table, i, hi, limit, final, letters, units, m):  # type: ignore[no-untyped-def]
    """Count words. Where ``units`` has a length, their entries go there from place ``m`` on.

    Returns why it stopped, where to go on, and the place behind the last unit.
    """
    wanted = len(units)
    lo = i
    end = hi
    inside = False  # whether a word is under way, which began at `start`
    start = i
    block = i
    following = i  # the first byte behind the last character that is not ASCII
    waiting = np.int64(0)  # words that are in the batch
    while block < hi and (inside or block < limit):
        size = hi - block
        if size >= LANES:
            size = LANES
            mask = word_mask(block)
            high = high_mask(block)
        else:
            mask = uint64(0)
            high = uint64(0)
            for k in range(size):
                byte = load_byte(block + k)
                if byte >= 0x80:
                    high |= uint64(1) << uint64(k)
                elif load_byte(letters + (byte >> 3)) >> (byte & 7) & 1:
                    mask |= uint64(1) << uint64(k)
        if high:
            if size == LANES:
                _, two, three, four, whole = whole_characters(block)
                if whole:
                    mask |= _of_words(block, two, three, four, letters)
                    size = whole
                    high = uint64(0)
            while high:
                p = block + trailing_zeros(high)
                high &= high - uint64(1)
                if p < following:
                    continue
                step = step_at(p, hi)
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
                if load_byte(letters + (code >> 3)) >> (code & 7) & 1:
                    k = uint64(p - block)
                    mask |= ((uint64(1) << uint64(length)) - uint64(1)) << k
        # A bit for each place where a word begins or ends.
        edges = mask ^ (mask << uint64(1) | (uint64(1) if inside else uint64(0)))
        if size < LANES:
            edges &= (uint64(1) << uint64(size)) - uint64(1)
        while edges:
            p = block + trailing_zeros(edges)
            edges &= edges - uint64(1)
            if not inside:
                if p >= limit:
                    done, m = _count(table, waiting, lo, end, units, m)
                    if done < waiting:
                        return ROOM, begin_of(table, done), m
                    return DONE, p, m
                start = p
                inside = True
                if edges == 0:
                    break
                p = block + trailing_zeros(edges)
                edges &= edges - uint64(1)
            inside = False
            full = wanted and m + waiting >= wanted
            if full or waiting == BATCH:
                done, m = _count(table, waiting, lo, end, units, m)
                if done < waiting:
                    return ROOM, begin_of(table, done), m
                if full:
                    return FULL, start, m
                waiting = np.int64(0)
            put_in_batch(table, waiting, start, p - start)
            waiting += 1
        # A character that ends behind the block is of the word that is under way, or of none.
        block = max(block + size, following)
    done, m = _count(table, waiting, lo, end, units, m)
    if done < waiting:
        return ROOM, begin_of(table, done), m
    if inside:
        if not final:
            return MORE, start, m
        if wanted and m >= wanted:
            return FULL, start, m
        put_in_batch(table, np.int64(0), start, hi - start)
        done, m = _count(table, np.int64(1), lo, end, units, m)
        if done < 1:
            return ROOM, start, m
        return DONE, hi, m
    if hi < limit and not final:
        return MORE, hi, m  # a character that is cut off, or nothing
    return DONE, max(min(block, hi), following), m


@kept
@njit(nogil=True)
def scan_lines(table, i, hi, limit, final):  # type: ignore[no-untyped-def]
    """Count lines as `scan_words` counts words: one begins at ``i``. Returns why it stopped, and where to go on."""
    lo = i
    end = hi
    start = i
    block = i
    waiting = np.int64(0)  # lines that are in the batch
    while block < hi and start < limit:
        size = hi - block
        if size >= LANES:
            mask = break_mask(block)
        else:
            mask = uint64(0)
            for k in range(size):
                if load_byte(block + k) == 10 or load_byte(block + k) == 13:
                    mask |= uint64(1) << uint64(k)
        while mask:
            p = block + trailing_zeros(mask)
            mask &= mask - uint64(1)
            if p < start:
                continue  # the line feed behind a carriage return
            if start >= limit:
                break
            after = p + 1
            if load_byte(p) == 13:
                if after < hi:
                    if load_byte(after) == 10:
                        after += 1
                elif not final:
                    block = hi  # what is behind the carriage return is not there yet
                    break
            if waiting == BATCH:
                done = count_batch(table, waiting, lo, end)
                if done < waiting:
                    return ROOM, begin_of(table, done)
                waiting = np.int64(0)
            put_in_batch(table, waiting, start, p - start)
            waiting += 1
            start = after
        block += LANES
    done = count_batch(table, waiting, lo, end)
    if done < waiting:
        return ROOM, begin_of(table, done)
    if start < hi and start < limit:
        if not final:
            return MORE, start
        put_in_batch(table, np.int64(0), start, hi - start)
        if count_batch(table, np.int64(1), lo, end) < 1:
            return ROOM, start
        start = hi
    if start < limit and not final:
        return MORE, start
    return DONE, start


@kept
@njit(nogil=True)
def words_of_documents(table, lo, edges, document, at, most, letters, words, wanted, m):  # type: ignore[no-untyped-def]
    """Count the words of documents that lie one behind the other: document d is what is from address ``lo + edges[d]``
    to ``lo + edges[d + 1]``.

    From the byte at ``at`` on, which is of ``document``, and for about ``most`` bytes. Where ``words`` has a length, it
    gets their entries from place ``m`` on, `NO_WORD` before a document that others are before, and nothing behind place
    ``wanted`` but one of these. Returns why it stopped, the document and the place where to go on, and the place behind
    the last unit; with `DONE` at the end of all, or once so many bytes are counted.
    """
    units = words[:wanted]
    while document + 1 < len(edges):
        end = lo + edges[document + 1]
        if at == lo + edges[document] and m > 0 and len(words) and words[m - 1] != NO_WORD:
            words[m] = NO_WORD
            m += 1
        while at < end:
            if most <= 0:
                return DONE, document, at, m
            why, after, m = scan_words(table, at, end, min(end, at + most), True, letters, units, m)
            most -= after - at
            at = after
            if why != DONE:
                return why, document, at, m
        document += 1
        at = end
    return DONE, document, at, m


@kept
@njit(nogil=True)
def lines_of_documents(table, lo, edges, document, at, most):  # type: ignore[no-untyped-def]
    """The same of their lines. Numba compiles only one of the two where it is needed."""
    while document + 1 < len(edges):
        end = lo + edges[document + 1]
        while at < end:
            if most <= 0:
                return DONE, document, at
            why, after = scan_lines(table, at, end, min(end, at + most), True)
            most -= after - at
            at = after
            if why != DONE:
                return why, document, at
        document += 1
        at = end
    return DONE, document, at


@kept
@njit(nogil=True)
def decode_characters(i, hi, limit, final, units):  # type: ignore[no-untyped-def]
    """Put the code points of the characters that begin before ``hi`` and ``limit`` into ``units``, uint32; one begins
    at ``i``. Returns why it stopped, where to go on, and how many there are."""
    m = 0
    end = min(hi, limit)
    while i < end:
        if m == len(units):
            return FULL, i, m
        if load_byte(i) < 0x80:
            units[m] = load_byte(i)
            i += 1
        else:
            step = step_at(i, hi)
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
def decode_documents(lo, edges, document, at, units, begins):  # type: ignore[no-untyped-def]
    """The same for documents as of `words_of_documents`, from the byte at ``at`` on, which is of ``document``.
    Places in ``units`` at which a document begins go into ``begins``, int64, one longer.

    Returns the document and the place where to go on, and how many units and beginnings there are.
    """
    m = 0
    found = 0
    while document + 1 < len(edges):
        if at == lo + edges[document] and (found == 0 or begins[found - 1] < m):
            begins[found] = m
            found += 1
        end = lo + edges[document + 1]
        why, at, more = decode_characters(at, end, end, True, units[m:])
        m += more
        if why == FULL:
            break
        document += 1
        at = end
    return document, at, m, found


@kept
@njit(nogil=True)
def count_ngrams_between(table, units, first, last, begins, begin, n, bits, rolling):  # type: ignore[no-untyped-def]
    """`count_ngrams` of documents: ``begins[begin:]`` are the places at which one begins, ascending. Returns also how
    many of these have been passed."""
    while True:
        while begin < len(begins) and begins[begin] == first:
            rolling[:] = 0
            begin += 1
        if first >= last:
            return first, begin
        stop = last
        if begin < len(begins):
            stop = min(last, begins[begin])
        first = count_ngrams(table, units, first, stop, n, bits, rolling)
        if first < stop:
            return first, begin


@kept
@njit(nogil=True)
def count_ngrams(table, units, first, last, n, bits, rolling):  # type: ignore[no-untyped-def]
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
    place = first
    fetched = first
    next_1 = k1
    next_0 = k0
    while place < last:
        if place == fetched:
            # The slots of the next ones are fetched from memory at the same time.
            fetched = min(last, place + BATCH)
            for ahead in range(place, fetched):
                next_1 = (next_1 << uint64(bits) | next_0 >> uint64(64 - bits)) & mask_1
                next_0 = (next_0 << uint64(bits) | uint64(units[ahead])) & mask_0
                if have + ahead - place >= n - 1:
                    fetch_key(table, next_0, next_1)
        new_1 = (k1 << uint64(bits) | k0 >> uint64(64 - bits)) & mask_1
        new_0 = (k0 << uint64(bits) | uint64(units[place])) & mask_0
        if have >= n - 1:
            entry = key_entry(table, new_0, new_1)
            if entry < 0:
                break
            add_at(table, entry, 1)
        k1 = new_1
        k0 = new_0
        have += 1
        place += 1
    rolling[0] = k1
    rolling[1] = k0
    rolling[2] = uint64(have)
    return place


@njit(nogil=True)
def _end_row(table, state, end, columns, values, ends):  # type: ignore[no-untyped-def]
    """Put what a table has counted of a document that ends at ``end`` into rows, and have the next begin there; whether
    there was room."""
    place = put_row(table, columns, values, state[PLACE])
    if place < 0:
        return False
    ends[state[DOCUMENT]] = state[PLACE] = place
    state[DOCUMENT] += 1
    state[AT] = end
    return True


@kept
@njit(nogil=True)
def rows_of_words(table, lo, edges, letters, units, state, columns, values, ends):  # type: ignore[no-untyped-def]
    """Count the words of documents, as of `words_of_documents`, each by itself: what it holds goes into ``columns`` and
    ``values``, uint64 (`put_row`), and where that ends there into ``ends``, int64[documents].

    ``state``, int64[STATE_LENGTH], says where to begin, and then where to go on; ``units`` has no length. Returns why
    it stopped.
    """
    while state[DOCUMENT] + 1 < len(edges):
        end = lo + edges[state[DOCUMENT] + 1]
        while state[AT] < end:
            why, state[AT], _ = scan_words(table, state[AT], end, end, True, letters, units, 0)
            if why != DONE:
                return why
        if not _end_row(table, state, end, columns, values, ends):
            return FULL
    return DONE


@kept
@njit(nogil=True)
def rows_of_lines(table, lo, edges, state, columns, values, ends):  # type: ignore[no-untyped-def]
    """The same of their lines."""
    while state[DOCUMENT] + 1 < len(edges):
        end = lo + edges[state[DOCUMENT] + 1]
        while state[AT] < end:
            why, state[AT] = scan_lines(table, state[AT], end, end, True)
            if why != DONE:
                return why
        if not _end_row(table, state, end, columns, values, ends):
            return FULL
    return DONE


@njit(nogil=True)
def _count_found(grams, units, n, bits, rolling, state):  # type: ignore[no-untyped-def]
    """Count the n-grams that end in the units that were found; whether there was room for all."""
    state[FIRST] = count_ngrams(grams, units, state[FIRST], state[LAST], n, bits, rolling)
    return state[FIRST] == state[LAST]


@kept
@njit(nogil=True)
def rows_of_word_ngrams(  # type: ignore[no-untyped-def]
    table, grams, lo, edges, letters, units, n, bits, rolling, state, columns, values, ends
):
    """As `rows_of_words`, of n-grams of words, which the table ``grams`` counts by the words' numbers in the other.
    ``units``, uint32, is for those that are found before they are counted; ``rolling`` as of `count_ngrams`."""
    while state[DOCUMENT] + 1 < len(edges):
        end = lo + edges[state[DOCUMENT] + 1]
        while True:
            if not _count_found(grams, units, n, bits, rolling, state):
                return NGRAMS
            if state[AT] >= end:
                break
            why, state[AT], state[LAST] = scan_words(table, state[AT], end, end, True, letters, units, 0)
            state[FIRST] = 0
            if why == ROOM:
                return ROOM
        if not _end_row(grams, state, end, columns, values, ends):
            return FULL
        rolling[:] = 0
    return DONE


@kept
@njit(nogil=True)
def rows_of_character_ngrams(grams, lo, edges, units, n, bits, rolling, state, columns, values, ends):  # type: ignore[no-untyped-def]
    """The same of characters, whose numbers are their code points."""
    while state[DOCUMENT] + 1 < len(edges):
        end = lo + edges[state[DOCUMENT] + 1]
        while True:
            if not _count_found(grams, units, n, bits, rolling, state):
                return NGRAMS
            if state[AT] >= end:
                break
            _, state[AT], state[LAST] = decode_characters(state[AT], end, end, True, units)
            state[FIRST] = 0
        if not _end_row(grams, state, end, columns, values, ends):
            return FULL
        rolling[:] = 0
    return DONE


@kept
@njit(nogil=True)
def rows_of_byte_ngrams(grams, data, edges, n, bits, rolling, state, columns, values, ends):  # type: ignore[no-untyped-def]
    """The same of the bytes of ``data``, uint8, which are units themselves: `AT` is the place of one there."""
    while state[DOCUMENT] + 1 < len(edges):
        end = edges[state[DOCUMENT] + 1]
        state[FIRST], state[LAST] = state[AT], end
        is_counted = _count_found(grams, data, n, bits, rolling, state)
        state[AT] = state[FIRST]
        if not is_counted:
            return NGRAMS
        if not _end_row(grams, state, end, columns, values, ends):
            return FULL
        rolling[:] = 0
    return DONE


@kept
@njit(nogil=True)
def first_character(data, i):  # type: ignore[no-untyped-def]
    """The first place from byte i of ``data`` on at which a character begins, and the code of the one before it, -1
    where there is none. ``data`` begins eight bytes before i, or with the document."""
    for j in range(i - 1, max(i - 5, -1), -1):
        step = character_at(data, j, 0, len(data))
        if step:
            return max(i, j + (step >> CODE_BITS)), step & CODE_MASK
    return i, -1


@kept
@njit(nogil=True)
def word_end(i, hi, letters):  # type: ignore[no-untyped-def]
    """Where a word ends that goes on at ``i``; ``hi`` or above where it goes on as far as there are bytes."""
    while i < hi:
        step = step_at(i, hi)
        if step & CUT:
            return hi
        code = step & CODE_MASK
        if not load_byte(letters + (code >> 3)) >> (code & 7) & 1:
            return i
        i += step >> CODE_BITS
    return i


@kept
@njit(nogil=True)
def first_line(i, hi):  # type: ignore[no-untyped-def]
    """The first place from ``i`` on, with a byte before it, at which a line begins; ``hi`` or above where none does."""
    if load_byte(i - 1) == 10 or (load_byte(i - 1) == 13 and (i >= hi or load_byte(i) != 10)):
        return i
    while i < hi:
        if load_byte(i) == 10:
            return i + 1
        if load_byte(i) == 13:
            return i + 2 if i + 1 >= hi or load_byte(i + 1) == 10 else i + 1
        i += 1
    return i
