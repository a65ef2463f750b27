"""The slabs of rows in which a GPU finishes a tile, so that the first are written while the last are multiplied.

The last `SLAB_PANELS` panels of a tile are multiplied slab by slab: where all of them are there, first all into the
first slab. They are multiplied in these parts whenever they come, since rounding depends on the sides a kernel is
given: a tile has the same bits whether it was finished slab by slab or not. Slabs are cut from cells, so that they are
the same whatever tiles consist of these.
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


def slabs_of(plan: MatmulPlan, tile: Tile) -> list[slice]:
    """The rows of a tile in slabs, each whole rows of C's stored pieces, in one cell.

    One for all rows where that is not done: on a CPU, of what is formed of finished sums, on the diagonal of a
    symmetric C, and where a stored piece of C's lower half and its mirror image are not the same square.
    """
    down, across = plan.c_unit
    whole = plan.on_host or plan.finished or any(plan.operand_dtypes) or plan.accumulators > 1
    whole = whole or plan.k_parts > 1 or plan.window is not None or plan.on_diagonal(tile)
    whole = whole or plan.cell_rows % down != 0
    if plan.symmetric and not whole:
        whole = down != across or bool(tile.rows % down or tile.columns % across) or plan.layout.c().apart
    if whole:
        return [slice(0, tile.rows)]
    step = round_up(max(LEAST_SLAB_ROWS, ceil_div(plan.cell_rows, SLABS)), down)
    starts = [
        start
        for cell in range(0, tile.rows, plan.cell_rows)
        for start in range(cell, min(cell + plan.cell_rows, tile.rows), step)
    ]
    return [slice(first, after) for first, after in pairwise([*starts, tile.rows])]
