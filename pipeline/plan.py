"""The plan of a matrix product: from numbers alone to tiles, panels, bytes and peaks. No I/O, no clock, no device.

One task owns one tile of C, walks k panel by panel, and writes the tile once. The planner picks the sides of the
tiles and the depth of the panels; the executor only walks what it picked.

How much has to be read at all: with M elements of fast memory, a product must move at least 2mnk/sqrt(M) elements
(Kwasniewski et al., "Red-Blue Pebbling Revisited", SC 2019). Tiles of tm × tn read mnk(1/tm + 1/tn), which meets
the bound when they are square and fill the memory; hence "as large as fits".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tilewright.kernels.launch import ceil_div
from tilewright.kernels.memory import format_nbytes as format_nbytes
from tilewright.pipeline.errors import PlanError, ShapeError
from tilewright.pipeline.events import counted

PANEL_BUFFERS = 2
"""Panels of A and of B that a worker holds at least: one being multiplied while the next is filled."""

TILE_BUFFERS = 4
"""Tiles of C that a GPU holds at most: one being multiplied and the others in writing, so that no thread waits for the
last piece of a tile."""

TILE_OPERATIONS = 2**34
"""Less work than this is not cut from a small product for a tile of its own: a tenth of a second on a few cores."""

FEW_TO_COMPARE = 64
"""Tiles, up to which it matters how whole cells fill them: several sides of cells are tried."""

CELL_COST = 1.04
"""Reading so much more is worth larger cells: kernels are slow on small ones."""

FEW_TILES = 4
"""Where memory cuts C into so many tiles, more of them are not worth what would be read for them."""

SPLIT_NBYTES = 32 * 2**20
"""k is cut for several tasks only if each of them still reads this much: less is done before it is shared out."""

SUM_COST = 4
"""A byte of a sum over a part of k that is written, or read again, takes as long as so many bytes of A or B: it goes
through the interpreter and over the wire (two workers on two GPUs: 2.3 GB/s each, and 20 of their inputs)."""

LANE_NBYTES = 8 * 2**20
"""Pinned memory through which one thread of a GPU worker moves its parts of panels or of a finished tile."""

CODER_NBYTES = 5 * 2**20
"""What a thread of a GPU worker needs to decode, or to encode, block by block: Zstandard's tables and window, as its
default level has them, and a megabyte of what is stored. Encoders of higher levels need more: see
``Limits.encoders_nbytes``."""

PROCESS_NBYTES = 448 * 2**20
"""Host memory that a worker's process holds besides buffers: the interpreter and its libraries. On two cores that
multiply, 90 MiB are taken for floats and 210 with Numba's loops, for integers or the check. The rest is for what a plan
does not count: BLAS's buffers by the core, what malloc keeps, and chunks that the check decodes."""

CUDA_NBYTES = 192 * 2**20
"""What a GPU's context and the compiler of its kernels add to that."""

LINE_NBYTES = 128
"""Where tiles are cut into cells, every cell of a panel on a GPU begins its lines at multiples of this. Kernels look at
addresses modulo as much, and add up in another order where lines are not aligned: so they find every cell alike,
wherever in a tile it lies."""

HOST_DEPTH = 1024
"""Panels so deep, or half as deep as a tile is wide, are enough for a CPU: what it then takes to add them to the tile
is a twentieth of multiplying them, and deeper ones only take memory."""

LEAST_PART_NBYTES = 4096
"""A plain chunk is read in stretches of a row of at least this length: a page, and what a disk gives at once."""

MOST_CHUNK_MISMATCH = 8
"""When the k-chunks of A and B first meet only after more than this many of the longer ones, stop insisting."""


@dataclass(frozen=True)
class StoredMatrix:
    """One stored matrix as the planner sees it, with op applied: a transposed operand has its sides swapped."""

    rows: int
    columns: int
    dtype: np.dtype
    unit: tuple[int, int]
    """Rows × columns of what is read, or written, as one piece: a chunk for reading, a shard for writing."""
    plain: bool = False
    """Whether a part of a chunk can be read without the rest of it: there is nothing to decode."""

    @property
    def transposed(self) -> StoredMatrix:
        return replace(self, rows=self.columns, columns=self.rows, unit=self.unit[::-1])

    def step(self, axis: int) -> int:
        """The least stretch along an axis that is read without waste."""
        side = self.unit[axis]
        while self.plain and side % 2 == 0 and side // 2 * self.dtype.itemsize >= LEAST_PART_NBYTES:
            side //= 2
        return side

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * self.dtype.itemsize

    @property
    def unit_nbytes(self) -> int:
        return self.unit[0] * self.unit[1] * self.dtype.itemsize


def no_workspace(rows: int, columns: int, depth: int) -> int:
    """What a kernel borrows that multiplies from its operands alone."""
    return 0


@dataclass(frozen=True)
class Limits:
    """What a plan has to keep to, for each worker."""

    workers: int
    device_nbytes: int
    """Memory for tiles and panels: the GPU's, or the host's where the CPU multiplies."""
    host_nbytes: int | None = None
    """All the host memory that a worker's process may hold; None: not bounded."""
    on_host: bool = False
    """Whether the CPU multiplies, so that panels are not staged in a second memory."""
    panel_nbytes: int = 2**29
    """The size that a panel of A and one of B are aimed at together; of elements above four bytes, as many of them."""
    tile_buffers: int = TILE_BUFFERS
    """Tiles of C that a worker holds at most; one where it could not write and multiply at once."""
    tiles: int = 16
    """About how many tiles C is cut into, so that one is written while the next is computed, and workers share."""
    read_threads: int = 12
    write_threads: int = 8
    lanes: int | None = None
    """How many of these threads work at once, on a GPU; None: all."""
    encoders_nbytes: int = 0
    """Bytes that encoders take up where so many threads write, besides pieces of C: tables and windows, by the level of
    C's codec."""
    workspace_nbytes: Callable[[int, int, int], int] = no_workspace
    """Bytes that the kernel borrows to add a panel of this depth into a tile, or cell, of these rows and columns."""
    line_nbytes: int = 1
    """What the lines of cells begin at multiples of in memory, so that a kernel finds all cells alike: `LINE_NBYTES` on
    a GPU. A CPU's library looks at no addresses."""


class Geometry(NamedTuple):
    """What decides the bytes of every tile of a product, and where it lies."""

    tile_rows: int
    tile_columns: int
    panel_depth: int
    k_parts: int
    cell_rows: int
    cell_columns: int


class Lines(NamedTuple):
    """How the lines of a panel, or of a tile, lie in memory; counted in elements."""

    cell: int
    """Elements of a line that lie side by side."""
    unit: int
    """What such stretches, and the lines, begin at multiples of."""

    def place(self, element: int) -> int:
        """Where an element of a line lies behind the line's first."""
        whole, rest = divmod(element, self.cell)
        return whole * self.pitch(self.cell) + rest

    def pitch(self, length: int) -> int:
        """From one line of this length to the next."""
        whole, rest = divmod(length, self.cell)
        return (whole * ceil_div(self.cell, self.unit) + ceil_div(rest, self.unit)) * self.unit

    @property
    def apart(self) -> bool:
        """Whether something lies between one cell of a line and the next."""
        return self.cell % self.unit != 0

    def stretches(self, start: int, stop: int) -> list[tuple[int, int]]:
        """A part of a line, cut so that the elements of each piece lie side by side."""
        if not self.apart:
            return [(start, stop)]
        cuts = [start, *range(ceil_div(start + 1, self.cell) * self.cell, stop, self.cell), stop]
        return list(itertools.pairwise(cuts))


class Layout(NamedTuple):
    """How the panels and tiles of a product lie in memory.

    They are stored as the matrices are in Zarr, so lines of a transposed operand run across. Lines are side by side, as
    are the cells of a line, but on a GPU where their operand, or C, is cut into cells: see `LINE_NBYTES`.
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
class MatmulPlan:
    """Tiles, panels, bytes and peaks of C = op(A) op(B), with A m × k and B k × n after op."""

    m: int
    n: int
    k: int
    a_dtype: str
    b_dtype: str
    c_dtype: str
    transpose_a: bool
    transpose_b: bool
    workers: int
    on_host: bool
    tile_rows: int
    tile_columns: int
    panel_depth: int
    k_parts: int
    """Stretches that k is cut into for different tasks, whose sums are added in order: 1 unless C is small."""
    cell_rows: int
    """Rows of C that are multiplied by one call of a kernel, which rounds by the sides that it is given: a tile's, or,
    where tiles follow the workers, those of a part of it that does not."""
    cell_columns: int
    c_buffers: int
    """Tiles of C that a worker holds: two where memory allows, so that one is written meanwhile, and on a GPU more of
    what is left over."""
    c_unit: tuple[int, int]
    line_nbytes: int
    """What the lines of cells begin at multiples of, where tiles are cut into them."""
    a_buffers: int
    """Panels of A that a GPU holds: all of a row of tiles where memory is left over, so that they are read once."""
    b_buffers: int
    """Panels of B that a GPU holds: those of whole columns of tiles, after A's."""
    device_limit_nbytes: int
    device_peak_nbytes: int
    """Projected peak of tiles, panels and the kernel's workspace of one worker, in the memory that multiplies."""
    host_peak_nbytes: int
    """Projected peak of one worker's process: staging, decoding, and the process itself."""
    read_threads: int
    """Threads of one worker that read and decode chunks."""
    write_threads: int
    """Threads of one worker that encode and write chunks."""
    lanes: int
    """How many of these threads work at once on a GPU, each with pinned memory of its own."""
    read_nbytes: int
    """The most bytes of A and B that are read, as they are once decoded: what tiles take in, less what a GPU still
    holds of the tiles before, however the tiles fall to the workers."""
    decoded_nbytes: int
    """The same counted in whole chunks: more than ``read_nbytes`` where chunks do not line up with tiles."""
    write_nbytes: int
    bound_nbytes: int
    """The least that any schedule could read with the same memory: 2mnk/sqrt(M), or A and B once if that is more."""
    operations: int
    """Multiplications and additions: 2mnk."""

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles along m and along n."""
        return ceil_div(self.m, self.tile_rows), ceil_div(self.n, self.tile_columns)

    @property
    def geometry(self) -> Geometry:
        """What a run that goes on with this one's tiles has to keep."""
        return Geometry(
            self.tile_rows,
            self.tile_columns,
            self.panel_depth,
            self.k_parts,
            self.cell_rows,
            self.cell_columns,
        )

    @property
    def layout(self) -> Layout:
        """How panels and tiles lie in memory."""
        dtypes = np.dtype(self.a_dtype), np.dtype(self.b_dtype), accumulator_dtype(np.dtype(self.c_dtype))
        return Layout(
            depth=self.panel_depth,
            cell=(self.cell_rows, self.cell_columns),
            cut=(self.cell_rows < self.m, self.cell_columns < self.n),
            transposed=(self.transpose_a, self.transpose_b),
            items=(dtypes[0].itemsize, dtypes[1].itemsize, dtypes[2].itemsize),
            line_nbytes=self.line_nbytes,
        )

    @property
    def tile_count(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def panel_count(self) -> int:
        return ceil_div(self.k, self.panel_depth)

    @property
    def read_ratio(self) -> float:
        """How far above the lower bound the plan reads; 1.0 is the bound."""
        return self.read_nbytes / self.bound_nbytes if self.bound_nbytes else 1.0

    def tile_read_nbytes(self, tile: Tile) -> int:
        """Bytes of A and B that one tile takes in, read for it or held already."""
        a, b = np.dtype(self.a_dtype).itemsize, np.dtype(self.b_dtype).itemsize
        return self.k * (tile.rows * a + tile.columns * b)

    def tiles(self) -> Iterator[Tile]:
        """Every tile once, row by row, every second row backwards: neighbours in time share a row or a column."""
        grid_rows, grid_columns = self.grid
        for index in range(grid_rows * grid_columns):
            i, j = divmod(index, grid_columns)
            if i % 2:
                j = grid_columns - 1 - j
            row, column = i * self.tile_rows, j * self.tile_columns
            yield Tile(
                index,
                i,
                j,
                row,
                min(row + self.tile_rows, self.m),
                column,
                min(column + self.tile_columns, self.n),
            )

    def cells(self, rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
        """The cells of a tile of so many rows and columns, by their places in it."""
        for row in range(0, rows, self.cell_rows):
            for column in range(0, columns, self.cell_columns):
                yield (
                    slice(row, min(row + self.cell_rows, rows)),
                    slice(column, min(column + self.cell_columns, columns)),
                )

    def panels(self, part: int = 0) -> Iterator[tuple[int, int]]:
        """Every stretch of k in a part once, in the one order that every worker keeps."""
        first, stop = (self.panel_count * place // self.k_parts for place in (part, part + 1))
        for start in range(first * self.panel_depth, min(stop * self.panel_depth, self.k), self.panel_depth):
            yield start, min(start + self.panel_depth, self.k)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "c_unit": list(self.c_unit),
            "grid": list(self.grid),
            "tile_count": self.tile_count,
            "panel_count": self.panel_count,
            "read_ratio": self.read_ratio,
        }

    def __str__(self) -> str:
        lines = [f"{name:<16}{text}" for name, text in self.table()]
        return "\n".join(lines)

    def table(self) -> list[tuple[str, str]]:
        """The plan as rows of a name and a text, for people."""
        left = f"{self.m} × {self.k} {self.a_dtype}" + (" (stored transposed)" if self.transpose_a else "")
        right = f"{self.k} × {self.n} {self.b_dtype}" + (" (stored transposed)" if self.transpose_b else "")
        memory = "host" if self.on_host else "device"
        waste = self.decoded_nbytes / self.read_nbytes - 1 if self.read_nbytes else 0.0
        rows = [
            ("product", f"{left}  by  {right}  =  {self.m} × {self.n} {self.c_dtype}"),
            ("operations", f"{self.operations:.3e}"),
            (
                "tiles",
                (
                    f"{self.grid[0]} × {self.grid[1]} of {self.tile_rows} × {self.tile_columns}"
                    f" for {counted(self.workers, 'worker')}"
                    + (
                        f", multiplied in cells of {self.cell_rows} × {self.cell_columns}"
                        if (self.cell_rows, self.cell_columns) != (self.tile_rows, self.tile_columns)
                        else ""
                    )
                ),
            ),
            (
                "panels",
                f"{self.panel_count} of depth {self.panel_depth}"
                + (f", shared by {self.k_parts} tasks a tile" if self.k_parts > 1 else ""),
            ),
            (
                f"{memory} memory",
                f"{format_nbytes(self.device_peak_nbytes)} of {format_nbytes(self.device_limit_nbytes)} a worker"
                + (
                    f", with {self.a_buffers} panels of A and {self.b_buffers} of B"
                    if max(self.a_buffers, self.b_buffers) > PANEL_BUFFERS
                    else ""
                ),
            ),
            (
                "process memory",
                (
                    f"{format_nbytes(self.host_peak_nbytes)} a worker, with {counted(self.read_threads, 'thread')} for"
                    f" reading and {self.write_threads} for writing"
                    + (
                        f", {self.lanes} of them at once"
                        if self.lanes < self.read_threads + self.write_threads
                        else ""
                    )
                ),
            ),
            (
                "reads",
                (
                    f"{format_nbytes(self.read_nbytes)}, {self.read_ratio:.2f} × the lower bound of"
                    f" {format_nbytes(self.bound_nbytes)} for this memory"
                ),
            ),
            ("writes", format_nbytes(self.write_nbytes)),
        ]
        if waste > 0.005:
            rows.append(
                (
                    "chunks",
                    (
                        f"do not line up: {format_nbytes(self.decoded_nbytes)} are decoded for"
                        f" {format_nbytes(self.read_nbytes)} used (+{waste:.0%});"
                        " chunk A along k as B is chunked along k, or raise the device memory"
                    ),
                )
            )
        return rows


def accumulator_dtype(c_dtype: np.dtype) -> np.dtype:
    """The dtype in which a tile's panels are added up: float16 would be rounded again with every panel."""
    return np.dtype(np.float32) if c_dtype == np.float16 else c_dtype


def plan_matmul(
    a: StoredMatrix,
    b: StoredMatrix,
    c_dtype: np.dtype,
    c_unit: tuple[int, int],
    limits: Limits,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    keep: Geometry | None = None,
) -> MatmulPlan:
    """Choose tiles and panels for C = A B, where ``a`` and ``b`` are as they stand after op.

    The depth of the panels depends on the matrices, their chunks and the memory, never on the number of workers:
    the sums of every element are then cut at the same places however many workers share the tiles.
    ``keep`` is the geometry of an earlier run: taken if it fits into memory and its tiles are whole stored pieces of C.

    Raises
    ------
    ShapeError
        The inner sides differ.
    PlanError
        Not even the smallest tile fits; the message says how much memory it needs.
    """
    if a.columns != b.rows:
        raise ShapeError(
            f"inner sides differ: op(A) is {a.rows} × {a.columns} and op(B) is {b.rows} × {b.columns};"
            f" the columns of op(A) must equal the rows of op(B)"
        )
    m, n, k = a.rows, b.columns, a.columns
    if keep and any(
        length < side and length % unit
        for lengths in (keep[:2], keep[4:])
        for length, side, unit in zip(lengths, (m, n), c_unit, strict=True)
    ):
        keep = None  # two tasks would write the same stored piece, or one lie in two cells
    items = a.dtype.itemsize, b.dtype.itemsize, accumulator_dtype(c_dtype).itemsize
    transposed = transpose_a, transpose_b
    depth = keep.panel_depth if keep else _panel_depth(a, b, items, transposed, c_unit, limits)
    memory = _Memory(
        (m, n),
        items,
        depth,
        transposed,
        limits,
        (keep.cell_rows, keep.cell_columns) if keep else None,
    )
    if keep and memory.nbytes(keep.tile_rows, keep.tile_columns, 1) > limits.device_nbytes:
        return plan_matmul(a, b, c_dtype, c_unit, limits, transpose_a=transpose_a, transpose_b=transpose_b)
    panel_count = ceil_div(k, depth)
    exact = c_dtype.kind in "iub"
    best = keep or _best_geometry(m, n, k, c_unit, memory, limits, exact=exact)
    if best is None:
        needed = memory.nbytes(min(c_unit[0], m), min(c_unit[1], n), 1)
        fitting = fitting_unit(a, b, c_dtype, c_unit, limits, transposed)
        which = f": {fitting[0]} × {fitting[1]} and smaller ones fit" if fitting else ""
        raise PlanError(
            f"no tile fits into {format_nbytes(limits.device_nbytes)} of {'host' if limits.on_host else 'device'}"
            f" memory: the smallest, {min(c_unit[0], m)} × {min(c_unit[1], n)} (one stored piece of C) with panels"
            f" of depth {depth}, needs {format_nbytes(needed)} ({needed} bytes); raise --device-memory"
            f"{' (unset, it follows the memory limit of the workers)' if limits.on_host else ''}, or let C be an open"
            f" zarr.Array of smaller chunks (from Python){which}"
        )
    tile_rows, tile_columns, _, k_parts, cell_rows, cell_columns = best
    memory = replace(memory, cell=(cell_rows, cell_columns))
    c_buffers = min(limits.tile_buffers, 2)
    if memory.nbytes(tile_rows, tile_columns, c_buffers) > limits.device_nbytes:
        c_buffers = 1
    grid_rows, grid_columns = ceil_div(m, tile_rows), ceil_div(n, tile_columns)
    item_a, item_b, item_c = a.dtype.itemsize, b.dtype.itemsize, c_dtype.itemsize
    panel_a, panel_b, tile_nbytes = memory.nbytes_of_each(tile_rows, tile_columns)
    left = limits.device_nbytes - memory.nbytes(tile_rows, tile_columns, c_buffers)
    if limits.on_host or k_parts > 1:
        left = 0  # the page cache holds what the host read; parts of k have no panel in common
    held = _hold((grid_rows, grid_columns), panel_count, k_parts, limits.workers, left, (panel_a, panel_b))
    # B's columns are wide or narrow, and are read more often or less: counted one by one.
    edges = [(start, min(start + tile_columns, n)) for start in range(0, n, tile_columns)]
    columns = sum(reads * (stop - start) for (start, stop), reads in zip(edges, held.b_reads, strict=True))
    # Where cells lie apart in a line, each is read by itself.
    layout = memory.layout(tile_rows, tile_columns)
    a_step = cell_rows if transpose_a and layout.a().apart else tile_rows
    b_step = cell_columns if not transpose_b and layout.b().apart else tile_columns
    touched = sum(
        reads * _touched(cut, min(cut + b_step, stop), n, b.step(1))
        for (start, stop), reads in zip(edges, held.b_reads, strict=True)
        for cut in range(start, stop, b_step)
    )
    read = m * k * item_a * held.a_reads + k * columns * item_b
    decoded = (
        _span_touched(m, a_step, a.step(0)) * _span_touched(k, depth, a.step(1)) * item_a * held.a_reads
        + _span_touched(k, depth, b.step(0)) * touched * item_b
    )
    device_peak = memory.nbytes(tile_rows, tile_columns, c_buffers) if m and n else 0
    device_peak += (held.a_buffers - PANEL_BUFFERS) * panel_a + (held.b_buffers - PANEL_BUFFERS) * panel_b
    if device_peak and not limits.on_host and k_parts == 1:
        each = ceil_div(grid_rows * grid_columns, limits.workers)  # tiles of a worker
        more = min(limits.tile_buffers, each) - c_buffers
        more = max(0, min(more, (limits.device_nbytes - device_peak) // tile_nbytes))
        c_buffers, device_peak = c_buffers + more, device_peak + more * tile_nbytes
    threads = limits.read_threads + limits.write_threads
    lanes = threads if limits.lanes is None else min(limits.lanes, threads)
    # Through a codec, each thread holds one stored piece as it came and as it was decoded or gathered. A decoder in
    # place of those takes less: of its window, however large, it fills no more than it decodes.
    pieces = [max((op.unit_nbytes for op in (a, b) if not op.plain), default=0)] * limits.read_threads
    pieces += [min(c_unit[0], m) * min(c_unit[1], n) * item_c] * limits.write_threads
    coding = 2 * sum(sorted(pieces, reverse=True)[:lanes])
    sums = (k_parts + 1) * tile_rows * tile_columns * items[2] if k_parts > 1 else 0
    coding += max(0, limits.encoders_nbytes - (0 if limits.on_host else limits.write_threads * CODER_NBYTES))
    fixed = PROCESS_NBYTES + (0 if limits.on_host else CUDA_NBYTES)
    host_peak = (
        fixed + coding + sums + (device_peak if limits.on_host else lanes * (LANE_NBYTES + CODER_NBYTES))
    )
    if limits.host_nbytes is not None and host_peak > limits.host_nbytes:
        raise PlanError(
            f"the plan needs {format_nbytes(host_peak)} of host memory for each worker, {format_nbytes(fixed)} of it"
            f" for the process itself, and {format_nbytes(limits.host_nbytes)} are allowed; give the workers more"
            " memory, or, where they have more than the process needs, lower the device memory or use fewer threads"
            f" (tilewright.read-threads, now {limits.read_threads}; write-threads, now {limits.write_threads})"
        )
    bound = _lower_bound(m, n, k, limits.device_nbytes, a, b)
    return MatmulPlan(
        m=m,
        n=n,
        k=k,
        a_dtype=a.dtype.name,
        b_dtype=b.dtype.name,
        c_dtype=c_dtype.name,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        workers=limits.workers,
        on_host=limits.on_host,
        tile_rows=tile_rows,
        tile_columns=tile_columns,
        panel_depth=depth,
        k_parts=k_parts,
        cell_rows=cell_rows,
        cell_columns=cell_columns,
        c_buffers=c_buffers,
        c_unit=c_unit,
        line_nbytes=limits.line_nbytes,
        a_buffers=held.a_buffers,
        b_buffers=held.b_buffers,
        device_limit_nbytes=limits.device_nbytes,
        device_peak_nbytes=device_peak,
        host_peak_nbytes=host_peak,
        read_threads=limits.read_threads,
        write_threads=limits.write_threads,
        lanes=lanes,
        read_nbytes=read,
        decoded_nbytes=decoded if m and n else 0,
        write_nbytes=m * n * item_c,
        bound_nbytes=min(bound, read),
        operations=2 * m * n * k,
    )


def fitting_unit(
    a: StoredMatrix,
    b: StoredMatrix,
    c_dtype: np.dtype,
    c_unit: tuple[int, int],
    limits: Limits,
    transposed: tuple[bool, bool],
) -> tuple[int, int] | None:
    """Sides of a stored piece of C, halved as often as it takes for a tile of one to fit, with panels as shallow as can
    be; None: none fits."""
    items = a.dtype.itemsize, b.dtype.itemsize, accumulator_dtype(c_dtype).itemsize
    memory = _Memory((a.rows, b.columns), items, 1, transposed, limits)
    rows, columns = max(1, min(c_unit[0], a.rows)), max(1, min(c_unit[1], b.columns))
    while memory.nbytes(rows, columns, 1) > limits.device_nbytes:
        if rows == columns == 1:
            return None
        rows, columns = (ceil_div(rows, 2), columns) if rows >= columns else (rows, ceil_div(columns, 2))
    return rows, columns


@dataclass(frozen=True)
class _Memory:
    """Bytes that tiles and panels take, from the sides of C and the depth of a panel."""

    sides: tuple[int, int]
    items: tuple[int, int, int]
    """Bytes of an element of A, of B, and of a tile of C while it is added up: more than what is stored, maybe."""
    depth: int
    transposed: tuple[bool, bool]
    limits: Limits
    cell: tuple[int, int] | None = None
    """Sides of the cells that tiles are multiplied in; None: those of the tile."""

    def layout(self, rows: int, columns: int) -> Layout:
        """How the panels of a tile of these sides lie, and it."""
        cell_rows, cell_columns = self.cell or (rows, columns)
        return Layout(
            depth=self.depth,
            cell=(cell_rows, cell_columns),
            cut=(cell_rows < self.sides[0], cell_columns < self.sides[1]),
            transposed=self.transposed,
            items=self.items,
            line_nbytes=self.limits.line_nbytes,
        )

    def nbytes_of_each(self, rows: int, columns: int) -> tuple[int, int, int]:
        """Bytes of a panel of A, one of B, and a tile of these sides."""
        layout = self.layout(rows, columns)
        return (
            layout.a_size(rows, self.depth) * self.items[0],
            layout.b_size(columns, self.depth) * self.items[1],
            layout.c_size(rows, columns) * self.items[2],
        )

    def nbytes(self, rows: int, columns: int, c_buffers: int) -> int:
        panel_a, panel_b, tile = self.nbytes_of_each(rows, columns)
        borrowed = self.limits.workspace_nbytes(rows, columns, self.depth)
        if self.cell is not None:
            # Of an aligned tile nothing may have to be copied, and still something of its cells.
            cell_rows, cell_columns = min(self.cell[0], rows), min(self.cell[1], columns)
            borrowed = max(borrowed, self.limits.workspace_nbytes(cell_rows, cell_columns, self.depth))
        return PANEL_BUFFERS * (panel_a + panel_b) + c_buffers * tile + borrowed

    def most_columns(self, rows: int, nbytes: int, c_buffers: int) -> int:
        """No wider tile of ``rows`` rows fits into ``nbytes``; 0 where none does. More may be wanted for aligned lines,
        and for the workspace."""
        item_a, item_b, item_c = self.items
        left = nbytes - PANEL_BUFFERS * self.depth * rows * item_a
        each = PANEL_BUFFERS * self.depth * item_b + c_buffers * rows * item_c
        return max(0, left // each)


def _panel_depth(
    a: StoredMatrix,
    b: StoredMatrix,
    items: tuple[int, int, int],
    transposed: tuple[bool, bool],
    c_unit: tuple[int, int],
    limits: Limits,
) -> int:
    """The depth of a panel: whole k-chunks of both operands, near the size aimed at, within memory."""
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
    # About the side of a tile: what half the memory would hold, or what cuts C into as many tiles as wanted, where
    # memory holds some of those. Then there is more to hold than panels, and they are smaller.
    held = math.isqrt(max(1, limits.device_nbytes // (2 * items[2])))
    wanted = math.isqrt(max(1, a.rows * b.columns // limits.tiles))
    short = held * held <= 2 * wanted * wanted
    side = held if short else wanted
    # No tile is smaller than a stored piece of C: where C is small, k is cut instead.
    rows = max(1, min(max(side, c_unit[0]), a.rows))
    columns = max(1, min(max(side, c_unit[1]), b.columns))
    row_nbytes = rows * items[0] + columns * items[1]
    # Four GPUs that share panels of float64 or int64 take a tenth less time where these are as deep as float32's.
    wanted_nbytes = limits.panel_nbytes * max(*items[:2], 4) // 4
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
    # A chunk deeper than the memory can hold is read in parts rather than refused.
    smallest = max(1, min(c_unit[0], a.rows)), max(1, min(c_unit[1], b.columns))  # C may be empty
    while depth > 1:
        memory = _Memory((a.rows, b.columns), items, depth, transposed, limits)
        if memory.nbytes(*smallest, 1) <= limits.device_nbytes:
            break
        depth = ceil_div(depth, 2)
    return min(depth, k)


def _best_geometry(
    m: int, n: int, k: int, c_unit: tuple[int, int], memory: _Memory, limits: Limits, *, exact: bool
) -> Geometry | None:
    """Sides of the tiles, the parts that k is cut into, and sides of the cells; None: nothing fits.

    The parts of k are the same for any number of workers up to ``limits.tiles``, and where memory is plenty so is the
    grid. Where memory alone cuts C into many tiles the grid follows the workers: one for any of them would make one
    worker alone read more (one for 16, a fifth). Its tiles are whole cells, and those are the same for any workers, so
    that C is the same to the last bit. Sums that are ``exact`` are anyway.
    """
    if m == 0 or n == 0:
        return Geometry(max(1, m), max(1, n), memory.depth, 1, max(1, m), max(1, n))
    panel_count = ceil_div(k, memory.depth)
    search = partial(_search_grid, m, n, memory, limits.device_nbytes, panel_count)
    least = search(c_unit, 1)
    if least is None:
        return None
    tiles = max(1, min(limits.tiles, 2 * m * n * k // TILE_OPERATIONS))
    few_workers = limits.workers <= limits.tiles
    best = search(c_unit, tiles if few_workers else max(tiles, limits.workers))
    few = min(FEW_TILES, max(2, ceil_div(tiles, 2)))
    if limits.on_host and best is not None and best.k_parts == 1 and best.tile_count(m, n) >= tiles:
        few = tiles  # a CPU multiplies for so long that reading less is not worth tiles that take four times the memory
    cut_by_memory = least.tile_count(m, n) >= few
    cell = None
    if cut_by_memory and best is not None:
        # The grid follows the workers, but not the parts of k, whose sums are rounded one by one.
        k_parts = best.k_parts if few_workers else None

        def in_cells(cell: tuple[int, int], wanted: int) -> _Grid | None:
            held = replace(memory, cell=cell)
            return _search_grid(m, n, held, limits.device_nbytes, panel_count, cell, wanted, k_parts=k_parts)

        if exact:
            best = search(c_unit, limits.workers, k_parts=k_parts)
        elif cell := _best_cell(m, n, c_unit, least, in_cells):
            best = in_cells(cell, limits.workers)
    if best is None:
        return None
    cell = cell or (best.rows, best.columns)
    cell_rows, cell_columns = min(cell[0], best.rows), min(cell[1], best.columns)
    return Geometry(best.rows, best.columns, memory.depth, best.k_parts, cell_rows, cell_columns)


def _best_cell(
    m: int, n: int, c_unit: tuple[int, int], largest: _Grid, search: Callable[..., _Grid | None]
) -> tuple[int, int] | None:
    """Sides of cells of which one, two and four workers can make tiles that are nearly as good as any.

    They are whole stored pieces of C, and a third to a sixth of the side that the largest tile has. None where memory
    holds no tile of them, for what a kernel borrows to copy cells that are not aligned.
    """
    sides: list[set[int]] = []
    for tile, side, unit in zip((largest.rows, largest.columns), (m, n), c_unit, strict=True):
        unit = min(unit, side)
        pieces = ceil_div(tile, unit)
        counts = {max(1, pieces // parts) for parts in (3, 4, 5, 6)} | {ceil_div(pieces, 3)}
        if ceil_div(m, largest.rows) * ceil_div(n, largest.columns) > FEW_TO_COMPARE:
            counts = {min(counts, key=lambda count: (pieces % count, -count))}
        sides.append({count * unit for count in counts})

    costs: dict[tuple[int, int], float] = {}
    for cell in itertools.product(sorted(sides[0]), sorted(sides[1])):
        grids = [search((cell[0], cell[1]), workers) for workers in (1, 2, 4)]
        costs[cell[0], cell[1]] = sum(math.inf if grid is None else grid.cost for grid in grids)
    least = min(costs.values())
    if least == math.inf:
        return None
    enough = CELL_COST * least
    return max(
        (cell for cell, cost in costs.items() if cost <= enough), key=lambda cell: (min(cell), max(cell))
    )


class _Grid(NamedTuple):
    """Sides of tiles, parts that k is cut into, and what that costs beside other grids for as many tasks."""

    rows: int
    columns: int
    k_parts: int
    cost: float

    def tile_count(self, m: int, n: int) -> int:
        """How many tiles a C of these sides is cut into."""
        return ceil_div(m, self.rows) * ceil_div(n, self.columns)


def _search_grid(
    m: int,
    n: int,
    memory: _Memory,
    nbytes: int,
    panel_count: int,
    unit: tuple[int, int],
    wanted: int,
    *,
    k_parts: int | None = None,
) -> _Grid | None:
    """Sides of tiles, whole units each, and parts of k unless those are given, that make at least ``wanted`` tasks
    where they can, and read least.

    What is read counts as often as rounds of ``wanted`` tasks take longer than C shared out evenly. Parts of k
    read nothing twice, but their sums are written and read once more (`SUM_COST`): they pay where C is small and k is
    long.
    """
    unit_rows, unit_columns = min(unit[0], m), min(unit[1], n)
    row_units, column_units = ceil_div(m, unit_rows), ceil_div(n, unit_columns)
    item_a, item_b, item_c = memory.items
    best: tuple[float, int, int, int] | None = None
    found: _Grid | None = None
    seen = 0
    for grid_rows in range(1, row_units + 1):
        rows = ceil_div(row_units, grid_rows) * unit_rows
        if rows == seen:
            continue  # rounding up to whole units gave the same tile again
        seen = rows
        rows = min(rows, m)
        actual_rows = ceil_div(m, rows)
        most = memory.most_columns(rows, nbytes, 1)
        if most < unit_columns:
            continue
        fewest = ceil_div(column_units, most // unit_columns) if most < n else 1
        enough = 0
        for grid_columns in range(fewest, column_units + 1):
            columns = min(ceil_div(column_units, grid_columns) * unit_columns, n)
            if memory.nbytes(rows, columns, 1) > nbytes:
                continue
            actual_columns = ceil_div(n, columns)
            count = actual_rows * actual_columns
            read = m * item_a * actual_columns + n * item_b * actual_rows  # for each element of k
            k = panel_count * memory.depth
            worth = read * k // SPLIT_NBYTES // count
            paying = max(1, min(ceil_div(wanted, count), panel_count, worth))
            for parts in {1, paying} if k_parts is None else {k_parts}:
                tasks = count * parts
                longer = ceil_div(tasks, wanted) * wanted * rows * columns / (m * n) / parts
                sums = SUM_COST * 2 * parts * m * n * item_c if parts > 1 else 0
                cost = ((read * k + sums) * longer, tasks, abs(rows - columns), rows)
                if best is None or cost < best:
                    best, found = cost, _Grid(rows, columns, parts, cost[0])
            enough += count >= wanted
            if enough > wanted + 1:
                break  # narrower tiles only read more
    return found


@dataclass(frozen=True)
class _Held:
    """Panels that a GPU keeps while it can use them again, and what is read all the same."""

    a_buffers: int
    b_buffers: int
    a_reads: int
    """How often all of A is read at most."""
    b_reads: tuple[int, ...]
    """The same for each column of tiles of B."""


def _hold(
    grid: tuple[int, int],
    panel_count: int,
    k_parts: int,
    workers: int,
    left: int,
    panel_nbytes: tuple[int, int],
) -> _Held:
    """What ``left`` bytes of memory hold beyond two panels of each operand, of so many bytes each.

    Tiles are walked row by row and every second row backwards, and what was used longest ago gives way. So the
    panels of a row of A are read once for the row if all of them fit; they come first, since each byte of them
    saves most. The columns of B that fit are those at which the walk turns round. A worker among several walks a share
    of the tiles in the same way, and at the end what others would come to last: what it holds whole it reads at most
    once, of the rest nothing is promised.
    """
    rows, columns = grid
    if 0 in grid or panel_count == 0:
        return _Held(PANEL_BUFFERS, PANEL_BUFFERS, columns, (rows,) * columns)
    panel_a, panel_b = panel_nbytes
    a_buffers = b_buffers = PANEL_BUFFERS
    if columns > 1 and panel_count * panel_a <= left:
        a_buffers += panel_count
        left -= panel_count * panel_a
    if rows > 1:
        b_buffers += min(columns, left // (panel_count * panel_b)) * panel_count
        if (columns * panel_count - PANEL_BUFFERS) * panel_b <= left:  # then no panel needs another's place
            b_buffers = max(PANEL_BUFFERS, columns * panel_count)
    if k_parts > 1:
        return _Held(a_buffers, b_buffers, columns, (rows,) * columns)
    a_reads = min(columns, workers) if a_buffers >= panel_count else columns
    kept = min(columns, b_buffers // panel_count)
    if kept == columns:
        b_reads = (min(rows, workers),) * columns
    elif workers > 1:
        b_reads = (rows,) * columns
    else:
        last, first = rows // 2, (rows - 1) // 2  # turns at the end of the columns, and at their beginning
        b_reads = tuple(
            rows - last * (column >= columns - kept) - first * (column < kept) for column in range(columns)
        )
    return _Held(a_buffers, b_buffers, a_reads, b_reads)


def _lower_bound(m: int, n: int, k: int, nbytes: int, a: StoredMatrix, b: StoredMatrix) -> int:
    """Bytes that any schedule must read with this memory: 2mnk/sqrt(M) less what C needs, and A and B once."""
    itemsize = max(a.dtype.itemsize, b.dtype.itemsize)
    elements = max(1, nbytes // itemsize)
    return max(int(2 * m * n * k / math.sqrt(elements)) * itemsize, a.nbytes + b.nbytes)


def _touched(start: int, stop: int, side: int, unit: int) -> int:
    """Elements of the whole stored units that a stretch of a side meets."""
    return min(ceil_div(stop, unit) * unit, side) - start // unit * unit


def _span_touched(side: int, step: int, unit: int) -> int:
    """The same for all of a side that is cut into steps: a unit across a cut is met twice."""
    return sum(_touched(start, min(start + step, side), side, unit) for start in range(0, side, step))
