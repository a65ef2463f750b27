"""The buckets of locality-sensitive hashing: documents whose signatures agree in a band, found on workers by the bands'
keys alone, and the pairs that they propose."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline.errors import PlanError
from tilewright.pipeline.events import Listener
from tilewright.pipeline.reduce import Reduction, reduce_pieces

if TYPE_CHECKING:
    from distributed import Client

TASK_KEYS = 2**18
"""About how many keys a task joins: 2 MiB of them travel there."""


@dataclass(frozen=True, eq=False)
class Buckets:
    """Sets of two documents or more."""

    members: np.ndarray
    """int64: one bucket behind the other, ascending within each."""
    edges: np.ndarray
    """int64[buckets + 1]: bucket k is ``members[edges[k]:edges[k + 1]]``."""

    def __len__(self) -> int:
        return len(self.edges) - 1


NO_BUCKETS = Buckets(np.empty(0, np.int64), np.zeros(1, np.int64))
NO_PAIRS = np.empty((0, 2), np.int64)


def join_keys(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[list[Buckets], dict[str, float]]:
    """The buckets of each part, which has the keys of documents in a band, uint64, and the documents, int64, ascending.
    What a task does."""
    start = time.perf_counter()
    found = [_joined(keys, documents) for keys, documents in parts]
    return found, {"join": time.perf_counter() - start}


def _joined(keys: np.ndarray, documents: np.ndarray) -> Buckets:
    order = np.argsort(keys, kind="stable")
    begins = np.flatnonzero(np.diff(keys[order]) != 0) + 1
    edges = np.concatenate([[0], begins, [len(keys)]]).astype(np.int64)
    lengths = np.diff(edges)
    several = lengths > 1
    return Buckets(
        documents[order[np.repeat(several, lengths)]], np.concatenate([[0], np.cumsum(lengths[several])])
    )


class _Calls:
    """The arguments of tasks, made when each is handed out: all keys of all bands would be there twice else.

    A band with many documents is cut by its keys' lowest bits, which are the same where keys are.
    """

    def __init__(self, keys: np.ndarray, documents: np.ndarray, most: int) -> None:
        self._keys, self._documents = keys, documents
        bands = len(keys)
        self._cuts = max(1, ceil_div(len(documents), most))
        self._bands = max(1, min(bands, most // max(1, len(documents))))
        """Bands of a task, where each is whole."""
        self._count = ceil_div(bands, self._bands) * self._cuts

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> tuple[Any, ...]:
        if self._cuts == 1:
            some = self._keys[place * self._bands : (place + 1) * self._bands]
            return ([(keys[self._documents], self._documents) for keys in some],)
        band, cut = divmod(place, self._cuts)
        keys = self._keys[band, self._documents]
        chosen = keys % np.uint64(self._cuts) == cut
        return ([(keys[chosen], self._documents[chosen])],)

    def nbytes(self) -> list[int]:
        return [8 * len(self._documents) * self._bands // self._cuts] * self._count


def find_buckets(
    client: Client,
    keys: np.ndarray,
    documents: np.ndarray,
    listener: Listener,
    *,
    task_keys: int = TASK_KEYS,
) -> Buckets:
    """The different buckets of all bands. keys: uint64[(bands, documents of the corpus)]; documents: those that are
    compared, ascending."""
    calls = _Calls(keys, documents, task_keys)
    parts: list[list[Buckets]] = reduce_pieces(
        client,
        Reduction(
            name="buckets",
            chunk=join_keys,
            identity=list,
            combine=_listed,
            commutative=False,
            lighter="compare fewer documents at a time",
        ),
        calls,
        calls.nbytes(),
        listener,
    )
    return _different([each for part in parts for each in part])


def _listed(before: list[list[Buckets]], part: list[Buckets]) -> list[list[Buckets]]:
    before.append(part)
    return before


def _different(buckets: Sequence[Buckets]) -> Buckets:
    """Each bucket once: near-duplicates agree in many bands."""
    lengths = np.concatenate([np.empty(0, np.int64), *(np.diff(each.edges) for each in buckets)])
    members = np.concatenate([np.empty(0, np.int64), *(each.members for each in buckets)])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    kept = []
    for length in np.unique(lengths).tolist():
        places = starts[:-1][lengths == length]
        rows = members[places[:, None] + np.arange(length)]
        kept.append(np.unique(rows, axis=0))
    if not kept:
        return NO_BUCKETS
    sizes = np.concatenate([np.full(len(rows), rows.shape[1], np.int64) for rows in kept])
    return Buckets(
        np.concatenate([rows.reshape(-1) for rows in kept]), np.concatenate([[0], np.cumsum(sizes)])
    )


def _by_size(buckets: Buckets) -> Iterator[np.ndarray]:
    """The buckets as tables, int64[(buckets, size)]."""
    lengths = np.diff(buckets.edges)
    for length in np.unique(lengths).tolist():
        places = buckets.edges[:-1][lengths == length]
        yield buckets.members[places[:, None] + np.arange(length)]


def stars(buckets: Buckets) -> np.ndarray:
    """The pairs, int64[(pairs, 2)], of the first document of each bucket with each other one: the least that connect
    it."""
    found = [
        np.stack([np.repeat(rows[:, 0], rows.shape[1] - 1), rows[:, 1:].reshape(-1)], axis=1)
        for rows in _by_size(buckets)
    ]
    return _unique(np.concatenate([NO_PAIRS, *found]))


def all_pairs(buckets: Buckets, most: int, labels: np.ndarray | None = None) -> np.ndarray:
    """All different pairs, int64[(pairs, 2)], of documents of a bucket, in ascending order. labels: if given, only
    those of documents that have different ones.

    Raises PlanError where there are more than ``most``.
    """
    found = NO_PAIRS
    for rows in _by_size(buckets):
        if labels is not None:
            rows = rows[(labels[rows] != labels[rows[:, :1]]).any(axis=1)]
        size = rows.shape[1]
        each = size * (size - 1) // 2
        step = max(1, most // each)
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            if each > most:
                raise _too_many(each, size, most)
            left, right = np.triu_indices(size, 1)
            pairs = np.stack([some[:, left].reshape(-1), some[:, right].reshape(-1)], axis=1)
            if labels is not None:
                pairs = pairs[labels[pairs[:, 0]] != labels[pairs[:, 1]]]
            found = _unique(np.concatenate([found, pairs]))
            if len(found) > most:
                raise _too_many(len(found), int(np.diff(buckets.edges).max()), most)
    return found


def _too_many(count: int, largest: int, most: int) -> PlanError:
    return PlanError(
        f"more than {most} pairs of documents would have to be compared, {count} among those found so far, since as"
        f" many as {largest} agree in one band; verify only the pairs that connect clusters (pairs='links'), raise"
        " threshold, or make shingles longer (ngram)"
    )


def _unique(pairs: np.ndarray) -> np.ndarray:
    """Each pair once, in ascending order."""
    if not len(pairs):
        return NO_PAIRS
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    pairs = pairs[order]
    new = np.ones(len(pairs), np.bool_)
    new[1:] = (pairs[1:] != pairs[:-1]).any(axis=1)
    return pairs[new]
