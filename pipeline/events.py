"""What happened, as small records. Progress bars, reports and JSON logs are listeners; the pipeline prints nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tilewright.kernels.numbers import counted

logger = logging.getLogger(__name__)

LEAST_BUSY_SHARE = 0.005
"""Stages that were busy for a smaller share of the time, which is printed as 0 %, say nothing about what limits work,
or when it will be done: the time went elsewhere, as to other tasks of the workers."""


@dataclass(frozen=True)
class WorkPlanned:
    """A piece of work is about to start."""

    name: str
    """What runs: ``matmul``, ``histogram``, ``dot`` or ``verify``; before the product of a Gram matrix ``statistics``,
    and ``means`` where exact sums are centred along the side that is summed over."""
    total: int
    """Units (tiles, pieces) of the whole work."""
    done: int
    """Units that an earlier run finished."""
    unit: str
    nbytes: int
    """Bytes that the units left to do will read."""
    operations: int
    """Arithmetic operations of the units left to do (0 where the count means nothing)."""


class Span(NamedTuple):
    """An interval in which one stage of one worker was busy with one panel or one tile, or a worker with a piece."""

    worker: str
    stage: str
    """``load`` (read and upload), ``compute`` or ``write`` (download and write); ``piece``, of work in pieces, all that
    is done with one. Spans of ``load``, of ``write`` and of ``piece`` may overlap: several panels are loaded at once,
    several tiles written, several pieces under way."""
    begin: float
    """Seconds since the epoch, so that spans of all workers of a host share one time axis."""
    end: float


@dataclass(frozen=True)
class UnitDone:
    """One unit is finished: its result is stored, or reduced."""

    name: str
    index: int
    """The unit's place in the plan's order."""
    worker: str
    seconds: float
    nbytes: int
    operations: int
    stages: Mapping[str, float]
    """Busy seconds by stage; stages overlap, so they do not add up to ``seconds``."""
    spans: tuple[Span, ...] = ()
    """When the stages were busy: for a tile, one ``load`` and one ``compute`` for each panel, and one ``write``. Parts
    of a tile that other workers computed carry those workers' names. For a piece, one ``piece``."""


@dataclass(frozen=True)
class UnitAdvanced:
    """A unit that takes long has come so far. It is told now and then, by another thread than other events, never at
    the same time as one of the same work."""

    name: str
    index: int
    nbytes: int
    """Bytes that were read for it, of those that `UnitDone` will tell."""


@dataclass(frozen=True)
class WorkDone:
    name: str
    seconds: float


@dataclass(frozen=True)
class Notice:
    """Something a person should know although nothing failed: a choice, a finding, something given up."""

    message: str


@dataclass(frozen=True)
class Caution(Notice):
    """A notice that a result, an input, the place of an output or the cluster may not be what the caller takes it
    for."""


@dataclass(frozen=True)
class Waiting(Notice):
    """A notice that work waits, and for what: otherwise it would seem to hang."""


Event = WorkPlanned | UnitDone | UnitAdvanced | WorkDone | Notice
Listener = Callable[[Event], None]


def log_notices(event: Event) -> None:
    """The default listener: it logs notices, those of `Caution` and `Waiting` as warnings, and ignores all else."""
    if isinstance(event, Notice):
        level = logging.WARNING if isinstance(event, Caution | Waiting) else logging.INFO
        logger.log(level, "%s", event.message)


class Teller:
    """Tells a listener what whoever asked for some work should know of it."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._told_once: set[str] = set()

    def say(self, message: str) -> None:
        self.listener(Notice(message))

    def warn(self, message: str) -> None:
        """Say what may not be as it seems."""
        self.listener(Caution(message))

    def warn_once(self, messages: Iterable[str]) -> None:
        """Say those that were not said before."""
        for message in messages:
            if message not in self._told_once:
                self._told_once.add(message)
                self.warn(message)


def on_waiting(listener: Listener, name: str, ctrl_c: str) -> Callable[[str], None]:
    """A function that tells the listener that the named work waits, for what, and what Ctrl-C would do."""

    def tell(wait: str) -> None:
        listener(Waiting(f"{name}: {wait}; Ctrl-C {ctrl_c}"))

    return tell


def on_lost(listener: Listener, name: str, noun: str) -> Callable[[str, int | None], None]:
    """A function that tells the listener that the named work has lost a worker, and with it what it had under way.

    noun: what the work is done in, in the singular.
    """

    def tell(worker: str, units: int | None) -> None:
        if units is None:
            what = f"; the {noun}s that it had under way are computed again"
        elif units:
            what = f"; {counted(units, noun)} that it had under way {'is' if units == 1 else 'are'} computed again"
        else:
            what = f", with no {noun} under way there"
        listener(Caution(f"{name}: worker {worker} was lost{what}"))

    return tell


def describe(event: Event) -> dict[str, Any]:
    """The event as one flat JSON-ready object, its type under ``event``.

    Spans are left out: a tile may have hundreds, and a log should have one line for each tile; ``stages`` has their
    sums.
    """
    fields = {name: value for name, value in vars(event).items() if name != "spans"}
    return {
        "event": type(event).__name__,
        **{name: dict(value) if isinstance(value, Mapping) else value for name, value in fields.items()},
    }
