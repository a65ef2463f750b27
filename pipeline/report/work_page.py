"""The page of a count, a search, or EOFs: what was done in each part of the work, by whom and when, and what took
longest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

import numpy as np

from tilewright.kernels.numbers import counted, format_count, format_nbytes, format_seconds
from tilewright.pipeline.plan.told import THREADS
from tilewright.pipeline.report.figures import LIMITING_SHARE
from tilewright.pipeline.report.page import (
    LEAST_TOLD_SECONDS,
    MOST_LISTED,
    Report,
    headline,
    legend,
    said_section,
    section,
    table,
)
from tilewright.pipeline.report.pictures import PHASE_NAMES, THREAD_NAMES, shares_picture, timeline_picture
from tilewright.pipeline.report.timeline import Timeline, covered
from tilewright.pipeline.report.works import LANES, Part, WorkRecorder

STAGE_WORDS = {
    "read": "reading",
    "count": "counting",
    "sign": "signing",
    "look": "looking at numbers",
    "multiply": "multiplying",
    "compute": "multiplying",
    "upload": "copying to the GPU",
    "download": "copying from the GPU",
    "write": "writing",
}


class WorkReport(Report):
    """A finished piece of work in words, figures and pictures."""

    def __init__(
        self,
        work: str,
        inputs: Sequence[str],
        facts: Mapping[str, Any],
        told: str,
        recorder: WorkRecorder,
        *,
        passed: bool | None = None,
        now: datetime | None = None,
    ) -> None:
        """work: the command's name. inputs: what it was done to, by name. facts: the result as JSON types; told: as it
        is printed. passed: what the check of the result found; None: there is none."""
        super().__init__(now)
        self._work, self._inputs, self._facts, self._told = work, tuple(inputs), facts, told
        self._passed = passed
        self._parts = list(recorder.parts.values())
        self._timeline: Timeline = recorder.timeline()

    def _data(self) -> dict[str, Any]:
        return {
            "report": 1,
            "made": self._made,
            "versions": dict(self._versions),
            "work": self._work,
            "inputs": list(self._inputs),
            "result": dict(self._facts),
            "parts": [part.to_json() for part in self._parts],
            "limit": self.limit,
            "timeline": self._timeline.to_json(),
        }

    def _title(self) -> str:
        shown = ", ".join(self._inputs[:3])
        more = len(self._inputs) - 3
        return f"{self._work} of {shown}" + (f" and {counted(more, 'other')}" if more > 0 else "")

    def _body(self) -> str:
        timeline = self._timeline
        lanes = [lane for lane in LANES if any(lane in threads for threads in timeline.lanes.values())]
        parts = [
            f"<header><h1>{escape(self._title())}</h1></header>",
            self._headline(),
            section("What limited it", self._limits()),
        ]
        if lanes:
            words = {name: " and ".join(stages) for name, stages in THREADS.items()} | {"piece": "a piece"}
            key = legend((f"tw-{lane}", words[lane]) for lane in lanes)
            parts.append(section("Timeline", key + timeline_picture(timeline, lanes)))
        parts += [
            section("Parts of the work", self._table_of_parts()),
            section("Workers", self._workers()),
            section("Result", f"<pre>{escape(self._told)}</pre>"),
            section("What was said", said_section(timeline)),
            section("Versions", table(None, self._versions.items())),
            self._footer(timeline),
        ]
        return "".join(parts)

    @property
    def _main(self) -> Part | None:
        """The part that took longest."""
        return max(self._parts, key=lambda part: part.seconds, default=None)

    @property
    def _busy(self) -> float:
        """The mean share of the time in which a worker had something under way."""
        lanes, seconds = self._timeline.lanes, self._timeline.seconds
        if not lanes or not seconds:
            return 0.0
        busy = [
            covered(np.concatenate([lane.intervals for lane in threads.values()]))
            for threads in lanes.values()
        ]
        return min(1.0, sum(busy) / len(busy) / seconds)

    @property
    def limit(self) -> str:
        """What limited the work, in a sentence."""
        main = self._main
        if main is None or not main.done:
            return "nothing was left to do"
        stages = self._stages()
        if not stages:
            return f"{_name(main)} took longest"
        stage = max(stages, key=lambda name: stages[name])
        share = stages[stage] / sum(stages.values())
        what = f"{STAGE_WORDS.get(stage, stage)} took {share:.0%} of the workers' busy time"
        if self._busy < 0.5:
            return (
                f"workers had nothing to do for {1 - self._busy:.0%} of the time: the work is small, or what is done"
                f" between its parts takes long; {what}"
            )
        if share >= LIMITING_SHARE:
            return f"{what}: only if that gets faster, the work does"
        return f"{what}, and no one stage limits it"

    def _stages(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for part in self._parts:
            for stage, seconds in part.stages.items():
                found[stage] = found.get(stage, 0.0) + seconds
        return {stage: seconds for stage, seconds in found.items() if seconds > 0}

    def _headline(self) -> str:
        main, timeline = self._main, self._timeline
        facts = []
        if self._passed is not None:
            kind, verdict = ("tw-good", "verified") if self._passed else ("tw-bad", "not verified")
            facts.append((f'<b class="{kind}">{verdict}</b>', "the result"))
        facts.append((f"<b>{format_seconds(timeline.seconds)}</b>", "in all"))
        if main is not None:
            rate = f"{format_nbytes(main.nbytes / main.seconds)}/s" if main.nbytes and main.seconds else "–"
            facts.append((f"<b>{rate}</b>", f"{format_nbytes(main.nbytes)} read, {_name(main)}"))
            if main.operations and main.seconds:
                facts.append((f"<b>{format_count(main.operations / main.seconds)}op/s</b>", _name(main)))
            unit = main.unit.removesuffix("s")
            earlier = f"{main.earlier} of them by earlier runs" if main.earlier else "all by this run"
            facts.append((f"<b>{counted(main.total, unit)}</b>", earlier))
        device = str(self._facts.get("device", "CPU"))
        facts.append((f"<b>{max(1, len(timeline.lanes))} × {escape(device)}</b>", "workers"))
        return headline(facts)

    def _limits(self) -> str:
        stages = self._stages()
        lead = self.limit
        picture = shares_picture({STAGE_WORDS.get(stage, stage): stages[stage] for stage in stages})
        note = (
            "Busy seconds of all workers together, which read and compute at the same time: they may add up to more"
            f" than {format_seconds(self._timeline.seconds)}."
        )
        return (
            f'<p class="tw-lead">{escape(lead[:1].upper() + lead[1:])}.</p>'
            + (picture if stages else "")
            + f'<p class="tw-note">{escape(note)}</p>'
        )

    def _table_of_parts(self) -> str:
        rows = [
            (
                _name(part) + (f" ({part.times} times)" if part.times > 1 else ""),
                f"{part.done} of {counted(part.total, part.unit.removesuffix('s'))}",
                format_seconds(part.seconds),
                format_nbytes(part.nbytes),
                f"{format_nbytes(part.nbytes / part.seconds)}/s" if part.seconds else "–",
                ", ".join(
                    f"{STAGE_WORDS.get(stage, stage)} {format_seconds(seconds)}"
                    for stage, seconds in part.stages.items()
                    if seconds >= LEAST_TOLD_SECONDS
                ),
            )
            for part in self._parts
        ]
        return table(("part", "this run", "time", "read", "rate", "busy"), rows)

    def _workers(self) -> str:
        order = list(self._timeline.lanes)
        done: dict[str, int] = {}
        for part in self._parts:
            for worker, count in part.workers.items():
                done[worker] = done.get(worker, 0) + count
        whole = max(self._timeline.seconds, 1e-9)
        rows = [
            (
                str(place),
                worker,
                str(done.get(worker, 0)),
                ", ".join(
                    f"{THREAD_NAMES[name]} {busy.seconds / whole:.0%}"
                    for name, busy in self._timeline.lanes[worker].items()
                ),
            )
            for place, worker in enumerate(order[:MOST_LISTED])
        ]
        if len(order) > MOST_LISTED:
            rows.append(
                ("", f"and {counted(len(order) - MOST_LISTED, 'other')}, in the data of this page", "", "")
            )
        return table(("", "worker", "units", "busy, of all the time"), rows)


def _name(part: Part) -> str:
    return PHASE_NAMES.get(part.name, part.name)
