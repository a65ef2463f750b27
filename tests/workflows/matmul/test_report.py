"""What a finished run says of itself: its JSON, the spans of its stages, and the thread that limits it."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest
from distributed import Client

import tilewright as tw
from tests.workflows.products import (
    TIGHT,
    put,
)
from tilewright.pipeline.events import Event, Notice, Span, UnitDone, describe
from tilewright.pipeline.plan.told import STAGES, THREADS


def test_a_run_is_json_and_says_where_time_went(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path, events: list[Event]
) -> None:
    _, _, a, b = factors
    run = tw.matmul(a, b, tmp_path / "c", cluster=client, device="cpu", listener=events.append)
    loaded = json.loads(json.dumps(run.to_json()))
    assert loaded["verification"]["passed"] is True
    assert set(loaded["stages"]) == set(STAGES)
    assert set(loaded["workers"]) == set(client.nthreads())
    assert any(isinstance(event, Notice) and "CPU" in event.message for event in events)
    assert isinstance(run, tw.MatmulRun)


def test_every_panel_and_every_tile_leaves_a_span(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
) -> None:
    _, _, a, b = factors
    before = time.time()
    run = tw.matmul(
        a, b, tmp_path / "c", cluster=client, device="cpu", device_memory=TIGHT, listener=events.append
    )
    after = time.time()
    done = [event for event in events if isinstance(event, UnitDone) and event.name == "matmul"]
    assert len(done) == run.plan.tile_count > 3
    threads: dict[str, list[Span]] = {name: [] for name in THREADS}
    first = min(done, key=lambda event: event.spans[0].begin)
    for event in done:
        names = [span.stage for span in event.spans]
        panels = run.plan.panel_count
        prepared = int(event is first)  # what multiplies is made ready while its first panels are read
        assert [names.count(name) for name in THREADS] == [panels, panels + prepared, 1]
        assert {span.worker for span in event.spans} == {event.worker}
        for span in event.spans:
            threads[span.stage].append(span)
            assert before <= span.begin <= span.end <= after
        for name, stages in THREADS.items():
            seconds = sum(span.end - span.begin for span in event.spans if span.stage == name)
            assert seconds == pytest.approx(sum(event.stages[stage] for stage in stages), abs=1e-5)
        text = json.dumps(describe(event))
        assert json.loads(text)["stages"] == dict(event.stages)
        assert "spans" not in text, "a log has a line a tile, not one a panel"
    ordered = sorted(threads["compute"], key=lambda span: span.begin)  # one product at a time
    assert all(first.end <= second.begin + 1e-3 for first, second in itertools.pairwise(ordered))
    assert all(seconds <= run.seconds for busy in run.workers.values() for seconds in busy.values())
    (busy,) = run.workers.values()
    assert busy["load"] == pytest.approx(run.stages["read"] + run.stages["upload"], abs=1e-3)


@pytest.mark.parametrize(
    ("stages", "workers", "says"),
    [
        (
            (3.0, 1.0, 9.5, 0.5, 2.5),
            {"w": {"load": 4.0, "compute": 9.5, "write": 3.0}},
            "compute 95%, write 30% (download 5%, write 25%); compute limits it and the others wait for it",
        ),
        (
            (18.0, 0.0, 6.0, 0.0, 2.0),
            {
                "v": {"load": 8.5, "compute": 3.0, "write": 1.0},
                "w": {"load": 9.5, "compute": 3.0, "write": 1.0},
            },
            "load 90%, compute 30%, write 10%; load limits it and the others wait for it (85% to 95% on each",
        ),
        ((2.0, 0.0, 6.0, 0.0, 2.0), {"w": {}}, "compute is busiest, and waits for the others too"),
        (
            (0.04, 0.0, 0.01, 0.0, 0.01),
            {"w": {}},
            "load 0%, compute 0%, write 0%; nearly all of it went elsewhere, as to other tasks of the workers",
        ),
        ((0.0,) * 5, {}, "nothing was left to do"),
    ],
)
def test_a_run_names_the_thread_that_limits_it(
    stages: tuple[float, ...], workers: dict[str, dict[str, float]], says: str, tmp_path: Path
) -> None:
    a = put(tmp_path / "a", np.ones((4, 4)))
    planned = tw.plan_matmul(a, a, device="cpu", workers=max(1, len(workers)))
    run = tw.MatmulRun(
        planned,
        "CPU",
        "BLAS",
        10.0,
        dict(zip(STAGES, stages, strict=True)),
        0,
        0,
        0,
        0,
        workers,
        0,
        None,
    )
    assert says in str(run)
