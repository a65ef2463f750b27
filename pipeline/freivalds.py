"""Check a stored product against its factors without computing it again: Freivalds' test, by groups of columns.

C = op(A) op(B) implies C x = A (B x) for every vector x, and costs two thin products instead of a full one
(Freivalds, "Probabilistic machines can use less running time", 1977). Each round draws one x of signs and cuts it
into groups of C's columns, so that a fault is found among fewer sums of rounding errors and is reported by place.

Integers are compared exactly, modulo 2^bits as they were computed, with several vectors a round. One of them holds
odd numbers only, so a single wrong element never escapes; faults that hide each other escape a vector with a
probability of at most 1/2 (differences of exactly half the modulus; far less for any other). Floating point is
summed in float64 and compared with a tolerance from k and the dtype, at the scale sqrt(sum over l and j of
|a_il b_lj|^2): what rounding errors of independent signs add up to. To it comes what numbers lose that underflow,
in units of the smallest subnormal number: no kernel flushes such numbers to zero (Numba compiles without fast
mathematics; the tensor cores keep them: Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores",
PeerJ Computer Science 7, 2021). What is not finite in C is wrong unless a factor of it is not finite either, or its
partial sums could overflow: |a_i| |b_j| bounds them all (Cauchy-Schwarz).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zarr

from tilewright.kernels.gemm.base import compute_dtype
from tilewright.kernels.launch import ceil_div
from tilewright.kernels.thin import WIDE_DTYPES, add_thin_product, widen
from tilewright.pipeline import config
from tilewright.pipeline.errors import DamagedError, DamagedProductError
from tilewright.pipeline.region_read import RegionRead, region_reads
from tilewright.pipeline.store import as_stored_matrix

TASK_NBYTES = 256 * 2**20
"""About how many bytes of a matrix one task of the check goes through, in whole chunks."""

MOST_GROUPS = 4
"""Groups of columns that a fault is located by: each costs one more vector in each round."""

INTEGER_VECTORS = 4
"""Vectors of each round for integers: what hides in one shows in another."""

INPUT_EPSILON = {"tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Relative error of an operand rounded to the precision that was asked for."""

INPUT_SUBNORMAL = {"split": 2.0**-133, "tf32": 2.0**-136, "bf16": 2.0**-133, "fp16": 2.0**-24}
"""The smallest number that an operand can have in the precision that was asked for."""

DEVIATIONS = 6
"""Standard deviations that errors of random signs are given: less than 1 sum in 10^7 exceeds them (Hoeffding)."""

COMPLEX_PRODUCTS = 6
"""Real products that add up to the two parts of a complex one: three for each where four are not used."""

OVERFLOW_MARGIN = 1.25
"""Room above the bound of a partial sum for operands that are rounded or split before they are multiplied."""


@dataclass(frozen=True)
class Side:
    """A stored matrix with op applied: what blocks of it are read and how."""

    array: zarr.Array[Any]
    transpose: bool

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.array.shape
        return (columns, rows) if self.transpose else (rows, columns)

    def parts(self, rows: slice) -> list[tuple[slice, slice, RegionRead]]:
        """The parts of these rows: their rows from the first of these on, their columns, and how to read them."""
        columns = slice(0, self.shape[1])
        region = (columns, rows) if self.transpose else (rows, columns)
        reads = region_reads(self.array, region, in_loops=True)
        order = (1, 0) if self.transpose else (0, 1)
        return [(read.target[order[0]], read.target[order[1]], read) for read in reads]

    def load(self, part: RegionRead, wide: np.dtype) -> np.ndarray:
        block = np.empty(part.shape, self.array.dtype.newbyteorder("="))
        part.read(block)
        return widen(block.T if self.transpose else block, wide)

    def step(self) -> int:
        """Rows of a task: whole chunks, about ``TASK_NBYTES``."""
        matrix = as_stored_matrix(self.array, transpose=self.transpose)
        strip = matrix.unit[0] * max(1, matrix.columns) * matrix.dtype.itemsize
        return matrix.unit[0] * max(1, TASK_NBYTES // strip)


@dataclass(frozen=True)
class Probe:
    """The vectors of all rounds, one a row of length n, and where the groups of columns are cut."""

    vectors: np.ndarray
    cuts: tuple[int, ...]
    exact: bool
    bits: int
    """Bits of C's elements: what integers are compared modulo 2 to the power of."""
    threads: int

    def groups(self) -> Iterable[tuple[int, int]]:
        """First and last + 1 column of every group."""
        return zip(self.cuts, self.cuts[1:], strict=False)

    @property
    def group_count(self) -> int:
        return len(self.cuts) - 1

    @property
    def dtype(self) -> np.dtype:
        return self.vectors.dtype


def tolerance(k: int, dtype: np.dtype, precision: str) -> float:
    """What a sum may deviate by, in units of its scale, when nothing is wrong.

    A sum of k terms rounded one after another errs by about eps k / 3 of sqrt(sum |ab|^2) when all terms have one
    sign, the worst case unless they are alike, and eps sqrt(k / 6) when signs are mixed; 2 eps k leaves six standard
    deviations to the first. The last rounding, to C's own dtype, adds eps sqrt(k); rounded operands add their own
    epsilon, taken with the same six.
    """
    return _tolerance(k, dtype, precision, math.sqrt(max(k, 1)))


def tolerance_of_alike(k: int, dtype: np.dtype, precision: str) -> float:
    """What a sum of products of factors that are all alike may deviate by, in units of the norm of C's elements.

    All roundings go one way: one sum of k terms errs by up to eps k / 2 of itself, and its last rounding by eps / 2.
    Four times as much leaves room for vectors that do not sum up to zero. A wrong element adds to that norm what it
    adds to the deviation, so that no more than half of it may ever be allowed.
    """
    return min(0.5, _tolerance(k, dtype, precision, 1.0))


def _tolerance(k: int, dtype: np.dtype, precision: str, last: float) -> float:
    """``last``: how large C's elements are at most, in the unit that is meant."""
    accumulated = np.float32 if dtype == np.float16 else dtype
    error = 2 * float(np.finfo(accumulated).eps) * max(k, 4) + 2 * float(np.finfo(dtype).eps) * last
    return error + 6 * INPUT_EPSILON.get(precision, 0.0)


def draw_probe(n: int, dtype: np.dtype, rounds: int, step: int) -> Probe:
    """Fresh vectors from the system's entropy: a fixed seed could be met by a fixed fault."""
    generator = np.random.default_rng()
    exact = dtype.kind in "iu"
    if exact:
        vectors = generator.integers(0, 64, (rounds * INTEGER_VECTORS, n))
        vectors[0] |= 1
    else:
        vectors = (generator.integers(0, 2, (rounds, n)) * 2 - 1).astype(WIDE_DTYPES[dtype.kind])
    width = step * ceil_div(ceil_div(n, step), MOST_GROUPS) if n else 1
    cuts = (*range(0, n, width), n) if n else (0,)
    return Probe(vectors, cuts, exact, 8 * dtype.itemsize, config.threads("read-threads"))


@dataclass(frozen=True)
class Sums:
    """What one part, or all parts, of some rows add up to; without columns where nothing is measured."""

    rows: slice
    thin: np.ndarray
    """rows × count: products with vectors, in the probe's dtype."""
    norms: np.ndarray
    """rows × count, float64: norms of the rows, weighted or by group."""
    columns: slice
    column_squares: np.ndarray
    """float64: |element|² summed over the rows, for each of these columns; of all parts, the largest of each group."""


def project(side: Side, rows: slice, measure: bool, probe: Probe) -> Sums:
    """Rows of ``side`` times the probe, one column for each group and round.

    measure: for floats, the norms of the rows in each group too, and the largest sum of squares that these rows have
    in a column of each group.
    """
    count, rounds = rows.stop - rows.start, probe.vectors.shape[0]
    groups = probe.group_count if measure and not probe.exact else 0
    ones = np.ones((min(groups, 1), side.shape[1]))

    def project(place: slice, columns: slice, part: RegionRead) -> Sums:
        block = side.load(part, probe.dtype)
        thin = np.zeros((probe.group_count, block.shape[0], rounds), probe.dtype)
        norms = np.zeros((probe.group_count, block.shape[0], len(ones)))
        squares = np.zeros(block.shape[1] if groups else 0)
        for group, (start, stop) in enumerate(probe.groups()):
            first, last = max(start, columns.start), min(stop, columns.stop)
            if first < last:
                inside = slice(first - columns.start, last - columns.start)
                add_thin_product(
                    block[:, inside],
                    probe.vectors[:, first:last].copy(),
                    thin[group],
                    ones[:, first:last],
                    norms[group],
                    squares[inside],
                )
        return Sums(
            place,
            thin.transpose(1, 0, 2).reshape(block.shape[0], -1),
            norms[..., 0].T if groups else np.zeros((block.shape[0], 0)),
            columns if groups else slice(0, 0),
            squares,
        )

    squares = np.zeros(side.shape[1] if groups else 0)
    sums = _gather(side, rows, project, (count, probe.group_count * rounds), groups, squares, probe)
    # One number a group goes back to the client, not one a column. The largest of a sum over tasks is at most the sum
    # of their largest.
    largest = [squares[start:stop].max(initial=0.0) for start, stop in probe.groups()] if groups else []
    return replace(sums, column_squares=np.array(largest))


def _gather(
    side: Side,
    rows: slice,
    multiply: Callable[[slice, slice, RegionRead], Sums],
    shape: tuple[int, int],
    norm_count: int,
    column_squares: np.ndarray,
    probe: Probe,
) -> Sums:
    """Thin products of all parts of some rows, on many threads, added up in the order of the parts.

    ``column_squares`` is added to.
    """
    thin, norms = np.zeros(shape, probe.dtype), np.zeros((shape[0], norm_count))
    with ThreadPoolExecutor(probe.threads, thread_name_prefix="tilewright-verify") as pool:
        for part in pool.map(lambda part: multiply(*part), side.parts(rows)):
            with np.errstate(all="ignore"):  # NaN and infinity pass through
                thin[part.rows] += part.thin
                norms[part.rows] = np.hypot(norms[part.rows], part.norms)
                column_squares[part.columns] += part.column_squares
    return Sums(rows, thin, norms, slice(0, len(column_squares)), column_squares)


@dataclass(frozen=True)
class Limits:
    """What a right product may deviate by."""

    relative: float
    """`tolerance` of the product."""
    alike: float
    """`tolerance_of_alike` of the product."""
    operand_subnormal: float
    """The smallest number that operands can be rounded to, where the precision is not the dtype's own; or 0."""
    k: int
    dtype: np.dtype
    """C's."""
    column_norms: np.ndarray
    """Of each group of B's columns, at least the largest norm of one; float64."""
    group_norms: np.ndarray
    """Of each group of B's columns, the norm of all its elements; float64, infinite where squares overflow."""


@dataclass(frozen=True)
class Outcome:
    largest: float
    worst: tuple[int, int, int]
    unchecked: int


def compare(
    left: Side,
    result: Side,
    rows: slice,
    vectors: np.ndarray,
    weights: np.ndarray,
    limits: Limits,
    probe: Probe,
) -> Outcome:
    """The largest deviation between rows of C x and A (B x).

    vectors: B x of every group and round, one a row of length k. weights: norms of B's rows, one group a row, and a
    row of ones; none for integers.
    """
    count, rounds = rows.stop - rows.start, probe.vectors.shape[0]
    unmeasured = slice(0, 0), np.zeros(0)

    def multiply(place: slice, inner: slice, part: RegionRead) -> Sums:
        block = left.load(part, probe.dtype)
        thin = np.zeros((block.shape[0], vectors.shape[0]), probe.dtype)
        norms = np.zeros((block.shape[0], weights.shape[0]))
        add_thin_product(
            block, vectors[:, inner].copy(), thin, weights[:, inner].copy(), norms, unmeasured[1]
        )
        return Sums(place, thin, norms, *unmeasured)

    sums = _gather(left, rows, multiply, (count, vectors.shape[0]), weights.shape[0], unmeasured[1], probe)
    try:
        product = project(result, rows, True, probe)
    except DamagedError as error:
        raise DamagedProductError(str(error)) from error
    expected, found = sums.thin, product.thin
    if probe.exact:
        # Everything was summed modulo 2^64; C itself is known modulo 2^bits.
        shift = np.int64(64 - probe.bits)
        errors = (
            (((found - expected) << shift) != 0).reshape(count, probe.group_count, rounds).astype(np.float64)
        )
        unchecked = 0
    else:
        with np.errstate(all="ignore"):  # NaN and infinity pass through and are counted
            errors, unchecked = _relative_errors(found, expected, sums.norms, product.norms, limits, probe)
    place_row, place_group, _ = (
        np.unravel_index(int(np.argmax(errors)), errors.shape) if errors.size else (0, 0, 0)
    )
    largest = float(errors.sum() if probe.exact else errors.max(initial=0.0))
    return Outcome(
        largest,
        (rows.start + int(place_row), probe.cuts[int(place_group)], probe.cuts[int(place_group) + 1]),
        unchecked,
    )


def _relative_errors(
    found: np.ndarray,
    expected: np.ndarray,
    norms: np.ndarray,
    product_norms: np.ndarray,
    limits: Limits,
    probe: Probe,
) -> tuple[np.ndarray, int]:
    """Deviations in units of their scale, rows × groups × rounds, and how many could not be compared.

    found, expected: rows × (groups × rounds), float64 or complex128. norms: rows × (groups + 1), float64: the scale
    sqrt(sum over l and j of |a_il b_lj|²) of each group, and the norm of A's row. product_norms: rows × groups,
    float64: of C's own elements.

    Where factors are alike the norm of C's elements is the scale, for `tolerance_of_alike` of it; elsewhere that is no
    larger than the other.

    A sum cannot be compared when a factor of it is NaN or infinite, or when C's dtype may rightly have overflowed.
    """
    shape = (found.shape[0], probe.group_count, probe.vectors.shape[0])
    found, expected = found.reshape(shape), expected.reshape(shape)
    units, row_norms = norms[:, :-1, np.newaxis], norms[:, -1:, np.newaxis]
    widths = np.diff(probe.cuts)[:, np.newaxis]
    alike = limits.alike / limits.relative * product_norms[:, :, np.newaxis]
    scale = np.where(np.isfinite(alike), np.maximum(units, alike), units)
    deviation = np.abs(found - expected)
    # Where all factors are zero there is nothing that could underflow.
    underflow = np.where((units == 0) & (expected == 0), 0.0, _underflow(row_norms, widths, limits))
    errors = np.where(deviation == 0, 0.0, deviation / (scale + underflow / limits.relative))
    overflow = ~np.isfinite(found) & _can_overflow(units, row_norms, widths, limits)
    skip = np.broadcast_to(~np.isfinite(units), shape) | ~np.isfinite(expected) | overflow
    # What is not finite here although its factors are is an error without measure, not something to pass over.
    errors = np.where(np.isnan(errors), np.inf, errors)
    return np.where(skip, 0.0, errors), int(skip.sum())


def _underflow(row_norms: np.ndarray, widths: np.ndarray, limits: Limits) -> np.ndarray:
    """What rounding to subnormal numbers can make a sum deviate by: rows × groups × 1, absolute.

    row_norms: rows × 1 × 1, of A. widths: groups × 1, in columns.

    An element errs by half the smallest number, in each of its products and when it is rounded to C's dtype: at worst
    all one way, but elements have the probe's random signs. So have an operand's errors, times the other operand.
    """
    compute = compute_dtype(limits.dtype)
    products = limits.k * (COMPLEX_PRODUCTS if limits.dtype.kind == "c" else 1)
    smallest = [float(np.finfo(dtype).smallest_subnormal) for dtype in (compute, limits.dtype)]
    elements = np.sqrt(widths) * (products * smallest[0] + 2 * smallest[1])
    operands = 0.0
    if limits.operand_subnormal:
        others = limits.group_norms[:, np.newaxis] + np.sqrt(widths) * row_norms
        operands = limits.operand_subnormal * others
    return DEVIATIONS / 2 * (elements + operands)


def _can_overflow(units: np.ndarray, row_norms: np.ndarray, widths: np.ndarray, limits: Limits) -> np.ndarray:
    """Whether a partial sum of an element may be too large for C's dtype, rows × groups × 1.

    units: rows × groups × 1, the scales. row_norms: rows × 1 × 1, of A. widths: groups × 1, in columns.

    sum over l of |a_il b_lj| is at most |a_i| |b_j|, and at most sqrt(k) times the norm of these products. Either may
    overflow itself, or meet a NaN that the other does not.
    """
    bound = np.fmin(row_norms * limits.column_norms[:, np.newaxis], units * math.sqrt(limits.k))
    growth = 1 + limits.k * float(np.finfo(compute_dtype(limits.dtype)).eps)  # by rounding on the way
    # Complex: the sums of both parts at once in a scheme of three products.
    margin = OVERFLOW_MARGIN * growth * (2 if limits.dtype.kind == "c" else 1)
    # The check itself adds up elements of a group in float64.
    largest = np.minimum(np.finfo(limits.dtype).max, np.finfo(np.float64).max / widths)
    return bound * margin > largest
