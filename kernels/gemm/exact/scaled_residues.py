"""Float products from 8-bit integer ones: the scaling of lines, the choice of moduli, and a twin of the kernels.

All of this is said of float64; float32 products are formed in the same way, with u = 2^-24 and fewer moduli.

A line (a row of A, a column of B) is multiplied by a power of two and rounded to integers, such that its Euclidean norm
is at most Q. By Cauchy and Schwarz no element of the product of integers exceeds Q^2, and with Q^2 < P / 2 its residues
(`residues`) determine it. It is put together as a fraction of P,

    C / P = sum t_i / p_i   modulo 1, between -1/2 and 1/2,

in fixed point with `FRACTION_BITS` bits: an error of 2^-84 P at most, where what is looked for is 2^-53 of
|A| |B|, which is at least P / (8 `flatness`). (64 bits would be too coarse.) Then it is rounded to float64 and scaled.

Source of the method: K. Ozaki, Y. Uchino, T. Imamura, "Ozaki scheme II: a GEMM-oriented emulation of floating-point
matrix multiplication using an integer modular technique" (2025), and their GEMMul8. Theirs to choose are the moduli;
here the numbers decide how many are needed, and whether any number of them is enough.

**How many.** Rounding to integers changes an element of a line with norm |a| by up to q / 2 with q <= 2 |a| / Q, and
so the product of two lines, where these errors are independent, by

    sqrt(1/12) sqrt((q_a |b|)^2 + (q_b |a|)^2) <= sqrt(2/3) |a| |b| / Q

(standard deviation). In units of u |a|.|b|, with u = 2^-53 and |a|.|b| the sum of absolute products, that is
sqrt(2/3) f / (u Q), f = |a| |b| / |a|.|b|: what is called *flatness* here, 1 if one line is a multiple of the other,
1.57 for normal numbers, large where large numbers of one line meet small ones of the other. The moduli are the fewest
with which no element of C exceeds `LARGEST_ERROR`. Ordinary sums in float64 have about 0.4 to 0.6 f of these units.

f is bounded for every element of C by one product of bytes: of the absolute values, rounded down to multiples of |a| /
(`SAMPLE_SCALE` sqrt(k)), at some of the places of k, evenly spread. What it gives is a lower bound of |a|.|b| at those
places. As their share of k is at least about 1/9, f is at most that many times what they show, whatever the numbers: so
every element is within the bound k u |a|.|b| of float64's own sums for k >= `LEAST_DEPTH`.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from tilewright.kernels.gemm.exact.residues import MARGIN, MODULI, modulus_set
from tilewright.kernels.numbers import ceil_div

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
COUNTS: dict[np.dtype, tuple[int, ...]] = {FLOAT32: (7, 8, 9), FLOAT64: (14, 15, 16)}
"""Numbers of moduli that are used for products of a dtype. With fewer the error is larger than the dtype's own; with
more, products take as long as those of Hopper's float64 units, or by six products of bfloat16, and float64's integers
more than 64 bits."""
ROUNDOFF: dict[np.dtype, float] = {FLOAT32: 2.0**-24, FLOAT64: 2.0**-53}
FRACTION_BITS = 96
LOW_BITS, MIDDLE_BITS = 20, 44
"""Fractions are cut into these bits and 32 high ones: sums of products with 16 bytes fit into 32, 64 and, as far as
they count, 32 bits, and carries wait until the end."""
DEPTH_LIMIT = 1 << 16
"""The largest k of one product: sums of 2^16 products of two residues are at most 2^30."""
LEAST_DEPTH = 1024
"""The least k: below, the bound of the error in the worst case would be larger than that of ordinary sums."""
LARGEST_ERROR = 1.0
"""The largest standard deviation of an element's error, in units of u |a|.|b|, as the sample shows it."""
SAMPLE_BLOCK = 128
"""Consecutive places of k that are in the sample together."""
SAMPLE_SHARE = 8
"""At most so many times as many places of k as are in the sample."""
SAMPLE_BLOCKS = 8
"""Blocks in a sample at least, if k has so many."""
SAMPLE_SCALE = 16.0
"""What stands for a line's root mean square in the sample. Numbers above 7.9 times that count as 127 all the same."""
SAMPLE_LARGEST = 127
NOTHING = (1 << 31) - 1
"""The least sum where there is none."""


@functools.cache
def largest_norm(count: int) -> float:
    """Q: the largest norm of a line of integers whose products ``count`` moduli hold; rounded down."""
    return math.sqrt(math.prod(MODULI[:count]) / (2 * MARGIN)) * (1 - 2.0**-40)


@functools.cache
def largest_flatness(dtype: np.dtype, count: int) -> float:
    """The largest flatness for which ``count`` moduli are enough."""
    return LARGEST_ERROR * ROUNDOFF[dtype] * largest_norm(count) / math.sqrt(2 / 3)


class Sample(NamedTuple):
    """Which places of k are looked at: of every ``stride`` blocks one."""

    stride: int
    blocks: int
    places: int

    @property
    def width(self) -> int:
        """Bytes of a line of the sample; the last block may go on beyond k."""
        return self.blocks * SAMPLE_BLOCK


def sample_block(number: int, stride: int, blocks: int) -> int:
    """The block of k that is block ``number`` of the sample; ``blocks`` has k. The first is the first; in each stretch
    of ``stride`` blocks it is another one, so that what repeats itself along k is met everywhere."""
    return min(number * stride + 5 * number % stride, blocks - 1)


def sample_of(depth: int) -> Sample:
    blocks = ceil_div(depth, SAMPLE_BLOCK)
    stride = min(max(blocks // SAMPLE_BLOCKS, 1), SAMPLE_SHARE)
    count = ceil_div(blocks, stride)
    ends = [sample_block(number, stride, blocks) for number in range(count)]
    places = count * SAMPLE_BLOCK - (blocks * SAMPLE_BLOCK - depth) * (ends[-1] == blocks - 1)
    return Sample(stride, count, places)


def flatness(least: int, places: int) -> float:
    """What the least element of the product of a sample of ``places`` shows: an upper bound, if the rest of k is like
    the sample."""
    return math.inf if least <= 0 else places * SAMPLE_SCALE**2 / least


def moduli_for(dtype: np.dtype, least: int, places: int) -> int | None:
    """The number of moduli for a product whose sample has the least element ``least``; None where none is enough."""
    found = flatness(least, places)
    return next((count for count in COUNTS[dtype] if found <= largest_flatness(dtype, count)), None)


@functools.cache
def fractions(count: int) -> tuple[tuple[int, int, int], ...]:
    """2^96 / p, rounded down, for each modulus in use: its low, middle and high bits."""
    whole = [(1 << FRACTION_BITS) // p for p in MODULI[:count]]
    above = LOW_BITS + MIDDLE_BITS
    return tuple((each % (1 << LOW_BITS), each % (1 << above) >> LOW_BITS, each >> above) for each in whole)


@functools.cache
def unit(count: int) -> tuple[float, float]:
    """P / 2^96 as the sum of two float64 numbers."""
    product = math.prod(MODULI[:count])
    high = float(product)
    low = float(product - int(high))
    return math.ldexp(high, -FRACTION_BITS), math.ldexp(low, -FRACTION_BITS)


def exponents(lines: np.ndarray, count: int) -> np.ndarray:
    """By which power of two each line of finite numbers (float64) is multiplied; 0 for lines of zeros. int64."""
    _, tops = np.frexp(np.abs(lines).max(axis=1))
    scaled = np.ldexp(lines, -tops[:, None].astype(np.int64))
    squares = np.sum(scaled * scaled, axis=1)
    with np.errstate(divide="ignore"):
        found = np.floor(math.log2(largest_norm(count)) - 0.5 * np.log2(squares)) - tops
    return np.where(squares > 0, found, 0).astype(np.int64)


def integers(lines: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """The lines scaled and rounded to the nearest integers, ties to even: int64."""
    half = shifts // 2  # neither factor overflows, nor loses bits that count
    scaled = np.ldexp(np.ldexp(lines, half[:, None]), (shifts - half)[:, None])
    return np.rint(scaled).astype(np.int64)


def sampled(lines: np.ndarray) -> np.ndarray:
    """A sample of a matrix of finite numbers as the kernels take it: int8."""
    count, depth = lines.shape
    chosen = sample_of(depth)
    blocks = ceil_div(depth, SAMPLE_BLOCK)
    _, tops = np.frexp(np.abs(lines).max(axis=1))
    scaled = np.abs(np.ldexp(lines, -tops[:, None].astype(np.int64)))
    norms = np.sqrt(np.sum(scaled * scaled, axis=1))
    taken = np.zeros((count, chosen.width), np.int8)
    for number in range(chosen.blocks):
        first = sample_block(number, chosen.stride, blocks) * SAMPLE_BLOCK
        part = scaled[:, first : first + SAMPLE_BLOCK]
        with np.errstate(invalid="ignore", divide="ignore"):
            steps = np.floor(part * (SAMPLE_SCALE * math.sqrt(depth) / norms)[:, None])
        steps = np.where(norms[:, None] > 0, np.minimum(steps, SAMPLE_LARGEST), SAMPLE_LARGEST)
        taken[:, number * SAMPLE_BLOCK : number * SAMPLE_BLOCK + part.shape[1]] = steps
    return taken


def least_of_sample(a: np.ndarray, b: np.ndarray) -> int:
    """The least element of the product of the samples of A (m × k) and B (k × n)."""
    left, right = sampled(a).astype(np.float64), sampled(np.ascontiguousarray(b.T)).astype(np.float64)
    return int((left @ right.T).min())


def choose(a: np.ndarray, b: np.ndarray) -> int | None:
    """The number of moduli for A B of one dtype; None where the product is left to others."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    least = least_of_sample(a.astype(np.float64), b.astype(np.float64))
    return moduli_for(a.dtype, least, sample_of(a.shape[1]).places)


def multiply(a: np.ndarray, b: np.ndarray, count: int) -> np.ndarray:
    """A B by ``count`` moduli, as the kernels form it; A (m × k) and B (k × n) of finite numbers of one dtype."""
    rows, columns = a.astype(np.float64), np.ascontiguousarray(b.T, np.float64)
    of_rows, of_columns = exponents(rows, count), exponents(columns, count)
    left, right = integers(rows, of_rows), integers(columns, of_columns)
    words = [np.zeros((len(rows), len(columns)), np.uint64) for _ in range(3)]
    for modulus, parts in zip(modulus_set(count).moduli, fractions(count), strict=True):
        weighted = (left % modulus.p) * modulus.weight % modulus.p
        # Sums of up to 2^16 products of bytes are exact in float64.
        sums = weighted.astype(np.float64) @ (right % modulus.p).astype(np.float64).T
        rest = sums.astype(np.int64).astype(np.uint64) % np.uint64(modulus.p)
        for word, part in zip(words, parts, strict=True):
            word += rest * np.uint64(part)
    product = scaled_back(words, count, of_rows[:, None] + of_columns[None, :])
    with np.errstate(over="ignore"):
        return product.astype(a.dtype)


def scaled_back(sums: list[np.ndarray], count: int, shifts: np.ndarray) -> np.ndarray:
    """Sums of the low, middle and high bits of fractions (uint64) as numbers, divided by 2^``shifts``."""
    low, middle, high = sums
    middle = middle + (low >> np.uint64(LOW_BITS))
    high = high + (middle >> np.uint64(MIDDLE_BITS))
    over = np.uint64(MIDDLE_BITS - 32)  # middle bits that are not among the upper 64 of all 96
    top = (high << np.uint64(32) | middle >> over & np.uint64(0xFFFFFFFF)).view(np.int64)
    rest = (middle << np.uint64(LOW_BITS) | low & np.uint64((1 << LOW_BITS) - 1)) & np.uint64(0xFFFFFFFF)
    first = top.astype(np.float64)
    second = (top - first.astype(np.int64)) * 2.0**32 + rest.astype(np.float64)
    first = first * 2.0**32
    unit_high, unit_low = unit(count)
    product = first * unit_high
    error = _product_error(first, unit_high, product)
    value = product + (error + (first * unit_low + second * unit_high))
    shifts = np.minimum(shifts, 2000)  # beyond, nothing is left either way
    half = -shifts // 2
    with np.errstate(over="ignore", under="ignore"):
        return np.ldexp(np.ldexp(value, half), -shifts - half)


def _product_error(x: np.ndarray, y: float, product: np.ndarray) -> np.ndarray:
    """x y - product, exactly, where product is x y rounded (T. J. Dekker, 1971): a multiply-add that rounds once."""
    splitter = 2.0**27 + 1

    def halves(z: np.ndarray | float) -> tuple[np.ndarray | float, np.ndarray | float]:
        high = splitter * z - (splitter * z - z)
        return high, z - high

    x_high, x_low = halves(x)
    y_high, y_low = halves(y)
    return np.asarray(((x_high * y_high - product) + x_high * y_low + x_low * y_high) + x_low * y_low)
