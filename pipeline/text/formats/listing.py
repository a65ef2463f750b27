"""What of a folder is to be counted, and how a file that is listed is opened."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.kernels.numbers import counted
from tilewright.pipeline import config
from tilewright.pipeline.text.formats.reading import Reading, is_hidden, relative_name
from tilewright.pipeline.text.formats.recognition import (
    CONTAINERS,
    HEAD_NBYTES,
    TAR,
    WARC,
    ZIP,
    codec_named,
    recognised,
    unopened,
)
from tilewright.pipeline.transfer.files import open_anything

TEXT = "text"
"""The codec of a document that is not compressed, as far as is known, and not counted as it is."""

SNIFFED_NBYTES = 2**18
"""Files of so many bytes are opened when they are listed, since what they are decides how they are cut. Smaller ones
are looked at when they are read."""

NAMED = 3
"""The most documents that a notice names."""

_OUTPUT = re.compile(
    rb'\{"by": "[^"]*", ("options": \{[^{}]*\}, )?"bins": \d|(document,)?bin,label,count\r\n'
    rb'|\{"options": \{"shingle": "\w+", "ngram": \d'
)
"""How the files begin that ``--out`` writes."""
DUPLICATES_MARK = "tilewright_duplicates"
"""The attribute of what duplicates are written to as Zarr and Parquet."""
_FOOTER_NBYTES = 2**16
"""Bytes at the end of a Parquet file in which a mark is looked for: it stands behind the columns."""
_OUR_MARKS = ("tilewright-counts.jsonl", "tilewright-output")
"""Files that mark a folder as Tilewright's: finished pieces of a count, and an output that is not finished."""


@dataclass
class LeftOut:
    """How much below the folders of a corpus is not counted."""

    hidden: int = 0
    outputs: int = 0
    unwanted: int = 0

    def choose(self, here: str, folders: list[str], files: list[str], top: str, reading: Reading) -> None:
        """Take out of the names of a folder what is not to be counted. top: the folder that the user named."""
        if here != top and any(mark in files for mark in _OUR_MARKS):
            self.outputs += 1
            folders.clear()
            files.clear()
            return
        kept = [name for name in folders if not is_hidden(name)]
        self.hidden += len(folders) - len(kept)
        outputs = [
            name for name in kept if name.endswith(".zarr") and _is_our_array(os.path.join(here, name))
        ]
        self.outputs += len(outputs)
        folders[:] = [name for name in kept if name not in outputs]
        kept = [name for name in files if not is_hidden(name)]
        self.hidden += len(files) - len(kept)
        if reading.include or reading.exclude:
            wanted = [name for name in kept if reading.takes(relative_name(os.path.join(here, name), top))]
            self.unwanted += len(kept) - len(wanted)
            kept = wanted
        outputs = [
            name
            for name in kept
            if (name.endswith((".json", ".csv")) and _OUTPUT.match(head_of(os.path.join(here, name))))
            or (name.endswith(".parquet") and _is_our_table(os.path.join(here, name)))
        ]
        self.outputs += len(outputs)
        files[:] = [name for name in kept if name not in outputs] if outputs else kept

    def notes(self) -> list[str]:
        return [
            f"{counted(count, noun)} {what}"
            for count, noun, what in (
                (self.hidden, "hidden file or folder", "not counted; name it to count it"),
                (self.outputs, "earlier output", "of Tilewright not counted; name it to count it"),
                (self.unwanted, "file", "left out by include and exclude"),
            )
            if count
        ]


def codec_of(name: str, nbytes: int, reading: Reading, told: dict[str, list[str]]) -> str | None:
    """`Document.codec` of a file. told: gets the names of files that are counted as they are stored although they look
    like something else."""
    codec = codec_named(name)
    if codec is None and nbytes >= min(SNIFFED_NBYTES, config.get("piece-nbytes")):
        head = head_of(name)
        form = recognised(head, name)
        # Without a field, tables are bytes like any others, and may be cut.
        if form is not None and (reading.fields or form not in CONTAINERS or form in (TAR, WARC, ZIP)):
            codec = form
        else:
            what = CONTAINERS[form] if form is not None else unopened(head)
            if what is not None and reading.as_stored:
                column = ": name a column (--field) to count its texts" if form is not None else ""
                told.setdefault(f"like {what}, counted as stored bytes{column}", []).append(name)
    return codec if codec is not None or reading.as_stored else TEXT


def head_of(path: str) -> bytes:
    """A file's first bytes; none of one that cannot be read, which is told of when it is counted."""
    try:
        descriptor = open_anything(path)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, HEAD_NBYTES, 0)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def names_of(names: Sequence[str]) -> str:
    """Some names, and how many others there are."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {counted(more, 'other')}" if more > 0 else "")


def _is_our_table(path: str) -> bool:
    """Whether a Parquet file holds what ``--out`` wrote."""
    try:
        descriptor = open_anything(path)
    except OSError:
        return False
    try:
        start = max(0, os.fstat(descriptor).st_size - _FOOTER_NBYTES)
        return DUPLICATES_MARK.encode() in os.pread(descriptor, _FOOTER_NBYTES, start)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _is_our_array(path: str) -> bool:
    """Whether a Zarr array holds counts that ``--out`` wrote, or a group duplicates."""
    try:
        with open(os.path.join(path, "zarr.json"), "rb") as file:
            attributes = json.loads(file.read(2**26)).get("attributes", {})
        return {"by", "documents", "skipped", "nbytes"} <= set(attributes) or DUPLICATES_MARK in attributes
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return False
