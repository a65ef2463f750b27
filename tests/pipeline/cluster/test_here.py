"""Work on threads of this process is handed out, retried, cancelled and told as work on a cluster of Dask's is."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from distributed import Client
from distributed.system import MEMORY_LIMIT

from tilewright.pipeline.cluster.answers import ask_all, run_on_all
from tilewright.pipeline.cluster.cluster import open_cluster
from tilewright.pipeline.cluster.here import worker as here_worker
from tilewright.pipeline.cluster.here.client import CLOSE_SECONDS, INTERRUPTED_SECONDS, HereClient
from tilewright.pipeline.cluster.here.opening import open_executor
from tilewright.pipeline.cluster.here.worker import TaskState, current_worker, memory_limit
from tilewright.pipeline.cluster.pool import make_room
from tilewright.pipeline.cluster.submit import run_bounded, run_combined, run_sent
from tilewright.pipeline.cluster.watch import threads_of, workers_held
from tilewright.pipeline.errors import ClusterError, StoreError, TaskError
from tilewright.pipeline.reduce import end_if_given_up
from tilewright.pipeline.worker.survey import survey

tries: list[int] = []


def here(threads: int = 2) -> Client:
    return cast(Client, HereClient(threads))


def square(number: int, more: Any = 0) -> int:
    return number * number + int(np.sum(more))


def fail_until(count: int, number: int) -> int:
    tries.append(number)
    if len(tries) < count:
        raise ValueError(f"try {len(tries)}")
    return number


def refuse(number: int) -> int:
    raise StoreError(f"no {number}")


def add(*parts: int) -> int:
    return sum(parts)


def wait_until_given_up(begun: int) -> None:
    check = end_if_given_up()
    started.set()
    while True:
        try:
            check()
        except CancelledError:
            ended.set()
            raise


def first_of(results: Any) -> None:
    with suppress(ClusterError):
        next(results)


started, ended = threading.Event(), threading.Event()


def test_calls_give_their_results_once_each() -> None:
    with here() as client, workers_held(client):
        results = dict(run_bounded(client, square, ((i,) for i in range(50)), key="squares"))
    assert results == {i: i * i for i in range(50)}


def test_what_is_sent_once_and_what_is_combined_comes_where_it_is_needed() -> None:
    with here() as client:
        sent = dict(run_sent(client, square, ((i,) for i in range(5)), (np.ones(3),), key="sent"))
        groups = [((i,), [(j,) for j in range(i + 1)]) for i in range(6)]
        combined = dict(run_combined(client, square, add, groups, window=2, key="sums"))
    assert sent == {i: i * i + 3 for i in range(5)}
    assert combined == {i: i + sum(j * j for j in range(i + 1)) for i in range(6)}


def test_a_call_that_fails_is_tried_as_often_as_the_setting_says() -> None:
    tries.clear()
    with here(1) as client:
        assert dict(run_bounded(client, fail_until, [(4, 7)], key="tries")) == {0: 7}
        tries.clear()
        with pytest.raises(TaskError, match=r"failed 4 times, last with ValueError: try 4"):
            dict(run_bounded(client, fail_until, [(9, 7)], key="more-tries"))
        with pytest.raises(StoreError, match=r"^no 3$"):
            dict(run_bounded(client, refuse, [(3,)], key="refused"))


def test_what_nobody_needs_any_more_is_given_up() -> None:
    started.clear()
    ended.clear()
    with here(1) as client:
        results = run_bounded(client, wait_until_given_up, [(0,), (1,)], key="endless")
        with closing(results):
            submitting = threading.Thread(target=first_of, args=(results,), daemon=True)
            submitting.start()
            assert started.wait(10)
            client.close()
            assert ended.wait(10)
            submitting.join(10)
            assert not submitting.is_alive()
    assert client.status == "closed"


def waits_for_the_next(here: threading.Barrier) -> str:
    make_room(2)
    make_room(2)
    here.wait(10)
    return threading.current_thread().name


def test_a_task_that_waits_lets_the_next_begin() -> None:
    with HereClient(1) as client:
        both = threading.Barrier(2)
        threads = [
            {
                future.result()
                for future in [client.submit(waits_for_the_next, both, key=f"{turn}-{i}") for i in range(2)]
            }
            for turn in range(3)
        ]
        assert all(len(names) == 2 for names in threads)
        assert client.submit(square, 3, key="last").result() == 9
        left = [thread for thread in client._threads if thread.is_alive()]
        assert len(left) <= 2, "threads that have left their place end with their tasks"


def test_questions_are_answered_by_one_thread() -> None:
    async def name() -> str:
        return threading.current_thread().name

    with HereClient(1) as client:
        names = [client.run(ask)[client.worker.address] for ask in (name, threading.current_thread, name)]
        assert names[0] == names[1].name == names[2] != threading.current_thread().name
        with pytest.raises(StoreError, match="no 5"):
            client.run(refuse, 5)
        assert client.run(refuse, 5, on_error="ignore") == {}
    names[1].join(10)
    assert not names[1].is_alive(), "it ends with the client"


def test_it_answers_as_the_worker_of_a_local_cluster_does() -> None:
    assert memory_limit() == MEMORY_LIMIT
    with open_executor("local") as ours, open_cluster("local") as of_dask:
        assert isinstance(ours, HereClient)
        assert not isinstance(of_dask, HereClient)
        (mine,), (theirs,) = survey(ours, "cpu", loops=()), survey(of_dask, "cpu", loops=())
        assert mine.address.startswith("inproc://")
        assert theirs.address.startswith("inproc://")
        facts = [{**vars(fact), "address": ""} for fact in (mine, theirs)]
        assert facts[0] == facts[1]
        assert list(threads_of(ours).values()) == list(threads_of(of_dask).values()) == [2]
        assert list(ask_all(ours, square, 3).values()) == list(run_on_all(ours, square, 3).values()) == [9]


def test_what_says_more_than_threads_is_a_cluster_of_dask(tmp_path: Path) -> None:
    profiles = tmp_path / "profiles.yaml"
    profiles.write_text(
        "profiles:\n  one: {kind: local, threads_per_worker: 1}\n  limited: {kind: local, memory_limit: 2GiB}\n"
    )
    with open_executor("one", profiles) as client:
        assert isinstance(client, HereClient)
        with open_executor(client) as same:
            assert same is client
        assert client.status == "running", "who opened it closes it"
    with open_executor("limited", profiles) as client:
        assert not isinstance(client, HereClient)
    with open_executor("one", profiles, graphs=True) as client:
        assert not isinstance(client, HereClient), "graphs of dask are computed by its own scheduler"


class Termination(KeyboardInterrupt):
    """What SIGTERM raises."""


@pytest.mark.parametrize("signal", [KeyboardInterrupt, Termination])
def test_a_signal_waits_less_for_tasks_than_other_ends_do(
    signal: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    client = HereClient(1)
    monkeypatch.setattr(client, "close", waited.append)
    with pytest.raises(signal), client:
        raise signal
    with client:
        pass
    assert waited == [INTERRUPTED_SECONDS, CLOSE_SECONDS]


def test_no_task_runs_outside_of_tasks() -> None:
    with pytest.raises(ValueError, match=r"No worker|no task"):
        current_worker()


def hold(gate: tuple[threading.Event, threading.Event], place: int) -> int:
    ran.append(place)
    begun, go_on = gate
    begun.set()
    assert go_on.wait(10)
    return place


ran: list[int] = []


def test_parts_of_what_was_given_up_do_not_begin() -> None:
    """Where a group is given up, so are its parts that nobody else needs: else they would run before the parts of those
    that are waited for, and behind the end of a run."""
    ran.clear()
    begun, go_on = threading.Event(), threading.Event()
    with HereClient(1) as client:
        parts = [client.submit(hold, (begun, go_on), place, key=f"part-{place}") for place in range(3)]
        sums = [client.submit(add, *parts[:2], key="both"), client.submit(add, parts[2], key="third")]
        for part in parts:
            part.release()
        assert begun.wait(10)
        client.cancel(sums[:1])
        go_on.set()
        assert sums[1].result() == 2
    assert ran == [0, 2]
    assert [part.status for part in parts] == ["cancelled", "cancelled", "finished"]


def test_what_somebody_else_needs_is_not_given_up() -> None:
    ran.clear()
    begun, go_on = threading.Event(), threading.Event()
    with HereClient(1) as client:
        parts = [client.submit(hold, (begun, go_on), place, key=f"part-{place}") for place in range(3)]
        sums = [client.submit(add, *parts[:2], key="both"), client.submit(add, parts[1], key="second")]
        for part in parts[:2]:  # the third is kept by this client
            part.release()
        assert begun.wait(10)
        client.cancel(sums[:1])
        go_on.set()
        assert sums[1].result() == 1
        assert parts[2].result() == 2


def test_nothing_begins_once_it_is_closed() -> None:
    """What waits for a task that still runs then is cancelled, too, and so is what is submitted later."""
    ran.clear()
    begun, go_on = threading.Event(), threading.Event()
    client = HereClient(1)
    part = client.submit(hold, (begun, go_on), 0, key="part")
    after = client.submit(hold, (begun, go_on), part, key="after")
    assert begun.wait(10)
    closing_it = threading.Thread(target=client.close, daemon=True)
    closing_it.start()
    while client.status == "running":
        pass
    go_on.set()
    closing_it.join(10)
    assert after.status == "cancelled"
    late = client.submit(hold, (begun, go_on), 1, key="late")
    with pytest.raises(CancelledError):
        late.result()
    assert ran == [0]


def test_threads_that_have_ended_are_forgotten() -> None:
    """A tile on a GPU leaves its place each, and a product may have millions."""
    with HereClient(1) as client:
        for i in range(20):
            client.submit(make_room, 2, key=f"tile-{i}").result()
        assert client.submit(square, 3, key="last").result() == 9
        for thread in client._threads[:-2]:
            thread.join(10)  # one that has just left its place may still be about to end
        assert len(client._threads) <= 2


def checked() -> None:
    end_if_given_up()()


def test_what_is_cancelled_as_it_begins_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with HereClient(1) as client:
        worker = client.worker
        worker.state.tasks["task"] = state = TaskState()

        def cancelled_meanwhile() -> float:
            state.state = "cancelled"
            return 1.0

        monkeypatch.setattr(here_worker, "time", SimpleNamespace(time=cancelled_meanwhile))
        with pytest.raises(CancelledError):
            worker.call("task", checked)
        assert state.start_time == 1.0


def test_what_was_given_up_is_not_tried_again() -> None:
    tries.clear()
    begun = threading.Event()

    def give_up() -> None:
        tries.append(len(tries))
        check = end_if_given_up()
        begun.set()
        while True:
            check()

    with HereClient(1) as client:
        task = client.submit(give_up, key="task", retries=3)
        assert begun.wait(10)
    assert task.status == "error"
    assert tries == [0]


def test_a_system_without_a_thread_left_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_to_start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    says = r"no thread .* \(can't start new thread\); allow more threads \(ulimit -u\)"
    with HereClient(1) as client:
        monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
        with pytest.raises(ClusterError, match=says):
            client.submit(square, 3, key="task")
        for _ in range(2):
            with pytest.raises(ClusterError, match=says):
                client.run(square, 3)
        monkeypatch.undo()
        assert client.run(square, 3) == {client.worker.address: 9}
        assert client.submit(square, 3, key="task").result() == 9
