"""What a task asks of the worker that it runs on."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

import dask
import psutil
from dask.system import CPU_COUNT

PAUSE_SHARE = 0.8
"""Dask's default of ``distributed.worker.memory.pause``, which stands in its configuration once it is imported."""

ADDRESS = "inproc://"
"""How addresses of workers begin that are in the process of their scheduler."""

_numbers = itertools.count(1)
_of_thread = threading.local()
"""The worker whose task each thread runs."""


@cache
def memory_limit() -> int:
    """Bytes that processes of this host, or of this container, may take: ``distributed.system.MEMORY_LIMIT``, which
    this finds in the same places."""
    limit = psutil.virtual_memory().total
    if sys.platform == "linux":
        for path in (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.soft_limit_in_bytes",
            "/sys/fs/cgroup/memory.max",
            "/sys/fs/cgroup/memory.high",
            "/sys/fs/cgroup/memory.low",
        ):
            try:
                with open(path) as file:
                    found = int(file.read())
            except (OSError, ValueError):  # there is none, or it says "max"
                continue
            if found > 0:
                limit = min(limit, found)
    import resource

    hard = resource.getrlimit(resource.RLIMIT_RSS)[1]
    return hard if 0 < hard < limit else limit


def pause_share() -> float | bool | None:
    """The share of its memory from which on Dask gives a worker no more tasks; false, or none, where it always does."""
    share: float | bool | None = dask.config.get("distributed.worker.memory.pause", PAUSE_SHARE)
    return share


@dataclass
class TaskState:
    """A task as its worker knows it, by Dask's names."""

    state: Literal["ready", "cancelled"] = "ready"
    """Cancelled once and for good, by any thread: so nothing else is ever noted here."""
    start_time: float | None = None
    """When it began, in seconds since the epoch."""


@dataclass
class WorkerState:
    nthreads: int
    tasks: dict[Hashable, TaskState] = field(default_factory=dict)


class HereWorker:
    """A worker that is some threads of this process. The names are those of ``distributed.Worker``."""

    contact_address = None

    def __init__(
        self, threads: int, log_event: Callable[[str, Any], None], leave_place: Callable[[], None]
    ) -> None:
        self.address = f"{ADDRESS}127.0.0.1/{os.getpid()}/{next(_numbers)}"
        self.state = WorkerState(threads)
        self.status = "running"
        self.handlers: dict[str, Callable[..., Any]] = {}
        """Of questions of other workers, of which there are none."""
        self.metrics: dict[str, Callable[[Any], Any]] = {}
        """What it tells of itself beside its memory, by name."""
        self.log_event = log_event
        self.leave_place = leave_place
        """Lets another thread take tasks while this one waits in its own. Raises RuntimeError where the system has no
        thread left."""
        self.active_keys: set[Hashable] = set()
        limit = int(memory_limit() * min(1.0, threads / CPU_COUNT))
        self.memory_manager = SimpleNamespace(memory_limit=limit, memory_pause_fraction=pause_share())

    def told(self) -> dict[str, Any]:
        """What Dask's scheduler would say of it: when it was heard, the memory of its process, and its metrics."""
        metrics = {name: tell(self) for name, tell in self.metrics.items()}
        memory = psutil.Process().memory_info().rss
        return {"last_seen": time.time(), "metrics": {"memory": memory, **metrics}}

    def get_current_task(self) -> Hashable:
        """The key of the task that this thread runs."""
        key: Hashable = _of_thread.key
        return key

    def call(self, key: Hashable, function: Callable[[], Any]) -> Any:
        """Run a task on this thread, where `current_worker` gives this worker meanwhile."""
        state = self.state.tasks.get(key)
        if state is not None:
            state.start_time = time.time()
        _of_thread.worker, _of_thread.key = self, key
        self.active_keys.add(key)
        try:
            return function()
        finally:
            self.active_keys.discard(key)
            _of_thread.worker = _of_thread.key = None


def dask_is_there() -> bool:
    """Whether this process has imported ``distributed``."""
    try:
        return bool(sys.modules["distributed"])
    except KeyError:
        return False


def current_worker() -> Any:
    """The worker whose task this thread runs, of this process alone or of Dask. Raises ValueError outside of tasks."""
    if (worker := getattr(_of_thread, "worker", None)) is not None:
        return worker
    if not dask_is_there():
        raise ValueError("this thread runs no task")
    from distributed import get_worker

    return get_worker()


def tasks_at_once() -> int:
    """How many tasks the worker runs whose task this thread runs; 1 outside of tasks."""
    try:
        return int(current_worker().state.nthreads)
    except ValueError:
        return 1
