"""Zarr arrays: their names and locations, opening and checking them, and the units in which they are read and written.

Regions of them are read in `region_read.py` and written in `region_write.py`; new ones are created in `output.py`.
"""

from __future__ import annotations

import copy
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, TypeAlias

import zarr
from zarr.buffer import default_buffer_prototype
from zarr.errors import BaseZarrError
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore, StorePath, ZipStore

from tilewright.kernels.arguments import shown
from tilewright.pipeline import config
from tilewright.pipeline.errors import DTypeError, ShapeError, StoreError, TilewrightError
from tilewright.pipeline.plan.inputs import StoredMatrix
from tilewright.pipeline.store.byte_ranges import block_of
from tilewright.pipeline.store.chunks import METADATA_NAMES, encoding_of, layout_of, matrix_order
from tilewright.pipeline.store.missing import (
    arrays_inside,
    damage_of,
    of_other_file,
    what_is_around,
    what_is_there,
)
from tilewright.pipeline.store.region import Flattened, Masked, Section, StoredArray, base_of, unmasked
from tilewright.pipeline.store.remote.opening import is_s3, look_at_bucket, store_at
from tilewright.pipeline.store.remote.patience import AtUrl, unwrapped
from tilewright.pipeline.store.remote.trouble import Kind, told_of, trouble_of
from tilewright.pipeline.store.sources.beside import coordinates_with, with_coordinates
from tilewright.pipeline.store.sources.mapped import MappedStore
from tilewright.pipeline.store.sources.opening import (
    InMemory,
    described,
    is_given_array,
    open_file,
    open_given,
    open_in_file,
    with_bytes_for_bool,
)
from tilewright.pipeline.store.sources.slices import Slice, by_axes
from tilewright.pipeline.store.waiting import answer_of
from tilewright.pipeline.transfer.files import NotAFileError, check_is_file, with_remedy

Source: TypeAlias = "str | os.PathLike[str] | zarr.Array[Any]"
"""How a user may give an array of Zarr: a path, a URL, or an open array."""

Input: TypeAlias = "Source | InMemory | Slice"
"""How a user may give an array that is only read."""

Found: TypeAlias = "Source | Flattened | Masked | Section"
"""An array of Zarr by its name, or as it is open, or seen."""

Given: TypeAlias = "Input | Flattened | Masked | Section"
"""The same, or what a part of the pipeline makes of it."""

UNREADABLE = (
    BaseZarrError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    NotImplementedError,
    RecursionError,
)
"""What zarr-python raises for something that is not an array. It does not validate the metadata's form: a list in place
of a mapping ends in an AttributeError, a thousand brackets in a RecursionError. No other RuntimeError: that there can
be no new thread says nothing of the array."""

METADATA_FILES = (*METADATA_NAMES.values(), ".zattrs", ".zgroup")
"""The files of a local array or group that are read to open it."""

MOST_NBYTES = 2**63 - 1
"""The most bytes that an array, or a chunk of one, can have: offsets and sizes are of 64 bits."""

LOCAL_URLS = ("file://", "local://")
"""How URLs of local paths begin, by fsspec's names."""

ONE_SLASH = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "http", "https", "hf", "memory", "file")
"""Protocols of URLs that were meant by names with one slash behind them."""

UNFINISHED_NAME = "tilewright-unfinished"
"""The mark beside a growing array at a URL."""
UNFINISHED = b"an unfinished product of Tilewright\n"
"""What it holds; where the store removes nothing, the mark of a finished one is empty."""

GIVEN_NAME = "_tilewright_given_name"
"""The attribute of a local store that keeps the user's name for its folder, whose path we made absolute."""


def name_of(source: Given) -> str:
    """What to call an array in messages: its path or URL."""
    if isinstance(source, Flattened | Masked | Section):
        source = base_of(source)
    if isinstance(source, Slice):
        return name_of(source.source)
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, zarr.Array):
        if isinstance(source.store, MappedStore):
            return source.store.mapped.name
        if isinstance(source.store, LocalStore):
            given = os.fspath(getattr(source.store, GIVEN_NAME, source.store.root))
            if given.startswith(LOCAL_URLS):  # of which a Path would drop a slash
                return f"{given}/{source.path}".rstrip("/")
            return str(Path(given) / source.path)
        if isinstance(source.store, AtUrl):
            return f"{source.store.url}/{source.path}".rstrip("/")
        if isinstance(source.store, FsspecStore):
            fs, path = beneath(source.store.fs, f"{source.store.path}/{source.path}".rstrip("/"))
            # fsspec's archives keep the file that they lie in, without which all of them have one name.
            archive = getattr(getattr(fs, "of", None), "full_name", None)
            return "::".join(filter(None, [str(fs.unstrip_protocol(path)), archive]))
        if not names_itself(source.store):
            return f"/{source.path} in {kind_of(source.store)}"
        return str(source.store_path)
    return described(source) if is_given_array(source) else str(source)


def names_itself(store: Any) -> bool:
    """Whether a store's text is a name: one line, of more than its class and its address in memory."""
    plain = type(store).__str__ is object.__str__ and type(store).__repr__ is object.__repr__
    return not plain and "\n" not in str(store)


def kind_of(store: Any) -> str:
    """A store's class, for messages."""
    return f"{type(store).__module__}.{type(store).__qualname__}"


def in_one_line(error: BaseException) -> str:
    """An error's class and the first line of what it says."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def place_of(array: StoredArray) -> str:
    """Where an array is, for processes that run in other folders: its absolute path, or its URL."""
    if isinstance(array.store, LocalStore):
        return str(array.store.root.absolute() / array.path)
    if isinstance(array.store, MappedStore):
        return array.store.mapped.path
    return str(base_of(array).store_path)


def location(source: Found) -> tuple[str, PurePath]:
    """Where an array is, or would be, to tell whether two are the same, or one lies inside another.

    For a local disk ``""`` and the path with links resolved; else a protocol, or the store's type, and the path there.
    """
    if isinstance(source, Flattened | Masked | Section):
        source = base_of(source)
    if not isinstance(source, zarr.Array):
        path = local_path(source)
        if path is not None:
            return "", path.resolve()
        if is_s3(text := os.fspath(source)):
            return _in_bucket(text)
        from fsspec.core import url_to_fs  # imported here since few use a URL

        try:
            return _location(*url_to_fs(text))
        except Exception:  # a file system of fsspec's may raise anything; opening it says what is wrong
            return "", PurePosixPath(text)
    if isinstance(source.store, AtUrl):
        return _in_bucket(name_of(source))
    store = unwrapped(source.store)
    if isinstance(store, LocalStore):
        return "", (store.root / source.path).resolve()
    if isinstance(store, MappedStore):
        return "", Path(store.mapped.path).resolve()
    if isinstance(store, FsspecStore):
        return _location(store.fs, f"{store.path}/{source.path}")
    return type(store).__name__, PurePosixPath(str(source.store_path))


def _in_bucket(url: str) -> tuple[str, PurePath]:
    """The location of a URL of S3, as fsspec has it."""
    return "s3", PurePosixPath(url.partition("://")[2])


def _location(fs: Any, path: str) -> tuple[str, PurePath]:
    fs, path = beneath(fs, path)
    names = protocols(fs)
    if "file" in names:
        return "", Path(path).resolve()
    return names[0] if names else type(fs).__name__, PurePosixPath(path)


def anchored(array: zarr.Array[Any], given: str | None = None) -> zarr.Array[Any]:
    """The array by its absolute path, which is the same for workers that run in other folders.

    given: the folder's name in messages, where its path is absolute already. Links in the path are kept: on other hosts
    they may lead elsewhere, deliberately.
    """
    folder = array.store
    if not isinstance(folder, LocalStore):
        return array
    if given is not None:
        setattr(folder, GIVEN_NAME, given)
        return array
    if folder.root.is_absolute():
        return array
    moved = copy.copy(folder)
    moved.root = folder.root.absolute()
    setattr(moved, GIVEN_NAME, str(folder.root))
    return in_store(array, moved)


def in_store(array: zarr.Array[Any], store: Any) -> zarr.Array[Any]:
    """The array at the same path of another store. The caller's is left unchanged; the copy keeps whatever it was
    opened with."""
    inner = copy.copy(array.async_array)
    object.__setattr__(inner, "store_path", StorePath(store, array.path))
    return with_coordinates(zarr.Array(inner), coordinates_with(array))


def metadata_name(array: StoredArray) -> str:
    return METADATA_NAMES[array.metadata.zarr_format]


OUTPUT_ROLES = ("output", "counts")
"""What is written, in messages; all else is only read."""


def check_source(source: Any, role: str) -> None:
    """Raise StoreError for anything that does not name a stored array."""
    if isinstance(source, Slice):
        raise StoreError(
            f"{role}: found a slice of {name_of(source)}; give the whole array, in a place of its own"
        )
    if not isinstance(source, str | os.PathLike | zarr.Array):
        found = f"{type(source).__module__}.{type(source).__qualname__}"
        allowed = "a path, a URL or a zarr.Array"
        if role in OUTPUT_ROLES:
            hint = "without it, a product is returned as an array of NumPy"
        else:
            allowed = "a path, a URL or an array, as of Zarr, NumPy, xarray, dask or h5py"
            hint = "of numbers in memory, numpy.asarray makes an array that is read as it is"
        if found.startswith("scipy.sparse"):
            hint = "sparse matrices are not supported: .toarray() makes it dense, where it fits"
        if arrays := arrays_inside(source):
            hint = f"give one of its arrays: {', '.join(arrays)}"
        if isinstance(source, bytes):
            hint = "of a path in bytes, os.fsdecode makes text"
        raise StoreError(f"{role}: found {found}; it must be {allowed} ({hint})")
    if isinstance(source, zarr.Array):
        return
    text = config.path_text(source)
    if text is None:
        raise StoreError(
            f"{role}: {shown(source)} is no path: it has a null byte, a lone surrogate, or no text; give a path, a URL"
            " or a zarr.Array"
        )
    if not text:
        raise StoreError(f"{role}: found an empty name; give a path or a URL")
    path = _without_protocol(text)
    if path == "~" or path.startswith("~/"):
        raise StoreError(
            f"{role}: {text} begins with a tilde, which only shells read as the home folder; pass"
            " os.path.expanduser(path), or os.path.abspath(path) for a folder of that name"
        )
    protocol, slash, below = text.partition(":/")
    if slash and protocol in ONE_SLASH and not below.startswith("/") and not os.path.lexists(f"{protocol}:"):
        raise StoreError(
            f"{role}: {text} would be a local path, in a folder {protocol}:, and a URL has two slashes there, of which"
            f" pathlib's Path drops one: give it as a text, {protocol}://..."
        )


def open_array(
    source: Input, *, ndim: int, role: str, or_more: bool = False, growing: bool = False
) -> zarr.Array[Any]:
    """Open an array for reading and check that it holds numbers in ``ndim`` dimensions, ``or_more``.

    A relative path is made absolute, for workers that run in other folders; messages use the name as given. growing:
    also a product at a URL that is not finished.

    Raises
    ------
    StoreError
        Nothing is there, it cannot be read, it is an unfinished product, or a group and not an array, its chunks hold
        no element, or ``source`` is not a path.
    ShapeError, DTypeError
        The array has another number of dimensions, or holds no numbers.
    """
    if not isinstance(source, str | os.PathLike | zarr.Array) and is_given_array(source):
        array, _ = open_given(source, role)
    else:
        check_source(source, role)
        array = _open_stored(source, ndim, role, or_more=or_more, growing=growing)
    return checked(array, role, ndim, or_more=or_more)


def checked(array: zarr.Array[Any], role: str, ndim: int, *, or_more: bool) -> zarr.Array[Any]:
    """An open array that holds numbers in ``ndim`` dimensions, ``or_more``. Raises as `open_array`."""
    name = name_of(array)
    check_chunks(array, role)
    _check_sides(role, name, array)
    if not isinstance(array.metadata.attributes, Mapping):
        raise StoreError(
            f"{role}: the attributes of {name} are {shown(array.metadata.attributes)}; they must be a mapping of names"
            " to values: mend them"
        )
    if array.ndim < ndim or (array.ndim > ndim and not or_more):
        raise ShapeError(
            f"{role}: {name} has shape {array.shape}; it must have {ndim} dimension{'s' * (ndim > 1)}"
            f"{' or more' * or_more}{_as_matrix(array, or_more) if ndim == 2 else ''}"
        )
    if array.dtype.kind not in "iufc":
        raise DTypeError(
            f"{role}: {name} holds {array.dtype}; only bool, integers, floats and complex numbers can be used"
        )
    try:
        # Asks for each codec and its settings: a wrong one would be met chunk by chunk.
        layout = layout_of(array, name)
        if layout is not None:
            _ = layout.zstd
    except UNREADABLE as error:
        raise StoreError(
            f"{role}: the metadata of {name} name codecs that cannot be used ({error}); mend them, or write the array"
            " again"
        ) from error
    return array


def _open_stored(source: Any, ndim: int, role: str, *, or_more: bool, growing: bool) -> zarr.Array[Any]:
    """Open what is stored at a path or a URL, or take an open array of Zarr. Raises as `open_array`."""
    name = name_of(source)
    try:
        array = _opened(source, role)
    except TilewrightError:
        raise
    except (FileNotFoundError, *UNREADABLE) as error:
        if is_bare_chain(source) and os.path.isfile(file := os.fspath(source).partition("::")[0]):
            raise StoreError(f"{role}: {file} {of_other_file(Path(file))}") from error
        if is_bare_chain(source):
            raise StoreError(
                f"{role}: there is no Zarr array at {name}: {_of_chain(os.fspath(source))}; give the path of an array"
            ) from error
        if there := what_is_there(name, local_path(source), ndim, or_more=or_more):
            raise StoreError(f"{role}: {name} {there}") from error
        if local_path(name) is None and trouble_of(error).kind is Kind.UNKNOWN_OPTION:
            raise StoreError(f"{role}: cannot open {name}: {told_of(error)}") from error
        if isinstance(error, FileNotFoundError):
            check_bucket(source, role)
            path = local_path(source)
            nothing, instead = "", "give the path of an array"
            if path is not None and not os.path.lexists(path):
                nothing = ", where no file or folder is"
                instead = what_is_around(path, ndim, or_more=or_more) or instead
            raise StoreError(f"{role}: there is no Zarr array at {name}{nothing}; {instead}") from error
        if not isinstance(source, zarr.Array) and (damage := damage_of(name, local_path(source), error)):
            raise StoreError(
                f"{role}: the metadata of {name} cannot be used ({damage}); mend them, or write the array again"
            ) from error
        raise StoreError(
            f"{role}: {name} is not a Zarr array ({error}); give the path of an array"
        ) from error
    except Exception as error:  # besides the system's, whatever a file system of fsspec's raises
        raise StoreError(f"{role}: cannot open {name}: {_cannot(error, source)}") from error
    if not growing:
        _check_finished(role, source, array)
    return with_bytes_for_bool(array)


def check_bucket(source: Source, role: str) -> None:
    """Raise StoreError where the bucket is missing that a URL of S3 names, in which nothing was found."""
    if isinstance(source, zarr.Array) or not is_s3(url := os.fspath(source)):
        return
    try:
        answer_of(look_at_bucket(store_at(url, True)), url)
    except Exception as error:
        if trouble_of(error).kind is not Kind.MISSING:
            raise StoreError(f"{role}: cannot open {url}: {told_of(error)}") from error


def _cannot(error: Exception, source: Source) -> str:
    """Why an array cannot be opened, and what to do about it."""
    if not isinstance(source, zarr.Array) and local_path(source) is None:
        return told_of(error)
    return with_remedy(error) if isinstance(error, OSError) else str(error)


def _check_finished(role: str, source: Source, array: zarr.Array[Any]) -> None:
    """Raise StoreError for a product at a URL that a run has begun, and not finished: what it lacks reads as zeros."""
    if isinstance(source, zarr.Array) or is_local(array):
        return
    key = f"{array.path}/{UNFINISHED_NAME}".lstrip("/")
    try:
        found = answer_of(array.store.get(key, default_buffer_prototype()), f"{name_of(array)}/{key}")
    except Exception as error:
        if trouble_of(error).passing:
            raise StoreError(f"{role}: cannot open {name_of(source)}: {told_of(error)}") from error
        return  # to those who may not list a bucket, S3 forbids what is not there
    if found is not None and found.to_bytes() == UNFINISHED:
        raise StoreError(
            f"{role}: {name_of(source)} is an unfinished product: the run that writes it goes on, or was stopped; wait"
            " for it, or finish it by the same command"
        )


def _check_sides(role: str, name: str, array: zarr.Array[Any]) -> None:
    """Raise StoreError for sides that no array has: zarr-python takes what the metadata say."""
    for what, sides in (("shape", array.shape), ("chunks", array.chunks), ("shards", array.shards or ())):
        whole = all(isinstance(side, int) and side >= 0 for side in sides)
        if not whole or math.prod(sides) * array.dtype.itemsize > MOST_NBYTES:
            raise StoreError(
                f"{role}: the metadata of {name} say {what} {shown(tuple(sides))}, which no array of {array.dtype} can"
                " have; mend them, or write the array again"
            )


def _chunks_as_stored(array: zarr.Array[Any]) -> tuple[int, ...]:
    """Sides of an array's chunks, or shards, as its metadata name them: from 3.4.1 on zarr-python takes a side of 0 for
    one of 1, so that the array would read as fill values."""
    stored = getattr(array.metadata, "_stored_document", None)  # what it was read from, where it was mended
    if stored is None:
        return array.chunks
    sides = stored.get("chunks") or stored["chunk_grid"]["configuration"]["chunk_shape"]
    return tuple(sides)


def check_chunks(array: zarr.Array[Any], role: str) -> None:
    """Raise StoreError for an array whose chunks hold no element, or have several lengths along a side, as zarr-python
    from 3.2 on writes them if asked to."""
    try:
        _ = array.chunks, array.shards
    except NotImplementedError as error:
        raise StoreError(
            f"{role}: the chunks of {name_of(array)} have several lengths along a side (chunk grid 'rectilinear');"
            " write it again in chunks that all have one shape"
        ) from error
    chunks = _chunks_as_stored(array)
    if any(side == 0 < length for side, length in zip(chunks, array.shape, strict=True)):
        raise StoreError(
            f"{role}: {name_of(array)} has shape {array.shape} in chunks of {chunks}, which hold no element; write it"
            " again in chunks of one element or more"
        )


def _opened(source: Source, role: str) -> zarr.Array[Any]:
    if isinstance(source, zarr.Array):
        return anchored(source)
    text, path = os.fspath(source), local_path(source)
    if path is None:
        if (found := open_in_file(text, role)) is not None:
            return found
        return zarr.open_array(store_at(text), mode="r")
    if (found := open_file(path, text, role)) is not None:
        return found
    for entry in METADATA_FILES:
        _check_no_other(path / entry)
    # A Path, not a string: in a string zarr would take a colon in a folder's name for part of a URL; and a URL of a
    # local path it would open by fsspec, by which nobody sees the files.
    return anchored(zarr.open_array(path.absolute(), mode="r"), text)


def _check_no_other(file: Path) -> None:
    """Raise NotAFileError for what stands in a metadata file's place and is none: reading a pipe may wait for good, a
    device may have no end. Of a file that cannot be looked at, opening the array tells."""
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return
    try:
        check_is_file(found)
    except NotAFileError as error:
        raise NotAFileError(f"of {file.name} in it, {error}") from None


def _as_matrix(array: zarr.Array[Any], or_more: bool) -> str:
    """What to do with a vector, or an array of more dimensions, where a matrix is wanted, in words."""
    if array.ndim == 1 and or_more:
        return (
            f": give a single series, such as a climate index, as a matrix of one column, ({array.shape[0]}, 1), by"
            " index.reshape(-1, 1) in NumPy or index.expand_dims('index', -1) in xarray"
        )
    if array.ndim == 1:
        return (
            f": give one vector as a matrix of one row, (1, {array.shape[0]}), by x.reshape(1, -1) in NumPy, or of one"
            " column, by x.reshape(-1, 1)"
        )
    return f": {by_axes(array.ndim)}" if array.ndim > 2 else ""


def read_unit(array: StoredArray) -> tuple[int, ...]:
    """Sides of what is read as one piece: the chunk (in a shard, the inner chunk), or of an array that is seen as a
    matrix the least rectangle of whole chunks."""
    array = unmasked(array)
    if isinstance(array, Flattened):
        return array.unit
    return tuple(max(1, side) for side in array.chunks)


def part_unit(array: StoredArray) -> tuple[int, ...]:
    """Sides of what one thread reads at once: `read_unit`, or of shards in a store that is not local several of their
    chunks."""
    unit, array = read_unit(array), unmasked(array)
    if isinstance(array, Flattened) or is_local(array) or array.shards is None:
        return unit
    layout = encoding_of(array, name_of(array), Path())
    return unit if layout is None else tuple(max(1, side) for side in block_of(layout))


def write_unit(array: zarr.Array[Any]) -> tuple[int, ...]:
    """Sides of what is written as one object, by one writer at a time: the shard if there is one, else the chunk."""
    return tuple(max(1, side) for side in (array.shards or array.chunks))


def as_stored_matrix(array: StoredArray, *, transpose: bool = False) -> StoredMatrix:
    """The array as the planner sees it, with op applied."""
    rows, columns = array.shape
    unit = read_unit(array)
    dtype = array.dtype.newbyteorder("=")
    stored = StoredMatrix(rows, columns, dtype, (unit[0], unit[1]), is_plain(array))
    if not is_local(array):
        part, inner = part_unit(array), unmasked(array)
        shard = None if isinstance(inner, Flattened) else inner.shards
        stored = replace(
            stored, part=(part[0], part[1]), shard=None if shard is None else (shard[0], shard[1])
        )
    return stored.transposed if transpose else stored


def is_plain(array: StoredArray) -> bool:
    """Whether a part of a chunk is read alone from a local file, since its elements lie there row by row as they are.

    Of an array that is seen as a matrix not where chunks interleave its rows: a part of a row would be read element by
    element, or with all that lies between.
    """
    array = unmasked(array)
    layout = layout_of(array, name_of(array))
    if layout is None and isinstance(array, Flattened):
        layout = layout_of(array.array, name_of(array))
        return layout is not None and layout.plain and matrix_order(layout, array) == ()
    return layout is not None and layout.plain


def check_shared(source: Found, role: str, *, written: bool = False, copied: bool = False) -> None:
    """Raise StoreError for an array that tasks cannot share with the caller, for reading, or (``written``) for writing.

    Arrays are pickled on their way to any worker, even one in this process. An array in memory is, depending on its
    store, copied along with every task or missing in another process; the caller does not see what a task writes to it.
    A ZIP file is opened again, in the caller's mode: "w" empties it; what was added in "a" is not in its directory yet,
    and reads as zeros. ``copied``: a copy along with every task will do.
    """
    if isinstance(source, Flattened | Masked | Section):
        source = base_of(source)
    pickled = isinstance(source, zarr.Array) and isinstance(_keeper(source), MemoryStore)
    if in_memory(source) and not (copied and pickled):
        raise StoreError(
            f"{role}: {name_of(source)} lies in this process's memory, which tasks do not share; store it in a file"
            " (zarr.storage.LocalStore; /dev/shm is as fast), or use tilewright.kernels on NumPy arrays"
        )
    mode = zip_mode(source)
    if mode is not None and written:
        raise StoreError(
            f"{role}: {name_of(source)} lies in a ZIP file, which one writer alone can write to, and each task would be"
            " another; store it in a folder (zarr.storage.LocalStore)"
        )
    if mode not in (None, "r"):
        raise StoreError(
            f"{role}: {name_of(source)} lies in a ZIP file that is open in mode {mode!r}, in which each task would open"
            " it again; close it, and open it in mode 'r'"
        )


def in_memory(source: Source) -> bool:
    """Whether the data are in this process's memory, judged by an open array's innermost store, or by a URL."""
    if not isinstance(source, zarr.Array):
        return _names_protocol(source, "memory")
    keeper = _keeper(source)
    if isinstance(keeper, MemoryStore) or "memory" in protocols(keeper):
        return True
    # Compared by name, so that obstore need not be imported: whoever has such a store has it.
    return type(keeper).__module__.startswith("obstore") and type(keeper).__name__ == "MemoryStore"


def zip_mode(source: Source) -> str | None:
    """The mode in which an array's ZIP file is open; None: it is in no ZIP file."""
    if not isinstance(source, zarr.Array):
        return "r" if _names_protocol(source, "zip") else None
    keeper = _keeper(source)
    if isinstance(keeper, ZipStore):
        return keeper._zmode
    return str(keeper.mode) if "zip" in protocols(keeper) else None


def _names_protocol(url: str | os.PathLike[str], protocol: str) -> bool:
    """Whether a URL, or any in a chain of URLs, has this protocol."""
    return any(part.startswith(f"{protocol}://") for part in os.fspath(url).split("::"))


def _keeper(array: zarr.Array[Any]) -> Any:
    """What holds an array's data beneath all wrappers: a store, an fsspec file system, or obstore's store."""
    store = unwrapped(array.store)
    if isinstance(store, ObjectStore):
        return store.store
    if isinstance(store, FsspecStore):
        return beneath(store.fs, store.path)[0]
    return store


def beneath(fs: Any, path: str) -> tuple[Any, str]:
    """An fsspec file system and a path there, beneath wrappers that make it asynchronous, root it at a folder, or cache
    it."""
    while (inner := getattr(fs, "sync_fs", None) or getattr(fs, "fs", None)) is not None:
        if "dir" in protocols(fs):
            path = fs._join(path)
        fs = inner
    return fs, path


def protocols(keeper: Any) -> tuple[str, ...]:
    """The protocol names of an fsspec file system; none for anything else."""
    found = getattr(keeper, "protocol", ())
    return (found,) if isinstance(found, str) else tuple(found)


def is_local(array: StoredArray) -> bool:
    """Whether an array's chunks are local files."""
    return isinstance(array.store, LocalStore | MappedStore)


def local_path(target: Source) -> Path | None:
    """The path that a target names on a local disk; None for URLs and open arrays.

    ``::`` chains URLs, unless something local has the whole name.
    """
    if isinstance(target, zarr.Array):
        return None
    text = os.fspath(target)
    path = _without_protocol(text)
    remote = path == text and ("://" in text or is_bare_chain(text))
    return None if remote else _without_missing(Path(path))


def _without_protocol(text: str) -> str:
    """The path that the URL of a local one names; anything else as it is."""
    return next((text.removeprefix(start) for start in LOCAL_URLS if text.startswith(start)), text)


def is_bare_chain(target: Source) -> bool:
    """Whether a name is read as a chain of URLs because of ``::`` alone, though it may be meant as a local path: one
    that there is, is taken as it is."""
    if isinstance(target, zarr.Array):
        return False
    text = os.fspath(target)
    return "::" in text and "://" not in text and not os.path.lexists(text)


def _of_chain(text: str) -> str:
    """What is wrong with a name with ``::`` by which nothing is found."""
    file = text.partition("::")[0]
    read_so = "so `::` in it is read as a chain of URLs"
    if os.path.splitext(file)[1]:
        return f"there is no file {file}, and nothing local has the whole name, {read_so}"
    return f"nothing local has that name, {read_so}"


def _without_missing(path: Path) -> Path:
    """The path without folders that are not there and that ``..`` leaves again: whoever makes the folders that a path
    lies in would make them too. Those that are there stay, since ``..`` behind a link leads elsewhere."""
    if ".." not in path.parts:
        return path
    kept = Path()
    for part in path.parts:
        if part == ".." and kept.name not in ("", "..") and _is_missing(kept):
            kept = kept.parent
        else:
            kept /= part
    return kept


def _is_missing(path: Path) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # whoever uses it is told what is wrong
        return False
    return False


def is_compressed(array: StoredArray) -> bool:
    return bool(base_of(array).compressors)


def check_in_sight(name: str, root: Path, metadata_name: str) -> None:
    """Raise StoreError where this host does not see the array's metadata file: then a missing chunk means nothing."""
    try:
        os.stat(f"{root}/{metadata_name}")
    except OSError as error:
        raise out_of_sight(name, str(root), f"{metadata_name}: {error.strerror}") from error


def out_of_sight(name: str, place: str, found: str) -> StoreError:
    return StoreError(
        f"{name}: there is no Zarr array at {place} on {socket.gethostname()} ({found}), so it is neither read nor"
        " written there; put it on storage that all workers see under the same path, and leave it there until the"
        " work is done"
    )
