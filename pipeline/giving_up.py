"""Waiting for what a store answers, for as long as anybody needs it.

A store that zarr-python reads may be a server, and a server may stop answering. So zarr-python's coroutines run on its
event loop, and the thread that waits for one looks, now and then, whether its work goes on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from zarr.core.sync import sync

Result = TypeVar("Result")

LOOK_SECONDS = 0.2
"""How often a thread that waits for a store looks whether its work goes on."""

Check = Callable[[], None]
"""Raises CancelledError once nobody needs a thread's work any more."""

_of_thread = threading.local()


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


def answer_of(asking: Coroutine[Any, Any, Result]) -> Result:
    """What a coroutine returns on zarr's event loop; raises what it raises.

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
    loop, task = sync(_begun(asking, done))
    try:
        while wait([done], LOOK_SECONDS).not_done:
            if check is not None:
                check()
        return done.result()
    except BaseException:
        if not done.done():
            loop.call_soon_threadsafe(task.cancel)
            wait([done])
        raise
    finally:
        del done, task  # an error holds this frame: avoid a cycle that keeps buffers alive


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
