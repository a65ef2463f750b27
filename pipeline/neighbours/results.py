"""What a search for neighbours, or for pairs, comes back as."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.kernels.numbers import counted, format_count, format_nbytes
from tilewright.pipeline.neighbours.check import NeighbourCheck
from tilewright.pipeline.neighbours.plan import NeighbourPlan


@dataclass(frozen=True)
class _Run:
    plan: NeighbourPlan
    out: str | None
    """The group that holds them."""
    device: str
    """Name of the GPU, or ``CPU``."""
    seconds: float
    stages: dict[str, float]
    """Busy seconds of all tasks, by stage."""
    read_nbytes: int
    """What this run has read of A and B, without the check."""
    nan_rows: int
    """Items of A that hold NaN, which have no neighbours."""
    resumed: int
    """Blocks that an earlier run had finished."""
    verification: NeighbourCheck | None
    """None where none was asked for."""

    def to_json(self) -> dict[str, object]:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return own | {
            "plan": self.plan.to_json(),
            "verification": None if self.verification is None else self.verification.to_json(),
        }

    def _lines(self, head: str, found: str) -> str:
        plan = self.plan
        rate = (
            f", {format_count(plan.operations / self.seconds)}op/s"
            if self.seconds and not self.resumed
            else ""
        )
        earlier = f"; {self.resumed} of {plan.tasks} blocks by an earlier run" if self.resumed else ""
        lines = [
            f"{head} in {self.seconds:.2f} s on {self.device} ({plan.metric} in {plan.dtype}){rate}",
            f"{found}; read {format_nbytes(self.read_nbytes)}{earlier}",
        ]
        if self.nan_rows:
            lines.append(f"{counted(self.nan_rows, 'item')} of A with NaN, without any neighbour")
        if self.verification is not None:
            lines.append(str(self.verification))
        return "\n".join(lines)


@dataclass(frozen=True)
class TopkRun(_Run):
    """Nearest neighbours that were found and stored."""

    incomplete_rows: int = 0
    """Items of A with fewer than k neighbours, since NaN leaves no more."""

    def __str__(self) -> str:
        plan = self.plan
        lacking = f"; {counted(self.incomplete_rows, 'item')} with fewer" if self.incomplete_rows else ""
        where = f" in {self.out}" if self.out else ""
        return self._lines(
            f"{plan.k} nearest of {plan.n} for {counted(plan.m, 'item')}",
            f"{counted(plan.m * (plan.k or 0), 'neighbour')}{where}{lacking}",
        )


@dataclass(frozen=True)
class PairsRun(_Run):
    """Pairs beyond a threshold that were found, and stored or only counted."""

    count: int = 0
    """Of pairs."""

    def __str__(self) -> str:
        plan = self.plan
        where = f" in {self.out}" if self.out else ""
        sides = (
            f"{plan.m} × {plan.n} items"
            if not plan.triangle
            else f"{counted(plan.m, 'item')}, each pair once,"
        )
        return self._lines(f"pairs of {sides}", f"{counted(self.count, 'pair')}{where}")
