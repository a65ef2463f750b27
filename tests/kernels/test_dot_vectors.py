"""The vectorised first pass: machine code without a GPU, and every edge of it on one."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from numba import cuda

from tests.kernels.machine_code import assemble, assert_no_spills
from tilewright.kernels import dot
from tilewright.kernels.device_choice import SIMULATOR

if SIMULATOR:
    pytest.skip("the simulator runs no PTX", allow_module_level=True)

from tilewright.kernels.dot_device import MAX_BLOCKS, THREADS
from tilewright.kernels.dot_vectors import UNROLL, launch_bounds, signature, source, suits

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
DTYPES = [*INTEGERS, "float16", "float32", "float64", "complex64", "complex128"]


@pytest.mark.parametrize(
    ("dtype", "conjugate"),
    [
        # Unsigned integers of more than a byte have the instructions of signed ones.
        *(pytest.param(d, False, marks=pytest.mark.slow if d in INTEGERS[3::2] else ()) for d in DTYPES),
        ("complex64", True),
        ("complex128", True),
    ],
)
def test_compiles_without_spilling(dtype: str, conjugate: bool, tmp_path: Path) -> None:
    kind = np.dtype(dtype)
    bounds = launch_bounds(kind)
    assert MAX_BLOCKS % bounds[1] == 0
    text, _ = cuda.compile_ptx(source(kind, conjugate), signature(kind).args, cc=(9, 0), launch_bounds=bounds)
    assert re.search(r"ld\.global\.v[24]\.", text)
    assert_no_spills(assemble(text, "sm_90", tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_around_vectors_and_grids(dtype: str, rng: np.random.Generator) -> None:
    kind = np.dtype(dtype)
    lanes = max(1, 16 // kind.itemsize)
    grid = MAX_BLOCKS * THREADS * UNROLL * lanes
    for length in (1, lanes - 1, lanes, lanes + 1, 1000 * lanes + 1, grid - 1, grid, grid + lanes + 1):
        # Integers of full range wrap. Else small ones: every sum is exact but in float16, whose result may round.
        least, most = (np.iinfo(kind).min, np.iinfo(kind).max) if kind.kind in "iu" else (0, 3)
        drawn = kind if kind.kind in "iu" else np.int64
        x = rng.integers(least, most, length, drawn, endpoint=True).astype(kind)
        y = rng.integers(least, most, length, drawn, endpoint=True).astype(kind)
        if kind.kind == "c":
            x, y = x + kind.type(1j) * y, y - kind.type(1j) * x
        held = cuda.to_device(x), cuda.to_device(y)
        assert suits(*held) or not length
        wide = np.complex128 if kind.kind == "c" else np.float64 if kind.kind == "f" else np.int64
        for conjugate in (True, False):
            exact = (np.vdot if conjugate else np.dot)(x.astype(wide), y.astype(wide))
            with np.errstate(over="ignore"):
                want = np.array([exact]).astype(kind)[0]
            assert dot(*held, conjugate=conjugate).copy_to_host()[()] == want, (length, conjugate)


@pytest.mark.gpu
def test_what_does_not_suit_still_counts(rng: np.random.Generator) -> None:
    x = rng.integers(-100, 100, 10_001)
    held = cuda.to_device(x)
    pairs = [(slice(1, None), slice(-1)), (slice(None, None, 2),) * 2, (slice(None, None, -1), slice(None))]
    for parts in pairs:
        left, right = (held[part] for part in parts)
        host = [x[part] for part in parts]
        assert not suits(left, right)
        assert dot(left, right).copy_to_host()[()] == np.dot(*host)
