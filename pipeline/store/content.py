"""Hashes of what a region of an input holds: of its numbers, whatever chunks, codecs or place they are stored in; and
those that a worker keeps, of the parts that it has read, for as long as a run lasts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from tilewright.pipeline.plan.told import Corners, PanelContent
from tilewright.pipeline.store.arrays import write_unit
from tilewright.pipeline.store.region import Flattened, Section, StoredArray, base_of, unmasked

COPIED_NBYTES = 2**18
LONG_ROW_NBYTES = 2**15
"""Shorter rows that do not follow each other are copied in bands of this size and hashed there: a copy in a core's
second-level cache costs less than a call for each of them."""


SETTLED_NS = 2 * 10**9
"""How long ago a file must have changed for its next change to give it another time: the coarsest clocks of file
systems tick every two seconds."""

MOST_KNOWN = 100_000
"""Parts whose hashes are kept, at some 300 bytes each: of inputs in more parts, the others are hashed as often as they
are read."""

Status = tuple[int, int, int]
"""Of a file: its length, and the times of the last modification and of the last change of status, which nobody can set
back (`transfer/files.py`)."""


def content_hash(block: np.ndarray) -> int:
    """xxh3-64 of a matrix's numbers, row after row, as the processor has them.

    block: rows × columns, any dtype in native byte order, each row contiguous. Of megabytes the interpreter's lock is
    released meanwhile.
    """
    if block.flags.c_contiguous:
        return xxhash.xxh3_64_intdigest(_bytes_of(block))
    state = xxhash.xxh3_64()
    width = block.shape[1] * block.itemsize
    step = max(1, COPIED_NBYTES // width) if width < LONG_ROW_NBYTES else 1
    for row in range(0, block.shape[0], step):
        state.update(_bytes_of(np.ascontiguousarray(block[row : row + step])))
    return state.intdigest()


def _bytes_of(block: np.ndarray) -> memoryview:
    return block.reshape(-1).view(np.uint8).data


def panel_content(role: str, corners: Corners, parts: Sequence[tuple[Corners, int]]) -> PanelContent:
    """Of a panel, from its parts' corners in the array and their hashes, in whatever order they were read."""
    ordered = tuple(sorted(parts))
    words = np.array([(*where, value) for where, value in ordered], np.uint64)
    return PanelContent(role, corners, xxhash.xxh3_64_intdigest(words.tobytes()), ordered)


def chunks_text(array: StoredArray, corners: Corners) -> str:
    """The chunks of an array that a rectangle touches, or its shards, for a message.

    >>> import zarr
    >>> chunks_text(zarr.zeros((4, 4), chunks=(2, 2)), (0, 1, 0, 4))
    'chunks (0, 0) to (0, 1)'
    """
    if isinstance(array, Section):
        rows, columns = array.within((slice(*corners[:2]), slice(*corners[2:])))
        corners = rows.start, rows.stop, columns.start, columns.stop
    top, bottom, left, right = corners
    base, array = base_of(array), unmasked(array)
    unit = write_unit(base)
    if isinstance(array, Flattened):
        first, last = array.touched((slice(top, bottom), slice(left, right)), unit)
    else:
        first = top // unit[0], left // unit[1]
        last = (bottom - 1) // unit[0], (right - 1) // unit[1]
    kind = "shard" if base.shards is not None else "chunk"
    return f"{kind} {first}" if first == last else f"{kind}s {first} to {last}"


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
