"""How C is cut into tiles: where each of them lies, and which of them make up a larger tile of an earlier run.

A run that goes on with less memory than C was begun with cuts every tile into smaller ones, of whole stored pieces of C
each. The sides of the smaller ones need not divide those of the larger: each larger tile is cut from its own start, and
its last row and column of tiles is what is left. So the cuts of a side are *nested*, and no old tile lies in two new
ones.

A symmetric C = op(A) op(A)ᵀ is cut alike in rows and columns, into a grid of g × g tiles, and those on and below the
diagonal, a triangle, are computed. So op(A) consists of g *blocks* of rows; block x is what row x of tiles needs of A,
and column x of B. A tile on the diagonal takes A's panels for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from tilewright.pipeline.plan.band import Band, TileRows
from tilewright.pipeline.plan.inputs import Geometry


@dataclass(frozen=True)
class Tile:
    """One tile of C: its place in the order of work, in the grid, and in the matrix."""

    index: int
    i: int
    j: int
    row_start: int
    row_stop: int
    column_start: int
    column_stop: int

    @property
    def rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def columns(self) -> int:
        return self.column_stop - self.column_start

    @property
    def region(self) -> tuple[slice, slice]:
        """Its rows and columns of C."""
        return slice(self.row_start, self.row_stop), slice(self.column_start, self.column_stop)


@dataclass(frozen=True)
class Cuts:
    """How a side of C is cut into stretches, the sides of tiles.

    It is cut into stretches of the first stride, each of these from its own start into stretches of the second, and so
    on. What is left at the end of a stretch is a shorter one.
    """

    length: int
    strides: tuple[int, ...]
    """From the longest to the tile's own."""

    @property
    def count(self) -> int:
        """How many stretches there are."""
        return _count(self.length, self.strides)

    def start(self, place: int) -> int:
        """Where this stretch begins: the side's end for the one behind the last."""
        return self.length if place >= self.count else _start(place, self.strides)

    def place(self, element: int) -> int:
        """Which stretch an element is in."""
        return _place(element, self.strides)

    def starts(self) -> list[int]:
        """Where all stretches begin, and then where the last one ends."""
        starts = [0]
        for stride in self.strides:
            stretches = pairwise([*starts, self.length])
            starts = [place for start, stop in stretches for place in range(start, stop, stride)]
        return [*starts, self.length]

    def within_longest(self, stride: int) -> Iterator[int]:
        """Where the stretches of one whole stretch of the longest stride, cut again into ``stride``, begin."""
        inner = Cuts(self.strides[0], self.strides[1:])
        for start, stop in pairwise(inner.starts()):
            yield from range(start, stop, stride)


def _count(length: int, strides: tuple[int, ...]) -> int:
    if not strides:
        return 1 if length else 0
    whole, rest = divmod(length, strides[0])
    return whole * _count(strides[0], strides[1:]) + _count(rest, strides[1:])


def _start(place: int, strides: tuple[int, ...]) -> int:
    if not strides:
        return 0
    whole, rest = divmod(place, _count(strides[0], strides[1:]))
    return whole * strides[0] + _start(rest, strides[1:])


def _place(element: int, strides: tuple[int, ...]) -> int:
    if not strides:
        return 0
    whole, rest = divmod(element, strides[0])
    return whole * _count(strides[0], strides[1:]) + _place(rest, strides[1:])


@dataclass(frozen=True)
class TileGrid:
    """The tiles of a C: all of them, or those on and below the diagonal of a symmetric one; and of these only those
    that touch a band."""

    rows: Cuts
    columns: Cuts
    symmetric: bool = False
    band: Band | None = None

    @classmethod
    def of(
        cls,
        sides: tuple[int, int],
        geometry: Geometry,
        *,
        symmetric: bool = False,
        band: Band | None = None,
    ) -> TileGrid:
        """The grid of a C of these sides."""
        rows, columns = zip(*geometry.within, (geometry.tile_rows, geometry.tile_columns), strict=True)
        return cls(Cuts(sides[0], rows), Cuts(sides[1], columns), symmetric, band)

    @property
    def shape(self) -> tuple[int, int]:
        """Tiles along m and along n."""
        return self.rows.count, self.columns.count

    @property
    def in_band(self) -> TileRows | None:
        """Which tiles touch the band, if there is one."""
        return None if self.band is None else _in_band(self)

    @property
    def count(self) -> int:
        if (banded := self.in_band) is not None:
            return banded.tile_count
        rows, columns = self.shape
        return triangle_count(rows) if self.symmetric else rows * columns

    def on_diagonal(self, tile: Tile) -> bool:
        """Whether C is symmetric and the tile is its own mirror image."""
        return self.symmetric and tile.i == tile.j

    def regions(self, tile: Tile) -> list[tuple[slice, slice]]:
        """The rows and columns of C that one tile gives: its own, and in a symmetric C those of its mirror image."""
        rows, columns = tile.region
        mirrored = self.symmetric and not self.on_diagonal(tile)
        return [(rows, columns), (columns, rows)] if mirrored else [(rows, columns)]

    def tiles(self, indices: Iterable[int] | None = None) -> Iterator[Tile]:
        """Every tile once, or those of these indices, row by row, every second row backwards: consecutive tiles share
        a row or a column."""
        row_starts, column_starts = self.rows.starts(), self.columns.starts()
        grid_columns = len(column_starts) - 1
        banded = self.in_band
        for index in range(self.count) if indices is None else indices:
            if banded is not None:
                i = int(np.searchsorted(banded.before, index, side="right")) - 1
                place = index - int(banded.before[i])
                j = int(banded.stop[i]) - 1 - place if i % 2 else int(banded.first[i]) + place
            elif self.symmetric:
                i, j = triangle_position(index)
            else:
                i, j = divmod(index, grid_columns)
                if i % 2:
                    j = grid_columns - 1 - j
            yield Tile(index, i, j, row_starts[i], row_starts[i + 1], column_starts[j], column_starts[j + 1])

    def positions(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and column of every tile in the grid, in the order of work."""
        index = np.arange(self.count, dtype=np.int64)
        if (banded := self.in_band) is not None:
            i = np.searchsorted(banded.before, index, side="right") - 1
            place = index - np.asarray(banded.before)[i]
            forwards, backwards = np.asarray(banded.first)[i] + place, np.asarray(banded.stop)[i] - 1 - place
        elif self.symmetric:
            i = ((np.sqrt(8.0 * index + 1) - 1) // 2).astype(np.int64)  # exact up to 2**50 tiles
            place = index - i * (i + 1) // 2
            forwards, backwards = place, i - place
        else:
            i, place = np.divmod(index, max(1, self.columns.count))
            forwards, backwards = place, self.columns.count - 1 - place
        return i, np.where(i % 2, backwards, forwards)

    def index(self, i: int, j: int) -> int:
        """The place of a tile in the order of work, from its row and column of the grid."""
        if (banded := self.in_band) is not None:
            place = int(banded.stop[i]) - 1 - j if i % 2 else j - int(banded.first[i])
            return int(banded.before[i]) + place
        if self.symmetric:
            return triangle_count(i) + (i - j if i % 2 else j)
        grid_columns = self.columns.count
        return i * grid_columns + (grid_columns - 1 - j if i % 2 else j)

    def holding(self, row: int, column: int) -> int:
        """The index of the tile that gives this element of C."""
        i, j = self.rows.place(row), self.columns.place(column)
        return self.index(max(i, j), min(i, j)) if self.symmetric else self.index(i, j)

    def inside(self, tile: Tile) -> list[int]:
        """The indices of the tiles that make up a tile of a grid that this one `refines`."""
        rows = range(self.rows.place(tile.row_start), self.rows.place(tile.row_stop - 1) + 1)
        columns = range(self.columns.place(tile.column_start), self.columns.place(tile.column_stop - 1) + 1)
        return [self.index(i, j) for i in rows for j in columns if self._has(i, j)]

    def _has(self, i: int, j: int) -> bool:
        """Whether there is a tile in this row and column of the grid."""
        if (banded := self.in_band) is not None:
            return bool(banded.first[i] <= j < banded.stop[i])
        return not self.symmetric or j <= i

    def refines(self, other: TileGrid) -> bool:
        """Whether every tile of another grid of the same C consists of whole tiles of this one."""
        if self == other:
            return True
        return (self.symmetric, self.band) == (other.symmetric, other.band) and all(
            ours.length == theirs.length
            and all(ours.start(ours.place(start)) == start for start in theirs.starts()[:-1])
            for ours, theirs in ((self.rows, other.rows), (self.columns, other.columns))
        )


@lru_cache(maxsize=16)
def _in_band(grid: TileGrid) -> TileRows:
    assert grid.band is not None, "what this is asked of"
    rows, columns = (np.array(cuts.starts(), np.int64) for cuts in (grid.rows, grid.columns))
    return TileRows.of(grid.band, rows, columns, symmetric=grid.symmetric)


def nest(
    sides: tuple[int, int], larger: Iterable[tuple[int, int]], smallest: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """Sides of those larger tiles, given from the largest on, that have to be known beside the smallest: the cuts of
    the others are cuts of smaller ones anyhow."""
    kept: list[tuple[int, int]] = []
    inner = smallest
    for outer in reversed([*larger]):
        if any(long < side and long % short for long, short, side in zip(outer, inner, sides, strict=True)):
            kept.append(outer)
            inner = outer
    return tuple(reversed(kept))


def triangle_count(grid: int) -> int:
    """Tiles on and below the diagonal of a grid of so many rows."""
    return grid * (grid + 1) // 2


def triangle_position(index: int) -> tuple[int, int]:
    """Row and column of a tile in the order of work: row by row, every second one from the diagonal backwards: so
    a row begins beside where the one before it ended."""
    i = (math.isqrt(8 * index + 1) - 1) // 2
    j = index - triangle_count(i)
    return i, i - j if i % 2 else j


def triangle_area(side: int, tile: int) -> int:
    """Elements of all tiles on and below the diagonal, where a C of this side is cut into tiles of that."""
    whole, rest = divmod(side, tile)
    return (side * side + whole * tile * tile + rest * rest) // 2


def square_unit(unit: tuple[int, int], side: int) -> int:
    """The side of the smallest square tile that consists of whole stored pieces of C, as does its mirror image."""
    return max(1, min(math.lcm(*unit), side))


def band_operations(grid: TileGrid) -> int:
    """Multiplications and additions of all tiles of a band, for each element of k: as ``tile_operations``."""
    banded = grid.in_band
    assert banded is not None, "there is a band"
    rows, columns = (np.array(cuts.starts(), np.int64) for cuts in (grid.rows, grid.columns))
    heights = np.diff(rows)
    whole = int((2 * heights * (columns[banded.stop] - columns[banded.first])).sum())
    return whole - int((heights * (heights - 1)).sum()) if grid.symmetric else whole
