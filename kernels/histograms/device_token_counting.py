"""Words, lines and n-grams counted on a GPU: a text in its memory goes in, a list of tokens
in order with their counts comes out, as `token_counting.TokenCounter` gives it.

A `DeviceCounter` holds the table that the kernels count in (`device_tokens.py`). The table is drained to the host when
it has no room for more, and when the counts are taken: with each token come its bytes, so that the text's memory may be
used again. What was folded or decoded, on the GPU is counted as it stands; that is made up for token by token, of which
each is there once. Tokens of more than `LONGEST` bytes are counted by a `TokenCounter`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tilewright.kernels.deferred import cuda
from tilewright.kernels.gpu.compiled import multiprocessors
from tilewright.kernels.gpu.device_choice import SIMULATOR, current_device
from tilewright.kernels.gpu.transfer import download
from tilewright.kernels.histograms.device_tokens import (
    BLOCKS_PER_MULTIPROCESSOR,
    COUNT,
    LOSSES,
    MOST_BLOCKS,
    THREADS,
    TILE,
    form_of,
    left_slots,
    most_longs,
)
from tilewright.kernels.histograms.select import clear
from tilewright.kernels.histograms.tables.device_keys import LENGTH_BITS, LONGEST, MOST_TEXT_NBYTES
from tilewright.kernels.histograms.tables.device_table import (
    CONTROLS,
    DRAIN,
    FULL,
    LEFT,
    LONG,
    LOST,
    MEASURE,
    MOST_PROBES,
    NEXT,
    PREFIXES,
)
from tilewright.kernels.histograms.token_counting import MergedCounts, TokenCounter, TokenCounts, as_counted
from tilewright.kernels.histograms.token_kinds import TokenKind, word_table
from tilewright.kernels.histograms.token_lists import Tokens
from tilewright.kernels.histograms.token_order import in_order
from tilewright.kernels.numbers import ceil_div

SLOTS = 1 << 6 if SIMULATOR else 1 << 25
"""Of a table: 512 MiB. Clearing and draining that takes a millisecond; a smaller one would be drained more often where
most tokens are new ones."""
Run = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Makes calls, and returns what each does."""

STAGES = ("kernels", "drain", "order")
"""Where a count's seconds go: until all tokens are in the table; until what it holds is on the host; there."""
EVERY_BIT = 2**64 - 1
BLOCKS_OF_PASSES = 2 if SIMULATOR else 2048
"""Of the kernels that go over a text or a table once."""

Reader = Callable[[int], Callable[[int], np.ndarray]]
"""``reader(place)`` gives a function that reads the document from a place in the text on, n bytes further with each
call, or as many as there are; also those that are not in the text."""


class DeviceCounter:
    """Counts the tokens of one kind on the current GPU; used by one thread at a time."""

    def __init__(
        self,
        kind: TokenKind,
        *,
        slots: int = SLOTS,
        longest: int = LONGEST,
        hash_mask: int = EVERY_BIT,
    ) -> None:
        """slots: a power of two. longest, hash_mask: as of `device_tokens.count_function`."""
        self._run: Run = _one_by_one
        self._parts = 1
        self._kind, self._slots, self._longest, self._hash_mask = kind, slots, longest, hash_mask
        self._blocks = 2
        if not SIMULATOR:
            self._blocks = min(MOST_BLOCKS, BLOCKS_PER_MULTIPROCESSOR * multiprocessors(current_device()))
        self._form = form_of(kind.unit, kind.n)
        self.stream = cuda.stream()
        self._table = cuda.device_array(2 * (slots + left_slots(self._blocks)), np.uint64)
        self._control = cuda.device_array(CONTROLS, np.int64)
        self._sizes = cuda.device_array(2 * PREFIXES, np.int64)
        self._longs = cuda.device_array(1, np.int64)
        letters = word_table() if kind.unit == "word" else np.zeros(1, np.uint8)
        self._letters = cuda.to_device(letters)
        self.begin()

    @property
    def nbytes(self) -> int:
        """Memory of the device that it takes, but for a text: `token_kinds.TABLE_NBYTES` at most."""
        arrays = (self._table, self._control, self._sizes, self._longs, self._letters)
        return sum(array.size * array.dtype.itemsize for array in arrays)

    def begin(self, run: Run | None = None, parts: int = 1) -> None:
        """Begin anew, whatever was counted, and whatever failed. run: how so many parts of what is drained are put in
        order at the same time; without it one behind the other."""
        self._run, self._parts = run or _one_by_one, parts
        self._forget()
        self._clear(np.zeros(CONTROLS, np.int64))

    def _forget(self) -> None:
        self._taken = MergedCounts()
        self._others: TokenCounter | None = None
        self.lost = 0
        """Malformed sequences of UTF-8 in what was counted; of bytes it is not asked."""
        self.seconds = dict.fromkeys(STAGES, 0.0)

    def count(self, text: Any, edges: np.ndarray, start: int, stop: int, reader: Reader) -> None:
        """Count the tokens that begin in ``text[start:stop]``, device memory.

        edges: int64, where each document begins, and the last ends; that one may go on, if `device_tokens.AFTER` bytes
        behind ``stop`` are there. Returns once the text is not needed any more.
        """
        if edges[-1] > MOST_TEXT_NBYTES:
            raise ValueError(f"a text of {edges[-1]} bytes is larger than {MOST_TEXT_NBYTES}")
        if stop <= start:
            return
        places = cuda.to_device(edges, stream=self.stream)
        most = most_longs(stop - start, self._kind.n, self._longest)
        if self._longs.size < most:
            self._longs = cuda.device_array(most, np.int64, stream=self.stream)
        if self._kind.decodes:
            grid = min(BLOCKS_OF_PASSES, ceil_div(stop - start, TILE))
            LOSSES.enqueue((), grid, THREADS, self.stream, text, places, start, stop, self._control)
        tiles = ceil_div(stop - start, TILE)
        while True:
            clock = time.perf_counter()
            self._launch(text, places, start, stop, min(self._blocks, tiles))
            control = self._control_now()
            self.seconds["kernels"] += time.perf_counter() - clock
            done = control[NEXT] >= tiles
            if control[FULL] or done:
                self._drain(text, places, control)
            if done:
                break
        longs = download(self._longs[: int(control[LONG])], self.stream)
        self.lost += int(control[LOST])
        self._clear(np.zeros(CONTROLS, np.int64))
        for place in np.sort(longs).tolist():
            self._count_long(reader(place))

    def take(self) -> TokenCounts:
        """All counts so far, which are forgotten."""
        if self._others is not None:
            self._taken.add(self._others.take())
        found = self._taken.take()
        self._forget()
        return found

    def _launch(self, text: Any, places: Any, start: int, stop: int, blocks: int) -> None:
        probes = min(MOST_PROBES, self._slots)
        COUNT.enqueue(
            (self._form,),
            blocks,
            THREADS,
            self.stream,
            *(text, places, start, stop, self._kind.n, self._longest, self._letters, self._hash_mask),
            *(self._table, self._slots, probes, self._longs, self._control),
        )

    def _control_now(self) -> np.ndarray:
        return download(self._control, self.stream)

    def _clear(self, control: np.ndarray) -> None:
        """Empty the table."""
        clear(self._table, self.stream)
        self._control.copy_to_device(control, stream=self.stream)
        self.stream.synchronize()

    def _drain(self, text: Any, places: Any, control: np.ndarray) -> None:
        """Bring what the table holds to the host, put it in order, and empty the table."""
        clock = time.perf_counter()
        used = self._slots + int(control[LEFT])
        grid = min(BLOCKS_OF_PASSES, ceil_div(used, THREADS))
        clear(self._sizes, self.stream)
        table = (text, places, self._kind.n, self._letters, self._table, used, self._sizes)
        MEASURE.enqueue((self._form == "words",), grid, THREADS, self.stream, *table)
        sizes = download(self._sizes, self.stream)
        ends = sizes.reshape(2, PREFIXES).cumsum(axis=1)
        entries, nbytes = ends[:, -1].tolist()
        self._sizes.copy_to_device((ends - sizes.reshape(2, PREFIXES)).ravel(), stream=self.stream)
        # One byte, or entry, at least: memory of no length has no address.
        made = [
            cuda.device_array(length + 1, dtype, stream=self.stream)
            for length, dtype in ((nbytes, np.uint8), (entries, np.uint64), (entries, np.uint32))
        ]
        DRAIN.enqueue((self._form == "words",), grid, THREADS, self.stream, *table, *made)
        data, told, counts = (download(array, self.stream) for array in made)
        control = control.copy()
        control[[FULL, LEFT]] = 0
        self._clear(control)
        drained = time.perf_counter()
        self.seconds["drain"] += drained - clock
        self._put_in_order(data, told[:entries], counts[:entries], ends)
        self.seconds["order"] += time.perf_counter() - drained

    def _put_in_order(self, data: np.ndarray, told: np.ndarray, counts: np.ndarray, ends: np.ndarray) -> None:
        """Add what was drained. told: as the kernel has written it. ends: int64[(2, PREFIXES)], behind the last entry,
        and byte, of tokens that begin so."""
        # Some entries each, and none with the same first bytes as others.
        wanted = np.arange(1, self._parts) * len(told) // self._parts
        cuts = np.unique([*np.searchsorted(ends[0], wanted, "right"), PREFIXES - 1])
        cuts = np.minimum(cuts, PREFIXES - 1)
        edges = [(0, 0), *zip(*ends[:, cuts].tolist(), strict=True)]

        def part(first: int, begin: int, last: int, end: int) -> tuple[TokenCounts, bool]:
            here, mine = told[first:last], data[begin:end]
            starts = (here >> LENGTH_BITS).astype(np.int64) - begin
            lengths = (here & ((1 << LENGTH_BITS) - 1)).astype(np.int64)
            found = as_counted(self._kind, mine, starts, lengths)
            tokens, values, _ = in_order(*found, counts[first:last].astype(np.int64))
            return TokenCounts(tokens, values), found[0] is not mine

        pairs = [(*one, *other) for one, other in itertools.pairwise(edges) if one != other]
        lists = self._run([partial(part, *pair) for pair in pairs])
        if any(changed for _, changed in lists):
            # What was folded, or decoded, begins otherwise than what it was.
            for found, _ in lists:
                self._taken.add(found)
        elif lists:
            self._taken.add(_behind_one_another([found for found, _ in lists], self._run))

    def _count_long(self, more: Callable[[int], np.ndarray]) -> None:
        if self._others is None:
            self._others = TokenCounter(self._kind)
        self._others.begin()
        self._others.part(more(1), 0, more=more)


def _behind_one_another(lists: Sequence[TokenCounts], run: Run) -> TokenCounts:
    """Lists as one, by a call for each: millions of tokens are copied to memory that the system clears first."""
    if len(lists) == 1:
        return lists[0]
    firsts = np.cumsum([0, *(len(each.counts) for each in lists)]).tolist()
    begins = np.cumsum([0, *(len(each.tokens.data) for each in lists)]).tolist()
    data, counts = np.empty(begins[-1], np.uint8), np.empty(firsts[-1], np.int64)
    offsets = np.zeros(firsts[-1] + 1, np.int64)

    def copy(number: int) -> None:
        each, first, begin = lists[number], firsts[number], begins[number]
        last = firsts[number + 1]
        data[begin : begins[number + 1]] = each.tokens.data
        counts[first:last] = each.counts
        np.add(each.tokens.offsets[1:], begin, out=offsets[first + 1 : last + 1])

    run([partial(copy, number) for number in range(len(lists))])
    return TokenCounts(Tokens(data, offsets), counts)


def _one_by_one(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    return [call() for call in calls]


def prepare(kind: TokenKind) -> None:
    """Compile and load the kernels of a kind."""
    form = form_of(kind.unit, kind.n)
    COUNT.prepare(form)
    for launcher in (MEASURE, DRAIN):
        launcher.prepare(form == "words")
    if kind.decodes:
        LOSSES.prepare()
