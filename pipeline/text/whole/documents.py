"""Pieces of whole files, and what tasks found of the documents in them, in the order of the corpus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline import config
from tilewright.pipeline.events import Listener, Notice
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.reduce import reduce_pieces, taken_as_they_arrive
from tilewright.pipeline.text.arrival import without
from tilewright.pipeline.text.corpus import Corpus, Document, Piece, cut_pieces
from tilewright.pipeline.text.counting import LEAST_PIECE_NBYTES
from tilewright.pipeline.text.documents import Listing, Rows, all_bad
from tilewright.pipeline.text.formats.listing import SNIFFED_NBYTES, TEXT
from tilewright.pipeline.text.formats.sources import LeftOut, Remarks, add_remarks, remarks_of

if TYPE_CHECKING:
    from distributed import Client

TASK_BLOCKS = 64
"""On a GPU's worker a task is of so many pieces, 2 GiB: its files are dealt out to as many threads as the worker has
cores, and there should be some for each."""

LIGHTER = "let them take smaller pieces (tilewright.piece-nbytes), or split long documents (split_on)"
"""How a user gives tasks less to hold."""


def whole_pieces(corpus: Corpus, workers: Sequence[WorkerFacts]) -> list[Piece]:
    """What each task reads: whole files, since a document is looked at from its beginning to its end."""
    block: int = config.get("piece-nbytes")
    if workers[0].device == "cuda":
        block *= TASK_BLOCKS
    threads = sum(worker.threads for worker in workers)
    share = max(LEAST_PIECE_NBYTES, ceil_div(corpus.nbytes, 2 * threads))
    nbytes = min(block, share)
    pieces = list(cut_pieces([_whole(document, nbytes) for document in corpus.documents], nbytes))
    # Large files take longest: begun first, none keeps a single worker busy at the end.
    pieces.sort(key=lambda piece: -piece.nbytes if piece.nbytes > nbytes else 0)
    return pieces


LEAST_SHARE_NBYTES = SNIFFED_NBYTES
"""The least that a thread is given of a piece, if there is as much: of longer files it is known what they are."""


def whole_shares(piece: Piece, count: int) -> list[Piece]:
    """About ``count`` parts of a piece, or fewer, of whole files, whose ``first`` counts from the piece's first."""
    nbytes = max(LEAST_SHARE_NBYTES, ceil_div(piece.nbytes, count))
    return list(cut_pieces([_whole(document, nbytes) for document in piece.documents], nbytes))


def _whole(document: Document, most: int) -> Document:
    """The document as one that is not cut."""
    if document.codec is None and document.nbytes > most:
        return document._replace(codec=TEXT)
    return document


class OfPiece(Protocol):
    """What a task found of a piece's documents, in the order in which they stand there."""

    @property
    def rows(self) -> Rows | None:
        """None where they are the piece's files."""

    @property
    def remarks(self) -> Remarks: ...

    @property
    def left_out(self) -> dict[int, LeftOut]:
        """`Found.left_out`."""

    @property
    def bad(self) -> dict[int, str]:
        """Files that cannot be read, by their places in the piece, and why; all else is of the piece without them."""


Part = TypeVar("Part", bound=OfPiece)


@dataclass(frozen=True, eq=False)
class Ordered:
    """All documents in the corpus's order."""

    names: Sequence[str]
    ids: Sequence[str | None] | None
    """Where documents within files were found."""
    places: np.ndarray
    """int64: where each stands among those that arrived, the parts of `Arrival` one behind the other."""
    files: np.ndarray
    """int64: the place of each one's file in the corpus."""


class Arrival(Generic[Part]):
    """Takes what was found of the documents of each piece, and tells their order once all are there."""

    def __init__(self, corpus: Corpus, pieces: Sequence[Piece], kept: Callable[[Part], Part]) -> None:
        """kept: what of a part is to be kept once its rows have been looked at."""
        self._corpus, self._pieces, self._kept = corpus, pieces, kept
        self._listing = Listing(len(corpus.documents))
        self._rows: list[np.ndarray] = []
        self._files: list[np.ndarray] = []
        self.parts: list[Part] = []
        """Of pieces with documents, as they arrived."""
        self.bad: dict[int, str] = {}
        """Files that cannot be read, by their places in the corpus, and why."""
        self.left_out: dict[int, LeftOut] = {}
        """Lines that cannot be read, by the places of their files in the corpus."""
        self.remarks: Remarks = {}

    @property
    def all_bad(self) -> tuple[tuple[str, str], ...]:
        """The names of folders, files and lines that cannot be read, and why."""
        names = [each.name for each in self._corpus.documents]
        return (*self._corpus.unlisted, *all_bad(names, self.bad, self.left_out))

    def __call__(self, place: int, part: Part) -> Part:
        piece = self._pieces[place]
        places = piece.first + np.arange(len(piece.documents))
        if part.bad:
            self.bad |= {piece.first + at: why for at, why in part.bad.items()}
            piece, places = without(piece, part.bad), np.delete(places, list(part.bad))
        if piece.documents:
            self._files.append(places if part.rows is None else places[part.rows.places])
            self._rows.append(self._listing.rows_of(part.rows, places))
            self.parts.append(self._kept(part))
        add_remarks(self.remarks, part.remarks)
        self.left_out |= {int(places[at]): each for at, each in part.left_out.items()}
        return part

    def gather(
        self,
        client: Client,
        name: str,
        look: Callable[..., tuple[Part, dict[str, float]]],
        arguments: tuple[Any, ...],
        listener: Listener,
    ) -> None:
        """Have workers look at all pieces by ``look(piece, *arguments)``, and tell what is to be told of the files.
        name: of that in events. Raises what the tasks raise."""
        reduce_pieces(
            client,
            taken_as_they_arrive(name, look, LIGHTER),
            [(piece, *arguments) for piece in self._pieces],
            [piece.nbytes for piece in self._pieces],
            listener,
            arrived=self,
        )
        for remark in remarks_of(self.remarks):
            listener(Notice(remark))

    def in_order(self) -> Ordered:
        order, names, ids = self._listing.in_order([each.name for each in self._corpus.documents], self.bad)
        rows = np.concatenate([np.empty(0, np.int64), *self._rows])
        # Where each provisional row came to stand among those that arrived.
        arrived = np.empty(int(rows.max(initial=-1)) + 1, np.int64)
        arrived[rows] = np.arange(len(rows))
        places = arrived if order is None else arrived[order]
        files = np.concatenate([np.empty(0, np.int64), *self._files])[places]
        return Ordered(names, ids, places, files)
