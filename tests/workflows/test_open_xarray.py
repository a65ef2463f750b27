"""Results as xarray opens them: by one call, or as groups that have the coordinates of their sides."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.array
import numpy as np
import pytest
import xarray
import zarr

import tilewright as tw
from tests.pipeline.store.stored_arrays import as_remote
from tilewright.pipeline.errors import OptionError, StoreError
from tilewright.pipeline.events import Event, Notice
from tilewright.pipeline.product.job import multiply
from tilewright.pipeline.product.request import Request
from tilewright.pipeline.store import coordinates
from tilewright.pipeline.store.region import Flattened, Section

HERE: dict[str, Any] = {"cluster": "local", "device": "cpu"}
LAT, LON = np.array([60.0, 0.0, -60.0], "f4"), np.array([0.0, 90, 180, 270])
TIME = np.arange("2000-01", "2000-09", dtype="M8[M]").astype("M8[ns]")
PLACE, OTHER = {"lat": 60.0, "lon": 90.0}, {"lat": -60.0, "lon": 270.0}


@pytest.fixture
def sst() -> xarray.DataArray:
    values = np.random.default_rng(3).standard_normal((8, 3, 4)).cumsum(0)
    along = {"time": TIME, "lat": ("lat", LAT, {"units": "degrees_north"}), "lon": LON}
    return xarray.DataArray(values, along, ["time", "lat", "lon"], name="sst")


@pytest.fixture(autouse=True)
def _no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def second(place: dict[str, float]) -> dict[str, float]:
    return {f"{name}_2": value for name, value in place.items()}


def expected(sst: xarray.DataArray) -> float:
    return float(np.cov(sst.sel(PLACE), sst.sel(OTHER))[0, 1])


@pytest.mark.sample(2)
@pytest.mark.parametrize("where", ["c.zarr", "stats.zarr/covariance"])
@pytest.mark.parametrize("window", [None, 11])
def test_a_covariance_has_places(sst: xarray.DataArray, tmp_path: Path, where: str, window: Any) -> None:
    out = tmp_path / where
    tw.cov(sst, out=out, sum_over="time", window=window, **HERE)
    stored = zarr.open_array(out)[...]
    c = tw.open_xarray(out)
    assert c.name == out.stem
    assert c.dims == ("lat_lon", "lat_lon_2")
    assert isinstance(c.data, dask.array.Array), "nothing is read yet"
    np.testing.assert_array_equal(c, stored)
    assert float(c.sel(PLACE | second(OTHER))) == pytest.approx(expected(sst))
    assert c.lat.dtype == c.lat_2.dtype == "f4"
    assert c.lat.attrs == c.lat_2.attrs == {"units": "degrees_north"}
    assert c.attrs["tilewright"]["operation"] == "Aᵀ B"
    maps = tw.open_xarray(out, unstack=True)
    assert maps.dims == ("lat", "lon", "lat_2", "lon_2")
    np.testing.assert_array_equal(maps, stored.reshape(3, 4, 3, 4))
    for name in ("lat", "lon"):
        np.testing.assert_array_equal(maps[name], sst[name])
        np.testing.assert_array_equal(maps[f"{name}_2"], sst[name])
    assert maps.lat_2.attrs == {"units": "degrees_north"}
    # What a user makes of it later has maps the same way up.
    xarray.testing.assert_equal(
        c.unstack("lat_lon_2").unstack("lat_lon"), maps.transpose("lat_2", "lon_2", "lat", "lon")
    )


@pytest.mark.more
def test_a_group_that_is_not_there_is_made_one(sst: xarray.DataArray, tmp_path: Path) -> None:
    """xarray opens it at once, without a warning, and a reader of CF's conventions knows what was gathered."""
    stats = tmp_path / "stats.zarr"
    tw.cov(sst, out=stats / "covariance", sum_over="time", **HERE)
    found = xarray.open_zarr(stats)
    assert set(found.coords) == {"lat", "lon", "lat_2", "lon_2", "lat_lon", "lat_lon_2"}
    assert found.covariance.dims == ("lat_lon", "lat_lon_2")
    assert found.lat_lon.attrs["compress"] == "lat lon"
    assert found.lat_lon_2.attrs["compress"] == "lat_2 lon_2"
    np.testing.assert_array_equal(found.lat_lon_2, np.arange(12))
    np.testing.assert_array_equal(found.lat_2, LAT)
    # What comes later is found too, each result beside the others.
    tw.corr(sst, out=stats / "correlation", sum_over="time", **HERE)
    options: dict[str, Any] = {"missing": "nan", "missing_as": "pairwise", "counts": stats / "n"}
    tw.gram(sst, out=stats / "times", sum_over=["lat", "lon"], **options, **HERE)
    for method in ("gram", "krylov"):  # whose thin matrices lie in a group that grows
        tw.eofs(sst, stats / "eofs", k=2, sum_over="time", method=method, overwrite=True, **HERE)
    tw.topk(sst[:, 0], out=stats / "near", k=2, **HERE)
    found = xarray.open_zarr(stats)
    assert set(found.data_vars) == {"covariance", "correlation", "times", "n"}
    np.testing.assert_array_equal(found.time_2, TIME)
    group = zarr.open_group(stats, mode="r")
    assert {"eofs", "near"} <= set(group.group_keys())
    assert "components" in group["eofs"]
    assert xarray.open_zarr(stats / "eofs").sizes["mode"] == 2
    assert tw.open_xarray(stats / "times").dims == ("time", "time_2")


@pytest.mark.parametrize("inside", ["a file", "an array of format 2", "another folder"])
def test_a_folder_that_holds_something_else_is_no_group(
    sst: xarray.DataArray, tmp_path: Path, inside: str
) -> None:
    folder = tmp_path / "mine.zarr"
    folder.mkdir()
    if inside == "a file":
        (folder / "notes.txt").write_text("mine")
    elif inside == "an array of format 2":
        zarr.create_array(folder / "old", data=np.ones(3), zarr_format=2)
    else:
        (folder / "others").mkdir()
    tw.cov(sst, out=folder / "c", sum_over="time", **HERE)
    assert not (folder / "zarr.json").exists()
    assert float(tw.open_xarray(folder / "c").sel(PLACE | second(OTHER))) == pytest.approx(expected(sst))


def test_a_run_that_fails_leaves_no_group(sst: xarray.DataArray, tmp_path: Path) -> None:
    with pytest.raises(tw.TilewrightError):
        tw.corr(sst * 0, out=tmp_path / "stats.zarr" / "c", sum_over="time", **HERE)
    assert not (tmp_path / "stats.zarr" / "zarr.json").exists()


def test_beside_x_itself(sst: xarray.DataArray, tmp_path: Path) -> None:
    """Its coordinates serve the first side, and stay as they are."""
    for zarr_format in (2, 3):
        field = tmp_path / f"field{zarr_format}.zarr"
        sst.to_dataset().to_zarr(field, consolidated=False, zarr_format=zarr_format)  # type: ignore[call-overload]
        before = zarr.open_array(field / "lat").attrs.asdict()
        tw.cov(field / "sst", out=field / "c", sum_over="time", **HERE)
        assert zarr.open_array(field / "lat").attrs.asdict() == before
        found = xarray.open_zarr(field, consolidated=False)
        np.testing.assert_array_equal(found.lat_2, LAT)
        xarray.testing.assert_equal(found.sst, sst)
        assert float(tw.open_xarray(field / "c").sel(PLACE | second(OTHER))) == pytest.approx(expected(sst))


def test_two_fields_on_other_grids(sst: xarray.DataArray, tmp_path: Path) -> None:
    """No two axes of C are called alike, nor those of results of other grids in one group."""
    wind = sst[:, :2, :3].rename(lon="x").assign_coords(lat=[1.0, 2.0])
    out = tmp_path / "g.zarr" / "c"
    tw.cov(sst, wind, out, sum_over="time", **HERE)
    c = tw.open_xarray(out, unstack=True)
    assert c.dims == ("lat", "lon", "lat_2", "x")
    np.testing.assert_array_equal(c.lat_2, [1, 2])
    tw.cov(wind.rename(x="lon"), out=tmp_path / "g.zarr" / "winds", sum_over="time", **HERE)
    winds = tw.open_xarray(tmp_path / "g.zarr" / "winds", unstack=True)
    assert winds.dims == ("lat_2", "lon_2", "lat_3", "lon_3")
    np.testing.assert_array_equal(winds.lat_2, [1, 2])
    np.testing.assert_array_equal(winds.lon_3, wind.x)
    np.testing.assert_array_equal(tw.open_xarray(out, unstack=True).lat, LAT)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "g.zarr" / "lat")[:], LAT)


def test_one_flattened_side_and_one_axis(sst: xarray.DataArray, tmp_path: Path) -> None:
    names = np.array(["a", "b"])
    regions = xarray.DataArray(sst.values[:, :2, 0], {"region": names}, ["time", "region"])
    for out in (tmp_path / "alone.zarr", tmp_path / "group.zarr" / "c"):
        tw.cov(sst, regions, out, sum_over="time", **HERE)
        c = tw.open_xarray(out)
        assert float(c.sel(PLACE | {"region": "b"})) == pytest.approx(
            np.cov(sst.sel(PLACE), sst[:, 1, 0])[0, 1]
        )
        assert tw.open_xarray(out, unstack=True).dims == ("lat", "lon", "region")


def test_times_are_times(sst: xarray.DataArray, tmp_path: Path) -> None:
    for out in (tmp_path / "alone.zarr", tmp_path / "group.zarr" / "c"):
        tw.gram(sst, out=out, sum_over=["lat", "lon"], **HERE)
        np.testing.assert_array_equal(tw.open_xarray(out).time_2, TIME)


def test_many_coordinates_of_one_axis_need_a_group(
    sst: xarray.DataArray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinates, "MOST_LISTED", 3)
    told: list[Event] = []
    tw.gram(sst, out=tmp_path / "c", sum_over=["lat", "lon"], listener=told.append, **HERE)
    messages = [event.message for event in told if isinstance(event, Notice)]
    assert any(
        "the coordinates time, 8 of them, are left out: an attribute lists 3" in one for one in messages
    )
    assert "time" not in tw.open_xarray(tmp_path / "c").coords
    tw.cov(sst, out=tmp_path / "g.zarr" / "c", sum_over="time", **HERE)
    assert zarr.open_array(tmp_path / "g.zarr" / "c").attrs["flattened"]["lat_lon_2"]["arrays"] == ["lon_2"]
    assert float(tw.open_xarray(tmp_path / "g.zarr" / "c").sel(PLACE | second(OTHER))) == pytest.approx(
        expected(sst)
    )


def test_odd_coordinates(tmp_path: Path, sst: xarray.DataArray) -> None:
    """Without any, with NaN, or twice the same: pandas would sort, or refuse, what xarray leaves as it is."""
    bare = sst.drop_vars("lon").assign_coords(lat=[np.nan, 5.0, 5.0])
    tw.cov(bare, out=tmp_path / "c", sum_over="time", **HERE)
    maps = tw.open_xarray(tmp_path / "c", unstack=True)
    np.testing.assert_array_equal(maps.lat, [np.nan, 5, 5])
    assert "lon" not in maps.coords
    assert tw.open_xarray(tmp_path / "c").lon.values[:5].tolist() == [0, 1, 2, 3, 0]


def test_some_places_of_a_side(sst: xarray.DataArray, tmp_path: Path) -> None:
    """Of a side that is cut, as tilewright.slice cuts those of matrices."""
    sst.to_dataset().to_zarr(tmp_path / "x.zarr", consolidated=False)
    flat = Flattened(zarr.open_array(tmp_path / "x.zarr" / "sst"), (0,), (1, 2))
    some = Section(flat, (0, 8), (2, 9))
    (tmp_path / "g.zarr").mkdir()
    for out in (tmp_path / "c.zarr", tmp_path / "g.zarr" / "c"):
        multiply(Request(some, some, out, transpose_a=True, **HERE).checked())
        c = tw.open_xarray(out)
        assert c.dims == ("lat_lon_2_9", "lat_lon_2_9_2")
        assert c.lon.values.tolist() == [180, 270, 0, 90, 180, 270, 0]
        value = float((sst.sel(lat=60, lon=180) * sst.sel(lat=0, lon=90)).sum())
        assert float(c.sel(lat=60, lon=180, lat_2=0, lon_2=90)) == pytest.approx(value)
        with pytest.raises(
            OptionError, match=r"the places 2 to 8 of the 12 of lat × lon; .*unstack\('lat_lon_2_9'\)"
        ):
            tw.open_xarray(out, unstack=True)
        assert int(np.isnan(c.unstack("lat_lon_2_9")).sum()) == 7 * 5
    assert xarray.open_zarr(tmp_path / "g.zarr").lat_lon_2_9.values.tolist() == [*range(2, 9)]


def test_maps_of_eofs(sst: xarray.DataArray, tmp_path: Path) -> None:
    run = tw.eofs(sst, tmp_path / "e.zarr", k=2, sum_over="time", **HERE)
    maps = tw.open_xarray(tmp_path / "e.zarr" / "components", unstack=True)
    assert maps.dims == ("mode", "lat", "lon")
    np.testing.assert_array_equal(maps.lat, LAT)
    np.testing.assert_array_equal(maps.lon, LON)
    assert maps.lat.attrs["units"] == "degrees_north"
    scores = tw.open_xarray(tmp_path / "e.zarr" / "scores")
    np.testing.assert_array_equal(scores.time, TIME)
    np.testing.assert_allclose(((sst - sst.mean("time")) * maps).sum(["lat", "lon"]).T, scores.T, atol=1e-9)
    assert run.values.shape == tw.open_xarray(tmp_path / "e.zarr" / "eigenvalues").shape
    with pytest.raises(StoreError, match=r"is a Zarr group, not an array; give one of its arrays"):
        tw.open_xarray(tmp_path / "e.zarr")


def test_a_wider_c_has_the_new_places(sst: xarray.DataArray, tmp_path: Path) -> None:
    """Coordinates that were stored beside it become longer with it."""
    x = sst[:, :2].to_dataset()
    x.to_zarr(tmp_path / "x.zarr", consolidated=False)
    source, out = tmp_path / "x.zarr" / "sst", tmp_path / "g.zarr" / "c"
    tw.cov(source, out, sum_over="time", append=True, **HERE)
    sst.to_dataset()[["sst"]].isel(lat=[2]).to_zarr(tmp_path / "x.zarr", append_dim="lat", consolidated=False)
    tw.cov(source, out, sum_over="time", append=True, **HERE)
    np.testing.assert_array_equal(tw.open_xarray(out, unstack=True).lat_2, LAT)
    found = xarray.open_zarr(tmp_path / "g.zarr")
    np.testing.assert_array_equal(found.lat_2, LAT)
    assert found.sizes["lat_lon_2"] == 12


def test_arrays_without_anything_beside_them(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "plain", data=np.ones((3, 4), "f4"), chunks=(2, 2))
    found = tw.open_xarray(tmp_path / "plain")
    assert found.dims == ("dim_0", "dim_1")
    assert not found.coords
    assert tw.open_xarray(zarr.open_array(tmp_path / "plain"), unstack=True).shape == (3, 4)


def test_through_a_server(sst: xarray.DataArray, tmp_path: Path) -> None:
    tw.cov(sst, out=tmp_path / "c.zarr", sum_over="time", **HERE)
    c = tw.open_xarray(as_remote(tmp_path / "c.zarr"))
    assert float(c.sel(PLACE | second(OTHER))) == pytest.approx(expected(sst))


@pytest.mark.parametrize(
    "made",
    [
        7,
        {"dimensions": ["lat"]},
        {"dimensions": ["lat", "lon"], "shape": [3, 5]},
        {"dimensions": ["a"], "shape": "x"},
    ],
)
def test_attributes_that_do_not_fit_are_refused(tmp_path: Path, made: Any) -> None:
    zarr.create_array(
        tmp_path / "c",
        data=np.ones((3, 4)),
        dimension_names=["lat_lon", "b"],
        attributes={"flattened": {"lat_lon": made}},
    )
    with pytest.raises(
        StoreError, match=r"the attribute 'flattened' of .* does not say what its lat_lon, of 3, is"
    ):
        tw.open_xarray(tmp_path / "c")


def test_what_is_no_stored_array_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no Zarr array"):
        tw.open_xarray(tmp_path / "nothing")
    with pytest.raises(StoreError, match=r"found numpy\.ndarray"):
        tw.open_xarray(np.ones((2, 2)))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="unstack='yes' is neither true nor false"):
        tw.open_xarray(tmp_path, unstack="yes")  # type: ignore[arg-type]


def test_xarray_is_asked_for_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zarr.create_array(tmp_path / "c", data=np.ones((3, 4)))
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(OptionError, match=r"open_xarray needs xarray, .* \(pip install xarray\)"):
        tw.open_xarray(tmp_path / "c")
