"""Complex numbers in split precision: written anew as real ones, and multiplied as accurately as in full."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.gemm.base import Operand, Problem
from tilewright.kernels.gemm.exact import split_complex
from tilewright.kernels.gemm.exact.split_complex import APART, COLUMNS, EACH, PARTS, ROWS, THREADS
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.tolerance import tolerance

C8, C16 = np.dtype(np.complex64), np.dtype(np.complex128)
DTYPES = pytest.mark.parametrize("dtype", [C8, C16], ids=str)


def complex_numbers(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype = C16) -> np.ndarray:
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)


def written(z: np.ndarray, form: str) -> np.ndarray:
    """Lines as the pass is to write them."""
    x, y = z.real, z.imag
    if form == APART:
        return np.stack([x, y], 1).reshape(2 * len(z), -1)
    pairs = [(x, y), (-y, x)] if form == ROWS else [(x, -y), (y, x)]
    return np.stack([np.stack(pair, -1).reshape(len(z), -1) for pair in pairs], 1).reshape(2 * len(z), -1)


def test_real_matrices_multiply_as_complex_ones(rng: np.random.Generator) -> None:
    """Whichever way the factors lie."""
    a, b = complex_numbers(rng, (5, 7)), complex_numbers(rng, (7, 4))
    c = (a @ b).view(np.float64)
    of_b = written(b, ROWS)
    np.testing.assert_array_equal(of_b, written(b.T, COLUMNS).T)
    np.testing.assert_allclose(a.view(np.float64) @ of_b, c, atol=1e-14)
    np.testing.assert_allclose(written(a.T, APART).T @ of_b, c, atol=1e-14)


@pytest.mark.simulator
@pytest.mark.skipif(not SIMULATOR, reason="runs under NUMBA_ENABLE_CUDASIM=1, in a run of its own")
@DTYPES
@pytest.mark.parametrize("form", [ROWS, COLUMNS, APART])
@pytest.mark.parametrize("length", [1, 5, THREADS * EACH // 2 + 3])
def test_the_pass_writes_every_line_in_its_form(
    form: str, length: int, dtype: np.dtype, rng: np.random.Generator
) -> None:
    from numba import cuda

    numbers, part = complex_numbers(rng, (3, length + 2), dtype), PARTS[dtype]
    source, z = cuda.to_device(numbers.view(part))[:, 2:-2], numbers[:, 1:-1]
    width = length if form == APART else 2 * length
    target = np.full((7, width + 3), 8, part)
    held = cuda.to_device(target)
    grid = 3 * -(-2 * length // (THREADS * EACH))
    split_complex.PASS.enqueue((form, part), grid, THREADS, 0, source, held[:6, :width])
    found = held.copy_to_host()
    np.testing.assert_array_equal(found[:6, :width], written(z, form))
    assert (found[6:] == 8).all()
    assert (found[:, width:] == 8).all()


@given(
    st.integers(1, 1 << 18),
    st.integers(1, 1 << 18),
    st.integers(1, 1 << 18),
    st.sampled_from([C8, C16]),
    st.booleans(),
)
def test_pieces_cover_a_product_within_their_memory(
    m: int, n: int, k: int, dtype: np.dtype, copies_a: bool
) -> None:
    part = PARTS[dtype]
    how = split_complex.cut(m, n, k, part, copies_a=copies_a)
    for whole, most in zip((m, n, k), how, strict=True):
        parts = split_complex._parts(whole, most)
        assert sum(length for _, length in parts) == whole
        assert parts[-1][1] * 2 >= most or len(parts) > 4  # about equally long
    of_b = 4 * how.columns * how.depth * part.itemsize
    of_a = 2 * how.rows * how.depth * part.itemsize if copies_a else 0
    padding = 2 * split_complex.LINE_NBYTES * (how.columns + 2 * how.depth)
    assert of_a + of_b <= split_complex.most_nbytes(m, n, k, dtype) + padding
    real = split_complex.real_sides(m, n, k)
    assert how.rows <= real[0]
    assert 2 * how.columns <= real[1]
    assert 2 * how.depth <= real[2]


def problem(strides: tuple[tuple[int, int], ...], dtype: np.dtype = C16, precision: str = "split") -> Problem:
    m, n, k = 3000, 4000, 5000
    sides = ((m, k), (k, n), (m, n))
    operands = (Operand(*side, dtype, of, 16) for side, of in zip(sides, strides, strict=True))
    return Problem(*operands, False, precision, (9, 0))


@pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")
def test_what_is_multiplied_as_real_numbers() -> None:
    rows = ((5000, 1), (4000, 1), (4000, 1))
    columns = ((1, 3000), (1, 5000), (1, 3000))
    for dtype in (C8, C16):
        assert split_complex.supports(problem(rows, dtype))
        assert split_complex.supports(problem(columns, dtype))
        assert split_complex.supports(problem((columns[0], rows[1], rows[2]), dtype))
        assert not split_complex.supports(problem(rows, dtype, "full"))
    assert not split_complex.supports(problem(((10000, 2), *rows[1:]))), "its lines are not contiguous"
    assert not split_complex.supports(problem(((-5000, 1), *rows[1:])))
    assert not split_complex.supports(problem(rows, np.dtype(np.float64)))


# --- On a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")
@DTYPES
@pytest.mark.parametrize("layouts", ["CCC", "CFC", "FCC", "FFC", "CCF", "CFF", "FCF", "FFF"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_products_are_within_the_bound_of_sums(
    layouts: str, dtype: np.dtype, accumulate: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every layout, cut along all sides."""
    from numba import cuda

    from tilewright.kernels import matmul
    from tilewright.kernels.gemm.exact import split_residues
    from tilewright.kernels.gemm.product import describe
    from tilewright.kernels.gemm.select import select

    monkeypatch.setitem(
        split_residues.LEAST_WORK, np.dtype(np.float64), 1
    )  # pieces are too small to be worth it
    monkeypatch.setattr(split_complex, "COPY_NBYTES", 1 << 26)
    monkeypatch.setattr(split_complex, "PANEL_DEPTH", 2048)
    m, n, k = 2101, 2303, 2999
    a, b, c = (complex_numbers(rng, side, dtype) for side in ((m, k), (k, n), (m, n)))
    held = [
        cuda.to_device(np.array(each, order=order)) for each, order in zip((a, b, c), layouts, strict=True)
    ]  # type: ignore[call-overload]
    assert (
        select(describe(*held, accumulate=accumulate, precision="split")).name == "split-complex-tensor_core"
    )
    matmul(held[0], held[1], out=held[2], accumulate=accumulate, precision="split")
    found = held[2].copy_to_host()
    rows, columns = np.r_[0:6, m - 6 : m], np.r_[0:9, n - 9 : n]
    wide = np.clongdouble if dtype == C16 else C16
    left, right = a[rows].astype(wide), b[:, columns].astype(wide)
    before = c[np.ix_(rows, columns)] if accumulate else np.zeros((len(rows), len(columns)))
    wanted = left @ right + before
    scale = abs(left) @ abs(right) + abs(before)
    sizes = abs(left).sum(1)[:, None] + abs(right).sum(0)
    allowed = tolerance(k + accumulate, dtype, scale.astype(np.float64), "split", sizes.astype(np.float64))
    assert (abs(found[np.ix_(rows, columns)] - wanted) <= allowed).all()
    assert np.isfinite(found).all()


@pytest.mark.gpu
@pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")
@DTYPES
def test_errors_are_no_larger_than_those_in_full(dtype: np.dtype, rng: np.random.Generator) -> None:
    from tilewright.kernels import matmul

    a, b = complex_numbers(rng, (2048, 4500), dtype), complex_numbers(rng, (4500, 2048), dtype)
    wide = np.clongdouble if dtype == C16 else C16
    wanted = a[:16].astype(wide) @ b[:, :16].astype(wide)
    split, full = (
        abs(matmul(a, b, precision=precision, device="cuda")[:16, :16] - wanted)  # type: ignore[call-overload]
        for precision in ("split", "full")
    )
    assert np.sqrt((split**2).mean()) <= 1.1 * np.sqrt((full**2).mean())
    np.testing.assert_array_equal(
        matmul(a, b, precision="split", device="cuda"), matmul(a, b, precision="split", device="cuda")
    )


@pytest.mark.gpu
@pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")
@DTYPES
def test_nan_stays_in_its_row_and_column(dtype: np.dtype, rng: np.random.Generator) -> None:
    from tilewright.kernels import matmul

    a, b = complex_numbers(rng, (2048, 2100), dtype), complex_numbers(rng, (2100, 2300), dtype)
    a[5, 9], b[11, 7] = complex(np.nan, 0), complex(0, np.inf)
    c = matmul(a, b, precision="split", device="cuda")
    bad = ~np.isfinite(c)
    assert bad[5].all()
    assert bad[:, 7].all()
    bad[5], bad[:, 7] = False, False
    assert not bad.any()
