"""XXH3 with 128 bits of many texts at once on a GPU: the hashes that `xxh3_host.xxh3_128_of` gives.

The method, and its constants, are those of Yann Collet's specification
(https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, XXH3, seed 0). Each of the eight lanes of a text's sums
has a thread of its own. Texts of up to 240 bytes, which have other rules, are hashed by the first of the eight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import cuda

from tilewright.kernels.duplicates.device_hashing import halves, lowest_first
from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.histograms.tables.device_keys import arithmetic
from tilewright.kernels.numbers import ceil_div
from tilewright.kernels.passes import xxh3_host as host
from tilewright.kernels.passes.launcher import Launcher

LANES = host.LANES
THREADS = 2 * LANES if SIMULATOR else 256
TEXTS = THREADS // LANES
"""Texts of a block."""
SLACK = 16
"""Bytes behind the last text that may be read."""
_LOW_HALF = 2**32 - 1

# The kernel's Numba takes constants from the module that it is written in.
_BLOCK, _STRIPE, _STRIPES, _FEW = host.BLOCK_NBYTES, host.STRIPE_NBYTES, host.STRIPES, host.FEW_NBYTES
_P32_1, _P32_2, _P64_1, _P64_2, _P64_4 = (
    host.PRIME32_1, host.PRIME32_2, host.PRIME64_1, host.PRIME64_2, host.PRIME64_4,
)  # fmt: skip
_P64_3, _PRIME_LAST, _PRIME_FEW = host.PRIME64_3, host.PRIME_LAST, host.PRIME_FEW
_SCRAMBLING, _LAST, _LOW, _HIGH = host.SCRAMBLING, host.LAST, host.LOW, host.HIGH
_INITIAL = len(host.SECRET)
"""Where the lanes' first values stand behind the secret."""


def constants() -> np.ndarray:
    """What the kernel combines texts with, uint32: the secret, the lanes' first values, and `SLACK`."""
    data = host.SECRET + host.INITIAL.tobytes() + bytes(SLACK)
    return np.frombuffer(data, np.uint32)


@functools.cache
def _steps() -> tuple[Any, Any, Any, Any, Any]:
    """Inside a kernel: ``word_at(text, place)``, eight bytes from any on, and ``half_at`` and ``byte_at``; both halves
    of a product; the last step of most hashes."""
    half, (word, times, _) = halves(), arithmetic()
    four_bytes = lowest_first()

    @cuda.jit(device=True, inline="always")
    def half_at(text: Any, place: Any) -> Any:
        at = place >> 2
        return word(half(four_bytes(half(text[at]), half(text[at + 1]), place & 3)))

    @cuda.jit(device=True, inline="always")
    def word_at(text: Any, place: Any) -> Any:
        at, first = place >> 2, place & 3
        middle = half(text[at + 1])
        low = word(half(four_bytes(half(text[at]), middle, first)))
        return low | word(half(four_bytes(middle, half(text[at + 2]), first))) << word(32)

    @cuda.jit(device=True, inline="always")
    def byte_at(text: Any, place: Any) -> Any:
        return word(half(text[place >> 2])) >> word(8 * (place & 3)) & word(0xFF)

    @cuda.jit(device=True, inline="always")
    def product(x: Any, y: Any) -> Any:
        mask, shift = word(_LOW_HALF), word(32)
        a, b, c, d = x & mask, x >> shift, y & mask, y >> shift
        ac, ad, bc = times(a, c), times(a, d), times(b, c)
        middle = word((ac >> shift) + (ad & mask) + (bc & mask))
        high = word(times(b, d) + (ad >> shift) + (bc >> shift) + (middle >> shift))
        return word(middle << shift) | (ac & mask), high

    @cuda.jit(device=True, inline="always")
    def avalanche(h: Any) -> Any:
        h = times(h ^ (h >> word(37)), word(_PRIME_LAST))
        return h ^ (h >> word(32))

    return word_at, half_at, byte_at, product, avalanche


@functools.cache
def _of_16_function() -> Any:
    """Inside a kernel: ``of_16(text, at, n)``, the halves of the hash of up to 16 bytes, the low one first."""
    word, times, _ = arithmetic()
    word_at, half_at, byte_at, product, avalanche = _steps()
    few_low, few_high, empty_low, empty_high = (
        int(each) for each in (host.FEW_LOW, host.FEW_HIGH, host.EMPTY_LOW, host.EMPTY_HIGH)
    )
    eight, sixteen_low, sixteen_high = (int(e) for e in (host.EIGHT, host.SIXTEEN_LOW, host.SIXTEEN_HIGH))

    @cuda.jit(device=True, inline="always")
    def older_avalanche(h: Any) -> Any:
        h = times(h ^ (h >> word(33)), word(_P64_2))
        h = times(h ^ (h >> word(29)), word(_P64_3))
        return h ^ (h >> word(32))

    @cuda.jit(device=True, inline="always")
    def swapped(value: Any) -> Any:
        """The eight bytes in reverse."""
        mask = word(0x00FF00FF00FF00FF)
        value = (value >> word(8)) & mask | word((value & mask) << word(8))
        mask = word(0x0000FFFF0000FFFF)
        value = (value >> word(16)) & mask | word((value & mask) << word(16))
        return (value >> word(32)) | word(value << word(32))

    @cuda.jit(device=True, inline="always")
    def of_16(text: Any, at: Any, n: Any) -> Any:
        length = word(n)
        if n > 8:
            first, last = word_at(text, at), word_at(text, at + n - 8)
            low, high = product(first ^ last ^ word(sixteen_low), word(_P64_1))
            low = word(low + word((length - word(1)) << word(54)))
            last ^= word(sixteen_high)
            high = word(high + last + times(last & word(_LOW_HALF), word(_P32_2 - 1)))
            low ^= swapped(high)
            first, last = product(low, word(_P64_2))
            low, high = avalanche(first), avalanche(word(last + times(high, word(_P64_2))))
        elif n >= 4:
            both = half_at(text, at) | word(half_at(text, at + n - 4) << word(32))
            low, high = product(both ^ word(eight), word(word(_P64_1) + word(length << word(2))))
            high = word(high + word(low << word(1)))
            low ^= high >> word(3)
            low = times(low ^ (low >> word(35)), word(_PRIME_FEW))
            low, high = low ^ (low >> word(28)), avalanche(high)
        elif n > 0:
            both = byte_at(text, at) << word(16) | byte_at(text, at + (n >> 1)) << word(24)
            both = both | byte_at(text, at + n - 1) | length << word(8)
            turned = swapped(both) >> word(32)
            turned = (turned << word(13) | turned >> word(19)) & word(_LOW_HALF)
            low, high = older_avalanche(both ^ word(few_low)), older_avalanche(turned ^ word(few_high))
        else:
            low, high = older_avalanche(word(empty_low)), older_avalanche(word(empty_high))
        return low, high

    return of_16


@functools.cache
def _of_240_function() -> Any:
    """Inside a kernel: ``of_240(text, at, n, secret)``, the same of 17 to 240 bytes."""
    word, times, _ = arithmetic()
    word_at, _, _, product, avalanche = _steps()

    @cuda.jit(device=True, inline="always")
    def mixed_pair(text: Any, at: Any, secret: Any, key: Any) -> Any:
        low, high = product(
            word_at(text, at) ^ word_at(secret, key), word_at(text, at + 8) ^ word_at(secret, key + 8)
        )
        return low ^ high

    @cuda.jit(device=True, inline="always")
    def mixed_in(low: Any, high: Any, text: Any, one: Any, other: Any, secret: Any, key: Any) -> Any:
        low = word(low + mixed_pair(text, one, secret, key))
        low ^= word(word_at(text, other) + word_at(text, other + 8))
        high = word(high + mixed_pair(text, other, secret, key + 16))
        high ^= word(word_at(text, one) + word_at(text, one + 8))
        return low, high

    @cuda.jit(device=True, inline="always")
    def of_240(text: Any, at: Any, n: Any, secret: Any) -> Any:
        low, high = times(word(n), word(_P64_1)), word(0)
        end = at + n
        if n <= 128:
            k = (n - 1) >> 5
            while k >= 0:
                low, high = mixed_in(low, high, text, at + 16 * k, end - 16 * (k + 1), secret, 32 * k)
                k -= 1
        else:
            for k in range(4):
                low, high = mixed_in(low, high, text, at + 32 * k, at + 32 * k + 16, secret, 32 * k)
            low, high = avalanche(low), avalanche(high)
            for k in range(4, n >> 5):
                key = 3 + 32 * (k - 4)
                low, high = mixed_in(low, high, text, at + 32 * k, at + 32 * k + 16, secret, key)
            low, high = mixed_in(low, high, text, end - 16, end - 32, secret, 136 - 17 - 16)
        crossed = word(times(low, word(_P64_1)) + times(high, word(_P64_4)) + times(word(n), word(_P64_2)))
        return avalanche(word(low + high)), word(word(0) - avalanche(crossed))

    return of_240


def texts_function() -> Callable[..., None]:
    """The plain function of the kernel that hashes texts.

    text: uint32, what holds them, with `SLACK` behind it. starts, ends: int64, the first byte of each of ``count``
    texts, and the first that is none of it. secret: `constants`. found: uint64[2 * count], written: the high half of
    each, and the low one. Block: THREADS, for TEXTS texts; shared memory: 2 KiB. A text is as long in coming as its
    stripes of 64 bytes are, one behind the other.
    """
    word, times, whole = arithmetic()
    word_at, _, _, product, avalanche = _steps()
    of_16, of_240 = _of_16_function(), _of_240_function()

    @cuda.jit(device=True, inline="always")
    def add_stripe(lane_sum: Any, text: Any, at: Any, lane: Any, secret: Any, key: Any) -> Any:
        keyed = word_at(text, at + 8 * lane) ^ word_at(secret, key + 8 * lane)
        multiplied = times(keyed & word(_LOW_HALF), keyed >> word(32))
        return word(lane_sum + multiplied + word_at(text, at + 8 * (lane ^ 1)))

    @cuda.jit(device=True, inline="always")
    def merged(sums: Any, first_sum: Any, secret: Any, key: Any, first: Any) -> Any:
        for k in range(LANES // 2):
            one = word(sums[first_sum + 2 * k]) ^ word_at(secret, key + 16 * k)
            low, high = product(one, word(sums[first_sum + 2 * k + 1]) ^ word_at(secret, key + 16 * k + 8))
            first = word(first + (low ^ high))
        return avalanche(first)

    def hash_texts(text: Any, starts: Any, ends: Any, count: Any, secret: Any, found: Any) -> None:
        sums = cuda.shared.array(THREADS, numba.uint64)
        thread = whole(cuda.threadIdx.x)
        lane = thread % LANES
        place = whole(cuda.blockIdx.x) * TEXTS + thread // LANES
        at, n = whole(0), whole(0)
        if place < count:
            at = whole(starts[place])
            n = whole(ends[place]) - at
        if n > _FEW:
            lane_sum = word_at(secret, _INITIAL + 8 * lane)
            left, now = n - 1, at
            while left >= _BLOCK:
                for stripe in range(_STRIPES):
                    lane_sum = add_stripe(lane_sum, text, now + _STRIPE * stripe, lane, secret, 8 * stripe)
                lane_sum ^= (lane_sum >> word(47)) ^ word_at(secret, _SCRAMBLING + 8 * lane)
                lane_sum = times(lane_sum, word(_P32_1))
                now += _BLOCK
                left -= _BLOCK
            for stripe in range(left // _STRIPE):
                lane_sum = add_stripe(lane_sum, text, now + _STRIPE * stripe, lane, secret, 8 * stripe)
            sums[thread] = add_stripe(lane_sum, text, at + n - _STRIPE, lane, secret, _LAST)
        cuda.syncthreads()  # all lanes' sums are there before the first of each text merges them
        if place < count and lane == 0:
            length = word(n)
            if n > _FEW:
                low = merged(sums, thread, secret, _LOW, times(length, word(_P64_1)))
                start = word(word(2**64 - 1) ^ times(length, word(_P64_2)))
                high = merged(sums, thread, secret, _HIGH, start)
            elif n > 16:
                low, high = of_240(text, at, n, secret)
            else:
                low, high = of_16(text, at, n)
            found[2 * place] = high
            found[2 * place + 1] = low

    return hash_texts


_WORDS = numba.types.Array(numba.uint32, 1, "C")
_PLACES, _FOUND = numba.types.Array(numba.int64, 1, "C"), numba.types.Array(numba.uint64, 1, "C")

HASH_TEXTS = Launcher(
    texts_function, lambda: numba.void(_WORDS, _PLACES, _PLACES, numba.int64, _WORDS, _FOUND)
)


def hash_texts(text: Any, starts: Any, ends: Any, count: int, secret: Any, found: Any, stream: Any) -> None:
    """Launch the kernel (`texts_function`) for so many texts."""
    if count:
        HASH_TEXTS.enqueue(
            (), ceil_div(count, TEXTS), THREADS, stream, text, starts, ends, count, secret, found
        )


def variants() -> list[Variant]:
    """What tests compile to machine code."""
    return [HASH_TEXTS.variant("XXH3 of texts, 128 bits")]
