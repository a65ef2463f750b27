"""Gram matrices in a few lines of NumPy, in double precision, and stored arrays to try them on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    """Where no element is missing: equals a number, is NaN, or is called so by a mask that broadcasts, beside which NaN
    is missing too."""
    if missing is None:
        return np.ones(x.shape, bool)
    if isinstance(missing, np.ndarray):
        return np.broadcast_to(~missing, x.shape) & (x == x)
    return x == x if isinstance(missing, str) else x != missing


def mean(x: np.ndarray, there: np.ndarray, axis: int, weights: np.ndarray) -> np.ndarray:
    """Of the elements that are there, with one weight for each element along the axis; kept as an axis. 0 of none."""
    heavy = there * np.expand_dims(weights, 1 - axis)
    whole = heavy.sum(axis, keepdims=True)
    total = np.sum(np.where(there, x, 0) * heavy, axis, keepdims=True)
    return np.divide(total, whole, out=np.zeros_like(total), where=whole > 0)


@dataclass(frozen=True)
class Asked:
    """The options of ``tilewright.gram``. Numbers that are given for a side are in a mapping."""

    of: str = "columns"
    center: bool | str | Mapping[str, np.ndarray] = False
    scale: bool | str | Mapping[str, np.ndarray] = False
    missing: Any = None
    """Of two matrices, masks of both in a mapping."""
    missing_as: str = "mean"
    divide: float | str | None = None
    weights: np.ndarray | None = None
    constant: str = "error"
    conjugated: str = "left"

    @property
    def along(self) -> int:
        """The axis that is summed over."""
        return 0 if self.of == "columns" else 1

    @property
    def centered(self) -> tuple[str, ...]:
        """The sides whose means are subtracted."""
        if isinstance(self.center, Mapping) or self.center is False:
            return ()
        given = self.of if self.center is True else str(self.center)
        return ("columns", "rows") if given == "both" else (given,)

    @property
    def scaled(self) -> str | None:
        """The side that is divided by its deviations."""
        if isinstance(self.scale, Mapping) or self.scale is False:
            return None
        return self.of if self.scale is True else str(self.scale)


def gram(x: np.ndarray, *, y: np.ndarray | None = None, **options: Any) -> np.ndarray:
    """What ``tilewright.gram`` computes of whole arrays."""
    return gram_and_size(x, y, Asked(**options))[0]


def gram_and_size(x: np.ndarray, y: np.ndarray | None, asked: Asked) -> tuple[np.ndarray, np.ndarray]:
    """The same, and what its rounding errors are measured by: the sums of the sizes of all that is multiplied and
    subtracted."""
    if asked.divide == "2pq":
        asked = replace(asked, divide=alleles(x, asked))
    factors = [_factor(x, "X", asked)]
    factors.append(factors[0] if y is None else _factor(y, "Y", asked))
    left, right = factors
    heavy = np.ones(len(left.values)) if asked.weights is None else asked.weights
    pairs = left.there.T.astype(float) @ right.there
    if asked.missing_as == "pairwise" and asked.of in asked.centered:
        result = _over_pairs(left, right, asked)
    else:
        turned = (
            (left.values.conj(), right.values)
            if asked.conjugated == "left"
            else (left.values, right.values.conj())
        )
        result = turned[0].T @ (turned[1] * heavy[:, np.newaxis])
        with np.errstate(all="ignore"):
            result = result / _divisor(asked, heavy, pairs)
    with np.errstate(all="ignore"):
        size = left.sizes.T @ (right.sizes * heavy[:, np.newaxis]) / np.abs(_divisor(asked, heavy, pairs))
    if asked.constant == "nan" and asked.missing_as == "mean" and asked.divide != "pairs":
        result = np.where(left.nothing[:, np.newaxis] | right.nothing, np.nan, result)
    return result, size


def alleles(x: np.ndarray, asked: Asked) -> float:
    """The sum of 2p(1 - p) over the lines of the side that is summed over, whose means are 2p."""
    there = present(x, asked.missing["X"] if isinstance(asked.missing, Mapping) else asked.missing)
    wide = np.where(there, x, 0).astype(np.float64)
    p = mean(wide, there, 1 - asked.along, np.ones(x.shape[1 - asked.along])) / 2
    return float((2 * p * (1 - p)).sum())


def _divisor(asked: Asked, heavy: np.ndarray, pairs: np.ndarray) -> Any:
    ddof = 1 if asked.divide == "n-1" else 0
    if asked.missing_as == "pairwise" or asked.divide == "pairs":
        return np.where(pairs > ddof, pairs - ddof, np.nan)
    if asked.divide in ("n", "n-1"):
        return heavy.sum() - ddof * (heavy**2).sum() / heavy.sum()
    return asked.divide or 1.0


@dataclass(frozen=True)
class _Factor:
    """One matrix, lines × variables."""

    values: np.ndarray
    """As they are multiplied."""
    sizes: np.ndarray
    there: np.ndarray
    stored: np.ndarray
    """Values before means over pairs are subtracted."""
    nothing: np.ndarray
    """Whether a variable has no number, or none that varies and is to be scaled."""


def _factor(x: np.ndarray, role: str, asked: Asked) -> _Factor:
    along, of = asked.along, asked.of
    summed = "rows" if of == "columns" else "columns"
    there = present(x, asked.missing[role] if isinstance(asked.missing, Mapping) else asked.missing)
    wide = np.where(there, x, 0).astype(np.complex128 if x.dtype.kind == "c" else np.float64)
    weights = np.ones(x.shape[along]) if asked.weights is None else asked.weights
    means = {of: (along, weights), summed: (1 - along, np.ones(x.shape[1 - along]))}
    over_pairs = asked.missing_as == "pairwise" and of in asked.centered
    offset = np.zeros(())
    for side in () if over_pairs else asked.centered:
        offset = offset + mean(wide, there, *means[side])
    if len(asked.centered) == 2:
        heavy = there * np.expand_dims(weights, 1 - along)
        offset = offset - np.sum(wide * heavy) / heavy.sum()
    factor = np.ones(())
    for given, combine in ((asked.center, np.add), (asked.scale, np.multiply)):
        for side, vector in given.items() if isinstance(given, Mapping) else ():
            laid = vector[:, np.newaxis] if side == "rows" else vector
            offset, factor = (
                (combine(offset, laid), factor) if combine is np.add else (offset, combine(factor, laid))
            )
    nothing = ~there.any(along)
    if (side := asked.scaled) is not None:
        axis, heavy = means[side]
        apart = np.where(there, wide - mean(wide, there, axis, heavy), 0)
        count = there.sum(axis, keepdims=True)
        ddof = 1 if asked.divide == "n-1" else 0
        if asked.missing_as == "pairwise" or asked.divide == "pairs":
            degrees: Any = np.maximum(count - (ddof if asked.missing_as == "pairwise" else 0), 0)
        else:
            degrees = heavy.sum() - ddof * (heavy**2).sum() / heavy.sum()
        square = (np.abs(apart) ** 2 * np.expand_dims(heavy, 1 - axis)).sum(axis, keepdims=True)
        least = np.where(there, wide, np.inf).real.min(axis, keepdims=True)
        flat = (count == 0) | (np.where(there, wide - least, 0) == 0).all(axis, keepdims=True)
        if not over_pairs:
            factor = factor * np.sqrt(np.divide(degrees, square, out=np.zeros(square.shape), where=~flat))
        if side == of:
            nothing = nothing | flat.reshape(-1)
    values = np.where(there, (wide - offset) * factor, 0)
    sizes = np.where(there, (np.abs(wide) + np.abs(offset)) * np.abs(factor), 0)
    turn = np.asarray if of == "columns" else np.transpose
    return _Factor(turn(values), turn(sizes), turn(there), turn(values), nothing)


def _over_pairs(left: _Factor, right: _Factor, asked: Asked) -> np.ndarray:
    """Covariances, or correlations, over the lines that two variables both have, one element after the other."""
    ddof = 1 if asked.divide == "n-1" else 0
    result = np.full((left.values.shape[1], right.values.shape[1]), np.nan)
    for i, j in np.ndindex(*result.shape):
        both = left.there[:, i] & right.there[:, j]
        n = int(both.sum())
        if n == 0 or (n <= ddof and asked.scaled != asked.of):
            continue
        one, other = left.stored[both, i], right.stored[both, j]
        one, other = one - one.mean(), other - other.mean()
        if asked.scaled != asked.of:
            result[i, j] = one @ other / (n - ddof)
        elif np.ptp(left.stored[both, i]) and np.ptp(right.stored[both, j]):
            result[i, j] = one @ other / np.sqrt((one @ one) * (other @ other))
        elif asked.constant == "zero":
            result[i, j] = 0
    return result
