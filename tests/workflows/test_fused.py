"""Products with transforms of their factors and an epilogue of their sums, against NumPy; and C added to what it
held."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tests.workflows.products import numbers, put, stop_after, stop_at
from tilewright.pipeline.errors import (
    DTypeError,
    OptionError,
    OutputError,
    PlanError,
    ShapeError,
    StoreError,
    VerificationError,
)
from tilewright.pipeline.events import Caution, Event, Notice, UnitDone
from tilewright.pipeline.plan import tiling
from tilewright.pipeline.plan.transform import Epilogue, Transform, finished, transformed
from tilewright.pipeline.product import execute
from tilewright.pipeline.product.job import multiply
from tilewright.pipeline.product.ledger import FILE_NAME
from tilewright.pipeline.product.output import partial_path
from tilewright.pipeline.product.request import Request
from tilewright.workflows.cli import cli

TIGHT = 12_000
"""Device memory that cuts a C of 50 × 60 float32 into many tiles."""
WHOLE = slice(None)
DTYPES = ["i1", "i4", "i8", "u2", "f2", "f4", "f8", "c8", "c16"]


def small_numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Whose sums are exact, or nearly, in any dtype."""
    values = rng.integers(0 if np.dtype(dtype).kind == "u" else -3, 4, shape)
    return (values + 1j * rng.integers(-3, 4, shape) if np.dtype(dtype).kind == "c" else values).astype(dtype)


def vector_of(draw: Any, rng: np.random.Generator, length: int, dtype: np.dtype) -> Any:
    """Of numbers not far from 1, or None."""
    if not draw(st.booleans()):
        return None
    values = 1 + 0.3 * rng.standard_normal(length)
    return (values + 0.3j * rng.standard_normal(length) if dtype.kind == "c" else values).astype(dtype)


def expected(
    a: np.ndarray, b: np.ndarray, request: Request, dtype: np.dtype, before: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """C, in a wide type, and what its rounding errors are measured by."""
    one, other = request.transforms
    left = a if one is None else transformed(one, a, WHOLE, WHOLE)
    right = b if other is None else transformed(other, b, WHOLE, WHOLE)
    wide = np.dtype(np.complex128 if dtype.kind == "c" else np.float64)
    left, right = (
        (factor.T if transposed else factor).astype(wide)
        for factor, transposed in ((left, request.transpose_a), (right, request.transpose_b))
    )
    sums, scale = left @ right, np.abs(left) @ np.abs(right)
    epilogue = request.epilogue
    if epilogue is None:
        return sums, scale
    held = None if before is None else before.astype(wide)
    sizes = {
        name: None if vector is None else np.abs(vector)
        for name in (
            "row_factors",
            "column_factors",
            "row_pairs",
            "column_pairs",
            "row_offsets",
            "column_offsets",
        )
        for vector in (getattr(epilogue, name),)
    }
    absolute = Epilogue(
        alpha=abs(epilogue.alpha),
        pair_weight=-abs(epilogue.pair_weight),
        offset=abs(epilogue.offset),
        beta=abs(epilogue.beta),
        **sizes,
    )
    size = finished(absolute, scale, WHOLE, WHOLE, np.dtype("f8"), None if before is None else np.abs(before))
    return finished(epilogue, sums, WHOLE, WHOLE, wide, held), size


@settings(max_examples=4)
@given(data=st.data())
def test_c_is_numpys(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_product(clusters, tmp_path_factory.mktemp("fused"), data.draw)


@pytest.mark.slow
@settings(max_examples=400)
@given(data=st.data())
def test_c_is_numpys_for_many_more(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_product(clusters, tmp_path_factory.mktemp("fused"), data.draw)


def check_product(clusters: dict[int, Client], folder: Path, draw: Any) -> None:
    """Whatever is stored, transformed, summed, and added; one array by its own transpose or two; tiny and plenty of
    memory, k in parts or not, vectors sent with the tasks or before them, any number of workers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32), label="seed"))
    stored = draw(st.sampled_from(DTYPES), label="dtype")
    m, n, k = (draw(st.integers(1, 50), label=side) for side in "mnk")
    one_array = draw(st.booleans(), label="one array")
    transpose_a = draw(st.booleans(), label="transpose A")
    transpose_b = not transpose_a if one_array else draw(st.booleans(), label="transpose B")
    a = small_numbers(rng, (k, m) if transpose_a else (m, k), stored)
    b, n = (a, m) if one_array else (small_numbers(rng, (n, k) if transpose_b else (k, n), stored), n)
    paths = [put(folder / "a", a, (9, 11)), put(folder / "b", b, (7, 13))]
    if one_array:
        paths[1] = paths[0]
    kind = np.dtype(stored).kind
    made = np.dtype(draw(st.sampled_from(["c8", "c16"] if kind == "c" else ["f4", "f8"]), label="to"))

    def transform(array: np.ndarray) -> Transform | None:
        if not draw(st.booleans(), label="transform"):
            return None
        vectors = [vector_of(draw, rng, side, made) for side in (*array.shape, *array.shape)]
        missing = draw(st.sampled_from([None, "nan", 2]), label="missing")
        return Transform(made, vectors[0], vectors[1], 0.25, vectors[2], vectors[3], missing)

    one = transform(a)
    other = transform(b) if not one_array else one
    if one is not None and draw(st.booleans(), label="conjugate"):
        one = replace(one, conjugate=True)
    epilogue, before, held = None, None, None
    if draw(st.booleans(), label="epilogue"):
        number = np.dtype("c16" if kind == "c" and not one_array else "f8")
        rows = [vector_of(draw, rng, m, number) for _ in range(2)]
        columns = rows if one_array else [vector_of(draw, rng, n, number) for _ in range(2)]
        pairs = (
            (rng.standard_normal(m), rng.standard_normal(n))
            if draw(st.booleans(), label="pairs")
            else (None,) * 2
        )
        if one_array and pairs[0] is not None:
            pairs = pairs[0], pairs[0]
        epilogue = Epilogue(0.7, rows[0], columns[0], *pairs, 0.3, rows[1], columns[1], 1.5)
        if draw(st.booleans(), label="beta"):
            epilogue = replace(epilogue, beta=-0.5)
            held = small_numbers(rng, (m, n), "c16" if kind == "c" else "f8")
            before = put(folder / "before", held, (6, 8))
    request = Request(
        *paths,
        folder / "c",
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        cluster=clusters[draw(st.integers(1, 3), label="workers")],
        device="cpu",
        device_memory=draw(st.sampled_from([20_000, 60_000, 10**7]), label="memory"),
        transforms=(one, other),
        epilogue=epilogue,
        before=before,
    )
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        if draw(st.booleans(), label="as if it were large"):  # then so small a product has tiles, and k parts
            patched.setattr(tiling, "TILE_OPERATIONS", 5000)
            patched.setattr(tiling, "SPLIT_NBYTES", 500)
        if draw(st.booleans(), label="long vectors"):
            patched.setattr(execute, "SENT_NBYTES", 0)
        try:
            run = multiply(request)
        except PlanError:
            assert request.device_memory == 20_000, "nothing fits"
            return
    c = zarr.open_array(folder / "c")[...]
    assert run.verification is not None
    assert run.verification.passed
    exact, size = expected(a, b, request, c.dtype, held)
    eps = np.finfo(np.float32 if c.dtype == np.float16 else c.dtype).eps if c.dtype.kind in "fc" else 0
    bound = (k + 12) * eps * size
    if c.dtype == np.float16:
        bound = bound + np.finfo(np.float16).eps * np.abs(exact) + 1e-7
    assert (np.abs(c - exact) <= bound).all()
    if one_array and not (epilogue is not None and epilogue.beta):
        assert run.plan.symmetric
        hermitian = kind == "c" and one is not None and one.conjugate
        assert run.plan.hermitian == hermitian
        mirror = c.T.conj() if hermitian else c.T
        np.testing.assert_array_equal(c, mirror)
        assert np.ascontiguousarray(np.abs(c)).tobytes() == np.ascontiguousarray(np.abs(c.T)).tobytes()


def test_the_whole_of_it_by_the_public_function(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    a, b, held = numbers(rng, (50, 40), "f4"), numbers(rng, (40, 60), "f4"), numbers(rng, (50, 60), "f8")
    rows, columns, down = (
        rng.standard_normal(50),
        rng.standard_normal(60).astype("f4"),
        rng.standard_normal(50),
    )
    across = put(tmp_path / "across", rng.standard_normal(60), (20,))
    paths, out = (put(tmp_path / "a", a), put(tmp_path / "b", b)), put(tmp_path / "c", held)
    run = tw.matmul(
        *paths, out, alpha=0.5, beta=2, row_scale=rows, column_scale=columns, row_offset=down, column_offset=across,
        cluster=client, device="cpu",
    )  # fmt: skip
    wanted = (
        0.5 * rows[:, None] * columns * (a.astype("f8") @ b) + down[:, None] + zarr.open_array(across)[...]
    )
    c = zarr.open_array(out)[...]
    assert c.dtype == held.dtype, "what C held before keeps its type"
    np.testing.assert_allclose(c, wanted + 2 * held, rtol=1e-12, atol=1e-10)
    assert run.plan.finished
    assert run.plan.before_dtype == "float64"
    assert run.verification is not None
    assert run.verification.passed
    assert not partial_path(out).exists()
    assert not list(tmp_path.glob("*.replaced"))


def test_integers_stay_integers_where_all_is_integers(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    a, b = rng.integers(-9, 9, (30, 20), "i1"), rng.integers(-9, 9, (20, 40), "i1")
    held = rng.integers(-999, 999, (30, 40), "i8")
    paths, out = (put(tmp_path / "a", a), put(tmp_path / "b", b)), put(tmp_path / "c", held)
    scale = rng.integers(-5, 5, 30)
    tw.matmul(*paths, out, alpha=-3, beta=2, row_scale=scale, cluster=client, device="cpu")
    product = a.astype(int) @ b
    np.testing.assert_array_equal(zarr.open_array(out)[...], -3 * scale[:, None] * product + 2 * held)
    # A fraction makes floats of exact sums, unless integers are asked for.
    run = tw.matmul(*paths, tmp_path / "d", alpha=0.25, cluster=client, device="cpu")
    assert (run.plan.sum_dtype, run.plan.c_dtype) == ("int32", "float64")
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "d")[...], 0.25 * product)
    tw.matmul(*paths, tmp_path / "e", alpha=0.25, dtype="f4", cluster=client, device="cpu")
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "e")[...], (0.25 * product).astype("f4"))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("dtype", "options", "expected", "wraps"),
    [
        ("i1", {"alpha": 10**9}, "int64", False),
        ("i1", {"row_scale": [10**9, 1, 1], "column_offset": [5, 0]}, "int64", False),
        ("u2", {"row_offset": [-3, 0, 1]}, "int64", False),
        ("u1", {"alpha": 3, "column_offset": [2**31, 0]}, "int64", False),
        ("u1", {"alpha": -3}, "int32", False),
        ("i1", {"alpha": 10**9, "dtype": "int32"}, "int32", True),
        ("i1", {"row_offset": [2**31 - 1, 0, 0], "dtype": "int32"}, "int32", True),
        ("u2", {"alpha": 2**62}, "int64", True),
    ],
)
def test_integers_have_a_type_that_holds_what_becomes_of_them(
    dtype: str, options: dict[str, Any], expected: str, wraps: bool, client: Client, tmp_path: Path
) -> None:
    a, b = np.full((3, 4), 3, dtype), np.full((4, 2), 2, dtype)
    paths = put(tmp_path / "a", a), put(tmp_path / "b", b)
    given_options = {
        name: np.array(value) if isinstance(value, list) else value for name, value in options.items()
    }
    told: list[Event] = []
    run = tw.matmul(
        *paths, tmp_path / "c", cluster=client, device="cpu", listener=told.append, **given_options
    )
    assert run.plan.c_dtype == expected
    assert run.wraps == ("possible" if wraps else "no")
    said = [event.message for event in told if isinstance(event, Caution)]
    assert [f"beyond which C wraps modulo 2^{8 * np.dtype(expected).itemsize}" in one for one in said] == [
        True
    ] * wraps
    if wraps:
        assert "uint" not in said[0] or np.dtype(dtype).kind == "u", "signed factors cast to no unsigned type"
        return
    rows, columns, down, across = (
        given_options.get(name, np.array(absent))
        for name, absent in (("row_scale", 1), ("column_scale", 1), ("row_offset", 0), ("column_offset", 0))
    )
    exact = (
        options.get("alpha", 1) * rows.reshape(-1, 1) * columns * (a.astype(object) @ b)
        + down.reshape(-1, 1)
        + across
    )
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c")[...].astype(object), exact)


@pytest.mark.parametrize("symmetric", [False, True])
def test_floats_of_sums_that_wrapped_are_told_of(symmetric: bool, client: Client, tmp_path: Path) -> None:
    """Their check finds them wrong; it is not the memory."""
    a = np.full((3, 12), 2**60, np.int64)
    a[0, 0] += 12345
    path = put(tmp_path / "a", a)
    other = path if symmetric else put(tmp_path / "b", a)
    options: dict[str, Any] = {"transpose_b": True, "cluster": client, "device": "cpu", "alpha": 0.5}
    told = "^C failed its check: the sums, before their epilogue, may have wrapped modulo 2.64: .* a factor that is"
    with pytest.raises(VerificationError, match=told):
        tw.matmul(path, other, tmp_path / "c", **options)
    wide = put(tmp_path / "w", a.astype("f8"))
    tw.matmul(wide, wide if symmetric else other, tmp_path / "c", **options)
    np.testing.assert_allclose(
        zarr.open_array(tmp_path / "c")[...], 0.5 * (a.astype("f8") @ a.T.astype("f8"))
    )


@pytest.mark.parametrize(
    ("dtype", "asked", "expected", "told"),
    [
        ("u1", None, "uint64", False),
        ("u8", None, "uint64", False),
        ("i1", "int64", "int64", True),
        ("u1", "float64", "float64", False),
    ],
)
def test_a_c_of_uint64_stays_one_or_is_told_of(
    dtype: str, asked: str | None, expected: str, told: bool, client: Client, tmp_path: Path
) -> None:
    """Products of signed factors, of which no type holds the sums and it, need a type that is asked for."""
    a = np.array([[1, 2], [3, 4]], dtype)
    held = np.full((2, 2), 2**63 if expected == "uint64" else 2**40, np.uint64)
    path, out = put(tmp_path / "a", a), put(tmp_path / "c", held)
    said: list[Event] = []
    run = tw.matmul(path, path, out, beta=1, dtype=asked, cluster=client, device="cpu", listener=said.append)
    assert run.wraps == "no"
    c = zarr.open_array(out)[...]
    assert c.dtype == expected
    np.testing.assert_array_equal(c.astype(object), a.astype(object) @ a + held.astype(object))
    about = [event.message for event in said if isinstance(event, Notice) and "output: " in event.message]
    assert len(about) == told
    if told:
        assert "holds uint64, and is added to as int64, as asked for: numbers that are not from" in about[0]


@pytest.mark.parametrize(("k", "memory"), [(40, TIGHT), (0, TIGHT)])
def test_empty_sums_are_finished_too(k: int, memory: int, client: Client, tmp_path: Path) -> None:
    a, b = np.ones((50, k), "f4"), np.ones((k, 60), "f4")
    paths = put(tmp_path / "a", a), put(tmp_path / "b", b)
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": memory}
    run = tw.matmul(*paths, tmp_path / "c", row_offset=np.arange(50.0), **options)
    np.testing.assert_array_equal(
        zarr.open_array(tmp_path / "c")[...], np.broadcast_to(k + np.arange(50.0)[:, None], (50, 60))
    )
    assert run.verification is not None
    assert run.verification.passed


@pytest.mark.parametrize("after", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_stopped_sum_goes_on_and_adds_once(
    after: int, client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    a, b, held = numbers(rng, (50, 40), "f4"), numbers(rng, (40, 60), "f4"), numbers(rng, (50, 60), "f4")
    paths, out = (put(tmp_path / "a", a), put(tmp_path / "b", b)), put(tmp_path / "c", held)
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT, "beta": 1}
    stop_at(after, *paths, out, **options)
    np.testing.assert_array_equal(zarr.open_array(out)[...], held)
    run = tw.matmul(*paths, out, **options)
    assert run.resumed >= after
    once = zarr.open_array(out)[...]
    np.testing.assert_allclose(once, held + a @ b, rtol=1e-4, atol=1e-4)
    # Another command adds once more, and goes on with nothing of the one before.
    assert tw.matmul(*paths, out, **options).resumed == 0
    np.testing.assert_allclose(zarr.open_array(out)[...], held + 2 * (a @ b), rtol=1e-4, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", ["alpha", "beta", "vector", "c"])
def test_no_run_goes_on_with_tiles_of_another_epilogue(
    change: str, client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    a, b, held = numbers(rng, (50, 40), "f4"), numbers(rng, (40, 60), "f4"), numbers(rng, (50, 60), "f4")
    paths, out = (put(tmp_path / "a", a), put(tmp_path / "b", b)), put(tmp_path / "c", held)
    scale = rng.standard_normal(50)
    asked: dict[str, Any] = {"alpha": 2, "beta": 1, "row_scale": scale}
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT}
    stop_at(3, *paths, out, **options, **asked)
    if change == "c":
        held = held + 1
        shutil.rmtree(out)
        put(out, held)
    asked |= {"alpha": {"alpha": 3}, "beta": {"beta": 0.5}, "vector": {"row_scale": scale + 1}}.get(
        change, {}
    )
    run = tw.matmul(*paths, out, **options, **asked)
    assert run.resumed == 0
    wanted = asked["alpha"] * asked["row_scale"][:, None] * (a @ b) + asked["beta"] * held
    np.testing.assert_allclose(zarr.open_array(out)[...], wanted, rtol=1e-3, atol=1e-3)


def test_a_run_that_was_killed_once_c_had_its_name_is_not_repeated(
    client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    a, b, held = numbers(rng, (50, 40), "f4"), numbers(rng, (40, 60), "f4"), numbers(rng, (50, 60), "f4")
    paths, out = (put(tmp_path / "a", a), put(tmp_path / "b", b)), put(tmp_path / "c", held)
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT, "beta": 1}

    def keep_record(event: Event) -> None:
        if isinstance(event, UnitDone) and event.name == "matmul":
            shutil.copy(partial_path(out) / FILE_NAME, tmp_path / "record")

    tw.matmul(*paths, out, listener=keep_record, **options)
    once = zarr.open_array(out)[...]
    shutil.copy(tmp_path / "record", out / FILE_NAME)  # which the last thing that a run does removes
    with pytest.raises(OutputError, match="holds the sum already"):
        tw.matmul(*paths, out, **options)
    np.testing.assert_array_equal(zarr.open_array(out)[...], once)
    tw.matmul(*paths, out, alpha=2, **options)  # another command
    np.testing.assert_allclose(zarr.open_array(out)[...], once + 2 * (a @ b), rtol=1e-4, atol=1e-4)


def test_a_c_that_changes_while_it_is_added_to_is_left_alone(
    client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    a, b, held = numbers(rng, (50, 40), "f4"), numbers(rng, (40, 60), "f4"), numbers(rng, (50, 60), "f4")
    paths, out = (put(tmp_path / "a", a), put(tmp_path / "b", b)), put(tmp_path / "c", held)
    changed = []

    def change(event: Event) -> None:
        if isinstance(event, UnitDone) and event.name == "matmul" and not changed:
            changed.append(event)
            zarr.open_array(out, mode="r+")[0, 0] = 7

    with pytest.raises((StoreError, tw.VerificationError)):
        tw.matmul(
            *paths,
            out,
            beta=1,
            cluster=client,
            device="cpu",
            device_memory=TIGHT,
            verify=False,
            listener=change,
        )
    held[0, 0] = 7
    np.testing.assert_array_equal(zarr.open_array(out)[...], held)


def test_wrong_requests_are_refused_before_the_first_tile(client: Client, tmp_path: Path) -> None:
    real, whole = np.ones((6, 5), "f4"), np.ones((6, 5), "i1")
    f, g, h = put(tmp_path / "f", real), put(tmp_path / "g", real.T), put(tmp_path / "h", whole)
    c, narrow = put(tmp_path / "c", np.ones((6, 6), "f4")), put(tmp_path / "narrow", np.ones((6, 5), "f4"))
    integers = put(tmp_path / "integers", np.ones((6, 6), "i4"))
    waves = put(tmp_path / "waves", np.ones((6, 6), "c8"))
    unsigned = put(tmp_path / "unsigned", np.ones((6, 6), "u8"))
    new = tmp_path / "new"
    cases: list[tuple[Any, type[Exception], str, dict[str, Any]]] = [
        (new, ShapeError, "row_scale has 5 elements; it needs one dimension of 6", {"row_scale": np.ones(5)}),
        (new, ShapeError, "row_offset has 2 dimensions", {"row_offset": np.ones((2, 3))}),
        (new, DTypeError, "column_scale holds", {"column_scale": np.array(["a"] * 6)}),
        (new, OptionError, "row_scale='?", {"row_scale": 3.0}),
        (new, StoreError, "row_scale: there is no Zarr array", {"row_scale": tmp_path / "nowhere"}),
        (new, OptionError, "alpha=nan: it must be a finite number", {"alpha": np.nan}),
        (new, OptionError, "beta=inf", {"beta": np.inf}),
        (new, OptionError, "alpha=True", {"alpha": True}),
        (new, OptionError, "alpha=1j is complex, and C float32", {"alpha": 1j}),
        (new, DTypeError, "row_scale holds complex128, and C float32", {"row_scale": np.ones(6, complex)}),
        (new, StoreError, "no Zarr array at .*; beta=1 adds to what C holds", {"beta": 1}),
        (narrow, OutputError, "has shape", {"beta": 1}),
        (
            integers,
            OptionError,
            "beta=0.5 is a fraction, and C int32",
            {"beta": 0.5, "b": 1},
        ),
        (
            unsigned,
            OutputError,
            "holds uint64, and no type .* products of int8 by int8, .*; pass dtype='int64' if no number exceeds",
            {"beta": 1, "b": 1},
        ),
        (waves, OutputError, "holds complex64, which does not cast to float32", {"beta": 1, "dtype": "f4"}),
        (zarr.open_array(c, mode="r+"), OutputError, "written in place", {"beta": 1}),
        ("memory://c", OutputError, "written in place", {"beta": 1}),
        (
            new,
            OptionError,
            "alpha=0.5 is a fraction, and C int32; leave dtype out for float64",
            {"alpha": 0.5, "dtype": "i4", "b": 1},
        ),
        (
            new,
            DTypeError,
            "row_scale holds float64, and C int32",
            {"row_scale": np.ones(6), "dtype": "i4", "b": 1},
        ),
        (
            new,
            DTypeError,
            "row_scale holds integers from 4294967296 to 4294967296, and C, int32, those from -2147483648",
            {"row_scale": np.full(6, 2**32), "dtype": "i4", "b": 1},
        ),
        (
            new,
            DTypeError,
            "column_offset holds integers from -1 to -1, and C, uint8, those from 0 to 255; leave dtype out for int32",
            {"column_offset": np.full(6, -1), "dtype": "u1", "b": 2},
        ),
        (
            new,
            DTypeError,
            "row_offset holds integers from 18446744073709551615 .*, and C, int64,",
            {"row_offset": np.full(6, 2**64 - 1, "u8"), "b": 1},
        ),
        (new, OptionError, "alpha=1000.*: it must be a finite number", {"alpha": 10**400, "b": 1}),
    ]
    before = sorted(path.name for path in tmp_path.iterdir())
    for out, error, match, asked in cases:
        integer = asked.pop("b", 0)
        left, right = (f, g) if not integer else (h, put(tmp_path / "i", whole.T))
        if integer == 2:
            left = right = put(tmp_path / "i", np.ones((6, 6), np.uint8), overwrite=True)
        with pytest.raises(error, match=match) as raised:
            tw.matmul(left, right, out, cluster=client, device="cpu", **asked)
        assert "\n" not in str(raised.value)
        shutil.rmtree(tmp_path / "i", ignore_errors=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    np.testing.assert_array_equal(zarr.open_array(c)[...], np.ones((6, 6)))


def test_the_command(tmp_path: Path, rng: np.random.Generator) -> None:
    a, b, held = numbers(rng, (20, 10), "f4"), numbers(rng, (10, 30), "f4"), numbers(rng, (20, 30), "f4")
    scale = rng.standard_normal(20)
    put(tmp_path / "s", scale, (7,))
    paths = [str(put(tmp_path / name, values)) for name, values in (("a", a), ("b", b), ("c", held))]
    options = [
        "--alpha",
        "0.5",
        "--beta",
        "-1",
        "--row-scale",
        str(tmp_path / "s"),
        "--device",
        "cpu",
        "--json",
    ]
    planned = CliRunner().invoke(cli, ["matmul", *paths, *options, "--plan-only", "-q"])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["before_dtype"] == "float32"
    np.testing.assert_array_equal(zarr.open_array(paths[2])[...], held)
    done = CliRunner().invoke(cli, ["matmul", *paths, *options, "-q"])
    assert done.exit_code == 0, done.output
    wanted = 0.5 * scale[:, None] * (a @ b) - held
    np.testing.assert_allclose(zarr.open_array(paths[2])[...], wanted, rtol=1e-4, atol=1e-4)
    wrong = CliRunner().invoke(cli, ["matmul", *paths, "--alpha", "x"])
    assert wrong.exit_code == 2
    assert "is no number" in wrong.output


def test_an_audit_knows_it_and_a_repair_refuses(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    a, b = numbers(rng, (50, 40), "f4"), numbers(rng, (40, 60), "f4")
    paths, out = (put(tmp_path / "a", a), put(tmp_path / "b", b)), tmp_path / "c"
    tw.matmul(*paths, out, alpha=2, cluster=client, device="cpu")
    assert tw.audit(out).passed
    chunk = next(path for path in (out / "c").rglob("*") if path.is_file())
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    assert not tw.audit(out).passed
    with pytest.raises(OptionError, match="more than the product of A and B"):
        tw.repair(*paths, out, cluster=client, device="cpu")


def test_numbers_that_a_transform_knows_as_missing_are_no_cause_for_caution(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    x = rng.integers(0, 3, (30, 20), "i1")
    x[3, 4] = -1
    path = put(tmp_path / "x", x)
    zarr.open_array(path, mode="r+").attrs["missing_value"] = -1
    found = []
    for missing in (None, -1):
        transform = Transform(np.dtype("f4"), missing=missing)
        request = Request(
            path, path, tmp_path / f"c{missing}", transpose_a=True, transforms=(transform, transform),
            cluster=client, device="cpu", listener=lambda event: None,
        )  # fmt: skip
        found.append(multiply(request).masked)
    assert found == [{"A": 1, "B": 1}, {}]


@pytest.mark.more
@pytest.mark.parametrize("after", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_a_stopped_product_of_transformed_factors_goes_on(
    after: int, client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    x = numbers(rng, (50, 60), "f4")
    path = put(tmp_path / "x", x)
    transform = Transform(np.dtype("f4"), column_offsets=x.mean(axis=0))
    request = Request(
        path, path, tmp_path / "c", transpose_a=True, transforms=(transform, transform),
        epilogue=Epilogue(alpha=1 / 49), cluster=client, device="cpu", device_memory=TIGHT,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        multiply(replace(request, listener=stop_after(after)))
    other = replace(transform, column_offsets=x.mean(axis=0) + 1)
    assert multiply(replace(request, out=tmp_path / "c")).resumed == after
    np.testing.assert_allclose(zarr.open_array(tmp_path / "c")[...], np.cov(x.T), rtol=1e-3, atol=1e-4)
    with pytest.raises(KeyboardInterrupt):
        multiply(replace(request, listener=stop_after(after), overwrite=True))
    again = replace(request, transforms=(other, other), overwrite=True)
    assert multiply(again).resumed == 0
