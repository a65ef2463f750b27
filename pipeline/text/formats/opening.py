"""A document opened: what it is, is told by its first bytes, and it is decoded and split layer by layer.

A file is a compressor's, or not; then a container, or not; its members may again be compressed. What is left is a text,
in some encoding, and the documents are the text itself, its lines or paragraphs, or the fields of its JSON lines. So
every combination works, as deep as one container in a compressor. What lies deeper is counted as it is stored, and told
of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from tilewright.pipeline.errors import MalformedDocumentError
from tilewright.pipeline.text.corpus import (
    STEP_NBYTES,
    Document,
    Look,
    check_as_listed,
    read_range,
    reader,
)
from tilewright.pipeline.text.formats import decompress, parallel, tar, warc, zipped
from tilewright.pipeline.text.formats.decompress import Fill
from tilewright.pipeline.text.formats.encodings import Decoded
from tilewright.pipeline.text.formats.json_lines import JsonLines
from tilewright.pipeline.text.formats.reading import Reading, has_hidden
from tilewright.pipeline.text.formats.recognition import (
    ARROW_STREAM,
    CONTAINERS,
    ENCODINGS,
    HEAD_NBYTES,
    PARQUET,
    TAR,
    WARC,
    ZIP,
    codec_named,
    container_named,
    holds_objects,
    recognised,
    unopened,
    unread_table_named,
    without_codec,
)
from tilewright.pipeline.text.formats.sources import (
    Chain,
    ContentError,
    Found,
    Head,
    Passages,
    Source,
    Whole,
    never_lost,
)
from tilewright.pipeline.text.formats.tables import StreamFile, Table

PLAIN_TEXT = "plain text, of which no field is read: a whole document (--exclude leaves it out)"

LEAVE_OUT = "restore it, or leave it out (--exclude)"

FIRST_NBYTES = 2**16
"""What is read of a document to look at its first bytes: all of a small one, so that it is read by one call."""


def documents_of(document: Document, reading: Reading, found: Found, look: Look | None = None) -> Source:
    """The documents that a file consists of, from its beginning to its end.

    Raises, while it is read
    ------------------------
    CorpusError, DocumentError, CompressedError
        As `corpus.reader` does.
    MalformedDocumentError
        What the file holds is not what its form says.
    """
    if reading.raw:
        return Whole(stored(document, 0, document.nbytes, look), found)
    return _Opened(document, Chain(_layers(document, reading, found, look)))


def stored(document: Document, start: int, stop: int, look: Look | None) -> Fill:
    """A range of a file's bytes as they are stored."""
    done = start

    def fill(target: np.ndarray) -> int:
        nonlocal done
        step = min(len(target), stop - done)
        read_range(document, done, done + step, target[:step], look)
        done += step
        return step

    return fill


class _Opened:
    """A document's source, whose errors name it."""

    def __init__(self, document: Document, source: Source) -> None:
        self._document, self._source = document, source

    def fill(self, target: np.ndarray, gap: int, most: int) -> tuple[int, np.ndarray]:
        try:
            return self._source.fill(target, gap, most)
        except ContentError as error:
            check_as_listed([self._document])  # damage that is none: half of it is of another file
            raise MalformedDocumentError(
                f"{self._document.name}{error.where}: {error.what}; {error.remedy}"
            ) from error


def _layers(document: Document, reading: Reading, found: Found, look: Look | None) -> Iterator[Source]:
    """The sources of a file's documents, one behind the other."""
    first = Head(stored(document, 0, document.nbytes, None), FIRST_NBYTES)
    head = first.bytes(HEAD_NBYTES)
    form = recognised(head, document.name)
    codec = _codec(form, document.name)
    name = document.name
    if codec is not None:
        alone = partial(found.remark, parallel.by_one_thread(codec), name)
        fill: Fill = reader(document, look, codec, reading.window_nbytes, reading.threads, alone)
        yield from _text(_Layer(name, without_codec(name), "", fill, (codec,)), reading, found)
        return
    if form == ZIP or (form in CONTAINERS and form not in (TAR, WARC, ARROW_STREAM) and reading.fields):
        if form == ZIP:
            yield from _members(name, zipped.members(document), reading, found)
        else:
            yield Table(form, zipped.stored_file(document), found, "", reading, name)
        if look is not None:  # nothing of it was read in order
            memory = np.empty(min(STEP_NBYTES, document.nbytes), np.uint8)
            for start in range(0, document.nbytes, STEP_NBYTES):
                stop = min(start + STEP_NBYTES, document.nbytes)
                read_range(document, start, stop, memory[: stop - start], look)
        return
    plain = (
        _seen(first.fill, look)
        if document.nbytes <= FIRST_NBYTES
        else stored(document, 0, document.nbytes, look)
    )
    yield from _text(_Layer(name, name, "", plain, ()), reading, found)


def _seen(fill: Fill, look: Look | None) -> Fill:
    if look is None:
        return fill

    def seen(target: np.ndarray) -> int:
        got = fill(target)
        look(target[:got].data)
        return got

    return seen


def _codec(form: str | None, name: str) -> str | None:
    """The codec of a text that begins as ``form`` does. Where no form is recognised, the name decides: if it is wrong,
    the text is damaged, or misnamed."""
    if form is None:
        return codec_named(name)
    return form if form in decompress.CODEC_NAMES else None


class _Layer:
    """A text, and what is around it."""

    def __init__(self, shown: str, name: str, member: str, fill: Fill, around: tuple[str, ...]) -> None:
        self.shown = shown
        """As the user sees it: file and member."""
        self.name = name
        """By which its form is told: the last ending is that of the text itself."""
        self.member = member
        self.fill = fill
        self.around = around
        """Codecs and containers."""

    @property
    def in_container(self) -> bool:
        return any(each in CONTAINERS for each in self.around)


def _text(layer: _Layer, reading: Reading, found: Found) -> Iterator[Source]:
    """What a text holds that is no more compressed."""
    head = Head(layer.fill, HEAD_NBYTES)
    first = head.bytes(HEAD_NBYTES)
    form = recognised(first, layer.name)
    if form in (TAR, WARC) and not layer.in_container:
        if form == TAR:
            yield from _members(
                layer.shown, tar.members(head.fill, found, layer.shown), reading, found, layer.around
            )
        elif not (reading.fields or reading.split_on or reading.encoding):
            yield warc.Records(head.fill, found, layer.shown, reading.id_field, reading.buffer_nbytes)
        else:
            # Beside fields, the identifier is one of theirs.
            records = warc.records(
                head.fill, found, layer.shown, reading.id_field, all_lack=bool(reading.fields)
            )
            for number, identifier, fill in records:
                record = f"{layer.shown}:{number}"
                yield from _documents(
                    fill, str(number), identifier, _decoding(None, reading), reading, found, record, ""
                )
        return
    if form == ARROW_STREAM and reading.fields:
        yield Table(form, StreamFile(head.fill), found, layer.member, reading, layer.shown)
        return
    encoding = _decoding(form, reading)
    if form is not None and form not in ENCODINGS:
        if reading.fields:
            what = CONTAINERS.get(form, form)
            within = " in ".join(("", *(CONTAINERS.get(each, each) for each in reversed(layer.around))))
            raise ContentError(
                f"it is {what}{within}, of which no field is read",
                "unpack what is around it, or leave it out",
            )
        _tell(form, layer, reading, found)
    elif (known := unopened(first)) is not None:
        if reading.fields:
            raise ContentError(f"it is like {known}, of which no field is read", LEAVE_OUT)
        found.remark(f"like {known}, counted as stored bytes", layer.shown)
    elif form is None and (named := container_named(layer.name)) is not None:
        if reading.fields and first:
            raise ContentError(f"it is named like {CONTAINERS[named]}, and is no such thing", LEAVE_OUT)
        if reading.fields:
            found.remark(
                f"named like {CONTAINERS[named]}, and has no bytes: nothing of it counts", layer.shown
            )
            return
        found.remark(
            f"named like {CONTAINERS[named]}, but no such thing: counted as stored bytes", layer.shown
        )
    elif reading.fields and (table := unread_table_named(layer.name)) is not None:
        raise ContentError(
            f"it is {table} by its name, of which no field is read",
            "make it Parquet or JSON lines, leave it out (--exclude), or name it otherwise if it is a plain text",
        )
    yield from _documents(head.fill, layer.member, None, encoding, reading, found, layer.shown, layer.name)


def _tell(form: str, layer: _Layer, reading: Reading, found: Found) -> None:
    what = CONTAINERS.get(form, f"something compressed by {form}")
    if form == PARQUET or form.startswith("arrow"):
        told = f"like {what}, counted as stored bytes: name a column (--field) to count its texts"
    else:
        told = f"like {what} within {CONTAINERS.get(layer.around[-1], layer.around[-1])}, counted as stored bytes"
    found.remark(told, layer.shown)


def _decoding(form: str | None, reading: Reading) -> str | None:
    """The encoding that a text is decoded from; None for one that is counted as it is."""
    return reading.encoding or (form if form is not None and form in ENCODINGS else None)


def _documents(
    fill: Fill,
    member: str,
    identifier: str | None,
    encoding: str | None,
    reading: Reading,
    found: Found,
    shown: str,
    name: str,
) -> Iterator[Source]:
    """The documents of a text. shown: the file and the member that it is, as the user sees them. name: by which its
    form is told, without the ending of a codec."""
    lost: Callable[[], int] = never_lost
    if encoding is not None:
        decoded = Decoded(fill, encoding)
        fill, lost = decoded.fill, lambda: decoded.lost
    if reading.fields:
        head = Head(fill, HEAD_NBYTES)
        if holds_objects(head.bytes(HEAD_NBYTES), name):
            yield JsonLines(head.fill, found, member, reading, shown)
            found.lost += lost()
            return
        fill = head.fill
        found.remark(PLAIN_TEXT, shown)
    elif reading.split_on is not None:
        yield Passages(fill, found, member, reading.split_on, lost, reading.buffer_nbytes)
        return
    yield Whole(fill, found, member, identifier, lost)


def _members(
    name: str,
    members: Iterator[tuple[str, Fill]],
    reading: Reading,
    found: Found,
    around: tuple[str, ...] = (),
) -> Iterator[Source]:
    """The documents of an archive's members that are to be counted."""
    for path, fill in members:
        path = path.replace("\0", "\ufffd")
        shown = f"{name}:{path}"
        inner = os.path.normpath(path).lstrip("/")
        if has_hidden(inner):
            found.remark("hidden members of archives not counted", shown)
            continue
        if not reading.takes(inner):
            found.remark("members of archives not counted, by include and exclude", shown)
            continue
        yield _Member(path, _text_of_member(path, shown, fill, reading, found, (*around, TAR)))


def _text_of_member(
    path: str, shown: str, fill: Fill, reading: Reading, found: Found, around: tuple[str, ...]
) -> Iterator[Source]:
    head = Head(fill, HEAD_NBYTES)
    form = recognised(head.bytes(HEAD_NBYTES), path)
    codec = _codec(form, path)
    text: Fill = head.fill
    name = path
    if codec is not None:
        text, name = decompress.reader(codec, _blocks(head.fill), reading.window_nbytes), without_codec(path)
        around = (*around, codec)
    yield from _text(_Layer(shown, name, path, text, around), reading, found)


def _blocks(fill: Fill) -> Iterator[memoryview]:
    memory = np.empty(2**18, np.uint8)
    while got := fill(memory):
        yield memory[:got].data


class _Member:
    """The documents of a member, whose errors name it."""

    def __init__(self, path: str, sources: Iterator[Source]) -> None:
        self._path, self._chain = path, Chain(sources)

    def fill(self, target: np.ndarray, gap: int, most: int) -> tuple[int, np.ndarray]:
        try:
            return self._chain.fill(target, gap, most)
        except ContentError as error:
            if error.where.startswith(f":{self._path}"):
                raise
            raise error.within(self._path) from error
        except decompress.ERRORS as error:
            raise ContentError(
                f"it cannot be decompressed: {error}",
                "restore the file, or leave it out",
                f":{self._path}",
            ) from error
