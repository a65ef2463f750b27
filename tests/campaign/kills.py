"""A command, one of whose processes is killed or stopped, right before a change of the file system or at a random time,
and the same command again."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.campaign import processes
from tests.campaign.changes import CLIENT, WORKER
from tests.campaign.lane import THREADS, WORKERS, Lane, Reference
from tests.campaign.works import COUNTS, EVERY, WORKS, Work, differences

TARGETS = {
    "local": ("client",),
    "processes": ("client", "client", "worker", "worker", "workers"),
    "site": ("client", "client", "worker", "worker", "workers", "nanny", "scheduler"),
}
"""What may be hit, by where a command runs: with a worker in its own process, with two in processes that it starts, or
on a scheduler and workers that were there before it."""
CLUSTERS = {"site": 6, "local": 3, "processes": 2}
"""How often each comes up; processes take longest to start."""
COUNT_CLUSTERS = {"local": 6, "site": 3, "processes": 1}
"""The same of counts."""
SIGNALS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP")
FOR_GOOD_SHARE = 0.15
"""Of workers and schedulers that are stopped, how many stay so: each takes the deadline for silence."""
SLOW_SECONDS = 0.02
"""The most that the storing of a chunk is delayed by in half of the cases, so that kills meet it."""
ORPHANS_SECONDS = 30
"""How long workers may take to end once the process that started them is gone."""


@dataclass(frozen=True)
class Kill:
    """One case, as its seed gives it."""

    seed: int
    work: str
    cluster: str
    target: str
    signal: str
    moment: str
    """``change``: right before one; ``time``: whenever it is."""
    counted: int
    """Whose changes are counted."""
    part: float
    """Of all changes, or of the time that the command takes by itself."""
    pause_seconds: float
    for_good: bool
    slow_seconds: float
    which: float
    """Chooses one of several workers."""


def kill_of(seed: int) -> Kill:
    rng = random.Random(f"kill {seed}")
    cluster = rng.choices(list(CLUSTERS), list(CLUSTERS.values()))[0]
    target = rng.choice(TARGETS[cluster])
    by = rng.choice(SIGNALS)
    # Workers of a process of their own count theirs too; a scheduler makes none.
    counted = rng.choice((CLIENT, WORKER)) if cluster != "local" else CLIENT
    return Kill(
        seed,
        rng.choice(list(WORKS)),
        cluster,
        target,
        by,
        rng.choices(("change", "time"), (2, 1))[0],
        counted,
        rng.random(),
        rng.uniform(0.05, 0.6),
        by == "SIGSTOP" and target in ("worker", "scheduler") and rng.random() < FOR_GOOD_SHARE,
        rng.choice((0.0, SLOW_SECONDS)),
        rng.random(),
    )


def count_kill_of(seed: int) -> Kill:
    """One of a count, by SIGKILL: right before the record gets a piece, or another change; or at any time."""
    rng = random.Random(f"count {seed}")
    cluster = rng.choices(list(COUNT_CLUSTERS), list(COUNT_CLUSTERS.values()))[0]
    return Kill(
        seed,
        rng.choice(list(COUNTS)),
        cluster,
        rng.choice(TARGETS[cluster][:5]),
        "SIGKILL",
        rng.choices(("change", "time"), (3, 1))[0],
        CLIENT,
        rng.random(),
        0.0,
        False,
        rng.choice((0.0, SLOW_SECONDS)),
        rng.random(),
    )


def run_kill(lane: Lane, kill: Kill, change: int | None = None) -> dict[str, Any]:
    """Carry a case out; returns what it is and what came of it. ``broken`` names the promises that were not kept.

    change: before which change, where it is to be another than the seed gives: those of a command differ by a few from
    run to run.
    """
    work = EVERY[kill.work]
    reference = lane.reference(work, kill.cluster)
    folder = lane.begin(work)
    before = set(lane.served()) if kill.cluster == "processes" else set()
    lane.orders.slow_seconds = kill.slow_seconds
    if change is None:
        changes = reference.changes[kill.counted]
        change = 1 + int(kill.part * changes) if kill.moment == "change" and changes else 0
    began = time.monotonic()
    if kill.cluster == "site":
        lane.site.mend()
    lane.orders.change = change
    lane.orders.role = kill.counted if change else 0
    client = lane.start(work.argv(folder), kill.cluster)
    status = _until_hit(lane, client, change, kill.part * reference.seconds)
    told: dict[str, Any] = {**asdict(kill), "change": change, "broken": []}
    hit: list[int] = []
    case = _Case(lane, work, folder, kill, reference, told)
    if status is None:
        hit = _victims(lane, kill, client, before)
        case.hit(hit)
    lane.orders.role = 0
    case.see_through(client, status, hit)
    if kill.cluster == "processes":
        told["orphans"] = len(_orphans(lane, before))
        if told["orphans"]:
            case.broken(f"{told['orphans']} worker processes outlive the command")
    told |= {"took_effect": bool(hit), "seconds": round(time.monotonic() - began, 2)}
    return told


def _until_hit(lane: Lane, client: int, change: int, seconds: float) -> int | None:
    """Wait until it is time; returns the command's exit status where it has ended before."""
    for _ in processes.looks(processes.LIMIT_SECONDS if change else seconds):
        if (status := processes.ended(client)) is not None:
            return status
        if change and lane.orders.stopped:
            processes.wait_until_stopped(lane.orders.stopped)
            return None
    return processes.ended(client)


def _victims(lane: Lane, kill: Kill, client: int, before: set[int]) -> list[int]:
    if kill.cluster == "site":
        workers = [*lane.site.served(), lane.site.worker]
    else:
        workers = _started_by_a_command(lane, before)
    stopped = lane.orders.stopped
    if kill.target == "worker" and workers:
        return [stopped if stopped in workers else workers[int(kill.which * len(workers))]]
    of = {
        "client": [client],
        "workers": workers,
        "nanny": [lane.site.nanny],
        "scheduler": [lane.site.scheduler],
    }
    return of.get(kill.target, [])


def _started_by_a_command(lane: Lane, before: set[int]) -> list[int]:
    """Worker processes that the case's command has started. before: those that were there before it."""
    return sorted({*lane.served()} - before - {*lane.site.served()})


def _orphans(lane: Lane, before: set[int]) -> list[int]:
    for _ in processes.looks(ORPHANS_SECONDS):
        if not (orphans := _started_by_a_command(lane, before)):
            return []
    for pid in orphans:
        processes.send(pid, signal.SIGKILL)
    return orphans


@dataclass
class _Case:
    lane: Lane
    work: Work
    folder: Path
    kill: Kill
    reference: Reference
    told: dict[str, Any]

    recorded: set[Any] = field(default_factory=set)
    """Pieces that the record named at the kill."""
    stored: int = 0
    """Chunks that had been stored by then."""

    def broken(self, promise: str) -> None:
        self.told["broken"].append(promise)

    def hit(self, victims: Sequence[int]) -> None:
        """Send the signal."""
        for pid in victims:
            processes.send(pid, getattr(signal, self.kill.signal))
        # In this order: what is recorded has been stored before.
        self.recorded = self.work.recorded(self.folder)
        self.stored = len(self.lane.stored())
        self.told["recorded_at_the_kill"] = len(self.recorded)
        stopped = self.lane.orders.stopped
        if stopped and (self.kill.signal != "SIGSTOP" or stopped not in victims):
            processes.send(stopped, signal.SIGCONT)
        if self.kill.signal == "SIGSTOP" and not self.kill.for_good:
            time.sleep(self.kill.pause_seconds)
            for pid in victims:
                processes.send(pid, signal.SIGCONT)

    def see_through(self, client: int, status: int | None, hit: Sequence[int]) -> None:
        """Let the command end, run it again where it has not succeeded, and look at what there is then."""
        statuses = [self._status(client, status, 0)]
        if self.kill.for_good:
            for pid in hit:
                processes.send(pid, signal.SIGKILL)
        if self.kill.for_good or self.kill.signal != "SIGSTOP":
            processes.wait_until_gone(hit)  # lest the next command is given to who is about to end
        recorded, stored = self.work.recorded(self.folder), len(self.lane.stored())
        if statuses[0] != 0 and not self.work.result(self.folder):
            statuses.append(self._status(self.lane.start(self._argv(), self.kill.cluster, 1), None, 1))
            if statuses[1] != 0:
                self.broken(f"run again it ends with {statuses[1]}: {self._last_line(1)}")
            else:
                self._compare_work(recorded, stored)
        # Nobody's loss where the command goes on: Dask computes a result again that it was still to give up when the
        # worker that had it ended, and a worker that was stopped may store what another has finished in its place.
        again = self._tiles(self.lane.stored()[self.stored :]) & self.recorded
        self.told["recorded_again"] = len(again)
        if again and self.kill.target == "client" and self.kill.signal != "SIGSTOP":
            self.broken(f"tiles recorded at the kill were computed again: {sorted(again)[:8]}")
        if self.kill.signal != "SIGSTOP":
            lost = self.recorded - recorded
            if lost and statuses[0] != 0:
                self.broken(f"the record has lost {len(lost)} pieces")
        self.told |= {"statuses": statuses, "pieces": self.reference.pieces, "recorded": len(recorded)}
        result = self.work.result(self.folder)
        if result or statuses[-1] == 0:
            if found := differences(result, self.reference.result):
                self.broken(f"the output is another: {', '.join(found[:4])}, {len(found)} files in all")
            if left := self.work.leftovers(self.folder):
                self.broken(f"left over: {', '.join(left[:4])}")
        times = Counter(self.lane.stored())
        self.told["computed_again"] = again = len(self._tiles([path for path in times if times[path] > 1]))
        self.told["under_way_at_most"] = most = self.most_under_way(len(statuses))
        if again > most:
            self.broken(f"{again} tiles were computed again, and {most} at most were under way")

    def most_under_way(self, commands: int) -> int:
        """Each worker has a tile under way for each of its threads, and one that waits. What a silent one has under
        way, as on a busy host, is given to another too."""
        logs = [self.lane.log(number).read_text(errors="replace") for number in range(commands)]
        silent = sum(log.count("has not been heard from") for log in logs)
        workers = 1 if self.kill.cluster == "local" else WORKERS
        return (workers + silent) * (THREADS + 1)

    def _argv(self) -> list[str]:
        return self.work.argv(self.folder)

    def _status(self, client: int, status: int | None, number: int) -> int | None:
        if status is None:
            status = processes.wait(client)
        if status is None:
            self.broken(f"command {number} hangs for {processes.LIMIT_SECONDS} s")
            processes.end(client)
        if "Traceback" in self.lane.log(number).read_text(errors="replace"):
            self.broken(f"command {number} prints a traceback")
        return status

    def _last_line(self, number: int) -> str:
        return (self.lane.log(number).read_text(errors="replace").strip().splitlines() or [""])[-1][-300:]

    def _compare_work(self, recorded: set[Any], stored: int) -> None:
        """Nothing that the record named is done again. recorded, stored: what it named, and how many chunks had been
        stored, before the second command."""
        kept = self.work.kept(self.lane.printed(1), recorded, self.folder)
        self.told["kept"] = kept
        if kept != len(recorded):
            self.broken(f"{len(recorded)} pieces were recorded, and {kept} of them kept")
        if again := self._tiles(self.lane.stored()[stored:]) & recorded:
            self.broken(f"recorded tiles were computed again: {sorted(again)[:8]}")

    def _tiles(self, chunks: Sequence[str]) -> set[int]:
        """The tiles that chunks belong to, given by their paths."""
        return {self.reference.tiles["/".join(path.split("/")[-3:])] for path in chunks}


def keep_logs(lane: Lane, place: Path) -> None:
    """Copy what the commands of a case wrote."""
    place.mkdir(parents=True, exist_ok=True)
    for log in lane.home.glob("*.log"):
        shutil.copy(log, place)
