"""What a user gives for an array, if it is no Zarr: which module opens it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import zarr
from zarr import AsyncArray
from zarr.codecs.numcodecs import PackBits

from tilewright.kernels.numbers import format_nbytes
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.store.sources import frames, hdf5, parquet, xarrays
from tilewright.pipeline.store.sources.beside import coordinates_with, with_coordinates
from tilewright.pipeline.store.sources.dasks import is_dask, open_dask
from tilewright.pipeline.store.sources.mapped import BOOL, DIMENSIONS
from tilewright.pipeline.store.sources.memory import free_nbytes, open_numpy
from tilewright.pipeline.store.sources.npy import is_npy, open_npy
from tilewright.pipeline.transfer.files import first_bytes


@runtime_checkable
class SupportsArray(Protocol):
    """Anything that NumPy makes an array of: DataArrays of xarray, arrays of dask, data sets of h5py."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __array__(self, dtype: Any = ..., /) -> np.ndarray[Any, Any]: ...


PACKBITS = "numcodecs.packbits"
"""zarr-python's name, in format 3, of `PackedBytes`."""

CLASSIC = (b"CDF\x01", b"CDF\x02", b"CDF\x05")
"""How files of NetCDF 3 begin."""

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


Cut: TypeAlias = "tuple[tuple[int, int], ...]"
"""What is wanted along each axis: first, and last and one more."""


def open_given(source: Any, role: str, *, cuts: bool = False) -> tuple[zarr.Array[Any], Cut | None]:
    """An array of another library, as an array of Zarr; and what of that it is, None for all. cuts: whether it may be
    only a part. Raises StoreError, DTypeError."""
    if isinstance(source, np.ndarray):
        return open_numpy(source, role), None
    if hdf5.is_dataset(source):
        found = hdf5.open_dataset(source, role)
        if found is None:
            _check_room(source, role)
            found = hdf5.read_dataset(source, role, described(source))
        return found, None
    if xarrays.is_data_array(source):
        place = xarrays.stored(source)
        along = xarrays.coordinates(source, None if place is None or not cuts else place.cut)
        if place is not None and (cuts or place.cut is None):
            if place.array is not None:
                array = _with_names(with_bytes_for_bool(place.array), xarrays.names(source))
                return with_coordinates(array, along), place.cut
            if place.file is not None:
                path, variable = place.file
                array = hdf5.open_variable(path, variable, f"{path}::{variable}", role)
                array = _with_names(array, xarrays.names(source))
                return with_coordinates(array, along), place.cut
        variable = xarrays.variable_of(source)
        if place is None and type(variable._data).__module__.startswith("dask.array"):
            held = variable._data
            named = xarrays.name_of(source)
            return open_dask(held, role, named, variable.dims, variable.attrs, along), None
        _check_room(source, role)
        held = open_numpy(
            xarrays.values(source), role, xarrays.name_of(source), variable.dims, variable.attrs, along
        )
        return held, None
    if is_dask(source):
        return open_dask(source, role, described(source)), None
    if frames.is_frame(source) and not frames.holds_rows(source):
        _check_room(source, role)
        called = described(source)
        dimensions, along = frames.labels(source)
        return open_numpy(frames.values(source, role, called), role, called, dimensions, None, along), None
    return _by_values(source, role), None


def _by_values(source: Any, role: str) -> zarr.Array[Any]:
    _check_room(source, role)
    return open_numpy(_values(source, role), role, described(source))


def _check_room(source: Any, role: str) -> None:
    """Raise StoreError, before anything is read, for more numbers than this host's memory holds twice: as they are,
    and for the workers."""
    nbytes, free = getattr(source, "nbytes", None), free_nbytes()
    if isinstance(nbytes, int) and free is not None and 2 * nbytes > free:
        raise StoreError(
            f"{role}: {described(source)} has {format_nbytes(nbytes)} and would be read into memory, of which"
            f" {format_nbytes(free)} are free; store it (to_zarr), and give the path"
        )


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
    if not os.path.isfile(path):  # as most often: an array of Zarr is a folder
        return parquet.open_column(path, None, name, role) if _holds_parquet(path) else None
    if is_npy(path):
        return open_npy(path, name, role)
    if hdf5.is_hdf5(path):
        return hdf5.open_variable(path, None, name, role)
    check_not_classic(path, role)
    if path.suffix in parquet.ENDINGS and parquet.is_parquet(path):
        return parquet.open_column(path, None, name, role)
    return None


def _holds_parquet(path: Path) -> bool:
    """Whether a path is a folder of files of Parquet."""
    try:
        return path.is_dir() and bool(parquet.files_in(path))
    except OSError:  # whoever opens it as an array of Zarr is told
        return False


def check_not_classic(path: Path, role: str) -> None:
    """Raise StoreError for a regular file of NetCDF 3."""
    if first_bytes(path, 4) not in CLASSIC:
        return
    raise StoreError(
        f"{role}: {path} is a file of NetCDF 3, which is not read here: store it as NetCDF 4 (nccopy -k nc4 {path}"
        f" new.nc; or xarray.open_dataset({str(path)!r}).to_netcdf('new.nc', engine='h5netcdf'), or .to_zarr), or open"
        " it with xarray, and give one of its DataArrays"
    )


def open_in_file(name: str, role: str) -> zarr.Array[Any] | None:
    """The array that ``file.h5::/group/name`` or ``file.parquet::column`` names; None for what is no such name. Raises
    as `open_given`.

    So it is spelled where files of HDF5 are looked at (silx and its kind), and fsspec chains a file and what is in it
    by the same sign."""
    file, sign, variable = name.rpartition("::")
    if not (sign and variable and file) or "://" in name or os.path.lexists(name):
        return None
    path = Path(file)
    if _holds_parquet(path) or parquet.is_parquet(path):
        return parquet.open_column(path, variable, name, role)
    if hdf5.is_hdf5(path):
        return hdf5.open_variable(path, variable, name, role)
    check_not_classic(path, role)
    return None


def with_bytes_for_bool(array: zarr.Array[Any]) -> zarr.Array[Any]:
    """An array of bool as one of bytes, 0 and 1, which is how it is stored, and of which an attribute says so
    (`BOOL`); any other as it is."""
    if array.dtype.kind != "b":
        return array
    facts = array.metadata.to_dict()
    if array.metadata.zarr_format == 2:
        facts |= {"dtype": "|u1", "fill_value": None if array.fill_value is None else int(array.fill_value)}
    else:
        facts |= {"data_type": "uint8", "fill_value": int(array.fill_value)}
    facts["attributes"] = {**array.attrs.asdict(), **BOOL}
    return _with_metadata(array, facts)


class PackedBytes(PackBits):
    """numcodecs' filter of bits, of an array of bool that is opened as one of bytes: zarr-python's takes bool alone."""

    def validate(self, **_: Any) -> None:
        pass


def _with_metadata(array: zarr.Array[Any], facts: dict[str, Any]) -> zarr.Array[Any]:
    """The same stored array with other metadata, and what it has brought along."""
    inner, metadata = array.async_array, array.metadata
    if metadata.zarr_format == 3 and facts["data_type"] == "uint8":
        packed = [codec["name"] == PACKBITS for codec in facts["codecs"]]
        facts["codecs"] = [
            PackedBytes() if found else codec for found, codec in zip(packed, facts["codecs"], strict=True)
        ]
    other: Any = type(metadata).from_dict(facts)
    own = zarr.Array(AsyncArray(metadata=other, store_path=inner.store_path, config=inner.config))
    return with_coordinates(own, coordinates_with(array))


def _with_names(array: zarr.Array[Any], names: Sequence[str | None]) -> zarr.Array[Any]:
    """The same stored array, with the names that its dimensions have where it was given: None as they are stored."""
    facts: dict[str, Any] = array.metadata.to_dict()
    attributes = array.attrs.asdict()
    of_two = array.metadata.zarr_format == 2
    stored: Any = attributes.get(DIMENSIONS) if of_two else facts.get("dimension_names")
    if not isinstance(stored, list | tuple) or len(stored) != array.ndim:
        stored = (None,) * array.ndim
    given = [kept if name is None else name for name, kept in zip(names, stored, strict=True)]
    if given == list(stored):
        return array
    if of_two:
        facts["attributes"] = {**attributes, DIMENSIONS: given}
    else:
        facts["dimension_names"] = given
    return _with_metadata(array, facts)


def holds_bool(array: zarr.Array[Any]) -> bool:
    """Whether the bytes of an open array are bool: as `with_bytes_for_bool` has them, or xarray in NetCDF."""
    return array.dtype.str[1:] in ("i1", "u1") and array.attrs.asdict().items() >= BOOL.items()
