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


@pytest.mark.parametrize("count", [1, 255, 256, 1000, 5000, 20_011, 262_144])
def test_an_order_that_is_none_has_each_row_once(count: int) -> None:
    step = count // lists.TOGETHER
    turn = lists.turn_of(step)
    names = np.array([lists.name_of(place, step, turn) for place in range(count)])
    np.testing.assert_array_equal(np.sort(names), np.arange(count))


@pytest.mark.parametrize("together", [100, 300, 1300, 20_000])
def test_every_span_of_no_order_has_its_share_of_rows_beside_each_other(together: int) -> None:
    count = 200_000
    step = count // lists.TOGETHER
    names = np.array([lists.name_of(place, step, lists.turn_of(step)) for place in range(count)])
    for first in (0, 77_777, 150_000):
        among = (names >= first) & (names < first + together)
        for start, stop in ((2304, 6912), (20_736, 62_208), (62_208, 186_624)):
            share = (stop - start) / count * together
            assert abs(among[start:stop].sum() - share) <= 4 + 0.02 * share


@pytest.mark.simulator
@pytest.mark.parametrize(("count", "first"), [(1, 0), (300, 0), (1000, 7)])
@pytest.mark.parametrize("dtype", [np.dtype(np.uint32), np.dtype(np.uint16), np.dtype(np.uint8)], ids=str)
def test_rows_are_brought_to_other_places_and_back(
    count: int, first: int, dtype: np.dtype, rng: np.random.Generator
) -> None:
    from numba import cuda

    step = count // lists.TOGETHER
    names = cuda.to_device(np.zeros(count, np.uint32))
    lists.NAMES.enqueue((), -(-count // 128), 128, 0, names, first, step, lists.turn_of(step))
    found = names.copy_to_host().astype(np.int64)
    expected = [first + lists.name_of(place, step, lists.turn_of(step)) for place in range(count)]
    np.testing.assert_array_equal(found, expected)
    source = rng.integers(0, 200, (first + count, 5)).astype(dtype)
    taken, put = np.zeros((count, 5), dtype), np.zeros((first + count, 5), dtype)
    on_device = [cuda.to_device(array) for array in (source, taken, put)]
    blocks = -(-count // (lists.MOVE_THREADS // lists.WARP))
    lists.MOVE.enqueue((dtype, False), blocks, lists.MOVE_THREADS, 0, on_device[0], names, on_device[1])
    lists.MOVE.enqueue((dtype, True), blocks, lists.MOVE_THREADS, 0, on_device[1], names, on_device[2])
    np.testing.assert_array_equal(on_device[1].copy_to_host(), source[found])
    np.testing.assert_array_equal(on_device[2].copy_to_host()[first:], source[first:])


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
    found.append(lists.NAMES.variant("names"))
    found += [lists.MOVE.variant(f"move {put}", np.dtype(np.uint32), put) for put in (False, True)]
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
