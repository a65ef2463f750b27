"""Pairs of documents compared by their shingles, on workers that are given the texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.kernels.histograms.token_kinds import TokenKind
from tilewright.pipeline.duplicates.fetching import Spool
from tilewright.pipeline.events import Listener
from tilewright.pipeline.reduce import Reduction, reduce_pieces

if TYPE_CHECKING:
    from distributed import Client

BATCH_NBYTES = 2**22
"""About how much text a task is given: more than 10 MB Dask sends unwillingly with a call."""
BATCH_PAIRS = 2**16


@dataclass(frozen=True, eq=False)
class Batch:
    """Pairs of documents."""

    documents: np.ndarray
    """int64: the different ones."""
    pairs: np.ndarray
    """int64[(pairs, 2)]: places in ``documents``."""
    nbytes: int
    """Of their texts."""


def compare(
    text: bytes, edges: np.ndarray, pairs: np.ndarray, kind: TokenKind
) -> tuple[np.ndarray, dict[str, float]]:
    """How many shingles both documents of each pair have, and how many either, int64[(pairs, 2)]. What a task does."""
    from tilewright.kernels.duplicates.sets import shared_counts
    from tilewright.kernels.duplicates.shingles import shingles_of

    start = time.perf_counter()
    counts = shared_counts(shingles_of(np.frombuffer(text, np.uint8), edges, kind), pairs)
    return counts, {"compare": time.perf_counter() - start}


def batches_of(pairs: np.ndarray, nbytes: np.ndarray, most_nbytes: int = BATCH_NBYTES) -> list[Batch]:
    """Pairs, int64[(pairs, 2)], in the order in which they are given, cut so that the texts of a batch take about
    ``most_nbytes``, and one pair at least. nbytes: of each document of the corpus."""
    found, first = [], 0
    there: set[int] = set()
    total = 0
    for place, pair in enumerate(pairs.tolist()):
        new = [each for each in pair if each not in there]
        more = sum(int(nbytes[each]) for each in new)
        if place > first and (total + more > most_nbytes or place - first >= BATCH_PAIRS):
            found.append(_batch(pairs[first:place], total))
            first, total = place, 0
            there, new = set(), pair
            more = sum(int(nbytes[each]) for each in new)
        there.update(new)
        total += more
    if first < len(pairs):
        found.append(_batch(pairs[first:], total))
    return found


def _batch(pairs: np.ndarray, nbytes: int) -> Batch:
    documents, places = np.unique(pairs, return_inverse=True)
    return Batch(documents, places.reshape(-1, 2), nbytes)


class _Calls:
    """The arguments of tasks, whose texts are read when each is handed out."""

    def __init__(self, batches: Sequence[Batch], texts: Spool, kind: TokenKind) -> None:
        self._batches, self._texts, self._kind = batches, texts, kind

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, place: int) -> tuple[Any, ...]:
        batch = self._batches[place]
        return (*self._texts.read(batch.documents), batch.pairs, self._kind)


def compare_pairs(
    client: Client,
    pairs: np.ndarray,
    nbytes: np.ndarray,
    texts: Spool,
    kind: TokenKind,
    listener: Listener,
    *,
    batch_nbytes: int = BATCH_NBYTES,
) -> np.ndarray:
    """As `compare`, of pairs of documents of the corpus whose texts are there."""
    batches = batches_of(pairs, nbytes, batch_nbytes)
    calls = _Calls(batches, texts, kind)
    # Long documents are compared here, where they are: Dask sends them unwillingly.
    here = {
        place: compare(*calls[place])[0]
        for place, batch in enumerate(batches)
        if batch.nbytes > 2 * BATCH_NBYTES
    }
    parts: list[np.ndarray] = reduce_pieces(
        client,
        Reduction(
            name="pairs",
            chunk=compare,
            identity=list,
            combine=_listed,
            commutative=False,
            lighter="give them more memory",
        ),
        calls,
        [batch.nbytes for batch in batches],
        listener,
        known=here,
    )
    return np.concatenate([np.empty((0, 2), np.int64), *parts])


def _listed(before: list[np.ndarray], part: np.ndarray) -> list[np.ndarray]:
    before.append(part)
    return before
