"""MinHash signatures of documents on a GPU, equal to those of `minhash.py`.

A block takes `CHUNK` units in turn. Each of its threads hashes the shingles that begin with some of them, to shared
memory. Then every lane of a warp keeps the minima of some permutations in registers, through which the warp's share of
the hashes of a document goes; at the document's end, or the chunk's, they are joined with those of others in device
memory, by atomic minima. So a document may have any length. The hashes of a short one go through a single warp, so that
a chunk of many is done by all warps at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numba
from numba import cuda

from tilewright.kernels.choices import HASHES, SCHEMES, SHINGLES
from tilewright.kernels.duplicates.device_hashing import halves, hash_function, numbers
from tilewright.kernels.duplicates.device_units import PLACES, SCAN, WALK, WORDS, between_function
from tilewright.kernels.duplicates.minhash import EMPTY, MERSENNE_PRIME
from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.histograms.tables.device_keys import arithmetic
from tilewright.kernels.passes.launcher import Launcher

WARP = 4 if SIMULATOR else 32
THREADS = 8 if SIMULATOR else 256
WARPS = THREADS // WARP
CHUNK = 16 if SIMULATOR else 1024
"""Units of which a block hashes the shingles before it takes their minima."""
A_LANE = 2 if SIMULATOR else 4
"""Permutations whose minima a lane keeps."""
GROUP = WARP * A_LANE
AT_ONCE = 2 if SIMULATOR else 4
"""Hashes, side by side, that a warp takes at a time."""
SHORT = 3 if SIMULATOR else 64
"""Shingles of a document that one warp takes the minima of."""
KEY_THREADS = 4 if SIMULATOR else 256


def _scheme_function(scheme: str) -> tuple[Any, Any, Any]:
    """Inside a kernel: ``prepared(h)``, what all permutations of a hash begin with; ``permuted(a, h, b)``; and the type
    of a and b."""
    half, (word, times, _) = halves(), arithmetic()

    @cuda.jit(device=True, inline="always")
    def mixed(h: Any) -> Any:
        h = half(half(h ^ (h >> half(16))) * half(0x85EBCA6B))
        h = half(half(h ^ (h >> half(13))) * half(0xC2B2AE35))
        return half(h ^ (h >> half(16)))

    @cuda.jit(device=True, inline="always")
    def affine(a: Any, h: Any, b: Any) -> Any:
        return half(half(half(a) * half(h)) + half(b))

    @cuda.jit(device=True, inline="always")
    def as_it_is(h: Any) -> Any:
        return half(h)

    @cuda.jit(device=True, inline="always")
    def remainder(a: Any, h: Any, b: Any) -> Any:
        x = word(times(word(a), word(h)) + word(b))
        high = x >> word(61)
        carry = word((x & word(MERSENNE_PRIME)) + high + word(1)) >> word(61)
        return half(word(x + high + carry))

    if scheme == "legacy":
        return as_it_is, remainder, numba.uint64
    return mixed, affine, numba.uint32


def sign_function(hash_name: str, scheme: str) -> Callable[..., None]:
    """The plain function of the kernel that forms signatures.

    text: uint32, the units' bytes with `device_hashing.SLACK` behind them. places: uint32, where each unit begins, and
    one behind the last. unit_edges: int64[documents + 1], the first unit of each document. n: units of a shingle, with
    ``gap`` bytes between two. a, b: [permutations] of uint32, or by ``legacy`` of uint64. signatures: uint32[documents
    * permutations], written, all `EMPTY` before. Block: THREADS, for CHUNK units each; shared memory: 4 KiB.
    """
    half, short, (word, _, whole) = halves(), numbers(), arithmetic()
    between, hash_of = between_function(), hash_function(hash_name)
    prepared, permuted, of_permutations = _scheme_function(scheme)

    def sign(
        text: Any, places: Any, unit_edges: Any, documents: Any, n: Any, gap: Any,
        a: Any, b: Any, permutations: Any, signatures: Any,
    ) -> None:  # fmt: skip
        hashes = cuda.shared.array(CHUNK, numba.uint32)
        factors = cuda.local.array(A_LANE, of_permutations)
        terms = cuda.local.array(A_LANE, of_permutations)
        minima = cuda.local.array(A_LANE, numba.uint32)
        thread = whole(cuda.threadIdx.x)
        warp, lane = thread // WARP, thread % WARP
        first = whole(cuda.blockIdx.x) * CHUNK
        last = min(first + CHUNK, whole(unit_edges[word(documents)]))
        low = between(unit_edges, 0, documents, first)
        high = between(unit_edges, low, documents - 1, last - 1)
        for unit in range(first + thread, last, THREADS):
            document = between(unit_edges, low, high, unit)
            begin, end = whole(unit_edges[word(document)]), whole(unit_edges[word(document + 1)])
            if unit <= max(begin, end - n):
                start = whole(places[word(unit)])
                length = whole(places[word(min(unit + n, end))]) - gap - start
                hashes[word(unit - first)] = prepared(hash_of(text, start, length))
        cuda.syncthreads()  # all hashes are there before their minima are taken
        for group in range(0, permutations, GROUP):
            for k in range(A_LANE):
                # Behind the last permutation it is taken again, and not written.
                permutation = min(group + k * WARP + lane, permutations - 1)
                factors[k], terms[k] = a[word(permutation)], b[word(permutation)]
            for document in range(low, high + 1):
                begin, end = whole(unit_edges[word(document)]), whole(unit_edges[word(document + 1)])
                at = short(max(begin, first) - first)
                stop = short(min(max(begin, end - n) + 1, end, last) - first)
                step = short(AT_ONCE * WARPS)
                if stop - at <= SHORT:
                    step = short(AT_ONCE)
                    if document % WARPS != warp:
                        stop = at
                else:
                    at = short(at + AT_ONCE * warp)
                if at < stop:
                    for k in range(A_LANE):
                        minima[k] = half(EMPTY)
                    while at < stop:
                        rest = short(stop - at)
                        if rest >= AT_ONCE:
                            for ahead in range(AT_ONCE):
                                h = half(hashes[half(at + ahead)])
                                for k in range(A_LANE):
                                    minima[k] = min(half(minima[k]), permuted(factors[k], h, terms[k]))
                        else:
                            for ahead in range(rest):
                                h = half(hashes[half(at + ahead)])
                                for k in range(A_LANE):
                                    minima[k] = min(half(minima[k]), permuted(factors[k], h, terms[k]))
                        at = short(at + step)
                    for k in range(A_LANE):
                        permutation = group + k * WARP + lane
                        if permutation < permutations:
                            cuda.atomic.min(
                                signatures, document * permutations + permutation, half(minima[k])
                            )

    return sign


def keys_function() -> Callable[..., None]:
    """The plain function of the kernel that forms the keys of bands, as `minhash.band_keys` does: to ``keys``,
    uint64[bands * documents], from signatures, uint32[documents * permutations]. Any grid, of KEY_THREADS."""
    word, times, whole = arithmetic()

    def form_keys(
        signatures: Any, documents: Any, permutations: Any, bands: Any, rows: Any, keys: Any
    ) -> None:
        place = whole(cuda.grid(1))
        while place < bands * documents:
            band, document = place // documents, place % documents
            key = times(word(band + 1), word(0x9E3779B97F4A7C15))
            for row in range(rows):
                value = word(signatures[word(document * permutations + band * rows + row)])
                key = times(key ^ value, word(0xC2B2AE3D27D4EB4F))
                key ^= key >> word(29)
            keys[word(place)] = key
            place += whole(cuda.gridsize(1))

    return form_keys


_NUMBER = numba.int64
_KEYS = numba.types.Array(numba.uint64, 1, "C")


def _sign_signature(hash_name: str, scheme: str) -> Any:
    of = _KEYS if scheme == "legacy" else WORDS
    return numba.void(WORDS, WORDS, PLACES, _NUMBER, _NUMBER, _NUMBER, of, of, _NUMBER, WORDS)


SIGN = Launcher(sign_function, _sign_signature)
FORM_KEYS = Launcher(keys_function, lambda: numba.void(WORDS, _NUMBER, _NUMBER, _NUMBER, _NUMBER, _KEYS))


def variants() -> Iterable[Variant]:
    """What tests compile to machine code."""
    for unit in SHINGLES:
        for folds in (False, True):
            for writes in (False, True):
                what = f"{'write' if writes else 'count'} units: {unit}{', folded' if folds else ''}"
                yield WALK.variant(what, unit, folds, writes)
    yield SCAN.variant("scan tiles")
    for hash_name in HASHES:
        for scheme in SCHEMES:
            yield SIGN.variant(f"sign: {hash_name}, {scheme}", hash_name, scheme)
    yield FORM_KEYS.variant("keys of bands")
