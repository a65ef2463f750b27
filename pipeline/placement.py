"""Which worker computes which tile: each a share of C of its own, so that together they read little twice.

Every worker reads the rows of A and the columns of B that its tiles meet. Dealt out one after another to whoever is
free, tiles make every worker meet all of both; shares of whole rows, or blocks of the grid, make that as little as a
grid of workers has to read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence, Set
from itertools import groupby

import numpy as np

from tilewright.pipeline.peers import Sharers, host_of
from tilewright.pipeline.plan import MatmulPlan, Tile


def divide(plan: MatmulPlan, tiles: Iterable[Tile], workers: int) -> list[list[Tile]]:
    """A share of these tiles for each worker, in the order of work; about the same area each, none lost.

    The grid is cut into bands of columns, each band is walked row by row, and the walk is cut into shares. Bands are as
    many as make all workers together read least, counted as often as the largest share is larger than an even one;
    where that is the same, few. For one worker it is the plan's order.
    """
    tiles = list(tiles)
    counts = [
        count for count in range(1, workers + 1) if workers % count == 0 and count <= max(1, plan.grid[1])
    ]
    if len(counts) == 1:
        return _shares(plan, tiles, workers, 1)
    shares = [_shares(plan, tiles, workers, count) for count in counts]

    def cost(found: list[list[Tile]]) -> int:
        largest = max(sum(tile.rows * tile.columns for tile in share) for share in found)
        return largest * sum(_read_nbytes(plan, share) for share in found)

    return min(shares, key=cost)


def _shares(plan: MatmulPlan, tiles: list[Tile], workers: int, bands: int) -> list[list[Tile]]:
    columns = plan.grid[1]

    def place(tile: Tile) -> tuple[int, int, int]:
        band = tile.j * bands // columns
        return band, -tile.i if band % 2 else tile.i, tile.j  # from band to band the walk stays in its row

    area = sum(tile.rows * tile.columns for tile in tiles)
    shares: list[list[Tile]] = [[] for _ in range(workers)]
    done = 0
    for tile in sorted(tiles, key=place):
        size = tile.rows * tile.columns
        shares[(2 * done + size) * workers // (2 * area) if area else 0].append(tile)
        done += size
    return [_walk(share) for share in shares]


def _walk(tiles: list[Tile]) -> list[Tile]:
    """Row by row, every second one backwards: neighbours in time share a row or a column. Every worker begins at its
    first column, so that those whose rows differ want the same panels of B at about the same time."""
    walk: list[Tile] = []
    rows = groupby(sorted(tiles, key=lambda tile: (tile.i, tile.j)), key=lambda tile: tile.i)
    for number, (_, row) in enumerate(rows):
        walk += reversed(list(row)) if number % 2 else row
    return walk


def _read_nbytes(plan: MatmulPlan, share: list[Tile]) -> int:
    """About what a worker reads for its share, for each element of k; tiles at the edge count as whole ones."""
    rows, columns = len({tile.i for tile in share}), len({tile.j for tile in share})
    panels = max(1, plan.panel_count)  # there are none where k = 0
    holds_row, held_columns = plan.a_buffers >= panels, plan.b_buffers // panels
    row_reads = rows if holds_row else len(share)
    column_reads = columns if held_columns >= columns else len(share) - held_columns * max(0, rows - 1)
    a, b = (np.dtype(dtype).itemsize for dtype in (plan.a_dtype, plan.b_dtype))
    return row_reads * plan.tile_rows * a + column_reads * plan.tile_columns * b


class Placement:
    """Hands out tiles: to each worker its own share, and then what others would come to last."""

    def __init__(self, plan: MatmulPlan, tiles: Iterable[Tile]) -> None:
        self._plan = plan
        self._left: list[Tile] = list(tiles)
        self._shares: dict[str, deque[Tile]] = {}
        self._rows: dict[int, list[str]] = {}
        self._columns: dict[int, list[str]] = {}
        """Who had tiles of a row, or a column, in its share when that was divided."""
        self._helped: dict[str, str] = {}
        """For a worker that has done its own share, whose it took from last."""

    def __len__(self) -> int:
        """Tiles that nobody was given yet."""
        return len(self._left) + sum(map(len, self._shares.values()))

    def share_among(self, workers: Sequence[str]) -> None:
        """Divide what nobody was given yet among these workers, instead of those before."""
        left = self._left + [tile for share in self._shares.values() for tile in share]
        shares = divide(self._plan, left, len(workers))
        self._left, self._helped = [], {}
        self._shares = {worker: deque(share) for worker, share in zip(workers, shares, strict=True)}
        self._rows, self._columns = {}, {}
        for worker, share in self._shares.items():
            for lines, places in (
                (self._rows, {tile.i for tile in share}),
                (self._columns, {tile.j for tile in share}),
            ):
                for place in places:
                    lines.setdefault(place, []).append(worker)

    def own(self, worker: str) -> Tile | None:
        """The next tile of this worker's share; None behind its end."""
        share = self._shares[worker]
        return share.popleft() if share else None

    def others(self, worker: str) -> Tile | None:
        """The last tile of another's share: of the one that was helped last, so that the same row serves again, else of
        the longest. None where nothing is left."""
        helped = self._shares.get(self._helped.get(worker, worker))
        if not helped:
            longest = max(self._shares, key=lambda name: len(self._shares[name]))
            self._helped[worker] = longest
            helped = self._shares[longest]
        return helped.pop() if helped else None

    def sharers(self, tile: Tile, worker: str, among: Set[str]) -> Sharers:
        """Who of these workers, on the host of this one, wants the panels that a tile needs as well: in one order."""
        if worker not in among:
            return Sharers()
        here = host_of(worker)

        def alike(workers: Sequence[str]) -> tuple[str, ...]:
            return tuple(other for other in workers if other in among and host_of(other) == here)

        return Sharers(alike(self._rows.get(tile.i, ())), alike(self._columns.get(tile.j, ())))
