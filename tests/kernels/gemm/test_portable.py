"""The portable kernels in the simulator, with blocks so small that little data crosses many of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import naive
from tests.sampling import examples
from tilewright.kernels import matmul
from tilewright.kernels.gemm.base import GemmKernel
from tilewright.kernels.gemm.ladder import global_memory, tiled
from tilewright.kernels.gemm.product import describe, kernel_name
from tilewright.kernels.gemm.select import ladder
from tilewright.kernels.gpu.launch import CUDATimer

pytestmark = [
    pytest.mark.simulator,
    # Python runs the kernels here, and NumPy's scalars warn where the hardware wraps or overflows.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
PORTABLE = [global_memory.GLOBAL_MEMORY, tiled.TILED]
layouts = st.sampled_from(sorted(naive.LAYOUTS))


@pytest.fixture(autouse=True)
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "TILE", tiled.Tile(side=4, rows_per_thread=2))
    monkeypatch.setattr(global_memory, "BLOCK", (4, 2))


def launch_on(
    kernel: GemmKernel, a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool = False
) -> np.ndarray:
    arrays: list[Any] = [naive.device_twin(array) for array in (a, b, out)]
    on_device = [device for device, _ in arrays]
    assert kernel.supports(describe(*on_device, accumulate=accumulate))
    kernel.launch(*on_device, accumulate, 0)
    found: np.ndarray = arrays[2][1]()
    return found


def test_the_simulator_offers_only_portable_kernels() -> None:
    assert [kernel.name for kernel in ladder()] == ["tiled", "global-memory"]
    assert kernel_name(np.ones((2, 2)), np.ones((2, 2))) == "tiled"


@pytest.mark.parametrize("kernel", PORTABLE, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", naive.DTYPES)
def test_every_dtype(kernel: GemmKernel, dtype: str, rng: np.random.Generator) -> None:
    a, b = naive.numbers(rng, (5, 7), dtype), naive.numbers(rng, (7, 6), dtype)
    poison = np.full((5, 6), 99, dtype)
    naive.assert_product(launch_on(kernel, a, b, poison), a, b)


@pytest.mark.parametrize("kernel", PORTABLE, ids=lambda kernel: kernel.name)
@settings(max_examples=examples(15))
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    lie=st.tuples(layouts, layouts, layouts),
    accumulate=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_and_layout(
    kernel: GemmKernel, shape: tuple[int, int, int], lie: tuple[str, str, str], accumulate: bool, seed: int
) -> None:
    m, n, k = shape
    rng = np.random.default_rng(seed)
    a, b, before = (rng.integers(-9, 9, size).astype("i4") for size in ((m, k), (k, n), (m, n)))
    out = naive.LAYOUTS[lie[2]](before)
    found = launch_on(kernel, naive.LAYOUTS[lie[0]](a), naive.LAYOUTS[lie[1]](b), out, accumulate)
    naive.assert_product(np.array(found), a, b, before if accumulate else None)
    naive.assert_surroundings_kept(found)


@settings(max_examples=10)
@given(
    shape=st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)),
    transpose=st.tuples(st.booleans(), st.booleans()),
    accumulate=st.booleans(),
    dtypes=st.tuples(st.sampled_from(["i1", "u2", "f4"]), st.sampled_from(["i1", "i4", "f8"])),
)
def test_numpy_arrays_through_the_public_product(
    shape: tuple[int, int, int], transpose: tuple[bool, bool], accumulate: bool, dtypes: tuple[str, str]
) -> None:
    m, n, k = shape
    rng = np.random.default_rng(m + 10 * n + 100 * k)
    a, b = rng.integers(0, 5, (m, k)).astype(dtypes[0]), rng.integers(0, 5, (k, n)).astype(dtypes[1])
    out = np.full((m, n), 3, np.result_type(a, b), order="F")
    before = out.copy()
    matmul(
        a.T.copy() if transpose[0] else a,
        b.T.copy() if transpose[1] else b,
        out,
        accumulate=accumulate,
        transpose_a=transpose[0],
        transpose_b=transpose[1],
        device="cuda",
    )
    exact = naive.matmul(a, b).astype(out.dtype)
    np.testing.assert_array_equal(out, exact + before if accumulate else exact)


def test_device_arrays_stay_on_the_device() -> None:
    from numba import cuda

    a = np.arange(12.0).reshape(3, 4)
    found = matmul(cuda.to_device(a), cuda.to_device(a), transpose_b=True)
    assert type(found) is type(cuda.to_device(a))
    np.testing.assert_array_equal(found.copy_to_host(), a @ a.T)


def test_nan_and_infinity_do_not_leak_over_the_edge() -> None:
    """A ragged tile is filled up with zeros on both sides: a NaN next to the edge must not meet them."""
    a, b = np.ones((5, 5), "f4"), np.ones((5, 5), "f4")
    a[4, 4], b[0, 1] = np.nan, np.inf
    found = launch_on(tiled.TILED, a, b, np.empty((5, 5), "f4"))
    np.testing.assert_array_equal(found, a @ b)


def test_the_timer_runs_here_too() -> None:
    with CUDATimer() as timer:
        matmul(np.ones((2, 2)), np.ones((2, 2)), device="cuda")
    assert timer.seconds > 0
