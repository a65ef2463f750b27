"""Floats by residues: the scaling, the choice of moduli and the twin without a GPU; the kernels, and what they are
left, on one."""

from __future__ import annotations

import itertools
import math
import threading
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.sampling import examples
from tilewright.kernels.gemm.exact import scaled_residues as twin
from tilewright.kernels.gemm.exact.outcomes import note, noted
from tilewright.kernels.gemm.exact.residues import MODULI
from tilewright.kernels.gpu.device_choice import SIMULATOR

ALL_COUNTS = sorted(itertools.chain(*twin.COUNTS.values()))
COUNTS = st.sampled_from(ALL_COUNTS)
DOUBLES = st.sampled_from(twin.COUNTS[np.dtype(np.float64)])
F4, F8 = twin.FLOAT32, twin.FLOAT64
DTYPES = pytest.mark.parametrize("dtype", [F4, F8], ids=str)


def errors(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of each element, in units of eps |a|.|b|."""
    exact = a.astype(np.longdouble) @ b.astype(np.longdouble)
    sizes = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
    return np.abs((c - exact).astype(np.float64)) / (2 * twin.ROUNDOFF[a.dtype] * sizes)


def one_by_one(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product as a chain of multiply-adds forms it, which is how the dtype's own units do."""
    c = np.zeros((len(a), b.shape[1]), a.dtype)
    for left, right in zip(a.T, b, strict=True):
        c += np.outer(left, right)
    return c


def signed(rng: np.random.Generator, values: np.ndarray) -> np.ndarray:
    return values * rng.choice([-1.0, 1.0], values.shape)


KINDS = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "uniform": lambda rng, shape: rng.random(shape),
    "lognormal 0.5": lambda rng, shape: signed(rng, rng.lognormal(0, 0.5, shape)),
    "lognormal 1": lambda rng, shape: signed(rng, rng.lognormal(0, 1, shape)),
    "lognormal 1.5": lambda rng, shape: signed(rng, rng.lognormal(0, 1.5, shape)),
    "scaled lines": lambda rng, shape: (
        rng.standard_normal(shape) * 2.0 ** rng.integers(-50, 50, (shape[0], 1))
    ),
}


@pytest.mark.parametrize("count", ALL_COUNTS)
def test_no_product_of_lines_exceeds_half_of_all_moduli(count: int) -> None:
    norm, product = Fraction(twin.largest_norm(count)), math.prod(MODULI[:count])
    rounding = Fraction(math.isqrt(twin.DEPTH_LIMIT) + 1, 2)  # of the integers, to the norm
    assert 2 * (norm + rounding) ** 2 < product
    assert twin.largest_norm(count) < 2.0**63, "integers have 64 bits"


@pytest.mark.parametrize("count", ALL_COUNTS)
def test_sums_of_fractions_do_not_overflow(count: int) -> None:
    for parts, bits in zip(zip(*twin.fractions(count), strict=True), (32, 64), strict=False):
        carried = 1 << (64 - twin.LOW_BITS)
        assert sum(255 * part for part in parts) + carried * (bits == 64) < 1 << bits
    # What is missing of 2^96 / p, for all moduli, beside the margin that keeps |C| / P from a half.
    assert 256 * count * 2.0**-twin.FRACTION_BITS < 2.0**-20
    high, low = twin.unit(count)
    assert (Fraction(high) + Fraction(low)) * 2**twin.FRACTION_BITS == pytest.approx(
        math.prod(MODULI[:count]), rel=2.0**-100
    )


@given(COUNTS, st.fractions(-1, 1), st.integers(-30, 30))
@example(14, Fraction(1), 0)
@example(16, Fraction(-1), 0)
@example(15, Fraction(0), 3)
def test_a_sum_comes_back_rounded_once(count: int, share: Fraction, shift: int) -> None:
    product = math.prod(MODULI[:count])
    c = int(share * int(product / 2.003))
    sums = [0, 0, 0]
    for p, parts in zip(MODULI[:count], twin.fractions(count), strict=True):
        rest = c * pow(product // p, -1, p) % p
        sums = [total + rest * part for total, part in zip(sums, parts, strict=True)]
    words = [np.array([total % (1 << 64)], np.uint64) for total in sums]
    found = Fraction(float(twin.scaled_back(words, count, np.array([shift]))[0])) * Fraction(2) ** shift
    allowed = Fraction(abs(c), 1 << 53) * Fraction(1001, 1000) + Fraction(product, 1 << 84)
    assert abs(found - c) <= allowed


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_as_accurate_as_sums_one_by_one(kind: str, dtype: np.dtype, rng: np.random.Generator) -> None:
    a, b = KINDS[kind](rng, (24, 2048)).astype(dtype), KINDS[kind](rng, (20, 2048)).T.astype(dtype)
    count = twin.choose(a, b)
    assert count is not None
    ours, theirs = errors(twin.multiply(a, b, count), a, b), errors(one_by_one(a, b), a, b)
    assert ours.max() <= theirs.max()
    assert math.sqrt((ours**2).mean()) <= math.sqrt((theirs**2).mean())
    assert math.sqrt((ours**2).mean()) <= twin.LARGEST_ERROR / 2  # eps is two units


@settings(max_examples=examples(25))
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 8), st.integers(1, 300), DOUBLES)
def test_whole_numbers_are_exact(seed: int, m: int, n: int, k: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    size = 1 << int(rng.integers(1, 20))
    a, b = (rng.integers(-size, size, shape).astype(np.float64) for shape in ((m, k), (k, n)))
    np.testing.assert_array_equal(twin.multiply(a, b, count), a @ b)


@settings(max_examples=examples(25))
@given(st.integers(0, 2**32 - 1), st.integers(-1074, 900), st.integers(-1074, 900), DOUBLES)
def test_powers_of_two_change_nothing(seed: int, of_a: int, of_b: int, count: int) -> None:
    """Of any size, where no number underflows or overflows."""
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-9, 9, shape).astype(np.float64) for shape in ((3, 40), (40, 4)))
    scaled = twin.multiply(np.ldexp(a, of_a), np.ldexp(b, of_b), count)
    with np.errstate(over="ignore", under="ignore"):
        np.testing.assert_array_equal(scaled, np.ldexp(a @ b, of_a + of_b))


def test_numbers_of_too_different_sizes_are_left_alone(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((8, 4096)), rng.standard_normal((4096, 8))
    assert twin.choose(a, b) == twin.COUNTS[F8][0]
    assert twin.choose(a.astype(F4), b.astype(F4)) == twin.COUNTS[F4][0]
    outlier = a.copy()
    outlier[3, 5] = 1e8
    assert twin.choose(outlier, b) is None
    apart = np.where(np.arange(4096) % 2 == 0, 1.0, 1e-12)
    assert twin.choose(a * apart, (b.T * apart[::-1]).T) is None
    for special in (np.nan, np.inf):
        outlier[3, 5] = special
        assert twin.choose(outlier, b) is None
    zeros = a.copy()
    zeros[3] = 0
    assert twin.choose(zeros, b) == twin.COUNTS[F8][0], "a line of zeros has nothing to lose"
    np.testing.assert_array_equal(twin.multiply(zeros, b, 14)[3], 0)


@pytest.mark.parametrize("sizes", [(1.0, 1e-9), (1e-9, 1.0)])
def test_a_line_that_the_other_hardly_meets(sizes: tuple[float, float], rng: np.random.Generator) -> None:
    """Nothing of the error of the larger halves may hide behind norms."""
    scale = np.repeat(sizes, 1024)
    a, b = rng.standard_normal((6, 2048)) * scale, (rng.standard_normal((6, 2048)) * scale[::-1]).T
    assert twin.choose(a, b) is None


@given(st.integers(twin.LEAST_DEPTH, 1 << 20))
@example(twin.LEAST_DEPTH)
@example(twin.DEPTH_LIMIT)
def test_a_sample_is_an_eighth_at_least(depth: int) -> None:
    sample = twin.sample_of(depth)
    blocks = -(-depth // twin.SAMPLE_BLOCK)
    chosen = [twin.sample_block(number, sample.stride, blocks) for number in range(sample.blocks)]
    assert chosen[0] == 0
    assert len(set(chosen)) == sample.blocks
    assert max(chosen) < blocks
    places = sum(min(twin.SAMPLE_BLOCK, depth - twin.SAMPLE_BLOCK * block) for block in chosen)
    assert places == sample.places
    assert depth <= 1.15 * twin.SAMPLE_SHARE * places


def test_the_bound_of_sums_holds_for_the_worst_numbers() -> None:
    """As `scaled_residues` says: with flatness up to `SAMPLE_SHARE` times what a sample shows."""
    k = twin.LEAST_DEPTH
    for dtype, counts in twin.COUNTS.items():
        for count in counts:
            flatness = 1.15 * twin.SAMPLE_SHARE * twin.largest_flatness(dtype, count)
            # Every element wrong by half a step, all one way, on both sides; k numbers add up to sqrt(k) |a|.
            worst = 2 * flatness * math.sqrt(k) / twin.largest_norm(count)
            assert worst + 2 * twin.ROUNDOFF[dtype] <= k * twin.ROUNDOFF[dtype]


def test_outcomes_are_those_of_the_block_and_the_thread() -> None:
    with noted() as outer:
        note("first")
        with noted() as inner:
            note("second")
            thread = threading.Thread(target=note, args=("of another thread",))
            thread.start()
            thread.join()
        note("third")
    note("of nobody")
    assert (outer, inner) == (["first", "second", "third"], ["second"])


if not SIMULATOR:
    from tilewright.kernels import matmul
    from tilewright.kernels.gemm.exact import split_residues, whole_floats
    from tilewright.kernels.gemm.product import kernel_name


@pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")
@given(
    st.integers(1024, 1 << 17),
    st.integers(1024, 1 << 17),
    st.integers(1024, 1 << 17),
    st.sampled_from([F4, F8]),
)
def test_scratch_memory_is_bounded(m: int, n: int, k: int, dtype: np.dtype) -> None:
    where = split_residues.layout(dtype, m, n, k, 132)
    if m * n * k >= split_residues.LEAST_WORK.get(dtype, 1 << 63):
        assert where.nbytes <= split_residues.most_nbytes(dtype, m, n, k)
    assert where.depth % 128 == 0
    assert where.depth <= twin.DEPTH_LIMIT
    places = (0, where.sums, *where.norms, *where.shifts, where.workspace, *where.planes, where.nbytes)
    assert list(places) == sorted(places)
    assert where.workspace % 16 == where.planes[0] % 128 == where.planes[1] % 128 == 0


# --- On a GPU --------------------------------------------------------------------------------------------------------


def on_gpu(
    a: np.ndarray, b: np.ndarray, precision: str = "split", **options: object
) -> tuple[np.ndarray, list[str]]:
    """The product, and what it came to."""
    with noted() as outcomes:
        c = matmul(a, b, precision=precision, device="cuda", **options)  # type: ignore[call-overload]
    return c, outcomes


def lines(
    rng: np.random.Generator, m: int, n: int, k: int, dtype: np.dtype = F8
) -> tuple[np.ndarray, np.ndarray]:
    """Lines of all sizes, some of zeros."""
    most = 300 if dtype == F8 else 30
    a = rng.standard_normal((m, k)) * 2.0 ** rng.integers(-most, most, (m, 1))
    b = rng.standard_normal((k, n)) * 2.0 ** rng.integers(-most, most, (1, n))
    a[7], b[:, n - 1] = 0, 0
    return a.astype(dtype), b.astype(dtype)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("layouts", ["CC", "CF", "FC", "FF"])
def test_kernels_do_what_the_twin_does(
    layouts: str, dtype: np.dtype, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 products, which are not multiplied so yet, too."""
    monkeypatch.setitem(split_residues.LEAST_WORK, F4, 1)
    m, n, k = 1100, 1030, 61_000  # ragged on all sides
    a, b = lines(rng, m, n, k, dtype)
    count = twin.COUNTS[dtype][0]
    a, b = np.array(a, order=layouts[0]), np.array(b, order=layouts[1])  # type: ignore[call-overload]
    c, outcomes = on_gpu(a, b)
    assert outcomes == [split_residues.outcome(dtype, count, False)]
    rows, columns = np.r_[:12, m - 20 : m], np.r_[:9, n - 20 : n]
    wanted = twin.multiply(np.ascontiguousarray(a[rows]), np.ascontiguousarray(b[:, columns]), count)
    np.testing.assert_array_equal(c[np.ix_(rows, columns)], wanted)
    np.testing.assert_array_equal(on_gpu(a, b)[0], c)  # from run to run


@pytest.mark.gpu
def test_the_other_engine_gives_the_same_bits(rng: np.random.Generator) -> None:
    from numba import cuda

    a, b = lines(rng, 1100, 1400, 23_000)
    c, _ = on_gpu(a, b)
    out = cuda.to_device(np.ones_like(c))
    split_residues.SPLIT_RESIDUES_MMA.launch(cuda.to_device(a), cuda.to_device(b), out, True, 0)
    np.testing.assert_array_equal(out.copy_to_host(), 1 + c)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("kind", [*KINDS, "cancelling", "outlier", "hilbert"])
def test_errors_are_no_larger_than_in_full(
    kind: str, dtype: np.dtype, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(split_residues.LEAST_WORK, F4, 1)
    side, k = 1536, 31_000
    if kind == "cancelling":
        a, b = rng.standard_normal((side, k)), rng.standard_normal((k, side))
        a[:, k // 2 :], b[k // 2 :] = -a[:, : k // 2] * (1 + 1e-9), b[: k // 2]
    elif kind == "outlier":
        a, b = rng.standard_normal((side, k)), rng.standard_normal((k, side))
        a[0, 1] = 1e7
    elif kind == "hilbert":
        a = 1 / (np.arange(side)[:, None] + np.arange(k)[None, :] + 1)
        b = a.T.copy()
    else:
        a, b = KINDS[kind](rng, (side, k)), KINDS[kind](rng, (side, k)).T
    a, b = a.astype(dtype), b.astype(dtype)
    (c, _), (full, _) = on_gpu(a, b), on_gpu(a, b, "full")
    some = slice(0, 24)
    ours, theirs = (errors(found[some, some], a[some], b[:, some]) for found in (c, full))
    assert ours.max() <= 1.1 * theirs.max() + 0.5
    assert math.sqrt((ours**2).mean()) <= 1.05 * math.sqrt((theirs**2).mean()) + 0.01


@pytest.mark.gpu
def test_special_numbers_are_multiplied_in_full(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((1024, 40_000)), rng.standard_normal((40_000, 1024))
    a[3, 3], b[5, 5], b[6, 5] = np.nan, np.inf, -np.inf
    c, outcomes = on_gpu(a, b)
    assert outcomes == [split_residues.outcome(F8, None, True)]
    np.testing.assert_array_equal(c, on_gpu(a, b, "full")[0])
    assert np.isnan(c[3]).all()
    assert not np.isfinite(c[:, 5]).any()
    tiny = rng.standard_normal((1024, 40_000)) * 2.0**-1040
    c, outcomes = on_gpu(tiny, rng.standard_normal((40_000, 1024)))
    assert outcomes == [split_residues.outcome(F8, 14, False)]
    assert (c != 0).mean() > 0.99


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ends", [(-128, 128), (0, 256), (0, 3)])
def test_small_whole_numbers_are_exact(dtype: str, ends: tuple[int, int], rng: np.random.Generator) -> None:
    m, n, k = 2100, 4100, 32_000
    a, b = rng.integers(*ends, (m, k)), rng.integers(0, 2, (n, k))
    exact = a.astype(np.float64) @ b.T.astype(np.float64)
    right = b.astype(dtype).T
    c, outcomes = on_gpu(a.astype(dtype), right, "full")
    assert outcomes == [whole_floats.OUTCOME]
    np.testing.assert_array_equal(c, exact.astype(dtype))
    left = a.astype(dtype)
    left[m - 1, k - 1] += 0.5
    c, outcomes = on_gpu(left, right, "full")
    assert outcomes == []
    assert "wgmma" not in kernel_name(left, right, device="cuda")
    np.testing.assert_allclose(c[-1] - exact[-1], 0.5 * right[k - 1], atol=1)
