"""What becomes of a job, by which of its processes ends first, and how; with shells in the place of Dask's."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml

from tilewright.pipeline.errors import ClusterError
from tilewright.workflows.batch import INSIDE, slurm
from tilewright.workflows.batch import keeper as keeper_module
from tilewright.workflows.batch.certificates import certificates, environment_of
from tilewright.workflows.batch.children import ending_with_parent
from tilewright.workflows.batch.folder import (
    INSIDE_PROFILE,
    INSIDE_TRY,
    JobFolder,
    Progress,
    Submitted,
)
from tilewright.workflows.batch.keeper import Keeper
from tilewright.workflows.batch.nannies import options_of
from tilewright.workflows.batch.profile import BatchProfile, read_profile
from tilewright.workflows.batch.slurm import Look

ROOT = Path(__file__).parents[3]
SCHEDULER = "echo {} > $0; exec sleep 60"
"""$0 is the scheduler's file."""
DRAINS = "trap 'echo drained; exit 143' TERM; touch begun; while :; do sleep 0.05; done"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFolder:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(keeper_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(keeper_module, "CLIENT_SECONDS", 0.2)
    monkeypatch.setattr(keeper_module, "REQUEUED_SECONDS", 0)
    monkeypatch.setattr(slurm, "look_at", lambda job: Look("RUNNING"))
    (tmp_path / "job").mkdir()
    return JobFolder(tmp_path / "job")


class Shells(Keeper):
    """Runs these, in place of its processes."""

    shells: dict[str, str]

    def _scheduler_command(self, address: Path) -> list[str]:
        return ["sh", "-c", self.shells["scheduler"], str(address)]

    def _workers_command(self) -> list[str]:
        return ["sh", "-c", self.shells["workers"], str(self.folder.stop_file(self.attempt))]

    def _client_command(self, address: Path) -> list[str]:
        assert address.read_text() == "{}\n", "nothing begins before the scheduler"
        return ["sh", "-c", self.shells["command"]]


def keeper(
    folder: JobFolder,
    *,
    scheduler: str = SCHEDULER,
    workers: str = "exec sleep 60",
    command: str = "exit 0",
    attempt: int = 1,
    tries: int = 3,
    security: bool | dict[str, str] = False,
) -> Shells:
    submitted = Submitted(("matmul",), BatchProfile(tries=tries, security=security), "/", 0.0, "7")
    found = Shells(folder, submitted, "7", attempt, {"PATH": "/usr/bin:/bin"})
    found.shells = {"scheduler": scheduler, "workers": workers, "command": command}
    return found


@pytest.mark.parametrize(("command", "status"), [("exit 0", 0), ("exit 5", 5), ("kill -9 $$", 137)])
def test_a_job_has_the_status_of_its_command(folder: JobFolder, command: str, status: int) -> None:
    kept = keeper(folder, command=command)
    assert kept.keep() == status
    progress = folder.progress()
    assert progress is not None
    assert (progress.phase, progress.status, progress.attempt) == ("ended", status, 1)
    assert all(process.poll() is not None for process in kept._started.values()), "all of them"


@pytest.mark.parametrize(
    ("who", "shell", "said"),
    [
        ("scheduler", "echo {} > $0; sleep 0.3; echo no memory >&2; kill -9 $$",
         "its scheduler ended by signal 9: no memory (FOLDER/scheduler.log has more)"),
        ("workers", "sleep 0.3; exit 3",
         "srun, and with it all workers, ended with exit status 3, and has said nothing in FOLDER/workers.log"),
        ("workers", "printf '1: ValueError: no GPU\n1: the workers of task 1 end\nsrun: error\n'; sleep 0.3; exit 1",
         "srun, and with it all workers, ended with exit status 1: ValueError: no GPU (FOLDER/workers.log has more)"),
        ("scheduler", "echo no port; exit 1", "its scheduler ended with exit status 1: no port"),
    ],
)  # fmt: skip
def test_a_job_without_its_cluster_ends_with_the_reason(
    folder: JobFolder, capfd: pytest.CaptureFixture[str], who: str, shell: str, said: str
) -> None:
    begun = time.monotonic()
    assert keeper(folder, command="exec sleep 60", **{who: shell}).keep() == 1, "though it was killed"
    assert time.monotonic() - begun < 20
    errors = capfd.readouterr().err
    assert f"error: job 7: {said.replace('FOLDER', str(folder.path))}" in errors
    progress = folder.progress()
    assert progress is not None
    assert progress.reason in errors


def test_what_the_command_says_of_a_lost_cluster_is_waited_for(
    folder: JobFolder, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "CLIENT_SECONDS", 20)
    kept = keeper(
        folder, scheduler="echo {} > $0; sleep 0.3", command="sleep 0.4; echo tiles are kept; exit 1"
    )
    assert kept.keep() == 1
    assert "tiles are kept" in capfd.readouterr().out


def test_a_command_that_ends_well_without_its_cluster_has_ended_well(
    folder: JobFolder, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers outlive srun by some seconds."""
    monkeypatch.setattr(keeper_module, "CLIENT_SECONDS", 20)
    assert keeper(folder, workers="exit 1", command="sleep 0.5; exit 0").keep() == 0
    assert "error" not in capfd.readouterr().err


@pytest.mark.parametrize("how", ["SIGTERM", "workers"])
def test_a_job_that_is_asked_to_end_drains_and_is_queued_again(
    folder: JobFolder, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    queued = []
    monkeypatch.setattr(slurm, "requeue", queued.append)
    workers = "exec sleep 60"
    if how == "workers":
        workers = "until [ -e begun ]; do sleep 0.05; done; touch $0; exec sleep 60"
    kept = keeper(folder, command=DRAINS, workers=workers)
    if how == "SIGTERM":
        ask = kept._asked_to_end

        def asked() -> bool:
            if Path("begun").exists():
                kept.stop("SIGTERM")
            return ask()

        monkeypatch.setattr(kept, "_asked_to_end", asked)
    kept.keep()
    assert queued == ["7"]
    captured = capfd.readouterr()
    assert captured.out == "drained\n"
    assert "job 7 was asked to end (SIGTERM" in captured.err


@pytest.mark.parametrize(
    ("attempt", "state", "command", "status"),
    [
        (3, "RUNNING", DRAINS, 143),
        (1, "CANCELLED", DRAINS, 143),
        (1, "COMPLETING", DRAINS, 143),
        (1, "RUNNING", "trap 'exit 0' TERM; touch begun; while :; do sleep 0.05; done", 0),
        (1, "RUNNING", "trap 'exit 1' TERM; touch begun; while :; do sleep 0.05; done", 1),
    ],
)
def test_a_job_is_not_queued_again_without_need(
    folder: JobFolder,
    monkeypatch: pytest.MonkeyPatch,
    attempt: int,
    state: str,
    command: str,
    status: int,
) -> None:
    """Its tries are over, it was cancelled, it has finished after all, or it has failed by itself."""
    monkeypatch.setattr(slurm, "look_at", lambda job: Look(state))
    monkeypatch.setattr(slurm, "requeue", lambda job: pytest.fail("queued again"))
    workers = "until [ -e begun ]; do sleep 0.05; done; touch $0; exec sleep 60"
    assert keeper(folder, command=command, workers=workers, attempt=attempt).keep() == status


def test_a_job_that_slurm_does_not_queue_again_says_so(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(job: str) -> None:
        raise ClusterError("scontrol could not queue the job again: disabled")

    monkeypatch.setattr(slurm, "requeue", refuse)
    workers = "until [ -e begun ]; do sleep 0.05; done; touch $0; exec sleep 60"
    assert keeper(folder, command=DRAINS, workers=workers).keep() == 143
    assert "is not queued again: scontrol could not queue the job again: disabled" in capfd.readouterr().err


def test_a_job_without_tries_left_computes_nothing(
    folder: JobFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    """Slurm starts a job anew by itself when a node fails."""
    assert keeper(folder, attempt=4, tries=3).keep() == 1
    assert "it has been started 3 times, which is all its tries" in capfd.readouterr().err


def test_a_job_that_has_finished_is_not_run_again(folder: JobFolder) -> None:
    """Slurm queues a job again whose node fails in its last second."""
    assert keeper(folder).keep() == 0
    assert keeper(folder, attempt=2, command="exit 1").keep() == 0
    progress = folder.progress()
    assert progress is not None
    assert (progress.attempt, progress.status) == (1, 0)

    assert keeper(folder, attempt=3, tries=2).keep() == 0
    folder.write_progress(Progress("ended", 1, "its scheduler ended by signal 9", 1))
    assert keeper(folder, attempt=2, command="exit 5").keep() == 5


class Ported(Shells):
    """Whose scheduler listens at a port where nobody does, and else ends, as Dask's does."""

    def _scheduler_command(self, address: Path) -> list[str]:
        self.tried.append(self._ports[0])
        taken = self._ports[0] == self.taken
        return ["sh", "-c", "echo 'Address already in use' >&2; exit 1" if taken else SCHEDULER, str(address)]

    tried: list[int]
    taken: int


def test_a_scheduler_takes_another_port_where_somebody_was_faster(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ports are free when they are looked at first, and then another job's scheduler has one of them."""
    looked = []

    def free(port: int, host: str = "") -> bool:
        looked.append(port)
        return port != 40000 or looked.count(port) == 1

    monkeypatch.setattr(keeper_module, "is_free", free)
    profile = BatchProfile(scheduler_port="40000:40002", security=False)
    kept = Ported(folder, Submitted(("dot",), profile, "/", 0.0, "7"), "7", 1, {"PATH": "/usr/bin:/bin"})
    kept.shells = {"workers": "exec sleep 60", "command": "exit 0"}
    kept.tried, kept.taken = [], 40000
    assert kept.keep() == 0
    assert kept.tried == [40000, 40001]


def test_a_job_without_a_port_for_its_scheduler_ends_at_once(folder: JobFolder) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        profile = BatchProfile(scheduler_port=str(port), security=False)
        kept = Shells(folder, Submitted(("dot",), profile, "/", 0.0, "7"), "7", 1, {})
        assert kept.keep() == 1
    progress = folder.progress()
    assert progress is not None
    assert progress.reason.startswith(
        f"the profile: scheduler_port: {port}: others listen at all but 0 of these"
    )


def test_a_jobs_scheduler_and_workers_get_what_the_profile_fixes(
    folder: JobFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH_OF_JOB", str(tmp_path))
    profile = read_profile(
        "p",
        {"scheduler_port": 40000, "worker_port": 40001, "nanny_port": "40002:40003", "metrics_port": 9100}
        | {"dashboard_address": ":8787", "local_directory": "$SCRATCH_OF_JOB/x"},
    )
    kept = Keeper(folder, Submitted(("dot",), profile, "/", 0.0, "7"), "7", 1, {})
    kept._ports = kept._scheduler_ports()
    words = " ".join(kept._scheduler_command(folder.scheduler_file(1)))
    assert " --port 40000 --host 127.0.0.1 --dashboard --dashboard-address 127.0.0.1:8787" in words
    assert kept._scratch() == {"DASK_TEMPORARY_DIRECTORY": f"{tmp_path}/x"}
    kept.environment = {"DASK_TEMPORARY_DIRECTORY": "/elsewhere"}
    assert kept._scratch() == {}, "the user's own"
    options = options_of(profile, Path("file"), "0")
    assert options["local_directory"] == f"{tmp_path}/x"
    assert (options["port"], options["listen_at"]) == ("40002:40003", "40001")
    assert options["metrics_at"] == ("0.0.0.0", "9100"), "Prometheus is not on this node"


def test_what_is_started_has_its_cores_its_address_and_its_settings(folder: JobFolder) -> None:
    profile = read_profile("p", {"nodes": 3, "ntasks_per_node": 2, "cpus_per_task": 5, "interface": "ib0"})
    kept = Keeper(folder, Submitted(("dot", "x", "y"), profile, "/", 0.0, "7"), "7", 2, {})
    address = folder.scheduler_file(2)
    assert address != folder.scheduler_file(1)
    scheduler = " ".join(kept._scheduler_command(address))
    assert f"--scheduler-file {address} --port 0 --interface ib0" in scheduler
    assert "--dashboard-address 127.0.0.1:0" in scheduler, "it is not encrypted"
    srun = kept._workers_command()
    assert srun[0] == "srun"
    assert {"--nodes=3", "--ntasks=6", "--ntasks-per-node=2", "--cpus-per-task=5"} <= set(srun)
    assert kept._cores() == {"OMP_NUM_THREADS": "5"}
    assert kept._settings() == {
        INSIDE: str(folder.profiles),
        INSIDE_TRY: "2",
        "DASK_TILEWRIGHT__ACCEPT_FINISHED": "true",
        "DASK_TILEWRIGHT__TILE_SECONDS": "30",
        "DASK_TILEWRIGHT__WORKERS": "6",
        "DASK_TILEWRIGHT__TILES": "48",
    }
    assert kept._client_command(address)[-1] == str(folder.path), "no words of the command"
    written = yaml.safe_load(folder.profiles.read_text())
    assert written == {"profiles": {INSIDE_PROFILE: {"kind": "existing", "scheduler_file": str(address)}}}

    gpus = read_profile("p", {"nodes": 2, "gpus_per_node": "h100:4"})
    kept = Keeper(folder, replace(kept.submitted, profile=gpus), "7", 1, {})
    assert {"--nodes=2", "--ntasks=2", "--cpus-per-task=32", "--gpus-per-node=h100:4"} <= set(
        kept._workers_command()
    )
    assert kept._cores() == {}
    assert kept._settings()["DASK_TILEWRIGHT__WORKERS"] == "8"


@pytest.mark.parametrize(
    ("options", "host"),
    [
        ({}, "127.0.0.1"),
        ({"nodes": 2}, None),
        ({"interface": "ib0"}, None),
        ({"gpus_per_node": 4}, "127.0.0.1"),
    ],
)
def test_a_job_of_one_node_listens_on_loopback_unless_told_otherwise(
    folder: JobFolder, options: dict[str, object], host: str | None
) -> None:
    profile = read_profile("p", options)
    kept = Keeper(folder, Submitted(("dot",), profile, "/", 0.0, "7"), "7", 1, {})
    command = kept._scheduler_command(folder.scheduler_file(1))
    assert command[command.index("--host") + 1 :][:1] == [host] if host else "--host" not in command
    given = options_of(profile, folder.scheduler_file(1), "0")
    assert given["host"] == host
    assert given["dashboard_address"] == "127.0.0.1:0"


def test_each_try_has_certificates_that_nobody_else_sees(
    folder: JobFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its scheduler and workers get the names of their files by the environment, and the command by its profile."""
    show = "stat -c '%a %s' $DASK_DISTRIBUTED__COMM__TLS__{}__KEY; env | grep REQUIRE_ENCRYPTION; "
    kept = keeper(
        folder,
        scheduler=show.format("SCHEDULER") + SCHEDULER,
        workers=show.format("WORKER") + "exec sleep 60",
        command=f"sleep 0.3; cat {folder.key(1)} {folder.certificate(1)}",
        security=True,
    )
    folder.key(7).touch()  # of a try whose node has failed
    assert kept.keep() == 0
    texts = capfd.readouterr().out
    key = texts.split("-----")[2].strip()
    for who in ("scheduler", "workers"):
        mode, size, encrypted = folder.dask_log(who).read_text().split()
        assert (mode, encrypted) == ("600", "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION=True")
        assert int(size) > 1000
    assert not [path for path in folder.path.iterdir() if path.suffix == ".pem"], "none is left"
    assert not [path for path in folder.path.iterdir() if key[:40] in path.read_text()]

    Keeper._client_command(kept, folder.scheduler_file(1))
    (profile,) = yaml.safe_load(folder.profiles.read_text())["profiles"].values()
    assert profile["security"]["tls_client_key"] == str(folder.key(1))
    assert keeper(folder, command=f"test ! -e {folder.key(2)}", attempt=2, security=False).keep() == 0


def test_files_of_certificates_are_handed_on(folder: JobFolder) -> None:
    given = {"tls_ca_file": "/c/ca.pem", "tls_client_cert": "/c/own.pem", "tls_scheduler_key": "/c/own.key"}
    assert certificates(BatchProfile(security=given), folder, 1) == given
    assert environment_of(given) == {
        "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "True",
        "DASK_DISTRIBUTED__COMM__TLS__CA_FILE": "/c/ca.pem",
        "DASK_DISTRIBUTED__COMM__TLS__CLIENT__CERT": "/c/own.pem",
        "DASK_DISTRIBUTED__COMM__TLS__SCHEDULER__KEY": "/c/own.key",
    }
    assert certificates(BatchProfile(security=False), folder, 1) == environment_of({}) == {}


def test_a_job_without_certificates_says_why(folder: JobFolder, capfd: pytest.CaptureFixture[str]) -> None:
    folder.certificate(1).mkdir()  # in its place
    assert keeper(folder, security=True).keep() == 1
    assert "error: job 7: it has no certificates: " in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, which ends them")
def test_nothing_of_a_job_outlives_a_keeper_that_is_killed(folder: JobFolder, tmp_path: Path) -> None:
    """Slurm may not know of what is below it."""
    folder.write_submitted(Submitted(("dot",), BatchProfile(security=False), "/", 0.0, "7"))
    code = (
        "import sys; from pathlib import Path; from tilewright.workflows.batch.folder import JobFolder\n"
        "from tilewright.workflows.batch.keeper import Keeper\n"
        "folder = JobFolder(Path(sys.argv[1])); shell = 'echo $$ > {}; exec sleep 60'\n"
        "class Shells(Keeper):\n"
        "    def _scheduler_command(self, address):\n"
        "        return ['sh', '-c', f'echo up > {address}; ' + shell.format('scheduler')]\n"
        "    def _workers_command(self): return ['sh', '-c', shell.format('workers')]\n"
        "    def _client_command(self, address): return ['sh', '-c', shell.format('command')]\n"
        "Shells(folder, folder.submitted(), '7', 1, {'PATH': '/usr/bin:/bin'}).keep()\n"
    )
    command = [sys.executable, "-c", code, str(folder.path)]
    names = [tmp_path / name for name in ("scheduler", "workers", "command")]
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}) as process:
        try:
            while not all(name.exists() and name.read_text() for name in names):
                assert process.poll() is None
                time.sleep(0.02)
        finally:
            process.kill()
    started = [
        psutil.Process(int(name.read_text())) for name in names if psutil.pid_exists(int(name.read_text()))
    ]
    assert not psutil.wait_procs(started, timeout=20)[1]


def test_what_ends_with_its_parent_runs_nothing_of_it_after_the_fork(tmp_path: Path) -> None:
    """What a forked process collects may be a GPU's, which ends it by a fault."""
    code = (
        "import gc, os, subprocess, sys, weakref\n"
        "from tilewright.workflows.batch.children import ending_with_parent\n"
        "class Cycle: pass\n"
        "def note(home=os.getpid()):\n"
        "    if os.getpid() != home: open(sys.argv[1], 'w').close()\n"
        "gc.disable(); kept = [Cycle() for _ in range(1000)]\n"
        "for each in kept: each.me = each; weakref.finalize(each, note)\n"
        "each = kept = None; gc.set_threshold(1); gc.enable()\n"
        "sys.exit(subprocess.run(ending_with_parent(['sh', '-c', 'exit 7'])).returncode)\n"
    )
    ran = [sys.executable, "-c", code, str(tmp_path / "collected")]
    assert subprocess.run(ran, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode == 7
    assert not (tmp_path / "collected").exists()


def test_a_command_that_is_not_there_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert subprocess.run(ending_with_parent(["no-such-srun"])).returncode == 1
    assert capfd.readouterr().err == "no-such-srun cannot be started: No such file or directory\n"


def test_a_launcher_notes_sigterm_and_its_workers_take_none(folder: JobFolder, tmp_path: Path) -> None:
    """A task of srun's, with a script in the place of the workers."""
    script = tmp_path / "workers.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open('ready', 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.02)\n"
        "sys.exit(4)\n"
    )
    code = (
        "import sys; from tilewright.workflows.batch import launcher; launcher.NANNIES = 'workers';"
        f" sys.exit(launcher.main({str(folder.path)!r}, 2))"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}) as process:
        try:
            while not Path("ready").exists():
                assert process.poll() is None
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            while not folder.stop_file(2).exists():
                assert process.poll() is None
                time.sleep(0.02)
            assert not folder.stop_file(1).exists()
            Path("go").touch()
            assert process.wait(20) == 4
        finally:
            process.kill()


def test_what_was_submitted_is_read_as_it_was_written(folder: JobFolder) -> None:
    profile = read_profile("p", {"gpus_per_node": "a100:2", "mem": "8G", "extra": ["--exclusive"]})
    submitted = Submitted(("matmul", "s3://key:secret@host/a", "b", "c"), profile, "/here", 12.5)
    folder.write_submitted(submitted)
    assert folder.submitted() == submitted
    folder.number("9")
    assert folder.submitted() == replace(submitted, job="9")
    (folder.path / "job.json").write_text(json.dumps({"version": 0}))
    with pytest.raises(OSError, match="says of no job of ours: it is of another release"):
        folder.submitted()
