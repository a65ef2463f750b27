"""What is made of options and statistics, applied to whole arrays by NumPy, against the few lines that say what a Gram
matrix is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.gram import naive
from tilewright.kernels.passes.moments import moments_of
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.gram.options import GramRequest, Matrices, axis_of, open_matrices
from tilewright.pipeline.gram.transforms import (
    Made,
    check_lines,
    form_of,
    made_exact,
    made_transformed,
    result_dtype,
    stays_exact,
    wanted_of,
)
from tilewright.pipeline.plan.transform import finished, transformed

ALL = slice(None)


def made_of(request: GramRequest, x: dict[str, np.ndarray]) -> tuple[Matrices, Made, np.dtype]:
    """The transforms and the epilogue of whole arrays, and C's dtype."""
    request = request.checked()
    matrices = open_matrices(request)
    form = form_of(matrices)
    found: dict[str, Any] = {}
    for role, array in x.items():
        if (want := wanted_of(matrices, role, form)) is not None:
            found[role] = {
                side: moments_of(array, 1 - axis_of(side), want.missing, want.weights_of(side, ALL))
                for side in want.sides
            }
            check_lines(matrices, role, found[role], request.constant)
    dtype = np.dtype(result_dtype(matrices, form, request.dtype))
    if form == "exact" and stays_exact(matrices, found):

        def thin(role: str, vector: np.ndarray) -> np.ndarray:
            lines = x[role] if matrices.of == "rows" else x[role].T
            return lines.astype(float) @ vector

        return matrices, made_exact(matrices, found, thin), dtype
    return matrices, made_transformed(matrices, found, dtype, request.conjugated), dtype


def computed(tmp_path: Path, x: np.ndarray, y: np.ndarray | None = None, **options: Any) -> np.ndarray:
    paths = {"x": naive.put(tmp_path / "x.zarr", x, overwrite=True)}
    arrays = {"X": x}
    if y is not None:
        paths["y"], arrays["Y"] = naive.put(tmp_path / "y.zarr", y, overwrite=True), y
    matrices, made, dtype = made_of(GramRequest(**paths, **options), arrays)
    factors = [
        transformed(one, array, ALL, ALL) if one is not None else array
        for one, array in zip(made.transforms, (x, x if y is None else y), strict=True)
    ]
    left, right = (factor.T if matrices.of == "rows" else factor for factor in factors)
    if left.dtype.kind in "iu":
        left, right = left.astype(np.int64), right.astype(np.int64)
    sums = left.T @ right
    return sums if made.epilogue is None else finished(made.epilogue, sums, ALL, ALL, dtype)


def numbers(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Far enough from 0 that sums which are not centred before they are rounded would show."""
    kind = np.dtype(dtype)
    values = 30 * rng.standard_normal(shape) + 20
    if kind.kind == "c":
        values = values + 1j * (rng.standard_normal(shape) - 5)
    if kind.kind == "u":
        values = np.abs(values)
    return values.astype(kind)


def assert_close(found: np.ndarray, expected: np.ndarray, scale: float | None = None) -> None:
    if found.dtype.kind in "iu":
        np.testing.assert_array_equal(found, expected)
        return
    eps = np.finfo(found.dtype).eps
    largest = scale or (np.abs(expected).max() if expected.size else 0)
    np.testing.assert_allclose(found, expected, rtol=200 * eps, atol=200 * eps * largest)


DTYPES = ("i1", "u1", "i2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")


@given(data=st.data())
def test_the_result_is_that_of_the_definition(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.integers(3, 30)), draw(st.integers(3, 30))
    of = draw(st.sampled_from(["columns", "rows"]))
    x = numbers(rng, shape, dtype)
    options: dict[str, Any] = {
        "of": of,
        "center": draw(st.sampled_from([False, True, "columns", "rows", "both"])),
        "divide": draw(st.sampled_from([None, "n", "n-1", 7.5])),
    }
    options["scale"] = options["center"] in (False, True, of) and draw(st.booleans())
    if draw(st.booleans(), label="missing"):
        there = rng.random(shape) < 0.8
        there[:2] = there[:, :2] = True
        options["missing"] = "nan" if x.dtype.kind in "fc" else 3
        x = np.where(there, np.where(x == 3, 4, x), np.nan if x.dtype.kind in "fc" else 3).astype(dtype)
    if draw(st.booleans(), label="weights"):
        length = shape[0 if of == "columns" else 1]
        options["weights"] = np.ones(length) if draw(st.booleans()) else rng.random(length) + 0.1
    y = None
    if draw(st.booleans(), label="two"):
        beside = draw(st.integers(3, 20))
        y = numbers(rng, (shape[0], beside) if of == "columns" else (beside, shape[1]), dtype)
        if options.get("missing") == 3:
            y[y == 3] = 4
    found = computed(tmp_path_factory.mktemp("gram"), x, y, **options)
    expected = naive.gram(x, y=y, **options)
    plain = naive.gram(x, y=y, **{**options, "center": False}) if not options["scale"] else expected
    assert_close(found, expected, float(np.abs(plain).max()) if found.dtype == np.float64 else None)


@pytest.mark.parametrize("dtype", ["i1", "f4", "f8", "c16"])
@pytest.mark.parametrize("of", ["columns", "rows"])
def test_it_equals_numpys_covariance(tmp_path: Path, rng: np.random.Generator, dtype: str, of: str) -> None:
    x = numbers(rng, (13, 9), dtype)
    right = {"of": of, "center": True, "divide": "n-1", "conjugated": "right"}
    weights = rng.random(13 if of == "columns" else 9)
    by_rows = of == "rows"
    assert_close(computed(tmp_path, x, **right), np.cov(x, rowvar=by_rows))
    assert_close(computed(tmp_path, x, weights=weights, **right), np.cov(x, rowvar=by_rows, aweights=weights))
    biased = {**right, "divide": "n"}
    assert_close(computed(tmp_path, x, **biased), np.cov(x, rowvar=by_rows, bias=True))
    correlation = computed(tmp_path, x, scale=True, **right)
    assert_close(correlation, np.corrcoef(x, rowvar=by_rows))


def test_missing_numbers_are_taken_for_the_mean(tmp_path: Path, rng: np.random.Generator) -> None:
    """np.ma.cov divides each element by its own number of pairs, here all by what no number is missing of."""
    x = numbers(rng, (25, 7), "f8")
    x[rng.random(x.shape) < 0.2] = np.nan
    found = computed(tmp_path, x, center=True, divide="n-1", missing="nan")
    masked = np.ma.masked_invalid(x)
    there = (~masked.mask).astype(float)
    expected = np.ma.cov(masked, rowvar=False) * (there.T @ there - 1) / (len(x) - 1)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    filled = np.where(np.isnan(x), np.nanmean(x, 0), x)
    correlation = computed(tmp_path, x, center=True, scale=True, divide="n-1", missing="nan")
    np.testing.assert_allclose(correlation, np.corrcoef(filled, rowvar=False), rtol=1e-12)


def test_numbers_that_are_given_are_subtracted_and_multiplied(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    x = numbers(rng, (6, 4), "f8")
    rows, columns = rng.random(6), rng.random(4)
    found = computed(tmp_path, x, center=columns, scale={"rows": rows, "columns": columns})
    treated = (x - columns) * rows[:, np.newaxis] * columns
    np.testing.assert_allclose(found, treated.T @ treated, rtol=1e-13)
    whole = numbers(rng, (6, 4), "i4")
    found = computed(tmp_path, whole, center=[*range(6)], scale=naive.put(tmp_path / "f.zarr", columns))
    treated = (whole - np.arange(6)[:, np.newaxis]) * columns
    np.testing.assert_allclose(found, treated.T @ treated, rtol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "options", "form"),
    [
        ("i1", {}, "plain"),
        ("f4", {}, "plain"),
        ("c8", {}, "transformed"),
        ("i1", {"divide": 3}, "exact"),
        ("f4", {"divide": 3}, "transformed"),
        ("i1", {"center": True, "scale": True}, "exact"),
        ("i1", {"center": "rows"}, "exact"),
        ("i1", {"center": "rows", "scale": np.ones(4)}, "transformed"),
        ("i1", {"center": np.ones(4)}, "transformed"),
        ("i1", {"missing": -1}, "transformed"),
        ("i1", {"weights": np.ones(6)}, "transformed"),
        ("i1", {"scale": "rows"}, "transformed"),
    ],
)
def test_integers_stay_integers_where_their_sums_can_be_finished(
    tmp_path: Path, dtype: str, options: dict[str, Any], form: str
) -> None:
    x = naive.put(tmp_path / "x.zarr", np.arange(24).reshape(6, 4).astype(dtype))
    assert form_of(open_matrices(GramRequest(x, **options).checked())) == form


@pytest.mark.parametrize(
    ("values", "exact"),
    [
        (np.tile([2**23, 2**23 + 2**16], 3), True),
        (np.tile([2**23, 2**23 + 1], 3), False),  # whose variance would lose too many digits
        (np.tile([2**30, -(2**30)], 3), False),  # whose squares add up to more than 2^53
        (np.tile([2**25, -(2**25)], 1), True),
    ],
)
def test_integers_are_multiplied_as_floats_where_their_sums_would_lose_digits(
    tmp_path: Path, values: np.ndarray, exact: bool
) -> None:
    x = values[:, np.newaxis] + np.arange(2)
    path = naive.put(tmp_path / "x.zarr", x)
    _, made, dtype = made_of(GramRequest(path, center=True, divide="n-1"), {"X": x})
    assert (made.transforms == (None, None)) == exact
    assert dtype == np.float64
    found = computed(tmp_path, x, center=True, divide="n-1")
    np.testing.assert_allclose(found, np.cov(x, rowvar=False), rtol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        ("i1", {"center": True}, "f8"),
        ("i1", {"center": True, "missing": -1}, "f4"),
        ("i1", {"center": True, "missing": -1, "dtype": "f8"}, "f8"),
        ("u2", {"weights": np.ones(6)}, "f4"),
        ("i4", {"center": True, "missing": -1}, "f8"),
        ("i8", {"center": True}, "f8"),
        ("f2", {"center": True}, "f4"),
        ("f4", {"center": True}, "f4"),
        ("f4", {"center": True, "dtype": "f8"}, "f8"),
        ("c8", {"center": True}, "c8"),
    ],
)
def test_dtype_of_the_result(tmp_path: Path, dtype: str, options: dict[str, Any], expected: str) -> None:
    x = np.arange(24).reshape(6, 4).astype(dtype)
    assert computed(tmp_path, x, **options).dtype == np.dtype(expected)


def test_constant_lines_are_refused_or_count_as_0(tmp_path: Path, rng: np.random.Generator) -> None:
    for dtype in ("i1", "f4", "c8"):
        x = numbers(rng, (6, 9), dtype)
        x[:, [1, 4]] = 7
        with pytest.raises(
            OptionError, match=r"2 columns \(1, 4\) of .*x.zarr are constant.*constant='zero'"
        ):
            computed(tmp_path, x, center=True, scale=True, divide="n-1")
        found = computed(tmp_path, x, center=True, scale=True, divide="n-1", constant="zero")
        assert not found[[1, 4]].any()
        assert not found[:, [1, 4]].any()
        kept = [0, 2, 3, 5, 6, 7, 8]
        assert_close(found[np.ix_(kept, kept)].conj(), np.corrcoef(x[:, kept], rowvar=False))


def test_deviations_beyond_double_precision_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.standard_normal((600, 3))
    x[:, 1] *= 1e200
    with pytest.raises(OptionError, match=r"scale: the squares of 1 column \(1\) of .*x.zarr exceed double"):
        computed(tmp_path, x, center=True, scale=True)
    x[:, 1] /= 1e200
    x[3, 1] = np.inf  # which is not refused: what it makes of C, IEEE says
    found = computed(tmp_path, x, center=True, scale=True, divide="n-1")
    assert np.isnan(found[1]).all()
    assert found[0, 0] == found[2, 2] == 1
    with pytest.raises(
        OptionError, match=r"scale: the factor of 3 columns \(0, 1, 2\) of .* exceeds float32"
    ):
        computed(tmp_path, x * 1e-60, center=True, scale={"columns": [1e60] * 3}, dtype="f4")


def test_lines_without_a_number_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    x = numbers(rng, (8, 9), "f4")
    x[:, [0, 2, 3, 5, 6, 7]] = np.nan
    with pytest.raises(
        OptionError, match=r"missing='nan': 6 columns \(0, 2, 3, 5, 6, \.\.\.\) of .*x.zarr have no"
    ):
        computed(tmp_path, x, center=True, missing="nan")
    with pytest.raises(OptionError, match=r"1 row \(2\) of"):
        computed(tmp_path, np.where(np.arange(8)[:, np.newaxis] == 2, 0, 1), center="rows", missing=0)
    computed(tmp_path, x, missing="nan")  # as they are left out, no mean is needed
    with pytest.raises(
        OptionError, match=r"6 columns .* or keep them with constant='zero' \(--constant zero\): .* is NaN"
    ):
        computed(tmp_path, x, center=True, missing="nan", missing_as="pairwise")
    gone = np.where(np.arange(8)[:, np.newaxis] == 2, np.nan, np.ones_like(x))
    with pytest.raises(
        OptionError, match=r"1 row .* or keep them with constant='zero' \(--constant zero\): no pair"
    ):
        computed(tmp_path, gone, center="rows", missing="nan", missing_as="pairwise")


def test_numbers_that_nobody_said_are_missing_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    """Beside a number that stands for missing ones, and where they would leave no number in C."""
    x = rng.integers(-1, 3, (6, 5)).astype("f4")
    x[2, [1, 3]] = np.nan
    where = r"X: .*x.zarr holds NaN, infinities, .*, first in "
    with pytest.raises(
        OptionError,
        match=where + r"column 1, with NaN in row 2 \(2 columns in all\); missing=-1 names no NaN: .* mask",
    ):
        computed(tmp_path, x, center=True, scale=True, missing=-1)
    with pytest.raises(
        OptionError, match=where + r"row 2, with NaN in column 1 \(1 row in all\); missing=-1 names no NaN"
    ):
        computed(tmp_path, x, center="rows", divide="2pq", missing=-1)
    with pytest.raises(
        OptionError,
        match=where + r"row 2, with NaN in column 1 \(1 row in all\); say what stands for a missing number",
    ):
        computed(tmp_path, x, center="rows")
    with pytest.raises(
        OptionError, match=where + r"column 0, with inf in row 0 \(5 columns in all\); say what stands"
    ):
        computed(tmp_path, np.where(x == x, np.inf, x), center=True)
    found = computed(tmp_path, x, center=True)
    assert np.isnan(found[[1, 3]]).all()
    assert np.isfinite(found[np.ix_([0, 2, 4], [0, 2, 4])]).all()
