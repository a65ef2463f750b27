"""The benchmark of reading and writing checks what every contestant moved, and times like with like."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tilewright.kernels.errors import DeviceUnavailableError, DTypeError, OptionError
from tilewright.kernels.gpu.device_choice import cuda_available
from tilewright.pipeline.store.region_read import RegionRead, region_reads
from tilewright.pipeline.store.region_write import RegionWrite, region_writes
from tilewright.pipeline.worker.units import HostUnit
from tilewright.workflows.bench import common, io
from tilewright.workflows.bench.common import Contestant, WrongAnswer, measure
from tilewright.workflows.bench.io import run_io
from tilewright.workflows.cli import cli


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "LEAST_SAMPLE_SECONDS", 1e-4)


@pytest.mark.more
@pytest.mark.parametrize(
    ("dtype", "threads"),
    [
        ("float32", (3,)),
        pytest.param("float32", (1, 3), marks=pytest.mark.slow),
        pytest.param("int8", (3,), marks=pytest.mark.slow),
        pytest.param("complex128", (1,), marks=pytest.mark.slow),
    ],
)
def test_every_case_has_ours_and_zarr_python(tmp_path: Path, dtype: str, threads: tuple[int, ...]) -> None:
    # 90 is neither a multiple of the chunk nor of the shard: edges are moved too.
    nbytes = 90 * 90 * np.dtype(dtype).itemsize
    report = run_io(nbytes, tmp_path, chunk=20, dtype=dtype, threads=threads, device="cpu", seconds=0.001)
    assert "90×90" in report.title
    cases = {row.case for row in report.rows}
    assert len(cases) == (3 * (2 + 1) + 1) * len(threads)  # a layout's: read warm and cold, written; decoded
    for count in threads:
        words = f"{count} thread{'s' * (count > 1)}"
        assert {f"read plain, cold, {words}", f"write shards, {words}", f"decode zstd, {words}"} <= cases
    for case in cases:
        rows = {row.contestant: row for row in report.rows if row.case == case}
        assert rows["zarr-python"].peer
        assert not rows["tilewright"].peer
        assert all(row.work == nbytes and row.seconds > 0 for row in rows.values())
        peers = [row for row in rows.values() if row.peer]
        assert max(report.ratio(row) or 0 for row in peers) == 1
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
    words = "bench io --device cpu --nbytes 16KiB --chunk 16 --layout plain --cache warm --threads 2 --json"
    words += " --seconds 0.01"
    result = CliRunner().invoke(cli, [*words.split(), "--folder", str(tmp_path), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {row["case"] for row in found["rows"]} == {"read plain, warm, 2 threads", "write plain, 2 threads"}
    assert {row["contestant"] for row in found["rows"]} >= {"zarr-python", "tilewright"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["io.png"]


def test_decoding_is_measured_without_files(tmp_path: Path) -> None:
    report = run_io(
        90 * 90 * 4, tmp_path, chunk=20, threads=(2,), layouts=("zstd",), directions=("decode",), seconds=0.01
    )
    found = [row.contestant for row in report.rows]
    assert [name for name in found if not name.startswith("zarrs")] == [
        "zarr-python",
        "numcodecs, into given buffers",
        "tilewright",
    ]
    assert [row.peer for row in report.rows] == [True] * (len(found) - 1) + [False]


def test_chunks_one_after_another_make_up_the_matrix() -> None:
    matrix = np.arange(5 * 7, dtype=np.int16).reshape(5, 7)
    grid = io._Grid((5, 7), (2, 3), matrix.dtype)
    padded = np.full((6, 9), -1, np.int16)
    padded[:5, :7] = matrix
    chunks = [padded[i : i + 2, j : j + 3].tobytes() for i in (0, 2, 4) for j in (0, 3, 6)]
    assert len(grid) == len(chunks) == 9
    assert grid.buffer(np.empty).shape == (9, grid.chunk_nbytes)
    np.testing.assert_array_equal(grid.matrix(np.frombuffer(b"".join(chunks), np.uint8)), matrix)


class PretendedArray(np.ndarray):
    """Host memory with the methods that a device array is asked for."""

    def copy_to_device(self, source: np.ndarray) -> None:
        self[...] = source

    def copy_to_host(self) -> np.ndarray:
        return np.array(self)


class PretendedKvikIO:
    """KvikIO as it is called: its defaults set up a pool of threads, and files are read when they are asked for."""

    class CompatMode:
        ON = "on"

    def __init__(self, *, spoil: bool = False) -> None:
        self.spoil = spoil
        self.settings: list[dict[str, Any]] = []
        self.opened = self.closed = 0
        self.tasks: set[int | None] = set()
        self.defaults = self

    def set(self, settings: dict[str, Any]) -> Any:
        self.settings.append(settings)
        return contextlib.nullcontext()

    def CuFile(self, path: Path, flags: str) -> Any:
        kvikio = self

        class File:
            def __enter__(self) -> Any:
                kvikio.opened += 1
                return self

            def __exit__(self, *error: object) -> None:
                kvikio.closed += 1

            def pread(self, place: np.ndarray, *, task_size: int | None) -> Any:
                kvikio.tasks.add(task_size)

                class Pending:
                    def get(self) -> int:
                        assert kvikio.closed < kvikio.opened, "the file was closed before it was read"
                        place[...] = np.frombuffer(path.read_bytes(), np.uint8)
                        place[-1] += kvikio.spoil
                        return int(place.size)

                return Pending()

        assert flags == "r"
        return File()


DECODED = [
    "tilewright",
    "tilewright, decoded on the GPU alone",
    "tilewright, decoded on the GPU too",
    "tilewright, decoded by nvCOMP alone",
    "tilewright, decoded by nvCOMP too",
]


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedKvikIO:
    """A GPU's part played by the host: what is left is who is asked, with what, and what is compared."""
    kvikio = PretendedKvikIO()
    monkeypatch.setattr(io, "resolve_device", lambda device: "cpu" if device == "cpu" else "cuda")
    monkeypatch.setattr(io, "machine", lambda on_gpu: {"gpu": str(on_gpu)})
    monkeypatch.setattr(io, "CudaUnit", lambda product, pace: HostUnit(product))
    monkeypatch.setattr(io, "no_nvcomp", lambda: "")
    monkeypatch.setattr(io, "_on_gpu", lambda size, dtype: np.empty(size, dtype).view(PretendedArray))
    monkeypatch.setattr(io, "_pinned", np.empty_like)
    monkeypatch.setattr(io, "_synchronize", lambda: None)
    real = io.library
    monkeypatch.setattr(io, "library", lambda name: kvikio if name.startswith("kvikio") else real(name))
    return kvikio


@pytest.mark.slow
def test_reads_to_a_gpu_stand_beside_kvikio(pretended_gpu: PretendedKvikIO, tmp_path: Path) -> None:
    report = run_io(90 * 90 * 4, tmp_path, chunk=20, directions=("device",), seconds=0.001)
    cases = {row.case: [] for row in report.rows}
    for row in report.rows:
        cases[row.case].append((row.contestant, row.peer))
    assert set(cases) == {
        f"device {layout}, {cache}, {threads} threads"
        for layout in ("plain", "zstd")
        for cache in ("warm", "cold")
        for threads in (8, 16)
    }, "shards are decoded as chunks are"
    for case, found in cases.items():
        ours = ["tilewright"] if "plain" in case else DECODED
        assert [name for name, peer in found if not peer] == ours
        assert ("zarr-python, then copied", True) in found
        first = "kvikio (compatibility mode)" if "plain" in case else "zarr-python, then copied"
        assert found[0] == (first, True)
        tasks = [name for name, _ in found if "tasks of" in name]
        assert len(tasks) == (2 if "plain" in case else 0), "KvikIO's default is one of three settings"
    assert [found["num_threads"] for found in pretended_gpu.settings] == [8, 16, 8, 16]
    assert {found["compat_mode"] for found in pretended_gpu.settings} == {"on"}
    assert pretended_gpu.tasks == {None, 1 << 20, 16 << 20}
    assert pretended_gpu.opened == pretended_gpu.closed > 0
    assert report.machine == {"gpu": "True"}
    assert not list(tmp_path.iterdir())


def test_a_gpu_is_measured_where_there_is_one(pretended_gpu: PretendedKvikIO, tmp_path: Path) -> None:
    options: dict[str, Any] = {"chunk": 20, "layouts": ("plain",), "threads": (2,), "seconds": 0.001}
    for device, expected in (("auto", True), ("cpu", False)):
        report = run_io(60 * 60 * 4, tmp_path, device=device, caches=("warm",), **options)
        assert any(row.case.startswith("device") for row in report.rows) == expected


def test_who_decodes_is_said_where_nvcomp_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing, expected in (("", DECODED), ("it is not installed", DECODED[:3])):
        monkeypatch.setattr(io, "no_nvcomp", partial(str, missing))
        assert [name for name, _, _ in io._decoding_ways("lz4")] == expected
        assert [name for name, _, _ in io._decoding_ways("plain")] == DECODED[:1]


@pytest.mark.parametrize("values", io.VALUES)
def test_values_are_what_they_are_called(tmp_path: Path, values: str) -> None:
    options: dict[str, Any] = {"chunk": 20, "threads": (1,), "layouts": ("plain",), "directions": ("write",)}
    report = run_io(30 * 30 * 4, tmp_path, values=values, seconds=0.001, **options)
    assert values in report.title
    if values == "normal":
        with pytest.raises(OptionError, match=r"--values normal .*--dtype int64 .*say float32"):
            run_io(30 * 30 * 8, tmp_path, values=values, dtype="int64", **options)


def test_one_wrong_byte_on_a_gpu_is_noticed(pretended_gpu: PretendedKvikIO, tmp_path: Path) -> None:
    pretended_gpu.spoil = True
    with pytest.raises(WrongAnswer, match=r"device plain, warm, 2 threads: kvikio .*element \(19, 19\)"):
        run_io(60 * 60 * 4, tmp_path, chunk=20, directions=("device",), threads=(2,))


@pytest.mark.skipif(cuda_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailableError):
        run_io(1000, tmp_path, directions=("device",))


def test_cases_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="nothing is left to measure: decode of plain"):
        run_io(1000, tmp_path, directions=("decode",), layouts=("plain",), device="cpu")
    with pytest.raises(OptionError, match="leave one of them away"):
        run_io(1000, tmp_path, directions=("device",), device="cpu")


@pytest.mark.parametrize("dtype", ["bool", "S3", "float33"])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(DTypeError, match=f"--dtype {dtype}"):
        run_io(1000, tmp_path, dtype=dtype)


def test_a_wrong_size_is_refused() -> None:
    result = CliRunner().invoke(io.command, ["--nbytes", "much"])
    assert result.exit_code == 2
    assert "'--nbytes': 'much' is no size" in result.stderr
