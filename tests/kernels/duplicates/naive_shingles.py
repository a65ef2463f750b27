"""Shingles, hashes, signatures and Jaccard indices by Python alone, as slow as they are obvious."""

from __future__ import annotations

import hashlib
import struct
import unicodedata

import numpy as np
import xxhash

from tilewright.kernels.histograms.token_kinds import word_table


def folded(text: str, casefold: bool, normalise: str | None) -> str:
    if normalise is not None:
        text = unicodedata.normalize(normalise, text)
    if casefold:
        text = text.casefold()
    return unicodedata.normalize(normalise, text) if normalise is not None else text


def words(text: str) -> list[str]:
    letters = word_table()
    spaced = "".join(each if letters[ord(each) >> 3] >> (ord(each) & 7) & 1 else "\0" for each in text)
    return [word for word in spaced.split("\0") if word]


def shingles(
    document: bytes, shingle: str, ngram: int, casefold: bool = False, normalise: str | None = None
) -> list[bytes]:
    """One behind the other, as often as they occur."""
    text = document.decode(errors="replace")
    if shingle == "word":
        units, between = [folded(word, casefold, normalise) for word in words(text)], " "
    else:
        units, between = list(folded(text, casefold, normalise)), ""
    if not units:
        return []
    return [
        between.join(units[place : place + ngram]).encode() for place in range(max(1, len(units) - ngram + 1))
    ]


def jaccard(one: list[bytes], other: list[bytes]) -> float:
    either = set(one) | set(other)
    return len(set(one) & set(other)) / len(either) if either else 0.0


def hash_of(shingle: bytes, name: str) -> int:
    if name == "xxh32":
        return xxhash.xxh32_intdigest(shingle)
    found: int = struct.unpack("<I", hashlib.sha1(shingle).digest()[:4])[0]
    return found


def mixed(h: int) -> int:
    """MurmurHash3's finalizer."""
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def signature(hashes: list[int], scheme: str, num_perm: int, seed: int) -> list[int]:
    """As the documentation of datasketch has it."""
    draw = np.random.RandomState(seed)
    prime = 2**61 - 1
    if scheme == "legacy":
        pairs = [
            (int(draw.randint(1, prime, dtype=np.uint64)), int(draw.randint(0, prime, dtype=np.uint64)))
            for _ in range(num_perm)
        ]
        return [min([2**32 - 1, *((a * h + b) % 2**64 % prime % 2**32 for h in hashes)]) for a, b in pairs]
    odd = [2 * int(a) + 1 for a in draw.randint(0, 2**31, num_perm, dtype=np.uint32)]
    added = draw.randint(0, 2**32, num_perm, dtype=np.uint32).tolist()
    return [
        min([2**32 - 1, *((a * mixed(h) + b) % 2**32 for h in hashes)])
        for a, b in zip(odd, added, strict=True)
    ]
