"""How every benchmark measures: check first, then time all contestants in turns, and say on what machine.

Contestants take turns within a round, so that a clock that drifts or a neighbour that wakes up meets all of
them alike. What is reported is the median, with the quartiles as spread.
"""

from __future__ import annotations

import datetime
import importlib
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np

from tilewright.kernels.gpu.device_choice import current_device
from tilewright.kernels.gpu.launch import CUDATimer
from tilewright.pipeline.errors import TilewrightError
from tilewright.workflows.console import Outputs, is_quiet, on_interrupt, print_result

LEAST_SAMPLE_SECONDS = 20e-3
"""Short work is repeated within a sample until it takes this long: on a GPU the host's share then shows only once,
since it launches one run while another is under way."""
SEARCH_ROUNDS = 3
SEARCH_SAMPLE_SECONDS = 5e-3
"""How long a sample is, at least, while the strongest of a peer's settings is looked for."""
FINALISTS = 2
"""How many of a peer's settings are timed beside ours, besides the best of each of its callers."""
QUEUED = 20
"""How many calls are enqueued before the device is waited for, where single calls are compared with them."""
SINGLE = 10
"""How many single calls one contestant makes before the next has its turn."""
LIBRARIES = (
    "numpy",
    "numba",
    "zarr",
    "faiss-cpu",
    "zarrs",
    "numcodecs",
    "tensorstore",
    "kvikio-cu13",
    "kvikio-cu12",
    "numba-cuda",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "cupy",
    "torch",
)

COUNT = click.IntRange(min=1)


class Seconds(click.FloatRange):
    """A finite time above 0."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return seconds


SECONDS = Seconds()


class ElementType(click.ParamType):
    """The name of a dtype, of the kinds that a benchmark can draw numbers of."""

    name = "dtype"

    def __init__(self, kinds: str) -> None:
        self.kinds = kinds
        """NumPy's letters for them: ``i``, ``u``, ``f``, ``c``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        names = {"i": "integers", "u": "unsigned integers", "f": "floats", "c": "complex numbers"}
        try:
            if np.dtype(value).kind in self.kinds:
                return str(value)
        except TypeError:
            pass
        allowed = ", ".join(names[kind] for kind in self.kinds)
        self.fail(f"{value!r} cannot be measured; allowed are NumPy's names of {allowed}", param, ctx)


class Picture(click.Path):
    """A PNG file that can be written: refused before hours of measuring, not after."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if path.suffix != ".png":
            self.fail(f"{value!r} must end in .png", param, ctx)
        if not path.absolute().parent.is_dir():
            self.fail(f"there is no folder {str(path.parent)!r}; create it, or choose another", param, ctx)
        return path


class WrongAnswer(TilewrightError):
    """A contestant computed something else than the reference: its time would mean nothing."""


@dataclass(frozen=True)
class Contestant:
    """One way of doing the work of a case."""

    name: str
    run: Callable[[], Any]
    """Does the work once; on a GPU it may return before the work is finished."""
    check: Callable[[], str | None]
    """Does the work once and compares: None when it is right, else what is wrong."""
    peer: bool = False
    """Whether it is somebody else's software: ratios are taken against the fastest peer of a case."""
    work: float | None = None
    """Operations or bytes of one run, where it does less than the case says (a slow peer does a part)."""
    prepare: Callable[[], None] | None = None
    """Done before every run and not timed; a run that needs it is not repeated within a sample."""
    caller: str = ""
    """Through what a peer is called: the best setting of each caller is timed beside ours (`search`)."""


@dataclass(frozen=True)
class Row:
    """What one contestant reached in one case."""

    case: str
    contestant: str
    peer: bool
    work: float
    """Operations or bytes of one run."""
    seconds: float
    """The median."""
    low: float
    """The first quartile of the seconds."""
    high: float
    """The third quartile."""
    samples: int

    @property
    def rate(self) -> float:
        """Work a second."""
        return self.work / self.seconds


@dataclass(frozen=True)
class Search:
    """The settings of a case's peers that were tried, and what became of each."""

    case: str
    tried: tuple[Row, ...]
    """Those whose answer is right, the fastest first; from `SEARCH_ROUNDS` short samples each."""
    refused: tuple[tuple[str, str], ...]
    """Names and reasons of the others: what the library did not take, or a wrong answer."""
    turning_seconds: float | None = None
    """What turning a B by rows into one by columns takes, which no setting that wants it so is charged for."""

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "tried": {row.contestant: row.seconds for row in self.tried},
            "refused": dict(self.refused),
            "turning_b_seconds": self.turning_seconds,
        }

    def describe(self, unit: str, scale: float) -> str:
        """A few lines: how many settings were tried, the fastest of them, and those left out by reason."""
        best = ", ".join(
            f"{row.contestant} {significant(row.rate / scale)}" for row in self.tried[: 2 * FINALISTS]
        )
        text = f"{self.case}: {len(self.tried)} settings of peers searched; {unit} of the fastest: {best or 'none'}"
        if self.turning_seconds is not None:
            text += f"; turning a B by rows first takes {significant(self.turning_seconds * 1e3)} ms more"
        reasons: dict[str, list[str]] = {}
        for name, reason in self.refused:
            reasons.setdefault(reason, []).append(name)
        return text + "".join(
            f"\n  not taken ({reason}): {'; '.join(names)}" for reason, names in reasons.items()
        )


@dataclass(frozen=True)
class BenchReport:
    """A benchmark's rows and the machine that they were measured on."""

    title: str
    unit: str
    """What a rate is shown in, such as Tflop/s."""
    scale: float
    """How many operations or bytes a second one unit is."""
    machine: dict[str, str]
    rows: tuple[Row, ...]
    searches: tuple[Search, ...] = ()
    """Of the cases whose peers have several settings."""

    def strongest(self, case: str) -> Row | None:
        """The fastest peer of a case; None where it has none."""
        peers = [row for row in self.rows if row.case == case and row.peer]
        return max(peers, key=lambda row: row.rate, default=None)

    def ratio(self, row: Row) -> float | None:
        """The row's rate over that of the fastest peer in its case; None where there is no peer."""
        peer = self.strongest(row.case)
        return None if peer is None else row.rate / peer.rate

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "unit": self.unit,
            "machine": self.machine,
            "rows": [
                asdict(row) | {"rate": row.rate / self.scale, "ratio": self.ratio(row)} for row in self.rows
            ],
            "searches": [found.to_json() for found in self.searches],
        }

    def __str__(self) -> str:
        machine = "; ".join(f"{name} {value}" for name, value in self.machine.items())
        return "\n".join([shown(self.table(), machine), *self.searched()])

    def searched(self) -> list[str]:
        """What was searched in each case for the strongest peer, as lines."""
        return [found.describe(self.unit, self.scale) for found in self.searches]

    def table(self) -> Any:
        """The rows as a rich table, one section a case."""
        from rich.table import Table

        table = Table(title=self.title)
        for heading, right in (
            ("case", False),
            ("contestant", False),
            (self.unit, True),
            ("ms", True),
            ("quartiles", True),
            ("× peer", True),
        ):
            table.add_column(heading, justify="right" if right else "left")
        previous = None
        for row in self.rows:
            if previous is not None and row.case != previous:
                table.add_section()
            ratio = self.ratio(row)
            strongest = row.peer and row == self.strongest(row.case)
            table.add_row(
                row.case if row.case != previous else "",
                row.contestant + (" (peer)" if strongest else " (weaker peer)" if row.peer else ""),
                significant(row.rate / self.scale),
                significant(row.seconds * 1e3),
                f"{significant(row.low * 1e3)} – {significant(row.high * 1e3)}",
                "" if ratio is None else f"{ratio:.2f}",
            )
            previous = row.case
        return table

    def plot(self, path: str | Path) -> None:
        """Draw every rate as a bar, one panel a case with a scale of its own, peers hatched; writes a PNG.

        Raises StoreError where that cannot be written.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        from tilewright.pipeline.text.saved_counts import write_whole

        cases = list(dict.fromkeys(row.case for row in self.rows))
        groups = [[row for row in self.rows if row.case == case] for case in cases]
        figure = Figure(figsize=(8, 0.6 + sum(0.6 + 0.24 * len(rows) for rows in groups)), dpi=144)
        figure.set_layout_engine("constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(
            len(groups), squeeze=False, height_ratios=[1 + 0.5 * len(rows) for rows in groups]
        )
        for axes, case, rows in zip(panels[:, 0], cases, groups, strict=True):
            self._draw(axes, rows)
            axes.set_title(case, loc="left", fontsize=9)
        panels[-1, 0].set_xlabel(self.unit)
        figure.suptitle(self.title, fontsize=11)
        write_whole(Path(path), lambda draft: figure.savefig(draft, format="png"), overwrite=True)

    def _draw(self, axes: Any, rows: list[Row]) -> None:
        rates = [row.rate / self.scale for row in rows]
        spread = [
            [rate - row.work / row.high / self.scale for rate, row in zip(rates, rows, strict=True)],
            [row.work / row.low / self.scale - rate for rate, row in zip(rates, rows, strict=True)],
        ]
        bars = axes.barh(range(len(rows)), rates, xerr=spread, color="#2f6f9f", zorder=2, ecolor="0.4")
        for bar, row in zip(bars, rows, strict=True):
            if row.peer:
                bar.set(facecolor="0.75", hatch="//")
        axes.set_yticks(range(len(rows)), [row.contestant for row in rows], fontsize=7)
        axes.tick_params(axis="x", labelsize=7)
        axes.bar_label(bars, [significant(rate) for rate in rates], fontsize=7, padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.12, y=0.02)
        axes.grid(axis="x", color="0.88", zorder=0)
        axes.spines[["top", "right"]].set_visible(False)


class Report(Protocol):
    """What a benchmark prints: text for people, or one JSON object."""

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class DetailedReport:
    """A report, and more about each case than its rows say."""

    report: BenchReport
    details: list[dict[str, Any]]
    """Of each case, for JSON."""
    text: str
    """What people are told of that, below the table."""

    def to_json(self) -> dict[str, Any]:
        return self.report.to_json() | {"details": self.details}

    def __str__(self) -> str:
        return f"{self.report}\n{self.text}"


def shown(*parts: Any) -> str:
    """Tables and texts of rich as plain text."""
    from rich.console import Console

    console = Console(width=110, no_color=True)
    with console.capture() as captured:
        console.print(*parts, sep="\n", style="dim")
    return captured.get().rstrip()


def expect_pictures(*paths: Path | None) -> None:
    """From now on Ctrl-C says which of the files that a command was asked for are finished."""
    on_interrupt(Outputs(*(path for path in paths if path is not None)).kept)


def tell(text: str) -> None:
    """Say how far a benchmark has come, unless nothing is to be said."""
    if not is_quiet():
        click.echo(text, err=True)


def publish(
    report: Report,
    *pictures: tuple[Path | None, Callable[[Path], None]],
    as_json: bool,
) -> None:
    """Draw the pictures that were asked for, and print the report even where one cannot be written: measuring may have
    taken hours."""
    try:
        for path, draw in pictures:
            if path is not None:
                draw(path)
    except Exception:
        print_result(report, as_json=as_json)
        raise
    print_result(report, as_json=as_json)


def significant(value: float, digits: int = 3) -> str:
    """A number with a few significant digits and no exponent: 0.0123, 4.56, 789, 12300."""
    if not value or not math.isfinite(value):
        return str(value)
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):.{max(places, 0)}f}"


def measure(
    case: str,
    work: float,
    contestants: Sequence[Contestant],
    *,
    on_gpu: bool,
    rounds: int = 15,
    seconds: float = 2.0,
) -> list[Row]:
    """Check every contestant, then time all of them in turns.

    work: operations or bytes of one run. rounds: samples of each at most; fewer, but at least three, where
    one contestant would need more than ``seconds`` for them. Raises WrongAnswer before anything is timed.
    """
    _check(case, contestants)
    return _timed(case, work, contestants, on_gpu, rounds, seconds, LEAST_SAMPLE_SECONDS)


def _check(case: str, contestants: Sequence[Contestant]) -> None:
    for contestant in contestants:
        wrong = contestant.check()
        if wrong is not None:
            raise WrongAnswer(f"{case}: {contestant.name} is wrong: {wrong}")


def _timed(
    case: str,
    work: float,
    contestants: Sequence[Contestant],
    on_gpu: bool,
    rounds: int,
    seconds: float,
    sample_seconds: float,
) -> list[Row]:
    repeats, samples = {}, {}
    for contestant in contestants:
        _sample(contestant, 1, on_gpu)  # the check has compiled it; this fills caches and pools
        once = _sample(contestant, 1, on_gpu)
        enough = math.ceil(sample_seconds / once) if contestant.prepare is None else 1
        repeats[contestant.name] = max(1, enough)
        samples[contestant.name] = max(3, min(rounds, int(seconds / (once * repeats[contestant.name]))))
    found: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for turn in range(max(samples.values())):
        for contestant in contestants:
            if turn < samples[contestant.name]:
                found[contestant.name].append(_sample(contestant, repeats[contestant.name], on_gpu))
    rows = []
    for contestant in contestants:
        times = found[contestant.name]
        low, _, high = statistics.quantiles(times, n=4)
        done = work if contestant.work is None else contestant.work
        rows.append(
            Row(case, contestant.name, contestant.peer, done, statistics.median(times), low, high, len(times))
        )
    return rows


def taken(candidates: Sequence[Contestant]) -> tuple[list[Contestant], list[tuple[str, str]]]:
    """Those of other people's contestants whose answer is right, and the names of the others with the reasons."""
    able: list[Contestant] = []
    refused: list[tuple[str, str]] = []
    for candidate in candidates:
        try:
            wrong = candidate.check()
        except Exception as error:  # each library has kinds of its own for what it does not take
            refused.append((candidate.name, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
            continue
        if wrong is None:
            able.append(candidate)
        else:
            refused.append((candidate.name, f"wrong: {wrong}"))
    return able, refused


def search(
    case: str, work: float, candidates: Sequence[Contestant], *, on_gpu: bool, seconds: float = 0.1
) -> tuple[list[Contestant], Search]:
    """The settings of the peers that are worth timing beside ours: the fastest `FINALISTS` of all and the fastest of
    each caller, fastest first.

    A setting that a library does not take, or that answers wrongly, is left out, and the search says so. seconds: for
    each setting, about.
    """
    able, refused = taken(candidates)
    rows = _timed(case, work, able, on_gpu, SEARCH_ROUNDS, seconds, SEARCH_SAMPLE_SECONDS) if able else []
    order = sorted(range(len(able)), key=lambda index: -rows[index].rate)
    kept: list[Contestant] = []
    for place, index in enumerate(order):
        candidate = able[index]
        if place < FINALISTS or all(candidate.caller != other.caller for other in kept):
            kept.append(candidate)
    return kept, Search(case, tuple(rows[index] for index in order), tuple(refused))


@dataclass(frozen=True)
class CallRow:
    """Seconds of a call as its caller meets them, by the host's clock."""

    case: str
    contestant: str
    peer: bool
    work: float
    """Operations or bytes of one call."""
    single: float
    """From the call until the device has finished, one at a time: the median."""
    queued: float
    """Of one of several calls in a row that the device is waited for once: the median."""
    in_a_row: int
    """How many that were: `QUEUED`, fewer of calls so long that it would not show."""


@dataclass(frozen=True)
class CallsReport:
    """Single calls beside queued ones."""

    unit: str
    scale: float
    rows: tuple[CallRow, ...]

    def ratio(self, row: CallRow, way: str) -> float | None:
        """The speed of a row over that of the peer that is fastest in this way, ``single`` or ``queued``, in its case;
        None where there is no peer."""
        peers = [getattr(other, way) for other in self.rows if other.case == row.case and other.peer]
        mine: float = getattr(row, way)
        return min(peers) / mine if peers else None

    def to_json(self) -> list[dict[str, Any]]:
        return [
            asdict(row)
            | {f"{way}_rate": row.work / getattr(row, way) / self.scale for way in ("single", "queued")}
            | {f"{way}_ratio": self.ratio(row, way) for way in ("single", "queued")}
            for row in self.rows
        ]

    def table(self) -> Any:
        """The rows as a rich table, one section a case."""
        from rich.table import Table

        table = Table(title=f"single calls, and {QUEUED} calls in a row, by the host's clock")
        for heading in ("case", "contestant"):
            table.add_column(heading)
        for way in ("single", "queued"):
            for heading in (f"{way}, µs", self.unit, "× peer"):
                table.add_column(heading, justify="right")
        previous = None
        for row in self.rows:
            if previous is not None and row.case != previous:
                table.add_section()
            cells = []
            for way in ("single", "queued"):
                seconds, ratio = getattr(row, way), self.ratio(row, way)
                cells += [significant(seconds * 1e6), significant(row.work / seconds / self.scale)]
                cells.append("" if ratio is None else f"{ratio:.2f}")
            name = row.contestant + " (peer)" * row.peer
            table.add_row(row.case if row.case != previous else "", name, *cells)
            previous = row.case
        return table


def measure_calls(
    case: str,
    work: float,
    contestants: Sequence[Contestant],
    *,
    synchronize: Callable[[], None],
    seconds: float = 0.5,
) -> list[CallRow]:
    """Time single and queued calls of contestants that were checked and have run, in turns, by the host's clock.

    work: operations or bytes of one call. synchronize: waits until the device has finished. seconds: for each
    contestant, about; three turns at least.
    """
    shape = {}
    for contestant in contestants:
        _calls(contestant, 1, synchronize)
        once = _calls(contestant, 1, synchronize)
        singles = max(1, min(SINGLE, int(0.1 / once)))
        queued = max(2, min(QUEUED, int(0.5 / once)))
        turns = max(3, min(30, int(seconds / (once * (singles + queued)))))
        shape[contestant.name] = singles, queued, turns
    single: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    together: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for turn in range(max(turns for _, _, turns in shape.values())):
        for contestant in contestants:
            singles, queued, turns = shape[contestant.name]
            if turn < turns:
                single[contestant.name] += [_calls(contestant, 1, synchronize) for _ in range(singles)]
                together[contestant.name].append(_calls(contestant, queued, synchronize))
    return [
        CallRow(
            case,
            contestant.name,
            contestant.peer,
            work if contestant.work is None else contestant.work,
            statistics.median(single[contestant.name]),
            statistics.median(together[contestant.name]),
            shape[contestant.name][1],
        )
        for contestant in contestants
    ]


def _calls(contestant: Contestant, count: int, synchronize: Callable[[], None]) -> float:
    """Seconds of each of so many calls in a row, the wait for the last included."""
    start = time.perf_counter()
    for _ in range(count):
        contestant.run()
    synchronize()
    return (time.perf_counter() - start) / count


def _sample(contestant: Contestant, repeats: int, on_gpu: bool) -> float:
    """Seconds of one run: device time by events on a GPU, wall time on a CPU."""
    if contestant.prepare is not None:
        contestant.prepare()
    if on_gpu:
        with CUDATimer() as timer:
            for _ in range(repeats):
                contestant.run()
        return timer.seconds / repeats
    start = time.perf_counter()
    for _ in range(repeats):
        contestant.run()
    return (time.perf_counter() - start) / repeats


def forget_pages(folder: Path) -> None:
    """Ask the system to drop what it caches of a folder's files; a file system in memory drops nothing."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # pages that are not written yet cannot be dropped
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def machine(on_gpu: bool) -> dict[str, str]:
    """What a figure must be read with: the hardware, the versions and the date."""
    found = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
    }
    if on_gpu:
        from tilewright.kernels.gpu.device import devices

        gpu = devices()[current_device()]
        found["gpu"] = f"{gpu.name} (sm_{gpu.compute_capability[0]}{gpu.compute_capability[1]})"
        found["driver"] = f"{gpu.driver_version}, CUDA {gpu.driver_cuda[0]}.{gpu.driver_cuda[1]}"
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def library(name: str) -> Any:
    """A peer's module; None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
