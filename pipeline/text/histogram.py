"""The histogram of a corpus: the counts, what they are of, and how they are printed."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.text.read_counts import read_counts

FEW_BINS = 256
"""Up to this many bins, all are listed, with their labels; of more, only those that occur."""

JSON_COUNTS = 2**16
"""About how many counts become text at a time: as Python numbers and their digits they take some megabytes."""

BAR_WIDTH = 40
MOST_BARS = 26


@dataclass(frozen=True, eq=False)
class Histogram:
    """How often every bin occurs in a corpus."""

    by: str
    """``byte``, ``ascii``, ``letter``, ``bigram`` or ``codepoint``."""
    counts: np.ndarray
    """int64[bins]; per document int64[(documents, bins)], rows in the order of ``documents``."""
    documents: tuple[str, ...]
    skipped: int
    """Bytes that have no bin: above 127 for ``ascii``, all but letters for ``letter``."""
    nbytes: int
    """Length of the whole corpus, of compressed documents decompressed."""
    device: str
    """Name of the GPU, or ``CPU``."""
    seconds: float
    """From the first piece handed out to the last one counted; of a sum, those of its parts together."""

    document_count: int | None = None
    """How many documents were counted, those within files each; None where a file of an earlier release does not
    say."""
    undecodable: int | None = None
    """How many of U+FFFD, by code point, stand for bytes that could not be decoded, and not for themselves; None for
    other kinds, and where a GPU counted."""
    ids: tuple[str | None, ...] | None = None
    """Per document, what ``id_field`` says of each; None where none was asked for."""
    bad: tuple[tuple[str, str], ...] = ()
    """Files that were left out, and why, where ``on_error`` is "report"."""

    @property
    def bins(self) -> int:
        return int(self.counts.shape[-1])

    @property
    def totals(self) -> np.ndarray:
        """int64[bins]: the counts of the whole corpus."""
        return self.counts if self.counts.ndim == 1 else self.counts.sum(axis=0)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """What to call each bin, made on first use (1.1 million of them by code point)."""
        return tuple(label(self.by, place) for place in range(self.bins))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Histogram:
        """The histogram in a .json or .zarr that ``tilewright histogram --out`` wrote, or in what ``--json`` printed.

        Raises
        ------
        OptionError
            The name has another ending. A .csv does not say all that was counted.
        StoreError
            The file cannot be read, or holds something else.
        """
        facts, counts = read_counts(path)
        return cls(
            by=facts["by"],
            counts=counts.astype(np.int64, copy=False),
            documents=tuple(facts["documents"]),
            skipped=facts["skipped"],
            nbytes=facts["nbytes"],
            device=facts["device"],
            seconds=facts["seconds"],
            document_count=facts.get("document_count"),
            undecodable=facts.get("undecodable"),
            ids=None if facts.get("ids") is None else tuple(facts["ids"]),
            bad=tuple((name, why) for name, why in facts.get("bad", ())),
        )

    def __add__(self, other: Any) -> Histogram:
        """The histogram of both corpora together; see `added`."""
        return added([self, other]) if isinstance(other, Histogram) else NotImplemented

    def __radd__(self, other: Any) -> Histogram:
        # What ``sum`` begins with.
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def to_json(self) -> dict[str, Any]:
        """Every field as JSON types; ``labels`` is null for kinds of more than 256 bins.

        A bin's place in ``counts`` is its byte, letter, pair or code point.
        """
        return self.facts() | {"counts": self.counts.tolist()}

    def json_pieces(self) -> Iterator[str]:
        """The text of ``json.dumps(self.to_json())`` in pieces, for counts that fit in memory once."""
        yield json.dumps(self.facts())[:-1] + ', "counts": ['
        step = max(1, JSON_COUNTS * len(self.counts) // max(1, self.counts.size))
        for start in range(0, len(self.counts), step):
            text = json.dumps(self.counts[start : start + step].tolist())[1:-1]
            yield f", {text}" if start else text
        yield "]}"

    def facts(self) -> dict[str, Any]:
        """Every field as JSON types, but for the counts, which as Python numbers take as much memory again."""
        return {
            "by": self.by,
            "bins": self.bins,
            "documents": list(self.documents),
            "labels": list(self.labels) if self.bins <= FEW_BINS else None,
            "skipped": self.skipped,
            "nbytes": self.nbytes,
            "device": self.device,
            "seconds": self.seconds,
            "document_count": self.document_count,
            "undecodable": self.undecodable,
            "ids": None if self.ids is None else list(self.ids),
            "bad": [list(each) for each in self.bad],
        }

    def __str__(self) -> str:
        rate = self.nbytes / self.seconds if self.seconds > 0 else 0.0
        totals = self.totals
        documents = len(self.documents) if self.document_count is None else self.document_count
        head = (
            f"{format_nbytes(self.nbytes)} in {counted(documents, 'document')} by {self.by}"
            f" in {self.seconds:.2f} s on {self.device} ({rate / 1e9:.3g} GB/s): {int(totals.sum())} counted,"
            f" {self.skipped} skipped" + (f", {self.undecodable} undecodable" if self.undecodable else "")
        )
        return "\n".join([head, *bars(self)])


def added(histograms: Sequence[Histogram]) -> Histogram:
    """The histogram of several corpora together: their documents one behind the other, with the counts of each or of
    all.

    Raises
    ------
    OptionError
        There is none; they count different things, or only some of them per document; or a document is in two of them,
        and would count twice.
    """
    if not histograms:
        raise OptionError("there are no histograms to add; give one at least")
    first = histograms[0]
    for other in histograms[1:]:
        if other.by != first.by:
            raise OptionError(
                f"counts by {first.by} and by {other.by} do not add up; count both corpora by the same kind"
            )
        if other.counts.ndim != first.counts.ndim:
            raise OptionError(
                "one of the histograms has a row of counts for each document, and another one for all; count both"
                " corpora per document, or neither"
            )
    documents = tuple(name for histogram in histograms for name in histogram.documents)
    if len(set(documents)) < len(documents):
        twice = [name for name, times in Counter(documents).items() if times > 1]
        raise OptionError(
            f"{counted(len(twice), 'document')} would count twice, {twice[0]} first: add counts of different"
            " documents, and where only their names are the same, count them by paths that tell them apart"
        )
    if first.counts.ndim == 1:
        counts = np.sum([histogram.counts for histogram in histograms], axis=0)
    else:
        counts = np.concatenate([histogram.counts for histogram in histograms])
    return Histogram(
        by=first.by,
        counts=counts,
        documents=documents,
        skipped=sum(histogram.skipped for histogram in histograms),
        nbytes=sum(histogram.nbytes for histogram in histograms),
        device=", ".join(dict.fromkeys(histogram.device for histogram in histograms)),
        seconds=sum(histogram.seconds for histogram in histograms),
        document_count=_sum([histogram.document_count for histogram in histograms]),
        undecodable=_sum([histogram.undecodable for histogram in histograms]),
        ids=_ids_of(histograms),
        bad=tuple(each for histogram in histograms for each in histogram.bad),
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    """The sum of what is known of each, or None."""
    return None if None in counts else sum(count for count in counts if count is not None)


def _ids_of(histograms: Sequence[Histogram]) -> tuple[str | None, ...] | None:
    if all(histogram.ids is None for histogram in histograms):
        return None
    return tuple(
        each for histogram in histograms for each in (histogram.ids or [None] * len(histogram.documents))
    )


def label(by: str, place: int) -> str:
    """The name of one bin: the character where it can be printed, else its number in hexadecimal."""
    return LABELS[by](place)


def _byte_label(value: int) -> str:
    return chr(value) if 0x20 < value < 0x7F else f"\\x{value:02x}"


def _character_label(code: int) -> str:
    return chr(code) if chr(code).isprintable() and code != 0x20 else f"U+{code:04X}"


LABELS: dict[str, Callable[[int], str]] = {
    "byte": _byte_label,
    "ascii": _byte_label,
    "letter": lambda place: chr(ord("A") + place),
    "bigram": lambda place: _byte_label(place >> 8) + _byte_label(place & 0xFF),
    "codepoint": _character_label,
}


def bars(histogram: Histogram, most: int = MOST_BARS) -> list[str]:
    """Lines of label, count, share and a bar, for the ``most`` frequent bins in the order of the bins."""
    totals = histogram.totals
    occupied = np.flatnonzero(totals)
    shown = np.sort(occupied[np.argsort(-totals[occupied], kind="stable")[:most]])
    if not len(shown):
        return []
    names = [label(histogram.by, int(place)) for place in shown]
    whole, largest = int(totals.sum()), int(totals.max())
    width, digits = max(map(len, names)), len(str(largest))
    lines = [
        f"{name:<{width}}  {totals[place]:>{digits}}  {totals[place] / whole:>7.2%}"
        f"  {'█' * max(1, round(BAR_WIDTH * int(totals[place]) / largest))}"
        for name, place in zip(names, shown, strict=True)
    ]
    if len(occupied) > most:
        lines.append(f"and {len(occupied) - most} more bins")
    return lines
