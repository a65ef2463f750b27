"""A place with inputs and profiles, and commands that are submitted from there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import yaml
import zarr

from tests.object_stores import servers
from tests.object_stores.proxy import Fault, proxied, seeded
from tests.slurm.jobs import RIG, ROOT, TILES, Run, set_pace, slurm, wait_for

FAULTS = (Fault(status=503), Fault(refuse=True), Fault(drop_answer=True), Fault(cut=10), Fault(status=500))
"""What networks and busy servers do."""

os.environ["SLURM_CONF"] = f"{RIG}/etc/slurm.conf"


class Bucket(NamedTuple):
    """A bucket of S3."""

    url: str
    """With a slash at its end."""
    server: int
    """The port of what answers for it, without what cuts connections."""


@pytest.fixture
def place(tmp_path: Path, rng: np.random.Generator) -> Iterator[Path]:
    site = {"kind": "slurm", "nodes": 2, "gpus_per_node": 0, "cpus_per_task": 1, "time": "10", "tries": 4}
    one = site | {"nodes": 1}
    gpu = {"kind": "slurm", "gpus_per_node": 1, "cpus_per_gpu": 1, "time": "5", "tries": 1}
    profiles = {
        "site": site,
        "short": site | {"time": "2"},
        "patient": site | {"time": "60", "tries": 99},
        "c1": one | {"extra": ["--nodelist=c1"]},
        "c2": one | {"extra": ["--nodelist=c2"]},
        "gpu": gpu | {"extra": ["--nodelist=c1"]},
        "fixed": site
        | {"scheduler_port": "17000:17009", "worker_port": "17010:17029", "nanny_port": "17030:17049"}
        | {"metrics_port": "17050:17069", "local_directory": f"{tmp_path}/$SLURMD_NODENAME-$SLURM_JOB_ID"},
    }
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"profiles": profiles}))
    for name, shape, chunks in (("A", (2048, 64), (256, 64)), ("B", (64, 2048), (64, 256))):
        array = zarr.create_array(tmp_path / f"{name}.zarr", shape=shape, chunks=chunks, dtype="int64")
        array[...] = rng.integers(-99, 99, shape)
    yield tmp_path
    slurm("scancel", f"--user={os.getuid()}")
    wait_for(lambda: not slurm("squeue", "--noheader"))


@pytest.fixture
def submit(place: Path) -> Iterator[Callable[..., Run]]:
    """Submits a product whose tiles take so many seconds each, and waits until it is submitted, unless told not to."""
    started: list[Run] = []

    def call(
        seconds: float = 1,
        profile: str = "site",
        output: str = "C.zarr",
        *,
        device: str = "cpu",
        server: int = 0,
        wait: bool = True,
        more: Mapping[str, str] = {},
    ) -> Run:
        name = f"run-{len(started)}"
        command = [sys.executable, "-m", "tilewright", "matmul", "A.zarr", "B.zarr", output, "--json"]
        command += ["--profile", profile, "--device-memory", "1MiB", "--device", device]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "DASK_TILEWRIGHT__JOBS_FOLDER": str(place / "jobs"),
            "DASK_TILEWRIGHT__TILES": str(TILES),
            "DASK_DISTRIBUTED__WORKER__PRELOAD": str([str(ROOT / "tests" / "slurm" / "slow_tiles.py")]),
            "TILE_PACE": str(place / f"{name}.pace"),
            **more,
        }
        set_pace(place, name, seconds)
        with (place / f"{name}.stdout").open("w") as out, (place / f"{name}.stderr").open("w") as errors:
            process = subprocess.Popen(
                command, cwd=place, env=environment, stdout=out, stderr=errors, text=True
            )
        run = Run(place, process, name, output, server)
        started.append(run)
        if wait:
            wait_for(lambda: "submitted as job" in run.said or process.poll() is not None)
        return run

    yield call
    for run in started:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """One that commands find behind a proxy, which cuts, drops and refuses a tenth of all requests."""
    folder = tmp_path / "moto"
    folder.mkdir()
    with servers.moto(folder) as port, proxied(port) as proxy:
        servers.make_bucket(port, "tests")
        proxy.latency, proxy.faults = 0.01, seeded(0, 0.1, FAULTS)
        for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
            monkeypatch.delenv(name)
        for name, value in servers.settings(proxy.url).items():
            monkeypatch.setenv(name, value)
        yield Bucket("s3://tests/", port)


@pytest.fixture
def x(place: Path) -> Path:
    """A vector whose product with itself is 140."""
    path = place / "x.zarr"
    zarr.save_array(str(path), np.arange(8))
    return path
