"""Arrays whose elements are paired have the same labels where both have any, or it is asked for their position."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray
import zarr
from click.testing import CliRunner

import tilewright as tw
from tilewright.pipeline.errors import OptionError, ShapeError, TilewrightError
from tilewright.pipeline.events import Caution, Event
from tilewright.workflows.cli import cli
from tilewright.workflows.gram import plan_only

HERE: dict[str, Any] = {"device": "cpu", "cluster": "local"}
OTHER = r"the coordinates time, which are summed over, are not the same in X \(.*\) and Y \(.*\): "


def field(name: str, first: str = "2001-01", columns: int = 3, seed: int = 1) -> xarray.DataArray:
    time = np.arange(np.datetime64(first), np.datetime64(first) + 24).astype("M8[ns]")
    values = np.random.default_rng(seed).standard_normal((24, columns))
    return xarray.DataArray(values, {"time": time, name: np.arange(columns)}, ["time", name], name="v")


X, Y = field("x"), field("y", columns=2, seed=2)
EXPECTED = np.cov(X.values, Y.values, rowvar=False)[:3, 3:]


def as_zarr(folder: Path, array: xarray.DataArray, units: str = "hours since 1900-01-01") -> str:
    path = folder / f"{array.dims[1]}{units[:2]}.zarr"
    array.to_dataset().to_zarr(path, mode="w", encoding={"time": {"units": units}}, consolidated=False)
    return str(path / "v")


def as_netcdf(folder: Path, array: xarray.DataArray, units: str = "days since 2000-01-01") -> str:
    path = folder / f"{array.dims[1]}.nc"
    array.to_dataset().to_netcdf(path, engine="h5netcdf", encoding={"time": {"units": units, "dtype": "f8"}})
    return f"{path}::v"


def as_lazy(folder: Path, array: xarray.DataArray) -> xarray.DataArray:
    return xarray.open_zarr(Path(as_zarr(folder, array)).parent, consolidated=False, chunks=None)["v"]


def as_dask(folder: Path, array: xarray.DataArray) -> xarray.DataArray:
    return array.chunk({"time": 10}) * 1.0


def in_memory(folder: Path, array: xarray.DataArray) -> xarray.DataArray:
    return array


WAYS: list[Callable[[Path, xarray.DataArray], Any]] = [as_zarr, as_netcdf, as_lazy, as_dask, in_memory]


@pytest.mark.sample(2)
@pytest.mark.parametrize("of_y", WAYS)
@pytest.mark.parametrize("of_x", [as_zarr, as_netcdf, in_memory])
def test_labels_are_compared_whatever_has_them(
    tmp_path: Path,
    of_x: Callable[[Path, xarray.DataArray], Any],
    of_y: Callable[[Path, xarray.DataArray], Any],
) -> None:
    x = of_x(tmp_path, X)
    tw.cov(x, of_y(tmp_path, Y), tmp_path / "c.zarr", **HERE)
    np.testing.assert_allclose(zarr.open_array(tmp_path / "c.zarr")[:], EXPECTED)
    turned = of_y(tmp_path, Y[::-1])
    told = f"^{OTHER}of 24 labels 24 differ, the same labels in another order, first at place 0: 2001-01-01 in X,"
    with pytest.raises(
        OptionError, match=f"{told} 2002-12-01 in Y.*y.sel.*align='position', --align position"
    ):
        tw.cov(x, turned, tmp_path / "d.zarr", **HERE)
    assert not (tmp_path / "d.zarr").exists()
    tw.cov(x, turned, tmp_path / "d.zarr", align="position", **HERE)
    expected = np.cov(X.values, Y.values[::-1], rowvar=False)[:3, 3:]
    np.testing.assert_allclose(zarr.open_array(tmp_path / "d.zarr")[:], expected)
    shifted = of_y(tmp_path, field("y", "2001-02", 2, 2))
    told = rf"^{OTHER}of 24 labels 24 differ, first at place 0:.*as with common = numpy.intersect1d\(x.time, y.time\)"
    with pytest.raises(OptionError, match=told):
        tw.corr(x, shifted, tmp_path / "e.zarr", **HERE)


def test_one_label_that_differs_and_its_place(tmp_path: Path) -> None:
    time = Y.time.values.copy()
    time[5] += np.timedelta64(1, "h")
    y = as_zarr(tmp_path, Y.assign_coords(time=time))
    told = "of 24 labels 1 differ, first at place 5: 2001-06-01 in X, 2001-06-01 01:00:00 in Y"
    with pytest.raises(OptionError, match=told):
        tw.gram(X, y, tmp_path / "c.zarr", **HERE)
    tw.gram(X[:5], f"{y}[:5]", tmp_path / "c.zarr", **HERE)
    with pytest.raises(OptionError, match="of 6 labels 1 differ, first at place 3:"):
        tw.gram(X[2:8], tw.slice(y, rows=(2, 8)), tmp_path / "d.zarr", **HERE)
    with pytest.raises(
        OptionError, match="of 5 labels 5 differ, first at place 0: 2001-01-01 in X, 2001-02-01 in Y"
    ):
        tw.gram(X[:5], f"{y}[1:6]", tmp_path / "d.zarr", sum_over="time", **HERE)


def test_lengths_that_differ_are_told_with_the_labels(tmp_path: Path) -> None:
    told = "The coordinates time go in X from 2001-01-01 to 2002-12-01, in Y from 2001-01-01 to 2002-11-01: take what"
    for more in ({}, {"sum_over": "time"}):
        with pytest.raises(ShapeError, match=told):
            tw.cov(X, Y[:-1], tmp_path / "c.zarr", **more, **HERE)
    with pytest.raises(ShapeError, match=told.replace("in X", "in A").replace("in Y", "in B")):
        tw.matmul(X, Y[:-1], tmp_path / "c.zarr", transpose_a=True, **HERE)


def test_the_command_line(tmp_path: Path) -> None:
    names = as_zarr(tmp_path, X), as_netcdf(tmp_path, Y[::-1]), str(tmp_path / "c.zarr")
    for command in (["cov", *names], ["corr", *names, "--plan-only"], ["matmul", *names, "--transpose-a"]):
        refused = CliRunner().invoke(cli, command)
        assert refused.exit_code, command
        assert "the same labels in another order" in refused.output
    done = CliRunner().invoke(cli, ["cov", *names, "--align", "position"])
    assert done.exit_code == 0, done.output
    said = zarr.open_array(names[-1]).attrs["tilewright"]
    assert said["options"]["align"] == "position"


def test_products_and_their_plans(tmp_path: Path) -> None:
    told = r"^the coordinates time, the inner side, .* are not the same in A \(.*\) and B \(.*\): of 24 labels 24"
    with pytest.raises(OptionError, match=told):
        tw.matmul(X.T, Y[::-1], **HERE)
    with pytest.raises(OptionError, match=told):
        tw.plan_matmul(X.T, Y[::-1])
    np.testing.assert_allclose(tw.matmul(X.T, Y[::-1], align="position", **HERE), X.values.T @ Y.values[::-1])
    np.testing.assert_allclose(tw.matmul(X.T, Y.drop_vars("time")[::-1], **HERE), X.values.T @ Y.values[::-1])
    with pytest.raises(OptionError, match=r"^align='loose' is unknown"):
        tw.matmul(X.T, Y, align="loose", **HERE)  # type: ignore[call-overload]


def test_neighbours_and_dot() -> None:
    a, b = X.T, Y.T.isel(time=slice(None, None, -1))
    with pytest.raises(
        OptionError, match=r"^the coordinates time, the elements of rows, .* in A \(.*\) and B"
    ):
        tw.topk(a, b, k=1, **HERE)
    with pytest.raises(OptionError, match="the same labels in another order"):
        tw.pairs(a, b, above=0.5, **HERE)
    assert tw.topk(a, b, k=1, align="position", **HERE).indices.shape == (3, 1)
    with pytest.raises(OptionError, match=r"^the coordinates time, by which their elements are paired"):
        tw.dot(X[:, 0], Y[::-1, 0], **HERE)
    assert np.isclose(
        tw.dot(X[:, 0], Y[::-1, 0], align="position", **HERE), X.values[:, 0] @ Y.values[::-1, 0]
    )


def test_a_coordinate_is_a_vector_too(tmp_path: Path) -> None:
    """It has itself for its labels, which say nothing of how it is paired."""
    x, y = (Path(as_zarr(tmp_path, one)).parent / "time" for one in (X, field("y", "2003-05", 2)))
    assert tw.dot(x, y, **HERE) > 0
    assert tw.dot(X["x"], xarray.DataArray(np.arange(3), dims=["x"]), **HERE) == 5


def test_masks_and_weights_have_the_labels_of_what_they_are_for(tmp_path: Path) -> None:
    lat = np.array([-60.0, -20.0, 20.0, 60.0])
    values = np.random.default_rng(5).standard_normal((9, 4, 4))
    sst = xarray.DataArray(values, {"lat": lat, "lon": np.arange(4)}, ["time", "lat", "lon"], name="v")
    land = xarray.DataArray(
        np.arange(16).reshape(4, 4) < 3, {"lat": lat, "lon": np.arange(4)}, ["lat", "lon"]
    )
    turned = land.rename("m").isel(lat=slice(None, None, -1))
    turned.to_dataset().to_zarr(tmp_path / "m.zarr", consolidated=False)
    how = {"sum_over": "time", "constant": "nan", **HERE}
    told = r"^the coordinates lat, along which the mask lies, .* in X \(.*\) and the mask \(.*\): of 4 labels 4 differ"
    for mask in (turned, tmp_path / "m.zarr" / "m"):
        with pytest.raises(OptionError, match=told):
            tw.cov(sst, missing=mask, **how)
        with pytest.raises(OptionError, match=told):
            tw.eofs(sst, k=2, missing=mask, **how)
    assert np.isnan(tw.cov(sst, missing=land, **how)).any()
    assert np.isnan(tw.cov(sst, missing=turned, align="position", **how)).any()
    area = xarray.DataArray(np.arange(4.0), {"lat": lat[::-1]}, ["lat"])
    told = r"^the coordinates lat, which have weights, .* in X \(.*\) and weights\['lat'\] \(.*\): of 4 labels 4 differ"
    with pytest.raises(OptionError, match=told):
        tw.eofs(sst, k=2, sum_over="time", weights={"lat": area}, **HERE)
    with pytest.raises(OptionError, match=told):
        tw.gram(sst, sum_over=["lat", "lon"], weights={"lat": area}, **HERE)
    tw.eofs(sst, k=2, sum_over="time", weights={"lat": area}, align="position", **HERE)


def test_axes_in_another_order() -> None:
    values = np.random.default_rng(5).standard_normal((9, 4, 4))
    x, y = (
        xarray.DataArray(values, dims=["time", "lat", "lon"]),
        xarray.DataArray(values, dims=["t", "lon", "lat"]),
    )
    with pytest.raises(
        OptionError, match=r"lie as lat, lon in X \(.*\) and as lon, lat in Y .*transpose one of both"
    ):
        tw.gram(x, y, sum_over=["lat", "lon"], **HERE)
    assert tw.gram(x, y, sum_over=["lat", "lon"], align="position", **HERE).shape == (9, 9)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (np.linspace(-90, 90, 7), np.linspace(-90, 90, 7).astype("f4"), True),
        (np.linspace(0, 1, 7), np.arange(7) / 6, True),
        (np.arange(7), np.arange(7.0), True),
        (np.array([*"abcdefg"]), np.array([*"abcdefg"], object), True),
        (np.array([*"abcdefg"]), np.array([*"abcdefh"]), False),
        (np.array([0, 1, 2, 3, 4, 5, np.nan]), np.array([0, 1, 2, 3, 4, 5, np.nan]), True),
        (np.arange(7), np.array([*"abcdefg"]), False),
        (np.linspace(-90, 90, 7), np.linspace(-90, 90.01, 7).astype("f4"), False),
    ],
)
def test_labels_that_are_no_times(one: np.ndarray, other: np.ndarray, same: bool) -> None:
    x, y = (
        xarray.DataArray(np.eye(7), {"k": labels}, ["k", name]) for labels, name in ((one, "x"), (other, "y"))
    )
    if same:
        assert tw.gram(x, y, **HERE).shape == (7, 7)
        return
    with pytest.raises(OptionError, match="the coordinates k, which are summed over"):
        tw.gram(x, y, **HERE)


def test_times_of_two_calendars_and_of_unknown_units(tmp_path: Path) -> None:
    def stored(name: str, **said: str) -> str:
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["v"], file["time"] = np.eye(3), np.arange(3)
            file["time"].attrs.update(said)
            file["time"].make_scale("time")
            file["v"].dims[0].attach_scale(file["time"])
            file["v"].dims[1].label = name
        return f"{tmp_path / name}.h5::v"

    names = {
        "one": stored("one", units="days since 2001-01-01", calendar="noleap"),
        "same": stored("same", units="days since 2001-01-01", calendar="365_day"),
        "plain": stored("plain", units="days since 2001-01-01"),
        "months": stored("months", units="months since 2001-01-01"),
        "again": stored("again", units="months since 2001-01-01"),
        "years": stored("years", units="years since 2001-01-01"),
        "none": stored("none"),
    }
    for x, y in (("one", "same"), ("months", "again")):
        tw.gram(names[x], names[y], tmp_path / f"{x}.zarr", **HERE)
    kinds = {
        ("one", "plain"): "times by the calendar noleap in X and times in Y",
        ("plain", "months"): "times in X and 'months since 2001-01-01' by the calendar standard in Y",
        ("months", "years"): "'months since.* in X and 'years since",
        ("plain", "none"): "times in X and numbers in Y",
    }
    for (x, y), told in kinds.items():
        with pytest.raises(OptionError, match=f"3 labels 3 differ, {told}.*give both the same coordinates"):
            tw.gram(names[x], names[y], tmp_path / "no.zarr", **HERE)


def test_a_checked_product_needs_no_labels(tmp_path: Path) -> None:
    """What stands is verified, audited and repaired as it was made."""
    x, y = as_zarr(tmp_path, X), as_zarr(tmp_path, Y[::-1])
    tw.matmul(x, y, tmp_path / "c.zarr", transpose_a=True, align="position", **HERE)
    assert tw.verify(x, y, tmp_path / "c.zarr", transpose_a=True, cluster="local").passed
    assert tw.repair(x, y, tmp_path / "c.zarr", **HERE).passed
    a, b = as_zarr(tmp_path, X), as_zarr(tmp_path, Y[::-1])
    tw.topk(a, b, tmp_path / "near.zarr", k=1, of="columns", align="position", **HERE)
    assert tw.audit(tmp_path / "near.zarr").passed


PLACES = {"lat": [60.0, 0.0], "lon": [0.0, 120.0, 240.0]}
SEA = xarray.DataArray(
    np.random.default_rng(5).standard_normal((24, 2, 3)), {"time": X.time, **PLACES}, ["time", "lat", "lon"]
)
AIR = xarray.DataArray(
    np.random.default_rng(6).standard_normal((24, 3, 2)),
    {"month": X.time.values, "lat": [50.0, -10.0, -70.0], "lon": [1.0, 2.0]},
    ["month", "lat", "lon"],
)


def air(kind: str, name: str) -> xarray.DataArray:
    """Pressure on a grid that has no place in common with that of the sea."""
    shifted = AIR.assign_coords(month=(AIR.month.values.astype("M8[M]") + 2).astype("M8[ns]"))
    found = {"reversed": AIR[::-1], "shifted": shifted, "shorter": AIR[3:], "mixed": AIR[[5, 2, 9, 1, 20]]}[
        kind
    ]
    return found.rename(month=name)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["time", "month"])
@pytest.mark.parametrize("kind", ["reversed", "shifted", "shorter", "mixed"])
def test_what_is_advised_pairs_and_keeps_all_places(kind: str, name: str) -> None:
    """The code in the message is run as it stands there."""
    x, y = SEA, air(kind, name)
    summed = "time" if name == "time" else 0
    with pytest.raises(TilewrightError) as refused:
        tw.corr(x, y, sum_over=summed, **HERE)
    told = str(refused.value).replace("\n", " ")
    spaces: dict[str, Any] = {"x": x, "y": y, "numpy": np}
    code = told.partition("as with ")[2].partition(" in xarray")[0].replace(" and x, y", "; x, y")
    exec(code, spaces)
    x, y = spaces["x"], spaces["y"]
    np.testing.assert_array_equal(x.time, y[name])
    assert x.shape[1:] == (2, 3)
    assert y.shape[1:] == (3, 2)
    assert len(x) == {"reversed": 24, "shifted": 22, "shorter": 21, "mixed": 5}[kind]
    expected = np.corrcoef(x[:, 1, 2], y[:, 2, 1])[0, 1]
    assert tw.corr(x, y, sum_over=summed, **HERE)[5, 5] == pytest.approx(expected)


def test_labels_that_have_nothing_in_common() -> None:
    later = SEA.assign_coords(time=SEA.time.values + np.timedelta64(9999, "D"))
    with pytest.raises(
        OptionError, match=r"neither has a label of the other.*: give both the same coordinates"
    ):
        tw.corr(SEA, later, sum_over="time", **HERE)


@pytest.mark.parametrize("planned", [False, True])
def test_nothing_that_is_left_is_said(planned: bool, tmp_path: Path) -> None:
    told: list[Event] = []
    x, y = xarray.align(SEA, air("shifted", "time"), join="inner")
    options: dict[str, Any] = {"sum_over": "time", "listener": told.append, **HERE}
    if planned:
        plan_only("corr", [x, y, tmp_path / "c.zarr"], **options)
    else:
        assert tw.corr(x, y, **options).shape == (0, 0)
    cautions = [event.message for event in told if isinstance(event, Caution)]
    assert len(cautions) == 1
    assert "X (DataArray" in cautions[0]
    assert "has no columns (lat 0 × lon 0), so that the result has no element" in cautions[0]
    assert "(exclude)" in cautions[0]
    told.clear()
    tw.gram(np.ones((0, 3)), listener=told.append, **HERE)
    assert any("has no rows, so that the result has sums of nothing, 0" in str(event) for event in told)
