"""Slurm's commands, and what they say of a job."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright.kernels.words import in_one_line
from tilewright.pipeline.errors import ClusterError

ANSWER_SECONDS = 60
"""How long a command of Slurm's may take to answer: a busy controller lets them wait."""
TEST_SECONDS = 15
"""How long a script that nobody submits is worth."""
JOB_OF_A_TEST = re.compile(r"^Job \d+(?= to start)")
"""By which sbatch calls a job that there is not."""
FORMAT = "%T|%r|%S|%N"
"""What squeue says of a job: its state, why it waits, when it starts or has started, and its nodes."""
FIELDS = "State,Reason,Start,NodeList"
"""The same, of sacct."""

QUEUED = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
BEGUN = {"RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
ENDING = {"COMPLETING"}
ENDED = {
    "BOOT_FAIL": "its nodes did not boot",
    "CANCELLED": "it was cancelled",
    "COMPLETED": "",
    "DEADLINE": "its deadline was over",
    "FAILED": "",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "it took more memory than it had asked for; raise mem in the profile",
    "PREEMPTED": "another job took its place",
    "REVOKED": "another cluster took it",
    "TIMEOUT": "its time was up before it had stopped; raise time in the profile, or lower tilewright.grace-seconds",
}
"""States that a job does not leave, and what they mean; empty where the command itself has ended."""

REASONS = {
    "AssocGrpCpuLimit": "the account's cores are in use",
    "AssocGrpGRES": "the account's GPUs are in use",
    "AssocMaxJobsLimit": "the account has as many jobs as it may",
    "BadConstraints": "no node has what constraint, nodes and gpus_per_node ask for together",
    "BeginTime": "its time to start has not come; a job that is queued again waits for about two minutes",
    "Dependency": "a job that it depends on has not ended",
    "DependencyNeverSatisfied": "a job that it depends on has failed, so that it never starts; scancel it",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "it is held; scontrol release lets it go",
    "Licenses": "its licences are in use",
    "NodeDown": "a node that it needs is down",
    "None": "Slurm has not said why yet",
    "PartitionDown": "the partition is down",
    "PartitionNodeLimit": "the partition allows fewer nodes, so that it never starts; scancel it and lower nodes",
    "PartitionTimeLimit": "the partition allows less time, so that it never starts; scancel it and lower time",
    "Priority": "other jobs come first",
    "QOSMaxGRESPerUser": "you use as many GPUs as the QOS allows",
    "QOSMaxJobsPerUserLimit": "you have as many jobs as the QOS allows",
    "Reservation": "its reservation has not begun",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Resources": "its nodes, cores or GPUs are in use",
}
"""What Slurm's commonest reasons mean."""


@dataclass(frozen=True)
class Look:
    """What Slurm says of a job."""

    state: str
    """In Slurm's words; empty where it knows no such job, or no longer."""
    reason: str = ""
    start: str = ""
    """When it will start, as far as Slurm knows, or has started."""
    nodes: str = ""

    @property
    def queued(self) -> bool:
        return self.state in QUEUED

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def why(self) -> str:
        """Why it waits."""
        meaning = REASONS.get(self.reason)
        return f"{self.reason}: {meaning}" if meaning else self.reason or REASONS["None"]


UNKNOWN = Look("")


def available() -> bool:
    return shutil.which("sbatch") is not None


def submit(script: Path, without: Collection[str] = ()) -> str:
    """Slurm's number of the job that a script became. without: variables of the environment that sbatch is not to see.

    Raises
    ------
    ClusterError
        There is no Slurm here, or it refuses the job: then with what it says.
    """
    said = _run(["sbatch", "--parsable", str(script)], "submit the job", _environment(without))
    found = re.match(r"(\d+)(?:;|\s|$)", said.strip().splitlines()[-1] if said.strip() else "")
    if found is None:
        raise ClusterError(f"sbatch answered with no job's number: {said!r}")
    return found[1]


def tested(script: str, without: Collection[str]) -> str:
    """What Slurm says of a script, which is no job then: when it might start, by the queue as it is, or why it would
    not. Raises ClusterError where it does not answer. without: as for `submit`."""
    done = _done(
        ["sbatch", "--test-only"],
        "test the script",
        _environment(without),
        script=script,
        seconds=TEST_SECONDS,
    )
    lines = [
        line.strip().removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines()
    ]
    said = "; ".join(JOB_OF_A_TEST.sub("it is", line) for line in lines if line)
    return said or (
        f"exit status {done.returncode}" if done.returncode else "nothing, so that it would take it"
    )


def _environment(without: Collection[str]) -> dict[str, str]:
    """What sbatch is to see of the environment."""
    # Inside another job there are the variables of that one, which sbatch and the new job would take for theirs.
    return {
        name: value
        for name, value in os.environ.items()
        if name not in without and (not name.startswith("SLURM_") or name == "SLURM_CONF")
    }


def look_at(job: str) -> Look:
    """What Slurm says of a job: its controller while it knows it, a few minutes beyond its end, and then its accounts,
    if it keeps any.

    Raises
    ------
    ClusterError
        The controller does not answer.
    """
    try:
        said = _run(
            ["squeue", "--noheader", "--states=all", f"--jobs={job}", f"--format={FORMAT}"], "ask for it"
        )
    except ClusterError as error:
        if "Invalid job id" not in str(error):
            raise
        said = ""
    if look := parsed(said):
        return look
    try:
        told = _run(
            [
                "sacct",
                "--noheader",
                "--parsable2",
                "--allocations",
                "--duplicates",
                f"--jobs={job}",
                f"--format={FIELDS}",
            ],
            "ask for it",
        )
    except ClusterError:  # it keeps none, or not for us
        return UNKNOWN
    return parsed(told) or UNKNOWN


def parsed(said: str) -> Look | None:
    """The last line of what squeue or sacct say; None where that is nothing."""
    lines = [line for line in said.splitlines() if line.count("|") >= 3]
    if not lines:
        return None
    # As "CANCELLED by 1000".
    state, reason, start, nodes = lines[-1].split("|")[:4]
    state = (state.split() or [""])[0]
    empty = ("N/A", "Unknown", "None assigned", "(null)")
    # squeue has the words of some reasons in brackets, and more behind a comma.
    reason = reason.strip("()").partition(",")[0]
    return Look(state, reason, "" if start in empty else start, "" if nodes in empty else nodes)


def requeue(job: str) -> None:
    """Queue a running job again; Slurm ends its processes. Raises ClusterError where it may not be."""
    _run(["scontrol", "requeue", job], "queue the job again")


def _run(command: Sequence[str], what: str, environment: Mapping[str, str] | None = None) -> str:
    done = _done(command, what, environment)
    if done.returncode:
        why = in_one_line(done.stderr) or f"exit status {done.returncode}"
        raise ClusterError(f"{command[0]} could not {what}: {why}")
    return done.stdout


def _done(
    command: Sequence[str],
    what: str,
    environment: Mapping[str, str] | None,
    *,
    script: str | None = None,
    seconds: float = ANSWER_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """What a command of Slurm's has said, whatever its exit status. script: what it reads."""
    try:
        return subprocess.run(
            command,
            env=environment,
            input=script,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterError(
            f"there is no {command[0]} here to {what}: a profile of kind slurm is for a host where Slurm's commands"
            " are; log in to one, or take another profile"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(
            f"{command[0]} has not answered for {seconds:g} s to {what}; is the controller up?"
        ) from error
    except OSError as error:
        raise ClusterError(f"cannot run {command[0]} to {what}: {error}") from error
