"""The memory of a worker: how panels and tiles lie there, what they take up, which of them it keeps besides those it
works on, and what it must read and decode anyway."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from tilewright.kernels.cpu.centred_panel import packed_nbytes
from tilewright.kernels.numbers import ceil_div, round_up
from tilewright.pipeline.plan.band import Band, TileRows
from tilewright.pipeline.plan.grid import Cuts, TileGrid
from tilewright.pipeline.plan.inputs import (
    NO_FUSED_NBYTES,
    Columns,
    FusedNbytes,
    Geometry,
    Limits,
    StoredMatrix,
)

PANEL_BUFFERS = 2
"""Panels of A and of B that a worker holds at least: one being multiplied while the next is filled."""

PANELS_AHEAD = 4
"""Panels of A and of B that a GPU holds at most for the sake of those to come, where memory is left over: workers that
share panels answer each other late at times, and the GPU then multiplies what is there."""

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
        if place == 0:
            return 0
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
        if fused.packed:
            panels = packed_nbytes(rows, self.depth)
            panels += 0 if only_diagonal else packed_nbytes(columns, self.depth)
        else:
            panels = layout.a_size(rows, self.depth) * fused.a
            panels += 0 if only_diagonal else layout.b_size(columns, self.depth) * fused.b
        before = layout._replace(items=(*items[:2], max(1, fused.before))).c_size(rows, columns)
        return panels + layout.c_size(rows, columns) * fused.tile + before * fused.before

    def nbytes(self, rows: int, columns: int, c_buffers: int) -> int:
        panel_a, panel_b, tile = self.nbytes_of_each(rows, columns)
        borrowed = 0
        if (workspace := self.limits.workspace_nbytes) is not None:
            borrowed = workspace(rows, columns, self.depth)
            if self.cell is not None:
                # A tile may be aligned and need no copy where its cells do.
                cell_rows, cell_columns = min(self.cell[0], rows), min(self.cell[1], columns)
                borrowed = max(borrowed, workspace(cell_rows, cell_columns, self.depth))
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


@dataclass(frozen=True)
class Held:
    """The buffers of a worker, and what is read in spite of them."""

    a_buffers: int
    b_buffers: int
    """0 where C is symmetric and all panels of A are held, or nothing of B is needed."""
    c_buffers: int
    peak_nbytes: int
    """Bytes of all buffers and of the kernel's workspace."""
    ahead_nbytes: int
    """Those of them that panels ahead take, which are held because there is room, and could be done without."""
    a_reads: int
    """Upper bound on how often all of A is read; 0 where C is symmetric, since B is the same array."""
    b_reads: tuple[Columns, ...]
    """The same for the columns of tiles of B, from the first to the last; where C is symmetric, those of A as well."""
    rows: tuple[Columns, ...] = ()
    """The same for the rows of tiles of A, where only tiles that touch a band are computed: some rows have more of them
    than others. ``a_reads`` is 0 then."""

    @property
    def b_reads_of_all(self) -> int:
        """The sum of these over all columns of tiles."""
        return sum(columns.number * columns.reads for columns in self.b_reads)


def hold(memory: Memory, geometry: Geometry, panel_count: int, workers: int) -> Held:
    """As many tiles and panels as the memory holds: first those the work needs, then panels that save reading, then
    tiles to be written while others are multiplied, then panels ahead. ``workers`` share the tiles."""
    limits, (m, n) = memory.limits, memory.sides
    rows, columns, k_parts = geometry.tile_rows, geometry.tile_columns, geometry.k_parts
    tile_grid = TileGrid.of(memory.sides, geometry, symmetric=memory.symmetric, band=memory.band)
    grid, banded = tile_grid.shape, tile_grid.in_band
    panel_a, panel_b, tile_nbytes = memory.nbytes_of_each(rows, columns)
    c_buffers = min(limits.tile_buffers, 2)
    if memory.nbytes(rows, columns, c_buffers) > limits.device_nbytes:
        c_buffers = 1
    needed = memory.nbytes(rows, columns, c_buffers)
    left = limits.device_nbytes - needed
    holds = not limits.on_host and k_parts == 1
    if not holds:
        left = 0  # the page cache holds what the host read; parts of k have no panel in common
    # Where C is symmetric, a tile on the diagonal takes nothing of B: the first row and the last column have no other.
    of_b = (max(0, grid[0] - 1), max(0, grid[1] - 1)) if memory.symmetric else grid
    a_buffers, b_buffers = _panel_buffers(grid[1], of_b, panel_count, left, (panel_a, panel_b))
    everything = grid[0] * panel_count  # of a symmetric product's one array
    rows_read: tuple[Columns, ...] = ()
    b_reads: tuple[Columns, ...]
    if banded is not None:
        a_buffers, b_buffers = _band_buffers(
            banded, panel_count, left, (panel_a, panel_b), symmetric=memory.symmetric
        )
        a_reads = 0
        rows_read, b_reads = _band_reads(
            banded, grid[1], panel_count, workers, (a_buffers, b_buffers), symmetric=memory.symmetric
        )
    elif memory.symmetric and holds and 0 not in of_b and (everything - 2 * PANEL_BUFFERS) * panel_a <= left:
        # They serve as panels of A and of B alike, so that each is read once.
        a_buffers, b_buffers = everything, 0
        a_reads = 0
        b_reads = (Columns(grid[0], min(grid[0], workers)),)
    elif memory.symmetric:
        b_buffers = b_buffers if 0 not in of_b else 0
        a_reads = 0
        b_reads = _block_reads(grid[0], panel_count, k_parts, workers, (a_buffers, b_buffers))
    else:
        a_reads, b_reads = _read_counts(grid, panel_count, k_parts, workers, (a_buffers, b_buffers))
    peak = needed if m and n else 0
    peak += (a_buffers - PANEL_BUFFERS) * panel_a + (b_buffers - PANEL_BUFFERS) * panel_b
    if peak and holds:
        each = ceil_div(tile_grid.count, workers)  # tiles of a worker
        more = min(limits.tile_buffers, each) - c_buffers
        more = max(0, min(more, (limits.device_nbytes - peak) // tile_nbytes))
        c_buffers, peak = c_buffers + more, peak + more * tile_nbytes
    ahead_nbytes = 0
    if peak and not limits.on_host:
        left = limits.device_nbytes - peak
        more_a, more_b = _panels_ahead((a_buffers, b_buffers), panel_count, left, (panel_a, panel_b))
        ahead_nbytes = (more_a - a_buffers) * panel_a + (more_b - b_buffers) * panel_b
        a_buffers, b_buffers = more_a, more_b
    peak += ahead_nbytes
    return Held(a_buffers, b_buffers, c_buffers, peak, ahead_nbytes, a_reads, b_reads, rows_read)


def _panel_buffers(
    row_tiles: int, of_b: tuple[int, int], panel_count: int, left: int, panel_nbytes: tuple[int, int]
) -> tuple[int, int]:
    """How many panels of A and of B a worker holds: two of each, and as many more as fit into ``left`` bytes.

    row_tiles: the most tiles of a row, all of which need its panels of A. of_b: the rows and columns of tiles that
    need panels of B.

    Tiles are walked row by row, every second row backwards, and the least recently used panel is replaced. So the
    panels of a row of A are read once for the row if all of them fit; they come first, since they save most for each
    byte. Of B, the columns of tiles at which the walk turns round are held, as many as fit.
    """
    rows, columns = of_b
    a_buffers = b_buffers = PANEL_BUFFERS
    if 0 in of_b or panel_count == 0:
        return a_buffers, b_buffers
    panel_a, panel_b = panel_nbytes
    if row_tiles > 1 and panel_count * panel_a <= left:
        a_buffers += panel_count
        left -= panel_count * panel_a
    if rows > 1:
        b_buffers += min(columns, left // (panel_count * panel_b)) * panel_count
        if (columns * panel_count - PANEL_BUFFERS) * panel_b <= left:  # then no panel replaces another
            b_buffers = max(PANEL_BUFFERS, columns * panel_count)
    return a_buffers, b_buffers


def _panels_ahead(
    buffers: tuple[int, int], panel_count: int, left: int, panel_nbytes: tuple[int, int]
) -> tuple[int, int]:
    """The buffers of A and of B with as many more as ``left`` bytes have room for, up to `PANELS_AHEAD` of each, and
    fewer than a tile's: nothing is read less often for them. A pair of panels needs one of each, so both get more or
    neither, unless one has enough."""
    most = min(PANELS_AHEAD, panel_count - 1)
    lacking = [most - held if 0 < held < most else 0 for held in buffers]
    pair = sum(nbytes for nbytes, more in zip(panel_nbytes, lacking, strict=True) if more)
    pairs = min(max(lacking), left // pair) if pair else 0
    a_buffers, b_buffers = (held + min(pairs, more) for held, more in zip(buffers, lacking, strict=True))
    return a_buffers, b_buffers


def _read_counts(
    grid: tuple[int, int], panel_count: int, k_parts: int, workers: int, buffers: tuple[int, int]
) -> tuple[int, tuple[Columns, ...]]:
    """Upper bounds on how often A, and the columns of tiles of B, are read by all workers together.

    With several workers, each walks its own share and then takes tiles from the ends of others' shares. What a worker
    holds whole it reads at most once; for the rest the bound is that of holding nothing.
    """
    rows, columns = grid
    a_buffers, b_buffers = buffers
    if 0 in grid or panel_count == 0 or k_parts > 1:
        return columns, (Columns(columns, rows),)
    a_reads = min(columns, workers) if a_buffers >= panel_count else columns
    kept = min(columns, b_buffers // panel_count)
    if kept == columns:
        return a_reads, (Columns(columns, min(rows, workers)),)
    if workers > 1:
        return a_reads, (Columns(columns, rows),)
    last, first = rows // 2, (rows - 1) // 2  # how often the walk turns at the last column, and at the first
    at_one = min(kept, columns - kept)
    between = rows if 2 * kept <= columns else rows - first - last  # columns held at neither turn, or at both
    b_reads = (
        Columns(at_one, rows - first),
        Columns(columns - 2 * at_one, between),
        Columns(at_one, rows - last),
    )
    return a_reads, tuple(alike for alike in b_reads if alike.number)


def _block_reads(
    grid: int, panel_count: int, k_parts: int, workers: int, buffers: tuple[int, int]
) -> tuple[Columns, ...]:
    """The same for the blocks of a symmetric C (`grid.py`): how often each is read, as a block of A or of B; exact for
    one worker.

    buffers: panels of A and of B that a worker holds. As above, a worker reads what it holds whole
    once, and for the rest the bound of several workers is that of holding nothing.
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


def _band_buffers(
    banded: TileRows, panel_count: int, left: int, panel_nbytes: tuple[int, int], *, symmetric: bool
) -> tuple[int, int]:
    """`_panel_buffers` where tiles touch a band: of B, what two adjacent rows of tiles need together, since the next
    row needs nearly the same columns. Where C is symmetric and there is room for it, A's panels serve as B's."""
    a_buffers = b_buffers = PANEL_BUFFERS
    panel_a, panel_b = panel_nbytes
    most = int((banded.stop - banded.first).max(initial=0))
    if symmetric and most <= 1:
        return a_buffers, 0  # tiles on the diagonal take nothing of B
    if most == 0 or panel_count == 0:
        return a_buffers, b_buffers
    together = banded.most_columns * panel_count
    if symmetric and (together - 2 * PANEL_BUFFERS) * panel_a <= left:
        return max(2 * PANEL_BUFFERS, together), 0
    if most > 1 and panel_count * panel_a <= left:
        a_buffers += panel_count
        left -= panel_count * panel_a
    together -= panel_count if symmetric else 0  # one of them is the diagonal's alone
    if (together - PANEL_BUFFERS) * panel_b <= left:
        b_buffers = max(PANEL_BUFFERS, together)
    return a_buffers, b_buffers


def _band_reads(
    banded: TileRows,
    grid_columns: int,
    panel_count: int,
    workers: int,
    buffers: tuple[int, int],
    *,
    symmetric: bool,
) -> tuple[tuple[Columns, ...], tuple[Columns, ...]]:
    """Upper bounds on how often the rows of tiles of A, and the columns of tiles of B, are read by all workers
    together where tiles touch a band; of a symmetric C none of rows, since columns count for both.

    A row whose panels a worker holds it reads once. What two adjacent rows need together it reads once too, if it walks
    from the first row to the last, as one worker does; of several, who also take tiles from the ends of others' shares,
    the bound is that of holding none of it.
    """
    a_buffers, b_buffers = buffers
    each, below = banded.stop - banded.first, banded.in_columns(grid_columns)
    as_a = np.minimum(each, workers) if 0 < panel_count <= a_buffers else each
    together = banded.most_columns * panel_count
    if not symmetric:
        as_b = np.minimum(below, 1) if workers == 1 and b_buffers >= together else below
        return _alike(as_a), _alike(as_b)
    off_diagonal = below - 1
    if workers == 1 and b_buffers == 0 and a_buffers >= together:
        return (), _alike(np.ones_like(each))
    holds = workers == 1 and 0 < together - panel_count <= b_buffers
    return (), _alike(as_a + (np.minimum(off_diagonal, 1) if holds else off_diagonal))


def _alike(counts: Iterable[int]) -> tuple[Columns, ...]:
    return tuple(Columns(len([*alike]), int(reads)) for reads, alike in groupby(counts))


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


def reads(
    a: StoredMatrix, b: StoredMatrix, memory: Memory, geometry: Geometry, held: Held
) -> tuple[int, int]:
    """Bytes of A and B that are read, and bytes decoded for that: whole stored pieces, even where tiles cut them."""
    m, n, k = a.rows, b.columns, a.columns
    depth = geometry.panel_depth
    item_a, item_b = a.dtype.itemsize, b.dtype.itemsize
    stride_a, stride_b = memory.strides(geometry.tile_rows, geometry.tile_columns)
    cuts = TileGrid.of((m, n), geometry)
    columns, touched = _read_along(held.b_reads, cuts.columns, stride_b, b.step(1))
    if memory.band is not None:
        rows, rows_touched = _read_along(held.rows, cuts.rows, stride_a, a.step(0))
    else:
        whole = _touched(0, m, cuts.rows, stride_a, a.step(0)) if geometry.within else a.touched(0, stride_a)
        rows, rows_touched = m * held.a_reads, whole * held.a_reads
    read = rows * k * item_a + k * columns * item_b
    decoded = rows_touched * a.touched(1, depth) * item_a + b.touched(0, depth) * touched * item_b
    return read, decoded if m and n else 0


def _read_along(reads: Iterable[Columns], cuts: Cuts, stride: int, unit: int) -> tuple[int, int]:
    """Elements along a side that are read, as often as each stretch of tiles is, and those decoded for that."""
    read = touched = start = place = 0
    for alike in reads:
        place += alike.number
        stop = cuts.start(place)
        read += alike.reads * (stop - start)
        touched += alike.reads * _touched(start, stop, cuts, stride, unit)
        start = stop
    return read, touched


def _touched(start: int, stop: int, cuts: Cuts, stride: int, unit: int) -> int:
    """Elements in the whole stored units that tiles touch from one edge of a tile to another, where an axis is cut into
    tiles and each tile into strides.

    Counted for all tiles at once: a unit that a cut goes through is touched once more for it.
    """
    side, period = cuts.length, cuts.strides[0]
    last = side // unit * unit  # the last unit is cut short by the matrix
    touched = min(round_up(stop, unit), side) - start // unit * unit
    for offset in cuts.within_longest(stride):
        in_last = _count(offset, period, max(start, last), stop) if last < stop else 0
        at_edges = _count_multiples(offset, period, unit, start, stop)
        through = _count(offset, period, start, stop) - at_edges - in_last
        touched += through * unit + in_last * (side - last)
    return touched


def _count(first: int, step: int, start: int, stop: int) -> int:
    """How many of first, first + step, first + 2 step and so on lie between two places, neither of them included."""
    return max(0, (stop - 1 - first) // step - (start - first) // step)


def _count_multiples(first: int, step: int, unit: int, start: int, stop: int) -> int:
    """How many of those are multiples of ``unit``."""
    common = math.gcd(step, unit)
    if first % common:
        return 0
    period = unit // common
    steps = -first // common * pow(step // common, -1, period) % period  # to the first multiple
    return _count(first + steps * step, math.lcm(step, unit), start, stop)


def read_requests(a: StoredMatrix, b: StoredMatrix, geometry: Geometry, held: Held) -> int:
    """How many requests it takes to read chunks of A and B, as far as they are in no local files: one for each part of
    theirs that a panel touches, and where parts are no whole shards, one for the index of each shard that it touches.

    A few more or less where chunks that are wanted lie far apart in a shard, where others were never written, and
    where cells cut a panel.
    """
    rows, columns, depth = geometry.tile_rows, geometry.tile_columns, geometry.panel_depth
    # Rows of tiles, where C is a band, and columns are read unequally often; on average so often:
    of_a = held.a_reads or _reads_on_average(held.rows)
    of_b = _reads_on_average(held.b_reads)
    found = of_a * _requests_of(a, (rows, depth)) + of_b * _requests_of(b, (depth, columns))
    return math.ceil(found)


def _reads_on_average(reads: Sequence[Columns]) -> float:
    return sum(alike.number * alike.reads for alike in reads) / max(1, sum(alike.number for alike in reads))


def _requests_of(matrix: StoredMatrix, panel: tuple[int, int]) -> int:
    """Requests for a matrix that is read once, in panels of these sides."""
    if matrix.part is None:
        return 0
    found = _parts_touched(matrix, panel, matrix.part)
    if matrix.shard is not None and matrix.shard != matrix.part:
        found += _parts_touched(matrix, panel, matrix.shard)
    return found


def _parts_touched(matrix: StoredMatrix, panel: tuple[int, int], unit: tuple[int, int]) -> int:
    """Pieces of these sides that panels touch, each counted for every panel."""
    found = 1
    for side, stride, length in zip((matrix.rows, matrix.columns), panel, unit, strict=True):
        if side == 0:
            return 0
        edges = (side - 1) // stride  # between panels
        found *= ceil_div(side, length) + edges - (side - 1) // math.lcm(stride, length)
    return found


def part_cuts(panel_count: int, parts: int) -> list[int]:
    """Where each part begins, in panels, and where the last ends."""
    return [panel_count * part // parts for part in range(parts + 1)]


def k_tasks(k_parts: int, workers: int, *, on_host: bool) -> int:
    """Tasks that the parts of a tile are shared by.

    A CPU that computes alone gains nothing by a task for each: their sums would have to be kept until all are there,
    where one task adds each to those before it. The bits are the same.
    """
    return 1 if on_host and workers == 1 else k_parts


def sums_under_way(tasks: int, workers: int) -> int:
    """How many tiles are computed and added up at a time: enough that every worker has a part to compute while others
    are added up and stored."""
    return max(2, ceil_div(2 * workers, tasks))


def sums_held(k_parts: int, tasks: int, workers: int) -> int:
    """The most sums over parts of k that one worker holds: its own of all tiles under way, evenly shared, those that it
    fetches for a tile that it adds up, and the totals of tiles that it stores. Where one task sums all parts, those
    before the one that it sums, added up."""
    if tasks == 1:
        return 1 if k_parts > 1 else 0
    tiles = sums_under_way(tasks, workers)
    own = ceil_div(tiles * tasks, workers)
    fetched = tasks if workers > 1 else 0
    return own + fetched + ceil_div(tiles, workers)
