"""Jobs that run to their end, and that are stopped in every way: by the clock, by others, by hand, and by failures.

Each product is compared with NumPy's, and its chunks with those that were there when the job was stopped: what was
recorded is never stored again, so that what is computed again is at most what was under way.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.jobs import (
    CHUNKS,
    ROOT,
    TILES,
    UNDER_WAY,
    WAIT_SECONDS,
    Run,
    processes,
    slurm,
    wait_for,
)
from tests.slurm.stops import (
    launcher_killed,
    node_down,
    preempted,
    scheduler_killed,
    wait_until_stopped,
    workers_killed,
    workers_signalled,
)

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


def test_a_time_limit_is_met_by_another_try(submit: Callable[..., Run]) -> None:
    """A job of two minutes gets SIGTERM after half a minute or a minute; all tiles take longer."""
    run = submit(seconds=4, profile="short")
    run.wait_until_it_works()
    wait_until_stopped(run)
    run.goes_on()
    assert f"job {run.job} was asked to end (SIGTERM)" in run.said
    assert "terminated: " in run.said
    assert re.search(rf"job {run.job} is queued again \(try 2 of 4\): BeginTime: ", run.said)


def test_a_node_that_goes_down_is_met_by_another_try(submit: Callable[..., Run]) -> None:
    run = submit(seconds=3)  # the other node alone is not to finish before Slurm has noticed
    run.wait_for_tiles(8)
    node_down(run)
    run.goes_on()


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
    words = ["plan", "A.zarr", "B.zarr", "--profile", "site", "--device-memory", "1MiB", "--device", "cpu"]
    planned = json.loads(told(run, *words, "--json"))
    shared = (
        "workers",
        "tile_rows",
        "tile_columns",
        "panel_depth",
        "tile_count",
        "read_nbytes",
        "device_peak_nbytes",
    )
    assert {key: planned[key] for key in shared} == {key: plan[key] for key in shared}


def told(run: Run, *words: str) -> str:
    """What a command says beside a job."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "DASK_TILEWRIGHT__JOBS_FOLDER": str(run.place / "jobs"),
        "DASK_TILEWRIGHT__TILES": str(TILES),
    }
    command = [sys.executable, "-m", "tilewright", *words]
    done = subprocess.run(
        command, cwd=run.place, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_keeps_to_its_ports_and_to_its_nodes_folders(submit: Callable[..., Run]) -> None:
    """And to its profile, before which sbatch puts what variables of the environment say."""
    run = submit(profile="fixed", more={"SBATCH_TIMELIMIT": "3"})
    run.wait_for_tiles(4)
    assert "SBATCH_TIMELIMIT=3 of the environment does not count: the profile's time: 10 does" in run.said
    assert "TimeLimit=00:10:00" in slurm("scontrol", "show", "job", run.job)
    look = json.loads(told(run, "top", run.job, "--once", "--json"))
    assert int(look["scheduler"].rpartition(":")[2]) in range(17000, 17010)
    workers = look["workers"]
    assert {worker["name"] for worker in workers} == {"c1-0", "c2-1"}
    ports = [int(worker["address"].rpartition(":")[2]) for worker in workers]
    assert set(ports) <= set(range(17010, 17030))
    assert {int(worker["metrics"].rpartition(":")[2]) for worker in workers} <= set(range(17050, 17070))
    for node in ("c1", "c2"):
        assert (run.place / f"{node}-{run.job}" / "dask-scratch-space").is_dir()
    assert "# workers: port 17010:17029 of each node" in (run.folder / "script").read_text()
    run.finished()


def test_two_jobs_at_once_share_nothing(submit: Callable[..., Run]) -> None:
    one, two = submit(3, output="C.zarr"), submit(3, output="D.zarr")
    one.wait_for_tiles(2)
    first = one.address()
    two.wait_for_tiles(2)
    assert first != two.address()

    def schedulers(run: Run) -> int:
        # Jobs of one second are called alike but for a number at the end.
        return len(processes("dask", "scheduler", f"{run.folder}/"))

    # A child has its parent's command until it becomes another, and on busy cores the first job may be over.
    until = time.monotonic() + 20
    while (found := (schedulers(one), schedulers(two))) not in ((1, 1), (0, 1)):
        assert time.monotonic() < until, found
        time.sleep(0.1)
    one.finished()
    two.finished()


@pytest.mark.parametrize("locks", ["shared", "of each node"])
def test_of_two_commands_at_once_on_one_output_one_wins_and_the_other_is_told(
    submit: Callable[..., Run], tmp_path: Path, locks: str
) -> None:
    """Jobs of two nodes, on a file system that shows each the locks of the other, or not."""
    blind = {}
    if locks != "shared":
        library = tmp_path / "no_locks.so"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", library, Path(__file__).parent / "no_locks.c"], check=True
        )
        blind = {"LD_PRELOAD": str(library)}
    runs = [submit(2, "c1", wait=False), submit(2, "c2", wait=False, more=blind)]
    wait_for(
        lambda: any(run.process.poll() is not None for run in runs)
    )  # neither finishes before both have begun
    for run in runs:
        run.hurry()
        run.process.wait(WAIT_SECONDS)
    (won,) = [run for run in runs if run.process.returncode == 0]
    (lost,) = [run for run in runs if run is not won]
    won.finished()
    assert lost.process.returncode == 1
    told = "another run is writing C.zarr.partial; wait for it, or choose another path"
    if blind:  # the later one takes over what it takes for the remains of a stopped run
        told = "another run has taken"
    assert told in lost.said, lost.said
    assert {"c1", "c2"} == {
        slurm("squeue", "--noheader", "--states=all", f"--jobs={run.job}", "--format=%N").strip()
        for run in runs
    }


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
        (scheduler_killed, "its scheduler ended by signal 9"),
        (launcher_killed, "srun, and with it all workers, ended by signal 9"),
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


TASK = """
import os, time
from pathlib import Path
if os.environ.get("SLURM_STEP_ID", "").isdecimal():  # a task of srun's, and not the job's script
    here = Path(__file__).parent
    (here / f"gpu-{os.environ['SLURM_JOB_ID']}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    until = time.monotonic() + 120
    while len(list(here.glob("gpu-*"))) < 2 and time.monotonic() < until:
        time.sleep(0.1)
"""
"""What each Python of a job begins with: its task notes its GPU, and holds it until the other job has one too."""


def test_jobs_of_one_gpu_each_get_different_ones(submit: Callable[..., Run], tmp_path: Path) -> None:
    """Two jobs on one node, by Slurm's GRES. Where no GPU is behind these, each ends with that reason."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(TASK)
    more = {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
    runs = [submit(profile="gpu", output=name, device="auto", more=more) for name in ("C.zarr", "D.zarr")]
    for run in runs:
        run.process.wait(WAIT_SECONDS)
        state = json.loads((run.folder / "state.json").read_text())
        assert state["phase"] == "ended"
    assert sorted((site / f"gpu-{run.job}").read_text() for run in runs) == ["0", "1"]
    assert {
        slurm("squeue", "--noheader", "--states=all", f"--jobs={run.job}", "--format=%N").strip()
        for run in runs
    } == {"c1"}
