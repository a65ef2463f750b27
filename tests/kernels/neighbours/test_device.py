"""Neighbours on a GPU are those found on a CPU: of small integers, whose sums are exact, to the bit."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.kernels.gemm.machine_code import assemble, assert_no_spills
from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.gemm.hopper.selection import COSINE, DOT, FARTHER, L2
from tilewright.kernels.gpu.device_array import to_device
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.neighbours import capacity, device, host, mutual, order, words
from tilewright.kernels.neighbours.order import METRICS, key_bound

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores and no warps")

HALF, FLOAT = np.dtype(np.float16), np.dtype(np.float32)
CASES: list[tuple[np.dtype, str]] = [
    (HALF, "full"),
    (BFLOAT16, "full"),
    (FLOAT, "full"),
    (FLOAT, "tf32"),
    (FLOAT, "fp16"),
    (FLOAT, "split"),
    (np.dtype(np.int8), "full"),
    (np.dtype(np.uint8), "full"),
]


# Cosines of integers are float64, which a CPU finds alone.
COMPARED = [
    (dtype, precision, metric)
    for dtype, precision in CASES
    for metric in METRICS
    if dtype.kind not in "iu" or metric != COSINE
]


def rows_of(rng: np.random.Generator, count: int, depth: int, dtype: np.dtype) -> np.ndarray:
    least = 0 if dtype.kind == "u" else -3
    return rng.integers(least, 4, (count, depth)).astype(dtype)


def found(
    a: np.ndarray, blocks: list[tuple[int, np.ndarray]], k: int, precision: Any, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    nearest = device.Nearest(to_device(a), k, precision=precision, **options)
    for first, block in blocks:
        nearest.update(to_device(block), first)
    return nearest.result()


def expected(a: np.ndarray, b: np.ndarray, k: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    nearest = host.Nearest(a, k, **options)
    nearest.update(b, 0)
    return nearest.result()


def test_no_more_pairs_are_looked_at_at_a_time_than_are_counted() -> None:
    """In 32 bits: 65536 rows with 1.4 million at a density of 5 % have more."""
    for rows, columns in ((65536, 1_400_000), (65536, 32767), (1, 7), (3, 10), (2**20, 5000), (65536, 0)):
        spans = device.spans_of(rows, columns)
        assert [start for start, _ in spans] == [
            sum(width for _, width in spans[:n]) for n in range(len(spans))
        ]
        assert sum(width for _, width in spans) == columns
        assert all(0 < width * rows < 2**31 for _, width in spans)
        assert all(width % 256 == 0 for _, width in spans[:-1])


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "precision", "metric"), COMPARED)
def test_the_nearest_are_those_found_on_a_cpu(
    dtype: np.dtype, precision: str, metric: Any, rng: np.random.Generator
) -> None:
    for m, n, depth, k in ((300, 9000, 64, 10), (1, 1, 1, 1), (129, 700, 100, 40), (513, 3000, 33, 1)):
        if dtype.itemsize * depth % 16 and dtype.itemsize == 1:
            depth = 112
        a, b = rows_of(rng, m, depth, dtype), rows_of(rng, n, depth, dtype)
        want = expected(a, b, k, metric=metric)
        got = found(a, [(0, b)], k, precision, metric=metric)
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "precision"), [(HALF, "full"), (FLOAT, "full")])
def test_blocks_may_come_in_any_order(dtype: np.dtype, precision: str, rng: np.random.Generator) -> None:
    a, b = rows_of(rng, 700, 32, dtype), rows_of(rng, 20_000, 32, dtype)
    want = expected(a, b, 10, metric="dot")
    cuts = [0, 5000, 5001, 12_345, 20_000]
    blocks = [(start, b[start:stop]) for start, stop in itertools.pairwise(cuts)]
    for these in (blocks, blocks[::-1], [blocks[2], blocks[0], blocks[3], blocks[1]]):
        got = found(a, these, 10, precision, metric="dot")
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.gpu
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_rows_of_zeros_duplicates_and_nan(dtype: np.dtype, metric: Any, rng: np.random.Generator) -> None:
    """So many are equal that no list holds what reaches a bound."""
    b = rows_of(rng, 30_000, 64, dtype)
    b[1000:9000] = b[17]
    b[12_000:20_000] = 0
    b[::101, 5] = np.nan
    a = b[:1500].copy()
    a[5], a[700] = 0, np.nan
    for exclude in (False, True):
        want = expected(a, b, 10, metric=metric, exclude_self=exclude)
        got = found(a, [(0, b)], 10, "full", metric=metric, exclude_self=exclude)
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.gpu
@pytest.mark.parametrize("rising", [True, False])
def test_columns_that_get_ever_better_overflow_and_are_found(rising: bool, rng: np.random.Generator) -> None:
    a = np.ones((300, 16), HALF)
    b = np.repeat(np.sort(rng.integers(-900, 900, 40_000)).astype(HALF)[:, None], 16, axis=1)
    b = b if rising else b[::-1].copy()
    want = expected(a, b, 10, metric="dot")
    for blocks in ([(0, b)], [(0, b[:20_000]), (20_000, b[20_000:])]):
        got = found(a, blocks, 10, "full", metric="dot")
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.gpu
def test_a_block_of_some_rows_leaves_out_its_own(rng: np.random.Generator) -> None:
    b = rows_of(rng, 5000, 40, HALF)
    a = b[1234:2345]
    want = expected(a, b, 3, metric="l2", exclude_self=True, first_row=1234)
    got = found(
        a, [(0, b[:1500]), (1500, b[1500:])], 3, "full", metric="l2", exclude_self=True, first_row=1234
    )
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 100, 1024])
def test_more_neighbours_than_there_are_rows(k: int, rng: np.random.Generator) -> None:
    a, b = rows_of(rng, 200, 64, HALF), rows_of(rng, 500, 64, HALF)
    want, got = expected(a, b, k, metric="cosine"), found(a, [(0, b)], k, "full", metric="cosine")
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "metric"),
    [*((HALF, metric) for metric in METRICS), (np.dtype(np.int8), DOT), (np.dtype(np.int8), L2)],
)
@pytest.mark.parametrize("exclude", [True, False])
def test_rows_among_themselves(
    dtype: np.dtype, metric: Any, exclude: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pair is computed once; rows of zeros, duplicates and NaN are found as ever."""
    monkeypatch.setattr(capacity, "LEAST_MUTUAL_ROWS", 1)
    monkeypatch.setattr(capacity, "MOST_MUTUAL_KEPT", 100)
    halves: list[bool] = []
    find = mutual.Mutual.find

    def noted(self: mutual.Mutual, *given: Any, **options: Any) -> Any:
        found = find(self, *given, **options)
        halves.append(found is not None)
        return found

    monkeypatch.setattr(mutual.Mutual, "find", noted)
    for n, k in ((20_011, 10), (1100, 1), (5000, 40)):
        a = rows_of(rng, n, 64, dtype)
        a[::97] = 0
        a[5::1500] = a[5]
        if dtype == HALF:
            a[700] = np.nan
        want = expected(a, a, k, metric=metric, exclude_self=exclude)
        got = mutual.nearest_of_itself(to_device(a), k, metric=metric, exclude_self=exclude)
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])
        got = by_bands(a, k, metric=metric, exclude_self=exclude)
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])
    assert all(halves[:4])
    a[: n // 2] = a[0]  # so many are equal that lists are too short
    want = expected(a, a, k, metric=metric, exclude_self=exclude)
    got = mutual.nearest_of_itself(to_device(a), k, metric=metric, exclude_self=exclude)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "metric", "precision"),
    [(HALF, COSINE, "full"), (HALF, L2, "full"), (np.dtype(np.int8), L2, "full"), (FLOAT, L2, "tf32")],
)
@pytest.mark.parametrize("room", [True, False], ids=["shuffled", "in order"])
@pytest.mark.parametrize("together", [300, 900])
def test_rows_that_lie_beside_what_is_near_them(
    dtype: np.dtype,
    metric: Any,
    precision: Any,
    room: bool,
    together: int,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One span then lets more through than a list holds: rows are taken in no order, or what did not fit is multiplied
    once more."""
    monkeypatch.setattr(capacity, "LEAST_MUTUAL_ROWS", 1)
    monkeypatch.setattr(mutual.Mutual, "_has_room", lambda self, *given: room)
    tried: list[tuple[bool, bool, bool]] = []
    once = mutual.Mutual._find

    def noted(self: mutual.Mutual, *given: Any, shuffled: bool, patient: bool) -> Any:
        found = once(self, *given, shuffled=shuffled, patient=patient)
        tried.append((shuffled, patient, found is not None))
        return found

    monkeypatch.setattr(mutual.Mutual, "_find", noted)
    n = 20_011
    centres = rng.integers(-2, 3, (n // together + 1, 64)).repeat(together, 0)[:n]
    a = (8 * centres + rng.integers(-3, 4, (n, 64))).astype(dtype)
    for exclude in (True, False):
        options: dict[str, Any] = {"metric": metric, "exclude_self": exclude}
        want = expected(a, a, 10, **options)
        got = mutual.nearest_of_itself(to_device(a), 10, precision=precision, **options)
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])
        assert tried == [(False, False, False), (room, not room, True)]
        got = by_bands(a, 10, precision=precision, **options)
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])
        tried.clear()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "metric", "precision"),
    [(HALF, COSINE, "full"), (HALF, L2, "full"), (np.dtype(np.int8), L2, "full"), (FLOAT, DOT, "tf32")],
)
@pytest.mark.parametrize("case", ["in order", "no room", "many equal"])
def test_rows_of_another_matrix_that_lie_beside_what_is_near_them(
    dtype: np.dtype,
    metric: Any,
    precision: Any,
    case: str,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if case == "no room":
        monkeypatch.setattr(device.Nearest, "_has_room", lambda self, side: False)
    helped: list[bool] = []
    take = device.Nearest._take_shuffled

    def noted(self: device.Nearest, *given: Any) -> bool:
        helped.append(take(self, *given))
        return helped[-1]

    monkeypatch.setattr(device.Nearest, "_take_shuffled", noted)
    centres = rng.integers(-2, 3, (30, 64))
    b = (8 * centres.repeat(1000, 0) + rng.integers(-3, 4, (30_000, 64))).astype(dtype)
    a = (8 * centres[rng.integers(0, 30, 700)] + rng.integers(-3, 4, (700, 64))).astype(dtype)
    if case == "many equal":
        b[::3] = 0
        a[5::100] = 0
    want = expected(a, b, 10, metric=metric)
    for cuts in ([0, 30_000], [0, 12_345, 30_000], [0, 20_000, 20_001, 30_000]):
        blocks = [(start, b[start:stop]) for start, stop in itertools.pairwise(cuts)]
        for these in (blocks, blocks[::-1]):
            helped.clear()
            got = found(a, these, 10, precision, metric=metric)
            np.testing.assert_array_equal(got[0], want[0])
            np.testing.assert_array_equal(got[1], want[1])
            assert any(helped) == (case == "in order") or case == "many equal"
            assert helped.count(False) == (case == "many equal")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, np.dtype(np.int8)], ids=str)
def test_what_memory_held_before_changes_nothing(
    dtype: np.dtype, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least integer, which stands for no score, lies behind the bounds where there are no factors."""
    monkeypatch.setattr(capacity, "LEAST_MUTUAL_ROWS", 1)
    empty = device._empty

    def filled(shape: Any, dtype: np.dtype, stream: Any) -> Any:
        array = empty(shape, dtype, stream)
        if array.dtype.itemsize == 4:
            array.copy_to_device(np.full(array.shape, 1 << 31, np.uint32).view(array.dtype))
        return array

    monkeypatch.setattr(device, "_empty", filled)
    a = rows_of(rng, 1100, 64, dtype)
    a[::7] = 0
    want = expected(a, a, 5, metric="dot", exclude_self=True)
    got = mutual.nearest_of_itself(to_device(a), 5, metric="dot", exclude_self=True)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


def by_bands(
    a: np.ndarray, k: int, *, metric: Any, exclude_self: bool, precision: Any = "full"
) -> order.Neighbours:
    """The nearest of rows among themselves, by three bands that know nothing of each other."""
    edges = [0, len(a) // 2, len(a) // 2 + 300, len(a)]
    kept = k + int(exclude_self)
    memory = np.full((sum(edges[1:]), kept), 2**64 - 1, np.uint64)  # of which all is overwritten
    place = 0
    for first, stop in itertools.pairwise(edges):
        options: dict[str, Any] = {
            "metric": metric,
            "exclude_self": exclude_self,
            "precision": precision,
        }
        target_of = partial(memory.__getitem__, slice(place, place + stop))
        begun: list[int] = []
        found = mutual.words_of_band(
            to_device(a[:stop]), first, k, target=target_of, meanwhile=partial(begun.append, 1), **options
        )
        assert found is not None
        assert begun == [1]
        assert np.shares_memory(found, memory)
        place += stop
    return words.neighbours_of_bands(memory, edges[1:], k, order.sum_dtype(a.dtype, a.dtype), metric)


@pytest.mark.gpu
@pytest.mark.parametrize("above", [True, False])
@pytest.mark.parametrize(("dtype", "precision", "metric"), COMPARED)
def test_pairs_are_those_found_on_a_cpu(
    dtype: np.dtype, precision: Any, metric: Any, above: bool, rng: np.random.Generator
) -> None:
    a, b = rows_of(rng, 700, 64, dtype), rows_of(rng, 1300, 64, dtype)
    a[3], b[500:520] = 0, b[7]
    if dtype.kind != "i" and dtype.kind != "u":
        b[40, 1] = np.nan
    sums = host.Nearest(a, 1, metric=metric).sums
    for threshold in (0, 0.25, 12, 60, -40):
        bound = key_bound(threshold, above, sums, metric)
        if bound is None:
            continue
        for once in (False, True):
            left, right = (b, b) if once else (a, b)
            on_cpu = host.Beyond(left[100:], bound, metric=metric, once=once, first_row=100)
            on_cpu.update(right, 0)
            on_gpu = device.Beyond(
                to_device(left[100:]), bound, metric=metric, once=once, first_row=100, precision=precision
            )
            counted = device.Beyond(
                to_device(left[100:]),
                bound,
                metric=metric,
                once=once,
                first_row=100,
                keep=False,
                precision=precision,
            )
            for first in (0, 400):
                block = right[first : 400 if first == 0 else None]
                on_gpu.update(to_device(block), first)
                counted.update(to_device(block), first)
            assert on_gpu.count == on_cpu.count == counted.count
            for one, other in zip(on_gpu.result(), on_cpu.result(), strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize(("most", "pairs"), [("PAIRS_ROOM", 1000), ("MOST_PAIRS", 512 * 300)])
@pytest.mark.parametrize(("metric", "threshold"), [(DOT, 0.0), (COSINE, 0.0), (L2, 20.0)])
def test_pairs_that_do_not_fit_are_looked_for_in_parts(
    most: str,
    pairs: int,
    metric: Any,
    threshold: float,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which begin with columns of odd numbers, too."""
    monkeypatch.setattr(device, most, pairs)
    monkeypatch.setattr(device, "STRETCH_ROWS", 512)
    b = rows_of(rng, 900, 16, HALF)
    bound = key_bound(threshold, metric != L2, FLOAT, metric)
    assert bound is not None
    on_cpu = host.Beyond(b, bound, metric=metric, once=True)
    on_cpu.update(b, 0)
    expected_pairs = on_cpu.result()
    assert len(expected_pairs.row) > 20_000
    on_gpu = device.Beyond(to_device(b), bound, metric=metric, once=True)
    on_gpu.update(to_device(b), 0)
    for one, other in zip(on_gpu.result(), expected_pairs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_list_is_longer_than_what_a_span_lets_through() -> None:
    for kept in (1, 2, 10, 16, 17, 100, 1024, 1025):
        places, growth = capacity.capacity_of(kept)
        assert places >= kept
        assert places & (places - 1) == 0
        generator = np.random.default_rng(kept)
        through = generator.negative_binomial(kept, 1 / (growth + 1), 100_000)
        assert through.max() < places
    assert 8 * (places + kept) < 227 * 1024


def selecting() -> list[Variant]:
    from tilewright.kernels.gemm.hopper.wgmma_launch import variant

    kinds = ("f16", "s8", "bf16", "tf32", "u8")
    forms = [form for metric in (DOT, COSINE, L2) for form in (metric, FARTHER + metric)]
    return [
        variant(f"{kind} {form}", device._config(kind, kind, form))
        for kind in kinds
        for form in forms
        if kind not in ("s8", "u8") or COSINE not in form
    ] + [
        variant(f"{kind} {form} mutual", device._config(kind, kind, form, True))
        for kind, form in (("f16", DOT), ("f16", COSINE), ("bf16", L2), ("s8", L2))
    ]


QUICK = {"f16 cosine mutual"}
"""Of both sides, with factors: it is compiled in every run, which takes six seconds."""


@pytest.mark.more
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=variant.name, marks=() if variant.name in QUICK else pytest.mark.slow)
        for variant in ([] if SIMULATOR else selecting())
    ],
)
def test_products_that_select_become_machine_code(variant: Variant, tmp_path: Any) -> None:
    from numba import cuda

    text, _ = cuda.compile_ptx(variant.function, variant.signature, cc=(9, 0, "a"), **variant.options)
    assert ".local" not in text, "an array that should be registers lies in local memory"
    report = assemble(text, "sm_90a", tmp_path)
    assert "serialized" not in report, report
    assert_no_spills(report)
