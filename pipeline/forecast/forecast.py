"""What a plan means for who asks for it: how long, how much disk and memory, what limits it, and whether it fits."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tilewright.kernels.numbers import format_nbytes, format_seconds
from tilewright.pipeline.forecast.published import Estimate
from tilewright.pipeline.forecast.rates import LEAST_RUN_SECONDS, Rates
from tilewright.pipeline.forecast.workload import Workload

THREADS = {"load": "reading", "compute": "multiplying", "write": "writing"}
MOST_START_SECONDS = 15.0
"""What of a run's time was its start at most: the first one compiles, for ten seconds and more."""
MOST_GROWTH = 4
"""How many times the work of a run its rates tell of, unless it took `LONG_RUN_SECONDS`: of a shorter one much may be
its start, and a hundred times that, a hundred times too long."""
LONG_RUN_SECONDS = 60.0
NEARLY = 1.05
"""Times that are nearer to each other are one."""
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
    """Of its tiles, or blocks, without the check of what they give; None: no rate is known."""
    most_seconds: float | None
    command_seconds: tuple[float, float] | None
    """Between which the whole command takes, with its start and the check; None: not known."""
    source: str
    """What the rates are of: ``runs``, ``measured``, ``published``, ``given``, ``usual``, or ``none``."""
    runs: int
    """Earlier runs that they are of."""
    floors: dict[str, float | None]
    """Seconds that ``load``, ``compute`` and ``write`` alone take on all workers at once; None: not known."""
    limit: str | None
    """Which of these takes longest."""
    disk_nbytes: int
    """What the output takes at most, before it is encoded."""
    disk: Disk | None
    memory_nbytes: int | None
    """Of a worker's process; None: not known."""
    device_nbytes: int
    """Of its GPU's memory; 0 on a CPU."""
    workers: int
    units: str = "tiles"
    """What the work is cut into."""
    output: str = "C"
    words: str = ""
    """What an estimate is made from, or why there is none of a GPU that was named, for people."""
    checks: bool = True
    """Whether the output is checked."""
    alike: str = "these dtypes"
    """What runs of its kind have in common, for people."""

    @property
    def fits(self) -> bool:
        """Whether the output fits its disk, as far as that is known. What does not fit into memory has no plan."""
        return self.disk is None or self.disk_nbytes <= self.disk.free_nbytes

    @property
    def seconds(self) -> float | None:
        """The middle of what is expected."""
        if self.least_seconds is None or self.most_seconds is None:
            return None
        return (self.least_seconds + self.most_seconds) / 2

    @property
    def _writing_is_unknown(self) -> bool:
        """Whether the time is without that of writing the output, which is never measured without a run."""
        return self.source == "measured" and self.floors["write"] is None and self.disk_nbytes > 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": self.seconds, "fits": self.fits}

    def table(self) -> list[tuple[str, str]]:
        """Rows of a name and a text, for people."""
        taken = []
        if self.memory_nbytes is not None:
            taken.append(f"{format_nbytes(self.memory_nbytes)} a worker")
        if self.device_nbytes:
            taken.append(f"{format_nbytes(self.device_nbytes)} on {'its' if taken else 'each'} GPU")
        return [
            ("time", self.time()),
            *([("limit", self._limit())] if self.limit is not None else []),
            ("disk", self.disk_words()),
            *([("memory", ", and ".join(taken))] if taken else []),
            ("verdict", self._verdict()),
        ]

    def disk_words(self) -> str:
        """How much disk the output takes, and how much there is."""
        if not self.disk_nbytes:
            return f"next to nothing for {self.output}"
        said = f"{format_nbytes(self.disk_nbytes)} for {self.output}, less where it is compressed"
        if self.disk is None:
            return said
        return f"{said}; {format_nbytes(self.disk.free_nbytes)} are free in {self.disk.folder}"

    def time(self) -> str:
        """How long it takes, as far as that is known."""
        seconds = self.seconds
        if seconds is None or self.least_seconds is None or self.most_seconds is None:
            if self.words:
                return f"not known: {self.words}"
            return (
                f"not known: no run of its kind ({self.alike}, as many workers, such a device), about as large and of"
                f" {LEAST_RUN_SECONDS:g} s or more, has left its rates on this host; the first such run"
                f" tells{'. Of GPUs that are elsewhere --gpu NAME or --rate tells' * self.checks}"
            )
        what = f"for the {self.units}"
        about = f"about {_around(self.least_seconds, self.most_seconds)} {what}"
        if self.source in ("published", "given"):
            whole = ""
            if self.command_seconds is not None:
                whole = f"; with the start and the check the command takes {_around(*self.command_seconds)}"
            return f"{about}{whole}: {self.words}"
        if self.source == "usual":
            about = f"from {format_seconds(self.least_seconds)} to {format_seconds(self.most_seconds)} {what}"
            if self.most_seconds < 1:
                about = f"about a second or less {what}"
            return f"{about}, {self.words}"
        if self.most_seconds < SHORT_SECONDS:
            if self._writing_is_unknown:
                what += f" without writing {self.output}"
            check = f" and the check of {self.output} come" if self.checks else " comes"
            return f"less than a second {what}; the start of the workers{check} on top"
        if self._writing_is_unknown:
            last = (
                f", the start and the check of {self.output}"
                if self.checks
                else " and the start of the workers"
            )
            return (
                f"from {format_seconds(self.least_seconds)} to {format_seconds(self.most_seconds)} {what} without"
                f" writing {self.output}, by rates of reading and multiplying that were measured here; that"
                f"{last} come on top, and no earlier run tells how long they take"
            )
        if self.source == "runs":
            top = f"the check of {self.output} comes" if self.checks else "the start of the workers comes"
            if self.runs == 1:
                if self.most_seconds <= NEARLY * self.least_seconds:
                    about = f"about {format_seconds(seconds)} {what}"
                return (
                    f"{about}, by the rates of the one run of its kind that was timed here, so that nobody can say by"
                    f" how much {'more ' * (' ± ' in about)}it may be off; {top} on top"
                )
            return f"{about}, by the rates of the last {self.runs} runs of its kind here; {top} on top"
        return (
            f"{about}, by rates that were measured here; the start of the workers"
            f"{f' and the check of {self.output} come' if self.checks else ' comes'} on top"
        )

    def _limit(self) -> str:
        told = ", ".join(
            f"{word} {format_seconds(floor)}"
            for name, word in THREADS.items()
            if (floor := self.floors[name]) is not None
        )
        if self._writing_is_unknown:
            told += ", writing not known"
        return f"{THREADS[self.limit or 'load']}; alone, and at once on all workers: {told}"

    def _verdict(self) -> str:
        if not self.fits and self.disk is not None:
            lacking = format_nbytes(self.disk_nbytes - self.disk.free_nbytes)
            compresses = "C compresses" if self.output == "C" else "they compress"
            it = "C" if self.output == "C" else "them"
            return (
                f"it may not fit the disk: {lacking} are lacking in {self.disk.folder}, unless {compresses} well; free"
                f" some, or store {it} elsewhere"
            )
        fits = "it fits the memory" + (" and the disk" if self.disk is not None else "")
        if self.limit is None:
            return fits
        faster = {
            "load": "more memory a worker (--device-memory) reads less, faster storage reads sooner",
            "compute": "more or faster devices shorten it, other storage does not",
            "write": f"faster storage for {self.output} shortens it",
        }
        if self._writing_is_unknown:
            return f"{fits}; if writing {self.output} does not take longer, {faster[self.limit]}"
        return f"{fits}; {faster[self.limit]}"


def _around(least: float, most: float) -> str:
    """The middle, and by what share of it both are off."""
    middle = (least + most) / 2
    return f"{format_seconds(middle)} ± {(most - least) / 2 / middle if middle else 0.0:.0%}"


def forecast_of(
    work: Workload,
    earlier: Sequence[Rates],
    measured: tuple[Rates, Rates] | None,
    disk: Disk | None,
    machines: int = 1,
    estimate: Estimate | None = None,
) -> Forecast:
    """earlier: rates of runs of its kind, of which those of about as much work count. measured: the slowest and the
    fastest rates of a machine, where there are none; machines: how many share the work then. estimate: of workers that
    are elsewhere, where rates that are known here say nothing."""
    least = most = None
    floors: dict[str, float | None] = dict.fromkeys(THREADS)
    source = "none"
    sharing = work.sharing
    like = [rates for rates in earlier if rates.is_like(work.operations)]
    runs = 0
    timed = [rates for rates in like if rates.ratio is not None]
    near = [rates for rates in timed if not is_far(work, rates)]
    # Those that are far tell where nothing else does.
    known = [
        (rates, _floors(work, rates, sharing)) for rates in near or ([] if measured is not None else timed)
    ]
    command = None
    if estimate is not None:
        source, (least, most, floors) = estimate.source, _estimated(work, estimate)
        around = estimate.around_seconds
        command = None if around is None else (least + around[0], most + around[1])
    elif quick := _quick(work, like):
        source, runs, least, most = "runs", len(quick), min(quick), max(quick)
    elif known:
        source, runs = "runs", len(known)
        times = [
            seconds for rates, each in known if _known(each) for seconds in _scaled(max(_known(each)), rates)
        ]
        least, most = min(times), max(times)
        floors = {
            name: statistics.median(values)
            if (values := [floor for _, each in known if (floor := each[name]) is not None])
            else None
            for name in THREADS
        }
    elif measured is not None:
        slow, fast = (_floors(work, rates, max(1, min(machines, sharing))) for rates in measured)
        if _known(slow) and _known(fast):  # from all at once, at best, to one after the other, at worst
            source, least, most = "measured", max(_known(fast)), sum(_known(slow))
        floors = _middles(slow, fast)
    seconds = {name: floor for name, floor in floors.items() if floor is not None}
    return Forecast(
        least_seconds=least,
        most_seconds=most,
        command_seconds=command,
        source=source,
        runs=runs,
        floors=floors,
        limit=max(seconds, key=lambda name: seconds[name]) if seconds else None,
        disk_nbytes=work.disk_nbytes,
        disk=disk,
        memory_nbytes=work.host_nbytes,
        device_nbytes=work.device_nbytes,
        workers=work.workers,
        units=work.units,
        output=work.output,
        words="" if estimate is None else estimate.words,
    )


def _scaled(floor: float, rates: Rates) -> tuple[float, float]:
    """Between which seconds work takes whose longest stage alone takes ``floor``, by a run: of what that took, up to
    `MOST_START_SECONDS` were its start, which does not grow with the work; nobody knows how many."""
    in_proportion = (rates.ratio or 1.0) * floor
    if not rates.seconds:
        return in_proportion, in_proportion
    start = min(rates.seconds, MOST_START_SECONDS)
    return in_proportion, start + in_proportion * (1 - start / rates.seconds)


def is_far(work: Workload, rates: Rates) -> bool:
    """Whether a run was so much smaller, and so short, that it says little of this work."""
    short = rates.seconds is None or rates.seconds < LONG_RUN_SECONDS
    return short and work.operations > MOST_GROWTH * (rates.work or 0)


def _estimated(work: Workload, estimate: Estimate) -> tuple[float, float, dict[str, float | None]]:
    """The least and the most seconds, and the middles of the floors."""
    slow, fast = (
        _floors(replace(work, read_nbytes=nbytes), rates, work.sharing)
        for rates, nbytes in zip((estimate.slow, estimate.fast), estimate.read_nbytes, strict=True)
    )
    at_least, at_most = _known(fast), _known(slow)
    if estimate.ratio is not None:
        least, most = estimate.ratio[0] * max(at_least), estimate.ratio[1] * max(at_most)
    else:
        least, most = (
            max(floors) + share * (sum(floors) - max(floors)) + ends
            for floors, share, ends in zip(
                (at_least, at_most), estimate.beside, estimate.ends_seconds, strict=True
            )
        )
    return least, most, _middles(slow, fast)


def tell_time(work: Workload, earlier: Sequence[Rates]) -> bool:
    """Whether earlier runs say how long this takes: of those that were too short only how long they took is known, and
    those that are far say less than what is measured."""
    like = [rates for rates in earlier if rates.is_like(work.operations)]
    timed = any(rates.ratio is not None and not is_far(work, rates) for rates in like)
    return timed or bool(_quick(work, like))


def _quick(work: Workload, like: Sequence[Rates]) -> list[float]:
    """Seconds of runs that were mostly start, of as much work or more, where most of these were: nothing else says how
    long a small one takes, and those that took longer, such as the first, which compiles, are the exception."""
    seconds = [
        rates.seconds for rates in like if rates.seconds is not None and (rates.work or 0) >= work.operations
    ]
    if not seconds or statistics.median(seconds) >= LEAST_RUN_SECONDS:
        return []
    return [each for each in seconds if each < LEAST_RUN_SECONDS]


Floors = dict[str, float | None]
"""Seconds of each stage alone."""


def _known(floors: Floors) -> list[float]:
    return [floor for floor in floors.values() if floor is not None]


def _middles(slow: Floors, fast: Floors) -> Floors:
    return {name: _middle(slow[name], fast[name]) for name in THREADS}


def _middle(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else (one + other) / 2


def _floors(work: Workload, rates: Rates, sharing: int) -> Floors:
    amounts = {
        "load": (work.read_nbytes, rates.read_nbytes),
        "compute": (work.operations, rates.operations),
        "write": (work.write_nbytes, rates.write_nbytes),
    }
    return {name: amount / rate / sharing if rate else None for name, (amount, rate) in amounts.items()}


class Plan(Protocol):
    """A plan of any work, which prints itself."""

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Foreseen:
    """A plan with what is expected of it."""

    plan: Plan
    forecast: Forecast

    def to_json(self) -> dict[str, Any]:
        """The plan's fields, and ``forecast``."""
        return self.plan.to_json() | {"forecast": self.forecast.to_json()}

    def __str__(self) -> str:
        words = "\n".join(f"{name:<16}{text}" for name, text in self.forecast.table())
        return f"{words}\n\n{self.plan}"
