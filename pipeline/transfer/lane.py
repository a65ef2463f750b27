"""Lanes between the host and a GPU, and what a process keeps of them, and of other memory, from one task to the next.

A lane is what one thread needs to move bytes: two blocks of pinned memory, one of which is filled or emptied while the
other is copied. Pinning takes 0.4 s a GiB, and allocating device memory makes the whole device wait, so both are kept.
Nothing of CUDA is imported until a lane is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from tilewright.kernels.deferred import cuda
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.gpu.transfer import download_stream, upload_stream

T = TypeVar("T")


def untimed_event() -> Any:
    """An event without timing, which would slow down recording; the simulator has only one kind."""
    return cuda.event() if SIMULATOR else cuda.event(timing=False)


class Lane:
    """Two blocks of pinned memory, taken in turns; used by one thread at a time."""

    def __init__(self, blocks: Sequence[np.ndarray]) -> None:
        self._blocks = blocks
        self._passed = untimed_event(), untimed_event()
        """For each block, the event that the device is done with it; one never recorded counts as passed."""
        self._turn = 0

    @cached_property
    def to_gpu(self) -> np.ndarray:
        """The lane as loops outside the interpreter take it, for uploads; all lanes share one stream a direction."""
        return self._words(upload_stream())

    @cached_property
    def from_gpu(self) -> np.ndarray:
        """The same for downloads."""
        return self._words(download_stream())

    def _words(self, stream: Any) -> np.ndarray:
        from tilewright.pipeline.transfer.lane_copies import lane_words

        return lane_words(self._blocks, self._passed, stream)

    def block(self) -> np.ndarray:
        """The block used longest ago, once the device is done with it."""
        self._turn = 1 - self._turn
        self._wait(self.passed)
        return self._blocks[self._turn]

    @property
    def passed(self) -> Any:
        """The event that the device is done with the last block, to be recorded by whoever used it."""
        return self._passed[self._turn]

    def sent(self, stream: Any) -> Any:
        """Mark the last block as in use until the stream passes this point; returns the event for that."""
        passed = self.passed
        passed.record(stream)
        return passed

    def settle(self) -> None:
        """Wait until the device is done with both blocks."""
        for passed in self._passed:
            self._wait(passed)

    def _wait(self, event: Any) -> None:
        event.synchronize()


class Spares(Generic[T]):
    """Things of one kind that no task of this process uses just now. Any thread may take one and put it back.

    pinned: whether they hold pinned memory, so that `free_pinned` frees them, and not `free_device_memory`; then they
    have a ``settle`` that waits until the device is done with them.
    """

    def __init__(self, make: Callable[..., T], *, pinned: bool = True) -> None:
        self._make, self.pinned = make, pinned
        self._kept: dict[tuple[Any, ...], list[T]] = {}
        """By what they are made from."""
        _of_this_process.append(self)

    def take(self, *of: Any) -> T:
        """One that is spare, or a new one. of: what it is made from."""
        kept = self._kept.setdefault(of, [])
        try:
            return kept.pop()
        except IndexError:
            pass
        return self._make(*of)

    def put(self, thing: T, *of: Any) -> None:
        self._kept.setdefault(of, []).append(thing)

    def kept(self, *of: Any) -> list[T]:
        return list(self._kept.get(of, ()))

    def free(self, keep: int = 0) -> int:
        """Free all beyond ``keep`` of each; returns how many."""
        freed = 0
        for kept in list(self._kept.values()):
            while len(kept) > keep:
                try:
                    thing: Any = kept.pop()
                except IndexError:  # a task has taken the last one
                    break
                if self.pinned:
                    thing.settle()
                freed += 1
        return freed


_of_this_process: list[Spares[Any]] = []


_forgetting: list[Callable[[], None]] = []


def forgotten_with_memory(forget: Callable[[], None]) -> None:
    """Have this called each time another job has spare memory of the device freed: what was found out of that memory
    holds no longer."""
    _forgetting.append(forget)


def free_pinned(own: Spares[Any], count: int) -> None:
    """Free all spare things with pinned memory but ``count`` of one's own: the plan of a product counts no others."""
    others = [spares for spares in _of_this_process if spares.pinned and spares is not own]
    if own.free(count) + sum(spares.free() for spares in others):
        cuda.current_context().memory_manager.deallocations.clear()  # Numba only queues what is to be freed


def free_device_memory() -> None:
    """Free the spare memory of the device, which a plan is made from; call it from a thread attached to the GPU."""
    for spares in _of_this_process:
        if not spares.pinned:
            spares.free()
    for forget in _forgetting:
        forget()
