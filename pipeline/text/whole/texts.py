"""The documents of a piece with all of their texts, as many at a time as a block holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from tilewright.kernels.histograms.tokens import KINDS
from tilewright.kernels.numbers import format_nbytes
from tilewright.pipeline.text.blocks import EXTRA_NBYTES, Block, stream
from tilewright.pipeline.text.corpus import Piece
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.sources import Found
from tilewright.pipeline.threads import thread_buffer

BLOCK_NBYTES = 2**22
"""Text that is looked at at once, where it is of many documents."""

LARGE_BLOCK_NBYTES = 2**24
"""The same on the way to a GPU: each block takes the interpreter half a millisecond, for which all threads that read
wait."""

MOST_NBYTES = 2**27
"""The longest document whose text is held: what a worker makes of one takes some sixteen times as much."""

LONGER = f"longer than {format_nbytes(MOST_NBYTES)}"

AS_BYTES = KINDS["byte"]
"""Tells `stream` that no margins are wanted."""


@dataclass(frozen=True, eq=False)
class Texts:
    """Some consecutive documents."""

    data: np.ndarray | None
    """uint8: their texts, one behind the other; None for a single one that is too long."""
    edges: np.ndarray
    """int64: where each begins and the last ends."""
    digests: np.ndarray
    """uint64[(documents, 2)]: XXH3 of each text with 128 bits, the high half first."""
    in_block: bool = True
    """Whether ``data`` lies in the memory that blocks are read to; else in memory of its own."""


def texts_of(
    piece: Piece,
    reading: Reading,
    found: Found,
    check: Callable[[], None],
    *,
    too_long: str = LONGER,
    block_nbytes: int = BLOCK_NBYTES,
    most_nbytes: int = MOST_NBYTES,
    memory: Callable[[], np.ndarray] | None = None,
) -> Iterator[Texts]:
    """The documents of a piece in their order; each `Texts` only until the next is asked for.

    found: is told of documents as they end. check: is called for each block, and may end it. too_long: what is told of
    a document longer than ``most_nbytes``. memory: gives that of the next block, as `stream` takes it; else it is the
    thread's own.
    """
    from tilewright.kernels.passes.xxh3_host import xxh3_128_of  # needs Numba, which a client has no use for

    buffer = memory or partial(thread_buffer, "text", block_nbytes + EXTRA_NBYTES, pinned=False)
    under_way: _Long | None = None
    for block in stream(piece, AS_BYTES, 0, block_nbytes, buffer, reading=reading, found=found):
        check()
        if under_way is not None and (block.edges is not None or block.first != under_way.first):
            yield under_way.texts()
            under_way = None
        if block.edges is None:
            if under_way is None:
                name = piece.documents[found.place].name
                under_way = _Long(block.first, most_nbytes, partial(found.remark, too_long, name))
            under_way.add(block)
        else:
            edges = block.edges.astype(np.int64)
            yield Texts(block.data, edges, xxh3_128_of(block.data, edges))
    if under_way is not None:
        yield under_way.texts()


class _Long:
    """A document that comes in stretches."""

    def __init__(self, first: int, most_nbytes: int, too_long: Callable[[], object]) -> None:
        self.first = first
        self._most, self._too_long = most_nbytes, too_long
        self._parts: list[np.ndarray] = []
        self._nbytes = 0
        self._hash = xxhash.xxh3_128()

    def add(self, block: Block) -> None:
        data = block.data[block.start : block.stop]
        self._hash.update(data.data)
        self._nbytes += len(data)
        if self._nbytes <= self._most:
            self._parts.append(data.copy())
        else:
            self._parts.clear()

    def texts(self) -> Texts:
        edges, digests = np.array([0, self._nbytes]), _as_words([self._hash.digest()])
        if self._nbytes > self._most:
            self._too_long()
            return Texts(None, edges, digests, False)
        return Texts(np.concatenate(self._parts), edges, digests, False)


def _as_words(digests: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64).reshape(-1, 2)
