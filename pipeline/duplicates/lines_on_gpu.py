"""How the lines of large plain files are signed on a GPU: a chunk of them is brought there as it lies in the files, by
loops that do not hold the interpreter's lock, and split, hashed and signed there.

Reading lines block by block takes each block some dozen turns with the interpreter's lock, at which all threads that
read wait for each other. Here the host only reads. While one chunk is brought, others are signed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from tilewright.kernels.cpu.loops import usable_cores
from tilewright.kernels.duplicates import device_digests, device_lines
from tilewright.kernels.duplicates.device_digests import hash_texts
from tilewright.kernels.duplicates.device_lines import Newlines, as_words, newlines_of
from tilewright.kernels.duplicates.device_rooms import Rooms, downloaded
from tilewright.kernels.duplicates.device_signing import DeviceSigner
from tilewright.kernels.duplicates.signing import Signing, Signs
from tilewright.kernels.gpu.device_array import address
from tilewright.kernels.gpu.lock_keeping import LockKeepingStream
from tilewright.kernels.gpu.memory import is_out_of_memory, memory_that_ran_out
from tilewright.kernels.gpu.transfer import upload_stream
from tilewright.kernels.numbers import format_nbytes
from tilewright.pipeline.text.corpus import Document, Piece, check_as_listed, read_range
from tilewright.pipeline.text.formats.listing import TEXT, head_of
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.recognition import container_named, recognised, unopened
from tilewright.pipeline.text.formats.sources import Found
from tilewright.pipeline.text.gpu.lanes import borrowed_lane, borrowed_memory, free_texts
from tilewright.pipeline.threads import run_all
from tilewright.pipeline.transfer import file_upload
from tilewright.pipeline.transfer.file_rectangles import ANY_LENGTH, Rectangle
from tilewright.pipeline.transfer.file_upload import Upload
from tilewright.pipeline.transfer.lane import Spares, forgotten_with_memory, untimed_event
from tilewright.pipeline.transfer.lane_blocks import move_nbytes

logger = logging.getLogger(__name__)

LEAST_NBYTES = 2**20
"""Of files that are shorter on average, opening them one by one to look at their first bytes would take longest."""
MOST_LINE_NBYTES = 2**22
"""Of a longer line the digest would take longer than all others: it is formed byte after byte, by a few threads."""
CHUNK_NBYTES = 2**27 - MOST_LINE_NBYTES
"""Text that is brought and signed at once. On an H100 it takes 3 ms to come and 6 to be signed: of smaller ones the
interpreter would have too many to deal with. What they take of the device's memory grows by powers of two, so they stay
below one, though they end behind a line."""
CHUNKS = 6
"""Chunks under way at the same time, of which some are brought while others are signed: where one waits for what it has
to ask of the GPU, another keeps it at work. Each takes some eight times its length of the device's memory, of
characters; nine if it has `MOST_LINES`, nearly all of them empty, beside long ones."""
READERS = 4
"""Threads that bring a chunk together. With all threads for one chunk after the other, sixteen, each chunk took 8 ms to
come: they had to be started anew, and each takes turns with the interpreter's lock for that."""
MOST_DOCUMENTS = 2**18
"""Lines that are signed at once: of each its signature takes memory, however short the line is."""
MOST_LINES = 2**22
"""Lines of a chunk. Newline, edge, end and digest of each take 40 bytes of the device's memory, together 160 MiB, and
about as much of the host's; a chunk of newlines alone would take 5 GiB of each. With lines of 32 bytes, of which a
chunk has as many, it takes four times its length with all else, since few of its characters are signed at once."""
LOOK_NBYTES = 2**16
"""What is read at a time to find the end of a line at which a file may be cut."""

Run = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Makes calls on the threads of the process that read, and returns what each does."""


class _TooLong(Exception):
    """There is a line of more than `MOST_LINE_NBYTES`."""


class _TooMany(Exception):
    """There are more lines in a chunk than `MOST_LINES`."""


class _NotRead(Exception):
    """Not all of a chunk could be read."""


class Span(NamedTuple):
    """Whole lines of a file."""

    place: int
    """Of the file in its piece."""
    start: int
    stop: int
    """In its bytes."""


class Lines(NamedTuple):
    """The lines of a text that consists of spans, one behind the other."""

    edges: np.ndarray
    """int64[lines + 1]: where each begins, and the last stops, with what ends it."""
    ends: np.ndarray
    """int64[lines]: where each ends, without that."""
    counts: np.ndarray
    """int64: how many each span has."""


@dataclass(frozen=True, eq=False)
class SignedChunk:
    """What was found of a chunk."""

    counts: np.ndarray
    """As of `Lines`."""
    lengths: np.ndarray
    """int64[lines]: their bytes."""
    digests: np.ndarray
    """uint64[(lines, 2)], as `Texts.digests`."""
    signs: tuple[Signs, ...]
    """Of all lines, one part behind the other."""
    reading: float
    signing: float
    """Seconds that threads read, and that its signing took once all was read."""


def fit(piece: Piece, reading: Reading) -> bool:
    """Whether the documents of a piece are lines of large plain files, by a look at each one's first bytes."""
    return (
        file_upload.available()
        and reading.split_on == "line"
        and not (reading.fields or reading.encoding or reading.raw)
        and piece.is_local
        and 0 < LEAST_NBYTES * len(piece.documents) <= piece.nbytes
        and all(document.codec in (None, TEXT) for document in piece.documents)
        and all(map(_is_plain, piece.documents))
    )


def _is_plain(document: Document) -> bool:
    """Whether nothing but its text is to be said of a file."""
    head = head_of(document.path)
    known = recognised(head, document.name) or unopened(head) or container_named(document.name)
    return known is None


def chunks_of(documents: Sequence[Document], nbytes: int) -> Iterator[list[Span]]:
    """The bytes of documents, in order, in chunks of about ``nbytes``, cut behind lines. Raises _TooLong where there is
    no such place."""
    chunk: list[Span] = []
    room = nbytes
    for place, document in enumerate(documents):
        start = 0
        while start < document.nbytes:
            stop = document.nbytes
            if stop - start > room:
                stop = _behind_a_line(document, start + room)
            chunk.append(Span(place, start, stop))
            room -= stop - start
            start = stop
            if room <= 0:
                yield chunk
                chunk, room = [], nbytes
    if chunk:
        yield chunk


def _behind_a_line(document: Document, place: int) -> int:
    """The first place at or behind this one, at which a line of a document has just ended, or the document has."""
    at = place - 1
    while at < min(place + MOST_LINE_NBYTES, document.nbytes):
        part = np.empty(min(LOOK_NBYTES, document.nbytes - at), np.uint8)
        read_range(document, at, at + len(part), part)
        found = part.tobytes().find(b"\n")
        if found >= 0:
            return at + found + 1
        at += len(part)
    if at < document.nbytes:
        raise _TooLong
    return document.nbytes


def lines_of(newlines: Newlines, lengths: np.ndarray) -> Lines:
    """The lines of spans, of these lengths, int64, as `records.passages` finds them: what ends one is its newline with
    a carriage return before it, and the last of a file needs none. newlines: of all spans together."""
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    stops, ends = newlines.places + 1, newlines.places - newlines.returns
    last = edges[1:][lengths > 0]
    at = np.searchsorted(stops, last)
    open_ended = (
        last[(at == len(stops)) | (stops[np.minimum(at, len(stops) - 1)] != last)] if len(stops) else last
    )
    if len(open_ended):
        where = np.searchsorted(stops, open_ended)
        stops, ends = np.insert(stops, where, open_ended), np.insert(ends, where, open_ended)
    starts = np.concatenate([[0], stops])
    # A return before a newline that is a file's first byte is of the file before.
    ends = np.maximum(ends, starts[:-1])
    return Lines(starts, ends, np.diff(np.searchsorted(stops, edges, "right")))


class _ChunkSigner:
    """Signs one chunk at a time, on a stream of its own."""

    def __init__(self, signing: Signing) -> None:
        self.stream = cuda.stream()
        self._signer, self._rooms = DeviceSigner(signing), Rooms()
        self._secret = cuda.to_device(device_digests.constants())
        self._uploads, self._uploaded = LockKeepingStream(upload_stream()), untimed_event()
        self._keeping = LockKeepingStream(self.stream)

    def follow_uploads(self) -> None:
        """Have the stream wait for everything sent to texts so far."""
        self._uploads.record(self._uploaded)
        self._keeping.follow(self._uploaded)

    def lines(self, text: Any, lengths: np.ndarray) -> Lines:
        """The lines of spans that lie in device memory, uint8, one behind the other."""
        newlines = newlines_of(text, int(lengths.sum()), self._rooms, self.stream, MOST_LINES)
        if newlines is None:
            raise _TooMany
        found = lines_of(newlines, lengths)
        if len(found.ends) > MOST_LINES:  # the last one of a file needs no newline
            raise _TooMany
        if (found.ends - found.edges[:-1]).max(initial=0) > MOST_LINE_NBYTES:
            raise _TooLong
        return found

    def digests(self, text: Any, lines: Lines) -> np.ndarray:
        """XXH3 of lines, uint64[(lines, 2)]."""
        count = len(lines.ends)
        starts = self._rooms.uploaded("starts", lines.edges[:-1], self.stream)
        ends = self._rooms.uploaded("ends", lines.ends, self.stream)
        found = self._rooms.of("digests", 2 * count, np.uint64)
        hash_texts(as_words(text), starts, ends, count, self._secret, found, self.stream)
        digests = downloaded(found, 2 * count, self.stream)
        self.stream.synchronize()
        return digests.reshape(-1, 2)

    def signs(self, text: Any, lines: Lines, *, signatures: bool) -> Iterator[Signs]:
        """The signatures of lines, some at a time."""
        for first in range(0, len(lines.ends), MOST_DOCUMENTS):
            last = min(first + MOST_DOCUMENTS, len(lines.ends))
            begin, end = int(lines.edges[first]), int(lines.edges[last])
            edges, ends = lines.edges[first : last + 1] - begin, lines.ends[first:last] - begin
            yield self._signer.sign(
                text[begin:end], None, edges, self.stream, signatures=signatures, ends=ends
            )


_spare_signers: Spares[_ChunkSigner] = Spares(_ChunkSigner, pinned=False)
_preparing = threading.Lock()
_no_room = threading.Event()
"""There was no room for chunks: the pieces of this job are read block by block, and those of another try again."""
_telling = threading.Lock()
forgotten_with_memory(_no_room.clear)


@contextmanager
def _borrowed(signing: Signing) -> Iterator[_ChunkSigner]:
    cuda.current_context()  # attaches the thread to the GPU
    signer = _spare_signers.take(signing)
    try:
        yield signer
    finally:
        signer.stream.synchronize()  # after a failure, kernels may still be at work in its memory
        _spare_signers.put(signer, signing)


@lru_cache(maxsize=1)
def pool() -> ThreadPoolExecutor:
    """Threads that have chunks brought and signed: not those that read, for which they wait."""
    return ThreadPoolExecutor(CHUNKS, thread_name_prefix="tilewright-text-sign")


def prepare() -> None:
    """Compile and load the kernels beside those of `device_signing`, and the loop; one thread at a time does."""
    with _preparing:
        cuda.current_context()
        file_upload.prepare()
        device_lines.prepare()
        device_digests.HASH_TEXTS.prepare()


def sign_lines(
    piece: Piece,
    signing: Signing,
    readers: Executor,
    threads: int,
    check: Callable[[], None],
    *,
    signatures: bool,
) -> tuple[Found, list[SignedChunk]] | None:
    """Sign all lines of a piece that is `fit`. readers: a pool of so many threads that read. check: is called for each
    chunk, and may end it.

    Returns None where a line is too long, where a chunk has too many, where not all could be read, and where the GPU or
    the host has no room, then for all further pieces of the job: reading block by block works and takes longer, or says
    what is wrong. What spare chunks took of the device's memory is free by then.
    """
    if _no_room.is_set():
        return None
    prepare()
    try:
        chunks = list(chunks_of(piece.documents, CHUNK_NBYTES))
        sign = partial(_sign_chunk, piece, signing, partial(run_all, readers), threads, signatures=signatures)
        found = _all_signed(chunks, sign, check)
        check_as_listed(piece.documents)
        return _found_in(piece, chunks, found), found
    except (_TooLong, _TooMany, _NotRead):
        pass
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        _tell_once(memory_that_ran_out(error))
    # Here, and not above: the frames of an error hold the memory of its chunk.
    _free_spares()
    return None


def _tell_once(where: str) -> None:
    """Remember, for this job, that there was no room, and say so unless another piece has."""
    with _telling:
        if _no_room.is_set():
            return
        _no_room.set()
    logger.warning(
        "no room to sign lines by chunks of %s in the memory of the %s: they are read block by block",
        format_nbytes(CHUNK_NBYTES),
        where,
    )


def _free_spares() -> None:
    """Free what chunks took of the device's memory: whoever reads block by block needs some of it."""
    _spare_signers.free()
    free_texts()
    cuda.current_context().memory_manager.deallocations.clear()  # Numba only queues what is to be freed


def _all_signed(
    chunks: Sequence[list[Span]], sign: Callable[[list[Span]], SignedChunk], check: Callable[[], None]
) -> list[SignedChunk]:
    """Sign chunks, each begun once one of those before it has ended; the first that fails ends all."""
    left, taking = iter(range(len(chunks))), threading.Lock()
    found: dict[int, SignedChunk] = {}
    failed = threading.Event()

    def some() -> None:
        while not failed.is_set():
            with taking:
                number = next(left, None)
            if number is None:
                return
            try:
                check()
                found[number] = sign(chunks[number])
            except BaseException:
                failed.set()
                raise

    run_all(pool(), [some] * min(CHUNKS, len(chunks)))
    return [found[number] for number in range(len(chunks))]


def _sign_chunk(
    piece: Piece, way: Signing, run: Run, threads: int, spans: list[Span], *, signatures: bool
) -> SignedChunk:
    lengths = np.array([span.stop - span.start for span in spans], np.int64)
    nbytes = int(lengths.sum())
    with borrowed_memory(nbytes + device_digests.SLACK) as text, _borrowed(way) as signer:
        try:
            reading = _bring(piece, spans, text, run, threads)
        finally:
            signer.follow_uploads()
        brought = time.perf_counter()
        lines = signer.lines(text, lengths)
        digests = signer.digests(text, lines)
        signs = tuple(signer.signs(text, lines, signatures=signatures))
    signing = time.perf_counter() - brought
    return SignedChunk(lines.counts, lines.ends - lines.edges[:-1], digests, signs, reading, signing)


def _bring(piece: Piece, spans: Sequence[Span], text: Any, run: Run, threads: int) -> float:
    """Bring spans to device memory, one behind the other; returns once copies of all are under way, with the seconds
    that threads read."""
    place, base = 0, address(text)
    wanted = []
    for span in spans:
        length = span.stop - span.start
        path = os.fspath(piece.documents[span.place].path)
        wanted.append(Rectangle(path, span.start, ANY_LENGTH, 1, length, length, base + place, length))
        place += length
    neighbours = max(1, usable_cores() // max(1, threads))
    upload = Upload(wanted, move_nbytes(threads, neighbours), min(READERS, threads))
    seconds = _moved(upload, run, min(READERS, threads, upload.blocks))
    if upload.failed():
        raise _NotRead
    return seconds


def _moved(upload: Upload, run: Run, threads: int) -> float:
    """Have threads carry out an upload; the seconds that they read."""

    def move() -> tuple[float, float]:
        with borrowed_lane() as lane:
            return lane.move(upload)

    return sum(reading for reading, _ in run([move] * threads))


def _found_in(piece: Piece, chunks: Sequence[list[Span]], signed: Sequence[SignedChunk]) -> Found:
    """The lines of all chunks as documents."""
    found, before = Found(True), np.zeros(len(piece.documents), np.int64)
    for spans, each in zip(chunks, signed, strict=True):
        for span, count in zip(spans, each.counts.tolist(), strict=True):
            if count:
                first = int(before[span.place]) + 1
                found.place = span.place
                found.ended("", count, numbers=np.arange(first, first + count))
                before[span.place] += count
    return found
