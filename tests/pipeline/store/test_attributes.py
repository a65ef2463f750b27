"""What an array's metadata say beside its shape and dtype."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numcodecs
import numpy as np
import pytest
import xarray
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import numcodecs as codecs

import tilewright as tw
from tilewright.kernels.passes.masked import Masks, count_masked
from tilewright.pipeline.store.attributes import (
    FLAGS,
    MASKS,
    RANGES,
    SCALES,
    Names,
    codecs_notice,
    masked_caution,
    masks_of,
    packing,
    packing_notice,
    product_names,
)
from tilewright.pipeline.store.region import Flattened, Section

NAN_64, MINUS_9999_64 = "AAAAAAAA+H8=", "AAAAAICHw8A="
"""NaN and -9999 as xarray writes them in format 3: the bytes of a float64, in base64."""


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
        ("i2", {"scale_factor": [1.0], "add_offset": None}, {}),
        ("f4", {"scale_factor": 2}, {"scale_factor": 2}),
        ("i2", {"scale_factor": "a tenth"}, {"scale_factor": "a tenth"}),
        ("i2", {"_FillValue": -1}, {"_FillValue": -1}),
        ("u1", {"missing_value": 255, "units": "m"}, {"missing_value": 255}),
        ("u1", {"missing_value": 256}, {}),
        ("f4", {"_FillValue": -9999}, {"_FillValue": -9999}),
        ("f4", {"_FillValue": NAN_64}, {}),
        ("f4", {"_FillValue": MINUS_9999_64}, {"_FillValue": -9999.0}),
        ("f4", {"_FillValue": "NaN", "missing_value": math.nan}, {}),
        ("f4", {"_FillValue": NAN_64, "missing_value": 1e20}, {"missing_value": 1e20}),
        ("f4", {"_FillValue": 1e300}, {}),
        ("i1", {"_Unsigned": "true"}, {"_Unsigned": "true"}),
        ("i1", {"_Unsigned": "false"}, {}),
        ("u1", {"_Unsigned": "false"}, {"_Unsigned": "false"}),
        ("u1", {"_Unsigned": "true"}, {}),
        ("f4", {"_Unsigned": "true"}, {}),
        ("i2", {"valid_min": 0}, {"valid_min": 0}),
        ("f8", {"valid_max": 350.5}, {"valid_max": 350.5}),
        ("f8", {"valid_range": [0, 350.5]}, {"valid_range": [0, 350.5]}),
        ("u1", {"valid_range": [0, 255]}, {}),
        ("u1", {"flag_values": [0, 1, 2], "flag_meanings": "sea land ice"}, {"flag_values": [0, 1, 2]}),
        ("i2", {"flag_masks": [1, 2, 4]}, {"flag_masks": [1, 2, 4]}),
        ("c8", {"_FillValue": [MINUS_9999_64, MINUS_9999_64]}, {"_FillValue": [MINUS_9999_64] * 2}),
        ("c8", {"_FillValue": [NAN_64, NAN_64]}, {}),
    ],
)
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_packed_numbers_are_known_by_their_attributes(
    zarr_format: Literal[2, 3],
    dtype: str,
    attributes: dict[str, Any],
    found: dict[str, Any],
    tmp_path: Path,
) -> None:
    array = array_of(tmp_path / "a", dtype, attributes, zarr_format)
    assert packing(array) == found
    assert (packing_notice("A", array) is not None) == bool(found)
    if found:
        (name, *_), (value, *_) = found, found.values()
        assert f"{name}={value!r}"[:60] in str(packing_notice("A", array))


@pytest.mark.parametrize(
    ("dtype", "fill_value", "found"),
    [
        ("i2", -32767, -32767),
        ("i2", 0, 0),
        ("i2", None, 0),
        ("f4", -1, -1),
        ("f4", np.nan, 0),
        ("f4", 9.969209968386869e36, float(np.float32(9.969209968386869e36))),
        ("f8", np.inf, np.inf),
        ("c8", -1, -1),
    ],
)
def test_in_format_2_a_fill_value_is_a_mask(dtype: str, fill_value: Any, found: int, tmp_path: Path) -> None:
    array = array_of(tmp_path / "a", dtype, {}, 2, fill_value)
    assert packing(array) == ({"fill_value": found} if found else {})
    assert masks_of(array) == (Masks((found,), None, None, f"fill_value={fill_of(array)}") if found else None)
    assert packing(array_of(tmp_path / "b", "i2", {}, 3, -32767)) == {}, "which xarray does not take for one"


def fill_of(array: zarr.Array[Any]) -> str:
    return repr(array.metadata.fill_value.item())  # type: ignore[union-attr]


def test_in_format_2_zero_is_a_mask_where_xarray_opens_the_array(tmp_path: Path) -> None:
    named = {"_ARRAY_DIMENSIONS": ["y", "x"]}
    found = masks_of(array_of(tmp_path / "a", "u1", named, 2, 0))
    assert found is not None
    assert found.values == (0,)
    assert masks_of(array_of(tmp_path / "b", "u1", named, 2, None)) is None


@pytest.mark.parametrize(
    ("dtype", "attributes", "values", "ends"),
    [
        ("i2", {"_FillValue": -9999}, (-9999,), ()),
        ("i2", {"_FillValue": -9999.0}, (-9999,), ()),
        (">i2", {"_FillValue": "-9999"}, (-9999,), ()),
        ("i4", {"missing_value": [-1, 3.5, 2**40, -1, 7]}, (-1, 7), ()),
        ("u8", {"_FillValue": 2**64 - 1}, (2**64 - 1,), ()),
        ("f4", {"_FillValue": -9999.9}, (float(np.float32(-9999.9)),), ()),
        ("f2", {"missing_value": -9999}, (-10000.0,), ()),
        ("f8", {"missing_value": [-9999.9, math.nan], "_FillValue": 1e20}, (-9999.9, 1e20), ()),
        ("f4", {"_FillValue": 9.969209968386869e36}, (float(np.float32(9.969209968386869e36)),), ()),
        ("f4", {"_FillValue": MINUS_9999_64, "missing_value": -9999.0}, (-9999.0,), ()),
        ("f4", {"_FillValue": "-Infinity"}, (-math.inf,), ()),
        ("f4", {"_FillValue": 10**400, "missing_value": 5}, (5.0,), ()),
        ("f4", {"_FillValue": 1e-60, "missing_value": 5}, (5.0,), ()),
        ("f4", {"_FillValue": 0, "missing_value": -0.0}, (0.0,), ()),
        ("c8", {"_FillValue": [MINUS_9999_64, 0]}, (-9999 + 0j,), ()),
        ("c16", {"missing_value": [-9999, 1e20]}, (-9999 + 0j, 1e20 + 0j), ()),
        ("i2", {"valid_range": [0, 400]}, (), (0, 400)),
        ("i2", {"valid_min": -0.5, "valid_max": 400.5}, (), (0, 400)),
        ("i2", {"valid_min": 3, "valid_range": [0, 9]}, (), (3, 9)),
        ("i2", {"valid_min": -(10**9), "valid_max": 5}, (), (None, 5)),
        ("i2", {"valid_min": 0, "_FillValue": -1, "missing_value": 5}, (5,), (0, None)),
        ("f4", {"valid_max": 0.1}, (), (None, float(np.float32(0.1)))),
        ("f4", {"valid_range": [-1e300, 1], "_FillValue": 9}, (), (None, 1.0)),
        # Stored as signed, meant as unsigned: 0 to 200 are 0 to 127 and -128 to -56.
        ("i1", {"_Unsigned": "true", "_FillValue": 255}, (-1,), ()),
        ("i1", {"_Unsigned": "true", "_FillValue": -1}, (-1,), ()),
        ("i1", {"_Unsigned": "true", "_FillValue": 256, "missing_value": 4}, (4,), ()),
        ("i1", {"_Unsigned": "true", "valid_range": [0, 200], "_FillValue": 255}, (), (0, -56)),
        ("i1", {"_Unsigned": "true", "valid_range": [0, -2]}, (), (0, -2)),
        ("i1", {"_Unsigned": "true", "valid_max": 100, "missing_value": 7}, (7,), (0, 100)),
        ("u1", {"_Unsigned": "false", "valid_min": -5, "_FillValue": -1}, (255,), (251, 127)),
    ],
)
def test_masks_are_numbers_of_the_dtype(
    dtype: str, attributes: dict[str, Any], values: tuple[Any, ...], ends: tuple[Any, ...], tmp_path: Path
) -> None:
    found = masks_of(array_of(tmp_path / "a", dtype, attributes))
    assert found is not None
    assert (found.values, found.least, found.most) == (values, *(ends or (None, None)))
    kind = {"i": int, "u": int, "f": float, "c": complex}[np.dtype(dtype).kind]
    assert all(type(value) is kind for value in found.values)
    assert any(f"{name}=" in found.names for name in attributes)


JUNK: tuple[Any, ...] = (
    "none",
    "",
    "AAAA",
    "é",
    True,
    [],
    {},
    [[1]],
    ["a", 1],
    {"a": {"b": [1]}},
    list(range(101)),
    "x" * 10_000,
    "9" * 5000 + "x",
)


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: repr(junk)[:20])
@pytest.mark.parametrize("dtype", ["i2", "f4", "c8"])
def test_what_is_no_number_is_named_and_masks_nothing(dtype: str, junk: Any, tmp_path: Path) -> None:
    for name in (*MASKS, *RANGES):
        array = array_of(tmp_path / name, dtype, {name: junk})
        assert masks_of(array) is None
        told = packing_notice("A", array)
        if dtype == "c8" and name in RANGES:
            assert told is None, "complex numbers have no order"
            continue
        assert told is not None
        assert f"({name} cannot be understood for {array.dtype})" in told
        assert len(told) < 700 + len(str(tmp_path))
    for name in (*SCALES, "_Unsigned", *FLAGS):
        packing_notice("A", array_of(tmp_path / name, dtype, {name: junk}))


@pytest.mark.parametrize(
    ("dtype", "attributes"),
    [
        ("i2", {"valid_range": [5]}),
        ("i2", {"valid_range": [1, 2, 3]}),
        ("i2", {"valid_range": [9, 3]}),
        ("f4", {"valid_range": [math.nan, 3]}),
        ("f4", {"valid_min": 1e300}),
        ("i2", {"valid_max": -(10**9)}),
        ("u1", {"valid_range": [0.2, 0.8]}),
        ("f4", {"valid_min": [1, 2]}),
    ],
)
def test_a_range_without_a_number_is_named_and_masks_nothing(
    dtype: str, attributes: dict[str, Any], tmp_path: Path
) -> None:
    array = array_of(tmp_path / "a", dtype, attributes)
    assert masks_of(array) is None
    assert "cannot be understood" in str(packing_notice("A", array))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=14),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@given(
    dtype=st.sampled_from(["i1", "u2", "i8", "u8", "f2", "f4", "f8", "c8"]),
    attributes=st.dictionaries(
        st.sampled_from([*SCALES, *MASKS, *RANGES, *FLAGS, "_Unsigned", "fill_value"]),
        json_values,
        max_size=5,
    ),
)
def test_no_attributes_raise_and_every_mask_is_of_the_dtype(dtype: str, attributes: dict[str, Any]) -> None:
    array = zarr.create_array({}, shape=(1,), dtype=dtype, attributes=attributes)
    told, found = packing_notice("A", array), masks_of(array)
    if found is not None:
        assert told is not None
        numbers = [*found.values, *(end for end in (found.least, found.most) if end is not None)]
        assert numbers
        assert np.array(numbers, dtype).tolist() == numbers, "all of the dtype, none NaN"
        count_masked(np.zeros((2, 2), dtype), found)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("dtype", "encoding", "pad"),
    [
        ("f4", {"_FillValue": np.float32(-9999)}, 0),
        ("f4", {"_FillValue": np.float32(-9999.9)}, 0),
        ("f4", {"missing_value": 1e20}, 0),
        ("f4", {"_FillValue": 9.969209968386869e36}, 0),
        ("f8", {"_FillValue": -1e30, "missing_value": -1e30}, 0),
        ("f8", {"dtype": "i2", "_FillValue": -32767, "scale_factor": 0.01, "add_offset": 3.0}, 0),
        ("f8", {"dtype": "u1", "_FillValue": 0}, 0),
        ("f8", {"dtype": "i1", "_FillValue": -1, "_Unsigned": "true"}, 0),
        ("c16", {"_FillValue": -9999 + 1j}, 1),
    ],
)
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_xarray_masks_what_is_counted(
    zarr_format: Literal[2, 3], dtype: str, encoding: dict[str, Any], pad: int, tmp_path: Path
) -> None:
    """What xarray wrote, with some values missing, and reads as NaN again."""
    values = np.arange(1, 101).reshape(10, 10).astype(dtype)
    values[2, 3] = values[4] = np.nan
    path = tmp_path / "x.zarr"
    xarray.Dataset({"x": (("time", "cell"), values)}).to_zarr(
        path, zarr_format=zarr_format, encoding={"x": encoding}, consolidated=False
    )
    read = xarray.open_zarr(path, consolidated=False)["x"].values
    stored = zarr.open_array(path / "x")
    found = masks_of(stored)
    assert found is not None
    assert count_masked(stored[...], found) == int(np.isnan(read).sum()) == 11
    assert "_FillValue=" in found.names or "missing_value=" in found.names or "fill_value=" in found.names


def test_the_way_out_that_is_named_is_one(tmp_path: Path) -> None:
    """xarray unpacks scales and masks for good, but leaves ranges and flags where they are."""
    values = np.array([[1.0, np.nan], [3.0, 4.0]])
    encoding = {"x": {"dtype": "i2", "_FillValue": -1, "scale_factor": 0.5}}
    for attributes, hinted in (({}, True), ({"valid_min": 0}, False)):
        packed, unpacked = tmp_path / f"{hinted}.zarr", tmp_path / f"{hinted} unpacked.zarr"
        xarray.Dataset({"x": (("a", "b"), values, attributes)}).to_zarr(
            packed, encoding=encoding, zarr_format=3, consolidated=False
        )
        told = str(packing_notice("A", zarr.open_array(packed / "x")))
        assert ("by which xarray or another reader" in told) is True
        assert ("ds.drop_encoding().to_zarr(path)" in told) is hinted
        xarray.open_zarr(packed, consolidated=False).drop_encoding().to_zarr(unpacked, consolidated=False)
        assert (packing_notice("A", zarr.open_array(unpacked / "x")) is None) is hinted
    told = str(packing_notice("A", array_of(tmp_path / "m", "f4", {"_FillValue": -999.0})))
    assert (
        "say missing='attributes' (--missing attributes) to gram, cov, corr or eofs; to multiply what" in told
    )
    told = str(packing_notice("A", array_of(tmp_path / "a", "u1", {"flag_values": [1, 2]})))
    assert "by which a reader of CF's conventions" in told
    assert told.endswith("store it unpacked without these attributes")


def test_what_xarray_writes_by_default_is_multiplied_without_a_word(tmp_path: Path) -> None:
    values = np.array([[1.0, np.nan], [3.0, 4.0]])
    for zarr_format in (2, 3):
        path = tmp_path / f"x{zarr_format}.zarr"
        xarray.Dataset({"x": (("a", "b"), values), "i": (("a", "b"), np.ones((2, 2), int))}).to_zarr(
            path, zarr_format=zarr_format, consolidated=False
        )
        for name in "xi":
            assert packing_notice("A", zarr.open_array(path / name)) is None


def test_the_caution_about_masks_found_says_how_many_of_which() -> None:
    masks = {"A": Masks((-1,), names="_FillValue=-1"), "B": Masks((7,), names="missing_value=7")}
    assert masked_caution({"A": 0, "B": 0}, masks, "C") is None
    told = masked_caution({"A": 1, "B": 0}, masks, "C")
    assert told is not None
    assert told.startswith("1 element of A (_FillValue=-1) ")
    both = masked_caution({"A": 1, "B": 20}, masks, "C")
    assert both is not None
    assert "1 element of A (_FillValue=-1) and 20 elements of B (missing_value=7)" in both


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


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, ""),
        ({"compressors": None}, ""),
        ({"shards": (4, 4)}, ""),
        ({"zarr_format": 2, "filters": [numcodecs.Delta("f4")], "compressors": numcodecs.Zstd()}, ""),
        ({"compressors": codecs.BZ2}, ""),
        ({"zarr_format": 2, "compressors": numcodecs.LZMA()}, "lzma"),
        (
            {"zarr_format": 2, "filters": [numcodecs.LZMA()], "compressors": numcodecs.Zstd()},
            "lzma and zstd",
        ),
        ({"compressors": codecs.LZMA, "shards": (4, 4)}, "numcodecs.lzma and crc32c"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_codecs_that_zarr_alone_reads_are_told_of(
    options: dict[str, Any], told: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Also of a part of an array, and of one that is seen as a matrix."""
    options = {"shape": (4, 4), "chunks": (2, 2), "dtype": "f4"} | options
    made = {name: value() if isinstance(value, type) else value for name, value in options.items()}
    array = zarr.create_array(tmp_path / "x.zarr", **made)
    array[...] = rng.random((4, 4))
    says = f"A: chunks of {tmp_path / 'x.zarr'}, encoded by {told}, go through zarr-python, more slowly"
    matrix = Flattened(array, (0,), (1,))
    for seen in (array, matrix, Section(matrix, (0, 2), (1, 3))):
        found = codecs_notice("A", seen)
        assert (found or "").startswith(says) == bool(told)
        assert (found is None) == (not told)
    run_told: list[Any] = []
    tw.matmul(array, array, tmp_path / "c.zarr", device="cpu", listener=run_told.append)
    assert sum("zarr-python" in getattr(event, "message", "") for event in run_told) == 2 * bool(told)
