"""What becomes of a GPU's lists: merged into the best of each row, whatever they hold; in the simulator too."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.gemm.machine_code import assemble, assert_no_spills, sampled
from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.gemm.hopper.selection import COSINE, DOT, FARTHER, L2
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.neighbours import lists
from tilewright.kernels.neighbours.words import numbers_of
from tilewright.kernels.neighbours.words import orders as orders_of

FLOAT, INTEGER = np.dtype(np.float32), np.dtype(np.int32)


@pytest.mark.parametrize("dtype", [FLOAT, INTEGER])
def test_orders_sort_as_their_numbers_do(dtype: np.dtype, rng: np.random.Generator) -> None:
    if dtype == FLOAT:
        edges = [-np.inf, -3e38, -1, -1e-45, 0, 1e-45, 1, 3e38, np.inf]
    else:
        edges = [-(2**31), -1, 0, 1, 2**31 - 1]
    numbers = np.unique(np.array([*edges, *rng.integers(-99, 99, 50)], dtype))
    orders = orders_of(numbers)
    assert (np.diff(orders.astype(np.int64)) > 0).all()
    np.testing.assert_array_equal(numbers_of(orders, dtype), numbers)
    assert lists.lowest_bound(dtype) == (-np.inf if dtype == FLOAT else -(2**31) + 1)
    assert orders_of(np.array([-0.0], np.float32)) == orders_of(np.array([0.0], np.float32))


def words_of(numbers: np.ndarray, columns: np.ndarray) -> np.ndarray:
    return orders_of(numbers).astype(np.uint64) << np.uint64(32) | (
        np.uint64(0xFFFFFFFF) - columns.astype(np.uint64)
    )


@pytest.mark.simulator
@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [FLOAT, INTEGER])
@pytest.mark.parametrize("kept", [1, 3, 10])
def test_lists_are_merged_into_the_best(dtype: np.dtype, kept: int, rng: np.random.Generator) -> None:
    from numba import cuda

    from tilewright.kernels.gpu.compiled import compile_kernel
    from tilewright.kernels.gpu.launch import enqueue

    capacity, rows = 16, 7
    held = np.array([0, 1, 2, 5, 15, 16, 40])  # the last held more than its list does
    best = np.zeros((rows, kept), np.uint64)
    floors = np.zeros(rows, np.uint32)
    bounds = np.zeros((3, rows), np.uint32)
    seen: list[set[int]] = [set() for _ in range(rows)]
    kernel = compile_kernel(
        lists.merge_function(capacity, kept, dtype == INTEGER),
        lists.merge_signature(capacity, kept, dtype == INTEGER),
    )
    on_device = [cuda.to_device(array) for array in (best, bounds, floors)]
    overflow = cuda.to_device(np.zeros(8, np.uint32))
    columns = np.arange(1000)
    lowest = lists.lowest_bound(dtype)
    for launch, mode in enumerate((0, 1, 0, 1)):
        numbers = rng.integers(-4, 5, (rows, capacity)).astype(dtype)  # many are equal
        words = words_of(numbers, rng.permutation(columns)[: rows * capacity].reshape(rows, capacity))
        for row in range(rows):
            for place in range(min(held[row], 4)):
                if seen[row] and launch == 2:
                    words[row, place] = rng.choice(sorted(seen[row]))  # which is known already
        for row in range(rows):  # of a product every column is kept once
            words[row] = rng.permutation(np.resize(np.unique(words[row]), capacity))
            unique = np.unique(words[row][: min(held[row], capacity)])
            held_here = min(held[row], len(unique)) if held[row] <= capacity else held[row]
            words[row, : len(unique)] = unique
            seen[row] |= set(unique.tolist() if held[row] <= capacity else np.unique(words[row]).tolist())
            bounds[2, row] = held_here
        bounds_now = on_device[1].copy_to_host()
        bounds_now[2] = bounds[2]
        on_device[1].copy_to_device(bounds_now)
        enqueue(
            kernel, rows, lists.WARP, 0, lists.merge_nbytes(capacity, kept), cuda.to_device(words),
            on_device[0], on_device[1], on_device[2], overflow, launch, mode, 0,
        )  # fmt: skip
        found, after = on_device[0].copy_to_host(), on_device[1].copy_to_host()
        short = overflow.copy_to_host()
        assert (short[launch], 2**32 - 1 - short[4 + launch]) == (rows, rows - 1)
        assert not short[[*range(launch + 1, 4), *range(5 + launch, 8)]].any()
        assert not after[2].any()
        for row in range(rows):
            expected = sorted(seen[row], reverse=True)[:kept]
            np.testing.assert_array_equal(found[row][: len(expected)], np.uint64(expected))
            assert not found[row][len(expected) :].any()
            bound = after[0, row : row + 1].view(dtype)[0]
            if len(expected) < kept:
                assert bound == lowest
                continue
            worst = numbers_of(np.uint32([expected[-1] >> 32]), dtype)[0]
            if mode == 0:
                assert bound == worst
            else:
                assert bound == (worst + 1 if dtype == INTEGER else np.nextafter(worst, np.float32(np.inf)))


def variants() -> list[Variant]:
    found = []
    for integer in (False, True):
        found.append(
            Variant(
                f"merge {integer}",
                lists.merge_function(512, 10, integer),
                lists.merge_signature(512, 10, integer),
            )
        )
        found += [
            lists.FILTER.variant(f"filter {form} {integer}", form, integer)
            for metric in (DOT, COSINE, L2)
            for form in (metric, FARTHER + metric)
        ]
    for dtype in (np.dtype(np.float16), BFLOAT16, FLOAT, np.dtype(np.int8)):
        integer = dtype.kind == "i"
        found.append(lists.FACTORS.variant(f"factors {dtype}", dtype, L2 if integer else COSINE, integer))
    return [*found, lists.GATHER.variant("gather")]


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("variant", sampled(variants(), 10))
def test_kernels_of_lists_become_machine_code(variant: Variant, tmp_path: object) -> None:
    from pathlib import Path

    from numba import cuda

    text, _ = cuda.compile_ptx(variant.function, variant.signature, cc=(8, 0))
    assert_no_spills(assemble(text, "sm_80", Path(str(tmp_path))))
