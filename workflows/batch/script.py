"""The script that sbatch gets: what is asked of Slurm, and one line that starts the job's `keeper`.

Neither dask-jobqueue's ``SLURMCluster`` nor its ``SLURMRunner`` is used. The first submits a job for each worker and
keeps the scheduler in the process that submits: its end is the run's, and nothing could queue a job again. Its script
always asks for one task. The second takes two tasks, with their share of GPUs, for scheduler and client;
there SIGTERM comes to the client and all workers at once, or not at all, and a job that is queued again looks for the
scheduler of the try before, whose file has the same name. What is used is Dask's own scheduler and nannies.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from tilewright.workflows.batch.folder import JobFolder
from tilewright.workflows.batch.profile import KEYS, OF_GPUS, OURS, BatchProfile, time_seconds

BEHIND_GRACE_SECONDS = 60
"""Between the end of a command's grace and that of its job: it has to record, and the job to queue itself again. Slurm
looks once in 30 seconds whose time is up."""
KEEPER = "tilewright.workflows.batch.keeper"


VARIABLES = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_CPUS_PER_GPU": "cpus-per-gpu",
    "SBATCH_ERROR": "error",
    "SBATCH_GPUS": "gpus-per-node",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node",
    "SBATCH_GPUS_PER_SOCKET": "gpus-per-node",
    "SBATCH_GPUS_PER_TASK": "gpus-per-node",
    "SBATCH_MEM_PER_CPU": "mem",
    "SBATCH_MEM_PER_GPU": "mem",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_NO_REQUEUE": "no-requeue",
    "SBATCH_OPEN_MODE": "open-mode",
    "SBATCH_OUTPUT": "output",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_REQUEUE": "requeue",
    "SBATCH_SIGNAL": "signal",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_WAIT": "wait",
}
"""Variables of the environment that sbatch puts before what a script says, and their options."""


def put_aside(profile: BatchProfile, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of sbatch's that are kept from it, and why: those whose option the profile gives, or the job needs as
    it is, or that give GPUs to a job whose workers would not use them."""
    if OF_GPUS.search(environment.get("SBATCH_GRES", "")):
        variables = VARIABLES | {"SBATCH_GRES": "gpus-per-node"}
    else:
        variables = VARIABLES
    found = {}
    for name, option in variables.items():
        if name not in environment:
            continue
        key = option.replace("-", "_")
        given = getattr(profile, key, None) if key in KEYS else None
        if option in OURS:
            found[name] = OURS[option]
        elif given is not None:
            found[name] = f"the profile's {key}: {given} does"
        elif key == "gpus_per_node":
            found[name] = "its workers would use no GPU; say gpus_per_node in the profile"
    return found


def job_script(
    profile: BatchProfile, folder: JobFolder, command: str, grace: float, aside: Mapping[str, str]
) -> str:
    """The text of the script.

    command: what is run, such as ``matmul``; its arguments, which may hold secrets, are not in the script. grace: how
    many seconds before the end of its time the job needs to come to an end by itself. aside: as `put_aside` has it.
    """
    options = {
        "job-name": f"tilewright-{command}",
        "nodes": profile.nodes,
        "ntasks-per-node": profile.tasks,
        # Not --cpus-per-gpu: srun refuses that beside the cores of a task, which it has to be told.
        "cpus-per-task": profile.cpus,
        "gpus-per-node": profile.gpus_per_node,
        "mem": profile.mem,
        "time": profile.time,
        "partition": profile.partition,
        "account": profile.account,
        "qos": profile.qos,
        "constraint": profile.constraint,
        "signal": f"B:TERM@{signal_seconds(profile, grace)}",
        "output": _pattern(folder.result),
        "error": _pattern(folder.log),
        "open-mode": "append",
    }
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    lines += ["--requeue" if profile.tries > 1 else "--no-requeue", *profile.extra]
    python = sys.executable
    body = []
    if profile.activate is not None:
        python = "python"
        body = [profile.activate]
    body.append(f"exec {shlex.quote(python)} -m {KEEPER} {shlex.quote(str(folder.path))}")
    told = [f"# {name} of the environment is kept from sbatch: {why}" for name, why in aside.items()]
    told += [f"# {line}" for line in _fixed(profile)]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), *told, *body, ""])


def _fixed(profile: BatchProfile) -> list[str]:
    """What the profile fixes on nodes, for who reads the script; the job has it from its folder."""
    ports = {
        "scheduler": (profile.scheduler_port, "the first node"),
        "workers": (profile.worker_port, "each node"),
        "nannies": (profile.nanny_port, "each node"),
        "metrics": (profile.metrics_port, "each node"),
    }
    lines = [f"{who}: port {given} of {where}" for who, (given, where) in ports.items() if given is not None]
    if profile.dashboard_address is not None:
        lines.append(f"dashboard: {profile.dashboard_address} of the first node")
    if profile.local_directory is not None:
        lines.append(f"temporary files: {profile.local_directory}, as it stands on each node")
    return lines


def signal_seconds(profile: BatchProfile, grace: float) -> int:
    """How long before its time is up a job gets SIGTERM: never before half of its time."""
    wanted = grace + BEHIND_GRACE_SECONDS
    allowed = time_seconds(profile.time) if profile.time is not None else None
    return int(wanted if allowed is None else min(wanted, allowed / 2))


def _pattern(path: Path) -> str:
    """A file's name as one of Slurm's patterns of names."""
    return str(path).replace("%", "%%")
