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
from tilewright.pipeline.store.region import Flattened


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
    naive.put(folder / "none.zarr", np.ones((0, 4)))
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
    ({"window": -1}, OptionError, "window=-1: give how many variables before and behind each are wanted"),
    ({"window": 1.5}, OptionError, "window=1.5: give how many variables"),
    ({"window": True}, OptionError, "window=True: give how many variables"),
    ({"window": (1, 2, 3)}, OptionError, r"window=\(1, 2, 3\): give how many variables"),
    ({"missing_as": "pairwise"}, OptionError, "missing_as='pairwise': nobody said what stands for a missing"),
    ({"missing_as": "zero"}, OptionError, "missing_as='zero' is unknown; it may be 'mean', 'pairwise'"),
    ({"constant": "none"}, OptionError, "constant='none' is unknown; it may be 'error', 'zero', 'nan'"),
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
    (
        {"scale": True, "center": {"rows": [1, 2, 3, 4, 5, 6]}},
        OptionError,
        "scale=True beside center={'rows': values}: .* give them as factors",
    ),
    (
        {"scale": "rows", "center": [1, 2, 3, 4]},
        OptionError,
        "scale='rows' beside center={'columns': values}: the deviations of the rows once columns are centred",
    ),
    ({"missing": "NA"}, OptionError, "missing='NA' is neither a number nor 'nan'"),
    ({"missing": True}, OptionError, "missing=True is neither a number, nor 'nan', nor a mask"),
    (
        {"missing": np.zeros((4, 6), bool)},
        ShapeError,
        r"missing: the mask has shape \(4, 6\), and X, .*\(6, 4\)",
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
    ({"divide": "pairs"}, OptionError, "divide='pairs': nobody said what stands for a missing number"),
    (
        {"x": "f.zarr", "missing": "nan", "missing_as": "pairwise", "divide": 2},
        OptionError,
        "divides each element by its own number of pairs, not by 2.0",
    ),
    (
        {"missing": 3, "missing_as": "pairwise", "center": True, "scale": {"rows": [1, 2, 3, 4, 5, 6]}},
        OptionError,
        "missing_as='pairwise' beside center=True and factors of the rows: .*leave the factors of the rows",
    ),
    ({"divide": 0}, OptionError, "divide=0: sums cannot be divided by that"),
    ({"divide": np.nan}, OptionError, "divide=nan: sums cannot be divided"),
    ({"divide": 1e-320}, OptionError, "divide=1e-320: sums cannot"),
    ({"divide": [1]}, OptionError, r"divide=\[1\] is no number"),
    (
        {"x": "one.zarr", "divide": "n-1"},
        OptionError,
        r"divide='n-1': X \(one.zarr\) has 1 row; at least 2 are needed, or a number, .* \(divide, --divide\)$",
    ),
    ({"x": "none.zarr", "divide": "n"}, OptionError, r"has 0 rows; at least 1 is needed, or a number"),
    (
        {"x": "one.zarr", "divide": "n-1", "divisor_is_asked": False},
        OptionError,
        r"^X \(one.zarr\) has 1 row; at least 2 are needed$",
    ),
    (
        {"counts": "c.zarr", "divisor_is_asked": False},
        OptionError,
        r"ask for missing_as='pairwise' \(--missing-as\), or leave counts",
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
        "has 6 rows, of which 1 has a weight above 0; at least 2 are needed",
    ),
    (
        {"sum_over": "tiem"},
        OptionError,
        r"sum_over='tiem' is no axis of x.zarr; its axes are 0 \('time'\), 1",
    ),
    ({"sum_over": 2}, OptionError, "sum_over=2 is no axis"),
    ({"sum_over": True}, OptionError, "sum_over=True is no axis"),
    (
        {"sum_over": ("time", "place")},
        OptionError,
        "names all 2 axes of x.zarr: at least one .* its axes are 0",
    ),
    ({"sum_over": []}, OptionError, "names no axis of x.zarr"),
    ({"sum_over": [0, "time"]}, OptionError, r"sum_over=\[0, 'time'\] names an axis of x.zarr twice"),
    ({"sum_over": "time", "of": "rows"}, OptionError, "of='rows' and sum_over='time' contradict each other"),
    (
        {"x": "cube.zarr"},
        ShapeError,
        r"X: cube.zarr has shape \(2, 3, 4\); it must have 2 dimensions, or sum_over .*: 0, 1, 2",
    ),
    (
        {"x": "v3.zarr"},
        ShapeError,
        r"X: v3.zarr has shape \(3,\); it must have 2 dimensions or more: .* one column, \(3, 1\), by index.reshape",
    ),
    (
        {"x": "cube.zarr", "sum_over": 3},
        OptionError,
        "sum_over=3 is no axis of cube.zarr; its axes are 0, 1, 2",
    ),
    ({"x": "cube.zarr", "sum_over": (0, 1, 2)}, OptionError, "names all 3 axes of cube.zarr"),
    (
        {"x": "cube.zarr", "sum_over": 0, "of": "rows"},
        OptionError,
        "X has 3 dimensions, and sum_over alone says",
    ),
    (
        {"x": "cube.zarr", "y": "x.zarr", "sum_over": 0},
        ShapeError,
        "summed over have the lengths 2 in cube.zarr and 6 in x.zarr",
    ),
    ({"weights": {}}, OptionError, "weights: the mapping is empty"),
    ({"weights": {"tiem": [1]}}, OptionError, "weights='tiem' is no axis of x.zarr"),
    (
        {"weights": {"place": "v4.zarr"}},
        OptionError,
        "weights: axis 'place' of x.zarr is not summed over; .* summed over is 0",
    ),
    ({"weights": {"time": "v6.zarr", 0: "v6.zarr"}}, OptionError, "axis 0 of x.zarr is given twice"),
    ({"weights": {0: "v4.zarr"}}, ShapeError, r"weights\[0\]: found 4 numbers; that axis of x.zarr has 6"),
    (
        {"weights": {"time": "cosine"}},
        OptionError,
        r"weights\['time'\]='cosine' is unknown, and names no stored array; it may be 'cos', for the cosines",
    ),
    (
        {"weights": "cos"},
        OptionError,
        r"weights='cos' is said of an axis: .*\(--weights lat=cos\); the axes of x",
    ),
    ({"weights": {0: 3}}, OptionError, r"weights\[0\]=3 is no array"),
    ({"weights": {0: [1j] * 6}}, OptionError, r"weights\[0\] holds complex numbers"),
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


def test_more_axes_are_flattened_and_the_last_one_is_of_the_columns(here: Path) -> None:
    for axes, of, rows, columns in (
        (0, "columns", (0,), (1, 2)),
        ((2, 1), "rows", (0,), (1, 2)),
        ([0, 2], "rows", (1,), (0, 2)),
        (1, "columns", (1,), (0, 2)),
    ):
        matrices = open_matrices(GramRequest("cube.zarr", sum_over=axes).checked())
        view = matrices.arrays["X"]
        assert isinstance(view, Flattened)
        assert (matrices.of, view.rows, view.columns) == (of, rows, columns)


def test_weights_along_some_axes_are_multiplied(here: Path) -> None:
    request = GramRequest("cube.zarr", sum_over=(0, 2), weights={0: [1, 2], "2": [1, 3, 5, 7]}).checked()
    np.testing.assert_array_equal(open_matrices(request).weights, [1, 3, 5, 7, 2, 6, 10, 14])
    request = GramRequest("cube.zarr", sum_over=(0, 2), weights={2: [1, 3, 5, 7]}).checked()
    np.testing.assert_array_equal(open_matrices(request).weights, [1, 3, 5, 7, 1, 3, 5, 7])


def test_a_code_is_the_number_that_is_stored(here: Path) -> None:
    request = GramRequest("f.zarr", missing=-9999.9).checked()
    (treatment,) = open_matrices(request).treatments.values()
    assert treatment.missing == float(np.float32(-9999.9))
    for nan in ("nan", "NaN", float("nan"), np.float32("nan")):
        assert GramRequest("f.zarr", missing=nan).checked().missing == "nan"
