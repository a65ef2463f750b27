"""What BLAS adds to what is there, and halves: against NumPy, and where NumPy's BLAS cannot be called by name."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.kernels import naive
from tilewright.kernels.cpu import blas
from tilewright.kernels.cpu import product as host

DTYPES = ["f4", "f8", "c8", "c16"]


def lying(matrix: np.ndarray, how: str) -> np.ndarray:
    """The matrix by rows, by columns, or as a part of a wider one by rows."""
    if how == "part":
        wide = np.full((matrix.shape[0] + 2, matrix.shape[1] + 3), np.nan, matrix.dtype)
        inside = wide[1:-1, 2:-1]
        inside[...] = matrix
        return inside
    return np.array(matrix, order="F" if how == "columns" else "C")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shape", [(7, 5, 9), (1, 5, 9), (7, 1, 9), (7, 5, 1), (1, 1, 1)])
def test_products_are_added_or_put_in_place(
    dtype: str, accumulate: bool, shape: tuple[int, int, int], rng: np.random.Generator
) -> None:
    """Operands and targets in any order; what was there is NaN where it does not count."""
    m, n, k = shape
    a, b = naive.numbers(rng, (m, k), dtype), naive.numbers(rng, (k, n), dtype)
    before = naive.numbers(rng, (m, n), dtype) if accumulate else np.full((m, n), np.nan, dtype)
    for how in itertools.product(("rows", "columns", "part"), ("rows", "columns", "part"), ("rows", "part")):
        left, right, out = map(lying, (a, b, before), how)
        assert blas.takes(left, right, out), how
        blas.multiply(left, right, out, accumulate=accumulate)
        np.testing.assert_allclose(out, a @ b + (before if accumulate else 0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("how", ["rows", "columns", "part"])
def test_what_is_above_the_diagonal_stays(
    dtype: str, accumulate: bool, how: str, rng: np.random.Generator
) -> None:
    x = lying(naive.numbers(rng, (9, 14), dtype), how)
    before = naive.numbers(rng, (9, 9), dtype)
    out = lying(before, "part")
    assert blas.takes(x, x.T, out)
    blas.multiply_lower(x, out, accumulate=accumulate)
    expected = np.tril(x @ x.T + (before if accumulate else 0)) + np.triu(before, 1)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_what_blas_cannot_be_given_is_not_taken() -> None:
    square = np.ones((6, 6), "f4")
    gaps, backwards = np.ones((6, 12), "f4")[:, ::2], square[::-1]
    unaligned = np.frombuffer(bytearray(6 * 6 * 4 + 1), "f4", 36, offset=1).reshape(6, 6)
    empty, by_columns = np.ones((6, 0), "f4"), np.asfortranarray(square)
    assert blas.takes(square, square.T, square)
    for a, b, out in (
        (gaps, square, square),
        (square, backwards, square),
        (square, unaligned, square),
        (empty, empty.T, square),
        (square, square, by_columns),
        (square, square.astype("f8"), square),
        (square.astype(">f4"), square, square),
    ):
        assert not blas.takes(a, b, out)
    whole = np.ones((6, 6), "i4")
    assert not blas.takes(whole, whole, whole)


@pytest.mark.parametrize("dtype", ["f4", "c16", "f2"])
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("one", [False, True])
def test_without_its_names_numpy_multiplies(
    dtype: str, lower: bool, one: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where NumPy was built without a BLAS, or its functions have other names there."""
    monkeypatch.setattr(blas, "NAMES", [("no_such_{}", names[1]) for names in blas.NAMES])
    blas.blas_for.cache_clear()
    try:
        assert blas.blas_for(np.dtype("f4")) is None
        x = naive.numbers(rng, (30, 12), dtype)
        right = x.T if one else np.ascontiguousarray(x.T)
        out = np.zeros((30, 30), dtype)
        for accumulate in (False, True):
            host.matmul(x, right, out, accumulate=accumulate, lower=lower)
        below = np.tri(30, dtype=bool) if lower else np.ones((30, 30), bool)
        expected = 2 * (x.astype(np.result_type(dtype, "f4")) @ right.astype(np.result_type(dtype, "f4")))
        tolerance = 1e-2 if dtype == "f2" else 1e-4
        np.testing.assert_allclose(out[below], expected[below], rtol=tolerance, atol=tolerance)
    finally:
        monkeypatch.undo()
        blas.blas_for.cache_clear()
