"""The records of a WARC file, WET among them: the texts of those that hold what was fetched, or what was made of it.

Format: ISO 28500 (WARC 1.0 and 1.1): a version, fields, an empty line, and as many bytes as Content-Length says.

`Records` has a loop go from record to record, and reads a header itself only where that is not as most are. `records`
hands out one after the other, each to be taken apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from tilewright.kernels.numbers import counted
from tilewright.pipeline.text.formats.decompress import Fill
from tilewright.pipeline.text.formats.sources import (
    NO_ENDS,
    SEPARATOR,
    ContentError,
    Found,
    Head,
    Part,
    Window,
)

COUNTED = ("response", "resource", "conversion", "continuation")
"""The types of records that are documents."""

MOST_HEADER_NBYTES = 2**20
HTTP_NBYTES = 2**16
"""Within so many bytes of a text HTTP's header ends, where there is one."""
STEP_NBYTES = 2**16
MOST_DOCUMENTS = 2**14
"""The most documents that the loop is asked for at a time."""
LEAST_RECORD_NBYTES = 64
"""About what the shortest record takes: a version, a type and a length."""
MOST_NAMED = 10
"""Fields of a header that an error names."""

RESTORE = "restore the file, or count its bytes as they are stored (--raw)"


class _HasLines(Protocol):
    def line(self) -> bytes:
        """The next line with its end; without one at the end of the text, or where it is longer than any."""


def _header_of(text: _HasLines, number: int) -> dict[str, str] | None:
    """The fields of the next record's header, their names in small letters; None where there is none. number: of the
    record, counted from 1."""
    line = text.line()
    while line in (b"\r\n", b"\n"):
        line = text.line()
    if not line:
        return None
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
    return fields


def _is_counted(fields: dict[str, str]) -> bool:
    return fields.get("warc-type", "").lower() in COUNTED


def _is_over_http(fields: dict[str, str]) -> bool:
    return fields.get("content-type", "").lower().replace(" ", "").startswith("application/http")


def _cut_short(number: int) -> ContentError:
    return ContentError("the file was cut short: it ends within the record", RESTORE, f":{number}")


def _tell(
    found: Found,
    name: str,
    id_field: str | None,
    passed: int,
    documents: int,
    identified: bool,
    first: list[str],
) -> None:
    """Have told what was passed over. Raises ContentError where no record has the field that is to identify them.
    identified: whether one has it. first: the fields of the first."""
    found.remark("that hold no text (warcinfo, request, metadata, revisit)", name, records=passed)
    if id_field and documents and not identified:
        raise ContentError(
            f"none of its {counted(documents, 'record')} has a field {id_field!r} in its header, which is to identify"
            f" them (id_field); its first has {', '.join(map(repr, first[:MOST_NAMED]))}",
            "name one that they have",
        )


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
    while (fields := _header_of(text, number + 1)) is not None:
        number += 1
        part = Part(text.fill, int(fields["content-length"]), lambda number=number: _cut_short(number))  # type: ignore[misc]
        if _is_counted(fields):
            body: Fill = part.fill
            if _is_over_http(fields):
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
    _tell(found, name, id_field, passed, documents, bool(identified) or all_lack, first)


def _behind_http(part: Part) -> Fill:
    """What stands behind HTTP's header, which ends with an empty line; all, where there is none."""
    head = Head(part.fill, HTTP_NBYTES)
    if skipped := _http_nbytes(head.bytes(HTTP_NBYTES)):
        head.fill(np.empty(skipped, np.uint8))
    return head.fill


def _http_nbytes(data: bytes) -> int:
    """How many bytes HTTP's header has, with which a text may begin; 0 where there is none."""
    ends = [
        place + length for mark, length in ((b"\r\n\r\n", 4), (b"\n\n", 2)) if (place := data.find(mark)) >= 0
    ]
    return min(ends) if ends and data.startswith(b"HTTP/") else 0


class Records:
    """The texts of a WARC file's records, as they are stored."""

    def __init__(self, fill: Fill, found: Found, name: str, id_field: str | None, buffer_nbytes: int) -> None:
        """name: of the file, as the user sees it. id_field: as of `records`."""
        from tilewright.kernels.records import warc

        self._loop, self._found, self._name, self._id_field = warc, found, name, id_field
        self._reads = id_field is None or id_field.isascii()
        """Whether the loop may read headers."""
        self._words, self._edges = warc.packed_words(COUNTED, id_field if self._reads else None)
        self._window = Window(fill, buffer_nbytes)
        self._state = np.zeros(warc.STATE_LENGTH, np.int64)
        self._state[warc.LEFT] = -1
        self._first: list[str] = []
        """The fields of the first record that is a document."""
        self._documents, self._identified = 0, False
        self._id: str | None = None
        """That of the document that is under way."""

    def fill(self, target: np.ndarray, gap: int, most: int) -> tuple[int, np.ndarray]:
        loop, window, state = self._loop, self._window, self._state
        while True:
            filled, ends = self._read(target, gap, most)
            if filled or len(ends):
                return filled, ends
            if state[loop.CODE] == loop.MORE:
                if window.final:
                    raise _cut_short(int(state[loop.RECORDS]))
                window.more("a header")
            elif not self._read_header():
                passed = int(state[loop.PASSED])
                _tell(
                    self._found,
                    self._name,
                    self._id_field,
                    passed,
                    self._documents,
                    self._identified,
                    self._first,
                )
                return 0, NO_ENDS

    def _read(self, target: np.ndarray, gap: int, most: int) -> tuple[int, np.ndarray]:
        """Let the loop read what it can: how many bytes of the target, and where documents end."""
        loop, window, state = self._loop, self._window, self._state
        likely = (window.stop - window.start) // LEAST_RECORD_NBYTES + 1
        ends, numbers, id_ends = np.empty((3, min(most, MOST_DOCUMENTS, likely)), np.int64)
        ids = np.empty(window.stop - window.start if self._id_field else 0, np.uint8)
        under_way = int(state[loop.LEFT] >= 0)
        loop.texts_of_records(
            window.data, window.start, window.stop, window.final, self._reads and bool(self._first),
            MOST_HEADER_NBYTES, HTTP_NBYTES, self._words, self._edges,
            target, gap, SEPARATOR, ends, numbers, ids, id_ends, state,
        )  # fmt: skip
        window.start = int(state[loop.CONSUMED])
        count = int(state[loop.DOCUMENTS])
        named = None
        if self._id_field:
            begun = count - under_way + int(state[loop.LEFT] >= 0)
            read = id_ends[under_way : under_way + begun].tolist()
            named = [self._id] * under_way + _ids(ids[: state[loop.IDS]].tobytes(), read)
            self._id = named[count] if state[loop.LEFT] >= 0 else None
            named = named[:count]
            self._identified = self._identified or any(each is not None for each in named)
        if count:
            self._documents += count
            self._found.ended(
                "", count, numbers=numbers[:count].copy(), ids=named
            )  # not all that was room for
        return int(state[loop.FILLED]), ends[:count]

    def _read_header(self) -> bool:
        """Read the next header, whatever it is; whether there is one."""
        loop, window, state = self._loop, self._window, self._state
        fields = _header_of(_WindowLines(window), int(state[loop.RECORDS]) + 1)
        if fields is None:
            return False
        state[loop.RECORDS] += 1
        length = int(fields["content-length"])
        if not _is_counted(fields):
            state[loop.PASSED] += 1
            state[loop.SKIPPED] = length
            return True
        skipped = 0
        if _is_over_http(fields):
            head = min(length, HTTP_NBYTES)
            while window.stop - window.start < head and not window.final:
                window.more("a header")
            skipped = _http_nbytes(
                window.data[window.start : min(window.start + head, window.stop)].tobytes()
            )
        state[loop.SKIPPED], state[loop.LEFT] = skipped, length - skipped
        self._first = self._first or list(fields)
        self._id = fields.get(self._id_field.lower()) if self._id_field else None
        return True


def _ids(data: bytes, ends: list[int]) -> list[str | None]:
    """The identifiers of records that the loop has read; ends: its ``id_ends``."""
    found: list[str | None] = []
    start = 0
    for told in ends:
        end = told if told >= 0 else -1 - told
        found.append(data[start:end].decode("utf-8", "replace") if told >= 0 else None)
        start = end
    return found


class _WindowLines:
    """The lines of a window, which are passed over."""

    def __init__(self, window: Window) -> None:
        self._window = window

    def line(self) -> bytes:
        from tilewright.kernels.records.json_lines import newline_from

        window = self._window
        searched = 0
        while (end := int(newline_from(window.data, window.start + searched, window.stop))) < 0:
            searched = window.stop - window.start
            if searched > MOST_HEADER_NBYTES or window.final:
                end = window.stop - 1
                break
            window.more("a header")
        stop = end + 1
        line = window.data[window.start : stop].tobytes()
        window.start = stop
        return line


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
