"""Products of bytes by mma.sync, without a GPU: the kernel lane by lane, its tiles, its machine code."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tilewright.kernels.gpu.device_choice import SIMULATOR

if SIMULATOR:
    pytest.skip("the simulator has no tensor cores", allow_module_level=True)

from numba import cuda

from tests.kernels import naive
from tests.kernels.gemm import lane_by_lane
from tests.kernels.gemm.machine_code import assemble, assert_no_spills
from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.gemm.exact import exact_integer, residue_epilogue, residues
from tilewright.kernels.gemm.hopper import wgmma, wgmma_epilogue
from tilewright.kernels.gemm.tensor import mma, mma_launch

TINY = (
    mma.Tile(m=32, n=64, depth=64, warps=(1, 2), stages=3, band=2),
    mma.Tile(m=32, n=32, depth=128, warps=(2, 1), stages=4, band=1),
)
"""One warp beside, one below the other; lines of half and of a whole bank line."""


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python in the place of the device, with tables of Python's integers."""
    lane_by_lane.integer_stand_ins(monkeypatch, mma, wgmma_epilogue, residue_epilogue)
    reduction, combination = residue_epilogue.reduction_table(), residue_epilogue.combination_tables()
    monkeypatch.setattr(residue_epilogue, "reduction_table", lambda: reduction.astype(object))
    monkeypatch.setattr(
        residue_epilogue, "combination_tables", lambda: tuple(table.astype(object) for table in combination)
    )
    types = SimpleNamespace(**vars(lane_by_lane.INTEGER_TYPES), float32=np.float32, float64=np.float64)
    monkeypatch.setattr(mma, "types", types)
    monkeypatch.setattr(residue_epilogue, "reduced", residue_epilogue.reduced.py_func)
    monkeypatch.setattr(mma, "cluster_tile", wgmma.cluster_tile.py_func)


def aligned(shape: tuple[int, ...], dtype: Any, fill: int) -> np.ndarray:
    """An array whose address is a multiple of 16."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(nbytes + 16, fill, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def planes_of(values: np.ndarray) -> np.ndarray:
    """Planes × lines × bytes, lines apart by a multiple of 16 bytes, with rubbish in between."""
    planes, lines, depth = values.shape
    depth *= values.itemsize
    held = aligned((planes, lines, (depth + 31) // 16 * 16), np.uint8, 0xA7)
    held[:, :, :depth] = np.ascontiguousarray(values).view(np.uint8)
    return held


def run(
    config: mma.Config,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    late: bool,
    *,
    blocks: int = 3,
    accumulate: bool = True,
    plan: tuple[int, int] = (0, 1),
    k: int | None = None,
) -> None:
    """``c`` (+)= the product of planes of lines, in Python. k: where these are not of k."""
    left, right = planes_of(a), planes_of(b)
    tile = config.tile
    settings = np.array([0, 0, 0, 0, *plan], np.int64)
    workspace = np.full(blocks * len(residues.MODULI) * tile.m * tile.n, 0xC3, np.uint8)
    row_stride, column_stride = (stride // c.itemsize for stride in c.strides)
    arguments = (
        left.ctypes.data,
        left.strides[1],
        left.strides[0],
        right.ctypes.data,
        right.strides[1],
        right.strides[0],
        c.ctypes.data,
        row_stride,
        column_stride,
        *c.shape,
        (a.shape[2] if k is None else k) * a.itemsize,
        int(column_stride == 1 and row_stride % 2 == 0),
        int(accumulate),
        settings.ctypes.data,
        workspace.ctypes.data,
    )
    kernel = mma.kernel_function(config)
    lane_by_lane.run(
        kernel, (blocks, 1), tile.threads, tile.shared_nbytes, np.uint8, arguments, late, (left, right)
    )


@pytest.mark.sample(2)
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("tile", "late", "kinds", "c_type", "n", "k", "accumulate"),
    [
        pytest.param(TINY[0], True, "s8 u8", "int32", 70, 150, True, marks=pytest.mark.slow),
        (TINY[0], False, "s8 u8", "int32", 70, 150, True),
        (TINY[0], True, "u8 s8", "int8", 69, 16, False),
        (TINY[0], True, "s8 s8", "int64", 66, 257, True),
        pytest.param(TINY[1], True, "u8 u8", "uint16", 70, 150, False, marks=pytest.mark.slow),
        (TINY[1], False, "u8 s8", "int32", 34, 385, True),
        (TINY[1], True, "s8 s8", "int64", 37, 3, True),
    ],
)
def test_bytes_lane_by_lane(
    rng: np.random.Generator,
    tile: mma.Tile,
    late: bool,
    kinds: str,
    c_type: str,
    n: int,
    k: int,
    accumulate: bool,
) -> None:
    """More tiles than blocks, ragged everywhere; some tiles of C in pairs, the rest element by element."""
    kind_a, kind_b = kinds.split()
    dtypes = {"s8": np.int8, "u8": np.uint8}
    m = 35
    a = rng.integers(-128, 128, (1, m, k)).astype(dtypes[kind_a])
    b = rng.integers(-128, 128, (1, n, k)).astype(dtypes[kind_b])
    c = rng.integers(-100, 100, (m, n)).astype(c_type)
    before = c.copy() if accumulate else None
    config = mma.Config(kind_a, kind_b, getattr(lane_by_lane.INTEGER_TYPES, c_type), tile=tile)
    run(config, a, b, c, late, accumulate=accumulate)
    naive.assert_product(c, a[0], b[0].T, added_to=before)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("tile", "count"),
    [(TINY[0], 1), (TINY[0], 4), (TINY[1], 3), pytest.param(TINY[1], 18, marks=pytest.mark.slow)],
)
def test_residues_lane_by_lane(rng: np.random.Generator, tile: mma.Tile, count: int) -> None:
    """Planes follow each other without a break, and tiles after them use the same workspace."""
    m, n, k = 33, tile.n + 1, 40
    largest = min(int((residues.capacities()[count] / k) ** 0.5), (1 << 63) - 1)
    x, y = (rng.integers(-largest, largest, shape, endpoint=True) for shape in ((m, k), (n, k)))
    moduli = residues.modulus_set(count).moduli
    a, b = (
        np.array(
            [[[residues.balanced(int(v) * weight(p), p.p) for v in row] for row in values] for p in moduli],
            np.int8,
        )
        for values, weight in ((x, lambda p: p.weight), (y, lambda p: 1))
    )
    c = rng.integers(-(1 << 62), 1 << 62, (m, n))
    before = c.copy()
    config = mma.Config("s8", "s8", lane_by_lane.INTEGER_TYPES.int64, residues.RESIDUES, tile)
    run(config, a, b, c, True, plan=(residues.RESIDUES, count))
    naive.assert_product(c, x, y.T, added_to=before)


TURNING = (
    mma.Tile(m=64, n=64, depth=64, warps=(2, 1), stages=3, band=2),
    mma.Tile(m=64, n=64, depth=128, warps=(1, 2), stages=4, band=1),
)
"""Large enough for lines of whole bank lines the other way round too."""
PARTS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1))


@pytest.mark.sample(3)
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("tile", "late", "majors", "n", "k", "parts"),
    [
        (TURNING[0], True, "m n tf32", 70, 37, ()),
        (TURNING[1], False, "m k tf32", 130, 64, ()),
        (TURNING[1], True, "k n tf32", 65, 41, ()),
        (TURNING[1], True, "k n", 70, 150, ()),
        (TURNING[0], True, "m k", 66, 33, ()),
        (TURNING[0], False, "m n", 130, 97, ()),
        (TURNING[0], True, "k k", 70, 41, PARTS),
        (TURNING[1], True, "m n", 37, 64, PARTS),
    ],
)
def test_floats_lane_by_lane(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    tile: mma.Tile,
    late: bool,
    majors: str,
    n: int,
    k: int,
    parts: tuple[tuple[int, int], ...],
) -> None:
    """Either way round, and sums over the products of several planes in an order of their own."""
    types = SimpleNamespace(**vars(lane_by_lane.INTEGER_TYPES), float32=np.float32, float64=np.float64)
    monkeypatch.setattr(wgmma_epilogue, "types", types)
    m, planes = 69, 3 if parts else 1
    kind = "tf32" if majors.endswith("tf32") else "f16"
    a, b = (rng.integers(-4, 5, (planes, side, k)).astype(lane_by_lane.MMA_TYPES[kind]) for side in (m, n))
    c = rng.integers(-100, 100, (m, n)).astype(np.float32)
    want = c + sum(a[left] @ b[right].T for left, right in parts or ((0, 0),))
    m_major, n_major = majors[0] == "m", majors[2] == "n"
    given = np.swapaxes(a, 1, 2) if m_major else a, np.swapaxes(b, 1, 2) if n_major else b
    config = mma.Config(kind, kind, np.float32, tile=tile, m_major_a=m_major, n_major_b=n_major, parts=parts)
    run(config, *given, c, late, blocks=2, k=k)
    np.testing.assert_array_equal(c, want)


@pytest.mark.usefixtures("stand_ins")
def test_another_kernels_work_is_left_alone(rng: np.random.Generator) -> None:
    a, b = (rng.integers(-128, 128, (1, side, 16)).astype(np.int8) for side in (32, 64))
    c = np.full((32, 64), 5, np.int32)
    config = mma.Config("s8", "s8", lane_by_lane.INTEGER_TYPES.int32, 0, TINY[0])
    run(config, a, b, c, False, blocks=1, accumulate=False, plan=(1, 1))
    assert (c == 5).all()
    run(config, a, b, c, False, blocks=1, accumulate=False, plan=(0, 1))
    naive.assert_product(c, a[0], b[0].T)


@pytest.mark.every_case
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("kind", [*range(len(residues.SINGLE_KINDS)), residues.RESIDUES])
def test_one_kernel_takes_bytes_as_the_plan_says(rng: np.random.Generator, kind: int) -> None:
    """Several tiles a block, and stages; residues are another kernel's."""
    m, n, k = 33, 70, 150
    a, b = (rng.integers(0, 256, (1, side, k)).astype(np.uint8) for side in (m, n))
    c = np.full((m, n), 5, np.int64)
    config = mma.Config("s8", "s8", lane_by_lane.INTEGER_TYPES.int64, residues.ANY_SINGLE, TINY[0])
    run(config, a, b, c, True, blocks=2, accumulate=False, plan=(kind, 1))
    if kind == residues.RESIDUES:
        assert (c == 5).all()
        return
    read = {"s8": np.int8, "u8": np.uint8}
    kind_a, kind_b = residues.SINGLE_KINDS[kind]
    naive.assert_product(c, a[0].view(read[kind_a]), b[0].T.view(read[kind_b]))


def test_tiles_fit_the_devices() -> None:
    kib = 1024
    assert mma_launch.fitting_tile(99 * kib) is mma.SMALL_SHARED  # 8.6, 8.9, 12.0
    assert mma_launch.fitting_tile(163 * kib) is mma.LARGE_SHARED  # 8.0, 8.7
    assert mma_launch.fitting_tile(227 * kib) is mma.LARGEST_SHARED  # 9.0, 10.0
    assert mma.SMALL_SHARED.shared_nbytes <= 99 * kib
    for tile in mma_launch.TILES:
        assert tile.m * tile.n == residue_epilogue.TILE_ELEMENTS, "the workspace is shared between engines"


def test_a_tile_that_breaks_the_rules_is_refused() -> None:
    config = mma.Config("s8", "s8", None, tile=mma.Tile(128, 128, 64, (2, 8), 4))
    with pytest.raises(AssertionError, match="quarters"):
        mma.kernel_function(config)


SAMPLES = (("residues to int64, 4 × 64 bytes deep", (8, 0)),)
"""Compiled by default: it has the loop of the products of bytes, and takes half of their time."""
FOUND = [variant for variant in exact_integer.variants_mma() if variant.name.endswith("deep")]
CASES = [
    pytest.param(
        variant,
        target,
        id=f"{variant.name} {target[0]}.{target[1]}",
        marks=() if (variant.name, target) in SAMPLES else pytest.mark.slow,
    )
    for variant in FOUND
    for target in ((8, 0), (8, 9), (9, 0))
]


def test_the_samples_exist() -> None:
    assert {name for name, _ in SAMPLES} <= {variant.name for variant in FOUND}


@pytest.mark.more
@pytest.mark.parametrize(("variant", "target"), CASES)
def test_compiles_without_spills(variant: Variant, target: tuple[int, int], tmp_path: Path) -> None:
    text, _ = cuda.compile_ptx(variant.function, variant.signature, cc=target, **variant.options)
    assert "mma.sync.aligned.m16n8k32" in text
    assert ".local" not in text, "an array that should be registers lies in local memory"
    assert_no_spills(assemble(text, f"sm_{target[0]}{target[1]}{'a' if target == (9, 0) else ''}", tmp_path))
