"""What a matrix holds, found in one reading: its range, elements that are not finite, and those that stand for missing
ones.

A product's panels and tiles are looked at where they lie when they are multiplied: on the CPU here, on a GPU in
`contents_device.py`. What is found is merged over the pieces of a matrix, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tilewright.kernels.passes.masked import Masks, count_masked

PIECE_NBYTES = 2**18
"""What is looked at at once: it and what NumPy makes of it stay in a core's second-level cache."""

HALF_OVERFLOW = 65520.0
"""The least number that float16 rounds to infinity."""


@dataclass(frozen=True)
class Contents:
    """What was looked for and found in (a part of) a matrix."""

    least: int | None = None
    """The smallest and the largest of the integers; None where there were none, or nobody looked."""
    most: int | None = None
    nan: int = 0
    """How many elements are NaN (complex: either part), and how many others are infinite."""
    infinite: int = 0
    masked: int = 0
    """How many elements stand for missing ones."""

    @property
    def not_finite(self) -> int:
        return self.nan + self.infinite

    def times(self, count: int) -> Contents:
        """What so many copies hold together."""
        return replace(self, nan=count * self.nan, infinite=count * self.infinite, masked=count * self.masked)

    def merged(self, other: Contents) -> Contents:
        """What both hold together.

        >>> Contents(least=-3, most=2).merged(Contents(least=0, most=9, masked=1))
        Contents(least=-3, most=9, nan=0, infinite=0, masked=1)
        """
        return Contents(
            min((each.least for each in (self, other) if each.least is not None), default=None),
            max((each.most for each in (self, other) if each.most is not None), default=None),
            self.nan + other.nan,
            self.infinite + other.infinite,
            self.masked + other.masked,
        )


NOTHING = Contents()
"""Of what nobody looked at."""


@dataclass(frozen=True)
class Sought:
    """What to look for in a matrix; each costs a little more time."""

    extent: bool = False
    """The range of integers."""
    masks: Masks | None = None
    """Elements that stand for missing ones."""
    not_finite: bool = False
    """NaN and infinity, among floats and complex numbers."""

    def __bool__(self) -> bool:
        return self.extent or self.masks is not None or self.not_finite


UNSOUGHT = Sought()
"""Nothing is looked for."""


def overflow_of(dtype: np.dtype) -> float:
    """The least absolute value that becomes infinite when it is rounded to this dtype: infinity itself where nothing is
    rounded on its way there."""
    return HALF_OVERFLOW if dtype == np.float16 else math.inf


def contents_of(block: np.ndarray, sought: Sought, overflow: float = math.inf) -> Contents:
    """Look through a matrix on the CPU (rows × columns, any dtype and strides, not written).

    overflow: absolute values from here on count as infinite, as `overflow_of` says.
    """
    found = NOTHING
    if sought:
        for piece in _pieces(block):
            found = found.merged(_contents_of_piece(piece, sought, overflow))
    return found


def _pieces(block: np.ndarray) -> Iterator[np.ndarray]:
    """The block cut along its memory into pieces of about `PIECE_NBYTES`."""
    if abs(block.strides[0]) < abs(block.strides[1]):
        block = block.T
    rows, columns = block.shape
    wide = max(1, min(columns, PIECE_NBYTES // block.itemsize))
    tall = max(1, PIECE_NBYTES // (wide * block.itemsize))
    for row in range(0, rows, tall):
        for column in range(0, columns, wide):
            yield block[row : row + tall, column : column + wide]


def _contents_of_piece(piece: np.ndarray, sought: Sought, overflow: float) -> Contents:
    least = most = None
    if sought.extent and piece.dtype.kind in "iu":
        least, most = int(piece.min()), int(piece.max())
    nan = infinite = 0
    if sought.not_finite and piece.dtype.kind in "fc":
        parts = [piece.real, piece.imag] if piece.dtype.kind == "c" else [piece]
        with np.errstate(invalid="ignore"):
            usual = np.abs(parts[0]) < overflow
            for part in parts[1:]:
                usual &= np.abs(part) < overflow
        if count := piece.size - int(np.count_nonzero(usual)):
            nan = int(np.count_nonzero(np.isnan(piece)))
            infinite = count - nan
    masked = count_masked(piece, sought.masks) if sought.masks is not None else 0
    return Contents(least, most, nan, infinite, masked)
