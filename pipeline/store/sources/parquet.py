"""Columns of lists in files of Parquet as matrices: a row for each list, which all have one length.

pyarrow decodes them, a group of rows at a time, into memory that workers read: pages of Parquet are no chunks of
numbers, and the lengths of lists lie between them.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def is_parquet(path: Path) -> bool:
    """Whether a regular file is one of Parquet."""
    return first_bytes(path, len(MAGIC)) == MAGIC


def open_column(path: Path, column: str | None, name: str, role: str) -> zarr.Array[Any]:
    """A column of lists, or the only one where none is named, as a matrix; a column of numbers as a vector.

    It takes its size in memory. Of floats that are missing it has NaN, as pandas does, which writes NaN so. Raises
    StoreError where pyarrow is missing, the file has no such column, or lists or integers in it are missing; ShapeError
    for lists of several lengths, DTypeError for what holds no numbers.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise StoreError(
            f"{role}: {name} is a Parquet file, which pyarrow reads: install that (pip install tilewright[text])"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            found = _column(file.schema_arrow, column, name, role)
            called = name if column else f"{name}::{found}"
            return _read(file, found, called, role)
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
        raise StoreError(f"{role}: {name}: there is no column {column}; it has {', '.join(names)}")
    lists = [field.name for field in schema if _is_list(field.type)]
    if len(lists) == 1:
        return str(lists[0])
    kinds = ", ".join(f"{field.name} ({field.type})" for field in schema)
    said = f"the columns of lists {', '.join(lists)}" if lists else f"no column of lists, but {kinds}"
    raise StoreError(f"{role}: {name} has {said}; give one, as {name}::NAME")


def _is_list(kind: Any) -> bool:
    import pyarrow

    return bool(
        pyarrow.types.is_list(kind)
        or pyarrow.types.is_large_list(kind)
        or pyarrow.types.is_fixed_size_list(kind)
    )


def _read(file: Any, column: str, name: str, role: str) -> zarr.Array[Any]:
    kind = file.schema_arrow.field(column).type
    items = kind.value_type if _is_list(kind) else kind
    try:
        dtype = np.dtype(items.to_pandas_dtype())
    except NotImplementedError as error:
        raise DTypeError(f"{role}: {name} holds {items}; only lists of numbers can be used") from error
    stored = stored_dtype(dtype, role, name)
    rows, first, width = file.metadata.num_rows, 0, None
    memory = None
    for part in _parts(file, column, dtype.kind == "f", name, role):
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


def _parts(file: Any, column: str, floats: bool, name: str, role: str) -> Iterator[Any]:
    """Stretches of a column, whole in memory. A missing float is NaN. Raises StoreError for other missing values."""
    for batch in file.iter_batches(columns=[column]):
        found = batch.column(0)
        lists = _is_list(found.type)
        gone, inside = _gaps(found)
        if (len(gone) and (lists or not floats)) or (len(inside) and not floats):
            raise _missing(file, column, name, role)
        yield found if lists else found.to_numpy(zero_copy_only=False)


def _gaps(found: Any) -> tuple[np.ndarray, np.ndarray]:
    """The rows of some values that are missing, and for each number that is missing within a list its row."""
    gone = np.flatnonzero(np.asarray(found.is_null()))
    if not _is_list(found.type) or not (flat := found.flatten()).null_count:
        return gone, np.zeros(0, np.int64)
    lengths = _lengths(found)
    lengths[gone] = 0
    return gone, np.searchsorted(np.cumsum(lengths), np.flatnonzero(np.asarray(flat.is_null())), side="right")


def _missing(file: Any, column: str, name: str, role: str) -> StoreError:
    """What to raise for values that are missing: how many of the whole column, and the first one's row."""
    gone: list[int] = []
    inside: list[int] = []
    row = 0
    for batch in file.iter_batches(columns=[column]):
        found = batch.column(0)
        for rows, places in zip((gone, inside), _gaps(found), strict=True):
            rows += (row + places).tolist()
        row += len(found)
    kind = file.schema_arrow.field(column).type
    if _is_list(kind) and gone:
        return StoreError(
            f"{role}: {name} has {counted(len(gone), 'missing list')}, the first in row {gone[0]}; leave such rows out"
            " (pandas.DataFrame.dropna), or fill them"
        )
    numbers, items = (inside, kind.value_type) if _is_list(kind) else (gone, kind)
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
