"""The texts of the documents that are compared, read once more and brought to where pairs are handed out, in a
temporary file: what of them a process holds does not grow with the corpus."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import dask
import numpy as np

from tilewright.pipeline.errors import DocumentError, StoreError
from tilewright.pipeline.events import Listener
from tilewright.pipeline.reduce import end_if_given_up, reduce_pieces, taken_as_they_arrive
from tilewright.pipeline.store.waiting import reading_while
from tilewright.pipeline.text.corpus import Corpus, Document, Piece, reading_ahead
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.sources import Found
from tilewright.pipeline.text.whole.texts import texts_of

if TYPE_CHECKING:
    from distributed import Client

TASK_NBYTES = 2**26
"""About how much text one task brings."""
MOST_WANTED = 2**14
"""The most documents that one task brings."""


@dataclass(frozen=True, eq=False)
class Where:
    """Where the documents of a corpus stand, and what they are known by, all in the corpus's order."""

    files: np.ndarray
    """int64: the place of each one's file in the corpus."""
    ordinals: np.ndarray
    """int64: how many documents stand before it in its file."""
    nbytes: np.ndarray
    """int64: its length, decoded."""
    digests: np.ndarray
    """uint64[(documents, 2)]."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """Documents of one file that a task brings."""

    file: Document
    ordinals: np.ndarray
    """int64, ascending."""
    digests: np.ndarray
    """uint64[(documents, 2)]."""


def read_texts(wanted: Sequence[Wanted], reading: Reading) -> tuple[bytes, dict[str, float]]:
    """The texts of some documents, one behind the other. What a task does.

    Raises
    ------
    CorpusError
        A file cannot be read any more.
    DocumentError
        A document is not what it was.
    """
    start, check = time.perf_counter(), end_if_given_up()
    texts: list[bytes] = []
    with reading_while(check):
        for each in wanted:
            with reading_ahead(_piece_of(each)):
                texts += _texts_in(each, reading, check)
    return b"".join(texts), {"read": time.perf_counter() - start}


def _texts_in(wanted: Wanted, reading: Reading, check: Any) -> Iterator[bytes]:
    before = done = 0
    for texts in texts_of(_piece_of(wanted), reading, Found(), check):
        count = len(texts.digests)
        stop = int(np.searchsorted(wanted.ordinals, before + count))
        for place in range(done, stop):
            ordinal = int(wanted.ordinals[place]) - before
            if texts.data is None or (texts.digests[ordinal] != wanted.digests[place]).any():
                raise _changed(wanted.file)
            yield texts.data[texts.edges[ordinal] : texts.edges[ordinal + 1]].tobytes()
        before, done = before + count, stop
        if done == len(wanted.ordinals):
            return
    raise _changed(wanted.file)


def _piece_of(wanted: Wanted) -> Piece:
    return Piece(0, (wanted.file,), 0, wanted.file.nbytes)


def _changed(file: Document) -> DocumentError:
    return DocumentError(
        f"{file.name} was written to while duplicates were looked for; look for them when nothing writes to it"
    )


class Spool:
    """Texts in a file."""

    def __init__(self, file: IO[bytes], documents: int) -> None:
        self._file, self._nbytes = file, 0
        self._starts = np.full(documents, -1, np.int64)
        self._lengths = np.zeros(documents, np.int64)

    def add(self, documents: np.ndarray, lengths: np.ndarray, texts: bytes) -> None:
        """Keep some documents' texts. Raises StoreError where there is no room."""
        at = self._nbytes
        try:
            self._file.write(texts)
            self._file.flush()
        except OSError as error:
            raise StoreError(
                f"cannot keep the texts that are compared: {error.strerror}; name another folder by Dask's setting"
                " temporary-directory, or raise threshold"
            ) from error
        self._nbytes += len(texts)
        self._starts[documents] = at + np.cumsum(lengths) - lengths
        self._lengths[documents] = lengths

    def missing(self, documents: np.ndarray) -> np.ndarray:
        """Those that are not there yet."""
        return documents[self._starts[documents] < 0]

    def read(self, documents: np.ndarray) -> tuple[bytes, np.ndarray]:
        """The texts, one behind the other, and where each begins and the last ends, int64."""
        lengths, starts = self._lengths[documents].tolist(), self._starts[documents].tolist()
        parts = [os.pread(self._file.fileno(), *each) for each in zip(lengths, starts, strict=True)]
        return b"".join(parts), np.concatenate([[0], np.cumsum(self._lengths[documents])])


@contextmanager
def spool(documents: int) -> Iterator[Spool]:
    """A `Spool` for documents of a corpus, in Dask's ``temporary-directory`` or the system's, that goes away with the
    block. Raises StoreError where there can be none."""
    with ExitStack() as stack:
        try:
            folder = dask.config.get("temporary-directory")
            file = stack.enter_context(tempfile.TemporaryFile(prefix="tilewright-texts-", dir=folder))
        except OSError as error:
            raise StoreError(
                f"there is no place for a temporary file: {error.strerror}; name one by Dask's setting"
                " temporary-directory"
            ) from error
        yield Spool(file, documents)


def fetch(
    client: Client, corpus: Corpus, where: Where, documents: np.ndarray, into: Spool, listener: Listener
) -> None:
    """Bring the texts of documents, int64, ascending, to the spool."""
    parts = _parts(where, into.missing(documents))
    calls = [(_wanted(corpus, where, part), corpus.reading) for part in parts]

    def arrived(place: int, texts: bytes) -> bytes:
        into.add(parts[place], where.nbytes[parts[place]], texts)
        return b""

    reduce_pieces(
        client,
        taken_as_they_arrive(
            "texts", read_texts, "give them more memory, or split long documents (split_on)"
        ),
        calls,
        [int(where.nbytes[part].sum()) for part in parts],
        listener,
        arrived=arrived,
    )


def _parts(where: Where, documents: np.ndarray) -> list[np.ndarray]:
    """What each task brings: documents in the corpus's order."""
    if not len(documents):
        return []
    after = np.cumsum(where.nbytes[documents])
    number = np.maximum((after - 1) // TASK_NBYTES, 0)
    number += np.arange(len(documents)) // MOST_WANTED
    return np.split(documents, np.flatnonzero(np.diff(number)) + 1)


def _wanted(corpus: Corpus, where: Where, documents: np.ndarray) -> list[Wanted]:
    files = where.files[documents]
    return [
        Wanted(
            corpus.documents[int(files[some[0]])],
            where.ordinals[documents[some]],
            where.digests[documents[some]],
        )
        for some in np.split(np.arange(len(documents)), np.flatnonzero(np.diff(files)) + 1)
    ]
