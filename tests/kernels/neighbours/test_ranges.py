"""Items of any length have the cosines of others in the same direction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.neighbours import host, order
from tilewright.kernels.neighbours.ranges import MOST_EXPONENT, Ranges, bring_into_range, largest_of

FLOATS = [np.dtype("f4"), np.dtype("f8"), *([BFLOAT16] if BFLOAT16.names is None else [])]
EXPONENTS = {order.FLOAT: (-110, 110), order.DOUBLE: (-950, 950)}
"""By which numbers near 1 are multiplied that stay normal numbers."""


def sums_of(dtype: np.dtype) -> np.dtype:
    return order.sum_dtype(dtype, dtype)


def powers_of_two(draw: Any, rng: np.random.Generator, count: int, sums: np.dtype) -> np.ndarray:
    """An exponent for each item; those of many are in range."""
    low, high = EXPONENTS[sums]
    widest = draw(st.sampled_from([1, 4]), label="most are in range")
    return (rng.integers(low, high + 1, count) // rng.integers(1, widest + 1, count)).astype(np.int32)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_largest_of_each_item_is_found(
    dtype: np.dtype, threads: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilewright.kernels.neighbours.ranges.BLOCK_NBYTES", 1000)
    items = rng.standard_normal((101, 70)).astype(dtype)
    items[3], items[4, 5], items[9, 2], items[11, 3] = 0, -np.inf, np.nan, -np.nan
    wanted = np.abs(items.astype("f8")).max(1)
    for laid in (items, np.asfortranarray(items)):
        assert_array_equal(largest_of(laid, threads), wanted)
    assert_array_equal(largest_of(items[::-2], threads), wanted[::-2])
    assert largest_of(items[:0]).shape == (0,)
    assert_array_equal(largest_of(items[:3, :0]), np.zeros(3))
    if dtype != BFLOAT16:
        assert_array_equal(largest_of(items.astype(dtype.newbyteorder(">")), threads), wanted)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(data=st.data())
def test_items_out_of_range_are_divided_by_a_power_of_two_and_others_stay(
    dtype: np.dtype, data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    sums = sums_of(dtype)
    exponents = powers_of_two(data.draw, rng, 30, sums)
    whole = rng.integers(-127, 128, (30, 6)).astype(dtype)  # of 7 bits, which bfloat16 has too
    items = np.ldexp(whole.astype(sums), exponents[:, np.newaxis]).astype(dtype)
    items[4], items[5, 0], items[6, 1] = 0, np.nan, np.inf
    found = items.copy()
    bring_into_range(found, sums)
    sizes = largest_of(items)
    inside = (sizes == 0) | ~np.isfinite(sizes)
    inside |= (sizes >= 2.0 ** (-MOST_EXPONENT[sums] - 1)) & (sizes < 2.0 ** MOST_EXPONENT[sums])
    assert found[inside].tobytes() == items[inside].tobytes()
    divided = found[~inside].astype("f8")
    assert ((np.abs(divided).max(1) >= 0.5) & (np.abs(divided).max(1) < 1)).all()
    ratio = np.abs(divided).max(1) / sizes[~inside].astype(np.longdouble)
    assert_array_equal(divided, items[~inside].astype(np.longdouble) * ratio[:, np.newaxis])
    assert (np.frexp(ratio)[0] == 0.5).all()


@pytest.mark.parametrize("dtype", ["i1", "i8", "f2", "?"])
def test_integers_and_float16_are_always_in_range(dtype: str) -> None:
    items = np.array([[1, 0], [0, 0]], dtype)
    kept = items.copy()
    bring_into_range(items, np.dtype("f8"))
    assert_array_equal(items, kept)
    assert Ranges(2, np.dtype("f4")).take(items) == (items, None)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(data=st.data())
def test_cosines_do_not_depend_on_lengths(dtype: np.dtype, data: st.DataObject) -> None:
    """To the bit: of whole items, and of those in parts, whose largest element may come last."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    sums = sums_of(dtype)
    a, b = (rng.standard_normal((count, 20)).astype(dtype) for count in (9, 40))
    for each in (a, b):  # what comes first may be far smaller
        each[1::2, : data.draw(st.integers(0, 19))] *= np.asarray(2.0**-10, dtype)
    a[3], b[5], b[6, 7] = 0, 0, np.nan
    near = host.Nearest(a, 12, metric="cosine", threads=1)
    near.update(b, 0)
    wanted = near.result()
    longer = [
        np.ldexp(each.astype(sums), powers_of_two(data.draw, rng, len(each), sums)[:, np.newaxis]).astype(
            dtype
        )
        for each in (a, b)
    ]
    step = data.draw(st.integers(1, 20), label="elements of a part")
    dense = host.DenseSums(9, 40, sums, "cosine", threads=1)
    for start in range(0, 20, step):
        dense.add(longer[0][:, start : start + step], longer[1][:, start : start + step])
    of_a, of_b = dense.factors
    parts = host.Nearest(np.empty((9, 0), dtype), 12, metric="cosine", factors=of_a, threads=1)
    parts.take(dense.sums, 0, of_b)
    for each in longer:
        bring_into_range(each, sums)
    whole = host.Nearest(longer[0], 12, metric="cosine", threads=1)
    whole.update(longer[1], 0)
    for found in (whole.result(), parts.result()):
        assert_array_equal(found.indices, wanted.indices)
        assert found.values.tobytes() == wanted.values.tobytes()
