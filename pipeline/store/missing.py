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

NUMBERS = tuple("biufc")
"""Kinds of dtypes that are taken."""

NPY = b"\x93NUMPY"
FILES = {
    b"\x89HDF\r\n\x1a\n": ("an HDF5 file", (".h5", ".hdf5", ".h5ad"), "h5py.File({0!r})['NAME']"),
    NPY: ("a NumPy file", (".npy",), "numpy.load({0!r})"),
}
"""Files that hold arrays and are no Zarr: how they begin, what they are, how their names end, and what reads them."""

FILES_AT_URLS = (".npy", ".npz", ".h5", ".hdf5", ".h5ad", ".nc", ".nc4", ".parquet", ".pq")
"""How the names of such files end at URLs, where nobody looks into them."""


def arrays_inside(source: Any) -> list[str]:
    """The arrays of numbers in what holds several: a Dataset of xarray, or an open group of Zarr or h5py; as they are
    taken out of it, those of most dimensions first."""
    held: list[tuple[str, Any]] = []
    with suppress(Exception):  # a store, or a library, may raise anything
        if isinstance(source, zarr.Group):
            called, held = "group", list(source.arrays())
        elif hasattr(source, "data_vars"):
            called, held = "dataset", list(source.data_vars.items())
        elif type(source).__module__.startswith("h5py."):
            called, held = "file", list(source.items())
    found = [(name, one) for name, one in held if getattr(getattr(one, "dtype", None), "kind", "") in NUMBERS]
    found = sorted((each for each in found if each[1].ndim), key=lambda each: -each[1].ndim)
    return [f"{called}[{name!r}]" for name, _ in found[:MOST_NAMED]]


def _by_pandas(reader: str) -> str:
    """What to do with a table that pandas reads, of a file, by its method."""
    return f"keep its numbers: numpy.save({{1!r}}, pandas.{reader}.select_dtypes('number').to_numpy())"


_LINES = "keep it as Parquet, whose columns of lists are read: pandas.read_json({0!r}, lines=True).to_parquet({2!r})"
_CALLS = "make Zarr of it by bio2zarr, whose arrays are read: {}"
OTHERS = {
    ".csv": _by_pandas("read_csv({0!r})"),
    ".csv.gz": _by_pandas("read_csv({0!r})"),
    ".tsv": _by_pandas("read_csv({0!r}, sep='\\t')"),
    ".txt": "keep its numbers: numpy.save({1!r}, numpy.loadtxt({0!r}))",
    ".jsonl": _LINES,
    ".ndjson": _LINES,
    ".feather": "keep it as Parquet, whose columns of lists are read: pandas.read_feather({0!r}).to_parquet({2!r})",
    ".arrow": "keep it as Parquet, whose columns of lists are read: pandas.read_feather({0!r}).to_parquet({2!r})",
    ".bed": _CALLS.format("plink2zarr convert {4} {3}"),
    ".vcf": _CALLS.format("vcf2zarr convert {0} {3}"),
    ".vcf.gz": _CALLS.format("vcf2zarr convert {0} {3}"),
    ".bcf": _CALLS.format("vcf2zarr convert {0} {3}"),
    ".grib": "make Zarr of it: xarray.open_dataset({0!r}, engine='cfgrib').to_zarr({3!r})",
    ".grb": "make Zarr of it: xarray.open_dataset({0!r}, engine='cfgrib').to_zarr({3!r})",
    ".grib2": "make Zarr of it: xarray.open_dataset({0!r}, engine='cfgrib').to_zarr({3!r})",
    ".safetensors": "keep one of its arrays: numpy.save({1!r}, safetensors.numpy.load_file({0!r})['NAME'])",
    ".pt": "keep a tensor of it: numpy.save({1!r}, torch.load({0!r}).numpy())",
    ".mat": "keep one of its matrices: numpy.save({1!r}, scipy.io.loadmat({0!r})['NAME'])",
}
"""What to do with files of other kinds, by how their names end: the file, and the names for one of NumPy's, of Parquet
and of Zarr."""

READ = "Zarr, .npy, HDF5, NetCDF 4 and Parquet"
"""What is read, in words."""


def of_other_file(file: Path) -> str:
    """What to do with a file that is of no kind that is read, as a message ends behind its name."""
    if arrays := _arrays_of_numpy(file):
        one = arrays[0]
        return (
            f"is an archive of NumPy ({_listed(arrays, 'and')}), of which no array is read in place; keep the one that"
            f" is meant: numpy.save({f'{one}.npy'!r}, numpy.load({str(file)!r})[{one!r}])"
        )
    told = next((told for ending, told in OTHERS.items() if file.name.lower().endswith(ending)), None)
    bare = file.with_name(file.name.partition(".")[0] or file.name)
    if told is None:
        return f"is a file of no kind that is read, which are {READ}; store it as one of these, and give that"
    new = (str(bare.with_suffix(ending)) for ending in (".npy", ".parquet", ".zarr"))
    return f"is a file of another kind than {READ}, which are read; {told.format(str(file), *new, bare)}, and give that"


def _arrays_of_numpy(file: Path) -> list[str]:
    """The names of the arrays in a file of `numpy.savez`; none where it is none."""
    with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(file) as opened:
        return [name.removesuffix(".npy") for name in opened.namelist() if name.endswith(".npy")]
    return []


def what_is_around(path: Path, ndim: int, *, or_more: bool = False) -> str | None:
    """The arrays of the group in which a path would lie where nothing is, as a sentence; None where that is none."""
    around = next((place for place in path.parents if place.exists()), None)
    found = None if around is None else _of_group(str(around), around, ndim, or_more=or_more)
    return None if found is None else f"{around} {found}"


def what_is_there(text: str, path: Path | None, ndim: int, *, or_more: bool = False) -> str | None:
    """What stands at a name, and what to give instead of it, as a message ends behind the name; None where that is
    nothing we know.

    path: the local path that the name is; None for other URLs. ndim: of the array of numbers that was wanted,
    ``or_more``.
    """
    if path is not None and (file := _file_at(path)) is not None:
        if file.suffix == ".zip" or zipfile.is_zipfile(file):
            return _of_zip(file, path)
        return (_of_file(file) or of_other_file(file)) if file == path else None
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
    if not urls and path == file and (_arrays_of_numpy(file) or file.suffix in OTHERS):
        return of_other_file(file)
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
