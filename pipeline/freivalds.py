"""Check a stored product against its factors without computing it again: Freivalds' test, by groups of columns.

C = op(A) op(B) implies C x = A (B x) for every vector x, and costs two thin products instead of a full one (Freivalds,
"Probabilistic machines can use less running time", 1977). Each round draws one x of signs and cuts it into groups of
C's columns, so that a fault stands out from fewer rounding errors and is located.

Integers are compared exactly, modulo 2^bits as they were computed, with several vectors a round. One of them holds odd
numbers only, so a single wrong element never escapes; faults that cancel each other escape a vector with a probability
of at most 1/2 (differences of exactly half the modulus; far less for any other). Floating point is summed in float64
and compared with a tolerance from k and the dtype, at the scale sqrt(sum over l and j of |a_il b_lj|^2): what rounding
errors of independent signs add up to. Added to that is what underflow loses, in units of the smallest subnormal number:
no kernel flushes subnormal numbers to zero (Numba compiles without fast mathematics; the tensor cores keep them: Fasi,
Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7, 2021). What is not
finite in C is wrong unless a factor of it is not finite either, or its partial sums could overflow: |a_i| |b_j| bounds
them all (Cauchy-Schwarz).

Where NaN or infinity in a factor decides what C holds (`SpecialLines`), every element is checked by itself; such
columns of op(B) are left out of the sums, so that all other columns are compared.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from distributed import get_worker

from tilewright.kernels.gemm.base import compute_dtype
from tilewright.kernels.host_loops import usable_cores
from tilewright.kernels.launch import ceil_div
from tilewright.kernels.thin import WIDE_DTYPES, add_thin_product, widen
from tilewright.kernels.tolerance import OPERAND_ROUNDOFF, OPERAND_UNDERFLOW, unit_roundoff
from tilewright.pipeline import config
from tilewright.pipeline.errors import DamagedError, DamagedProductError
from tilewright.pipeline.giving_up import read_while
from tilewright.pipeline.reduce import end_if_given_up
from tilewright.pipeline.region_read import READ_NBYTES, RegionRead, region_reads
from tilewright.pipeline.store import as_stored_matrix, is_local
from tilewright.pipeline.terms import StoredMatrix

TASK_NBYTES = 256 * 2**20
"""About how many bytes of a matrix one task of the check reads, in whole chunks."""

IMAGE_NBYTES = 256 * 2**20
"""The most that B times the probe, which every worker holds whole, may take: where k is long there are fewer groups."""

PARTS_SHARE = 1 / 8
"""The share of a worker's memory for the parts that its tasks process at once, unless one of each takes more."""

ROWS_NBYTES = 256 * 2**20
"""The most that the results of the tasks which a worker runs at once may take, all copies included."""

LINE_COPIES = 8
"""Copies of a row's results that are in memory at once: found, expected, and what they are compared by."""

BATCH_ELEMENTS = 2**20
"""Elements that are checked together for NaN and infinity."""

AHEAD = 2
"""Parts for each thread that are under way, or done and not added up yet."""

MOST_GROUPS = 4
"""Groups of columns that a fault is located by: each costs one more vector in each round."""

INTEGER_VECTORS = 4
"""Vectors of each round for integers: what hides in one shows in another."""

DEVIATIONS = 6
"""Standard deviations allowed for errors of random signs: less than 1 sum in 10^7 exceeds them (Hoeffding)."""

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
        """The parts of these rows: their rows, counted from the first of these, their columns, and how to read them."""
        columns = slice(0, self.shape[1])
        region = (columns, rows) if self.transpose else (rows, columns)
        reads = region_reads(self.array, region, in_loops=True)
        order = (1, 0) if self.transpose else (0, 1)
        return [(read.target[order[0]], read.target[order[1]], read) for read in reads]

    def load(self, part: RegionRead, wide: np.dtype, compute: np.dtype) -> np.ndarray:
        """A part, rounded as in the product, which is formed in ``compute``, and widened to ``wide``, in which it is
        summed."""
        block = np.empty(part.shape, self.array.dtype.newbyteorder("="))
        part.read(block)
        narrow = compute if block.dtype.kind == "c" else np.zeros(0, compute).real.dtype
        if block.dtype.kind in "fc" and block.itemsize > narrow.itemsize:
            with np.errstate(over="ignore"):  # to infinity
                block = block.astype(narrow)
        return widen(block.T if self.transpose else block, wide)

    def step(self, line_nbytes: int, tasks: int) -> int:
        """Rows of a task, each of which makes results of ``line_nbytes``, where a worker runs so many tasks at once."""
        return task_rows(as_stored_matrix(self.array, transpose=self.transpose), line_nbytes, tasks)


def task_rows(matrix: StoredMatrix, line_nbytes: int, tasks: int) -> int:
    """Rows of a task: whole chunks, about ``TASK_NBYTES`` of them, but no more rows than ``ROWS_NBYTES`` allows for
    results of ``line_nbytes`` each of so many tasks."""
    strip = matrix.unit[0] * max(1, matrix.columns) * matrix.dtype.itemsize
    most = max(1, ROWS_NBYTES // (tasks * LINE_COPIES * line_nbytes))
    if most < matrix.unit[0]:
        return most
    return matrix.unit[0] * max(1, min(TASK_NBYTES // strip, most // matrix.unit[0]))


@dataclass(frozen=True)
class SpecialLines:
    """Which lines of a matrix, rows of op(A) or columns of op(B), hold NaN, and which hold infinity.

    Such a line decides what C holds in that row or column: with a NaN all of it is NaN, whatever the other factor
    holds; with an infinity nothing of it is a number.
    """

    nan: np.ndarray
    """bool, one for each line."""
    infinite: np.ndarray
    """bool, one for each line, whether or not it also holds NaN."""

    @classmethod
    def none(cls, count: int) -> SpecialLines:
        return cls(np.zeros(count, bool), np.zeros(count, bool))

    @property
    def either(self) -> np.ndarray:
        return self.nan | self.infinite

    @property
    def any(self) -> bool:
        return bool(self.either.any())

    def part(self, lines: slice) -> SpecialLines:
        return SpecialLines(self.nan[lines], self.infinite[lines])

    def add(self, lines: slice, more: SpecialLines | None) -> None:
        """Add those of ``more``, which is about these lines; None has none."""
        if more is not None:
            self.nan[lines] |= more.nan
            self.infinite[lines] |= more.infinite


def special_lines(block: np.ndarray, suspected: np.ndarray) -> SpecialLines | None:
    """Those rows of a block that hold NaN or infinity, among the suspected ones (bool); None where none does."""
    found = SpecialLines.none(len(block))
    for rows in _batches(np.flatnonzero(suspected), block.shape[1]):
        found.nan[rows] = np.isnan(block[rows]).any(axis=1)
        found.infinite[rows] = np.isinf(block[rows]).any(axis=1)
    return found if found.any else None


def _has_numbers(block: np.ndarray, rows: SpecialLines, columns: SpecialLines | None) -> np.ndarray:
    """For each row of a part of C, whether it holds a number where NaN or infinity in these rows and columns leaves
    none; bool."""
    wrong = np.zeros(len(block), bool)
    for lines in _batches(np.flatnonzero(rows.nan), block.shape[1]):
        wrong[lines] |= ~np.isnan(block[lines]).all(axis=1)
    for lines in _batches(np.flatnonzero(rows.infinite & ~rows.nan), block.shape[1]):
        wrong[lines] |= np.isfinite(block[lines]).any(axis=1)
    if columns is not None:
        for lines in _batches(np.flatnonzero(columns.nan), len(block)):
            wrong |= ~np.isnan(block[:, lines]).all(axis=1)
        for lines in _batches(np.flatnonzero(columns.infinite & ~columns.nan), len(block)):
            wrong |= np.isfinite(block[:, lines]).any(axis=1)
    return wrong


def _batches(lines: np.ndarray, length: int) -> Iterator[np.ndarray]:
    """Indices of lines, at a time so few that copying them out of a block takes little memory beside it."""
    step = max(1, BATCH_ELEMENTS // max(1, length))
    for first in range(0, len(lines), step):
        yield lines[first : first + step]


@dataclass(frozen=True)
class Probe:
    """The vectors of all rounds, one a row of length n, and where the groups of columns are cut."""

    vectors: np.ndarray
    """int8, whatever they are multiplied by: where C's rows are long they are much of what is sent."""
    dtype: np.dtype
    """What sums are formed in."""
    cuts: tuple[int, ...]
    exact: bool
    bits: int
    """Bits of C's elements: integers are compared modulo 2^bits."""
    compute: np.dtype
    """What C's elements are formed in."""
    threads: int
    left_out: SpecialLines | None = None
    """Columns of op(B), and of C, that count as zeros, since they hold NaN or infinity."""

    def inside(self, columns: slice) -> Iterator[tuple[int, slice, slice]]:
        """The groups that share columns with these: each group's number, and the shared columns counted from the first
        of these and from the first of all."""
        for group, (start, stop) in enumerate(self.groups()):
            first, last = max(start, columns.start), min(stop, columns.stop)
            if first < last:
                yield group, slice(first - columns.start, last - columns.start), slice(first, last)

    def groups(self) -> Iterable[tuple[int, int]]:
        """First and last + 1 column of every group."""
        return zip(self.cuts, self.cuts[1:], strict=False)

    @property
    def group_count(self) -> int:
        return len(self.cuts) - 1

    @property
    def line_nbytes(self) -> int:
        """Results of a row of op(A), or of op(B): its products with the vectors of every group, and its norms."""
        return line_nbytes(len(self.vectors), self.group_count, self.dtype)


def relative_tolerance(k: int, dtype: np.dtype, precision: str) -> float:
    """What a sum may deviate by, in units of its scale, when nothing is wrong.

    `tilewright.kernels.tolerance.tolerance` is what one element may deviate by in the worst case, relative to sums of
    absolute values; here sums over many elements are compared, whose scale is a root of squares.

    A sum of k terms rounded one after another errs by about eps k / 3 of sqrt(sum |ab|^2) when all terms have one sign,
    the worst case unless they are alike, and eps sqrt(k / 6) when signs are mixed; 2 eps k is six standard deviations
    of the first. The last rounding, to C's own dtype, adds eps sqrt(k); rounded operands add their own error, times the
    same six.
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
    error = 4 * unit_roundoff(compute_dtype(dtype)) * max(k, 4) + 4 * unit_roundoff(dtype) * last
    return error + 6 * OPERAND_ROUNDOFF[precision]


def line_nbytes(vectors: int, groups: int, wide: np.dtype) -> int:
    return groups * vectors * wide.itemsize + 8 * (groups + 1)


def vector_count(rounds: int, dtype: np.dtype) -> int:
    """How many vectors there are in each group for a C of this dtype."""
    return rounds * INTEGER_VECTORS if dtype.kind in "iu" else rounds


def group_width(n: int, k: int, dtype: np.dtype, rounds: int, step: int) -> int:
    """Columns of a group: whole chunks of ``step`` columns, in as many groups as there may be."""
    one = line_nbytes(vector_count(rounds, dtype), 1, WIDE_DTYPES[dtype.kind])
    groups = max(1, min(MOST_GROUPS, IMAGE_NBYTES // (one * max(1, k))))
    return step * ceil_div(ceil_div(n, step), groups) if n else 1


def draw_probe(n: int, k: int, dtype: np.dtype, rounds: int, step: int) -> Probe:
    """Fresh vectors from the system's entropy: a fixed seed could be met by a fixed fault."""
    generator = np.random.default_rng()
    exact = dtype.kind in "iu"
    shape = vector_count(rounds, dtype), n
    if exact:
        vectors = generator.integers(0, 64, shape, np.int8)
        vectors[0] |= 1
    else:
        vectors = generator.integers(0, 2, shape, np.int8) * np.int8(2) - np.int8(1)
    cuts = (*range(0, n, group_width(n, k, dtype, rounds, step)), n) if n else (0,)
    return Probe(
        vectors,
        WIDE_DTYPES[dtype.kind],
        cuts,
        exact,
        8 * dtype.itemsize,
        compute_dtype(dtype),
        config.threads("read-threads"),
    )


def check_nbytes(
    a: StoredMatrix,
    b: StoredMatrix,
    c: StoredMatrix,
    rounds: int,
    threads: int,
    host_nbytes: int | None,
    tasks: int = 1,
) -> int:
    """The most that a worker holds while C is checked: B times the probe, the probe, and for each of the tasks that it
    runs at once its results and the parts that so many threads process, where the worker has ``host_nbytes``."""
    dtype, wide = c.dtype, WIDE_DTYPES[c.dtype.kind]
    vectors = vector_count(rounds, dtype)
    groups = ceil_div(c.columns, group_width(c.columns, b.rows, dtype, rounds, c.unit[1]))
    line = line_nbytes(vectors, groups, wide)
    shared = b.rows * line + c.columns * (vectors + 2 * wide.itemsize)
    longest = max(a.rows, b.rows)
    rows = min(longest, max(task_rows(matrix, line, tasks) for matrix in (a, b, c)))
    tasks = min(tasks, max(1, ceil_div(longest, max(1, rows))))
    largest = max(part_nbytes(matrix, rows, line, compute_dtype(dtype)) for matrix in (a, b, c))
    room = largest if host_nbytes is None else max(largest, _parts_nbytes(host_nbytes, tasks))
    return shared + tasks * (rows * line * LINE_COPIES + min(threads * largest, room))


def _parts_nbytes(host_nbytes: int, tasks: int) -> int:
    """What the parts that one task processes at once may take in a worker that runs so many tasks at once."""
    return int(host_nbytes * PARTS_SHARE) // tasks


def part_nbytes(matrix: StoredMatrix, rows: int, line_nbytes: int, compute: np.dtype) -> int:
    """The most that one part of a matrix takes while it is processed: as stored, as decoded and as the loops take it,
    and its results, which are added up after those of the parts before it."""
    rows, columns = min(matrix.unit[0], rows, matrix.rows), min(matrix.unit[1], matrix.columns)
    dtype = matrix.dtype
    if matrix.plain:
        rows = min(rows, ceil_div(READ_NBYTES, max(1, columns * dtype.itemsize)))
    widened = 2 if dtype == np.float16 else int(dtype == np.uint64 or dtype.itemsize > compute.itemsize)
    copies = 1 + (not matrix.plain) + widened
    return copies * rows * columns * dtype.itemsize + (AHEAD * rows + columns) * line_nbytes


@dataclass(frozen=True)
class Sums:
    """Some rows of B, or of C, times the probe, and what is measured of them on the way."""

    thin: np.ndarray
    """rows × (groups × rounds): products with the probe, in its dtype."""
    norms: np.ndarray
    """rows × groups, float64: norms of the rows; without columns for integers."""
    column_squares: np.ndarray
    """For each group, float64: the largest sum of |element|² over these rows in one of its columns; empty for integers.
    """
    special: SpecialLines | None
    """Columns that hold NaN or infinity and that the probe does not leave out, if any."""
    strays: np.ndarray
    """rows × groups, bool: where there is a number though there must be none."""


@dataclass(frozen=True)
class _Part:
    """The same of one part of the rows; of a part of A, its product with B x, and ``special`` is about rows."""

    rows: slice
    thin: np.ndarray
    norms: np.ndarray
    columns: slice
    """Those that ``column_squares`` are of."""
    column_squares: np.ndarray
    special: SpecialLines | None
    strays: np.ndarray | None


def project(side: Side, rows: slice, probe: Probe, special_rows: SpecialLines | None = None) -> Sums:
    """Rows of ``side`` times the probe, one column for each group and round, without the columns that it leaves out.

    special_rows: given if the side is C: those of these rows which, like the columns left out, must not hold any
    number, and are checked for it.
    """
    count, rounds = rows.stop - rows.start, probe.vectors.shape[0]
    groups = 0 if probe.exact else probe.group_count
    ones = np.ones((min(groups, 1), side.shape[1]))

    def project_part(place: slice, columns: slice, part: RegionRead) -> _Part:
        block = side.load(part, probe.dtype, probe.compute)
        left_out = probe.left_out.part(columns) if probe.left_out is not None else None
        strays = None
        if special_rows is not None:
            must_not = special_rows.part(place)
            strays = np.zeros((block.shape[0], probe.group_count), bool)
            for group, inside, _ in probe.inside(columns):
                strays[:, group] = _has_numbers(
                    block[:, inside], must_not, left_out and left_out.part(inside)
                )
        if left_out is not None:
            block[:, left_out.either] = 0
        thin = np.zeros((probe.group_count, block.shape[0], rounds), probe.dtype)
        norms = np.zeros((probe.group_count, block.shape[0], len(ones)))
        squares = np.zeros(block.shape[1] if groups else 0)
        for group, inside, whole in probe.inside(columns):
            add_thin_product(
                block[:, inside],
                probe.vectors[:, whole].astype(probe.dtype),
                thin[group],
                ones[:, whole],
                norms[group],
                squares[inside],
            )
        return _Part(
            place,
            thin.transpose(1, 0, 2).reshape(block.shape[0], -1),
            norms[..., 0].T if groups else np.zeros((block.shape[0], 0)),
            columns if groups else slice(0, 0),
            squares,
            special_lines(block.T, ~np.isfinite(squares)) if groups and special_rows is None else None,
            strays,
        )

    thin, norms = np.zeros((count, probe.group_count * rounds), probe.dtype), np.zeros((count, groups))
    squares = np.zeros(side.shape[1] if groups else 0)
    special = SpecialLines.none(side.shape[1])
    strays = np.zeros((count, probe.group_count), bool)
    for part in _each_part(side, rows, project_part, probe):
        with np.errstate(all="ignore"):  # NaN and infinity pass through
            thin[part.rows] += part.thin
            norms[part.rows] = np.hypot(norms[part.rows], part.norms)
            squares[part.columns] += part.column_squares
        special.add(part.columns, part.special)
        if part.strays is not None:
            strays[part.rows] |= part.strays
    # One number a group goes back to the client, not one a column. The largest sum over all tasks is at most the sum of
    # each task's largest.
    largest = [squares[start:stop].max(initial=0.0) for start, stop in probe.groups()] if groups else []
    return Sums(thin, norms, np.array(largest), special if special.any else None, strays)


def _each_part(
    side: Side, rows: slice, work: Callable[[slice, slice, RegionRead], _Part], probe: Probe
) -> Iterator[_Part]:
    """The results of ``work`` for all parts of some rows, on many threads, in the order of the parts; no more are begun
    than memory holds, or than are soon asked for."""
    parts = side.parts(rows)
    threads = _threads_for(side, rows, probe)
    check = end_if_given_up()
    with ThreadPoolExecutor(threads, "tilewright-verify", initializer=read_while, initargs=(check,)) as pool:
        coming: deque[Future[_Part]] = deque()
        try:
            for part in parts:
                if len(coming) == AHEAD * threads:
                    yield coming.popleft().result()
                coming.append(pool.submit(work, *part))
            while coming:
                yield coming.popleft().result()
        finally:
            for future in coming:
                future.cancel()


def _threads_for(side: Side, rows: slice, probe: Probe) -> int:
    """How many threads process these rows: for local files no more than there are cores."""
    threads = min(probe.threads, usable_cores()) if is_local(side.array) else probe.threads
    worker = get_worker()
    limit = worker.memory_manager.memory_limit
    if not limit:
        return threads
    matrix = as_stored_matrix(side.array, transpose=side.transpose)
    one = part_nbytes(matrix, rows.stop - rows.start, probe.line_nbytes, probe.compute)
    return max(1, min(threads, _parts_nbytes(limit, worker.state.nthreads) // max(1, one)))


@dataclass(frozen=True)
class Tolerances:
    """What a right product may deviate by."""

    relative: float
    """`relative_tolerance` of the product."""
    alike: float
    """`tolerance_of_alike` of the product."""
    precision: str
    k: int
    dtype: np.dtype
    """C's."""
    column_norms: np.ndarray
    """For each group of B's columns, an upper bound of the norm of any one; float64."""
    group_norms: np.ndarray
    """For each group of B's columns, the norm of all its elements; float64, infinite where squares overflow."""


@dataclass(frozen=True)
class Outcome:
    largest: float
    worst: tuple[int, int, int]
    unchecked: int
    strays: bool
    """Whether there are numbers where there must be none."""


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

    vectors: B x of every group and round, one a row of length k. weights: norms of B's rows, one group a row, and a
    row of ones; none for integers.
    """
    count, rounds = rows.stop - rows.start, probe.vectors.shape[0]

    def multiply(place: slice, inner: slice, part: RegionRead) -> _Part:
        block = left.load(part, probe.dtype, probe.compute)
        thin = np.zeros((block.shape[0], vectors.shape[0]), probe.dtype)
        norms = np.zeros((block.shape[0], weights.shape[0]))
        add_thin_product(block, vectors[:, inner].copy(), thin, weights[:, inner].copy(), norms, np.zeros(0))
        special = None if probe.exact else special_lines(block, ~np.isfinite(norms[:, -1]))
        return _Part(place, thin, norms, slice(0, 0), np.zeros(0), special, None)

    expected, norms = np.zeros((count, len(vectors)), probe.dtype), np.zeros((count, len(weights)))
    special = SpecialLines.none(count)
    for part in _each_part(left, rows, multiply, probe):
        with np.errstate(all="ignore"):  # NaN and infinity pass through
            expected[part.rows] += part.thin
            norms[part.rows] = np.hypot(norms[part.rows], part.norms)
        special.add(part.rows, part.special)
    try:
        product = project(result, rows, probe, special if special.any or probe.left_out is not None else None)
    except DamagedError as error:
        raise DamagedProductError(str(error)) from error
    found, strays = product.thin, product.strays
    if probe.exact:
        # Everything was summed modulo 2^64; C itself is known modulo 2^bits.
        shift = np.int64(64 - probe.bits)
        errors = (
            (((found - expected) << shift) != 0).reshape(count, probe.group_count, rounds).astype(np.float64)
        )
        unchecked = 0
    else:
        with np.errstate(all="ignore"):  # NaN and infinity pass through and are counted
            errors, skipped = _relative_errors(found, expected, norms, product.norms, allowed, probe)
        errors[strays] = np.inf
        unchecked = _unchecked(np.any(skipped, axis=2), special, probe)
    place_row, place_group, _ = (
        np.unravel_index(int(np.argmax(errors)), errors.shape) if errors.size else (0, 0, 0)
    )
    largest = float(errors.sum() if probe.exact else errors.max(initial=0.0))
    return Outcome(
        largest,
        (rows.start + int(place_row), probe.cuts[int(place_group)], probe.cuts[int(place_group) + 1]),
        unchecked,
        bool(strays.any()),
    )


def _unchecked(skipped: np.ndarray, special: SpecialLines, probe: Probe) -> int:
    """Elements of some rows of C whose values were not compared.

    skipped: rows × groups, bool, whose sums were not compared. special: which of these rows hold NaN or infinity. Where
    there must be NaN that was checked, so it counts as compared.
    """
    left_out = probe.left_out or SpecialLines.none(probe.cuts[-1])
    known, infinite = left_out.nan.sum(), (left_out.infinite & ~left_out.nan).sum()
    widths = np.array([(~left_out.either[start:stop]).sum() for start, stop in probe.groups()], np.int64)
    usual = ~special.either
    in_usual = usual.sum() * infinite + (skipped[usual] @ widths).sum()
    in_infinite = (special.infinite & ~special.nan).sum() * (probe.cuts[-1] - known)
    return int(in_usual + in_infinite)


def _relative_errors(
    found: np.ndarray,
    expected: np.ndarray,
    norms: np.ndarray,
    product_norms: np.ndarray,
    allowed: Tolerances,
    probe: Probe,
) -> tuple[np.ndarray, np.ndarray]:
    """Deviations in units of their scale, rows × groups × rounds, and which of them could not be compared (bool).

    found, expected: rows × (groups × rounds), float64 or complex128. norms: rows × (groups + 1), float64: the scale
    sqrt(sum over l and j of |a_il b_lj|²) of each group, and the norm of A's row. product_norms: rows × groups,
    float64: of C's own elements.

    Where factors are alike the norm of C's elements sets the scale, with `tolerance_of_alike`; elsewhere that is no
    larger than the usual one.

    A sum cannot be compared where the row of A holds NaN or infinity, or C's dtype may rightly have overflowed.
    """
    shape = (found.shape[0], probe.group_count, probe.vectors.shape[0])
    found, expected = found.reshape(shape), expected.reshape(shape)
    units, row_norms = norms[:, :-1, np.newaxis], norms[:, -1:, np.newaxis]
    widths = np.diff(probe.cuts)[:, np.newaxis]
    alike = allowed.alike / allowed.relative * product_norms[:, :, np.newaxis]
    scale = np.where(np.isfinite(alike), np.maximum(units, alike), units)
    deviation = np.abs(found - expected)
    # Where all factors are zero there is nothing that could underflow.
    underflow = np.where((units == 0) & (expected == 0), 0.0, _underflow(row_norms, widths, allowed))
    errors = np.where(deviation == 0, 0.0, deviation / (scale + underflow / allowed.relative))
    overflow = ~np.isfinite(found) & _can_overflow(units, row_norms, widths, allowed)
    skip = np.broadcast_to(~np.isfinite(units), shape) | ~np.isfinite(expected) | overflow
    # What is not finite here although its factors are is an infinite error, not something to skip.
    errors = np.where(np.isnan(errors), np.inf, errors)
    return np.where(skip, 0.0, errors), skip


def _underflow(row_norms: np.ndarray, widths: np.ndarray, allowed: Tolerances) -> np.ndarray:
    """What rounding to subnormal numbers can make a sum deviate by: rows × groups × 1, absolute.

    row_norms: rows × 1 × 1, of A. widths: groups × 1, in columns.

    An element errs by half the smallest number, in each of its products and when it is rounded to C's dtype: at worst
    all one way, but the probe gives elements random signs. So it does to an operand's errors, times the other operand.
    """
    compute = compute_dtype(allowed.dtype)
    products = allowed.k * (COMPLEX_PRODUCTS if allowed.dtype.kind == "c" else 1)
    smallest = [float(np.finfo(dtype).smallest_subnormal) for dtype in (compute, allowed.dtype)]
    elements = np.sqrt(widths) * (products * smallest[0] + 2 * smallest[1])
    lost = OPERAND_UNDERFLOW[allowed.precision]
    operands = 0.0
    if lost:  # else an infinite norm would make a NaN of it
        operands = lost * (allowed.group_norms[:, np.newaxis] + np.sqrt(widths) * row_norms)
    return DEVIATIONS * (elements / 2 + operands)


def _can_overflow(
    units: np.ndarray, row_norms: np.ndarray, widths: np.ndarray, allowed: Tolerances
) -> np.ndarray:
    """Whether a partial sum of an element may be too large for C's dtype, rows × groups × 1.

    units: rows × groups × 1, the scales. row_norms: rows × 1 × 1, of A. widths: groups × 1, in columns.

    sum over l of |a_il b_lj| is at most |a_i| |b_j|, and at most sqrt(k) times the norm of these products. Either bound
    may itself overflow, or meet a NaN that the other does not.
    """
    bound = np.fmin(row_norms * allowed.column_norms[:, np.newaxis], units * math.sqrt(allowed.k))
    growth = 1 + allowed.k * float(np.finfo(compute_dtype(allowed.dtype)).eps)  # by rounding on the way
    # Complex: the sums of both parts at once in a scheme of three products.
    margin = OVERFLOW_MARGIN * growth * (2 if allowed.dtype.kind == "c" else 1)
    # The check itself adds up elements of a group in float64.
    largest = np.minimum(np.finfo(allowed.dtype).max, np.finfo(np.float64).max / widths)
    return bound * margin > largest
