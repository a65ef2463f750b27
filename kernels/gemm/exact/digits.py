"""Exact integer products from units that multiply narrower numbers: the arithmetic alone.

An integer x is written in balanced digits, x = d0 + d1 2**w + d2 2**2w + ..., with every digit but
the last in [-2**(w-1), 2**(w-1) - 1]. Then A B is the sum of d_i(A) d_j(B) 2**(w (i + j)), each of those
products is small enough to be exact in float64, float32 or int8 arithmetic, and where the result wraps modulo
2**bits, the pairs whose weight reaches 2**bits are not needed at all. Everything is computed modulo 2**64, a
ring, so a weight may as well be negative or a sum of powers.

The splitting is classical (Ozaki, Ogita, Oishi and Rump, "Error-free transformations of matrix
multiplication", 2012); forming d0 e1 + d1 e0 from (d0 + d1)(e0 + e1) is Karatsuba's (1962).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.kernels.numbers import ceil_div, power_of_two

MODULUS = 1 << 64


@dataclass(frozen=True)
class Unit:
    """An arithmetic unit that adds products up exactly as long as no sum exceeds ``2**exact_bits``."""

    name: str
    exact_bits: int
    cost: float
    """Time of one multiply-add, relative to float64's."""


PASS_COST = 100
"""Multiply-adds in the time that collecting one element of one product takes."""
FLOAT64 = Unit("float64", 53, 1.0)
FLOAT32 = Unit("float32", 24, 0.5)


@dataclass(frozen=True)
class Product:
    """One matrix product of sums of digits, and the weight (modulo 2**64) with which it enters the result."""

    a: tuple[int, ...]
    """Which digits of A are added up to make the left operand."""
    b: tuple[int, ...]
    weight: int


@dataclass(frozen=True)
class DigitPlan:
    """How a product of integer matrices is computed exactly."""

    unit: Unit
    widths: tuple[int, ...]
    """Bits of each digit, the lowest first; the last digit of an operand keeps whatever is left."""
    digits_a: int
    digits_b: int
    products: tuple[Product, ...]
    depth: int
    """The largest k for which every sum of every product is exact."""

    @property
    def cost(self) -> float:
        """Time of one multiply-add of integers, relative to one of float64, collecting the sums included."""
        return len(self.products) * (self.unit.cost + PASS_COST / self.depth)

    @property
    def parts_a(self) -> tuple[tuple[int, ...], ...]:
        """The distinct left operands, in the order of their first use."""
        return tuple(dict.fromkeys(product.a for product in self.products))

    @property
    def parts_b(self) -> tuple[tuple[int, ...], ...]:
        return tuple(dict.fromkeys(product.b for product in self.products))


def magnitudes(largest: int, widths: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Bounds on the absolute digits of any |x| <= largest, split into ``count`` digits of these widths.

    The last digit keeps whatever is left, so any count represents any number.
    """
    bounds = []
    for width in widths[: count - 1]:
        bounds.append(min(1 << (width - 1), largest))
        largest = (largest + (1 << (width - 1))) >> width
    return (*bounds, largest)


def digit_count(largest: int, widths: tuple[int, ...]) -> int:
    """The fewest balanced digits that hold every |x| <= largest, if the last one keeps to its width too."""
    count = 1
    while magnitudes(largest, widths, count)[-1] > 1 << (widths[count - 1] - 1):
        count += 1
    return count


def schoolbook(digits_a: int, digits_b: int, widths: tuple[int, ...], bits: int) -> tuple[Product, ...]:
    """Every pair of digits whose weight is below 2**bits."""
    place = (0, *itertools.accumulate(widths))
    return tuple(
        Product((i,), (j,), 1 << (place[i] + place[j]))
        for i in range(digits_a)
        for j in range(digits_b)
        if place[i] + place[j] < bits
    )


def karatsuba(digits_a: int, digits_b: int, widths: tuple[int, ...], bits: int) -> tuple[Product, ...]:
    """The same sum with one product fewer: both mixed pairs of digits 0 and 1 come from a product of sums."""
    one = 1 << widths[0]
    rest = tuple(
        product
        for product in schoolbook(digits_a, digits_b, widths, bits)
        if not {product.a[0], product.b[0]} <= {0, 1}
    )
    low = Product((0,), (0,), (1 - one) % MODULUS)
    high = Product((1,), (1,), (one * one - one) % MODULUS)
    return (low, Product((0, 1), (0, 1), one), high, *rest)


def exact_depth(products: tuple[Product, ...], a: tuple[int, ...], b: tuple[int, ...], unit: Unit) -> int:
    """The largest k whose sums stay exact; ``a`` and ``b`` bound the absolute digits of the operands."""
    worst = max(sum(a[i] for i in product.a) * sum(b[j] for j in product.b) for product in products)
    return (1 << unit.exact_bits) // max(worst, 1)


NARROWEST_PAIR = 16
"""Narrower digits need no narrower second one: their sums stay exact over a long k anyway."""


def _widths(unit: Unit) -> Iterator[tuple[int, ...]]:
    """Digit widths worth trying: all the same, or the second a little narrower.

    The second digit takes part in Karatsuba's sums; a bit or two less there lets a longer k stay exact.
    """
    for width in range(unit.exact_bits // 2, 1, -1):
        for narrower in range(3 if width > NARROWEST_PAIR else 1):
            yield (width, width - narrower, *(width,) * 62)


def _counts(largest: int, widths: tuple[int, ...]) -> set[int]:
    """Digit counts worth trying: all in one, balanced, or one fewer with a last digit that is wider."""
    balanced = digit_count(largest, widths)
    return {1, balanced, max(balanced - 1, 1)}


def plan(
    largest_a: int,
    largest_b: int,
    k: int,
    bits: int,
    units: tuple[Unit, ...] = (FLOAT64, FLOAT32),
) -> DigitPlan:
    """The cheapest exact way to multiply matrices with |a| <= largest_a and |b| <= largest_b, modulo 2**bits.

    The cost of a way is its products times k, plus `PASS_COST` multiply-adds for each time that an element
    of a product is collected: once for every product and every stretch of k that one exact sum can cover.
    """
    # Rounded up to powers of two, so that panels of much the same numbers share a plan; and never beyond half
    # the modulus, since in the ring every number has a representative there.
    # Likewise k, which only decides how often sums are collected.
    half = 1 << (bits - 1)
    largest_a, largest_b = (min(power_of_two(value), half) for value in (largest_a, largest_b))
    found = _plan(largest_a, largest_b, power_of_two(k), bits, units)
    return dataclasses.replace(found, depth=min(found.depth, max(k, 1)))


@functools.lru_cache(maxsize=1024)
def _plan(largest_a: int, largest_b: int, k: int, bits: int, units: tuple[Unit, ...]) -> DigitPlan:
    best: tuple[float, DigitPlan] | None = None
    for unit in units:
        for widths in _widths(unit):
            for digits_a, digits_b in itertools.product(
                _counts(largest_a, widths), _counts(largest_b, widths)
            ):
                # At least half of the pairs lie below the modulus, and Karatsuba saves one of them.
                if best is not None and (digits_a * digits_b / 2 - 1) * unit.cost * k > best[0]:
                    continue
                ways = [schoolbook(digits_a, digits_b, widths, bits)]
                if min(digits_a, digits_b) > 1 and 2 * widths[0] < bits:
                    ways.append(karatsuba(digits_a, digits_b, widths, bits))
                bounds_a = magnitudes(largest_a, widths, digits_a)
                bounds_b = magnitudes(largest_b, widths, digits_b)
                for products in ways:
                    depth = min(exact_depth(products, bounds_a, bounds_b, unit), max(k, 1))
                    if not depth:
                        continue
                    cost = len(products) * (unit.cost * k + PASS_COST * ceil_div(k, depth))
                    if best is None or cost < best[0]:
                        used = widths[: max(digits_a, digits_b)]
                        best = cost, DigitPlan(unit, used, digits_a, digits_b, products, depth)
    assert best is not None  # two-bit digits are exact in every unit
    return best[1]
