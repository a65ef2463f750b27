"""Stored objects of arrays: where they lie, whether they are as they were written, and what lies beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import zarr
from zarr.abc.buffer import Buffer
from zarr.abc.store import Store
from zarr.buffer import default_buffer_prototype
from zarr.storage import FsspecStore, LocalStore, ObjectStore, WrapperStore

from tilewright.kernels.numbers import counted
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.plan.told import NOTHING_CHECKSUM, StoredObject
from tilewright.pipeline.store.arrays import name_of
from tilewright.pipeline.store.remote.conditional import ConflictError, Tagged, put_if, tagged
from tilewright.pipeline.store.remote.opening import store_at
from tilewright.pipeline.store.remote.patience import unwrapped
from tilewright.pipeline.store.remote.trouble import told_of
from tilewright.pipeline.store.waiting import answer_of
from tilewright.pipeline.transfer.checksum import checksum_of_file, new_checksum
from tilewright.pipeline.transfer.files import NotAFileError

Found = TypeVar("Found")

REMOVED_AT_ONCE = 32
"""Objects that are removed at the same time."""


def object_path(array: zarr.Array[Any], place: tuple[int, ...]) -> Path:
    """Where a stored object of a local array lies, by its indices among those."""
    assert isinstance(array.store, LocalStore)
    return array.store.root / array.path / array.metadata.encode_chunk_key(place)


def object_name(array: zarr.Array[Any], place: tuple[int, ...]) -> str:
    """A stored object of any array, for messages."""
    if isinstance(array.store, LocalStore):
        return str(object_path(array, place))
    return f"{name_of(array)}/{array.metadata.encode_chunk_key(place)}"


def folder_of(array: zarr.Array[Any]) -> Path | None:
    """The local folder of an open array; None where it is in no files of this machine."""
    return array.store.root / array.path if isinstance(array.store, LocalStore) else None


def objects_at(url: str, role: str = "output") -> Objects:
    """The objects of an array at a URL, whether or not there is one yet. role: what it is, for errors. Raises
    StoreError for a URL that leads nowhere."""
    try:
        return Objects(store_at(url), "", url, role)
    except Exception as error:
        raise StoreError(f"{role}: cannot open {url}: {told_of(error)}") from error


def objects_of(array: zarr.Array[Any]) -> Objects | None:
    """The objects beside an array's chunks, where its store outlives this process and takes any name: that of a URL,
    or obstore's. None for all others, as for arrays in sessions, whose stores nobody but their owner writes to."""
    inner = unwrapped(array.store)
    if isinstance(inner, FsspecStore | ObjectStore) and array.store.supports_listing:
        return Objects(array.store, array.path, name_of(array))
    return None


class Objects:
    """The objects below an array's path in a store that is no folder of this machine. All methods raise StoreError
    where the store refuses."""

    def __init__(self, store: Store, path: str, name: str, role: str = "output") -> None:
        self._store, self._path, self.name, self._role = store, path, name, role

    def get(self, key: str) -> bytes | None:
        """What an object holds; None where there is none."""
        found = self._answer(self._store.get(self._key(key), default_buffer_prototype()), "read", key)
        return None if found is None else found.to_bytes()

    def put(self, key: str, data: bytes) -> None:
        value = default_buffer_prototype().buffer.from_bytes(data)
        self._answer(self._store.set(self._key(key), value), "write", key)

    def tagged(self, key: str) -> Tagged | None:
        """What an object holds, with the server's tag; None where there is none."""
        return self._answer(tagged(self._store, self._key(key)), "read", key)

    def put_if(self, key: str, data: bytes, before: Tagged | None) -> Tagged | None:
        """Write an object if it still is what was seen of it, or is not there (None), as `conditional.put_if` does;
        returns what is there then, None where that is somebody else's."""

        async def put() -> Tagged | None:
            try:
                return await put_if(self._store, self._key(key), data, before)
            except ConflictError:
                return None

        return self._answer(put(), "write", key)

    def clear(self, first: Sequence[str], kept: Sequence[str]) -> None:
        """Remove all objects there but those ``kept``, these ``first``: where they cannot be removed, nothing is."""

        async def listed() -> list[str]:
            start = self._key("")
            return [key.removeprefix(start) async for key in self._store.list_prefix(start)]

        there = [key for key in self._answer(listed(), "list", "") if key not in kept]
        for key in first:
            if key in there:
                self.delete(key)

        async def cleared() -> None:
            turn = asyncio.Semaphore(REMOVED_AT_ONCE)

            async def removed(key: str) -> None:
                async with turn:
                    await self._store.delete(self._key(key))

            await asyncio.gather(*(removed(key) for key in there if key not in first))

        self._answer(cleared(), "remove", "")

    def delete(self, key: str) -> None:
        """Also one that is not there."""

        async def deleted() -> None:
            with suppress(FileNotFoundError, KeyError):
                await self._store.delete(self._key(key))

        self._answer(deleted(), "remove", key)

    def drop(self, key: str) -> None:
        """Remove an object, or leave it with nothing in it where the store removes none."""
        try:
            self.delete(key)
        except StoreError:
            self.put(key, b"")

    def names(self, folder: str) -> list[str]:
        """Of the objects in a folder; a missing one has none."""

        async def listed() -> list[str]:
            inner = unwrapped(self._store)
            if isinstance(inner, FsspecStore):  # its listing may be one of before another run wrote there
                inner.fs.invalidate_cache()
            with suppress(FileNotFoundError):
                return [key async for key in self._store.list_dir(self._key(folder))]
            return []

        return self._answer(listed(), "list", folder)

    def _key(self, key: str) -> str:
        return f"{self._path}/{key}".lstrip("/")

    def _answer(self, asking: Coroutine[Any, Any, Found], verb: str, key: str) -> Found:
        try:
            return answer_of(asking, f"{self.name}/{key}")
        except Exception as error:  # a server's library may raise anything
            raise StoreError(f"{self._role}: cannot {verb} {self.name}/{key}: {told_of(error)}") from error


class NotingStore(WrapperStore[Store]):
    """A store that notes what is written through it, by one thread at a time: what zarr-python made of an array's
    numbers is known only here."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.noted: dict[str, tuple[int, int]] = {}
        """By key, the bytes of an object and their checksum; of one that holds only the fill value, and so is deleted,
        those of nothing."""

    async def set(self, key: str, value: Buffer) -> None:
        await super().set(key, value)
        found = new_checksum()
        found.update(value.as_buffer_like())
        self.noted[key] = len(value), found.intdigest()

    async def delete(self, key: str) -> None:
        await super().delete(key)
        self.noted[key] = 0, NOTHING_CHECKSUM


def fault_of(array: zarr.Array[Any], stored: StoredObject, *, whole: bool) -> tuple[str, int | None] | None:
    """What is wrong with a stored object, in words, and the checksum that it has; None where it is as it was written.

    whole: whether its bytes are read and compared; else only its length is.

    Raises StoreError where it cannot be looked at, which says nothing of what it is.
    """
    try:
        nbytes, checksum = (_of_file if isinstance(array.store, LocalStore) else _of_object)(
            array, stored.place, whole
        )
    except (FileNotFoundError, NotADirectoryError):
        return ("it is missing", None) if stored.nbytes else None
    except NotAFileError as error:
        return str(error), None
    except OSError as error:
        raise StoreError(
            f"output: cannot look at {object_name(array, stored.place)}, which was stored: {error.strerror or error};"
            " it is kept: let this process read it and run it again, or start over with --no-resume (resume=False)"
        ) from error
    if nbytes != stored.nbytes:
        return f"it has {counted(nbytes, 'byte')} and had {stored.nbytes}", checksum
    if whole and checksum != stored.checksum:
        return "its bytes are not those that were written", checksum
    return None


def _of_file(array: zarr.Array[Any], place: tuple[int, ...], whole: bool) -> tuple[int, int | None]:
    path = object_path(array, place)
    return checksum_of_file(path) if whole else (path.stat().st_size, None)


def _of_object(array: zarr.Array[Any], place: tuple[int, ...], whole: bool) -> tuple[int, int | None]:
    """An object that is no file is read in any case: a server's word on its length costs a request as well."""
    objects = objects_of(array)
    assert objects is not None, "nothing is recorded of the objects of other stores"
    data = objects.get(array.metadata.encode_chunk_key(place))
    if data is None:
        raise FileNotFoundError
    found = new_checksum()
    found.update(data)
    return len(data), found.intdigest()
