"""What was done in work that is no single product: counts, searches, EOFs. A listener adds it up from its events."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from tilewright.pipeline.events import Event, Listener, UnitDone, WorkDone, WorkPlanned
from tilewright.pipeline.plan.told import THREADS
from tilewright.pipeline.report.timeline import Recorder

LANES = (*THREADS, "piece")
"""Whose spans are recorded: those of products that are a part of the work, and of pieces."""

_PASS = re.compile(r", pass \d+")


@dataclass
class Part:
    """A part of the work: all events of one name, and of products that are made again and again, of all passes."""

    name: str
    unit: str
    """In the plural, as events have it."""
    times: int = 0
    """How often it was begun."""
    total: int = 0
    """Units, of all times together."""
    earlier: int = 0
    """Of those, what earlier runs had finished."""
    done: int = 0
    """Units that this run finished."""
    nbytes: int = 0
    """That these read, as they are stored or decoded, as the work has it."""
    operations: int = 0
    seconds: float = 0.0
    """From beginning to end, of all times together."""
    unit_seconds: float = 0.0
    """Of the units, added up."""
    stages: dict[str, float] = field(default_factory=dict)
    """Busy seconds of all workers, by stage."""
    workers: dict[str, int] = field(default_factory=dict)
    """Units by worker."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class WorkRecorder(Recorder):
    """Records work of any kind, and hands every event on to another listener."""

    def __init__(self, listener: Listener, clock: Callable[[], float] = time.time) -> None:
        super().__init__(listener, work="", clock=clock, threads=LANES)
        self.parts: dict[str, Part] = {}
        self._begun: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, WorkPlanned):
            part = self.parts.setdefault(_part_of(event.name), Part(_part_of(event.name), event.unit))
            part.times += 1
            part.total += event.total
            part.earlier += event.done
            self._begun[event.name] = self._clock()
        elif isinstance(event, UnitDone) and (found := self.parts.get(_part_of(event.name))) is not None:
            found.done += 1
            found.nbytes += event.nbytes
            found.operations += event.operations
            found.unit_seconds += event.seconds
            found.workers[event.worker] = found.workers.get(event.worker, 0) + 1
            for stage, seconds in event.stages.items():
                found.stages[stage] = found.stages.get(stage, 0.0) + seconds
        elif isinstance(event, WorkDone) and (begin := self._begun.pop(event.name, None)) is not None:
            self.parts[_part_of(event.name)].seconds += self._clock() - begin
        super().__call__(event)


def _part_of(name: str) -> str:
    return _PASS.sub(", passes", name)
