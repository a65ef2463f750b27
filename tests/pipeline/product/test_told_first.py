"""Tiles are recorded once it is known what they were computed from, in whatever order reports come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from tilewright.pipeline.errors import DeviceMemoryError
from tilewright.pipeline.plan.told import PanelContent, TileReport
from tilewright.pipeline.product.execute import UNTOLD_SECONDS, told_first
from tilewright.pipeline.store.content import panel_content

A = panel_content("A", (0, 4, 0, 4), [((0, 4, 0, 4), 1)])
B = panel_content("B", (0, 4, 0, 4), [((0, 4, 0, 4), 2)])


def held(panel: PanelContent) -> PanelContent:
    return replace(panel, parts=None)


def report(index: int, *contents: PanelContent) -> TileReport:
    return TileReport(index, "worker", 1.0, {}, frozenset(), 0, contents=contents)


def order(*reports: TileReport, seconds: float = 0.0) -> list[int]:
    """seconds: between two reports."""
    clock = iter(float(number) * seconds for number in range(len(reports)))
    return [
        one.index for one in told_first(reports, clock=lambda: next(clock)) if isinstance(one, TileReport)
    ]


def test_reports_come_behind_those_that_tell_what_their_panels_held() -> None:
    assert order(report(0, A, B), report(1, held(A), held(B)), report(2)) == [0, 1, 2]
    assert order(report(1, held(A), held(B)), report(2), report(3, A), report(0, B)) == [2, 3, 1, 0]
    other = panel_content("A", (0, 4, 0, 4), [((0, 4, 0, 4), 3)])
    assert order(report(1, held(A)), report(2, other), report(0, A)) == [2, 1, 0], (
        "of other numbers it tells nothing"
    )


def test_reports_that_wait_are_counted_for_their_workers() -> None:
    unrecorded = Counter[str]()
    reports = [report(1, held(A)), replace(report(2, held(B)), worker="other"), report(3, A), report(0, B)]
    waiting = [
        (one.index, dict(+unrecorded))
        for one in told_first(reports, unrecorded=unrecorded)
        if isinstance(one, TileReport)
    ]
    assert waiting == [
        (1, {"worker": 2, "other": 1}),
        (3, {"worker": 1, "other": 1}),
        (2, {"worker": 1, "other": 1}),
        (0, {"worker": 1}),
    ], "until the next is asked for"
    assert not +unrecorded


def test_what_panels_held_is_seen_before_any_report_that_relies_on_it() -> None:
    seen: list[int] = []
    seen_before = {}
    reports = [report(1, held(A), held(B)), report(2), report(3, A), report(0, B)]
    for one in told_first(reports, lambda index, contents: seen.append(index)):
        assert isinstance(one, TileReport)
        seen_before[one.index] = {*seen}
    assert seen_before[1] == {0, 1, 2, 3}
    assert all(index in its for index, its in seen_before.items())


def test_a_report_that_was_lost_is_not_waited_for() -> None:
    rest = [report(number) for number in range(2, 5)]
    assert order(report(1, held(A)), *rest) == [2, 3, 4, 1], "at the end"
    assert order(report(1, held(A)), *rest, seconds=UNTOLD_SECONDS / 2) == [2, 1, 3, 4]


def test_what_stops_a_run_is_not_held_back() -> None:
    error = DeviceMemoryError("too large")

    def reports() -> Iterator[TileReport | DeviceMemoryError]:
        yield report(1, held(A))
        yield error

    assert next(told_first(reports())) is error
