"""When a cluster's scheduler, and each of its workers, was last heard from: who is silent is named, and given up later.

Dask's workers send their scheduler a heartbeat every half second to few seconds, and Dask restarts one whose heartbeats
have not come for its ``worker-ttl``, five to ten minutes. The client asks the scheduler for those times, which also
tells it whether the scheduler is there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

from tilewright.kernels.numbers import counted
from tilewright.pipeline import config
from tilewright.pipeline.cluster.here.client import HereClient
from tilewright.pipeline.cluster.here.worker import HereWorker
from tilewright.pipeline.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

ASK_SECONDS = 2.0
"""Time between two questions to the scheduler, and most that one look counts for: where this process itself stood still
it has heard nobody, and nobody was silent."""

SILENT_SECONDS = 10.0
"""How long nothing is heard of a worker, or of the scheduler, before that is said; half of a shorter deadline."""

BEATS = 5
"""As many heartbeats have to be missed at least. Dask has them further apart the more workers there are."""

RESTART_SECONDS = 10.0
"""How long the nanny of a worker that is given up may take to end it; it takes five seconds where the worker does not
answer. Behind that the scheduler does without both."""

END_SECONDS = 0.5
"""How long an answer is waited for that is on its way at the end; it takes milliseconds."""

SETTING = "tilewright.worker-deadline"
SCHEDULER_SETTING = "tilewright.scheduler-deadline"


class Heartbeats:
    """Listens on the client's event loop, which goes on while others wait; `look` tells and decides, in the thread that
    calls it."""

    def __init__(self, client: Client, tell: Callable[[str], None]) -> None:
        self.client = client
        self._where = client.scheduler.address
        self.tell = tell
        self._deadline: float = config.get("worker-deadline")
        self._patience = min(SILENT_SECONDS, self._deadline / 2)
        self._scheduler_deadline: float = config.get("scheduler-deadline")
        self._seen: dict[str, float] = {}
        """For each worker, the scheduler's time of its last heartbeat."""
        self._quiet: dict[str, float] = {}
        """For each worker, for how many seconds no heartbeat has come. Replaced as a whole, never changed."""
        self._unanswered = 0.0
        """For how many seconds the scheduler has not answered."""
        self._least = 0.0
        """Seconds that `BEATS` heartbeats take."""
        self._named: set[str] = set()
        self._scheduler_named = False
        self._looking = threading.RLock()
        """Of the threads of a run, one looks at a time, so that all is said, and done, once."""
        self._given_up: dict[str, Future[Any]] = {}
        """What became of each worker that was given up, once its nanny or the scheduler has said so."""
        self.told: list[Callable[[Mapping[str, Mapping[str, Any]]], None]] = []
        """Whom to tell what the scheduler says of its workers, on the client's event loop."""
        self.latest: Mapping[str, Mapping[str, Any]] = {}
        """What it said last."""
        self._end = asyncio.Event()
        loop = client.loop.asyncio_loop
        self._listening = asyncio.run_coroutine_threadsafe(self._listen(), loop)

    async def _listen(self) -> None:
        asking: asyncio.Future[Any] | None = None
        last = time.monotonic()
        try:
            while not self._end.is_set():
                if asking is None:
                    asking = asyncio.ensure_future(self._ask())
                await asyncio.wait([asking], timeout=ASK_SECONDS)
                now = time.monotonic()
                step, last = min(now - last, 2 * ASK_SECONDS), now
                if not asking.done() or asking.exception() is not None:
                    self._unanswered += step
                else:
                    self._unanswered = 0.0
                    self._hear(asking.result()["workers"], step)
                if asking.done():
                    asking = None
                    await self._pause(ASK_SECONDS)
        finally:
            if asking is not None:
                await asyncio.wait([asking], timeout=END_SECONDS)
                asking.cancel()

    async def _ask(self) -> Any:
        # Not the client's `scheduler_info`, which knows few of the workers.
        return await self.client.scheduler.identity(n_workers=-1)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._end.wait(), seconds)

    def _hear(self, workers: Mapping[str, Mapping[str, Any]], step: float) -> None:
        # The scheduler's clock may differ from ours: what counts is whether its times go on.
        seen = {address: worker["last_seen"] for address, worker in workers.items()}
        self._quiet = {
            address: self._quiet.get(address, 0.0) + step if self._seen.get(address) == beat else 0.0
            for address, beat in seen.items()
        }
        self._seen = seen
        from distributed.scheduler import heartbeat_interval

        self._least = BEATS * heartbeat_interval(len(seen))
        self.latest = workers
        for tell in tuple(self.told):
            tell(workers)

    def silent(self) -> dict[str, float]:
        """Workers that have not been heard for `SILENT_SECONDS`, and for how many seconds."""
        least = max(self._patience, self._least)
        return {address: seconds for address, seconds in self._quiet.items() if seconds >= least}

    def look(self) -> None:
        """Name who is silent, by ``tell``, and give up workers behind the deadline.

        Raises
        ------
        ClusterError
            The scheduler has not answered for as long as that; or no worker is left that was not given up.
        """
        with self._looking:
            self._look()

    def _look(self) -> None:
        tell = self.tell
        self._look_at_scheduler()
        silent = self.silent()
        for address in sorted(silent.keys() - self._named):
            tell(
                f"worker {address} has not been heard from for {silent[address]:.0f} s: it is stopped, cut off, or busy"
                " with what lets nothing else run; others take over what it has under way, at the latest when it is"
                f" given up, after {self._deadline:g} s ({SETTING})"
            )
        for address in sorted(self._named - silent.keys()):
            if address in self._quiet:
                tell(f"worker {address} is heard from again")
                self._given_up.pop(address, None)
        self._named = set(silent)
        limit = max(self._deadline, self._least)
        for address in sorted(silent):
            if silent[address] >= limit and address not in self._given_up:
                self._given_up[address] = self._begin(self._give_up(address))
                tell(
                    f"worker {address} is given up: it was not heard from for {silent[address]:.0f} s; its nanny is"
                    " asked to start it anew, and where there is none that answers the cluster goes on without it"
                )
        self._check_any_left(limit)

    def _look_at_scheduler(self) -> None:
        seconds, where, deadline = self._unanswered, self._where, self._scheduler_deadline
        if seconds >= deadline:
            raise ClusterError(
                f"the scheduler at {where} has not answered for {seconds:.0f} s ({SCHEDULER_SETTING}): it is stopped,"
                " overloaded or cut off; see what it does, or bring a cluster up, and run it again"
            )
        named = seconds >= min(SILENT_SECONDS, deadline / 2)
        if named and not self._scheduler_named:
            self.tell(
                f"the scheduler at {where} has not answered for {seconds:.0f} s; it goes on when it does, and ends when"
                f" it has not for {deadline:g} s ({SCHEDULER_SETTING})"
            )
        elif self._scheduler_named and not seconds:
            self.tell(f"the scheduler at {where} answers again")
        self._scheduler_named = named or (self._scheduler_named and seconds > 0)

    def _check_any_left(self, limit: float) -> None:
        given_up = self._given_up
        if not given_up or not all(ending.done() for ending in given_up.values()):
            return
        if self._quiet.keys() - given_up.keys():
            return
        if any(_was_restarted(address, ending) for address, ending in given_up.items()):
            return  # it is on its way, under another address
        raise ClusterError(
            f"no worker of the cluster at {self._where} is heard from any more: {counted(len(given_up), 'worker')}"
            f" given up behind {limit:g} s ({SETTING}), last {max(given_up)}; see whether the hosts are up and can be"
            " reached from the scheduler, start workers anew, and run it again"
        )

    async def _give_up(self, address: str) -> Any:
        # As Dask does behind its `worker-ttl`. Not `Client.restart_workers`, which wants a nanny for each.
        return await self.client.scheduler.restart_workers(
            workers=[address],
            timeout=RESTART_SECONDS,
            wait_for_workers=False,
            on_error="return",
            stimulus_id=f"tilewright-silent-{time.time()}",
        )

    def _begin(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self.client.loop.asyncio_loop)

    def close(self) -> None:
        """Listen no more."""
        try:
            self.client.loop.asyncio_loop.call_soon_threadsafe(self._end.set)
        except RuntimeError:  # the loop has ended, and with it all that ran there
            return
        wait([self._listening], 2 * END_SECONDS)
        self._listening.cancel()


class NobodyElse:
    """In place of `Heartbeats` where this process does the work: it hears itself."""

    def silent(self) -> dict[str, float]:
        return {}

    def look(self) -> None:
        pass


def _was_restarted(address: str, ending: Future[Any]) -> bool:
    """Whether a worker that was given up comes back."""
    if (error := ending.exception()) is not None:
        logger.debug("%s was not ended: %s: %s", address, type(error).__name__, error)
        return False
    return bool(ending.result().get(address) == "OK")


_current: ContextVar[Heartbeats | None] = ContextVar("heartbeats", default=None)
"""Of the cluster that this thread works with."""


@contextmanager
def listened_to(client: Client, tell: Callable[[str], None]) -> Iterator[Heartbeats | NobodyElse]:
    """Listen to the cluster of a client in this block, where all questions to it find that by `heartbeats_of`."""
    if isinstance(client, HereClient):
        yield NobodyElse()
        return
    heartbeats = Heartbeats(client, tell)
    before = _current.set(heartbeats)
    try:
        yield heartbeats
    finally:
        _current.reset(before)
        heartbeats.close()


def heartbeats_of(client: Client) -> Heartbeats | None:
    """What listens to a client's cluster, if anything does in this thread."""
    found = _current.get()
    return found if found is not None and found.client is client else None


@contextmanager
def heartbeats_for(client: Client, tell: Callable[[str], None]) -> Iterator[Heartbeats | NobodyElse]:
    """What listens to a client's cluster in this thread, or else in this block, and tells by ``tell`` in this block."""
    if isinstance(client, HereClient):
        yield NobodyElse()
        return
    if (found := heartbeats_of(client)) is not None:
        before, found.tell = found.tell, tell
        try:
            yield found
        finally:
            found.tell = before
        return
    own = Heartbeats(client, tell)
    try:
        yield own
    finally:
        own.close()


@contextmanager
def told_of(client: Client, tell: Callable[[Mapping[str, Mapping[str, Any]]], None]) -> Iterator[None]:
    """Tell, in this block, what the scheduler has said of its workers, and says whenever it is asked; by another
    thread. Nobody is told where nothing listens to the cluster in this thread."""
    if isinstance(client, HereClient):
        with _telling_of(cast(Any, client).worker, tell):
            yield
        return
    found = heartbeats_of(client)
    if found is not None:
        tell(found.latest)
        found.told.append(tell)
    try:
        yield
    finally:
        if found is not None:
            found.told.remove(tell)


@contextmanager
def _telling_of(
    worker: HereWorker, tell: Callable[[Mapping[str, Mapping[str, Any]]], None]
) -> Iterator[None]:
    """Tell of the one worker as often as a scheduler would be asked."""
    ended = threading.Event()

    def go_on() -> None:
        while not ended.wait(ASK_SECONDS):
            tell({worker.address: worker.told()})

    tell({worker.address: worker.told()})
    thread = threading.Thread(target=go_on, name="tilewright-told", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
