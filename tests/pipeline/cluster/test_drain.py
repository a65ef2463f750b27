"""What is asked to end finishes what is nearly done, begins nothing, and ends at once when it is asked again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster

from tilewright.pipeline.cluster.drain import Drain, draining, running_seconds
from tilewright.pipeline.cluster.endings import request_end
from tilewright.pipeline.cluster.submit import run_bounded, run_combined
from tilewright.pipeline.events import Event, Waiting
from tilewright.pipeline.reduce import Reduction, reduce_pieces
from tilewright.workflows.console import Terminated, interruptible

LET_GO = threading.Event()
SIXTH_IS_GIVEN = threading.Event()
BEGUN: Counter[int] = Counter()


class Ended(KeyboardInterrupt):
    """What a test ends work with."""


class Calls(list[Any]):
    """Tells when the sixth is given to a worker, by whoever takes one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))

    def __getitem__(self, place: Any) -> Any:
        if place == 5:
            SIXTH_IS_GIVEN.set()
        return super().__getitem__(place)


def held(place: int) -> int:
    """Quick for the first two; the others wait to be let go of."""
    BEGUN[place] += 1
    if place >= 2:
        LET_GO.wait(30)
    return place


def held_apart(place: int) -> int:
    """The same, but that the second waits for the sixth to be given: of results that come together none makes room for
    another call until all are recorded, so that no four others would begin."""
    if place == 1:
        SIXTH_IS_GIVEN.wait(30)
    return held(place)


def total(*parts: int) -> int:
    return sum(parts)


def bounded(client: Client, drain: Drain) -> Iterator[tuple[int, int]]:
    calls = Calls((place,) for place in range(9))
    return run_bounded(client, held_apart, calls, key=f"held-{time.time_ns()}", drain=drain)


def combined(client: Client, drain: Drain) -> Iterator[tuple[int, int]]:
    groups = Calls(((), [(place,)]) for place in range(9))
    # Four are under way beside the one whose result is being recorded.
    return run_combined(
        client, held_apart, total, groups, window=5, key=f"held-{time.time_ns()}", drain=drain
    )


@pytest.fixture
def four(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of one worker that runs four calls at a time, more than `held` takes of what runs first; and where they
    are combined, what combines one meanwhile."""
    threads = 5 if "combined" in request.node.name else 4
    LET_GO.clear()
    SIXTH_IS_GIVEN.clear()
    BEGUN.clear()
    options = {"n_workers": 1, "threads_per_worker": threads, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        yield client
        LET_GO.set()


def ended(
    work: Callable[[Client, Drain], Any], client: Client, tell: Callable[[str], None], took: float | None
) -> list[int]:
    """The places of the results that come of work that is asked to end behind the second, when four others have begun.
    took: what is told of how long each took."""
    found: list[int] = []
    with draining(tell, "call") as asked, closing(work(client, asked)) as results:
        for place, value in results:
            assert place == value
            found.append(place)
            if took is not None:
                asked.took(took)
            if len(found) == 2:
                until = time.monotonic() + 20
                while len(BEGUN) < 6 and time.monotonic() < until:
                    time.sleep(0.005)
                assert request_end(Ended(found))
    return found


@pytest.mark.parametrize("work", [bounded, combined])
def test_what_is_nearly_done_is_finished_and_nothing_begins(
    work: Callable[[Client, Drain], Any], four: Client
) -> None:
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        LET_GO.set()

    with pytest.raises(Ended) as end:
        ended(work, four, tell, took=0.1)
    assert sorted(end.value.args[0]) == [0, 1, 2, 3, 4, 5]
    assert BEGUN.keys() <= {0, 1, 2, 3, 4, 5, 6}, "one may have been on its way to a thread"
    assert len(told) == 1
    assert told[0].startswith(
        "asked to end; nothing new begins, and 4 calls nearly done may take 20 s more ("
    )


@pytest.mark.parametrize("work", [bounded, combined])
@pytest.mark.parametrize(
    ("took", "grace"), [(1000.0, 20), (None, 20), (0.1, 0.3)], ids=["far", "unknown", "late"]
)
def test_what_cannot_be_done_in_time_is_not_waited_for(
    took: float | None, grace: float, work: Callable[[Client, Drain], Any], four: Client
) -> None:
    told: list[str] = []
    begun = time.monotonic()
    with dask.config.set({"tilewright.grace-seconds": grace}), pytest.raises(Ended) as end:
        ended(work, four, told.append, took)
    assert time.monotonic() - begun < 15
    assert sorted(end.value.args[0]) == [0, 1]
    assert len(told) == (grace < 1), "where nothing is waited for there is nothing to say"


def piece(place: int) -> tuple[int, dict[str, float]]:
    return held_apart(place), {}


@pytest.mark.parametrize("kept", [True, False])
def test_a_reduction_is_drained_where_its_pieces_are_kept(kept: bool, four: Client) -> None:
    arrived: list[int] = []
    summing = Reduction("sum", piece, int, lambda one, other: one + other, True, "")

    def keep(place: int, part: int) -> int:
        arrived.append(place)
        if len(arrived) == 2:
            until = time.monotonic() + 20
            while len(BEGUN) < 6 and time.monotonic() < until:
                time.sleep(0.005)
            if not request_end(Ended()):
                raise Ended
        return part

    def listener(event: Event) -> None:
        if isinstance(event, Waiting):
            LET_GO.set()

    calls = Calls((place,) for place in range(9))
    with pytest.raises(Ended):
        reduce_pieces(four, summing, calls, [1] * 9, listener, arrived=keep, kept=kept)
    assert sorted(arrived) == ([0, 1, 2, 3, 4, 5] if kept else [0, 1])


def test_work_that_is_done_when_it_is_asked_to_end_ends_too(client: Client) -> None:
    def work() -> None:
        with draining(print, "call") as asked:
            assert sorted(run_bounded(client, abs, [(-1,), (-2,)], key="abs", drain=asked)) == [
                (0, 1),
                (1, 2),
            ]
            request_end(Ended())

    with pytest.raises(Ended):
        work()


def test_nothing_is_drained_twice_nor_without_work() -> None:
    def work() -> None:
        with draining(print, "call") as asked:
            assert not asked.requested
            assert request_end(Ended("first"))
            assert not request_end(Ended("second")), "which is for the caller to raise"
            assert asked.requested

    assert not request_end(Ended()), "there is nothing to drain"
    with pytest.raises(Ended, match="first"):
        work()
    assert not request_end(Ended())


def test_an_error_of_the_work_is_not_hidden_by_its_end() -> None:
    def work() -> None:
        with draining(print, "call"):
            request_end(Ended())
            raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        work()


def test_who_is_nearly_there_follows_from_what_others_took() -> None:
    with dask.config.set({"tilewright.grace-seconds": 20}):
        asked = Drain(print, "tile")
    asked.request(Ended())
    running = {"new": 0.0, "half": 50.0, "nearly": 81.0, "overdue": 500.0}
    assert asked.nearly_there(running) == set(), "nobody knows how long one takes"
    for seconds in (90.0, 110.0):
        asked.took(seconds)
    assert asked.nearly_there(running) == {"nearly", "overdue"}


@pytest.mark.parametrize("signals", [1, 2])
def test_the_second_sigterm_ends_it_at_once(signals: int) -> None:
    reached: list[int] = []

    def work() -> None:
        with interruptible(), draining(print, "call") as asked:
            for number in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
                reached.append(number)
            assert asked.requested
            reached.append(-1)

    with pytest.raises(Terminated, match="nothing was written"):
        work()
    assert reached == ([0, -1] if signals == 1 else [0])


def test_how_long_tasks_run_is_told_while_others_begin_and_end() -> None:
    """On threads of this process they do so at any moment: without the answer, what is nearly done is given up."""
    keys = {"first", "second", "third"}

    class Tasks(dict[str, Any]):
        def _ended(self, key: str) -> Any:
            keys.discard(key)
            return self.pop(key, None)

        def __contains__(self, key: object) -> bool:
            return self._ended(str(key)) is not None

        def get(self, key: str, default: Any = None) -> Any:
            return self._ended(key) or default

    tasks = Tasks({key: SimpleNamespace(start_time=time.time()) for key in ("first", "second")})
    tasks["third"] = SimpleNamespace(start_time=None)
    worker = SimpleNamespace(state=SimpleNamespace(tasks=tasks), active_keys=keys)
    assert running_seconds(worker).keys() == {"first", "second"}
