"""How much device memory a product borrows besides its operands: what a plan has to leave free.

It is borrowed once and kept for the next product (`tilewright.kernels.gemm.scratch`).
"""

from __future__ import annotations

import numpy as np

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.launch import ceil_div

LINE_NBYTES = 128
"""Lines of converted operands are padded to whole lines of the swizzled shared memory."""


def workspace_nbytes(m: int, n: int, k: int, dtype: np.dtype, precision: str) -> int:
    """An upper bound, in bytes, for C (m × n) += A (m × k) B (k × n) with results of ``dtype``.

    Integers are borrowed digit planes or residues, 16-bit floats and the reduced precisions copied or converted
    operands, float32 and float64 (and 32-bit integers, without the tensor cores) aligned copies where an operand's
    lines are not; all work through k in stretches that keep to a bound of their own. Everything else multiplies from
    the operands: the partial sums of a small C with a long k take at most a few MiB, which are not counted.
    """
    from tilewright.kernels.gemm import exact_integer, float_operand, repitch

    if m * n * k == 0:
        return 0
    if dtype.kind in "iu":
        return max(exact_integer.scratch_nbytes(m, n, k, dtype.itemsize), repitch.most_nbytes(m, n, k, dtype))
    half = dtype in (np.float16, BFLOAT16)
    if not half and not (dtype == np.float32 and precision != "full"):
        return repitch.most_nbytes(m, n, k, dtype)
    parts = 3 if precision == "split" else 1
    itemsize = 2 if half or precision in ("bf16", "fp16") else 4
    whole = parts * itemsize * (m + n) * ceil_div(k, LINE_NBYTES) * LINE_NBYTES
    # Where no kernel uses the precision for a shape, it is multiplied in full.
    return max(min(whole, float_operand.SCRATCH_NBYTES), 0 if half else repitch.most_nbytes(m, n, k, dtype))
