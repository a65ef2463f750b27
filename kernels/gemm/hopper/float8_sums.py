"""What Hopper's tensor cores make of sums of float8 products, in NumPy: for tests, and for tables of errors.

An instruction adds 32 products, which are exact, to the sum so far. All of these terms are aligned to the largest
exponent among them (of a product: the sum of its factors' exponents), and cut off `FRACTION_BITS` below that; what they
add up to is cut off as far below its own leading bit. Nothing is rounded to nearest.
"""

from __future__ import annotations

import numpy as np

from tilewright.kernels.float8 import E4M3, to_float32
from tilewright.kernels.tolerance import FLOAT8_PRODUCTS, FLOAT8_STEPS

FRACTION_BITS = 13
INTERVAL = FLOAT8_STEPS * FLOAT8_PRODUCTS
"""Elements of k whose sum the kernel carries to float32."""
NOTHING = -1000
"""Stands for the exponent of zero: below all others."""


def multiply(a: np.ndarray, b: np.ndarray, interval: int = INTERVAL) -> np.ndarray:
    """a b of float8 matrices of finite numbers, m × k and k × n, in float32.

    interval: elements of k, a multiple of 32, that the tensor cores add up before their sum goes to float32. Takes
    m n (32 · 8) bytes.
    """
    left, right = to_float32(a).astype(np.float64), to_float32(b).astype(np.float64)
    of_left, of_right = _exponents(left, a.dtype), _exponents(right, b.dtype)
    k = a.shape[1]
    totals = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for first in range(0, k, interval):
        sums = np.zeros(totals.shape)
        for start in range(first, min(first + interval, k), FLOAT8_PRODUCTS):
            stretch = slice(start, min(start + FLOAT8_PRODUCTS, first + interval))
            products = left[:, stretch, None] * right[None, stretch]
            exponents = of_left[:, stretch, None] + of_right[None, stretch]
            exponents = np.where(products == 0, NOTHING, exponents)
            largest = np.maximum(exponents.max(axis=1), _leading(sums))
            sums = _cut(products, largest[:, None]).sum(axis=1) + _cut(sums, largest)
            sums = _cut(sums, _leading(sums))
        totals += sums.astype(np.float32)
    return totals


def _exponents(numbers: np.ndarray, kind: np.dtype) -> np.ndarray:
    """Those of float8 numbers: subnormal ones have the least that normal ones have."""
    return np.maximum(_leading(numbers), -6 if kind == E4M3 else -14)


def _leading(numbers: np.ndarray) -> np.ndarray:
    """The power of two of the leading bit."""
    return np.where(numbers == 0, NOTHING, np.frexp(numbers)[1] - 1)


def _cut(numbers: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    unit = np.ldexp(1.0, exponents - FRACTION_BITS)
    return np.trunc(numbers / unit) * unit
