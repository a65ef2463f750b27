"""A sample of items, drawn at random, is compared with all items of B once more: in float64, on the CPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tilewright.kernels.choices import PrecisionName
from tilewright.kernels.cpu.loops import blocks
from tilewright.kernels.neighbours.order import NO_INDEX, MetricName
from tilewright.kernels.neighbours.ranges import Ranges, multiply_by_powers
from tilewright.kernels.neighbours.sampled import Allowance, add_sampled_sums
from tilewright.kernels.numbers import ceil_div, counted
from tilewright.kernels.tolerance import tolerance, unit_roundoff
from tilewright.pipeline.events import Listener
from tilewright.pipeline.gram.options import axis_of
from tilewright.pipeline.neighbours.tasks import Work, held_sample, items_of
from tilewright.pipeline.reduce import Reduction, end_if_given_up, reduce_pieces
from tilewright.pipeline.store.arrays import is_plain, read_unit

if TYPE_CHECKING:
    from distributed import Client

CHECK = "check"
"""Its name in events."""
ROWS = 64
"""Items that are drawn, one of each of so many equal stretches: of faults in one item in twenty, 96 % are seen."""
STATED_SHARES = (0.01, 0.05, 0.2)
"""Shares of faulty items, with whose chance to escape the result comes."""
PART_NBYTES = 2**19
"""Of keys in double precision, at a time: what is made of them stays in a core's cache."""
STEPS, MOST_STEP = 2, 2**14
"""So many parts of whole items are read at once, and so many items at most."""
PANELS = 4
"""Tasks a thread."""
ROUNDINGS = 8
"""Of a value behind its sum, in units of roundoff, and of the square of a distance."""


@dataclass(frozen=True)
class NeighbourCheck:
    """What comparing a sample of items with all of B, in double precision, has shown."""

    passed: bool
    rows: int
    """Items that were drawn."""
    items: int
    """Of A."""
    compared: int
    """Neighbours, or pairs, of these items whose values were computed anew."""
    largest_error: float
    """The largest deviation of a value, in units of what rounding may make of it: up to 1 is well."""
    unchecked: int
    """Of them, those whose sums overflow the dtype, so that nothing can be compared."""
    cause: str
    """Why it failed."""
    seconds: float

    def chance_to_escape(self, share: float) -> float:
        """The chance that none of the items drawn is among a faulty share of all."""
        return float((1 - share) ** self.rows) if self.rows < self.items else 0.0

    @property
    def escape_probability(self) -> dict[float, float]:
        """`chance_to_escape`, by share."""
        return {share: self.chance_to_escape(share) for share in STATED_SHARES}

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {
            "escape_probability": {str(share): chance for share, chance in self.escape_probability.items()}
        }

    def __str__(self) -> str:
        if not self.passed:
            return f"check failed: {self.cause}"
        left = f"; {self.unchecked} overflow and were not compared" if self.unchecked else ""
        error = f"largest error {self.largest_error:.2g} of what rounding may make"
        if not self.compared:
            error = "no pair was found of them, so that no value was compared"
        elif self.compared == self.unchecked:
            error = "no value was compared"
        return f"verified in {self.seconds:.2f} s: {self.sample}; {error}{left}"

    @property
    def sample(self) -> str:
        """How many items were compared, and what that can miss, in words."""
        if self.rows == self.items:
            return f"all {counted(self.items, 'item')} compared with all of B anew"
        return (
            f"{self.rows} of {counted(self.items, 'item')}, drawn at random, compared with all of B anew: faults in 5 %"
            f" of items escape with a chance of {self.chance_to_escape(0.05):.2g}"
        )


class Reported(NamedTuple):
    """What a search says of one item."""

    item: int
    columns: np.ndarray
    """Items of B."""
    values: np.ndarray


def reported_in(arrays: Mapping[str, np.ndarray], first: int, item: int) -> Reported:
    """What arrays, as a search finds them, say of one of their items. first: the item of the first row of neighbours;
    pairs, in order, say themselves."""
    if "indices" in arrays:
        return Reported(item, arrays["indices"][item - first], arrays["values"][item - first])
    begin, end = np.searchsorted(arrays["row"], [item, item + 1])
    return Reported(item, arrays["column"][begin:end], arrays["value"][begin:end])


def out_of_order(columns: np.ndarray, values: np.ndarray, metric: MetricName) -> np.ndarray:
    """Which neighbours, (..., k - 1), ought not to follow the one before, of ``columns`` and ``values``, both (..., k).
    Roots may be equal that come of different squares: of them nothing is known."""
    before, after = values[..., :-1], values[..., 1:]
    if metric == "l2":
        return after < before
    ties = (after == before) & np.isfinite(after) & (columns[..., 1:] < columns[..., :-1])
    return (after > before) | ties


def drawn_items(m: int, seed: int | None = None, rows: int = ROWS) -> np.ndarray:
    """Items of A, ascending: one at random of each of so many stretches, or all where there are no more."""
    count = min(rows, m)
    edges = np.arange(count + 1) * m // max(count, 1)
    draw = np.random.default_rng(seed)
    return np.array([draw.integers(low, high) for low, high in itertools.pairwise(edges)], int)


@dataclass(frozen=True)
class Part:
    """What a stretch of B gives: of each item, the best signed key that was not reported, and the keys of those that
    were."""

    others: np.ndarray
    at: list[tuple[int, np.ndarray, np.ndarray, np.ndarray]]
    """Number of the item, places in its report, keys, and what rounding may make of each."""


def check_reported(
    client: Client, work: Work, reported: Sequence[Reported], threads: int, listener: Listener
) -> NeighbourCheck:
    """Compare. threads: tasks that run at a time."""
    begin = time.perf_counter()
    n = work.n
    step = max(1, min(n, ceil_div(n, PANELS * threads)))
    # Without items there is nothing to compare with B.
    ranges = [(start, min(start + step, n)) for start in range(0, n, step)] if reported else []
    reduction: Reduction[Part, Part] = Reduction(
        name=CHECK,
        chunk=recompute,
        identity=lambda: Part(np.full(len(reported), -np.inf), []),
        combine=lambda total, part: Part(np.fmax(total.others, part.others), total.at + part.at),
        commutative=True,
        lighter="run fewer tasks at once (threads_per_worker, in a profile)",
    )
    items = [(each.item, each.columns) for each in reported]
    row_nbytes = work.width * work.b.dtype.itemsize
    total = reduce_pieces(
        client,
        reduction,
        [(work, items, first, stop) for first, stop in ranges],
        [(stop - first) * row_nbytes for first, stop in ranges],
        listener,
    )
    return judged(work, reported, total, time.perf_counter() - begin)


def recompute(
    work: Work, items: Sequence[tuple[int, np.ndarray]], first: int, stop: int
) -> tuple[Part, dict[str, float]]:
    """What a task does: form the products of the sampled items with some of B, in double precision."""
    begin = time.perf_counter()
    sampled = sample_of(work, [item for item, _ in items])
    whole = work.depth >= work.width
    step = max(1, PART_NBYTES // (8 * len(items)))
    panel_step = min(MOST_STEP, step * STEPS) if whole else step
    given_up = end_if_given_up()

    def compare(panel: slice) -> list[Part]:
        given_up()
        start, stop = first + panel.start, first + panel.stop
        held = items_of(work.b, work.of, start, stop, check=given_up) if whole else None

        def some(part: slice, elements: slice) -> np.ndarray:
            if held is not None:
                return held[part, elements]
            begin, end = start + part.start, start + part.stop
            return items_of(work.b, work.of, begin, end, elements, check=given_up)

        return [
            _compared(
                work,
                items,
                *keys_of(work, sampled, partial(some, part), part.stop - part.start),
                start + part.start,
            )
            for part in blocks(stop - start, step)
        ]

    with ThreadPoolExecutor(work.threads) as pool:
        parts = [part for found in pool.map(compare, blocks(stop - first, panel_step)) for part in found]
    others = np.fmax.reduce([np.full(len(items), -np.inf), *(part.others for part in parts)])
    at = [each for part in parts for each in part.at]
    return Part(others, at), {"check": time.perf_counter() - begin}


def _compared(
    work: Work, items: Sequence[tuple[int, np.ndarray]], keys: np.ndarray, allowed: np.ndarray, start: int
) -> Part:
    """What keys of items of B say, from start on."""
    stop = start + keys.shape[1]
    least = surely(keys, allowed)
    at: list[tuple[int, np.ndarray, np.ndarray, np.ndarray]] = []
    for number, (item, columns) in enumerate(items):
        here = np.flatnonzero((columns >= start) & (columns < stop))
        if len(here):
            places = columns[here] - start
            at.append((number, here, keys[number, places], allowed[number, places]))
            least[number, places] = -np.inf
        if work.exclude_self and start <= item < stop:
            least[number, item - start] = -np.inf
        if work.once:
            least[number, : max(0, min(item + 1, stop) - start)] = -np.inf
    return Part(least.max(1, initial=-np.inf), at)


def surely(keys: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """The least that keys can be; minus infinity where that is not known."""
    with np.errstate(invalid="ignore"):  # of infinite sums nothing is sure
        least: np.ndarray = keys - allowed
    least[~np.isfinite(least)] = -np.inf
    return least


def sample_of(work: Work, items: Sequence[int], check: Callable[[], None] | None = None) -> Sampled:
    """The sampled items. Tasks of one process read them once, where whole items are read at a time. check: as of
    `items_of`."""
    return held_sample.panel(work.key, 0, lambda: Sampled(work, items, check))


class Sampled:
    """The sampled items, float64; kept where whole items are read at a time."""

    def __init__(self, work: Work, items: Sequence[int], check: Callable[[], None] | None = None) -> None:
        self._work, self._items, self._check = work, items, check
        whole = slice(0, work.width)
        self._whole = self._read(whole) if work.depth >= work.width else None

    def __len__(self) -> int:
        return len(self._items)

    def part(self, elements: slice) -> np.ndarray:
        """Some elements of each, float64."""
        return self._read(elements) if self._whole is None else self._whole[:, elements]

    def _read(self, elements: slice) -> np.ndarray:
        return _items(self._work, self._items, elements, self._check).astype(np.float64)


def keys_of(
    work: Work, items: Sampled, read: Callable[[slice], np.ndarray], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Keys of all pairs with some items of B, the larger the better, and what rounding may make of each: both (items,
    count). read: gives some elements of those items."""
    sums = np.zeros((len(items), count))
    of_a, of_b = np.zeros(len(items)), np.zeros(count)
    sizes_a, sizes_b = np.zeros(len(items)), np.zeros(count)
    ranges = Ranges(len(items), work.sums), Ranges(count, work.sums)
    with np.errstate(all="ignore"):
        for element in range(0, work.width, max(1, work.depth)):
            elements = slice(element, min(element + work.depth, work.width))
            a, b = items.part(elements), read(elements)
            if work.metric == "cosine":  # as the search has them, so that its rounding is judged
                (a, changed_a), (b, changed_b) = (
                    each.take(part) for each, part in zip(ranges, (a, b), strict=True)
                )
                _change((sums, of_a, sizes_a), changed_a)
                _change((sums.T, of_b, sizes_b), changed_b)
            squares_a, squares_b = np.einsum("ij,ij->i", a, a), np.zeros(count)
            add_sampled_sums(a, b, sums, squares_b)
            of_a += squares_a
            of_b += squares_b
            # No less than the sums of their elements' sizes, by Cauchy and Schwarz, and without a pass for each.
            sizes_a += np.sqrt(a.shape[1] * squares_a)
            sizes_b += np.sqrt(a.shape[1] * squares_b)
        lengths = np.sqrt(of_a)[:, None] * np.sqrt(of_b)[None, :]
        dtype, precision = _summed(work)
        # Twice: the sums here are rounded as well.
        allowed = 2 * tolerance(work.width, dtype, lengths, precision, sizes_a[:, None] + sizes_b[None, :])
        unit = unit_roundoff(dtype)
        if work.metric == "cosine":
            keys = np.where(lengths == 0, 0.0, sums / lengths)
            keys = np.where(np.isnan(sums), np.nan, keys)
            allowed = np.where(lengths == 0, 0.0, allowed / lengths) + ROUNDINGS * unit
        elif work.metric == "l2":
            both = of_a[:, None] + of_b[None, :]
            keys = -np.maximum(both - 2 * sums, 0)
            allowed = 2 * allowed + ROUNDINGS * unit * both
        else:
            keys = sums
        largest = np.finfo(dtype).max
        allowed = np.where(lengths * 2 > largest, np.inf, allowed)  # what the search could not sum
    if work.bound is not None and work.bound.farther:
        keys = -keys
    return keys, allowed


def _change(totals: tuple[np.ndarray, np.ndarray, np.ndarray], change: np.ndarray | None) -> None:
    """Multiply what was added up of items, (items, any), (items,) and (items,), by powers of two: sums of products,
    squares and sizes."""
    if change is None:
        return
    sums, squares, sizes = totals
    multiply_by_powers(sums, change[:, None])
    multiply_by_powers(squares, 2 * change)
    multiply_by_powers(sizes, change)


def allowance_of(work: Work) -> Allowance:
    """What `keys_of` allows, as a loop adds it up."""

    def bound(scale: float, size: float) -> float:
        dtype, precision = _summed(work)
        return 2 * float(tolerance(work.width, dtype, scale, precision, size))

    dtype, _ = _summed(work)
    offset = bound(0.0, 0.0)
    return Allowance(
        scale=bound(1.0, 0.0) - offset,
        offset=offset,
        per_size=bound(0.0, 1.0) - offset,
        rounding=ROUNDINGS * unit_roundoff(dtype),
        largest=float(np.finfo(dtype).max),
    )


def _summed(work: Work) -> tuple[np.dtype, PrecisionName]:
    """In what the search forms sums, and the precision of their products."""
    dtype = np.dtype(np.float64) if work.sums.kind == "i" else work.sums
    return dtype, work.precision if work.sums == np.float32 else "full"


def _items(work: Work, items: Sequence[int], elements: slice, check: Callable[[], None] | None) -> np.ndarray:
    """The sampled items, or a part of each; those that lie in one stored piece are read at once, with all between them,
    where that has to be decoded."""
    unit = 1 if work.of == "rows" and is_plain(work.a) else read_unit(work.a)[axis_of(work.of)]
    found = [np.zeros((0, elements.stop - elements.start), work.a.dtype)]
    for _, group in itertools.groupby(items, lambda item: item // unit):
        here = list(group)
        block = items_of(work.a, work.of, here[0], here[-1] + 1, elements, check=check)
        found.append(block[np.array(here) - here[0]])
    return np.concatenate(found)


def judged(work: Work, reported: Sequence[Reported], total: Part, seconds: float) -> NeighbourCheck:
    keys = [np.full(len(each.columns), np.nan) for each in reported]
    allowed = [np.full(len(each.columns), np.nan) for each in reported]
    for number, places, its_keys, its_allowed in total.at:
        keys[number][places], allowed[number][places] = its_keys, its_allowed
    causes: list[str] = []
    worst, compared, unchecked = 0.0, 0, 0
    for number, each in enumerate(reported):
        found = _Judged(work, each, keys[number], allowed[number], float(total.others[number]))
        causes += found.causes()[:1]
        worst = max(worst, found.worst)
        compared += int(found.there.sum())
        unchecked += found.unchecked
    m = int(work.a.shape[0 if work.of == "rows" else 1])
    return NeighbourCheck(
        not causes, len(reported), m, compared, worst, unchecked, causes[0] if causes else "", seconds
    )


class _Judged:
    """What is wrong with the report of one item."""

    def __init__(
        self, work: Work, report: Reported, keys: np.ndarray, allowed: np.ndarray, others: float
    ) -> None:
        self._work, self._report, self._others = work, report, others
        self.there = report.columns != NO_INDEX
        self._keys, self._allowed = keys, allowed
        self.unchecked = int(np.isinf(allowed[self.there]).sum())
        self.worst = 0.0

    def causes(self) -> list[str]:
        report, there = self._report, self.there
        item, columns = report.item, report.columns[there]
        if len(np.unique(columns)) < len(columns):
            return [f"item {item} has one neighbour twice"]
        if self._work.exclude_self and item in columns:
            return [f"item {item} is its own neighbour"]
        stated = self._stated(report.values[there])
        keys, allowed = self._keys[there], self._allowed[there]
        if (nothing := np.isnan(keys) | np.isnan(stated)).any():
            place = int(np.flatnonzero(nothing)[0])
            return [f"item {item} and item {columns[place]} of B have no value, but are reported"]
        with np.errstate(all="ignore"):
            off = np.where(np.isinf(allowed), 0.0, np.abs(stated - keys) / np.maximum(allowed, 1e-300))
        off = np.where(stated == keys, 0.0, off)
        self.worst = float(off.max(initial=0.0))
        if self.worst > 1:
            place = int(off.argmax())
            cause = (
                f"item {item} and item {columns[place]} of B: the value {report.values[there][place]:.9g} is"
                f" {self.worst:.3g} times as far from the exact one as rounding may make it"
            )
            return [cause]
        with np.errstate(invalid="ignore"):
            most = keys + allowed
        return self._order(item, columns, most) + self._complete(item, most)

    def _stated(self, values: np.ndarray) -> np.ndarray:
        """The reported values as keys."""
        numbers = values.astype(np.float64)
        numbers = -(numbers**2) if self._work.metric == "l2" else numbers
        return -numbers if self._work.bound is not None and self._work.bound.farther else numbers

    def _order(self, item: int, columns: np.ndarray, most: np.ndarray) -> list[str]:
        if self._work.k is None:
            bar = self._bar
            if (most < bar).any():
                place = int(np.flatnonzero(most < bar)[0])
                return [f"item {item} and item {columns[place]} of B are not beyond the threshold"]
            return [] if (np.diff(columns) > 0).all() else [f"the pairs of item {item} are not in order"]
        values = self._report.values[self.there]
        wrong = out_of_order(columns, values, self._work.metric).any()
        return [f"the neighbours of item {item} are not in order"] if wrong else []

    def _complete(self, item: int, most: np.ndarray) -> list[str]:
        if self._work.k is None:
            return [f"item {item} lacks a pair beyond the threshold"] if self._others > self._bar else []
        last = most.min(initial=np.inf) if len(most) == self._work.k else -np.inf
        return [f"item {item} lacks a neighbour that is nearer"] if self._others > last else []

    @property
    def _bar(self) -> float:
        bound = self._work.bound
        assert bound is not None, "pairs have one"
        return float(-bound.key if bound.farther else bound.key)
