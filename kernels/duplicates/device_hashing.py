"""Hashes of shingles on a GPU, a shingle to a thread: those of `hashing.py`, of which this has the specifications.

Shingles lie in words of 32 bits, the first byte of each lowest, and may begin at any byte of them. A word of a shingle
is put together from two of those.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
from numba import cuda

from tilewright.kernels.gpu.device_choice import SIMULATOR

HALF = 2**32 - 1
BLOCK_WORDS, BLOCK_NBYTES = 16, 64
_LENGTH_NBYTES = 9
"""What SHA-1 puts behind a message at least: a bit, and eight bytes that say how long it is."""
_INITIAL = (0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0)
_P1, _P2, _P3, _P4, _P5 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1
_ACCUMULATORS = (_P1 + _P2 & HALF, _P2, 0, -_P1 & HALF)


@functools.cache
def halves() -> Any:
    """Inside a kernel: a number as a word of 32 bits, whose overflow is lost. The simulator runs kernels as Python."""
    if SIMULATOR:
        return lambda value: int(value) & HALF
    return numba.uint32


@functools.cache
def numbers() -> Any:
    """Inside a kernel: a number of 32 bits with a sign, which takes half the instructions of one of 64."""
    return int if SIMULATOR else numba.int32


@functools.cache
def _instructions() -> tuple[Any, Any, Any]:
    """Inside a kernel: four bytes of two words from a byte on, as they lie there and the first of them highest; SHA-1's
    function of a block."""
    if not SIMULATOR:
        from tilewright.kernels.ptx.integers import byte_permute, funnel_right
        from tilewright.kernels.ptx.sha1 import sha1_block

        u32 = numba.uint32

        @cuda.jit(device=True, inline="always")
        def lowest_first(low: Any, high: Any, first: Any) -> Any:
            return funnel_right(u32(low), u32(high), u32(first << 3))

        @cuda.jit(device=True, inline="always")
        def highest_first(low: Any, high: Any, first: Any) -> Any:
            return byte_permute(u32(low), u32(high), u32(0x0123 + 0x1111 * first))

        return lowest_first, highest_first, sha1_block

    def four_bytes(low: int, high: int, first: int) -> int:
        return (int(high) << 32 | int(low)) >> 8 * int(first) & HALF

    def swapped(low: int, high: int, first: int) -> int:
        return int.from_bytes(four_bytes(low, high, first).to_bytes(4, "little"), "big")

    return four_bytes, swapped, _sha1_in_python


def lowest_first() -> Any:
    """Inside a kernel: ``four_bytes(low, high, first)``, four bytes of two words from a byte on, as they lie there."""
    return _instructions()[0]


def _sha1_in_python(state: tuple[int, ...], words: tuple[int, ...]) -> tuple[int, ...]:
    def rotated(value: int, bits: int) -> int:
        return (value << bits | value >> 32 - bits) & HALF

    every = [int(word) for word in words]
    for t in range(16, 80):
        every.append(rotated(every[t - 3] ^ every[t - 8] ^ every[t - 14] ^ every[t - 16], 1))
    a, b, c, d, e = state
    for t, word in enumerate(every):
        f = (b & c | ~b & d, b ^ c ^ d, b & c | b & d | c & d, b ^ c ^ d)[t // 20]
        constant = (0x5A827999, 0x6ED9EBA1, 0x8F1BBCDC, 0xCA62C1D6)[t // 20]
        a, b, c, d, e = (rotated(a, 5) + f + e + constant + word) & HALF, a, rotated(b, 30), c, d
    return tuple((old + new) & HALF for old, new in zip(state, (a, b, c, d, e), strict=True))


def hash_function(name: str) -> Any:
    """Inside a kernel: ``hash_of(text, start, n)``, the hash of n bytes from byte ``start`` of a text on, uint32[...],
    by a function of `choices.HASHES`."""
    return {"sha1": _sha1_function, "xxh32": _xxh32_function}[name]()


def _sha1_function() -> Any:
    half, short = halves(), numbers()
    _, highest_first, block_function = _instructions()
    h0, h1, h2, h3, h4 = _INITIAL

    @cuda.jit(device=True, inline="always")
    def sha1_of(text: Any, start: Any, n: Any) -> Any:
        words = cuda.local.array(BLOCK_WORDS, numba.uint32)
        state = (half(h0), half(h1), half(h2), half(h3), half(h4))
        at, first = half(start >> 2), start & 3
        left = short(n)  # bytes of the message from the block's beginning on
        # Of the word in which it ends: what belongs to it, and the bit behind that.
        kept = half(~(HALF >> ((n & 3) << 3)))
        bit = half(0x80 << (24 - ((n & 3) << 3)))
        while left > -_LENGTH_NBYTES:
            last = short(left >> 2)
            low = half(text[at])
            for k in range(BLOCK_WORDS):
                value = half(0)
                if k <= last:
                    high = half(text[half(at + k + 1)])
                    value = half(highest_first(low, high, first))
                    low = high
                if k == last:
                    value = half((value & kept) | bit)
                words[k] = value
            if left <= BLOCK_NBYTES - _LENGTH_NBYTES:
                words[BLOCK_WORDS - 2] = half(n >> 29)
                words[BLOCK_WORDS - 1] = half(n << 3)
            w = words
            state = block_function(
                state,
                (
                    half(w[0]), half(w[1]), half(w[2]), half(w[3]), half(w[4]), half(w[5]), half(w[6]),
                    half(w[7]), half(w[8]), half(w[9]), half(w[10]), half(w[11]), half(w[12]), half(w[13]),
                    half(w[14]), half(w[15]),
                ),
            )  # fmt: skip
            at = half(at + BLOCK_WORDS)
            left = short(left - BLOCK_NBYTES)
        return half(highest_first(state[0], state[0], 0))

    return sha1_of


def _xxh32_function() -> Any:
    half = halves()
    four_bytes = lowest_first()
    a0, b0, c0, d0 = _ACCUMULATORS

    @cuda.jit(device=True, inline="always")
    def rotated(value: Any, bits: Any) -> Any:
        value = half(value)
        return half(half(value << half(bits)) | half(value >> half(32 - bits)))

    @cuda.jit(device=True, inline="always")
    def word_at(text: Any, i: Any) -> Any:
        return half(four_bytes(half(text[i >> 2]), half(text[(i >> 2) + 1]), i & 3))

    @cuda.jit(device=True, inline="always")
    def added(value: Any, word: Any) -> Any:
        return half(rotated(half(value + half(word * half(_P2))), 13) * half(_P1))

    @cuda.jit(device=True, inline="always")
    def xxh32_of(text: Any, start: Any, n: Any) -> Any:
        i, end = start, start + n
        h = half(_P5)
        if n >= 16:
            a, b, c, d = half(a0), half(b0), half(c0), half(d0)
            while i + 16 <= end:
                a = added(a, word_at(text, i))
                b = added(b, word_at(text, i + 4))
                c = added(c, word_at(text, i + 8))
                d = added(d, word_at(text, i + 12))
                i += 16
            h = half(half(rotated(a, 1) + rotated(b, 7)) + half(rotated(c, 12) + rotated(d, 18)))
        h = half(h + half(n))
        while i + 4 <= end:
            h = half(rotated(half(h + half(word_at(text, i) * half(_P3))), 17) * half(_P4))
            i += 4
        while i < end:
            byte = half(word_at(text, i) & half(0xFF))
            h = half(rotated(half(h + half(byte * half(_P5))), 11) * half(_P1))
            i += 1
        h = half(half(h ^ (h >> half(15))) * half(_P2))
        h = half(half(h ^ (h >> half(13))) * half(_P3))
        return half(h ^ (h >> half(16)))

    return xxh32_of
