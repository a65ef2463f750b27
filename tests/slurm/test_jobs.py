"""Jobs that run to their end, and that are stopped in every way: by the clock, by others, by hand, and by failures.

Each product is compared with NumPy's, and its chunks with those that were there when the job was stopped: what was
recorded is never stored again, so that what is computed again is at most what was under way.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import yaml
import zarr

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
RIG = Path(os.environ.get("TILEWRIGHT_SLURM_RIG", "/nonexistent"))
TILES = 64
CHUNKS = 4
"""Of each tile."""
UNDER_WAY = 8
"""Tiles that two workers may have under way: two threads each, and as many that are being written."""
WAIT_SECONDS = 420
IDLE_SECONDS = 30
"""How long an allocation may outlive its work."""


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def wait_for(what: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, f"{what} is not so after {seconds} s"
        time.sleep(0.2)


def processes(*words: str) -> list[int]:
    """Those whose command has all of these words."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                command = (folder / "cmdline").read_bytes().decode(errors="replace")
                if all(word in command for word in words):
                    found.append(int(folder.name))
    return found


def children(pid: int) -> list[int]:
    """Of all threads of a process."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(child) for child in path.read_text().split()]
    return found


def environment_of(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


@dataclass
class Run:
    """A command in a terminal, and the job that it has submitted."""

    place: Path
    process: subprocess.Popen[str]
    output: str = "C.zarr"
    before: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The chunks of C at the last stop: file and time of each."""

    @property
    def said(self) -> str:
        return (self.place / f"{self.output}.stderr").read_text()

    @property
    def job(self) -> str:
        found = re.search(r"^submitted as job (\d+); its files are in (.+)$", self.said, re.M)
        assert found is not None, self.said
        return found[1]

    @property
    def folder(self) -> Path:
        found = re.search(r"^submitted as job \d+; its files are in (.+)$", self.said, re.M)
        assert found is not None, self.said
        return Path(found[1])

    def chunks(self) -> dict[str, tuple[int, int]]:
        found = {}
        for name in (f"{self.output}.partial", self.output):
            folder = self.place / name / "c"
            if folder.is_dir():
                for path in folder.rglob("*"):
                    with suppress(OSError):
                        if path.is_file() and path.name.isdigit():
                            status = path.stat()
                            found[str(path.relative_to(folder))] = status.st_ino, status.st_mtime_ns
        return found

    def wait_for_tiles(self, count: int) -> None:
        wait_for(lambda: len(self.chunks()) >= count * CHUNKS or self.process.poll() is not None)
        assert self.process.poll() is None, self.said

    def wait_for_more_tiles(self) -> None:
        """Until it has stored another one, or is over."""
        there = len(self.chunks())
        wait_for(lambda: len(self.chunks()) >= there + CHUNKS or self.process.poll() is not None)

    def stored_again(self) -> int:
        now = self.chunks()
        return sum(now.get(name) != was for name, was in self.before.items())

    def state(self) -> str:
        return slurm("squeue", "--noheader", "--states=all", f"--jobs={self.job}", "--format=%T").strip()

    def attempt(self) -> int:
        with suppress(OSError, ValueError):
            return int(json.loads((self.folder / "state.json").read_text())["attempt"])
        return 0

    def finished(self) -> dict[str, object]:
        """The report of the command, which has come to a good end."""
        status = self.process.wait(WAIT_SECONDS)
        assert status == 0, self.said
        report: dict[str, object] = json.loads((self.place / f"{self.output}.stdout").read_text())
        a, b, c = (
            zarr.open_array(self.place / name, mode="r")[...] for name in ("A.zarr", "B.zarr", self.output)
        )
        np.testing.assert_array_equal(c, a @ b)
        return report

    def goes_on(self, attempt: int = 2) -> dict[str, object]:
        """The job was stopped, and has come to a good end in another try."""
        report = self.finished()
        assert self.attempt() >= attempt, self.said
        kept = report["resumed"]
        assert isinstance(kept, int)
        assert kept >= len(self.before) // CHUNKS - UNDER_WAY
        assert self.stored_again() <= UNDER_WAY * CHUNKS
        return report


@pytest.fixture
def place(tmp_path: Path, rng: np.random.Generator) -> Iterator[Path]:
    profile = {"kind": "slurm", "nodes": 2, "gpus_per_node": 0, "cpus_per_task": 1, "time": "10", "tries": 4}
    profiles = {"site": profile, "short": profile | {"time": "2"}}
    profiles["patient"] = profile | {"time": "60", "tries": 99}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"profiles": profiles}))
    for name, shape, chunks in (("A", (2048, 64), (256, 64)), ("B", (64, 2048), (64, 256))):
        array = zarr.create_array(tmp_path / f"{name}.zarr", shape=shape, chunks=chunks, dtype="int64")
        array[...] = rng.integers(-99, 99, shape)
    yield tmp_path
    slurm("scancel", f"--user={os.getuid()}")
    wait_for(lambda: not slurm("squeue", "--noheader"))


@pytest.fixture
def submit(place: Path) -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def call(seconds: float = 1, profile: str = "site", output: str = "C.zarr") -> Run:
        command = [sys.executable, "-m", "tilewright", "matmul", "A.zarr", "B.zarr", output, "--json"]
        command += ["--profile", profile, "--device-memory", "1MiB", "--device", "cpu"]
        more = {
            "PYTHONPATH": str(ROOT),
            "DASK_TILEWRIGHT__JOBS_FOLDER": str(place / "jobs"),
            "DASK_TILEWRIGHT__TILES": str(TILES),
            "DASK_DISTRIBUTED__WORKER__PRELOAD": str([str(ROOT / "tests" / "slurm" / "slow_tiles.py")]),
            "TILE_SECONDS": str(seconds),
        }
        with (place / f"{output}.stdout").open("w") as out, (place / f"{output}.stderr").open("w") as errors:
            process = subprocess.Popen(
                command, cwd=place, env=os.environ | more, stdout=out, stderr=errors, text=True
            )
        run = Run(place, process, output)
        started.append(run)
        wait_for(lambda: "submitted as job" in run.said or process.poll() is not None)
        return run

    yield call
    for run in started:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


def test_one_command_submits_follows_and_has_the_result(submit: Callable[..., Run]) -> None:
    run = submit(seconds=0)
    report = run.finished()
    assert report["resumed"] == 0
    plan = report["plan"]
    assert isinstance(plan, dict)
    assert plan["workers"] == 2
    assert plan["tile_count"] * CHUNKS == TILES * CHUNKS == len(run.chunks())
    assert re.search(rf"^job {run.job} has started on c\[1-2\]$", run.said, re.M)
    assert "A.zarr" not in (run.folder / "script").read_text()
    assert run.folder.stat().st_mode & 0o77 == 0
    assert len(run.said.splitlines()) <= 12, "logs are quiet"


def test_two_jobs_at_once_share_nothing(submit: Callable[..., Run]) -> None:
    one, two = submit(output="C.zarr"), submit(output="D.zarr")
    one.wait_for_tiles(2)
    two.wait_for_tiles(2)
    assert all(len(processes("dask", "scheduler", str(run.folder))) == 1 for run in (one, two))
    addresses = {
        json.loads(next(run.folder.glob("scheduler-*.json")).read_text())["address"] for run in (one, two)
    }
    assert len(addresses) == 2
    one.finished()
    two.finished()


def test_a_time_limit_is_met_by_another_try(submit: Callable[..., Run]) -> None:
    """A job of two minutes gets SIGTERM after one; all tiles take longer."""
    run = submit(seconds=4, profile="short")
    run.wait_for_tiles(4)
    wait_for(lambda: run.attempt() == 2 or run.process.poll() is not None)
    run.before = run.chunks()
    run.goes_on()
    assert f"job {run.job} was asked to end (SIGTERM)" in run.said
    assert "terminated: " in run.said
    assert re.search(rf"job {run.job} is queued again \(try 2 of 4\): BeginTime: ", run.said)


def test_preemption_is_met_by_another_try(submit: Callable[..., Run]) -> None:
    run = submit()
    run.wait_for_tiles(8)
    preempted(run)
    run.goes_on()
    assert "was asked to end" in run.said


def test_a_signal_to_the_workers_alone_is_met_by_another_try(submit: Callable[..., Run]) -> None:
    """As Slurm sends at preemption on most sites: the workers go on until what is nearly done is finished."""
    run = submit()
    run.wait_for_tiles(8)
    workers_signalled(run)
    run.goes_on()
    assert f"job {run.job} was asked to end (SIGTERM to its workers)" in run.said
    assert "was lost" not in run.said


def test_a_node_that_goes_down_is_met_by_another_try(submit: Callable[..., Run]) -> None:
    run = submit(seconds=4)  # the other node alone is not to finish before Slurm has noticed
    run.wait_for_tiles(8)
    node_down(run)
    run.goes_on()


def test_a_cancelled_job_is_not_queued_again(submit: Callable[..., Run]) -> None:
    run = submit()
    run.wait_for_tiles(4)
    slurm("scancel", run.job)
    assert run.process.wait(WAIT_SECONDS) != 0
    assert run.state() == "CANCELLED"
    assert run.attempt() == 1
    # Slurm signals all processes at once, so that the scheduler may be gone before the command has drained.
    assert "C.zarr.partial keeps" in run.said or "tiles are finished and kept" in run.said


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        (lambda run: scheduler_killed(run), "its scheduler ended by signal 9"),
        (lambda run: launcher_killed(run), "srun, and with it all workers, ended by signal 9"),
    ],
    ids=["scheduler", "srun"],
)
def test_a_job_that_cannot_go_on_ends_at_once(
    submit: Callable[..., Run], stop: Callable[[Run], None], said: str
) -> None:
    run = submit()
    run.wait_for_tiles(8)
    stop(run)
    assert run.process.returncode == 1
    assert f"error: job {run.job}: {said}" in run.said

    again = submit(seconds=0)
    again.before = run.before
    again.goes_on(attempt=1)


def test_workers_that_are_killed_are_started_again(submit: Callable[..., Run]) -> None:
    run = submit()
    run.wait_for_tiles(8)
    workers_killed(run)
    report = run.finished()
    assert run.attempt() == 1
    assert run.stored_again() <= UNDER_WAY * CHUNKS
    assert report["workers_lost"]


def test_random_stops_lose_no_tile(submit: Callable[..., Run]) -> None:
    """`STOPS` of them (3), chosen by `STOPS_SEED`; what is computed again is at most what was under way at each."""
    stops = int(os.environ.get("STOPS", "3"))
    seed = int(os.environ.get("STOPS_SEED", "0")) or time.time_ns()
    ways = [
        node_down,
        preempted,
        signalled,
        workers_signalled,
        workers_killed,
        scheduler_killed,
        launcher_killed,
    ]
    chosen = random.Random(seed).choices(ways, k=stops)
    told = f"STOPS_SEED={seed}: {[stop.__name__ for stop in chosen]}"
    print(told)
    run = submit(seconds=2, profile="patient")
    for stop in chosen:
        run.wait_for_more_tiles()
        stop(run)
        if run.process.poll() == 0:
            break
        if run.process.poll() is not None:
            before = run.before
            run = submit(seconds=2, profile="patient")
            run.before = before
        run.wait_for_more_tiles()
        assert run.stored_again() <= UNDER_WAY * CHUNKS, told
    run.finished()
    assert run.stored_again() <= UNDER_WAY * CHUNKS, told


def node_down(run: Run) -> None:
    """The second node is gone, until Slurm has noticed."""
    there = {b"SLURMD_NODENAME=c2", f"SLURM_CONF={RIG}/etc/slurm.conf".encode()}
    node = [pid for pid in processes() if there <= set(environment_of(pid).split(b"\0"))]
    steps = [pid for pid in processes("slurmstepd", "[") if set(children(pid)) & set(node)]
    kill(int((RIG / "run" / "slurmd-c2.pid").read_text()), *steps, *node)
    try:
        wait_for(lambda: run.state() != "RUNNING")
        run.before = run.chunks()
    finally:
        subprocess.run([ROOT / "tests" / "slurm" / "rig" / "node", RIG, "c2"], check=True)


def preempted(run: Run) -> None:
    slurm(
        "sbatch",
        "--partition=high",
        "--nodes=2",
        "--exclusive",
        "--time=1",
        "--output=/dev/null",
        "--wrap=sleep 5",
    )
    wait_for(lambda: run.state() != "RUNNING")
    run.before = run.chunks()


def signalled(run: Run) -> None:
    slurm("scancel", "--batch", "--signal=TERM", run.job)
    wait_for(lambda: run.state() != "RUNNING")
    run.before = run.chunks()


def workers_signalled(run: Run) -> None:
    slurm("scancel", "--signal=TERM", run.job)
    wait_for(lambda: run.state() != "RUNNING")
    run.before = run.chunks()


def workers_killed(run: Run) -> None:
    """Nannies start them again."""
    run.before = run.chunks()
    nannies = processes("batch.nannies", str(run.folder))
    workers = [pid for nanny in nannies for pid in children(nanny) if b"spawn_main" in command_of(pid)]
    assert workers
    kill(*workers)


def scheduler_killed(run: Run) -> None:
    ended_at_once(run, "dask", "scheduler", str(run.folder))


def launcher_killed(run: Run) -> None:
    ended_at_once(run, "srun", "batch.launcher", str(run.folder))


def ended_at_once(run: Run, *words: str) -> None:
    """What has these words in its command is killed, and the job ends for that."""
    found = processes(*words)
    assert found
    kill(*found)
    begun = time.monotonic()
    wait_for(lambda: run.state() in ("FAILED", "COMPLETED", "CANCELLED"))
    assert time.monotonic() - begun <= IDLE_SECONDS
    assert run.process.wait(WAIT_SECONDS) in (0, 1)  # what is nearly done may be finished
    run.before = run.chunks()


def kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def command_of(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
