"""`matmul` with numbers and vectors that its sums are multiplied by, and that are added to them, as callers give these:
against NumPy, for any dtype, chunks and number of workers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tests.workflows.labels import drawn_labels, others_along, put_labelled
from tests.workflows.products import check_precision, put
from tilewright.kernels.choices import PRECISIONS
from tilewright.pipeline.events import Event

DTYPES = ["i1", "u2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]
HELD = {"i8": ["i4", "u4", "i8", "u8"], "f8": ["f4", "f8"], "c16": ["c16"]}
"""What C may hold that is added to, by what NumPy forms it in."""
VECTORS = {"row_scale": 0, "column_scale": 1, "row_offset": 0, "column_offset": 1}
"""The axis of C along which each has its numbers."""


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Whole ones, whose sums are exact in any dtype."""
    kind = np.dtype(dtype).kind
    values = rng.integers(0 if kind == "u" else -3, 4, shape)
    return (values + 1j * rng.integers(-3, 4, shape) if kind == "c" else values).astype(dtype)


def refused_for(held_as: str, dtype: str, k: int, lowest: int) -> tuple[type[Exception], str] | None:
    """The error of integers, factors of a dtype or the least number of a vector, that no type holds beside a C that is
    added to; None of those that one does. held_as: C's dtype, empty where it is not added to."""
    signed = np.dtype(dtype).kind == "i"
    if held_as == "u8" and signed:
        return tw.OutputError, "no type of integers holds that and sums of products"
    stays = held_as == "u8" or (held_as == "u4" and dtype == "u2" and k == 1)  # whose products it holds
    if stays and lowest < 0:
        told = (
            r"holds integers from -.*, and C, uint.*; pass dtype='int64'.*, or dtype='float64', which rounds"
        )
        return tw.DTypeError, told
    return None


def check_case(clusters: dict[int, Client], folder: Path, draw: Any) -> None:
    rng = np.random.default_rng(draw(st.integers(0, 2**32), label="seed"))
    dtype = draw(st.sampled_from(DTYPES), label="dtype")
    integral = np.dtype(dtype).kind in "iu" and draw(st.booleans(), label="all of it integers")
    kind = "i8" if integral else "c16" if dtype.startswith("c") else "f8"
    m, n, k = (draw(st.integers(0 if side == "k" else 1, 50), label=side) for side in "mnk")
    transposed = [draw(st.booleans(), label=f"transpose {name}") for name in "AB"]
    own = draw(st.booleans(), label="one array")
    if own:
        transposed[1], n = not transposed[0], m
    left, right = numbers(rng, (m, k), dtype), numbers(rng, (k, n), dtype)
    right = left.T if own else right
    of_a = drawn_labels(draw, k) if k and draw(st.booleans(), label="coordinates") else None
    of_b, same = (None, True) if of_a is None or own else others_along(draw, of_a)
    paths = [
        put_labelled(
            folder / name,
            np.ascontiguousarray(one.T if turned else one),
            chunks,
            ("k", name) if turned == (name == "a") else (name, "k"),
            {0 if turned == (name == "a") else 1: labels},
        )
        for name, one, turned, chunks, labels in zip(
            "ab", (left, right), transposed, ((9, 11), (7, 13)), (of_a, of_b), strict=True
        )
        if name == "a" or not own
    ]

    def number(label: str, least: int) -> Any:
        if integral:
            return draw(st.integers(least, 4), label=label)
        found = draw(st.floats(-2, 2).filter(lambda one: abs(one) > 0.1), label=label)
        return complex(found, 0.5) if kind == "c16" and draw(st.booleans()) else found

    options: dict[str, Any] = {}
    lowest: Any = 0
    exact = left.astype("c16" if kind == "c16" else "f8") @ right
    size = np.abs(left).astype("f8") @ np.abs(right)
    if draw(st.booleans(), label="with alpha"):
        options["alpha"] = number("alpha", -4)
        exact, size = options["alpha"] * exact, abs(options["alpha"]) * size
    for name, axis in VECTORS.items():
        if not draw(st.booleans(), label=name):
            continue
        vector = (
            numbers(rng, (m, n)[axis : axis + 1], kind) if integral else rng.standard_normal((m, n)[axis])
        )
        how = draw(st.sampled_from(["array", "list", "path", "open array", "narrow"]), label=f"{name} as")
        if how == "narrow":
            vector = vector.astype("i2" if integral else "f4")
        lowest = min(lowest, vector.min()) if integral else 0
        laid = vector.astype("f8")[:, np.newaxis] if axis == 0 else vector.astype("f8")
        if name.endswith("scale"):
            exact, size = exact * laid, size * np.abs(laid)
        else:
            exact, size = exact + laid, size + np.abs(laid)
        stored = put(folder / name, vector, (7,)) if how in ("path", "open array") else vector
        stored = vector.tolist() if how == "list" else stored
        options[name] = zarr.open_array(stored) if how == "open array" else stored
    out, held_as = folder / "c", ""
    if draw(st.booleans(), label="with beta"):
        options["beta"] = number("beta", 1)
        wide = draw(st.sampled_from(HELD[kind]), label="C holds")
        held = numbers(rng, (m, n), wide)
        put(out, held, (6, 8))
        exact, size = exact + options["beta"] * held.astype(kind), size + abs(options["beta"]) * np.abs(held)
        held_as = wide
    precision = draw(st.sampled_from(PRECISIONS), label="precision")
    told: list[Event] = []
    multiply = partial(
        tw.matmul,
        paths[0],
        paths[-1],
        out,
        transpose_a=transposed[0],
        transpose_b=transposed[1],
        cluster=clusters[draw(st.integers(1, 3), label="workers")],
        device="cpu",
        device_memory=draw(st.sampled_from(["60KB", "1MB"]), label="memory"),
        listener=told.append,
    )
    if not same:
        with pytest.raises(tw.OptionError, match=r"^the coordinates k, the inner side, .*align='position'"):
            multiply(**options)
        options["align"] = "position"
    if (error := refused_for(held_as, dtype, k, lowest)) is not None:
        with pytest.raises(error[0], match=error[1]):
            multiply(**options)
        options["dtype"] = "i8"
    try:
        run, refused = multiply(precision=precision, **options), False
    except tw.OptionError as error:
        if not str(error).startswith(f"precision={precision!r} is a choice for"):
            raise
        run, refused = multiply(**options), True
    check_precision(run, precision, refused, told)
    assert run.verification is not None
    assert run.verification.passed
    c = zarr.open_array(out)[...]
    negative = c.dtype.kind == "u" and (exact < 0).any()
    assert run.wraps == "possible" if negative else run.wraps == "no" or c.dtype.kind == "u"
    assert tw.audit(out).passed
    assert not integral or c.dtype.kind in "iu"
    if c.dtype.kind in "iu":
        np.testing.assert_array_equal(c, exact.astype("i8").astype(c.dtype))
        return
    eps = np.finfo(c.dtype).eps
    assert (np.abs(c - exact) <= (k + 12) * eps * size).all()
    if "beta" in options:
        assert c.dtype == held.dtype


@pytest.mark.parametrize(("held_as", "dtype", "k"), [("u8", "u1", 3), ("u8", "u8", 1), ("u4", "u2", 1)])
def test_a_negative_offset_beside_unsigned_integers_is_told_what_holds_it(
    held_as: str, dtype: str, k: int, client: Client, tmp_path: Path
) -> None:
    """The refusal that the property tests expect, which they draw once in many runs, and what it says to do."""
    a, b = np.ones((2, k), dtype), np.ones((k, 2), dtype)
    out = put(tmp_path / "c", np.full((2, 2), 7, held_as), (2, 2))
    told = refused_for(held_as, dtype, k, -3)
    assert told is not None
    with pytest.raises(told[0], match=told[1]):
        tw.matmul(a, b, out, beta=1, row_offset=[-3, 2], cluster=client)
    tw.matmul(a, b, out, beta=1, row_offset=[-3, 2], dtype="int64", cluster=client)
    assert zarr.open_array(out)[...].tolist() == [[4 + k, 4 + k], [9 + k, 9 + k]]


def test_without_a_place_there_is_nothing_to_add_to(client: Client) -> None:
    a = np.ones((2, 2))
    with pytest.raises(tw.OptionError, match="beta=1 without out: there is no C to add to"):
        tw.matmul(a, a, beta=1, cluster=client)


@settings(max_examples=6)
@given(data=st.data())
def test_c_is_numpys(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_case(clusters, tmp_path_factory.mktemp("epilogue"), data.draw)


@pytest.mark.slow
@settings(max_examples=300, derandomize=False)
@given(data=st.data())
def test_c_is_numpys_many_times_over(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_case(clusters, tmp_path_factory.mktemp("epilogue"), data.draw)
