"""Coordinates go along to results from every source that has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray
import zarr

import tilewright as tw
from tilewright.pipeline.events import Caution, Event, Notice
from tilewright.pipeline.store import coordinates

LAT, LON = np.array([-60.0, 0.0, 60.0]), np.array([0.0, 90, 180, 270])
HERE: dict[str, Any] = {"device": "cpu", "cluster": "local"}


@pytest.fixture
def sst() -> xarray.DataArray:
    time = np.arange("2000-01", "2000-09", dtype="M8[M]").astype("M8[ns]")
    values = np.random.default_rng(3).standard_normal((8, 3, 4)).cumsum(0).astype("f4")
    return xarray.DataArray(
        values, {"time": time, "lat": LAT, "lon": LON}, ["time", "lat", "lon"], name="sst"
    )


def as_zarr(folder: Path, sst: xarray.DataArray, zarr_format: Any = 3) -> Path:
    sst.to_dataset().to_zarr(folder / "x.zarr", zarr_format=zarr_format, consolidated=False)
    return folder / "x.zarr" / "sst"


def as_netcdf(folder: Path, sst: xarray.DataArray, **options: Any) -> str:
    sst.to_dataset().to_netcdf(folder / "x.nc", engine="h5netcdf", **options)
    return f"{folder / 'x.nc'}::sst"


def lazy(source: Any, **options: Any) -> xarray.DataArray:
    text = str(source)
    if ".nc" in text:
        return xarray.open_dataset(text.partition("::")[0], engine="h5netcdf", **options)["sst"]
    return xarray.open_zarr(Path(text).parent, consolidated=False, **options)["sst"]


def packed(folder: Path, sst: xarray.DataArray) -> xarray.DataArray:
    """One that xarray decodes."""
    how = {"sst": {"dtype": "i2", "scale_factor": 0.001, "_FillValue": -999}}
    return lazy(as_netcdf(folder, sst, encoding=how))


def grouped(folder: Path, sst: xarray.DataArray) -> str:
    """Scales of NetCDF may lie in a group above."""
    as_netcdf(folder, sst)
    with h5py.File(folder / "x.nc", "r+") as file:
        inner = file.create_dataset("inner/sst", data=sst.values)
        for dimension, name in zip(inner.dims, sst.dims, strict=True):
            dimension.attach_scale(file[str(name)])
    return f"{folder / 'x.nc'}::inner/sst"


def in_the_header(folder: Path, sst: xarray.DataArray) -> str:
    """A data set whose bytes lie nowhere by themselves is read by h5py."""
    as_netcdf(folder, sst)
    with h5py.File(folder / "x.nc", "r+") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple(sst.shape)
        h5py.h5d.create(file.id, b"compact", h5py.h5t.NATIVE_FLOAT, space, plist)
        file["compact"][...] = sst.values
        for dimension, name in zip(file["compact"].dims, sst.dims, strict=True):
            dimension.attach_scale(file[str(name)])
    return f"{folder / 'x.nc'}::compact"


SOURCES: dict[str, Callable[[Path, xarray.DataArray], Any]] = {
    "zarr 2": lambda folder, sst: as_zarr(folder, sst, 2),
    "zarr 3": as_zarr,
    "netcdf": as_netcdf,
    "group of netcdf": grouped,
    "header of hdf5": in_the_header,
    "lazy of zarr": lambda folder, sst: lazy(as_zarr(folder, sst), chunks=None),
    "lazy of netcdf": lambda folder, sst: lazy(as_netcdf(folder, sst)),
    "dask of zarr": lambda folder, sst: lazy(as_zarr(folder, sst), chunks={}),
    "decoded": packed,
    "memory": lambda folder, sst: sst,
    "dask": lambda folder, sst: sst.chunk({"lat": 2}) * 1,
}
PLACE = {"lat": 60.0, "lon": 90.0, "lat_2": 0.0, "lon_2": 270.0}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", SOURCES)
def test_sides_of_c_are_taken_apart(kind: str, sst: xarray.DataArray, tmp_path: Path) -> None:
    x = SOURCES[kind](tmp_path, sst)
    tw.cov(x, out=tmp_path / "c.zarr", sum_over="time", **HERE)
    found = tw.open_xarray(tmp_path / "c.zarr", unstack=True)
    expected = np.cov(sst.sel(lat=60.0, lon=90.0), sst.sel(lat=0.0, lon=270.0))[0, 1]
    assert float(found.sel(PLACE)) == pytest.approx(expected, rel=1e-2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SOURCES)
def test_eofs_have_them_and_know_latitudes(kind: str, sst: xarray.DataArray, tmp_path: Path) -> None:
    x = SOURCES[kind](tmp_path, sst)
    run = tw.eofs(x, tmp_path / "e.zarr", k=2, sum_over="time", weights={"lat": "cos"}, **HERE)
    found = xarray.open_zarr(tmp_path / "e.zarr")
    np.testing.assert_array_equal(found.time, sst.time)
    maps = found.components.set_index(lat_lon=["lat", "lon"]).unstack("lat_lon")
    assert maps.shape == (2, 3, 4)
    np.testing.assert_array_equal(maps.lat, LAT)
    weighted = ((sst - sst.mean("time")) * np.sqrt(np.cos(np.deg2rad(sst.lat)))).values.reshape(8, -1)
    sizes = np.linalg.svd(weighted, compute_uv=False)
    np.testing.assert_allclose(run.values, sizes[:2] ** 2 / 7, rtol=1e-2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_they_are_stored_beside_a_product_in_a_group(
    kind: str, zarr_format: Any, sst: xarray.DataArray, tmp_path: Path
) -> None:
    group = tmp_path / "out.zarr"
    zarr.create_group(group, zarr_format=zarr_format)
    x = SOURCES[kind](tmp_path, sst)
    tw.gram(x, out=group / "g", sum_over=["lat", "lon"], **HERE)
    found = xarray.open_zarr(group, consolidated=False)["g"]
    np.testing.assert_array_equal(found.time, sst.time)
    np.testing.assert_array_equal(found.time_2, sst.time)


def people(ids: Any, letters: str = "U") -> xarray.DataArray:
    values = np.random.default_rng(0).standard_normal((4, 6))
    return xarray.DataArray(values, {"sample_id": ids}, ["sample_id", "site"], name="g")


TEXT = ["HG001", "HG2", "NA3", "µ"]


@pytest.mark.filterwarnings("ignore:The data type:Warning")
@pytest.mark.sample(1)
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("kind", ["fixed", "objects", "zarr", "netcdf"])
def test_text_that_zarr_stores_is_kept(kind: str, zarr_format: Any, tmp_path: Path) -> None:
    x: Any = people(np.array(TEXT, dtype=object if kind == "objects" else "U"))
    if kind == "zarr":
        x.to_dataset().to_zarr(tmp_path / "x.zarr", consolidated=False, zarr_format=zarr_format)
        x = tmp_path / "x.zarr" / "g"
    elif kind == "netcdf":
        x.to_dataset().to_netcdf(tmp_path / "x.nc", engine="h5netcdf")
        x = f"{tmp_path / 'x.nc'}::g"
    group = tmp_path / "out.zarr"
    zarr.create_group(group, zarr_format=zarr_format)
    tw.matmul(x, x, group / "k", transpose_b=True, **HERE)
    found = xarray.open_zarr(group, consolidated=False)["k"]
    assert [*map(str, found.sample_id.values)] == TEXT
    assert [*map(str, found.sample_id_2.values)] == TEXT
    tw.eofs(x, tmp_path / "e.zarr", k=2, **HERE)
    assert [*map(str, xarray.open_zarr(tmp_path / "e.zarr").sample_id.values)] == TEXT


def test_what_zarr_does_not_store_is_said_once(tmp_path: Path) -> None:
    x = people(np.array(["a", None, "b", 3.5], dtype=object))
    zarr.create_group(tmp_path / "out.zarr")
    seen: list[Event] = []
    tw.gram(x, out=tmp_path / "out.zarr" / "k", of="rows", listener=seen.append, **HERE)
    tw.eofs(x, tmp_path / "e.zarr", k=2, listener=seen.append, **HERE)
    tw.topk(x, out=tmp_path / "n.zarr", k=2, listener=seen.append, **HERE)
    told = [one.message for one in seen if isinstance(one, Caution) and "sample_id" in one.message]
    assert len(told) == 3, "one a run"
    assert all("hold None, which is neither a number, a time nor a text" in one for one in told)
    assert "sample_id" not in xarray.open_zarr(tmp_path / "e.zarr").coords


def test_axes_that_xarray_has_stacked_are_told_how_to_keep_theirs(
    sst: xarray.DataArray, tmp_path: Path
) -> None:
    seen: list[Event] = []
    stacked = sst.stack(place=[dim for dim in sst.dims if dim != "time"])
    tw.cov(stacked, out=tmp_path / "c.zarr", listener=seen.append, **HERE)
    (told,) = [one.message for one in seen if isinstance(one, Caution)]
    assert "give the array unstacked (.unstack('place')), and say what is summed over (sum_over)" in told


def test_the_same_numbers_with_other_coordinates_have_their_own(
    sst: xarray.DataArray, tmp_path: Path
) -> None:
    """Numbers in memory lie there once; what is beside them does not follow from that. So of arrays of dask."""
    for name, x in (("memory", sst), ("dask", sst.chunk())):
        moved = x.assign_coords(lat=LAT / 2).rename(lon="x")
        tw.cov(x, moved, tmp_path / name, sum_over="time", **HERE)
        made: Any = zarr.open_array(tmp_path / name).attrs["flattened"]
        assert [of["coordinates"] for of in made.values()] == [
            {"lat": [*LAT], "lon": [*LON]},
            {"lat": [*LAT / 2], "x": [*LON]},
        ]


def test_rows_that_are_taken_have_theirs(sst: xarray.DataArray, tmp_path: Path) -> None:
    flat = sst.isel(lat=1, drop=True)
    zarr.create_group(tmp_path / "out.zarr")
    for kind in ("memory", "zarr", "netcdf"):
        as_ = {"memory": lambda folder, x: x, "zarr": as_zarr, "netcdf": as_netcdf}[kind]
        x = as_(tmp_path, flat)
        some = x[2:5] if kind == "memory" else lazy(x, chunks=None)[2:5]
        for number, one in enumerate((some, tw.slice(x, rows="2:5"))):
            tw.gram(one, out=tmp_path / "out.zarr" / f"{kind}{number}", of="rows", **HERE)
            found = xarray.open_zarr(tmp_path / "out.zarr", consolidated=False)[f"{kind}{number}"]
            np.testing.assert_array_equal(found[found.dims[0]], sst.time[2:5])


def test_packed_coordinates_are_unpacked(tmp_path: Path, sst: xarray.DataArray) -> None:
    how = {"lat": {"dtype": "i2", "scale_factor": 0.5}}
    x = as_netcdf(tmp_path, sst, encoding=how)
    tw.eofs(x, tmp_path / "e.zarr", k=2, sum_over="time", weights={"lat": "cos"}, **HERE)
    np.testing.assert_array_equal(xarray.open_zarr(tmp_path / "e.zarr").lat, np.repeat(LAT, 4))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["zarr 3", "netcdf", "memory"])
@pytest.mark.parametrize("units", ["degrees_north", "radians"])
def test_latitudes_have_the_units_that_they_say(
    units: str, kind: str, sst: xarray.DataArray, tmp_path: Path
) -> None:
    lat = np.array([-90.0, 0.0, 60.0])
    stored = np.deg2rad(lat).astype("f4") if units == "radians" else lat
    x = sst.assign_coords(lat=("lat", stored, {"units": units}))
    asked: dict[str, Any] = {"k": 2, "sum_over": "time", **HERE}
    run = tw.eofs(SOURCES[kind](tmp_path, x), tmp_path / "e", weights={"lat": "cos"}, **asked)
    given = tw.eofs(sst, tmp_path / "f", weights={"lat": np.maximum(np.cos(np.deg2rad(lat)), 0)}, **asked)
    np.testing.assert_allclose(run.values, given.values, rtol=1e-4)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ("degrees_east", "have units='degrees_east'; latitudes are in degrees_north or radians"),
        ("m", "have units='m'"),
        ("radians", r"are not all from -90 to 90 degrees \(units='radians'\)"),
    ],
)
def test_other_units_are_no_latitudes(units: str, message: str, sst: xarray.DataArray) -> None:
    x = sst.assign_coords(lat=("lat", LAT, {"units": units}))
    with pytest.raises(tw.OptionError, match=message):
        tw.eofs(x, k=1, sum_over="time", weights={"lat": "cos"}, **HERE)


def strictly(text: str) -> Any:
    """JSON as its standard has it, in which NaN and Infinity are no numbers."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.sample(1)
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_attributes_are_json_for_every_reader(
    sst: xarray.DataArray, zarr_format: Any, tmp_path: Path
) -> None:
    """Coordinates that are NaN or infinite were written as Python has them."""
    lat = np.array([-60.0, np.nan, np.inf])
    odd = sst.assign_coords(lat=("lat", lat, {"actual_range": [np.nan, 1.0]}))
    zarr.create_group(tmp_path / "g.zarr", zarr_format=zarr_format)
    tw.cov(odd, out=tmp_path / "g.zarr" / "c", sum_over="time", **HERE)
    tw.eofs(odd, tmp_path / "e.zarr", k=1, sum_over="time", **HERE)
    written = [*tmp_path.rglob("zarr.json"), *tmp_path.rglob(".zattrs")]
    assert written
    for file in written:
        strictly(file.read_text())
    made = zarr.open_array(tmp_path / "g.zarr" / "c").attrs["flattened"]["lat_lon"]
    assert made["coordinates"]["lat"] == [-60.0, "nan", "inf"]
    np.testing.assert_array_equal(np.asarray(made["coordinates"]["lat"], float), lat)


@pytest.mark.parametrize("in_group", [True, False])
def test_many_coordinates_are_an_array_of_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sst: xarray.DataArray, in_group: bool
) -> None:
    """An attribute is read by whoever opens the array. Where C is in no group there is no other place."""
    monkeypatch.setattr(coordinates, "MOST_LISTED", 3)
    folder = tmp_path / ("g.zarr" if in_group else "folder")  # the first becomes a group
    tw.cov(sst, out=folder / "c", sum_over="time", **HERE)
    made = zarr.open_array(folder / "c").attrs["flattened"]["lat_lon"]
    assert made["coordinates"]["lat"] == LAT.tolist()
    if not in_group:
        assert made["coordinates"]["lon"] == LON.tolist()
        assert "arrays" not in made
        return
    assert made["arrays"] == ["lon"]
    assert "lon" not in made["coordinates"]
    group = xarray.open_zarr(tmp_path / "g.zarr", consolidated=False)
    np.testing.assert_array_equal(group["lon"], LON)
    tw.eofs(sst, tmp_path / "e.zarr", k=1, sum_over="time", **HERE)
    made = zarr.open_group(tmp_path / "e.zarr").attrs["flattened"]["lat_lon"]
    assert made["arrays"] == ["lon"]
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "e.zarr" / "lon")[:], np.tile(LON, 3))
    other = tmp_path / "other.zarr"
    zarr.create_group(other)
    zarr.save_array(other / "lon", np.arange(4.0))
    tw.cov(sst, out=other / "c", sum_over="time", **HERE)
    made = zarr.open_array(other / "c").attrs["flattened"]["lat_lon_2"]
    assert made["levels"] == ["lat_2", "lon_2"]
    assert made["arrays"] == ["lon_2"]
    np.testing.assert_array_equal(zarr.open_array(other / "lon_2")[:], LON)
    np.testing.assert_array_equal(zarr.open_array(other / "lon")[:], np.arange(4.0))


@pytest.mark.sample(1)
@pytest.mark.parametrize("store", ["zarr 2", "zarr 3", "netcdf", "dask", "flags"])
def test_a_rename_of_what_is_not_read_counts(store: str, sst: xarray.DataArray, tmp_path: Path) -> None:
    """The stored array is read in its place, by the names that the DataArray has."""
    field, options = sst, dict[str, Any]()
    if store == "netcdf":
        sst.to_netcdf(tmp_path / "x.nc", engine="h5netcdf")
        opened = xarray.open_dataset(tmp_path / "x.nc", engine="h5netcdf")["sst"]
    else:
        if store == "flags":
            field = sst > 0
            options["dtype"] = "int32"
        data, at = field.to_dataset(name="sst"), tmp_path / "x.zarr"
        data.to_zarr(at, zarr_format=2 if store == "zarr 2" else 3, consolidated=False)  # type: ignore[call-overload]
        chunks: Any = {"time": 8} if store == "dask" else None
        opened = xarray.open_zarr(at, consolidated=False, chunks=chunks)["sst"]
    named = opened.rename(time="month", lat="plat", lon="plon")
    for number, x in enumerate((named, named[2:])):
        tw.gram(x, out=tmp_path / f"{number}.zarr" / "c", sum_over="month", **options, **HERE)
        found = tw.open_xarray(tmp_path / f"{number}.zarr" / "c", unstack=True)
        assert found.dims == ("plat", "plon", "plat_2", "plon_2")
        np.testing.assert_array_equal(found.plon_2, sst.lon)
        some = field[2 * number :, 1, 2].values
        assert float(found[1, 2, 1, 2]) == pytest.approx(float((some.astype(float) ** 2).sum()))
    tw.gram(opened, out=tmp_path / "0.zarr" / "stored", sum_over="time", **options, **HERE)
    assert tw.open_xarray(tmp_path / "0.zarr" / "stored").dims == ("lat_lon", "lat_lon_2")


def test_names_that_no_array_can_have(sst: xarray.DataArray, tmp_path: Path) -> None:
    told: list[Event] = []
    named = sst[:, 0].rename(lon="a/b")
    tw.gram(named, out=tmp_path / "g.zarr" / "c", listener=told.append, **HERE)
    assert zarr.open_array(tmp_path / "g.zarr" / "c").metadata.dimension_names == ("a/b", "a/b_2")  # type: ignore[union-attr]
    messages = [event.message for event in told if isinstance(event, Notice)]
    assert sum("the coordinates of 'a/b' are left out" in one for one in messages) == 1
