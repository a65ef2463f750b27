"""`matmul` with numbers and vectors that its sums are multiplied by, and that are added to them, as callers give these:
against NumPy, for any dtype, chunks and number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tests.workflows.products import put

DTYPES = ["i1", "u2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]
VECTORS = {"row_scale": 0, "column_scale": 1, "row_offset": 0, "column_offset": 1}
"""The axis of C along which each has its numbers."""


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Whole ones, whose sums are exact in any dtype."""
    kind = np.dtype(dtype).kind
    values = rng.integers(0 if kind == "u" else -3, 4, shape)
    return (values + 1j * rng.integers(-3, 4, shape) if kind == "c" else values).astype(dtype)


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
    paths = [
        put(folder / name, np.ascontiguousarray(one.T if turned else one), chunks)
        for name, one, turned, chunks in zip("ab", (left, right), transposed, ((9, 11), (7, 13)), strict=True)
        if name == "a" or not own
    ]

    def number(label: str, least: int) -> Any:
        if integral:
            return draw(st.integers(least, 4), label=label)
        found = draw(st.floats(-2, 2).filter(lambda one: abs(one) > 0.1), label=label)
        return complex(found, 0.5) if kind == "c16" and draw(st.booleans()) else found

    options: dict[str, Any] = {}
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
        laid = vector.astype("f8")[:, np.newaxis] if axis == 0 else vector.astype("f8")
        if name.endswith("scale"):
            exact, size = exact * laid, size * np.abs(laid)
        else:
            exact, size = exact + laid, size + np.abs(laid)
        stored = put(folder / name, vector, (7,)) if how in ("path", "open array") else vector
        stored = vector.tolist() if how == "list" else stored
        options[name] = zarr.open_array(stored) if how == "open array" else stored
    out = folder / "c"
    if draw(st.booleans(), label="with beta"):
        options["beta"] = number("beta", 1)
        wide = (
            "i8"
            if integral
            else "c16"
            if kind == "c16"
            else draw(st.sampled_from(["f4", "f8"]), label="C holds")
        )
        held = numbers(rng, (m, n), wide)
        put(out, held, (6, 8))
        exact, size = exact + options["beta"] * held, size + abs(options["beta"]) * np.abs(held)
    run = tw.matmul(
        paths[0],
        paths[-1],
        out,
        transpose_a=transposed[0],
        transpose_b=transposed[1],
        cluster=clusters[draw(st.integers(1, 3), label="workers")],
        device="cpu",
        device_memory=draw(st.sampled_from(["60KB", "1MB"]), label="memory"),
        listener=lambda event: None,
        **options,
    )
    assert run.verification is not None
    assert run.verification.passed
    assert run.wraps == "no"
    c = zarr.open_array(out)[...]
    assert tw.audit(out).passed
    assert not integral or c.dtype.kind in "iu"
    if c.dtype.kind in "iu":
        np.testing.assert_array_equal(c, exact)
        return
    eps = np.finfo(c.dtype).eps
    assert (np.abs(c - exact) <= (k + 12) * eps * size).all()
    if "beta" in options:
        assert c.dtype == held.dtype


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
