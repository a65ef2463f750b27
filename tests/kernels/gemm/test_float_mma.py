"""Products of floats by mma.sync: chosen where nothing is better, right on any layout, machine code everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewright.kernels.gpu.device_choice import SIMULATOR

if SIMULATOR:
    pytest.skip("the simulator has no tensor cores", allow_module_level=True)

from numba import cuda
from numba.cuda import types

from tests.kernels.gemm.machine_code import assemble, assert_no_spills
from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.gemm.base import GemmKernel, Operand, Problem, Variant
from tilewright.kernels.gemm.hopper.wgmma_launch import Output, Planes
from tilewright.kernels.gemm.select import select
from tilewright.kernels.gemm.tensor import float_mma, mma, mma_launch
from tilewright.kernels.gpu.device_array import strided_view, to_device

HALF, FLOAT = np.dtype(np.float16), np.dtype(np.float32)
RUNGS: list[tuple[GemmKernel, np.dtype, np.dtype, str]] = [
    (float_mma.HALF_MMA, HALF, HALF, "full"),
    (float_mma.HALF_MMA, HALF, FLOAT, "full"),
    (float_mma.BFLOAT_MMA, BFLOAT16, BFLOAT16, "full"),
    (float_mma.BFLOAT_MMA, BFLOAT16, FLOAT, "full"),
    (float_mma.ASKED_MMA[0], FLOAT, FLOAT, "bf16"),
    (float_mma.ASKED_MMA[1], FLOAT, FLOAT, "fp16"),
    (float_mma.ASKED_MMA[2], FLOAT, FLOAT, "tf32"),
    (float_mma.SPLIT_MMA, FLOAT, FLOAT, "split"),
]
NAMES = {(HALF, "full"): "float16", (BFLOAT16, "full"): "bfloat16"}


def problem_of(dtype: np.dtype, c: np.dtype, precision: str, capability: tuple[int, int] | None) -> Problem:
    side = Operand(2048, 2048, dtype, (2048, 1), 128)
    return Problem(side, side, Operand(2048, 2048, c, (2048, 1), 128), False, precision, capability)


@pytest.mark.parametrize(("rung", "dtype", "c", "precision"), RUNGS)
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_they_are_chosen_where_there_is_nothing_better(
    rung: GemmKernel, dtype: np.dtype, c: np.dtype, precision: str, capability: tuple[int, int]
) -> None:
    chosen = select(problem_of(dtype, c, precision, capability)).name
    assert chosen == (rung.name.replace("-mma", "-wgmma") if capability == (9, 0) else rung.name)


def test_older_ones_have_none() -> None:
    for _, dtype, c, precision in RUNGS:
        assert "mma" not in select(problem_of(dtype, c, precision, (7, 5))).name


def laid_out(values: np.ndarray, layout: str) -> Any:
    """A device array of these numbers: with rows or columns contiguous, with lines that are aligned or not."""
    turned, padding = layout[0] == "c", {"8": 8, "1": 1, "0": 0}[layout[1]]
    stored = np.ascontiguousarray(values.T if turned else values)
    whole = np.zeros((stored.shape[0], stored.shape[1] + padding), stored.dtype)
    whole[:, : stored.shape[1]] = stored
    array = to_device(whole)
    size = whole.itemsize
    strides = whole.strides[0], size
    return strided_view(array, values.shape, strides[::-1] if turned else strides)


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", ["r0 r0 r0", "r8 c8 r8", "c8 r8 r1", "c8 c8 r8", "r1 c1 c8", "c1 r1 r0"])
@pytest.mark.parametrize(("rung", "dtype", "c", "precision"), RUNGS)
def test_sums_of_small_integers_are_exact(
    rung: GemmKernel, dtype: np.dtype, c: np.dtype, precision: str, layouts: str, rng: np.random.Generator
) -> None:
    for m, n, k in ((128, 256, 64), (300, 515, 200), (65, 1030, 77), (1000, 129, 513), (64, 64, 1)):
        a = rng.integers(-3, 4, (m, k)).astype(dtype)
        b = rng.integers(-3, 4, (k, n)).astype(dtype)
        held = rng.integers(-9, 9, (m, n)).astype(c)
        of_a, of_b, of_c = layouts.split()
        left, right = laid_out(a, of_a), laid_out(b, of_b)
        want = a.astype(np.float64) @ b.astype(np.float64)
        for accumulate in (False, True):
            into = laid_out(held, of_c)
            rung.launch(left, right, into, accumulate, 0)
            bits = strided_view(into, into.shape, into.strides, np.dtype(f"u{c.itemsize}"))
            got = np.ascontiguousarray(bits.copy_to_host()).view(c).astype(np.float64)
            total = want + held.astype(np.float64) if accumulate else want
            np.testing.assert_array_equal(got, total.astype(np.float32).astype(c).astype(np.float64))


@pytest.mark.gpu
def test_the_split_product_is_as_accurate_as_float32(rng: np.random.Generator) -> None:
    a = rng.standard_normal((700, 4000), np.float32)
    b = rng.standard_normal((4000, 900), np.float32)
    c = cuda.device_array((700, 900), np.float32)
    float_mma.SPLIT_MMA.launch(to_device(a), to_device(b), c, False, 0)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    scale = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    error = np.abs(c.copy_to_host() - exact) / scale
    assert error.max() < 4 * np.finfo(np.float32).eps
    a[3, 5], a[10, 7], b[9, 20] = np.inf, np.nan, -np.inf
    float_mma.SPLIT_MMA.launch(to_device(a), to_device(b), c, False, 0)
    with np.errstate(invalid="ignore"):
        want = a.astype(np.float64) @ b.astype(np.float64)
    got = c.copy_to_host()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))


def test_the_small_products_of_parts_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the largest is added to them, whatever C held."""
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(float_mma, "launch_product", lambda *given, **more: launched.append((*given, more)))
    monkeypatch.setattr(mma_launch, "_tile", lambda device: mma.SMALL_SHARED)
    monkeypatch.setattr(mma_launch, "current_device", lambda: 0)
    config = float_mma._split_config("split", True, False)
    a, b = (Planes(place, 512, 256, 3, 1024, 1 << 18, "bf16") for place in (1 << 20, 1 << 24))
    output = Output(1 << 28, 256, 256, 256, 1, None, False)
    for accumulate in (False, True):
        float_mma._launch_parts(config, a, b, output, 512, accumulate, 7, plan=9)
        (small, *given, settings), (largest, *last, others) = launched
        assert small.parts == float_mma.SMALL_PRODUCTS
        assert (small.m_major_a, small.n_major_b, small.promoted) == (True, False, False)
        assert given == [a, b, output, 512, accumulate, 7]
        assert largest is config
        assert config.promoted
        assert not config.parts
        assert [planes.planes for planes in last[:2]] == [1, 1]
        assert [planes.address for planes in last[:2]] == [a.address, b.address]
        assert last[2:] == [output, 512, True, 7]
        assert settings == others == {"plan": 9}
        launched.clear()


def test_all_products_that_float32_can_notice_are_formed_once() -> None:
    products = [*float_mma.SMALL_PRODUCTS, (0, 0)]
    assert sorted(products) == [(i, j) for i in range(3) for j in range(3) if i + j < 3]
    assert [sum(product) for product in products] == [2, 2, 2, 1, 1, 0], "from the least on"


def test_stages_are_shallow_where_all_words_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma_launch, "_tile", lambda device: mma.LARGEST_SHARED)
    monkeypatch.setattr(mma_launch, "current_device", lambda: 0)
    for kind in ("tf32", "f16"):
        for k_major_a, k_major_b in ((True, True), (True, False), (False, True), (False, False)):
            shallow = kind == "tf32" and not (k_major_a or k_major_b)
            tile = float_mma._config(kind, types.float32, k_major_a, k_major_b, False).tile
            assert tile is (mma.SMALL_SHARED if shallow else mma.LARGEST_SHARED)


def cases() -> list[object]:
    """Every variant for 8.0, and for the other architectures one; in every run one."""
    rungs = (float_mma.HALF_MMA, float_mma.BFLOAT_MMA, *float_mma.ASKED_MMA, float_mma.SPLIT_MMA)
    found = []
    for rung in rungs:
        for place, variant in enumerate(rung.variants()):
            # It turns both operands. A compilation takes eight seconds.
            quick = (rung.name, place) == ("float16-mma", 6)
            found.append(
                pytest.param(
                    variant,
                    "sm_80",
                    id=f"{rung.name} {variant.name}",
                    marks=() if quick else pytest.mark.slow,
                )
            )
    elsewhere = [
        *list(float_mma.HALF_MMA.variants())[:7:2],
        *(variant for rung in rungs[-2:] for variant in rung.variants() if " to float32, " in variant.name),
    ]
    found += [
        pytest.param(variant, name, id=f"{name} {variant.name}", marks=pytest.mark.slow)
        for variant in elsewhere
        for name in ("sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
    ]
    return found


@pytest.mark.more
@pytest.mark.parametrize(("variant", "architecture"), cases())
def test_they_become_machine_code(variant: Variant, architecture: str, tmp_path: Path) -> None:
    number = int(architecture[3:])
    text, _ = cuda.compile_ptx(
        variant.function, variant.signature, cc=(number // 10, number % 10), **variant.options
    )
    assert ".local" not in text, "an array that should be registers lies in local memory"
    assert_no_spills(assemble(text, architecture, tmp_path))
