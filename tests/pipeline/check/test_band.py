"""The check of a band: the sums over stretches that slide along rows, what it sees, and what it does not call wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.plan.test_band import mask
from tests.sampling import examples
from tilewright.pipeline.check import band as check
from tilewright.pipeline.check.band import verify_band, window_sums
from tilewright.pipeline.check.verify import Verification
from tilewright.pipeline.plan.band import Band


@pytest.fixture(scope="module")
def one_worker() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@given(st.integers(1, 9), st.integers(1, 40), st.data())
def test_sums_over_stretches_are_formed_from_edges_of_blocks(
    length: int, columns: int, data: st.DataObject
) -> None:
    """Of each stretch as long as a block, wherever it begins, also where the ends of a side cut it."""
    first = length * data.draw(st.integers(0, 3))
    block = np.random.default_rng(columns).integers(-9, 9, (3, columns))
    starts = np.arange(-length, first + columns + length)
    stops = np.minimum(starts + length, first + columns)
    whole = np.concatenate([np.zeros((3, first), int), block], axis=1)
    found = window_sums(block, first, starts, stops, length)
    for place, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        expected = whole[:, max(0, start) : max(0, stop)].sum(axis=1)
        np.testing.assert_array_equal(found[:, place], expected)


def stored(path: Path, values: np.ndarray, chunks: tuple[int, int]) -> zarr.Array[Any]:
    array = zarr.create_array(path, shape=values.shape, chunks=chunks, dtype=values.dtype, fill_value=0)
    array[...] = values
    return array


def banded(x: np.ndarray, y: np.ndarray, band: Band, dtype: str) -> np.ndarray:
    """The band of XᵀY."""
    wide = np.dtype(dtype)
    c = x.T.astype(wide) @ y.astype(wide)
    return np.where(mask(*c.shape, band), c, 0).astype(wide)


def verify(
    client: Client, folder: Path, x: np.ndarray, y: np.ndarray, c: np.ndarray, band: Band, **options: Any
) -> Verification:
    arrays = [
        stored(folder / name, values, chunks)
        for name, values, chunks in (("x", x, (7, 12)), ("y", y, (9, 10)), ("c", c, (8, 8)))
    ]
    m = c.shape[0]
    return verify_band(
        client, *arrays, band, transposed=(True, False), listener=lambda event: None,
        cuts=[*range(0, m, 16), m], **options,
    )  # fmt: skip


CASES = [("i1", "i4"), ("u1", "u8"), ("i8", "i8"), ("f4", "f4"), ("f8", "f8"), ("c8", "c8"), ("c16", "c16")]


def numbers(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    values = 20 * rng.standard_normal(shape)
    kind = np.dtype(dtype).kind
    return (
        values + 1j * rng.standard_normal(shape) if kind == "c" else abs(values) if kind == "u" else values
    ).astype(dtype)


@settings(max_examples=examples(12))
@given(st.data())
def test_a_right_band_passes_and_one_wrong_element_does_not(
    one_worker: Client, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Of any dtype and band, in one task or many, wide bands in blocks of columns."""
    draw = data.draw
    dtype, c_dtype = draw(st.sampled_from(CASES))
    k, m, n = (draw(st.integers(1, 70)) for _ in range(3))
    band = Band(draw(st.integers(0, m - 1)), draw(st.integers(0, n - 1)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x, y = numbers(rng, (k, m), dtype), numbers(rng, (k, n), dtype)
    c = banded(x, y, band, c_dtype)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(check, "COLUMNS", draw(st.sampled_from([4, 16, 2048])))
        patched.setattr(check, "LEAST_ROWS", draw(st.sampled_from([8, 2048])))
        patched.setattr(check, "MOST_ROWS", draw(st.sampled_from([16, 2**15])))
        patched.setattr(check, "BLOCK_NBYTES", draw(st.sampled_from([2000, 2**25])))
        folder = tmp_path_factory.mktemp("right")
        found = verify(one_worker, folder, x, y, c, band)
        assert found.passed, found
        row, column = draw(st.integers(0, m - 1)), draw(st.integers(0, n - 1))
        wrong = c.copy()
        wrong[row, column] += 1 if c.dtype.kind in "iu" else 2000 * max(1, np.abs(c).max())
        stretch = range(n)[band.columns(row, n)]
        unit = slice(row // 8 * 8, row // 8 * 8 + 8), slice(column // 8 * 8, column // 8 * 8 + 8)
        failed = verify(one_worker, tmp_path_factory.mktemp("wrong"), x, y, wrong, band)
    if not mask(m, n, band)[unit].any():
        assert failed.passed, "nobody looks there but an audit"
        return
    assert not failed.passed
    assert failed.worst is not None
    assert failed.worst == (row, stretch.start, stretch.stop)
    ((top, bottom, *_),) = failed.wrong
    assert top == row // 16 * 16
    assert top <= row < bottom
    assert ("outside the band" in str(failed)) == (column not in stretch)


def test_nan_and_infinity_decide_what_they_should(one_worker: Client, tmp_path: Path) -> None:
    """A whole row, or column, as far as the band goes; and nothing hides behind them."""
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((20, 50)).astype("f4"), rng.standard_normal((20, 50)).astype("f4")
    x[3, 20], y[5, 30], x[7, 40] = np.nan, np.nan, np.inf
    band = Band(6, 4)
    with np.errstate(invalid="ignore"):
        c = banded(x, y, band, "f4")
    found = verify(one_worker, tmp_path / "right", x, y, c, band)
    assert found.passed, found
    assert found.special_rows == 2
    assert found.unchecked == 11
    for place, value in {(20, 21): 1.0, (40, 40): 7.0, (27, 30): 2.0, (25, 29): 100.0}.items():
        wrong = c.copy()
        wrong[place] = value
        failed = verify(one_worker, tmp_path / f"wrong{place}", x, y, wrong, band)
        assert not failed.passed, place
        assert failed.worst is not None
        assert failed.worst[0] == place[0]


@pytest.mark.parametrize("size", [1e-170, 1e160])
def test_numbers_whose_squares_leave_double_precision_are_compared(
    one_worker: Client, tmp_path: Path, size: float
) -> None:
    rng = np.random.default_rng(1)
    x, y = size * rng.standard_normal((20, 50)), rng.standard_normal((20, 50))
    band = Band(3, 3)
    c = banded(x, y, band, "f8")
    assert verify(one_worker, tmp_path / "right", x, y, c, band).passed
    c[7, 8] *= 1.01
    failed = verify(one_worker, tmp_path / "wrong", x, y, c, band)
    assert not failed.passed
    assert not failed.unchecked


def test_what_is_empty_passes(one_worker: Client, tmp_path: Path) -> None:
    nothing = np.zeros((0, 9), "f4")
    assert verify(one_worker, tmp_path, nothing, nothing, np.zeros((9, 9), "f4"), Band(2, 2)).passed
