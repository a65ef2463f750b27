"""Counts per document of many bins, of which each document has few: rows of what is not zero."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class SparseCounts:
    """A table of counts, (documents, bins), as compressed sparse rows (CSR). Where an array is wanted it gives one, of
    its full size: ``numpy.asarray(counts)``, ``counts[document]``."""

    indptr: np.ndarray
    """int64[documents + 1]: where each row begins."""
    indices: np.ndarray
    """uint32: the bins of each row that are not zero, ascending."""
    values: np.ndarray
    """Their counts: unsigned integers, as wide as the largest needs."""
    bins: int

    ndim = 2
    dtype = np.dtype(np.int64)
    """Of the arrays that it gives."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.indptr) - 1, self.bins

    @property
    def size(self) -> int:
        return self.shape[0] * self.bins

    @property
    def nbytes(self) -> int:
        """What it takes itself."""
        return int(self.indptr.nbytes + self.indices.nbytes + self.values.nbytes)

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def __getitem__(self, place: Any) -> np.ndarray:
        """A row, int64[bins], or rows, int64[(rows, bins)], by a slice; or what an array has there."""
        if isinstance(place, int | np.integer):
            row = range(len(self))[place]
            counts = np.zeros(self.bins, np.int64)
            indices, values = self.row(row)
            counts[indices] = values
            return counts
        if isinstance(place, slice):
            rows = range(len(self))[place]
            table = np.zeros((len(rows), self.bins), np.int64)
            for here, row in enumerate(rows):
                indices, values = self.row(row)
                table[here, indices] = values
            return table
        found: np.ndarray = self[:][place]
        return found

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))

    def row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The bins of a document that are not zero, and their counts."""
        where = slice(self.indptr[row], self.indptr[row + 1])
        return self.indices[where], self.values[where]

    def rows(self) -> np.ndarray:
        """int64: the row of each entry."""
        return np.repeat(np.arange(len(self)), np.diff(self.indptr))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        table = self[:]
        return table if dtype is None else table.astype(dtype, copy=False)

    def any(self) -> bool:
        return len(self.values) > 0

    def sum(self, axis: int | None = None) -> Any:
        """All counts, or those of each bin (``axis=0``) or document (1), int64."""
        if axis is None:
            return np.int64(self.values.sum(dtype=np.int64))
        if axis == 0:
            return added_up(self.indices, self.values, self.bins)
        before = np.concatenate([[0], np.cumsum(self.values, dtype=np.int64)])
        return before[self.indptr[1:]] - before[self.indptr[:-1]]


STEP = 1 << 22


def added_up(places: np.ndarray, values: np.ndarray, length: int) -> np.ndarray:
    """int64[length]: the sum of the values of each place, in memory that hardly depends on how many there are."""
    total = np.zeros(length, np.int64)
    for start in range(0, len(places), STEP):
        part = slice(start, start + STEP)
        np.add.at(total, places[part], values[part].astype(np.int64))
    return total


def narrowest(values: np.ndarray) -> np.dtype:
    """The narrowest dtype of unsigned integers that holds all of them."""
    return np.dtype(np.min_scalar_type(values.max(initial=0)))
