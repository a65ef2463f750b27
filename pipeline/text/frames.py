"""Histograms as other libraries and notebooks show them."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tilewright.kernels.histograms.token_lists import Tokens, most_frequent
from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.pipeline.text.sparse_counts import SparseCounts

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

FEW_BINS = 256
HTML_ROWS = 20


class Histogram(Protocol):
    """What is asked of a histogram here: fields and methods of `histogram.Histogram`, which imports this module."""

    @property
    def by(self) -> str: ...
    @property
    def counts(self) -> np.ndarray | SparseCounts: ...
    @property
    def documents(self) -> Sequence[str]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def skipped(self) -> int: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def tokens(self) -> Tokens | None: ...
    @property
    def bins(self) -> int: ...
    @property
    def totals(self) -> np.ndarray: ...
    @property
    def labels(self) -> tuple[str, ...]: ...
    def label(self, place: int) -> str: ...


def names_column(names: Sequence[str] | np.ndarray) -> pd.Index:
    """Names of documents as pandas and xarray hold them: as Python's texts, since those of pandas' own type are UTF-8,
    and names of files may hold bytes that are none."""
    import pandas as pd

    return pd.Index(np.array(names, dtype=object), dtype=object, name="document")


def to_pandas(histogram: Histogram) -> pd.Series | pd.DataFrame:
    import pandas as pd

    counts = histogram.counts
    if isinstance(counts, SparseCounts):
        places, codes = np.unique(counts.indices, return_inverse=True)
        levels = [names_column(histogram.documents), [histogram.label(int(place)) for place in places]]
        index = pd.MultiIndex(levels, [counts.rows(), codes], names=["document", histogram.by])
        return pd.Series(counts.values.astype(np.int64), index, name="count")
    if counts.ndim == 2:
        return pd.DataFrame(
            counts,
            index=names_column(histogram.documents),
            columns=pd.Index(histogram.labels, name=histogram.by),
        )
    shown = np.arange(histogram.bins) if histogram.bins <= FEW_BINS else np.flatnonzero(counts)
    labels = [histogram.label(place) for place in shown.tolist()]
    return pd.Series(counts[shown], pd.Index(labels, name=histogram.by), name="count")


def to_xarray(histogram: Histogram) -> xr.DataArray | xr.Dataset:
    import xarray as xr

    counts = histogram.counts
    about = {"by": histogram.by, "nbytes": histogram.nbytes, "skipped": histogram.skipped} | dict(
        histogram.options
    )
    if not isinstance(counts, SparseCounts):
        coordinates: dict[str, Any] = {"bin": np.array(histogram.labels, dtype=object)}
        if counts.ndim == 1:
            return xr.DataArray(counts, coordinates, ("bin",), name="counts", attrs=about)
        coordinates = {"document": names_column(histogram.documents)} | coordinates
        return xr.DataArray(counts, coordinates, ("document", "bin"), name="counts", attrs=about)
    coordinates = {"document": names_column(histogram.documents)}
    if histogram.tokens is not None:
        coordinates["token"] = np.array(histogram.labels, dtype=object)
    return xr.Dataset(
        {
            "counts": ("entry", counts.values),
            "indices": ("entry", counts.indices),
            "indptr": ("document_edge", counts.indptr),
        },
        coordinates,
        about,
    )


def to_html(histogram: Histogram) -> str:
    """A table of the most frequent bins."""
    totals = histogram.totals
    whole = max(1, int(totals.sum()))
    rows = "".join(
        f"<tr><td style='text-align:left'><code>{html.escape(histogram.label(place))}</code></td>"
        f"<td>{int(totals[place]):,}</td><td>{int(totals[place]) / whole:.2%}</td></tr>"
        for place in most_frequent(totals, HTML_ROWS).tolist()
    )
    left = max(0, int(np.count_nonzero(totals)) - HTML_ROWS)
    more = f"<tr><td colspan='3'>and {left:,} more bins</td></tr>" if left else ""
    return (
        f"<table><caption>{format_nbytes(histogram.nbytes)} in"
        f" {counted(len(histogram.documents), 'document')} by {html.escape(histogram.by)}</caption>"
        f"<thead><tr><th>{html.escape(histogram.by)}</th><th>count</th><th>share</th></tr></thead>"
        f"<tbody>{rows}{more}</tbody></table>"
    )
