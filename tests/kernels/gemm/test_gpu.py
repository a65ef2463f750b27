"""Every kernel of the ladder on a real GPU: through the public product, and each record on all it accepts."""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any

import numpy as np
import pytest

from tests.kernels import naive
from tilewright.kernels import matmul
from tilewright.kernels.choices import PRECISIONS
from tilewright.kernels.errors import OutputError
from tilewright.kernels.gemm.base import GemmKernel
from tilewright.kernels.gemm.ladder.tiled import TILED
from tilewright.kernels.gemm.product import describe, kernel_name
from tilewright.kernels.gemm.select import ladder
from tilewright.kernels.gpu.launch import CUDATimer
from tilewright.kernels.tolerance import tolerance

pytestmark = [pytest.mark.gpu]

AROUND_TILES = (1, 7, 9, 15, 17, 31, 32, 33, 63, 65, 127, 128, 129, 255, 257)
SHAPES = (
    (1, 1, 1),
    (1, 300, 40),
    (300, 1, 40),
    (40, 50, 1),
    (130, 70, 200),
    (128, 256, 64),
    (257, 129, 65),
    (3, 5, 3000),
    (64, 64, 1025),
)
LAUNCH_SECONDS = 40e-6
"""What a small product of device arrays may cost the host. It takes 12 to 14 µs, up to 22 where two dozen processes
share a GPU, and up to 31 where others compile on all cores meanwhile."""


def fast_reference(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The product where the naive one would take minutes: the CPU twin, in a wider type for floats."""
    wide = dtype if dtype.kind in "iu" else np.complex128 if dtype.kind == "c" else np.float64
    return matmul(a.astype(wide), b.astype(wide), device="cpu")


def assert_close(found: np.ndarray, a: np.ndarray, b: np.ndarray, precision: str = "full") -> None:
    exact = fast_reference(a, b, found.dtype)
    if found.dtype.kind in "iu":
        np.testing.assert_array_equal(found, exact)
        return
    scale = np.abs(a).astype("f8") @ np.abs(b).astype("f8")
    allowed = tolerance(a.shape[1], found.dtype, scale, precision, naive.sizes(a, b))
    if found.dtype.itemsize // (2 if found.dtype.kind == "c" else 1) == 8:
        allowed = 2 * allowed  # the reference is no more exact than the kernel
    error = np.abs(found - exact)
    assert (error <= allowed).all(), f"largest error is {np.max(error / allowed):.3g} times the tolerance"


def poisoned(shape: tuple[int, int], dtype: Any) -> np.ndarray:
    """NaN in floating point, a pattern in integers: what is not written shows."""
    dtype = np.dtype(dtype)
    return np.full(shape, 85 if dtype.kind in "iu" else np.nan, dtype)


def run(
    a: np.ndarray, b: np.ndarray, out: np.ndarray, kernel: GemmKernel | None = None, **options: Any
) -> np.ndarray:
    """The product by a kernel, or by the public function, over device twins of host matrices."""
    (on_a, _), (on_b, _), (on_out, fetch) = (naive.device_twin(array) for array in (a, b, out))
    if kernel is None:
        assert matmul(on_a, on_b, on_out, **options) is on_out
    else:
        kernel.launch(on_a, on_b, on_out, options.get("accumulate", False), 0)
    return fetch()


def accepts(kernel: GemmKernel, a: np.ndarray, b: np.ndarray, out: np.ndarray, **options: Any) -> bool:
    return kernel.supports(describe(*(naive.device_twin(array)[0] for array in (a, b, out)), **options))


@pytest.mark.parametrize("dtype", naive.DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_shapes(m: int, n: int, k: int, dtype: str, rng: np.random.Generator) -> None:
    a, b = naive.numbers(rng, (m, k), dtype), naive.numbers(rng, (k, n), dtype)
    assert_close(run(a, b, poisoned((m, n), dtype)), a, b)


@pytest.mark.parametrize("dtype", naive.DTYPES)
def test_sides_around_every_tile_boundary(dtype: str, rng: np.random.Generator) -> None:
    for side in AROUND_TILES:
        for m, n, k in ((side, 130, 130), (130, side, 130), (130, 130, side), (side, side, side)):
            a, b = naive.numbers(rng, (m, k), dtype), naive.numbers(rng, (k, n), dtype)
            assert_close(run(a, b, poisoned((m, n), dtype)), a, b)


@pytest.mark.parametrize("dtype", naive.DTYPES)
def test_layouts(dtype: str, rng: np.random.Generator) -> None:
    """Pairs of operand layouts, then every output layout; nothing outside the output may change."""
    a, b = naive.numbers(rng, (70, 90), dtype), naive.numbers(rng, (90, 80), dtype)
    # A layout is a kernel to compile: every pair for one dtype of each kind, each layout once for the others.
    names = list(naive.LAYOUTS)
    pairs = (
        itertools.product(names, names)
        if dtype in ("f4", "f8", "i8")
        else zip(names, names[::-1], strict=True)
    )
    for lie_a, lie_b in pairs:
        found = run(naive.LAYOUTS[lie_a](a), naive.LAYOUTS[lie_b](b), poisoned((70, 80), dtype))
        assert_close(found, a, b)
    for lie in naive.LAYOUTS:
        found = run(a, b, naive.LAYOUTS[lie](poisoned((70, 80), dtype)))
        assert_close(np.array(found), a, b)
        naive.assert_surroundings_kept(found)


@pytest.mark.parametrize("dtype", naive.DTYPES)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_transposed_and_accumulated(
    dtype: str, transpose_a: bool, transpose_b: bool, rng: np.random.Generator
) -> None:
    for m, n, k in ((40, 50, 60), (129, 140, 100)):
        a, b, before = (naive.numbers(rng, shape, dtype) for shape in ((m, k), (k, n), (m, n)))
        found = run(
            np.ascontiguousarray(a.T) if transpose_a else a,
            np.ascontiguousarray(b.T) if transpose_b else b,
            before.copy(),
            accumulate=True,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
        )
        naive.assert_product(found, a, b, before)


@pytest.mark.parametrize(
    "pair", [("i1", "i4"), ("u4", "i4"), ("i8", "u8"), ("f4", "f8"), ("i2", "f4"), ("f2", "c8")]
)
def test_mixed_dtypes(pair: tuple[str, str], rng: np.random.Generator) -> None:
    a, b = naive.numbers(rng, (33, 40), pair[0]), naive.numbers(rng, (40, 35), pair[1])
    out = poisoned((33, 35), np.result_type(a, b))
    naive.assert_product(run(a, b, out), a.astype(out.dtype), b.astype(out.dtype))


@functools.cache
def known_product(m: int, n: int, k: int, dtype: str) -> tuple[np.ndarray, ...]:
    """A, B, their product, |A| |B| and something to add to, made once for all kernels."""
    rng = np.random.default_rng(m + n + k)
    a, b = naive.numbers(rng, (m, k), dtype), naive.numbers(rng, (k, n), dtype)
    exact = fast_reference(a, b, np.dtype(dtype))
    scale = np.abs(a).astype("f8") @ np.abs(b).astype("f8")
    return a, b, exact, scale, naive.numbers(rng, (m, n), dtype)


def accepted_layouts(kernel: GemmKernel, shape: tuple[int, int, int], dtype: str) -> int:
    """Try a kernel on each layout of operands of a shape and type that it accepts; returns on how many."""
    m, n, k = shape
    tried = 0
    a, b, exact, scale, before = known_product(m, n, k, dtype)
    layouts = (
        ("rows", "rows"),
        ("columns", "rows"),
        ("rows", "columns"),
        ("padded columns", "padded rows"),
        ("aligned rows", "aligned rows"),
        ("aligned columns", "aligned columns"),
    )
    for (lie_a, lie_b), accumulate in itertools.product(layouts, (False, True)):
        out = before.copy() if accumulate else poisoned((m, n), dtype)
        if lie_a.startswith("aligned"):
            out = naive.LAYOUTS["aligned rows"](out)
        placed = (naive.LAYOUTS[lie_a](a), naive.LAYOUTS[lie_b](b), out)
        accepted = (
            precision
            for precision in PRECISIONS
            if accepts(kernel, *placed, accumulate=accumulate, precision=precision)
        )
        precision = next(accepted, None)  # a kernel does the same whatever else is allowed
        if precision is None:
            continue
        tried += 1
        found = run(*placed, kernel, accumulate=accumulate)
        naive.assert_surroundings_kept(found)
        what = f"{m} × {n} × {k} {dtype} {lie_a}, {lie_b}, accumulate={accumulate}"
        if np.dtype(dtype).kind in "iu":
            expected = before + exact if accumulate else exact
            assert (found == expected).all(), what
        else:
            expected = before.astype(exact.dtype) + exact if accumulate else exact
            # Twice, since the reference of the widest types is no more exact than the kernel.
            scale_here = scale + accumulate * np.abs(before)
            allowed = 2 * tolerance(k + 1, dtype, scale_here, precision, naive.sizes(a, b))
            assert (np.abs(found - expected) <= allowed).all(), what
    return tried


@pytest.mark.parametrize("kernel", ladder(), ids=lambda kernel: kernel.name)
def test_every_kernel_on_all_it_accepts(kernel: GemmKernel) -> None:
    """Each record, also where another would be preferred; it must accept something, or nobody tests it."""
    shapes = ((130, 140, 150), (128, 256, 192), (1000, 600, 900), (16, 2048, 1024), (2048, 16, 512))
    tried = sum(
        accepted_layouts(kernel, shape, dtype) for shape, dtype in itertools.product(shapes, naive.DTYPES)
    )
    if not tried:  # some are worth their preparations only where a product is large
        tried = accepted_layouts(kernel, (2048, 2048, 8192), "f8")
    assert tried, f"{kernel.name} accepted nothing that is tried here"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [(256, 512, 1024), (130, 140, 150)])
def test_reduced_precision_is_as_good_as_it_says(
    precision: str, shape: tuple[int, int, int], rng: np.random.Generator
) -> None:
    m, n, k = shape
    a, b = naive.numbers(rng, (m, k), "f4"), naive.numbers(rng, (k, n), "f4")
    assert_close(run(a, b, poisoned((m, n), "f4"), precision=precision), a, b, precision)


@pytest.mark.parametrize("dtype", naive.DTYPES)
def test_results_are_bit_identical_from_run_to_run(dtype: str, rng: np.random.Generator) -> None:
    for m, n, k in ((300, 200, 500), (33, 40, 5000), (1024, 1024, 256)):
        a, b = naive.numbers(rng, (m, k), dtype), naive.numbers(rng, (k, n), dtype)
        first, second = (run(a, b, poisoned((m, n), dtype)) for _ in range(2))
        assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "f2", "f4", "f8", "c8", "c16"])
def test_nan_infinity_and_signed_zero(dtype: str, rng: np.random.Generator) -> None:
    """Where NumPy has NaN or an infinity, so have we, and nowhere else; the ragged edge leaks nothing."""
    for m, n, k in ((65, 70, 75), (256, 256, 256)):
        a, b = naive.numbers(rng, (m, k), dtype), naive.numbers(rng, (k, n), dtype)
        a[m - 1, k - 1], a[3, 4], a[5, 6] = np.nan, np.inf, -np.inf
        b[k - 1, 2], b[0, n - 1] = 0, np.inf
        with np.errstate(all="ignore"):
            expected = a @ b
        found = run(a, b, poisoned((m, n), dtype))
        if np.dtype(dtype).kind != "c":
            np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
            np.testing.assert_array_equal(np.isposinf(found), np.isposinf(expected))
            np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))
        else:
            # IEEE 754 leaves open which parts of a complex infinity become NaN; finite is what must agree.
            np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    zero = np.full((4, 4), -0.0, dtype)
    found = run(zero, np.ones((4, 4), dtype), poisoned((4, 4), dtype))
    assert not found.any()
    if np.dtype(dtype).kind != "c":
        assert not np.signbit(found).any()  # 0 + -0 is 0, as in NumPy


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_denormals_are_kept(dtype: str) -> None:
    tiny = np.finfo(dtype).smallest_subnormal
    a = np.full((130, 160), tiny, dtype)
    found = run(a, np.ones((160, 140), dtype), poisoned((130, 140), dtype))
    np.testing.assert_array_equal(found, np.full((130, 140), 160 * tiny, dtype))


def test_no_step_of_k_at_all_gives_zeros() -> None:
    for dtype in naive.DTYPES:
        found = run(np.ones((40, 0), dtype), np.ones((0, 50), dtype), poisoned((40, 50), dtype))
        assert not found.any()


@pytest.mark.whole_gpu
@pytest.mark.parametrize("dtype", ["i1", "f4", "f8"])
def test_more_than_two_to_the_31_elements(dtype: str, rng: np.random.Generator) -> None:
    """Operands, then an output, with more elements than 32-bit signed indices reach; both ends are read."""
    from numba import cuda

    rows, columns = 2**26 + 5, 33
    band = rng.integers(-9, 9, (64, columns)).astype(dtype)
    whole = cuda.device_array((rows, columns), dtype)
    whole.gpu_data.memset(0)
    for edge in (slice(0, 64), slice(rows - 64, rows)):
        whole[edge].copy_to_device(band)
    right = rng.integers(-9, 9, (columns, 3)).astype(dtype)
    expected = matmul(band, right, device="cpu")
    product = matmul(whole, cuda.to_device(right))
    for edge in (slice(0, 64), slice(rows - 64, rows)):
        np.testing.assert_array_equal(product[edge].copy_to_host(), expected)
    # The transposed operand: now k is the long side.
    ones = cuda.to_device(np.ones((rows, 1), dtype))
    sums = matmul(whole, ones, transpose_a=True).copy_to_host()
    np.testing.assert_array_equal(sums[:, 0], 2 * band.sum(0, dtype=dtype))
    del whole
    # The output: an outer product of a long column and a short row.
    column = cuda.device_array((rows, 1), dtype)
    for edge in (slice(0, 64), slice(rows - 64, rows)):
        column[edge].copy_to_device(np.ascontiguousarray(band[:, :1]))
    product = matmul(column, cuda.to_device(band[:1]))
    for edge in (slice(0, 64), slice(rows - 64, rows)):
        np.testing.assert_array_equal(product[edge].copy_to_host(), band[:, :1] * band[:1])


def test_numpy_arrays_go_to_the_gpu_and_back(rng: np.random.Generator) -> None:
    a, b = naive.numbers(rng, (100, 60), "f4"), naive.numbers(rng, (60, 80), "f4")
    found = matmul(a, b[:, ::2], device="cuda")
    assert isinstance(found, np.ndarray)
    naive.assert_product(found, a, b[:, ::2])
    out = np.ones((40, 100), "f4", order="F")
    matmul(b[:, ::2], a, out, accumulate=True, transpose_a=True, transpose_b=True, device="cuda")
    naive.assert_product(out, b[:, ::2].T, a.T, np.ones((40, 100), "f4"))


def test_streams_and_other_libraries(rng: np.random.Generator) -> None:
    cupy = pytest.importorskip("cupy")
    a, b = (naive.numbers(rng, (1000, 1000), "f4") for _ in range(2))
    with cupy.cuda.Stream(non_blocking=True):
        # The product must wait for the work that the arrays were exported with.
        left, right = cupy.asarray(a) * 2, cupy.asarray(b) * 3
        found = matmul(left, right)
        assert isinstance(found, cupy.ndarray)
        again = cupy.asnumpy(found * 1)
    assert_close(again, 2 * a, 3 * b)
    backward = cupy.asarray(a)[::-1, ::-1]
    assert_close(cupy.asnumpy(matmul(backward, right)), a[::-1, ::-1], 3 * b)


def test_device_outputs_are_checked(rng: np.random.Generator) -> None:
    from numba import cuda

    whole = cuda.to_device(np.zeros((8, 8)))
    with pytest.raises(OutputError, match="out overlaps a"):
        matmul(whole[:4, :4], cuda.to_device(np.ones((4, 4))), whole[:4, 2:6])
    with pytest.raises(OutputError, match="has shape"):
        matmul(whole, whole, cuda.to_device(np.zeros((8, 7))))


@pytest.mark.whole_gpu  # others compile on the cores meanwhile
def test_a_small_product_costs_little_more_than_its_launch() -> None:
    from numba import cuda

    a, out = cuda.to_device(np.ones((64, 64), "f4")), cuda.device_array((64, 64), "f4")
    assert kernel_name(a, a, out)
    for _ in range(100):
        matmul(a, a, out)
    cuda.synchronize()
    best = np.inf
    for _ in range(20):
        start = time.thread_time()
        for _ in range(100):
            matmul(a, a, out)
        best = min(best, (time.thread_time() - start) / 100)
        cuda.synchronize()
    print(f"a small product: {best * 1e6:.1f} us of this thread on the host")
    assert best < LAUNCH_SECONDS


def test_timer_measures_the_device() -> None:
    from numba import cuda

    a = cuda.to_device(np.ones((2048, 2048), "f4"))
    out = cuda.device_array((2048, 2048), "f4")
    TILED.launch(a, a, out, False, 0)
    with CUDATimer() as timer:
        TILED.launch(a, a, out, False, 0)
    assert 1e-4 < timer.seconds < 1
