"""Every call gives its result, or there is an error: what a run was not told to do, it must not report as done."""

from __future__ import annotations

import asyncio
import gzip
import logging
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future as ConcurrentFuture
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import distributed
import pytest
import zarr
from distributed import Client, LocalCluster, Nanny, Worker, wait, worker_client
from distributed.client import CancelledFuturesGroup, FutureCancelledError, FuturesCancelledError
from distributed.comm import CommClosedError
from distributed.core import Status, error_message
from distributed.threadpoolexecutor import secede as leave_pool
from distributed.threadpoolexecutor import thread_state

import tilewright as tw
from tilewright.kernels.gpu import device_choice
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.pipeline.check.verify import verify_product
from tilewright.pipeline.cluster import answers, heartbeats, pool, submit, watch
from tilewright.pipeline.cluster import local as local_cluster
from tilewright.pipeline.cluster.cluster import open_cluster
from tilewright.pipeline.cluster.submit import run_bounded, run_combined, run_sent
from tilewright.pipeline.cluster.watch import await_workers, threads_of, workers_held
from tilewright.pipeline.errors import ClusterError, CorpusError, TaskError
from tilewright.pipeline.events import (
    Caution,
    Event,
    Notice,
    UnitDone,
    Waiting,
    WorkDone,
    log_notices,
    on_lost,
    on_waiting,
)
from tilewright.pipeline.plan import tiling
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.reduce import Reduction, reduce_pieces
from tilewright.pipeline.text import counting
from tilewright.pipeline.text.corpus import list_corpus
from tilewright.pipeline.worker import survey as surveying
from tilewright.pipeline.worker.survey import survey

CALLS = [(number,) for number in range(7)]


def double(number: int) -> int:
    return 2 * number


def total(head: int, *parts: int) -> int:
    return head + sum(parts)


def bounded(client: Client) -> Iterator[tuple[int, int]]:
    return run_bounded(client, double, CALLS, key="double")


def combined(client: Client) -> Iterator[tuple[int, int]]:
    groups = [((number,), [(number,), (number + 1,)]) for number in range(7)]
    return run_combined(
        client, double, total, groups, window=4, key=f"total-{time.time()}"
    )  # of no earlier test


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


@pytest.fixture
def brief_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are looked at twice a second, within which results come too, and waiting is told of after 0.4 s."""
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.5)
    monkeypatch.setattr(watch, "WAIT_SECONDS", 0.4)


@pytest.mark.parametrize("window", [1, 2, 7, 100])
def test_every_call_gives_its_result_once(
    client: Client, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch.Workers, "threads", lambda workers: {"a worker": window - 1})
    assert sorted(bounded(client)) == [(place, 2 * place) for place in range(7)]


def test_every_group_gives_its_result_once(client: Client) -> None:
    assert sorted(combined(client)) == [(place, 5 * place + 2) for place in range(7)]


def test_what_a_group_combined_is_let_go_of_while_others_go_on(client: Client) -> None:
    """A worker holds the sums of one tile over the parts of k, as its plan counts, and not those of all."""

    def parts_held(dask_worker: Any) -> int:
        names = map(str, dask_worker.data)  # arrays of dask, as others may have left, have tuples for keys
        return sum(name.startswith("held-") and name.count("-") == 2 for name in names)

    groups = [((0,), [(number,), (number + 1,)]) for number in range(7)]
    results = run_combined(client, double, total, groups, window=4, key="held")
    with closing(results):
        assert len(list(islice(results, len(groups)))) == len(groups)
        until = time.monotonic() + 10
        while (held := sum(client.run(parts_held).values())) and time.monotonic() < until:
            time.sleep(0.01)
        assert held == 0


def keys_submitted(client: Client, patch: pytest.MonkeyPatch) -> list[str]:
    """Gets the key of each task that the client submits from now on."""
    submitted: list[str] = []
    submit = client.submit

    def noting(*arguments: Any, key: str, **options: Any) -> Any:
        submitted.append(key)
        return submit(*arguments, key=key, **options)

    patch.setattr(client, "submit", noting)
    return submitted


def test_only_a_window_of_groups_is_under_way(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parts stay on the workers until they are combined, and the plan counts those of so many."""
    submitted = keys_submitted(client, monkeypatch)
    groups = [((0,), [(number,), (number + 1,)]) for number in range(7)]
    with closing(run_combined(client, double, total, groups, window=2, key="windowed")) as results:
        for done, _ in enumerate(results, 1):
            assert len(submitted) == 3 * min(7, done + 1), "and none in its place before its sum is recorded"


def test_nothing_more_is_given_out_before_results_are_recorded(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client that is killed has not recorded is computed again: no more than was under way at the most."""
    submitted = keys_submitted(client, monkeypatch)
    most = sum(count + 1 for count in client.nthreads().values())
    calls = [(number,) for number in range(5 * most)]
    with closing(run_bounded(client, double, calls, key="recorded")) as results:
        for recorded, _ in enumerate(results):
            assert len(submitted) - recorded <= most
            time.sleep(0.02)  # meanwhile others end
    assert len(submitted) == len(calls)


def added(number: int, values: tuple[int, ...], more: int) -> int:
    return number + sum(values) + more


def test_every_call_gets_what_is_sent_to_workers_once(client: Client) -> None:
    found = list(run_sent(client, added, CALLS, ((10, 20), 400), key="sent"))
    assert sorted(found) == [(place, place + 430) for place in range(7)]


@pytest.mark.slow
def test_what_was_sent_is_sent_again_when_its_workers_are_lost(tmp_path: Path) -> None:
    """Their nannies start others: those of a cluster of our own are waited for too."""
    found: Counter[int] = Counter()
    profiles = tmp_path / "cluster.yaml"
    profiles.write_text(
        "profiles: {two: {kind: cpu, n_workers: 2, threads_per_worker: 1, dashboard_address: ':0'}}"
    )
    with open_cluster("two", profiles) as own:
        for place, result in run_sent(own, added, [(i,) for i in range(40)], ((1,), 1), key="lost"):
            if not found:
                for process in own.run(os.getpid).values():
                    os.kill(process, signal.SIGKILL)
            assert result == place + 2
            found[place] += 1
    assert found == Counter(range(40))


def times(number: int, factor: int) -> int:
    return number * factor


@pytest.mark.parametrize("error", [CommClosedError("it is gone"), TimeoutError("No valid workers found")])
def test_what_workers_lost_meanwhile_do_not_take_is_sent_to_others(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(watch, "WAIT_SECONDS", 0.1)
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as own,
    ):
        scatter = own.scatter

        def waiting(text: str) -> None:
            told.append(text)
            cluster.scale(1)

        def lost(values: list[Any], **options: Any) -> Any:
            monkeypatch.setattr(own, "scatter", scatter)
            leave(cluster, own)
            raise error

        monkeypatch.setattr(own, "scatter", lost)
        found = run_sent(own, times, CALLS, (2,), key="lost", waiting=waiting)
        assert sorted(found) == [(place, 2 * place) for place in range(7)]
    assert len(told) == 1


def test_what_no_worker_takes_is_named(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def refused(values: list[Any], **options: Any) -> Any:
        tried.append(len(values))
        raise CommClosedError("it is gone")

    monkeypatch.setattr(client, "scatter", refused)
    with (
        dask.config.set({"tilewright.retries": 2}),
        pytest.raises(ClusterError, match="no worker takes what far needs: CommClosedError: it is gone"),
    ):
        list(run_sent(client, times, CALLS, (2,), key="far"))
    assert tried == [1, 1, 1]


def large(number: int) -> bytes:
    time.sleep(0.01)
    return bytes(300_000)


@pytest.mark.slow
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
            results = run_bounded(own, large, [(i,) for i in range(100)], key="large")
            assert sorted(place for place, _ in results) == list(range(100))
            assert len(list(run_combined(own, double, total, groups, window=4, key="both"))) == 3


def test_a_result_that_takes_long_is_waited_for(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.02)
    real = submit.fetch_of
    waited: list[float] = []
    fetched: list[str] = []

    def slow(client: Client, future: Any) -> Any:
        fetched.append(future.key)
        fetch, left = real(client, future), iter(range(4))

        def result(timeout: float) -> Any:
            waited.append(timeout)
            if next(left, None) is not None:
                raise TimeoutError
            return fetch.result(timeout or 1)

        return SimpleNamespace(result=result)

    monkeypatch.setattr(submit, "fetch_of", slow)
    assert sorted(bounded(client)) == [(place, 2 * place) for place in range(7)]
    assert len(waited) == 35
    assert 0 < max(waited) <= 0.02, "results that are there together are waited for together"
    assert waited.count(0) >= 28, "only the first time others wait for it"
    assert len(fetched) == len(set(fetched)) == 7, "what is on its way is not asked for again"


def test_while_a_combined_result_is_on_its_way_its_workers_are_looked_for(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may be lost with the result, and be the last."""
    real, look, looks = submit.fetch_of, watch.Lookout.look, []

    def slow(client: Client, future: Any) -> Any:
        fetch, left = real(client, future), iter(range(2))

        def result(timeout: float) -> Any:
            assert timeout == watch.LOOK_SECONDS
            if next(left, None) is not None:
                raise TimeoutError
            return fetch.result(timeout)

        return SimpleNamespace(result=result)

    def noted(lookout: Any) -> int:
        looks.append(lookout)
        return look(lookout)

    monkeypatch.setattr(submit, "fetch_of", slow)
    monkeypatch.setattr(watch.Lookout, "look", noted)
    assert sorted(combined(client)) == [(place, 5 * place + 2) for place in range(7)]
    assert len(looks) >= 14, "twice for each"


@pytest.mark.more
def test_waiting_too_briefly_for_results_takes_none_from_others(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LOOK_SECONDS", 1e-4)
    for turn in range(3):
        results = run_bounded(client, large, [(i,) for i in range(40)], key=f"brief-{turn}")
        assert sorted(place for place, _ in results) == list(range(40))
    assert client.submit(double, 3).result() == 6


def overdue() -> None:
    raise TimeoutError("a lock was not let go")


def test_a_task_that_fails_by_a_timeout_is_named(client: Client) -> None:
    with pytest.raises(TaskError, match="last with TimeoutError: a lock was not let go"):
        list(run_bounded(client, overdue, [()], key="overdue"))


def test_no_calls_give_no_results(client: Client) -> None:
    assert list(run_bounded(client, double, [], key="none")) == []
    assert list(run_combined(client, double, total, [], window=4, key="none")) == []


def test_calls_that_are_never_handed_out_are_an_error(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "islice", lambda calls, count: iter(()))
    with pytest.raises(ClusterError, match="double came to an end with 7 still to come"):
        list(bounded(client))


def test_results_that_end_early_are_an_error(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    is_empty = distributed.as_completed.is_empty
    monkeypatch.setattr(distributed.as_completed, "is_empty", lambda of: len(seen) == 3 or is_empty(of))
    results = combined(client)
    seen += [next(results) for _ in range(3)]
    assert len(seen) == 3
    with pytest.raises(ClusterError, match="came to an end with 4 still to come"):
        next(results)


def test_all_threads_are_counted_whatever_the_client_remembers(refreshed_at_once: Client) -> None:
    threads = refreshed_at_once.nthreads()
    assert threads
    assert threads_of(refreshed_at_once) == threads


def meet_once(place: int, *values: int) -> int:
    """Waits until as many are under way at once as the barrier is for; but not the first, by which Dask knows that many
    more come, and does not give them to those alone that hold what they use."""
    if place >= 20 and not MET.is_set():
        BARRIERS["all"].wait(30)
        MET.set()
    return place


MET = threading.Event()


@pytest.mark.parametrize("kind", ["bounded", "sent"])
def test_workers_that_join_are_used(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.05)
    MET.clear()
    BARRIERS["all"] = threading.Barrier(5)
    calls = [(place,) for place in range(40)]
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as own,
    ):
        run = partial(run_sent, values=(1,)) if kind == "sent" else run_bounded
        results = run(own, meet_once, calls, key="joining")
        with closing(results):
            first = next(results)
            cluster.scale(5)
            own.wait_for_workers(5)
            assert sorted([first, *results]) == [(place, place) for place in range(40)]
    assert MET.is_set(), "all five workers were at it at once"


def test_work_that_begins_while_its_workers_are_restarted_waits_for_them(
    tmp_path: Path, brief_looks: None
) -> None:
    """As the check of a product does, or the counting of what was found."""
    ones, fours = (
        zarr.create_array(tmp_path / name, shape=(4, 4), dtype="f8", fill_value=value)
        for name, value in (("a", 1), ("f", 4))
    )
    reduction = Reduction("letters", pair, str, str.__add__, False, "cut them smaller")
    with (
        LocalCluster(n_workers=0, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as own,
    ):
        told: list[str] = []

        def listener(event: Event) -> None:
            if isinstance(event, Notice):
                told.append(event.message)
                cluster.scale(1)

        assert verify_product(own, ones, ones, fours, listener=listener).passed
        leave(cluster, own)
        assert reduce_pieces(own, reduction, [("a",), ("b",)], [1, 1], listener) == "ab"
    assert [text.partition(":")[0] for text in told] == ["verify", "letters"]


def pair(letter: str) -> tuple[str, dict[str, float]]:
    return letter, {}


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

    def share_of_cores(usable: int, all_cores: int, neighbours: int) -> int:
        told.append(neighbours)
        return 1

    with (
        LocalCluster(n_workers=3, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as own,
    ):
        monkeypatch.setattr(own, "scheduler_info", lambda n_workers=-1: {"workers": {}})
        monkeypatch.setattr(counting, "share_of_cores", share_of_cores)
        (tmp_path / "text.gz").write_bytes(gzip.compress(b"text"))
        counted = counting.count_corpus(
            own,
            list_corpus([tmp_path / "text.gz"]),
            KINDS["letter"],
            survey(own, "cpu"),
            per_document=False,
            listener=log_notices,
        )
        assert counted.counts.sum() == 4
    assert told == [3] * 3


def test_a_cluster_without_workers_is_named() -> None:
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as own,
        pytest.raises(ClusterError, match="no workers; start some"),
    ):
        survey(own, "cpu")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["matmul", "histogram"])
def test_a_run_that_loses_its_workers_before_its_first_task_waits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were asked for their memory before; until tasks are handed out, all input files are looked at."""
    monkeypatch.setattr(watch, "WAIT_SECONDS", 0.4)
    ones = zarr.create_array(tmp_path / "a", shape=(4, 4), dtype="f4", fill_value=1)
    (tmp_path / "text").write_bytes(b"every byte")
    told: list[str] = []
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as own,
    ):

        def listener(event: Event) -> None:
            if isinstance(event, Waiting):
                told.append(event.message)
                cluster.scale(1)
            elif isinstance(event, Notice) and event.message.startswith(("counting ", "multiplying ")):
                leave(cluster, own)

        if name == "matmul":
            tw.matmul(ones, ones, tmp_path / "c", cluster=own, device="cpu", verify=False, listener=listener)
            assert (zarr.open_array(tmp_path / "c")[...] == 4).all()
        else:
            found = tw.histogram([tmp_path / "text"], cluster=own, device="cpu", listener=listener)
            assert found.counts.sum() == 10
    assert len(told) == 1
    assert re.fullmatch(f"{name}: no worker has been at .* s; it goes on when one joins; Ctrl-C .*", told[0])


def test_a_run_whose_workers_have_all_ended_for_good_does_not_wait(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "nthreads", dict)
    monkeypatch.setattr(local_cluster, "why_none_comes_back", lambda client: "they have ended")
    with pytest.raises(ClusterError, match="the cluster has no workers any more: they have ended"):
        threads_of(client)


class Sparse:
    """A client of a cluster that has workers at some times only, and a clock."""

    status = "running"

    def __init__(self, there: Callable[[float], int]) -> None:
        self.there = there
        self.now = 1000.0
        self.scheduler = SimpleNamespace(address="tcp://host:8786")
        self.cluster: Any = None

    def nthreads(self) -> dict[str, int]:
        return {f"tcp://worker:{number}": 2 for number in range(self.there(self.now - 1000))}

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (lambda second: True, []),
        (lambda second: second % 8 == 0, []),  # restarted again and again
        (lambda second: second < 20, [30]),
        (lambda second: second < 20 or 50 <= second < 52 or second >= 90, [30, 62]),
    ],
    ids=["there", "restarted", "gone", "gone twice"],
)
def test_a_run_without_workers_says_so_once_each_time(
    there: Callable[[float], bool], expected: list[int]
) -> None:
    client, told = Sparse(there), list[tuple[float, str]]()

    def waiting(text: str) -> None:
        told.append((client.now - 1000, text))

    lookout = watch.Lookout(client, waiting, clock=client.clock)  # type: ignore[arg-type]
    for second in range(0, 120, 2):
        client.now = 1000.0 + second
        lookout.look()
    text = "no worker has been at tcp://host:8786 for 10 s; it goes on when one joins"
    assert told == [(second, text) for second in expected]


def joining(second: float) -> int:
    return min(4, int(second // 20))


WAITS_FOR_ONE = (
    "no worker has been at tcp://host:8786 for 10 s; it goes on when one joins, or fails after 300 s"
)
WAITS_FOR_MORE = (
    "0 of {} workers have joined tcp://host:8786 in 10 s; it goes on when the others have, or after {} s with those"
    " that have"
)
GOES_ON = (
    "4 of the 9 workers asked for (tilewright.workers) have joined tcp://host:8786 within 90 s; it goes on with those"
    " (tilewright.join-seconds, DASK_TILEWRIGHT__JOIN_SECONDS: wait longer)"
)


@pytest.mark.parametrize(
    ("there", "workers", "seconds", "until", "expected"),
    [
        (lambda second: 1, 1, 300, 0, []),
        (
            lambda second: second > 5,
            1,
            300,
            5,
            [],
        ),  # as a script that waited for the scheduler alone finds it
        (joining, 1, 300, 20, [WAITS_FOR_ONE]),
        (joining, 3, 300, 60, [WAITS_FOR_MORE.format(3, 300)]),
        (joining, 9, 90, 90, [WAITS_FOR_MORE.format(9, 90), GOES_ON]),
    ],
    ids=["there", "late", "later", "several", "fewer"],
)
def test_work_begins_when_its_workers_have_joined(
    there: Callable[[float], int],
    workers: int,
    seconds: int,
    until: float,
    expected: list[str],
) -> None:
    client, told = Sparse(there), list[str]()
    with dask.config.set({"tilewright.workers": workers, "tilewright.join-seconds": seconds}):
        await_workers(client, waiting=told.append, clock=client.clock, sleep=client.sleep)  # type: ignore[arg-type]
    assert told == expected
    assert until <= client.now - 1000 <= until + 2 * watch.JOIN_LOOK_SECONDS


@pytest.mark.parametrize("seconds", [0, 300])
def test_a_cluster_that_no_worker_joins_is_named(seconds: int) -> None:
    client = Sparse(lambda second: 0)
    match = f"tcp://host:8786 has no workers, and none has joined within {seconds} s; start some"
    with dask.config.set({"tilewright.join-seconds": seconds}), pytest.raises(ClusterError, match=match):
        await_workers(client, clock=client.clock, sleep=client.sleep)  # type: ignore[arg-type]
    assert seconds <= client.now - 1000 < seconds + 1


def test_a_cluster_of_this_process_has_all_its_workers(client: Client) -> None:
    with dask.config.set({"tilewright.workers": 1000}):
        await_workers(client, waiting=pytest.fail)


def every_kind_of_work(tmp_path: Path) -> dict[str, Callable[..., Any]]:
    ones, text = zarr.create_array(tmp_path / "a", shape=(4, 4), dtype="f8", fill_value=1), tmp_path / "text"
    vector = zarr.create_array(tmp_path / "x", shape=(4,), dtype="f8", fill_value=1)
    fours = zarr.create_array(tmp_path / "f", shape=(4, 4), dtype="f8", fill_value=4)
    text.write_bytes(b"text")
    return {
        "matmul": partial(tw.matmul, ones, ones, tmp_path / "c", device="cpu"),
        "histogram": partial(tw.histogram, text, device="cpu"),
        "dot": partial(tw.dot, vector, vector, device="cpu"),
        "verify": partial(tw.verify, ones, ones, fours),
    }


def test_every_kind_of_work_waits_for_its_first_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "WAIT_SECONDS", 0.1)
    work = every_kind_of_work(tmp_path)
    with (
        LocalCluster(
            n_workers=0, threads_per_worker=1, processes=False, protocol="tcp://", dashboard_address=":0"
        ) as cluster,
        Client(cluster) as own,
    ):
        for name, run in work.items():
            told: list[str] = []

            def listener(event: Event, told: list[str] = told) -> None:
                if isinstance(event, Notice) and "no worker" in event.message:
                    told.append(event.message)
                    cluster.scale(1)

            run(cluster=cluster.scheduler_address, listener=listener)
            (text_told,) = told
            assert re.fullmatch(
                rf"{name}: no worker has been at tcp://\S+ for \d+ s; it goes on when one joins, or fails after 300 s;"
                " Ctrl-C ends it",
                text_told,
            )
            leave(cluster, own)


def test_every_kind_of_work_gets_workers_of_an_adaptive_cluster(tmp_path: Path) -> None:
    with (
        LocalCluster(n_workers=0, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as own,
        dask.config.set({"tilewright.join-seconds": 30}),
    ):
        # One look without work ends a worker: Dask's own three seconds pass as easily where a GPU has to be set up.
        cluster.adapt(minimum=0, maximum=2, interval="20ms", wait_count=1)
        for run in every_kind_of_work(tmp_path).values():
            run(cluster=own)
            until_met(lambda: not own.nthreads())


def test_no_adaptive_cluster_ends_the_last_worker_during_work() -> None:
    def ended_by_adaptive_clusters() -> list[str]:
        ended: list[str] = own.run_on_scheduler(lambda dask_scheduler: dask_scheduler.workers_to_close())
        return ended

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as own,
    ):
        with workers_held(own):
            until_met(lambda: any(own.has_what().values()))
            assert len(ended_by_adaptive_clusters()) == 1
        until_met(lambda: len(ended_by_adaptive_clusters()) == 2)


def test_a_call_for_workers_is_not_left_behind() -> None:
    def tasks_there() -> int:
        count: int = own.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))
        return count

    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as own,
        dask.config.set({"tilewright.join-seconds": 0}),
    ):
        with pytest.raises(ClusterError, match="none has joined"), workers_held(own):
            pytest.fail("there is no worker")
        until_met(lambda: tasks_there() == 0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["bounded", "sent", "combined"])
def test_a_run_that_waits_for_a_worker_says_so(
    kind: str, brief_looks: None, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    with (
        LocalCluster(n_workers=0, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as own,
    ):

        def waiting(text: str) -> None:
            told.append(text)
            cluster.scale(1)  # without having been told, it waits for good

        groups = [((0,), [call]) for call in CALLS]
        results = {
            "bounded": run_bounded(own, double, CALLS, key="alone", waiting=waiting),
            "sent": run_sent(own, times, CALLS, (2,), key="alone", waiting=waiting),
            "combined": run_combined(own, double, total, groups, window=4, key="alone", waiting=waiting),
        }[kind]
        assert sorted(results) == [(place, 2 * place) for place in range(7)]
        (text,) = told
        assert re.fullmatch(rf"no worker has been at {own.scheduler.address} for \d+ s; it goes on .*", text)
        # Not any traceback: clients of earlier tests may leave theirs only now.
        assert "handling op scatter" not in caplog.text


def wait_until_free() -> None:
    BEGUN.set()
    FREE.wait(30)


BEGUN, FREE = threading.Event(), threading.Event()


def occupy(client: Client) -> Any:
    """A task that takes up the only place for one until `FREE` is set."""
    BEGUN.clear()
    FREE.clear()
    task = client.submit(wait_until_free, pure=False)
    assert BEGUN.wait(30)
    return task


@pytest.fixture
def busy(own_client: Client) -> Iterator[Client]:
    """A client of a cluster that is occupied."""
    other = occupy(own_client)
    yield own_client
    FREE.set()
    wait(other)


BEGAN: list[int] = []


def begin(number: int) -> None:
    BEGAN.append(number)


def test_tasks_begin_in_the_order_in_which_they_are_given_out(
    busy: Client, brief_looks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else tiles come out of the order in which they share panels. A worker begins tasks of equal priority, which those
    of a tenth of a second have by Dask's default, in any order."""
    BEGAN.clear()
    monkeypatch.setattr(watch.Workers, "threads", lambda workers: {"a worker": 30})
    calls = [(number,) for number in range(30)]
    results = run_bounded(busy, begin, calls, key="order", waiting=lambda text: FREE.set())
    assert len(list(results)) == 30
    assert [number for (number,) in calls] == BEGAN


WAITS_FOR_BUSY = (
    r"no result has come for \d+ s, and no worker runs a task of it: those at {} are busy with other tasks, or paused;"
    " it goes on when one has time"
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["bounded", "sent", "combined"])
def test_a_run_whose_workers_are_busy_says_so(kind: str, busy: Client, brief_looks: None) -> None:
    told: list[str] = []

    def waiting(text: str) -> None:
        told.append(text)
        FREE.set()  # without having been told, it waits for good

    groups = [((0,), [call]) for call in CALLS]
    results = {
        "bounded": run_bounded(busy, double, CALLS, key="late", waiting=waiting),
        "sent": run_sent(busy, times, CALLS, (2,), key="late", waiting=waiting),
        "combined": run_combined(busy, double, total, groups, window=4, key="late", waiting=waiting),
    }[kind]
    assert sorted(results) == [(place, 2 * place) for place in range(7)]
    (text,) = told
    assert re.fullmatch(WAITS_FOR_BUSY.format(busy.scheduler.address), text)


def test_every_kind_of_work_says_that_its_workers_are_busy(
    own_client: Client, tmp_path: Path, brief_looks: None
) -> None:
    for name, work in every_kind_of_work(tmp_path).items():
        other = occupy(own_client)
        told: list[str] = []

        def listener(event: Event, told: list[str] = told) -> None:
            if isinstance(event, Waiting):
                told.append(event.message)
                FREE.set()

        work(cluster=own_client, listener=listener)
        wait(other)
        (text,) = told
        assert re.fullmatch(f"{name}: {WAITS_FOR_BUSY.format(own_client.scheduler.address)}; Ctrl-C .*", text)


@pytest.mark.parametrize("kind", ["bounded", "combined"])
def test_a_run_whose_own_tasks_take_long_does_not_wait_for_workers(
    kind: str, own_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(watch, "WAIT_SECONDS", 0.04)
    BEGUN.clear()
    FREE.clear()
    real, looks = watch.any_begun, []

    def any_begun(client: Client, keys: list[str]) -> bool:
        assert BEGUN.wait(30)
        looks.append(real(client, keys))
        if len(looks) > 2:
            FREE.set()
        return looks[-1]

    monkeypatch.setattr(watch, "any_begun", any_begun)
    calls: list[tuple[()]] = [()] * 3
    if kind == "bounded":
        results = run_bounded(own_client, wait_until_free, calls, key="long", waiting=pytest.fail)
    else:
        groups = [((), calls)]
        results = run_combined(
            own_client, wait_until_free, nothing, groups, window=1, key="long", waiting=pytest.fail
        )
    assert [result for _, result in results] == [None] * (3 if kind == "bounded" else 1)
    assert looks[:3] == [True] * 3


def nothing(*parts: None) -> None:
    pass


def test_where_nobody_can_tell_what_runs_nobody_is_told_to_wait(own_client: Client) -> None:
    """As where a worker is lost in that moment: the scheduler then answers with what it met."""
    assert watch.any_begun(own_client, ["no such task"])
    own_client.close()
    assert watch.any_begun(own_client, ["no such task"])


def held_up(folder: Path, place: int) -> int:
    """The process it runs in; all but the first call wait for the file ``go``."""
    until_met(lambda: not place or (folder / "go").exists())
    return os.getpid()


def first_of(first: int, *others: int) -> int:
    return first


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["bounded", "combined"])
def test_a_run_says_which_worker_it_has_lost_and_what_with_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int | None]] = []
    calls = [(tmp_path, place) for place in range(4)]

    def lost(worker: str, count: int | None) -> None:
        told.append((worker, count))

    async def no_other(nanny: Nanny) -> Status:
        return nanny.status

    def under_way() -> dict[str, list[str]]:
        found = own.processing().items()
        return {worker: [key for key in keys if key.startswith("lost-")] for worker, keys in found}

    with (
        dask.config.set({"distributed.scheduler.work-stealing": False}),  # what is where stays there
        LocalCluster(n_workers=2, threads_per_worker=3, dashboard_address=":0") as cluster,
        Client(cluster) as own,
    ):
        monkeypatch.setattr(Nanny, "instantiate", no_other)  # nobody waits for one in the place of the lost
        workers = {process: worker for worker, process in own.run(os.getpid).items()}
        if kind == "bounded":
            results = run_bounded(own, held_up, calls, key="lost", lost=lost)
        else:
            groups = [((), [call]) for call in calls]
            results = run_combined(own, held_up, first_of, groups, window=4, key="lost", lost=lost)
        with closing(results):
            place, process = next(results)
            victim = workers[process]
            expected = len(under_way()[victim])
            os.kill(process, signal.SIGKILL)
            until_met(lambda: victim not in own.nthreads())
            (tmp_path / "go").touch()
            assert sorted([place, *(place for place, _ in results)]) == [0, 1, 2, 3]
    assert told == [(victim, expected)]


class Leaving(Sparse):
    """A client of a cluster from which a worker is gone at the second look, and what its scheduler has noted of it."""

    status = "running"

    def __init__(self, noted: list[Any]) -> None:
        super().__init__(lambda second: int(second < 1))
        self.noted = noted

    def get_events(self, topic: str) -> list[tuple[float, Any]]:
        assert topic == "tcp://worker:0"
        return [(float(place), event) for place, event in enumerate(self.noted)]


def gone(*keys: Any, computed: tuple[str, ...] = (), expected: bool = False) -> dict[str, Any]:
    return {
        "action": "remove-worker",
        "processing-tasks": set(keys),
        "lost-computed-tasks": set(computed),
        "expected": expected,
    }


@pytest.mark.parametrize(
    ("noted", "told"),
    [
        ([], [None]),
        (["a text", {"action": "remove-worker"}], [None]),
        ([{"action": "add-worker"}, gone("tile-1", ("x", 0), "tile-ab-1")], [1]),
        ([gone("tile-ab-1", "tile-ab-11-again", "tile-abc-4", computed=("tile-ab-2",))], [3]),
        ([gone("tile-ab-1-0", "tile-ab-1-1", "tile-ab-1", "tile-ab-2-0")], [2]),
        ([gone("tile-other-1")], [0]),
        ([gone("tile-ab-1", expected=True)], [1]),
        ([gone("tile-other-1", expected=True)], []),
    ],
    ids=["forgotten", "other notes", "one", "results", "parts", "none", "asked to leave", "left with none"],
)
def test_a_worker_that_leaves_without_work_of_the_run_is_no_loss(
    noted: list[Any], told: list[int | None]
) -> None:
    client, found = Leaving(noted), []
    losses = watch.Losses(client, lambda *loss: found.append(loss), "tile-ab")  # type: ignore[arg-type]
    for _ in range(3):
        losses.look()
        client.now += 1
    assert found == [("tcp://worker:0", count) for count in told]


def test_every_kind_of_work_says_that_it_has_lost_a_worker(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = watch.Losses._workers

    def workers(losses: watch.Losses) -> set[str]:
        return real(losses) | (set() if hasattr(losses, "_there") else {"tcp://gone:1"})

    monkeypatch.setattr(watch.Losses, "_workers", workers)
    nouns = {"matmul": "tile", "histogram": "piece", "dot": "piece", "verify": "panel"}
    for name, work in every_kind_of_work(tmp_path).items():
        heard: list[Event] = []
        run = work(cluster=client, listener=heard.append)
        text = f"{name}: worker tcp://gone:1 was lost; the {nouns[name]}s that it had under way are computed again"
        assert Caution(text) in heard
        if name == "matmul":
            assert run.workers_lost == 1
            assert "; 1 worker lost\n" in str(run)


@pytest.mark.parametrize(
    ("units", "told"),
    [
        (0, ", with no tile under way there"),
        (1, "; 1 tile that it had under way is computed again"),
        (3, "; 3 tiles that it had under way are computed again"),
    ],
)
def test_what_was_lost_with_a_worker_is_told(units: int, told: str) -> None:
    heard: list[Event] = []
    on_lost(heard.append, "matmul", "tile")("tcp://gone:1", units)
    assert heard == [Caution(f"matmul: worker tcp://gone:1 was lost{told}")]


async def fail_hard(dask_worker: Worker) -> None:
    """As a worker does where Dask's own code fails in it."""
    dask_worker.log_event("worker-fail-hard", error_message(MemoryError("Unable to allocate 8 MiB")))
    asyncio.get_running_loop().call_soon(
        lambda: asyncio.ensure_future(dask_worker.close(executor_wait=False))
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["bounded", "sent", "combined", "held"])
def test_work_whose_own_workers_ended_for_good_ends_too(kind: str, brief_looks: None) -> None:
    """Nobody else can join a cluster that nobody else knows of."""

    def waiting(text: str) -> None:
        pytest.fail(text)

    def held() -> Iterator[tuple[int, int]]:
        with workers_held(own, waiting=waiting):
            yield 0, 0

    with open_cluster("local") as own:
        own.run(fail_hard)
        until_met(lambda: not own.nthreads())
        groups = [((0,), [call]) for call in CALLS]
        results = {
            "bounded": run_bounded(own, double, CALLS, key="alone", waiting=waiting),
            "sent": run_sent(own, times, CALLS, (2,), key="alone", waiting=waiting),
            "combined": run_combined(own, double, total, groups, window=4, key="alone", waiting=waiting),
            "held": held(),
        }[kind]
        with pytest.raises(
            ClusterError,
            match=r"1 worker started for it, and none is left; .*MemoryError.*Unable to allocate 8 MiB",
        ):
            list(results)


@pytest.mark.parametrize(
    ("spec", "workers", "gone"),
    [
        ("ab", {"a": "running", "b": "closed"}, False),
        ("ab", {"a": "init"}, False),
        ("ab", {"a": "starting", "b": "failed"}, False),
        ("ab", {"a": "closing_gracefully", "b": "closed"}, True),
        ("ab", {"b": "failed"}, True),
        ("ab", {}, True),
        ("", {}, False),
        ("abc", {}, False),
    ],
    ids=["restarts", "begins", "starts", "end", "forgotten", "all forgotten", "scaled to none", "scaled"],
)
def test_workers_that_are_started_again_are_waited_for(
    spec: str, workers: dict[str, str], gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pretended:
        def __init__(self) -> None:
            self.worker_spec = dict.fromkeys(spec)
            self.workers = {name: SimpleNamespace(status=Status[status]) for name, status in workers.items()}

    client = Sparse(lambda second: 0)
    client.cluster = Pretended()
    monkeypatch.setitem(local_cluster._started, id(client.cluster), frozenset("ab"))
    lookout = watch.Lookout(client, lambda text: None)  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="2 workers started for it") if gone else nullcontext():
        lookout.look()


def leave(cluster: LocalCluster, client: Client) -> None:
    cluster.scale(0)
    until_met(lambda: not client.nthreads())


def until_met(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_product_whose_workers_are_lost_gives_notice_and_goes_on(
    tmp_path: Path, brief_looks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiling, "LEAST_CHUNK_NBYTES", 1)
    monkeypatch.setattr(tiling, "SMALL_CHUNK_NBYTES", 1)
    monkeypatch.setattr(tiling, "MOST_CHUNK_NBYTES", 1024)
    ones = zarr.create_array(tmp_path / "a", shape=(64, 64), chunks=(16, 16), dtype="f4")
    ones[...] = 1
    told: list[str] = []
    lost: list[int] = []
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as own,
    ):

        def listener(event: Event) -> None:
            if isinstance(event, UnitDone) and event.name == "matmul" and len(lost) == len(told) < 2:
                lost.append(event.index)
                leave(cluster, own)
            elif isinstance(event, Notice) and event.message.startswith("matmul: no worker"):
                told.append(event.message)
                cluster.scale(1)

        run = tw.matmul(
            ones, ones, tmp_path / "c", cluster=own, device="cpu", device_memory=6000, listener=listener
        )
    assert run.plan.tile_count > 6
    assert len(lost) == len(told) == 2
    assert all(text.endswith(" s; it goes on when one joins; Ctrl-C keeps what is finished") for text in told)
    assert (zarr.open_array(tmp_path / "c")[...] == 64).all()


def test_who_does_not_listen_finds_in_the_log_that_a_run_waits(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []
    on_waiting(heard.append, "dot", "ends it")("no worker, 10% of the time")
    assert heard == [Waiting("dot: no worker, 10% of the time; Ctrl-C ends it")]
    assert not caplog.messages
    on_waiting(log_notices, "dot", "ends it")("no worker, 10% of the time")
    assert caplog.messages == ["dot: no worker, 10% of the time; Ctrl-C ends it"]


def test_who_does_not_listen_finds_notices_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tilewright")
    for event in (Notice("a choice"), Caution("unverified"), Waiting("none there"), WorkDone("dot", 1.0)):
        log_notices(event)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "a choice"),
        ("WARNING", "unverified"),
        ("WARNING", "none there"),
    ]


def test_a_scheduler_that_went_away_is_named(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(**options: Any) -> None:
        raise OSError("Timed out trying to connect")

    monkeypatch.setattr(client, "nthreads", lost)
    with pytest.raises(ClusterError, match="the scheduler went away: Timed out"):
        threads_of(client)


@pytest.mark.parametrize("fetched", [False, True])
def test_a_connection_that_was_lost_is_named_once(own_client: Client, fetched: bool) -> None:
    future = occupy(own_client)
    told = FutureCancelledError(
        future.key, answers.CONNECTION_LOST, "Client lost the connection to the scheduler."
    )
    fetch: ConcurrentFuture[Any] = ConcurrentFuture()
    fetch.set_exception(FuturesCancelledError([CancelledFuturesGroup([told], told.reason)]))
    if not fetched:
        own_client.futures[future.key].cancel(
            reason=told.reason, msg=told.msg
        )  # as a client does for all then
    with pytest.raises(ClusterError) as raised:
        answers.result_of(future, 3, fetch if fetched else None)
    FREE.set()
    where = own_client.scheduler.address
    assert str(raised.value) == (
        f"the connection to the scheduler at {where} was lost; bring a cluster up and run it again"
    )


def test_what_a_scheduler_answers_does_not_pass_for_its_absence(client: Client) -> None:
    for error in (
        TimeoutError("No valid workers found"),
        FileNotFoundError("a file"),
        CorpusError("a corpus"),
    ):

        def ask(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error), match=str(error)):
            answers.answer_of(client, ask)


def meet(barrier_name: str, least: int) -> int:
    pool.make_room(least)
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
        pool.make_room(3)
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["matmul", "histogram", "dot", "verify"])
def test_work_that_tasks_of_the_same_cluster_ask_for_is_done(kind: str, tmp_path: Path) -> None:
    """They take up all places that the cluster has for tasks, and wait for tasks of their own."""
    BARRIERS["all"] = threading.Barrier(2)
    works = []
    for name in "ab":
        (tmp_path / name).mkdir()
        works.append(every_kind_of_work(tmp_path / name)[kind])
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as own,
    ):
        asking = [
            own.submit(ask_inside, work, cluster.scheduler_address, workers=[worker], pure=False)
            for work, worker in zip(works, own.nthreads(), strict=True)
        ]
        assert [future.result(timeout=60) for future in asking] == [True, True]


def ask_inside(work: Callable[..., Any], address: str) -> bool:
    BARRIERS["all"].wait(30)
    work(cluster=address)
    return is_in_pool()


def is_in_pool() -> bool:
    return thread_state.proceed and threading.current_thread() in thread_state.executor._threads


def out_and_back(workers: Callable[[], Any], seceded: bool = False, fails: bool = False) -> list[bool]:
    found = []
    with worker_client() if seceded else nullcontext():
        with suppress(ZeroDivisionError), pool.out_of_the_pool(workers):
            found.append(is_in_pool())
            if fails:
                raise ZeroDivisionError
        found.append(is_in_pool())
    return found


async def on_the_loop(workers: Callable[[], Any]) -> None:
    with pool.out_of_the_pool(workers):
        pytest.fail("nothing can be waited for here")


def test_a_task_leaves_its_pool_for_what_its_own_cluster_is_to_do(own_client: Client) -> None:
    (address,) = own_client.nthreads()

    def found(workers: list[str], **how: bool) -> list[bool]:
        places: list[bool] = own_client.submit(out_and_back, lambda: workers, **how, pure=False).result(60)
        return places

    assert found([address]) == [False, True]
    assert found([address], fails=True) == [False, True]
    assert found(["tcp://of-another-cluster:1"]) == [True, True]
    assert found([address], seceded=True) == [False, False], "it stays out as long as that asks for"
    with pool.out_of_the_pool(pytest.fail):  # this thread runs no task
        pass
    with pytest.raises(ClusterError, match=f"worker {address} gives work to its own .* is not async"):
        own_client.submit(on_the_loop, lambda: [address]).result(60)


def test_a_task_whose_place_nobody_can_take_is_told(
    own_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def secede() -> None:
        leave_pool(adjust=False)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(distributed, "secede", secede)
    (address,) = own_client.nthreads()
    with pytest.raises(
        ClusterError, match=r"can't start new thread\); allow more threads there \(ulimit -u\)"
    ):
        own_client.submit(out_and_back, lambda: [address]).result(60)
    assert own_client.submit(is_in_pool, pure=False).result(60)


@pytest.mark.parametrize("run", [bounded, combined])
def test_a_client_that_is_closed_meanwhile_is_named(
    own_client: Client, run: Callable[[Client], Iterator[tuple[int, int]]]
) -> None:
    results = run(own_client)
    next(results)
    own_client.close()
    with pytest.raises(ClusterError, match=r"the scheduler went away|the client is closed") as told:
        list(results)
    assert "kept" not in str(told.value), "only callers know"


def test_a_client_that_is_closed_while_a_result_is_waited_for_is_named(own_client: Client) -> None:
    """It cancels its tasks; the scheduler is fine."""
    ended, waits = own_client.submit(double, 1), own_client.submit(time.sleep, 0.2)
    wait(ended)
    fetch = submit.fetch_of(own_client, waits)
    own_client.close()
    fetched: ConcurrentFuture[Any] = ConcurrentFuture()
    fetched.set_exception(ValueError("it is closed"))
    for future, fetching in ((ended, None), (waits, None), (waits, fetch), (ended, fetched)):
        with pytest.raises(ClusterError, match=r"^the client is closed: .*; connect to a cluster anew"):
            answers.result_of(future, 3, fetching)


def test_a_closed_client_that_is_asked_is_named(own_client: Client) -> None:
    own_client.close()
    for ask in (
        lambda: survey(own_client, "cpu"),
        lambda: threads_of(own_client),
        lambda: list(bounded(own_client)),
        lambda: list(run_sent(own_client, added, CALLS, ((1,), 1), key="sent")),
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

    def run(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        assert options["on_error"] == "return"
        found = real(function, *arguments, **options)

        async def more() -> dict[str, Any]:
            return {"tcp://lost:1": error} | await found

        return more() if asyncio.iscoroutine(found) else {"tcp://lost:1": error} | found

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


@pytest.mark.parametrize("kind", ["matmul", "histogram", "dot", "verify"])
def test_no_kind_of_work_begins_with_a_worker_that_cannot_be_asked(
    kind: str, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask ends a worker that cannot import what a task calls, and the task would wait for another one."""
    answer_with(client, ModuleNotFoundError("No module named 'tilewright'"), monkeypatch)
    monkeypatch.setattr(client, "submit", partial(only_held, client.submit))
    with pytest.raises(ClusterError, match=r"tcp://lost:1 cannot be asked .* No module named 'tilewright'"):
        every_kind_of_work(tmp_path)[kind](cluster=client)


def only_held(submit: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    assert options["key"].startswith("workers-held"), options["key"]
    return submit(*arguments, **options)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_workers_with_and_without_a_gpu_are_not_given_one_product(
    device: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is for one kind, and tiles of both would make up a C that none of them alone gives."""
    (on_cpu,) = survey(client, "cpu")
    on_gpu = replace(on_cpu, device="cuda", device_free_nbytes=2**30)

    def answered(*facts: WorkerFacts) -> None:
        monkeypatch.setattr(
            surveying, "ask_all", lambda *_: {f"tcp://{i}": fact for i, fact in enumerate(facts)}
        )

    answered(on_gpu, on_gpu, on_cpu)
    with pytest.raises(
        ClusterError, match=r"some of the 3 workers have a GPU and some have none; say --device cpu"
    ):
        survey(client, device)
    answered(on_gpu, on_gpu)
    assert survey(client, device) == [on_gpu, on_gpu]


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied", "/dev/nvidia0"),
        OSError("libcuda.so: cannot open shared object file"),
    ],
)
def test_what_a_worker_itself_meets_is_told(
    error: OSError, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def resolve_device(device: str) -> str:
        raise error

    monkeypatch.setattr(device_choice, "resolve_device", resolve_device)
    (worker,) = client.nthreads()
    with pytest.raises(ClusterError, match=re.escape(f"{worker} cannot say worker_facts: ")) as raised:
        survey(client, "auto")
    assert f"{type(error).__name__}: {error}; look at its log" in str(raised.value)
    assert "does not answer" not in caplog.text


class Unloadable:
    """What a worker cannot import."""

    __name__ = "unloadable"

    def __reduce__(self) -> Any:
        return unloadable, ()

    def __call__(self) -> None:
        pass


def unloadable() -> None:
    raise OSError("libllvmlite.so: cannot open shared object file")


def test_what_a_worker_meets_while_it_imports_is_told(client: Client) -> None:
    with pytest.raises(ClusterError, match=r"cannot say unloadable: OSError: libllvmlite\.so"):
        answers.ask_all(client, Unloadable())


def test_a_result_that_cannot_be_fetched_is_no_failure_of_its_task(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C leaves a client of Dask with a cancelled request, which it awaits for every later result."""

    async def cancelled(*futures: Any, **options: Any) -> Any:
        raise asyncio.CancelledError

    monkeypatch.setattr(client, "gather", cancelled)
    with pytest.raises(ClusterError, match=r"cannot be fetched: CancelledError: .* with a new client"):
        list(bounded(client))


class Broken:
    """A client whose connection is lost, while Dask tries to make it again."""

    status = "connecting"
    scheduler = SimpleNamespace(address="tcp://scheduler:1")


def test_nothing_is_asked_over_a_connection_that_is_lost() -> None:
    """Each question would take half a minute, and a run asks several as it ends."""
    client: Any = Broken()
    asked: list[int] = []
    lost = "^the connection to the scheduler at tcp://scheduler:1 was lost; bring a cluster up"
    with pytest.raises(ClusterError, match=lost):
        answers.answer_of(client, lambda: asked.append(1))
    assert not asked


def test_a_question_ends_with_the_connection(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "LOOK_SECONDS", 0.01)
    loop, begun = client.loop, threading.Event()

    async def never() -> None:
        begun.set()
        await asyncio.sleep(60)

    async def identity(n_workers: int) -> Any:
        return {"workers": {}}

    scheduler = SimpleNamespace(address="tcp://s:1", identity=identity)
    broken: Any = SimpleNamespace(status="running", loop=loop, scheduler=scheduler)

    def breaks() -> None:
        begun.wait(20)
        broken.status = "connecting"

    breaking = threading.Thread(target=breaks)
    breaking.start()
    lost = "the connection to the scheduler at tcp://s:1 was lost"
    with heartbeats.listened_to(broken, print), pytest.raises(ClusterError, match=lost):
        answers.answer_of(broken, never)
    breaking.join()
