"""Neighbours on a GPU: products whose epilogue keeps what reaches its row's bound, and the best of what was kept.

A block of rows of A is taken in stretches of rows, each with a list of places a row. Rows of B come in blocks, which
are multiplied in spans of columns that grow with what has been seen: bounds, each the worst of a row's best so far,
then let a list's worth of a span through and no more. The first bounds come from a few rows spread over the first
block, so that it does not matter how rows are ordered. What let more through than its lists hold is multiplied again,
with the bounds of all that was seen since; and where that does not help, since so many are equal, in spans that no
list is too short for.

On Hopper's tensor cores nothing but what is kept is written (`tilewright.kernels.gemm.hopper.selection`): 16-bit floats
and bytes as they lie, float32 where the caller allows less. Else the products of a part of the block are made by
`tilewright.kernels.matmul`, and read once more by a kernel that keeps the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.choices import PrecisionName
from tilewright.kernels.gemm import product
from tilewright.kernels.gemm.hopper.float_operand import FloatOperand, make_planes, operands, planes_nbytes
from tilewright.kernels.gemm.hopper.selection import COSINE, DOT, FARTHER, L2, NO_COLUMN
from tilewright.kernels.gemm.hopper.wgmma_config import Config
from tilewright.kernels.gemm.hopper.wgmma_launch import HOPPER, Kept, Planes, launch_selection
from tilewright.kernels.gpu.compiled import compile_kernel
from tilewright.kernels.gpu.device_array import address, strided_view, transposed
from tilewright.kernels.gpu.device_choice import SIMULATOR, capability, current_device
from tilewright.kernels.gpu.driver_error import checked
from tilewright.kernels.gpu.launch import enqueue
from tilewright.kernels.gpu.memory import allocating, free_nbytes
from tilewright.kernels.gpu.streams import DEFAULT_STREAM
from tilewright.kernels.neighbours import lists
from tilewright.kernels.neighbours.capacity import capacity_of, kept_of
from tilewright.kernels.neighbours.order import (
    INTEGER,
    Bound,
    MetricName,
    Neighbours,
    Pairs,
    is_integer,
    sum_dtype,
    sums_fit,
    values_of_keys,
)
from tilewright.kernels.neighbours.words import columns_of, keys_dtype, neighbours_of, number_dtype, scores_of
from tilewright.kernels.numbers import ceil_div, round_up

MOST_NEIGHBOURS = 1024
"""Of a row: its list and its best must lie in a multiprocessor's shared memory."""
MOST_COLUMNS = 2**32 - 1
"""Rows of B: a word has 32 bits for their numbers."""
LIST_NBYTES = 512 * 2**20
"""Of the lists of a stretch of rows."""
STRETCH_ROWS = 1 << 16
STRETCH_UNIT = 256
"""Stretches are multiples of it long, but for the last: whole tiles of a cluster."""
PRODUCTS_NBYTES = 256 * 2**20
"""Of products that are made to be read again."""
PAIRS_ROOM = 1 << 23
"""Pairs that there is room for at a time, no fewer than rows of a stretch; a span with more is cut."""
MOST_PAIRS = 2**31 - 1
"""That are looked at at a time: kernels count those that they find in 32 bits."""
ROW_NBYTES = 64
"""Of a row's bound, factors, counter, numbers and floor."""
TRIES = 3
"""How often what did not fit into lists is multiplied again, each time with higher bounds."""
PADDING = 256
"""Factors behind the last column's: those of a tile."""
KINDS = {np.dtype(np.float16): "f16", BFLOAT16: "bf16", np.dtype(np.int8): "s8", np.dtype(np.uint8): "u8"}
ASKED = {"bf16": "bf16", "fp16": "f16", "tf32": "tf32"}
"""The operand type of the tensor cores for float32, by what the caller allows."""


def supports(a: np.dtype, b: np.dtype, depth: int, metric: MetricName, columns: int, k: int = 1) -> bool:
    """Whether neighbours of rows of these dtypes are found here: those whose keys have 32 bits.

    These are floats of up to 32 bits, and bytes whose exact sums an int32 holds, but for their cosines, which are
    float64. k: neighbours of a row. columns: rows of B.
    """
    if k > MOST_NEIGHBOURS or columns > MOST_COLUMNS or depth == 0:
        return False
    if is_integer(a) and is_integer(b):
        bytes_alone = a.itemsize == b.itemsize == 1
        return bytes_alone and metric != COSINE and _fits_int32(a, b, depth, metric)
    return a == b and a in (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32))


def tensor_kinds(a: np.dtype, b: np.dtype, precision: PrecisionName) -> tuple[str, str] | None:
    """The operand types of Hopper's tensor cores for rows of these dtypes; None where these do not take them."""
    if a in KINDS and b in KINDS:
        return KINDS[a], KINDS[b]
    asked = ASKED.get(precision)
    return None if asked is None else (asked, asked)


def _fits_int32(a: np.dtype, b: np.dtype, depth: int, metric: MetricName) -> bool:
    """`sums_fit`, for sums of 32 bits: of so many rows one after the other, sums of 64 bits hold them."""
    return sums_fit(a, b, depth << 32, metric)


@functools.cache
def _config(kind_a: str, kind_b: str, form: str, mutual: bool = False) -> Config:
    integer = kind_a in ("s8", "u8")
    c_type = types.int32 if integer else types.float32
    return Config(kind_a, kind_b, c_type, selection=form, mutual=mutual)


@functools.cache
def _merge_kernel(capacity: int, kept: int, integer: bool) -> Any:
    return compile_kernel(
        lists.merge_function(capacity, kept, integer),
        lists.merge_signature(capacity, kept, integer),
        shared_nbytes=lists.merge_nbytes(capacity, kept),
    )


def _empty(shape: Any, dtype: Any, stream: Any) -> Any:
    nbytes = math.prod(shape if isinstance(shape, tuple) else (shape,)) * np.dtype(dtype).itemsize
    with allocating("lists of neighbours", nbytes, on_gpu=True):
        return cuda.device_array(shape, dtype, stream=stream)


def _upload(host: np.ndarray, stream: Any) -> Any:
    with allocating("factors of rows", host.nbytes, on_gpu=True):
        return cuda.to_device(host, stream=stream)


def _zeros(shape: tuple[int, ...], dtype: Any, stream: Any) -> Any:
    from numba.cuda.cudadrv.driver import device_memset

    array = _empty(shape, dtype, stream)
    device_memset(array, 0, array.size * array.dtype.itemsize, stream)
    return array


@dataclass(frozen=True)
class _Side:
    """Rows of A or of B on the device."""

    rows: Any
    """(n, depth)."""
    planes: Planes | None
    """For the tensor cores, where these take them."""
    factors: Any
    """(n + PADDING,), float32 or int32."""

    def part(self, first: int, count: int, step: int = 1) -> _Side:
        """``count`` rows from ``first`` on, or every ``step``-th."""
        stop = first + (count - 1) * step + 1
        planes = self.planes
        if planes is not None:
            planes = replace(
                planes,
                address=planes.address + first * planes.line_nbytes,
                lines=count,
                line_nbytes=planes.line_nbytes * step,
                plane_nbytes=planes.line_nbytes * step * count,
            )
        rows = self.rows[first:stop]
        if step > 1:
            rows = strided_view(rows, (count, rows.shape[1]), (step * rows.strides[0], rows.strides[1]))
        return _Side(rows, planes, self.factors[first:])


def _bounds(bound: Any, side: _Side, stream: Any, lines: int = 3) -> Any:
    """(lines, rows) words: the same bound for all rows of a side, their factors, and lines of 0, the first of them
    counters."""
    from cuda.bindings import driver

    rows = side.rows.shape[0]
    bounds = _zeros((lines, rows), np.uint32, stream)
    word, handle = int(np.array(bound).view(np.uint32)), int(stream) if stream else DEFAULT_STREAM
    checked("setting bounds", driver.cuMemsetD32Async(address(bounds), word, rows, handle))
    strided_view(bounds, bounds.shape, bounds.strides, side.factors.dtype)[1].copy_to_device(
        side.factors[:rows], stream=stream
    )
    return bounds


class _Rows:
    """A block of rows of A on a GPU, ready to be multiplied by blocks of rows of B."""

    def __init__(
        self,
        a: Any,
        metric: MetricName,
        form: str,
        b_dtype: np.dtype | None,
        first_row: int,
        factors: np.ndarray | None,
        precision: PrecisionName,
        stream: Any,
    ) -> None:
        self.metric: MetricName = metric
        b_dtype = a.dtype if b_dtype is None else np.dtype(b_dtype)
        self.sums = sum_dtype(a.dtype, b_dtype)
        self.integer = self.sums == INTEGER
        self.number = number_dtype(self.sums)
        self._form, self._row, self._stream = form, first_row, stream
        self._precision: PrecisionName = precision
        self._kinds = self._kinds_of(a.dtype, b_dtype)
        self._scratch: list[Any] = []
        """Memory that planes lie in."""
        self._a = self._side(a, 0, factors)

    def _kinds_of(self, a: np.dtype, b: np.dtype) -> tuple[str, str] | None:
        """The operand types of the tensor cores; None where products are made first."""
        if SIMULATOR or capability(current_device()) != HOPPER:
            return None
        return tensor_kinds(a, b, self._precision)

    def _side(self, rows: Any, number: int, factors: Any) -> _Side:
        return _Side(rows, self._planes(rows, number), self._factors(rows, factors))

    def _planes(self, rows: Any, number: int) -> Planes | None:
        if self._kinds is None:
            return None
        kind = self._kinds[number]
        operand: FloatOperand = operands(rows, rows)[0]
        stored = rows.dtype in KINDS
        if operand.k_major and (stored or kind == "tf32") and (there := operand.in_place(kind)) is not None:
            return there
        if rows.dtype.itemsize == 1 or not operand.k_major:
            raise ValueError(f"rows of {rows.dtype} lie {rows.strides} bytes apart; the copy engine takes 16")
        form = "copy" if stored else kind
        target = _empty(planes_nbytes(operand, operand.depth, form), np.uint8, self._stream)
        self._scratch.append(target)
        return make_planes(operand, form, kind, address(target), self._stream)

    def _factors(self, rows: Any, given: Any) -> Any:
        count = rows.shape[0]
        if self.metric == DOT:
            return _empty(PADDING + count, self.number, self._stream)  # what is in it changes nothing
        if given is not None:
            padded = np.zeros(count + PADDING, self.number)
            padded[:count] = given
            return _upload(padded, self._stream)
        found = _empty(count + PADDING, self.number, self._stream)
        warps = lists.SQUARES_THREADS // lists.WARP
        lists.FACTORS.enqueue(
            (rows.dtype, self.metric, self.integer),
            ceil_div(count, warps),
            lists.SQUARES_THREADS,
            self._stream,
            rows,
            found[:count],
        )
        return found

    def _spread(self, side: _Side, count: int) -> _Side:
        """So many rows of a side, at equal distances."""
        step = side.rows.shape[0] // count
        part = side.part(0, count, step)
        if self.metric == DOT:
            return part
        taken = _empty(count + PADDING, np.uint32, self._stream)
        source = strided_view(side.factors, side.factors.shape, side.factors.strides, np.dtype(np.uint32))
        lists.GATHER.enqueue((), ceil_div(count, 128), 128, self._stream, source, step, taken[:count])
        return replace(part, factors=strided_view(taken, taken.shape, taken.strides, self.number))

    def _has_room(self, side: _Side, beside_nbytes: int = 0) -> bool:
        """Whether the GPU has memory for the rows of a side once more, and for so much else of each."""
        rows, width = side.rows.shape
        needed = rows * (2 * width * side.rows.dtype.itemsize + ROW_NBYTES + beside_nbytes)
        free = free_nbytes(on_gpu=True)
        return free is not None and free > needed

    def _names(self, rows: int, band: int, shuffled: bool, number: int = 0) -> Any:
        """Which row is at each place of such an order, (rows,) uint32, where the first has a number."""
        names = _empty((rows,), np.uint32, self._stream)
        for first, stop in ((0, band), (band, rows)):
            if stop > first:
                step = (stop - first) // lists.TOGETHER if shuffled else 0
                blocks, turn = ceil_div(stop - first, 128), lists.turn_of(step)
                lists.NAMES.enqueue(
                    (), blocks, 128, self._stream, names[first:stop], number + first, step, turn
                )
        return names

    def _arranged(self, side: _Side, band: int, shuffled: bool) -> tuple[_Side, Any]:
        """The rows of a side in the order in which they are compared, and which each is (rows,), uint32: of those
        before a band and of those from it on each in no order, where they are ``shuffled``, so that any span has its
        share of what is near a row."""
        rows = side.rows.shape[0]
        names = self._names(rows, band, shuffled)
        if not shuffled:
            return side, names
        taken = _empty(side.rows.shape, side.rows.dtype, self._stream)
        self._move(side.rows, names, taken)
        factors = _empty((rows + PADDING, 1), side.factors.dtype, self._stream)
        if self.metric != DOT:
            self._move(strided_view(side.factors, (rows, 1), (4, 4)), names, factors[:rows])
        self._scratch.append(taken)
        factors = strided_view(factors, (rows + PADDING,), (4,))
        number = 0 if side is self._a else 1
        return _Side(taken, self._planes(taken, number), factors), names

    def _move(self, source: Any, names: Any, target: Any, *, put: bool = False) -> None:
        """Enqueue `lists.move_function` of rows of contiguous elements, by words as wide as they allow."""
        row_nbytes = source.shape[1] * source.dtype.itemsize
        steps = row_nbytes, source.strides[0], address(source)
        itemsize = next(size for size in (4, 2, 1) if not any(step % size for step in steps))
        dtype = np.dtype(f"u{itemsize}")
        views = [
            strided_view(array, (array.shape[0], row_nbytes // itemsize), (array.strides[0], itemsize), dtype)
            for array in (source, target)
        ]
        blocks = ceil_div(names.size, lists.MOVE_THREADS // lists.WARP)
        lists.MOVE.enqueue((dtype, put), blocks, lists.MOVE_THREADS, self._stream, views[0], names, views[1])

    def _wait(self) -> None:
        if self._stream:
            self._stream.synchronize()
        else:
            cuda.synchronize()

    def _keep(
        self,
        left: _Side,
        right: _Side,
        bounds: Any,
        words: Any,
        capacity: int,
        first: int,
        *,
        rows_found: Any = None,
        left_out: int = NO_COLUMN,
        last: int | None = None,
        names: Any = None,
    ) -> None:
        """Enqueue the product of rows of two sides that keeps what reaches its bound.

        bounds: (3, rows) uint32 or more, as `lists` has them. words: (rows, capacity), or (1, capacity) with
        ``rows_found`` (capacity,) after it in memory; of capacity 0 nothing is written, only counted. first: the number
        of the right side's first row. last: only columns up to the row + it are wanted. names: uint32, the numbers by
        which words name columns, of tensor cores alone; by default those that they have.
        """
        rows, columns = left.rows.shape[0], right.rows.shape[0]
        if left.planes is not None and right.planes is not None:
            kept = Kept(
                address(words),
                capacity,
                rows_found is None,
                address(bounds),
                address(right.factors),
                first,
                left_out,
                names=0 if names is None else address(names),
            )
            config = _config(left.planes.kind, right.planes.kind, self._form)
            depth = left.rows.shape[1]
            launch_selection(config, left.planes, right.planes, kept, depth, self._stream, diagonal=last)
            return
        height = max(1, min(rows, PRODUCTS_NBYTES // (self.number.itemsize * columns)))
        width = min(columns, PRODUCTS_NBYTES // (self.number.itemsize * height))
        made = _empty((height, width), self.number, self._stream)
        numbers = strided_view(bounds, bounds.shape, bounds.strides, self.number)
        nothing = cuda.device_array(0, np.int32)
        for top in range(0, rows, height):
            for start in range(0, columns, width):
                high, wide = min(height, rows - top), min(width, columns - start)
                end = wide if last is None else top + high + last - start
                if end <= 0:
                    continue
                part = strided_view(made, (high, wide), (self.number.itemsize * wide, self.number.itemsize))
                product.matmul(
                    left.rows[top : top + high],
                    transposed(right.rows[start : start + wide]),
                    part,
                    dtype=self.number,
                    precision=self._precision,
                    stream=self._stream or None,
                )
                lists.FILTER.enqueue(
                    (self._form, self.integer),
                    (high, ceil_div(wide, lists.FILTER_COLUMNS)),
                    lists.FILTER_THREADS,
                    self._stream,
                    part,
                    words,
                    nothing if rows_found is None else rows_found,
                    bounds,
                    numbers,
                    right.factors[start : start + wide],
                    capacity,
                    top,
                    first + start,
                    left_out + top - start,
                    (rows + columns if last is None else last + top) - start,
                )


class _Stretch:
    """Some rows of A, with their bounds and the best found so far."""

    def __init__(
        self, first: int, side: _Side, kept: int, number: np.dtype, stream: Any, lines: int = 3
    ) -> None:
        """lines: of bounds, as of `_bounds`."""
        self.first, self.side, self.number = first, side, number
        rows = side.rows.shape[0]
        self.bounds = _bounds(lists.lowest_bound(number), side, stream, lines)
        self.best = _zeros((rows, kept), np.uint64, stream)
        self.floors = _zeros((rows,), np.uint32, stream)
        self.seen = 0


class Nearest(_Rows):
    """The k nearest rows of B of each of a block of rows of A, as `host.Nearest`, of device arrays (`supports`).

    a: (m, d), a Numba device array. precision: what `tilewright.kernels.matmul` may do with float32. stream: of all
    that is enqueued; `update` returns when that is finished. threads: of the host, by which `result` sorts out what the
    GPU has found; by default `cpu_threads`, which Dask makes one of.
    """

    def __init__(
        self,
        a: Any,
        k: int,
        *,
        metric: MetricName,
        b_dtype: np.dtype | None = None,
        first_row: int = 0,
        exclude_self: bool = False,
        factors: np.ndarray | None = None,
        precision: PrecisionName = "full",
        stream: Any = DEFAULT_STREAM,
        threads: int | None = None,
    ) -> None:
        super().__init__(a, metric, metric, b_dtype, first_row, factors, precision, stream)
        self._k, self._exclude_self, self._threads = k, exclude_self, threads
        self._kept = kept_of(k, exclude_self)
        self._capacity, _ = capacity_of(self._kept)
        self._end, self._ordered = 0, True
        self._in_order, self._equal = False, False
        """Whether rows of B were found to lie in the order of what they are near; and whether so many are equal that
        it does not help to compare them in no order."""
        self._shuffled: tuple[_Side, Any] | None = None
        rows = a.shape[0]
        most = max(STRETCH_UNIT, min(STRETCH_ROWS, LIST_NBYTES // (8 * self._capacity)))
        length = min(rows, round_up(ceil_div(rows, ceil_div(rows, most)), STRETCH_UNIT)) if rows else 1
        self._words = _empty((max(length, 1), self._capacity), np.uint64, stream)
        self._stretches = [
            _Stretch(first, self._a.part(first, min(length, rows - first)), self._kept, self.number, stream)
            for first in range(0, rows, length)
        ]

    def update(self, b: Any, first_column: int, factors: np.ndarray | None = None) -> None:
        """Look at a block of rows of B, as `host.Nearest.update`; spans are fewest where blocks come in order."""
        if not self._stretches or not b.shape[0]:
            return
        self._ordered = self._ordered and first_column >= self._end
        self._end = max(self._end, first_column + b.shape[0])
        held, self._shuffled = len(self._scratch), None
        side = self._side(b, 1, factors)
        for stretch in self._stretches:
            self._take(stretch, side, first_column)
        self._wait()
        self._shuffled = None
        del self._scratch[held:]

    def _take(self, stretch: _Stretch, side: _Side, first_column: int) -> None:
        columns = side.rows.shape[0]
        spans = list(growing_spans(stretch.seen, columns, self._kept))
        flags = _zeros((2 * (len(spans) + 1),), np.uint32, self._stream)
        short = flags[: len(spans)]
        if stretch.seen == 0 and columns > 2 * self._capacity:
            self._sample(stretch, side, flags)
        stretch.seen += columns
        mode = 1 if self._ordered else 0
        tried = self._in_order and self._shuffles(side)
        if tried:
            if self._take_shuffled(stretch, side, first_column):
                return
            mode = 0  # there are columns among the best that come later
        for number, (start, width) in enumerate(spans):
            if (
                number
                and number == len(spans) - 1
                and not tried
                and short.copy_to_host(stream=self._stream).any()
            ):
                tried = self._in_order = self._shuffles(side)
                if tried and self._take_shuffled(stretch, side, first_column):
                    return
                mode = 0 if tried else mode
            self._multiply(stretch, side, start, width, first_column)
            self._merge(stretch, flags, number, mode)
        over = short.copy_to_host(stream=self._stream)
        self._wait()
        if over.any() and not tried and self._shuffles(side):
            self._in_order = True
            if self._take_shuffled(stretch, side, first_column):
                return
        self._again(
            stretch, side, first_column, [span for span, flag in zip(spans, over, strict=True) if flag]
        )
        if self._ordered and (mode == 0 or over.any()):
            self._merge(stretch, flags, len(spans), 1)

    def _shuffles(self, side: _Side) -> bool:
        """Whether rows of B can be compared in no order: by tensor cores, of which columns are left out by place."""
        planes = self._a.planes is not None and side.planes is not None
        return planes and not self._exclude_self and not self._equal and self._has_room(side)

    def _take_shuffled(self, stretch: _Stretch, side: _Side, first_column: int) -> bool:
        """`_take` of rows of B that lie in the order of what they are near, in none; False where so many are equal that
        lists are too short then, too. What equals a bound may come first."""
        if self._shuffled is None:
            arranged, _ = self._arranged(side, 0, True)
            self._shuffled = arranged, self._names(side.rows.shape[0], 0, True, first_column)
        side, names = self._shuffled
        spans = list(growing_spans(0, side.rows.shape[0], self._kept))
        flags = _zeros((2 * (len(spans) + 1),), np.uint32, self._stream)
        self._merge(stretch, flags, len(spans), 0)
        for number, (start, width) in enumerate(spans):
            if number == len(spans) - 1 and flags.copy_to_host(stream=self._stream).any():
                self._equal = True
                return False
            self._multiply(stretch, side, start, width, first_column, names)
            self._merge(stretch, flags, number, 0)
        over = flags.copy_to_host(stream=self._stream)[: len(spans)]
        self._wait()
        self._again(
            stretch, side, first_column, [span for span, flag in zip(spans, over, strict=True) if flag], names
        )
        if self._ordered:
            self._merge(stretch, flags, len(spans), 1)
        return True

    def _again(
        self,
        stretch: _Stretch,
        side: _Side,
        first_column: int,
        spans: list[tuple[int, int]],
        names: Any = None,
    ) -> None:
        """Multiply spans once more of which lists were too short; what equals a bound may now come first.

        Where columns lie in some order, a list may have been full before those came that are nearest; a second time it
        holds what is nearer than the best of those, and a third time what is nearer still. In pieces no wider than a
        list all fit, however many are equal.
        """
        if not spans:
            return
        flags = _zeros((4,), np.uint32, self._stream)
        self._merge(stretch, flags, 1, 0)
        for start, width in spans:
            for _ in range(TRIES):
                flags[:1].copy_to_device(np.zeros(1, np.uint32), stream=self._stream)
                self._multiply(stretch, side, start, width, first_column, names)
                self._merge(stretch, flags, 0, 0)
                if not flags[:1].copy_to_host(stream=self._stream)[0]:
                    break
            else:
                for piece in range(start, start + width, self._capacity):
                    columns = min(self._capacity, start + width - piece)
                    self._multiply(stretch, side, piece, columns, first_column, names)
                    self._merge(stretch, flags, 1, 0)

    def _sample(self, stretch: _Stretch, side: _Side, flags: Any) -> None:
        """Set floors of the bounds by rows of B that are spread over the block."""
        part = self._spread(side, self._capacity)
        self._keep(stretch.side, part, stretch.bounds, self._lists(stretch), self._capacity, 0)
        self._merge(stretch, flags, flags.size // 2 - 1, 2)

    def _lists(self, stretch: _Stretch) -> Any:
        return self._words[: stretch.side.rows.shape[0]]

    def _multiply(
        self,
        stretch: _Stretch,
        side: _Side,
        start: int,
        width: int,
        first_column: int,
        names: Any = None,
    ) -> None:
        """names: of the rows of a side that is shuffled."""
        first = first_column + start if names is None else start
        left_out = self._row + stretch.first - first if self._exclude_self else NO_COLUMN
        self._keep(
            stretch.side,
            side.part(start, width),
            stretch.bounds,
            self._lists(stretch),
            self._capacity,
            first,
            left_out=left_out,
            names=names,
        )

    def _merge(self, stretch: _Stretch, flags: Any, number: int, mode: int) -> None:
        merge(stretch, self._lists(stretch), flags, number, mode, self._stream)

    def result(self) -> Neighbours:
        """As `host.Nearest.result`."""
        rows = self._a.rows.shape[0]
        words = np.zeros((rows, self._kept), np.uint64)
        for stretch in self._stretches:
            stretch.best.copy_to_host(
                words[stretch.first : stretch.first + stretch.side.rows.shape[0]], stream=self._stream
            )
        self._wait()
        return neighbours_of(words[:, : self._k], self.sums, self.metric, self._threads)


def growing_spans(seen: int, columns: int, kept: int) -> Iterator[tuple[int, int]]:
    """First column and columns of each span of a block, of whose rows so many others were seen before."""
    capacity, growth = capacity_of(kept)
    start = 0
    while start < columns:
        width = min(columns - start, max(capacity, round_up(growth * (seen + start), STRETCH_UNIT)))
        yield start, width
        start += width


def merge(
    stretch: _Stretch,
    words: Any,
    flags: Any,
    number: int,
    mode: int,
    stream: Any,
    rows: tuple[int, int] | None = None,
) -> None:
    """Enqueue `lists.merge_function` for the rows of a stretch, or for those from a first to a last one."""
    kept, (first, stop) = stretch.best.shape[1], rows or (0, stretch.best.shape[0])
    capacity, integer = words.shape[1], stretch.number.kind == "i"
    enqueue(
        _merge_kernel(capacity, kept, integer),
        stop - first,
        lists.WARP,
        stream,
        lists.merge_nbytes(capacity, kept),
        words,
        stretch.best,
        stretch.bounds,
        stretch.floors,
        flags,
        number,
        mode,
        first,
    )


def spans_of(rows: int, columns: int) -> list[tuple[int, int]]:
    """Spans of columns, first and width, in order, of which each has at most `MOST_PAIRS` with so many rows; all but
    the last are of whole tiles."""
    widest = max(1, MOST_PAIRS // rows)
    widest = widest // STRETCH_UNIT * STRETCH_UNIT or widest
    return [(start, min(widest, columns - start)) for start in range(0, columns, widest)]


class Beyond(_Rows):
    """The pairs of a block of rows of A with rows of B beyond a threshold, as `host.Beyond`, of device arrays."""

    def __init__(
        self,
        a: Any,
        bound: Bound,
        *,
        metric: MetricName,
        b_dtype: np.dtype | None = None,
        first_row: int = 0,
        once: bool = False,
        keep: bool = True,
        factors: np.ndarray | None = None,
        precision: PrecisionName = "full",
        stream: Any = DEFAULT_STREAM,
    ) -> None:
        form = FARTHER + metric if bound.farther else metric
        super().__init__(a, metric, form, b_dtype, first_row, factors, precision, stream)
        self._once, self._farther = once, bound.farther
        self._room = PAIRS_ROOM if keep else 0
        self._bar = self._score(bound)
        # The words of all pairs, then their rows.
        self._memory = _empty(3 * max(self._room, 1), np.uint32, stream)
        self._found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.count = 0

    def _score(self, bound: Bound) -> Any:
        """What scores of pairs are at least; None where none of 32 bits is."""
        score = -bound.key if bound.farther else bound.key
        least, most = (-(2**31) + 1, 2**31 - 1) if self.integer else (-np.inf, np.inf)
        if bound.farther and self.metric == L2 and score == 0:
            score = least  # a squared distance that was rounded to less than 0 is 0
        return None if score > most else np.array(max(score, least), self.number)[()]

    def update(self, b: Any, first_column: int, factors: np.ndarray | None = None) -> None:
        """As `host.Beyond.update`."""
        if not self._a.rows.shape[0] or not b.shape[0] or self._bar is None:
            return
        held = len(self._scratch)
        side = self._side(b, 1, factors)
        # Of a pair that counts once the larger number is the row's, as products up to the diagonal have it.
        left, right = (side, self._a) if self._once else (self._a, side)
        row, column = (first_column, self._row) if self._once else (self._row, first_column)
        rows = left.rows.shape[0]
        for first in range(0, rows, STRETCH_ROWS):
            part = left.part(first, min(STRETCH_ROWS, rows - first))
            if not self._once or row + first + part.rows.shape[0] - 1 > column:
                self._take(part, right, row + first, column, swapped=self._once)
        del self._scratch[held:]

    def _take(self, left: _Side, right: _Side, row: int, column: int, *, swapped: bool) -> None:
        """Look at all of two sides; where there is not room for what is found, at halves of the right one."""
        bounds = _bounds(self._bar, left, self._stream)
        memory = self._memory
        places = max(self._room, 1)
        words = strided_view(memory, (1, places), (8 * places, 8), np.dtype(np.uint64))
        rows_found = strided_view(memory[2 * places :], (places,), (4,), np.dtype(np.int32))
        pieces = list(reversed(spans_of(left.rows.shape[0], right.rows.shape[0])))
        while pieces:
            start, width = pieces.pop()
            self._keep(
                left,
                right.part(start, width),
                bounds,
                words,
                self._room,
                column + start,
                rows_found=rows_found,
                last=row - column - start - 1 if swapped else None,
            )
            found = int(bounds[2, :1].copy_to_host(stream=self._stream)[0])
            bounds[2, :1].copy_to_device(np.zeros(1, np.uint32), stream=self._stream)
            if self._room and found > self._room:
                half = width // 2
                pieces += [(start + half, width - half), (start, half)]
                continue
            self.count += found
            if found and self._room:
                self._collect(words, rows_found, found, row, swapped)

    def _collect(self, words: Any, rows_found: Any, found: int, row: int, swapped: bool) -> None:
        its_words = words[0, :found].copy_to_host(stream=self._stream)
        its_rows = rows_found[:found].copy_to_host(stream=self._stream).astype(np.int64) + row
        scores = scores_of(its_words, self.number)
        keys = (-scores if self._farther else scores).astype(keys_dtype(self.sums, self.metric), copy=False)
        columns = columns_of(its_words)
        self._found.append((columns, its_rows, keys) if swapped else (its_rows, columns, keys))

    def result(self) -> Pairs:
        """As `host.Beyond.result`."""
        nothing = (
            np.empty(0, np.int64),
            np.empty(0, np.int64),
            np.empty(0, keys_dtype(self.sums, self.metric)),
        )
        row, column, keys = map(np.concatenate, zip(nothing, *self._found, strict=True))
        order = np.lexsort((column, row))
        return Pairs(row[order], column[order], values_of_keys(keys[order], self.sums, self.metric))
