"""Some rows and columns of a matrix as an input: which they are, as a user says it."""

from __future__ import annotations

import builtins
import os
import re
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

NAME = re.compile(r"(.+)\[([-+\d:,\s]*)\]")
TEXT = re.compile(r"\s*([+-]?\d+)?\s*:\s*([+-]?\d+)?\s*")


@dataclass(frozen=True, eq=False)
class Slice:
    """Rows and columns of a matrix that is given in any way. Made by `slice`."""

    source: Whole
    rows: tuple[int | None, int | None]
    columns: tuple[int | None, int | None]

    def within(self, shape: tuple[int, ...], name: str, role: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """The first row, and the last and one more, and the same of columns, of a matrix of that shape. Raises
        OptionError for those that it does not have."""
        return _within("rows", self.rows, shape[0], name, role), _within(
            "columns", self.columns, shape[1], name, role
        )


def slice(source: Whole, rows: Span = None, columns: Span = None) -> Slice:
    """Some rows and columns of a matrix, as an input of every function that takes matrices: nothing else is read.

    source: as those functions take it. rows, columns: ``slice(1000, 2000)``, ``(1000, 2000)`` or ``"1000:2000"``, with
    negative numbers counted from the end; every one between is taken.

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
    return Slice(source, as_span(rows, "rows"), as_span(columns, "columns"))


def sliced_name(source: Any) -> Slice | None:
    """What a name such as ``A.zarr[0:1000,5:50]`` means, where nothing local has it; None for any other. Raises
    OptionError for what is in the brackets and no range."""
    if not isinstance(source, str) or (match := NAME.fullmatch(source)) is None or os.path.lexists(source):
        return None
    name, spans = match.group(1), match.group(2).split(",")
    if len(spans) > 2:
        raise OptionError(
            f"{source} names {len(spans)} ranges; rows and columns are two: {name}[0:1000,5:50]"
        )
    rows, columns = (None if one.strip() in ("", ":") else one for one in (*spans, "")[:2])
    return slice(name, rows, columns)


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
    ends = ":".join("" if end is None else str(end) for end in span)
    raise OptionError(
        f"{role}: {what} {ends} are not among the {length} {what} of {name}; ask for those it has"
    )
