"""Gram matrices of arrays of three and more dimensions, of which some axes are summed over."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray
import zarr
from click.testing import CliRunner
from distributed import Client, LocalCluster
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tests.pipeline.gram import naive
from tests.workflows.products import Stopped, stop_after
from tilewright.workflows.cli import cli

TIGHT = 9_000
"""Device memory that cuts a small C into several tiles."""


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Two workers in this process."""
    with (
        LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def matrix_of(x: np.ndarray, summed: list[int]) -> tuple[np.ndarray, str]:
    """The matrix that an array is seen as, and the side of the variables."""
    others = [axis for axis in range(x.ndim) if axis not in summed]
    of = "rows" if x.ndim - 1 in summed else "columns"
    rows, columns = (others, summed) if of == "rows" else (summed, others)
    return x.transpose(rows + columns).reshape(math.prod(x.shape[axis] for axis in rows), -1), of


@settings(deadline=None, max_examples=5)
@given(data=st.data())
def test_any_axes_of_any_array(
    client: Client, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = tuple(draw(st.lists(st.integers(2, 6), min_size=3, max_size=4)))
    chunks = tuple(draw(st.sampled_from([1, length, draw(st.integers(1, length))])) for length in shape)
    summed = sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1, max_size=len(shape) - 1)))
    x = (9 * rng.standard_normal(shape)).astype(draw(st.sampled_from(["i1", "i4", "f4", "f8"])))
    matrix, of = matrix_of(x, summed)
    options: dict[str, Any] = {
        "center": draw(st.sampled_from([False, True, "columns", "rows", "both"])),
        "divide": draw(st.sampled_from([None, "n", 7.5])),
    }
    weights = None
    if draw(st.booleans(), label="weights"):
        axis = draw(st.sampled_from(summed))
        values = rng.random(shape[axis]) + 0.1
        options["weights"] = {axis: values}
        weights = np.ones([shape[other] for other in summed])
        weights *= np.expand_dims(values, [place for place, other in enumerate(summed) if other != axis])
        weights = weights.reshape(-1)
    folder = tmp_path_factory.mktemp("gram")
    compressors: Any = draw(st.sampled_from([None, "auto"]))
    path = naive.put(folder / "x.zarr", x, chunks, compressors=compressors)
    memory = draw(st.sampled_from([None, TIGHT]))
    run = tw.gram(
        path,
        folder / "c.zarr",
        sum_over=summed,
        cluster=client,
        device="cpu",
        device_memory=memory,
        **options,
    )
    assert run.verification is not None
    assert run.verification.passed
    expected = naive.gram(matrix.astype(float), of=of, **options | {"weights": weights})
    found = zarr.open_array(folder / "c.zarr")[...]
    scale = np.abs(matrix.astype(float)).max() ** 2 * matrix.shape[0 if of == "columns" else 1]
    np.testing.assert_allclose(found, expected, atol=1e-4 * max(1.0, scale))
    np.testing.assert_array_equal(found, found.T)


def field(folder: Path, chunks: tuple[int, int, int] = (5, 3, 4)) -> xarray.DataArray:
    """A field of (time, lat, lon) with coordinates, stored as ``folder/field.zarr/sst``."""
    values = np.random.default_rng(3).standard_normal((20, 3, 4)).cumsum(0)
    coordinates = {"lat": [-60.0, 0.0, 60.0], "lon": np.arange(0.0, 360, 90)}
    found = xarray.DataArray(values, coordinates, ["time", "lat", "lon"], name="sst")
    found.to_dataset().to_zarr(
        folder / "field.zarr", encoding={"sst": {"chunks": chunks}}, consolidated=False
    )
    return found


def test_xarray_takes_the_sides_of_c_apart(tmp_path: Path) -> None:
    """As the reference says."""
    sst = field(tmp_path)
    tw.cov(tmp_path / "field.zarr" / "sst", tmp_path / "out.zarr" / "cov", sum_over="time", device="cpu")
    c = zarr.open_array(tmp_path / "out.zarr" / "cov")
    assert c.metadata.dimension_names == ("lat_lon", "lat_lon_2")
    of_c = c.attrs["flattened"]
    assert set(of_c) == {"lat_lon", "lat_lon_2"}
    assert of_c["lat_lon"] == {
        "dimensions": ["lat", "lon"],
        "shape": [3, 4],
        "levels": ["lat", "lon"],
        "coordinates": {"lat": [-60.0, 0.0, 60.0], "lon": [0.0, 90.0, 180.0, 270.0]},
        "dtypes": {"lat": "float64", "lon": "float64"},
        "attributes": {},
    }
    assert of_c["lat_lon_2"] == of_c["lat_lon"] | {"levels": ["lat_2", "lon_2"]}
    read = tw.open_xarray(tmp_path / "out.zarr" / "cov", unstack=True)
    place = {"lat": 60.0, "lon": 90.0, "lat_2": 0.0, "lon_2": 270.0}
    expected = np.cov(sst.sel(lat=60.0, lon=90.0), sst.sel(lat=0.0, lon=270.0))[0, 1]
    assert float(read.sel(place)) == pytest.approx(expected)


def test_eofs_of_a_field_are_those_of_the_matrix_that_it_is(tmp_path: Path) -> None:
    sst = field(tmp_path).values.reshape(20, 12)
    area = np.repeat([1.0, 2.0, 1.0], 4)
    run = tw.eofs(tmp_path / "field.zarr" / "sst", tmp_path / "eofs.zarr", 3, sum_over="time", weights=area)
    values, vectors = np.linalg.eigh(np.cov(sst * np.sqrt(area), rowvar=False))
    np.testing.assert_allclose(run.values, values[:-4:-1], rtol=1e-6)
    found = xarray.open_zarr(tmp_path / "eofs.zarr", consolidated=False)
    assert found.components.dims == ("mode", "lat_lon")
    assert found.scores.dims == ("time", "mode")
    assert found.attrs["flattened"]["lat_lon"]["shape"] == [3, 4]
    np.testing.assert_allclose(np.abs((found.components.values * vectors.T[:-4:-1]).sum(1)), 1, rtol=1e-6)


def test_two_arrays_share_the_axis_that_is_summed_over(tmp_path: Path) -> None:
    """Each has it where it has it; of Y, a matrix, it is the rows, so that nothing is seen otherwise."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((4, 3, 6)), rng.standard_normal((6, 5))
    naive.put(tmp_path / "x.zarr", x, (2, 3, 2), dimension_names=("lat", "lon", "time"))
    naive.put(tmp_path / "y.zarr", y, (4, 5), dimension_names=("time", "station"))
    tw.cov(tmp_path / "x.zarr", tmp_path / "y.zarr", tmp_path / "c.zarr", sum_over="time", device="cpu")
    c = zarr.open_array(tmp_path / "c.zarr")
    assert c.metadata.dimension_names == ("lat_lon", "station")
    assert set(c.attrs["flattened"]) == {"lat_lon"}
    expected = np.cov(x.reshape(12, 6), y.T)[:12, 12:]
    np.testing.assert_allclose(c[...], expected, rtol=1e-10)


def test_a_stopped_run_goes_on_and_another_view_begins_anew(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((12, 6, 6))
    path = naive.put(tmp_path / "x.zarr", x, (4, 6, 3))
    options: dict[str, Any] = {"device": "cpu", "device_memory": TIGHT}
    for summed, kept in ((0, True), ([1, 2], False)):
        out = tmp_path / f"{kept}.zarr"
        with pytest.raises(Stopped):
            tw.gram(path, out, sum_over=0, listener=stop_after(2), **options)
        run = tw.gram(path, out, sum_over=summed, **options)
        assert (run.resumed > 0) == kept
        matrix, of = matrix_of(x, [summed] if isinstance(summed, int) else summed)
        np.testing.assert_allclose(zarr.open_array(out)[...], naive.gram(matrix, of=of))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("cov x.zarr c.zarr --sum-over time", lambda x: np.cov(x.reshape(20, 12), rowvar=False)),
        ("gram x.zarr c.zarr --sum-over 1,2", lambda x: (y := x.reshape(20, 12)) @ y.T),
        (
            "gram x.zarr c.zarr --sum-over lat,lon --weights lat=w.zarr --center columns",
            lambda x: (y := (x - x.mean(0)).reshape(20, 12)) * np.repeat([1, 2, 3], 4) @ y.T,
        ),
    ],
)
def test_commands(words: str, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(2).standard_normal((20, 3, 4))
    naive.put(Path("x.zarr"), x, (6, 2, 4), dimension_names=("time", "lat", "lon"))
    naive.put(Path("w.zarr"), np.array([1.0, 2, 3]))
    result = CliRunner().invoke(cli, [*words.split(), "--device", "cpu", "-q", "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["verification"]["passed"]
    np.testing.assert_allclose(zarr.open_array("c.zarr")[...], expected(x), rtol=1e-10, atol=1e-12)


def test_a_vector_beside_a_field_is_one_variable(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Such as a climate index, along the axis that is summed over, of either matrix and from a command."""
    field, index = rng.standard_normal((30, 4, 5)), rng.standard_normal(30)
    field[:, 1, 2] = np.nan
    along = {"time": np.arange(30), "lat": np.arange(4), "lon": np.arange(5)}
    sst = xarray.DataArray(field, along, list(along), name="sst")
    nino = xarray.DataArray(index, {"time": along["time"]}, ["time"], name="nino")
    expected = xarray.corr(sst, nino, "time").values.reshape(-1, 1)
    asked = {"missing": "nan", "constant": "nan", "cluster": client}
    for one in (nino, nino.chunk(time=7), index):
        for x, axis in ((sst, "time"), (sst.transpose("lat", "lon", "time"), -1), (field, 0)):
            found = tw.corr(x, one, sum_over=axis, **asked)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)
    np.testing.assert_allclose(tw.corr(nino, sst, sum_over="time", **asked), expected.T, rtol=0, atol=1e-14)
    xarray.Dataset({"sst": sst, "nino": nino}).to_netcdf(tmp_path / "f.nc", engine="h5netcdf")
    names = [f"{tmp_path / 'f.nc'}::{name}" for name in ("sst[5:]", "nino[5:]")]
    words = ["--sum-over", "time", "--missing", "nan", "--constant", "nan", "--device", "cpu"]
    result = CliRunner().invoke(cli, ["corr", *names, str(tmp_path / "c.zarr"), *words])
    assert result.exit_code == 0, result.stderr
    made = tw.open_xarray(tmp_path / "c.zarr", unstack=True)
    assert made.dims == ("lat", "lon", "series")
    np.testing.assert_allclose(made[..., 0], xarray.corr(sst[5:], nino[5:], "time"), rtol=0, atol=1e-14)
    x = rng.standard_normal((30, 3))
    np.testing.assert_allclose(tw.cov(x, index, cluster=client), np.cov(x, index, rowvar=False)[:3, 3:])
    of_rows = tw.cov(np.ascontiguousarray(x.T), index, of="rows", cluster=client)
    np.testing.assert_allclose(of_rows, np.cov(x, index, rowvar=False)[:3, 3:])
    with pytest.raises(tw.ShapeError, match=r"has 30 rows and .* has 29; both are summed over"):
        tw.cov(x, index[1:], cluster=client)
    with pytest.raises(tw.ShapeError, match=r"lengths 4 × 5 in .* and 30 in DataArray 'nino'"):
        tw.corr(sst, nino, sum_over=["lat", "lon"], **asked)
    with pytest.raises(tw.OptionError, match=r"coordinates time, .* are not the same in X .* and Y"):
        tw.corr(sst, nino[::-1], sum_over="time", **asked)
    with pytest.raises(tw.ShapeError, match=r"X: .* must have 2 dimensions or more: give a single series"):
        tw.cov(index, cluster=client)
