"""What tasks do: read a block of A, go through B in panels, and find what is near; or recompute a sample of rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tilewright.kernels.choices import DeviceKind, PrecisionName
from tilewright.kernels.gpu.memory import allocating
from tilewright.kernels.neighbours.forms import mutual_for, nearest_for, pairs_for
from tilewright.kernels.neighbours.nan_items import items_with_nan
from tilewright.kernels.neighbours.order import NO_INDEX, Bound, MetricName, Neighbours, sum_dtype
from tilewright.kernels.neighbours.ranges import bring_into_range, may_leave
from tilewright.pipeline.gram.options import axis_of
from tilewright.pipeline.neighbours.band_words import WordsPlace
from tilewright.pipeline.neighbours.plan import spare_elements
from tilewright.pipeline.reduce import end_if_given_up
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.region_read import read_region, region_reads
from tilewright.pipeline.store.waiting import read_while, reading_while


@dataclass(frozen=True)
class Work:
    """What all tasks of a search have in common."""

    a: StoredArray
    b: StoredArray
    one: bool
    """Whether B is A."""
    of: str
    metric: MetricName
    k: int | None
    """None: pairs beyond ``bound``."""
    bound: Bound | None
    exclude_self: bool
    once: bool
    """Of pairs: whether only those count whose column is larger than their row."""
    keep: bool
    """Whether pairs are kept, or only counted."""
    precision: PrecisionName
    panel_rows: int
    depth: int
    """Elements of an item that are read at a time."""
    holds_b: bool
    device: DeviceKind
    threads: int
    """Of a task, for what it does on its cores."""
    key: str
    """Of the search: no other has it."""
    mutual: bool = False
    """Whether a task compares all its items among themselves and with those before them, each pair once."""
    sampled: tuple[int, ...] = ()
    """Items that tasks compare once more while they search, for the check."""

    @property
    def sums(self) -> np.dtype:
        return sum_dtype(self.a.dtype.newbyteorder("="), self.b.dtype.newbyteorder("="))

    @property
    def width(self) -> int:
        return int(self.a.shape[1 - axis_of(self.of)])

    @property
    def n(self) -> int:
        return int(self.b.shape[axis_of(self.of)])


@dataclass(frozen=True)
class Candidates:
    """Items that may be the nearest of sampled ones: arrays of (samples, candidates), in no order."""

    columns: np.ndarray
    """Their numbers; -1 where there is none."""
    keys: np.ndarray
    """The larger, the nearer: float64, NaN where there is none."""
    allowed: np.ndarray
    """What rounding may have made of the search's, each way."""
    seconds: float = 0.0
    """That finding them took."""


@dataclass(frozen=True)
class Found:
    """What a task has found of its block."""

    arrays: dict[str, np.ndarray]
    """``indices`` and ``values``, or ``row``, ``column`` and ``value``; where pairs are only counted, nothing. Of a
    band that was compared with what is before it `WORDS`, unless they are ``placed``."""
    count: int
    """Neighbours, or pairs."""
    nan_rows: int
    """Items of the block with NaN."""
    read_nbytes: int
    candidates: Candidates | None = None
    """Of ``Work.sampled``, among the items of the block."""
    placed: bool = False
    """Whether its words are where the task was told to put them."""


def items_of(
    array: StoredArray,
    of: str,
    first: int,
    stop: int,
    elements: slice | None = None,
    *,
    threads: int = 1,
    check: Callable[[], None] | None = None,
) -> np.ndarray:
    """Some items of a matrix, (items, elements), of which each may be a column of it; or a part of each. Read by so
    many threads, until ``check`` raises; by default, while the task that this thread runs is needed."""
    axis = axis_of(of)
    items, along = slice(first, stop), elements or slice(0, int(array.shape[1 - axis]))
    region = (items, along) if axis == 0 else (along, items)
    check = check or end_if_given_up()
    if threads > 1:
        block = np.empty([part.stop - part.start for part in region], array.dtype.newbyteorder("="))
        with ThreadPoolExecutor(threads, initializer=read_while, initargs=(check,)) as pool:
            for _ in pool.map(lambda part: part.read(block[part.target]), region_reads(array, region)):
                pass
    else:
        with reading_while(check):
            block = read_region(array, region)
    return block if axis == 0 else block.T


def searched_items(
    work: Work,
    array: StoredArray,
    first: int,
    stop: int,
    *,
    threads: int = 1,
    check: Callable[[], None] | None = None,
) -> np.ndarray:
    """Whole items as a search takes them: as `items_of`, and for cosines all in range (`ranges.bring_into_range`)."""
    items = items_of(array, work.of, first, stop, threads=threads, check=check)
    if work.metric == "cosine":
        bring_into_range(items, work.sums, work.threads)
    return items


WORDS = "words"
"""The array of a band of items that were compared with those before them."""

_on_gpu = threading.Lock()


def _placed(work: Work, items: np.ndarray) -> Any:
    """Items where they are compared: as they are, or on the GPU."""
    if work.device == "cpu":
        return items
    from numba import cuda

    if items.dtype.kind == "b":
        items = items.view(np.uint8)
    spare = spare_elements(items.shape[1], items.dtype.itemsize)
    lines = np.pad(items, ((0, 0), (0, spare))) if spare else np.ascontiguousarray(items)
    with allocating("items", lines.nbytes, on_gpu=True):
        return cuda.to_device(lines)


class _Held:
    """What tasks of one search have read in this process: panels, by their first item."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key = ""
        self._panels: dict[int, Any] = {}
        self._locks: dict[int, threading.Lock] = {}

    def panel(self, key: str, first: int, read: Callable[[], Any]) -> Any:
        """A panel, where it is compared."""
        with self._lock:
            if key != self._key:
                self._key, self._panels, self._locks = key, {}, {}
            lock = self._locks.setdefault(first, threading.Lock())
        with lock:
            found = self._panels.get(first)
            if found is not None:
                return found
            found = read()
            with self._lock:
                if key == self._key:
                    self._panels[first] = found
            return found

    def free(self, key: str) -> None:
        with self._lock:
            if key == self._key:
                self._key, self._panels, self._locks = "", {}, {}


_held = _Held()
held_sample = _Held()
"""Of the items that are drawn for the check."""


AFTER_ALL = "-all"
"""Behind the key of a search whose items are compared with all, since they were not among themselves."""
ESTIMATE = "-estimate"
"""Behind that of a search that is still to be planned, by a sample."""


def free_held(key: str) -> None:
    """Forget what is held of a search that is over; asked of each worker."""
    for each in (key, f"{key}{AFTER_ALL}", f"{key}{ESTIMATE}"):
        _held.free(each)
        held_sample.free(each)


def held_for_estimate(work: Work, first: int, stop: int) -> np.ndarray:
    """Some items of B, which the tasks of an estimate that run in this process read once."""
    read = partial(searched_items, work, work.b, first, stop)
    items: np.ndarray = _held.panel(f"{work.key}{ESTIMATE}", first, read)
    return items


class _Panels:
    """The panels of B, one read while another is used."""

    def __init__(self, work: Work, first: int) -> None:
        self._work, self._first = work, first
        self.read_nbytes = 0
        self.seconds = 0.0

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        work = self._work
        starts = [
            start
            for start in range(0, work.n, work.panel_rows)
            if min(start + work.panel_rows, work.n) > self._first
        ]
        check = end_if_given_up()
        with ThreadPoolExecutor(1) as reader:
            ahead = reader.submit(self._panel, starts[0], check) if starts else None
            for place, start in enumerate(starts):
                assert ahead is not None
                begin = time.perf_counter()
                panel = ahead.result()
                self.seconds += time.perf_counter() - begin
                check()
                more = place + 1 < len(starts)
                ahead = reader.submit(self._panel, starts[place + 1], check) if more else None
                yield start, panel

    def _panel(self, start: int, check: Callable[[], None]) -> Any:
        work = self._work

        def read() -> Any:
            stop = min(start + work.panel_rows, work.n)
            found = searched_items(work, work.b, start, stop, threads=work.threads, check=check)
            self.read_nbytes += found.nbytes
            return _placed(work, found)

        return _held.panel(work.key, start, read) if work.holds_b else read()


def find_in_block(work: Work, first: int, stop: int) -> tuple[Found, dict[str, float]]:
    """What a task does: find the neighbours, or the pairs, of the items first to stop of A."""
    if work.depth < work.width:
        return _find_in_parts(work, first, stop)
    begin = time.perf_counter()
    block = searched_items(work, work.a, first, stop, threads=work.threads)
    read = time.perf_counter() - begin
    nan_rows = int(items_with_nan(block, work.threads).sum())
    panels = _Panels(work, first if work.once else 0)
    # On a GPU one after the other: each takes all of it, and reads while another computes.
    with _on_gpu if work.device == "cuda" else nullcontext():
        search = _search(work, _placed(work, block), first)
        for start, panel in panels:
            search.update(panel, start)
        found = _found(work, search, nan_rows, block.nbytes + panels.read_nbytes)
    seconds = time.perf_counter() - begin - read - panels.seconds
    return found, {"read": read + panels.seconds, "compute": seconds}


def find_in_band(
    work: Work,
    first: int,
    stop: int,
    place: WordsPlace | None = None,
    beside: Callable[[np.ndarray], None] = lambda items: None,
) -> tuple[Found, dict[str, float]]:
    """What a task of a mutual search does: compare the items first to stop of A with all before them, each pair once.

    Returns what that says of each: words (`kernels.neighbours.words`), which go to ``place`` where that is memory of
    this host; or of all items their neighbours, or of a band nothing, where they are to be looked for otherwise.
    beside: called of these items, on another thread, while the GPU compares them.
    """
    memory: list[Any] = []
    try:
        return _found_in_band(work, first, stop, place, beside, memory)
    finally:
        # Giving it back takes as long as filling it did.
        threading.Thread(target=memory.clear, name="tilewright-free").start()


def _found_in_band(
    work: Work,
    first: int,
    stop: int,
    place: WordsPlace | None,
    beside: Callable[[np.ndarray], None],
    memory: list[Any],
) -> tuple[Found, dict[str, float]]:
    """The same. memory: gets what is not needed any more when this returns."""
    begin = time.perf_counter()
    mutual = mutual_for(work.device)
    options: dict[str, Any] = {
        "metric": work.metric,
        "exclude_self": work.exclude_self,
        "precision": work.precision,
    }
    with _on_gpu, ThreadPoolExecutor(2) as pool:
        opened = None if place is None else pool.submit(place.open)
        check = end_if_given_up()
        block, items = sent_to_gpu(work, stop, check)
        read = time.perf_counter() - begin

        def look() -> int:
            if block is None:
                band = items_of(work.a, work.of, first, stop, threads=work.threads, check=check)
            else:
                band = block[first:]
            memory.append(band)
            nan_rows = int(items_with_nan(band, work.threads).sum())
            beside(band)
            return nan_rows

        looked: Future[int] | None = None

        def begin_to_look() -> None:
            nonlocal looked
            looked = pool.submit(look)  # once the GPU has work: to enqueue it wants the interpreter's lock

        def target() -> np.ndarray | None:
            return None if opened is None else opened.result()

        words = mutual.words_of_band(items, first, work.k, target=target, meanwhile=begin_to_look, **options)
        looked = looked or pool.submit(look)
        every = None
        if words is None and not first and stop == work.n:
            every = mutual.nearest_with_all(items, work.k, threads=work.threads, **options)
        nan_rows = looked.result()
    read_nbytes = stop * work.width * work.a.dtype.itemsize
    if every is not None:
        found = of_neighbours(every, nan_rows, read_nbytes)
    elif words is None:
        found = Found({}, 0, nan_rows, read_nbytes)
    elif opened is not None and words is opened.result():
        memory.append(words)
        found = Found({}, 0, nan_rows, read_nbytes, placed=True)
    else:
        found = Found({WORDS: words}, 0, nan_rows, read_nbytes)
    return found, {"read": read, "compute": time.perf_counter() - begin - read}


def is_read_whole(metric: MetricName, dtype: np.dtype, sums: np.dtype) -> bool:
    """Whether items may have to be scaled (`ranges`) before a GPU compares them: by their largest elements, which are
    not known before all of an item is read."""
    return metric == "cosine" and may_leave(dtype.newbyteorder("="), sums)


def sent_to_gpu(work: Work, stop: int, check: Callable[[], None]) -> tuple[np.ndarray | None, Any]:
    """The first items of A, here, unless they are quickly read once more, and on the GPU. Until ``check`` raises."""
    from tilewright.pipeline.neighbours.upload import items_read_and_sent

    if is_read_whole(work.metric, work.a.dtype, work.sums):
        block = searched_items(work, work.a, 0, stop, threads=work.threads, check=check)
        return block, _placed(work, block)
    return items_read_and_sent(work.a, work.of, stop, threads=work.threads, check=check)


def _find_in_parts(work: Work, first: int, stop: int) -> tuple[Found, dict[str, float]]:
    """The same where whole items do not fit: the sums of the block and of a panel are made of parts of items."""
    from tilewright.kernels.neighbours.host import DenseSums

    begin, read, read_nbytes = time.perf_counter(), 0.0, 0
    search: Any = None
    nan_rows = 0
    for start in range(0, work.n, work.panel_rows):
        end = min(start + work.panel_rows, work.n)
        if work.once and end <= first:
            continue
        dense = DenseSums(stop - first, end - start, work.sums, work.metric, threads=work.threads)
        has_nan = np.zeros(stop - first, np.bool_)
        for element in range(0, work.width, work.depth):
            elements = slice(element, min(element + work.depth, work.width))
            since = time.perf_counter()
            part = items_of(work.a, work.of, first, stop, elements)
            panel = items_of(work.b, work.of, start, end, elements)
            read += time.perf_counter() - since
            read_nbytes += part.nbytes + panel.nbytes
            dense.add(part, panel)
            has_nan |= items_with_nan(part, work.threads)
        nan_rows = int(has_nan.sum())
        of_a, of_b = dense.factors
        if search is None:
            nothing = np.empty((stop - first, 0), work.a.dtype.newbyteorder("="))
            search = _search(work, nothing, first, of_a)
        search.take(dense.sums, start, of_b)
    if search is None:
        search = _search(work, np.empty((stop - first, 0), work.a.dtype.newbyteorder("=")), first)
    seconds = time.perf_counter() - begin - read
    return _found(work, search, nan_rows, read_nbytes), {"read": read, "compute": seconds}


def _search(work: Work, block: np.ndarray, first: int, factors: np.ndarray | None = None) -> Any:
    common: dict[str, Any] = {
        "metric": work.metric,
        "factors": factors,
        "b_dtype": work.b.dtype.newbyteorder("="),
        "first_row": first,
    }
    common |= {"precision": work.precision} if work.device == "cuda" else {}
    if work.k is not None:
        threads, exclude = work.threads, work.exclude_self
        return nearest_for(work.device)(block, work.k, exclude_self=exclude, threads=threads, **common)
    common |= {} if work.device == "cuda" else {"threads": work.threads}
    return pairs_for(work.device)(block, work.bound, once=work.once, keep=work.keep, **common)


def _found(work: Work, search: Any, nan_rows: int, read_nbytes: int) -> Found:
    found = search.result()
    if work.k is None:
        pairs = {"row": found.row, "column": found.column, "value": found.value}
        arrays = pairs if work.keep else {}
        return Found(arrays, int(search.count), nan_rows, read_nbytes)
    return of_neighbours(found, nan_rows, read_nbytes)


def of_neighbours(found: Neighbours, nan_rows: int, read_nbytes: int) -> Found:
    """What is found of items: their neighbours."""
    arrays = {"indices": found.indices, "values": found.values}
    # Those that are missing come last.
    whole = bool((found.indices[:, -1] != NO_INDEX).all())
    count = found.indices.size if whole else int((found.indices != NO_INDEX).sum())
    return Found(arrays, count, nan_rows, read_nbytes)
