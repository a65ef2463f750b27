"""The names of a corpus's documents, and what else is said of each, in little memory: ten million names that are made
when somebody asks for them take some bytes each, where as texts they would take a hundred."""

from __future__ import annotations

import bisect
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np

from tilewright.kernels.histograms.token_lists import Tokens
from tilewright.kernels.numbers import counted
from tilewright.pipeline.text.formats.reading import Reading

Value = TypeVar("Value", str, str | None)
ENCODING = "utf-8", "surrogateescape"
"""Names of files may hold bytes that are no UTF-8."""


class Texts(NamedTuple):
    """Texts, of which some may not be there."""

    texts: Tokens
    absent: np.ndarray
    """bool of each."""

    @classmethod
    def of(cls, values: Sequence[str | None]) -> Texts:
        absent = np.fromiter((value is None for value in values), np.bool_, len(values))
        return cls(Tokens.of([(value or "").encode(*ENCODING) for value in values]), absent)

    def at(self, place: int) -> str | None:
        return None if self.absent[place] else self.texts[place].decode(*ENCODING)

    def all(self) -> list[str | None]:
        return [self.at(place) for place in range(len(self.absent))]


class Part(NamedTuple):
    """The documents within the files of one piece; None where nothing is to be said of any."""

    places: np.ndarray
    """int64: where in the corpus the file of each is."""
    members: Texts | None
    numbers: np.ndarray | None
    fields: Texts | None
    ids: Texts | None


def part_of(
    places: np.ndarray,
    members: Sequence[str] | None,
    numbers: np.ndarray,
    fields: Sequence[str | None] | None,
    ids: Sequence[str | None] | None,
) -> Part:
    """All of a piece's documents, in less memory."""
    return Part(
        places,
        Texts.of(members) if members and any(members) else None,
        numbers.astype(np.min_scalar_type(numbers.max())) if numbers.any() else None,
        Texts.of(fields) if fields and any(fields) else None,
        Texts.of(ids) if ids and any(each is not None for each in ids) else None,
    )


def name_of(file: str, member: str | None, number: int, field: str | None) -> str:
    """``shard.jsonl.zst:1234``: file, member, number and field, as far as there are any."""
    return ":".join(str(each) for each in (file, member, number, field) if each)


class _Made(Sequence[Value]):
    """A sequence like a tuple, of texts that are made when they are asked for."""

    def __init__(self, files: Sequence[str], parts: Sequence[Part], order: np.ndarray | None) -> None:
        """files: the names of the corpus's files. order: int64, which documents there are, in this order, the files
        first and then those of the parts one behind the other; None for those of the parts as they are."""
        self._files, self._parts, self._order = files, parts, order
        self._begins = np.cumsum([len(files), *(len(part.places) for part in parts)]).tolist()

    def __len__(self) -> int:
        return self._begins[-1] - self._begins[0] if self._order is None else len(self._order)

    @overload
    def __getitem__(self, place: int) -> Value: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Value, ...]: ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return tuple(self._at(each) for each in range(len(self))[place])
        return self._at(range(len(self))[place])

    def __iter__(self) -> Iterator[Value]:
        return (self._at(place) for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple | _Made):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Sequence[Value]) -> tuple[Any, ...]:
        return (*self, *other)

    def __radd__(self, other: Sequence[Value]) -> tuple[Any, ...]:
        return (*other, *self)

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3]))
        return f"({shown}, and {len(self) - 3} more)" if len(self) > 3 else f"({shown})"

    def _at(self, place: int) -> Any:
        row = self._begins[0] + place if self._order is None else int(self._order[place])
        number = bisect.bisect_right(self._begins, row) - 1
        if number < 0:
            return self._of_file(row)
        return self._of_row(self._parts[number], row - self._begins[number])

    @abstractmethod
    def _of_file(self, place: int) -> Any: ...
    @abstractmethod
    def _of_row(self, part: Part, row: int) -> Any: ...


class Names(_Made[str]):
    """The names of documents."""

    def _of_file(self, place: int) -> str:
        return self._files[place]

    def _of_row(self, part: Part, row: int) -> str:
        return name_of(
            self._files[int(part.places[row])],
            part.members and part.members.at(row),
            0 if part.numbers is None else int(part.numbers[row]),
            part.fields and part.fields.at(row),
        )


class Ids(_Made[str | None]):
    """What the field says that identifies documents."""

    def _of_file(self, place: int) -> None:
        return None

    def _of_row(self, part: Part, row: int) -> str | None:
        return part.ids and part.ids.at(row)


def notes_on_ids(names: Sequence[str], ids: Sequence[str | None] | None, reading: Reading) -> list[str]:
    """What is to be told of the ids of documents: how many have none, and which are those of several; nothing where
    none were asked for."""
    id_field = reading.id_field
    if id_field is None:
        return []
    fields = max(1, len(reading.fields))  # documents, one behind the other, that have the id of one record
    if ids is None:
        none = f"none of {counted(len(names), 'document')} has an id"
        return [
            f"{none}: id_field={id_field!r} names a field of JSON lines, a column, or one in a WARC's headers"
        ]
    # Ten million texts would take a gigabyte: hashes say which to look at, 0 that there is none.
    hashes = np.fromiter((0 if each is None else hash(each) or 1 for each in ids), np.int64, len(ids))
    notes = []
    if len(without := np.flatnonzero(hashes == 0)):
        have = "has" if len(without) == 1 else "have"
        notes.append(
            f"{len(without)} of {counted(len(ids), 'document')} {have} no id ({id_field!r}), {names[int(without[0])]}"
            " first"
        )
    # Beside records there may be whole texts, so that nothing says where a record's documents begin.
    values, times = np.unique(hashes[hashes != 0], return_counts=True)
    places = np.flatnonzero(np.isin(hashes, values[times > fields]))
    found = Counter(ids[place] for place in places.tolist())
    if twice := [each for each, number in found.items() if number > fields]:
        what = "record" if fields > 1 else "document"
        notes.append(
            f"{counted(len(twice), 'id')} ({id_field!r}) {'is' if len(twice) == 1 else 'are'} of more than one {what},"
            f" {twice[0]!r} first"
        )
    return notes


_IN_ONE_FIELD = str.maketrans({"\n": r"\n", "\r": r"\r", "\t": r"\t"})


def line_of(name: str, identifier: str | None) -> str:
    """A line that names a document: what identifies it, and a tab, stand before its name, unless that is None."""
    return name if identifier is None else f"{identifier.translate(_IN_ONE_FIELD)}\t{name}"
