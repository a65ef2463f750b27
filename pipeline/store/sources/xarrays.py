"""DataArrays of xarray: those that are opened lazily and stored as they are by their store, others by their values.

xarray wraps what it has opened in objects that say what is done to it when it is read (`xarray.core.indexing`). Only
where that is nothing, but for a range of each dimension, the stored array is taken in its place; numbers that are
decoded (scaled, masked, times) are taken as xarray decodes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr

from tilewright.pipeline.store.sources.beside import Coordinates

WRAPPERS = ("MemoryCachedArray", "CopyOnWriteArray", "ImplicitToExplicitIndexingAdapter")
"""Those that change nothing."""

IN_FILES = ("H5NetCDFArrayWrapper", "NetCDF4ArrayWrapper")

MADE_UP = "phony_dim_"
"""How names of dimensions begin that xarray gives to those of HDF5 without a name."""


class Stored(NamedTuple):
    """Where a DataArray is stored."""

    array: zarr.Array[Any] | None
    file: tuple[Path, str] | None
    """A file of HDF5 and the variable there, where it is in no Zarr."""
    cut: tuple[tuple[int, int], ...] | None
    """What of it is wanted, along each axis: first, and last and one more; None: all."""


def is_data_array(source: Any) -> bool:
    """Whether a source is xarray's DataArray or Variable: told by name, so that xarray need not be imported."""
    kind = type(source)
    return kind.__module__.startswith("xarray.core.") and kind.__name__ in (
        "DataArray",
        "Variable",
        "IndexVariable",
    )


def variable_of(source: Any) -> Any:
    return getattr(source, "variable", source)


def stored(source: Any) -> Stored | None:
    """Where a DataArray's numbers are stored as they are; None where they are not, or it cannot be told."""
    variable = variable_of(source)
    data = variable._data
    if type(data).__module__.startswith("dask.array"):
        data = _opened_by_dask(data)
    while type(data).__name__ in WRAPPERS:
        data = data.array
    if type(data).__name__ != "LazilyIndexedArray":
        return None
    cut = _cut(data.key.tuple, data.array.shape)
    if cut is None or len(cut) != variable.ndim:
        return None
    whole = cut == tuple((0, side) for side in data.array.shape)
    backend = data.array
    kind = type(backend).__name__
    if kind == "ZarrArrayWrapper" and isinstance(backend._array, zarr.Array):
        return Stored(backend._array, None, None if whole else cut)
    path = variable.encoding.get("source")
    if kind in IN_FILES and isinstance(path, str) and Path(path).is_file():
        group = getattr(backend.datastore, "_group", None) or "/"
        variable_name = f"{group.rstrip('/')}/{backend.variable_name}"
        return Stored(None, (Path(path), variable_name), None if whole else cut)
    return None


def _opened_by_dask(array: Any) -> Any:
    """What an array of dask reads, where it is all of one array that xarray has opened, and nothing is done to it."""
    original = f"original-{array.name}"
    layers = array.dask.layers
    if set(layers) != {original, array.name}:
        return None
    return layers[original].get(original)


def _cut(key: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
    found = []
    for part, side in zip(key, shape, strict=True):
        if not isinstance(part, slice):
            return None
        start, stop, step = part.indices(side)
        if step != 1:
            return None
        found.append((start, max(start, stop)))
    return tuple(found)


def coordinates(source: Any, cut: tuple[tuple[int, int], ...] | None = None) -> dict[str, Coordinates] | None:
    """The coordinates of a DataArray's dimensions, as many as these are long; None of a Variable, which has none.

    cut: what it is of the array that is read in its place, as `Stored` has it."""
    held = getattr(source, "coords", None)
    if held is None:
        return None
    firsts = [0] * source.ndim if cut is None else [first for first, _ in cut]
    return {
        str(name): Coordinates(np.asarray(held[name].values), dict(held[name].attrs), first)
        for name, first in zip(source.dims, firsts, strict=True)
        if name in held and held[name].dims == (name,)
    }


def names(source: Any) -> list[str | None]:
    """The names of a DataArray's dimensions; None for those that xarray made up for a file without names."""
    return [None if str(name).startswith(MADE_UP) else str(name) for name in source.dims]


def values(source: Any) -> np.ndarray:
    """All numbers of a DataArray, in memory."""
    return np.asarray(variable_of(source).values)


def name_of(source: Any) -> str:
    name = getattr(source, "name", None)
    return f"DataArray {name!r}" if name is not None else f"DataArray of shape {tuple(source.shape)}"
