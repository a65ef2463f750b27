"""Lists of tokens put in order, merged, and made of the keys of n-grams."""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.vectors import load_byte, load_word
from tilewright.kernels.histograms.token_lists import Tokens
from tilewright.kernels.histograms.tokens import CODE_BITS

INSERTED = 12
"""Runs of so few tokens are sorted by insertion."""


@njit(nogil=True)
def _compare(a, n, b, m):  # type: ignore[no-untyped-def]
    """Negative, 0 or positive as the n bytes at address a come before, are, or come after the m bytes at b."""
    shorter = min(n, m)
    k = 0
    while k + 8 <= shorter and load_word(a + k) == load_word(b + k):
        k += 8
    while k < shorter:
        if load_byte(a + k) != load_byte(b + k):
            return load_byte(a + k) - load_byte(b + k)
        k += 1
    return np.int64(n - m)


@njit(nogil=True)
def _prefix(start, n):  # type: ignore[no-untyped-def]
    """The first eight of the n bytes at an address as a number that grows as they do, with zeros for those missing."""
    key = uint64(0)
    for k in range(min(n, 8)):
        key |= uint64(load_byte(start + k)) << uint64(56 - 8 * k)
    return key


@kept
@njit(nogil=True)
def _prefixes(data, starts, lengths, keys):  # type: ignore[no-untyped-def]
    for token in range(len(starts)):
        keys[token] = _prefix(data + starts[token], lengths[token])


@njit(nogil=True)
def _insert(data, starts, lengths, order, first, last):  # type: ignore[no-untyped-def]
    """Sort ``order[first:last]`` by the tokens' bytes, by insertion."""
    for place in range(first + 1, last):
        token = order[place]
        start = data + starts[token]
        at = place
        while at > first:
            before = order[at - 1]
            if _compare(data + starts[before], lengths[before], start, lengths[token]) <= 0:
                break
            order[at] = before
            at -= 1
        order[at] = token


@kept
@njit(nogil=True)
def _sort_runs(data, starts, lengths, keys, order):  # type: ignore[no-untyped-def]
    """Sort an order by the first eight bytes, ``keys``, by the others, too: eight bytes after eight, as far as tokens
    are alike. ``data`` is an address."""
    # Runs of tokens whose first bytes are alike, so many of them: first, last, depth.
    runs = np.empty((len(order) // 2 + 2, 3), np.int64)
    used = 1
    runs[0, 0] = 0
    runs[0, 1] = len(order)
    runs[0, 2] = 0
    while used:
        used -= 1
        first = runs[used, 0]
        last = runs[used, 1]
        depth = runs[used, 2]
        if last - first <= INSERTED:
            _insert(data, starts, lengths, order, first, last)
            continue
        if depth:
            here = order[first:last].copy()
            below = np.empty(last - first, np.uint64)
            for place in range(last - first):
                token = here[place]
                below[place] = _prefix(data + starts[token] + depth, lengths[token] - depth)
                keys[token] = below[place]
            sorted_places = np.argsort(below)
            for place in range(last - first):
                order[first + place] = here[sorted_places[place]]
        begin = first
        while begin < last:
            end = begin + 1
            longest = lengths[order[begin]]
            while end < last and keys[order[end]] == keys[order[begin]]:
                longest = max(longest, lengths[order[end]])
                end += 1
            if end - begin > 1:
                if longest <= depth + 8:
                    # Alike, but for zeros at the end.
                    here = order[begin:end].copy()
                    sorted_places = np.argsort(lengths[here])
                    for place in range(end - begin):
                        order[begin + place] = here[sorted_places[place]]
                else:
                    runs[used, 0] = begin
                    runs[used, 1] = end
                    runs[used, 2] = depth + 8
                    used += 1
            begin = end


@kept
@njit(nogil=True)
def _gather(data, starts, lengths, counts, order, to_data, to_offsets, to_counts, rank):  # type: ignore[no-untyped-def]
    """Write the tokens in order, equal ones as one. Returns how many, and how many bytes."""
    tokens = 0
    place = 0
    for number in range(len(order)):
        token = order[number]
        start = starts[token]
        n = lengths[token]
        if tokens:
            begin = to_offsets[tokens - 1]
            if _compare(to_data.ctypes.data + begin, place - begin, data.ctypes.data + start, n) == 0:
                to_counts[tokens - 1] += counts[token]
                rank[token] = tokens - 1
                continue
        for k in range(n):
            to_data[place + k] = data[start + k]
        place += n
        to_counts[tokens] = counts[token]
        rank[token] = tokens
        tokens += 1
        to_offsets[tokens] = place
    return tokens, place


def in_order(
    data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, counts: np.ndarray
) -> tuple[Tokens, np.ndarray, np.ndarray]:
    """The tokens ``data[starts[i]:starts[i] + lengths[i]]`` as a list, equal ones as one, their counts, int64, and of
    each token that was given its place there."""
    keys = np.empty(len(starts), np.uint64)
    _prefixes(data.ctypes.data, starts, lengths, keys)
    order = np.argsort(keys)
    _sort_runs(data.ctypes.data, starts, lengths, keys, order)
    to_data = np.empty(int(lengths.sum()), np.uint8)
    to_offsets = np.zeros(len(starts) + 1, np.int64)
    to_counts = np.empty(len(starts), np.int64)
    rank = np.empty(len(starts), np.int64)
    tokens, nbytes = _gather(data, starts, lengths, counts, order, to_data, to_offsets, to_counts, rank)
    return Tokens(to_data[:nbytes], to_offsets[: tokens + 1]), to_counts[:tokens], rank


@kept
@njit(nogil=True)
def _pack(data, starts, lengths, to_data, to_offsets):  # type: ignore[no-untyped-def]
    place = 0
    for token in range(len(starts)):
        for k in range(lengths[token]):
            to_data[place + k] = data[starts[token] + k]
        place += lengths[token]
        to_offsets[token + 1] = place


def packed(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> Tokens:
    """The tokens ``data[starts[i]:starts[i] + lengths[i]]``, in their order."""
    to_data = np.empty(int(lengths.sum()), np.uint8)
    to_offsets = np.zeros(len(starts) + 1, np.int64)
    _pack(data, starts, lengths, to_data, to_offsets)
    return Tokens(to_data, to_offsets)


@kept
@njit(nogil=True)
def merge_lists(  # type: ignore[no-untyped-def]
    a, a_offsets, a_counts, b, b_offsets, b_counts, to_data, to_offsets, to_counts
):
    """Merge two lists into arrays with room for both. Returns how many tokens, and how many bytes."""
    i = 0
    j = 0
    tokens = 0
    place = 0
    while i < len(a_counts) or j < len(b_counts):
        if i == len(a_counts):
            which = 1
        elif j == len(b_counts):
            which = -1
        else:
            which = _compare(
                a.ctypes.data + a_offsets[i],
                a_offsets[i + 1] - a_offsets[i],
                b.ctypes.data + b_offsets[j],
                b_offsets[j + 1] - b_offsets[j],
            )
        count = np.int64(0)
        if which <= 0:
            n = a_offsets[i + 1] - a_offsets[i]
            for k in range(n):
                to_data[place + k] = a[a_offsets[i] + k]
            count = a_counts[i]
            i += 1
        if which >= 0:
            n = b_offsets[j + 1] - b_offsets[j]
            if which > 0:
                for k in range(n):
                    to_data[place + k] = b[b_offsets[j] + k]
            count += b_counts[j]
            j += 1
        place += n
        to_counts[tokens] = count
        tokens += 1
        to_offsets[tokens] = place
    return tokens, place


@kept
@njit(nogil=True)
def ngram_texts(keys, n, bits, data, starts, lengths, joined, out, offsets):  # type: ignore[no-untyped-def]
    """Write n-grams as text into ``out``, and where each ends into ``offsets``, if ``out`` has a length; returns how
    many bytes they take.

    The unit of number u is ``data[starts[u]:starts[u] + lengths[u]]`` where there are starts, else the code point u in
    UTF-8, or for 8 bits the byte u. ``joined`` puts a blank between units.
    """
    place = 0
    write = len(out) > 0
    unit_mask = (uint64(1) << uint64(bits)) - uint64(1)
    for entry in range(len(keys)):
        for k in range(n):
            low = bits * (n - 1 - k)
            if low >= 64:
                unit = keys[entry, 1] >> uint64(low - 64)
            else:
                unit = keys[entry, 0] >> uint64(low)
                if low + bits > 64:
                    unit |= keys[entry, 1] << uint64(64 - low)
            u = np.int64(unit & unit_mask)
            if len(starts):
                if joined and k:
                    if write:
                        out[place] = 0x20
                    place += 1
                if write:
                    for byte in range(lengths[u]):
                        out[place + byte] = data[starts[u] + byte]
                place += lengths[u]
            elif bits < CODE_BITS or u < 0x80:
                if write:
                    out[place] = u
                place += 1
            elif u < 0x800:
                if write:
                    out[place] = 0xC0 | u >> 6
                    out[place + 1] = 0x80 | u & 0x3F
                place += 2
            elif u < 0x10000:
                if write:
                    out[place] = 0xE0 | u >> 12
                    out[place + 1] = 0x80 | u >> 6 & 0x3F
                    out[place + 2] = 0x80 | u & 0x3F
                place += 3
            else:
                if write:
                    out[place] = 0xF0 | u >> 18
                    out[place + 1] = 0x80 | u >> 12 & 0x3F
                    out[place + 2] = 0x80 | u >> 6 & 0x3F
                    out[place + 3] = 0x80 | u & 0x3F
                place += 4
        if write:
            offsets[entry + 1] = place
    return place
