"""What one Dask task does. Everything here runs on a worker and gets all it needs as arguments."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from functools import reduce
from typing import Any

from distributed import get_worker, rejoin, secede
from distributed.threadpoolexecutor import thread_state, threads_lock

from tilewright.kernels.cpu.loops import start_compiler, usable_cores
from tilewright.kernels.gemm import scratch
from tilewright.kernels.gpu.memory import allocating
from tilewright.pipeline.cluster.identity import address_of
from tilewright.pipeline.errors import ClusterError, DeviceMemoryError, RunEndedError, TilewrightError
from tilewright.pipeline.events import Span
from tilewright.pipeline.plan.facts import Sharers, WorkerFacts, cores_here, pause_nbytes
from tilewright.pipeline.plan.product import Tile
from tilewright.pipeline.plan.told import Found, Product, TileReport
from tilewright.pipeline.thread_buffers import free_thread_buffers
from tilewright.pipeline.transfer.lane import free_device_memory
from tilewright.pipeline.worker.engines import (
    arrival_of,
    close_engine,
    close_engines_writing,
    close_idle_engines,
    collect_leftovers,
    engine_for,
    free_engine,
    is_over,
    store_sum,
)
from tilewright.pipeline.worker.peers import WorkerPeers, answer_peers

TILES_UNDER_WAY = 4
"""The least number of tiles that a GPU has under way, however few threads its worker has: one is read, one multiplied,
and two are written. The engine's own threads do the work; the tasks' threads only wait.

Not so for parts of k, of which a worker has as many under way as it has threads. Those of several tiles are submitted
at once, so one that made room would have its worker start all others that wait there."""


async def worker_facts(device: str, loops: bool, dask_worker: Any) -> WorkerFacts | TilewrightError:
    """Describe this worker and resolve ``device`` (``auto``, ``cuda`` or ``cpu``) on it.

    loops: whether work on a CPU will need compiled loops, so that Numba should start now. ``dask_worker`` is filled in
    by `asking.answer`, which calls this on the worker's event loop. What may take long runs in threads: the first look
    for a GPU; then `_free_what_is_over`, which on a GPU's worker is the first to import numba.cuda and makes the
    context that the loop is attached to afterwards.

    A TilewrightError (``cuda`` was asked for and this worker has no usable GPU) is returned, not raised: the worker
    would log a raised one at length.
    """
    from tilewright.kernels.gpu.device_choice import resolve_device

    limit = dask_worker.memory_manager.memory_limit
    pause = pause_nbytes(limit, dask_worker.memory_manager.memory_pause_fraction)
    try:
        found = await asyncio.to_thread(resolve_device, device)
    except TilewrightError as error:
        return error
    if loops or found == "cuda":  # a GPU's bytes are moved by loops on the CPU, whatever it computes
        start_compiler()  # while the job is planned and its first bytes are read
    await asyncio.to_thread(_free_what_is_over, found)
    name, free = "CPU", None
    if found == "cuda":
        from numba import cuda

        answer_peers(dask_worker, arrival_of)
        context = cuda.current_context()  # attaches the event loop to the GPU too, for `end_run`
        context.memory_manager.deallocations.clear()  # frees what Numba has queued for deallocation
        free = int(context.get_memory_info().free)
        name = cuda.get_current_device().name
        name = name.decode() if isinstance(name, bytes) else str(name)
    cores = cores_here(), usable_cores(), os.cpu_count() or 1
    threads = dask_worker.state.nthreads
    return WorkerFacts(found, name, free, limit or None, *cores, address_of(dask_worker), pause, threads)


def _free_what_is_over(device: str) -> None:
    """Free what no run uses here any more; waits for ending threads and for the GPU's pending work."""
    if device == "cuda":
        from numba import cuda

        cuda.current_context()  # attaches this thread to the GPU before device memory is freed
    close_idle_engines()
    collect_leftovers()
    free_thread_buffers()
    if device == "cuda":
        scratch.release()  # workspace of past runs' streams; this run's stream gets its own
        free_device_memory()


def make_room(least: int) -> None:
    """Secede from Dask's pool if it has fewer than ``least`` threads, so that the worker starts its next task while
    this one waits. If the system has no thread left for that, the next task waits."""
    if get_worker().state.nthreads < least:
        try:
            secede()
        except RuntimeError:
            if not _stay():
                raise


def _stay() -> bool:
    """Undo `secede`: return this thread to Dask's pool. The pool counts the thread that could not be started and would
    otherwise never start another. False, with nothing done, if Dask's pool does not keep its threads as expected."""
    with threads_lock:
        threads = getattr(getattr(thread_state, "executor", None), "_threads", None)
        if not isinstance(threads, set) or not hasattr(thread_state, "proceed"):
            return False
        threads.difference_update([thread for thread in list(threads) if thread.ident is None])
        threads.add(threading.current_thread())
        thread_state.proceed = True
        return True


@contextmanager
def out_of_the_pool(workers_there: Callable[[], Collection[str]]) -> Iterator[None]:
    """Where this thread runs a task of one of these workers, leave the worker's pool in this block, as Dask's
    `worker_client` does: else tasks that the block waits for may wait for the place that it takes up.

    workers_there: gives the addresses of the workers of the cluster that the block gives tasks to.

    A thread that has left its pool already stays out of it; one that is none of Dask's has none to leave.

    Raises
    ------
    ClusterError
        This is the event loop of such a worker, which would do nothing else meanwhile; or the system has no thread left
        that could take the place of this one.
    """
    try:
        worker = get_worker()
    except ValueError:  # no task
        yield
        return
    if address_of(worker) not in workers_there():
        yield
        return
    where = f"a task of worker {address_of(worker)} gives work to its own cluster"
    if worker.loop.asyncio_loop is _running_loop():
        raise ClusterError(
            f"{where} on the worker's event loop, which could then do none of it; make the task a function that is not"
            " async"
        )
    if not getattr(thread_state, "proceed", False):
        yield
        return
    try:
        secede()
    except RuntimeError as error:
        if not _stay():
            raise
        raise ClusterError(
            f"{where}, and no thread could be started that would do it meanwhile ({error}); allow more threads there"
            ' (ulimit -u), or give the work a cluster of its own (cluster="local")'
        ) from error
    try:
        yield
    finally:
        with suppress(RuntimeError):  # the worker is closing, and its pool takes nothing any more
            rejoin()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def multiply_tile(product: Product, tile: Tile, sharers: Sharers) -> TileReport | DeviceMemoryError:
    """Compute one tile of C and store it. Safe to retry: doing it twice stores the same bytes twice."""
    if product.device == "cuda":
        make_room(TILES_UNDER_WAY)

    def work(worker: str) -> TileReport:
        peers = WorkerPeers(get_worker()) if product.sharing else None
        with engine_for(product, worker, peers) as engine:
            return engine.multiply(tile, sharers=sharers.reached_from(worker))

    return _unless_memory_is_short(product, work, f"tile {tile.index}")


def multiply_part(product: Product, tile: Tile, part: int) -> TileReport | DeviceMemoryError:
    """Sum one tile over one part of k; the sum stays on the worker until ``add_parts`` asks for it."""

    def work(worker: str) -> TileReport:
        with engine_for(product, worker) as engine:
            return engine.multiply(tile, part)

    return _unless_memory_is_short(product, work, f"tile {tile.index}")


def add_parts(
    product: Product, tile: Tile, *parts: TileReport | DeviceMemoryError
) -> TileReport | DeviceMemoryError:
    """Store one tile as the sum of its parts, added in order; the report counts the work of all parts."""
    reports: list[TileReport] = []
    for part in parts:
        if isinstance(part, DeviceMemoryError):
            return part
        reports.append(part)

    def store(worker: str) -> TileReport:
        begin, start = time.time(), time.perf_counter()
        stored, c, changes = store_sum(
            product, tile, [report.partial for report in reports if report.partial is not None]
        )
        found = reduce(Found.merged, (report.found for report in reports), Found(c=c))
        seconds = time.perf_counter() - start
        stages = {stage: sum(report.stages[stage] for report in reports) for stage in reports[0].stages}
        stages["write"] += seconds
        spans = [span for report in reports for span in report.spans]
        spans.append(Span(worker, "write", begin, begin + seconds))
        seconds += max(report.seconds for report in reports)
        read = sum(report.read_nbytes for report in reports)
        kernels = frozenset().union(*(report.kernels for report in reports))
        return TileReport(
            tile.index,
            worker,
            seconds,
            stages,
            kernels,
            read,
            spans=tuple(spans),
            found=found,
            stored_nbytes=stored,
            changes=changes,
        )

    return _unless_memory_is_short(product, store, f"the sum of tile {tile.index}")


def _unless_memory_is_short(
    product: Product, work: Callable[[str], TileReport], what: str
) -> TileReport | DeviceMemoryError:
    """Call ``work`` with this worker's address and return its result, or the error that memory ran out.

    That error is returned rather than raised: a plan that is too large for this worker stays so however often Dask
    retries. It is a new error, since the traceback of the old one keeps the buffers alive.
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
    """Free what failed tiles left on this worker (buffers in the frames of their errors, kernels' workspace), and what
    counting text and multiplying vectors left."""
    gc.collect()
    free_thread_buffers()
    scratch.release()
    free_device_memory()


async def end_past_runs(place: str, run: str) -> None:
    """End other runs on this worker that still write to the array at ``place``, which ``run`` is to write: their
    clients died.

    When this returns, none of them writes any more.
    """
    for past in await asyncio.to_thread(close_engines_writing, place, run):
        free_engine(past)  # on the loop, as in `end_run`


async def stop_run(run: str, abandon: bool) -> None:
    """End this worker's part in a run; with ``abandon``, give up unfinished tiles at their next panel.

    Runs in a thread: pending reads and writes are waited for, however slow the storage, and the event loop must keep
    answering heartbeats and other workers' questions about panels.
    """
    await asyncio.to_thread(close_engine, run, abandon=abandon)


async def end_run(run: str, abandon: bool) -> None:
    """Free what this worker holds for a run; first stop its part in the run, if that was not done.

    Where workers share panels, stop all of them before any frees its memory.
    """
    try:
        await stop_run(run, abandon)
    finally:
        free_engine(run)  # on the event loop, which is attached to the GPU: it takes milliseconds
