"""Neighbours on a CPU: strips of products in a core's cache, of which a compiled loop keeps what is near.

Floats are multiplied by `tilewright.kernels.cpu.ordered_floats`, so that a pair's value has the same bits whatever the
blocks and threads are; so are integers so small that float32 has their sums, and others by
`tilewright.kernels.cpu.product`, exactly. The loop goes over the products in groups
of `GROUP`, which it compares with the row's threshold, the key of its k-th nearest so far; only where one reaches it
does it look at each. So beside the products selection costs little more than reading them from the cache.

`order.py` says what neighbours are. Blocks of B may come in any order: the answer is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from numba import njit

from tilewright.kernels.cpu import ordered_floats, product
from tilewright.kernels.cpu.loops import blocks, cpu_threads, kept, on_threads
from tilewright.kernels.cpu.ordered_floats import add_product
from tilewright.kernels.neighbours.order import (
    DOUBLE,
    FLOAT,
    INTEGER,
    METRICS,
    NO_INDEX,
    Bound,
    MetricName,
    Neighbours,
    Pairs,
    largest,
    row_factors,
    sum_dtype,
    value_dtype,
    values_of_keys,
)
from tilewright.kernels.neighbours.ranges import Ranges, multiply_by_powers
from tilewright.kernels.numbers import ceil_div, round_up

STRIP_PANELS = 8
"""Panels of A's rows that a thread multiplies at a time."""
STRIP_COLUMNS = 1024
"""Rows of B that it multiplies them by: the products, and the panels of A, stay in a core's second cache."""
INTEGER_STRIP = 1280
"""The sides of the products of integers, which are made by all threads together."""
GROUP = 64
"""Products that are compared with the threshold at once."""
PADDING = 16
"""Products by which rows of them are longer, so that equal columns do not compete for one place of the cache."""

FIRST_ROOM = 1 << 14
"""Pairs of a strip that there is room for at first; a strip with more is looked at once more."""

MOST_EXACT = 1 << 24
"""Up to which float32 has every integer."""

UNSEEN = np.iinfo(np.int64).max
"""The index of a place that no row has taken yet: any row is nearer."""

DOT, COSINE, L2 = range(len(METRICS))
"""The metrics in the loops, in the order of `METRICS`."""


@contextmanager
def _pool(threads: int | None) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(threads or cpu_threads()) as pool:
        yield pool


@kept
@njit(nogil=True)
def _square_rows(block, totals, start, stop):  # type: ignore[no-untyped-def]
    number_type = totals.dtype.type
    for i in range(start, stop):
        total = totals[i]
        for j in range(block.shape[1]):
            number = number_type(block[i, j])
            total += number * number
        totals[i] = total


@kept
@njit(nogil=True)
def _look(line, of_a, of_b, metric, zero, bar, farther, keys, marks):  # type: ignore[no-untyped-def]
    """Write the keys of a row's products (`order.keys_of`), and which groups have one on the right side of the bar.

    line: (columns,). zero: of the keys' type. keys: at least (columns,), marks: at least (groups,), both written.
    Returns how many groups there are. A call for each group would take longer than what it does.
    """
    count = line.shape[0]
    if metric == DOT:
        for j in range(count):
            keys[j] = line[j]
    elif metric == COSINE:
        for j in range(count):
            keys[j] = line[j] * (of_a * of_b[j])
    else:
        for j in range(count):
            squared = (of_a + of_b[j]) - (line[j] + line[j])
            keys[j] = zero if squared <= zero else -squared  # a NaN stays one
    whole = count // GROUP
    for group in range(whole):
        reached = np.int32(0)
        if farther:
            for j in range(GROUP):
                reached |= np.int32(keys[group * GROUP + j] <= bar)
        else:
            for j in range(GROUP):
                reached |= np.int32(keys[group * GROUP + j] >= bar)
        marks[group] = reached
    if whole * GROUP < count:
        marks[whole] = 1
        whole += 1
    return whole


@kept
@njit(nogil=True)
def _is_worse(key, index, other, other_index):  # type: ignore[no-untyped-def]
    return key < other or (key == other and index > other_index)


@kept
@njit(nogil=True)
def _sink(keys, indices, key, index, count):  # type: ignore[no-untyped-def]
    """Put an entry in the first one's place, of a heap whose first of ``count`` entries is the worst."""
    place = 0
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        if child + 1 < count and _is_worse(keys[child + 1], indices[child + 1], keys[child], indices[child]):
            child += 1
        if not _is_worse(keys[child], indices[child], key, index):
            break
        keys[place], indices[place] = keys[child], indices[child]
        place = child
    keys[place], indices[place] = key, index


@kept
@njit(nogil=True)
def _keep_nearest(  # type: ignore[no-untyped-def]
    sums, rows, columns, of_a, of_b, metric, zero, row, column, exclude_self, keys, indices
):
    """Take the nearest of a tile of products into the heaps of its rows. row, column: of the tile's first product."""
    line = np.empty(columns, keys.dtype)
    marks = np.empty(columns // GROUP + 1, np.int32)
    for i in range(rows):
        heap, places = keys[i], indices[i]
        bar = heap[0]
        groups = _look(sums[i, :columns], of_a[i], of_b, metric, zero, bar, False, line, marks)
        for group in range(groups):
            if not marks[group]:
                continue
            for j in range(group * GROUP, min((group + 1) * GROUP, columns)):
                key, index = line[j], column + j
                if exclude_self and index == row + i:
                    continue
                if _is_worse(bar, places[0], key, index):
                    _sink(heap, places, key, index, heap.shape[0])
                    bar = heap[0]


@kept
@njit(nogil=True)
def _nearest_of_strips(  # type: ignore[no-untyped-def]
    left, right, of_a, of_b, metric, zero, row, column, exclude_self, keys, indices, start, stop
):
    """Strips start to stop of the rows of A, against all rows of B that are packed."""
    height, width = STRIP_PANELS * left.shape[2], STRIP_COLUMNS
    across = width // right.shape[2]
    sums = np.empty((height, width + PADDING), left.dtype)
    for strip in range(start, stop):
        top = strip * height
        rows = min(height, of_a.shape[0] - top)
        panels = left[strip * STRIP_PANELS : (strip + 1) * STRIP_PANELS]
        for first in range(0, right.shape[0], across):
            begin = first * right.shape[2]
            columns = min(width, of_b.shape[0] - begin)
            sums[:] = 0
            add_product(panels, right[first : first + across], sums)
            _keep_nearest(
                sums,
                rows,
                columns,
                of_a[top : top + rows],
                of_b[begin : begin + columns],
                metric,
                zero,
                row + top,
                column + begin,
                exclude_self,
                keys[top : top + rows],
                indices[top : top + rows],
            )


@kept
@njit(nogil=True)
def _nearest_of_sums(  # type: ignore[no-untyped-def]
    sums, of_a, of_b, metric, zero, row, column, exclude_self, keys, indices, start, stop
):
    """The same of rows start to stop of products that are there."""
    _keep_nearest(
        sums[start:stop],
        stop - start,
        of_b.shape[0],
        of_a[start:stop],
        of_b,
        metric,
        zero,
        row + start,
        column,
        exclude_self,
        keys[start:stop],
        indices[start:stop],
    )


@kept
@njit(nogil=True)
def _in_order(keys, indices, start, stop):  # type: ignore[no-untyped-def]
    """Turn the heaps of rows start to stop into lists, the nearest first."""
    for i in range(start, stop):
        heap, places = keys[i], indices[i]
        for last in range(heap.shape[0] - 1, 0, -1):
            key, index = heap[last], places[last]
            heap[last], places[last] = heap[0], places[0]
            _sink(heap, places, key, index, last)


@kept
@njit(nogil=True)
def _keep_pairs(  # type: ignore[no-untyped-def]
    sums, rows, columns, of_a, of_b, metric, zero, row, column, above_diagonal, bar, farther, room, found
):
    """Write the pairs of a tile on the right side of the bar, as far as there is room, behind ``found`` others; return
    how many there are with those.

    room: rows, columns and keys, each (room,). above_diagonal: whether only pairs count whose column is the larger.
    """
    its_rows, its_columns, its_keys = room
    line = np.empty(columns, its_keys.dtype)
    marks = np.empty(columns // GROUP + 1, np.int32)
    for i in range(rows):
        begin = 0
        if above_diagonal:
            begin = min(columns, max(0, row + i + 1 - column))
        groups = _look(
            sums[i, begin:columns], of_a[i], of_b[begin:columns], metric, zero, bar, farther, line, marks
        )
        for group in range(groups):
            if not marks[group]:
                continue
            for j in range(group * GROUP, min((group + 1) * GROUP, columns - begin)):
                if (line[j] <= bar) if farther else (line[j] >= bar):
                    if found < its_keys.shape[0]:
                        its_rows[found] = row + i
                        its_columns[found] = column + begin + j
                        its_keys[found] = line[j]
                    found += 1
    return found


@kept
@njit(nogil=True)
def _pairs_of_strip(  # type: ignore[no-untyped-def]
    left, right, of_a, of_b, metric, zero, row, column, above_diagonal, bar, farther, room, strip
):
    """The pairs of one strip; as `_keep_pairs`."""
    height, width = STRIP_PANELS * left.shape[2], STRIP_COLUMNS
    across = width // right.shape[2]
    sums = np.empty((height, width + PADDING), left.dtype)
    top = strip * height
    rows = min(height, of_a.shape[0] - top)
    panels = left[strip * STRIP_PANELS : (strip + 1) * STRIP_PANELS]
    found = 0
    for first in range(0, right.shape[0], across):
        begin = first * right.shape[2]
        columns = min(width, of_b.shape[0] - begin)
        if above_diagonal and column + begin + columns - 1 <= row + top:
            continue
        sums[:] = 0
        add_product(panels, right[first : first + across], sums)
        found = _keep_pairs(
            sums,
            rows,
            columns,
            of_a[top : top + rows],
            of_b[begin : begin + columns],
            metric,
            zero,
            row + top,
            column + begin,
            above_diagonal,
            bar,
            farther,
            room,
            found,
        )
    return found


class DenseSums:
    """The sums of a block of rows of A and one of B, of rows that are given in parts, the first elements first.

    The bits are those that `Nearest.update` makes of whole rows. Memory: (m, n) of the sums' dtype, filled up to whole
    tiles.
    """

    def __init__(
        self, m: int, n: int, sums: np.dtype, metric: MetricName, threads: int | None = None
    ) -> None:
        self._m, self._n, self._dtype, self._metric, self._threads = m, n, sums, metric, threads
        self._shape = ordered_floats.tiling()
        rows, columns = m, n
        if sums != INTEGER:
            rows = round_up(m, self._shape.rows)
            columns = round_up(n, self._shape.columns(sums)) + PADDING
        self._sums = np.zeros((rows, columns), sums)
        squares = INTEGER if sums == INTEGER else DOUBLE
        self._squares = np.zeros(m, squares), np.zeros(n, squares)
        self._ranges = Ranges(m, sums), Ranges(n, sums)

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """Add the products of the next elements of all rows: a (m, some), b (n, some)."""
        if not self._m or not self._n or not a.shape[1]:
            return
        a, b = _numbers(a, self._dtype), _numbers(b, self._dtype)
        if self._metric == "cosine":
            a, b = self._in_range(a, b)
        with _pool(self._threads) as pool:
            if self._metric != "dot":
                for block, totals in zip((a, b), self._squares, strict=True):
                    _add_squares(block, totals, pool)
            if self._dtype == INTEGER:
                product.matmul(a, b.T, self._sums, accumulate=True)
                return
            left = ordered_floats.packed(a, self._shape.rows, pool)
            right = ordered_floats.packed(b, self._shape.columns(self._dtype), pool)
            on_threads(pool, _add_strips, ceil_div(len(left), STRIP_PANELS), left, right, self._sums)

    def _in_range(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The next elements by the powers of two that `ranges` divides items by, and the sums so far by the same."""
        taken = [ranges.take(part) for ranges, part in zip(self._ranges, (a, b), strict=True)]
        for (_, change), totals, sums in zip(taken, self._squares, (self.sums, self.sums.T), strict=True):
            if change is not None:
                multiply_by_powers(totals, 2 * change)
                multiply_by_powers(sums, change[:, np.newaxis])
        return taken[0][0], taken[1][0]

    @property
    def sums(self) -> np.ndarray:
        """(m, n); for cosine those of items that are in range, as `ranges` brings them."""
        return self._sums[: self._m, : self._n]

    @property
    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """Of A's rows, and of B's: `factors_of` the whole rows."""
        of_a, of_b = (row_factors(totals, self._dtype, self._metric) for totals in self._squares)
        return of_a, of_b


@kept
@njit(nogil=True)
def _add_strips(left, right, sums, start, stop):  # type: ignore[no-untyped-def]
    """Add the products of strips start to stop of A's rows and all of B's."""
    height = STRIP_PANELS * left.shape[2]
    for strip in range(start, stop):
        panels = left[strip * STRIP_PANELS : (strip + 1) * STRIP_PANELS]
        add_product(panels, right, sums[strip * height :])


def _add_squares(numbers: np.ndarray, totals: np.ndarray, pool: ThreadPoolExecutor) -> None:
    on_threads(pool, _square_rows, len(numbers), _readable(numbers), totals)


def factors_of(
    block: np.ndarray, sums: np.dtype, metric: MetricName, threads: int | None = None
) -> np.ndarray:
    """What a metric needs of each row of a block, as `order.row_factors` gives it.

    block: (rows, k). Returns (rows,). Squares are added element after element.
    """
    totals = np.zeros(len(block), INTEGER if sums == INTEGER else DOUBLE)
    if metric != "dot" and block.size:
        with _pool(threads) as pool:
            _add_squares(_numbers(block, sums), totals, pool)
    return row_factors(totals, sums, metric)


def _numbers(block: np.ndarray, sums: np.dtype) -> np.ndarray:
    """A block as the loops read it: floats in the dtype of the sums, integers as they are."""
    if sums != INTEGER:
        return block.astype(sums, copy=False)
    return block.view(np.uint8) if block.dtype.kind == "b" else block


def _readable(block: np.ndarray) -> np.ndarray:
    """The block in this machine's order of bytes and with rows that are contiguous, so that loops are compiled once."""
    return np.ascontiguousarray(block, block.dtype.newbyteorder("="))


def products_dtype(a: np.dtype, b: np.dtype, depth: int) -> np.dtype:
    """What rows of these dtypes are multiplied in: as `order.sum_dtype`, but small integers in float32, where all their
    sums are exact as well."""
    sums = sum_dtype(a, b)
    return FLOAT if sums == INTEGER and depth * largest(a) * largest(b) <= MOST_EXACT else sums


class _Rows:
    """A block of rows of A, ready to be multiplied by blocks of rows of B."""

    def __init__(
        self,
        a: np.ndarray,
        b_dtype: np.dtype | None,
        metric: MetricName,
        first_row: int,
        factors: np.ndarray | None,
        threads: int | None,
    ) -> None:
        self.metric: MetricName = metric
        self.sums = sum_dtype(a.dtype, a.dtype if b_dtype is None else np.dtype(b_dtype))
        self._metric, self._row, self._threads = METRICS.index(metric), first_row, threads
        self._keys_dtype = self.sums if metric == "l2" else value_dtype(self.sums, metric)
        self._zero = self._keys_dtype.type(0)
        self._of_a = factors_of(a, self.sums, metric, threads) if factors is None else factors
        self._products = products_dtype(
            a.dtype, a.dtype if b_dtype is None else np.dtype(b_dtype), a.shape[1]
        )
        self._a = _numbers(a, self._products)
        self._left: np.ndarray | None = None

    @property
    def _height(self) -> int:
        return STRIP_PANELS * ordered_floats.tiling().rows

    def _packed_left(self, pool: ThreadPoolExecutor) -> np.ndarray:
        if self._left is None:
            self._left = ordered_floats.packed(self._a, ordered_floats.tiling().rows, pool)
        return self._left

    def _packed_right(self, b: np.ndarray, pool: ThreadPoolExecutor) -> np.ndarray:
        width = ordered_floats.tiling().columns(self._products)
        return ordered_floats.packed(_numbers(b, self._products), width, pool)

    def _integer_tiles(self, b: np.ndarray) -> Iterator[tuple[slice, slice, np.ndarray]]:
        """The exact sums, in tiles."""
        numbers = _numbers(b, INTEGER)
        for columns in blocks(len(numbers), INTEGER_STRIP):
            for rows in blocks(len(self._a), INTEGER_STRIP):
                tile = np.empty((rows.stop - rows.start, columns.stop - columns.start), INTEGER)
                product.matmul(self._a[rows], numbers[columns].T, tile)
                yield rows, columns, tile

    def _factors(self, b: np.ndarray, factors: np.ndarray | None) -> np.ndarray:
        return factors_of(b, self.sums, self.metric, self._threads) if factors is None else factors


class Nearest(_Rows):
    """The k nearest rows of B of each of a block of rows of A.

    >>> points = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    >>> nearest = Nearest(points, 2, metric="l2")
    >>> nearest.update(points[1:], 1)
    >>> nearest.update(points[:1], 0)
    >>> nearest.result().indices
    array([[0, 2],
           [1, 2],
           [2, 0]])

    a: (m, d), bool, integers or floats (`order.is_known`); for cosines all in range, as those of B (`ranges.py`).
    k >= 1. b_dtype: of B, where it is not that of A. first_row: which row of the whole A is the block's first, for
    ``exclude_self``, by which row i has no neighbour i. factors: (m,), `factors_of` the block, where they are known.
    """

    def __init__(
        self,
        a: np.ndarray,
        k: int,
        *,
        metric: MetricName,
        b_dtype: np.dtype | None = None,
        first_row: int = 0,
        exclude_self: bool = False,
        factors: np.ndarray | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__(a, b_dtype, metric, first_row, factors, threads)
        floats = self._keys_dtype.kind == "f"
        least = -np.inf if floats else np.iinfo(self._keys_dtype).min
        self._keys = np.full((len(a), k), least, self._keys_dtype)
        self._indices = np.full((len(a), k), UNSEEN, np.int64)
        self._exclude_self = exclude_self

    def update(self, b: np.ndarray, first_column: int, factors: np.ndarray | None = None) -> None:
        """Look at a block of rows of B: (n, d). first_column: which row of the whole B is its first. factors: (n,).

        Every row of B is to be given once; in which order, and in which blocks, makes no difference.
        """
        if not len(self._a) or not len(b):
            return
        of_b = self._factors(b, factors)
        if self._products == INTEGER:
            for rows, columns, tile in self._integer_tiles(b):
                self._take(tile, first_column + columns.start, of_b[columns], rows)
            return
        with _pool(self._threads) as pool:
            left, right = self._packed_left(pool), self._packed_right(b, pool)
            on_threads(
                pool,
                _nearest_of_strips,
                ceil_div(len(self._a), self._height),
                left,
                right,
                self._of_a,
                of_b,
                self._metric,
                self._zero,
                self._row,
                first_column,
                self._exclude_self,
                self._keys,
                self._indices,
            )

    def take(self, sums: np.ndarray, first_column: int, factors: np.ndarray) -> None:
        """As `update`, of products that are there already: sums (m, n), of the dtype that ``order.sum_dtype`` says."""
        if sums.size:
            self._take(sums, first_column, factors, slice(0, len(sums)))

    def _take(self, sums: np.ndarray, first_column: int, of_b: np.ndarray, rows: slice) -> None:
        with _pool(self._threads) as pool:
            on_threads(
                pool,
                _nearest_of_sums,
                len(sums),
                sums,
                self._of_a[rows],
                of_b,
                self._metric,
                self._zero,
                self._row + rows.start,
                first_column,
                self._exclude_self,
                self._keys[rows],
                self._indices[rows],
            )

    def result(self) -> Neighbours:
        """The nearest of all that was given; what is given afterwards is not counted."""
        keys, indices = self._keys.copy(), self._indices.copy()
        if len(keys):
            with _pool(self._threads) as pool:
                on_threads(pool, _in_order, len(keys), keys, indices)
        values = values_of_keys(keys, self.sums, self.metric).copy()
        missing = indices == UNSEEN
        indices[missing] = NO_INDEX
        if values.dtype.kind == "f":
            values[missing] = np.nan
        else:
            values[missing] = 0
        return Neighbours(indices, values)


class Beyond(_Rows):
    """The pairs of a block of rows of A with rows of B whose values are on one side of a threshold.

    Parameters are those of `Nearest`, and bound: `order.key_bound`. once: whether only pairs count whose column is
    larger than their row, as where B is A. keep: whether pairs are kept, or only counted.
    """

    def __init__(
        self,
        a: np.ndarray,
        bound: Bound,
        *,
        metric: MetricName,
        b_dtype: np.dtype | None = None,
        first_row: int = 0,
        once: bool = False,
        keep: bool = True,
        factors: np.ndarray | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__(a, b_dtype, metric, first_row, factors, threads)
        self._bound, self._once, self._keep = bound, once, keep
        self._bar = self._keys_dtype.type(bound.key)
        self._found: list[tuple[np.ndarray, ...]] = []
        self.count = 0
        """How many pairs were found so far."""

    def update(self, b: np.ndarray, first_column: int, factors: np.ndarray | None = None) -> None:
        """As `Nearest.update`."""
        if not len(self._a) or not len(b):
            return
        of_b = self._factors(b, factors)
        if self._products == INTEGER:
            for rows, columns, tile in self._integer_tiles(b):
                self._take(tile, first_column + columns.start, of_b[columns], rows)
            return
        with _pool(self._threads) as pool:
            left, right = self._packed_left(pool), self._packed_right(b, pool)

            def look(room: tuple[np.ndarray, ...], strip: int) -> int:
                found: int = _pairs_of_strip(
                    left,
                    right,
                    self._of_a,
                    of_b,
                    self._metric,
                    self._zero,
                    self._row,
                    first_column,
                    self._once,
                    self._bar,
                    self._bound.farther,
                    room,
                    strip,
                )
                return found

            self._collect(pool, look, ceil_div(len(self._a), self._height))

    def take(self, sums: np.ndarray, first_column: int, factors: np.ndarray) -> None:
        """As `Nearest.take`."""
        if sums.size:
            self._take(sums, first_column, factors, slice(0, len(sums)))

    def _take(self, sums: np.ndarray, first_column: int, of_b: np.ndarray, rows: slice) -> None:
        strips = list(blocks(len(sums), self._height))

        def look(room: tuple[np.ndarray, ...], strip: int) -> int:
            part = strips[strip]
            found: int = _keep_pairs(
                sums[part],
                part.stop - part.start,
                sums.shape[1],
                self._of_a[rows][part],
                of_b,
                self._metric,
                self._zero,
                self._row + rows.start + part.start,
                first_column,
                self._once,
                self._bar,
                self._bound.farther,
                room,
                0,
            )
            return found

        with _pool(self._threads) as pool:
            self._collect(pool, look, len(strips))

    def _collect(
        self, pool: ThreadPoolExecutor, look: Callable[[tuple[np.ndarray, ...], int], int], strips: int
    ) -> None:
        def collected(strip: int) -> tuple[int, tuple[np.ndarray, ...] | None]:
            room = self._room(FIRST_ROOM if self._keep else 0)
            found = look(room, strip)
            if not self._keep or not found:
                return found, None
            if found > FIRST_ROOM:
                room = self._room(found)  # looked at once more, into enough of it
                look(room, strip)
            return found, tuple(array[:found].copy() for array in room)

        for found, pairs in pool.map(collected, range(strips)):
            self.count += found
            if pairs is not None:
                self._found.append(pairs)

    def _room(self, pairs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.empty(pairs, np.int64), np.empty(pairs, np.int64), np.empty(pairs, self._keys_dtype)

    def result(self) -> Pairs:
        """The pairs of all that was given."""
        row, column, keys = (
            np.concatenate([empty, *parts])
            for empty, parts in zip(
                self._room(0), zip(*self._found, strict=True) if self._found else ((), (), ()), strict=True
            )
        )
        order = np.lexsort((column, row))
        return Pairs(row[order], column[order], values_of_keys(keys[order], self.sums, self.metric))
