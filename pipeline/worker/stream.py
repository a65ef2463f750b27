"""Load, multiply, write: one worker's stages, overlapped, over buffers allocated once.

Each stage takes work from the queue before it: one thread loads, one multiplies, and one for each buffer of C writes.
So tiles are loaded and multiplied in the order in which they came, and two tiles never wait for each other's buffers.
While tiles are written, the next is multiplied, and the panels of the one after it are read. Loading and writing use
pools of threads that each move one part at a time, on a GPU through a pinned lane. Memory is bounded by the buffers,
which the plan counted; each stage records the time it was busy.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import zarr

from tilewright.pipeline.events import Span
from tilewright.pipeline.plan.facts import Sharers
from tilewright.pipeline.plan.inputs import accumulator_dtype
from tilewright.pipeline.plan.layout import Lines
from tilewright.pipeline.plan.product import Tile
from tilewright.pipeline.plan.told import NOTHING_FOUND, STAGES, THREADS, Found, Product, TileReport
from tilewright.pipeline.store.arrays import as_stored_matrix
from tilewright.pipeline.store.region_write import (
    Bands,
    FillFile,
    RegionWrite,
    gather,
    region_writes,
    stored_nbytes_of,
)
from tilewright.pipeline.store.sessions import changes_in, own_copy
from tilewright.pipeline.store.waiting import read_while
from tilewright.pipeline.threads import run_all, submitted
from tilewright.pipeline.tracebacks import clear_frames
from tilewright.pipeline.worker.gpu_unit import CudaUnit
from tilewright.pipeline.worker.loading import Loading, LoadsUnderWay, Move, load_all
from tilewright.pipeline.worker.panels import Buffer, PanelCache, Placed, shape_of
from tilewright.pipeline.worker.peers import (
    Arrival,
    Exchange,
    Foreign,
    Key,
    Part,
    Peers,
    parts_of,
    tell,
)
from tilewright.pipeline.worker.units import HostUnit, Look, SharedMemory, Unit, pool_of

logger = logging.getLogger(__name__)

PANELS_COMING = 4
"""Panels of A, and of B, that a worker loads at once where it has buffers for them: its threads read on while it asks
other workers for parts of earlier panels."""
PANELS_TAKEN = 2
"""For how many of these at once it waits for other workers' answers, which take longer than the copies."""


@dataclass
class _Job:
    tile: Tile
    part: int
    sharers: Sharers
    done: Future[TileReport]
    started: float = field(default_factory=time.perf_counter)
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """A thread of ``THREADS``, and the begin and end of a time it was busy, in seconds since the epoch."""
    error: BaseException | None = None
    target: Any = None
    """The tile of C on the device, once the first panel has come."""
    panels: int = 0
    """Panels multiplied so far."""
    kernels: frozenset[str] = frozenset()
    """Names of the kernels that multiplied them."""
    look: Look | None = None
    """At what it multiplies, once it has a tile."""
    partial: np.ndarray | None = None
    read_nbytes: int = 0
    shared_nbytes: int = 0
    stored_nbytes: int = 0
    found: Found = NOTHING_FOUND
    changes: bytes | None = None

    @contextmanager
    def clock(self, store_stage: str, device_stage: str) -> Iterator[list[Move]]:
        """Count the block's time for two stages, in proportion to what its threads spent in each."""
        moves: list[Move] = []
        clock = _Clock()
        try:
            yield moves
        finally:
            self.count(store_stage, device_stage, clock, moves)

    def count(self, store_stage: str, device_stage: str, clock: _Clock, moves: Sequence[Move]) -> None:
        """The same for the time since the clock was started."""
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
    """A panel of A and one of B, to be multiplied for a job."""

    job: _Job
    depth: int
    a: Buffer
    b: Buffer


@dataclass(frozen=True)
class _First:
    """The worker's first panels, which are still being read: what will multiply them can be made ready."""

    panel: _Panel

    @property
    def job(self) -> _Job:
        return self.panel.job


@dataclass
class _Running:
    """A pair of panels being multiplied, or enqueued behind the one before."""

    panel: _Panel
    clock: _Clock
    wait: Callable[[], None] | None
    """Waits until they are multiplied; None where nothing is pending."""
    ends: bool = False
    """Whether they are the last of their job."""


@dataclass(frozen=True)
class _End:
    """Behind the last panel of a job."""

    job: _Job


@dataclass(frozen=True)
class _Coming:
    """Panels being read, or queued to be, and the jobs that end behind them."""

    panel: _Panel
    missing: list[tuple[PanelCache, Key]]
    """The panels being read: cache and key of each; empty where both are held already."""
    arrivals: list[Arrival]
    """Their arrivals, which other workers may wait for."""
    brought: Callable[[], _Brought]
    """Waits until both panels are whole; raises what reading raised."""
    clock: _Clock = field(default_factory=_Clock)
    ends: list[_End] = field(default_factory=list)


@dataclass(frozen=True)
class _Brought:
    """What it took to bring panels. The bytes of this worker's own parts are counted when reading begins, not here."""

    moves: list[Move] = field(default_factory=list)
    """Of everything, own parts included."""
    read_nbytes: int = 0
    """Bytes read here because the workers whose parts they are did not have them."""
    shared_nbytes: int = 0
    """Bytes copied from other workers."""


@dataclass(frozen=True)
class _Foreign:
    """A part of a panel that another worker reads, and the way to read it here after all."""

    wanted: Foreign
    loading: Callable[[], Loading]


def _part_nbytes(part: Part, array: zarr.Array[Any]) -> int:
    return (part[1] - part[0]) * (part[3] - part[2]) * array.dtype.itemsize


class _Operand:
    """A or B: the array it is read from, its panels held, and how they lie in memory."""

    def __init__(self, name: str, array: zarr.Array[Any], cache: PanelCache, lines: Lines) -> None:
        self.name, self.array, self.cache, self.lines = name, array, cache, lines
        stored = as_stored_matrix(array)
        self.unit = (1, stored.unit[1]) if stored.plain else stored.unit
        """Rows and columns of what is read as one piece; a single row of a chunk that needs no decoding."""
        self._exported: dict[int, bytes | None] = {}

    def placed(self, buffer: Buffer, shape: tuple[int, int]) -> Placed:
        return Placed(buffer.flat, shape, self.lines)

    def exported(self, buffer: Buffer, memory: SharedMemory) -> bytes | None:
        """The handle by which other workers open a buffer, or None. Cached, since it takes a call to the driver."""
        if id(buffer) not in self._exported:
            try:
                self._exported[id(buffer)] = memory.export(buffer.flat)
            except Exception as error:  # others can read the same bytes from the files
                logger.warning("panels cannot be given to other workers: %s: %s", type(error).__name__, error)
                self._exported[id(buffer)] = None
        return self._exported[id(buffer)]


@dataclass(frozen=True)
class _Sharing:
    """How a worker gets panels from others, in a run that shares them."""

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
        self.failed = False
        """Whether a tile has failed or was abandoned."""
        self._entrance = threading.Lock()
        """Held while a job is queued or the queue is closed: a job behind the end marker would never be answered."""
        self._multiplied = 0.0
        """When the last panels were multiplied."""
        self._unit: Unit = CudaUnit(product) if product.device == "cuda" else HostUnit(product)
        try:
            self._sharing: _Sharing | None = None
            if peers is not None and self._unit.shared is not None:
                self._sharing = _Sharing(Exchange(peers, product.run), self._unit.shared)
            plan = product.plan
            self._readers = ThreadPoolExecutor(
                plan.read_threads, "tilewright-read", initializer=read_while, initargs=(self._check_goes_on,)
            )
            self._writers = ThreadPoolExecutor(plan.write_threads, thread_name_prefix="tilewright-write")
            self._takers = ThreadPoolExecutor(PANELS_TAKEN, thread_name_prefix="tilewright-take")
            self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
            self._loaded: queue.SimpleQueue[_First | _Panel | _End | None] = queue.SimpleQueue()
            self._finished: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
            layout = self._layout = plan.layout
            allocate = self._unit.allocate
            a_size = layout.a_size(plan.tile_rows, min(plan.panel_depth, plan.k))
            b_size = layout.b_size(plan.tile_columns, min(plan.panel_depth, plan.k))
            self._a_panels = PanelCache(plan.a_buffers, partial(allocate, a_size, np.dtype(plan.a_dtype)))
            self._b_panels = PanelCache(plan.b_buffers, partial(allocate, b_size, np.dtype(plan.b_dtype)))
            self._operands = (
                _Operand("a", product.a, self._a_panels, layout.a()),
                _Operand("b", product.b, self._b_panels, layout.b()),
            )
            self._tile_slots = pool_of(self._unit.tile_slots())
        except BaseException:
            self._unit.close()  # returns its pinned lanes, for the next attempt
            raise
        self._threads = [
            threading.Thread(target=stage, name=f"tilewright-{stage.__name__.strip('_')}", daemon=True)
            # As many threads write as there are tile buffers, so that at the end all tiles are written at once.
            for stage in (self._load_stage, self._compute_stage, *[self._write_stage] * plan.c_buffers)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # no thread left: those that started would wait for ever
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            self.close()
            self.free()
            raise

    def multiply(self, tile: Tile, part: int = 0, sharers: Sharers | None = None) -> TileReport:
        """Compute and store one tile, or return its sum over one part of k when the plan has several.

        sharers: workers that need the same panels and may have them already. Returns when the tile is stored. Raises
        what the failing stage raised.
        """
        job = _Job(tile, part, sharers or Sharers(), Future())
        with self._entrance:
            if self._closed:
                raise CancelledError("this worker's part in the run is over")
            self._jobs.put(job)
        try:
            return job.done.result()
        finally:
            del job  # it holds its error, and that this frame

    @property
    def product(self) -> Product:
        """The product this engine works on."""
        return self._product

    def arrival(self, key: Key) -> Arrival | None:
        """The arrival of a panel here, for another worker; None if it is not, or no longer, here."""
        buffer = self._operands[key[0] == "b"].cache.find(key)
        return buffer.arrival if buffer is not None else None

    def close(self, *, abandon: bool = False) -> None:
        """End every stage after the jobs already queued; with ``abandon`` those stop at their next panel, unwritten,
        and wait no longer for what a store has not answered.

        It may be called repeatedly and concurrently: each call returns when all has ended, and one that abandons does
        so for all. The buffers last until `free`, for other workers that still copy from them.
        """
        self._abandoned = self._abandoned or abandon
        with self._entrance:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        for pool in (self._readers, self._writers, self._takers):
            pool.shutdown()
        self._unit.close()

    def free(self) -> None:
        """Let go of the buffers of a closed engine; call it from a thread that is attached to the GPU.

        The engine itself may live on, since the error of a tile holds frames that refer to it.
        """
        self._a_panels.free()
        self._b_panels.free()
        while not self._tile_slots.empty():
            self._tile_slots.get()

    def _check_goes_on(self) -> None:
        if self._abandoned:
            raise CancelledError("this worker's part in the run was given up")

    def _load_stage(self) -> None:
        # Reading goes on with the next panels while the last blocks of earlier ones are still being sent, or parts of
        # them are fetched from other workers: half a panel's time would be lost otherwise.
        coming: deque[_Coming] = deque()
        begun = False
        while True:
            while coming and self._jobs.empty():
                self._hand_on(coming.popleft())
            if (job := self._jobs.get()) is None:
                break
            if self._sharing is not None:
                try:
                    self._close_unreached(self._sharing, job)
                except BaseException as error:
                    job.error = error  # if this thread ended, no tile would ever be answered
            for start, stop in self._plan.panels(job.part):
                while coming and not self._may_begin(coming, job.tile, start):
                    self._hand_on(coming.popleft())
                if self._abandoned:
                    job.error = CancelledError()
                if job.error is not None:
                    break
                try:
                    coming.append(self._begin(job, start, stop))
                    if not begun:
                        begun = True
                        self._loaded.put(_First(coming[-1].panel))
                except BaseException as error:
                    job.error = error
                    break
            if coming:
                coming[-1].ends.append(_End(job))
            else:
                self._loaded.put(_End(job))
        while coming:
            self._hand_on(coming.popleft())
        self._loaded.put(None)

    def _may_begin(self, coming: Sequence[_Coming], tile: Tile, start: int) -> bool:
        """Whether these panels can begin while others are still coming. Each must have a buffer without waiting, and
        must not itself be coming: it would be used before it is whole."""
        wanted = [(self._a_panels, ("a", tile.i, start))]
        if not self._plan.on_diagonal(tile):
            wanted.append((self._b_panels, ("b", tile.j, start)))
        return len(coming) < PANELS_COMING and all(
            place[0].ready(place[1]) and not any(place in one.missing for one in coming) for place in wanted
        )

    def _begin(self, job: _Job, start: int, stop: int) -> _Coming:
        """Start reading the panels of A and B over a range of k, unless they are held already."""
        plan, tile = self._plan, job.tile
        rows, columns = tile.region
        inner = slice(start, stop)
        a_region = (inner, rows) if plan.transpose_a else (rows, inner)
        b_region = (columns, inner) if plan.transpose_b else (inner, columns)
        # On the diagonal of a symmetric C one panel is both: A's, since the operands are one array.
        operands = self._operands[:1] if plan.on_diagonal(tile) else self._operands
        loadings: list[Loading] = []
        taken: list[Buffer] = []
        missing: list[tuple[PanelCache, Key]] = []
        arrivals: list[Arrival] = []
        foreign: list[_Foreign] = []
        try:
            for operand, place, region, sharers in zip(
                operands,
                (tile.i, tile.j),
                (a_region, b_region),
                (job.sharers.a, job.sharers.b),
                strict=False,
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
                    # Also where all of the panel is read here: other workers must not wait for the other panel of the
                    # pair, or for earlier ones.
                    given = buffer.arrival.exported is not None
                    loadings.append(replace(loading, there=buffer.arrival.own_there if given else None))
            bring = partial(self._bring, job, LoadsUnderWay(self._readers, loadings), foreign, arrivals)
            brought: Callable[[], _Brought] = bring
            if foreign:
                # Other workers' answers take time: meanwhile this thread waits for earlier panels.
                with suppress(RuntimeError):  # no thread left: they are asked later, in `_hand_on`
                    brought = submitted(self._takers, bring).result
        except BaseException:
            self._give_back(taken, missing, arrivals)
            raise
        return _Coming(_Panel(job, stop - start, taken[0], taken[-1]), missing, arrivals, brought)

    def _shared_out(
        self, operand: _Operand, key: Key, region: tuple[slice, slice], buffer: Buffer, sharers: Sequence[str]
    ) -> tuple[Part | None, list[_Foreign]]:
        """The part of a panel that this worker reads, if any, and the parts that it asks other workers for."""
        shape = shape_of(region)
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
        arrival.exported = exported  # last: from here on others may copy it
        return own, others

    def _loading(self, operand: _Operand, region: tuple[slice, slice], part: Part, buffer: Buffer) -> Loading:
        """The loading of one part of a panel, whose whole is ``region`` of an operand."""
        top, bottom, left, right = part
        rows, columns = region
        inner = (
            slice(rows.start + top, rows.start + bottom),
            slice(columns.start + left, columns.start + right),
        )
        panel = operand.placed(buffer, shape_of(region))
        return self._unit.loading(operand.array, inner, panel, (top, left))

    def _give_back(
        self,
        taken: Sequence[Buffer],
        missing: Sequence[tuple[PanelCache, Key]],
        arrivals: Sequence[Arrival],
    ) -> None:
        """Release the buffers of panels that will not come."""
        for cache, key in missing:
            cache.discard(key)
        for arrival in arrivals:
            tell(arrival.own_there, False)
            tell(arrival.whole, False)
        self._let_go(taken)

    def _let_go(self, taken: Sequence[Buffer]) -> None:
        """Release a panel of A, and one of B unless that is the same."""
        for cache, buffer in zip((self._a_panels, self._b_panels), dict.fromkeys(taken), strict=False):
            cache.let_go(buffer)

    def _close_unreached(self, sharing: _Sharing, job: _Job) -> None:
        """Close other workers' memory, except that of sharers which this tile names and which are not lost. A lost
        worker's GPU memory becomes free for its successor only when nobody has it open."""
        sharing.memory.close(keep=frozenset((*job.sharers.a, *job.sharers.b)) - sharing.exchange.lost)

    def _bring(
        self, job: _Job, loads: LoadsUnderWay, foreign: Sequence[_Foreign], arrivals: Sequence[Arrival]
    ) -> _Brought:
        """Wait until panels are whole: own parts read, the others copied from other workers or, failing that, read
        here."""
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
            moves.append(Move(0.0, time.perf_counter() - start))
            if left:
                moves += load_all(self._readers, [one.loading() for one in foreign if one.wanted in left])
            read = sum(one.nbytes for one in left)
            shared = sum(one.wanted.nbytes for one in foreign) - read
        for arrival in arrivals:
            tell(arrival.own_there, True)
            tell(arrival.whole, True)
        return _Brought(moves, read, shared)

    def _hand_on(self, coming: _Coming) -> None:
        """Wait for panels, then pass them and the jobs that end behind them to the compute stage."""
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
        # which must reacquire the interpreter's lock whenever it has slept.
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
                    self._finish(running)  # the slot may have to come from the tile of these panels
                    running = None
                job.target = self._tile_slots.get()
                job.look = self._unit.look(job.target)
            if isinstance(item, _First):
                self._prepare(item.panel)
                continue
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

    def _look_at(self, panel: _Panel) -> None:
        """Look at those of its panels that this tile looks at for all tiles."""
        job = panel.job
        looks = self._plan.looks(job.tile)
        for operand, placed in enumerate(self._placed(panel)[:2]):
            if job.look is not None and looks[operand] and self._product.look[operand]:
                job.look.at_panel(operand, placed)

    def _tile(self, job: _Job) -> Placed:
        """The tile of C that a job adds into."""
        return Placed(job.target, (job.tile.rows, job.tile.columns), self._layout.c())

    def _placed(self, panel: _Panel) -> tuple[Placed, Placed, Placed]:
        """A panel of A and one of B, and the tile they are multiplied into."""
        a, b = self._operands
        tile = panel.job.tile
        return (
            a.placed(panel.a, self._layout.a_shape(tile.rows, panel.depth)),
            b.placed(panel.b, self._layout.b_shape(tile.columns, panel.depth)),
            self._tile(panel.job),
        )

    def _prepare(self, panel: _Panel) -> None:
        """Get the kernels ready while the first panels are read: compiling takes seconds, loading tens of ms."""
        clock = _Clock()
        try:
            self._unit.prepare(*self._placed(panel))
        except BaseException as error:
            panel.job.error = panel.job.error or error
        panel.job.count("compute", "compute", clock, ())
        self._multiplied = time.perf_counter()

    def _enqueue(self, panel: _Panel) -> _Running:
        """Enqueue the product of a panel of A and one of B, unless the job has failed."""
        job, clock = panel.job, _Clock()
        wait = None
        if job.error is None:
            try:
                try:
                    job.kernels |= self._unit.multiply(*self._placed(panel), accumulate=job.panels > 0)
                    job.panels += 1
                    self._look_at(panel)
                finally:
                    wait = self._unit.passed()  # what was enqueued before an error still reads the panels
            except BaseException as error:
                job.error = error
        return _Running(panel, clock, wait)

    def _finish(self, running: _Running) -> None:
        """Wait until panels are multiplied, release them, and pass the job on if they were its last."""
        panel, job = running.panel, running.panel.job
        try:
            if running.wait is not None:
                running.wait()
        except BaseException as error:
            job.error = job.error or error
        late = max(0.0, self._multiplied - running.clock.start)  # the panels before ran until then
        clock = _Clock(running.clock.begin + late, running.clock.start + late)
        job.count("compute", "compute", clock, ())
        self._multiplied = time.perf_counter()
        self._let_go((panel.a, panel.b))
        if running.ends:
            self._finished.put(job)

    def _write_stage(self) -> None:
        while (job := self._finished.get()) is not None:
            if job.error is None:
                try:
                    self._write_tile(job)
                except BaseException as error:
                    job.error = error
            if job.error is not None and job.look is not None:
                with suppress(Exception):  # a GPU that is lost looks at nothing any more
                    job.look.settle()
            self._tile_slots.put(job.target)
            job.target = job.look = None
            if job.error is not None:
                self._fail(job, job.error)
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
                    job.found,
                    job.stored_nbytes,
                    job.changes,
                )
                job.done.set_result(report)
        self._finished.put(None)  # for the other threads of this stage

    def _fail(self, job: _Job, error: BaseException) -> None:
        """Answer that a tile has failed. What the frames of its error hold, buffers among it, is let go of here: nobody
        knows how long the error lives, and Dask ties it up in a cycle of references."""
        self.failed = True
        job.error = None
        with suppress(Exception):  # a GPU that is lost has no memory to free
            self._unit.attach()
        clear_frames(error)
        job.done.set_exception(error)

    def _write_tile(self, job: _Job) -> None:
        tile, placed, look = job.tile, self._tile(job), job.look
        assert look is not None, "a job has one from when it has a tile"
        region, *mirrored = self._plan.regions(tile)
        dtype = np.dtype(self._plan.c_dtype)
        c = own_copy(self._product.c)
        with job.clock("write", "download") as moves:
            if self._plan.on_diagonal(tile):
                self._unit.mirror(placed, swap=False)
            if self._plan.k_parts > 1:  # a sum over a part of k is returned, to be added up by another task
                dtype = accumulator_dtype(dtype)
                job.partial = np.empty(placed.shape, dtype)
                pieces = [
                    RegionWrite(piece, partial(_gathered, job.partial[piece]))
                    for piece in placed.pieces(slice(0, tile.rows), slice(0, tile.columns))
                ]
            else:
                pieces = region_writes(c, region, self._product.drafts)
            if self._plan.k_parts == 1 and self._product.look[2]:  # else the sum of all parts is looked at
                look.at_tile(placed)
            calls = [partial(self._unit.save, piece, placed, dtype) for piece in pieces]
            moves += run_all(self._writers, calls)
            job.found = look.found(times=1 + len(mirrored))
            if mirrored and self._plan.k_parts == 1:
                # The buffer holds a square, whose last rows are nobody's where the tile is cut short by C.
                square = Placed(placed.flat, (tile.columns, tile.columns), placed.lines)
                self._unit.mirror(square, swap=True)
                pieces = region_writes(c, mirrored[0], self._product.drafts)
                moves += run_all(
                    self._writers, [partial(self._unit.save, piece, square, dtype) for piece in pieces]
                )
        if self._plan.k_parts == 1:
            job.stored_nbytes = stored_nbytes_of(c, self._plan.regions(tile)) or 0
            job.changes = changes_in(c)


def _gathered(out: np.ndarray, bands: Bands, fill: FillFile | None) -> None:
    gather(out, bands)
