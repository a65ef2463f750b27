"""The sides of tiles and cells and the depth of panels: of what fits into memory, what reads least.

The lower bound: with M elements of fast memory, a product must move at least 2mnk/sqrt(M) elements (Kwasniewski et al.,
"Red-Blue Pebbling Revisited", SC 2019). Tiles of tm × tn read mnk(1/tm + 1/tn), which meets the bound when they are
square and fill the memory; hence "as large as fits".

To that is added what is decoded besides: a stored piece is decoded whole for every tile and panel that touches it,
unless it is held. Where matrices are stored in bands of whole rows, for example, every square tile would decode whole
bands of B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from tilewright.kernels.numbers import ceil_div, round_up
from tilewright.pipeline.plan.grid import TileGrid, nest, triangle_area, triangle_count
from tilewright.pipeline.plan.inputs import (
    NO_FUSED_NBYTES,
    FusedNbytes,
    Geometry,
    Limits,
    StoredMatrix,
)
from tilewright.pipeline.plan.memory import PANEL_BUFFERS, Memory, hold, reads

TILE_OPERATIONS = 2**34
"""The fewest operations worth a tile of its own in a small product: a tenth of a second on a few cores."""

FEW_TO_COMPARE = 64
"""Up to this many tiles it matters how well whole cells fill them: several sides of cells are tried."""

SIDES_APART = 512
"""Where a side of C is cut into this many tiles or more, of more units than this each, lengths of a tile that differ by
less than about one part in so many read about as much, and not all of them are tried. So all are tried on any side of
up to 262,144 units, the square of this number."""

CELL_COST = 1.04
"""Reading this many times as much is accepted for larger cells or deeper panels: kernels are slow on small ones."""

DEPTH_COST = 0.9
"""Panels are shallower than aimed at only if that cuts what is decoded to this share or less."""

FEW_WORKERS = 1, 2, 4
"""The depth of panels must not depend on the number of workers, so it is chosen for all of these at once: what one
worker holds and reads once, each of several reads for itself."""

MOST_TILES_TO_COMPARE = 16
"""Depths of panels are compared by grids of at most this many tiles, whatever ``tilewright.tiles`` says. Another number
may choose other depths, and so round other sums."""

MOST_WORKERS_TO_COMPARE = 256
"""Cells must not depend on the number of workers either, and have to suit every number up to ``tilewright.tiles``: they
are compared for the powers of two up to that, and to this."""

GRIDS_TO_SUIT = 8, 12, 16
"""Cells that cut a side of C into so many suit several grids of tiles: 12, for example, grids of 2, 3, 4 and 6."""

FEW_TILES = 4
"""Where memory alone cuts C into this many tiles, more tiles are not worth the additional reading."""

SPLIT_NBYTES = 32 * 2**20
"""k is cut into parts for several tasks only if each still reads this much: less is done sooner than it is handed
out."""

SUM_COST = 4
"""Writing, or reading back, a byte of a sum over a part of k costs as much as reading this many bytes of A or B: it
goes through the interpreter and over the network (two workers on two GPUs: 2.3 GB/s each, against 20 for their
inputs)."""

HOST_DEPTH = 1024
"""The deepest panels that pay on a CPU, unless half the shorter side of a tile is more: adding such a panel's product
to the tile takes a twentieth of the time of multiplying it, and deeper ones only take memory."""

MOST_CHUNK_MISMATCH = 8
"""Where the chunks of A and B along k line up only after more than this many of the longer ones, panels follow the
longer ones alone."""

LEAST_CHUNK_NBYTES = 2**20
MOST_CHUNK_NBYTES = 2**26
"""Bounds on the chunks of an output that we create, whatever the inputs' chunks are."""
SMALL_CHUNK_NBYTES = 2**12
"""Where memory is small, chunks are kept to an eighth of it, but not below this: the least that a file takes up."""


def output_chunks(
    a: StoredMatrix, b: StoredMatrix, itemsize: int, memory_nbytes: int, *, square: bool = False
) -> tuple[int, int]:
    """Chunk sides for a new C: A's along rows and B's along columns, adjusted to between 1 and 64 MiB a chunk.

    ``square`` is for a symmetric C, of equal chunks along both: any number of those is a tile whose mirror image is one
    too.

    A chunk is also kept to an eighth of the memory for tiles and panels, down to 4 KiB: a tile is at least a chunk, and
    panels with little room beside it are shallow, so that chunks would be decoded again and again.
    """
    most = max(SMALL_CHUNK_NBYTES, min(MOST_CHUNK_NBYTES, memory_nbytes // 8))
    least = min(LEAST_CHUNK_NBYTES, most)
    sides = [max(1, min(a.unit[0], a.rows)), max(1, min(b.unit[1], b.columns))]
    limits = (max(1, a.rows), max(1, b.columns))
    if square:
        side = sides[0]
        while side * side * itemsize < least and side < limits[0]:
            side = min(2 * side, limits[0])
        while side * side * itemsize > most:
            side = ceil_div(side, 2)
        return side, side
    while sides[0] * sides[1] * itemsize < least and (sides[0] < limits[0] or sides[1] < limits[1]):
        grow = 0 if (sides[0] <= sides[1] and sides[0] < limits[0]) or sides[1] >= limits[1] else 1
        sides[grow] = min(2 * sides[grow], limits[grow])
    while sides[0] * sides[1] * itemsize > most:
        shrink = 0 if sides[0] >= sides[1] else 1
        sides[shrink] = ceil_div(sides[shrink], 2)
    return sides[0], sides[1]


def panel_depth(
    a: StoredMatrix,
    b: StoredMatrix,
    items: tuple[int, int, int],
    transposed: tuple[bool, bool],
    c_unit: tuple[int, int],
    limits: Limits,
    *,
    symmetric: bool = False,
    fused: FusedNbytes = NO_FUSED_NBYTES,
) -> int:
    """The depth of a panel: whole chunks of both operands along k, near the size aimed at, within memory.

    Where chunks have to be decoded, it is less if much less is decoded then: smaller panels leave more memory to tiles,
    and the chunks of A and B may line up so rarely that tiles would be small. That must decode less in total over
    `FEW_WORKERS`, and more for none of them. The actual number of workers has no influence, since the depth decides how
    sums are rounded.
    """
    m, n, k = a.rows, b.columns, a.columns
    aimed = _depth_aimed_at(a, b, items, transposed, c_unit, limits, fused)
    if (a.plain and b.plain) or 0 in (m, n, k):
        return aimed

    # As if sums were exact, so without cells, and with few tiles: searching cells, or many tiles, would take longer
    # than all the rest.
    few = replace(limits, workers=1, tiles=min(limits.tiles, MOST_TILES_TO_COMPARE))
    at_aim = Memory((m, n), items, aimed, transposed, limits, symmetric=symmetric, fused=fused)
    if aimed == k and _is_one_tile(m, n, k, c_unit, at_aim, few):
        return aimed  # of one panel each: every chunk is decoded once

    def decoded(depth: int) -> list[float]:
        """Bytes decoded with each number of workers in `FEW_WORKERS`, with the tiles of one worker."""
        memory = replace(at_aim, depth=depth)
        geometry = best_geometry(a, b, c_unit, memory, few, exact=True)
        if geometry is None:
            return [math.inf] * len(FEW_WORKERS)
        held = (hold(memory, geometry, ceil_div(k, depth), workers) for workers in FEW_WORKERS)
        return [reads(a, b, memory, geometry, one)[1] for one in held]

    def once(depth: int) -> int:
        """Bytes decoded with a single tile: the least at this depth."""
        return m * a.touched(1, depth) * items[0] + n * b.touched(0, depth) * items[1]

    at_aimed = decoded(aimed)
    enough = DEPTH_COST * sum(at_aimed)
    if enough < len(FEW_WORKERS) * (a.nbytes + b.nbytes):
        return aimed
    steps = {a.step(1), b.step(0)}
    others = {step * count for step in steps for count in (1, 2, 4)}
    others |= {ceil_div(step, 2**halvings) for step in (*steps, aimed) for halvings in range(1, 7)}
    costs: dict[int, float] = {}
    for least, depth in sorted((once(depth), depth) for depth in others if depth < aimed):
        if len(FEW_WORKERS) * least > enough:
            break  # the depths after it decode no less
        for_each = decoded(depth)
        if all(new <= old for new, old in zip(for_each, at_aimed, strict=True)):
            costs[depth] = sum(for_each)
            enough = min(enough, CELL_COST * costs[depth])
    return max((depth for depth, cost in costs.items() if cost <= enough), default=aimed)


def _depth_aimed_at(
    a: StoredMatrix,
    b: StoredMatrix,
    items: tuple[int, int, int],
    transposed: tuple[bool, bool],
    c_unit: tuple[int, int],
    limits: Limits,
    fused: FusedNbytes,
) -> int:
    """The depth at which panels have the size aimed at, whichever tiles are chosen later."""
    k = a.columns
    if k == 0:
        return 1
    steps = a.step(1), b.step(0)
    longer = max(steps)
    unit = math.lcm(*steps)
    if unit > MOST_CHUNK_MISMATCH * longer:
        unit = longer
    if unit >= k:
        unit = k
    # The likely side of a tile. ``held`` is that of the largest one that half the memory has room for, ``wanted`` that
    # of C cut into the wanted number of tiles. If that half has room for no more than two of the wanted tiles, memory
    # is short, and tiles are expected to be as large as it allows. Else tiles of the wanted side leave room for more
    # of them and for panels that later tiles need again, and the panels that are being loaded are made smaller.
    held = math.isqrt(max(1, limits.device_nbytes // (2 * items[2] * fused.sums)))
    wanted = math.isqrt(max(1, a.rows * b.columns // limits.tiles))
    short = held * held <= 2 * wanted * wanted
    side = held if short else wanted
    # No tile is smaller than a stored piece of C: where C is small, k is cut instead.
    rows = max(1, min(max(side, c_unit[0]), a.rows))
    columns = max(1, min(max(side, c_unit[1]), b.columns))
    row_nbytes = rows * max(items[0], fused.a) + columns * max(items[1], fused.b)
    # Measured: four GPUs that share panels of float64 or int64 take a tenth less time when these are as deep as
    # float32's.
    wanted_nbytes = limits.panel_nbytes * max(*items[:2], *fused[:2], 4) // 4
    panel_nbytes = min(wanted_nbytes, limits.device_nbytes // ((4 if short else 8) * PANEL_BUFFERS))
    depth = max(1, panel_nbytes // row_nbytes)
    if limits.on_host:
        depth = min(depth, max(HOST_DEPTH, min(rows, columns) // 2))
    if depth >= k:
        return k
    # A part of a chunk is read row by row, a whole one in one piece: cut chunks only where they are too deep.
    whole = math.lcm(a.unit[1], b.unit[0])
    if depth >= whole:
        unit = whole
    depth = depth // unit * unit if depth >= unit else unit
    # A chunk too deep for the memory is read in parts rather than refused.
    smallest = max(1, min(c_unit[0], a.rows)), max(1, min(c_unit[1], b.columns))  # C may be empty
    while depth > 1:
        memory = Memory((a.rows, b.columns), items, depth, transposed, limits, fused=fused)
        if memory.nbytes(*smallest, 1) <= limits.device_nbytes:
            break
        depth = ceil_div(depth, 2)
    return min(depth, k)


def best_geometry(
    a: StoredMatrix,
    b: StoredMatrix,
    c_unit: tuple[int, int],
    memory: Memory,
    limits: Limits,
    *,
    exact: bool,
) -> Geometry | None:
    """Sides of the tiles, the parts that k is cut into, and sides of the cells; None: nothing fits.

    The parts of k are the same for any number of workers up to ``limits.tiles``, and where memory is plenty so is the
    grid. Where memory alone cuts C into many tiles the grid depends on the number of workers: a grid that suits any
    number would make a single worker read more (a grid for 16: a fifth more). Its tiles then consist of whole cells,
    which do not depend on the workers, so that C is the same to the last bit. ``exact`` sums need no cells for that.
    """
    m, n, k = a.rows, b.columns, a.columns
    if m == 0 or n == 0:
        return Geometry(max(1, m), max(1, n), memory.depth, 1, max(1, m), max(1, n))
    if _is_one_tile(m, n, k, c_unit, memory, limits):
        return Geometry(m, n, memory.depth, 1, m, n)
    search_grid = _search_square if memory.symmetric else _search_grid
    search = partial(search_grid, a, b, memory, limits.device_nbytes)
    least = search(c_unit, 1)
    if least is None:
        return None
    few_workers = limits.workers <= limits.tiles
    tiles = _worth_tiles(m, n, k, memory, limits)
    wanted = tiles if few_workers else max(tiles, limits.workers)
    # Somebody who asks for more tiles than by default, as for a stop to cost less, knows that more is read. Only whole
    # tiles are recorded: parts of k make a stop no cheaper.
    more = limits.tiles > MOST_TILES_TO_COMPARE
    units = ceil_div(m, c_unit[0]) * ceil_div(n, c_unit[1])
    if memory.symmetric:
        units = triangle_count(ceil_div(n, c_unit[1]))
    whole = 1 if more and units >= wanted else None
    best = least if wanted == 1 else search(c_unit, wanted, k_parts=whole, for_workers=not few_workers)
    few = min(FEW_TILES, max(2, ceil_div(tiles, 2)))
    if more:
        few = tiles
    elif limits.on_host and best is not None and best.k_parts == 1 and 2 * best.tiles > tiles:
        few = tiles  # a CPU multiplies for so long that reading less is not worth tiles that take four times the memory
    cut_by_memory = least.tiles >= few
    cell = None
    if cut_by_memory and best is not None:
        # The grid follows the workers, but the parts of k must not: the sum over each is rounded.
        k_parts = best.k_parts if few_workers else None

        def in_cells(cell: tuple[int, int], wanted: int) -> _Grid | None:
            held = replace(memory, cell=cell)
            return search_grid(
                a, b, held, limits.device_nbytes, cell, wanted, k_parts=k_parts, for_workers=True
            )

        if exact:
            alone = limits.workers == best.k_parts == least.k_parts == 1
            best = least if alone else search(c_unit, limits.workers, k_parts=k_parts, for_workers=True)
        elif cell := _best_cell(memory, c_unit, least, in_cells, limits.tiles):
            made_of_cells = in_cells(cell, limits.workers)
            if made_of_cells is None or (not few_workers and best.cost < made_of_cells.cost):
                cell = None  # so many workers need not get the bits that fewer get
            else:
                best = made_of_cells
    if best is None:
        return None
    cell = cell or (best.rows, best.columns)
    cell_rows, cell_columns = min(cell[0], best.rows), min(cell[1], best.columns)
    return Geometry(best.rows, best.columns, memory.depth, best.k_parts, cell_rows, cell_columns)


def _worth_tiles(m: int, n: int, k: int, memory: Memory, limits: Limits) -> int:
    """How many tiles a C of these sides is worth by its operations, up to the number that is asked for."""
    operations = (n * (n + 1) * k if memory.symmetric else 2 * m * n * k) * memory.fused.sums
    return max(1, min(limits.tiles, operations // TILE_OPERATIONS))


def _is_one_tile(m: int, n: int, k: int, c_unit: tuple[int, int], memory: Memory, limits: Limits) -> bool:
    """Whether a C of these sides is one stored piece, too little work for two tasks, and fits: then there is no other
    way to cut it."""
    one_piece = m <= c_unit[0] and n <= c_unit[1]
    one_task = limits.workers <= limits.tiles and _worth_tiles(m, n, k, memory, limits) == 1
    return one_piece and one_task and memory.nbytes(m, n, 1) <= limits.device_nbytes


def finer_geometry(
    a: StoredMatrix,
    b: StoredMatrix,
    c_unit: tuple[int, int],
    memory: Memory,
    limits: Limits,
    keep: Geometry,
) -> Geometry | None:
    """Sides of the tiles that those of an earlier run are cut into where these do not fit any more; None: nothing
    fits.

    One of the earlier tiles is planned as a product of its own, for its share of the workers, and all are cut alike.
    Where they consist of several cells that fit, the new ones consist of the same, so that the bits are the same too.
    """
    sides = min(keep.tile_rows, a.rows), min(keep.tile_columns, b.columns)
    count = max(1, TileGrid.of(memory.sides, keep, symmetric=memory.symmetric).count)
    share = replace(limits, workers=ceil_div(limits.workers, count), tiles=ceil_div(limits.tiles, count))
    rows, columns = replace(a, rows=sides[0]), replace(b, columns=sides[1])

    def cut(unit: tuple[int, int], memory: Memory) -> Geometry | None:
        one = best_geometry(rows, columns, unit, memory, share, exact=True)
        if one is not None and memory.symmetric and sides != memory.sides:
            one = _in_equal_parts(one, sides[0], unit[0])
            if memory.nbytes(one.tile_rows, one.tile_columns, 1) > limits.device_nbytes:
                return None
        if one is None:
            return None
        return one._replace(
            within=nest(memory.sides, (*keep.within, sides), (one.tile_rows, one.tile_columns))
        )

    cell = keep.cell_rows, keep.cell_columns
    in_cells = cut(cell, replace(memory, depth=keep.panel_depth, cell=cell)) if cell != sides else None
    if in_cells is None:
        return cut(c_unit, memory)
    return in_cells._replace(k_parts=keep.k_parts, cell_rows=cell[0], cell_columns=cell[1])


def _in_equal_parts(geometry: Geometry, side: int, unit: int) -> Geometry:
    """The same for square tiles whose side divides ``side``, of whole units: as long as it was, or shorter.

    The tile that gives its mirror image too is transposed where it lies in memory, in a square of its columns: so in a
    symmetric C only the last row of tiles may be lower than others, and no column narrower.
    """
    parts = ceil_div(side, geometry.tile_rows)
    while side // unit % parts:
        parts += 1
    length = side // parts
    return geometry._replace(tile_rows=length, tile_columns=length, cell_rows=length, cell_columns=length)


def _best_cell(
    memory: Memory,
    c_unit: tuple[int, int],
    largest: _Grid,
    search: Callable[..., _Grid | None],
    most_workers: int,
) -> tuple[int, int] | None:
    """Sides of the largest cells with which any number of workers up to ``most_workers`` gets tiles nearly as good as
    with any cells.

    Cells are whole stored pieces of C, with a third to a sixth of the largest tile's sides or a share of C's; square
    where C is symmetric, so that each lies on the diagonal, above or below it, whatever tile it is in. None
    where no tile made of cells fits into memory, given the workspace for copying cells that are not aligned.
    """
    sides: list[set[int]] = []
    m, n = memory.sides
    for tile, side, unit in zip((largest.rows, largest.columns), (m, n), c_unit, strict=True):
        unit = min(unit, side)
        pieces = ceil_div(tile, unit)
        counts = {max(1, pieces // parts) for parts in (3, 4, 5, 6)} | {ceil_div(pieces, 3)}
        if ceil_div(m, largest.rows) * ceil_div(n, largest.columns) > FEW_TO_COMPARE:
            counts = {min(counts, key=lambda count: (pieces % count, -count))}
        else:
            shares = {ceil_div(ceil_div(side, unit), grid) for grid in GRIDS_TO_SUIT}
            counts |= {count for count in shares if count <= pieces}
        sides.append({count * unit for count in counts})

    cells = [(rows, columns) for rows in sorted(sides[0]) for columns in sorted(sides[1])]
    if memory.symmetric:
        cells = [(rows, columns) for rows, columns in cells if rows == columns]
    if len(cells) == 1:
        return cells[0] if search(cells[0], 1) is not None else None
    costs = dict.fromkeys(cells, 0.0)
    workers = 1
    while workers <= min(most_workers, MOST_WORKERS_TO_COMPARE):
        found = {cell: search(cell, workers) for cell in cells}
        least = min((grid.cost for grid in found.values() if grid is not None), default=math.inf)
        if least == math.inf:
            return None
        for cell, grid in found.items():
            more = math.inf if grid is None else grid.cost / max(1.0, least)
            costs[cell] += more / math.sqrt(workers)  # most runs have few workers: they count for more
        workers *= 2
    enough = CELL_COST * min(costs.values())
    if enough == math.inf:
        return None
    return max(
        (cell for cell, cost in costs.items() if cost <= enough), key=lambda cell: (min(cell), max(cell))
    )


class _Grid(NamedTuple):
    """Sides of tiles, how many are computed, parts that k is cut into, and their cost, to compare grids for the same
    number of wanted tasks."""

    rows: int
    columns: int
    tiles: int
    k_parts: int
    cost: float


class _Side(NamedTuple):
    """A side of C that is cut into tiles, of whole units each."""

    length: int
    unit: int
    units: int

    @classmethod
    def of(cls, length: int, unit: int) -> _Side:
        unit = min(unit, length)
        return cls(length, unit, ceil_div(length, unit))

    def tile(self, parts: int) -> int:
        """The length of a tile where the units are shared by so many."""
        return min(ceil_div(self.units, parts) * self.unit, self.length)

    def cuts(self, first: int) -> Iterator[int]:
        """From ``first`` on, the numbers of parts to try: the first of each length of a tile, and not all lengths of
        which hundreds are about the same (`SIDES_APART`)."""
        parts = first
        while parts <= self.units:
            yield parts
            each = ceil_div(self.units, parts)
            if each == 1:
                return
            shorter = ceil_div(self.units, each - 1)
            parts = max(shorter, parts + parts // SIDES_APART) if each > SIDES_APART else shorter


def _search_grid(
    a: StoredMatrix,
    b: StoredMatrix,
    memory: Memory,
    nbytes: int,
    unit: tuple[int, int],
    wanted: int,
    *,
    k_parts: int | None = None,
    for_workers: bool = False,
) -> _Grid | None:
    """Sides of tiles, in whole units, and parts of k unless given, that read least and make at least ``wanted`` tasks,
    where that is possible.

    The cost is the bytes read, times how much longer rounds of ``wanted`` tasks take than C divided evenly. With
    ``for_workers`` it is more where some of ``wanted`` workers would get no task, whose arithmetic is missed however
    fast the storage is. Parts of k read nothing twice, but their sums are written and read once more (`SUM_COST`): they
    pay where C is small and k is long.

    The time it takes does not grow with the number of tiles: of long sides only those that `_Side.cuts` gives are
    compared, and of these only those that could read less than what was found first.
    """
    m, n, k = a.rows, b.columns, a.columns
    side_m, side_n = _Side.of(m, unit[0]), _Side.of(n, unit[1])
    item_a, item_b = memory.items[:2]
    item_c = memory.items[2] * memory.fused.sums
    panel_count = ceil_div(k, memory.depth)
    a_nbytes, b_nbytes = m * k * item_a, n * k * item_b
    a_line, b_line = a.touched(1, memory.depth) * item_a, b.touched(0, memory.depth) * item_b
    alone = memory if memory.sides == (m, n) else replace(memory, sides=(m, n))
    best: tuple[float, int, int, int] | None = None
    found: _Grid | None = None

    def fewest_columns(grid_rows: int) -> int:
        """Lower bound on the columns that so many rows of tiles leave memory for; 0: they leave none."""
        most = memory.most_columns(side_m.tile(grid_rows), nbytes, 1)
        return 0 if most < side_n.unit else 1 if most >= n else ceil_div(side_n.units, most // side_n.unit)

    def least_read(grid_rows: int) -> tuple[int, int]:
        """Bytes of A, and of B, that so many rows of tiles read at least: the more rows, the less of A."""
        columns = side_n.tile(fewest_columns(grid_rows))
        return a_nbytes * ceil_div(n, columns), b_nbytes * ceil_div(m, side_m.tile(grid_rows))

    def compare(grid_rows: int) -> None:
        """Compare the best so far with tiles in so many rows."""
        nonlocal best, found
        if best is not None and sum(least_read(grid_rows)) > best[0]:
            return
        rows = side_m.tile(grid_rows)
        actual_rows = ceil_div(m, rows)

        def fits(grid_columns: int) -> bool:
            return memory.nbytes(rows, side_n.tile(grid_columns), 1) <= nbytes

        first = fewest_columns(grid_rows)
        if not fits(first):  # because of padding or workspace: narrower tiles take less
            first = _first(fits, first, side_n.units)
        last = math.inf
        for grid_columns in side_n.cuts(first):
            if grid_columns > last:
                break  # narrower tiles only read more
            columns = side_n.tile(grid_columns)
            actual_columns = ceil_div(n, columns)
            read = a_nbytes * actual_columns + b_nbytes * actual_rows
            if best is not None and read > best[0]:
                break  # narrower tiles read even more of A
            if not fits(grid_columns):
                continue
            count = actual_rows * actual_columns
            if count >= wanted:
                last = min(last, grid_columns + wanted + 1)
            row_stride, column_stride = memory.strides(rows, columns)
            more_a = a_line * a.touched(0, row_stride) - a_nbytes
            more_b = b_line * b.touched(1, column_stride) - b_nbytes
            worth = read // SPLIT_NBYTES // count
            paying = max(1, min(ceil_div(wanted, count), panel_count, worth))
            for parts in {1, paying} if k_parts is None else {k_parts}:
                tasks = count * parts
                longer = round_up(tasks, wanted) * rows * columns / (m * n) / parts
                if for_workers:
                    longer *= max(1.0, wanted / tasks)
                sums = SUM_COST * 2 * parts * m * n * item_c if parts > 1 else 0
                all_read = read + sums
                # A CPU multiplies for so long that decoding once instead of twice is not worth fewer tiles, or idle
                # workers.
                if (
                    (more_a or more_b)
                    and not memory.limits.on_host
                    and (best is None or all_read * longer <= best[0])
                ):
                    geometry = Geometry(rows, columns, memory.depth, parts, rows, columns)
                    held = hold(alone, geometry, panel_count, 1)
                    all_read += more_a * held.a_reads + more_b * held.b_reads_of_all // actual_columns
                cost = (all_read * longer, tasks, abs(rows - columns), rows)
                if best is None or cost < best:
                    best, found = cost, _Grid(rows, columns, count, parts, cost[0])

    def more_of_b(grid_rows: int) -> bool:
        of_a, of_b = least_read(grid_rows)
        return of_b >= of_a

    def little_of_a(grid_rows: int) -> bool:
        return best is None or least_read(grid_rows)[0] + b_nbytes <= best[0]

    if wanted == 1 and memory.nbytes(m, n, 1) <= nbytes:
        compare(1)  # a C that fits whole: a single tile reads A and B once
        return found
    highest = _first(lambda grid_rows: fewest_columns(grid_rows) > 0, 1, side_m.units)
    if highest > side_m.units:
        return None
    # What reads about as much of A as of B is compared first: most of the rest is then known to read more.
    compare(min(_first(more_of_b, highest, side_m.units), side_m.units))
    for grid_rows in side_m.cuts(_first(little_of_a, highest, side_m.units)):
        least_of_b = b_nbytes * ceil_div(m, side_m.tile(grid_rows))
        if best is not None and a_nbytes + least_of_b > best[0]:
            break  # lower tiles read more of B
        compare(grid_rows)
    return found


def _search_square(
    a: StoredMatrix,
    b: StoredMatrix,
    memory: Memory,
    nbytes: int,
    unit: tuple[int, int],
    wanted: int,
    *,
    k_parts: int | None = None,
    for_workers: bool = False,
) -> _Grid | None:
    """The same for a symmetric C: the side of square tiles, in whole units (which are square too), and parts of k.

    So many rows of tiles read all of A as often: each block of it once with every block, and once for the diagonal.
    """
    n, k = a.rows, a.columns
    side = _Side.of(n, unit[0])
    panel_count = ceil_div(k, memory.depth)
    best: tuple[float, int] | None = None
    found: _Grid | None = None

    def fits(parts: int) -> bool:
        return memory.nbytes(side.tile(parts), side.tile(parts), 1) <= nbytes

    last = math.inf
    for cut in side.cuts(_first(fits, 1, side.units)):
        if cut > last:
            break  # smaller tiles only read more
        tile = side.tile(cut)
        grid = ceil_div(n, tile)
        read = a.nbytes * grid
        if best is not None and read > best[0]:
            break
        if not fits(cut):
            continue
        count, area = triangle_count(grid), triangle_area(n, tile)
        if count >= wanted:
            last = min(last, cut + wanted + 1)
        stride = min(memory.strides(tile, tile))
        more = (
            a.touched(0, stride) * a.touched(1, memory.depth) * memory.items[0] - a.nbytes
            if not memory.limits.on_host  # as in `_search_grid`
            else 0
        )
        paying = max(1, min(ceil_div(wanted, count), panel_count, read // SPLIT_NBYTES // count))
        for parts in {1, paying} if k_parts is None else {k_parts}:
            tasks = count * parts
            longer = round_up(tasks, wanted) * tile * tile / area / parts
            if for_workers:
                longer *= max(1.0, wanted / tasks)
            sums = SUM_COST * 2 * parts * area * memory.items[2] * memory.fused.sums if parts > 1 else 0
            cost = ((read + sums + more * grid) * longer, tasks)
            if best is None or cost < best:
                best, found = cost, _Grid(tile, tile, count, parts, cost[0])
    return found


def _first(is_true: Callable[[int], bool], low: int, high: int) -> int:
    """The first number from ``low`` to ``high`` for which this is true, as it is for all after it; else the one after
    ``high``. It is expected near ``low``."""
    reach = 1
    while low + reach <= high and not is_true(low + reach):
        reach *= 2
    stop = min(low + reach, high) + 1
    while low < stop:
        middle = (low + stop) // 2
        low, stop = (low, middle) if is_true(middle) else (middle + 1, stop)
    return low
