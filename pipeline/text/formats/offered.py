"""The fields that a file has which is read without one: for people who have not named any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tilewright.pipeline.store.remote.files import is_url
from tilewright.pipeline.text.formats import decompress
from tilewright.pipeline.text.formats.json_lines import MOST_KEYS, keys_in
from tilewright.pipeline.text.formats.listing import COLUMN_TEXTS, ITS_TEXTS, head_of, names_of
from tilewright.pipeline.text.formats.recognition import (
    ARROW,
    HEAD_NBYTES,
    PARQUET,
    codec_named,
    recognised,
)

FIRST_NBYTES = 2**20
"""What is looked at of a file, as stored, for its first record."""
TEXT_NBYTES = 2**22
"""The same, decompressed."""


def told_apart(told: Mapping[str, Sequence[str]]) -> tuple[list[str], list[str]]:
    """Notices and cautions. told: names of files, by what is to be told of them, as `listing.codec_of` has it."""
    notes: list[str] = []
    cautions: list[str] = []
    for what, names in told.items():
        said = f"{names_of(names)}: {what}"
        if what.endswith((ITS_TEXTS, COLUMN_TEXTS)):
            cautions.append(said if is_url(names[0]) else said + fields_offered(names[0]))
        else:
            notes.append(said)
    return notes, cautions


def fields_offered(path: str) -> str:
    """The fields of a local file's first record, or its columns, as the end of a sentence; empty where they cannot be
    told: whoever reads the file says what is wrong with it."""
    head = head_of(path, FIRST_NBYTES)
    form = recognised(head[:HEAD_NBYTES], path)
    if form in (PARQUET, ARROW):
        names, have = _columns(path, form), "it has"
    else:
        codec = form if form in decompress.CODEC_NAMES else codec_named(path) if form is None else None
        text = np.frombuffer(head, np.uint8) if codec is None else _decompressed(head, codec)
        names, have = keys_in(text), "its first record has"
    if not names:
        return ""
    more = ", and others" if len(names) > MOST_KEYS else ""
    return f"; {have} {', '.join(map(repr, names[:MOST_KEYS]))}{more}"


def _decompressed(head: bytes, codec: str) -> np.ndarray:
    """What the first bytes of a file give, which may be cut anywhere."""
    memory, filled = np.empty(TEXT_NBYTES, np.uint8), 0
    try:
        fill = decompress.reader(codec, iter([memoryview(head)]) if head else iter(()))
        while filled < TEXT_NBYTES and (got := fill(memory[filled : filled + 2**16])):
            filled += got
    except decompress.ERRORS:
        pass  # its end is not there
    return memory[:filled]


def _columns(path: str, form: str) -> list[str]:
    try:
        if form == PARQUET:
            from pyarrow import parquet

            return list(parquet.read_schema(path).names)
        from pyarrow import ipc

        with ipc.open_file(path) as opened:
            return list(opened.schema.names)
    except Exception:  # pyarrow is not there, or says that the file is damaged, by errors of many kinds
        return []
