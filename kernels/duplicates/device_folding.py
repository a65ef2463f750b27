"""How a GPU folds texts: by a table of what each character becomes, for those of which that depends on no other.

``str.casefold`` maps one character after the other. Normal forms do not: marks are put in order, and composed with what
they follow. But a character that is in the form as it stands, is no mark, and combines with none before it, stays what
it is wherever it stands (Unicode Standard Annex 15, section 9). A text of such characters alone is folded here as
`TokenKind.folded` does it; any other character is `UNSETTLED`, and its document is one for the cores.
"""

from __future__ import annotations

import functools
import unicodedata
from dataclasses import dataclass

import numpy as np

from tilewright.kernels.choices import FormName
from tilewright.kernels.histograms.token_kinds import TokenKind

CODES = 0x110000
AS_IT_IS, UNSETTLED = 0, 1
"""Entries of `Folding.numbers` that are no places in `Folding.folded`."""
LENGTH_SHIFT, COUNT_SHIFT, FIELD = 56, 60, 15
"""Where what a character becomes says how many bytes, and how many characters, it has; its bytes are below, the first
lowest."""
MOST_NBYTES = 7
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
