"""Counting stored numbers that stand for missing ones, against Python's own comparisons."""

from __future__ import annotations

import math
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.naive import COMPLEX, INTEGERS
from tilewright.kernels.passes import masked
from tilewright.kernels.passes.masked import Masks, count_masked

FLOATS = ("f2", "f4", "f8")
ORDERED = INTEGERS + FLOATS
VIEWS = {
    "C": lambda block: block,
    "F": np.asfortranarray,
    "transposed": lambda block: block.T,
    "pitched": lambda block: block[:, 1:-2],
    "strided": lambda block: block[::2, ::-3],
    "vector": lambda block: block[:, 0],
    "repeated": lambda block: np.broadcast_to(block[0], (3, block.shape[1])),
    "cube": lambda block: block.reshape(2, -1, block.shape[1])[:, ::2],
    "scalar": lambda block: block[0, 0],
    "empty": lambda block: block[:, :0],
}


def naive(block: np.ndarray, masks: Masks) -> int:
    least = -math.inf if masks.least is None else masks.least
    most = math.inf if masks.most is None else masks.most

    def missing(value: Any) -> bool:
        if value in masks.values:
            return True
        if masks.least is None and masks.most is None:
            return False
        low, high = value < least, value > most
        return bool(low or high if least <= most else low and high)

    return sum(missing(value) for value in block.ravel().tolist())


def block_of(dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Rows of several pieces, with each number often; among floats NaN, infinity and both zeros too."""
    block = rng.integers(0, 12, (6, 2 * masked.PIECE + 5)).astype(dtype)
    if block.dtype.kind in "fc":
        block[0, :6] = np.nan, np.inf, -np.inf, -0.0, 0.0, np.nan
    else:
        block[0, :2] = np.iinfo(dtype).min, np.iinfo(dtype).max
    return block


@pytest.mark.sample(7)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [*ORDERED, *COMPLEX, ">i2", ">f2", ">f4", ">c8"])
def test_every_dtype_and_layout(dtype: str, view: str, rng: np.random.Generator) -> None:
    block = block_of(dtype, rng)
    kind = block.dtype.kind
    cases = [Masks((7, 0)), Masks((3,))]
    if kind in "fc":
        cases += [Masks((0.0, math.inf)), Masks((-math.inf,))]
    if kind != "c":
        cases += [Masks((), 2, 9), Masks((4, 5), 2, None), Masks((1,), None, 9), Masks((10,), 9, 3), Masks()]
    for masks in cases:
        part = VIEWS[view](block)
        assert count_masked(part, masks) == naive(part, masks), masks
    assert count_masked(VIEWS["C"](block), cases[0]) > 1000, "there was something to count"


@pytest.mark.parametrize("dtype", ["i8", "u8"])
def test_integers_are_compared_exactly(dtype: str) -> None:
    """float64 would take these neighbours for one number."""
    most = int(np.iinfo(dtype).max)
    block = np.array([[most, most - 1, most - 2, 0]], dtype)
    assert count_masked(block, Masks((most - 1,))) == 1
    assert count_masked(block, Masks((), None, most - 2)) == 2
    assert count_masked(block, Masks((), most - 1, None)) == 2


@given(
    dtype=st.sampled_from(ORDERED),
    data=st.lists(st.integers(0, 30), max_size=60),
    values=st.sets(st.integers(0, 30), max_size=4),
    ends=st.tuples(st.none() | st.integers(0, 30), st.none() | st.integers(0, 30)),
)
def test_each_element_is_counted_once(
    dtype: str, data: list[int], values: set[int], ends: tuple[int | None, int | None]
) -> None:
    block = np.array([data], dtype)
    inside = Masks((), *ends)
    kept = tuple(value for value in values if not naive(np.array([value]), inside))
    masks = Masks(kept, *ends)
    found = count_masked(block, masks)
    assert found == naive(block, masks)
    assert found <= len(data)


def test_threads_that_come_first_at_once_share_one_loop(rng: np.random.Generator) -> None:
    threads = 8
    block = rng.integers(0, 9, (50, 300)).astype("i2")
    together = threading.Barrier(threads, timeout=60)

    def count(_: int) -> int:
        together.wait()
        return count_masked(block, Masks((4,)))

    masked._compiled_loop.cache_clear()
    with ThreadPoolExecutor(threads) as pool:
        assert set(pool.map(count, range(threads))) == {int((block == 4).sum())}
    assert masked._compiled_loop.cache_info().misses == 1


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ["f2", "f4", ">f4", "i1"])
@pytest.mark.parametrize("pitched", [False, True])
def test_memory_does_not_grow_with_the_block(dtype: str, pitched: bool) -> None:
    block = np.ones((64, 2**18), dtype)[:, : -1 if pitched else None]
    masks = Masks((1,), 0, 5)
    count_masked(block[:2, :2], masks)
    count_masked(block, masks)
    tracemalloc.start()
    try:
        assert count_masked(block, masks) == block.size
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * 8 * masked.CONVERTED < block.size
