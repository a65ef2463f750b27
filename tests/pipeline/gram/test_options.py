"""What a Gram matrix is refused for, each by the error that names what was found and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.pipeline.gram import naive
from tilewright.pipeline.errors import DTypeError, OptionError, ShapeError, StoreError
from tilewright.pipeline.gram.options import GramRequest, open_matrices
from tilewright.pipeline.gram.transforms import form_of, result_dtype


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with arrays that the tests only read."""
    folder = tmp_path_factory.mktemp("arrays")
    naive.put(folder / "x.zarr", np.arange(24.0).reshape(6, 4), dimension_names=("time", "place"))
    naive.put(folder / "f.zarr", np.zeros((3, 2), "f4"))
    naive.put(folder / "u.zarr", np.arange(24, dtype="u1").reshape(6, 4))
    naive.put(folder / "square.zarr", np.eye(5))
    naive.put(folder / "short.zarr", np.ones((5, 4)))
    naive.put(folder / "one.zarr", np.ones((1, 4)))
    naive.put(folder / "cube.zarr", np.ones((2, 3, 4)))
    for length in (3, 4, 6):
        naive.put(folder / f"v{length}.zarr", np.arange(length) + 1.0)
    return folder


@pytest.fixture
def here(arrays: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(arrays)
    return arrays


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"of": "lines"}, OptionError, "of='lines' is unknown; it may be 'columns', 'rows'"),
    ({"window": 5}, OptionError, "window=5: a band of C cannot be computed alone yet; leave window"),
    ({"missing_as": "pairwise"}, OptionError, "missing_as='pairwise': .* yet; it may be 'mean'"),
    ({"missing_as": "zero"}, OptionError, "missing_as='zero' is unknown; it may be 'mean', 'pairwise'"),
    ({"constant": "nan"}, OptionError, "constant='nan' is unknown; it may be 'error', 'zero'"),
    (
        {"center": None},
        OptionError,
        "center=None is unknown; it may be True, False, 'columns', 'rows', 'both'",
    ),
    ({"center": 1}, OptionError, "center=1 is unknown"),
    (
        {"center": "colums"},
        OptionError,
        "center='colums' is unknown, and names no stored array; it may be True",
    ),
    ({"center": {"column": "v4.zarr"}}, OptionError, "center: the mapping names 'column'; its keys may be"),
    ({"center": {}}, OptionError, "center: the mapping is empty"),
    ({"center": {"columns": 5}}, OptionError, r"center\['columns'\]=5 is no array"),
    (
        {"center": {"rows": "v4.zarr"}},
        ShapeError,
        r"center\['rows'\]: found 4 numbers; x.zarr needs 6, one for",
    ),
    (
        {"center": "v3.zarr"},
        ShapeError,
        "center: found 3 numbers; x.zarr needs 4, one for .*columns or 6, one",
    ),
    ({"center": [1, 2, np.nan, 3]}, OptionError, "center: number 2 is nan; all must be finite"),
    (
        {"center": np.ones((2, 2))},
        ShapeError,
        r"center has 2 dimensions, shape \(2, 2\); it needs one",
    ),
    ({"center": [1j] * 4}, OptionError, "center: complex numbers are given for x.zarr, which holds float64"),
    (
        {"x": "square.zarr", "center": np.ones(5)},
        OptionError,
        "as many rows as columns, 5, .*{'columns': values}",
    ),
    ({"scale": "both"}, OptionError, "scale='both' is unknown, and names no stored array; it may be True"),
    ({"scale": [1, "a", 2, 3]}, DTypeError, "scale holds <U.*; it needs numbers"),
    (
        {"scale": True, "center": "rows"},
        OptionError,
        "scale=True beside center='rows': .* give them as factors",
    ),
    ({"scale": "columns", "center": "both"}, OptionError, "scale='columns' beside center='both'"),
    ({"missing": "NA"}, OptionError, "missing='NA' is neither a number nor 'nan'"),
    ({"missing": True}, OptionError, "missing=True is neither a number nor 'nan'"),
    (
        {"missing": np.zeros((6, 4), bool)},
        OptionError,
        "missing: a mask array cannot be applied yet; give the number",
    ),
    ({"x": "u.zarr", "missing": -1}, OptionError, "missing=-1: X, u.zarr, holds uint8, .* from 0 to 255"),
    ({"x": "u.zarr", "missing": 0.5}, OptionError, "missing=0.5: X, u.zarr, holds uint8"),
    (
        {"x": "u.zarr", "missing": "nan"},
        OptionError,
        "missing='nan': X, u.zarr, holds uint8, which has no NaN",
    ),
    ({"missing": 10**400}, OptionError, "missing=1000.* holds float64, which has no such number"),
    ({"divide": "m"}, OptionError, "divide='m' is no number and no word that is known; it may be 'n', 'n-1'"),
    ({"divide": "pairs"}, OptionError, "divide='pairs': .* yet; it may be a number, 'n' or 'n-1'"),
    ({"divide": 0}, OptionError, "divide=0: sums cannot be divided by that"),
    ({"divide": np.nan}, OptionError, "divide=nan: sums cannot be divided"),
    ({"divide": 1e-320}, OptionError, "divide=1e-320: sums cannot"),
    ({"divide": [1]}, OptionError, r"divide=\[1\] is no number"),
    (
        {"x": "one.zarr", "divide": "n-1"},
        OptionError,
        "divide='n-1': a sum over 1 row has nothing to divide by",
    ),
    (
        {"weights": "v4.zarr"},
        ShapeError,
        "weights: found 4 numbers; x.zarr needs 6, one for each of the rows",
    ),
    ({"weights": 5}, OptionError, "weights=5 is no array; give one number for each of the rows"),
    (
        {"weights": [1, 1, -1, 1, 1, 1]},
        OptionError,
        "weights: number 2 is -1.0; weights must be finite numbers",
    ),
    ({"weights": np.zeros(6)}, OptionError, "weights: they add up to 0.0"),
    ({"weights": np.ones(6) * 1j}, OptionError, "weights: number 0 is"),
    ({"weights": "nowhere.zarr"}, StoreError, "weights: there is no Zarr array at nowhere.zarr"),
    (
        {"weights": [1, 0, 0, 0, 0, 0], "divide": "n-1"},
        OptionError,
        "divide='n-1': a sum over 6 rows has nothing",
    ),
    (
        {"sum_over": "tiem"},
        OptionError,
        r"sum_over='tiem' is no axis of x.zarr; its axes are 0 \('time'\), 1",
    ),
    ({"sum_over": 2}, OptionError, "sum_over=2 is no axis"),
    ({"sum_over": True}, OptionError, "sum_over=True is no axis"),
    ({"sum_over": ("time", "place")}, OptionError, "names 2 axes: one of the two that X has is summed over"),
    ({"sum_over": "time", "of": "rows"}, OptionError, "of='rows' and sum_over='time' contradict each other"),
    ({"x": "cube.zarr"}, ShapeError, r"X: cube.zarr has shape \(2, 3, 4\); it must have 2 dimensions"),
    ({"y": "short.zarr"}, ShapeError, "x.zarr has 6 rows and short.zarr has 5; both are summed over"),
    ({"y": "u.zarr", "center": np.ones(4)}, OptionError, "center: numbers of one matrix are given for two"),
    (
        {"x": "u.zarr", "dtype": "i4", "center": True},
        DTypeError,
        "dtype=int32: numbers that are centred, .* are no integers",
    ),
    ({"dtype": "nonsense", "center": True}, DTypeError, "nonsense"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_wrong_options(here: Path, options: dict[str, Any], error: type[Exception], message: str) -> None:
    def check() -> None:
        request = GramRequest(**{"x": "x.zarr", **options}).checked()
        matrices = open_matrices(request)
        result_dtype(matrices, form_of(matrices), request.dtype)

    with pytest.raises(error, match=message):
        check()


def test_values_may_be_given_in_many_ways(here: Path) -> None:
    expected = np.arange(4) + 1.0
    stored = zarr.open_array(here / "v4.zarr", mode="r")
    for given in ("v4.zarr", Path("v4.zarr"), stored, expected, [1, 2, 3, 4], expected.astype("i1")):
        for value in (given, {"columns": given}):
            (treatment,) = open_matrices(GramRequest("x.zarr", center=value).checked()).treatments.values()
            np.testing.assert_array_equal(treatment.offsets["columns"], expected)
    (treatment,) = open_matrices(GramRequest("x.zarr", scale="v6.zarr").checked()).treatments.values()
    assert list(treatment.factors) == ["rows"]


def test_a_sum_is_over_the_axis_that_is_named(here: Path) -> None:
    for axis, of in (
        ("time", "columns"),
        (0, "columns"),
        ("0", "columns"),
        ("place", "rows"),
        (np.int64(1), "rows"),
    ):
        assert open_matrices(GramRequest("x.zarr", sum_over=axis).checked()).of == of
    assert open_matrices(GramRequest("x.zarr", sum_over=["place"], of="rows").checked()).of == "rows"


def test_a_code_is_the_number_that_is_stored(here: Path) -> None:
    request = GramRequest("f.zarr", missing=-9999.9).checked()
    (treatment,) = open_matrices(request).treatments.values()
    assert treatment.missing == float(np.float32(-9999.9))
    for nan in ("nan", "NaN", float("nan"), np.float32("nan")):
        assert GramRequest("f.zarr", missing=nan).checked().missing == "nan"
