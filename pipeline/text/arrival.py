"""What tasks are to count, and what becomes of it when it comes back: it is added up, and kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from tilewright.pipeline.records import Record
from tilewright.pipeline.text.corpus import Corpus, Piece
from tilewright.pipeline.text.kept_counts import Again, counts_in, entry_of
from tilewright.pipeline.text.totals import Counts, Totals


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
        self, total: Totals, record: Record | None, corpus: Corpus, work: Work, reports: bool
    ) -> None:
        self._total, self._record, self._corpus, self._work = total, record, corpus, work
        self._reports = reports
        self.different: dict[str, None] = {}
        """The names of documents whose contents were not what they had been."""

    def __call__(self, place: int, part: Counts | None) -> Counts:
        piece, again = self._work.pieces[place], self._work.again.get(place)
        places = self._work.rows[piece.first : piece.first + len(piece.documents)]
        if part is None:
            # Only what was counted before is not counted, and then its counts are kept.
            assert again is not None
            assert self._record is not None
            part = counts_again(self._record, again)
        elif part.bad and not piece.is_part:
            piece, places = without(piece, part.bad), self._leave_out(part.bad, places)
        elif again is not None:
            self.different |= dict.fromkeys(document.name for document in piece.documents)
        if self._record is not None and piece.documents and not (piece.is_part and part.bad):
            changed_ns = [self._corpus.status[here].changed_ns for here in places.tolist()]
            self._record.append(entry_of(piece, changed_ns, part))
        self.add(part, piece, places)
        return part

    def add(self, part: Counts, piece: Piece, places: np.ndarray) -> None:
        """Add what was counted of a piece. places: int64, of its documents in the corpus."""
        if self._reports and piece.is_part:
            self._total.hold(part, int(places[0]), piece.nbytes, piece.documents[0].nbytes)
        else:
            self._total.add(part, places)

    def _leave_out(self, bad: dict[int, str], places: np.ndarray) -> np.ndarray:
        """Note which files of a piece are bad; returns the places of the others."""
        self._total.bad |= {int(places[place]): why for place, why in bad.items()}
        return np.delete(places, list(bad))


def counts_again(record: Record, again: Again) -> Counts:
    """The counts of a kept piece."""
    return counts_in(record.entry(again.kept.line), again.kept.prints)
