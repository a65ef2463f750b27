"""Elements that do not lie at multiples of their size: refused on a GPU, where reading them ends the process's context,
and multiplied on a CPU."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import pytest

from tests.kernels import naive
from tests.kernels.gpu import fake_gpu
from tests.kernels.gpu.fake_gpu import Array
from tilewright.kernels import dot, histogram, matmul
from tilewright.kernels.bfloat16 import BFLOAT16, dtype_name
from tilewright.kernels.errors import ShapeError
from tilewright.kernels.gemm.base import ELEMENTS
from tilewright.kernels.gpu.device_choice import SIMULATOR

pytestmark = pytest.mark.skipif(SIMULATOR, reason="its device arrays are NumPy's")

PLACES = {"a": 0x700000000000, "b": 0x710000000000, "out": 0x720000000000}
SIDE = 24


def needed(dtype: np.dtype) -> int:
    """What CUDA asks of an element; of complex numbers kernels read the parts."""
    return dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize


WIDE = [dtype for dtype in ELEMENTS if dtype != BFLOAT16 and needed(dtype) > 1]


@pytest.mark.parametrize("dtype", WIDE, ids=dtype_name)
@pytest.mark.parametrize("moved", list(PLACES))
def test_a_misaligned_matrix_on_a_gpu_is_refused(
    moved: str, dtype: np.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = fake_gpu.install(monkeypatch)
    for shift in range(1, 2 * needed(dtype)):
        arrays = [
            Array(place + shift * (name == moved), (SIDE, SIDE), dtype.str) for name, place in PLACES.items()
        ]
        if shift == needed(dtype):
            matmul(*arrays)
            assert gpu.take(), "as aligned as it has to be"
            continue
        with pytest.raises(
            ShapeError, match=f"{moved} begins {shift % needed(dtype)} bytes behind"
        ) as raised:
            matmul(*arrays)
        for words in (str(dtype), f"multiples of {needed(dtype)} bytes", "copy"):
            assert words in str(raised.value)
    assert not gpu.take()


def test_without_elements_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.install(monkeypatch)
    matmul(
        Array(PLACES["a"] + 1, (0, 3), "<f4"), Array(PLACES["b"] + 1, (3, 0), "<f4"), Array(1, (0, 0), "<f4")
    )


@pytest.mark.parametrize(
    ("dtype", "pointer", "strides", "says"),
    [
        ("<f4", 0x700000000002, None, "begins 2 bytes behind a multiple of 4"),
        ("<f8", 0x700000000004, None, "begins 4 bytes behind a multiple of 8"),
        ("<i2", 0x700000000001, None, "begins 1 bytes behind a multiple of 2"),
        ("<c16", 0x700000000004, None, "begins 4 bytes behind a multiple of 8"),
        ("<f4", 0x700000000000, (5,), "strides (5,) bytes"),
        ("<f8", 0x700000000000, (12,), "strides (12,) bytes"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_misaligned_vector_on_a_gpu_is_refused(
    place: int, dtype: str, pointer: int, strides: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu.install(monkeypatch)
    # The package's name ``dot`` is the function, so the module is reached by its full name.
    monkeypatch.setattr(sys.modules["tilewright.kernels.dots.api"], "resolve_device", lambda *_, **__: "cuda")
    vectors = [Array(0x710000000000, (9,), dtype), Array(0x710000000000, (9,), dtype)]
    vectors[place] = Array(pointer, (9,), dtype, strides)
    with pytest.raises(ShapeError) as raised:
        dot(*vectors)
    assert str(raised.value).startswith("xy"[place])
    assert says in str(raised.value)
    assert "copy" in str(raised.value)


def unaligned(values: np.ndarray, shift: int = 1) -> np.ndarray:
    """A copy of a C-ordered array, ``shift`` bytes behind where its elements belong."""
    memory = np.zeros(values.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 32 + shift
    moved = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    moved[...] = values
    assert moved.flags.aligned == (shift % needed(values.dtype) == 0)
    return moved


@pytest.mark.parametrize(
    "dtype",
    # Loops that split integers are compiled for each dtype of them.
    [
        pytest.param(dtype, marks=pytest.mark.slow if dtype.str[1:] in ("i2", "u1", "u2", "u4") else ())
        for dtype in ELEMENTS
    ],
    ids=dtype_name,
)
def test_unaligned_matrices_in_host_memory(dtype: np.dtype, rng: np.random.Generator) -> None:
    a, b = naive.numbers(rng, (70, 50), dtype), naive.numbers(rng, (50, 60), dtype)
    before = naive.numbers(rng, (70, 60), dtype)
    for accumulate in (False, True):
        out = before.copy()
        matmul(a, b, out, accumulate=accumulate, device="cpu")
        moved = unaligned(before)
        assert matmul(unaligned(a), unaligned(b), moved, accumulate=accumulate, device="cpu") is moved
        if dtype.kind in "iu":
            np.testing.assert_array_equal(moved, out)
        else:
            naive.assert_product(moved, a, b, before if accumulate else None)


@pytest.mark.parametrize("dtype", [dtype for dtype in ELEMENTS if dtype != BFLOAT16], ids=dtype_name)
def test_unaligned_vectors_in_host_memory(dtype: np.dtype, rng: np.random.Generator) -> None:
    x, y = (naive.numbers(rng, (1, 20_000), dtype)[0] for _ in range(2))
    for shift in (1, 3):
        found, expected = dot(unaligned(x, shift), unaligned(y, shift), device="cpu"), dot(x, y, device="cpu")
        np.testing.assert_allclose(found, expected, rtol=1e-5 if dtype.kind in "fc" else 0)


def test_unaligned_offsets_and_counts_in_host_memory() -> None:
    data = np.frombuffer(b"an apple or two", np.uint8)
    offsets = np.array([0, 3, 3, 15])
    counts = unaligned(np.zeros((3, 256), np.int64))
    histogram(data, offsets=unaligned(offsets), out=counts, device="cpu")
    np.testing.assert_array_equal(counts, histogram(data, offsets=offsets, device="cpu"))


# --- On a GPU --------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", WIDE, ids=dtype_name)
def test_the_context_survives(dtype: np.dtype, rng: np.random.Generator) -> None:
    a, b = naive.numbers(rng, (80, 90), dtype), naive.numbers(rng, (90, 100), dtype)
    moved_a, moved_b, moved_out = (unaligned(x) for x in (a, b, np.zeros((80, 100), dtype)))
    on_a, on_b, on_out = (naive.device_twin(x)[0] for x in (a, b, np.zeros((80, 100), dtype)))
    for name, arguments in {
        "a": (naive.device_twin(moved_a)[0], on_b, on_out),
        "b": (on_a, naive.device_twin(moved_b)[0], on_out),
        "out": (on_a, on_b, naive.device_twin(moved_out)[0]),
    }.items():
        with pytest.raises(ShapeError, match=f"{name} begins"):
            matmul(*arguments)
    vector, _ = naive.device_twin(unaligned(a[0].copy()))
    with pytest.raises(ShapeError, match="x begins"):
        dot(vector, naive.device_twin(a[0].copy())[0])
    matmul(on_a, on_b, on_out)
    naive.assert_product(on_out.copy_to_host(), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["c8", "c16"])
def test_complex_numbers_between_multiples_of_their_size(dtype: str, rng: np.random.Generator) -> None:
    """By every way that a matrix may be shaped: thin, tiled, by rows and by columns."""
    half = np.dtype(dtype).itemsize // 2
    for (m, n, k), order in itertools.product(
        [(80, 90, 100), (3, 500, 64), (500, 1, 700), (1, 1, 9)], ["C", "F"]
    ):
        a, b = naive.numbers(rng, (m, k), dtype), naive.numbers(rng, (k, n), dtype)
        for shifts in ((half, 0, 0), (0, half, 0), (0, 0, half), (half, half, half)):
            twins = []
            for values, shift in zip((a, b, np.zeros((m, n), dtype)), shifts, strict=True):
                held = unaligned(np.ascontiguousarray(values if order == "C" else values.T), shift)
                twins.append(naive.device_twin(held if order == "C" else held.T))
            matmul(*(twin for twin, _ in twins))
            naive.assert_product(twins[2][1](), a, b)
    x, y = (naive.numbers(rng, (1, 3000), dtype)[0] for _ in range(2))
    found = dot(naive.device_twin(unaligned(x, half))[0], naive.device_twin(y)[0]).copy_to_host()[()]
    np.testing.assert_allclose(found, np.vdot(x, y), rtol=1e-4)
