"""Results in one group of Zarr: each is labelled with its own coordinates, whatever else the group has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray
import zarr

import tilewright as tw
from tilewright.pipeline.events import Event, Notice
from tilewright.pipeline.product import job
from tilewright.pipeline.store import coordinates

HERE: dict[str, Any] = {"cluster": "local", "device": "cpu"}
LAT, LON = np.array([60.0, 0.0, -60.0]), np.array([0.0, 90, 180, 270])
TIME = np.arange("2000-01", "2000-09", dtype="M8[M]").astype("M8[ns]")


def field(lat: Any, lon: Any, seed: int) -> xarray.DataArray:
    values = np.random.default_rng(seed).standard_normal((8, len(lat), len(lon)))
    along = {"time": TIME, "lat": ("lat", lat, {"units": "degrees_north"}), "lon": lon}
    return xarray.DataArray(values, along, ["time", "lat", "lon"])


SST = field(LAT, LON, 1)
OTHERS = {
    "other longitudes": field(LAT, LON - 180, 2),
    "other latitudes": field(LAT / 2, LON, 3),
    "a coarser grid": field(LAT[:2] / 3, LON[:3] + 1, 4),
    "as many places": field(LON / 9, LAT + 60, 5),
}
"""By what is other than in SST."""


def value_at(left: xarray.DataArray, right: xarray.DataArray) -> float:
    return float(np.cov(left, right)[0, 1])


def check_flattened(path: Path, left: xarray.DataArray, right: xarray.DataArray) -> None:
    """That each way to open a covariance finds the true places of both fields in it."""
    true = {"lat": left.lat, "lon": left.lon}, {"lat": right.lat, "lon": right.lon}
    maps = tw.open_xarray(path, unstack=True)
    for number, (dimension, axis) in enumerate(zip(maps.dims, ["lat", "lon"] * 2, strict=True)):
        np.testing.assert_array_equal(maps[dimension], true[number // 2][axis])
    at = [float(true[number // 2][axis][1]) for number, axis in enumerate(["lat", "lon"] * 2)]
    expected = value_at(left[:, 1, 1], right[:, 1, 1])
    place = dict(zip(maps.dims, at, strict=True))
    assert float(maps.sel(place)) == pytest.approx(expected)
    assert float(tw.open_xarray(path).sel(place)) == pytest.approx(expected)
    group = xarray.open_zarr(path.parent)
    one = group[path.name]
    for dimension, true_of in zip(one.dims, true, strict=True):
        levels = group[dimension].attrs["compress"].split()
        for level, axis in zip(levels, ["lat", "lon"], strict=True):
            np.testing.assert_array_equal(group[level], true_of[axis])
        np.testing.assert_array_equal(group[dimension], np.arange(true_of["lat"].size * true_of["lon"].size))


@pytest.mark.sample(1)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("first", ["of both", "of one"])
def test_flattened_sides_keep_their_places(other: str, first: str, tmp_path: Path) -> None:
    slp, stats = OTHERS[other], tmp_path / "stats.zarr"
    results = {"covariance": (SST, SST), "both": (SST, slp), "turned": (slp, SST), "pressure": (slp, slp)}
    order = ["both", "covariance", "turned", "pressure"]
    order = order if first == "of both" else order[::-1]
    for name in order:
        x, y = results[name]
        pair = (x,) if x is y else (x, y)
        tw.cov(*pair, out=stats / name, sum_over="time", **HERE)
    for name, (x, y) in results.items():
        check_flattened(stats / name, x, y)


@pytest.mark.sample(2)
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("first", ["of both", "of one"])
@pytest.mark.parametrize("count", [4, 3])
def test_sides_of_one_axis_keep_their_labels(
    zarr_format: Any, first: str, count: int, tmp_path: Path
) -> None:
    x, y = SST[:, 0], OTHERS["other longitudes"][:, 0, :count]
    group = tmp_path / "stats.zarr"
    zarr.create_group(group, zarr_format=zarr_format)
    runs = {"both": (x, y), "alone": (x,)}
    for name in list(runs) if first == "of both" else list(runs)[::-1]:
        tw.cov(*runs[name], out=group / name, **HERE)
    found = xarray.open_zarr(group, consolidated=False)
    for opened in (found, {name: tw.open_xarray(group / name) for name in runs}):
        for name, pair in runs.items():
            rows, columns = opened[name].dims
            np.testing.assert_array_equal(opened[name][rows], x.lon)
            np.testing.assert_array_equal(opened[name][columns], pair[-1].lon)
    assert {found["both"].dims[1], found["alone"].dims[1]} == {"lon_2", "lon_3"}
    assert found["both"].dims[0] == found["alone"].dims[0] == "lon"


def test_it_is_said(tmp_path: Path) -> None:
    x, y, told = SST[:, 0], OTHERS["other longitudes"][:, 0], list[Event]()
    tw.cov(x, out=tmp_path / "s.zarr" / "a", **HERE)
    tw.cov(x, y, tmp_path / "s.zarr" / "b", listener=told.append, **HERE)
    messages = [event.message for event in told if isinstance(event, Notice)]
    assert any(
        "is called lon_3, since lon_2, or an axis of it, is something else in" in one for one in messages
    )
    assert tw.open_xarray(tmp_path / "s.zarr" / "b").dims == ("lon", "lon_3")


@pytest.mark.more
def test_a_result_without_labels_gets_none(tmp_path: Path) -> None:
    """Nor do coordinates that come later label what is there without any."""
    bare, group = SST.drop_vars(["lat", "lon"]), tmp_path / "s.zarr"
    options: dict[str, Any] = {"sum_over": "time", **HERE}
    for order in (("bare", "full"), ("full", "bare")):
        group = tmp_path / f"{order[0]}.zarr"
        for name in order:
            tw.cov(bare if name == "bare" else SST, out=group / name, **options)
            one = bare[:, 0] if name == "bare" else SST[:, 0]
            tw.cov(one, out=group / f"{name}_axis", **HERE)
        opened = tw.open_xarray(group / "bare", unstack=True)
        assert opened.sizes == dict(zip(opened.dims, (3, 4, 3, 4), strict=True))
        assert not opened.coords
        assert not tw.open_xarray(group / "bare_axis").coords
        assert not xarray.open_zarr(group)["bare_axis"].coords
        check_flattened(group / "full", SST, SST)


def test_a_result_that_is_replaced_has_its_new_labels(tmp_path: Path) -> None:
    """Its own coordinates are replaced, those of others are not."""
    slp, group = OTHERS["other longitudes"], tmp_path / "s.zarr"
    options: dict[str, Any] = {"sum_over": "time", "overwrite": True, **HERE}
    counts: dict[str, Any] = {"missing": "nan", "missing_as": "pairwise", "counts": group / "n"}
    tw.cov(SST, out=group / "c", **counts, **options)
    tw.cov(slp, out=group / "c", **counts, **options)
    assert tw.open_xarray(group / "c").dims == tw.open_xarray(group / "n").dims == ("lat_lon", "lat_lon_2")
    check_flattened(group / "c", slp, slp)
    tw.cov(slp, out=group / "d", **options)
    tw.cov(SST, out=group / "c", **counts, **options)
    check_flattened(group / "c", SST, SST)
    check_flattened(group / "d", slp, slp)
    numbers = tw.open_xarray(group / "n", unstack=True)
    np.testing.assert_array_equal(numbers[numbers.dims[1]], SST.lon)


def test_the_numbers_of_pairs_in_another_group(tmp_path: Path) -> None:
    slp = OTHERS["other longitudes"]
    tw.cov(SST, out=tmp_path / "n.zarr" / "c", sum_over="time", **HERE)
    options: dict[str, Any] = {
        "missing": "nan",
        "missing_as": "pairwise",
        "counts": tmp_path / "n.zarr" / "n",
    }
    tw.cov(slp, out=tmp_path / "s.zarr" / "c", sum_over="time", **options, **HERE)
    check_flattened(tmp_path / "s.zarr" / "c", slp, slp)
    numbers = tw.open_xarray(tmp_path / "n.zarr" / "n", unstack=True)
    np.testing.assert_array_equal(numbers[numbers.dims[3]], slp.lon)
    assert "lat_lon_2" not in xarray.open_zarr(tmp_path / "n.zarr")["n"].dims[:1]


def test_the_same_times_are_the_same_in_other_units(tmp_path: Path) -> None:
    """X lies in the group as xarray stores it, and is given as xarray decodes it."""
    data = SST.to_dataset(name="sst")
    data.to_zarr(
        tmp_path / "x.zarr", consolidated=False, encoding={"time": {"units": "hours since 1999-12-31"}}
    )
    opened = xarray.open_zarr(tmp_path / "x.zarr", consolidated=False)
    tw.gram(opened.sst, out=tmp_path / "x.zarr" / "g", sum_over=["lat", "lon"], **HERE)
    found = tw.open_xarray(tmp_path / "x.zarr" / "g")
    assert found.dims == ("time", "time_2")
    np.testing.assert_array_equal(found.time, TIME)
    np.testing.assert_array_equal(found.time_2, TIME)
    # The same numbers of other units are others.
    for name, units in (("km", "km"), ("m", "m"), ("years", "days since 1900-01-01")):
        along = ("place", [1.0, 2, 3], {"units": units})
        one = xarray.DataArray(SST.values[:, 0, :3], {"place": along}, ["time", "place"])
        tw.cov(one, out=tmp_path / "u.zarr" / name, **HERE)
        assert tw.open_xarray(tmp_path / "u.zarr" / "km").place.attrs == {"units": "km"}
    assert tw.open_xarray(tmp_path / "u.zarr" / "m").dims == ("place_3", "place_4")


@pytest.mark.sample(1)
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("sum_over", [None, "time"])
def test_two_runs_that_end_at_once(
    sum_over: Any, zarr_format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has chosen its names when the other takes them."""
    group, record = tmp_path / "s.zarr", job.record_sides
    zarr.create_group(group, zarr_format=zarr_format)
    x, other = (one if sum_over else one[:, 0] for one in (SST, OTHERS["other longitudes"]))

    def late(*arguments: Any) -> None:
        record(*arguments)
        monkeypatch.setattr(job, "record_sides", record)
        tw.cov(other, out=group / "other", sum_over=sum_over, **HERE)

    monkeypatch.setattr(coordinates, "MOST_LISTED", 3)
    monkeypatch.setattr(job, "record_sides", late)
    tw.cov(x, out=group / "c", sum_over=sum_over, **HERE)
    for name, field_of in (("c", x), ("other", other)):
        found = tw.open_xarray(group / name, unstack=True)
        place = dict.fromkeys(found.dims, -1)
        for dimension in found.dims:
            axis = dimension.partition("_")[0]
            np.testing.assert_array_equal(found[dimension], field_of[axis])
        last = field_of[:, -1, -1] if sum_over else field_of[:, -1]
        assert float(found.isel(place)) == pytest.approx(float(last.var(ddof=1)))
    opened = xarray.open_zarr(group, consolidated=False)
    assert set(opened["c"].dims).isdisjoint(opened["other"].dims)


@pytest.mark.more
def test_a_repair_gives_a_result_its_own_labels(tmp_path: Path) -> None:
    """As of one that was stored when names were shared whatever they were of."""
    group, x, other = tmp_path / "s.zarr", SST[:, 0], OTHERS["other longitudes"][:, 0]
    for name, y in (("a", x), ("b", other)):
        tw.matmul(x, y, group / name, transpose_a=True, **HERE)
    metadata = group / "b" / "zarr.json"
    metadata.write_text(metadata.read_text().replace("lon_3", "lon_2"))
    np.testing.assert_array_equal(tw.open_xarray(group / "b").lon_2, x.lon)
    assert tw.repair(x, other, group / "b", **HERE).passed
    b = tw.open_xarray(group / "b")
    assert b.dims == ("lon", "lon_2"), "nothing was to repair"
    chunk = next(path for path in (group / "b" / "c").rglob("*") if path.is_file())
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    assert tw.repair(x, other, group / "b", **HERE).passed
    b = tw.open_xarray(group / "b")
    assert b.dims == ("lon", "lon_3")
    np.testing.assert_array_equal(b.lon_3, other.lon)
    np.testing.assert_array_equal(tw.open_xarray(group / "a").lon_2, x.lon)
    np.testing.assert_allclose(b, x.values.T @ other.values)
    assert tw.audit(group / "b").passed
