"""Fingerprints of what was read of a piece: by them a file that only got other times is known for what it was.

XXH3 with 64 bits, of the bytes as they are stored, in the steps in which they are read (`corpus.STEP_NBYTES`). That
takes an eighth of the CPU time of counting bytes from the page cache, less of other kinds, and nothing where a disk is
waited for. It tells files that changed by chance or by use from those that did not, and no file that somebody made to
look like another.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilewright.pipeline.store.waiting import reading_while
from tilewright.pipeline.text.corpus import Piece, read_range, reading_ahead
from tilewright.pipeline.threads import thread_buffer
from tilewright.pipeline.transfer.checksum import new_checksum

COMPARED_NBYTES = 2**22
"""Bytes for which a file is opened once, while it is compared."""

NONE = np.empty((0, 4), np.int64)
"""No fingerprints: of text that went to a GPU without passing through this process's hands. To compare it would take as
long as to count it."""


class Seen:
    """The bytes of one range of a document, as they are read from its start on."""

    def __init__(self, document: int, start: int) -> None:
        self._document, self._start, self._nbytes = document, start, 0
        self._hash = new_checksum()

    def __call__(self, data: memoryview | bytes) -> None:
        self._hash.update(data)
        self._nbytes += len(data)

    @property
    def stop(self) -> int:
        return self._start + self._nbytes

    @property
    def row(self) -> tuple[int, int, int, int]:
        # As a signed number, like the rest of the row.
        digest = int(np.uint64(self._hash.intdigest()).astype(np.int64))
        return self._document, self._start, self.stop, digest


class Fingerprints:
    """Those of all ranges that are read for one piece, or for a thread's share of it."""

    def __init__(self, first: int = 0) -> None:
        """first: the place in the piece of the share's first document."""
        self._first = first
        self._ranges: list[Seen] = []

    def begin(self, document: int, start: int) -> Seen:
        """What is to be called with the bytes from ``start`` on of a document, by its place in the share."""
        self._ranges.append(Seen(self._first + document, start))
        return self._ranges[-1]

    def take(self, others: Fingerprints) -> None:
        """Add those of a second object about the same share."""
        self._ranges += others._ranges

    def rows(self) -> np.ndarray:
        """int64[(ranges, 4)]: the document's place in the piece, start, stop, and the fingerprint of its stored bytes
        there, once they were read."""
        return np.array([seen.row for seen in self._ranges], np.int64).reshape(-1, 4)


def begin(prints: Fingerprints | None, document: int, start: int) -> Seen | None:
    """`Fingerprints.begin`, where fingerprints are wanted."""
    return None if prints is None else prints.begin(document, start)


def covers(rows: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> bool:
    """Whether fingerprints are of every byte from starts[i] to stops[i] of document i, for all i."""
    ranges = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    first = np.diff(ranges[:, 0], prepend=-1) > 0
    last = np.roll(first, -1)
    follows = ranges[1:, 1] <= ranges[:-1, 2]  # margins overlap
    return bool(
        np.array_equal(ranges[first, 0], np.arange(len(starts)))
        and (ranges[first, 1] <= starts).all()
        and (ranges[last, 2] >= stops).all()
        and (follows | first[1:]).all()
    )


def is_as_before(piece: Piece, rows: np.ndarray, check: Callable[[], None]) -> bool:
    """Whether the piece's documents still hold what they did when these fingerprints were made. ``check``, which is
    called now and then, may end it.

    Raises CorpusError, DocumentError as `read_range`.
    """
    if not piece.is_local:
        with reading_while(check), reading_ahead(piece):
            return _is_as_before(piece, rows, check)
    return _is_as_before(piece, rows, check)


def _is_as_before(piece: Piece, rows: np.ndarray, check: Callable[[], None]) -> bool:
    memory = thread_buffer("text", COMPARED_NBYTES, pinned=False)
    for document, start, stop, digest in rows.tolist():
        if stop > piece.documents[document].nbytes:
            return False
        seen = Seen(document, start)
        for here in range(start, stop, COMPARED_NBYTES):
            end = min(here + COMPARED_NBYTES, stop)
            check()
            read_range(piece.documents[document], here, end, memory[: end - here], seen)
        if seen.row[3] != digest:
            return False
    return True
