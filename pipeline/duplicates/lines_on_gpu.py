"""How the lines of large plain files are signed on a GPU, where a chunk of them is brought at a time (`chunks.py`):
split, hashed and signed there, while others are brought.

A chunk takes some eight times its length of the device's memory, of characters; nine if it has `room.MOST_LINES`,
nearly all of them empty, beside long ones. Newline, edge, end and digest of each line take 40 bytes of that, and about
as many of the host's: 160 MiB for as many lines as a chunk may have. With lines of 32 bytes, of which it has as many,
it takes four times its length with all else, since few of its characters are signed at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from tilewright.kernels.duplicates import device_digests, device_lines
from tilewright.kernels.duplicates.device_digests import hash_texts
from tilewright.kernels.duplicates.device_lines import Newlines, as_words, newlines_of
from tilewright.kernels.duplicates.device_rooms import Rooms
from tilewright.kernels.duplicates.device_signing import DeviceSigner
from tilewright.kernels.duplicates.signing import Signing, Signs
from tilewright.kernels.gpu.memory import is_out_of_memory, memory_that_ran_out
from tilewright.kernels.gpu.transfer import download
from tilewright.pipeline.duplicates.room import MOST_SIGNED, may_be_lines
from tilewright.pipeline.text.corpus import Piece, check_as_listed
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.sources import Found, Remark, Remarks
from tilewright.pipeline.text.gpu import chunks, room
from tilewright.pipeline.text.gpu.chunks import Span
from tilewright.pipeline.text.gpu.lanes import borrowed_memory
from tilewright.pipeline.threads import run_all
from tilewright.pipeline.transfer import file_upload
from tilewright.pipeline.transfer.lane import Spares

_BY_BLOCKS = "read block by block for the GPU, more slowly"


def by_blocks(why: str) -> str:
    """What is told of the file for which a piece is read block by block."""
    return f"{_BY_BLOCKS}, {chunks.WITH_OTHERS}: {why} ({chunks.SMALLER})"


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
    return may_be_lines(piece, reading) and chunks.are_large_and_plain(piece)


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
        self.uploads = chunks.UploadsFollowed(self.stream)

    def lines(self, text: Any, lengths: np.ndarray, names: Sequence[str]) -> Lines:
        """The lines of spans that lie in device memory, uint8, one behind the other. names: of the files that they are
        of, each. Raises TooManyError, with the longest one's name, and TooLongError."""
        newlines = newlines_of(text, int(lengths.sum()), self._rooms, self.stream, room.MOST_LINES)
        if newlines is None:
            raise chunks.TooManyError(names[int(lengths.argmax())])
        found = lines_of(newlines, lengths)
        if len(found.ends) > room.MOST_LINES:  # the last one of a file needs no newline
            raise chunks.TooManyError(names[int(lengths.argmax())])
        long = np.flatnonzero(found.ends - found.edges[:-1] > chunks.MOST_LINE_NBYTES)
        if len(long):
            raise chunks.TooLongError(names[int(np.searchsorted(np.cumsum(found.counts), long[0], "right"))])
        return found

    def digests(self, text: Any, lines: Lines) -> np.ndarray:
        """XXH3 of lines, uint64[(lines, 2)]."""
        count = len(lines.ends)
        starts = self._rooms.uploaded("starts", lines.edges[:-1], self.stream)
        ends = self._rooms.uploaded("ends", lines.ends, self.stream)
        found = self._rooms.of("digests", 2 * count, np.uint64)
        hash_texts(as_words(text), starts, ends, count, self._secret, found, self.stream)
        return download(found[: 2 * count], self.stream).reshape(-1, 2)

    def signs(self, text: Any, lines: Lines, *, signatures: bool) -> Iterator[Signs]:
        """The signatures of lines, some at a time."""
        for first in range(0, len(lines.ends), MOST_SIGNED):
            last = min(first + MOST_SIGNED, len(lines.ends))
            begin, end = int(lines.edges[first]), int(lines.edges[last])
            edges, ends = lines.edges[first : last + 1] - begin, lines.ends[first:last] - begin
            yield self._signer.sign(
                text[begin:end], None, edges, self.stream, signatures=signatures, ends=ends
            )


_spare_signers: Spares[_ChunkSigner] = Spares(_ChunkSigner, pinned=False)
_preparing = threading.Lock()


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
    left: Remarks,
    *,
    signatures: bool,
) -> tuple[Found, list[SignedChunk]] | None:
    """Sign all lines of a piece that is `fit`. readers: a pool of so many threads that read. check: is called for each
    chunk, and may end it. left: gets what is to be told where the piece has to be read block by block.

    Returns None where a line is too long, where a chunk has too many, where not all could be read, and where the GPU or
    the host has no room, then for all further pieces of the job: reading block by block works and takes longer, or says
    what is wrong. What spare chunks took of the device's memory is free by then.
    """
    if chunks.no_room.is_set():
        return None
    prepare()
    try:
        cut = list(chunks.chunks_of(piece.documents, chunks.CHUNK_NBYTES))
        sign = partial(_sign_chunk, piece, signing, partial(run_all, readers), threads, signatures=signatures)
        found = chunks.all_done(cut, sign, check)
        check_as_listed(piece.documents)
        return _found_in(piece, cut, found), found
    except chunks.UnfitError as error:
        left[by_blocks(error.why)] = Remark(1, error.name)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if (why := chunks.given_up(memory_that_ran_out(error))) is not None:
            left[f"{_BY_BLOCKS}, {why}"] = Remark(1, piece.documents[0].name)
    # Here, and not above: the frames of an error hold the memory of its chunk.
    chunks.free_spares(_spare_signers)
    return None


def _sign_chunk(
    piece: Piece, way: Signing, run: chunks.Run, threads: int, spans: list[Span], *, signatures: bool
) -> SignedChunk:
    lengths = np.array([span.nbytes for span in spans], np.int64)
    places, nbytes = chunks.places_of(spans)
    with (
        borrowed_memory(nbytes + device_digests.SLACK) as text,
        chunks.borrowed(_spare_signers, way) as signer,
    ):
        try:
            reading = chunks.bring(piece, spans, places, text, run, threads)
        finally:
            signer.uploads.follow()
        brought = time.perf_counter()
        lines = signer.lines(text, lengths, [piece.documents[span.place].name for span in spans])
        digests = signer.digests(text, lines)
        signs = tuple(signer.signs(text, lines, signatures=signatures))
    signing = time.perf_counter() - brought
    return SignedChunk(lines.counts, lines.ends - lines.edges[:-1], digests, signs, reading, signing)


def _found_in(piece: Piece, cut: Sequence[list[Span]], signed: Sequence[SignedChunk]) -> Found:
    """The lines of all chunks as documents."""
    found, before = Found(True), np.zeros(len(piece.documents), np.int64)
    for spans, each in zip(cut, signed, strict=True):
        for span, count in zip(spans, each.counts.tolist(), strict=True):
            if count:
                first = int(before[span.place]) + 1
                found.place = span.place
                found.ended("", count, numbers=np.arange(first, first + count))
                before[span.place] += count
    return found
