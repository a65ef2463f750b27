"""Words of several bands of rows say together which rows are nearest."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from tilewright.kernels.neighbours import host, order
from tilewright.kernels.neighbours.words import (
    columns_of,
    neighbours_of,
    neighbours_of_bands,
    number_dtype,
    orders,
    scores_of,
)


def words_of(a: np.ndarray, first: int, k: int, metric: Any) -> np.ndarray:
    """The words of pairs whose later row is ``first`` or behind it, by the definition."""
    rows, squares = np.arange(len(a)), order.row_factors((a * a).sum(1), order.FLOAT, metric)
    keys = order.keys_of(a @ a.T, squares, squares, metric)
    scores = orders(keys.astype(np.float32)).astype(np.uint64) << np.uint64(32)
    found = scores | (np.uint64(0xFFFFFFFF) - rows.astype(np.uint64))
    found[np.maximum(rows[:, None], rows) < first] = 0
    best = np.zeros((len(a), k), np.uint64)
    best[:, : min(k, len(a))] = np.sort(found, 1)[:, ::-1][:, :k]
    return best


@given(st.data(), st.integers(1, 40), st.integers(1, 8), st.integers(0, 2), st.sampled_from(["dot", "l2"]))
def test_words_of_bands_are_the_nearest_rows(
    data: st.DataObject, rows: int, k: int, more: int, metric: Any
) -> None:
    """Also where they have more of each row than are wanted, and some are in two bands."""
    seed, edges = (
        data.draw(st.integers(0, 999)),
        sorted(data.draw(st.lists(st.integers(0, rows), max_size=3))),
    )
    a = np.random.default_rng(seed).integers(-2, 3, (rows, 3)).astype(np.float32)
    bands = [(first, stop) for first, stop in itertools.pairwise([0, *edges, rows])]
    bands += bands[-1:]
    found = np.concatenate([words_of(a[:stop], first, k + more, metric) for first, stop in bands])
    near = neighbours_of_bands(found, [stop for _, stop in bands], k, np.dtype(np.float32), metric)
    wanted = host.Nearest(a, k, metric=metric)
    wanted.update(a, 0)
    np.testing.assert_array_equal(near.indices, wanted.result().indices)
    np.testing.assert_array_equal(near.values, wanted.result().values)


@given(st.integers(0, 999), st.integers(1, 40), st.sampled_from([order.FLOAT, order.INTEGER]))
def test_words_are_taken_apart_as_numpy_does(seed: int, rows: int, sums: np.dtype) -> None:
    found = np.random.default_rng(seed).integers(0x00800000, 0xFF000000, (rows, 4), np.uint64) << np.uint64(
        32
    )
    found |= np.random.default_rng(seed + 1).integers(0, 2**32, (rows, 4), np.uint64)
    found[found % np.uint64(5) == 0] = 0
    found = np.sort(found, 1)[:, ::-1]
    near = neighbours_of(found, sums, "dot", threads=2)
    there = found != 0
    assert_array_equal(near.indices, np.where(there, columns_of(found), order.NO_INDEX))
    scores = scores_of(found, number_dtype(sums))
    assert near.values.dtype == sums
    assert_array_equal(
        near.values, np.where(there, scores, np.nan if sums == order.FLOAT else 0).astype(sums)
    )


def test_no_rows_have_no_neighbours() -> None:
    found = neighbours_of(np.empty((0, 3), np.uint64), order.FLOAT, "dot")
    assert found.indices.shape == found.values.shape == (0, 3)
