"""Rules by which documents are kept or dropped: bounds of signals, those that were published and those of users."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.kernels.arguments import shown
from tilewright.kernels.signals.definitions import DUPE_N, NAMES, TOP_N
from tilewright.kernels.words import did_you_mean
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.transfer.files import reason_with_remedy
from tilewright.pipeline.yaml_file import YamlError, read_yaml

Bounds = tuple[float | None, float | None]
"""The least and the most of a signal that are kept; None for no bound."""

GOPHER_QUALITY: dict[str, Bounds] = {
    "word_count": (50, 100_000),
    "mean_word_length": (3, 10),
    "hash_to_word_ratio": (None, 0.1),
    "ellipsis_to_word_ratio": (None, 0.1),
    "frac_lines_start_with_bullet": (None, 0.9),
    "frac_lines_end_with_ellipsis": (None, 0.3),
    "frac_words_alphabetic": (0.8, None),
    "unique_stop_word_count": (2, None),
}
"""Rae et al., "Scaling Language Models: Methods, Analysis & Insights from Training Gopher" (arXiv:2112.11446, 2021),
appendix A.1.1, on quality."""

GOPHER_REPETITION: dict[str, Bounds] = {
    "frac_lines_dupe": (None, 0.30),
    "frac_paragraphs_dupe": (None, 0.30),
    "frac_chars_dupe_lines": (None, 0.20),
    "frac_chars_dupe_paragraphs": (None, 0.20),
    **{f"frac_chars_top_{n}gram": (None, most) for n, most in zip(TOP_N, (0.20, 0.18, 0.16), strict=True)},
    **{
        f"frac_chars_dupe_{n}grams": (None, most)
        for n, most in zip(DUPE_N, (0.15, 0.14, 0.13, 0.12, 0.11, 0.10), strict=True)
    },
}
"""There, on repetition, table A1."""

SETS: dict[str, dict[str, Bounds]] = {
    "gopher": GOPHER_QUALITY | GOPHER_REPETITION,
    "gopher-quality": GOPHER_QUALITY,
    "gopher-repetition": GOPHER_REPETITION,
}
"""Sets of rules that have names."""

LACKING = {
    "c4": "sentences, lines that end in a terminal mark, curly brackets, placeholder texts and listed words (Raffel et"
    " al., arXiv:1910.10683, section 2.2)",
    "fineweb": "lines that end in a punctuation mark and short lines (Penedo et al., arXiv:2406.17557)",
}
"""Published sets that ask for what no signal here says: what that is, and where they were published."""

ENDINGS = (".yaml", ".yml", ".json")
REDPAJAMA = "rps_doc_"
"""Begins RedPajama-V2's names."""
LIKE, RULES = "like", "rules"
SIDES = ("least", "most")
MOST_BOUNDS = 63
"""A document's verdict is a bit for each bound, and one for what has no signals."""
UNMEASURED = "too long to be measured"
"""Why a document is dropped of which `result.Signals` has its length alone."""


@dataclass(frozen=True)
class Rule:
    """One bound of a signal."""

    signal: str
    side: str
    """``least`` or ``most``: on which side of the bound documents are kept."""
    bound: float
    source: str
    """The set or the file that says so."""

    def __str__(self) -> str:
        return f"{self.signal} {'>=' if self.side == 'least' else '<='} {number(self.bound)}"

    @property
    def broken(self) -> str:
        """What is true of a document that breaks it."""
        return f"{self.signal} {'<' if self.side == 'least' else '>'} {number(self.bound)}"

    def breaks(self, values: np.ndarray) -> np.ndarray:
        """bool: which values of the signal break it. NaN does not."""
        found: np.ndarray = values < self.bound if self.side == "least" else values > self.bound
        return found

    def facts(self) -> dict[str, object]:
        """As JSON types."""
        return {"signal": self.signal, self.side: self.bound, "source": self.source}


def number(value: float) -> str:
    """A bound as people write it: 100000 and 0.18."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def rules_of(rules: Any) -> tuple[Rule, ...]:
    """What a user says, checked: the name of a set, a file, a mapping as a file holds it, or several of these, of which
    a later one overrides the bounds that it names.

    Raises
    ------
    OptionError
        A set or a signal that there is none of, a file that cannot be read, or bounds that mean nothing.
    """
    several = rules if isinstance(rules, Iterable) and not isinstance(rules, str | Mapping) else [rules]
    found: dict[str, dict[str, tuple[float, str]]] = {}
    for each in several:
        _add(found, each)
    listed = [
        Rule(signal, side, *bounds[side])
        for signal, bounds in sorted(found.items(), key=lambda item: NAMES.index(item[0]))
        for side in SIDES
        if side in bounds
    ]
    if not listed:
        raise OptionError(
            f"rules={shown(rules)} leaves no rule by which to drop anything; give one, or leave it out"
        )
    if len(listed) > MOST_BOUNDS:
        raise OptionError(
            f"rules: {len(listed)} bounds were given, and {MOST_BOUNDS} are the most; leave some out"
        )
    for least, most in itertools.pairwise(listed):
        if least.signal == most.signal and least.bound > most.bound:
            raise OptionError(
                f"rules: no {least.signal} is at least {number(least.bound)} ({least.source}) and at most"
                f" {number(most.bound)} ({most.source}); change one of them"
            )
    return tuple(listed)


Found = dict[str, dict[str, tuple[float, str]]]
"""Of each signal, by its sides, the bound and who says so."""


def _add(found: Found, given: Any) -> None:
    if isinstance(given, Mapping):
        _add_mapping(found, given, "rules")
    elif isinstance(given, str) and given in SETS:
        for signal, bounds in SETS[given].items():
            for side, bound in zip(SIDES, bounds, strict=True):
                if bound is not None:
                    found.setdefault(signal, {})[side] = bound, given
    elif isinstance(given, str) and given in LACKING:
        raise OptionError(
            f"rules={given!r} asks for what no signal here says: {LACKING[given]}; nothing is judged by a part of it."
            f" Sets whose signals are all there: {', '.join(SETS)}; bounds of your own go into a file"
        )
    elif isinstance(given, str | os.PathLike) and str(given).lower().endswith(ENDINGS):
        _add_mapping(found, _read(Path(given)), str(given))
    else:
        known = did_you_mean(given, [*SETS, *LACKING])
        raise OptionError(
            f"rules={shown(given)} is neither a set of rules ({', '.join(SETS)}) nor a file that ends in"
            f" {' or '.join(ENDINGS)}{known}"
        )


def _read(path: Path) -> Any:
    try:
        return read_yaml(path).content  # JSON is YAML, too
    except OSError as error:
        raise OptionError(f"rules: cannot read {path}: {reason_with_remedy(error)}") from error
    except YamlError as error:
        raise OptionError(f"rules: {error}") from error


def _add_mapping(found: Found, given: Any, source: str) -> None:
    keys = list(given) if isinstance(given, Mapping) else []
    if not keys or any(key not in (LIKE, RULES) for key in keys):
        has = f"has {', '.join(map(shown, keys))}" if keys else "is no mapping"
        raise OptionError(
            f"rules: {source} {has}; it may have '{LIKE}', a set or several ({', '.join(SETS)}), and '{RULES}', of each"
            " signal its least and most: {word_count: {least: 50}}"
        )
    like = given.get(LIKE)
    for each in like if isinstance(like, list | tuple) else [] if like is None else [like]:
        if isinstance(each, str) and each in (*SETS, *LACKING):
            _add(found, each)
        else:
            raise OptionError(
                f"rules: {source} is like {shown(each)}, which is no set; they are {', '.join(SETS)}"
                f"{did_you_mean(each, SETS)}"
            )
    rules = given.get(RULES) or {}
    if not isinstance(rules, Mapping):
        raise OptionError(
            f"rules: {source} has '{RULES}' of {shown(rules)}; give a mapping: {{word_count: {{least: 50}}}}"
        )
    for signal, bounds in rules.items():
        _add_bounds(found, signal, bounds, source)


def _add_bounds(found: Found, signal: Any, bounds: Any, source: str) -> None:
    if signal not in NAMES:
        bare = signal.removeprefix(REDPAJAMA) if isinstance(signal, str) else signal
        if bare != signal and bare in NAMES:
            raise OptionError(
                f"rules: {source} names {signal!r}, RedPajama-V2's signal; here it is {bare!r}, which may be defined"
                " otherwise: name that if it is what you mean"
            )
        raise OptionError(
            f"rules: {source} names {shown(signal)}, which is no signal that is found here, and no rule is passed over;"
            f" they are {', '.join(NAMES)}{did_you_mean(signal, NAMES)}"
        )
    if bounds is None:
        found.pop(signal, None)
        return
    if not isinstance(bounds, Mapping) or not bounds or any(side not in SIDES for side in bounds):
        raise OptionError(
            f"rules: {source} has {signal}: {shown(bounds)}; give its least, its most, or both, such as {{least: 50}},"
            " or null for no rule"
        )
    for side, bound in bounds.items():
        if bound is None:
            found.get(signal, {}).pop(side, None)
            continue
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound):
            raise OptionError(
                f"rules: {source} has {signal}: {side}: {shown(bound)}, which is no number; give one"
            )
        found.setdefault(signal, {})[side] = bound, source


def verdicts(signals: Mapping[str, np.ndarray], rules: Sequence[Rule]) -> np.ndarray:
    """uint64[documents]: a bit for each rule that is broken, the first's the lowest; of a document without signals the
    bit behind those alone. 0 of what is kept."""
    known = signals["char_count"] >= 0
    found = np.where(known, np.uint64(0), np.uint64(1 << len(rules)))
    for place, rule in enumerate(rules):
        found |= (rule.breaks(signals[rule.signal]) & known).astype(np.uint64) << np.uint64(place)
    return found


def reasons_of(found: np.ndarray, rules: Sequence[Rule]) -> np.ndarray:
    """object[documents]: in words, what `verdicts` says of each; empty of what is kept."""
    words = [*(rule.broken for rule in rules), UNMEASURED]
    kinds, places = np.unique(found, return_inverse=True)
    texts = [
        "; ".join(word for place, word in enumerate(words) if kind >> place & 1) for kind in kinds.tolist()
    ]
    reasons: np.ndarray = np.array(texts, dtype=object)[places]
    return reasons


def by_rule(found: np.ndarray, rules: Sequence[Rule]) -> list[tuple[str, int, int]]:
    """Of each rule, in words, how many documents break it, and how many of these break no other."""
    kinds, times = np.unique(found, return_counts=True)
    table = []
    for place, word in enumerate([*map(str, rules), UNMEASURED]):
        bit = np.uint64(1 << place)
        broken = int(times[(kinds & bit) != 0].sum())
        if place < len(rules) or broken:
            table.append((word, broken, int(times[kinds == bit].sum())))
    return table
