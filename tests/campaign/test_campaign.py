"""A small part of ``make campaign``: that it runs, finds nothing, and would find what is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaign import table
from tests.campaign.kills import TARGETS, kill_of
from tests.campaign.works import differences, entries_in, recorded_tiles

ROOT = Path(__file__).resolve().parents[2]


def run_campaign(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    """The command in a process of its own, which has no threads and so may fork."""
    path = folder / "table.json"
    command = [sys.executable, "-m", "tests.campaign", "--table", str(path), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    return done, json.loads(path.read_text())["cases"] if path.exists() else []


def test_kills_break_no_promise(tmp_path: Path) -> None:
    done, cases = run_campaign(tmp_path, "--kills", "8", "--seed", "0", "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(cases) == 8
    assert sum(case["took_effect"] for case in cases) >= 4


@pytest.mark.slow
def test_three_hundred_kills_break_no_promise(tmp_path: Path) -> None:
    done, cases = run_campaign(tmp_path, "--kills", "300", "--seed", "1000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(cases) == 300


def test_a_case_follows_from_its_seed() -> None:
    kills = [kill_of(seed) for seed in range(400)]
    assert kills == [kill_of(seed) for seed in range(400)]
    met = {(kill.cluster, kill.target, kill.signal) for kill in kills}
    wanted = {
        (cluster, target, by)
        for cluster, targets in TARGETS.items()
        for target in targets
        for by in ("SIGKILL", "SIGTERM", "SIGSTOP")
    }
    assert met == wanted
    assert {kill.for_good for kill in kills} == {True, False}
    assert {kill.moment for kill in kills} == {"change", "time"}


def test_a_broken_promise_is_told_with_what_repeats_it() -> None:
    case = {"kind": "kills", "seed": 7, "change": 12, "target": "client", "signal": "SIGKILL"}
    told = table.summary([case | {"broken": ["command 0 hangs for 120 s"]}, case | {"broken": [], "seed": 8}])
    assert "-m tests.campaign --kills 1 --seed 7 --change 12" in told
    assert "--seed 8" not in told
    assert "command 0 hangs" in told
    assert "| client | SIGKILL | 2     | 1     | 0 " in told


def test_other_bytes_are_found() -> None:
    wanted = {"zarr.json": "1", "c/0/0": "2", "c/0/1": "3"}
    assert not differences(wanted, dict(wanted))
    assert differences({"zarr.json": "1", "c/0/0": "x", "c/9": "4"}, wanted) == [
        "c/0/0 differs",
        "c/0/1 is missing",
        "c/9 is extra",
    ]


def test_a_record_is_read_without_the_code_that_wrote_it(tmp_path: Path) -> None:
    lines = [
        '{"version": 6, "tile": [4, 4]}',
        '{"stored": 1, "objects": []}',
        '{"tile": 1, "objects": []}',
        '{"stored": 2, "objects": []}',
        '{"tile": 3, "objects": []}',
        '{"withdrawn": 3}',
        '{"tile": 4, "obj',
    ]
    (tmp_path / "tilewright-ledger.jsonl").write_text("\n".join(lines))
    assert len(entries_in(tmp_path / "tilewright-ledger.jsonl")) == 6
    assert recorded_tiles(tmp_path) == {1, 2}
    assert recorded_tiles(tmp_path, synced=True) == {1}
