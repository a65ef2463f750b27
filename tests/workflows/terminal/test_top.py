"""What ``tilewright top`` shows of a cluster is what was done there; and where nothing can be shown it says why."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from distributed import Client, LocalCluster

import tilewright as tw
from tests.workflows.products import put
from tilewright.pipeline.errors import ClusterError
from tilewright.workflows.cli import cli
from tilewright.workflows.terminal.top import ClusterLook, WorkerLook, WorkerRates, cluster_at, looks

N = 48


@pytest.fixture(scope="module")
def served() -> Iterator[Client]:
    """Two workers whose scheduler others can reach, with Dask's pages."""
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=False,
            protocol="tcp://",
            dashboard_address="127.0.0.1:0",
            worker_dashboard_address="127.0.0.1:0",
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def multiplied(served: Client, tmp_path_factory: pytest.TempPathFactory) -> tw.MatmulRun:
    folder = tmp_path_factory.mktemp("product")
    a = put(folder / "a.zarr", np.random.default_rng(1).standard_normal((N, N)))
    return tw.matmul(a, a, folder / "c.zarr", cluster=served, device="cpu", verify=False)


def beaten(client: Client, workers: int, tiles: int) -> ClusterLook:
    """A look once the heartbeats of all workers have told of so many tiles."""
    for look in looks(client, 0.05):
        if sum(worker.tiles for worker in look.workers) >= tiles and len(look.workers) == workers:
            return look
    raise AssertionError("unreachable: looks go on")


def test_what_workers_did_is_what_the_run_says(served: Client, multiplied: tw.MatmulRun) -> None:
    look = beaten(served, 2, multiplied.plan.tile_count)
    assert sum(worker.tiles for worker in look.workers) == multiplied.plan.tile_count
    assert sum(worker.read_nbytes for worker in look.workers) == multiplied.read_nbytes
    assert sum(worker.write_nbytes for worker in look.workers) == 8 * N * N
    assert sum(worker.operations for worker in look.workers) == 2 * N**3
    busy = sum((worker.seconds or {}).get("compute", 0.0) for worker in look.workers)
    assert busy == pytest.approx(multiplied.stages["compute"], rel=1e-3)
    text = str(look)
    assert f"{multiplied.plan.tile_count} tile" in text
    assert all(worker.address in text for worker in look.workers)


def test_scripts_look_once(served: Client, multiplied: tw.MatmulRun) -> None:
    beaten(served, 2, multiplied.plan.tile_count)
    address = served.scheduler.address
    made = CliRunner().invoke(cli, ["top", address, "--once", "--json", "--interval", "0.1"])
    assert made.exit_code == 0, made.output
    (line,) = made.stdout.splitlines()
    found = json.loads(line)
    assert found["scheduler"] == address
    assert sum(worker["tiles"] for worker in found["workers"]) == multiplied.plan.tile_count
    made = CliRunner().invoke(cli, ["top", address, "--once", "--interval", "0.1"])
    assert made.exit_code == 0, made.output
    assert made.stdout.startswith(f"{address}  ")


def test_a_batch_job_is_found_by_its_folder(served: Client, tmp_path: Path) -> None:
    profiles = {"profiles": {"job": {"kind": "existing", "address": served.scheduler.address}}}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(profiles))
    with cluster_at(str(tmp_path)) as client:
        assert len(next(looks(client, 0.0)).workers) == 2


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("local", "starts a cluster for each command"),
        ("nosuch", "there is no profile 'nosuch'"),
        ("./nowhere", "no folder of a batch job"),
        ("4711", "there is no job 4711"),
    ],
)
def test_where_there_is_no_cluster_it_says_so(
    where: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = CliRunner().invoke(cli, ["top", where])
    assert made.exit_code == 1
    assert said in made.stderr
    assert not made.stdout


def test_a_scheduler_that_is_gone_ends_it() -> None:
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        seen = looks(client, 0.0)
        assert len(next(seen).workers) == 1
        client.close()
        with pytest.raises(ClusterError):
            next(seen)


def worker(seen: float, **done: Any) -> WorkerLook:
    return WorkerLook("w", "w", 1, 0, seen, 0, 0, 0.0, **done)


def test_rates_are_those_between_heartbeats() -> None:
    one = worker(10.0, tiles=2, read_nbytes=100, seconds={"read": 1.0})
    other = worker(12.0, tiles=6, read_nbytes=500, seconds={"read": 2.0, "compute": 1.0})
    rates = WorkerRates.between(one, other)
    assert (rates.tiles, rates.read_nbytes) == (2.0, 200.0)
    assert rates.busy == {"read": 0.5, "compute": 0.5}
    assert WorkerRates.between(None, other) == WorkerRates.between(other, other) == WorkerRates()


def test_gpus_are_shown_with_what_they_have_free() -> None:
    shown = worker(10.0, seconds={}, device_free_nbytes=2**33, device_total_nbytes=2**36)
    late = worker(30.0)
    text = str(ClusterLook("tcp://s", 0.0, (shown, late), (WorkerRates(), WorkerRates())))
    assert "8 GiB of 64 GiB" in text
    assert "20 s ago" in text


def told(client: Client) -> tuple[dict[str, float], list[str]]:
    """What a worker says: of its process, which may have been of other clusters before; and all lines."""
    (port, *_) = (info["services"]["dashboard"] for info in client.scheduler_info()["workers"].values())
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    names = ("tiles_total", "read_bytes_total", "write_bytes_total", "operations_total")
    return {
        name: sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"tilewright_{name}{{"))
        for name in names
    }, lines


def test_workers_tell_prometheus(served: Client, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="Dask's workers have no metrics without it")
    addresses = served.scheduler_info()["workers"]
    before, _ = told(served)
    a = put(tmp_path / "a.zarr", np.random.default_rng(1).standard_normal((N, N)))
    multiplied = tw.matmul(a, a, tmp_path / "c.zarr", cluster=served, device="cpu", verify=False)
    after, lines = told(served)
    found = {name: value - before[name] for name, value in after.items()}
    assert found == {
        "tiles_total": multiplied.plan.tile_count,
        "read_bytes_total": multiplied.read_nbytes,
        "write_bytes_total": 8 * N * N,
        "operations_total": 2 * N**3,
    }
    stages = [line for line in lines if line.startswith("tilewright_stage_seconds_total{")]
    assert any('stage="compute"' in line for line in stages)
    assert any(address in line for address in addresses for line in stages)
    assert any(line.startswith("dask_worker_threads") for line in lines), "beside Dask's own"
