"""Parts of chunks from stores that are not local, by requests for ranges of bytes.

zarr-python asks for whole chunks, and for each inner chunk of a shard it asks for the shard's index again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import ByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.buffer import default_buffer_prototype

from tilewright.pipeline.store.chunks import (
    ChunkLayout,
    DamagedChunkError,
    decode_index,
    encoding_of,
    extent_in,
)
from tilewright.pipeline.store.waiting import answer_of, wait_for


class ByteRanges:
    """The stored bytes of an array's chunks. Threads that read a region together share one, with the indexes of its
    shards."""

    def __init__(self, array: zarr.Array[Any], layout: ChunkLayout) -> None:
        self.layout = layout
        self._array = array
        self._indexes: dict[str, Future[np.ndarray | None]] = {}

    def chunk(self, chunk: tuple[int, ...]) -> np.ndarray | None:
        """A chunk of a shard as it is stored, uint8; None: it was never written. Raises DamagedChunkError."""
        return self.part(chunk, 0, None)

    def part(self, chunk: tuple[int, ...], start: int, stop: int | None) -> np.ndarray | None:
        """The same for bytes ``start`` to ``stop`` of it; without an end only of a chunk in a shard."""
        key = self.layout.file_name(chunk)
        if self.layout.shards is not None:
            index = self._index(key)
            extent = None if index is None else extent_in(self.layout.shards, index, chunk)
            if extent is None:
                return None
            offset, nbytes = extent
            if not self.layout.codecs and nbytes != self.layout.chunk_nbytes:
                raise DamagedChunkError(
                    f"it has {nbytes} bytes and an uncompressed chunk has {self.layout.chunk_nbytes}"
                )
            start, stop = offset + start, offset + (nbytes if stop is None else stop)
        assert stop is not None
        found = self._get(key, RangeByteRequest(start, stop))
        if found is None:
            return None
        if len(found) > stop - start and len(found) >= stop:
            found = found[start:stop]  # a server that knows no ranges gives all it has
        if len(found) != stop - start:
            raise DamagedChunkError(f"of its bytes {start} to {stop} the storage gives {len(found)}")
        return found

    def _index(self, key: str) -> np.ndarray | None:
        """The index of a shard; None: it was never written.

        The first thread that needs it fetches it. What that fails with answers all who wait for it, and is then
        forgotten: who comes later asks again.
        """
        while True:
            ours: Future[np.ndarray | None] = Future()
            fetched = self._indexes.setdefault(key, ours)
            try:
                if fetched is ours:
                    return self._fetch_index(key, fetched)
                wait_for(fetched, self._called(key))
                error = fetched.exception()
                if error is None:
                    return fetched.result()
                # The thread that asked may have been given up alone, or been hit by Ctrl-C: then this one asks.
                if isinstance(error, Exception) and not isinstance(error, CancelledError):
                    raise error
            finally:
                error = None
                del ours, fetched  # an error holds this frame: avoid a cycle that keeps buffers alive

    def _fetch_index(self, key: str, fetched: Future[np.ndarray | None]) -> np.ndarray | None:
        """Fetch the index of a shard and give it, or the error, to those who wait for ``fetched``."""
        shards = self.layout.shards
        assert shards is not None
        try:
            nbytes = shards.index_nbytes
            where = RangeByteRequest(0, nbytes) if shards.index_first else SuffixByteRequest(nbytes)
            found = self._get(key, where)
            if found is not None:
                found = found[:nbytes] if shards.index_first else found[-nbytes:]
            index = None if found is None else decode_index(shards, found)
        except BaseException as error:
            del self._indexes[key]
            fetched.set_exception(error)
            del fetched  # as above
            raise
        fetched.set_result(index)
        return index

    def _get(self, key: str, where: ByteRequest) -> np.ndarray | None:
        path = self._array.store_path / key
        found = answer_of(path.get(default_buffer_prototype(), where), self._called(key))
        return None if found is None else found.as_numpy_array()

    def _called(self, key: str) -> str:
        """What the log calls a stored object."""
        return f"{self.layout.name}/{key}"


def byte_ranges_of(array: zarr.Array[Any], name: str) -> ByteRanges | None:
    """The byte ranges of an array's chunks; None where zarr-python reads as little."""
    layout = encoding_of(array, name, Path())
    if layout is None or (layout.codecs and layout.shards is None):
        return None
    return ByteRanges(array, layout)


def lines_of(
    layout: ChunkLayout, inside: Sequence[slice]
) -> tuple[slice, tuple[int, ...], tuple[slice, ...]]:
    """The shortest stretch of an uncompressed chunk, in whole lines, that holds a box of it; the shape of the array
    that this makes, whose axes are the last ones of the chunk as it is stored; and what of it is the box.

    A line is all of the chunk that has one index along an axis, and along all axes outside of that.
    """
    order = layout.order or range(len(layout.chunks))
    sides, wanted = [layout.chunks[axis] for axis in order], [inside[axis] for axis in order]
    start, line = 0, math.prod(sides)
    axis = 0
    for axis, part in enumerate(wanted):
        line //= sides[axis]
        start += part.start * line
        if part.stop - part.start != 1:
            break
    count = wanted[axis].stop - wanted[axis].start
    picked = (slice(0, count), *wanted[axis + 1 :])
    return slice(start, start + count * line), (count, *sides[axis + 1 :]), picked
