"""float16 and bfloat16 products are added up in float32 and rounded once, however k and the sides are cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numba import cuda

from tilewright.kernels import matmul
from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.gemm.cores.repitch import Matrix
from tilewright.kernels.gemm.hopper import rounded_sums
from tilewright.kernels.gpu.device_array import to_device, to_host
from tilewright.kernels.gpu.device_choice import SIMULATOR

FLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
NARROW = [pytest.param(FLOAT16, id="float16"), pytest.param(BFLOAT16, id="bfloat16")]
in_simulator = pytest.mark.simulator if SIMULATOR else pytest.mark.gpu

if not SIMULATOR:
    from numba.cuda import types

    from tilewright.kernels.gemm.hopper import float_operand, half_tensor_core
    from tilewright.kernels.gemm.hopper.float_operand import FloatOperand
    from tilewright.kernels.gemm.hopper.wgmma_config import Config
    from tilewright.kernels.gemm.hopper.wgmma_launch import Output, Planes

    KERNELS = {FLOAT16: half_tensor_core.HALF, BFLOAT16: half_tensor_core.BFLOAT}

no_device = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")


class _View:
    def __init__(self, address: int, shape: tuple[int, int], strides: tuple[int, int], dtype: str) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": dtype,
            "version": 3,
        }


def seen(address: int, shape: tuple[int, int], strides: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Host memory as a matrix."""
    bits = np.asarray(_View(address, shape, strides, f"<u{dtype.itemsize}"))
    return bits.view(dtype)


def placed(values: np.ndarray, order: str, spare: int = 0) -> tuple[Matrix, np.ndarray]:
    """A matrix whose lines, rows or columns, lie ``spare`` elements apart, from a multiple of 128 bytes on; and its
    memory."""
    lines = values if order == "rows" else values.T
    size = values.itemsize
    pitch = (lines.shape[1] + spare) * size
    memory = np.zeros(lines.shape[0] * pitch + 128, np.uint8)
    start = memory.ctypes.data + -memory.ctypes.data % 128
    strides = (pitch, size) if order == "rows" else (size, pitch)
    seen(start, values.shape, strides, values.dtype)[...] = values
    return Matrix(start, values.shape, strides, values.dtype), memory


class Hopper:
    """The tensor cores' part in NumPy, on host memory: what is launched, copied, and borrowed."""

    def __init__(self) -> None:
        self.depths: list[int] = []
        self.copied: dict[int, list[FloatOperand]] = {}
        """What went to each place in scratch memory."""
        self.rounded = self.borrowed = 0

    @contextmanager
    def borrow(self, nbytes: int, stream: Any) -> Iterator[int]:
        self.borrowed = nbytes
        memory = np.full(nbytes + 128, 0xFF, np.uint8)  # NaN
        yield memory.ctypes.data + -memory.ctypes.data % 128

    def make_planes(self, operand: FloatOperand, form: str, kind: str, target: int, stream: Any) -> Planes:
        self.copied.setdefault(target, []).append(operand)
        size = operand.dtype.itemsize
        lines, width = operand.outer, operand.depth
        strides = operand.outer_stride * size, operand.k_stride * size
        if not operand.k_major:
            lines, width, strides = width, lines, strides[::-1]
        nbytes = float_operand.line_nbytes(width, form)
        source = seen(operand.address, (lines, width), strides, operand.dtype)
        seen(target, (lines, width), (nbytes, size), operand.dtype)[...] = source
        return Planes(target, width, lines, 1, nbytes, lines * nbytes, kind)

    def launch(
        self, config: Config, a: Planes, b: Planes, output: Output, depth: int, add: bool, stream: Any
    ) -> None:
        dtype = FLOAT16 if config.kind_a == "f16" else BFLOAT16
        c_dtype = FLOAT32 if config.c_type == types.float32 else dtype
        assert output.c_type == config.c_type
        left, right = (
            seen(side.address, (side.lines, side.width), (side.line_nbytes, 2), dtype).astype(FLOAT32)
            for side in (a, b)
        )
        left, right = left.T if config.m_major_a else left, right if config.n_major_b else right.T
        assert left.shape[1] == right.shape[0] == depth
        strides = output.row_stride * c_dtype.itemsize, output.column_stride * c_dtype.itemsize
        c = seen(output.address, (output.rows, output.columns), strides, c_dtype)
        with np.errstate(all="ignore"):
            c[...] = (left @ right + (c.astype(FLOAT32) if add else 0)).astype(c_dtype)
        self.depths.append(depth)

    def round_sums(self, sums: Matrix, c: Matrix, accumulate: bool, stream: Any) -> None:
        self.rounded += 1
        source, target = (
            seen(matrix.pointer, matrix.shape, matrix.strides, matrix.dtype) for matrix in (sums, c)
        )
        with np.errstate(over="ignore"):
            target[...] = (source + (target.astype(FLOAT32) if accumulate else 0)).astype(c.dtype)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Hopper:
    device = Hopper()
    stand_ins = {
        "borrowed": device.borrow,
        "make_planes": device.make_planes,
        "launch_product": device.launch,
        "round_sums": device.round_sums,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(half_tensor_core, name, stand_in)
    return device


def product(
    a: np.ndarray, b: np.ndarray, before: np.ndarray, layouts: tuple[str, str, str], accumulate: bool
) -> np.ndarray:
    """The product by the rung of its type; of a layout's words the second, if any, says that lines are not aligned."""
    matrices, kept = [], []
    for values, layout in zip((a, b, before), layouts, strict=True):
        order, _, odd = layout.partition(" ")
        matrix, memory = placed(values, order, spare=int(odd == "odd"))
        matrices.append(matrix)
        kept.append(memory)
    KERNELS[a.dtype].launch(*matrices, accumulate, 0)
    c = matrices[2]
    return seen(c.pointer, c.shape, c.strides, c.dtype).copy()


def rounded(a: np.ndarray, b: np.ndarray, before: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The product of integers that float64 and float32 add up exactly."""
    return (a.astype(np.float64) @ b.astype(np.float64) + before).astype(FLOAT32).astype(dtype)


LAYOUTS = [
    ("rows odd", "rows odd", "rows"),
    ("columns odd", "columns odd", "columns"),
    ("columns odd", "rows odd", "rows odd"),
    ("rows odd", "columns", "rows"),
    ("rows", "rows odd", "columns"),
]
WAYS = [
    # m, n, k, bytes of scratch memory, and the lines that make whole depths pay
    pytest.param(1104, 704, 512, 1 << 20, 1024, "whole", id="all of k at once"),
    pytest.param(304, 400, 1504, 1 << 19, 8192, "sums", id="collected"),
]


@pytest.mark.sample(8)
@no_device
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("layouts", LAYOUTS, ids=", ".join)
@pytest.mark.parametrize("accumulate", [False, True], ids=["written", "added"])
@pytest.mark.parametrize(("m", "n", "k", "scratch", "least", "way"), WAYS)
def test_sums_are_rounded_once(
    m: int,
    n: int,
    k: int,
    scratch: int,
    least: int,
    way: str,
    accumulate: bool,
    layouts: tuple[str, str, str],
    dtype: np.dtype,
    hopper: Hopper,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    """Exact in float32, and with many values that neither type holds; partial sums reach half the largest float16."""
    monkeypatch.setattr(float_operand, "PLANES_NBYTES", scratch)
    monkeypatch.setattr(float_operand, "WHOLE_DEPTH_LINES", least)
    a, b = rng.integers(-9, 10, (m, k)), rng.integers(-9, 10, (k, n))
    a[:, : k // 2] += 5
    a[:, k // 2 :] -= 5
    b += 6
    before = rng.integers(-100, 100, (m, n))
    found = product(*(x.astype(dtype) for x in (a, b, before)), layouts, accumulate)
    np.testing.assert_array_equal(found, rounded(a, b, accumulate * before, dtype))
    assert hopper.borrowed <= scratch
    if way == "whole":
        assert set(hopper.depths) == {k}
        assert hopper.rounded == 0
        assert len(hopper.depths) > 1 or layouts[0] == "rows"  # what lies in place leaves room for the other
        left = hopper.copied[min(hopper.copied)]
        assert len(left) == len(set(left)), "a stretch of the left operand is copied once"
    else:
        assert len(hopper.depths) > hopper.rounded > 0


@no_device
def test_partial_sums_that_float16_cannot_hold(hopper: Hopper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_operand, "PLANES_NBYTES", 1 << 19)
    a = np.full((128, 6000), 8, FLOAT16)
    b = np.full((6000, 128), 8, FLOAT16)
    b[3000:] = -8
    b[5999] += 1
    found = product(a, b, np.zeros((128, 128), FLOAT16), ("rows odd", "rows odd", "rows"), False)
    assert (found == 8).all()


def narrow_cut(
    m: int, n: int, k: int, by_rows: bool, by_columns: bool, passing: tuple[bool, bool]
) -> tuple[Any, int]:
    """How the product is cut, and the bytes it borrows."""
    a = Matrix(4096, (m, k), (2 * k, 2) if by_rows else (2, 2 * m), FLOAT16)
    b = Matrix(4096, (k, n), (2, 2 * k) if by_columns else (2 * n, 2), FLOAT16)
    left, right = float_operand.operands(a, b)
    cut = float_operand.cut(left, right, "copy", narrow=True, passing=passing)
    heads = [operand.stretch(0, lines) for operand, lines in zip((left, right), cut.lines, strict=True)]
    nbytes = sum(
        float_operand.planes_nbytes(head, cut.depth, "copy")
        for head, passes in zip(heads, passing, strict=True)
        if passes
    )
    return cut, nbytes + (float_operand.sums_nbytes(cut.lines) if cut.depth < k else 0)


SIDES = st.one_of(st.integers(1, 5000), st.integers(1, 10**7))


@no_device
@given(
    SIDES,
    SIDES,
    SIDES,
    st.booleans(),
    st.booleans(),
    st.sampled_from([(True, True), (True, False), (False, True)]),
)
@example(32769, 32769, 65537, True, False, (True, True))
@example(20001, 20001, 200_001, True, True, (True, False))
@example(64, 2_000_000, 10**6, False, False, (True, True))
def test_scratch_memory_stays_within_what_is_counted(
    m: int, n: int, k: int, by_rows: bool, by_columns: bool, passing: tuple[bool, bool]
) -> None:
    cut, nbytes = narrow_cut(m, n, k, by_rows, by_columns, passing)
    assert nbytes <= float_operand.most_nbytes(m, n, k, "copy") <= float_operand.PLANES_NBYTES
    for side, lines in zip((m, n), cut.lines, strict=True):
        assert lines == side or 0 < lines < side + float_operand.LINES_UNIT
        assert lines == side or lines % float_operand.LINES_UNIT == 0
    assert cut.depth >= min(k, float_operand.LEAST_DEPTH)
    assert cut.depth % float_operand.DEPTH_UNIT == 0


@no_device
def test_how_long_products_are_cut() -> None:
    """By hand: what costs least. Where all of k fits, one operand is copied once, the other a few times."""
    both = (True, True)
    cut, _ = narrow_cut(32769, 32769, 65537, True, False, both)
    assert cut.depth >= 65537
    assert cut.lines == (11008, 3840)
    # Just too large for the scratch memory: only one side is cut.
    cut, _ = narrow_cut(23301, 23301, 23301, True, True, both)
    assert cut.depth >= 23301
    assert cut.lines == (23301, 11776)
    # What lies as the copy engine takes it is not cut.
    cut, _ = narrow_cut(32769, 32768, 65537, True, False, (True, False))
    assert cut.lines[1] == 32768
    assert cut.lines[0] >= 10000
    # k is too long for more than narrow stretches.
    cut, nbytes = narrow_cut(20001, 20001, 200_001, True, False, both)
    assert cut.depth < 200_001
    assert cut.lines == (10240, 10240)
    assert cut.depth > 30_000
    assert nbytes > float_operand.PLANES_NBYTES * 0.9


# --- The kernel that rounds, in the simulator or on a GPU ----------------------------------------------------


@in_simulator
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_rounding(
    dtype: np.dtype, order: Any, accumulate: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    if SIMULATOR:
        monkeypatch.setattr(rounded_sums, "THREADS", 4)
        monkeypatch.setattr(rounded_sums, "EACH", 2)
        rounded_sums._kernel.cache_clear()
    columns = 19 if SIMULATOR else 5000
    sums = (rng.standard_normal((3, columns)) * 1000).astype(FLOAT32)
    sums[1, 2], sums[2, columns - 1] = np.inf, 1e6
    before = rng.standard_normal((3, columns)).astype(dtype)
    c = to_device(np.asarray(before, order=order))
    rounded_sums.round_sums(cuda.to_device(sums), c, accumulate, 0)
    found = np.empty((3, columns), dtype, order=order)
    to_host(c, found)
    if SIMULATOR:
        rounded_sums._kernel.cache_clear()
    added = before.astype(FLOAT32) if accumulate else FLOAT32.type(0)
    np.testing.assert_array_equal(found, (sums + added).astype(dtype))


# --- On a GPU --------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("layouts", [("rows", "rows"), ("columns", "rows"), ("rows", "columns")])
@pytest.mark.parametrize(("m", "n", "k", "scratch", "least", "way"), WAYS)
@pytest.mark.parametrize("accumulate", [False, True], ids=["written", "added"])
def test_long_products_on_a_gpu(
    m: int,
    n: int,
    k: int,
    scratch: int,
    least: int,
    way: str,
    accumulate: bool,
    layouts: tuple[str, str],
    dtype: np.dtype,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    """Unaligned lines; sums are integers that float32 holds exactly, so any further rounding shows."""
    monkeypatch.setattr(float_operand, "PLANES_NBYTES", scratch)
    monkeypatch.setattr(float_operand, "WHOLE_DEPTH_LINES", least)
    m, n, k = m + 1, n + 1, k - 1
    a, b = rng.integers(-4, 5, (m, k)), rng.integers(-4, 5, (k, n))
    a[:, : k // 2] += 5
    a[:, k // 2 :] -= 5
    b += 6
    before = rng.integers(-100, 100, (m, n))
    on_a, on_b = (
        to_device(np.asarray(x.astype(dtype), order="C" if order == "rows" else "F"))
        for x, order in zip((a, b), layouts, strict=True)
    )
    c = to_device(before.astype(dtype))
    KERNELS[dtype].launch(on_a, on_b, c, accumulate, 0)
    found = np.empty((m, n), dtype)
    to_host(c, found)
    np.testing.assert_array_equal(found, rounded(a, b, accumulate * before, dtype))


@pytest.mark.gpu
def test_a_long_product_of_the_public_function() -> None:
    """Unaligned lines of more than scratch memory holds. The first half alone would be infinite in float16."""
    m, n, k = 513, 515, 2_100_001
    a, b = np.ones((m, k), FLOAT16), np.empty((k, n), FLOAT16)
    b[: k // 2], b[k // 2 :], b[k - 1] = 0.125, -0.125, 1
    found = matmul(to_device(a), to_device(b)).copy_to_host()
    np.testing.assert_array_equal(found, np.ones((m, n), FLOAT16))
