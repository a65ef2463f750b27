"""How whole lines of large plain files come to a GPU: a chunk of them is brought there as it lies in the files, by
loops that do not hold the interpreter's lock, while others are worked on.

Reading lines block by block takes each block some dozen turns with the interpreter's lock, at which all threads that
read wait for each other. Here the host only reads. What is done with a chunk is its user's: `fields.py` beside this
counts a field of JSON lines, `duplicates/lines_on_gpu.py` signs lines.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numba import cuda

from tilewright.kernels.cpu.loops import usable_cores
from tilewright.kernels.gpu.device_array import address
from tilewright.kernels.gpu.lock_keeping import LockKeepingStream
from tilewright.kernels.gpu.transfer import upload_stream
from tilewright.kernels.numbers import format_nbytes, round_up
from tilewright.pipeline.advance import advanced
from tilewright.pipeline.text.corpus import Document, Piece, read_range
from tilewright.pipeline.text.formats.listing import head_of
from tilewright.pipeline.text.formats.recognition import container_named, recognised, unopened
from tilewright.pipeline.text.gpu.lanes import borrowed_lane, free_texts
from tilewright.pipeline.text.gpu.room import (
    CHUNK_NBYTES,
    CHUNKS,
    MOST_LINE_NBYTES,
    MOST_LINES,
    MOST_SPANS,
    are_large,
)
from tilewright.pipeline.threads import run_all
from tilewright.pipeline.transfer import file_upload
from tilewright.pipeline.transfer.file_rectangles import ANY_LENGTH, Rectangle
from tilewright.pipeline.transfer.file_upload import Upload
from tilewright.pipeline.transfer.lane import Spares, forgotten_with_memory, untimed_event
from tilewright.pipeline.transfer.lane_blocks import move_nbytes

Result = TypeVar("Result")
Worker = TypeVar("Worker")

READERS = 4
"""Threads that bring a chunk together. With all threads for one chunk after the other, sixteen, each chunk took 8 ms to
come: they had to be started anew, and each takes turns with the interpreter's lock for that."""
LOOK_NBYTES = 2**16
"""What is read at a time to find the end of a line at which a file may be cut."""

Run = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Makes calls on the threads of the process that read, and returns what each does."""


class UnfitError(Exception):
    """A piece does not come by chunks: another way to read it deals with it, or says what is wrong."""

    why: str
    """What is told of it, behind how it is read instead."""

    def __init__(self, name: str, why: str = "") -> None:
        """name: of the file for which it does not. why: unless it is the class's."""
        self.why = why or self.why
        super().__init__(name, self.why)
        self.name = name


AT_ONCE = f"{format_nbytes(CHUNK_NBYTES)} or less"
"""A chunk, as it is told."""


class TooLongError(UnfitError):
    """There is a line of more than `room.MOST_LINE_NBYTES`."""

    why = f"a line of more than {format_nbytes(MOST_LINE_NBYTES)}"


class TooManyError(UnfitError):
    """There are more lines in a chunk than `room.MOST_LINES`."""

    why = f"more than {MOST_LINES} lines in {AT_ONCE}"


class NotReadError(UnfitError):
    """Not all of a chunk could be read."""

    why = "not all of it could be read for the GPU"


WITH_OTHERS = "with all that came in a piece with it"
"""Told of what is done with a piece for one of its files."""
SMALLER = "with a smaller tilewright.piece-nbytes, fewer files come with it"
"""What changes that."""


class UploadsFollowed:
    """Has a stream wait for what is sent to texts."""

    def __init__(self, stream: Any) -> None:
        self._uploads, self._uploaded = LockKeepingStream(upload_stream()), untimed_event()
        self._stream = LockKeepingStream(stream)

    def follow(self) -> None:
        """For everything sent so far."""
        self._uploads.record(self._uploaded)
        self._stream.follow(self._uploaded)


@contextmanager
def borrowed(spares: Spares[Worker], of: Any) -> Iterator[Worker]:
    """One of those that work on a chunk at a time, each on its own ``stream``, that is made from ``of``."""
    cuda.current_context()  # attaches the thread to the GPU
    worker: Any = spares.take(of)
    try:
        yield worker
    finally:
        worker.stream.synchronize()  # after a failure, kernels may still be at work in its memory
        spares.put(worker, of)


class Span(NamedTuple):
    """Whole lines of a file."""

    place: int
    """Of the file in its piece."""
    start: int
    stop: int
    """In its bytes."""

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def are_large_and_plain(piece: Piece) -> bool:
    """Whether the documents of a piece are large plain files, by a look at each one's first bytes."""
    return file_upload.available() and are_large(piece) and all(map(_is_plain, piece.documents))


def _is_plain(document: Document) -> bool:
    """Whether nothing but its text is to be said of a file."""
    head = head_of(document.path)
    known = recognised(head, document.name) or unopened(head) or container_named(document.name)
    return known is None


def chunks_of(
    documents: Sequence[Document], nbytes: int, starts: Sequence[int] | None = None
) -> Iterator[list[Span]]:
    """The bytes of documents, in order, in chunks of about ``nbytes``, and of `MOST_SPANS` at most, cut behind lines.
    starts: where each begins, if not with its first byte. Raises TooLongError, with the document's name, where there is
    no such place."""
    chunk: list[Span] = []
    room = nbytes
    for place, document in enumerate(documents):
        start = 0 if starts is None else starts[place]
        while start < document.nbytes:
            stop = document.nbytes
            if stop - start > room:
                stop = _behind_a_line(document, start + room)
            chunk.append(Span(place, start, stop))
            room -= stop - start
            start = stop
            if room <= 0 or len(chunk) == MOST_SPANS:
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
        raise TooLongError(document.name)
    return document.nbytes


def places_of(spans: Sequence[Span], alignment: int = 1) -> tuple[list[int], int]:
    """Where spans lie in a text, one behind the other, each at a multiple of ``alignment``, and how long that is."""
    places, place = [], 0
    for span in spans:
        places.append(place)
        place = round_up(place + span.nbytes, alignment)
    return places, place


def bring(
    piece: Piece, spans: Sequence[Span], places: Sequence[int], text: Any, run: Run, threads: int
) -> float:
    """Bring spans to their places in device memory; returns once copies of all are under way, with the seconds that
    threads read. threads: how many of the process read. Raises NotReadError, with a document's name."""
    base = address(text)
    wanted = [
        Rectangle(
            os.fspath(piece.documents[span.place].path),
            span.start,
            ANY_LENGTH,
            1,
            span.nbytes,
            span.nbytes,
            base + place,
            span.nbytes,
        )
        for span, place in zip(spans, places, strict=True)
    ]
    neighbours = max(1, usable_cores() // max(1, threads))
    upload = Upload(wanted, move_nbytes(threads, neighbours), min(READERS, threads))
    seconds = _moved(upload, run, min(READERS, threads, upload.blocks))
    if failed := upload.failed():
        raise NotReadError(piece.documents[spans[failed[0]].place].name)
    for span in spans:
        advanced(piece.documents[span.place].path, span.nbytes)
    return seconds


def _moved(upload: Upload, run: Run, threads: int) -> float:
    """Have threads carry out an upload; the seconds that they read."""

    def move() -> tuple[float, float]:
        with borrowed_lane() as lane:
            return lane.move(upload)

    return sum(reading for reading, _ in run([move] * threads))


@lru_cache(maxsize=1)
def pool() -> ThreadPoolExecutor:
    """Threads that have chunks brought and worked on: not those that read, for which they wait."""
    return ThreadPoolExecutor(CHUNKS, thread_name_prefix="tilewright-text-chunk")


def all_done(
    chunks: Sequence[list[Span]], work: Callable[[list[Span]], Result], check: Callable[[], None]
) -> list[Result]:
    """Work on chunks, each begun once one of those before it has ended; the first that fails ends all. check: is called
    for each chunk, and may end it."""
    left, taking = iter(range(len(chunks))), threading.Lock()
    found: dict[int, Result] = {}
    failed = threading.Event()

    def some() -> None:
        while not failed.is_set():
            with taking:
                number = next(left, None)
            if number is None:
                return
            try:
                check()
                found[number] = work(chunks[number])
            except BaseException:
                failed.set()
                raise

    run_all(pool(), [some] * min(CHUNKS, len(chunks)))
    return [found[number] for number in range(len(chunks))]


no_room = threading.Event()
"""There was no room for chunks: the pieces of this job are read block by block, and those of another try again."""
_telling = threading.Lock()
forgotten_with_memory(no_room.clear)


def given_up(where: str) -> str | None:
    """Remember, for this job, that there was no room. Returns what is told of the piece for which there was none,
    behind how it is read instead; None where another piece was the first. where: as `memory_that_ran_out` says it."""
    with _telling:
        if no_room.is_set():
            return None
        no_room.set()
    return (
        f"with all pieces of this worker from then on: no room for chunks of {format_nbytes(CHUNK_NBYTES)} in the"
        f" memory of the {where} (free some of it, or run fewer tasks at once: threads_per_worker, in a profile)"
    )


def free_spares(spares: Spares[Any]) -> None:
    """Free what chunks took of the device's memory: whoever reads block by block needs some of it."""
    spares.free()
    free_texts()
    cuda.current_context().memory_manager.deallocations.clear()  # Numba only queues what is to be freed
