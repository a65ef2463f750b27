"""What happened, as small records. Progress bars, reports and JSON logs are listeners; the pipeline prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


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


@dataclass(frozen=True)
class WorkDone:
    name: str
    seconds: float


@dataclass(frozen=True)
class Notice:
    """Something a person should know and nothing failed: what was chosen, what was found, what was given up."""

    message: str


Event = WorkPlanned | UnitDone | WorkDone | Notice
Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The listener of those who do not listen."""


def describe(event: Event) -> dict[str, Any]:
    """The event as one flat JSON-ready object, its type under ``event``."""
    return {
        "event": type(event).__name__,
        **{k: dict(v) if isinstance(v, Mapping) else v for k, v in vars(event).items()},
    }
