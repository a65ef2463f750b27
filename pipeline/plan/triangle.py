"""The tiles of a symmetric C, of which those on and below the diagonal are computed: how many, in which order, from how
many reads.

C = op(A) op(A)ᵀ is cut alike in rows and columns, into a grid of g × g tiles. So op(A) consists of g *blocks* of rows;
block x is what row x of tiles needs of A, and column x of B. A tile on the diagonal takes A's panels for both.
"""

from __future__ import annotations

import math

from tilewright.kernels.gpu.launch import ceil_div
from tilewright.pipeline.plan.inputs import Columns


def tile_count(grid: int) -> int:
    """Tiles on and below the diagonal of a grid of so many rows."""
    return grid * (grid + 1) // 2


def position(index: int) -> tuple[int, int]:
    """Row and column of a tile in the order of work: row by row, every second one from the diagonal backwards: so
    a row begins beside where the one before it ended."""
    i = (math.isqrt(8 * index + 1) - 1) // 2
    j = index - tile_count(i)
    return i, i - j if i % 2 else j


def area(side: int, tile: int) -> int:
    """Elements of all tiles on and below the diagonal, where a C of this side is cut into tiles of that."""
    whole, rest = divmod(side, tile)
    return (side * side + whole * tile * tile + rest * rest) // 2


def square_unit(unit: tuple[int, int], side: int) -> int:
    """The side of the smallest square tile that consists of whole stored pieces of C, as does its mirror image."""
    return max(1, min(math.lcm(*unit), side))


def block_reads(
    grid: int, panel_count: int, k_parts: int, workers: int, buffers: tuple[int, int]
) -> tuple[Columns, ...]:
    """Upper bounds on how often each block is read, as a block of A or of B, by all workers together; exact for one.

    buffers: panels of A and of B that a worker holds. As for other products (`holding._read_counts`), a worker reads
    what it holds whole once, and for the rest the bound of several workers is that of holding nothing.
    """
    a_buffers, b_buffers = buffers
    if grid == 0 or panel_count == 0 or k_parts > 1:
        return (Columns(grid, grid),) if grid else ()
    holds_row, kept = a_buffers >= panel_count, min(grid - 1, b_buffers // panel_count)

    def as_b(block: int) -> int:
        below = grid - 1 - block  # tiles of this column that are not on the diagonal
        if kept == grid - 1:
            return min(below, workers)
        return below - (_turns(grid, block, kept) if workers == 1 else 0)

    if not holds_row and (kept == 0 or (0 < kept < grid - 1 and workers > 1)):
        return (Columns(grid, grid),)
    return tuple(
        Columns(1, (min(block + 1, workers) if holds_row else block + 1) + as_b(block))
        for block in range(grid)
    )


def _turns(grid: int, block: int, kept: int) -> int:
    """For how many rows a column of tiles is still held from the row before, where the last ``kept`` columns are.

    An even row begins at column 0, where the row before ended: it finds columns 0 to kept - 1. An odd row i begins
    beside the diagonal, at column i - 1, which no row before has; that takes the place of one, and the kept - 1 columns
    after it are found.
    """
    first = block + 2  # row block + 1 is the first that needs it
    even = ceil_div(grid, 2) - ceil_div(first, 2) if block < kept and first < grid else 0
    stop = min(block + kept + 1, grid)
    odd = stop // 2 - first // 2 if first < stop else 0
    return even + odd
