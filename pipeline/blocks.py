"""The text of a piece as blocks that are counted in one go: whole documents, or stretches of one with margins.

A piece is read at once into memory of its size, or as a stream through buffers that are smaller than it. Any cut
gives the same counts: a stretch holds what its edge tokens reach to (`tilewright.kernels.histogram_tokens`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from tilewright.kernels.histogram_tokens import Kind
from tilewright.pipeline.corpus import Document, Piece, read_range, reader
from tilewright.pipeline.decompress import Fill

SEPARATOR = 0
"""The byte between documents that are counted as one text, where tokens reach over edges: NUL ends any UTF-8
sequence as the end of the text would, and what it adds itself is taken off again."""

EXTRA_NBYTES = 64
"""What a buffer for `stream` has more than a block: the margins of a stretch, and a separator."""

SMALL_FILE_NBYTES = 2**18
"""Files below this size on average are read by one thread of a process at a time: in calls so short, two threads
spend four times as long handing the interpreter lock to and fro. Others count meanwhile, without that lock."""
_small_files = threading.Lock()


@dataclass(frozen=True, eq=False)
class Block:
    """What is counted in one go: whole documents, or a stretch of one with its margins."""

    data: np.ndarray
    """uint8. Whole documents lie one behind the other, a separator behind each where there is a gap."""
    first: int
    """Place in the piece of the first document."""
    edges: np.ndarray | None
    """Where each whole document begins and the last ends; None for a stretch."""
    start: int
    stop: int
    """What is counted of ``data``; the rest is margins."""

    @property
    def documents(self) -> int:
        """How many whole ones."""
        return 0 if self.edges is None else len(self.edges) - 1

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def _whole(data: np.ndarray, first: int, edges: np.ndarray) -> Block:
    return Block(data[: edges[-1]], first, edges, 0, int(edges[-1]))


def has_small_files(piece: Piece) -> bool:
    """Whether the piece's documents, plain ones, are best read by one thread of a process at a time."""
    return piece.is_plain and piece.nbytes < SMALL_FILE_NBYTES * len(piece.documents)


def turn_to_read(piece: Piece) -> AbstractContextManager[object]:
    """What to hold while a piece's documents are read."""
    return _small_files if has_small_files(piece) else nullcontext()


def read_at_once(piece: Piece, kind: Kind, gap: int, memory: Callable[[int], np.ndarray]) -> Block:
    """A piece of plain documents in one block; ``memory(nbytes)`` is where.

    Where documents are counted as one text and tokens reach over edges, a separator follows each: gap is 1.
    """
    if piece.is_part:
        (document,) = piece.documents
        start, stop = with_margins(piece, kind)
        data = memory(stop - start)
        read_range(document, start, stop, data)
        return Block(data, 0, None, piece.start - start, piece.stop - start)
    lengths = np.fromiter((document.nbytes for document in piece.documents), np.int64, len(piece.documents))
    edges = np.concatenate([[0], np.cumsum(lengths + gap)])
    data = memory(int(edges[-1]))
    with turn_to_read(piece):
        for document, begin in zip(piece.documents, edges.tolist(), strict=False):
            read_range(document, 0, document.nbytes, data[begin : begin + document.nbytes])
    if gap:
        data[edges[1:] - 1] = SEPARATOR
    return _whole(data, 0, edges)


def with_margins(piece: Piece, kind: Kind) -> tuple[int, int]:
    """The bytes of the document that a part of it needs: its own, and what its edge tokens reach to."""
    (document,) = piece.documents
    return max(0, piece.start - kind.before), min(document.nbytes, piece.stop + kind.after)


def stream(
    piece: Piece, kind: Kind, gap: int, nbytes: int, buffer: Callable[[], np.ndarray]
) -> Iterator[Block]:
    """Any piece in blocks of about ``nbytes``, decompressed where it is compressed, in memory that does not grow.

    ``buffer()`` gives memory of ``nbytes + EXTRA_NBYTES`` for the next block: other memory than the last's, which may
    then be read for longer, or the same again. A block holds the documents that ended in it. The beginning of the next
    one moves to the front of the next buffer; when that one alone fills it, stretches of it are handed out, and the
    margins move to the front.
    """
    full = nbytes + kind.before + kind.after
    data = buffer()
    first, edges, filled = 0, [0], 0
    for place, document in enumerate(piece.documents):
        stretched, margin, behind = piece.is_part, 0, 0
        begin, end = 0, document.nbytes
        if stretched:
            begin, end = with_margins(piece, kind)
            margin, behind = piece.start - begin, end - piece.stop
        fill = reader(document) if document.codec is not None else _stored(document, begin, end)
        while True:
            while filled >= full:  # twice, where empty documents alone were ahead of this one
                if len(edges) > 1:
                    yield _whole(data, first, np.array(edges))
                    keep = filled - edges[-1]
                else:
                    yield Block(data[:filled], place, None, margin, filled - kind.after)
                    keep = kind.before + kind.after
                    margin, stretched = kind.before, True
                before, data = data, buffer()
                data[:keep] = before[filled - keep : filled]
                first, edges, filled = place, [0], keep
            got = fill(data[filled:full])
            if not got:
                break
            filled += got
        if stretched:
            yield Block(data[:filled], place, None, margin, filled - behind)
            first, edges, filled = place + 1, [0], 0
            if first < len(piece.documents):
                data = buffer()
            continue
        if gap:
            data[filled] = SEPARATOR
        filled += gap
        edges.append(filled)
    if len(edges) > 1:
        yield _whole(data, first, np.array(edges))


def _stored(document: Document, start: int, stop: int) -> Fill:
    """What fills memory with the next bytes of a plain document's range, and returns how many there were; 0 at its
    end."""
    done = start

    def fill(target: np.ndarray) -> int:
        nonlocal done
        step = min(len(target), stop - done)
        read_range(document, done, done + step, target[:step])
        done += step
        return step

    return fill
