"""Exact integer products from 8-bit ones by residues: the number theory alone.

A product C = A B of integers is known as soon as it is known modulo enough pairwise coprime numbers, all at
most 256: modulo p, every element of A and B has a representative in [-128, 127], so C modulo p is one int8
product. The Chinese remainder theorem then gives C = sum t_i (P / p_i) - q P with t_i = C (P / p_i)^-1 mod
p_i, P the product of the moduli, and q the rounded sum of t_i / p_i, provided |C| < P / 2. All of that is done modulo
2**64, as the answer is wanted, so it takes 64-bit words only.

Splitting into digits instead takes one product for every pair of digits: full-range int64 modulo 2**64 has
36 pairs of 8-bit digits, but 18 moduli suffice. The idea on int8 tensor cores is Ozaki, Uchino and
Imamura's "Ozaki scheme II" (2025), there used for floating point.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

MODULI = (256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193, 191, 181)
"""Pairwise coprime, the largest such numbers up to 256: each is worth almost the 8 bits that its product
costs."""
DEPTH_LIMIT = 8192
"""The largest k of one residue product. With it the moduli above suffice for any int64, and no sum
overflows."""
DIGIT_BOUND = 128
"""The largest absolute residue, and the largest absolute value that int8 holds."""
SINGLE_DEPTH_LIMIT = 1 << 15
"""The largest k of one single-byte product: 255 * 255 * 2**15 < 2**31, so no sum of bytes overflows."""
MARGIN = 1.0 + 2.0**-10
"""P / 2 exceeds |C| by this factor, so that q can be rounded from a sum of fractions that is not quite
exact."""
PLAN_MIN_A, PLAN_MAX_A, PLAN_MIN_B, PLAN_MAX_B, PLAN_KIND, PLAN_PLANES = range(6)
"""Indices in the plan, an int64 array in device memory: the ranges found, and the kind and planes that follow from
them."""
PLAN_SHIFTS_A, PLAN_SHIFTS_B, PLAN_LEAST, PLAN_NONFINITE = range(6, 10)
"""Those of a float64 product (`scaled_residues`): where the lines' powers of two lie, the least element of the sample's
product, and whether there are infinities or NaN."""
PLAN_LENGTH = 10
SINGLE_KINDS = (("s8", "s8"), ("u8", "s8"), ("s8", "u8"), ("u8", "u8"))
"""Plan kinds 0 to 3: both operands fit into one byte each, signed or unsigned, and one product is enough."""
RESIDUES = 4
"""The plan kind of a product by residues."""
ANY_SINGLE = 5
"""Of a kernel that multiplies all of `SINGLE_KINDS`, as the plan says; the plan itself has one of those."""
FRACTION_BITS = 27
"""Fixed-point bits of t / p: a sum of all of them still fits into 32 bits."""


@dataclass(frozen=True)
class Modulus:
    """One modulus of a set, and the constants that the kernels need for it."""

    p: int
    weight: int
    """(P / p)**-1 mod p, multiplied into A's residues so that the product comes out as t."""
    factor: int
    """P / p modulo 2**64."""
    fraction: int
    """2**FRACTION_BITS / p, rounded down."""


@dataclass(frozen=True)
class ModulusSet:
    """The first ``count`` moduli, enough for |C| * 2 * MARGIN < P."""

    moduli: tuple[Modulus, ...]
    product: int
    """P modulo 2**64."""


@functools.cache
def modulus_set(count: int) -> ModulusSet:
    chosen = MODULI[:count]
    product = math.prod(chosen)
    return ModulusSet(
        tuple(
            Modulus(
                p,
                weight=pow(product // p, -1, p),
                factor=product // p % (1 << 64),
                fraction=(1 << FRACTION_BITS) // p,
            )
            for p in chosen
        ),
        product % (1 << 64),
    )


def capacities() -> np.ndarray:
    """Element i: the first i moduli suffice while the largest |C| is below it. Rounded down; float64."""
    products = [math.prod(MODULI[:count]) for count in range(len(MODULI) + 1)]
    return np.array([product / (2 * MARGIN) * (1 - 2.0**-40) for product in products])


def moduli_needed(largest_a: float, largest_b: float, k: int) -> int:
    """How many moduli a product of operands with these bounds needs; ``k`` is its depth, at most DEPTH_LIMIT.

    The bounds may be rounded to float64: MARGIN absorbs that.
    """
    bound = largest_a * largest_b * k
    return max(1, int(np.searchsorted(capacities(), bound, side="right")))


def balanced(value: int, p: int) -> int:
    """The representative of ``value`` modulo p that int8 holds."""
    rest = value % p
    return rest - p if rest >= (p + 1) // 2 else rest


def byte_weights(modulus: Modulus, *, weighted: bool) -> tuple[tuple[int, ...], int]:
    """How the residue of an int64 x comes from its bytes: sum of w_j byte_j + bias, congruent to x (or
    weight x).

    The bytes are those of x + 2**63, all unsigned; the bias takes the 2**63 away again.
    """
    scale = modulus.weight if weighted else 1
    weights = tuple(balanced(scale << (8 * j), modulus.p) for j in range(8))
    return weights, balanced(-scale << 63, modulus.p)


def combined(sums: list[int]) -> int:
    """C modulo 2**64 from its sums of products of (weighted) residues, one for each modulus: what the
    kernel does."""
    chosen = modulus_set(len(sums))
    parts = [total % modulus.p for total, modulus in zip(sums, chosen.moduli, strict=True)]
    fraction = sum(t * modulus.fraction for t, modulus in zip(parts, chosen.moduli, strict=True))
    multiple = (fraction + (1 << (FRACTION_BITS - 1))) >> FRACTION_BITS
    total = sum(t * modulus.factor for t, modulus in zip(parts, chosen.moduli, strict=True))
    return (total - multiple * chosen.product) % (1 << 64)


def plan(range_a: tuple[int, int], range_b: tuple[int, int], depth: int) -> tuple[int, int]:
    """(kind, planes) for operands with these smallest and largest values: what the device decides."""
    kinds = []
    for low, high in (range_a, range_b):
        if low >= -128 and high <= 127:
            kinds.append(0)
        elif low >= 0 and high <= 255:
            kinds.append(1)
    if len(kinds) == 2:
        return kinds[0] + 2 * kinds[1], 1
    largest_a, largest_b = (float(max(-low, high)) for low, high in (range_a, range_b))
    return RESIDUES, moduli_needed(largest_a, largest_b, depth)
