"""The page of a run: one file of HTML that needs no other, no script and no network. Its data are in it as JSON, and
the same as a file of JSON."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cached_property
from html import escape
from typing import Any

from tilewright.kernels.numbers import counted, format_count, format_nbytes, format_seconds
from tilewright.pipeline.events import LEAST_BUSY_SHARE
from tilewright.pipeline.plan.told import THREADS
from tilewright.pipeline.report import figures
from tilewright.pipeline.report.figures import LIMITING_SHARE, STAGE_NAMES, Run
from tilewright.pipeline.report.pictures import (
    PHASE_NAMES,
    WORKER_COLOURS,
    floors_picture,
    memory_picture,
    panels_picture,
    tiles_picture,
    timeline_picture,
)
from tilewright.pipeline.report.style import PAGE_STYLE, PROGRAM, STYLE
from tilewright.pipeline.report.timeline import Timeline
from tilewright.pipeline.strict_json import strict

THREAD_WORDS = {"load": "reading", "compute": "multiplying", "write": "writing"}
LEAST_TOLD_SECONDS = 0.005
"""Shorter phases are 0.00 s in words; the picture has them."""
MOST_LISTED = 50
"""Workers in the page's table; its data have all of them."""


class Report(ABC):
    """What all reports have in common: a page, the same as a part of another page, and its data."""

    def __init__(self, now: datetime | None = None) -> None:
        self._made = (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")

    @cached_property
    def _versions(self) -> dict[str, str]:
        return figures.versions()

    @abstractmethod
    def _data(self) -> dict[str, Any]:
        """What the page shows, for `to_json`."""

    @abstractmethod
    def _title(self) -> str:
        """Its heading."""

    @abstractmethod
    def _body(self) -> str:
        """All of it, the heading too, as HTML."""

    def to_json(self) -> dict[str, Any]:
        """All that the page shows."""
        return strict(self._data())

    def to_text(self) -> str:
        """The same as a file of JSON has it."""
        return json.dumps(self.to_json(), allow_nan=False) + "\n"

    def to_fragment(self) -> str:
        """The report as a part of another page."""
        return _encodable(f'<style>{STYLE}</style><article class="tw-report">{self._body()}</article>')

    def to_html(self) -> str:
        """The report as a page."""
        # In a script nothing is markup but its own end, and what may begin a comment.
        data = json.dumps(self.to_json(), allow_nan=False).replace("<", "\\u003c")
        return _encodable(
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            f'<meta name="generator" content="{PROGRAM}">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f'<link rel="icon" href="data:,"><title>{escape(self._title())}</title>'
            f"<style>{PAGE_STYLE}</style></head><body><main>{self.to_fragment()}</main>"
            f'<script type="application/json" id="tilewright-report">{data}</script></body></html>\n'
        )

    def _footer(self, timeline: Timeline | None) -> str:
        shares = (
            "" if timeline is None else f", when threads were busy as shares of {timeline.bins()} stretches"
        )
        return (
            f'<p class="tw-note">Made {escape(self._made)}. The data of this page are in it as JSON'
            f" (<code>tilewright-report</code>): all totals exactly{shares}.</p>"
        )


def _encodable(page: str) -> str:
    """With a question mark for each byte of a file's name that is no UTF-8; the data of the page have it exactly."""
    return page.encode("utf-8", "replace").decode("utf-8")


class RunReport(Report):
    """A matrix product in words, figures and pictures. Its data are the run as `MatmulRun.to_json` has it, rates,
    floors, versions."""

    def __init__(self, run: Run, now: datetime | None = None) -> None:
        super().__init__(now)
        self._run = run

    def _data(self) -> dict[str, Any]:
        return figures.to_json(self._run, self._made, self._versions)

    def _title(self) -> str:
        plan = self._run.plan
        return f"{plan.m} × {plan.n} {plan.c_dtype} of {plan.m} × {plan.k} by {plan.k} × {plan.n}"

    def _body(self) -> str:
        run, timeline = self._run, self._run.timeline
        parts = [
            f"<header><h1>{escape(self._title())}</h1>",
            f'<p class="tw-muted">{escape(self._places())}</p></header>',
            self._headline(),
            section("What limited it", self._limit()),
        ]
        if timeline is not None:
            if timeline.lanes:
                key = legend((f"tw-{name}", " and ".join(stages)) for name, stages in THREADS.items())
                parts.append(section("Timeline", phases_line(timeline) + key + timeline_picture(timeline)))
            parts.append(section("Tiles and workers", self._tiles(timeline)))
            parts.append(section("Memory", self._memory(timeline)))
        parts += [
            section("Check", self._check()),
            section("What was said", said_section(timeline)),
            section("Plan", f"<pre>{escape(str(run.plan))}</pre>"),
            section("Versions", table(None, self._versions.items())),
            self._footer(timeline),
        ]
        return "".join(parts)

    def _places(self) -> str:
        names = self._run.names
        turned = {"A": self._run.plan.transpose_a, "B": self._run.plan.transpose_b}
        return "; ".join(
            f"{role}{' (transposed)' if turned.get(role) else ''}: {name}" for role, name in names.items()
        )

    def _headline(self) -> str:
        run, timeline = self._run, self._run.timeline
        checked = run.verification
        verdict = "not checked" if checked is None else "verified" if checked.passed else "not verified"
        kind = "" if checked is None else "tw-good" if checked.passed else "tw-bad"
        whole = timeline.seconds if timeline is not None else run.seconds
        rate = f"{format_count(run.operations / run.seconds)}op/s" if run.operations and run.seconds else "–"
        tiles = counted(run.plan.tile_count, "tile")
        facts = [
            (f'<b class="{kind}">{verdict}</b>', "the result"),
            (f"<b>{format_seconds(whole)}</b>", f"in all, {format_seconds(run.seconds)} for the tiles"),
            (f"<b>{escape(rate)}</b>", f"kernel {run.kernel}"),
            (f"<b>{figures.worker_count(run)} × {escape(run.device)}</b>", "workers"),
            (
                f"<b>{tiles}</b>",
                f"{run.resumed} of them by an earlier run" if run.resumed else "all by this run",
            ),
        ]
        if run.workers_lost:
            facts.append(
                (
                    f'<b class="tw-bad">{counted(run.workers_lost, "worker")} lost</b>',
                    "their work was done again",
                )
            )
        return headline(facts)

    def _limit(self) -> str:
        run = self._run
        floor = figures.floor_of(run)
        if floor is None:
            return "<p>Nothing was left to do.</p>"
        shares = figures.shares_of(run)
        name, seconds = floor
        word = THREAD_WORDS[name]
        share = shares.threads[name]
        if share < LEAST_BUSY_SHARE:
            lead = "Nearly all of the time went elsewhere, as to other tasks of the workers."
        elif share >= LIMITING_SHARE:
            lead = (
                f"{word.capitalize()} limited the run: it went on for {share:.0%} of the time, and all else waited for"
                " it. Only if that gets faster, the run does."
            )
        else:
            lead = (
                f"No one thing limited the run: {word} took most, {share:.0%} of the time, and the rest went by turns,"
                " or in waiting at the start and the end."
            )
        rates = figures.rates_of(run)
        rows = [
            (
                STAGE_NAMES[rate.stage],
                rate.amount_text,
                rate.rate_text,
                f"{shares.stages[rate.stage]:.1%}",
                format_seconds(rate.floor_seconds),
            )
            for rate in rates
        ]
        plan = run.plan
        bytes_read = (
            f"{format_nbytes(run.read_nbytes)} of A and B were read; the plan was for"
            f" {format_nbytes(plan.read_nbytes)} at most, and any schedule must read about"
            f" {format_nbytes(plan.bound_nbytes)} with this memory."
            + (
                f" {format_nbytes(run.shared_nbytes)} came from other workers' GPUs instead."
                if run.shared_nbytes
                else ""
            )
        )
        floors = {rate.stage: rate.floor_seconds for rate in rates}
        return (
            f'<p class="tw-lead">{escape(lead)}</p>'
            f'<p class="tw-muted">{escape(figures.busy_sentence(run))}; {escape(figures.limit_sentence(run))}.</p>'
            + floors_picture(floors, run.seconds)
            + '<p class="tw-note">'
            + escape(
                "A floor is how long that stage alone would have taken, at the rate measured in this run, with every"
                f" worker busy with it. The tiles took {format_seconds(run.seconds)}:"
                f" {run.seconds / max(seconds, 1e-9):.2f} times the largest floor of a thread."
            )
            + "</p>"
            + table(
                ("stage", "amount", "rate of a worker, while busy", "share of the time", "floor"),
                rows,
                right=1,
            )
            + f"<p>{escape(bytes_read)}</p>"
        )

    def _tiles(self, timeline: Timeline) -> str:
        run = self._run
        plan = run.plan
        tiles = timeline.tiles_by()
        order = list(timeline.lanes)
        rows: list[Sequence[str]] = []
        for place, worker in enumerate(order[:MOST_LISTED]):
            busy = run.workers.get(worker, {})
            shares = (f"{busy.get(name, 0.0) / run.seconds:.0%}" if run.seconds else "–" for name in THREADS)
            rows.append((str(place), worker, str(tiles.get(worker, 0)), *shares))
        more = ""
        if len(order) > MOST_LISTED:
            counts = [tiles.get(worker, 0) for worker in order[MOST_LISTED:]]
            more = (
                f'<p class="tw-note">And {counted(len(counts), "more worker")} with {sum(counts)} tiles, {min(counts)}'
                f" to {max(counts)} each: the data of this page have them.</p>"
            )
        keys = [
            (f"tw-w{place % WORKER_COLOURS}", f"worker {place}")
            for place in range(min(len(order), WORKER_COLOURS))
        ]
        if len(order) > WORKER_COLOURS:
            keys.append(("", f"and so on: {len(order)} workers share {WORKER_COLOURS} colours"))
        if run.resumed or not order:
            keys.append(("tw-earlier", "an earlier run"))
        least, mean, most = timeline.tile_seconds
        times = (
            f"A tile took {format_seconds(mean)} on average, {format_seconds(least)} to {format_seconds(most)}."
            if most
            else ""
        )
        return (
            '<div class="tw-side"><div>'
            + tiles_picture(plan, timeline)
            + legend(keys)
            + "</div><div>"
            + f"<p>{plan.grid[0]} × {plan.grid[1]} tiles of {plan.tile_rows} × {plan.tile_columns}. {escape(times)}</p>"
            + "<h3>Panels kept</h3>"
            + panels_picture(plan)
            + "</div></div>"
            + table(("", "worker", "tiles", *(f"{THREAD_WORDS[name]}" for name in THREADS)), rows, right=2)
            + more
        )

    def _memory(self, timeline: Timeline) -> str:
        plan = self._run.plan
        pictures = [
            memory_picture(timeline, device=False, projected=plan.host_peak_nbytes),
            memory_picture(timeline, device=True),
        ]
        where = "the workers' own" if plan.on_host else "GPU"
        planned = (
            f"Planned: {format_nbytes(plan.device_peak_nbytes)} of {where} memory a worker for tiles and panels"
            f" (allowed: {format_nbytes(plan.device_limit_nbytes)}), and at most"
            f" {format_nbytes(plan.host_peak_nbytes)} for a worker's process."
        )
        told = "".join(pictures)
        if told:
            note = "As heartbeats told it, about every two seconds: peaks in between are not seen."
        else:
            note = "No heartbeat told how much was in use: the run was over before."
        return f"<p>{escape(planned)}</p>{told}" + f'<p class="tw-note">{note}</p>'

    def _check(self) -> str:
        checked = self._run.verification
        if checked is None:
            return "<p>C was not checked.</p>"
        kind = "tw-good" if checked.passed else "tw-bad"
        return f'<p class="{kind}">{escape(str(checked))}</p>'


def headline(facts: Iterable[tuple[str, str]]) -> str:
    """Tiles of what is large, as markup, and of what it is."""
    tiles = "".join(f'<div class="tw-tile">{big}<span>{escape(small)}</span></div>' for big, small in facts)
    return f'<div class="tw-tiles">{tiles}</div>'


def said_section(timeline: Timeline | None) -> str:
    if timeline is None or not timeline.notices:
        return "<p>Nothing.</p>"
    rows = [
        f'<tr><td class="tw-right">{format_seconds(said.seconds)}</td>'
        f'<td class="{"tw-caution" if said.kind == "caution" else ""}">{escape(said.message)}</td></tr>'
        for said in timeline.notices
    ]
    head = "<thead><tr><th>after</th><th>message</th></tr></thead>"
    table = f'<div class="tw-scroll"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'
    more = f'<p class="tw-note">And {timeline.untold} later ones.</p>' if timeline.untold else ""
    return table + more


def section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def phases_line(timeline: Timeline) -> str:
    told = ", ".join(
        f"{PHASE_NAMES.get(phase.name, phase.name)} {format_seconds(phase.end - phase.begin)}"
        for phase in timeline.phases
        if phase.end - phase.begin >= LEAST_TOLD_SECONDS
    )
    return f"<p>{escape(told)}.</p>"


def legend(keys: Iterable[tuple[str, str]]) -> str:
    spans = (
        f'<span>{f"""<span class="tw-key {kind}"></span>""" if kind else ""}{escape(name)}</span>'
        for kind, name in keys
    )
    return f'<div class="tw-legend">{"".join(spans)}</div>'


def table(head: Sequence[str] | None, rows: Iterable[Sequence[str]], *, right: int | None = None) -> str:
    """right: the first column whose cells are numbers."""

    def kind(place: int) -> str:
        return ' class="tw-right"' if right is not None and place >= right else ""

    above = ""
    if head is not None:
        cells = "".join(
            f'<th scope="col"{kind(place)}>{escape(cell)}</th>' for place, cell in enumerate(head)
        )
        above = f"<thead><tr>{cells}</tr></thead>"
    body = "".join(
        '<tr><th scope="row">'
        + escape(row[0])
        + "</th>"
        + "".join(f"<td{kind(place)}>{escape(cell)}</td>" for place, cell in enumerate(row[1:], 1))
        + "</tr>"
        for row in rows
    )
    return f'<div class="tw-scroll"><table>{above}<tbody>{body}</tbody></table></div>'
