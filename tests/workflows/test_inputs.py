"""Functions and commands of every kind take arrays as users have them, and go on with a stopped run of any of them."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array
import h5py
import numpy as np
import pytest
import xarray
import zarr
from click.testing import CliRunner
from distributed import Client

import tilewright as tw
from tests.workflows.products import SIX_TILES, assert_product, put, stop_at
from tilewright.pipeline.events import Event, UnitDone
from tilewright.workflows.cli import cli

FINISHED = 4
"""Tiles of a stopped run, of six."""


def as_npy(folder: Path, a: np.ndarray) -> Any:
    np.save(folder / "a.npy", a)
    return folder / "a.npy"


def as_hdf5(folder: Path, a: np.ndarray) -> Any:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("a", data=a, chunks=(16, 20), compression="gzip", shuffle=True)
    return f"{folder / 'a.h5'}::/a"


def as_xarray(folder: Path, a: np.ndarray) -> Any:
    xarray.Dataset({"a": (("t", "x"), a)}).to_zarr(folder / "x.zarr", mode="w", zarr_format=2)
    return xarray.open_zarr(folder / "x.zarr", chunks=None)["a"]


KINDS: dict[str, Callable[[Path, np.ndarray], Any]] = {
    "numpy": lambda folder, a: a,
    "npy": as_npy,
    "memmap": lambda folder, a: np.load(as_npy(folder, a), mmap_mode="r"),
    "hdf5": as_hdf5,
    "xarray": as_xarray,
    "DataArray": lambda folder, a: xarray.DataArray(a, dims=("t", "x")),
    "dask": lambda folder, a: dask.array.from_array(a, chunks=(30, 50)),
    "slice": lambda folder, a: tw.slice(np.pad(a, 3), rows=(3, -3), columns="3:-3"),
}


def options_with(client: Client) -> dict[str, Any]:
    return {"cluster": client, "device": "cpu"}


def computed(events: list[Event]) -> int:
    return sum(isinstance(event, UnitDone) and event.name == "matmul" for event in events)


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("small_chunks")
def test_a_stopped_run_goes_on_unless_a_number_has_changed(
    kind: str,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    events: list[Event],
) -> None:
    a, b, _, b_path = factors
    options = options_with(client) | {"device_memory": SIX_TILES, "verify": False}
    stop_at(FINISHED, KINDS[kind](tmp_path, a), b_path, tmp_path / "c.zarr", **options)
    stop_at(FINISHED, KINDS[kind](tmp_path, a), b_path, tmp_path / "other.zarr", **options)
    for file in [path for path in tmp_path.rglob("*") if path.is_file() and ".partial" not in str(path)]:
        os.utime(file)
    again = KINDS[kind](tmp_path, a.copy())
    run = tw.matmul(again, b_path, tmp_path / "c.zarr", listener=events.append, **options)
    assert run.resumed == FINISHED
    assert computed(events) == run.plan.tile_count - FINISHED
    assert_product(zarr.open_array(tmp_path / "c.zarr")[...], a, b)
    changed = a.copy()
    changed[0, 0] += 1
    other = tw.matmul(KINDS[kind](tmp_path, changed), b_path, tmp_path / "other.zarr", **options)
    assert other.resumed < FINISHED
    assert_product(zarr.open_array(tmp_path / "other.zarr")[...], changed, b)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["hdf5", "numpy", "dask", "slice"])
def test_every_function(kind: str, client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    a = rng.standard_normal((40, 30))
    options = options_with(client)
    x = KINDS[kind](tmp_path, a)
    for name, expected in {"gram": a.T @ a, "cov": np.cov(a.T), "corr": np.corrcoef(a.T)}.items():
        getattr(tw, name)(x, tmp_path / name, **options)
        np.testing.assert_allclose(zarr.open_array(tmp_path / name)[...], expected, rtol=1e-10, atol=1e-10)
    c = put(tmp_path / "c.zarr", a @ a.T)
    assert tw.verify(x, x, c, transpose_b=True, cluster=client).passed
    assert tw.audit(c, a=x, b=a.T, cluster=client).passed
    assert tw.plan_matmul(x, x, transpose_b=True).tile_count == 1
    run = tw.eofs(x, tmp_path / "eofs.zarr", k=2, **options)
    assert run is not None
    values = tw.eigh(a.T @ a, k=1, **options).values
    np.testing.assert_allclose(values, np.linalg.eigvalsh(a.T @ a)[-1:], rtol=1e-6)
    run = tw.matmul(x, x, tmp_path / "damaged.zarr", transpose_b=True, **options)
    assert run.plan.symmetric
    chunk = next(path for path in (tmp_path / "damaged.zarr" / "c").rglob("*") if path.is_file())
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    assert not tw.audit(tmp_path / "damaged.zarr").passed
    assert tw.repair(x, x, tmp_path / "damaged.zarr", **options).passed


def test_vectors(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    x, y = rng.integers(0, 9, 1000), rng.integers(0, 9, 1000)
    np.save(tmp_path / "y.npy", y)
    assert tw.dot(x, tmp_path / "y.npy", **options_with(client)) == x @ y
    assert tw.dot(dask.array.from_array(x, 300), xarray.DataArray(y), **options_with(client)) == x @ y


def test_two_arrays_of_one_file(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    """At the same places of the file's grid lie other numbers of each."""
    a, b = rng.standard_normal((2, 50, 50))
    with h5py.File(tmp_path / "ab.h5", "w") as file:
        file.create_dataset("a", data=a)
        file.create_dataset("b", data=b)
    tw.matmul(f"{tmp_path}/ab.h5::/a", f"{tmp_path}/ab.h5::/b", tmp_path / "c.zarr", **options_with(client))
    assert_product(zarr.open_array(tmp_path / "c.zarr")[...], a, b)


def test_rows_and_columns_of_commands(tmp_path: Path, rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((20, 12)), rng.standard_normal((15, 20))
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", b)
    paths = [str(tmp_path / name) for name in ("a.npy", "b.npy", "c.zarr", "g.zarr")]

    def call(*words: str, code: int = 0) -> str:
        result = CliRunner().invoke(cli, [*words, "--device", "cpu"])
        assert result.exit_code == code, result.stderr
        return result.stderr

    part = ["--rows", "2:7", "--columns=-4:"]
    call("matmul", *paths[:3], "--transpose-a", "--transpose-b", *part)
    np.testing.assert_allclose(zarr.open_array(paths[2])[...], (a.T @ b.T)[2:7, -4:], rtol=1e-12)
    call("gram", paths[0], paths[3], *part)
    np.testing.assert_allclose(zarr.open_array(paths[3])[...], a[2:7, -4:].T @ a[2:7, -4:], rtol=1e-12)
    assert "is no range; give it as '1000:2000'" in call("gram", *paths[:2], "--rows", "2-7", code=2)
    assert "rows 2:70 are not among the 20 rows" in call("gram", paths[0], "x", "--rows", "2:70", code=1)


def test_what_goes_with_no_slice(tmp_path: Path) -> None:
    x = np.ones((4, 4))
    with pytest.raises(tw.OptionError, match=r"append=True beside some rows or columns of X"):
        tw.gram(tw.slice(x, rows=":2"), tmp_path / "g.zarr", append=True)
    with pytest.raises(tw.StoreError, match=r"output: found .*ndarray; it must be a path"):
        tw.matmul(x, x, np.empty((4, 4)))  # type: ignore[arg-type]
    with pytest.raises(tw.StoreError, match=r"X: found a slice of .*; give the whole array"):
        tw.dot(tw.slice(x), x[0])


def test_results_in_memory(
    client: Client, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = rng.standard_normal((40, 30))
    options = options_with(client)
    np.testing.assert_allclose(tw.matmul(a, a, transpose_b=True, **options), a @ a.T, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(tw.gram(a, **options), a.T @ a, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(tw.cov(a, a[:, :3], **options), np.cov(a.T)[:, :3], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(tw.corr(as_npy(tmp_path, a), **options), np.corrcoef(a.T), rtol=1e-10)
    monkeypatch.setattr("tilewright.pipeline.in_memory.SHARED_MEMORY", tmp_path / "none")
    assert (tw.matmul(a > 0, (a > 0).T, **options) == (a > 0).astype(int) @ (a > 0).T).all()
    monkeypatch.setattr("tilewright.pipeline.in_memory.free_nbytes", lambda: 1000)
    with pytest.raises(
        tw.OutputError, match=r"output: C, 40 × 40 of float64, has 12\.5 KiB .* give out, the path"
    ):
        tw.matmul(a, a.T, **options)


@pytest.mark.sample(1)
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_xarray_opens_a_product_in_its_group(
    zarr_format: Any, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """With names and coordinates of its sides, of a slice those of that, and with what it says of itself."""
    a = rng.integers(-3, 4, (20, 12)).astype("f4")
    given = xarray.Dataset(
        {"a": (("time", "place"), a)},
        {"time": ("time", np.arange(20) * 2, {"units": "days since 2000-01-01"}), "place": np.arange(12.0)},
    )
    path = tmp_path / "data.zarr"
    with warnings.catch_warnings(
        action="ignore"
    ):  # that no specification of format 3 knows consolidated metadata
        given.to_zarr(path, zarr_format=zarr_format, consolidated=True)
    options = options_with(client)
    tw.gram(path / "a", path / "sums", **options)
    part = tw.slice(path / "a", rows=(2, 7))
    tw.matmul(part, path / "a", path / "part", transpose_b=True, **options)
    with xarray.open_zarr(path, chunks=None, consolidated=True, decode_times=False) as found:
        np.testing.assert_array_equal(found["sums"].values, a.T @ a)
        assert found["sums"].dims == ("place", "place_2")
        np.testing.assert_array_equal(found["place_2"].values, np.arange(12.0))
        assert found["part"].dims == ("time_2_7", "time")
        np.testing.assert_array_equal(found["time_2_7"].values, np.arange(2, 7) * 2)
        said = found["sums"].attrs
    assert zarr.open_array(path / "time_2_7", mode="r").attrs["units"] == "days since 2000-01-01"
    assert said["tilewright"]["inputs"] == {"A": str(path / "a"), "B": str(path / "a")}
    assert said["tilewright"]["operation"] == "Aᵀ B"
    checked = said["tilewright"]["verification"]
    assert checked["rounds"] == 2
    assert checked["largest_error"] <= checked["tolerance"]
    assert re.match(
        r"\d{4}-\d\d-\d\dT.*Z tilewright \d.*Aᵀ B of A = .*; verified in 2 rounds", said["history"]
    )


@pytest.mark.more
@pytest.mark.usefixtures("small_chunks")
def test_a_stopped_run_goes_on_in_a_group_of_format_2(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path
) -> None:
    a, b, a_path, b_path = factors
    out = tmp_path / "group" / "c"
    zarr.create_group(tmp_path / "group", zarr_format=2)
    options = options_with(client) | {"device_memory": SIX_TILES}
    stop_at(FINISHED, a_path, b_path, out, **options)
    run = tw.matmul(a_path, b_path, out, **options)
    assert run.resumed == FINISHED
    found = zarr.open_array(out, mode="r")
    assert found.metadata.zarr_format == 2
    assert_product(found[...], a, b)
    tw.matmul(a_path, b_path, out, overwrite=True, **options)
    assert tw.audit(out).passed
    banded = tmp_path / "group" / "band"
    tw.gram(a_path, banded, window=2, **options)
    reach = np.abs(np.subtract.outer(np.arange(80), np.arange(80))) <= 2
    np.testing.assert_allclose(
        zarr.open_array(banded)[...], np.where(reach, a.T @ a, 0), rtol=1e-4, atol=1e-3
    )
    assert tw.audit(banded).passed


def test_what_is_no_array_is_refused_with_what_to_give(tmp_path: Path) -> None:
    numbers = np.ones((3, 3))
    data = xarray.Dataset({"t2m": (("time", "place"), numbers)})
    with pytest.raises(
        tw.StoreError, match=r"as of Zarr, NumPy, xarray, dask or h5py.*its arrays: dataset\['t2m'\]"
    ):
        tw.gram(data, tmp_path / "c")  # type: ignore[arg-type]
    group = zarr.create_group(zarr.storage.MemoryStore())
    group.create_array("time", data=np.arange(3))
    group.create_array("t2m", data=numbers)
    with pytest.raises(tw.StoreError, match=r"its arrays: group\['t2m'\], group\['time'\]\)"):
        tw.gram(group)  # type: ignore[call-overload]
    with pytest.raises(
        tw.ShapeError, match=r"\(3,\); it must .*one row, \(1, 3\), by x\.reshape\(1, -1\) .*\(-1, 1\)"
    ):
        tw.topk(numbers[0], numbers, k=1)
    with pytest.raises(tw.ShapeError, match=r"\(3, 3, 1\).*\. Axis 2 has one place alone, .*\(\[:,:,0\]\)"):
        tw.gram(numbers[:, :, np.newaxis].repeat(4, 0).repeat(3, 1)[:3, :3])
    with pytest.raises(
        tw.ShapeError, match=r"\(3, 3, 1\); it must have 2 dimensions: give a range, or one place"
    ):
        tw.topk(numbers[:, :, np.newaxis], k=1)
    with pytest.raises(tw.ShapeError, match=r"numpy array of shape \(\) .*must have 2 dimensions"):
        tw.matmul(np.array(1), numbers)
    with pytest.raises(tw.StoreError, match=r"found builtins\.list.*numpy\.asarray"):
        tw.matmul(numbers.tolist(), numbers)  # type: ignore[call-overload]
    with pytest.raises(tw.StoreError, match=r"output: found numpy\.ndarray.*returned as an array of NumPy"):
        tw.matmul(numbers, numbers, numbers)  # type: ignore[call-overload]
    assert not list(tmp_path.iterdir())
