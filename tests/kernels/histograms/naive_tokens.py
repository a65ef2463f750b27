"""Words, lines and n-grams as Python counts them: slow, and plain to see."""

from __future__ import annotations

import unicodedata
from collections import Counter
from itertools import groupby

from tilewright.kernels.histograms.token_kinds import TokenKind


def is_word(character: str) -> bool:
    """UTS #18's ``\\w``: alphabetic, mark, decimal digit, connector, joiner."""
    category = unicodedata.category(character)
    return (
        category[0] in "LM"
        or category in ("Nd", "Nl", "Pc")
        or character in "\u200c\u200d"
        or 0x24B6 <= ord(character) <= 0x24E9
        or any(first <= ord(character) <= first + 25 for first in (0x1F130, 0x1F150, 0x1F170))
    )


def words(text: str) -> list[str]:
    return ["".join(run) for found, run in groupby(text, is_word) if found]


def naive_tokens(data: bytes, kind: TokenKind) -> Counter[bytes]:
    """What one document holds."""
    if kind.unit == "line":
        return Counter(line.decode(errors="replace").encode() for line in data.splitlines())
    if kind.unit == "byte":
        units = [data[i : i + 1] for i in range(len(data))]
        between = b""
    elif kind.unit == "character":
        units = [character.encode() for character in data.decode(errors="replace")]
        between = b""
    else:
        units = [kind.folded(word).encode() for word in words(data.decode(errors="replace"))]
        between = b" "
    return Counter(between.join(units[i : i + kind.n]) for i in range(len(units) - kind.n + 1))
