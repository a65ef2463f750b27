"""Products with a thin side: the table of tiles, compilation, and on a GPU the answers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cuda

from tilewright.kernels.gemm import skinny as module
from tilewright.kernels.gemm.base import Operand, Problem, Variant
from tilewright.kernels.launch import SIMULATOR, address, strided_view, transposed

if SIMULATOR:
    pytest.skip("the kernel copies asynchronously, which the simulator cannot", allow_module_level=True)

DTYPES = [dtype.name for dtype in module.DTYPES]
SHARED_NBYTES = 227 * 1024
"""What a block may have on Hopper, and 163 KiB on Ampere: every tile fits both."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("a_along_k", [True, False])
@pytest.mark.parametrize("m", [1, 64, 65, 10**6])
def test_every_width_has_a_tile_that_fits(dtype: str, a_along_k: bool, m: int) -> None:
    for n in range(1, module.WIDEST + 1):
        tile = module.choose_tile(np.dtype(dtype), m, n, a_along_k)
        shape = module._Shape(tile, module.Layout(dtype, a_along_k, True, True))
        shape.check()
        assert n <= tile.n < 2 * n
        assert tile.threads <= module.MAX_THREADS
        assert shape.shared_nbytes <= 163 * 1024


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 4, 16, 64])
def test_loads_of_a_are_free_of_bank_conflicts(dtype: str, n: int) -> None:
    tile = module.choose_tile(np.dtype(dtype), 1000, n, True)
    shape = module._Shape(tile, module.Layout(dtype, True, True, True))
    for q in range(module.LINE_CHUNKS):
        for first in range(0, tile.threads_down - 7, 8):
            # A quarter of a warp reads 16 bytes each: chunk q of eight rows.
            places = {
                (x * shape.a_chunks + (q ^ (x % module.LINE_CHUNKS))) % module.LINE_CHUNKS
                for x in range(first, first + 8)
            }
            assert len(places) == module.LINE_CHUNKS


def test_splits_fill_the_gpu_but_keep_ranges_long() -> None:
    assert module.choose_splits(blocks=10_000, depths=500, multiprocessors=132) == 1
    assert module.choose_splits(blocks=1, depths=10**6, multiprocessors=132) == module.WAVES * 132
    assert module.choose_splits(blocks=1, depths=20, multiprocessors=132) == 20 // module.MIN_STAGES
    assert module.choose_splits(blocks=1, depths=1, multiprocessors=132) == 1
    assert module.choose_splits(blocks=1, depths=10**9, multiprocessors=1000) == module.MAX_SPLITS


VARIANTS = list(module.variants())


@pytest.mark.parametrize("variant", VARIANTS, ids=[variant.name for variant in VARIANTS])
def test_compiles_without_spills(variant: Variant, tmp_path: Path) -> None:
    major, minor = variant.minimum
    text, _ = cuda.compile_ptx(
        variant.function, variant.signature.args, cc=variant.minimum, **variant.options
    )
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
    a, b = np.zeros((300, 100), np.float32), np.zeros((100, 64), np.float32)
    assert module.supports(problem(a, b))
    assert module.supports(problem(b.T, a.T))
    assert module.supports(problem(a, b, aligned=4))
    assert module.supports(problem(a, np.zeros((100, 128), np.float32)[:, ::2]))
    assert not module.supports(problem(a, np.zeros((100, 65), np.float32)))
    assert not module.supports(problem(np.zeros((300, 200), np.float32)[:, ::2], b))
    assert not module.supports(problem(a, b, None))
    assert not module.supports(problem(a, b, (7, 5)))
    assert not module.supports(problem(a.astype(np.int32), b.astype(np.int32)))
    assert not module.supports(problem(a.astype(np.complex128), b.astype(np.complex128), aligned=8))


def random(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    values = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


def on_device(host: np.ndarray, *, by_columns: bool = False, padding: int = 0) -> Any:
    """A device copy by rows or by columns; the ``padding`` elements between its lines are NaN."""
    source = host.T if by_columns else host
    lines, length = source.shape
    padded = np.full((lines, length + padding), np.nan, host.dtype)
    padded[:, :length] = source
    array = cuda.to_device(padded)
    view = strided_view(array, source.shape, array.strides)
    return transposed(view) if by_columns else view


def read(array: Any) -> np.ndarray:
    """The host copy of a device view of any strides."""
    if array.strides[1] != array.dtype.itemsize:
        return read(transposed(array)).T
    rows, columns = array.shape
    length = (rows - 1) * array.strides[0] // array.dtype.itemsize + columns
    flat = strided_view(array, (length,), (array.dtype.itemsize,)).copy_to_host()
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), array.strides).copy()


def assert_product(found: np.ndarray, a: np.ndarray, b: np.ndarray, before: np.ndarray | None = None) -> None:
    """Each element within the bound of a sum of k products: (2 k + 4) eps times the sum of absolute
    values."""
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    exact = a.astype(wide) @ b.astype(wide)
    scale = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    if before is not None:
        exact = exact + before
        scale = scale + np.abs(before)
    bound = (2 * a.shape[1] + 4) * np.finfo(a.dtype).eps * scale
    assert np.isfinite(found).all()
    assert (np.abs(found - exact) <= bound).all()


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("padding", [0, 1])
def test_shapes_and_layouts(rng: np.random.Generator, dtype: str, by_columns: bool, padding: int) -> None:
    for number, (m, n, k) in enumerate(SHAPES):
        a, b = random(rng, (m, k), dtype), random(rng, (k, n), dtype)
        out = on_device(np.full((m, n), np.nan, dtype), by_columns=number % 2 == 1, padding=padding)
        module.launch(
            on_device(a, by_columns=by_columns, padding=padding),
            on_device(b, by_columns=by_columns != (number % 3 == 0), padding=padding),
            out,
            False,
            0,
        )
        assert_product(read(out), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(500, 5, 300), (20, 30, 9000), (700, 40, 64)])
def test_accumulates(rng: np.random.Generator, dtype: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b, before = random(rng, (m, k), dtype), random(rng, (k, n), dtype), random(rng, (m, n), dtype)
    out = on_device(before, padding=2)
    module.launch(on_device(a), on_device(b), out, True, 0)
    assert_product(read(out), a, b, before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thin_operand_of_any_strides(rng: np.random.Generator, dtype: str) -> None:
    a, wide = random(rng, (400, 130), dtype), random(rng, (260, 12), dtype)
    device = cuda.to_device(wide)
    thin = strided_view(device, (130, 4), (2 * device.strides[0], 3 * device.strides[1]))
    out = on_device(np.full((400, 4), np.nan, dtype))
    module.launch(on_device(a), thin, out, False, 0)
    assert_product(read(out), a, wide[::2, ::3])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 10**6), (64, 64, 10**5)])
def test_the_same_bits_every_time(rng: np.random.Generator, dtype: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = on_device(random(rng, (m, k), dtype)), on_device(random(rng, (k, n), dtype))
    answers = set()
    for _ in range(5):
        out = on_device(np.full((m, n), np.nan, dtype))
        module.launch(a, b, out, False, 0)
        answers.add(read(out).tobytes())
    assert len(answers) == 1


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
    out = on_device(np.full((70, n), 7.0, dtype))
    module.launch(on_device(a), on_device(b), out, False, 0)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(read(out), a @ b)


@pytest.mark.gpu
def test_two_streams_keep_their_partial_products_apart(rng: np.random.Generator) -> None:
    """The workspace of a stream is its own: products cut along k on two streams at once do not mix."""
    a, b = random(rng, (64, 200_000), "float32"), random(rng, (200_000, 64), "float32")
    device_a, device_b = on_device(a), on_device(b)
    outs = [on_device(np.full((64, 64), np.nan, np.float32)) for _ in range(2)]
    streams = [cuda.stream() for _ in range(2)]
    operands = [(device_a, device_b), (transposed(device_b), transposed(device_a))]
    cuda.synchronize()
    for _ in range(10):
        for stream, out, (left, right) in zip(streams, outs, operands, strict=True):
            module.launch(left, right, out, False, stream)
    cuda.synchronize()
    assert_product(read(outs[0]), a, b)
    np.testing.assert_array_equal(read(outs[0]), read(outs[1]).T)


@pytest.mark.gpu
def test_elements_that_are_not_aligned_to_chunks(rng: np.random.Generator) -> None:
    host = random(rng, (1, 3 * 1001 + 1), "float32")
    array = cuda.to_device(host)
    a = strided_view(array, (3, 1001), (4 * 1001, 4))
    shifted = strided_view(array[:, 1:], (3, 1001), (4 * 1001, 4))
    assert address(shifted) % 16 == 4
    x = random(rng, (1001, 1), "float32")
    for view, values in ((a, host[0, :-1]), (shifted, host[0, 1:])):
        out = on_device(np.full((3, 1), np.nan, np.float32))
        module.launch(view, on_device(x), out, False, 0)
        assert_product(read(out), values.reshape(3, 1001), x)
