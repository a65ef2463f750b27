"""Panels and tiles in their buffers: how they lie there, and which panels a worker holds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tilewright.kernels.device_array import DeviceRegion, address
from tilewright.pipeline.layout import Lines
from tilewright.pipeline.peers import Arrival


@dataclass(frozen=True)
class Placed:
    """A panel, or a tile, in a buffer."""

    flat: Any
    """The buffer: at least as long as the matrix takes up."""
    shape: tuple[int, int]
    """As it is stored, so a transposed operand has its sides swapped."""
    lines: Lines

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.flat.dtype)

    @property
    def pitch(self) -> int:
        """Elements from one line to the next."""
        return self.lines.pitch(self.shape[1])

    def place(self, row: int, column: int) -> int:
        """Where an element lies, counted in elements from the first."""
        return row * self.pitch + self.lines.place(column)

    def address(self, row: int, column: int) -> int:
        return address(self.flat) + self.place(row, column) * self.dtype.itemsize

    def cut(self, rows: slice, columns: slice) -> Any:
        """A region that has its lines in one piece, without a copy."""
        matrix, left = self._matrix, self.lines.place(columns.start)
        columns = slice(left, left + columns.stop - columns.start)
        if shape_of((rows, columns)) == matrix.shape:
            return matrix
        return (
            matrix[rows, columns] if isinstance(matrix, np.ndarray) else DeviceRegion(matrix, rows, columns)
        )

    @cached_property
    def _matrix(self) -> Any:
        """With what lies between its cells, and behind its lines."""
        return shaped(self.flat, (self.shape[0], self.pitch))

    def pieces(self, rows: slice, columns: slice) -> list[tuple[slice, slice]]:
        """A region, cut so that each piece of it has its lines in one piece."""
        return [(rows, slice(*stretch)) for stretch in self.lines.stretches(columns.start, columns.stop)]


@dataclass(eq=False)
class Buffer:
    """A panel's place, as large as the plan's largest, and how many that were taken wait to be multiplied."""

    flat: Any
    users: int = 0
    arrival: Arrival = field(default_factory=Arrival)
    """Of the panel that is here, or on its way."""


class PanelCache:
    """Panels of one operand, at most ``count`` of them; the one that was taken longest ago gives way to a new one.

    One thread takes them, in the order of the work, and another lets them go in the same order: so a panel gives
    way only when it is not the next to be wanted again.
    """

    def __init__(self, count: int, allocate: Callable[[], Any]) -> None:
        self._spare = count
        self._allocate = allocate
        self._held: OrderedDict[Any, Buffer] = OrderedDict()
        self._let_go = threading.Condition()

    def take(self, key: Any) -> tuple[Buffer, bool]:
        """The place of panel ``key``, and whether its bytes are there; if not, they are to be loaded. Waits for a
        place while all are in use.
        """
        with self._let_go:
            buffer = self._held.get(key)
            there = buffer is not None
            if buffer is None:
                if self._spare:
                    buffer = Buffer(self._allocate())
                    self._spare -= 1
                else:
                    oldest = next(iter(self._held))
                    self._let_go.wait_for(lambda: self._held[oldest].users == 0)
                    buffer = self._held.pop(oldest)
                    buffer.arrival = Arrival()
                self._held[key] = buffer
            self._held.move_to_end(key)
            buffer.users += 1
            return buffer, there

    def ready(self, key: Any) -> bool:
        """Whether `take` would not wait. It stays so until the next `take`."""
        with self._let_go:
            return key in self._held or self._spare > 0 or next(iter(self._held.values())).users == 0

    def find(self, key: Any) -> Buffer | None:
        """The place of a panel that is here, or on its way. It waits for nobody: not while a place is allocated."""
        return self._held.get(key)

    def let_go(self, buffer: Buffer) -> None:
        """One who took it has multiplied it."""
        with self._let_go:
            buffer.users -= 1
            self._let_go.notify()

    def discard(self, key: Any) -> None:
        """Panel ``key`` could not be loaded: its place holds nothing, and goes first."""
        with self._let_go:
            nothing = object()
            self._held[nothing] = self._held.pop(key)
            self._held.move_to_end(nothing, last=False)


def shape_of(region: tuple[slice, slice]) -> tuple[int, int]:
    return region[0].stop - region[0].start, region[1].stop - region[1].start


def shaped(flat: Any, shape: tuple[int, int]) -> Any:
    return flat[: shape[0] * shape[1]].reshape(shape)
