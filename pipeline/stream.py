"""Load, multiply, write: one worker's stages, overlapped, over buffers allocated once.

Each stage takes work from the queue before it: a thread loads, one multiplies, and one for each buffer of C writes. So
tiles are loaded and multiplied in the order in which they came, and two tiles never wait for each other's buffers.
While tiles are written, the next is multiplied, and the panels of the one after it are read. Loading and writing are
spread over threads that each move one part at a time, on a GPU through a block of pinned memory of their own. Memory
is bounded by the buffers, which the plan counted; each stage keeps a clock of the time it was busy.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import zarr

from tilewright.kernels import host, matmul, peer_memory
from tilewright.kernels.file_rectangles import Rectangle, StoredChunk
from tilewright.kernels.gemm import kernel_name
from tilewright.kernels.launch import DeviceRegion, address
from tilewright.kernels.memory import allocating
from tilewright.kernels.transfer import download_rectangle, pinned_bytes, upload_rectangle
from tilewright.pipeline.events import Span
from tilewright.pipeline.peers import (
    Arrival,
    Exchange,
    Foreign,
    Key,
    Part,
    Peers,
    Sharers,
    parts_of,
    tell,
)
from tilewright.pipeline.plan import LANE_NBYTES, Lines, MatmulPlan, Tile, accumulator_dtype
from tilewright.pipeline.region_read import FilePart, RegionRead, region_reads, region_uploads
from tilewright.pipeline.region_write import Bands, Fill, RegionWrite, gather, region_writes, stored_nbytes
from tilewright.pipeline.store import as_stored_matrix, place_of
from tilewright.pipeline.threads import run_all, submitted

if TYPE_CHECKING:
    from tilewright.kernels.file_upload import Upload
    from tilewright.kernels.zstd_chunks import ChunkUpload
    from tilewright.pipeline.chunks import Zstd

logger = logging.getLogger(__name__)

STAGES = ("read", "upload", "compute", "download", "write")
THREADS = {"load": ("read", "upload"), "compute": ("compute",), "write": ("download", "write")}
"""The threads that a tile passes through, and the stages that each of them counts."""
BLOCK_NBYTES = LANE_NBYTES // 2
"""What a thread moves at once, while the other half of its lane is on its way to the GPU."""
LOOP_BLOCK_NBYTES = 2**20
"""The same for loops outside the interpreter, which use no more of their lanes: what all threads of a host have under
way has to stay in its CPU's cache (four workers with 80 threads read 1.4 to 1.5 times as fast as by 4 MiB)."""
PANELS_COMING = 4
"""Panels of A, and of B, that a worker has under way at once where it has places for them: its threads go on reading
while it asks others for what they have read of those before."""
PANELS_TAKEN = 2
"""Of so many at once it waits for the answers, which take longer than the copies."""


@dataclass(frozen=True)
class Product:
    """What to multiply and how; the same for every tile, so one engine serves them all."""

    a: zarr.Array[Any]
    b: zarr.Array[Any]
    c: zarr.Array[Any]
    plan: MatmulPlan
    device: str
    """``cuda`` or ``cpu``: decided before the first task, never by one."""
    precision: str
    read_threads: int
    write_threads: int
    run: str
    """Names the run among all that a worker may serve."""
    sharing: frozenset[str] = frozenset()
    """Addresses of workers that may give each other panels, where they are of one host."""


@dataclass(frozen=True)
class TileReport:
    """What one finished tile tells: nothing but numbers crosses the wire."""

    index: int
    worker: str
    seconds: float
    stages: dict[str, float]
    """Busy seconds of each stage for this tile."""
    kernels: frozenset[str]
    """What multiplied it; nothing where there was nothing to add up."""
    read_nbytes: int
    """Bytes of A and B that were read for it; what the worker held already is not read again."""
    shared_nbytes: int = 0
    """Bytes of A and B that were copied for it from other workers' GPUs."""
    partial: np.ndarray | None = None
    """The tile's sum over one part of k, rows × columns, when the plan cuts k into parts; else it is stored."""
    spans: tuple[Span, ...] = ()
    """When this worker's threads were busy with the tile: one for each panel loaded, each multiplied, and the write."""
    stored_nbytes: int = 0
    """Bytes that its chunks take up as they are stored; 0 where it is not stored, or in a remote array."""


@dataclass
class _Job:
    tile: Tile
    part: int
    sharers: Sharers
    done: Future[TileReport]
    started: float = field(default_factory=time.perf_counter)
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """A thread of ``THREADS`` and when it was busy, in seconds since the epoch."""
    error: BaseException | None = None
    target: Any = None
    """The tile of C on the device, once the first panel has come."""
    panels: int = 0
    """Panels multiplied so far."""
    kernels: frozenset[str] = frozenset()
    """What multiplied them."""
    partial: np.ndarray | None = None
    read_nbytes: int = 0
    shared_nbytes: int = 0
    stored_nbytes: int = 0

    @contextmanager
    def clock(self, store_stage: str, device_stage: str) -> Iterator[list[_Move]]:
        """Count the time of the block for two stages, in the proportion in which its threads spent theirs."""
        moves: list[_Move] = []
        clock = _Clock()
        try:
            yield moves
        finally:
            self.count(store_stage, device_stage, clock, moves)

    def count(self, store_stage: str, device_stage: str, clock: _Clock, moves: Sequence[_Move]) -> None:
        """Count the time since the clock was started, likewise."""
        seconds = time.perf_counter() - clock.start
        stored, moved = sum(m.store_seconds for m in moves), sum(m.device_seconds for m in moves)
        share = stored / (stored + moved) if stored + moved > 0 else 1.0
        self.busy[store_stage] += share * seconds
        self.busy[device_stage] += (1 - share) * seconds
        thread = next(name for name, stages in THREADS.items() if store_stage in stages)
        self.spans.append((thread, clock.begin, clock.begin + seconds))


@dataclass(frozen=True)
class _Clock:
    begin: float = field(default_factory=time.time)
    """In seconds since the epoch."""
    start: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class _Panel:
    """A panel of A and one of B under way."""

    job: _Job
    depth: int
    a: Buffer
    b: Buffer


@dataclass
class _Running:
    """Panels that are multiplied, or will be as soon as those before are."""

    panel: _Panel
    clock: _Clock
    wait: Callable[[], None] | None
    """Waits until they are; None where nothing is under way."""
    ends: bool = False
    """Whether they are the last of their tile."""


@dataclass(frozen=True)
class _End:
    """Behind the last panel of a job."""

    job: _Job


@dataclass(frozen=True)
class _Coming:
    """Panels that threads read, or will, and what is to follow them."""

    panel: _Panel
    missing: list[tuple[PanelCache, Key]]
    """What is being read, by its key in either cache; nothing where both panels are held already."""
    arrivals: list[Arrival]
    """The same, for those who wait for it."""
    brought: Callable[[], _Brought]
    """Waits until both panels are whole; raises what reading raised."""
    clock: _Clock = field(default_factory=_Clock)
    ends: list[_End] = field(default_factory=list)


@dataclass(frozen=True)
class _Move:
    """What one thread did for a panel or a tile: seconds between store and host, and between host and device."""

    store_seconds: float
    device_seconds: float


@dataclass(frozen=True)
class _Brought:
    """How panels came, but for what this worker set out to read."""

    moves: list[_Move] = field(default_factory=list)
    """Of all of it."""
    read_nbytes: int = 0
    """Read as well, since those who were to had not."""
    shared_nbytes: int = 0
    """Copied from others."""


@dataclass(frozen=True)
class Loading:
    """What brings a region to its place: calls for many threads at once, and behind them calls for what they left."""

    calls: list[Callable[[], _Move]]
    rest: Callable[[], list[Callable[[], _Move]]] = list
    settle: Callable[[], None] = lambda: None
    """Waits until everything that the calls sent is in its place; to be called once they have returned."""
    there: Future[bool] | None = None
    """To be told whether the calls have brought everything, as soon as they have, where somebody may wait for it."""


@dataclass(frozen=True)
class _Foreign:
    """A part of a panel that another worker reads, and what reads it here."""

    wanted: Foreign
    loading: Callable[[], Loading]


class LoadsUnderWay:
    """Several loadings that a pool's threads have begun, or will once they have done what was given to them before."""

    def __init__(self, pool: ThreadPoolExecutor, loadings: Sequence[Loading]) -> None:
        self._pool, self._loadings = pool, loadings
        self._futures: list[Future[_Move]] = []
        self._told: list[Future[None]] = []
        try:
            for loading in loadings:
                first = len(self._futures)
                for call in loading.calls:
                    self._futures.append(submitted(pool, call))
                if loading.there is not None:
                    # Behind its calls in the pool's queue, so that what it waits for has been begun.
                    calls = self._futures[first:]
                    self._told.append(submitted(pool, partial(self._tell, loading, loading.there, calls)))
        except BaseException:
            self._end()  # the places go to other panels
            raise

    @staticmethod
    def _tell(loading: Loading, there: Future[bool], calls: Sequence[Future[_Move]]) -> None:
        try:
            wait(calls)
            good = not any(call.exception() for call in calls) and not loading.rest()
            loading.settle()
        except BaseException:
            good = False
        tell(there, good)

    def finish(self) -> list[_Move]:
        """Wait until everything is in its place, or, after an error too, nothing is on its way there any more.

        Raises what reading raised.
        """
        try:
            wait(self._futures)
            wait(self._told)
            moves = [future.result() for future in self._futures]
            return moves + run_all(
                self._pool, [call for loading in self._loadings for call in loading.rest()]
            )
        finally:
            self._end()

    def _end(self) -> None:
        """Wait until nothing is on its way any more."""
        wait(self._futures)
        wait(self._told)
        for loading in self._loadings:
            loading.settle()


def load_all(pool: ThreadPoolExecutor, loadings: Sequence[Loading]) -> list[_Move]:
    """Bring all of them to their places. Raises what reading raised."""
    return LoadsUnderWay(pool, loadings).finish()


@dataclass(frozen=True)
class Placed:
    """A panel, or a tile, in a buffer."""

    flat: Any
    """The buffer: at least as long as the matrix takes up."""
    shape: tuple[int, int]
    """As it is stored, so a transposed operand has its sides swapped."""
    lines: Lines

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.flat.dtype)

    @property
    def pitch(self) -> int:
        """Elements from one line to the next."""
        return self.lines.pitch(self.shape[1])

    def place(self, row: int, column: int) -> int:
        """Where an element lies, counted in elements from the first."""
        return row * self.pitch + self.lines.place(column)

    def address(self, row: int, column: int) -> int:
        return address(self.flat) + self.place(row, column) * self.dtype.itemsize

    def cut(self, rows: slice, columns: slice) -> Any:
        """A region that has its lines in one piece, without a copy."""
        matrix, left = self._matrix, self.lines.place(columns.start)
        columns = slice(left, left + columns.stop - columns.start)
        if _shape_of((rows, columns)) == matrix.shape:
            return matrix
        return (
            matrix[rows, columns] if isinstance(matrix, np.ndarray) else DeviceRegion(matrix, rows, columns)
        )

    @cached_property
    def _matrix(self) -> Any:
        """With what lies between its cells, and behind its lines."""
        return _shaped(self.flat, (self.shape[0], self.pitch))

    def pieces(self, rows: slice, columns: slice) -> list[tuple[slice, slice]]:
        """A region, cut so that each piece of it has its lines in one piece."""
        return [(rows, slice(*stretch)) for stretch in self.lines.stretches(columns.start, columns.stop)]


class SharedMemory(Protocol):
    """Buffers that other workers of this host can copy from, and theirs. For any thread."""

    def export(self, flat: Any) -> bytes:
        """What others open to copy from a buffer. Raises what the driver does where it refuses."""

    def copy(self, exported: bytes, peer: str, part: Part, panel: Placed) -> None:
        """Fill a part of a panel from another worker's; returns when it is there."""

    def close(self, keep: Set[str] = frozenset()) -> None:
        """Let go of the memory of all other workers but these, once nothing is copied from it."""


class Unit(Protocol):
    """What multiplies: the buffers it works in, and the moves between them and the store."""

    shared: SharedMemory | None
    """None where others never can copy from here."""

    def allocate(self, size: int, dtype: np.dtype) -> Any:
        """A flat buffer of ``size`` elements."""

    def tile_slots(self) -> list[Any]:
        """Places for one tile of C each."""

    def loading(
        self,
        array: zarr.Array[Any],
        region: tuple[slice, slice],
        panel: Placed,
        corner: tuple[int, int] = (0, 0),
    ) -> Loading:
        """What brings ``array[region]`` into a panel, from this row and column on."""

    def multiply(self, a: Placed, b: Placed, tile: Placed, accumulate: bool) -> frozenset[str]:
        """Put, or add, the product of two panels into a tile; returns the names of the kernels that do.

        It may go on when this has returned: see `passed`.
        """

    def passed(self) -> Callable[[], None] | None:
        """What waits until everything that was multiplied so far is done; None where it is."""

    def clear(self, tile: Placed) -> None: ...

    def save(self, piece: RegionWrite, tile: Placed, dtype: np.dtype) -> _Move:
        """Store one piece of a finished tile, which has its lines in one piece. Called by many threads at once."""

    def close(self) -> None: ...


@dataclass(eq=False)
class Buffer:
    """A panel's place, as large as the plan's largest, and how many that were taken wait to be multiplied."""

    flat: Any
    users: int = 0
    arrival: Arrival = field(default_factory=Arrival)
    """Of the panel that is here, or on its way."""


class PanelCache:
    """Panels of one operand, at most ``count`` of them; the one that was taken longest ago gives way to a new one.

    One thread takes them, in the order of the work, and another lets them go in the same order: so a panel gives
    way only when it is not the next to be wanted again.
    """

    def __init__(self, count: int, allocate: Callable[[], Any]) -> None:
        self._spare = count
        self._allocate = allocate
        self._held: OrderedDict[Any, Buffer] = OrderedDict()
        self._let_go = threading.Condition()

    def take(self, key: Any) -> tuple[Buffer, bool]:
        """The place of panel ``key``, and whether its bytes are there; if not, they are to be loaded. Waits for a
        place while all are in use.
        """
        with self._let_go:
            buffer = self._held.get(key)
            there = buffer is not None
            if buffer is None:
                if self._spare:
                    buffer = Buffer(self._allocate())
                    self._spare -= 1
                else:
                    oldest = next(iter(self._held))
                    self._let_go.wait_for(lambda: self._held[oldest].users == 0)
                    buffer = self._held.pop(oldest)
                    buffer.arrival = Arrival()
                self._held[key] = buffer
            self._held.move_to_end(key)
            buffer.users += 1
            return buffer, there

    def ready(self, key: Any) -> bool:
        """Whether `take` would not wait. It stays so until the next `take`."""
        with self._let_go:
            return key in self._held or self._spare > 0 or next(iter(self._held.values())).users == 0

    def find(self, key: Any) -> Buffer | None:
        """The place of a panel that is here, or on its way. It waits for nobody: not while a place is allocated."""
        return self._held.get(key)

    def let_go(self, buffer: Buffer) -> None:
        """One who took it has multiplied it."""
        with self._let_go:
            buffer.users -= 1
            self._let_go.notify()

    def discard(self, key: Any) -> None:
        """Panel ``key`` could not be loaded: its place holds nothing, and goes first."""
        with self._let_go:
            nothing = object()
            self._held[nothing] = self._held.pop(key)
            self._held.move_to_end(nothing, last=False)


def _shape_of(region: tuple[slice, slice]) -> tuple[int, int]:
    return region[0].stop - region[0].start, region[1].stop - region[1].start


def _part_nbytes(part: Part, array: zarr.Array[Any]) -> int:
    return (part[1] - part[0]) * (part[3] - part[2]) * array.dtype.itemsize


def _shaped(flat: Any, shape: tuple[int, int]) -> Any:
    return flat[: shape[0] * shape[1]].reshape(shape)


def _tile_slots(plan: MatmulPlan, allocate: Callable[[int, np.dtype], Any]) -> list[Any]:
    dtype = accumulator_dtype(np.dtype(plan.c_dtype))
    size = plan.layout.c_size(plan.tile_rows, plan.tile_columns)
    return [allocate(size, dtype) for _ in range(plan.c_buffers)]


def _multiply(
    product: Product, a: Placed, b: Placed, tile: Placed, accumulate: bool, stream: Any
) -> frozenset[str]:
    """``tile`` takes, or adds, the product of two panels, cell by cell. Returns the kernels used."""
    plan = product.plan
    options: dict[str, Any] = {
        "accumulate": accumulate,
        "transpose_a": plan.transpose_a,
        "transpose_b": plan.transpose_b,
        "dtype": tile.dtype,
        "precision": product.precision,
        "device": product.device,
    }
    depth = slice(0, a.shape[0] if plan.transpose_a else a.shape[1])
    names: dict[tuple[int, int], str] = {}  # cells of one shape meet the same kernel
    for rows, columns in plan.cells(*tile.shape):
        left = a.cut(*((depth, rows) if plan.transpose_a else (rows, depth)))
        right = b.cut(*((columns, depth) if plan.transpose_b else (depth, columns)))
        cell = tile.cut(rows, columns)
        if 1 in cell.shape and isinstance(cell, np.ndarray):
            _multiply_thin(left, right, cell, options)
        else:
            matmul(left, right, out=cell, stream=stream, **options)
        if cell.shape not in names:
            names[cell.shape] = kernel_name(left, right, cell, **options)
    return frozenset(names.values())


def _multiply_thin(a: np.ndarray, b: np.ndarray, out: np.ndarray, options: dict[str, Any]) -> None:
    """The product of a cell of one row or column. BLAS adds it up in an order that depends on how far apart in memory
    elements are, which the tile decides that the cell is cut from: with copies it is as if the cell were the tile."""
    sums = np.ascontiguousarray(out)
    matmul(np.ascontiguousarray(a), np.ascontiguousarray(b), out=sums, **options)
    if not np.may_share_memory(sums, out):
        out[...] = sums


class HostUnit:
    """The CPU: panels are multiplied where they were read, tiles are written from where they were computed."""

    shared: SharedMemory | None = None  # the page cache holds what another worker has read

    def __init__(self, product: Product) -> None:
        self._product = product

    def allocate(self, size: int, dtype: np.dtype) -> np.ndarray:
        with allocating("a buffer for a panel or a tile", size * dtype.itemsize, on_gpu=False):
            return np.empty(size, dtype)

    def tile_slots(self) -> list[np.ndarray]:
        return _tile_slots(self._product.plan, self.allocate)

    def loading(
        self,
        array: zarr.Array[Any],
        region: tuple[slice, slice],
        panel: Placed,
        corner: tuple[int, int] = (0, 0),
    ) -> Loading:
        parts = [
            part
            for piece, place in _pieces(region, panel, corner)
            for part in _moved(region_reads(array, piece), place)
        ]
        return Loading([partial(self.load, part, panel) for part in parts], settle=self.settle)

    def load(self, part: RegionRead, panel: Placed) -> _Move:
        start = time.perf_counter()
        rows, columns = part.target
        part.read(panel.cut(rows, columns))
        return _Move(time.perf_counter() - start, 0.0)

    def settle(self) -> None:
        """What a thread has read is in its place when it returns."""

    def multiply(self, a: Placed, b: Placed, tile: Placed, accumulate: bool) -> frozenset[str]:
        _multiply(self._product, a, b, tile, accumulate, None)
        return frozenset([host.kernel_name(tile.dtype)])

    def passed(self) -> None:
        return None

    def clear(self, tile: Placed) -> None:
        tile.flat[...] = 0

    def save(self, piece: RegionWrite, tile: Placed, dtype: np.dtype) -> _Move:
        start = time.perf_counter()
        data = tile.cut(*piece.source)
        step = _band_rows(data.shape[1], data.itemsize)
        piece.write(_rounded(data[row : row + step], dtype) for row in range(0, data.shape[0], step))
        return _Move(time.perf_counter() - start, 0.0)

    def close(self) -> None:
        pass


def _pieces(
    region: tuple[slice, slice], panel: Placed, corner: tuple[int, int]
) -> Iterator[tuple[tuple[slice, slice], tuple[int, int]]]:
    """A region of an array that goes to this row and column of a panel, cut so that each piece of it has its lines in
    one piece there; and where in the panel each goes."""
    rows, columns = region
    by = columns.start - corner[1]
    inside = slice(corner[1], corner[1] + columns.stop - columns.start)
    for _, part in panel.pieces(rows, inside):
        yield (rows, slice(part.start + by, part.stop + by)), (corner[0], part.start)


def _moved(parts: list[RegionRead], corner: tuple[int, int]) -> list[RegionRead]:
    """The parts of a region that begins at this row and column of a panel, by their places in the panel."""
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


def _band_rows(columns: int, itemsize: int) -> int:
    """Rows of a matrix that fit into one block."""
    return max(1, BLOCK_NBYTES // max(1, columns * itemsize))


def _rounded(band: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Sums in the dtype that C is stored in; what is too large for float16 becomes infinite, as NumPy has it."""
    with np.errstate(over="ignore"):
        return band.astype(dtype, copy=False)


class _Lane:
    """Two blocks of pinned memory and a stream: what one thread needs to move bytes to or from the GPU."""

    def __init__(self) -> None:
        from numba import cuda

        from tilewright.kernels.calls import lane_words

        with allocating("pinned memory for one thread that reads or writes", LANE_NBYTES, on_gpu=False):
            memory = pinned_bytes(LANE_NBYTES)
        self._blocks = memory[:BLOCK_NBYTES], memory[BLOCK_NBYTES : 2 * BLOCK_NBYTES]
        self._passed = cuda.event(timing=False), cuda.event(timing=False)
        self._turn = 0
        self.stream = cuda.stream()
        self.words = lane_words(self._blocks, self._passed, self.stream)
        """The same for loops outside the interpreter."""

    def block(self) -> np.ndarray:
        """The block used longest ago, once its bytes have gone where they were sent."""
        self._turn = 1 - self._turn
        self._passed[self._turn].synchronize()
        return self._blocks[self._turn]

    def sent(self) -> Any:
        """The block given last is in use until the stream has passed this point; returns the event that says so."""
        passed = self._passed[self._turn]
        passed.record(self.stream)
        return passed


_spare_lanes: list[_Lane] = []
"""Lanes of runs that are over: pinning memory takes 0.4 s a GiB, so a process keeps what it pinned."""
_spare_lanes_lock = threading.Lock()


class GpuSharedMemory:
    """Of this process's GPU, and of other processes' GPUs."""

    def __init__(self) -> None:
        from numba import cuda

        self._cuda = cuda
        self._imported, self._lock = peer_memory.ImportedMemory(), threading.Lock()
        self._stream = cuda.stream()

    def export(self, flat: Any) -> bytes:
        return peer_memory.export(flat)

    def copy(self, exported: bytes, peer: str, part: Part, panel: Placed) -> None:
        top, bottom, left, right = part
        item = panel.dtype.itemsize
        corner = panel.place(top, left) * item
        # What lies between the cells of a line comes along: it is the same there.
        width = (panel.place(top, right - 1) + 1) * item - corner if left < right else 0
        self._cuda.current_context()  # attaches the thread to the GPU
        with self._lock:  # nobody closes it meanwhile
            source, target = self._imported.address(peer, exported) + corner, address(panel.flat) + corner
            peer_memory.copy_rectangle(source, target, panel.pitch * item, bottom - top, width, self._stream)
            self._stream.synchronize()

    def close(self, keep: Set[str] = frozenset()) -> None:
        self._cuda.current_context()
        with self._lock:
            self._imported.close(keep)


class CudaUnit:
    """One GPU. Threads move bytes through pinned lanes, each on a stream of its own, and wait for one."""

    def __init__(self, product: Product) -> None:
        from numba import cuda

        from tilewright.kernels import file_download, file_upload, zstd_chunks

        self._product = product
        self._cuda, self._upload, self._download = cuda, file_upload, file_download
        self._chunks = zstd_chunks
        self._compute_stream = cuda.stream()
        self.shared: SharedMemory | None = GpuSharedMemory() if peer_memory.available() else None
        with _spare_lanes_lock:
            lanes = [_spare_lanes.pop() if _spare_lanes else _Lane() for _ in range(product.plan.lanes)]
        self._lanes = _pool(lanes)
        self._in_loops = zstd_chunks.available()
        """Whether threads can move bytes without the interpreter."""
        if self._in_loops:
            file_upload.prepare()
            file_download.prepare()

    def allocate(self, size: int, dtype: np.dtype) -> Any:
        with allocating("a buffer for a panel or a tile", size * dtype.itemsize, on_gpu=True):
            return self._cuda.device_array(max(size, 1), dtype)

    def tile_slots(self) -> list[Any]:
        return _tile_slots(self._product.plan, self.allocate)

    @contextmanager
    def _lane(self) -> Iterator[_Lane]:
        self._cuda.current_context()  # attaches the thread to the GPU: pool threads come without
        lane = self._lanes.get()
        try:
            yield lane
        finally:
            self._lanes.put(lane)

    def loading(
        self,
        array: zarr.Array[Any],
        region: tuple[slice, slice],
        panel: Placed,
        corner: tuple[int, int] = (0, 0),
    ) -> Loading:
        used: list[_Lane] = []
        settle = partial(self._settle, used)

        def ordinary(parts: list[RegionRead], place: tuple[int, int]) -> list[Callable[[], _Move]]:
            return [partial(self.load, part, panel, used) for part in _moved(parts, place)]

        pieces = _pieces(region, panel, corner)
        if not self._in_loops:
            reads = [call for piece, place in pieces for call in ordinary(region_reads(array, piece), place)]
            return Loading(reads, settle=settle)
        pitch = panel.pitch * panel.dtype.itemsize
        found: list[tuple[FilePart, tuple[int, int]]] = []
        others: list[Callable[[], _Move]] = []
        for piece, place in pieces:
            parts, left = region_uploads(array, piece, panel.address(*place), pitch)
            found += [(part, place) for part in parts]
            others += ordinary(left, place)
        upload = self._upload_of([part.source for part, _ in found])
        threads = min(self._product.read_threads, upload.blocks)
        calls: list[Callable[[], _Move]] = [partial(self._run_loop, upload, used) for _ in range(threads)]

        def rest() -> list[Callable[[], _Move]]:
            # Chunks that were never written, and those of which reading them says what is wrong with them.
            failed = [found[number] for number in upload.failed()]
            return [call for part, place in failed for call in ordinary(part.reads(), place)]

        return Loading(calls + others, rest, settle)

    def _upload_of(self, sources: Sequence[Rectangle | StoredChunk]) -> Upload | ChunkUpload:
        """What moves them: all plain, or all compressed."""
        chunks = [source for source in sources if isinstance(source, StoredChunk)]
        if chunks:
            return self._chunks.ChunkUpload(chunks, LOOP_BLOCK_NBYTES)
        rectangles = [source for source in sources if isinstance(source, Rectangle)]
        return self._upload.Upload(rectangles, LOOP_BLOCK_NBYTES, self._product.read_threads)

    def _run_loop(self, upload: Upload | ChunkUpload, used: list[_Lane]) -> _Move:
        with self._lane() as lane:
            used.append(lane)
            return _Move(*upload.run(lane.words))

    def load(self, part: RegionRead, panel: Placed, used: list[_Lane]) -> _Move:
        rows, columns = part.shape
        item = panel.dtype.itemsize
        pitch, start = panel.pitch * item, panel.address(part.target[0].start, part.target[1].start)
        reading = 0.0
        with self._lane() as lane:
            begun = time.perf_counter()
            used.append(lane)
            whole = None
            if rows * columns * item > BLOCK_NBYTES:  # a chunk that is decoded whole goes over in bands
                whole = np.empty((rows, columns), panel.dtype)
                clock = time.perf_counter()
                part.read(whole)
                reading += time.perf_counter() - clock
            bands = ((0, 0, (rows, columns)),) if whole is None else _bands((rows, columns), item)
            for row, column, extent in bands:
                staged = _shaped(lane.block().view(panel.dtype), extent)
                clock = time.perf_counter()
                if whole is None:
                    part.read(staged)
                else:
                    staged[...] = whole[row : row + extent[0], column : column + extent[1]]
                reading += time.perf_counter() - clock
                upload_rectangle(staged, start + row * pitch + column * item, pitch, lane.stream)
                lane.sent()
        return _Move(reading, time.perf_counter() - begun - reading)

    def _settle(self, used: list[_Lane]) -> None:
        self._cuda.current_context()
        # What other threads send through the same lanes by now is waited for as far as it has come.
        for lane in dict.fromkeys(used):
            lane.stream.synchronize()

    def multiply(self, a: Placed, b: Placed, tile: Placed, accumulate: bool) -> frozenset[str]:
        return _multiply(self._product, a, b, tile, accumulate, self._compute_stream)

    def passed(self) -> Callable[[], None]:
        event = self._cuda.event(timing=False)
        event.record(self._compute_stream)

        def wait() -> None:
            self._cuda.current_context()  # attaches the thread to the GPU
            event.synchronize()

        return wait

    def clear(self, tile: Placed) -> None:
        tile.flat.copy_to_device(np.zeros(tile.flat.size, tile.dtype))

    def save(self, piece: RegionWrite, tile: Placed, dtype: np.dtype) -> _Move:
        item = tile.dtype.itemsize
        pitch = tile.pitch * item
        rows, columns = piece.source
        height, width = rows.stop - rows.start, columns.stop - columns.start
        corner = tile.address(rows.start, columns.start)
        moving = [0.0]

        def start(lane: _Lane, row: int, column: int, extent: tuple[int, int]) -> tuple[np.ndarray, Any]:
            """A rectangle on its way into the lane's next block, and the event that it is there."""
            staged = _shaped(lane.block().view(tile.dtype), extent)
            download_rectangle(corner + row * pitch + column * item, pitch, staged, lane.stream)
            return staged, lane.sent()

        def bands(lane: _Lane) -> Iterator[np.ndarray]:
            # While one band is written the next comes down, into the block whose band was written before.
            parts = list(_bands((height, width), item))
            row = np.empty((1, width), tile.dtype) if parts[0][2][1] < width else None
            clock = time.perf_counter()
            coming = start(lane, *parts[0])
            for place, (_, column, extent) in enumerate(parts):
                staged, arrived = coming
                if place + 1 < len(parts):
                    coming = start(lane, *parts[place + 1])
                arrived.synchronize()
                moving[0] += time.perf_counter() - clock
                if row is None:
                    yield _rounded(staged, dtype)
                else:  # one row alone is longer than a block
                    row[:, column : column + extent[1]] = staged
                    if column + extent[1] == width:
                        yield _rounded(row, dtype)
                clock = time.perf_counter()

        def fill(lane: _Lane, descriptor: int, zstd: Zstd | None) -> bool:
            rectangle = corner, pitch, height, width * item
            if zstd is None:
                good, _, waiting = self._download.store(descriptor, *rectangle, LOOP_BLOCK_NBYTES, lane.words)
            else:
                good, _, waiting = self._chunks.store_chunk(
                    descriptor, *rectangle, *zstd, LOOP_BLOCK_NBYTES, lane.words
                )
            moving[0] += waiting
            return good

        direct = self._in_loops and dtype == tile.dtype
        with self._lane() as lane:
            clock = time.perf_counter()
            piece.write(bands(lane), partial(fill, lane) if direct else None)
        return _Move(time.perf_counter() - clock - moving[0], moving[0])

    def close(self) -> None:
        self._cuda.current_context()
        if self.shared is not None:
            self.shared.close()
        with _spare_lanes_lock:
            while not self._lanes.empty():
                _spare_lanes.append(self._lanes.get())


def _bands(shape: tuple[int, int], itemsize: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Rectangles of a matrix that fit into a block: the row and the column where each begins, and its shape."""
    wide = max(1, min(shape[1], BLOCK_NBYTES // itemsize))
    tall = _band_rows(wide, itemsize)
    for row in range(0, shape[0], tall):
        for column in range(0, shape[1], wide):
            yield row, column, (min(tall, shape[0] - row), min(wide, shape[1] - column))


class _Operand:
    """A or B: where it is read from, the panels of it that are held, and how they lie."""

    def __init__(self, name: str, array: zarr.Array[Any], cache: PanelCache, lines: Lines) -> None:
        self.name, self.array, self.cache, self.lines = name, array, cache, lines
        stored = as_stored_matrix(array)
        self.unit = (1, stored.unit[1]) if stored.plain else stored.unit
        """Rows and columns of what is read as one piece; of what needs no decoding, a row alone."""
        self._exported: dict[int, bytes | None] = {}

    def placed(self, buffer: Buffer, shape: tuple[int, int]) -> Placed:
        return Placed(buffer.flat, shape, self.lines)

    def exported(self, buffer: Buffer, memory: SharedMemory) -> bytes | None:
        """What opens a buffer to other workers, or None. Asked for once, since it takes a call to the driver."""
        if id(buffer) not in self._exported:
            try:
                self._exported[id(buffer)] = memory.export(buffer.flat)
            except Exception as error:  # others can read the same from the files
                logger.warning("panels cannot be given to other workers: %s: %s", type(error).__name__, error)
                self._exported[id(buffer)] = None
        return self._exported[id(buffer)]


@dataclass(frozen=True)
class _Sharing:
    """The way to other workers' panels, in a run that has one."""

    exchange: Exchange
    memory: SharedMemory


class Engine:
    """The stages of one worker for one run. ``multiply`` may be called from several threads; ``close`` ends it."""

    def __init__(self, product: Product, worker: str, peers: Peers | None = None) -> None:
        self._product = product
        self._worker = worker
        self._plan = product.plan
        self._abandoned = False
        self._closed = False
        self._entrance = threading.Lock()
        """Held while a job enters or the entrance is closed: behind the end no job would ever be answered."""
        self._under_way = 0
        self._begun = False
        """Whether a job has entered."""
        self._multiplied = 0.0
        """When the last panels were."""
        self._unit: Unit = CudaUnit(product) if product.device == "cuda" else HostUnit(product)
        self._sharing: _Sharing | None = None
        if peers is not None and self._unit.shared is not None:
            self._sharing = _Sharing(Exchange(peers, product.run), self._unit.shared)
        self._readers = ThreadPoolExecutor(product.read_threads, thread_name_prefix="tilewright-read")
        self._writers = ThreadPoolExecutor(product.write_threads, thread_name_prefix="tilewright-write")
        self._takers = ThreadPoolExecutor(PANELS_TAKEN, thread_name_prefix="tilewright-take")
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[_Panel | _End | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        plan, layout = product.plan, product.plan.layout
        self._layout = layout
        allocate = self._unit.allocate
        a_size = layout.a_size(plan.tile_rows, min(plan.panel_depth, plan.k))
        b_size = layout.b_size(plan.tile_columns, min(plan.panel_depth, plan.k))
        self._a_panels = PanelCache(plan.a_buffers, partial(allocate, a_size, np.dtype(plan.a_dtype)))
        self._b_panels = PanelCache(plan.b_buffers, partial(allocate, b_size, np.dtype(plan.b_dtype)))
        self._operands = (
            _Operand("a", product.a, self._a_panels, layout.a()),
            _Operand("b", product.b, self._b_panels, layout.b()),
        )
        try:
            self._tile_slots = _pool(self._unit.tile_slots())
        except BaseException:
            self._unit.close()  # its pinned lanes serve the next attempt
            raise
        self._threads = [
            threading.Thread(target=stage, name=f"tilewright-{stage.__name__.strip('_')}", daemon=True)
            # When nothing is left to multiply, the tiles in all buffers are written at once.
            for stage in (self._load_stage, self._compute_stage, *[self._write_stage] * plan.c_buffers)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # the system has no thread left: those that began would wait for work for ever
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            self.close()
            raise

    def multiply(self, tile: Tile, part: int = 0, sharers: Sharers | None = None) -> TileReport:
        """Compute and store one tile, or bring back its sum over one part of k when the plan has several.

        sharers: workers that want the same panels, and may have them by now. Returns when it is stored. Raises what the
        failing stage raised.
        """
        job = _Job(tile, part, sharers or Sharers(), Future())
        with self._entrance:
            if self._closed:
                raise CancelledError("this worker's part in the run is over")
            self._under_way += 1
            self._begun = True
            self._jobs.put(job)
        try:
            return job.done.result()
        finally:
            with self._entrance:
                self._under_way -= 1

    @property
    def product(self) -> Product:
        """What this is a worker's part in."""
        return self._product

    @property
    def idle(self) -> bool:
        """Whether no tile is under way; one that was just made is about to be given its first."""
        return self._begun and self._under_way == 0

    def arrival(self, key: Key) -> Arrival | None:
        """How far a panel has come here, for another worker; None where it is not, or no longer."""
        buffer = self._operands[key[0] == "b"].cache.find(key)
        return buffer.arrival if buffer is not None else None

    def close(self, *, abandon: bool = False) -> None:
        """End every stage behind the jobs under way; with ``abandon`` those stop at their next panel, unwritten.

        The buffers last as long as the engine, for other workers that still copy from them.
        """
        self._abandoned = self._abandoned or abandon
        with self._entrance:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        for pool in (self._readers, self._writers, self._takers):
            pool.shutdown()
        self._unit.close()

    def _load_stage(self) -> None:
        # The threads that read go on to the next panels while the last blocks of those before are on their way, or
        # parts of them are fetched from other workers: half a panel's time is lost otherwise.
        coming: deque[_Coming] = deque()
        while True:
            while coming and self._jobs.empty():
                self._hand_on(coming.popleft())
            if (job := self._jobs.get()) is None:
                break
            if self._sharing is not None:
                try:
                    self._close_unreached(self._sharing, job)
                except BaseException as error:
                    job.error = error  # if this thread ended, no tile would ever get an answer
            for start, stop in self._plan.panels(job.part):
                while coming and not self._may_begin(coming, job.tile, start):
                    self._hand_on(coming.popleft())
                if self._abandoned:
                    job.error = CancelledError()
                if job.error is not None:
                    break
                try:
                    coming.append(self._begin(job, start, stop))
                except BaseException as error:
                    job.error = error
                    break
            if coming:
                coming[-1].ends.append(_End(job))
            else:
                self._loaded.put(_End(job))
        for panels in coming:
            self._hand_on(panels)
        self._loaded.put(None)

    def _may_begin(self, coming: Sequence[_Coming], tile: Tile, start: int) -> bool:
        """Whether places for these panels can be had while others are still coming, and neither is one of those: who
        uses a panel must not begin before it is whole."""
        wanted = (self._a_panels, ("a", tile.i, start)), (self._b_panels, ("b", tile.j, start))
        return len(coming) < PANELS_COMING and all(
            place[0].ready(place[1]) and not any(place in one.missing for one in coming) for place in wanted
        )

    def _begin(self, job: _Job, start: int, stop: int) -> _Coming:
        """Have the panels of A and B over a stretch of k read, unless they are held already."""
        plan, tile = self._plan, job.tile
        rows, columns = tile.region
        inner = slice(start, stop)
        a_region = (inner, rows) if plan.transpose_a else (rows, inner)
        b_region = (columns, inner) if plan.transpose_b else (inner, columns)
        loadings: list[Loading] = []
        taken: list[Buffer] = []
        missing: list[tuple[PanelCache, Key]] = []
        arrivals: list[Arrival] = []
        foreign: list[_Foreign] = []
        try:
            for operand, place, region, sharers in zip(
                self._operands,
                (tile.i, tile.j),
                (a_region, b_region),
                (job.sharers.a, job.sharers.b),
                strict=True,
            ):
                key = (operand.name, place, start)
                buffer, there = operand.cache.take(key)
                taken.append(buffer)
                if there:
                    continue
                missing.append((operand.cache, key))
                arrivals.append(buffer.arrival)
                own, others = self._shared_out(operand, key, region, buffer, sharers)
                foreign += others
                if own is not None:
                    loading = self._loading(operand, region, own, buffer)
                    job.read_nbytes += _part_nbytes(own, operand.array)
                    # Also where all of it is read here: others must not wait for what comes with it, or before it.
                    given = buffer.arrival.exported is not None
                    loadings.append(replace(loading, there=buffer.arrival.own_there if given else None))
            bring = partial(self._bring, job, LoadsUnderWay(self._readers, loadings), foreign, arrivals)
            brought: Callable[[], _Brought] = bring
            if foreign:
                # Others take their time to answer: meanwhile the panels before these are waited for.
                with suppress(RuntimeError):  # no thread to be had: then they are asked behind those
                    brought = submitted(self._takers, bring).result
        except BaseException:
            self._give_back(taken, missing, arrivals)
            raise
        return _Coming(_Panel(job, stop - start, *taken), missing, arrivals, brought)

    def _shared_out(
        self, operand: _Operand, key: Key, region: tuple[slice, slice], buffer: Buffer, sharers: Sequence[str]
    ) -> tuple[Part | None, list[_Foreign]]:
        """What this worker reads of a panel, if anything, and what it asks others for."""
        shape = _shape_of(region)
        whole = (0, shape[0], 0, shape[1])
        sharing = self._sharing
        if sharing is None or not any(peer != self._worker for peer in sharers):
            return whole, []
        exported = operand.exported(buffer, sharing.memory)
        if exported is None:
            return whole, []
        arrival = buffer.arrival
        if not sharing.exchange.asks(operand.name):
            arrival.own, arrival.exported = whole, exported
            return whole, []
        own: Part | None = None
        others: list[_Foreign] = []
        for peer, part in zip(sharers, parts_of(region, operand.unit, len(sharers)), strict=True):
            if part is None:
                continue
            if peer == self._worker:
                own = part
                continue
            wanted = Foreign(
                peer,
                key,
                part,
                _part_nbytes(part, operand.array),
                partial(sharing.memory.copy, part=part, panel=operand.placed(buffer, shape)),
            )
            others.append(_Foreign(wanted, partial(self._loading, operand, region, part, buffer)))
        arrival.own = own
        arrival.exported = exported  # last: from here on others may have it
        return own, others

    def _loading(self, operand: _Operand, region: tuple[slice, slice], part: Part, buffer: Buffer) -> Loading:
        """What fills a part of the panel that ``region`` of an operand is."""
        top, bottom, left, right = part
        rows, columns = region
        inner = (
            slice(rows.start + top, rows.start + bottom),
            slice(columns.start + left, columns.start + right),
        )
        panel = operand.placed(buffer, _shape_of(region))
        return self._unit.loading(operand.array, inner, panel, (top, left))

    def _give_back(
        self,
        taken: Sequence[Buffer],
        missing: Sequence[tuple[PanelCache, Key]],
        arrivals: Sequence[Arrival],
    ) -> None:
        """Let go of the places of panels that will not come."""
        for cache, key in missing:
            cache.discard(key)
        for arrival in arrivals:
            tell(arrival.own_there, False)
            tell(arrival.whole, False)
        for cache, buffer in zip((self._a_panels, self._b_panels), taken, strict=False):
            cache.let_go(buffer)

    def _close_unreached(self, sharing: _Sharing, job: _Job) -> None:
        """Keep memory open of those only that a tile names, who are there, and answer. A worker that was lost leaves
        room on its GPU for the one that comes in its place only when nobody has its memory open."""
        sharing.memory.close(keep=frozenset((*job.sharers.a, *job.sharers.b)) - sharing.exchange.lost)

    def _bring(
        self, job: _Job, loads: LoadsUnderWay, foreign: Sequence[_Foreign], arrivals: Sequence[Arrival]
    ) -> _Brought:
        """Wait until panels are whole: read, or, what others read, copied from them, or read after all."""
        moves, read, shared = loads.finish(), 0, 0
        if self._sharing is not None and foreign:
            if self._abandoned:
                raise CancelledError()
            start = time.perf_counter()
            left = self._sharing.exchange.take([one.wanted for one in foreign])
            if left:
                self._close_unreached(self._sharing, job)
            if self._abandoned:
                raise CancelledError()
            moves.append(_Move(0.0, time.perf_counter() - start))
            if left:
                moves += load_all(self._readers, [one.loading() for one in foreign if one.wanted in left])
            read = sum(one.nbytes for one in left)
            shared = sum(one.wanted.nbytes for one in foreign) - read
        for arrival in arrivals:
            tell(arrival.own_there, True)
            tell(arrival.whole, True)
        return _Brought(moves, read, shared)

    def _hand_on(self, coming: _Coming) -> None:
        """Wait for panels, and give them, and what is to follow them, to those who multiply."""
        panel, job = coming.panel, coming.panel.job
        try:
            if coming.missing:
                brought = _Brought()
                try:
                    brought = coming.brought()
                finally:
                    job.count("read", "upload", coming.clock, brought.moves)
                job.read_nbytes += brought.read_nbytes
                job.shared_nbytes += brought.shared_nbytes
        except BaseException as error:
            job.error = job.error or error
            self._give_back((panel.a, panel.b), coming.missing, coming.arrivals)
        else:
            self._loaded.put(panel)
        for end in coming.ends:
            self._loaded.put(end)

    def _compute_stage(self) -> None:
        # The next panels are enqueued while those before are multiplied, so that a GPU does not wait for this thread,
        # which waits for the interpreter's lock whenever it has slept.
        running: _Running | None = None
        while True:
            if running is not None and self._loaded.empty():
                self._finish(running)
                running = None
            if (item := self._loaded.get()) is None:
                break
            job = item.job
            if job.target is None:
                if running is not None and self._tile_slots.empty():
                    self._finish(running)  # the tile that is waited for may be the one it belongs to
                    running = None
                job.target = self._tile_slots.get()
            if isinstance(item, _End):
                if job.panels == 0 and job.error is None:  # k = 0: the empty sum
                    try:
                        self._unit.clear(self._tile(job))
                    except BaseException as error:
                        job.error = error
                if running is not None and running.panel.job is job:
                    running.ends = True
                else:
                    self._finished.put(job)
                continue
            before, running = running, self._enqueue(item)
            if before is not None:
                self._finish(before)
            if running.wait is None:
                self._finish(running)
                running = None
        if running is not None:
            self._finish(running)
        self._finished.put(None)

    def _tile(self, job: _Job) -> Placed:
        """The tile that a job works on."""
        return Placed(job.target, (job.tile.rows, job.tile.columns), self._layout.c())

    def _enqueue(self, panel: _Panel) -> _Running:
        """Have a panel of A and one of B multiplied, unless the job has failed."""
        job, clock = panel.job, _Clock()
        a, b = self._operands
        wait = None
        if job.error is None:
            try:
                try:
                    job.kernels |= self._unit.multiply(
                        a.placed(panel.a, self._layout.a_shape(job.tile.rows, panel.depth)),
                        b.placed(panel.b, self._layout.b_shape(job.tile.columns, panel.depth)),
                        self._tile(job),
                        accumulate=job.panels > 0,
                    )
                    job.panels += 1
                finally:
                    wait = self._unit.passed()  # what was begun before an error reads the panels as well
            except BaseException as error:
                job.error = error
        return _Running(panel, clock, wait)

    def _finish(self, running: _Running) -> None:
        """Wait until panels are multiplied, let go of them, and of a tile that they were the last of."""
        panel, job = running.panel, running.panel.job
        try:
            if running.wait is not None:
                running.wait()
        except BaseException as error:
            job.error = job.error or error
        late = max(0.0, self._multiplied - running.clock.start)  # while those before were multiplied
        clock = _Clock(running.clock.begin + late, running.clock.start + late)
        job.count("compute", "compute", clock, ())
        self._multiplied = time.perf_counter()
        self._a_panels.let_go(panel.a)
        self._b_panels.let_go(panel.b)
        if running.ends:
            self._finished.put(job)

    def _write_stage(self) -> None:
        while (job := self._finished.get()) is not None:
            if job.error is None:
                try:
                    self._write_tile(job)
                except BaseException as error:
                    job.error = error
            self._tile_slots.put(job.target)
            job.target = None
            if job.error is not None:
                job.done.set_exception(job.error)
            else:
                seconds = time.perf_counter() - job.started
                report = TileReport(
                    job.tile.index,
                    self._worker,
                    seconds,
                    dict(job.busy),
                    job.kernels,
                    job.read_nbytes,
                    job.shared_nbytes,
                    job.partial,
                    tuple(Span(self._worker, *span) for span in job.spans),
                    job.stored_nbytes,
                )
                job.done.set_result(report)
        self._finished.put(None)  # for the other threads of this stage

    def _write_tile(self, job: _Job) -> None:
        tile, placed = job.tile, self._tile(job)
        region = tile.region
        dtype = np.dtype(self._plan.c_dtype)
        with job.clock("write", "download") as moves:
            if self._plan.k_parts > 1:  # a sum over a part of k goes back to whoever adds them up
                dtype = accumulator_dtype(dtype)
                job.partial = np.empty(placed.shape, dtype)
                pieces = [
                    RegionWrite(piece, partial(_gathered, job.partial[piece]))
                    for piece in placed.pieces(slice(0, tile.rows), slice(0, tile.columns))
                ]
            else:
                pieces = region_writes(self._product.c, region)
            calls = [partial(self._unit.save, piece, placed, dtype) for piece in pieces]
            moves += run_all(self._writers, calls)
        if self._plan.k_parts == 1:
            job.stored_nbytes = stored_nbytes(self._product.c, region) or 0


def _gathered(out: np.ndarray, bands: Bands, fill: Fill | None) -> None:
    gather(out, bands)


def store_sum(product: Product, tile: Tile, parts: Sequence[np.ndarray]) -> int:
    """Store one tile as the sum of its parts over k, added in their order: the same bits every time.

    Returns the bytes that it takes up, as ``TileReport.stored_nbytes``. Raises CancelledError where the run is over,
    also between two pieces.
    """
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    region = tile.region
    with _engines_lock:
        _check_goes_on(product)
        _sums.setdefault(product.run, []).append(product.c)
    try:
        for piece in region_writes(product.c, region):
            with _engines_lock:
                _check_goes_on(product)
            piece.write([_rounded(total[piece.source], np.dtype(product.plan.c_dtype))])
    finally:
        with _engines_lock:
            _sums[product.run].pop()
            if not _sums[product.run]:
                del _sums[product.run]
            _sum_ended.notify_all()
    return stored_nbytes(product.c, region) or 0


def _pool(slots: list[Any]) -> queue.SimpleQueue[Any]:
    pool: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for slot in slots:
        pool.put(slot)
    return pool


_engines: dict[str, Engine] = {}
_ended: deque[str] = deque(maxlen=256)
"""Runs that are over: a task of one that was on its way when it was cancelled must not begin it again."""
_sums: dict[str, list[zarr.Array[Any]]] = {}
"""For each run its array C, as often as a sum is being stored there: no engine does that, and its end is waited for."""
_engines_lock = threading.Lock()
_sum_ended = threading.Condition(_engines_lock)


_stopped: dict[str, Engine] = {}
"""What is over here, and kept until no other worker copies from it any more."""


def engine_for(product: Product, worker: str, peers: Peers | None = None) -> Engine:
    """The engine of this process for the product's run, made on first use by the worker of that name.

    peers: its way to the others that share panels with it, if any do.
    """
    with _engines_lock:
        _check_goes_on(product)
        engine = _engines.get(product.run)
        if engine is None:
            engine = _engines[product.run] = Engine(product, worker, peers)
        return engine


def _check_goes_on(product: Product) -> None:
    if product.run in _ended:
        raise CancelledError(f"run {product.run} is over")


def is_over(run: str) -> bool:
    """Whether a run was ended in this process."""
    with _engines_lock:
        return run in _ended


def arrival_of(run: str, key: Key) -> Arrival | None:
    """How far a panel of a run has come in this process; None where it is not, or no longer."""
    engine = _engines.get(run)
    return engine.arrival(key) if engine is not None else None


def close_idle_engines() -> None:
    """Free what runs hold here that have no tile under way: those whose client died hold it for nobody.

    A run that lives and only pauses gets a new engine with its next tile. What another worker is copying just now lasts
    until it has closed it (seen on H200s: memory that another process has open outlives its owner), and is read from
    the files by that one instead.
    """
    with _engines_lock:
        idle = [run for run, engine in _engines.items() if engine.idle]
        engines = [_engines.pop(run) for run in idle]
        _stopped.clear()
    for engine in engines:
        engine.close()


def close_engines_writing(place: str, run: str) -> None:
    """End what any other run than this one still does for the array at that place, unwritten where that can be.

    For who has that array to himself: such a run's client died, and what its tiles are would be written over his.
    """
    with _engines_lock:
        arrays = {other: engine.product.c for other, engine in _engines.items()}
        arrays |= {other: under_way[0] for other, under_way in _sums.items()}
    others = {other: c for other, c in arrays.items() if other != run}
    # The dead client may have named the same folder otherwise: from where it stood, or by a link.
    ours = os.path.realpath(place)
    for other in [other for other, c in others.items() if os.path.realpath(place_of(c)) == ours]:
        close_engine(other, abandon=True)
        free_engine(other)


def close_engine(run: str, *, abandon: bool = False) -> None:
    """End this process's part in a run, if it has one: nothing of it is written any more when this returns.

    The buffers of an engine last until `free_engine`.
    """
    with _engines_lock:
        _ended.append(run)
        engine = _engines.pop(run, None)
        if engine is not None:
            _stopped[run] = engine
        _sum_ended.wait_for(lambda: run not in _sums)
    if engine is not None:
        engine.close(abandon=abandon)


def free_engine(run: str) -> None:
    """Free the buffers of an engine that was closed, once no other worker copies from them."""
    with _engines_lock:
        _stopped.pop(run, None)
