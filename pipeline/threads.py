"""Calls on a pool's threads, with two guarantees: a call for which no thread could be started is never made, and where
one call fails, the others have ended before the caller sees the error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

Result = TypeVar("Result")


def submitted(pool: Executor, call: Callable[[], Result]) -> Future[Result]:
    """The future of a call on the pool. Raises what submitting raises if the system has no thread left; the pool keeps
    such a call and would make it later, with buffers that are used for something else by then, so it is cancelled
    here."""
    done: Future[Result] = Future()
    try:
        pool.submit(_make, [(done, call)])
    except BaseException:
        if done.cancel():
            raise
    return done


def _make(work: list[tuple[Future[Result], Callable[[], Result]]]) -> None:
    done, call = work.pop()  # the pool's own frame, which an error holds too, has only the empty list then
    if done.set_running_or_notify_cancel():
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)
            del done, call  # the error holds this frame: avoid a cycle that keeps buffers alive


def run_all(pool: Executor, calls: Iterable[Callable[[], Result]]) -> list[Result]:
    """Run the calls on the pool and wait for every one, even if one fails: none still writes afterwards."""
    futures: list[Future[Result]] = []
    try:
        for call in calls:
            futures.append(submitted(pool, call))
    finally:
        wait(futures)
    return results_of(futures)


def results_of(futures: list[Future[Result]]) -> list[Result]:
    """The results of calls that have ended, in order; raises the error of the first that failed.

    The list is empty afterwards: an error holds the frames of those who wait for it, and must not be held by them.
    """
    results: list[Result] = []
    futures.reverse()
    try:
        while futures:
            results.append(futures.pop().result())
    finally:
        futures.clear()
    return results
