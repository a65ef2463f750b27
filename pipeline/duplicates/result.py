"""The duplicates of a corpus: which documents are the same text, which are nearly the same, and which to keep."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.pipeline.duplicates.bands import chance
from tilewright.pipeline.duplicates.clusters import groups_of
from tilewright.pipeline.strict_json import list_pieces
from tilewright.pipeline.text.frames import names_column
from tilewright.pipeline.text.names import line_of

if TYPE_CHECKING:
    import pandas as pd

MOST_LINES = 20
"""Clusters that are printed."""
MOST_NAMES = 5
"""Documents of a cluster that are printed."""


@dataclass(frozen=True, eq=False)
class Duplicates:
    """What of a corpus is there more than once. Documents are known by their places in ``documents``."""

    documents: tuple[str, ...]
    """All of them, in the corpus's order."""
    ids: tuple[str | None, ...] | None
    """What ``id_field`` says of each; None where none was asked for."""
    exact: np.ndarray
    """int64[documents]: for each, the first document with the same text, which may be itself."""
    cluster: np.ndarray
    """int64[documents]: for each, the first document of its cluster: those that are connected, directly or over others,
    by being the same or by a pair. It is the one to keep."""
    pairs: np.ndarray
    """int64[(pairs, 2)]: near-duplicates, the first one first, in ascending order. Of documents with the same text only
    the first is in any."""
    jaccard: np.ndarray
    """float64[pairs]: the Jaccard index of each pair's sets of shingles, the threshold or more."""
    candidates: int
    """Pairs that were compared."""
    options: Mapping[str, object]
    """What was asked for, and ``bands`` and ``rows``."""
    nbytes: int
    """Length of the whole corpus, of compressed documents decompressed."""
    seconds: float
    signatures: np.ndarray | None = None
    """uint32[(documents, num_perm)], where they were asked for."""
    bad: tuple[tuple[str, str], ...] = ()
    """Files, and lines of JSON lines, that were left out, and why, where ``on_error`` is "report"."""

    @cached_property
    def clusters(self) -> tuple[tuple[int, ...], ...]:
        """Documents that are exact or near-duplicates of each other, two or more; the first of each is to be kept."""
        return tuple(tuple(group.tolist()) for group in groups_of(self.cluster))

    @cached_property
    def exact_groups(self) -> tuple[tuple[int, ...], ...]:
        """Documents with the same text, two or more."""
        return tuple(tuple(group.tolist()) for group in groups_of(self.exact))

    @property
    def keep(self) -> np.ndarray:
        """bool[documents]: whether it is the first of its cluster, or in none."""
        kept: np.ndarray = self.cluster == np.arange(len(self.cluster))
        return kept

    @property
    def dropped(self) -> tuple[str, ...]:
        """The names of all others."""
        return tuple(self.documents[place] for place in np.flatnonzero(~self.keep).tolist())

    def dropped_lines(self) -> Iterator[str]:
        """A line for each of these: its name, and before it what ``id_field`` says of it, and a tab, where that was
        asked for. A document that says nothing has the tab alone; ends of lines and tabs of an id are escaped."""
        for place in np.flatnonzero(~self.keep).tolist():
            yield line_of(self.documents[place], None if self.ids is None else self.ids[place] or "")

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame of all documents under their names: ``id``, where there are any, ``cluster`` and ``exact``, by
        names too, and ``keep``. ModuleNotFoundError where pandas is not installed."""
        import pandas as pd

        names = names_column(self.documents)
        columns: dict[str, Any] = {} if self.ids is None else {"id": list(self.ids)}
        columns |= {"cluster": names[self.cluster], "exact": names[self.exact], "keep": self.keep}
        return pd.DataFrame(columns, index=names)

    def pairs_to_pandas(self) -> pd.DataFrame:
        """A DataFrame of the pairs: ``left`` and ``right``, by names, and ``jaccard``. ModuleNotFoundError where pandas
        is not installed."""
        import pandas as pd

        names = names_column(self.documents)
        left, right = names[self.pairs[:, 0]], names[self.pairs[:, 1]]
        return pd.DataFrame({"left": left, "right": right, "jaccard": self.jaccard})

    def _shown(self, place: int) -> str:
        """A document's name, and what ``id_field`` says of it."""
        identifier = self.ids[place] if self.ids is not None else None
        return self.documents[place] if identifier is None else f"{self.documents[place]} ({identifier})"

    def facts(self) -> dict[str, object]:
        """Every field that does not grow with the corpus, as JSON types, and ``bad``."""
        return {
            "options": dict(self.options),
            "nbytes": self.nbytes,
            "seconds": self.seconds,
            "candidates": self.candidates,
            "bad": [list(each) for each in self.bad],
        }

    def to_json(self) -> dict[str, object]:
        """Every field as JSON types."""
        found: dict[str, Any] = json.loads("".join(self.json_pieces()))
        return found

    def json_pieces(self) -> Iterator[str]:
        """The text of ``json.dumps(self.to_json())`` in pieces."""
        yield json.dumps(self.facts())[:-1]
        for name, values in (
            ("documents", self.documents),
            ("ids", self.ids),
            ("exact", self.exact),
            ("cluster", self.cluster),
            ("pairs", self.pairs),
            ("jaccard", self.jaccard),
            ("signatures", self.signatures),
        ):
            yield f', "{name}": '
            yield from ["null"] if values is None else list_pieces(values)
        yield "}"

    def __str__(self) -> str:
        options: Mapping[str, Any] = self.options
        rate = self.nbytes / self.seconds if self.seconds > 0 else 0.0
        same = int((self.exact != np.arange(len(self.exact))).sum())
        out = int((~self.keep).sum())
        units = counted(options["ngram"], options["shingle"])
        found = 100 * chance(options["threshold"], options["bands"], options["rows"])
        head = (
            f"{format_nbytes(self.nbytes)} in {counted(len(self.documents), 'document')}, shingles of {units}, in"
            f" {self.seconds:.2f} s ({rate / 1e9:.3g} GB/s)"
        )
        near = (
            f"{same} the same as an earlier one; {counted(len(self.pairs), 'pair')} with a Jaccard index of"
            f" {options['threshold']:g} or more, of {self.candidates} that {counted(options['bands'], 'band')} of"
            f" {counted(options['rows'], 'row')} proposed; {found:.4g} % of pairs just there are expected to be"
        )
        left = (
            f"{counted(len(self.clusters), 'cluster')}; without {out} of their documents, {len(self.documents) - out}"
            " are left"
        )
        lines = [head, near, left]
        for cluster in self.clusters[:MOST_LINES]:
            names = [self._shown(place) for place in cluster[:MOST_NAMES]]
            more = f" and {len(cluster) - MOST_NAMES} more" if len(cluster) > MOST_NAMES else ""
            lines.append(f"  {', '.join(names)}{more}")
        if len(self.clusters) > MOST_LINES:
            lines.append(f"and {len(self.clusters) - MOST_LINES} more clusters")
        return "\n".join(lines)
