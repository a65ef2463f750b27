"""Thin products are asked for by many threads at once, the first of them too."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tilewright.kernels.cpu import thin


def test_threads_that_come_first_at_once_share_one_loop(rng: np.random.Generator) -> None:
    threads = 8
    block, vectors = rng.standard_normal((40, 600)).astype("f4"), rng.standard_normal((3, 600))
    together = threading.Barrier(threads, timeout=60)

    def product(_: int) -> np.ndarray:
        out = np.zeros((40, 3))
        together.wait()
        thin.add_thin_product(block, vectors, out, np.zeros((0, 600)), np.zeros((40, 0)), np.zeros(0))
        return out

    thin._compiled_loop.cache_clear()
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(product, range(threads)))
    for out in found:
        np.testing.assert_allclose(out, block.astype("f8") @ vectors.T, rtol=1e-12, atol=1e-12)
    assert thin._compiled_loop.cache_info().misses == 1


def test_both_orders_of_a_block_share_one_loop(rng: np.random.Generator) -> None:
    block = rng.standard_normal((37, 1100))
    vectors, weights = rng.standard_normal((5, 1100)), np.abs(rng.standard_normal((2, 1100)))
    thin._compiled_loop.cache_clear()
    out, norms, squares = np.ones((37, 5)), np.zeros((37, 2)), np.zeros(1100)
    for lying in (block, np.asfortranarray(block)):
        thin.add_thin_product(lying, vectors, out, weights, norms, squares)
    np.testing.assert_allclose(out, 1 + 2 * block @ vectors.T, rtol=1e-12, atol=1e-11)
    np.testing.assert_allclose(norms, np.sqrt(2 * block**2 @ weights.T**2), rtol=1e-12)
    np.testing.assert_allclose(squares, 2 * (block**2).sum(0), rtol=1e-12)
    assert len(thin._compiled_loop(thin._add_thin_product).signatures) == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["i4", "i1", "u2", "u4", "i8", "u8"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("sums", ["i4", "i8"])
def test_chosen_sums_wrap(dtype: str, order: str, sums: str, rng: np.random.Generator) -> None:
    """More columns, rows and masks than are taken together; numbers of the whole range, wider than the sums too."""
    info = np.iinfo(dtype)
    block = rng.integers(info.min, info.max, (37, 1100), dtype=dtype, endpoint=True).copy(order=order)
    chosen = rng.integers(0, 2, (6, 1100)).astype(bool)
    out = np.ones((37, 6), sums)
    thin.add_chosen_sums(thin.widen(block, np.dtype(sums)), -chosen.astype(sums), out)
    expected = 1 + block.astype(sums) @ chosen.T.astype(sums)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["f4", "c16"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("count", [0, 1, 5, 40])
def test_special_columns_are_cleared(dtype: str, order: str, count: int, rng: np.random.Generator) -> None:
    block = rng.standard_normal((23, 40)).astype(dtype, order=order)
    columns = np.zeros(40, np.uint8)
    columns[rng.choice(40, count, replace=False)] = rng.integers(1, 3, count)
    block[5, columns != thin.NUMBER] = np.nan
    expected = np.where(columns == thin.NUMBER, block, 0)
    thin.clear_columns(block, columns)
    np.testing.assert_array_equal(block, expected)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, 1e-170, 1e-310, 1e200, np.inf, np.nan])
@pytest.mark.parametrize("filling", ["one element", "rows", "all"])
@pytest.mark.parametrize("apart", [False, True], ids=["dense", "apart"])
def test_a_block_in_either_order_gives_what_one_loop_for_all_numbers_does(
    apart: bool,
    dtype: str,
    value: float,
    filling: str,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More rows than are taken together, and more columns, of which some are left over; numbers whose squares need a
    scale in some of the parts; lines with gaps between them, of which a few are copied at once."""
    monkeypatch.setattr(thin, "BAND_NBYTES", 1000)
    rows, columns = 2 * thin.STRIPE_ROWS + 37, thin.BLOCK_COLUMNS + 7
    block = rng.standard_normal((rows, columns))
    places = {"one element": (40, 3), "rows": slice(30, 300), "all": ...}[filling]
    with np.errstate(all="ignore"):
        block[places] *= value
        block = block.astype(dtype)
    vectors, weights = rng.standard_normal((3, columns)), rng.random((2, columns))

    def outs(measured: int) -> tuple[np.ndarray, ...]:
        return np.ones((rows, 3)), np.full((rows, 2), 0.5 * (filling == "one element")), np.ones(measured)

    usual = np.abs(block).astype("f8").max(1, keepdims=True)
    for order in "CF":
        for measured in (0, columns):
            wide = np.zeros((rows + apart * (order == "F"), columns + apart * (order == "C")), dtype, order)
            lying = wide[:rows, :columns]
            lying[...] = block
            (out, norms, squares), expected = outs(measured), outs(measured)
            thin.add_thin_product(lying, vectors, out, weights, norms, squares)
            thin._loop(thin._add_thin_product)(
                block, False, vectors, expected[0], weights, expected[1], expected[2]
            )
            with np.errstate(all="ignore"):
                np.testing.assert_allclose(out / usual, expected[0] / usual, rtol=1e-9, atol=1e-10)
            np.testing.assert_allclose(norms, expected[1], rtol=1e-12)
            np.testing.assert_allclose(squares, expected[2], rtol=1e-12)


SPECIAL = [np.nan, np.inf, -np.inf, 1e200]
"""The last one's square is infinite, but it is a number."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("suspected", [1, 5, 40])
def test_special_columns_are_found(dtype: str, order: str, suspected: int, rng: np.random.Generator) -> None:
    """One by one and many at once; of NaN and infinity in one column, in either order, NaN decides."""
    block = np.ones((23, 40), dtype, order=order)
    columns = rng.choice(40, suspected, replace=False)
    for number, j in enumerate(columns):
        for value in SPECIAL[number % 4 :]:
            if dtype in ("f4", "c8") and value == 1e200:
                continue
            block[rng.integers(23), j] = value * (1j if dtype[0] == "c" and number % 2 else 1)
    assert not np.isfinite(block).all()
    expected = np.where(np.isnan(block).any(0), thin.NAN, np.where(np.isinf(block).any(0), thin.INFINITE, 0))
    found = thin.find_special_columns(block, np.isin(np.arange(40), columns))
    np.testing.assert_array_equal(found, expected)
    assert not thin.find_special_columns(block, np.zeros(40, bool)).any()


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("special", [2, 20, 40])
@pytest.mark.parametrize("value", [np.nan, np.inf, 3.0])
def test_numbers_where_there_must_be_none_are_found(
    dtype: str, special: int, value: float, rng: np.random.Generator
) -> None:
    """In a product's rows and columns of every kind, each of its elements in turn."""
    rows = np.array([thin.NUMBER, thin.INFINITE, thin.NAN, thin.NUMBER], np.uint8)
    columns = np.zeros(40, np.uint8)
    columns[rng.choice(40, special, replace=False)] = rng.integers(1, 3, special)
    decides = np.maximum(rows[:, None], columns)
    right = np.choose(decides, [7.0, np.inf, np.nan]).astype(dtype)
    block = right.copy()
    assert not thin.settle_special(block, rows, columns).any()
    np.testing.assert_array_equal(block, np.where(decides == thin.NUMBER, right, 0))
    for i in range(4):
        for j in range(40):
            wrong = right.copy()
            wrong[i, j] = value
            stray = (decides[i, j] == thin.NAN and not np.isnan(value)) or (
                decides[i, j] == thin.INFINITE and np.isfinite(value)
            )
            found = thin.settle_special(wrong, rows, columns)
            assert found.tolist() == [stray and row == i for row in range(4)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "i8", "c16"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_norms_and_squares_of_rows_and_columns(dtype: str, order: str, rng: np.random.Generator) -> None:
    """More columns and rows than are widened together; what was in the outs is added to."""
    block = np.asarray(rng.integers(-9, 9, (37, 1100)) * (1 + 2j if dtype[0] == "c" else 1)).astype(
        dtype, order=order
    )
    wide = thin.wide_dtype(block.dtype if dtype[0] != "i" else np.dtype("f8"))
    vectors, weights = rng.standard_normal((3, 1100)).astype(wide), rng.random((2, 1100))
    weights[1] = 0
    out, norms, squares = np.ones((37, 3), wide), np.full((37, 2), 5.0), np.ones(1100)
    thin.add_thin_product(block, vectors, out, weights, norms, squares)
    magnitudes = np.abs(block.astype(wide))
    np.testing.assert_allclose(out, 1 + block.astype(wide) @ vectors.T, rtol=1e-12, atol=1e-10)
    np.testing.assert_allclose(norms, np.sqrt(25 + magnitudes**2 @ (weights**2).T), rtol=1e-13)
    np.testing.assert_allclose(squares, 1 + (magnitudes**2).sum(0), rtol=1e-13)


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", ["f8", "c16"])
@pytest.mark.parametrize(
    ("size", "weight"), [(1e-170, 1.0), (1e-90, 1e-90), (1e200, 1e50), (3e-310, 1.0), (1e306, 1.0)]
)
def test_norms_whose_squares_are_no_numbers(
    kind: str, size: float, weight: float, rng: np.random.Generator
) -> None:
    numbers = rng.standard_normal((5, 1300)) + (1j * rng.standard_normal((5, 1300)) if kind == "c16" else 0)
    numbers[3] = 0
    norms = np.zeros((5, 1))
    thin.add_thin_product(
        (size * numbers).astype(kind),
        np.zeros((0, 1300), kind),
        np.zeros((5, 0), kind),
        np.full((1, 1300), weight),
        norms,
        np.zeros(0),
    )
    # Subnormal numbers have fewer digits to agree in.
    np.testing.assert_allclose(norms[:, 0] / size / weight, np.linalg.norm(numbers, axis=1), rtol=1e-7)
    assert norms[3, 0] == 0


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("tiny", [1e-200, 1e-163, 1e-160, 1e-155])
def test_blocks_of_zeros_leave_tiny_norms_as_they_are(tiny: float, order: str) -> None:
    norms, vectors = np.zeros((3, 1)), np.ones((1, 512))
    for value in (tiny, 0.0):
        block = np.full((3, 512), value, order=order)
        thin.add_thin_product(block, vectors, np.zeros((3, 1)), vectors, norms, np.zeros(0))
    np.testing.assert_allclose(norms / tiny, np.sqrt(512), rtol=1e-12)


def test_norms_of_products_whose_factors_have_no_squares() -> None:
    """Rows graded one way by the other way: every product is 1, no factor's square is a number."""
    block, norms = np.tile([1e200, 1e-200], (1, 400)), np.zeros((1, 1))
    none = np.zeros((0, 800)), np.zeros((1, 0))
    thin.add_thin_product(block, *none, np.tile([1e-200, 1e200], (1, 400)), norms, np.zeros(0))
    np.testing.assert_allclose(norms, np.sqrt(800), rtol=1e-12)
    for special, expected in ((np.inf, np.inf), (np.nan, np.nan)):
        block[0, 700], norms[:] = special, 0
        thin.add_thin_product(block, *none, np.ones((1, 800)), norms, np.zeros(0))
        np.testing.assert_array_equal(norms, [[expected]])


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_numpy_gives_what_the_loop_does(dtype: str, order: str, rng: np.random.Generator) -> None:
    numbers = rng.standard_normal((37, 61))
    if dtype.startswith("c"):
        numbers = numbers + 1j * rng.standard_normal((37, 61))
    block = np.asarray(numbers, dtype, order=order)  # type: ignore[call-overload]
    block[5] = 0
    vectors, weights = rng.uniform(size=(3, 61)), rng.uniform(size=(2, 61))
    outs = [
        (np.ones((37, 3), thin.wide_dtype(block.dtype)), np.full((37, 2), 0.5), np.ones(61), add)
        for add in (thin.add_thin_product, thin.add_by_numpy)
    ]
    for out, norms, squares, add in outs:
        add(block, vectors, out, weights, norms, squares)
    for by_loop, by_numpy in zip(outs[0][:3], outs[1][:3], strict=True):
        np.testing.assert_allclose(by_numpy, by_loop, rtol=1e-13, atol=1e-13)
    np.testing.assert_array_equal(outs[1][1][5], 0.5)


@pytest.mark.parametrize("element", [np.nan, np.inf, 1e-160, 1e200])
def test_numpy_leaves_to_the_loop_what_squares_do_not_hold(element: float) -> None:
    block = np.ones((4, 8))
    block[2] = element
    vectors, weights = np.ones((1, 8)), np.ones((1, 8))
    out, norms, squares = np.zeros((4, 1)), np.zeros((4, 1)), np.zeros(8)
    assert not thin.add_by_numpy(block, vectors, out, weights, norms, squares)
    assert not out.any()
    assert not norms.any()
    assert not squares.any()


@pytest.fixture
def few_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has loaded no loop yet, and gives NumPy as many elements as one block of the tests below has."""
    monkeypatch.setattr(thin, "_loaded", set())
    monkeypatch.setattr(thin, "_allowance", thin.Allowance(37 * 61))


@pytest.mark.parametrize("dtype", ["i1", "u4", "i8", "u8"])
@pytest.mark.parametrize("sums", ["i4", "i8"])
@pytest.mark.parametrize("chosen", [True, False])
def test_numpy_serves_the_first_integers(
    dtype: str, sums: str, chosen: bool, few_elements: None, rng: np.random.Generator
) -> None:
    """To the bit, wrapping, without any loop; the next block is the loop's."""
    assert few_elements is None
    info, wide = np.iinfo(dtype), np.dtype(sums)
    block = thin.widen(rng.integers(info.min, info.max, (37, 61), dtype=dtype, endpoint=True), wide)
    limit = np.iinfo(wide)
    vectors = (
        -rng.integers(0, 2, (3, 61), wide)
        if chosen
        else rng.integers(limit.min, limit.max, (3, 61), wide, endpoint=True)
    )
    outs = [np.ones((37, 3), sums) for _ in range(2)]
    for out, loops in zip(outs, (0, 1), strict=True):
        if chosen:
            thin.add_chosen_sums(block, vectors, out)
        else:
            nothing = np.zeros((0, 61)), np.zeros((37, 0)), np.zeros(0)
            thin.add_thin_product(block, vectors, out, *nothing)
        assert len(thin._loaded) == loops
    np.testing.assert_array_equal(*outs)
    sign = -1 if chosen else 1
    np.testing.assert_array_equal(outs[0], 1 + sign * (block.astype(wide) @ vectors.T))


def test_numpy_serves_the_first_floats(few_elements: None, rng: np.random.Generator) -> None:
    assert few_elements is None
    block, vectors = rng.standard_normal((37, 61)).astype("f4"), rng.uniform(size=(3, 61))
    for loops in (0, 1):
        out = np.zeros((37, 3))
        thin.add_thin_product(block, vectors, out, np.zeros((0, 61)), np.zeros((37, 0)), np.zeros(0))
        np.testing.assert_allclose(out, block.astype("f8") @ vectors.T, rtol=1e-12, atol=1e-12)
        assert len(thin._loaded) == loops
