"""Commands whose profile is of kind slurm, from words to exit status, with a script in the place of sbatch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import dask
import numpy as np
import pytest
import yaml
import zarr
from click.testing import CliRunner, Result

from tilewright.pipeline.cluster.cluster import open_cluster
from tilewright.pipeline.errors import ClusterError
from tilewright.workflows.batch import INSIDE
from tilewright.workflows.batch.folder import INSIDE_TRY, Submitted, job_folders, make_folder
from tilewright.workflows.batch.profile import BatchProfile
from tilewright.workflows.cli import cli

PROFILE = {"kind": "slurm", "nodes": 2, "cpus_per_task": 2, "time": "1:00:00"}
ENDS = """
folder=$(dirname "$2")
echo "the product" >"$folder/result"
echo "a notice" >"$folder/log"
echo '{"phase": "ended", "attempt": 1, "reason": "", "status": STATUS}' >"$folder/state.json"
"""
"""What the job does, at once."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with profiles, arrays and Slurm's commands; sbatch gives each job a number, and runs none."""
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(
        yaml.safe_dump({"profiles": {"site": PROFILE, "odd": PROFILE | {"gpu": 1}}})
    )
    for name in ("A.zarr", "B.zarr"):
        zarr.save_array(name, np.eye(4))
    (tmp_path / "bin").mkdir()
    command(tmp_path, "sbatch", "echo 4711")
    command(tmp_path, "squeue", "echo 'PENDING|Priority|N/A|'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    with dask.config.set({"tilewright.jobs-folder": str(tmp_path / "jobs")}):
        yield tmp_path


def command(here: Path, name: str, text: str) -> None:
    path = here / "bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def tilewright(*words: str) -> Result:
    return CliRunner().invoke(cli, words, prog_name="tilewright")


MATMUL = ("matmul", "A.zarr", "B.zarr", "C.zarr", "--profile", "site")


def test_a_script_is_printed_and_nothing_submitted(here: Path) -> None:
    command(here, "sbatch", 'echo "$@" >>called; exit 9')
    shown = tilewright(*MATMUL, "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert Path("called").read_text() == "--test-only\n", "by which sbatch submits nothing"
    assert shown.stderr == "nothing is submitted; Slurm (sbatch --test-only) says of it now: exit status 9\n"
    assert shown.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=tilewright-matmul\n#SBATCH --nodes=2\n")
    assert f"exec {sys.executable} -m tilewright.workflows.batch.keeper {here}/jobs/" in shown.stdout
    assert "A.zarr" not in shown.stdout, "arguments may hold secrets"
    assert not (here / "jobs").exists()


@pytest.mark.parametrize(
    ("says", "said"),
    [
        (
            "sbatch: Job 639625 to start at 2026-11-28T04:47:02 using 8 processors on nodes c[1-2] in partition long",
            "it is to start at 2026-11-28T04:47:02 using 8 processors on nodes c[1-2] in partition long",
        ),
        (
            "sbatch: error: Batch job submission failed\nallocation failure: Invalid account",
            "Batch job submission failed; allocation failure: Invalid account",
        ),
        ("", "nothing, so that it would take it"),
    ],
)
def test_slurm_has_the_last_word_on_a_script_that_it_does_not_get(says: str, said: str, here: Path) -> None:
    command(here, "sbatch", f"cat >script; cat >&2 <<END\n{says}\nEND")
    shown = tilewright(*MATMUL, "--dry-run")
    assert shown.stderr == f"nothing is submitted; Slurm (sbatch --test-only) says of it now: {said}\n"
    assert Path("script").read_text() == shown.stdout
    assert tilewright(*MATMUL, "--dry-run", "--quiet").stderr == ""


def test_without_sbatch_a_script_is_printed_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here))
    shown = tilewright(*MATMUL, "--dry-run")
    assert (shown.exit_code, shown.stdout.count("#SBATCH")) == (0, 10)
    assert shown.stderr == (
        "nothing is submitted; whether there are such a partition, account, GPUs, cores and memory Slurm alone knows,"
        " and there is no sbatch here to ask it\n"
    )


def test_doubts_of_a_jobs_gpus_are_told_before_it_waits_for_them(here: Path) -> None:
    for options, said, submitted in (
        ({"gpus_per_node": "h1000:4"}, "gpus_per_node: h1000, which is no model that is known here; did", True),
        ({"gpus_per_node": "h100:4", "constraint": "a100"}, "h100 and constraint: a100: no node has both", True),
        ({"gpus_per_node": "ampere:4"}, "so that it is right if Slurm has GPUs of this type; known are m40", False),
    ):  # fmt: skip
        Path("cluster.yaml").write_text(yaml.safe_dump({"profiles": {"site": {"kind": "slurm"} | options}}))
        assert said in tilewright(*MATMUL, "--dry-run").stderr
        left = tilewright(*MATMUL, "--detach")
        assert (left.exit_code, said in left.stderr) == (0, submitted)
    Path("cluster.yaml").write_text(
        yaml.safe_dump({"profiles": {"site": {"kind": "slurm", "gpus_per_node": "k80:1"}}})
    )
    refused = tilewright(*MATMUL)
    assert refused.exit_code == 1
    assert "gpus_per_node: k80 has compute capability 3.7, and kernels need 5.0 at least" in refused.stderr


def test_a_job_is_left_to_itself(here: Path) -> None:
    left = tilewright(*MATMUL, "--detach", "--device", "cpu")
    assert left.exit_code == 0, left.output
    assert left.stdout == "4711\n", "what --dependency of another job takes"
    assert "submitted as job 4711; its files are in " in left.stderr
    assert "tilewright jobs 4711 shows it again, and scancel 4711 ends it" in left.stderr
    [folder] = job_folders()
    submitted = folder.submitted()
    assert submitted.words == (*MATMUL, "--detach", "--device", "cpu")
    assert (submitted.job, submitted.folder) == ("4711", str(here))
    assert folder.script.read_text().count("#SBATCH") == 10
    assert folder.path.stat().st_mode & 0o77 == 0


def test_variables_of_sbatchs_do_not_go_before_the_profile(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch puts them before what its script says."""
    Path("cluster.yaml").write_text(
        yaml.safe_dump({"profiles": {"site": PROFILE | {"partition": "long", "extra": ["--gres=nvme:1"]}}})
    )
    command(here, "sbatch", "env | grep ^SBATCH_ | sort >seen; echo 4711")
    for name, value in {
        "PARTITION": "debug", "SIGNAL": "9@1", "ACCOUNT": "physics", "GRES": "gpu:2", "EXCLUSIVE": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"SBATCH_{name}", value)
    left = tilewright(*MATMUL, "--detach", "--device", "cpu")
    assert left.exit_code == 0, left.output
    assert Path("seen").read_text() == "SBATCH_ACCOUNT=physics\nSBATCH_EXCLUSIVE=1\n"
    why = {
        "SBATCH_PARTITION=debug": "the profile's partition: long does",
        "SBATCH_SIGNAL=9@1": "tilewright.grace-seconds says how long a stopped job may take",
        "SBATCH_GRES=gpu:2": "its workers would use no GPU; say gpus_per_node in the profile",
    }
    told = dict(line.split(" of the environment does not count: ") for line in left.stderr.splitlines()[:3])
    assert told == why
    [folder] = job_folders()
    shown = tilewright(*MATMUL, "--dry-run")
    assert Path("seen").read_text() == "SBATCH_ACCOUNT=physics\nSBATCH_EXCLUSIVE=1\n", (
        "Slurm is asked the same"
    )
    for name, reason in why.items():
        assert f"{name} of the environment does not count: {reason}\n" in shown.stderr
        line = f"# {name.partition('=')[0]} of the environment is kept from sbatch: {reason}\n"
        assert line in shown.stdout
        assert line in folder.script.read_text()
    assert "SBATCH_ACCOUNT=physics of the environment counts beside the profile\n" in shown.stderr


@pytest.mark.parametrize("status", [0, 3])
def test_a_command_has_the_result_and_the_status_of_its_job(here: Path, status: int) -> None:
    command(here, "sbatch", ENDS.replace("STATUS", str(status)) + "echo 4711")
    ended = tilewright(*MATMUL)
    assert ended.exit_code == status, ended.output
    assert ended.stdout == "the product\n"
    assert ended.stderr.splitlines()[-1] == "a notice"


@pytest.mark.parametrize(
    "words",
    [
        ("histogram", "cluster.yaml"),
        ("dot", "x.zarr", "y.zarr"),
        ("verify", "A.zarr", "B.zarr", "C.zarr"),
        ("audit", "C.zarr"),
        ("repair", "A.zarr", "B.zarr", "C.zarr"),
    ],
)
def test_every_command_with_a_profile_can_be_a_job(here: Path, words: tuple[str, ...]) -> None:
    shown = tilewright(*words, "--profile", "site", "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert f"--job-name=tilewright-{words[0]}\n" in shown.stdout


def test_keys_that_are_not_slurms_are_refused(here: Path) -> None:
    refused = tilewright("matmul", "A.zarr", "B.zarr", "C.zarr", "--profile", "odd")
    assert refused.exit_code == 1
    assert refused.stderr.startswith(
        "error: profile 'odd' of cluster.yaml: a job of Slurm's has no key 'gpu'; "
    )
    assert not (here / "jobs").exists()


def test_slurms_refusal_is_the_commands(here: Path) -> None:
    command(here, "sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    refused = tilewright(*MATMUL)
    assert refused.exit_code == 1
    assert refused.stderr == (
        "error: sbatch could not submit the job: sbatch: error: invalid partition specified: x\n"
    )
    assert not list(job_folders()), "nothing is left of it"


def test_without_slurm_that_is_said(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here / "jobs"))
    refused = tilewright(*MATMUL)
    assert refused.exit_code == 1
    assert "is of kind slurm, and there is no sbatch here; log in to a host" in refused.stderr
    assert not (here / "jobs").exists()


@pytest.mark.parametrize("option", ["--detach", "--dry-run"])
def test_options_of_a_job_are_for_jobs(here: Path, option: str) -> None:
    refused = tilewright("matmul", "A.zarr", "B.zarr", "C.zarr", option)
    assert refused.exit_code == 2
    assert f"{option} is about a batch job, and 'local' is no profile of kind slurm" in refused.stderr
    misspelt = tilewright("matmul", "A.zarr", "B.zarr", "C.zarr", option, "--profile", "slurn")
    assert (
        "'slurn' is no profile of kind slurm; did you mean 'slurm'? Those of that kind are odd"
        in misspelt.stderr
    )


def test_inside_its_job_a_command_is_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "own.yaml").write_text("profiles: {job: {kind: local}}")
    monkeypatch.setenv(INSIDE, str(here / "own.yaml"))
    monkeypatch.setenv(INSIDE_TRY, "1")
    command(here, "sbatch", "exit 9")
    done = tilewright(*MATMUL, "--device", "cpu", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["plan"]["workers"] == 1
    np.testing.assert_array_equal(zarr.open_array("C.zarr", mode="r")[...], np.eye(4))


def test_another_try_keeps_what_the_first_has_left(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the command says --no-resume, which was about what was there before the job."""
    (here / "own.yaml").write_text("profiles: {job: {kind: local}}")
    monkeypatch.setenv(INSIDE, str(here / "own.yaml"))
    asked = []
    monkeypatch.setattr("tilewright.workflows.matmul.matmul", lambda *_, resume, **__: asked.append(resume))
    for attempt in ("1", "2"):
        monkeypatch.setenv(INSIDE_TRY, attempt)
        tilewright(*MATMUL, "--no-resume")
    assert asked == [False, True]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("matmul", "none.zarr", "B.zarr", "C.zarr"), "none.zarr"),
        (("matmul", "A.zarr", "B.zarr", "A.zarr"), "A.zarr"),
        (("histogram", "nowhere"), "nowhere"),
        (("dot", "A.zarr", "B.zarr"), "A.zarr"),
    ],
)
def test_wrong_arguments_are_told_before_a_job_waits(here: Path, words: tuple[str, ...], said: str) -> None:
    command(here, "sbatch", "touch submitted; echo 4711")
    refused = tilewright(*words, "--profile", "site")
    assert refused.exit_code == 1
    assert said in refused.stderr
    assert not (here / "submitted").exists()
    assert not (here / "jobs").exists()


def test_from_python_such_a_profile_is_refused(here: Path) -> None:
    with (
        pytest.raises(
            ClusterError, match=r"'site' of cluster.yaml is of kind slurm, by which a command becomes"
        ),
        open_cluster("site"),
    ):
        pass


def test_jobs_are_listed_and_followed(here: Path) -> None:
    assert tilewright("jobs").stdout == f"no jobs in {here}/jobs\n"
    words = ("matmul", "A.zarr", "B.zarr", "s3://me:secret@host/C", "--profile", "site")
    make_folder("matmul", 10.0).write_submitted(Submitted(words, BatchProfile(), str(here), 10.0, "4711"))
    command(here, "sbatch", ENDS.replace("STATUS", "0") + "echo 4712")
    tilewright("histogram", "cluster.yaml", "--profile", "site", "--detach")
    listed = tilewright("jobs")
    assert listed.exit_code == 0
    lines = [line.strip() for line in listed.stdout.splitlines()]
    assert lines[0].startswith("4712 ")
    assert lines[0].endswith(" finished")
    assert lines[1:3] == ["tilewright histogram cluster.yaml --profile site --detach", "a notice"]
    assert lines[4].endswith(" queued (Priority: other jobs come first)")
    assert lines[5] == "tilewright matmul A.zarr B.zarr s3://...@host/C --profile site"
    rows = json.loads(tilewright("jobs", "--json").stdout)["jobs"]
    assert [(row["job"], row["status"]) for row in rows] == [("4712", 0), ("4711", None)]

    followed = tilewright("jobs", "4712")
    assert (followed.exit_code, followed.stdout) == (0, "the product\n")
    unknown = tilewright("jobs", "5")
    assert unknown.exit_code == 1
    assert "there is no job 5 in " in unknown.stderr
