"""The method alone, on matrices in memory, compared with LAPACK's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling import examples
from tilewright.pipeline.spectral.krylov import (
    Aim,
    AsymmetricError,
    NotFiniteError,
    Pairs,
    leading_pairs,
    orthonormal,
    phases,
)

DTYPES = ("f4", "f8", "c8", "c16")


def aim(side: int, k: int, dtype: str, **other: float) -> Aim:
    block = min(side, k + 10)
    options = {"tolerance": 1e-4, "most_products": 100, "most_columns": 8 * block, "seed": 0} | other
    return Aim(count=k, block=block, dtype=np.dtype(dtype), terms=max(1, side), **options)  # type: ignore[arg-type]


def hermitian(rng: np.random.Generator, values: np.ndarray, dtype: str) -> np.ndarray:
    side = len(values)
    vectors = rng.standard_normal((side, side))
    if np.dtype(dtype).kind == "c":
        vectors = vectors + 1j * rng.standard_normal((side, side))
    vectors = np.linalg.qr(vectors)[0]
    return ((vectors * values) @ vectors.conj().T).astype(dtype)


def found_by(matrix: np.ndarray, goal: Aim) -> Pairs:
    wide = np.complex128 if matrix.dtype.kind == "c" else np.float64
    return leading_pairs(lambda block: (matrix @ block.astype(matrix.dtype)).astype(wide), len(matrix), goal)


def sine(one: np.ndarray, other: np.ndarray) -> float:
    """Of the largest angle between two spaces, each of orthonormal columns."""
    return float(np.linalg.norm(one - other @ (other.conj().T @ one), 2))


SPECTRA = {
    "decaying": lambda i: 1 / (1 + i),
    "slow": lambda i: (1 + i) ** -0.5,
    "steep": lambda i: np.exp(-i / 2.0),
    "indefinite": lambda i: np.cos(3.0 * i) * (1 + 0.1 * i),
    "flat": lambda i: 1 + 1e-3 * np.cos(2.0 * i),
    "negative": lambda i: -1.0 - i,
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_pairs_are_lapacks(rng: np.random.Generator, dtype: str, spectrum: str) -> None:
    matrix = hermitian(rng, SPECTRA[spectrum](np.arange(150.0)), dtype)
    found = found_by(matrix, aim(150, 6, dtype))
    values = np.linalg.eigvalsh(matrix.astype("c16" if matrix.dtype.kind == "c" else "f8"))[::-1]
    assert found.good.all()
    largest = np.abs(values).max()
    np.testing.assert_allclose(found.values, values[:6], rtol=1e-4, atol=8 * found.floor)
    inner = found.vectors.conj().T @ found.vectors
    np.testing.assert_allclose(inner, np.eye(6), atol=1e-12)
    residual = matrix @ found.vectors - found.vectors * found.values
    sizes = np.linalg.norm(residual, axis=0)
    assert (sizes <= 1e-4 * np.abs(found.values) + 2 * found.floor + 1e-6 * largest).all()


@settings(max_examples=examples(25))
@given(data=st.data())
def test_any_side_and_number(data: st.DataObject) -> None:
    side = data.draw(st.integers(1, 40))
    k = data.draw(st.integers(1, side))
    rank = data.draw(st.integers(0, side))
    dtype = data.draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    values = np.where(np.arange(side) < rank, 1 + rng.random(side), 0.0)
    matrix = hermitian(rng, values, dtype)
    found = found_by(matrix, aim(side, k, dtype, most_columns=3 * min(side, k + 10)))
    assert found.good.all()
    allowed = 1e-4 * np.abs(values).max(initial=0.0)
    np.testing.assert_allclose(found.values, np.sort(values)[::-1][:k], atol=allowed)
    assert (np.diff(found.values) <= 1e-12).all()


def test_repeated_eigenvalues_are_all_found(rng: np.random.Generator) -> None:
    values = np.r_[np.full(4, 3.0), np.full(3, 2.0), np.linspace(1, 0, 193)]
    matrix = hermitian(rng, values, "f8")
    found = found_by(matrix, aim(200, 7, "f8", tolerance=1e-9))
    np.testing.assert_allclose(found.values, values[:7], rtol=1e-9)
    vectors = np.linalg.eigh(matrix)[1][:, ::-1]
    assert sine(found.vectors[:, :4], vectors[:, :4]) < 1e-7
    assert sine(found.vectors[:, 4:], vectors[:, 4:7]) < 1e-7


def test_a_short_basis_goes_on_from_its_best_vectors(rng: np.random.Generator) -> None:
    values = np.linspace(2, 1, 400)
    matrix = hermitian(rng, values, "f8")
    found = found_by(matrix, aim(400, 5, "f8", most_columns=45, tolerance=1e-6))
    assert found.good.all()
    assert found.products > 4  # more than the basis has blocks
    np.testing.assert_allclose(found.values, values[:5], rtol=1e-9)


def test_the_largest_component_is_positive_and_the_seed_decides(rng: np.random.Generator) -> None:
    matrix = hermitian(rng, 1 / (1 + np.arange(60.0)), "c16")
    first, again, other = (found_by(matrix, aim(60, 4, "c16", seed=seed)) for seed in (3, 3, 4))
    assert first.vectors.tobytes() == again.vectors.tobytes()
    assert first.vectors.tobytes() != other.vectors.tobytes()
    np.testing.assert_allclose(first.vectors, other.vectors, atol=1e-3)
    largest = first.vectors[np.abs(first.vectors).argmax(0), np.arange(4)]
    np.testing.assert_allclose(largest.imag, 0, atol=1e-15)
    assert (largest.real > 0).all()
    assert phases(np.zeros((3, 2))).tolist() == [1, 1]


def test_as_near_as_the_products_came(rng: np.random.Generator) -> None:
    matrix = hermitian(rng, np.linspace(2, 1, 300), "f8")
    steps: list[Pairs] = []
    found = leading_pairs(lambda block: matrix @ block, 300, aim(300, 5, "f8", most_products=3), steps.append)
    assert not found.good.all()
    assert found.products == 3
    assert [each.products for each in steps] == [1, 2, 3]
    assert steps[-1].relative.max() < steps[0].relative.max()
    assert found.values[0] <= 2 + 1e-12  # Ritz values lie within the spectrum


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_that_is_not_symmetric_is_seen(rng: np.random.Generator, dtype: str) -> None:
    matrix = hermitian(rng, 1 / (1 + np.arange(80.0)), dtype)
    matrix[3, 50] += 0.1
    with pytest.raises(AsymmetricError) as caught:
        found_by(matrix, aim(80, 4, dtype))
    assert caught.value.apart > caught.value.allowed


def test_products_that_are_not_finite_are_seen(rng: np.random.Generator) -> None:
    matrix = hermitian(rng, np.ones(30), "f8")
    matrix[4, 5] = matrix[5, 4] = np.nan
    with pytest.raises(NotFiniteError):
        found_by(matrix, aim(30, 4, "f8"))


def test_what_a_block_adds_to_a_basis(rng: np.random.Generator) -> None:
    basis = np.linalg.qr(rng.standard_normal((20, 6)))[0]
    block = np.hstack([basis[:, :3], 1e8 * rng.standard_normal((20, 2)), np.zeros((20, 1))])
    new = orthonormal(block, basis)
    assert new.shape == (20, 2)
    both = np.hstack([basis, new])
    np.testing.assert_allclose(both.T @ both, np.eye(8), atol=1e-14)
    assert orthonormal(block, np.eye(20)).shape == (20, 0)
    assert orthonormal(rng.standard_normal((20, 9)), np.eye(20)[:, :15]).shape == (20, 5)
