"""Weights of several axes at once, such as areas of the places of a map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray
import zarr
from distributed import Client

import tilewright as tw
from tilewright.pipeline.errors import OptionError, ShapeError, StoreError
from tilewright.pipeline.events import Caution, Event

TIMES, LATITUDES, LONGITUDES = 9, 4, 3
AXES = ("time", "lat", "lon")


@pytest.fixture
def field(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((TIMES, LATITUDES, LONGITUDES))


@pytest.fixture
def area(rng: np.random.Generator) -> np.ndarray:
    return rng.random((LATITUDES, LONGITUDES))


def stored(path: Path, data: np.ndarray, names: tuple[str, ...]) -> str:
    zarr.create_array(
        path, data=data, chunks=tuple(-(-side // 2) for side in data.shape), dimension_names=names
    )
    return str(path)


@pytest.mark.parametrize("how", ["stored", "array", "DataArray"])
def test_areas_are_those_of_the_places_of_axes(
    how: str, field: np.ndarray, area: np.ndarray, client: Client, tmp_path: Path
) -> None:
    x = stored(tmp_path / "x.zarr", field, AXES)
    weights: Any = {
        "stored": lambda: stored(tmp_path / "area.zarr", area, AXES[1:]),
        "array": lambda: area,
        "DataArray": lambda: xarray.DataArray(area, dims=AXES[1:]),
    }[how]()
    flat = field.reshape(TIMES, -1)
    tw.gram(x, tmp_path / "g.zarr", sum_over=["lat", "lon"], weights=weights, cluster=client)
    np.testing.assert_allclose(
        np.asarray(zarr.open_array(tmp_path / "g.zarr")[...]), (flat * area.reshape(-1)) @ flat.T, rtol=1e-12
    )
    tw.eofs(x, tmp_path / "e.zarr", 2, sum_over="time", weights=weights, cluster=client)
    apart = (flat - flat.mean(0)) * np.sqrt(area.reshape(-1))
    values = np.linalg.svd(apart, compute_uv=False)[:2] ** 2 / (TIMES - 1)
    found = np.asarray(zarr.open_array(tmp_path / "e.zarr/eigenvalues")[...])
    np.testing.assert_allclose(found, values, rtol=1e-9)


def test_areas_of_other_places_are_refused(
    field: np.ndarray, area: np.ndarray, client: Client, tmp_path: Path
) -> None:
    x = stored(tmp_path / "x.zarr", field, AXES)
    with pytest.raises(
        ShapeError, match=r"weights has shape \(3, 4\); give one number for each of the 4 × 3 places"
    ):
        tw.gram(x, tmp_path / "g.zarr", sum_over=["lat", "lon"], weights=area.T.copy(), cluster=client)
    assert not (tmp_path / "g.zarr").exists()


def test_nan_that_nobody_said_to_be_missing_is_told_of(
    field: np.ndarray, client: Client, tmp_path: Path
) -> None:
    field[2, 1, 1] = np.nan
    x = stored(tmp_path / "x.zarr", field, AXES)
    told: list[Event] = []
    tw.cov(x, tmp_path / "c.zarr", sum_over="time", cluster=client, listener=told.append)
    cautions = [event.message for event in told if isinstance(event, Caution)]
    assert any("holds NaN in 1 of its 12 columns" in message for message in cautions)
    assert any("missing='nan' (--missing nan)" in message for message in cautions)
    told.clear()
    tw.cov(x, tmp_path / "d.zarr", sum_over="time", missing="nan", cluster=client, listener=told.append)
    assert not [event for event in told if isinstance(event, Caution)]


@pytest.mark.parametrize("said", ["lat", "lat=cos"])
@pytest.mark.parametrize(
    ("function", "options", "which"),
    [
        (tw.cov, {"sum_over": "time"}, "summed over is 0"),
        (tw.cov, {"sum_over": ["lat", "lon"]}, "summed over are 1, 2"),
        (tw.eofs, {"sum_over": "time", "k": 1}, "of the variables are 1, 2"),
    ],
)
def test_a_word_that_names_no_array_is_told_the_axes(
    tmp_path: Path, field: np.ndarray, said: str, function: Any, options: dict[str, Any], which: str
) -> None:
    x = stored(tmp_path / "x.zarr", field, AXES)
    with pytest.raises(OptionError) as caught:
        function(x, weights=said, **options)
    message = str(caught.value)
    assert message.startswith(
        f"weights='{said}' names no stored array; give the path of one, or weights by axis"
    )
    assert "{'lat': 'cos'}" in message
    assert f"are 0 ('time'), 1 ('lat'), 2 ('lon'), and {which}" in message


def test_a_path_of_nothing_is_still_told_as_one(tmp_path: Path, field: np.ndarray) -> None:
    x = stored(tmp_path / "x.zarr", field, AXES)
    with pytest.raises(StoreError, match=r"no Zarr array at .*/none\.zarr, where no file or folder is"):
        tw.cov(x, sum_over="time", weights=str(tmp_path / "none.zarr"))
