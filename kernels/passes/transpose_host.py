"""Transposing in place on the CPU: the twin of `transpose_device.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

BLOCK_NBYTES = 2**16
"""The most that a block takes: with the one it changes places with, and a copy, it stays in a core's own cache."""


def transpose(
    lower: np.ndarray, upper: np.ndarray, *, swap: bool, same: bool, conjugate: bool = False
) -> None:
    """``upper[j, i] = lower[i, j]``; with ``swap`` also ``lower[i, j] = upper[j, i]``, as it was before.

    lower: rows × columns; upper: columns × rows, written; lower is too with ``swap``. Any strides and dtype; the bits
    stay as they are. They do not overlap, or (``same``) are one square matrix, of which then only elements with i > j
    move: below the diagonal to above it.

    conjugate: of complex numbers, what is written becomes the conjugate of that, also on the diagonal with ``swap``.
    Without, the diagonal becomes real.
    """
    side = max(1, int((BLOCK_NBYTES // lower.itemsize) ** 0.5))
    for rows, columns in _blocks(lower.shape, side):
        if same and columns.start > rows.start:
            continue
        below, above = lower[rows, columns], upper[columns, rows].T
        if same and columns.start == rows.start:  # one block both ways, on the diagonal
            moving: Any = np.tril_indices(below.shape[0], -1)
        else:
            moving = ...
        kept = above[moving].copy() if swap else None
        above[moving] = np.conjugate(below[moving]) if conjugate else below[moving]
        if kept is not None:
            below[moving] = np.conjugate(kept) if conjugate else kept
        if conjugate and moving is not ...:
            diagonal = np.einsum("ii->i", below)  # a view
            diagonal.imag = -diagonal.imag if swap else 0


def _blocks(shape: tuple[int, ...], side: int) -> Iterator[tuple[slice, slice]]:
    rows, columns = shape
    for row in range(0, rows, side):
        for column in range(0, columns, side):
            yield slice(row, min(row + side, rows)), slice(column, min(column + side, columns))
