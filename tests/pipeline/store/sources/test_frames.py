"""DataFrames and Series of pandas as inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray
from distributed import Client

import tilewright as tw


@pytest.fixture
def frame(rng: np.random.Generator) -> pd.DataFrame:
    days = pd.date_range("2020-01-01", periods=20, name="day")
    return pd.DataFrame(rng.standard_normal((20, 4)), days, [f"gene-{number}" for number in range(4)])


def test_labels_go_along(frame: pd.DataFrame, tmp_path: Path, client: Client) -> None:
    tw.corr(frame, out=tmp_path / "group.zarr" / "c", cluster=client)
    made = tw.open_xarray(tmp_path / "group.zarr" / "c")
    assert made.dims == ("columns", "columns_2")
    assert [*map(str, made["columns"].values)] == list(frame.columns)
    np.testing.assert_allclose(made.sel(columns="gene-1", columns_2="gene-3"), frame.corr().iloc[1, 3])
    tw.topk(frame, out=tmp_path / "near.zarr", k=2, exclude_self=True, cluster=client)
    near = xarray.open_zarr(tmp_path / "near.zarr")
    assert (near["day"].values == frame.index.values).all()


def test_rows_are_paired_by_labels_that_both_have(frame: pd.DataFrame, client: Client) -> None:
    expected = frame.corr().to_numpy()
    np.testing.assert_allclose(tw.corr(frame, frame["gene-1"], cluster=client)[:, 0], expected[:, 1])
    with pytest.raises(tw.OptionError, match=r"the coordinates day, .* the same labels in another order"):
        tw.corr(frame, frame.iloc[::-1], cluster=client)
    turned = tw.corr(frame, frame.iloc[::-1].reset_index(drop=True), cluster=client)
    np.testing.assert_allclose(turned, np.corrcoef(frame.T, frame.iloc[::-1].T)[:4, 4:])


def test_missing_numbers_of_pandas_are_nan(client: Client) -> None:
    frame = pd.DataFrame({"a": pd.array([1, None, 3, 5], "Int64"), "b": pd.array([1.5, 2, 4, 1], "Float32")})
    found = tw.corr(frame, missing="nan", missing_as="pairwise", cluster=client)
    np.testing.assert_allclose(found, frame.corr().to_numpy(float))
    whole = frame.dropna().astype({"a": "Int8", "b": "Int16"})
    assert tw.gram(whole, cluster=client).dtype.kind == "i"
    flags = pd.DataFrame({"a": pd.array([True, False], "boolean"), "b": pd.array([True, True], "boolean")})
    np.testing.assert_array_equal(tw.gram(flags, dtype="int32", cluster=client), [[1, 1], [1, 2]])


def test_columns_that_hold_no_numbers_are_named(frame: pd.DataFrame) -> None:
    with pytest.raises(
        tw.DTypeError, match=r"columns that hold no numbers: 'name' \(.*\); leave them out, as sel"
    ):
        tw.gram(frame.assign(name="x"))
    rows = pd.Series([np.ones(3), np.ones(3)])
    with pytest.raises(
        tw.DTypeError, match=r"holds 2 arrays of 3 numbers as objects.*np\.stack\(list\(x\)\)"
    ):
        tw.topk(rows, k=1)
