"""Packed numbers, which attributes scale and shift, are multiplied as what they stand for where attributes are asked
for, as they are to xarray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray
import zarr

import tilewright as tw
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.events import Caution

PLACES, TIMES = (5, 7), 40
HERE: dict[str, Any] = {"cluster": "local", "device": "cpu"}


def field() -> xarray.DataArray:
    values = np.random.default_rng(2).normal(3, 1, (TIMES, *PLACES))
    values[:, 1, 2] = np.nan
    values[7, 3, 3] = np.nan
    return xarray.DataArray(values, dims=["time", "lat", "lon"], name="v", attrs={"units": "K"})


ENCODINGS: dict[str, dict[str, Any]] = {
    "i2": {"dtype": "i2", "scale_factor": 0.002, "add_offset": 3.0, "_FillValue": -32768},
    "i2 scaled": {"dtype": "i2", "scale_factor": 0.002, "_FillValue": -999},
    "u1": {"dtype": "u1", "scale_factor": 0.1, "add_offset": -5.0, "_FillValue": 255},
    "i4": {"dtype": "i4", "scale_factor": 1e-6, "_FillValue": -1},
    "f4": {"dtype": "f4", "scale_factor": 10.0, "add_offset": 1.0, "_FillValue": -9.0},
    "unsigned": {"dtype": "i1", "_Unsigned": "true", "scale_factor": 0.05, "_FillValue": -1},
}


def stored(folder: Path, kind: str, encoding: dict[str, Any]) -> tuple[str, xarray.DataArray]:
    """Its name, and what xarray makes of it."""
    chunks = (16, 3, 7)
    if kind == "zarr":
        how = {"v": encoding | {"chunks": chunks}}
        field().to_dataset().to_zarr(folder / "x.zarr", encoding=how, zarr_format=2, consolidated=False)
        return str(folder / "x.zarr" / "v"), xarray.open_zarr(folder / "x.zarr", consolidated=False)["v"]
    how = {"v": encoding | {"chunksizes": chunks}}
    field().to_dataset().to_netcdf(folder / "x.nc", encoding=how, engine="h5netcdf")
    return f"{folder / 'x.nc'}::v", xarray.open_dataset(folder / "x.nc", engine="h5netcdf")["v"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
@pytest.mark.parametrize("encoding", list(ENCODINGS))
def test_packed_numbers_are_what_xarray_makes_of_them(tmp_path: Path, kind: str, encoding: str) -> None:
    path, decoded = stored(tmp_path, kind, ENCODINGS[encoding])
    said: list[Any] = []
    how = {"sum_over": "time", "constant": "nan", **HERE}
    for call in (tw.cov, tw.corr):
        call(path, out=tmp_path / call.__name__, missing="attributes", listener=said.append, **how)
        found = zarr.open_array(tmp_path / call.__name__)[:]
        np.testing.assert_allclose(found, call(decoded, missing="nan", **how), rtol=1e-10, atol=1e-12)
        assert np.isnan(found).any()
        assert found.dtype == decoded.dtype
    eofs = tw.eofs(path, k=3, missing="attributes", listener=said.append, **how)
    expected = tw.eofs(decoded, k=3, missing="nan", **how)
    np.testing.assert_allclose(eofs.eigenvalues, expected.eigenvalues, rtol=1e-10)
    np.testing.assert_allclose(eofs.mean, expected.mean, rtol=1e-12)
    assert not [one.message for one in said if isinstance(one, Caution) and "scale_factor" in one.message]


def test_parts_of_packed_matrices_and_gaps_in_pairs(tmp_path: Path) -> None:
    numbers = np.arange(60, dtype="i2").reshape(12, 5) ** 2 % 37
    numbers[3, 1] = -9
    about = {"scale_factor": 0.5, "add_offset": 10, "missing_value": -9}
    a = zarr.create_array(tmp_path / "a", shape=(12, 5), chunks=(5, 2), dtype="i2", attributes=about)
    a[:] = numbers
    values = np.where(numbers == -9, np.nan, numbers * 0.5 + 10)
    part = tw.cov(tw.slice(tmp_path / "a", rows=(2, 11), columns=(1, 5)), missing="attributes", **HERE)
    masked = np.ma.masked_invalid(values[2:11, 1:5])
    centred = (masked - masked.mean(axis=0)).filled(0)
    np.testing.assert_allclose(part, centred.T @ centred / 8, rtol=1e-6)
    pairs = tw.corr(tmp_path / "a", missing="attributes", missing_as="pairwise", **HERE)
    expected = tw.corr(values, missing="nan", missing_as="pairwise", **HERE)
    np.testing.assert_allclose(pairs, expected, rtol=1e-12)
    sums = tw.gram(tmp_path / "a", missing="attributes", **HERE)
    filled = np.nan_to_num(values)
    np.testing.assert_allclose(sums, filled.T @ filled, rtol=1e-6)


def test_packed_numbers_of_which_none_is_missing(tmp_path: Path) -> None:
    a = zarr.create_array(tmp_path / "a", shape=(6, 3), dtype="u2", attributes={"scale_factor": 2.0})
    a[:] = np.arange(18).reshape(6, 3)
    found = tw.gram(tmp_path / "a", missing="attributes", **HERE)
    np.testing.assert_allclose(found, 4.0 * a[:].T.astype(float) @ a[:])
    told: list[Any] = []
    assert tw.gram(tmp_path / "a", listener=told.append, **HERE).dtype.kind in "iu", "as they are stored"
    (notice,) = [one.message for one in told if isinstance(one, Caution)]
    assert (
        "say missing='attributes' (--missing attributes) to gram, cov, corr or eofs, or open it with xarray"
        in notice
    )
    assert "give the DataArray" in notice


def test_a_run_does_not_go_on_with_numbers_that_stood_for_others(tmp_path: Path) -> None:
    """Other attributes are another input."""
    about = {"scale_factor": 2.0}
    a = zarr.create_array(tmp_path / "a", shape=(6, 3), dtype="i2", attributes=about)
    a[:] = np.arange(18).reshape(6, 3)
    found = []
    for scale in (2.0, 3.0):
        a.update_attributes({"scale_factor": scale})
        tw.gram(tmp_path / "a", out=tmp_path / f"{scale}", missing="attributes", **HERE)
        found.append(zarr.open_array(tmp_path / f"{scale}")[:])
    np.testing.assert_allclose(found[1], found[0] * 9 / 4)
    with pytest.raises(tw.TilewrightError):
        tw.gram(tmp_path / "a", out=tmp_path / "2.0", missing="attributes", **HERE)


@pytest.mark.sample(2)
@pytest.mark.parametrize("scale", ["two", [1, 2], "nan", 1e400])
def test_a_scale_that_is_no_number_is_refused(tmp_path: Path, scale: Any) -> None:
    a = zarr.create_array(tmp_path / "a", shape=(6, 3), dtype="i2", attributes={"_FillValue": -1})
    a.update_attributes({"scale_factor": str(scale) if scale == 1e400 else scale})
    with pytest.raises(OptionError, match=r"has scale_factor=.*, which is no finite number"):
        tw.gram(tmp_path / "a", missing="attributes", **HERE)
