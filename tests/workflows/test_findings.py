"""What a run says of numbers that are right and mean something else: wrapped sums, masks, NaN and infinity."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import tilewright as tw
from tilewright.pipeline.events import Caution


def store(
    folder: Path, name: str, data: np.ndarray, chunks: tuple[int, int] = (16, 16), **attributes: Any
) -> Path:
    array = zarr.create_array(folder / name, data=data, chunks=chunks)
    array.attrs.update(attributes)
    return folder / name


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def multiply(tmp_path: Path, said: list[str]) -> Any:
    """Multiplies in many small tiles, and keeps the cautions."""

    def run(a: Path, b: Path, **options: Any) -> tw.MatmulRun:
        def listen(event: Any) -> None:
            if isinstance(event, Caution):
                said.append(event.message)

        options = {"device_memory": 60_000, "overwrite": True, **options}
        return tw.matmul(a, b, tmp_path / "C", listener=listen, **options)

    return run


DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("most", [2**31, 2**31 - 1])
def test_sums_that_may_wrap_are_told_by_the_numbers_there_are(
    device: str, most: int, tmp_path: Path, multiply: Any, said: list[str]
) -> None:
    """k = 2 products of up to 2^31 by 2^31 just do not fit int64, if one factor reaches 2^31."""
    a = np.zeros((100, 2), np.int64)
    b = np.zeros((2, 90), np.int64)
    a[77, 1], b[0, 81] = -(2**31), most
    run = multiply(store(tmp_path, "A", a), store(tmp_path, "B", b), device=device)
    wraps = 2 * 2**31 * most > 2**63 - 1
    assert run.plan.tile_count > 1
    assert run.wraps == ("possible" if wraps else "no")
    assert bool(said) == wraps
    if wraps:
        (message,) = said
        assert str(2 * 2**31 * most) in message
        assert "int64" in message


def test_a_safe_dtype_is_named(tmp_path: Path, multiply: Any, said: list[str]) -> None:
    a = np.full((40, 30), 100, np.int8)
    run = multiply(store(tmp_path, "A", a), store(tmp_path, "B", a.T.copy()), dtype="int16")
    assert run.wraps == "possible"
    assert "--dtype int32" in said[0]
    assert "300000" in said[0]
    assert run.verification.passed, "it is right modulo 2^16"
    said.clear()
    assert multiply(store(tmp_path, "D", a), store(tmp_path, "E", a.T.copy()), dtype="int32").wraps == "no"
    assert not said


def test_types_that_cannot_wrap_are_not_looked_at(tmp_path: Path, multiply: Any, said: list[str]) -> None:
    a = np.full((40, 30), -128, np.int8)
    run = multiply(store(tmp_path, "A", a), store(tmp_path, "B", a.T.copy()), dtype="int32")
    assert (run.wraps, run.masked, run.not_finite, said) == ("no", {}, 0, [])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k_long", [False, True])
def test_masks_are_counted_once_however_often_they_are_read(
    device: str, k_long: bool, tmp_path: Path, multiply: Any, said: list[str], rng: np.random.Generator
) -> None:
    shape = (20, 3000) if k_long else (130, 60)  # a long k is cut into parts
    a = rng.standard_normal(shape).astype(np.float32)
    b = rng.standard_normal((shape[1], 150)).astype(np.float32)
    for matrix, count in ((a, 7), (b, 5)):
        matrix.flat[rng.choice(matrix.size, count, replace=False)] = -9999.0
    chunk = 500 if k_long else 16
    run = multiply(
        store(tmp_path, "A", a, (16, chunk), _FillValue=-9999.0),
        store(tmp_path, "B", b, (chunk, 16), missing_value=-9999.0),
        device=device,
        **({"device_memory": None} if k_long else {}),
    )
    assert run.masked == {"A": 7, "B": 5}
    assert any("7 elements of A" in message for message in said)
    assert run.to_json()["masked"] == {"A": 7, "B": 5}


def test_a_mask_that_occurs_nowhere_is_zero_of_them(tmp_path: Path, multiply: Any) -> None:
    a = np.ones((30, 20), np.float32)
    run = multiply(store(tmp_path, "A", a, _FillValue=-9999.0), store(tmp_path, "B", a.T.copy()))
    assert run.masked == {"A": 0}


@pytest.mark.parametrize("device", DEVICES)
def test_nan_is_told_with_its_share_and_where_it_comes_from(
    device: str, tmp_path: Path, multiply: Any, said: list[str]
) -> None:
    a, b = np.ones((100, 40), np.float32), np.ones((40, 90), np.float32)
    a[:60:2, 3] = np.nan
    b[5, 7] = np.inf
    run = multiply(store(tmp_path, "A", a), store(tmp_path, "B", b), device=device)
    with np.errstate(invalid="ignore"):
        expected = ~np.isfinite(a @ b)
    assert run.not_finite == expected.sum()
    (message,) = said
    assert f"{expected.mean():.2%}" in message
    assert "30 of its 100 rows" in message
    assert "1 of its 90 columns" in message


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("dtype", "attributes", "rows"),
    [
        ("float32", {"_FillValue": 1e20}, 1),
        ("float32", {"_FillValue": 1e20, "valid_max": 1000.0}, 1),  # the range says it already
        ("float32", {"valid_max": 1000.0}, 1),
        ("float16", {"_FillValue": -99.0}, 10),  # not two of them multiplied, but ten added up
    ],
    ids=["fill value", "beyond a range", "range", "many"],
)
def test_infinity_that_a_fill_value_makes(
    dtype: str, attributes: dict[str, Any], rows: int, tmp_path: Path, multiply: Any, said: list[str]
) -> None:
    a = np.ones((50, 40), dtype)
    a[:rows, 4] = attributes.get("_FillValue", 1e20)
    path = store(tmp_path, "X", a, **attributes)
    run = multiply(path, path, transpose_a=True)
    assert run.not_finite == 1
    (message,) = [message for message in said if "finite" in message]
    assert f"sums overflow {dtype}" in message
    assert next(iter(attributes)) in message


def test_a_fill_value_is_no_cause_where_nothing_is_left_to_explain(
    tmp_path: Path, multiply: Any, said: list[str]
) -> None:
    a, b = np.ones((9, 5), np.float32), np.ones((5, 7), np.float32)
    a[2, 3], b[1, 4] = 1e20, np.nan
    multiply(store(tmp_path, "A", a, _FillValue=1e20), store(tmp_path, "B", b))
    (message,) = [message for message in said if "finite" in message]
    assert "overflow" not in message
    assert message.endswith("holds NaN or infinity in 1 of its 7 columns")


def test_each_of_two_causes_is_told(tmp_path: Path, multiply: Any, said: list[str]) -> None:
    a, b = np.array([[np.nan], [3e38]], np.float32), np.array([[10]], np.float32)
    multiply(store(tmp_path, "A", a), store(tmp_path, "B", b))
    (message,) = said
    assert "in 1 of its 2 rows and sums overflow float32" in message


def test_lines_are_those_of_the_stored_factor(tmp_path: Path, multiply: Any, said: list[str]) -> None:
    x = np.ones((300, 20))
    x[7, 3] = np.nan
    path, other = store(tmp_path, "X", x), store(tmp_path, "Y", np.ones((40, 20)))
    multiply(path, path, transpose_a=True)
    assert said.pop().endswith("X, holds NaN or infinity in 1 of its 20 columns")
    multiply(other, path, transpose_b=True)
    assert said.pop().endswith("X, holds NaN or infinity in 1 of its 300 rows")


def test_numbers_too_large_for_c_are_not_called_infinite_alone(
    tmp_path: Path, multiply: Any, said: list[str]
) -> None:
    a = np.ones((9, 5))
    a[2, 3] = 1e300
    multiply(store(tmp_path, "A", a), store(tmp_path, "B", np.ones((5, 7))), dtype="float32")
    (message,) = said
    assert "holds NaN or infinity, or numbers too large for float32, in 1 of its 9 rows" in message


def test_sums_that_overflow_by_themselves(tmp_path: Path, multiply: Any, said: list[str]) -> None:
    a = np.full((20, 20), 300.0, np.float16)
    run = multiply(store(tmp_path, "A", a), store(tmp_path, "B", a))
    assert run.not_finite == 400
    (message,) = [message for message in said if "finite" in message]
    assert "sums overflow float16" in message


def test_without_a_check_the_share_is_told_all_the_same(
    tmp_path: Path, multiply: Any, said: list[str]
) -> None:
    a = np.full((20, 20), np.nan)
    run = multiply(store(tmp_path, "A", a), store(tmp_path, "B", a), verify=False)
    assert run.not_finite == 400
    assert "100.00%" in said[0]


@pytest.mark.more
def test_what_stopped_runs_found_counts_too(
    tmp_path: Path, multiply: Any, said: list[str], rng: np.random.Generator
) -> None:
    """A run that goes on looks at its own tiles alone; the record has what the others held."""
    a = rng.integers(-9, 9, (100, 50)) * 2**30
    b = rng.integers(-9, 9, (50, 85)) * 2**30
    a[75, 3] = b[3, 11] = -1
    paths = store(tmp_path, "A", a, missing_value=-1), store(tmp_path, "B", b, missing_value=-1)
    whole = multiply(*paths, device_memory=40_000)
    assert whole.wraps == "possible"
    for stop in (1, whole.plan.tile_count // 2, whole.plan.tile_count - 1):
        done = 0

        def stop_there(event: Any, stop: int = stop) -> None:
            nonlocal done
            done += type(event).__name__ == "UnitDone" and event.name == "matmul"
            if done == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tw.matmul(*paths, tmp_path / f"D{stop}", device_memory=40_000, listener=stop_there)
        run = tw.matmul(*paths, tmp_path / f"D{stop}", device_memory=40_000, listener=lambda event: None)
        assert run.resumed >= stop
        assert (run.wraps, run.masked) == (whole.wraps, whole.masked) == ("possible", {"A": 1, "B": 1})


def test_the_default_listener_logs_them_as_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a = np.full((10, 10), np.nan)
    with caplog.at_level(logging.WARNING):
        tw.matmul(store(tmp_path, "A", a), store(tmp_path, "B", a), tmp_path / "C")
    assert any("not finite" in record.message for record in caplog.records)


def test_the_result_itself_says_what_the_warnings_said(tmp_path: Path, multiply: Any) -> None:
    """Its text is all that is left of a run that was quiet."""
    a = np.ones((20, 10), np.float32)
    run = multiply(store(tmp_path, "A", a), store(tmp_path, "B", a.T.copy()))
    assert "but " not in str(run)
    a[0, 0], a[1, 1] = np.nan, -9999
    run = multiply(store(tmp_path, "D", a, _FillValue=-9999.0), store(tmp_path, "E", a.T.copy()))
    last = str(run).splitlines()[-1]
    assert last.startswith(
        "but elements that stand for missing ones were multiplied (1 of A), and 0.0975 of C's"
    )
    b = np.full((20, 10), 100, np.int8)
    run = multiply(store(tmp_path, "F", b), store(tmp_path, "G", b.T.copy()), dtype="int16")
    assert str(run).splitlines()[-1] == "but sums may have wrapped in int16"
