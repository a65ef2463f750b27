"""Parts of arrays of more than two dimensions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray
import zarr
from distributed import Client

import tilewright as tw
from tilewright.pipeline.store.arrays import name_of
from tilewright.pipeline.store.attributes import dimension_names, missing_codes, packing_of
from tilewright.pipeline.store.coordinates import along_axis
from tilewright.pipeline.store.sources.dasks import computed_on
from tilewright.pipeline.store.sources.parts import open_matrix

BOXES = {"[2:4]": np.s_[2:4], "[:,1]": np.s_[:, 1], "[..., -1]": np.s_[..., -1], "[-2,:,1:]": np.s_[-2, :, 1:],
         "[1:,...,:2]": np.s_[1:, :, :2], "[:,2:2]": np.s_[:, 2:2]}  # fmt: skip


@pytest.fixture
def field() -> xarray.DataArray:
    """Packed, 7 missing, times × latitudes × longitudes."""
    a = np.arange(5 * 4 * 3, dtype="<i2").reshape(5, 4, 3)
    beside = {"time": np.arange(5) * 2.0, "lat": np.linspace(60, -60, 4), "lon": np.arange(3)}
    attributes = {"scale_factor": 0.5, "_FillValue": 7}
    return xarray.DataArray(a, beside, list(beside), name="x", attrs=attributes)


def stored(folder: Path, field: xarray.DataArray, kind: str) -> str:
    if kind == "npy":
        np.save(folder / "a.npy", field.values)
        return str(folder / "a.npy")
    if kind == "hdf5":
        field.to_netcdf(folder / "a.nc", engine="h5netcdf")
        return f"{folder / 'a.nc'}::x"
    field.to_dataset().to_zarr(folder / "a.zarr", zarr_format=int(kind[-1]), consolidated=False)
    return f"{folder / 'a.zarr'}/x"


@pytest.mark.parametrize("kind", ["zarr2", "zarr3", "npy", "hdf5"])
@pytest.mark.parametrize("name", BOXES)
def test_parts_of_more_than_two_dimensions(
    name: str, kind: str, field: xarray.DataArray, tmp_path: Path, client: Client
) -> None:
    """With the coordinates and the names of what is left, and with what unpacks it."""
    path = stored(tmp_path, field, kind)
    expected = field[BOXES[name]]
    found = open_matrix(path + name, "X", or_more=True)
    computed_on(client, [found])
    np.testing.assert_array_equal(zarr.open_array(found.store, mode="r")[...], expected.values)
    assert name_of(found).startswith(path + "[")
    if kind != "npy":
        assert dimension_names(found) == expected.dims
        for axis, dim in enumerate(expected.dims):
            along = along_axis(found, axis)
            assert along is not None
            assert (along.values == expected[dim].values).all()
        assert missing_codes(found, as_xarray=True) == (7,)
        packed = packing_of(found)
        assert packed is not None
        assert packed.scale == 0.5


@pytest.mark.parametrize("kind", ["zarr2", "zarr3", "hdf5"])
def test_a_level_and_a_box_of_a_packed_field(
    kind: str, field: xarray.DataArray, tmp_path: Path, client: Client
) -> None:
    """As xarray has it: unpacked, weighted by the latitudes of the box, beside the part of a mask."""
    path = stored(tmp_path, field, kind)
    part = field.where(field != 7).astype(float)[1:, 1:3] * 0.5
    asked = {"sum_over": "time", "constant": "nan", "cluster": client}
    found = tw.cov(f"{path}[1:,1:3]", missing="attributes", **asked)
    np.testing.assert_allclose(found, np.cov(part.values.reshape(4, -1), rowvar=False), rtol=1e-12)
    land = np.zeros((4, 3), bool)
    land[1, 1] = True
    np.save(tmp_path / "land.npy", land)
    beside = tw.cov(f"{path}[1:,1:3]", missing=f"{tmp_path / 'land.npy'}[1:3]", **asked) * 0.25
    assert np.isnan(beside[1]).all()
    np.testing.assert_allclose(np.delete(beside[0], 1), np.delete(found[0], 1), rtol=1e-12)
    level = tw.gram(f"{path}[:,2]", of="rows", missing="attributes", cluster=client)
    expected = np.nan_to_num(field.where(field != 7).values[:, 2] * 0.5)
    np.testing.assert_allclose(level, expected @ expected.T, rtol=1e-12)
    by_time = tw.gram(
        f"{path}[:,1:3]",
        sum_over=["lat", "lon"],
        missing="attributes",
        weights={"lat": "cos"},
        cluster=client,
    )
    flat = np.nan_to_num(field.where(field != 7).values[:, 1:3] * 0.5)
    area = np.cos(np.deg2rad([20, -20]))[:, np.newaxis]
    np.testing.assert_allclose(by_time, np.einsum("aij,bij->ab", flat * area, flat), rtol=1e-12)


def test_nothing_is_appended_to_parts(field: xarray.DataArray, tmp_path: Path, client: Client) -> None:
    path = stored(tmp_path, field, "zarr3")
    asked = {"append": True, "cluster": client}
    with pytest.raises(
        tw.OptionError, match=r"append=True beside what dask has to compute first: X, .*\[:,2\]\. "
    ):
        tw.gram(f"{path}[:,2]", tmp_path / "g.zarr", **asked)
    with pytest.raises(
        tw.OptionError, match=r"append=True beside what dask .* store it \(xarray: \.to_zarr\)"
    ):
        tw.gram(path, tmp_path / "g.zarr", add_up="lon", **asked)
    assert not (tmp_path / "g.zarr").exists()
