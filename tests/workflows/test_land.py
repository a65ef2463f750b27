"""Variables without any value, such as places on land: 0 or NaN in the result, as is asked for, and in no other way
different from any others to whoever checks, stops, audits or widens it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray
import zarr
from click.testing import CliRunner

import tilewright as tw
from tests.pipeline.gram import naive
from tests.workflows.products import Stopped, stop_after
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.events import Caution, Event, Notice
from tilewright.pipeline.worker import fusion
from tilewright.workflows.cli import cli

HERE: dict[str, Any] = {"cluster": "local", "device": "cpu"}
SIDE = 50
LAND = np.arange(SIDE) % 7 == 3
SEA = ~LAND


def field(rng: np.random.Generator, dtype: str) -> np.ndarray:
    """Maps with gaps, as any place has, and NaN on land."""
    x = 10 * rng.standard_normal((30, SIDE)) + 200
    x[rng.random(x.shape) < 0.05] = np.nan
    x[0] = 200
    x[:, LAND] = np.nan
    return (x + 1j * x[::-1] if dtype.startswith("c") else x).astype(dtype)


def filled(x: np.ndarray) -> np.ndarray:
    """Places at sea, with means for what is missing."""
    sea = x[:, SEA].astype(np.complex128 if x.dtype.kind == "c" else np.float64)
    return np.where(np.isnan(sea), np.nanmean(sea, axis=0), sea)


EXPECTED: dict[str, Any] = {
    "cov": lambda x: np.cov(filled(x), rowvar=False),
    "corr": lambda x: np.corrcoef(filled(x), rowvar=False),
    "gram": lambda x: (z := np.where(np.isnan(x), 0, x)[:, SEA].astype("c16")).conj().T @ z,
}


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8"])
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", EXPECTED)
def test_land_is_nan_where_that_is_asked_for(
    tmp_path: Path, rng: np.random.Generator, name: str, dtype: str
) -> None:
    x, told = field(rng, dtype), list[Event]()
    path, out = naive.put(tmp_path / "x.zarr", x, (8, 11)), tmp_path / "c.zarr"
    function = getattr(tw, name)
    run = function(path, out, missing="nan", constant="nan", listener=told.append, **HERE)
    c = zarr.open_array(out)[...]
    np.testing.assert_array_equal(np.isnan(c), LAND[:, np.newaxis] | LAND)
    np.testing.assert_allclose(c[np.ix_(SEA, SEA)], EXPECTED[name](x), rtol=1e-2, atol=0.05)
    np.testing.assert_array_equal(c, c.conj().T)
    assert run.verification.passed
    assert tw.audit(out).passed
    assert not [event for event in told if isinstance(event, Caution)], "what is known is no surprise"
    assert run.not_finite_expected
    assert "not finite" not in str(run)
    (one,) = [
        event.message for event in told if isinstance(event, Notice) and "hold no number" in event.message
    ]
    assert one == (
        f"{path}: 7 columns (3, 10, 17, 24, 31, ...) hold no number; their rows and columns of the result are NaN"
    )


@pytest.mark.parametrize("constant", ["error", "zero"])
def test_zeros_on_land_are_told(tmp_path: Path, rng: np.random.Generator, constant: Any) -> None:
    path, told = naive.put(tmp_path / "x.zarr", field(rng, "f4"), (8, 11)), list[Event]()
    tw.corr(path, tmp_path / "c.zarr", missing=LAND, constant=constant, listener=told.append, **HERE)
    assert not zarr.open_array(tmp_path / "c.zarr")[...][LAND].any()
    (one,) = [event.message for event in told if isinstance(event, Notice) and "hold no" in event.message]
    assert one == (
        f"{path}: 7 columns (3, 10, 17, 24, 31, ...) hold no number; their rows and columns of the result are 0, and"
        " would be NaN with constant='nan' (--constant nan)"
    )


def test_what_does_not_vary_has_no_correlation(tmp_path: Path, rng: np.random.Generator) -> None:
    """As NumPy and pandas have it; a covariance it has, which is 0."""
    for dtype in ("i2", "f4"):  # integers are scaled when they are summed, floats before
        x = (100 * rng.standard_normal((20, 9))).astype(dtype)
        x[:, [1, 4]] = 7
        path = naive.put(tmp_path / "x.zarr", x, (6, 5), overwrite=True)
        told: list[Event] = []
        found = tw.corr(path, constant="nan", listener=told.append, **HERE)
        np.testing.assert_allclose(found, pd.DataFrame(x.astype("f8")).corr(), atol=1e-5)
        assert any("2 columns (1, 4) are constant; " in e.message for e in told if isinstance(e, Notice))
        np.testing.assert_allclose(tw.cov(path, constant="nan", **HERE)[[1, 4]], 0, atol=1e-3)


def test_of_two_fields_each_has_its_own_land(tmp_path: Path, rng: np.random.Generator) -> None:
    x, y = field(rng, "f4"), field(rng, "f4")[:, ::-1][:, :20]
    found = tw.cov(x, y, missing="nan", constant="nan", **HERE)
    np.testing.assert_array_equal(np.isnan(found), LAND[:, np.newaxis] | LAND[::-1][:20])


def test_land_in_a_band(tmp_path: Path, rng: np.random.Generator) -> None:
    path, told = naive.put(tmp_path / "x.zarr", field(rng, "f4"), (8, 11)), list[Event]()
    for number, window in enumerate((3, (0, 5), (4, 1))):
        before, after = window if isinstance(window, tuple) else (window, window)
        out = tmp_path / f"{number}.zarr"
        tw.corr(path, out, missing="nan", constant="nan", window=window, listener=told.append, **HERE)
        apart = np.arange(SIDE) - np.arange(SIDE)[:, np.newaxis]
        band = (apart >= -before) & (apart <= after)
        expected = (LAND[:, np.newaxis] | LAND) & band
        np.testing.assert_array_equal(np.isnan(zarr.open_array(out)[...]), expected)
        assert tw.audit(out).passed
    assert not [event for event in told if isinstance(event, Caution)]


def test_nan_beside_land_is_still_told(tmp_path: Path, rng: np.random.Generator) -> None:
    x = field(rng, "f4")
    x[:, SEA] = np.nan_to_num(x[:, SEA], nan=200)
    x[3, 0] = np.inf
    told: list[Event] = []
    tw.cov(x, missing="nan", constant="nan", listener=told.append, **HERE)
    (caution,) = [event.message for event in told if isinstance(event, Caution)]
    assert "7 columns of X have no value (constant='nan') and X, " in caution
    assert "holds NaN or infinity in 1 of its 50 columns" in caution


def test_pairs_are_nan_by_themselves(tmp_path: Path, rng: np.random.Generator) -> None:
    x = field(rng, "f8")
    found = tw.corr(x, missing="nan", missing_as="pairwise", constant="nan", **HERE)
    np.testing.assert_allclose(found, pd.DataFrame(x).corr(), atol=1e-12)


@pytest.mark.usefixtures("small_chunks")
def test_a_run_goes_on_and_its_result_is_widened(tmp_path: Path, rng: np.random.Generator) -> None:
    x = field(rng, "f4")
    path, out = naive.put(tmp_path / "x.zarr", x[:, :40], (8, 11)), tmp_path / "c.zarr"
    options: dict[str, Any] = {"missing": "nan", "constant": "nan", "device_memory": 9_000} | HERE
    with pytest.raises(Stopped):
        tw.cov(path, out, listener=stop_after(3), **options)
    run = tw.cov(path, out, **options)
    assert isinstance(run, tw.MatmulRun)
    assert run.resumed >= 3
    zarr.open_array(path, mode="r+").append(x[:, 40:], axis=1)
    run = tw.cov(path, out, append=True, **options)
    assert isinstance(run, tw.MatmulRun)
    assert run.resumed > 0
    assert run.verification is not None
    assert run.verification.passed
    c = zarr.open_array(out)[...]
    np.testing.assert_array_equal(np.isnan(c), LAND[:, np.newaxis] | LAND)
    np.testing.assert_allclose(c[np.ix_(SEA, SEA)], EXPECTED["cov"](x), rtol=1e-3, atol=0.01)
    before = {file: file.read_bytes() for file in (out / "c").rglob("*") if file.is_file()}
    (damaged := sorted(before)[1]).write_bytes(b"\0" + before[damaged][1:])
    assert not tw.audit(out).passed


def test_zeros_where_nan_belongs_do_not_pass(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check looks at each element of such rows and columns."""
    finish = fusion.finish

    def spoilt(epilogue: Any, sums: Any, target: np.ndarray, *others: Any) -> None:
        finish(epilogue, sums, target, *others)
        target[np.isnan(target)] = 0

    monkeypatch.setattr(fusion, "finish", spoilt)
    path = naive.put(tmp_path / "x.zarr", field(rng, "f4"), (8, 11))
    with pytest.raises(tw.VerificationError, match="there are numbers where NaN"):
        tw.cov(path, tmp_path / "c.zarr", missing="nan", constant="nan", **HERE)


def test_lines_may_not_be_added_where_a_variable_may_get_its_first_value(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path, out = naive.put(tmp_path / "x.zarr", field(rng, "f4"), (8, 11)), tmp_path / "c.zarr"
    tw.gram(path, out, missing="nan", constant="nan", **HERE)
    zarr.open_array(path, mode="r+").append(np.ones((2, SIDE), "f4"))
    with pytest.raises(OptionError, match="append=True beside constant='nan', which changes with every line"):
        tw.gram(path, out, missing="nan", constant="nan", append=True, **HERE)


def test_what_nan_is_not_for() -> None:
    integers = np.arange(12).reshape(4, 3)
    with pytest.raises(OptionError, match=r"constant='nan': the result holds int64, .* \(dtype='float64'"):
        tw.gram(integers, constant="nan", **HERE)
    x = np.where(np.arange(4)[:, np.newaxis] == 2, np.nan, np.ones((4, 3)) * np.arange(3))
    # A line that is summed over has a part in every element.
    with pytest.raises(
        OptionError, match=r"1 row \(2\) of .* have them count as 0 with constant='zero'"
    ) as told:
        tw.gram(x, center="rows", missing="nan", constant="nan", **HERE)
    assert "NaN with" not in str(told.value)
    with pytest.raises(OptionError, match=r"scale: [12] rows? .* constant") as told:
        tw.gram(np.diag([1.0, 2, 0])[:, [0, 1, 1]], scale="rows", constant="nan", **HERE)
    assert "NaN with" not in str(told.value)


def test_by_the_command(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    naive.put(tmp_path / "x.zarr", field(rng, "f4"), (8, 11))
    naive.put(tmp_path / "land.zarr", LAND, (50,))
    asked = ["cov", "x.zarr", "c.zarr", "--missing", "land.zarr", "--constant", "nan"]
    done = CliRunner().invoke(cli, asked)
    assert done.exit_code == 0, done.output
    assert np.isnan(zarr.open_array("c.zarr")[...][LAND]).all()
    assert "7 columns (3, 10, 17, 24, 31, ...) hold no number" in done.output


def test_maps_of_eofs_have_nan_on_land(tmp_path: Path, rng: np.random.Generator) -> None:
    x = field(rng, "f8")
    asked: dict[str, Any] = {"k": 2, "missing": "nan", "scale": True} | HERE
    zeros, found = (tw.eofs(x, constant=word, **asked) for word in ("zero", "nan"))
    np.testing.assert_array_equal(np.isnan(found.components), np.broadcast_to(LAND, (2, SIDE)))
    np.testing.assert_array_equal(found.components[:, SEA], zeros.components[:, SEA])
    np.testing.assert_array_equal(found.scores, zeros.scores)


@pytest.mark.parametrize("name", ["cov", "corr"])
def test_of_pairs_land_is_told_of_once_and_alarms_nobody(rng: np.random.Generator, name: str) -> None:
    """The NaN that was asked for was said to be too few pairs, or a fault in X."""
    x = field(rng, "f8")
    said: list[Event] = []
    how: dict[str, Any] = {"missing": "nan", "missing_as": "pairwise", "listener": said.append, **HERE}
    found = getattr(tw, name)(x, constant="nan", **how)
    assert np.isnan(found[LAND]).all()
    assert not [one.message for one in said if isinstance(one, Caution)]
    (told,) = [one.message for one in said if isinstance(one, Notice) and "hold no number" in one.message]
    assert told.endswith("their rows and columns of the result are NaN")
    said.clear()
    x[:-1, 1] = np.nan  # a single pair with any other
    assert np.isnan(getattr(tw, name)(x, constant="nan", **how)[1]).all()
    assert [one for one in said if isinstance(one, Caution) and "too few pairs" in one.message]


def test_what_is_not_finite_is_told_with_its_place_and_the_words_that_were_given(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    x = xarray.DataArray(
        rng.standard_normal((12, 3, 4)),
        {"time": np.arange("2001-01", "2002-01", dtype="M8[M]").astype("M8[ns]"), "lat": [-30.0, 0, 30]},
        ["time", "lat", "lon"],
        name="v",
    )
    x[:, 0, 1] = np.nan
    x[7, 2, 3] = np.inf
    x.to_dataset().to_zarr(tmp_path / "x", consolidated=False)
    how: dict[str, Any] = {"sum_over": "time", "k": 2, "constant": "nan", **HERE}
    place = (
        r"first in column 11 \(lat=30\.0\), with inf in row 7 \(time=2001-08-01\) \(1 column in all\); NaN"
    )
    for missing in ("attributes", "nan"):
        with pytest.raises(
            OptionError, match=rf"{place} is missing here \(missing='{missing}'\), so there are infinities"
        ):
            tw.eofs(tmp_path / "x" / "v", missing=missing, **how)
    with pytest.raises(
        OptionError, match=r"^missing='attributes': 1 column .* has no element that is present"
    ):
        tw.cov(tmp_path / "x" / "v", missing="attributes", sum_over="time", **HERE)
    told = r"first in row 0 \(time=2001-01-01\), with NaN in column 1 \(lat=-30\.0\)"
    with pytest.raises(OptionError, match=told):
        tw.gram(
            tmp_path / "x" / "v",
            sum_over=["lat", "lon"],
            center="rows",
            missing=-9.0,
            constant="zero",
            **HERE,
        )
