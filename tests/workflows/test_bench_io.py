"""The benchmark of reading and writing checks what every contestant moved, and times like with like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tilewright.kernels.errors import DTypeError, OptionError
from tilewright.pipeline.store import RegionRead, RegionWrite, region_reads, region_writes
from tilewright.workflows.bench import common, io
from tilewright.workflows.bench.common import Contestant, WrongAnswer, measure
from tilewright.workflows.bench.io import run_io
from tilewright.workflows.cli import cli


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "LEAST_SAMPLE_SECONDS", 1e-4)


@pytest.mark.parametrize("dtype", ["float32", "int8", "complex128"])
def test_every_case_has_ours_and_zarr_python(tmp_path: Path, dtype: str) -> None:
    # 90 is neither a multiple of the chunk nor of the shard: edges are moved too.
    nbytes = 90 * 90 * np.dtype(dtype).itemsize
    report = run_io(nbytes, tmp_path, chunk=20, dtype=dtype, threads=(1, 3), seconds=0.01)
    assert "90×90" in report.title
    cases = {row.case for row in report.rows}
    assert len(cases) == 3 * (2 * 2 + 2)
    assert {"read plain, cold, 3 threads", "write shards, 1 thread"} <= cases
    for case in cases:
        rows = {row.contestant: row for row in report.rows if row.case == case}
        assert rows["zarr-python"].peer
        assert not rows["tilewright"].peer
        assert all(row.work == nbytes and row.seconds > 0 for row in rows.values())
        assert report.ratio(rows["zarr-python"]) == 1
    assert not list(tmp_path.iterdir())


def test_one_wrong_element_read_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(array: Any, region: Any) -> list[RegionRead]:
        return region_reads(array, region)[:-1]

    monkeypatch.setattr(io, "region_reads", wrong)
    with pytest.raises(WrongAnswer, match=r"read plain, warm, 1 thread: tilewright .*element \(40, 40\) is"):
        run_io(60 * 60 * 4, tmp_path, chunk=20, threads=(1,))


def test_one_chunk_not_written_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(array: Any, region: Any) -> list[RegionWrite]:
        return region_writes(array, region)[1:]

    monkeypatch.setattr(io, "region_writes", wrong)
    with pytest.raises(WrongAnswer, match=r"write zstd, 2 threads: tilewright .*\(0, 0\) is 0"):
        run_io(60 * 60 * 4, tmp_path, chunk=20, threads=(2,), directions=("write",), layouts=("zstd",))


def test_files_are_dropped_before_every_cold_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[Path] = []
    monkeypatch.setattr(io, "forget_pages", dropped.append)
    options: dict[str, Any] = {"chunk": 20, "threads": (1,), "layouts": ("plain",), "directions": ("read",)}
    run_io(60 * 60 * 4, tmp_path, caches=("warm",), seconds=0.001, **options)
    assert not dropped
    report = run_io(60 * 60 * 4, tmp_path, caches=("cold",), seconds=0.001, **options)
    assert len(dropped) == sum(row.samples + 2 for row in report.rows)


def test_preparation_comes_before_each_run_and_is_not_timed() -> None:
    order: list[str] = []
    contestant = Contestant(
        "c", lambda: order.append("run"), lambda: None, prepare=lambda: order.append("prepare")
    )
    (row,) = measure("case", 1.0, [contestant], on_gpu=False, rounds=4)
    assert order == ["prepare", "run"] * (row.samples + 2)


def test_forgetting_pages_leaves_files_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"x" * 10_000)
    common.forget_pages(tmp_path)
    assert (tmp_path / "a" / "b").read_bytes() == b"x" * 10_000


def test_the_command_prints_json_and_plots(tmp_path: Path) -> None:
    plot = tmp_path / "io.png"
    words = "bench io --nbytes 16KiB --chunk 16 --layout plain --cache warm --threads 2 --seconds 0.01 --json"
    result = CliRunner().invoke(cli, [*words.split(), "--folder", str(tmp_path), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {row["case"] for row in found["rows"]} == {"read plain, warm, 2 threads", "write plain, 2 threads"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["io.png"]


@pytest.mark.parametrize("dtype", ["bool", "S3", "float33"])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(DTypeError, match=f"--dtype {dtype}"):
        run_io(1000, tmp_path, dtype=dtype)


def test_a_wrong_size_is_refused() -> None:
    with pytest.raises(OptionError, match="--nbytes: 'much' is no size"):
        io.command.callback("much", None, None, False)  # type: ignore[misc]
