"""What an array's metadata say beside its shape and dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import zarr

from tilewright.pipeline.attributes import Names, packing, packing_notice, product_names


def array_of(
    path: Path, dtype: str, attributes: dict[str, Any], zarr_format: Literal[2, 3] = 3, fill_value: Any = 0
) -> zarr.Array[Any]:
    return zarr.create_array(
        path, shape=(2, 2), chunks=(2, 2), dtype=dtype, attributes=attributes, zarr_format=zarr_format,
        fill_value=fill_value,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "attributes", "found"),
    [
        ("i2", {}, {}),
        ("i2", {"scale_factor": 0.1, "add_offset": 273.15}, {"scale_factor": 0.1, "add_offset": 273.15}),
        ("i2", {"scale_factor": 1.0, "add_offset": 0.0}, {}),
        ("f4", {"scale_factor": 2}, {"scale_factor": 2}),
        ("i2", {"_FillValue": -1}, {"_FillValue": -1}),
        ("u1", {"missing_value": 255, "units": "m"}, {"missing_value": 255}),
        ("f4", {"_FillValue": "AAAAAAAA+H8="}, {}),
    ],
)
def test_packed_numbers_are_known_by_their_attributes(
    dtype: str, attributes: dict[str, Any], found: dict[str, Any], tmp_path: Path
) -> None:
    array = array_of(tmp_path / "a", dtype, attributes)
    assert packing(array) == found
    assert (packing_notice("A", array) is not None) == bool(found)


@pytest.mark.parametrize(
    ("dtype", "fill_value", "found"), [("i2", -32767, -32767), ("i2", 0, 0), ("i2", None, 0), ("f4", -1, 0)]
)
def test_in_format_2_a_fill_value_is_a_mask(dtype: str, fill_value: Any, found: int, tmp_path: Path) -> None:
    array = array_of(tmp_path / "a", dtype, {}, 2, fill_value)
    assert packing(array) == ({"fill_value": found} if found else {})
    assert packing(array_of(tmp_path / "b", "i2", {}, 3, -32767)) == {}, "which xarray does not take for one"


@pytest.mark.parametrize(
    ("a", "b", "transposed", "found"),
    [
        (("x", "y"), ("y", "z"), (False, False), ("x", "z")),
        (("y", "x"), ("z", "y"), (True, True), ("x", "z")),
        (("x", "y"), ("x", "y"), (False, True), ("x", "x_2")),
        (("x", "y"), None, (False, False), ("x", None)),
        (None, (None, "z"), (False, False), (None, "z")),
        ((None, "y"), ("y", None), (False, False), None),
        (None, None, (False, False), None),
    ],
)
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_c_has_the_names_of_its_rows_and_columns(
    zarr_format: Literal[2, 3],
    a: Names | None,
    b: Names | None,
    transposed: tuple[bool, bool],
    found: Names | None,
    tmp_path: Path,
) -> None:
    def named(path: Path, names: Names | None) -> zarr.Array[Any]:
        if zarr_format == 3:
            return zarr.create_array(path, shape=(4, 4), dtype="f4", dimension_names=names)
        attributes = {} if names is None else {"_ARRAY_DIMENSIONS": list(names)}
        return zarr.create_array(path, shape=(4, 4), dtype="f4", attributes=attributes, zarr_format=2)

    assert product_names(named(tmp_path / "a", a), named(tmp_path / "b", b), *transposed) == found


@pytest.mark.parametrize("names", ["xy", ["x"], [1, 2], {"x": 1, "y": 2}])
def test_what_are_no_names_is_passed_over(names: Any, tmp_path: Path) -> None:
    array = array_of(tmp_path / "a", "f4", {"_ARRAY_DIMENSIONS": names}, 2)
    assert product_names(array, array, False, False) is None
