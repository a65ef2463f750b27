"""Check a product against its factors without computing it again: Freivalds' test, by groups of columns.

C = op(A) op(B) implies C x = A (B x) for every vector x, and costs two thin products instead of a full one (Freivalds,
"Probabilistic machines can use less running time", 1977). This module does that for rows of each matrix and compares
the results; `vectors.py` draws x, `sides.py` reads the matrices. What escapes, and why nothing right is called wrong,
is proven in `docs/verification.md`.

Integers are compared exactly, modulo 2^bits as they were computed: sums of randomly chosen columns, and the sum of all
of them, which no single wrong element escapes. Any error escapes with a chance of at most 2^-10 a round.

In floating point the elements of x are uniform between two numbers, so that no two errors cancel but by chance. The
columns are cut into groups, each compared by itself: so a fault stands out from fewer rounding errors, and is located.
Sums are formed in float64 and may deviate by a multiple of their scale, sqrt(sum over l and j of |a_il b_lj|^2): what
rounding errors of independent signs add up to. Added to that is what underflow loses, in units of the smallest
subnormal number: no kernel flushes subnormal numbers to zero (Numba compiles without fast mathematics; the tensor cores
keep them: Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7,
2021). What is not finite in C is wrong unless a factor of it is not finite either, or its partial sums could overflow:
|a_i| |b_j| bounds them all (Cauchy-Schwarz).

Where NaN or infinity in a factor decides what C holds, every element is checked by itself; such columns of op(B) are
left out of the sums, so that all other columns are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.kernels.cpu.thin import (
    BLOCK_COLUMNS,
    INFINITE,
    NAN,
    NUMBER,
    add_chosen_sums,
    add_thin_product,
    clear_columns,
    find_special_columns,
    settle_special,
)
from tilewright.kernels.gemm.base import compute_dtype
from tilewright.kernels.numbers import ceil_div
from tilewright.kernels.tolerance import operand_roundoff, operand_underflow, unit_roundoff
from tilewright.pipeline.check.sides import Side
from tilewright.pipeline.check.vectors import UNIT_VARIANCE, Probe
from tilewright.pipeline.errors import DamagedError, DamagedProductError

DEVIATIONS = 6
"""Standard deviations allowed for errors times a random vector: less than 1 sum in 10^7 exceeds them (Hoeffding)."""

COMPLEX_PRODUCTS = 6
"""Real products that add up to the two parts of a complex one: three for each where four are not used."""

OVERFLOW_MARGIN = 1.25
"""Room above the bound of a partial sum for operands that are rounded or split before they are multiplied."""


@dataclass(frozen=True)
class Tolerances:
    """What a right product may deviate by."""

    growth: float
    """By the rounding of sums and operands, in units of the scale of a sum."""
    rounding: float
    """By the last rounding, to C's dtype if that is narrower than what sums are formed in, in units of the norm of C's
    elements."""
    own: float
    """By the roundings of the check itself, in units of both."""
    precision: str
    k: int
    dtype: np.dtype
    """C's."""
    column_norms: np.ndarray
    """For each group of B's columns, an upper bound of the norm of any one; float64."""
    group_norms: np.ndarray
    """For each group of B's columns, the norm of all its elements; float64, infinite where squares overflow."""
    compute: np.dtype
    """What C's elements are formed in."""
    gain: float = 1.0
    """What sums, and what underflows in them, are multiplied by at most before they are stored."""

    @property
    def relative(self) -> float:
        """The limit of a deviation in units of its scale, which is the sum of all that is allowed over this."""
        return self.growth + self.rounding


def tolerances(
    k: int,
    dtype: np.dtype,
    precision: str,
    widest: int,
    narrowest: int,
    column_norms: np.ndarray,
    group_norms: np.ndarray,
    compute: np.dtype | None = None,
    gain: float = 1.0,
) -> Tolerances:
    """What C may deviate by if it is of this dtype and was computed in this precision.

    `tilewright.kernels.tolerance.tolerance` is what one element may deviate by in the worst case, relative to sums of
    absolute values; here sums over many elements are compared, whose scale is a root of squares.

    widest: columns of the widest group. narrowest: columns of the narrowest blocks that B and C are read in. compute:
    what C's elements are formed in, if that does not follow from its dtype. gain: as in `Tolerances`.
    """
    compute, wide = compute or compute_dtype(dtype), np.dtype(np.float64)
    if dtype.kind in "iu":
        return Tolerances(0.0, 0.0, 0.0, precision, k, dtype, column_norms, group_norms, compute)
    # Of sums with rounding errors of standard deviation u / sqrt(3) each, k u / sqrt(6) is the most in any order of
    # summation, for C and for the check; 4 k u is almost seven times that of both together.
    terms = 2 * k if dtype.kind == "c" else k
    growth = 4 * unit_roundoff(compute) * max(terms, 4) + 2 * DEVIATIONS * operand_roundoff(
        precision, compute
    )
    rounding = DEVIATIONS * unit_roundoff(dtype) if dtype != compute else 0.0
    # Additions that a term of B x or C x goes through: in its block of the loops, to the sum of its part and of all.
    parts = ceil_div(widest, max(1, narrowest)) + 2
    depth = min(widest, BLOCK_COLUMNS) + widest / BLOCK_COLUMNS + 2 * parts
    own = DEVIATIONS * unit_roundoff(wide) * math.sqrt(depth / 3)
    return Tolerances(growth, rounding, own, precision, k, dtype, column_norms, group_norms, compute, gain)


@dataclass(frozen=True)
class Sums:
    """Some rows of B, or of C, times the probe, and what is measured of them on the way."""

    thin: np.ndarray
    """rows × (groups × vectors): products with the probe, in its dtype."""
    norms: np.ndarray
    """rows × groups, float64: norms of the rows; without columns for integers."""
    column_squares: np.ndarray
    """For each group, float64: the largest sum of |element|² over these rows in one of its columns; of B only, and
    empty for integers."""
    special: np.ndarray | None
    """What B's columns hold in these rows, uint8 (`kernels/cpu/thin.py`); None where that is numbers alone, or the
    probe knows."""
    strays: np.ndarray
    """rows × groups, bool: where C holds a number though there must be none."""


@dataclass(frozen=True)
class _Part:
    """The same of one block."""

    rows: slice
    columns: slice
    thin: np.ndarray
    """groups × rows × vectors."""
    norms: np.ndarray
    column_squares: np.ndarray
    """One a column."""
    special: np.ndarray | None
    strays: np.ndarray


def project(side: Side, rows: slice, probe: Probe, groups: Sequence[int] | None = None) -> Sums:
    """Rows of B times the probe, without the columns that it leaves out.

    groups: those of whose columns sums are formed; the others stay zeros. None: all.
    """
    wanted = range(probe.group_count) if groups is None else groups
    return _sums(side, rows, probe, wanted, of_product=False)


def _sums(
    side: Side,
    rows: slice,
    probe: Probe,
    groups: Sequence[int],
    *,
    of_product: bool,
    special_rows: np.ndarray | None = None,
) -> Sums:
    """Rows of ``side`` times the probe, and, of C, whether there are numbers where special rows and columns leave
    none."""
    count, vectors = rows.stop - rows.start, len(probe.vectors)
    measured = 0 if probe.exact else probe.group_count
    left_out = probe.left_out
    settling = special_rows is not None or left_out is not None
    decided = special_rows if special_rows is not None else np.zeros(count, np.uint8)
    ones = np.ones((1 if measured else 0, side.shape[1] if measured else 0))

    def add_part(place: slice, columns: slice, block: np.ndarray) -> _Part:
        height = block.shape[0]
        kinds = left_out[columns] if left_out is not None else np.zeros(block.shape[1], np.uint8)
        thin = np.zeros((probe.group_count, height, vectors), probe.dtype)
        norms = np.zeros((measured, height, 1))
        squares = np.zeros(0 if of_product or not measured else block.shape[1])
        strays = np.zeros((height, probe.group_count), bool)
        for group, inside, whole in probe.inside(columns):
            part = block[:, inside]
            if probe.exact:
                add_chosen_sums(part, probe.vectors[:, whole].astype(probe.dtype), thin[group])
                continue
            if settling:
                if of_product:
                    strays[:, group] = settle_special(part, decided[place], kinds[inside])
                else:
                    clear_columns(part, kinds[inside])
                if kinds[inside].all():  # NUMBER is 0: nothing is left to be added up
                    continue
            add_thin_product(
                part,
                probe.vectors[:, whole].astype(np.float64),
                thin[group],
                ones[:, whole],
                norms[group],
                squares[inside] if len(squares) else squares,
            )
        special = None
        if len(squares) and left_out is None:
            suspected = ~np.isfinite(squares)
            special = find_special_columns(block, suspected) if suspected.any() else None
        return _Part(place, columns, thin, norms, squares, special, strays)

    thin, norms = np.zeros((count, probe.group_count, vectors), probe.dtype), np.zeros((count, measured))
    squares = np.zeros(0 if of_product or not measured else side.shape[1])
    special = np.zeros(side.shape[1], np.uint8)
    strays = np.zeros((count, probe.group_count), bool)
    for region in _joined([(probe.cuts[group], probe.cuts[group + 1]) for group in groups]):

        def add_in_region(
            place: slice, columns: slice, block: np.ndarray, first: int = region.start
        ) -> _Part:
            return add_part(place, slice(first + columns.start, first + columns.stop), block)

        for part in side.each_block(rows, region, probe, add_in_region):
            with np.errstate(all="ignore"):  # NaN and infinity pass through
                thin[part.rows] += part.thin.transpose(1, 0, 2)
                norms[part.rows] = np.hypot(norms[part.rows], part.norms[..., 0].T)
                if len(squares):
                    squares[part.columns] += part.column_squares
            if part.special is not None:
                np.maximum(special[part.columns], part.special, out=special[part.columns])
            strays[part.rows] |= part.strays
    # One number a group goes back to the client, not one a column. The largest sum over all tasks is at most the sum of
    # each task's largest.
    largest = [squares[start:stop].max(initial=0.0) for start, stop in probe.groups()] if len(squares) else []
    return Sums(
        thin.reshape(count, probe.group_count * vectors),
        norms,
        np.array(largest),
        special if special.any() else None,
        strays,
    )


def _joined(stretches: Sequence[tuple[int, int]]) -> list[slice]:
    """The same stretches, in ascending order, as few slices: a chunk that lies in two neighbours is read once."""
    joined: list[slice] = []
    for start, stop in stretches:
        if joined and joined[-1].stop == start:
            joined[-1] = slice(joined[-1].start, stop)
        else:
            joined.append(slice(start, stop))
    return joined


@dataclass(frozen=True)
class Outcome:
    largest: float
    worst: tuple[int, int, int]
    unchecked: int
    strays: bool
    """Whether there are numbers where there must be none."""
    special_rows: int
    """How many of the rows of A hold NaN or infinity."""
    wrong: frozenset[tuple[int, int]] = frozenset()
    """Number of the block of rows, and of the group, of each wrong block, where they are asked for."""


def compare(
    left: Side,
    result: Side,
    rows: slice,
    vectors: np.ndarray,
    weights: np.ndarray,
    allowed: Tolerances,
    probe: Probe,
) -> Outcome:
    """The largest deviation between rows of C x and A (B x).

    vectors: B x of every group and vector, one a row of length k. weights: norms of B's rows, one group a row, and a
    row of ones; none for integers.
    """
    count = rows.stop - rows.start
    expected, norms, special = _multiplied(left, rows, vectors, weights, probe)
    settling = special.any() or probe.left_out is not None
    try:
        product = _sums(
            result,
            rows,
            probe,
            range(probe.group_count),
            of_product=True,
            special_rows=special if settling else None,
        )
    except DamagedError as error:
        raise DamagedProductError(str(error)) from error
    shape = count, probe.group_count, len(probe.vectors)
    found, expected = product.thin.reshape(shape), expected.reshape(shape)
    if probe.exact:
        # Everything was summed modulo 2^32 or 2^64; C itself is known modulo 2^bits.
        shift = probe.dtype.type(8 * probe.dtype.itemsize - probe.bits)
        errors = (((found - expected) << shift) != 0).astype(np.float64)
        unchecked = 0
    else:
        with np.errstate(all="ignore"):  # NaN and infinity pass through and are counted
            errors, skipped = relative_errors(found, expected, norms, product.norms, allowed, probe)
        errors[product.strays] = np.inf
        unchecked = _unchecked(np.any(skipped, axis=2), special, probe)
    place_row, place_group, _ = (
        np.unravel_index(int(np.argmax(errors)), errors.shape) if errors.size else (0, 0, 0)
    )
    largest = float(errors.sum() if probe.exact else errors.max(initial=0.0))
    return Outcome(
        largest,
        (rows.start + int(place_row), probe.cuts[int(place_group)], probe.cuts[int(place_group) + 1]),
        unchecked,
        bool(product.strays.any()),
        int(np.count_nonzero(special != NUMBER)),
        _wrong_blocks(errors > allowed.relative, rows.start, probe.block_rows),
    )


def _wrong_blocks(wrong: np.ndarray, first: int, block_rows: int) -> frozenset[tuple[int, int]]:
    """The wrong blocks of some rows, the first of which is number ``first``. wrong: rows × groups × vectors, bool."""
    if not block_rows:
        return frozenset()
    places = np.argwhere(wrong.any(axis=2))
    places[:, 0] = (places[:, 0] + first) // block_rows
    return frozenset((int(row), int(group)) for row, group in np.unique(places, axis=0))


def _multiplied(
    side: Side, rows: slice, vectors: np.ndarray, weights: np.ndarray, probe: Probe
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of ``side`` times vectors, their norms weighted by weights, and what these rows hold, uint8.

    vectors, weights: one a row, as long as the side is wide.
    """

    def multiply(
        place: slice, inner: slice, block: np.ndarray
    ) -> tuple[slice, np.ndarray, np.ndarray, np.ndarray]:
        thin = np.zeros((block.shape[0], len(vectors)), probe.dtype)
        norms = np.zeros((block.shape[0], len(weights)))
        add_thin_product(block, vectors[:, inner].copy(), thin, weights[:, inner].copy(), norms, np.zeros(0))
        kinds = np.zeros(block.shape[0], np.uint8)
        if len(weights):
            kinds = find_special_columns(block.T, ~np.isfinite(norms[:, -1]))
        return place, thin, norms, kinds

    count = rows.stop - rows.start
    thin, norms = np.zeros((count, len(vectors)), probe.dtype), np.zeros((count, len(weights)))
    special = np.zeros(count, np.uint8)
    for place, part, part_norms, kinds in side.each_block(rows, slice(0, side.shape[1]), probe, multiply):
        with np.errstate(all="ignore"):  # NaN and infinity pass through
            thin[place] += part
            norms[place] = np.hypot(norms[place], part_norms)
        np.maximum(special[place], kinds, out=special[place])
    return thin, norms, special


def wrong_columns(left: Side, right: Side, result: Side, row: int, columns: slice, probe: Probe) -> list[int]:
    """Those of these columns in which a row of C differs from the product of integers, computed anew."""
    one = slice(row, row + 1)
    line = np.zeros((1, left.shape[1]), probe.dtype)
    for inner, part in left.each_block(
        one, slice(0, left.shape[1]), probe, lambda _, inner, block: (inner, block)
    ):
        line[:, inner] = part
    expected, _, _ = _multiplied(right.transposed, columns, line, np.zeros((0, line.shape[1])), probe)
    found = np.zeros_like(expected)
    for across, part in result.each_block(one, columns, probe, lambda _, across, block: (across, block)):
        found[across, 0] = part[0]
    shift = probe.dtype.type(8 * probe.dtype.itemsize - probe.bits)
    return [columns.start + int(j) for j in np.flatnonzero((found - expected) << shift)]


def _unchecked(skipped: np.ndarray, special: np.ndarray, probe: Probe) -> int:
    """Elements of some rows of C whose values were not compared.

    skipped: rows × groups, bool, whose sums were not compared. special: what these rows of A hold, uint8. Where there
    must be NaN that was checked, so it counts as compared.
    """
    left_out = np.zeros(probe.cuts[-1], np.uint8) if probe.left_out is None else probe.left_out
    known, infinite = (left_out == NAN).sum(), (left_out == INFINITE).sum()
    widths = np.array([(left_out[start:stop] == NUMBER).sum() for start, stop in probe.groups()], np.int64)
    usual = special == NUMBER
    in_usual = usual.sum() * infinite + (skipped[usual] @ widths).sum()
    in_infinite = (special == INFINITE).sum() * (probe.cuts[-1] - known)
    return int(in_usual + in_infinite)


def relative_errors(
    found: np.ndarray,
    expected: np.ndarray,
    norms: np.ndarray,
    product_norms: np.ndarray,
    allowed: Tolerances,
    probe: Probe,
) -> tuple[np.ndarray, np.ndarray]:
    """Deviations in units of their scale, rows × groups × vectors, and which of them could not be compared (bool).

    found, expected: of that shape, float64 or complex128. norms: rows × (groups + 1), float64: the scale sqrt(sum over
    l and j of |a_il b_lj|²) of each group, and the norm of A's row. product_norms: rows × groups, float64: of C's own
    elements.

    A sum cannot be compared where the row of A holds NaN or infinity, or C's dtype may rightly have overflowed.
    """
    units, row_norms = norms[:, :-1, np.newaxis], norms[:, -1:, np.newaxis]
    widths = np.diff(probe.cuts)[:, np.newaxis]
    # No right element is larger than sqrt(k) times the norm of its products (Cauchy-Schwarz), so that the more a wrong
    # one is, the more it stands out.
    elements = np.fmin(product_norms[:, :, np.newaxis], math.sqrt(allowed.k) * units)
    # Where factors are alike their rounding errors add up as C's elements do.
    alike = min(0.5, allowed.growth) * elements
    # Where all factors are zero there is nothing that could underflow.
    underflow = np.where((units == 0) & (expected == 0), 0.0, _underflow(row_norms, widths, allowed))
    limits = (
        np.maximum(allowed.growth * units, alike)
        + allowed.rounding * elements
        + allowed.own * (units + elements)
        + underflow
    )
    deviation = np.abs(found - expected)
    errors = np.where(deviation == 0, 0.0, deviation / (limits / (UNIT_VARIANCE * allowed.relative)))
    overflow = ~np.isfinite(found) & _can_overflow(units, row_norms, widths, allowed)
    # A sum of nothing, or of zeros: the smallest number times an element of the probe may itself be 0.
    errors = np.where((units == 0) & (product_norms[:, :, np.newaxis] > 0), np.inf, errors)
    skip = np.broadcast_to(~np.isfinite(units), found.shape) | ~np.isfinite(expected) | overflow
    # What is not finite here although its factors are is an infinite error, not something to skip.
    errors = np.where(np.isnan(errors), np.inf, errors)
    return np.where(skip, 0.0, errors), skip


def _underflow(row_norms: np.ndarray, widths: np.ndarray, allowed: Tolerances) -> np.ndarray:
    """What rounding to subnormal numbers can make a sum deviate by: rows × groups × 1, absolute.

    row_norms: rows × 1 × 1, of A. widths: groups × 1, in columns.

    An element errs by half the smallest number, in each of its products and when it is rounded to C's dtype: at worst
    all one way, but the probe gives elements random signs. So do an operand's errors, times the other operand, whose k
    elements add up to at most sqrt(k) times their norm.
    """
    compute = allowed.compute
    products = allowed.k * (COMPLEX_PRODUCTS if allowed.dtype.kind == "c" else 1)
    smallest = [float(np.finfo(dtype).smallest_subnormal) for dtype in (compute, allowed.dtype)]
    elements = np.sqrt(widths) * (allowed.gain * products * smallest[0] + 2 * smallest[1])
    lost = operand_underflow(allowed.precision, compute)
    operands = 0.0
    if lost:  # else an infinite norm would make a NaN of it
        norms = allowed.group_norms[:, np.newaxis] + np.sqrt(widths) * row_norms
        operands = lost * math.sqrt(allowed.k) * norms
    return DEVIATIONS * (elements / 2 + allowed.gain * operands)


def _can_overflow(
    units: np.ndarray, row_norms: np.ndarray, widths: np.ndarray, allowed: Tolerances
) -> np.ndarray:
    """Whether a partial sum of an element may be too large for C's dtype, rows × groups × 1.

    units: rows × groups × 1, the scales. row_norms: rows × 1 × 1, of A. widths: groups × 1, in columns.

    sum over l of |a_il b_lj| is at most |a_i| |b_j|, and at most sqrt(k) times the norm of these products. Either bound
    may itself overflow, or meet a NaN that the other does not.
    """
    bound = np.fmin(row_norms * allowed.column_norms[:, np.newaxis], units * math.sqrt(allowed.k))
    growth = 1 + allowed.k * float(np.finfo(allowed.compute).eps)  # by rounding on the way
    # Complex: the sums of both parts at once in a scheme of three products.
    margin = OVERFLOW_MARGIN * growth * (2 if allowed.dtype.kind == "c" else 1)
    # The check itself adds up elements of a group in float64.
    largest = np.minimum(np.finfo(allowed.dtype).max, np.finfo(np.float64).max / widths)
    return bound * margin > largest
