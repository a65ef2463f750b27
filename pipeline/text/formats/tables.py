"""The texts in columns of Parquet and Arrow files, by pyarrow: a document for each row, or for each of several
fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tilewright.kernels.words import did_you_mean, in_one_line
from tilewright.pipeline.text.formats.decompress import Fill
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.recognition import ARROW, ARROW_STREAM, PARQUET
from tilewright.pipeline.text.formats.sources import NO_ENDS, SEPARATOR, ContentError, Found, null_field

ROWS = 1024
"""Rows of a Parquet file that are decoded at a time."""
BUFFER_NBYTES = 2**20
"""What is read of a column at a time: a row group may be larger than memory."""

MOST_COLUMNS = 10
"""Columns that a message names."""

RESTORE = "restore the file, or count its bytes as they are stored (--raw)"


class StreamFile:
    """A text as a file that is read in order, as pyarrow asks for."""

    def __init__(self, fill: Fill) -> None:
        self._fill, self._done = fill, 0
        self.closed = False
        self.mode = "rb"

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        return self._done

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def read(self, nbytes: int = -1) -> bytes:
        parts, left = [], nbytes
        while left:
            memory = np.empty(min(left, 2**20) if left > 0 else 2**20, np.uint8)
            got = self._fill(memory)
            if not got:
                break
            parts.append(memory[:got].tobytes())
            left -= got if left > 0 else 0
        data = b"".join(parts)
        self._done += len(data)
        return data


def pyarrow_for(form: str) -> Any:
    """pyarrow. Raises ContentError where it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        raise ContentError(
            f"{form} is read by pyarrow, which is not installed here",
            "install it (pip install 'tilewright[text]') where workers run",
        ) from error
    return pyarrow


class Table:
    """The documents of a table."""

    def __init__(self, form: str, file: Any, found: Found, member: str, reading: Reading, shown: str) -> None:
        """shown: the file and the member, as the user sees them."""
        self._found, self._member, self._reading = found, member, reading
        self._shown, self._nulls = shown, np.zeros(len(reading.fields), np.int64)
        self._batches = _batches(form, file, reading)
        self._told_empty = False
        self._row = 0
        """Rows before the next batch."""
        self._data = np.empty(0, np.uint8)
        self._edges: np.ndarray = np.zeros(1, np.int64)
        self._numbers: np.ndarray = np.empty(0, np.int64)
        self._ids: list[str | None] | None = None
        self._next = self._done = 0
        """The document that is handed out next, and how much of it was."""

    def fill(self, target: np.ndarray, gap: int, most: int) -> tuple[int, np.ndarray]:
        from tilewright.kernels.records.gathering import gather  # needs Numba, which a client has no use for

        while self._next == len(self._numbers):
            batch = next(self._batches, None)
            if batch is None:
                if not self._row and not self._told_empty:
                    self._told_empty = True
                    self._found.remark("no record in it", self._shown)
                for field, nulls in zip(self._reading.fields, self._nulls.tolist(), strict=True):
                    self._found.remark(null_field(field), self._shown, records=nulls)
                self._nulls[:] = 0
                return 0, NO_ENDS
            self._take(*batch)
        ends = np.empty(min(most, len(self._numbers) - self._next), np.int64)
        filled, count, done = gather(
            self._data, self._edges, self._next, self._done, target, gap, SEPARATOR, ends
        )
        if count:
            chosen = slice(self._next, self._next + count)
            fields = self._reading.fields
            self._found.ended(
                self._member,
                count,
                numbers=self._numbers[chosen],
                fields=[fields[place % len(fields)] for place in range(chosen.start, chosen.stop)]
                if len(fields) > 1
                else None,
                ids=self._ids[chosen] if self._ids is not None else None,
            )
        self._next, self._done = self._next + int(count), int(done)
        return int(filled), ends[:count]

    def _take(
        self, data: np.ndarray, edges: np.ndarray, ids: list[str | None] | None, nulls: list[int]
    ) -> None:
        self._nulls += nulls
        fields = len(self._reading.fields)
        rows = (len(edges) - 1) // fields
        self._data, self._edges = data, edges
        self._numbers = np.repeat(self._row + 1 + np.arange(rows), fields)
        self._ids = [each for each in ids for _ in range(fields)] if ids is not None else None
        self._row += rows
        self._next = self._done = 0


Batch = tuple[np.ndarray, np.ndarray, list[str | None] | None, list[int]]


def _batches(form: str, file: Any, reading: Reading) -> Iterator[Batch]:
    """For each batch of rows: the bytes of its texts, where each begins and the last ends, those of a row behind one
    another, the rows' identifiers, and how many rows of each field are null."""
    pyarrow = pyarrow_for(form)
    names = [*reading.fields, *([reading.id_field] if reading.id_field else [])]
    try:
        if form == PARQUET:
            from pyarrow import parquet

            opened = parquet.ParquetFile(file, buffer_size=BUFFER_NBYTES, pre_buffer=False)
            schema = opened.schema_arrow
            _check(pyarrow, schema, names, reading)
            batches = opened.iter_batches(batch_size=ROWS, columns=names, use_threads=False)
        else:
            from pyarrow import ipc

            if form == ARROW_STREAM:
                opened = ipc.open_stream(file)
                _check(pyarrow, opened.schema, names, reading)
                batches = iter(opened)
            else:
                assert form == ARROW
                opened = ipc.open_file(file)
                _check(pyarrow, opened.schema, names, reading)
                batches = (opened.get_batch(place) for place in range(opened.num_record_batches))
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS):
                yield _texts(pyarrow, batch.slice(start, ROWS), reading)
    except (ContentError, MemoryError):
        raise
    except OSError as error:
        if error.errno is not None:  # the system's, or ours, about the file itself
            raise
        raise _malformed(form, error) from error
    except Exception as error:  # damage comes out of pyarrow as errors of many kinds
        from tilewright.pipeline.errors import TilewrightError

        if isinstance(error, TilewrightError):
            raise
        raise _malformed(form, error) from error


def _malformed(form: str, error: Exception) -> ContentError:
    words = in_one_line(str(error))[:200] or type(error).__name__
    return ContentError(f"pyarrow cannot read it as {form}: {words}", RESTORE)


def _check(pyarrow: Any, schema: Any, names: list[str], reading: Reading) -> None:
    for name in names:
        places = schema.get_all_field_indices(name)
        if len(places) != 1:
            has = ", ".join(map(repr, schema.names[:MOST_COLUMNS]))
            more = ", and others" if len(schema.names) > MOST_COLUMNS else ""
            near = did_you_mean(name, schema.names) if not places else ""
            raise ContentError(
                f"it has {'no column' if not places else 'several columns'} {name!r}; it has {has}{more}{near}",
                "name a column that it has once" if places else "name a column that it has",
            )
        kind = schema.field(places[0]).type
        if name in reading.fields and not _is_text(pyarrow, kind):
            raise ContentError(f"its column {name!r} holds {kind}, and no texts", "name a column of texts")


def _is_text(pyarrow: Any, kind: Any) -> bool:
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    views = ("string_view", "binary_view")
    return (
        pyarrow.types.is_string(kind)
        or pyarrow.types.is_large_string(kind)
        or pyarrow.types.is_binary(kind)
        or pyarrow.types.is_large_binary(kind)
        or pyarrow.types.is_null(kind)  # of a file in which every row is null: nobody knew of what
        or str(kind) in views
    )


def _texts(pyarrow: Any, batch: Any, reading: Reading) -> Batch:
    wide = pyarrow.large_binary()
    columns, nulls = [], []
    for name in reading.fields:
        column = batch.column(name)
        if pyarrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        nulls.append(column.null_count)
        columns.append(column.cast(wide).fill_null(b""))
    texts, rows = columns[0], batch.num_rows
    if len(columns) > 1:
        order = (np.arange(rows)[:, None] + rows * np.arange(len(columns))).reshape(-1)
        texts = pyarrow.concat_arrays(columns).take(pyarrow.array(order))
    _, offsets, data = texts.buffers()
    edges = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    values = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    if (np.diff(edges) < 0).any() or (len(edges) and not 0 <= edges[0] <= edges[-1] <= len(values)):
        raise ContentError("the places of its texts are out of order", RESTORE)
    ids = None
    if reading.id_field:
        ids = [_as_text(value) for value in batch.column(reading.id_field).to_pylist()]
    return values, edges, ids, nulls


def _as_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
