"""The warp-tiled and register-blocked kernels: their geometry, their machine code, and their products."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import naive
from tests.kernels.gemm.machine_code import assemble
from tilewright.kernels.gemm.cores import warp_tiling
from tilewright.kernels.gemm.cores.warp_tiled_cut import (
    DTYPES,
    LEAST_DEPTH,
    MAX_PARTIAL_NBYTES,
    SHORT,
    Part,
    candidates,
    cut,
    split_depth,
    tiles_of,
)
from tilewright.kernels.gemm.cores.warp_tiling import LAYOUTS, Tiling, shared_nbytes, slab_copy
from tilewright.kernels.gpu.device_choice import SIMULATOR

if not SIMULATOR:
    from numba import cuda
    from numba.cuda.cudadrv.driver import device_memset

    from tilewright.kernels.gemm.base import Variant
    from tilewright.kernels.gemm.cores.warp_tiled_launch import WARP_TILED, launch_part, matrix, variants
    from tilewright.kernels.gemm.ladder.register_blocked import REGISTER_BLOCKED
    from tilewright.kernels.gemm.product import describe

PAIRS = tuple(itertools.product(LAYOUTS, LAYOUTS))
TILINGS = sorted(
    {(dtype.itemsize, c.tiling) for dtype in DTYPES for pair in PAIRS for c in candidates(dtype, *pair)},
    key=repr,
)
MULTIPROCESSORS = 132
SHARED_LIMIT_NBYTES = 227 * 1024
"""What a block, or all blocks of a multiprocessor, may have on Hopper."""


# --- Geometry: no device -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("itemsize", "tiling"), TILINGS)
def test_threads_copy_every_element_of_a_slab_once(itemsize: int, tiling: Tiling, layout: str) -> None:
    for outer in (tiling.block_m, tiling.block_n):
        copy = slab_copy(layout, outer, tiling.block_k, tiling.threads, itemsize)
        seen = np.zeros((outer, tiling.block_k), int)
        for thread in range(copy.outer_lanes * copy.k_lanes):
            if layout == warp_tiling.ALONG_K:
                first, k = thread // copy.k_lanes, thread % copy.k_lanes
            else:
                first, k = thread % copy.outer_lanes * copy.width, thread // copy.outer_lanes
            for p, q in itertools.product(range(copy.passes), range(copy.repeats)):
                start = first + p * copy.outer_step
                seen[start : start + copy.width, k + q * copy.k_lanes] += 1
        assert copy.outer_lanes * copy.k_lanes == tiling.threads
        assert (seen == 1).all()


@pytest.mark.parametrize(("itemsize", "tiling"), TILINGS)
def test_tilings_fit_the_machine(itemsize: int, tiling: Tiling) -> None:
    vector = warp_tiling.vector_elements(itemsize)
    assert tiling.block_m % tiling.warp_m == tiling.block_n % tiling.warp_n == 0
    assert tiling.thread_m % vector == tiling.thread_n % vector == 0
    assert tiling.block_k % 2 == 0, "fragments alternate between two buffers from slab to slab"
    assert tiling.stages >= 2
    assert tiling.blocks_per_multiprocessor * shared_nbytes(tiling, itemsize) <= SHARED_LIMIT_NBYTES


def test_an_uneven_share_of_a_slab_is_refused() -> None:
    with pytest.raises(ValueError, match="do not share a slab of 96 x 8"):
        slab_copy(warp_tiling.ALONG_OUTER, 96, 8, 128, 4)


sides = st.one_of(st.integers(1, 300), st.integers(1, 20_000))


@given(
    m=sides,
    n=sides,
    k=st.integers(1, 200_000),
    dtype=st.sampled_from(DTYPES),
    pair=st.sampled_from(PAIRS),
    lower=st.booleans(),
)
def test_parts_cover_c_once_and_splits_cover_k_once(
    m: int, n: int, k: int, dtype: np.dtype, pair: tuple[str, str], lower: bool
) -> None:
    parts = cut(m, n, k, dtype, pair, MULTIPROCESSORS, lower)
    assert sum(part.m * part.n for part in parts) == m * n
    for one, other in itertools.combinations(parts, 2):
        apart_m = one.row + one.m <= other.row or other.row + other.m <= one.row
        apart_n = one.column + one.n <= other.column or other.column + other.n <= one.column
        assert apart_m or apart_n
    for part in parts:
        assert 0 <= part.row <= part.row + part.m <= m
        assert 0 <= part.column <= part.column + part.n <= n
        assert (part.splits - 1) * part.depth < k <= part.splits * part.depth
        if part.splits > 1:
            assert part.depth % part.tiling.block_k == 0
            assert part.depth >= LEAST_DEPTH
            assert part.splits * part.m * part.n * dtype.itemsize <= MAX_PARTIAL_NBYTES
        least = min(part.depth, k - (part.splits - 1) * part.depth)
        assert least >= part.tiling.block_k or (part.splits == 1 and part.tiling == SHORT[dtype].tiling)


def test_large_products_are_not_split_and_small_ones_with_much_k_are() -> None:
    single, pair = np.dtype("f4"), (warp_tiling.ALONG_K, warp_tiling.VECTOR)
    large, *tail = cut(8192, 8192, 8192, single, pair, MULTIPROCESSORS)
    (small,) = cut(128, 128, 100_000, single, pair, MULTIPROCESSORS)
    assert large.splits == 1
    assert large.m * large.n >= 0.9 * 8192**2, "what is cut off is what would begin another wave"
    assert len(tail) <= 2
    assert small.splits > 16


def test_half_of_a_product_is_cut_by_its_own_waves() -> None:
    """Of 8192 it has 2080 tiles, 7.9 waves; without three rows of tiles, as all of C is cut, 7.2, and those again."""
    single, pair = np.dtype("f4"), (warp_tiling.VECTOR, warp_tiling.VECTOR)
    assert len(cut(8192, 8192, 8192, single, pair, MULTIPROCESSORS)) == 2
    (half,) = cut(8192, 8192, 8192, single, pair, MULTIPROCESSORS, True)
    assert tiles_of(8192, 8192, half.tiling, 0) == 64 * 65 // 2


@given(m=st.integers(1, 900), n=st.integers(1, 900), diagonal=st.integers(-900, 900))
def test_tiles_below_a_diagonal_are_counted(m: int, n: int, diagonal: int) -> None:
    tiling = candidates(np.dtype("f4"), warp_tiling.ALONG_K, warp_tiling.VECTOR)[0].tiling
    row, column = np.arange(m)[:, None], np.arange(n)
    rows, columns = np.nonzero(column <= row + diagonal)
    wanted = set(zip(rows // tiling.block_m, columns // tiling.block_n, strict=True))
    assert tiles_of(m, n, tiling, diagonal) == len(wanted)
    assert tiles_of(m, n, tiling) == -(-m // tiling.block_m) * -(-n // tiling.block_n)


# --- Launching: a host double in the kernels' place --------------------------------------------------------


def on_host(operand: Any) -> np.ndarray:
    """The host memory that a `Matrix` points to, as an array."""
    reach = sum((side - 1) * stride for side, stride in zip(operand.shape, operand.strides, strict=True))
    raw = (ctypes.c_char * (reach + operand.dtype.itemsize)).from_address(operand.pointer)
    return np.ndarray(operand.shape, operand.dtype, raw, 0, operand.strides)


def host_enqueue(
    kernel: str, grid: Any, block: int, stream: Any, shared_nbytes: int, *arguments: Any
) -> None:
    """What the two kernels promise in their docstrings, in NumPy."""
    if kernel == "sum":
        partial, c, splits, accumulate = arguments
        (m, _), out = c.shape, on_host(c)
        total = sum(on_host(partial)[s * m : (s + 1) * m] for s in range(splits))
        out[...] = total + out if accumulate else total
        return
    if kernel == "repitch":
        source, target = arguments
        assert target.pointer % 16 == target.strides[0] % 16 == 0
        on_host(target)[:, source.shape[1] :] = 0
        on_host(target)[:, : source.shape[1]] = on_host(source)
        return
    a, b, c, depth, accumulate, c_vectors, diagonal = arguments
    assert diagonal >= c.shape[1], "all of C is wanted"
    assert not c_vectors or (c.pointer % 16 == c.strides[0] % 16 == c.shape[1] * c.dtype.itemsize % 16 == 0)
    m, out = a.shape[0], on_host(c)
    assert c.strides[1] == c.dtype.itemsize
    for z in range(grid[2]):
        product = on_host(a)[:, z * depth : (z + 1) * depth] @ on_host(b)[z * depth : (z + 1) * depth]
        rows = slice(z * m, (z + 1) * m)
        out[rows] = product + out[rows] if accumulate else product


@pytest.mark.skipif(SIMULATOR, reason="the simulator does not load the kernel")
@given(
    m=st.integers(1, 300),
    n=st.integers(1, 300),
    k=st.integers(1, 900),
    order=st.tuples(*[st.sampled_from("CF")] * 3),
    accumulate=st.booleans(),
    processors=st.sampled_from((1, 4, 132)),
    repitched=st.booleans(),
    bands=st.sampled_from((0, 3)),
)
def test_launches_add_up_to_the_product(
    m: int,
    n: int,
    k: int,
    order: tuple[str, str, str],
    accumulate: bool,
    processors: int,
    repitched: bool,
    bands: int,
) -> None:
    from tilewright.kernels.gemm.cores import partial_sums
    from tilewright.kernels.gemm.cores import warp_tiled_cut as cutting
    from tilewright.kernels.gemm.cores import warp_tiled_launch as launching

    rng = np.random.default_rng(m * n * k)
    shapes = ((m, k), (k, n), (m, n))
    a, b, c = (
        np.asarray(naive.numbers(rng, shape, "u4"), order=o) for shape, o in zip(shapes, order, strict=True)
    )
    expected = a @ b + (c if accumulate else np.uint32(0))
    partial = np.empty(MAX_PARTIAL_NBYTES, np.uint8)

    @contextlib.contextmanager
    def scratch(nbytes: int, stream: Any) -> Iterator[int]:
        assert nbytes <= partial.nbytes
        yield partial.ctypes.data

    with pytest.MonkeyPatch.context() as patch:
        for module in (launching, partial_sums):
            patch.setattr(module, "enqueue", host_enqueue)
        patch.setattr(launching, "borrowed", scratch)
        patch.setattr(launching, "current_device", lambda: 0)
        patch.setattr(launching, "multiprocessors", lambda device: processors)
        patch.setattr(launching, "_kernel", lambda *specialisation: ("multiply", 0))
        patch.setattr(partial_sums, "_sum_kernel", lambda dtype: "sum")
        patch.setattr(partial_sums, "_shared_sum_kernel", lambda dtype: "sum")
        patch.setattr(launching.repitch, "kernel", lambda dtype: "repitch")
        patch.setattr(launching.repitch, "enqueue", host_enqueue)
        if repitched:
            patch.setattr(launching.repitch, "SCRATCH_NBYTES", 64 * 2**10)  # panels of k, some hundred deep
            patch.setattr(launching.repitch, "LEAST_SIDE", 16)
            patch.setattr(launching.repitch, "LEAST_DEPTH", 64)
        patch.setattr(cutting, "TAIL_BANDS", bands)
        patch.setattr(launching, "cut", cutting.cut.__wrapped__)
        launching.launch(
            *(launching.Matrix(x.ctypes.data, x.shape, x.strides, x.dtype) for x in (a, b, c)), accumulate, 0
        )
    np.testing.assert_array_equal(c, expected)


@pytest.mark.skipif(SIMULATOR, reason="the simulator does not load the kernel")
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize(
    ("m", "n", "count"),
    [(513, 513, 2), (512, 513, 1), (513, 512, 1), (512, 520, 1), (512, 512, 0)],
)
def test_thin_strips_take_what_would_begin_another_wave(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, dtype: str, m: int, n: int, count: int
) -> None:
    """A double of the device, 16 multiprocessors: the large kernel gets whole tiles, strips go to the thin one."""
    from tilewright.kernels.gemm.cores import skinny_launch
    from tilewright.kernels.gemm.cores.repitch import Matrix
    from tilewright.kernels.gemm.tensor import double_tensor_core as double

    whole, strips = [], []

    def compute(a: Any, b: Any, c: Any, accumulate: bool) -> None:
        on_host(c)[...] = on_host(a) @ on_host(b) + (on_host(c) if accumulate else 0)

    def large(a: Any, b: Any, c: Any, accumulate: bool, stream: Any, tile: Any, *, lower: bool) -> None:
        assert not lower
        whole.append(c.shape)
        compute(a, b, c, accumulate)

    def thin(a: Any, b: Any, c: Any, accumulate: bool, stream: Any) -> None:
        strips.append(min(c.shape))
        compute(a, b, c, accumulate)

    monkeypatch.setattr(double, "current_device", lambda: 0)
    monkeypatch.setattr(double, "multiprocessors", lambda device: 16)
    monkeypatch.setattr(double, "enqueue_tile", large)
    monkeypatch.setattr(skinny_launch, "launch", thin)
    a, b, c = (naive.numbers(rng, shape, dtype) for shape in ((m, 40), (40, n), (m, n)))
    expected = a @ b + c
    double.launch(*(Matrix(x.ctypes.data, x.shape, x.strides, x.dtype) for x in (a, b, c)), True, 0)
    np.testing.assert_allclose(c, expected, rtol=1e-12, atol=1e-10)
    assert len(whole) == 1
    assert len(strips) == count
    assert all(width <= 8 for width in strips)


@pytest.mark.skipif(SIMULATOR, reason="the simulator does not load the kernel")
@pytest.mark.parametrize("order", ["CC", "FF", "CF", "FC"])
@pytest.mark.parametrize(("m", "n", "k"), [(130, 129, 301), (129, 128, 200), (128, 257, 64), (65, 130, 1)])
def test_float64_from_aligned_copies_of_panels(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, order: str, m: int, n: int, k: int
) -> None:
    """Panels are aligned where the kernel is told so, end in zeros, and keep to the scratch memory."""
    from tilewright.kernels.gemm.cores import repitch
    from tilewright.kernels.gemm.tensor import double_tensor_core as double

    scratch, copied = np.full(2**19, 0xFF, np.uint8), []  # NaN everywhere
    offset = -scratch.ctypes.data % 16

    @contextlib.contextmanager
    def borrow(nbytes: int, stream: Any) -> Iterator[int]:
        assert nbytes <= repitch.SCRATCH_NBYTES
        scratch[offset + nbytes :] = 0x5A
        yield scratch.ctypes.data + offset
        assert (scratch[offset + nbytes :] == 0x5A).all()

    def multiply(
        a: Any,
        b: Any,
        c: Any,
        accumulate: bool,
        stream: Any,
        tile: Any,
        *,
        padded: Any = (False, False),
        lower: bool,
    ) -> None:
        assert not lower
        copied.append(padded)
        for operand, told in zip((a, b), padded, strict=True):
            if told:
                lines, _ = double._by_lines(operand)
                assert lines.pointer % 16 == lines.strides[0] % 16 == 0
                beyond = lines._replace(shape=(lines.shape[0], lines.strides[0] // 8))
                assert not on_host(beyond)[:, lines.shape[1] :].any()
        on_host(c)[...] = on_host(a) @ on_host(b) + (on_host(c) if accumulate else 0)

    monkeypatch.setattr(repitch, "SCRATCH_NBYTES", 250_000)
    monkeypatch.setattr(repitch, "LEAST_SIDE", 64)
    monkeypatch.setattr(repitch, "LEAST_DEPTH", 64)
    monkeypatch.setattr(repitch, "enqueue", host_enqueue)
    monkeypatch.setattr(repitch, "kernel", lambda dtype: "repitch")
    monkeypatch.setattr(double, "borrowed", borrow)
    monkeypatch.setattr(double, "enqueue_tile", multiply)
    a, b = (
        np.asarray(naive.numbers(rng, shape, "f8"), order=o)
        for shape, o in zip(((m, k), (k, n)), order, strict=True)
    )
    c = naive.numbers(rng, (m, n), "f8")
    expected = a @ b + c
    double._multiply(
        *(double.Matrix(x.ctypes.data, x.shape, x.strides, x.dtype) for x in (a, b, c)), True, 0, None, False
    )
    np.testing.assert_allclose(c, expected, rtol=1e-12, atol=1e-10)
    lines = (k if order[0] == "C" else m), (n if order[1] == "C" else k)
    if k > 1:
        assert copied[0] == tuple(length % 2 == 1 for length in lines)
    assert len(copied) >= (2 if k == 301 else 1), "k is walked in panels"


@given(m=st.integers(1, 9000), n=st.integers(1, 9000), k=st.integers(1, 200_000))
def test_panels_keep_to_scratch_memory_and_what_a_plan_leaves_free(m: int, n: int, k: int) -> None:
    from tilewright.kernels.gemm.cores import repitch
    from tilewright.kernels.gemm.workspace import workspace_nbytes

    for dtype, itemsize in (("f4", 4), ("f8", 8), ("i4", 4)):
        sides = [side for side, used in ((m, n), (n, m)) if used >= repitch.LEAST_SIDE]
        line_nbytes = sum(repitch.pitch(side, itemsize) + 16 for side in sides)
        depth = repitch.panel_depth(k + k % 2, line_nbytes)
        if depth is None:
            continue
        assert depth >= min(k, repitch.LEAST_DEPTH // 2)
        assert depth >= k or depth % repitch.DEPTH_UNIT == 0
        assert depth * line_nbytes <= workspace_nbytes(m, n, k, np.dtype(dtype), "full")
        cuts = list(repitch.panels(k, depth))
        assert [first for first, _ in cuts] == [0, *itertools.accumulate(length for _, length in cuts)][:-1]
        assert sum(length for _, length in cuts) == k
        assert all(min(k, repitch.DEPTH_UNIT) <= length <= depth for _, length in cuts)


@pytest.mark.parametrize("splits", [16, 17, 40, 300])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.skipif(not SIMULATOR, reason="run by the simulator")
def test_many_partial_sums_are_shared_by_threads(
    rng: np.random.Generator, splits: int, accumulate: bool
) -> None:
    from numba import cuda

    from tilewright.kernels.gemm.cores import partial_sums

    partial = rng.integers(0, 1000, (splits * 5, 7)).astype("f4")
    old = rng.integers(0, 1000, (5, 7)).astype("f4")
    c = old.copy()
    kernel = cuda.jit(partial_sums.shared_sum_function(np.dtype("f4")))
    kernel[-(-35 * partial_sums.SUM_WAYS // 256), 256](partial, c, splits, accumulate)
    expected = partial.reshape(splits, 5, 7).sum(axis=0) + (old if accumulate else 0)
    np.testing.assert_array_equal(c, expected)


@pytest.mark.parametrize("columns", [1, 3, 2048, 2049])
@pytest.mark.skipif(not SIMULATOR, reason="run by the simulator")
def test_copies_of_panels_end_in_zeros(rng: np.random.Generator, columns: int) -> None:
    from numba import cuda

    from tilewright.kernels.gemm.cores import repitch

    source = rng.integers(1, 1000, (3, columns)).astype("f4")
    target = np.full((3, repitch.pitch(columns, 4) // 4), np.nan, "f4")
    kernel = cuda.jit(repitch.copy_function(np.dtype("f4")))
    kernel[3 * -(-target.shape[1] // 2048), repitch.COPY_THREADS](source, target)
    np.testing.assert_array_equal(target[:, :columns], source)
    assert not target[:, columns:].any()


# --- Machine code: no device -------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")


def machine_code(variant: Variant, folder: Path) -> tuple[str, str]:
    """PTX for Hopper, and what the assembler says of it."""
    text, _ = cuda.compile_ptx(variant.function, variant.signature, cc=(9, 0), **variant.options)
    return text, assemble(text, "sm_90", folder)


def cases() -> list[Any]:
    found = [] if SIMULATOR else [*variants(), *REGISTER_BLOCKED.variants()]
    quick = re.compile(r"(float32|complex64 64x128) k vector|register-blocked f")
    return [
        pytest.param(variant, id=variant.name, marks=() if quick.search(variant.name) else pytest.mark.slow)
        for variant in found
    ]


@pytest.mark.more
@pytest.mark.sample(1)
@needs_compiler
@pytest.mark.parametrize("variant", cases())
def test_nothing_spills_and_the_launch_bounds_hold(variant: Variant, tmp_path: Path) -> None:
    text, said = machine_code(variant, tmp_path)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
    registers = re.search(r"Used (\d+) registers", said)
    assert registers is not None
    threads, blocks = variant.options.get("launch_bounds", (256, 1))
    assert int(registers[1]) * threads * blocks <= 65536
    if "sum" not in variant.name:
        assert not re.search(r"ld\.shared\.(f32|u32|u64|b32|b64)", text), "scalar loads from shared memory"


@pytest.mark.more
@needs_compiler
def test_the_inner_loop_is_unrolled_into_registers(tmp_path: Path) -> None:
    """Of the smallest tile, which takes the compiler half of the time."""
    (variant,) = (v for v in variants() if v.name == "warp-tiled float32 32x32 k vector")
    text, said = machine_code(variant, tmp_path)
    tiling = candidates(np.dtype("f4"), warp_tiling.ALONG_K, warp_tiling.VECTOR)[-1].tiling
    assert (tiling.block_m, tiling.block_n) == (32, 32)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
    assert text.count("fma.rn.f32") == tiling.thread_m * tiling.thread_n * tiling.block_k
    assert "cp.async.ca.shared.global" in text
    assert "cp.async.cg.shared.global" in text


# --- Products: on a GPU ------------------------------------------------------------------------------------

SIDES = (1, 3, 4, 31, 32, 63, 64, 65, 127, 128, 129, 260)
DEPTHS = (1, 7, 8, 9, 16, 17, 64, 333)


def check(
    dtype: Any, m: int, n: int, k: int, rng: np.random.Generator, *, order: str = "CCC", offset: int = 0
) -> None:
    """One product by the warp-tiled kernel, plain and accumulated, against the naive one."""
    shapes = ((m, k), (k, n), (m, n))
    values = [naive.numbers(rng, shape, dtype) for shape in shapes]
    on_device = [place(value, layout, offset) for value, layout in zip(values, order, strict=True)]
    a, b, c = on_device
    assert WARP_TILED.supports(describe(a, b, c))
    WARP_TILED.launch(a, b, c, True, 0)
    naive.assert_product(fetch(c), values[0], values[1], added_to=values[2])
    WARP_TILED.launch(a, b, c, False, 0)
    naive.assert_product(fetch(c), values[0], values[1])


def place(value: np.ndarray, order: str, offset: int) -> Any:
    """A device twin by rows (C) or columns (F), ``offset`` elements into a buffer with longer lines."""
    rows, columns = value.shape
    lines, length = (rows, columns) if order == "C" else (columns, rows)
    held = np.full((lines, length + offset), naive.FILLER, value.dtype)
    held[:, offset:] = value if order == "C" else value.T
    view = cuda.to_device(held)[:, offset:]
    return view if order == "C" else transposed(view)


def transposed(array: Any) -> Any:
    from tilewright.kernels.gpu.device_array import transposed as transpose

    return transpose(array)


def fetch(array: Any) -> np.ndarray:
    """A strided device array's elements on the host."""
    rows_first = array.strides[1] == array.dtype.itemsize
    view = array if rows_first else transposed(array)
    host = np.empty(view.shape, view.dtype)
    for row in range(view.shape[0]):
        host[row] = view[row].copy_to_host()
    return host if rows_first else host.T


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["".join(o) for o in itertools.product("CF", repeat=3)])
@pytest.mark.parametrize("dtype", ["f4", "c8", "i4", "i8", "u8"])
def test_every_layout(dtype: str, order: str, rng: np.random.Generator) -> None:
    check(dtype, 132, 68, 40, rng, order=order)
    check(dtype, 129, 67, 41, rng, order=order, offset=1)


@pytest.mark.gpu
def test_sides_around_tiles_and_slabs(rng: np.random.Generator) -> None:
    for m, n in itertools.product(SIDES, SIDES):
        check("f4", m, n, int(rng.choice(DEPTHS)), rng)
    for k in DEPTHS:
        check("f4", 65, 129, k, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f4", "c8", "i4", "i8"])
def test_every_tiling_and_split(dtype: str, rng: np.random.Generator) -> None:
    m, n, k = 136, 72, 150
    a, b = naive.numbers(rng, (m, k), dtype), naive.numbers(rng, (k, n), dtype)
    on_a, on_b = cuda.to_device(a), cuda.to_device(b)
    unsigned = np.dtype(dtype.replace("i", "u"))
    options = candidates(unsigned, warp_tiling.ALONG_K, warp_tiling.VECTOR)
    for candidate, wanted in itertools.product(options, (1, 2, 5)):
        depth = split_depth(k, wanted, candidate.tiling.block_k)
        part = Part(0, 0, m, n, candidate.tiling, depth, -(-k // depth))
        c = cuda.to_device(np.full((m, n), naive.FILLER, dtype))
        launch_part(matrix(on_a), matrix(on_b), matrix(c), part, False, 0)
        naive.assert_product(c.copy_to_host(), a, b)
        launch_part(matrix(on_a), matrix(on_b), matrix(c), part, True, 0)
        doubled = c.copy_to_host() / 2 if np.dtype(dtype).kind in "fc" else c.copy_to_host()
        if np.dtype(dtype).kind in "fc":
            naive.assert_product(doubled.astype(dtype), a, b)
        else:
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(doubled, naive.matmul(a, b, dtype) * np.array(2, dtype))


@pytest.mark.gpu
def test_split_products_and_strips_are_the_same_every_time(rng: np.random.Generator) -> None:
    for m, n, k in ((130, 70, 40_000), (1025, 1025, 600)):
        a, b = (
            cuda.to_device(naive.numbers(rng, (m, k), "f4")),
            cuda.to_device(naive.numbers(rng, (k, n), "f4")),
        )
        first = cuda.device_array((m, n), np.float32)
        WARP_TILED.launch(a, b, first, False, 0)
        for _ in range(5):
            again = cuda.to_device(np.full((m, n), np.nan, np.float32))
            WARP_TILED.launch(a, b, again, False, 0)
            np.testing.assert_array_equal(again.copy_to_host().view("u4"), first.copy_to_host().view("u4"))


@pytest.mark.gpu
def test_nan_and_infinity_reach_their_rows_and_columns_only(rng: np.random.Generator) -> None:
    a, b = naive.numbers(rng, (131, 77), "f4"), naive.numbers(rng, (77, 133), "f4")
    a[130, 3], a[5, 76], b[0, 132], b[76, 7] = np.nan, np.inf, -np.inf, np.nan
    c = cuda.device_array((131, 133), np.float32)
    WARP_TILED.launch(cuda.to_device(a), cuda.to_device(b), c, False, 0)
    with np.errstate(invalid="ignore"):
        expected = a.astype("f8") @ b.astype("f8")
    found = c.copy_to_host()
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(found[finite], expected[finite], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["CC", "FF", "CF", "FC"])
@pytest.mark.parametrize("dtype", ["f4", "i4", "f8"])
def test_unaligned_operands_in_panels(
    monkeypatch: pytest.MonkeyPatch, dtype: str, order: str, rng: np.random.Generator
) -> None:
    """Copies as for large products, on sides that are quick to check; NaN is what a pad must not let in."""
    from tilewright.kernels.gemm.cores import repitch
    from tilewright.kernels.gemm.cores import warp_tiled_launch as launching
    from tilewright.kernels.gemm.tensor.double_tensor_core import DOUBLE_TENSOR_CORE

    copied = []
    copy = repitch.copy

    def counted(panel: Any, scratch: int, stream: Any) -> Any:
        copied.append(panel.shape)
        return copy(panel, scratch, stream)

    def uncut(
        m: int, n: int, k: int, of: np.dtype, ways: tuple[str, str], processors: int, lower: bool = False
    ) -> tuple[Part]:
        return (Part(0, 0, m, n, candidates(of, *ways)[0].tiling, k, 1),)

    monkeypatch.setattr(repitch, "copy", counted)
    monkeypatch.setattr(repitch, "SCRATCH_NBYTES", 640_000)
    monkeypatch.setattr(repitch, "LEAST_SIDE", 64)
    monkeypatch.setattr(repitch, "LEAST_DEPTH", 64)
    monkeypatch.setattr(launching, "cut", uncut)
    m, n, k = 259, 261, 1031
    kernel = DOUBLE_TENSOR_CORE if dtype == "f8" else WARP_TILED
    a, b, old = (naive.numbers(rng, shape, dtype) for shape in ((m, k), (k, n), (m, n)))
    on_a, on_b, c = place(a, order[0], 1), place(b, order[1], 1), place(old, "C", 0)
    kernel.launch(on_a, on_b, c, True, 0)
    naive.assert_product(fetch(c), a, b, added_to=old)
    unaligned = 2 if dtype == "f8" else (order[0] == "F") + (order[1] == "C")
    assert len(copied) >= 2 * unaligned, "k is walked in panels"


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_to_the_31_elements(rng: np.random.Generator) -> None:
    m, k, n = 66_000, 33_000, 16
    a = cuda.device_array((m, k), np.float32)
    device_memset(a.gpu_data, 0, a.nbytes)
    rows = naive.numbers(rng, (8, k), "f4")
    b = naive.numbers(rng, (k, n), "f4")
    for i in range(8):
        a[m - 8 + i].copy_to_device(rows[i])
    c = cuda.to_device(np.full((m, n), np.nan, np.float32))
    WARP_TILED.launch(a, cuda.to_device(b), c, False, 0)
    found = c.copy_to_host()
    assert not found[:-8].any()
    np.testing.assert_allclose(found[-8:], rows.astype("f8") @ b.astype("f8"), atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f4", "i4", "u4"])
def test_register_blocked(dtype: str, rng: np.random.Generator) -> None:
    for m, n, k in ((1, 4, 4), (128, 128, 8), (129, 132, 12), (300, 260, 100)):
        a, b = naive.numbers(rng, (m, k), dtype), naive.numbers(rng, (k, n), dtype)
        old = naive.numbers(rng, (m, n), dtype)
        on_a, on_b, c = cuda.to_device(a), cuda.to_device(b), cuda.to_device(old)
        assert REGISTER_BLOCKED.supports(describe(on_a, on_b, c))
        REGISTER_BLOCKED.launch(on_a, on_b, c, True, 0)
        naive.assert_product(c.copy_to_host(), a, b, added_to=old)
        REGISTER_BLOCKED.launch(on_a, on_b, c, False, 0)
        naive.assert_product(c.copy_to_host(), a, b)


@pytest.mark.gpu
def test_register_blocked_leaves_unaligned_operands_to_others(rng: np.random.Generator) -> None:
    a, b, c = (cuda.to_device(naive.numbers(rng, (6, 6), "f4")) for _ in range(3))
    assert not REGISTER_BLOCKED.supports(describe(a, b, c))
    assert WARP_TILED.supports(describe(a, b, c))
