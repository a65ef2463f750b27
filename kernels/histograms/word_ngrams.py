"""N-grams of words counted by sorting: words are numbered in the order of their bytes, so that n-grams of numbers are
in the order of theirs.

Where half of the n-grams are new ones, a table of them outgrows the cache, and would have to be sorted in the end.
Sorting all that occur takes less, and their texts are written one behind the other.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.spare import give_back, take
from tilewright.kernels.cpu.vectors import copy_16, load_byte, prefetch, store_byte
from tilewright.kernels.histograms.scanning import NO_WORD
from tilewright.kernels.histograms.tables.radix import sort_keys, sort_pairs
from tilewright.kernels.histograms.token_lists import Tokens
from tilewright.kernels.histograms.token_order import AHEAD, COPIED, bits_from, copy_bytes, in_order

BLANK = 0x20
SHORT = 16
"""Bytes of a row that holds a word and its length, so that writing the word is one load and one store."""


@kept
@njit(nogil=True)
def _keys_of(words, ranks, n, bits, low, high):  # type: ignore[no-untyped-def]
    """Write the keys of all n-grams: 64 low bits, and the others into ``high`` if it has a length. Returns how many."""
    k0 = uint64(0)
    k1 = uint64(0)
    width = n * bits
    one = uint64(1)
    mask_0 = ~uint64(0)
    mask_1 = uint64(0)
    if width < 64:
        mask_0 = (one << uint64(width)) - one
    elif width > 64:
        mask_1 = (one << uint64(width - 64)) - one
    have = 0
    keys = 0
    for place in range(len(words)):
        word = words[place]
        if word == NO_WORD:
            have = 0
            continue
        k1 = (k1 << uint64(bits) | k0 >> uint64(64 - bits)) & mask_1
        k0 = (k0 << uint64(bits) | uint64(ranks[word])) & mask_0
        have += 1
        if have >= n:
            low[keys] = k0
            if len(high):
                high[keys] = k1
            keys += 1
    return keys


@kept
@njit(nogil=True)
def _run_lengths(low, high, counts):  # type: ignore[no-untyped-def]
    """Keep one of equal keys, which are neighbours, and write how many there were. Returns how many are kept."""
    last = -1
    wide = len(high) > 0
    for place in range(len(low)):
        if last >= 0 and low[last] == low[place] and (not wide or high[last] == high[place]):
            counts[last] += 1
        else:
            last += 1
            low[last] = low[place]
            if wide:
                high[last] = high[place]
            counts[last] = 1
    return last + 1


@kept
@njit(nogil=True)
def _short_words(data, edges, short):  # type: ignore[no-untyped-def]
    """Write each word's bytes into a row of ``short``, uint8[(words, SHORT)], with its length behind them; of a word
    that has no room there, `SHORT` as the length."""
    for word in range(len(edges) - 1):
        start = edges[word]
        n = edges[word + 1] - start
        short[word, SHORT - 1] = min(n, SHORT)
        if n < SHORT:
            for k in range(n):
                short[word, k] = data[start + k]


@kept
@njit(nogil=True)
def _size(low, high, n, bits, edges):  # type: ignore[no-untyped-def]
    """How many bytes `_texts` writes."""
    wide = len(high) > 0
    unit_mask = (uint64(1) << uint64(bits)) - uint64(1)
    nbytes = np.int64(len(low) * (n - 1))
    begin = np.int64(0)
    for entry in range(len(low)):
        k0 = low[entry]
        k1 = high[entry] if wide else uint64(0)
        if entry == 0 or (k0 ^ low[entry - 1]) & ~unit_mask or (wide and k1 != high[entry - 1]):
            begin = np.int64(0)
            for k in range(n - 1):
                word = np.int64(bits_from(k0, k1, bits * (n - 1 - k), bits) & unit_mask)
                begin += edges[word + 1] - edges[word]
        word = np.int64(k0 & unit_mask)
        nbytes += begin + edges[word + 1] - edges[word]
    return nbytes


@njit(nogil=True)
def _put_word(short, data, nbytes, edges, word, to):  # type: ignore[no-untyped-def]
    """Write a word, and other bytes behind it, `COPIED` at most; returns where it ends. Addresses but for ``edges``."""
    row = short + SHORT * word
    n = load_byte(row + SHORT - 1)
    if n < SHORT:
        copy_16(to, row)
    else:
        start = edges[word]
        n = edges[word + 1] - start
        copy_bytes(to, data + start, n, nbytes - start - n)
    return to + n


@kept
@njit(nogil=True)
def _texts(low, high, n, bits, short, data, edges, out, offsets):  # type: ignore[no-untyped-def]
    """As `token_order.ngram_texts`, of words ``data[edges[w]:edges[w + 1]]``, with a blank between two. Of keys in
    order, neighbours mostly begin alike: what they have in common is copied from the one before.

    short: as of `_short_words`. ``out`` has `COPIED` bytes more than the texts take.
    """
    wide = len(high) > 0
    unit_mask = (uint64(1) << uint64(bits)) - uint64(1)
    words = np.int64(data.ctypes.data)
    rows = np.int64(short.ctypes.data)
    lo = np.int64(out.ctypes.data)
    to = np.int64(lo)
    start = to  # of the n-gram before
    begin = np.int64(0)  # bytes of the first n - 1 words, with the blanks behind them
    for entry in range(len(low)):
        if entry + AHEAD < len(low):
            prefetch(rows + SHORT * np.int64(low[entry + AHEAD] & unit_mask))
        k0 = low[entry]
        k1 = high[entry] if wide else uint64(0)
        if entry and (k0 ^ low[entry - 1]) & ~unit_mask == 0 and (not wide or k1 == high[entry - 1]):
            for k in range(0, begin, COPIED):
                copy_16(to + k, start + k)
            start = to
        else:
            start = to
            for k in range(n - 1):
                word = np.int64(bits_from(k0, k1, bits * (n - 1 - k), bits) & unit_mask)
                to = _put_word(rows, words, len(data), edges, word, to)
                store_byte(to, BLANK)
                to += 1
            begin = to - start
        to = _put_word(rows, words, len(data), edges, np.int64(k0 & unit_mask), start + begin)
        offsets[entry + 1] = to - lo


def _texts_of(low: np.ndarray, high: np.ndarray, n: int, bits: int, words: Tokens) -> Tokens:
    """The n-grams whose keys these are, in order, as a list."""
    offsets = np.zeros(len(low) + 1, np.int64)
    short = np.empty((len(words), SHORT), np.uint8)
    _short_words(words.data, words.offsets, short)
    nbytes = _size(low, high, n, bits, words.offsets)
    texts = np.empty(nbytes + COPIED, np.uint8)
    _texts(low, high, n, bits, short, words.data, words.offsets, texts, offsets)
    return Tokens(texts[:nbytes], offsets)


def count_word_ngrams(
    words: np.ndarray, n: int, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> tuple[Tokens, np.ndarray]:
    """The n-grams of words as a list in order, and their counts, int64.

    words: uint32, their numbers in the order of the text, `NO_WORD` between documents; word w is
    ``data[starts[w]:starts[w] + lengths[w]]``, and two may be the same. n-grams of their ranks have at most 128 bits.
    """
    known, _, ranks = in_order(data, starts, lengths, np.zeros(len(starts), np.int64))
    bits = max(1, (len(known) - 1).bit_length())
    low = take(len(words), np.uint64)
    high = take(len(words) if n * bits > 64 else 0, np.uint64)
    scratch = [low, high]
    used = _keys_of(words, ranks.astype(np.uint32), n, bits, low, high)
    low = low[:used]
    if len(high):
        low, high = sort_pairs(low, high[:used], 64)
        scratch += [low, high]
        high, low = sort_pairs(high, low, n * bits - 64)
        counts = np.empty(used, np.int64)
    else:
        low, spare = sort_keys(low, n * bits)
        counts = spare.view(np.int64)
        scratch.append(spare)
    used = _run_lengths(low, high, counts)
    counts = counts[:used].copy()
    tokens = _texts_of(low[:used], high[:used], n, bits, known)
    give_back(*scratch, low, high)
    if known.data.size and int(known.data.min()) <= BLANK:
        # Folding has put a blank into a word: n-grams may be out of order, and two may read the same.
        tokens, counts, _ = in_order(tokens.data, tokens.offsets[:-1], np.diff(tokens.offsets), counts)
    return tokens, counts
