"""What one Dask task does. Everything here runs on a worker and gets all it needs as arguments."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import reduce

from tilewright.kernels.gemm import scratch
from tilewright.kernels.gpu.memory import allocating
from tilewright.pipeline.cluster.here.worker import current_worker
from tilewright.pipeline.cluster.identity import address_of
from tilewright.pipeline.cluster.pool import make_room
from tilewright.pipeline.errors import DeviceMemoryError, RunEndedError
from tilewright.pipeline.events import Span
from tilewright.pipeline.plan.grid import Tile
from tilewright.pipeline.plan.inputs import Sharers
from tilewright.pipeline.plan.told import Found, Product, TileReport
from tilewright.pipeline.plan.transform import Fused
from tilewright.pipeline.threads import free_thread_buffers
from tilewright.pipeline.transfer.lane import free_device_memory
from tilewright.pipeline.worker.engines import (
    Turn,
    close_engine,
    close_engines_writing,
    ending,
    engine_for,
    free_engine,
    is_over,
    store_sum,
)
from tilewright.pipeline.worker.meters import meters_of
from tilewright.pipeline.worker.peers import WorkerPeers

TILES_UNDER_WAY = 4
"""The least number of tiles that a GPU has under way, however few threads its worker has: one is read, one multiplied,
and two are written. The engine's own threads do the work; the tasks' threads only wait.

Not so for parts of k, of which a worker has as many under way as it has threads. Those of several tiles are submitted
at once, so one that made room would have its worker start all others that wait there."""


def multiply_tile(
    product: Product, tile: Tile, sharers: Sharers, number: int, fused: Fused | None = None
) -> TileReport | DeviceMemoryError:
    """Compute one tile of C and store it. Safe to retry: doing it twice stores the same bytes twice.

    number: of the tile among those that its worker was given. fused: what the product lacks, where that was sent apart,
    here and below.
    """
    product = _whole(product, fused)

    def work(worker: str) -> TileReport:
        peers = WorkerPeers(current_worker()) if product.sharing else None
        with engine_for(product, worker, peers, turn) as engine:
            report = engine.multiply(tile, sharers=sharers.reached_from(worker), queued=turn.end)
        _count(report, tiles=1, write_nbytes=product.plan.tile_write_nbytes(tile),
               operations=product.plan.tile_operations(tile))  # fmt: skip
        return report

    with Turn(product.run, number) as turn:
        if product.device == "cuda":
            make_room(TILES_UNDER_WAY)
        return _unless_memory_is_short(product, work, f"tile {tile.index}")


def multiply_part(
    product: Product, tile: Tile, part: int, fused: Fused | None = None
) -> TileReport | DeviceMemoryError:
    """Sum one tile over one part of k; the sum stays on the worker until ``add_parts`` asks for it."""
    product = _whole(product, fused)

    def work(worker: str) -> TileReport:
        with engine_for(product, worker, turn=turn) as engine:
            report = engine.multiply(tile, part, queued=turn.end)
        _count(report, operations=product.plan.tile_operations(tile) // product.plan.k_tasks)
        return report

    with Turn(product.run) as turn:
        return _unless_memory_is_short(product, work, f"tile {tile.index}")


def add_parts(
    product: Product, tile: Tile, fused: Fused | None, *parts: TileReport | DeviceMemoryError
) -> TileReport | DeviceMemoryError:
    """Store one tile as the sum of its parts, added in order; the report counts the work of all parts."""
    product = _whole(product, fused)
    reports: list[TileReport] = []
    for part in parts:
        if isinstance(part, DeviceMemoryError):
            return part
        reports.append(part)

    def store(worker: str) -> TileReport:
        begin, start = time.time(), time.perf_counter()
        done = store_sum(product, tile, [report.partial for report in reports if report.partial is not None])
        found = reduce(Found.merged, (report.found for report in reports), Found(c=done.holds))
        seconds = time.perf_counter() - start
        stages = {stage: sum(report.stages[stage] for report in reports) for stage in reports[0].stages}
        stages["write"] += seconds
        spans = [span for report in reports for span in report.spans]
        spans.append(Span(worker, "write", begin, begin + seconds))
        meters_of(current_worker()).count(
            {"write": seconds}, tiles=1, write_nbytes=product.plan.tile_write_nbytes(tile)
        )
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
            stored=done.stored,
            changes=done.changes,
            contents=tuple(content for report in reports for content in report.contents),
            counts=done.counts,
        )

    return _unless_memory_is_short(product, store, f"the sum of tile {tile.index}")


def _count(report: TileReport, **done: int) -> None:
    """Have the worker tell what it has done."""
    meters_of(current_worker()).count(report.stages, read_nbytes=report.read_nbytes, **done)


def _whole(product: Product, fused: Fused | None) -> Product:
    return product if fused is None else replace(product, fused=fused)


def _unless_memory_is_short(
    product: Product, work: Callable[[str], TileReport], what: str
) -> TileReport | DeviceMemoryError:
    """Call ``work`` with this worker's address and return its result, or the error that memory ran out.

    That error is returned rather than raised: a plan that is too large for this worker stays so however often Dask
    retries. It is a new error, since the traceback of the old one keeps the buffers alive.
    """
    worker = address_of(current_worker())
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


async def let_run_end(run: str) -> None:
    """The same of a run whose tiles are all stored, without waiting for it: to close what other workers share and to
    free 26 GiB takes a GPU a tenth of a second. Who looks how much memory is free waits for that."""
    if (end := ending(run)) is not None:
        asyncio.get_running_loop().run_in_executor(None, end)
    else:
        await end_run(run, abandon=False)
