"""The nearest of rows among themselves on a GPU, each pair computed once: of a product by its own transpose, the half.

Rows are taken in stages that grow with what came before them. A stage's rows are compared with all rows before them and
with each other; what reaches the bound of either row comes into that row's list. For the rows of a stage spans of
columns grow as in `device.Nearest`; to the rows before them the stage is one span. So to each row the others come in
the order of their numbers, and of equal ones the first are kept.

Bounds begin with what some thousand rows, spread over all, say: rows of a late stage would otherwise let through much
of what came before. Where lists were too short all the same, rows lie in the order of what they are near, as those of
one class after those of another, and the search begins anew with a copy of them in no order. What is too short then is
so since many are equal: it is multiplied once more; and where that does not help, there is no answer, and each row is
compared with all (`device.Nearest`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tilewright.kernels.choices import PrecisionName
from tilewright.kernels.gemm.hopper.wgmma_launch import Kept, launch_selection
from tilewright.kernels.gpu.device_array import address, strided_view
from tilewright.kernels.gpu.streams import DEFAULT_STREAM
from tilewright.kernels.neighbours.capacity import WORD_NBYTES, capacity_of, kept_of, mutual_nbytes
from tilewright.kernels.neighbours.device import (
    STRETCH_ROWS,
    STRETCH_UNIT,
    TRIES,
    Nearest,
    _config,
    _empty,
    _Rows,
    _Stretch,
    _zeros,
    growing_spans,
    merge,
)
from tilewright.kernels.neighbours.order import MetricName, Neighbours
from tilewright.kernels.neighbours.words import neighbours_of, room_for
from tilewright.kernels.numbers import round_up

SAMPLE_ROWS = 2304
"""Rows of which the first bounds are made, or fewer: they are compared with all, which is computed once more."""
FIRST_ROWS = 64
"""Of the sample's first span, which bounds let all through; what follows it is a tile's width."""
SAMPLE_SHARE = 32
"""Of all rows the sample is at most one in so many."""
ATTEMPTS = (False, False), (True, False), (False, True)
"""Whether rows are shuffled, and whether the search goes on where lists were too short. In the order in which rows lie,
since what equals a bound is left out then; in no order, where all that are near a row may lie in one span; and, where
so many are equal that lists are too short as well, in their order to the end: what did not fit is multiplied again."""
_Range = tuple[int, int]


def nearest_of_itself(
    a: Any,
    k: int,
    *,
    metric: MetricName,
    exclude_self: bool = False,
    factors: np.ndarray | None = None,
    precision: PrecisionName = "full",
    stream: Any = DEFAULT_STREAM,
    threads: int | None = None,
) -> Neighbours:
    """The k nearest rows of a matrix of each of its rows, as `device.Nearest` finds them, to the bit.

    a: (n, d), a Numba device array. On Hopper's tensor cores each pair is computed once, where `mutual_nbytes` says so;
    else, and where too many rows are equally near, twice. threads: as of `device.Nearest`.
    """
    options: dict[str, Any] = {
        "metric": metric,
        "factors": factors,
        "precision": precision,
        "stream": stream,
    }
    rows, kept = a.shape[0], kept_of(k, exclude_self)
    if mutual_nbytes(rows, kept):
        mutual = Mutual(a, k, exclude_self, **options)
        room: Neighbours | None = None

        def prepare() -> np.ndarray:
            # While the GPU works. A copy to memory that is not there yet takes thrice as long.
            nonlocal room
            room = room_for(rows, k, mutual.sums, metric)
            return np.full((rows, kept), 0, np.uint64)

        if mutual.pays and (words := mutual.find(target=prepare)) is not None:
            return neighbours_of(words[:, :k], mutual.sums, metric, threads, room)
        del mutual
    return nearest_with_all(a, k, exclude_self=exclude_self, threads=threads, **options)


def nearest_with_all(a: Any, k: int, **options: Any) -> Neighbours:
    """The same, where each row is compared with all. options: those of `device.Nearest`."""
    nearest = Nearest(a, k, **options)
    nearest.update(a, 0)
    return nearest.result()


def words_of_band(
    a: Any,
    first: int,
    k: int,
    *,
    metric: MetricName,
    exclude_self: bool = False,
    precision: PrecisionName = "full",
    stream: Any = DEFAULT_STREAM,
    target: Callable[[], np.ndarray | None] = lambda: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> np.ndarray | None:
    """What pairs of two rows, of which the later is no earlier than ``first``, say of the nearest of each row: words
    (rows of a, `capacity.kept_of`) (`words`), of which those of several bands together (`words.neighbours_of_bands`)
    are the nearest. None where they are to be looked for otherwise: too many rows are equally near, or no tensor core
    takes them.

    a: (n, d), a Numba device array of all rows up to the last of the band. target: called while the GPU works; gives
    what the words are put into and returned in, uint64 and C-contiguous, or None for a new array. meanwhile: called
    once, as soon as the GPU has work: what is to be done beside it may begin.
    """
    mutual = Mutual(a, k, exclude_self, metric=metric, factors=None, precision=precision, stream=stream)
    return mutual.find(first, target, meanwhile) if mutual.pays else None


class Mutual(_Rows):
    """Rows that are compared with each other."""

    def __init__(
        self,
        a: Any,
        k: int,
        exclude_self: bool,
        *,
        metric: MetricName,
        factors: np.ndarray | None,
        precision: PrecisionName,
        stream: Any,
    ) -> None:
        super().__init__(a, metric, metric, None, 0, factors, precision, stream)
        self._k, self._exclude_self = k, exclude_self
        self._kept = kept_of(k, exclude_self)
        self._capacity, self._growth = capacity_of(self._kept)

    @property
    def pays(self) -> bool:
        """Whether the tensor cores take the rows, of which then nothing but what is kept is written."""
        return self._a.planes is not None

    def find(
        self,
        first_row: int = 0,
        target: Callable[[], np.ndarray | None] = lambda: None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> np.ndarray | None:
        """The best of each row, words (rows, kept), by pairs whose later row is ``first_row`` or behind it; None where
        lists were too short, and still were when what did not fit was multiplied again. target: gives where they are to
        be put. meanwhile: as of `words_of_band`."""
        begin = functools.cache(meanwhile)
        band = first_row // STRETCH_UNIT * STRETCH_UNIT  # who merges bands counts no pair twice
        for shuffled, patient in ATTEMPTS:
            if shuffled and not self._has_room(self._a, WORD_NBYTES * self._capacity):
                continue
            found = self._find(band, target, begin, shuffled=shuffled, patient=patient)
            if found is not None:
                return found
        return None

    def _find(
        self,
        band: int,
        target: Callable[[], np.ndarray | None],
        begin: Callable[[], None],
        *,
        shuffled: bool,
        patient: bool,
    ) -> np.ndarray | None:
        """`find`, of bands that begin with whole tiles. shuffled: whether rows are taken in no order. patient: whether
        to go on where lists were too short before the last stage, which has most pairs."""
        held = len(self._scratch)
        rows, stream = self._a.rows.shape[0], self._stream
        side, names = self._arranged(self._a, band, shuffled)
        stretch = _Stretch(0, side, self._kept, self.number, stream, lines=4)
        stretch.bounds[3].copy_to_device(names, stream=stream)
        words = _empty((rows, self._capacity), np.uint64, stream)
        self._bound(stretch, words)
        merged = list(self._merged(band))
        flags = _zeros((2 * len(merged),), np.uint32, stream)
        before_last = next(place for place, (stage, _) in enumerate(merged) if stage == merged[-1][0])
        # In order, the columns to come are behind those that were seen: what equals a bound is too late.
        mode = 0 if shuffled else 1
        for number, (stage, span) in enumerate(merged):
            if number == before_last and number and not patient:
                begin()
                if flags.copy_to_host(stream=stream).any():
                    self._wait()
                    del self._scratch[held:]
                    return None
            if span is None:
                merge(stretch, words, flags, number, mode, stream, (0, stage[0]))
            else:
                self._compare(stretch, words, stage, *span)
                merge(stretch, words, flags, number, mode, stream, stage)
        begin()
        memory = target()
        lasts, firsts = flags.copy_to_host(stream=stream).astype(np.int64).reshape(2, -1)
        self._wait()
        short = [
            (stage, span, (2**32 - 1 - int(first), int(last)))
            for (stage, span), first, last in zip(merged, firsts, lasts, strict=True)
            if last
        ]
        found = None
        if not short or self._again(stretch, words, short):
            best = stretch.best
            if shuffled:  # the lists are empty
                best = strided_view(words, best.shape, best.strides)
                self._move(stretch.best, names, best, put=True)
            found = best.copy_to_host(memory, stream=stream)
            self._wait()
        del self._scratch[held:]
        return found

    def _merged(self, band: int) -> Iterator[tuple[_Range, _Range | None]]:
        """Stages, first row and last, each with its spans, first column and columns, one after the other; and then with
        None, where the lists of the rows before the stage are merged."""
        rows = self._a.rows.shape[0]
        start = band
        while start < rows:
            # Rows before the band know a sample alone, which admits all that are equal: few at first, for which lists
            # are long enough.
            stop = min(
                rows, start + max(self._capacity, round_up(self._growth * (start - band), STRETCH_UNIT))
            )
            for span in growing_spans(0, stop, self._kept):
                yield (start, stop), span
            if start:
                yield (start, stop), None
            start = stop

    def _again(
        self, stretch: _Stretch, words: Any, short: list[tuple[_Range, _Range | None, _Range]]
    ) -> bool:
        """Multiply once more what did not fit into the lists of some rows, from a first to a last one, of a stage and a
        span; whether it fits then.

        Of rows in some order a span can have all that are near one of its rows, and more than a list holds. By then the
        row has its best of those that the list did hold, and little is nearer. What equals a bound may come first now.
        """
        flags = _zeros((2,), np.uint32, self._stream)
        merge(stretch, words, flags, 0, 0, self._stream)
        for (start, stop), span, (first, last) in short:
            first, last = first // STRETCH_UNIT * STRETCH_UNIT, round_up(last, STRETCH_UNIT)
            # A row of the stage may lack what it shares with later rows: it is a column of theirs.
            rows = (max(start, first), stop) if span is not None else (start, stop)
            columns = span if span is not None else (first, min(last, start) - first)
            for _ in range(TRIES):
                flags.copy_to_device(np.zeros(2, np.uint32), stream=self._stream)
                self._compare(stretch, words, rows, *columns)
                merge(stretch, words, flags, 0, 0, self._stream, (0, stop))
                if not flags[:1].copy_to_host(stream=self._stream)[0]:
                    break
            else:
                return False
        return True

    def _bound(self, stretch: _Stretch, words: Any) -> None:
        """Set floors of the bounds by a sample; what a list lacks leaves them lower."""
        flags = _zeros((2,), np.uint32, self._stream)
        count = min(SAMPLE_ROWS, self._a.rows.shape[0] // SAMPLE_SHARE)
        sample = self._spread(stretch.side, count)
        edges = [0, FIRST_ROWS, STRETCH_UNIT]
        edges += [STRETCH_UNIT + sum(span) for span in growing_spans(STRETCH_UNIT, count, self._kept)]
        edges = [edge for edge in edges if edge < count] + [count]
        for first, stop in itertools.pairwise(edges):
            part = sample.part(first, stop - first)
            self._keep(stretch.side, part, stretch.bounds, words, self._capacity, first)
            merge(stretch, words, flags, 0, 1 if stop < count else 2, self._stream)

    def _compare(self, stretch: _Stretch, words: Any, rows: tuple[int, int], first: int, width: int) -> None:
        """Enqueue the products of a stage's rows and a span of those up to them."""
        right = stretch.side.part(first, width)
        for start in range(rows[0], rows[1], STRETCH_ROWS):  # the walk below a diagonal looks for its band
            left = stretch.side.part(start, min(STRETCH_ROWS, rows[1] - start))
            assert left.planes is not None
            assert right.planes is not None
            kept = Kept(
                address(words),
                self._capacity,
                True,
                address(stretch.bounds),
                address(right.factors),
                first,
                start,
                self._a.rows.shape[0],
            )
            config = _config(left.planes.kind, right.planes.kind, self._form, True)
            last = start - first - int(self._exclude_self)
            depth = left.rows.shape[1]
            launch_selection(config, left.planes, right.planes, kept, depth, self._stream, diagonal=last)
