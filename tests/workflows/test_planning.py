"""Plans that are asked for by themselves, and what is refused before anything is started."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from distributed import Client

import tilewright as tw
from tests.workflows.products import put
from tilewright.kernels.gpu import device_choice
from tilewright.pipeline.errors import DeviceUnavailableError, OptionError
from tilewright.pipeline.events import Notice
from tilewright.pipeline.forecast.published import least_rate
from tilewright.pipeline.product import job
from tilewright.pipeline.product.request import Request
from tilewright.pipeline.worker.survey import cores_here
from tilewright.workflows import verify
from tilewright.workflows.cli import cli

GIB = 2**30


def test_a_wrong_argument_is_named_before_a_cluster_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no setting that is wrong."""
    a = put(tmp_path / "a", np.ones((8, 8)))
    for module in (job, verify):
        monkeypatch.setattr(module, "open_executor", None)
    multiply = partial(tw.matmul, a, a, tmp_path / "c")

    def plan(**options: Any) -> None:
        job.plan_only(Request(a, a, tmp_path / "c", **options))

    for call in (multiply, plan, partial(tw.plan_matmul, a, a, cluster="local")):
        with pytest.raises(
            OptionError, match=r"^device_memory \(--device-memory\): 'lots' is no size in bytes;"
        ):
            call(device_memory="lots")
    for wrong in (0, 65, True, "2"):
        with pytest.raises(
            OptionError, match=r"^rounds \(--rounds\): .* is not a number of rounds; it must be from 1 to 64"
        ):
            tw.verify(a, a, a, rounds=wrong)


def test_a_file_of_profiles_is_for_a_plan_with_a_cluster(tmp_path: Path) -> None:
    """Without one the plan was for this machine, and the file was never opened."""
    a = put(tmp_path / "a", np.ones((8, 8)))
    with pytest.raises(OptionError, match=r"^cluster_file='there\.yaml' without a cluster: .* \(cluster\)"):
        tw.plan_matmul(a, a, device="cpu", cluster_file="there.yaml")


def test_a_plan_alone_reads_no_data(tmp_path: Path) -> None:
    a = put(tmp_path / "a", np.ones((64, 64)))
    for chunk in (tmp_path / "a" / "c").rglob("*"):
        if chunk.is_file():
            chunk.unlink()
    plan = tw.plan_matmul(a, a, device="cpu", device_memory=50_000, workers=3)
    assert plan.workers == 3
    assert json.loads(json.dumps(plan.to_json()))["operations"] == 2 * 64**3


def test_a_plan_is_for_one_worker_at_least(tmp_path: Path) -> None:
    path = put(tmp_path / "a", np.ones((3, 3)))
    for workers in (0, 2.5, "4", True):
        with pytest.raises(OptionError, match=f"workers={workers!r}: a product needs a whole number"):
            tw.plan_matmul(path, path, workers=workers, device="cpu")  # type: ignore[arg-type]


def test_a_plan_for_gpus_elsewhere_needs_only_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_choice, "cuda_available", lambda: False)
    path = put(tmp_path / "a", np.ones((512, 512), np.float32))
    plan = tw.plan_matmul(path, path, device="cuda", device_memory="4GiB", workers=8)
    assert not plan.on_host
    assert plan.device_limit_nbytes == 4 * GIB
    assert plan.line_nbytes > 1
    with dask.config.set({"tilewright.device-memory": "2GiB"}):
        assert tw.plan_matmul(path, path, device="cuda").device_limit_nbytes == 2 * GIB
    with pytest.raises(
        DeviceUnavailableError, match=r"to plan for GPUs elsewhere, give the memory they have"
    ):
        tw.plan_matmul(path, path, device="cuda")


@pytest.mark.parametrize("option", ["device_memory", "host_memory"])
def test_from_python_a_size_that_is_none_is_an_option_error(option: str, tmp_path: Path) -> None:
    path = put(tmp_path / "a", np.ones((3, 3)))
    with pytest.raises(OptionError, match="'lots' is no size in bytes"):
        tw.plan_matmul(path, path, device="cpu", **{option: "lots"})  # type: ignore[arg-type]


def test_a_plan_is_for_a_million_workers_at_most(tmp_path: Path) -> None:
    path = put(tmp_path / "a", np.ones((3, 3)))
    assert tw.plan_matmul(path, path, workers=10**6, device="cpu").workers == 10**6
    with pytest.raises(OptionError, match=r"workers=10{30}: a plan is for 1000000 workers at most"):
        tw.plan_matmul(path, path, workers=10**30, device="cpu")


@pytest.mark.parametrize(
    ("options", "named"), [({"workers": 3}, "workers=3"), ({"host_memory": "1GiB"}, "host_memory='1GiB'")]
)
def test_a_plan_for_a_cluster_takes_its_workers_from_there(
    options: dict[str, Any], named: str, client: Client, tmp_path: Path
) -> None:
    path = put(tmp_path / "a", np.ones((3, 3)))
    assert tw.plan_matmul(path, path, cluster=client, device="cpu").workers == len(client.nthreads())
    with pytest.raises(OptionError, match=f"{named} beside a cluster"):
        tw.plan_matmul(path, path, cluster=client, device="cpu", **options)


def unread(path: Path, side: int, chunk: int) -> Path:
    """A square matrix of which only the metadata is there."""
    zarr.create_array(path, shape=(side, side), chunks=(chunk, chunk), dtype="float32")
    return path


@pytest.mark.parametrize(
    ("side", "chunk", "expected"),
    [
        (
            1000,
            100,
            r"C is cut into \d+: a tile of less than 17 billion operations takes no time that a stop",
        ),
        (
            40_000,
            4000,
            r"C is cut into \d+: no tile is smaller than a stored piece of C, 4000 × 4000; smaller chunks",
        ),
        (40_000, 400, None),
    ],
)
def test_it_is_said_why_there_are_fewer_tiles_than_were_asked_for(
    side: int, chunk: int, expected: str | None, tmp_path: Path
) -> None:
    a = unread(tmp_path / "a", side, chunk)
    told: list[str] = []
    request = Request(
        a, a, tmp_path / "c", device="cpu", device_memory="1GiB", verify=False,
        listener=lambda event: told.append(event.message) if isinstance(event, Notice) else None,
    )  # fmt: skip
    with dask.config.set({"tilewright.tiles": 1000}):
        plan = job.plan_only(request)
    notes = [note for note in told if "tilewright.tiles" in note]
    if expected is None:
        assert not notes
        assert plan.tile_count > 750
    else:
        (note,) = notes
        assert re.match(f"tilewright.tiles asks for 1000 tiles, and {expected}", note)
    with dask.config.set({"tilewright.tiles": 16}):
        told.clear()
        job.plan_only(request)
    assert not [note for note in told if "tilewright.tiles" in note], "nobody has asked for that"


def test_a_tile_takes_a_worker_no_longer_than_asked_for(tmp_path: Path) -> None:
    a = unread(tmp_path / "a", 100_000, 500)
    counts = []
    for seconds in (None, 60, 30):
        with dask.config.set({"tilewright.tile-seconds": seconds}):
            plan = tw.plan_matmul(a, a, device="cpu", workers=4, host_memory="64GiB")
        counts.append(plan.tile_count)
        if seconds is not None:
            cores = cores_here()
            assert plan.operations / plan.tile_count / cores < 2 * seconds * 2**33
    assert counts[0] < counts[1] < counts[2]


def test_a_tile_takes_a_gpu_that_is_known_as_long_as_asked_for(tmp_path: Path) -> None:
    a = unread(tmp_path / "a", 400_000, 400_000)
    counts = {}
    for gpu in ("h100", "a100"):
        with dask.config.set({"tilewright.tile-seconds": 30}):
            plan = tw.plan_matmul(a, a, gpu=gpu, workers=16)
        peak = {"h100": 67e12, "a100": 19.5e12}[gpu]
        seconds = plan.operations / plan.tile_count / peak
        assert 5 < seconds < 30
        counts[gpu] = plan.tile_count
    assert counts["h100"] < counts["a100"]


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM", "h100"])
def test_a_gpus_rate_is_known_by_any_of_its_names(name: str) -> None:
    assert least_rate("float32", name) == pytest.approx(0.66 * 67e12)
    assert least_rate("float32", "GeForce") is None


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "words",
    [
        "gram --of rows --center columns --missing 3 --divide n",
        *(pytest.param(plain, marks=pytest.mark.slow) for plain in ("gram", "cov")),
        "cov --window 5",
        "corr --missing 3 --missing-as pairwise",
        "gram --append",
    ],
)
def test_a_gram_matrix_is_planned_as_it_is_computed(
    tmp_path: Path, rng: np.random.Generator, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without reading a number of X, or writing anything."""
    monkeypatch.chdir(tmp_path)
    name, *options = words.split()
    zarr.create_array("x.zarr", data=rng.integers(-9, 9, (60, 40)).astype("i4"), chunks=(20, 16))
    common = [
        "x.zarr",
        "c.zarr",
        *options,
        "--device",
        "cpu",
        "--device-memory",
        "40KiB",
        "--json",
        "--quiet",
    ]
    planned = CliRunner().invoke(cli, [name, *common, "--plan-only"])
    assert planned.exit_code == 0, planned.output
    assert not Path("c.zarr").exists()
    assert not Path("c.zarr.partial").exists()
    done = CliRunner().invoke(cli, [name, *common])
    assert done.exit_code == 0, done.output
    foreseen = json.loads(planned.stdout)
    assert foreseen.pop("forecast")["workers"] == foreseen["workers"]
    assert json.loads(done.stdout)["plan"] == foreseen


def test_a_plan_knows_of_scales_and_offsets(tmp_path: Path) -> None:
    """Integers become floats by them, in a buffer that takes room."""
    a = zarr.create_array(tmp_path / "a", data=np.ones((30, 40), "i1"), chunks=(10, 10))
    b = zarr.create_array(tmp_path / "b", data=np.ones((40, 20), "i1"), chunks=(10, 10))
    options: dict[str, Any] = {"device": "cpu", "device_memory": "100KiB", "listener": lambda event: None}
    plain = tw.plan_matmul(a, b, **options)
    scaled = tw.plan_matmul(a, b, alpha=0.5, row_scale=np.ones(30), column_offset=np.zeros(20), **options)
    assert (plain.c_dtype, plain.finished) == ("int32", False)
    assert (scaled.c_dtype, scaled.sum_dtype, scaled.finished) == ("float64", "int32", True)
    with pytest.raises(tw.ShapeError, match="row_scale"):
        tw.plan_matmul(a, b, row_scale=np.ones(29), **options)


def test_a_gpu_says_how_fast_the_workers_of_a_cluster_are_if_they_have_one(
    client: Client, tmp_path: Path
) -> None:
    """It was refused beside every cluster."""
    path = str(put(tmp_path / "a", np.ones((300, 300))))
    assert client.scheduler is not None
    words = ["plan", path, path, "--profile", client.scheduler.address]
    made = CliRunner().invoke(cli, [*words, "--device", "cpu", "--rate", "1T", "--json"])
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    assert (found["workers"], found["forecast"]["source"]) == (len(client.nthreads()), "given")
    made = CliRunner().invoke(cli, [*words, "--gpu", "h100"])
    assert made.exit_code == 0, made.output
    assert "time            not known: cores do this work, of which a GPU (--gpu) says nothing" in made.stdout
