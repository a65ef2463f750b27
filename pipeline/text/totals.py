"""What the parts of a count add up to, in the process that hands out its pieces.

Few bins are an array. Rows of many bins, and tokens that are not known beforehand, take the memory that is allowed for
them; what is more goes to files (`room.py`): tokens as lists in order, which are merged at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tilewright.kernels.cpu.loops import read_only, usable_cores
from tilewright.kernels.histograms.token_lists import Tokens
from tilewright.kernels.numbers import format_nbytes
from tilewright.pipeline.errors import PlanError
from tilewright.pipeline.room import Room
from tilewright.pipeline.text.sparse_counts import SparseCounts, narrowest
from tilewright.pipeline.threads import run_all

if TYPE_CHECKING:
    from tilewright.kernels.histograms.tables.token_table import Table

MOST_BINS_OF_ARRAYS = 256
"""Kinds with more bins than this have sparse rows where each document has one."""

LEAST_PART = 1 << 17
"""Tokens that are merged by a thread; of fewer, starting it takes longer."""
LEAST_CORES = 4
"""With fewer lists are merged by one thread: to merge them by parts takes half as much time again of all cores."""

MOST_RUNS = 64
"""Lists in order that are told apart in what is added; if there are more, they are sorted."""

Found = tuple[np.ndarray | SparseCounts, Tokens | None]
"""Counts, and for tokens that were not known beforehand what they are of."""


class Total(Protocol):
    """Parts are added in any order; rows may be of any number that was not expected."""

    def add(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray, tokens: Tokens | None) -> None:
        """Add counts, int64, of rows and columns, all int64; each pair once. tokens: what the columns are places in."""
        ...

    def result(self, order: np.ndarray | None = None) -> Found:
        """What it all is; the total is not used any more. order: int64, which rows make up the result, one behind the
        other; without it all, as they are."""
        ...


def array_nbytes(rows: int, bins: int, allowed: int) -> int:
    """Memory of an array of all bins. Raises PlanError where it is more than is allowed."""
    needed = rows * bins * np.dtype(np.int64).itemsize
    if needed > allowed:
        raise PlanError(
            f"{rows} documents × {bins} bins take {format_nbytes(needed)}, and {format_nbytes(allowed)} (half of this"
            " process's memory) are allowed; count fewer documents, a kind with fewer bins, or not per document"
        )
    return needed


class ArrayTotal:
    """An array of all bins."""

    def __init__(self, rows: int, bins: int, *, per_document: bool, allowed: int) -> None:
        """allowed: its memory, in bytes. Raises PlanError where that is not enough, as `add` does."""
        self._allowed = allowed
        array_nbytes(rows, bins, allowed)
        self._counts = np.zeros((rows, bins), np.int64)
        self._per_document = per_document

    def add(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray, tokens: Tokens | None) -> None:
        there, bins = self._counts.shape
        wanted = int(rows.max(initial=-1)) + 1
        if wanted > there:
            array_nbytes(wanted, bins, self._allowed)
            larger = np.zeros((min(2 * wanted, max(wanted, self._allowed // (8 * bins))), bins), np.int64)
            larger[:there] = self._counts
            self._counts = larger
        self._counts[rows, columns] += values

    def result(self, order: np.ndarray | None = None) -> Found:
        if not self._per_document:
            return self._counts[0], None
        if order is None:
            return self._counts, None
        there = len(self._counts)
        counts = self._counts[np.minimum(order, there - 1)]
        counts[order >= there] = 0  # of documents without any
        return counts, None


class TokenTotal:
    """Tokens of all documents together: lists in order, of which those of about the same length are merged."""

    def __init__(self, nbytes: int, room: Room | None = None) -> None:
        """nbytes: memory for lists; what is more lies in files. As much again may be taken while two are merged."""
        self._room = Room(nbytes) if room is None else room
        self._lists: list[_List] = []

    def add(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray, tokens: Tokens | None) -> None:
        from tilewright.kernels.histograms.token_order import rising

        assert tokens is not None
        counts = np.zeros(len(tokens), np.int64)
        counts[columns] = values
        # A worker's threads give a list each, one behind the other.
        first, many = 0, 0
        while first < len(tokens):
            last = rising(read_only(tokens.data), tokens.offsets, first)
            many += 1
            if many > MOST_RUNS:
                tokens, counts = _sorted(tokens.between(first, len(tokens)), counts[first:])
                first = 0
                last = len(tokens)
            self.add_list(tokens.between(first, last), counts[first:last])
            first = last

    def add_list(self, tokens: Tokens, counts: np.ndarray) -> None:
        """Add a list that is in order."""
        if not len(tokens):
            return
        before = self._room.spilled
        kept = Tokens(self._room.kept(tokens.data), self._room.kept(tokens.offsets))
        kept_counts = self._room.kept(counts)
        nbytes = tokens.nbytes + counts.nbytes - (self._room.spilled - before)
        self._lists.append(_List(kept, kept_counts, nbytes))
        # Lists of about the same length are merged, so that there are few, and each token is merged a few times.
        while len(self._lists) > 1 and len(self._lists[-2].tokens) < 2 * len(self._lists[-1].tokens):
            self._merge_last()

    def _merge_last(self) -> None:
        from tilewright.kernels.histograms.token_order import merged_by_parts

        a, b = self._lists[-2:]
        cores = usable_cores()
        parts = min(cores, (len(a.tokens) + len(b.tokens)) // LEAST_PART) if cores >= LEAST_CORES else 1
        parts = max(1, parts)
        run = partial(run_all, _pool()) if parts > 1 else _in_turn
        before, taken = self._room.spilled, 0

        def array(length: int, dtype: Any) -> np.ndarray:
            nonlocal taken
            memory = self._room.array(length, dtype)
            taken += memory.nbytes
            return memory

        tokens, counts = merged_by_parts(a.tokens, a.counts, b.tokens, b.counts, parts, run, array)
        taken -= self._room.spilled - before
        self._lists[-2:] = [_List(tokens, counts, taken)]
        self._room.given_back(a.nbytes + b.nbytes)

    def result(self, order: np.ndarray | None = None) -> Found:
        while len(self._lists) > 1:
            self._merge_last()
        if not self._lists:
            return np.empty(0, np.int64), Tokens.none()
        found = self._lists.pop()
        return found.counts, found.tokens


@dataclass(frozen=True, eq=False)
class _List:
    """Tokens in order, and their counts."""

    tokens: Tokens
    counts: np.ndarray
    nbytes: int
    """Of the room's memory that it takes."""


class RowTotal:
    """Sparse rows, one a document."""

    def __init__(self, rows: int, bins: int | None, nbytes: int) -> None:
        """bins: None for tokens that are not known beforehand. nbytes: memory for the entries."""
        self._rows, self._bins, self._most = rows, bins, nbytes
        self._room = Room(nbytes // 2)
        self._words = _new_table() if bins is None else None
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray, tokens: Tokens | None) -> None:
        if tokens is not None:
            assert self._words is not None
            columns = self._words.add(tokens.data, tokens.offsets, np.zeros(len(tokens), np.int64))[columns]
            if self._words.nbytes > self._most:
                raise PlanError(
                    f"different tokens take {format_nbytes(self._words.nbytes)}, and {format_nbytes(self._most)} are"
                    " allowed where each document has its row; count fewer documents, or not per document"
                )
        rows, columns, values = _as_rows(rows, columns, values)
        first = np.flatnonzero(np.diff(rows, prepend=-1))
        lengths = np.diff(first, append=len(rows))
        self._parts.append(
            (
                self._room.kept(rows[first].astype(np.uint32)),
                self._room.kept(lengths.astype(np.uint32)),
                self._room.kept(columns.astype(np.uint32)),
                self._room.kept(values.astype(narrowest(values))),
            )
        )

    def result(self, order: np.ndarray | None = None) -> Found:
        if order is not None:
            self._put_in_order(order)
        found: Tokens | None = None
        rank: np.ndarray | None = None
        bins = self._bins
        if self._words is not None:
            found, _, rank = listed(self._words)
            bins = len(found)
        assert bins is not None
        self._join_cut_rows()
        indptr = np.zeros(self._rows + 1, np.int64)
        for rows, lengths, _, _ in self._parts:
            indptr[rows.astype(np.int64) + 1] = lengths
        np.cumsum(indptr, out=indptr)
        indices = self._room.array(int(indptr[-1]), np.uint32)
        dtype = max(
            (part[3].dtype for part in self._parts), key=lambda each: each.itemsize, default=np.dtype("u1")
        )
        values = self._room.array(int(indptr[-1]), dtype)
        while self._parts:
            rows, lengths, columns, counts = self._parts.pop()
            if not len(rows):
                continue
            if rank is not None and len(columns):
                columns, counts = _renumbered(np.repeat(rows, lengths), rank[columns], counts)
            # Rows that follow one another are copied at once.
            begins = np.flatnonzero(np.diff(rows.astype(np.int64), prepend=-2) != 1).tolist()
            places = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            for begin, end in zip(begins, [*begins[1:], len(rows)], strict=True):
                to = int(indptr[rows[begin]])
                here = slice(places[begin], places[end])
                indices[to : to + places[end] - places[begin]] = columns[here]
                values[to : to + places[end] - places[begin]] = counts[here]
            self._room.given_back(columns.nbytes + counts.nbytes)
        return SparseCounts(indptr, indices, values, bins), found

    def _put_in_order(self, order: np.ndarray) -> None:
        """Give rows the places that they have in ``order``, and drop those that it has not."""
        most = max((int(part[0].max(initial=0)) for part in self._parts), default=0)
        new = np.full(max(most, int(order.max(initial=0))) + 1, -1, np.int64)
        new[order] = np.arange(len(order))
        self._rows = len(order)
        parts, self._parts = self._parts, []
        for rows, lengths, columns, values in parts:
            placed = new[rows]
            if (np.diff(placed) > 0).all() and (placed >= 0).all():
                self._parts.append((self._room.kept(placed.astype(np.uint32)), lengths, columns, values))
                continue
            each = np.repeat(placed, lengths)
            kept = np.flatnonzero(each >= 0)
            kept = kept[np.argsort(each[kept], kind="stable")]
            by_place = np.argsort(placed, kind="stable")
            by_place = by_place[placed[by_place] >= 0]
            self._parts.append(
                (
                    self._room.kept(placed[by_place].astype(np.uint32)),
                    self._room.kept(lengths[by_place]),
                    self._room.kept(columns[kept]),
                    self._room.kept(values[kept]),
                )
            )

    def _join_cut_rows(self) -> None:
        """Add up the rows of documents that were cut: several parts have them."""
        times = np.zeros(self._rows, np.uint32)
        for rows, *_ in self._parts:
            times[rows] += 1
        if times.max(initial=0) < 2:
            return
        whole, pieces = [], []
        for rows, lengths, columns, values in self._parts:
            cut = np.repeat(times[rows] > 1, lengths)
            if not cut.any():
                whole.append((rows, lengths, columns, values))
                continue
            pieces.append(
                (np.repeat(rows, lengths)[cut].astype(np.int64), columns[cut], values[cut].astype(np.int64))
            )
            keep = times[rows] < 2
            whole.append((rows[keep], lengths[keep], columns[~cut], values[~cut]))
        self._parts = whole
        if pieces:
            columns = np.concatenate([piece[1] for piece in pieces]).astype(np.int64)
            joined = _as_rows(
                np.concatenate([piece[0] for piece in pieces]),
                columns,
                np.concatenate([piece[2] for piece in pieces]),
            )
            words, self._words = self._words, None
            self.add(*joined, None)
            self._words = words


def _in_turn(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    return [call() for call in calls]


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that merge lists of tokens, kept by the process."""
    return ThreadPoolExecutor(usable_cores(), thread_name_prefix="tilewright-merge")


def _as_rows(
    rows: np.ndarray, columns: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Entries in the order of rows and columns, those of the same place added up."""
    steps = np.diff(rows)
    if not ((steps > 0) | ((steps == 0) & (np.diff(columns) > 0))).all():
        order = np.lexsort((columns, rows))
        rows, columns, values = rows[order], columns[order], values[order]
        new = np.ones(len(rows), np.bool_)
        new[1:] = (np.diff(rows) != 0) | (np.diff(columns) != 0)
        first = np.flatnonzero(new)
        if len(first) < len(rows):
            rows, columns, values = rows[first], columns[first], np.add.reduceat(values, first)
    return rows, columns, values


def _renumbered(rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Entries of rows in the order of new columns."""
    order = np.lexsort((columns, rows))
    return columns[order], values[order]


def _new_table() -> Table:
    from tilewright.kernels.histograms.tables.token_table import (
        Table,  # needs Numba, which few clients have a use for
    )

    return Table(with_bytes=True)


def _sorted(tokens: Tokens, counts: np.ndarray) -> tuple[Tokens, np.ndarray]:
    from tilewright.kernels.histograms.token_order import in_order

    found, sums, _ = in_order(tokens.data, tokens.offsets[:-1], np.diff(tokens.offsets), counts)
    return found, sums


def listed(table: Table) -> tuple[Tokens, np.ndarray, np.ndarray]:
    """What a table holds as a list in order, its counts, and the place there of each entry."""
    from tilewright.kernels.histograms.token_order import in_order

    used = table.used
    return in_order(table.bytes_used, table.starts[:used], table.lengths[:used], table.counts[:used])


def most_nbytes(rows: int, bins: int | None, *, per_document: bool, allowed: int) -> tuple[int, bool]:
    """Memory of `total_for` of the same, at most, and whether it is exactly that. Raises as that."""
    if bins is not None and not (per_document and bins > MOST_BINS_OF_ARRAYS):
        return array_nbytes(rows, bins, allowed), True
    return (allowed if per_document else 2 * (allowed // 4)), False


def total_for(rows: int, bins: int | None, *, per_document: bool, allowed: int) -> Total:
    """The total of a count. bins: None for tokens that are not known beforehand; allowed: its memory, in bytes.

    Raises PlanError where an array would not fit.
    """
    if per_document and (bins is None or bins > MOST_BINS_OF_ARRAYS):
        return RowTotal(rows, bins, allowed)
    if bins is None:
        return TokenTotal(2 * (allowed // 4))
    return ArrayTotal(rows, bins, per_document=per_document, allowed=allowed)
