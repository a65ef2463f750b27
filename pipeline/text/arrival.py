"""What tasks are to count, and what becomes of it when it comes back: it is added up, and kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from tilewright.kernels.histograms.token_kinds import TokenKind
from tilewright.kernels.histograms.tokens import Kind
from tilewright.pipeline.records import Record
from tilewright.pipeline.text.corpus import Corpus, Piece
from tilewright.pipeline.text.documents import Counts, Listing, width_of
from tilewright.pipeline.text.formats.sources import LeftOut, Remarks, add_remarks
from tilewright.pipeline.text.kept_counts import Again, counts_in, entry_of
from tilewright.pipeline.text.totals import TokenTotal, Total


@dataclass(frozen=True)
class Work:
    """What tasks are to do."""

    pieces: list[Piece]
    """What each task counts; ``first`` is a place in ``rows``."""
    rows: np.ndarray
    """int64: the places in the corpus of the documents that pieces consist of."""
    prints: dict[int, np.ndarray]
    """By the places of some pieces: fingerprints that they had when they were counted before."""
    again: dict[int, Again]
    """The same pieces, as they were kept."""


def without(piece: Piece, bad: Collection[int]) -> Piece:
    """A piece of whole documents without some of them, by their places."""
    documents = tuple(each for place, each in enumerate(piece.documents) if place not in bad)
    return Piece(piece.first, documents, 0, sum(document.nbytes for document in documents))


class Arrival:
    """Adds each piece that comes back from a task, and has a record keep it."""

    def __init__(
        self,
        total: Total,
        kind: Kind | TokenKind,
        record: Record | None,
        corpus: Corpus,
        work: Work,
        *,
        per_document: bool,
        reports: bool,
    ) -> None:
        """reports: whether files that cannot be counted are left out. Then the parts of a file count once all of them
        are there."""
        self._total, self._kind, self._record, self._corpus, self._work = total, kind, record, corpus, work
        self._per_document, self._reports = per_document, reports
        self._held: dict[int, list[Counts]] = {}
        self._left: dict[int, int] = {}
        """Of files of which parts are held, by their places: the parts, and how many bytes of others are to come."""
        self.listing = Listing(len(corpus.documents))
        self.bad: dict[int, str] = {}
        """Files that are left out, by their places in the corpus, and why."""
        self.different: dict[str, None] = {}
        """The names of documents whose contents were not what they had been."""
        self.nbytes = self.counted = self.documents = 0
        """Bytes, decoded; tokens in all; documents."""
        self.lost: int | None = 0
        self.remarks: Remarks = {}
        self.left_out: dict[int, LeftOut] = {}
        """Lines that are left out, by the places of their files in the corpus."""

    def __call__(self, place: int, part: Counts | None) -> Counts:
        piece, again = self._work.pieces[place], self._work.again.get(place)
        places = self._work.rows[piece.first : piece.first + len(piece.documents)]
        if part is None:
            # Only what was counted before is not counted, and then its counts are kept.
            assert again is not None
            assert self._record is not None
            part = counts_again(self._record, again)
        elif part.bad and not piece.is_part:
            self.bad |= {int(places[at]): why for at, why in part.bad.items()}
            piece, places = without(piece, part.bad), np.delete(places, list(part.bad))
        elif again is not None:
            self.different |= dict.fromkeys(document.name for document in piece.documents)
        if self._record is not None and piece.documents and not (piece.is_part and part.bad):
            changed_ns = [self._corpus.status[here].changed_ns for here in places.tolist()]
            self._record.append(entry_of(piece, changed_ns, part))
        if piece.documents:
            self.add(part, piece, places)
        return part

    def add(self, part: Counts, piece: Piece, places: np.ndarray) -> None:
        """Add what was counted of a piece. places: int64, of its documents in the corpus."""
        if not (self._reports and piece.is_part):
            self._add(part, places)
            return
        place = int(places[0])
        if part.bad:
            self.bad.setdefault(place, part.bad[0])
            self._held.pop(place, None)
        if place in self.bad:
            return
        self._held.setdefault(place, []).append(part)
        self._left[place] = self._left.get(place, piece.documents[0].nbytes) - piece.nbytes
        if not self._left[place]:
            for each in self._held.pop(place):
                self._add(each, places)

    def _add(self, part: Counts, places: np.ndarray) -> None:
        if part.entries is None and isinstance(self._total, TokenTotal):
            assert part.tokens is not None
            self._total.add_list(part.tokens, part.values.astype(np.int64))
        else:
            self._add_cells(part, places)
        self.nbytes += part.nbytes
        self.counted += int(part.values.sum())
        self.documents += part.documents
        self.lost = None if self.lost is None or part.lost is None else self.lost + part.lost
        add_remarks(self.remarks, part.remarks)
        self.left_out |= {int(places[at]): each for at, each in part.left_out.items()}

    def _add_cells(self, part: Counts, places: np.ndarray) -> None:
        rows_of = self.listing.rows_of(part.rows, places) if self._per_document else None
        for cells, values in _steps(part, width_of(self._kind, part.tokens)):
            rows, columns = np.divmod(cells, width_of(self._kind, part.tokens))
            self._total.add(
                rows if rows_of is None else rows_of[rows], columns, values.astype(np.int64), part.tokens
            )


STEP = 2**20
"""Counts that are added at a time, as int64 of several kinds."""


def _steps(part: Counts, width: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The cells of a part, and their values, some rows at a time. With tokens, which each addition looks up, all."""
    if part.tokens is not None:
        yield part.cells, part.values
        return
    start = 0
    while start < max(1, len(part.cells)):
        stop = min(start + STEP, len(part.cells))
        if stop < len(part.cells):
            # Not within a row: its parts would have to be put together again.
            begin = part.cells[stop] // width * width
            aligned = int(np.searchsorted(part.cells[start:stop], begin)) + start
            stop = aligned if aligned > start else stop
        yield part.cells[start:stop], part.values[start:stop]
        start = max(stop, start + 1)


def counts_again(record: Record, again: Again) -> Counts:
    """The counts of a kept piece."""
    return counts_in(record.entry(again.kept.line), again.kept.prints)
