"""How the simulator of CUDA waits for the threads of a block. Numba's asks each of them all the time whether it has
come to a barrier or to its end, and holds the interpreter's lock meanwhile: that took half of the time of tests with
barriers."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest
from numba.cuda.simulator import kernel


class ReportingThread(kernel.BlockThread):
    """It says when it comes to a barrier, and when it ends."""

    def run(self) -> None:
        super().run()
        self._manager.reports.put(self)

    def syncthreads(self) -> None:
        self._manager.reports.put(None)
        super().syncthreads()


class WaitingManager(kernel.BlockManager):
    """Numba's `BlockManager`, but for how it waits."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reports: queue.SimpleQueue[ReportingThread | None] = queue.SimpleQueue()
        """The thread that has ended; None for each that is at a barrier."""

    def run(self, grid_point: tuple[int, ...], *arguments: Any) -> None:
        threads = [
            ReportingThread(lambda: self._f(*arguments), self, grid_point, place, self._debug)
            for place in np.ndindex(*self._block_dim)
        ]
        for thread in threads:
            thread.start()
        running, at_barrier = set(threads), 0
        while running:
            ended = self.reports.get()
            if ended is None:
                at_barrier += 1
            else:
                running.remove(ended)
                if ended.exception:
                    for thread in running:
                        thread.abort = True
                        thread.syncthreads_event.set()
                    raise ended.exception[0].with_traceback(ended.exception[1])
            if at_barrier == len(running):  # those that have ended are waited for at none
                at_barrier = 0
                for thread in running:
                    thread.syncthreads_event.set()


def install(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kernel, "BlockManager", WaitingManager)
