"""What stands in a document more than once: lines, paragraphs, and n-grams of words.

Tokens are told apart by their bytes (`tilewright.kernels.histograms.tables`), n-grams by numbers: that of an n-gram is
the number of the pair of the (n - 1)-gram that it begins with and of its last word. So two are never taken for one. An
n-gram that is there twice begins and ends with (n - 1)-grams that are, so that of most texts few have to be looked up.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.histograms.tables.token_table import Table
from tilewright.kernels.signals.definitions import DUPE_N, TOP_N
from tilewright.kernels.signals.scanning import Spans

NO_KEY = np.uint64(2**64 - 1)
LEAST_SLOTS = 16
_MIX = np.uint64(0x9E3779B97F4A7C15)
_LEAST_N, _LAST_TOP, _FIRST_DUPE, _LAST_N = TOP_N[0], TOP_N[-1], DUPE_N[0], DUPE_N[-1]


@kept
@njit(nogil=True)
def _duplicates(entries, chars, edges, seen, found):  # type: ignore[no-untyped-def]
    """Write how many spans of each document are the same as an earlier one of it, and how many characters these have,
    to ``found``, int64[(documents, 2)].

    entries: int64, what each is. seen: int64, zeros, as long as there are different ones.
    """
    for document in range(len(edges) - 1):
        number = 0
        length = 0
        for k in range(edges[document], edges[document + 1]):
            if seen[entries[k]] == document + 1:
                number += 1
                length += chars[k]
            else:
                seen[entries[k]] = document + 1
        found[document, 0] = number
        found[document, 1] = length


@kept
@njit(nogil=True)
def _listed(entries, edges, listed, seen, found):  # type: ignore[no-untyped-def]
    """Write how many words of each document are of the first ``listed`` entries, and how many of these occur, to
    ``found``, int64[(documents, 2)]. seen: int64[listed], zeros."""
    for document in range(len(edges) - 1):
        number = 0
        different = 0
        for k in range(edges[document], edges[document + 1]):
            if entries[k] < listed:
                number += 1
                if seen[entries[k]] != document + 1:
                    seen[entries[k]] = document + 1
                    different += 1
        found[document, 0] = number
        found[document, 1] = different


@njit(nogil=True)
def _number_of(keys, numbers, shift, key, new):  # type: ignore[no-untyped-def]
    """The number of a key, which is ``new`` if it is not there. ``shift`` is 64 less the slots' bits."""
    mask = (uint64(1) << (uint64(64) - shift)) - uint64(1)
    mixed = key * _MIX
    mixed ^= mixed >> uint64(29)
    slot = (mixed * _MIX) >> shift
    while keys[slot] != NO_KEY:
        if keys[slot] == key:
            return np.int64(numbers[slot])
        slot = (slot + uint64(1)) & mask
    keys[slot] = key
    numbers[slot] = new
    return np.int64(new)


@njit(nogil=True)
def _most_frequent(counts, new, places, ends, n):  # type: ignore[no-untyped-def]
    """Characters of all that is of the most frequent n-gram, the first of equally frequent ones, with a blank between
    two of its words. ``counts[:new]`` and ``places``: how often each is there, and where first."""
    best = 0
    for number in range(1, new):
        if counts[number] > counts[best]:
            best = number
    first = places[best]
    return np.int64(counts[best]) * (ends[first + n] - ends[first] + n - 1)


@njit(nogil=True)
def _repeated(grams, total, counts, seen, ends, n):  # type: ignore[no-untyped-def]
    """Characters of n-grams that stood there before, found from the text's beginning on: none is looked for in the
    words of one that was found. grams: the number of that which begins at each of ``total`` words. seen: written."""
    for place in range(total):
        seen[grams[place]] = 0
    chars = np.int64(0)
    place = 0
    while place < total:
        gram = grams[place]
        if counts[gram] > 1:
            if seen[gram]:
                chars += ends[place + n] - ends[place]
                place += n
                continue
            seen[gram] = 1
        place += 1
    return chars


@kept
@njit(nogil=True)
def _ngrams(entries, chars, edges, local, stamps, keys, numbers, rows, ends, tops, dupes):  # type: ignore[no-untyped-def]
    """Write the characters of the most frequent n-grams of each document, and those of duplicate ones, to ``tops`` and
    ``dupes``, int64[(documents, TOP_N)] and [(documents, DUPE_N)], zeros.

    entries: int64, which word each is; chars: int64, its characters. local, stamps: uint32 and int64 of each different
    word, the latter zeros. keys, numbers: uint64 and uint32, slots, a power of two and twice the words of the longest
    document at least. rows: uint32[(6, its words + 1)]; ends: int64[its words + 1].
    """
    grams, words, counts, before, places, seen = rows[0], rows[1], rows[2], rows[3], rows[4], rows[5]
    for document in range(len(edges) - 1):
        first = edges[document]
        length = edges[document + 1] - first
        new = 0
        ends[0] = 0
        for i in range(length):
            entry = entries[first + i]
            if stamps[entry] != document + 1:
                stamps[entry] = document + 1
                local[entry] = new
                before[new] = 0
                new += 1
            number = local[entry]
            before[number] += 1
            grams[i] = number
            words[i] = number
            ends[i + 1] = ends[i] + chars[first + i]
        repeats = new < length
        for n in range(_LEAST_N, min(_LAST_N, length) + 1):
            total = length - n + 1
            if not repeats:
                # Each is there once, also of all longer ones: the first is as frequent as any.
                if n > _LAST_TOP:
                    break
                tops[document, n - _LEAST_N] = ends[n] + n - 1
                continue
            asked = 0
            for i in range(total):
                if before[grams[i]] > 1 and before[grams[i + 1]] > 1:
                    asked += 1
            slots = LEAST_SLOTS
            shift = uint64(60)
            while slots < 2 * asked:
                slots *= 2
                shift -= uint64(1)
            keys[:slots] = NO_KEY
            new = 0
            for i in range(total):
                number = new
                if before[grams[i]] > 1 and before[grams[i + 1]] > 1:
                    key = uint64(grams[i]) << uint64(32) | uint64(words[i + n - 1])
                    number = _number_of(keys, numbers, shift, key, new)
                if number == new:
                    counts[new] = 0
                    places[new] = i
                    new += 1
                counts[number] += 1
                grams[i] = number
            repeats = new < total
            if n <= _LAST_TOP:
                tops[document, n - _LEAST_N] = _most_frequent(counts, new, places, ends, n)
            if n >= _FIRST_DUPE and repeats:
                dupes[document, n - _FIRST_DUPE] = _repeated(grams, total, counts, seen, ends, n)
            counts, before = before, counts


def duplicates_of(data: np.ndarray, spans: Spans) -> np.ndarray:
    """How many spans of each document are the same as an earlier one of it, and how many characters these have:
    int64[(documents, 2)]. data: uint8, where they lie."""
    table = Table(with_bytes=True)
    entries = table.entries_of(data, spans.starts, spans.lengths)
    found = np.zeros((len(spans.edges) - 1, 2), np.int64)
    _duplicates(entries, spans.chars, spans.edges, np.zeros(table.used, np.int64), found)
    return found


def words_of(
    data: np.ndarray, spans: Spans, listed: tuple[bytes, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How many words of each document are in a list, without repeats, and how many of these occur, int64[(documents,
    2)]; the characters of its most frequent n-grams, int64[(documents, TOP_N)]; and those of its duplicate ones,
    int64[(documents, DUPE_N)]."""
    table = Table(with_bytes=True)
    offsets = np.cumsum([0, *map(len, listed)])
    table.add(np.frombuffer(b"".join(listed), np.uint8), offsets, np.zeros(len(listed), np.int64))
    entries = table.entries_of(data, spans.starts, spans.lengths)
    documents = len(spans.edges) - 1
    stops = np.zeros((documents, 2), np.int64)
    _listed(entries, spans.edges, len(listed), np.zeros(len(listed), np.int64), stops)
    longest = int(np.diff(spans.edges).max(initial=0))
    slots = max(LEAST_SLOTS, 1 << (2 * longest).bit_length())
    tops = np.zeros((documents, len(TOP_N)), np.int64)
    dupes = np.zeros((documents, len(DUPE_N)), np.int64)
    _ngrams(
        entries,
        spans.chars,
        spans.edges,
        np.empty(table.used, np.uint32),
        np.zeros(table.used, np.int64),
        np.empty(slots, np.uint64),
        np.empty(slots, np.uint32),
        np.empty((6, longest + 1), np.uint32),
        np.empty(longest + 1, np.int64),
        tops,
        dupes,
    )
    return stops, tops, dupes
