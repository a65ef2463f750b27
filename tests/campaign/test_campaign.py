"""A small part of ``make campaign``: that it runs, finds nothing, and would find what is broken."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest

from tests.campaign import __main__ as campaign
from tests.campaign import changes, processes, table
from tests.campaign.damages import DAMAGES, PRODUCTS, REMEDIES, damage_of
from tests.campaign.kills import TARGETS, count_kill_of, kill_of
from tests.campaign.lane import Lane
from tests.campaign.power import cut_of
from tests.campaign.states import DAMAGES as STATE_DAMAGES
from tests.campaign.states import state_of
from tests.campaign.works import COUNTS, WORKS, differences, entries_in, recorded_tiles

ROOT = Path(__file__).resolve().parents[2]


def run_campaign(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    """The command in a process of its own, which has no threads and so may fork."""
    path = folder / "table.json"
    command = [sys.executable, "-m", "tests.campaign", "--table", str(path), *options]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    return done, json.loads(path.read_text())["cases"] if path.exists() else []


SMALL = ("--kills", "1", "--damages", "3", "--cuts", "1", "--counts", "1", "--states", "1", "--seed", "45489")
"""Cases of few products and counts, each by a command whose worker is in its own process: others take four times as
long to start. There is one of each remedy, and a cut before the end."""
WITH_WORKERS = ("--kills", "3", "--cuts", "2", "--seed", "42433")
"""Of a client, workers and a nanny, by each signal, and a cut in the middle and at the end."""


def not_cut(case: dict, said: str) -> bool:
    """Whether no file system can be mounted here, which the campaign then says, and why."""
    if "not_run" in case:
        assert f"power cuts: not run: {case['not_run']}" in said
    return "not_run" in case


@pytest.mark.more
def test_a_small_campaign_breaks_no_promise(tmp_path: Path) -> None:
    done, cases = run_campaign(tmp_path, *SMALL, "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = {
        kind: [case for case in cases if case["kind"] == kind]
        for kind in ("kills", "damages", "cuts", "counts", "states")
    }
    assert [case["took_effect"] for case in kinds["counts"] + kinds["kills"]] == [True, True]
    assert [bool(case["kept"] and case["counted"]) for case in kinds["states"]] == [True]
    assert {case["remedy"] for case in kinds["damages"]} == {"audit", "repair", "resume"}
    assert all(case["found"] and not case["false_alarms"] for case in kinds["damages"])
    (cut,) = kinds["cuts"]
    assert not_cut(cut, done.stdout) or cut["moment"] == "middle"


@pytest.mark.slow
def test_a_small_campaign_of_worker_processes_breaks_no_promise(tmp_path: Path) -> None:
    done, cases = run_campaign(tmp_path, *WITH_WORKERS)
    assert done.returncode == 0, done.stdout + done.stderr
    kills, cuts = ([case for case in cases if case["kind"] == kind] for kind in ("kills", "cuts"))
    assert len(kills) == 3
    assert any(case["took_effect"] for case in kills)  # one may come behind the end of its command
    if not not_cut(cuts[0], done.stdout):
        assert [case for case in cuts if case["moment"] == "middle" or case["whole"]]
        assert len(cuts) == 2


@pytest.mark.slow
def test_three_hundred_kills_break_no_promise(tmp_path: Path) -> None:
    done, cases = run_campaign(tmp_path, "--kills", "300", "--seed", "1000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(cases) == 300


@pytest.mark.slow
def test_a_hundred_damages_are_found_and_put_right(tmp_path: Path) -> None:
    done, cases = run_campaign(tmp_path, "--damages", "100", "--seed", "1000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {case["damage"] for case in cases} == set(DAMAGES)
    assert sum(case["undamaged"] for case in cases) > 3000


@pytest.mark.slow
def test_counts_survive_kills_and_cuts_of_what_they_keep(tmp_path: Path) -> None:
    done, cases = run_campaign(tmp_path, "--counts", "60", "--states", "60", "--seed", "1000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(cases) == 120


def test_cases_of_counts_follow_from_their_seeds() -> None:
    kills = [count_kill_of(seed) for seed in range(200)]
    assert kills == [count_kill_of(seed) for seed in range(200)]
    assert {kill.signal for kill in kills} == {"SIGKILL"}
    assert {(kill.work, kill.cluster) for kill in kills} == {
        (work, cluster) for work in COUNTS for cluster in ("local", "processes", "site")
    }
    states = [state_of(seed) for seed in range(400)]
    assert states == [state_of(seed) for seed in range(400)]
    assert {(each.work, each.damage) for each in states} == {
        (work, damage) for work in COUNTS for damage in STATE_DAMAGES
    }


@pytest.mark.parametrize("name", STATE_DAMAGES)
def test_a_damage_of_a_state_changes_it(name: str) -> None:
    whole = b"".join(b'{"line": %d}\n' % line for line in range(20))
    hurt = [STATE_DAMAGES[name](random.Random(seed), whole) for seed in range(20)]
    assert sum(data != whole for data in hurt) >= 18


def test_a_fork_server_that_a_killed_client_has_ended_is_started_anew(tmp_path: Path) -> None:
    def end_it_and_go_on() -> None:
        assert processes.ensure_fork_server(tmp_path / "orders", [])
        assert not processes.ensure_fork_server(tmp_path / "orders", [])
        with socket.socket(socket.AF_UNIX) as client:  # which ends before it has asked
            client.connect(forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]
        # At once, while it is about to end.
        assert processes.ensure_fork_server(tmp_path / "orders", [])
        served = multiprocessing.get_context("forkserver").Process(target=os.getpid)
        served.start()
        served.join()
        processes.end(processes.fork_server_pid())
        assert served.exitcode == 0

    log = tmp_path / "log"
    assert processes.wait(processes.fork(end_it_and_go_on, log)) == 0, log.read_text()


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


def test_damages_and_cuts_follow_from_their_seeds() -> None:
    damages = [damage_of(seed) for seed in range(400)]
    assert damages == [damage_of(seed) for seed in range(400)]
    assert {(each.state, each.remedy) for each in damages} == set(REMEDIES)
    assert {(each.work, each.damage) for each in damages} == {
        (work, damage) for work in PRODUCTS for damage in DAMAGES
    }
    cuts = [cut_of(seed) for seed in range(100)]
    assert cuts == [cut_of(seed) for seed in range(100)]
    assert {cut.moment for cut in cuts} == {"middle", "end"}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_changes_one_chunk_or_two(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    chunks = [tmp_path / "0", tmp_path / "1"]
    before = [rng.bytes(64), rng.bytes(62) + bytes(2)]
    for seed in range(20):
        for path, data in zip(chunks, before, strict=True):
            path.write_bytes(data)
        DAMAGES[name](random.Random(seed), chunks[1], chunks[0])
        after = [path.read_bytes() if path.exists() else None for path in chunks]
        assert after[1] != before[1]
        assert (after[0] != before[0]) == (name == "two swapped")


def test_the_nth_change_of_the_file_system_stops_the_process(tmp_path: Path) -> None:
    """Right before it: what the n-th is to make is not there yet, and is once the process goes on."""
    orders = tmp_path / "orders"
    told = changes.orders_at(orders)
    told.role, told.change, told.case = changes.CLIENT, 3, 1
    code = (
        "import os, sys; from pathlib import Path; from tests.campaign import changes\n"
        "folder = Path(sys.argv[1]); changes.install(folder / 'orders', changes.CLIENT)\n"
        "(folder / 'one').mkdir(); (folder / 'two').write_text(''); open(folder / 'two').close()\n"
        "(folder / 'two').rename(folder / 'three'); os.rmdir(folder / 'one')"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    try:
        while not told.stopped:
            assert child.poll() is None
            time.sleep(0.001)
        processes.wait_until_stopped(child.pid)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "orders", "stored.log", "two"]
        os.kill(child.pid, signal.SIGCONT)
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["orders", "stored.log", "three"]
    assert told.changes[changes.CLIENT] == 4


def test_a_pipe_ties_a_process_to_the_one_that_started_it() -> None:
    """By which the worker of a nanny is told from those that a command has started."""
    with (
        subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE) as child,
        subprocess.Popen(["cat"]) as other,
    ):
        try:
            here = processes.pipes_of(os.getpid())
            assert here & processes.pipes_of(child.pid) - processes.pipes_of(other.pid)
        finally:
            child.kill(), other.kill()
    assert not processes.pipes_of(child.pid)


def test_what_was_run_is_told_where_a_campaign_is_interrupted(tmp_path: Path) -> None:
    results = tmp_path / "results-0"
    results.write_text('{"kind": "kills", "seed": 3, "broken": []}\n{"kind": "kills", "se')
    # Tests that a shell has started in the background have inherited that it is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with subprocess.Popen(["sleep", "60"]) as lane:
            timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            cases, failed = campaign.gathered({lane.pid: results}, 2, time.monotonic())
            lane.kill()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [case["seed"] for case in cases] == [3]
    assert failed == ["it was interrupted while 1 of 1 lanes were at work"]


@pytest.mark.parametrize("end", [processes.end, processes.finish])
@pytest.mark.parametrize("how", ["runs", "ended", "ended and waited for"])
def test_no_signal_goes_to_a_process_that_was_waited_for(
    end: Callable[[int], None], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be another's by then: a campaign starts tens of thousands of processes."""
    child = os.posix_spawn("/bin/sleep", ["sleep", "60" if how == "runs" else "0"], {})
    if how != "runs":
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    if how == "ended and waited for":
        assert processes.wait(child) == 0
    sent: list[int] = []
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, number: (sent.append(pid), kill(pid, number)))
    end(child)
    assert sent == ([child] if how == "runs" else [])
    with pytest.raises(ChildProcessError):
        os.waitpid(child, 0)


def test_a_case_begins_with_nothing_ordered(tmp_path: Path) -> None:
    """Else what a case comes to, and how long a command takes by itself, would depend on the case before."""
    lane = Lane.__new__(Lane)
    lane.home, lane.work_folder = tmp_path / "home", tmp_path / "case"
    lane.orders_path = lane.work_folder / "orders"
    work = next(iter(WORKS.values()))
    (lane.home / work.name).mkdir(parents=True)
    lane.work_folder.mkdir()
    lane.orders = changes.orders_at(lane.orders_path)
    lane.orders.role = lane.orders.change = lane.orders.stopped = 3
    lane.orders.slow_seconds = 0.5
    assert lane.begin(work).is_dir()
    left = {name: getattr(lane.orders, name) for name in ("role", "change", "stopped", "slow_seconds")}
    assert left == dict.fromkeys(left, 0)


def test_cuts_that_cannot_be_made_are_told_of_with_the_reason() -> None:
    told = table.summary([{"kind": "cuts", "seed": 0, "not_run": "mounting takes root", "broken": []}])
    assert "power cuts: not run: mounting takes root" in told


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
        '{"version": 7, "tile": [4, 4]}',
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
