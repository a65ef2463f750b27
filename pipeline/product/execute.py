"""Walk a plan on a cluster: hand out its tiles, report what happens, keep what is finished. It makes no decisions."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from distributed import Client

from tilewright.pipeline.cluster.answers import Result, WorkersKilledError, run_on_all
from tilewright.pipeline.cluster.submit import TasksUnderWay, run_combined
from tilewright.pipeline.cluster.watch import Lost, Tell, Workers, log_loss, threads_of
from tilewright.pipeline.errors import ClusterError, DeviceMemoryError, TaskError
from tilewright.pipeline.events import Listener, UnitDone, WorkDone, WorkPlanned, on_lost, on_waiting
from tilewright.pipeline.plan.product import Tile
from tilewright.pipeline.plan.told import NOTHING_FOUND, THREADS, Found, Product, TileReport
from tilewright.pipeline.product.placement import Placement
from tilewright.pipeline.worker import tasks

logger = logging.getLogger(__name__)


def _tile_results(
    client: Client, product: Product, tiles: list[Tile], waiting: Tell, lost: Lost
) -> Generator[tuple[int, TileReport | DeviceMemoryError], None, None]:
    """Yield a number and a report for each tile as it is stored. A tile takes one task; where k is cut, one for each
    part and one that adds them up."""
    key = f"tile-{product.run}"
    parts = range(product.plan.k_parts)
    if len(parts) == 1:
        placement = Placement(product.plan, tiles)

        def call(tile: Tile, worker: str) -> tuple[Any, ...]:
            return product, tile, placement.sharers(tile, worker, product.sharing)

        least = tasks.TILES_UNDER_WAY if product.device == "cuda" else 1
        return run_placed(
            client, tasks.multiply_tile, placement, call, key=key, least=least, waiting=waiting, lost=lost
        )
    groups = [((product, tile), [(product, tile, part) for part in parts]) for tile in tiles]
    window = product.plan.sums_under_way
    return run_combined(
        client,
        tasks.multiply_part,
        tasks.add_parts,
        groups,
        window=window,
        key=key,
        waiting=waiting,
        lost=lost,
    )


def run_placed(
    client: Client,
    function: Callable[..., Result],
    placement: Placement,
    call: Callable[[Tile, str], tuple[Any, ...]],
    *,
    key: str,
    least: int = 1,
    waiting: Tell = logger.warning,
    lost: Lost = log_loss,
) -> Generator[tuple[int, Result], None, None]:
    """Submit ``function(*call(tile, worker))`` for every tile of ``placement`` and the worker that it is meant for;
    yield the tile's index and the result as it finishes.

    Each worker has as many tiles under way as it has threads, or ``least`` if that is more (a function that waits
    rather than computes may make room for the next, see `pool.make_room`), and one more of its own share to find
    waiting. When its share is handed out, it gets tiles of others'. A task whose worker is lost goes to any other, or
    waits for one. When workers come or go, the tiles left are divided anew. In all else, errors too, this is as
    ``run_bounded``.
    """
    workers = Workers(client, threads_of(client, waiting=waiting))
    threads = workers.threads()
    placement.share_among(list(threads))

    def feed(under_way: Counter[str | None]) -> Iterator[tuple[int, tuple[Any, ...], str | None]]:
        nonlocal threads
        before, threads = threads, workers.threads() if len(placement) else threads
        if threads.keys() != before.keys():
            placement.share_among(list(threads))
        for take, more in ((placement.own, 1), (placement.others, 0)):
            taking = list(threads)
            while taking:  # in turns, one each, so that the last worker begins no later than it must
                for worker in tuple(taking):
                    room = under_way[worker] < max(threads[worker], least) + more
                    if room and (tile := take(worker)) is not None:
                        under_way[worker] += 1
                        yield tile.index, call(tile, worker), worker
                    else:
                        taking.remove(worker)

    run: TasksUnderWay[Result] = TasksUnderWay(client, function, key, waiting, lost)
    yield from run.results(feed, lambda: len(placement))


def on_all(client: Client, function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function on every worker; failures are only logged, since a worker that is gone holds nothing any more."""
    try:
        answers = run_on_all(client, function, *arguments)
    except ClusterError as error:  # the scheduler is gone; if that ends the run, its own error says so
        logger.warning("%s: %s", function.__name__, error)
        return
    for worker, answer in answers.items():
        if isinstance(answer, BaseException):
            logger.warning("%s on %s: %s: %s", function.__name__, worker, type(answer).__name__, answer)


def covered(times: Iterable[tuple[float, float]]) -> float:
    """Seconds covered by at least one of these (begin, end) intervals."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(times):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


@dataclass(frozen=True)
class TilesDone:
    """Totals of running a plan's tiles."""

    seconds: float
    stages: dict[str, float]
    """Busy seconds by stage, summed over workers."""
    kernel: str
    """The kernel or kernels that multiplied; ``none`` if nothing was left to do."""
    read_nbytes: int
    """Bytes of A and B that were read."""
    shared_nbytes: int
    """Bytes of A and B that were copied from GPU to GPU."""
    write_nbytes: int
    """Bytes of C that were stored."""
    operations: int
    """Multiplications and additions."""
    workers: dict[str, dict[str, float]]
    """Seconds in which each worker was busy with each of `THREADS`."""
    workers_lost: int
    """Workers that were lost meanwhile."""
    found: Found
    """What the tiles of this run found."""


def run_tiles(
    client: Client,
    product: Product,
    finished: Collection[int],
    listener: Listener,
    record: Callable[[int, int, Found], None],
    keep: Callable[[bytes], None] | None = None,
) -> TilesDone:
    """Compute every tile of the plan that is not finished yet.

    ``record`` is called with each tile's index, stored bytes and what was found, once it is stored; before that
    ``keep``, where C is in a session's fork, with what the tile has changed there. When this ends, by success, error or
    Ctrl-C, the workers hold nothing of the run any more.

    Raises
    ------
    DeviceMemoryError
        A worker has less memory than the plan needs. Not retried: the plan is too large.
    TilewrightError
        As ``run_placed`` and ``run_combined`` raise.
    """
    plan = product.plan
    todo = {tile.index: tile for tile in plan.tiles() if tile.index not in finished}
    read = sum(plan.tile_read_nbytes(tile) for tile in todo.values())
    operations = sum(map(plan.tile_operations, todo.values()))
    listener(WorkPlanned("matmul", plan.tile_count, len(finished), "tiles", read, operations))
    stages: dict[str, float] = {}
    kernels: set[str] = set()
    read_nbytes = shared_nbytes = 0
    spans: dict[str, dict[str, list[tuple[float, float]]]] = {}
    losses: list[str] = []
    found = NOTHING_FOUND
    tell_loss = on_lost(listener, "matmul", "tile")

    def lost(worker: str, tiles: int | None) -> None:
        losses.append(worker)
        tell_loss(worker, tiles)

    start = time.perf_counter()
    ended = False
    try:
        waiting = on_waiting(listener, "matmul", "keeps what is finished")
        results = _tile_results(client, product, list(todo.values()), waiting, lost)
        with closing(results):  # cancels outstanding tasks before the workers are told to end
            for _, report in results:
                if isinstance(report, DeviceMemoryError):
                    raise report
                if keep is not None and report.changes is not None:
                    keep(report.changes)
                record(report.index, report.stored_nbytes, report.found)
                found = found.merged(report.found)
                kernels |= report.kernels
                read_nbytes += report.read_nbytes
                shared_nbytes += report.shared_nbytes
                for stage, seconds in report.stages.items():
                    stages[stage] = stages.get(stage, 0.0) + seconds
                for span in report.spans:
                    busy = spans.setdefault(span.worker, {name: [] for name in THREADS})
                    busy[span.stage].append((span.begin, span.end))
                tile = todo[report.index]
                listener(
                    UnitDone(
                        "matmul",
                        report.index,
                        report.worker,
                        report.seconds,
                        plan.tile_read_nbytes(tile),
                        plan.tile_operations(tile),
                        report.stages,
                        report.spans,
                    )
                )
        ended = True
    except WorkersKilledError as error:
        raise TaskError(f"{error}, or the plan less (--device-memory, tilewright.device-memory)") from error
    finally:
        if client.status == "running":  # else the scheduler is gone, which raises its own error
            if product.sharing:  # no worker frees what another may still copy from
                on_all(client, tasks.stop_run, product.run, not ended)
            on_all(client, tasks.end_run, product.run, not ended)
    seconds = time.perf_counter() - start
    listener(WorkDone("matmul", seconds))
    kernel = " and ".join(sorted(kernels)) or "none"
    workers = {
        worker: {name: covered(times) for name, times in busy.items()} for worker, busy in spans.items()
    }
    for name, parts in THREADS.items():
        # Several panels load, and several tiles are written, at once, so stage seconds overlap: scale them to the time
        # in which the threads were busy.
        total = sum(stages.get(stage, 0.0) for stage in parts)
        share = sum(busy[name] for busy in workers.values()) / total if total > 0 else 1.0
        stages |= {stage: share * stages[stage] for stage in parts if stage in stages}
    written = sum(map(plan.tile_write_nbytes, todo.values()))
    return TilesDone(
        seconds, stages, kernel, read_nbytes, shared_nbytes, written, operations, workers, len(losses), found
    )
