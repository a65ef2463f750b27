"""The engines of this process, one for each run: made for the run's first tile, found by its name, ended with it.

Sums over parts of k, which are stored without an engine, end with their run as well.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import zarr

from tilewright.pipeline.peers import Arrival, Key, Peers
from tilewright.pipeline.plan import Tile
from tilewright.pipeline.product import Product
from tilewright.pipeline.region_write import region_writes, stored_nbytes
from tilewright.pipeline.store import place_of
from tilewright.pipeline.stream import Engine
from tilewright.pipeline.units import rounded

_engines: dict[str, Engine] = {}
_users: Counter[str] = Counter()
"""For each run the tasks that have its engine, or wait for it."""
_ended: deque[str] = deque(maxlen=256)
"""Runs that are over: a task of one that was on its way when it was cancelled must not begin it again."""
_sums: dict[str, list[zarr.Array[Any]]] = {}
"""For each run its array C, as often as a sum is being stored there: no engine does that, and its end is waited for."""
_making: dict[str, Product] = {}
"""Runs whose first task makes the engine just now; the others wait for it, as does whoever ends such a run."""
_engines_lock = threading.Lock()
_changed = threading.Condition(_engines_lock)
"""A run has ended, a sum is stored, or an engine is made, or cannot be."""
_closing: dict[str, Engine] = {}
"""What is ending: its last tiles may still be written."""
_stopped: dict[str, Engine] = {}
"""What is over here, and kept until no other worker copies from it any more."""


@contextmanager
def engine_for(product: Product, worker: str, peers: Peers | None = None) -> Iterator[Engine]:
    """The engine of this process for the product's run, made on first use by the worker of that name.

    It is not idle before the block has ended. Where making it fails, the next task tries again. peers: its way to the
    others that share panels with it, if any do.
    """
    with _engines_lock:
        _users[product.run] += 1
    try:
        yield _found_or_made(product, worker, peers)
    finally:
        with _engines_lock:
            _users[product.run] -= 1
            if not _users[product.run]:
                del _users[product.run]


def _found_or_made(product: Product, worker: str, peers: Peers | None) -> Engine:
    run = product.run
    with _engines_lock:
        _changed.wait_for(lambda: run in _ended or run not in _making)
        _check_goes_on(product)
        if run in _engines:
            return _engines[run]
        _making[run] = product
    # Without the lock, which others want for a moment: pinning memory, allocating and compiling take seconds.
    try:
        engine = Engine(product, worker, peers)
        with _engines_lock:
            _engines[run] = engine  # also where the run has ended meanwhile: who ends it waits, to close this
            _check_goes_on(product)
        return engine
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


def arrival_of(run: str, key: Key) -> Arrival | None:
    """How far a panel of a run has come in this process; None where it is not, or no longer."""
    engine = _engines.get(run)
    return engine.arrival(key) if engine is not None else None


def close_idle_engines() -> None:
    """Free what runs hold here that no task has in hand: those whose client died hold it for nobody.

    A run that lives and only pauses gets a new engine with its next tile. What another worker is copying just now lasts
    until it has closed it (seen on H200s: memory that another process has open outlives its owner), and is read from
    the files by that one instead.
    """
    with _engines_lock:
        idle = [run for run in _engines if not _users[run]]
        engines = [_engines.pop(run) for run in idle]
        _stopped.clear()
    for engine in engines:
        engine.close()


def close_engines_writing(place: str, run: str) -> list[str]:
    """End what any other run than this one still does for the array at that place, unwritten where that can be.

    For who has that array to himself: such a run's client died, and what its tiles are would be written over his.
    Returns those runs, whose buffers are to be freed.
    """
    with _engines_lock:
        arrays = {other: engine.product.c for other, engine in (_engines | _closing).items()}
        arrays |= {other: product.c for other, product in _making.items()}
        arrays |= {other: under_way[0] for other, under_way in _sums.items()}
    others = {other: c for other, c in arrays.items() if other != run}
    # The dead client may have named the same folder otherwise: from where it stood, or by a link.
    ours = os.path.realpath(place)
    past = [other for other, c in others.items() if os.path.realpath(place_of(c)) == ours]
    with ExitStack() as ending:  # all of them, also where ending one fails
        for other in past:
            ending.callback(close_engine, other, abandon=True)
    return past


def close_engine(run: str, *, abandon: bool = False) -> None:
    """End this process's part in a run, if it has one: nothing of it is written any more when this returns.

    That holds for everybody who asks for it at once, and it is enough that one of them abandons the tiles under way.
    The buffers of an engine last until `free_engine`.
    """
    with _engines_lock:
        if run not in _ended:  # a run's end is asked for up to three times, and what is remembered is bounded
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
    """Free the buffers of an engine that was closed, once no other worker copies from them.

    For threads that are attached to the GPU.
    """
    with _engines_lock:
        _stopped.pop(run, None)


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
            piece.write([rounded(total[piece.source], np.dtype(product.plan.c_dtype))])
    finally:
        with _engines_lock:
            _sums[product.run].pop()
            if not _sums[product.run]:
                del _sums[product.run]
            _changed.notify_all()
    return stored_nbytes(product.c, region) or 0
