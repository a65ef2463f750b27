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
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import zarr
from distributed import Client

from tilewright.kernels.gemm import check
from tilewright.kernels.gemm.base import compute_dtype
from tilewright.kernels.launch import ceil_div
from tilewright.kernels.thin import WIDE_DTYPES, add_thin_product, widen
from tilewright.pipeline import config
from tilewright.pipeline.errors import (
    DamagedError,
    DamagedProductError,
    DTypeError,
    OptionError,
    ShapeError,
)
from tilewright.pipeline.events import (
    Listener,
    UnitDone,
    WorkDone,
    WorkPlanned,
    counted,
    ignore,
    on_waiting,
)
from tilewright.pipeline.region_read import RegionRead, region_reads
from tilewright.pipeline.store import as_stored_matrix, name_of
from tilewright.pipeline.submit import Result, run_bounded, run_sent, window_of

TASK_NBYTES = 256 * 2**20
"""About how many bytes of a matrix one task of the check goes through, in whole chunks."""

MOST_GROUPS = 4
"""Groups of columns that a fault is located by: each costs one more vector in each round."""

INTEGER_VECTORS = 4
"""Vectors of each round for integers: what hides in one shows in another."""

SENT_NBYTES = 2**20
"""Vectors up to this size are part of every task."""
MOST_ROUNDS = 64
"""With as many, an error that one round misses with a probability of a half escapes once in 2^64 times."""

INPUT_EPSILON = {"tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Relative error of an operand rounded to the precision that was asked for."""

INPUT_SUBNORMAL = {"split": 2.0**-133, "tf32": 2.0**-136, "bf16": 2.0**-133, "fp16": 2.0**-24}
"""The smallest number that an operand can have in the precision that was asked for."""

INPUT_LARGEST = {"fp16": float(np.finfo(np.float16).max)}
"""The largest number that an operand can have, where that is less than float32's."""

DEVIATIONS = 6
"""Standard deviations that errors of random signs are given: less than 1 sum in 10^7 exceeds them (Hoeffding)."""

COMPLEX_PRODUCTS = 6
"""Real products that add up to the two parts of a complex one: three for each where four are not used."""

OVERFLOW_MARGIN = 1.25
"""Room above the bound of a partial sum for operands that are rounded or split before they are multiplied."""


@dataclass(frozen=True)
class Verification:
    """The outcome of the check of one product.

    What it does not see: sums that meet NaN or infinity, which are counted in ``unchecked``. They are those of a row of
    C whose row of op(A) holds one, and of a group of columns (a quarter of C's at least, in whole chunks) any of whose
    columns of op(B) does; what C holds there may be anything. And of floats, an element that is wrong by less than
    ``tolerance`` times the scale of its sum, sqrt(sum over l and j of |a_il b_lj|²) over the columns j of the group.
    For factors of random signs that is sqrt(columns of the group) times the usual size of C's elements, and
    ``tolerance`` is 2 eps max(k, 4) + 2 eps' sqrt(k), with eps of the type that sums are formed in and eps' of C's.
    """

    passed: bool
    conclusive: bool
    """Whether anything could be compared; if not, ``passed`` is false and means nothing."""
    rounds: int
    largest_error: float
    """The largest deviation, in units of its own scale, which rises where numbers underflow; for integers the number
    of sums that differ."""
    tolerance: float
    """What ``largest_error`` may be; 0 for integers."""
    unchecked: int
    """Sums (one for each row, group of columns and round) that NaN, infinity or overflow kept from being compared:
    nothing is known of C there."""
    worst: tuple[int, int, int] | None
    """Row of C, and first and last + 1 column, where the largest deviation was found; None where there is none."""
    seconds: float
    cause: str = ""
    """Why it failed, where that is known: an operand that the precision asked for cannot hold."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if not self.conclusive:
            return "verification could compare nothing: every sum meets NaN or infinity"
        exact = self.tolerance == 0
        wrong = int(self.largest_error) if exact else 0
        measure = (
            f"{counted(wrong, 'sum')} differ{'s' * (wrong == 1)}"
            if exact
            else f"largest error {self.largest_error:.3g} of {self.tolerance:.3g} allowed"
        )
        rest = f", {self.unchecked} sums met NaN or infinity and were not compared" if self.unchecked else ""
        if self.passed:
            return f"verified in {counted(self.rounds, 'round')} and {self.seconds:.2f} s: {measure}{rest}"
        assert self.worst is not None
        row, first, stop = self.worst
        return (
            f"verification failed: {measure}; the worst is in row {row}, columns {first} to {stop - 1}{rest}"
            + (f"; {self.cause}" if self.cause else "")
        )


@dataclass(frozen=True)
class _Side:
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
class _Probe:
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


def _tolerance_of_alike(k: int, dtype: np.dtype, precision: str) -> float:
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


def check_rounds(rounds: int) -> None:
    """Raise OptionError for fewer rounds than one, or more than `MOST_ROUNDS`."""
    if not 1 <= rounds <= MOST_ROUNDS:
        raise OptionError(
            f"rounds={rounds}: it must be from 1 to {MOST_ROUNDS} (tilewright.verify-rounds), since each"
            " holds vectors of its own in memory"
        )


def verify_product(
    client: Client,
    a: zarr.Array[Any],
    b: zarr.Array[Any],
    c: zarr.Array[Any],
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    rounds: int = 2,
    precision: str = "full",
    listener: Listener = ignore,
) -> Verification:
    """Check that C (m × n) = op(A) (m × k) op(B) (k × n), all three stored, by tasks on the client's workers.

    Raises
    ------
    ShapeError
        The sides do not match.
    DTypeError
        A factor is of floats and C of integers, or it is complex and C is not.
    OptionError
        ``rounds`` is less than one, or more than `MOST_ROUNDS`; ``precision`` is not known, or not for C's dtype.
    DamagedError
        A chunk cannot be decoded; DamagedProductError where it is C's.
    """
    check_rounds(rounds)
    start = time.perf_counter()
    left, right, result = _Side(a, transpose_a), _Side(b, transpose_b), _Side(c, False)
    (m, k), (k_right, n) = left.shape, right.shape
    if k != k_right or result.shape != (m, n):
        raise ShapeError(
            f"{name_of(c)} is {result.shape[0]} × {result.shape[1]}; op(A) {m} × {k} by op(B) {k_right} × {n}"
            f" can only give {m} × {n} with equal inner sides"
        )
    dtype = c.dtype.newbyteorder("=")
    _check_kinds({"A": a, "B": b}, c)
    check.precision(precision, dtype)
    empty = m * n == 0  # nothing to compare; without k there is: C must be zeros
    probe = _draw_probe(n, dtype, rounds, as_stored_matrix(c).unit[1])
    right_step, left_step = right.step(), max(left.step(), result.step())
    right_rows = [slice(i, min(i + right_step, k)) for i in range(0, k, right_step) if not empty]
    left_rows = [slice(i, min(i + left_step, m)) for i in range(0, m, left_step) if not empty]
    nbytes = 0 if empty else sum(side.array.nbytes for side in (left, right, result))
    listener(WorkPlanned("verify", len(right_rows) + len(left_rows), 0, "panels", nbytes, 0))
    tasks = _Tasks(client, listener)
    image = _project_all(tasks, right, right_rows, probe)
    limits = _limits_of(image, k, dtype, precision, exact=probe.exact)
    outcomes = _compare_all(tasks, left, result, left_rows, image, limits, probe, len(right_rows))
    unchecked = sum(outcome.unchecked for outcome in outcomes)
    conclusive = empty or m * len(image.thin) > unchecked
    worst = max(outcomes, key=lambda outcome: (outcome.largest, -outcome.worst[0]), default=None)
    largest = 0.0 if worst is None else worst.largest
    if probe.exact:
        largest = float(sum(outcome.largest for outcome in outcomes))
    cause = ""
    if precision in INPUT_LARGEST and largest == math.inf:
        cause = _too_large(tasks, {"A": (left, left_rows), "B": (right, right_rows)}, precision)
    seconds = time.perf_counter() - start
    listener(WorkDone("verify", seconds))
    return Verification(
        passed=bool(largest <= limits.relative and conclusive),
        conclusive=conclusive,
        rounds=rounds,
        largest_error=largest,
        tolerance=limits.relative,
        unchecked=unchecked,
        worst=worst.worst if worst is not None and worst.largest > 0 else None,
        seconds=seconds,
        cause=cause,
    )


def find_damaged(
    client: Client, c: zarr.Array[Any], regions: Iterable[tuple[slice, slice]], *, listener: Listener = ignore
) -> list[int]:
    """The places, in ascending order, of those regions of C that have a chunk which cannot be decoded."""
    calls = ((c, region) for region in regions)
    with closing(_Tasks(client, listener).run(_is_damaged, calls, (), 0, "damaged")) as found:
        return sorted(place for place, damaged in found if damaged)


def _is_damaged(c: zarr.Array[Any], region: tuple[slice, slice]) -> bool:
    try:
        for part in region_reads(c, region):
            part.read(np.empty(part.shape, c.dtype.newbyteorder("=")))
    except DamagedError:
        return True
    return False


class _Tasks:
    """How a check's tasks get to the workers, and its listener hears of them."""

    def __init__(self, client: Client, listener: Listener) -> None:
        self._client, self._listener = client, listener
        self._run = f"verify-{time.time_ns():x}"
        self._window = window_of(client)
        self._waiting = on_waiting(listener, "verify", "ends the check and keeps the product")

    def run(
        self,
        function: Callable[..., Result],
        calls: Iterable[tuple[Any, ...]],
        values: tuple[Any, ...],
        nbytes: int,
        name: str,
    ) -> Generator[tuple[int, Result], None, None]:
        """The results of all calls as they come, with their places; ``values``, of ``nbytes``, go along with each."""
        options: dict[str, Any] = {
            "key": f"{self._run}-{name}",
            "window": self._window,
            "waiting": self._waiting,
        }
        if nbytes > SENT_NBYTES:  # long vectors go to each worker once, not along with each task
            return run_sent(self._client, function, calls, values, **options)
        return run_bounded(self._client, function, ((*call, *values) for call in calls), **options)

    def finished(self, index: int, side: _Side, rows: slice) -> None:
        """Tell that these rows have been gone through."""
        nbytes = side.array.nbytes * (rows.stop - rows.start) // max(1, side.shape[0])
        self._listener(UnitDone("verify", index, "", 0.0, nbytes, 0, {}))


@dataclass(frozen=True)
class _Image:
    """What B makes of the probe, and what is measured of B on the way."""

    thin: np.ndarray
    """(groups × rounds) × k: B x of every group and round, one a row as the loops read them."""
    norms: np.ndarray
    """(groups + 1) × k, float64: norms of B's rows by group, with ones as the last, which give the norms of A's rows
    themselves; empty for integers."""
    column_squares: np.ndarray
    """For each group, float64: at least the largest sum of |element|² in one of its columns."""

    @property
    def nbytes(self) -> int:
        return self.thin.nbytes + self.norms.nbytes


def _project_all(tasks: _Tasks, right: _Side, pieces: Sequence[slice], probe: _Probe) -> _Image:
    """B times the probe, its rows in these pieces."""
    k = right.shape[0]
    groups = 0 if probe.exact else probe.group_count
    image = _Image(
        np.zeros((len(probe.vectors) * probe.group_count, k), probe.dtype),
        np.ones((0 if probe.exact else groups + 1, k)),
        np.zeros(groups),
    )
    calls = ((right, rows, True) for rows in pieces)
    with closing(tasks.run(_project, calls, (probe,), probe.vectors.nbytes, "b")) as projections:
        for place, sums in projections:
            image.thin[:, pieces[place]] = sums.thin.T
            image.norms[:groups, pieces[place]] = sums.norms.T
            with np.errstate(all="ignore"):  # NaN and infinity pass through
                np.add(image.column_squares, sums.column_squares, out=image.column_squares)
            tasks.finished(place, right, pieces[place])
    return image


def _limits_of(image: _Image, k: int, dtype: np.dtype, precision: str, *, exact: bool) -> _Limits:
    """What C may deviate by, of this dtype and computed in this precision."""
    norms = image.norms[:-1]
    with np.errstate(all="ignore"):
        group_norms = np.sqrt(np.einsum("gl,gl->g", norms, norms))
    return _Limits(
        0.0 if exact else tolerance(k, dtype, precision),
        0.0 if exact else _tolerance_of_alike(k, dtype, precision),
        INPUT_SUBNORMAL.get(precision, 0.0),
        k,
        dtype,
        np.sqrt(image.column_squares),
        group_norms,
    )


def _compare_all(
    tasks: _Tasks,
    left: _Side,
    result: _Side,
    pieces: Sequence[slice],
    image: _Image,
    limits: _Limits,
    probe: _Probe,
    first: int,
) -> list[_Outcome]:
    """C times the probe beside A times what B makes of it, its rows in these pieces; ``first`` is the place of
    the first of them among all that the listener hears of."""
    calls = ((left, result, rows) for rows in pieces)
    values = image.thin, image.norms, limits, probe
    nbytes = image.nbytes + probe.vectors.nbytes
    found: list[_Outcome] = []
    with closing(tasks.run(_compare, calls, values, nbytes, "a")) as outcomes:
        for place, outcome in outcomes:
            found.append(outcome)
            tasks.finished(first + place, left, pieces[place])
    return found


def _too_large(tasks: _Tasks, factors: dict[str, tuple[_Side, list[slice]]], precision: str) -> str:
    """Which factors, and their rows in pieces, hold numbers that the precision cannot; nothing where none does."""
    causes = []
    for role, (side, pieces) in factors.items():
        with closing(
            tasks.run(_largest, ((side, rows) for rows in pieces), (), 0, f"largest-{role}")
        ) as calls:
            most = max((found for _, found in calls), default=0.0)
        if most > INPUT_LARGEST[precision]:
            causes.append(f"{role}, {name_of(side.array)}, holds {most:.6g}")
    if not causes:
        return ""
    return (
        f"{' and '.join(causes)}, where precision={precision!r} multiplies numbers of at most"
        f" {INPUT_LARGEST[precision]:g}: scale that, or use precision='bf16' or 'tf32'"
    )


def _largest(side: _Side, rows: slice) -> float:
    """The largest absolute value of these rows that is finite; 0 where none is."""
    largest = 0.0
    for _, _, part in side.parts(rows):
        sizes = np.abs(side.load(part, np.dtype(np.float64)), dtype=np.float64)
        largest = max(largest, float(np.max(sizes, where=np.isfinite(sizes), initial=0.0)))
    return largest


def _check_kinds(factors: dict[str, zarr.Array[Any]], c: zarr.Array[Any]) -> None:
    """Raise DTypeError for factors that C's kind cannot hold: they are added up in that kind, so that floats beside
    integers would lose what is behind the point, and a wrong C could pass."""
    for role, factor in factors.items():
        # Integers may be of any width: they are compared modulo C's.
        integers = factor.dtype.kind in "iu" and c.dtype.kind in "iu"
        if not integers and not np.can_cast(factor.dtype, c.dtype, "same_kind"):
            raise DTypeError(
                f"{role}: {name_of(factor)} holds {factor.dtype.name}, and no product of that is {c.dtype.name}, which"
                f" {name_of(c)} holds; check other arrays, or multiply anew"
            )


def _draw_probe(n: int, dtype: np.dtype, rounds: int, step: int) -> _Probe:
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
    return _Probe(vectors, cuts, exact, 8 * dtype.itemsize, config.threads("read-threads"))


@dataclass(frozen=True)
class _Sums:
    """What one part, or all parts, of some rows add up to; without columns where nothing is measured."""

    rows: slice
    thin: np.ndarray
    """rows × count: products with vectors, in the probe's dtype."""
    norms: np.ndarray
    """rows × count, float64: norms of the rows, weighted or by group."""
    columns: slice
    column_squares: np.ndarray
    """float64: |element|² summed over the rows, for each of these columns; of all parts, the largest of each group."""


def _project(side: _Side, rows: slice, measure: bool, probe: _Probe) -> _Sums:
    """Rows of ``side`` times the probe, one column for each group and round.

    measure: for floats, the norms of the rows in each group too, and the largest sum of squares that these rows have
    in a column of each group.
    """
    count, rounds = rows.stop - rows.start, probe.vectors.shape[0]
    groups = probe.group_count if measure and not probe.exact else 0
    ones = np.ones((min(groups, 1), side.shape[1]))

    def project(place: slice, columns: slice, part: RegionRead) -> _Sums:
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
        return _Sums(
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
    side: _Side,
    rows: slice,
    multiply: Callable[[slice, slice, RegionRead], _Sums],
    shape: tuple[int, int],
    norm_count: int,
    column_squares: np.ndarray,
    probe: _Probe,
) -> _Sums:
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
    return _Sums(rows, thin, norms, slice(0, len(column_squares)), column_squares)


@dataclass(frozen=True)
class _Limits:
    """What a right product may deviate by."""

    relative: float
    """`tolerance` of the product."""
    alike: float
    """`_tolerance_of_alike` of the product."""
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
class _Outcome:
    largest: float
    worst: tuple[int, int, int]
    unchecked: int


def _compare(
    left: _Side,
    result: _Side,
    rows: slice,
    vectors: np.ndarray,
    weights: np.ndarray,
    limits: _Limits,
    probe: _Probe,
) -> _Outcome:
    """The largest deviation between rows of C x and A (B x).

    vectors: B x of every group and round, one a row of length k. weights: norms of B's rows, one group a row, and a
    row of ones; none for integers.
    """
    count, rounds = rows.stop - rows.start, probe.vectors.shape[0]
    unmeasured = slice(0, 0), np.zeros(0)

    def multiply(place: slice, inner: slice, part: RegionRead) -> _Sums:
        block = left.load(part, probe.dtype)
        thin = np.zeros((block.shape[0], vectors.shape[0]), probe.dtype)
        norms = np.zeros((block.shape[0], weights.shape[0]))
        add_thin_product(
            block, vectors[:, inner].copy(), thin, weights[:, inner].copy(), norms, unmeasured[1]
        )
        return _Sums(place, thin, norms, *unmeasured)

    sums = _gather(left, rows, multiply, (count, vectors.shape[0]), weights.shape[0], unmeasured[1], probe)
    try:
        product = _project(result, rows, True, probe)
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
    return _Outcome(
        largest,
        (rows.start + int(place_row), probe.cuts[int(place_group)], probe.cuts[int(place_group) + 1]),
        unchecked,
    )


def _relative_errors(
    found: np.ndarray,
    expected: np.ndarray,
    norms: np.ndarray,
    product_norms: np.ndarray,
    limits: _Limits,
    probe: _Probe,
) -> tuple[np.ndarray, int]:
    """Deviations in units of their scale, rows × groups × rounds, and how many could not be compared.

    found, expected: rows × (groups × rounds), float64 or complex128. norms: rows × (groups + 1), float64: the scale
    sqrt(sum over l and j of |a_il b_lj|²) of each group, and the norm of A's row. product_norms: rows × groups,
    float64: of C's own elements.

    Where factors are alike the norm of C's elements is the scale, for `_tolerance_of_alike` of it; elsewhere that is no
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


def _underflow(row_norms: np.ndarray, widths: np.ndarray, limits: _Limits) -> np.ndarray:
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


def _can_overflow(
    units: np.ndarray, row_norms: np.ndarray, widths: np.ndarray, limits: _Limits
) -> np.ndarray:
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
