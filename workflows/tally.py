"""How far a piece of work has come, and how fast, counted from its events."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.kernels.numbers import counted, format_count, format_nbytes, format_seconds
from tilewright.pipeline.events import LEAST_BUSY_SHARE, UnitDone, WorkPlanned


@dataclass
class Tally:
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

    def add(self, unit: UnitDone) -> None:
        self.done += 1
        self.nbytes += unit.nbytes
        self.operations += unit.operations
        self.busy_seconds += sum(unit.stages.values())
        self.staged |= bool(unit.stages)

    def rates(self, now: float) -> str:
        """Units, bytes a second, operations a second and the time left, as far as they say something: what is left of
        work that its workers have hardly begun depends on when they have time for it."""
        elapsed = max(now - self.started, 1e-9)
        parts = [f"{self.planned.done + self.done}/{in_all(self.planned)}"]
        if self.nbytes:
            parts.append(f"{format_nbytes(self.nbytes / elapsed)}/s")
        if self.operations:
            parts.append(f"{format_count(self.operations / elapsed)}op/s")
        left = self.planned.total - self.planned.done - self.done
        hardly_begun = self.staged and self.busy_seconds < LEAST_BUSY_SHARE * elapsed
        if self.done and left and not hardly_begun:
            parts.append(f"{format_seconds(left * elapsed / self.done)} left")
        return ", ".join(parts)


def in_all(planned: WorkPlanned) -> str:
    """How many units there are, with their name, which an event has in the plural."""
    return counted(planned.total, planned.unit.removesuffix("s"))
