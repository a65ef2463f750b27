"""Fields whose missing numbers a mask names: results as where a number stands for them, or where they are left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.array
import h5py
import numpy as np
import pandas as pd
import pytest
import xarray
import zarr
from click.testing import CliRunner
from distributed import Client, LocalCluster

import tilewright as tw
from tests.pipeline.gram import naive
from tests.workflows.products import Stopped, stop_after
from tilewright.pipeline.errors import DTypeError, OptionError, OutputError, ShapeError, StoreError
from tilewright.pipeline.events import Caution, Event
from tilewright.pipeline.gram import masks
from tilewright.workflows.cli import cli


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def with_gaps(rng: np.random.Generator, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A matrix with something in its gaps, where the gaps are, and the same with NaN."""
    x = (20 * rng.standard_normal((50, 40)) + 7).astype(dtype)
    gone = rng.random(x.shape) < 0.2
    gone[:2] = gone[:, :2] = False
    return x, gone, np.where(gone, np.nan, x.astype(np.float64))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dtype", "held"),
    [("i1", True), ("f4", False)]
    + [
        pytest.param(dtype, held, marks=pytest.mark.slow)
        for dtype in ("i1", "u2", "i8", "f4", "f8")
        for held in (True, False)
    ],
)
def test_a_mask_is_as_a_number_that_stands_for_a_missing_one(
    client: Client, tmp_path: Path, rng: np.random.Generator, dtype: str, held: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Means, covariances, pairs, of rows and of columns; of a mask that goes along, and one that is read in chunks."""
    if not held:
        monkeypatch.setattr(masks, "HELD_ELEMENTS", 0)
    x, gone, holes = with_gaps(rng, "f4" if dtype == "u2" else dtype)
    x = np.abs(x).astype(dtype)
    holes = np.where(gone, np.nan, x.astype(np.float64))
    path = naive.put(tmp_path / "x.zarr", x, (16, 13), compressors=None)
    mask = naive.put(tmp_path / "mask.zarr", gone, (20, 7))
    marked = naive.put(tmp_path / "nan.zarr", holes, (16, 13))
    here: dict[str, Any] = {"cluster": client, "device": "cpu", "overwrite": True, "device_memory": "100KiB"}
    for options in (
        {},
        {"of": "rows"},
        {"missing_as": "pairwise"},
    ):
        run = tw.cov(path, tmp_path / "c.zarr", missing=mask, **options, **here)
        assert run.verification is not None
        assert run.verification.passed
        tw.cov(marked, tmp_path / "d.zarr", missing="nan", **options, **here)
        found, expected = (zarr.open_array(tmp_path / name)[...] for name in ("c.zarr", "d.zarr"))
        eps = np.finfo(found.dtype).eps
        np.testing.assert_allclose(found, expected, rtol=0, atol=200 * eps * np.abs(expected).max())
        assert found.dtype == (np.float64 if dtype in ("i8", "f8") else np.float32)
    np.testing.assert_allclose(
        zarr.open_array(tmp_path / "c.zarr")[...], pd.DataFrame(holes).cov(), rtol=1e-4, atol=1e-3
    )


def field(rng: np.random.Generator, folder: Path) -> tuple[Path, Path, np.ndarray, np.ndarray]:
    """Maps of which some places are land, where a file has whatever it has."""
    x = rng.standard_normal((30, 6, 8)).astype("f4")
    land = rng.random((6, 8)) < 0.4
    path = naive.put(
        folder / "x.zarr",
        np.where(land, 1e20, x).astype("f4"),
        (7, 4, 5),
        dimension_names=["time", "lat", "lon"],
    )
    mask = naive.put(folder / "land.zarr", land, (3, 8), dimension_names=["lat", "lon"])
    return path, mask, x, land


def test_land_counts_as_nothing(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    """Of covariances of places and of times, of correlations and of EOFs."""
    path, mask, x, land = field(rng, tmp_path)
    here: dict[str, Any] = {"cluster": client, "device": "cpu"}
    flat, sea = x.reshape(30, -1).astype("f8"), ~land.reshape(-1)
    tw.cov(path, tmp_path / "cov.zarr", sum_over="time", missing=mask, **here)
    found = zarr.open_array(tmp_path / "cov.zarr")[...]
    np.testing.assert_allclose(found[np.ix_(sea, sea)], np.cov(flat[:, sea], rowvar=False), atol=1e-5)
    assert not found[~sea].any()
    assert not found[:, ~sea].any()
    tw.corr(path, tmp_path / "corr.zarr", sum_over="time", missing=land, **here)
    found = zarr.open_array(tmp_path / "corr.zarr")[...]
    np.testing.assert_allclose(found[np.ix_(sea, sea)], np.corrcoef(flat[:, sea], rowvar=False), atol=1e-5)
    np.testing.assert_array_equal(np.diag(found), sea)
    area = rng.random(6) + 0.1
    tw.gram(
        path, tmp_path / "times.zarr", sum_over=["lat", "lon"], center="columns", missing=mask,
        weights={"lat": area}, **here,
    )  # fmt: skip
    centred = (flat - flat.mean(0)) * sea
    expected = (centred * np.repeat(area, 8)) @ centred.T
    np.testing.assert_allclose(zarr.open_array(tmp_path / "times.zarr")[...], expected, atol=1e-4)
    run = tw.eofs(path, tmp_path / "eofs.zarr", k=3, sum_over="time", missing=mask, **here)
    values = np.linalg.eigvalsh(np.cov(flat[:, sea], rowvar=False))[::-1][:3]
    np.testing.assert_allclose(run.values, values, rtol=1e-4)
    group = zarr.open_group(tmp_path / "eofs.zarr", mode="r")
    components = np.asarray(group["components"][...]).reshape(3, -1)  # type: ignore[index, union-attr]
    np.testing.assert_allclose(components[:, ~sea], 0, atol=1e-12)
    assert "missing=mask" in group.attrs["history"]  # type: ignore[operator]


def test_two_matrices_have_masks_of_their_own(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    x, gone, holes = with_gaps(rng, "f8")
    y = rng.standard_normal((50, 9))
    paths = naive.put(tmp_path / "x.zarr", x, (16, 16)), naive.put(tmp_path / "y.zarr", y, (16, 16))
    here: dict[str, Any] = {"cluster": client, "device": "cpu"}
    tw.cov(*paths, tmp_path / "c.zarr", missing={"X": gone}, **here)
    filled = np.where(gone, np.nanmean(holes, 0), holes)
    both = np.cov(filled, y, rowvar=False)[:40, 40:]
    np.testing.assert_allclose(zarr.open_array(tmp_path / "c.zarr")[...], both, atol=1e-9)
    with pytest.raises(OptionError, match="a mask of one matrix is given for two"):
        tw.cov(*paths, tmp_path / "d.zarr", missing=gone, **here)
    with pytest.raises(OptionError, match="a mask is given for 'Z'; there are X and Y"):
        tw.cov(*paths, tmp_path / "d.zarr", missing={"Z": gone}, **here)


def test_a_run_goes_on_only_beside_the_same_mask(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    x, gone, _ = with_gaps(rng, "f4")
    path = naive.put(tmp_path / "x.zarr", x, (10, 10))
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": "6KiB"}
    for again, kept in ((gone, True), (~gone, False)):
        with pytest.raises(Stopped):
            tw.gram(
                path, tmp_path / "c.zarr", missing=gone, listener=stop_after(3), overwrite=True, **options
            )
        run = tw.gram(path, tmp_path / "c.zarr", missing=again, overwrite=True, **options)
        assert (run.resumed >= 3) == kept
        expected = np.where(again, 0, x.astype("f8"))
        np.testing.assert_allclose(
            zarr.open_array(tmp_path / "c.zarr")[...], expected.T @ expected, rtol=1e-4, atol=0.1
        )


def test_what_is_no_mask_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    path = naive.put(tmp_path / "x.zarr", rng.random((6, 4)), (3, 4))
    numbers = naive.put(tmp_path / "numbers.zarr", rng.random((6, 4)), (3, 4))
    mask = naive.put(tmp_path / "mask.zarr", rng.random((6, 4)) < 0.5, (3, 4))
    wrong: list[tuple[Any, type[Exception], str]] = [
        (np.zeros((4, 6), bool), ShapeError, r"the mask has shape \(4, 6\), and X, .*x.zarr, \(6, 4\)"),
        (np.zeros(6, bool), ShapeError, r"the mask has shape \(6,\)"),
        (np.zeros((1, 6, 4), bool), ShapeError, r"the mask has shape \(1, 6, 4\)"),
        (numbers, DTypeError, "numbers.zarr holds float64; a mask holds bool"),
        ([[0.5]], DTypeError, "the mask holds float64"),
        ([[True], [True, False]], OptionError, "is no array"),
        (
            "none",
            OptionError,
            "missing='none' is neither a number nor 'nan' nor 'attr.*, and names no stored mask",
        ),
        (str(tmp_path), StoreError, "missing: "),
        ({}, OptionError, "missing: the mapping is empty"),
        ({"X": 5}, OptionError, r"missing\['X'\]=5 is no mask"),
        (True, OptionError, "missing=True is neither a number, nor 'nan', nor a mask"),
    ]
    for missing, error, message in wrong:
        with pytest.raises(error, match=message):
            tw.gram(path, tmp_path / "c.zarr", missing=missing)
    for held_elements in (10, masks.HELD_ELEMENTS):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(masks, "HELD_ELEMENTS", held_elements)
            with pytest.raises(OutputError, match="is also X's mask"):
                tw.gram(path, mask, missing=mask, overwrite=True)
    assert not (tmp_path / "c.zarr").exists()


def test_a_mask_is_named_on_the_command_line(tmp_path: Path, rng: np.random.Generator) -> None:
    path, mask, x, land = field(rng, tmp_path)
    done = CliRunner().invoke(
        cli,
        f"cov {path} {tmp_path}/c.zarr --sum-over time --missing {mask} --device cpu --quiet".split(),
    )
    assert done.exit_code == 0, done.output
    sea = ~land.reshape(-1)
    expected = np.cov(x.reshape(30, -1)[:, sea], rowvar=False)
    np.testing.assert_allclose(
        zarr.open_array(tmp_path / "c.zarr")[...][np.ix_(sea, sea)], expected, atol=1e-5
    )


def masks_of_land(folder: Path, land: np.ndarray) -> dict[str, Any]:
    """One mask in every way in which arrays are given."""
    named = xarray.DataArray(land.T, dims=["lon", "lat"], name="land")  # by its dimensions' names
    named.to_dataset().to_zarr(folder / "land2.zarr", consolidated=False, zarr_format=2)
    named.to_dataset().to_netcdf(folder / "land.nc", engine="h5netcdf")
    np.save(folder / "land.npy", land)
    with h5py.File(folder / "land.h5", "w") as file:
        file["land"] = land
    return {
        "DataArray": named,
        "DataArray of Zarr": xarray.open_zarr(folder / "land2.zarr", consolidated=False)["land"],
        "DataArray of NetCDF": xarray.open_dataset(folder / "land.nc", engine="h5netcdf")["land"],
        "dask": dask.array.from_array(land, chunks=(2, 3)),
        "DataArray of dask": named.chunk({"lat": 2}),
        "Zarr": folder / "land2.zarr" / "land",
        "open Zarr": zarr.open_array(folder / "land2.zarr" / "land"),
        "NetCDF": f"{folder / 'land.nc'}::land",
        "HDF5": f"{folder / 'land.h5'}::land",
        "data set": h5py.File(folder / "land.h5")["land"],
        "npy": folder / "land.npy",
        "mapped": np.load(folder / "land.npy", mmap_mode="r"),
        "lists": land.tolist(),
        "numpy": land,
    }


@pytest.mark.more
@pytest.mark.parametrize("held", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_masks_are_given_as_arrays_are(
    held: int, client: Client, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other one goes along with the tasks, and those between are read in chunks."""
    path, _, x, land = field(rng, tmp_path)
    flat, sea = x.reshape(30, -1).astype("f8"), ~land.reshape(-1)
    expected = np.cov(flat, rowvar=False) * np.outer(sea, sea)
    most = masks.HELD_ELEMENTS
    for number, (kind, mask) in enumerate(masks_of_land(tmp_path, land).items()):
        monkeypatch.setattr(masks, "HELD_ELEMENTS", most if number % 2 == held else 0)
        found = tw.cov(path, sum_over="time", missing=mask, cluster=client, device="cpu")
        np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=kind)


def test_what_is_no_mask_is_named_as_it_is(tmp_path: Path, rng: np.random.Generator) -> None:
    path, _, _, land = field(rng, tmp_path)
    masks_of_land(tmp_path, land)
    wrong: list[tuple[Any, type[tw.TilewrightError], str]] = [
        (f"{tmp_path / 'land.nc'}::sea", StoreError, r"sea is not in that file; it has the arrays /land"),
        (xarray.DataArray(land.astype("i1"), dims=["lat", "lon"]), DTypeError, r"holds int8; a mask holds"),
        (
            xarray.DataArray(land[:3], dims=["lat", "lon"]),
            ShapeError,
            r"DataArray of shape \(3, 8\) has shape",
        ),
        (tmp_path / "nothing", OptionError, "names no stored mask"),
    ]
    for mask, error, message in wrong:
        with pytest.raises(error, match=message):
            tw.cov(path, tmp_path / "c", sum_over="time", missing=mask)


@pytest.mark.sample(1)
@pytest.mark.parametrize("work", ["cov", "eofs"])
@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
@pytest.mark.parametrize("dtype", ["f4", "i2"])
def test_what_a_mask_leaves_of_missing_numbers_is_missing(
    dtype: str, kind: str, work: str, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Of numbers that the file says stand for missing ones."""
    found = []
    x, land = (rng.standard_normal((30, 6, 8)) * 50).astype(dtype), rng.random((6, 8)) < 0.4
    x[:, land] = -999
    data = xarray.DataArray(
        x, dims=["time", "lat", "lon"], name="sst", attrs={"_FillValue": x.dtype.type(-999)}
    )
    if kind == "zarr":
        path: Any = naive.put(tmp_path / "x.zarr", x, (7, 4, 5), dimension_names=["time", "lat", "lon"])
        zarr.open_array(path).attrs["_FillValue"] = -999
    else:
        data.to_netcdf(tmp_path / "x.nc", engine="h5netcdf")
        path = f"{tmp_path / 'x.nc'}::sst"
    less = land.copy()
    less[tuple(np.argwhere(land)[0])] = False
    for number, mask in enumerate((land, less)):
        seen: list[Event] = []
        options: dict[str, Any] = {
            "missing": mask,
            "cluster": client,
            "device": "cpu",
            "listener": seen.append,
        }
        if work == "cov":
            tw.cov(path, out=tmp_path / f"c{number}", sum_over="time", **options)
            found.append(zarr.open_array(tmp_path / f"c{number}")[:])
        else:
            tw.eofs(path, tmp_path / f"e{number}", k=2, sum_over="time", **options)
            found.append(zarr.open_array(tmp_path / f"e{number}" / "scores")[:])
        assert not [one.message for one in seen if isinstance(one, Caution) and "_FillValue" in one.message]
    np.testing.assert_array_equal(*found)


def test_what_is_missing_of_a_part_is_missing(tmp_path: Path) -> None:
    """The product of some rows and columns took what was stored under the mask, or as a code, for numbers."""
    numbers = np.arange(60.0).reshape(12, 5) ** 2 % 37
    a = zarr.create_array(tmp_path / "a", shape=(12, 5), chunks=(5, 2), dtype="f8")
    a[:] = numbers
    a.update_attributes({"_FillValue": 36.0, "missing_value": 33.0})
    gone = np.isin(numbers, (33, 36))
    held = np.ma.masked_array(numbers, gone)[2:11, 1:5]
    centred = (held - held.mean(axis=0)).filled(0)
    part = tw.slice(tmp_path / "a", rows=(2, 11), columns=(1, 5))
    for missing in (gone, "attributes", 36.0):
        found = tw.cov(part, missing=missing, cluster="local", device="cpu")
        np.testing.assert_allclose(found, centred.T @ centred / 8, err_msg=str(missing))
    assert gone[2:11, 1:5].any()
