"""The stored product against NumPy's: values, dtypes, empty sides, precision and the forms that factors come in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.storage import ZipStore

import tilewright as tw
from tests.kernels import naive
from tests.sampling import examples
from tests.workflows.products import (
    DTYPES,
    assert_product,
    numbers,
    put,
    stored_somehow,
)
from tilewright.pipeline.errors import (
    OutputError,
)
from tilewright.pipeline.events import Caution, Event, Notice
from tilewright.pipeline.product import job
from tilewright.pipeline.product.request import Request
from tilewright.pipeline.worker import units


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")
@settings(max_examples=examples(6))
@given(data=st.data())
def test_the_stored_product_is_numpys(
    without_dask: Client, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    draw = data.draw
    m, n, k = (draw(st.integers(1, 40), label=name) for name in "mnk")
    a_dtype, b_dtype = draw(
        st.sampled_from(
            [(d, d) for d in DTYPES] + [("i2", "i8"), ("u1", "i1"), ("u4", "u1"), ("u1", "f4"), ("f4", "c16")]
        )
    )
    transposed = draw(st.booleans()), draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    folder = tmp_path_factory.mktemp("product")
    factors = []
    for name, shape, dtype, transpose in zip(
        "ab", ((m, k), (k, n)), (a_dtype, b_dtype), transposed, strict=True
    ):
        values = numbers(rng, shape[::-1] if transpose else shape, dtype)
        array = stored_somehow(draw, folder / name, values, 25)
        files = [
            path for path in sorted((folder / name).rglob("*")) if path.name[0].isdigit() and path.is_file()
        ]
        for lost in draw(st.sets(st.sampled_from(files), max_size=2)) if files else ():
            lost.unlink()  # reads as the fill value, 7
        values = np.asarray(array[...]).astype(dtype)
        factors.append(values.T if transpose else values)
    a, b = factors
    # Pieces of our own, so that small data still makes many tiles.
    before = np.full((m, n), 7, naive.stored_dtype(a.dtype, b.dtype, k))
    out = stored_somehow(draw, folder / "c", before, 30)
    with np.errstate(over="ignore"):
        run = tw.matmul(
            folder / "a", folder / "b", out, transpose_a=transposed[0], transpose_b=transposed[1], cluster=without_dask,
            device="cpu", device_memory=draw(st.sampled_from([24_000, 40_000, 10**7])),
        )  # fmt: skip
        assert_product(np.asarray(out[...]).astype(before.dtype), a, b)
    assert run.verification is not None
    assert run.verification.passed


@pytest.mark.sample(1)
@pytest.mark.parametrize("a_dtype", ["i1", "u1", "i2", "u2", "i4", "u4"])
@pytest.mark.parametrize("b_dtype", ["i1", "u1", "u2", "i4"])
def test_sums_of_small_integers_do_not_wrap(
    a_dtype: str, b_dtype: str, without_dask: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Extremes included: of 32 bits by others, sums of a few products fit into 64 bits."""
    k = 1 if {"i4", "u4"} & {a_dtype, b_dtype} else 2000
    a, b = numbers(rng, (9, k), a_dtype), numbers(rng, (k, 8), b_dtype)
    for row, value in enumerate((np.iinfo(a_dtype).min, np.iinfo(a_dtype).max)):
        a[row] = value
    for column, value in enumerate((np.iinfo(b_dtype).min, np.iinfo(b_dtype).max)):
        b[:, column] = value
    run = tw.matmul(
        put(tmp_path / "a", a), put(tmp_path / "b", b), tmp_path / "c", cluster=without_dask, device="cpu"
    )
    found = zarr.open_array(tmp_path / "c")[...]
    assert (found.astype(object) == a.astype(object) @ b.astype(object)).all()
    assert found.dtype == run.plan.c_dtype == naive.stored_dtype(a_dtype, b_dtype, k)
    assert run.verification is not None
    assert run.verification.passed
    assert run.verification.modulus_bits == 8 * found.dtype.itemsize


def test_the_default_dtype_follows_from_dtypes_and_k_alone(without_dask: Client, tmp_path: Path) -> None:
    zeros = put(tmp_path / "zeros", np.zeros((3, 131072), "i1"), (3, 32768))
    short = put(tmp_path / "short", np.zeros((3, 131071), "i1"), (3, 32768))
    for path, expected in ((zeros, "int64"), (short, "int32")):
        options: dict[str, Any] = {"transpose_b": True, "device": "cpu"}
        assert tw.plan_matmul(path, path, **options).c_dtype == expected
        planned = job.plan_only(Request(path, path, tmp_path / "c", cluster=without_dask, **options))
        assert planned.c_dtype == expected
        tw.matmul(path, path, tmp_path / "c", cluster=without_dask, overwrite=True, **options)
        assert zarr.open_array(tmp_path / "c").dtype == expected


def test_numpys_dtype_is_had_by_asking_for_it(without_dask: Client, tmp_path: Path) -> None:
    a = np.full((4, 100), 100, "i1")
    path = put(tmp_path / "a", a)
    run = tw.matmul(
        path, path, tmp_path / "c", transpose_b=True, dtype="int8", cluster=without_dask, device="cpu"
    )
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c")[...], a @ a.T)
    assert "C is int8, as asked for: 100 products of int8 by int8 could reach 1638400" in str(run)
    given = zarr.create_array(tmp_path / "given", shape=(4, 4), chunks=(4, 4), dtype="i1")
    with pytest.raises(OutputError, match=r"holds int8; the result is int32.*or pass dtype='int8'"):
        tw.matmul(path, path, given, transpose_b=True, cluster=without_dask, device="cpu")
    tw.matmul(path, path, given, transpose_b=True, dtype="int8", cluster=without_dask, device="cpu")
    np.testing.assert_array_equal(given[...], a @ a.T)


def test_factors_reach_the_kernel_as_they_are_stored(
    without_dask: Client, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widened to C's dtype before, int8 would take four times the memory, and no tensor core. The products are NumPy's,
    since each three dtypes are loops to compile, which other tests need not have."""
    seen = set()

    def recording(a: Any, b: Any, *, out: Any, accumulate: bool = False, **_: Any) -> None:
        seen.add((a.dtype.name, b.dtype.name, out.dtype.name))
        assert not accumulate, "one panel has all of k"
        np.matmul(a, b, out=out, dtype=out.dtype)

    monkeypatch.setattr(units, "matmul", recording)
    for a_dtype, b_dtype, expected in (("i1", "i1", "int32"), ("u1", "i2", "int32"), ("i2", "i2", "int64")):
        seen.clear()
        a, b = numbers(rng, (40, 60), a_dtype), numbers(rng, (60, 30), b_dtype)
        paths = put(tmp_path / f"a{a_dtype}{b_dtype}", a), put(tmp_path / f"b{a_dtype}{b_dtype}", b)
        tw.matmul(*paths, tmp_path / "c", overwrite=True, cluster=without_dask, device="cpu", verify=False)
        assert seen == {(a.dtype.name, b.dtype.name, expected)}
        assert_product(zarr.open_array(tmp_path / "c")[...], a, b)


@pytest.mark.parametrize(("m", "k", "n"), [(4, 0, 5), (0, 3, 4), (4, 3, 0), (0, 0, 0), (1, 1, 1)])
def test_empty_sides(m: int, k: int, n: int, without_dask: Client, tmp_path: Path) -> None:
    a, b = np.ones((m, k), "f4"), np.ones((k, n), "f4")
    run = tw.matmul(
        put(tmp_path / "a", a), put(tmp_path / "b", b), tmp_path / "c", cluster=without_dask, device="cpu"
    )
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c")[...], a @ b)
    assert run.verification is not None
    assert run.verification.passed


@pytest.mark.parametrize("protocol", ["file", "local"])
def test_a_url_of_a_local_path_is_that_path(
    protocol: str, factors: tuple[np.ndarray, np.ndarray, Path, Path], without_dask: Client, tmp_path: Path
) -> None:
    """Its folders are made, and what is read at it may be such a URL too."""
    a, b, a_path, b_path = factors
    left, right, out = (f"{protocol}://{path}" for path in (a_path, b_path, tmp_path / "new" / "c.zarr"))
    tw.matmul(left, right, out, cluster=without_dask, device="cpu")
    assert_product(zarr.open_array(tmp_path / "new" / "c.zarr")[...], a, b)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["c.zarr"]


def test_overflow_to_infinity_is_an_answer(without_dask: Client, tmp_path: Path, events: list[Event]) -> None:
    path = put(tmp_path / "a", np.full((20, 20), 200, "f2"))
    run = tw.matmul(path, path, tmp_path / "c", cluster=without_dask, device="cpu", listener=events.append)
    assert np.isinf(zarr.open_array(tmp_path / "c")[...]).all()
    assert run.verification is not None
    assert not run.verification.conclusive
    assert any(isinstance(event, Notice) and "unverified" in event.message for event in events)


def test_a_wider_result_can_be_asked_for(without_dask: Client, tmp_path: Path) -> None:
    a = np.full((4, 100), 2**30, "i4")
    path = put(tmp_path / "a", a)
    tw.matmul(path, path, tmp_path / "c", transpose_b=True, dtype="int64", cluster=without_dask, device="cpu")
    np.testing.assert_array_equal(
        zarr.open_array(tmp_path / "c")[...], np.full((4, 4), 100 * 2**60 % 2**64, "u8").view("i8")
    )


def test_factors_in_zip_files_that_are_open_for_reading(without_dask: Client, tmp_path: Path) -> None:
    file = tmp_path / "file.zip"
    with ZipStore(file, mode="w") as store:
        for name, shape in (("a", (40, 40)), ("x", (40,))):
            zarr.create_array(store, name=name, data=np.ones(shape))
    with ZipStore(file, mode="r") as store:
        a, x = (zarr.open_array(store, path=name, mode="r") for name in "ax")
        for factor in (a, f"zip://a::{file}"):
            assert tw.matmul(
                a, factor, tmp_path / "c", cluster=without_dask, device="cpu", overwrite=True
            ).verification
            assert tw.verify(factor, a, tmp_path / "c", cluster=without_dask).passed
        assert tw.dot(x, x, cluster=without_dask, device="cpu") == 40


def test_packed_factors_are_multiplied_as_they_are_stored_and_told_of(
    without_dask: Client, tmp_path: Path, events: list[Event]
) -> None:
    plain = put(tmp_path / "plain", np.full((3, 3), 7, "i2"))
    packed = put(
        tmp_path / "packed", np.full((3, 3), 5, "i2"), attributes={"scale_factor": 0.5, "_FillValue": -1}
    )
    x = put(tmp_path / "x", np.full(3, 5), (3,), attributes={"add_offset": 1})

    def told() -> list[str]:
        found = [
            event.message
            for event in events
            if isinstance(event, Caution) and "stored numbers" in event.message
        ]
        events.clear()
        return found

    tw.matmul(plain, packed, tmp_path / "c", cluster=without_dask, device="cpu", listener=events.append)
    assert (zarr.open_array(tmp_path / "c")[...] == 105).all()
    (notice,) = told()
    assert f"B: {packed} has scale_factor=0.5, _FillValue=-1" in notice
    assert tw.verify(packed, plain, tmp_path / "c", cluster=without_dask, listener=events.append).passed
    assert told()[0].startswith("A: ")
    assert tw.dot(x, x, cluster=without_dask, device="cpu", listener=events.append) == 75
    assert [notice[:2] for notice in told()] == ["X:", "Y:"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["split", "tf32", "bf16", "fp16"])
def test_a_precision_of_tensor_cores_means_full_on_a_cpu(
    precision: str, without_dask: Client, tmp_path: Path, rng: np.random.Generator, events: list[Event]
) -> None:
    a, b = numbers(rng, (50, 60), "f4"), numbers(rng, (60, 40), "f4")
    paths = put(tmp_path / "a", a), put(tmp_path / "b", b)
    run = tw.matmul(
        *paths,
        tmp_path / "c",
        cluster=without_dask,
        device="cpu",
        precision=precision,
        listener=events.append,
    )
    assert [
        event.message for event in events if isinstance(event, Notice) and "precision" in event.message
    ] == [
        f"precision={precision!r} is for tensor cores: on a CPU the product is computed, and checked, in full"
    ]
    full = tw.matmul(*paths, tmp_path / "d", cluster=without_dask, device="cpu")
    assert run.verification is not None
    assert full.verification is not None
    assert run.verification.tolerance == full.verification.tolerance
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c")[...], zarr.open_array(tmp_path / "d")[...])
