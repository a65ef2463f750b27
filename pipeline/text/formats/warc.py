"""The records of a WARC file, WET among them: the texts of those that hold what was fetched, or what was made of it.

Format: ISO 28500 (WARC 1.0 and 1.1): a version, fields, an empty line, and as many bytes as Content-Length says.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tilewright.kernels.numbers import counted
from tilewright.pipeline.text.formats.decompress import Fill
from tilewright.pipeline.text.formats.sources import ContentError, Found, Head, Part

COUNTED = ("response", "resource", "conversion", "continuation")
"""The types of records that are documents."""

MOST_HEADER_NBYTES = 2**20
STEP_NBYTES = 2**16
MOST_NAMED = 10
"""Fields of a header that an error names."""

RESTORE = "restore the file, or count its bytes as they are stored (--raw)"


def records(
    fill: Fill, found: Found, name: str, id_field: str | None, *, all_lack: bool = False
) -> Iterator[tuple[int, str | None, Fill]]:
    """The number, counted from 1, the identifier and the text of each record that is a document; a text is to be read
    before the next.

    Of a record with HTTP's answer, the text is what stands behind HTTP's header. id_field: a field of the record's
    header, in any case. all_lack: whether it is no error where no record has it.
    """
    text = _Lines(fill)
    number = passed = documents = identified = 0
    first: list[str] = []
    while True:
        line = text.line()
        while line in (b"\r\n", b"\n"):
            line = text.line()
        if not line:
            break
        number += 1
        where = f":{number}"
        if not line.startswith(b"WARC/"):
            raise ContentError(
                f"no record of a WARC file begins where one should, but {line[:20]!r}", RESTORE, where
            )
        fields: dict[str, str] = {}
        header, last = len(line), ""
        while (line := text.line()) not in (b"\r\n", b"\n"):
            header += len(line)
            if not line.endswith(b"\n") or header > MOST_HEADER_NBYTES:
                raise ContentError("its header was cut short, or has no end", RESTORE, where)
            if line[:1] in b" \t" and last:
                fields[last] += " " + line.strip().decode("utf-8", "replace")  # goes on
                continue
            key, colon, value = line.partition(b":")
            if not colon:
                raise ContentError(f"its header holds {line[:20]!r}, which is no field", RESTORE, where)
            last = key.strip().decode("utf-8", "replace").lower()
            fields[last] = value.strip().decode("utf-8", "replace")
        length = fields.get("content-length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 19):
            raise ContentError(f"its Content-Length is {length[:20]!r}, which is no length", RESTORE, where)
        part = Part(
            text.fill,
            int(length),
            lambda where=where: ContentError(
                "the file was cut short: it ends within the record", RESTORE, where
            ),  # type: ignore[misc]
        )
        if fields.get("warc-type", "").lower() in COUNTED:
            body: Fill = part.fill
            if fields.get("content-type", "").lower().replace(" ", "").startswith("application/http"):
                body = _behind_http(part)
            identifier = fields.get(id_field.lower()) if id_field else None
            documents, identified = documents + 1, identified + (identifier is not None)
            first = first or list(fields)
            yield number, identifier, body
        else:
            passed += 1
        scratch = np.empty(STEP_NBYTES, np.uint8)
        while part.fill(scratch):
            pass
    found.remark("that hold no text (warcinfo, request, metadata, revisit)", name, records=passed)
    if id_field and documents and not (identified or all_lack):
        raise ContentError(
            f"none of its {counted(documents, 'record')} has a field {id_field!r} in its header, which is to identify"
            f" them (id_field); its first has {', '.join(map(repr, first[:MOST_NAMED]))}",
            "name one that they have",
        )


def _behind_http(part: Part) -> Fill:
    """What stands behind HTTP's header, which ends with an empty line; all, where there is none."""
    head = Head(part.fill, 2**16)
    data = head.bytes(2**16)
    ends = [
        place + length for mark, length in ((b"\r\n\r\n", 4), (b"\n\n", 2)) if (place := data.find(mark)) >= 0
    ]
    if ends and data.startswith(b"HTTP/"):
        skipped = np.empty(min(ends), np.uint8)
        head.fill(skipped)
    return head.fill


class _Lines:
    """A text of which lines are read, and what stands between them."""

    def __init__(self, fill: Fill) -> None:
        self._fill = fill
        self._memory = np.empty(STEP_NBYTES, np.uint8)
        self._data = b""
        self._place = 0

    def _more(self) -> bool:
        got = self._fill(self._memory)
        self._data = self._data[self._place :] + self._memory[:got].tobytes()
        self._place = 0
        return got > 0

    def line(self) -> bytes:
        """The next line with its end; without one at the end of the text, or where it is longer than any."""
        searched = 0
        while (end := self._data.find(b"\n", self._place + searched)) < 0:
            searched = len(self._data) - self._place
            if searched > MOST_HEADER_NBYTES or not self._more():
                end = len(self._data) - 1
                break
        line, self._place = self._data[self._place : end + 1], end + 1
        return line

    def fill(self, target: np.ndarray) -> int:
        if self._place == len(self._data):
            return self._fill(target)
        part = np.frombuffer(
            self._data, np.uint8, min(len(target), len(self._data) - self._place), self._place
        )
        target[: len(part)] = part
        self._place += len(part)
        return len(part)
