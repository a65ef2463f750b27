"""Handing out and recording tiles on simulated workers: the whole way of a product, without its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tilewright.pipeline.events import Event, UnitDone
from tilewright.workflows.bench.control import run_control
from tilewright.workflows.cli import cli

MESSAGES = {"client": 2, "scheduler": 3, "workers": 2}
"""For each tile: a task and its release; the task, its end and its release; its start, or its end, and what is kept."""


@pytest.mark.more
def test_every_tile_is_handed_out_once_and_recorded(tmp_path: Path) -> None:
    done: list[int] = []

    def listener(event: Event) -> None:
        if isinstance(event, UnitDone):
            done.append(event.index)

    report = run_control(
        tmp_path, tiles=95, workers=4, hosts=2, threads=2, panels=3, idle_seconds=0.1, listener=listener
    )
    assert sorted(done) == list(range(100))
    assert (report.tiles, report.workers, report.hosts, report.panels) == (100, 4, 2, 3)
    assert report.client_ms > 0 < report.scheduler_ms
    for who, count in MESSAGES.items():
        assert count <= report.messages[who] < count + 1
    assert 500 < report.message_nbytes["client"] < 10_000, "a tile's task is small, and no arrays pass"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_milliseconds_of_client_and_scheduler_are_enough_for_a_tile(tmp_path: Path) -> None:
    command = [
        "bench",
        "control",
        "--workers",
        "64",
        "--hosts",
        "8",
        "--tiles",
        "2000",
        "--folder",
        str(tmp_path),
    ]
    result = CliRunner().invoke(cli, [*command, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["work_ms"] < 3, "1.5 on two cores that do nothing else"
