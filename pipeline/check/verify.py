"""Check a stored product on a cluster: hand out the tasks of Freivalds' test (`freivalds.py`) and combine their
results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import zarr

from tilewright.kernels.gemm import check
from tilewright.kernels.numbers import counted
from tilewright.pipeline.check.freivalds import (
    Outcome,
    Sums,
    Tolerances,
    compare,
    project,
    tolerances,
    wrong_columns,
)
from tilewright.pipeline.check.fused import FusedProduct, JoinedSide, fused_product
from tilewright.pipeline.check.sides import Side, StoredSide
from tilewright.pipeline.check.vectors import Probe, chance_to_escape, draw_probe, line_nbytes
from tilewright.pipeline.cluster.answers import Result
from tilewright.pipeline.cluster.submit import run_bounded, run_sent
from tilewright.pipeline.cluster.watch import Tell, threads_of
from tilewright.pipeline.errors import DamagedError, DTypeError, ShapeError
from tilewright.pipeline.events import (
    Listener,
    UnitDone,
    WorkDone,
    WorkPlanned,
    log_notices,
    on_lost,
    on_waiting,
)
from tilewright.pipeline.plan.transform import NOT_FUSED, Fused
from tilewright.pipeline.reduce import end_if_given_up
from tilewright.pipeline.store.arrays import as_stored_matrix, name_of
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.region_read import region_reads
from tilewright.pipeline.store.waiting import reading_while

if TYPE_CHECKING:
    from distributed import Client

SENT_NBYTES = 2**20
"""Vectors up to this size are part of every task."""

INPUT_LARGEST = {"fp16": float(np.finfo(np.float16).max)}
"""The largest operand in the precision that was asked for, where that is less than float32's."""


STATED_SIZES = (10, 1000)
"""Sizes of errors in floats, in multiples of the tolerance, that `Verification.escape_probability` is about."""


@dataclass(frozen=True)
class Sample:
    """Rows of C that were drawn at random and computed anew, over all columns."""

    drawn: int
    rows: int
    """C's."""
    every_tile: bool
    """Whether one was drawn of each row of tiles."""

    @property
    def chance_to_escape(self) -> float:
        """That of an error in a single row of C."""
        return 1 - self.drawn / self.rows if self.rows else 0.0

    def __str__(self) -> str:
        if self.drawn == self.rows:
            return "every element was computed anew"
        # The chance to be seen: that to escape is rounded to 1 where few of many rows are drawn, which says less.
        seen = f"in a single row is seen with a chance of {self.drawn / self.rows:.2g}"
        tiles = "in all rows of a tile is seen, one " if self.every_tile else ""
        return f"{self.drawn} of {counted(self.rows, 'row')}, drawn at random, computed anew: an error {tiles}{seen}"


@dataclass(frozen=True)
class Verification:
    """The outcome of the check of one product.

    Where a row of op(A) or a column of op(B) holds NaN, all of that row or column of C must be NaN, and where it holds
    infinity, nothing there may be a number: each of these elements is checked for that, and all others are compared as
    usual.

    Not seen: which of the two infinities, or NaN, C holds where a factor's infinity decides; and what it holds where a
    row's sum over a group of columns (at least a quarter of C's, in whole chunks) may rightly have overflowed. Both are
    counted in ``unchecked``.

    In floats a row of C may deviate, over the columns of a group, by ``tolerance`` times the scale of its sum there.
    The scale is about sqrt(sum over l and j of abs(a_il b_lj)²): for factors of random signs the norm of C's own
    elements there. It is larger where factors are all alike, where numbers underflow, and where k is short and a
    float64 C wide. With which chance larger errors escape says ``chance_to_escape``; each term, and the proofs, are in
    docs/verification.md.

    Integers are compared modulo 2 to the power of ``modulus_bits``. A single wrong element in a row never escapes, and
    any other error as ``chance_to_escape`` says.
    """

    passed: bool
    conclusive: bool
    """Whether anything could be compared; if not, ``passed`` is false and means nothing."""
    rounds: int
    largest_error: float
    """The largest deviation, in units of its own scale; for integers the number of sums that differ."""
    tolerance: float
    """The limit of ``largest_error``; 0 for integers."""
    modulus_bits: int | None
    """The bits of C's integers, modulo 2 to the power of which everything was compared exactly; None for floats."""
    unchecked: int
    """Elements of C that infinity or overflow kept from being compared."""
    worst: tuple[int, int, int] | None
    """Row of C, and first and last + 1 column, where the largest deviation was found, for integers the first one; None
    where there is none. The columns are those of the group for floats, and the first and last wrong one for
    integers."""
    seconds: float
    special_rows: int = 0
    """Rows of op(A) that hold NaN or infinity, which decide what those of C hold."""
    special_columns: int = 0
    """The same for columns of op(B)."""
    cause: str = ""
    """Why it failed, where that is known: numbers where NaN or infinity leaves none, or an operand too large for the
    precision."""
    wrong: tuple[tuple[int, int, int, int], ...] = ()
    """First and last + 1 row and column of each wrong block, where blocks were asked for (`locate.py`)."""
    sampled: Sample | None = None
    """Where each element is formed of the pairs of numbers that are both there, which no vector proves: the rows of C
    that were computed anew (`pairs.py`). None: all of C was checked."""

    def chance_to_escape(self, size: float) -> float:
        """The most that the chance can be that an error in C passes so many rounds.

        size: of the error, in multiples of what its sum may deviate by (``tolerance`` times the scale). The error is
        the vector of the differences between a row of C and the exact product, over the columns of a group; its size is
        the Euclidean norm of that, of complex numbers the norm of the real or of the imaginary parts, whichever is
        larger. Of errors in many rows and groups the largest counts. 1 for errors up to the tolerance. Any error in
        integers counts alike, whatever its size. Where rows are ``sampled``, the chance is that of an error in one row
        alone, of an element at least; one in all rows of a tile does not escape.
        """
        if self.sampled is not None:
            return self.sampled.chance_to_escape if size > 1 else 1.0
        return chance_to_escape(self.rounds, self.modulus_bits is not None, size)

    @property
    def escape_probability(self) -> dict[int, float]:
        """``chance_to_escape`` by size: of 10 and 1000 times the tolerance for floats; for integers, which have none,
        of 0, which stands for any error."""
        sizes = STATED_SIZES if self.modulus_bits is None else (0,)
        return {size: self.chance_to_escape(size) for size in sizes}

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "escape_probability": self.escape_probability}

    def __str__(self) -> str:
        if not self.conclusive:
            return "verification could compare nothing: every element meets infinity, or may overflow"
        exact = self.modulus_bits is not None
        wrong = int(self.largest_error) if exact else 0
        measure = (
            f"{counted(wrong, 'sum')} differ{'s' * (wrong == 1)} modulo 2^{self.modulus_bits}"
            if exact
            else f"largest error {self.largest_error:.3g} of {self.tolerance:.3g} allowed"
        )
        rest = (
            f", {counted(self.unchecked, 'element')} met infinity or may overflow, and"
            f" {'was' if self.unchecked == 1 else 'were'} not compared"
            if self.unchecked
            else ""
        )
        if self.passed and self.sampled is not None:
            some = " in part" if self.sampled.drawn < self.sampled.rows else ""
            return f"verified{some} in {self.seconds:.2f} s: {measure}{rest}; {self.sampled}"
        if self.passed:
            size, chance = next(iter(self.escape_probability.items()))
            error = "an error" if exact else f"one of {size} times that"
            escape = f"{error} escapes with a chance of at most {chance:.2g}"
            return f"verified in {counted(self.rounds, 'round')} and {self.seconds:.2f} s: {measure}{rest}; {escape}"
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
    a: StoredArray,
    b: StoredArray,
    c: zarr.Array[Any],
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    rounds: int = 2,
    precision: str = "full",
    listener: Listener = log_notices,
    cuts: tuple[int, ...] = (),
    block_rows: int = 0,
    fused: Fused = NOT_FUSED,
    sums: np.dtype | None = None,
    before: zarr.Array[Any] | None = None,
) -> Verification:
    """Check that C (m × n) = op(A) (m × k) op(B) (k × n), all three stored, by tasks on the client's workers.

    ``rounds`` is as `config.get` allows for ``verify-rounds``; ``cuts`` and ``block_rows`` as `draw_probe` has them.
    ``fused`` is what else C was made by, of sums of the dtype ``sums``, and ``before`` what it held, where that is
    added.

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
    left: Any = StoredSide(a, transpose_a)
    right: Any = StoredSide(b, transpose_b)
    result = StoredSide(c, False)
    check_shapes(c, left.shape, right.shape)
    k, n = right.shape
    dtype = c.dtype.newbyteorder("=")
    made = None
    if fused:
        made = fused_product((a, b), (transpose_a, transpose_b), fused, dtype, sums or dtype, before)
        left, right, k = made.left, made.right, made.left.shape[1]
    else:
        check_plain(a, b, c, precision)
    units = as_stored_matrix(b, transpose=transpose_b).unit[1], as_stored_matrix(c).unit[1]
    probe = draw_probe(n, k, dtype, rounds, units[1], cuts, block_rows)
    at_once = max(threads_of(client, waiting=_waiting(listener)).values())
    right_step, left_step, step = (side.step(probe.line_nbytes, at_once) for side in (right, left, result))
    column_step = right.transposed.step(line_nbytes(1, 1, probe.dtype), at_once)
    found = check_sides(
        ClientTasks(client, listener),
        left,
        right,
        result,
        probe,
        dtype,
        precision,
        Steps(right_step, max(left_step, step), column_step, min(units)),
        listener,
        made,
    )
    seconds = time.perf_counter() - start
    listener(WorkDone("verify", seconds))
    return replace(found, rounds=rounds, seconds=seconds)


@dataclass(frozen=True)
class Steps:
    """How a check is cut into tasks."""

    right: int
    """Rows of B."""
    left: int
    """Rows of A and C."""
    columns: int
    """Columns of B, where a row of C is computed anew."""
    narrowest: int
    """Columns of the narrowest blocks that B and C are read in."""


def check_sides(
    tasks: Tasks,
    left: Side,
    right: Side,
    result: Side,
    probe: Probe,
    dtype: np.dtype,
    precision: str,
    steps: Steps,
    listener: Listener = log_notices,
    made: FusedProduct | None = None,
) -> Verification:
    """The outcome of the check that ``result``, of this dtype, is ``left`` (op(A)) times ``right`` (op(B)), wherever
    these lie and the tasks run. Rounds and seconds are left to the caller. made: where these are sides of it."""
    (m, k), n = left.shape, right.shape[1]
    empty = m * n == 0  # nothing to compare; where only k is 0 there is: C must be zeros
    right_rows = [] if empty else stretches(k, steps.right)
    left_rows = [] if empty else stretches(m, steps.left)
    nbytes = 0 if empty else sum(side.nbytes for side in (left, right, result))
    listener(WorkPlanned("verify", len(right_rows) + len(left_rows), 0, "panels", nbytes, 0))
    image = _Image.of_zeros(k, probe)
    special = _project_all(tasks, right, right_rows, probe, image, range(probe.group_count), 0)
    first = len(right_rows)
    if special.any():
        # Columns of op(B) that hold NaN or infinity would hide all others of their group: form its sums again without
        # them. Of groups that have no others, nothing is left.
        probe = replace(probe, left_out=special)
        some, whole = probe.special_groups(special)
        for group in (*some, *whole):
            image.clear(group)
        if some:
            listener(WorkPlanned("verify", 2 * first + len(left_rows), first, "panels", nbytes, 0))
            _project_all(tasks, right, right_rows, probe, image, some, first)
            first *= 2
    allowed = _allowed_of(image, k, dtype, precision, probe, steps.narrowest, made)
    outcomes = _compare_all(tasks, left, result, left_rows, image, allowed, probe, first)
    unchecked = sum(outcome.unchecked for outcome in outcomes)
    conclusive = empty or m * n > unchecked
    worst = max(outcomes, key=lambda outcome: (outcome.largest, -outcome.worst[0]), default=None)
    largest = 0.0 if worst is None else worst.largest
    where = worst.worst if worst is not None and worst.largest > 0 else None
    if probe.exact:
        largest = float(sum(outcome.largest for outcome in outcomes))
        if where is not None:
            where = _located(tasks, left, right, result, where, probe, steps.columns)
    cause = ""
    if any(outcome.strays for outcome in outcomes):
        cause = "there are numbers where NaN or infinity in a factor leaves none"
    if precision in INPUT_LARGEST and largest == math.inf:
        cause = _too_large(tasks, {"A": (left, left_rows), "B": (right, right_rows)}, precision) or cause
    return Verification(
        passed=bool(largest <= allowed.relative and conclusive),
        conclusive=conclusive,
        rounds=0,
        largest_error=largest,
        tolerance=allowed.relative,
        modulus_bits=probe.bits if probe.exact else None,
        unchecked=unchecked,
        worst=where,
        seconds=0.0,
        special_rows=sum(outcome.special_rows for outcome in outcomes),
        special_columns=int(np.count_nonzero(special)),
        cause=cause,
        wrong=_blocks_of(outcomes, probe, m),
    )


def _blocks_of(outcomes: Sequence[Outcome], probe: Probe, m: int) -> tuple[tuple[int, int, int, int], ...]:
    """As `Verification.wrong`."""
    found = sorted({place for outcome in outcomes for place in outcome.wrong})
    rows = probe.block_rows
    return tuple(
        (row * rows, min((row + 1) * rows, m), probe.cuts[group], probe.cuts[group + 1])
        for row, group in found
    )


def stretches(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def find_damaged(
    client: Client,
    c: zarr.Array[Any],
    regions: Iterable[tuple[slice, slice]],
    *,
    listener: Listener = log_notices,
) -> list[int]:
    """The places, in ascending order, of those regions of C with a chunk that cannot be decoded."""
    calls = ((c, region) for region in regions)
    with closing(ClientTasks(client, listener).run(_is_damaged, calls, (), 0, "damaged")) as found:
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


class Tasks(Protocol):
    """What runs the tasks of a check."""

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

    def finished(self, index: int, side: Side, rows: slice) -> None:
        """Tell the listener that these rows are done."""


class ClientTasks:
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
        options: dict[str, Any] = {"key": f"{self._run}-{name}", "waiting": self._waiting, "lost": self._lost}
        if nbytes > SENT_NBYTES:  # long vectors go to each worker once, not along with each task
            return run_sent(self._client, function, calls, values, **options)
        return run_bounded(self._client, function, ((*call, *values) for call in calls), **options)

    def finished(self, index: int, side: Side, rows: slice) -> None:
        nbytes = side.nbytes * (rows.stop - rows.start) // max(1, side.shape[0])
        self._listener(UnitDone("verify", index, "", 0.0, nbytes, 0, {}))


@dataclass(frozen=True)
class _Image:
    """B times the probe, and what is measured of B on the way."""

    thin: np.ndarray
    """(groups × vectors) × k: B x of every group and vector, one a row as the loops read them."""
    norms: np.ndarray
    """(groups + 1) × k, float64: norms of B's rows by group, and a last row of ones, which gives the norms of A's rows;
    empty for integers."""
    column_squares: np.ndarray
    """For each group, float64: an upper bound of the sum of |element|² in any of its columns."""

    @classmethod
    def of_zeros(cls, k: int, probe: Probe) -> _Image:
        groups = 0 if probe.exact else probe.group_count
        norms = np.zeros((groups + 1 if groups else 0, k))
        norms[groups:] = 1
        thin = np.zeros((len(probe.vectors) * probe.group_count, k), probe.dtype)
        return cls(thin, norms, np.zeros(groups))

    @property
    def nbytes(self) -> int:
        return self.thin.nbytes + self.norms.nbytes

    def clear(self, group: int) -> None:
        """Forget what is known of a group of floats."""
        vectors = len(self.thin) // len(self.column_squares)
        self.thin[vectors * group : vectors * (group + 1)] = 0
        self.norms[group] = 0
        self.column_squares[group] = 0


def _project_all(
    tasks: Tasks,
    right: Side,
    pieces: Sequence[slice],
    probe: Probe,
    image: _Image,
    groups: Sequence[int],
    first: int,
) -> np.ndarray:
    """Add B times the probe for these groups, its rows in these pieces, to the image. What B's columns hold, uint8, as
    far as the probe does not know. ``first`` is the first piece's number for the listener."""
    special = np.zeros(right.shape[1], np.uint8)
    vectors, measured = len(probe.vectors), len(image.column_squares)
    calls = ((rows,) for rows in pieces)
    values = right, probe, tuple(groups)
    nbytes = probe.vectors.nbytes + right.sent_nbytes
    with closing(tasks.run(_project, calls, values, nbytes, "b")) as projections:
        for place, sums in projections:
            for group in groups:
                own = slice(vectors * group, vectors * (group + 1))
                image.thin[own, pieces[place]] = sums.thin[:, own].T
                if measured:
                    image.norms[group, pieces[place]] = sums.norms[:, group]
            with np.errstate(all="ignore"):  # NaN and infinity pass through
                np.add(image.column_squares, sums.column_squares, out=image.column_squares)
            if sums.special is not None:
                np.maximum(special, sums.special, out=special)
            tasks.finished(first + place, right, pieces[place])
    return special


def _allowed_of(
    image: _Image,
    k: int,
    dtype: np.dtype,
    precision: str,
    probe: Probe,
    narrowest: int,
    made: FusedProduct | None,
) -> Tolerances:
    """What C may deviate by if it is of this dtype and was computed in this precision."""
    norms = image.norms[:-1]
    with np.errstate(all="ignore"):
        group_norms = np.sqrt(np.einsum("gl,gl->g", norms, norms))
    widest = max((stop - start for start, stop in probe.groups()), default=0)
    column_norms = np.sqrt(image.column_squares)
    if made is None:
        return tolerances(k, dtype, precision, widest, narrowest, column_norms, group_norms)
    return tolerances(
        made.terms, dtype, precision, widest, narrowest, column_norms, group_norms, made.compute, made.gain
    )


def _located(
    tasks: Tasks,
    left: Side,
    right: Side,
    result: Side,
    worst: tuple[int, int, int],
    probe: Probe,
    step: int,
) -> tuple[int, int, int]:
    """The first and last + 1 wrong column of the row of integers that ``worst`` names, computed anew."""
    row, first, stop = worst
    calls = ((row, columns) for columns in stretches(result.shape[1], step))
    values = left, right, result, probe
    nbytes = probe.vectors.nbytes + left.sent_nbytes + right.sent_nbytes + result.sent_nbytes
    with closing(tasks.run(_wrong_columns, calls, values, nbytes, "row")) as found:
        wrong = [column for _, columns in found for column in columns]
    return (row, min(wrong), max(wrong) + 1) if wrong else (row, first, stop)


def _compare_all(
    tasks: Tasks,
    left: Side,
    result: Side,
    pieces: Sequence[slice],
    image: _Image,
    allowed: Tolerances,
    probe: Probe,
    first: int,
) -> list[Outcome]:
    """Compare C x with A (B x), their rows in these pieces; ``first`` is the first piece's number for the listener."""
    calls = ((rows,) for rows in pieces)
    values = left, result, image.thin, image.norms, allowed, probe
    nbytes = image.nbytes + probe.vectors.nbytes + left.sent_nbytes + result.sent_nbytes
    found: list[Outcome] = []
    with closing(tasks.run(_compare, calls, values, nbytes, "a")) as outcomes:
        for place, outcome in outcomes:
            found.append(outcome)
            tasks.finished(first + place, left, pieces[place])
    return found


def _project(rows: slice, right: Side, probe: Probe, groups: Sequence[int]) -> Sums:
    """`project`, with the side among what is sent once where that is large: vectors come with it."""
    return project(right, rows, probe, groups)


def _compare(rows: slice, left: Side, result: Side, *values: Any) -> Outcome:
    """`compare`, with the sides among what is sent once where that is large: a fork carries all that was written to
    it."""
    return compare(left, result, rows, *values)


def _wrong_columns(
    row: int, columns: slice, left: Side, right: Side, result: Side, probe: Probe
) -> list[int]:
    """`wrong_columns`, in the same way."""
    return wrong_columns(left, right, result, row, columns, probe)


def _too_large(tasks: Tasks, factors: dict[str, tuple[Side, list[slice]]], precision: str) -> str:
    """A sentence about the factors that hold numbers too large for the precision, or an empty string. factors: each
    with its rows in pieces."""
    causes = []
    for role, (side, pieces) in factors.items():
        with closing(
            tasks.run(_largest, ((rows,) for rows in pieces), (side,), side.sent_nbytes, f"largest-{role}")
        ) as calls:
            most = max((found for _, found in calls), default=0.0)
        if most > INPUT_LARGEST[precision]:
            causes.append(f"{role}, {side.name}, holds {most:.6g}")
    if not causes:
        return ""
    return (
        f"{' and '.join(causes)}, where precision={precision!r} multiplies numbers of at most"
        f" {INPUT_LARGEST[precision]:g}: scale that, or use precision='bf16' or 'tf32'"
    )


def _largest(rows: slice, side: StoredSide | JoinedSide) -> float:
    return side.largest(rows)


def check_shapes(c: zarr.Array[Any], left: tuple[int, int], right: tuple[int, int]) -> None:
    """Raise ShapeError where C cannot be the product of factors of these sides."""
    (m, k), (k_right, n) = left, right
    if k != k_right or c.shape != (m, n):
        raise ShapeError(
            f"{name_of(c)} is {c.shape[0]} × {c.shape[1]}; op(A) {m} × {k} by op(B) {k_right} × {n}"
            f" can only give {m} × {n} with equal inner sides"
        )


def no_product_of(role: str, factor: StoredArray, c: zarr.Array[Any]) -> str:
    """What is wrong where C's dtype is none that a product of this factor has, in words."""
    return (
        f"{role}: {name_of(factor)} holds {factor.dtype.name}, and no product of that is {c.dtype.name}, which"
        f" {name_of(c)} holds; give the factors that it is the product of, or multiply anew"
    )


def check_plain(a: StoredArray, b: StoredArray, c: zarr.Array[Any], precision: str) -> None:
    """Raise OptionError for a precision that is not for C's dtype, and DTypeError for factors that C's kind cannot
    hold: sums are formed in that kind, so that floats would lose their fractions in integers, and a wrong C could
    pass."""
    for role, factor in (("A", a), ("B", b)):
        # Integers may be of any width: they are compared modulo C's.
        integers = factor.dtype.kind in "iu" and c.dtype.kind in "iu"
        if not integers and not np.can_cast(factor.dtype, c.dtype, "same_kind"):
            raise DTypeError(no_product_of(role, factor, c))
    check.precision(precision, c.dtype.newbyteorder("="))
