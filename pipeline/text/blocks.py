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
from tilewright.pipeline.text.corpus import Piece, read_range
from tilewright.pipeline.text.fingerprints import Fingerprints, begin
from tilewright.pipeline.text.formats.opening import documents_of, stored
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.sources import SEPARATOR, Found, Source, Whole

USUAL = Reading()

MOST_DOCUMENTS = 2**16
"""The most documents of a block."""

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
    return piece.is_plain and piece.is_local and piece.nbytes < SMALL_FILE_NBYTES * len(piece.documents)


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
    *,
    reading: Reading = USUAL,
    found: Found | None = None,
    most: int = MOST_DOCUMENTS,
) -> Iterator[Block]:
    """Any piece in blocks of about ``nbytes``, decoded and split if need be, in memory that does not grow.

    ``buffer()`` gives memory of ``nbytes + EXTRA_NBYTES`` for the next block: the last block's again, or other memory,
    so that the last block may still be read. A block holds the documents that ended in it, ``most`` of them at most.
    The beginning of the next document moves to the front of the next buffer; when it alone fills a buffer, it is handed
    out in stretches, and their margins move to the front. ``prints`` gets the fingerprints of what was read, once all
    is, and ``found`` what documents there were."""
    found = Found() if found is None else found
    full = nbytes + kind.before + kind.after
    data: np.ndarray | None = None
    first, edges, filled = 0, [0], 0
    stretched, margin, behind = False, 0, 0
    for place, document in enumerate(piece.documents):
        found.place = place
        if piece.is_part:
            start, end = with_margins(piece, kind)
            stretched, margin, behind = True, piece.start - start, end - piece.stop
            source: Source = Whole(stored(document, start, end, begin(prints, place, start)), found)
        else:
            source = documents_of(document, reading, found, begin(prints, place, 0))
        while True:
            if data is None:
                data = buffer()
            while filled >= full or len(edges) > most:  # twice if only empty documents precede this one
                if len(edges) > 1:
                    yield _whole(data, first, np.array(edges))
                    keep = filled - edges[-1]
                else:
                    yield Block(data[:filled], first, None, margin, filled - kind.after)
                    keep = kind.before + kind.after
                    margin, stretched = kind.before, True
                before, data = data, buffer()
                data[:keep] = before[filled - keep : filled]
                first += len(edges) - 1
                edges, filled = [0], keep
            between = 0 if stretched else gap
            count, ends = source.fill(
                data[filled : full + between], between, 1 if stretched else most - len(edges) + 1
            )
            if not count and not len(ends):
                break
            if not stretched:
                edges += (ends + filled).tolist()
                filled += count
                continue
            filled += count
            if len(ends):
                yield Block(data[:filled], first, None, margin, filled - behind)
                first, edges, filled = first + 1, [0], 0
                stretched, margin, behind, data = False, 0, 0, None
    if len(edges) > 1:
        assert data is not None
        yield _whole(data, first, np.array(edges))
