"""Every way in which a job is stopped here. Each of them notes the chunks that are there once it is."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress

from tests.slurm.jobs import (
    IDLE_SECONDS,
    RIG,
    ROOT,
    WAIT_SECONDS,
    Run,
    children,
    command_of,
    environment_of,
    processes,
    slurm,
    wait_for,
)


def node_down(run: Run) -> None:
    """The second node is gone, until Slurm has noticed."""
    there = {"SLURMD_NODENAME": "c2", "SLURM_CONF": f"{RIG}/etc/slurm.conf"}
    node = [pid for pid in processes() if there.items() <= environment_of(pid).items()]
    steps = [pid for pid in processes("slurmstepd", "[") if set(children(pid)) & set(node)]
    kill(int((RIG / "run" / "slurmd-c2.pid").read_text()), *steps, *node)
    try:
        wait_until_stopped(run)
    finally:
        subprocess.run([ROOT / "tests" / "slurm" / "rig" / "node", RIG, "c2"], check=True)


def preempted(run: Run) -> None:
    other = [
        "--partition=high",
        "--nodes=2",
        "--exclusive",
        "--time=1",
        "--output=/dev/null",
        "--wrap=sleep 2",
    ]
    slurm("sbatch", *other)
    wait_until_stopped(run)


def signalled(run: Run) -> None:
    slurm("scancel", "--batch", "--signal=TERM", run.job)
    wait_until_stopped(run)


def workers_signalled(run: Run) -> None:
    slurm("scancel", "--signal=TERM", run.job)
    wait_until_stopped(run)


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


def command_killed(run: Run) -> None:
    ended_at_once(run, "batch.inside", str(run.folder))


def keeper_killed(run: Run) -> None:
    """Slurm's own end of a job, which nobody in it can say anything of."""
    ended_at_once(run, "batch.keeper", str(run.folder))


WAYS = (
    node_down,
    preempted,
    signalled,
    workers_signalled,
    workers_killed,
    scheduler_killed,
    launcher_killed,
    command_killed,
    keeper_killed,
)


def wait_until_stopped(run: Run) -> None:
    wait_for(lambda: run.state() != "RUNNING")
    run.before = run.chunks()


def ended_at_once(run: Run, *words: str) -> None:
    """What has these words in its command is killed, and the job ends for that."""
    found = processes(*words)
    assert found
    kill(*found)
    begun = time.monotonic()
    wait_for(lambda: run.state() in ("FAILED", "COMPLETED", "CANCELLED"))
    assert time.monotonic() - begun <= IDLE_SECONDS
    run.process.wait(WAIT_SECONDS)
    run.before = run.chunks()


def kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
