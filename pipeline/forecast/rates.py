"""How fast a worker was in earlier runs, kept for the user's later plans. Nothing of it is ever needed."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.kernels.gpu import user_cache

if TYPE_CHECKING:
    from tilewright.pipeline.neighbours.plan import NeighbourPlan
    from tilewright.pipeline.plan.product import MatmulPlan
    from tilewright.pipeline.report.figures import Run

logger = logging.getLogger(__name__)

FILE = "rates.json"
VERSION = 3
MOST_KINDS = 100
"""Of runs; the one that was made longest ago is forgotten first."""
MOST_RUNS = 8
"""Of one kind, the last ones."""
LEAST_RUN_SECONDS = 1.0
"""The rates of shorter ones are mostly those of their start; only how long they took is kept."""
MOST_RATIO = 20.0
"""A run that took so much longer than any of its stages waited for something else: its time says nothing of others'."""
LIKENESS = 100
"""By how many times more, or less, work runs are still alike."""
LEAST_BUSY_SECONDS = 0.02
"""A stage that was busy for less has no rate that means anything."""


@dataclass(frozen=True)
class Rates:
    """Of one worker while it is busy, a second; None: not known."""

    operations: float | None
    read_nbytes: float | None
    write_nbytes: float | None
    ratio: float | None = None
    """How much longer the tiles of the run took than what took longest of them alone; None: no run has been timed."""
    work: int | None = None
    """Operations of the run."""
    seconds: float | None = None
    """How long its tiles took."""

    def is_like(self, operations: int) -> bool:
        """Whether the run was of about as much work: the rates of a small one are those of its start."""
        if self.work is None:
            return False
        return self.work <= LIKENESS * operations and operations <= LIKENESS * self.work

    @classmethod
    def of(cls, run: Run) -> Rates:
        """Of a run that computed anything."""
        from tilewright.pipeline.forecast.workload import decoded_share
        from tilewright.pipeline.report.figures import floor_of

        read, compute, write = (
            sum(run.stages.get(stage, 0.0) for stage in stages)
            for stages in (("read", "upload"), ("compute",), ("download", "write"))
        )
        floor = floor_of(run)
        return cls(
            operations=_rate(run.operations, compute),
            read_nbytes=_rate(int(decoded_share(run.plan) * (run.read_nbytes + run.shared_nbytes)), read),
            write_nbytes=_rate(run.write_nbytes, write),
            ratio=run.seconds / floor[1] if floor is not None and floor[1] > 0 else None,
            work=run.operations,
            seconds=run.seconds,
        )


def _rate(amount: int, seconds: float) -> float | None:
    return amount / seconds if amount and seconds >= LEAST_BUSY_SECONDS else None


def kind_of(plan: MatmulPlan, device: str, precision: str) -> str:
    """What runs have in common whose rates are compared: host, device, workers, dtypes and precision."""
    dtypes = "×".join(operand.name for operand in plan.operands)
    how = f"{precision}, as bytes" if plan.as_bytes else precision
    return f"{platform.node()}; {device}; {plan.workers}; {dtypes}; {plan.sums.name}; {how}"


def kind_of_search(plan: NeighbourPlan, device: str, precision: str) -> str:
    """The same of searches for neighbours and pairs."""
    wanted = "pairs" if plan.k is None else f"{plan.k} nearest"
    dtypes = f"{plan.items_dtype}; {plan.dtype}"
    return f"{platform.node()}; {device}; {plan.workers}; {wanted}; {plan.metric}; {dtypes}; {precision}"


def remember(run: Run, precision: str) -> None:
    """Keep the rates of a run. Where that cannot be, nothing happens."""
    if run.operations:
        _keep(kind_of(run.plan, run.device, precision), Rates.of(run))


def remember_search(
    plan: NeighbourPlan, device: str, precision: str, stages: Mapping[str, float], seconds: float
) -> None:
    """The same of a search that found all of its blocks, in so many seconds. stages: busy seconds of all tasks."""
    if not plan.operations:
        return
    read, compute = stages.get("read", 0.0), stages.get("compute", 0.0)
    floor = max(read, compute) / plan.sharing
    rates = Rates(
        operations=_rate(plan.operations, compute),
        read_nbytes=_rate(plan.read_nbytes, read),
        write_nbytes=None,
        ratio=seconds / floor if floor > 0 else None,
        work=plan.operations,
        seconds=seconds,
    )
    _keep(kind_of_search(plan, device, precision), rates)


def kind_of_count(by: str, device: str, workers: int, *, per_document: bool, plain: bool) -> str:
    """The same of counts of a corpus. plain: whether nothing of it has to be decompressed."""
    rows = "of each document" if per_document else "of all"
    return f"{platform.node()}; {device}; {workers}; {by} {rows}; {'plain' if plain else 'compressed'}"


def remember_count(kind: str, nbytes: int, workers: int, seconds: float) -> None:
    """The same of a count of so many stored bytes, of which no earlier run had any."""
    if nbytes and seconds > 0:
        rate = nbytes / seconds / workers
        _keep(kind, Rates(None, rate, None, ratio=1.0, work=nbytes, seconds=seconds))


def _keep(kind: str, rates: Rates) -> None:
    if rates.seconds is None or rates.seconds < LEAST_RUN_SECONDS:
        rates = Rates(None, None, None, work=rates.work, seconds=rates.seconds)
    elif rates.ratio is not None and rates.ratio > MOST_RATIO:
        return
    kept = _read()
    runs = [*kept.pop(kind, []), asdict(rates)][-MOST_RUNS:]
    _write(dict([*kept.items(), (kind, runs)][-MOST_KINDS:]))


def remembered(kind: str) -> list[Rates]:
    """Of earlier runs of this kind, the last one last."""
    try:
        found = [Rates(**rates) for rates in _read().get(kind, [])]
        return [rates for rates in found if rates.ratio is None or rates.ratio <= MOST_RATIO]
    except TypeError:  # of another release
        return []


def remember_measured(kind: str, slowest: float, fastest: float) -> None:
    """Keep between which rates a product of this kind was measured without a run."""
    kept = _read()
    kept.pop(name := f"{kind}; measured", None)
    _write(dict([*kept.items(), (name, [slowest, fastest])][-MOST_KINDS:]))


def measured(kind: str) -> tuple[float, float] | None:
    """The slowest and the fastest rate at which a product of this kind was measured."""
    try:
        slowest, fastest = _read().get(f"{kind}; measured", [None, None])
        return float(slowest), float(fastest)
    except (TypeError, ValueError):
        return None


def _path() -> Path | None:
    folder = user_cache.folder("")
    return None if folder is None else folder / FILE


def _read() -> dict[str, list[Any]]:
    path = _path()
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
        return dict(found["kinds"]) if found and found["version"] == VERSION else {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.debug("rates of earlier runs: %s", error)
        return {}


def _write(kinds: dict[str, list[Any]]) -> None:
    path = _path()
    if path is None:
        return
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps({"version": VERSION, "kinds": kinds}), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        logger.debug("rates are not kept: %s", error)
