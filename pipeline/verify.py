"""Check a stored product on a cluster: hand out the tasks of Freivalds' test (`freivalds.py`) and combine their
results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import zarr
from distributed import Client

from tilewright.kernels.gemm import check
from tilewright.pipeline.errors import DamagedError, DTypeError, ShapeError
from tilewright.pipeline.events import (
    Listener,
    UnitDone,
    WorkDone,
    WorkPlanned,
    counted,
    log_notices,
    on_lost,
    on_waiting,
)
from tilewright.pipeline.freivalds import (
    Outcome,
    Probe,
    Side,
    SpecialLines,
    Tolerances,
    compare,
    draw_probe,
    project,
    relative_tolerance,
    tolerance_of_alike,
)
from tilewright.pipeline.giving_up import reading_while
from tilewright.pipeline.reduce import end_if_given_up
from tilewright.pipeline.region_read import region_reads
from tilewright.pipeline.sessions import changes_nbytes
from tilewright.pipeline.store import as_stored_matrix, name_of
from tilewright.pipeline.submit import Result, Tell, run_bounded, run_sent, threads_of

SENT_NBYTES = 2**20
"""Vectors up to this size are part of every task."""

INPUT_LARGEST = {"fp16": float(np.finfo(np.float16).max)}
"""The largest operand in the precision that was asked for, where that is less than float32's."""


@dataclass(frozen=True)
class Verification:
    """The outcome of the check of one product.

    Where a row of op(A) or a column of op(B) holds NaN, all of that row or column of C must be NaN, and where it holds
    infinity, nothing there may be a number: each of these elements is checked for that, and all others are compared as
    usual.

    Not seen: which of the two infinities, or NaN, C holds where a factor's infinity decides; and what it holds where a
    row's sum over a group of columns (at least a quarter of C's, in whole chunks) may rightly have overflowed. Both are
    counted in ``unchecked``. Nor is, among floats, an element that is wrong by less than ``tolerance`` times the scale
    of its sum, sqrt(sum over l and j of |a_il b_lj|²) over the columns j of the group. For factors of random signs that
    is sqrt(columns of the group) times the usual size of C's elements, and ``tolerance`` is 2 eps max(k, 4) + 2 eps'
    sqrt(k), with eps of the type that sums are formed in and eps' of C's, and more for a lower precision.
    """

    passed: bool
    conclusive: bool
    """Whether anything could be compared; if not, ``passed`` is false and means nothing."""
    rounds: int
    largest_error: float
    """The largest deviation, in units of its own scale, which is larger where numbers underflow; for integers the
    number of sums that differ."""
    tolerance: float
    """The limit of ``largest_error``; 0 for integers."""
    unchecked: int
    """Elements of C that infinity or overflow kept from being compared."""
    worst: tuple[int, int, int] | None
    """Row of C, and first and last + 1 column, where the largest deviation was found; None where there is none."""
    seconds: float
    cause: str = ""
    """Why it failed, where that is known: numbers where NaN or infinity leaves none, or an operand too large for the
    precision."""
    modulo_bits: int | None = None
    """For integers, whose sums may wrap, C was compared modulo 2 to this power; None for all else."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if not self.conclusive:
            return "verification could compare nothing: every element meets infinity, or may overflow"
        exact = self.tolerance == 0
        wrong = int(self.largest_error) if exact else 0
        measure = (
            f"{counted(wrong, 'sum')} differ{'s' * (wrong == 1)}"
            + (f" modulo 2^{self.modulo_bits}" if self.modulo_bits is not None else "")
            if exact
            else f"largest error {self.largest_error:.3g} of {self.tolerance:.3g} allowed"
        )
        rest = (
            f", {counted(self.unchecked, 'element')} met infinity or may overflow, and"
            f" {'was' if self.unchecked == 1 else 'were'} not compared"
            if self.unchecked
            else ""
        )
        if self.passed:
            return f"verified in {counted(self.rounds, 'round')} and {self.seconds:.2f} s: {measure}{rest}"
        assert self.worst is not None
        row, first, stop = self.worst
        return (
            f"verification failed: {measure}; the worst is in row {row}, columns {first} to {stop - 1}{rest}"
            + (f"; {self.cause}" if self.cause else "")
        )


def can_verify() -> bool:
    """Whether a worker can run a check's tasks: one that can import this can import all that they call."""
    return True


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
    listener: Listener = log_notices,
) -> Verification:
    """Check that C (m × n) = op(A) (m × k) op(B) (k × n), all three stored, by tasks on the client's workers.

    ``rounds`` is as `config.get` allows for ``verify-rounds``.

    Raises
    ------
    ShapeError
        The sides do not match.
    DTypeError
        A factor is of floats and C of integers, or it is complex and C is not.
    OptionError
        ``precision`` is not known, or not for C's dtype.
    DamagedError
        A chunk cannot be decoded; DamagedProductError where it is C's.
    """
    start = time.perf_counter()
    left, right, result = Side(a, transpose_a), Side(b, transpose_b), Side(c, False)
    (m, k), (k_right, n) = left.shape, right.shape
    if k != k_right or result.shape != (m, n):
        raise ShapeError(
            f"{name_of(c)} is {result.shape[0]} × {result.shape[1]}; op(A) {m} × {k} by op(B) {k_right} × {n}"
            f" can only give {m} × {n} with equal inner sides"
        )
    dtype = c.dtype.newbyteorder("=")
    _check_kinds({"A": a, "B": b}, c)
    check.precision(precision, dtype)
    empty = m * n == 0  # nothing to compare; where only k is 0 there is: C must be zeros
    probe = draw_probe(n, k, dtype, rounds, as_stored_matrix(c).unit[1])
    at_once = max(threads_of(client, waiting=_waiting(listener)).values())
    right_step, left_step, step = (side.step(probe.line_nbytes, at_once) for side in (right, left, result))
    left_step = max(left_step, step)
    right_rows = [slice(i, min(i + right_step, k)) for i in range(0, k, right_step) if not empty]
    left_rows = [slice(i, min(i + left_step, m)) for i in range(0, m, left_step) if not empty]
    nbytes = 0 if empty else sum(side.array.nbytes for side in (left, right, result))
    listener(WorkPlanned("verify", len(right_rows) + len(left_rows), 0, "panels", nbytes, 0))
    tasks = _Tasks(client, listener)
    image, special = _project_all(tasks, right, right_rows, probe, 0)
    first = len(right_rows)
    if special is not None:
        # Columns of op(B) that hold NaN or infinity would hide all others of their group: project again without them.
        probe = replace(probe, left_out=special)
        listener(WorkPlanned("verify", 2 * first + len(left_rows), first, "panels", nbytes, 0))
        image, _ = _project_all(tasks, right, right_rows, probe, first)
        first *= 2
    allowed = _allowed_of(image, k, dtype, precision, exact=probe.exact)
    outcomes = _compare_all(tasks, left, result, left_rows, image, allowed, probe, first)
    unchecked = sum(outcome.unchecked for outcome in outcomes)
    conclusive = empty or m * n > unchecked
    worst = max(outcomes, key=lambda outcome: (outcome.largest, -outcome.worst[0]), default=None)
    largest = 0.0 if worst is None else worst.largest
    if probe.exact:
        largest = float(sum(outcome.largest for outcome in outcomes))
    cause = ""
    if any(outcome.strays for outcome in outcomes):
        cause = "there are numbers where NaN or infinity in a factor leaves none"
    if precision in INPUT_LARGEST and largest == math.inf:
        cause = _too_large(tasks, {"A": (left, left_rows), "B": (right, right_rows)}, precision) or cause
    seconds = time.perf_counter() - start
    listener(WorkDone("verify", seconds))
    return Verification(
        passed=bool(largest <= allowed.relative and conclusive),
        conclusive=conclusive,
        rounds=rounds,
        largest_error=largest,
        tolerance=allowed.relative,
        unchecked=unchecked,
        worst=worst.worst if worst is not None and worst.largest > 0 else None,
        seconds=seconds,
        cause=cause,
        modulo_bits=8 * dtype.itemsize if probe.exact else None,
    )


def find_damaged(
    client: Client,
    c: zarr.Array[Any],
    regions: Iterable[tuple[slice, slice]],
    *,
    listener: Listener = log_notices,
) -> list[int]:
    """The places, in ascending order, of those regions of C with a chunk that cannot be decoded."""
    calls = ((c, region) for region in regions)
    with closing(_Tasks(client, listener).run(_is_damaged, calls, (), 0, "damaged")) as found:
        return sorted(place for place, damaged in found if damaged)


def _is_damaged(c: zarr.Array[Any], region: tuple[slice, slice]) -> bool:
    try:
        with reading_while(end_if_given_up()):
            for part in region_reads(c, region):
                part.read(np.empty(part.shape, c.dtype.newbyteorder("=")))
    except DamagedError:
        return True
    return False


def _waiting(listener: Listener) -> Tell:
    """Tells the listener that a check waits."""
    return on_waiting(listener, "verify", "ends the check and keeps the product")


class _Tasks:
    """Runs a check's tasks on the workers, and tells its listener of them."""

    def __init__(self, client: Client, listener: Listener) -> None:
        self._client, self._listener = client, listener
        self._run = f"verify-{time.time_ns():x}"
        self._waiting = _waiting(listener)
        self._lost = on_lost(listener, "verify", "panel")

    def run(
        self,
        function: Callable[..., Result],
        calls: Iterable[tuple[Any, ...]],
        values: tuple[Any, ...],
        nbytes: int,
        name: str,
    ) -> Generator[tuple[int, Result], None, None]:
        """The results of all calls as they come, with their places; ``values``, of ``nbytes``, are added to each
        call."""
        options: dict[str, Any] = {"key": f"{self._run}-{name}", "waiting": self._waiting, "lost": self._lost}
        if nbytes > SENT_NBYTES:  # long vectors go to each worker once, not along with each task
            return run_sent(self._client, function, calls, values, **options)
        return run_bounded(self._client, function, ((*call, *values) for call in calls), **options)

    def finished(self, index: int, side: Side, rows: slice) -> None:
        """Tell the listener that these rows are done."""
        nbytes = side.array.nbytes * (rows.stop - rows.start) // max(1, side.shape[0])
        self._listener(UnitDone("verify", index, "", 0.0, nbytes, 0, {}))


@dataclass(frozen=True)
class _Image:
    """B times the probe, and what is measured of B on the way."""

    thin: np.ndarray
    """(groups × rounds) × k: B x of every group and round, one a row as the loops read them."""
    norms: np.ndarray
    """(groups + 1) × k, float64: norms of B's rows by group, and a last row of ones, which gives the norms of A's rows;
    empty for integers."""
    column_squares: np.ndarray
    """For each group, float64: an upper bound of the sum of |element|² in any of its columns."""

    @property
    def nbytes(self) -> int:
        return self.thin.nbytes + self.norms.nbytes


def _project_all(
    tasks: _Tasks, right: Side, pieces: Sequence[slice], probe: Probe, first: int
) -> tuple[_Image, SpecialLines | None]:
    """B times the probe, its rows in these pieces, and the columns of B that hold NaN or infinity, if any; ``first`` is
    the first piece's number for the listener."""
    k = right.shape[0]
    groups = 0 if probe.exact else probe.group_count
    image = _Image(
        np.zeros((len(probe.vectors) * probe.group_count, k), probe.dtype),
        np.ones((0 if probe.exact else groups + 1, k)),
        np.zeros(groups),
    )
    special = SpecialLines.none(right.shape[1])
    calls = ((right, rows) for rows in pieces)
    with closing(tasks.run(project, calls, (probe,), probe.vectors.nbytes, "b")) as projections:
        for place, sums in projections:
            image.thin[:, pieces[place]] = sums.thin.T
            image.norms[:groups, pieces[place]] = sums.norms.T
            with np.errstate(all="ignore"):  # NaN and infinity pass through
                np.add(image.column_squares, sums.column_squares, out=image.column_squares)
            special.add(slice(None), sums.special)
            tasks.finished(first + place, right, pieces[place])
    return image, special if special.any else None


def _allowed_of(image: _Image, k: int, dtype: np.dtype, precision: str, *, exact: bool) -> Tolerances:
    """What C may deviate by if it is of this dtype and was computed in this precision."""
    norms = image.norms[:-1]
    with np.errstate(all="ignore"):
        group_norms = np.sqrt(np.einsum("gl,gl->g", norms, norms))
    return Tolerances(
        0.0 if exact else relative_tolerance(k, dtype, precision),
        0.0 if exact else tolerance_of_alike(k, dtype, precision),
        precision,
        k,
        dtype,
        np.sqrt(image.column_squares),
        group_norms,
    )


def _compare_all(
    tasks: _Tasks,
    left: Side,
    result: Side,
    pieces: Sequence[slice],
    image: _Image,
    allowed: Tolerances,
    probe: Probe,
    first: int,
) -> list[Outcome]:
    """Compare C x with A (B x), their rows in these pieces; ``first`` is the first piece's number for the listener."""
    calls = ((left, rows) for rows in pieces)
    values = result, image.thin, image.norms, allowed, probe
    nbytes = image.nbytes + probe.vectors.nbytes + changes_nbytes(result.array)
    found: list[Outcome] = []
    with closing(tasks.run(_compare, calls, values, nbytes, "a")) as outcomes:
        for place, outcome in outcomes:
            found.append(outcome)
            tasks.finished(first + place, left, pieces[place])
    return found


def _compare(left: Side, rows: slice, result: Side, *values: Any) -> Outcome:
    """`compare`, with C among what is sent once where that is large: a fork carries all that was written to it."""
    return compare(left, result, rows, *values)


def _too_large(tasks: _Tasks, factors: dict[str, tuple[Side, list[slice]]], precision: str) -> str:
    """A sentence about the factors that hold numbers too large for the precision, or an empty string. factors: each
    with its rows in pieces."""
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


def _largest(side: Side, rows: slice) -> float:
    """The largest absolute value of these rows that is finite; 0 where none is."""
    largest = 0.0
    for _, _, part in side.parts(rows):
        sizes = np.abs(side.load(part, np.dtype(np.float64), np.dtype(np.float64)), dtype=np.float64)
        largest = max(largest, float(np.max(sizes, where=np.isfinite(sizes), initial=0.0)))
    return largest


def _check_kinds(factors: dict[str, zarr.Array[Any]], c: zarr.Array[Any]) -> None:
    """Raise DTypeError for factors that C's kind cannot hold: sums are formed in that kind, so that floats would lose
    their fractions in integers, and a wrong C could pass."""
    for role, factor in factors.items():
        # Integers may be of any width: they are compared modulo C's.
        integers = factor.dtype.kind in "iu" and c.dtype.kind in "iu"
        if not integers and not np.can_cast(factor.dtype, c.dtype, "same_kind"):
            raise DTypeError(
                f"{role}: {name_of(factor)} holds {factor.dtype.name}, and no product of that is {c.dtype.name}, which"
                f" {name_of(c)} holds; check other arrays, or multiply anew"
            )
