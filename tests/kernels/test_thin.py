"""Thin products are asked for by many threads at once, the first of them too."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tilewright.kernels import thin


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


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16", "i8"])
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
