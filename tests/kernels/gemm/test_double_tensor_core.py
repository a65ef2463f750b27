"""float64 and complex128 on the tensor cores: bank conflicts by arithmetic, compilation, and on a GPU the
answers."""

from __future__ import annotations

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
from tilewright.kernels.gemm.cores import skinny_launch
from tilewright.kernels.gemm.tensor import double_mma, double_mma_launch
from tilewright.kernels.gemm.tensor import double_tensor_core as module
from tilewright.kernels.gpu.device_array import strided_view
from tilewright.kernels.gpu.device_choice import SIMULATOR

if SIMULATOR:
    pytest.skip("the simulator has no tensor cores", allow_module_level=True)

TILES = [(1, tile) for tile in (*module.REAL_TILES, module.SHORT_TILE)]
TILES += [(2, tile) for tile in module.COMPLEX_TILES]
TILES += [
    (1, skinny_launch.tensor_tile(1, m, n)) for m in (skinny_launch.SHORT_ROWS, 10**6) for n in (16, 32, 64)
]
DTYPES = ["float64", "complex128"]


@pytest.mark.parametrize(("parts", "tile"), TILES)
@pytest.mark.parametrize("along_k", [True, False])
@pytest.mark.parametrize("which", ["a", "b"])
def test_fragment_loads_are_free_of_bank_conflicts(
    parts: int, tile: double_mma.Tile, along_k: bool, which: str
) -> None:
    extent = tile.m if which == "a" else tile.n
    side = double_mma._Side(extent, tile.depth, parts, along_k, tile.threads)
    mask, factor = side.swizzle
    for k in range(0, tile.depth, double_mma.LANE_K):
        for origin in range(0, extent, double_mma.HALF_M):
            for half_warp in range(2):
                places = set()
                for lane in range(16 * half_warp, 16 * half_warp + 16):
                    g, t = lane >> 2, lane & 3
                    if along_k:
                        line, place = origin + g, k + t
                    else:
                        line, place = divmod(k + t, parts)[0], (origin + g) * parts + (k + t) % parts
                    places.add(
                        (line * side.pitch + (place ^ ((line & mask) * factor))) % double_mma.BANK_LINE
                    )
                assert len(places) == 16


@pytest.mark.parametrize(("parts", "tile"), TILES)
@pytest.mark.parametrize("along_k", [True, False])
def test_swizzle_keeps_chunks_whole_and_lines_apart(parts: int, tile: double_mma.Tile, along_k: bool) -> None:
    side = double_mma._Side(tile.m, tile.depth, parts, along_k, tile.threads)
    mask, factor = side.swizzle
    assert factor % double_mma.CHUNK == 0
    stored = {
        line * side.pitch + (place ^ ((line & mask) * factor))
        for line in range(side.lines)
        for place in range(side.pitch)
    }
    assert stored == set(range(side.size))
    assert side.size == tile.m * tile.depth


def test_a_tile_that_breaks_the_rules_is_refused() -> None:
    layout = double_mma.Layout(1, True, False, True, True, True, True)
    tile = double_mma.Tile(m=128, n=128, depth=16, warps=(2, 4), step=16, stages=4)
    with pytest.raises(AssertionError, match="alternate"):
        double_mma.kernel_function(tile, layout)
    with pytest.raises(AssertionError, match="swizzle"):
        double_mma.kernel_function(
            double_mma.Tile(m=64, n=32, depth=16, warps=(1, 4), step=8, stages=4), layout
        )


TINY = {
    1: double_mma.Tile(m=32, n=32, depth=16, warps=(1, 2), step=8, stages=3, band=1),
    2: double_mma.Tile(m=32, n=32, depth=16, warps=(2, 1), step=4, stages=4, band=2),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("late", "a_along_k", "b_along_k"),
    [
        (True, True, False),
        (False, True, False),
        (True, True, True),
        (True, False, False),
        (True, False, True),
    ],
)
@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        (1, True),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
def test_lane_by_lane(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    late: bool,
    parts: int,
    a_along_k: bool,
    b_along_k: bool,
    whole: bool,
) -> None:
    """The kernel in Python: k dealt out to two blocks, round the ring of stages, ragged edges, accumulated."""
    m, n, k = (36, 18, 134) if whole else (35, 17, 131)
    dtype, tile = DTYPES[parts - 1], TINY[parts]
    a, b = naive.numbers(rng, (m, k), dtype), naive.numbers(rng, (k, n), dtype)
    a = np.asarray(a, order="C" if a_along_k else "F")
    b = np.asarray(b, order="F" if b_along_k else "C")
    c = naive.numbers(rng, (2, m, n), dtype)
    before = c.copy()
    lane_by_lane.stand_ins(monkeypatch, double_mma, np.float64)
    layout = double_mma.Layout(parts, a_along_k, b_along_k, whole, whole, whole, True, dealt=True)
    arguments = (
        a.ctypes.data,
        max(a.strides) // double_mma.ITEM,
        b.ctypes.data,
        max(b.strides) // double_mma.ITEM,
        c.ctypes.data,
        n * parts,
        m * n * parts,
        m,
        n,
        k,
        True,
        False,
    )
    kernel = double_mma.kernel_function(tile, layout)
    shared_nbytes = tile.shared_nbytes(parts)
    lane_by_lane.run(
        kernel, (2, 2), tile.threads, shared_nbytes, np.float64, arguments, late, readable=(a, b)
    )
    slabs = np.arange(k) // (tile.depth // parts)
    for part in range(2):
        rows = slabs % 2 == part
        naive.assert_product(c[part], a[:, rows], b[rows], added_to=before[part])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("parts", "splits", "k", "a_along_k", "b_along_k"),
    [(1, 5, 40, True, False), (1, 3, 0, True, True), (1, 3, 97, False, True), (2, 3, 29, False, True)],
)
def test_whoever_is_dealt_nothing_of_k_writes_zeros(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    parts: int,
    splits: int,
    k: int,
    a_along_k: bool,
    b_along_k: bool,
) -> None:
    """Fewer slabs than blocks that share k, none at all, and numbers of slabs that the blocks do not divide."""
    m, n = 19, 7
    dtype, tile = DTYPES[parts - 1], TINY[parts]
    a, b = naive.numbers(rng, (m, k), dtype), naive.numbers(rng, (k, n), dtype)
    a = np.asarray(a, order="C" if a_along_k else "F")
    b = np.asarray(b, order="F" if b_along_k else "C")
    c = np.full((splits, m, n), np.nan, dtype)
    lane_by_lane.stand_ins(monkeypatch, double_mma, np.float64)
    layout = double_mma.Layout(parts, a_along_k, b_along_k, False, False, False, True, dealt=True)
    pitches = (k if a_along_k else m) * parts, (k if b_along_k else n) * parts
    places = a.ctypes.data, pitches[0], b.ctypes.data, pitches[1], c.ctypes.data, n * parts, m * n * parts
    kernel, shared_nbytes = double_mma.kernel_function(tile, layout), tile.shared_nbytes(parts)
    arguments = (*places, m, n, k, False, False)
    lane_by_lane.run(
        kernel, (1, splits), tile.threads, shared_nbytes, np.float64, arguments, True, readable=(a, b)
    )
    slabs = np.arange(k) // (tile.depth // parts)
    for part in range(splits):
        rows = slabs % splits == part
        naive.assert_product(c[part], a[:, rows], b[rows])


@pytest.mark.more
@pytest.mark.parametrize("variant", sampled(list(module.variants()), 80))
def test_compiles_without_spills(variant: Variant, tmp_path: Path) -> None:
    major, minor = variant.minimum
    text, _ = cuda.compile_ptx(
        variant.function, variant.signature.args, cc=variant.minimum, **variant.options
    )
    assert ("m16n8k" in text) == (variant.minimum >= double_mma_launch.NATIVE)
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
    a = np.zeros((8, 6))
    b = np.zeros((6, 4))
    assert module.supports(problem(a, b))
    assert module.supports(problem(a, b, (8, 0)))
    assert module.supports(problem(b.T, a.T))
    assert module.supports(problem(a, b, aligned=8))
    assert module.supports(problem(a[:, :1], b[:1, :]))
    assert not module.supports(problem(a, b, None))
    assert not module.supports(problem(a, b, (8, 6)))
    assert not module.supports(problem(np.zeros((8, 12))[:, ::2], b))
    assert not module.supports(problem(a.astype(np.float32), b.astype(np.float32)))
    assert not module.supports(problem(a.astype(np.complex128), b))
    complex_a, complex_b = a.astype(np.complex128), b.astype(np.complex128)
    assert module.supports(problem(complex_a, complex_b))
    assert not module.supports(problem(complex_a, complex_b, aligned=8))


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
    return naive.LAYOUTS[layout](np.full((m, n), np.nan, dtype))


SHAPES = [
    (1, 1, 1),
    (1, 300, 17),
    (300, 1, 15),
    (64, 64, 16),
    (63, 65, 33),
    (65, 63, 31),
    (127, 129, 7),
    (129, 127, 200),
    (256, 128, 64),
    (200, 333, 1),
]


LAYOUTS = ["rows", "columns", "padded rows", "padded columns", "offset"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout_a", LAYOUTS)
@pytest.mark.parametrize("layout_b", LAYOUTS)
def test_shapes_and_layouts(rng: np.random.Generator, dtype: str, layout_a: str, layout_b: str) -> None:
    for number, (m, n, k) in enumerate(SHAPES):
        a = naive.LAYOUTS[layout_a](naive.numbers(rng, (m, k), dtype))
        b = naive.LAYOUTS[layout_b](naive.numbers(rng, (k, n), dtype))
        c = poison(m, n, dtype, LAYOUTS[number % len(LAYOUTS)])
        naive.assert_product(product(module.launch, a, b, c), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize(("parts", "tile"), TILES)
def test_every_tile(rng: np.random.Generator, parts: int, tile: double_mma.Tile) -> None:
    dtype = DTYPES[parts - 1]
    for m, n, k in [(tile.m + 1, 3 * tile.n - 1, 5 * tile.depth + 3), (9 * tile.m, tile.n, tile.depth)]:
        a, b = naive.numbers(rng, (m, k), dtype), naive.numbers(rng, (k, n), dtype)

        def enqueue(a: Any, b: Any, c: Any, accumulate: bool, stream: Any) -> None:
            double_mma_launch.enqueue_tile(*map(module.matrix, (a, b, c)), accumulate, stream, tile)

        naive.assert_product(product(enqueue, a, b, poison(m, n, dtype)), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_accumulates(rng: np.random.Generator, dtype: str, layout: str) -> None:
    m, n, k = 130, 70, 45
    a, b, c = (naive.numbers(rng, shape, dtype) for shape in ((m, k), (k, n), (m, n)))
    found = product(module.launch, a, b, naive.LAYOUTS[layout](c), accumulate=True)
    naive.assert_product(found, a, b, added_to=c)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_every_time(rng: np.random.Generator, dtype: str) -> None:
    a, b = naive.numbers(rng, (257, 1000), dtype), naive.numbers(rng, (1000, 259), dtype)
    answers = {product(module.launch, a, b, poison(257, 259, dtype)).tobytes() for _ in range(5)}
    assert len(answers) == 1


@pytest.mark.gpu
def test_nan_infinity_signed_zero_and_denormals_as_numpy() -> None:
    a = np.zeros((70, 35))
    b = np.ones((35, 66))
    a[0, 0], a[1, 2], a[2, 4], a[3, 5] = np.nan, np.inf, -np.inf, 5e-324
    a[4, 0], a[4, 1] = np.inf, -np.inf
    a[5, 0], b[0, 65] = np.inf, 0.0
    a[6, :] = -0.0
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(product(module.launch, a, b, poison(70, 66, "f8")), a @ b)


@pytest.mark.gpu
def test_complex_infinity_as_its_four_products() -> None:
    a = np.full((3, 3), 1 + 2j)
    b = np.full((3, 5), 3 - 1j)
    a[1, 1] = complex(np.inf, 0)
    b[2, 3] = complex(0, np.nan)
    found = product(module.launch, a, b, np.zeros((3, 5), np.complex128))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(found.real, a.real @ b.real - a.imag @ b.imag)
        np.testing.assert_array_equal(found.imag, a.real @ b.imag + a.imag @ b.real)


@pytest.mark.gpu
@pytest.mark.slow
def test_operands_of_more_than_2_to_the_31_elements(rng: np.random.Generator) -> None:
    """A of 2^31 + 2^20 elements: its last rows come out right only with 64-bit addresses."""
    m, k, rows = 2**20 + 512, 2048, 512
    tail, b = rng.standard_normal((rows, k)), rng.standard_normal((k, 16))
    a, c = cuda.device_array((m, k), np.float64), cuda.device_array((m, 16), np.float64)
    offset = (m - rows) * k
    assert offset > 2**31 - 2**20
    assert offset + rows * k > 2**31
    strided_view(a, (m * k,), (8,))[offset:].copy_to_device(tail.reshape(-1))
    module.launch(a, cuda.to_device(b), c, False, 0)
    naive.assert_product(c[m - rows :].copy_to_host(), tail, b)
