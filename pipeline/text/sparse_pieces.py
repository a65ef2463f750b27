"""How a share of a piece is counted on the CPU where most counts would be zero: tokens that are not known beforehand,
and rows of documents."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.kernels.histograms.token_kinds import TokenKind
from tilewright.kernels.histograms.token_lists import Tokens
from tilewright.kernels.histograms.tokens import Kind
from tilewright.pipeline.text.blocks import Block
from tilewright.pipeline.text.corpus import Document, Piece, read_range
from tilewright.pipeline.text.fingerprints import Fingerprints, begin
from tilewright.pipeline.text.totals import MOST_BINS_OF_ARRAYS

LONG_NBYTES = 2**16
"""Length of documents, on average, from which on all cores count those of a block together."""

LONGEST_CHARACTER = 4
"""Bytes, of UTF-8."""

if TYPE_CHECKING:
    from tilewright.kernels.histograms.token_counting import TokenCounter


@dataclass(frozen=True, eq=False)
class Entries:
    """Counts that are not zero."""

    rows: np.ndarray | None
    """int64: which document of the share, or 0 for all; None for 0 throughout."""
    columns: np.ndarray | None
    """int64: bins, or places in ``tokens``; None where these are all of them, a list in order."""
    values: np.ndarray
    """int64."""
    tokens: Tokens | None
    nbytes: int
    """Bytes counted."""
    read_seconds: float
    count_seconds: float
    lost: dict[int, int] | None = field(default_factory=dict)
    """By rows, U+FFFD that stand for malformed bytes; None where it is not known."""


class _Clock:
    """Seconds spent between blocks, and with them."""

    def __init__(self) -> None:
        self.read = self.count = 0.0
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        took, self._last = now - self._last, now
        return took


def count_tokens(
    piece: Piece,
    kind: TokenKind,
    per_document: bool,
    blocks: Iterable[Block],
    prints: Fingerprints | None,
    check: Callable[[], None],
) -> Entries:
    """Count the tokens of a share, whose blocks have no margins behind them and no separators."""
    from tilewright.kernels.histograms.replaced import MalformedText, malformed_of_documents
    from tilewright.kernels.histograms.token_counting import TokenCounter

    counter = TokenCounter(kind, rows=per_document)
    clock, nbytes = _Clock(), 0
    malformed, lost = MalformedText(), dict[int, int]()

    def lose(row: int, count: int) -> None:
        if count:
            lost[row] = lost.get(row, 0) + count

    under_way: int | None = None

    def end() -> None:
        counter.stretch(np.empty(0, np.uint8), ends=True)
        counter.end_row()
        assert under_way is not None
        lose(under_way, malformed.end(np.empty(0, np.uint8)))

    for block in blocks:
        check()
        clock.read += clock.lap()
        if piece.is_part:
            counter.begin()
            counter.part(block.data[: block.stop], block.start, more=_behind(piece, prints))
            counter.end_row()
            if kind.decodes:
                lose(block.first, malformed.stretch(block.data[: block.stop], block.start))
                # Only where a character begins at its end: what is at a URL takes a request.
                if malformed.is_cut:
                    lose(block.first, malformed.end(_behind(piece, None)(LONGEST_CHARACTER - 1)))
        else:
            if under_way is not None and (block.edges is not None or block.first != under_way):
                end()
                under_way = None
            if block.edges is None:
                if under_way is None:
                    counter.begin()
                under_way = block.first
                counter.stretch(block.data[block.start : block.stop], ends=False)
                if kind.decodes:
                    lose(block.first, malformed.stretch(block.data[block.start : block.stop]))
            else:
                counter.documents(block.data, block.edges)
                if kind.decodes:
                    lost |= malformed_of_documents(block.data, block.edges, block.first)
        nbytes += block.nbytes
        clock.count += clock.lap()
    if under_way is not None:
        end()
    return replace(_entries(counter, per_document, nbytes, clock), lost=lost)


def _entries(counter: TokenCounter, per_document: bool, nbytes: int, clock: _Clock) -> Entries:
    if per_document:
        tokens, found = counter.take_rows()
        rows = np.repeat(np.arange(len(found.lengths)), found.lengths)
        columns, values = found.columns, found.values
    else:
        counts = counter.take()
        tokens, values = counts.tokens, counts.counts
        rows, columns = None, None
    clock.count += clock.lap()
    return Entries(rows, columns, values, tokens, nbytes, clock.read, clock.count)


def _behind(piece: Piece, prints: Fingerprints | None) -> Callable[[int], np.ndarray]:
    """A function that reads what follows a part in its document, n bytes further with each call."""
    (document,) = piece.documents
    return reading_on(document, piece.stop, prints)


def reading_on(
    document: Document, at: int, prints: Fingerprints | None = None
) -> Callable[[int], np.ndarray]:
    """A function that reads a plain document from a byte on, n bytes further with each call."""

    def more(nbytes: int) -> np.ndarray:
        nonlocal at
        stop = min(at + nbytes, document.nbytes)
        data = np.empty(stop - at, np.uint8)
        read_range(document, at, stop, data, begin(prints, 0, at))
        at = stop
        return data

    return more


def count_rows_of(kind: Kind, blocks: Iterable[Block], check: Callable[[], None]) -> Entries:
    """Count each of a share's documents by itself."""
    from tilewright.kernels.histograms.host import count_host, count_rows
    from tilewright.kernels.histograms.replaced import undecoded, undecoded_rows

    clock, nbytes = _Clock(), 0
    rows, lost = [np.empty(0, np.int64)], dict[int, int]()
    columns, values = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    under_way: tuple[int, np.ndarray] | None = None

    def end(row: int, counts: np.ndarray) -> None:
        places = np.flatnonzero(counts)
        rows.append(np.full(len(places), row, np.int64))
        columns.append(places)
        values.append(counts[places])

    for block in blocks:
        check()
        clock.read += clock.lap()
        if under_way is not None and (block.edges is not None or block.first != under_way[0]):
            end(*under_way)
            under_way = None
        if block.edges is None:
            edges = np.array([0, len(block.data)])
            found = count_host(block.data, kind, edges, block.start, block.stop)
            malformed = int(undecoded(found, kind, block.data, edges, block.start, block.stop)[0])
            if malformed:
                lost[block.first] = lost.get(block.first, 0) + malformed
            counts = found[0]
            if under_way is not None:
                counts += under_way[1]
            under_way = block.first, counts
        else:
            if kind.bins <= MOST_BINS_OF_ARRAYS and block.nbytes >= LONG_NBYTES * block.documents:
                # Several threads share out these, and their counts take little beside them.
                table = count_host(block.data, kind, block.edges, 0, len(block.data))
                bins, each = np.nonzero(table)[1], table[table != 0]
                lengths = np.count_nonzero(table, axis=1)
            else:
                lengths, bins, each = count_rows(block.data, kind, block.edges)
            rows.append(block.first + np.repeat(np.arange(block.documents), lengths))
            columns.append(bins)
            values.append(each)
            lost |= undecoded_rows(rows[-1], bins, each, kind, block.data, block.edges, block.first)
        nbytes += block.nbytes
        clock.count += clock.lap()
    if under_way is not None:
        end(*under_way)
    all_rows, all_columns, all_values = map(np.concatenate, (rows, columns, values))
    clock.count += clock.lap()
    return Entries(all_rows, all_columns, all_values, None, nbytes, clock.read, clock.count, lost)


def as_one_list(
    lists: Sequence[tuple[Tokens, np.ndarray]], run: Callable[[Sequence[Callable[[], Any]]], list[Any]]
) -> tuple[Tokens, np.ndarray]:
    """Lists of tokens in order, with their counts, as one: two and two are merged, all pairs of a round by ``run``."""
    from tilewright.kernels.histograms.token_order import merged

    while len(lists) > 1:
        pairs = zip(lists[::2], lists[1::2], strict=False)
        rest = lists[len(lists) - len(lists) % 2 :]
        lists = [*run([partial(merged, *one, *other) for one, other in pairs]), *rest]
    return lists[0]


def with_one_list(parts: list[Any], run: Callable[[Sequence[Callable[[], Any]]], list[Any]]) -> list[Any]:
    """Parts of a piece, with the fields of `Entries`, of which the first has all tokens and their counts where each had
    a list of its own. The driver has less to merge then, which it does by itself."""
    if len(parts) == 1 or parts[0].columns is not None:
        return parts
    lists = [(part.tokens, part.values) for part in parts if part.tokens is not None]
    tokens, values = as_one_list(lists, run)
    others = [replace(part, tokens=None, values=np.empty(0, np.int64)) for part in parts[1:]]
    return [replace(parts[0], tokens=tokens, values=values), *others]
