"""The check of a C of which only a band is stored: Freivalds' test, row by row, with sums over each row's own stretch.

With a random vector x, the sum over the band's part of row i of C, sum over j of C[i, j] x[j], is the sum over l of
op(A)[i, l] W[l, i], where W[l, i] is the sum over j in that stretch of op(B)[l, j] x[j]. As i grows the stretch slides
along the row, so that all of W costs little more than one product with x: op(B) is cut into blocks of columns no longer
than the band is wide, of each of which a stretch has all, an end or a beginning; sums from each block's edges inwards
give these, and nothing is subtracted, which would cost digits. The sum of |op(B)[l, j]|² over the stretch is formed
alike, and is what rounding errors are compared with. So each row is a group of its own in the sense of `freivalds.py`,
which has the tolerances; what escapes is what `vectors.py` says.

What lies outside the band in a stored piece must be 0. Pieces that the band does not touch are as a rule not stored;
those that are, `verify_outside` reads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from tilewright.kernels.cpu.thin import INFINITE, NAN, NUMBER
from tilewright.kernels.numbers import ceil_div, round_up
from tilewright.pipeline.check.freivalds import Tolerances, relative_errors, tolerances
from tilewright.pipeline.check.fused import fused_product
from tilewright.pipeline.check.sides import Side, StoredSide
from tilewright.pipeline.check.vectors import Probe, draw_probe
from tilewright.pipeline.check.verify import ClientTasks, Verification
from tilewright.pipeline.errors import DamagedError, DamagedProductError
from tilewright.pipeline.events import Listener, UnitDone, WorkDone, WorkPlanned, log_notices
from tilewright.pipeline.plan.band import Band
from tilewright.pipeline.plan.inputs import StoredMatrix
from tilewright.pipeline.plan.transform import NOT_FUSED, Fused
from tilewright.pipeline.reduce import end_if_given_up
from tilewright.pipeline.store.arrays import as_stored_matrix
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.region_read import region_reads
from tilewright.pipeline.store.waiting import reading_while

if TYPE_CHECKING:
    from distributed import Client

COLUMNS = 2048
"""Columns of B whose sums are formed at once, in whole blocks."""

LEAST_ROWS = 2048
MOST_ROWS = 2**15
"""Rows of a task: about as many as the band is wide, within these bounds; each reads what of B its rows need."""

BLOCK_NBYTES = 2**25
"""The most that a task holds of A, and of B, as they are summed."""

DEEP = 64
"""Rows of B whose sums are formed at once: what is made of them stays in a core's cache."""

MOST_NAMED = 3
"""Pieces outside the band that a text names."""

COPIES = 6
"""What a task holds of a block besides it, while sums are formed: as read, weighed, and summed from both edges."""


def check_band_nbytes(
    a: StoredMatrix, b: StoredMatrix, c: StoredMatrix, vectors: int, vectors_nbytes: int, tasks: int
) -> int:
    """The most that a worker holds while it runs so many tasks of the check at once. vectors: of the probe.
    vectors_nbytes: of what is sent besides."""
    chunk = 2 * max(a.unit_nbytes, b.unit_nbytes, c.unit_nbytes)
    sums = DEEP * COLUMNS * 16 * COPIES + MOST_ROWS * (DEEP + 4 * vectors) * 16
    return 2 * vectors_nbytes + c.columns * vectors * 16 + tasks * (4 * BLOCK_NBYTES + sums + 4 * chunk)


def verify_band(
    client: Client,
    a: StoredArray,
    b: StoredArray,
    c: zarr.Array[Any],
    band: Band,
    *,
    transposed: tuple[bool, bool] = (False, False),
    rounds: int = 2,
    precision: str = "full",
    listener: Listener = log_notices,
    cuts: Sequence[int] = (),
    fused: Fused = NOT_FUSED,
    sums: np.dtype | None = None,
    before: zarr.Array[Any] | None = None,
) -> Verification:
    """Check the band of C (m × n), of op(A) (m × k) and op(B) (k × n), all three stored, by tasks on the client's
    workers.

    cuts: where rows of tiles begin, and where the last one ends; ``Verification.wrong`` names those that are wrong,
    with the columns that they have in the band. All else is as for `verify.verify_product`. Raises DamagedError where
    a chunk cannot be decoded; DamagedProductError where it is C's.
    """
    start = time.perf_counter()
    left: Any = StoredSide(a, transposed[0])
    right: Any = StoredSide(b, transposed[1])
    (m, k), n = left.shape, right.shape[1]
    dtype = c.dtype.newbyteorder("=")
    terms, compute, gain = k, None, 1.0
    if fused:
        made = fused_product((a, b), transposed, fused, dtype, sums or dtype, before)
        left, right, terms, compute, gain = made.left, made.right, made.terms, made.compute, made.gain
    probe = draw_probe(n, k, dtype, rounds, 1, (0, n) if n else (0,))
    steps = (
        as_stored_matrix(a, transpose=transposed[0]).unit,
        as_stored_matrix(b, transpose=transposed[1]).unit,
    )
    rows = [] if m * n == 0 else _row_pieces(m, n, band, as_stored_matrix(c).unit[0])
    height = max((piece.stop - piece.start for piece in rows), default=1)
    job = _Job(
        left,
        right,
        StoredSide(c, False),
        band,
        probe,
        _depth(height, k, probe.dtype.itemsize, steps[0][1], steps[1][0]),
        _Asked(terms, dtype, precision, compute, gain),
        tuple(cuts),
    )
    tasks = ClientTasks(client, listener)
    nbytes = sum(side.nbytes for side in (left, right)) if rows else 0
    listener(WorkPlanned("verify", len(rows), 0, "panels", nbytes, 0))
    sent = probe.vectors.nbytes + left.sent_nbytes + right.sent_nbytes + job.result.sent_nbytes
    outcomes: list[_Outcome] = []
    with closing(tasks.run(_compare, ((piece,) for piece in rows), (job,), sent, "band")) as found:
        for place, outcome in found:
            outcomes.append(outcome)
            listener(UnitDone("verify", place, "", 0.0, nbytes // len(rows), 0, {}))
    seconds = time.perf_counter() - start
    listener(WorkDone("verify", seconds))
    return replace(_verification(outcomes, job, (m, n)), rounds=rounds, seconds=seconds)


def verify_outside(
    client: Client,
    c: zarr.Array[Any],
    found: Verification,
    regions: Mapping[str, tuple[slice, slice]],
    *,
    listener: Listener = log_notices,
) -> Verification:
    """What `verify_band` found of C, and whether stored pieces that the band does not touch hold nothing but 0.

    regions: theirs, by their names. A piece that cannot be decoded fails the check, which names it.
    """
    start = time.perf_counter()
    calls = ((c, region) for region in regions.values())
    causes, worst, wrong = [], None, 0
    with closing(ClientTasks(client, listener).run(_not_zero, calls, (), 0, "outside")) as looked:
        held = dict(looked)
    for place, (name, (rows, columns)) in enumerate(regions.items()):
        lines = held[place]
        if lines is not None and not lines.size:
            continue
        causes.append(f"{name}, outside the band, {'cannot be decoded' if lines is None else 'is not all 0'}")
        first = rows.start if lines is None else rows.start + int(lines[0])
        worst = worst or (first, columns.start, columns.stop)
        wrong += 1 if lines is None else lines.size
    found = replace(found, seconds=found.seconds + time.perf_counter() - start)
    if not causes:
        return found
    if len(causes) > MOST_NAMED:
        causes[MOST_NAMED:] = [f"and so it is with {len(causes) - MOST_NAMED} more"]
    return replace(
        found,
        passed=False,
        conclusive=True,
        largest_error=math.inf if found.modulus_bits is None else found.largest_error + wrong,
        worst=found.worst if found.conclusive and not found.passed else worst,
        cause="; ".join(filter(None, [found.cause, *causes])),
    )


def _not_zero(c: zarr.Array[Any], region: tuple[slice, slice]) -> np.ndarray | None:
    """The rows of a region, counted from its first, that hold anything but 0; None where it cannot be decoded."""
    lines = np.zeros(region[0].stop - region[0].start, bool)
    try:
        with reading_while(end_if_given_up()):
            for part in region_reads(c, region):
                block = np.empty(part.shape, c.dtype.newbyteorder("="))
                part.read(block)
                lines[part.target[0]] |= (block != 0).any(axis=1)
    except DamagedError:
        return None
    return np.flatnonzero(lines)


def _row_pieces(m: int, n: int, band: Band, unit: int) -> list[slice]:
    """The rows of each task: whole stored pieces of C, up to the last row that has anything in the band."""
    last = min(m, n + band.before)
    step = round_up(min(max(band.width, LEAST_ROWS), MOST_ROWS), max(1, unit))
    step = min(step, max(MOST_ROWS, unit))
    return [slice(start, min(start + step, last)) for start in range(0, last, step)]


def _depth(rows: int, k: int, itemsize: int, *units: int) -> int:
    """How much of k is summed at once: whole chunks where they fit."""
    most = max(1, BLOCK_NBYTES // (max(rows, COLUMNS) * itemsize))
    unit = math.lcm(*units)
    for whole in (unit, max(units)):
        if most >= whole:
            return most // whole * whole
    return most


@dataclass(frozen=True)
class _Asked:
    """How the product was asked for."""

    terms: int
    dtype: np.dtype
    """C's."""
    precision: str
    compute: np.dtype | None
    gain: float


@dataclass(frozen=True)
class _Job:
    left: Side
    right: Side
    result: StoredSide
    band: Band
    probe: Probe
    depth: int
    asked: _Asked
    cuts: tuple[int, ...]


@dataclass(frozen=True)
class _Outcome:
    """What a task found in its rows."""

    largest: float
    worst: int
    """The row with the largest deviation."""
    relative: float
    """The most that it may be."""
    unchecked: int
    elements: int
    """Of the band."""
    strays: bool
    special_rows: int
    special_columns: int
    outside: bool
    """Whether there is anything but 0 outside the band."""
    wrong: tuple[int, ...]
    """The numbers of the rows of tiles with a deviation."""


def _verification(outcomes: Sequence[_Outcome], job: _Job, sides: tuple[int, int]) -> Verification:
    n = sides[1]
    probe = job.probe
    worst = max(outcomes, key=lambda one: (one.largest, -one.worst), default=None)
    largest = 0.0 if worst is None else worst.largest
    relative = max((one.relative for one in outcomes), default=0.0)
    where = None
    if worst is not None and largest > 0:
        columns = job.band.columns(worst.worst, n)
        where = (worst.worst, columns.start, columns.stop)
    if probe.exact:
        largest = float(sum(one.largest for one in outcomes))
    unchecked, elements = (sum(getattr(one, name) for one in outcomes) for name in ("unchecked", "elements"))
    conclusive = elements == 0 or unchecked < elements
    cause = ""
    if any(one.outside for one in outcomes):
        cause = "there are numbers outside the band, where all is 0"
    elif any(one.strays for one in outcomes):
        cause = "there are numbers where NaN or infinity in a factor leaves none"
    wrong = []
    for row in sorted({row for one in outcomes for row in one.wrong}):
        top, bottom = job.cuts[row], job.cuts[row + 1]
        first, stop = job.band.stretches(np.array([top]), np.array([bottom]), n)
        wrong.append((top, bottom, int(first[0]), int(stop[0])))
    return Verification(
        passed=bool(largest <= relative and conclusive),
        conclusive=conclusive,
        rounds=0,
        largest_error=largest,
        tolerance=relative,
        modulus_bits=probe.bits if probe.exact else None,
        unchecked=unchecked,
        worst=where,
        seconds=0.0,
        special_rows=sum(one.special_rows for one in outcomes),
        special_columns=sum(one.special_columns for one in outcomes),
        cause=cause,
        wrong=tuple(wrong),
    )


def window_sums(
    block: np.ndarray, first: int, starts: np.ndarray, stops: np.ndarray, length: int
) -> np.ndarray:
    """Of each line of a block the sums over stretches: lines × stretches.

    first: the place of the block's first column, a multiple of ``length``. starts, stops: of the stretches, none of
    which begins and ends inside one block of ``length`` columns, counted from place 0, or reaches over more than two in
    what there is here of it.

    >>> window_sums(np.array([[1, 2, 4, 8]]), 0, np.array([0, 1, 2]), np.array([1, 3, 4]), 2).tolist()
    [[1, 6, 12]]
    """
    lines, columns = block.shape
    whole = np.zeros((lines, ceil_div(columns, length) * length), block.dtype)
    whole[:, :columns] = block
    cut = whole.reshape(lines, -1, length)
    ahead = np.cumsum(cut, axis=2, dtype=block.dtype).reshape(lines, -1)
    back = np.cumsum(cut[:, :, ::-1], axis=2, dtype=block.dtype)[:, :, ::-1].reshape(lines, -1)
    start, stop = np.clip(starts - first, 0, columns), np.clip(stops - first, 0, columns)
    there = stop > start
    last = np.where(there, stop - 1, 0)
    start = np.where(there, start, 0)
    two = start // length != last // length
    at_edge = start % length == 0
    # A stretch in one block begins at its first column, or ends at its last; one in two has an end and a beginning.
    result = np.where(there & (two | at_edge), ahead[:, last], 0)
    result += np.where(there & (two | ~at_edge), back[:, start], 0)
    return result


def _compare(rows: slice, job: _Job) -> _Outcome:
    """What a task does: compare these rows of C's band."""
    n, probe = job.right.shape[1], job.probe
    first, stop = job.band.stretches(
        np.arange(rows.start, rows.stop), np.arange(rows.start, rows.stop) + 1, n
    )
    whole = slice(int(first[0]), int(stop[-1]))
    kinds = np.zeros(whole.stop - whole.start, np.uint8)
    with np.errstate(all="ignore"):  # NaN and infinity pass through, and integers wrap
        found = _expected(rows, job, whole, (first, stop), kinds)
        if not probe.exact and (special := _special_columns(job, whole, found.column_squares)).any():
            # Such columns would hide all others: form the sums again without them.
            kinds = special
            found = _expected(rows, job, whole, (first, stop), kinds)
        try:
            held = _held(rows, job, whole, found.special, kinds)
        except DamagedError as error:
            raise DamagedProductError(str(error)) from error
        errors: np.ndarray
        skipped: np.ndarray
        if probe.exact:
            shift = probe.dtype.type(8 * probe.dtype.itemsize - probe.bits)
            errors = (((held.thin - found.thin) << shift) != 0).astype(np.float64)
            relative, skipped = 0.0, np.zeros(len(errors), bool)
        else:
            allowed = _allowed(job, found)
            narrow = replace(probe, cuts=(0, max(1, job.band.width)))
            each, skip = relative_errors(
                held.thin[:, np.newaxis],
                found.thin[:, np.newaxis],
                np.sqrt(np.column_stack([found.squares, found.row_squares])).astype(np.float64),
                np.sqrt(held.squares)[:, np.newaxis].astype(np.float64),
                allowed,
                narrow,
            )
            errors, relative = each[:, 0], allowed.relative
            skipped = np.asarray(skip[:, 0].any(axis=1))
            errors[found.special != NUMBER] = 0  # each element was looked at by itself
    errors[held.strays | held.outside] = np.inf if not probe.exact else 1
    widths = stop - first
    ahead = np.concatenate([[0], np.cumsum(kinds == INFINITE)])
    infinite = ahead[stop - whole.start] - ahead[first - whole.start]
    unchecked = np.where(found.special == INFINITE, widths, np.where(skipped, widths, infinite))
    unchecked = np.where(found.special == NAN, 0, unchecked)
    per_row = errors.max(axis=1, initial=0.0)
    place = int(np.argmax(per_row))
    wrong_rows = rows.start + np.flatnonzero(per_row > relative)
    return _Outcome(
        float(errors.sum() if probe.exact else per_row[place]),
        rows.start + place,
        relative,
        int(np.sum(unchecked)),
        int(widths.sum()),
        bool(held.strays.any()),
        int(np.count_nonzero(found.special != NUMBER)),
        int(np.count_nonzero(kinds[max(0, rows.start - whole.start) : max(0, rows.stop - whole.start)])),
        bool(held.outside.any()),
        tuple(
            {int(tile) for tile in np.searchsorted(job.cuts, wrong_rows, side="right") - 1}
            if job.cuts
            else ()
        ),
    )


@dataclass(frozen=True)
class _Expected:
    """What rows of C should sum to, and the measures of that."""

    thin: np.ndarray
    """rows × vectors."""
    squares: np.ndarray
    """For each row: the sum over l and the band of |a_il b_lj|²."""
    row_squares: np.ndarray
    """Of rows of op(A)."""
    column_squares: np.ndarray
    """Of columns of op(B)."""
    special: np.ndarray
    """What rows of op(A) hold, uint8."""


def _expected(
    rows: slice, job: _Job, whole: slice, stretches: tuple[np.ndarray, np.ndarray], kinds: np.ndarray
) -> _Expected:
    """whole: the columns that any of the rows needs. kinds: what these hold; all but ``NUMBER`` count as zeros."""
    probe, k = job.probe, job.left.shape[1]
    count = rows.stop - rows.start
    thin = np.zeros((count, len(probe.vectors)), probe.dtype)
    squares, row_squares = np.zeros(count, np.longdouble), np.zeros(count, np.longdouble)
    column_squares = np.zeros(whole.stop - whole.start, np.longdouble)
    special = np.zeros(count, np.uint8)
    length = min(job.band.width, COLUMNS)
    step = length if length < job.band.width else length * max(1, COLUMNS // length)
    for start in range(0, k, job.depth):
        inner = slice(start, min(start + job.depth, k))
        lines = _block(job.left, rows, inner, probe)
        sizes = None
        if not probe.exact:
            sizes = _squares(lines)
            of_rows = sizes.sum(axis=1)
            row_squares += of_rows
            _note_special(lines, ~np.isfinite(of_rows), special)
        for first in range(whole.start // step * step, whole.stop, step):
            columns = slice(max(first, whole.start), min(first + step, whole.stop))
            some = slice(
                int(np.searchsorted(stretches[1], columns.start, side="right")),
                int(np.searchsorted(stretches[0], columns.stop, side="left")),
            )
            if some.start >= some.stop:
                continue
            block = np.zeros((inner.stop - inner.start, columns.stop - first), probe.dtype)
            block[:, columns.start - first :] = _block(job.right, inner, columns, probe)
            known = kinds[columns.start - whole.start : columns.stop - whole.start]
            block[:, columns.start - first :][:, known != NUMBER] = 0
            edges = first, stretches[0][some], stretches[1][some], length
            x = np.zeros((len(probe.vectors), columns.stop - first), probe.dtype)
            x[:, columns.start - first :] = probe.vectors[:, columns]
            for deep in range(0, len(block), DEEP):
                part = slice(deep, deep + DEEP)
                across = lines[some, part]
                for vector, weights in enumerate(x):
                    sums = window_sums(block[part] * weights, *edges)
                    thin[some, vector] += np.einsum("il,li->i", across, sums)
                if sizes is not None:
                    of_block = _squares(block[part])
                    column_squares[columns.start - whole.start : columns.stop - whole.start] += of_block[
                        :, columns.start - first :
                    ].sum(axis=0)
                    squares[some] += np.einsum("il,li->i", sizes[some, part], window_sums(of_block, *edges))
    return _Expected(thin, squares, row_squares, column_squares, special)


def _block(side: Side, rows: slice, columns: slice, probe: Probe) -> np.ndarray:
    """A block of a side, in one piece."""
    block = np.zeros((rows.stop - rows.start, columns.stop - columns.start), probe.dtype)
    for place, across, part in side.each_block(rows, columns, probe, lambda *done: done):
        block[place, across] = part
    return block


SQUARED = 1e-70, 1e70
"""Numbers between these, and products of two of them, have squares within double precision."""


def _squares(block: np.ndarray) -> np.ndarray:
    """Of absolute values, in the extended range of ``longdouble`` where double precision may not hold them."""
    sizes = np.abs(block).astype(np.float64, copy=False)
    least, most = SQUARED
    extreme = ((sizes > most) | ((sizes < least) & (sizes > 0))).any()
    return np.asarray(sizes.astype(np.longdouble) if extreme else sizes) ** 2


def _note_special(lines: np.ndarray, suspected: np.ndarray, special: np.ndarray) -> None:
    """Note which rows hold NaN, or else infinity; finite numbers whose squares overflow are neither."""
    for row in np.flatnonzero(suspected):
        kind = NAN if np.isnan(lines[row]).any() else INFINITE if np.isinf(lines[row]).any() else NUMBER
        special[row] = max(special[row], kind)


def _special_columns(job: _Job, whole: slice, squares: np.ndarray) -> np.ndarray:
    """What the columns of op(B) hold whose squares do not add up to a number."""
    kinds = np.zeros(len(squares), np.uint8)
    for column in np.flatnonzero(~np.isfinite(squares)):
        across = slice(whole.start + int(column), whole.start + int(column) + 1)
        line = _block(job.right, slice(0, job.right.shape[0]), across, job.probe)
        _note_special(line.T, np.ones(1, bool), kinds[column : column + 1])
    return kinds


@dataclass(frozen=True)
class _Held:
    """What rows of C's band hold."""

    thin: np.ndarray
    squares: np.ndarray
    strays: np.ndarray
    """Whether there is a number where there must be none; one a row."""
    outside: np.ndarray
    """Whether there is anything but 0 outside the band; one a row."""


def _held(rows: slice, job: _Job, whole: slice, special: np.ndarray, kinds: np.ndarray) -> _Held:
    probe, n = job.probe, job.right.shape[1]
    count = rows.stop - rows.start
    thin = np.zeros((count, len(probe.vectors)), probe.dtype)
    squares = np.zeros(count, np.longdouble)
    strays, outside = np.zeros(count, bool), np.zeros(count, bool)
    unit = as_stored_matrix(job.result.array).unit
    for top in range(rows.start, rows.stop, unit[0]):
        strip = slice(top, min(top + unit[0], rows.stop))
        first, stop = job.band.stretches(np.array([strip.start]), np.array([strip.stop]), n)
        left = int(first[0]) // unit[1] * unit[1]
        columns = slice(left, min(n, round_up(int(stop[0]), unit[1])))

        def look(
            place: slice, across: slice, block: np.ndarray, strip: slice = strip, columns: slice = columns
        ) -> tuple[slice, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
            down = slice(strip.start - rows.start + place.start, strip.start - rows.start + place.stop)
            at = slice(columns.start + across.start, columns.start + across.stop)
            apart = (
                np.arange(at.start, at.stop)
                - np.arange(rows.start + down.start, rows.start + down.stop)[:, None]
            )
            inside = (apart >= -job.band.before) & (apart <= job.band.after)
            beyond = ((block != 0) & ~inside).any(axis=1)
            block = np.where(inside, block, 0)
            known = np.zeros(at.stop - at.start, np.uint8)
            low, high = max(at.start, whole.start), min(at.stop, whole.stop)
            if low < high:
                known[low - at.start : high - at.start] = kinds[low - whole.start : high - whole.start]
            stray = np.zeros(len(block), bool)
            if not probe.exact and (known.any() or special[down].any()):
                must = np.maximum(special[down, None], known)
                no_nan = (must == NAN) & ~np.isnan(block)
                stray = (inside & (no_nan | ((must == INFINITE) & np.isfinite(block)))).any(axis=1)
                block = np.where(must == NUMBER, block, 0)
            sums = np.einsum("ij,vj->iv", block, probe.vectors[:, at].astype(probe.dtype))
            sizes = np.zeros(len(block)) if probe.exact else _squares(block).sum(axis=1)
            return down, sums, sizes, stray, beyond

        for down, sums, sizes, stray, beyond in job.result.each_block(strip, columns, probe, look):
            with np.errstate(all="ignore"):
                thin[down] += sums
                squares[down] += sizes
            strays[down] |= stray
            outside[down] |= beyond
    return _Held(thin, squares, strays, outside)


def _allowed(job: _Job, found: _Expected) -> Tolerances:
    asked, width = job.asked, min(job.band.width, job.right.shape[1])
    finite = found.column_squares[np.isfinite(found.column_squares)]
    largest, norm = (np.sqrt([total]).astype(np.float64) for total in (finite.max(initial=0), finite.sum()))
    return tolerances(
        asked.terms, asked.dtype, asked.precision, width, 1, largest, norm, asked.compute, asked.gain
    )
