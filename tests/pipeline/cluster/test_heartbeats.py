"""Who is silent is named, and given up later; who is only slow to answer, or is asked by a process that stood still, is
neither."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import pytest
import zarr
from distributed import Client

import tilewright as tw
from tilewright.pipeline.cluster import answers, heartbeats
from tilewright.pipeline.cluster.cluster import open_cluster
from tilewright.pipeline.cluster.heartbeats import Heartbeats, listened_to
from tilewright.pipeline.cluster.submit import run_bounded, run_combined
from tilewright.pipeline.errors import ClusterError, OptionError
from tilewright.pipeline.events import Event, UnitDone, Waiting

SILENT, DEADLINE = 0.06, 0.2


class Scripted:
    """A client of a scheduler that answers what a test says, on the loop of a real one."""

    def __init__(self, client: Client, **beats: float) -> None:
        self.loop, self.status = client.loop, "running"
        self.scheduler = SimpleNamespace(
            address="tcp://scheduler:1", identity=self.identity, restart_workers=self.restart
        )
        self.beats = beats
        self.going: set[str] = set(beats)
        self.answers = True
        self.restarted: list[str] = []
        self.nannies = False

    async def identity(self, n_workers: int) -> Any:
        assert n_workers == -1, "all of them"
        while not self.answers:
            await asyncio.sleep(0.005)
        for worker in self.going & self.beats.keys():
            self.beats[worker] += 1
        return {"workers": {worker: {"last_seen": beat} for worker, beat in self.beats.items()}}

    async def restart(self, workers: list[str], **options: Any) -> dict[str, str]:
        assert options["on_error"] == "return"
        self.restarted += workers
        for worker in workers:
            del self.beats[worker]
        return dict.fromkeys(workers, "OK" if self.nannies else "removed")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    if "scripted" not in request.fixturenames:
        yield
        return
    monkeypatch.setattr(heartbeats, "ASK_SECONDS", 0.01)
    monkeypatch.setattr(heartbeats, "SILENT_SECONDS", SILENT)
    monkeypatch.setattr(heartbeats, "BEATS", 0)
    monkeypatch.setattr(answers, "LOOK_SECONDS", 0.01)
    deadlines = ("tilewright.worker-deadline", "tilewright.scheduler-deadline")
    with dask.config.set(dict.fromkeys(deadlines, DEADLINE)):
        yield


@pytest.fixture
def scripted(client: Client) -> Scripted:
    return Scripted(client, one=5.0, other=7.0)


def look_until(heard: Heartbeats, met: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not met():
        assert time.monotonic() < until
        heard.look()
        time.sleep(0.002)


def test_a_silent_worker_is_named_once_and_when_it_is_heard_again(scripted: Scripted) -> None:
    told: list[str] = []
    scripted.going = {"one"}
    with closing(Heartbeats(scripted, told.append)) as heard:  # type: ignore[arg-type]
        look_until(heard, lambda: bool(told))
        assert heard.silent().keys() == {"other"}
        assert told[0].startswith(
            "worker other has not been heard from for 0 s: it is stopped, cut off, or busy"
        )
        assert told[0].endswith("given up, after 0.2 s (tilewright.worker-deadline)")
        scripted.going = {"one", "other"}
        look_until(heard, lambda: len(told) > 1)
    assert told[1:] == ["worker other is heard from again"]
    assert not scripted.restarted


def test_a_silent_worker_is_given_up_once_behind_the_deadline(scripted: Scripted) -> None:
    told: list[str] = []
    scripted.going = {"one"}
    with closing(Heartbeats(scripted, told.append)) as heard:  # type: ignore[arg-type]
        look_until(heard, lambda: "other" not in scripted.beats)
        look_until(heard, lambda: heard.silent() == {})
    assert scripted.restarted == ["other"]
    assert len(told) == 2
    assert told[1].startswith("worker other is given up: it was not heard from for 0 s; its nanny is asked")


@pytest.mark.parametrize("nannies", [False, True])
def test_silent_workers_end_a_run_unless_they_are_started_anew(nannies: bool, scripted: Scripted) -> None:
    scripted.going, scripted.nannies = set(), nannies
    with closing(Heartbeats(scripted, lambda text: None)) as heard:  # type: ignore[arg-type]

        def gone() -> bool:
            return not scripted.beats

        if nannies:
            look_until(heard, gone)
            until = time.monotonic() + 3 * DEADLINE
            while time.monotonic() < until:
                heard.look()
        else:
            with pytest.raises(
                ClusterError, match=r"no worker .* heard .*: 2 workers given up .*, last other; see"
            ):
                look_until(heard, lambda: False)
    assert sorted(scripted.restarted) == ["one", "other"]


def test_a_silent_scheduler_is_named_and_given_up(scripted: Scripted) -> None:
    told: list[str] = []
    with closing(Heartbeats(scripted, told.append)) as heard:  # type: ignore[arg-type]
        scripted.answers = False
        look_until(heard, lambda: len(told) == 1)
        scripted.answers = True
        look_until(heard, lambda: len(told) == 2)
        assert not heard.silent(), "of workers nobody could hear"
        scripted.answers = False
        with pytest.raises(
            ClusterError, match=r"tcp://scheduler:1 has not answered for .* \(tilewright.scheduler-dead"
        ):
            look_until(heard, lambda: False)
        scripted.answers = True
    assert [text.partition(" has not")[0] for text in told[::2]] == ["the scheduler at tcp://scheduler:1"] * 2
    assert told[1] == "the scheduler at tcp://scheduler:1 answers again"


def test_who_stood_still_itself_takes_nobody_for_silent(scripted: Scripted, client: Client) -> None:
    told: list[str] = []
    with closing(Heartbeats(scripted, told.append)) as heard:  # type: ignore[arg-type]
        look_until(heard, lambda: scripted.beats["one"] > 7)
        for beat in (False, True):
            scripted.going = {"one", "other"} if beat else set()
            client.loop.add_callback(time.sleep, 4 * SILENT)  # as SIGSTOP, or a machine that sleeps
            seen = dict(scripted.beats)
            if not beat:
                time.sleep(4 * SILENT)
                heard.look()
                scripted.going = {"one", "other"}
            look_until(heard, lambda seen=seen: scripted.beats != seen)
    assert told == []


def test_a_question_to_a_silent_scheduler_ends(scripted: Scripted) -> None:
    async def never() -> None:
        scripted.answers = False
        await asyncio.Event().wait()

    told: list[str] = []
    with listened_to(scripted, told.append):  # type: ignore[arg-type]
        with pytest.raises(ClusterError, match="has not answered for"):
            answers.answer_of(scripted, never)  # type: ignore[arg-type]
        scripted.answers = True
    assert len(told) == 1


def test_an_answer_passes_through_where_all_are_heard(scripted: Scripted) -> None:
    async def slow() -> int:
        await asyncio.sleep(2 * DEADLINE)
        return 7

    def fails() -> int:
        raise ValueError("of its own")

    with listened_to(scripted, lambda text: pytest.fail(text)):  # type: ignore[arg-type]
        assert answers.answer_of(scripted, slow) == 7  # type: ignore[arg-type, comparison-overlap]
        assert answers.answer_of(scripted, lambda: 8) == 8  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="of its own"):
            answers.answer_of(scripted, fails)  # type: ignore[arg-type]


@pytest.mark.parametrize("silent", [True, False])
def test_workers_that_are_not_waited_for_are_asked_all_the_same(silent: bool, scripted: Scripted) -> None:
    asked: list[str] = []

    async def run(function: Any, *arguments: Any, workers: list[str], on_error: str) -> dict[str, Any]:
        asked.extend(workers)
        if workers == ["other"]:
            await asyncio.Event().wait()
        return {workers[0]: function(*arguments)}

    scripted.run = run  # type: ignore[attr-defined]
    scripted.nthreads = lambda: {"one": 1, "other": 1}  # type: ignore[attr-defined]
    scripted.going = {"one"} if silent else {"one", "other"}
    with listened_to(scripted, lambda text: None):  # type: ignore[arg-type]
        found = answers.run_on_all(scripted, abs, -3, unawaited=() if silent else ["other"])  # type: ignore[arg-type]
    assert found["one"] == 3
    assert isinstance(found["other"], answers.NotHeardError)
    assert sorted(asked) == ["one", "other"]


def test_a_deadline_that_heartbeats_cannot_keep_is_refused() -> None:
    from tilewright.pipeline import config

    with (
        dask.config.set({"tilewright.worker-deadline": 4}),
        pytest.raises(OptionError, match=r"WORKER_DEADLINE\): 4 seconds are too few; it must be 5 or more"),
    ):
        config.check_all()


def stopping(number: int, place: str) -> int:
    """Stops the process of the worker that comes first, for good."""
    if number == 0:
        try:
            os.close(os.open(Path(place) / "first", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return number
        os.kill(os.getpid(), signal.SIGSTOP)
    return number


def total(*parts: int) -> int:
    return sum(parts)


@pytest.fixture
def of_processes(processes: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(heartbeats, "ASK_SECONDS", 0.5)
    monkeypatch.setattr(heartbeats, "SILENT_SECONDS", 1.5)
    monkeypatch.setattr(heartbeats, "BEATS", 2)
    pids = processes.run(os.getpid).values()
    yield processes
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert sorted(processes.run(os.getpid).values()) == sorted(pids), "other tests have the same workers"


@pytest.mark.parametrize("kind", ["bounded", pytest.param("combined", marks=pytest.mark.slow)])
def test_what_a_stopped_worker_has_under_way_is_done_by_others(
    kind: str, of_processes: Client, tmp_path: Path
) -> None:
    told: list[str] = []
    calls = [(number, str(tmp_path)) for number in range(6)]
    options: dict[str, Any] = {"key": f"stopping-{kind}", "waiting": told.append}
    if kind == "bounded":
        results = run_bounded(of_processes, stopping, calls, **options)
        assert sorted(results) == [(number, number) for number in range(6)]
    else:
        groups = [((), [call, call]) for call in calls]
        left: dict[str, set[int]] = {}
        options["left"] = lambda worker, place: left.setdefault(worker, set()).add(place)
        results = run_combined(of_processes, stopping, total, groups, window=3, **options)
        assert sorted(results) == [(number, 2 * number) for number in range(6)]
        (stopped,) = left
        assert stopped in told[0]
        assert 0 in left[stopped], "the group that it stopped with"
    assert "has not been heard from" in told[0]
    assert not any("is given up:" in text for text in told), "that comes long behind"


def keeping_the_gil(number: int) -> int:
    """As code does that was compiled without care: nothing else of the process runs meanwhile, no heartbeat either."""
    ctypes.PyDLL(None).usleep(2_500_000)
    return number


def test_a_worker_whose_work_lets_nothing_else_run_is_not_given_up(of_processes: Client) -> None:
    told: list[str] = []
    lost: list[str] = []
    before = of_processes.run(os.getpid)
    results = run_bounded(
        of_processes,
        keeping_the_gil,
        [(0,)],
        key="gil",
        waiting=told.append,
        lost=lambda worker, calls: lost.append(worker),
    )
    assert list(results) == [(0, 0)]
    assert not any("is given up:" in text for text in told)
    assert not lost
    assert of_processes.run(os.getpid) == before


@pytest.mark.more
@pytest.mark.parametrize("last", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_product_goes_on_without_a_worker_that_is_stopped_for_good(
    last: bool, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "ASK_SECONDS", 0.5)
    monkeypatch.setattr(heartbeats, "SILENT_SECONDS", 1.5)
    monkeypatch.setattr(heartbeats, "BEATS", 2)
    values = rng.integers(0, 99, (512, 64))
    array = zarr.create_array(str(tmp_path / "a"), shape=values.shape, chunks=(128, 64), dtype=values.dtype)
    array[...] = values
    (tmp_path / "cluster.yaml").write_text(
        "profiles: {two: {kind: cpu, n_workers: 2, threads_per_worker: 1}}"
    )
    stopped: list[str] = []
    told: list[Event] = []
    with open_cluster("two", config=tmp_path / "cluster.yaml") as client:
        pids = client.run(os.getpid)

        def listener(event: Event) -> None:
            told.append(event)
            done = sum(isinstance(event, UnitDone) for event in told)
            if isinstance(event, UnitDone) and not stopped and done == (15 if last else 1):
                stopped.append(next(worker for worker in pids if (worker == event.worker) is not last))
                os.kill(pids[stopped[0]], signal.SIGSTOP)

        run = tw.matmul(
            array,
            array,
            tmp_path / "c",
            transpose_b=True,
            cluster=client,
            device_memory="640KiB",
            listener=listener,
        )
        begun = time.monotonic()
    assert time.monotonic() - begun < 4, "the end of the cluster waits for no process that is stopped"
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c")[...], values @ values.T)
    done = [event for event in told if isinstance(event, UnitDone) and event.name == "matmul"]
    assert sorted(event.index for event in done) == list(range(run.plan.tile_count)), "each counts once"
    assert run.operations == sum(event.operations for event in done)
    waits = [event.message for event in told if isinstance(event, Waiting)]
    if not last:
        assert any(f"worker {stopped[0]} has not been heard from" in wait for wait in waits), waits
    assert run.seconds < 30
