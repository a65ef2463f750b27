"""Coordinates that an array brings along from where it was given: those of a DataArray, or the scales of a data set of
HDF5. What lies beside an array of Zarr is found there (`store/coordinates.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import zarr

BESIDE = "_tilewright_beside"
"""The attribute of an open array that keeps them."""


class Coordinates(NamedTuple):
    """The coordinates of an axis."""

    values: np.ndarray
    attributes: Mapping[str, Any]
    first: int = 0
    """The place along the axis of the first of them."""


class Beside(dict[str, Coordinates]):
    """By names of dimensions. Its pickled copy is empty: no task looks at coordinates, and each gets the array."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Beside, ()


def with_coordinates(array: zarr.Array[Any], found: Mapping[str, Coordinates] | None) -> zarr.Array[Any]:
    """The same array with coordinates, by names of its dimensions; None: they are looked for beside it."""
    if found is None:
        return array
    own = zarr.Array(array.async_array)
    setattr(own, BESIDE, Beside(found))
    return own


def coordinates_with(array: zarr.Array[Any]) -> Mapping[str, Coordinates] | None:
    """Those that an array has brought along, which are all that it has; None: it has brought none."""
    found: Beside | None = getattr(array, BESIDE, None)
    return found
