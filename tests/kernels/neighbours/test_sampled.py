"""Products of a few items with many are those of NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.neighbours.sampled import add_sampled_sums


@given(some=st.integers(1, 9), many=st.integers(0, 11), elements=st.integers(0, 7), seed=st.integers(0, 99))
def test_they_are_added_whatever_the_shape(some: int, many: int, elements: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    sampled, items = draw.integers(-9, 9, (some, elements)), draw.integers(-9, 9, (many, elements))
    sums, squares = np.ones((some, many)), np.ones(many)
    add_sampled_sums(sampled, items, sums, squares)
    np.testing.assert_array_equal(sums, 1 + sampled @ items.T)
    np.testing.assert_array_equal(squares, 1 + (items * items).sum(1))


@pytest.mark.parametrize("dtype", ["f2", "f4", ">f8", "i1", "?"])
def test_items_are_of_any_dtype_and_layout(dtype: str) -> None:
    items = (np.random.default_rng(2).random((30, 42)) * 5).astype(dtype)[::-2, 1::2]
    sampled = items[:3]
    sums, squares = np.zeros((3, 15)), np.zeros(15)
    add_sampled_sums(sampled, items, sums, squares)
    wide = items.astype(float)
    np.testing.assert_allclose(sums, wide[:3] @ wide.T, rtol=1e-14)
    np.testing.assert_allclose(squares, (wide * wide).sum(1), rtol=1e-14)


def test_nan_and_infinity_are_summed_as_they_are() -> None:
    items = np.array([[np.nan, 1.0], [np.inf, 1.0], [np.inf, -np.inf], [0.0, 2.0], [1.0, np.inf]])
    sums, squares = np.zeros((1, 5)), np.zeros(5)
    add_sampled_sums(np.array([[1.0, 1.0]]), items, sums, squares)
    np.testing.assert_array_equal(sums, [[np.nan, np.inf, np.nan, 2.0, np.inf]])
    np.testing.assert_array_equal(squares, [np.nan, np.inf, np.inf, 4.0, np.inf])
