"""Whole jobs on CPUs without Slurm: a script stands in for ``srun`` and starts the tasks of all nodes on this host; all
else is a job's own, its keeper, its scheduler, its workers and the command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
import zarr
from click.testing import CliRunner

import tilewright as tw
from tests.workflows.products import put
from tilewright.workflows.batch import keeper as keeper_module
from tilewright.workflows.batch.folder import JobFolder, Progress, Submitted
from tilewright.workflows.batch.keeper import Keeper
from tilewright.workflows.batch.profile import read_profile
from tilewright.workflows.cli import cli

ROOT = Path(__file__).parents[3]
SRUN = """\
#!/bin/sh
# The command behind srun's options, once for each task.
for word in "$@"; do case "$word" in --nodes=*) nodes=${word#*=};; --ntasks=*) tasks=${word#*=};; esac; done
while case "$1" in -*) true;; *) false;; esac; do shift; done
task=0
while [ $task -lt $tasks ]; do
    node=c$((task / (tasks / nodes)))
    SLURM_PROCID=$task SLURMD_NODENAME=$node NODES_OWN=$node "$@" &
    task=$((task + 1))
done
wait
"""
COMMAND = """\
import json, os, runpy, sys, urllib.request
from pathlib import Path
from distributed import Client
from tilewright.pipeline.worker.meters import meters_of

def seen(dask_worker):
    meters_of(dask_worker)
    return [dask_worker.name, dask_worker.address, dask_worker.nanny, dask_worker.local_directory,
            dask_worker.metrics["tilewright"](dask_worker)["metrics"]]

if __name__ == "__main__":
    folder, scheduler_file, workers = sys.argv[1:]
    with Client(scheduler_file=scheduler_file) as client:
        client.wait_for_workers(int(workers), timeout=120)
        found = list(client.run(seen).values())
        for one in found:
            with urllib.request.urlopen(f"http://{one[-1]}/metrics", timeout=10) as answer:
                one.append("tilewright_tiles_total" in answer.read().decode())
        told = [client.scheduler.address, os.environ.get("DASK_TEMPORARY_DIRECTORY"), sorted(found)]
        Path(folder, "seen").write_text(json.dumps(told))
    sys.argv[1:] = [folder]
    runpy.run_module("tilewright.workflows.batch.inside", run_name="__main__")
"""
"""Notes what each worker has, and then runs a job's command."""


class Noting(Keeper):
    def _client_command(self, address: Path) -> list[str]:
        super()._client_command(address)
        return [sys.executable, "-c", COMMAND, str(self.folder.path), str(address), str(self.profile.workers)]


class Waiting(Keeper):
    """Its command does nothing, until it is ended."""

    def _client_command(self, address: Path) -> list[str]:
        return ["sleep", "600"]


def job(
    place: Path, words: list[str], options: dict[str, Any], keeper: type[Keeper] | None = None
) -> JobFolder:
    """Run a job of such a profile to its end, and give its folder. keeper: runs in this process; None: Tilewright's, in
    one of its own, as Slurm has it."""
    folder, bin_folder = JobFolder(place / "job"), place / "bin"
    folder.path.mkdir()
    bin_folder.mkdir()
    srun = bin_folder / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o700)
    profile = read_profile(
        "p", {"interface": "lo", "security": False, "tries": 1, "cpus_per_task": 1} | options
    )
    folder.write_submitted(Submitted(tuple(words), profile, str(place), 0.0, "7"))
    variables = os.environ | {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    if keeper is not None:
        keeper(folder, folder.submitted(), "7", 1, variables).keep()
        return folder
    command = [sys.executable, "-m", "tilewright.workflows.batch.keeper", str(folder.path)]
    with folder.result.open("wb") as result, folder.log.open("wb") as log:
        subprocess.run(
            command, env=variables | {"SLURM_JOB_ID": "7"}, stdout=result, stderr=log, cwd=place, check=False
        )
    return folder


def ended(folder: JobFolder) -> Progress:
    found = folder.progress()
    assert found is not None
    return found


def free_range(count: int) -> range:
    """So many ports in a row that nobody listens at."""
    first = 20000 + os.getpid() % 10000
    while True:
        held = []
        try:
            for port in range(first, first + count):
                held.append(socket.create_server(("", port)))
        except OSError:
            first += count
            continue
        finally:
            for one in held:
                one.close()
        return range(first, first + count)


@pytest.fixture
def factors(tmp_path: Path) -> tuple[np.ndarray, str]:
    a = np.random.default_rng(1).standard_normal((200, 200))
    return a @ a, str(put(tmp_path / "a.zarr", a, (100, 100)))


@pytest.mark.more
@pytest.mark.parametrize("of_each", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_job_keeps_to_its_ports_and_its_folder(
    of_each: int, factors: tuple[np.ndarray, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes, which here are one host, so that both choose from the same ports."""
    pytest.importorskip("prometheus_client", reason="Dask's workers have no metrics without it")
    expected, a = factors
    ports = free_range(20)
    ranges = {
        "scheduler_port": ports[:2],
        "worker_port": ports[2:8],
        "nanny_port": ports[8:14],
        "metrics_port": ports[14:20],
    }
    monkeypatch.setenv("NODES_OWN", "first")
    with socket.create_server(("", ports[0])):  # another job's scheduler is on the first node
        done = job(
            tmp_path,
            ["matmul", a, a, str(tmp_path / "c.zarr"), "--device", "cpu"],
            {"nodes": 2, "ntasks_per_node": of_each, "local_directory": f"{tmp_path}/scratch/$NODES_OWN"}
            | {key: f"{of[0]}:{of[-1]}" for key, of in ranges.items()},
            Noting,
        )
    assert ended(done).status == 0, done.dask_log("workers").read_text()
    np.testing.assert_allclose(zarr.open_array(tmp_path / "c.zarr", mode="r")[...], expected)
    scheduler, temporary, workers = json.loads((done.path / "seen").read_text())
    assert scheduler.endswith(f":{ports[1]}")
    assert temporary == f"{tmp_path}/scratch/first", "of the node that the command runs on"
    assert [one[0] for one in workers] == {1: ["c0-0", "c1-1"], 2: ["c0-0", "c0-1", "c1-2", "c1-3"]}[of_each]
    for column, key in ((1, "worker_port"), (2, "nanny_port"), (4, "metrics_port")):
        used = {int(one[column].rpartition(":")[2]) for one in workers}
        assert len(used) == 2 * of_each
        assert used <= set(ranges[key]), key
    assert all(one[3].startswith(f"{tmp_path}/scratch/{one[0][:2]}/") for one in workers)
    assert all(one[5] for one in workers), "and Tilewright's metrics are there"


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("$NO_SUCH_VARIABLE", "means $NO_SUCH_VARIABLE on {host}, where that variable is not set"),
        ("/proc/$USERS_OWN", "nothing can be written to /proc/me on {host}"),
    ],
)
def test_a_job_without_its_folder_ends_at_once(
    folder: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USERS_OWN", "me")
    done = job(tmp_path, ["dot", "x", "y"], {"local_directory": folder}, Keeper)
    assert ended(done).status == 1
    assert said.format(host=socket.gethostname()) in ended(done).reason


@pytest.mark.more
def test_a_job_whose_workers_have_no_folder_says_so(
    factors: tuple[np.ndarray, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of the command has one, and nothing to do for the cluster that is lost."""
    monkeypatch.setenv("NODES_OWN", "first")
    monkeypatch.setattr(keeper_module, "CLIENT_SECONDS", 0.2)
    (tmp_path / "c0").touch()
    words = ["matmul", factors[1], factors[1], str(tmp_path / "c.zarr")]
    done = job(tmp_path, words, {"local_directory": f"{tmp_path}/$NODES_OWN/scratch"}, Waiting)
    assert ended(done).status == 1
    assert f"nothing can be written to {tmp_path}/c0/scratch on " in ended(done).reason
    assert "(Not a directory); name another folder" in ended(done).reason


PLANNED = {
    "nodes": 2,
    "ntasks_per_node": 1,
    "cpus_per_task": len(os.sched_getaffinity(0)),  # of which this host confines nobody to fewer
    "mem": "4G",
}


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("more", [{}, {"threads_per_worker": 3, "mem": "2G"}], ids=["plain", "less memory"])
def test_a_plan_by_a_profile_is_that_of_its_job(
    more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was that of one worker, with fewer tiles than a job cuts C into, and a job read 2.3 times as much."""
    monkeypatch.chdir(tmp_path)
    for name, shape in {"a.zarr": (20000, 30000), "b.zarr": (30000, 25000)}.items():
        zarr.create_array(name, shape=shape, chunks=(1000, 1000), dtype="float32")
    Path("cluster.yaml").write_text(
        yaml.safe_dump({"profiles": {"site": {"kind": "slurm", **PLANNED, **more}}})
    )
    planned = CliRunner().invoke(cli, ["plan", "a.zarr", "b.zarr", "--profile", "site", "--json"])
    assert planned.exit_code == 0, planned.output
    expected = json.loads(planned.stdout)
    done = job(tmp_path, ["matmul", "a.zarr", "b.zarr", "c.zarr", "--plan-only", "--json"], PLANNED | more)
    assert ended(done).status == 0, done.dask_log("workers").read_text()
    found = json.loads(done.result.read_text())
    for one in (found, expected):
        del one["forecast"]
    assert found == expected
    assert found["workers"] == 2
    assert found["tile_count"] >= 16, "eight for each worker"
    alone = tw.plan_matmul("a.zarr", "b.zarr", workers=2, device="cpu")
    assert alone.tile_count < found["tile_count"]
