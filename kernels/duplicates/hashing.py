"""Hashes of 32 bits of many shingles at once: XXH32, and the first four bytes of SHA-1.

XXH32 is that of Yann Collet's specification (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md) with seed
0. SHA-1 is FIPS 180-4's; its first four bytes, the lowest first, are datasketch's ``sha1_hash32``. A round of it waits
for the one before, so `LANES` shingles go through it together, each in a lane of LLVM's vectors.

Shingles are given by the address of a text, which has to stay, and where each begins there and how long it is, uint32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types, uint32, uint64
from numba.extending import intrinsic

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.vectors import load_byte, load_half
from tilewright.kernels.sha1 import BLOCK_WORDS, STATE_WORDS, after_block

_P1, _P2, _P3, _P4, _P5 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1

LANES = 16
"""Shingles whose SHA-1 is formed together."""
_LANE = ir.IntType(32)
_WORDS = ir.VectorType(_LANE, LANES)
_INITIAL = (0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0)


@njit(nogil=True)
def _rotated(value, bits):  # type: ignore[no-untyped-def]
    """A uint32 rotated to the left."""
    return uint32(uint32(value << uint32(bits)) | uint32(value >> uint32(32 - bits)))


@njit(nogil=True)
def _half(address):  # type: ignore[no-untyped-def]
    return uint32(load_half(address))


@njit(nogil=True)
def xxh32(start, n):  # type: ignore[no-untyped-def]
    """XXH32 of the n bytes at ``start``, uint32."""
    end = start + n
    i = start
    if n >= 16:
        a = uint32(_P1 + _P2 & 0xFFFFFFFF)
        b = uint32(_P2)
        c = uint32(0)
        d = uint32(-_P1 & 0xFFFFFFFF)
        while i + 16 <= end:
            a = uint32(_rotated(uint32(a + _half(i) * uint32(_P2)), 13) * uint32(_P1))
            b = uint32(_rotated(uint32(b + _half(i + 4) * uint32(_P2)), 13) * uint32(_P1))
            c = uint32(_rotated(uint32(c + _half(i + 8) * uint32(_P2)), 13) * uint32(_P1))
            d = uint32(_rotated(uint32(d + _half(i + 12) * uint32(_P2)), 13) * uint32(_P1))
            i += 16
        h = uint32(_rotated(a, 1) + _rotated(b, 7) + _rotated(c, 12) + _rotated(d, 18))
    else:
        h = uint32(_P5)
    h = uint32(h + uint32(n))
    while i + 4 <= end:
        h = uint32(_rotated(uint32(h + _half(i) * uint32(_P3)), 17) * uint32(_P4))
        i += 4
    while i < end:
        h = uint32(_rotated(uint32(h + uint32(load_byte(i)) * uint32(_P5)), 11) * uint32(_P1))
        i += 1
    h = uint32((h ^ (h >> uint32(15))) * uint32(_P2))
    h = uint32((h ^ (h >> uint32(13))) * uint32(_P3))
    return uint32(h ^ (h >> uint32(16)))


@kept
@njit(nogil=True)
def xxh32_of(text, starts, lengths, hashes):  # type: ignore[no-untyped-def]
    """Write XXH32 of each shingle to ``hashes``, uint32."""
    for k in range(len(starts)):
        hashes[k] = xxh32(text + np.int64(starts[k]), np.int64(lengths[k]))


@intrinsic
def _compress(typing: Any, state: Any, block: Any) -> Any:
    """SHA-1's function of a block on all lanes: ``state``, the address of uint32[5, LANES], gets the next state by the
    words at ``block``, the address of uint32[16, LANES]. Both are aligned to four bytes only."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, words_first = (builder.inttoptr(each, _WORDS.as_pointer()) for each in arguments)

        def place(base: Any, k: int) -> Any:
            return builder.gep(base, [ir.Constant(ir.IntType(64), k)])

        def load(base: Any, k: int) -> Any:
            value = builder.load(place(base, k))
            value.align = 4
            return value

        def constant(value: int) -> Any:
            return ir.Constant(_WORDS, [ir.Constant(_LANE, value)] * LANES)

        words = [load(words_first, k) for k in range(BLOCK_WORDS)]
        before = [load(first, k) for k in range(STATE_WORDS)]
        for k, value in enumerate(after_block(builder, before, words, constant)):
            builder.store(value, place(first, k), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@njit(nogil=True)
def _swapped(word):  # type: ignore[no-untyped-def]
    """A uint32 with its bytes in reverse."""
    high = word << uint32(24) | (word & uint32(0xFF00)) << uint32(8)
    return uint32(high | (word >> uint32(8)) & uint32(0xFF00) | word >> uint32(24))


@njit(nogil=True)
def _last_word(start, n):  # type: ignore[no-untyped-def]
    """The word in which a message ends: its last n bytes, fewer than four, at ``start``, a bit, and zeros."""
    word = uint32(0x80) << uint32(24 - 8 * n)
    for j in range(n):
        word |= uint32(load_byte(start + j)) << uint32(24 - 8 * j)
    return uint32(word)


@kept
@njit(nogil=True)
def sha1_of(text, starts, lengths, hashes):  # type: ignore[no-untyped-def]
    """Write the first four bytes of each shingle's SHA-1, the lowest first, to ``hashes``, uint32."""
    state = np.empty((STATE_WORDS, LANES), np.uint32)
    words = np.empty((BLOCK_WORDS, LANES), np.uint32)
    for first in range(0, len(starts), LANES):
        lanes = min(LANES, len(starts) - first)
        most = 0
        for lane in range(lanes):
            most = max(most, (np.int64(lengths[first + lane]) + 8) // 64 + 1)
        for k in range(STATE_WORDS):
            state[k] = uint32(_INITIAL[k])
        for block in range(most):
            for k in range(BLOCK_WORDS):
                words[k] = uint32(0)
            for lane in range(lanes):
                start = text + np.int64(starts[first + lane])
                n = np.int64(lengths[first + lane])
                # Words of text alone, then the one in which it ends; all behind that are zero, but for its length.
                whole = min(BLOCK_WORDS, max(0, n // 4 - BLOCK_WORDS * block))
                for k in range(whole):
                    words[k, lane] = _swapped(_half(start + 64 * block + 4 * k))
                if whole < BLOCK_WORDS and BLOCK_WORDS * block + whole == n // 4:
                    words[whole, lane] = _last_word(start + n - n % 4, n % 4)
                if block == (n + 8) // 64:
                    bits = uint64(n) << uint64(3)
                    words[BLOCK_WORDS - 2, lane] = uint32(bits >> uint64(32))
                    words[BLOCK_WORDS - 1, lane] = uint32(bits)
            _compress(state.ctypes.data, words.ctypes.data)
            for lane in range(lanes):
                if block == (np.int64(lengths[first + lane]) + 8) // 64:
                    hashes[first + lane] = _swapped(state[0, lane])


LOOPS = {"xxh32": xxh32_of, "sha1": sha1_of}
"""The loops, by the names of what they hash with (`choices.HASHES`)."""
