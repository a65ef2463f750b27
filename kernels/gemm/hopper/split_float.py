"""``precision="split"``: float32 accuracy from bfloat16 tensor cores, on Hopper.

A float32 number is the sum of three bfloat16 numbers: its rounding h, the rounding m of what is left, and
the rest l. Of the nine products of parts, the six that float32 can notice are multiplied: hh, hm, mh, mm,
hl and lh; the largest of the others is below 2**-26 of the product. The products of bfloat16 numbers are
exact in float32; sums over 64 elements of k are formed on the tensor cores, which truncate, and added up in ordinary
float32 arithmetic, which rounds.

Splitting into bfloat16 triples is Henry, Tang and Heinecke's (2019), the separate additions that undo the tensor cores'
truncation are Ootomo and Yokota's (2022).

Infinities and NaN: they enter the six products as zeros, and their rows and columns are flagged. Only if
there are any, one more product of signs (plus or minus 1, 0, and the infinities and NaN themselves) runs,
whose results in the flagged rows and columns are what IEEE arithmetic gives there.

Range: bfloat16 has float32's exponents. A finite result within 1 part in 128 of the largest float32 may
come out as infinity, and numbers below 2**-102 keep fewer bits, since their lowest part underflows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from numba.cuda import types

from tilewright.kernels.gemm.base import GemmKernel, Problem, Variant
from tilewright.kernels.gemm.hopper import float_operand, float_planes
from tilewright.kernels.gemm.hopper.float_operand import (
    RESIDENT_BLOCKS,
    cut,
    make_planes,
    operands,
    planes_nbytes,
    reset_flags,
)
from tilewright.kernels.gemm.hopper.float_planes import NONFINITE
from tilewright.kernels.gemm.hopper.half_tensor_core import FLOAT32, large_enough, on_hopper
from tilewright.kernels.gemm.hopper.wgmma_config import Config
from tilewright.kernels.gemm.hopper.wgmma_launch import (
    launch_product,
    output_of,
    pass_variant,
    variant,
)
from tilewright.kernels.gemm.scratch import borrowed
from tilewright.kernels.numbers import round_up

PLAN_NBYTES = 256
FLAGS_UNIT = 256


def _product(m_major_a: bool, n_major_b: bool) -> Config:
    """Two sets of sums a thread, in registers, leave room for 192 columns; six products a stage need no
    cluster.
    """
    return Config(
        "bf16",
        "bf16",
        types.float32,
        m_major_a=m_major_a,
        n_major_b=n_major_b,
        parts=3,
        tile_n=192,
        stages=5,
        cluster=1,
    )


def _repair(m_major_a: bool, n_major_b: bool) -> Config:
    """The product of signs, where there are infinities or NaN."""
    return Config(
        "bf16",
        "bf16",
        types.float32,
        m_major_a=m_major_a,
        n_major_b=n_major_b,
        plan_kind=NONFINITE,
        flagged_only=True,
    )


@dataclass(frozen=True)
class Engine:
    """Tensor cores of some kind: Hopper's here, those of `tensor.float_mma`."""

    config: Callable[[str, bool, bool], Any]
    """``config(form, m_major_a, n_major_b)``: of the product of parts (form ``split``), and of signs (``signs``)."""
    launch_product: Callable[..., None]
    """As `wgmma_launch.launch_product`, of operands of three planes where they are split."""


def launch(a: Any, b: Any, c: Any, accumulate: bool, stream: Any, *, lower: bool = False) -> None:
    """See ``GemmKernel.launch``."""
    multiply(WGMMA, a, b, c, accumulate, stream, lower=lower)


def multiply(
    engine: Engine, a: Any, b: Any, c: Any, accumulate: bool, stream: Any, *, lower: bool = False
) -> None:
    """The same on tensor cores of any kind."""
    left, right = operands(a, b)
    output = output_of(c, types.float32, lower=lower)
    if output.transposed:  # column-major C: its transpose is B's transpose times A's
        left, right = right, left
    majors = not left.k_major, not right.k_major
    product, repair = engine.config("split", *majors), engine.config("signs", *majors)
    pieces = cut(left, right, "split")
    flags_nbytes = _flags_nbytes(*pieces.lines)
    room = [
        planes_nbytes(operand.stretch(0, lines), pieces.depth, "split")
        for operand, lines in zip((left, right), pieces.lines, strict=True)
    ]
    with borrowed(PLAN_NBYTES + flags_nbytes + sum(room), stream) as plan:
        flags = plan + PLAN_NBYTES
        targets = flags + flags_nbytes, flags + flags_nbytes + room[0]
        for rows, columns, part in pieces.stretches(left, right, output):
            marks = flags, flags + rows.outer
            for first in range(0, left.depth, pieces.depth):
                length = min(pieces.depth, left.depth - first)
                add = accumulate or first > 0
                panels = rows.panel(first, length), columns.panel(first, length)
                reset_flags(plan, flags, rows.outer + columns.outer, stream)
                for form, config in (("split", product), ("signs", repair)):
                    planes = [
                        make_planes(
                            panels[side], form, "bf16", targets[side], stream, plan=plan, flags=marks[side]
                        )
                        for side in range(2)
                    ]
                    engine.launch_product(
                        config, planes[0], planes[1], part, length, add, stream, plan=plan, workspace=flags
                    )


WGMMA = Engine(
    lambda form, *majors: _product(*majors) if form == "split" else _repair(*majors),
    lambda *given, **more: launch_product(*given, **more),
)


def _flags_nbytes(m: int, n: int) -> int:
    """A byte for each row and column, that says whether there is an infinity or NaN in it."""
    return round_up(m + n, FLAGS_UNIT)


def most_nbytes(m: int, n: int, k: int) -> int:
    """An upper bound for the scratch memory of a product of these sides or smaller ones, whatever its layouts."""
    return PLAN_NBYTES + _flags_nbytes(m, n) + float_operand.most_nbytes(m, n, k, "split")


def supports(problem: Problem) -> bool:
    """`is_asked`, on Hopper."""
    return on_hopper(problem) and is_asked(problem)


def is_asked(problem: Problem) -> bool:
    """float32 throughout, the caller said ``precision="split"``, and it pays."""
    every = (problem.a, problem.b, problem.c)
    return (
        problem.precision == "split"
        and large_enough(problem)
        and all(operand.dtype == FLOAT32 for operand in every)
    )


def variants() -> Iterable[Variant]:
    """Every layout of the product, the repair, and the passes."""
    for m_major, n_major in itertools.product((False, True), repeat=2):
        layout = f"{'m' if m_major else 'k'}-major by {'n' if n_major else 'k'}-major"
        yield variant(f"split, {layout}", _product(m_major, n_major))
    yield variant("repair", _repair(False, True))
    for form in ("split", "signs"):
        yield pass_variant(
            f"to {form}",
            float_planes.pass_function(form),
            float_planes.ARGUMENTS,
            float_planes.THREADS,
            RESIDENT_BLOCKS,
        )
    reset = float_planes.reset_function()
    yield pass_variant("reset", reset, float_planes.RESET_ARGUMENTS, float_planes.THREADS, RESIDENT_BLOCKS)


SPLIT = GemmKernel(
    name="split-float32-wgmma",
    summary="float32 as three bfloat16 parts on the tensor cores, as accurate as float32",
    supports=supports,
    launch=launch,
    recordable=True,
    halves=True,
    variants=variants,
)
