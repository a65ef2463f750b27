"""What a histogram counts: the kinds, their bins, and which byte each counted token belongs to.

Every token (byte, pair or character) belongs to exactly one byte position of its document, and which token a
position carries depends on at most ``before`` bytes before it and ``after`` bytes after it (`KINDS`). So a piece of a
document that is read with those margins counts the tokens of its own positions and no others, and the counts of pieces
add up to the document's wherever it is cut: reduction is plain addition of integers.

Why three bytes on either side are enough for UTF-8. A byte that is not a continuation (80..BF) always begins
a new step of the decoder, whatever stands before it, because a step consumes nothing but continuations after
its first byte. A step that begins at j consumes at most four bytes, so its length needs j .. j+3. A
continuation at i was consumed by an earlier step if and only if the nearest byte before it that is not a
continuation stands at j >= i-3 and the step at j reaches i (between them stand only continuations, so no step
can begin there before that one ends); otherwise it is a malformed character by itself. A step belongs to the
position of its first byte.

The functions here are plain Python without calls among them, so that one text is compiled twice: by
``numba.njit`` for the host and by ``cuda.jit(device=True)`` for the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewright.kernels.arguments import check_choice

BYTE, ASCII, LETTER, BIGRAM, CODEPOINT = range(5)
"""The kinds as kernels know them. Those below BIGRAM give each byte, by itself, the bin that `folded_bin` says."""

LETTERS = 26
REPLACEMENT = 0xFFFD
"""What Python's ``errors="replace"`` puts in the place of a malformed sequence."""
CODE_BITS = 21
"""Bits of a code point; `character_at` returns the length above them."""
CODE_MASK = (1 << CODE_BITS) - 1


def folded_bin(value: Any, code: Any) -> Any:
    """The bin of byte ``value`` in a histogram of kind ``code`` (BYTE, ASCII or LETTER), or -1 when skipped.

    Every byte is skipped in a kind of any other code.
    """
    if code == BYTE:
        return value
    if code == ASCII:
        return value if value < 128 else -1
    if code == LETTER:
        letter = (value | 0x20) - 0x61  # 0x20 is the bit in which upper and lower case differ
        return letter if letter >= 0 and letter < LETTERS else -1
    return -1


def bins_of(code: int) -> int:
    """How many bins kernels count a kind of this code into; 0 for a code that they do not know."""
    if code == BIGRAM:
        return 1 << 16
    if code == CODEPOINT:
        return 0x110000
    return 1 + max(folded_bin(value, code) for value in range(256)) if BYTE <= code < BIGRAM else 0


@dataclass(frozen=True)
class Kind:
    """One way to count a text."""

    name: str
    code: int
    bins: int
    before: int
    """Bytes before a position that its token may depend on."""
    after: int
    """Bytes after a position that its token may depend on."""
    summary: str

    def __post_init__(self) -> None:
        """Kernels count without looking at ``bins``: beyond them they would write to memory of others."""
        bins = bins_of(self.code)
        if not bins:
            raise ValueError(
                f"kind {self.name!r} has code {self.code}, which kernels do not know; bins_of must know it, and if it"
                " is below BIGRAM, folded_bin"
            )
        if self.bins != bins:
            raise ValueError(
                f"kind {self.name!r} has {self.bins} bins, but kernels count code {self.code} into {bins}"
            )

    @property
    def decodes(self) -> bool:
        """Whether malformed bytes count as U+FFFD."""
        return self.code == CODEPOINT

    def skipped(self, counted: int, nbytes: int) -> int:
        """How many of ``nbytes`` bytes have no bin, given the sum of all counts: those above 127 for ascii, all but
        letters for letter. Kinds that leave nothing out give 0."""
        return nbytes - counted if self.code < BIGRAM else 0


KINDS = {
    kind.name: kind
    for kind in (
        Kind("byte", BYTE, 256, 0, 0, "every byte value"),
        Kind("ascii", ASCII, 128, 0, 0, "byte values below 128; others are skipped"),
        Kind("letter", LETTER, LETTERS, 0, 0, "A to Z, case folded; others are skipped"),
        Kind("bigram", BIGRAM, 1 << 16, 0, 1, "pairs of adjacent bytes, bin = first * 256 + second"),
        Kind("codepoint", CODEPOINT, 0x110000, 3, 3, "Unicode characters of UTF-8, malformed ones as U+FFFD"),
    )
}


def kind_named(by: str) -> Kind:
    """The kind called ``by``; OptionError, with the names there are, for any other word."""
    return KINDS[check_choice("by", by, tuple(KINDS), "kind of histogram")]


def character_at(data: Any, i: Any, lo: Any, hi: Any) -> Any:
    """The step of the UTF-8 decoder that begins at byte ``i`` of the document ``data[lo:hi]``.

    Returns ``length << CODE_BITS | code point``, and 0 when no step begins there because an earlier one
    consumed the byte. Malformed sequences give U+FFFD with the length CPython's decoder gives them: the
    longest prefix of a well-formed sequence (Unicode's "maximal subpart"), or one byte where there is none.
    """
    j = i
    while j > lo and j > i - 3 and data[j] & 0xC0 == 0x80:
        j -= 1
    first = int(data[j])
    length = 1
    code = first
    if first >= 0x80:
        code = REPLACEMENT
        if 0xC2 <= first <= 0xF4:
            # The second byte's range shuts out overlong forms, surrogates, and what lies above U+10FFFF.
            low = 0x80
            high = 0xBF
            following = 1
            if first >= 0xE0:
                following = 2
            if first >= 0xF0:
                following = 3
            if first == 0xE0:
                low = 0xA0
            elif first == 0xED:
                high = 0x9F
            elif first == 0xF0:
                low = 0x90
            elif first == 0xF4:
                high = 0x8F
            partial = first & (0x3F >> following)
            while length <= following and j + length < hi:
                byte = int(data[j + length])
                if byte < low or byte > high:
                    break
                partial = partial << 6 | byte & 0x3F
                low = 0x80
                high = 0xBF
                length += 1
            if length > following:
                code = partial
    if j < i:
        # Byte i is a continuation: consumed by the step at j, or malformed by itself.
        return 0 if i - j < length else 1 << CODE_BITS | REPLACEMENT
    return length << CODE_BITS | code


def document_at(offsets: Any, position: Any) -> Any:
    """The last document that begins at or before ``position``; -1 when that lies before the first."""
    low = 0
    high = offsets.shape[0]
    while low < high:
        middle = (low + high) // 2
        if offsets[middle] <= position:
            low = middle + 1
        else:
            high = middle
    return low - 1
