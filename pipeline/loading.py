"""Regions on their way to their places: the calls that bring them, and a pool's threads that make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from tilewright.pipeline.peers import tell
from tilewright.pipeline.threads import run_all, submitted


@dataclass(frozen=True)
class Move:
    """What one thread did for a panel or a tile: seconds between store and host, and between host and device."""

    store_seconds: float
    device_seconds: float


@dataclass(frozen=True)
class Loading:
    """What brings a region to its place: calls for many threads at once, and behind them calls for what they left."""

    calls: list[Callable[[], Move]]
    rest: Callable[[], list[Callable[[], Move]]] = list
    settle: Callable[[], None] = lambda: None
    """Waits until everything that the calls sent is in its place; to be called once they have returned."""
    there: Future[bool] | None = None
    """To be told whether the calls have brought everything, as soon as they have, where somebody may wait for it."""


class LoadsUnderWay:
    """Several loadings that a pool's threads have begun, or will once they have done what was given to them before."""

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
                    # Behind its calls in the pool's queue, so that what it waits for has been begun.
                    calls = self._futures[first:]
                    self._told.append(submitted(pool, partial(self._tell, loading, loading.there, calls)))
        except BaseException:
            self._end()  # the places go to other panels
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
        """Wait until everything is in its place, or, after an error too, nothing is on its way there any more.

        Raises what reading raised.
        """
        try:
            wait(self._futures)
            wait(self._told)
            moves = [future.result() for future in self._futures]
            return moves + run_all(
                self._pool, [call for loading in self._loadings for call in loading.rest()]
            )
        finally:
            self._end()

    def _end(self) -> None:
        """Wait until nothing is on its way any more, of any of them, whatever waiting for another one raises."""
        wait(self._futures)
        wait(self._told)
        with ExitStack() as settling:  # from the last to the first, whose error is the one that is raised
            for loading in self._loadings:
                settling.callback(loading.settle)


def load_all(pool: ThreadPoolExecutor, loadings: Sequence[Loading]) -> list[Move]:
    """Bring all of them to their places. Raises what reading raised."""
    return LoadsUnderWay(pool, loadings).finish()
