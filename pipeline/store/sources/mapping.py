"""Boxes of an array that lies plain in one file, copied out of the file's pages.

Where rows of a box are short stretches of much longer rows, a call for each of them costs more than the copy, and
reading all that lies between costs more than either. A mapped file has no such costs. It is mapped a band of rows at a
time: mapped pages count as memory of the process, by which a cluster ends a worker that has too much.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import numpy as np

BAND_NBYTES = 64 * 2**20
"""So much of a file is mapped at once, or one row."""


def copy_box(
    descriptor: int,
    offset: int,
    dtype: np.dtype,
    sides: Sequence[int],
    inside: Sequence[slice],
    target: np.ndarray,
) -> None:
    """A box of an array into ``target``, whatever its strides and byte order.

    descriptor: of an open file that holds all of the array, from ``offset`` on, in C's order: whoever cuts the file
    short meanwhile has this process ended by the system (SIGBUS). sides: of the array. Raises OSError where the file
    cannot be mapped.
    """
    if target.size == 0:
        return
    strides = [dtype.itemsize * math.prod(sides[axis + 1 :]) for axis in range(len(sides))]
    step = max(1, BAND_NBYTES // strides[0])
    rows = inside[0]
    for row in range(rows.start, rows.stop, step):
        band = [slice(row, min(row + step, rows.stop)), *inside[1:]]
        first = sum(part.start * stride for part, stride in zip(band, strides, strict=True))
        last = sum((part.stop - 1) * stride for part, stride in zip(band, strides, strict=True))
        begin = (offset + first) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = offset + last + dtype.itemsize - begin
        with mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=begin) as pages:
            shape = [part.stop - part.start for part in band]
            view: np.ndarray = np.ndarray(shape, dtype, pages, offset + first - begin, strides)
            target[row - rows.start : row - rows.start + shape[0]] = view
            del view
