"""bfloat16: its rounding inside a kernel, its promotion, and arrays of it from other libraries."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda

from tests.kernels import naive
from tilewright.kernels import matmul
from tilewright.kernels.bfloat16 import BFLOAT16, EPSILON, SMALLEST_SUBNORMAL, dtype_name, is_bfloat16
from tilewright.kernels.elements import conversion, reading
from tilewright.kernels.errors import DTypeError, OptionError, OutputError
from tilewright.kernels.gemm.check import result_dtype
from tilewright.kernels.gemm.product import kernel_name
from tilewright.kernels.gpu.device_array import as_device_array
from tilewright.kernels.gpu.device_choice import SIMULATOR, capability, current_device
from tilewright.kernels.numbers import ceil_div

FLOAT32 = np.dtype(np.float32)


def converted(values: np.ndarray, to: np.dtype) -> np.ndarray:
    """Numbers of one dtype as another, element by element in a kernel; bfloat16 as bits on both sides."""
    read, write = reading(values.dtype, FLOAT32), conversion(to)

    @cuda.jit
    def convert(source: Any, target: Any) -> None:
        i = cuda.grid(1)
        if i < source.size:
            target[i] = write(read(source[i]))

    source = cuda.to_device(values.view(np.uint16) if values.dtype == BFLOAT16 else values)
    target = cuda.to_device(np.zeros(values.shape, np.uint16 if to == BFLOAT16 else to))
    convert[ceil_div(values.size, 128), 128](source, target)
    return target.copy_to_host().view(to)


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """The same bits, except that every NaN is as good as another."""
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        nan, found_nan = (np.isnan(values.astype(np.float64)) for values in (expected, found))
    np.testing.assert_array_equal(found_nan, nan)
    bits = f"u{expected.itemsize}"
    np.testing.assert_array_equal(found.view(bits)[~nan], expected.view(bits)[~nan])


def nearest(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        return values.astype(BFLOAT16)


def float32_with_bits(*bits: int) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


CORNERS = float32_with_bits(
    *(0x00000000, 0x80000000, 0x00000001, 0x00008000, 0x00008001, 0x00018000, 0x007FFFFF),
    *(0x3F808000, 0x3F808001, 0x3F818000, 0x3F817FFF, 0xBF808000, 0xBF818000),  # ties, to either side
    *(0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000),  # the largest; infinity
    *(
        0x7F800001,
        0xFF800001,
        0x7FC00000,
        0x7FFFFFFF,
        0xFFFFFFFF,
    ),  # NaN, some with payloads that cutting would lose
)


@pytest.mark.simulator
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_rounds_to_nearest_as_ml_dtypes_does(bits: list[int]) -> None:
    values = float32_with_bits(*bits)
    assert_same(converted(values, BFLOAT16), nearest(values))


@pytest.mark.simulator
def test_corners_are_rounded_to_nearest() -> None:
    assert_same(converted(CORNERS, BFLOAT16), nearest(CORNERS))
    ties = converted(float32_with_bits(0x3F808000, 0x3F818000), BFLOAT16)
    assert ties.view(np.uint16).tolist() == [0x3F80, 0x3F82], "ties go to the even neighbour"


@pytest.mark.simulator
@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=40))
def test_widens_without_a_change(bits: list[int]) -> None:
    stored = np.array(bits, np.uint16).view(BFLOAT16)
    assert_same(converted(stored, FLOAT32), stored.astype(np.float32))


@pytest.mark.gpu
def test_every_number_there_and_back_on_a_gpu(rng: np.random.Generator) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16)
    assert_same(converted(every, FLOAT32), every.astype(np.float32))
    near = (every.view(np.uint16).astype(np.uint32) << 16)[:, None] + np.array(
        [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32
    )
    values = np.concatenate([near.ravel(), rng.integers(0, 1 << 32, 1 << 20, np.uint32)]).view(np.float32)
    assert_same(converted(values, BFLOAT16), nearest(values))


def test_what_numpy_does_not_know() -> None:
    info = ml_dtypes.finfo(BFLOAT16)
    assert (float(info.eps), float(info.smallest_subnormal)) == (EPSILON, SMALLEST_SUBNORMAL)
    assert np.dtype(ml_dtypes.bfloat16) == BFLOAT16
    assert dtype_name(BFLOAT16) == "bfloat16"
    assert (dtype_name(FLOAT32), dtype_name(np.dtype("V2"))) == ("float32", "|V2")


@pytest.mark.parametrize("other", [*naive.INTEGERS, "f4", "f8", "c8", "c16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["bfloat16", "f4", "f8", "c8"])
def test_a_wanted_dtype_stays_within_the_kind(other: str, wanted: str) -> None:
    found, dtype = np.dtype(other), np.dtype(wanted)
    if np.can_cast(found, np.float32 if dtype == BFLOAT16 else dtype, "same_kind"):
        assert result_dtype(BFLOAT16, found, wanted) == dtype
    else:
        with pytest.raises(
            DTypeError, match=f"which does not cast to dtype={dtype_name(dtype)}|no common type"
        ):
            result_dtype(BFLOAT16, found, wanted)


def test_mistakes_are_named() -> None:
    a = np.ones((2, 2), BFLOAT16)
    with pytest.raises(DTypeError, match=r"a holds \|V2, which cannot be multiplied"):
        matmul(a.view("V2"), a)
    with pytest.raises(DTypeError, match="a holds bfloat16, which does not cast to dtype=int32"):
        matmul(a, a, dtype="i4")
    with pytest.raises(DTypeError, match="b holds complex64, which does not cast to dtype=bfloat16"):
        matmul(a, a.astype("c8"), dtype="bfloat16")
    with pytest.raises(DTypeError, match=r"a holds float16 and b bfloat16.*pass dtype='float32'"):
        matmul(a.astype("f2"), a)
    with pytest.raises(
        OutputError, match="out holds float16, the product is bfloat16; pass an out of bfloat16"
    ):
        matmul(a, a, np.empty((2, 2), "f2"))
    with pytest.raises(OptionError, match="a choice for float32 products; this one is bfloat16"):
        matmul(a, a, precision="tf32")


def test_is_summed_in_float32_and_rounded_once() -> None:
    """257 ones: bfloat16 sums would stop at 256, and 257 itself lies between two of its numbers."""
    a = np.ones((1, 258), BFLOAT16)
    assert matmul(a, a, transpose_b=True, device="cpu")[0, 0] == 258
    found = matmul(a[:, 1:], a[:, 1:], dtype="float32", transpose_b=True, device="cpu")
    assert (found.dtype, found[0, 0]) == (np.float32, 257)
    out = np.full((1, 1), 1, BFLOAT16)
    matmul(a[:, 1:], a[:, 1:], out, accumulate=True, transpose_b=True, device="cpu")
    assert out[0, 0] == 258, "the product was rounded before it was added"


@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 40)),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_bits_are_the_rounded_float32_products(shape: tuple[int, int, int], seed: int) -> None:
    """Of small integers, which float32 adds up exactly."""
    m, n, k = shape
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-99, 100, size).astype(BFLOAT16) for size in ((m, k), (k, n)))
    expected = (a.astype("i8") @ b.astype("i8")).astype("f4").astype(BFLOAT16)
    assert_same(matmul(a, b, device="cpu"), expected)


class Exported:
    """What another library's array shows of itself."""

    def __init__(self, typestr: str, dtype: Any) -> None:
        self.dtype = dtype
        self.__cuda_array_interface__ = {
            "typestr": typestr,
            "shape": (3, 4),
            "strides": None,
            "data": (1 << 20, False),
            "version": 2,
        }


class TorchName:
    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"torch.{self.name}"


@pytest.mark.skipif(SIMULATOR, reason="the simulator has no arrays of other libraries")
@pytest.mark.parametrize(
    ("typestr", "dtype", "read_as"),
    [
        ("<V2", TorchName("bfloat16"), BFLOAT16),
        ("<f2", TorchName("bfloat16"), BFLOAT16),
        ("<f2", TorchName("float16"), np.float16),
        ("<V2", BFLOAT16, BFLOAT16),
        ("<f2", np.dtype("f2"), np.float16),
        ("<u2", np.dtype("u2"), np.uint16),
        ("|V2", np.dtype("V2"), np.dtype("V2")),
    ],
)
def test_other_libraries_arrays_are_asked_for_their_dtype(typestr: str, dtype: Any, read_as: Any) -> None:
    found = as_device_array(Exported(typestr, dtype))
    assert (found.dtype, found.strides) == (read_as, (8, 2))


WITHOUT_ML_DTYPES = """
import sys
sys.modules["ml_dtypes"] = None  # as if it were not installed
import numpy as np
from tilewright.kernels import matmul
from tilewright.kernels.bfloat16 import BFLOAT16, dtype_name
from tilewright.kernels.gpu.device_array import as_device_array
from tilewright.kernels.gemm.check import result_dtype

class Tensor:
    dtype = "torch.bfloat16"
    __cuda_array_interface__ = {"typestr": "<V2", "shape": (3, 4), "data": (1 << 20, False), "version": 2}

found = as_device_array(Tensor()).dtype
assert found == BFLOAT16 != np.dtype("V2")
assert result_dtype(found, found) == result_dtype(found, found, "bfloat16") == BFLOAT16
assert result_dtype(found, found, "float32") == result_dtype(found, np.dtype("f4")) == np.float32
assert (dtype_name(found), found.itemsize) == ("bfloat16", 2)
assert (matmul(np.ones((2, 2)), np.ones((2, 2)), device="cpu") == 2).all()
"""


@pytest.mark.skipif(SIMULATOR, reason="the simulator has no arrays of other libraries")
def test_pytorch_tensors_need_no_ml_dtypes() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_ML_DTYPES], check=True)


def test_is_known_by_its_name() -> None:
    assert [is_bfloat16(dtype) for dtype in (BFLOAT16, TorchName("bfloat16"), "bfloat16")] == [True] * 3
    assert not any(is_bfloat16(dtype) for dtype in (None, np.dtype("V2"), np.dtype("f2"), TorchName("half")))


@pytest.mark.simulator
def test_the_simulator_multiplies_bits(rng: np.random.Generator) -> None:
    a, b = naive.numbers(rng, (9, 40), BFLOAT16), naive.numbers(rng, (40, 11), BFLOAT16)
    on_device = cuda.to_device(a), cuda.to_device(b)
    assert kernel_name(*on_device) == "tiled"
    found = matmul(*on_device).copy_to_host()
    assert found.dtype == BFLOAT16
    naive.assert_product(found, a, b)
    np.testing.assert_array_equal(matmul(a, b, device="cuda").view("u2"), found.view("u2"))
    wide = matmul(*on_device, dtype="float32").copy_to_host()
    assert wide.dtype == np.float32
    naive.assert_product(wide, a, b)
    assert_same(found, wide.astype(BFLOAT16))


@pytest.mark.simulator
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's scalars warn where the hardware does not
def test_nan_and_infinity_come_through() -> None:
    a, b = np.ones((5, 5), BFLOAT16), np.ones((5, 5), BFLOAT16)
    a[4, 4], b[0, 1] = np.nan, np.inf
    found = matmul(cuda.to_device(a), cuda.to_device(b)).copy_to_host()
    assert_same(found, (a.astype("f4") @ b.astype("f4")).astype(BFLOAT16))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("side", "least"), [(96, "tiled"), (192, "bfloat16-wgmma"), (1024, "bfloat16-wgmma")]
)
@pytest.mark.parametrize("transpose", [False, True])
def test_pytorch_tensors(side: int, least: str, transpose: bool) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(side)
    a, b = (torch.randn(side, side + 8, device="cuda").to(torch.bfloat16) for _ in range(2))
    a, b = (a, b.t()) if not transpose else (a.t(), b)
    exact = a.double() @ b.double()
    if capability(current_device()) == (9, 0):
        assert kernel_name(a, b) == least
    found = matmul(a, b)
    assert (type(found), found.dtype, found.device) == (torch.Tensor, torch.bfloat16, a.device)
    scale = (a.double().abs() @ b.double().abs()).cpu().numpy()
    allowed = naive.tolerance(side + 8, BFLOAT16, scale)
    torch.cuda.synchronize()
    assert (np.abs((found.double() - exact).cpu().numpy()) <= allowed).all()
    out = torch.full_like(found, float("nan"))
    assert matmul(a, b, out) is out
    torch.cuda.synchronize()
    assert torch.equal(out, found)
    wide = torch.as_tensor(matmul(a, b, dtype="float32"), device="cuda")
    torch.cuda.synchronize()
    assert wide.dtype == torch.float32
    assert (np.abs((wide.double() - exact).cpu().numpy()) <= naive.tolerance(side + 8, "f4", scale)).all()


@pytest.mark.gpu
def test_numpy_arrays_go_to_the_gpu_and_back(rng: np.random.Generator) -> None:
    for side in (50, 700):
        a, b = naive.numbers(rng, (side, side), BFLOAT16), naive.numbers(rng, (side, side), BFLOAT16)
        found = matmul(a, b, device="cuda")
        assert found.dtype == BFLOAT16
        again = np.full((side, side), 0, BFLOAT16)
        matmul(a, b, again, accumulate=True, device="cuda")
        np.testing.assert_array_equal(again, found)
        wide_a, wide_b = a.astype("f8"), b.astype("f8")
        allowed = naive.tolerance(side, BFLOAT16, np.abs(wide_a) @ np.abs(wide_b))
        assert (np.abs(found.astype("f8") - wide_a @ wide_b) <= allowed).all()
