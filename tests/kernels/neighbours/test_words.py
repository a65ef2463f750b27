"""Words of several bands of rows say together which rows are nearest."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.neighbours import host
from tilewright.kernels.neighbours.words import merge_words, neighbours_of, orders


def words_of(a: np.ndarray, first: int, k: int) -> np.ndarray:
    """The words of pairs whose later row is ``first`` or behind it, by the definition."""
    rows = np.arange(len(a))
    scores = orders((a @ a.T).astype(np.float32)).astype(np.uint64) << np.uint64(32)
    found = scores | (np.uint64(0xFFFFFFFF) - rows.astype(np.uint64))
    found[np.maximum(rows[:, None], rows) < first] = 0
    best = np.zeros((len(a), k), np.uint64)
    best[:, : min(k, len(a))] = np.sort(found, 1)[:, ::-1][:, :k]
    return best


@given(st.data(), st.integers(1, 40), st.integers(1, 8))
def test_merged_words_are_the_nearest_rows(data: st.DataObject, rows: int, k: int) -> None:
    seed, cut = data.draw(st.integers(0, 999)), data.draw(st.integers(0, rows))
    a = np.random.default_rng(seed).integers(-2, 3, (rows, 3)).astype(np.float32)
    best = np.zeros((rows, k), np.uint64)
    merge_words(best[:cut], words_of(a[:cut], 0, k))
    merge_words(best, words_of(a, cut, k))
    merge_words(best, words_of(a, cut, k))  # what is in both counts once
    found = neighbours_of(best, np.dtype(np.float32), "dot")
    wanted = host.Nearest(a, k, metric="dot")
    wanted.update(a, 0)
    np.testing.assert_array_equal(found.indices, wanted.result().indices)
    np.testing.assert_array_equal(found.values, wanted.result().values)
