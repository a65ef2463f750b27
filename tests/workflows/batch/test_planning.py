"""Plans by a profile of kind slurm, of which nothing is submitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dask
import pytest
import yaml
import zarr
from click.testing import CliRunner, Result

import tilewright as tw
from tilewright.kernels.gpu import device_choice
from tilewright.pipeline.cluster.here.worker import memory_limit
from tilewright.pipeline.errors import ClusterError, DeviceUnavailableError, OptionError
from tilewright.pipeline.events import Event, Notice
from tilewright.workflows.batch.planning import planned_job
from tilewright.workflows.cli import cli

GIB = 2**30
GPUS = {"kind": "slurm", "nodes": 2, "gpus_per_node": "h100:4", "cpus_per_gpu": 8, "mem": "257G"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device_choice, "cuda_available", lambda: False)
    profiles = {
        "gpus": GPUS,
        "cores": {"kind": "slurm", "nodes": 3, "ntasks_per_node": 2, "cpus_per_task": 5},
        "odd": {"kind": "slurm", "gpu": 4},
        "own": {"kind": "cpu", "n_workers": 1},
    }
    Path("cluster.yaml").write_text(yaml.safe_dump({"profiles": profiles}))
    zarr.create_array("a.zarr", shape=(200_000, 100_000), chunks=(2000, 2000), dtype="float32")
    return tmp_path


def plan(*words: str) -> Result:
    return CliRunner().invoke(cli, ["plan", "a.zarr", "a.zarr", "--transpose-b", *words])


def silent(event: Event) -> None:
    pass


@pytest.mark.usefixtures("here")
def test_a_plan_for_gpus_has_the_jobs_workers_memory_and_tiles() -> None:
    made = plan("--profile", "gpus", "--device-memory", "60GiB", "--json")
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    assert (found["workers"], found["on_host"]) == (8, False)
    assert found["device_limit_nbytes"] == 60 * GIB
    with dask.config.set({"tilewright.tiles": 64, "tilewright.tile-seconds": 30}):
        expected = tw.plan_matmul(
            "a.zarr", "a.zarr", transpose_b=True, workers=8, device="cuda", device_memory="60GiB",
            host_memory=(257 * GIB - 512 * 2**20) // 4, listener=silent,
        )  # fmt: skip
    alone = tw.plan_matmul(
        "a.zarr", "a.zarr", transpose_b=True, workers=8, device="cuda", device_memory="60GiB", listener=silent
    )
    for name in ("tile_rows", "tile_columns", "panel_depth", "tile_count", "read_nbytes"):
        assert found[name] == getattr(expected, name), name
    assert found["tile_count"] > alone.tile_count


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (GPUS, {"cores": 1, "usable_cores": 32, "host_cores": 32, "threads": 4}),
        (
            {"nodes": 3, "ntasks_per_node": 2, "cpus_per_task": 5, "mem": "4G", "threads_per_worker": 7},
            {
                "cores": 5,
                "usable_cores": 5,
                "host_cores": 10,
                "threads": 7,
                "host_limit_nbytes": 1792 * 2**20,
            },
        ),
        (
            {"nodes": 1, "ntasks_per_node": 2},
            {"host_limit_nbytes": int(0.9 / 2 * memory_limit()), "threads": 2, "host_cores": 8},
        ),
    ],
)
def test_workers_are_those_that_the_profile_asks_for(options: dict[str, Any], facts: dict[str, int]) -> None:
    Path("cluster.yaml").write_text(yaml.safe_dump({"profiles": {"p": {"kind": "slurm"} | options}}))
    job = planned_job("p", None)
    assert job is not None
    told: list[str] = []
    found = job.facts("auto", "9GiB", told.append)
    assert bool(told) == ("mem" not in options)
    assert len({fact.address for fact in found}) == len(found) == job.profile.workers
    assert len({fact.address.rpartition(":")[0] for fact in found}) == job.profile.nodes
    for name, value in facts.items():
        assert {getattr(fact, name) for fact in found} == {value}, name


@pytest.mark.usefixtures("here")
def test_nodes_whose_memory_is_not_said_are_taken_for_this_machine() -> None:
    told: list[Event] = []
    found = tw.plan_matmul("a.zarr", "a.zarr", transpose_b=True, cluster="cores", listener=told.append)
    assert found.workers == 6
    notes = [event.message for event in told if isinstance(event, Notice)]
    assert any("does not say how much memory a node has (mem)" in note for note in notes)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"cluster": "gpus"}, DeviceUnavailableError, "give the memory they have free"),
        ({"cluster": "cores", "device": "cuda", "device_memory": "9GiB"}, OptionError, "asks for no GPU; say gpus"),
        ({"cluster": "odd"}, ClusterError, "a job of Slurm's has no key 'gpu'"),
        ({"cluster": "cores", "workers": 3}, OptionError, "workers=3 beside a cluster"),
    ],
)  # fmt: skip
def test_what_no_job_could_be_planned_for_is_refused(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        tw.plan_matmul("a.zarr", "a.zarr", transpose_b=True, listener=silent, **options)


@pytest.mark.usefixtures("here")
def test_a_plan_by_another_profile_asks_its_workers() -> None:
    made = plan("--profile", "own", "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["workers"] == 1
    alone = plan("--cluster-file", "cluster.yaml")
    assert alone.exit_code == 1
    assert "cluster_file='cluster.yaml' without a cluster" in alone.stderr
