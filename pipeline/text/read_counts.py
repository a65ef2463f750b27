"""Counts that were written to a file, read back: what `saved_counts.py` writes and ``--json`` prints, but for CSV."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.kernels.arguments import shown
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.pipeline.config import path_text
from tilewright.pipeline.errors import OptionError, ShapeError, StoreError
from tilewright.pipeline.store.arrays import open_array
from tilewright.pipeline.store.region_read import region_reads
from tilewright.pipeline.transfer.files import read_file

AGAIN = "count the corpus again, or give a file that tilewright histogram wrote"


def read_counts(source: str | os.PathLike[str]) -> tuple[dict[str, Any], np.ndarray]:
    """The fields of a histogram beside its counts, and these: int64[bins] or int64[(documents, bins)].

    Raises
    ------
    OptionError
        The name's ending says no format that can be read, or ``source`` is no path.
    StoreError
        The file is not there or cannot be read, or holds something else than a histogram.
    """
    text = path_text(source)
    if not text:
        raise OptionError(f"{shown(source)} is no path; give that of a file that tilewright histogram wrote")
    path = Path(text)
    if path.suffix == ".csv":
        raise OptionError(
            f"{path}: a .csv says neither all documents nor what was skipped, so that nothing could be added to it;"
            " write the counts as .json or .zarr too"
        )
    if path.suffix not in READERS:
        found = f"ends in {path.suffix!r}" if path.suffix else "has no ending"
        raise OptionError(f"{path} {found}; counts are read from {' and '.join(READERS)}")
    facts, counts = READERS[path.suffix](path)
    _check(path, facts, counts)
    return facts, counts


def _read_json(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    try:
        found = json.loads(read_file(path))
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}; give a file of counts") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is no whole JSON: {error}; {AGAIN}") from error
    if not isinstance(found, dict) or "counts" not in found:
        raise StoreError(f"{path} holds no histogram: it has no counts; {AGAIN}")
    try:
        counts = np.array(found.pop("counts"))
    except (ValueError, OverflowError) as error:
        raise StoreError(f"{path} holds no histogram: its counts are no table ({error}); {AGAIN}") from error
    return found, counts


def _read_zarr(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    try:
        array = open_array(path, ndim=1, role="counts")
    except ShapeError:
        array = open_array(path, ndim=2, role="counts")
    counts = np.empty(array.shape, array.dtype.newbyteorder("="))
    for part in region_reads(array, tuple(slice(0, side) for side in array.shape)):
        part.read(counts[part.target])
    return dict(array.attrs), counts


READERS = {".json": _read_json, ".zarr": _read_zarr}


def _check(path: Path, facts: Mapping[str, Any], counts: np.ndarray) -> None:
    """Raise StoreError for what is no histogram of ours."""

    def fail(what: str) -> None:
        raise StoreError(f"{path} holds no histogram: {what}; {AGAIN}")

    by, documents = facts.get("by"), facts.get("documents")
    if not isinstance(by, str) or by not in KINDS:
        fail(f"it says that it counts by {shown(by)}, and not by {', '.join(KINDS)}")
    if not isinstance(documents, list) or not all(isinstance(name, str) for name in documents):
        fail(f"its documents are {shown(documents)}, no list of names")
    elif counts.shape not in ((KINDS[str(by)].bins,), (len(documents), KINDS[str(by)].bins)):
        fail(
            f"{len(documents)} documents by {by} have no counts of shape {counts.shape}, but ({KINDS[str(by)].bins},)"
            " or that many for each"
        )
    if counts.dtype.kind not in "iu" or (counts.size and counts.min() < 0):
        fail("its counts are no whole numbers of 0 or more")
    for name in ("skipped", "nbytes"):
        if not isinstance(facts.get(name), int) or isinstance(facts[name], bool) or facts[name] < 0:
            fail(f"its {name} is {shown(facts.get(name))}, no number of bytes")
    if not isinstance(facts.get("device"), str) or not isinstance(facts.get("seconds"), int | float):
        fail("it does not say where and how long it was counted")
