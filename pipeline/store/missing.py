"""What stands where somebody looked for a Zarr array and there is none, and what to give in its place."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

import zarr
from zarr.buffer import default_buffer_prototype

from tilewright.kernels.arguments import shown
from tilewright.pipeline.store.chunks import METADATA_NAMES
from tilewright.pipeline.store.remote.opening import HTTP_PROTOCOLS, store_at
from tilewright.pipeline.store.waiting import answer_of
from tilewright.pipeline.transfer.files import read_file, reason_with_remedy

MOST_NAMED = 5
"""Arrays of a group that a message names, the shallowest first."""

SPARSE = ("csr_matrix", "csc_matrix")
"""The values of ``encoding-type`` by which anndata marks a group as a sparse matrix."""

NUMBERS = "biufc"
"""Kinds of dtypes that are taken."""

NPY = b"\x93NUMPY"
FILES = {
    b"\x89HDF\r\n\x1a\n": ("an HDF5 file", (".h5", ".hdf5", ".h5ad"), "h5py.File({0!r})['NAME']"),
    NPY: ("a NumPy file", (".npy",), "numpy.load({0!r})"),
}
"""Files that hold arrays and are no Zarr: how they begin, what they are, how their names end, and what reads them."""

FILES_AT_URLS = (".npy", ".npz", ".h5", ".hdf5", ".h5ad", ".nc", ".nc4", ".parquet", ".pq")
"""How the names of such files end at URLs, where nobody looks into them."""


def what_is_there(text: str, path: Path | None, ndim: int, *, or_more: bool = False) -> str | None:
    """What stands at a name, and what to give instead of it, as a message ends behind the name; None where that is
    nothing we know.

    path: the local path that the name is; None for other URLs. ndim: of the array of numbers that was wanted,
    ``or_more``.
    """
    if path is not None and (file := _file_at(path)) is not None:
        if file.suffix == ".zip" or zipfile.is_zipfile(file):
            return _of_zip(file, path)
        return _of_file(file) if file == path else None
    if path is None and (told := _of_url(text)) is not None:
        return told
    return _of_group(text, path, ndim, or_more=or_more)


def damage_of(text: str, path: Path | None, error: Exception) -> str | None:
    """Why metadata that stand at a name, of an array and not of a group, cannot be used, with the name of their file;
    None where there are none. error: what zarr-python said of them. path: as for `what_is_there`."""
    for name in METADATA_NAMES.values():
        found = _metadata(text, path, name)
        if found is None:
            continue
        try:
            content = json.loads(found)
        except RecursionError:
            return f"{name} nests its brackets too deeply"
        except ValueError as wrong:
            return f"{name} is no JSON: {wrong}" if found.strip() else f"{name} is empty"
        if not isinstance(content, dict):
            return f"{name} holds {shown(content)}, and must hold a mapping of names to values"
        if content.get("node_type") == "group":
            return None
        return f"{name} lacks {error}" if isinstance(error, KeyError) else f"{name}: {error}".rstrip(".")
    return None


def _metadata(text: str, path: Path | None, name: str) -> bytes | None:
    """What a file of metadata holds; None where it is not there or cannot be read."""
    with suppress(Exception):  # a file system of fsspec's may raise anything
        if path is not None:
            return read_file(path / name)
        found = answer_of(store_at(text, True).get(name, default_buffer_prototype()), f"{text}/{name}")
        return None if found is None else found.to_bytes()
    return None


def _file_at(path: Path) -> Path | None:
    """The file at a path, or the one that stands in its way."""
    return next((place for place in (path, *path.parents) if place.is_file()), None)


def _of_file(file: Path) -> str | None:
    begin = b""
    try:
        with open(file, "rb") as opened:
            begin = opened.read(max(map(len, FILES)))
    except PermissionError as error:
        return f"cannot be read: {reason_with_remedy(error)}"
    except OSError:
        pass  # what its name says is left
    if file.suffix == ".npy" and not begin.startswith(NPY):
        return "does not begin as a NumPy file does: it is damaged, or none; write it anew (numpy.save)"
    for magic, (what, endings, reader) in FILES.items():
        if begin.startswith(magic) or file.suffix in endings:
            read = reader.format(str(file))
            new = str(file.with_suffix(".zarr"))
            return f"is {what}, not a Zarr array; convert it: dask.array.from_array({read}).to_zarr({new!r})"
    return None


def _of_url(text: str) -> str | None:
    """Of a URL of a file that is no Zarr, which are read from local folders, or of an archive."""
    first, separator, inside = text.partition("::")
    ending = PurePath(first).suffix
    if ending == ".zip" and not separator:
        return f"is a ZIP file, in which an array is named by a URL: give zip://::{text}"
    if ending in FILES_AT_URLS and "://" not in inside:
        return (
            "names a file, and files of NumPy, HDF5, NetCDF and Parquet are read where they lie in local folders alone:"
            " copy it to one, or open it in Python, by xarray or the library that wrote it, and give the array"
        )
    return None


def _of_zip(file: Path, path: Path) -> str:
    """Of a ZIP file at, or on the way to, a path: the URLs of the arrays in it."""
    names = _arrays_in_zip(file)
    inside = path.relative_to(file).as_posix() if path != file else ""
    asked = [name for name in names if name == inside]
    urls = [f"zip://{name}::{file}" for name in asked or names]
    which = "is a ZIP file" if path == file else f"lies in a ZIP file, {file}"
    if not urls:
        return f"{which}, and there is no Zarr array in it; give the path of an array"
    return f"{which}, in which an array is named by a URL: give {_listed(urls, 'or')}"


def _arrays_in_zip(file: Path) -> list[str]:
    found = []
    with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(file) as opened:
        for entry in opened.namelist():
            name = PurePath(entry)
            with suppress(ValueError, AttributeError, KeyError):
                if name.name == ".zarray" or (
                    name.name == "zarr.json" and json.loads(opened.read(entry))["node_type"] == "array"
                ):
                    found.append(name.parent.as_posix().removeprefix("."))
    return sorted(found, key=_by_depth)


def _of_group(text: str, path: Path | None, ndim: int, *, or_more: bool) -> str | None:
    # Whatever keeps a group from being read, the error is that there is no array.
    with warnings.catch_warnings(action="ignore"), suppress(Exception):
        group = zarr.open_group(store_at(text) if path is None else path, mode="r")
        kind = group.attrs.get("encoding-type")
        if kind in SPARSE:
            return (
                f"is a sparse matrix (encoding-type {kind}), and sparse matrices are not supported; store it dense"
                " (anndata: adata.X = adata.X.toarray() before write_zarr)"
            )
        members = dict(group.members(max_depth=1))
        arrays = {name: node for name, node in members.items() if isinstance(node, zarr.Array)}
        of_numbers = {name: array for name, array in arrays.items() if array.dtype.kind in NUMBERS}
        fitting = [
            name
            for name, array in of_numbers.items()
            if array.ndim == ndim or (or_more and array.ndim > ndim)
        ]
        wanted = f"of numbers of {ndim} dimension{'s' * (ndim > 1)}{' or more' * or_more}"
        if arrays and not fitting:
            held = _listed([_described(name, arrays[name]) for name in sorted(arrays, key=_by_depth)], "and")
            return f"is a Zarr group without an array {wanted}; it has {held}"
        if names := sorted(fitting, key=_by_depth):
            below = _below(text, names) if path is None else [f"{text.rstrip('/')}/{name}" for name in names]
            return f"is a Zarr group, not an array; give one of its arrays {wanted}: {_listed(below, 'or')}"
        inner = sorted(set(members) - set(arrays), key=_by_depth)
        held = f", it holds the groups {_listed(inner, 'and')}" if inner else ""
        return f"is a Zarr group without arrays{held}; give the path of an array"
    return None


def _described(name: str, array: zarr.Array[Any]) -> str:
    return f"{name} ({array.dtype}, {' × '.join(map(str, array.shape)) or 'a single number'})"


def _below(text: str, names: Sequence[str]) -> list[str]:
    """The arrays of a group at a URL as they are given: in a chain of URLs the first has the path, and a query stands
    behind it."""
    first, separator, rest = text.partition("::")
    if not separator and text.startswith(HTTP_PROTOCOLS):
        first, separator, rest = text.partition("?")
    folder = first if first.endswith("/") else f"{first}/"
    return [f"{folder}{name}{separator}{rest}" for name in names]


def _by_depth(name: str) -> tuple[int, str]:
    return name.count("/"), name


def _listed(names: Sequence[str], joined: str) -> str:
    shown = [*names[:MOST_NAMED]]
    if more := len(names) - len(shown):
        return f"{', '.join(shown)} {joined} {more} more"
    return f" {joined} ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
