"""Means and second moments of lines against NumPy, however the elements are divided among parts."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sampling import with_others
from tilewright.kernels.passes import moments
from tilewright.kernels.passes.moments import Moments, moments_of

DTYPES = with_others(["u1", "i8", "u8", "f2", "f4", "f8", "c16"], ["i1", "i2", "u4", "c8"])


def numbers(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        info = np.iinfo(kind)
        return rng.integers(info.min, info.max, shape, kind, endpoint=True)
    values = rng.standard_normal(shape) + 3
    return (values + 1j * rng.standard_normal(shape) if kind.kind == "c" else values).astype(kind)


def check(found: Moments, x: np.ndarray, there: np.ndarray, weights: np.ndarray | None) -> None:
    """Against the columns of x."""
    for j in range(x.shape[1]):
        kept = there[:, j] & (True if weights is None else weights != 0)
        column, heavy = x[kept, j], np.ones(kept.sum()) if weights is None else weights[kept]
        assert found.count[j] == len(column)
        if not len(column):
            assert found.mean[j] == found.second[j] == found.weight[j] == 0
            continue
        wide = column.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
        mean = (wide * heavy).sum() / heavy.sum()
        largest = np.abs(wide).max()
        np.testing.assert_allclose(found.mean[j], mean, rtol=1e-13, atol=1e-13 * largest)
        second = (np.abs(wide - mean) ** 2 * heavy).sum()
        np.testing.assert_allclose(found.second[j], second, rtol=1e-11, atol=1e-13 * largest**2)
        np.testing.assert_allclose(found.weight[j], heavy.sum(), rtol=1e-13)
        parts = (column.real, column.imag) if x.dtype.kind == "c" else (column,)
        least, most = ([each[j].real, each[j].imag][: len(parts)] for each in (found.least, found.most))
        assert least == [part.min() for part in parts]
        assert most == [part.max() for part in parts]
        negative = [found.negative[j].real, found.negative[j].imag][: len(parts)]
        none = np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf
        assert negative == [part[part < 0].max(initial=none) for part in parts]
        assert found.constant[j] == (len(np.unique(column)) == 1)
        if x.dtype.kind in "iu" and weights is None:
            assert found.exact_sums[j] == sum(column.tolist())


@given(data=st.data())
def test_moments_are_numpys(data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = numbers(rng, (draw(st.integers(1, 40)), draw(st.integers(1, 12))), draw(st.sampled_from(DTYPES)))
    missing: Any = None
    if draw(st.booleans(), label="missing"):
        missing = "nan" if x.dtype.kind in "fc" else 3
        x[rng.random(x.shape) < draw(st.sampled_from([0.2, 0.9]))] = np.nan if missing == "nan" else 3
    if draw(st.booleans(), label="constant"):
        x[:, 0] = 5
    weights = rng.integers(0, 3, len(x)).astype(float) if draw(st.booleans(), label="weights") else None
    there = np.ones(x.shape, bool) if missing is None else (x == x if missing == "nan" else x != missing)
    cut = draw(st.integers(0, len(x)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(moments, "CELL", (draw(st.integers(1, 50)), draw(st.integers(1, 20))))
        patched.setattr(moments, "NARROW_LENGTH", draw(st.integers(1, 50)))
        total = Moments.of_nothing(x.shape[1], x.dtype)
        for part in (slice(0, cut), slice(cut, len(x))):
            own = None if weights is None else weights[part]
            by_columns = moments_of(x[part], 0, missing, own)
            total.add(by_columns)
            by_rows = moments_of(np.ascontiguousarray(x[part].T), 1, missing, own)
            np.testing.assert_array_equal(by_columns.count, by_rows.count)
            np.testing.assert_allclose(by_columns.mean, by_rows.mean, rtol=1e-12, atol=1e-12)
    check(total, x, there, weights)
    if total.count.any():
        assert (
            total.largest == np.abs(x[there].astype(object)).max()
            or weights is not None
            or x.dtype.kind in "fc"
        )


def test_a_large_mean_costs_no_digits(rng: np.random.Generator) -> None:
    x = 1e9 + rng.standard_normal((1000, 3))
    total = Moments.of_nothing(3, x.dtype)
    for start in range(0, 1000, 100):
        total.add(moments_of(x[start : start + 100], 0))
    np.testing.assert_allclose(total.second, ((x - x.mean(0)) ** 2).sum(0), rtol=1e-7)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2"])
@pytest.mark.parametrize("axis", [0, 1])
def test_narrow_integers_are_summed_exactly(dtype: str, axis: int, rng: np.random.Generator) -> None:
    """Extreme numbers, in a line as long as their sums stay exact; the second moment is rounded twice at most."""
    info, length = np.iinfo(dtype), moments.NARROW_LENGTH
    x = np.full((length, 2), info.max, dtype)
    x[rng.random(length) < 0.5, 0] = info.min
    x[-1, 1] = info.max - 1
    found = moments_of(x if axis == 0 else np.ascontiguousarray(x.T), axis)
    for line in range(2):
        values = x[:, line].astype(object)
        total = sum(values)
        exact = length * sum(values**2) - total**2
        assert found.exact_sums[line] == total
        assert found.mean[line] == total / length
        np.testing.assert_allclose(found.second[line], exact / length, rtol=4e-16)
        assert (found.least[line], found.most[line]) == (min(values), max(values))


@pytest.mark.parametrize("missing", [300, -1.5, np.inf, 2**70])
def test_a_missing_number_that_a_dtype_does_not_hold_is_never_there(missing: float) -> None:
    assert moments_of(np.zeros((3, 2), "i1"), 0, missing).count.tolist() == [3, 3]


def test_numbers_that_are_not_finite_make_no_line_constant() -> None:
    x = np.array([[1, np.inf, 2], [1, 1, 2], [np.nan, 1, 2]], np.float32)
    assert moments_of(x, 0).constant.tolist() == [False, False, True]


@pytest.mark.parametrize("far", [0.0, 1e4, 1e8, 1e12])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_mean_far_from_0_costs_no_digits_of_the_second_moment(
    far: float, weighted: bool, rng: np.random.Generator
) -> None:
    """Of parts that are merged, too, whose means differ by less than double precision tells of them."""
    x = far + rng.standard_normal((1200, 2))
    weights = rng.random(1200) if weighted else None
    heavy = [Fraction(1)] * 1200 if weights is None else [Fraction(one) for one in weights.tolist()]
    found = Moments.of_nothing(2, x.dtype)
    for rows in (slice(0, 700), slice(700, 703), slice(703, 1200)):
        found.add(moments_of(x[rows], 0, weights=None if weights is None else weights[rows]))
    for j in range(2):
        column = [Fraction(one) for one in x[:, j].tolist()]
        mean = sum(w * one for w, one in zip(heavy, column, strict=True)) / sum(heavy)
        second = sum(w * (one - mean) ** 2 for w, one in zip(heavy, column, strict=True))
        assert found.second[j] == pytest.approx(float(second), rel=1e-13)
        assert abs(Fraction(found.mean[j]) + Fraction(found.rest[j]) - mean) < 1e-14


def test_how_far_elements_are_apart() -> None:
    x = np.array([[1, 2**60, 5], [4, 2**60 + 3, 5]])
    assert moments_of(x, 0).spread.tolist() == [3, 0, 0], "as double precision has them"
    assert moments_of(x + 3j, 0).spread.tolist() == [3, 0, 0]
    assert moments_of(np.full((2, 1), np.nan), 0, "nan").spread.tolist() == [0]
    assert np.isnan(moments_of(np.array([[np.inf], [np.inf]]), 0).spread).all()
