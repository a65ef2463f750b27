"""The texts of JSON lines: a document for each object, or for each of several fields of it."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tilewright.kernels.cpu.loops import read_only
from tilewright.kernels.numbers import counted
from tilewright.kernels.words import did_you_mean
from tilewright.pipeline.text.formats.decompress import Fill
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.sources import (
    NO_ENDS,
    SEPARATOR,
    ContentError,
    Found,
    Window,
    null_field,
)

MOST_DOCUMENTS = 2**14
LEAST_LINE_NBYTES = 16
"""Documents that one call of the loop finds, at most, and bytes of each on average, at least."""

_NAMES = ("", "", "null", "a number", "true or false", "an object", "a list")

LEFT_OUT = "or have such lines left out and listed (--on-error report)"
REMEDY = f"restore the file, {LEFT_OUT}"
MARK = b"\xef\xbb\xbf"
"""UTF-8's byte order mark, which only the first line of a file may begin with."""

MOST_BAD = 100
"""Where so many lines were bad, and no more were good, the file is taken for none of JSON lines."""


class _Long(NamedTuple):
    """A document of a line that had no room where it was to go."""

    data: np.ndarray
    number: int
    field: int
    identifier: str | None
    lost: int


class JsonLines:
    """The documents of a text of JSON lines."""

    def __init__(self, fill: Fill, found: Found, member: str, reading: Reading, shown: str) -> None:
        """shown: the file and the member, as the user sees them."""
        from tilewright.kernels.records import json_lines  # needs Numba, which a client has no use for

        self._loop, self._found, self._member, self._reading = json_lines, found, member, reading
        self._shown = shown
        keys = [*reading.fields, *([reading.id_field] if reading.id_field else [])]
        self._keys, self._edges = json_lines.packed_keys(keys)
        self._window = Window(fill, reading.buffer_nbytes)
        self._spans = np.empty((len(keys), json_lines.SPAN_NBYTES // 8), np.int64)
        self._stack = np.empty(json_lines.DEEPEST, np.uint8)
        self._scratch = np.empty(6 * max(map(len, keys)) * 4 + 6, np.uint8)
        self._state = np.zeros(json_lines.STATE_LENGTH, np.int64)
        self._line = 0
        """Lines before the window."""
        self._long: deque[_Long] = deque()
        self._long_done = 0
        self._records = 0
        self._without = np.zeros((len(keys), 2), np.int64)
        """Of each field, and of the identifier: the records that lack it, and those in which it is null."""
        self._keys_of_first: list[str] | None = None
        """Of the first record; None before it was read."""
        self._told_empty = False
        """Whether there were records, or it was told that there are none."""
        self._bad = 0
        self._first_fault: ContentError | None = None
        """Of the lines that were left out."""

    def fill(self, target: np.ndarray, gap: int, most: int) -> tuple[int, np.ndarray]:
        loop, window, fields = self._loop, self._window, len(self._reading.fields)
        if not self._line and not window.stop:
            window.more("a line")
            self._skip_mark()
        while True:
            if self._long:
                return self._hand_out(target, gap)
            if most >= fields:
                likely = fields * ((window.stop - window.start) // LEAST_LINE_NBYTES + 1)
                count, filled, ends = self._read(target, gap, min(most, MOST_DOCUMENTS + fields, likely))
                if count:
                    return filled, ends
                code = self._state[loop.CODE]
                if code in loop.FAULTS:
                    continue  # behind a line that was left out
            else:
                code = loop.NO_ROOM
            if code == loop.NO_ROOM and self._read_long():
                continue
            if window.final and window.start == window.stop:
                self._check_field()
                return 0, NO_ENDS
            if not window.final:
                window.more("a line")

    def _skip_mark(self) -> None:
        """Pass over UTF-8's byte order mark, as some editors leave it."""
        window = self._window
        while window.stop < 3 and not window.final:
            window.more("a line")
        if window.data[:3].tobytes() == b"\xef\xbb\xbf" and window.stop >= 3:
            window.start = 3

    def _read(self, target: np.ndarray, gap: int, most: int) -> tuple[int, int, np.ndarray]:
        """Let the loop read what it can: how many documents, how many bytes of the target, and where they end."""
        loop, window, state = self._loop, self._window, self._state
        ends, numbers, lost, id_ends = (np.empty(most, np.int64) for _ in range(4))
        ids = np.empty(window.stop - window.start if self._reading.id_field else 0, np.uint8)
        fields, begin = self._reading.fields, window.start
        loop.texts_of_lines(
            read_only(window.data), window.start, window.stop, window.final,
            self._keys, self._edges, len(fields), target, gap, SEPARATOR, most,
            ends, numbers, lost, ids, id_ends, self._spans, self._stack, self._scratch, self._without, state,
        )  # fmt: skip
        window.start = int(state[loop.CONSUMED])
        count, code = int(state[loop.DOCUMENTS]), int(state[loop.CODE])
        self._records += int(state[loop.RECORDS])
        if self._keys_of_first is None and self._records:
            # Only of a field that is looked for in vain, these are told; a window does not outlast its lines.
            self._keys_of_first = keys_in(window.data[begin : window.start]) if self._without.any() else []
        before, self._line = self._line, self._line + int(state[loop.LINES])
        if code in loop.FAULTS and not self._reading.leaves_out:
            raise self._fault(code)
        if count:
            named: list[str | None] | None = None
            if self._reading.id_field:
                edges = [0, *id_ends[:count].tolist()]
                data = ids.tobytes()
                named = _identifiers(data, edges, len(fields))
            which = list(fields) * (count // len(fields)) if len(fields) > 1 else None
            self._found.ended(
                self._member,
                count,
                numbers=numbers[:count] + before + 1,
                fields=which,
                ids=named,
                lost=lost[:count],
            )
        if code in loop.FAULTS:
            self._leave_out(code)
        return count, int(state[loop.FILLED]), ends[:count]

    def _leave_out(self, code: int) -> None:
        """Pass over the line at which the loop stopped. Raises ContentError for a file of such lines."""
        fault, window = self._fault(code), self._window
        self._first_fault = self._first_fault or fault
        self._bad += 1
        if self._bad >= max(MOST_BAD, self._records):
            raise self._all_bad()
        end = self._loop.newline_from(window.data, window.start, window.stop)
        window.start = window.stop if end < 0 else end + 1
        self._line += 1
        member = f":{self._member}" if self._member else ""
        self._found.leave_out(member + fault.where, fault.what)

    def _all_bad(self) -> ContentError:
        """What is wrong with a file in which so few lines are good."""
        first = self._first_fault
        assert first is not None
        if self._bad == 1:
            return first
        lines = counted(self._bad + self._records, "line")
        return ContentError(
            f"{first.what}; {self._bad} of its first {lines} cannot be read", first.remedy, first.where
        )

    def _read_long(self) -> bool:
        """Read one line into memory of its own, where no other is; whether there was a whole one."""
        loop, window = self._loop, self._window
        end = loop.newline_from(window.data, window.start, window.stop)
        if end < 0 and not (window.final and window.start < window.stop):
            return False
        length = (window.stop if end < 0 else end) - window.start
        listed, self._found.rows = self._found.rows, []
        keeping, self._found.keeps_rows = self._found.keeps_rows, True
        documents, lost = self._found.documents, self._found.lost
        memory = np.empty(max(1, length), np.uint8)
        stop, final = window.stop, window.final
        window.stop, window.final = window.start + length + (end >= 0), True
        try:
            _, _, ends = self._read(memory, 0, len(self._reading.fields))
        finally:
            window.stop, window.final = stop, final
            rows, self._found.rows = self._found.rows, listed
            self._found.keeps_rows = keeping
            self._found.documents, self._found.lost = documents, lost
        if rows:
            (row,) = rows
            assert row.numbers is not None
            edges = [0, *ends.tolist()]
            self._long.extend(
                _Long(
                    memory[edges[i] : edges[i + 1]],
                    int(row.numbers[i]),
                    i,
                    row.ids[i] if row.ids else None,
                    int(np.broadcast_to(row.lost, len(ends))[i]),
                )
                for i in range(len(ends))
            )
        return True

    def _hand_out(self, target: np.ndarray, gap: int) -> tuple[int, np.ndarray]:
        now = self._long[0]
        part = now.data[self._long_done : self._long_done + len(target) - gap]
        target[: len(part)] = part
        self._long_done += len(part)
        if self._long_done < len(now.data):
            return len(part), NO_ENDS
        self._long.popleft()
        self._long_done = 0
        target[len(part) : len(part) + gap] = SEPARATOR
        fields = self._reading.fields
        self._found.ended(
            self._member,
            numbers=np.array([now.number]),
            fields=[fields[now.field]] if len(fields) > 1 else None,
            ids=[now.identifier] if self._reading.id_field else None,
            lost=np.array([now.lost]),
        )
        return len(part) + gap, np.array([len(part) + gap], np.int64)

    def _fault(self, code: int) -> ContentError:
        loop, state = self._loop, self._state
        where, column = f":{self._line + 1}", int(state[loop.PLACE]) + 1
        if code == loop.NO_TEXT:
            field = self._reading.fields[int(state[loop.FIELD])]
            return ContentError(
                f"field {field!r} holds {_NAMES[int(state[loop.KIND])]}, and no text",
                "name a field of texts, mend the line, or have such lines left out and listed (--on-error report)",
                where,
            )
        if code == loop.NO_OBJECT and self._line == 0:
            return ContentError(
                f"{loop.FAULTS[code]}, as each line is of what has such a name, where a field is asked for",
                "put one object on each line, leave the file out (--exclude, --on-error report), or name it otherwise"
                " if it is a plain text, which is a document as a whole",
                where,
            )
        if code == loop.ENCODED and self._stands_there(MARK):
            return ContentError(
                f"no JSON, but it begins with a byte order mark (column {column}), as where files were joined",
                f"join files without their marks, {LEFT_OUT}",
                where,
            )
        if code == loop.UNENDED and self._line == 0 and self._goes_on():
            return ContentError(
                f"no JSON: {loop.FAULTS[code]} (column {column}), which may go on behind it",
                f"put each record on one line (jq -c), {LEFT_OUT}",
                where,
            )
        if code == loop.ENCODED:
            return ContentError(
                f"no JSON, but {loop.FAULTS[code]} (column {column})",
                "say which by encoding, or leave the file out",
                where,
            )
        return ContentError(f"no JSON: {loop.FAULTS[code]} (column {column})", REMEDY, where)

    def _stands_there(self, mark: bytes) -> bool:
        """Whether a mark stands where the loop found a fault."""
        window = self._window
        place = window.start + int(self._state[self._loop.PLACE])
        return window.data[place : min(place + len(mark), window.stop)].tobytes() == mark

    def _goes_on(self) -> bool:
        """Whether the line in which the loop found a fault has an end, so that it was not cut off."""
        window = self._window
        return bool(self._loop.newline_from(window.data, window.start, window.stop) >= 0)

    def _check_field(self) -> None:
        reading, records = self._reading, counted(self._records, "record")
        lacking, null = (self._without[:, column].tolist() for column in (0, 1))
        if self._bad and not self._records:
            raise self._all_bad()
        self._without[:], every, self._records = 0, self._records, 0
        if not every:
            if not (self._bad or self._told_empty):
                self._told_empty = True
                without_fields(self._found, self._shown, reading.fields, 0, lacking, null)
            return
        self._told_empty = True
        if min(lacking[: len(reading.fields)]) == every:
            raise ContentError(
                f"none of its {records} has a field {' or '.join(map(repr, reading.fields))}"
                f"{_as_told(self._keys_of_first, reading.fields)}",
                "name one that they have",
            )
        if reading.id_field and lacking[-1] == every:
            raise ContentError(
                f"none of its {records} has a field {reading.id_field!r}, which is to identify them (id_field)"
                f"{_as_told(self._keys_of_first, [reading.id_field])}",
                "name one that they have",
            )
        without_fields(self._found, self._shown, reading.fields, every, lacking, null)


def without_fields(
    found: Found, shown: str, fields: Sequence[str], records: int, lacking: Sequence[int], null: Sequence[int]
) -> None:
    """Have told that a file has no records, or how many lack each field, and in how many it is null. shown: the file
    and the member, as the user sees them."""
    if not records:
        found.remark("no record in it", shown)
        return
    for place, field in enumerate(fields):
        found.remark(f"without a field {field!r}, counted as empty", shown, records=lacking[place])
        found.remark(null_field(field), shown, records=null[place])


class Records(NamedTuple):
    """What the loop makes of some lines, of one field."""

    texts: np.ndarray
    """uint8: one behind the other, each with a separator behind it if there is to be a gap."""
    edges: np.ndarray
    """int64[records + 1]."""
    lost: int
    lacking: int
    null: int
    """How many records lack the field, and hold null there: they are empty texts."""


def texts_of(data: np.ndarray, field: str, gap: int) -> Records | None:
    """The texts of a field of whole lines, uint8; None where one of them has a fault."""
    from tilewright.kernels.records import json_lines as loop  # needs Numba, which a client has no use for

    keys, edges = loop.packed_keys([field])
    most = int(np.count_nonzero(data == 0x0A)) + 1
    target = np.empty(len(data) + most * gap + 1, np.uint8)
    ends, numbers, lost, id_ends = (np.zeros(most, np.int64) for _ in range(4))
    without, state = np.zeros((1, 2), np.int64), np.zeros(loop.STATE_LENGTH, np.int64)
    loop.texts_of_lines(
        read_only(data), 0, len(data), True, keys, edges, 1, target, gap, SEPARATOR, most,
        ends, numbers, lost, np.empty(0, np.uint8), id_ends, np.empty((1, loop.SPAN_NBYTES // 8), np.int64),
        np.empty(loop.DEEPEST, np.uint8), np.empty(6 * len(field) * 4 + 6, np.uint8), without, state,
    )  # fmt: skip
    if state[loop.CODE] != loop.FINE:
        return None
    count, (lacking, null) = int(state[loop.DOCUMENTS]), without[0].tolist()
    filled = int(state[loop.FILLED])
    return Records(
        target[:filled], np.concatenate([[0], ends[:count]]), int(lost[:count].sum()), lacking, null
    )


def _identifiers(data: bytes, edges: list[int], fields: int) -> list[str | None]:
    """The identifier of each document, of which a record's stands once for all of its fields."""
    found: list[str | None] = []
    for i in range(0, len(edges) - 1, fields):
        # The loop writes it before the record's first document, and counts it to all.
        start = edges[i]
        text = data[start : edges[i + 1]].decode("utf-8", "replace")
        found += [text or None] * fields
    return found


MOST_KEYS = 10
"""Keys of a record that a message names."""
KEYS_NBYTES = 2**26
"""Of a record, how much is looked through for its keys: a text in front of them may be long."""
_PARTS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"\s*:?|[\[\]{}]', re.DOTALL)
"""Texts, with the colon behind those that are keys, and brackets."""


def keys_in(line: np.ndarray) -> list[str]:
    """The first keys of the first object in a text, which need not end there; one more than `MOST_KEYS` at most."""
    found: list[str] = []
    depth = 0
    for part in _PARTS.finditer(line[:KEYS_NBYTES].data):
        token = part.group()
        if token in b"{[":
            depth += 1
        elif token in b"]}":
            depth -= 1
            if not depth:
                break
        elif depth == 1 and token.endswith(b":"):
            try:
                found.append(str(json.loads(token[:-1])))
            except ValueError:
                continue
            if len(found) > MOST_KEYS:
                break
    return found


def _as_told(keys: Sequence[str] | None, wanted: Sequence[str]) -> str:
    """What the first record has instead of what is wanted, as the end of a sentence."""
    if not keys:
        return ""
    more = ", and others" if len(keys) > MOST_KEYS else ""
    near = next(filter(None, (did_you_mean(each, keys) for each in wanted)), "")
    return f"; its first has {', '.join(map(repr, keys[:MOST_KEYS]))}{more}{near}"
