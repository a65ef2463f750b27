"""float64 and complex128 on the tensor cores: bank conflicts by arithmetic, compilation, and on a GPU the
answers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cuda

from tilewright.kernels.gemm import double_tensor_core as module
from tilewright.kernels.gemm.base import Operand, Problem, Variant
from tilewright.kernels.launch import SIMULATOR, address, alignment, strided_view, transposed

if SIMULATOR:
    pytest.skip("the simulator has no tensor cores", allow_module_level=True)

TILES = [(1, tile) for tile in module.REAL_TILES] + [(2, tile) for tile in module.COMPLEX_TILES]
DTYPES = ["float64", "complex128"]
SMALL = {"float64": module.REAL_TILES[-1], "complex128": module.COMPLEX_TILES[-1]}


@pytest.mark.parametrize(("parts", "tile"), TILES)
@pytest.mark.parametrize("along_k", [True, False])
@pytest.mark.parametrize("which", ["a", "b"])
def test_fragment_loads_are_free_of_bank_conflicts(
    parts: int, tile: module.Tile, along_k: bool, which: str
) -> None:
    extent = tile.m if which == "a" else tile.n
    side = module._Side(extent, tile.depth, parts, along_k, tile.threads)
    mask, factor = side.swizzle
    for k in range(0, tile.depth, module.LANE_K):
        for origin in range(0, extent, module.HALF_M):
            for half_warp in range(2):
                places = set()
                for lane in range(16 * half_warp, 16 * half_warp + 16):
                    g, t = lane >> 2, lane & 3
                    if along_k:
                        line, place = origin + g, k + t
                    else:
                        line, place = divmod(k + t, parts)[0], (origin + g) * parts + (k + t) % parts
                    places.add((line * side.pitch + (place ^ ((line & mask) * factor))) % module.BANK_LINE)
                assert len(places) == 16


@pytest.mark.parametrize(("parts", "tile"), TILES)
@pytest.mark.parametrize("along_k", [True, False])
def test_swizzle_keeps_chunks_whole_and_lines_apart(parts: int, tile: module.Tile, along_k: bool) -> None:
    side = module._Side(tile.m, tile.depth, parts, along_k, tile.threads)
    mask, factor = side.swizzle
    assert factor % module.CHUNK == 0
    stored = {
        line * side.pitch + (place ^ ((line & mask) * factor))
        for line in range(side.lines)
        for place in range(side.pitch)
    }
    assert stored == set(range(side.size))
    assert side.size == tile.m * tile.depth


def test_a_tile_that_breaks_the_rules_is_refused() -> None:
    layout = module.Layout(1, True, False, True, True, True, True)
    tile = module.Tile(m=128, n=128, depth=16, warps=(2, 4), step=16, stages=4)
    with pytest.raises(AssertionError, match="alternate"):
        module.kernel_function(tile, layout)
    with pytest.raises(AssertionError, match="swizzle"):
        module.kernel_function(module.Tile(m=64, n=32, depth=16, warps=(1, 4), step=8, stages=4), layout)


VARIANTS = list(module.variants())


@pytest.mark.parametrize("variant", VARIANTS, ids=[variant.name for variant in VARIANTS])
def test_compiles_without_spills(variant: Variant, tmp_path: Path) -> None:
    major, minor = variant.minimum
    text, _ = cuda.compile_ptx(
        variant.function, variant.signature.args, cc=variant.minimum, **variant.options
    )
    assert ("m16n8k" in text) == (variant.minimum >= module.NATIVE)
    assert ".local" not in text, "an array that should be registers lies in local memory"
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("ptxas is not installed: the PTX was checked, the registers were not")
    source = tmp_path / "kernel.ptx"
    source.write_text(text)
    report = subprocess.run(
        [ptxas, "-v", f"-arch=sm_{major}{minor}", str(source), "-o", str(tmp_path / "kernel.cubin")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.returncode == 0, report.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in report.stderr, report.stderr


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


def random(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    values = rng.standard_normal(shape)
    if dtype == "complex128":
        return values + 1j * rng.standard_normal(shape)
    return values


def on_device(host: np.ndarray, *, by_columns: bool = False, padding: int = 0, shift: int = 0) -> Any:
    """A device copy by rows or by columns, its lines ``padding`` elements apart, ``shift`` from an aligned
    address.

    What lies between the lines is NaN, which would show in any sum that took it in.
    """
    source = host.T if by_columns else host
    lines, length = source.shape
    flat = np.full(lines * (length + padding) + shift, np.nan, host.dtype)
    view = np.lib.stride_tricks.as_strided(
        flat[shift:], source.shape, ((length + padding) * host.itemsize, host.itemsize)
    )
    view[...] = source
    whole = cuda.to_device(flat)[shift:]
    array = strided_view(whole, view.shape, view.strides)
    return transposed(array) if by_columns else array


def read(array: Any) -> np.ndarray:
    """The host copy of a device view of any strides."""
    if array.strides[1] != array.dtype.itemsize:
        return read(transposed(array)).T
    rows, columns = array.shape
    length = (rows - 1) * array.strides[0] // array.dtype.itemsize + columns
    flat = strided_view(array, (length,), (array.dtype.itemsize,)).copy_to_host()
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), array.strides).copy()


def assert_product(found: np.ndarray, a: np.ndarray, b: np.ndarray, before: np.ndarray | None = None) -> None:
    """Each element within the bound of a sum of k products: (k + 2) eps times the sum of absolute values."""
    exact = a.astype(np.clongdouble) @ b.astype(np.clongdouble)
    scale = np.abs(a) @ np.abs(b)
    if before is not None:
        exact = exact + before
        scale = scale + np.abs(before)
    bound = (2 * a.shape[1] + 4) * np.finfo(np.float64).eps * scale
    assert (np.abs(found - exact) <= bound).all()


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("a_by_columns", [False, True])
@pytest.mark.parametrize("b_by_columns", [False, True])
@pytest.mark.parametrize("padding", [0, 2, 3])
def test_shapes_and_layouts(
    rng: np.random.Generator, dtype: str, a_by_columns: bool, b_by_columns: bool, padding: int
) -> None:
    for m, n, k in SHAPES:
        a, b = random(rng, (m, k), dtype), random(rng, (k, n), dtype)
        out = on_device(np.full((m, n), np.nan, dtype), padding=padding)
        module.launch(
            on_device(a, by_columns=a_by_columns, padding=padding),
            on_device(b, by_columns=b_by_columns, padding=padding),
            out,
            False,
            0,
        )
        assert_product(read(out), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize(("parts", "tile"), TILES)
def test_every_tile(rng: np.random.Generator, parts: int, tile: module.Tile) -> None:
    dtype = DTYPES[parts - 1]
    for m, n, k in [(tile.m + 1, 3 * tile.n - 1, 5 * tile.depth + 3), (9 * tile.m, tile.n, tile.depth)]:
        a, b = random(rng, (m, k), dtype), random(rng, (k, n), dtype)
        out = on_device(np.full((m, n), np.nan, dtype))
        module.enqueue(on_device(a), on_device(b), out, False, 0, tile)
        assert_product(read(out), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulates_and_leaves_the_padding_alone(rng: np.random.Generator, dtype: str) -> None:
    m, n, k = 130, 70, 45
    a, b, before = random(rng, (m, k), dtype), random(rng, (k, n), dtype), random(rng, (m, n), dtype)
    frame = random(rng, (m, n + 4), dtype)
    whole = cuda.to_device(frame)
    inner = strided_view(whole, (m, n), frame.strides)
    for start in (True, False):
        frame[:, :n] = before
        whole.copy_to_device(frame)
        module.launch(on_device(a), on_device(b), inner, start, 0)
        after = whole.copy_to_host()
        assert_product(after[:, :n], a, b, before if start else None)
        assert (after[:, n:] == frame[:, n:]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_column_major_output(rng: np.random.Generator, dtype: str) -> None:
    m, n, k = 100, 37, 64
    a, b = random(rng, (m, k), dtype), random(rng, (k, n), dtype)
    out = on_device(np.full((m, n), np.nan, dtype), by_columns=True)
    module.launch(on_device(a), on_device(b), out, False, 0)
    assert_product(read(out), a, b)


@pytest.mark.gpu
def test_unaligned_operands(rng: np.random.Generator) -> None:
    m, n, k = 70, 90, 50
    a, b = random(rng, (m, k), "float64"), random(rng, (k, n), "float64")
    arrays = [on_device(a, shift=1), on_device(b, shift=1), on_device(np.full((m, n), np.nan), shift=1)]
    assert all(alignment(address(array)) == 8 for array in arrays)
    module.launch(*arrays, False, 0)
    assert_product(read(arrays[2]), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_every_time(rng: np.random.Generator, dtype: str) -> None:
    a, b = on_device(random(rng, (257, 1000), dtype)), on_device(random(rng, (1000, 259), dtype))
    answers = []
    for _ in range(5):
        out = on_device(np.full((257, 259), np.nan, dtype))
        module.launch(a, b, out, False, 0)
        answers.append(read(out).tobytes())
    assert len(set(answers)) == 1


@pytest.mark.gpu
def test_nan_infinity_signed_zero_and_denormals_as_numpy() -> None:
    a = np.zeros((70, 35))
    b = np.ones((35, 66))
    a[0, 0], a[1, 2], a[2, 4], a[3, 5] = np.nan, np.inf, -np.inf, 5e-324
    a[4, 0], a[4, 1] = np.inf, -np.inf
    a[5, 0], b[0, 65] = np.inf, 0.0
    a[6, :] = -0.0
    out = on_device(np.full((70, 66), 7.0))
    module.launch(on_device(a), on_device(b), out, False, 0)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(read(out), a @ b)


@pytest.mark.gpu
def test_complex_infinity_as_its_four_products() -> None:
    a = np.full((3, 3), 1 + 2j)
    b = np.full((3, 5), 3 - 1j)
    a[1, 1] = complex(np.inf, 0)
    b[2, 3] = complex(0, np.nan)
    out = on_device(np.zeros((3, 5), np.complex128))
    module.launch(on_device(a), on_device(b), out, False, 0)
    with np.errstate(invalid="ignore"):
        real = a.real @ b.real - a.imag @ b.imag
        imaginary = a.real @ b.imag + a.imag @ b.real
    found = read(out)
    np.testing.assert_array_equal(found.real, real)
    np.testing.assert_array_equal(found.imag, imaginary)


@pytest.mark.gpu
@pytest.mark.slow
def test_operands_of_more_than_2_to_the_31_elements() -> None:
    """A tall A of 2^31 + 2^20 elements: the last rows come out right only with 64-bit addresses."""
    m, k = 2**20 + 512, 2048
    a = cuda.device_array((m, k), np.float64)
    tail = np.random.default_rng(5).standard_normal((512, k))
    offset = (m - 512) * k
    assert offset + 512 * k > 2**31
    flat = strided_view(a, (m * k,), (8,))
    flat[offset:].copy_to_device(tail.reshape(-1))
    b = np.random.default_rng(6).standard_normal((k, 16))
    out = cuda.device_array((m, 16), np.float64)
    module.launch(a, cuda.to_device(b), out, False, 0)
    assert_product(out[m - 512 :].copy_to_host(), tail, b)
