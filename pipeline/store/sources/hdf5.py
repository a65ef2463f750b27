"""Arrays in files of HDF5, which those of NetCDF 4 are too: where their chunks lie, and by what filters.

h5py reads the map of chunks; their bytes are read and decoded as those of Zarr's chunks are, in parallel and without
the library's lock. HDF5's own filters deflate, shuffle and Fletcher's checksum are numcodecs' zlib, shuffle and
fletcher32, and the registered ones for Zstandard and Blosc have the frames of those (HDF5 File Format Specification
3.0, IV.A.2.l; The HDF Group's list of registered filters).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zarr

from tilewright.pipeline.errors import StoreError, TilewrightError
from tilewright.pipeline.store.sources.beside import Coordinates, with_coordinates
from tilewright.pipeline.store.sources.mapped import (
    ABSENT,
    NETCDF_FILL,
    NETCDF_FILLS,
    Mapped,
    mapped_array,
    named,
    stored_dtype,
    unit_of,
)
from tilewright.pipeline.store.sources.memory import open_numpy
from tilewright.pipeline.transfer.files import reason_with_remedy

MAGIC = b"\x89HDF\r\n\x1a\n"
MOST_USER_NBYTES = 2**20
"""Of what a file of HDF5 may begin with, of a length that is a power of two and 512 bytes at least."""

OWN_ATTRIBUTES = ("CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST", "_Netcdf4Dimid", "_Netcdf4Coordinates")
"""Those by which the libraries keep dimensions."""

SPARSE = ("csr_matrix", "csc_matrix")
"""The values of ``encoding-type`` by which anndata marks a group as a sparse matrix."""

MOST_NAMED = 8

FILTERS = {
    1: "deflate", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 307: "bzip2", 32000: "lzf",
    32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32013: "zfp", 32015: "zstd", 32026: "blosc2",
}  # fmt: skip
"""Names of filters, those that are not read too, for messages."""

READ = ("deflate", "shuffle", "fletcher32", "zstd", "blosc")


def is_hdf5(path: Path) -> bool:
    """Whether a regular file is one of HDF5."""
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            begin = 0
            while begin <= MOST_USER_NBYTES:
                file.seek(begin)
                found = file.read(len(MAGIC))
                if found == MAGIC:
                    return True
                if len(found) < len(MAGIC):
                    return False
                begin = 2 * begin or 512
    except OSError:
        return False
    return False


def is_dataset(source: Any) -> bool:
    """Whether a source is h5py's, told by name, so that h5py need not be imported."""
    kind = type(source)
    return kind.__module__.startswith("h5py.") and kind.__name__ == "Dataset"


def open_variable(path: Path, variable: str | None, name: str, role: str) -> zarr.Array[Any]:
    """An array in a file as an array of Zarr: of h5py's values in memory, where its bytes do not lie in this file as
    they are.

    Raises StoreError where h5py is missing, the file has no array of that name, ``variable`` is None and it has not
    exactly one, or one has filters that are not read; DTypeError for one that holds no numbers.
    """
    try:
        import h5py
    except ImportError as error:
        raise StoreError(
            f"{role}: {name} is an HDF5 file, which h5py reads: install that (pip install tilewright[hdf5]), on every"
            " worker too"
        ) from error
    try:
        with h5py.File(path, "r") as file:
            found = _found(file, variable, name, role)
            called = name if variable else f"{name}::{found.name}"
            opened = open_dataset(found, role, called, path.absolute())
            return read_dataset(found, role, called) if opened is None else opened
    except TilewrightError:  # some are of OSError too
        raise
    except PermissionError as error:
        raise StoreError(f"{role}: cannot open {name}: {reason_with_remedy(error)}") from error
    except OSError as error:
        cure = "see whether it is whole (h5ls, ncdump -h), and mend, or get, it anew"
        if "truncated file" in str(error):
            cure = (
                f"it has {path.stat().st_size} bytes, and says that it had more: it was cut short, as by a transfer"
                " that did not end; get it anew"
            )
        raise StoreError(f"{role}: cannot open {name}: {error}; {cure}") from error


def _found(file: Any, variable: str | None, name: str, role: str) -> Any:
    import h5py

    if variable is not None:
        found = file.get(variable)
        bare = isinstance(found, h5py.Dataset) and _is_bare_dimension(found)
        if isinstance(found, h5py.Dataset) and not bare:
            return found
        if isinstance(found, h5py.Group) and found.attrs.get("encoding-type") in SPARSE:
            raise StoreError(
                f"{role}: {name} is a sparse matrix of anndata, and sparse matrices are not supported: make it dense"
                " where it fits (adata.X.toarray()), and give that, or store it so"
            )
        what = "is a group there" if isinstance(found, h5py.Group) else "is not in that file"
        if bare:
            what = "is a dimension without coordinates there"
        raise StoreError(f"{role}: {name}: {variable} {what}; it has {_listed(file)}")
    arrays = list(_matrices(file))
    if len(arrays) == 1:
        return file[arrays[0]]
    raise StoreError(f"{role}: {name} is an HDF5 file with {_listed(file)}; give one, as {name}::/NAME")


def _is_bare_dimension(dataset: Any) -> bool:
    """Whether a data set of NetCDF holds no numbers, and only stands for a dimension."""
    name = dataset.attrs.get("NAME", b"")
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return text.startswith("This is a netCDF dimension but not a netCDF variable")


def _matrices(file: Any) -> Iterator[str]:
    """The arrays of a file, but for scales of dimensions."""
    import h5py

    names: list[str] = []

    def see(name: str, found: Any) -> None:
        if isinstance(found, h5py.Dataset) and found.ndim > 0 and not h5py.h5ds.is_scale(found.id):
            names.append(f"/{name}")

    file.visititems(see)
    yield from names


def _listed(file: Any) -> str:
    found = list(_matrices(file))
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return ("the arrays " + ", ".join(found[:MOST_NAMED]) + more) if found else "no arrays"


def open_dataset(
    dataset: Any, role: str, name: str | None = None, path: Path | None = None
) -> zarr.Array[Any] | None:
    """h5py's data set as an array of Zarr; None where its bytes lie in no local file as they are, so that only h5py
    gives its values. Raises as `open_variable`."""
    if not dataset:
        raise StoreError(
            f"{role}: found a data set of a file that is closed; open it, or give file.h5::/name"
        )
    file = dataset.file
    place = path or Path(os.path.abspath(file.filename))
    variable = str(dataset.name)
    name = name or f"{file.filename}::{variable}"
    stored_dtype(dataset.dtype, role, name)
    if file.mode != "r":
        file.flush()
    if dataset.is_virtual or dataset.external or not place.is_file() or dataset.size in (0, None):
        return None
    mapped = _mapped(dataset, str(place), variable, name, role)
    return None if mapped is None else with_coordinates(mapped_array(mapped), _coordinates(dataset))


def read_dataset(dataset: Any, role: str, name: str) -> zarr.Array[Any]:
    """h5py's values of a data set in memory, as an array of Zarr. Raises as `memory.open_numpy`."""
    return open_numpy(
        dataset[...],
        role,
        name,
        _dimensions(dataset),
        _attributes(dataset) | _default_fill(dataset),
        _coordinates(dataset),
    )


def _mapped(dataset: Any, path: str, variable: str, name: str, role: str) -> Mapped | None:
    dtype = stored_dtype(dataset.dtype, role, name)
    attributes = named(_dimensions(dataset), _attributes(dataset) | _default_fill(dataset), dataset.dtype)
    fill = dataset.fillvalue
    if dataset.chunks is None:
        offset = dataset.id.get_offset()
        if offset is None:  # nothing was written yet, or all of it lies in the header
            return None
        base = _base(dataset, path, offset, _beginning(dataset))
        if base is None:
            return None
        return Mapped(path, name, dataset.shape, dtype, unit_of(dataset.shape), offset + base,
                      variable=variable, attributes=attributes)  # fmt: skip
    filters = _filters(dataset, name, role)
    table = _table(dataset, name, role)
    base = 0
    if (table[..., 0] != ABSENT).any():
        first = tuple(int(one) for one in np.argwhere(table[..., 0] != ABSENT)[0])
        corner = tuple(place * side for place, side in zip(first, dataset.chunks, strict=True))
        head = bytes(dataset.id.read_direct_chunk(corner)[1][:64])
        found = _base(dataset, path, int(table[first][0]), head)
        if found is None:
            return None
        base = found
        table[..., 0] += np.where(table[..., 0] != ABSENT, base, 0)
    return Mapped(path, name, dataset.shape, dtype, dataset.chunks, table=table, filters=filters,
                  fill=0 if fill is None else fill, variable=variable, attributes=attributes,
                  table_digest=xxhash.xxh3_64_hexdigest(table.tobytes()), table_again=table_again)  # fmt: skip


def _beginning(dataset: Any) -> bytes:
    """The first bytes of an array that lies in one stretch."""
    few = dataset[(*(0,) * (dataset.ndim - 1), slice(0, 64))]
    return np.ascontiguousarray(few, dataset.dtype).tobytes()[:64]


def _base(dataset: Any, path: str, offset: int, head: bytes) -> int | None:
    """What has to be added to offsets that the library gives: some count from the end of what the file begins with.
    None where neither is right."""
    with open(path, "rb") as file:
        for base in dict.fromkeys((0, dataset.file.userblock_size)):
            file.seek(offset + base)
            if file.read(len(head)) == head:
                return int(base)
    return None


def _filters(dataset: Any, name: str, role: str) -> tuple[Mapping[str, Any], ...]:
    """numcodecs' settings of a data set's filters. Raises StoreError for those that are not read."""
    plist = dataset.id.get_create_plist()
    found: list[Mapping[str, Any]] = []
    for number in range(plist.get_nfilters()):
        code, _, values, label = plist.get_filter(number)
        kind = FILTERS.get(code, "")
        if kind not in READ:
            called = kind or (label.decode(errors="replace") if isinstance(label, bytes) else str(label))
            raise StoreError(
                f"{role}: {name} is stored by HDF5's filter {code} ({called}), which is not read here; those that are:"
                f" {', '.join(READ)}: store it again (h5repack -f GZIP=1), or give its values (dataset[...])"
            )
        found.append(
            {
                "deflate": {"id": "zlib", "level": values[0] if values else 1},
                "shuffle": {"id": "shuffle", "elementsize": values[0] if values else dataset.dtype.itemsize},
                "fletcher32": {"id": "fletcher32"},
                "zstd": {"id": "zstd", "level": values[0] if values else 3},
                "blosc": {"id": "blosc"},
            }[kind]
        )
    return tuple(found)


def _table(dataset: Any, name: str, role: str) -> np.ndarray:
    """Offset and length of every chunk, as the library gives them."""
    counts = tuple(-(-side // unit) for side, unit in zip(dataset.shape, dataset.chunks, strict=True))
    table = np.full((*counts, 2), ABSENT, np.int64)
    skipping: list[tuple[int, ...]] = []

    def see(info: Any) -> None:
        place = tuple(corner // side for corner, side in zip(info.chunk_offset, dataset.chunks, strict=True))
        if info.filter_mask:
            skipping.append(place)
        if all(one < count for one, count in zip(place, counts, strict=True)):  # others were cut off
            table[place] = info.byte_offset, info.size

    if hasattr(dataset.id, "chunk_iter"):
        dataset.id.chunk_iter(see)
    else:  # older libraries, which look for each chunk from the first on
        for number in range(dataset.id.get_num_chunks()):
            see(dataset.id.get_chunk_info(number))
    if skipping:
        raise StoreError(
            f"{role}: chunk {skipping[0]} of {name} was stored without some of the data set's filters, which is not"
            " read here; store it again (h5repack)"
        )
    return table


@lru_cache(maxsize=8)
def table_again(path: str, variable: str, digest: str) -> np.ndarray:
    """The map of chunks that another process has read, read here once more. Raises StoreError where it is another by
    now."""
    found = open_variable(Path(path), variable, f"{path}::{variable}", "input")
    table = getattr(getattr(found, "store", None), "mapped", None)
    if table is None or table.table_digest != digest:
        raise StoreError(
            f"{path}::{variable} changed while it was read; let nobody write to it until that is done"
        )
    return np.asarray(table.table)


def _dimensions(dataset: Any) -> list[str | None]:
    """The names of the scales of its dimensions, as NetCDF has them."""
    names: list[str | None] = []
    for dimension in dataset.dims:
        scale = dimension[0].name if len(dimension) else None
        names.append(scale.rsplit("/", 1)[-1] if scale else dimension.label or None)
    return names


def _coordinates(dataset: Any) -> dict[str, Coordinates]:
    """The scales of its dimensions, by the names that `_dimensions` gives them, wherever in the file they lie; of a
    dimension with a label alone what has that name in the same group."""
    found = {}
    for dimension, side in zip(dataset.dims, dataset.shape or (), strict=False):
        scale = dimension[0] if len(dimension) else dataset.parent.get(dimension.label or "")
        if getattr(scale, "shape", None) != (side,) or not scale.name or _is_bare_dimension(scale):
            continue
        values = scale.asstr()[...] if _is_text(scale) else scale[...]
        found[scale.name.rsplit("/", 1)[-1]] = Coordinates(values, _attributes(scale))
    return found


def _is_text(dataset: Any) -> bool:
    import h5py

    return h5py.check_string_dtype(dataset.dtype) is not None


USER_DEFINED = 2
"""What HDF5 says of a fill value that somebody has given (``H5D_FILL_VALUE_USER_DEFINED``)."""
DEFAULT = 1
"""What it says of one that it has by itself (``H5D_FILL_VALUE_DEFAULT``)."""
NETCDF_FILE, NETCDF_VARIABLE = "_NCProperties", ("_Netcdf4Dimid", "_Netcdf4Coordinates")
"""Attributes that netCDF's libraries write into a file, and beside a variable."""


def _default_fill(dataset: Any) -> dict[str, Any]:
    """The attribute that says that netCDF's default fill value stands for a missing number; none where a variable has
    another fill value, or is not netCDF's."""
    default = NETCDF_FILLS.get(dataset.dtype.newbyteorder("=").str[1:])
    if default is None or "_FillValue" in dataset.attrs:
        return {}
    defined = dataset.id.get_create_plist().fill_value_defined()
    if defined == USER_DEFINED:
        same = dataset.fillvalue is not None and dataset.dtype.type(default) == dataset.fillvalue
        return {NETCDF_FILL: default} if same else {}
    # What other libraries write tells HDF5 of none, and readers take the default for a missing number all the same, but
    # for bytes, of which each may be data.
    netcdf = NETCDF_FILE in dataset.file.attrs or any(name in dataset.attrs for name in NETCDF_VARIABLE)
    known = defined == DEFAULT and netcdf and dataset.dtype.itemsize > 1
    return {NETCDF_FILL: default} if known else {}


def _attributes(dataset: Any) -> dict[str, Any]:
    found = {}
    for name in dataset.attrs:
        if name in OWN_ATTRIBUTES:
            continue
        try:
            value = dataset.attrs[name]
        except (OSError, TypeError):  # of a type that NumPy has not
            continue
        if isinstance(value, np.ndarray) and value.size == 1:
            value = value.reshape(-1)[0]
        found[name] = value
    return found
