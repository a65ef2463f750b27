"""Which tiles and panels a worker keeps in memory besides those it works on, and what it must read and decode
anyway."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.kernels.numbers import ceil_div, round_up
from tilewright.pipeline.plan.grid import Cuts, TileGrid
from tilewright.pipeline.plan.inputs import Columns, Geometry, StoredMatrix
from tilewright.pipeline.plan.layout import PANEL_BUFFERS, Memory


@dataclass(frozen=True)
class Held:
    """The buffers of a worker, and what is read in spite of them."""

    a_buffers: int
    b_buffers: int
    """0 where C is symmetric and all panels of A are held, or nothing of B is needed."""
    c_buffers: int
    peak_nbytes: int
    """Bytes of all buffers and of the kernel's workspace."""
    a_reads: int
    """Upper bound on how often all of A is read; 0 where C is symmetric, since B is the same array."""
    b_reads: tuple[Columns, ...]
    """The same for the columns of tiles of B, from the first to the last; where C is symmetric, those of A as well."""

    @property
    def b_reads_of_all(self) -> int:
        """The sum of these over all columns of tiles."""
        return sum(columns.number * columns.reads for columns in self.b_reads)


def hold(memory: Memory, geometry: Geometry, panel_count: int, workers: int) -> Held:
    """As many tiles and panels as the memory holds: first those the work needs, then panels that save reading, then
    tiles to be written while others are multiplied. ``workers`` share the tiles."""
    limits, (m, n) = memory.limits, memory.sides
    rows, columns, k_parts = geometry.tile_rows, geometry.tile_columns, geometry.k_parts
    tile_grid = TileGrid.of(memory.sides, geometry, symmetric=memory.symmetric)
    grid = tile_grid.shape
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
    if memory.symmetric and holds and 0 not in of_b and (everything - 2 * PANEL_BUFFERS) * panel_a <= left:
        # They serve as panels of A and of B alike, so that each is read once.
        a_buffers, b_buffers = everything, 0
        a_reads = 0
        b_reads: tuple[Columns, ...] = (Columns(grid[0], min(grid[0], workers)),)
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
    return Held(a_buffers, b_buffers, c_buffers, peak, a_reads, b_reads)


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
    """The same for the blocks of a symmetric C (`layout`): how often each is read, as a block of A or of B; exact for
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
    columns = touched = start = place = 0
    for alike in held.b_reads:
        place += alike.number
        stop = cuts.columns.start(place)
        columns += alike.reads * (stop - start)
        touched += alike.reads * _touched(start, stop, cuts.columns, stride_b, b.step(1))
        start = stop
    rows = _touched(0, m, cuts.rows, stride_a, a.step(0)) if geometry.within else a.touched(0, stride_a)
    read = m * k * item_a * held.a_reads + k * columns * item_b
    decoded = rows * a.touched(1, depth) * item_a * held.a_reads + b.touched(0, depth) * touched * item_b
    return read, decoded if m and n else 0


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
    # Columns of tiles are read unequally often; on average so often:
    of_b = held.b_reads_of_all / max(1, sum(alike.number for alike in held.b_reads))
    found = held.a_reads * _requests_of(a, (rows, depth)) + of_b * _requests_of(b, (depth, columns))
    return math.ceil(found)


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
