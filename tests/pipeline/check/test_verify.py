"""The check finds every kind of wrong product, and no right one."""

from __future__ import annotations

import pickle
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling import examples, with_others
from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.pipeline.check import sides
from tilewright.pipeline.check import vectors as probes
from tilewright.pipeline.check import verify as module
from tilewright.pipeline.check.verify import Verification, verify_product
from tilewright.pipeline.errors import DTypeError, OptionError, ShapeError
from tilewright.pipeline.events import Event, UnitDone, WorkPlanned
from tilewright.pipeline.plan.inputs import StoredMatrix

FLOATS = ["f2", "f4", "f8", "c8", "c16"]
INTEGERS = ["i1", "i4", "i8", "u1", "u8"]
DRAWN = with_others(["f2", "f4", "f8", "c16", "i4", "i8", "u1", "u8"], ["c8", "i1"])
"""Loops of the check are compiled for each dtype: a test that draws one would compile them all."""
FEW_CHUNKS = (64, 48)
"""Six times those of `put`: to write dozens of chunks takes longer than all that is tested."""


def put(path: Path, data: np.ndarray, chunks: tuple[int, ...] = (32, 16)) -> zarr.Array[Any]:
    chunks = tuple(min(side, max(1, length)) for side, length in zip(chunks, data.shape, strict=True))
    array = zarr.create_array(path, shape=data.shape, chunks=chunks, dtype=data.dtype)
    array[...] = data
    return array


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of a few chunks, so that small matrices are still checked in many pieces."""
    monkeypatch.setattr(sides, "TASK_NBYTES", 4096)


def factors(
    rng: np.random.Generator, dtype: str, m: int = 90, k: int = 70, n: int = 110
) -> tuple[np.ndarray, ...]:
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        a, b = (rng.integers(np.iinfo(kind).min, np.iinfo(kind).max, s, dtype=kind) for s in ((m, k), (k, n)))
    else:
        a, b = (rng.standard_normal(s) for s in ((m, k), (k, n)))
        if kind.kind == "c":
            a, b = a + 1j * rng.standard_normal(a.shape), b - 1j * rng.standard_normal(b.shape)
        a, b = a.astype(kind), b.astype(kind)
    wide = np.float32 if dtype == "f2" else a.dtype
    return a, b, np.matmul(a.astype(wide), b.astype(wide)).astype(kind)


def check(
    client: Client,
    folder: Path,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    chunks: tuple[int, ...] = FEW_CHUNKS,
    **options: Any,
) -> Verification:
    stored = [put(folder / name, data, chunks) for name, data in zip("abc", (a, b, c), strict=True)]
    return verify_product(client, *stored, **options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_a_right_product_passes_and_a_wrong_element_is_found(
    dtype: str, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    a, b, c = factors(rng, dtype)
    right = check(client, tmp_path / "right", a, b, c)
    assert right.passed
    assert right.unchecked == 0
    assert "verified in 2 rounds" in str(right)
    wrong = c.copy()
    wrong[41, 73] += np.asarray(1 if wrong.dtype.kind in "iu" else 3, wrong.dtype)
    found = check(
        client, tmp_path / "wrong", a, b, wrong, rounds=20
    )  # enough rounds that chance cannot hide it
    assert not found.passed
    assert found.worst is not None
    row, first, stop = found.worst
    assert row == 41
    assert first <= 73 < stop
    assert "row 41" in str(found)
    if dtype in INTEGERS:
        bits = 8 * c.dtype.itemsize
        assert (first, stop) == (73, 74)
        assert found.modulus_bits == right.modulus_bits == bits
        assert f"0 sums differ modulo 2^{bits}" in str(right)
        assert right.escape_probability == {0: 2.0**-20}
        assert "an error escapes with a chance of at most 9.5e-07" in str(right)
    else:
        assert right.modulus_bits is None
        assert right.escape_probability == {10: 0.01, 1000: 1e-6}
        assert "one of 10 times that escapes with a chance of at most 0.01" in str(right)


def test_the_chance_to_escape_follows_from_size_and_rounds() -> None:
    floats = Verification(True, True, 3, 0.0, 1e-6, None, 0, None, 0.0)
    assert [floats.chance_to_escape(size) for size in (0, 0.5, 1, 10)] == [1, 1, 1, pytest.approx(1e-3)]
    assert floats.chance_to_escape(1e6) == floats.chance_to_escape(np.inf) == 2.0**-57
    assert floats.to_json()["escape_probability"] == floats.escape_probability
    integers = replace(floats, tolerance=0.0, modulus_bits=32)
    assert integers.chance_to_escape(0) == integers.chance_to_escape(1000) == 2.0**-30
    assert pickle.loads(pickle.dumps(integers)) == integers
    assert len({integers, floats}) == 2


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "i1", "i4", "i8"])
@pytest.mark.parametrize("fault", ["columns", "plus and minus"])
def test_errors_that_cancel_in_signs_are_found(
    dtype: str, fault: str, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Of 12 each, of which signs missed two or three; all in one group, and in one pair of chunks."""
    a, b, c = factors(rng, dtype)
    stored = [put(tmp_path / name, data) for name, data in zip("abc", (a, b, c), strict=True)]
    for _ in range(12):
        i, j = (int(column) for column in rng.choice(16, 2, replace=False))
        wrong = c.copy()
        if fault == "columns":
            wrong[:, [i, j]] = wrong[:, [j, i]]
        else:
            with np.errstate(over="ignore"):
                wrong[7, i] += np.asarray(1, c.dtype)
                wrong[7, j] -= np.asarray(1, c.dtype)
        stored[2][...] = wrong
        found = verify_product(client, *stored)
        assert not found.passed
        if wrong.dtype.kind == "i" and fault != "columns":
            assert found.worst == (7, min(i, j), max(i, j) + 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("transposed", [False, True])
def test_only_groups_with_special_columns_are_projected_again(
    transposed: bool,
    client: Client,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One group holds one NaN, one holds nothing else, and two hold none: the first alone is read again."""
    a, b, _ = factors(rng, "f4", 40, 50, 64)
    b[13, 3], b[:, 32:48] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        c = a @ b
    asked: list[slice] = []
    real = sides.StoredSide.each_block

    def each_block(self: Any, rows: slice, columns: slice, *rest: Any) -> Any:
        if self.name.endswith("b"):
            asked.append(columns)
        return real(self, rows, columns, *rest)

    monkeypatch.setattr(sides.StoredSide, "each_block", each_block)
    stored = [
        put(tmp_path / name, data)
        for name, data in zip("abc", (a, b.T.copy() if transposed else b, c), strict=True)
    ]
    assert verify_product(client, *stored, transpose_b=transposed).passed
    assert set(map(str, asked)) == {"slice(0, 64, None)", "slice(0, 16, None)"}
    c[5, 60] += 1
    stored[2][...] = c
    assert not verify_product(client, *stored, transpose_b=transposed).passed


@given(st.data())
@settings(max_examples=examples(15))
def test_right_products_of_any_shape_pass(
    client: Client, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    m, n, k = (data.draw(st.integers(0, 100)) for _ in range(3))
    dtype = data.draw(st.sampled_from(DRAWN))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    a, b, c = factors(rng, dtype, m, k, n)
    ta, tb = data.draw(st.booleans()), data.draw(st.booleans())
    folder = tmp_path_factory.mktemp("v")
    assert check(client, folder, a.T if ta else a, b.T if tb else b, c, transpose_a=ta, transpose_b=tb).passed


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_sums_of_one_sign_and_of_many_scales_pass(
    dtype: str, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """The two hard cases for a tolerance: errors that grow with k, and rows that differ by 20 powers of ten."""
    positive = [rng.random((64, 4000)).astype(dtype), rng.random((4000, 48)).astype(dtype)]
    assert check(client, tmp_path / "positive", *positive, positive[0] @ positive[1]).passed
    graded = (rng.standard_normal((64, 300)) * np.logspace(-10, 10, 64)[:, None]).astype(dtype)
    b = rng.standard_normal((300, 48)).astype(dtype)
    c = graded @ b
    assert check(client, tmp_path / "graded", graded, b, c).passed
    c[0, 0] *= 2  # the smallest row counts as much as the largest
    assert not check(client, tmp_path / "graded-wrong", graded, b, c).passed


@pytest.mark.parametrize("dtype", ["f4", "i8"])
def test_vectors_that_are_sent_to_the_workers_beforehand(
    dtype: str, client: Client, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SENT_NBYTES", 0)
    a, b = (rng.integers(-9, 9, (40, 40)).astype(dtype) for _ in range(2))
    c = a @ b
    assert check(client, tmp_path / "right", a, b, c).passed
    c[17, 3] += 100
    assert not check(client, tmp_path / "wrong", a, b, c).passed


@pytest.mark.sample(1)
@pytest.mark.parametrize(("left", "right"), [(1.3, 0.7), (1 / 3, -1e-3)])
@pytest.mark.parametrize("k", [2, 400])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8"])
def test_factors_all_alike_pass_and_a_wrong_element_is_found(
    dtype: str, k: int, left: float, right: float, client: Client, tmp_path: Path
) -> None:
    """All roundings of all sums go one way there, and add up to far more than those of mixed numbers."""
    a, b = np.full((40, k), left, dtype), np.full((k, 300), right, dtype)
    c = np.zeros((40, 300), "f4" if dtype == "f2" else dtype)
    for inner in range(k):  # one term after another, as kernels add them up: the worst way
        c += np.outer(a[:, inner], b[inner])
    c = c.astype(dtype)
    assert check(client, tmp_path / "right", a, b, c).passed
    c[7, 23] *= 1.2 if dtype == "f2" else 1.05
    assert not check(client, tmp_path / "wrong", a, b, c, rounds=20).passed


@pytest.mark.sample(2)
@pytest.mark.parametrize("seeing", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["f4", "c16", "i8"])
def test_faults_that_cancel_in_all_vectors_but_one_are_found(
    dtype: str,
    seeing: int,
    client: Client,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two in one row and group, as large as each other: every vector counts, whichever it is."""
    a, b, c = factors(rng, dtype)
    c[41, 73] += np.asarray(100, dtype)
    c[41, 75] -= np.asarray(100, dtype)
    real = module.draw_probe

    def cancelling(*arguments: Any) -> probes.Probe:
        probe = real(*arguments)
        assert any(start <= 73 < 75 < stop for start, stop in probe.groups())
        vectors = probe.vectors
        vectors[:, 75] = vectors[:, 73]
        vectors[seeing, 73] = 0 if probe.exact else 0.9
        vectors[seeing, 75] = -1 if probe.exact else -0.9
        return probe

    monkeypatch.setattr(module, "draw_probe", cancelling)
    found = check(client, tmp_path, a, b, c, rounds=5)
    assert not found.passed
    assert found.worst is not None
    assert found.worst[0] == 41


def test_a_tile_of_zeros_is_found(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    a, b, c = factors(rng, "f4")
    c[32:64, 16:32] = 0
    assert not check(client, tmp_path, a, b, c).passed


def test_what_meets_infinity_is_not_compared_but_the_rest_is(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    a, b, _ = factors(rng, "f8")
    a[5, 3], a[60, 2], b[7, 100] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        c = a @ b
    outcome = check(client, tmp_path / "right", a, b, c)
    assert outcome.passed
    # Row 5 must be NaN, which was looked for. Of row 60, and of column 100 in the other rows, only that there is none.
    assert outcome.unchecked == 110 + 88
    assert "198 elements met infinity or may overflow, and were not compared" in str(outcome)
    c[7, 7] = np.nan  # nothing in row 7 of A or column 7 of B explains this one
    assert not check(client, tmp_path / "unexplained", a, b, c).passed


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("transposed", [False, True])
def test_nan_in_b_hides_no_other_column(
    dtype: str, transposed: bool, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """A column of every group holds one, in C's first and last column too, and in several blocks of B's rows."""
    a, b, _ = factors(rng, dtype)
    for row, column in ((0, 0), (69, 109), (40, 33), (41, 33), (13, 65)):
        b[row, column] = np.nan
    wide = np.float32 if dtype == "f2" else a.dtype
    c = np.matmul(a.astype(wide), b.astype(wide)).astype(dtype)
    stored_b = b.T.copy() if transposed else b
    assert np.isnan(c).all(axis=0).sum() == 4
    right = check(client, tmp_path / "right", a, stored_b, c, transpose_b=transposed)
    assert right.passed
    assert right.unchecked == 0
    wrong = c.copy()
    wrong[41, 73] += np.asarray(3, wrong.dtype)
    found = check(client, tmp_path / "wrong", a, stored_b, wrong, rounds=20, transpose_b=transposed)
    assert not found.passed
    assert found.worst is not None
    row, first, stop = found.worst
    assert row == 41
    assert first <= 73 < stop
    assert found.cause == ""


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("value", "wrongly"), [(np.nan, 1.0), (np.nan, np.inf), (np.inf, 1.0), (-np.inf, 0.0)], ids=str
)
@pytest.mark.parametrize("where", ["row", "column"])
@pytest.mark.parametrize("dtype", ["f4", "c16"])
def test_what_cannot_come_of_nan_or_infinity_is_found(
    dtype: str,
    where: str,
    value: float,
    wrongly: float,
    client: Client,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    a, b, _ = factors(rng, dtype)
    if where == "row":
        a[17, 60] = value
    else:
        b[60, 99] = value
    with np.errstate(invalid="ignore"):
        c = a @ b
    assert check(client, tmp_path / "right", a, b, c).passed
    c[17, 99] = wrongly
    found = check(client, tmp_path / "wrong", a, b, c)
    assert not found.passed
    assert found.conclusive
    assert found.worst is not None
    row, first, stop = found.worst
    assert row == 17
    assert first <= 99 < stop
    assert "there are numbers where NaN or infinity in a factor leaves none" in str(found) or np.isinf(
        wrongly
    )


def test_progress_of_a_check_that_goes_through_b_again(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    events: list[Event] = []
    a, b, _ = factors(rng, "f4")
    b[3, 4] = np.nan
    assert check(client, tmp_path, a, b, a @ b, listener=events.append).passed
    first, second = (event for event in events if isinstance(event, WorkPlanned))
    assert first.done == 0
    assert second.total == first.total + second.done
    done = [event.index for event in events if isinstance(event, UnitDone)]
    assert sorted(done) == list(range(second.total))
    assert len(done[: second.done]) == second.done


@pytest.mark.parametrize(("dtype", "unseen"), [("f2", 0.6), ("f4", 0.01), ("f8", 2e-11)])
def test_an_error_as_large_as_the_readme_says_shows(
    dtype: str, unseen: float, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    a, b, c = factors(rng, dtype, 200, 200, 200)
    for name, chunks, factor in (("one", (200, 200), 1.0), ("four", (200, 50), 0.5)):
        # A vector's entry is at most 1, and the product's own rounding is on top: half of the largest error that can
        # escape was seen once in thousands of checks.
        for error, passes in ((factor * unseen / 4, True), (factor * unseen * 10, False)):
            wrong = c.copy()
            wrong[3, 10] += error
            outcome = check(client, tmp_path / f"{name}-{passes}", a, b, wrong, chunks, rounds=7)
            assert outcome.passed == passes
            assert outcome.chance_to_escape(10) <= 1e-6


def test_a_check_that_compares_nothing_does_not_pass(client: Client, tmp_path: Path) -> None:
    a = np.full((4, 4), np.inf)
    outcome = check(client, tmp_path, a, np.ones((4, 4)), a)
    assert outcome.unchecked == 16
    assert not outcome.passed
    assert not outcome.conclusive
    assert "could compare nothing" in str(outcome)


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_in_an_ordinary_half_product_are_found(
    damage: float, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """No element of it comes near float16's 65504, although the sums over a group of columns do."""
    a, b, c = factors(rng, "f2", 70, 1024, 700)
    right = check(client, tmp_path / "right", a, b, c, (64, 128))
    assert right.passed
    assert right.unchecked == 0
    whole, one = c.copy(), c.copy()
    whole[10:14], whole[:, 300], one[33, 5] = damage, damage, damage
    for name, wrong in (("whole", whole), ("one", one)):
        found = check(client, tmp_path / name, a, b, wrong, (64, 128))
        assert not found.passed
        assert found.conclusive
        assert found.unchecked == 0
    assert found.worst is not None
    assert found.worst[0] == 33


def test_infinity_in_a_half_product_of_a_long_inner_side_is_found(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """The bound of its partial sums is already two thirds of what float16 holds."""
    a, b, c = factors(rng, "f2", 16, 40_000, 64)
    assert check(client, tmp_path / "right", a, b, c, (4096, 4096)).unchecked == 0
    c[11, 50] = np.inf
    assert not check(client, tmp_path / "wrong", a, b, c, (4096, 4096)).passed


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dtype", "left", "right", "k", "n"),
    [
        ("f2", 1, 1, 100_000, 1),
        ("f2", 1, 1, 100_000, 16),
        ("f4", 2e17, 2.1e17, 10_000, 4),
        ("f8", 1e152, 2.1e152, 10_000, 4),
        ("c8", 2e17j, 2.1e17, 10_000, 4),
        ("c16", 1e152j, 2.1e152, 10_000, 4),
    ],
)
def test_sums_that_overflow_with_k_are_not_compared_but_the_rest_is(
    dtype: str, left: complex, right: complex, k: int, n: int, client: Client, tmp_path: Path
) -> None:
    a, b = np.full((6, k), left, dtype), np.full((k, n), right, dtype)
    a[5] /= 1000
    with np.errstate(all="ignore"):  # with float16 as float32, as every kernel adds it up
        c = (a.astype("f4") @ b.astype("f4")).astype("f2") if dtype == "f2" else a @ b
    assert not np.isfinite(c[:5]).any()
    assert np.isfinite(c[5]).all()
    outcome = check(client, tmp_path / "right", a, b, c, (4096, 4096))
    assert outcome.passed
    assert outcome.unchecked == 5 * n
    c[5, 0] = np.inf
    assert not check(client, tmp_path / "wrong", a, b, c, (4096, 4096)).passed


SUBNORMAL = [
    ("f2", 1e-4),
    ("f2", 2e-3),
    ("f4", 1e-20),
    ("f4", 1e-22),
    ("f4", 3e-19),
    ("f8", 1e-155),
    ("f8", 1e-161),
    ("c8", 1e-20),
    ("c8", 1e-22),
    ("c16", 1e-155),
    ("c16", 1e-161),
]
"""Sizes of factors whose products are, wholly or in part, below the smallest normal number."""
QUICK_SUBNORMAL = {("f2", 1e-4, 32), ("f4", 3e-19, 300), ("f8", 1e-161, 300), ("c16", 1e-155, 32)}
"""Those of every run, with a k."""


@pytest.mark.parametrize(
    ("dtype", "size", "k"),
    [
        pytest.param(dtype, size, k, marks=() if (dtype, size, k) in QUICK_SUBNORMAL else pytest.mark.slow)
        for dtype, size in SUBNORMAL
        for k in (32, 300)
    ],
)
def test_right_products_that_underflow_pass(
    dtype: str, size: float, k: int, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    wide = np.float32 if dtype == "f2" else np.dtype(dtype)
    cases = {"mixed": factors(rng, dtype, 60, k, 80)[:2]}
    if k * size**2 < 4 * np.finfo(wide).smallest_normal:
        # Every product errs the same way. Where sums are normal they too would, which is another matter.
        cases["one"] = np.ones((60, k), dtype), np.ones((k, 80), dtype)
    for name, (a, b) in cases.items():
        a, b = (a * size).astype(dtype), (b * size).astype(dtype)
        c = np.matmul(a.astype(wide), b.astype(wide)).astype(dtype)
        outcome = check(client, tmp_path / name, a, b, c)
        assert outcome.passed
        assert outcome.unchecked == 0


@pytest.mark.sample(2)
@pytest.mark.parametrize(("dtype", "size"), SUBNORMAL)
def test_wrong_products_that_underflow_are_found(
    dtype: str, size: float, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    a, b, _ = factors(rng, dtype, 40, 32, 48)
    a, b = (a * size).astype(dtype), (b * size).astype(dtype)
    wide = np.float32 if dtype == "f2" else np.dtype(dtype)
    c = np.matmul(a.astype(wide), b.astype(wide)).astype(dtype)
    smallest, normal = np.finfo(dtype).smallest_subnormal, np.finfo(dtype).smallest_normal
    c[7, 20] = normal * 1000
    assert not check(client, tmp_path / "element", a, b, c, rounds=20).passed
    a[9], c[9], c[7, 20] = 0, 0, 0
    c[9, 3] = smallest  # nothing underflows in a row of zeros, so nothing is allowed there
    wrong = check(client, tmp_path / "zeros", a, b, c, rounds=20)
    assert not wrong.passed
    assert wrong.worst is not None


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["f8", "c16"])
@pytest.mark.parametrize(
    ("left", "right"),
    [(1e-90, 1e-90), (1e-170, 1), (1, 1e-170), (1e200, 1e50), (1e200, 1e-200), (1e-300, 1e300), (1e-300, 1)],
)
def test_factors_whose_squares_are_no_numbers(
    dtype: str, left: float, right: float, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    a, b, _ = factors(rng, dtype)
    a, b = a * left, b * right
    c = a @ b
    outcome = check(client, tmp_path / "right", a, b, c)
    assert outcome.passed
    assert outcome.unchecked == 0
    assert outcome.largest_error > 0  # measured, and not by a scale that overflowed
    wrong = c.copy()
    wrong[41, 73] += left * right
    found = check(client, tmp_path / "wrong", a, b, wrong, rounds=20)
    assert not found.passed
    assert found.worst is not None
    assert found.worst[0] == 41
    wrong[41, 73] = np.nan
    assert not check(client, tmp_path / "nan", a, b, wrong).passed


def test_rows_and_columns_of_all_sizes_at_once_pass(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """A's columns are graded one way and B's rows the other way: no single power of two would do for either."""
    a, b, c = factors(rng, "f8")
    grades, sizes = (
        2.0 ** np.linspace(-600, 600, 70).round(),
        2.0 ** np.linspace(-300, 300, 90).round()[:, None],
    )
    a, b, c = a * grades * sizes, b / grades[:, None], c * sizes
    outcome = check(client, tmp_path / "right", a, b, c)
    assert outcome.passed
    assert outcome.unchecked == 0
    c[0, 0] *= 2
    assert not check(client, tmp_path / "wrong", a, b, c, rounds=20).passed


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("precision", "size"), [("fp16", 1e-6), ("fp16", 1e-8), ("bf16", 3e-39), ("fp16", 1.0)]
)
def test_operands_that_underflow_in_the_asked_precision_pass(
    precision: str, size: float, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    narrow = np.dtype("f2") if precision == "fp16" else BFLOAT16
    a, b, _ = factors(rng, "f4", 60, 200, 80)
    a = a * np.float32(size)
    c = a.astype(narrow).astype("f4") @ b.astype(narrow).astype("f4")
    assert check(client, tmp_path / "asked", a, b, c, precision=precision).passed
    assert not check(client, tmp_path / "full", a, b, c, rounds=20).passed
    c[3, 4] += 500 * size + 1e-2 * (precision == "fp16")
    assert not check(client, tmp_path / "wrong", a, b, c, precision=precision, rounds=20).passed


@pytest.mark.parametrize("role", ["A", "B"])
@pytest.mark.parametrize(
    ("wide", "narrow", "size"),
    [
        ("f8", "f4", 1e39),
        pytest.param("c16", "c8", 1e39j, marks=pytest.mark.slow),
        pytest.param("f8", "f2", 1e39, marks=pytest.mark.slow),
        pytest.param("f8", "c8", 1e39, marks=pytest.mark.slow),
    ],
)
def test_an_operand_that_overflows_in_the_product_s_dtype_is_infinite(
    role: str, wide: str, narrow: str, size: complex, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    a, b, _ = factors(rng, wide)
    (a if role == "A" else b)[40, 60] = size
    compute = "f4" if narrow == "f2" else narrow
    with np.errstate(all="ignore"):
        c = (a.astype(compute) @ b.astype(compute)).astype(narrow)
    assert check(client, tmp_path / "right", a, b, c).passed
    c[(40, 5) if role == "A" else (5, 60)] = 1
    assert not check(client, tmp_path / "wrong", a, b, c).passed


@pytest.mark.sample(1)
@pytest.mark.parametrize("role", ["A", "B"])
def test_an_operand_that_is_too_large_for_the_precision_is_named(
    role: str, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    a, b, c = factors(rng, "f4", 60, 200, 80)
    c[3, 4] = np.inf
    assert check(client, tmp_path / "else", a, b, c, precision="fp16").cause == "", "no operand is too large"
    (a if role == "A" else b)[50, 30] = -70_000
    with np.errstate(over="ignore", invalid="ignore"):
        c = a.astype("f2").astype("f4") @ b.astype("f2").astype("f4")
    found = check(client, tmp_path / "wrong", a, b, c, precision="fp16")
    assert not found.passed
    assert f"{role}, {tmp_path / 'wrong' / role.lower()}, holds 70000, where precision='fp16'" in str(found)
    assert str(found).endswith("at most 65504: scale that, or use precision='bf16' or 'tf32'")
    assert check(client, tmp_path / "right", a, b, a @ b, precision="fp16").passed


@pytest.mark.parametrize("precision", ["full", "fp16"])
def test_infinity_in_a_sum_of_nothing_is_wrong(precision: str, client: Client, tmp_path: Path) -> None:
    a, b, c = np.ones((3, 0), "f4"), np.ones((0, 4), "f4"), np.zeros((3, 4), "f4")
    c[1, 2] = np.inf
    found = check(client, tmp_path, a, b, c, precision=precision)
    assert not found.passed
    assert found.largest_error == np.inf


@pytest.mark.parametrize("dtype", ["f4", "i8"])
@pytest.mark.parametrize(("m", "k", "n"), [(0, 50, 40), (40, 50, 0), (0, 50, 0), (0, 0, 0)])
def test_nothing_is_read_for_an_empty_product(
    m: int, k: int, n: int, dtype: str, client: Client, tmp_path: Path
) -> None:
    events: list[Event] = []
    empty = [np.ones(shape, dtype) for shape in ((m, k), (k, n), (m, n))]
    assert check(client, tmp_path, *empty, listener=events.append).passed
    planned = [event for event in events if isinstance(event, WorkPlanned)]
    assert [(event.total, event.nbytes) for event in planned] == [(0, 0)]
    assert not any(isinstance(event, UnitDone) for event in events)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c16", "i8"])
def test_without_an_inner_side_a_product_must_be_zeros(dtype: str, client: Client, tmp_path: Path) -> None:
    a, b, c = np.ones((40, 0), dtype), np.ones((0, 50), dtype), np.zeros((40, 50), dtype)
    assert check(client, tmp_path / "zeros", a, b, c).passed
    c[30, 40] = 1 if dtype == "i8" else np.finfo(dtype).smallest_subnormal
    assert not check(client, tmp_path / "other", a, b, c).passed


def test_integers_that_wrapped_pass(client: Client, tmp_path: Path) -> None:
    a = np.full((8, 100), np.iinfo("i4").max, "i4")
    with np.errstate(over="ignore"):
        c = a @ a.T
    right = check(client, tmp_path / "ok", a, a, c, transpose_b=True)
    assert right.passed
    assert right.modulus_bits == 32
    assert "0 sums differ modulo 2^32" in str(right)
    c[3, 3] ^= np.int32(-(2**31))  # exactly half the modulus: each round misses it with probability 1/2
    assert not check(client, tmp_path / "half", a, a, c, transpose_b=True, rounds=40).passed


@pytest.mark.sample(1)
@pytest.mark.parametrize("bit", [0, 6, 31, 62, 63])
def test_a_single_flipped_bit_never_escapes(
    bit: int, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    a, b, c = factors(rng, "i8", 40, 30, 50)
    stored = [put(tmp_path / name, data) for name, data in zip("abc", (a, b, c), strict=True)]
    for place in range(8):
        row, column = place * 7 % 40, place * 11 % 50
        wrong = c[row, column] ^ np.array(1 << bit, "u8").view("i8")
        stored[2][row, column] = wrong
        assert not verify_product(client, *stored, rounds=1).passed
        stored[2][row, column] = c[row, column]


@pytest.mark.sample(2)
@pytest.mark.parametrize("others", ["u8", "i1", "i8", "f4", "f8"])
def test_unsigned_factors_of_full_range_pass(
    others: str, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    a = rng.integers(2**63, 2**64 - 1, (40, 30), dtype="u8")
    b = factors(rng, others, 30, 30, 50)[1]
    wide = np.result_type(a, b)
    c = a.astype(wide) @ b.astype(wide)
    assert check(client, tmp_path / "u", a, b, c).passed
    assert check(client, tmp_path / "t", b.T.copy(), a.T.copy(), c.T.copy()).passed


def test_bad_input_is_named(client: Client, tmp_path: Path) -> None:
    a = np.ones((4, 3))
    with pytest.raises(ShapeError, match=r"4 × 4.*can only give 4 × 4|can only give"):
        check(client, tmp_path / "s", a, a, np.ones((4, 4)))
    with pytest.raises(OptionError, match="precision='half' is unknown"):
        check(client, tmp_path / "p", a, a.T, a @ a.T, precision="half")
    with pytest.raises(OptionError, match="precision='tf32' is a choice for float32 products"):
        check(client, tmp_path / "w", a, a.T, a @ a.T, precision="tf32")


@pytest.mark.parametrize(("factor", "product"), [(1.5, 4), (1.5 + 2j, 4), (2j, 0.0)])
def test_factors_of_another_kind_than_the_product_are_refused(
    factor: complex, product: float, client: Client, tmp_path: Path
) -> None:
    """Cut down to C's kind, the factors would have these products with ones."""
    a, ones, c = np.full((4, 4), factor), np.ones((4, 4), "i4"), np.full((4, 4), product)
    for role, left, right in (("A", a, ones), ("B", ones, a)):
        with pytest.raises(
            DTypeError, match=f"{role}: .* holds {a.dtype}, and no product of that is {c.dtype}"
        ):
            check(client, tmp_path / role, left, right, c)


def test_no_more_parts_are_begun_than_are_soon_added_up() -> None:
    begun: list[int] = []

    def begin(rows: slice, columns: slice, number: Any) -> Any:
        begun.append(number)
        return number

    parts: list[Any] = [(slice(0), slice(0), number) for number in range(50)]
    for added, number in enumerate(sides.in_order(parts, begin, 3, lambda: None)):
        assert number == added
        assert len(begun) <= added + 1 + sides.AHEAD * 3
    assert added == 49


def test_fewer_threads_check_where_each_takes_much(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a worker's memory, an eighth is for the parts that are under way, but for one in any case."""
    array = zarr.create_array(tmp_path / "a", shape=(1024, 64), chunks=(1024, 64), dtype="f8")
    side, rows = sides.StoredSide(array, False), slice(0, 1024)
    monkeypatch.setattr(sides, "usable_cores", lambda: 10)
    probe = probes.draw_probe(64, 64, np.dtype("f8"), 2, 64)
    one = sides.part_nbytes(module.as_stored_matrix(array), 1024, probe.line_nbytes, probe.compute)
    assert one == 2 * 1024 * 64 * 8 + (2 * 1024 + 64) * (2 * 8 + 2 * 8)
    for limit, tasks, threads in (
        (None, 1, 10),
        (8 * one, 1, 1),
        (8 * one - 1, 1, 1),
        (8 * 3 * one, 1, 3),
        (8 * 3 * one, 2, 1),
        (8 * 6 * one, 2, 3),
        (8 * 99 * one, 2, 10),
    ):
        worker = SimpleNamespace(
            memory_manager=SimpleNamespace(memory_limit=limit), state=SimpleNamespace(nthreads=tasks)
        )
        monkeypatch.setattr(sides, "current_worker", lambda worker=worker: worker)
        assert side._threads(rows, probe) == threads
    monkeypatch.setattr(sides, "usable_cores", lambda: 64)
    assert side._threads(rows, probe) == probe.threads == 12


def test_every_task_that_a_worker_runs_at_once_takes_memory() -> None:
    shapes = (1000, 300), (300, 500), (1000, 500)
    a, b, c = (StoredMatrix(*shape, np.dtype("f8"), (100, 50)) for shape in shapes)
    one, two, nine = (sides.check_nbytes(a, b, c, 2, 1, 2**30, tasks) for tasks in (1, 2, 9))
    assert one < two < nine
    # Results and parts of all tasks together keep to about what one may take, where it takes it all.
    long = replace(a, rows=10**8)
    all_of_it, shared = (sides.check_nbytes(long, b, c, 2, 1000, 2**26, tasks) for tasks in (1, 8))
    assert all_of_it < shared < 1.2 * all_of_it


def test_a_long_inner_side_has_fewer_groups() -> None:
    def groups(k: int, dtype: str) -> int:
        probe = probes.draw_probe(4000, k, np.dtype(dtype), 2, 10)
        assert probe.cuts[-1] == 4000
        assert k * (probe.line_nbytes - 8) <= probes.IMAGE_NBYTES or probe.group_count == 1
        return probe.group_count

    assert [groups(k, "f4") for k in (10, 10**6, 4 * 10**6, 10**9)] == [4, 4, 2, 1]
    assert [groups(k, "i8") for k in (10, 10**9)] == [1, 1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["i8", "f2", "f8"])
def test_a_check_takes_no_more_memory_than_is_said(
    dtype: str,
    transposed: bool,
    client: Client,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks of whole columns of op(A): each makes as much as all of them together."""
    monkeypatch.undo()  # tasks are as large as they are elsewhere
    m, k, n = 20_000, 200, 40
    a, b = (rng.integers(-9, 9, shape).astype(dtype) for shape in ((m, k), (k, n)))
    c = (a.astype("f4") @ b.astype("f4")).astype(dtype) if dtype == "f2" else a @ b
    arrays = [
        put(tmp_path / "a", a.T.copy() if transposed else a, (1, m) if transposed else (m, 1)),
        put(tmp_path / "b", b, (k, 10)),
        put(tmp_path / "c", c, (m, 10)),
    ]
    assert verify_product(client, *arrays, transpose_a=transposed).passed  # loops are compiled by then
    a_matrix, b_matrix, c_matrix = (
        module.as_stored_matrix(array, transpose=transposed and array is arrays[0]) for array in arrays
    )
    said = sides.check_nbytes(a_matrix, b_matrix, c_matrix, 2, sides.usable_cores(), None)
    tracemalloc.start()
    try:
        assert verify_product(client, *arrays, transpose_a=transposed).passed
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert said / 8 < peak <= said
