"""Numbers that attributes say are missing, as xarray and netCDF4-python take them."""

from __future__ import annotations

import base64
import re
import struct
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray
import zarr
from distributed import Client

import tilewright as tw
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.events import Caution, Event
from tilewright.pipeline.store.attributes import masks_of, missing_codes
from tilewright.pipeline.store.sources.hdf5 import open_variable

NUMBERS = np.array([[1, -9, 4], [2, 5, -99], [3, -1, 6], [7, 8, 10]])


def put(path: Path, dtype: str, **attributes: Any) -> str:
    names = ["x", "y"]
    array = zarr.create_array(path, shape=NUMBERS.shape, chunks=(2, 2), dtype=dtype, dimension_names=names)
    array[:] = NUMBERS
    array.attrs.update(attributes)
    return str(path)


def by_xarray(numbers: np.ndarray, *codes: int) -> np.ndarray:
    """The covariances, missing numbers taken for means."""
    there = np.where(np.isin(numbers, codes), np.nan, numbers.astype(float))
    centred = np.nan_to_num(there - np.nanmean(there, axis=0))
    return centred.T @ centred / (len(numbers) - 1)


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["i1", "i2", "i8", "f4", "f8"])
def test_all_that_attributes_name_is_missing_as_it_is_to_xarray(tmp_path: Path, dtype: str) -> None:
    fill = (
        -9 if dtype.startswith("i") else base64.b64encode(struct.pack("<d", -9)).decode()
    )  # as xarray has it
    a = put(tmp_path / "g.zarr" / "a", dtype, _FillValue=fill, missing_value=-99)
    zarr.open_group(tmp_path / "g.zarr")
    with (
        pytest.warns(xarray.SerializationWarning, match="multiple fill values"),
        xarray.open_zarr(tmp_path / "g.zarr", consolidated=False) as opened,
    ):
        masked = np.isnan(opened.a.values)
    assert (masked == np.isin(NUMBERS, (-9, -99))).all()
    expected = by_xarray(NUMBERS, -9, -99)
    for missing in ("attributes", -9, -99):
        np.testing.assert_allclose(tw.cov(a, missing=missing), expected, rtol=1e-5)
    np.testing.assert_allclose(tw.cov(a, missing=-1), by_xarray(NUMBERS, -9, -99, -1), rtol=1e-5)
    found = tw.cov(a, missing=-1, missing_as="pairwise")
    assert found[0, 0] == pytest.approx(np.var(NUMBERS[:, 0], ddof=1))
    mask = NUMBERS == 6
    np.testing.assert_allclose(tw.cov(a, missing=mask), by_xarray(NUMBERS, -9, -99, 6), rtol=1e-5)
    scores = tw.eofs(a, k=1, missing="attributes").eigenvalues
    np.testing.assert_allclose(scores, np.linalg.eigvalsh(expected)[-1:], rtol=1e-4)


def test_one_number_is_read_as_ever(tmp_path: Path) -> None:
    a = put(tmp_path / "a", "i2", missing_value=[-9])
    said: list[Any] = []
    found = tw.cov(a, missing="attributes", listener=said.append)
    np.testing.assert_array_equal(found, tw.cov(a, missing=-9))
    assert not [event for event in said if isinstance(event, Caution)]
    b = put(tmp_path / "b", "f4", _FillValue="NaN")
    np.testing.assert_array_equal(tw.cov(b, missing="attributes"), tw.cov(b, missing="nan"))


def test_nan_is_missing_beside_what_attributes_name(tmp_path: Path) -> None:
    a = put(tmp_path / "a", "f8", _FillValue=-9.0, missing_value=-99.0)
    array = zarr.open_array(a)
    array[3, 0] = np.nan
    numbers = np.where(np.isnan(array[:]), -9, array[:])
    np.testing.assert_allclose(tw.cov(a, missing="attributes"), by_xarray(numbers, -9, -99))


def test_attributes_have_to_name_something(tmp_path: Path) -> None:
    a = put(tmp_path / "a", "i2")
    with pytest.raises(
        OptionError, match=r"^missing='attributes': X, .*, has no _FillValue or missing_value"
    ):
        tw.cov(a, missing="attributes")


def test_zeros_of_format_2_are_missing_where_that_is_asked_for(tmp_path: Path) -> None:
    """Many writers leave 0 there and mean nothing; xarray masks it."""
    array = zarr.create_array(
        tmp_path / "a", shape=(4, 3), dtype="i2", zarr_format=2, fill_value=0,
        attributes={"_ARRAY_DIMENSIONS": ["x", "y"]},
    )  # fmt: skip
    array[:] = np.where(NUMBERS == 8, 0, NUMBERS)
    numbers = array[:]
    path = str(tmp_path / "a")
    np.testing.assert_allclose(tw.cov(path, missing=-9), by_xarray(numbers, -9), rtol=1e-5)
    np.testing.assert_allclose(tw.cov(path, missing="attributes"), by_xarray(numbers, 0), rtol=1e-5)


def test_a_run_goes_on_with_the_same_codes_alone(tmp_path: Path) -> None:
    a = put(tmp_path / "a", "i2", _FillValue=-9, missing_value=-99)
    tw.cov(a, out=tmp_path / "c", missing="attributes")
    assert zarr.open_array(tmp_path / "c").attrs["tilewright"]["options"]["missing"] == "attributes"
    assert missing_codes(zarr.open_array(a)) == (-99, -9)


@pytest.mark.parametrize(("dtype", "default"), [("i2", -32767), ("f4", 9.969209968386869e36), ("u1", 255)])
def test_defaults_of_netcdf_are_told_of(tmp_path: Path, dtype: str, default: float) -> None:
    """netCDF4-python masks them, where nobody names another; xarray does not, nor is it done here. netCDF-C gives the
    fill value of HDF5 itself, as h5py's fillvalue is; only a variable that has that is filled by it."""
    path = tmp_path / "a.nc"
    with h5py.File(path, "w") as file:
        data = np.arange(12).reshape(4, 3).astype(dtype)
        data[1, 1] = default
        file.create_dataset("filled", data=data, fillvalue=np.dtype(dtype).type(default))
        file.create_dataset("named", data=data, fillvalue=np.dtype(dtype).type(default)).attrs[
            "_FillValue"
        ] = 3
        file.create_dataset("bare", data=data)
    masks = {
        name: masks_of(open_variable(path, name, f"{path}::{name}", "A"))
        for name in ("filled", "named", "bare")
    }
    assert masks["bare"] is None
    assert masks["named"] is not None
    assert masks["named"].values == (3,)
    assert masks["filled"] is not None
    assert masks["filled"].values == (default,)
    said: list[Any] = []
    tw.matmul(f"{path}::filled", f"{path}::filled", tmp_path / "c", transpose_b=True, listener=said.append)
    told = [event.message for event in said if isinstance(event, Caution)]
    assert told[0].startswith("1 element of A (netCDF's default fill value=")
    found = tw.cov(f"{path}::filled", missing=default)
    numbers = np.where(data == data[1, 1], np.nan, data.astype(float))
    centred = np.nan_to_num(numbers - np.nanmean(numbers, axis=0))
    np.testing.assert_allclose(found, centred.T @ centred / 3, rtol=1e-5)


def fills_of(path: Path, name: str) -> tuple[Any, ...]:
    masks = masks_of(open_variable(path, name, f"{path}::{name}", "A"))
    return () if masks is None else masks.values


def test_files_of_netcdf_have_its_defaults_whoever_wrote_them(tmp_path: Path) -> None:
    """xarray writes by h5netcdf, which tells HDF5 of no fill value. Bytes may be any, and are none."""
    defaults = {
        "f4": 9.969209968386869e36,
        "f8": 9.969209968386869e36,
        "i2": -32767,
        "i4": -(2**31) + 1,
        "i1": -127,
    }
    data = {name: ("x", np.zeros(3, name)) for name in defaults}
    no_fill = {name: {"_FillValue": None} for name in defaults}
    path = tmp_path / "a.nc"
    xarray.Dataset(data).to_netcdf(path, engine="h5netcdf", encoding=no_fill)
    for name, default in defaults.items():
        assert fills_of(path, name) == (() if name == "i1" else (default,)), name


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["netcdf", "zarr", "memory", "dask"])
@pytest.mark.parametrize("call", ["cov", "eofs", "matmul"])
def test_defaults_of_netcdf_in_one_chunk_are_told_of(tmp_path: Path, kind: str, call: str) -> None:
    """Also with `missing`, which does not name them."""
    numbers = np.random.default_rng(3).standard_normal((40, 6)).astype("f4")
    numbers[33, 4] = numbers[35, 4] = 9.969209968386869e36
    field = xarray.DataArray(numbers, dims=["time", "x"], name="v", attrs={"units": "K"})
    how: dict[str, Any] = {"_FillValue": None}
    x: Any = field
    if kind == "netcdf":
        field.to_netcdf(tmp_path / "a.nc", engine="h5netcdf", encoding={"v": how | {"chunksizes": (10, 3)}})
        x = f"{tmp_path / 'a.nc'}::v"
    elif kind == "zarr":
        field.to_dataset().to_zarr(
            tmp_path / "a", encoding={"v": how | {"chunks": (10, 3)}}, consolidated=False
        )
        x = str(tmp_path / "a" / "v")
    elif kind == "dask":
        x = field.chunk({"time": 10})
    said: list[Any] = []
    if call == "matmul":
        tw.matmul(x, x, tmp_path / "c", transpose_b=True, listener=said.append)
    elif call == "eofs":
        tw.eofs(x, k=1, dtype="float64", missing="nan", listener=said.append)
    else:
        tw.cov(x, out=tmp_path / "c", dtype="float64", missing="nan", listener=said.append)
    told = [one.message for one in said if isinstance(one, Caution) and "netCDF" in one.message]
    assert told
    assert told[0].startswith("2 elements of "), told
    assert "say missing=9.969209968386869e+36 (--missing 9.969209968386869e+36)" in told[0]


def test_floats_without_a_unit_may_be_any(tmp_path: Path) -> None:
    """An array that CF's conventions do not describe came from no netCDF, and nothing is looked for in it."""
    for about in ({}, {"units": "K"}):
        assert (
            masks_of(zarr.create_array(tmp_path / str(about), shape=(3, 3), dtype="f4", attributes=about))
            is None
        )
    described: dict[str, Any] = {"shape": (3, 3), "attributes": {"units": "K"}, "dimension_names": ["x", "y"]}
    assert masks_of(zarr.create_array(tmp_path / "i", dtype="i4", **described)) is None
    assert masks_of(zarr.create_array(tmp_path / "f", dtype="f4", **described)) is not None
    described["attributes"] = {"units": "K", "_FillValue": -9.0}
    assert missing_codes(zarr.create_array(tmp_path / "n", dtype="f4", **described)) == (-9.0,)


@pytest.mark.sample(1)
@pytest.mark.parametrize("call", ["cov", "corr", "eofs", "gram"])
def test_a_likely_code_is_told_of_by_the_pass_that_is_made(tmp_path: Path, call: str) -> None:
    """It was summed as a number, without a word."""
    numbers = np.array([[0, 1, 2], [2, -1, 0], [1, 2, 1], [0, -1, 2]])

    def told(dtype: str, numbers: np.ndarray, **options: Any) -> list[str]:
        said: list[Any] = []
        options |= {"k": 1} if call == "eofs" else {}
        options |= {"center": True} if call == "gram" else {}
        getattr(tw, call)(numbers.astype(dtype), listener=said.append, **options)
        return [event.message for event in said if isinstance(event, Caution)]

    (message,) = told("i1", numbers)
    assert (
        "X: numpy array of shape (4, 3) holds -1 in 1 of its 3 columns, and no other negative number"
        in message
    )
    assert "say missing=-1 (--missing -1)" in message
    assert not told("i1", numbers, missing=-1)
    assert not told("i2", numbers), "which hold much else"
    assert not told("i1", np.where(numbers == -1, -2, numbers))
    assert not told("i1", numbers * 2 - 1 - (numbers == 0)), "negative numbers of several kinds"

    # PLINK's code, where nobody named one, and where another was named of which there is none, or some.
    plink = np.where(numbers == -1, -9, numbers)
    holds = "X: numpy array of shape (4, 3) holds -9 in 1 of its 3 columns, and no other negative number"
    # By the numbers and their dtype alone, whatever is made of them: all dtypes and codes by one call.
    for dtype in ("i1", "i2", "f4", "f8") if call == "cov" else ("i1",):
        (message,) = told(dtype, plink)
        assert f"{holds}; it counts as a number" in message
        assert message.endswith("say missing=-9 (--missing -9)")
        (message,) = told(dtype, plink, missing=-1)
        assert f"{holds}, and not one -1; it counts as a number" in message
        assert message.endswith("say missing=-9 (--missing -9) in place of -1; where both do, give a mask")
        assert not told(dtype, plink, missing=-9)
    both = plink.copy()
    both[0, 0] = -1
    (message,) = told("i1", both, missing=-1)
    assert f"{holds} beside -1, which is missing; it counts" in message
    for code in (-99, -999, -9999) if call == "cov" else ():
        (message,) = told("i2", np.where(numbers == -1, code, numbers))
        assert f"say missing={code}" in message
    both[1, 0] = -4
    assert not told("i1", both, missing=-1), "-9 is one of several"
    assert not told("i1", both)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (
            None,
            "-9 is the only number below 0: where it stands for a missing one, say missing=-9 (--missing -9); else",
        ),
        (-1, "say missing=-9 (--missing -9) in place of -1; where both do, give a mask; else give a number"),
    ],
)
def test_a_divisor_of_dosages_names_the_likely_code(missing: Any, said: str) -> None:
    """Where it said to say what is missing, which had been said."""
    numbers = np.array([[0, 1, 2], [2, -9, 0], [1, -9, 1]], np.int8)
    options: dict[str, Any] = {"of": "rows", "center": "columns", "divide": "2pq"}
    for rows in (
        numbers,
        np.vstack([numbers] + 9 * [[[1, 2, 1]]]).astype(np.int8),
    ):  # whose mean is from 0 to 2
        with pytest.raises(OptionError, match=re.escape(said)):
            tw.gram(rows, missing=missing, listener=lambda event: None, **options)
    with pytest.raises(OptionError, match=r"missing=0\) they go from 1 to 7: mask what is no dosage"):
        tw.gram(np.array([[0, 7], [1, 1]], np.int8), missing=0, listener=lambda event: None, **options)


@pytest.mark.more
def test_messages_call_matrices_as_they_were_given(tmp_path: Path) -> None:
    """X and Y of gram, and not the factors of the product that it makes."""
    a = put(tmp_path / "a", "i2", _FillValue=-9)
    said: list[Any] = []
    for call in (tw.gram, tw.cov):
        call(a, listener=said.append)
    tw.cov(a, put(tmp_path / "b", "f4"), tmp_path / "c", listener=said.append)
    tw.eofs(a, k=1, listener=said.append)
    tw.gram(np.where(NUMBERS == 1, np.nan, NUMBERS), listener=said.append)
    told = [event.message for event in said if isinstance(event, Caution)]
    assert any(one.startswith("1 element of X (_FillValue=-9) stand") for one in told)
    assert any(one.endswith("holds NaN or infinity in 1 of its 3 columns") for one in told)
    for one in told:
        assert not re.search(r"\b[ABC]('s)?\b", one), one


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(
    ("fill", "said"), [(1e20, "1e+20"), (-9.999e20, "-9.999e+20"), (9.96921e36, "9.96921e+36")]
)
def test_a_likely_fill_of_floats_is_told_of(fill: float, said: str, dtype: str, client: Client) -> None:
    """Where nobody says what stands for a missing number; what is said then is what may be given."""
    x = np.random.default_rng(0).standard_normal((30, 4)).astype(dtype)
    expected = tw.cov(np.where(np.arange(4) == 2, np.nan, x), missing="nan", constant="zero", cluster=client)
    x[:, 2] = fill
    told: list[Event] = []
    options: dict[str, Any] = {"cluster": client, "listener": told.append}
    tw.cov(x, **options)
    (caution,) = [event.message for event in told if isinstance(event, Caution)]
    assert (
        f"X: numpy array of shape (30, 4) holds {said} in 1 of its 4 columns, which many files have"
        in caution
    )
    (number,) = re.findall(r"say missing=(\S+) \(--missing \1\)", caution)
    told.clear()
    found = tw.cov(x, missing=float(number), constant="zero", **options)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert not [event for event in told if isinstance(event, Caution)]
    x[:, 2] = 3.2e20
    tw.cov(x, **options)
    assert not [event for event in told if isinstance(event, Caution)]
