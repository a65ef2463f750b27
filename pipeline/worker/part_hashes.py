"""Hashes of the parts of A and B that a worker reads, for as long as a run lasts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from tilewright.pipeline.plan.told import Corners
from tilewright.pipeline.store.content import content_hash

SETTLED_NS = 2 * 10**9
"""How long ago a file must have changed for its next change to give it another time: the coarsest clocks of file
systems tick every two seconds."""

MOST_KNOWN = 100_000
"""Parts whose hashes are kept, at some 300 bytes each: of inputs in more parts, the others are hashed as often as they
are read."""

Status = tuple[int, int, int]
"""Of a file: its length, and the times of the last modification and of the last change of status, which nobody can set
back (`transfer/files.py`)."""


class PartHashes:
    """Hashes what is read. A part that is read again, from a file that nobody wrote to since it was hashed, is the same
    and not hashed anew: that would take as long as all hashing where every panel is read several times.

    clock: nanoseconds since the epoch. Callable from any thread.
    """

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._known: dict[tuple[str, Corners], tuple[Status, int]] = {}

    def status(self, path: str | None, corners: Corners) -> Status | None:
        """What tells the file of a part that will be read, for `of`; None where the part's hash is known, or would not
        be kept. path: None where it is read from no file, or needs others too. corners: its place in its array."""
        return None if path is None or (path, corners) in self._known else _status(path, self._clock())

    def of(self, path: str | None, corners: Corners, held: np.ndarray, before: Status | None) -> int:
        """The hash of a part that has been read. held: rows × columns. before: what `status` said before it was
        read."""
        if path is None:
            return content_hash(held)
        known, after = self._known.get((path, corners)), _status(path, self._clock())
        if known is not None and after == known[0]:
            return known[1]
        value = content_hash(held)
        self._known.pop((path, corners), None)
        if after is not None and after == before and len(self._known) < MOST_KNOWN:
            self._known[path, corners] = after, value
        return value


def _status(path: str, now: int) -> Status | None:
    """None where there is no such file, or it changed so lately that it may change again unseen."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    if max(facts.st_mtime_ns, facts.st_ctime_ns) > now - SETTLED_NS:
        return None
    return facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns
