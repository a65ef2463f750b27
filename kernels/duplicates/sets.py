"""Sets of shingles compared as they are: by hashes first, and wherever those are the same by the shingles' bytes."""

from __future__ import annotations

import numpy as np
from numba import njit

from tilewright.kernels.choices import HashName
from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.vectors import load_byte
from tilewright.kernels.duplicates.shingles import Shingles


@njit(nogil=True)
def _same(a, b, n):  # type: ignore[no-untyped-def]
    i = 0
    while i < n and load_byte(a + i) == load_byte(b + i):
        i += 1
    return i == n


@kept
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
    chosen = np.empty(len(hashes), np.int64)
    order = np.empty(len(hashes), np.int64)
    begins, ends = shingles.edges[:-1], shingles.edges[1:].copy()
    for document, (first, last) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        order[first:last] = first + np.argsort(hashes[first:last], kind="stable")
        ends[document] = _without_repeats(hashes, starts, shingles.lengths, order, first, last, chosen)
    counts = np.empty((len(pairs), 2), np.int64)
    _shared(hashes, starts, shingles.lengths, chosen, begins, ends, pairs, counts)
    return counts
