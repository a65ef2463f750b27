"""The check of a search among the items of one matrix, begun while a GPU searches: its host's cores have nothing else
to do, and the items in memory.

The sampled items are compared with those that a task compares on its GPU (`check`), and the nearest of each are kept:
one more than it is asked for, so that the nearest of those that were not reported is among them, and some that rounding
may put in another order. What is reported is then looked up there. Where something is not there, it may be wrong: then
the sample is compared once more, as that of any other search, which says what is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from tilewright.kernels.cpu.loops import blocks
from tilewright.kernels.neighbours.ranges import Ranges
from tilewright.kernels.neighbours.sampled import keep_nearest
from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline.neighbours.band_words import WordsPlace
from tilewright.pipeline.neighbours.check import (
    NeighbourCheck,
    Part,
    Reported,
    Sampled,
    allowance_of,
    judged,
    keys_of,
    sample_of,
    surely,
)
from tilewright.pipeline.neighbours.tasks import Candidates, Found, Work, find_in_band
from tilewright.pipeline.reduce import end_if_given_up

SPARE = 16
"""Of each item so many more are kept."""
PARTS, PIECE_ITEMS = 4, 2**14
"""Parts of a task's items for each thread, and the items that are compared before it is asked whether to go on."""
MOST_NEIGHBOURS = 128
"""Of more that are asked for, sorting out the nearest would take as long as the products."""


def begins_early(work: Work) -> bool:
    """Whether the check of a search is begun by its tasks."""
    return work.mutual and work.k is not None and work.k <= MOST_NEIGHBOURS


def find_and_sample(
    work: Work, first: int, stop: int, place: WordsPlace | None = None
) -> tuple[Found, dict[str, float]]:
    """`find_in_band`, and meanwhile the candidates of ``work.sampled`` among these items."""
    given_up = end_if_given_up()
    found: list[Candidates] = []

    def beside(items: np.ndarray) -> None:
        begin = time.perf_counter()
        sampled = sample_of(work, work.sampled, given_up)
        one = candidates_in(work, sampled, items, first, given_up)
        found.append(replace(one, seconds=time.perf_counter() - begin))

    result, stages = find_in_band(work, first, stop, place, beside)
    return replace(result, candidates=found[0]), stages


def candidates_in(
    work: Work, sampled: Sampled, items: np.ndarray, first: int, given_up: Callable[[], None]
) -> Candidates:
    """The nearest of some items, (count, elements), to each of the sampled ones, in double precision.

    items: as a search takes them (`tasks.searched_items`). first: the number of the first of them. given_up: raises
    where nobody needs them any more.
    """
    assert work.k is not None
    wanted = work.k + 1 + SPARE
    mine, allowance = sampled.part(slice(0, work.width)), allowance_of(work)
    if work.metric == "cosine":
        mine, _ = Ranges(len(sampled), work.sums).take(mine)

    def look(part: slice) -> tuple[np.ndarray, np.ndarray]:
        # One more, since an item is found among others, too.
        columns = np.full((len(sampled), wanted + 1), -1)
        least = np.full(columns.shape, -np.inf)
        for piece in blocks(part.stop - part.start, PIECE_ITEMS):
            given_up()
            here = slice(part.start + piece.start, part.start + piece.stop)
            keep_nearest(
                mine,
                items[here],
                columns,
                least,
                first=first + here.start,
                metric=work.metric,
                allowance=allowance,
            )
        return columns, least

    threads = max(1, work.threads - 1)  # one core starts what the GPU does
    step = max(1, ceil_div(len(items), PARTS * threads))
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(look, blocks(len(items), step)))
    columns, least = (np.concatenate(each, axis=1) for each in zip(*found, strict=True))
    order = np.lexsort((columns, -least))[:, : wanted + 1]
    columns = np.take_along_axis(columns, order, axis=1)
    for row in np.flatnonzero((columns < 0).any(1)):
        # Of an item whose keys are not known to be finite a search reports the first ones.
        others = np.setdiff1d(np.arange(first, first + min(len(items), columns.shape[1])), columns[row])
        free = np.flatnonzero(columns[row] < 0)[: len(others)]
        columns[row, free] = others[: len(free)]
    return _with_keys(work, sampled, items, first, columns)


def _with_keys(
    work: Work, sampled: Sampled, items: np.ndarray, first: int, columns: np.ndarray
) -> Candidates:
    """Some of the items, ``columns`` of each of the sampled ones (-1: none), with their keys."""
    some, there = np.unique(columns[columns >= 0]), columns >= 0
    if not len(some):
        return Candidates(columns, *np.full((2, *columns.shape), np.nan))
    near = items[some - first]
    keys, allowed = keys_of(work, sampled, lambda elements: near[:, elements], len(some))
    places = np.searchsorted(some, np.maximum(columns, some[0]))
    keys, allowed = (np.take_along_axis(each, places, axis=1) for each in (keys, allowed))
    if work.exclude_self:
        there &= columns != np.array(work.sampled, np.int64)[:, None]
    keys[~there] = np.nan
    return Candidates(columns, keys, allowed)


def nearest_of(parts: Sequence[Candidates]) -> Candidates:
    """The nearest of all candidates, as many of each sampled item as a part has: by the least that their keys can be,
    of which NaN and what is not known to be finite come last, and of equal ones by their numbers."""
    wanted = max(part.keys.shape[1] for part in parts)
    seconds = sum(part.seconds for part in parts)
    all_of_them = [
        np.concatenate([getattr(part, name) for part in parts], axis=1)
        for name in ("columns", "keys", "allowed")
    ]
    if len(parts) > 1:
        order = np.argsort(all_of_them[0], axis=1)
        all_of_them = [np.take_along_axis(each, order, axis=1) for each in all_of_them]
    columns, keys, allowed = all_of_them
    rows, count = keys.shape
    if count > wanted:
        least = surely(keys, allowed)
        bar = np.partition(least, count - wanted, axis=1)[:, count - wanted, None]
        above, at_bar = least > bar, least == bar
        at_bar &= np.cumsum(at_bar, axis=1) <= wanted - above.sum(1, keepdims=True)
        best = above | at_bar
        columns, keys, allowed = (each[best].reshape(rows, wanted) for each in (columns, keys, allowed))
    return Candidates(columns, keys, allowed, seconds)


def check_early(work: Work, reported: Sequence[Reported], candidates: Candidates) -> NeighbourCheck | None:
    """What the candidates of the sampled items, in the same order, say of what was reported of them; None where they do
    not say it is right.

    candidates: of all items of B.
    """
    begin = time.perf_counter()
    others = np.full(len(reported), -np.inf)
    at = []
    for number, report in enumerate(reported):
        columns, keys, allowed = (
            each[number] for each in (candidates.columns, candidates.keys, candidates.allowed)
        )
        order = np.argsort(columns)
        there = np.flatnonzero(report.columns >= 0)
        places = np.searchsorted(columns[order], report.columns[there])
        places = order[np.minimum(places, len(order) - 1)] if len(order) else places
        if len(there) and (not len(order) or (columns[places] != report.columns[there]).any()):
            return None
        at.append((number, there, keys[places], allowed[places]))
        least = surely(keys, allowed)
        least[places] = -np.inf
        others[number] = least.max(initial=-np.inf)
    seconds = candidates.seconds + time.perf_counter() - begin
    check = judged(work, reported, Part(others, at), seconds)
    return check if check.passed else None
