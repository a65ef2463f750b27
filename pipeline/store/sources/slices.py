"""A part of an array as an input, such as some rows and columns of a matrix: which it is, as a user says it."""

from __future__ import annotations

import builtins
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import zarr

from tilewright.kernels.arguments import as_count, shown
from tilewright.pipeline.errors import OptionError

if TYPE_CHECKING:
    from tilewright.pipeline.store.sources.opening import InMemory

Whole: TypeAlias = "str | os.PathLike[str] | zarr.Array[Any] | InMemory"
"""A matrix as it is given, but for a slice of one."""

Span: TypeAlias = "builtins.slice | tuple[int | None, int | None] | str | None"
"""``slice(1000, 2000)``, ``(1000, 2000)`` or ``"1000:2000"``: the first, and the last and one more, either of which may
be left out, or negative, and then counts from the end. None: all."""

Part: TypeAlias = "tuple[int | None, int | None] | int"
"""What of an axis is taken: the first, and the last and one more, or one place, which leaves no axis."""

NAME = re.compile(r"(.+)\[([-+\d:,\s.]*)\]")
TEXT = re.compile(r"\s*([+-]?\d+)?\s*:\s*([+-]?\d+)?\s*")
PLACE = re.compile(r"\s*([+-]?\d+)\s*")
ALL: Part = (None, None)
REST = "..."
"""What stands in brackets for all axes that are not named, as in NumPy."""


@dataclass(frozen=True, eq=False)
class Slice:
    """A part of an array that is given in any way: rows and columns of a matrix, made by `slice`, or what a name has in
    brackets, for each axis from the first on."""

    source: Whole
    parts: tuple[Part, ...]
    by_axis: bool = False
    """Whether it is of the axes of an array of any number of dimensions, as a name has it, and not rows and columns."""
    rest: int | None = None
    """The place among the parts where all axes stand that have none; None: the end."""

    @property
    def name(self) -> str:
        """What is in the brackets of a name."""
        shown = [str(part) if isinstance(part, int) else _ends(part) for part in self.parts]
        if self.rest is not None:
            shown.insert(self.rest, REST)
        return ",".join(shown)

    def along(self, ndim: int, name: str, role: str) -> tuple[Part, ...]:
        """A part for each axis of an array of so many. Raises OptionError for more than it has."""
        left = ndim - len(self.parts)
        if left < 0:
            what = "rows and columns are two" if ndim == 2 else f"it has {ndim} axes"
            raise OptionError(f"{role}: {name}[{self.name}] names {len(self.parts)} ranges of {name}; {what}")
        place = len(self.parts) if self.rest is None else self.rest
        return (*self.parts[:place], *[ALL] * left, *self.parts[place:])

    def within(self, shape: tuple[int, ...], name: str, role: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """The first row, and the last and one more, and the same of columns, of a matrix of that shape. Raises
        OptionError for those that it does not have."""
        parts = self.along(len(shape), name, role)
        rows, columns = (
            _within(what, as_span(part, what), side, name, role)
            for what, part, side in zip(("rows", "columns"), parts, shape, strict=True)
        )
        return rows, columns

    def key(
        self, shape: tuple[int, ...], names: Sequence[str | None], name: str, role: str
    ) -> tuple[builtins.slice | int, ...]:
        """The part of an array of that shape as NumPy takes it, with no negative numbers. names: of its dimensions.
        Raises OptionError as `within`."""
        found: list[builtins.slice | int] = []
        parts = self.along(len(shape), name, role)
        for axis, (part, side, called) in enumerate(zip(parts, shape, names, strict=True)):
            what = called or f"places along axis {axis}"
            if isinstance(part, int):
                first = part + side if part < 0 else part
                found.append(_within(what, (first, first + 1), side, name, role)[0])
            else:
                found.append(builtins.slice(*_within(what, part, side, name, role)))
        return tuple(found)


def slice(source: Whole, rows: Span = None, columns: Span = None) -> Slice:
    """Some rows and columns of a matrix, as an input of every function that takes matrices: nothing else is read.

    source: as those functions take it. rows, columns: ``slice(1000, 2000)``, ``(1000, 2000)`` or ``"1000:2000"``, with
    negative numbers counted from the end; every one between is taken.

    Of an array of more dimensions a name has a range, or one place, for each axis in brackets (``z.nc::z[0:120,3]``),
    and xarray takes parts of a DataArray.

    Raises OptionError for what is no such range; the function that takes it raises that for one that reaches beyond the
    matrix, and ShapeError for an array of other dimensions than two.

    Examples
    --------
    >>> import numpy as np
    >>> import tilewright as tw
    >>> a = np.arange(12.0).reshape(4, 3)
    >>> tw.matmul(tw.slice(a, rows=(0, 2)), np.ones((3, 1)))
    array([[ 3.],
           [12.]])
    """
    if isinstance(source, Slice):
        raise OptionError(
            "slice: the source is a slice already; take the rows and columns of the whole matrix"
        )
    return Slice(source, (as_span(rows, "rows"), as_span(columns, "columns")))


def sliced_name(source: Any) -> Slice | None:
    """What a name such as ``A.zarr[0:1000,5:50]`` means, where nothing local has it; None for any other. Raises
    OptionError for what is in the brackets and is neither a range nor a place."""
    if not isinstance(source, str) or (match := NAME.fullmatch(source)) is None or os.path.lexists(source):
        return None
    name, texts = match.group(1), [one.strip() for one in match.group(2).split(",")]
    if texts.count(REST) > 1:
        raise OptionError(f"{source} has {REST} more than once; it stands for all axes that are not named")
    rest = texts.index(REST) if REST in texts else None
    parts = [_part(one, number) for number, one in enumerate(texts) if one != REST]
    return Slice(name, tuple(parts), by_axis=True, rest=rest)


def _part(text: str, number: int) -> Part:
    if not text:
        return ALL
    if match := PLACE.fullmatch(text):
        return int(match.group(1))
    return as_span(text, ("rows", "columns")[number] if number < 2 else f"axis {number}")


def as_span(given: Any, name: str) -> tuple[int | None, int | None]:
    """First, and last and one more, as given. Raises OptionError."""
    if given is None:
        return None, None
    ends: Any = None
    if isinstance(given, builtins.slice) and given.step in (None, 1):
        ends = given.start, given.stop
    elif isinstance(given, tuple | list) and len(given) == 2:
        ends = tuple(given)
    elif isinstance(given, str) and (match := TEXT.fullmatch(given)):
        ends = tuple(None if end is None else int(end) for end in match.groups())
    if ends is not None and all(end is None or as_count(end) is not None for end in ends):
        first, last = (None if end is None else as_count(end) for end in ends)
        return first, last
    raise OptionError(
        f"{name}={shown(given)} is no range; give it as '1000:2000' (the first, and the last and one more),"
        " without a step"
    )


def _within(
    what: str, span: tuple[int | None, int | None], length: int, name: str, role: str
) -> tuple[int, int]:
    first, last = (
        default if end is None else end + length if end < 0 else end
        for end, default in zip(span, (0, length), strict=True)
    )
    if 0 <= first <= last <= length:
        return first, last
    raise OptionError(
        f"{role}: {what} {_ends(span)} are not among the {length} {what} of {name}; ask for those it has"
    )


def by_axes(ndim: int) -> str:
    """How a part of an array of so many dimensions is given, in words."""
    return (
        "give a range, or one place, for each axis in brackets behind its name"
        f" ([0:1000{',:' * (ndim - 1)}]), or a part of a DataArray of xarray (isel)"
    )


def _ends(span: tuple[int | None, int | None]) -> str:
    return ":".join("" if end is None else str(end) for end in span)
