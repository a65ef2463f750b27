"""How C is stored: every piece once, by one writer, with its names, and swept of what runs left behind."""

from __future__ import annotations

import builtins
import errno
import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster
from numcodecs import Delta, Zstd

import tilewright as tw
from tests.workflows.products import (
    TIGHT,
    assert_product,
    intercept_writes,
    numbers,
    put,
    stop_at,
)
from tilewright.pipeline.errors import (
    OutputExistsError,
    PlanError,
)
from tilewright.pipeline.events import Event, Notice, UnitDone, WorkPlanned
from tilewright.pipeline.product import findings, ledger
from tilewright.pipeline.product import output as outputs


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("given", "options"),
    [
        (False, {"compressors": None}),
        (False, {"compressors": zarr.codecs.ZstdCodec()}),
        (True, {"compressors": None}),
        (True, {"shards": (32, 32)}),
        (True, {"shards": (32, 32), "compressors": None}),
        (True, {"zarr_format": 2, "compressors": Zstd(), "order": "F"}),
        (True, {"zarr_format": 2, "compressors": Zstd(), "filters": [Delta(dtype="f4")]}),
    ],
    ids=["plain", "compressed", "given", "sharded", "plain shards", "by columns", "filtered"],
)
def test_every_stored_piece_is_written_once(
    given: bool,
    options: dict[str, Any],
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted as files that get the name of a stored piece, whoever writes them, and as files opened to be written."""
    a, b, a_path, b_path = factors
    out, a_path = tmp_path / "c", put(tmp_path / "coded", a, **{} if given else options)
    target = zarr.create_array(out, shape=(96, 64), chunks=(16, 16), dtype="f4", **options) if given else out
    named: list[Path] = []
    opened: list[Path] = []
    replace_file, open_file = os.replace, io.open

    def naming(source: Any, name: Any, **how: Any) -> None:
        replace_file(source, name, **how)
        named.append(Path(name))

    def opening(file: Any, mode: str = "r", *how: Any, **more: Any) -> Any:
        if isinstance(file, str | os.PathLike) and set(mode) & set("wax+"):
            opened.append(Path(file))
        return open_file(file, mode, *how, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", naming)
        patch.setattr(io, "open", opening)  # pathlib's
        patch.setattr(builtins, "open", opening)
        run = tw.matmul(a_path, b_path, target, cluster=without_dask, device="cpu", device_memory=24_000)
    assert run.plan.tile_count > 1
    unit = run.plan.c_unit
    assert unit == ((32, 32) if "shards" in options else (16, 16))
    growing = out if given else outputs.partial_path(out)
    stored = {path.relative_to(out) for path in out.rglob("*") if path.is_file() and path.name[0].isdigit()}
    assert len(stored) == (96 // unit[0]) * (64 // unit[1])
    kept = {growing / path for path in stored}
    assert sorted(path for path in named if path in kept) == sorted(kept)
    drafts = [path for path in opened if path.is_relative_to(growing) and path.name[0].isdigit()]
    assert len(drafts) == len(set(drafts)) == len(kept)
    assert not set(drafts) & kept
    assert_product(zarr.open_array(out)[...], a, b)


def test_each_shard_of_an_open_array_has_one_writer_that_writes_it_whole(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that write chunks of one shard each write all of it, and the later puts back what the earlier replaced."""
    a, b, a_path, b_path = factors
    out = zarr.create_array(
        tmp_path / "given.zarr", shape=(96, 64), chunks=(8, 8), shards=(16, 24), dtype="f4", fill_value=99
    )
    written: list[tuple[int, int, tuple[int, ...]]] = []

    def noting(top: int, left: int, data: np.ndarray) -> np.ndarray:
        written.append((top, left, data.shape))
        return data

    intercept_writes(monkeypatch, noting)
    with (
        LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as own,
    ):
        run = tw.matmul(a_path, b_path, out, cluster=own, device="cpu", device_memory=TIGHT)
    shards = [(top, left, (16, min(24, 64 - left))) for top in range(0, 96, 16) for left in range(0, 64, 24)]
    assert sorted(written) == shards
    assert run.plan.c_unit == (16, 24)
    assert 3 < run.plan.tile_count <= len(shards)
    assert all(tile.row_start % 16 == 0 and tile.column_start % 24 == 0 for tile in run.plan.tiles())
    assert_product(out[...], a, b)


def test_c_gets_the_names_of_dimensions_and_keeps_them_when_a_run_goes_on(
    without_dask: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    """Without them xarray opens no group that C is in."""
    group = zarr.create_group(tmp_path / "g.zarr")
    old = zarr.create_group(tmp_path / "old.zarr", zarr_format=2)
    a, b, out = tmp_path / "g.zarr" / "a", tmp_path / "old.zarr" / "b", tmp_path / "g.zarr" / "c"
    options: dict[str, Any] = {"shape": (64, 64), "chunks": (16, 16), "dtype": "f4"}
    group.create_array("a", dimension_names=("x", "y"), **options)[...] = numbers(rng, (64, 64), "f4")
    old.create_array("b", attributes={"_ARRAY_DIMENSIONS": ["z", "y"]}, **options)[...] = 1
    more: dict[str, Any] = {
        "cluster": without_dask,
        "device": "cpu",
        "device_memory": TIGHT,
        "transpose_b": True,
    }
    stop_at(3, a, b, out, **more)
    assert tw.matmul(a, b, out, **more).resumed == 3
    for name, array in group.arrays():
        assert array.metadata.dimension_names == {"a": ("x", "y"), "c": ("x", "z")}[name]
    tw.matmul(a, a, out, overwrite=True, **more)
    assert zarr.open_array(out).metadata.dimension_names == ("x", "x_2")


def test_a_disk_without_room_for_c_is_told_of_before_the_first_tile(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_chunks: None,
    events: list[Event],
) -> None:
    """Of a run that goes on, what is left to write counts."""
    _, _, a, b = factors
    out = tmp_path / "c.zarr"
    more: dict[str, Any] = {"cluster": without_dask, "device": "cpu", "device_memory": TIGHT, "verify": False}
    free = 96 * 64 * 4  # bytes, which all of C just fits into
    monkeypatch.setattr(findings.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))

    def told() -> list[tuple[int, str]]:
        return [
            (place, event.message)
            for place, event in enumerate(events)
            if isinstance(event, Notice) and "are free" in event.message
        ]

    tw.matmul(a, b, out, listener=events.append, **more)
    assert not told()
    events.clear()
    free -= 1
    tw.matmul(a, b, out, overwrite=True, listener=events.append, **more)
    ((place, message),) = told()
    assert place < next(i for i, event in enumerate(events) if isinstance(event, WorkPlanned))
    assert f"24 KiB are free on the disk of {out}.partial, and C takes 24 KiB more" in message
    stop_at(3, a, b, out, overwrite=True, **more)
    events.clear()
    assert tw.matmul(a, b, out, overwrite=True, listener=events.append, **more).resumed == 3
    assert not told()


def test_an_output_in_a_group_of_format_2_has_that_format(without_dask: Client, tmp_path: Path) -> None:
    a = put(tmp_path / "a", np.ones((3, 3)))
    group = zarr.create_group(tmp_path / "g", zarr_format=2)
    tw.matmul(a, a, tmp_path / "g" / "c", cluster=without_dask, device="cpu")
    c = group["c"]
    assert isinstance(c, zarr.Array)
    assert c.metadata.zarr_format == 2
    np.testing.assert_array_equal(c[...], np.full((3, 3), 3.0))


def test_what_appears_at_the_output_meanwhile_is_not_replaced(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], without_dask: Client, tmp_path: Path
) -> None:
    _, _, a_path, b_path = factors

    def appear(event: Event) -> None:
        if isinstance(event, UnitDone) and not (tmp_path / "c").exists():
            put(tmp_path / "c", np.zeros((3, 3)))

    with pytest.raises(OutputExistsError, match="exists"):
        tw.matmul(a_path, b_path, tmp_path / "c", cluster=without_dask, device="cpu", listener=appear)
    assert zarr.open_array(tmp_path / "c").shape == (3, 3)
    run = tw.matmul(a_path, b_path, tmp_path / "c", cluster=without_dask, device="cpu", overwrite=True)
    assert run.resumed == run.plan.tile_count, "the work was not lost"
    assert (run.operations, run.write_nbytes) == (0, 0)
    assert "op/s" not in str(run)


def test_an_old_product_that_cannot_be_removed_is_a_notice(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    events: list[Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b, a_path, b_path = factors
    out = put(tmp_path / "c", np.zeros((3, 3)))

    def busy(folder: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(outputs.shutil, "rmtree", busy)
    tw.matmul(
        a_path, b_path, out, cluster=without_dask, device="cpu", overwrite=True, listener=events.append
    )  # fmt: skip
    assert_product(zarr.open_array(out)[...], a, b)
    assert not list(out.rglob(ledger.FILE_NAME))
    assert any(isinstance(event, Notice) and "is left at" in event.message for event in events)


def test_what_a_run_killed_after_its_rename_leaves_in_c_does_no_harm(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b, a_path, b_path = factors
    out, unlink = tmp_path / "c.zarr", Path.unlink

    def killed(path: Path, missing_ok: bool = False) -> None:
        if path.parent == out:
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            tw.matmul(a_path, b_path, out, cluster=without_dask, device="cpu")
    assert {outputs.MARK_NAME, ledger.FILE_NAME} < set(os.listdir(out))
    assert not outputs.partial_path(out).exists()
    assert_product(zarr.open_array(out)[...], a, b)
    assert tw.verify(a_path, b_path, out, cluster=without_dask).passed
    gram = tw.matmul(out, out, tmp_path / "d.zarr", transpose_a=True, cluster=without_dask, device="cpu")
    assert gram.verification is not None
    assert gram.verification.passed
    with pytest.raises(OutputExistsError, match="exists"):
        tw.matmul(a_path, b_path, out, cluster=without_dask, device="cpu")
    tw.matmul(a_path, b_path, out, cluster=without_dask, device="cpu", overwrite=True)
    assert sorted(os.listdir(out)) == ["c", outputs.CHECKSUMS_NAME, "zarr.json"]


def test_halves_of_chunks_of_a_killed_run_are_swept(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
) -> None:
    _, _, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    stop_at(3, a_path, b_path, out, cluster=without_dask, device="cpu", device_memory=TIGHT)
    (outputs.partial_path(out) / "c" / f"0.{'0' * 32}.partial").write_text("half")
    assert (
        tw.matmul(a_path, b_path, out, cluster=without_dask, device="cpu", device_memory=TIGHT).resumed == 3
    )
    assert not list(out.rglob("*.partial"))


def test_halves_of_chunks_of_a_killed_worker_are_swept(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
) -> None:
    _, _, a_path, b_path = factors
    out = tmp_path / "c.zarr"

    def killed(event: Event) -> None:
        if isinstance(event, UnitDone) and event.name == "matmul":
            (outputs.partial_path(out) / "c" / f"0.{event.index:032x}.partial").write_text("half")

    tw.matmul(a_path, b_path, out, cluster=without_dask, device="cpu", device_memory=TIGHT, listener=killed)
    assert not list(out.rglob("*.partial"))


@pytest.mark.parametrize(
    ("sides", "memory", "dtype"),
    [
        ((240, 40, 120), "24KiB", "f4"),
        *(
            pytest.param((700, 90, 500), memory, dtype, marks=pytest.mark.slow)
            for memory, dtype in (("40KiB", "f4"), ("100KiB", "f4"), ("100KiB", "i8"), ("300KiB", "c16"))
        ),
    ],
)
def test_chunks_of_c_are_smaller_where_memory_holds_no_others(
    without_dask: Client,
    tmp_path: Path,
    rng: np.random.Generator,
    sides: tuple[int, int, int],
    dtype: str,
    memory: str,
) -> None:
    m, k, n = sides
    a, b = numbers(rng, (m, k), dtype), numbers(rng, (k, n), dtype)
    paths = put(tmp_path / "a", a, (m // 4, k // 2)), put(tmp_path / "b", b, (k // 2, n // 4))
    plan = tw.plan_matmul(*paths, device="cpu", device_memory=memory)
    assert plan.tile_count > 1
    assert plan.device_peak_nbytes <= plan.device_limit_nbytes
    run = tw.matmul(*paths, tmp_path / "c", cluster=without_dask, device="cpu", device_memory=memory)
    stored = zarr.open_array(tmp_path / "c")
    assert stored.chunks == run.plan.c_unit == plan.c_unit
    assert_product(stored[...], a, b)
    given = zarr.create_array(tmp_path / "given", shape=(m, n), chunks=(m, n), dtype=dtype)
    with pytest.raises(
        PlanError,
        match=r"store C in smaller chunks \(--chunks, and --shards where it has shards\): \d+ × \d+ and",
    ):
        tw.matmul(*paths, given, cluster=without_dask, device="cpu", device_memory=memory)
