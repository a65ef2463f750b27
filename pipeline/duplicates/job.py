"""How duplicates are found: signatures of all documents in one pass over the corpus, buckets of them, and pairs that
are verified by a second look at the documents in buckets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tilewright.kernels.numbers import counted
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
from tilewright.pipeline.forecast.documents import kind_of_documents
from tilewright.pipeline.forecast.rates import remember_count
from tilewright.pipeline.plan.inputs import WorkerFacts, most_neighbours
from tilewright.pipeline.text.corpus import Corpus, check_unchanged
from tilewright.pipeline.text.counting import decompressors_of
from tilewright.pipeline.text.names import notes_on_ids
from tilewright.pipeline.text.whole.documents import Arrival, whole_pieces
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


def _documents(arrival: Arrival[Signed], corpus: Corpus, bands: int) -> _Documents:
    """All documents, once the parts of all pieces have arrived."""
    ordered, parts = arrival.in_order(), arrival.parts
    places, files = ordered.places, ordered.files
    # Documents of a file stand together, in its order.
    first = np.searchsorted(files, files)
    where = Where(
        files,
        np.arange(len(files)) - first,
        np.concatenate([np.empty(0, np.int64), *(part.nbytes for part in parts)])[places],
        np.concatenate([np.empty((0, 2), np.uint64), *(part.digests for part in parts)])[places],
    )
    wanted = [part.signatures for part in parts if part.signatures is not None]
    return _Documents(
        list(ordered.names),
        tuple(ordered.ids) if ordered.ids is not None and corpus.reading.id_field else None,
        where,
        np.concatenate([np.empty(0, np.bool_), *(part.shingled for part in parts)])[places],
        np.concatenate(
            [np.empty((bands, 0), np.uint64), *(each for part in parts for each in part.key_parts)], axis=1
        )[:, places],
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
    pieces = whole_pieces(corpus, workers)
    device = workers[0].device
    neighbours = most_neighbours(worker.address for worker in workers)
    threads = decompressors_of(workers, neighbours) if device == "cuda" else 1
    arrival = Arrival[Signed](corpus, pieces, lambda part: replace(part, rows=None))
    arguments = options, corpus.reading, on_error, device, threads
    arrival.gather(client, "signatures", sign_piece, arguments, listener)
    if others := sum(part.others for part in arrival.parts):
        listener(
            Notice(
                f"{counted(others, 'document')} went to the cores of the GPUs' workers: what characters become there"
                f" in {options.kind.normalise} depends on others beside them"
            )
        )
    documents = _documents(arrival, corpus, options.bands)
    for note in notes_on_ids(documents.names, documents.ids, corpus.reading):
        listener(Notice(note))
    exact = first_equal(documents.where.digests)
    # Of documents with the same text, the first stands for all.
    compared = np.flatnonzero((exact == np.arange(len(exact))) & documents.shingled)
    buckets = find_buckets(client, documents.keys, compared, listener, task_keys=task_keys)
    verifying = _Verifying(client, corpus, documents.where, options, listener, batch_nbytes)
    pairs, counts, candidates = verifying.verified(buckets, exact, most_pairs)
    check_unchanged(corpus, set(arrival.bad))
    if not arrival.bad:
        remember_count(
            kind_of_documents("duplicates", corpus, workers),
            corpus.nbytes,
            len(workers),
            time.perf_counter() - start,
        )
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
        bad=arrival.all_bad,
    )


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
