"""How far a correct product may be from the exact one: one function for the tests and for verification.

The bound is the textbook's (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., 2002, section
3.1): for any order of summation, with or without fused multiply-adds, the computed x·y differs from the exact
one by at most g(k) |x|·|y| with g(n) = n u / (1 - n u) and u the unit roundoff of the type that sums are
formed in. Added to that are one rounding into the result's type, one of each operand where ``precision`` narrows it,
and what products, and operands that are narrowed, lose by underflow.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.kernels.bfloat16 import BFLOAT16, EPSILON, SMALLEST_SUBNORMAL
from tilewright.kernels.gemm.base import compute_dtype

OPERAND_ROUNDOFF = {
    "full": 0.0,
    # Three bfloat16 parts hold every bit, and the products of parts that are left out are below 2**-25 together; two
    # float16 parts hold a number to within 2**-23, and the product that is left out is below 2**-22. (Numbers that are
    # tiny beside others of their line lose up to 2**-17, but only where k is at least 512.) The tensor cores truncate
    # as they add up the others, which g(k) covers only where k is not small.
    "split": 2.0**-21,
    "tf32": 2.0**-10,  # 10 stored bits, and the hardware may truncate instead of rounding
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
}
"""The relative error of each operand that a precision narrows, of products in float32."""
OPERAND_UNDERFLOW = {
    "full": 0.0,
    "split": 2.0**-134,
    "tf32": 2.0**-136,  # a whole unit, where the others round to the nearest
    "fp16": 2.0**-25,
    "bf16": 2.0**-134,
}
"""The absolute error of each operand that becomes subnormal: for ``fp16`` those below 2**-14."""
FLOAT8_STEPS, FLOAT8_PRODUCTS = 4, 32
"""Instructions of Hopper's tensor cores whose sums of float8 products go into one sum, and the products of each."""
FLOAT8_CUT = 2.0**-13
"""What may be cut off a term of such a sum, and off the sum itself, beside the largest of its terms."""
FLOAT8_SUMS = (FLOAT8_STEPS * (FLOAT8_PRODUCTS + 2) - 1) * FLOAT8_CUT
"""The relative error of these sums, 0.0165: every term and the result of every instruction loses up to `FLOAT8_CUT`,
and all but the first have one term more, the sum so far. Terms of about equal sizes lose far less together."""
DOUBLE = (np.dtype(np.float64), np.dtype(np.complex128))
_COMPLEX_STEPS = 4
"""A complex sum is within sqrt(2) g(k + 2): twice g(k + 4) covers it, and a scheme of three products."""


def unit_roundoff(dtype: Any) -> float:
    """Half the distance from 1 to the next number: 2**-24 for float32. Complex types have that of their parts."""
    return (EPSILON if np.dtype(dtype) == BFLOAT16 else float(np.finfo(dtype).eps)) / 2


def operand_roundoff(precision: str, compute: Any) -> float:
    """The relative error of each operand of a product that is formed in the type ``compute``. In float64 ``split`` is
    within the bound of ordinary sums (`gemm.exact.scaled_residues`), and in complex128, whose parts it multiplies."""
    return 0.0 if precision == "split" and compute in DOUBLE else OPERAND_ROUNDOFF[precision]


def operand_underflow(precision: str, compute: Any) -> float:
    """The same of operands that become subnormal: absolute."""
    return 0.0 if precision == "split" and compute in DOUBLE else OPERAND_UNDERFLOW[precision]


def _smallest(dtype: np.dtype) -> float:
    return SMALLEST_SUBNORMAL if dtype == BFLOAT16 else float(np.finfo(dtype).smallest_subnormal)


def accumulated(k: int, dtype: Any) -> float:
    """g(k) for sums of k products in a type."""
    steps = k * unit_roundoff(dtype)
    return steps / (1 - steps) if steps < 1 else float("inf")


def tolerance(
    k: int, dtype: Any, scale: Any, precision: str = "full", sizes: Any = None, *, float8: bool = False
) -> Any:
    """The largest absolute error of an element of a correct product of finite numbers.

    k: length of its sum, one more where the product is added to an existing value.
    dtype: the result's. Integers are exact: 0.
    scale: |op(A)| |op(B)| at that element (plus the absolute value it was added to), or an upper bound of it;
        an array of them gives an array of tolerances.
    sizes: the sum of all absolute values in the row of op(A) and the column of op(B) at that element, or an upper
        bound of it: what is multiplied by the error of operands that underflow. A precision other than full needs it.
    float8: whether both factors are float8, of which tensor cores may have made short sums.
    """
    if precision != "full" and sizes is None:
        raise ValueError(f"precision={precision!r} narrows operands: pass their sizes")
    result = np.dtype(dtype)
    scale = np.asarray(scale, np.float64)
    if result.kind in "iu":
        return np.zeros_like(scale)[()]
    compute = compute_dtype(result)
    parts = 2 if result.kind == "c" else 1
    if result.kind == "c":
        # Split, a part of a complex number is a sum of twice as many real products.
        sums = 2 * accumulated((2 * k if precision == "split" else k) + _COMPLEX_STEPS, compute)
    else:
        sums = accumulated(k, compute)
    if float8:
        sums += FLOAT8_SUMS * (1 + sums)
    operands = 2 * parts * operand_roundoff(precision, compute)
    rounding = unit_roundoff(result) if result != compute else 0.0
    underflow: Any = (k + 1) * _smallest(compute) + _smallest(result)
    lost = parts * operand_underflow(precision, compute)
    if lost:
        underflow = underflow + lost * np.asarray(sizes, np.float64) + k * lost**2
    return (sums + operands + rounding) * (1 + operands + rounding) * scale + underflow
