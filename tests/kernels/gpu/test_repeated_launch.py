"""A product that was multiplied before: the same launches, the same checks, and little more than the launch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.kernels.gpu import fake_gpu
from tests.kernels.gpu.fake_gpu import Array, FakeGPU
from tilewright.kernels import matmul
from tilewright.kernels.errors import DTypeError, OptionError, OutputError, ShapeError
from tilewright.kernels.gemm import product, tuning
from tilewright.kernels.gemm.cores.repitch import Matrix
from tilewright.kernels.gemm.hopper import wgmma_launch
from tilewright.kernels.gemm.product import kernel_name, prepare
from tilewright.kernels.gemm.select import ladder, select
from tilewright.kernels.gpu import device_choice
from tilewright.kernels.gpu.device_array import DeviceRegion, memory_of
from tilewright.kernels.gpu.recording import Place

pytestmark = pytest.mark.skipif(device_choice.SIMULATOR, reason="the simulator launches in its own way")

BASES = (0x700000000000, 0x710000000000, 0x720000000000)
DECIDED = product.Decision((300, 500), np.dtype(np.float32), (), None)
MOST_CALLS = 90
"""Calls of functions, Python's and C's, in a repeated product, where there were some 200 before launches were recorded.
A quick machine makes ten of them in a microsecond."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    return remembering(monkeypatch, fake_gpu.install(monkeypatch))


def remembering(monkeypatch: pytest.MonkeyPatch, fake: FakeGPU) -> FakeGPU:
    """Decisions kept as ever, but in caches that end with the test."""
    for name in ("_recorded", "_decide"):
        monkeypatch.setattr(product, name, functools.lru_cache(getattr(product, name)))
    return fake


def matrices(
    m: int, n: int, k: int, dtype: str, transpose: str, shift: int = 0, padding: int = 0
) -> list[Array]:
    """a, b and out; ``transpose`` names those that lie by columns, ``shift`` is in bytes."""
    found = []
    for base, name, (rows, columns) in zip(BASES, "abc", ((m, k), (k, n), (m, n)), strict=True):
        size = np.dtype(dtype).itemsize
        strides = ((columns + padding) * size, size)
        if name in transpose:
            strides = (size, (rows + padding) * size)
        found.append(Array(base + shift, (rows, columns), dtype, strides))
    return found


def matrix(array: Array) -> Matrix:
    """The same as kernels take it, at its true address."""
    memory = memory_of(array)
    rows, columns = memory.shape
    return Matrix(memory.pointer, (rows, columns), (memory.strides[0], memory.strides[1]), memory.dtype)


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("transpose", ["", "a", "b"])
def test_regions_are_multiplied_where_they_lie(dtype: str, transpose: str, gpu: FakeGPU) -> None:
    m, n, k = 1100, 900, 512
    size = np.dtype(dtype).itemsize
    arrays = matrices(m, n, k, dtype, transpose)
    rows, columns, depth = slice(256, 1024), slice(384, 896), slice(0, k)
    regions = [
        DeviceRegion(array, *region)
        for array, region in zip(arrays, ((rows, depth), (depth, columns), (rows, columns)), strict=True)
    ]
    matmul(regions[0], regions[1], out=regions[2], accumulate=True)
    by_regions = gpu.take()
    steps = [array.__cuda_array_interface__["strides"] for array in arrays]
    starts = (256 * steps[0][0], 384 * steps[1][1], 256 * steps[2][0] + 384 * size)
    alone = [
        Array(base + start, region.shape, dtype, strides)
        for base, start, region, strides in zip(BASES, starts, regions, steps, strict=True)
    ]
    matmul(alone[0], alone[1], out=alone[2], accumulate=True)
    assert by_regions == gpu.take()
    assert by_regions


@pytest.mark.sample(60)
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16", "i1", "i4", "f2"])
@pytest.mark.parametrize(
    "sides", [(64, 64, 64), (1, 300, 1000), (511, 513, 65), (4096, 4128, 512), (40, 64, 8192)]
)
@pytest.mark.parametrize("transpose", ["", "a", "bc", "abc"])
@pytest.mark.parametrize(("shift", "padding"), [(0, 0), (16, 4), (48, 3)])
def test_what_is_repeated_is_what_is_launched(
    dtype: str, sides: tuple[int, int, int], transpose: str, shift: int, padding: int, gpu: FakeGPU
) -> None:
    a, b, out = matrices(*sides, dtype, transpose, shift, padding)
    kernel = select(product.describe(a, b, out))
    assert kernel.recordable
    kernel.launch(*(matrix(array) for array in (a, b, out)), False, 0)
    direct = gpu.take()
    assert direct
    for moved in (0, 1 << 20, 2 << 30):
        arrays = matrices(*sides, dtype, transpose, shift + moved, padding)
        matmul(*arrays)
        expected = [
            launched._replace(values=tuple(moved_by(moved, value) for value in launched.values))
            for launched in direct
        ]
        assert gpu.take() == expected


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("f2", "full"), ("i1", "full"), ("i4", "full"), *(("f4", name) for name in ("split", "tf32", "bf16"))],
)
@pytest.mark.parametrize("transpose", ["", "a", "bc"])
@pytest.mark.parametrize(("shift", "padding"), [(0, 0), (16, 4), (48, 3)])
def test_so_is_it_on_tensor_cores_that_are_not_hoppers(
    dtype: str,
    precision: Any,
    transpose: str,
    shift: int,
    padding: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = remembering(monkeypatch, fake_gpu.install(monkeypatch, capability=(8, 9)))
    sides = 1024, 768, 512
    a, b, out = matrices(*sides, dtype, transpose, shift, padding)
    kernel = select(product.describe(a, b, out, precision=precision))
    assert kernel.name.endswith("-mma")
    assert kernel.recordable
    kernel.launch(*(matrix(array) for array in (a, b, out)), False, 0)
    direct = gpu.take()
    assert direct
    for moved in (0, 1 << 20, 2 << 30):
        matmul(*matrices(*sides, dtype, transpose, shift + moved, padding), precision=precision)
        expected = [
            launched._replace(values=tuple(moved_by(moved, value) for value in launched.values))
            for launched in direct
        ]
        assert gpu.take() == expected


@pytest.mark.parametrize("transpose", ["", "a", "b", "ab", "abc"])
def test_tf32_is_multiplied_there_as_it_lies(transpose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either way round; what is not aligned goes through a pass, and lies with k contiguous behind it."""
    gpu = remembering(monkeypatch, fake_gpu.install(monkeypatch, capability=(8, 6)))
    matmul(*matrices(1024, 768, 512, "f4", transpose), precision="tf32")
    assert [launched.kernel for launched in gpu.take()] == ["kernel"]
    _, b, out = matrices(1024, 768, 512, "f4", transpose)
    matmul(matrices(1024, 768, 512, "f4", transpose, padding=1)[0], b, out, precision="tf32")
    *passes, product_of_both = gpu.take()
    assert len(passes) == 1
    assert fake_gpu.SCRATCH in product_of_both.values
    assert 4 * 512 in product_of_both.values, "from line to line of what was copied"


def moved_by(nbytes: int, value: Any) -> Any:
    """A value of a launch, addresses in the arrays, and in what tensor maps tell, moved by so many bytes."""
    if isinstance(value, tuple):
        planes, box = value
        return dataclasses.replace(planes, address=moved_by(nbytes, planes.address)), box
    return value + nbytes if isinstance(value, int) and value >= BASES[0] else value


def planes_of(launched: Any) -> list[Any]:
    """The planes that the tensor maps of a launch tell of."""
    return [value[0] for value in launched.values if isinstance(value, tuple)]


def test_tensor_maps_are_made_anew_where_others_took_their_places(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between repeated products, and within one: no launch may be given the map of another's matrix."""
    monkeypatch.setattr(wgmma_launch, "TENSOR_MAPS_KEPT", 7)
    monkeypatch.setattr(wgmma_launch, "RECORDED_MAPS_KEPT", 3)
    order = [*range(6), 0, 1, 5, 2, 2, 0]
    for shift in order:
        matmul(*matrices(1024, 1024, 512, "f2", "", shift << 20))
        (launched,) = gpu.take()
        found = [planes.address for planes in planes_of(launched)]
        assert found == [base + (shift << 20) for base in BASES]
    assert gpu.store.made_anew > 1


def test_tensor_maps_are_ready_once_a_product_was_prepared(gpu: FakeGPU) -> None:
    padded, *_ = matrices(1024, 1024, 512, "f2", "", padding=3)  # goes through a pass, into scratch memory
    arrays = [padded, *matrices(1024, 1024, 512, "f2", "b")[1:]]
    prepare(*arrays)
    known = dict(gpu.maps)
    assert {planes.address for planes, _ in known.values()} == {fake_gpu.SCRATCH, *BASES[1:]}
    matmul(*arrays)
    assert gpu.take()
    assert gpu.maps == known


@pytest.mark.parametrize(("transpose", "launches"), [("b", 1), ("", 2), ("a", 3)])
def test_bytes_that_are_multiplied_as_they_lie_borrow_nothing(
    transpose: str, launches: int, gpu: FakeGPU
) -> None:
    layouts = [memory_of(array).layout for array in matrices(256, 256, 256, "i1", transpose)]
    options = (False, False, False, None, "full", "none", 0, tuning.generation, False)
    decision, plan = product._recorded(*layouts, *options)
    assert decision.kernel is not None
    assert decision.kernel.name == "exact-integer-wgmma"
    assert plan is not None
    assert len(plan.steps) == launches
    assert (plan.scratch_nbytes > 0) == (launches > 1)


@pytest.mark.parametrize(("k", "panels"), [(1024, 1), (9000, 2)])
def test_wide_integers_take_one_launch_for_bytes_of_every_kind(k: int, panels: int, gpu: FakeGPU) -> None:
    """Then two passes and a product for each panel of residues, whether or not they will be needed."""
    layouts = [memory_of(array).layout for array in matrices(1024, 1024, k, "i8", "b")]
    options = (False, False, False, None, "full", "none", 0, tuning.generation, False)
    _, plan = product._recorded(*layouts, *options)
    assert plan is not None
    names = [step.name for step in plan.steps]
    residues = ["straight", "straight", "kernel"]
    assert names == ["reset", "straight", "straight", "decide", "kernel", *panels * residues]


@pytest.mark.parametrize("dtype", ["i1", "i4"])
def test_one_matrix_goes_through_its_pass_once(dtype: str, gpu: FakeGPU) -> None:
    """Where it is multiplied by its own transpose, recorded or not."""
    a, b, out = matrices(700, 700, 700, dtype, "")
    one, other = Array(BASES[0], (700, 700), dtype), Array(BASES[0], (700, 700), dtype)
    matmul(a, b, out, transpose_a=True)
    two_passes = len(gpu.take())
    matmul(one, other, out, transpose_a=True)
    assert len(gpu.take()) == two_passes - 1


def test_scratch_memory_may_move(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = matrices(64, 64, 8192, "f4", "")
    matmul(*arrays)
    first = gpu.take()
    assert len(first) == 2, "k is cut, and the parts added up"
    matmul(*arrays)
    assert gpu.take() == first
    assert any(value == fake_gpu.SCRATCH for value in first[0].values)


@pytest.mark.parametrize("sides", [(64, 64, 8192), (511, 513, 65), (40, 64, 8192)])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c16"])
def test_what_is_prepared_is_launched_later(dtype: str, sides: tuple[int, int, int], gpu: FakeGPU) -> None:
    arrays = matrices(*sides, dtype, "a")
    prepare(*arrays)
    assert gpu.take() == []
    decided = product._recorded.cache_info().misses
    matmul(*arrays)
    assert gpu.take()
    assert product._recorded.cache_info().misses == decided == 1


def test_a_short_k_is_one_launch(gpu: FakeGPU) -> None:
    matmul(*matrices(64, 64, 64, "f4", ""))
    assert len(gpu.take()) == 1


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_a_repeated_product_calls_few_functions(dtype: str, gpu: FakeGPU) -> None:
    arrays = matrices(64, 64, 64, dtype, "")
    for _ in range(2):
        matmul(*arrays)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    reads = [array.reads for array in arrays]
    sys.setprofile(count)
    try:
        matmul(*arrays)
    finally:
        sys.setprofile(None)
    print(f"a repeated product of {dtype} calls {calls} functions")
    assert 10 < calls <= MOST_CALLS
    assert [array.reads for array in arrays] == [count + 1 for count in reads], "each is asked once"


def test_a_repeated_product_is_checked(gpu: FakeGPU) -> None:
    a, b, out = matrices(64, 64, 64, "f4", "")
    matmul(a, b, out)
    gpu.take()
    with pytest.raises(OutputError, match="out overlaps b"):
        matmul(a, b, Array(BASES[1] + 128, (64, 64), "f4"))
    with pytest.raises(OutputError, match="read-only"):
        matmul(a, b, Array(BASES[2], (64, 64), "f4", read_only=True))
    with pytest.raises(OutputError, match="has shape"):
        matmul(a, b, Array(BASES[2], (64, 63), "f4"))
    with pytest.raises(ShapeError, match="inner sides differ"):
        matmul(a, Array(BASES[1], (63, 64), "f4"), out)
    assert gpu.take() == []


def test_an_output_is_refused_for_what_is_wrong_with_it(gpu: FakeGPU) -> None:
    """Every other element of a field of a structured array: its elements lie apart, but no kernel counts in bytes."""
    a, b, _ = matrices(4, 3, 64, "f4", "")
    with pytest.raises(ShapeError, match=r"out has strides \(25, 10\) bytes, which are no multiples"):
        matmul(a, b, Array(BASES[2], (4, 3), "f4", strides=(25, 10)))
    with pytest.raises(OutputError, match="elements of it share memory"):
        matmul(a, b, Array(BASES[2], (4, 3), "f4", strides=(8, 16)))
    matmul(a, b, Array(BASES[2], (4, 3), "f4", strides=(20, 8)))
    assert gpu.take()


def test_arrays_on_two_devices_are_refused(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = matrices(64, 64, 64, "f4", "")
    matmul(*arrays)
    monkeypatch.setattr(device_choice, "device_count", lambda: 2)
    monkeypatch.setattr(product, "device_index", lambda memory: int(memory.pointer >= BASES[1]))
    with pytest.raises(OutputError, match=r"GPUs \[0, 1\]"):
        matmul(*arrays)


def test_alignment_is_part_of_a_decision(gpu: FakeGPU) -> None:
    matmul(*matrices(64, 64, 64, "f4", ""))
    matmul(*matrices(64, 64, 64, "f4", "", shift=4))
    matmul(*matrices(64, 64, 64, "f4", ""))
    aligned, shifted, again = gpu.take()
    assert aligned == again
    assert product._recorded.cache_info().misses == 2
    assert shifted.values != aligned.values


def test_what_was_measured_decides_anew(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = matrices(512, 512, 512, "f4", "")
    matmul(*arrays)
    first = gpu.take()[0].kernel
    monkeypatch.setattr(tuning, "preferred", lambda problem: "register-blocked")
    matmul(*arrays)
    assert gpu.take()[0].kernel == first, "nothing says that it changed"
    monkeypatch.setattr(tuning, "generation", tuning.generation + 1)
    matmul(*arrays)
    assert gpu.take()[0].kernel != first


def test_gpus_of_one_capability_go_by_what_was_measured_on_their_model(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_choice, "model", ("NVIDIA H100 PCIe", "NVIDIA H200").__getitem__)
    measured = {"NVIDIA H200": "register-blocked"}
    monkeypatch.setattr(tuning, "preferred", lambda problem: measured.get(problem.model))
    names = []
    for home in (0, 1, 0):
        monkeypatch.setattr(device_choice, "current_device", lambda home=home: home)
        arrays = matrices(512, 512, 512, "f4", "")
        names.append(kernel_name(*arrays))
        matmul(*arrays)
    kernels = [launched.kernel for launched in gpu.take()]
    assert names == ["warp-tiled", "register-blocked", "warp-tiled"]
    assert kernels[0] == kernels[2] != kernels[1]


@pytest.mark.parametrize("dtype", [[("x", "f4")], [("x", "f4")] * 2, {}, "f4,,"], ids=repr)
def test_what_is_no_element_type_is_refused(
    dtype: Any, gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it has no hash to remember a decision by."""
    monkeypatch.setattr(device_choice, "cuda_available", lambda: True)
    arrays = matrices(64, 64, 64, "f4", "")
    host = [np.ones((64, 64), "f4") for _ in arrays]
    calls = [
        lambda: matmul(*host, dtype=dtype, device="cpu"),
        lambda: matmul(*arrays, dtype=dtype),
        lambda: matmul(*arrays[:2], dtype=dtype),
        lambda: prepare(*arrays, dtype=dtype),
        lambda: kernel_name(*arrays, dtype=dtype),
        lambda: kernel_name(*host, dtype=dtype, device="cuda"),
    ]
    for call in calls:
        with pytest.raises(DTypeError, match="allowed are int8"):
            call()


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("transpose", ["", "a", "b", "ab"])
def test_a_host_product_is_named_by_the_kernel_that_its_copies_get(
    transpose: str, foreign: bool, gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays of any strides and byte order, of which nothing is read."""
    order = ">f4" if foreign else "<f4"
    sides = {"a": (300, 400), "b": (400, 500)}
    ways = {
        "rows": lambda m, n: np.zeros((m, n), order),
        "columns": lambda m, n: np.zeros((n, m), order).T,
        "padded": lambda m, n: np.zeros((m, n + 3), order)[:, :n],
        "padded columns": lambda m, n: np.zeros((n, m + 3), order).T[:m],
        "strided": lambda m, n: np.zeros((m, 2 * n), order)[:, ::-2],
    }
    monkeypatch.setattr(device_choice, "cuda_available", lambda: True)
    asked: list[Any] = []
    monkeypatch.setattr(product, "_decide", lambda *layouts: asked.append(layouts) or DECIDED)
    copied: list[Any] = []
    monkeypatch.setattr(product, "to_device", lambda array, queue: copied.append(array))
    monkeypatch.setattr(product, "cuda", SimpleNamespace(device_array=lambda *_, **__: np.empty((300, 500))))
    monkeypatch.setattr(product, "_on_device", lambda *_: None)
    monkeypatch.setattr(product, "to_host", lambda *_: None)
    flags = {"transpose_a": "a" in transpose, "transpose_b": "b" in transpose}
    for way_a, way_b in itertools.product(ways, repeat=2):
        a, b = (
            ways[way](*(side[::-1] if name in transpose else side))
            for way, (name, side) in zip((way_a, way_b), sides.items(), strict=True)
        )
        assert kernel_name(a, b, device="cuda", **flags) == "none"
        matmul(a, b, device="cuda", **flags)
        found = [(layout[0], layout[1], layout[2]) for layout in asked.pop()[:2]]
        assert found == [(array.shape, array.strides, array.dtype) for array in copied], (way_a, way_b)
        assert all(array.dtype.isnative for array in copied)
        copied.clear()


def test_the_name_of_a_product_that_there_is_not(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice, "cuda_available", lambda: True)
    strided, square = np.zeros(128, "f4")[::2], np.zeros((64, 64), "f4")
    with pytest.raises(ShapeError, match="a has 1 dimension"):
        kernel_name(strided, square, device="cuda")
    with pytest.raises(ShapeError, match="b has 3 dimension"):
        kernel_name(square, np.zeros((2, 64, 128), "f4")[:, :, ::2], device="cuda")
    with pytest.raises(DTypeError, match="no array that NumPy understands"):
        kernel_name([[1], [2, 3]], square, device="cuda")
    with pytest.raises(OptionError, match="host and device arrays are mixed"):
        kernel_name(matrices(64, 64, 64, "f4", "")[0], square)


def test_threads_have_arguments_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = remembering(monkeypatch, fake_gpu.install(monkeypatch, seconds=0.0005))
    products = [matrices(64, 64, 64, "f4", "", shift=place << 20) for place in range(8)]

    def multiply(place: int) -> None:
        for _ in range(10):
            matmul(*products[place])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(multiply, range(8)))
    launched = gpu.take()
    assert len(launched) == 80
    shifts = [
        tuple(
            value - base
            for value, base in zip(sorted(v for v in one.values if v >= BASES[0]), BASES, strict=True)
        )
        for one in launched
    ]
    assert all(len(set(shift)) == 1 for shift in shifts), "a launch mixes the arrays of two threads"
    assert sorted(shift[0] for shift in shifts) == sorted(
        (place << 20) for place in range(8) for _ in range(10)
    )


def test_of_an_open_address_only_its_remainder_is_known() -> None:
    place = Place(1, 0, 48) + 100
    assert (place.base, place.offset) == (1, 100)
    assert (place % 16, place % 128, place % 4) == (4, 20, 0)
    with pytest.raises(ValueError, match="divisors of 128"):
        place % 256


def test_an_empty_array_may_have_no_address(gpu: FakeGPU) -> None:
    nothing = Array(0, (0, 64), "f4")
    nothing._told["data"] = (None, False)
    out = Array(BASES[2], (64, 64), "f4")
    matmul(nothing, nothing, out, transpose_a=True)
    (zeros,) = gpu.take()
    assert zeros.kernel == "tiled_kernel"
    matmul(Array(BASES[0], (64, 0), "f4"), nothing, out, accumulate=True)
    assert gpu.take() == [], "nothing is added"


def test_recordable_kernels_are_those_that_enqueue_alone() -> None:
    assert {kernel.name for kernel in ladder() if kernel.recordable} >= {
        "skinny", "warp-tiled", "double_tensor_core", "register-blocked", "tiled", "global-memory",
        "float16-wgmma", "bfloat16-wgmma", "float8-wgmma", "split-float32-wgmma", "exact-integer-wgmma",
    }  # fmt: skip
