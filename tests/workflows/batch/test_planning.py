"""Plans by a profile of kind slurm, of which nothing is submitted."""

from __future__ import annotations

import json
import os
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
from tilewright.pipeline.errors import ClusterError, OptionError
from tilewright.pipeline.events import Event, Notice
from tilewright.pipeline.forecast.hardware import MODELS
from tilewright.workflows.batch.planning import PlannedJob, planned_job
from tilewright.workflows.batch.profile import read_profile
from tilewright.workflows.cli import cli

GIB = 2**30
GPUS = {"kind": "slurm", "nodes": 2, "gpus_per_node": 4, "cpus_per_gpu": 8, "mem": "257G"}
TYPED = GPUS | {"gpus_per_node": "h100:4"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device_choice, "cuda_available", lambda: False)
    profiles = {
        "gpus": GPUS,
        "typed": TYPED,
        "cores": {"kind": "slurm", "nodes": 3, "ntasks_per_node": 2, "cpus_per_task": 5},
        "odd": {"kind": "slurm", "gpu": 4},
        "own": {"kind": "cpu", "n_workers": 1},
        "inside": {"kind": "local"},
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
        ({"cluster": "gpus"}, OptionError, "says gpus_per_node: 4, by which it is not known how much memory its"),
        ({"cluster": "cores", "device": "cuda", "device_memory": "9GiB"}, OptionError, "asks for no GPU; say gpus"),
        ({"cluster": "odd"}, ClusterError, "a job of Slurm's has no key 'gpu'"),
        ({"cluster": "cores", "workers": 3}, OptionError, "workers=3 beside a cluster"),
        ({"cluster": "gpus", "gpu": "h100", "workers": 3}, OptionError, "workers=3 beside a cluster"),
        ({"cluster": "cores", "gpu": "h100"}, OptionError, r"asks for no GPU; say gpus_per_node there, or leave --gpu"),
        ({"cluster": "own", "gpu": "h100"}, OptionError, r"whose workers are cores: leave one of the two away \(--gpu"),
        ({"cluster": "gpus", "gpu": "h100", "device": "cpu"}, OptionError, "beside device='cpu'"),
        ({"cluster": "typed", "gpu": "h100", "device_memory": "100GiB"}, OptionError, "has 74.5 GiB; give at most"),
    ],
)  # fmt: skip
def test_what_no_job_could_be_planned_for_is_refused(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        tw.plan_matmul("a.zarr", "a.zarr", transpose_b=True, listener=silent, **options)


@pytest.mark.usefixtures("here")
def test_a_plan_by_another_profile_asks_its_workers() -> None:
    made = plan("--profile", "inside", "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["workers"] == 1
    alone = plan("--cluster-file", "cluster.yaml")
    assert alone.exit_code == 1
    assert "--cluster-file cluster.yaml without a cluster" in alone.stderr


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("profile", "more"), [("gpus", ["--gpu", "h100"]), ("typed", [])])
def test_a_jobs_plan_is_timed_by_the_rates_of_the_gpus_it_asks_for(profile: str, more: list[str]) -> None:
    """The two options excluded each other, so that what was timed was another plan, of fewer tiles; and by the profile
    the time was not known. A profile that calls its GPUs by their model needs no ``--gpu``."""
    made = plan("--profile", profile, *more, "--json")
    assert made.exit_code == 0, made.output
    said = "the GPUs are taken for NVIDIA H100 SXM, since profile 'typed' of cluster.yaml says gpus_per_node: h100"
    assert (said in made.stderr) == (profile == "typed")
    found = json.loads(made.stdout)
    assert (found["workers"], found["forecast"]["workers"], found["forecast"]["source"]) == (
        8,
        8,
        "published",
    )
    assert found["device_limit_nbytes"] == 57_600_000_000, "eight tenths of nine tenths of 80 GB"
    by_memory = json.loads(plan("--profile", "gpus", "--device-memory", "57600000000", "--json").stdout)
    named = json.loads(plan("--gpu", "h100", "--workers", "8", "--json").stdout)
    assert found["tile_count"] > named["tile_count"]
    assert found["forecast"]["floors"]["compute"] == named["forecast"]["floors"]["compute"]
    for one in (found, by_memory):
        del one["forecast"]
    assert found == by_memory, "it is the job's plan, timed"


OF_MATRICES = [
    ["matmul", "a.zarr", "a.zarr", "o", "--transpose-b"],
    ["gram", "a.zarr", "o"],
    ["cov", "a.zarr", "o"],
    ["corr", "a.zarr", "o"],
    ["eofs", "e.zarr", "o", "-k", "2"],
    ["topk", "e.zarr", "o"],
    ["pairs", "e.zarr", "o", "--above", "5"],
]
OF_TEXTS = [
    ["histogram", "cluster.yaml", "--by", "word"],
    ["duplicates", "cluster.yaml"],
    ["signals", "cluster.yaml"],
]
PLANNED = [*OF_MATRICES, *OF_TEXTS]


@pytest.fixture
def submitted(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which an sbatch that refuses all notes each of its calls."""
    zarr.create_array("e.zarr", shape=(4000, 64), chunks=(1000, 64), dtype="float32")
    (here / "bin").mkdir()
    sbatch = here / "bin" / "sbatch"
    sbatch.write_text(f'#!/bin/sh\necho "$@" >>{here}/submitted\nexit 1\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}{os.pathsep}{os.environ['PATH']}")
    return here / "submitted"


def test_every_command_that_plans_is_among_these() -> None:
    planning = {
        name
        for name, command in cli.commands.items()
        if any(one.name == "plan_only" for one in command.params)
    }
    assert planning == {words[0] for words in PLANNED}


@pytest.mark.sample(10)
@pytest.mark.parametrize("words", PLANNED, ids=lambda words: words[0])
@pytest.mark.parametrize("profile", ["typed", "cores"])
def test_plan_only_by_a_profile_submits_nothing(profile: str, words: list[str], submitted: Path) -> None:
    """A job was submitted that made the plan, unless ``--gpu`` or ``--rate`` was given."""
    made = CliRunner().invoke(cli, [*words, "--plan-only", "--profile", profile, "--json"])
    assert made.exit_code == 0, made.output
    workers = 8 if profile == "typed" else 6
    found = json.loads(made.stdout)
    assert (found["workers"] if words[0] == "histogram" else found["forecast"]["workers"]) == workers
    if words in OF_MATRICES:
        assert found["forecast"]["source"] == ("published" if profile == "typed" else "none")
    if words[0] in ("topk", "pairs"):
        limit = (257 * GIB - 512 * 2**20) // 4 if profile == "typed" else int(0.9 / 2 * memory_limit())
        assert found["host_limit_nbytes"] == limit
        assert found["forecast"]["memory_nbytes"] == found["host_peak_nbytes"] < limit
    for option in ("--detach", "--dry-run"):
        refused = CliRunner().invoke(cli, [*words, "--plan-only", "--profile", profile, option])
        assert (refused.exit_code, f"leave {option} away, or --plan-only" in refused.stderr) == (2, True)
    assert not submitted.exists()


@pytest.mark.parametrize("words", OF_MATRICES, ids=lambda words: words[0])
def test_what_is_not_known_of_gpus_is_asked_for_and_nothing_submitted(
    words: list[str], submitted: Path
) -> None:
    """The error was about a ``device='cuda'`` that nobody had given, and named no model."""
    made = CliRunner().invoke(cli, [*words, "--plan-only", "--profile", "gpus"])
    assert made.exit_code == 1
    assert made.stderr.splitlines()[-1] == (
        "error: profile 'gpus' of cluster.yaml says gpus_per_node: 4, by which it is not known how much memory its GPUs"
        " have, and there is none here; name their model (--gpu), say how much each has free"
        " (--device-memory), or name it in the profile, as gpus_per_node: h100:4; known are a100, a100-40gb, h100,"
        " h100-pcie, h200, l40s"
    )
    assert not submitted.exists()


@pytest.mark.usefixtures("submitted")
def test_texts_are_planned_whatever_the_gpus_are() -> None:
    planned = tw.plan_histogram("cluster.yaml", cluster="gpus", listener=silent)
    assert (planned.workers, planned.device) == (8, "GPU")
    assert tw.plan_histogram("cluster.yaml", cluster="gpus", device="cpu", listener=silent).device == "CPU"
    with pytest.raises(OptionError, match="asks for no GPU; say gpus_per_node there"):
        tw.plan_histogram("cluster.yaml", cluster="cores", device="cuda", listener=silent)


@pytest.mark.sample(3)
@pytest.mark.parametrize("words", OF_MATRICES, ids=lambda words: words[0])
def test_plan_only_by_a_profile_and_a_gpu_submits_nothing(words: list[str], submitted: Path) -> None:
    for more in (["--gpu", "h100"], ["--rate", "50T", "--device-memory", "9GiB"]):
        made = CliRunner().invoke(cli, [*words, "--plan-only", "--profile", "gpus", *more, "--json"])
        assert made.exit_code == 0, made.output
        found = json.loads(made.stdout)
        assert found["forecast"]["source"] == ("published" if more[0] == "--gpu" else "given")
        assert found["forecast"]["workers"] == 8
    both = CliRunner().invoke(
        cli, [*words, "--plan-only", "--profile", "gpus", "--gpu", "h100", "--workers", "2"]
    )
    assert (both.exit_code, "--workers 2 beside a cluster ('gpus')" in both.stderr) == (1, True)
    assert not submitted.exists()


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ({"gpus_per_node": "h100:4"}, "NVIDIA H100 SXM"),
        ({"gpus_per_node": "nvidia_h100_80gb_hbm3:8"}, "NVIDIA H100 SXM"),
        ({"gpus_per_node": "H100_PCIe:1"}, "NVIDIA H100 PCIe"),
        ({"gpus_per_node": "nvidia_a100-sxm4-80gb:4"}, "NVIDIA A100 80 GB"),
        ({"gpus_per_node": "a100_40:4"}, "NVIDIA A100 40 GB"),
        ({"gpus_per_node": 4, "constraint": "h200&nvlink"}, "NVIDIA H200 SXM"),
        ({"gpus_per_node": "l40s:2", "constraint": "rack1,l40s"}, "NVIDIA L40S"),
        ({"gpus_per_node": 4, "constraint": "h100|h200"}, None),
        ({"gpus_per_node": 4, "constraint": "[h100|a100]"}, None),
        ({"gpus_per_node": "h100:4", "constraint": "a100"}, None),
        ({"gpus_per_node": "a100_3g.20gb:1"}, None),
        ({"gpus_per_node": "nvidia_h100_nvl:1"}, None),
        ({"gpus_per_node": "gh200:1"}, None),
        ({"gpus_per_node": 4}, None),
        ({"constraint": "h100"}, None),
    ],
)
def test_what_a_profile_calls_its_gpus_is_known_by_whole_names(
    options: dict[str, Any], model: str | None
) -> None:
    found = PlannedJob("p", read_profile("p", options)).model("auto")
    assert (None if found is None else found.name) == model
    assert PlannedJob("p", read_profile("p", options)).model("cpu") is None


@pytest.mark.usefixtures("here")
def test_what_is_taken_for_granted_of_gpus_is_said() -> None:
    """Sites call boards of several sizes alike, so that what somebody says of their memory counts."""
    told: list[str] = []
    job = PlannedJob("p", read_profile("p", TYPED))
    facts = job.facts("auto", "90GiB", told.append)
    assert (facts[0].device_free_nbytes, facts[0].name, len(told)) == (90 * GIB, "NVIDIA H100 SXM", 1)
    other = PlannedJob("p", read_profile("p", TYPED), MODELS["a100"]).facts("auto", None, told.append)
    assert other[0].name == "NVIDIA A100 80 GB"
    assert told[1] == "p says gpus_per_node: h100, and the plan is for NVIDIA A100 80 GB, as --gpu (gpu) says"


@pytest.mark.usefixtures("here")
def test_hosts_are_those_of_the_profile() -> None:
    """Eight GPUs on two nodes have the storage of two, and half the cores of those measured may do half as much."""

    def most(**more: Any) -> tuple[float, float]:
        Path("cluster.yaml").write_text(yaml.safe_dump({"profiles": {"p": TYPED | more}}))
        found = json.loads(plan("--profile", "p", "--json").stdout)["forecast"]
        return found["floors"]["write"], found["command_seconds"][1]

    one_node = {"nodes": 1, "gpus_per_node": "h100:8", "mem": "514G"}
    assert most()[0] < most(**one_node)[0]
    assert most(cpus_per_gpu=16)[1] < most()[1]
    assert most(cpus_per_gpu=16) == most(cpus_per_gpu=64)
