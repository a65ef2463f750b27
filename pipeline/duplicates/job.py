"""How duplicates are found: signatures of all documents in one pass over the corpus, buckets of them, and pairs that
are verified by a second look at the documents in buckets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tilewright.kernels.numbers import ceil_div, counted
from tilewright.pipeline import config
from tilewright.pipeline.cluster.here.worker import memory_limit
from tilewright.pipeline.duplicates.buckets import (
    NO_PAIRS,
    TASK_KEYS,
    Buckets,
    all_pairs,
    find_buckets,
    stars,
)
from tilewright.pipeline.duplicates.clusters import connected, first_equal
from tilewright.pipeline.duplicates.comparing import BATCH_NBYTES, compare_pairs
from tilewright.pipeline.duplicates.fetching import Spool, Where, fetch, spool
from tilewright.pipeline.duplicates.options import Options
from tilewright.pipeline.duplicates.result import Duplicates
from tilewright.pipeline.duplicates.signing import Signed, sign_piece
from tilewright.pipeline.events import Listener, Notice
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.reduce import reduce_pieces, taken_as_they_arrive
from tilewright.pipeline.text.arrival import without
from tilewright.pipeline.text.corpus import Corpus, Document, Piece, check_unchanged, cut_pieces
from tilewright.pipeline.text.counting import LEAST_PIECE_NBYTES
from tilewright.pipeline.text.documents import Listing, all_bad
from tilewright.pipeline.text.formats.listing import TEXT
from tilewright.pipeline.text.formats.sources import LeftOut, Remarks, add_remarks, remarks_of
from tilewright.pipeline.text.names import notes_on_ids
from tilewright.pipeline.transfer.files import let_a_tick_pass

if TYPE_CHECKING:
    from distributed import Client

PAIR_NBYTES = 64
"""What a pair takes here while pairs are made and compared."""


@dataclass(frozen=True, eq=False)
class _Documents:
    """All documents, in the corpus's order."""

    names: list[str]
    ids: tuple[str | None, ...] | None
    where: Where
    shingled: np.ndarray
    """bool."""
    keys: np.ndarray
    """uint64[(bands, documents)]."""
    signatures: np.ndarray | None


class _Arrival:
    """Takes the signed documents of each piece, and puts them in order once all are there."""

    def __init__(self, corpus: Corpus, pieces: Sequence[Piece]) -> None:
        self._corpus, self._pieces = corpus, pieces
        self._listing = Listing(len(corpus.documents))
        self._parts: list[tuple[np.ndarray, np.ndarray, Signed]] = []
        """Of each piece: provisional rows, places of files, and the documents."""
        self.bad: dict[int, str] = {}
        self.remarks: Remarks = {}
        self.left_out: dict[int, LeftOut] = {}

    def __call__(self, place: int, part: Signed) -> Signed:
        piece = self._pieces[place]
        places = piece.first + np.arange(len(piece.documents))
        if part.bad:
            self.bad |= {piece.first + at: why for at, why in part.bad.items()}
            piece, places = without(piece, part.bad), np.delete(places, list(part.bad))
        if piece.documents:
            files = places if part.rows is None else places[part.rows.places]
            self._parts.append((self._listing.rows_of(part.rows, places), files, part))
        add_remarks(self.remarks, part.remarks)
        self.left_out |= {int(places[at]): each for at, each in part.left_out.items()}
        return part

    def documents(self, bands: int) -> _Documents:
        files = [document.name for document in self._corpus.documents]
        order, names, ids = self._listing.in_order(files, self.bad)
        rows = np.concatenate([np.empty(0, np.int64), *(rows for rows, _, _ in self._parts)])
        # Where each provisional row came to stand among those that arrived.
        arrived = np.empty(int(rows.max(initial=-1)) + 1, np.int64)
        arrived[rows] = np.arange(len(rows))
        places = arrived if order is None else arrived[order]
        parts = [part for _, _, part in self._parts]
        files_of = np.concatenate([np.empty(0, np.int64), *(files for _, files, _ in self._parts)])[places]
        # Documents of a file stand together, in its order.
        first = np.searchsorted(files_of, files_of)
        where = Where(
            files_of,
            np.arange(len(files_of)) - first,
            np.concatenate([np.empty(0, np.int64), *(part.nbytes for part in parts)])[places],
            np.concatenate([np.empty((0, 2), np.uint64), *(part.digests for part in parts)])[places],
        )
        wanted = [part.signatures for part in parts if part.signatures is not None]
        return _Documents(
            list(names),
            tuple(ids) if ids is not None and self._corpus.reading.id_field else None,
            where,
            np.concatenate([np.empty(0, np.bool_), *(part.shingled for part in parts)])[places],
            np.concatenate([np.empty((bands, 0), np.uint64), *(part.keys for part in parts)], axis=1)[
                :, places
            ],
            np.concatenate(wanted)[places] if wanted else None,
        )


def find_duplicates(
    client: Client,
    corpus: Corpus,
    options: Options,
    workers: Sequence[WorkerFacts],
    *,
    listener: Listener,
    on_error: str = "stop",
    most_pairs: int = memory_limit() // 4 // PAIR_NBYTES,
    task_keys: int = TASK_KEYS,
    batch_nbytes: int = BATCH_NBYTES,
) -> Duplicates:
    """The exact and near-duplicates among the corpus's documents.

    most_pairs: how many are compared at most. task_keys, batch_nbytes: how many bands' keys, and how much text, a task
    is given.

    Raises
    ------
    PlanError
        More pairs would have to be compared.
    CorpusError
        A file cannot be read or decompressed, or is not what it was when the corpus was listed.
    StoreError
        There is no room for the texts that are compared.
    """
    let_a_tick_pass(corpus.listed)
    start = time.perf_counter()
    pieces = _pieces(corpus, workers)
    arrival = _Arrival(corpus, pieces)
    reduce_pieces(
        client,
        taken_as_they_arrive(
            "signatures",
            sign_piece,
            "let them take smaller pieces (tilewright.piece-nbytes), or split long documents (split_on)",
        ),
        [(piece, options, corpus.reading, on_error) for piece in pieces],
        [piece.nbytes for piece in pieces],
        listener,
        arrived=arrival,
    )
    for remark in remarks_of(arrival.remarks):
        listener(Notice(remark))
    documents = arrival.documents(options.bands)
    if id_field := corpus.reading.id_field:
        for note in notes_on_ids(
            documents.names, documents.ids, id_field, max(1, len(corpus.reading.fields))
        ):
            listener(Notice(note))
    exact = first_equal(documents.where.digests)
    # Of documents with the same text, the first stands for all.
    compared = np.flatnonzero((exact == np.arange(len(exact))) & documents.shingled)
    buckets = find_buckets(client, documents.keys, compared, listener, task_keys=task_keys)
    verifying = _Verifying(client, corpus, documents.where, options, listener, batch_nbytes)
    pairs, counts, candidates = verifying.verified(buckets, exact, most_pairs)
    check_unchanged(corpus, set(arrival.bad))
    return Duplicates(
        documents=tuple(documents.names),
        ids=documents.ids,
        exact=exact,
        cluster=connected(exact, pairs),
        pairs=pairs,
        jaccard=counts[:, 0] / np.maximum(counts[:, 1], 1),
        candidates=candidates,
        options=options.facts(),
        nbytes=int(documents.where.nbytes.sum()),
        seconds=time.perf_counter() - start,
        signatures=documents.signatures,
        bad=all_bad([document.name for document in corpus.documents], arrival.bad, arrival.left_out),
    )


def _pieces(corpus: Corpus, workers: Sequence[WorkerFacts]) -> list[Piece]:
    """What each task reads: whole files, since a document's text is hashed from its beginning to its end."""
    block: int = config.get("piece-nbytes")
    threads = sum(worker.threads for worker in workers)
    share = max(LEAST_PIECE_NBYTES, ceil_div(corpus.nbytes, 2 * threads))
    nbytes = min(block, share)
    pieces = list(cut_pieces([_whole(document, nbytes) for document in corpus.documents], nbytes))
    # Large files take longest: begun first, none keeps a single worker busy at the end.
    pieces.sort(key=lambda piece: -piece.nbytes if piece.nbytes > nbytes else 0)
    return pieces


def _whole(document: Document, most: int) -> Document:
    """The document as one that is not cut."""
    if document.codec is None and document.nbytes > most:
        return document._replace(codec=TEXT)
    return document


class _Verifying:
    """Compares pairs of documents, whose texts it has brought where they were not compared before."""

    def __init__(
        self,
        client: Client,
        corpus: Corpus,
        where: Where,
        options: Options,
        listener: Listener,
        batch_nbytes: int,
    ) -> None:
        self._client, self._corpus, self._where = client, corpus, where
        self._options, self._listener, self._batch_nbytes = options, listener, batch_nbytes

    def verified(self, buckets: Buckets, exact: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, int]:
        """The pairs whose Jaccard index reaches the threshold, in ascending order, their counts (`compare`), and how
        many were compared. exact: int64, the first document with each one's text."""
        with spool(len(exact)) as texts:
            if self._options.pairs == "all":
                candidates = all_pairs(buckets, most)
                pairs, counts = self._compare(candidates, texts)
                return pairs, counts, len(candidates)
            first = stars(buckets)
            pairs, counts = self._compare(first, texts)
            # What of a bucket is not of its first document's cluster may still be of one.
            second = all_pairs(buckets, most, connected(exact, pairs))
            more, more_counts = self._compare(_without(second, first), texts)
            pairs, counts = np.concatenate([pairs, more]), np.concatenate([counts, more_counts])
            order = np.lexsort((pairs[:, 1], pairs[:, 0]))
            return pairs[order], counts[order], len(first) + len(_without(second, first))

    def _compare(self, pairs: np.ndarray, texts: Spool) -> tuple[np.ndarray, np.ndarray]:
        if not len(pairs):
            return NO_PAIRS, NO_PAIRS
        documents = np.unique(pairs)
        self._listener(
            Notice(
                f"comparing {counted(len(pairs), 'pair')} of {counted(len(documents), 'document')} as they are"
            )
        )
        fetch(self._client, self._corpus, self._where, documents, texts, self._listener)
        counts = compare_pairs(
            self._client,
            pairs,
            self._where.nbytes,
            texts,
            self._options.kind,
            self._listener,
            batch_nbytes=self._batch_nbytes,
        )
        near = counts[:, 0] / np.maximum(counts[:, 1], 1) >= self._options.threshold
        return pairs[near], counts[near]


def _without(pairs: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Those of the pairs that are not among others."""
    if not len(pairs) or not len(others):
        return pairs
    _, number = np.unique(np.concatenate([others, pairs]), axis=0, return_inverse=True)
    number = number.reshape(-1)
    return pairs[~np.isin(number[len(others) :], number[: len(others)])]
