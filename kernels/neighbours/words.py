"""What a GPU's lists of neighbours hold, as the host reads it: words of 64 bits, a score's order above the complement
of its column's number, so that of two the larger is the better one, and 0 stands for none."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numba import types

from tilewright.kernels.cpu.loops import blocks, compiled, cpu_threads, read_only
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
_NAN = 0x7FC00000
"""The bits of NumPy's NaN, float32."""


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
    words: np.ndarray,
    sums: np.dtype,
    metric: MetricName,
    threads: int | None = None,
    into: Neighbours | None = None,
) -> Neighbours:
    """The neighbours that the words of rows (rows, k) stand for, those of each in falling order. threads, into: as of
    `neighbours_of_bands`."""
    return neighbours_of_bands(
        np.ascontiguousarray(words), [len(words)], words.shape[1], sums, metric, threads, into
    )


def room_for(rows: int, k: int, sums: np.dtype, metric: MetricName) -> Neighbours:
    """Arrays for the neighbours of rows, which have been written to: the system gives memory by then, and not when an
    answer is waited for."""
    return Neighbours(np.full((rows, k), 0, np.int64), np.full((rows, k), 0, value_dtype(sums, metric)))


def neighbours_of_bands(
    words: np.ndarray,
    rows: Sequence[int],
    k: int,
    sums: np.dtype,
    metric: MetricName,
    threads: int | None = None,
    into: Neighbours | None = None,
) -> Neighbours:
    """The k nearest of each row by the words that several bands have found.

    Parameters
    ----------
    words
        uint64 (all rows, kept), C-contiguous: those of one band behind those of another, the words of a row in falling
        order, and 0 where there is none. A word that several bands have counts once.
    rows
        Of each band, which has those from the first one on. The result has as many as the longest.
    k
        At most ``kept``.
    threads
        That find out; by default `cpu_threads`.
    into
        Whose arrays the neighbours are put into and returned in, of `room_for`'s shapes and types.

    Examples
    --------
    >>> import numpy as np
    >>> words = np.array([[5, 3], [9, 4], [5, 1]], np.uint64) << np.uint64(32) | np.uint64(0xFFFFFFFF)
    >>> (neighbours_of_bands(words, [1, 2], 2, INTEGER, "dot").values + 2**31).tolist()
    [[9, 5], [5, 1]]
    """
    number = number_dtype(sums)
    shape, value = (max(rows, default=0), k), value_dtype(sums, metric)
    indices, values = into or Neighbours(np.empty(shape, np.int64), np.empty(shape, value))
    lengths = np.array(rows, np.int64)
    missing = 0 if number.kind == "i" else _NAN
    plain = value == number and metric != "l2"  # a score is the value
    bits = values.view(np.uint32) if plain else np.empty(shape, np.uint32)
    words, nearest = read_only(words), compiled(_nearest, *_types())

    def find(mine: slice) -> None:
        nearest(words, np.cumsum(lengths) - lengths, lengths, mine.start, missing, indices[mine], bits[mine])
        if plain:
            return
        keys = bits[mine].view(number).astype(keys_dtype(sums, metric), copy=False)
        values[mine] = values_of_keys(keys, sums, metric)
        values[mine][indices[mine] == NO_INDEX] = np.nan if values.dtype.kind == "f" else 0

    step = max(1, DECODED_NBYTES // (8 * max(1, k)))
    with ThreadPoolExecutor(threads or cpu_threads()) as pool:
        list(pool.map(find, blocks(len(indices), step) if len(indices) else ()))
    return Neighbours(indices, values)


def _types() -> tuple[Any, ...]:
    words = types.Array(types.uint64, 2, "C", readonly=True)
    found = types.int64[:, ::1], types.uint32[:, ::1]
    return words, types.int64[::1], types.int64[::1], types.int64, types.int64, *found


def _nearest(words, firsts, lengths, start, missing, indices, bits):  # type: ignore[no-untyped-def]
    """The best words of rows from ``start`` on, as columns and the bits of numbers: those of ``missing`` where there is
    none, which are 0 for int32, and no others.

    One pass, outside the interpreter: where dozens of threads do this in steps of NumPy's, they wait for its lock most
    of the time.
    """
    places, kept = np.zeros(len(lengths), np.int64), words.shape[1]
    for i in range(len(indices)):
        row = start + i
        places[:] = 0
        last = np.uint64(0)
        for neighbour in range(indices.shape[1]):
            best, whose = np.uint64(0), -1
            for band in range(len(lengths)):
                if row >= lengths[band]:
                    continue
                mine, place = firsts[band] + row, places[band]
                while place < kept and words[mine, place] == last and last != 0:
                    place += 1
                places[band] = place
                if place < kept and words[mine, place] > best:
                    best, whose = words[mine, place], band
            if whose < 0:
                indices[i, neighbour], bits[i, neighbour] = NO_INDEX, np.uint32(missing)
                continue
            last = best
            places[whose] += 1
            indices[i, neighbour] = np.int64(0xFFFFFFFF) - np.int64(best & np.uint64(0xFFFFFFFF))
            order = np.uint32(best >> np.uint64(32))
            flipped = missing == 0 or order >> np.uint32(31) != 0
            bits[i, neighbour] = order ^ (np.uint32(1 << 31) if flipped else np.uint32(0xFFFFFFFF))


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
