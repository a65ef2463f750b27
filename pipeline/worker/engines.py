"""The engines of this process, one for each run: made for the run's first tile, found by the run's name, closed with
it.

Ending a run also ends the storing of sums over parts of k, which needs no engine.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import zarr

from tilewright.kernels.passes.contents import Contents, contents_of, overflow_of
from tilewright.kernels.passes.transpose_host import transpose
from tilewright.pipeline.plan.grid import Tile
from tilewright.pipeline.plan.pairs import COUNT, COUNT_DTYPE
from tilewright.pipeline.plan.told import Product, StoredObject
from tilewright.pipeline.store.arrays import place_of
from tilewright.pipeline.store.region_read import read_region
from tilewright.pipeline.store.region_write import region_writes
from tilewright.pipeline.store.sessions import changes_in, own_copy
from tilewright.pipeline.worker.fusion import combine, finish
from tilewright.pipeline.worker.leftovers import frees
from tilewright.pipeline.worker.panels import Arrival, PanelKey
from tilewright.pipeline.worker.peers import Peers
from tilewright.pipeline.worker.stream import TileEngine
from tilewright.pipeline.worker.units import rounded

logger = logging.getLogger(__name__)

_engines: dict[str, TileEngine] = {}
_users: Counter[str] = Counter()
"""How many tasks of each run hold its engine or wait for it."""
_ended: deque[str] = deque(maxlen=256)
"""Runs that are over. A task that was already on its way when it was cancelled must not start its run again."""
_sums: dict[str, list[Product]] = {}
"""For each run its product, once for every sum being stored there now. No engine does that, and ending the run waits
for it."""
_turns: dict[str, list[Turn]] = {}
"""For each run the tasks that have come and have not queued their tile yet, in the order in which they are to."""
_making: dict[str, Product] = {}
"""Runs whose first task is making the engine. Other tasks wait for it, and so does ending such a run."""
_engines_lock = threading.Lock()
_changed = threading.Condition(_engines_lock)
"""Notified when a run ends, a sum is stored, a turn ends, or making an engine has succeeded or failed."""
_closing: dict[str, TileEngine] = {}
"""Engines being closed: their last tiles may still be written."""
_stopped: dict[str, TileEngine] = {}
"""Closed engines, kept until no other worker copies from their buffers."""
_ending = 0
"""Runs that `ending` is to end here, and has not yet."""
_leftovers = False
"""Whether tiles have failed, or were abandoned, since `collect_leftovers`."""


class Turn:
    """A task's place among those of its run on this worker: they queue their tiles in the order that the placement
    chose, and not as the system happens to start and wake their threads. A tile out of its turn finds neither its own
    earlier panels nor those of the workers that share them.

    number: of the task among those that its worker was given; None where that does not matter: behind those here. To be
    taken before the task makes room for the next one. It ends with its block at the latest, and nobody waits for a task
    that has not come.
    """

    def __init__(self, run: str, number: int | None = None) -> None:
        self.run = run
        with _engines_lock:
            turns = _turns.setdefault(run, [])
            self.number: int = turns[-1].number if turns and number is None else number or 0
            insort(turns, self, key=attrgetter("number"))

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def has_come(self) -> bool:
        """Whether no task that is here and comes before this one has its tile still to queue; to be asked with the lock
        held."""
        return _turns[self.run][0] is self

    def end(self) -> None:
        """Let the next one go on, since this one's tile is queued, or will not be."""
        with _engines_lock:
            turns = _turns.get(self.run)
            if turns is None or self not in turns:
                return
            turns.remove(self)
            if not turns:
                del _turns[self.run]
            _changed.notify_all()


@contextmanager
def engine_for(
    product: Product, worker: str, peers: Peers | None = None, turn: Turn | None = None
) -> Iterator[TileEngine]:
    """This process's engine for the product's run, made on first use; ``worker`` is this worker's name.

    Until the block ends the engine does not count as idle. If making it fails, the next task tries again. peers: the
    connection to workers that share panels with this one, if any do. turn: waited for, once the engine is there.
    """
    with _engines_lock:
        _users[product.run] += 1
    try:
        engine = _found_or_made(product, worker, peers)
        if turn is not None:
            with _engines_lock:
                _changed.wait_for(lambda: product.run in _ended or turn.has_come())
                _check_goes_on(product)
        yield engine
    finally:
        with _engines_lock:
            _users[product.run] -= 1
            if not _users[product.run]:
                del _users[product.run]


def _found_or_made(product: Product, worker: str, peers: Peers | None) -> TileEngine:
    run = product.run
    with _engines_lock:
        _changed.wait_for(lambda: run in _ended or run not in _making)
        _check_goes_on(product)
        if run in _engines:
            return _engines[run]
        _making[run] = product
    # Without the lock, which others need only briefly: pinning memory, allocating and compiling take seconds.
    try:
        engine = TileEngine(product, worker, peers)
        with _engines_lock:
            _engines[run] = engine  # even if the run has ended: `close_engine` waits to close it
            _check_goes_on(product)
        return engine
    except BaseException:
        _expect_leftovers()
        raise
    finally:
        with _engines_lock:
            del _making[run]
            _changed.notify_all()


def _check_goes_on(product: Product) -> None:
    if product.run in _ended:
        raise CancelledError(f"run {product.run} is over")


def is_over(run: str) -> bool:
    """Whether a run was ended in this process."""
    with _engines_lock:
        return run in _ended


def arrival_of(run: str, key: PanelKey) -> Arrival | None:
    """The arrival of a run's panel in this process; None if it is not, or no longer, here."""
    engine = _engines.get(run)
    return engine.arrival(key) if engine is not None else None


def expects(run: str, key: PanelKey) -> bool:
    """Whether a run's panel is still to be loaded in this process, as far as that is known: where its first tile has
    not come yet, it may be."""
    engine = _engines.get(run)
    return engine.expects(key) if engine is not None else not is_over(run)


@frees
def close_idle_engines() -> None:
    """Close the engines that no task uses: those of runs whose client died are of no use to anyone.

    A run that is only paused gets a new engine with its next tile. A buffer that another worker is copying from lasts
    until that worker closes it (seen on H200s: memory that another process has open outlives its owner); that worker
    then reads the panel from files instead. Waits for runs that are ending.
    """
    with _engines_lock:
        _changed.wait_for(lambda: not _ending)
        idle = [run for run in _engines if not _users[run]]
        engines = [_engines.pop(run) for run in idle]
        stopped = list(_stopped.values())
        _stopped.clear()
    with ExitStack() as ending:  # frees all of them, even if closing one fails
        for engine in stopped + engines:
            ending.callback(_free, engine)
        for engine in engines:
            ending.callback(engine.close)


def close_engines_writing(place: str, run: str) -> list[str]:
    """End all other runs that write to the array at that place, C or what is stored beside it, leaving their unfinished
    tiles unwritten where possible.

    Call this only while holding the array's lock. The client of such a run is dead, and its late tiles have no place to
    be written to any more. Returns those runs, whose buffers are to be freed.
    """
    with _engines_lock:
        products = {other: engine.product for other, engine in (_engines | _closing).items()}
        products |= _making
        products |= {other: under_way[0] for other, under_way in _sums.items()}
    others = {other: product for other, product in products.items() if other != run}
    # The dead client may have named the same folder differently: relative to its own folder, or through a link.
    ours = os.path.realpath(place)
    past = [
        other
        for other, product in others.items()
        if any(
            os.path.realpath(place_of(array)) == ours
            for array in (product.c, product.counts)
            if array is not None
        )
    ]
    with ExitStack() as ending:  # closes all of them, even if closing one fails
        for other in past:
            ending.callback(close_engine, other, abandon=True)
    return past


def close_engine(run: str, *, abandon: bool = False) -> None:
    """End this process's part in a run, if any: nothing of it is written any more when this returns.

    Concurrent calls all wait for that, and one call with ``abandon`` abandons the unfinished tiles for all. The
    engine's buffers last until `free_engine`.
    """
    with _engines_lock:
        if run not in _ended:  # a run is ended up to three times, and this record is bounded
            _ended.append(run)
        _changed.notify_all()
        _changed.wait_for(lambda: run not in _making and run not in _sums)
        if run in _engines:
            _closing[run] = _engines.pop(run)
        engine = _closing.get(run)
    if engine is None:
        return
    try:
        engine.close(abandon=abandon)
    finally:
        with _engines_lock:
            if _closing.pop(run, None) is not None:
                _stopped[run] = engine


def free_engine(run: str) -> None:
    """Free a closed engine's buffers, once no other worker copies from them.

    Call it from a thread that is attached to the GPU.
    """
    with _engines_lock:
        engine = _stopped.pop(run, None)
    if engine is not None:
        _free(engine)


def ending(run: str) -> Callable[[], None] | None:
    """What ends this process's idle part in a run and frees its buffers, to be called by any thread: nobody has to wait
    for that but who looks how much memory is free (`close_idle_engines`). None where something of it is still done."""
    global _ending
    with _engines_lock:
        if run not in _ended:
            _ended.append(run)
        _changed.notify_all()
        if _users[run] or run in _making or run in _sums:
            return None
        _ending += 1

    def end() -> None:
        global _ending
        try:
            try:
                close_engine(run)
            finally:
                with _engines_lock:
                    engine = _stopped.get(run)
                if engine is not None:
                    engine.unit.attach()
                    free_engine(run)
        except Exception as error:  # there is nobody who could be told otherwise
            logger.warning("ending run %s: %s: %s", run, type(error).__name__, error)
        finally:
            with _engines_lock:
                _ending -= 1
                _changed.notify_all()

    return end


def _free(engine: TileEngine) -> None:
    engine.free()
    if engine.failed:
        _expect_leftovers()


def _expect_leftovers() -> None:
    global _leftovers
    with _engines_lock:
        _leftovers = True


@frees
def collect_leftovers() -> None:
    """Free what the errors of past runs still hold in cycles of references, if any run had errors.

    Else this does nothing: Python's collector takes tens of milliseconds. Call it from a thread that is attached to the
    GPU.
    """
    global _leftovers
    with _engines_lock:
        expected, _leftovers = _leftovers, False
    if expected:
        gc.collect()


class StoredSum(NamedTuple):
    """What is stored of a tile that was added up, as in ``TileReport``, and what it holds."""

    stored: tuple[StoredObject, ...]
    holds: Contents
    changes: bytes | None
    counts: tuple[StoredObject, ...]


def store_sum(product: Product, tile: Tile, parts: Sequence[np.ndarray]) -> StoredSum:
    """Store one tile as the sum of its parts over k, added in order: the same bits every time.

    Raises
    CancelledError when the run is over, also between two pieces.
    """
    total = parts[0].copy()
    with np.errstate(all="ignore"):  # as on a device
        for part in parts[1:]:
            total += part
    plan = product.plan
    regions, dtype = plan.regions(tile), np.dtype(plan.c_dtype)
    stored: list[StoredObject] = []
    counts: list[StoredObject] = []

    def store(
        array: zarr.Array[Any],
        drafts: str | None,
        matrix: np.ndarray,
        dtype: np.dtype,
        done: list[StoredObject],
    ) -> None:
        mirrored = np.conjugate(matrix.T) if plan.hermitian else matrix.T
        for region, values in zip(regions, (matrix, mirrored), strict=False):
            for piece in region_writes(array, region, drafts):
                with _engines_lock:
                    _check_goes_on(product)
                one = piece.write([rounded(values[piece.source], dtype)])
                if one is not None:
                    done.append(one)

    with _engines_lock:
        _check_goes_on(product)
        _sums.setdefault(product.run, []).append(product)
    try:
        c = own_copy(product.c)
        if product.counts is not None:
            pairs = total[product.fused.forms.index(COUNT)]
            if plan.on_diagonal(tile):  # nobody has mirrored the sums
                transpose(pairs, pairs, swap=False, same=True, conjugate=False)
            store(product.counts, product.counts_drafts, pairs, COUNT_DTYPE, counts)
        total = _finished(product, total, tile)
        store(c, product.drafts, total, dtype, stored)
    finally:
        with _engines_lock:
            _sums[product.run].pop()
            if not _sums[product.run]:
                del _sums[product.run]
            _changed.notify_all()
    found = contents_of(total, product.look[2], overflow_of(dtype))
    return StoredSum(tuple(stored), found.times(len(regions)), changes_in(c), tuple(counts))


def _finished(product: Product, sums: np.ndarray, tile: Tile) -> np.ndarray:
    """A tile as it is stored, of the sums over all of k of its accumulators; in their memory where its elements have
    their size."""
    stored, epilogue = product.plan.stored, product.fused.epilogue
    total: np.ndarray = sums[0]
    if product.fused.pairwise is not None:
        target = np.empty(total.shape, stored)
        combine(product.fused.pairwise, list(sums), target, tile.region)
        if product.plan.on_diagonal(tile):  # nobody has mirrored the sums
            transpose(target, target, swap=False, same=True, conjugate=False)
        return target
    if epilogue is None:
        return total
    target = total.view(stored) if stored.itemsize == total.itemsize else np.empty(total.shape, stored)
    before = None
    if epilogue.beta and product.before is not None:
        before = read_region(product.before, tile.region)
    finish(epilogue, total, target, tile.region, before)
    return target
