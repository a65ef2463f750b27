"""What is recorded of a run is exact, and takes no more memory the longer it lasts."""

from __future__ import annotations

import json
from itertools import count, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.report.runs import plan_of, run_of
from tilewright.pipeline.events import Event, Notice, Span, UnitDone, WorkDone, WorkPlanned
from tilewright.pipeline.report import timeline as module
from tilewright.pipeline.report.timeline import NOBODY, Lane, MemoryLog, Phase, Recorder

intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    max_size=60,
)


@given(intervals, st.integers(1, 7))
def test_a_thread_is_busy_as_long_as_anything_is_done(spans: list[tuple[int, int]], bins: int) -> None:
    lane = Lane(most=1000)
    for begin, end in spans:
        lane.add(float(begin), float(end))
    busy = lane.busy()
    seconds = {second for begin, end in spans for second in range(begin, end)}
    assert busy.seconds == len(seconds)
    assert busy.spans == len(spans)
    edges = np.arange(bins + 1) * 70 // bins
    expected = [sum(start <= second < stop for second in seconds) for start, stop in pairwise(edges)]
    np.testing.assert_allclose(busy.per_bin(edges.astype(float)), expected, atol=1e-9)


@given(st.integers(4, 40), st.integers(1, 500), st.integers(0, 2**32 - 1))
def test_intervals_become_fewer_and_busy_seconds_stay(most: int, number: int, seed: int) -> None:
    """Of tiles that are told in the order in which they ended, as they are."""
    rng = np.random.default_rng(seed)
    lane, begin, exact = Lane(most), 0.0, 0.0
    for _ in range(number):
        begin += rng.integers(1, 9)
        length = int(rng.integers(0, 5))
        lane.add(begin, begin + length)
        begin, exact = begin + length, exact + length
    busy = lane.busy()
    assert busy.seconds == pytest.approx(exact)
    assert busy.spans == number
    assert len(busy.intervals) < 2 * most
    assert busy.per_bin(np.array([0.0, begin])).sum() == pytest.approx(exact)


def test_memory_samples_become_fewer_and_their_most_stays() -> None:
    log = MemoryLog(most=8)
    for second in range(1000):
        log.add(float(second), 5.0 if second == 321 else 1.0, float("nan"))
    samples = log.samples()
    assert len(samples.times) <= 8
    assert samples.host.max() == 5.0
    assert np.isnan(samples.device).all()


def test_phases_cover_a_run() -> None:
    times = count(10.0)
    recorder = Recorder(lambda event: None, clock=lambda: next(times))
    for name in ("statistics", "matmul"):
        recorder(WorkPlanned(name, 1, 0, "tiles", 0, 0))
        recorder(WorkDone(name, 1.0))
    assert recorder.timeline().phases == (
        Phase("opening", 0.0, 1.0),
        Phase("statistics", 1.0, 2.0),
        Phase("between", 2.0, 3.0),
        Phase("matmul", 3.0, 4.0),
        Phase("publishing", 4.0, 5.0),
    )


def test_a_recorder_hands_all_on_and_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_NOTICES", 1)
    heard: list[Event] = []
    recorder = Recorder.of(heard.append)
    assert Recorder.of(recorder) is recorder
    said = [Notice("one"), Notice("two"), UnitDone("verify", 0, "w", 1.0, 0, 0, {})]
    for event in said:
        recorder(event)
    assert heard == said
    timeline = recorder.timeline()
    assert [said.message for said in timeline.notices] == ["one"]
    assert timeline.untold == 1
    assert not timeline.tiles_by()


def test_a_plan_that_takes_the_place_of_another_begins_anew() -> None:
    recorder = Recorder(lambda event: None)
    recorder(WorkPlanned("matmul", 2, 0, "tiles", 0, 0))
    recorder(UnitDone("matmul", 0, "w", 1.0, 0, 0, {}, (Span("w", "load", 0.0, 1.0),)))
    recorder(WorkPlanned("matmul", 3, 0, "tiles", 0, 0))
    recorder(UnitDone("matmul", 1, "v", 2.0, 0, 0, {}))
    timeline = recorder.timeline()
    assert timeline.tiles_by() == {"w": 0, "v": 1}
    assert timeline.computed_by.tolist() == [NOBODY, 1, NOBODY]
    assert timeline.tile_seconds == (2.0, 2.0, 2.0)
    assert list(timeline.lanes) == ["w"], "what was done was done"


def test_json_of_a_timeline_has_all_workers_and_stays_small() -> None:
    plan = plan_of((40, 50))
    timeline = run_of(plan, [f"tcp://host:{port}" for port in range(500)]).timeline
    assert timeline is not None
    found = timeline.to_json()
    assert len(json.dumps(found)) < 500_000
    assert sum(worker["tiles"] for worker in found["workers"].values()) == plan.tile_count == 2000
    for worker in found["workers"].values():
        assert worker["threads"]["compute"]["seconds"] == pytest.approx(4 * 0.75)
        shares = worker["threads"]["compute"]["busy"]
        assert sum(shares) / len(shares) == pytest.approx(0.75, abs=0.01)
