"""Products of a few items with many are those of NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.neighbours.order import METRICS, MetricName
from tilewright.kernels.neighbours.sampled import Allowance, add_sampled_sums, keep_nearest


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


@given(
    metric=st.sampled_from(METRICS),
    some=st.integers(1, 4),
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    elements=st.integers(1, 4),
    kept=st.integers(1, 5),
    largest=st.sampled_from([5.0, np.inf]),
    seed=st.integers(0, 99),
)
def test_the_nearest_are_kept_whatever_the_parts(
    metric: MetricName, some: int, counts: list[int], elements: int, kept: int, largest: float, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    sampled, items = (draw.integers(-2, 3, (side, elements)).astype(float) for side in (some, sum(counts)))
    items[draw.random(len(items)) < 0.1] = np.nan
    allowance = Allowance(0.25, 0.125, 0.5, 0.0625, largest)
    columns, least = np.full((some, kept), -1), np.full((some, kept), -np.inf)
    edges = np.cumsum([0, *counts])
    for start, stop in itertools.pairwise(edges.tolist()):
        part = items[start:stop]
        keep_nearest(sampled, part, columns, least, first=start, metric=metric, allowance=allowance)
    for place, one in enumerate(sampled):
        wanted = sorted(
            (-value, column)
            for column, item in enumerate(items)
            if (value := least_key(one, item, metric, allowance)) is not None
        )[:kept]
        order = np.lexsort((columns[place], -least[place]))
        found = [(-least[place, at], columns[place, at]) for at in order if columns[place, at] >= 0]
        np.testing.assert_allclose([value for value, _ in found], [value for value, _ in wanted], rtol=1e-12)
        if metric == "dot":  # its numbers are exact, so that ties are
            assert [column for _, column in found] == [column for _, column in wanted]


def least_key(one: np.ndarray, item: np.ndarray, metric: MetricName, allowance: Allowance) -> float | None:
    """As `keep_nearest` says; None where nothing is known."""
    total, length = one @ item, float(np.linalg.norm(one) * np.linalg.norm(item))
    if not 2 * length <= allowance.largest:
        return None
    sizes = np.sqrt(len(one)) * (np.linalg.norm(one) + np.linalg.norm(item))
    allowed = allowance.scale * length + allowance.offset + allowance.per_size * sizes
    if metric == "cosine":
        return total / length - allowed / length - allowance.rounding if length else -allowance.rounding
    if metric == "l2":
        both = one @ one + item @ item
        return float(-max(both - 2 * total, 0) - 2 * allowed - allowance.rounding * both)
    return float(total - allowed)


def test_of_equal_ones_the_earlier_stay_where_a_nearer_one_comes() -> None:
    columns, least = np.full((1, 2), -1), np.full((1, 2), -np.inf)
    exact = Allowance(0, 0, 0, 0, np.inf)
    items = np.array([[1.0], [1.0], [2.0]])
    keep_nearest(np.ones((1, 1)), items, columns, least, first=5, metric="dot", allowance=exact)
    assert sorted(columns[0].tolist()) == [5, 7]


def test_of_equal_ones_the_earlier_are_kept() -> None:
    columns, least = np.full((1, 3), -1), np.full((1, 3), -np.inf)
    exact = Allowance(0, 0, 0, 0, np.inf)
    for first in (5, 15):
        keep_nearest(
            np.ones((1, 2)), np.ones((10, 2)), columns, least, first=first, metric="dot", allowance=exact
        )
    assert sorted(columns[0].tolist()) == [5, 6, 7]


@pytest.mark.parametrize("dtype", ["f2", ">f2", BFLOAT16, "u2", "i2", "f4", "f8", "i1", "?"], ids=str)
def test_the_nearest_are_those_of_the_same_numbers(dtype: np.typing.DTypeLike) -> None:
    """Numbers of 16 bits are looked up, NaN and infinity too."""
    items = (np.random.default_rng(4).standard_normal((900, 33)) * 3).astype(dtype)
    if np.dtype(dtype) in (np.dtype("f2"), np.dtype(">f2"), BFLOAT16):
        items[5, 3], items[6, 4], items[7, 5], items[8, 6] = np.nan, np.inf, -np.inf, 1e-7
    found = []
    for given_items in (items[::-1, ::2], items[::-1, ::2].astype(np.float64)):
        columns, least = np.full((4, 7), -1), np.full((4, 7), -np.inf)
        allowance = Allowance(1e-6, 0, 0, 0, 1e30)
        keep_nearest(
            items[20:24, ::2], given_items, columns, least, first=3, metric="l2", allowance=allowance
        )
        found.append((columns, least))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])
