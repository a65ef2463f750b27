"""The command that adds up histograms of different documents, such as those of the jobs of an array, and takes out
those of documents that were removed."""

from __future__ import annotations

import os
from collections.abc import Iterable

from tilewright.pipeline.text.histogram import Histogram, added, subtracted
from tilewright.pipeline.text.saved_counts import check_outputs, save_histogram


def merge(
    paths: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    subtract: Iterable[str | os.PathLike[str]] = (),
    overwrite: bool = False,
) -> Histogram:
    """Write the sum of the histograms in files to another, which is complete when it appears; without the documents of
    those in other files, ``subtract``. ``overwrite`` replaces one that is there, also one that is added.

    Raises
    ------
    OptionError
        A name has an ending that says no format; the histograms do not add up (`added`), or
        subtract (`subtracted`).
    OutputExistsError
        ``out`` is there, and ``overwrite`` is false.
    StoreError
        A file cannot be read, or the sum not be written.
    """
    check_outputs([], out, None, overwrite=overwrite, arrays=True)
    total = added([Histogram.load(path) for path in paths])
    for path in subtract:
        total = subtracted(total, Histogram.load(path))
    save_histogram(total, out, overwrite=overwrite)
    return total
