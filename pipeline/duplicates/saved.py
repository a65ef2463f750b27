"""The files that duplicates are written to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import zarr

from tilewright.pipeline.duplicates.result import Duplicates
from tilewright.pipeline.text.counts_group import as_unicode, write_group, write_numbers
from tilewright.pipeline.text.formats.outputs import DUPLICATES_MARK
from tilewright.pipeline.text.saved_counts import document_columns, parquet_module, save_json, write_whole
from tilewright.pipeline.text.whole.saved import Outputs


def _save_zarr(found: Duplicates, path: Path | str, overwrite: bool) -> None:
    def write(group: zarr.Group) -> None:
        write_numbers(group, "cluster", found.cluster, "document")
        write_numbers(group, "exact", found.exact, "document")
        write_numbers(group, "left", found.pairs[:, 0], "pair")
        write_numbers(group, "right", found.pairs[:, 1], "pair")
        write_numbers(group, "jaccard", found.jaccard, "pair")
        if found.signatures is not None:
            write_numbers(group, "signatures", found.signatures, "document", "permutation")

    write_group(
        path,
        DUPLICATES_MARK,
        found.facts(),
        write,
        documents=found.documents,
        ids=found.ids,
        overwrite=overwrite,
    )


def _save_parquet(found: Duplicates, path: Path | str, overwrite: bool) -> None:
    parquet = parquet_module()
    import pyarrow

    names, _ = as_unicode(found.documents)
    columns = document_columns(names, found.ids)
    columns |= {"cluster": found.cluster, "exact": found.exact, "keep": np.ascontiguousarray(found.keep)}
    table = pyarrow.table(columns).replace_schema_metadata({DUPLICATES_MARK: json.dumps(found.facts())})
    write_whole(path, lambda draft: parquet.write_table(table, draft), overwrite=overwrite)


OUTPUTS = Outputs[Duplicates](
    DUPLICATES_MARK, {".json": save_json, ".parquet": _save_parquet, ".zarr": _save_zarr}
)
"""JSON holds every field. So does a group of Zarr, as xarray reads it: documents with their ``cluster`` and ``exact``,
and pairs as ``left``, ``right`` and ``jaccard``. Parquet is a table with a row for each document: ``document``, ``id``
if there are any, ``cluster`` and ``exact``, places, and ``keep``."""
