"""The Hopper kernel itself: its tile walk, its shared memory, its machine code, and float products on a
GPU."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.kernels import naive
from tests.kernels.gemm.machine_code import assemble, assert_no_spills
from tilewright.kernels.gpu.device_array import strided_view, to_device
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.tolerance import tolerance

if SIMULATOR:
    pytest.skip("the simulator has no tensor cores", allow_module_level=True)

from numba import cuda
from numba.cuda import types

from tilewright.kernels import matmul
from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.float8 import FLOAT8
from tilewright.kernels.gemm import tuning
from tilewright.kernels.gemm.base import GemmKernel, Operand, Problem, Variant
from tilewright.kernels.gemm.exact import exact_integer
from tilewright.kernels.gemm.hopper import float_operand, half_tensor_core, split_float
from tilewright.kernels.gemm.hopper.float_operand import Cut, FloatOperand
from tilewright.kernels.gemm.hopper.wgmma import CONSUMER_REGISTERS, PRODUCER_REGISTERS, cluster_tile
from tilewright.kernels.gemm.hopper.wgmma_config import Config
from tilewright.kernels.gemm.hopper.wgmma_launch import Output, Planes, output_of
from tilewright.kernels.gemm.select import ladder, select
from tilewright.kernels.gemm.workspace import Parent, workspace_nbytes

KERNELS = (
    exact_integer.EXACT_INTEGER,
    half_tensor_core.HALF,
    half_tensor_core.BFLOAT,
    *half_tensor_core.ASKED,
    split_float.SPLIT,
)
SHARED_NBYTES_LIMIT = 227 * 1024
"""What a block may have on sm_90."""
REGISTERS_AT_ENTRY = 168
"""What 384 threads may have each, and the pool that ``setmaxnreg`` shares out."""


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 16))
def test_every_tile_is_visited_once(tiles_m: int, tiles_n: int, group: int) -> None:
    visited = [cluster_tile.py_func(i, tiles_m, tiles_n, group) for i in range(tiles_m * tiles_n)]
    assert len(set(visited)) == tiles_m * tiles_n
    assert all(0 <= row < tiles_m and 0 <= column < tiles_n for row, column in visited)


@pytest.mark.parametrize(
    "config",
    [
        Config("s8", "s8", None),
        Config("tf32", "tf32", None),
        Config("tf32", "tf32", None, m_major_a=True),
        half_tensor_core._config("f16", types.float16, True, False),
        half_tensor_core._config("bf16", types.uint16, False, True),
        split_float._product(False, True),
        split_float._halves(False, False),
    ],
)
def test_shared_memory_and_registers_fit(config: Config) -> None:
    assert config.shared_nbytes <= SHARED_NBYTES_LIMIT
    taken = config.consumers * CONSUMER_REGISTERS + PRODUCER_REGISTERS
    assert taken <= REGISTERS_AT_ENTRY * (config.consumers + 1)
    for side, _lines in (config.box_a, config.box_b):
        assert side == config.depth


@pytest.mark.parametrize("k_major", [True, False])
def test_only_a_narrow_c_leaves_through_shared_memory(k_major: bool) -> None:
    def chosen(kind: str, c_type: Any) -> Config:
        k_major_b = k_major or kind == "tf32"  # which comes no other way
        return half_tensor_core._config(kind, c_type, k_major, k_major_b)

    for narrow in (chosen("f16", types.float16), chosen("bf16", types.uint16)):
        boxes_of_a_tile = narrow.tile_n // narrow.box_c[0]
        assert narrow.boxes == boxes_of_a_tile, "a warp waits for room in the middle of a tile"
        assert narrow.stages == 3
    for kind in ("bf16", "f16", "tf32"):
        assert (chosen(kind, types.float32).boxes, chosen(kind, types.float32).stages) == (0, 4)


SAMPLES = {
    "bytes to int8",
    "residues to int64",
    "planned bytes to int64",
    "int64 to bytes, turned",
    "bytes turned by vectors",
    "float16 to float16, m-major by n-major",
    "float16 to float32, m-major by n-major",
    "bfloat16 to bfloat16, m-major by n-major",
    "rounded sums, float16",
    "tf32, k-major",
    "tf32, m-major",
    "tf32, n-major",
    "to tf32",
    "to tf32, turned",
    "to split",
    "split, m-major by n-major",
    "to halves",
    "halves, k-major by k-major",
    "halves, m-major by n-major",
    "ranges",
    "ranges, turned",
    "powers",
    "repair",
}
"""Variants that differ in what they ask of the compiler; tests of the whole ladder compile more."""
QUICK = {"float16 to float16, m-major by n-major", "to split", "ranges", "bytes turned by vectors"}
"""Those that are compiled in every run: of products, which take five seconds each, one, and three passes."""
FOUND = [variant for kernel in KERNELS for variant in kernel.variants() if variant.name in SAMPLES]


def test_samples_exist() -> None:
    assert {variant.name for variant in FOUND} == SAMPLES
    assert QUICK < SAMPLES


@pytest.mark.more
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=variant.name, marks=() if variant.name in QUICK else pytest.mark.slow)
        for variant in FOUND
    ],
)
def test_compiles_without_spills_or_serialised_products(variant: Variant, tmp_path: Path) -> None:
    text, _ = cuda.compile_ptx(variant.function, variant.signature, cc=(9, 0, "a"), **variant.options)
    assert ".local" not in text, "an array that should be registers lies in local memory"
    report = assemble(text, "sm_90a", tmp_path)
    assert_no_spills(report)
    assert "serialized" not in report, report


@pytest.mark.parametrize(
    ("address", "line_nbytes", "loadable"),
    [(0, 128, True), (16, 144, True), (8, 128, False), (0, 120, False), (0, 0, False), (0, -128, False)],
)
def test_what_the_copy_engine_takes(address: int, line_nbytes: int, loadable: bool) -> None:
    assert Planes(address, 100, 10, 1, line_nbytes, 10 * line_nbytes, "s8").loadable is loadable


def problem(dtypes: tuple[str, ...], precision: str, side: int = 1024) -> Problem:
    a, b, c = (Operand(side, side, np.dtype(name), (side, 1), 128) for name in dtypes)
    return Problem(a, b, c, False, precision, (9, 0))


def chosen(dtypes: tuple[str, ...], precision: str, side: int = 1024) -> list[str]:
    return [kernel.name for kernel in KERNELS if kernel.supports(problem(dtypes, precision, side))]


def test_supports() -> None:
    single, half = ("float32",) * 3, ("float16",) * 3
    assert chosen(single, "full") == [], "float32 is multiplied as float32 unless the caller allows less"
    assert chosen(single, "tf32") == ["tf32-wgmma"]
    assert chosen(single, "bf16") == ["bf16-wgmma"]
    assert chosen(single, "fp16") == ["fp16-wgmma"]
    assert chosen(single, "split") == ["split-float32-wgmma"]
    assert chosen(half, "full") == ["float16-wgmma"]
    assert chosen(("float16", "float16", "float32"), "full") == ["float16-wgmma"]
    assert chosen(("bfloat16",) * 3, "full") == ["bfloat16-wgmma"]
    assert chosen(("bfloat16", "bfloat16", "float32"), "full") == ["bfloat16-wgmma"]
    assert chosen(("bfloat16", "float32", "float32"), "full") == []
    assert chosen(("bfloat16",) * 3, "full", side=32) == []
    assert chosen(("float64",) * 3, "tf32") == []
    assert chosen(single, "tf32", side=32) == []


def laid(m: int, n: int, k: int, dtypes: tuple[Any, ...], layout: str, capability: Any = (9, 0)) -> Problem:
    """A product of whose operands one, or none, is not multiplied as it lies."""
    of_a, of_b, of_c = (np.dtype(name) for name in dtypes)
    unit = 16 // of_a.itemsize
    pitch_a, pitch_b = (-(-side // unit) * unit for side in (k, n if of_b.itemsize == 2 else k))
    strides_b = (pitch_b, 1) if of_b.itemsize == 2 else (1, pitch_b)
    a, b = Operand(m, k, of_a, (pitch_a, 1), 128), Operand(k, n, of_b, strides_b, 128)
    if layout == "odd lines of A":
        a = replace(a, strides=(pitch_a + 1, 1))
    elif layout == "B shifted":
        b = replace(b, alignment=8)
    elif layout == "rows apart":
        a = replace(a, strides=(2 * pitch_a, 2))
    elif layout == "A broadcast":
        a = replace(a, strides=(0, 1))
    elif layout == "B upside down":
        b = replace(b, strides=(-strides_b[0], 1) if strides_b[1] == 1 else (1, -strides_b[1]))
    elif layout == "bytes by rows":
        b = replace(b, strides=(-(-n // unit) * unit, 1))
    return Problem(a, b, Operand(m, n, of_c, (n, 1), 128), False, "full", capability)


IN_PLACE, COPIED = 1 << 22, 1 << 24
BYTES_IN_PLACE, BYTES_COPIED = 1 << 22, 1 << 23
HALVES = (("float16",) * 3, ("bfloat16", "bfloat16", "float32"))
BYTES = (("int8", "int8", "int32"), ("uint8", "int8", "int64"))
ENGINES = {(9, 0): "wgmma", (8, 0): "mma", (8, 9): "mma", (12, 0): "mma"}


@pytest.mark.parametrize("capability", ENGINES)
@pytest.mark.parametrize(
    ("layout", "dtypes", "least"),
    [
        *(("as they lie", dtypes, IN_PLACE) for dtypes in HALVES),
        *(("as they lie", dtypes, BYTES_IN_PLACE) for dtypes in BYTES),
        *(
            (layout, dtypes, BYTES_COPIED if dtypes in BYTES else COPIED)
            for layout in ("odd lines of A", "B shifted", "rows apart", "A broadcast", "B upside down")
            for dtypes in (*HALVES, BYTES[0])
        ),
        ("bytes by rows", BYTES[0], BYTES_COPIED),
        ("as they lie", ("int16", "int16", "int32"), 1 << 28),
        ("as they lie", ("int8", "int16", "int32"), 1 << 28),
        ("as they lie", ("float8_e4m3fn", "float8_e4m3fn", "float32"), 1 << 28),
    ],
)
def test_tensor_cores_begin_where_the_passes_pay(
    layout: str, dtypes: tuple[str, ...], least: int, capability: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "preferred", lambda asked: None)
    kinds = tuple(FLOAT8[0] if name == "float8_e4m3fn" else name for name in dtypes)
    for m, n in ((64, 64), (64, 4096), (4096, 64), (256, 128)):
        depth = least // (m * n)
        if not depth:
            continue
        name = select(laid(m, n, depth, kinds, layout, capability)).name
        assert name.endswith(ENGINES[capability]), (m, n, depth)
        assert select(laid(m, n, depth - 1, kinds, layout, capability)).portable, (m, n, depth)
        if m == 64:
            assert select(laid(m - 1, n, 2 * depth, kinds, layout, capability)).portable
    assert select(laid(63, 1 << 14, 1 << 14, kinds, layout, capability)).portable


def test_float32_is_multiplied_in_full_below_the_size_where_its_passes_pay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "preferred", lambda asked: None)
    for precision in ("split", "tf32", "bf16", "fp16"):
        assert "wgmma" not in select(problem(("float32",) * 3, precision, side=512)).name
        assert "wgmma" in select(problem(("float32",) * 3, precision, side=646)).name


SMALL = [
    (64, 64, 64),
    (65, 127, 33),
    (127, 65, 250),
    (64, 300, 14),
    (64, 4096, 1),
    (300, 64, 8),
    (128, 128, 128),
]


@pytest.mark.gpu
@pytest.mark.parametrize("orders", ["CCC", "FCC", "CFC", "FFF"])
@pytest.mark.parametrize("padding", [0, 1, 16])
@pytest.mark.parametrize("dtypes", HALVES + BYTES)
def test_small_products_are_exact(
    dtypes: tuple[str, ...], padding: int, orders: str, rng: np.random.Generator
) -> None:
    """Of small integers, whichever kernel is chosen, and by the tensor cores alone."""
    of_a, of_b, of_c = (np.dtype(name) for name in dtypes)
    rungs = [rung for rung in ladder() if rung.name in RUNGS_OF_SMALL[of_a]]
    assert len(rungs) == 2
    low = 0 if of_a.kind == "u" else -3
    for m, n, k in SMALL:
        a = rng.integers(low, 4, (m, k)).astype(of_a)
        b = rng.integers(-3, 4, (k, n)).astype(of_b)
        want = a.astype(np.int64) @ b.astype(np.int64)
        operands = [padded(values, order, padding) for values, order in zip((a, b), orders[:2], strict=True)]
        for rung in (None, *rungs):
            out = padded(np.ones((m, n), of_c), orders[2], padding)
            if rung is None:
                matmul(*operands, out=out, dtype=of_c, accumulate=True)
            else:
                rung.launch(*operands, out, True, 0)
            bits = strided_view(out, out.shape, out.strides, np.dtype(f"u{of_c.itemsize}"))
            got = np.ascontiguousarray(bits.copy_to_host()).view(of_c).astype(np.float64)
            np.testing.assert_array_equal(got, (want + 1).astype(np.float32).astype(of_c).astype(np.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("behind", [0, 1, 3, 4, 7, 8])
@pytest.mark.parametrize(
    "dtypes", [*HALVES, BYTES[0], (FLOAT8[0], FLOAT8[1], "float32")], ids=lambda dtypes: str(dtypes[0])
)
def test_nothing_behind_the_rows_of_c_is_written(
    dtypes: tuple[Any, ...], behind: int, rng: np.random.Generator
) -> None:
    """The copy engine writes 16 bytes at a time, where C's rows begin at multiples of it."""
    of_a, of_b, of_c = (np.dtype(name) for name in dtypes)
    m, n, k = 300, 600 - behind, 128
    a, b = rng.integers(-3, 4, (m, k)).astype(of_a), rng.integers(-3, 4, (k, n)).astype(of_b)
    held = np.full((m, n + behind), 77, of_c)
    whole = to_device(held)
    matmul(to_device(a), to_device(b), out=strided_view(whole, (m, n), held.strides), dtype=of_c)
    found = (
        strided_view(whole, held.shape, held.strides, np.dtype(f"u{of_c.itemsize}")).copy_to_host().view(of_c)
    )
    np.testing.assert_array_equal(
        found[:, :n].astype("f4"), (a.astype("f4") @ b.astype("f4")).astype(of_c).astype("f4")
    )
    assert (found[:, n:] == held[:, n:]).all()


RUNGS_OF_SMALL = {
    np.dtype("float16"): ("float16-wgmma", "float16-mma"),
    BFLOAT16: ("bfloat16-wgmma", "bfloat16-mma"),
    np.dtype("int8"): ("exact-integer-wgmma", "exact-integer-mma"),
    np.dtype("uint8"): ("exact-integer-wgmma", "exact-integer-mma"),
}


def padded(values: np.ndarray, order: str, padding: int) -> Any:
    """A device array of these numbers by rows (C) or columns (F), with so many more elements between lines."""
    stored = np.ascontiguousarray(values.T if order == "F" else values)
    whole = np.zeros((stored.shape[0], stored.shape[1] + padding), stored.dtype)
    whole[:, : stored.shape[1]] = stored
    strides = whole.strides[0], whole.itemsize
    return strided_view(to_device(whole), values.shape, strides[::-1] if order == "F" else strides)


class Memory:
    """What the launchers look at of a device array."""

    def __init__(self, shape: tuple[int, int], strides: tuple[int, int], dtype: str, place: int) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.strides = strides[0] * self.dtype.itemsize, strides[1] * self.dtype.itemsize
        self.device_ctypes_pointer = SimpleNamespace(value=place)


@pytest.mark.parametrize(
    ("strides", "place", "dtype", "in_place", "k_major"),
    [
        ((64, 1), 4096, "float16", True, True),
        ((72, 1), 4096, "float16", True, True),
        ((1, 128), 4096, "float16", True, False),
        ((66, 1), 4096, "float16", False, True),  # lines begin at multiples of 4 bytes
        ((64, 1), 4104, "float16", False, True),  # the first does not begin at a multiple of 16
        ((128, 2), 4096, "float16", False, True),  # nothing lies side by side
        ((0, 1), 4096, "float16", False, True),  # one row again and again
        ((-64, 1), 4096, "float16", False, True),
        ((68, 1), 4096, "float32", True, True),
    ],
)
def test_what_is_loaded_where_it_lies(
    strides: tuple[int, int], place: int, dtype: str, in_place: bool, k_major: bool
) -> None:
    a = Memory((128, 64), strides, dtype, place)
    operand, other = float_operand.operands(a, Memory((64, 96), (96, 1), dtype, 1 << 20))
    assert (operand.outer, operand.depth, operand.k_major) == (128, 64, k_major)
    assert (other.outer, other.depth, other.outer_stride, other.k_stride) == (96, 64, 1, 96)
    planes = operand.in_place("f16")
    assert (planes is not None) is in_place
    if planes is not None:
        assert (planes.width, planes.lines) == ((64, 128) if k_major else (128, 64))
        assert planes.line_nbytes == max(strides) * np.dtype(dtype).itemsize


FORMS = ["bf16", "copy", "tf32", "split"]
LONG = st.one_of(st.integers(1, 5000), st.integers(1, 10**8))


def float_operands(
    m: int, n: int, k: int, by_rows: bool, turn: bool, form: str
) -> tuple[FloatOperand, FloatOperand]:
    dtype = "float16" if form == "copy" else "float32"
    a = Memory((m, k), (k, 1) if by_rows else (1, m), dtype, 4096)
    b = Memory((k, n), (1, k) if turn else (n, 1), dtype, 4096)
    return float_operand.operands(a, b)


@given(LONG, LONG, st.integers(1, 100_000), st.booleans(), st.booleans(), st.sampled_from(FORMS))
@example(64, 10_500_000, 1024, True, False, "split")
@example(64, 40_000_000, 256, True, False, "split")
@example(64, 40_000_000, 256, True, False, "bf16")
@example(20_000_000, 64, 10_000, False, True, "bf16")
@example(100_001, 99_999, 100_000, True, True, "tf32")
def test_planes_fit_the_scratch_memory(m: int, n: int, k: int, by_rows: bool, turn: bool, form: str) -> None:
    left, right = float_operands(m, n, k, by_rows, turn, form)
    cut = float_operand.cut(left, right, form)
    assert cut.depth % float_operand.DEPTH_UNIT == 0
    assert cut.depth >= min(k, float_operand.LEAST_DEPTH)
    assert cut.depth < k + float_operand.DEPTH_UNIT
    for side, lines in zip((m, n), cut.lines, strict=True):
        assert lines == side or lines % float_operand.LINES_UNIT == 0
    heads = [operand.stretch(0, lines) for operand, lines in zip((left, right), cut.lines, strict=True)]
    taken = sum(float_operand.planes_nbytes(operand, cut.depth, form) for operand in heads)
    assert taken <= float_operand.most_nbytes(m, n, k, form) <= float_operand.PLANES_NBYTES


@given(LONG, LONG, st.integers(1, 100_000), st.data(), st.sampled_from(FORMS))
def test_smaller_products_need_no_more_planes(m: int, n: int, k: int, data: st.DataObject, form: str) -> None:
    """What is counted for a tile and a panel holds for those at the edges too."""
    smaller = [data.draw(st.integers(1, side)) for side in (m, n, k)]
    assert float_operand.most_nbytes(*smaller, form) <= float_operand.most_nbytes(m, n, k, form)


@pytest.mark.parametrize("c_order", ["rows", "columns"])
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("turn", [True, False])
def test_stretches_make_up_the_product(
    by_rows: bool, turn: bool, c_order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k = 700, 1300, 600
    monkeypatch.setattr(float_operand, "PLANES_NBYTES", 2 * 512 * 6 * 256)
    left, right = float_operands(m, n, k, by_rows, turn, "split")
    cut = float_operand.cut(left, right, "split")
    assert (cut.depth, cut.lines) == (256, (512, 512))
    strides = (n, 1) if c_order == "rows" else (1, m)
    output = output_of(Memory((m, n), strides, "float32", C_PLACE), types.float32)
    if output.transposed:
        left, right = right, left
    done = np.zeros((m, n), int)
    for a, b, part in cut.stretches(left, right, output):
        assert (part.rows, part.columns) == (a.outer, b.outer)
        first = (part.address - C_PLACE) // 4
        row, column = divmod(first, n) if c_order == "rows" else divmod(first, m)[::-1]
        row_a = (a.address - left.address) // 4 // left.outer_stride
        column_b = (b.address - right.address) // 4 // right.outer_stride
        assert (row_a, column_b) == ((row, column) if c_order == "rows" else (column, row))
        rows, columns = (part.columns, part.rows) if output.transposed else (part.rows, part.columns)
        done[row : row + rows, column : column + columns] += 1
    assert (done == 1).all()


@dataclass(frozen=True)
class Multiplied:
    """What reached the launcher."""

    config: Config
    left: Planes
    right: Planes
    output: Output
    depth: int
    accumulate: bool


def multiplied(
    a: Memory,
    b: Memory,
    c: Memory,
    monkeypatch: pytest.MonkeyPatch,
    taken: list[int] | None = None,
) -> tuple[list[Multiplied], list[tuple[int, int]]]:
    """The launches of a TF32 product, and (outer, depth) of what went through a pass; ``taken``: bytes borrowed."""
    launched, passed = [], []

    def launch(config: Config, *given: Any) -> None:
        launched.append(Multiplied(config, *given[:-1]))

    def make(operand: Any, form: str, kind: str, target: int, stream: Any) -> Planes:
        passed.append((operand.outer, operand.depth))
        assert form == kind == "tf32"
        nbytes = float_operand.line_nbytes(operand.depth, form)
        return Planes(target, operand.depth, operand.outer, 1, nbytes, operand.outer * nbytes, kind)

    monkeypatch.setattr(half_tensor_core, "launch_product", launch)
    monkeypatch.setattr(half_tensor_core, "make_planes", make)

    def borrow(nbytes: int, stream: Any) -> Any:
        if taken is not None:
            taken.append(nbytes)
        return contextlib.nullcontext(1 << 24)

    monkeypatch.setattr(half_tensor_core, "borrowed", borrow)
    half_tensor_core.ASKED[2].launch(a, b, c, True, 0)
    return launched, passed


A_PLACE, B_PLACE, C_PLACE = 4096, 1 << 20, 1 << 22
BY_ROWS, BY_COLUMNS = False, True


def laid_out(rows: int, columns: int, by_columns: bool, place: int, pitch: int = 0) -> Memory:
    pitch = pitch or (rows if by_columns else columns)
    return Memory((rows, columns), (1, pitch) if by_columns else (pitch, 1), "float32", place)


@pytest.mark.parametrize("c_order", [BY_ROWS, BY_COLUMNS])
@pytest.mark.parametrize(("a_order", "b_order"), list(itertools.product((BY_ROWS, BY_COLUMNS), repeat=2)))
@pytest.mark.parametrize("n", [96, 160])
def test_tf32_operands_are_turned_only_where_both_would_be(
    a_order: bool, b_order: bool, c_order: bool, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registers hold the operand without k side by side, of two the larger, and C is written as it lies."""
    m, k = 128, 64
    a, b = laid_out(m, k, a_order, A_PLACE), laid_out(k, n, b_order, B_PLACE)
    launched, passed = multiplied(a, b, laid_out(m, n, c_order, C_PLACE), monkeypatch)
    (done,) = launched
    asking = [side for side, asks in (("a", a_order == BY_COLUMNS), ("b", b_order == BY_ROWS)) if asks]
    assert passed == ([(min(m, n), k)] if len(asking) == 2 else [])
    assert done.config.a_in_registers is bool(asking)
    assert done.config.n_major_b is False
    output, place = done.output, done.left.address
    assert (output.address, done.depth, done.accumulate) == (C_PLACE, k, True)
    assert {output.rows, output.columns} == {m, n}
    outer_left = done.left.width if done.config.m_major_a else done.left.lines
    outer_right = done.right.lines
    assert (outer_left, outer_right) == (output.rows, output.columns)
    if asking:
        kept = asking[0] if len(asking) == 1 else ("a" if m >= n else "b")
        assert place == (A_PLACE if kept == "a" else B_PLACE)
        assert output.rows == (m if kept == "a" else n)
        assert (done.left.lines, done.left.line_nbytes) == (k, 4 * output.rows)
    # Neighbours in memory are written together.
    assert (output.row_stride if done.config.c_by_columns else output.column_stride) == 1
    paired = output.flipped.paired if done.config.c_by_columns else output.paired
    assert paired


def test_what_the_copy_engine_does_not_take_is_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    a, c = laid_out(128, 64, BY_ROWS, A_PLACE), laid_out(128, 97, BY_ROWS, C_PLACE)
    (done,), passed = multiplied(a, laid_out(64, 97, BY_ROWS, B_PLACE), c, monkeypatch)
    assert passed == [(97, 64)]
    assert not done.config.a_in_registers
    assert (done.output.rows, done.output.paired) == (128, False)
    c = laid_out(128, 96, BY_ROWS, C_PLACE)
    # The other operand's alignment is its own affair: it is rounded into lines that the copy engine takes.
    a = laid_out(128, 62, BY_ROWS, A_PLACE)
    (done,), passed = multiplied(a, laid_out(62, 96, BY_ROWS, B_PLACE), c, monkeypatch)
    assert passed == [(128, 62)]
    assert done.config.a_in_registers
    assert done.left.address == B_PLACE
    monkeypatch.setattr(half_tensor_core, "THROUGH_REGISTERS", False)
    a, b = laid_out(128, 64, BY_ROWS, A_PLACE), laid_out(64, 96, BY_ROWS, B_PLACE)
    (done,), passed = multiplied(a, b, c, monkeypatch)
    assert passed == [(96, 64)]
    assert not done.config.a_in_registers


def test_panels_of_an_operand_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the other operand needs a pass by panels of k, each panel is taken from where it lies."""
    monkeypatch.setattr(float_operand, "PLANES_NBYTES", 1 << 17)
    monkeypatch.setattr(float_operand, "LEAST_DEPTH", 64)
    a, b = laid_out(256, 128, BY_COLUMNS, A_PLACE), laid_out(128, 96, BY_ROWS, B_PLACE)
    launched, passed = multiplied(a, b, laid_out(256, 96, BY_ROWS, C_PLACE), monkeypatch)
    assert passed == [(96, 64), (96, 64)]
    assert [done.left.address - A_PLACE for done in launched] == [0, 64 * 256 * 4]
    assert [done.left.lines for done in launched] == [64, 64]
    assert [done.accumulate for done in launched] == [True, True]
    assert not any(done.config.c_by_columns for done in launched)


@given(st.data())
@settings(max_examples=200)
def test_a_plan_counts_what_tf32_products_borrow(data: st.DataObject) -> None:
    """Over every tile and panel of a small product, edges included."""
    sides = st.one_of(st.integers(1, 40).map(lambda quad: 4 * quad), st.integers(1, 160))
    m, n, k, rows, columns, depth = (data.draw(sides) for _ in range(6))
    rows, columns, depth = min(rows, m), min(columns, n), min(depth, k)
    a_order, b_order = data.draw(st.tuples(st.booleans(), st.booleans()))
    parent = Parent(m, n, k, transpose_a=a_order, transpose_b=b_order)
    counted = workspace_nbytes(rows, columns, depth, np.dtype(np.float32), "tf32", parent)
    assert counted <= workspace_nbytes(rows, columns, depth, np.dtype(np.float32), "tf32")
    borrowed: list[int] = [0]
    with pytest.MonkeyPatch.context() as monkeypatch:
        edges = (
            sorted({side, whole % side or side}) for side, whole in ((rows, m), (columns, n), (depth, k))
        )
        for height, width, inner in itertools.product(*edges):
            a = laid_out(height, inner, a_order, A_PLACE)
            b = laid_out(inner, width, b_order, B_PLACE)
            multiplied(a, b, laid_out(height, width, BY_ROWS, C_PLACE), monkeypatch, borrowed)
    assert max(borrowed) <= counted
    every = (m, n, k, rows, columns, depth)
    # With k contiguous in both every GPU multiplies in place; where it is not in one, Hopper alone does.
    if all(side % 4 == 0 for side in every) and (a_order, b_order) == (BY_ROWS, BY_COLUMNS):
        assert counted == workspace_nbytes(rows, columns, depth, np.dtype(np.float32), "full", parent)


# --- On a GPU --------------------------------------------------------------------------------------------

FLOAT_KERNELS = [
    pytest.param(half_tensor_core.HALF, np.float16, np.float16, "full", id="float16"),
    pytest.param(half_tensor_core.HALF, np.float16, np.float32, "full", id="float16 to float32"),
    pytest.param(half_tensor_core.BFLOAT, BFLOAT16, BFLOAT16, "full", id="bfloat16"),
    pytest.param(half_tensor_core.BFLOAT, BFLOAT16, np.float32, "full", id="bfloat16 to float32"),
    pytest.param(half_tensor_core.ASKED[0], np.float32, np.float32, "bf16", id="bf16"),
    pytest.param(half_tensor_core.ASKED[1], np.float32, np.float32, "fp16", id="fp16"),
    pytest.param(half_tensor_core.ASKED[2], np.float32, np.float32, "tf32", id="tf32"),
    pytest.param(split_float.SPLIT, np.float32, np.float32, "split", id="split"),
]


def device_matrix(values: np.ndarray, layout: str) -> Any:
    """A device array that holds ``values`` by rows, by columns, or by rows that no vector access can use."""
    if layout == "columns":
        return to_device(np.asfortranarray(values))
    if layout == "odd rows":
        whole = np.zeros((values.shape[0], values.shape[1] + 3), values.dtype)
        whole[:, : values.shape[1]] = values
        return to_device(whole)[:, : values.shape[1]]
    return to_device(np.ascontiguousarray(values))


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "dtype", "c_dtype", "precision"), FLOAT_KERNELS)
@pytest.mark.parametrize("a_layout", ["rows", "columns", "odd rows"])
@pytest.mark.parametrize("b_layout", ["rows", "columns", "odd rows"])
@pytest.mark.parametrize(("m", "n", "k"), [(256, 512, 320), (300, 261, 333), (129, 1000, 127), (1, 70, 1)])
def test_float_products(
    kernel: GemmKernel,
    dtype: Any,
    c_dtype: Any,
    precision: str,
    a_layout: str,
    b_layout: str,
    m: int,
    n: int,
    k: int,
    rng: np.random.Generator,
) -> None:
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((m, k), (k, n)))
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    before = rng.standard_normal((m, n)).astype(c_dtype)
    device_a, device_b = device_matrix(a, a_layout), device_matrix(b, b_layout)
    for accumulate, order in ((False, "C"), (True, "C"), (False, "F"), (True, "F")):
        c = to_device(np.asarray(before, order=order))  # type: ignore[call-overload]
        kernel.launch(device_a, device_b, c, accumulate, 0)
        added = before.astype(np.float64) * accumulate
        scale = np.abs(wide_a) @ np.abs(wide_b) + np.abs(added)
        allowed = tolerance(k + 2, c_dtype, scale, precision, naive.sizes(wide_a, wide_b))
        error = np.abs(c.copy_to_host() - (wide_a @ wide_b + added))
        assert (error <= allowed).all(), (accumulate, order, float((error / allowed).max()))


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "dtype", "c_dtype", "precision"), FLOAT_KERNELS)
def test_small_integers_are_exact(
    kernel: GemmKernel, dtype: Any, c_dtype: Any, precision: str, rng: np.random.Generator
) -> None:
    """No rounding anywhere: a wrong element, a lost step of k or a stale stage cannot hide in a tolerance."""
    a, b = (rng.integers(-1, 2, shape).astype(dtype) for shape in ((700, 1999), (1999, 800)))
    c = to_device(np.full((700, 800), np.nan, c_dtype))
    kernel.launch(to_device(a), to_device(b), c, False, 0)
    np.testing.assert_array_equal(c.copy_to_host(), (a.astype(np.int64) @ b.astype(np.int64)).astype(c_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "dtype", "c_dtype", "precision"), FLOAT_KERNELS)
def test_panels_of_k_add_up(
    kernel: GemmKernel,
    dtype: Any,
    c_dtype: Any,
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    monkeypatch.setattr(float_operand, "PLANES_NBYTES", 1 << 19)
    a, b = (rng.integers(-1, 2, shape).astype(dtype) for shape in ((200, 1500), (1500, 301)))
    c = to_device(np.full((200, 301), 5, c_dtype))
    kernel.launch(to_device(a), to_device(b), c, True, 0)
    np.testing.assert_array_equal(
        c.copy_to_host(), (a.astype(np.int64) @ b.astype(np.int64) + 5).astype(c_dtype)
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "dtype", "c_dtype", "precision"), FLOAT_KERNELS)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("layouts", [("odd rows", "odd rows"), ("columns", "rows"), ("odd rows", "rows")])
def test_stretches_of_long_sides_give_the_same_bits(
    kernel: GemmKernel,
    dtype: Any,
    c_dtype: Any,
    precision: str,
    order: Any,
    layouts: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    """The same panels of k, in one stretch and in several of either side or both."""
    m, n, k = 200, 1504, 770
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((m, k), (k, n)))
    before = rng.standard_normal((m, n)).astype(c_dtype)
    b[3, 700], b[300, 1500] = np.inf, np.nan
    on_a, on_b = device_matrix(a, layouts[0]), device_matrix(b, layouts[1])
    answers = []
    for rows, columns in ((m, n), (m, 512), (128, n), (128, 256)):

        def cut(
            left: FloatOperand, right: FloatOperand, form: str, *, a: int = rows, b: int = columns, **_: Any
        ) -> Cut:
            return Cut(256, (b, a) if left.outer == n else (a, b))

        for module in (half_tensor_core, split_float):
            monkeypatch.setattr(module, "cut", cut)
        c = to_device(np.asarray(before, order=order))
        kernel.launch(on_a, on_b, c, True, 0)
        answers.append(c.copy_to_host())
    finite = np.isfinite(answers[0].astype(np.float32))
    assert finite.sum() == m * (n - 2)
    for answer in answers[1:]:
        np.testing.assert_array_equal(answers[0].astype(np.float64), answer.astype(np.float64))


@pytest.mark.gpu
def test_tf32_through_registers_rounds_to_nearest() -> None:
    """As the pass does; infinities and NaN stay what they are, whatever the NaN's payload."""
    side = 512
    b = np.full((side, side), 1 + 2.0**-11 + 2.0**-14, np.float32)
    b.view(np.uint32)[[5, 6, 300, 301], [7, 9, 11, 12]] = 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000
    a = np.eye(side, dtype=np.float32)
    c = to_device(np.zeros((side, side), np.float32))
    half_tensor_core.ASKED[2].launch(to_device(a), to_device(b), c, False, 0)
    found = c.copy_to_host()
    assert np.isnan(found[:, [7, 9, 11, 12]]).any(axis=0).all()
    assert np.isnan(found[[5, 6], [7, 9]]).all()
    assert found[300, 11] == np.inf
    assert found[301, 12] == -np.inf
    others = np.delete(found, [7, 9, 11, 12], axis=1)
    np.testing.assert_array_equal(others, np.float32(1 + 2.0**-10))
