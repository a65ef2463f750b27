"""A band around C's diagonal, where nothing else of C is wanted: what lies in it, and how often the tiles that touch it
need each part of A and B.

Tiles and C's stored pieces are squares, cut alike along both sides, so that those on the diagonal are in the band
whatever its width. A stored piece that the band does not touch is not stored; in one that it does, what lies outside is
0, as what is not stored reads. Nothing here loops over tiles: counts are NumPy's, one for each row of tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Band(NamedTuple):
    """The elements of C from ``before`` columns before the diagonal to ``after`` behind it, both 0 or more."""

    before: int
    after: int

    @property
    def width(self) -> int:
        """Elements of a row of C that the edges of C do not cut short."""
        return self.before + 1 + self.after

    def touches(self, region: tuple[slice, slice]) -> bool:
        """Whether any element of a region of C is in the band.

        >>> Band(1, 0).touches((slice(0, 2), slice(2, 4))), Band(1, 0).touches((slice(2, 4), slice(0, 2)))
        (False, True)
        """
        least, most = _offsets(region)
        return least <= most and least <= self.after and most >= -self.before

    def holds(self, region: tuple[slice, slice]) -> bool:
        """Whether all of them are.

        >>> Band(1, 1).holds((slice(3, 5), slice(3, 5))), Band(1, 0).holds((slice(3, 5), slice(3, 5)))
        (True, False)
        """
        least, most = _offsets(region)
        return -self.before <= least and most <= self.after

    def columns(self, row: int, n: int) -> slice:
        """Those of a row of a C of n columns; an empty slice where there are none.

        >>> Band(2, 1).columns(0, 9), Band(2, 1).columns(8, 9), Band(0, 0).columns(12, 9)
        (slice(0, 2, None), slice(6, 9, None), slice(9, 9, None))
        """
        start, stop = self.stretches(np.array([row]), np.array([row + 1]), n)
        return slice(int(start[0]), int(stop[0]))

    def stretches(self, starts: np.ndarray, stops: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """First and last + 1 column in the band of any of the rows from each start to before each stop."""
        first = np.clip(starts - self.before, 0, n)
        return first, np.maximum(first, np.minimum(stops + self.after, n))

    def area(self, region: tuple[slice, slice], unit: tuple[int, int]) -> int:
        """Elements of those stored pieces of a region that the band touches. unit: the sides of a stored piece.

        >>> Band(0, 0).area((slice(0, 5), slice(0, 5)), (2, 2))
        9
        """
        rows, columns = region
        if rows.start >= rows.stop:
            return 0
        starts = np.arange(rows.start // unit[0] * unit[0], rows.stop, unit[0], dtype=np.int64)
        stops = np.minimum(starts + unit[0], rows.stop)
        first, stop = self.stretches(np.maximum(starts, rows.start), stops, columns.stop)
        filled = stop > first
        first = np.maximum(first // unit[1] * unit[1], columns.start)
        stop = np.minimum(-(-stop // unit[1]) * unit[1], columns.stop)
        heights = stops - np.maximum(starts, rows.start)
        return int((heights * np.maximum(0, stop - first))[filled].sum())

    def size(self, shape: tuple[int, int]) -> int:
        """Elements in the band of a C of this shape.

        >>> Band(1, 0).size((3, 3)), Band(1, 0).size((9, 3))
        (5, 6)
        """
        rows, columns = shape
        return self.area((slice(0, rows), slice(0, columns)), (1, 1))

    def clear_outside(self, block: np.ndarray, top: int, left: int) -> None:
        """Put 0 for what is not in the band, of a block of C whose first element is at ``top`` and ``left``.

        >>> block = np.ones((2, 4), int)
        >>> Band(1, 0).clear_outside(block, 2, 0)
        >>> block.tolist()
        [[0, 1, 1, 0], [0, 0, 1, 1]]
        """
        columns = block.shape[1]
        for row, line in enumerate(block):
            place = top + row - left
            line[: max(0, place - self.before)] = 0
            line[max(0, min(columns, place + self.after + 1)) :] = 0


def _offsets(region: tuple[slice, slice]) -> tuple[int, int]:
    """The least and the most that an element's column is above its row; nothing lies between where it is empty."""
    rows, columns = region
    if rows.start >= rows.stop or columns.start >= columns.stop:
        return 1, 0
    return columns.start - rows.stop + 1, columns.stop - 1 - rows.start


class TileRows(NamedTuple):
    """Which tiles of each row of tiles touch a band; int64, one a row."""

    first: np.ndarray
    """Column of tiles of the first one."""
    stop: np.ndarray
    """That of the last one + 1; not above ``first`` where there is none."""
    before: np.ndarray
    """How many tiles there are in all rows before this one; one more element, for all."""

    @classmethod
    def of(cls, band: Band, rows: np.ndarray, columns: np.ndarray, *, symmetric: bool) -> TileRows:
        """rows, columns: where the rows and columns of tiles begin, and where the last one ends. Of a symmetric C those
        on and below the diagonal."""
        n = int(columns[-1])
        start, stop = band.stretches(rows[:-1], rows[1:], n)
        empty = stop <= start
        first = np.searchsorted(columns, start, side="right") - 1
        last = np.searchsorted(columns, np.maximum(stop - 1, 0), side="right")
        if symmetric:
            last = np.minimum(last, np.arange(len(start)) + 1)
        last = np.where(empty, first, last)
        return cls(first, last, np.concatenate([[0], np.cumsum(last - first)]))

    @property
    def tile_count(self) -> int:
        return int(self.before[-1])

    @property
    def most_columns(self) -> int:
        """The most columns of tiles that two adjacent rows need together."""
        if not len(self.first):
            return 0
        following = np.append(self.stop[1:], self.stop[-1:])
        return int((np.maximum(following, self.stop) - self.first).max())

    def in_columns(self, columns: int) -> np.ndarray:
        """How many of the tiles are in each column of tiles; int64."""
        edges = np.zeros(columns + 1, np.int64)
        filled = self.stop > self.first
        np.add.at(edges, self.first[filled], 1)
        np.add.at(edges, self.stop[filled], -1)
        return np.cumsum(edges)[:-1]
