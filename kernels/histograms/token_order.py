"""Lists of tokens put in order, merged, and made of the keys of n-grams."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numba import njit, uint64

from tilewright.kernels.cpu.loops import kept, read_only
from tilewright.kernels.cpu.spare import give_back, take
from tilewright.kernels.cpu.vectors import (
    copy_16,
    load_byte,
    load_word,
    prefetch,
    store_byte,
    swapped,
)
from tilewright.kernels.histograms.tables.radix import sort_pairs
from tilewright.kernels.histograms.token_lists import Tokens
from tilewright.kernels.histograms.tokens import CODE_BITS

INSERTED = 12
"""Runs of so few tokens are sorted by insertion."""
LEAST_BY_DIGITS = 1 << 12
"""So many tokens' first bytes are sorted by their digits; of fewer, what each digit takes would be more."""
AHEAD = 8
"""Tokens whose bytes are fetched from memory while others are looked at or written."""
RUNS_AHEAD = 8
"""Runs of tokens that are alike so far whose bytes are fetched while another is sorted."""
COMPARED = 4
"""Runs of so few tokens that are alike so far are sorted by comparing them: their bytes have just been fetched."""
STEP = 8
"""Bytes of tokens that are compared at a time."""
COPIED = 16
"""Bytes of tokens that are copied at a time."""


@njit(nogil=True)
def _prefix(lo, start, n):  # type: ignore[no-untyped-def]
    """The first eight of the n bytes at an address as a number that grows as they do, with zeros for those missing.
    ``lo`` is where what may be read begins."""
    if n >= STEP:
        return swapped(load_word(start))
    if n <= 0:
        return uint64(0)
    if start - lo >= STEP - n:
        return swapped(load_word(start + n - STEP)) << uint64(64 - 8 * n)
    key = uint64(0)
    for k in range(n):
        key |= uint64(load_byte(start + k)) << uint64(56 - 8 * k)
    return key


@njit(nogil=True)
def _compare(lo_a, a, n, lo_b, b, m):  # type: ignore[no-untyped-def]
    """Negative, 0 or positive as the n bytes at address a come before, are, or come after the m bytes at b. What may be
    read begins at ``lo_a`` and ``lo_b``."""
    shorter = min(n, m)
    k = 0
    while k < shorter:
        left = _prefix(lo_a, a + k, shorter - k)
        right = _prefix(lo_b, b + k, shorter - k)
        if left != right:
            return np.int64(-1) if left < right else np.int64(1)
        k += STEP
    return np.int64(n - m)


@njit(nogil=True)
def copy_bytes(to, start, n, spare):  # type: ignore[no-untyped-def]
    """Copy n bytes from one address to another. ``spare``: so many more may be read behind them, and written."""
    if spare >= COPIED:
        for k in range(0, n, COPIED):
            copy_16(to + k, start + k)
    else:
        for k in range(n):
            store_byte(to + k, load_byte(start + k))


@kept
@njit(nogil=True)
def _prefixes(data, starts, lengths, keys):  # type: ignore[no-untyped-def]
    for token in range(len(starts)):
        keys[token] = _prefix(data, data + starts[token], lengths[token])


@njit(nogil=True)
def _insert(data, starts, lengths, depth, order, first, last):  # type: ignore[no-untyped-def]
    """Sort ``order[first:last]`` by the tokens' bytes from ``depth`` on, by insertion."""
    for place in range(first + 1, last):
        token = order[place]
        start = data + starts[token]
        n = lengths[token]
        skip = min(depth, n)
        at = place
        while at > first:
            before = order[at - 1]
            begin = data + starts[before]
            m = lengths[before]
            passed = min(skip, m)
            if _compare(data, begin + passed, m - passed, data, start + skip, n - skip) <= 0:
                break
            order[at] = before
            at -= 1
        order[at] = token


@njit(nogil=True)
def _insert_keys(keys, order, first, last):  # type: ignore[no-untyped-def]
    for place in range(first + 1, last):
        key = keys[place]
        token = order[place]
        at = place
        while at > first and keys[at - 1] > key:
            keys[at] = keys[at - 1]
            order[at] = order[at - 1]
            at -= 1
        keys[at] = key
        order[at] = token


@njit(nogil=True)
def _sift(keys, order, first, at, last):  # type: ignore[no-untyped-def]
    """Let the entry at ``at`` of the heap from ``first`` to ``last`` sink to its place."""
    key = keys[at]
    token = order[at]
    while True:
        below = first + 2 * (at - first) + 1
        if below >= last:
            break
        if below + 1 < last and keys[below + 1] > keys[below]:
            below += 1
        if keys[below] <= key:
            break
        keys[at] = keys[below]
        order[at] = order[below]
        at = below
    keys[at] = key
    order[at] = token


@njit(nogil=True)
def heap_sort(keys, order, first, last):  # type: ignore[no-untyped-def]
    for at in range(first + (last - first) // 2 - 1, first - 1, -1):
        _sift(keys, order, first, at, last)
    for end in range(last - 1, first, -1):
        keys[first], keys[end] = keys[end], keys[first]
        order[first], order[end] = order[end], order[first]
        _sift(keys, order, first, first, end)


@njit(nogil=True)
def sort_by_keys(keys, order, first, last):  # type: ignore[no-untyped-def]
    """Sort ``keys[first:last]``, uint64, and their entries in ``order`` with them: quicksort, and a heap's where that
    does not get on."""
    stack = np.empty((64, 3), np.int64)
    used = 1
    stack[0, 0] = first
    stack[0, 1] = last
    depth = 0
    length = last - first
    while length:
        length >>= 1
        depth += 2
    stack[0, 2] = depth
    while used:
        used -= 1
        first = stack[used, 0]
        last = stack[used, 1]
        depth = stack[used, 2]
        while last - first > INSERTED:
            if depth == 0:
                heap_sort(keys, order, first, last)
                first = last
                break
            depth -= 1
            a = keys[first]
            b = keys[(first + last) >> 1]
            c = keys[last - 1]
            pivot = max(min(a, b), min(max(a, b), c))
            i = first
            j = last - 1
            while i <= j:
                while keys[i] < pivot:
                    i += 1
                while keys[j] > pivot:
                    j -= 1
                if i <= j:
                    keys[i], keys[j] = keys[j], keys[i]
                    order[i], order[j] = order[j], order[i]
                    i += 1
                    j -= 1
            # The longer half waits, so that the stack is never longer than its logarithm.
            if j + 1 - first < last - i:
                stack[used, 0] = i
                stack[used, 1] = last
                last = j + 1
            else:
                stack[used, 0] = first
                stack[used, 1] = j + 1
                first = i
            stack[used, 2] = depth
            used += 1
        _insert_keys(keys, order, first, last)


@njit(nogil=True)
def _fetch(data, starts, depth, order, first, last):  # type: ignore[no-untyped-def]
    """Have the bytes from ``depth`` on of some tokens fetched from memory."""
    for place in range(first, last):
        prefetch(data + starts[order[place]] + depth)


@kept
@njit(nogil=True)
def _sort_tokens(data, starts, lengths, keys, order, by_keys, runs, found):  # type: ignore[no-untyped-def]
    """Sort an order of tokens by their bytes: eight bytes after eight, as far as tokens are alike.

    ``keys`` are the `_prefixes` of the tokens in that order, ``data`` is an address. by_keys: whether the order is that
    of the keys already. runs, found: memory, int64[(half the tokens + 1, 2)], for runs of tokens whose first bytes are
    alike, first and last, and those found within them, which are of the next step.
    """
    runs[0, 0] = 0
    runs[0, 1] = len(order)
    used = 1
    depth = 0
    while used:
        inner = 0
        for run in range(used):
            first = runs[run, 0]
            last = runs[run, 1]
            if depth:
                if run + RUNS_AHEAD < used:
                    ahead = runs[run + RUNS_AHEAD, 0]
                    _fetch(data, starts, depth, order, ahead, min(ahead + AHEAD, runs[run + RUNS_AHEAD, 1]))
                for place in range(first, last):
                    if place + AHEAD < last:
                        prefetch(data + starts[order[place + AHEAD]] + depth)
                    token = order[place]
                    keys[place] = _prefix(data, data + starts[token] + depth, lengths[token] - depth)
            if last - first <= INSERTED:
                _insert_keys(keys, order, first, last)
            elif depth or not by_keys:
                sort_by_keys(keys, order, first, last)
            begin = first
            while begin < last:
                end = begin + 1
                key = keys[begin]
                while end < last and keys[end] == key:
                    end += 1
                if end - begin > 1:
                    longest = np.int64(0)
                    if end - begin > COMPARED:
                        for place in range(begin, end):
                            longest = max(longest, lengths[order[place]])
                    if end - begin <= COMPARED:
                        _insert(data, starts, lengths, depth + STEP, order, begin, end)
                    elif longest <= depth + STEP:
                        # Alike, but for zeros at the end.
                        for place in range(begin, end):
                            keys[place] = uint64(lengths[order[place]])
                        if end - begin <= INSERTED:
                            _insert_keys(keys, order, begin, end)
                        else:
                            sort_by_keys(keys, order, begin, end)
                    else:
                        found[inner, 0] = begin
                        found[inner, 1] = end
                        inner += 1
                begin = end
        runs, found = found, runs
        used = inner
        depth += STEP


@kept
@njit(nogil=True)
def _gather(data, nbytes, starts, lengths, counts, order, to_data, to_offsets, to_counts, rank):  # type: ignore[no-untyped-def]
    """Write the tokens in order, equal ones as one. Returns how many, and how many bytes."""
    tokens = 0
    place = 0
    to = np.int64(to_data.ctypes.data)
    starts_at = np.int64(starts.ctypes.data)
    lengths_at = np.int64(lengths.ctypes.data)
    counts_at = np.int64(counts.ctypes.data)
    rank_at = np.int64(rank.ctypes.data)
    for number in range(len(order)):
        # What is known of a token is fetched before its bytes.
        if number + 2 * AHEAD < len(order):
            ahead = 8 * order[number + 2 * AHEAD]
            prefetch(starts_at + ahead)
            prefetch(lengths_at + ahead)
            prefetch(counts_at + ahead)
            prefetch(rank_at + ahead)
            prefetch(data + starts[order[number + AHEAD]])
        token = order[number]
        start = starts[token]
        n = lengths[token]
        if tokens:
            begin = to_offsets[tokens - 1]
            if place - begin == n and _compare(to, to + begin, n, data, data + start, n) == 0:
                to_counts[tokens - 1] += counts[token]
                rank[token] = tokens - 1
                continue
        copy_bytes(to + place, data + start, n, min(nbytes - start, len(to_data) - place) - n)
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
    count = len(starts)
    keys, order = take(count, np.uint64), take(count, np.int64)
    scratch = [keys, order]
    _prefixes(data.ctypes.data, starts, lengths, keys)
    order[:] = np.arange(count)
    by_digits = count >= LEAST_BY_DIGITS
    if by_digits:
        keys, order = sort_pairs(keys, order, 64)
    runs, found = (take(2 * (count // 2 + 1), np.int64).reshape(-1, 2) for _ in range(2))
    _sort_tokens(data.ctypes.data, starts, lengths, keys, order, by_digits, runs, found)
    to_data = np.empty(int(lengths.sum()), np.uint8)
    to_offsets = np.zeros(len(starts) + 1, np.int64)
    to_counts = np.empty(len(starts), np.int64)
    rank = np.empty(len(starts), np.int64)
    tokens, nbytes = _gather(
        data.ctypes.data, len(data), starts, lengths, counts, order, to_data, to_offsets, to_counts, rank
    )
    give_back(*scratch, keys, order, runs, found)
    return Tokens(to_data[:nbytes], to_offsets[: tokens + 1]), to_counts[:tokens], rank


@kept
@njit(nogil=True)
def _pack(data, nbytes, starts, lengths, to_data, to_offsets):  # type: ignore[no-untyped-def]
    place = 0
    to = np.int64(to_data.ctypes.data)
    for token in range(len(starts)):
        n = lengths[token]
        copy_bytes(to + place, data + starts[token], n, min(nbytes - starts[token], len(to_data) - place) - n)
        place += n
        to_offsets[token + 1] = place


def packed(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> Tokens:
    """The tokens ``data[starts[i]:starts[i] + lengths[i]]``, in their order."""
    to_data = np.empty(int(lengths.sum()), np.uint8)
    to_offsets = np.zeros(len(starts) + 1, np.int64)
    _pack(data.ctypes.data, len(data), starts, lengths, to_data, to_offsets)
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
    lo_a = np.int64(a.ctypes.data)
    lo_b = np.int64(b.ctypes.data)
    to = np.int64(to_data.ctypes.data)
    left = uint64(0)
    right = uint64(0)
    if len(a_counts):
        left = _prefix(lo_a, lo_a + a_offsets[0], a_offsets[1] - a_offsets[0])
    if len(b_counts):
        right = _prefix(lo_b, lo_b + b_offsets[0], b_offsets[1] - b_offsets[0])
    while i < len(a_counts) or j < len(b_counts):
        if i == len(a_counts):
            which = 1
        elif j == len(b_counts):
            which = -1
        elif left != right:
            which = -1 if left < right else 1
        else:
            which = _compare(
                lo_a,
                lo_a + a_offsets[i],
                a_offsets[i + 1] - a_offsets[i],
                lo_b,
                lo_b + b_offsets[j],
                b_offsets[j + 1] - b_offsets[j],
            )
        count = np.int64(0)
        n = np.int64(0)
        if which <= 0:
            n = a_offsets[i + 1] - a_offsets[i]
            copy_bytes(
                to + place, lo_a + a_offsets[i], n, min(len(a) - a_offsets[i], len(to_data) - place) - n
            )
            count = a_counts[i]
            i += 1
            if i < len(a_counts):
                left = _prefix(lo_a, lo_a + a_offsets[i], a_offsets[i + 1] - a_offsets[i])
        if which >= 0:
            if which > 0:
                n = b_offsets[j + 1] - b_offsets[j]
                copy_bytes(
                    to + place, lo_b + b_offsets[j], n, min(len(b) - b_offsets[j], len(to_data) - place) - n
                )
            count += b_counts[j]
            j += 1
            if j < len(b_counts):
                right = _prefix(lo_b, lo_b + b_offsets[j], b_offsets[j + 1] - b_offsets[j])
        place += n
        to_counts[tokens] = count
        tokens += 1
        to_offsets[tokens] = place
    return tokens, place


@kept
@njit(nogil=True)
def _merged_size(a, a_offsets, b, b_offsets):  # type: ignore[no-untyped-def]
    """How many tokens, and how many bytes, two lists have when they are merged."""
    i = 0
    j = 0
    lo_a = np.int64(a.ctypes.data)
    lo_b = np.int64(b.ctypes.data)
    n = len(a_offsets) - 1
    m = len(b_offsets) - 1
    tokens = n + m
    nbytes = a_offsets[n] - a_offsets[0] + b_offsets[m] - b_offsets[0]
    while i < n and j < m:
        length = a_offsets[i + 1] - a_offsets[i]
        which = _compare(
            lo_a, lo_a + a_offsets[i], length, lo_b, lo_b + b_offsets[j], b_offsets[j + 1] - b_offsets[j]
        )
        if which == 0:
            tokens -= 1
            nbytes -= length
        i += which <= 0
        j += which >= 0
    return tokens, nbytes


def _cuts(a: Tokens, b: Tokens, parts: int) -> list[tuple[int, int]]:
    """Places in two lists, so that what is before them in either comes before what is behind them."""
    cuts = [(0, 0)]
    for part in range(1, parts):
        i = part * len(a) // parts
        token, low, high = a[i], cuts[-1][1], len(b)
        while low < high:
            middle = (low + high) // 2
            if b[middle] < token:
                low = middle + 1
            else:
                high = middle
        cuts.append((i, low))
    return [*cuts, (len(a), len(b))]


def merged_by_parts(
    a: Tokens,
    a_counts: np.ndarray,
    b: Tokens,
    b_counts: np.ndarray,
    parts: int,
    run: Callable[[Sequence[Callable[[], Any]]], list[Any]],
    array: Callable[[int, Any], np.ndarray] = np.empty,
) -> tuple[Tokens, np.ndarray]:
    """As `merged`, by so many calls at most that ``run`` makes at the same time: first to see where the result of each
    goes, then to write it. One alone gets memory for what may come. array: makes memory, of a length and a dtype."""
    if len(a) < len(b):
        a, a_counts, b, b_counts = b, b_counts, a, a_counts
    parts = max(1, min(parts, len(a)))
    of_a, of_b = read_only(a.data), read_only(b.data)
    ranges = list(itertools.pairwise(_cuts(a, b, parts)))
    sizes: list[Any] = [(len(a) + len(b), len(a.data) + len(b.data))]
    if parts > 1:
        sizes = run(
            [
                partial(_merged_size, of_a, a.offsets[i : k + 1], of_b, b.offsets[j : m + 1])
                for (i, j), (k, m) in ranges
            ]
        )
    ends = np.cumsum([(0, 0), *sizes], axis=0).tolist()
    tokens, nbytes = ends[-1]
    data, offsets, counts = array(nbytes, np.uint8), array(tokens + 1, np.int64), array(tokens, np.int64)
    offsets[0] = 0

    def write(part: int) -> tuple[int, int]:
        (i, j), (k, m) = ranges[part]
        (first, begin), (last, end) = ends[part : part + 2]
        places = offsets[first : last + 1] if not part else np.empty(last - first + 1, np.int64)
        found: tuple[int, int] = merge_lists(
            of_a, a.offsets[i : k + 1], a_counts[i:k], of_b, b.offsets[j : m + 1], b_counts[j:m],
            data[begin:end], places, counts[first:last],
        )  # fmt: skip
        if part:  # the first place is the last of the part before
            np.add(places[1:], begin, out=offsets[first + 1 : last + 1])
        return found

    written = run([partial(write, part) for part in range(len(ranges))])
    if parts == 1:
        ((tokens, nbytes),) = written
    return Tokens(data[:nbytes], offsets[: tokens + 1]), counts[:tokens]


def merged(a: Tokens, a_counts: np.ndarray, b: Tokens, b_counts: np.ndarray) -> tuple[Tokens, np.ndarray]:
    """Two lists that are in order as one, and its counts, int64."""
    return merged_by_parts(a, a_counts, b, b_counts, 1, lambda calls: [call() for call in calls])


@kept
@njit(nogil=True)
def rising(data, offsets, first):  # type: ignore[no-untyped-def]
    """Behind token ``first``, the first token that does not come after the one before it, or how many there are."""
    lo = np.int64(data.ctypes.data)
    place = first + 1
    while place < len(offsets) - 1:
        start = offsets[place]
        if (
            _compare(
                lo,
                lo + offsets[place - 1],
                start - offsets[place - 1],
                lo,
                lo + start,
                offsets[place + 1] - start,
            )
            >= 0
        ):
            break
        place += 1
    return place


@njit(nogil=True)
def bits_from(low, high, shift, bits):  # type: ignore[no-untyped-def]
    """The bits from ``shift`` on of a number of 128, ``bits`` of them and others above."""
    if shift >= 64:
        return high >> uint64(shift - 64)
    found = low >> uint64(shift)
    if shift + bits > 64:
        found |= high << uint64(64 - shift)
    return found


@kept
@njit(nogil=True)
def ngram_texts(low, high, n, bits, data, starts, lengths, joined, out, offsets):  # type: ignore[no-untyped-def]
    """Write n-grams as text into ``out``, and where each ends into ``offsets``, if ``out`` has a length; returns how
    many bytes they take.

    Keys are the numbers of n units, of ``bits`` bits each: 64 bits of it in ``low``, the others in ``high``, which may
    have no length. The unit of number u is ``data[starts[u]:starts[u] + lengths[u]]`` where there are starts, else the
    code point u in UTF-8, or for 8 bits the byte u. ``joined`` puts a blank between units.
    """
    place = 0
    write = len(out) > 0
    wide = len(high) > 0
    unit_mask = (uint64(1) << uint64(bits)) - uint64(1)
    words = np.int64(data.ctypes.data)
    to = np.int64(out.ctypes.data)
    for entry in range(len(low)):
        k0 = low[entry]
        k1 = high[entry] if wide else uint64(0)
        for k in range(n):
            shift = bits * (n - 1 - k)
            u = np.int64(bits_from(k0, k1, shift, bits) & unit_mask)
            if len(starts):
                if joined and k:
                    if write:
                        out[place] = 0x20
                    place += 1
                length = lengths[u]
                if write:
                    start = starts[u]
                    copy_bytes(
                        to + place, words + start, length, min(len(data) - start, len(out) - place) - length
                    )
                place += length
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


def ngram_texts_of(
    low: np.ndarray,
    high: np.ndarray,
    n: int,
    bits: int,
    data: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    *,
    joined: bool,
) -> Tokens:
    """The n-grams whose keys these are; ``high`` may have no length, where all is 0."""
    given = (low, high, n, bits, data, starts, lengths, joined)
    offsets = np.zeros(len(low) + 1, np.int64)
    texts = np.empty(ngram_texts(*given, np.empty(0, np.uint8), offsets), np.uint8)
    if len(texts):
        ngram_texts(*given, texts, offsets)
    return Tokens(texts, offsets)
