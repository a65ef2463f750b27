"""Arrays that a product is written to where they stand: open ones that the caller gives, and new ones at URLs.

Readers may see such an array before it is whole. At a URL an object beside it says so until it is: an array with that
mark was begun by a run, and the next one goes on with it, or replaces it. An open array has none, since it is the
caller's, and nothing but its chunks is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import zarr
from zarr.storage import LocalStore

from tilewright.pipeline.errors import OutputError, OutputExistsError, StoreError
from tilewright.pipeline.store.arrays import (
    UNFINISHED,
    UNFINISHED_NAME,
    UNREADABLE,
    Source,
    anchored,
    check_chunks,
    name_of,
)
from tilewright.pipeline.store.chunks import METADATA_NAMES, draft_of
from tilewright.pipeline.store.journal import ObjectJournal
from tilewright.pipeline.store.locks import LEASE_NAME, Lease, lock_folder, take_lease, unlock_folder
from tilewright.pipeline.store.new.far_groups import settle_at
from tilewright.pipeline.store.new.storage import quietly
from tilewright.pipeline.store.objects import Objects, folder_of, objects_at, objects_of
from tilewright.pipeline.store.probe import KEY_START
from tilewright.pipeline.store.remote.opening import store_at
from tilewright.pipeline.store.remote.trouble import told_of


class InPlace(NamedTuple):
    """An array that is written where it stands, from which other runs are kept out."""

    array: zarr.Array[Any]
    lock: int | None = None
    """As in `Output`, where it is in a folder."""
    lease: Lease | None = None
    """Where it is in a store without folders."""
    url: str | None = None
    """The URL of one that was created there; None of an open array, whose group is the caller's."""

    def settle(self) -> list[str]:
        """Make it known to readers of the group that it lies in, once it is whole; see `settle_at`."""
        return [] if self.url is None else settle_at(self.url)

    def release(self) -> None:
        """Let other runs write here again."""
        if self.lock is not None:
            unlock_folder(self.lock)
        if self.lease is not None:
            self.lease.release()


def check_given_output(array: zarr.Array[Any], shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raise ``OutputError`` unless an open array can take a result of this shape and dtype; StoreError for one whose
    chunks cannot be written."""
    check_chunks(array, "output")
    if array.read_only:
        raise OutputError(f"output: {name_of(array)} is open for reading only; open it with mode='r+'")
    if tuple(array.shape) != shape:
        raise OutputError(f"output: {name_of(array)} has shape {array.shape}; the result has {shape}")
    native = array.dtype.newbyteorder("=")
    if native != dtype:
        # Only what may be asked for: see the parameter of `matmul`.
        hint = f", or pass dtype={native.name!r}" if np.can_cast(dtype, native, "same_kind") else ""
        raise OutputError(
            f"output: {name_of(array)} holds {array.dtype}; the result is {dtype}: give an array of {dtype}{hint}"
        )


def given_in_place(target: zarr.Array[Any]) -> InPlace:
    """An open array to write to.

    Raises
    ------
    OutputExistsError
        Another run writes there.
    StoreError
        It cannot be written, or locked.
    """
    array = anchored(target)
    _check_takes_chunks(array)
    folder, objects = folder_of(array), objects_of(array)
    if folder is None:
        return InPlace(array, lease=take_lease(objects) if objects is not None else None)
    try:
        return InPlace(
            array, lock_folder(folder.resolve())
        )  # a link is the caller's own: nothing here is renamed
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(
            f"output: cannot lock {name_of(array)}: {error}; give C an array that this process may read and write"
        ) from error


def create_at_url(url: str, create: Callable[..., zarr.Array[Any]], overwrite: bool) -> InPlace:
    """A new array at a URL, with the mark that it grows: which is there before what stood there goes, and before
    there is an array. Raises as `given_in_place`, and OutputExistsError for what is not to be replaced."""
    objects = objects_at(url)
    lease = take_lease(objects)
    try:
        try:
            if not is_unfinished(objects):
                _check_replaceable(objects, url, overwrite)
                objects.put(UNFINISHED_NAME, UNFINISHED)
                clear_marked(objects)
            else:
                objects.clear(tuple(METADATA_NAMES.values()), (UNFINISHED_NAME, LEASE_NAME))
            array = quietly(lambda: create(store_at(url), overwrite=False))
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"output: cannot create {url}: {told_of(error)}") from error
    except BaseException:
        lease.release()
        raise
    return InPlace(array, lease=lease, url=url)


def clear_marked(objects: Objects) -> None:
    """Remove what stands at a URL but the mark that has just been put there, and the lease. Where nothing of it can be
    removed it stays whole, without the mark. Raises StoreError."""
    try:
        objects.clear(tuple(METADATA_NAMES.values()), (UNFINISHED_NAME, LEASE_NAME))
    except StoreError:
        with suppress(StoreError):
            if any(objects.get(name) is not None for name in METADATA_NAMES.values()):
                objects.drop(UNFINISHED_NAME)
        raise


def grow_again(url: str, record: bytes, checksums: str) -> None:
    """Make a finished array at a URL one that a run goes on with: with the record of its tiles, and marked.

    record: all lines. checksums: the name of the object that held them, which goes. A process that is killed here
    leaves an array that is either finished still, or gone on with. Raises as `given_in_place`.
    """
    objects = objects_at(url)
    lease = take_lease(objects)
    try:
        journal = ObjectJournal(objects, lease.check)
        try:
            journal.begin(record)
        finally:
            journal.close()
        objects.put(UNFINISHED_NAME, UNFINISHED)
        objects.delete(checksums)
    finally:
        lease.release()


def _check_replaceable(objects: Objects, url: str, overwrite: bool) -> None:
    """Raise OutputExistsError where something stands at a URL that is not to be replaced: an array without
    ``overwrite``, and whatever is no array, lest a typo delete a bucket."""
    found = [data for name in METADATA_NAMES.values() if (data := objects.get(name)) is not None]
    if found and not overwrite:  # another run has finished it since we looked
        raise OutputExistsError(
            f"output: {url} exists; choose another path, or ask to overwrite it (--overwrite)"
        )
    if any(b'"array"' in data or b'"chunks"' in data for data in found):
        return
    others = [name for name in objects.names("") if name != LEASE_NAME and not name.startswith(KEY_START)]
    if others:
        raise OutputExistsError(
            f"output: {url} is not a Zarr array, and holds {others[0]}, so it is not replaced; choose another path"
        )


def resume_in_place(target: Source) -> InPlace | None:
    """The array of a stopped run that was written in place, kept free of other runs; None where it is gone. Raises as
    `create_output`."""
    if isinstance(target, zarr.Array):
        return given_in_place(target)
    lease = take_lease(objects_at(os.fspath(target)))
    try:
        array = growing_in_place(target)
    except BaseException:
        lease.release()
        raise
    if array is None:
        lease.release()
        return None
    return InPlace(array, lease=lease, url=os.fspath(target))


def is_unfinished(objects: Objects | None) -> bool:
    """Whether a run has begun an array at a URL, and not finished it. Raises StoreError."""
    return objects is not None and objects.get(UNFINISHED_NAME) == UNFINISHED


def growing_in_place(target: Source) -> zarr.Array[Any] | None:
    """The array of an output that is written in place, if tiles of an earlier run may be in it. Raises StoreError where
    that cannot be seen now."""
    if isinstance(target, zarr.Array):
        return anchored(target)
    try:
        if not is_unfinished(objects_at(os.fspath(target))):
            return None
        return zarr.open_array(store_at(os.fspath(target)), mode="r+")
    except (FileNotFoundError, *UNREADABLE):
        return None
    except StoreError:
        raise
    except Exception as error:  # a file system of fsspec's may raise anything
        raise StoreError(f"output: cannot open {name_of(target)}: {told_of(error)}") from error


def _check_takes_chunks(array: zarr.Array[Any]) -> None:
    """Raise StoreError where local chunks could not be written: a store that is open for writing may lie on a read-only
    file system, or in folders that belong to somebody else."""
    if not isinstance(array.store, LocalStore):
        return
    root = array.store.root / array.path
    chunk = root / array.metadata.encode_chunk_key((0,) * array.ndim)
    folder = next((folder for folder in chunk.parents if folder == root or folder.exists()), root)
    probe = draft_of(folder / chunk.name)
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise StoreError(
            f"output: cannot write to {name_of(array)}: {error}; give C an array that this process may write to"
        ) from error
