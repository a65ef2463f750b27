"""What happened, as small records. Progress bars, reports and JSON logs are listeners; the pipeline prints nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkPlanned:
    """A piece of work is about to start."""

    name: str
    """What runs: ``matmul``, ``histogram``, ``dot`` or ``verify``."""
    total: int
    """Units (tiles, pieces) that the whole work has."""
    done: int
    """Units that an earlier run left finished."""
    unit: str
    nbytes: int
    """Bytes that the units left to do will read."""
    operations: int
    """Arithmetic operations that the units left to do will need (0 where counting them says nothing)."""


class Span(NamedTuple):
    """One stretch of time in which one stage of one worker was busy with one panel, or one tile."""

    worker: str
    stage: str
    """``load`` (read and upload), ``compute`` or ``write`` (download and write). Spans of ``load``, and of
    ``write``, may overlap: the next panel is begun while one is coming, and several tiles are written at once."""
    begin: float
    """Seconds since the epoch, so that the spans of all workers of a host stand on one axis."""
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
    """When the stages were busy: of a tile one ``load`` and one ``compute`` for each panel, and one ``write``. Parts
    of a tile that other workers computed carry their names. Empty for work that has no stages."""


@dataclass(frozen=True)
class WorkDone:
    name: str
    seconds: float


@dataclass(frozen=True)
class Notice:
    """Something a person should know and nothing failed: what was chosen, what was found, what was given up."""

    message: str


@dataclass(frozen=True)
class Waiting(Notice):
    """A notice that work waits, and on what: who is not told would think that it hangs."""


Event = WorkPlanned | UnitDone | WorkDone | Notice
Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The listener of those who have named none: only that work waits gets a line of the log."""
    if isinstance(event, Waiting):
        logger.warning("%s", event.message)


def on_waiting(listener: Listener, name: str, ctrl_c: str) -> Callable[[str], None]:
    """What tells the listener that work of this name waits, on what, and what Ctrl-C would do to it."""

    def tell(wait: str) -> None:
        listener(Waiting(f"{name}: {wait}; Ctrl-C {ctrl_c}"))

    return tell


def counted(count: int, noun: str) -> str:
    """A count with its noun, as a message says it: ``1 tile``, ``0 tiles``, ``8 tiles``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def describe(event: Event) -> dict[str, Any]:
    """The event as one flat JSON-ready object, its type under ``event``.

    Spans are left out: a tile may have hundreds, and a log is to keep a line a tile; ``stages`` sums them up.
    """
    fields = {name: value for name, value in vars(event).items() if name != "spans"}
    return {
        "event": type(event).__name__,
        **{name: dict(value) if isinstance(value, Mapping) else value for name, value in fields.items()},
    }
