"""Gram matrices in a few lines of NumPy, in double precision, and stored arrays to try them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import zarr


def put(path: Path, data: np.ndarray, chunks: tuple[int, ...] | None = None, **options: Any) -> Path:
    """Store an array, in chunks that it needs not fill."""
    chunks = chunks or tuple(max(1, side) for side in data.shape)
    zarr.create_array(path, shape=data.shape, chunks=chunks, dtype=data.dtype, **options)[...] = data
    return path


def present(x: np.ndarray, missing: Any) -> np.ndarray:
    """Where no element is missing."""
    if missing is None:
        return np.ones(x.shape, bool)
    return x == x if missing == "nan" else x != missing


def mean(x: np.ndarray, there: np.ndarray, axis: int, weights: np.ndarray) -> np.ndarray:
    """Of the elements that are there, with one weight for each element along the axis; kept as an axis."""
    heavy = there * np.expand_dims(weights, 1 - axis)
    return np.sum(np.where(there, x, 0) * heavy, axis, keepdims=True) / heavy.sum(axis, keepdims=True)


def gram(
    x: np.ndarray,
    *,
    of: str = "columns",
    center: bool | str = False,
    scale: bool = False,
    missing: Any = None,
    divide: float | str | None = None,
    weights: np.ndarray | None = None,
    y: np.ndarray | None = None,
) -> np.ndarray:
    """What ``tilewright.gram`` computes of whole arrays."""
    n = x.shape[0 if of == "columns" else 1]
    heavy = np.ones(n) if weights is None else weights
    divisor = {None: 1.0, "n": heavy.sum(), "n-1": heavy.sum() - (heavy**2).sum() / heavy.sum()}.get(
        divide, divide
    )
    left, right = (
        _factor(each, of, center, scale, missing, divide, heavy) for each in (x, x if y is None else y)
    )
    if of == "rows":
        left, right = left.T, right.T
    return left.conj().T @ (right * heavy[:, np.newaxis]) / divisor


def _factor(
    x: np.ndarray,
    of: str,
    center: bool | str,
    scale: bool,
    missing: Any,
    divide: Any,
    weights: np.ndarray,
) -> np.ndarray:
    there = present(x, missing)
    wide = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
    along = 0 if of == "columns" else 1  # the axis that is summed over
    other = np.ones(x.shape[1 - along])
    means = {of: (along, weights), "rows" if of == "columns" else "columns": (1 - along, other)}
    result = wide
    if center == "both":
        columns, rows = (mean(wide, there, *means[side]) for side in ("columns", "rows"))
        heavy = there * np.expand_dims(weights, 1 - along)
        result = wide - columns - rows + np.sum(np.where(there, wide, 0) * heavy) / heavy.sum()
    elif center:
        result = wide - mean(wide, there, *means[of if center is True else str(center)])
    result = np.where(there, result, 0)
    if scale:
        apart = np.where(there, wide - mean(wide, there, along, weights), 0)
        total = weights.sum()
        degrees = total - ((weights**2).sum() / total if divide == "n-1" else 0)
        square = np.abs(apart) ** 2 * np.expand_dims(weights, 1 - along)
        result = result / np.sqrt(square.sum(along, keepdims=True) / degrees)
    return result
