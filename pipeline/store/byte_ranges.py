"""Chunks from stores that are not local, and parts of them, in few requests.

zarr-python asks for whole chunks, one at a time, and for each inner chunk of a shard it asks for the shard's index
again. A request costs a server's latency, and on most servers money. So the chunks of a shard are read together: by one
request for all of the shard, where it is small and most of it is wanted, else by one for its index, and one for each
stretch of it in which wanted chunks lie next to each other, or nearly so.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import zarr
from zarr.abc.buffer import Buffer
from zarr.abc.store import ByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.buffer import default_buffer_prototype

from tilewright.pipeline.store.chunks import (
    ChunkLayout,
    DamagedChunkError,
    Extent,
    decode_index,
    encoding_of,
    extent_in,
)
from tilewright.pipeline.store.waiting import answer_of, wait_for

JOINED_NBYTES = 8 * 2**20
"""About the most that is read of a shard by one thread at once, as decoded: enough for a request's latency to matter
little, and so that threads hold no more than they would of common chunks."""

REQUEST_NBYTES = 2**20
"""Bytes whose transfer costs about as much as another request: 20 ms on a connection of 50 MB/s. What lies between two
stretches is read with them if it is no more."""

Chunk: TypeAlias = "tuple[int, ...]"
Wanted: TypeAlias = "tuple[int, int] | None"
"""The first and the last byte but one that are wanted of a plain chunk; None: all of it."""


class ByteRanges:
    """The stored bytes of an array's chunks. Threads that read a region together share one, with the indexes of its
    shards."""

    def __init__(self, array: zarr.Array[Any], layout: ChunkLayout) -> None:
        self.layout = layout
        self._array = array
        self._indexes: dict[str, Future[np.ndarray | None]] = {}

    @property
    def block(self) -> tuple[int, ...]:
        """Sides of what is read at once: whole chunks of one shard, as many as `block_of` says."""
        return block_of(self.layout)

    def read(self, wanted: dict[Chunk, Wanted]) -> tuple[dict[Chunk, np.ndarray | None], bool]:
        """What is wanted of some chunks, as it is stored, uint8; None: the chunk was never written. And whether all
        objects that they would lie in are there.

        Raises DamagedChunkError for bytes that are no valid chunk, or fewer than there should be.
        """
        by_object: dict[str, dict[Chunk, Wanted]] = {}
        for chunk, part in wanted.items():
            by_object.setdefault(self.layout.file_name(chunk), {})[chunk] = part
        found: dict[Chunk, np.ndarray | None] = {}
        there = True
        for key, parts in by_object.items():
            of_object = (
                self._of_chunk(key, parts) if self.layout.shards is None else self._of_shard(key, parts)
            )
            there = there and of_object is not None
            found |= dict.fromkeys(parts) if of_object is None else of_object
        return found, there

    def _of_chunk(self, key: str, wanted: dict[Chunk, Wanted]) -> dict[Chunk, np.ndarray] | None:
        """The same for a chunk that is an object of its own; None: there is none."""
        ((chunk, part),) = wanted.items()
        if part is None or part == (0, self.layout.chunk_nbytes):
            (found,) = self._get(key, [None])
        else:
            (found,) = self._get(key, [RangeByteRequest(*part)])
        if found is None or part is None:
            return None if found is None else {chunk: found}
        return {chunk: _cut(found, part, Stretch(*part))}

    def _of_shard(self, key: str, wanted: dict[Chunk, Wanted]) -> dict[Chunk, np.ndarray | None] | None:
        """The same for chunks of one shard."""
        shards = self.layout.shards
        assert shards is not None
        whole: np.ndarray | None = None
        if self._wants_all(wanted):
            (whole,) = self._get(key, [None])
            index = None if whole is None else self._index_in(whole)
        else:
            index = self._index(key)
        if index is None:
            return None
        extents: dict[Chunk, Extent] = {}
        for chunk, part in wanted.items():
            extent = extent_in(shards, index, chunk)
            if extent is None:
                continue
            offset, nbytes = extent
            if not self.layout.codecs and nbytes != self.layout.chunk_nbytes:
                raise DamagedChunkError(
                    f"it has {nbytes} bytes and an uncompressed chunk has {self.layout.chunk_nbytes}"
                )
            extents[chunk] = extent if part is None else (offset + part[0], part[1] - part[0])
        found: dict[Chunk, np.ndarray | None] = dict.fromkeys(wanted)
        if whole is not None:
            for chunk, (offset, nbytes) in extents.items():
                found[chunk] = _cut(whole, (offset, offset + nbytes), Stretch(0, len(whole)))
            return found
        stretches = joined(list(extents.values()))
        answers = self._get(key, [RangeByteRequest(one.start, one.stop) for one in stretches])
        for chunk, (offset, nbytes) in extents.items():
            place = next(
                place
                for place, one in enumerate(stretches)
                if one.start <= offset and offset + nbytes <= one.stop
            )
            answer = answers[place]
            if answer is not None:  # else the shard was removed since its index was read
                found[chunk] = _cut(answer, (offset, offset + nbytes), stretches[place])
        return found

    def _wants_all(self, wanted: dict[Chunk, Wanted]) -> bool:
        """Whether a shard is read as a whole: where that takes no longer than its index and what is wanted."""
        shards = self.layout.shards
        assert shards is not None
        each = self.layout.chunk_nbytes
        nbytes = math.prod(shards.counts) * each
        needed = sum(each if part is None else part[1] - part[0] for part in wanted.values())
        return nbytes <= JOINED_NBYTES and nbytes - needed <= REQUEST_NBYTES

    def _index_in(self, shard: np.ndarray) -> np.ndarray:
        """The index of a whole shard, from its bytes."""
        shards = self.layout.shards
        assert shards is not None
        nbytes = shards.index_nbytes
        if len(shard) < nbytes:
            raise DamagedChunkError(f"the shard has {len(shard)} bytes and its index alone {nbytes}")
        return decode_index(shards, shard[:nbytes] if shards.index_first else shard[-nbytes:])

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
            (found,) = self._get(key, [where])
            index = None if found is None else self._index_in(found)
        except BaseException as error:
            del self._indexes[key]
            fetched.set_exception(error)
            del fetched  # as above
            raise
        fetched.set_result(index)
        return index

    def _get(self, key: str, wanted: Sequence[ByteRequest | None]) -> list[np.ndarray | None]:
        """Stretches of an object, asked for at once; None for each of an object that is not there."""
        path = self._array.store_path / key

        async def asked() -> list[Buffer | None]:
            prototype = default_buffer_prototype()
            if len(wanted) == 1:
                return [await path.get(prototype, wanted[0])]
            return list(await asyncio.gather(*(path.get(prototype, where) for where in wanted)))

        found = answer_of(asked(), self._called(key)) if wanted else []
        return [None if one is None else one.as_numpy_array() for one in found]

    def _called(self, key: str) -> str:
        """What the log calls a stored object."""
        return f"{self.layout.name}/{key}"


def _cut(data: np.ndarray, part: tuple[int, int], asked: Stretch) -> np.ndarray:
    """Bytes of an object, by their places in it, from the answer to a request. Raises DamagedChunkError where they are
    not all there."""
    start, stop = part
    more = len(data) > asked.stop - asked.start and len(data) >= stop
    first = 0 if more else asked.start  # a server that knows no ranges gives all it has
    found = data[start - first : stop - first]
    if len(found) != stop - start:
        raise DamagedChunkError(f"of its bytes {start} to {stop} the storage gives {len(found)}")
    return found


class Stretch(NamedTuple):
    """Bytes of an object that are read by one request."""

    start: int
    stop: int


def joined(extents: Sequence[Extent]) -> list[Stretch]:
    """The stretches that hold all of some extents (offset, length), in order, of which those are one that lie no
    further apart than another request would cost.

    >>> joined([(0, 100), (100, 50), (2**21, 8)])
    [Stretch(start=0, stop=150), Stretch(start=2097152, stop=2097160)]
    """
    found: list[Stretch] = []
    for offset, nbytes in sorted(extents):
        stop = offset + nbytes
        if found and offset - found[-1].stop <= REQUEST_NBYTES:
            found[-1] = Stretch(found[-1].start, max(found[-1].stop, stop))
        else:
            found.append(Stretch(offset, stop))
    return found


def block_of(layout: ChunkLayout) -> tuple[int, ...]:
    """Sides of what is read at once of an array in a store that is not local: a chunk, or of a shard as many chunks as
    have about `JOINED_NBYTES`, so that they divide it.

    Most writers store the chunks of a shard in Morton order, in which a block that has half of a shard's chunks along
    its last axis, or of these half along the one before, and so on, is one stretch.
    """
    if layout.shards is None:
        return layout.chunks
    counts = list(layout.shards.counts)
    while math.prod(counts) * layout.chunk_nbytes > JOINED_NBYTES and max(counts) > 1:
        axis = max(range(len(counts)), key=lambda one: (counts[one], one))
        counts[axis] //= next(part for part in range(2, counts[axis] + 1) if counts[axis] % part == 0)
    return tuple(count * side for count, side in zip(counts, layout.chunks, strict=True))


def byte_ranges_of(array: zarr.Array[Any], name: str) -> ByteRanges | None:
    """The byte ranges of an array's chunks; None where only zarr-python can decode them."""
    layout = encoding_of(array, name, Path())
    return None if layout is None else ByteRanges(array, layout)


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
