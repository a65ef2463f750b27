"""A corpus: the files that it is made of, the pieces that tasks count, and how a piece is read.

A file lies at a path or at a URL; `_opened` gives either, and nothing else knows the difference of how they are read.

A large document is cut into pieces; small ones are packed many to a piece, so that thousands of small files
make neither thousands of tasks nor thousands of kernel launches. A compressed document is never cut among pieces, since
its middle can seldom be read without its beginning: a piece has all of it, and it is read in order, decompressed on the
way, by several threads where it is large and has parts.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from tilewright.kernels.arguments import shown
from tilewright.kernels.numbers import ceil_div, counted
from tilewright.pipeline.advance import advanced, advanced_to
from tilewright.pipeline.errors import CompressedError, CorpusError, DocumentError
from tilewright.pipeline.store.remote import files as remote_files
from tilewright.pipeline.store.remote.facts import Facts
from tilewright.pipeline.store.remote.files import (
    Expected,
    RemoteFile,
    UrlChangedError,
    UrlError,
    change_between,
    is_url,
    without_local_protocol,
)
from tilewright.pipeline.text.formats import decompress, parallel
from tilewright.pipeline.text.formats.listing import (
    LeftOut,
    below,
    codec_of,
    least_looked_at,
    listed_at,
    of_pattern,
    with_separator,
    without_collections,
)
from tilewright.pipeline.text.formats.offered import told_apart
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.recognition import READ_FROM_END
from tilewright.pipeline.transfer.checksum import new_checksum
from tilewright.pipeline.transfer.files import (
    KINDS,
    NotAFileError,
    check_is_file,
    open_anything,
    open_file,
    read_at,
    same_time,
)

MOST_DOCUMENTS = 4096
"""The most documents of one piece: opening more would take its task long, however small they are."""

STEP_NBYTES = 2**20
"""Bytes read at a time of which somebody wants a look: as much as stays in a core's cache until he has had it, and
enough that two threads spend little time on passing the interpreter's lock back and forth."""

Look = Callable[[memoryview], object]
"""Is called with stored bytes in the order in which they stand in their file, as they are read."""

STORED_NBYTES = 2**20
"""Bytes read at a time from a compressed file; no more, since a library may copy what it has not used yet."""

ELSEWHERE = "copy its contents to another file and count that, or leave it out"
"""What to do about a file whose length is not known before it is read."""

LASTING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM)
"""Errors for files that are gone, closed to us, or no longer files: a retry would meet them again."""


class Document(NamedTuple):
    """One file, as it was when the corpus was listed: it has to stay so until the corpus is counted."""

    name: str
    """As the user would call it: the path that was given, or a path below it."""
    path: str
    """Absolute, for workers that run in another folder; or a URL."""
    nbytes: int
    """As stored; a compressed document's own length is known only once it is read."""
    codec: str | None = None
    """What opens it, by its name or first bytes: a value of `decompress.SUFFIXES`, a form of `formats.recognition`, or
    `formats.listing.TEXT`; None for a plain document, whose bytes are counted as they are stored, as far as is
    known."""
    modified_ns: int = 0
    """When its bytes were last written to, in nanoseconds since the epoch."""
    tag: str | None = None
    """Of a file at a URL, what its server calls this version of it, perhaps nothing; None of a local one."""

    @property
    def remote(self) -> RemoteFile | None:
        """The file at a URL; None where it is a local one."""
        if self.tag is None:
            return None
        return RemoteFile(self.path, Facts(self.nbytes, self.modified_ns, self.tag))


class Status(NamedTuple):
    """What only the process that listed a file can compare, so that it does not travel with the document."""

    changed_ns: int
    """When the file's status last changed, in nanoseconds since the epoch; of one at a URL a digest of its tag, or when
    it was listed, where there is neither tag nor time."""
    inode: int
    """Tells a file that was replaced from one that was written to; whether it changed, it does not tell."""


@dataclass(frozen=True)
class Corpus:
    documents: tuple[Document, ...]
    """In the order of the paths given, and within a folder sorted by name, level by level."""
    notes: tuple[str, ...]
    """What was passed over, as text for people."""
    status: tuple[Status, ...] = ()
    """Of each document."""
    listed: float = 0.0
    """When the last file was looked at, by `time.monotonic`."""
    reading: Reading = field(default_factory=Reading)
    """How its files are read."""
    urls: tuple[str, ...] = ()
    """Those that were given, with a slash behind that of a folder."""
    cautions: tuple[str, ...] = ()
    """What is counted otherwise than its form lets expect, as text for people."""
    unlisted: tuple[tuple[str, str], ...] = ()
    """Folders that could not be listed and files that could not be looked at, where those are left out, and why."""

    @property
    def nbytes(self) -> int:
        """Bytes of all documents, as stored."""
        return sum(document.nbytes for document in self.documents)


@dataclass(frozen=True)
class Piece:
    """What one task reads: several whole documents, or the bytes from start to stop of a single one."""

    first: int
    """Place in the corpus of the first document."""
    documents: tuple[Document, ...]
    start: int
    stop: int
    """In stored bytes, over the documents end to end."""

    @property
    def is_part(self) -> bool:
        """Whether other pieces hold the rest of the document."""
        return len(self.documents) == 1 and self.stop - self.start < self.documents[0].nbytes

    @cached_property  # travels with the piece: it may have thousands of documents
    def is_plain(self) -> bool:
        """Whether all bytes are counted as they are stored."""
        return all(document.codec is None for document in self.documents)

    @cached_property
    def is_local(self) -> bool:
        """Whether no file is at a URL."""
        return all(document.tag is None for document in self.documents)

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def list_corpus(
    paths: Iterable[str | bytes | os.PathLike[str]],
    *,
    raw: bool = False,
    apart: Path | None = None,
    reading: Reading | None = None,
) -> Corpus:
    """The files that paths name: files themselves, and what is below folders, but for hidden files, what ``reading``
    leaves out, earlier outputs of Tilewright, and what lies in the folder ``apart``, which may not be there.

    A file that is named twice counts once. Links to files are followed, links to folders are not. How a file is
    compressed, a large one's first bytes say, or the end of its name; with ``raw``, none is.

    Raises
    ------
    CorpusError
        A path that is not there, a folder that cannot be listed, something that is neither file nor folder, a file
        whose length is given as 0 though it has bytes, no files at all, or something that is no path.
    """
    try:
        # Plain texts: a subclass such as NumPy's is taken for bytes where folders are listed.
        given = [without_local_protocol(str.__str__(os.fsdecode(path))) for path in paths]
    except TypeError as error:
        raise CorpusError(
            f"a corpus is named by one path or several, and {shown(paths)} is neither: {error}"
        ) from error
    if not given:
        raise CorpusError("no corpus was given; name files, or folders to be searched for files")
    with without_collections():
        return _listed(given, Reading(raw=raw) if reading is None else reading, apart)


def _listed(given: Sequence[str], reading: Reading, apart: Path | None) -> Corpus:
    """As `list_corpus`."""
    documents: dict[str, Document] = {}
    left_out = LeftOut()
    told: dict[str, list[str]] = {}
    status: list[Status] = []
    urls: list[str] = []
    absolute_folder, real_folder = cache(_absolute), cache(os.path.realpath)  # for each folder, not each file
    passed_over = os.path.realpath(apart) if apart is not None else None
    looked_at = least_looked_at()
    repeated = links = special = 0
    for path in given:
        if is_url(path):
            root, again = _list_url(path, reading, left_out, told, documents, status)
            urls.append(root)
            repeated += again
            continue
        facts = _stat(path)
        found: Iterable[tuple[str, Sequence[str], int]]
        if is_folder := stat.S_ISDIR(facts.st_mode):
            found = below(path, reading, left_out)
        elif stat.S_ISREG(facts.st_mode):
            taken = reading.takes(path.replace(os.sep, "/"), named=True)
            left_out.unwanted += not taken
            above, last = os.path.split(path)
            found = [(above, [last], 0)] if taken else []
        else:
            raise CorpusError(f"{path} is neither a file nor a folder; a corpus is made of files")
        for here, names, passed in found:
            links += passed
            if not names:
                continue
            try:
                folder = absolute_folder(here)
            except OSError as error:  # ".." leads out of a folder that was removed, too
                raise CorpusError(
                    f"{os.path.join(here, names[0])} is named from the working directory, which is not there any more;"
                    " name it from the root, or change to another directory"
                ) from error
            real = real_folder(folder)
            if passed_over is not None and f"{real}{os.sep}".startswith(passed_over + os.sep):
                continue
            as_named, as_absolute, as_real = map(with_separator, (here, folder, real))
            for last in names:
                name = as_named + last
                try:
                    facts = os.stat(name)
                except (OSError, ValueError) as error:
                    if not is_folder or not left_out.passes(name, error, reading):
                        _stat(name)  # says why
                        raise
                    continue  # found on the way, not asked for: it must not keep the rest from being counted
                # Most names are all three at once: a million of them take memory.
                absolute = name if as_absolute == as_named else as_absolute + last
                place = absolute if as_real == as_absolute else as_real + last
                if not stat.S_ISREG(facts.st_mode):
                    special += 1
                elif place in documents:
                    repeated += 1
                else:
                    if not facts.st_size:
                        _check_empty(name)
                    codec = None if reading.raw else codec_of(name, facts.st_size, reading, told, looked_at)
                    documents[place] = Document(name, absolute, facts.st_size, codec, facts.st_mtime_ns)
                    status.append(Status(facts.st_ctime_ns, facts.st_ino))
    if not documents:
        passed_by = "; ".join([*left_out.notes(), *(why for _, why in left_out.unlisted)])
        passed_by = passed_by or next(filter(None, map(of_pattern, given)), "")
        raise CorpusError(
            f"no files in {', '.join(given)}; a corpus needs one at least{passed_by and ': ' + passed_by}"
        )
    notes = [
        f"{counted(count, noun)} {what}"
        for count, noun, what in (
            (repeated, "file", "named more than once, counted once"),
            (links, "link", "to folders not followed; name the folders themselves to count them"),
            (left_out.broken, "link", "to nowhere not counted"),
            (special, "special file", "(socket, pipe or device) not counted"),
        )
        if count
    ]
    notes += left_out.notes()
    noted, cautions = told_apart(told)
    facts_of = tuple(status), time.monotonic(), reading, tuple(urls), tuple(cautions)
    return Corpus(tuple(documents.values()), (*notes, *noted), *facts_of, tuple(left_out.unlisted))


def _list_url(
    url: str,
    reading: Reading,
    left_out: LeftOut,
    told: dict[str, list[str]],
    documents: dict[str, Document],
    status: list[Status],
) -> tuple[str, int]:
    """Add the files at a URL, or below it; returns the URL, with a slash behind that of a folder, and how many files
    were there already."""
    try:
        is_folder, found = listed_at(url, reading, left_out, told)
    except UrlChangedError as error:
        raise DocumentError(
            f"{error.url} {error} while the corpus was listed; count it when nothing writes to it"
        ) from error
    except UrlError as error:
        raise CorpusError(f"cannot list {url}: {error}") from error
    new = [each for each in found if each[0] not in documents]
    for name, facts, codec in new:
        documents[name] = Document(name, name, facts.nbytes, codec, facts.modified_ns, facts.tag)
        status.append(Status(_digest(facts), 0))
    return f"{url.rstrip('/')}/" if is_folder else url, len(found) - len(new)


def _digest(facts: Facts) -> int:
    """What stands for a tag where times of changes are compared."""
    if not (facts.tag or facts.modified_ns):
        return time.time_ns()  # nobody can tell whether it is the same the next time
    digest = new_checksum()
    digest.update(facts.tag.encode())
    return int(digest.intdigest() >> 1)


def _absolute(folder: str) -> str:
    # Not os.path.abspath: "link/.." is above the folder that the link leads to, not the one that it stands in.
    return str(Path(folder).absolute())


def _stat(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = error.strerror if isinstance(error, OSError) else error
        remedy = "name files or folders that exist"
        if isinstance(error, FileNotFoundError) and (pattern := of_pattern(path)):
            remedy += f"; {pattern}"
        raise CorpusError(f"cannot find {path or repr(path)}: {reason}; {remedy}") from error


def _check_empty(name: str) -> None:
    """Raise CorpusError where a file has bytes though its length is given as 0, as in /proc, where they are made when
    read. One that cannot be opened has none to count, and one that has grown since is noticed when it is counted."""
    try:
        descriptor = open_file(name)
    except OSError:
        return
    try:
        if not os.pread(descriptor, 1, 0) or os.fstat(descriptor).st_size:
            return
    except OSError as error:
        raise CorpusError(
            f"{name} is said to have no bytes, and cannot be read: {error.strerror}; {ELSEWHERE}"
        ) from error
    finally:
        os.close(descriptor)
    raise CorpusError(f"{name} is said to have no bytes, and has some; {ELSEWHERE}")


def cut_pieces(
    documents: Sequence[Document],
    nbytes: int,
    most_documents: int = MOST_DOCUMENTS,
    streams: int = 1,
    *,
    plain_nbytes: int | None = None,
) -> Iterator[Piece]:
    """Pieces of at most ``nbytes`` stored bytes that hold every byte of every document once, empty ones too.

    Only compressed documents make larger pieces: up to ``streams`` of them share one, whatever their lengths.
    ``plain_nbytes``, if given, is the limit of pieces of plain documents alone.
    """
    most = nbytes if plain_nbytes is None else plain_nbytes
    first = 0
    while first < len(documents):
        length, plain = documents[first].nbytes, documents[first].codec is None
        if length > most and plain:
            step = ceil_div(length, ceil_div(length, most))
            for start in range(0, length, step):
                yield Piece(first, (documents[first],), start, min(start + step, length))
            first += 1
            continue
        last, total = first + 1, length
        while last < len(documents) and last - first < most_documents:
            document = documents[last]
            still_plain = plain and document.codec is None
            fits = total + document.nbytes <= (most if still_plain else nbytes)
            # As one more stream, unless the plain documents so far exceed the limit of a piece with compressed ones.
            streamed = (
                document.codec is not None and last - first < streams and (not plain or total <= nbytes)
            )
            if not fits and not streamed:
                break
            total += document.nbytes
            plain = still_plain
            last += 1
        yield Piece(first, tuple(documents[first:last]), 0, total)
        first = last


def share_out(piece: Piece, nbytes: int) -> Iterator[Piece]:
    """Cut a piece of plain documents into pieces of at most ``nbytes``, whose ``first`` counts from its first
    document."""
    if not piece.is_part:
        yield from cut_pieces(piece.documents, nbytes)
        return
    step = ceil_div(piece.nbytes, ceil_div(piece.nbytes, nbytes))
    for start in range(piece.start, piece.stop, step):
        yield Piece(0, piece.documents, start, min(start + step, piece.stop))


def read_range(
    document: Document, start: int, stop: int, target: np.ndarray, look: Look | None = None
) -> None:
    """Fill ``target``, uint8[stop - start], with a range of the document's bytes; ``look`` sees them on the way.

    Raises
    ------
    CorpusError
        The file cannot be read.
    DocumentError
        It is gone, or has changed since the corpus was listed.
    """
    if start == stop:
        return
    with _opened(document) as file:
        view = memoryview(target.view(np.uint8).data)
        done, step = 0, stop - start if look is None else STEP_NBYTES
        while done < stop - start:
            got = file.read_at(view[done : done + step], start + done)
            if got == 0:
                raise file.ended()
            if look is not None:
                look(view[done : done + got])
            done += got
            advanced(document.path, got)
        file.check()


def reader(
    document: Document,
    look: Look | None = None,
    codec: str | None = None,
    window_nbytes: int = 2**decompress.WINDOW_BITS,
    threads: int = 1,
    alone: Callable[[], None] = lambda: None,
) -> decompress.Fill:
    """A function that fills arrays with a decompressed document, from beginning to end.

    codec: by which, where it is another than the document's. window_nbytes: the largest window of Zstandard. threads:
    how many may decompress it, where it is large and consists of parts. alone: is called at its end where it is large,
    and one had to.

    It may give fewer bytes than fit, and gives none at the end, when ``look`` has seen all stored bytes.

    Raises
    ------
    CorpusError, DocumentError
        As `read_range` does.
    CompressedError
        The bytes are damaged, cut short, or followed by others, or need more memory or a dictionary.
    """
    codec = codec or document.codec
    assert codec is not None
    looks = None if look is None else _Looks(document, look)
    blocks = partial(_stored_blocks, document) if looks is None else partial(_seen_blocks, document, looks)

    def by_one_thread() -> decompress.Fill:
        if document.remote is not None:
            return decompress.reader(codec, blocks(0), window_nbytes)
        stored = decompress.StoredFile(
            document.path,
            document.nbytes,
            blocks,
            lambda descriptor: _check_as_listed(document, os.fstat(descriptor)),
            looks.to if looks is not None else advanced_to(document.path),
        )
        return decompress.reader(codec, stored, window_nbytes)

    if threads > 1 and document.nbytes >= parallel.LARGE_NBYTES and codec in parallel.CUTTERS:
        fill = parallel.reader(codec, lambda: blocks(0), by_one_thread, threads, window_nbytes, alone)
    else:
        fill = by_one_thread()

    def filled(target: np.ndarray) -> int:
        try:
            return fill(target)
        except decompress.ERRORS as error:
            check_as_listed([document])  # damage that is none: half of it is of another file
            raise _not_decompressed(document, codec, error) from error

    return filled


def _not_decompressed(document: Document, codec: str, error: Exception) -> CompressedError:
    if isinstance(error, decompress.MissingPackageError):
        return CompressedError(
            f"{document.name} cannot be decompressed here: {error}; install it where workers run (pip install"
            " 'tilewright[text]'), or count its bytes as they are stored (--raw)"
        )
    if isinstance(error, decompress.TooWideError):
        return CompressedError(
            f"{document.name} cannot be decompressed here: {error}; compress it anew with a smaller one (zstd"
            " --long=27, xz -9), or count what its own tool makes of it"
        )
    if isinstance(error, decompress.DictionaryError):
        return CompressedError(
            f"{document.name} cannot be decompressed here: {error}; compress it anew without one (zstd without"
            " -D), or count its bytes as they are stored (--raw)"
        )
    return CompressedError(
        f"{document.name} cannot be decompressed: {error}; restore the file, rename it if it is not"
        f" compressed by {codec}, or count its bytes as they are stored (--raw)"
    )


def _stored_blocks(document: Document, start: int) -> Iterator[memoryview]:
    """The document's stored bytes from ``start`` on, block by block, all in the same memory: to one of many threads the
    system gives new memory slowly."""
    view = memoryview(bytearray(min(STORED_NBYTES, document.nbytes)))
    with _opened(document) as file:
        done = start
        while done < document.nbytes:
            got = file.read_at(view[: document.nbytes - done], done)
            if not got:
                raise file.ended()
            done += got
            advanced(document.path, got)
            yield view[:got]
        file.check()


class _Looks:
    """Shows somebody the stored bytes of a compressed document, also those that a loop of its own has read: they are in
    the page cache, and are read again."""

    def __init__(self, document: Document, look: Look) -> None:
        self._document, self._look = document, look
        self._done = 0
        self._memory = np.empty(min(STEP_NBYTES, document.nbytes), np.uint8)

    def to(self, stop: int) -> None:
        """Show what lies before ``stop`` and was not shown yet."""
        while self._done < stop:
            step = min(STEP_NBYTES, stop - self._done)
            read_range(self._document, self._done, self._done + step, self._memory[:step])
            self.at(self._done, self._memory[:step].data)

    def at(self, start: int, data: memoryview) -> None:
        """Show bytes from ``start`` on, up to which all were shown; those that were, because the file is read again,
        are not shown again."""
        new = data[max(0, self._done - start) :]
        if new:
            self._look(new)
            self._done = start + len(data)


def _seen_blocks(document: Document, looks: _Looks, start: int) -> Iterator[memoryview]:
    """As `_stored_blocks`, with looks at them."""
    looks.to(start)
    for block in _stored_blocks(document, start):
        looks.at(start, block)
        start += len(block)
        yield block


class _OpenFile(Protocol):
    """A file of a corpus, opened for reading."""

    def read_at(self, target: memoryview, offset: int) -> int:
        """Read from an offset on; returns how many bytes, 0 at the end."""

    def check(self) -> None:
        """Raise DocumentError where the file, that was read, is not as it was listed."""

    def ended(self) -> DocumentError:
        """The error for a file that ended before its last byte."""


class _LocalFile:
    def __init__(self, document: Document, descriptor: int) -> None:
        self._document, self._descriptor = document, descriptor

    def read_at(self, target: memoryview, offset: int) -> int:
        return read_at(self._descriptor, target, offset)

    def check(self) -> None:
        _check_as_listed(self._document, os.fstat(self._descriptor))

    def ended(self) -> DocumentError:
        facts = os.fstat(self._descriptor)  # not this read's offset: several threads read beyond the end
        _check_as_listed(self._document, facts)
        return _ended(self._document, facts.st_size)


class _RemoteFile:
    def __init__(self, document: Document, file: RemoteFile) -> None:
        self._document, self._file = document, file

    def read_at(self, target: memoryview, offset: int) -> int:
        return remote_files.read_at(self._file, target, offset)

    def check(self) -> None:
        pass  # a server that can answers by the condition; all are asked at the end

    def ended(self) -> DocumentError:
        check_as_listed([self._document])
        return _ended(self._document, self._file.facts.nbytes)


def reading_ahead(
    piece: Piece, start: int | None = None, stop: int | None = None
) -> AbstractContextManager[object]:
    """In this block the calling thread reads a piece's documents, one behind the other: those at URLs are asked for
    before they are wanted. start, stop: where it begins and ends to read a part, with margins."""
    return remote_files.reading_ahead(
        Expected(file, start or 0, stop, document.codec not in READ_FROM_END)
        for document in piece.documents
        if (file := document.remote) is not None
    )


@contextmanager
def _opened(document: Document) -> Iterator[_OpenFile]:
    """A document's file; what the system or a server refuses becomes a CorpusError, or a DocumentError."""
    if (remote := document.remote) is not None:
        try:
            yield _RemoteFile(document, remote)
        except UrlError as error:
            raise _refused_at_url(document, error) from error
        return
    try:
        descriptor = open_anything(document.path)
    except OSError as error:
        raise _refused(document, error) from error
    try:
        yield _LocalFile(document, descriptor)
    except CorpusError:
        raise
    except OSError as error:
        try:
            check_is_file(os.fstat(descriptor))  # not earlier: for small files each further call costs time
        except NotAFileError as what:
            raise _refused(document, what) from error
        except OSError:
            pass  # such as of a file that another host removed: the first error says as much
        raise _refused(document, error) from error
    finally:
        os.close(descriptor)


def _refused(document: Document, error: OSError) -> CorpusError:
    kind = DocumentError if isinstance(error, NotAFileError) or error.errno in LASTING else CorpusError
    return kind(
        f"cannot read {document.name}: {error.strerror or error}; make it a file that every worker can read at"
        f" {document.path}, or leave it out"
    )


def _refused_at_url(document: Document, error: UrlError) -> CorpusError:
    if isinstance(error, UrlChangedError):
        return _changed(document, str(error))
    kind = DocumentError if error.lasting else CorpusError
    return kind(f"cannot read {document.name}: {error}")


def _ended(document: Document, nbytes: int) -> DocumentError:
    return DocumentError(
        f"{document.name} is said to have {nbytes} bytes, and ended before the last of them; {ELSEWHERE}"
    )


def check_as_listed(documents: Iterable[Document]) -> None:
    """Raise DocumentError for a file that has changed since the corpus was listed, as far as any host can tell;
    CorpusError where one cannot be looked at."""
    for document in documents:
        if document.remote is not None:
            _check_at_urls([document])
            continue
        try:
            facts = os.stat(document.path)
        except OSError as error:
            raise _refused(document, error) from error
        _check_as_listed(document, facts)


def _check_at_urls(documents: Sequence[Document]) -> None:
    """As `check_as_listed`, of files at URLs."""
    try:
        now = remote_files.facts_of([document.path for document in documents])
    except UrlError as error:
        raise _refused_at_url(documents[0], error) from error
    for document, facts in zip(documents, now, strict=True):
        assert document.remote is not None
        if (what := change_between(document.remote.facts, facts)) is not None:
            raise _changed(document, what)


def _changes_at_urls(corpus: Corpus, passed_over: Collection[int]) -> Iterator[tuple[Document, str]]:
    """The documents at URLs that are not as they were listed, and what happened to them: all are listed again, which
    takes far fewer requests than to ask for each. Raises CorpusError."""
    now: dict[str, Facts] = {}
    for url in corpus.urls:
        try:
            now |= remote_files.find(url)[1]
        except UrlError as error:
            raise CorpusError(f"cannot list {url} again: {error}") from error
    for place, document in enumerate(corpus.documents):
        if place not in passed_over and document.remote is not None:
            what = change_between(document.remote.facts, now.get(document.path))
            if what is not None:
                yield document, what


def _check_as_listed(document: Document, facts: os.stat_result) -> None:
    """As `check_as_listed`, by what the system says of a file; after a read, of its descriptor."""
    if facts.st_size == document.nbytes and (
        facts.st_mtime_ns == document.modified_ns or same_time(facts.st_mtime_ns, document.modified_ns)
    ):
        return
    try:
        check_is_file(facts)
    except NotAFileError as what:
        raise _refused(document, what) from what
    if facts.st_size != document.nbytes:
        raise _changed(document, _new_length(document, facts))
    now, before = (np.datetime64(ns // 1000, "us") for ns in (facts.st_mtime_ns, document.modified_ns))
    raise _changed(
        document,
        f"was rewritten (it is of {now} UTC, and was of {before})",
        copies=", and give copies on other hosts its times (cp -p)",
    )


def check_unchanged(corpus: Corpus, passed_over: Collection[int] = ()) -> None:
    """Raise DocumentError if any file is not as it was when this process listed it: gone, written to, or replaced; but
    for those that were not counted, by their places.

    What each change is known by, and what goes unnoticed: `transfer/files.py`.
    """
    changes = [
        (document, what)
        for place, (document, status) in enumerate(zip(corpus.documents, corpus.status, strict=True))
        if place not in passed_over
        and document.tag is None
        and (what := _change_since(document, status)) is not None
    ]
    changes += _changes_at_urls(corpus, passed_over)
    if not changes:
        return
    (document, what), *more = changes
    others = f", and {counted(len(more), 'other file')} of it changed too" if more else ""
    raise _changed(document, what, others)


def _change_since(document: Document, status: Status) -> str | None:
    """What happened to a document since this process listed it, or None."""
    try:
        facts = os.stat(document.path)
    except (FileNotFoundError, NotADirectoryError):
        return "was removed"
    except OSError as error:
        return f"could not be looked at again ({error.strerror})"
    if (
        facts.st_size == document.nbytes
        and facts.st_mtime_ns == document.modified_ns
        and facts.st_ctime_ns == status.changed_ns
    ):
        return None
    if not stat.S_ISREG(facts.st_mode):
        return f"became {KINDS.get(stat.S_IFMT(facts.st_mode), 'something else')}"
    if facts.st_ino != status.inode:
        return f"was replaced by another file, of {counted(facts.st_size, 'byte')},"
    if facts.st_size != document.nbytes:
        return _new_length(document, facts)
    if facts.st_mtime_ns != document.modified_ns:
        return "was rewritten"
    return "was written to, moved, linked, or given another mode or owner"


def _new_length(document: Document, facts: os.stat_result) -> str:
    went = "grew" if facts.st_size > document.nbytes else "shrank"
    return f"{went} from {document.nbytes} to {counted(facts.st_size, 'byte')}"


def _changed(document: Document, what: str, others: str = "", copies: str = "") -> DocumentError:
    return DocumentError(
        f"{document.name} {what} after the corpus was listed{others}; count it when nothing writes to it{copies}"
    )
