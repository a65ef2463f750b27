"""Kinds whose tokens are not known beforehand: words, lines and n-grams, which have as many bins as the text says.

A word is a longest run of word characters: those of Unicode's regular expressions (UTS #18, annex C, ``\\w``), that is
letters, marks, decimal digits, letter numbers, connector punctuation such as the underscore, the two joiners, and the
letters in circles and squares. So words in which letters carry marks stay whole, in Hindi as in decomposed Latin; an
apostrophe or a hyphen ends a word, and languages that write no blanks have long ones. The characters are those of
``bytes.decode("utf-8", errors="replace")``, the categories those of Python's ``unicodedata``.

A line is what ``bytes.splitlines`` says. An n-gram is n adjacent bytes, characters or words of a document.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from dataclasses import dataclass

import numpy as np

from tilewright.kernels.arguments import check_choice, check_flag, shown
from tilewright.kernels.choices import FORMS, FormName
from tilewright.kernels.errors import OptionError
from tilewright.kernels.histograms.tokens import KINDS, Kind
from tilewright.kernels.words import did_you_mean

UNITS = ("word", "character", "byte")
"""What n-grams consist of."""
LEAST_N, MOST_N = 2, 5
"""Units of an n-gram: five words' numbers fit the 128 bits by which n-grams are told apart."""
MARGIN = 8
"""Bytes before a position that say whether a token begins there: two steps of the UTF-8 decoder."""

TABLE_NBYTES = 688 << 20
"""Of a GPU's memory, at most: a table in which tokens are counted there."""

_OPEN = ("word", "line")
_NGRAM = re.compile(r"ngram:([0-9]{1,3})(?::([a-z]*))?", re.ASCII)
_CATEGORIES = frozenset(
    (
        "Lu",
        "Ll",
        "Lt",
        "Lm",
        "Lo",
        "Nl",
        "Mn",
        "Mc",
        "Me",
        "Nd",
        "Pc",
    )  # alphabetic, marks, digits, connectors
)
_OTHERS = (
    (0x200C, 0x200D),  # joiners
    (0x24B6, 0x24E9),  # letters in circles, and in squares: alphabetic symbols
    (0x1F130, 0x1F149),
    (0x1F150, 0x1F169),
    (0x1F170, 0x1F189),
)


@dataclass(frozen=True)
class TokenKind:
    """One way to count a text by tokens that are not known beforehand."""

    name: str
    """As ``by`` says it, with the unit of n-grams only where it is not ``word``."""
    unit: str
    """``word``, ``line``, ``character`` or ``byte``."""
    n: int = 1
    """Units of a token."""
    casefold: bool = False
    normalise: FormName | None = None
    before: int = MARGIN
    """As of `tokens.Kind`. How far a token reaches behind a position is not known beforehand."""
    after: int = 0

    @property
    def decodes(self) -> bool:
        """Whether malformed bytes count as U+FFFD."""
        return self.unit != "byte"

    @property
    def grows(self) -> bool:
        """Whether a text of twice the length may have twice as many different tokens, as of n-grams that there are
        billions of."""
        most = {"byte": 3, "character": 3, "word": 1, "line": 1}
        return self.n > most[self.unit]

    @property
    def options(self) -> dict[str, str | bool | None]:
        """What two counts must have in common, beside the name, for their tokens to be the same."""
        about: dict[str, str | bool | None] = {}
        if self.unit == "word":
            about = {"casefold": self.casefold, "normalise": self.normalise, "unicode": UNICODE}
        return about

    def skipped(self, counted: int, nbytes: int) -> int:
        """What is between tokens is left out by definition, and not counted apart."""
        return 0

    def folded(self, word: str) -> str:
        """What a word counts as."""
        if self.normalise is not None:
            word = unicodedata.normalize(self.normalise, word)
        if self.casefold:
            word = word.casefold()
            if self.normalise is not None:
                word = unicodedata.normalize(self.normalise, word)
        return word


UNICODE = unicodedata.unidata_version


def any_kind_named(by: str, *, casefold: bool = False, normalise: FormName | None = None) -> Kind | TokenKind:
    """The kind called ``by``, of either sort; OptionError, with what there is, for anything else."""
    casefold = check_flag("casefold", casefold)
    if normalise is not None:
        check_choice("normalise", normalise, FORMS)
    kind = _kind_named(by, casefold, normalise)
    if (casefold or normalise) and not (isinstance(kind, TokenKind) and kind.unit == "word"):
        given = "casefold" if casefold else "normalise"
        raise OptionError(
            f"{given} is for words, and by={shown(by)} counts none; leave it out, or count by word or ngram:N"
        )
    return kind


def _kind_named(by: str, casefold: bool, normalise: FormName | None) -> Kind | TokenKind:
    known = by if isinstance(by, str) else ""  # an array, for example, cannot be compared with a word
    if (found := _NGRAM.fullmatch(known)) is not None:
        n, unit = int(found[1]), found[2] if found[2] is not None else "word"
        if not LEAST_N <= n <= MOST_N:
            raise OptionError(
                f"by={shown(by)} asks for n-grams of {n}; they may have {LEAST_N} to {MOST_N} units"
            )
        if unit not in UNITS:
            raise OptionError(
                f"by={shown(by)} asks for n-grams of {shown(unit)}; they are of {', '.join(UNITS)}"
            )
        name = f"ngram:{n}" if unit == "word" else f"ngram:{n}:{unit}"
        return TokenKind(name, unit, n, casefold, normalise)
    if known == "line":
        return TokenKind("line", "line")
    if known == "word":
        return TokenKind("word", "word", 1, casefold, normalise)
    if known in KINDS:
        return KINDS[known]
    raise OptionError(
        f"by={shown(by)} is no kind of histogram; it may be {', '.join(map(repr, (*KINDS, *_OPEN)))}, or 'ngram:N' of"
        f" words, 'ngram:N:character' or 'ngram:N:byte'{did_you_mean(by, (*KINDS, *_OPEN, f'ngram:{LEAST_N}'))}"
    )


@functools.cache
def word_table() -> np.ndarray:
    """uint8[0x110000 / 8]: bit ``c & 7`` of entry ``c >> 3`` says whether code point c is a word character."""
    category = unicodedata.category
    is_word = np.fromiter(
        (category(chr(code)) in _CATEGORIES for code in range(0x110000)), np.bool_, 0x110000
    )
    for first, last in _OTHERS:
        is_word[first : last + 1] = True
    table: np.ndarray = np.packbits(is_word, bitorder="little")
    table.flags.writeable = False
    return table
