"""The text of a piece as blocks that are counted in one go: whole documents, or stretches of one with margins.

A piece is read at once into memory of its size, or as a stream through smaller buffers. Wherever it is cut, the counts
are the same: a stretch includes the bytes that tokens at its edges reach to (`tilewright.kernels.histograms.tokens`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from tilewright.kernels.histograms.token_kinds import TokenKind
from tilewright.kernels.histograms.tokens import Kind
from tilewright.pipeline.text.corpus import Document, Look, Piece, read_range, reader
from tilewright.pipeline.text.decompress import Fill
from tilewright.pipeline.text.fingerprints import Fingerprints, begin

SEPARATOR = 0
"""The byte between documents that are counted as one text, where tokens span several bytes: NUL ends any UTF-8 sequence
as the end of the text would; the counts that it adds itself are subtracted again."""

EXTRA_NBYTES = 64
"""Bytes that a buffer for `stream` has beyond a block: the margins of a stretch, and a separator."""

SMALL_FILE_NBYTES = 2**18
"""Where files are smaller than this on average, one thread of a process reads at a time: with such short calls, two
threads spend four times as long passing the interpreter lock back and forth. Other threads count meanwhile, without
that lock."""
_small_files = threading.Lock()


@dataclass(frozen=True, eq=False)
class Block:
    """What is counted in one go: whole documents, or a stretch of one with its margins."""

    data: np.ndarray
    """uint8. Whole documents follow one another, each with a separator behind it where there is a gap."""
    first: int
    """Index in the piece of the first document."""
    edges: np.ndarray | None
    """Where each whole document begins and the last ends; None for a stretch."""
    start: int
    stop: int
    """The range of ``data`` that is counted; the rest is margins."""

    @property
    def documents(self) -> int:
        """Number of whole documents."""
        return 0 if self.edges is None else len(self.edges) - 1

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def _whole(data: np.ndarray, first: int, edges: np.ndarray) -> Block:
    return Block(data[: edges[-1]], first, edges, 0, int(edges[-1]))


def has_small_files(piece: Piece) -> bool:
    """Whether the piece consists of plain documents that are best read by one thread of a process at a time."""
    return piece.is_plain and piece.nbytes < SMALL_FILE_NBYTES * len(piece.documents)


def turn_to_read(piece: Piece) -> AbstractContextManager[object]:
    """The lock, if any, to hold while a piece's documents are read."""
    return _small_files if has_small_files(piece) else nullcontext()


def read_at_once(
    piece: Piece,
    kind: Kind | TokenKind,
    gap: int,
    memory: Callable[[int], np.ndarray],
    prints: Fingerprints | None = None,
) -> Block:
    """Read a piece of plain documents into one block, in memory from ``memory(nbytes)``.

    gap: 1 where documents are counted as one text and tokens span several bytes, so that a separator follows each; else
    0. prints: gets the fingerprints of what is read.
    """
    if piece.is_part:
        (document,) = piece.documents
        start, stop = with_margins(piece, kind)
        data = memory(stop - start)
        read_range(document, start, stop, data, begin(prints, 0, start))
        return Block(data, 0, None, piece.start - start, piece.stop - start)
    lengths = np.fromiter((document.nbytes for document in piece.documents), np.int64, len(piece.documents))
    edges = np.concatenate([[0], np.cumsum(lengths + gap)])
    data = memory(int(edges[-1]))
    with turn_to_read(piece):
        for place, document in enumerate(piece.documents):
            here = int(edges[place])
            target = data[here : here + document.nbytes]
            read_range(document, 0, document.nbytes, target, begin(prints, place, 0))
    if gap:
        data[edges[1:] - 1] = SEPARATOR
    return _whole(data, 0, edges)


def with_margins(piece: Piece, kind: Kind | TokenKind) -> tuple[int, int]:
    """The range of its document that a part needs: its own bytes, and those that tokens at its edges reach to."""
    (document,) = piece.documents
    return max(0, piece.start - kind.before), min(document.nbytes, piece.stop + kind.after)


def stream(
    piece: Piece,
    kind: Kind | TokenKind,
    gap: int,
    nbytes: int,
    buffer: Callable[[], np.ndarray],
    prints: Fingerprints | None = None,
) -> Iterator[Block]:
    """Any piece in blocks of about ``nbytes``, decompressed if need be, in memory that does not grow.

    ``buffer()`` gives memory of ``nbytes + EXTRA_NBYTES`` for the next block: the last block's again, or other memory,
    so that the last block may still be read. A block holds the documents that ended in it. The beginning of the next
    document moves to the front of the next buffer; when it alone fills a buffer, it is handed out in stretches, and
    their margins move to the front. ``prints`` gets the fingerprints of what was read, once all is.
    """
    full = nbytes + kind.before + kind.after
    data = buffer()
    first, edges, filled = 0, [0], 0
    for place, document in enumerate(piece.documents):
        stretched, margin, behind = piece.is_part, 0, 0
        start, end = 0, document.nbytes
        if stretched:
            start, end = with_margins(piece, kind)
            margin, behind = piece.start - start, end - piece.stop
        look = begin(prints, place, start)
        fill = reader(document, look) if document.codec is not None else _stored(document, start, end, look)
        while True:
            while filled >= full:  # twice if only empty documents precede this one
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


def _stored(document: Document, start: int, stop: int, look: Look | None) -> Fill:
    """A function that fills memory with the next bytes of a plain document's range and returns how many; 0 at its
    end."""
    done = start

    def fill(target: np.ndarray) -> int:
        nonlocal done
        step = min(len(target), stop - done)
        read_range(document, done, done + step, target[:step], look)
        done += step
        return step

    return fill
