"""By what is known that a file below a folder was written by Tilewright, and so is no document of a corpus."""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Callable

from tilewright.pipeline.report.style import PROGRAM
from tilewright.pipeline.text.formats.recognition import HEAD_NBYTES
from tilewright.pipeline.transfer.files import open_anything

GROUP_KIND = "tilewright_counts"
"""The attribute by which a group of Zarr with counts is known."""
DUPLICATES_MARK = "tilewright_duplicates"
"""The attribute of what duplicates are written to as Zarr and Parquet."""
SIGNALS_MARK = "tilewright_signals"
"""That of signals."""
_MARKS = (GROUP_KIND, DUPLICATES_MARK, SIGNALS_MARK)
OUR_MARKS = ("tilewright-counts.jsonl", "tilewright-output")
"""Files that mark a folder as Tilewright's: finished pieces of a count, and an output that is not finished."""
METADATA_NBYTES = 2**26
"""The longest metadata of an array that are looked at: they may list documents."""
NPZ_FACTS = "facts"
"""The first array of a .npz with counts: their JSON, as text."""

_JSON = re.compile(
    rb'\{"by": "[^"]*", ("options": \{[^{}]*\}, )?"bins": \d'
    rb'|\{"options": \{"shingle": "\w+", "ngram": \d|\{"options": \{"stop_words": \[|\{"report": \d+, "made": "'
)
_CSV = re.compile(rb"(document,)?bin,label,count\r\n|document,(id,)?byte_count,char_count,")
_MADE_BY = {
    ".png": re.compile(rb"\x89PNG\r\n\x1a\n.{25}.{4}tEXtSoftware\0" + PROGRAM.encode(), re.DOTALL),
    ".svg": re.compile(rb"<\?xml .{,1500}<dc:title>" + PROGRAM.encode(), re.DOTALL),
    ".html": re.compile(
        rb'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="generator" content="'
        + PROGRAM.encode()
    ),
}
_SVG_NBYTES = 2**11
"""First bytes of an SVG in which its maker stands."""
_TAIL_NBYTES = 2**16
"""Bytes at the end of a Parquet file in which a mark is looked for, as it stands behind the columns; and of a PDF, of
which the last object is the one that names its maker."""
_PDF_MADE_BY = f"/Creator ({PROGRAM})".encode()

_BY_HEAD = (".json", ".csv", ".npz", *_MADE_BY)
_BY_TAIL = (".parquet", ".pdf")
ENDINGS = (*_BY_HEAD, *_BY_TAIL)
"""How the names of files end that ``--out``, ``--plot`` and ``--report`` write."""
ENDINGS_AT_URLS = (".json", ".csv", ".npz", ".png", ".svg")
"""Those looked at elsewhere, where each look is a request: a corpus of web pages has many that end in .html, and what
is known by its end takes one that asks for that."""


def nbytes_of_head(name: str) -> int:
    """How many first bytes are looked at of a file with this name."""
    return _SVG_NBYTES if name.endswith(".svg") else HEAD_NBYTES


def is_our_file(name: str, head: Callable[[str, int], bytes], *, is_local: bool) -> bool:
    """Whether a file, whose name ends in one of `ENDINGS`, holds what Tilewright wrote. head: gives so many of its
    first bytes."""
    ending = os.path.splitext(name)[1]
    if not is_local and ending not in ENDINGS_AT_URLS:
        return False
    if ending in _BY_TAIL:
        tail = _tail_of(name)
        if ending == ".pdf":
            return _PDF_MADE_BY in tail
        return any(mark.encode() in tail for mark in _MARKS)
    first = head(name, nbytes_of_head(name))
    if ending == ".npz":
        return _has_facts(first)
    known = {".json": _JSON, ".csv": _CSV, **_MADE_BY}[ending]
    return known.match(first) is not None


def _tail_of(path: str) -> bytes:
    """A file's last bytes; none of one that cannot be read, which is told of when it is counted."""
    try:
        descriptor = open_anything(path)
    except OSError:
        return b""
    try:
        start = max(0, os.fstat(descriptor).st_size - _TAIL_NBYTES)
        return os.pread(descriptor, _TAIL_NBYTES, start)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _has_facts(head: bytes) -> bool:
    """Whether a zip archive begins with the facts of counts, an array of NumPy's that holds one text."""
    name = f"{NPZ_FACTS}.npy".encode()
    if not head.startswith(b"PK\3\4") or head[30 : 30 + len(name)] != name:
        return False
    name_nbytes, extra_nbytes = struct.unpack_from("<HH", head, 26)
    try:
        text = zlib.decompressobj(-zlib.MAX_WBITS).decompress(head[30 + name_nbytes + extra_nbytes :])
    except zlib.error:
        return False
    return any('{"by": "'.encode(f"utf-32-{order}") in text for order in ("le", "be"))


def is_our_array(metadata: bytes) -> bool:
    """Whether an array or a group of Zarr, by its metadata, holds what ``--out`` wrote."""
    try:
        attributes = json.loads(metadata).get("attributes", {})
        return any(mark in attributes for mark in _MARKS) or {"by", "documents", "skipped", "nbytes"} <= set(
            attributes
        )
    except (ValueError, AttributeError, TypeError, RecursionError):
        return False
