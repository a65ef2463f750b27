"""Workers that come and go: waiting for them, counting their threads, and telling of those that are lost, join with
other code, or have no time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future as ConcurrentFuture
from concurrent.futures import wait as futures_wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from tilewright.pipeline import config
from tilewright.pipeline import pickling as pickle
from tilewright.pipeline.cluster import identity
from tilewright.pipeline.cluster.answers import answer_of, answers_of, begin, can_work, cluster_errors
from tilewright.pipeline.cluster.heartbeats import heartbeats_of, listened_to
from tilewright.pipeline.cluster.here.client import HereClient
from tilewright.pipeline.cluster.pool import out_of_the_pool
from tilewright.pipeline.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

Tell = Callable[[str], None]
"""Called with a message each time a run waits because all workers are gone, or busy with other tasks: how long so far,
and where."""

Lost = Callable[[str, int | None], None]
"""Called with the address of each worker that a run has lost, and with how many of the run's calls were under way there
and are computed again; None: that is not known."""

LOOK_SECONDS = 2.0
"""How often, at most, a run looks for workers that have come or gone, and for tasks that have none."""

WAIT_SECONDS = 10.0
"""How long a run waits for a worker, or for one that begins a task of it, before it says so; restarted workers are back
sooner."""

JOIN_LOOK_SECONDS = 0.2
"""Time between two looks for workers that have to join before work begins."""

ASKED_SECONDS = 0.5
"""How long a run that ends waits for workers that it has asked a question; they answer in milliseconds."""


def log_loss(worker: str, calls: int | None) -> None:
    """What is told of a loss by default."""
    logger.warning("worker %s was lost (calls under way: %s)", worker, "unknown" if calls is None else calls)


@contextmanager
def workers_held(client: Client, *, waiting: Tell = logger.warning) -> Iterator[None]:
    """`await_workers`, then give the cluster a task that does nothing until the end of the block.

    An adaptive cluster starts workers for tasks and ends those without: it would have none while work is planned, which
    is done for the workers that are there, and again none between two parts of the work. The task makes it start a
    worker, and keep it as long as that holds the task's result.

    A task of the same cluster that works like this leaves its worker's pool meanwhile, see `out_of_the_pool`. Who is
    silent, the scheduler or a worker, is named by ``waiting`` and given up later, see `heartbeats`.
    """
    with (
        out_of_the_pool(partial(answer_of, client, client.nthreads)),
        listened_to(client, waiting),
    ):
        name = f"workers-held-{time.time_ns():x}"
        with cluster_errors(client):
            task = client.submit(bool, key=name, pure=False)
        try:
            await_workers(client, waiting=waiting)
            yield
        finally:
            task.release()


def await_workers(
    client: Client,
    *,
    waiting: Tell = logger.warning,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until as many workers have joined as ``tilewright.workers`` asks for, ``tilewright.join-seconds`` at most.

    A batch system starts workers in parallel with the script that uses them, and after their scheduler. A
    `LocalCluster` has already waited for all of its workers, so one is enough. ``waiting`` is called after
    `WAIT_SECONDS`, and again when work goes on with fewer than were asked for; no result depends on their number.
    ``clock`` tells the seconds, and ``sleep`` lets some pass.

    Raises
    ------
    ClusterError
        None has joined in that time, or can join; or the scheduler does not answer.
    """
    wanted = 1 if _all_are_there(client) else config.get("workers")
    seconds = config.get("join-seconds")
    end = (
        f", or fails after {seconds:g} s" if wanted == 1 else f", or after {seconds:g} s with those that have"
    )
    lookout = Lookout(client, waiting, wanted, end, clock=clock)
    begun = clock()
    while (there := lookout.look()) < wanted:
        if clock() - begun >= seconds:
            break
        sleep(JOIN_LOOK_SECONDS)
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


def _all_are_there(client: Client) -> bool:
    """Whether all workers that a client's cluster will have had joined when it was opened."""
    if isinstance(client, HereClient):
        return True
    from distributed import LocalCluster

    return isinstance(client.cluster, LocalCluster)


def _why_none_comes_back(client: Client) -> str:
    """As `local.why_none_comes_back`."""
    from tilewright.pipeline.cluster.local import why_none_comes_back

    return why_none_comes_back(client)


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
    lookout = Lookout(client, waiting)
    threads: dict[str, int]
    while not (threads := answer_of(client, client.nthreads)):
        if not lookout.look():
            time.sleep(JOIN_LOOK_SECONDS)
    return threads


class Workers:
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
            self._threads = answer_of(self._client, self._client.nthreads) or self._threads
            self._looked = time.monotonic()
        return self._threads


class Lookout:
    """Says that a run waits because its cluster has no worker left, or fewer than wanted, or because none of them has
    begun a task of it: once, and again only if it was otherwise in between."""

    def __init__(
        self,
        client: Client,
        waiting: Tell,
        wanted: int = 1,
        end: str = "",
        begun: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        end: ends the message about workers; says how else the waiting may end, if it may.
        begun: whether any of the tasks that the run waits for has begun, if that can be told.
        clock: the seconds, since whenever.
        """
        self._client = client
        self._begun = begun
        self._waiting = waiting
        self._wanted = wanted
        self._end = end
        self._clock = clock
        self._alone_since: float | None = None
        self._told = False
        self._idle_since = self._clock()
        self._told_idle = False

    def seen(self) -> None:
        """A result came, maybe between two looks: there was a worker, and it had time for the run."""
        self._alone_since, self._told = None, False
        self._idle_since, self._told_idle = self._clock(), False

    def look(self) -> int:
        """How many workers there are now. Raises ClusterError where there is none and none can come."""
        there = len(answer_of(self._client, self._client.nthreads))
        if there >= self._wanted:
            self._alone_since, self._told = None, False
            return there
        if not there and (why := _why_none_comes_back(self._client)):
            raise ClusterError(f"the cluster has no workers any more: {why}")
        if not there and (heartbeats := heartbeats_of(self._client)) is not None:
            heartbeats.look()  # which raises where they were given up
        now = self._idle_since = self._clock()  # who has no workers does not wait for busy ones
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
        now = self._clock()
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


class Losses:
    """Tells of each worker that a run has lost."""

    def __init__(self, client: Client, lost: Lost, key: str) -> None:
        """key: what the names of the run's tasks begin with."""
        self._client, self._lost = client, lost
        self._own = f"{key}-"
        self._there = self._workers()

    def _workers(self) -> set[str]:
        return set(answer_of(self._client, self._client.nthreads))

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
        events = answer_of(self._client, partial(self._client.get_events, worker))
        told = [event for _, event in events if isinstance(event, dict)]
        ends = [event for event in told if event.get("action") == "remove-worker"]
        return ends[-1] if ends else {}

    def _calls_of(self, end: dict[str, Any]) -> int:
        keys = {*end["processing-tasks"], *end.get("lost-computed-tasks", ())}
        own = [key for key in keys if isinstance(key, str) and key.startswith(self._own)]
        # The place of its call comes next in a task's name; a call in parts has several tasks.
        return len({key.removeprefix(self._own).partition("-")[0] for key in own})


def any_begun(client: Client, keys: list[str]) -> bool:
    """Whether a worker runs one of these tasks now, or one that it needs; also where that cannot be told at once, as
    when a worker has just been lost."""
    try:
        return bool(client.sync(client.scheduler.call_stack, keys=keys, callback_timeout=LOOK_SECONDS))
    except Exception as error:  # of which the next look at the workers tells, if it is the scheduler's end
        logger.debug("what runs on the workers cannot be told: %s: %s", type(error).__name__, error)
        return True


class Newcomers:
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
                answers_of(can_work, asked.result())
            else:  # where the scheduler is gone, the run finds out by itself
                logger.debug("%s were not asked: %s: %s", self._known, type(error).__name__, error)
        if isinstance(self._client, HereClient) or time.monotonic() - self._looked <= LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        there = set(answer_of(self._client, self._client.nthreads))
        workers = sorted(there - self._known)
        self._known = there  # one that comes back may run something else by then
        if workers:
            with cluster_errors(self._client):
                self._asked = begin(self._client, self._ask(workers))

    async def _ask(self, workers: list[str]) -> dict[str, Any]:
        question = pickle.dumps((can_work, ()))
        options = {"workers": workers, "on_error": "return"}
        answered: dict[str, Any] = await self._client.run(
            identity.answer, identity.code_here(), question, **options
        )
        return answered

    def close(self) -> None:
        """Wait a moment for those that have been asked: Dask tells of answers that nobody is there for any more."""
        if self._asked is not None:
            futures_wait([self._asked], ASKED_SECONDS)
