"""Which known word a misspelt one stands for; texts in one line. Loads nothing, so that commands can ask it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

ALIKE = 0.7
"""How alike two words are at least (`difflib`'s ratio) for one to be taken for the other: one wrong letter of four."""
APART = 0.03
"""How much less alike than the likeliest word another may be to be named too."""
BEGINNING = 3
"""Letters that are taken for the beginning of a word."""
MOST_NAMED = 3


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The known words that a misspelt one most likely stands for, likeliest first; none where none is near.

    Those that it is the beginning of come first of all. Case, and dashes at the beginning, do not count.

    >>> nearest("precison", ["precision", "position"])
    ['precision']
    >>> nearest("ful", ["full", "split"]), nearest("gpu", ["cpu", "cuda"])
    (['full'], [])
    >>> nearest("--transpose", ["--transpose-a", "--transpose-b"])
    ['--transpose-a', '--transpose-b']
    """
    given = _bare(word)
    words = list(dict.fromkeys(known))
    begun = [one for one in words if len(given) >= BEGINNING and _bare(one).startswith(given)]
    if begun:
        shortest = min(map(len, begun))
        few = begun if len(begun) <= MOST_NAMED else [one for one in begun if len(one) == shortest]
        return sorted(few, key=len)[:MOST_NAMED]
    alike = {one: SequenceMatcher(None, given, _bare(one), autojunk=False).ratio() for one in words}
    most = max(alike.values(), default=0.0)
    if most < ALIKE:
        return []
    near = [one for one in words if alike[one] >= most - APART]
    return sorted(near, key=lambda one: -alike[one])[:MOST_NAMED]


def did_you_mean(word: object, known: Iterable[str], *, name: str = "{!r}") -> str:
    """What a message goes on with: ``; did you mean 'full'?``; empty where nothing is near. name: how words are
    written."""
    near = nearest(word, known) if isinstance(word, str) else []
    return f"; did you mean {' or '.join(name.format(one) for one in near)}?" if near else ""


def _bare(word: str) -> str:
    return word.lstrip("-").replace("_", "-").casefold()


def in_one_line(text: str) -> str:
    """A text with a blank for each end of a line, and what is blank around it; all other white space stays, since it
    may be of a name.

    >>> in_one_line("cannot read  lead.txt:\\n    no such file\\n")
    'cannot read  lead.txt: no such file'
    """
    return " ".join(line for each in text.splitlines() if (line := each.strip()))
