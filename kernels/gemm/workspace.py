"""How much device memory a product borrows besides its operands: what a plan has to leave free.

It is borrowed once and kept for the next product (`tilewright.kernels.gemm.scratch`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.float8 import FLOAT8

COPY_ENGINE_NBYTES = 16
"""The alignment that the copy engine needs for the lines of an operand."""


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
    m: int,
    n: int,
    k: int,
    dtype: np.dtype,
    precision: str,
    parent: Parent | None = None,
    operands: tuple[np.dtype, np.dtype] | None = None,
) -> int:
    """An upper bound, in bytes, for C (m × n) += A (m × k) B (k × n) with results of ``dtype``.

    It holds for any layout of the operands and on any GPU; with ``parent``, for every tile (at most m × n) and panel
    (at most k) of a regular grid that divides it from the first element on. ``operands`` are the dtypes of A and B,
    ``dtype`` where they are not given.

    Integers borrow digit planes or residues; 16-bit floats and the reduced precisions copied or converted operands, as
    float8 does, and 16-bit results with a long k, in the same memory, sums in float32; float32 and float64 (and 32-bit
    integers, without the tensor cores) copies of operands whose lines are not aligned; large products of both the bytes
    of small whole numbers, if they hold no others, and in split precision residues; complex numbers in split precision
    what real ones do, beside operands that are written anew; every float, and integers of 32 and 64 bits, the partial
    sums of a small C, or of a strip of a large one, with a long k. Each kernel keeps to a bound of its own, and gives
    back what it borrowed before the next begins.
    """
    from tilewright.kernels.gemm.cores import repitch, skinny_launch, warp_tiled_cut
    from tilewright.kernels.gemm.exact import exact_integer, split_complex, split_residues, whole_floats
    from tilewright.kernels.gemm.hopper import float_operand

    if m * n * k == 0:
        return 0
    of_a, of_b = operands or (dtype, dtype)
    most = 0
    if all(each.kind in "iu" for each in (of_a, of_b, dtype)):
        most = exact_integer.scratch_nbytes(m, n, k, max(of_a.itemsize, of_b.itemsize))
    if of_a in FLOAT8 and of_b in FLOAT8:
        # Bytes that are turned or aligned on Hopper, float16 elsewhere.
        most = max(exact_integer.scratch_nbytes(m, n, k, 1), float_operand.most_nbytes(m, n, k, "f16"))
    if of_a == of_b and of_a in (np.float16, BFLOAT16) and dtype in (of_a, np.float32):
        # They are multiplied as they lie where the copy engine takes their lines.
        most = 0 if _aligned(m, n, k, of_a.itemsize, parent) else float_operand.most_nbytes(m, n, k, "copy")
    if not of_a == of_b == dtype:  # the kernels below take one dtype throughout
        return most
    if dtype == np.float32 and precision != "full":
        most = _reduced_nbytes(m, n, k, precision, parent)
    if dtype in (np.float32, np.float64) and precision == "split":
        most = max(most, split_residues.most_nbytes(dtype, m, n, k))
    if dtype in split_complex.PARTS and precision == "split":
        real = workspace_nbytes(*split_complex.real_sides(m, n, k), split_complex.PARTS[dtype], "split")
        most = real + split_complex.most_nbytes(m, n, k, dtype)
    if dtype in (np.float32, np.float64):
        most = max(most, whole_floats.most_nbytes(m, n, k))
    # Where no kernel uses the precision for a shape, or the tensor cores do not pay, it is multiplied in full.
    return max(
        most,
        skinny_launch.most_nbytes(m, n, k, dtype),
        warp_tiled_cut.most_nbytes(m, n, k, dtype),
        0 if _aligned(m, n, k, dtype.itemsize, parent) else repitch.most_nbytes(m, n, k, dtype),
    )


def _aligned(m: int, n: int, k: int, itemsize: int, parent: Parent | None) -> bool:
    """Whether all lines of all operands, at the edges too, begin at multiples of `COPY_ENGINE_NBYTES`."""
    if parent is None:
        return False
    sides = (m, n, k, parent.m, parent.n, parent.k)
    return all(side * itemsize % COPY_ENGINE_NBYTES == 0 for side in sides)


def _reduced_nbytes(m: int, n: int, k: int, precision: str, parent: Parent | None) -> int:
    """The same for float32 on the tensor cores."""
    from tilewright.kernels.gemm.hopper import float_operand, half_tensor_core, split_float

    if precision == "split":
        return split_float.most_nbytes(m, n, k)
    form = half_tensor_core.KINDS[precision]
    if form == "tf32" and parent is not None and _aligned(m, n, k, 4, parent):
        # Multiplied in place, but on Hopper, which turns one where both lie with k not contiguous.
        lines = m if parent.transpose_a else 0, 0 if parent.transpose_b else n
        return float_operand.most_nbytes(*lines, k, form) if any(lines) else 0
    return float_operand.most_nbytes(m, n, k, form)
