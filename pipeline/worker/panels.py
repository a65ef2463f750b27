"""Panels and tiles in their buffers: their layout, which panels a worker holds, and which are arriving there."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from tilewright.kernels.gpu.device_array import DeviceRegion, address
from tilewright.pipeline.plan.memory import Lines
from tilewright.pipeline.plan.told import PanelContent

PanelPart = tuple[int, int, int, int]
"""A rectangle of a panel as stored: first row, row after the last, first column, column after the last."""

PanelKey = tuple[str, int, int]
"""A panel: ``a`` or ``b``, its row or column of tiles, and its first index along k."""


@dataclass(frozen=True)
class Placed:
    """A panel, or a tile, in a buffer."""

    flat: Any
    """The buffer: at least as long as the matrix with its padding."""
    shape: tuple[int, int]
    """As stored: a transposed operand has its sides swapped."""
    lines: Lines

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.flat.dtype)

    @property
    def pitch(self) -> int:
        """Elements from one line to the next."""
        return self.lines.pitch(self.shape[1])

    def place(self, row: int, column: int) -> int:
        """Offset of an element from the first one, in elements."""
        return row * self.pitch + self.lines.place(column)

    def address(self, row: int, column: int) -> int:
        return address(self.flat) + self.place(row, column) * self.dtype.itemsize

    def cut(self, rows: slice, columns: slice) -> Any:
        """A view, without a copy, of a region each of whose lines is contiguous."""
        matrix = self._matrix
        if shape_of((rows, columns)) == matrix.shape:
            return matrix
        left = self.lines.place(columns.start)
        columns = slice(left, left + columns.stop - columns.start)
        return (
            matrix[rows, columns] if isinstance(matrix, np.ndarray) else DeviceRegion(matrix, rows, columns)
        )

    @cached_property
    def _matrix(self) -> Any:
        """The whole matrix, including the padding between cells and at the end of lines."""
        return shaped(self.flat, (self.shape[0], self.pitch))

    def pieces(self, rows: slice, columns: slice) -> list[tuple[slice, slice]]:
        """A region, cut so that each line of a piece is contiguous."""
        return [(rows, slice(*stretch)) for stretch in self.lines.stretches(columns.start, columns.stop)]


_numbers = itertools.count()


@dataclass(eq=False)
class Arrival:
    """The state of a panel being loaded, for workers that would copy it. Both futures are set once, by any thread."""

    own: PanelPart | None = None
    """The part that this worker reads from files first."""
    exported: bytes | None = None
    """The handle by which other processes open its buffer; None where they cannot copy it."""
    number: int = field(default_factory=_numbers.__next__)
    own_there: Future[bool] = field(default_factory=Future)
    whole: Future[bool] = field(default_factory=Future)
    since: float = math.inf
    """When ``whole`` was set, by `time.perf_counter`."""

    def all_there(self) -> None:
        """Tell that all of the panel is here, unless that was told."""
        if not self.whole.done():
            self.since = time.perf_counter()
        tell(self.own_there, True)
        tell(self.whole, True)

    def held_seconds(self) -> float | None:
        """For how long all of the panel has been here; None where it is not."""
        return time.perf_counter() - self.since if self.whole.done() and self.whole.result() else None


def tell(there: Future[bool], value: bool) -> None:
    """Set, unless it is set already, whether something has arrived (True) or never will (False)."""
    with suppress(InvalidStateError):
        there.set_result(value)


@dataclass(eq=False)
class ReadContent:
    """What a panel held when it was read, for the reports of all tiles that are multiplied from it. The first report
    tells the hashes of its parts, which need not be that of the tile that had it read: tiles end in any order, and none
    may be recorded before it is known what it was computed from."""

    content: PanelContent
    told: bool = False

    def tell(self) -> PanelContent:
        """For a report. Two at once may both tell the hashes, which are the same."""
        told, self.told = self.told, True
        return replace(self.content, parts=None) if told else self.content


@dataclass(eq=False)
class PanelBuffer:
    """A buffer for one panel, as large as the plan's largest; ``users`` counts those that took it and have not
    multiplied yet."""

    flat: Any
    cache: PanelCache
    """Which it belongs to, and is given back to: of A's panels some may serve as B's."""
    users: int = 0
    arrival: Arrival = field(default_factory=Arrival)
    """The arrival of the panel that is here or being loaded."""
    panel: Placed | None = None
    """That panel, from when loading it is begun."""
    region: tuple[slice, slice] | None = None
    """Of the array, from when loading that panel is begun."""
    content: ReadContent | None = None
    """What it holds, once it was hashed: as it was read, or else when it is multiplied."""

    @property
    def placed(self) -> Placed:
        """The panel, of a buffer that was taken and loaded."""
        assert self.panel is not None, "set by who loads it"
        return self.panel


class PanelCache:
    """Panels of one operand, at most ``count`` of them; a new one replaces the least recently taken.

    One thread takes panels in the order of the work and another releases them in the same order, so the least recently
    taken is also the first that falls free.
    """

    def __init__(self, count: int, allocate: Callable[[], Any]) -> None:
        self._spare = count
        self._allocate = allocate
        self._held: OrderedDict[Any, PanelBuffer] = OrderedDict()
        self._let_go = threading.Condition()

    def take(self, key: Any) -> tuple[PanelBuffer, bool]:
        """The buffer of panel ``key``, and whether its bytes are there or being loaded; if not, the caller must load
        them. Waits for a buffer while all are in use."""
        with self._let_go:
            buffer = self._held.get(key)
            there = buffer is not None
            if buffer is None:
                if self._spare:
                    buffer = PanelBuffer(self._allocate(), self)
                    self._spare -= 1
                else:
                    oldest = next(iter(self._held))
                    self._let_go.wait_for(lambda: self._held[oldest].users == 0)
                    buffer = self._held.pop(oldest)
                    buffer.arrival, buffer.content = Arrival(), None
                self._held[key] = buffer
            self._held.move_to_end(key)
            buffer.users += 1
            return buffer, there

    def ready(self, *keys: Any) -> bool:
        """Whether these could be taken without waiting, those first that are held: another's place may be what one of
        them is held in. This holds until the next `take`."""
        with self._let_go:
            lacking = sum(key not in self._held for key in keys) - self._spare
            others = (buffer for key, buffer in self._held.items() if key not in keys)
            return lacking <= 0 or [one.users for one in itertools.islice(others, lacking)] == [0] * lacking

    def find(self, key: Any) -> PanelBuffer | None:
        """The buffer of a panel that is here or being loaded. Takes no lock, so it does not wait while a buffer is
        allocated."""
        return self._held.get(key)

    def let_go(self, buffer: PanelBuffer) -> None:
        """Release a buffer that was taken: its panel has been multiplied."""
        with self._let_go:
            buffer.users -= 1
            self._let_go.notify()

    def discard(self, key: Any) -> None:
        """Panel ``key`` could not be loaded: its buffer is empty and will be the next to be reused."""
        with self._let_go:
            nothing = object()
            self._held[nothing] = self._held.pop(key)
            self._held.move_to_end(nothing, last=False)

    def free(self) -> None:
        """Let go of all buffers' memory, whoever still knows the buffers. Nothing can be taken any more."""
        with self._let_go:
            for buffer in self._held.values():
                buffer.flat = buffer.panel = None
            self._held.clear()
            self._spare = 0


def part_nbytes(part: PanelPart, dtype: np.dtype) -> int:
    top, bottom, left, right = part
    return (bottom - top) * (right - left) * dtype.itemsize


def shape_of(region: tuple[slice, slice]) -> tuple[int, int]:
    return region[0].stop - region[0].start, region[1].stop - region[1].start


def shaped(flat: Any, shape: tuple[int, int]) -> Any:
    return flat[: shape[0] * shape[1]].reshape(shape)
