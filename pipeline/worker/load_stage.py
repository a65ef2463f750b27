"""The load stage: brings panels of A and of B into buffers, from the store or from other workers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue

import numpy as np

from tilewright.pipeline.plan.grid import Tile
from tilewright.pipeline.plan.memory import Lines
from tilewright.pipeline.plan.told import Corners, Product
from tilewright.pipeline.store.arrays import as_stored_matrix
from tilewright.pipeline.store.content import panel_content
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.waiting import read_while
from tilewright.pipeline.threads import results_of, run_all, submitted
from tilewright.pipeline.worker.panels import (
    Arrival,
    PanelBuffer,
    PanelCache,
    PanelKey,
    PanelPart,
    Placed,
    ReadContent,
    part_nbytes,
    shape_of,
    tell,
)
from tilewright.pipeline.worker.peers import Exchange, PanelSharing, Peers, RemotePart
from tilewright.pipeline.worker.tile_job import (
    Clock,
    FirstPair,
    JobEnd,
    Loaded,
    PanelPair,
    ReadPanel,
    TileJob,
)
from tilewright.pipeline.worker.units import DeviceUnit, Loading, Move, parts_read

PANELS_COMING = 4
"""Panels of A, and of B, that a worker loads at once where it has buffers for them: its threads read on while it asks
other workers for parts of earlier panels."""
PANELS_SOON = 4
"""How far ahead a panel is that this worker is about to begin, so that others wait for it."""
PANELS_TAKEN = 2
"""For how many of these at once it waits for other workers' answers, which take longer than the copies."""
PAIRS_MULTIPLIED = 2
"""How many pairs of panels a GPU has at least before it is said to want for them: the one that is multiplied, and the
one enqueued behind it."""


class PanelSource:
    """A or B: the array it is read from, its panels held, and how they lie in memory."""

    def __init__(self, name: str, array: StoredArray, cache: PanelCache, lines: Lines) -> None:
        self.name, self.array, self.cache, self.lines = name, array, cache, lines
        stored = as_stored_matrix(array)
        self.unit = (1, stored.unit[1]) if stored.plain else stored.unit
        """Rows and columns of what is read as one piece; a single row of a chunk that needs no decoding."""


@dataclass(frozen=True)
class _Missing:
    """A panel that is being loaded, and its arrival, which other workers may wait for."""

    cache: PanelCache
    key: PanelKey
    arrival: Arrival
    panel: ReadPanel
    hashes: list[tuple[Corners, int]] | None = None
    """As ``Loading.hashes``, where all of the panel is read here."""


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
class _Coming:
    """A pair of panels being read, or queued to be, and the jobs that end behind it."""

    pair: PanelPair
    missing: list[_Missing]
    """Those of the two that are being read; empty where both are held already."""
    brought: Callable[[], _Brought]
    """Waits until both panels are whole; raises what reading raised."""
    clock: Clock = field(default_factory=Clock)
    ends: list[JobEnd] = field(default_factory=list)


class LoadStage:
    """Loads the panels of one job after the other, each in the order of k, on one thread and a pool of readers.

    worker: this one's address; peers: the connection to workers that share panels with it, if any do.
    """

    def __init__(self, product: Product, unit: DeviceUnit, worker: str, peers: Peers | None) -> None:
        plan = self._plan = product.plan
        self._unit = unit
        self._abandoned = False
        self._next: tuple[Tile, int] | None = None
        """The tile whose panels are loaded, and where along k the next of them begins."""
        self._queued: deque[Tile] = deque()
        self._begun = False
        """Whether a tile has come."""
        self._handed_on = 0
        """Pairs that were passed on and are not multiplied yet."""
        self._counting = threading.Lock()
        self.sharing: PanelSharing | None = None
        if peers is not None and unit.shared is not None:
            self.sharing = PanelSharing(Exchange(peers, product.run), unit.shared, worker)
        self._readers = ThreadPoolExecutor(
            plan.read_threads, "tilewright-read", initializer=read_while, initargs=(self._check_goes_on,)
        )
        self._takers = ThreadPoolExecutor(PANELS_TAKEN, thread_name_prefix="tilewright-take")
        layout, depth = plan.layout, min(plan.panel_depth, plan.k)
        a_buffer = partial(unit.allocate, layout.a_size(plan.tile_rows, depth), np.dtype(plan.a_dtype))
        b_buffer = partial(unit.allocate, layout.b_size(plan.tile_columns, depth), np.dtype(plan.b_dtype))
        self.sources = (
            PanelSource("a", product.a, PanelCache(plan.a_buffers, a_buffer), layout.a()),
            PanelSource("b", product.b, PanelCache(plan.b_buffers, b_buffer), layout.b()),
        )

    def run(self, jobs: SimpleQueue[TileJob | None], loaded: SimpleQueue[Loaded | None]) -> None:
        """Load the panels of each job and pass them on, and the job's end after them, until None has come; pass that on
        too."""
        # Reading goes on with the next panels while the last blocks of earlier ones are still being sent, or parts of
        # them are fetched from other workers: half a panel's time would be lost otherwise.
        coming: deque[_Coming] = deque()
        begun = False
        while True:
            while coming and jobs.empty():
                self._hand_on(coming.popleft(), loaded)
            if (job := jobs.get()) is None:
                break
            self._next = job.tile, -1
            self._queued.popleft()
            if self.sharing is not None:
                try:
                    self.sharing.close_unreached(job.sharers)
                except BaseException as error:
                    job.error = error  # if this thread ended, no tile would ever be answered
            panels = list(self._plan.panels(job.part))
            for place, (start, stop) in enumerate(panels):
                self._next = job.tile, start
                while coming and not self._may_begin(coming, job.tile, start):
                    self._hand_on(coming.popleft(), loaded)
                if self._abandoned:
                    job.error = CancelledError()
                if job.error is not None:
                    break
                try:
                    coming.append(self._begin(job, start, stop, len(panels) - place - 1))
                    if not begun:
                        begun = True
                        loaded.put(FirstPair(coming[-1].pair))
                except BaseException as error:
                    job.error = error
                    break
            self._next = None
            if coming:
                coming[-1].ends.append(JobEnd(job))
            else:
                loaded.put(JobEnd(job))
        while coming:
            self._hand_on(coming.popleft(), loaded)
        loaded.put(None)

    def release(self, pair: PanelPair) -> None:
        """Let the buffers of a pair be reused that is multiplied, or will not be. Callable from any thread."""
        with self._counting:
            self._handed_on -= 1
        self._let_go((pair.a, pair.b))

    def arrival(self, key: PanelKey) -> Arrival | None:
        """The arrival of a panel here, for another worker; None if it is not, or no longer, here."""
        buffer = self.sources[key[0] == "b"].cache.find(key)
        return buffer.arrival if buffer is not None else None

    def expect(self, tile: Tile) -> None:
        """Note a tile whose job is about to be queued."""
        self._queued.append(tile)
        self._begun = True

    def expects(self, key: PanelKey) -> bool:
        """Whether a panel is about to be begun: for the tile whose panels are being loaded, or for the one after it. As
        far as it is known: before any tile has come, it may be."""
        if self._abandoned or not self._begun:
            return not self._abandoned
        ahead: list[tuple[Tile, int, int]] = []
        soon = PANELS_SOON * self._plan.panel_depth
        if (at := self._next) is not None:
            tile, start = at
            ahead.append((tile, start, max(0, start) + soon))
            soon -= self._plan.k - max(0, start)
        if soon > 0:
            with suppress(IndexError):
                ahead.append((self._queued[0], -1, soon))
        return any(
            wanted[:2] == key[:2] and start <= key[2] < stop
            for tile, start, stop in ahead
            for _, wanted in self._wanted(tile, start)
        )

    def abandon(self) -> None:
        """Fail every job at its next panel, and wait no longer for what a store has not answered."""
        self._abandoned = True

    def close(self) -> None:
        """End the pools' threads; to be called once `run` has returned. The buffers last until `free`."""
        self._readers.shutdown()
        self._takers.shutdown()

    def free(self) -> None:
        for source in self.sources:
            source.cache.free()

    def _check_goes_on(self) -> None:
        if self._abandoned:
            raise CancelledError("this worker's part in the run was given up")

    def _wanted(self, tile: Tile, start: int) -> Iterator[tuple[PanelSource, PanelKey]]:
        """The panels of A and of B from ``start`` on that a tile needs."""
        a, b = self.sources
        yield a, (a.name, tile.i, start)
        # On the diagonal of a symmetric C one panel is both: A's, since the operands are one array.
        if not self._plan.on_diagonal(tile):
            source = a if self._plan.shares_panels else b
            yield source, (source.name, tile.j, start)

    @staticmethod
    def _holds(source: PanelSource, key: PanelKey) -> bool:
        return source.cache.find(key) is not None

    def _may_begin(self, coming: Sequence[_Coming], tile: Tile, start: int) -> bool:
        """Whether these panels can begin while others are still coming. Each must have a buffer without waiting, and
        must not itself be coming: it would be used before it is whole."""
        reading = {panel.key for one in coming for panel in one.missing}
        wanted = list(self._wanted(tile, start))
        return (
            len(coming) < PANELS_COMING
            and not any(key in reading for _, key in wanted)
            and all(
                cache.ready(*(key for source, key in wanted if source.cache is cache))
                for cache in dict.fromkeys(source.cache for source, _ in wanted)
            )
        )

    def _begin(self, job: TileJob, start: int, stop: int, behind: int) -> _Coming:
        """Start reading the panels of A and B over a range of k, unless they are held already. behind: how many ranges
        come after it."""
        plan, (rows, columns), inner = self._plan, job.tile.region, slice(start, stop)
        regions = (
            (inner, rows) if plan.transpose_a else (rows, inner),
            (columns, inner) if plan.transpose_b else (inner, columns),
        )
        sharers = job.sharers.a, job.sharers.b
        loadings: list[Loading] = []
        wanted = list(self._wanted(job.tile, start))
        taken: dict[int, PanelBuffer] = {}
        lacking: dict[int, _Missing] = {}
        remote: dict[RemotePart, Callable[[], Loading]] = {}
        own_nbytes = 0
        try:
            # Those first that are here: another's place may be what one of them is held in.
            held_first = sorted(range(len(wanted)), key=lambda place: not self._holds(*wanted[place]))
            for place in held_first:
                (source, key), region = wanted[place], regions[place]
                taken[place], there = source.cache.take(key)
                if not there:
                    buffer = taken[place]
                    buffer.panel, buffer.region = Placed(buffer.flat, shape_of(region), source.lines), region
                    read = self._read_panel(source, buffer, region)
                    lacking[place] = _Missing(source.cache, key, buffer.arrival, read)
            for place in sorted(lacking):
                (source, key), region, one = wanted[place], regions[place], lacking[place]
                arrival, panel = one.arrival, taken[place].placed
                hashes: list[tuple[Corners, int]] | None = None
                own: PanelPart | None = (0, panel.shape[0], 0, panel.shape[1])
                if self.sharing is not None:
                    own, others = self.sharing.split(key, region, source.unit, panel, arrival, sharers[place])
                    for other in others:
                        remote[other] = partial(self._loading, source.array, region, other.part, panel)
                if own is not None:
                    loading = self._loading(source.array, region, own, panel)
                    own_nbytes += part_nbytes(own, panel.dtype)
                    # Also where all of the panel is read here: other workers must not wait for the other panel of the
                    # pair, or for earlier ones.
                    given = arrival.exported is not None
                    loadings.append(replace(loading, there=arrival.own_there if given else None))
                    if own == (0, panel.shape[0], 0, panel.shape[1]):
                        hashes = loading.hashes
                if hashes is not None:
                    lacking[place] = replace(one, hashes=hashes)
                else:
                    parts = parts_read(source.array, region, panel)
                    lacking[place] = replace(one, panel=replace(one.panel, parts=parts))
            missing = [lacking[place] for place in sorted(lacking)]
            job.read_nbytes += own_nbytes
            loads = LoadsUnderWay(self._readers, loadings)
            bring = partial(self._bring, job, loads, remote, missing, own_nbytes)
            brought: Callable[[], _Brought] = bring
            if remote:
                # Other workers' answers take time: meanwhile this thread waits for earlier panels.
                with suppress(RuntimeError):  # no thread left: they are asked later, in `_hand_on`
                    brought = submitted(self._takers, bring).result
        except BaseException:
            self._give_back(list(taken.values()), list(lacking.values()))
            raise
        begins_part = start in plan.part_starts
        read_panels = tuple(one.panel for one in missing)
        pair = PanelPair(job, taken[0], taken[len(wanted) - 1], read_panels, behind, begins_part)
        return _Coming(pair, missing, brought)

    def _read_panel(self, source: PanelSource, buffer: PanelBuffer, region: tuple[slice, slice]) -> ReadPanel:
        """Of a panel, whose whole is ``region`` of an array, before it is known what is hashed of it."""
        rows, columns = region
        role = "A" if self._plan.symmetric or source.name == "a" else "B"
        return ReadPanel(buffer, role, (rows.start, rows.stop, columns.start, columns.stop), ())

    def _loading(
        self, array: StoredArray, region: tuple[slice, slice], part: PanelPart, panel: Placed
    ) -> Loading:
        """The loading of one part of a panel, whose whole is ``region`` of an array."""
        top, bottom, left, right = part
        rows, columns = region
        inner = (
            slice(rows.start + top, rows.start + bottom),
            slice(columns.start + left, columns.start + right),
        )
        return self._unit.loading(array, inner, panel, (top, left))

    def _bring(
        self,
        job: TileJob,
        loads: LoadsUnderWay,
        remote: dict[RemotePart, Callable[[], Loading]],
        missing: Sequence[_Missing],
        own_nbytes: int,
    ) -> _Brought:
        """Wait until panels are whole: own parts read, the others copied from other workers or, failing that, read
        here."""
        moves, read, shared = loads.finish(), 0, 0
        seconds = time.perf_counter() - loads.begun
        if remote and self.sharing is not None:
            if self._abandoned:
                raise CancelledError()
            start = time.perf_counter()
            reading = None
            if own_nbytes and self._handed_on <= PAIRS_MULTIPLIED:
                # As fast as its own parts were read just now, from whatever store.
                reading = seconds * sum(part.nbytes for part in remote) / own_nbytes
            left = self.sharing.exchange.take(list(remote), reading, loads.begun)
            if left:
                self.sharing.close_unreached(job.sharers)
            if self._abandoned:
                raise CancelledError()
            moves.append(Move(0.0, time.perf_counter() - start))
            if left:
                moves += load_all(self._readers, [load() for part, load in remote.items() if part in left])
            read = sum(part.nbytes for part in left)
            shared = sum(part.nbytes for part in remote) - read
        for panel in missing:
            panel.arrival.all_there()
        return _Brought(moves, read, shared)

    def _hand_on(self, coming: _Coming, loaded: SimpleQueue[Loaded | None]) -> None:
        """Wait for a pair of panels, then pass it on, and the jobs that end behind it."""
        pair, job = coming.pair, coming.pair.job
        try:
            if coming.missing:
                brought = _Brought()
                try:
                    brought = coming.brought()
                finally:
                    job.count("read", "upload", coming.clock, brought.moves)
                job.read_nbytes += brought.read_nbytes
                job.shared_nbytes += brought.shared_nbytes
                for one in coming.missing:
                    if one.hashes is not None:
                        panel = one.panel
                        content = panel_content(panel.role, panel.corners, one.hashes)
                        panel.buffer.content = ReadContent(content)
        except BaseException as error:
            job.error = job.error or error
            self._give_back((pair.a, pair.b), coming.missing)
        else:
            with self._counting:
                self._handed_on += 1
            loaded.put(pair)
        for end in coming.ends:
            loaded.put(end)

    def _give_back(self, taken: Sequence[PanelBuffer], missing: Sequence[_Missing]) -> None:
        """Release the buffers of panels that will not come."""
        for panel in missing:
            panel.cache.discard(panel.key)
            tell(panel.arrival.own_there, False)
            tell(panel.arrival.whole, False)
        self._let_go(taken)

    def _let_go(self, taken: Sequence[PanelBuffer]) -> None:
        """Release a panel of A, and one of B unless that is the same."""
        for buffer in dict.fromkeys(taken):
            buffer.cache.let_go(buffer)


class LoadsUnderWay:
    """Loads queued on a pool."""

    def __init__(self, pool: ThreadPoolExecutor, loadings: Sequence[Loading]) -> None:
        self._pool, self._loadings = pool, loadings
        self.begun = time.perf_counter()
        self._futures: list[Future[Move]] = []
        self._told: list[Future[None]] = []
        try:
            for loading in loadings:
                first = len(self._futures)
                for call in loading.calls:
                    self._futures.append(submitted(pool, call))
                if loading.there is not None:
                    # Queued behind its calls, so that those it waits for have been started.
                    calls = self._futures[first:]
                    self._told.append(submitted(pool, partial(self._tell, loading, loading.there, calls)))
        except BaseException:
            self._end()  # the buffers are about to be reused
            raise

    @staticmethod
    def _tell(loading: Loading, there: Future[bool], calls: Sequence[Future[Move]]) -> None:
        try:
            wait(calls)
            good = not any(call.exception() for call in calls) and not loading.rest()
            loading.settle()
        except BaseException:
            good = False
        tell(there, good)

    def finish(self) -> list[Move]:
        """Wait until everything is loaded; after an error, until nothing is written to the buffers any more.

        Raises what reading raised.
        """
        try:
            wait(self._futures)
            wait(self._told)
            moves = results_of(self._futures)
            return moves + run_all(
                self._pool, [call for loading in self._loadings for call in loading.rest()]
            )
        finally:
            self._end()

    def _end(self) -> None:
        """Wait until none of the loads writes to its buffer any more, even if waiting for one of them raises."""
        wait(self._futures)
        wait(self._told)
        with ExitStack() as settling:  # called last to first: the first one's error is raised
            for loading in self._loadings:
                settling.callback(loading.settle)


def load_all(pool: ThreadPoolExecutor, loadings: Sequence[Loading]) -> list[Move]:
    """Load all of them and wait. Raises what reading raised."""
    return LoadsUnderWay(pool, loadings).finish()
