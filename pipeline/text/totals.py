"""What is counted of a piece, and how that of all pieces adds up, also where a file turns out to hold many
documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from tilewright.kernels.histograms.tokens import Kind
from tilewright.kernels.numbers import format_nbytes
from tilewright.pipeline.errors import PlanError
from tilewright.pipeline.records import packed, unpacked
from tilewright.pipeline.text.corpus import Document
from tilewright.pipeline.text.fingerprints import NONE
from tilewright.pipeline.text.formats.sources import Found


@dataclass(frozen=True, eq=False)
class Rows:
    """The documents of a piece one by one, in the order in which they stand in its files."""

    places: np.ndarray
    """int64: the place in the piece of each document's file."""
    members: list[str]
    """Within an archive, or the number of a record; empty for a file's own text."""
    numbers: np.ndarray
    """int64: its line, row or passage, counted from 1; 0 for a whole text."""
    fields: list[str | None]
    """Where several are counted."""
    ids: list[str | None]
    lost: np.ndarray
    """int64: how many U+FFFD stand for what could not be decoded."""

    def __len__(self) -> int:
        return len(self.places)

    def names(self, documents: Sequence[str]) -> list[str]:
        """``shard.jsonl.zst:1234``: file, member, number and field, as far as there are any. documents: the name of
        each row's file."""
        rows = zip(documents, self.members, self.numbers.tolist(), self.fields, strict=True)
        return [":".join(str(part) for part in row if part) for row in rows]

    def chosen(self, order: np.ndarray) -> Rows:
        """Some of the rows, by their places."""
        chosen = order.tolist()
        return Rows(
            self.places[order],
            [self.members[i] for i in chosen],
            self.numbers[order],
            [self.fields[i] for i in chosen],
            [self.ids[i] for i in chosen],
            self.lost[order],
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "places": packed(self.places),
            "members": self.members if any(self.members) else None,
            "numbers": packed(self.numbers),
            "fields": self.fields if any(self.fields) else None,
            "ids": self.ids if any(each is not None for each in self.ids) else None,
            "lost": packed(self.lost),
        }

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Rows:
        places, numbers, lost = (
            unpacked(entry[name]).astype(np.int64) for name in ("places", "numbers", "lost")
        )
        count = len(places)
        return cls(
            places,
            entry["members"] or [""] * count,
            numbers,
            entry["fields"] or [None] * count,
            entry["ids"] or [None] * count,
            lost,
        )


def no_rows() -> Rows:
    return joined([])


def joined(rows: Sequence[Rows]) -> Rows:
    """Rows behind one another."""
    none = np.empty(0, np.int64)
    return Rows(
        np.concatenate([none, *(each.places for each in rows)]),
        list(chain.from_iterable(each.members for each in rows)),
        np.concatenate([none, *(each.numbers for each in rows)]),
        list(chain.from_iterable(each.fields for each in rows)),
        list(chain.from_iterable(each.ids for each in rows)),
        np.concatenate([none, *(each.lost for each in rows)]),
    )


def rows_of(found: Found, first: int, lost: dict[int, int]) -> Rows:
    """What was found of a share of a piece, as rows.

    first: the place in the piece of the share's first file. lost: what counting says of rows, to be added.
    """
    parts = []
    for row in found.rows:
        count = 1 if row.numbers is None else len(row.numbers)
        parts.append(
            Rows(
                np.full(count, first + row.place, np.int64),
                [row.member] * count,
                np.zeros(count, np.int64) if row.numbers is None else row.numbers.astype(np.int64),
                [None] * count if row.fields is None else list(row.fields),
                [None] * count if row.ids is None else list(row.ids),
                np.broadcast_to(np.asarray(row.lost, np.int64), count).copy(),
            )
        )
    rows = joined(parts)
    if lost:
        np.add.at(rows.lost, list(lost), list(lost.values()))
    return rows


def are_files(rows: Rows, documents: int) -> bool:
    """Whether the rows are the piece's files themselves, with nothing else to be said of them."""
    return (
        len(rows) == documents
        and not any(rows.members)
        and not rows.numbers.any()
        and not rows.lost.any()
        and not any(each is not None for each in rows.ids)
        and bool((rows.places == np.arange(documents)).all())
    )


@dataclass(frozen=True, eq=False)
class Counts:
    """The nonzero counts of one piece."""

    cells: np.ndarray
    """int64: row × bins + bin, each once; the row is the document's place in the piece, or in ``rows``, or 0."""
    values: np.ndarray
    """int64, more than 0."""
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
    remarks: dict[str, tuple[int, str]] = field(default_factory=dict)
    """`Found.remarks`."""
    bad: dict[int, str] = field(default_factory=dict)
    """Files that cannot be counted, by their places in the piece, and why; all else is of the piece without them."""

    def facts(self) -> dict[str, Any]:
        """What a record keeps of it beside counts and fingerprints, as JSON."""
        return {
            "found": self.documents,
            "lost": self.lost,
            "rows": None if self.rows is None else self.rows.to_json(),
            "remarks": self.remarks,
        }


def facts_from(entry: dict[str, Any], documents: int) -> dict[str, Any]:
    """The arguments of `Counts` in an entry of a record; an entry of an earlier release has none of them."""
    rows = entry.get("rows")
    return {
        "documents": entry.get("found", documents),
        "lost": entry.get("lost"),
        "rows": None if rows is None else Rows.from_json(rows),
        "remarks": {what: (count, name) for what, (count, name) in entry.get("remarks", {}).items()},
    }


class Totals:
    """What has been counted so far."""

    def __init__(self, documents: int, kind: Kind, *, per_document: bool, allowed: int) -> None:
        """documents: files of the corpus. allowed: bytes of memory for counts.

        Raises PlanError where they do not suffice.
        """
        self._kind, self._per_document, self._allowed = kind, per_document, allowed
        self._rows = documents if per_document else 1
        self._check()
        self._counts = np.zeros((self._rows, kind.bins), np.int64)
        self._below: list[tuple[np.ndarray, np.ndarray, Counts]] = []
        """Of pieces with rows of their own: the places in the corpus of their files and of their rows' files."""
        self.nbytes = self.documents = 0
        self.bad: dict[int, str] = {}
        """Files that are left out, by their places in the corpus, and why."""
        self._held: dict[int, list[Counts]] = {}
        self._left: dict[int, int] = {}
        """Of files of which parts are held: the parts, and how many bytes of others are to come."""
        self.lost: int | None = 0
        self.remarks: dict[str, tuple[int, str]] = {}

    def _check(self) -> None:
        needed = self._rows * self._kind.bins * np.dtype(np.int64).itemsize
        if needed > self._allowed:
            raise PlanError(
                f"{self._rows} documents × {self._kind.bins} bins take {format_nbytes(needed)}, and"
                f" {format_nbytes(self._allowed)} (half of this process's memory) are allowed; count fewer documents, a"
                " kind with fewer bins, or not per document"
            )

    def add(self, part: Counts, places: np.ndarray) -> None:
        """Add a piece. places: int64, where its files stand in the corpus."""
        self.nbytes += part.nbytes
        self.documents += part.documents
        self.lost = None if self.lost is None or part.lost is None else self.lost + part.lost
        for what, (count, name) in part.remarks.items():
            before, first = self.remarks.get(what, (0, name))
            self.remarks[what] = (before + count, first)
        if not self._per_document:
            self._counts[0, part.cells] += part.values
        elif part.rows is None:
            row, place = np.divmod(part.cells, self._kind.bins)
            self._counts[places[row], place] += part.values
        else:
            self._rows += len(part.rows) - len(places)
            self._check()
            self._below.append((places, places[part.rows.places], part))

    def hold(self, part: Counts, place: int, nbytes: int, whole: int) -> None:
        """Add ``nbytes`` of a file of ``whole``, once all parts of it are there: one may be bad, and then none counts.

        place: of the file in the corpus.
        """
        if part.bad:
            self.bad.setdefault(place, part.bad[0])
            self._held.pop(place, None)
        if place in self.bad:
            return
        self._held.setdefault(place, []).append(part)
        self._left[place] = self._left.get(place, whole) - nbytes
        if not self._left[place]:
            for each in self._held.pop(place):
                self.add(each, np.array([place]))

    def counts(self) -> np.ndarray:
        """int64[bins]: of all documents together."""
        return self._counts[0]

    def table(self, documents: Sequence[Document]) -> tuple[np.ndarray, list[str], Rows | None]:
        """Counts per document, int64[(documents, bins)], the documents' names, and what else is known of each, if
        anything is. documents: the corpus's files."""
        names = [document.name for document in documents]
        if not self._below and not self.bad:
            return self._counts, names, None
        within = {place for places, _, _ in self._below for place in places.tolist()} | set(self.bad)
        plain = np.array([place for place in range(len(names)) if place not in within], np.int64)
        count = len(plain)
        nothing: list[Any] = [None] * count
        zeros = np.zeros(count, np.int64)
        all_rows = joined(
            [
                Rows(plain, [""] * count, zeros, nothing, nothing, zeros),
                *(replace(part.rows, places=of) for _, of, part in self._below if part.rows is not None),
            ]
        )
        order = np.argsort(all_rows.places, kind="stable")
        target = np.empty_like(order)
        target[order] = np.arange(len(order))
        counts = np.zeros((len(order), self._kind.bins), np.int64)
        counts[target[:count]] = self._counts[plain]
        for _, of, part in self._below:
            row, place = np.divmod(part.cells, self._kind.bins)
            counts[target[count + row], place] = part.values
            count += len(of)
        rows = all_rows.chosen(order)
        listed = rows.names([names[place] for place in rows.places.tolist()])
        return counts, listed, rows if self._below else None
