"""Dot products against `numpy.vdot`, on the host, in the simulator (a run of its own) and on a GPU."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda

from tilewright.kernels import dot
from tilewright.kernels.dots import host as host_module
from tilewright.kernels.dots.device import FINISHES, on_device
from tilewright.kernels.errors import DeviceUnavailableError, DTypeError, OptionError, ShapeError
from tilewright.kernels.gpu.device_choice import SIMULATOR, cuda_available

DEVICE = "cuda" if SIMULATOR else "cpu"
pytestmark = pytest.mark.simulator if SIMULATOR else []
on_gpu = pytest.mark.simulator if SIMULATOR else pytest.mark.gpu

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"][
    :: 7 if SIMULATOR else 1
]
FLOATS = ["float16", "float32", "float64", "complex64", "complex128"]
LENGTHS = (
    [0, 1, 2, 31, 32, 33, 255, 256, 257, 300] if SIMULATOR else [0, 1, 2, 31, 33, 8191, 8192, 8193, 70_001]
)


def vector(rng: np.random.Generator, length: int, dtype: str) -> np.ndarray:
    kind = np.dtype(dtype).kind
    if kind in "iu":
        # The simulator computes with NumPy scalars, which complain where integers wrap.
        top = 1 if SIMULATOR else np.iinfo(dtype).max
        return rng.integers(0 if kind == "u" else -top, top, length, dtype=dtype)
    values = rng.standard_normal(length)
    if kind == "c":
        values = values + 1j * rng.standard_normal(length)
    return values.astype(dtype)


def expected(x: np.ndarray, y: np.ndarray, conjugate: bool) -> tuple[Any, float]:
    """The product and the error allowed: rounding of each product and of sums of at most 8192 terms, and once
    to the result's dtype."""
    result = np.result_type(x, y)
    if result.kind in "iu":
        wide = np.multiply(x.astype(np.uint64), y.astype(np.uint64)).sum(dtype=np.uint64)
        return np.array([wide]).astype(result)[0], 0.0
    wide = np.complex128 if result.kind == "c" else np.float64
    left = np.conj(x) if conjugate else x
    products = left.astype(wide) * y.astype(wide)
    work = np.finfo(np.float32 if result == np.float16 else result)
    scale = np.abs(products).sum()
    total = products.sum()
    return total, 32 * float(work.eps) * scale + float(np.finfo(result).eps) * abs(total)


def check(value: Any, x: np.ndarray, y: np.ndarray, conjugate: bool = True) -> None:
    want, bound = expected(x, y, conjugate)
    if bound == 0.0:
        assert value == want
    else:
        assert abs(complex(value) - complex(want)) <= bound


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
@pytest.mark.parametrize("length", LENGTHS)
def test_each_dtype_and_length(dtype: str, length: int, rng: np.random.Generator) -> None:
    x, y = vector(rng, length, dtype), vector(rng, length, dtype)
    value = dot(x, y, device=DEVICE)
    assert value.dtype == np.dtype(dtype)
    assert np.ndim(value) == 0
    check(value, x, y)


@pytest.mark.parametrize("conjugate", [True, False])
def test_conjugation(conjugate: bool) -> None:
    x, y = np.array([1 + 2j, 3j]), np.array([2 - 1j, 1 + 1j])
    assert dot(x, y, conjugate=conjugate, device=DEVICE) == (np.vdot(x, y) if conjugate else np.dot(x, y))


@pytest.mark.parametrize(
    ("left", "right"),
    [("int8", "int64"), ("float32", "int16"), ("float32", "complex64"), ("uint8", "float64")],
)
def test_mixed_dtypes(left: str, right: str, rng: np.random.Generator) -> None:
    x, y = vector(rng, 257, left), vector(rng, 257, right)
    value = dot(x, y, device=DEVICE)
    assert value.dtype == np.result_type(x, y)
    check(value, x, y)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("left", "right", "result"),
    [
        (left, right, result)
        for left, right in [(d, d) for d in INTEGERS] + [("int8", "int16"), ("uint8", "int8")]
        for result in ("int8", "int32", "int64", "uint64", "float32", "float64")
        if all(np.can_cast(dtype, result, "same_kind") for dtype in (left, right))
    ],
)
@pytest.mark.parametrize("length", [0, 300] if SIMULATOR else [0, 1, 33, 8193, 70_001])
def test_integers_in_another_dtype(
    left: str, right: str, result: str, length: int, rng: np.random.Generator
) -> None:
    """Nothing wraps in a narrower type than the one asked for, and all of it in that one."""
    x, y = vector(rng, length, left), vector(rng, length, right)
    found = dot(x, y, dtype=result, device=DEVICE)
    exact = sum(a * b for a, b in zip(x.tolist(), y.tolist(), strict=True))
    assert found.dtype == result
    if found.dtype.kind == "f":
        if abs(exact) > float(np.finfo(result).max):
            assert np.isinf(found)
            return
        scale = sum(abs(a * b) for a, b in zip(x.tolist(), y.tolist(), strict=True))
        rounding = float(np.finfo(result).eps) * abs(exact) + 64 * float(np.finfo("f8").eps) * scale
        assert abs(float(found) - exact) <= rounding
    else:
        bits = 8 * found.dtype.itemsize
        assert (int(found) - exact) % 2**bits == 0


@pytest.mark.parametrize("extreme", ["least", "most"])
@pytest.mark.parametrize(
    "pair", [("int8", "int8"), ("uint8", "uint8"), ("uint8", "int8"), ("int16", "uint16")]
)
def test_sums_of_extremes_are_exact_in_64_bits(pair: tuple[str, str], extreme: str) -> None:
    length = 300 if SIMULATOR else 3 * 8192 + 5
    x, y = (
        np.full(length, np.iinfo(dtype).min if extreme == "least" else np.iinfo(dtype).max, dtype)
        for dtype in pair
    )
    assert dot(x, y, dtype="int64", device=DEVICE) == length * int(x[0]) * int(y[0])


@pytest.mark.parametrize(
    ("dtype", "result"),
    [("float16", "float32"), ("float32", "float64"), ("float64", "float32"), ("float32", "complex64"),
     ("float32", "complex128"), ("complex64", "complex128"), ("complex128", "complex64"), ("float64", "float16")],
)  # fmt: skip
def test_floats_in_another_dtype_are_rounded_once(dtype: str, result: str, rng: np.random.Generator) -> None:
    """To the dtype asked for, from sums of the elements as they are."""
    length = 300 if SIMULATOR else 20_001
    x, y = vector(rng, length, dtype), vector(rng, length, dtype)
    wide = "c16" if np.dtype(dtype).kind == "c" else "f8"
    exact = np.vdot(x.astype(wide), y.astype(wide))
    found = dot(x, y, dtype=result, device=DEVICE)
    assert found.dtype == result
    scale = float(np.abs(x.astype(wide) * y.astype(wide)).sum())
    for part, wanted in ((found.real, exact.real), (found.imag, exact.imag)):
        assert abs(float(part) - wanted) <= 0.51 * np.finfo(result).eps * abs(wanted) + 1e-14 * scale


@pytest.mark.parametrize("result", ["uint8", "bool", "U4", "bfloat16", "quad"])
def test_dtypes_that_are_none(result: str) -> None:
    with pytest.raises(DTypeError, match=result):
        dot(np.ones(2, "i1"), np.ones(2, "i1"), dtype=result, device=DEVICE)


@settings(max_examples=8 if SIMULATOR else 60)
@given(
    steps=st.tuples(st.sampled_from([1, 2, -1, -3, 5]), st.sampled_from([1, 2, -1, -3, 5])),
    length=st.integers(0, 60),
)
def test_strided_vectors(steps: tuple[int, int], length: int) -> None:
    x, y = (
        np.arange(300.0)[150:][::step][:length] if step > 0 else np.arange(300.0)[::step][:length]
        for step in steps
    )
    length = min(len(x), len(y))
    assert dot(x[:length], y[:length], device=DEVICE) == float(np.dot(x[:length], y[:length]))


@pytest.mark.skipif(SIMULATOR, reason="host threads")
def test_bits_do_not_depend_on_the_number_of_threads(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "PIECES_PER_THREAD", 1)
    x, y = vector(rng, 300_000, "float32"), vector(rng, 300_000, "float32")
    answers = set()
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(host_module, "cpu_threads", lambda threads=threads: threads)
        answers.add(dot(x, y, device="cpu").tobytes())
    assert len(answers) == 1
    check(dot(x, y, device="cpu"), x, y)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("step", [1, 2])
def test_sums_are_formed_in_double_precision(dtype: str, step: int) -> None:
    """On either kind of device: sums in float32 would lose most of the ones."""
    large = {"float16": 60_000.0}.get(dtype, 1e8)
    ones = 40 if SIMULATOR else 1999
    x = np.array([large, *[1] * ones, -large] * (1 if SIMULATOR else 3)).astype(dtype).repeat(step)[::step]
    y = np.full(len(x), large if dtype == "float16" else 1).astype(dtype)
    ones *= 1 if SIMULATOR else 3
    if dtype == "float16":
        y[y == large] = 1
        y[[0, -1]] = large  # products of 3.6e9
    factor = 1 + 2j if np.dtype(dtype).kind == "c" else 1
    for conjugate in (True, False):
        found = dot((x * factor).astype(dtype), y, conjugate=conjugate, device=DEVICE)
        assert found == np.array(ones * (np.conj(factor) if conjugate else factor)).astype(dtype)
        assert found.dtype == np.dtype(dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
def test_narrow_floats_are_rounded_once(dtype: str, rng: np.random.Generator) -> None:
    length = 300 if SIMULATOR else 100_003
    x, y = vector(rng, length, dtype), vector(rng, length, dtype)
    exact = complex(np.vdot(x.astype("c16"), y.astype("c16")))
    found = complex(dot(x, y, device=DEVICE))
    for part, wanted in ((found.real, exact.real), (found.imag, exact.imag)):
        assert abs(part - wanted) <= 0.51 * float(np.finfo(dtype).eps) * abs(wanted)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_propagate(special: float) -> None:
    x, y = np.ones(100), np.ones(100)
    x[57] = special
    np.testing.assert_equal(float(dot(x, y, device=DEVICE)), special)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("factors", [("inf", "0"), ("max", "10")])
def test_long_vectors_are_as_quiet_as_numpys_vdot(dtype: str, factors: tuple[str, str]) -> None:
    """Products that overflow or are invalid are answers; Python turns warnings into errors here."""
    x, y = np.ones(100_000, dtype), np.ones(100_000, dtype)
    x[10], y[10] = (np.finfo(dtype).max if factor == "max" else float(factor) for factor in factors)
    np.testing.assert_equal(dot(x, y, device="cpu"), np.vdot(x, y))


@pytest.mark.parametrize(
    ("x", "y", "error", "words"),
    [
        (np.ones(3), np.ones(4), ShapeError, ["3", "4"]),
        (np.ones((2, 2)), np.ones(4), ShapeError, ["x has 2 dimensions"]),
        (np.ones(2), np.array(["a", "b"]), DTypeError, ["y holds", "<U1"]),
        (np.ones(2, np.bool_), np.ones(2), DTypeError, ["bool"]),
        (np.ones(2, ">f8"), np.ones(2), DTypeError, ["byte order"]),
    ],
)
def test_bad_operands(x: Any, y: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        dot(x, y, device=DEVICE)
    for word in words:
        assert word in str(caught.value)


def test_unknown_device() -> None:
    with pytest.raises(OptionError, match="'tpu'"):
        dot(np.ones(2), np.ones(2), device="tpu")


@pytest.mark.skipif(cuda_available(), reason="there is a GPU, or the simulator")
def test_cuda_without_a_gpu_is_an_error() -> None:
    with pytest.raises(DeviceUnavailableError):
        dot(np.ones(2), np.ones(2), device="cuda")


@on_gpu
@pytest.mark.parametrize("finish", FINISHES)
@pytest.mark.parametrize(
    "dtype", ["int32", "complex64"] if SIMULATOR else ["int32", "uint64", "float32", "complex64"]
)
@pytest.mark.parametrize("length", [0, 300] if SIMULATOR else [0, 1, 255, 2048, 2049, 1_000_003])
def test_every_way_to_finish(finish: str, dtype: str, length: int, rng: np.random.Generator) -> None:
    x, y = vector(rng, length, dtype), vector(rng, length, dtype)
    out = on_device(cuda.to_device(x), cuda.to_device(y), np.dtype(dtype), True, 0, finish)
    assert out.shape == ()
    assert out.dtype == np.dtype(dtype)
    check(out.copy_to_host()[()], x, y)


@on_gpu
def test_device_arrays_stay_on_the_device(rng: np.random.Generator) -> None:
    x, y = vector(rng, 300, "float64"), vector(rng, 300, "float64")
    out = dot(cuda.to_device(x), cuda.to_device(y))
    assert not isinstance(out, np.ndarray)
    check(out.copy_to_host()[()], x, y)
    with pytest.raises(OptionError, match="one side"):
        dot(cuda.to_device(x), y)
    with pytest.raises(OptionError, match="cpu"):
        dot(cuda.to_device(x), cuda.to_device(y), device="cpu")


@on_gpu
def test_host_vectors_go_in_pieces(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["tilewright.kernels.dots.device"], "PIECE_NBYTES", 640)
    for length in (79, 80, 81, 999):
        x, y = vector(rng, length, "float64"), vector(rng, length, "float64")
        check(dot(x, y, device="cuda"), x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_the_default_gives_the_same_bits_every_time(dtype: str, rng: np.random.Generator) -> None:
    x, y = vector(rng, 5_000_011, dtype), vector(rng, 5_000_011, dtype)
    held = cuda.to_device(x), cuda.to_device(y)
    assert len({dot(*held).copy_to_host().tobytes() for _ in range(20)}) == 1
    assert len({dot(x, y, device="cuda").tobytes() for _ in range(5)}) == 1


def test_vectors_on_two_gpus_are_refused(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = vector(rng, 3, "float32"), vector(rng, 3, "float32")
    module = sys.modules["tilewright.kernels.dots.api"]
    monkeypatch.setattr(module, "is_device_array", lambda array: True)
    monkeypatch.setattr(module, "as_device_array", lambda array: array)
    monkeypatch.setattr(module, "resolve_device", lambda device, device_arrays: "cuda")
    monkeypatch.setattr(module, "device_index", lambda array: int(array is y))
    with pytest.raises(OptionError, match="x lies on GPU 0 and y on GPU 1"):
        dot(x, y)
