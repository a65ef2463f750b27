"""Which launch shape is fastest: one kernel timed over numbers of blocks and of threads a block."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilewright.kernels.errors import OptionError
from tilewright.kernels.gpu.launch import CUDATimer
from tilewright.kernels.gpu.streams import DEFAULT_STREAM


@dataclass(frozen=True)
class SweepPoint:
    """One shape of a launch and how long it took; ``seconds`` is None where the device refused it."""

    blocks: int
    threads: int
    seconds: float | None


@dataclass(frozen=True)
class Sweep:
    """The times of one kernel over launch shapes."""

    title: str
    points: tuple[SweepPoint, ...]

    @property
    def best(self) -> SweepPoint:
        """The fastest; OptionError where no shape could be launched."""
        timed = [point for point in self.points if point.seconds is not None]
        if not timed:
            raise OptionError(f"{self.title}: no launch of the sweep was possible; try fewer threads a block")
        return min(timed, key=lambda point: point.seconds or 0.0)

    def __str__(self) -> str:
        """A table: a row for each number of threads, a column for each number of blocks, microseconds."""
        blocks = sorted({point.blocks for point in self.points})
        times = {(point.blocks, point.threads): point.seconds for point in self.points}
        best = self.best
        lines = [self.title, "threads \\ blocks" + "".join(f"{count:>12}" for count in blocks)]
        for threads in sorted({point.threads for point in self.points}):
            line = f"{threads:>16}"
            for count in blocks:
                seconds = times.get((count, threads))
                text = "-" if seconds is None else f"{seconds * 1e6:.1f}"
                line += f"{text + ('*' if (count, threads) == (best.blocks, best.threads) else ''):>12}"
            lines.append(line)
        return "\n".join([*lines, "microseconds; * fastest; - refused by the device"])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def plot(self, path: str | Path) -> None:
        """Draw time against blocks, a line for each number of threads, and write a PNG."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.5), dpi=144, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for threads in sorted({point.threads for point in self.points}):
            line = [point for point in self.points if point.threads == threads and point.seconds is not None]
            axes.plot(
                [point.blocks for point in line],
                [1e6 * (point.seconds or 0.0) for point in line],
                marker="o",
                label=f"{threads} threads a block",
            )
        axes.set(title=self.title, xlabel="blocks", ylabel="microseconds", xscale="log", yscale="log")
        axes.legend(fontsize=8)
        figure.savefig(path, format="png")


def sweep(
    launch: Callable[[int, int], None],
    blocks: Iterable[int],
    threads: Iterable[int],
    *,
    title: str = "sweep",
    repeats: int = 5,
    stream: Any = DEFAULT_STREAM,
) -> Sweep:
    """Time ``launch(blocks, threads)``, which enqueues one kernel on ``stream``, over all pairs of both.

    Each shape is launched once to warm up and then ``repeats`` times; the median counts. A shape that the
    device refuses (too many threads, registers or bytes of shared memory) is kept without a time.
    """
    points = []
    for count, width in itertools.product(blocks, list(threads)):
        try:
            launch(count, width)
            samples = []
            for _ in range(repeats):
                with CUDATimer(stream) as timer:
                    launch(count, width)
                samples.append(timer.seconds)
        except Exception as error:
            if not _refused(error):
                raise
            points.append(SweepPoint(count, width, None))
        else:
            points.append(SweepPoint(count, width, statistics.median(samples)))
    return Sweep(title, tuple(points))


REFUSALS = ("INVALID_VALUE", "LAUNCH_OUT_OF_RESOURCES", "INVALID_CONFIGURATION")
"""What the driver answers to a launch of an impossible shape."""


def _refused(error: Exception) -> bool:
    return any(name in str(error) for name in REFUSALS)
