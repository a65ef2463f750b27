"""Which worker computes which tile: each gets a share of C, chosen so that workers read little in common.

A worker reads the rows of A and the columns of B that its tiles need. If tiles were dealt out one by one to whichever
worker is free, every worker would need nearly all of both. So a share is a stretch of a walk through the grid: row by
row through all of C, or through bands of its columns, one after the other. It may begin and end within a row, so that
shares have about the same work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence, Set
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline.plan.grid import Tile
from tilewright.pipeline.plan.inputs import Sharers, host_of
from tilewright.pipeline.plan.product import MatmulPlan


def divide(plan: MatmulPlan, tiles: Iterable[Tile], workers: int) -> list[list[Tile]]:
    """A share of these tiles for each worker, in the order of work: about equal work, no tile lost.

    The grid is cut into bands of columns, each band is walked row by row, and the walk is cut into shares. The number
    of bands is the divisor of ``workers`` that minimises the bytes read by all workers times the work of the largest
    share; ties go to fewer bands. For one worker the result is the plan's order.

    There may be millions of tiles, so the work for each of them is done in NumPy, on their grid positions.
    """
    tiles = list(tiles)
    places = _Places.of(plan, tiles)
    counts = [1]  # of a band of C, adjacent rows need nearly the same columns
    if plan.window is None:
        most = max(1, plan.grid[1])
        counts = [count for count in range(1, workers + 1) if workers % count == 0 and count <= most]
    deals = (_deal(plan, places, workers, count) for count in counts)
    if len(counts) == 1:
        deal = next(deals)
    else:
        deal = min(deals, key=lambda deal: _cost(plan, places, deal, workers))
    walk = _walk(places, deal)
    in_order = [tiles[number] for number in places.number[walk].tolist()]
    cuts = [0, *np.cumsum(np.bincount(deal, minlength=workers)).tolist()]
    return [in_order[start:stop] for start, stop in pairwise(cuts)]


class _Places(NamedTuple):
    """Grid positions of tiles, sorted row by row; int64[tiles] each."""

    number: np.ndarray
    """Index of the tile in the given list."""
    i: np.ndarray
    j: np.ndarray
    work: np.ndarray
    """Elements of C that are computed, twice: of a tile on the diagonal of a symmetric C about half are."""

    @classmethod
    def of(cls, plan: MatmulPlan, tiles: Sequence[Tile]) -> _Places:
        i, j = (np.fromiter(map(attrgetter(side), tiles), np.int64, len(tiles)) for side in "ij")
        number = np.lexsort((j, i))
        i, j = i[number], j[number]
        rows, columns = (np.diff(cuts.starts()) for cuts in (plan.tile_grid.rows, plan.tile_grid.columns))
        work = 2 * rows[i] * columns[j]
        if plan.symmetric:
            work[i == j] //= 2
        return cls(number, i, j, work)


def _deal(plan: MatmulPlan, places: _Places, workers: int, bands: int) -> np.ndarray:
    """The owner of each tile if the grid is cut into ``bands`` bands: int64[tiles], worker numbers."""
    band = places.j * bands // max(1, plan.grid[1])
    # Every second band is walked upwards, so that it begins in the row of tiles in which the one before it ends.
    down = np.where(band % 2, -places.i, places.i)
    walk = np.lexsort((places.j, down, band))
    done = np.cumsum(places.work[walk])
    # A tile belongs to the share that its midpoint in the walk falls into. All is doubled so that midpoints are
    # integers; the ends of shares are rounded up.
    middles = 2 * done - places.work[walk]
    work = int(places.work.sum())
    ends = np.array([ceil_div(2 * work * end, workers) for end in range(1, workers)], np.int64)
    deal = np.empty_like(walk)
    deal[walk] = np.searchsorted(ends, middles, side="right")
    return deal


def _walk(places: _Places, deal: np.ndarray) -> np.ndarray:
    """The order of work, share after share: int64[tiles], indices into ``places``.

    Row by row, every second row of a share backwards, so that consecutive tiles share a row or a column. Every worker
    begins at its first column, so that workers of different rows need the same panels of B at about the same time.
    """
    first = _first_of_each(places.i, deal)
    owner = deal[first]  # for each stretch of a row that one worker owns
    by_owner = np.argsort(owner, kind="stable")
    among_its = np.empty_like(by_owner)
    among_its[by_owner] = np.arange(len(owner)) - np.searchsorted(owner[by_owner], owner[by_owner])
    backwards = (among_its % 2 == 1)[np.cumsum(first) - 1]
    return np.lexsort((np.where(backwards, -places.j, places.j), places.i, deal))


def _first_of_each(lines: np.ndarray, deal: np.ndarray) -> np.ndarray:
    """Which tiles are the first of their line (row or column) that their worker owns: bool[tiles].

    Equal owners are adjacent in a line: every band is walked row by row, so worker numbers along a line only rise or
    only fall.
    """
    first = np.ones(len(lines), bool)
    first[1:] = (lines[1:] != lines[:-1]) | (deal[1:] != deal[:-1])
    return first


def _cost(plan: MatmulPlan, places: _Places, deal: np.ndarray, workers: int) -> int:
    """Bytes that all workers together read for each element of k, times the work of the largest share; tiles at the
    edge count as whole ones."""
    by_columns = np.argsort(places.j, kind="stable")
    count = np.bincount(deal, minlength=workers)
    rows = np.bincount(deal[_first_of_each(places.i, deal)], minlength=workers)
    columns = np.bincount(
        deal[by_columns][_first_of_each(places.j[by_columns], deal[by_columns])], minlength=workers
    )
    by_worker = np.zeros(workers, np.int64)
    np.add.at(by_worker, deal, places.work)
    if plan.shares_panels:  # a worker reads each block of A once that any of its tiles needs
        blocks = np.concatenate([deal * plan.grid[0] + places.i, deal * plan.grid[0] + places.j])
        return (
            int(by_worker.max()) * len(np.unique(blocks)) * plan.tile_rows * np.dtype(plan.a_dtype).itemsize
        )
    panels = max(1, plan.panel_count)  # no panels where k = 0
    holds_row, held_columns = plan.a_buffers >= panels, plan.b_buffers // panels
    row_reads = rows if holds_row else count
    fewer = count - held_columns * np.maximum(0, rows - 1)
    column_reads = np.where(held_columns >= columns, columns, fewer)
    a, b = (np.dtype(dtype).itemsize for dtype in (plan.a_dtype, plan.b_dtype))
    read = int(row_reads.sum()) * plan.tile_rows * a + int(column_reads.sum()) * plan.tile_columns * b
    return int(by_worker.max()) * read


class Placement:
    """Hands out tiles: to each worker its own share first, then the tiles that others would reach last."""

    def __init__(self, plan: MatmulPlan, tiles: Iterable[Tile]) -> None:
        self._plan = plan
        self._left: list[Tile] = list(tiles)
        self._shares: dict[str, deque[Tile]] = {}
        self._rows: dict[int, list[str]] = {}
        self._columns: dict[int, list[str]] = {}
        """For each row, or column, of tiles: the workers whose shares had tiles there when they were divided. Where A's
        panels serve as B's, both are in the first."""
        self._helped: dict[str, str] = {}
        """For each worker that has finished its own share: the worker that it last took a tile from."""

    def __len__(self) -> int:
        """Number of tiles not handed out yet."""
        return len(self._left) + sum(map(len, self._shares.values()))

    def share_among(self, workers: Sequence[str]) -> None:
        """Divide the tiles not handed out yet among these workers, in place of the earlier shares."""
        left = self._left + [tile for share in self._shares.values() for tile in share]
        shares = divide(self._plan, left, len(workers))
        self._left, self._helped = [], {}
        self._shares = {worker: deque(share) for worker, share in zip(workers, shares, strict=True)}
        self._rows, self._columns = {}, {}
        for worker, share in self._shares.items():
            if self._plan.shares_panels:
                for place in {place for tile in share for place in (tile.i, tile.j)}:
                    self._rows.setdefault(place, []).append(worker)
                continue
            for lines, places in (
                (self._rows, {tile.i for tile in share}),
                (self._columns, {tile.j for tile in share if not self._plan.on_diagonal(tile)}),
            ):
                for place in places:
                    lines.setdefault(place, []).append(worker)

    def own(self, worker: str) -> Tile | None:
        """The next tile of this worker's own share; None at its end."""
        share = self._shares[worker]
        return share.popleft() if share else None

    def others(self, worker: str) -> Tile | None:
        """The last tile of another worker's share: of the one helped last, so that the same row is used again, else of
        the longest. None where nothing is left."""
        helped = self._shares.get(self._helped.get(worker, worker))
        if not helped:
            longest = max(self._shares, key=lambda name: len(self._shares[name]))
            self._helped[worker] = longest
            helped = self._shares[longest]
        return helped.pop() if helped else None

    def sharers(self, tile: Tile, worker: str, among: Set[str]) -> Sharers:
        """The workers in ``among`` on this worker's host, itself included, that also need a tile's panels: always in
        the same order."""
        if worker not in among:
            return Sharers()
        here = host_of(worker)

        def alike(workers: Sequence[str]) -> tuple[str, ...]:
            return tuple(other for other in workers if other in among and host_of(other) == here)

        columns = self._rows if self._plan.shares_panels else self._columns
        return Sharers(alike(self._rows.get(tile.i, ())), alike(columns.get(tile.j, ())))
