"""Matrices, transforms and epilogues of every kind, for the tests of what devices do with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.pipeline.plan.transform import Epilogue, Transform

LEFT_OUT = 2**5
"""What may be left out of a transform, as bits of a number below this."""


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Of any size that the dtype has, with zeros of both signs, NaN and infinity here and there."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        found = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        found[rng.random(shape) < 0.3] = 3
        return found
    found = np.empty(shape, dtype)
    for part in (found.real, found.imag) if dtype.kind == "c" else (found,):
        part[...] = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)
        for value in (np.nan, np.inf, -np.inf, 0.0, -0.0, 3.0):
            part[rng.random(shape) < 0.04] = value
    return found


def a_transform(
    rng: np.random.Generator, sides: tuple[int, int], dtype: np.dtype, given: int, missing: Any
) -> Transform:
    """For a matrix of these sides. given: which vectors and numbers it has, as bits."""

    def vector(side: int, bit: int) -> Any:
        return numbers(rng, (side,), dtype) if given >> bit & 1 else None

    return Transform(
        dtype,
        vector(sides[0], 0),
        vector(sides[1], 1),
        0.3 if given >> 2 & 1 else 0.0,
        vector(sides[0], 3),
        vector(sides[1], 4),
        missing,
        bool(given >> 2 & 1),
    )


def an_epilogue(rng: np.random.Generator, sides: tuple[int, int], wide: np.dtype, given: int) -> Epilogue:
    """For a C of these sides that is formed in ``wide``. given: as above, of nine bits."""
    kind = np.dtype({"c": np.complex128, "f": np.float64}.get(wide.kind, wide))

    def vector(side: int, bit: int) -> Any:
        return numbers(rng, (side,), kind) if given >> bit & 1 else None

    def number(bit: int, otherwise: Any) -> Any:
        if not given >> bit & 1:
            return otherwise
        return {"c": 0.3 - 0.7j, "f": 0.7}.get(wide.kind, -5 if wide.kind == "i" else 5)

    return Epilogue(
        number(0, 1),
        vector(sides[0], 1),
        vector(sides[1], 2),
        vector(sides[0], 3),
        vector(sides[1], 3),
        number(3, 0),
        vector(sides[0], 4),
        vector(sides[1], 5),
        number(6, 0),
        number(7, 0),
    )


def bits(array: np.ndarray) -> np.ndarray:
    """Of the elements, all NaN alike: which payload an operation gives is up to the processor."""
    array = np.ascontiguousarray(array)
    if array.dtype.kind not in "fc":
        return array
    parts = array.view(array.real.dtype)
    return np.where(np.isnan(parts), np.float64(np.nan).astype(parts.dtype), parts).view(f"u{parts.itemsize}")
