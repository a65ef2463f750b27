"""64-bit integers by three multiplications: the whole kernel thread by thread, and the instructions it becomes."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.kernels.gemm import lane_by_lane
from tests.kernels.gemm.lane_by_lane import INTEGER_TYPES, _copy, _current
from tests.kernels.gemm.machine_code import assemble, assert_no_spills
from tilewright.kernels.gpu.device_choice import SIMULATOR

if SIMULATOR:
    pytest.skip("the kernel copies asynchronously, which the simulator cannot", allow_module_level=True)

from numba import cuda

from tilewright.kernels.gemm.cores import register_arithmetic, warp_tiled
from tilewright.kernels.gemm.cores import warp_tiled_launch as launching
from tilewright.kernels.gemm.cores.warp_tiled_cut import candidates
from tilewright.kernels.gemm.cores.warp_tiling import (
    ALONG_K,
    ALONG_OUTER,
    LAYOUTS,
    VECTOR,
    Tiling,
    shared_nbytes,
)
from tilewright.kernels.gemm.exact import wide_integer

UNSIGNED = np.dtype("u8")
ONE_WARP = Tiling(16, 16, 8, 16, 16, 8, 3)
TWO_WARPS = Tiling(32, 16, 8, 16, 16, 8, 4, by_columns=True, copy_step=1)
"""Sides that differ, so that lines of A and of B have other pitches."""


class _Cuda(lane_by_lane._IntegerCuda):
    blockIdx = property(lambda self: SimpleNamespace(x=_current.place[0], y=0, z=_current.place[1]))


def _always(nbytes: int) -> Any:
    copy = _copy(nbytes)
    return lambda shared, index, address: copy(shared, index, address, True)


def _flat(array: np.ndarray) -> np.ndarray:
    return array if array.ndim == 1 else array.reshape(-1)


def _load(registers: np.ndarray, first: int, array: np.ndarray, index: Any) -> None:
    registers[first : first + 2] = _flat(array)[int(index) : int(index) + 2].tolist()


def _store(array: np.ndarray, index: Any, registers: np.ndarray, first: int) -> None:
    _flat(array)[int(index) : int(index) + 2] = registers[first : first + 2].astype("u8")


PTX = SimpleNamespace(
    unroll=lane_by_lane._unroll,
    address_of=lambda array: array.ctypes.data,
    copy_async_8=_always(8),
    copy_async_16=_always(16),
    copy_async_8_or_zero=_copy(8),
    copy_async_16_or_zero=_copy(16),
    copy_async_4=None,
    copy_async_4_or_zero=None,
    commit_copies=lane_by_lane._commit,
    wait_copies=lane_by_lane._wait,
    load_vector=_load,
    store_vector=_store,
    multiply_add_low=lambda x, y, z: (x * y + z) % 2**32,
    multiply_add_wide=lambda x, y, z: (x * y + int(z)) % 2**64,
)


@pytest.mark.sample(2)
@pytest.mark.filterwarnings(
    "ignore:overflow encountered in scalar add"
)  # C's old numbers wrap as they should
@pytest.mark.parametrize("tiling", [ONE_WARP, TWO_WARPS])
@pytest.mark.parametrize(
    ("m", "n", "k", "depth", "a_layout", "b_layout", "accumulate"),
    [
        (16, 16, 8, 8, ALONG_K, VECTOR, False),
        (35, 18, 21, 21, ALONG_K, VECTOR, True),
        (33, 19, 43, 16, ALONG_OUTER, ALONG_K, False),
        (2, 33, 40, 40, VECTOR, ALONG_OUTER, True),
        # Fewer than a slab of k: nothing may be copied from behind it.
        (17, 18, 1, 1, ALONG_K, VECTOR, False),
        (16, 19, 7, 7, ALONG_OUTER, ALONG_K, True),
        (34, 18, 5, 5, VECTOR, ALONG_OUTER, False),
    ],
)
def test_lane_by_lane(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    tiling: Tiling,
    m: int,
    n: int,
    k: int,
    depth: int,
    a_layout: str,
    b_layout: str,
    accumulate: bool,
) -> None:
    """Full-range numbers, whose products wrap in every place; ragged sides, ranges of k, both stores of C."""
    numbers = SimpleNamespace(
        int32=INTEGER_TYPES.int32,
        int64=int,
        uint32=INTEGER_TYPES.uint32,
        uint64=INTEGER_TYPES.uint64,
        from_dtype=lambda dtype: INTEGER_TYPES.uint64,
    )
    for module in (warp_tiled, register_arithmetic, wide_integer):
        monkeypatch.setattr(module, "numba", numbers)
        monkeypatch.setattr(module, "cuda", _Cuda())
        lane_by_lane.replace_instructions(monkeypatch, module, PTX)
    for name in ("multiply_add", "in_another_register", "join"):
        monkeypatch.setattr(wide_integer, name, getattr(wide_integer, name).py_func)
    a, b, c = (rng.integers(0, 2**64, shape, "u8", endpoint=False) for shape in ((m, k), (k, n), (m, n)))
    on_a, on_b = np.asarray(a, order="C" if a_layout == ALONG_K else "F"), b
    if b_layout == ALONG_K:
        on_b = np.asarray(b, order="F")
    splits = -(-k // depth)
    out = np.concatenate([c] * splits)
    short = k < tiling.block_k
    kernel = warp_tiled.warp_tiled_function.__wrapped__(UNSIGNED, tiling, a_layout, b_layout, short)
    grid = (-(-m // tiling.block_m) * -(-n // tiling.block_n), splits)
    arguments = (on_a, on_b, out, depth, accumulate, n % 2 == 0, launching.EVERYTHING)
    nbytes = shared_nbytes(tiling, 8)
    lane_by_lane.run(
        kernel, grid, tiling.threads, nbytes, UNSIGNED, arguments, late=True, readable=(on_a, on_b)
    )
    for z in range(splits):
        ks = slice(z * depth, (z + 1) * depth)
        expected = a[:, ks] @ b[ks] + (c if accumulate else np.uint64(0))
        np.testing.assert_array_equal(out[z * m : (z + 1) * m], expected)


def cases() -> list[Any]:
    found = []
    for a_layout, b_layout in itertools.product(LAYOUTS, LAYOUTS):
        found_here = candidates(UNSIGNED, a_layout, b_layout)
        for candidate in found_here:
            # The smallest tile: it takes the compiler least.
            quick = candidate is found_here[-1] and (a_layout, b_layout) == (ALONG_K, VECTOR)
            marks = () if quick else pytest.mark.slow
            found.append(pytest.param(candidate.tiling, a_layout, b_layout, marks=marks))
    return found


@pytest.mark.more
@pytest.mark.parametrize("capability", [(8, 0), pytest.param((9, 0), marks=pytest.mark.slow)])
@pytest.mark.parametrize(("tiling", "a_layout", "b_layout"), cases())
def test_three_multiplications_an_element_and_no_spills(
    tiling: Tiling, a_layout: str, b_layout: str, capability: tuple[int, int], tmp_path: Path
) -> None:
    text, _ = cuda.compile_ptx(
        warp_tiled.warp_tiled_function(UNSIGNED, tiling, a_layout, b_layout),
        launching.signature(UNSIGNED),
        cc=capability,
        launch_bounds=tiling.launch_bounds,
    )
    elements = tiling.thread_m * tiling.thread_n * tiling.block_k
    assert text.count("mad.lo.cc.u32") == text.count("madc.hi.u32") == elements
    assert text.count("mad.lo.u32") == 2 * elements
    assert_no_spills(assemble(text, "sm_{}{}".format(*capability), tmp_path))
