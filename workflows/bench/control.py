"""What it costs to hand out and record tiles, apart from all that is computed: the path of a product through client and
scheduler, with many workers that compute nothing.

The client is this process and does all that it does in a product: it surveys the workers, plans, hands out tiles,
records what they report, has it forced to disk, and shows the progress. Scheduler and workers are Dask's, in a process
each, and speak TCP. The workers of one simulated host have an address of their own in 127.0.0.0/8, so what depends on
hosts happens as often as it would. Only a tile's arithmetic is left out (`stub_tile`): it writes one small file for
each chunk of C, and reports as many panels as the plan has.

So the figures are processor seconds of client and scheduler for each tile, which are what limits how many tiles a
second can be handed out to however many GPUs; the workers' seconds are spread over their hosts, and not counted.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import isqrt
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import dask
import psutil
import zarr
from distributed import Client, Scheduler, Worker, get_worker

from tilewright.kernels.gpu.memory import peak_nbytes
from tilewright.kernels.numbers import ceil_div, counted, format_nbytes
from tilewright.pipeline.cluster.identity import address_of
from tilewright.pipeline.errors import ClusterError
from tilewright.pipeline.events import Listener, Span, log_notices
from tilewright.pipeline.plan.grid import Tile
from tilewright.pipeline.plan.inputs import Sharers
from tilewright.pipeline.plan.told import STAGES, Corners, PanelContent, Product, StoredObject, TileReport
from tilewright.pipeline.plan.transform import Fused
from tilewright.pipeline.product.job import multiply
from tilewright.pipeline.product.request import Request
from tilewright.pipeline.store.objects import object_path
from tilewright.pipeline.transfer.checksum import new_checksum
from tilewright.workflows.bench.common import COUNT, publish
from tilewright.workflows.console import is_quiet, listening

CHUNK = 512
"""The side of a chunk, and of a tile, of C where so many tiles are asked for."""

BUFFERS = 6
"""The memory of a worker, in such tiles: too little for larger ones."""

IDLE_SECONDS = 5.0
"""How long heartbeats alone are measured."""

START_SECONDS = 300.0
"""How long the simulated cluster may take to start: a worker takes some 20 ms."""


@dataclass(frozen=True)
class Usage:
    """What a process has used so far."""

    seconds: float
    """Of processors, all threads together."""
    peak_nbytes: int
    messages: int
    """That it has sent, by Dask's streams of batches; questions and answers come on top."""
    nbytes: int
    """Of these messages."""


@dataclass(frozen=True)
class ControlReport:
    """What a product's control path took."""

    workers: int
    hosts: int
    tiles: int
    panels: int
    """Of each tile, of A and of B."""
    seconds: float
    """From the first tile handed out to the last one recorded."""
    total_seconds: float
    """Of the whole product, with survey and plan, and with the record that is kept at the end."""
    client_ms: float
    """Processor milliseconds of the client for each tile, of the whole product."""
    scheduler_ms: float
    worker_ms: float
    """Of all workers together: spread over their hosts, they do not count."""
    idle_scheduler: float
    """The share of one core that heartbeats alone take of the scheduler."""
    idle_client: float
    messages: dict[str, float]
    """For each tile, by who sends them to whom."""
    message_nbytes: dict[str, float]
    """Bytes of them for each tile."""
    client_nbytes: int
    """The most memory that the client held, and how much of that it had before the product."""
    client_before_nbytes: int
    scheduler_nbytes: int
    scheduler_before_nbytes: int

    @property
    def tile_ms(self) -> float:
        """Of client and scheduler for each tile."""
        return self.client_ms + self.scheduler_ms

    @property
    def work_ms(self) -> float:
        """The same without what heartbeats take in that time, however many tiles are done in it."""
        idle = self.idle_client + self.idle_scheduler
        return self.tile_ms - 1e3 * idle * self.total_seconds / self.tiles

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"tile_ms": self.tile_ms, "work_ms": self.work_ms}

    def __str__(self) -> str:
        sent = ", ".join(
            f"{who} {count:.2f} ({self.message_nbytes[who]:.0f} bytes)"
            for who, count in self.messages.items()
        )
        lines = [
            f"{counted(self.tiles, 'tile')} of {self.panels} panels on {self.workers} workers of {self.hosts} hosts in",
            f" {self.seconds:.1f} s ({self.total_seconds:.1f} s in all), without arithmetic\n",
            f"client and scheduler {self.tile_ms:.2f} ms a tile: {self.client_ms:.2f} and {self.scheduler_ms:.2f};",
            f" without heartbeats {self.work_ms:.2f}; all workers {self.worker_ms:.2f}\n",
            f"messages a tile: {sent}\n",
            f"heartbeats alone: {self.idle_scheduler:.1%} of a core of the scheduler's, {self.idle_client:.1%} of the",
            f" client's\nmemory: client {format_nbytes(self.client_nbytes)},",
            f" {format_nbytes(self.client_before_nbytes)} of it before; scheduler",
            f" {format_nbytes(self.scheduler_nbytes)}, {format_nbytes(self.scheduler_before_nbytes)} of it before",
        ]
        return "".join(lines)


_seen: set[tuple[str, str, str, Corners]] = set()
"""What the workers of this process have told of a run: worker, run, input and part."""


def stub_tile(
    product: Product, tile: Tile, sharers: Sharers, number: int, fused: Fused | None = None
) -> TileReport:
    """All of `tasks.multiply_tile` but its work. What it writes for a chunk of C is eight bytes."""
    worker, now, plan = address_of(get_worker()), time.time(), product.plan
    rows, columns = plan.c_unit
    stored = []
    for i in range(tile.row_start // rows, ceil_div(tile.row_stop, rows)):
        for j in range(tile.column_start // columns, ceil_div(tile.column_stop, columns)):
            data = tile.index.to_bytes(8, "little")
            path = object_path(product.c, (i, j))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            checksum = new_checksum()
            checksum.update(data)
            stored.append(StoredObject((i, j), len(data), checksum.intdigest()))
    spans, contents = [], []
    for start in range(0, plan.k, plan.panel_depth):
        stop = min(start + plan.panel_depth, plan.k)
        spans += [Span(worker, stage, now, now) for stage in ("load", "compute")]
        for role, corners in (
            ("A", (tile.row_start, tile.row_stop, start, stop)),
            ("B", (start, stop, tile.column_start, tile.column_stop)),
        ):
            key = worker, product.run, role, corners
            parts = None if key in _seen else ((corners, hash(corners) & 0xFFFFFFFF),)
            _seen.add(key)
            contents.append(PanelContent(role, corners, hash(corners) & 0xFFFFFFFF, parts))
    return TileReport(
        tile.index,
        worker,
        0.0,
        dict.fromkeys(STAGES, 0.0),
        frozenset({"none"}),
        0,
        spans=(*spans, Span(worker, "write", now, now)),
        stored=tuple(stored),
        contents=tuple(contents),
    )


class _Process:
    """A process that runs one of Dask's servers until it is told to end."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def receive(self) -> Any:
        """What it says next. Raises ClusterError where it has ended, or says nothing."""
        try:
            if self._pipe.poll(START_SECONDS):
                return self._pipe.recv()
        except EOFError:
            pass
        raise ClusterError(
            f"a process of the simulated cluster ended or says nothing (exit status {self._process.exitcode}); see what"
            " it wrote to standard error"
        )

    def usage(self) -> Usage:
        self._pipe.send("usage")
        found: Usage = self.receive()
        return found


def _process_seconds(process: psutil.Process | None = None) -> float:
    times = (process or psutil.Process()).cpu_times()
    return float(times.user + times.system)


async def _answer(pipe: Connection, streams: Callable[[], list[Any]]) -> None:
    """Answer questions about this process until whoever asks them is gone. streams: Dask's, by which it sends."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            await loop.run_in_executor(None, pipe.recv)
        except (EOFError, OSError):
            return
        sent = streams()
        pipe.send(
            Usage(
                _process_seconds(),
                peak_nbytes(),
                sum(stream.message_count for stream in sent),
                sum(stream.byte_count for stream in sent),
            )
        )


def _run_scheduler(pipe: Connection) -> None:
    async def run() -> None:
        async with Scheduler(
            host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0"
        ) as scheduler:
            pipe.send(scheduler.address)
            await _answer(pipe, lambda: [*scheduler.stream_comms.values(), *scheduler.client_comms.values()])

    asyncio.run(run())


_FEW_LOOKS = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "5 s",
    "distributed.admin.system-monitor.interval": "30 s",
}
"""What keeps hundreds of workers in one process from looking after that all the time: each looks at its open files,
say, twice a second. Heartbeats are as always."""


def _run_workers(
    pipe: Connection, scheduler: str, workers: int, hosts: int, threads: int, folder: str
) -> None:
    async def run() -> None:
        there = [
            Worker(
                scheduler,
                host=f"127.0.0.{2 + number * hosts // workers}",
                nthreads=threads,
                memory_limit=0,  # none: nobody looks how much is used
                name=number,
                local_directory=folder,
                dashboard=False,
                dashboard_address="127.0.0.1:0",
            )
            for number in range(workers)
        ]
        for worker in there:
            await worker
        pipe.send(len(there))
        await _answer(pipe, lambda: [worker.batched_stream for worker in there])
        await asyncio.gather(*(worker.close(nanny=False) for worker in there))

    with dask.config.set(_FEW_LOOKS):
        asyncio.run(run())


def run_control(
    folder: Path,
    *,
    tiles: int,
    workers: int = 256,
    hosts: int = 32,
    threads: int = 4,
    panels: int = 2,
    idle_seconds: float = IDLE_SECONDS,
    listener: Listener = log_notices,
) -> ControlReport:
    """Hand out and record so many tiles, or a few more, on a simulated cluster.

    folder: takes the inputs' metadata, and C; a file system in memory keeps the disk out of it. threads: of each
    worker, as many as tiles that it has under way. panels: of each tile, of A and of B.

    Raises ClusterError where the simulated cluster does not start, and as `tilewright.matmul` does.
    """
    side = CHUNK * (isqrt(max(0, tiles - 1)) + 1)
    with TemporaryDirectory(dir=folder) as place, _Process(_run_scheduler) as scheduler:
        address = scheduler.receive()
        with _Process(_run_workers, address, workers, hosts, threads, place) as working:
            working.receive()
            for name, shape in (("a", (side, CHUNK * panels)), ("b", (CHUNK * panels, side))):
                zarr.create_array(
                    Path(place, name), shape=shape, dtype="float32", chunks=(CHUNK, CHUNK), compressors=None
                )
            request = Request(
                Path(place, "a"),
                Path(place, "b"),
                Path(place, "c"),
                device="cpu",
                device_memory=BUFFERS * CHUNK**2 * 4,
                verify=False,
                listener=listener,
            )
            with dask.config.set({"tilewright.workers": workers}), Client(address) as client:
                return _measured(request, client, (scheduler, working), (workers, hosts), idle_seconds)


def _measured(
    request: Request,
    client: Client,
    servers: tuple[_Process, _Process],
    sizes: tuple[int, int],
    idle_seconds: float,
) -> ControlReport:
    """Run the product, and say what it took of this process and of the scheduler's and the workers'."""
    sent = client.scheduler_comm

    def usages() -> list[Usage]:
        here = Usage(_process_seconds(), peak_nbytes(), sent.message_count, sent.byte_count)
        return [here, *(server.usage() for server in servers)]

    began = usages()
    time.sleep(idle_seconds)
    before, start = usages(), time.perf_counter()
    run = multiply(replace(request, cluster=client), task=stub_tile)
    total, after = time.perf_counter() - start, usages()
    count = run.plan.tile_count
    names = ("client", "scheduler", "workers")
    client_ms, scheduler_ms, worker_ms = (
        1e3 * (new.seconds - old.seconds) / count for old, new in zip(before, after, strict=True)
    )
    return ControlReport(
        *sizes,
        tiles=count,
        panels=run.plan.panel_count,
        seconds=run.seconds,
        total_seconds=total,
        client_ms=client_ms,
        scheduler_ms=scheduler_ms,
        worker_ms=worker_ms,
        idle_client=(before[0].seconds - began[0].seconds) / idle_seconds,
        idle_scheduler=(before[1].seconds - began[1].seconds) / idle_seconds,
        messages={
            who: (new.messages - old.messages) / count
            for who, old, new in zip(names, before, after, strict=True)
        },
        message_nbytes={
            who: (new.nbytes - old.nbytes) / count for who, old, new in zip(names, before, after, strict=True)
        },
        client_nbytes=after[0].peak_nbytes,
        client_before_nbytes=before[0].peak_nbytes,
        scheduler_nbytes=after[1].peak_nbytes,
        scheduler_before_nbytes=before[1].peak_nbytes,
    )


@click.command("control")
@click.option("--tiles", type=COUNT, default=10_000, show_default=True, help="Tiles of C, at least.")
@click.option("--workers", type=COUNT, default=256, show_default=True, help="Workers, of Dask's own class.")
@click.option("--hosts", type=click.IntRange(1, 250), default=32, show_default=True, help="Hosts of theirs.")
@click.option("--threads", type=COUNT, default=4, show_default=True, help="Tiles that each has under way.")
@click.option("--panels", type=COUNT, default=2, show_default=True, help="Panels of each tile, about.")
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("/dev/shm"),
    show_default=True,
    help="Takes C, eight bytes a tile, and is left empty.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(folder: Path, as_json: bool, **options: Any) -> None:
    """Measure what client and scheduler take to hand out and record tiles, on many workers that compute nothing."""
    with listening(quiet=is_quiet()) as listener:
        report = run_control(folder, **options, listener=listener)
    publish(report, as_json=as_json)
