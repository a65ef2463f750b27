"""Every call gives its result, or there is an error: what a run was not told to do, it must not report as done."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import zarr
from distributed import Client, LocalCluster
from distributed.comm import CommClosedError

import tilewright as tw
from tilewright.pipeline import histogram, submit, tasks
from tilewright.pipeline.corpus import list_corpus
from tilewright.pipeline.errors import ClusterError, TaskError
from tilewright.pipeline.submit import run_bounded, run_combined, run_sent, survey, threads_of, window_of

CALLS = [(number,) for number in range(7)]


def double(number: int) -> int:
    return 2 * number


def total(head: int, *parts: int) -> int:
    return head + sum(parts)


def bounded(client: Client, window: int = 2) -> Iterator[tuple[int, int]]:
    return run_bounded(client, double, CALLS, key="double", window=window)


def combined(client: Client) -> Iterator[tuple[int, int]]:
    groups = [((number,), [(number,), (number + 1,)]) for number in range(7)]
    return run_combined(client, double, total, groups, key=f"total-{time.time()}")  # of no earlier test


@pytest.fixture
def refreshed_at_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client whose own refresh of what it knows of the scheduler comes right behind every other one.

    It comes every two seconds, on the client's loop and without workers, so at any time between an answer and the
    moment at which the thread that asked takes it.
    """
    refresh = client._update_scheduler_info

    async def twice(n_workers: int = 0) -> None:
        await refresh(n_workers=n_workers)
        await refresh()

    monkeypatch.setattr(client, "_update_scheduler_info", twice)
    return client


@pytest.mark.parametrize("window", [1, 2, 7, 100])
def test_every_call_gives_its_result_once(client: Client, window: int) -> None:
    assert sorted(bounded(client, window)) == [(place, 2 * place) for place in range(7)]


def test_every_group_gives_its_result_once(client: Client) -> None:
    assert sorted(combined(client)) == [(place, 5 * place + 2) for place in range(7)]


def added(number: int, values: tuple[int, ...], more: int) -> int:
    return number + sum(values) + more


def test_every_call_gets_what_is_sent_to_workers_once(client: Client) -> None:
    found = list(run_sent(client, added, CALLS, ((10, 20), 400), key="sent", window=2))
    assert sorted(found) == [(place, place + 430) for place in range(7)]


def test_what_was_sent_is_sent_again_when_its_workers_are_lost() -> None:
    found: Counter[int] = Counter()
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as own,
    ):
        for place, result in run_sent(own, added, [(i,) for i in range(40)], ((1,), 1), key="lost", window=3):
            if not found:
                for process in own.run(os.getpid).values():
                    os.kill(process, signal.SIGKILL)
            assert result == place + 2
            found[place] += 1
    assert found == Counter(range(40))


def large(number: int) -> bytes:
    time.sleep(0.01)
    return bytes(300_000)


def test_two_clients_of_one_process_do_not_meet() -> None:
    """Each has a loop of its own, on which alone its connections may be used, whichever client was opened last."""
    options: dict[str, Any] = {"n_workers": 1, "threads_per_worker": 2, "dashboard_address": ":0"}
    groups = [((0,), [(1,), (2,)])] * 3
    with (
        LocalCluster(**options) as one,
        Client(one) as first,
        LocalCluster(**options) as two,
        Client(two) as second,
    ):
        assert first.loop is not second.loop
        for own in (first, second):
            results = run_bounded(own, large, [(i,) for i in range(100)], key="large", window=8)
            assert sorted(place for place, _ in results) == list(range(100))
            assert len(list(run_combined(own, double, total, groups, key="both"))) == 3


def test_a_result_that_takes_long_is_waited_for(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "LOOK_SECONDS", 0.02)
    real = submit.Future.result
    waited: list[float] = []

    def slow(future: Any, timeout: float | None = None) -> Any:
        assert timeout is not None
        waited.append(timeout)
        if timeout < 0.3:
            raise TimeoutError
        return real(future, timeout)

    monkeypatch.setattr(submit.Future, "result", slow)
    assert sorted(bounded(client)) == [(place, 2 * place) for place in range(7)]
    assert max(waited) == 0.32


def overdue() -> None:
    raise TimeoutError("a lock was not let go")


def test_a_task_that_fails_by_a_timeout_is_named(client: Client) -> None:
    with pytest.raises(TaskError, match="last with TimeoutError: a lock was not let go"):
        list(run_bounded(client, overdue, [()], key="overdue", window=1))


def test_no_calls_give_no_results(client: Client) -> None:
    assert list(run_bounded(client, double, [], key="none", window=1)) == []
    assert list(run_combined(client, double, total, [], key="none")) == []


def test_a_window_that_lets_nothing_through_is_an_error(client: Client) -> None:
    with pytest.raises(ClusterError, match="double came to an end with 7 still to come"):
        list(bounded(client, window=0))


def test_results_that_end_early_are_an_error(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ending(submit.as_completed):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            return islice(iter(self.__next__, None), 3)

    monkeypatch.setattr(submit, "as_completed", Ending)
    results = combined(client)
    seen = [next(results) for _ in range(3)]
    assert len(seen) == 3
    with pytest.raises(ClusterError, match="came to an end with 4 still to come"):
        next(results)


def test_the_window_is_for_all_threads_whatever_the_client_remembers(refreshed_at_once: Client) -> None:
    threads = refreshed_at_once.nthreads()
    assert threads
    assert threads_of(refreshed_at_once) == threads
    assert window_of(refreshed_at_once) == sum(threads.values()) + len(threads)


def test_nothing_is_left_out_whatever_the_client_remembers(refreshed_at_once: Client, tmp_path: Path) -> None:
    ones = zarr.create_array(tmp_path / "a", shape=(64, 64), chunks=(16, 16), dtype="f8")
    ones[...] = 1
    options: dict[str, Any] = {"cluster": refreshed_at_once, "device": "cpu"}
    tw.matmul(tmp_path / "a", tmp_path / "a", tmp_path / "c", verify=False, **options)
    assert (zarr.open_array(tmp_path / "c")[...] == 64).all()
    vector = zarr.create_array(tmp_path / "x", shape=(100,), chunks=(10,), dtype="f8", fill_value=1)
    assert tw.dot(vector, vector, **options) == 100
    (tmp_path / "text").write_bytes(b"every byte")
    assert tw.histogram([tmp_path / "text"], **options).counts.sum() == 10


def test_zeros_never_pass_for_a_product_whatever_the_client_remembers(
    refreshed_at_once: Client, tmp_path: Path
) -> None:
    for dtype in ("i8", "f8"):
        ones = zarr.create_array(tmp_path / f"a-{dtype}", shape=(64, 64), chunks=(16, 16), dtype=dtype)
        ones[...] = 1
        zeros = zarr.create_array(tmp_path / f"z-{dtype}", shape=(64, 64), chunks=(16, 16), dtype=dtype)
        assert not tw.verify(ones, ones, zeros, cluster=refreshed_at_once).passed


def test_neighbours_are_counted_whatever_the_client_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    def run(function: Callable[[int], int], neighbours: int, *, on_error: str) -> dict[str, int]:
        told.append(neighbours)
        return {"a worker": function(neighbours)}

    with (
        LocalCluster(n_workers=3, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as own,
    ):
        monkeypatch.setattr(own, "scheduler_info", lambda n_workers=-1: {"workers": {}})
        monkeypatch.setattr(own, "run", run)
        (tmp_path / "text.gz").write_bytes(b"")
        corpus = list_corpus([tmp_path / "text.gz"])
        assert histogram._decompressors(own, corpus) == histogram.share_of_cores(3)
    assert told == [3]


def test_a_cluster_without_workers_is_named() -> None:
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as own,
        pytest.raises(ClusterError, match="no workers; start some"),
    ):
        window_of(own)


def test_a_scheduler_that_went_away_is_named(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(**options: Any) -> None:
        raise OSError("Timed out trying to connect")

    monkeypatch.setattr(client, "nthreads", lost)
    with pytest.raises(ClusterError, match="the scheduler went away: Timed out"):
        window_of(client)


def meet(barrier_name: str, least: int) -> int:
    tasks.make_room(least)
    return BARRIERS[barrier_name].wait(10)


BARRIERS: dict[str, threading.Barrier] = {}


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_tasks_that_wait_make_room_for_more_than_there_are_threads(threads: int) -> None:
    BARRIERS["all"] = threading.Barrier(3)
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=threads, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        futures = [client.submit(meet, "all", 3, pure=False) for _ in range(3)]
        assert sorted(client.gather(futures)) == [0, 1, 2], "all three were under way at once"
        assert client.submit(lambda: 7, pure=False).result() == 7


def test_a_worker_goes_on_where_there_is_no_thread_to_make_room_with(monkeypatch: pytest.MonkeyPatch) -> None:
    original, refused = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if threading.current_thread() in ROOMLESS:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        for _ in range(2):
            assert client.submit(make_no_room, pure=False).result(timeout=10) == 3
        assert len(refused) == 2
        BARRIERS["all"] = threading.Barrier(3)  # and makes room again when there is
        futures = [client.submit(meet, "all", 3, pure=False) for _ in range(3)]
        assert sorted(client.gather(futures)) == [0, 1, 2]


def make_no_room() -> int:
    ROOMLESS.add(threading.current_thread())
    try:
        tasks.make_room(3)
    finally:
        ROOMLESS.clear()
    return 3


ROOMLESS: set[threading.Thread] = set()


@pytest.fixture
def own_client() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.mark.parametrize("run", [bounded, combined])
def test_a_client_that_is_closed_meanwhile_is_named(
    own_client: Client, run: Callable[[Client], Iterator[tuple[int, int]]]
) -> None:
    results = run(own_client)
    next(results)
    own_client.close()
    with pytest.raises(ClusterError, match=r"the scheduler went away|the client is closed"):
        list(results)


def test_a_closed_client_that_is_asked_is_named(own_client: Client) -> None:
    own_client.close()
    for ask in (
        lambda: survey(own_client, "cpu"),
        lambda: window_of(own_client),
        lambda: list(bounded(own_client)),
        lambda: list(run_sent(own_client, added, CALLS, ((1,), 1), key="sent", window=1)),
    ):
        with pytest.raises(ClusterError, match="the client is closed"):
            ask()


def test_what_ends_a_run_is_told_though_its_tasks_cannot_be_cancelled(own_client: Client) -> None:
    results = bounded(own_client)
    next(results)
    own_client.close()
    with pytest.raises(ZeroDivisionError):
        results.throw(ZeroDivisionError)  # type: ignore[attr-defined]


def answer_with(client: Client, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the client's own workers there is one that gives this error."""
    real = client.run

    def run(function: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
        assert options["on_error"] == "return"
        return {"tcp://lost:1": error} | real(function, *arguments, **options)

    monkeypatch.setattr(client, "run", run)


def test_a_worker_that_is_lost_while_it_is_asked_is_left_out(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workers = len(survey(client, "cpu"))
    answer_with(client, CommClosedError("it is gone"), monkeypatch)
    assert len(survey(client, "cpu")) == workers
    assert "tcp://lost:1 does not answer: CommClosedError: it is gone" in caplog.text


def test_a_worker_that_cannot_be_asked_is_named(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(client, ModuleNotFoundError("No module named 'tilewright'"), monkeypatch)
    with pytest.raises(ClusterError, match=r"tcp://lost:1 cannot be asked .* No module named 'tilewright'"):
        survey(client, "cpu")


def test_a_result_that_cannot_be_fetched_is_no_failure_of_its_task(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C leaves a client of Dask with a cancelled request, which it awaits for every later result."""

    def cancelled(future: Any, timeout: float | None = None) -> Any:
        raise UnboundLocalError("cannot access local variable 'result'")

    monkeypatch.setattr(submit.Future, "result", cancelled)
    with pytest.raises(ClusterError, match=r"cannot be fetched: UnboundLocalError: .* with a new client"):
        list(bounded(client))
