"""What a GPU's lists of neighbours hold, as the host reads it: words of 64 bits, a score's order above the complement
of its column's number, so that of two the larger is the better one, and 0 stands for none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tilewright.kernels.cpu.loops import blocks, cpu_threads
from tilewright.kernels.neighbours.order import (
    INTEGER,
    NO_INDEX,
    MetricName,
    Neighbours,
    value_dtype,
    values_of_keys,
)

DECODED_NBYTES = 2**20
"""Of words that a thread looks at at a time."""


def orders(numbers: np.ndarray) -> np.ndarray:
    """The orders, uint32, of float32 (not NaN) or int32 numbers."""
    bits = (numbers + numbers.dtype.type(0)).view(np.uint32)
    if numbers.dtype.kind == "i":
        return bits ^ np.uint32(1 << 31)
    return bits ^ np.where(bits >> 31 != 0, np.uint32(0xFFFFFFFF), np.uint32(1 << 31))


def numbers_of(found: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The numbers, float32 or int32, of orders."""
    if dtype.kind == "i":
        return (found ^ np.uint32(1 << 31)).view(dtype)
    return (found ^ np.where(found >> 31 != 0, np.uint32(1 << 31), np.uint32(0xFFFFFFFF))).view(dtype)


def neighbours_of(
    words: np.ndarray, sums: np.dtype, metric: MetricName, threads: int | None = None
) -> Neighbours:
    """The neighbours that the words of rows (rows, k) stand for. threads: that find out; by default `cpu_threads`."""
    indices = np.empty(words.shape, np.int64)
    values = np.empty(words.shape, value_dtype(sums, metric))

    def decode(rows: slice) -> None:
        mine = words[rows]
        keys = scores_of(mine, number_dtype(sums)).astype(keys_dtype(sums, metric), copy=False)
        indices[rows], values[rows] = columns_of(mine), values_of_keys(keys, sums, metric)
        missing = mine == 0
        indices[rows][missing] = NO_INDEX
        values[rows][missing] = np.nan if values.dtype.kind == "f" else 0

    step = max(1, DECODED_NBYTES // (8 * max(1, words.shape[1])))
    with ThreadPoolExecutor(threads or cpu_threads()) as pool:
        list(pool.map(decode, blocks(len(words), step)))
    return Neighbours(indices, values)


def number_dtype(sums: np.dtype) -> np.dtype:
    """That of scores."""
    return np.dtype(np.int32 if sums == INTEGER else np.float32)


def keys_dtype(sums: np.dtype, metric: MetricName) -> np.dtype:
    """That of keys, by which scores are made values."""
    return sums if metric == "l2" else value_dtype(sums, metric)


def scores_of(words: np.ndarray, number: np.dtype) -> np.ndarray:
    """Their scores, float32 or int32."""
    return numbers_of((words >> np.uint64(32)).astype(np.uint32), number)


def columns_of(words: np.ndarray) -> np.ndarray:
    """Their columns, int64."""
    return np.uint32(0xFFFFFFFF) - (words & np.uint64(0xFFFFFFFF)).astype(np.uint32).astype(np.int64)


def merge_words(best: np.ndarray, more: np.ndarray, threads: int | None = None) -> None:
    """Have each row keep the best of its own words and others: both (rows, kept) in falling order, the first written.

    A word that is in both counts once. threads: as of `neighbours_of`.
    """
    kept = best.shape[1]
    if not best.size:
        return

    def merge(rows: slice) -> None:
        both = np.concatenate((best[rows], more[rows]), 1)
        both.sort(1)
        both = both[:, ::-1]
        again = both[:, 1:] == both[:, :-1]
        if again.any():
            both[:, 1:][again] = 0
            both = np.sort(both, 1)[:, ::-1]
        best[rows] = both[:, :kept]

    step = max(1, DECODED_NBYTES // (8 * max(1, kept)))
    with ThreadPoolExecutor(threads or cpu_threads()) as pool:
        list(pool.map(merge, blocks(len(best), step)))
