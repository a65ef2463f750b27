"""The files that duplicates are written to: checked before the corpus is read, whole once they have their names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from tilewright.pipeline.duplicates.result import Duplicates
from tilewright.pipeline.text.counts_group import as_unicode, write_documents, write_group, write_numbers
from tilewright.pipeline.text.formats.listing import DUPLICATES_MARK
from tilewright.pipeline.text.saved_counts import (
    check_outputs,
    parquet_module,
    place_of,
    save_json,
    suffix_of,
    write_whole,
)

GROUP_KIND = DUPLICATES_MARK
"""The attribute of the group that says what it is."""


def check_duplicates_output(
    corpus: Collection[str | os.PathLike[str]], out: str | os.PathLike[str], *, overwrite: bool
) -> None:
    """As `saved_counts.check_outputs`, of ``out``."""
    check_outputs(corpus, out, None, overwrite=overwrite, out_endings=tuple(WRITERS), group_kind=GROUP_KIND)


def save_duplicates(found: Duplicates, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write duplicates as ``.json``, ``.zarr`` or ``.parquet``; the file, or what stands at the URL, appears when it is
    whole, or not at all. That the name has one of these endings, `check_duplicates_output` has said.

    JSON holds every field. So does a group of Zarr, as xarray reads it: documents with their ``cluster`` and ``exact``,
    and pairs as ``left``, ``right`` and ``jaccard``. Parquet is a table with a row for each document: ``document``,
    ``id`` if there are any, ``cluster`` and ``exact``, places, and ``keep``.

    Raises
    ------
    OutputExistsError
        Something stands there and ``overwrite`` is false.
    StoreError
        The file cannot be written.
    """
    place = place_of(path)
    WRITERS[suffix_of(place)](found, place, overwrite)


def _save_zarr(found: Duplicates, path: Path | str, overwrite: bool) -> None:
    names, undecoded = as_unicode(found.documents)
    attributes = {GROUP_KIND: 1} | found.facts()
    if undecoded is not None:
        attributes["documents"] = undecoded

    def write(group: zarr.Group) -> None:
        write_documents(group, names, found.ids)
        write_numbers(group, "cluster", found.cluster, "document")
        write_numbers(group, "exact", found.exact, "document")
        write_numbers(group, "left", found.pairs[:, 0], "pair")
        write_numbers(group, "right", found.pairs[:, 1], "pair")
        write_numbers(group, "jaccard", found.jaccard, "pair")
        if found.signatures is not None:
            write_numbers(group, "signatures", found.signatures, "document", "permutation")

    write_group(path, GROUP_KIND, attributes, write, overwrite=overwrite)


def _save_parquet(found: Duplicates, path: Path | str, overwrite: bool) -> None:
    parquet = parquet_module()
    import pyarrow

    names, _ = as_unicode(found.documents)
    columns: dict[str, Any] = {"document": pyarrow.array(names, pyarrow.string())}
    if found.ids is not None:
        columns["id"] = pyarrow.array(found.ids, pyarrow.string())
    columns |= {"cluster": found.cluster, "exact": found.exact, "keep": np.ascontiguousarray(found.keep)}
    table = pyarrow.table(columns).replace_schema_metadata({GROUP_KIND: json.dumps(found.facts())})
    write_whole(path, lambda draft: parquet.write_table(table, draft), overwrite=overwrite)


WRITERS: dict[str, Callable[[Duplicates, Path | str, bool], None]] = {
    ".json": save_json,
    ".parquet": _save_parquet,
    ".zarr": _save_zarr,
}
