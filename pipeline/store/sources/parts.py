"""Matrices as inputs, and parts of arrays. Rows and columns of a matrix are read where they lie (`region.Section`);
parts of arrays of other dimensions are taken by dask, on the cluster that does the rest, into memory, as any array of
dask is computed."""

from __future__ import annotations

import builtins
import os
from typing import Any, Literal, TypeAlias

import numpy as np
import zarr

from tilewright.pipeline.errors import ShapeError
from tilewright.pipeline.store.arrays import Given, checked, name_of, open_array
from tilewright.pipeline.store.attributes import MASKS, dimension_names, zarr_fill
from tilewright.pipeline.store.coordinates import along_axis
from tilewright.pipeline.store.region import Flattened, Masked, Section, StoredArray
from tilewright.pipeline.store.sources.beside import Coordinates
from tilewright.pipeline.store.sources.dasks import lazy_of, open_dask
from tilewright.pipeline.store.sources.opening import is_given_array, open_given
from tilewright.pipeline.store.sources.slices import Slice, by_axes, sliced_name

SERIES = "series"
"""What the dimension of a vector is called across which it has one element, as a matrix."""
IS_SERIES = "_tilewright_series"
"""The attribute that such an open matrix has."""

Line: TypeAlias = Literal["columns", "rows"]
"""What of a matrix a vector becomes."""


def open_matrix(
    source: Given, role: str, *, or_more: bool = False, series: Line | None = None
) -> StoredArray:
    """As `open_array`, of a matrix, or some rows and columns of one: what is seen as a matrix already stays as it is.

    series: whether a vector is taken, too, as a matrix of one of these: ``columns`` or ``rows``.

    Raises also OptionError for rows or columns that it does not have.
    """
    if isinstance(source, Flattened | Masked | Section):
        return source
    asked = source if isinstance(source, Slice) else sliced_name(source)
    given = source if asked is None else asked.source
    least = 2 if series is None else 1
    if asked is not None and asked.by_axis:
        whole = open_array(given, ndim=least, role=role, or_more=True)
        if whole.ndim != 2:
            part = checked(part_of(whole, asked, role), role, least, or_more=or_more)
            return _as_line(part, series, role) if part.ndim == 1 and series is not None else part
    more = or_more or asked is not None
    cut = None
    if not isinstance(given, str | os.PathLike | zarr.Array) and is_given_array(given):
        array, cut = open_given(given, role, cuts=True)
        if cut is not None and array.ndim != 2:
            array, cut = open_given(given, role)
        checked(array, role, least, or_more=more)
    else:
        array = open_array(given, ndim=least, role=role, or_more=more)
    if asked is None and cut is None:
        return _as_line(array, series, role) if array.ndim == 1 and series is not None else array
    if array.ndim != 2:
        raise ShapeError(
            f"{role}: {name_of(array)} has shape {array.shape}; rows and columns are taken of two dimensions only:"
            f" {by_axes(array.ndim)}"
        )
    rows, columns = cut or tuple((0, side) for side in array.shape)
    if asked is not None:
        shape = rows[1] - rows[0], columns[1] - columns[0]
        (top, bottom), (left, right) = asked.within(shape, name_of(array), role)
        rows, columns = (rows[0] + top, rows[0] + bottom), (columns[0] + left, columns[0] + right)
    if (rows, columns) == tuple((0, side) for side in array.shape):
        return array
    return Section(array, rows, columns)


def _as_line(array: zarr.Array[Any], series: Line, role: str) -> zarr.Array[Any]:
    """A vector as the only column, or row, of a matrix."""
    axis = 1 if series == "columns" else 0
    (name,), along = dimension_names(array), along_axis(array, 0)
    names = [name, SERIES] if axis == 1 else [SERIES, name]
    lazy = lazy_of(array)
    return open_dask(
        lazy[:, np.newaxis] if axis == 1 else lazy[np.newaxis],
        role,
        name_of(array),
        None if name is None else names,
        {**_attributes(array), IS_SERIES: True},
        {} if along is None else {str(name): along},
        anew=True,
    )


def is_series(array: zarr.Array[Any]) -> bool:
    """Whether an open matrix was given as a vector."""
    return IS_SERIES in array.attrs


def open_part(asked: Slice, role: str) -> zarr.Array[Any]:
    """The part of an array of any number of dimensions that a slice names, one or more of them, as an array of dask's.

    Raises as `open_array`, and OptionError for what the array does not have.
    """
    return part_of(open_array(asked.source, ndim=1, role=role, or_more=True), asked, role)


def part_of(array: zarr.Array[Any], asked: Slice, role: str) -> zarr.Array[Any]:
    """The part of an open array that a slice names, with its names, coordinates and attributes, such as those by which
    its numbers are unpacked. Axes of which one place is taken are none of the part's.

    Raises OptionError for what the array does not have, and as `open_dask`.
    """
    names = dimension_names(array)
    key = asked.key(array.shape, names, name_of(array), role)
    left = [axis for axis, part in enumerate(key) if isinstance(part, builtins.slice)]
    coordinates = {
        str(names[axis]): Coordinates(found.values[key[axis]], found.attributes)
        for axis in left
        if (found := along_axis(array, axis)) is not None
    }
    return open_dask(
        lazy_of(array)[key],
        role,
        f"{name_of(array)}[{asked.name}]",
        [names[axis] for axis in left],
        _attributes(array),
        coordinates,
        anew=True,
    )


def _attributes(array: zarr.Array[Any]) -> dict[str, Any]:
    """Those of an array, with the fill value of format 2, where xarray keeps what is missing."""
    found = dict(array.attrs.asdict())
    if (fill := zarr_fill(array, found)) is not None:
        free = next((name for name in MASKS if found.get(name) is None), None)
        found |= {} if free is None else {free: fill}
    return found
