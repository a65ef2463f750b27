"""Means over pairs that lie far from those of the whole variables cost digits in float32, which is told; and no others.
A field with a series, too, as the error about one dimension has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray
import zarr

import tilewright as tw
from tilewright.pipeline.events import Caution, Event

LOST = "suffered from rounding in float32"


def cautions(make: Callable[..., Any], x: np.ndarray, path: Path, **options: Any) -> list[str]:
    events: list[Event] = []
    make(x, out=path, missing="nan", missing_as="pairwise", device="cpu", listener=events.append, **options)
    return [str(one.message) for one in events if isinstance(one, Caution) and LOST in one.message]


def shifted(rng: np.random.Generator) -> np.ndarray:
    """Rows near 0, then near 10⁶; the first variable is there in the first half alone, so that its pairs see that."""
    x = rng.standard_normal((2000, 5))
    x[1000:] += 1e6
    x[1000:, 0] = np.nan
    x[rng.random(x.shape) < 0.1] = np.nan
    return x.astype("f4")


@pytest.mark.parametrize("make", [tw.cov, tw.corr])
def test_lost_digits_are_told(tmp_path: Path, rng: np.random.Generator, make: Callable[..., Any]) -> None:
    x = shifted(rng)
    (told,) = cautions(make, x, tmp_path / "narrow.zarr")
    assert "5 of 5 rows" in told
    assert "dtype='float64'" in told
    assert cautions(make, x, tmp_path / "wide.zarr", dtype="float64") == []
    frame = pd.DataFrame(x.astype("f8"))
    right = (frame.cov() if make is tw.cov else frame.corr()).to_numpy()
    found = zarr.open_array(tmp_path / "wide.zarr", mode="r")[:]
    scale = np.sqrt(np.diag(right)) if make is tw.cov else np.ones(5)
    # The first variable's pairs see the first half alone, where all deviations are about 1.
    assert np.abs(found - right)[0].max() < 1e-3 * scale[0]


@pytest.mark.parametrize("make", [tw.cov, tw.corr])
@pytest.mark.parametrize("kind", ["normal", "kelvin", "rain", "counts", "small"])
def test_ordinary_numbers_are_told_of_nothing(
    tmp_path: Path, rng: np.random.Generator, make: Callable[..., Any], kind: str
) -> None:
    x = rng.standard_normal((400, 30))
    made = {
        "normal": x,
        "kelvin": 280 + 3 * x,
        "rain": np.where(x > 0.8, np.exp(x), 0.0),
        "counts": np.rint(4 * np.abs(x)),
        "small": 1e-12 * x,
    }[kind]
    made[rng.random(made.shape) < 0.4] = np.nan
    assert cautions(make, made.astype("f4"), tmp_path / "c.zarr") == []


def test_a_field_with_an_index(rng: np.random.Generator) -> None:
    field = xarray.DataArray(rng.standard_normal((50, 3, 4)), dims=("time", "lat", "lon"))
    index = xarray.DataArray(rng.standard_normal(50), dims="time")
    right = [np.corrcoef(one, index)[0, 1] for one in field.values.reshape(50, 12).T]
    for given in (index, index.expand_dims("index", -1)):
        found = np.asarray(tw.corr(field, given, sum_over="time", device="cpu"))
        np.testing.assert_allclose(found.reshape(12), right, atol=1e-12)
    found = np.asarray(tw.corr(field.values, index.values.reshape(-1, 1), sum_over=0, device="cpu"))
    np.testing.assert_allclose(found.reshape(12), right, atol=1e-12)
