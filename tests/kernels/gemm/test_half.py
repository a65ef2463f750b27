"""Products of which only the half on and below the diagonal is wanted, and those of one matrix by its own transpose."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import naive
from tilewright.kernels import matmul
from tilewright.kernels.errors import ShapeError
from tilewright.kernels.gemm.base import GemmKernel
from tilewright.kernels.gemm.select import ladder
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.tolerance import tolerance

SIDES = (1, 127, 128, 129, 300, 1000, 2049)
DTYPES = ("i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16")
CUT_BY_ITSELF = ("f4", "c8")
"""Of these half a product is cut into launches of its own: an element's sum may be in another order than in all."""


def halving() -> list[GemmKernel]:
    return [] if SIMULATOR else [kernel for kernel in ladder() if kernel.halves]


def values(shape: tuple[int, int], dtype: str) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    kind = np.dtype(dtype).kind
    if kind == "i":
        limits = np.iinfo(dtype)  # of int32 all of it, for whose sums one byte is not enough
        low, high = (limits.min, limits.max) if dtype == "i4" else (-9, 9)
        return rng.integers(low, high, shape, dtype)
    found = rng.standard_normal(shape)
    return (found + 1j * rng.standard_normal(shape) if kind == "c" else found).astype(dtype)


def test_most_kernels_of_large_products_leave_out_a_half() -> None:
    if not SIMULATOR:
        names = {"warp-tiled", "double_tensor_core", "float16-wgmma", "split-float32-wgmma"}
        assert names | {"exact-integer-wgmma"} <= {kernel.name for kernel in halving()}


def test_half_of_a_product_that_has_no_diagonal_is_refused() -> None:
    with pytest.raises(ShapeError, match="this one is 2 × 4"):
        matmul(np.ones((2, 3)), np.ones((3, 4)), lower=True)


@pytest.mark.parametrize("dtype", ["f4", "i4"])
def test_half_of_a_product_on_a_cpu_is_right(dtype: str) -> None:
    a, b = values((5, 7), dtype), values((7, 5), dtype)
    np.testing.assert_allclose(
        np.tril(matmul(a, b, lower=True, device="cpu")), np.tril(a @ b), rtol=1e-5, atol=1e-5
    )


@pytest.mark.skipif(SIMULATOR, reason="the walk is of kernels that the simulator cannot run")
@given(
    tiles_m=st.integers(1, 9),
    tiles_n=st.integers(1, 9),
    group=st.integers(1, 5),
    tile_m=st.sampled_from((1, 2, 3, 256)),
    tile_n=st.sampled_from((1, 2, 5, 128)),
    diagonal=st.integers(-300, 300),
)
def test_walk_of_a_half_visits_every_tile_that_is_wanted_once(
    tiles_m: int, tiles_n: int, group: int, tile_m: int, tile_n: int, diagonal: int
) -> None:
    from tilewright.kernels.gemm.hopper import wgmma

    def reach(row: int) -> int:
        return max(0, -(-((row + 1) * tile_m + diagonal) // tile_n))

    wanted = {(row, column) for row in range(tiles_m) for column in range(min(tiles_n, reach(row)))}
    steps = wgmma.lower_tiles(tiles_m, tiles_n, group, tile_m, tile_n, diagonal)
    sides = tiles_m, tiles_n, group, tile_m, tile_n, diagonal
    walk = [lower_tile_in_python(index, *sides) for index in range(steps)]
    assert len(set(walk)) == len(walk)
    assert wanted <= set(walk)
    assert all(row < tiles_m and column < tiles_n for row, column in walk)
    assert len(walk) <= len(wanted) + tiles_m * (group * tile_m // tile_n + 1)


def lower_tile_in_python(*arguments: int) -> tuple[int, int]:
    from tilewright.kernels.gemm.hopper import wgmma

    function = wgmma.lower_tile.py_func
    inner = {**function.__globals__, "reach": wgmma.reach.py_func}
    row, column = type(function)(function.__code__, inner)(*arguments)
    return row, column


@pytest.mark.skipif(SIMULATOR, reason="the walk is of kernels that the simulator cannot run")
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("residues", [False, True])
@pytest.mark.parametrize("sides", [(5000, 7000), (7000, 5000), (300, 300)])
def test_rounds_of_launches_take_every_step_once(
    sides: tuple[int, int], residues: bool, lower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of products by residues a few for each cluster, of others all at once."""
    from numba.cuda import types

    from tilewright.kernels.gemm.exact.residues import RESIDUES
    from tilewright.kernels.gemm.hopper import wgmma, wgmma_launch
    from tilewright.kernels.gemm.hopper.wgmma_config import Config

    launched: list[tuple[int, int, int]] = []

    class Noted:
        def launch(self, grid: int, stream: Any, *arguments: int) -> None:
            launched.append((grid, *arguments[-2:]))

    monkeypatch.setattr(wgmma_launch, "compiled", lambda config: Noted())
    store = SimpleNamespace(addresses=lambda wanted: [0] * len(wanted))
    monkeypatch.setattr(wgmma_launch, "_map_store", lambda device: store)
    monkeypatch.setattr(wgmma_launch, "current_device", lambda: 0)
    monkeypatch.setattr(wgmma_launch, "multiprocessors", lambda device: 132)
    (m, n), k = sides, 1024
    config = Config("s8", "s8", types.int32, plan_kind=RESIDUES if residues else -1)
    a, b = (wgmma_launch.Planes(0, k, lines, 1, k, k * lines, "s8") for lines in sides)
    c = wgmma_launch.Output(0, m, n, n, 1, types.int32, False, 0 if lower else None)
    wgmma_launch.launch_product(config, a, b, c, k, False, 0)
    down, across = -(-m // (config.tile_m * config.cluster)), -(-n // config.tile_n)
    walk = down, across, config.group, config.tile_m * config.cluster, config.tile_n
    steps = wgmma.lower_tiles(*walk, 0) if lower else down * across
    shares = [
        range(first + cluster, min(last, steps), grid // config.cluster)
        for grid, first, last in launched
        for cluster in range(grid // config.cluster)
    ]
    assert sorted(step for share in shares for step in share) == list(range(steps))
    assert all(shares), "no cluster without work"
    assert len(launched) == (-(-steps // (66 * wgmma_launch.ROUNDS)) if residues else 1)


@pytest.mark.skipif(SIMULATOR, reason="tensor maps are of kernels that the simulator cannot run")
def test_a_map_that_is_asked_for_twice_keeps_a_place_of_its_own() -> None:
    """As that of a matrix by its own transpose is: another's map would be written over it, and it would be read."""
    from tilewright.kernels.gemm.hopper import wgmma_launch

    one, other = (wgmma_launch.Planes(address, 16, 16, 1, 16, 256, "s8") for address in (0, 4096))
    box, memory = (16, 16), {}

    def write(place: int, planes: wgmma_launch.Planes, box: tuple[int, int]) -> None:
        memory[place] = planes

    store = wgmma_launch.MapStore(2**20, write, lambda: None)
    for wanted in ((one, one), (other, one), (other, other), (one, other)):
        places = store.addresses(tuple((planes, box) for planes in wanted))
        assert [memory[place] for place in places] == list(wanted)
    assert len(memory) == 2


@pytest.mark.gpu
@pytest.mark.parametrize(("side", "dtype"), list(itertools.product(SIDES, DTYPES)))
def test_half_of_a_product_is_that_half_of_all_of_it(side: int, dtype: str) -> None:
    a, b = values((side, 200), dtype), values((200, side), dtype)
    for transposed, accumulate in itertools.product((False, True), repeat=2):
        (on_a, _), (on_b, _) = (naive.device_twin(array) for array in (a, b))
        out = np.ones((side, side), dtype)
        (whole, fetch), (half, fetch_half) = (naive.device_twin(out.T if transposed else out) for _ in "ab")
        matmul(on_a, on_b, whole, accumulate=accumulate)
        matmul(on_a, on_b, half, accumulate=accumulate, lower=True)
        found, expected = np.tril(fetch_half()), np.tril(fetch())
        if dtype in CUT_BY_ITSELF:
            scale = np.abs(a) @ np.abs(b) + 1
            assert (np.abs(found - expected) <= 2 * tolerance(200, dtype, scale)).all()
        else:
            np.testing.assert_array_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("side", [260, 3000])
@pytest.mark.parametrize(
    "kernel",
    # Those of types that NumPy lacks: float16's, and one that tests of its own halve.
    [kernel for kernel in halving() if kernel.name not in ("bfloat16-wgmma", "float8-wgmma")],
    ids=lambda kernel: kernel.name,
)
def test_each_kernel_that_halves_computes_that_half(kernel: GemmKernel, side: int) -> None:
    from numba import cuda

    from tilewright.kernels.gemm.product import describe

    tried = 0
    precisions = ("full", "split", "tf32", "bf16", "fp16")
    for depth, dtype, precision in itertools.product((400, 4000), DTYPES, precisions):
        if depth > 400 and (tried or side < 2000):
            break  # only for those that are worth their preparations where a product is large
        (whole, fetch), (half, fetch_half) = (naive.device_twin(np.zeros((side, side), dtype)) for _ in "ab")
        places = [cuda.device_array(sides, dtype) for sides in ((side, depth), (depth, side))]
        if not kernel.supports(describe(*places, whole, precision=precision)):
            continue
        tried += 1
        on_a, on_b = (naive.device_twin(values(place.shape, dtype))[0] for place in places)
        kernel.launch(on_a, on_b, whole, False, 0)
        kernel.launch(on_a, on_b, half, False, 0, lower=True)
        found = fetch_half()
        np.testing.assert_array_equal(np.tril(found), np.tril(fetch()))
        if side > 2000:  # so that there are whole tiles above the diagonal
            assert (found[: side // 4, -side // 4 :] == 0).all()
    assert tried or side < 2000, "kernels of the tensor cores take no small sides"


@pytest.mark.gpu
@pytest.mark.parametrize(("side", "dtype"), list(itertools.product((1024, 1500, 4096), DTYPES)))
def test_a_matrix_by_its_own_transpose_is_symmetric_to_the_bit(side: int, dtype: str) -> None:
    x = values((1100, side), dtype)
    on_x, _ = naive.device_twin(x)
    out, fetch = naive.device_twin(np.zeros((side, side), dtype))
    matmul(on_x, on_x, out, transpose_a=True)
    found = fetch()
    np.testing.assert_array_equal(found, found.T)
    if np.dtype(dtype).kind == "i":
        np.testing.assert_array_equal(found, matmul(x.T, x, device="cpu"))
        return
    wide = x.astype("c16" if dtype.startswith("c") else "f8")
    scale = np.abs(wide).T @ np.abs(wide)
    allowed = 2 * tolerance(1100, np.dtype(dtype), scale, "full", naive.sizes(x.T, x))
    assert (np.abs(found - wide.T @ wide) <= allowed).all()
