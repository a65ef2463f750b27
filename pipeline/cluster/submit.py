"""Submit tasks to a cluster: a few more at a time than the workers can run, results as they finish, errors as ours.

The window keeps workers from waiting for a next task, and the scheduler from ever holding a graph of a million tasks. A
matrix's tile goes to the worker whose share it belongs to, unless that worker is lost or falls behind.
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future as ConcurrentFuture
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Generic, cast

from tilewright.pipeline import config
from tilewright.pipeline.cluster import watch
from tilewright.pipeline.cluster.answers import (
    OtherCodeError,
    Packer,
    Result,
    ResultLateError,
    answer_of,
    cancel,
    cluster_errors,
    code_asked_by,
    fetch_large_of,
    fetch_of,
    result_of,
    tried,
    unchanged_answer_of,
)
from tilewright.pipeline.cluster.drain import Drain, running_seconds
from tilewright.pipeline.cluster.heartbeats import Heartbeats, NobodyElse, heartbeats_for
from tilewright.pipeline.cluster.here.client import Completed, HereClient
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

if TYPE_CHECKING:
    from distributed import Client, Future, as_completed

logger = logging.getLogger(__name__)

IN_TURN: dict[str, Any] = {"pure": False, "fifo_timeout": 0}
"""How every task is submitted. Dask takes those that come within a tenth of a second for equally urgent, and a worker
then begins them in any order; but they are submitted in the order in which they find what earlier ones left there."""

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
    drain: Drain | None = None,
    large: bool = False,
) -> Generator[tuple[int, Result], None, None]:
    """Submit ``function(*call)`` for every call; yield results as they finish.

    large: whether results may be large, which are then fetched in a way of their own.

    At a time there is one task for each thread of the workers, and one more for each worker to find waiting, also where
    workers come and go.

    It ends normally only when every call has yielded its result, exactly once: callers need not count. Where all
    workers are lost and others may come it waits for them, and calls ``waiting`` after `WAIT_SECONDS` without any.
    ``lost`` is called for each worker that is lost. What a silent worker has under way is given to another too
    (`heartbeats`), and the first result counts. Where ``drain`` is requested, it yields what is nearly done and raises
    what that ends with.
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

    run: TasksUnderWay[Result] = TasksUnderWay(client, function, key, waiting, lost, drain, large=large)
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

    def run(held: list[Future], key: str) -> Generator[tuple[int, Result], None, None]:
        places = list(left)
        results = run_bounded(
            client,
            function,
            ((*left[place], *held) for place in places),
            key=key,
            waiting=waiting,
            lost=lost,
        )
        with closing(results):
            for number, result in results:
                del left[places[number]]
                yield places[number], result

    yield from with_sent(client, values, run, key=key, waiting=waiting)


def with_sent(
    client: Client,
    values: tuple[Any, ...],
    run: Callable[[list[Future], str], Generator[tuple[int, Result], None, None]],
    *,
    key: str,
    waiting: Tell = logger.warning,
) -> Generator[tuple[int, Result], None, None]:
    """The results of ``run``, which gets the futures of values for its tasks, and a key. The values are sent to each
    worker once.

    Where all workers that held them are lost it is called again, as often as a task is retried: for what is left then,
    of which it has to keep account.
    """
    for attempt in range(config.get("retries") + 1):
        try:
            held = _sent(client, values, key, waiting)
            with closing(run(held, f"{key}-{attempt}")) as results:
                yield from results
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

    with cluster_errors(client):
        try:
            held: list[Future] = unchanged_answer_of(
                client, partial(client.scatter, list(values), broadcast=True, hash=False)
            )
        except ClusterError:
            raise
        except Exception as error:
            # Where workers go away meanwhile, the scheduler's error depends on how far it has come.
            if client.status != "running":
                raise
            raise ClusterError(
                f"no worker takes what {key} needs: {type(error).__name__}: {error}; look at the workers' logs, and"
                " run it again"
            ) from error
    return held


STRAGGLER_TIMES = 3.0
"""A call that has been under way for so many times as long as three quarters of its like took at most is given to an
idle worker too, once there is nothing else to give to that."""

STRAGGLER_SECONDS = 10.0
"""Not before it has been under way for so long: the start of its copy takes a while too."""

STRAGGLER_LIKE = 3
"""Nor before so many others are done."""

DRAIN_LOOK_SECONDS = 0.2
"""How often it is looked, at least, whether the run is to be drained, and whether it has to end then."""

ASK_SECONDS = 2.0
"""How long workers may take to say what they run; it takes them milliseconds."""


@dataclass(frozen=True)
class _Task:
    """What was submitted for a call."""

    place: int
    call: tuple[Any, ...]
    worker: str | None
    """The one it is meant for, if any."""
    fetch: ConcurrentFuture[Any] | None = None
    """The fetch of its result, if under way."""
    since: float = 0.0
    """When it was submitted, by the monotonic clock."""
    late: bool = False
    """Whether its result has not come in time once: nobody waits for it any more."""


class TasksUnderWay(Generic[Result]):
    """The tasks of a run that are under way.

    ``_tasks`` holds exactly these: submitted, not given up, results not yet yielded. ``_counts`` holds how many of them
    were meant for each worker, ``_copies`` those of each call: one, or more where a worker is silent or slow. Only
    `_submit` and `_forget` change the three, always together.
    """

    def __init__(
        self,
        client: Client,
        function: Callable[..., Result],
        key: str,
        waiting: Tell,
        lost: Lost,
        drain: Drain | None = None,
        *,
        large: bool = False,
    ) -> None:
        self._large = large
        self._client, self._function, self._key = client, function, key
        self._waiting, self._drain = waiting, drain
        self._retries = config.get("retries")
        self._pack = Packer()
        self._tasks: dict[Future, _Task] = {}
        self._counts: Counter[str | None] = Counter()
        self._copies: dict[int, list[Future]] = {}
        self._submitted = 0
        self._unplaced: set[Future] = set()  # those that waited for a worker at the last look
        self._seconds: list[float] = []  # from each call's submission to its result, sorted
        self.left_behind: dict[str, set[int]] = {}
        """Workers that may still be busy with calls whose results came from others, with the places of these."""
        self._workers = Workers(client)
        self._lookout = Lookout(client, waiting, begun=self._any_begun)
        self._newcomers = Newcomers(client)
        self._losses = Losses(client, lost, key)
        self._completed = _completed_of(client)
        self._heartbeats: Heartbeats | NobodyElse | None = None

    def heard(self, workers: Iterable[str]) -> list[str]:
        """Those of the workers that are not silent, while `results` are waited for."""
        silent = self._heartbeats.silent() if self._heartbeats is not None else {}
        return [worker for worker in workers if worker not in silent]

    def results(self, feed: Feed, left: Callable[[], int]) -> Generator[tuple[int, Result], None, None]:
        """Submit what ``feed`` gives at the start, after each result, and when none has come for `watch.LOOK_SECONDS`;
        every `watch.LOOK_SECONDS`, submit again what waits for a worker that is gone, or is with one that is silent or
        slow. Yield results as they finish. ``left`` says how many calls ``feed`` still has."""
        with heartbeats_for(self._client, self._waiting) as self._heartbeats:
            try:
                yield from self._results(feed, left, self._heartbeats)
            finally:
                cancel(self._client, list(self._tasks))
                self._newcomers.close()

    def _results(
        self, feed: Feed, left: Callable[[], int], heartbeats: Heartbeats | NobodyElse
    ) -> Generator[tuple[int, Result], None, None]:
        drained = False
        late: list[Future] = []
        self._submit_next(feed)
        looked = time.monotonic()
        while self._tasks:
            if self._drain is not None and self._drain.requested:
                if not drained:
                    drained = True
                    self._keep_nearly_done(self._drain)
                    continue
                if not self._drain.seconds_left():
                    break
            self._newcomers.look()
            ready = _is_ready(self._completed, self._drain)
            if not ready or time.monotonic() - looked > watch.LOOK_SECONDS:
                heartbeats.look()
                self._losses.look()
                self._lookout.look()
                if not ready:
                    self._lookout.look_at_tasks()  # before any is submitted that the scheduler does not know yet
                self._submit_again()
                self._copy_from(list(heartbeats.silent()))
                if not drained:
                    self._copy_stragglers(left)
                for future in late:
                    self._completed.add(future)
                late.clear()
                looked = time.monotonic()
            if not ready:
                if not drained:
                    self._submit_next(feed)
                continue
            results, failed, not_here = self._results_of(self._completed.next_batch())
            late += not_here  # others first
            if results:
                self._lookout.seen()
            # More is given out once these are recorded, which whoever asks for the next result has done: what a client
            # that is killed has not recorded is computed again, and counts as under way.
            yield from results
            if failed is not None:
                raise failed
            if results and not drained and not _is_requested(self._drain):
                self._submit_next(feed)
        if self._drain is not None and self._drain.requested:
            self._drain.end()
        _check_all_came(left(), self._key)
        self._losses.look_back()

    def _submit(self, task: _Task, name: str, **where: Any) -> None:
        options = IN_TURN | {"key": name, "retries": self._retries} | where
        with cluster_errors(self._client):
            packed, futures = self._pack(self._function, task.call)
            future = self._client.submit(tried, code_asked_by(self._client), packed, *futures, **options)
        self._tasks[future] = replace(task, since=time.monotonic())
        self._counts[task.worker] += 1
        self._copies.setdefault(task.place, []).append(future)
        self._completed.add(future)

    def _forget(self, future: Future) -> _Task:
        task = self._tasks.pop(future)
        self._counts[task.worker] -= 1
        copies = self._copies[task.place]
        copies.remove(future)
        if not copies:
            del self._copies[task.place]
        return task

    def _submit_next(self, feed: Feed) -> None:
        for place, call, worker in feed(self._counts.copy()):
            where: dict[str, Any] = {}
            if worker is not None:
                where = {"workers": [worker], "allow_other_workers": True}
            elif len(heard := self.heard(there := self._workers.threads())) < len(there) and heard:
                where = {"workers": heard, "allow_other_workers": True}
            self._submit(_Task(place, call, worker), f"{self._key}-{place}", **where)

    def _submit_anew(self, task: _Task, kind: str, **where: Any) -> None:
        """Submit a call once more, under a name that no task of the run has had."""
        self._submitted += 1
        self._submit(
            replace(task, fetch=None, late=False),
            f"{self._key}-{task.place}-{kind}-{self._submitted}",
            **where,
        )

    def _submit_again(self) -> None:
        # Dask gives a task whose worker is gone to another. Where there is none at all, the task waits for that very
        # worker, which comes back under another address, if at all. One look is not enough: the scheduler may not have
        # received the task yet, or its result may be on its way.
        meant = {future for future, task in self._tasks.items() if task.worker is not None}
        placed = set(chain(*answer_of(self._client, self._client.processing).values())) if meant else set()
        unplaced = {future for future in meant if future.key not in placed and not future.done()}
        for future in unplaced & self._unplaced:
            task = self._forget(future)
            cancel(self._client, [future])
            self._submit_anew(replace(task, worker=None), "again")
        self._unplaced = unplaced

    def _copy_from(self, silent: list[str]) -> None:
        """Give what silent workers have under way, or are to send the result of, to others too. Both may store it: they
        store the same."""
        if not silent or not (heard := self.heard(self._workers.threads())):
            return
        stuck = _with(self._client, silent)
        for copies in list(self._copies.values()):
            if all(future.key in stuck for future in copies):
                self._copy(self._tasks[copies[0]], heard)

    def _copy_stragglers(self, left: Callable[[], int]) -> None:
        """Give calls that take far longer than others did to workers that have nothing to do any more."""
        if len(self._seconds) < STRAGGLER_LIKE:
            return
        limit = max(STRAGGLER_SECONDS, STRAGGLER_TIMES * self._seconds[3 * len(self._seconds) // 4])
        now = time.monotonic()
        slow = [
            task
            for future, task in self._tasks.items()
            if task.worker is not None and now - task.since > limit and len(self._copies[task.place]) == 1
        ]
        if not slow or left():
            return
        idle = [worker for worker in self.heard(self._workers.threads()) if not self._counts[worker]]
        for task, worker in zip(slow, idle, strict=False):
            self._copy(task, [worker])

    def _copy(self, task: _Task, workers: list[str]) -> None:
        worker = task.worker
        if worker is not None:
            worker = min(workers, key=lambda one: self._counts[one])
            workers = [worker]
        self._submit_anew(replace(task, worker=worker), "copy", workers=workers, allow_other_workers=True)

    def _give_up_copies(self, place: int) -> None:
        """Cancel the other tasks of a call whose result has come."""
        futures = list(self._copies.get(place, ()))
        for future in futures:
            task = self._forget(future)
            if task.worker is not None:
                self.left_behind.setdefault(task.worker, set()).add(place)
        if futures:
            cancel(self._client, futures)

    def _keep_nearly_done(self, drain: Drain) -> None:
        """Cancel what is not nearly done."""
        running = _running(self._client, self.heard(self._workers.threads()))
        own = {future: running[future.key] for future in self._tasks if future.key in running}
        kept = drain.nearly_there(own) | {future for future in self._tasks if future.done()}
        given_up = [future for future in self._tasks if future not in kept]
        for future in given_up:
            self._forget(future)
        cancel(self._client, given_up)
        drain.say(len(self._copies))

    def _any_begun(self) -> bool:
        return watch.any_begun(self._client, [future.key for future in self._tasks])

    def _results_of(
        self, ready: Sequence[Future]
    ) -> tuple[list[tuple[int, Result]], Exception | None, list[Future]]:
        """The places and results of tasks that are done, which are no longer under way; what the first of the others
        has failed with; and those tasks whose results have not come within `watch.LOOK_SECONDS`.

        All are fetched at once, which Dask makes one question to the scheduler: the more tasks end at a time, the less
        each takes.
        """
        until = time.monotonic() + watch.LOOK_SECONDS
        fetch = fetch_large_of if self._large else fetch_of
        with cluster_errors(self._client):
            for future in ready:
                task = self._tasks.get(future)  # none where it was submitted again
                if task is not None and task.fetch is None:
                    self._tasks[future] = replace(task, fetch=fetch(self._client, future))
        results: list[tuple[int, Result]] = []
        late: list[Future] = []
        for future in ready:
            if future not in self._tasks:
                continue  # or the result of its copy has just come
            try:
                result = self._result_of(future, until)
            except ResultLateError:
                late.append(future)
                continue
            except Exception as error:
                return results, error, late
            task = self._forget(future)
            future.release()
            self._give_up_copies(task.place)
            insort(self._seconds, time.monotonic() - task.since)
            results.append((task.place, result))
        return results, None, late

    def _result_of(self, future: Future, until: float) -> Result:
        """The result of a task that is done. Raises `ResultLateError` where it has not come by ``until``, and had not
        at an earlier time: the fetch goes on. If the result was lost, Dask computes it again, and the task may have to
        be submitted again."""
        task = self._tasks[future]
        seconds = 0.0 if task.late else max(0.0, until - time.monotonic())
        with cluster_errors(self._client):
            try:
                result: Result = result_of(future, self._retries, task.fetch, seconds)
            except ResultLateError:
                self._tasks[future] = replace(task, late=True)
                raise
        return result


def _with(client: Client, workers: list[str]) -> set[Hashable]:
    """The keys of tasks that these workers were given, or hold the results of."""
    given = answer_of(client, client.processing)  # of all: for one that is gone by now it would be an error
    held = answer_of(client, partial(client.has_what, workers=workers))
    return {*chain(*(given.get(worker, ()) for worker in workers)), *chain(*held.values())}


def _running(client: Client, workers: list[str]) -> dict[Hashable, float]:
    """For how many seconds each task on these workers has been running; without those that do not say so in time."""
    options = {"workers": workers, "on_error": "ignore", "callback_timeout": ASK_SECONDS}
    try:
        answers = client.sync(client.run, running_seconds, **options) if workers else {}
    except Exception as error:  # they are asked because it ends anyway
        logger.debug("what runs on the workers is not known: %s: %s", type(error).__name__, error)
        return {}
    return {key: seconds for tasks in answers.values() for key, seconds in tasks.items()}


def _completed_of(client: Client, futures: Sequence[Future] = ()) -> as_completed:
    if isinstance(client, HereClient):
        return cast("as_completed", Completed(cast(Any, futures)))
    from distributed import as_completed

    # On this client's loop: by default it takes that of the client opened last.
    return as_completed(futures, loop=client.loop)


def _is_ready(completed: as_completed, drain: Drain | None = None) -> bool:
    """Whether a result comes within `watch.LOOK_SECONDS`, or until a drain is requested."""
    until = time.monotonic() + watch.LOOK_SECONDS
    before = drain is not None and drain.requested
    with completed.thread_condition:
        while not completed.has_ready():
            if (left := until - time.monotonic()) <= 0:
                return False
            if drain is not None and drain.requested and not before:
                return False
            # A signal does not wake up who waits here.
            completed.thread_condition.wait(left if drain is None else min(left, DRAIN_LOOK_SECONDS))
    return True


def _is_requested(drain: Drain | None) -> bool:
    return drain is not None and drain.requested


def run_combined(
    client: Client,
    function: Callable[..., Any],
    combine: Callable[..., Result],
    groups: Sequence[tuple[tuple[Any, ...], Sequence[tuple[Any, ...]]]],
    *,
    window: int,
    key: str,
    left: Callable[[str, int], None] = lambda worker, place: None,
    waiting: Tell = logger.warning,
    lost: Lost = log_loss,
    drain: Drain | None = None,
) -> Generator[tuple[int, Result], None, None]:
    """For each group ``(head, calls)``: ``combine(*head, *[function(*call) for call in calls])``, on the workers.

    The calls' results stay on the workers until their group is combined, so only ``window`` groups are under way at a
    time. Yields results of ``combine`` as they finish. Where a group was begun anew, since a worker with a part of it
    was silent, the first result counts; ``left`` is told of the workers that may then still be busy with the group, by
    its place. It ends, leaves early and raises as ``run_bounded`` does.
    """
    retries = config.get("retries")
    places: dict[Future, int] = {}
    fetches: dict[Future, ConcurrentFuture[Any]] = {}
    to_do = enumerate(groups)
    copied = 0

    pack = Packer()

    def submit(work: Callable[..., Any], call: tuple[Any, ...], name: str, **options: Any) -> Future:
        packed, futures = pack(work, call)
        return client.submit(tried, code_asked_by(client), packed, *futures, key=name, **options)

    def submit_group(place: int, name: str, **where: Any) -> Future:
        head, calls = groups[place]
        options = IN_TURN | {"retries": retries} | where
        with cluster_errors(client):
            parts = [
                submit(function, call, f"{key}-{place}-{name}{part}", **options)
                for part, call in enumerate(calls)
            ]
            future = submit(combine, (*head, *parts), f"{key}-{place}-{name}".rstrip("-"), **options)
        places[future] = place
        # Only `combine` needs them: those that this client holds too would stay until the end of the run.
        for part_future in parts:
            part_future.release()
        return future

    newcomers = Newcomers(client)
    workers = Workers(client)

    def begun() -> bool:
        # What is to be combined is given to a worker once all its parts are there: it may be fetching them.
        given = set(chain(*answer_of(client, client.processing).values()))
        keys = [future.key for future in places]
        return not given.isdisjoint(keys) or watch.any_begun(client, keys)

    def look() -> None:
        newcomers.look()
        heartbeats.look()
        losses.look()
        lookout.look()
        copy_from(list(heartbeats.silent()))

    def copy_from(silent: list[str]) -> None:
        """Begin groups anew that silent workers have a part of: only those could go on with them."""
        nonlocal copied
        heard = [worker for worker in workers.threads() if worker not in silent] if silent else []
        if not heard:
            return
        stuck = {place_of(name) for name in _with(client, silent)} - {None}
        copies = Counter(places.values())
        for place in {place for place in places.values() if place in stuck and copies[place] == 1}:
            copied += 1
            completed.add(submit_group(place, f"copy{copied}-", workers=heard, allow_other_workers=True))

    def place_of(name: Hashable) -> int | None:
        """The place of the group that a task belongs to."""
        if not isinstance(name, str) or not name.startswith(f"{key}-"):
            return None
        return int(name.removeprefix(f"{key}-").partition("-")[0])

    def give_up_copies(place: int) -> None:
        """Cancel what else was submitted of a group whose result has come."""
        others = [other for other, same in places.items() if same == place]
        if not others:
            return
        for worker, names in answer_of(client, client.processing).items():
            if any(place_of(name) == place for name in names):
                left(worker, place)
        give_up(others)

    def give_up(given_up: list[Future]) -> None:
        for other in given_up:
            del places[other]
        cancel(client, given_up)

    with heartbeats_for(client, waiting) as heartbeats:
        try:
            first = [submit_group(place, "") for place, _ in islice(to_do, window)]
            completed = _completed_of(client, first)
            lookout = Lookout(client, waiting, begun=begun)
            losses = Losses(client, lost, key)
            drained = False
            while places and not completed.is_empty():
                if drain is not None and drain.requested:
                    if not drained:
                        drained = True
                        running = _running(
                            client, [one for one in workers.threads() if one not in heartbeats.silent()]
                        )
                        own: dict[int, float] = {}
                        for name, seconds in running.items():
                            if (place := place_of(name)) is not None:
                                own[place] = min(seconds, own.get(place, seconds))
                        kept = drain.nearly_there(own)
                        give_up(
                            [one for one, place in places.items() if place not in kept and not one.done()]
                        )
                        drain.say(len(set(places.values())))
                        continue
                    if not drain.seconds_left():
                        break
                newcomers.look()
                if not _is_ready(completed, drain):
                    look()
                    lookout.look_at_tasks()
                    continue
                future = next(completed)
                if future not in places:
                    continue  # the result of its copy has come
                with cluster_errors(client):
                    fetch = fetches.pop(future, None) or fetch_of(client, future)
                try:
                    result = result_of(future, retries, fetch, watch.LOOK_SECONDS)
                except ResultLateError:
                    fetches[future] = fetch
                    completed.add(future)
                    look()  # its worker may have been lost with it, and there may be no other
                    continue
                lookout.seen()
                place = places.pop(future)
                future.release()  # or it would be computed again if its worker is lost
                give_up_copies(place)
                yield place, result  # recorded when the next is asked for, as in `TasksUnderWay`
                if not drained and not _is_requested(drain):
                    for next_place, _ in islice(to_do, 1):
                        completed.add(submit_group(next_place, ""))
            if drain is not None and drain.requested:
                drain.end()
            _check_all_came(len(places) + sum(1 for _ in to_do), key)
            losses.look_back()
        finally:
            cancel(client, list(places))
            newcomers.close()


def _check_all_came(missing: int, key: str) -> None:
    # Whatever the cause: a product that lacks tiles, or a sum that lacks parts, looks like any other.
    if missing:
        raise ClusterError(f"the results of {key} came to an end with {missing} still to come; run it again")
