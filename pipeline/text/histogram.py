"""The histogram of a corpus: the counts, what they are of, and how they are printed."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.kernels.arguments import as_count, shown
from tilewright.kernels.histograms.token_lists import Tokens, encoding_of, most_frequent
from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.pipeline.cluster.here.worker import memory_limit
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.strict_json import list_pieces
from tilewright.pipeline.text.sparse_counts import SparseCounts
from tilewright.pipeline.text.totals import Found, RowTotal, TokenTotal

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

FEW_BINS = 256
"""Up to this many bins, all are listed, with their labels; of more, only those that occur."""

JSON_COUNTS = 2**16
"""About how many counts become text at a time: as Python numbers and their digits they take some megabytes."""

BAR_WIDTH = 40
MOST_BARS = 26
MOST_LABEL = 40
"""Characters of a label: a line may be long."""


@dataclass(frozen=True, eq=False)
class Histogram:
    """How often every bin occurs in a corpus."""

    by: str
    """``byte``, ``ascii``, ``letter``, ``bigram``, ``codepoint``, ``word``, ``line`` or ``ngram:N``, with the unit of
    n-grams where it is not ``word``."""
    counts: np.ndarray | SparseCounts
    """int64[bins]; per document int64[(documents, bins)], rows in the order of ``documents``, and of more than 256 bins
    sparse ones."""
    documents: Sequence[str]
    """Their names: a tuple, or of documents within files what makes each when it is asked for."""
    skipped: int
    """Bytes that have no bin: above 127 for ``ascii``, all but letters for ``letter``."""
    nbytes: int
    """Length of the whole corpus, of compressed documents decompressed."""
    device: str
    """Name of the GPU, or ``CPU``."""
    seconds: float
    """From the first piece handed out to the last one counted; of a sum, those of its parts together."""
    tokens: Tokens | None = None
    """What was found by a kind whose bins are not known beforehand, a bin each, in the order of their bytes."""
    options: Mapping[str, object] = field(default_factory=dict)
    """By words: ``casefold`` and ``normalise``, as they were asked for, and ``unicode``, the version that says what is
    a word."""

    document_count: int | None = None
    """How many documents were counted, those within files each; None where a file of an earlier release does not
    say."""
    undecodable: int | None = None
    """How many U+FFFD stand for bytes that could not be decoded, and not for themselves; None for kinds that do not
    decode, where a GPU counted code points, and where a state of an earlier release does not say."""
    ids: Sequence[str | None] | None = None
    """Per document, what ``id_field`` says of each; None where none was asked for."""
    bad: tuple[tuple[str, str], ...] = ()
    """Files, and lines of JSON lines, that were left out, and why, where ``on_error`` is "report"."""

    @property
    def bins(self) -> int:
        return int(self.counts.shape[-1])

    @property
    def per_document(self) -> bool:
        """Whether each document has a row of counts."""
        return self.counts.ndim == 2

    @property
    def totals(self) -> np.ndarray:
        """int64[bins]: the counts of the whole corpus."""
        counts = self.counts
        if isinstance(counts, np.ndarray) and counts.ndim == 1:
            return counts
        summed: np.ndarray = counts.sum(axis=0)
        return summed

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """What to call each bin, made on first use (1.1 million of them by code point)."""
        return tuple(self.label(place) for place in range(self.bins))

    def label(self, place: int) -> str:
        """What to call one bin: a token as it is, n-grams of bytes like single bytes, other bins by `label`."""
        if self.tokens is None:
            return label(self.by, place)
        token = self.tokens[place]
        return "".join(map(_byte_label, token)) if self.is_of_bytes else token.decode()

    @property
    def is_of_bytes(self) -> bool:
        """Whether tokens are bytes, and no text."""
        return self.by.endswith(":byte")

    def top(self, k: int = 10) -> list[tuple[str, int]]:
        """The ``k`` most frequent bins, the most frequent first, and how often they occur; of equally frequent ones the
        first in the order of the bins first. Bins that do not occur are not among them. OptionError where ``k`` is no
        whole number of 0 or more."""
        most = as_count(k)
        if most is None or most < 0:
            raise OptionError(f"k={shown(k)} is no number of bins; give a whole number of 0 or more")
        totals = self.totals
        return [(self.label(place), int(totals[place])) for place in most_frequent(totals, most).tolist()]

    def to_pandas(self) -> pd.Series | pd.DataFrame:
        """The counts as pandas has them, each bin under its label.

        A Series of all bins, or of more than 256 of those that occur. Per document a DataFrame of documents and bins,
        and of more than 256 a Series of the counts that are not zero, by document and label. ModuleNotFoundError where
        pandas is not installed.
        """
        from tilewright.pipeline.text.frames import to_pandas

        return to_pandas(self)

    def to_xarray(self) -> xr.DataArray | xr.Dataset:
        """The counts as a DataArray of xarray with coordinates ``bin`` and ``document``; sparse rows as a Dataset, as
        ``--out F.zarr`` stores them. ModuleNotFoundError where xarray is not installed."""
        from tilewright.pipeline.text.frames import to_xarray

        return to_xarray(self)

    def _repr_html_(self) -> str:
        from tilewright.pipeline.text.frames import to_html

        return to_html(self)

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
        from tilewright.pipeline.text.read_counts import read_counts  # which imports zarr

        facts, counts, tokens = read_counts(path)
        return cls(
            by=facts["by"],
            counts=counts if isinstance(counts, SparseCounts) else counts.astype(np.int64, copy=False),
            documents=tuple(facts["documents"]),
            skipped=facts["skipped"],
            nbytes=facts["nbytes"],
            device=facts["device"],
            seconds=facts["seconds"],
            document_count=facts.get("document_count"),
            undecodable=facts.get("undecodable"),
            ids=None if facts.get("ids") is None else tuple(facts["ids"]),
            bad=tuple((name, why) for name, why in facts.get("bad", ())),
            tokens=tokens,
            options=facts.get("options", {}),
        )

    def __add__(self, other: Any) -> Histogram:
        """The histogram of both corpora together; see `added`."""
        return added([self, other]) if isinstance(other, Histogram) else NotImplemented

    def __sub__(self, other: Any) -> Histogram:
        """The histogram without the documents of the other one; see `subtracted`."""
        return subtracted(self, other) if isinstance(other, Histogram) else NotImplemented

    def __radd__(self, other: Any) -> Histogram:
        # What ``sum`` begins with.
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def to_json(self) -> dict[str, object]:
        """Every field as JSON types; ``labels`` is null for kinds of more than 256 bins.

        A bin's place in ``counts`` is its byte, letter, pair or code point, or the place in ``tokens`` of its word,
        line or n-gram; of bytes, each is the character of that number there. Per document, counts of more than 256 bins
        and of tokens are pairs of lists for each: places, and how often.
        """
        found: dict[str, Any] = json.loads("".join(self.json_pieces()))
        return found

    def json_pieces(self) -> Iterator[str]:
        """The text of ``json.dumps(self.to_json())`` in pieces, for counts that fit in memory once."""
        yield json.dumps(self.facts())[:-1]
        if self.tokens is None:
            yield ', "tokens": null'
        else:
            tokens, encoding = self.tokens, encoding_of(self.by)
            yield ', "tokens": '
            yield from list_pieces(
                range(len(tokens)),
                lambda places: [tokens[place].decode(encoding) for place in places],
                JSON_COUNTS,
            )
        yield ', "counts": '
        if isinstance(self.counts, SparseCounts):
            yield "["
            for row in range(len(self.counts)):  # each a list by itself, and some are long
                text = json.dumps([part.tolist() for part in self.counts.row(row)])
                yield f", {text}" if row else text
            yield "]"
        else:
            step = max(1, JSON_COUNTS * len(self.counts) // max(1, self.counts.size))
            yield from list_pieces(self.counts, rows=step)
        yield "}"

    def facts(self) -> dict[str, object]:
        """Every field as JSON types, but for the counts, which as Python numbers take as much memory again."""
        listed = {
            "documents": list(self.documents),
            "ids": None if self.ids is None else list(self.ids),
        }
        return {name: listed.get(name, fact) for name, fact in self.short_facts().items()}

    def short_facts(self) -> dict[str, object]:
        """The same with null for what is said of each document, which may be millions."""
        return {
            "by": self.by,
            "options": dict(self.options),
            "bins": self.bins,
            "per_document": self.per_document,
            "documents": None,
            "labels": list(self.labels) if self.tokens is None and self.bins <= FEW_BINS else None,
            "skipped": self.skipped,
            "nbytes": self.nbytes,
            "device": self.device,
            "seconds": self.seconds,
            "document_count": self.document_count,
            "undecodable": self.undecodable,
            "ids": None,
            "bad": [list(each) for each in self.bad],
        }

    def __str__(self) -> str:
        return self.words()

    def words(self, most: int = MOST_BARS) -> str:
        """What is printed, with the ``most`` frequent bins."""
        rate = self.nbytes / self.seconds if self.seconds > 0 else 0.0
        totals = self.totals
        documents = len(self.documents) if self.document_count is None else self.document_count
        head = (
            f"{format_nbytes(self.nbytes)} in {counted(documents, 'document')} by {self.by}"
            f" in {self.seconds:.2f} s on {self.device} ({rate / 1e9:.3g} GB/s): {int(totals.sum())} counted,"
            f" {self.skipped} skipped" + (f", {self.undecodable} undecodable" if self.undecodable else "")
        )
        return "\n".join([head, *bars(self, most)])


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
        _check_alike(first, other, "add up")
    documents = tuple(name for histogram in histograms for name in histogram.documents)
    if len(set(documents)) < len(documents):
        twice = [name for name, times in Counter(documents).items() if times > 1]
        raise OptionError(
            f"{counted(len(twice), 'document')} would count twice, {twice[0]} first: add counts of different"
            " documents, and where only their names are the same, count them by paths that tell them apart"
        )
    counts, tokens = _summed(histograms)
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
        bad=_still_bad(histograms, documents),
        tokens=tokens,
        options=first.options,
    )


def _still_bad(histograms: Sequence[Histogram], documents: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The files that were left out of some, but for those that others counted, as once they were restored."""
    bad = {name: why for histogram in histograms for name, why in histogram.bad}
    if not bad:
        return ()
    for document in documents:
        bad.pop(document, None)
        # Of a document within a file, the file's name stands before a colon; but a file may be called so itself.
        end = -1
        while (end := document.find(":", end + 1)) >= 0:
            if document[:end] in bad and not os.path.lexists(document):
                del bad[document[:end]]
    return tuple(bad.items())


def _check_alike(first: Histogram, other: Histogram, what: str) -> None:
    """Raise OptionError where two histograms do not count the same. what: what they do not."""
    if other.by != first.by:
        raise OptionError(
            f"counts by {first.by} and by {other.by} do not {what}; count both corpora by the same kind"
        )
    differing = [name for name in first.options if other.options.get(name) != first.options[name]]
    if differing:
        said = ", ".join(f"{name}={first.options[name]} and {other.options.get(name)}" for name in differing)
        raise OptionError(f"words of {said} do not {what}; count both corpora with the same options")
    if other.counts.ndim != first.counts.ndim:
        raise OptionError(
            "one of the histograms has a row of counts for each document, and another one for all; count both"
            " corpora per document, or neither"
        )


def subtracted(whole: Histogram, part: Histogram) -> Histogram:
    """The histogram of the documents of ``whole`` without those of ``part``, which are among them.

    Raises
    ------
    OptionError
        They count different things, or only one of them per document; a document of ``part`` is not in ``whole``, or
        was something else when that was counted.
    """
    _check_alike(whole, part, "subtract")
    gone = set(part.documents)
    if missing := gone.difference(whole.documents):
        raise OptionError(
            f"{counted(len(missing), 'document')} to be subtracted {'is' if len(missing) == 1 else 'are'} not among"
            f" those counted, {min(missing)} first: subtract counts of documents that were counted by the same names"
        )
    kept = np.array([name not in gone for name in whole.documents], np.bool_)
    counts, tokens = _without_rows(whole, kept) if whole.counts.ndim == 2 else _less(whole, part)
    facts: dict[str, Any] = {
        name: None if None in (ours := getattr(whole, name), theirs := getattr(part, name)) else ours - theirs
        for name in ("skipped", "nbytes", "document_count", "undecodable")
    }
    if whole.counts.ndim == 2 and int(whole.totals.sum()) - int(part.totals.sum()) != int(counts.sum()):
        raise _other_contents()
    if any(fact is not None and fact < 0 for fact in facts.values()):
        raise _other_contents()
    return replace(
        whole,
        counts=counts,
        tokens=tokens,
        documents=tuple(itertools.compress(whole.documents, kept.tolist())),
        ids=None if whole.ids is None else tuple(itertools.compress(whole.ids, kept.tolist())),
        **facts,
    )


def _other_contents() -> OptionError:
    return OptionError(
        "what is to be subtracted was not counted so: a document had other contents then; count the corpus again, or"
        " subtract the counts that were added"
    )


def _less(whole: Histogram, part: Histogram) -> Found:
    """Counts of all documents together, without those of some. Raises OptionError where one would be below 0."""
    if whole.tokens is None:
        counts: np.ndarray = np.asarray(whole.counts) - np.asarray(part.counts)
        tokens = None
    else:
        assert part.tokens is not None
        total = TokenTotal(memory_limit() // 8)
        total.add_list(whole.tokens, np.asarray(whole.counts))
        total.add_list(part.tokens, -np.asarray(part.counts))
        found, tokens = total.result()
        assert tokens is not None
        counts = np.asarray(found)
    if (counts < 0).any():
        raise _other_contents()
    return (counts, None) if tokens is None else (counts[counts > 0], tokens.chosen(counts > 0))


def _without_rows(whole: Histogram, kept: np.ndarray) -> Found:
    """Counts of each of the documents that are kept, and of these the tokens that occur."""
    if isinstance(whole.counts, np.ndarray):
        return whole.counts[kept], None
    lengths = np.diff(whole.counts.indptr)
    entries = np.repeat(kept, lengths)
    indices, tokens, bins = whole.counts.indices[entries], whole.tokens, whole.counts.bins
    if tokens is not None:
        occurs = np.zeros(bins, np.bool_)
        occurs[indices] = True
        indices = (np.cumsum(occurs) - 1).astype(np.uint32)[indices]
        tokens, bins = tokens.chosen(occurs), int(np.count_nonzero(occurs))
    indptr = np.concatenate([[0], np.cumsum(lengths[kept])])
    return SparseCounts(indptr, indices, whole.counts.values[entries], bins), tokens


def _sum(counts: Sequence[int | None]) -> int | None:
    """The sum of what is known of each, or None."""
    return None if None in counts else sum(count for count in counts if count is not None)


def _ids_of(histograms: Sequence[Histogram]) -> tuple[str | None, ...] | None:
    if all(histogram.ids is None for histogram in histograms):
        return None
    return tuple(
        each for histogram in histograms for each in (histogram.ids or [None] * len(histogram.documents))
    )


def _summed(histograms: Sequence[Histogram]) -> Found:
    """Counts of all of them, and what tokens they are of."""
    first = histograms[0]
    dense = [each.counts for each in histograms if isinstance(each.counts, np.ndarray)]
    if first.tokens is None and len(dense) == len(histograms):
        return np.sum(dense, axis=0) if first.counts.ndim == 1 else np.concatenate(dense), None
    if first.counts.ndim == 1:
        total = TokenTotal(memory_limit() // 8)
        for histogram in histograms:
            assert histogram.tokens is not None
            assert isinstance(histogram.counts, np.ndarray)
            total.add_list(histogram.tokens, histogram.counts)
        return total.result()
    rows = RowTotal(
        sum(len(each.counts) for each in histograms),
        first.bins if first.tokens is None else None,
        memory_limit() // 2,
    )
    place = 0
    for histogram in histograms:
        counts = histogram.counts
        assert isinstance(counts, SparseCounts)
        rows.add(
            place + counts.rows(),
            counts.indices.astype(np.int64),
            counts.values.astype(np.int64),
            histogram.tokens,
        )
        place += len(counts)
    return rows.result()


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
    """Lines of label, count, share and a bar, for the ``most`` frequent bins: in the order of the bins, tokens by how
    often they occur."""
    totals = histogram.totals
    occupied = np.count_nonzero(totals)
    shown = most_frequent(totals, most)
    if histogram.tokens is None:
        shown = np.sort(shown)
    if not len(shown):
        return []
    names = [printable(histogram.label(int(place))) for place in shown]
    whole, largest = int(totals.sum()), int(totals.max())
    width, digits = max(map(len, names)), len(str(largest))
    lines = [
        f"{name:<{width}}  {totals[place]:>{digits}}  {totals[place] / whole:>7.2%}"
        f"  {'█' * max(1, round(BAR_WIDTH * int(totals[place]) / largest))}"
        for name, place in zip(names, shown, strict=True)
    ]
    if occupied > most:
        lines.append(f"and {occupied - most} more bins")
    return lines


def printable(text: str) -> str:
    """A label that takes part of a line."""
    shown = "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text[: MOST_LABEL + 1])
    return shown if len(shown) <= MOST_LABEL else f"{shown[: MOST_LABEL - 1]}…"
