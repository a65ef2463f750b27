"""What is known of a stored object of C: a chunk, or where C is sharded a shard."""

from __future__ import annotations

from typing import NamedTuple


class StoredObject(NamedTuple):
    """One stored object, as it was written."""

    place: tuple[int, ...]
    """Its indices in the grid of such objects."""
    nbytes: int
    """As stored; 0 where zarr-python stores none, since it would hold only the fill value."""
    checksum: int
    """XXH3, 64 bits, of these bytes."""


NOTHING_CHECKSUM = 0x2D06800538D394C2
"""XXH3 of no bytes."""
