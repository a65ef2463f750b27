"""The documents of a piece and of a corpus, one by one, and what is counted of a piece."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, TypeVar

import numpy as np

from tilewright.kernels.histograms.token_kinds import TokenKind
from tilewright.kernels.histograms.token_lists import Tokens
from tilewright.kernels.histograms.tokens import Kind
from tilewright.pipeline.records import packed, unpacked
from tilewright.pipeline.text.fingerprints import NONE
from tilewright.pipeline.text.formats.sources import Found, LeftOut, Remark, Remarks
from tilewright.pipeline.text.names import Ids, Names, Part, part_of

Text = TypeVar("Text", str, str | None)


@dataclass(frozen=True, eq=False)
class Rows:
    """The documents of a piece one by one, in the order in which they stand in its files."""

    places: np.ndarray
    """int64: the place in the piece of each document's file."""
    members: list[str] | None
    """Within an archive, or the number of a record; empty for a file's own text. None where it is empty of all: a
    million lines have no list of as many."""
    numbers: np.ndarray
    """int64: its line, row or passage, counted from 1; 0 for a whole text."""
    fields: list[str | None] | None
    """Where several are counted; None where they are of none."""
    ids: list[str | None] | None
    """None where no document has one."""
    lost: np.ndarray
    """int64: how many U+FFFD stand for what could not be decoded."""

    def __len__(self) -> int:
        return len(self.places)

    def to_json(self) -> dict[str, Any]:
        return {
            "places": packed(self.places),
            "members": self.members if any(self.members or ()) else None,
            "numbers": packed(self.numbers),
            "fields": self.fields if any(self.fields or ()) else None,
            "ids": self.ids if any(each is not None for each in self.ids or ()) else None,
            "lost": packed(self.lost),
        }

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Rows:
        places, numbers, lost = (
            unpacked(entry[name]).astype(np.int64) for name in ("places", "numbers", "lost")
        )
        return cls(places, entry["members"], numbers, entry["fields"], entry["ids"], lost)


def joined(rows: Sequence[Rows]) -> Rows:
    """Rows behind one another."""
    none = np.empty(0, np.int64)
    lengths = [len(each) for each in rows]
    return Rows(
        np.concatenate([none, *(each.places for each in rows)]),
        _together([each.members for each in rows], lengths, ""),
        np.concatenate([none, *(each.numbers for each in rows)]),
        _together([each.fields for each in rows], lengths, None),
        _together([each.ids for each in rows], lengths, None),
        np.concatenate([none, *(each.lost for each in rows)]),
    )


def _together(parts: Sequence[list[Text] | None], lengths: Sequence[int], nothing: Text) -> list[Text] | None:
    """Lists behind one another, of which None stands for one of nothing else."""
    if all(part is None for part in parts):
        return None
    pairs = zip(parts, lengths, strict=True)
    return list(chain.from_iterable(repeat(nothing, n) if part is None else part for part, n in pairs))


def rows_of(found: Found, first: int, lost: dict[int, int]) -> Rows:
    """What was found of a share of a piece, as rows.

    first: the place in the piece of the share's first file. lost: what counting says of rows, to be added.
    """
    counts = [1 if row.numbers is None else len(row.numbers) for row in found.rows]
    places = first + np.fromiter((row.place for row in found.rows), np.int64, len(counts))
    numbers = [
        np.zeros(1, np.int64) if row.numbers is None else row.numbers.astype(np.int64, copy=False)
        for row in found.rows
    ]
    pairs = list(zip(found.rows, counts, strict=True))
    rows = Rows(
        np.repeat(places, counts),
        _together([[row.member] * n if row.member else None for row, n in pairs], counts, ""),
        np.concatenate([np.empty(0, np.int64), *numbers]),
        _together([None if row.fields is None else list(row.fields) for row in found.rows], counts, None),
        _together([None if row.ids is None else list(row.ids) for row in found.rows], counts, None),
        np.concatenate([np.empty(0, np.int64), *(_each(row.lost, n) for row, n in pairs)]),
    )
    if lost:
        np.add.at(rows.lost, list(lost), list(lost.values()))
    return rows


def _each(lost: np.ndarray | int, count: int) -> np.ndarray:
    """`Row.lost` of each of so many documents."""
    if isinstance(lost, np.ndarray) and len(lost) == count:
        return lost
    return np.broadcast_to(np.asarray(lost, np.int64), count)


def are_files(rows: Rows, documents: int) -> bool:
    """Whether the rows are the piece's files themselves, with nothing else to be said of them."""
    return (
        len(rows) == documents
        and not any(rows.members or ())
        and not rows.numbers.any()
        and not any(each is not None for each in rows.ids or ())
        and bool((rows.places == np.arange(documents)).all())
    )


@dataclass(frozen=True, eq=False)
class Counts:
    """The nonzero counts of one piece."""

    entries: np.ndarray | None
    """`cells`; None where these are all ``tokens``, a list in order: a million of them need no places in it."""
    values: np.ndarray
    """Unsigned integers, more than 0, or int64."""
    nbytes: int
    """The piece's length, decoded."""
    prints: np.ndarray = field(default_factory=lambda: NONE)
    """The fingerprints of what was read, where they were wanted (`Fingerprints.rows`)."""
    documents: int = 0
    """How many documents ended in it."""
    lost: int | None = None
    """How many U+FFFD stand for what could not be decoded; None where that is not known."""
    rows: Rows | None = None
    """Per document; None where those are the piece's files."""
    remarks: Remarks = field(default_factory=dict)
    """`Found.remarks`."""
    left_out: dict[int, LeftOut] = field(default_factory=dict)
    """`Found.left_out`."""
    bad: dict[int, str] = field(default_factory=dict)
    """Files that cannot be counted, by their places in the piece, and why; all else is of the piece without them."""

    tokens: Tokens | None = None
    """Where they are not known beforehand, what the columns are places in."""

    @property
    def cells(self) -> np.ndarray:
        """int64: row × width + column; the row is the document's place in the piece, or in ``rows``, or 0."""
        return np.arange(len(self.values)) if self.entries is None else self.entries

    def facts(self) -> dict[str, Any]:
        """What a record keeps of it beside counts and fingerprints, as JSON."""
        return {
            "found": self.documents,
            "lost": self.lost,
            "tells": True,
            "rows": None if self.rows is None else self.rows.to_json(),
            "remarks": self.remarks,
            **({"left_out": _as_json(self.left_out)} if self.left_out else {}),
        }


def width_of(kind: Kind | TokenKind, tokens: Tokens | None) -> int:
    """Columns of a piece's counts."""
    return kind.bins if isinstance(kind, Kind) else max(1, len(tokens or ()))


def facts_from(entry: dict[str, Any], documents: int) -> dict[str, Any]:
    """The arguments of `Counts` in an entry of a record; an entry of an earlier release has none of them."""
    rows = entry.get("rows")
    # Of tokens, earlier releases kept 0 whatever there was.
    tells = entry.get("tells", "tokens" not in entry)
    return {
        "documents": entry.get("found", documents),
        "lost": entry.get("lost") if tells else None,
        "rows": None if rows is None else Rows.from_json(rows),
        "remarks": {what: Remark(*each) for what, each in entry.get("remarks", {}).items()},
        "left_out": {
            int(place): LeftOut(number, [(where, what) for where, what in named])
            for place, (number, named) in entry.get("left_out", {}).items()
        },
    }


def _as_json(left_out: dict[int, LeftOut]) -> dict[str, Any]:
    return {str(place): [each.number, each.named] for place, each in left_out.items()}


def all_bad(
    names: Sequence[str], bad: dict[int, str], left_out: dict[int, LeftOut]
) -> tuple[tuple[str, str], ...]:
    """What was left out of a corpus, and why, in the corpus's order.

    names: of its files; bad: by the places of files that were left out whole, why; left_out: of lines.
    """
    found: list[tuple[str, str]] = []
    for place in sorted(bad.keys() | left_out.keys()):
        found += [(names[place], bad[place])] if place in bad else left_out[place].listed(names[place])
    return tuple(found)


class Listing:
    """The documents of a corpus as they are found, where a file may turn out to hold many.

    Each has a provisional row: files those of their places, and documents within files others behind them.
    """

    def __init__(self, files: int) -> None:
        self._files = self._next = files
        self._within: set[int] = set()
        """Files whose documents have rows of their own."""
        self._below: list[Part] = []

    def rows_of(self, rows: Rows | None, places: np.ndarray) -> np.ndarray:
        """The provisional rows, int64, of a piece's documents. rows: those within its files, None where it consists of
        these; places: int64, where its files stand in the corpus."""
        if rows is None:
            return places
        found = self._next + np.arange(len(rows))
        self._next += len(rows)
        self._within.update(places.tolist())
        self._below.append(part_of(places[rows.places], rows.members, rows.numbers, rows.fields, rows.ids))
        return found

    def in_order(
        self, names: Sequence[str], bad: Collection[int]
    ) -> tuple[np.ndarray | None, Sequence[str], Sequence[str | None] | None]:
        """The provisional rows in the order of the documents, the documents' names, and what identifies each, where
        documents within files were found. names: of the corpus's files; bad: the places of those that are left out.

        The order is None where it is that of the files.
        """
        if not self._below and not bad:
            return None, tuple(names), None
        out = self._within | set(bad)
        files = np.array([place for place in range(self._files) if place not in out], np.int64)
        provisional = np.concatenate([files, np.arange(self._files, self._next)])
        places = np.concatenate([files, *(part.places for part in self._below)])
        if (np.diff(places) < 0).any():
            provisional = provisional[np.argsort(places, kind="stable")]
        listed = Names(names, self._below, provisional)
        if not self._below:
            return provisional, tuple(listed), None
        return provisional, listed, Ids(names, self._below, provisional)
