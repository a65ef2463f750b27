"""Neighbours and pairs on the CPU against all values sorted by NumPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from tests.kernels.neighbours import naive
from tests.sampling import with_others
from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.neighbours import host, order

# For each the loops are compiled once more. A test below finds the nearest in float16 and float64, too, and the one
# after it sums small integers in both ways.
DTYPES = with_others(
    [np.dtype(name) for name in ("int8", "float32")],
    # Without ml_dtypes bfloat16 is no number.
    [
        *(np.dtype(name) for name in ("uint8", "int16", "float16", "float64")),
        *([BFLOAT16] if BFLOAT16.names is None else []),
    ],
)
SPECIAL = [np.nan, np.inf, -np.inf]


@st.composite
def matrices(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Two matrices of a few small whole numbers, so that many pairs tie and no sum is rounded; rows of zeros, rows that
    are there twice, and in floats NaN and infinity."""
    dtype = draw(st.sampled_from(DTYPES))
    m, n, width = draw(st.integers(1, 40)), draw(st.integers(1, 150)), draw(st.integers(0, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    low = 0 if dtype.kind == "u" else -2
    a, b = (rng.integers(low, 3, (rows, width)).astype(dtype) for rows in (m, n))
    b[rng.integers(0, n)] = b[0]
    a[rng.integers(0, m)] = 0
    if width and dtype.kind not in "iu" and draw(st.booleans()):
        for each in (a, b):
            each[rng.integers(0, len(each)), rng.integers(0, width)] = rng.choice(SPECIAL)
    return a, b


def cut(data: st.DataObject, n: int) -> list[tuple[int, int]]:
    """A side in blocks, in any order."""
    edges = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))})
    return list(data.draw(st.permutations(list(itertools.pairwise(edges)))))


@given(matrices(), st.sampled_from(order.METRICS), st.booleans(), st.data())
def test_the_nearest_are_those_of_a_sort(
    sides: tuple[np.ndarray, np.ndarray], metric: Any, exclude: bool, data: st.DataObject
) -> None:
    a, b = sides
    k = data.draw(st.integers(1, len(b)))
    search = host.Nearest(a, k, metric=metric, exclude_self=exclude, threads=data.draw(st.integers(1, 3)))
    for start, stop in cut(data, len(b)):
        search.update(b[start:stop], start)
    wanted = naive.nearest(*naive.exact_keys(a, b, metric), k, exclude)
    found = search.result()
    assert_array_equal(found.indices, wanted.indices)
    assert_array_equal(found.values, wanted.values)
    assert found.values.dtype == order.value_dtype(order.sum_dtype(a.dtype, b.dtype), metric)


@given(matrices(), st.sampled_from(order.METRICS), st.booleans(), st.booleans(), st.data())
def test_pairs_are_those_of_all_values(
    sides: tuple[np.ndarray, np.ndarray], metric: Any, above: bool, once: bool, data: st.DataObject
) -> None:
    a, b = sides
    threshold = data.draw(st.sampled_from([-3.0, -0.5, 0.0, 0.7071067811865475, 1.0, 1.5, 2.0, 6.0]))
    keys, values = naive.exact_keys(a, b, metric)
    given = (threshold, None) if above else (None, threshold)
    wanted = naive.pairs(values, *given, once)
    bound = order.key_bound(threshold, above, order.sum_dtype(a.dtype, b.dtype), metric)
    if bound is None:
        assert len(wanted.row) == 0
        return
    assert_array_equal(bound.admits(keys), values >= threshold if above else values <= threshold)
    for keep in (True, False):
        search = host.Beyond(a, bound, metric=metric, once=once, keep=keep)
        for start, stop in cut(data, len(b)):
            search.update(b[start:stop], start)
        assert search.count == len(wanted.row)
        for found, theirs in zip(search.result(), wanted, strict=True):
            assert_array_equal(found, theirs if keep else theirs[:0])


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("metric", order.METRICS)
def test_bits_do_not_depend_on_blocks_or_threads(dtype: str, metric: Any, rng: np.random.Generator) -> None:
    """Several strips and columns of strips, cut in many ways; rows of A are blocks of their own."""
    a, b = (rng.standard_normal((rows, 37)).astype(dtype) for rows in (230, 2100))
    b[1500] = b[3]
    whole = host.Nearest(a, 20, metric=metric, threads=1)
    whole.update(b, 0)
    wanted = whole.result()
    for step, height, threads in ((1024, 230, 2), (333, 97, 1), (2099, 1, 3)):
        for top in range(0, min(len(a), 2 * height), height):
            part = host.Nearest(a[top : top + height], 20, metric=metric, first_row=top, threads=threads)
            for start in reversed(range(0, len(b), step)):
                part.update(b[start : start + step], start)
            found = part.result()
            assert_array_equal(found.indices, wanted.indices[top : top + height])
            assert found.values.tobytes() == wanted.values[top : top + height].tobytes()
    # Of rows in parts, too.
    sums = order.sum_dtype(a.dtype, b.dtype)
    dense = host.DenseSums(len(a), len(b), sums, metric)
    for start in range(0, 37, 11):
        dense.add(a[:, start : start + 11], b[:, start : start + 11])
    of_a, of_b = dense.factors
    parts = host.Nearest(np.empty((len(a), 0), a.dtype), 20, metric=metric, factors=of_a)
    parts.take(dense.sums, 0, of_b)
    assert parts.result().values.tobytes() == wanted.values.tobytes()
    assert_array_equal(parts.result().indices, wanted.indices)


@pytest.mark.parametrize(("width", "products"), [(1024, order.FLOAT), (1025, order.INTEGER)])
@pytest.mark.parametrize("metric", order.METRICS)
def test_small_integers_are_multiplied_as_floats_as_long_as_that_is_exact(
    width: int, products: np.dtype, metric: Any, rng: np.random.Generator
) -> None:
    a, b = (rng.choice([-128, 127], (rows, width)).astype(np.int8) for rows in (20, 130))
    a[0] = b[0] = -128
    assert host.products_dtype(a.dtype, b.dtype, width) == products
    search = host.Nearest(a, 7, metric=metric)
    search.update(b, 0)
    found, wanted = search.result(), naive.nearest(*naive.exact_keys(a, b, metric), 7, False)
    assert_array_equal(found.indices, wanted.indices)
    assert_array_equal(found.values, wanted.values)


def test_equal_rows_are_equally_near(rng: np.random.Generator) -> None:
    """Whatever their places in a tile: the smaller index comes first."""
    b = np.tile(rng.standard_normal(50).astype(np.float32), (200, 1))
    search = host.Nearest(rng.standard_normal((30, 50)).astype(np.float32), 200, metric="cosine")
    search.update(b, 0)
    assert_array_equal(search.result().indices, np.tile(np.arange(200), (30, 1)))


def test_values_are_those_of_the_products(rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal((rows, 300)).astype(np.float32) for rows in (100, 500))
    search = host.Nearest(a, 500, metric="dot")
    search.update(b, 0)
    found = search.result()
    exact = np.take_along_axis(a.astype(np.float64) @ b.astype(np.float64).T, found.indices, 1)
    assert np.abs(found.values - exact).max() < 300 * 2.0**-24 * 60


def test_a_strip_with_more_pairs_than_there_is_room_for() -> None:
    """It is looked at once more."""
    a = np.ones((300, 2), np.float32)
    bound = order.key_bound(1, True, order.FLOAT, "dot")
    assert bound is not None
    search = host.Beyond(a, bound, metric="dot", once=True)
    search.update(a, 0)
    assert search.count == 300 * 299 // 2 > host.FIRST_ROOM
    found = search.result()
    row, column = np.triu_indices(300, 1)
    assert_array_equal(found.row, row)
    assert_array_equal(found.column, column)


@given(
    st.floats(allow_nan=False),
    st.booleans(),
    st.sampled_from([order.FLOAT, order.DOUBLE, order.INTEGER]),
    st.sampled_from(order.METRICS),
)
def test_a_bound_parts_the_keys_where_values_do(
    threshold: float, above: bool, sums: np.dtype, metric: Any
) -> None:
    bound = order.key_bound(threshold, above, sums, metric)
    dtype = sums if metric == "l2" else order.value_dtype(sums, metric)
    near = [threshold, threshold * (1 + 1e-7), threshold**2 if abs(threshold) < 1e9 else 0.0, 0.0, 1.0]
    if dtype.kind == "i":
        near = [float(np.clip(number, -(2.0**62), 2.0**62)) for number in near]
    with np.errstate(all="ignore"):
        keys = np.array(near).astype(dtype)
        if dtype.kind == "f":
            keys = np.concatenate([keys, np.nextafter(keys, np.inf), np.nextafter(keys, -np.inf)])
        keys = -np.abs(keys) if metric == "l2" else keys
        values = order.values_of_keys(keys, sums, metric)
    exact = [value.item() >= threshold if above else value.item() <= threshold for value in values]
    admitted = np.zeros(len(keys), bool) if bound is None else bound.admits(keys)
    assert_array_equal(admitted, exact)
