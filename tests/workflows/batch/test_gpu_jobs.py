"""Jobs on GPUs, as Slurm would run them: each task is a process of its own that sees the GPUs it was given, and no
others. Without Slurm, a script stands in for ``srun``; all else is a job's own: its keeper, its scheduler, its workers
under dask-cuda's nannies, and the command."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.workflows.products import put
from tilewright.workflows.batch.folder import JobFolder, Submitted
from tilewright.workflows.batch.keeper import Keeper
from tilewright.workflows.batch.profile import BatchProfile

ROOT = Path(__file__).parents[3]
SRUN = """\
#!/bin/sh
# The command behind srun's options, once on each node; a node has one of the job's GPUs.
while case "$1" in -*) true;; *) false;; esac; do shift; done
task=0
for gpu in $(echo "$GPUS_OF_JOB" | tr , ' '); do
    CUDA_VISIBLE_DEVICES=$gpu SLURM_PROCID=$task SLURMD_NODENAME=c$task "$@" &
    task=$((task + 1))
done
wait
"""
COMMAND = """\
import json, os, runpy, sys
from pathlib import Path
from distributed import Client

def seen():
    from numba import cuda
    return [os.environ["CUDA_VISIBLE_DEVICES"], len(cuda.gpus), str(cuda.current_context().device.uuid)]

if __name__ == "__main__":
    folder, scheduler_file, workers = sys.argv[1:]
    with Client(scheduler_file=scheduler_file) as client:
        client.wait_for_workers(int(workers), timeout=120)
        Path(folder, "seen").write_text(json.dumps(client.run(seen)))
    sys.argv[1:] = [folder]
    runpy.run_module("tilewright.workflows.batch.inside", run_name="__main__")
"""
"""Notes what each worker sees, and then runs a job's command."""


class Noting(Keeper):
    def _client_command(self, address: Path) -> list[str]:
        super()._client_command(address)
        arguments = [str(self.folder.path), str(address), str(self.profile.workers)]
        return [sys.executable, "-c", COMMAND, *arguments]


@dataclass(frozen=True)
class Ended:
    status: int
    seen: dict[str, list[Any]]
    """By a worker's address: the GPUs it is given, how many it sees, which it has."""


def job(place: Path, name: str, words: list[str], gpus: str) -> Ended:
    """Run a job on these GPUs, one on a node, to its end."""
    folder, bin_folder = JobFolder(place / name), place / f"{name}-bin"
    folder.path.mkdir()
    bin_folder.mkdir()
    srun = bin_folder / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o700)
    nodes = len(gpus.split(","))
    profile = BatchProfile(nodes=nodes, gpus_per_node="1", interface="lo", security=False, tries=1)
    folder.write_submitted(Submitted(tuple(words), profile, str(place), 0.0, name))
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    environment |= {
        "PATH": f"{bin_folder}{os.pathsep}{environment['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}",
        "GPUS_OF_JOB": gpus,
    }
    status = Noting(folder, folder.submitted(), name, 1, environment).keep()
    return Ended(status, json.loads((folder.path / "seen").read_text()))


@pytest.fixture
def factors(tmp_path: Path, rng: np.random.Generator) -> tuple[np.ndarray, Path, Path]:
    a, b = (rng.integers(-9, 9, shape).astype("i4") for shape in ((3001, 2003), (2003, 2501)))
    paths = put(tmp_path / "a", a, (501, 499)), put(tmp_path / "b", b, (499, 501))
    return (a.astype("f8") @ b.astype("f8")).astype("i8"), *paths  # exact: the sums are small


@pytest.mark.multigpu
def test_a_job_of_two_nodes_with_a_gpu_each(factors: tuple[np.ndarray, Path, Path], tmp_path: Path) -> None:
    """Neither sees the other's GPU, so that panels pass between them by TCP."""
    expected, a, b = factors
    words = ["matmul", str(a), str(b), str(tmp_path / "c"), "--dtype", "int64", "--device", "cuda"]
    ended = job(tmp_path, "wide", [*words, "--device-memory", "100MB"], "0,1")
    assert ended.status == 0
    assert sorted(one[:2] for one in ended.seen.values()) == [["0", 1], ["1", 1]]
    assert len({one[2] for one in ended.seen.values()}) == 2
    assert all(address.startswith("tcp://") for address in ended.seen)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c", mode="r")[...], expected)


@pytest.mark.multigpu
def test_two_jobs_of_one_gpu_each_at_once(factors: tuple[np.ndarray, Path, Path], tmp_path: Path) -> None:
    expected, a, b = factors

    def run(gpu: str) -> Ended:
        words = ["matmul", str(a), str(b), str(tmp_path / f"c{gpu}"), "--dtype", "int64", "--device", "cuda"]
        return job(tmp_path, f"job{gpu}", words, gpu)

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(run, ["0", "1"]))
    assert [one.status for one in both] == [0, 0]
    workers = [one for ended in both for one in ended.seen.values()]
    assert [one[:2] for one in workers] == [["0", 1], ["1", 1]]
    assert workers[0][2] != workers[1][2]
    for gpu in "01":
        np.testing.assert_array_equal(zarr.open_array(tmp_path / f"c{gpu}", mode="r")[...], expected)
