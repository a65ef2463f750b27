"""The check of a C whose elements are formed of the pairs of numbers that are both there: rows of C, drawn at random,
computed anew in double precision.

Such elements are quotients of sums that are not stored, so that no product of C with a vector tells whether they are
right, as it does of a plain product. So one row of each row of tiles is drawn anew for every check, and of C at least
`LEAST_ROWS` rows as evenly; each is compared over all of C's columns. An error that reaches every row of a tile, as a
panel that was left out does, is always seen. One in a single row is seen where that row is drawn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from tilewright.kernels.numbers import ceil_div, counted, round_up
from tilewright.kernels.tolerance import tolerance, unit_roundoff
from tilewright.pipeline.check.verify import ClientTasks, Sample, Verification, stretches
from tilewright.pipeline.cluster.watch import threads_of
from tilewright.pipeline.errors import DamagedError, DamagedProductError
from tilewright.pipeline.events import (
    Caution,
    Listener,
    UnitDone,
    WorkDone,
    WorkPlanned,
    log_notices,
    on_waiting,
)
from tilewright.pipeline.plan.band import Band
from tilewright.pipeline.plan.inputs import StoredMatrix
from tilewright.pipeline.plan.pairs import (
    CONSTANT_MARGIN,
    COUNT,
    LEFT,
    LEFT_SQUARES,
    PRODUCT,
    RIGHT,
    RIGHT_SQUARES,
    Forms,
    Pairwise,
    combined,
    unit_of,
)
from tilewright.pipeline.plan.transform import Fused, Transform, transformed
from tilewright.pipeline.reduce import end_if_given_up
from tilewright.pipeline.store.arrays import as_stored_matrix
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.region_read import read_region
from tilewright.pipeline.store.waiting import reading_while

if TYPE_CHECKING:
    from distributed import Client

LEAST_ROWS = 32
"""Rows of C that are computed anew, unless it has fewer, or `LINES_NBYTES` holds no more."""

LINES_NBYTES = 256 * 2**20
"""The most that the rows of op(A) may take that are multiplied: every worker holds them."""

SUMS_NBYTES = 64 * 2**20
"""The most that the sums over a task's columns take."""

READ_NBYTES = 32 * 2**20
"""The most of B that a task has read and not multiplied yet."""

BLOCK_NBYTES = 8 * 2**20
"""About what a block of B takes in double precision, of which each form is made in turn."""

COMPARED_COPIES = 16
"""Arrays of the size of one of the sums that comparing them makes."""

MOST_WRONG = 2.0**-10
"""The share of the product of two variables' deviations over their pairs that their covariance may be wrong by without
a word: 0.1 %, as with means that are far from 0."""

CONSTANT_SHARE = 2.0**-46
"""What varies by no more than this share of its squares over some pairs is constant there for `MOST_WRONG`: sums in
double precision do not tell."""

OF_VALUES: tuple[Forms, ...] = (PRODUCT, LEFT, RIGHT, LEFT_SQUARES, RIGHT_SQUARES)
"""What is summed of numbers as double precision shifts them, for `MOST_WRONG`."""

PROPAGATION = 3
"""Where sums deviate by e times the norms of the two lines that are multiplied, the sum of the products of what their
numbers deviate from their means, over any pairs, does by three times that at most: once for the sum of products, and
once for each of the two sums of numbers."""


def check_pairs_nbytes(a: StoredMatrix, b: StoredMatrix, c: StoredMatrix, fused: Fused, tasks: int) -> int:
    """The most that a worker holds while it runs so many tasks of the check at once."""
    lines = min(LINES_NBYTES, LEAST_ROWS * max(1, a.columns) * a.dtype.itemsize)
    columns = min(max(1, b.columns), _task_columns(b, LEAST_ROWS, len(fused.forms), 1))
    # Of each element: its sums, and what they are compared by.
    compared = LEAST_ROWS * columns * 8 * (len(fused.forms) + len(OF_VALUES) + COMPARED_COPIES)
    chunk = 2 * max(a.unit_nbytes, b.unit_nbytes, c.unit_nbytes)
    return lines + 2 * fused.nbytes + tasks * (compared + READ_NBYTES + 9 * BLOCK_NBYTES + chunk)


def drawn_rows(m: int, starts: Sequence[int], most: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of C: one of each stretch between two of ``starts``, these cut evenly where they are fewer than
    `LEAST_ROWS`; at most ``most``, of which none is more likely than another in its stretch.

    >>> drawn_rows(4, [0, 2, 4], 100, np.random.default_rng(0)).tolist()
    [0, 1, 2, 3]
    """
    cuts = [*starts[:-1]] if len(starts) > 1 else [0]
    each = ceil_div(LEAST_ROWS, max(1, len(cuts)))
    fine = []
    for start, stop in zip(cuts, [*cuts[1:], m], strict=True):
        parts = min(each, stop - start)
        edges = [start + (stop - start) * part // parts for part in range(parts + 1)] if parts else []
        fine += list(pairwise(edges))
    if len(fine) > most:
        fine = [fine[place] for place in sorted(rng.choice(len(fine), most, replace=False))]
    return np.array([rng.integers(start, stop) for start, stop in fine], np.int64)


def verify_pairs(
    client: Client,
    a: StoredArray,
    b: StoredArray,
    c: zarr.Array[Any],
    fused: Fused,
    sums: np.dtype,
    *,
    transposed: tuple[bool, bool],
    precision: str = "full",
    cuts: tuple[Sequence[int], Sequence[int]],
    depth: int,
    listener: Listener = log_notices,
    seed: int | None = None,
    band: Band | None = None,
    counts: zarr.Array[Any] | None = None,
) -> Verification:
    """Check C (m × n), of op(A) (m × k) and op(B) (k × n), all three stored, by tasks on the client's workers.

    fused: with ``pairwise``. sums: what is summed in. cuts: where rows, and columns, of tiles begin, and where the last
    one ends. depth: of the panels that tiles are summed from. seed: of the rows that are drawn; None: another one each
    time. band: what alone of C was wanted; what lies outside, where it is stored, must be 0. counts: the numbers of
    pairs, where these are stored: they must be exact.

    Raises DamagedError where a chunk cannot be decoded; DamagedProductError where it is C's.
    """
    start = time.perf_counter()
    made = fused.pairwise
    assert made is not None, "what this is the check of"
    left = as_stored_matrix(a, transpose=transposed[0])
    right = as_stored_matrix(b, transpose=transposed[1])
    m, k, n = left.rows, left.columns, right.columns
    most = max(1, LINES_NBYTES // max(1, k * left.dtype.itemsize))
    if band is not None:  # rows that have nothing in it are not drawn
        m = min(m, n + band.before)
        cuts = [*(start for start in cuts[0] if start < m), m], cuts[1]
    rows = drawn_rows(m, cuts[0], most, np.random.default_rng(seed)) if m and n else np.zeros(0, np.int64)
    waiting = on_waiting(listener, "verify", "ends the check and keeps the product")
    at_once = max(threads_of(client, waiting=waiting).values())
    tasks = ClientTasks(client, listener)
    parts = stretches(k, _depth(left, len(rows))) if len(rows) else []
    columns = stretches(n, _task_columns(right, len(rows), len(fused.forms), at_once)) if len(rows) else []
    nbytes = left.nbytes + right.nbytes if len(rows) else 0
    listener(WorkPlanned("verify", len(parts) + len(columns), 0, "panels", nbytes, 0))
    lines = np.empty((len(rows), k), left.dtype)
    calls = ((part, a, transposed[0], rows) for part in parts)
    with closing(tasks.run(_lines, calls, (), 0, "rows")) as found:
        for place, block in found:
            lines[:, parts[place]] = block
            listener(UnitDone("verify", place, "", 0.0, block.nbytes, 0, {}))
    job = _Rows(
        rows,
        lines,
        fused,
        made,
        sums,
        precision,
        transposed,
        tuple(cuts[1]),
        min(k, depth + ceil_div(k, depth)),
        band,
    )
    outcomes: list[_Compared] = []
    with closing(
        tasks.run(
            _compare, ((part,) for part in columns), (job, b, c, counts), lines.nbytes + fused.nbytes, "c"
        )
    ) as compared:
        for place, outcome in compared:
            outcomes.append(outcome)
            width = columns[place].stop - columns[place].start
            listener(UnitDone("verify", len(parts) + place, "", 0.0, width * k * right.dtype.itemsize, 0, {}))
    seconds = time.perf_counter() - start
    listener(WorkDone("verify", seconds))
    if told := _far_told(outcomes, len(rows), m):
        listener(Caution(told))
    every_tile = {*np.searchsorted(cuts[0], rows, side="right")} == {*range(1, len(cuts[0]))}
    elements = int(np.subtract(*reversed(_in_band(job, slice(0, n)))).sum())
    return replace(_verification(outcomes, job, (m, elements), every_tile), seconds=seconds)


def _far_told(outcomes: Sequence[_Compared], rows: int, m: int) -> str:
    """A sentence about elements that rounding has made wrong by more than `MOST_WRONG`; empty where none was seen."""
    far = [one.far for one in outcomes if one.far.count]
    if not far:
        return ""
    most = max(far, key=lambda one: one.share)
    row, column = most.place
    wrong = (
        f"wrong by {most.share:.1g} of the product of their deviations" if np.isfinite(most.share) else "NaN"
    )
    return (
        f"{counted(sum(one.count for one in far), 'element')} of the {rows} of {m} rows of the result that were"
        f" computed anew suffered from rounding in float32, most that of variables {row} and {column}, which is"
        f" {wrong}: over the pairs that are both there, their means lie far from those of all their numbers, beside"
        " what they vary; ask for a wider dtype (dtype='float64', --dtype float64)"
    )


def _verification(
    outcomes: Sequence[_Compared], job: _Rows, sizes: tuple[int, int], every_tile: bool
) -> Verification:
    """sizes: C's rows, and the elements of the rows that were drawn."""
    m, elements = sizes
    worst = max(outcomes, key=lambda one: (one.largest, -one.worst[0]), default=None)
    relative = float(job.allowed(1.0, 0.0))
    largest = 0.0 if worst is None else worst.largest * relative
    unchecked = sum(one.unchecked for one in outcomes)
    conclusive = elements == 0 or unchecked < elements
    return Verification(
        passed=bool(largest <= relative and conclusive),
        conclusive=conclusive,
        rounds=1,
        largest_error=largest,
        tolerance=relative,
        modulus_bits=None,
        unchecked=unchecked,
        worst=worst.worst if worst is not None and worst.largest > 0 else None,
        seconds=0.0,
        wrong=tuple(sorted({block for one in outcomes for block in one.wrong})),
        sampled=Sample(len(job.rows), m, every_tile),
    )


@dataclass(frozen=True)
class _Rows:
    """The rows of C that are computed anew, and of what."""

    rows: np.ndarray
    lines: np.ndarray
    """Those rows of op(A), as stored."""
    fused: Fused
    pairwise: Pairwise
    sums: np.dtype
    precision: str
    transposed: tuple[bool, bool]
    cuts: tuple[int, ...]
    """Where columns of tiles begin, and where the last one ends."""
    terms: int
    """Additions that an element goes through at most: in its panel, and then from panel to panel."""
    band: Band | None = None

    def allowed(self, scale: Any, norms: Any) -> Any:
        """What a sum may deviate by: C's, and as much again the one that it is compared with.

        scale: the product of the norms of a row of op(A) and a column of op(B). norms: their sum."""
        sizes = math.sqrt(self.lines.shape[1]) * norms
        return 2 * tolerance(self.terms + PROPAGATION, self.sums, scale, self.precision, sizes)


@dataclass(frozen=True)
class _Far:
    """Elements that rounding of sums has made wrong by more than `MOST_WRONG`."""

    count: int = 0
    share: float = 0.0
    """The largest error, as a share of the product of both deviations."""
    place: tuple[int, int] = (0, 0)
    """Its row and column."""


@dataclass(frozen=True)
class _Compared:
    """What a task found in its columns."""

    largest: float
    """The largest deviation, in units of what is allowed there."""
    worst: tuple[int, int, int]
    """Its row, and first and last + 1 column."""
    unchecked: int
    wrong: tuple[tuple[int, int, int, int], ...]
    """First and last + 1 row and column of what is wrong of each row of a tile."""
    far: _Far = _Far()


def _in_band(job: _Rows, columns: slice) -> tuple[np.ndarray, np.ndarray]:
    """First and last + 1 of these columns that each of the rows has in the band; all of them where there is none."""
    if job.band is None:
        return np.full(len(job.rows), columns.start), np.full(len(job.rows), columns.stop)
    first, stop = job.band.stretches(job.rows, job.rows + 1, columns.stop)
    first = np.maximum(first, columns.start)
    return first, np.maximum(first, stop)


def _depth(left: StoredMatrix, rows: int) -> int:
    """How much of k a task reads the rows of op(A) of: whole chunks, of which it holds one at a time."""
    return round_up(max(1, BLOCK_NBYTES // (max(1, rows) * left.dtype.itemsize)), left.unit[1])


def _task_columns(right: StoredMatrix, rows: int, forms: int, at_once: int) -> int:
    """Columns of a task: whole chunks of B, unless their sums take too much, and enough tasks for so many at once."""
    most = max(1, SUMS_NBYTES // (8 * forms * max(1, rows)))
    return min(most, round_up(ceil_div(max(1, right.columns), at_once), max(1, right.unit[1])))


def _lines(part: slice, a: StoredArray, transpose: bool, rows: np.ndarray) -> np.ndarray:
    """What a task does first: read these rows of a stretch of op(A), as stored. Rows of one chunk are read at once."""
    matrix = as_stored_matrix(a, transpose=transpose)
    step = max(1, matrix.step(0))
    found = np.empty((len(rows), part.stop - part.start), matrix.dtype)
    with reading_while(end_if_given_up()):
        for band in np.unique(rows // step):
            inside = np.flatnonzero(rows // step == band)
            first, stop = int(band) * step, min((int(band) + 1) * step, matrix.rows)
            across = slice(first, stop)
            block = read_region(a, (part, across) if transpose else (across, part))
            found[inside] = (block.T if transpose else block)[rows[inside] - first]
    return found


def _compare(
    columns: slice, job: _Rows, b: StoredArray, c: zarr.Array[Any], counts: zarr.Array[Any] | None = None
) -> _Compared:
    """What a task does then: compute the rows of C over these columns, and compare them."""
    if job.band is not None:
        first, stop = _in_band(job, columns)
        some = np.flatnonzero(stop > first)
        if not len(some):
            return _Compared(0.0, (0, columns.start, columns.stop), 0, ())
        job = replace(job, rows=job.rows[some], lines=job.lines[some])
    one, other = job.fused.transforms
    assert one is not None
    assert other is not None
    right = as_stored_matrix(b, transpose=job.transposed[1])
    width = columns.stop - columns.start
    sums = {forms: np.zeros((len(job.rows), width)) for forms in job.pairwise.forms}
    squares = np.zeros(len(job.rows)), np.zeros(width)
    # What single precision loses is lost where numbers are shifted, too.
    narrow = job.pairwise.centered and job.sums == np.float32
    wide_one, wide_other = (replace(each, dtype=np.dtype(np.float64)) for each in (one, other))
    exact = {forms: np.zeros((len(job.rows), width)) for forms in OF_VALUES if narrow}
    with reading_while(end_if_given_up()), np.errstate(all="ignore"):
        for part, block in _blocks(b, right, job.transposed[1], columns):
            read = (columns, part) if job.transposed[1] else (part, columns)
            made: dict[Any, np.ndarray] = {}

            def of_a(form: Any, part: slice = part) -> np.ndarray:
                return _formed_lines(one, job, part, form)

            def of_b(form: Any, block: np.ndarray = block, read: tuple[slice, slice] = read) -> np.ndarray:
                found = transformed(other, block, *read, form).astype(np.float64)
                return found.T if job.transposed[1] else found

            for forms in job.pairwise.forms:
                for side, form, make in ((0, forms[0], of_a), (1, forms[1], of_b)):
                    if (side, form) not in made:
                        made[side, form] = make(form)
                sums[forms] += made[0, forms[0]] @ made[1, forms[1]]
            if narrow:
                x = _formed_lines(wide_one, job, part, "values")
                y = transformed(wide_other, block, *read, "values")
                y = y.T if job.transposed[1] else y
                exact[PRODUCT] += x @ y
                exact[LEFT] += x @ made[1, "presence"]
                exact[RIGHT] += made[0, "presence"] @ y
                exact[LEFT_SQUARES] += x**2 @ made[1, "presence"]
                exact[RIGHT_SQUARES] += made[0, "presence"] @ y**2
            squares[0][...] += np.einsum("ij,ij->i", made[0, "values"], made[0, "values"])
            squares[1][...] += np.einsum("ij,ij->j", made[1, "values"], made[1, "values"])
        stored = _stored(c, job.rows, columns)
        counted = None if counts is None else _stored(counts, job.rows, columns)
        norms = np.sqrt(squares[0])[:, np.newaxis], np.sqrt(squares[1])
        found = _compared(job, sums, norms, stored, columns, counted)
        return replace(found, far=_far(job, sums | exact, stored, columns)) if narrow else found


def _far(job: _Rows, sums: dict[Forms, np.ndarray], stored: np.ndarray, columns: slice) -> _Far:
    """What of these rows is farther from what sums in double precision make than `MOST_WRONG`."""
    made, n = job.pairwise, sums[COUNT]
    whole = slice(0, n.shape[0]), slice(0, n.shape[1])
    expected = combined(replace(made, own=False), sums, *whole, np.dtype(np.float64))
    varies = np.isfinite(expected)
    scale = np.ones(n.shape)
    for squares, numbers in ((sums[LEFT_SQUARES], sums[LEFT]), (sums[RIGHT_SQUARES], sums[RIGHT])):
        spread = squares - numbers * numbers / n
        varies &= spread > CONSTANT_SHARE * squares
        if not made.scaled:
            scale = scale * np.sqrt(spread / (n - made.ddof))
    shares = np.abs(stored.astype(np.float64) - expected) / scale
    shares = np.where(varies, np.where(np.isnan(shares), np.inf, shares), 0.0)
    if job.band is not None:
        places = np.arange(columns.start, columns.stop)
        first, stop = (edges[:, np.newaxis] for edges in _in_band(job, columns))
        shares = np.where((places < first) | (places >= stop), 0.0, shares)
    row, column = np.unravel_index(int(np.argmax(shares)), shares.shape)
    share = float(shares[row, column])
    place = int(job.rows[row]), columns.start + int(column)
    return _Far(int((shares > MOST_WRONG).sum()), share, place)


def _stored(c: zarr.Array[Any], rows: np.ndarray, columns: slice) -> np.ndarray:
    """These rows of C over these columns. Raises DamagedProductError where a chunk cannot be decoded."""
    try:
        return np.concatenate([read_region(c, (slice(row, row + 1), columns)) for row in rows.tolist()])
    except DamagedError as error:
        raise DamagedProductError(str(error)) from error


def _blocks(
    b: StoredArray, right: StoredMatrix, transpose: bool, columns: slice
) -> Iterator[tuple[slice, np.ndarray]]:
    """Stretches of k, and those rows of op(B) over these columns, as stored. Chunks are decoded once where
    `READ_NBYTES` hold them."""
    width = columns.stop - columns.start
    depth = max(1, BLOCK_NBYTES // (8 * width))
    most = max(depth, READ_NBYTES // (width * right.dtype.itemsize))
    unit = max(1, right.unit[0])
    whole = most // unit * unit if most >= unit else most
    for outer in stretches(right.rows, whole):
        block = read_region(b, (columns, outer) if transpose else (outer, columns))
        for start in range(outer.start, outer.stop, depth):
            part = slice(start, min(start + depth, outer.stop))
            inside = slice(part.start - outer.start, part.stop - outer.start)
            yield part, block[:, inside] if transpose else block[inside]


def _formed_lines(transform: Transform, job: _Rows, part: slice, form: Any) -> np.ndarray:
    """A stretch of the rows of op(A), as they are multiplied."""
    block = job.lines[:, part]
    which: Any = job.rows
    if job.transposed[0]:
        made = transformed(transform, np.ascontiguousarray(block.T), part, which, form).T
    else:
        made = transformed(transform, block, which, part, form)
    return made.astype(np.float64)


def _compared(
    job: _Rows,
    sums: dict[Forms, np.ndarray],
    norms: tuple[np.ndarray, np.ndarray],
    stored: np.ndarray,
    columns: slice,
    counted: np.ndarray | None = None,
) -> _Compared:
    """norms: of the rows of op(A), and of the columns of op(B), as they are multiplied. counted: the numbers of pairs,
    as they are stored."""
    made, n = job.pairwise, sums[COUNT]
    whole = slice(0, n.shape[0]), slice(0, n.shape[1])
    expected = combined(replace(made, own=False), sums, *whole, np.dtype(np.float64))
    found = stored.astype(np.float64)
    both = norms[0] * norms[1]
    relative = PROPAGATION * job.allowed(both, norms[0] + norms[1]) / both
    none = n <= (0 if made.scaled else made.ddof)
    special = ~np.isfinite(both)  # NaN, or infinity, which leaves no number in all of a row or column
    doubtful = np.zeros(n.shape, bool)
    if made.scaled:
        margin = 2 * unit_of(job.sums) * (CONSTANT_MARGIN + np.sqrt(n))
        scale = np.zeros(n.shape)
        for squares, numbers, norm in (
            (sums[LEFT_SQUARES], sums[LEFT], norms[0]),
            (sums[RIGHT_SQUARES], sums[RIGHT], norms[1]),
        ):
            spread = squares - numbers * numbers / n
            doubtful |= spread <= (margin + relative) * norm**2
            scale = scale + norm**2 / spread
        allowed = relative * scale
        # Whether a variable counts as constant, and else by which number it correlates, is up to the last bits.
        doubtful = (doubtful | ~(allowed < 1)) & ~special & ~none
    else:
        allowed = np.where(both > 0, relative * both, 0.0) / np.maximum(n - made.ddof, 1)
    held = np.finfo(stored.dtype)
    allowed = allowed + unit_roundoff(stored.dtype) * np.abs(expected) + float(held.smallest_subnormal)
    large = np.maximum(np.maximum(norms[0], norms[1]) ** 2, np.abs(expected) + allowed)
    overflows = large >= min(float(np.finfo(job.sums).max) / 2, float(held.max))
    errors = np.abs(found - expected) / allowed
    errors = np.where(np.isnan(errors), np.inf, errors)
    errors = np.where(overflows, 0.0, errors)
    errors = np.where(doubtful, np.where(np.abs(found) > 1, np.inf, 0.0), errors)
    errors = np.where(special, np.where(np.isfinite(found), np.inf, 0.0), errors)
    errors = np.where(none, np.where(np.isnan(found), 0.0, np.inf), errors)
    if counted is not None:
        errors = np.where(counted == n, errors, np.inf)
    unchecked = (overflows | doubtful | special) & ~none
    if job.band is not None:
        places = np.arange(columns.start, columns.stop)
        first, stop = (edges[:, np.newaxis] for edges in _in_band(job, columns))
        outside = (places < first) | (places >= stop)
        nothing = stored == 0 if counted is None else (stored == 0) & (counted == 0)
        errors = np.where(outside, np.where(nothing, 0.0, np.inf), errors)
        unchecked &= ~outside
    row, column = np.unravel_index(int(np.argmax(errors)), errors.shape)
    at = columns.start + int(column)
    return _Compared(
        float(errors[row, column]),
        (int(job.rows[row]), at, at + 1),
        int(np.count_nonzero(unchecked)),
        _wrong_parts(job, errors > 1, columns.start),
    )


def _wrong_parts(job: _Rows, wrong: np.ndarray, first: int) -> tuple[tuple[int, int, int, int], ...]:
    """For each row that is wrong, the tiles' columns in which it is, as a block of one row."""
    rows, places = np.nonzero(wrong)
    tiles = np.searchsorted(np.asarray(job.cuts), places + first, side="right") - 1
    found = {(int(job.rows[row]), int(tile)) for row, tile in zip(rows, tiles, strict=True)}
    return tuple((row, row + 1, job.cuts[tile], job.cuts[tile + 1]) for row, tile in sorted(found))
