"""XXH3 with 128 bits of many texts at once on the CPU: the hashes that libxxhash gives, without the interpreter's lock
and a call for each.

The method, and its constants, are those of Yann Collet's specification
(https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, XXH3, seed 0). Texts of up to 240 bytes go by rules of
their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types, uint32, uint64
from numba.extending import intrinsic

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.vectors import load_byte, load_half, load_word

BLOCK_NBYTES, STRIPE_NBYTES, LANES = 1024, 64, 8
STRIPES = BLOCK_NBYTES // STRIPE_NBYTES
FEW_NBYTES = 240
"""Up to here XXH3 has other rules."""
PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
PRIME_LAST = 0x165667919E3779F9
PRIME_FEW = 0x9FB21C651E98DF25
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""Of the specification, as the primes are: what the keys are taken from."""
INITIAL = np.array(
    [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1], np.uint64
)
"""The lanes' first values."""
SCRAMBLING, LAST, LOW, HIGH = 128, 121, 11, 117
"""Bytes of the secret from which the keys are taken that scramble lanes, of the last stripe, and of both halves."""
_WIDE = ir.IntType(128)
_WORD = ir.IntType(64)
_VECTOR = ir.VectorType(_WORD, LANES)


def _word_at(place: int) -> int:
    return int.from_bytes(SECRET[place : place + 8], "little")


def _both(first: int, second: int) -> int:
    """Two words of the secret, combined."""
    return _word_at(first) ^ _word_at(second)


FEW_LOW = int.from_bytes(SECRET[:4], "little") ^ int.from_bytes(SECRET[4:8], "little")
FEW_HIGH = int.from_bytes(SECRET[8:12], "little") ^ int.from_bytes(SECRET[12:16], "little")
EMPTY_LOW, EMPTY_HIGH = _both(64, 72), _both(80, 88)
EIGHT, SIXTEEN_LOW, SIXTEEN_HIGH = _both(16, 24), _both(32, 40), _both(48, 56)


@intrinsic
def _product(typing: Any, left: Any, right: Any) -> Any:
    """Both halves of the product of two words, the low one first."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = builder.mul(*(builder.zext(each, _WIDE) for each in arguments))
        high = builder.lshr(wide, ir.Constant(_WIDE, 64))
        halves = [builder.trunc(wide, _WORD), builder.trunc(high, _WORD)]
        return context.make_tuple(builder, signature.return_type, halves)

    return types.UniTuple(types.uint64, 2)(types.uint64, types.uint64), build


def _loaded(builder: Any, address: Any) -> Any:
    value = builder.load(builder.inttoptr(address, _VECTOR.as_pointer()))
    value.align = 1
    return value


@intrinsic
def _add_stripe(typing: Any, lanes: Any, text: Any, keys: Any) -> Any:
    """Add 64 bytes of a text to the lanes, uint64[8]; all three are addresses."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes, text, keys = (_loaded(builder, each) for each in arguments)
        low, half = (ir.Constant(_VECTOR, [ir.Constant(_WORD, value)] * LANES) for value in (2**32 - 1, 32))
        swap = ir.Constant(
            ir.VectorType(ir.IntType(32), LANES), [ir.Constant(ir.IntType(32), k ^ 1) for k in range(LANES)]
        )
        mixed = builder.xor(text, keys)
        product = builder.mul(builder.and_(mixed, low), builder.lshr(mixed, half))
        added = builder.add(builder.add(lanes, product), builder.shuffle_vector(text, text, swap))
        builder.store(added, builder.inttoptr(arguments[0], _VECTOR.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), build


@njit(nogil=True)
def _avalanche(h):  # type: ignore[no-untyped-def]
    h = uint64((h ^ (h >> uint64(37))) * uint64(PRIME_LAST))
    return uint64(h ^ (h >> uint64(32)))


@njit(nogil=True)
def _older_avalanche(h):  # type: ignore[no-untyped-def]
    """XXH64's."""
    h = uint64((h ^ (h >> uint64(33))) * uint64(PRIME64_2))
    h = uint64((h ^ (h >> uint64(29))) * uint64(PRIME64_3))
    return uint64(h ^ (h >> uint64(32)))


@njit(nogil=True)
def _swapped(word):  # type: ignore[no-untyped-def]
    """A word with its bytes in reverse."""
    low = uint64(0x00FF00FF00FF00FF)
    word = (word >> uint64(8)) & low | (word & low) << uint64(8)
    low = uint64(0x0000FFFF0000FFFF)
    word = (word >> uint64(16)) & low | (word & low) << uint64(16)
    return uint64(word >> uint64(32) | word << uint64(32))


@njit(nogil=True)
def _folded(x, y):  # type: ignore[no-untyped-def]
    low, high = _product(uint64(x), uint64(y))
    return low ^ high


@njit(nogil=True)
def _mixed_pair(text, keys):  # type: ignore[no-untyped-def]
    return _folded(load_word(text) ^ load_word(keys), load_word(text + 8) ^ load_word(keys + 8))


@njit(nogil=True)
def _mixed_in(low, high, one, other, keys):  # type: ignore[no-untyped-def]
    """Both sums with 16 bytes at one place and 16 at another."""
    low = uint64(low + _mixed_pair(one, keys)) ^ uint64(load_word(other) + load_word(other + 8))
    high = uint64(high + _mixed_pair(other, keys + 16)) ^ uint64(load_word(one) + load_word(one + 8))
    return uint64(low), uint64(high)


@njit(nogil=True)
def _of_16(text, n):  # type: ignore[no-untyped-def]
    """The halves of the hash of up to 16 bytes, the low one first."""
    if n > 8:
        first, last = load_word(text), load_word(text + n - 8)
        low, high = _product(first ^ last ^ uint64(SIXTEEN_LOW), uint64(PRIME64_1))
        low = uint64(low + (uint64(n - 1) << uint64(54)))
        last = last ^ uint64(SIXTEEN_HIGH)
        high = uint64(high + last + (last & uint64(0xFFFFFFFF)) * uint64(PRIME32_2 - 1))
        low = low ^ _swapped(high)
        first, last = _product(low, uint64(PRIME64_2))
        return _avalanche(first), _avalanche(uint64(last + uint64(high * uint64(PRIME64_2))))
    if n >= 4:
        word = uint64(load_half(text)) | uint64(load_half(text + n - 4)) << uint64(32)
        low, high = _product(word ^ uint64(EIGHT), uint64(uint64(PRIME64_1) + uint64(n << 2)))
        high = uint64(high + (low << uint64(1)))
        low = low ^ (high >> uint64(3))
        low = uint64((low ^ (low >> uint64(35))) * uint64(PRIME_FEW))
        return uint64(low ^ (low >> uint64(28))), _avalanche(high)
    if n:
        first = uint32(load_byte(text)) << uint32(16) | uint32(load_byte(text + (n >> 1))) << uint32(24)
        word = uint32(first | uint32(load_byte(text + n - 1)) | uint32(n << 8))
        swapped = uint32(_swapped(uint64(word)) >> uint64(32))
        turned = uint32(swapped << uint32(13) | swapped >> uint32(19))
        return (
            _older_avalanche(uint64(word) ^ uint64(FEW_LOW)),
            _older_avalanche(uint64(turned) ^ uint64(FEW_HIGH)),
        )
    return _older_avalanche(uint64(EMPTY_LOW)), _older_avalanche(uint64(EMPTY_HIGH))


@njit(nogil=True)
def _of_240(text, n, secret):  # type: ignore[no-untyped-def]
    """The same of 17 to 240 bytes."""
    low, high = uint64(uint64(n) * uint64(PRIME64_1)), uint64(0)
    end = text + n
    if n <= 128:
        for k in range((n - 1) // 32, -1, -1):
            low, high = _mixed_in(low, high, text + 16 * k, end - 16 * (k + 1), secret + 32 * k)
    else:
        for k in range(4):
            low, high = _mixed_in(low, high, text + 32 * k, text + 32 * k + 16, secret + 32 * k)
        low, high = _avalanche(low), _avalanche(high)
        for k in range(4, n // 32):
            low, high = _mixed_in(low, high, text + 32 * k, text + 32 * k + 16, secret + 3 + 32 * (k - 4))
        low, high = _mixed_in(low, high, end - 16, end - 32, secret + 136 - 17 - 16)
    sums = uint64(low + high)
    crossed = uint64(low * uint64(PRIME64_1) + high * uint64(PRIME64_4) + uint64(n) * uint64(PRIME64_2))
    return _avalanche(sums), uint64(uint64(0) - _avalanche(crossed))


@njit(nogil=True)
def _merged(lanes, keys, first):  # type: ignore[no-untyped-def]
    found = uint64(first)
    for k in range(LANES // 2):
        one = lanes[2 * k] ^ load_word(keys + 16 * k)
        found = uint64(found + _folded(one, lanes[2 * k + 1] ^ load_word(keys + 16 * k + 8)))
    return _avalanche(found)


@njit(nogil=True)
def _of_more(text, n, secret, lanes):  # type: ignore[no-untyped-def]
    """The same of more; ``lanes`` are overwritten."""
    for lane in range(LANES):
        lanes[lane] = INITIAL[lane]
    sums = lanes.ctypes.data
    blocks = (n - 1) // BLOCK_NBYTES
    for block in range(blocks):
        for stripe in range(STRIPES):
            _add_stripe(sums, text + BLOCK_NBYTES * block + STRIPE_NBYTES * stripe, secret + 8 * stripe)
        for lane in range(LANES):
            value = lanes[lane]
            value = value ^ (value >> uint64(47)) ^ load_word(secret + SCRAMBLING + 8 * lane)
            lanes[lane] = uint64(value * uint64(PRIME32_1))
    rest = text + BLOCK_NBYTES * blocks
    for stripe in range((n - 1 - BLOCK_NBYTES * blocks) // STRIPE_NBYTES):
        _add_stripe(sums, rest + STRIPE_NBYTES * stripe, secret + 8 * stripe)
    _add_stripe(sums, text + n - STRIPE_NBYTES, secret + LAST)
    length = uint64(n)
    return (
        _merged(lanes, secret + LOW, length * uint64(PRIME64_1)),
        _merged(lanes, secret + HIGH, ~uint64(length * uint64(PRIME64_2))),
    )


_SECRET = np.frombuffer(SECRET, np.uint8)


@kept
@njit(nogil=True)
def _hash_all(text, edges, secret, lanes, hashes):  # type: ignore[no-untyped-def]
    keys = secret.ctypes.data
    for k in range(len(hashes)):
        start = text + edges[k]
        n = edges[k + 1] - edges[k]
        if n <= 16:
            low, high = _of_16(start, n)
        elif n <= FEW_NBYTES:
            low, high = _of_240(start, n, keys)
        else:
            low, high = _of_more(start, n, keys, lanes)
        hashes[k, 0] = high
        hashes[k, 1] = low


def xxh3_128_of(data: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The hashes, uint64[(texts, 2)], the high half first, of the texts ``data[edges[k]:edges[k + 1]]``, uint8."""
    found = np.empty((len(edges) - 1, 2), np.uint64)
    _hash_all(
        data.ctypes.data, edges.astype(np.int64, copy=False), _SECRET, np.empty(LANES, np.uint64), found
    )
    return found
