"""The matrices of a check as its tasks read them: in blocks, on many threads, in the memory that the plan counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeVar

import numpy as np

from tilewright.kernels.cpu.loops import usable_cores
from tilewright.kernels.cpu.thin import wide_dtype, widen
from tilewright.kernels.gemm.base import compute_dtype
from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline.check.vectors import Probe, group_width, line_nbytes, vector_count
from tilewright.pipeline.cluster.here.worker import current_worker
from tilewright.pipeline.plan.inputs import StoredMatrix
from tilewright.pipeline.reduce import end_if_given_up
from tilewright.pipeline.store.arrays import as_stored_matrix, is_local, name_of
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.region_read import READ_NBYTES, RegionRead, region_reads
from tilewright.pipeline.store.sessions import changes_nbytes
from tilewright.pipeline.store.waiting import read_while

TASK_NBYTES = 256 * 2**20
"""About how many bytes of a matrix one task of the check reads, in whole chunks."""

PARTS_SHARE = 1 / 8
"""The share of a worker's memory for the parts that its tasks process at once, unless one of each takes more."""

ROWS_NBYTES = 256 * 2**20
"""The most that the results of the tasks which a worker runs at once may take, all copies included."""

LINE_COPIES = 8
"""Copies of a row's results that are in memory at once: found, expected, and what they are compared by."""

AHEAD = 2
"""Parts for each thread that are under way, or done and not added up yet."""

Done = TypeVar("Done")
Work = Callable[[slice, slice, np.ndarray], Done]
"""What is done with a block: its rows and columns in what was asked for, and its elements, which may be changed."""


class Side(Protocol):
    """A matrix with op applied."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def name(self) -> str:
        """What errors call it."""

    @property
    def nbytes(self) -> int: ...

    @property
    def sent_nbytes(self) -> int:
        """Bytes that travel with it to a worker, beside its description."""

    @property
    def transposed(self) -> Side: ...

    def each_block(self, rows: slice, columns: slice, probe: Probe, work: Work[Done]) -> Iterator[Done]:
        """The results of ``work`` for all blocks of these rows and columns, in a fixed order. Blocks are rounded and
        widened as `as_summed` does; slices count from the first row and column that was asked for."""


def as_summed(block: np.ndarray, wide: np.dtype, compute: np.dtype) -> np.ndarray:
    """A block, rounded as in the product, which is formed in ``compute``, and widened to ``wide``, in which it is
    summed."""
    narrow = compute if block.dtype.kind == "c" else np.zeros(0, compute).real.dtype
    if block.dtype.kind in "fc" and block.itemsize > narrow.itemsize:
        with np.errstate(over="ignore"):  # to infinity
            block = block.astype(narrow)
    return widen(block, wide)


@dataclass(frozen=True)
class StoredSide:
    """A stored matrix with op applied: what blocks of it are read and how."""

    array: StoredArray
    transpose: bool
    more_nbytes: ClassVar[int] = 0
    """What each element takes more than `part_nbytes` counts, while it is processed."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.array.shape
        return (columns, rows) if self.transpose else (rows, columns)

    @property
    def name(self) -> str:
        return name_of(self.array)

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def sent_nbytes(self) -> int:
        return changes_nbytes(self.array)

    @property
    def transposed(self) -> StoredSide:
        return replace(self, transpose=not self.transpose)

    def each_block(self, rows: slice, columns: slice, probe: Probe, work: Work[Done]) -> Iterator[Done]:
        """On many threads; no more blocks are begun than memory holds, or than are soon asked for."""

        def load_and_work(place: slice, across: slice, part: RegionRead) -> list[Done]:
            block = np.empty(part.shape, self.array.dtype.newbyteorder("="))
            part.read(block)
            return [
                work(down, right, self.made(band, _from(rows, down), _from(columns, right), probe))
                for down, right, band in self.bands(place, across, block)
            ]

        threads = self._threads(rows, probe)
        for done in in_order(self._parts(rows, columns), load_and_work, threads, end_if_given_up()):
            yield from done

    def bands(
        self, rows: slice, columns: slice, block: np.ndarray
    ) -> Iterator[tuple[slice, slice, np.ndarray]]:
        """What is made of a block as it is stored, and worked with, at once: rows and columns of the side, and that of
        the block."""
        yield rows, columns, block

    def made(self, block: np.ndarray, rows: slice, columns: slice, probe: Probe) -> np.ndarray:
        """What becomes of a block as it is stored, of these rows and columns of the side."""
        return as_summed(block.T if self.transpose else block, probe.dtype, probe.compute)

    def largest(self, rows: slice) -> float:
        """The largest absolute value of these rows that is finite; 0 where none is."""
        largest = 0.0
        columns = slice(0, self.shape[1])
        for place, across, part in self._parts(rows, columns):
            block = np.empty(part.shape, self.array.dtype.newbyteorder("="))
            part.read(block)
            largest = max(largest, self.largest_of(block, _from(rows, place), _from(columns, across)))
        return largest

    def largest_of(self, block: np.ndarray, rows: slice, columns: slice) -> float:
        """The same of a block as it is stored, of these rows and columns of the side."""
        sizes = np.abs(block).astype(np.float64)
        return float(np.max(sizes, where=np.isfinite(sizes), initial=0.0))

    def step(self, line_nbytes: int, tasks: int) -> int:
        """Rows of a task, each of which makes results of ``line_nbytes``, where a worker runs so many tasks at once."""
        return task_rows(as_stored_matrix(self.array, transpose=self.transpose), line_nbytes, tasks)

    def _parts(self, rows: slice, columns: slice) -> list[tuple[slice, slice, RegionRead]]:
        """The parts of these rows and columns: their rows and columns, counted from the first of these, and how to read
        them."""
        region = (columns, rows) if self.transpose else (rows, columns)
        reads = region_reads(self.array, region, in_loops=True)
        order = (1, 0) if self.transpose else (0, 1)
        return [(read.target[order[0]], read.target[order[1]], read) for read in reads]

    def _threads(self, rows: slice, probe: Probe) -> int:
        """How many threads process these rows: for local files no more than there are cores."""
        threads = min(probe.threads, usable_cores()) if is_local(self.array) else probe.threads
        worker = current_worker()
        limit = worker.memory_manager.memory_limit
        if not limit:
            return threads
        matrix = as_stored_matrix(self.array, transpose=self.transpose)
        height = rows.stop - rows.start
        one = part_nbytes(matrix, height, probe.line_nbytes, probe.compute, self.more_nbytes)
        return max(1, min(threads, _parts_nbytes(limit, worker.state.nthreads) // max(1, one)))


def _from(whole: slice, part: slice) -> slice:
    """Where a part lies, that is counted from the first of a whole."""
    return slice(whole.start + part.start, whole.start + part.stop)


def in_order(
    parts: list[tuple[slice, slice, RegionRead]],
    work: Callable[[slice, slice, RegionRead], Done],
    threads: int,
    check: Callable[[], None],
) -> Iterator[Done]:
    """The results of ``work`` for all parts, on so many threads, in the order of the parts; ``check`` raises where
    nobody needs them any more."""
    with ThreadPoolExecutor(threads, "tilewright-verify", initializer=read_while, initargs=(check,)) as pool:
        coming: deque[Future[Done]] = deque()
        try:
            for part in parts:
                if len(coming) == AHEAD * threads:
                    yield coming.popleft().result()
                coming.append(pool.submit(work, *part))
            while coming:
                yield coming.popleft().result()
        finally:
            for future in coming:
                future.cancel()


def task_rows(matrix: StoredMatrix, line_nbytes: int, tasks: int) -> int:
    """Rows of a task: whole chunks, about ``TASK_NBYTES`` of them, but no more rows than ``ROWS_NBYTES`` allows for
    results of ``line_nbytes`` each of so many tasks."""
    most = max(1, ROWS_NBYTES // (tasks * LINE_COPIES * line_nbytes))
    unit = matrix.unit[0] if matrix.part is None or matrix.part[0] > most else matrix.part[0]
    if most < unit:
        return most
    strip = unit * max(1, matrix.columns) * matrix.dtype.itemsize
    return unit * max(1, min(TASK_NBYTES // strip, most // unit))


def check_nbytes(
    a: StoredMatrix,
    b: StoredMatrix,
    c: StoredMatrix,
    rounds: int,
    threads: int,
    host_nbytes: int | None,
    tasks: int = 1,
    inner: int | None = None,
    more_nbytes: int = 0,
    vectors_nbytes: int = 0,
) -> int:
    """The most that a worker holds while C is checked: B times the probe, the probe, and for each of the tasks that it
    runs at once its results and the parts that so many threads process, where the worker has ``host_nbytes``.

    inner: the inner side of the product, k if that is None. more_nbytes: what an element takes more while it is
    processed than in a plain product. vectors_nbytes: of what is sent besides.
    """
    dtype, wide = c.dtype, wide_dtype(c.dtype)
    inner = b.rows if inner is None else inner
    vectors = vector_count(rounds, dtype)
    groups = ceil_div(c.columns, group_width(c.columns, inner, dtype, rounds, c.unit[1]))
    line = line_nbytes(vectors, groups, wide)
    shared = (
        vectors_nbytes
        + inner * line
        + c.columns * (vectors * (1 if dtype.kind in "iu" else 4) + 2 * wide.itemsize)
    )
    longest = max(a.rows, inner)
    rows = min(longest, max(task_rows(matrix, line, tasks) for matrix in (a, b, c)))
    tasks = min(tasks, max(1, ceil_div(longest, max(1, rows))))
    compute = compute_dtype(dtype)
    largest = max(part_nbytes(matrix, rows, line, compute, more_nbytes) for matrix in (a, b, c))
    room = largest if host_nbytes is None else max(largest, _parts_nbytes(host_nbytes, tasks))
    return shared + tasks * (rows * line * LINE_COPIES + min(threads * largest, room))


def _parts_nbytes(host_nbytes: int, tasks: int) -> int:
    """What the parts that one task processes at once may take in a worker that runs so many tasks at once."""
    return int(host_nbytes * PARTS_SHARE) // tasks


def part_nbytes(
    matrix: StoredMatrix, rows: int, line_nbytes: int, compute: np.dtype, more_nbytes: int = 0
) -> int:
    """The most that one part of a matrix takes while it is processed: as stored, as decoded and as the loops take it,
    with ``more_nbytes`` an element besides, and its results, which are added up after those of the parts before it."""
    part = matrix.part or matrix.unit
    rows, columns = min(part[0], rows, matrix.rows), min(part[1], matrix.columns)
    dtype = matrix.dtype
    if matrix.plain:
        rows = min(rows, ceil_div(READ_NBYTES, max(1, columns * dtype.itemsize)))
    widened = 2 if dtype == np.float16 else int(dtype == np.uint64 or dtype.itemsize > compute.itemsize)
    copies = 1 + (not matrix.plain) + widened
    return (copies * dtype.itemsize + more_nbytes) * rows * columns + (AHEAD * rows + columns) * line_nbytes
