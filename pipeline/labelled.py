"""Results as xarray has them: with the names of their dimensions, their coordinates, and flattened sides taken apart.

What is read here was written by `store/coordinates.py` and `provenance.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from zarr.errors import BaseZarrError

from tilewright.kernels.arguments import check_flag
from tilewright.pipeline.errors import OptionError, StoreError
from tilewright.pipeline.store.arrays import (
    UNREADABLE,
    Source,
    check_source,
    is_local,
    name_of,
    open_array,
    place_of,
)
from tilewright.pipeline.store.attributes import DIMENSIONS, FLATTENED, dimension_names
from tilewright.pipeline.store.coordinates import OURS, SIDES

if TYPE_CHECKING:
    import xarray as xr

ROLE = "the result"
READ_BACK = (FLATTENED, SIDES, DIMENSIONS)
"""Attributes that say what the DataArray's dimensions and coordinates do."""
OF_STORAGE = (DIMENSIONS, OURS)
"""Those of coordinates that say how they are stored."""


def open_xarray(source: Source, *, unstack: bool = False) -> xr.DataArray:
    """Open a result as a DataArray of xarray, with the coordinates of its dimensions.

    Its numbers are read when they are used, by dask. A side that several axes of X were flattened into has a MultiIndex
    of their coordinates, by which ``sel`` finds a place; with ``unstack`` it is these axes again, in X's order. Of a
    covariance of a field with itself the axes of the second side are called ``lat_2`` and so on; in a group that has
    something else of that name, ``lat_3``. xarray has to be installed.

    Parameters
    ----------
    source
        The path or URL of an array that `matmul`, `gram`, `cov` or `corr` stored, or of one in a group of `eofs`, such
        as ``eofs.zarr/components``; or the open array. Any other array of Zarr is opened too, with the coordinates that
        are found beside it.
    unstack
        Whether flattened sides are taken apart.

    Raises
    ------
    OptionError
        xarray is not installed; or a side has only some places of its axes, and is to be taken apart.
    StoreError
        There is no such array, or its attributes do not fit it.

    Examples
    --------
    >>> import numpy as np
    >>> import tilewright as tw
    >>> import xarray
    >>> latitudes, longitudes = [60.0, 0.0, -60.0], [0.0, 90.0, 180.0, 270.0]
    >>> field = xarray.DataArray(
    ...     np.random.rand(9, 3, 4), {"lat": latitudes, "lon": longitudes}, ["time", "lat", "lon"]
    ... )
    >>> run = tw.cov(field, out="covariance.zarr", sum_over="time")
    >>> covariance = tw.open_xarray("covariance.zarr")
    >>> covariance.sel(lat=60, lon=90).dims
    ('lat_lon_2',)
    >>> tw.open_xarray("covariance.zarr", unstack=True).dims
    ('lat', 'lon', 'lat_2', 'lon_2')
    """
    unstack = check_flag("unstack", unstack)
    check_source(source, ROLE)
    xr = _xarray()
    import dask.array as da

    array = open_array(source, ndim=1, role=ROLE, or_more=True)
    names = [name or f"dim_{axis}" for axis, name in enumerate(dimension_names(array))]
    about, group = array.attrs.asdict(), _group_of(array)
    flattened = about.get(FLATTENED) or (group.attrs.get(FLATTENED) if group is not None else None)
    listed = about.get(SIDES)
    found = xr.DataArray(
        da.from_array(array, chunks=_chunks(array), name=False),
        dims=names,
        name=_stem(array),
        attrs={name: value for name, value in about.items() if name not in READ_BACK},
    )
    for name, length in zip(names, array.shape, strict=True):
        if isinstance(flattened, Mapping) and name in flattened:
            side = _Side.of(name, length, flattened[name], group, name_of(array))
            found = side.unstacked(found) if unstack else side.stacked(found)
            continue
        one = _listed(name, listed, length)
        one = _beside(group, name, name, length) if one is None else one
        if one is not None:
            found = found.assign_coords({name: one})
    return found


def _xarray() -> Any:
    try:
        import xarray
    except ImportError as error:
        raise OptionError(
            f"open_xarray needs xarray, which cannot be imported ({error}); install it (pip install xarray), or open"
            " the array by zarr or dask, which give the same numbers"
        ) from error
    return xarray


@dataclass(frozen=True)
class _Side:
    """A dimension that several axes were flattened into."""

    name: str
    levels: tuple[str, ...]
    """What the axes are called beside it."""
    shape: tuple[int, ...]
    places: tuple[int, int]
    """The first and the last + 1 of the axes' places that are in it."""
    values: tuple[xr.Variable | None, ...]
    """The coordinates along each axis; None where it has none."""

    @classmethod
    def of(cls, name: str, length: int, made: Any, group: zarr.Group | None, array: str) -> _Side:
        """A side of this length, of which an attribute says what it is made of. Raises StoreError."""
        try:
            axes, shape = made["dimensions"], tuple(int(size) for size in made["shape"])
            levels = tuple(str(level) for level in made.get("levels", axes))
            first, last = made.get("places", (0, math.prod(shape)))
            listed, dtypes, said = (made.get(key, {}) for key in ("coordinates", "dtypes", "attributes"))
            if last - first != length or not len(axes) == len(levels) == len(shape):
                raise ValueError(f"{last - first} places of {len(axes)} axes")
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise StoreError(
                f"{ROLE}: the attribute {FLATTENED!r} of {array} does not say what its {name}, of {length}, is made of"
                f" ({type(error).__name__}: {error}); mend it, or open the array by zarr"
            ) from error
        values: list[Any] = []
        for number, (axis, level, size) in enumerate(zip(axes, levels, shape, strict=True)):
            if axis in listed:
                values.append(_decoded(level, _as_array(listed[axis], dtypes.get(axis)), said.get(axis, {})))
                continue
            if "coordinates" in made and level not in made.get("arrays", ()):
                values.append(None)  # it had none: what has its name in the group is of something else
                continue
            one = _beside(group, level, level, size)
            if one is None and (first, last) == (0, math.prod(shape)):
                one = _beside(group, level, name, length)  # of EOFs, along the side
                one = None if one is None else _along(one, level, shape, number)
            values.append(one)
        return cls(name, levels, shape, (first, last), tuple(values))

    def stacked(self, found: xr.DataArray) -> xr.DataArray:
        """A DataArray with a MultiIndex of this side; of an axis without coordinates by the number of each place."""
        import pandas as pd

        xr = _xarray()
        numbers = np.unravel_index(np.arange(*self.places), self.shape) if self.shape else ()
        levels, codes = [], []
        for one, number, size in zip(self.values, numbers, self.shape, strict=True):
            # In their own order: pandas would sort them, and unstacking would turn maps over.
            code, level = pd.Index(np.arange(size) if one is None else one.to_index()).factorize()
            levels.append(level)
            codes.append(code[number])
        index = pd.MultiIndex(levels, codes, names=self.levels)
        found = found.assign_coords(xr.Coordinates.from_pandas_multiindex(index, self.name))
        return self._described(found)

    def unstacked(self, found: xr.DataArray) -> xr.DataArray:
        """A DataArray with the axes in place of this side. Raises OptionError where it has not all of their places."""
        if self.places != (0, math.prod(self.shape)):
            first, last = self.places
            raise OptionError(
                f"unstack=True: {self.name} has the places {first} to {last - 1} of the {math.prod(self.shape)} of"
                f" {' × '.join(self.levels)}; leave unstack out, and .unstack({self.name!r}) has NaN in the others"
            )
        axis = found.dims.index(self.name)
        shape = (*found.shape[:axis], *self.shape, *found.shape[axis + 1 :])
        dims = (*found.dims[:axis], *self.levels, *found.dims[axis + 1 :])
        coordinates = {
            level: one for level, one in zip(self.levels, self.values, strict=True) if one is not None
        }
        apart = _xarray().DataArray(found.data.reshape(shape), dims=dims, name=found.name, attrs=found.attrs)
        return self._described(apart.assign_coords(found.coords).assign_coords(coordinates))

    def _described(self, found: xr.DataArray) -> xr.DataArray:
        """The same, with the attributes of the axes' coordinates."""
        for level, one in zip(self.levels, self.values, strict=True):
            if one is not None:
                found.coords[level].attrs.update(one.attrs)
        return found


def _along(one: xr.Variable, level: str, shape: tuple[int, ...], number: int) -> xr.Variable:
    """The coordinates of one axis, of those that are repeated along a whole side."""
    values = np.moveaxis(one.values.reshape(shape), number, -1)
    return _xarray().Variable(level, values[(0,) * (len(shape) - 1)], one.attrs)


def _listed(name: str, listed: Any, length: int) -> xr.Variable | None:
    """The coordinates of a dimension that an attribute lists."""
    one = listed.get(name) if isinstance(listed, Mapping) else None
    if not isinstance(one, Mapping) or len(one.get("values", ())) != length:
        return None
    return _decoded(name, _as_array(one["values"], one.get("dtype")), one.get("attributes", {}))


def _beside(group: zarr.Group | None, name: str, dimension: str, length: int) -> xr.Variable | None:
    """The coordinates of this name along a dimension, where a group has some of its length."""
    try:
        one = group[name] if group is not None and name in group else None
        if not isinstance(one, zarr.Array) or one.shape != (length,) or dimension_names(one)[0] != dimension:
            return None
        about = {key: value for key, value in one.attrs.asdict().items() if key not in OF_STORAGE}
        return _decoded(dimension, np.asarray(one[:]), about)
    except (OSError, BaseZarrError, *UNREADABLE):
        return None


def _decoded(dimension: str, values: np.ndarray, attributes: Mapping[str, Any]) -> xr.Variable:
    """Coordinates as xarray has them, times by their units. Raises StoreError."""
    xr = _xarray()
    stored = xr.Dataset(coords={dimension: (dimension, values, dict(attributes))})
    try:
        return xr.decode_cf(stored)[dimension].variable
    except (ValueError, ImportError) as error:
        raise StoreError(
            f"{ROLE}: xarray does not decode the coordinates {dimension} ({error}); install what it asks for, or open"
            " the array by zarr"
        ) from error


def _as_array(values: list[Any], dtype: str | None) -> np.ndarray:
    """A list of coordinates as they were: numbers that JSON has not are texts in it."""
    kind = np.dtype(dtype).kind if dtype is not None and dtype != "str" else ""
    parsed = {"f": float, "c": complex}.get(kind)
    return np.array(values if parsed is None else [parsed(value) for value in values], dtype)


def _group_of(array: zarr.Array[Any]) -> zarr.Group | None:
    """The group that an array lies in: of one in local files, or in a store with others."""
    try:
        if is_local(array):
            parent: Any = Path(place_of(array)).parent
            return zarr.open_group(parent, mode="r", use_consolidated=False)
        inner, _, _ = array.path.rpartition("/")
        return zarr.open_group(array.store, path=inner, mode="r") if array.path else None
    except (OSError, BaseZarrError, *UNREADABLE):
        return None


def _chunks(array: zarr.Array[Any]) -> Any:
    """Chunks of dask's, of about the size that it takes by itself, made of whole stored pieces."""
    from dask.array.core import normalize_chunks

    unit = normalize_chunks(array.shards or array.chunks, array.shape)
    return normalize_chunks("auto", array.shape, dtype=array.dtype, previous_chunks=unit)


def _stem(array: zarr.Array[Any]) -> str:
    return PurePosixPath(name_of(array)).stem
