"""What docs/administrators.md gives to be copied is taken, and what it says of files is so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
import zarr
from click.testing import CliRunner
from distributed import Client, LocalCluster

import tilewright as tw
from tests.workflows.products import put
from tilewright.pipeline import config
from tilewright.pipeline.cluster.node.places import ports_of
from tilewright.pipeline.cluster.node.workers import NodeNanny
from tilewright.workflows.batch.profile import read_profile
from tilewright.workflows.cli import cli

PAGE = (Path(__file__).parents[3] / "docs" / "administrators.md").read_text(encoding="utf-8")
BLOCKS = [yaml.safe_load(text) for text in re.findall(r"^ *```yaml\n(.*?)^ *```", PAGE, re.M | re.S)]
[GPUS] = [block["profiles"]["gpus"] for block in BLOCKS if "profiles" in block]
[SCRAPES] = [block["scrape_configs"] for block in BLOCKS if "scrape_configs" in block]


def test_the_profile_is_one_and_its_job_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = read_profile("p", GPUS)
    assert found.workers == 16
    Path("cluster.yaml").write_text(yaml.safe_dump({"profiles": {"gpus": GPUS}}))
    for name in ("A.zarr", "B.zarr"):
        zarr.create_array(name, shape=(10_000, 10_000), chunks=(1000, 1000), dtype="float32")
    commands = re.findall(r"`tilewright ((?:matmul|plan)\s[^`]*)`", PAGE)
    assert len(commands) == 2
    for command in commands:
        made = CliRunner().invoke(cli, command.split())
        assert made.exit_code == 0, made.output
        assert "# metrics: port 9100:9131 of each node" in made.output or "16 workers" in made.output


def test_the_ports_that_prometheus_asks_are_those_of_the_profile() -> None:
    [static] = [scrape["static_configs"] for scrape in SCRAPES if "static_configs" in scrape]
    asked = {int(target.partition(":")[2]) for target in static[0]["targets"]}
    assert len(asked) == read_profile("p", GPUS).gpus
    assert asked <= set(ports_of("p", "metrics_port", GPUS["metrics_port"]))


def test_jobs_have_a_folder_for_each_user(monkeypatch: pytest.MonkeyPatch) -> None:
    import dask

    [settings] = [block for block in BLOCKS if "tilewright" in block]
    monkeypatch.setenv("USER", "ann")
    with dask.config.set(settings):
        assert config.path_of("jobs-folder") == "/scratch/ann/tilewright-jobs"


@pytest.mark.more
def test_the_workers_of_a_job_are_written_down_for_prometheus(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="Dask's workers have no metrics without it")
    script = re.search(r"```bash\n(tilewright top 4711 .*?)```", PAGE, re.S)
    assert script is not None
    a = put(tmp_path / "a.zarr", np.ones((64, 64)))
    options = {"worker_class": NodeNanny, "metrics_at": ("127.0.0.1", "21000:21999")}
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0", **options) as own,
        Client(own) as client,
    ):
        tw.matmul(a, a, cluster=client, device="cpu")
        profiles = {"profiles": {"job": {"kind": "existing", "address": own.scheduler_address}}}
        (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(profiles))
        text = script[1].replace("/shared/prometheus", str(tmp_path))
        ours = f"{sys.executable} -c 'from tilewright.workflows.cli import main; main()'"
        text = text.replace("tilewright top 4711 ", f"{ours} top {tmp_path} --interval 1 ")
        text = text.replace("| python", f"| {sys.executable}")
        paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(["sh", "-c", text], check=True, timeout=120, env=os.environ | paths)
        [told] = json.loads((tmp_path / "tilewright-4711.json").read_text())
        assert told["labels"] == {"slurm_job": "4711"}
        ports = {info["services"]["dashboard"] for info in client.scheduler_info()["workers"].values()}
        assert {f"127.0.0.1:{port}" for port in ports} == set(told["targets"])
        assert all(21000 <= port < 22000 for port in ports)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("row", "options"),
    [
        ("64 files of a chunk each", {}),
        ("the same with `--durability none`", {"durability": "none"}),
        ("4 shards of 16 chunks", {"shards": 256}),
    ],
)
def test_files_are_forced_to_disk_as_often_as_the_page_says(
    row: str, options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests leave out fsync itself, which is counted here: batches differ from run to run, by what is ready."""
    counted = []
    monkeypatch.setattr(os, "fsync", counted.append)
    a = tmp_path / "a.zarr"
    zarr.create_array(a, data=np.ones((512, 512)), chunks=(64, 64), compressors=None)
    run = tw.matmul(a, a, tmp_path / "c.zarr", device="cpu", device_memory="1MiB", chunks=64, **options)  # type: ignore[call-overload]
    assert run.plan.tile_count == 4
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {row} |"))
    forced = int(line.split("|")[4])
    assert forced / 2 <= len(counted) <= 2 * forced
