"""What a matrix holds: the CPU's look and the kernel's, against NumPy over the whole matrix at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.kernels.gemm.machine_code import assemble, assert_no_spills, sampled
from tilewright.kernels.gemm.base import COMPLEX, FLOATS, INTEGERS
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.passes import contents
from tilewright.kernels.passes.contents import Contents, Sought, contents_of, overflow_of
from tilewright.kernels.passes.masked import Masks

DTYPES = [dtype for dtype in INTEGERS + FLOATS + COMPLEX if dtype.name != "bfloat16"]
ALL = Sought(extent=True, not_finite=True)


def naive(matrix: np.ndarray, masks: Masks | None, overflow: float = np.inf) -> Contents:
    """Element by element, as the words are defined."""
    values = list(matrix.ravel())
    kind = matrix.dtype.kind
    nan = infinite = masked = 0
    for value in values:
        parts = [value.real, value.imag] if kind == "c" else [value]
        if kind in "fc" and any(part != part for part in parts):
            nan += 1
        elif kind in "fc" and any(not abs(float(part)) < overflow for part in parts):
            infinite += 1
        if masks is not None:
            hit = any(value == matrix.dtype.type(mask) for mask in masks.values)
            below = masks.least is not None and bool(value < masks.least)
            above = masks.most is not None and bool(value > masks.most)
            around = None not in (masks.least, masks.most) and masks.least > masks.most
            hit = hit or ((below and above) if around else (below or above))
            masked += hit
    integers = kind in "iu" and values
    return Contents(
        int(min(values)) if integers else None, int(max(values)) if integers else None, nan, infinite, masked
    )


def planted(dtype: np.dtype, shape: tuple[int, int], rng: np.random.Generator) -> tuple[np.ndarray, Masks]:
    """A matrix with extremes, mask values, NaN and infinity here and there."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        matrix = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        around = (9, -9) if dtype.kind == "i" else (int(limits.max) - 9, 9)
        masks = Masks((int(limits.max) - 1, 3), *around)
        if dtype.kind == "i":
            masks = Masks((int(limits.max), int(limits.min)), *around)
        matrix[rng.random(shape) < 0.1] = masks.values[0]
        return matrix, masks
    parts = [rng.standard_normal(shape) for _ in range(2 if dtype.kind == "c" else 1)]
    for part in parts:
        for value in (np.nan, np.inf, -np.inf, 0.5):
            part[rng.random(shape) < 0.05] = value
    matrix = np.empty(shape, dtype)
    matrix.real = parts[0]
    if dtype.kind == "c":
        matrix.imag = parts[1]
        return matrix, Masks((complex(matrix.flat[0]),) if not np.isnan(matrix.flat[0]) else (1j,))
    return matrix, Masks((0.5,), least=-1.0, most=1.5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_kind_of_element(dtype: np.dtype, order: Any, rng: np.random.Generator) -> None:
    matrix, masks = planted(dtype, (37, 53), rng)
    matrix = np.asarray(matrix, order=order)
    wanted = Sought(extent=True, masks=masks, not_finite=True)
    assert contents_of(matrix, wanted) == naive(matrix, masks)
    assert contents_of(matrix[3:30, 5:41], wanted) == naive(matrix[3:30, 5:41], masks)


@given(
    matrix=arrays.arrays(
        st.sampled_from([np.int8, np.uint64, np.float32, np.float64]),
        arrays.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=9),
    ),
    nbytes=st.integers(1, 64),
)
def test_pieces_leave_nothing_out(matrix: np.ndarray, nbytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "PIECE_NBYTES", nbytes)
        assert contents_of(matrix, ALL) == naive(matrix, None)


def test_what_float16_rounds_to_infinity() -> None:
    sums = np.array([[65519.0, 65520.0, -65520.0, np.inf, np.nan, 1.0]], np.float32)
    with np.errstate(over="ignore"):
        rounded = sums.astype(np.float16)
    found = contents_of(sums, Sought(not_finite=True), overflow_of(np.dtype(np.float16)))
    assert found.not_finite == int((~np.isfinite(rounded)).sum()) == 4
    assert (found.nan, found.infinite) == (1, 3)


def test_nothing_wanted_is_nothing_found() -> None:
    assert contents_of(np.full((2, 2), np.nan), Sought()) == Contents()


pytest_device = pytest.mark.parametrize(
    "device",
    [pytest.param("simulator", marks=pytest.mark.simulator), pytest.param("gpu", marks=pytest.mark.gpu)],
)


@pytest.mark.sample(4)
@pytest_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_finds_what_the_cpu_finds(device: str, dtype: np.dtype, rng: np.random.Generator) -> None:
    from numba import cuda

    from tilewright.kernels.passes import contents_device as device_side

    shape = (4, 70) if device == "simulator" else (700, 3001)
    matrix, masks = planted(dtype, shape, rng)
    overflow = 2.0
    words = cuda.to_device(device_side.empty_words(dtype))
    extent = cuda.to_device(device_side.empty_words(dtype)[:2].view(device_side.wide_dtype(dtype)))
    counts = words[2:]
    values, limits = (cuda.to_device(array) for array in device_side.mask_arrays(dtype, masks))
    whole = cuda.to_device(matrix)
    halves = whole[:2, :], whole[2:, :]
    for half in halves:
        device_side.add_contents(half, values, limits, overflow, extent, counts, 0)
    found = np.concatenate([extent.copy_to_host().view(np.int64), counts.copy_to_host()])
    wanted = Sought(extent=True, masks=masks, not_finite=True)
    assert device_side.contents_from(found, dtype, wanted) == contents_of(matrix, wanted, overflow)


def compiled_variants() -> list[Any]:
    if SIMULATOR:
        return []
    from tilewright.kernels.passes.contents_device import variants

    return sampled(list(variants()), 6)


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("variant", compiled_variants())
@pytest.mark.parametrize("target", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_becomes_machine_code(variant: Any, target: tuple[int, int], tmp_path: Path) -> None:
    from numba import cuda

    text, _ = cuda.compile_ptx(variant.function, variant.signature, cc=target)
    assert_no_spills(assemble(text, f"sm_{target[0]}{target[1]}", tmp_path))
