"""What hands out tasks to the threads of this process: a client, its futures, and the queue of those that are done.

Each name and meaning is that of ``distributed``, as far as `pipeline/cluster/` uses it, so that what watches, retries,
drains and cancels the tasks of a run is the same code for both.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import Future as ConcurrentFuture
from concurrent.futures import wait as futures_wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from inspect import isawaitable, signature
from types import SimpleNamespace
from typing import Any

from tilewright.pipeline.cluster.here.worker import HereWorker, TaskState
from tilewright.pipeline.errors import ClusterError

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
"""How long tasks that still run are waited for when a client is closed: they were told to give up what they do."""
INTERRUPTED_SECONDS = 5.0
"""How long behind Ctrl-C, or SIGTERM."""


class _Place(threading.local):
    """Whether this thread has left its place."""

    left = False


_place = _Place()


class HereFuture:
    """The result of a task, which is there or to come."""

    def __init__(self, client: HereClient, key: Hashable) -> None:
        self.client, self.key = client, key
        self.value: ConcurrentFuture[Any] = ConcurrentFuture()
        self.needs: set[HereFuture] = set()
        """Those whose results its task uses, until it has ended or was given up."""
        self.is_released = False

    @property
    def status(self) -> str:
        if not self.value.done():
            return "pending"
        if self.value.cancelled():
            return "cancelled"
        return "finished" if self.value.exception() is None else "error"

    def done(self) -> bool:
        return self.value.done()

    def result(self) -> Any:
        return self.value.result()

    def release(self) -> None:
        """Nobody here wants the result any more; whoever does keeps the future."""
        self.client._released(self)


class _Task:
    """A call, and what it still waits for."""

    def __init__(
        self, future: HereFuture, function: Callable[..., Any], arguments: tuple[Any, ...], retries: int
    ) -> None:
        self.future, self.function, self.arguments, self.retries = future, function, arguments, retries
        future.needs = {argument for argument in arguments if isinstance(argument, HereFuture)}
        self.left = len(future.needs)


class HereClient:
    """Runs tasks on ``threads`` threads, in the order in which they were submitted."""

    def __init__(self, threads: int) -> None:
        self.status = "running"
        self.cluster = None
        self._hearers: dict[str, Callable[[tuple[float, Any]], None]] = {}
        self.worker = HereWorker(threads, self._log_event, self._leave_place)
        self.scheduler = SimpleNamespace(address=self.worker.address, call_stack=self._begun)
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._queue: deque[_Task] = deque()
        self._needed: dict[HereFuture, int] = {}
        """How many tasks that have neither ended nor been given up use each future's result."""
        self._threads: list[threading.Thread] = []
        """Those that have not ended."""
        self._numbers = itertools.count()
        self._left = 0
        """Of these threads, how many have left their place to another."""
        self._answers = _Answers()

    def __enter__(self) -> HereClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)  # SIGTERM's is a kind of it
        self.close(INTERRUPTED_SECONDS if interrupted else CLOSE_SECONDS)

    def submit(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        key: Hashable,
        retries: int = 0,
        **where: Any,
    ) -> HereFuture:
        """``where``: of the only worker there is nothing to choose."""
        future = HereFuture(self, key)
        task = _Task(future, function, arguments, retries)
        with self._lock:
            if self.status == "running" and len(self._threads) - self._left < self.worker.state.nthreads:
                with _no_thread_told():
                    self._start_thread()
            self.worker.state.tasks[key] = TaskState()
            needs = list(future.needs)
            for need in needs:
                self._needed[need] = self._needed.get(need, 0) + 1
        if not needs:
            self._enqueue(task)
        for need in needs:
            need.value.add_done_callback(partial(self._one_less, task))
        return future

    def _start_thread(self) -> None:
        # Daemons: Python's end does not wait for one that does not give up.
        name = f"tilewright-task-{next(self._numbers)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _leave_place(self) -> None:
        """Have another thread take tasks in place of this one, which ends with the task that it runs."""
        with self._lock:
            if _place.left or self.status != "running":
                return
            self._start_thread()  # raises where the system has none: then this one stays
            self._left += 1
            _place.left = True

    def _one_less(self, task: _Task, _: object) -> None:
        with self._lock:
            task.left -= 1
            due = task.left == 0
        if due:
            self._enqueue(task)

    def _enqueue(self, task: _Task) -> None:
        with self._ready:
            if running := self.status == "running":
                self._queue.append(task)
                self._ready.notify()
        if not running:  # what it waited for has ended behind that
            self.cancel([task.future])

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._queue and self.status == "running":
                    self._ready.wait()
                if not self._queue:
                    return
                task = self._queue.popleft()
            self._run(task)
            del task  # with what it was given
            if _place.left:
                with self._lock:
                    self._threads.remove(threading.current_thread())
                    self._left -= 1
                return

    def _run(self, task: _Task) -> None:
        future = task.future
        try:
            if future.value.cancelled():
                return
            arguments = [
                argument.result() if isinstance(argument, HereFuture) else argument
                for argument in task.arguments
            ]
            call = partial(task.function, *arguments)
            del arguments
            for left in reversed(range(task.retries + 1)):
                try:
                    found = self.worker.call(future.key, call)
                    break
                except Exception:
                    if not left or future.value.cancelled() or self.status != "running":
                        raise
            del call
            with suppress(Exception):  # it was cancelled meanwhile
                future.value.set_result(found)
        except BaseException as error:
            with suppress(Exception):
                future.value.set_exception(error)
        finally:
            with self._lock:
                self.worker.state.tasks.pop(future.key, None)
                self._free_needs(future)
            task.arguments = ()

    def _free_needs(self, future: HereFuture) -> list[HereFuture]:
        """Note that its task uses no result any more, and return those that no other task uses either. The lock is
        held."""
        free = []
        for need in future.needs:
            self._needed[need] -= 1
            if not self._needed[need]:
                del self._needed[need]
                free.append(need)
        future.needs = set()
        return free

    def cancel(self, futures: Iterable[HereFuture], force: bool = False) -> None:
        """What has not begun never does; what runs is told that nobody needs it (`reduce.end_if_given_up`). So with
        what was released, and only these would have used."""
        for future in futures:
            with self._lock:
                state = self.worker.state.tasks.get(future.key)
                if state is not None:
                    state.state = "cancelled"
                free = self._free_needs(future)
            future.value.cancel()
            self.cancel(need for need in free if need.is_released and not need.done())

    def _released(self, future: HereFuture) -> None:
        with self._lock:
            future.is_released = True
            needed = future in self._needed
        if not needed and not future.done():
            self.cancel([future])

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        workers: Sequence[str] | None = None,
        on_error: str = "raise",
        **named: Any,
    ) -> dict[str, Any]:
        """Call it now, beside all tasks. ``on_error``: ``raise``, or ``return`` what it raises as the answer, or
        ``ignore`` that, and give none."""
        if workers is not None and self.worker.address not in workers:
            return {}
        if "dask_worker" in signature(function).parameters:
            named["dask_worker"] = self.worker
        try:
            found = self._answers.ask(function, arguments, named)
        except Exception as error:
            if on_error == "raise":
                raise
            return {} if on_error == "ignore" else {self.worker.address: error}
        return {self.worker.address: found}

    def sync(
        self, function: Callable[..., Any], *arguments: Any, callback_timeout: object = None, **named: Any
    ) -> Any:
        return function(*arguments, **named)

    def scatter(self, values: Iterable[Any], **how: Any) -> list[HereFuture]:
        """The values are where tasks need them."""
        futures = []
        for value in values:
            future = HereFuture(self, f"value-{id(value):x}-{time.time_ns():x}")
            future.value.set_result(value)
            futures.append(future)
        return futures

    def nthreads(self) -> dict[str, int]:
        return {self.worker.address: self.worker.state.nthreads}

    def processing(self) -> dict[str, tuple[Hashable, ...]]:
        with self._lock:
            return {self.worker.address: tuple(self.worker.state.tasks)}

    def has_what(self, workers: object = None) -> dict[str, tuple[Hashable, ...]]:
        return {self.worker.address: ()}

    def get_events(self, topic: str) -> tuple[Any, ...]:
        return ()

    def subscribe_topic(self, topic: str, hear: Callable[[tuple[float, Any]], None]) -> None:
        self._hearers[topic] = hear

    def unsubscribe_topic(self, topic: str) -> None:
        self._hearers.pop(topic, None)

    def _log_event(self, topic: str, message: Any) -> None:
        if (hear := self._hearers.get(topic)) is not None:
            hear((time.time(), message))

    def _begun(self, keys: Collection[Hashable]) -> list[Hashable]:
        return [key for key in keys if key in self.worker.active_keys]

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Take nothing more, tell tasks that run that nobody needs them, and wait for them a while."""
        with self._ready:
            self.status = self.worker.status = "closed"
            left, self._queue = self._queue, deque()
            for state in self.worker.state.tasks.values():
                state.state = "cancelled"
            self._ready.notify_all()
        self.cancel([task.future for task in left])
        deadline = time.monotonic() + seconds
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._answers.close()
        if seconds == CLOSE_SECONDS and any(thread.is_alive() for thread in self._threads):
            logger.warning("a task that was given up did not end in time; it ends with this process")


class Completed:
    """Futures as they are done: what ``distributed.as_completed`` is of its own."""

    def __init__(self, futures: Iterable[HereFuture] = ()) -> None:
        self.thread_condition = threading.Condition()
        self._done: deque[HereFuture] = deque()
        self._left = 0
        for future in futures:
            self.add(future)

    def add(self, future: HereFuture) -> None:
        with self.thread_condition:
            self._left += 1
        future.value.add_done_callback(partial(self._put, future))

    def _put(self, future: HereFuture, _: object) -> None:
        with self.thread_condition:
            self._done.append(future)
            self.thread_condition.notify_all()

    def has_ready(self) -> bool:
        return bool(self._done)

    def is_empty(self) -> bool:
        return not self._left

    def next_batch(self) -> list[HereFuture]:
        with self.thread_condition:
            batch = list(self._done)
            self._done.clear()
            self._left -= len(batch)
        return batch

    def __iter__(self) -> Iterator[HereFuture]:
        return self

    def __next__(self) -> HereFuture:
        with self.thread_condition:
            if not self._left:
                raise StopIteration
            while not self._done:
                self.thread_condition.wait()
            self._left -= 1
            return self._done.popleft()


@contextmanager
def _no_thread_told() -> Iterator[None]:
    """ClusterError where the system has no thread for this block."""
    try:
        yield
    except RuntimeError as error:
        raise ClusterError(
            f"no thread of this process could be started for its work ({error}); allow more threads (ulimit -u) or more"
            " memory (ulimit -v), or set threads_per_worker, in a profile, to fewer"
        ) from error


class _Answers:
    """The thread that answers questions, with an event loop of its own, as a worker of Dask's has: once a question has
    attached it to a GPU, all later ones find it so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def ask(self, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What the function gives, or what it gives to await."""
        answer: ConcurrentFuture[Any] = ConcurrentFuture()

        async def call() -> None:
            try:
                found = function(*arguments, **named)
                answer.set_result(await found if isawaitable(found) else found)
            except BaseException as error:
                answer.set_exception(error)

        tasks: list[asyncio.Task[None]] = []  # the loop itself keeps none alive
        loop = self._running()
        loop.call_soon_threadsafe(lambda: tasks.append(loop.create_task(call())), context=copy_context())
        futures_wait([answer])
        try:
            return answer.result()
        except CancelledError as error:
            raise RuntimeError("the question was cancelled") from error

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(
                    target=self._run, args=(loop,), name="tilewright-answers", daemon=True
                )
                try:
                    with _no_thread_told():
                        thread.start()
                except ClusterError:
                    loop.close()
                    raise
                self._loop = loop
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    def close(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
