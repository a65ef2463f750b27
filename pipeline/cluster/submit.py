"""Submit tasks to a cluster: a few more at a time than the workers can run, results as they finish, errors as ours.

The window keeps workers from waiting for a next task, and the scheduler from ever holding a graph of a million tasks. A
matrix's tile goes to the worker whose share it belongs to, unless that worker is lost or falls behind.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future as ConcurrentFuture
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Generic

from distributed import Client, Future, as_completed

from tilewright.pipeline import config
from tilewright.pipeline.cluster import identity, watch
from tilewright.pipeline.cluster.answers import (
    OtherCodeError,
    Result,
    ResultLateError,
    answer_of,
    cancel,
    fetch_of,
    result_of,
    tried,
)
from tilewright.pipeline.cluster.watch import (
    Lookout,
    Losses,
    Lost,
    Newcomers,
    Tell,
    Workers,
    log_loss,
    threads_of,
)
from tilewright.pipeline.errors import ClusterError

logger = logging.getLogger(__name__)

Feed = Callable[[Counter[str | None]], Iterable[tuple[int, tuple[Any, ...], str | None]]]
"""Gives the calls to submit now: place, arguments, and the worker each is meant for, if any. Its argument is its own
copy of how many calls are under way, by the worker they were meant for: it has to add those that it gives."""


def run_bounded(
    client: Client,
    function: Callable[..., Result],
    calls: Iterable[tuple[Any, ...]],
    *,
    key: str,
    waiting: Tell = logger.warning,
    lost: Lost = log_loss,
) -> Generator[tuple[int, Result], None, None]:
    """Submit ``function(*call)`` for every call; yield results as they finish.

    At a time there is one task for each thread of the workers, and one more for each worker to find waiting, also where
    workers come and go.

    It ends normally only when every call has yielded its result, exactly once: callers need not count. Where all
    workers are lost and others may come it waits for them, and calls ``waiting`` after `WAIT_SECONDS` without any.
    ``lost`` is called for each worker that is lost.
    Leaving early, by an error or by closing the generator, cancels what is outstanding. Callers must close it: an
    exception in the body of their loop does not.

    Raises
    ------
    ClusterError
        The results ended before every call had one, or all workers of a cluster that was started here; a worker has
        joined that runs another Tilewright, or none.
    TilewrightError
        A task failed on every attempt with an error of ours, which is raised as it is; or once, with one of `LASTING`.
    DeviceMemoryError
        A worker ran out of memory on every attempt at a task.
    TaskError
        A task failed with any other error, or took its workers down with it.
    """
    numbered = enumerate(calls)
    workers = Workers(client)

    def feed(under_way: Counter[str | None]) -> Iterator[tuple[int, tuple[Any, ...], str | None]]:
        # At least one: without workers a task waits for one, and makes an adaptive cluster start it.
        most = max(1, sum(count + 1 for count in workers.threads().values()))
        for place, call in islice(numbered, max(0, most - under_way[None])):
            yield place, call, None

    run: TasksUnderWay[Result] = TasksUnderWay(client, function, key, waiting, lost)
    yield from run.results(feed, lambda: sum(1 for _ in numbered))


def run_sent(
    client: Client,
    function: Callable[..., Result],
    calls: Iterable[tuple[Any, ...]],
    values: tuple[Any, ...],
    *,
    key: str,
    waiting: Tell = logger.warning,
    lost: Lost = log_loss,
) -> Generator[tuple[int, Result], None, None]:
    """As ``run_bounded`` of ``function(*call, *values)``, with values that are too large to send with every call.

    They are sent to each worker once, and again when all workers that held them are lost, as often as a task is
    retried. Where there is no worker it waits for one, as ``run_bounded`` does.
    """
    left = dict(enumerate(calls))
    for attempt in range(config.get("retries") + 1):
        places = list(left)
        try:
            held = _sent(client, values, key, waiting)
            results = run_bounded(
                client,
                function,
                ((*left[place], *held) for place in places),
                key=f"{key}-{attempt}",
                waiting=waiting,
                lost=lost,
            )
            with closing(results):
                for number, result in results:
                    del left[places[number]]
                    yield places[number], result
            return
        except OtherCodeError:
            raise
        except ClusterError:
            if attempt == config.get("retries") or client.status != "running":
                raise


def _sent(client: Client, values: tuple[Any, ...], key: str, waiting: Tell) -> list[Future]:
    """Send values to every worker, once there is one; returns their futures, for tasks to use.

    Raises ClusterError where they reach no worker: all may have been lost meanwhile.
    """
    # Without workers Dask gives up later, with a traceback on the scheduler's console.
    threads_of(client, waiting=waiting)

    def send() -> list[Future]:
        try:
            held: list[Future] = client.scatter(list(values), broadcast=True, hash=False)
        except Exception as error:
            # Where workers go away meanwhile, the scheduler's error depends on how far it has come.
            if client.status != "running":
                raise
            raise ClusterError(
                f"no worker takes what {key} needs: {type(error).__name__}: {error}; look at the workers' logs, and"
                " run it again"
            ) from error
        return held

    return answer_of(client, send)


@dataclass(frozen=True)
class _Task:
    """What was submitted for a call."""

    place: int
    call: tuple[Any, ...]
    worker: str | None
    """The one it is meant for, if any."""
    late: int = 0
    """How often its result has not come in time."""
    fetch: ConcurrentFuture[Any] | None = None
    """The fetch of its result, if under way."""


class TasksUnderWay(Generic[Result]):
    """The tasks of a run that are under way.

    ``_tasks`` holds exactly these: submitted, not given up, results not yet yielded. ``_counts`` holds how many of them
    were meant for each worker. Only `_submit` and `_forget` change the two, always together.
    """

    def __init__(
        self, client: Client, function: Callable[..., Result], key: str, waiting: Tell, lost: Lost
    ) -> None:
        self._client, self._function, self._key = client, function, key
        self._retries = config.get("retries")
        self._tasks: dict[Future, _Task] = {}
        self._counts: Counter[str | None] = Counter()
        self._unplaced: set[Future] = set()  # those that waited for a worker at the last look
        self._lookout = Lookout(client, waiting, begun=self._any_begun)
        self._newcomers = Newcomers(client)
        self._losses = Losses(client, lost, key)
        # On this client's loop: by default it takes that of the client opened last.
        self._completed = as_completed(loop=client.loop)

    def results(self, feed: Feed, left: Callable[[], int]) -> Generator[tuple[int, Result], None, None]:
        """Submit what ``feed`` gives at the start, after each result, and when none has come for `watch.LOOK_SECONDS`;
        every `watch.LOOK_SECONDS`, submit again what waits for a worker that is gone. Yield results as they finish.
        ``left`` says how many calls ``feed`` still has."""
        try:
            self._submit_next(feed)
            looked = time.monotonic()
            while self._tasks:
                self._newcomers.look()
                ready = _is_ready(self._completed)
                if not ready or time.monotonic() - looked > watch.LOOK_SECONDS:
                    self._submit_again()
                    self._losses.look()
                    self._lookout.look()
                    looked = time.monotonic()
                if not ready:
                    self._lookout.look_at_tasks()
                    self._submit_next(feed)
                    continue
                future = next(self._completed)
                if future not in self._tasks:
                    continue  # it was submitted again
                try:
                    result = self._result_of(future)
                except ResultLateError:
                    self._completed.add(future)  # others first
                    continue
                self._lookout.seen()
                task = self._forget(future)
                future.release()
                self._submit_next(feed)
                yield task.place, result
            _check_all_came(left(), self._key)
            self._losses.look_back()
        finally:
            cancel(self._client, list(self._tasks))
            self._newcomers.close()

    def _submit(self, task: _Task, name: str, **where: Any) -> None:
        options = {"key": name, "pure": False, "retries": self._retries} | where
        submit = partial(self._client.submit, tried, identity.HERE, self._function, *task.call, **options)
        future = answer_of(self._client, submit)
        self._tasks[future] = task
        self._counts[task.worker] += 1
        self._completed.add(future)

    def _forget(self, future: Future) -> _Task:
        task = self._tasks.pop(future)
        self._counts[task.worker] -= 1
        return task

    def _submit_next(self, feed: Feed) -> None:
        for place, call, worker in feed(self._counts.copy()):
            where = {"workers": [worker], "allow_other_workers": True} if worker else {}
            self._submit(_Task(place, call, worker), f"{self._key}-{place}", **where)

    def _submit_again(self) -> None:
        # Dask gives a task whose worker is gone to another. Where there is none at all, the task waits for that very
        # worker, which comes back under another address, if at all. One look is not enough: the scheduler may not have
        # received the task yet, or its result may be on its way.
        meant = {future for future, task in self._tasks.items() if task.worker is not None}
        placed = set(chain(*answer_of(self._client, self._client.processing).values())) if meant else set()
        unplaced = {future for future in meant if future.key not in placed and not future.done()}
        for future in unplaced & self._unplaced:
            task = replace(self._forget(future), worker=None, late=0, fetch=None)
            cancel(self._client, [future])
            self._submit(task, f"{self._key}-{task.place}-again")
        self._unplaced = unplaced

    def _any_begun(self) -> bool:
        return watch.any_begun(self._client, [future.key for future in self._tasks])

    def _result_of(self, future: Future) -> Result:
        """The result of a task that is done. Raises `ResultLateError` where it does not come in time: the fetch goes
        on, and has longer the next time. If the result was lost, Dask computes it again, and the task may have to be
        submitted again."""
        task = self._tasks[future]
        fetch = task.fetch or answer_of(self._client, partial(fetch_of, self._client, future))
        try:
            result: Result = result_of(future, self._retries, fetch, 2**task.late * watch.LOOK_SECONDS)
        except ResultLateError:
            self._tasks[future] = replace(task, late=task.late + 1, fetch=fetch)
            raise
        return result


def _is_ready(completed: as_completed) -> bool:
    """Whether a result comes within `watch.LOOK_SECONDS`."""
    with completed.thread_condition:
        return bool(completed.thread_condition.wait_for(completed.has_ready, watch.LOOK_SECONDS))


def run_combined(
    client: Client,
    function: Callable[..., Any],
    combine: Callable[..., Result],
    groups: Sequence[tuple[tuple[Any, ...], Sequence[tuple[Any, ...]]]],
    *,
    window: int,
    key: str,
    waiting: Tell = logger.warning,
    lost: Lost = log_loss,
) -> Generator[tuple[int, Result], None, None]:
    """For each group ``(head, calls)``: ``combine(*head, *[function(*call) for call in calls])``, on the workers.

    The calls' results stay on the workers until their group is combined, so only ``window`` groups are under way at a
    time. Yields results of ``combine`` as they finish. It ends, leaves early and raises as ``run_bounded`` does.
    """
    retries = config.get("retries")
    places: dict[Future, int] = {}
    to_do = enumerate(groups)

    def submit_group(place: int, head: tuple[Any, ...], calls: Sequence[tuple[Any, ...]]) -> Future:
        options = {"pure": False, "retries": retries}
        parts = []
        for part, call in enumerate(calls):
            named = {"key": f"{key}-{place}-{part}"} | options
            submit = partial(client.submit, tried, identity.HERE, function, *call, **named)
            parts.append(answer_of(client, submit))
        named = {"key": f"{key}-{place}"} | options
        submit = partial(client.submit, tried, identity.HERE, combine, *head, *parts, **named)
        future = answer_of(client, submit)
        places[future] = place
        # Only `combine` needs them: those that this client holds too would stay until the end of the run.
        for part_future in parts:
            part_future.release()
        return future

    newcomers = Newcomers(client)

    def begun() -> bool:
        # What is to be combined is given to a worker once all its parts are there: it may be fetching them.
        given = set(chain(*answer_of(client, client.processing).values()))
        keys = [future.key for future in places]
        return not given.isdisjoint(keys) or watch.any_begun(client, keys)

    try:
        first = [submit_group(place, *group) for place, group in islice(to_do, window)]
        completed = as_completed(first, loop=client.loop)
        lookout = Lookout(client, waiting, begun=begun)
        losses = Losses(client, lost, key)
        arriving = iter(completed)
        while True:
            newcomers.look()
            while not completed.is_empty() and not _is_ready(completed):
                losses.look()
                lookout.look()
                newcomers.look()
                lookout.look_at_tasks()
            if (future := next(arriving, None)) is None:
                break
            fetch = answer_of(client, partial(fetch_of, client, future))
            while True:
                try:
                    result = result_of(future, retries, fetch, watch.LOOK_SECONDS)
                    break
                except ResultLateError:
                    newcomers.look()
                    losses.look()
                    lookout.look()  # its worker may have been lost with it, and there may be no other
            lookout.seen()
            place = places.pop(future)
            future.release()  # or it would be computed again if its worker is lost
            for next_place, group in islice(to_do, 1):
                completed.add(submit_group(next_place, *group))
            yield place, result
        _check_all_came(len(places), key)
        losses.look_back()
    finally:
        cancel(client, list(places))
        newcomers.close()


def _check_all_came(missing: int, key: str) -> None:
    # Whatever the cause: a product that lacks tiles, or a sum that lacks parts, looks like any other.
    if missing:
        raise ClusterError(f"the results of {key} came to an end with {missing} still to come; run it again")
