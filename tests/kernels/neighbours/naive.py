"""The slow answers: all values, in order, by NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.kernels.neighbours import order


def exact_keys(a: np.ndarray, b: np.ndarray, metric: Any) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of all pairs of rows of small whole numbers, whose sums no order rounds."""
    sums = order.sum_dtype(a.dtype, b.dtype)
    wide: Any = np.int64 if sums == order.INTEGER else np.float64
    left, right = a.astype(wide), b.astype(wide)
    with np.errstate(all="ignore"):
        products = (left @ right.T).astype(sums)
        factors = [order.row_factors((each * each).sum(1), sums, metric) for each in (left, right)]
    return order.keys_of(products, *factors, metric), order.values_of(products, *factors, metric)


def nearest(keys: np.ndarray, values: np.ndarray, k: int, exclude: bool) -> order.Neighbours:
    """The k nearest of each row, by sorting them all."""
    indices = np.full((len(keys), k), order.NO_INDEX, np.int64)
    found = np.full((len(keys), k), np.nan if values.dtype.kind == "f" else 0, values.dtype)
    columns = np.arange(keys.shape[1])
    for i, row in enumerate(keys):
        known = (row == row) & ~(exclude & (columns == i))
        by_key = np.lexsort((columns, np.negative(row)))
        best = by_key[known[by_key]][:k]
        indices[i, : len(best)], found[i, : len(best)] = best, values[i, best]
    return order.Neighbours(indices, found)


def pairs(values: np.ndarray, above: float | None, below: float | None, once: bool) -> order.Pairs:
    """All pairs on one side, by comparing them all."""
    with np.errstate(invalid="ignore"):
        wanted = values >= above if above is not None else values <= below
    if once:
        wanted &= np.arange(values.shape[1])[None, :] > np.arange(len(values))[:, None]
    row, column = np.nonzero(wanted)
    return order.Pairs(row, column, values[row, column])
