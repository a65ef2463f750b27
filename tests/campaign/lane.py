"""Where one case after another runs: a folder, the cluster of its own that cases leave standing, and what the commands
give that nothing disturbs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tests.campaign import processes
from tests.campaign.changes import CLIENT, WORKER, log_of, orders_at
from tests.campaign.works import EVERY, PIECE_NBYTES, TILES, Product, Work, tiles_of_chunks

WORKERS, THREADS = 2, 2
DEADLINE_SECONDS = 5
"""After which silence a worker or a scheduler is given up; none of a case is silent so long by itself."""
NANNY_SECONDS = 20
"""Within which a nanny starts its worker anew, on a busy host."""

ENVIRONMENT = {
    "DASK_LOGGING__DISTRIBUTED": "critical",
    "DASK_TILEWRIGHT__TILES": str(TILES),
    "DASK_TILEWRIGHT__PIECE_NBYTES": str(PIECE_NBYTES),
    "DASK_TILEWRIGHT__WORKER_DEADLINE": str(DEADLINE_SECONDS),
    "DASK_TILEWRIGHT__JOIN_SECONDS": "15",
    "DASK_TILEWRIGHT__CLUSTER_FILE": "cluster.yaml",
}
PROFILES = f"""profiles:
  processes: {{kind: cpu, n_workers: {WORKERS}, threads_per_worker: {THREADS}}}
"""


class Closeable(Protocol):
    def close(self) -> None: ...


Owned = TypeVar("Owned", bound=Closeable)


@dataclass(frozen=True)
class Reference:
    """What a command gives that nothing disturbs."""

    result: dict[str, str]
    changes: tuple[int, int, int]
    """By role, how many changes of the file system each of its processes makes at most."""
    seconds: float
    pieces: int
    tiles: dict[str, int]
    """Of a product: the tile that each chunk belongs to, by its name."""


class Lane:
    """One case at a time runs here."""

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        self.folder = folder
        self.modules = modules
        self.home = folder / "home"
        """What nobody counts changes of."""
        self.work_folder = folder / "case"
        self.home.mkdir(parents=True)
        self.orders_path = self.work_folder / "orders"
        self.work_folder.mkdir()
        self.orders = orders_at(self.orders_path)
        (self.home / "cluster.yaml").write_text(PROFILES)
        self.site = Site(self)
        self.references: dict[tuple[str, str], Reference] = {}
        self.owned: dict[Any, Any] = {}
        os.chdir(self.home)
        os.environ.update(ENVIRONMENT)
        self.mend()

    def mend(self) -> None:
        """Start what serves processes to all, if it has ended, and then what it has served."""
        if processes.ensure_fork_server(self.orders_path, self.modules):
            self.site.stop()

    def own(self, make: Callable[[Path], Owned]) -> Owned:
        """Something else that cases leave standing, made in the folder that changes are counted in when it is first
        asked for, and closed with this."""
        if make not in self.owned:
            self.owned[make] = make(self.work_folder)
        found: Owned = self.owned[make]
        return found

    def close(self) -> None:
        for one in self.owned.values():
            one.close()
        self.site.stop()
        processes.end(processes.fork_server_pid())

    def begin(self, work: Work) -> Path:
        """A new case: the folder with the inputs of this work alone, and nothing ordered."""
        self.orders.role, self.orders.change, self.orders.stopped = 0, 0, 0
        self.orders.slow_seconds = 0.0
        self.orders.changes[:] = [0, 0, 0]
        self.orders.case += 1
        log_of(self.orders_path).write_text("")
        folder = self.work_folder / work.name
        source = self.home / work.name
        if not source.exists():
            source.mkdir()
            # By a process of its own: zarr starts threads, and what has some must not fork.
            made = processes.wait(processes.fork(lambda: work.make_inputs(source), self.home / "inputs.log"))
            assert made == 0, (self.home / "inputs.log").read_text()
        for entry in folder.iterdir() if folder.exists() else ():
            if not (source / entry.name).exists():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if not folder.exists():
            shutil.copytree(source, folder)
        return folder

    def start(self, argv: Sequence[str], cluster: str, number: int = 0) -> int:
        """Start a command, on a cluster if any; returns the process's id."""
        where, environment = cluster, {}
        self.mend()
        if cluster == "site":
            self.site.mend()
            where, environment = self.site.address, {"DASK_TILEWRIGHT__WORKERS": str(WORKERS)}
        return processes.fork(
            processes.call_command([*argv, *(["--profile", where] if where else [])]),
            self.log(number),
            environment=environment,
            orders=self.orders_path,
            role=CLIENT,
        )

    def run_to(self, work: Work, part: float | None) -> Path:
        """Run a work on a local cluster to its end, or kill it right before the change that ends this part of all;
        returns its folder."""
        changes = self.reference(work, "local").changes[CLIENT]
        folder = self.begin(work)
        if part is not None:
            self.orders.change, self.orders.role = int(part * changes), CLIENT
        client = self.start(work.argv(folder), "local")
        for _ in processes.looks(processes.LIMIT_SECONDS):
            if self.orders.stopped or processes.ended(client) is not None:
                break
        if part is not None:
            processes.wait_until_stopped(self.orders.stopped)
            processes.end(client)
        return folder

    def served(self) -> list[int]:
        """The worker processes that nannies have started."""
        return processes.children_of(processes.fork_server_pid())

    def log(self, number: int) -> Path:
        return self.home / f"command-{number}.log"

    def printed(self, number: int) -> dict[str, Any]:
        """The result that a command has printed."""
        try:
            found = json.loads(self.log(number).with_suffix(".out").read_text())
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def stored(self) -> list[str]:
        """Chunks that were stored in this case, again where that was done again."""
        return log_of(self.orders_path).read_text().splitlines()

    def reference(self, work: Work, cluster: str) -> Reference:
        key = work.name, cluster
        if key not in self.references:
            folder = self.begin(work)
            began = time.monotonic()
            status = processes.wait(self.start(work.argv(folder), cluster))
            seconds = time.monotonic() - began
            assert status == 0, f"{work.name} on {cluster}: {status}\n{self.log(0).read_text()}"
            _, client, worker = self.orders.changes
            # Else no kill would come right before a change of a worker, and nothing that one stores would count.
            assert worker or cluster == "local" or not isinstance(work, Product), (
                f"{cluster}: no worker heeds"
            )
            self.references[key] = Reference(
                work.result(folder),
                (0, client, worker),
                seconds,
                len(work.recorded(folder)) or self.printed(0)["plan"]["tile_count"],
                tiles_of_chunks(work.output(folder)) if isinstance(work, Product) else {},
            )
        return self.references[key]


class Site:
    """A scheduler and two workers, one of them with a nanny, which are there before a command starts."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.scheduler = self.worker = self.nanny = 0
        self.address = ""

    def mend(self) -> None:
        """Start what is not there."""
        self.lane.mend()
        if not self.scheduler or not processes.is_alive(self.scheduler):
            self.stop()
            self._start_scheduler()
        log = self.lane.home
        if not self.worker or not processes.is_alive(self.worker):
            if self.worker:
                processes.end(self.worker)
            self.worker = processes.fork(
                lambda: _worker(self.address, "--no-nanny"),
                log / "worker.log",
                orders=self.lane.orders_path,
                role=WORKER,
            )
        for part in range(2):
            for _ in processes.looks(NANNY_SECONDS):
                if not self.nanny or not processes.is_alive(self.nanny):  # or it was about to end
                    if self.nanny:
                        processes.end(self.nanny)
                    self.nanny = processes.fork(lambda: _worker(self.address), log / "nanny.log")
                if self.served():
                    return
            if part == 0:
                # Dask's waits for a worker that was killed while it started, starts none, and does not end either.
                processes.end(self.nanny)
        raise RuntimeError(f"no worker of a nanny starts:\n{(log / 'nanny.log').read_text()}")

    def served(self) -> list[int]:
        """The worker processes of the nanny: between the two there are pipes. A process of the fork server has no other
        tie to who asked for it, and a nanny starts its worker anew at any time."""
        if not self.nanny:
            return []
        pipes = processes.pipes_of(self.nanny) - processes.pipes_of(os.getpid())  # what all were born with
        return [pid for pid in self.lane.served() if pipes & processes.pipes_of(pid)]

    def _start_scheduler(self) -> None:
        file = self.lane.home / "scheduler.json"
        file.unlink(missing_ok=True)

        def run() -> None:
            from distributed.cli.dask_scheduler import main

            main(["--scheduler-file", str(file), "--host", "127.0.0.1", "--port", "0", "--no-dashboard"])

        self.scheduler = processes.fork(run, self.lane.home / "scheduler.log")
        for _ in processes.looks(processes.LIMIT_SECONDS):
            try:
                self.address = json.loads(file.read_text())["address"]
            except (OSError, ValueError):
                continue
            return
        raise RuntimeError((self.lane.home / "scheduler.log").read_text())

    def stop(self) -> None:
        for pid in (self.nanny, self.worker, self.scheduler):
            if pid:
                processes.end(pid)
        for pid in self.lane.served():  # the nanny's
            processes.send(pid, signal.SIGKILL)
        self.scheduler = self.worker = self.nanny = 0


def _worker(address: str, *options: str) -> None:
    from distributed.cli.dask_worker import main

    here = ["--nthreads", str(THREADS), "--memory-limit", "1GiB", "--no-dashboard", "--host", "127.0.0.1"]
    main([address, *here, "--death-timeout", "60", *options])


def run_all(folder: Path) -> None:
    """Every command of a campaign once, in this process."""
    from tilewright.workflows.cli import cli
    from tilewright.workflows.repair import repair

    folder.mkdir()
    for work in EVERY.values():
        work.make_inputs(folder)
        cli.main(work.argv(folder), standalone_mode=False)
        if isinstance(work, Product):
            repair(folder / "A.zarr", folder / "B.zarr", work.output(folder))
        shutil.rmtree(folder)
        folder.mkdir()
