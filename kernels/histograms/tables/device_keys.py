"""Keys of tokens on a GPU: one word of 64 bits tells a token exactly, so that no hash is believed.

Of up to `INLINE` bytes a token is in its key. Of a longer one the key holds where it stands in the text, how long it
is, and 16 bits of its hash; where two keys agree in length and hash, the tokens' bytes are compared in the text. So a
slot of a table is claimed by one compare-and-swap, nothing has to be published behind it, and nobody waits.

An n-gram of words counts as its words with a blank between them, whatever stands there in the text: it is its *form*
that is hashed, compared and copied, and how long that is stands in the key.

What is here runs in kernels; `text` is everything that keys are read with: (data, edges, n, letters, hash_mask), as
`device_tokens.count_function` has them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numba

from tilewright.kernels.gpu.compiled import device_function
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.histograms import tokens
from tilewright.kernels.histograms.token_kinds import word_table
from tilewright.kernels.histograms.tokens import CODE_BITS, CODE_MASK

INLINE = 7
"""Bytes of a token that is in its key."""
PLACE_BITS, LENGTH_BITS = 31, 16
MOST_TEXT_NBYTES = 1 << PLACE_BITS
"""Of a text, so that keys can say where a token stands."""
LONGEST = (1 << LENGTH_BITS) - 2
"""Bytes of a token that has a key; of an n-gram of words those from its first to its last in the text."""
BLANK = 0x20

WORD = 2**64 - 1
FNV_PRIME, FNV_BASIS = 0x100000001B3, 0xCBF29CE484222325
"""Of the hash of bytes by Fowler, Noll and Vo, of which only the last step is another here."""
MIX_1, MIX_2 = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
"""Of MurmurHash3's last step, which makes every bit depend on all."""


@functools.cache
def arithmetic() -> tuple[Any, Any, Any]:
    """Numbers as words of 64 bits, the product of two whose overflow is lost, and numbers with a sign. The simulator
    runs kernels as Python, where NumPy's words would warn of overflow."""
    if SIMULATOR:

        def as_word(value: Any) -> int:
            return int(value) & WORD

        def product(left: int, right: int) -> int:
            return (left * right) & WORD

        return as_word, product, int
    u64 = numba.uint64

    @device_function
    def times(left: Any, right: Any) -> Any:
        return u64(left) * u64(right)

    return u64, times, numba.int64


class Reading(NamedTuple):
    """How a text is read, step by step of the UTF-8 decoder."""

    step_from: Any
    """``step_from(data, i, hi)``: as `tokens.character_at`, where a step begins for certain."""
    is_letter: Any
    """``is_letter(step, letters)``: whether a step's character belongs to words."""
    follows_letter: Any
    """``follows_letter(data, i, lo, hi, letters)``: whether the character before the step at ``i`` belongs to words."""
    document_at: Any
    """`tokens.document_at`."""


@functools.cache
def reading() -> Reading:
    word, _, whole = arithmetic()
    character_at = device_function(tokens.character_at)
    low_letters, high_letters = (int.from_bytes(word_table()[k : k + 8].tobytes(), "little") for k in (0, 8))

    @device_function
    def step_from(data: Any, i: Any, hi: Any) -> Any:
        first = whole(data[word(i)])
        if first < 0x80:
            return whole(1 << CODE_BITS) | first
        return whole(character_at(data, i, i, hi))

    @device_function
    def is_letter(step: Any, letters: Any) -> Any:
        code = step & CODE_MASK
        # Most are of ASCII, and a table in memory would take its turn in the first cache.
        if code < 64:
            return word(low_letters) >> word(code) & word(1) != word(0)
        if code < 128:
            return word(high_letters) >> word(code - 64) & word(1) != word(0)
        return whole(letters[word(code >> 3)]) >> (code & 7) & 1 != 0

    @device_function
    def follows_letter(data: Any, i: Any, lo: Any, hi: Any, letters: Any) -> Any:
        found = False
        before = i - 1
        while before >= lo:
            step = whole(data[word(before)]) | 1 << CODE_BITS
            if step & CODE_MASK >= 0x80:
                step = whole(character_at(data, before, lo, hi))
            if step != 0:
                found = is_letter(step, letters)
                break
            before -= 1
        return found

    document_at = device_function(tokens.document_at)
    return Reading(step_from, is_letter, follows_letter, document_at)


class Keys(NamedTuple):
    """How keys are made and read."""

    key_of: Any
    """``key_of(data, start, length, hash_mask)``: the key, and the hash, of a token that counts as it stands."""
    push: Any
    """``push(byte, key, hashed, length)``: these three behind one more byte, from ``0, FNV_BASIS, 0`` on: where a token
    is read once."""
    finish: Any
    """``finish(start, key, hashed, length, hash_mask)``: the key, and the hash, of the token that begins there."""
    hash_of: Any
    """``hash_of(text, key)``"""
    is_same: Any
    """``is_same(text, key, other)``: whether two keys are of the same token."""
    length_of: Any
    """``length_of(key)``: bytes of the token."""
    prefix_of: Any
    """``prefix_of(text, key)``: its first two bytes, as far as there are, as a number that grows as they do."""
    copy: Any
    """``copy(text, key, out, place)``: write the token's bytes."""


@functools.cache
def keys(ngrams: bool) -> Keys:
    """ngrams: whether tokens are n-grams of words, whose forms count."""
    word, times, whole = arithmetic()
    step_from, is_letter, _, document_at = reading()

    @device_function
    def mixed(value: Any, hash_mask: Any) -> Any:
        value ^= value >> word(33)
        value = times(value, word(MIX_1))
        value ^= value >> word(33)
        value = times(value, word(MIX_2))
        value ^= value >> word(33)
        return value & hash_mask

    @device_function
    def push(byte: Any, key: Any, hashed: Any, length: Any) -> Any:
        byte = word(byte)
        if length < INLINE:
            key |= byte << word(56 - 8 * length)
        return key, times(hashed ^ byte, word(FNV_PRIME)), length + 1

    @device_function
    def finish(start: Any, key: Any, hashed: Any, length: Any, hash_mask: Any) -> Any:
        """A key's lowest bit is 0 for a token that is in it: its bytes, the first on top, and one more than their
        number. Else that bit is 1, with the place above it, the length, and bits of the hash."""
        if length <= INLINE:
            key |= word(length + 1) << word(1)
            hashed = mixed(key, hash_mask)
        else:
            hashed = mixed(hashed, hash_mask)
            key = word(1) | word(start) << word(1) | word(length) << word(PLACE_BITS + 1)
            key |= hashed >> word(48) << word(48)
        return key, hashed

    @device_function
    def key_of(data: Any, start: Any, length: Any, hash_mask: Any) -> Any:
        key = word(0)
        hashed = word(FNV_BASIS)
        if length <= INLINE:
            for k in range(length):
                key |= word(data[word(start + k)]) << word(56 - 8 * k)
        else:
            for k in range(length):
                hashed = times(hashed ^ word(data[word(start + k)]), word(FNV_PRIME))
        return finish(start, key, hashed, length, hash_mask)

    @device_function
    def is_inline(key: Any) -> Any:
        return key & word(1) == word(0)

    @device_function
    def place_of(key: Any) -> Any:
        return whole(key >> word(1) & word(MOST_TEXT_NBYTES - 1))

    @device_function
    def length_of(key: Any) -> Any:
        inline = whole(key >> word(1) & word(0xF)) - 1
        apart = whole(key >> word(PLACE_BITS + 1) & word(0xFFFF))
        return inline if is_inline(key) else apart

    @device_function
    def end_of_document(edges: Any, place: Any) -> Any:
        return whole(edges[word(document_at(edges, place) + 1)])

    @device_function
    def form_step(text: Any, i: Any, left: Any, hi: Any) -> Any:
        """Go on in an n-gram of words. i: behind what was read; left: bytes of the word's character that is under way.
        Returns the next byte of its form, and the same two behind it."""
        data, _, _, letters, _ = text
        blank = False
        while left == 0 and i < hi:
            step = step_from(data, i, hi)
            if is_letter(step, letters):
                left = step >> CODE_BITS
            else:
                blank = True  # for all that is between two words
                i += step >> CODE_BITS
        byte = whole(BLANK)
        if not blank:
            byte = whole(data[word(i)])
            i += 1
            left -= 1
        return byte, i, left

    @device_function
    def hash_of(text: Any, key: Any) -> Any:
        data, edges, _, _, hash_mask = text
        hashed = key
        if not is_inline(key):
            hashed = word(FNV_BASIS)
            i, left = place_of(key), whole(0)
            hi = end_of_document(edges, i) if ngrams else whole(0)
            for _ in range(length_of(key)):
                if ngrams:
                    byte, i, left = form_step(text, i, left, hi)
                else:
                    byte, i = whole(data[word(i)]), i + 1
                hashed = times(hashed ^ word(byte), word(FNV_PRIME))
        return mixed(hashed, hash_mask)

    @device_function
    def is_same(text: Any, key: Any, other: Any) -> Any:
        data, edges, _, _, _ = text
        same = key == other
        apart = not is_inline(key) and not is_inline(other)
        if not same and apart and (key ^ other) >> word(PLACE_BITS + 1) == word(0):
            same = True
            i, j = place_of(key), place_of(other)
            k, most = whole(0), length_of(key)
            if ngrams:
                # Mostly the texts are the same; where they differ, it may be between words.
                hi, hi_other = end_of_document(edges, i), end_of_document(edges, j)
                left, left_other = whole(0), whole(0)
                while same and k < most:
                    byte, i, left = form_step(text, i, left, hi)
                    byte_other, j, left_other = form_step(text, j, left_other, hi_other)
                    same = byte == byte_other
                    k += 1
            else:
                while same and k < most:
                    same = data[word(i + k)] == data[word(j + k)]
                    k += 1
        return same

    @device_function
    def prefix_of(text: Any, key: Any) -> Any:
        data, _, _, letters, _ = text
        prefix = whole(key >> word(48))
        if not is_inline(key):
            start = place_of(key)
            first, second = whole(data[word(start)]), whole(data[word(start + 1)])
            if ngrams:
                # Behind a first byte of ASCII the word goes on, or a blank follows.
                ended = not is_letter(step_from(data, start + 1, MOST_TEXT_NBYTES), letters)
                if first < 0x80 and ended:
                    second = whole(BLANK)
            prefix = first << 8 | second
        return prefix

    @device_function
    def copy(text: Any, key: Any, out: Any, place: Any) -> Any:
        data, edges, _, _, _ = text
        i, left = place_of(key), whole(0)
        hi = end_of_document(edges, i) if ngrams and not is_inline(key) else whole(0)
        for k in range(length_of(key)):
            if is_inline(key):
                byte = whole(key >> word(56 - 8 * k) & word(0xFF))
            elif ngrams:
                byte, i, left = form_step(text, i, left, hi)
            else:
                byte, i = whole(data[word(i)]), i + 1
            out[word(place + k)] = byte

    return Keys(key_of, push, finish, hash_of, is_same, length_of, prefix_of, copy)
