"""Read, upload, multiply, download, write: one worker's stages, overlapped, over buffers allocated once.

Each stage is a thread that takes work from the queue before it, so tiles pass through all stages in the order in
which they came and two tiles never wait for each other's buffers. While one tile is written, the next is
multiplied, and the panels of the one after it are read. Memory is bounded by the buffers, which the plan counted;
each stage keeps a clock of the time it was busy.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import zarr

from tilewright.kernels import matmul
from tilewright.pipeline.plan import BAND_BUFFERS, PANEL_BUFFERS, MatmulPlan, Tile
from tilewright.pipeline.store import region_reads, run_all, write_region

STAGES = ("read", "upload", "compute", "download", "write")


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


@dataclass(frozen=True)
class TileReport:
    """What one finished tile tells: nothing but numbers crosses the wire."""

    index: int
    worker: str
    seconds: float
    stages: dict[str, float]
    """Busy seconds of each stage for this tile."""


@dataclass
class _Job:
    tile: Tile
    done: Future[TileReport]
    started: float = field(default_factory=time.perf_counter)
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    error: BaseException | None = None
    target: Any = None
    """The tile of C on the device, once the first panel has come."""
    panels: int = 0
    """Panels multiplied so far."""

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.busy[stage] += time.perf_counter() - start


@dataclass(frozen=True)
class _Panel:
    """A panel of A and one of B under way; ``slot`` holds their bytes."""

    job: _Job
    depth: int
    slot: Any


@dataclass(frozen=True)
class _End:
    """Behind the last panel of a job."""

    job: _Job


class Unit(Protocol):
    """What multiplies: the buffers it works in and the moves between them. One method is called by one stage."""

    def panel_slots(self) -> list[Any]:
        """The slots that ``multiply`` reads; on the CPU they are also what the reader fills."""

    def tile_slots(self) -> list[Any]: ...

    def upload(self, staged: Any, slot: Any, rows: int, columns: int, depth: int) -> None: ...

    def multiply(self, slot: Any, rows: int, columns: int, depth: int, target: Any, accumulate: bool) -> None: ...

    def clear(self, target: Any, rows: int, columns: int) -> None: ...

    def download(self, target: Any, rows: int, columns: int, band: slice, staging: np.ndarray | None) -> np.ndarray:
        """Rows ``band`` of the tile as a host array; it may be a view of ``staging`` or of the tile itself."""


def accumulator_dtype(c_dtype: np.dtype) -> np.dtype:
    """The dtype in which a tile's panels are added up: float16 would be rounded again with every panel."""
    return np.dtype(np.float32) if c_dtype == np.float16 else c_dtype


@dataclass
class HostSlot:
    """One panel of A and one of B in host memory, flat, as large as the plan's largest."""

    a: np.ndarray
    b: np.ndarray


def _shapes(plan: MatmulPlan, rows: int, columns: int, depth: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes in which panels are stored: as the arrays lie in Zarr, so a transposed operand has sides swapped."""
    a = (depth, rows) if plan.transpose_a else (rows, depth)
    b = (columns, depth) if plan.transpose_b else (depth, columns)
    return a, b


def _shaped(flat: Any, shape: tuple[int, int]) -> Any:
    return flat[: shape[0] * shape[1]].reshape(shape)


class HostUnit:
    """The CPU: panels are multiplied where they were read."""

    def __init__(self, product: Product) -> None:
        self._product = product
        self._plan = product.plan

    def panel_slots(self) -> list[HostSlot]:
        return host_slots(self._plan, np.empty)

    def tile_slots(self) -> list[np.ndarray]:
        plan = self._plan
        dtype = accumulator_dtype(np.dtype(plan.c_dtype))
        return [np.empty(plan.tile_rows * plan.tile_columns, dtype) for _ in range(plan.c_buffers)]

    def upload(self, staged: HostSlot, slot: HostSlot, rows: int, columns: int, depth: int) -> None:
        raise AssertionError("panels on the host are multiplied where they lie")

    def multiply(
        self, slot: HostSlot, rows: int, columns: int, depth: int, target: np.ndarray, accumulate: bool
    ) -> None:
        plan = self._plan
        a_shape, b_shape = _shapes(plan, rows, columns, depth)
        matmul(
            _shaped(slot.a, a_shape),
            _shaped(slot.b, b_shape),
            out=_shaped(target, (rows, columns)),
            accumulate=accumulate,
            transpose_a=plan.transpose_a,
            transpose_b=plan.transpose_b,
            dtype=target.dtype,
            precision=self._product.precision,
            device="cpu",
        )

    def clear(self, target: np.ndarray, rows: int, columns: int) -> None:
        target[: rows * columns] = 0

    def download(
        self, target: np.ndarray, rows: int, columns: int, band: slice, staging: np.ndarray | None
    ) -> np.ndarray:
        return _shaped(target, (rows, columns))[band]


class CudaUnit:
    """One GPU: panels are staged in pinned memory; each stage that moves or multiplies has a stream of its own."""

    def __init__(self, product: Product) -> None:
        from numba import cuda

        self._product = product
        self._plan = product.plan
        self._cuda = cuda
        self._upload_stream = cuda.stream()
        self._compute_stream = cuda.stream()
        self._download_stream = cuda.stream()

    def pinned(self, size: int, dtype: np.dtype) -> np.ndarray:
        return self._cuda.pinned_array(max(size, 1), dtype)  # the driver gives no address for nothing

    def panel_slots(self) -> list[Any]:
        return host_slots(self._plan, self._allocate)

    def _allocate(self, size: int, dtype: np.dtype) -> Any:
        return self._cuda.device_array(max(size, 1), dtype)

    def tile_slots(self) -> list[Any]:
        plan = self._plan
        dtype = accumulator_dtype(np.dtype(plan.c_dtype))
        return [self._allocate(plan.tile_rows * plan.tile_columns, dtype) for _ in range(plan.c_buffers)]

    def upload(self, staged: HostSlot, slot: Any, rows: int, columns: int, depth: int) -> None:
        for source, target, shape in zip(
            (staged.a, staged.b), (slot.a, slot.b), _shapes(self._plan, rows, columns, depth), strict=True
        ):
            size = shape[0] * shape[1]
            if size:
                target[:size].copy_to_device(source[:size], stream=self._upload_stream)
        self._upload_stream.synchronize()  # the reader may refill the staging, and the panel may be multiplied

    def multiply(self, slot: Any, rows: int, columns: int, depth: int, target: Any, accumulate: bool) -> None:
        plan = self._plan
        a_shape, b_shape = _shapes(plan, rows, columns, depth)
        matmul(
            _shaped(slot.a, a_shape),
            _shaped(slot.b, b_shape),
            out=_shaped(target, (rows, columns)),
            accumulate=accumulate,
            transpose_a=plan.transpose_a,
            transpose_b=plan.transpose_b,
            dtype=target.dtype,
            precision=self._product.precision,
            device="cuda",
            stream=self._compute_stream,
        )
        self._compute_stream.synchronize()  # the panel's buffers may be overwritten

    def clear(self, target: Any, rows: int, columns: int) -> None:
        if rows * columns:
            target[: rows * columns].copy_to_device(np.zeros(rows * columns, target.dtype))

    def download(self, target: Any, rows: int, columns: int, band: slice, staging: np.ndarray | None) -> np.ndarray:
        assert staging is not None
        size = (band.stop - band.start) * columns
        part = target[band.start * columns : band.start * columns + size]
        part.copy_to_host(staging[:size], stream=self._download_stream)
        self._download_stream.synchronize()  # the bytes are about to be written
        return _shaped(staging, (band.stop - band.start, columns))


def host_slots(plan: MatmulPlan, allocate: Callable[[int, np.dtype], Any]) -> list[HostSlot]:
    """Panel slots as large as the plan's largest panels, from any allocator of flat arrays."""
    depth = min(plan.panel_depth, plan.k)
    return [
        HostSlot(
            allocate(plan.tile_rows * depth, np.dtype(plan.a_dtype)),
            allocate(depth * plan.tile_columns, np.dtype(plan.b_dtype)),
        )
        for _ in range(PANEL_BUFFERS)
    ]


class Engine:
    """The stages of one worker for one run. ``multiply`` may be called from several threads; ``close`` ends it."""

    def __init__(self, product: Product, worker: str) -> None:
        self._product = product
        self._worker = worker
        self._plan = plan = product.plan
        self._abandoned = False
        cuda_unit = CudaUnit(product) if product.device == "cuda" else None
        self._unit: Unit = cuda_unit or HostUnit(product)
        self._readers = ThreadPoolExecutor(product.read_threads, thread_name_prefix="tilewright-read")
        self._writers = ThreadPoolExecutor(product.write_threads, thread_name_prefix="tilewright-write")
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[_Panel | _End | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._panel_slots = _pool(self._unit.panel_slots())
        self._tile_slots = _pool(self._unit.tile_slots())
        self._band_rows = min(plan.c_unit[0], plan.tile_rows)
        stages = [self._read_stage, self._compute_stage, self._write_stage]
        if cuda_unit is not None:
            # The reader fills pinned staging, and the upload stage moves it into the unit's own slots.
            self._loaded: queue.SimpleQueue[_Panel | _End | None] = queue.SimpleQueue()
            self._staging_slots = _pool(host_slots(plan, cuda_unit.pinned))
            dtype = accumulator_dtype(np.dtype(plan.c_dtype))
            bands = [cuda_unit.pinned(self._band_rows * plan.tile_columns, dtype) for _ in range(BAND_BUFFERS)]
            self._bands: queue.SimpleQueue[np.ndarray] | None = _pool(bands)
            stages.append(self._upload_stage)
        else:
            self._loaded = self._filled
            self._staging_slots = self._panel_slots
            self._bands = None
        self._threads = [
            threading.Thread(target=stage, name=f"tilewright-{stage.__name__.strip('_')}", daemon=True)
            for stage in stages
        ]
        for thread in self._threads:
            thread.start()

    def multiply(self, tile: Tile) -> TileReport:
        """Compute and store one tile; returns when it is stored. Raises what the failing stage raised."""
        job = _Job(tile, Future())
        if self._abandoned:
            raise CancelledError
        self._jobs.put(job)
        return job.done.result()

    def close(self, *, abandon: bool = False) -> None:
        """End every stage behind the jobs under way; with ``abandon`` those stop at their next panel, unwritten."""
        self._abandoned = self._abandoned or abandon
        self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._readers.shutdown()
        self._writers.shutdown()

    def _read_stage(self) -> None:
        product, plan = self._product, self._plan
        while (job := self._jobs.get()) is not None:
            rows = slice(job.tile.row_start, job.tile.row_stop)
            columns = slice(job.tile.column_start, job.tile.column_stop)
            for start, stop in plan.panels():
                if self._abandoned:
                    job.error = CancelledError()
                if job.error is not None:
                    break
                slot = self._staging_slots.get()
                inner = slice(start, stop)
                a_shape, b_shape = _shapes(plan, job.tile.rows, job.tile.columns, stop - start)
                try:
                    with job.clock("read"):
                        a_region = (inner, rows) if plan.transpose_a else (rows, inner)
                        b_region = (columns, inner) if plan.transpose_b else (inner, columns)
                        reads = region_reads(product.a, a_region, _shaped(slot.a, a_shape))
                        reads += region_reads(product.b, b_region, _shaped(slot.b, b_shape))
                        run_all(self._readers, reads)
                except BaseException as error:
                    job.error = error
                    self._staging_slots.put(slot)
                    break
                self._filled.put(_Panel(job, stop - start, slot))
            self._filled.put(_End(job))
        self._filled.put(None)

    def _upload_stage(self) -> None:
        while (item := self._filled.get()) is not None:
            if isinstance(item, _End):
                self._loaded.put(item)
                continue
            job, slot = item.job, self._panel_slots.get()
            try:
                with job.clock("upload"):
                    self._unit.upload(item.slot, slot, job.tile.rows, job.tile.columns, item.depth)
            except BaseException as error:
                job.error = error
            self._staging_slots.put(item.slot)
            self._loaded.put(_Panel(job, item.depth, slot))
        self._loaded.put(None)

    def _compute_stage(self) -> None:
        while (item := self._loaded.get()) is not None:
            job, tile = item.job, item.job.tile
            if job.target is None:
                job.target = self._tile_slots.get()
            try:
                if isinstance(item, _End):
                    if job.panels == 0:  # k = 0: the empty sum
                        self._unit.clear(job.target, tile.rows, tile.columns)
                elif job.error is None:
                    with job.clock("compute"):
                        self._unit.multiply(
                            item.slot, tile.rows, tile.columns, item.depth, job.target, accumulate=job.panels > 0
                        )
                    job.panels += 1
            except BaseException as error:
                job.error = error
            if isinstance(item, _Panel):
                self._panel_slots.put(item.slot)
            else:
                self._finished.put(job)
        self._finished.put(None)

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
                job.done.set_result(TileReport(job.tile.index, self._worker, seconds, dict(job.busy)))

    def _write_tile(self, job: _Job) -> None:
        tile, c = job.tile, self._product.c
        unit_columns = self._plan.c_unit[1]
        for start in range(0, tile.rows, self._band_rows):
            band = slice(start, min(start + self._band_rows, tile.rows))
            staging = self._bands.get() if self._bands is not None else None
            try:
                with job.clock("download"):
                    data = self._unit.download(job.target, tile.rows, tile.columns, band, staging)
                rows = slice(tile.row_start + band.start, tile.row_start + band.stop)
                writes: list[Callable[[], None]] = []
                for column in range(0, tile.columns, unit_columns):
                    part = slice(column, min(column + unit_columns, tile.columns))
                    columns = slice(tile.column_start + part.start, tile.column_start + part.stop)
                    piece = data[:, part].astype(c.dtype, copy=False)
                    writes.append(partial(write_region, c, (rows, columns), piece))
                with job.clock("write"):
                    run_all(self._writers, writes)
            finally:
                if self._bands is not None and staging is not None:
                    self._bands.put(staging)


def _pool(slots: list[Any]) -> queue.SimpleQueue[Any]:
    pool: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for slot in slots:
        pool.put(slot)
    return pool


_engines: dict[str, Engine] = {}
_ended: set[str] = set()
"""Runs that are over: a task of one that was on its way when it was cancelled must not begin it again."""
_engines_lock = threading.Lock()


def engine_for(product: Product, worker: str) -> Engine:
    """The engine of this process for the product's run, made on first use by the worker of that name."""
    with _engines_lock:
        if product.run in _ended:
            raise CancelledError(f"run {product.run} is over")
        engine = _engines.get(product.run)
        if engine is None:
            engine = _engines[product.run] = Engine(product, worker)
        return engine


def close_engine(run: str, *, abandon: bool = False) -> None:
    """End this process's engine of a run and free its buffers; nothing happens where there is none."""
    with _engines_lock:
        _ended.add(run)
        engine = _engines.pop(run, None)
    if engine is not None:
        engine.close(abandon=abandon)
