"""A process's threads: calls on pools of them, the memory that each keeps, and the frames that errors keep.

A call for which no thread could be started is never made, and where one call fails, the others have ended before the
caller sees the error. Memory is kept from one task to the next, since taking it anew costs as much as filling it. A
traceback holds the frames that its error went through, and these every local variable.
"""

from __future__ import annotations

import inspect
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from typing import TypeVar

import numpy as np

Result = TypeVar("Result")


def submitted(pool: Executor, call: Callable[[], Result]) -> Future[Result]:
    """The future of a call on the pool. Raises what submitting raises if the system has no thread left; the pool keeps
    such a call and would make it later, with buffers that are used for something else by then, so it is cancelled
    here."""
    done: Future[Result] = Future()
    try:
        pool.submit(_call, [(done, call)])
    except BaseException:
        if done.cancel():
            raise
    return done


def _call(work: list[tuple[Future[Result], Callable[[], Result]]]) -> None:
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


class _Buffers:
    """What one thread keeps."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, bool], np.ndarray] = {}
        """By name and by whether they are pinned."""


_of_this_thread = threading.local()
_of_all_threads: weakref.WeakSet[_Buffers] = weakref.WeakSet()
_lock = threading.Lock()


def thread_buffer(name: str, nbytes: int, *, pinned: bool) -> np.ndarray:
    """``nbytes`` of memory, uint8, kept by this thread under ``name`` and reused by its next task, until
    `free_thread_buffers`.

    ``pinned`` takes host memory that a GPU copies from at full speed. The contents are undefined.
    """
    key = (name, pinned)
    buffers = _buffers_here().buffers
    buffer = buffers.get(key)
    if buffer is None or len(buffer) < nbytes:
        buffer = None
        buffers.pop(key, None)  # the smaller one is freed before the larger one is taken
        if pinned:
            from numba import cuda

            buffer = cuda.pinned_array(nbytes, np.uint8)
        else:
            buffer = np.empty(nbytes, np.uint8)
        buffers[key] = buffer
    return buffer[:nbytes]


def free_thread_buffers() -> None:
    """Free what all threads of this process keep; what a task uses is freed when it lets go of it.

    Where some of it is pinned, call it from a thread that is attached to the GPU.
    """
    with _lock:
        for kept in _of_all_threads:
            kept.buffers.clear()


def _buffers_here() -> _Buffers:
    kept: _Buffers | None = getattr(_of_this_thread, "kept", None)
    if kept is None:
        kept = _of_this_thread.kept = _Buffers()
        with _lock:
            _of_all_threads.add(kept)
    return kept


SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of code whose frames may wait to go on; clearing such a frame would end it."""


def clear_frames(error: BaseException) -> None:
    """Drop the local variables of an error's frames that have ended, and of the errors it came from.

    The traceback still names files and lines, so that logs say where the error came from.
    """
    errors: list[BaseException | None] = [error]
    seen: set[int] = set()
    while errors:
        one = errors.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if not frame.f_code.co_flags & SUSPENDABLE:
                with suppress(RuntimeError):  # it still runs
                    frame.clear()
        errors += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            errors += one.exceptions
