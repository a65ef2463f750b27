"""What Slurm's commands say, as they said it (22.05), and as other releases write it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tilewright.pipeline.errors import ClusterError
from tilewright.workflows.batch import slurm
from tilewright.workflows.batch.slurm import UNKNOWN, Look, look_at, parsed, requeue, submit


def put(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose commands come first."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return folder


@pytest.mark.parametrize(
    ("line", "look"),
    [
        ("RUNNING|None|2026-11-25T15:16:18|c[1-2]", Look("RUNNING", "None", "2026-11-25T15:16:18", "c[1-2]")),
        ("PENDING|Resources|N/A|", Look("PENDING", "Resources")),
        ("PENDING|BeginTime|2026-11-25T15:19:18|", Look("PENDING", "BeginTime", "2026-11-25T15:19:18")),
        (
            "PENDING|ReqNodeNotAvail, UnavailableNodes:c2|N/A|(null)",
            Look("PENDING", "ReqNodeNotAvail"),
        ),
        ("COMPLETING|None|2026-11-25T15:16:18|c[1-2]", Look("COMPLETING", "None", "2026-11-25T15:16:18", "c[1-2]")),
        ("CANCELLED by 1000|None|2026-11-25T15:16:18|c1", Look("CANCELLED", "None", "2026-11-25T15:16:18", "c1")),
        ("NODE_FAIL|None|Unknown|None assigned", Look("NODE_FAIL", "None")),
    ],
)  # fmt: skip
def test_what_is_said_of_a_job(line: str, look: Look) -> None:
    assert parsed(line + "\n") == look
    assert parsed(f"REQUEUED|None|Unknown|c1\n{line}\n") == look, "the last of several tries"


def test_nothing_is_said_of_no_job() -> None:
    assert parsed("") is None
    assert parsed("\n") is None


def test_states_are_of_one_kind_each() -> None:
    kinds = [slurm.QUEUED, slurm.BEGUN, slurm.ENDING, set(slurm.ENDED)]
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    assert Look("PENDING").queued
    assert Look("TIMEOUT").ended
    assert not Look("RUNNING").ended
    assert not UNKNOWN.ended


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        ("Priority", "Priority: other jobs come first"),
        ("QOSGrpNodeLimit", "QOSGrpNodeLimit"),
        ("", "Slurm has not said why yet"),
    ],
)
def test_why_a_job_waits(reason: str, why: str) -> None:
    assert Look("PENDING", reason).why() == why


@pytest.mark.parametrize("said", ["4711", "4711;cluster", "sbatch: a greeting\n4711"])
def test_a_job_is_submitted(said: str, commands: Path, tmp_path: Path) -> None:
    put(commands, "sbatch", f"echo '{said}'; echo \"$@\" > {tmp_path}/asked")
    assert submit(Path("/shared/script")) == "4711"
    assert (tmp_path / "asked").read_text() == "--parsable /shared/script\n"


def test_a_job_is_submitted_from_another_one(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither counts that one's tries nor asks for that one's memory."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("SLURM_CONF", "7")
    put(commands, "sbatch", 'echo "$SLURM_CONF$SLURM_RESTART_COUNT"')
    assert submit(Path("s")) == "7"


def test_slurm_says_why_it_refuses_a_job(commands: Path) -> None:
    put(
        commands,
        "sbatch",
        "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1",
    )
    with pytest.raises(
        ClusterError, match=r"sbatch could not submit the job: sbatch: error: .*Invalid account"
    ):
        submit(Path("s"))
    put(commands, "sbatch", "echo done")
    with pytest.raises(ClusterError, match=r"no job's number: 'done"):
        submit(Path("s"))


def test_without_slurm_that_is_said(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(commands))
    assert not slurm.available()
    with pytest.raises(ClusterError, match=r"there is no sbatch here to submit the job"):
        submit(Path("s"))


FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


def test_a_job_that_the_controller_has_forgotten_is_looked_up(commands: Path) -> None:
    put(commands, "squeue", FORGOTTEN)
    put(commands, "sacct", "echo 'TIMEOUT|None|2026-11-25T15:16:18|c1'")
    assert look_at("7").state == "TIMEOUT"
    put(commands, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert look_at("7") == UNKNOWN


def test_a_controller_that_does_not_answer_is_no_end_of_a_job(commands: Path) -> None:
    put(commands, "squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(ClusterError, match=r"squeue could not ask for it: .*Unable to contact"):
        look_at("7")


def test_a_job_that_may_not_be_queued_again(commands: Path) -> None:
    put(commands, "scontrol", 'echo "$@: Requested operation is presently disabled" >&2; exit 1')
    with pytest.raises(ClusterError, match=re.escape("could not queue the job again: requeue 7: Requested")):
        requeue("7")
