"""Calls made by the threads of a pool, and none behind the caller's back: what no thread could be had for is never
made, and where one fails the others have ended before the caller hears of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

Result = TypeVar("Result")


def submitted(pool: Executor, call: Callable[[], Result]) -> Future[Result]:
    """What a thread of the pool will bring. Raises what submitting does where the system has no thread left; the pool
    keeps the call all the same, and would make it later, with buffers that are in use for something else by then."""
    done: Future[Result] = Future()
    try:
        pool.submit(_make, done, call)
    except BaseException:
        if done.cancel():
            raise
    return done


def _make(done: Future[Result], call: Callable[[], Result]) -> None:
    if done.set_running_or_notify_cancel():
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)
            del done, call  # the error holds this frame, and would hold itself and their buffers


def run_all(pool: Executor, calls: Iterable[Callable[[], Result]]) -> list[Result]:
    """Run the calls on the pool and wait for every one, also when one fails: none still writes afterwards."""
    futures: list[Future[Result]] = []
    try:
        for call in calls:
            futures.append(submitted(pool, call))
    finally:
        wait(futures)
    return [future.result() for future in futures]
