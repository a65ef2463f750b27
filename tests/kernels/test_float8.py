"""float8: its numbers in a kernel and on the host, what it is multiplied by, and arrays of it from other libraries."""

from __future__ import annotations

import itertools
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
from tilewright.kernels.bfloat16 import BFLOAT16, dtype_name
from tilewright.kernels.elements import reading
from tilewright.kernels.errors import DTypeError, OutputError
from tilewright.kernels.float8 import E4M3, E5M2, FLOAT8, NAMES, float8_of, numbers_of, to_float32
from tilewright.kernels.gemm.base import NUMPY_ELEMENTS
from tilewright.kernels.gemm.check import result_dtype
from tilewright.kernels.gemm.product import kernel_name
from tilewright.kernels.gpu.device_array import as_device_array, memory_of
from tilewright.kernels.gpu.device_choice import SIMULATOR, capability, current_device

FLOAT32 = np.dtype(np.float32)
PAIRS = list(itertools.product(FLOAT8, repeat=2))


def every(kind: np.dtype) -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view(kind)


@pytest.mark.parametrize("kind", FLOAT8, ids=dtype_name)
def test_every_code_on_the_host_is_the_number_of_ml_dtypes(kind: np.dtype) -> None:
    np.testing.assert_array_equal(numbers_of(kind), every(kind).astype(np.float32))
    square = every(kind).reshape(16, 16).T[::2]
    np.testing.assert_array_equal(to_float32(square), square.astype(np.float32))


@pytest.mark.parametrize("kind", FLOAT8, ids=dtype_name)
def test_float16_holds_every_number(kind: np.dtype) -> None:
    numbers = numbers_of(kind)
    np.testing.assert_array_equal(numbers.astype(np.float16).astype(np.float32), numbers)


def widened(kind: np.dtype) -> np.ndarray:
    read = reading(kind, FLOAT32)

    @cuda.jit
    def widen(source: Any, target: Any) -> None:
        i = cuda.grid(1)
        if i < source.size:
            target[i] = read(source[i])

    target = cuda.to_device(np.zeros(256, np.float32))
    widen[2, 128](cuda.to_device(every(kind).view(np.uint8)), target)
    return target.copy_to_host()


@pytest.mark.simulator
@pytest.mark.parametrize("kind", FLOAT8, ids=dtype_name)
def test_every_code_in_a_kernel(kind: np.dtype) -> None:
    np.testing.assert_array_equal(widened(kind), every(kind).astype(np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FLOAT8, ids=dtype_name)
def test_every_code_in_a_kernel_on_a_gpu(kind: np.dtype) -> None:
    found, expected = widened(kind), every(kind).astype(np.float32)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found)[expected == 0], np.signbit(expected)[expected == 0])


def test_names() -> None:
    assert [np.dtype(getattr(ml_dtypes, name)) for name in NAMES] == list(FLOAT8)
    assert [dtype_name(kind) for kind in FLOAT8] == list(NAMES)
    assert [float8_of(name) for name in ("torch.float8_e5m2", "float8_e4m3fn", E5M2)] == [E5M2, E4M3, E5M2]
    others = (None, "torch.float8_e4m3fnuz", np.dtype("f2"), np.uint8, np.dtype("V1"))
    assert not any(float8_of(other) for other in others)


def test_products_are_float32_and_of_float8_alone() -> None:
    for a, b in PAIRS:
        assert (
            result_dtype(a, b) == result_dtype(a, b, "float32") == result_dtype(a, b, np.float32) == FLOAT32
        )
        for wanted in ("f2", "f8", "bfloat16", "i4", "c8"):
            with pytest.raises(DTypeError, match="is not what float8 products have: they are float32"):
                result_dtype(a, b, wanted)
    for narrow, other in itertools.product(FLOAT8, (*NUMPY_ELEMENTS, BFLOAT16)):
        with pytest.raises(DTypeError, match=r"and b float8_\w+; float8 is multiplied by .*convert b first"):
            result_dtype(other, narrow)
        with pytest.raises(DTypeError, match=f"and b {dtype_name(other)}; float8 .*convert a first"):
            result_dtype(narrow, other)
        with pytest.raises(
            DTypeError, match=f"b holds {dtype_name(narrow)}, which cannot be .* makes products"
        ):
            result_dtype(FLOAT32, narrow, None, ("a", "b"), NUMPY_ELEMENTS)  # as pipelines ask


OTHERS = ("float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz", "float8_e3m4", "float8_e8m0fnu")


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_are_refused_with_those_that_are_not(name: str) -> None:
    other = np.ones((2, 2), getattr(ml_dtypes, name))
    with pytest.raises(DTypeError, match=f"a holds {name}, .*only float8_e4m3fn and float8_e5m2: convert it"):
        matmul(other, np.ones((2, 2), E4M3), device="cpu")


def test_mistakes_are_named() -> None:
    a = np.ones((2, 2), E4M3)
    with pytest.raises(DTypeError, match="dtype=float8_e5m2 cannot be a product's type"):
        matmul(a, a, dtype="float8_e5m2", device="cpu")
    with pytest.raises(OutputError, match="out holds float8_e4m3fn, the product is float32"):
        matmul(a, a, np.empty((2, 2), E4M3), device="cpu")
    for kind in FLOAT8:  # the code of neither type says anything to NumPy
        memory = np.zeros(64, np.uint8)
        part, out = memory[:16].view(kind).reshape(4, 4), memory[:64].view(np.float32).reshape(4, 4)
        with pytest.raises(OutputError, match="out overlaps a in memory"):
            matmul(part, a.astype(kind)[:1].repeat(4, 0).repeat(2, 1), out, device="cpu")


@given(
    shape=st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 40)),
    pair=st.sampled_from(PAIRS),
    layouts=st.tuples(*[st.sampled_from(sorted(naive.LAYOUTS))] * 2),
    accumulate=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_on_a_cpu_it_is_the_float32_product(
    shape: tuple[int, int, int], pair: Any, layouts: tuple[str, str], accumulate: bool, seed: int
) -> None:
    """Of small integers, which float32 adds up exactly."""
    m, n, k = shape
    rng = np.random.default_rng(seed)
    a, b = (
        naive.LAYOUTS[layout](rng.integers(-9, 10, size).astype(kind))
        for layout, size, kind in zip(layouts, ((m, k), (k, n)), pair, strict=True)
    )
    exact = (a.astype("f8") @ b.astype("f8")).astype("f4")
    out = np.full((m, n), 3, np.float32)
    found = matmul(a, b, out, accumulate=accumulate, device="cpu")
    np.testing.assert_array_equal(found, exact + 3 if accumulate else exact)


def outer(a: np.dtype, b: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every code of two kinds, and all their products."""
    left, right = every(a).reshape(256, 1), every(b).reshape(1, 256)
    with np.errstate(invalid="ignore"):
        return left, right, left.astype("f4") * right.astype("f4")


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_every_pair_of_codes_on_a_cpu(a: np.dtype, b: np.dtype) -> None:
    left, right, expected = outer(a, b)
    np.testing.assert_array_equal(matmul(left, right, device="cpu"), expected)


@pytest.mark.simulator
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's scalars warn where the hardware does not
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_the_simulator_multiplies_codes(a: np.dtype, b: np.dtype, rng: np.random.Generator) -> None:
    left, right, expected = outer(a, b)
    left, right, expected = left[::7], right[:, ::5], expected[::7, ::5]
    np.testing.assert_array_equal(matmul(left, right, device="cuda"), expected)
    x, y = naive.numbers(rng, (9, 40), a), naive.numbers(rng, (40, 11), b)
    on_device = cuda.to_device(x), cuda.to_device(y)
    assert kernel_name(*on_device) == "tiled"
    found = matmul(*on_device).copy_to_host()
    assert found.dtype == np.float32
    naive.assert_product(found, x, y)


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


@pytest.mark.skipif(SIMULATOR, reason="the simulator has no arrays of other libraries")
@pytest.mark.parametrize(
    ("typestr", "dtype", "read_as"),
    [
        ("<V1", E4M3, E4M3),
        ("<f1", E5M2, E5M2),
        ("|V1", "torch.float8_e5m2", E5M2),
        ("|u1", "torch.float8_e4m3fn", E4M3),
        ("|V1", np.dtype("V1"), np.dtype("V1")),
        ("|u1", np.dtype("u1"), np.dtype("u1")),
    ],
)
def test_other_libraries_arrays_are_asked_for_their_dtype(typestr: str, dtype: Any, read_as: Any) -> None:
    found = as_device_array(Exported(typestr, dtype))
    assert (found.dtype, found.strides) == (read_as, (4, 1))


WITHOUT_ML_DTYPES = """
import sys
sys.modules["ml_dtypes"] = None  # as if it were not installed
import types
import numpy as np
from tilewright.kernels import matmul
from tilewright.kernels.bfloat16 import dtype_name
from tilewright.kernels.errors import DTypeError
from tilewright.kernels.float8 import E4M3, E5M2
from tilewright.kernels.gemm.check import result_dtype
from tilewright.kernels.gpu.device_array import as_device_array, memory_of

class Tensor:  # as PyTorch's, which has no code for float8
    def __init__(self, dtype):
        self.dtype = dtype
    def view(self, dtype):
        return Tensor(dtype)
    @property
    def __cuda_array_interface__(self):
        typestr = {"torch.uint8": "|u1"}[self.dtype]
        return {"typestr": typestr, "shape": (3, 4), "data": (1 << 20, False), "version": 2}

Tensor.__module__ = "torch"
sys.modules["torch"] = types.SimpleNamespace(uint8="torch.uint8")
for name, kind in (("float8_e4m3fn", E4M3), ("float8_e5m2", E5M2)):
    tensor = Tensor("torch." + name)
    assert memory_of(tensor).dtype == as_device_array(tensor).dtype == kind
    assert as_device_array(tensor).strides == (4, 1)
    assert (dtype_name(kind), kind.itemsize) == (name, 1)
try:
    memory_of(Tensor("torch.float8_e8m0fnu"))
except DTypeError as error:
    assert "float8_e8m0fnu cannot be multiplied" in str(error) and "float8_e5m2 are allowed" in str(error), error
else:
    raise AssertionError("a kind that cannot be multiplied was taken")
try:
    memory_of(Tensor("torch.complex32"))
except KeyError:
    pass
assert E4M3 != E5M2 and result_dtype(E4M3, E5M2) == np.float32
codes = np.array([[0x38, 0xC0], [0x7F, 0x08]], np.uint8)  # 1, -2, NaN, 2**-6
found = matmul(codes.view(E4M3), codes.view(E4M3), device="cpu")
np.testing.assert_array_equal(found, [[np.nan, -2 - 2 * 2.0**-6], [np.nan, np.nan]])
"""


@pytest.mark.skipif(SIMULATOR, reason="the simulator has no arrays of other libraries")
def test_pytorch_tensors_need_no_ml_dtypes() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_ML_DTYPES], check=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("side", "chosen"), [(96, "tiled"), (1040, "float8-wgmma"), (1041, "float8-wgmma")])
@pytest.mark.parametrize("transpose", [False, True])
def test_pytorch_tensors(side: int, chosen: str, transpose: bool) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(side)
    kinds = torch.float8_e4m3fn, torch.float8_e5m2
    a, b = (torch.randn(side, side + 8, device="cuda").to(kind) for kind in kinds)
    a, b = (a, b.t()) if not transpose else (a.t(), b)
    if capability(current_device()) == (9, 0):
        assert kernel_name(a, b) == chosen
    exact = (a.double() @ b.double()).cpu().numpy()
    scale = (a.double().abs() @ b.double().abs()).cpu().numpy()
    found = matmul(a, b).copy_to_host()
    allowed = naive.tolerance(a.shape[1], "f4", scale, float8=True)
    assert (np.abs(found - exact) <= allowed).all()
    out = torch.full((a.shape[0], b.shape[1]), float("nan"), device="cuda")
    assert matmul(a, b, out) is out
    np.testing.assert_array_equal(out.cpu().numpy(), found)
    assert memory_of(a).pointer == a.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("side", [50, 700])
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_numpy_arrays_go_to_the_gpu_and_back(
    side: int, a: np.dtype, b: np.dtype, rng: np.random.Generator
) -> None:
    """Of small integers, whose sums are exact."""
    x, y = (rng.integers(-3, 4, (side, side)).astype(kind) for kind in (a, b))
    found = matmul(x, y, device="cuda")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, x.astype("f4") @ y.astype("f4"))
    matmul(x, y, found, accumulate=True, device="cuda")
    np.testing.assert_array_equal(found, 2 * (x.astype("f4") @ y.astype("f4")))
