"""MinHash signatures (A. Broder, "On the resemblance and containment of documents", 1997): of a set of hashes, under
each of many permutations, the least. The share of places in which two signatures agree estimates the Jaccard index of
the sets.

The permutations are datasketch's (https://github.com/ekzhu/datasketch), drawn by NumPy's Mersenne twister from a seed,
so that signatures are equal to its: by ``affine32``, its scheme since 2.0, ``a h + b`` modulo 2^32 of a hash that
MurmurHash3's finalizer has mixed; by ``legacy``, that before, ``(a h + b mod 2^64) mod (2^61 - 1) mod 2^32``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit, uint32, uint64

from tilewright.kernels.cpu.loops import kept

MERSENNE_PRIME = 2**61 - 1
EMPTY = 2**32 - 1
"""What stands in the signature of an empty set."""
_AT_ONCE = 4
"""Hashes that go through one pass over the permutations, which are loaded for all of them."""


@dataclass(frozen=True, eq=False)
class Permutations:
    """The functions of hashes whose least values a signature holds."""

    scheme: str
    a: np.ndarray
    b: np.ndarray
    """uint32[permutations], or by ``legacy`` uint64."""

    def __len__(self) -> int:
        return len(self.a)


def permutations_of(scheme: str, count: int, seed: int) -> Permutations:
    """``count`` permutations, which follow from the seed. scheme: one of `choices.SCHEMES`."""
    draw = np.random.RandomState(seed)
    if scheme == "legacy":
        pairs = [
            (
                draw.randint(1, MERSENNE_PRIME, dtype=np.uint64),
                draw.randint(0, MERSENNE_PRIME, dtype=np.uint64),
            )
            for _ in range(count)
        ]
        a, b = np.array(pairs, np.uint64).T.copy()
        return Permutations(scheme, a, b)
    a = draw.randint(0, 2**31, count, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    return Permutations(scheme, a, draw.randint(0, 2**32, count, dtype=np.uint32))


@njit(nogil=True)
def _mixed(h):  # type: ignore[no-untyped-def]
    """MurmurHash3's finalizer of 32 bits."""
    h = uint32((h ^ (h >> uint32(16))) * uint32(0x85EBCA6B))
    h = uint32((h ^ (h >> uint32(13))) * uint32(0xC2B2AE35))
    return uint32(h ^ (h >> uint32(16)))


@njit(nogil=True)
def _folded(x):  # type: ignore[no-untyped-def]
    """The low 32 bits of ``x mod (2^61 - 1)``: x + q - 2^61 q, where q is the quotient."""
    high = x >> uint64(61)
    carry = ((x & uint64(MERSENNE_PRIME)) + high + uint64(1)) >> uint64(61)
    return uint32(x + high + carry)


@kept
@njit(nogil=True)
def _affine_minima(hashes, edges, a, b, signatures):  # type: ignore[no-untyped-def]
    for document in range(len(edges) - 1):
        row = signatures[document]
        row[:] = uint32(EMPTY)
        last = edges[document + 1] - 1
        for first in range(edges[document], edges[document + 1], _AT_ONCE):
            # Behind the last hash it is taken again, which changes no minimum.
            h0 = _mixed(hashes[first])
            h1 = _mixed(hashes[min(first + 1, last)])
            h2 = _mixed(hashes[min(first + 2, last)])
            h3 = _mixed(hashes[min(first + 3, last)])
            for j in range(len(a)):
                x = min(uint32(a[j] * h0 + b[j]), uint32(a[j] * h1 + b[j]))
                y = min(uint32(a[j] * h2 + b[j]), uint32(a[j] * h3 + b[j]))
                row[j] = min(row[j], min(x, y))


@kept
@njit(nogil=True)
def _legacy_minima(hashes, edges, a, b, signatures):  # type: ignore[no-untyped-def]
    for document in range(len(edges) - 1):
        row = signatures[document]
        row[:] = uint32(EMPTY)
        last = edges[document + 1] - 1
        for first in range(edges[document], edges[document + 1], 2):
            h0 = uint64(hashes[first])
            h1 = uint64(hashes[min(first + 1, last)])
            for j in range(len(a)):
                x = min(_folded(a[j] * h0 + b[j]), _folded(a[j] * h1 + b[j]))
                row[j] = min(row[j], x)


def signatures_of(hashes: np.ndarray, edges: np.ndarray, permutations: Permutations) -> np.ndarray:
    """The signatures, uint32[(documents, permutations)], of the sets ``hashes[edges[d]:edges[d + 1]]``, uint32; of an
    empty set `EMPTY` throughout."""
    found = np.empty((len(edges) - 1, len(permutations)), np.uint32)
    minima = _legacy_minima if permutations.scheme == "legacy" else _affine_minima
    minima(hashes, edges, permutations.a, permutations.b, found)
    return found


@kept
@njit(nogil=True)
def _band_keys(signatures, bands, rows, keys):  # type: ignore[no-untyped-def]
    for document in range(len(signatures)):
        for band in range(bands):
            key = uint64(band + 1) * uint64(0x9E3779B97F4A7C15)
            for k in range(rows):
                key = (key ^ uint64(signatures[document, band * rows + k])) * uint64(0xC2B2AE3D27D4EB4F)
                key ^= key >> uint64(29)
            keys[band, document] = key


def band_keys(signatures: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """uint64[(bands, documents)]: 64 bits of each band of a signature, ``rows`` numbers each. Different bands have the
    same key with a chance of 2^-64."""
    keys = np.empty((bands, len(signatures)), np.uint64)
    _band_keys(signatures, bands, rows, keys)
    return keys
