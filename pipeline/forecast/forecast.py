"""What a plan means for who asks for it: how long, how much disk and memory, what limits it, and whether it fits."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilewright.kernels.numbers import format_nbytes, format_seconds
from tilewright.pipeline.forecast.rates import LEAST_RUN_SECONDS, Rates
from tilewright.pipeline.plan.product import MatmulPlan

THREADS = {"load": "reading", "compute": "multiplying", "write": "writing"}
SHORT_SECONDS = 0.5
"""What takes less is not worth a number."""


@dataclass(frozen=True)
class Disk:
    """Where C is to stand."""

    folder: str
    free_nbytes: int


def disk_at(path: Path) -> Disk | None:
    """The disk that a path is on, or will be; None where that cannot be said."""
    folder = path.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        return Disk(str(folder), shutil.disk_usage(folder).free)
    except OSError:
        return None


@dataclass(frozen=True)
class Forecast:
    """What is expected of a plan."""

    least_seconds: float | None
    """Of its tiles, without the check of C; None: no rate is known."""
    most_seconds: float | None
    source: str
    """What the rates are of: ``runs``, ``measured``, or ``none``."""
    runs: int
    """Earlier runs that they are of."""
    floors: dict[str, float | None]
    """Seconds that ``load``, ``compute`` and ``write`` alone take on all workers at once; None: not known."""
    limit: str | None
    """Which of these takes longest."""
    disk_nbytes: int
    """What C takes at most, before it is encoded."""
    disk: Disk | None
    memory_nbytes: int
    """Of a worker's process."""
    device_nbytes: int
    """Of its GPU's memory; 0 on a CPU."""
    workers: int

    @property
    def fits(self) -> bool:
        """Whether C fits its disk, as far as that is known. What does not fit into memory has no plan."""
        return self.disk is None or self.disk_nbytes <= self.disk.free_nbytes

    @property
    def seconds(self) -> float | None:
        """The middle of what is expected."""
        if self.least_seconds is None or self.most_seconds is None:
            return None
        return (self.least_seconds + self.most_seconds) / 2

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": self.seconds, "fits": self.fits}

    def table(self) -> list[tuple[str, str]]:
        """Rows of a name and a text, for people."""
        memory = f"{format_nbytes(self.memory_nbytes)} a worker"
        if self.device_nbytes:
            memory += f", and {format_nbytes(self.device_nbytes)} on its GPU"
        where = (
            ""
            if self.disk is None
            else f"; {format_nbytes(self.disk.free_nbytes)} are free in {self.disk.folder}"
        )
        return [
            ("time", self._time()),
            *([("limit", self._limit())] if self.limit is not None else []),
            ("disk", f"{format_nbytes(self.disk_nbytes)} for C, less where it is compressed{where}"),
            ("memory", memory),
            ("verdict", self._verdict()),
        ]

    def _time(self) -> str:
        seconds = self.seconds
        if seconds is None or self.least_seconds is None:
            return (
                "not known: no run of its kind (these dtypes, as many workers, such a device) has been timed on this"
                " host; the first one tells"
            )
        spread = (seconds - self.least_seconds) / seconds if seconds else 0.0
        about = f"about {format_seconds(seconds)}"
        if self.most_seconds is not None and self.most_seconds < SHORT_SECONDS:
            return "less than a second for the tiles; the start of the workers and the check of C come on top"
        if self.source == "runs":
            if self.runs == 1:
                return (
                    f"{about} for the tiles, by the rates of the one run of its kind that was timed here, so that"
                    " nobody can say by how much it may be off; the check of C comes on top"
                )
            return (
                f"{about} ± {spread:.0%} for the tiles, by the rates of the last {self.runs} runs of its kind here; the"
                " check of C comes on top"
            )
        return (
            f"about {format_seconds(seconds)} ± {spread:.0%} for the tiles, by rates that were measured here; no run of"
            " its kind has been timed yet, so writing C, the start and the check come on top"
        )

    def _limit(self) -> str:
        told = ", ".join(
            f"{word} {format_seconds(floor)}"
            for name, word in THREADS.items()
            if (floor := self.floors[name]) is not None
        )
        return f"{THREADS[self.limit or 'load']}; alone, and at once on all workers: {told}"

    def _verdict(self) -> str:
        if not self.fits and self.disk is not None:
            lacking = format_nbytes(self.disk_nbytes - self.disk.free_nbytes)
            return (
                f"it may not fit the disk: {lacking} are lacking in {self.disk.folder}, unless C compresses well; free"
                " some, or store C elsewhere"
            )
        fits = "it fits the memory" + (" and the disk" if self.disk is not None else "")
        if self.limit is None:
            return fits
        faster = {
            "load": "more memory a worker (--device-memory) reads less, faster storage reads sooner",
            "compute": "more or faster devices shorten it, other storage does not",
            "write": "faster storage for C shortens it",
        }
        return f"{fits}; {faster[self.limit]}"


def forecast_of(
    plan: MatmulPlan,
    earlier: Sequence[Rates],
    measured: tuple[Rates, Rates] | None,
    disk: Disk | None,
    machines: int = 1,
) -> Forecast:
    """earlier: rates of runs of its kind, of which those of about as much work count. measured: the slowest and the
    fastest rates of a machine, where there are none; machines: how many share the work then."""
    least = most = None
    floors: dict[str, float | None] = dict.fromkeys(THREADS)
    source = "none"
    sharing = max(1, min(plan.workers, plan.tile_count * plan.k_parts))
    like = [rates for rates in earlier if rates.is_like(plan)]
    runs = 0
    known = [(rates, _floors(plan, rates, sharing)) for rates in like if rates.ratio is not None]
    if quick := _quick(plan, like):
        source, runs, least, most = "runs", len(quick), min(quick), max(quick)
    elif known:
        source, runs = "runs", len(known)
        times = [
            max(floor for floor in each.values() if floor is not None) * (rates.ratio or 1.0)
            for rates, each in known
            if any(floor is not None for floor in each.values())
        ]
        least, most = min(times), max(times)
        floors = {
            name: statistics.median(values)
            if (values := [floor for _, each in known if (floor := each[name]) is not None])
            else None
            for name in THREADS
        }
    elif measured is not None:
        slow, fast = (_floors(plan, rates, max(1, min(machines, sharing))) for rates in measured)
        slowest, fastest = ([floor for floor in each.values() if floor is not None] for each in (slow, fast))
        floors = {name: _middle(slow[name], fast[name]) for name in THREADS}
        if slowest and fastest:  # from all at once, at best, to one after the other, at worst
            source, least, most = "measured", max(fastest), sum(slowest)
    seconds = {name: floor for name, floor in floors.items() if floor is not None}
    return Forecast(
        least_seconds=least,
        most_seconds=most,
        source=source,
        runs=runs,
        floors=floors,
        limit=max(seconds, key=lambda name: seconds[name]) if seconds else None,
        disk_nbytes=plan.write_nbytes,
        disk=disk,
        memory_nbytes=plan.host_peak_nbytes,
        device_nbytes=0 if plan.on_host else plan.device_peak_nbytes,
        workers=plan.workers,
    )


def _quick(plan: MatmulPlan, like: Sequence[Rates]) -> list[float]:
    """Seconds of runs that were mostly start, of as much work or more, where most of these were: nothing else says how
    long a small one takes, and those that took longer, such as the first, which compiles, are the exception."""
    seconds = [
        rates.seconds for rates in like if rates.seconds is not None and (rates.work or 0) >= plan.operations
    ]
    if not seconds or statistics.median(seconds) >= LEAST_RUN_SECONDS:
        return []
    return [each for each in seconds if each < LEAST_RUN_SECONDS]


def _middle(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else (one + other) / 2


def _floors(plan: MatmulPlan, rates: Rates, sharing: int) -> dict[str, float | None]:
    amounts = {
        "load": (plan.read_nbytes, rates.read_nbytes),
        "compute": (plan.operations, rates.operations),
        "write": (plan.write_nbytes, rates.write_nbytes),
    }
    return {name: amount / rate / sharing if rate else None for name, (amount, rate) in amounts.items()}


@dataclass(frozen=True)
class Foreseen:
    """A plan with what is expected of it."""

    plan: MatmulPlan
    forecast: Forecast

    def to_json(self) -> dict[str, Any]:
        """The plan's fields, and ``forecast``."""
        return self.plan.to_json() | {"forecast": self.forecast.to_json()}

    def __str__(self) -> str:
        words = "\n".join(f"{name:<16}{text}" for name, text in self.forecast.table())
        return f"{words}\n\n{self.plan}"
