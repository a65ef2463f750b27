"""A cluster's workers as their scheduler knows them, while somebody's job runs there: what each has done, how fast, and
what memory is left. Nothing is asked of the workers themselves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Client
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tilewright.kernels.numbers import counted, format_count, format_nbytes, format_seconds
from tilewright.pipeline.cluster.answers import answer_of
from tilewright.pipeline.cluster.cluster import open_cluster
from tilewright.pipeline.cluster.profiles import load_profiles
from tilewright.pipeline.errors import ClusterError
from tilewright.workflows.batch.folder import INSIDE_PROFILE, JobFolder
from tilewright.workflows.batch.listing import folder_of

if TYPE_CHECKING:
    from rich.console import RenderableType

STAGES = ("read", "upload", "compute", "download", "write", "count")
"""Of workers, in the order in which they are shown."""
LEAST_SHARE = 0.005
"""A stage that was busy for less of the time is not shown."""
SILENT_SECONDS = 10.0
"""After how long without a heartbeat a worker is shown as silent."""


@dataclass(frozen=True)
class WorkerLook:
    """One worker, as of its last heartbeat."""

    address: str
    name: str
    threads: int
    executing: int
    """Tasks that it computes."""
    seen: float
    """When its heartbeat came, in seconds since the epoch, by the scheduler's clock."""
    memory_nbytes: int
    memory_limit_nbytes: int
    cpu_percent: float
    tiles: int = 0
    pieces: int = 0
    read_nbytes: int = 0
    write_nbytes: int = 0
    operations: int = 0
    """These five, and the seconds, since it was started."""
    seconds: Mapping[str, float] | None = None
    """Busy, by stage; None: it has done no work of ours."""
    device_free_nbytes: int | None = None
    device_total_nbytes: int | None = None
    metrics: str | None = None
    """Where it serves them to Prometheus, as ``host:port``; None: it does not, or has done no work of ours."""

    @classmethod
    def of(cls, address: str, worker: Mapping[str, Any]) -> WorkerLook:
        """worker: as the scheduler has it (``WorkerState.identity``)."""
        metrics = worker.get("metrics") or {}
        ours = metrics.get("tilewright") or {}
        return cls(
            address=address,
            name=str(worker.get("name", address)),
            threads=worker["nthreads"],
            executing=(metrics.get("task_counts") or {}).get("executing", 0),
            seen=worker["last_seen"],
            memory_nbytes=metrics.get("memory") or 0,
            memory_limit_nbytes=worker.get("memory_limit") or 0,
            cpu_percent=metrics.get("cpu") or 0.0,
            **ours,
        )


@dataclass(frozen=True)
class WorkerRates:
    """What a worker did between two of its heartbeats, a second."""

    tiles: float = 0.0
    pieces: float = 0.0
    read_nbytes: float = 0.0
    write_nbytes: float = 0.0
    operations: float = 0.0
    busy: Mapping[str, float] | None = None
    """The share of the time by stage; more than 1 where it did several things of a stage at once."""

    @classmethod
    def between(cls, before: WorkerLook | None, now: WorkerLook) -> WorkerRates:
        """Zero where nothing is known of it: it is new, or no heartbeat came."""
        if before is None or now.seen <= before.seen:
            return cls()
        seconds = now.seen - before.seen
        earlier = before.seconds or {}
        return cls(
            tiles=(now.tiles - before.tiles) / seconds,
            pieces=(now.pieces - before.pieces) / seconds,
            read_nbytes=(now.read_nbytes - before.read_nbytes) / seconds,
            write_nbytes=(now.write_nbytes - before.write_nbytes) / seconds,
            operations=(now.operations - before.operations) / seconds,
            busy={
                stage: (busy - earlier.get(stage, 0.0)) / seconds
                for stage, busy in (now.seconds or {}).items()
            },
        )


@dataclass(frozen=True)
class ClusterLook:
    """All workers of a cluster at a time."""

    scheduler: str
    when: float
    """Seconds since the epoch, by this host's clock."""
    workers: tuple[WorkerLook, ...]
    rates: tuple[WorkerRates, ...]
    """Of each, since the look before, or since an earlier one where no heartbeat came since."""

    def to_json(self) -> dict[str, Any]:
        return {
            "scheduler": self.scheduler,
            "when": self.when,
            "workers": [
                {**asdict(worker), "rates": asdict(rates)}
                for worker, rates in zip(self.workers, self.rates, strict=True)
            ],
        }

    def table(self) -> RenderableType:
        """The same for a terminal."""
        if not self.workers:
            return Text(f"{self.scheduler}: no workers")
        shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
        gpus = any(worker.device_total_nbytes for worker in self.workers)
        texts = any(worker.pieces for worker in self.workers)
        columns = ["worker", "tiles", *(["pieces"] if texts else []), "reads", "writes", "computes"]
        columns += ["busy", "CPU", "memory", *(["GPU memory free"] if gpus else []), "seen"]
        for place, name in enumerate(columns):
            left = place == 0 or name == "busy"
            shown.add_column(name, justify="left" if left else "right", no_wrap=place == 0)
        newest = max(worker.seen for worker in self.workers)
        for worker, rates in zip(self.workers, self.rates, strict=True):
            shown.add_row(*_cells(worker, rates, newest, gpus=gpus, texts=texts))
        return Group(Text(self._summary()), shown)

    def _summary(self) -> str:
        tiles, pieces = (
            sum(getattr(worker, name) for worker in self.workers) for name in ("tiles", "pieces")
        )
        done = [counted(tiles, "tile")] if tiles or not pieces else []
        done += [counted(pieces, "piece")] if pieces else []
        reads = sum(rates.read_nbytes for rates in self.rates)
        operations = sum(rates.operations for rates in self.rates)
        busy = sum(1 for worker in self.workers if worker.executing)
        return (
            f"{self.scheduler}  {time.strftime('%H:%M:%S', time.localtime(self.when))}  "
            f"{counted(len(self.workers), 'worker')}, {busy} at work  {' and '.join(done)} done  "
            f"{format_nbytes(reads)}/s read  {format_count(operations)}op/s"
        )

    def __str__(self) -> str:
        console = Console(width=160, no_color=True)
        with console.capture() as captured:
            console.print(self.table())
        return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _cells(
    worker: WorkerLook, rates: WorkerRates, newest: float, *, gpus: bool, texts: bool
) -> Iterator[Text | str]:
    yield Text(worker.name if worker.name == worker.address else f"{worker.name} {worker.address}")
    yield str(worker.tiles)
    if texts:
        yield str(worker.pieces)
    yield f"{format_nbytes(rates.read_nbytes)}/s"
    yield f"{format_nbytes(rates.write_nbytes)}/s"
    yield f"{format_count(rates.operations)}op/s"
    busy = rates.busy or {}
    parts = [f"{stage} {busy[stage]:.0%}" for stage in STAGES if busy.get(stage, 0.0) >= LEAST_SHARE]
    yield ", ".join(parts) or ("–" if worker.seconds is None else "idle")
    yield f"{worker.cpu_percent:.0f} %"
    limit = f" of {format_nbytes(worker.memory_limit_nbytes)}" if worker.memory_limit_nbytes else ""
    yield f"{format_nbytes(worker.memory_nbytes)}{limit}"
    if gpus:
        free, total = worker.device_free_nbytes, worker.device_total_nbytes
        yield "–" if free is None or total is None else f"{format_nbytes(free)} of {format_nbytes(total)}"
    silent = newest - worker.seen
    told = f"{format_seconds(silent)} ago" if silent >= 1 else "now"
    yield Text(told, style="bold red" if silent >= SILENT_SECONDS else "")


@contextmanager
def cluster_at(where: str, cluster_file: str | None = None) -> Iterator[Client]:
    """A client of a running cluster: by its scheduler's address; a batch job's folder, or its number; or a profile of
    kind existing.

    Raises
    ------
    ClusterError
        No scheduler answers there; the job has none (yet, or any more); the profile is not known, or would start a
        cluster of its own.
    OptionError
        There is no job of that number.
    """
    if "://" in where:
        with open_cluster(where, loops=False) as client:
            yield client
        return
    folder = None
    if os.sep in where or os.path.isdir(where):
        folder = JobFolder(Path(where))
    elif where.isdecimal():
        folder = folder_of(where)
    if folder is not None:
        if not os.path.isfile(folder.profiles):
            raise ClusterError(
                f"{folder.path} is no folder of a batch job that runs: there is no {folder.profiles.name}, the way to"
                " its scheduler; tilewright jobs lists jobs, and how they stand"
            )
        with open_cluster(INSIDE_PROFILE, folder.profiles, loops=False) as client:
            yield client
        return
    profiles = load_profiles(cluster_file)
    kind = profiles[where].options["kind"] if where in profiles else "existing"
    if kind != "existing":
        raise ClusterError(
            f"{profiles[where].called(where)} is of kind {kind}, which starts a cluster for each command: there is none"
            " to look at; give the address of a scheduler (tcp://host:8786), a profile of kind existing, or a batch"
            " job's number"
        )
    with open_cluster(where, cluster_file, loops=False) as client:
        yield client


def looks(
    client: Client,
    interval: float,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[ClusterLook]:
    """A look at the cluster every ``interval`` seconds, for as long as there is one. The first has no rates.

    Raises ClusterError where the scheduler is gone.
    """
    before: dict[str, WorkerLook] = {}
    rates: dict[str, WorkerRates] = {}
    while True:
        found = answer_of(client, lambda: client.sync(client.scheduler.identity, n_workers=-1))
        workers = tuple(
            WorkerLook.of(address, worker) for address, worker in sorted(found["workers"].items())
        )
        for worker in workers:
            earlier = before.get(worker.address)
            if earlier is None or worker.seen > earlier.seen:  # else there is no news of it
                rates[worker.address] = WorkerRates.between(earlier, worker)
                before[worker.address] = worker
        yield ClusterLook(
            found["address"], clock(), workers, tuple(rates[worker.address] for worker in workers)
        )
        sleep(interval)


def watch(client: Client, interval: float, show: Callable[[ClusterLook], None], *, once: bool) -> None:
    """Show looks until Ctrl-C, or where the cluster ends; with ``once`` the second alone, which has rates."""
    for place, look in enumerate(looks(client, interval)):
        if not once:
            show(look)
        elif place == 1:
            show(look)
            return
