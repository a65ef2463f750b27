"""Submit tasks to a cluster: a few more at a time than the workers can run, results as they finish, errors as ours.

The window keeps workers from waiting for a next task, and the scheduler from ever holding a graph of a million tasks. A
matrix's tile goes to the worker whose share it belongs to, unless that worker is lost or falls behind.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import Future as ConcurrentFuture
from concurrent.futures import wait as futures_wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Generic, TypeVar

from distributed import Client, Future, LocalCluster, as_completed, get_worker
from distributed.comm import CommClosedError
from distributed.protocol import pickle
from distributed.scheduler import KilledWorker

from tilewright.kernels.gpu.memory import is_out_of_memory
from tilewright.kernels.numbers import counted
from tilewright.pipeline import config
from tilewright.pipeline.cluster import identity as asking
from tilewright.pipeline.cluster.local import why_none_comes_back
from tilewright.pipeline.errors import (
    ClusterError,
    DamagedError,
    DeviceMemoryError,
    DocumentError,
    RunEndedError,
    TaskError,
    TilewrightError,
)
from tilewright.pipeline.plan.facts import WorkerFacts
from tilewright.pipeline.plan.product import Tile
from tilewright.pipeline.product.placement import Placement
from tilewright.pipeline.worker import tasks

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Answer = TypeVar("Answer")

Tell = Callable[[str], None]
"""Called with a message each time a run waits because all workers are gone, or busy with other tasks: how long so far,
and where."""

Lost = Callable[[str, int | None], None]
"""Called with the address of each worker that a run has lost, and with how many of the run's calls were under way there
and are computed again; None: that is not known."""

Feed = Callable[[Counter[str | None]], Iterable[tuple[int, tuple[Any, ...], str | None]]]
"""Gives the calls to submit now: place, arguments, and the worker each is meant for, if any. Its argument is its own
copy of how many calls are under way, by the worker they were meant for: it has to add those that it gives."""

LOOK_SECONDS = 2.0
"""How often, at most, a run looks for workers that have come or gone, and for tasks that have none."""

WAIT_SECONDS = 10.0
"""How long a run waits for a worker, or for one that begins a task of it, before it says so; restarted workers are back
sooner."""

JOIN_LOOK_SECONDS = 0.2
"""Time between two looks for workers that have to join before work begins."""

ASKED_SECONDS = 0.5
"""How long a run that ends waits for workers that it has asked a question; they answer in milliseconds."""

MOST_NAMED = 3
"""Workers that a message names."""

CONNECTION_LOST = "scheduler-connection-lost"
"""The reason that Dask gives for all tasks that it cancels then."""

LASTING = (DamagedError, DocumentError, RunEndedError)
"""Errors that a retry cannot help: they are about what is stored, or nobody waits for the answer any more."""


class WorkersKilledError(TaskError):
    """A task took down every worker that tried it. Callers add how to make such a task smaller."""


class OtherCodeError(ClusterError):
    """There are workers that run another Tilewright than this process."""


def log_loss(worker: str, calls: int | None) -> None:
    """What is told of a loss by default."""
    logger.warning("worker %s was lost (calls under way: %s)", worker, "unknown" if calls is None else calls)


@contextmanager
def workers_held(client: Client, *, waiting: Tell = logger.warning) -> Iterator[None]:
    """`await_workers`, then give the cluster a task that does nothing until the end of the block.

    An adaptive cluster starts workers for tasks and ends those without: it would have none while work is planned, which
    is done for the workers that are there, and again none between two parts of the work. The task makes it start a
    worker, and keep it as long as that holds the task's result.

    A task of the same cluster that works like this leaves its worker's pool meanwhile, see `tasks.out_of_the_pool`.
    """
    with tasks.out_of_the_pool(partial(_answer_of, client, client.nthreads)):
        name = f"workers-held-{time.time_ns():x}"
        task = _answer_of(client, partial(client.submit, bool, key=name, pure=False))
        try:
            await_workers(client, waiting=waiting)
            yield
        finally:
            task.release()


def await_workers(client: Client, *, waiting: Tell = logger.warning) -> None:
    """Wait until as many workers have joined as ``tilewright.workers`` asks for, ``tilewright.join-seconds`` at most.

    A batch system starts workers in parallel with the script that uses them, and after their scheduler. A
    `LocalCluster` has already waited for all of its workers, so one is enough. ``waiting`` is called after
    `WAIT_SECONDS`, and again when work goes on with fewer than were asked for; no result depends on their number.

    Raises
    ------
    ClusterError
        None has joined in that time, or can join; or the scheduler does not answer.
    """
    wanted = 1 if isinstance(client.cluster, LocalCluster) else config.get("workers")
    seconds = config.get("join-seconds")
    end = (
        f", or fails after {seconds:g} s" if wanted == 1 else f", or after {seconds:g} s with those that have"
    )
    lookout = _Lookout(client, waiting, wanted, end)
    begun = time.monotonic()
    while (there := lookout.look()) < wanted:
        if time.monotonic() - begun >= seconds:
            break
        time.sleep(JOIN_LOOK_SECONDS)
    else:
        return
    where = client.scheduler.address
    longer = "tilewright.join-seconds, DASK_TILEWRIGHT__JOIN_SECONDS"
    if not there:
        raise ClusterError(
            f"the cluster at {where} has no workers, and none has joined within {seconds:g} s; start some, look at"
            f" their logs, or wait longer ({longer})"
        )
    waiting(
        f"{there} of the {wanted} workers asked for (tilewright.workers) have joined {where} within {seconds:g} s; it"
        f" goes on with those ({longer}: wait longer)"
    )


def survey(client: Client, device: str, *, loops: bool = True) -> list[WorkerFacts]:
    """The facts about every worker that is there; unlike `await_workers` it waits for none.

    loops: whether a CPU will need Numba's compiled loops.

    Raises
    ------
    ClusterError
        There are no workers, they would not all use the same kind of device, one of them cannot be asked or runs
        another Tilewright than this process, or the scheduler does not answer.
    """
    facts: dict[str, WorkerFacts] = {}
    for worker, answer in ask_all(client, tasks.worker_facts, device, loops).items():
        if isinstance(answer, TilewrightError):
            raise answer
        facts[worker] = answer
    if not facts:
        raise ClusterError("the cluster has no workers; start some, or wait until they have joined")
    kinds = {fact.device for fact in facts.values()}
    if len(kinds) > 1:
        raise ClusterError(
            f"some of the {len(facts)} workers have a GPU and some have none; say --device cpu to use the CPU on"
            " all, or give the work a cluster whose workers are alike"
        )
    return list(facts.values())


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
    workers = _Workers(client)

    def feed(under_way: Counter[str | None]) -> Iterator[tuple[int, tuple[Any, ...], str | None]]:
        # At least one: without workers a task waits for one, and makes an adaptive cluster start it.
        most = max(1, sum(count + 1 for count in workers.threads().values()))
        for place, call in islice(numbered, max(0, most - under_way[None])):
            yield place, call, None

    run: _Run[Result] = _Run(client, function, key, waiting, lost)
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

    return _answer_of(client, send)


def run_placed(
    client: Client,
    function: Callable[..., Result],
    placement: Placement,
    call: Callable[[Tile, str], tuple[Any, ...]],
    *,
    key: str,
    least: int = 1,
    waiting: Tell = logger.warning,
    lost: Lost = log_loss,
) -> Generator[tuple[int, Result], None, None]:
    """Submit ``function(*call(tile, worker))`` for every tile of ``placement`` and the worker that it is meant for;
    yield the tile's index and the result as it finishes.

    Each worker has as many tiles under way as it has threads, or ``least`` if that is more (a function that waits
    rather than computes may make room for the next, see `tasks.make_room`), and one more of its own share to find
    waiting. When its share is handed out, it gets tiles of others'. A task whose worker is lost goes to any other, or
    waits for one. When workers come or go, the tiles left are divided anew. In all else, errors too, this is as
    ``run_bounded``.
    """
    workers = _Workers(client, threads_of(client, waiting=waiting))
    threads = workers.threads()
    placement.share_among(list(threads))

    def feed(under_way: Counter[str | None]) -> Iterator[tuple[int, tuple[Any, ...], str | None]]:
        nonlocal threads
        before, threads = threads, workers.threads() if len(placement) else threads
        if threads.keys() != before.keys():
            placement.share_among(list(threads))
        for take, more in ((placement.own, 1), (placement.others, 0)):
            taking = list(threads)
            while taking:  # in turns, one each, so that the last worker begins no later than it must
                for worker in tuple(taking):
                    room = under_way[worker] < max(threads[worker], least) + more
                    if room and (tile := take(worker)) is not None:
                        under_way[worker] += 1
                        yield tile.index, call(tile, worker), worker
                    else:
                        taking.remove(worker)

    run: _Run[Result] = _Run(client, function, key, waiting, lost)
    yield from run.results(feed, lambda: len(placement))


class _Workers:
    """Threads of each worker, by address, as of the last look that found any: workers that are gone are being
    restarted, and come back under other addresses."""

    def __init__(self, client: Client, threads: dict[str, int] | None = None) -> None:
        """threads: what a look just now has found, if there was one."""
        self._client = client
        self._threads = threads or {}
        self._looked = time.monotonic() if threads else -math.inf

    def threads(self) -> dict[str, int]:
        """Looks again if the last look is older than `LOOK_SECONDS`."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._threads = _answer_of(self._client, self._client.nthreads) or self._threads
            self._looked = time.monotonic()
        return self._threads


@dataclass(frozen=True)
class _Failed:
    """The result of a task that failed with one of `LASTING`."""

    kind: type[TilewrightError]
    message: str


def tried(
    ours: asking.Code, function: Callable[..., Result], *arguments: Any
) -> Result | _Failed | asking.Differs:
    """``function(*arguments)``; what every task does.

    Not on a worker that does not run ``ours``, the code of the client: it has joined since the others were asked, or
    was started anew. It returns a `asking.Differs`.

    An error of `LASTING` is returned as a `_Failed`, not raised: Dask would retry the task, and log each attempt. Nor
    does a `_Failed` keep the error's frames, which hold buffers. A task that gets one as an argument returns it, and so
    a `asking.Differs`.
    """
    if ours != asking.HERE:
        return asking.Differs(asking.address_of(get_worker()), asking.HERE)
    for argument in arguments:
        if isinstance(argument, (_Failed, asking.Differs)):
            return argument
    try:
        return function(*arguments)
    except LASTING as error:
        return _Failed(type(error), str(error))
    except Exception as error:
        _make_portable(error)
        raise


def _make_portable(error: Exception) -> None:
    """Put text in place of what an error came from, if that cannot be sent to the client: libraries of servers raise
    such errors, and Dask would send the text of the whole in place of our error."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        origin = error.__cause__ or error.__context__
        error.__context__ = None
        error.__cause__ = None if origin is None else RuntimeError(f"{type(origin).__name__}: {origin}")


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


class _Run(Generic[Result]):
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
        self._lookout = _Lookout(client, waiting, begun=self._any_begun)
        self._newcomers = _Newcomers(client)
        self._losses = _Losses(client, lost, key)
        # On this client's loop: by default it takes that of the client opened last.
        self._completed = as_completed(loop=client.loop)

    def results(self, feed: Feed, left: Callable[[], int]) -> Generator[tuple[int, Result], None, None]:
        """Submit what ``feed`` gives at the start, after each result, and when none has come for `LOOK_SECONDS`; every
        `LOOK_SECONDS`, submit again what waits for a worker that is gone. Yield results as they finish. ``left`` says
        how many calls ``feed`` still has."""
        try:
            self._submit_next(feed)
            looked = time.monotonic()
            while self._tasks:
                self._newcomers.look()
                ready = _is_ready(self._completed)
                if not ready or time.monotonic() - looked > LOOK_SECONDS:
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
                except _ResultLateError:
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
            _cancel(self._client, list(self._tasks))
            self._newcomers.close()

    def _submit(self, task: _Task, name: str, **where: Any) -> None:
        options = {"key": name, "pure": False, "retries": self._retries} | where
        submit = partial(self._client.submit, tried, asking.HERE, self._function, *task.call, **options)
        future = _answer_of(self._client, submit)
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
        placed = set(chain(*_answer_of(self._client, self._client.processing).values())) if meant else set()
        unplaced = {future for future in meant if future.key not in placed and not future.done()}
        for future in unplaced & self._unplaced:
            task = replace(self._forget(future), worker=None, late=0, fetch=None)
            _cancel(self._client, [future])
            self._submit(task, f"{self._key}-{task.place}-again")
        self._unplaced = unplaced

    def _any_begun(self) -> bool:
        return _any_begun(self._client, [future.key for future in self._tasks])

    def _result_of(self, future: Future) -> Result:
        """The result of a task that is done. Raises `_ResultLateError` where it does not come in time: the fetch goes
        on, and has longer the next time. If the result was lost, Dask computes it again, and the task may have to be
        submitted again."""
        task = self._tasks[future]
        fetch = task.fetch or _answer_of(self._client, partial(_fetch, self._client, future))
        try:
            result: Result = _result_of(future, self._retries, fetch, 2**task.late * LOOK_SECONDS)
        except _ResultLateError:
            self._tasks[future] = replace(task, late=task.late + 1, fetch=fetch)
            raise
        return result


class _Lookout:
    """Says that a run waits because its cluster has no worker left, or fewer than wanted, or because none of them has
    begun a task of it: once, and again only if it was otherwise in between."""

    def __init__(
        self,
        client: Client,
        waiting: Tell,
        wanted: int = 1,
        end: str = "",
        begun: Callable[[], bool] = lambda: True,
    ) -> None:
        """
        end: ends the message about workers; says how else the waiting may end, if it may.
        begun: whether any of the tasks that the run waits for has begun, if that can be told.
        """
        self._client = client
        self._begun = begun
        self._waiting = waiting
        self._wanted = wanted
        self._end = end
        self._alone_since: float | None = None
        self._told = False
        self._idle_since = time.monotonic()
        self._told_idle = False

    def seen(self) -> None:
        """A result came, maybe between two looks: there was a worker, and it had time for the run."""
        self._alone_since, self._told = None, False
        self._idle_since, self._told_idle = time.monotonic(), False

    def look(self) -> int:
        """How many workers there are now. Raises ClusterError where there is none and none can come."""
        there = len(_answer_of(self._client, self._client.nthreads))
        if there >= self._wanted:
            self._alone_since, self._told = None, False
            return there
        if not there and (why := why_none_comes_back(self._client)):
            raise ClusterError(f"the cluster has no workers any more: {why}")
        now = self._idle_since = time.monotonic()  # who has no workers does not wait for busy ones
        if self._alone_since is None:
            self._alone_since = now
        if now - self._alone_since >= WAIT_SECONDS and not self._told:
            self._told = True
            where, seconds = self._client.scheduler.address, f"{now - self._alone_since:.0f} s"
            if self._wanted == 1:
                found, then = f"no worker has been at {where} for {seconds}", "when one joins"
            else:
                found = f"{there} of {self._wanted} workers have joined {where} in {seconds}"
                then = "when the others have"
            self._waiting(f"{found}; it goes on {then}{self._end}")
        return there

    def look_at_tasks(self) -> None:
        """Where no result has come for `WAIT_SECONDS`, look whether any task has begun, and again as long after."""
        now = time.monotonic()
        if self._told_idle or now - self._idle_since < WAIT_SECONDS:
            return
        if self._begun():
            self._idle_since = now
            return
        self._told_idle = True
        self._waiting(
            f"no result has come for {now - self._idle_since:.0f} s, and no worker runs a task of it: those at"
            f" {self._client.scheduler.address} are busy with other tasks, or paused; it goes on when one has time"
        )


class _Losses:
    """Tells of each worker that a run has lost."""

    def __init__(self, client: Client, lost: Lost, key: str) -> None:
        """key: what the names of the run's tasks begin with."""
        self._client, self._lost = client, lost
        self._own = f"{key}-"
        self._there = self._workers()

    def _workers(self) -> set[str]:
        return set(_answer_of(self._client, self._client.nthreads))

    def look(self) -> None:
        """Tell of workers that are gone since the last look. One that was asked to leave, and did so without any work
        of the run, is no loss."""
        before, self._there = self._there, self._workers()
        for worker in sorted(before - self._there):
            end = self._end_of(worker)
            calls = self._calls_of(end) if "processing-tasks" in end else None
            if calls != 0 or not end.get("expected"):
                self._lost(worker, calls)

    def look_back(self) -> None:
        """Look at the end of a run, which has all its results: what the scheduler does by now is no error of it."""
        with suppress(ClusterError):
            self.look()

    def _end_of(self, worker: str) -> dict[str, Any]:
        """What the scheduler has noted of a worker's end; empty if it has kept nothing."""
        events = _answer_of(self._client, partial(self._client.get_events, worker))
        told = [event for _, event in events if isinstance(event, dict)]
        ends = [event for event in told if event.get("action") == "remove-worker"]
        return ends[-1] if ends else {}

    def _calls_of(self, end: dict[str, Any]) -> int:
        keys = {*end["processing-tasks"], *end.get("lost-computed-tasks", ())}
        own = [key for key in keys if isinstance(key, str) and key.startswith(self._own)]
        # The place of its call comes next in a task's name; a call in parts has several tasks.
        return len({key.removeprefix(self._own).partition("-")[0] for key in own})


def _any_begun(client: Client, keys: list[str]) -> bool:
    """Whether a worker runs one of these tasks now, or one that it needs; also where that cannot be told at once, as
    when a worker has just been lost."""
    try:
        return bool(client.sync(client.scheduler.call_stack, keys=keys, callback_timeout=LOOK_SECONDS))
    except Exception as error:  # of which the next look at the workers tells, if it is the scheduler's end
        logger.debug("what runs on the workers cannot be told: %s: %s", type(error).__name__, error)
        return True


def can_work() -> bool:
    """Whether a worker can run tasks: one that can import this can import what they call."""
    return True


class _Newcomers:
    """Asks each worker of a run once, those that join too, whether it runs this Tilewright.

    A task finds that out by itself where the worker can unpickle it. Where it cannot, Dask ends the worker, and says so
    only in its log: a run that has no other would wait for good.

    The run goes on while they answer: a worker that stands still when it joins holds up nothing.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: set[str] = set()
        self._looked = time.monotonic()
        self._asked: ConcurrentFuture[dict[str, Any]] | None = None

    def look(self) -> None:
        """Ask those that have come since the last look, if that is `LOOK_SECONDS` ago.

        Raises ClusterError, as ``ask_all`` does, where one has answered that it cannot work or runs another Tilewright.
        """
        if self._asked is not None:
            if not self._asked.done():
                return
            asked, self._asked = self._asked, None
            if (error := asked.exception()) is None:
                _answers_of(can_work, asked.result())
            else:  # where the scheduler is gone, the run finds out by itself
                logger.debug("%s were not asked: %s: %s", self._known, type(error).__name__, error)
        if time.monotonic() - self._looked <= LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        there = set(_answer_of(self._client, self._client.nthreads))
        workers = sorted(there - self._known)
        self._known = there  # one that comes back may run something else by then
        if workers:
            self._asked = _answer_of(self._client, partial(_begin, self._client, self._ask(workers)))

    async def _ask(self, workers: list[str]) -> dict[str, Any]:
        question = pickle.dumps((can_work, ()))
        options = {"workers": workers, "on_error": "return"}
        answered: dict[str, Any] = await self._client.run(asking.answer, asking.HERE, question, **options)
        return answered

    def close(self) -> None:
        """Wait a moment for those that have been asked: Dask tells of answers that nobody is there for any more."""
        if self._asked is not None:
            futures_wait([self._asked], ASKED_SECONDS)


def _is_ready(completed: as_completed) -> bool:
    """Whether a result comes within `LOOK_SECONDS`."""
    with completed.thread_condition:
        return bool(completed.thread_condition.wait_for(completed.has_ready, LOOK_SECONDS))


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
            submit = partial(client.submit, tried, asking.HERE, function, *call, **named)
            parts.append(_answer_of(client, submit))
        named = {"key": f"{key}-{place}"} | options
        submit = partial(client.submit, tried, asking.HERE, combine, *head, *parts, **named)
        future = _answer_of(client, submit)
        places[future] = place
        # Only `combine` needs them: those that this client holds too would stay until the end of the run.
        for part_future in parts:
            part_future.release()
        return future

    newcomers = _Newcomers(client)

    def any_begun() -> bool:
        # What is to be combined is given to a worker once all its parts are there: it may be fetching them.
        given = set(chain(*_answer_of(client, client.processing).values()))
        keys = [future.key for future in places]
        return not given.isdisjoint(keys) or _any_begun(client, keys)

    try:
        first = [submit_group(place, *group) for place, group in islice(to_do, window)]
        completed = as_completed(first, loop=client.loop)
        lookout = _Lookout(client, waiting, begun=any_begun)
        losses = _Losses(client, lost, key)
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
            fetch = _answer_of(client, partial(_fetch, client, future))
            while True:
                try:
                    result = _result_of(future, retries, fetch, LOOK_SECONDS)
                    break
                except _ResultLateError:
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
        _cancel(client, list(places))
        newcomers.close()


def _check_all_came(missing: int, key: str) -> None:
    # Whatever the cause: a product that lacks tiles, or a sum that lacks parts, looks like any other.
    if missing:
        raise ClusterError(f"the results of {key} came to an end with {missing} still to come; run it again")


class _ResultLateError(Exception):
    """A result has not come in time: its worker was lost with it, or it is large."""


def _fetch(client: Client, future: Future) -> ConcurrentFuture[Any]:
    """Start to fetch the result of a task. The fetch is never cancelled, even when nobody waits for it any more: Dask
    fetches the results of several waits in one call, and cancelling that for one cancels it for all, later ones
    included."""

    async def result() -> Any:
        (found,) = await client.gather([future], asynchronous=True)
        return found

    return _begin(client, result())


def _begin(client: Client, work: Coroutine[Any, Any, Result]) -> ConcurrentFuture[Result]:
    """Start this on the client's loop."""
    try:
        return asyncio.run_coroutine_threadsafe(work, client.loop.asyncio_loop)
    except BaseException:
        work.close()
        raise


def _result_of(
    future: Future, retries: int, fetch: ConcurrentFuture[Any] | None = None, seconds: float | None = None
) -> Any:
    """The result of a task that is done, errors as ours; waits for ``fetch``, if given, at most ``seconds``."""
    try:
        result = future.result() if fetch is None or future.status == "error" else fetch.result(seconds)
        if isinstance(result, _Failed):
            raise result.kind(result.message)
        if isinstance(result, asking.Differs):
            raise _other_code([result])
        return result
    except TilewrightError:
        raise
    except (CancelledError, CommClosedError) as error:
        if future.client.status in ("closing", "closed"):  # which cancels all that it holds
            raise _closed(future.client) from error
        if CONNECTION_LOST in str(error):  # its text is long, and the same for every task
            raise ClusterError(
                f"the connection to the scheduler at {future.client.scheduler.address} was lost; bring a cluster up"
                " and run it again"
            ) from error
        if isinstance(error, CancelledError) and future.status == "finished":
            raise _not_fetched(future, error) from error
        raise ClusterError(
            f"the scheduler went away, or cancelled task {future.key}: {error}; bring a cluster up and run it again"
        ) from error
    except KilledWorker as error:
        raise WorkersKilledError(
            f"task {future.key} took down every worker that tried it: {error}; look at the workers' logs, and give"
            " them more memory"
        ) from error
    except Exception as error:
        if isinstance(error, TimeoutError) and future.status != "error":
            raise _ResultLateError from error
        if future.status != "error":  # the fetch failed, not the task
            if future.client.status in ("closing", "closed"):
                raise _closed(future.client) from error
            raise _not_fetched(future, error) from error
        if is_out_of_memory(error):
            raise DeviceMemoryError(
                f"task {future.key} ran out of memory {retries + 1} times, last with {type(error).__name__}: {error};"
                " free memory there, or give the workers more of it or fewer threads"
            ) from error
        raise TaskError(
            f"task {future.key} failed {retries + 1} times, last with {type(error).__name__}: {error}"
        ) from error


def _not_fetched(future: Future, error: BaseException) -> ClusterError:
    return ClusterError(
        f"the result of task {future.key} cannot be fetched: {type(error).__name__}: {error}; run it again, with a new"
        " client if that was interrupted before"
    )


def threads_of(client: Client, *, waiting: Tell = logger.warning) -> dict[str, int]:
    """Threads of each worker, by its address, as the scheduler has them now. Waits where it has none, as a run does
    that loses them later, and calls ``waiting`` after `WAIT_SECONDS`.

    Never ``client.scheduler_info()``: it answers from a cache of the client, which the client's own refresh (every two
    seconds, without workers) may have emptied since the call filled it.

    Raises
    ------
    ClusterError
        There are no workers and none can come, or the scheduler does not answer.
    """
    lookout = _Lookout(client, waiting)
    threads: dict[str, int]
    while not (threads := _answer_of(client, client.nthreads)):
        if not lookout.look():
            time.sleep(JOIN_LOOK_SECONDS)
    return threads


def run_on_all(client: Client, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """The function's result on each worker, by address, or the error that it, or the connection, failed with.

    Raises ClusterError where the scheduler does not answer.
    """
    answers: dict[str, Any] = _answer_of(client, partial(client.run, function, *arguments, on_error="return"))
    return answers


def ask_all(
    client: Client, function: Callable[..., Any], *arguments: Any, workers: list[str] | None = None
) -> dict[str, Any]:
    """The function's result on each worker, or on those that are named, by address; workers lost meanwhile are left
    out.

    Raises
    ------
    ClusterError
        The scheduler does not answer, a worker runs another Tilewright than this process, or the function fails on one.
    """
    question = pickle.dumps((function, arguments))
    options = {"workers": workers, "on_error": "return"}
    ask = partial(client.run, asking.answer, asking.HERE, question, **options)
    return _answers_of(function, _answer_of(client, ask))


def _answers_of(function: Callable[..., Any], answered: dict[str, Any]) -> dict[str, Any]:
    """What workers have answered, without those that were lost. Raises as ``ask_all`` does."""
    answers, others = {}, []
    for worker, answer in answered.items():
        if isinstance(answer, asking.Differs):
            others.append(answer)
        elif isinstance(answer, OSError):
            logger.warning("worker %s does not answer: %s: %s", worker, type(answer).__name__, answer)
        elif isinstance(answer, asking.NoAnswerError):
            raise ClusterError(
                f"worker {worker} cannot say {function.__name__}: {answer}; look at its log, and mend that there, or"
                " give the work a cluster without that worker"
            ) from answer
        elif isinstance(answer, BaseException) and not isinstance(answer, TilewrightError):
            raise OtherCodeError(
                f"worker {worker} cannot be asked for {function.__name__}: {type(answer).__name__}: {answer}; it needs"
                f" the same version of Tilewright, {asking.HERE}, and of what that imports, as this process: install"
                " them there, and start the worker anew"
            ) from answer
        else:
            answers[worker] = answer
    if others:
        raise _other_code(others)
    return answers


def _other_code(found: Sequence[asking.Differs]) -> OtherCodeError:
    """The error about workers that run another Tilewright than this process."""
    named = [f"worker {one.worker} runs Tilewright {one.code}" for one in found[:MOST_NAMED]]
    if len(found) > MOST_NAMED:
        named.append(f"{counted(len(found) - MOST_NAMED, 'other worker')} another one")
    checkout = ""
    if any(one.code.version == asking.HERE.version for one in found):
        checkout = f" (from a checkout: the same files in {' and '.join(asking.LAYERS)})"
    return OtherCodeError(
        f"{', '.join(named)}, and this process {asking.HERE}; their results could differ, so install the same"
        f" version{checkout} on all workers and here, and start anew what was running before"
    )


def _answer_of(client: Client, ask: Callable[[], Answer]) -> Answer:
    """What the scheduler answers; ClusterError where it does not, or where the client was closed meanwhile."""
    try:
        return ask()
    except TilewrightError:
        raise
    except Exception as error:
        # Dask raises CommClosedError for a connection that breaks, and a plain OSError for one that cannot be made.
        # Subclasses of OSError, such as TimeoutError, are answers of a scheduler that is there.
        if isinstance(error, CommClosedError) or type(error) is OSError:
            raise ClusterError(
                f"the scheduler went away: {error}; bring a cluster up and run it again"
            ) from error
        # The error of a client without a scheduler depends on how far it has come with closing.
        if client.status == "running":
            raise
        raise _closed(client) from error


def _closed(client: Client) -> ClusterError:
    return ClusterError(
        f"the client is {client.status}: its scheduler went away, or somebody closed it; connect to a cluster anew and"
        " run it again"
    )


def _cancel(client: Client, futures: list[Future]) -> None:
    """Cancel what is outstanding. Where the scheduler or the client is gone, so are the tasks, and the error that says
    so is being raised already: none is raised in its place."""
    try:
        _answer_of(client, partial(client.cancel, futures, force=True))
    except ClusterError as error:
        logger.debug("%d tasks need not be cancelled: %s", len(futures), error)
