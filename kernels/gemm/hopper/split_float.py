"""``precision="split"``: float32 accuracy from 16-bit tensor cores, on Hopper.

**Two float16 parts.** Each row of A, and column of B, is scaled by a power of two to make the most of float16's range
(`line_powers`). A number x is then h + l / 2**11, to within 2**-23 of it (where it is not tiny beside others of its
line): h is the float16 next to x, and l the one next to 2**11 (x - h). Of the four products of parts hh, hl and lh are
multiplied; ll is below 2**-22 of the product. Of numbers of many kinds what is lost in that way is of either sign from
element to element of k, and its sum far below what float32 rounds off as it adds up all of k, where k is not small; of
numbers that are all alike it adds up, to at most 2**-21 of the absolute products. Where a line's numbers are of too
different sizes, the plan says so on the device, and three parts are multiplied instead; so are smaller products.

**Three bfloat16 parts.** A float32 number is the sum of three bfloat16 numbers: its rounding h, the rounding m of what
is left, and the rest l. Of the nine products of parts, the six that float32 can notice are multiplied: hh, hm, mh, mm,
hl and lh; the largest of the others is below 2**-26 of the product.

The products of parts are exact in float32. Sums over 64 elements of k are formed on the tensor cores, which truncate,
and added up in ordinary float32 arithmetic, which rounds.

Splitting into bfloat16 triples is Henry, Tang and Heinecke's (2019); two float16 parts, the low one of them scaled, and
the separate additions that undo the tensor cores' truncation are Ootomo and Yokota's (2022), who do not scale lines.

Infinities and NaN: they enter all these products as zeros, and their rows and columns are flagged. Only if there are
any, one more product of signs (plus or minus 1, 0, and the infinities and NaN themselves) runs, whose results in the
flagged rows and columns are what IEEE arithmetic gives there.

Range: float16 parts are of scaled numbers. bfloat16 has float32's exponents: there a finite result within 1 part in 128
of the largest float32 may come out as infinity, and numbers below 2**-102 keep fewer bits, since their lowest part
underflows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from numba.cuda import types

from tilewright.kernels.gemm.base import GemmKernel, Problem, Variant
from tilewright.kernels.gemm.hopper import float_operand, float_planes, line_powers
from tilewright.kernels.gemm.hopper.float_operand import (
    RESIDENT_BLOCKS,
    cut,
    find_powers,
    make_planes,
    operands,
    planes_nbytes,
    reset_flags,
)
from tilewright.kernels.gemm.hopper.float_planes import HALVES, NONFINITE, PARTS_PLAN, THIRDS
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

PLAN_NBYTES, PLAN_WORD_NBYTES = 256, 8
LINES_UNIT = 256
LEAST_HALVES_WORK = 1 << 35
"""m n k of a panel from which on two parts pay, although numbers are looked at first: at 2**33 they are a tenth slower,
at 2**36 faster by seven tenths."""
LEAST_HALVES_DEPTH = 512
"""k from which on what two parts lose is far below what float32 rounds off."""
POWER_NBYTES = 4
"""Of the power of two that scales a line."""


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
        plan_kind=THIRDS,
    )


def _halves(m_major_a: bool, n_major_b: bool) -> Config:
    """The same of two parts. Three products of two stages read more for each operation: two blocks share B, unless its
    boxes of 64 columns cannot be shared."""
    return Config(
        "f16",
        "f16",
        types.float32,
        m_major_a=m_major_a,
        n_major_b=n_major_b,
        parts=2,
        tile_n=192,
        stages=5,
        cluster=1 if n_major_b else 2,
        plan_kind=HALVES,
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
    """``config(form, m_major_a, n_major_b)``: of the product of parts (form ``split`` or ``halves``), and of signs
    (``signs``)."""
    launch_product: Callable[..., None]
    """As `wgmma_launch.launch_product`, of operands of several planes where they are split."""
    halves: bool = False
    """Whether it multiplies float16 parts too."""


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
    pieces = cut(left, right, "split")
    halves = engine.halves and _halves_pay(left.outer, right.outer, min(pieces.depth, left.depth))
    configs = {form: engine.config(form, *majors) for form in FORMS[not halves :]}
    lines_nbytes = _lines_nbytes(*pieces.lines, halves=halves)
    room = [
        planes_nbytes(operand.stretch(0, lines), pieces.depth, "split")
        for operand, lines in zip((left, right), pieces.lines, strict=True)
    ]
    with borrowed(PLAN_NBYTES + lines_nbytes + sum(room), stream) as plan:
        powers = plan + PLAN_NBYTES
        flags = powers + (POWER_NBYTES * sum(pieces.lines) if halves else 0)
        targets = powers + lines_nbytes, powers + lines_nbytes + room[0]
        for rows, columns, part in pieces.stretches(left, right, output):
            marks = flags, flags + rows.outer
            of_lines = powers, powers + POWER_NBYTES * rows.outer
            for first in range(0, left.depth, pieces.depth):
                length = min(pieces.depth, left.depth - first)
                add = accumulate or first > 0
                panels = rows.panel(first, length), columns.panel(first, length)
                reset_flags(plan, flags, rows.outer + columns.outer, stream)
                in_two = halves and length >= LEAST_HALVES_DEPTH
                if in_two:
                    find_powers(*panels, plan, targets[0], powers, stream)  # where no planes are yet
                for form in FORMS[not in_two :]:
                    planes = [
                        make_planes(
                            panels[side],
                            form,
                            KINDS[form],
                            targets[side],
                            stream,
                            plan=plan,
                            flags=marks[side],
                            powers=of_lines[side],
                        )
                        for side in range(2)
                    ]
                    engine.launch_product(
                        configs[form],
                        planes[0],
                        planes[1],
                        part,
                        length,
                        add,
                        stream,
                        plan=plan if form == "signs" else plan + PLAN_WORD_NBYTES * PARTS_PLAN,
                        workspace=powers if form == "halves" else flags,
                    )


FORMS = ("halves", "split", "signs")
"""Of which the first is left out where it does not pay; on the device the plan lets one of the first two be."""
KINDS = {"halves": "f16", "split": "bf16", "signs": "bf16"}
"""PTX operand type of each form."""
CONFIGS = {"halves": _halves, "split": _product, "signs": _repair}
WGMMA = Engine(
    lambda form, *majors: CONFIGS[form](*majors),
    lambda *given, **more: launch_product(*given, **more),
    halves=True,
)


def _halves_pay(m: int, n: int, depth: int) -> bool:
    """Whether two parts of panels so deep pay, and are accurate."""
    return depth >= LEAST_HALVES_DEPTH and m * n * depth >= LEAST_HALVES_WORK


def _lines_nbytes(m: int, n: int, *, halves: bool) -> int:
    """Of each row and column: a byte that says whether there is an infinity or NaN in it, and its power of two."""
    return round_up((1 + POWER_NBYTES * halves) * (m + n), LINES_UNIT)


def most_nbytes(m: int, n: int, k: int) -> int:
    """An upper bound for the scratch memory of a product of these sides or smaller ones, whatever its layouts."""
    lines = _lines_nbytes(m, n, halves=_halves_pay(m, n, k))
    return PLAN_NBYTES + lines + float_operand.most_nbytes(m, n, k, "split")


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
        yield variant(f"halves, {layout}", _halves(m_major, n_major))
    yield variant("repair", _repair(False, True))
    for name, function, arguments in (
        ("no ranges", line_powers.begin_function(), line_powers.BEGIN_ARGUMENTS),
        ("ranges", line_powers.range_function(turned=False), line_powers.RANGE_ARGUMENTS),
        ("ranges, turned", line_powers.range_function(turned=True), line_powers.RANGE_ARGUMENTS),
        ("powers", line_powers.power_function(), line_powers.POWER_ARGUMENTS),
    ):
        yield pass_variant(name, function, arguments, line_powers.THREADS, RESIDENT_BLOCKS)
    for form in ("halves", "split", "signs"):
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
    summary="float32 as two float16 parts, or three of bfloat16, on the tensor cores, as accurate as float32",
    supports=supports,
    launch=launch,
    recordable=True,
    halves=True,
    variants=variants,
)
