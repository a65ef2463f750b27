"""The digit arithmetic with Python integers: nothing may be lost, for any magnitude and any unit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.gemm.exact import digits

bits = st.sampled_from([8, 16, 32, 64])
magnitude = st.integers(0, 63).flatmap(lambda width: st.integers(0, 1 << width))
INT8 = digits.Unit("int8", 31, 0.1)


def split(value: int, plan: digits.DigitPlan, count: int) -> list[int]:
    """Balanced digits, by the definition."""
    found = []
    for width in plan.widths[: count - 1]:
        low = (value + (1 << (width - 1))) % (1 << width) - (1 << (width - 1))
        found.append(low)
        value = (value - low) >> width
    return [*found, value]


def centred(value: int, width: int) -> int:
    """The representative of a number modulo 2**width that is nearest to zero."""
    half = 1 << (width - 1)
    return (value + half) % (2 * half) - half


@given(
    largest=st.tuples(magnitude, magnitude),
    sign=st.tuples(st.sampled_from([-1, 1]), st.sampled_from([-1, 1])),
    fraction=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    k=st.integers(1, 10**6),
    bits=bits,
)
def test_weighted_products_make_the_product_and_stay_exact(
    largest: tuple[int, int],
    sign: tuple[int, int],
    fraction: tuple[float, float],
    k: int,
    bits: int,
) -> None:
    plan = digits.plan(*largest, k, bits)
    x, y = (
        centred(s * (int(limit * part) if part < 1 else limit), bits)
        for s, limit, part in zip(sign, largest, fraction, strict=True)
    )
    of_x, of_y = split(x, plan, plan.digits_a), split(y, plan, plan.digits_b)
    total = 0
    for product in plan.products:
        left, right = sum(of_x[i] for i in product.a), sum(of_y[j] for j in product.b)
        assert plan.depth * abs(left * right) <= 1 << plan.unit.exact_bits
        total += product.weight * left * right
    assert (total - x * y) % (1 << bits) == 0
    assert 1 <= plan.depth <= k


@given(largest=magnitude, width=st.integers(2, 26), count=st.integers(1, 5), part=st.floats(-1, 1))
def test_digits_stay_within_their_bounds(largest: int, width: int, count: int, part: float) -> None:
    plan = digits.DigitPlan(digits.FLOAT64, (width,) * 5, count, count, (), 1)
    value = max(-largest, min(largest, int(largest * part)))
    for number in (value, largest, -largest):
        found = split(number, plan, count)
        bounds = digits.magnitudes(largest, plan.widths, count)
        assert all(abs(digit) <= bound for digit, bound in zip(found, bounds, strict=True))


def test_what_the_common_cases_cost() -> None:
    """Full-range int64 takes five products, int8 one in float32: what the CPU speed rests on."""
    full = digits.plan(2**63, 2**63, 2560, 64)
    assert (len(full.products), full.unit) == (5, digits.FLOAT64)
    assert full.depth >= 1280
    small = digits.plan(128, 128, 2560, 64)
    assert (len(small.products), small.unit) == (1, digits.FLOAT32)


def test_eight_bit_digits_of_another_unit() -> None:
    """What an int8 tensor core needs: 8-bit digits, 32-bit sums, only the pairs that the modulus leaves."""
    widths = (8,) * 8
    assert digits.digit_count(2**31, widths) == 4
    assert digits.digit_count(127, widths) == 1
    products = digits.schoolbook(8, 8, widths, 64)
    assert len(products) == 36
    bounds = (128,) * 8
    assert digits.exact_depth(products, bounds, bounds, INT8) == 2**31 // 2**14
