"""Products with a thin side: the table of tiles, compilation, and on a GPU the answers."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cuda

from tests.kernels import naive
from tests.kernels.gemm import lane_by_lane
from tests.kernels.gemm.machine_code import assemble, assert_no_spills, sampled
from tilewright.kernels.gemm.base import Operand, Problem, Variant
from tilewright.kernels.gemm.cores import partial_sums, register_arithmetic, skinny
from tilewright.kernels.gemm.cores import skinny_launch as module
from tilewright.kernels.gemm.cores.repitch import Matrix
from tilewright.kernels.gpu.device_array import transposed
from tilewright.kernels.gpu.device_choice import SIMULATOR

if SIMULATOR:
    pytest.skip("the kernel copies asynchronously, which the simulator cannot", allow_module_level=True)

DTYPES = [dtype.name for dtype in module.DTYPES]
STORED = [*DTYPES, "int32", "int64"]
"""As arrays come; signed integers are multiplied as unsigned ones."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("a_along_k", [True, False])
@pytest.mark.parametrize("m", [1, 64, 65, 10**6])
def test_every_width_has_a_tile_that_fits(dtype: str, a_along_k: bool, m: int) -> None:
    for n in range(1, module.WIDEST + 1):
        tile = module.choose_tile(np.dtype(dtype), m, n, a_along_k)
        shape = skinny._Shape(tile, skinny.Layout(dtype, a_along_k, True, True))
        shape.check()
        assert n <= tile.n < 2 * n
        assert tile.threads <= module.MAX_THREADS
        assert shape.shared_nbytes <= 163 * 1024


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 4, 16, 64])
def test_loads_of_a_are_free_of_bank_conflicts(dtype: str, n: int) -> None:
    tile = module.choose_tile(np.dtype(dtype), 1000, n, True)
    shape = skinny._Shape(tile, skinny.Layout(dtype, True, True, True))
    for q in range(skinny.LINE_CHUNKS):
        for first in range(0, tile.threads_down - 7, 8):
            # A quarter of a warp reads 16 bytes each: chunk q of eight rows.
            places = {
                (x * shape.a_chunks + (q ^ (x % skinny.LINE_CHUNKS))) % skinny.LINE_CHUNKS
                for x in range(first, first + 8)
            }
            assert len(places) == skinny.LINE_CHUNKS


def test_splits_fill_the_gpu_but_keep_ranges_long() -> None:
    small, slots = 1024, 264
    assert module.choose_splits(10_000, 500, slots, small) == 1
    assert module.choose_splits(64, 512, slots, small) == 4, "256 blocks in one wave, not 576 in three"
    assert module.choose_splits(1, 10**6, slots, small) == slots
    assert module.choose_splits(1, 1, slots, small) == 1
    assert module.choose_splits(1, 10**6, slots, module.MAX_PARTIAL_NBYTES // 5) == 5


def host_matrix(array: np.ndarray) -> Matrix:
    return Matrix(array.ctypes.data, array.shape, array.strides, array.dtype)  # type: ignore[arg-type]


def host_view(matrix: Matrix) -> np.ndarray:
    nbytes = sum((side - 1) * step for side, step in zip(matrix.shape, matrix.strides, strict=True))
    memory = (ctypes.c_char * (nbytes + matrix.dtype.itemsize)).from_address(matrix.pointer)
    return np.ndarray(matrix.shape, matrix.dtype, memory, 0, matrix.strides)


SHAPES = [
    (68, 1, 100, "rows"),
    (3, 70, 41, "columns"),
    (16, 16, 300, "columns"),
    (65, 5, 64, "offset"),
    (1, 37, 1029, "offset"),
    (17, 1, 1061, "columns"),
]


def is_slow(shape: tuple[int, int, int, str], dtype: str) -> bool:
    """Wide elements and long sums take tens of seconds: short sums in every dtype, and long ones in the narrowest."""
    if dtype == "complex128":
        return shape[0] != 65
    if dtype.startswith("u"):
        return shape[0] != 3
    return shape[2] > (1050 if dtype == "float32" else 64 if dtype == "complex64" else 250)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("m", "n", "k", "layout", "dtype", "streamed"),
    [
        # In every run the one way and the other by turns.
        pytest.param(
            *shape,
            dtype,
            streamed,
            marks=pytest.mark.slow if is_slow(shape, dtype) or streamed == bool((i + j) % 2) else (),
        )
        for i, shape in enumerate(SHAPES)
        for j, dtype in enumerate(DTYPES)
        for streamed in (False, True)
    ],
)
def test_lane_by_lane(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    m: int,
    n: int,
    k: int,
    layout: str,
    streamed: bool,
) -> None:
    """The whole launch with the kernels in Python, on a device of three multiprocessors: ranges of k, their sum,
    ragged edges, both thin sides, ordinary and tensor cores."""
    monkeypatch.setattr(module.matvec, "preferred", lambda *_: streamed)
    a, b, c = (naive.numbers(rng, sides, dtype) for sides in ((m, k), (k, n), (m, n)))
    if np.dtype(dtype).kind == "u":  # NumPy warns of scalars that wrap; on a GPU all of them are used
        a, b, c = (array >> np.dtype(dtype).type(21 if dtype == "uint32" else 42) for array in (a, b, c))
    a, b = naive.LAYOUTS[layout](a), naive.LAYOUTS["rows"](b)
    launched, _ = multiply_lane_by_lane(monkeypatch, a, b, naive.LAYOUTS["padded rows"](c))
    if k == 300:
        assert len(launched) == 2, "k is cut, and the ranges are added up"


def multiply_lane_by_lane(
    monkeypatch: pytest.MonkeyPatch, a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> tuple[list[str], list[int]]:
    """Add the product to ``c``, and check it. Returns the kernels' names in their order, and the bytes borrowed."""
    real = a.dtype.type(0).real.dtype
    added = object()
    launched, borrowed = [], []
    scratch = np.full(2**20, np.nan)  # for integers this is a large number

    def enqueue(kernel: Any, grid: Any, threads: int, _: Any, nbytes: int, *arguments: Any) -> None:
        if kernel is added:
            launched.append("sum")
            partial, target, splits, accumulate = arguments
            total = host_view(partial).reshape(splits, *target.shape).sum(axis=0)
            host_view(target)[...] = total + host_view(target) if accumulate else total
        else:
            launched.append(kernel.__name__)
            lane_by_lane.run(kernel, grid, threads, nbytes, real, arguments, late=True, readable=(a, b))

    def borrow(nbytes: int, _: Any) -> Any:
        borrowed.append(nbytes)
        scratch[...] = np.nan
        return contextlib.nullcontext(scratch.ctypes.data)

    for target in (skinny, module.tensor, module.matvec):
        lane_by_lane.stand_ins(monkeypatch, target, real)
        monkeypatch.setattr(target, "compiled", target.kernel_function)
    monkeypatch.setattr(module.tensor_launch, "compiled", module.tensor.kernel_function)
    monkeypatch.setattr(register_arithmetic, "inlined", lambda function: function)
    for target in (module, module.tensor_launch, partial_sums):
        monkeypatch.setattr(target, "enqueue", enqueue)
    for target in (module, module.tensor_launch):
        monkeypatch.setattr(target, "current_device", lambda: 0)
        monkeypatch.setattr(target, "capability", lambda _: (9, 0))
    monkeypatch.setattr(module, "multiprocessors", lambda _: 3)
    monkeypatch.setattr(partial_sums, "_sum_kernel", lambda _: added)
    monkeypatch.setattr(partial_sums, "_shared_sum_kernel", lambda _: added)
    monkeypatch.setattr(module, "borrowed", borrow)
    module._cut.cache_clear()
    before = c.copy()
    module.launch(*(host_matrix(array) for array in (a, b, c)), True, 0)
    naive.assert_product(c, a, b, added_to=before)
    naive.assert_surroundings_kept(c)
    return launched, borrowed


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("m", "n", "k", "layout", "most_nbytes", "borrows", "dtype"),
    [
        # In every run the one dtype, the cheaper one where sums are long.
        pytest.param(*case, dtype, marks=() if dtype == quick else pytest.mark.slow)
        for *case, quick in [
            (5, 70, 20, "rows", 2**20, 0, "float64"),
            (70, 20, 9, "columns", 2**20, 0, "float64"),
            (33, 40, 5, "padded rows", 2**20, 0, "complex128"),
            (17, 66, 3, "offset", 2**20, 0, "complex128"),
            (4, 18, 200, "rows", 2**20, 1, "float64"),  # k is cut
            (4, 50, 7, "strided", 1500, 2, "float64"),
            (50, 4, 7, "strided", 1500, 2, "complex128"),
        ]
        for dtype in ("float64", "complex128")
    ],
)
def test_c_is_written_where_it_lies(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    m: int,
    n: int,
    k: int,
    layout: str,
    most_nbytes: int,
    borrows: int,
) -> None:
    """Short, wide and by rows, or tall, narrow and by columns, without scratch memory; of any strides by stretches."""
    if k == 200 or layout == "strided":
        monkeypatch.setattr(module, "FILL_STAGES", 0)
        monkeypatch.setattr(module, "SUM_STAGES", 0)
    monkeypatch.setattr(module, "MAX_PARTIAL_NBYTES", most_nbytes * np.dtype(dtype).itemsize // 8)
    a, b, c = (naive.numbers(rng, sides, dtype) for sides in ((m, k), (k, n), (m, n)))
    launched, borrowed = multiply_lane_by_lane(monkeypatch, a, b, naive.LAYOUTS[layout](c))
    assert len(borrowed) == borrows
    assert launched == (["kernel"] if not borrows else ["kernel", "sum"] * borrows)
    assert all(nbytes <= module.MAX_PARTIAL_NBYTES for nbytes in borrowed)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_turned_tile_walks_k_in_the_same_steps(parts: int) -> None:
    for m, n in ((64, 3), (64, 64), (10**6, 17), (10**6, 64)):
        tile = module.tensor_tile(parts, m, n)
        other = module.turned(tile, parts)
        assert (other.m, other.n) == (tile.n, tile.m)
        assert (other.depth, other.step, other.stages) == (tile.depth, tile.step, tile.stages)
        assert other.threads == tile.threads
        assert other.shared_nbytes(parts) == tile.shared_nbytes(parts)


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("variant", sampled(list(module.variants()), 58))
def test_compiles_without_spills(variant: Variant, tmp_path: Path) -> None:
    major, minor = variant.minimum
    text, _ = cuda.compile_ptx(
        variant.function, variant.signature.args, cc=variant.minimum, **variant.options
    )
    assert ".local" not in text, "an array that should be registers lies in local memory"
    assert_no_spills(assemble(text, f"sm_{major}{minor}", tmp_path))


def operand(array: np.ndarray, aligned: int = 16) -> Operand:
    rows, columns = array.shape
    strides = (array.strides[0] // array.itemsize, array.strides[1] // array.itemsize)
    return Operand(rows, columns, array.dtype, strides, aligned)


def problem(
    a: np.ndarray, b: np.ndarray, capability: tuple[int, int] | None = (9, 0), aligned: int = 16
) -> Problem:
    c = np.empty((a.shape[0], b.shape[1]), a.dtype)
    return Problem(operand(a, aligned), operand(b, aligned), operand(c), False, "full", capability)


def test_supports() -> None:
    a, b = np.zeros((300, 100), np.float32), np.zeros((100, 16), np.float32)
    wide = np.zeros((100, 64), np.float32)
    assert module.supports(problem(a, b))
    assert module.supports(problem(b.T, a.T))
    assert module.supports(problem(a, b, aligned=4))
    assert module.supports(problem(a, np.zeros((100, 32), np.float32)[:, ::2]))
    assert not module.supports(problem(a, wide)), "arithmetic is the limit here, and other tiles are better"
    assert not module.supports(problem(a[:64], wide)), "for a short C too"
    assert module.supports(problem(a[:32], wide[:, :32])), "but not for one that would not fill them"
    assert module.supports(problem(a, wide[:, ::2])), "nor for strides that they do not take"
    assert module.supports(problem(a.astype("f8"), wide.astype("f8")))
    assert not module.supports(problem(a, np.zeros((100, 65), np.float32)))
    assert not module.supports(problem(np.zeros((300, 200), np.float32)[:, ::2], b))
    assert not module.supports(problem(a, b, None))
    assert not module.supports(problem(a, b, (7, 5)))
    for code in ("i4", "u4", "i8", "u8"):
        assert module.supports(problem(a.astype(code), b.astype(code)))
        assert not module.supports(problem(a.astype(code), wide.astype(code))), (
            "there are kernels for more columns"
        )
    assert not module.supports(problem(a.astype("i2"), b.astype("i2")))
    assert not module.supports(problem(a.astype("i4"), b.astype("u4"))), "the result is wider"
    assert not module.supports(problem(a.astype(np.complex128), b.astype(np.complex128), aligned=8))


def test_a_single_column_is_streamed_where_that_was_measured_faster() -> None:
    single, double = np.dtype("f4"), np.dtype("f8")
    assert module.matvec.preferred(single, True, 32767)
    assert not module.matvec.preferred(single, True, 64), "short rows"
    assert module.matvec.preferred(single, False, 64)
    assert not module.matvec.preferred(double, True, 16384)
    assert module.matvec.preferred(double, False, 16384)


def product(
    kernel: Callable[..., None],
    a: np.ndarray,
    b: np.ndarray,
    before: np.ndarray,
    accumulate: bool = False,
    stream: Any = 0,
) -> np.ndarray:
    """``a b`` from device matrices that lie as these do; ``before`` is what C's memory holds until then."""
    (on_a, _), (on_b, _), (on_c, fetch) = (naive.device_twin(array) for array in (a, b, before))
    kernel(on_a, on_b, on_c, accumulate, stream)
    found = fetch()
    naive.assert_surroundings_kept(found)
    return np.array(found)


def poison(m: int, n: int, dtype: str, layout: str = "rows") -> np.ndarray:
    """A matrix for C in which every element that is not written would show."""
    value = np.nan if np.dtype(dtype).kind in "fc" else np.iinfo(dtype).max // 3
    return naive.LAYOUTS[layout](np.full((m, n), value, dtype))


SHAPES = [
    (1, 1, 70_001),
    (3001, 1, 33),
    (1, 701, 302),
    (300, 3, 1000),
    (64, 64, 5000),
    (65, 17, 2049),
    (17, 1500, 64),
    (33, 34, 1),
]


LAYOUTS = ["rows", "columns", "padded rows", "padded columns", "offset"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_and_layouts(rng: np.random.Generator, dtype: str, layout: str) -> None:
    for number, (m, n, k) in enumerate(SHAPES):
        a = naive.LAYOUTS[layout](naive.numbers(rng, (m, k), dtype))
        b = naive.LAYOUTS[LAYOUTS[number % 2]](naive.numbers(rng, (k, n), dtype))
        c = poison(m, n, dtype, LAYOUTS[number % len(LAYOUTS)])
        naive.assert_product(product(module.launch, a, b, c), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("shape", [(500, 5, 300), (20, 30, 9000), (700, 40, 64)])
def test_accumulates(rng: np.random.Generator, dtype: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b, c = (naive.numbers(rng, sides, dtype) for sides in ((m, k), (k, n), (m, n)))
    found = product(module.launch, a, b, naive.LAYOUTS["padded rows"](c), accumulate=True)
    naive.assert_product(found, a, b, added_to=c)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("n", [4, 40])
def test_a_thin_operand_of_any_strides(rng: np.random.Generator, dtype: str, n: int) -> None:
    a, b = naive.numbers(rng, (400, 130), dtype), naive.numbers(rng, (130, n), dtype)
    for layout in ("strided", "backward"):
        found = product(module.launch, a, naive.LAYOUTS[layout](b), poison(400, n, dtype, "strided"))
        naive.assert_product(found, a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("shape", [(1, 1, 10**6), (64, 64, 10**5)])
def test_the_same_bits_every_time(rng: np.random.Generator, dtype: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = naive.numbers(rng, (m, k), dtype), naive.numbers(rng, (k, n), dtype)
    answers = {product(module.launch, a, b, poison(m, n, dtype)).tobytes() for _ in range(5)}
    assert len(answers) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(3, 5000, 77), (16, 40_001, 96), (33, 30_000, 500), (64, 40_000, 130), (40, 30, 9000)]
)
def test_the_same_bits_whichever_way_c_lies(
    rng: np.random.Generator, m: int, n: int, k: int, accumulate: bool
) -> None:
    """C short, wide and by rows is written by other tiles than by columns, and with other strides in stretches."""
    for dtype in ("float64", "complex128"):
        a, b, c = (naive.numbers(rng, sides, dtype) for sides in ((m, k), (k, n), (m, n)))
        found = {
            layout: product(module.launch, a, b, naive.LAYOUTS[layout](c), accumulate=accumulate)
            for layout in ("rows", "columns", "padded rows", "padded columns", "strided")
        }
        exact = a @ b + c * accumulate
        scale = np.abs(a) @ np.abs(b) + np.abs(c) * accumulate
        for layout, answer in found.items():
            assert (np.abs(answer - exact) <= 4 * k * np.finfo("f8").eps * scale).all(), (dtype, layout)
            if dtype == "float64":  # imaginary parts are added up in the order of the left factor's parts
                np.testing.assert_array_equal(answer, found["columns"], strict=True, err_msg=layout)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [2, 20])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nan_infinity_signed_zero_and_denormals_as_numpy(dtype: str, n: int) -> None:
    a = np.zeros((70, 35), dtype)
    b = np.ones((35, n), dtype)
    a[0, 0], a[1, 2], a[2, 4], a[3, 5] = np.nan, np.inf, -np.inf, np.finfo(dtype).smallest_subnormal
    a[4, 0], a[4, 1] = np.inf, -np.inf
    a[5, 0], b[0, n - 1] = np.inf, 0.0
    a[6, :] = -0.0
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(product(module.launch, a, b, poison(70, n, dtype)), a @ b)


@pytest.mark.gpu
def test_two_streams_keep_their_partial_products_apart(rng: np.random.Generator) -> None:
    """The workspace of a stream is its own: products cut along k on two streams at once do not mix."""
    a, b = naive.numbers(rng, (64, 200_000), "f4"), naive.numbers(rng, (200_000, 64), "f4")
    (on_a, _), (on_b, _) = naive.device_twin(a), naive.device_twin(b)
    (on_c, fetch_c), (on_d, fetch_d) = (naive.device_twin(poison(64, 64, "f4")) for _ in range(2))
    one, other = cuda.stream(), cuda.stream()
    cuda.synchronize()
    for _ in range(10):
        module.launch(on_a, on_b, on_c, False, one)
        module.launch(transposed(on_b), transposed(on_a), on_d, False, other)
    cuda.synchronize()
    naive.assert_product(fetch_c(), a, b)
    naive.assert_product(fetch_d(), b.T, a.T)
