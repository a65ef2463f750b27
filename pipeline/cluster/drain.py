"""What is nearly done when a command is asked to end is finished first: nothing new begins, and the rest is given up.

Whoever handles a signal calls `endings.request_end`. Work that can be drained runs in a block of `draining`, tells its
`Drain` how long each piece took (`Drain.took`), and gives it to the function that hands out its tasks
(`submit.run_bounded` and the others, as ``drain``): that asks which tasks are running, waits for those that
`Drain.nearly_there` names, and calls `Drain.end`. What was asked for comes out of the block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from tilewright.kernels.numbers import counted
from tilewright.pipeline import config
from tilewright.pipeline.cluster.endings import asked_to_end

Key = TypeVar("Key", bound=Hashable)


class Drain:
    """One piece of work that can be drained."""

    def __init__(self, tell: Callable[[str], None], noun: str) -> None:
        """noun: what the work is done in, in the singular."""
        self._tell, self._noun = tell, noun
        self._grace: float = config.get("grace-seconds")
        self._took = 0.0
        self._count = 0
        self._ending: BaseException | None = None
        self._until = 0.0

    @property
    def requested(self) -> bool:
        """Whether nothing new is to begin."""
        return self._ending is not None

    def request(self, ending: BaseException) -> bool:
        """From now on nothing new begins, and `end` will raise ``ending``; False where that was said before. A signal's
        handler may call this."""
        if self.requested:
            return False
        self._until = time.monotonic() + self._grace
        self._ending = ending
        return True

    def took(self, seconds: float) -> None:
        """Note how long a piece took, from its beginning on its worker."""
        self._took += seconds
        self._count += 1

    def seconds_left(self) -> float:
        """How long what is nearly there may still take."""
        return max(0.0, self._until - time.monotonic())

    def nearly_there(self, running: Mapping[Key, float]) -> set[Key]:
        """Which of the pieces that have been running for so many seconds will be done in time, if they take as long as
        others did on average. None, where none is done yet: nobody knows how far these have come."""
        if not self._count:
            return set()
        mean, left = self._took / self._count, self.seconds_left()
        return {key for key, seconds in running.items() if mean - seconds <= left}

    def say(self, waited: int) -> None:
        """Say that it ends, and what for it waits."""
        if waited:
            self._tell(
                f"asked to end; nothing new begins, and {counted(waited, self._noun)} nearly done may take"
                f" {self.seconds_left():.0f} s more (tilewright.grace-seconds); a second signal ends it at once"
            )

    def end(self) -> NoReturn:
        """Raise what `request` was given."""
        if self._ending is None:
            raise RuntimeError("nobody has asked for an end")
        raise self._ending


@contextmanager
def draining(tell: Callable[[str], None], noun: str) -> Iterator[Drain]:
    """In this block, `endings.request_end` has the work that gets this `Drain` come to an end. What that was given is
    raised at the end of the block too, if all work was done by then."""
    drain = Drain(tell, noun)
    with asked_to_end(drain.request):
        yield drain
    if drain.requested:
        drain.end()


def running_seconds(dask_worker: Any) -> dict[Hashable, float]:
    """For how long each task on a worker has been running, those that have made room for others included; Dask fills in
    the worker."""
    now = time.time()
    tasks = dask_worker.state.tasks
    # Where work is on threads of this process, tasks begin and end meanwhile.
    begun = {key: tasks.get(key) for key in tuple(dask_worker.active_keys)}
    return {
        key: now - task.start_time
        for key, task in begun.items()
        if task is not None and task.start_time is not None
    }
