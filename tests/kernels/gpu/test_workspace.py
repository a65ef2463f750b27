"""What products borrow, against what a plan is told that they borrow: every kernel, on a GPU that is not there."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling import examples
from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.choices import PRECISIONS
from tilewright.kernels.float8 import E4M3, E5M2
from tilewright.kernels.gemm.base import ELEMENTS, GemmKernel, Operand, Problem
from tilewright.kernels.gemm.cores.repitch import Matrix
from tilewright.kernels.gemm.select import ladder
from tilewright.kernels.gemm.workspace import Parent, workspace_nbytes
from tilewright.kernels.gpu.device_array import alignment
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.numbers import ceil_div

if SIMULATOR:
    pytest.skip("the simulator has none of the kernels that borrow", allow_module_level=True)

from tilewright.kernels.gemm import scratch
from tilewright.kernels.gemm.cores import partial_sums, repitch, skinny_launch, warp_tiled_launch
from tilewright.kernels.gemm.exact import (
    exact_integer,
    residues,
    split_complex,
    split_residues,
    whole_floats,
)
from tilewright.kernels.gemm.hopper import (
    float_operand,
    half_tensor_core,
    rounded_sums,
    split_float,
    wgmma_launch,
)
from tilewright.kernels.gemm.ladder import register_blocked
from tilewright.kernels.gemm.tensor import double_mma_launch, double_tensor_core, mma_launch
from tilewright.kernels.passes import launcher

HOPPER = (9, 0)
SCRATCH = 0x600000000000
PLACES = {"a": 0x700000000000, "b": 0x710000000000, "c": 0x720000000000}
LINE_NBYTES = 128
MODULES = (
    mma_launch,
    double_mma_launch,
    double_tensor_core,
    exact_integer,
    split_complex,
    split_residues,
    whole_floats,
    float_operand,
    half_tensor_core,
    launcher,
    partial_sums,
    register_blocked,
    repitch,
    rounded_sums,
    skinny_launch,
    split_float,
    warp_tiled_launch,
    wgmma_launch,
)
CAPABILITIES = (HOPPER, (8, 0))
PROCESSORS = (132, 188, 20)


@dataclass
class Device:
    """Kernels are launched nowhere, and what they borrow is noted."""

    capability: tuple[int, int] = HOPPER
    processors: int = 132
    most: dict[str, int] = field(default_factory=dict)
    """For each purpose the most at a time since it was cleared, bytes."""
    _held: set[str] = field(default_factory=set)
    plan: np.ndarray = field(default_factory=lambda: np.zeros(residues.PLAN_LENGTH, np.int64))
    """What a kernel that asks the device finds there: lines of which nothing is known, and bytes that are enough."""

    @property
    def borrowed(self) -> int:
        """What all purposes together have kept."""
        return sum(self.most.values())

    @contextmanager
    def borrow(self, nbytes: int, stream: Any, purpose: str = "") -> Iterator[int]:
        assert purpose not in self._held, (
            "one stream has one piece of scratch memory for a purpose: the inner borrower would overwrite it"
        )
        self._held.add(purpose)
        self.most[purpose] = max(self.most.get(purpose, 0), nbytes)
        yield SCRATCH
        self._held.remove(purpose)


@contextmanager
def no_device() -> Iterator[Device]:
    device = Device()
    stand_ins = {
        "borrowed": device.borrow,
        "enqueue": lambda *arguments, **options: None,
        "current_device": lambda: 0,
        "multiprocessors": lambda number: device.processors,
        "capability": lambda number: device.capability,
        "_compile_wide": lambda *arguments: None,
        "_compile": lambda *arguments: None,
        "read_plan": lambda plan, length, stream: device.plan[:length],
        "_map_store": lambda number: SimpleNamespace(addresses=lambda wanted: [0] * len(wanted)),
        "_tile": lambda number: mma_launch.TILES[0],
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module, (name, stand_in) in itertools.product(MODULES, stand_ins.items()):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
        yield device


@pytest.fixture
def device() -> Iterator[Device]:
    with no_device() as found:
        yield found


def laid_out(name: str, rows: int, columns: int, dtype: np.dtype, layout: str) -> Matrix:
    """A matrix that is not there. ``layout``: rows or columns, perhaps padded to 128 bytes, odd (one element longer),
    shifted (by one element), or apart (nothing lies side by side)."""
    order, _, how = layout.partition(" ")
    size = dtype.itemsize
    length = columns if order == "rows" else rows
    pitch = length * size
    if how == "padded":
        pitch = ceil_div(pitch, LINE_NBYTES) * LINE_NBYTES
    elif how == "odd":
        pitch += size
    step = 2 * size if how == "apart" else size
    pitch = 2 * pitch if how == "apart" else pitch
    strides = (pitch, step) if order == "rows" else (step, pitch)
    return Matrix(PLACES[name] + (size if how == "shifted" else 0), (rows, columns), strides, dtype)


def operand(matrix: Matrix) -> Operand:
    size = matrix.dtype.itemsize
    down, across = (stride // size for stride in matrix.strides)
    return Operand(*matrix.shape, matrix.dtype, (down, across), alignment(matrix.pointer % LINE_NBYTES))


def able(problem: Problem) -> list[GemmKernel]:
    """The kernels that may be selected for a problem: the first, or any that was measured to be faster. Not the
    portable ones, whose modules do not know of scratch memory."""
    in_full = replace(problem, precision="full")
    return [
        kernel
        for kernel in ladder()
        if not kernel.portable and (kernel.supports(problem) or kernel.supports(in_full))
    ]


def test_every_borrower_is_watched() -> None:
    folder = Path(scratch.__file__).parent
    borrowers = {path.stem for path in folder.rglob("*.py") if "with borrowed(" in path.read_text()}
    watched = {module.__name__.rpartition(".")[2] for module in MODULES}
    assert borrowers - {"product"} <= watched, "what product borrows is what a recording borrowed"
    portable = {kernel.launch.__module__ for kernel in ladder() if kernel.portable}
    assert not any(hasattr(sys.modules[name], "borrowed") for name in portable)


def most_borrowed(device: Device, a: Matrix, b: Matrix, c: Matrix, precision: str) -> dict[str, int]:
    """Bytes borrowed by each of the kernels that may multiply these."""
    found = {}
    for accumulate in (False, True):
        problem = Problem(operand(a), operand(b), operand(c), accumulate, precision, device.capability)
        for kernel in able(problem):
            device.most = {}
            kernel.launch(a, b, c, accumulate, 0)
            found[kernel.name] = max(device.borrowed, found.get(kernel.name, 0))
        if whole_floats.fits(problem):
            device.most = {}
            assert whole_floats.multiply(a, b, c, accumulate, 0)
            found["whole floats"] = max(device.borrowed, found.get("whole floats", 0))
    return found


F2, F4, F8, C8, C16, I1, I8 = (np.dtype(code) for code in ("f2", "f4", "f8", "c8", "c16", "i1", "i8"))
CASES = [
    *((dtype, dtype, dtype, "full") for dtype in ELEMENTS),
    *((F4, F4, F4, precision) for precision in PRECISIONS if precision != "full"),
    *((dtype, dtype, dtype, "split") for dtype in (F8, C8, C16)),
    (BFLOAT16, BFLOAT16, F4, "full"),
    (F2, F2, F4, "full"),
    (E4M3, E5M2, F4, "full"),
    (E5M2, E5M2, F4, "full"),
    (I1, I1, I8, "full"),
    (I8, I8, I1, "full"),  # only the low bytes count, but nobody knows that they are all there is
    (np.dtype("u2"), I1, np.dtype("i4"), "full"),
    (F4, F8, F8, "full"),
]
"""The dtypes of A, B and C, and the precision."""
SHAPES = [
    (64, 20_000_000, 64),
    (20_000_000, 64, 64),
    (64, 40_000_000, 256),
    (64, 10_500_000, 1024),
    (10_500_000, 100, 1000),
    (3, 100_000_000, 5),
    (2, 30_000_000, 16),
    (33, 5_000_000, 40),
    (40, 2_000_001, 3000),
    (1, 1, 1_000_000_000),
    (1, 50_000_000, 7),
    (64, 64, 3_000_000),
    (65, 65, 1_000_000),
    (17, 100_000, 1000),
    (5000, 30, 100_000),
    (300, 301, 70_000),
    (100_001, 99_999, 100_003),
    (4097, 4097, 4097),
    (8224, 8192, 300),
    (2048, 1_000_000, 2000),
    (2500, 2500, 200_000),
    (32769, 32769, 65537),
    (20_001, 20_003, 200_001),
    (129, 65, 513),
    (1000, 1000, 1),
    (7, 5, 3),
]
OPERANDS = [
    *itertools.product(("rows", "columns"), repeat=3),
    ("rows odd", "rows odd", "rows"),
    ("columns odd", "rows odd", "columns"),
    ("rows odd", "columns odd", "rows odd"),
    ("rows shifted", "rows shifted", "columns shifted"),
    ("columns odd", "columns shifted", "columns"),
    ("rows padded", "rows padded", "rows apart"),
    ("columns", "rows padded", "columns apart"),
    ("rows apart", "columns apart", "rows"),
]
"""The layouts of A, B and C."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_kernel_borrows_more_than_is_counted(
    case: tuple[np.dtype, np.dtype, np.dtype, str], device: Device
) -> None:
    of_a, of_b, of_c, precision = case
    for place, ((m, n, k), order) in enumerate(itertools.product(SHAPES, OPERANDS)):
        if place % 3:  # in all, every shape meets every third layout, and every layout every third shape
            continue
        device.capability = CAPABILITIES[place // 3 % 9 // 7]
        device.processors = PROCESSORS[place // 3 % len(PROCESSORS)]
        a, b, c = (
            laid_out(name, *sides, dtype, layout)
            for name, sides, dtype, layout in zip(
                "abc", ((m, k), (k, n), (m, n)), (of_a, of_b, of_c), order, strict=True
            )
        )
        counted = workspace_nbytes(m, n, k, of_c, precision, operands=(of_a, of_b))
        for name, nbytes in most_borrowed(device, a, b, c, precision).items():
            assert nbytes <= counted, (name, m, n, k, order, device.capability)


def sides_up_to(longest: int) -> st.SearchStrategy[int]:
    return st.one_of(
        st.integers(1, 100),
        st.integers(1, 5000),
        st.integers(1, 300).map(lambda units: 64 * units),
        st.integers(1, longest),
    )


SIDES, DEPTHS = sides_up_to(10**7), sides_up_to(10**6)
"""A k of 10 million has up to 78,000 panels, all of which use what is borrowed once; `SHAPES` have longer ones."""


@settings(max_examples=examples(150))
@given(st.data())
def test_what_is_counted_holds_for_every_tile_and_panel(data: st.DataObject) -> None:
    """Those at the edges too, wherever a panel is cut from, on any GPU."""
    of_a, of_b, of_c, precision = data.draw(st.sampled_from(CASES))
    sides = data.draw(st.tuples(SIDES, SIDES, DEPTHS))
    tile = tuple(data.draw(st.one_of(st.just(side), st.integers(1, side))) for side in sides)
    transposed = data.draw(st.tuples(st.booleans(), st.booleans()))
    padding = data.draw(st.sampled_from(["", " padded"]))
    counted = workspace_nbytes(*tile, of_c, precision, Parent(*sides, *transposed), (of_a, of_b))
    with no_device() as device:
        device.processors = data.draw(st.sampled_from(PROCESSORS))
        device.capability = data.draw(st.sampled_from(CAPABILITIES))
        edges = [
            data.draw(st.sampled_from([side, whole % side or side]))
            for side, whole in zip(tile, sides, strict=True)
        ]
        m, n, k = edges
        a, b, c = (
            laid_out(name, *shape, dtype, ("columns" if turn else "rows") + padding)
            for name, shape, dtype, turn in zip(
                "abc", ((m, k), (k, n), (m, n)), (of_a, of_b, of_c), (*transposed, False), strict=True
            )
        )
        for name, nbytes in most_borrowed(device, a, b, c, precision).items():
            assert nbytes <= counted, (name, edges)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("order", ["rows", "columns", "rows apart"])
@pytest.mark.parametrize("m", [3, 16, 64])
def test_short_wide_results_borrow_no_copy_of_themselves(
    m: int, order: str, dtype: str, device: Device
) -> None:
    n, k, item = 20_000_000, 64, np.dtype(dtype)
    for rows, columns in ((m, n), (n, m)):
        a, b, c = (
            laid_out(name, *sides, item, layout)
            for name, sides, layout in (
                ("a", (rows, k), "rows"),
                ("b", (k, columns), "rows"),
                ("c", (rows, columns), order),
            )
        )
        borrowed = most_borrowed(device, a, b, c, "full")["skinny"]
        assert borrowed <= (skinny_launch.MAX_PARTIAL_NBYTES if order == "rows apart" else 0)


def test_what_is_counted_is_not_far_from_what_is_borrowed() -> None:
    """Bounds by hand: too much counted would shrink tiles."""
    aligned = Parent(2**15, 2**15, 2**15, False, False)
    mebibyte = 2**20
    for dtype in (F4, F8):
        assert workspace_nbytes(8192, 8192, 4096, dtype, "full", aligned) <= 64 * mebibyte + 256
    assert workspace_nbytes(8192, 8192, 256, F4, "full", aligned) <= 64 * mebibyte
    assert workspace_nbytes(256, 256, 256, F4, "full", aligned) <= 8 * 64 * 256 * 4
    assert workspace_nbytes(1000, 1000, 1, F4, "full") == 0
    assert workspace_nbytes(0, 10**9, 10**9, F4, "split") == 0
    assert workspace_nbytes(8192, 8192, 4096, F2, "full") == 2 * (8192 + 8192) * 4096
    assert workspace_nbytes(8192, 8192, 4096, F4, "full", aligned, (F2, F2)) == 0
    split = workspace_nbytes(64, 40_000_000, 256, F4, "split")
    assert 2**31 < split < 2**31 + 41 * mebibyte
    # 8-bit factors need no residues, whatever C is; wider ones do.
    bytes_alone = workspace_nbytes(4096, 4096, 4096, I8, "full", aligned, (I1, I1))
    assert bytes_alone < 34 * mebibyte + 64 * mebibyte
    assert workspace_nbytes(4096, 4096, 4096, I1, "full", aligned, (I8, I8)) > 10 * bytes_alone


# --- On a GPU --------------------------------------------------------------------------------------------

MEASURED = [
    *(
        ((dtype, dtype, dtype, "full"), shape)
        for dtype in (F8, C16)
        for shape in ((64, 1_000_000, 64), (1_000_001, 40, 33), (3, 2_000_000, 16), (64, 64, 300_000))
    ),
    *(
        ((dtype, dtype, dtype, "full"), shape)
        for dtype in (F4, C8, np.dtype("i4"), I8)
        for shape in ((1000, 1000, 20_000), (17, 5000, 3000), (2049, 2051, 2053), (8, 8, 1_000_000))
    ),
    *(
        ((F4, F4, F4, precision), shape)
        for precision in PRECISIONS
        for shape in ((64, 2_000_001, 1000), (1001, 999, 70_000), (4096, 4096, 1024))
    ),
    *(
        ((F2, F2, F2, "full"), shape)
        for shape in ((64, 2_000_001, 1001), (4097, 4097, 4097), (513, 515, 2_100_001))
    ),
    *(((F8, F8, F8, "full"), shape) for shape in ((4097, 4097, 4097), (4100, 4098, 30_001))),
    *(((dtype, dtype, dtype, "split"), (2100, 2300, 5000)) for dtype in (C8, C16)),
    *(((I1, I1, dtype, "full"), (4097, 4097, 4097)) for dtype in (I1, I8)),
    ((I8, I8, I1, "full"), (1000, 1000, 5000)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "shape", "order"),
    [(*measured, ("CCC", "FCC", "CFF")[place % 3]) for place, measured in enumerate(MEASURED)],
    ids=str,
)
def test_no_product_takes_more_of_the_gpu_than_is_counted(
    case: tuple[np.dtype, np.dtype, np.dtype, str], shape: tuple[int, int, int], order: str
) -> None:
    """What is allocated for scratch memory, and kept: operands hold whatever was in the memory."""
    from numba import cuda

    from tilewright.kernels import matmul

    of_a, of_b, of_c, precision = case
    m, n, k = shape
    a, b, c = (
        cuda.device_array(sides, dtype, order=way)
        for sides, dtype, way in zip(((m, k), (k, n), (m, n)), (of_a, of_b, of_c), order, strict=True)
    )
    counted = workspace_nbytes(m, n, k, of_c, precision, operands=(of_a, of_b))
    scratch.release()
    for accumulate in (False, True):
        matmul(a, b, out=c, dtype=of_c, precision=precision, accumulate=accumulate)
    cuda.synchronize()
    taken = sum(buffer.size for buffer in scratch._buffers.values())
    assert taken <= counted
    tall = max(m, n) >= 1_000_000 and of_c in (F8, C16)
    assert not (tall and taken), "C is written where it lies"
    assert taken or not (precision in ("split", "bf16", "fp16") and of_a == F4), "the measurement itself"
