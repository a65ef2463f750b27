"""Zarr stores that are not what their pickled copies are, or do not do what they say. In a module of their own, which
worker processes import."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from threading import Lock
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, Store
from zarr.storage import LocalStore

from tilewright.pipeline.store.probe import KEY_START


class OddStore(Store):
    """Keeps its keys in files of a folder, with one fault."""

    supports_writes = True
    supports_deletes = True
    supports_listing = True

    def __init__(self, folder: Path, fault: str = "") -> None:
        super().__init__()
        self.inner, self.fault = LocalStore(folder), fault
        self.armed = False
        """Whether the fault is there: the test has made its array."""
        self.is_copy = False
        self.lock: Any = None
        self.read: dict[tuple[str, str], Buffer | None] = {}

    def arm(self) -> None:
        self.armed = True
        self.lock = Lock() if self.fault == "locked" else None

    def __reduce__(self) -> Any:
        if self.lock is not None:
            return _copied, (self.inner.root, self.fault, self.lock)
        return _copied, (self.inner.root, self.fault if self.armed else "", None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OddStore) and other.inner == self.inner

    def allows(self, key: str) -> None:
        if self.armed and self.fault.startswith("chunks") and KEY_START in key:
            raise KeyError(f"{key}:\nno chunk")
        if self.armed and self.fault == "closed":
            raise PermissionError(f"403 for {key}\nrequest 7")

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        found = await self.inner.get(key, prototype, byte_range)
        if (
            self.armed
            and self.fault == "other"
            and self.is_copy
            and found is not None
            and "zarr.json" not in key
        ):
            return prototype.buffer.from_bytes(bytes(len(found)))
        if not (self.armed and self.fault == "sticky"):
            return found
        place = key, repr(byte_range)
        if self.read.get(place) is None:
            self.read[place] = found
        return self.read[place]

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, where) for key, where in key_ranges]

    async def exists(self, key: str) -> bool:
        return await self.inner.exists(key)

    async def set(self, key: str, value: Buffer) -> None:
        self.allows(key)
        if not (self.armed and self.fault == "drops"):
            await self.inner.set(key, value)

    async def delete(self, key: str) -> None:
        self.allows(key)
        if self.armed and self.fault == "keeps":
            raise PermissionError("this key may not delete")
        await self.inner.delete(key)

    def list(self) -> AsyncIterator[str]:
        return self.inner.list()

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        return self.inner.list_prefix(prefix)

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        return self.inner.list_dir(prefix)


def _copied(root: Path, fault: str, lock: Any) -> OddStore:
    if fault == "unloadable":
        raise ImportError("no module named nobody")
    if fault == "emptied":
        root = Path(tempfile.mkdtemp(prefix="odd-store-"))
    if fault.endswith("apart"):  # it holds what the other does, as a copy in memory would
        other = Path(tempfile.mkdtemp(prefix="odd-store-"))
        for file in [file for file in root.rglob("*") if file.is_file()]:
            (other / file.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
            (other / file.relative_to(root)).write_bytes(file.read_bytes())
        root = other
    copy = OddStore(root, fault)
    copy.arm()
    copy.is_copy = True
    return copy


class ElsewhereStore(LocalStore):
    """Files, but those of a pickled copy are in a folder of its own."""

    def __reduce__(self) -> Any:
        return ElsewhereStore, (Path(tempfile.mkdtemp(prefix="odd-store-")),)


def scatter(folder: str) -> None:
    """Have a process keep its `ScatteredFileSystem` in that folder."""
    os.environ["SCATTERED"] = folder


class ScatteredFileSystem(LocalFileSystem):
    """Each process has files of its own, as hosts have with a disk each."""

    protocol = "scattered"

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        path = path.removeprefix("scattered://").rstrip("/")
        own = f"{os.environ['SCATTERED']}/{os.getpid()}"
        return path if path.startswith(own) else f"{own}/{path.lstrip('/')}"


fsspec.register_implementation("scattered", ScatteredFileSystem, clobber=True)
