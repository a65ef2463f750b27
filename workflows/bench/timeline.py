"""When each stage of each worker was busy: one panel a case, one row a worker, one lane a stage, in which what was done
at once is drawn on top of one another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright.pipeline.plan.told import THREADS
from tilewright.pipeline.report.timeline import Timeline
from tilewright.pipeline.text.saved_counts import write_whole

COLOURS = {"load": "#2f6f9f", "compute": "#d9822b", "write": "#5a9a4a"}
LANE = 0.26
"""Height of a stage's lane, where a worker's row is 1 high."""

MOST_EDGED = 300


def plot_timelines(timelines: Sequence[tuple[str, Timeline]], path: str | Path) -> None:
    """Draw every run, under its title, in a panel with a time axis of its own and write a PNG; it appears when it is
    whole.

    Raises
    ------
    StoreError
        The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [max(1, len(timeline.lanes)) for _, timeline in timelines]
    figure = Figure(figsize=(10, 0.9 + sum(0.8 + 0.5 * count for count in rows)), dpi=144)
    figure.set_layout_engine("constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), squeeze=False, height_ratios=[1 + 0.6 * count for count in rows])
    for axes, (title, timeline) in zip(panels[:, 0], timelines, strict=True):
        _draw(axes, title, timeline)
    panels[-1, 0].set_xlabel("seconds from the run's start")
    labels = {name: name if len(stages) == 1 else " and ".join(stages) for name, stages in THREADS.items()}
    patches = [Patch(color=COLOURS[name], label=label) for name, label in labels.items()]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), fontsize=8, frameon=False)
    write_whole(Path(path), lambda draft: figure.savefig(draft, format="png"), overwrite=True)


def _draw(axes: Any, title: str, timeline: Timeline) -> None:
    workers = list(timeline.lanes)
    for row, worker in enumerate(workers):
        for place, stage in enumerate(THREADS):
            bottom = row + (place - len(THREADS) / 2) * LANE
            spans = []
            if (busy := timeline.lanes[worker].get(stage)) is not None:
                spans = [(begin - timeline.begin, end - begin) for begin, end, _ in busy.intervals]
            # A white edge sets one panel apart from the next; among very many it would be all that is left to see.
            width = 0.15 if len(spans) <= MOST_EDGED else 0
            axes.broken_barh(
                spans, (bottom, LANE), facecolor=COLOURS[stage], edgecolor="white", linewidth=width, zorder=2
            )
    axes.set_yticks(range(len(workers)), [f"worker {place}" for place in range(len(workers))], fontsize=7)
    axes.set_ylim(max(1, len(workers)) - 0.5, -0.5)
    axes.set_xlim(0, timeline.seconds)
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="x", color="0.88", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=9)
