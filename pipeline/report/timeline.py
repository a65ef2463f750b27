"""When what was done in a run: a listener that records it, in memory that does not grow with the run, and the record.

What is recorded of each thread of each worker are the intervals in which it was busy. Of very many, those that are
close together become one, of which it is still known how long it was busy: nothing is lost but where in it.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.pipeline.events import (
    Caution,
    Event,
    Listener,
    Notice,
    Span,
    UnitDone,
    Waiting,
    WorkDone,
    WorkPlanned,
)
from tilewright.pipeline.plan.told import THREADS

MOST_INTERVALS = 8192
"""Of one thread of a worker, before close ones become one; each takes 24 bytes, and as much again meanwhile."""
LEAST_INTERVALS = 128
ALL_INTERVALS = 2**17
"""Of all threads of all workers, as far as each may have `LEAST_INTERVALS`."""

MOST_NOTICES = 500
"""Later ones are only counted."""
MOST_SAMPLES = 512
"""Of the memory of one worker, before two become one, their larger."""
ALL_SAMPLES = 2**15
LEAST_SAMPLES = 32

JSON_NUMBERS = 6000
"""About how many numbers of a timeline its JSON has: the more workers, the longer are the times that they are of."""
MOST_BINS = 120
LEAST_BINS = 12

NOBODY = -1
"""In place of a worker, of a tile that this run did not compute."""


@dataclass(frozen=True, eq=False)
class Busy:
    """When one thread of a worker was busy."""

    spans: int
    """How many intervals were told: panels, or tiles."""
    intervals: np.ndarray
    """Rows of begin, end (seconds since the epoch) and busy seconds in between, by begin. They may overlap; where the
    seconds are fewer than those from begin to end, they are several that were close together."""

    @property
    def seconds(self) -> float:
        """How long at least one thing was done."""
        return covered(self.intervals)

    def per_bin(self, edges: np.ndarray) -> np.ndarray:
        """Busy seconds between each two of these times, in seconds since the epoch: shorter than an interval, a bin has
        its share of that."""
        rows = united(self.intervals)
        if not len(rows):
            return np.zeros(len(edges) - 1)
        begin, end, busy = rows.T
        times = np.stack((begin, end), axis=1).ravel()
        before = np.concatenate(([0.0], np.cumsum(busy)))
        sums = np.stack((before[:-1], before[1:]), axis=1).ravel()
        return np.diff(np.interp(edges, times, sums))


def united(intervals: np.ndarray) -> np.ndarray:
    """Rows as `Busy.intervals` that do not overlap. What is busy in two of them counts once."""
    if not len(intervals):
        return intervals.reshape(0, 3)
    begin, end, busy = intervals[np.argsort(intervals[:, 0], kind="stable")].T
    until = np.maximum.accumulate(end)
    first = np.concatenate(([True], begin[1:] > until[:-1]))
    places = np.flatnonzero(first)
    last = np.concatenate((places[1:], [len(begin)])) - 1
    idle = np.add.reduceat(end - begin - busy, places)
    starts, stops = begin[places], until[last]
    return np.stack((starts, stops, np.maximum(0.0, stops - starts - idle)), axis=1)


def covered(intervals: np.ndarray | Iterable[tuple[float, float]]) -> float:
    """Seconds covered by at least one of these (begin, end) intervals, or rows as `Busy.intervals`."""
    rows = np.asarray(intervals if isinstance(intervals, np.ndarray) else list(intervals), np.float64)
    if not rows.size:
        return 0.0
    if rows.shape[1] == 2:
        rows = np.column_stack((rows, rows[:, 1] - rows[:, 0]))
    return float(united(rows)[:, 2].sum())


class Lane:
    """Takes in when one thread of a worker was busy. most: intervals that are told apart."""

    def __init__(self, most: int = MOST_INTERVALS) -> None:
        self._most = most
        self._new = array("d")
        self._rows = np.empty((0, 3))
        self.spans = 0

    def add(self, begin: float, end: float) -> None:
        self._new.extend((begin, end, end - begin))
        self.spans += 1
        if len(self._new) >= 3 * self._most:
            self._rows = self._within_bounds()
            self._new = array("d")

    def _all(self) -> np.ndarray:
        return np.concatenate((self._rows, np.array(self._new).reshape(-1, 3)))

    def _within_bounds(self) -> np.ndarray:
        """At most `most` rows. Gaps are closed among the older three quarters alone: what is told later may still lie
        in those of the rest."""
        rows = united(self._all())
        if (excess := len(rows) - self._most) <= 0:
            return rows
        begin, end, busy = rows.T
        gaps = (begin[1:] - end[:-1])[: 3 * len(rows) // 4]
        open_after = np.ones(len(rows), bool)
        open_after[np.argpartition(gaps, excess - 1)[:excess]] = False
        first = np.concatenate(([True], open_after[:-1]))
        return np.stack((begin[first], end[open_after], np.add.reduceat(busy, np.flatnonzero(first))), axis=1)

    def busy(self) -> Busy:
        rows = self._all()
        return Busy(self.spans, rows[np.argsort(rows[:, 0], kind="stable")])


@dataclass(frozen=True)
class Phase:
    """A stretch of a run."""

    name: str
    """The work's, as events have it (``matmul``, ``verify``, ``statistics``), or what is done before, between and
    after: ``opening``, ``between`` or ``publishing``."""
    begin: float
    """Seconds from the run's begin."""
    end: float


@dataclass(frozen=True)
class Said:
    """A notice."""

    seconds: float
    """From the run's begin."""
    kind: str
    """``notice``, ``caution`` or ``waiting``."""
    message: str


@dataclass(frozen=True, eq=False)
class Samples:
    """The memory of a worker over time, as its heartbeats told it."""

    times: np.ndarray
    """Seconds since the epoch."""
    host: np.ndarray
    """Bytes of its process; the most of those since the time before."""
    device: np.ndarray
    """Bytes of its GPU that are in use, by anyone; NaN where that is not known."""


class MemoryLog:
    """Takes in samples of a worker's memory."""

    def __init__(self, most: int = MOST_SAMPLES) -> None:
        self._most = most
        self._rows: list[tuple[float, float, float]] = []
        self._every, self._waiting = 1, 0

    def add(self, when: float, host: float, device: float) -> None:
        if self._waiting:
            self._rows[-1] = self._larger(self._rows[-1], (when, host, device))
        else:
            self._rows.append((when, host, device))
        self._waiting = (self._waiting + 1) % self._every
        if len(self._rows) >= self._most and not self._waiting:
            pairs = zip(self._rows[::2], self._rows[1::2], strict=True)
            self._rows = [self._larger(*pair) for pair in pairs]
            self._every *= 2

    @staticmethod
    def _larger(
        one: tuple[float, float, float], other: tuple[float, float, float]
    ) -> tuple[float, float, float]:
        return other[0], max(one[1], other[1]), float(np.fmax(one[2], other[2]))

    def samples(self) -> Samples:
        times, host, device = np.array(self._rows, np.float64).reshape(-1, 3).T
        return Samples(times, host, device)


@dataclass(frozen=True, eq=False)
class Timeline:
    """What was done in a run, by whom and when."""

    begin: float
    """Seconds since the epoch, as spans count."""
    seconds: float
    """How long it took, with what no span covers: planning before the first panel, publishing at the end."""
    lanes: Mapping[str, Mapping[str, Busy]]
    """For each worker that did anything, each of its threads (`told.THREADS`)."""
    workers: tuple[str, ...] = ()
    """In the order of ``computed_by``."""
    computed_by: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """For each tile, by its index, the number of the worker that stored it; `NOBODY`, where this run did not."""
    tile_seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Of one tile, from its first panel until it was stored: the least, the mean and the most."""
    phases: tuple[Phase, ...] = ()
    memory: Mapping[str, Samples] = field(default_factory=dict)
    notices: tuple[Said, ...] = ()
    untold: int = 0
    """Notices beyond `MOST_NOTICES`."""

    def tiles_by(self) -> dict[str, int]:
        """How many tiles each worker stored."""
        counts = np.bincount(self.computed_by[self.computed_by >= 0], minlength=len(self.workers))
        return {worker: int(count) for worker, count in zip(self.workers, counts, strict=True)}

    def bins(self) -> int:
        """How many stretches of the run its JSON tells apart."""
        lanes = sum(map(len, self.lanes.values()))
        return max(LEAST_BINS, min(MOST_BINS, JSON_NUMBERS // max(1, lanes)))

    def shares(self, worker: str, thread: str, bins: int) -> list[float]:
        """The share of the time that a thread was busy, in so many stretches of the run that are equally long."""
        edges = self.begin + np.linspace(0.0, self.seconds, bins + 1)
        width = self.seconds / bins
        found = self.lanes[worker][thread].per_bin(edges)
        return [round(float(share), 3) for share in found / width] if width > 0 else [0.0] * bins

    def to_json(self) -> dict[str, Any]:
        """``busy`` has shares of the time, in ``bins`` stretches of ``seconds``; all else is exact."""
        bins = self.bins()
        tiles = self.tiles_by()
        return {
            "begin": self.begin,
            "seconds": self.seconds,
            "phases": [vars(phase) for phase in self.phases],
            "bins": bins,
            "workers": {
                worker: {
                    "tiles": tiles.get(worker, 0),
                    "threads": {
                        name: {
                            "spans": busy.spans,
                            "seconds": busy.seconds,
                            "busy": self.shares(worker, name, bins),
                        }
                        for name, busy in threads.items()
                    },
                    "memory": self._memory_json(worker),
                }
                for worker, threads in self.lanes.items()
            },
            "tile_seconds": dict(zip(("least", "mean", "most"), self.tile_seconds, strict=True)),
            "notices": [vars(said) for said in self.notices],
            "untold": self.untold,
        }

    def _memory_json(self, worker: str) -> dict[str, list[Any]]:
        samples = self.memory.get(worker)
        if samples is None:
            return {"seconds": [], "host_nbytes": [], "device_nbytes": []}
        return {
            "seconds": [round(float(when - self.begin), 2) for when in samples.times],
            "host_nbytes": [int(nbytes) for nbytes in samples.host],
            "device_nbytes": [None if np.isnan(nbytes) else int(nbytes) for nbytes in samples.device],
        }


class Recorder:
    """A listener that records a run, and hands every event on to another.

    ``work``: the events whose units are tiles; ``threads``: the stages whose spans are recorded. It is told the memory
    of workers by `heard`, on another thread."""

    def __init__(
        self,
        listener: Listener,
        work: str = "matmul",
        clock: Callable[[], float] = time.time,
        threads: Collection[str] = tuple(THREADS),
    ) -> None:
        self._listener = listener
        self._work = work
        self._threads = threads
        self._clock = clock
        self.begin = clock()
        self._lanes: dict[str, dict[str, Lane]] = {}
        self._numbers: dict[str, int] = {}
        self._computed_by = np.empty(0, np.int32)
        self._tiles = [0, 0.0, float("inf"), 0.0]  # count, sum, least, most
        self._running: dict[str, float] = {}
        self._phases: list[Phase] = []
        self._memory: dict[str, MemoryLog] = {}
        self._listening = threading.Lock()
        self._notices: list[Said] = []
        self._untold = 0

    @classmethod
    def of(cls, listener: Listener) -> Recorder:
        """The listener, if it records, or one that does and hands on to it."""
        return listener if isinstance(listener, cls) else cls(listener)

    def __call__(self, event: Event) -> None:
        if isinstance(event, UnitDone):
            self._add(event)
        elif isinstance(event, WorkPlanned):
            self._running[event.name] = self._clock()
            if event.name == self._work and len(self._computed_by) != event.total:
                self._computed_by = np.full(event.total, NOBODY, np.int32)  # of the last plan alone
                self._tiles = [0, 0.0, float("inf"), 0.0]
        elif isinstance(event, WorkDone):
            begin = self._running.pop(event.name, None)
            if begin is not None:
                self._phases.append(Phase(event.name, begin - self.begin, self._clock() - self.begin))
        elif isinstance(event, Notice):
            self._say(event)
        self._listener(event)

    def _say(self, event: Notice) -> None:
        if len(self._notices) >= MOST_NOTICES:
            self._untold += 1
            return
        kind = (
            "caution" if isinstance(event, Caution) else "waiting" if isinstance(event, Waiting) else "notice"
        )
        self._notices.append(Said(self._clock() - self.begin, kind, event.message))

    def _add(self, event: UnitDone) -> None:
        for span in event.spans:
            if span.stage in self._threads:
                self._span(span)
        if event.name == self._work and event.index < len(self._computed_by):
            number = self._numbers.setdefault(event.worker, len(self._numbers))
            self._computed_by[event.index] = number
            count, total, least, most = self._tiles
            self._tiles = [
                count + 1,
                total + event.seconds,
                min(least, event.seconds),
                max(most, event.seconds),
            ]

    def _span(self, span: Span) -> None:
        threads = self._lanes.get(span.worker)
        if threads is None:
            threads = self._lanes[span.worker] = {}
        lane = threads.get(span.stage)
        if lane is None:
            most = ALL_INTERVALS // (3 * len(self._lanes))
            lane = threads[span.stage] = Lane(max(LEAST_INTERVALS, min(MOST_INTERVALS, most)))
        lane.add(span.begin, span.end)

    def heard(self, workers: Mapping[str, Mapping[str, Any]]) -> None:
        """Take in what the scheduler knows of its workers, each as ``WorkerState.identity`` has it."""
        now = self._clock()
        with self._listening:
            for address, worker in workers.items():
                metrics = worker.get("metrics") or {}
                ours = metrics.get("tilewright") or {}
                total, free = ours.get("device_total_nbytes"), ours.get("device_free_nbytes")
                device = float("nan") if total is None or free is None else float(total - free)
                if address not in self._memory:
                    most = ALL_SAMPLES // max(1, len(workers))
                    most = max(LEAST_SAMPLES, min(MOST_SAMPLES, most)) // 2 * 2
                    self._memory[address] = MemoryLog(most)
                self._memory[address].add(now, float(metrics.get("memory") or 0), device)

    def busy(self) -> dict[str, dict[str, float]]:
        """Busy seconds of each thread of each worker so far."""
        return {
            worker: {name: lane.busy().seconds for name, lane in threads.items()}
            for worker, threads in self._lanes.items()
        }

    def timeline(self) -> Timeline:
        """What was recorded so far."""
        seconds = self._clock() - self.begin
        count, total, least, most = self._tiles
        with self._listening:
            memory = {address: log.samples() for address, log in self._memory.items()}
        return Timeline(
            begin=self.begin,
            seconds=seconds,
            lanes={
                worker: {name: lane.busy() for name, lane in threads.items()}
                for worker, threads in sorted(self._lanes.items())
            },
            workers=tuple(self._numbers),
            computed_by=self._computed_by.copy(),
            tile_seconds=(least, total / count, most) if count else (0.0, 0.0, 0.0),
            phases=_filled(self._phases, seconds),
            memory=memory,
            notices=tuple(self._notices),
            untold=self._untold,
        )


def _filled(phases: Iterable[Phase], seconds: float) -> tuple[Phase, ...]:
    """Phases, and what was done before, between and after them, in order."""
    filled: list[Phase] = []
    until = 0.0
    for phase in sorted(phases, key=lambda phase: phase.begin):
        if phase.begin > until:
            filled.append(Phase("between" if filled else "opening", until, phase.begin))
        filled.append(phase)
        until = max(until, phase.end)
    if seconds > until:
        filled.append(Phase("publishing" if filled else "opening", until, seconds))
    return tuple(filled)
