"""What the times, bytes and operations of a run mean: rates, floors, and which thread the others waited for."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from tilewright.kernels.numbers import format_count, format_nbytes
from tilewright.pipeline.check.verify import Verification
from tilewright.pipeline.events import LEAST_BUSY_SHARE
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.plan.told import THREADS
from tilewright.pipeline.report.timeline import Timeline

LIMITING_SHARE = 0.8
"""A thread that is busy for at least this share of the time limits a run; below it, threads wait for one another."""

STAGE_NAMES = {
    "read": "reading A and B",
    "upload": "copying to the GPU",
    "compute": "multiplying",
    "download": "copying from the GPU",
    "write": "writing C",
}
"""As people call them."""

PACKAGES = ("numpy", "numba", "numba-cuda", "dask", "distributed", "dask-cuda", "zarr", "numcodecs")


class Run(Protocol):
    """What a report is about: `MatmulRun` (`product/execute.py`), which says what each is."""

    @property
    def plan(self) -> MatmulPlan: ...
    @property
    def device(self) -> str: ...
    @property
    def kernel(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def stages(self) -> dict[str, float]: ...
    @property
    def read_nbytes(self) -> int: ...
    @property
    def shared_nbytes(self) -> int: ...
    @property
    def write_nbytes(self) -> int: ...
    @property
    def operations(self) -> int: ...
    @property
    def workers(self) -> dict[str, dict[str, float]]: ...
    @property
    def resumed(self) -> int: ...
    @property
    def verification(self) -> Verification | None: ...
    @property
    def workers_lost(self) -> int: ...
    @property
    def names(self) -> dict[str, str]: ...
    @property
    def timeline(self) -> Timeline | None: ...
    def to_json(self) -> dict[str, Any]: ...


def worker_count(run: Run) -> int:
    """The workers that shared the work: those planned for, or those that were there, if more."""
    return max(run.plan.workers, len(run.workers))


@dataclass(frozen=True)
class Shares:
    """The share of the time in which the threads of all workers were busy."""

    stages: dict[str, float]
    threads: dict[str, float]

    @property
    def limit(self) -> str:
        """The busiest thread."""
        return max(self.threads, key=lambda name: self.threads[name])


def shares_of(run: Run) -> Shares:
    """Of a run that took any time."""
    whole = run.seconds * worker_count(run)
    stages = {stage: seconds / whole for stage, seconds in run.stages.items() if seconds > 0}
    threads = {name: sum(stages.get(stage, 0.0) for stage in parts) for name, parts in THREADS.items()}
    return Shares(stages, threads)


def busy_sentence(run: Run) -> str:
    """One line: the share of the time each thread of a worker was busy."""
    shares = shares_of(run)
    texts = []
    for name, stages in THREADS.items():
        inner = ", ".join(f"{stage} {shares.stages[stage]:.0%}" for stage in stages if stage in shares.stages)
        texts.append(f"{name} {shares.threads[name]:.0%}" + (f" ({inner})" if "," in inner else ""))
    return f"busy share of the time: {', '.join(texts)}"


def limit_sentence(run: Run) -> str:
    """Which thread the others wait for, in words; for a run that computed anything."""
    shares = shares_of(run)
    limit = shares.limit
    if shares.threads[limit] < LEAST_BUSY_SHARE:
        return "nearly all of it went elsewhere, as to other tasks of the workers"
    if shares.threads[limit] >= LIMITING_SHARE:
        verdict = f"{limit} limits it and the others wait for it"
    else:
        verdict = f"{limit} is busiest, and waits for the others too: at the start and the end, or by turns"
    if (count := worker_count(run)) > 1:
        each = [busy[limit] / run.seconds for busy in run.workers.values()]
        each += [0.0] * (count - len(each))
        verdict += f" ({min(each):.0%} to {max(each):.0%} on each of {count} workers)"
    return verdict


@dataclass(frozen=True)
class Rate:
    """What one stage did, and how fast."""

    stage: str
    amount: int
    unit: str
    """``B`` or ``op``."""
    busy_seconds: float
    """Added up over workers."""
    floor_seconds: float
    """How long the run would have taken if it consisted of this stage alone, at this rate, on all workers at once."""

    @property
    def rate(self) -> float:
        """A second, of one worker, while it is busy."""
        return self.amount / self.busy_seconds if self.busy_seconds > 0 else 0.0

    @property
    def rate_text(self) -> str:
        if not self.rate:
            return "–"
        return f"{format_nbytes(self.rate)}/s" if self.unit == "B" else f"{format_count(self.rate)}op/s"

    @property
    def amount_text(self) -> str:
        return format_nbytes(self.amount) if self.unit == "B" else f"{format_count(self.amount)}op"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"rate": self.rate}


def rates_of(run: Run) -> list[Rate]:
    """Of the stages in which any time was spent."""
    amounts = {
        "read": (run.read_nbytes, "B"),
        "upload": (run.read_nbytes + run.shared_nbytes, "B"),
        "compute": (run.operations, "op"),
        "download": (run.write_nbytes, "B"),
        "write": (run.write_nbytes, "B"),
    }
    count = worker_count(run)
    return [
        Rate(stage, *amounts[stage], seconds, seconds / count)
        for stage, seconds in run.stages.items()
        if seconds > 0
    ]


def floor_of(run: Run) -> tuple[str, float] | None:
    """The thread whose work alone takes longest, and how long that takes; None where nothing was computed. Stages of
    one thread are done by turns, so they count together."""
    if not run.workers or run.seconds <= 0:
        return None
    count = worker_count(run)
    floors = {name: sum(run.stages.get(stage, 0.0) for stage in parts) for name, parts in THREADS.items()}
    name = max(floors, key=lambda name: floors[name])
    return name, floors[name] / count


def versions() -> dict[str, str]:
    """Of this process: what is installed of the libraries that matter."""
    found = {"tilewright": "", "python": platform.python_version(), "system": platform.platform()}
    for name in ("tilewright", *PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {name: each for name, each in found.items() if each}


def to_json(run: Run, made: str, machine: Mapping[str, str]) -> dict[str, Any]:
    """All of a report. made: when, by ISO 8601; machine: `versions`."""
    floor = floor_of(run)
    return {
        "report": 1,
        "made": made,
        "versions": dict(machine),
        "run": run.to_json(),
        "rates": [rate.to_json() for rate in rates_of(run)],
        "floor": None if floor is None else {"thread": floor[0], "seconds": floor[1]},
        "limit": limit_sentence(run) if floor is not None else "nothing was left to do",
    }
