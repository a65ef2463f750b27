"""The plan of a matrix product: from numbers alone to tiles, panels, bytes and peaks. No I/O, no clock, no device.

One task owns one tile of C, walks k panel by panel, and writes the tile once. `tiling.py` picks the sides of the tiles
and the depth of the panels; this module counts bytes and peaks, and the executor only walks the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np

from tilewright.kernels.numbers import ceil_div, counted, format_nbytes
from tilewright.pipeline.errors import PlanError, ShapeError
from tilewright.pipeline.plan.band import Band
from tilewright.pipeline.plan.band_tiling import band_geometry, finer_band_geometry
from tilewright.pipeline.plan.decoding import DecodingRoom
from tilewright.pipeline.plan.grid import Tile, TileGrid, band_operations, square_unit
from tilewright.pipeline.plan.inputs import (
    NO_FUSED_NBYTES,
    FusedDtypes,
    FusedNbytes,
    Geometry,
    Limits,
    Recipe,
    StoredMatrix,
    accumulator_dtype,
)
from tilewright.pipeline.plan.memory import (
    PANEL_BUFFERS,
    Layout,
    Memory,
    hold,
    k_tasks,
    part_cuts,
    read_requests,
    reads,
    sums_held,
    sums_under_way,
)
from tilewright.pipeline.plan.tiling import best_geometry, finer_geometry, panel_depth
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES

CODER_NBYTES = 5 * 2**20
"""What a thread of a GPU worker needs to decode or encode block by block: Zstandard's tables and window at its default
level, and a megabyte of stored data. Encoders of higher levels need more: see ``Limits.encoders_nbytes``."""

PROCESS_NBYTES = 448 * 2**20
"""Host memory of a worker's process besides its buffers: the interpreter and its libraries. Measured while two cores
multiply: 90 MiB for floats, 210 with Numba's loops (integers, or the check). The rest is a margin for what a plan does
not count: BLAS's buffers for each core, memory that malloc keeps, and chunks that the check decodes."""

BARE_PROCESS_NBYTES = 210 * 2**20
"""What of that is always there, without the margin."""

CUDA_NBYTES = 192 * 2**20
"""What a GPU's context and the kernel compiler add to that."""

MOST_TILES = 10**7
"""The most tiles of a run. The process that hands them out lists them all, at half a kilobyte each, and as much again
where it goes on with a record of finished ones: 10 GB with so many."""

COPIES = "inputs that are copied or computed first, such as what is added up"
"""What lies in memory that workers share, in words."""


@dataclass(frozen=True)
class MatmulPlan:
    """Tiles, panels, bytes and peaks of C = op(A) op(B), with A m × k and B k × n after op.

    Where C is symmetric, the tiles are those on and below the diagonal, and each is also stored as its mirror image.
    """

    m: int
    n: int
    k: int
    a_dtype: str
    b_dtype: str
    c_dtype: str
    transpose_a: bool
    transpose_b: bool
    symmetric: bool
    """Whether op(B) is the transpose of op(A), of the same array."""
    workers: int
    on_host: bool
    tile_rows: int
    tile_columns: int
    panel_depth: int
    k_parts: int
    """Parts that k is cut into, each summed by itself; their sums are added in order. 1 unless C is small."""
    k_tasks: int
    """Tasks that a tile's parts of k are shared by: one each, or 1 that sums all of them, one after the other."""
    cell_rows: int
    """Rows of C that one kernel call multiplies. Rounding depends on the sides a kernel is given, so these are the
    tile's only where tiles do not depend on the number of workers; else a tile is made of cells that do not."""
    cell_columns: int
    c_buffers: int
    """Tiles of C that a worker holds: two where memory allows, so that one is written while the next is computed; on a
    GPU, more where memory is left over."""
    c_unit: tuple[int, int]
    line_nbytes: int
    """Alignment of the lines of cells, where tiles are cut into cells."""
    a_buffers: int
    """Panels of A that a GPU holds: where memory is left over those of a row of tiles, read once; else a few."""
    b_buffers: int
    """Panels of B that a GPU holds: those of whole columns of tiles, in what memory A's panels leave, or else a few. 0
    where C is symmetric and A's panels serve as B's, or nothing of B is needed."""
    device_limit_nbytes: int
    device_peak_nbytes: int
    """Projected peak of a worker's tiles, panels and kernel workspace, in memory of the device that multiplies."""
    host_peak_nbytes: int
    """Projected peak of one worker's process: staging, decoding and the process itself; or the check of C, if that is
    more."""
    read_threads: int
    """Threads of one worker that read and decode chunks."""
    write_threads: int
    """Threads of one worker that encode and write chunks."""
    lanes: int
    """Pinned lanes: how many of these threads can work at once on a GPU."""
    read_nbytes: int
    """Upper bound on the bytes of A and B that are read, counted after decoding: what tiles take in, less what a GPU
    still holds from earlier tiles, whichever workers the tiles fall to."""
    decoded_nbytes: int
    """The same, counted in whole chunks: more than ``read_nbytes`` where chunks do not line up with tiles."""
    write_nbytes: int
    bound_nbytes: int
    """What ``read_nbytes`` is compared with: 2mnk/sqrt(M), where one worker's memory has room for M elements; A and B
    once if that is more; at most ``read_nbytes``. 2mnk/sqrt(M) is the leading term of what any schedule must read. The
    terms left out matter where much of A and B stays in memory, hence the cap. Where C is symmetric, that term is
    n²k/sqrt(2M) (Beaumont et al., "I/O-Optimal Algorithms for Symmetric Linear Algebra Kernels", SPAA 2022), and A is
    counted once. Of a tile of several sums, each has its share of M."""
    operations: int
    """Multiplications and additions: 2mnk; n(n+1)k where C is symmetric, those of its elements on and below the
    diagonal; as often as a tile has sums."""
    within: tuple[tuple[int, int], ...] = ()
    """Sides of the larger tiles of earlier runs that these tiles are cut from, as ``Geometry.within``."""
    sum_dtype: str = ""
    """What the products of a tile are summed in; empty: what follows from C's dtype alone (`sums`)."""
    operand_dtypes: tuple[str, str] = ("", "")
    """What panels of A, and of B, are multiplied as once they are transformed; empty: as they are stored."""
    before_dtype: str = ""
    """Of what C held before, where that is added to it; else empty."""
    finished: bool = False
    """Whether the sums have an epilogue."""
    hermitian: bool = False
    """Where C is symmetric: whether its mirror image is its conjugate."""
    accumulators: int = 1
    """How many sums a tile is made of: more than one where each element is formed of the pairs of numbers that are both
    there. All of them are added up from the same panels; together they are one of ``c_buffers``."""
    window: tuple[int, int] | None = None
    """Where only a band of C is wanted: how many columns before its diagonal, and behind it. Tiles are those that touch
    it, and of them the stored pieces that do (`band.py`)."""
    read_requests: int = 0
    """About how many requests reading A and B takes of object stores that they lie in."""
    ahead_nbytes: int = 0
    """Those of ``device_peak_nbytes`` that could be done without: of panels ahead of those that are multiplied."""
    beside_nbytes: int = 0
    """Of what is stored beside each element of C: the number of its pairs."""
    as_bytes: bool = False
    """Whether a CPU with the instructions multiplies panels as bytes (`centred.py`)."""
    copies_nbytes: int = 0
    """Of inputs that lie in memory which all workers of a host share, beside what each of them holds: copies of arrays
    in memory, and what dask computes, such as axes that are added up."""
    decoding: DecodingRoom | None = None
    """What of each GPU's memory is set aside so that it decodes chunks itself; None: the cores decode them all."""
    decoded_by: str = ""
    """What decodes encoded inputs where C is made on GPUs, for people; empty: nothing is encoded."""

    @property
    def band(self) -> Band | None:
        """``window``, to reckon with."""
        return None if self.window is None else Band(*self.window)

    @property
    def sums(self) -> np.dtype:
        """What the products of a tile are summed in."""
        return np.dtype(self.sum_dtype) if self.sum_dtype else self.stored

    @property
    def stored(self) -> np.dtype:
        """What a tile holds when it is stored: C's dtype, or float32, which is then rounded to float16."""
        return accumulator_dtype(np.dtype(self.c_dtype))

    @property
    def operands(self) -> tuple[np.dtype, np.dtype]:
        """What is multiplied, of A and of B."""
        a, b = self.operand_dtypes
        return np.dtype(a or self.a_dtype), np.dtype(b or self.b_dtype)

    @cached_property
    def tile_grid(self) -> TileGrid:
        """How C is cut into tiles."""
        return TileGrid.of((self.m, self.n), self.geometry, symmetric=self.symmetric, band=self.band)

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Tiles along m and along n."""
        return self.tile_grid.shape

    @cached_property
    def part_starts(self) -> frozenset[int]:
        """Where along k one task begins another sum, to be added to those before it."""
        if self.k_tasks == self.k_parts:
            return frozenset()
        return frozenset(
            start * self.panel_depth for start in part_cuts(self.panel_count, self.k_parts)[1:-1]
        )

    @property
    def sums_under_way(self) -> int:
        """Where tasks share parts of k: how many tiles the workers compute and add up at a time."""
        return sums_under_way(self.k_tasks, self.workers)

    @cached_property
    def geometry(self) -> Geometry:
        """What a later run must keep in order to resume with this run's tiles."""
        return Geometry(
            self.tile_rows,
            self.tile_columns,
            self.panel_depth,
            self.k_parts,
            self.cell_rows,
            self.cell_columns,
            self.within,
        )

    @property
    def recipe(self) -> Recipe:
        """What decides the bits of its tiles."""
        return Recipe(self.panel_depth, self.k_parts, self.cell_rows, self.cell_columns, self.on_host)

    @cached_property
    def layout(self) -> Layout:
        """How panels, as they are stored, and tiles, as they are summed, lie in memory."""
        return self._layout(np.dtype(self.a_dtype), np.dtype(self.b_dtype), self.sums)

    @property
    def fused_layout(self) -> Layout:
        """How panels that are transformed, and tiles that are finished, lie in memory."""
        return self._layout(*self.operands, self.stored)

    @property
    def before_layout(self) -> Layout:
        """How a tile of what C held before lies in memory."""
        return self._layout(*self.operands, np.dtype(self.before_dtype or self.c_dtype))

    def _layout(self, a: np.dtype, b: np.dtype, c: np.dtype) -> Layout:
        return Layout.of(
            (self.m, self.n),
            (self.cell_rows, self.cell_columns),
            self.panel_depth,
            (self.transpose_a, self.transpose_b),
            (a.itemsize, b.itemsize, c.itemsize),
            self.line_nbytes,
        )

    @property
    def c_dtype_reason(self) -> str:
        """One line: C's dtype, and why it is that; empty where A or B holds floats, or is made floats."""
        from tilewright.pipeline.plan.sums import dtype_reason  # words, which only those who show a plan need

        c, a, b = map(np.dtype, (self.c_dtype, self.a_dtype, self.b_dtype))
        plain = not any(self.operand_dtypes) and self.sums == self.stored
        return dtype_reason(c, a, b, self.k, finished=self.finished) if plain else ""

    @cached_property
    def tile_count(self) -> int:
        return self.tile_grid.count

    @property
    def panel_count(self) -> int:
        return ceil_div(self.k, self.panel_depth)

    @property
    def read_ratio(self) -> float:
        """How far above ``bound_nbytes`` the plan reads; 1.0 where it reads no more."""
        return self.read_nbytes / self.bound_nbytes if self.bound_nbytes else 1.0

    def tile_read_nbytes(self, tile: Tile) -> int:
        """Bytes of A and B that one tile needs, whether read for it or already held."""
        a, b = np.dtype(self.a_dtype).itemsize, np.dtype(self.b_dtype).itemsize
        return self.k * (tile.rows * a + (0 if self.on_diagonal(tile) else tile.columns * b))

    def tile_write_nbytes(self, tile: Tile) -> int:
        """Bytes of C, and of what is stored beside it, before they are encoded, that one tile gives."""
        area = tile.rows * tile.columns if self.band is None else self.band.area(tile.region, self.c_unit)
        return len(self.regions(tile)) * area * self.stored_itemsize

    @property
    def stored_itemsize(self) -> int:
        """Of an element of C, with what is stored beside it."""
        return np.dtype(self.c_dtype).itemsize + self.beside_nbytes

    def tile_operations(self, tile: Tile) -> int:
        """One tile's share of ``operations``."""
        rows = tile.rows + 1 if self.on_diagonal(tile) else 2 * tile.rows
        return rows * tile.columns * self.k * self.accumulators

    @property
    def shares_panels(self) -> bool:
        """Whether a panel of A serves as one of B too, which is the same array."""
        return self.symmetric and self.b_buffers == 0

    def on_diagonal(self, tile: Tile) -> bool:
        """Whether C is symmetric and the tile is its own mirror image."""
        return self.symmetric and tile.i == tile.j

    def regions(self, tile: Tile) -> list[tuple[slice, slice]]:
        """The rows and columns of C that one tile gives: its own, and in a symmetric C those of its mirror image."""
        return self.tile_grid.regions(tile)

    def tiles(self) -> Iterator[Tile]:
        """Every tile once, in the order of work."""
        return self.tile_grid.tiles()

    def looks(self, tile: Tile) -> tuple[bool, bool]:
        """Whether this tile looks at its panels of A, and at those of B, for all the tiles that multiply them; nobody
        looks at B where it is A.

        The first column, and row, of tiles lies in that of any larger tiles they are cut from. So where finished larger
        tiles are kept, what these have looked at is not looked at again, and the rest is. Of a band's tiles, which are
        squares, those on the diagonal look, and behind the end of C's shorter side the last of each row, or column.
        """
        if self.window is not None:
            rows, columns = (count - 1 for count in self.grid)
            return tile.j == min(tile.i, columns), tile.i == min(tile.j, rows) and not self.symmetric
        return tile.j == 0, tile.i == 0 and not self.symmetric

    def cells(self, rows: int, columns: int, slab: slice | None = None) -> Iterator[tuple[slice, slice]]:
        """The cells of a tile of this size, as positions within it; or what of them lies in a slab of its rows."""
        first, stop = (0, rows) if slab is None else (slab.start, slab.stop)
        for row in range(first - first % self.cell_rows, stop, self.cell_rows):
            part = slice(max(row, first), min(row + self.cell_rows, stop))
            for column in range(0, columns, self.cell_columns):
                yield part, slice(column, min(column + self.cell_columns, columns))

    def panels(self, part: int = 0) -> Iterator[tuple[int, int]]:
        """Every panel's range of k in the part of one task, in the order that all workers keep."""
        first, stop = part_cuts(self.panel_count, self.k_tasks)[part : part + 2]
        for start in range(first * self.panel_depth, min(stop * self.panel_depth, self.k), self.panel_depth):
            yield start, min(start + self.panel_depth, self.k)

    def _epilogue(self) -> str:
        """A few words on what is made of the sums."""
        if self.accumulators > 1:
            return f"of {self.accumulators} sums a tile in {self.sums}, over the pairs that are both there"
        return f"of sums in {self.sums}" + (
            f", added to what C held before, {self.before_dtype}" if self.before_dtype else ""
        )

    def _band_text(self) -> str:
        """A few words on the band."""
        assert self.window is not None, "what this is asked of"
        before, after = self.window
        share = self.write_nbytes / (self.m * self.n * self.stored_itemsize or 1)
        return (
            f"{before} columns before the diagonal to {after} behind it; what lies outside is 0, {share:.1%} of C is"
            " stored"
        )

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {
            "c_dtype_reason": self.c_dtype_reason,
            "c_unit": list(self.c_unit),
            "sum_dtype": self.sums.name,
            "operand_dtypes": [operand.name for operand in self.operands],
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
        left, right = (
            f"{rows} × {columns} {stored}"
            + (" (stored transposed)" if transposed else "")
            + (f", transformed to {operand}," if operand else "")
            for rows, columns, stored, transposed, operand in (
                (self.m, self.k, self.a_dtype, self.transpose_a, self.operand_dtypes[0]),
                (self.k, self.n, self.b_dtype, self.transpose_b, self.operand_dtypes[1]),
            )
        )
        waste = self.decoded_nbytes / self.read_nbytes - 1 if self.read_nbytes else 0.0
        idle = self.workers - self.tile_count * self.k_tasks
        least = "n²k/√(2M), and A" if self.symmetric else "2mnk/√M, and A and B"
        rows = [
            (
                "product",
                f"{left}  by  {right}  =  {self.m} × {self.n} {self.c_dtype}"
                + (", Hermitian" if self.hermitian else ", symmetric") * self.symmetric,
            ),
            *([("band", self._band_text())] if self.window is not None else []),
            *([("epilogue", self._epilogue())] if self.finished else []),
            *([("dtype of C", self.c_dtype_reason)] if self.c_dtype_reason else []),
            ("operations", f"{self.operations:.3e}"),
            (
                "tiles",
                (
                    f"{self.grid[0]} × {self.grid[1]} of {self.tile_rows} × {self.tile_columns}"
                    + (
                        f", the {self.tile_count} on and below the diagonal computed and mirrored,"
                        if self.symmetric and self.tile_count > 1
                        else ""
                    )
                    + (
                        f", cut from an earlier run's of {self.within[-1][0]} × {self.within[-1][1]},"
                        if self.within
                        else ""
                    )
                    + f" for {counted(self.workers, 'worker')}"
                    + (f", {idle} of which get no tile" if idle > 0 else "")
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
                + (f", shared by {self.k_tasks} tasks a tile" if self.k_tasks > 1 else "")
                + (f", in {self.k_parts} sums a tile" if self.part_starts else ""),
            ),
            (
                "device memory",
                f"{format_nbytes(self.device_peak_nbytes)} of {format_nbytes(self.device_limit_nbytes)} a worker"
                + (
                    f", with {self.a_buffers} panels of A"
                    + f" and {self.b_buffers} of B" * (self.b_buffers > 0)
                    if max(self.a_buffers, self.b_buffers) > PANEL_BUFFERS
                    else ""
                ),
            ),
            (
                "host memory",
                (
                    f"{format_nbytes(self.host_peak_nbytes)} a worker{', the device memory included' * self.on_host},"
                    f" with {counted(self.read_threads, 'thread')} for reading and {self.write_threads} for writing"
                    + (
                        f", {self.lanes} of them at once"
                        if self.lanes < self.read_threads + self.write_threads
                        else ""
                    )
                ),
            ),
            *(
                [
                    (
                        "shared memory",
                        f"{format_nbytes(self.copies_nbytes)} more, once for all workers: {COPIES}",
                    )
                ]
                if self.copies_nbytes
                else []
            ),
            (
                "reads",
                (
                    f"{format_nbytes(self.read_nbytes)}, {self.read_ratio:.2f} × the lower bound of"
                    f" {format_nbytes(self.bound_nbytes)} ({least} once at least)"
                ),
            ),
            *([("decoding", self.decoded_by)] if self.decoded_by else []),
            *([("requests", f"about {self.read_requests}, for chunks")] if self.read_requests else []),
            ("writes", format_nbytes(self.write_nbytes)),
        ]
        if waste > 0.005:
            # More memory changes nothing where memory is idle.
            cut_by_memory = 2 * (self.device_peak_nbytes - self.ahead_nbytes) > self.device_limit_nbytes
            other = (
                "raise the device memory" if cut_by_memory else "cut C into fewer tiles (tilewright.tiles)"
            )
            rows.append(
                (
                    "chunks",
                    (
                        f"do not line up: {format_nbytes(self.decoded_nbytes)} are decoded for"
                        f" {format_nbytes(self.read_nbytes)} used (+{waste:.0%});"
                        f" chunk A along k as B is, where they differ, or both finer, or {other}"
                    ),
                )
            )
        return rows


def plan_tiles(
    a: StoredMatrix,
    b: StoredMatrix,
    c_dtype: np.dtype,
    c_unit: tuple[int, int],
    limits: Limits,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    symmetric: bool = False,
    keep: Geometry | None = None,
    fused: FusedDtypes | None = None,
    band: Band | None = None,
) -> MatmulPlan:
    """Choose tiles and panels for C = A B, with ``a`` and ``b`` given after op.

    ``symmetric`` says that B is A transposed, of the same array: then tiles and cells are square, so that the mirror
    image of each is one, and of whole stored pieces of C both ways.

    The depth of the panels depends on the matrices, their chunks and the memory, never on the number of workers, so
    every element's sum is cut at the same places however many workers share the tiles. ``keep`` is the geometry of an
    earlier run: it is used if it fits into memory, else each of its tiles is cut into smaller ones that do. It is
    ignored where its tiles and cells are not whole stored pieces of C.

    ``fused`` is None of a product without transforms and epilogue. ``band`` is what alone is wanted of C, and k is not
    cut then; where C is symmetric, the band is too.

    Raises
    ------
    ShapeError
        The inner sides differ.
    PlanError
        Not even the smallest tile fits, or the workers' host memory is too small, or there are more than `MOST_TILES`
        tiles; the message says how much is needed.
    """
    if a.columns != b.rows:
        raise ShapeError(
            f"inner sides differ: op(A) is {a.rows} × {a.columns} and op(B) is {b.rows} × {b.columns};"
            f" the columns of op(A) must equal the rows of op(B)"
        )
    m, n, k = a.rows, b.columns, a.columns
    square = symmetric or band is not None
    unit = (square_unit(c_unit, max(m, n)),) * 2 if square else c_unit
    if keep and not (_cuts_between(keep, (m, n), unit) and (not square or _is_square(keep, (m, n)))):
        keep = None  # two tasks would write the same stored piece, or a piece would lie in two cells
    sums_dtype = accumulator_dtype(c_dtype) if fused is None else fused.sums
    items = a.dtype.itemsize, b.dtype.itemsize, sums_dtype.itemsize
    more = fused.nbytes(c_dtype) if fused is not None else NO_FUSED_NBYTES
    vectors_nbytes = 0 if fused is None else fused.vectors_nbytes
    aside = 0 if limits.on_host else vectors_nbytes + (limits.decoding.nbytes if limits.decoding else 0)
    limits = replace(limits, device_nbytes=max(0, limits.device_nbytes - aside))
    transposed = transpose_a, transpose_b
    best, cell = keep, (keep.cell_rows, keep.cell_columns) if keep else None
    at_first = keep.panel_depth if keep else 1
    memory = Memory((m, n), items, at_first, transposed, limits, cell, symmetric, more, band)
    if best is None or memory.nbytes(best.tile_rows, best.tile_columns, 1) > limits.device_nbytes:
        depth = panel_depth(
            *_as_deep_for(a, b, unit, band), items, transposed, unit, limits, symmetric=symmetric, fused=more
        )
        memory = replace(memory, depth=depth, cell=None)
        if band is not None:
            best = band_geometry(a, b, unit[0], memory, limits)
            best = finer_band_geometry(unit[0], memory, limits, keep, best) if keep else best
        elif keep:
            best = finer_geometry(a, b, unit, memory, limits, keep)
        else:
            best = best_geometry(a, b, unit, memory, limits, exact=sums_dtype.kind in "iub")
    if best is None:
        fitting = fitting_unit(
            a, b, sums_dtype, unit, limits, transposed, symmetric=symmetric, square=square, fused=more
        )
        raise _no_tile_fits(memory, c_unit, unit, fitting)
    tile_rows, tile_columns, depth, k_parts, cell_rows, cell_columns, within = best
    memory = replace(memory, depth=depth, cell=(cell_rows, cell_columns))
    tile_grid = TileGrid.of((m, n), best, symmetric=symmetric, band=band)
    shared_by = k_tasks(k_parts, limits.workers, on_host=limits.on_host)
    count = tile_grid.count * shared_by
    if count > MOST_TILES:
        raise _too_many_tiles(memory, best, count)
    held = hold(memory, best, ceil_div(k, depth), limits.workers)
    read, decoded = reads(a, b, memory, best, held)
    threads = limits.read_threads + limits.write_threads
    lanes = threads if limits.lanes is None else min(limits.lanes, threads)
    beside = 0 if fused is None else fused.beside_nbytes
    c_unit_nbytes = min(c_unit[0], m) * min(c_unit[1], n) * max(c_dtype.itemsize, beside)
    coding = _coding_nbytes((a, b), c_unit_nbytes, limits, lanes)
    sums = sums_held(k_parts, shared_by, limits.workers) * tile_rows * tile_columns * items[2] * more.sums
    if shared_by > 1:  # of tiles that tasks add up, each is finished into a buffer of its own
        finishing = ceil_div(sums_under_way(shared_by, limits.workers), limits.workers)
        combined = items[2] if more.sums > 1 else 0
        sums += finishing * tile_rows * tile_columns * (more.tile + more.before + combined)
    fixed = PROCESS_NBYTES + (0 if limits.on_host else CUDA_NBYTES)
    fixed += vectors_nbytes
    host_peak = fixed + coding + sums
    host_peak += held.peak_nbytes if limits.on_host else lanes * (LANE_NBYTES + CODER_NBYTES)
    if limits.host_nbytes is not None and host_peak > limits.host_nbytes:
        raise PlanError(
            f"the plan needs {format_nbytes(host_peak)} of host memory for each worker, {format_nbytes(fixed)} of it"
            f" for the process itself, and {format_nbytes(limits.host_nbytes)} are allowed; give the workers more"
            " memory, or, where they have more than the process needs, lower the device memory or use fewer threads"
            f" (tilewright.read-threads, now {limits.read_threads}; write-threads, now {limits.write_threads})"
        )
    # What a worker never gives back while a run lasts; a worker that Dask pauses for it would wait for good.
    lasting = host_peak - (PROCESS_NBYTES - BARE_PROCESS_NBYTES)
    if limits.pause_nbytes is not None and lasting > limits.pause_nbytes:
        raise PlanError(
            f"the plan has each worker hold {format_nbytes(lasting)} of host memory throughout, and Dask gives no more"
            f" tasks to a worker that holds {format_nbytes(limits.pause_nbytes)}; give the workers more memory, lower"
            " the device memory, or raise Dask's distributed.worker.memory.pause on the workers"
        )
    checking = fixed + limits.check_nbytes + (0 if limits.on_host else lanes * LANE_NBYTES)
    if limits.host_nbytes is not None and limits.check_nbytes and checking > limits.host_nbytes:
        raise PlanError(
            f"the check of the product needs {format_nbytes(checking)} of host memory for each worker,"
            f" {format_nbytes(checking - limits.check_nbytes)} of it for the process itself, and"
            f" {format_nbytes(limits.host_nbytes)} are allowed; give the workers more memory or fewer threads, leave"
            " the check out (--no-verify, verify=False), or give it fewer rounds (tilewright.verify-rounds)"
        )
    area = m * n if band is None else band.size((m, n))
    bound = _leading_bound(limits.device_nbytes // more.sums, a, b, area, symmetric=symmetric)
    plan = MatmulPlan(
        m=m,
        n=n,
        k=k,
        a_dtype=a.dtype.name,
        b_dtype=b.dtype.name,
        c_dtype=c_dtype.name,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        symmetric=symmetric,
        workers=limits.workers,
        on_host=limits.on_host,
        tile_rows=tile_rows,
        tile_columns=tile_columns,
        panel_depth=depth,
        k_parts=k_parts,
        k_tasks=shared_by,
        cell_rows=cell_rows,
        cell_columns=cell_columns,
        c_buffers=held.c_buffers,
        c_unit=c_unit,
        line_nbytes=limits.line_nbytes,
        a_buffers=held.a_buffers,
        b_buffers=held.b_buffers,
        device_limit_nbytes=limits.device_nbytes + aside,
        device_peak_nbytes=held.peak_nbytes + aside,
        host_peak_nbytes=max(host_peak, checking),
        read_threads=limits.read_threads,
        write_threads=limits.write_threads,
        lanes=lanes,
        read_nbytes=read,
        decoded_nbytes=decoded,
        write_nbytes=m * n * (c_dtype.itemsize + beside),
        bound_nbytes=min(bound, read),
        operations=(n * (n + 1) * k if symmetric else 2 * m * n * k) * more.sums,
        within=within,
        sum_dtype=sums_dtype.name,
        operand_dtypes=_operand_names(fused),
        before_dtype=fused.before.name if fused is not None and fused.before is not None else "",
        finished=fused is not None and fused.finished,
        as_bytes=more.packed,
        hermitian=fused is not None and fused.hermitian,
        accumulators=more.sums,
        read_requests=read_requests(a, b, best, held) if m and n else 0,
        window=None if band is None else (band.before, band.after),
        ahead_nbytes=held.ahead_nbytes,
        beside_nbytes=beside,
        decoding=limits.decoding,
    )
    if band is None:
        return plan
    return replace(
        plan,
        write_nbytes=band.area((slice(0, m), slice(0, n)), c_unit) * (c_dtype.itemsize + beside),
        operations=band_operations(tile_grid) * k * more.sums,
    )


def _as_deep_for(
    a: StoredMatrix, b: StoredMatrix, unit: tuple[int, int], band: Band | None
) -> tuple[StoredMatrix, StoredMatrix]:
    """The product whose panels are as deep: where a band is wanted, of tiles as large as that is wide."""
    if band is None:
        return a, b
    side = max(unit[0], band.width)
    return replace(a, rows=min(a.rows, side)), replace(b, columns=min(b.columns, side))


def _operand_names(fused: FusedDtypes | None) -> tuple[str, str]:
    a, b = fused.operands if fused is not None else (None, None)
    return "" if a is None else a.name, "" if b is None else b.name


def fitting_unit(
    a: StoredMatrix,
    b: StoredMatrix,
    c_dtype: np.dtype,
    c_unit: tuple[int, int],
    limits: Limits,
    transposed: tuple[bool, bool],
    *,
    symmetric: bool = False,
    square: bool = False,
    fused: FusedNbytes = NO_FUSED_NBYTES,
) -> tuple[int, int] | None:
    """The sides of a stored piece of C, halved until a tile of one such piece fits with panels of depth 1; None if none
    does. Both are halved at once where tiles are ``square``."""
    items = a.dtype.itemsize, b.dtype.itemsize, accumulator_dtype(c_dtype).itemsize
    memory = Memory((a.rows, b.columns), items, 1, transposed, limits, symmetric=symmetric, fused=fused)
    rows, columns = max(1, min(c_unit[0], a.rows)), max(1, min(c_unit[1], b.columns))
    while memory.nbytes(rows, columns, 1) > limits.device_nbytes:
        if rows == columns == 1:
            return None
        if symmetric or square:
            rows, columns = ceil_div(rows, 2), ceil_div(columns, 2)
        else:
            rows, columns = (ceil_div(rows, 2), columns) if rows >= columns else (rows, ceil_div(columns, 2))
    return rows, columns


def _cuts_between(geometry: Geometry, sides: tuple[int, int], c_unit: tuple[int, int]) -> bool:
    """Whether the tiles and cells of a geometry, and the tiles they are cut from, are of whole stored pieces of C."""
    return not any(
        length < side and length % unit
        for lengths in (
            *geometry.within,
            (geometry.tile_rows, geometry.tile_columns),
            (geometry.cell_rows, geometry.cell_columns),
        )
        for length, side, unit in zip(lengths, sides, c_unit, strict=True)
    )


def _is_square(geometry: Geometry, sides: tuple[int, int]) -> bool:
    """Whether tiles and cells are squares, but for those that one side of C is too short for."""
    lengths = *geometry.within, geometry[:2], (geometry.cell_rows, geometry.cell_columns)
    return all(
        rows == columns or (rows == sides[0] < columns) or (columns == sides[1] < rows)
        for rows, columns in lengths
    )


def _no_tile_fits(
    memory: Memory, c_unit: tuple[int, int], unit: tuple[int, int], fitting: tuple[int, int] | None
) -> PlanError:
    """The error that says what the smallest tile, of one ``unit``, needs, and which smaller pieces of C would fit."""
    limits = memory.limits
    rows, columns = (min(part, side) for part, side in zip(unit, memory.sides, strict=True))
    needed = memory.nbytes(rows, columns, 1)
    which = f": {fitting[0]} × {fitting[1]} and smaller ones fit" if fitting else ""
    consists = "one stored piece of C"
    if memory.symmetric and c_unit[0] != c_unit[1]:
        consists = f"square, since C is symmetric, of whole stored pieces of C, {c_unit[0]} × {c_unit[1]}"
    return PlanError(
        f"no tile fits into {format_nbytes(limits.device_nbytes)} of {'host' if limits.on_host else 'device'}"
        f" memory: the smallest, {rows} × {columns} ({consists}) with panels of depth {memory.depth}, needs"
        f" {format_nbytes(needed)} ({needed} bytes); raise --device-memory"
        f"{' (unset, it follows the memory of the workers: --host-memory, in a plan)' if limits.on_host else ''}, or"
        f" store C in smaller chunks (--chunks, and --shards where it has shards){which}"
    )


def _too_many_tiles(memory: Memory, geometry: Geometry, count: int) -> PlanError:
    """The error that says how many tiles, or parts of them, there would be, and what makes them fewer."""
    limits = memory.limits
    rows, columns = geometry.tile_rows, geometry.tile_columns
    if 2 * memory.nbytes(rows, columns, 1) > limits.device_nbytes:
        # A quarter more than in proportion: tiles consist of whole stored pieces of C.
        enough = 5 * limits.device_nbytes * ceil_div(count, MOST_TILES) // 4
        advice = f"raise --device-memory, now {format_nbytes(limits.device_nbytes)}, to about {format_nbytes(enough)}"
    else:
        advice = f"lower tilewright.tiles, now {limits.tiles}, or use fewer workers, now {limits.workers}"
    return PlanError(
        f"C would be cut into {count} tiles of {rows} × {columns}"
        f"{f', in {geometry.k_parts} parts of k each' * (geometry.k_parts > 1)}, and a run can keep track of"
        f" {MOST_TILES} at most; {advice}"
    )


def _coding_nbytes(
    factors: tuple[StoredMatrix, StoredMatrix], c_unit_nbytes: int, limits: Limits, lanes: int
) -> int:
    """Bytes of stored pieces that threads hold while they decode and encode, and what encoders need besides.

    A thread that goes through a codec holds one stored piece twice: encoded, and decoded or gathered. A streaming
    decoder needs less: however large its window, it fills no more than it decodes.
    """
    pieces = [max((op.part_nbytes for op in factors if not op.plain), default=0)] * limits.read_threads
    pieces += [c_unit_nbytes] * limits.write_threads
    coders = 0 if limits.on_host else limits.write_threads * CODER_NBYTES
    return 2 * sum(sorted(pieces, reverse=True)[:lanes]) + max(0, limits.encoders_nbytes - coders)


def _leading_bound(nbytes: int, a: StoredMatrix, b: StoredMatrix, area: int, *, symmetric: bool) -> int:
    """Bytes of 2mnk/sqrt(M) elements of the wider dtype, where M elements fit into ``nbytes``; at least A and B once.
    Where C is symmetric, of n²k/sqrt(2M); at least A once. ``area`` is how many elements of C are wanted, mn or n² of
    all.

    Any schedule must read this much up to terms of lower order, which are left out.
    """
    k = a.columns
    itemsize = max(a.dtype.itemsize, b.dtype.itemsize)
    elements = max(1, nbytes // itemsize)
    if symmetric:
        return max(int(area * k / math.sqrt(2 * elements)) * itemsize, a.nbytes)
    return max(int(2 * area * k / math.sqrt(elements)) * itemsize, a.nbytes + b.nbytes)
