"""What signals are asked for, checked before anything is listed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tilewright.kernels.arguments import shown
from tilewright.kernels.histograms.token_kinds import UNICODE
from tilewright.kernels.signals.definitions import STOP_WORDS
from tilewright.pipeline.errors import OptionError

MOST_STOP_WORDS = 10_000


@dataclass(frozen=True)
class Options:
    """It travels with every task."""

    stop_words: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """As JSON types, with the version of Unicode that says what is a letter."""
        return {"stop_words": list(self.stop_words), "unicode": UNICODE}


def options_of(stop_words: str | Iterable[str] | None) -> Options:
    """What a user says, checked; OptionError for words that no text can have."""
    if stop_words is None:
        return Options(STOP_WORDS)
    found = [stop_words] if isinstance(stop_words, str) else _listed(stop_words)
    for word in found:
        if not isinstance(word, str) or word.split() != [word]:
            raise OptionError(
                f"stop_words: {shown(word)} is no word, a text without white space; give such as {STOP_WORDS[0]!r}"
            )
        try:
            word.encode()
        except UnicodeEncodeError:
            raise OptionError(
                f"stop_words: {shown(word)} holds half of a surrogate pair, which no text does; leave it out"
            ) from None
    if len(found) > MOST_STOP_WORDS:
        raise OptionError(
            f"stop_words: {len(found)} words were given, and {MOST_STOP_WORDS} are the most; give the frequent ones"
        )
    return Options(tuple(dict.fromkeys(found)))


def _listed(words: Any) -> list[Any]:
    try:
        return list(words)
    except TypeError:
        raise OptionError(f"stop_words={shown(words)} is no list of words, nor a word; give some") from None
