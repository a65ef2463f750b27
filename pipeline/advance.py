"""How far a task has come with what it reads, told to whoever waits for it: one large file may take hours.

Whoever reads stored bytes says so (`advanced`), without knowing for whom; the task that has them read is told
(`watching`), and tells its client (`reduce.teller`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

TELL_SECONDS = 1.0
"""The least time between two messages of a task."""

_lock = threading.Lock()
_watched: dict[str, list[Callable[[int], None]]] = {}
"""By paths that are read."""


def advanced(path: str, nbytes: int) -> None:
    """So many further bytes of a file were read."""
    for add in _watched.get(path, ()):
        add(nbytes)


def advanced_to(path: str) -> Callable[[int], None]:
    """A function that says up to which place a file was read."""
    done = 0

    def to(stop: int) -> None:
        nonlocal done
        if stop > done:
            advanced(path, stop - done)
            done = stop

    return to


@contextmanager
def watching(
    lengths: Mapping[str, int],
    tell: Callable[[int], None] | None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """In this block ``tell`` is called now and then, by any thread, with how many bytes of some files were read; of
    what is read twice, at most their lengths. lengths: in bytes, by paths. Nobody is told where ``tell`` is None."""
    if tell is None:
        yield
        return
    most, told, done, lock = sum(lengths.values()), clock(), 0, threading.Lock()

    def add(nbytes: int) -> None:
        nonlocal told, done
        with lock:
            done = min(most, done + nbytes)
            now = clock()
            if now - told < TELL_SECONDS:
                return
            told = now
        tell(done)

    with _lock:
        for path in lengths:
            _watched[path] = [*_watched.get(path, ()), add]
    try:
        yield
    finally:
        with _lock:
            for path in lengths:
                if others := [each for each in _watched[path] if each is not add]:
                    _watched[path] = others
                else:
                    del _watched[path]
