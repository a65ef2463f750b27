"""What one Dask task does. Everything here runs on a worker and is told all it needs by its arguments."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

from dask.system import CPU_COUNT
from distributed import get_worker, secede
from distributed.threadpoolexecutor import thread_state, threads_lock

from tilewright.kernels.gemm import scratch
from tilewright.kernels.host_loops import start_compiler, usable_cores
from tilewright.kernels.memory import allocating
from tilewright.pipeline.engines import (
    arrival_of,
    close_engine,
    close_engines_writing,
    close_idle_engines,
    engine_for,
    free_engine,
    is_over,
    store_sum,
)
from tilewright.pipeline.errors import DeviceMemoryError, RunEndedError, TilewrightError
from tilewright.pipeline.events import Span
from tilewright.pipeline.peers import Sharers, WorkerPeers, answer_peers
from tilewright.pipeline.plan import Tile
from tilewright.pipeline.product import Product, TileReport

TILES_UNDER_WAY = 4
"""Tiles that a GPU has under way at least, however few threads its worker has: one is read, one multiplied, and two are
written. Only the engine's own threads work on them; those of the tasks wait."""


@dataclass(frozen=True)
class WorkerFacts:
    """What a plan has to know of a worker."""

    device: str
    """``cuda`` or ``cpu``: what ``auto`` means there."""
    name: str
    """The GPU's name, or ``CPU``."""
    device_free_nbytes: int | None
    """Free memory of its GPU; None on a CPU."""
    host_limit_nbytes: int | None
    """The memory limit of the worker; None when it has none."""
    cores: int
    """Cores that a product on its CPU uses: all, or what OMP_NUM_THREADS leaves a process of many."""
    usable_cores: int = 1
    """Cores that its process may use, whatever OMP_NUM_THREADS says."""
    host_cores: int = 1
    """All cores of its host."""
    address: str = ""
    """Where other workers reach it."""


def cores_here() -> int:
    """Cores that BLAS uses in this process: Dask starts processes of one host with OMP_NUM_THREADS=1."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdigit() and int(threads) > 0 else CPU_COUNT


async def worker_facts(device: str, loops: bool, dask_worker: Any) -> WorkerFacts | TilewrightError:
    """Look at this worker and resolve ``device`` (``auto``, ``cuda`` or ``cpu``) on it.

    loops: whether a CPU will need compiled loops, so that Numba had better begin. ``dask_worker`` is filled in by
    ``Client.run``, which calls this on the worker's event loop. What may wait long does so beside it.

    An error of ours is returned rather than raised, which the worker would report at length on its own account:
    ``cuda`` was asked for and this worker has no usable GPU.
    """
    from tilewright.kernels.device_choice import resolve_device

    limit = dask_worker.memory_manager.memory_limit
    try:
        found = resolve_device(device)
    except TilewrightError as error:
        return error
    await asyncio.to_thread(_free_what_is_over, found)
    name, free = "CPU", None
    if found == "cpu":
        if loops:
            start_compiler()  # while the job is planned and its first bytes are read
    else:
        from numba import cuda

        answer_peers(dask_worker, arrival_of)
        context = cuda.current_context()  # attaches the loop to the GPU as well: see `end_run`
        context.memory_manager.deallocations.clear()  # what Numba has let go of but not yet given back counts as free
        free = int(context.get_memory_info().free)
        name = cuda.get_current_device().name
        name = name.decode() if isinstance(name, bytes) else str(name)
    cores = cores_here(), usable_cores(), os.cpu_count() or 1
    return WorkerFacts(found, name, free, limit or None, *cores, address_of(dask_worker))


def address_of(worker: Any) -> str:
    """The address that the scheduler and other workers know a worker by, which may be another than it listens at."""
    address: str = worker.contact_address or worker.address
    return address


def _free_what_is_over(device: str) -> None:
    """Free what no run uses here any more; waits for threads that end, and for what the GPU has under way."""
    if device == "cuda":
        from numba import cuda

        cuda.current_context()  # attaches this thread to the GPU, before anything of it is freed
    close_idle_engines()
    if device == "cuda":
        scratch.release()  # of the streams of runs that are over; this run's stream gets its own
        _free_texts()


def _free_texts() -> None:
    """Free what counting text left on the GPU, if this process has counted any."""
    if "tilewright.pipeline.lanes" in sys.modules:
        from tilewright.pipeline.lanes import free_texts

        free_texts()


def make_room(least: int) -> None:
    """Let this worker begin its next task while this one waits, where it has fewer threads than ``least``; where the
    system has no thread left for that, the next one waits."""
    if get_worker().state.nthreads < least:
        try:
            secede()
        except RuntimeError:
            if not _stay():
                raise


def _stay() -> bool:
    """Take back this thread's leave of Dask's pool. That counts the thread which could not be started in its place, and
    would never start another. False where Dask keeps its threads otherwise: then nothing is done."""
    with threads_lock:
        threads = getattr(getattr(thread_state, "executor", None), "_threads", None)
        if not isinstance(threads, set) or not hasattr(thread_state, "proceed"):
            return False
        threads.difference_update([thread for thread in list(threads) if thread.ident is None])
        threads.add(threading.current_thread())
        thread_state.proceed = True
        return True


def multiply_tile(product: Product, tile: Tile, sharers: Sharers) -> TileReport | DeviceMemoryError:
    """Compute one tile of C and store it. Doing it twice stores the same bytes twice, so a retry is safe."""
    if product.device == "cuda":
        make_room(TILES_UNDER_WAY)

    def work(worker: str) -> TileReport:
        peers = WorkerPeers(get_worker()) if product.sharing else None
        with engine_for(product, worker, peers) as engine:
            return engine.multiply(tile, sharers=sharers.reached_from(worker))

    return _unless_memory_is_short(product, work, f"tile {tile.index}")


def multiply_part(product: Product, tile: Tile, part: int) -> TileReport | DeviceMemoryError:
    """The sum of one tile over one part of k; it stays on the worker until ``add_parts`` asks for it."""

    def work(worker: str) -> TileReport:
        with engine_for(product, worker) as engine:
            return engine.multiply(tile, part)

    return _unless_memory_is_short(product, work, f"tile {tile.index}")


def add_parts(
    product: Product, tile: Tile, *parts: TileReport | DeviceMemoryError
) -> TileReport | DeviceMemoryError:
    """Store one tile as the sum of its parts, in their order; the report counts what all of them took."""
    reports: list[TileReport] = []
    for part in parts:
        if isinstance(part, DeviceMemoryError):
            return part
        reports.append(part)

    def store(worker: str) -> TileReport:
        begin, start = time.time(), time.perf_counter()
        stored = store_sum(
            product, tile, [report.partial for report in reports if report.partial is not None]
        )
        seconds = time.perf_counter() - start
        stages = {stage: sum(report.stages[stage] for report in reports) for stage in reports[0].stages}
        stages["write"] += seconds
        spans = [span for report in reports for span in report.spans]
        spans.append(Span(worker, "write", begin, begin + seconds))
        seconds += max(report.seconds for report in reports)
        read = sum(report.read_nbytes for report in reports)
        kernels = frozenset().union(*(report.kernels for report in reports))
        return TileReport(
            tile.index, worker, seconds, stages, kernels, read, spans=tuple(spans), stored_nbytes=stored
        )

    return _unless_memory_is_short(product, store, f"the sum of tile {tile.index}")


def _unless_memory_is_short(
    product: Product, work: Callable[[str], TileReport], what: str
) -> TileReport | DeviceMemoryError:
    """What ``work`` gives, called with this worker's address; or the error that it had too little memory.

    That error is returned rather than raised: a plan that is too large for this worker stays too large however often
    Dask tries again. It comes back as a new error, since the frames of the old one hold the buffers that there are.
    """
    worker = address_of(get_worker())
    try:
        with allocating(what, on_gpu=product.device == "cuda"):
            return work(worker)
    except DeviceMemoryError as error:
        return DeviceMemoryError(f"worker {worker}: {error}")
    except CancelledError as error:
        if is_over(product.run):
            raise RunEndedError(f"run {product.run} was ended on worker {worker}: {error}") from error
        raise  # another try gets a new engine


def release_memory() -> None:
    """Free what failed tiles left on this worker, buffers in the frames of their errors and the kernels' workspace, and
    what counting text did."""
    gc.collect()
    scratch.release()
    _free_texts()


async def end_past_runs(place: str, run: str) -> None:
    """End what runs of clients that died still do on this worker for the array there, which ``run`` is to write.

    Returns when nothing of theirs is being written any more.
    """
    for past in await asyncio.to_thread(close_engines_writing, place, run):
        free_engine(past)  # on the loop, as in `end_run`


async def stop_run(run: str, abandon: bool) -> None:
    """End this worker's part in a run; with ``abandon``, give up the tiles under way at the next panel.

    Not on the worker's loop: a read or a write under way is waited for, however slow the storage is, and the loop
    carries heartbeats and what others may be waiting for, answers about panels.
    """
    await asyncio.to_thread(close_engine, run, abandon=abandon)


async def end_run(run: str, abandon: bool) -> None:
    """Free what this worker holds for a run, which it ends first where that was not done, likewise.

    Where workers share panels all of them have to be stopped before.
    """
    try:
        await stop_run(run, abandon)
    finally:
        free_engine(run)  # on the loop, which is attached to the GPU: it takes milliseconds
