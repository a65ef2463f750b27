"""Every mistake a caller can make is named before anything is computed."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tilewright.kernels import matmul
from tilewright.kernels.errors import (
    DeviceUnavailableError,
    DTypeError,
    OptionError,
    OutputError,
    ShapeError,
    TilewrightError,
)
from tilewright.kernels.gemm.base import ELEMENTS, INTEGERS
from tilewright.kernels.gemm.check import elements_apart, result_dtype
from tilewright.kernels.gemm.product import kernel_name
from tilewright.kernels.gpu.device_array import strided_view
from tilewright.kernels.gpu.device_choice import SIMULATOR, cuda_available

A = np.arange(6.0).reshape(2, 3)
B = np.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "says"),
    [
        ((A, A), {}, ShapeError, "op(A) is 2 × 3 and op(B) is 2 × 3"),
        ((A, B), {"transpose_a": True}, ShapeError, "op(A) is 3 × 2 and op(B) is 3 × 4"),
        ((A[0], B), {}, ShapeError, "a has 1 dimension"),
        ((A, B[None]), {}, ShapeError, "b has 3 dimension"),
        ((A > 1, B), {}, DTypeError, "view it as uint8"),
        ((A.astype("U3"), B), {}, DTypeError, "a holds <U3"),
        ((A, B.astype("M8[s]")), {}, DTypeError, "b holds datetime64"),
        ((A.astype("g"), B), {}, DTypeError, "a holds float128"),
        ((A, B), {"dtype": "i8"}, DTypeError, "does not cast to dtype=int64"),
        ((A, B), {"dtype": "nonsense"}, DTypeError, "not an element type"),
        ((A, B), {"dtype": "S3"}, DTypeError, "cannot be a product's type"),
        (([[1, 2], [3]], B), {}, DTypeError, "no array that NumPy understands"),
        ((A, B, np.empty((2, 5))), {}, OutputError, "the product has (2, 4)"),
        ((A, B, np.empty((2, 4), "f4")), {}, OutputError, "out holds float32, the product is float64"),
        ((A, B, [[0.0] * 4] * 2), {}, OutputError, "out is list"),
        ((A, B, np.broadcast_to(0.0, (2, 4))), {}, OutputError, "out is read-only"),
        (
            (A, B, np.lib.stride_tricks.as_strided(np.zeros(5), (2, 4), (8, 8))),
            {},
            OutputError,
            "elements of it share memory",
        ),
        ((A, B), {"accumulate": True}, OptionError, "no out was given"),
        ((A, B), {"precision": "half"}, OptionError, "'full', 'split', 'tf32', 'bf16', 'fp16'"),
        ((A, B), {"precision": "tf32"}, OptionError, "a choice for float32 products"),
        ((A, B), {"device": "gpu"}, OptionError, "'auto', 'cuda', 'cpu'"),
    ],
)
def test_mistakes_are_named(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[TilewrightError], says: str
) -> None:
    with pytest.raises(error) as raised:
        matmul(*arguments, **options)
    assert says in str(raised.value)


def test_a_failed_check_leaves_the_output_alone() -> None:
    out = np.full((2, 4), 5.0)
    with pytest.raises(ShapeError):
        matmul(A, A, out)
    assert (out == 5).all()


@pytest.mark.parametrize("which", ["a", "b"])
def test_an_output_that_overlaps_an_input_is_refused(which: str) -> None:
    whole = np.zeros((4, 8))
    operands = {"a": whole[:, :4], "b": np.zeros((4, 4))} if which == "a" else {"a": A, "b": whole[:3, :4]}
    with pytest.raises(OutputError, match=f"out overlaps {which} in memory"):
        matmul(operands["a"], operands["b"], whole[: operands["a"].shape[0], 2:6])


@pytest.mark.sample(1)
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_elements_share_memory_where_addresses_are_counted_twice(itemsize: int) -> None:
    """Strides of any number of bytes, also such that rows and columns lie between each other."""
    both = {True: 0, False: 0}
    for m, n in itertools.product(range(1, 6), repeat=2):
        for down, across in itertools.product(range(-4 * itemsize - 9, 4 * itemsize + 10), repeat=2):
            begins = (down * i + across * j for i in range(m) for j in range(n))
            counted = Counter(begin + byte for begin in begins for byte in range(itemsize))
            apart = max(counted.values()) == 1
            assert elements_apart(m, n, down, across, itemsize) is apart, (m, n, down, across)
            both[apart] += 1
    assert min(both.values()) > 1000


@pytest.mark.parametrize("dtype", ["f8", "f4", "i4", "i8", "c8"])
@pytest.mark.parametrize(
    "out",
    [
        lambda dtype: np.zeros((4, 5), dtype)[:, ::2],
        lambda dtype: np.zeros((5, 4), dtype)[::2].T[::-1],
        lambda dtype: np.zeros((7, 5), dtype)[-1::-2, ::-2],
        lambda dtype: np.lib.stride_tricks.as_strided(
            np.zeros(40, dtype), (4, 3), (3 * np.dtype(dtype).itemsize, 10 * np.dtype(dtype).itemsize)
        ),
        lambda dtype: np.lib.stride_tricks.as_strided(
            np.zeros(40, dtype), (4, 3), (4 * np.dtype(dtype).itemsize, 7 * np.dtype(dtype).itemsize)
        ),
        lambda dtype: np.zeros((4, 5), [("flag", "u1"), ("value", dtype)])["value"][:, ::2],
    ],
    ids=["columns", "rows", "backwards", "behind", "between", "field"],
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_an_output_of_any_strides_is_written(
    accumulate: bool, out: Any, dtype: str, rng: np.random.Generator
) -> None:
    a, b = (rng.integers(-9, 9, shape).astype(dtype) for shape in ((4, 6), (6, 3)))
    target = out(dtype)
    target[...] = 5
    assert matmul(a, b, target, accumulate=accumulate, device="cpu") is target
    np.testing.assert_array_equal(target, a @ b + 5 * accumulate)


def test_an_output_between_the_rows_of_an_input_is_allowed() -> None:
    """Interleaved in memory is not overlapping."""
    whole = np.zeros((4, 8))
    whole[:, :4] = np.eye(4)
    matmul(whole[:, :4], np.full((4, 4), 3.0), whole[:, 4:], device="cpu")
    assert (whole[:, 4:] == 3).all()


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 2), (3, 0, 2), (0, 0, 0)])
def test_empty_sides_give_empty_products(m: int, n: int, k: int) -> None:
    found = matmul(np.ones((m, k), "i4"), np.ones((k, n), "i4"), device="cpu")
    assert (found.shape, found.dtype) == ((m, n), np.int32)


@pytest.mark.parametrize("dtype", ["i8", "f4"])
def test_an_empty_sum_is_zero_or_adds_nothing(dtype: str) -> None:
    a, b = np.ones((2, 0), dtype), np.ones((0, 3), dtype)
    out = np.full((2, 3), 7, dtype)
    matmul(a, b, out, accumulate=True, device="cpu")
    assert (out == 7).all()
    matmul(a, b, out, device="cpu")
    assert (out == 0).all()


@pytest.mark.skipif(cuda_available(), reason="a GPU, or the simulator, is here")
def test_cuda_without_a_gpu_is_an_error_and_auto_is_not() -> None:
    with pytest.raises(DeviceUnavailableError, match="tilewright devices"):
        matmul(A, B, device="cuda")
    np.testing.assert_array_equal(matmul(A, B, device="auto"), A @ B)
    assert kernel_name(A, B) == "cpu"


@pytest.mark.simulator
def test_host_and_device_arrays_do_not_mix() -> None:
    from numba import cuda

    assert SIMULATOR
    with pytest.raises(OptionError, match=r"mixed: a is .*, b is numpy.ndarray"):
        matmul(cuda.to_device(A), B)
    with pytest.raises(OutputError, match=r"out is numpy\.ndarray"):
        matmul(cuda.to_device(A), cuda.to_device(B), np.empty((2, 4)))
    with pytest.raises(OptionError, match="device='cpu' was asked for, but the arrays lie on a GPU"):
        matmul(cuda.to_device(A), cuda.to_device(B), device="cpu")


@pytest.mark.parametrize(
    ("held", "refused"),
    [
        ("u8", set()),
        ("i8", {"uint8", "uint16", "uint32", "uint64"}),
        ("f8", set(map(str, INTEGERS))),
        ("c16", {str(element) for element in ELEMENTS if element.kind != "c"}),
    ],
)
def test_a_dtype_may_be_of_any_width(held: str, refused: set[str]) -> None:
    found = set()
    for element in ELEMENTS:
        try:
            assert result_dtype(np.dtype(held), np.dtype(held), element) == element
        except DTypeError:
            found.add(str(element))
    assert found == refused


@pytest.mark.simulator
@pytest.mark.parametrize("strides", [(5, 2), (3, 10), (4, 7), (-4, 7), (-3, -10)])
def test_a_device_output_of_any_strides_is_written(
    strides: tuple[int, int], rng: np.random.Generator
) -> None:
    from numba import cuda

    a, b = (rng.integers(-9, 9, shape) for shape in ((4, 6), (6, 3)))
    held = cuda.to_device(np.zeros(80, np.int64))
    down, across = (8 * stride for stride in strides)
    matmul(cuda.to_device(a), cuda.to_device(b), strided_view(held[40:], (4, 3), (down, across)))
    whole = held.copy_to_host()
    target = np.lib.stride_tricks.as_strided(whole[40:], (4, 3), (down, across))
    np.testing.assert_array_equal(target, a @ b)
    target[...] = 0
    assert not whole.any(), "nothing else was written"
