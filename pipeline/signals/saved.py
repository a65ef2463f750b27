"""The files that signals are written to."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from tilewright.kernels.signals.definitions import NAMES
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.signals.result import Signals, known_of, values_of
from tilewright.pipeline.text.counts_group import as_unicode, write_group, write_numbers, write_texts
from tilewright.pipeline.text.formats.outputs import SIGNALS_MARK
from tilewright.pipeline.text.saved_counts import (
    ROW_GROUP,
    document_columns,
    parquet_module,
    save_json,
    write_whole,
)
from tilewright.pipeline.text.whole.saved import Outputs


def _save_csv(found: Signals, path: Path | str, overwrite: bool) -> None:
    def write(draft: Path) -> None:
        # File names may hold bytes that are no UTF-8; they go out as they came.
        with open(draft, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            writer = csv.writer(file)
            judged = list(found.judged(slice(0)))
            writer.writerow(["document", *([] if found.ids is None else ["id"]), *NAMES, *judged])
            for start in range(0, len(found), ROW_GROUP):
                part = slice(start, start + ROW_GROUP)
                columns: list[Any] = [found.documents[part]]
                if found.ids is not None:
                    columns.append(found.ids[part])
                columns += [values_of(found.signals[name][part]) for name in NAMES]
                columns += [_as_text(values) for values in found.judged(part).values()]
                writer.writerows(zip(*columns, strict=True))

    write_whole(path, write, overwrite=overwrite)


def _save_zarr(found: Signals, path: Path | str, overwrite: bool) -> None:
    def write(group: zarr.Group) -> None:
        for name in NAMES:
            write_numbers(group, name, found.signals[name], "document")
        if found.rules is not None:
            write_numbers(group, "keep", found.keep, "document")
            write_texts(
                group,
                "reasons",
                len(found),
                lambda start, stop: found.judged(slice(start, stop))["reasons"].tolist(),
                "document",
            )

    write_group(
        path,
        SIGNALS_MARK,
        found.facts(),
        write,
        documents=found.documents,
        ids=found.ids,
        overwrite=overwrite,
    )


def _save_parquet(found: Signals, path: Path | str, overwrite: bool) -> None:
    parquet = parquet_module()
    import pyarrow

    names, undecoded = as_unicode(found.documents)
    facts = found.facts() | ({} if undecoded is None else {"documents": undecoded})
    metadata = {SIGNALS_MARK: json.dumps(facts)}

    def rows(start: int) -> Any:
        part = slice(start, start + ROW_GROUP)
        columns = document_columns(names, found.ids, part)
        for name in NAMES:
            values = found.signals[name][part]
            columns[name] = pyarrow.array(values, mask=~known_of(values))
        for name, values in found.judged(part).items():
            columns[name] = pyarrow.array(values, pyarrow.bool_() if name == "keep" else pyarrow.string())
        return pyarrow.table(columns).replace_schema_metadata(metadata)

    def write(draft: Path) -> None:
        with parquet.ParquetWriter(draft, rows(0).schema) as writer:
            for start in range(0, max(1, len(found)), ROW_GROUP):
                writer.write_table(rows(start))

    try:
        write_whole(path, write, overwrite=overwrite)
    except pyarrow.ArrowException as error:
        raise StoreError(f"output: cannot write {path}: {error}") from error


def _as_text(values: np.ndarray) -> list[str]:
    """``true`` and ``false``, and texts as they are."""
    return [str(each).lower() if isinstance(each, bool) else each for each in values.tolist()]


OUTPUTS = Outputs[Signals](
    SIGNALS_MARK,
    {".csv": _save_csv, ".json": save_json, ".parquet": _save_parquet, ".zarr": _save_zarr},
)
"""All have a row for each document: ``document``, ``id`` where there are any, the signals, and ``keep`` and ``reasons``
where rules were asked for. What is not known of a document is an empty field, null, or in Zarr -1 and NaN. JSON, Zarr
and Parquet, the latter two in attributes and metadata, hold the other fields too."""
