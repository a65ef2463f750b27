"""The one tolerance: right sums pass in any order, and mistakes of one part in the precision do not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import naive
from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.tolerance import tolerance


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("k", [1, 10, 1000])
def test_sums_in_any_order_are_within_it(dtype: str, k: int, rng: np.random.Generator) -> None:
    a, b = naive.numbers(rng, (20, k), dtype), naive.numbers(rng, (k, 20), dtype)
    order = rng.permutation(k)
    backward = np.zeros((20, 20), dtype)
    for step in order:
        backward += a[:, step, None] * b[step]
    for found in (a @ b, a[:, order] @ b[order], backward):
        naive.assert_product(found, a, b)


@pytest.mark.parametrize("dtype", ["bfloat16", "f2", "f4", "f8", "c8", "c16"])
def test_a_lost_product_is_outside_it(dtype: str) -> None:
    a = np.ones((1, 50), dtype)
    with pytest.raises(AssertionError, match="allowed"):
        naive.assert_product(np.full((1, 1), 49, dtype), a, a.T)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_rounded_operands_meet_their_tolerance_and_not_the_full_one(
    precision: str, rng: np.random.Generator
) -> None:
    bits = {"tf32": 13, "bf16": 16, "fp16": 13}[precision]  # how many of float32's 23 stored bits are cut
    a, b = naive.numbers(rng, (30, 40), "f4"), naive.numbers(rng, (40, 30), "f4")
    cut = [(x.view("u4") >> bits << bits).view("f4") for x in (a, b)]
    if precision == "fp16":
        cut = [x.astype("f2").astype("f4") for x in (a, b)]
    found = cut[0] @ cut[1]
    scale = np.abs(a) @ np.abs(b)
    error = np.abs(found - naive.matmul(a, b)).astype("f8")
    if precision == "bf16":
        # Cutting, as here, loses twice what rounding does.
        error = error / 2
    assert (error <= tolerance(40, "f4", scale, precision, naive.sizes(a, b))).all()
    assert (error > tolerance(40, "f4", scale)).any()


@pytest.mark.parametrize(("precision", "size"), [("fp16", 1e-7), ("fp16", 1e-9), ("bf16", 1e-40)])
@pytest.mark.parametrize("both", [False, True])
def test_operands_that_become_subnormal_are_within_it(
    precision: str, size: float, both: bool, rng: np.random.Generator
) -> None:
    """Their errors are absolute, so that the scale of the product says nothing about them."""
    narrow = np.dtype("f2") if precision == "fp16" else BFLOAT16
    a, b = naive.numbers(rng, (30, 40), "f4"), naive.numbers(rng, (40, 30), "f4")
    a *= np.float32(size)
    b *= np.float32(size if both else 1)
    cut = [x.astype(narrow).astype("f8") for x in (a, b)]
    error = np.abs(cut[0] @ cut[1] - a.astype("f8") @ b.astype("f8"))
    scale = np.abs(a).astype("f8") @ np.abs(b).astype("f8")
    assert (error <= tolerance(40, "f4", scale, precision, naive.sizes(a, b))).all()
    assert both or (error > tolerance(40, "f4", scale, precision, 0)).any(), "the measurement itself"


def test_narrowed_operands_need_their_sizes() -> None:
    with pytest.raises(ValueError, match="sizes"):
        tolerance(10, "f4", 1.0, "fp16")


def test_integers_are_exact() -> None:
    assert tolerance(1000, "i8", 1e18) == 0


def test_it_grows_with_k_and_scale() -> None:
    assert tolerance(10, "f4", 1.0) < tolerance(20, "f4", 1.0) < tolerance(20, "f4", 2.0)
    assert tolerance(2**24, "f4", 1.0) == np.inf
