"""NumPy's arrays: those of a mapped file by that file, others in memory that the workers of this host read too.

The memory is a nameless file (memfd_create), which the system frees with the last process that has it open, however
that ends. Workers open it by this process' number, so no bytes pass through Dask, and all of them read the same pages.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import xxhash
import zarr

from tilewright.kernels.numbers import ceil_div, counted, format_nbytes
from tilewright.pipeline.errors import DTypeError, StoreError
from tilewright.pipeline.store.region import StoredArray, chunks_in, parts_of
from tilewright.pipeline.store.sources.beside import Coordinates, with_coordinates
from tilewright.pipeline.store.sources.mapped import (
    Mapped,
    MappedStore,
    mapped_array,
    named,
    sight_of,
    stored_dtype,
    unit_of,
)

COPIED_NBYTES = 4 * 2**20
"""Bytes that are copied at a time."""


class NamelessFile:
    """So many bytes of memory, 0 at first, that other processes of this host open as ``path`` while this one has it
    open. Raises OSError where the system has no such files, or no room for it."""

    descriptor = -1
    """Once it is closed."""

    def __init__(self, nbytes: int, called: str) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, f"{sys.platform} has no nameless files in memory")
        self.descriptor = os.memfd_create(called, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, nbytes)
        except OSError:
            self.close()
            raise
        self.path = f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def close(self) -> None:
        if self.descriptor >= 0:
            with suppress(OSError):
                os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()


class SharedMemory(NamelessFile):
    """A nameless file in memory for the chunks of an array, plain and one behind the other; it is freed with the last
    process that has it open. Raises StoreError where the system has no such files, or no room for it."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype, role: str, name: str) -> None:
        self._shape, self._dtype = tuple(shape), dtype
        self._chunks = unit_of(self._shape)
        self._counts = tuple(ceil_div(side, unit) for side, unit in zip(shape, self._chunks, strict=True))
        if not hasattr(os, "memfd_create"):
            raise StoreError(
                f"{role}: {name} lies in memory that workers of this system ({sys.platform}) do not share; store it"
                " (numpy.save), and give the path"
            )
        nbytes, free = math.prod(shape) * dtype.itemsize, free_nbytes()
        if free is not None and nbytes > free:
            raise StoreError(
                f"{role}: {name} has {format_nbytes(nbytes)}, is copied for the workers, and {format_nbytes(free)} of"
                " memory are free; store it (numpy.save, or zarr.save), and give the path"
            )
        self._nbytes = math.prod(self._counts) * math.prod(self._chunks) * dtype.itemsize
        try:
            super().__init__(self._nbytes, "tilewright-input")
        except OSError as error:
            raise StoreError(f"{role}: {name} cannot be copied into shared memory: {error}") from error

    def write(self, region: Sequence[slice], values: np.ndarray) -> None:
        """Put numbers in a region of the array."""
        item = self._dtype.itemsize
        for piece in chunks_in(region, self._chunks):
            place = int(np.ravel_multi_index(piece.chunk, self._counts)) * math.prod(self._chunks)
            chunk = np.memmap(self.path, self._dtype, "r+", place * item, self._chunks)
            chunk[piece.inside] = values[piece.target]

    def digest(self) -> str:
        """Of what it holds."""
        digest = xxhash.xxh3_128()
        for start in range(0, self._nbytes, COPIED_NBYTES):
            digest.update(os.pread(self.descriptor, min(COPIED_NBYTES, self._nbytes - start), start))
        return digest.hexdigest()

    def mapped(self, name: str, digest: str, attributes: Mapping[str, Any]) -> Mapped:
        """Where the array lies."""
        nbytes = math.prod(self._chunks) * self._dtype.itemsize
        starts = np.arange(math.prod(self._counts), dtype=np.int64).reshape(self._counts) * nbytes
        table = np.stack([starts, np.full_like(starts, nbytes)], axis=-1)
        return Mapped(self.path, name, self._shape, self._dtype, self._chunks, table=table, digest=digest,
                      attributes=attributes, sight=sight_of(self.path))  # fmt: skip


_held: WeakValueDictionary[tuple[str, tuple[int, ...], str], SharedMemory] = WeakValueDictionary()
"""What lies in memory now, by digest, shape and dtype: the same numbers lie there once, and are one array."""


def copies_nbytes(arrays: Iterable[StoredArray]) -> int:
    """Bytes of those among these, and among their masks, that lie in memory that processes of this host share: copies
    of arrays in memory, and what dask computes. One that is given twice lies there once."""
    parts = {part.store.mapped.path: part for array in arrays for part in parts_of(array)
             if isinstance(part.store, MappedStore) and part.store.mapped.sight is not None}  # fmt: skip
    return sum(math.prod(part.shape) * part.dtype.itemsize for part in parts.values())


def open_numpy(
    array: np.ndarray,
    role: str,
    name: str | None = None,
    dimensions: Any = None,
    attributes: Mapping[str, Any] | None = None,
    coordinates: Mapping[str, Coordinates] | None = None,
) -> zarr.Array[Any]:
    """An array in memory, or of a mapped file, as an array of Zarr.

    One in memory is copied, as it is now: so it takes its size once more, in memory that all processes of this host
    share. name: what to call it in messages.

    Raises
    ------
    DTypeError
        It holds no numbers.
    StoreError
        There is not so much free memory, or the system has no such files.
    """
    name = name or f"numpy array of shape {array.shape}"
    if np.ma.isMaskedArray(array) and np.ma.is_masked(array):
        raise StoreError(
            f"{role}: {name} is masked, and its masked numbers would count as they are; fill them (.filled(0)), or of"
            " gram, cov, corr and eofs give x.data and the mask, missing=x.mask, or x.filled(np.nan) and missing='nan'"
        )
    if _holds_rows(array):
        raise DTypeError(
            f"{role}: {name} holds {counted(len(array), 'array')} of {len(array[0])} numbers as objects of Python; make"
            " one matrix of them: np.stack(list(x))"
        )
    dtype = stored_dtype(array.dtype, role, name)
    array = np.asarray(array) if type(array) is not np.memmap else array
    facts = named(dimensions, attributes, array.dtype)
    if (file := _file_of(array)) is not None:
        path, offset, column_major = file
        opened = mapped_array(
            Mapped(path, path, array.shape, dtype, unit_of(array.shape), offset, column_major=column_major,
                   variable=f"at {offset}", attributes=facts)
        )  # fmt: skip
        return with_coordinates(opened, coordinates)
    held = SharedMemory(array.shape, dtype, role, name)
    held.write([slice(0, side) for side in array.shape], array)
    digest = held.digest()
    held = _held.setdefault((digest, array.shape, dtype.str), held)
    return with_coordinates(mapped_array(held.mapped(name, digest, facts), held), coordinates)


def _holds_rows(array: np.ndarray) -> bool:
    """Whether each of its objects is an array or a list of one length, as columns of vectors are in pandas."""
    if array.dtype.kind != "O" or array.ndim != 1 or not len(array):
        return False
    if not all(isinstance(one, np.ndarray | list | tuple) for one in array):
        return False
    shapes = {one.shape if isinstance(one, np.ndarray) else (len(one),) for one in array}
    return len(shapes) == 1 and len(shapes.pop()) == 1


def _file_of(array: np.ndarray) -> tuple[str, int, bool] | None:
    """Of an array that is a mapped file, or all of it between two places: the file's path, the first place, and whether
    it lies there in Fortran's order; None for any other, and for one that is changed in memory alone."""
    if not isinstance(array, np.memmap) or array.filename is None or array.mode == "c" or array.size == 0:
        return None
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        return None
    root: Any = array
    while not isinstance(root.base, mmap.mmap):
        if not isinstance(root.base, np.memmap):
            return None
        root = root.base
    offset = root.offset + array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    path = os.path.abspath(os.fspath(array.filename))
    return (path, offset, not array.flags.c_contiguous) if os.path.isfile(path) else None


def free_nbytes() -> int | None:
    """The memory that this host has left; None where it does not say."""
    try:
        with open("/proc/meminfo") as file:
            facts = dict(line.split(":", 1) for line in file)
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
