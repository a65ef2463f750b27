"""How far a piece of work has come, counted from its events, and a listener that says so in lines."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import click

from tilewright.kernels.numbers import counted, format_count, format_nbytes, format_seconds
from tilewright.pipeline.events import (
    LEAST_BUSY_SHARE,
    Event,
    Listener,
    Notice,
    UnitAdvanced,
    UnitDone,
    WorkDone,
    WorkPlanned,
)

START_SECONDS = 1.0
"""What is told of work so soon after its first bytes counts as its start: several workers tell of theirs at about the
same time, after all of them have started."""

LINE_SECONDS = 9.0
"""The least time between two lines about the same work: those that read large files tell of it every second, so that
there is a line every ten."""


@dataclass
class WorkProgress:
    """How far a piece of work has come."""

    planned: WorkPlanned
    started: float
    done: int = 0
    """Units finished in this run."""
    nbytes: int = 0
    operations: int = 0
    busy_seconds: float = 0.0
    """Seconds in which stages of those units were busy."""
    staged: bool = False
    """Whether units tell of stages."""
    under_way: dict[int, int] = field(default_factory=dict)
    """By units that have told how far they are: bytes."""
    reading_since: float = 0.0
    """When the first bytes were read, as far as is known: not before work began."""
    first_told: float | None = None
    """When bytes were told first."""
    begin: tuple[float, int] = (0.0, 0)
    """When all workers had read something, and how many bytes: until then they also started."""
    last: tuple[float, int] = (0.0, 0)
    """When bytes were told last, and how many there were in all."""

    def __post_init__(self) -> None:
        self.reading_since = self.started

    def advance(self, unit: UnitAdvanced, now: float) -> None:
        self.under_way[unit.index] = unit.nbytes
        self._told(now, now - self.started)

    def _told(self, now: float, seconds: float) -> None:
        """seconds: how long these bytes took at most."""
        if not (nbytes := self._all_nbytes()):
            return
        if self.first_told is None:
            self.first_told = now
            self.reading_since = max(self.started, now - seconds)
        self.last = now, nbytes
        if now - self.first_told < START_SECONDS:
            self.begin = self.last

    def _all_nbytes(self) -> int:
        return self.nbytes + sum(self.under_way.values())

    def _nbytes_a_second(self, now: float) -> float:
        """As read since the start, if anything was: what starts takes none of the rest's time."""
        (begin, before), (end, nbytes) = self.begin, self.last
        if end - begin >= START_SECONDS and nbytes > before:
            return (nbytes - before) / (end - begin)
        return self._all_nbytes() / max(now - self.reading_since, 1e-9)

    def add(self, unit: UnitDone, now: float) -> None:
        self.under_way.pop(unit.index, None)
        self.done += 1
        self.nbytes += unit.nbytes
        self.operations += unit.operations
        self.busy_seconds += sum(unit.stages.values())
        self.staged |= bool(unit.stages)
        self._told(now, unit.seconds)

    def rates(self, now: float) -> str:
        """Units, bytes a second, operations a second and the time left, as far as they say something: what is left of
        work that its workers have hardly begun depends on when they have time for it."""
        elapsed = max(now - self.started, 1e-9)
        parts = [f"{self.planned.done + self.done}/{in_all(self.planned)}"]
        nbytes = self._all_nbytes()
        by_bytes = self.planned.unit == "pieces" and self.planned.nbytes > 0
        if by_bytes and nbytes:
            parts.append(f"{format_nbytes(nbytes)} of {format_nbytes(self.planned.nbytes)}")
        rate = self._nbytes_a_second(now) if by_bytes else nbytes / elapsed
        if nbytes:
            parts.append(f"{format_nbytes(rate)}/s")
        if self.operations:
            parts.append(f"{format_count(self.operations / elapsed)}op/s")
        left = self.planned.total - self.planned.done - self.done
        # Pieces differ in length by far, and a single one may be all there is.
        share = nbytes / self.planned.nbytes if by_bytes else self.done / max(1, self.done + left)
        hardly_begun = self.staged and self.busy_seconds < LEAST_BUSY_SHARE * elapsed
        if share and left and not hardly_begun:
            seconds = elapsed * (1 - share) / share
            if by_bytes:  # as of when these bytes were told
                seconds = (self.planned.nbytes - nbytes) / rate - (now - self.last[0])
            parts.append(f"{format_seconds(max(0.0, seconds))} left")
        return ", ".join(parts)


def in_all(planned: WorkPlanned) -> str:
    """How many units there are, with their name, which an event has in the plural."""
    return counted(planned.total, planned.unit.removesuffix("s"))


class Counting:
    """Counts the finished units of one piece of work, for the message when it was stopped."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._planned: WorkPlanned | None = None
        self._done = 0

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[Listener]:
        """A listener that counts, and hands everything on."""

        def counting(event: Event) -> None:
            if isinstance(event, WorkPlanned) and event.name == self._name:
                self._planned, self._done = event, event.done
            elif isinstance(event, UnitDone) and event.name == self._name:
                self._done += 1
            listener(event)

        yield counting

    def __str__(self) -> str:
        if self._planned is None:
            return "what earlier runs have finished, if any"
        return f"{self._done} of {in_all(self._planned)}"


class Lines:
    """Where there is no terminal: notices as they come, and how far the work has come every `LINE_SECONDS`."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[WorkProgress, float]] = {}

    def __call__(self, event: Event) -> None:
        now = time.perf_counter()
        if isinstance(event, Notice):
            _print(event.message)
        elif isinstance(event, WorkPlanned):
            self._running[event.name] = WorkProgress(event, now), now
        elif isinstance(event, UnitDone | UnitAdvanced) and event.name in self._running:
            work, last = self._running[event.name]
            work.advance(event, now) if isinstance(event, UnitAdvanced) else work.add(event, now)
            if now - last >= LINE_SECONDS:
                _print(f"{event.name}: {work.rates(now)}")
                self._running[event.name] = work, now
        elif isinstance(event, WorkDone):
            self._running.pop(event.name, None)


def _print(line: str) -> None:
    try:
        click.echo(line, err=True)
    except OSError as error:
        # A log on a full disk is no reason to end the work; a pipe whose reader is gone ends it, as everywhere.
        if error.errno == errno.EPIPE:
            raise
