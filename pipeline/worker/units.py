"""What multiplies: the interface that the engine expects of a CPU or a GPU, what both share, and the CPU.

The GPU is in `gpu_unit.py`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Protocol

import numpy as np

from tilewright.kernels import matmul
from tilewright.kernels.cpu import product as host
from tilewright.kernels.gemm.exact.outcomes import noted
from tilewright.kernels.gemm.product import kernel_name, prepare
from tilewright.kernels.gpu.memory import allocating
from tilewright.kernels.passes.contents import NOTHING, Contents, contents_of, overflow_of
from tilewright.kernels.passes.transpose_host import transpose
from tilewright.pipeline.plan.band import Band
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.plan.told import Corners, Found, Product, StoredObject
from tilewright.pipeline.store.content import PartHashes, content_hash
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.region_read import RegionRead, read_targets, region_reads
from tilewright.pipeline.store.region_write import RegionWrite
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES
from tilewright.pipeline.worker.fusion import Fusion, HostFusion, NoFusion, PackedPanel, Region, Scratch
from tilewright.pipeline.worker.panels import PanelPart, Placed

BLOCK_NBYTES = LANE_NBYTES // 2
"""Bytes that a thread moves at once, while the other half of its lane is being sent to the GPU."""

SAVED_NBYTES = 2**20
"""Bytes of a tile that a thread of the CPU looks at and then writes or compresses, before it goes on to the next: they
stay in its core's second-level cache."""


@dataclass(frozen=True)
class Move:
    """What one thread did for a panel or a tile: seconds between store and host, and between host and device."""

    store_seconds: float
    device_seconds: float
    stored: StoredObject | None = None
    """What a thread stored of a tile; None where that is in no file."""


@dataclass(frozen=True)
class Loading:
    """How a region is loaded: calls for many threads at once, then calls for what those could not load."""

    calls: list[Callable[[], Move]]
    rest: Callable[[], list[Callable[[], Move]]] = list
    settle: Callable[[], None] = lambda: None
    """Waits until everything that the calls sent is in place; to be called once they have returned."""
    there: Future[bool] | None = None
    """If others may wait for the region: set to whether the calls loaded everything, as soon as they have ended."""
    hashes: list[tuple[Corners, int]] | None = None
    """To which the calls add each part of the array that they read, and the hash of its numbers; None where
    `DeviceUnit.hashed` is to hash it once it is there."""


class SharedMemory(Protocol):
    """Buffers that other workers of this host can copy from, and access to theirs. Callable from any thread."""

    def export(self, flat: Any) -> bytes:
        """A handle by which others can copy from a buffer. Raises what the driver raises if it refuses."""

    def copy(self, exported: bytes, peer: str, part: PanelPart, panel: Placed) -> None:
        """Fill a part of a panel from another worker's; returns when the bytes have arrived."""

    def close(self, keep: Set[str] = frozenset()) -> None:
        """Close the memory of all other workers except these, once nothing is being copied from it."""


class Look(Protocol):
    """A look at what one job's panels and tile hold; called in this order. Only `at_rows` is called by several threads
    at once."""

    def at_panel(self, operand: int, panel: Placed) -> None:
        """Look at a panel of A (0) or B (1), which is there until `DeviceUnit.passed` says that it is done."""

    def at_tile(self, tile: Placed) -> None:
        """Look at the tile, once all panels are multiplied, unless that is left to those who save it."""

    def at_rows(self, rows: np.ndarray) -> None:
        """Look at rows of the tile, on a thread that saves them, if that was left to those threads."""

    def found(self, times: int = 1) -> Found:
        """What was found; waits for it. times: how often the tile is stored in C."""

    def settle(self) -> None:
        """Wait until nothing is looked at any more, of a job whose findings nobody asks for."""


class DeviceUnit(Protocol):
    """A device that multiplies: its buffers, and the moves between them and the store."""

    shared: SharedMemory | None
    """None where other workers can never copy from here."""
    fusion: Fusion
    """What it does to panels before they are multiplied, and to tiles before they are stored."""

    def attach(self) -> None:
        """Let the calling thread free memory of the device."""

    def allocate(self, size: int, dtype: np.dtype) -> Any:
        """A flat buffer of ``size`` elements."""

    def tile_slots(self) -> list[Any]:
        """Buffers for one tile of C each."""

    def loading(
        self,
        array: StoredArray,
        region: tuple[slice, slice],
        panel: Placed,
        corner: tuple[int, int] = (0, 0),
    ) -> Loading:
        """The loading of ``array[region]`` into a panel, at this row and column."""

    def wait_for_decoders(self) -> None:
        """Wait until all that decodes chunks can: a run does not."""

    def prepare(
        self, a: Placed, b: Placed, tile: Placed, diagonal: bool = False, slabs: Sequence[slice] = ()
    ) -> None:
        """Get ready what multiplies panels like these, which need not have been filled yet. slabs: as well as what
        computes these rows of the tile alone."""

    def prepare_hashes(self, panel: Placed, parts: Sequence[PanelPart]) -> None:
        """Get ready what hashes parts of panels like this one, which need not have been filled yet."""

    def hashed(self, panel: Placed, parts: Sequence[PanelPart]) -> Callable[[], list[int]]:
        """Begin to hash parts of a panel that is there, in none of which a line has a gap; returns what waits for that
        and says each one's `content_hash`. Until then the panel must stay."""

    def multiply(
        self,
        a: Placed,
        b: Placed,
        tile: Placed,
        accumulate: bool,
        diagonal: bool = False,
        slab: slice | None = None,
    ) -> frozenset[str]:
        """Put the product of two panels into a tile, or add it; returns the names of the kernels used. diagonal:
        whether they are of one panel, for a tile on the diagonal of a symmetric C. slab: the only rows of the tile that
        are computed.

        The kernels may still run when this has returned: see `passed`.
        """

    def passed(self) -> Callable[[], None] | None:
        """A function that waits until everything multiplied so far is done; None if it is done already."""

    def clear(self, tile: Placed) -> None: ...

    def look(self, slot: Any) -> Look:
        """A look for the job whose tile is in this slot; one at a time."""

    def mirror(self, tile: Placed, *, swap: bool, square: Region | None = None) -> None:
        """Copy what is below the diagonal of a finished square tile above it; with ``swap``, transpose the tile, or
        this square of it. Done when this returns."""

    def clear_outside(self, tile: Placed, region: tuple[slice, slice], band: Band) -> None:
        """Put 0 for what of a finished tile, which is this region of C, lies outside a band. Done when this returns."""

    def save(self, piece: RegionWrite, tile: Placed, dtype: np.dtype, look: Look | None = None) -> Move:
        """Store one piece of a finished tile; each line of the piece is contiguous in memory. Called by many threads at
        once. look: one that `at_tile` was called of, if the piece is looked at."""

    def close(self) -> None: ...


def tile_slots(plan: MatmulPlan, allocate: Callable[[int, np.dtype], Any]) -> list[Any]:
    dtype = plan.sums
    size = plan.layout.sums_size(plan.tile_rows, plan.tile_columns, plan.accumulators)
    return [allocate(size, dtype) for _ in range(plan.c_buffers)]


def multiply(
    product: Product,
    a: Placed,
    b: Placed,
    tile: Placed,
    accumulate: bool,
    stream: Any,
    diagonal: bool = False,
    slab: slice | None = None,
) -> frozenset[str]:
    """Put the product of two panels into ``tile`` on the GPU, or add it, cell by cell. Returns the names of the kernels
    used, and where the numbers decided what they did, that."""
    options = {**_options(product, tile, accumulate), "device": product.device}
    names: dict[tuple[int, int], str] = {}  # cells of one shape get the same kernel
    decided: set[str] = set()
    for left, right, cell, lower in _cells(product.plan, a, b, tile, diagonal, slab):
        with noted() as outcomes:
            matmul(left, right, out=cell, stream=stream, lower=lower, **options)
        decided.update(outcomes)
        if not outcomes and cell.shape not in names:
            names[cell.shape] = kernel_name(left, right, cell, **options)
    return frozenset(names.values()) | decided


def prepare_job(
    product: Product,
    a: Placed,
    b: Placed,
    tile: Placed,
    stream: Any,
    diagonal: bool = False,
    slabs: Sequence[slice] = (),
) -> None:
    """Compile and load the kernels with which `multiply` multiplies all panels of a tile on the GPU; nothing is
    launched. The first is put there, the others are added, in the end perhaps slab by slab."""
    for accumulate in (False, True):
        options = _options(product, tile, accumulate)
        for slab in (None, *slabs):
            for left, right, cell, lower in _cells(product.plan, a, b, tile, diagonal, slab):
                prepare(left, right, cell, stream=stream, lower=lower, **options)


def _options(product: Product, tile: Placed, accumulate: bool) -> dict[str, Any]:
    return {
        "accumulate": accumulate,
        "transpose_a": product.plan.transpose_a,
        "transpose_b": product.plan.transpose_b,
        "dtype": tile.dtype,
        "precision": product.precision,
    }


def _cells(
    plan: MatmulPlan,
    a: Placed,
    b: Placed,
    tile: Placed,
    diagonal: bool = False,
    slab: slice | None = None,
) -> Iterator[tuple[Any, Any, Any, bool]]:
    """The products that a tile and two panels, or a slab of the tile's rows, are cut into: what of A and of B is
    multiplied, where it goes, and whether only its lower half is wanted, whose mirror image the other one is. Of the
    cells on the diagonal there is all or nothing: all with the slab that their first rows are in."""
    depth = slice(0, a.shape[0] if plan.transpose_a else a.shape[1])
    on_diagonal = plan.symmetric and (diagonal or a.flat is b.flat)
    for rows, columns in plan.cells(*tile.shape, slab):
        lower = False
        if on_diagonal:
            first = rows.start - rows.start % plan.cell_rows
            lower = columns.start == first
            if columns.start > first or (lower and rows.start > first):
                continue  # the mirror image of another cell, or multiplied with its first rows
            if lower:
                rows = slice(first, min(first + plan.cell_rows, tile.shape[0]))
        left = a.cut(*((depth, rows) if plan.transpose_a else (rows, depth)))
        right = b.cut(*((columns, depth) if plan.transpose_b else (depth, columns)))
        yield left, right, tile.cut(rows, columns), lower


def _multiply_thin(a: np.ndarray, b: np.ndarray, out: np.ndarray, options: dict[str, Any]) -> None:
    """Multiply a cell of one row or column. BLAS's order of summation depends on the stride of its operands, which
    depends on the tile that the cell is cut from. Contiguous copies make the result independent of the tile."""
    sums = np.ascontiguousarray(out)
    matmul(np.ascontiguousarray(a), np.ascontiguousarray(b), out=sums, **options)
    if not np.may_share_memory(sums, out):
        out[...] = sums


class HostLook:
    """The CPU looks at what it is given, at once: at a panel on the thread that multiplies, and at a tile on those that
    save it, whose cores have the bytes in their caches then."""

    def __init__(self, product: Product) -> None:
        self._look = product.look
        self._overflow = overflow_of(np.dtype(product.plan.c_dtype))
        self._found: tuple[list[Contents], ...] = ([], [], [])
        """Of each matrix, one piece after the other: lists, to which any thread can append."""

    def at_panel(self, operand: int, panel: Placed) -> None:
        for piece in whole_lines(panel):
            self._found[operand].append(contents_of(panel.cut(*piece), self._look[operand]))

    def at_tile(self, tile: Placed) -> None:
        """Left to those who save it."""

    def at_rows(self, rows: np.ndarray) -> None:
        self._found[2].append(contents_of(rows, self._look[2], self._overflow))

    def found(self, times: int = 1) -> Found:
        a, b, c = (reduce(Contents.merged, pieces, NOTHING) for pieces in self._found)
        return Found(a, b, c.times(times))

    def settle(self) -> None:
        """Nothing to wait for: what is looked at is looked at once."""


def whole_lines(matrix: Placed) -> list[tuple[slice, slice]]:
    """A panel or a tile without the padding between its cells: rows and columns of blocks with contiguous lines."""
    rows, columns = matrix.shape
    return matrix.pieces(slice(0, rows), slice(0, columns))


def mirrored_pieces(tile: Placed, cell: int, square: Region | None = None) -> Iterator[tuple[Region, Region]]:
    """The pieces of a square tile on and below its diagonal, and the place of the mirror image of each. Each line of a
    piece is contiguous in memory, as are those of ``square``, the only one to be transposed where it is given."""
    if square is not None:
        yield square, square
        return
    side = tile.shape[0]
    step = cell if tile.lines.apart else max(1, side)
    parts = [slice(start, min(start + step, side)) for start in range(0, side, step)]
    for place, rows in enumerate(parts):
        for columns in parts[: place + 1]:
            yield (rows, columns), (columns, rows)


def host_fusion(product: Product, allocate: Callable[[int, np.dtype], np.ndarray]) -> Fusion:
    """What the CPU does with panels and tiles besides multiplying them; bytes are packed where it has the instructions
    that multiply them."""
    if not product.fused:
        return NoFusion()
    if product.plan.as_bytes:
        from tilewright.pipeline.worker import centred  # with Numba

        if centred.centred_bytes.available():
            return centred.CentredFusion(product, allocate)
    return HostFusion(product, allocate)


class HostUnit:
    """The CPU: panels are multiplied in the buffers they were read into, and tiles written from where they were
    computed."""

    shared: SharedMemory | None = None  # the page cache holds what another worker has read

    def __init__(self, product: Product) -> None:
        self._product = product
        self._hashes = PartHashes()
        self.fusion: Fusion = host_fusion(product, self.allocate)

    def attach(self) -> None:
        """Any thread can free the host's memory."""

    def allocate(self, size: int, dtype: np.dtype) -> np.ndarray:
        with allocating("a buffer for a panel or a tile", size * dtype.itemsize, on_gpu=False):
            return np.empty(size, dtype)

    def tile_slots(self) -> list[np.ndarray]:
        return tile_slots(self._product.plan, self.allocate)

    def loading(
        self,
        array: StoredArray,
        region: tuple[slice, slice],
        panel: Placed,
        corner: tuple[int, int] = (0, 0),
    ) -> Loading:
        parts = [
            part
            for piece, place in pieces_of(region, panel, corner)
            for part in moved(region_reads(array, piece), place)
        ]
        first = region[0].start - corner[0], region[1].start - corner[1]
        hashes: list[tuple[Corners, int]] = []
        calls: list[Callable[[], Move]] = [
            partial(self._load_and_hash, part, panel, first, hashes) for part in parts
        ]
        return Loading(calls, settle=self.settle, hashes=hashes)

    def _load_and_hash(
        self, part: RegionRead, panel: Placed, first: tuple[int, int], hashes: list[tuple[Corners, int]]
    ) -> Move:
        """Load a part, and hash it while the core's cache may still hold it. first: the panel's first row and column in
        the array."""
        rows, columns = part.target
        down, across = first
        corners = rows.start + down, rows.stop + down, columns.start + across, columns.stop + across
        before = self._hashes.status(part.path, corners)
        move = self.load(part, panel)
        start = time.perf_counter()
        hashes.append((corners, self._hashes.of(part.path, corners, panel.cut(rows, columns), before)))
        return replace(move, store_seconds=move.store_seconds + time.perf_counter() - start)

    def load(self, part: RegionRead, panel: Placed) -> Move:
        start = time.perf_counter()
        rows, columns = part.target
        part.read(panel.cut(rows, columns))
        return Move(time.perf_counter() - start, 0.0)

    def settle(self) -> None:
        """Nothing to wait for: what a thread reads is in place when its call returns."""

    def wait_for_decoders(self) -> None:
        """Nothing to wait for: the cores decode."""

    def prepare(
        self, a: Placed, b: Placed, tile: Placed, diagonal: bool = False, slabs: Sequence[slice] = ()
    ) -> None:
        """Nothing to do: BLAS is ready, and loops are compiled since the worker was surveyed (`start_compiler`)."""

    def prepare_hashes(self, panel: Placed, parts: Sequence[PanelPart]) -> None:
        """Nothing to do."""

    def hashed(self, panel: Placed, parts: Sequence[PanelPart]) -> Callable[[], list[int]]:
        hashes = [content_hash(panel.cut(slice(*part[:2]), slice(*part[2:]))) for part in parts]
        return lambda: hashes

    def multiply(
        self,
        a: Scratch,
        b: Scratch,
        tile: Placed,
        accumulate: bool,
        diagonal: bool = False,
        slab: slice | None = None,
    ) -> frozenset[str]:
        if isinstance(a, PackedPanel) and isinstance(b, PackedPanel):
            return self._multiply_packed(a, b, tile, accumulate, diagonal)
        assert isinstance(a, Placed), "both operands are packed, or none"
        assert isinstance(b, Placed), "the same"
        options = {**_options(self._product, tile, accumulate), "device": self._product.device}
        for left, right, cell, lower in _cells(self._product.plan, a, b, tile, diagonal, slab):
            if 1 in cell.shape:
                _multiply_thin(left, right, cell, options)
            else:
                matmul(left, right, out=cell, lower=lower, **options)
        return frozenset([host.kernel_name(tile.dtype)])

    def _multiply_packed(
        self, a: PackedPanel, b: PackedPanel, tile: Placed, accumulate: bool, diagonal: bool
    ) -> frozenset[str]:
        """The whole tile at once: what an element is does not depend on the cell that it is in."""
        from tilewright.pipeline.worker import centred

        assert isinstance(self.fusion, centred.CentredFusion), "it has packed them"
        out = tile.cut(*(slice(0, side) for side in tile.shape))
        self.fusion.multiply(a, b, out, accumulate=accumulate, lower=diagonal)
        return frozenset([centred.KERNEL])

    def passed(self) -> None:
        return None

    def clear(self, tile: Placed) -> None:
        tile.flat[...] = 0

    def look(self, slot: Any) -> HostLook:
        return HostLook(self._product)

    def mirror(self, tile: Placed, *, swap: bool, square: Region | None = None) -> None:
        for below, above in mirrored_pieces(tile, self._product.plan.cell_rows, square):
            lower, upper = tile.cut(*below), tile.cut(*above)
            transpose(lower, upper, swap=swap, same=below == above, conjugate=self._product.plan.hermitian)

    def clear_outside(self, tile: Placed, region: tuple[slice, slice], band: Band) -> None:
        for rows, columns in whole_lines(tile):
            top, left = region[0].start + rows.start, region[1].start + columns.start
            band.clear_outside(tile.cut(rows, columns), top, left)

    def save(self, piece: RegionWrite, tile: Placed, dtype: np.dtype, look: Look | None = None) -> Move:
        def bands() -> Iterator[np.ndarray]:
            step = band_rows(data.shape[1], data.itemsize, SAVED_NBYTES)
            for row in range(0, data.shape[0], step):
                band = data[row : row + step]
                if look is not None:
                    look.at_rows(band)
                yield rounded(band, dtype)

        start = time.perf_counter()
        data = tile.cut(*piece.source)
        stored = piece.write(bands())
        return Move(time.perf_counter() - start, 0.0, stored)

    def close(self) -> None:
        self.fusion.close()


def pieces_of(
    region: tuple[slice, slice], panel: Placed, corner: tuple[int, int]
) -> Iterator[tuple[tuple[slice, slice], tuple[int, int]]]:
    """Cut a region of an array, which goes to this row and column of a panel, so that each line of a piece is
    contiguous in the panel. Yields each piece, and its row and column in the panel."""
    rows, columns = region
    by = columns.start - corner[1]
    inside = slice(corner[1], corner[1] + columns.stop - columns.start)
    for _, part in panel.pieces(rows, inside):
        yield (rows, slice(part.start + by, part.stop + by)), (corner[0], part.start)


def parts_read(array: StoredArray, region: tuple[slice, slice], panel: Placed) -> tuple[PanelPart, ...]:
    """The parts that a panel, ``array[region]``, is read in where all of it is read at once, whoever reads it."""
    return tuple(
        (rows.start, rows.stop, left + columns.start, left + columns.stop)
        for piece, (_, left) in pieces_of(region, panel, (0, 0))
        for rows, columns in read_targets(array, piece)
    )


def moved(parts: list[RegionRead], corner: tuple[int, int]) -> list[RegionRead]:
    """The parts of a region at this row and column of a panel, with targets relative to the panel."""
    if corner == (0, 0):
        return parts
    return [
        replace(
            part,
            target=tuple(
                slice(side.start + by, side.stop + by) for side, by in zip(part.target, corner, strict=True)
            ),
        )
        for part in parts
    ]


def band_rows(columns: int, itemsize: int, nbytes: int = BLOCK_NBYTES) -> int:
    """Rows of a matrix that fit into one block; one where not even that does."""
    return max(1, nbytes // max(1, columns * itemsize))


def rounded(band: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Sums converted to C's dtype; what is too large for float16 becomes infinite, as in NumPy."""
    with np.errstate(over="ignore"):
        return band.astype(dtype, copy=False)


def pool_of(slots: list[Any]) -> queue.SimpleQueue[Any]:
    pool: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for slot in slots:
        pool.put(slot)
    return pool
