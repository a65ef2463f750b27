"""float8 on tensor cores: chosen where they are, right on any layout, and no further off than is said."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewright.kernels.gpu.device_choice import SIMULATOR

if SIMULATOR:
    pytest.skip("the simulator has no tensor cores", allow_module_level=True)

from numba import cuda
from numba.cuda import types

from tests.kernels import naive
from tests.kernels.gemm.machine_code import assemble, assert_no_spills, sampled
from tilewright.kernels import matmul
from tilewright.kernels.bfloat16 import dtype_name
from tilewright.kernels.float8 import E4M3, E5M2, FLOAT8
from tilewright.kernels.gemm.base import GemmKernel, Operand, Problem, Variant
from tilewright.kernels.gemm.exact import exact_integer
from tilewright.kernels.gemm.hopper import float8_sums, float8_tensor_core, float_operand
from tilewright.kernels.gemm.hopper.float8_tensor_core import FLOAT8_WGMMA, INTERVAL
from tilewright.kernels.gemm.hopper.wgmma_config import Config
from tilewright.kernels.gemm.select import select
from tilewright.kernels.gemm.tensor.float_mma import FLOAT8_MMA
from tilewright.kernels.gpu.device_array import to_device
from tilewright.kernels.gpu.device_choice import capability, current_device
from tilewright.kernels.tolerance import (
    FLOAT8_CUT,
    FLOAT8_PRODUCTS,
    FLOAT8_STEPS,
    FLOAT8_SUMS,
    accumulated,
    tolerance,
)

PAIRS = list(itertools.product(FLOAT8, repeat=2))
RUNGS = [FLOAT8_WGMMA, FLOAT8_MMA]
FLOAT32 = np.dtype(np.float32)


def problem(a: np.dtype, b: np.dtype, capability: tuple[int, int] | None, side: int = 2048) -> Problem:
    of_a, of_b, of_c = (Operand(side, side, dtype, (side, 1), 128) for dtype in (a, b, FLOAT32))
    return Problem(of_a, of_b, of_c, False, "full", capability)


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_which_kernel_is_chosen(a: np.dtype, b: np.dtype) -> None:
    for capable in ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0)):
        assert select(problem(a, b, capable)) is FLOAT8_MMA
    assert select(problem(a, b, (9, 0))) is FLOAT8_WGMMA
    for other in (problem(a, b, (7, 5)), problem(a, b, (9, 0), side=63), problem(a, b, None)):
        assert select(other).portable
    mixed = problem(a, np.dtype(np.float16), (9, 0))
    assert not any(rung.supports(mixed) for rung in RUNGS)


def test_what_is_said_of_errors_is_what_the_kernel_does() -> None:
    assert FLOAT8_STEPS * FLOAT8_PRODUCTS == INTERVAL
    assert FLOAT8_SUMS == 135 * FLOAT8_CUT
    assert tolerance(1, "f4", 1.0, float8=True) == pytest.approx(FLOAT8_SUMS, rel=1e-5)
    assert tolerance(1 << 15, "f4", 1.0, float8=True) < FLOAT8_SUMS + 1.02 * accumulated(1 << 15, "f4")
    with pytest.raises(ValueError, match="promoted are sums of one plane of floats"):
        Config("s8", "s8", types.int32, promoted=1)
    config = float8_tensor_core.config_of("e4m3", "e5m2")
    assert config.shared_nbytes <= 227 * 1024
    assert 2 * config.tile_n // 2 < 224 - 24, "totals and sums leave some registers of a consumer"


@pytest.mark.parametrize("variant", sampled(list(FLOAT8_WGMMA.variants()), 5))
def test_compiles_without_spills_or_serialised_products(variant: Variant, tmp_path: Path) -> None:
    text, _ = cuda.compile_ptx(variant.function, variant.signature, cc=(9, 0, "a"), **variant.options)
    assert ".local" not in text, "an array that should be registers lies in local memory"
    report = assemble(text, "sm_90a", tmp_path)
    assert_no_spills(report)
    assert "serialized" not in report, report


@pytest.mark.parametrize("architecture", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=variant.name)
        for variant in FLOAT8_MMA.variants()
        if variant.name.startswith("to ")
    ],
)
def test_the_pass_to_float16_becomes_machine_code(
    variant: Variant, architecture: tuple[int, int], tmp_path: Path
) -> None:
    text, _ = cuda.compile_ptx(variant.function, variant.signature, cc=architecture, **variant.options)
    assert_no_spills(assemble(text, "sm_{}{}".format(*architecture), tmp_path))


def test_each_operand_is_widened_from_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of a long k in panels that add up."""
    from contextlib import contextmanager

    from tilewright.kernels.gemm.cores.repitch import Matrix
    from tilewright.kernels.gemm.hopper import half_tensor_core
    from tilewright.kernels.gemm.tensor import float_mma

    done: list[Any] = []

    @contextmanager
    def borrowed(nbytes: int, stream: Any) -> Any:
        yield 1 << 30

    def make_planes(operand: Any, form: str, kind: str, target: int, stream: Any) -> Any:
        done.append((form, operand.k_major, operand.depth))
        return target

    def launch_product(
        config: Any, a: Any, b: Any, output: Any, depth: int, accumulate: bool, stream: Any
    ) -> None:
        done.append((config, depth, accumulate))

    monkeypatch.setattr(half_tensor_core, "borrowed", borrowed)
    monkeypatch.setattr(half_tensor_core, "make_planes", make_planes)
    monkeypatch.setattr(float_mma, "launch_product", launch_product)
    monkeypatch.setattr(float_mma, "config_here", lambda *given, **more: given)
    monkeypatch.setattr(float_operand, "PLANES_NBYTES", 1 << 20)
    a = Matrix(1 << 20, (256, 1600), (1600, 1), E4M3)
    b = Matrix(1 << 21, (1600, 512), (512, 1), E5M2)
    c = Matrix(1 << 22, (256, 512), (2048, 4), FLOAT32)
    FLOAT8_MMA.launch(a, b, c, False, 0)
    product = ("f16", "f16", types.float32)
    widened = [("e4m3", True), ("e5m2", False)]
    steps = [
        [*((form, by_k, depth) for form, by_k in widened), (product, depth, first > 0)]
        for first, depth in ((0, 576), (576, 576), (1152, 448))
    ]
    assert done == [each for step in steps for each in step]


def wide_numbers(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Of both signs and of sizes over all that float8 has."""
    found = rng.lognormal(0, 2, shape) * rng.choice([-1.0, 1.0], shape)
    return found * (400 / np.abs(found).max())


DRAWS: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "uniform": lambda rng, shape: rng.random(shape),
    "wide": wide_numbers,
}


def test_the_twin_of_the_sums_is_within_the_bound(rng: np.random.Generator) -> None:
    for draw, (a, b) in itertools.product(DRAWS.values(), PAIRS):
        left, right = draw(rng, (20, 1000)).astype(a), draw(rng, (1000, 20)).astype(b)
        exact = left.astype("f8") @ right.astype("f8")
        scale = np.abs(left.astype("f8")) @ np.abs(right.astype("f8"))
        error = np.abs(float8_sums.multiply(left, right) - exact)
        assert (error <= tolerance(1000, "f4", scale, float8=True)).all()
        assert error.any()
    # And beyond it where all of k is summed up at once.
    ones = np.ones((1, 1 << 15), E4M3)
    assert float8_sums.multiply(ones, ones.T, 1 << 15)[0, 0] == 1 << 14, "where 1 is below the last bit kept"
    assert float8_sums.multiply(ones, ones.T)[0, 0] == 1 << 15
    left, right = losing()
    exact = left.astype("f8") @ right.astype("f8")
    lost = (exact - float8_sums.multiply(left, right)) / exact
    assert (lost <= FLOAT8_SUMS).all()
    assert (lost > 0.8 * FLOAT8_SUMS).all(), "the bound can be less"


def losing() -> tuple[np.ndarray, np.ndarray]:
    """One product of 1 before others just too small to be seen beside it, all of which are lost."""
    a, b = np.full((64, INTERVAL), 2.0**-7), np.full((INTERVAL, 64), 1.75 * 2.0**-7)
    a[:, 0] = b[0] = 1
    return a.astype(E4M3), b.astype(E4M3)


def here(rung: GemmKernel) -> GemmKernel:
    if rung is FLOAT8_WGMMA and capability(current_device()) != (9, 0):
        pytest.skip("Hopper's tensor cores, and this GPU is another")
    return rung


def on_device(values: np.ndarray, layout: str = "rows") -> Any:
    return naive.device_twin(naive.LAYOUTS[layout](values))[0]


def product(rung: GemmKernel, a: np.ndarray, b: np.ndarray, **options: Any) -> np.ndarray:
    c = to_device(np.full((a.shape[0], b.shape[1]), np.nan, np.float32))
    here(rung).launch(on_device(a), on_device(b), c, False, 0, **options)
    return c.copy_to_host()


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_every_pair_of_codes(rung: GemmKernel, a: np.dtype, b: np.dtype) -> None:
    left = np.arange(256, dtype=np.uint8).view(a).reshape(256, 1)
    right = np.arange(256, dtype=np.uint8).view(b).reshape(1, 256)
    with np.errstate(invalid="ignore"):
        expected = left.astype("f4") * right.astype("f4")
    np.testing.assert_array_equal(product(rung, left, right), expected)
    # And beside zeros, in every place of a stage: infinities and NaN of their own rows and columns alone.
    wide = np.zeros((256, 256), a)
    wide[np.arange(256), np.arange(256)] = left[:, 0]
    ones = np.ones((256, 128), b)
    np.testing.assert_array_equal(product(rung, wide, ones), np.broadcast_to(left.astype("f4"), (256, 128)))


SHAPES = ((128, 256, 64), (300, 515, 200), (65, 1030, 77), (1000, 129, 513), (64, 64, 1))
LAYOUTS = (
    ("rows", "rows", "rows"),
    ("columns", "columns", "rows"),
    ("rows", "columns", "columns"),
    ("padded rows", "offset", "padded rows"),
    ("strided", "backward", "strided"),
    ("padded columns", "columns", "padded columns"),
    ("offset", "padded columns", "offset"),
    ("aligned rows", "aligned columns", "aligned rows"),
    ("aligned columns", "aligned rows", "aligned columns"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.parametrize("layouts", LAYOUTS, ids=", ".join)
def test_sums_of_small_integers_are_exact(
    rung: GemmKernel, a: np.dtype, b: np.dtype, layouts: tuple[str, str, str], rng: np.random.Generator
) -> None:
    for m, n, k in SHAPES:
        left, right = (rng.integers(-3, 4, sides).astype(kind) for sides, kind in (((m, k), a), ((k, n), b)))
        expected = left.astype("f4") @ right.astype("f4")
        of_a, of_b = on_device(left, layouts[0]), on_device(right, layouts[1])
        for accumulate in (False, True):
            held = naive.LAYOUTS[layouts[2]](np.full((m, n), 5, np.float32))
            c, fetch = naive.device_twin(held)
            here(rung).launch(of_a, of_b, c, accumulate, 0)
            np.testing.assert_array_equal(fetch(), expected + 5 if accumulate else expected)
            naive.assert_surroundings_kept(fetch())


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [5000, 4001, 192])
def test_many_tiles_a_block_leave_in_their_places(columns: int, rng: np.random.Generator) -> None:
    """C through shared memory, where its rows begin at multiples of 16 bytes, and from registers."""
    a, b = (rng.integers(-3, 4, shape).astype(E4M3) for shape in ((5000, 200), (200, columns)))
    np.testing.assert_array_equal(product(FLOAT8_WGMMA, a, b), a.astype("f4") @ b.astype("f4"))


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_panels_of_k_add_up(
    rung: GemmKernel, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    for module in (float_operand, exact_integer):
        monkeypatch.setattr(module, "PLANES_NBYTES", 1 << 18)
    a, b = (rng.integers(-1, 2, shape).astype(E4M3) for shape in ((200, 1501), (1501, 301)))
    c = to_device(np.full((200, 301), 5, np.float32))
    here(rung).launch(to_device(a), to_device(b), c, True, 0)
    np.testing.assert_array_equal(c.copy_to_host(), a.astype("f4") @ b.astype("f4") + 5)


@pytest.mark.gpu
@pytest.mark.parametrize("side", [260, 1500])
@pytest.mark.parametrize("transposed", [False, True])
def test_half_of_a_product_is_that_half_of_all_of_it(
    side: int, transposed: bool, rng: np.random.Generator
) -> None:
    a, b = rng.standard_normal((side, 400)).astype(E4M3), rng.standard_normal((400, side)).astype(E5M2)
    whole, half = (np.zeros((side, side), np.float32) for _ in "ab")
    (on_whole, fetch), (on_half, fetch_half) = (
        naive.device_twin(out.T if transposed else out) for out in (whole, half)
    )
    here(FLOAT8_WGMMA).launch(on_device(a), on_device(b), on_whole, False, 0)
    FLOAT8_WGMMA.launch(on_device(a), on_device(b), on_half, False, 0, lower=True)
    np.testing.assert_array_equal(np.tril(fetch_half()), np.tril(fetch()))
    if side > 1000 and not transposed:
        assert (fetch_half()[: side // 4, -side // 4 :] == 0).all(), "blocks above the diagonal were computed"


@pytest.mark.gpu
def test_a_matrix_by_its_own_transpose_is_symmetric_to_the_bit(rng: np.random.Generator) -> None:
    x = on_device(rng.standard_normal((1100, 1500)).astype(E4M3))
    found = matmul(x, x, transpose_a=True).copy_to_host()
    np.testing.assert_array_equal(found, found.T)


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
@pytest.mark.parametrize("draw", list(DRAWS))
@pytest.mark.parametrize("k", [1, 31, 127, 128, 129, 1000, 4096, 1 << 15])
def test_errors_are_within_the_bound(rung: GemmKernel, draw: str, k: int, rng: np.random.Generator) -> None:
    for a, b in PAIRS if k == 1000 else PAIRS[:1]:
        left, right = DRAWS[draw](rng, (200, k)).astype(a), DRAWS[draw](rng, (k, 300)).astype(b)
        exact = left.astype("f8") @ right.astype("f8")
        scale = np.abs(left.astype("f8")) @ np.abs(right.astype("f8"))
        error = np.abs(product(rung, left, right) - exact)
        wide = rung is FLOAT8_WGMMA
        assert (error <= tolerance(k, "f4", scale, float8=wide)).all(), (error / scale).max()


@pytest.mark.gpu
def test_numbers_that_lose_most_are_within_the_bound_too() -> None:
    left, right = losing()
    exact = left.astype("f8") @ right.astype("f8")
    lost = (exact - product(FLOAT8_WGMMA, left, right)) / exact
    assert (lost <= FLOAT8_SUMS).all()
    if capability(current_device()) == (9, 0):
        assert (lost > FLOAT8_SUMS / 2).all(), (
            "the tensor cores keep more than was thought: the bound can be less"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("draw", list(DRAWS))
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_the_bits_are_those_of_the_twin(
    a: np.dtype, b: np.dtype, draw: str, rng: np.random.Generator
) -> None:
    left, right = DRAWS[draw](rng, (64, 1000)).astype(a), DRAWS[draw](rng, (1000, 64)).astype(b)
    np.testing.assert_array_equal(product(FLOAT8_WGMMA, left, right), float8_sums.multiply(left, right))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FLOAT8, ids=dtype_name)
def test_the_same_bits_every_time(kind: np.dtype, rng: np.random.Generator) -> None:
    a, b = (on_device(rng.standard_normal((1000, 1000)).astype(kind)) for _ in "ab")
    first, *others = (matmul(a, b).copy_to_host() for _ in range(5))
    for other in others:
        np.testing.assert_array_equal(other, first)
