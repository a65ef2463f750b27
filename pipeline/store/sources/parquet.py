"""Columns of lists in files of Parquet, or in folders of these, as matrices: a row for each list, which all have one
length.

pyarrow decodes them, a group of rows at a time, into memory that workers read: pages of Parquet are no chunks of
numbers, and the lengths of lists lie between them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from tilewright.kernels.numbers import counted
from tilewright.pipeline.errors import DTypeError, ShapeError, StoreError, TilewrightError
from tilewright.pipeline.store.sources.mapped import mapped_array, stored_dtype
from tilewright.pipeline.store.sources.memory import SharedMemory
from tilewright.pipeline.transfer.files import first_bytes, with_remedy

MAGIC = b"PAR1"
ENDINGS = (".parquet", ".pq")
"""How files of Parquet end that need no ``::`` behind them, and those of a folder."""
HIDDEN = ("_", ".")
"""How files begin that are not data, such as ``_SUCCESS``, as pyarrow has it."""
ZARR_FILES = ("zarr.json", ".zarray", ".zgroup")
MOST_NAMED = 6
"""Columns that a message names."""


def is_parquet(path: Path) -> bool:
    """Whether a regular file is one of Parquet."""
    return first_bytes(path, len(MAGIC)) == MAGIC


def files_in(folder: Path) -> list[Path]:
    """The files of Parquet in a folder, in the order of their names, as pyarrow and pandas read them as one table; none
    where it is one of Zarr, or there are folders among them, by which rows may be parted (``year=2024``)."""
    if any((folder / name).exists() for name in ZARR_FILES):
        return []
    with os.scandir(folder) as listed:
        seen = [one for one in listed if not one.name.startswith(HIDDEN)]
    if any(one.is_dir() for one in seen):
        return []
    return sorted(Path(one.path) for one in seen if one.name.endswith(ENDINGS))


@dataclass(frozen=True)
class _Table:
    """The rows of files, one behind the other, opened one at a time."""

    paths: tuple[Path, ...]
    role: str

    @cached_property
    def schema(self) -> Any:
        from pyarrow import parquet

        return parquet.read_schema(self.paths[0])

    @cached_property
    def rows(self) -> int:
        from pyarrow import parquet

        return sum(parquet.read_metadata(path).num_rows for path in self.paths)

    def batches(self, column: str) -> Iterator[Any]:
        """Stretches of a column. Raises StoreError for a file that has it not, or of another kind."""
        from pyarrow import parquet

        kind = self.schema.field(column).type
        for path in self.paths:
            with parquet.ParquetFile(path) as file:
                names = file.schema_arrow.names
                found = file.schema_arrow.field(column).type if column in names else "no such column"
                if found != kind and not (
                    _items(found) == _items(kind) and _is_list(kind) == _is_list(found)
                ):
                    raise StoreError(
                        f"{self.role}: {path} has {found} for {column}, and {self.paths[0].name} has {kind}; store"
                        " both alike"
                    )
                for batch in file.iter_batches(columns=[column]):
                    yield batch.column(0)


def open_column(path: Path, column: str | None, name: str, role: str) -> zarr.Array[Any]:
    """A column of lists of a file, or of all files in a folder, or the only one where none is named, as a matrix; a
    column of numbers as a vector.

    It takes its size in memory. Of floats that are missing it has NaN, as pandas does, which writes NaN so. Raises
    StoreError where pyarrow is missing, the file has no such column, or lists or integers in it are missing; ShapeError
    for lists of several lengths, DTypeError for what holds no numbers.
    """
    try:
        import pyarrow.parquet as _  # noqa: F401
    except ImportError as error:
        raise StoreError(
            f"{role}: {name} is a Parquet file, which pyarrow reads: install that (pip install tilewright[text])"
        ) from error
    try:
        table = _Table(tuple(files_in(path)) if path.is_dir() else (path,), role)
        found = _column(table.schema, column, name, role)
        called = name if column else f"{name}::{found}"
        return _read(table, found, called, role)
    except TilewrightError:
        raise
    except Exception as error:  # whatever pyarrow raises, some of it its own
        told = with_remedy(error) if isinstance(error, OSError) else str(error)
        raise StoreError(f"{role}: cannot read {name}: {told}") from error


def _column(schema: Any, column: str | None, name: str, role: str) -> str:
    names = list(schema.names)
    if column is not None:
        if column.strip("/") in names:
            return column.strip("/")
        raise StoreError(f"{role}: {name}: there is no column {column}; it has {_some(names)}")
    lists = [field.name for field in schema if _is_list(field.type)]
    if len(lists) == 1:
        return str(lists[0])
    if lists:
        raise StoreError(f"{role}: {name} has the columns of lists {_some(lists)}; give one, as {name}::NAME")
    kinds = _some([f"{field.name} ({field.type})" for field in schema])
    raise StoreError(
        f"{role}: {name} has no column of lists, but {kinds}; give one, as {name}::NAME. Columns of numbers become a"
        f" matrix by pandas: give pandas.read_parquet({str(name)!r})[[...]].to_numpy(), or store that (numpy.save)"
    )


def _some(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _items(kind: Any) -> Any:
    return kind.value_type if _is_list(kind) else kind


def _is_list(kind: Any) -> bool:
    import pyarrow

    if not isinstance(kind, pyarrow.DataType):
        return False

    return bool(
        pyarrow.types.is_list(kind)
        or pyarrow.types.is_large_list(kind)
        or pyarrow.types.is_fixed_size_list(kind)
    )


def _read(table: _Table, column: str, name: str, role: str) -> zarr.Array[Any]:
    kind = table.schema.field(column).type
    items = _items(kind)
    try:
        dtype = np.dtype(items.to_pandas_dtype())
    except NotImplementedError as error:
        raise DTypeError(f"{role}: {name} holds {items}; only lists of numbers can be used") from error
    if dtype.kind not in "biufc":
        lists = [field.name for field in table.schema if _is_list(field.type) and field.name != column]
        told = f"; it has the columns of lists {_some(lists)}" if lists else ""
        raise DTypeError(f"{role}: {name} holds {kind}; only numbers and lists of numbers can be used{told}")
    stored = stored_dtype(dtype, role, name)
    rows, first, width = table.rows, 0, None
    memory = None
    for part in _parts(table, column, dtype.kind == "f", name, role):
        if _is_list(kind):
            part, found = _lists(part, name, role, first)
        else:
            found = None
        if first == 0:
            width = found
            shape = (rows,) if found is None else (rows, found)
            memory = SharedMemory(shape, stored, role, name)
        if found != width:
            raise ShapeError(
                f"{role}: {name} has lists of {width} numbers, and from row {first} on of {found}; a matrix has rows of"
                " one length"
            )
        assert memory is not None
        across = [] if found is None else [slice(0, found)]
        memory.write([slice(first, first + len(part)), *across], part)
        first += len(part)
    if memory is None:
        raise ShapeError(f"{role}: {name} has no rows, so that nobody knows how long they are; leave it out")
    return mapped_array(memory.mapped(name, memory.digest(), {}), memory)


def _parts(table: _Table, column: str, floats: bool, name: str, role: str) -> Iterator[Any]:
    """Stretches of a column, whole in memory. A missing float is NaN. Raises StoreError for other missing values."""
    for found in table.batches(column):
        lists = _is_list(found.type)
        gone, inside = _gaps(found)
        if (len(gone) and (lists or not floats)) or (len(inside) and not floats):
            raise _missing(table, column, name, role)
        yield found if lists else found.to_numpy(zero_copy_only=False)


def _gaps(found: Any) -> tuple[np.ndarray, np.ndarray]:
    """The rows of some values that are missing, and for each number that is missing within a list its row."""
    gone = np.flatnonzero(np.asarray(found.is_null()))
    if not _is_list(found.type) or not (flat := found.flatten()).null_count:
        return gone, np.zeros(0, np.int64)
    lengths = _lengths(found)
    lengths[gone] = 0
    return gone, np.searchsorted(np.cumsum(lengths), np.flatnonzero(np.asarray(flat.is_null())), side="right")


def _missing(table: _Table, column: str, name: str, role: str) -> StoreError:
    """What to raise for values that are missing: how many of the whole column, and the first one's row."""
    gone: list[int] = []
    inside: list[int] = []
    row = 0
    for found in table.batches(column):
        for rows, places in zip((gone, inside), _gaps(found), strict=True):
            rows += (row + places).tolist()
        row += len(found)
    kind = table.schema.field(column).type
    if _is_list(kind) and gone:
        return StoreError(
            f"{role}: {name} has {counted(len(gone), 'missing list')}, the first in row {gone[0]}; leave such rows out"
            " (pandas.DataFrame.dropna), or fill them"
        )
    numbers, items = (inside if _is_list(kind) else gone), _items(kind)
    return StoreError(
        f"{role}: {name} has {counted(len(numbers), 'missing number')}, the first in row {numbers[0]}, and {items} has"
        " no NaN; fill them with one that stands for a missing number, or store floats"
    )


def _lengths(part: Any) -> np.ndarray:
    import pyarrow

    if pyarrow.types.is_fixed_size_list(part.type):
        return np.full(len(part), part.type.list_size, np.int64)
    return np.array(part.value_lengths().fill_null(0), np.int64)


def _lists(part: Any, name: str, role: str, first: int) -> tuple[np.ndarray, int]:
    """Lists as a matrix, and their length. Raises ShapeError where they have several."""
    lengths = _lengths(part)
    width = int(lengths[0]) if len(lengths) else 0
    other = np.flatnonzero(lengths != width)
    if len(other):
        raise ShapeError(
            f"{role}: {name} has a list of {width} numbers in row {first} and one of {lengths[other[0]]} in row"
            f" {first + int(other[0])}; a matrix has rows of one length"
        )
    return part.flatten().to_numpy(zero_copy_only=False).reshape(len(part), width), width
