"""How much device memory a product borrows besides its operands: what a plan has to leave free.

It is borrowed once and kept for the next product (`tilewright.kernels.gemm.scratch`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.launch import ceil_div

COPY_ENGINE_NBYTES = 16
"""The alignment that the copy engine needs for the lines of an operand."""
LINE_NBYTES = 128
"""Lines of converted operands are padded to whole lines of the swizzled shared memory."""


@dataclass(frozen=True)
class Parent:
    """The whole product that tiles and panels of k are cut from. An operand's panel is stored in the same order as its
    matrix; its lines are contiguous, or padded to a multiple of 16 bytes or more."""

    m: int
    n: int
    k: int
    transpose_a: bool
    """A is stored as k × m."""
    transpose_b: bool
    """B is stored as n × k."""


def workspace_nbytes(
    m: int, n: int, k: int, dtype: np.dtype, precision: str, parent: Parent | None = None
) -> int:
    """An upper bound, in bytes, for C (m × n) += A (m × k) B (k × n) with results of ``dtype``.

    It holds for any layout of the operands; with ``parent``, for every tile (at most m × n) and panel (at most k) of a
    regular grid that divides it from the first element on.

    Integers borrow digit planes or residues; 16-bit floats and the reduced precisions copied or converted operands;
    float32 and float64 (and 32-bit integers, without the tensor cores) copies of operands whose lines are not aligned.
    Each works through k in stretches, within a bound of its own. Everything else multiplies straight from the operands:
    the partial sums of a small C with a long k take at most a few MiB, which are not counted.
    """
    from tilewright.kernels.gemm import exact_integer, float_operand, half_tensor_core, repitch

    if m * n * k == 0:
        return 0
    lines = (m, n, k) if parent is None else (m, n, k, parent.m, parent.n, parent.k)
    half = dtype in (np.float16, BFLOAT16)
    reduced = dtype == np.float32 and precision != "full"
    itemsize = 2 if half or (reduced and precision in ("bf16", "fp16")) else dtype.itemsize
    aligned = parent is not None and all(side * itemsize % COPY_ENGINE_NBYTES == 0 for side in lines)
    copies = 0 if aligned else repitch.most_nbytes(m, n, k, dtype)
    if dtype.kind in "iu":
        return max(exact_integer.scratch_nbytes(m, n, k, dtype.itemsize), copies)
    if not half and not reduced:
        return copies
    if precision == "tf32" and reduced and aligned and half_tensor_core.THROUGH_REGISTERS:
        # Panels are multiplied in place. Only if k is contiguous in neither is the smaller one copied.
        turned = parent is not None and parent.transpose_a and not parent.transpose_b
        depth = ceil_div(k, LINE_NBYTES) * LINE_NBYTES
        return min(itemsize * min(m, n) * depth, float_operand.SCRATCH_NBYTES) if turned else 0
    parts = 3 if precision == "split" else 1
    whole = parts * itemsize * (m + n) * ceil_div(k, LINE_NBYTES) * LINE_NBYTES
    # Where no kernel uses the precision for a shape, it is multiplied in full.
    return max(min(whole, float_operand.SCRATCH_NBYTES), 0 if half else copies)
