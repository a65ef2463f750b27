"""Hashes of what a region of an input holds: of its numbers, whatever chunks, codecs or place they are stored in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from tilewright.pipeline.plan.told import Corners, PanelContent
from tilewright.pipeline.store.arrays import write_unit
from tilewright.pipeline.store.region import Flattened, StoredArray, base_of, unmasked

COPIED_NBYTES = 2**18
LONG_ROW_NBYTES = 4096
"""Shorter rows that do not follow each other are copied in bands of this size and hashed there: a copy in a core's
second-level cache costs less than a call for each of them."""


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

    >>> chunks_text(zarr.zeros((4, 4), chunks=(2, 2)), (0, 1, 0, 4))
    'chunks (0, 0) to (0, 1)'
    """
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
