"""Waiting for what a store answers, for as long as anybody needs it.

A store that zarr-python reads may be a server, and a server may stop answering. So zarr-python's coroutines run on its
event loop, and the thread that waits for one looks, now and then, whether its work goes on. A long wait is logged.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

LOOK_SECONDS = 0.2
"""How often a thread that waits for a store looks whether its work goes on."""

LATE_SECONDS = 60.0
"""How long an answer takes before that is logged, once for all that are waited for: servers' libraries try again for a
while without a word."""

Check = Callable[[], None]
"""Raises CancelledError once nobody needs a thread's work any more."""

_of_thread = threading.local()


class _Patience:
    """Logs that answers are late, at most once in `LATE_SECONDS`, however many threads of this process wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: float | None = None

    def late(self, what: str, seconds: float) -> None:
        """``what`` has been asked for so long ago, and has not come."""
        with self._lock:
            now = time.monotonic()
            if self._told is not None and now - self._told < LATE_SECONDS:
                return
            self._told = now
        logger.warning("%s has not come for %.0f s: its storage does not answer; waiting on", what, seconds)


_patience = _Patience()


def read_while(check: Check) -> None:
    """From now on this thread waits for stores until ``check`` raises. To be called by each thread of a pool."""
    _of_thread.check = check


@contextmanager
def reading_while(check: Check) -> Iterator[None]:
    """As `read_while`, in this block."""
    before = getattr(_of_thread, "check", None)
    _of_thread.check = check
    try:
        yield
    finally:
        _of_thread.check = before


def answer_of(asking: Coroutine[Any, Any, Result], what: str) -> Result:
    """What a coroutine returns on zarr's event loop; raises what it raises. what: what it asks for, for the log.

    Raises what this thread's check raises, if it does: then the coroutine is cancelled first, and has ended. Until it
    has, it may write to the buffers that it was given.
    """
    check: Check | None = getattr(_of_thread, "check", None)
    try:
        if check is not None:
            check()
    except BaseException:
        asking.close()
        raise
    done: Future[Result] = Future()
    from zarr.core.sync import sync

    loop, task = sync(_begun(asking, done))
    try:
        wait_for(done, what)
        return done.result()
    except BaseException:
        if not done.done():
            loop.call_soon_threadsafe(task.cancel)
            wait([done])
        raise
    finally:
        del done, task  # an error holds this frame: avoid a cycle that keeps buffers alive


def wait_for(done: Future[Any], what: str) -> None:
    """Wait until a future is done, whatever comes of it. Raises what this thread's check raises."""
    check: Check | None = getattr(_of_thread, "check", None)
    begun = time.monotonic()
    while wait([done], LOOK_SECONDS).not_done:
        if check is not None:
            check()
        if (seconds := time.monotonic() - begun) >= LATE_SECONDS:
            _patience.late(what, seconds)


class Asked(Generic[Result]):
    """What a coroutine returns on zarr's event loop, asked for now and waited for later."""

    def __init__(self, asking: Coroutine[Any, Any, Result], what: str) -> None:
        """what: it asks for, for the log."""
        self._what, self._done = what, Future[Result]()
        from zarr.core.sync import sync

        self._loop, self._task = sync(_begun(asking, self._done))

    def result(self) -> Result:
        """What it returns, or raises; what this thread's check raises, if it does."""
        wait_for(self._done, self._what)
        return self._done.result()

    def cancel(self) -> None:
        """Nobody needs it any more."""
        if not self._done.done():
            self._loop.call_soon_threadsafe(self._task.cancel)


async def _begun(
    asking: Coroutine[Any, Any, Result], done: Future[Result]
) -> tuple[asyncio.AbstractEventLoop, asyncio.Task[Result]]:
    """Have the running loop set ``done`` by what a coroutine returns or raises."""
    task = asyncio.create_task(asking)
    task.add_done_callback(partial(_end, done))
    return asyncio.get_running_loop(), task


def _end(done: Future[Result], task: asyncio.Task[Result]) -> None:
    if task.cancelled():
        done.set_exception(CancelledError())
    elif (error := task.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())
