"""Loading regions of arrays into panels: the calls that do it, made by the threads of a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from tilewright.pipeline.threads import results_of, run_all, submitted
from tilewright.pipeline.worker.peers import tell


@dataclass(frozen=True)
class Move:
    """What one thread did for a panel or a tile: seconds between store and host, and between host and device."""

    store_seconds: float
    device_seconds: float


@dataclass(frozen=True)
class Loading:
    """How a region is loaded: calls for many threads at once, then calls for what those could not load."""

    calls: list[Callable[[], Move]]
    rest: Callable[[], list[Callable[[], Move]]] = list
    settle: Callable[[], None] = lambda: None
    """Waits until everything that the calls sent is in place; to be called once they have returned."""
    there: Future[bool] | None = None
    """If others may wait for the region: set to whether the calls loaded everything, as soon as they have ended."""


class LoadsUnderWay:
    """Loads queued on a pool."""

    def __init__(self, pool: ThreadPoolExecutor, loadings: Sequence[Loading]) -> None:
        self._pool, self._loadings = pool, loadings
        self._futures: list[Future[Move]] = []
        self._told: list[Future[None]] = []
        try:
            for loading in loadings:
                first = len(self._futures)
                for call in loading.calls:
                    self._futures.append(submitted(pool, call))
                if loading.there is not None:
                    # Queued behind its calls, so that those it waits for have been started.
                    calls = self._futures[first:]
                    self._told.append(submitted(pool, partial(self._tell, loading, loading.there, calls)))
        except BaseException:
            self._end()  # the buffers are about to be reused
            raise

    @staticmethod
    def _tell(loading: Loading, there: Future[bool], calls: Sequence[Future[Move]]) -> None:
        try:
            wait(calls)
            good = not any(call.exception() for call in calls) and not loading.rest()
            loading.settle()
        except BaseException:
            good = False
        tell(there, good)

    def finish(self) -> list[Move]:
        """Wait until everything is loaded; after an error, until nothing is written to the buffers any more.

        Raises what reading raised.
        """
        try:
            wait(self._futures)
            wait(self._told)
            moves = results_of(self._futures)
            return moves + run_all(
                self._pool, [call for loading in self._loadings for call in loading.rest()]
            )
        finally:
            self._end()

    def _end(self) -> None:
        """Wait until none of the loads writes to its buffer any more, even if waiting for one of them raises."""
        wait(self._futures)
        wait(self._told)
        with ExitStack() as settling:  # called last to first: the first one's error is raised
            for loading in self._loadings:
                settling.callback(loading.settle)


def load_all(pool: ThreadPoolExecutor, loadings: Sequence[Loading]) -> list[Move]:
    """Load all of them and wait. Raises what reading raised."""
    return LoadsUnderWay(pool, loadings).finish()
