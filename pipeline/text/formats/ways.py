"""How each file of a corpus would be read, and which would be refused, by its name and first bytes alone: for plans."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tilewright.pipeline.text.corpus import Document
from tilewright.pipeline.text.formats import decompress
from tilewright.pipeline.text.formats.listing import TEXT, head_of
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.recognition import (
    CONTAINERS,
    ENCODINGS,
    TAR,
    WARC,
    ZIP,
    codec_named,
    container_named,
    holds_objects,
    named_for_objects,
    recognised,
    unopened,
    unread_table_named,
    without_codec,
)

MOST_LOOKED_AT = 10_000
"""Local files whose first bytes are looked at; of more, and of files at URLs, their names and what listing found
decide."""
AS_STORED = "as stored"
WHOLE = "as whole texts, without fields"
_BEGUN = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\{|\Z)")
"""How JSON lines begin."""


@dataclass(frozen=True)
class Way:
    """How several files are read."""

    what: str
    """In words: ``as stored``, ``decompressed by gzip``, ``members of a tar archive``."""
    files: int
    nbytes: int
    """As stored."""


@dataclass(frozen=True)
class Ways:
    """How all files of a corpus are read."""

    ways: tuple[Way, ...]
    """The most bytes first."""
    looked_at: int
    """Files whose first bytes were looked at."""
    refused: tuple[tuple[str, str], ...]
    """Names of files that could not be counted, and why."""


def ways_of(
    documents: Iterable[Document],
    reading: Reading,
    *,
    most: int = MOST_LOOKED_AT,
    head: Callable[[str], bytes] = head_of,
) -> Ways:
    """most: files that are looked at. head: gives a local file's first bytes."""
    files: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    refused: list[tuple[str, str]] = []
    looked_at = 0
    for document in documents:
        first = None
        if document.remote is None and looked_at < most:
            looked_at += 1
            if not os.access(document.path, os.R_OK):
                refused.append((document.name, "this process may not read it"))
                continue
            first = head(document.path) if document.nbytes and not reading.raw else b""
        what, why = _way_of(document, reading, first)
        if why:
            refused.append((document.name, why))
            continue
        files[what] = files.get(what, 0) + 1
        nbytes[what] = nbytes.get(what, 0) + document.nbytes
    found = [Way(what, files[what], nbytes[what]) for what in files]
    found.sort(key=lambda way: (-way.nbytes, -way.files, way.what))
    return Ways(tuple(found), looked_at, tuple(refused))


def _way_of(document: Document, reading: Reading, head: bytes | None) -> tuple[str, str]:
    """How a file is read, and why it is refused, if it is. head: its first bytes; None where nobody looked."""
    if reading.raw or not document.nbytes:
        return AS_STORED, ""
    name = document.name
    form = recognised(head, name) if head is not None else document.codec
    if head is None and form in (None, TEXT):
        form = container_named(name)
    codec = form if form in decompress.CODEC_NAMES else codec_named(name) if form is None else None
    if codec is not None:
        if head is not None and form is None:
            return "", f"its name says {codec}, and its first bytes do not"
        name = without_codec(name)
        inner = container_named(name)
        held = f"{_held_by(inner, reading)}, " if inner in (TAR, WARC) else ""
        return f"{held}decompressed by {codec}{_texts(reading, named_for_objects(name))}", ""
    if form in (ZIP, TAR, WARC) or (form in CONTAINERS and reading.fields):
        return f"{_held_by(form, reading)}{_texts(reading, False) if form in (ZIP, TAR, WARC) else ''}", ""
    if form in ENCODINGS and reading.encoding is None:
        return f"decoded from {ENCODINGS[form]}{_texts(reading, named_for_objects(name))}", ""
    if reading.fields and (table := unread_table_named(name)) is not None:
        return "", f"it is {table} by its name, of which no field is read"
    if head is not None and reading.fields and reading.encoding is None:
        if (what := unopened(head)) is not None:
            return "", f"it is like {what}, of which no field is read"
        if (named := container_named(name)) is not None:
            return "", f"it is named like {CONTAINERS[named]}, and is no such thing"
        if not holds_objects(head, name):
            return WHOLE, ""
        if not _BEGUN.match(head):
            return "", "its first line is no JSON object, and its name says that each is"
    objects = named_for_objects(name) or (head is not None and holds_objects(head, name))
    return (_texts(reading, objects).removeprefix(", ") or AS_STORED), ""


def _held_by(form: str | None, reading: Reading) -> str:
    what = CONTAINERS[form or ZIP]
    if form in (ZIP, TAR):
        return f"members of {what}"
    if form == WARC:
        return f"records of {what}"
    return f"columns of {what}"


def _texts(reading: Reading, objects: bool) -> str:
    """What becomes of a text. objects: whether it is known for JSON lines, where a field is asked for."""
    said = f", decoded from {reading.encoding}" if reading.encoding else ""
    if reading.fields:
        said += ", fields of JSON lines" if objects else ", fields of JSON lines, or whole texts"
    elif reading.split_on:
        said += f", split into {reading.split_on}s"
    return said
