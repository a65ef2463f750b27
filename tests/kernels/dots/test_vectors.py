"""The vectorised first pass: machine code without a GPU, and every edge of it on one."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba import cuda

from tests.kernels.gemm import lane_by_lane
from tests.kernels.gemm.machine_code import assemble, assert_no_spills
from tilewright.kernels import dot
from tilewright.kernels.dots import vectors as dot_vectors
from tilewright.kernels.gpu.device_choice import SIMULATOR

if SIMULATOR:
    pytest.skip("the simulator runs no PTX", allow_module_level=True)

from tilewright.kernels.dots.block_sums import MAX_BLOCKS, THREADS, accumulator_type
from tilewright.kernels.dots.vectors import UNROLL, launch_bounds, signature, source, suits

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
DTYPES = [*INTEGERS, "float16", "float32", "float64", "complex64", "complex128"]


COMPILED = [
    *((d, d, False) for d in DTYPES),
    # Sums that are wider than the elements, or narrower.
    *((d, "int64", False) for d in INTEGERS[:5]),
    ("uint32", "uint64", False),
    ("int64", "int32", False),
    ("complex64", "complex64", True),
    ("complex128", "complex128", True),
]
QUICK = {
    ("int8", "int8", False),
    ("int16", "int64", False),
    ("int32", "int32", False),
    ("float16", "float16", False),
    ("complex64", "complex64", True),
}
"""One of each way to multiply: four bytes at once, halves of a word, words, floats in pairs, and complex numbers."""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("dtype", "result", "conjugate"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in COMPILED],
)
def test_compiles_without_spilling(dtype: str, result: str, conjugate: bool, tmp_path: Path) -> None:
    kind, accumulator = np.dtype(dtype), accumulator_type(np.dtype(result))
    bounds = launch_bounds(kind)
    assert MAX_BLOCKS % bounds[1] == 0
    function = source(kind, accumulator, conjugate)
    text, _ = cuda.compile_ptx(function, signature(accumulator).args, cc=(9, 0), launch_bounds=bounds)
    assert re.search(r"ld\.global\.v[24]\.", text)
    assert_no_spills(assemble(text, "sm_90", tmp_path))


def _load(registers: np.ndarray, first: int, array: Any, index: int) -> None:
    for lane in range(16 // array._dtype.itemsize):
        registers[first + lane] = array[index + lane]


def _half(word: int, first: int) -> int:
    return int(np.array([word >> first & 0xFFFF], np.uint16).view(np.int16)[0]) & 0xFFFFFFFF


def _signed_byte_dot(a: int, b: int, c: int) -> int:
    left, right = (np.array([word], np.uint32).view(np.int8).tolist() for word in (a, b))
    return (c + sum(x * y for x, y in zip(left, right, strict=True))) & 0xFFFFFFFF


def _byte_dot(a: int, b: int, c: int) -> int:
    return lane_by_lane.byte_dot(a, b, c) & 0xFFFFFFFF


@pytest.mark.parametrize("result", ["int8", "int32", "int64", "uint64"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_one_thread_of_it_wraps_in_the_accumulator_alone(
    dtype: str, result: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's Python, with instructions in Python, by a single thread."""
    kind, types = np.dtype(dtype), lane_by_lane.INTEGER_TYPES
    stand_ins: dict[str, Any] = {
        "cuda": SimpleNamespace(
            jit=lambda **options: lambda function: function,
            local=SimpleNamespace(array=lambda count, dtype: np.full(count, None, object)),
            **{name: SimpleNamespace(x=count) for name, count in (("blockIdx", 0), ("threadIdx", 0), ("gridDim", 1))},
        ),
        "THREADS": 1,
        "block_sum_of": lambda accumulator: lambda value: value,
        "from_dtype": lambda found: getattr(types, found.name),
        "global_array": lane_by_lane._FlatIntegers,
        "load_vector": _load,
        "signed_half": _half,
        "signed_byte_dot": _signed_byte_dot,
        "byte_dot": _byte_dot,
        "types": SimpleNamespace(**vars(types), float32=None, float64=None),
        "uint32": types.uint32,
        "uint64": types.uint64,
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(dot_vectors, name, stand_in)
    accumulator = getattr(types, str(accumulator_type(np.dtype(result))))
    kernel = source(kind, accumulator, False)
    lanes = 16 // kind.itemsize
    info = np.iinfo(kind)
    # A thread takes one element, at most, after the last whole vector.
    for length in (0, 1, lanes, lanes + 1, UNROLL * lanes, 3 * UNROLL * lanes + 2 * lanes + 1):
        drawn = rng.integers(info.min, info.max, (2, length), kind, endpoint=True)
        for x, y in (drawn, np.full((2, length), info.min, kind), np.full((2, length), info.max, kind)):
            sums = [None]
            kernel(x.ctypes.data, y.ctypes.data, length, sums)
            exact = sum(a * b for a, b in zip(x.tolist(), y.tolist(), strict=True))
            assert sums[0] == accumulator(exact), length


@pytest.mark.gpu
@pytest.mark.parametrize("result", ["int16", "int32", "int64", "float64"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_in_another_dtype(dtype: str, result: str, rng: np.random.Generator) -> None:
    info = np.iinfo(dtype)
    for length in (1, 1000, 300_001):
        x, y = rng.integers(info.min, info.max, (2, length), dtype, endpoint=True)
        found = dot(cuda.to_device(x), cuda.to_device(y), dtype=result).copy_to_host()[()]
        assert found == dot(x, y, dtype=result, device="cuda")
        if result == "float64":
            assert found == pytest.approx(float(dot(x, y, dtype=result, device="cpu")), rel=1e-9)
        else:
            assert found == dot(x, y, dtype=result, device="cpu")


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
