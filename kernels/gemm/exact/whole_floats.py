"""Float products whose factors hold nothing but small whole numbers (counts, genotypes, masks): one product of bytes.

A pass over each factor writes the lowest byte of every element, as the one for integers does, and ends where a number
is found that is not whole. If all are, and those of each factor are within [-128, 127] or [0, 255], the int8 tensor
cores form the exact sums, which are rounded once to C's type: float32 holds those up to 2^24 as they are, float64 all.
So the answer is at least as good as that of any other kernel, whatever precision was asked for.

The host waits for what the passes have found, and so for what was enqueued on the stream before.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba.cuda import types

from tilewright.kernels.gemm.base import Problem
from tilewright.kernels.gemm.cores.repitch import Matrix, matrix
from tilewright.kernels.gemm.exact import byte_planes
from tilewright.kernels.gemm.exact.exact_integer import (
    LEAST_SIDE,
    LINE_UNIT,
    MMA,
    PLAN_NBYTES,
    WGMMA,
    Engine,
    Lines,
    compile_passes,
    decide,
    layout,
    make_planes,
    planes_at,
    reset,
)
from tilewright.kernels.gemm.exact.outcomes import note
from tilewright.kernels.gemm.exact.residues import PLAN_KIND, SINGLE_DEPTH_LIMIT, SINGLE_KINDS
from tilewright.kernels.gemm.hopper.wgmma_launch import HOPPER, output_of, read_plan
from tilewright.kernels.gemm.scratch import borrowed
from tilewright.kernels.gemm.tensor.mma_launch import AMPERE
from tilewright.kernels.gpu.device_choice import capability, current_device
from tilewright.kernels.gpu.recording import Rehearsal
from tilewright.kernels.numbers import round_up

LEAST_WORK = 1 << 38
"""m n k below which looking, and waiting for what is found, would take more than a hundredth of the product's time."""
PLANES_NBYTES = 1 << 30
"""What the bytes of both factors may take: as much is kept free for every product that might need it."""
DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
C_TYPES = {4: types.float32, 8: types.float64}
OUTCOME = "exact-integer (small whole numbers)"


def fits(problem: Problem) -> bool:
    """Whether to look: float32 or float64 throughout, large enough, and with all of k in one product of bytes."""
    m, n, k = problem.m, problem.n, problem.k
    capable = problem.capability is not None and problem.capability >= AMPERE
    if not capable or any(each.dtype != problem.c.dtype for each in (problem.a, problem.b)):
        return False
    return (
        problem.c.dtype in DTYPES
        and min(m, n) >= LEAST_SIDE
        and m * n * k >= LEAST_WORK
        and max(m, n) < 1 << 31
        and k <= SINGLE_DEPTH_LIMIT
        and (m + n) * round_up(k, LINE_UNIT) <= PLANES_NBYTES
    )


def most_nbytes(m: int, n: int, k: int) -> int:
    """An upper bound for the scratch memory of a product of these sides or smaller ones."""
    if min(m, n) < LEAST_SIDE or m * n * k < LEAST_WORK:
        return 0
    return PLAN_NBYTES + min(PLANES_NBYTES, (m + n) * round_up(min(k, SINGLE_DEPTH_LIMIT), LINE_UNIT))


def multiply(a: Any, b: Any, c: Any, accumulate: bool, stream: Any, *, lower: bool = False) -> bool:
    """Enqueue ``c (+)= a b`` if both hold only small whole numbers; whether that was so. Else nothing is written.

    A problem that `fits`; lower: as ``GemmKernel`` says.
    """
    engine = WGMMA if capability(current_device()) == HOPPER else MMA
    output = output_of(c, C_TYPES[c.dtype.itemsize], lower=lower)
    left, right = lines_of(matrix(a), c.dtype), lines_of(matrix(b).transposed(), c.dtype)
    if output.transposed:  # column-major C: its transpose is B's transpose times A's
        left, right = right, left
    depth = left.depth
    where = layout(left.lines, right.lines, depth, 0, residues=False)
    _compile((left.dtype, left.turned), (right.dtype, right.turned), output.c_type, engine, current_device())
    with borrowed(where.nbytes, stream) as plan:
        targets = plan + where.planes_a, plan + where.planes_b
        reset().launch(1, stream, plan)
        one = left == right  # a matrix by its own transpose
        for side, lines in ((byte_planes.BOTH, left),) if one else enumerate((left, right)):
            target = targets[0 if one else side]
            make_planes(lines, target, where.single_depth, plan, side, stream, residues=False)
        decide().launch(1, stream, plan, depth)
        if isinstance(stream, Rehearsal):
            return False
        kind = int(read_plan(plan, PLAN_KIND + 1, stream)[PLAN_KIND])
        if kind >= len(SINGLE_KINDS):
            return False
        names = SINGLE_KINDS[kind]
        planes = [
            planes_at(targets[0 if one else side], lines, where.single_depth, 1, names[side])
            for side, lines in enumerate((left, right))
        ]
        config = engine.config(*names, output.c_type)
        engine.launch_product(config, planes[0], planes[1], output, depth, accumulate, stream)
    note(OUTCOME)
    return True


@functools.cache
def _compile(
    a: tuple[np.dtype, bool], b: tuple[np.dtype, bool], c_type: Any, engine: Engine, device: int
) -> None:
    """Have the passes compiled beside each other, and the commonest of the products."""
    compile_passes((a, b), [engine.config("s8", "s8", c_type)], engine, device)


def lines_of(operand: Matrix, dtype: np.dtype) -> Lines:
    """The rows of a matrix of floats."""
    size = dtype.itemsize
    strides = [stride // size for stride in operand.strides]
    return Lines(operand.pointer, dtype, operand.shape[0], operand.shape[1], strides[0], strides[1])


assert PLAN_NBYTES >= 8 * (PLAN_KIND + 1)
