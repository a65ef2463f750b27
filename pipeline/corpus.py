"""A corpus: the files that it is made of, the pieces that tasks count, and how a piece is read.

A large document is cut into pieces; small ones are packed many to a piece, so that thousands of small files
make neither thousands of tasks nor thousands of kernel launches.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.kernels.launch import ceil_div
from tilewright.pipeline.errors import CorpusError

MOST_DOCUMENTS = 4096
"""Documents in one piece: opening more would make a piece long however small they are."""


@dataclass(frozen=True)
class Document:
    """One file, and how long it was when the corpus was listed: bytes that come later are not counted."""

    name: str
    """As the user would call it: the path that was given, or a path below it."""
    path: str
    """Absolute, for workers that run in another folder."""
    nbytes: int


@dataclass(frozen=True)
class Corpus:
    documents: tuple[Document, ...]
    """In the order of the paths given, and within a folder sorted by name, level by level."""
    notes: tuple[str, ...]
    """What was passed over, for people."""

    @property
    def nbytes(self) -> int:
        return sum(document.nbytes for document in self.documents)


@dataclass(frozen=True)
class Piece:
    """What one task reads: several whole documents, or the bytes from start to stop of a single one."""

    first: int
    """Place in the corpus of the first document."""
    documents: tuple[Document, ...]
    start: int
    stop: int

    @property
    def is_part(self) -> bool:
        """Whether other pieces hold the rest of the document."""
        return len(self.documents) == 1 and self.stop - self.start < self.documents[0].nbytes

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def list_corpus(paths: Iterable[str | os.PathLike[str]]) -> Corpus:
    """The files that paths name: files themselves, and everything below folders.

    A file that is named twice counts once. Links to files are followed, links to folders are not.

    Raises
    ------
    CorpusError
        A path that is not there, a folder that cannot be listed, something that is neither file nor folder,
        or no files at all.
    """
    given = [os.fspath(path) for path in paths]
    if not given:
        raise CorpusError("no corpus was given; name files, or folders to be searched for files")
    documents: dict[str, Document] = {}
    repeated = links = special = 0
    for path in given:
        facts = _stat(path)
        if stat.S_ISDIR(facts.st_mode):
            found, passed = _below(path)
            links += passed
        elif stat.S_ISREG(facts.st_mode):
            found = [path]
        else:
            raise CorpusError(f"{path} is neither a file nor a folder; a corpus is made of files")
        for name in found:
            facts = _stat(name)
            absolute = os.path.abspath(name)
            if not stat.S_ISREG(facts.st_mode):
                special += 1
            elif absolute in documents:
                repeated += 1
            else:
                documents[absolute] = Document(name, absolute, facts.st_size)
    if not documents:
        raise CorpusError(f"no files in {', '.join(given)}; a corpus needs one at least")
    notes = [
        note
        for count, note in (
            (repeated, f"{repeated} files are named more than once and count once"),
            (links, f"{links} links to folders are not followed; name the folders themselves to count them"),
            (special, f"{special} sockets, pipes or devices are not counted"),
        )
        if count
    ]
    return Corpus(tuple(documents.values()), tuple(notes))


def _stat(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise CorpusError(
            f"cannot find {path}: {error.strerror}; name files or folders that exist"
        ) from error


def _below(folder: str) -> tuple[list[str], int]:
    """Everything below a folder that is no folder, sorted by path, and the number of links to folders."""

    def fail(error: OSError) -> None:
        raise CorpusError(f"cannot list the folder {error.filename}: {error.strerror}") from error

    found: list[str] = []
    links = 0
    for here, folders, files in os.walk(folder, onerror=fail):
        links += sum(os.path.islink(os.path.join(here, name)) for name in folders)
        found += [os.path.join(here, name) for name in files]
    return sorted(found, key=lambda path: path.split(os.sep)), links


def cut_pieces(
    documents: Sequence[Document], nbytes: int, most_documents: int = MOST_DOCUMENTS
) -> Iterator[Piece]:
    """Pieces of at most ``nbytes`` bytes that hold every byte of every document once, empty documents too."""
    first = 0
    while first < len(documents):
        length = documents[first].nbytes
        if length > nbytes:
            step = ceil_div(length, ceil_div(length, nbytes))
            for start in range(0, length, step):
                yield Piece(first, (documents[first],), start, min(start + step, length))
            first += 1
            continue
        last, total = first, 0
        while (
            last < len(documents)
            and last - first < most_documents
            and total + documents[last].nbytes <= nbytes
        ):
            total += documents[last].nbytes
            last += 1
        yield Piece(first, tuple(documents[first:last]), 0, total)
        first = last


def read_range(document: Document, start: int, stop: int, target: np.ndarray) -> None:
    """Fill ``target``, uint8[stop - start], with a range of the document's bytes.

    Raises
    ------
    CorpusError
        The file cannot be read, or has become shorter than it was when the corpus was listed.
    """
    if start == stop:
        return
    try:
        descriptor = os.open(document.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CorpusError(f"cannot read {document.name}: {error.strerror}") from error
    try:
        view = memoryview(target.view(np.uint8).data)
        done = 0
        while done < stop - start:
            got = os.preadv(descriptor, [view[done:]], start + done)
            if got == 0:
                raise CorpusError(
                    f"{document.name} ended at byte {start + done} while it was read and had"
                    f" {document.nbytes} bytes when the corpus was listed; count it when nothing writes to it"
                )
            done += got
    except CorpusError:
        raise
    except OSError as error:
        raise CorpusError(f"cannot read {document.name}: {error.strerror}") from error
    finally:
        os.close(descriptor)
