"""How panels and tiles lie in a worker's memory, what they take up there, and how the tiles of a symmetric C lie in it.

A symmetric C = op(A) op(A)ᵀ is cut alike in rows and columns, into a grid of g × g tiles, and those on and below the
diagonal, a triangle, are computed. So op(A) consists of g *blocks* of rows; block x is what row x of tiles needs of A,
and column x of B. A tile on the diagonal takes A's panels for both.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from tilewright.kernels.numbers import ceil_div, round_up
from tilewright.pipeline.plan.band import Band
from tilewright.pipeline.plan.inputs import NO_FUSED_NBYTES, FusedNbytes, Limits

PANEL_BUFFERS = 2
"""Panels of A and of B that a worker holds at least: one being multiplied while the next is filled."""

LINE_NBYTES = 128
"""On a GPU, where tiles are cut into cells, every cell of a panel or a tile begins its lines at multiples of this.
Kernels add up in an order that depends on addresses modulo this, so they treat every cell alike, wherever in a tile it
lies."""


class Lines(NamedTuple):
    """How the lines of a panel, or of a tile, lie in memory; counted in elements."""

    cell: int
    """Contiguous elements of a line: the length of a cell."""
    unit: int
    """Alignment of cells and lines."""

    def place(self, element: int) -> int:
        """Offset of an element from the first of its line."""
        whole, rest = divmod(element, self.cell)
        return whole * self.pitch(self.cell) + rest

    def pitch(self, length: int) -> int:
        """Distance from one line of this length to the next."""
        if self.unit == 1:
            return length
        whole, rest = divmod(length, self.cell)
        return (whole * ceil_div(self.cell, self.unit) + ceil_div(rest, self.unit)) * self.unit

    @property
    def apart(self) -> bool:
        """Whether there is padding between one cell of a line and the next."""
        return self.cell % self.unit != 0

    def stretches(self, start: int, stop: int) -> list[tuple[int, int]]:
        """A part of a line, cut into contiguous stretches."""
        if not self.apart:
            return [(start, stop)]
        cuts = [start, *range(round_up(start + 1, self.cell), stop, self.cell), stop]
        return list(itertools.pairwise(cuts))


class Layout(NamedTuple):
    """How the panels and tiles of a product lie in memory.

    They lie as the matrices are stored in Zarr, so a transposed operand has lines along its other side. Lines follow
    each other without gaps, as do the cells of a line, except on a GPU where the operand, or C, is cut into cells: see
    `LINE_NBYTES`.
    """

    depth: int
    """Of the panels."""
    cell: tuple[int, int]
    """Rows and columns of C."""
    cut: tuple[bool, bool]
    """Whether C has more rows than a cell, and more columns."""
    transposed: tuple[bool, bool]
    """Whether A, and B, is stored transposed."""
    items: tuple[int, int, int]
    """Bytes of an element of A, B, and a tile of C."""
    line_nbytes: int

    @classmethod
    def of(
        cls,
        sides: tuple[int, int],
        cell: tuple[int, int],
        depth: int,
        transposed: tuple[bool, bool],
        items: tuple[int, int, int],
        line_nbytes: int,
    ) -> Layout:
        """The layout for a C of these sides."""
        cut = cell[0] < sides[0], cell[1] < sides[1]
        return cls(depth, cell, cut, transposed, items, line_nbytes)

    def a(self) -> Lines:
        return Lines(self.cell[0] if self.transposed[0] else self.depth, self._unit(self.cut[0], 0))

    def b(self) -> Lines:
        return Lines(self.depth if self.transposed[1] else self.cell[1], self._unit(self.cut[1], 1))

    def c(self) -> Lines:
        return Lines(self.cell[1], self._unit(self.cut[0] or self.cut[1], 2))

    def _unit(self, cut: bool, place: int) -> int:
        return max(1, self.line_nbytes // self.items[place]) if cut else 1

    def a_shape(self, rows: int, depth: int) -> tuple[int, int]:
        """The sides of a panel of A as it is stored."""
        return (depth, rows) if self.transposed[0] else (rows, depth)

    def b_shape(self, columns: int, depth: int) -> tuple[int, int]:
        """The same for B."""
        return (columns, depth) if self.transposed[1] else (depth, columns)

    def a_size(self, rows: int, depth: int) -> int:
        """Elements that a panel of A takes up."""
        lines, length = self.a_shape(rows, depth)
        return lines * self.a().pitch(length)

    def b_size(self, columns: int, depth: int) -> int:
        """The same for B."""
        lines, length = self.b_shape(columns, depth)
        return lines * self.b().pitch(length)

    def c_size(self, rows: int, columns: int) -> int:
        """The same for a tile of C."""
        return rows * self.c().pitch(columns)

    def sums_size(self, rows: int, columns: int, count: int) -> int:
        """The same for so many accumulators of a tile, one behind the other; each begins as `plane` says."""
        return self.plane(rows, columns, count - 1) + self.c_size(rows, columns)

    def plane(self, rows: int, columns: int, place: int) -> int:
        """Where the accumulator of this place begins, in elements: on a GPU where a line may begin."""
        unit = max(1, self.line_nbytes // self.items[2])
        return place * round_up(self.c_size(rows, columns), unit)


@dataclass(frozen=True)
class Memory:
    """Bytes that tiles and panels take, from the sides of C and the depth of a panel."""

    sides: tuple[int, int]
    items: tuple[int, int, int]
    """Bytes of an element of A, of B, and of a sum in a tile of C, which may be wider than C's dtype."""
    depth: int
    transposed: tuple[bool, bool]
    limits: Limits
    cell: tuple[int, int] | None = None
    """Sides of the cells that tiles are multiplied in; None: those of the tile."""
    symmetric: bool = False
    """Whether C is symmetric, so that only tiles on and below its diagonal are computed."""
    fused: FusedNbytes = NO_FUSED_NBYTES
    band: Band | None = None
    """Where only tiles that touch a band are computed: that."""

    def layout(self, rows: int, columns: int) -> Layout:
        """The layout of a tile of these sides and of its panels."""
        cell = self.cell or (rows, columns)
        return Layout.of(self.sides, cell, self.depth, self.transposed, self.items, self.limits.line_nbytes)

    def strides(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows of A, and columns of B, that are read at once for tiles of these sides: where there is padding between
        the cells of a line, each cell is read by itself."""
        if self.cell is None:
            return rows, columns
        layout, (transpose_a, transpose_b) = self.layout(rows, columns), self.transposed
        return (
            self.cell[0] if transpose_a and layout.a().apart else rows,
            self.cell[1] if not transpose_b and layout.b().apart else columns,
        )

    def nbytes_of_each(self, rows: int, columns: int) -> tuple[int, int, int]:
        """Bytes of a panel of A, one of B, and a tile of these sides."""
        layout = self.layout(rows, columns)
        only_diagonal = self.symmetric and rows >= self.sides[0]  # whose tile takes A's panels for B's
        return (
            layout.a_size(rows, self.depth) * self.items[0],
            0 if only_diagonal else layout.b_size(columns, self.depth) * self.items[1],
            layout.sums_size(rows, columns, self.fused.sums) * self.items[2],
        )

    def fused_nbytes(self, rows: int, columns: int) -> int:
        """Bytes of the buffers for transformed panels, and for finishing a tile, of these sides."""
        fused = self.fused
        if fused == NO_FUSED_NBYTES:
            return 0
        # A buffer that there is not takes no bytes, whatever the alignment of its lines.
        items = max(1, fused.a), max(1, fused.b), max(1, fused.tile)
        layout = self.layout(rows, columns)._replace(items=items)
        only_diagonal = self.symmetric and rows >= self.sides[0] and not fused.both
        panels = layout.a_size(rows, self.depth) * fused.a
        panels += 0 if only_diagonal else layout.b_size(columns, self.depth) * fused.b
        before = layout._replace(items=(*items[:2], max(1, fused.before))).c_size(rows, columns)
        return panels + layout.c_size(rows, columns) * fused.tile + before * fused.before

    def nbytes(self, rows: int, columns: int, c_buffers: int) -> int:
        panel_a, panel_b, tile = self.nbytes_of_each(rows, columns)
        borrowed = self.limits.workspace_nbytes(rows, columns, self.depth)
        if self.cell is not None:
            # A tile may be aligned and need no copy where its cells do.
            cell_rows, cell_columns = min(self.cell[0], rows), min(self.cell[1], columns)
            borrowed = max(borrowed, self.limits.workspace_nbytes(cell_rows, cell_columns, self.depth))
        borrowed += self.fused_nbytes(rows, columns)
        return PANEL_BUFFERS * (panel_a + panel_b) + c_buffers * tile + borrowed

    def most_columns(self, rows: int, nbytes: int, c_buffers: int) -> int:
        """Upper bound on the columns of a tile of ``rows`` rows that fits into ``nbytes``; 0 where none does. Padding
        and workspace may leave room for fewer."""
        item_a, item_b, item_c = self.items
        fused = self.fused
        left = nbytes - (PANEL_BUFFERS * item_a + fused.a) * self.depth * rows
        each = (PANEL_BUFFERS * item_b + fused.b) * self.depth
        each += (c_buffers * item_c * fused.sums + fused.tile + fused.before) * rows
        return max(0, left // each)


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
