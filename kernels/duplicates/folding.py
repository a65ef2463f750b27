"""How texts are folded: by a table of what each character becomes, for those of which that depends on no other.

``str.casefold`` maps one character after the other. Normal forms do not: marks are put in order, and composed with what
they follow. But a character that is in the form as it stands, is no mark, and combines with none before it, stays what
it is wherever it stands (Unicode Standard Annex 15, section 9). A text of such characters alone is folded by the table
as `TokenKind.folded` does it. Any other character is `UNSETTLED`: its document is one for the cores where a GPU folds
texts (`device_units.py`), and for Python where they do (`folded_documents`).
"""

from __future__ import annotations

import functools
import unicodedata
from dataclasses import dataclass

import numpy as np
from numba import njit, uint64

from tilewright.kernels.choices import FormName
from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.vectors import load_byte, load_word, store_byte, store_word
from tilewright.kernels.histograms.scanning import step_at
from tilewright.kernels.histograms.token_kinds import TokenKind
from tilewright.kernels.histograms.tokens import CODE_BITS, CODE_MASK

CODES = 0x110000
AS_IT_IS, UNSETTLED = 0, 1
"""Entries of `Folding.numbers` that are no places in `Folding.folded`."""
LENGTH_SHIFT, COUNT_SHIFT, FIELD = 56, 60, 15
"""Where what a character becomes says how many bytes, and how many characters, it has; its bytes are below, the first
lowest."""
MOST_NBYTES = 7
_HIGH = 0x8080808080808080
"""The bits of eight bytes by which ASCII is told from the rest."""
_FROM_A, _BEHIND_Z = 0x3F3F3F3F3F3F3F3F, 0x2525252525252525
"""What takes ``A`` of ASCII, and what follows ``Z``, to the high bit."""
_SYLLABLES = range(0xAC00, 0xD7A4)
_VOWELS_AND_FINALS = (range(0x1161, 0x1176), range(0x11A8, 0x11C3))
"""Of Hangul, all of them: syllables decompose, and the others combine with what is before them, by a rule and not by a
table."""


@dataclass(frozen=True, eq=False)
class Folding:
    """What characters become."""

    numbers: np.ndarray
    """uint16[CODES]: of each, its place in ``folded``, or `AS_IT_IS`, or `UNSETTLED`."""
    folded: np.ndarray
    """uint64: bytes, their number, and that of their characters."""


def folding_of(kind: TokenKind) -> Folding:
    return _folding(kind.casefold, kind.normalise)


@functools.cache
def _folding(casefold: bool, form: FormName | None) -> Folding:
    kind = TokenKind("fold", "character", 1, casefold, form)
    combining = _combining() if form is not None else frozenset()

    def stays(text: str) -> bool:
        """Whether it is in the form, and stays in it whatever stands beside it."""
        return form is None or all(
            unicodedata.normalize(form, each) == each
            and not unicodedata.combining(each)
            and each not in combining
            for each in text
        )

    numbers, folded, known = np.zeros(CODES, np.uint16), [0, 0], dict[str, int]()
    for code in _changing():
        character = chr(code)
        becomes = kind.folded(character)
        if not stays(character) or not stays(becomes):
            numbers[code] = UNSETTLED
        elif becomes != character:
            if becomes not in known:
                known[becomes] = len(folded)
                folded.append(_packed(becomes))
            numbers[code] = known[becomes]
    return Folding(numbers, np.array(folded, np.uint64))


@functools.cache
def _changing() -> tuple[int, ...]:
    """All characters but those that nothing makes another one of, wherever they stand: a fiftieth of them."""
    composed = {ord(each) for each in _combining()}
    return tuple(
        code
        for code in range(CODES)
        if unicodedata.decomposition(character := chr(code))
        or unicodedata.combining(character)
        or character.casefold() != character
        or code in composed
        or code in _SYLLABLES
    )


@functools.cache
def _combining() -> frozenset[str]:
    """Characters that a composition puts together with one before them."""
    found = {chr(code) for each in _VOWELS_AND_FINALS for code in each}
    for code in range(CODES):
        parts = unicodedata.decomposition(chr(code)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            found.add(chr(int(parts[1], 16)))
    return frozenset(found)


def _packed(text: str) -> int:
    data = text.encode()
    assert len(data) <= MOST_NBYTES
    assert len(text) <= FIELD
    return int.from_bytes(data, "little") | len(data) << LENGTH_SHIFT | len(text) << COUNT_SHIFT


@njit(nogil=True)
def _is_ascii(p, hi):  # type: ignore[no-untyped-def]
    """Whether the next eight bytes are: each of these becomes one byte."""
    return p + 8 <= hi and load_word(p) & uint64(_HIGH) == 0


@njit(nogil=True)
def _lowered(word):  # type: ignore[no-untyped-def]
    """Eight bytes of ASCII with small letters in place of capitals."""
    capitals = word + uint64(_FROM_A) & ~(word + uint64(_BEHIND_Z)) & uint64(_HIGH)
    return word | capitals >> uint64(2)


@njit(nogil=True)
def _step(p, hi):  # type: ignore[no-untyped-def]
    """`step_at`, the sooner where a text is of ASCII."""
    first = load_byte(p)
    return np.int64(1) << CODE_BITS | first if first < 0x80 else step_at(p, hi)


@kept
@njit(nogil=True)
def _lengths(base, edges, numbers, folded, lengths):  # type: ignore[no-untyped-def]
    """Write how many bytes each document, from ``base + edges[d]`` to ``base + edges[d + 1]``, has once it is folded to
    ``lengths``, int64; -1 where the table does not say it."""
    for document in range(len(lengths)):
        p = base + edges[document]
        hi = base + edges[document + 1]
        length = hi - p
        while p < hi:
            if _is_ascii(p, hi):
                p += 8
                continue
            step = _step(p, hi)
            number = numbers[step & CODE_MASK]
            if number == UNSETTLED:
                length = -1
                break
            size = step >> CODE_BITS
            p += size
            if number != AS_IT_IS:
                length += np.int64(folded[number] >> uint64(LENGTH_SHIFT) & uint64(FIELD)) - size
        lengths[document] = length


@kept
@njit(nogil=True)
def _fold(base, edges, lowers, numbers, folded, by_table, text, places):  # type: ignore[no-untyped-def]
    """Write documents that are folded ``by_table`` to the address ``text``, from their ``places`` on. lowers: whether
    capitals of ASCII become small letters."""
    for document in range(len(by_table)):
        p = base + edges[document]
        hi = base + edges[document + 1]
        at = text + places[document]
        while p < hi and by_table[document]:
            if _is_ascii(p, hi):
                word = load_word(p)
                store_word(at, _lowered(word) if lowers else word)
                p += 8
                at += 8
                continue
            step = _step(p, hi)
            number = numbers[step & CODE_MASK]
            size = step >> CODE_BITS
            if number == AS_IT_IS:
                for k in range(size):
                    store_byte(at + k, load_byte(p + k))
                at += size
            else:
                becomes = folded[number]
                length = np.int64(becomes >> uint64(LENGTH_SHIFT) & uint64(FIELD))
                for k in range(length):
                    store_byte(at + k, np.int64(becomes >> uint64(8 * k)))
                at += length
            p += size


def folded_documents(data: np.ndarray, edges: np.ndarray, kind: TokenKind) -> tuple[np.ndarray, np.ndarray]:
    """The documents ``data[edges[d]:edges[d + 1]]``, uint8, of well-formed UTF-8, each as `TokenKind.folded` has it:
    uint8, and int64, where each begins and the last ends."""
    folding, base = folding_of(kind), data.ctypes.data
    edges = np.ascontiguousarray(edges, np.int64)
    lengths = np.empty(len(edges) - 1, np.int64)
    _lengths(base, edges, folding.numbers, folding.folded, lengths)
    by_table = lengths >= 0
    others = dict[int, bytes]()
    for document in np.flatnonzero(~by_table).tolist():
        stored = data[edges[document] : edges[document + 1]].tobytes()
        others[document] = kind.folded(stored.decode()).encode()
        lengths[document] = len(others[document])
    found = np.concatenate([[0], np.cumsum(lengths)])
    text = np.empty(found[-1], np.uint8)
    _fold(base, edges, kind.casefold, folding.numbers, folding.folded, by_table, text.ctypes.data, found)
    for document, other in others.items():
        text[found[document] : found[document + 1]] = np.frombuffer(other, np.uint8)
    return text, found
