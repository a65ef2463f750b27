"""Documents that are connected, directly or over others, and rows that are the same."""

from __future__ import annotations

import numpy as np


def connected(labels: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """int64: for each document, the first one of its cluster, where those of ``labels`` are joined by ``pairs``,
    int64[(pairs, 2)]. ``labels`` are such an answer for other pairs, or each document's own place."""
    labels = labels.copy()
    left, right = pairs[:, 0], pairs[:, 1]
    while True:
        one, other = labels[left], labels[right]
        apart = one != other
        if not apart.any():
            return labels
        one, other = one[apart], other[apart]
        # The first documents of clusters, each pointed at the least of those that it is joined with.
        np.minimum.at(labels, np.maximum(one, other), np.minimum(one, other))
        while not np.array_equal(further := labels[labels], labels):
            labels = further


def first_equal(rows: np.ndarray) -> np.ndarray:
    """int64: for each row of a table, the place of the first that is equal to it."""
    order = np.lexsort(rows.T[::-1])  # stable: of equal rows the first comes first
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = (rows[order[1:]] != rows[order[:-1]]).any(axis=1)
    found = np.empty(len(rows), np.int64)
    found[order] = order[np.maximum.accumulate(np.where(begins, np.arange(len(rows)), 0))]
    return found


def groups_of(labels: np.ndarray) -> list[np.ndarray]:
    """The places, int64, ascending, that have the same label, for each label that two or more have; the groups in the
    order of their labels."""
    order = np.argsort(labels, kind="stable")
    edges = np.flatnonzero(np.diff(labels[order], prepend=-1, append=-1))
    lengths = np.diff(edges)
    return [order[edges[k] : edges[k + 1]] for k in np.flatnonzero(lengths > 1).tolist()]
