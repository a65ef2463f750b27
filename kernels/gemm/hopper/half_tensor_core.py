"""float16 and bfloat16 matrices, and float32 ones where the caller allows a lower precision, on Hopper's tensor cores.

16-bit operands are multiplied as they lie, either way round. float32 operands are rounded to bfloat16 or
float16 in a pass. As TF32 they are read as they lie: with k contiguous from shared memory (the tensor cores ignore the
low bits), otherwise through registers, where they are rounded. Only one operand can come through registers: if both
would, the smaller is rounded and turned in a pass, as is one that the copy engine does not take. Sums are float32; the
tensor cores truncate them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba.cuda import types

from tilewright.kernels.bfloat16 import BFLOAT16, dtype_name
from tilewright.kernels.float8 import FLOAT8, PTX_KINDS
from tilewright.kernels.gemm.base import GemmKernel, Problem, Variant
from tilewright.kernels.gemm.hopper import float_planes
from tilewright.kernels.gemm.hopper.float_operand import (
    RESIDENT_BLOCKS,
    TURN_RESIDENT_BLOCKS,
    FloatOperand,
    cut,
    make_planes,
    operands,
    planes_nbytes,
    problem_operand,
    sums_nbytes,
    sums_pitch,
    turned,
)
from tilewright.kernels.gemm.hopper.rounded_sums import matrix_of, round_sums
from tilewright.kernels.gemm.hopper.rounded_sums import variants as rounding_variants
from tilewright.kernels.gemm.hopper.wgmma_config import Config
from tilewright.kernels.gemm.hopper.wgmma_launch import (
    HOPPER,
    Output,
    Planes,
    launch_product,
    output_of,
    pass_variant,
    variant,
)
from tilewright.kernels.gemm.scratch import borrowed

LEAST_WORK = 1 << 28
"""m n k below which float32 and float8 products, which need passes and err more here, are multiplied in full."""
LEAST_STORED_WORK = 1 << 22
"""The same of 16-bit operands that are multiplied as they lie, in one launch. From 2^18 on that was as fast or faster
where operands lay where they had lain before; at an address that is new their tensor maps are made first."""
LEAST_COPIED_WORK = 1 << 24
"""And of those of which one is copied first: two or three launches."""
LEAST_SIDE = 64
KINDS = {"bf16": "bf16", "fp16": "f16", "tf32": "tf32"}
"""PTX operand type of each precision that a caller may allow."""
FLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
C_TYPES = {FLOAT16: types.float16, BFLOAT16: types.uint16, FLOAT32: types.float32}
"""The type of C's elements in the kernel."""
KINDS_STORED = {FLOAT16: "f16", BFLOAT16: "bf16"}
"""PTX operand type of operands that are multiplied as they are stored."""


THROUGH_REGISTERS = True
"""Whether a TF32 operand whose k is not contiguous comes through registers; False: it is always turned in a pass."""


def large_enough(problem: Problem, least_work: int = LEAST_WORK) -> bool:
    """Whether a product pays on tensor cores, and its sides fit their kernels' coordinates."""
    return (
        min(problem.m, problem.n) >= LEAST_SIDE
        and problem.m * problem.n * problem.k >= least_work
        and max(problem.m, problem.n, problem.k) < 1 << 31
    )


def least_stored_work(problem: Problem) -> int:
    """m n k from which on 16-bit operands, laid out as these, pay on tensor cores."""
    copied = any(
        problem_operand(operand, axis).in_place(KINDS_STORED[operand.dtype]) is None
        for axis, operand in enumerate((problem.a, problem.b))
    )
    return LEAST_COPIED_WORK if copied else LEAST_STORED_WORK


def register_operand(a: FloatOperand, b: FloatOperand, *, half: bool = False) -> FloatOperand | None:
    """Which of two TF32 operands comes through registers as it lies: the larger of those that the copy engine takes and
    whose k is not contiguous; None where there is none. half: of C, only elements up to the diagonal are wanted."""
    sides = (a,) if half else (a, b)  # C by columns would have its other half computed
    candidates = [
        operand for operand in sides if turned(operand, "tf32") and operand.in_place("tf32") is not None
    ]
    return max(candidates, key=lambda operand: operand.outer, default=None)


@dataclass(frozen=True)
class Engine:
    """Tensor cores of some kind: Hopper's here, those of `tensor.float_mma`."""

    config: Callable[..., Any]
    """``config(kind, c_type, k_major_a, k_major_b, c_by_columns)``: what ``launch_product`` takes first."""
    launch_product: Callable[..., None]
    """As `wgmma_launch.launch_product`."""
    through_registers: Callable[[], bool]
    """Whether a TF32 operand whose k is not contiguous may come through registers."""
    either_way: bool = False
    """Whether TF32 operands may lie either way round in shared memory."""


def multiply(
    engine: Engine,
    kind: str,
    a: FloatOperand,
    b: FloatOperand,
    output: Output,
    accumulate: bool,
    stream: Any,
) -> None:
    """Enqueue the product of operands of type ``kind``, each as it lies or through the pass it needs."""
    stored = a.dtype in (FLOAT16, BFLOAT16)
    loadable = stored or kind == "tf32"
    form = "copy" if stored else kind  # of float8: as wide as what it is widened to
    half = output.diagonal is not None
    kept = register_operand(a, b, half=half) if kind == "tf32" and engine.through_registers() else None
    by_columns = kept is not None and kept is b
    if by_columns:  # registers hold the left operand: C's transpose is B's transpose times A's
        a, b, output = b, a, output.flipped
    turning = [
        operand is not kept
        and turned(operand, form)
        and not (engine.either_way and operand.in_place(kind) is not None)
        for operand in (a, b)
    ]
    k_major = [operand.k_major or turn for operand, turn in zip((a, b), turning, strict=True)]
    whole = [
        operand.in_place(kind) if loadable and not turn else None
        for operand, turn in zip((a, b), turning, strict=True)
    ]
    if whole[0] is not None and whole[1] is not None:
        config = engine.config(kind, output.c_type, *k_major, by_columns)
        engine.launch_product(config, whole[0], whole[1], output, a.depth, accumulate, stream)
        return
    narrow = output.c_type.bitwidth == 16
    pieces = cut(a, b, form, narrow=narrow, passing=(whole[0] is None, whole[1] is None))
    collected = narrow and pieces.depth < a.depth
    room = [
        planes_nbytes(operand.stretch(0, lines), pieces.depth, form) if planes is None else 0
        for operand, lines, planes in zip((a, b), pieces.lines, whole, strict=True)
    ]
    sums_room = sums_nbytes(pieces.lines) if collected else 0
    made: list[tuple[FloatOperand, Planes] | None] = [None, None]

    def loaded(side: int, panel: FloatOperand, target: int) -> Planes:
        """The panel as it lies or as its pass leaves it, which the stretch before may have seen to."""
        there = None if whole[side] is None else panel.in_place(kind)
        if there is not None:
            return there
        held = made[side]
        if held is None or held[0] != panel:
            own = PTX_KINDS.get(panel.dtype, form)
            held = made[side] = panel, make_planes(panel, own, kind, target, stream)
        return held[1]

    with borrowed(sum(room) + sums_room, stream) as scratch:
        for left, right, part in pieces.stretches(a, b, output):
            sums = _sums(scratch + sum(room), part) if collected else part
            config = engine.config(kind, sums.c_type, *k_major, by_columns)
            for first in range(0, a.depth, pieces.depth):
                length = min(pieces.depth, a.depth - first)
                planes_a = loaded(0, left.panel(first, length), scratch)
                planes_b = loaded(1, right.panel(first, length), scratch + room[0])
                add = first > 0 or (accumulate and not collected)
                engine.launch_product(config, planes_a, planes_b, sums, length, add, stream)
            if collected:
                round_sums(matrix_of(sums, FLOAT32), matrix_of(part, a.dtype), accumulate, stream)


def _sums(address: int, part: Output) -> Output:
    """The sums of a stretch of C, in float32 at an address."""
    pitch = sums_pitch(part.columns)
    return Output(address, part.rows, part.columns, pitch, 1, types.float32, False, part.diagonal)


@functools.cache
def _config(kind: str, c_type: Any, k_major_a: bool, k_major_b: bool, c_by_columns: bool = False) -> Config:
    """A C of 16 bits leaves through shared memory: written from registers it fills half sectors. The boxes of a
    whole tile leave room for three stages, and are faster than fewer boxes and four stages. float32 fills sectors
    from registers, which is as fast as boxes or faster.
    """
    narrow = c_type.bitwidth == 16
    return Config(
        kind,
        kind,
        c_type,
        m_major_a=not k_major_a,
        n_major_b=not k_major_b,
        c_by_columns=c_by_columns,
        bfloat16_c=c_type == C_TYPES[BFLOAT16],
        boxes=4 if narrow else 0,
        stages=3 if narrow else 4,
    )


WGMMA = Engine(
    lambda *given: _config(*given), lambda *given: launch_product(*given), lambda: THROUGH_REGISTERS
)


def launcher(kind: str, engine: Engine = WGMMA) -> Callable[..., None]:
    """``GemmKernel.launch`` for operands that are multiplied as ``kind``: of that type, or float32 or float8."""

    def launch(a: Any, b: Any, c: Any, accumulate: bool, stream: Any, *, lower: bool = False) -> None:
        left, right = operands(a, b)
        output = output_of(c, C_TYPES[c.dtype], lower=lower)
        if output.transposed:  # column-major C: its transpose is B's transpose times A's
            left, right = right, left
        multiply(engine, kind, left, right, output, accumulate, stream)

    return launch


def on_hopper(problem: Problem) -> bool:
    """Whether the GPU has warpgroup tensor cores."""
    return problem.capability == HOPPER


def supports_stored(
    dtype: np.dtype, capable: Callable[[Problem], bool] = on_hopper
) -> Callable[[Problem], bool]:
    """Operands of 16 bits, and a C of the same type, or in the float32 that sums are formed in."""

    def supports(problem: Problem) -> bool:
        return (
            capable(problem)
            and problem.a.dtype == problem.b.dtype == dtype
            and problem.c.dtype in (dtype, FLOAT32)
            and large_enough(problem, least_stored_work(problem))
        )

    return supports


def supports_float8(capable: Callable[[Problem], bool] = on_hopper) -> Callable[[Problem], bool]:
    """float8 operands of either kind each, and a C of float32."""

    def supports(problem: Problem) -> bool:
        return (
            capable(problem)
            and large_enough(problem)
            and problem.a.dtype in FLOAT8
            and problem.b.dtype in FLOAT8
            and problem.c.dtype == FLOAT32
        )

    return supports


def supports_asked(
    precision: str, capable: Callable[[Problem], bool] = on_hopper
) -> Callable[[Problem], bool]:
    """float32 throughout, and the caller allows this precision."""

    def supports(problem: Problem) -> bool:
        every = (problem.a, problem.b, problem.c)
        return (
            capable(problem)
            and problem.precision == precision
            and large_enough(problem)
            and all(operand.dtype == FLOAT32 for operand in every)
        )

    return supports


def _pass_variant(form: str, *, turn: bool = False) -> Variant:
    function = float_planes.turn_function() if turn else float_planes.pass_function(form)
    name = f"to {form}{', turned' if turn else ''}"
    blocks = TURN_RESIDENT_BLOCKS if turn else RESIDENT_BLOCKS
    return pass_variant(name, function, float_planes.ARGUMENTS, float_planes.THREADS, blocks)


def _stored_variants(kind: str, dtype: np.dtype) -> Iterable[Variant]:
    for k_major_a, k_major_b in itertools.product((True, False), repeat=2):
        layout = f"{'k' if k_major_a else 'm'}-major by {'k' if k_major_b else 'n'}-major"
        # With k contiguous in both and C in float32 it is what precision="bf16" and "fp16" use.
        for c_dtype in (dtype,) if k_major_a and k_major_b else (dtype, FLOAT32):
            name = f"{dtype_name(dtype)} to {dtype_name(c_dtype)}, {layout}"
            yield variant(name, _config(kind, C_TYPES[c_dtype], k_major_a, k_major_b))


def _half_variants() -> Iterable[Variant]:
    yield from _stored_variants("f16", FLOAT16)
    yield from rounding_variants(FLOAT16)
    yield _pass_variant("copy")


def _bfloat_variants() -> Iterable[Variant]:
    yield from _stored_variants("bf16", BFLOAT16)
    yield from rounding_variants(BFLOAT16)


def _asked_variants(kind: str) -> Callable[[], Iterable[Variant]]:
    def variants() -> Iterable[Variant]:
        yield variant(f"{kind}, k-major", _config(kind, types.float32, True, True))
        yield _pass_variant(kind)
        if kind == "tf32":
            yield variant(f"{kind}, m-major", _config(kind, types.float32, False, True))
            yield variant(f"{kind}, n-major", _config(kind, types.float32, False, True, c_by_columns=True))
            yield _pass_variant(kind, turn=True)

    return variants


HALF = GemmKernel(
    name="float16-wgmma",
    summary="float16 on the tensor cores, sums in float32",
    supports=supports_stored(FLOAT16),
    launch=launcher("f16"),
    recordable=True,
    halves=True,
    variants=_half_variants,
)
BFLOAT = GemmKernel(
    name="bfloat16-wgmma",
    summary="bfloat16 on the tensor cores, sums in float32",
    supports=supports_stored(BFLOAT16),
    launch=launcher("bf16"),
    recordable=True,
    halves=True,
    variants=_bfloat_variants,
)
ASKED = tuple(
    GemmKernel(
        name=f"{precision}-wgmma",
        summary=f"float32 operands as {kind} on the tensor cores, because precision={precision!r} allows it",
        supports=supports_asked(precision),
        launch=launcher(kind),
        recordable=True,
        halves=True,
        variants=_asked_variants(kind),
    )
    for precision, kind in KINDS.items()
)
