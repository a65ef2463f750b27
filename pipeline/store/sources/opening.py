"""What a user gives for an array, if it is no Zarr: which module opens it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import zarr
from zarr.core.array import AsyncArray

from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.store.sources.memory import open_numpy
from tilewright.pipeline.store.sources.npy import is_npy, open_npy


@runtime_checkable
class SupportsArray(Protocol):
    """Anything that NumPy makes an array of: DataArrays of xarray, arrays of dask, data sets of h5py."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __array__(self, dtype: Any = ..., /) -> np.ndarray[Any, Any]: ...


InMemory: TypeAlias = "np.ndarray[Any, Any] | SupportsArray"


def is_given_array(source: Any) -> bool:
    """Whether a source is an array of another library than Zarr."""
    return (
        not isinstance(source, str | bytes | os.PathLike | zarr.Array | np.generic)
        and hasattr(type(source), "__array__")
        and hasattr(source, "shape")
    )


def described(source: Any) -> str:
    """What to call an array of another library in messages."""
    kind = type(source)
    return f"{kind.__module__.partition('.')[0]} {kind.__name__} of shape {tuple(source.shape)}"


def open_given(source: Any, role: str) -> zarr.Array[Any]:
    """An array of another library, as an array of Zarr. Raises StoreError, DTypeError, ShapeError."""
    if isinstance(source, np.ndarray):
        return open_numpy(source, role)
    return open_numpy(_values(source, role), role, described(source))


def _values(source: Any, role: str) -> np.ndarray:
    try:
        return np.asarray(source)
    except Exception as error:  # whatever the library raises that computes or reads it
        raise StoreError(
            f"{role}: {described(source)} gives no numbers ({type(error).__name__}: {error}); make it an array of NumPy"
        ) from error


def open_file(path: Path, name: str, role: str) -> zarr.Array[Any] | None:
    """The array in a file that is no Zarr; None where the path is none of a kind that we know. Raises as
    `open_given`."""
    if is_npy(path):
        return open_npy(path, name, role)
    return None


def with_bytes_for_bool(array: zarr.Array[Any]) -> zarr.Array[Any]:
    """An array of bool as one of bytes, 0 and 1, which is how it is stored; any other as it is."""
    if array.dtype.kind != "b":
        return array
    inner, metadata = array.async_array, array.metadata
    facts = metadata.to_dict()
    if metadata.zarr_format == 2:
        facts |= {"dtype": "|u1", "fill_value": None if array.fill_value is None else int(array.fill_value)}
    else:
        facts |= {"data_type": "uint8", "fill_value": int(array.fill_value)}
    renamed: Any = type(metadata).from_dict(facts)
    return zarr.Array(AsyncArray(metadata=renamed, store_path=inner.store_path, config=inner.config))


def is_loaded(module: str) -> bool:
    """Whether the caller has imported a library: without it nothing can be one of its arrays."""
    return module in sys.modules
