"""The signals of a corpus: a row for each document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.kernels.arguments import shown
from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.kernels.signals.definitions import COUNTS, NAMES
from tilewright.kernels.words import did_you_mean
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.signals.rules import Rule, by_rule, reasons_of, verdicts
from tilewright.pipeline.strict_json import JSON_ROWS, list_pieces
from tilewright.pipeline.text.frames import names_column
from tilewright.pipeline.text.names import line_of

if TYPE_CHECKING:
    import pandas as pd

SHARES = (0.0, 0.05, 0.5, 0.95, 1.0)
"""Of the documents have at most what is printed."""
HEADS = ("least", "5 %", "median", "95 %", "most")


@dataclass(frozen=True, eq=False)
class Signals:
    """What each document of a corpus is like."""

    documents: Sequence[str]
    """All of them, in the corpus's order."""
    ids: Sequence[str | None] | None
    """What ``id_field`` says of each; None where none was asked for."""
    signals: Mapping[str, np.ndarray]
    """Of each signal, by its name, its values: int64[documents], or float64. Of a document that is too long a count is
    -1, and anything else NaN."""
    options: Mapping[str, object]
    """``stop_words``; ``unicode``, the version that says what is a letter; and ``compressor``."""
    nbytes: int
    """Length of the whole corpus, of compressed documents decompressed."""
    seconds: float
    bad: tuple[tuple[str, str], ...] = ()
    """Files that were left out, and why, where ``on_error`` is "report"."""
    rules: tuple[Rule, ...] | None = None
    """By which documents are kept or dropped; None where none were asked for."""

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, name: str) -> np.ndarray:
        """The values of a signal, as ``signals`` has them; OptionError where there is none of the name."""
        if name not in NAMES:
            raise OptionError(
                f"{shown(name)} is no signal; they are {', '.join(NAMES)}{did_you_mean(name, NAMES)}"
            )
        return self.signals[name]

    @cached_property
    def _verdicts(self) -> np.ndarray:
        if self.rules is None:
            raise OptionError("no rules were asked for, by which documents are kept or dropped: give rules")
        return verdicts(self.signals, self.rules)

    @property
    def keep(self) -> np.ndarray:
        """bool[documents]: whether it breaks no rule. OptionError where no rules were asked for, as for the others."""
        kept: np.ndarray = self._verdicts == 0
        return kept

    @property
    def reasons(self) -> np.ndarray:
        """object[documents]: the rules that each breaks, such as ``word_count < 50; frac_lines_dupe > 0.3``; empty
        where it breaks none."""
        return self._reasons(slice(None))

    @property
    def dropped(self) -> tuple[str, ...]:
        """The names of the documents that break any."""
        return tuple(self.documents[place] for place in np.flatnonzero(~self.keep).tolist())

    def kept_lines(self) -> Iterator[str]:
        """A line for each document that is kept: its name, and before it what ``id_field`` says of it, and a tab, where
        that was asked for; ends of lines and tabs of an id are escaped."""
        return (self._line(place) for place in np.flatnonzero(self.keep).tolist())

    def dropped_lines(self) -> Iterator[str]:
        """The same for each that is dropped, with a tab and the reasons behind it."""
        places = np.flatnonzero(~self.keep)
        for start in range(0, len(places), JSON_ROWS):
            some = places[start : start + JSON_ROWS]
            for place, reason in zip(some.tolist(), self._reasons(some).tolist(), strict=True):
                yield f"{self._line(place)}\t{reason}"

    def _line(self, place: int) -> str:
        return line_of(self.documents[place], None if self.ids is None else self.ids[place] or "")

    def _reasons(self, some: slice | np.ndarray) -> np.ndarray:
        found = self._verdicts[some]
        assert self.rules is not None
        return reasons_of(found, self.rules)

    def judged(self, part: slice) -> dict[str, np.ndarray]:
        """The columns ``keep`` and ``reasons`` of some documents; none where no rules were asked for."""
        if self.rules is None:
            return {}
        return {"keep": self.keep[part], "reasons": self._reasons(part)}

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame of all documents under their names: ``id``, where there are any, a column for each signal, and
        ``keep`` and ``reasons``, where rules were asked for. ModuleNotFoundError where pandas is not installed."""
        import pandas as pd

        columns: dict[str, Any] = {} if self.ids is None else {"id": list(self.ids)}
        return pd.DataFrame(
            columns | dict(self.signals) | self.judged(slice(None)),
            index=names_column(self.documents),
        )

    def facts(self) -> dict[str, object]:
        """Every field that does not grow with the corpus, as JSON types, and ``bad``."""
        return {
            "options": dict(self.options),
            "nbytes": self.nbytes,
            "seconds": self.seconds,
            "bad": [list(each) for each in self.bad],
            "rules": None if self.rules is None else [rule.facts() for rule in self.rules],
        }

    def to_json(self) -> dict[str, object]:
        """Every field as JSON types; what is not known of a document is null."""
        found: dict[str, Any] = json.loads("".join(self.json_pieces()))
        return found

    def json_pieces(self) -> Iterator[str]:
        """The text of ``json.dumps(self.to_json())`` in pieces."""
        yield json.dumps(self.facts())[:-1]
        yield ', "documents": '
        yield from list_pieces(self.documents)
        yield ', "ids": '
        yield from ["null"] if self.ids is None else list_pieces(self.ids)
        yield ', "signals": {'
        for place, name in enumerate(NAMES):
            yield f'{", " if place else ""}"{name}": '
            yield from list_pieces(self.signals[name], values_of)
        yield "}"
        for name in ("keep", "reasons"):
            yield f', "{name}": '
            yield from (
                ["null"] if self.rules is None else list_pieces(self.judged(slice(None))[name].tolist())
            )
        yield "}"

    def __str__(self) -> str:
        rate = self.nbytes / self.seconds if self.seconds > 0 else 0.0
        head = (
            f"signals of {format_nbytes(self.nbytes)} in {counted(len(self), 'document')} in {self.seconds:.2f} s"
            f" ({rate / 1e9:.3g} GB/s)"
        )
        known = self.signals["char_count"] >= 0
        if not known.any():
            return "\n".join([head, *self._judged_lines()])
        lines = [head, f"{'of the documents':<30}{''.join(f'{each:>10}' for each in HEADS)}"]
        for name in NAMES:
            # Of an even number of documents, no median that no document has.
            values = np.quantile(self.signals[name][known], SHARES, method="inverted_cdf")
            form = "{:>10.0f}" if name in COUNTS else "{:>10.4g}"
            lines.append(f"{name:<30}{''.join(map(form.format, values.tolist()))}")
        return "\n".join([*lines, *self._judged_lines()])

    def _judged_lines(self) -> list[str]:
        """What is printed of rules."""
        if self.rules is None:
            return []
        dropped = int((~self.keep).sum())
        sources = ", ".join(dict.fromkeys(rule.source for rule in self.rules))
        kept = f"{len(self) - dropped} of {counted(len(self), 'document')} are kept by the rules of {sources}"
        lines = [
            f"{kept}, and {dropped} dropped",
            f"{'documents are kept with':<44}{'dropped':>10}{'by it alone':>13}",
        ]
        return lines + [
            f"{word:<44}{broken:>10}{alone:>13}"
            for word, broken, alone in by_rule(self._verdicts, self.rules)
        ]


def known_of(values: np.ndarray) -> np.ndarray:
    """Which of the values of a signal are known, bool."""
    known: np.ndarray = values >= 0 if values.dtype.kind == "i" else ~np.isnan(values)
    return known


def values_of(values: np.ndarray) -> list[Any]:
    """The values of a signal as Python has them, None where it is not known."""
    known = known_of(values)
    found: list[Any] = values.tolist()
    if known.all():
        return found
    return [value if is_known else None for value, is_known in zip(found, known.tolist(), strict=True)]
