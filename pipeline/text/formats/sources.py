"""Sources of documents: each gives the bytes of consecutive documents, and says where each ends.

A source is read by `fill` until it gives neither bytes nor ends. What it holds does not grow with a document, but for
one line of JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.pipeline.text.formats.decompress import Fill

SEPARATOR = 0
"""The byte between documents that are counted as one text, where tokens span several bytes: NUL ends any UTF-8 sequence
as the end of the text would; the counts that it adds itself are subtracted again."""

LONGEST_NBYTES = 2**30
"""The longest line of JSON, and the longest run of blanks between paragraphs."""

NO_ENDS = np.empty(0, np.int64)


class ContentError(ValueError):
    """The contents of a file are not what its form says."""

    def __init__(self, what: str, remedy: str, where: str = "") -> None:
        super().__init__(what)
        self.what, self.remedy = what, remedy
        self.where = where
        """Behind the file's name: the member, record or line, with a colon before each."""

    def within(self, where: str) -> ContentError:
        """The same, found in a member."""
        self.where = f":{where}{self.where}"
        return self


class Source(Protocol):
    def fill(self, target: np.ndarray, gap: int, most: int) -> tuple[int, np.ndarray]:
        """Fill memory with the next bytes of documents, at most ``most`` of which end there.

        Returns how many bytes, and where documents end, int64, behind the ``gap`` separators, 0 or 1, that follow each.
        The target has room for more than those. Nothing of both: there is nothing more.
        """


class Row(NamedTuple):
    """Consecutive documents of one file."""

    place: int
    """Of the file, in the piece."""
    member: str
    """Of an archive, or the number of a record; empty for the file itself."""
    numbers: np.ndarray | None
    """int64: the line, row or record of each, counted from 1; None for one that has no number."""
    fields: Sequence[str | None] | None
    """The field of each, if there are several."""
    ids: Sequence[str | None] | None
    lost: np.ndarray | int
    """How many U+FFFD of each stand for what could not be decoded, as far as sources know."""


class Remark(NamedTuple):
    """How often something is to be told."""

    places: int
    """Files, members or documents of which it is told."""
    name: str
    """The first of them."""
    records: int = 0
    """Records in them of which it is told; 0 where it is told of the whole."""


Remarks = dict[str, Remark]
"""By what is to be told. Of records it is what stands behind their number."""


@dataclass
class Found:
    """What was found while a piece was read."""

    keeps_rows: bool = False
    """Whether documents are listed one by one."""
    place: int = 0
    """Of the file that is read, in the piece."""
    rows: list[Row] = field(default_factory=list)
    documents: int = 0
    lost: int = 0
    remarks: Remarks = field(default_factory=dict)
    left_out: dict[int, LeftOut] = field(default_factory=dict)
    """By the places of files in the piece."""

    def ended(
        self,
        member: str,
        count: int = 1,
        *,
        numbers: np.ndarray | None = None,
        fields: Sequence[str | None] | None = None,
        ids: Sequence[str | None] | None = None,
        lost: np.ndarray | int = 0,
    ) -> None:
        """So many documents ended."""
        self.documents += count
        self.lost += int(np.sum(lost))
        if self.keeps_rows:
            self.rows.append(Row(self.place, member, numbers, fields, ids, lost))

    def leave_out(self, where: str, what: str) -> None:
        """A line of the file cannot be read, and is left out."""
        self.left_out.setdefault(self.place, LeftOut()).add(where, what)

    def remark(self, what: str, name: str, *, records: int | None = None) -> None:
        """Have something told of a file, a member or a document; or of so many of its records, if there are any."""
        if records is None or records:
            add_remarks(self.remarks, {what: Remark(1, name, records or 0)})


def all_found(documents: int) -> Found:
    """What is said of so many documents, each a text by itself."""
    found = Found(True)
    for place in range(documents):
        found.place = place
        found.ended("")
    return found


MOST_LISTED = 100
"""Lines of one file that are left out by name; of more, their number is told."""


@dataclass
class LeftOut:
    """The lines of one file that could not be read."""

    number: int = 0
    named: list[tuple[str, str]] = field(default_factory=list)
    """The first of them: what stands behind the file's name, with a colon before each, and what is wrong there."""

    def add(self, where: str, what: str) -> None:
        self.number += 1
        if len(self.named) < MOST_LISTED:
            self.named.append((where, what))

    def listed(self, file: str) -> list[tuple[str, str]]:
        """Names and reasons, for people. file: its name, which of all lines but the first stands for them."""
        more = self.number - len(self.named)
        found = [(file + where, f"{file}{where}: {what}") for where, what in self.named]
        return [*found, *([(file, f"{file}: {counted(more, 'line')} more")] if more else [])]


def add_remarks(remarks: Remarks, others: Remarks) -> None:
    """Add what is to be told of other files."""
    for what, other in others.items():
        before = remarks.get(what, Remark(0, other.name))
        remarks[what] = Remark(before.places + other.places, before.name, before.records + other.records)


def remarks_of(remarks: Remarks) -> list[str]:
    """Remarks in sentences for people."""
    told = []
    for what, (places, name, records) in remarks.items():
        named = f"{name} and {counted(places - 1, 'other')}" if places > 1 else name
        told.append(f"{named}: {counted(records, 'record')} {what}" if records else f"{named}: {what}")
    return told


def null_field(field: str) -> str:
    """What is told of records whose field is there, and null."""
    return f"whose field {field!r} is null, counted as empty"


class Head:
    """A text of which the first bytes were looked at, before all is read."""

    def __init__(self, fill: Fill, nbytes: int) -> None:
        self._fill, self._done = fill, 0
        memory, filled = np.empty(nbytes, np.uint8), 0
        while filled < nbytes and (got := fill(memory[filled:])):
            filled += got
        self._memory = memory[:filled]

    def bytes(self, nbytes: int) -> bytes:
        return self._memory[:nbytes].tobytes()

    def fill(self, target: np.ndarray) -> int:
        if self._done < len(self._memory):
            part = self._memory[self._done : self._done + len(target)]
            target[: len(part)] = part
            self._done += len(part)
            return len(part)
        return self._fill(target)


class Exactly:
    """Reads what has lengths: headers and members of an archive."""

    def __init__(self, fill: Fill) -> None:
        self._fill = fill
        self._scratch = np.empty(2**16, np.uint8)

    def bytes(self, nbytes: int) -> bytes:
        """The next bytes; fewer at the end."""
        data, filled = np.empty(nbytes, np.uint8), 0
        while filled < nbytes and (got := self._fill(data[filled:])):
            filled += got
        return data[:filled].tobytes()

    def skip(self, nbytes: int) -> int:
        """Pass over bytes; how many there were."""
        done = 0
        while done < nbytes and (got := self._fill(self._scratch[: nbytes - done])):
            done += got
        return done

    def drain(self) -> bool:
        """Read to the end; whether anything but zeros was there."""
        other = False
        while got := self._fill(self._scratch):
            other = other or bool(self._scratch[:got].any())
        return other


class Part:
    """The next ``nbytes`` of a text, as a text."""

    def __init__(self, fill: Fill, nbytes: int, cut_short: Callable[[], Exception]) -> None:
        self._fill, self.left, self._cut_short = fill, nbytes, cut_short

    def fill(self, target: np.ndarray) -> int:
        if not self.left or not len(target):
            return 0
        got = self._fill(target[: self.left])
        if not got:
            raise self._cut_short()
        self.left -= got
        return got


class Whole:
    """A text that is one document."""

    def __init__(
        self,
        fill: Fill,
        found: Found,
        member: str = "",
        identifier: str | None = None,
        lost: Callable[[], int] = lambda: 0,
    ) -> None:
        self._fill, self._found, self._member = fill, found, member
        self._identifier, self._lost = identifier, lost
        self._ended = False

    def fill(self, target: np.ndarray, gap: int, most: int) -> tuple[int, np.ndarray]:
        if self._ended:
            return 0, NO_ENDS
        got = self._fill(target[: len(target) - gap])
        if got:
            return got, NO_ENDS
        self._ended = True
        target[:gap] = SEPARATOR
        ids = None if self._identifier is None else [self._identifier]
        self._found.ended(self._member, ids=ids, lost=self._lost())
        return gap, np.array([gap], np.int64)


class Chain:
    """Sources one behind the other, each opened once the last is done with."""

    def __init__(self, sources: Iterator[Source]) -> None:
        self._sources = sources
        self._now: Source | None = None

    def fill(self, target: np.ndarray, gap: int, most: int) -> tuple[int, np.ndarray]:
        while True:
            if self._now is None:
                self._now = next(self._sources, None)
                if self._now is None:
                    return 0, NO_ENDS
            count, ends = self._now.fill(target, gap, most)
            if count or len(ends):
                return count, ends
            self._now = None


class Window:
    """The part of a text in which records are looked for."""

    def __init__(self, fill: Fill, nbytes: int) -> None:
        self._fill = fill
        self.start = self.stop = 0
        self.final = False
        """Whether nothing follows ``stop``."""
        self.data = np.empty(nbytes, np.uint8)

    def more(self, what: str) -> None:
        """Read on. Raises ContentError where all of a window of the largest size is of no use without what follows;
        what: that, in words."""
        if self.start:
            self.data[: self.stop - self.start] = self.data[self.start : self.stop].copy()
            self.start, self.stop = 0, self.stop - self.start
        if self.stop == len(self.data):
            if self.stop >= LONGEST_NBYTES:
                raise ContentError(
                    f"{what} is longer than {format_nbytes(LONGEST_NBYTES)}, which is as much as is held",
                    "make them shorter",
                )
            larger = np.empty(2 * self.stop, np.uint8)
            larger[: self.stop] = self.data
            self.data = larger
        got = self._fill(self.data[self.stop :])
        self.stop += got
        self.final = not got


class Passages:
    """The lines or paragraphs of a text."""

    def __init__(
        self,
        fill: Fill,
        found: Found,
        member: str,
        split_on: str,
        lost: Callable[[], int],
        buffer_nbytes: int,
    ) -> None:
        from tilewright.kernels.records import passages

        self._loop, self._found, self._member = passages, found, member
        self._what = {"line": passages.LINE, "paragraph": passages.PARAGRAPH}[split_on]
        self._window = Window(fill, buffer_nbytes)
        self._state = np.zeros(passages.STATE_LENGTH, np.int64)
        self._lost, self._lost_before = lost, 0

    def fill(self, target: np.ndarray, gap: int, most: int) -> tuple[int, np.ndarray]:
        loop, window, state = self._loop, self._window, self._state
        most = min(most, len(target) + 1)
        ends, numbers = np.empty(most, np.int64), np.empty(most, np.int64)
        while True:
            loop.cut_passages(
                window.data, window.start, window.stop, window.final, self._what,
                target, gap, SEPARATOR, most, ends, numbers, state,
            )  # fmt: skip
            window.start = int(state[loop.CONSUMED])
            count, filled = int(state[loop.DOCUMENTS]), int(state[loop.FILLED])
            if count:
                # Which of these lost something is not known: the text is decoded in larger steps.
                lost = np.zeros(count, np.int64)
                lost[0] = self._lost() - self._lost_before
                self._lost_before += int(lost[0])
                self._found.ended(self._member, count, numbers=numbers[:count] + 1, lost=lost)
            if count or filled:
                return filled, ends[:count]
            if window.final:
                return 0, NO_ENDS
            window.more("a run of blanks")


def never_lost() -> int:
    return 0
