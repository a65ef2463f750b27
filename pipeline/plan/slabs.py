"""The slabs of rows in which a GPU finishes a tile, so that the first are written while the last are multiplied.

The last `SLAB_PANELS` panels of a tile are multiplied slab by slab: where all of them are there, first all into the
first slab. They are multiplied in these parts whenever they come, since rounding depends on the sides a kernel is
given: a tile has the same bits whether it was finished slab by slab or not. For the same reason cells are cut alike in
any tile, whether or not that is stored slab by slab: what tiles consist of depends on the number of workers, and a cell
that is in a tile on the diagonal here may be a tile of its own elsewhere. Only cells on the diagonal are multiplied
whole, as they are on it in any tile.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from tilewright.kernels.numbers import ceil_div, round_up

if TYPE_CHECKING:
    from tilewright.pipeline.plan.grid import Tile
    from tilewright.pipeline.plan.product import MatmulPlan

SLABS = 4
"""How many slabs a cell is finished in, at most."""
SLAB_PANELS = 6
"""Panels along k that are multiplied slab by slab: the more, the longer the last slab takes, while those before it are
written."""
LEAST_SLAB_ROWS = 2048
"""Products of fewer rows keep a GPU less busy."""


def cuts_of(plan: MatmulPlan, rows: int) -> list[slice]:
    """Into which parts of its rows the last panels of a tile are multiplied: each whole rows of C's stored pieces, in
    one cell. One for all where that is not done: on a CPU, and of what is formed of finished sums."""
    down, across = plan.c_unit
    whole = plan.on_host or plan.finished or any(plan.operand_dtypes) or plan.accumulators > 1
    whole = whole or plan.k_parts > 1 or plan.window is not None or plan.cell_rows % down != 0
    if whole or (plan.symmetric and (down != across or plan.layout.c().apart)):
        return [slice(0, rows)]
    step = round_up(max(LEAST_SLAB_ROWS, ceil_div(plan.cell_rows, SLABS)), down)
    starts = [
        start
        for cell in range(0, rows, plan.cell_rows)
        for start in range(cell, min(cell + plan.cell_rows, rows), step)
    ]
    return [slice(first, after) for first, after in pairwise([*starts, rows])]


def slabs_of(plan: MatmulPlan, tile: Tile) -> list[slice]:
    """The rows of a tile in slabs, which are stored as they are finished: those into which it is multiplied.

    One for all rows also on the diagonal of a symmetric C, and where a stored piece of C's lower half and its mirror
    image are not the same square.
    """
    down, across = plan.c_unit
    whole = plan.on_diagonal(tile) or (plan.symmetric and bool(tile.rows % down or tile.columns % across))
    return [slice(0, tile.rows)] if whole else cuts_of(plan, tile.rows)
