"""How a field of large plain files of JSON lines is counted on a GPU: a chunk of their lines is brought there at a time
(`chunks.py`), the field's texts are found and decoded one behind the other, and these are counted as one text, while
other chunks are brought.

What the kernel does not decide is read from the files again and left to the loop on the cores, line by line; where that
finds a fault, or there is much of it, all of the piece is read on the cores. So all errors are theirs.

A chunk takes its length twice of the device's memory, as stored and decoded, and 8 bytes for each line
(`room.fields_nbytes`). Of words the decoded texts of all chunks of a piece lie together (`room.words_nbytes`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numba import cuda

from tilewright.kernels.gpu.memory import is_out_of_memory, memory_that_ran_out
from tilewright.kernels.gpu.transfer import download
from tilewright.kernels.histograms.select import add_counts, clear
from tilewright.kernels.histograms.token_counting import TokenCounts
from tilewright.kernels.histograms.token_kinds import TokenKind
from tilewright.kernels.histograms.tokens import Kind
from tilewright.kernels.records import device_json
from tilewright.kernels.records.device_json import (
    ALIGNMENT,
    LEAD,
    SLACK,
    UNDECIDED,
    TextFinder,
    Texts,
    TooManyLinesError,
)
from tilewright.kernels.records.span_numbers import MOST_UNDECIDED, ROW_LENGTH
from tilewright.pipeline.text.blocks import Block
from tilewright.pipeline.text.corpus import Piece, check_as_listed, read_range
from tilewright.pipeline.text.formats.json_lines import Records, texts_of, without_fields
from tilewright.pipeline.text.formats.listing import head_of
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.recognition import holds_objects, unread_table_named
from tilewright.pipeline.text.formats.sources import SEPARATOR, Found, Remark, Remarks
from tilewright.pipeline.text.gpu import chunks
from tilewright.pipeline.text.gpu.chunks import Span
from tilewright.pipeline.text.gpu.lanes import Tally, borrowed_memory
from tilewright.pipeline.text.gpu.lanes import prepare as prepare_counting
from tilewright.pipeline.text.gpu.room import (
    MOST_LINES,
    MOST_WORDS_NBYTES,
    even_nbytes,
    may_be_fields,
)
from tilewright.pipeline.text.gpu.texts import ordering_table
from tilewright.pipeline.threads import run_all
from tilewright.pipeline.transfer import file_upload
from tilewright.pipeline.transfer.lane import Spares

Result = TypeVar("Result")

NOTHING = np.empty((0, 2), np.int64)

_CORES = "left to the cores of the GPU's worker"
_UNUSUAL = f"keys with escapes, or nested more than {device_json.DEEPEST} deep"
BY_CORES = f"{_CORES}: {_UNUSUAL}"
"""What is told of the records that no GPU decides."""

UNUSUAL = f"more than {MOST_UNDECIDED} lines in {chunks.AT_ONCE} with faults, {_UNUSUAL}"
FAULT = "a line that is no JSON, or whose field holds no text"
LACKING = "no record that has the field"
"""Why the cores, who know what is wrong with a line, read a piece, beside the reasons of `chunks`. The same of all
files, so that it is told once a run."""


def left_to_cores(why: str) -> str:
    """What is told of the file for which the cores read a piece."""
    return f"{_CORES}, {chunks.WITH_OTHERS}: {why} ({chunks.SMALLER})"


@dataclass(frozen=True, eq=False)
class FieldCounts:
    """What was found of a piece, beside what was added to the tally."""

    found: Found
    nbytes: int
    """Of its documents, decoded."""
    of_separators: np.ndarray
    """int64[(n, 2)]: bins that separators took part in, of which one may stand there several times, and how often: so
    much too much was counted."""
    blocks: list[Block]
    """The documents that no GPU decided, which are not counted yet, each with its separator if there is a gap."""
    reading: float
    counting: float
    """Seconds that threads read, and that the rest took once all of a chunk was read."""


@dataclass(frozen=True, eq=False)
class _Counted:
    """The same of one chunk."""

    texts: Texts
    left: list[tuple[int, Records]]
    """Of files, by their places, what the cores found."""
    of_separators: np.ndarray
    reading: float
    counting: float


class _ChunkFinder(TextFinder):
    """Finds the texts of one chunk at a time."""

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.uploads = chunks.UploadsFollowed(self.stream)


_spare_finders: Spares[_ChunkFinder] = Spares(_ChunkFinder, pinned=False)
_preparing = threading.Lock()


def fit(piece: Piece, reading: Reading) -> bool:
    """Whether the documents of a piece are the texts of one field of large plain files of JSON lines, by a look at each
    file's first bytes."""
    return (
        may_be_fields(piece, reading)
        and chunks.are_large_and_plain(piece)
        and all(
            holds_objects(head_of(document.path), document.name) and not unread_table_named(document.name)
            for document in piece.documents
        )
    )


def prepare() -> None:
    """Compile and load the kernels beside those that count, and the loop; one thread at a time does."""
    with _preparing:
        cuda.current_context()
        file_upload.prepare()
        device_json.prepare()


def count_fields(
    piece: Piece,
    field: str,
    kind: Kind,
    gap: int,
    tally: Tally,
    readers: Executor,
    threads: int,
    check: Callable[[], None],
    left: Remarks,
) -> FieldCounts | None:
    """Add the texts of a field of all lines of a piece that is `fit` to a tally. gap: 1 where tokens span bytes, else
    0. readers: a pool of so many threads that read. check: is called for each chunk, and may end it. left: gets what is
    to be told where the cores have to read the piece.

    Returns None, with nothing in the tally, where a line has a fault or is too long, where a chunk has too many lines
    or too much that no GPU decides, where not all could be read, and where the GPU or the host has no room, then for
    all further pieces of the job. Reading on the cores works and takes longer, or says what is wrong.
    """

    def count() -> FieldCounts:
        cut = _cut(piece)
        work = partial(_count_chunk, piece, field, kind, gap, tally, partial(run_all, readers), threads)
        counted = chunks.all_done(cut, work, check)
        check_as_listed(piece.documents)
        found = _together(piece, field, gap, cut, counted)
        return replace(
            found, of_separators=np.concatenate([NOTHING, *(each.of_separators for each in counted)])
        )

    found = _unless_left_to_cores(piece, left, count)
    if found is None:
        tally.clear()
    return found


def count_field_words(
    piece: Piece,
    field: str,
    kind: TokenKind,
    readers: Executor,
    threads: int,
    neighbours: int,
    check: Callable[[], None],
    left: Remarks,
) -> tuple[FieldCounts, TokenCounts, int] | None:
    """Count the words of a field of all lines of a piece that is `fit`: what was found, the words of what the GPU
    decided, and how many U+FFFD stand for malformed bytes there. Zeros belong to no word, so texts with zeros between
    them have the words that they have by themselves.

    As many chunks as there is room for at once have their texts put into one memory, and are counted together, since
    each count ends with a list. neighbours: workers on this host, this one included. All else as of `count_fields`.
    """
    run = partial(run_all, readers)

    def count() -> tuple[FieldCounts, TokenCounts, int]:
        cut, counted, clock, counting = _cut(piece), list[_Counted](), 0.0, 0.0
        prepare_counting(kind)
        with ordering_table(kind, neighbours) as tally:
            for group in _groups(cut, MOST_WORDS_NBYTES - LEAD):
                nbytes = sum(chunks.places_of(spans, ALIGNMENT)[1] for spans in group)
                with borrowed_memory(LEAD + nbytes) as out:
                    cursor = cuda.device_array(1, np.int64)
                    clear(cursor, tally.stream)
                    clear(out[:LEAD], tally.stream)
                    tally.stream.synchronize()  # before others write there

                    def find(spans: list[Span], out: Any = out, cursor: Any = cursor) -> _Counted:
                        with chunks.borrowed(_spare_finders, field) as finder:
                            return _find_chunk(
                                piece, field, 0, run, threads, finder, out, spans, cursor=cursor
                            )

                    counted += chunks.all_done(group, find, check)
                    clock = time.perf_counter()
                    filled = LEAD + int(download(cursor, tally.stream)[0])
                    edges = np.array([0, filled])
                    tally.counter.count(out, edges, 0, filled, partial(_reading_from, out, filled))
                    counting += time.perf_counter() - clock
            check_as_listed(piece.documents)
            lost, words = tally.counter.lost, tally.counter.take()
        found = _together(piece, field, 0, cut, counted)
        return replace(found, counting=found.counting + counting), words, lost

    return _unless_left_to_cores(piece, left, count)


def _groups(cut: Sequence[list[Span]], nbytes: int) -> Iterator[list[list[Span]]]:
    """Chunks, in order, in groups of at most so many bytes."""
    group: list[list[Span]] = []
    room = nbytes
    for spans in cut:
        length = chunks.places_of(spans, ALIGNMENT)[1]
        if group and length > room:
            yield group
            group, room = [], nbytes
        group.append(spans)
        room -= length
    if group:
        yield group


def _reading_from(out: Any, stop: int, at: int) -> Callable[[int], np.ndarray]:
    """A function that brings what lies in device memory from a byte on, n bytes further with each call."""

    def more(nbytes: int) -> np.ndarray:
        nonlocal at
        end = min(at + nbytes, stop)
        data: np.ndarray = out[at:end].copy_to_host() if at < end else np.empty(0, np.uint8)
        at = end
        return data

    return more


def _cut(piece: Piece) -> list[list[Span]]:
    """The chunks of a piece."""
    starts = [len(_mark(document.path)) for document in piece.documents]
    return list(chunks.chunks_of(piece.documents, even_nbytes(piece.nbytes), starts))


def _unless_left_to_cores(piece: Piece, left: Remarks, count: Callable[[], Result]) -> Result | None:
    """What a call gives; None where the cores have to read the piece. left: gets what is to be told of that."""
    if chunks.no_room.is_set():
        return None
    prepare()
    try:
        return count()
    except chunks.UnfitError as error:
        left[left_to_cores(error.why)] = Remark(1, error.name)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if (why := chunks.given_up(memory_that_ran_out(error))) is not None:
            left[f"{_CORES}, {why}"] = Remark(1, piece.documents[0].name)
    # Here, and not above: the frames of an error hold the memory of its chunk.
    chunks.free_spares(_spare_finders)
    return None


def _mark(path: str) -> bytes:
    """UTF-8's byte order mark, if a file begins with it."""
    mark = b"\xef\xbb\xbf"
    return mark if head_of(path, len(mark)) == mark else b""


def _count_chunk(
    piece: Piece,
    field: str,
    kind: Kind,
    gap: int,
    tally: Tally,
    run: chunks.Run,
    threads: int,
    spans: list[Span],
) -> _Counted:
    """Add the texts of a chunk to a tally."""
    _, nbytes = chunks.places_of(spans, ALIGNMENT)
    with borrowed_memory(LEAD + nbytes) as out, chunks.borrowed(_spare_finders, field) as finder:
        pairs = kind.name == "bigram"
        found = _find_chunk(piece, field, gap, run, threads, finder, out, spans, pairs=pairs)
        clock, filled = time.perf_counter(), found.texts.filled
        add_counts(out, 0, filled, 0, filled, kind, tally.counts, finder.stream)
        of_separators = _of_separators(found.texts, kind)
        finder.stream.synchronize()  # all is counted when the memory is another's
    counting = found.counting + time.perf_counter() - clock
    return replace(found, of_separators=of_separators, counting=counting)


def _find_chunk(
    piece: Piece,
    field: str,
    gap: int,
    run: chunks.Run,
    threads: int,
    finder: _ChunkFinder,
    out: Any,
    spans: list[Span],
    **how: Any,
) -> _Counted:
    """Find the texts of a chunk. how: as of `TextFinder.find`."""
    places, nbytes = chunks.places_of(spans, ALIGNMENT)
    with borrowed_memory(nbytes + SLACK + ALIGNMENT) as text:
        try:
            reading = chunks.bring(piece, spans, places, text, run, threads)
        finally:
            finder.uploads.follow()
        brought = time.perf_counter()
        try:
            lying = [(place, span.nbytes) for place, span in zip(places, spans, strict=True)]
            texts = finder.find(text, lying, out, MOST_LINES, **how)
        except TooManyLinesError as error:
            raise chunks.TooManyError(piece.documents[spans[error.args[0]].place].name) from error
        finally:
            finder.stream.synchronize()  # nothing reads the text when it is another's
    left = _left_to_cores(piece, field, gap, spans, texts)
    return _Counted(texts, left, NOTHING, reading, time.perf_counter() - brought)


def _of_separators(texts: Texts, kind: Kind) -> np.ndarray:
    """As `FieldCounts.of_separators`."""
    decoded = int(texts.rows[:, device_json.DECODED].sum())
    if kind.name == "letter":
        return NOTHING
    if kind.name != "bigram":
        return np.array([[SEPARATOR, texts.filled - decoded]])
    values, (first, last) = np.arange(256), texts.ends
    nonempty = int(first.sum())
    # Of all pairs, without those within texts, one is at either end of each that is not empty.
    alone = texts.filled - 1 - (decoded - nonempty) - 2 * nonempty
    bins = np.concatenate([values, values << 8, [SEPARATOR]])
    return np.stack([bins, np.concatenate([first, last, [alone]])], axis=1)


def _left_to_cores(
    piece: Piece, field: str, gap: int, spans: Sequence[Span], texts: Texts
) -> list[tuple[int, Records]]:
    """What the loop on the cores makes of the lines that no GPU decided. Raises chunks.UnfitError where it finds a
    fault in one, or there are too many."""
    many = np.flatnonzero(texts.rows[:, UNDECIDED] > MOST_UNDECIDED)
    if len(many):
        raise chunks.UnfitError(piece.documents[spans[many[0]].place].name, UNUSUAL)
    found = []
    for span, lines in zip(spans, texts.undecided, strict=True):
        if not len(lines):
            continue
        lengths = lines[:, 1] - lines[:, 0] + 1
        edges = np.concatenate([[0], np.cumsum(lengths)])
        data = np.full(edges[-1], 0x0A, np.uint8)
        document = piece.documents[span.place]
        for place, (begin, end) in zip(edges.tolist(), lines.tolist(), strict=False):
            read_range(document, span.start + begin, span.start + end, data[place : place + end - begin])
        records = texts_of(data, field, gap)
        if records is None:
            raise chunks.UnfitError(document.name, FAULT)
        found.append((span.place, records))
    return found


def _together(
    piece: Piece, field: str, gap: int, cut: Sequence[list[Span]], counted: Sequence[_Counted]
) -> FieldCounts:
    """What was found of all chunks. Raises chunks.UnfitError where a file has no record with the field: the error says
    what they have instead."""
    rows = np.zeros((len(piece.documents), ROW_LENGTH), np.int64)
    blocks = []
    by_cores = np.zeros(len(piece.documents), np.int64)
    for spans, each in zip(cut, counted, strict=True):
        np.add.at(rows, [span.place for span in spans], each.texts.rows)
        for place, records in each.left:
            count = len(records.edges) - 1
            blocks.append(Block(records.texts, 0, records.edges, 0, len(records.texts)))
            by_cores[place] += count
            rows[place, device_json.RECORDS] += count
            rows[place, device_json.DECODED] += len(records.texts) - gap * count
            rows[place, device_json.LOST] += records.lost
            rows[place, device_json.WITHOUT] += records.lacking
            rows[place, device_json.NULL] += records.null
    found, nbytes = Found(), int(rows[:, device_json.DECODED].sum())
    for place, document in enumerate(piece.documents):
        found.place = place
        row = rows[place].tolist()
        records, without, null = (
            row[each] for each in (device_json.RECORDS, device_json.WITHOUT, device_json.NULL)
        )
        if records and without == records:
            raise chunks.UnfitError(document.name, LACKING)
        found.ended("", records, lost=row[device_json.LOST])
        without_fields(found, document.name, [field], records, [without], [null])
        found.remark(BY_CORES, document.name, records=int(by_cores[place]))
    return FieldCounts(
        found,
        nbytes,
        NOTHING,
        blocks,
        sum(each.reading for each in counted),
        sum(each.counting for each in counted),
    )
