"""A float matrix on its way to the Hopper tensor cores: as it lies, or through a pass into scratch memory.

What a pass writes is bounded by `PLANES_NBYTES`: k is walked in panels, and where sides are so long that panels would
be too shallow, these in stretches. Panels after the first add to C. If that has 16 bits each would round it again, so
there sides are cut until all of k fits; and where k is too long for that, sums are collected in float32, in scratch
memory too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewright.kernels.gemm.base import PLANES_NBYTES, Operand
from tilewright.kernels.gemm.hopper import float_planes, line_powers
from tilewright.kernels.gemm.hopper.wgmma_launch import Launchable, Output, Planes, compile_launchable
from tilewright.kernels.gpu.compiled import multiprocessors
from tilewright.kernels.gpu.device_array import address
from tilewright.kernels.gpu.device_choice import current_device
from tilewright.kernels.numbers import ceil_div, round_up

DEPTH_UNIT = 64
"""Panels are multiples of it deep: whole lines of shared memory in every form, without padding."""
LEAST_DEPTH = 256
"""Panels are at least this deep, unless k is less: each but the first reads and writes C once more."""
LINES_UNIT = 256
"""Stretches of a side are multiples of it long: whole tiles, and lines aligned as the whole operand's are."""
WHOLE_DEPTH_LINES = 8192
"""Lines of both operands together that scratch memory must hold, with all of k, so that stretches are multiplied that
way. With fewer the operands would be copied so often, and stretches give the GPU so few tiles, that collecting sums,
which takes some 15 % of a product's time, costs less."""
KEPT_SHARE = 3 / 4
"""The share of them that is the left operand's, whose stretches are copied once; the right's are once for each of
these."""
SUMS_SHARE = 1 / 4
"""The share of the scratch memory for sums that are collected."""
LINE_UNIT_NBYTES = 128
SUM_NBYTES = 4
"""A sum in float32."""
LINE_STRETCHES = 4
"""How often a block that looks for the range of a line goes through its elements: 8192 of them."""
BLOCKS_PER_MULTIPROCESSOR = 32
"""Blocks of a pass that takes segments: several times as many as run at once, so that all multiprocessors end at about
the same time."""
RESIDENT_BLOCKS = 4
"""Blocks of a pass on a multiprocessor at a time: 64 registers a thread."""
TURN_RESIDENT_BLOCKS = 6
"""The same of the pass that turns: 40 registers a thread."""


@dataclass(frozen=True)
class FloatOperand:
    """op(A), or the transpose of op(B): ``outer`` rows (columns of B) by ``depth`` elements of k."""

    address: int
    dtype: np.dtype
    outer: int
    depth: int
    outer_stride: int
    """In elements, as k_stride."""
    k_stride: int
    by_k: bool = False
    """Whether a pass is to write lines of k whichever side is contiguous here."""

    @property
    def k_major(self) -> bool:
        """Whether k is contiguous; a matrix with neither side contiguous is read as if k were."""
        return self.by_k or self.k_stride == 1 or self.outer_stride != 1

    def panel(self, first: int, depth: int) -> FloatOperand:
        """The stretch of k that begins at ``first``."""
        start = self.address + first * self.k_stride * self.dtype.itemsize
        return replace(self, address=start, depth=depth)

    def stretch(self, first: int, outer: int) -> FloatOperand:
        """The rows (columns of B) that begin at ``first``."""
        start = self.address + first * self.outer_stride * self.dtype.itemsize
        return replace(self, address=start, outer=outer)

    def in_place(self, kind: str) -> Planes | None:
        """The matrix for the copy engine where it lies; None if it must go through a pass."""
        width, lines = (self.depth, self.outer) if self.k_major else (self.outer, self.depth)
        stride, line_stride = (
            (self.k_stride, self.outer_stride) if self.k_major else (self.outer_stride, self.k_stride)
        )
        nbytes = line_stride * self.dtype.itemsize
        planes = Planes(self.address, width, lines, 1, nbytes, nbytes * lines, kind)
        return planes if stride == 1 and line_stride >= width and planes.loadable else None


def operands(a: Any, b: Any) -> tuple[FloatOperand, FloatOperand]:
    """A and B of a product, m × k and k × n device arrays of any strides."""
    return _operand(a, 0), _operand(b, 1)


def _operand(matrix: Any, outer_axis: int) -> FloatOperand:
    k_axis = 1 - outer_axis
    size = matrix.dtype.itemsize
    return FloatOperand(
        address(matrix),
        matrix.dtype,
        outer=matrix.shape[outer_axis],
        depth=matrix.shape[k_axis],
        outer_stride=matrix.strides[outer_axis] // size,
        k_stride=matrix.strides[k_axis] // size,
    )


def problem_operand(operand: Operand, outer_axis: int) -> FloatOperand:
    """An operand of a `Problem`, A (``outer_axis`` 0) or B (1). Of its address only the alignment is known: that is
    given as the address."""
    sides = operand.rows, operand.columns
    return FloatOperand(
        operand.alignment,
        operand.dtype,
        outer=sides[outer_axis],
        depth=sides[1 - outer_axis],
        outer_stride=operand.strides[outer_axis],
        k_stride=operand.strides[1 - outer_axis],
    )


def line_nbytes(width: int, form: str) -> int:
    """From line to line of a plane with lines of ``width`` elements."""
    return round_up(width * float_planes.itemsize(form), LINE_UNIT_NBYTES)


def _count(form: str) -> int:
    """Planes of an operand."""
    return {"split": 3, "halves": 2}.get(form, 1)


def turned(operand: FloatOperand, form: str) -> bool:
    """Whether the pass must turn the matrix to make k contiguous."""
    return form == "tf32" and not operand.k_major


def planes_nbytes(operand: FloatOperand, depth: int, form: str) -> int:
    """Scratch memory of a panel of ``depth`` elements of k."""
    count = _count(form)
    if operand.k_major or turned(operand, form):
        return count * operand.outer * line_nbytes(depth, form)
    return count * depth * line_nbytes(operand.outer, form)


@dataclass(frozen=True)
class Cut:
    """The pieces of a product whose planes fit into the scratch memory."""

    depth: int
    """Elements of k in a panel."""
    lines: tuple[int, int]
    """Rows of A, and columns of B, in a stretch."""

    def stretches(
        self, a: FloatOperand, b: FloatOperand, output: Output
    ) -> Iterator[tuple[FloatOperand, FloatOperand, Output]]:
        """The products that make up the whole one. Each walks k in panels of the same depth, so how its elements are
        added up does not depend on where the stretches end; but of float32 in parts, into how many parts numbers are
        split is found for each panel of a stretch."""
        for row in range(0, a.outer, self.lines[0]):
            rows = min(self.lines[0], a.outer - row)
            for column in range(0, b.outer, self.lines[1]):
                columns = min(self.lines[1], b.outer - column)
                yield (
                    a.stretch(row, rows),
                    b.stretch(column, columns),
                    output.part(row, rows, column, columns),
                )


def cut(
    a: FloatOperand,
    b: FloatOperand,
    form: str,
    *,
    narrow: bool = False,
    passing: tuple[bool, bool] = (True, True),
) -> Cut:
    """How a product is cut so that the planes of both operands take at most `PLANES_NBYTES`.

    A side is cut only where panels `LEAST_DEPTH` deep would take more than half of that. narrow: C has 16 bits, so that
    panels must not be added up in it. Either there is only one, or the planes leave room for `sums_nbytes`. passing:
    which operands go through a pass; only for a narrow C the others do not count.
    """
    k = round_up(a.depth, DEPTH_UNIT)
    line = _count(form) * line_nbytes(min(k, LEAST_DEPTH), form)
    most = max(LINES_UNIT, PLANES_NBYTES // 2 // line // LINES_UNIT * LINES_UNIT)
    lines = _even(a.outer, most, LINES_UNIT), _even(b.outer, most, LINES_UNIT)
    depth = _affordable_depth(a, b, lines, form, PLANES_NBYTES)
    if not narrow or depth >= k:
        return Cut(_even(k, depth, DEPTH_UNIT), lines)
    room = PLANES_NBYTES // line_nbytes(k, form)
    if room >= WHOLE_DEPTH_LINES:
        return Cut(k, _whole_depth_lines(a.outer, b.outer, room, passing))
    lines = _collected_lines(a.outer, b.outer)
    depth = _affordable_depth(a, b, lines, form, PLANES_NBYTES - sums_nbytes(lines), passing)
    return Cut(_even(k, depth, DEPTH_UNIT), lines)


def _affordable_depth(
    a: FloatOperand,
    b: FloatOperand,
    lines: tuple[int, int],
    form: str,
    nbytes: int,
    passing: tuple[bool, bool] = (True, True),
) -> int:
    """The most elements of k for which the planes of stretches of so many lines take at most ``nbytes``."""
    heads = [operand.stretch(0, length) for operand, length in zip((a, b), lines, strict=True)]
    unit = sum(
        planes_nbytes(head, DEPTH_UNIT, form) for head, passes in zip(heads, passing, strict=True) if passes
    )
    return max(DEPTH_UNIT, nbytes // unit * DEPTH_UNIT)


def _whole_depth_lines(m: int, n: int, room: int, passing: tuple[bool, bool]) -> tuple[int, int]:
    """Lines of stretches of A and B that together are at most ``room``, not counting what is in place."""
    if not all(passing):
        most = room // LINES_UNIT * LINES_UNIT
        return _even(m, most, LINES_UNIT) if passing[0] else m, _even(n, most, LINES_UNIT) if passing[
            1
        ] else n
    whole_m, whole_n = (round_up(side, LINES_UNIT) for side in (m, n))
    of_a = min(whole_m, max(int(room * KEPT_SHARE), room - whole_n)) // LINES_UNIT * LINES_UNIT
    of_b = min(whole_n, room - of_a) // LINES_UNIT * LINES_UNIT
    return _even(m, of_a, LINES_UNIT), _even(n, of_b, LINES_UNIT)


def _collected_lines(m: int, n: int) -> tuple[int, int]:
    """Lines of stretches of A and B whose sums take about `SUMS_SHARE` of the scratch memory, or less."""
    elements = int(PLANES_NBYTES * SUMS_SHARE) // SUM_NBYTES
    square = math.isqrt(elements) // LINES_UNIT * LINES_UNIT or LINES_UNIT

    def stretch(side: int, other: int) -> int:
        most = elements // min(sums_pitch(other), square) // LINES_UNIT * LINES_UNIT
        return _even(side, most or LINES_UNIT, LINES_UNIT)

    return stretch(m, n), stretch(n, m)


def sums_pitch(columns: int) -> int:
    """Sums from line to line: whole lines of memory."""
    unit = LINE_UNIT_NBYTES // SUM_NBYTES
    return round_up(columns, unit)


def sums_nbytes(lines: tuple[int, int]) -> int:
    """Scratch memory of the sums of a stretch."""
    return lines[0] * sums_pitch(lines[1]) * SUM_NBYTES


def _even(length: int, most: int, unit: int) -> int:
    """The length of pieces, all but the last multiples of ``unit``, of at most ``most``, which is one."""
    if length <= most:
        return length
    return ceil_div(ceil_div(length, ceil_div(length, most)), unit) * unit


def most_nbytes(m: int, n: int, k: int, form: str) -> int:
    """An upper bound for the planes of a product of these sides or smaller ones, whatever its operands' layouts."""
    depth = round_up(k, DEPTH_UNIT)
    lines = line_nbytes(m, form) + line_nbytes(n, form)
    return min(_count(form) * lines * depth, PLANES_NBYTES)


@functools.cache
def _pass(form: str, turn: bool) -> Launchable:
    return compile_launchable(
        float_planes.turn_function() if turn else float_planes.pass_function(form),
        float_planes.ARGUMENTS,
        threads=float_planes.THREADS,
        blocks_per_multiprocessor=TURN_RESIDENT_BLOCKS if turn else RESIDENT_BLOCKS,
    )


@functools.cache
def _reset() -> Launchable:
    return compile_launchable(
        float_planes.reset_function(),
        float_planes.RESET_ARGUMENTS,
        threads=float_planes.THREADS,
        blocks_per_multiprocessor=RESIDENT_BLOCKS,
    )


def reset_flags(plan: int, flags: int, count: int, stream: Any) -> None:
    """Enqueue clearing the flags and the plan's NONFINITE."""
    _reset().launch(ceil_div(count, float_planes.THREADS), stream, plan, flags, count)


@functools.cache
def _line_pass(name: str) -> Launchable:
    functions: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "begin": (line_powers.begin_function(), line_powers.BEGIN_ARGUMENTS),
        "along": (line_powers.range_function(turned=False), line_powers.RANGE_ARGUMENTS),
        "across": (line_powers.range_function(turned=True), line_powers.RANGE_ARGUMENTS),
        "power": (line_powers.power_function(), line_powers.POWER_ARGUMENTS),
    }
    function, arguments = functions[name]
    return compile_launchable(
        function, arguments, threads=line_powers.THREADS, blocks_per_multiprocessor=RESIDENT_BLOCKS
    )


def find_powers(a: FloatOperand, b: FloatOperand, plan: int, ranges: int, powers: int, stream: Any) -> None:
    """Enqueue what finds the powers of two of the lines of both operands (int32 at ``powers``), and whether all lines
    can be scaled. ranges: scratch memory of 8 bytes a line, which is free again then."""
    count = a.outer + b.outer
    most, least = ranges, ranges + 4 * count
    blocks = ceil_div(count, line_powers.THREADS)
    _line_pass("begin").launch(blocks, stream, plan, most, least, count)
    for operand, before in ((a, 0), (b, a.outer)):
        if operand.k_major:
            stretch = line_powers.THREADS * line_powers.BATCH * LINE_STRETCHES
            name, grid = "along", (operand.outer, ceil_div(operand.depth, stretch))
        else:
            name = "across"
            grid = (
                ceil_div(operand.outer, line_powers.THREADS),
                ceil_div(operand.depth, line_powers.DEPTH),
            )
        _line_pass(name).launch(
            grid,
            stream,
            operand.address,
            operand.outer_stride,
            operand.k_stride,
            operand.outer,
            operand.depth,
            most + 4 * before,
            least + 4 * before,
        )
    _line_pass("power").launch(blocks, stream, plan, most, least, powers, count)


def make_planes(
    operand: FloatOperand,
    form: str,
    kind: str,
    target: int,
    stream: Any,
    *,
    plan: int = 0,
    flags: int = 0,
    powers: int = 0,
) -> Planes:
    """Enqueue the pass that writes the planes of ``operand`` at ``target``, and say how they lie there."""
    turn = turned(operand, form)
    by_outer = operand.k_major or turn
    lines, width = (operand.outer, operand.depth) if by_outer else (operand.depth, operand.outer)
    line_stride, stride = (
        (operand.outer_stride, operand.k_stride) if by_outer else (operand.k_stride, operand.outer_stride)
    )
    nbytes = line_nbytes(width, form)
    itemsize = float_planes.itemsize(form)
    if turn:
        grid = ceil_div(lines, float_planes.TURN_SIDE) * ceil_div(width, float_planes.TURN_SIDE)
    else:
        segments = lines * ceil_div(width, float_planes.SEGMENT)
        grid = min(segments, BLOCKS_PER_MULTIPROCESSOR * multiprocessors(current_device()))
    _pass(form, turn).launch(
        grid,
        stream,
        operand.address,
        line_stride,
        stride,
        lines,
        width,
        target,
        nbytes // itemsize,
        lines * nbytes // itemsize,
        plan,
        flags,
        int(by_outer),
        powers,
    )
    return Planes(target, width, lines, _count(form), nbytes, lines * nbytes, kind)
