"""``precision="split"``: as accurate as float32 on matrices that are hard in different ways, and IEEE's
specials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tilewright.kernels.gpu.device_choice import SIMULATOR

if SIMULATOR:
    pytest.skip("the simulator has no tensor cores", allow_module_level=True)

from numba import cuda

from tilewright.kernels.gemm.hopper import split_float
from tilewright.kernels.tolerance import tolerance

Pair = tuple[np.ndarray, np.ndarray]


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, as the pass does it."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)


def test_three_parts_hold_a_float32(rng: np.random.Generator) -> None:
    x = (rng.standard_normal(100_000) * 10.0 ** rng.integers(-25, 25, 100_000)).astype(np.float32)
    high = bfloat16(x)
    middle = bfloat16(x - high)
    low = bfloat16(x - high - middle)
    np.testing.assert_array_equal(high.astype(np.float64) + middle + low, x)
    assert (np.abs(middle) <= np.abs(x) * 2.0**-8).all()
    assert (np.abs(low) <= np.abs(x) * 2.0**-16).all()


def normal(rng: np.random.Generator, n: int, k: int) -> Pair:
    return rng.standard_normal((n, k)), rng.standard_normal((k, n))


def positive(rng: np.random.Generator, n: int, k: int) -> Pair:
    return rng.random((n, k)), rng.random((k, n))


def graded_along_k(rng: np.random.Generator, n: int, k: int) -> Pair:
    scale = 2.0 ** np.linspace(-20, 20, k)
    a, b = normal(rng, n, k)
    return a * scale, b / scale[:, None]


def graded_rows(rng: np.random.Generator, n: int, k: int) -> Pair:
    scale = 10.0 ** np.linspace(-10, 10, n)
    a, b = normal(rng, n, k)
    return a * scale[:, None], b * scale


def cancelling(rng: np.random.Generator, n: int, k: int) -> Pair:
    a, b = normal(rng, n, k // 2)
    return np.hstack([a, -a]), np.vstack([b, b + 1e-3 * rng.standard_normal(b.shape)])


def wild_exponents(rng: np.random.Generator, n: int, k: int) -> Pair:
    a, b = normal(rng, n, k)
    return a * np.exp(4 * rng.standard_normal(a.shape)), b * np.exp(4 * rng.standard_normal(b.shape))


def scaled_far(rng: np.random.Generator, n: int, k: int) -> Pair:
    a, b = normal(rng, n, k)
    return a * 1e-25, b * 1e20


MATRICES = [normal, positive, graded_along_k, graded_rows, cancelling, wild_exponents, scaled_far]


@pytest.fixture(params=["halves", "thirds"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two parts wherever the numbers allow it, or three of every number."""
    chosen = request.param
    monkeypatch.setattr(split_float, "LEAST_HALVES_WORK", 0 if chosen == "halves" else 1 << 62)
    monkeypatch.setattr(split_float, "LEAST_HALVES_DEPTH", 1)
    return str(chosen)


def split_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    c = cuda.to_device(np.full((a.shape[0], b.shape[1]), np.nan, np.float32))
    split_float.launch(cuda.to_device(a), cuda.to_device(b), c, False, 0)
    return c.copy_to_host()


@pytest.mark.gpu
@pytest.mark.parametrize("matrices", MATRICES)
@pytest.mark.parametrize(
    ("n", "k", "parts"),
    [
        (512, 64, "thirds"),
        *((2048, k, parts) for k in (split_float.LEAST_HALVES_DEPTH, 4096) for parts in ("thirds", "halves")),
    ],
    indirect=["parts"],
)
def test_no_larger_error_than_float32(
    matrices: Callable[..., Pair],
    n: int,
    k: int,
    parts: str,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against the float32 kernel, where it adds up k in one piece: the largest and the root-mean-square
    error."""
    from tilewright.kernels import matmul
    from tilewright.kernels.gemm.cores.warp_tiled_cut import cut
    from tilewright.kernels.gemm.cores.warp_tiling import ALONG_K, VECTOR

    by_rows = ALONG_K, VECTOR
    processors = cuda.get_current_device().MULTIPROCESSOR_COUNT
    cuts = cut(n, n, k, np.dtype(np.float32), by_rows, processors)
    assert all(part.splits == 1 for part in cuts), "sums of pieces would be compared with sums of all of k"
    a, b = (x.astype(np.float32) for x in matrices(rng, n, k))
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    exact, scale = wide_a @ wide_b, np.abs(wide_a) @ np.abs(wide_b)
    full = np.abs(matmul(a, b, device="cuda") - exact) / scale
    product = split_product(a, b)
    split = np.abs(product - exact) / scale
    monkeypatch.setattr(split_float, "LEAST_HALVES_WORK", 1 << 62)
    in_three = parts == "thirds" or matrices in (graded_along_k, wild_exponents)  # too far apart
    assert np.array_equal(product, split_product(a, b)) is in_three
    assert split.max() <= full.max()
    assert np.sqrt(np.mean(split**2)) <= np.sqrt(np.mean(full**2))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 2, 5, 40])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_infinities_and_nan(
    count: int, by_columns: bool, accumulate: bool, parts: str, rng: np.random.Generator
) -> None:
    m, n, k = 300, 333, 400
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    for x in (a, b):
        x[rng.integers(x.shape[0]), :] = 0  # zero times infinity is NaN
        x[:, rng.integers(x.shape[1])] = 0
        for _ in range(count):
            place = rng.integers(x.shape[0]), rng.integers(x.shape[1])
            x[place] = rng.choice(np.array([np.inf, -np.inf, np.nan], np.float32))
    with np.errstate(all="ignore"):
        expected = a.astype(np.float64) @ b.astype(np.float64) + accumulate
    order: Any = "F" if by_columns else "C"
    c = cuda.to_device(np.ones((m, n), np.float32))
    split_float.launch(
        cuda.to_device(np.asarray(a, order=order)),
        cuda.to_device(np.asarray(b, order=order)),
        c,
        accumulate,
        0,
    )
    found = c.copy_to_host()
    finite = np.isfinite(expected)
    assert finite.all() == (count == 0)
    np.testing.assert_array_equal(found[~finite], expected[~finite].astype(np.float32))
    np.testing.assert_allclose(found[finite], expected[finite], rtol=0, atol=1e-4)


@pytest.mark.gpu
def test_infinity_in_one_panel_only(
    parts: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    from tilewright.kernels.gemm.hopper import float_operand

    monkeypatch.setattr(float_operand, "PLANES_NBYTES", 1 << 20)
    a, b = (
        rng.standard_normal((200, 3000)).astype(np.float32),
        rng.standard_normal((3000, 301)).astype(np.float32),
    )
    for place, value in (((7, 10), np.inf), ((9, 1500), np.nan), ((11, 2900), -np.inf)):
        a[place] = value
    with np.errstate(all="ignore"):
        expected = a.astype(np.float64) @ b.astype(np.float64)
    found = split_product(a, b)
    flagged = [7, 9, 11]
    np.testing.assert_array_equal(found[flagged], expected[flagged].astype(np.float32))
    rest = np.setdiff1d(np.arange(200), flagged)
    np.testing.assert_allclose(found[rest], expected[rest], rtol=0, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("largest", [3.4028234e38, 1e38, 1.0, 1e-25])
def test_range(largest: float, rng: np.random.Generator) -> None:
    """Times the identity, a number comes out as it is, from the largest down to 2**-102, below which parts
    underflow."""
    b = rng.uniform(0.5, 1, (128, 256)).astype(np.float32) * np.float32(largest)
    b[0, 0] = largest
    np.testing.assert_array_equal(split_product(np.eye(128, dtype=np.float32), b), b)


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", ["rr", "rc", "cr", "cc"])
@pytest.mark.parametrize("sides", [(300, 515, 700), (129, 193, 65), (1000, 777, 4097), (64, 4096, 1024)])
def test_two_parts_in_every_layout(
    layouts: str, sides: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Lines of different sizes, ragged sides, and a C that is added to. Elements err by less than 3 eps |a| |b|."""
    monkeypatch.setattr(split_float, "LEAST_HALVES_WORK", 0)
    monkeypatch.setattr(split_float, "LEAST_HALVES_DEPTH", 1)
    m, n, k = sides
    # Of whole numbers up to 1023 no two in a line are too far apart, and parts hold them exactly.
    a = (rng.integers(-1023, 1024, (m, k)) * 2.0 ** rng.integers(-30, 30, (m, 1))).astype(np.float32)
    b = (rng.integers(-1023, 1024, (k, n)) * 2.0 ** rng.integers(-30, 30, (1, n))).astype(np.float32)
    a[m // 2], b[:, n // 3] = 0, 0
    exact, scale = a.astype(np.float64) @ b, np.abs(a.astype(np.float64)) @ np.abs(b)
    given = [
        cuda.to_device(np.asarray(x, order=order))
        for x, order in zip((a, b), ("F" if each == "c" else "C" for each in layouts), strict=True)
    ]
    for added in (0.0, 5.0):
        c = cuda.to_device(np.full((m, n), added, np.float32))
        split_float.launch(*given, c, added != 0, 0)
        found = c.copy_to_host().astype(np.float64)
        assert (np.abs(found - exact - added) <= 3 * 2.0**-23 * (scale + added)).all()


@pytest.mark.gpu
def test_numbers_too_far_apart_are_multiplied_in_three_parts(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """To the bit as if two parts were never tried; one such line is enough, of either matrix."""
    monkeypatch.setattr(split_float, "LEAST_HALVES_DEPTH", 1)
    a, b = (rng.uniform(1, 2, (512, 512)).astype(np.float32) for _ in range(2))

    def product(work: int) -> np.ndarray:
        monkeypatch.setattr(split_float, "LEAST_HALVES_WORK", work)
        return split_product(a, b)

    assert not np.array_equal(product(0), product(1 << 62))
    for matrix, place in ((a, (100, 7)), (b, (3, 400))):
        kept, matrix[place] = matrix[place], 2.0**-35
        np.testing.assert_array_equal(product(0), product(1 << 62))
        matrix[place] = kept


@pytest.mark.gpu
def test_tiny_numbers_keep_what_float32_keeps_of_sums(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Where those that are large meet zeros: within the bound of ordinary sums of as many products."""
    monkeypatch.setattr(split_float, "LEAST_HALVES_WORK", 0)
    k = split_float.LEAST_HALVES_DEPTH
    a, b = np.zeros((64, k), np.float32), np.zeros((k, 64), np.float32)
    a[:, :8], b[8:] = 1, rng.uniform(1, 2, (k - 8, 64))
    a[:, 8:] = rng.uniform(1, 2, (64, k - 8)) * 2.0**-33
    exact = a.astype(np.float64) @ b
    error = np.abs(split_product(a, b) - exact)
    sizes = a.sum(1, dtype=np.float64)[:, None] + b.sum(0, dtype=np.float64)
    assert (error <= tolerance(k, np.float32, exact, "split", sizes)).all()
    assert error.max() > 0, "three parts were multiplied"


@pytest.mark.gpu
@pytest.mark.parametrize("largest", [3.4028234e38, 1e38, 1.0, 1e-25])
def test_range_of_two_parts(
    largest: float, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Times the identity, a number comes out to within 2**-23, from the largest down."""
    monkeypatch.setattr(split_float, "LEAST_HALVES_WORK", 0)
    monkeypatch.setattr(split_float, "LEAST_HALVES_DEPTH", 1)
    b = rng.uniform(0.5, 1, (128, 256)).astype(np.float32) * np.float32(largest)
    b[0, 0] = largest
    np.testing.assert_allclose(split_product(np.eye(128, dtype=np.float32), b), b, rtol=2.0**-23, atol=0)
