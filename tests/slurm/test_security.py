"""Who gets into a job: its owner's processes alone, by certificates that nobody else can read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from tests.pipeline.cluster.test_security import signed
from tests.slurm.jobs import ROOT, WAIT_SECONDS, Run, processes, slurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


def dot(run: Run, profile: dict[str, object]) -> subprocess.CompletedProcess[str]:
    """A command on a job's scheduler, by a profile."""
    (run.place / "strangers.yaml").write_text(yaml.safe_dump({"profiles": {"there": profile}}))
    command = [sys.executable, "-m", "tilewright", "dot", "x.zarr", "x.zarr", "--device", "cpu"]
    command += ["--profile", "there", "--cluster-file", "strangers.yaml"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=run.place, env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS
    )


def test_nobody_without_certificates_gets_into_a_job(submit: Callable[..., Run], x: Path) -> None:
    run = submit()
    run.wait_for_tiles(2)
    run.slow_down()
    address = run.address()
    assert address.startswith("tls://")
    there = {"kind": "existing", "address": address, "timeout": 20}
    files = {
        "tls_ca_file": f"{run.folder}/certificate-1.pem",
        "tls_client_cert": f"{run.folder}/certificate-1.pem",
        "tls_client_key": f"{run.folder}/key-1.pem",
    }
    others = signed(run.place, "others")
    own = {"tls_client_cert": others["tls_client_cert"], "tls_client_key": others["tls_client_key"]}
    for security, said in (
        ({}, "give a profile its security: {tls_ca_file: ..., tls_client_cert: ..., tls_client_key: ...}"),
        ({"security": others}, f"not of the authority that tls_ca_file, {others['tls_ca_file']}, names"),
        ({"security": files | own}, f"let nobody in by tls_client_cert, {own['tls_client_cert']}, which"),
    ):
        done = dot(run, there | security)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error: cannot reach the scheduler at {address}: ")
        assert said in line
    done = dot(run, there | {"security": files})
    assert (done.returncode, done.stdout.strip()) == (0, "140"), done.stderr

    key = Path(files["tls_client_key"])
    assert [path.stat().st_mode & 0o777 for path in (key, run.folder)] == [0o600, 0o700]
    secret = key.read_text().splitlines()[1]
    told = slurm("scontrol", "show", "job", "--details", run.job)
    ours = processes(str(run.folder))
    assert len(ours) >= 6
    for pid in ours:
        for what in ("cmdline", "environ"):
            told += Path(f"/proc/{pid}/{what}").read_text(errors="replace")
    for path in run.folder.iterdir():
        told += path.read_text(errors="replace") if path != key else ""
    assert secret not in told

    reached = {where for where in listening(run) if where[0] != "127.0.0.1"}
    assert reached, "other nodes have to reach it"
    for ip, port in reached:
        assert_wants_certificates(ip, port)

    run.finished()
    assert not list(run.folder.glob("*.pem"))


def listening(run: Run) -> set[tuple[str, int]]:
    """Where the processes of a job do, but for srun, which Slurm's daemons talk to."""
    found = set()
    for pid in processes(str(run.folder)):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            if process.name() != "srun":
                found |= {
                    (connection.laddr.ip, connection.laddr.port)
                    for connection in process.net_connections()
                    if connection.status == psutil.CONN_LISTEN
                }
    return found


def assert_wants_certificates(ip: str, port: int) -> None:
    """What listens there speaks TLS, and with nobody who shows no certificate."""
    where = f"{'127.0.0.1' if ip in ('0.0.0.0', '::') else ip}:{port}"
    done = subprocess.run(
        ["openssl", "s_client", "-connect", where, "-tls1_2"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert re.search(r"alert (handshake failure|certificate required)|handshake failure", done.stderr), (
        done.stderr
    )
    assert done.returncode != 0


def test_a_job_has_the_certificates_that_its_profile_names(submit: Callable[..., Run], x: Path) -> None:
    ours = signed(x.parent, "ours")
    profiles = yaml.safe_load((x.parent / "cluster.yaml").read_text())
    profiles["profiles"]["safe"] = profiles["profiles"]["site"] | {"security": ours}
    (x.parent / "cluster.yaml").write_text(yaml.safe_dump(profiles))
    run = submit(profile="safe")
    run.wait_for_tiles(2)
    run.slow_down()
    done = dot(run, {"kind": "existing", "address": run.address(), "security": ours})
    assert (done.returncode, done.stdout.strip()) == (0, "140"), done.stderr
    assert not list(run.folder.glob("*.pem"))
    run.finished()


def test_a_job_of_one_node_listens_on_loopback_alone(submit: Callable[..., Run]) -> None:
    run = submit(profile="c1")
    run.wait_for_tiles(2)
    run.slow_down()
    assert run.address().startswith("tls://127.0.0.1:")
    assert {ip for ip, port in listening(run)} == {"127.0.0.1"}
    run.finished()
