"""Sets of shingles compared as they are: by hashes first, and wherever those are the same by the shingles' bytes."""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

from tilewright.kernels.choices import HashName
from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.vectors import load_byte
from tilewright.kernels.duplicates.shingles import Shingles
from tilewright.kernels.histograms.tables.radix import DIGIT_BITS, sort_by_digits
from tilewright.kernels.numbers import ceil_div

_PASSES = ceil_div(32, DIGIT_BITS)
"""Over the digits of a hash, which is low in a key; the shingle's number in its document is above."""
_FEW = 64
"""Shingles of a document below which comparing them sorts them sooner than their digits do."""


@njit(nogil=True)
def _same(a, b, n):  # type: ignore[no-untyped-def]
    i = 0
    while i < n and load_byte(a + i) == load_byte(b + i):
        i += 1
    return i == n


@njit(nogil=True)
def _without_repeats(hashes, starts, lengths, order, first, last, chosen):  # type: ignore[no-untyped-def]
    """Write the places of a document's different shingles to ``chosen`` from ``first`` on; returns where they end.
    ``order[first:last]`` has the places of all, by their hashes."""
    m = first
    run = first  # where those with the present hash begin in `chosen`
    for k in range(first, last):
        place = order[k]
        if m > first and hashes[chosen[m - 1]] != hashes[place]:
            run = m
        known = False
        for j in range(run, m):
            other = chosen[j]
            if lengths[other] == lengths[place] and _same(starts[other], starts[place], lengths[place]):
                known = True
                break
        if not known:
            chosen[m] = place
            m += 1
    return m


@njit(nogil=True)
def _in_order(hashes, first, last, order, keys, other):  # type: ignore[no-untyped-def]
    """Write the places ``first`` to ``last`` to ``order`` there, by their hashes, and as they stand where those are the
    same. keys, other: uint64, scratch as long as a document's shingles."""
    n = last - first
    keys, other = keys[:n], other[:n]
    for k in range(n):
        keys[k] = uint64(k) << uint64(_PASSES * DIGIT_BITS) | uint64(hashes[first + k])
    if n < _FEW:
        mask = (uint64(1) << uint64(_PASSES * DIGIT_BITS)) - uint64(1)
        for k in range(1, n):
            key = keys[k]
            j = k
            while j > 0 and keys[j - 1] & mask > key & mask:
                keys[j] = keys[j - 1]
                j -= 1
            keys[j] = key
    elif sort_by_digits(keys, other, _PASSES):
        keys = other
    for k in range(n):
        order[first + k] = first + np.int64(keys[k] >> uint64(_PASSES * DIGIT_BITS))


@kept
@njit(nogil=True)
def _different(hashes, starts, lengths, edges, order, keys, other, chosen, ends):  # type: ignore[no-untyped-def]
    """Write the places of each document's different shingles, by their hashes, to ``chosen`` from its edge on, int64,
    and where they end there to ``ends``. order: int64, scratch as long as ``chosen``."""
    for document in range(len(ends)):
        first = edges[document]
        last = edges[document + 1]
        _in_order(hashes, first, last, order, keys, other)
        ends[document] = _without_repeats(hashes, starts, lengths, order, first, last, chosen)


@kept
@njit(nogil=True)
def _shared(hashes, starts, lengths, chosen, begins, ends, pairs, counts):  # type: ignore[no-untyped-def]
    """Write, for each pair of documents, how many shingles both have and how many either has to ``counts``."""
    for pair in range(len(pairs)):
        i = begins[pairs[pair, 0]]
        j = begins[pairs[pair, 1]]
        i_end = ends[pairs[pair, 0]]
        j_end = ends[pairs[pair, 1]]
        either = i_end - i + j_end - j
        both = 0
        while i < i_end and j < j_end:
            left = hashes[chosen[i]]
            right = hashes[chosen[j]]
            if left < right:
                i += 1
                continue
            if right < left:
                j += 1
                continue
            # Those of the second with this hash: usually one.
            last = j
            while last < j_end and hashes[chosen[last]] == left:
                last += 1
            while i < i_end and hashes[chosen[i]] == left:
                for k in range(j, last):
                    a = chosen[i]
                    b = chosen[k]
                    if lengths[a] == lengths[b] and _same(starts[a], starts[b], lengths[a]):
                        both += 1
                        break
                i += 1
            j = last
        counts[pair, 0] = both
        counts[pair, 1] = either - both


def shared_counts(shingles: Shingles, pairs: np.ndarray, hash_name: HashName = "xxh32") -> np.ndarray:
    """How many different shingles both documents of each pair have, and how many either has: int64[(pairs, 2)].

    pairs: int64[(pairs, 2)], documents of ``shingles``. Any function of `choices.HASHES` gives the same answer.
    """
    hashes = shingles.hashes(hash_name)
    starts = shingles.starts + np.int64(shingles.text.ctypes.data)
    chosen, order = np.empty((2, len(hashes)), np.int64)
    longest = int(np.diff(shingles.edges).max(initial=0))
    keys, other = np.empty((2, longest), np.uint64)
    begins, ends = shingles.edges[:-1], np.empty(len(shingles.edges) - 1, np.int64)
    _different(hashes, starts, shingles.lengths, shingles.edges, order, keys, other, chosen, ends)
    counts = np.empty((len(pairs), 2), np.int64)
    _shared(hashes, starts, shingles.lengths, chosen, begins, ends, pairs, counts)
    return counts
