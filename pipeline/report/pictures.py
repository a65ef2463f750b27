"""Pictures of a run as SVG, each one string: tiles of C by who computed them, threads over time, memory over time.

Colours, fonts and strokes are classes of the page's style (`style.py`), so that they follow its light or dark. What
would be more shapes than can be seen is added up first, and the picture's own words say so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from tilewright.kernels.numbers import ceil_div, counted, format_nbytes, format_seconds
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.plan.told import THREADS
from tilewright.pipeline.report.figures import STAGE_NAMES
from tilewright.pipeline.report.timeline import NOBODY, Phase, Timeline

WIDTH = 960
GUTTER = 172
"""To the left of a time axis, for names."""
RIGHT = 16
LANE = 11
"""Height of a thread's lane."""
ROW_GAP = 12
MOST_ROWS = 24
"""Of workers; of more, each row is the mean of several."""
MOST_DRAWN = 300
"""Intervals of one lane that are drawn one by one; of more, the share of the time in each of `BINS` stretches."""
BINS = 240
CHARACTER = 6.6
"""About the width of a character of the pictures' font."""

MOST_CELLS = 64
"""Of a side of the picture of C's tiles; where there are more tiles, each cell is several."""
SIDE = 420
LEAST_SIDE = 60

WORKER_COLOURS = 10
"""Classes of the style; of more workers, some share one."""
MOST_LINES = 8
"""Workers whose memory is a line each; of more, the mean and the most."""

THREAD_NAMES = {"load": "read", "compute": "multiply", "write": "write", "piece": "pieces"}
PHASE_NAMES = {
    "opening": "opening, planning",
    "between": "between",
    "publishing": "publishing",
    "matmul": "tiles",
    "verify": "check",
    "statistics": "statistics",
    "means": "means",
    "histogram": "counting",
    "topk": "search",
    "pairs": "search",
}


def _number(value: float) -> str:
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def _text(x: float, y: float, words: str, kind: str = "tw-label", anchor: str = "start") -> str:
    return f'<text x="{_number(x)}" y="{_number(y)}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(width: float, height: float, name: str, described: str, parts: Sequence[str]) -> str:
    """name: what a reader of the screen says of it."""
    return (
        f'<svg viewBox="0 0 {_number(width)} {_number(height)}" width="{_number(width)}" role="img"'
        f' aria-label="{escape(f"{name}: {described}")}" class="tw-picture">'
        f"<title>{escape(name)}</title><desc>{escape(described)}</desc>{''.join(parts)}</svg>"
    )


def time_ticks(seconds: float, most: int = 10) -> list[float]:
    """Round times from 0 on, at most so many."""
    if seconds <= 0:
        return [0.0]
    rough = seconds / most
    steps = [
        *(base * 10.0**power for power in range(-6, 2) for base in (1, 2, 5) if base * 10.0**power < 60),
        *(60.0 * minutes for minutes in (1, 2, 5, 10, 20, 30)),
        *(3600.0 * hours for hours in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 20000)),
    ]
    step = next((step for step in steps if step >= rough), steps[-1])
    return [step * place for place in range(int(seconds / step) + 1)]


def time_label(tick: float, step: float) -> str:
    """In the unit of the ticks' step: all of an axis alike."""
    if step < 60:
        digits = max(0, -math.floor(math.log10(step))) if step < 1 else 0
        return f"{tick:.{digits}f} s"
    return f"{tick / 60:.0f} min" if step < 3600 else f"{tick / 3600:.0f} h"


def nbytes_ticks(most: float, count: int = 5) -> list[float]:
    """Multiples of a power of two from 0 to above ``most``."""
    step = 2.0 ** max(0, math.ceil(math.log2(max(1.0, most) / count)))
    return [step * place for place in range(math.ceil(max(1.0, most) / step) + 1)]


def _time_axis(seconds: float, top: float, bottom: float) -> list[str]:
    """Grid lines with their times below."""
    scale = (WIDTH - GUTTER - RIGHT) / max(seconds, 1e-9)
    ticks = time_ticks(seconds)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else max(seconds, 1e-6)
    parts = []
    for tick in ticks:
        x = GUTTER + tick * scale
        parts.append(f'<path d="M{_number(x)} {_number(top)}V{_number(bottom)}" class="tw-grid"/>')
        parts.append(_text(x, bottom + 14, time_label(tick, step), anchor="middle" if tick else "start"))
    return parts


@dataclass(frozen=True)
class Row:
    """Workers that the timeline shows as one."""

    name: str
    workers: tuple[str, ...]


def rows_of(workers: Sequence[str]) -> list[Row]:
    """A row for each worker; of more than `MOST_ROWS`, for several consecutive ones."""
    if len(workers) <= MOST_ROWS:
        return [Row(f"worker {place}", (worker,)) for place, worker in enumerate(workers)]
    each = ceil_div(len(workers), MOST_ROWS)
    rows = []
    for start in range(0, len(workers), each):
        stop = min(start + each, len(workers))
        name = f"workers {start}–{stop - 1}" if stop - start > 1 else f"worker {start}"
        rows.append(Row(name, tuple(workers[start:stop])))
    return rows


def timeline_picture(timeline: Timeline, threads: Sequence[str] = tuple(THREADS)) -> str:
    """Phases above, and for each worker a lane a thread."""
    workers = list(timeline.lanes)
    rows = rows_of(workers)
    seconds = max(timeline.seconds, 1e-9)
    scale = (WIDTH - GUTTER - RIGHT) / seconds
    top = 30
    height = len(threads) * LANE + ROW_GAP
    bottom = top + max(1, len(rows)) * height
    parts = [*_phases(timeline.phases, scale), *_time_axis(seconds, top - 4, bottom)]
    binned = False
    for place, row in enumerate(rows):
        y = top + place * height
        parts.append(
            _text(GUTTER - 56, y + len(threads) / 2 * LANE + 4, row.name, "tw-label tw-strong", "end")
        )
        for lane, thread in enumerate(threads):
            lane_top = y + lane * LANE
            parts.append(
                _text(GUTTER - 4, lane_top + LANE - 2, THREAD_NAMES[thread], "tw-label tw-small", "end")
            )
            path, bins = _lane(timeline, row, thread, lane_top, scale)
            binned |= bins
            if path:
                told = f"{row.name}, {THREAD_NAMES[thread]}"
                parts.append(f'<path d="{path}" class="tw-{thread}"><title>{escape(told)}</title></path>')
    said = f"{counted(len(workers), 'worker')}, {format_seconds(timeline.seconds)}"
    return _svg(WIDTH, bottom + 22, "Timeline", said, parts) + _timeline_note(timeline, rows, binned)


def _timeline_note(timeline: Timeline, rows: Sequence[Row], binned: bool) -> str:
    said = []
    if len(rows) < len(timeline.lanes):
        said.append(f"each row is the mean of up to {len(rows[0].workers)} workers")
    if binned:
        said.append(
            "where a lane has too many intervals to be seen, the height is the share of the time it was busy, in"
            f" stretches of {format_seconds(timeline.seconds / BINS)}"
        )
    text = "; ".join(said)
    return f'<p class="tw-note">{escape(text[:1].upper() + text[1:])}.</p>' if said else ""


def _phases(phases: Sequence[Phase], scale: float) -> list[str]:
    parts = []
    for place, phase in enumerate(phases):
        x, width = GUTTER + phase.begin * scale, (phase.end - phase.begin) * scale
        name = PHASE_NAMES.get(phase.name, phase.name)
        told = f"{name}: {format_seconds(phase.end - phase.begin)}"
        parts.append(
            f'<rect x="{_number(x)}" y="4" width="{_number(max(width, 0.5))}" height="16"'
            f' class="tw-phase{place % 2}"><title>{escape(told)}</title></rect>'
        )
        if width > CHARACTER * len(name) + 6:
            parts.append(_text(x + width / 2, 16, name, "tw-label tw-small", "middle"))
    return parts


def _lane(timeline: Timeline, row: Row, thread: str, top: float, scale: float) -> tuple[str, bool]:
    """The path of a lane, and whether it is one of shares."""
    found = [timeline.lanes[worker][thread] for worker in row.workers if thread in timeline.lanes[worker]]
    if not found:
        return "", False
    if len(row.workers) == 1 and len(found[0].intervals) <= MOST_DRAWN:
        drawn = []
        for begin, end, _ in found[0].intervals:
            x, width = GUTTER + (begin - timeline.begin) * scale, max((end - begin) * scale, 0.3)
            drawn.append(f"M{x:.1f} {top + 1}h{width:.2f}v{LANE - 2}h-{width:.2f}z")
        return "".join(drawn), False
    edges = timeline.begin + np.linspace(0.0, timeline.seconds, BINS + 1)
    shares = sum(busy.per_bin(edges) for busy in found) / len(row.workers) / (timeline.seconds / BINS or 1.0)
    width = (WIDTH - GUTTER - RIGHT) / BINS
    steps, base = [], top + LANE - 1
    for place, share in enumerate(np.minimum(1.0, shares)):
        if share > 0.005:
            high = share * (LANE - 2)
            steps.append(f"M{GUTTER + place * width:.1f} {base:g}v-{high:.1f}h{width:.2f}v{high:.1f}z")
    return "".join(steps), True


@dataclass(frozen=True)
class Cells:
    """C's tiles, several in a cell where there are many."""

    shape: tuple[int, int]
    counts: np.ndarray
    """Tiles in each cell."""
    workers: np.ndarray
    """The worker that computed most of them, by its number in `Timeline.workers`; `NOBODY`: an earlier run."""
    shares: np.ndarray
    """The share of the cell's tiles that it computed."""


def cells_of(plan: MatmulPlan, computed_by: np.ndarray) -> Cells:
    """computed_by: as `Timeline.computed_by`, of all tiles of the plan."""
    grid = plan.grid
    rows, columns = (min(side, MOST_CELLS) for side in grid)
    i, j = plan.tile_grid.positions()
    cell = (i * rows // max(1, grid[0])) * columns + j * columns // max(1, grid[1])
    most = int(computed_by.max(initial=0)) + 2
    keys, counts = np.unique(cell * most + computed_by + 1, return_counts=True)
    cells, workers = keys // most, keys % most - 1
    order = np.lexsort((-counts, cells))
    first = order[np.concatenate(([True], np.diff(cells[order]) > 0))] if len(order) else order
    total = np.bincount(cell, minlength=rows * columns)
    who, share = np.full(rows * columns, NOBODY), np.zeros(rows * columns)
    who[cells[first]] = workers[first]
    share[cells[first]] = counts[first] / total[cells[first]]
    shape = rows, columns
    return Cells(shape, total.reshape(shape), who.reshape(shape), share.reshape(shape))


def tiles_picture(plan: MatmulPlan, timeline: Timeline) -> str:
    """C as its tiles lie in it, coloured by who computed them, with axes of C's rows and columns."""
    computed_by = timeline.computed_by
    if len(computed_by) != plan.tile_count:  # nothing was left to do
        computed_by = np.full(plan.tile_count, NOBODY, np.int32)
    cells = cells_of(plan, computed_by)
    rows, columns = cells.shape
    longest = max(plan.m, plan.n, 1)
    high, wide = (max(LEAST_SIDE, SIDE * side / longest) for side in (plan.m, plan.n))
    left, top = 62, 24
    step_x, step_y = wide / max(1, columns), high / max(1, rows)
    gap = 1.0 if min(step_x, step_y) > 10 else 0.0
    order = {worker: place for place, worker in enumerate(timeline.lanes)}
    places = [order.get(worker, number) for number, worker in enumerate(timeline.workers)]
    parts = [
        f'<rect x="{left}" y="{top}" width="{_number(wide)}" height="{_number(high)}" class="tw-empty"/>'
    ]
    for row in range(rows):
        start = 0
        while start < columns:
            stop = start + 1
            same = (cells.workers[row, start], cells.counts[row, start] > 0)
            alike = gap == 0
            while (
                alike and stop < columns and (cells.workers[row, stop], cells.counts[row, stop] > 0) == same
            ):
                stop += 1
            if same[1]:
                number = int(same[0])
                kind = "tw-earlier" if number == NOBODY else f"tw-w{places[number] % WORKER_COLOURS}"
                inside = cells.counts[row, start:stop]
                said = counted(int(inside.sum()), "tile")
                who = "an earlier run" if number == NOBODY else f"worker {places[number]}"
                if cells.shares[row, start:stop].min() < 1:
                    who = f"mostly {who}"
                parts.append(
                    f'<rect x="{left + start * step_x:.2f}" y="{top + row * step_y:.2f}"'
                    f' width="{(stop - start) * step_x - gap:.2f}" height="{step_y - gap:.2f}" class="{kind}">'
                    f"<title>{escape(f'{said}: {who}')}</title></rect>"
                )
            start = stop
    parts += [
        _text(left, top - 8, "0"),
        _text(left + wide, top - 8, f"{plan.n} columns", anchor="end"),
        _text(left - 6, top + 10, "0", anchor="end"),
        _text(left - 6, top + high, str(plan.m), anchor="end"),
        _text(left - 6, top + high - 14, "rows", anchor="end") if high > 50 else "",
    ]
    name = "Tiles of C"
    said = f"{plan.grid[0]} × {plan.grid[1]} tiles, coloured by the worker that computed them"
    return _svg(left + wide + 12, top + high + 8, name, said, parts) + _tiles_note(plan, cells)


def _tiles_note(plan: MatmulPlan, cells: Cells) -> str:
    said = []
    if cells.shape != plan.grid:
        each = " × ".join(
            _number(side / cell) for side, cell in zip(plan.grid, cells.shape, strict=True) if cell
        )
        said.append(f"each cell is {each} tiles and has the colour of the worker that computed most of them")
    if plan.symmetric:
        said.append("tiles above the diagonal are mirror images and were not computed")
    if plan.window is not None:
        said.append("what lies outside the band is 0 and was not computed")
    text = "; ".join(said)
    return f'<p class="tw-note">{escape(text[:1].upper() + text[1:])}.</p>' if said else ""


def panels_picture(plan: MatmulPlan) -> str:
    """The panels of a row of tiles of A, and of a column of B, and how many of each stay in memory."""
    wide, left = 300, 34
    kept = {"A": plan.a_buffers, "B": plan.a_buffers if plan.shares_panels else plan.b_buffers}
    parts, top = [], 6
    for role, buffers in kept.items():
        inside = min(1.0, buffers / max(1, plan.panel_count)) * wide
        parts += [
            _text(left - 8, top + 13, role, "tw-label tw-strong", "end"),
            f'<rect x="{left}" y="{top}" width="{wide}" height="16" class="tw-empty"/>',
            f'<rect x="{left}" y="{top}" width="{_number(inside)}" height="16" class="tw-load"/>',
        ]
        top += 24
    said = (
        f"{counted(plan.panel_count, 'panel')} of depth {plan.panel_depth} along k; room for {kept['A']} of A"
        + ("" if plan.shares_panels else f" and {kept['B']} of B")
        + " in a worker's memory"
    )
    return _svg(left + wide + 4, top, "Panels kept", said, parts) + f'<p class="tw-note">{escape(said)}.</p>'


def memory_picture(timeline: Timeline, *, device: bool, projected: int | None = None) -> str:
    """Memory of the workers' processes, or in use on their GPUs, over time; empty where nothing is known of it.

    projected: what the plan said it would be at most."""
    lines = {
        worker: (samples.times - timeline.begin, samples.device if device else samples.host)
        for worker, samples in timeline.memory.items()
    }
    lines = {
        worker: (times, nbytes) for worker, (times, nbytes) in lines.items() if np.isfinite(nbytes).any()
    }
    if not lines:
        return ""
    most = max(float(np.nanmax(nbytes)) for _, nbytes in lines.values())
    ticks = nbytes_ticks(max(most, projected or 0))
    top, high = 12, 150
    bottom = top + high
    up = high / ticks[-1]
    along = (WIDTH - GUTTER - RIGHT) / max(timeline.seconds, 1e-9)
    parts = _time_axis(timeline.seconds, top, bottom)
    for tick in ticks:
        y = bottom - tick * up
        parts.append(f'<path d="M{GUTTER} {_number(y)}H{WIDTH - RIGHT}" class="tw-grid"/>')
        parts.append(_text(GUTTER - 6, y + 4, format_nbytes(tick), anchor="end"))
    if projected:
        y = bottom - projected * up
        parts.append(f'<path d="M{GUTTER} {_number(y)}H{WIDTH - RIGHT}" class="tw-limit"/>')
        parts.append(_text(WIDTH - RIGHT, y - 4, f"planned at most {format_nbytes(projected)}", anchor="end"))
    order = {worker: place for place, worker in enumerate(timeline.lanes)}
    said = f"at most {format_nbytes(most)}"
    if len(lines) <= MOST_LINES:
        drawn = {
            f"worker {order[worker]}" if worker in order else worker: (
                f"tw-line tw-l{order.get(worker, 0) % WORKER_COLOURS}",
                line,
            )
            for worker, line in lines.items()
        }
    else:
        drawn = _spread(lines, timeline.seconds)
        said += f"; the most and the mean of {len(lines)} workers"
    for name, (kind, (times, nbytes)) in drawn.items():
        points = [
            f"{GUTTER + when * along:.1f} {bottom - value * up:.1f}"
            for when, value in zip(times, nbytes, strict=True)
            if np.isfinite(value) and 0 <= when <= timeline.seconds
        ]
        if len(points) == 1:
            points.append(points[0])
        if points:
            parts.append(f'<path d="M{"L".join(points)}" class="{kind}"><title>{escape(name)}</title></path>')
    name = "Memory in use on the GPUs" if device else "Memory of the workers' processes"
    return _svg(WIDTH, bottom + 22, name, said, parts)


Line = tuple[np.ndarray, np.ndarray]


def _spread(lines: Mapping[str, Line], seconds: float) -> dict[str, tuple[str, Line]]:
    """The mean and the most of many lines."""
    times = np.linspace(0.0, seconds, BINS)
    rows = np.stack(
        [
            np.interp(times, when[np.isfinite(nbytes)], nbytes[np.isfinite(nbytes)])
            for when, nbytes in lines.values()
        ]
    )
    return {
        "the most": ("tw-line tw-l0", (times, rows.max(axis=0))),
        "the mean": ("tw-line tw-l1", (times, rows.mean(axis=0))),
    }


def shares_picture(seconds: Mapping[str, float]) -> str:
    """A bar for each of several times, by its name."""
    longest = max([*seconds.values(), 1e-9])
    left, wide, step = 190, 620, 24
    parts = []
    for place, (name, value) in enumerate(seconds.items()):
        y = 4 + place * step
        width = wide * value / longest
        kind, drawn = f"tw-w{place % WORKER_COLOURS}", _number(max(1.0, width))
        parts += [
            _text(left - 8, y + 13, name, anchor="end"),
            f'<rect x="{left}" y="{y}" width="{drawn}" height="17" class="{kind}"/>',
            _text(left + width + 6, y + 13, format_seconds(value)),
        ]
    said = ", ".join(f"{name} {format_seconds(value)}" for name, value in seconds.items())
    return _svg(left + wide + 90, 8 + len(seconds) * step, "Busy seconds by stage", said, parts)


def floors_picture(floors: Mapping[str, float], seconds: float) -> str:
    """A bar for each stage's floor, and one for the run: floors that come near it are what limits it."""
    longest = max([seconds, *floors.values(), 1e-9])
    threads = {stage: thread for thread, stages in THREADS.items() for stage in stages}
    left, wide, step = 190, 620, 24
    parts = []
    bars = [
        *((f"{STAGE_NAMES[stage]} alone", value, f"tw-{threads[stage]}") for stage, value in floors.items()),
        ("the tiles of the run", seconds, "tw-whole"),
    ]
    for place, (name, value, kind) in enumerate(bars):
        y = 4 + place * step
        width = _number(max(1.0, wide * value / longest))
        parts += [
            _text(left - 8, y + 13, name, anchor="end"),
            f'<rect x="{left}" y="{y}" width="{width}" height="17" class="{kind}"/>',
            _text(left + wide * value / longest + 6, y + 13, format_seconds(value)),
        ]
    said = ", ".join(f"{name} {format_seconds(value)}" for name, value, _ in bars)
    return _svg(left + wide + 90, 8 + len(bars) * step, "Floors", said, parts)
