"""Clearing what lies outside a band, in the simulator and on a GPU; and the kernel as machine code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numba import cuda

from tests.kernels.gemm.machine_code import assemble, assert_no_spills
from tests.kernels.passes.test_transpose import DTYPES, bits, device_region, on_gpu, random_bits
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.passes import band_device


@pytest.mark.sample(6)
@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 40), (33, 32), (45, 70)])
@pytest.mark.parametrize("offsets", [(-3, 3), (0, 0), (5, 60), (-60, -40)])
def test_the_gpu_clears_what_lies_outside(
    shape: tuple[int, int], offsets: tuple[int, int], dtype: str
) -> None:
    """Of a matrix that is cut from a larger one, of which nothing else is written."""
    rows, columns = shape
    whole = random_bits((rows + 3, columns + 5), dtype)
    device = cuda.to_device(whole)
    part = slice(2, 2 + rows), slice(4, 4 + columns)
    band_device.clear_outside(device_region(device, *part), *offsets, 0)
    i, j = np.indices(shape)
    whole[part][(j - i < offsets[0]) | (j - i > offsets[1])] = 0
    assert bits(device.copy_to_host()) == bits(whole)


@on_gpu
def test_nothing_is_launched_for_an_empty_matrix() -> None:
    band_device.clear_outside(cuda.to_device(np.empty((0, 3), "f4")), 0, 0, 0)


@pytest.mark.sample(2)
@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("target", [(8, 0), (9, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_compiles_without_spilling(dtype: str, target: tuple[int, int], tmp_path: Path) -> None:
    (variant,) = band_device.variants([np.dtype(dtype)])
    text, _ = cuda.compile_ptx(variant.function, variant.signature, cc=target)
    assert_no_spills(assemble(text, f"sm_{target[0]}{target[1]}", tmp_path))
