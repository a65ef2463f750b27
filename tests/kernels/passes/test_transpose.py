"""Transposing in place, on the host, in the simulator and on a GPU, against NumPy; and the kernel as machine code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda

from tests.kernels.gemm.machine_code import assemble, assert_no_spills
from tilewright.kernels.gpu.device_array import DeviceRegion, as_device_array
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.passes import transpose_device, transpose_host

on_gpu = pytest.mark.simulator if SIMULATOR else pytest.mark.gpu
DTYPES = ["i1", "u2", "f4", "i8", "c16"]
"""One of each size of an element."""
SIDES = [1, 2, 31, 32, 33, 64, 77]


def random_bits(shape: tuple[int, int], dtype: str, seed: int = 0) -> np.ndarray:
    """Any bits at all, NaN of every kind among them."""
    rng = np.random.default_rng([seed, *shape])
    return rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@pytest.mark.sample(4)
@pytest.mark.parametrize("device", ["cpu", pytest.param("device", marks=on_gpu)])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("side", [1, 33, 70] if not SIMULATOR else [1, 33])
def test_complex_numbers_become_conjugates(device: str, side: int, swap: bool) -> None:
    """On both sides of a diagonal, which becomes real, or with ``swap`` is turned too; and of two blocks."""
    square, lower, upper = (random_numbers(side, seed) for seed in range(3))
    expected = square.conj().T if swap else np.tril(square, -1) + np.tril(square, -1).conj().T
    if not swap:
        np.fill_diagonal(expected, square.real.diagonal())
    blocks = (upper.conj().T if swap else lower), lower.conj().T
    options: dict[str, Any] = {"swap": swap, "conjugate": True}
    if device == "cpu":
        transpose_host.transpose(square, square, same=True, **options)
        transpose_host.transpose(lower, upper, same=False, **options)
    else:
        places = [cuda.to_device(matrix) for matrix in (square, lower, upper)]
        transpose_device.transpose(places[0], places[0], 0, same=True, **options)
        transpose_device.transpose(places[1], places[2], 0, same=False, **options)
        square, lower, upper = (place.copy_to_host() for place in places)
    np.testing.assert_array_equal(square, expected)
    np.testing.assert_array_equal(lower, blocks[0])
    np.testing.assert_array_equal(upper, blocks[1])


def random_numbers(side: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, side])
    return (rng.standard_normal((side, side)) + 1j * rng.standard_normal((side, side))).astype("c8")


def mirrored(square: np.ndarray, *, swap: bool) -> np.ndarray:
    if swap:
        return square.T
    rows, columns = np.indices(square.shape)
    return np.where(rows >= columns, square, square.T)


@given(
    st.sampled_from(DTYPES),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(1, 20),
    st.tuples(st.booleans(), st.booleans()),
)
def test_the_host_transposes_in_place(
    dtype: str, rows: int, columns: int, side: int, options: tuple[bool, bool]
) -> None:
    """In blocks of so many rows and columns, of matrices that are cut from larger ones."""
    swap, same = options
    columns = rows if same else columns
    whole, other = random_bits((rows + 3, columns + 5), dtype), random_bits((columns, rows + 1), dtype, 1)
    before = whole.copy(), other.copy()
    lower = whole[2 : 2 + rows, 4 : 4 + columns]
    upper = lower if same else other[:, :rows]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transpose_host, "BLOCK_NBYTES", side * side * lower.itemsize)
        transpose_host.transpose(lower, upper, swap=swap, same=same)
    was = before[0][2 : 2 + rows, 4 : 4 + columns]
    if same:
        expected = mirrored(was, swap=swap)
    else:
        expected = before[1][:, :rows].T if swap else was
        assert bits(upper) == bits(was.T)
    assert bits(lower) == bits(expected)
    whole[2 : 2 + rows, 4 : 4 + columns] = was
    other[:, :rows] = before[1][:, :rows]
    assert (bits(whole), bits(other)) == (bits(before[0]), bits(before[1])), "nothing else is written"


@pytest.mark.sample(6)
@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("side", SIDES if not SIMULATOR else [1, 33])
def test_the_gpu_transposes_a_square_in_place(side: int, swap: bool, dtype: str) -> None:
    """Of a buffer with lines that are longer than the square's, and more of them."""
    whole = random_bits((side + 2, side + 3), dtype)
    device = cuda.to_device(whole)
    square = device_region(device, slice(1, side + 1), slice(2, side + 2))
    transpose_device.transpose(square, square, 0, swap=swap, same=True)
    whole[1 : side + 1, 2 : side + 2] = mirrored(whole[1 : side + 1, 2 : side + 2].copy(), swap=swap)
    assert bits(device.copy_to_host()) == bits(whole)


@pytest.mark.sample(6)
@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("shape", [(1, 40), (33, 32), *([] if SIMULATOR else [(45, 70)])])
def test_the_gpu_transposes_two_rectangles(shape: tuple[int, int], swap: bool, dtype: str) -> None:
    rows, columns = shape
    whole = random_bits((rows + columns, rows + columns), dtype)
    device = cuda.to_device(whole)
    low, high = slice(columns, columns + rows), slice(0, columns)
    lower, upper = device_region(device, low, high), device_region(device, high, low)
    transpose_device.transpose(lower, upper, 0, swap=swap, same=False)
    was = whole.copy()
    whole[high, low] = was[low, high].T
    if swap:
        whole[low, high] = was[high, low].T
    assert bits(device.copy_to_host()) == bits(whole)


def device_region(device: Any, rows: slice, columns: slice) -> Any:
    return device[rows, columns] if SIMULATOR else as_device_array(DeviceRegion(device, rows, columns))


@on_gpu
def test_nothing_is_launched_for_an_empty_matrix() -> None:
    empty = cuda.to_device(np.empty((0, 3), "f4"))
    transpose_device.transpose(empty, empty, 0, swap=True, same=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f4", "c16"])
def test_the_gpu_transposes_more_blocks_than_it_has_multiprocessors(dtype: str) -> None:
    whole = random_bits((2500, 2500), dtype)
    for swap in (True, False):
        device = cuda.to_device(whole)
        transpose_device.transpose(device, device, 0, swap=swap, same=True)
        assert bits(device.copy_to_host()) == bits(mirrored(whole, swap=swap))


@pytest.mark.sample(1)
@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("target", [(8, 0), (9, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_compiles_without_spilling(dtype: str, target: tuple[int, int], tmp_path: Path) -> None:
    (variant,) = transpose_device.variants([np.dtype(dtype)])
    text, _ = cuda.compile_ptx(variant.function, variant.signature, cc=target)
    assert_no_spills(assemble(text, f"sm_{target[0]}{target[1]}", tmp_path))
