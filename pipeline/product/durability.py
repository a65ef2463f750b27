"""What tiles store is forced to disk, batch after batch beside the work, and then the record says so.

A batch is all that has been stored since the one before it began, so that a slow disk gets few large ones (group
commit: DeWitt et al., "Implementation Techniques for Main Memory Database Systems", SIGMOD 1984). A file is forced to
disk on the host that wrote it, whose memory may hold what no other host can see.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

import psutil
import zarr

from tilewright.pipeline.cluster.answers import ask_all
from tilewright.pipeline.errors import ClusterError, StoreError
from tilewright.pipeline.plan.told import TileReport
from tilewright.pipeline.product.ledger import Ledger, Stored
from tilewright.pipeline.store.chunks import METADATA_NAMES
from tilewright.pipeline.store.objects import folder_of, object_path
from tilewright.pipeline.transfer.files import sync_files, sync_folder

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

SYNC_THREADS = 8
"""Files that are forced to disk at once: file systems join what they write for them."""

Sync = Callable[[str, Sequence[str]], None]
"""Forces files to disk that a worker, given by its address, has written. Raises OSError or StoreError."""

Settled = tuple[int, Stored]
"""A tile's index, and what was recorded of it when it was stored."""


def sync_many(root: str, paths: Sequence[str]) -> None:
    """`sync_files`, on several threads."""
    parts = [paths[start::SYNC_THREADS] for start in range(SYNC_THREADS)]
    with ThreadPoolExecutor(SYNC_THREADS, "tilewright-sync") as pool:
        # Each folder comes last: it is forced to disk by the thread whose files lie in it, once they are.
        for _ in pool.map(partial(sync_files, root=root), parts):
            pass


def sync_begun(growing: Path) -> None:
    """Force the metadata of an array that grows in a folder to disk, and the folder's name: to whoever goes on after a
    power cut, finished tiles are worth nothing without. Raises StoreError."""
    try:
        sync_files([growing / name for name in METADATA_NAMES.values()], growing)
        sync_folder(growing.absolute().parent)
    except OSError as error:
        raise StoreError(
            f"output: {growing} cannot be forced to disk: {error}; see that the disk is whole and has room, and run it"
            " again (--durability none does without)"
        ) from error


def sync_on_hosts(client: Client, *roots: str) -> Sync:
    """Forces files below any of ``roots`` to disk on the host of the worker that wrote them."""

    def sync(worker: str, paths: Sequence[str]) -> None:
        left = list(paths)
        for root in roots:
            below = [path for path in left if path.startswith(f"{root}{os.sep}")]
            left = [path for path in left if not path.startswith(f"{root}{os.sep}")]
            if below:
                sync_below(root, worker, below)
        assert not left, "each lies below one"

    def sync_below(root: str, worker: str, paths: Sequence[str]) -> None:
        if not _is_here(worker):
            try:
                if ask_all(client, sync_many, root, list(paths), workers=[worker]):
                    return
            except ClusterError as error:
                logger.debug("%s cannot force its files to disk: %s", worker, error)
        # The worker is of this host, or gone. In the latter case no more can be done: a file system of several hosts
        # that writes behind a file's closing loses with a host what that had not sent.
        sync_many(root, paths)

    return sync


@cache
def _addresses_here() -> frozenset[str]:
    found = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return frozenset(found | {"localhost", socket.gethostname()})


def _host_of(worker: str) -> str:
    from distributed.comm import get_address_host

    host: str = get_address_host(worker)
    return host


def _is_here(worker: str) -> bool:
    """Whether a worker is a process of this host."""
    return worker.startswith("inproc://") or _host_of(worker) in _addresses_here()


class Durability:
    """Forces tiles to disk on a thread of its own. Use it as a context manager: what is left is waited for by
    `finish`; an error ends it after the batch under way.

    settle: told of the tiles of a batch once they are on disk. lose: told of them where that fails for any.
    """

    def __init__(
        self,
        sync: Sync,
        settle: Callable[[Sequence[Settled]], None],
        lose: Callable[[Sequence[Settled]], None],
    ) -> None:
        self._sync, self._settle, self._lose = sync, settle, lose
        self._waiting: SimpleQueue[tuple[Settled, str, Sequence[str]] | None] = SimpleQueue()
        self._error: BaseException | None = None
        # Who is silent is known there too (`heartbeats_of`): a scheduler that has stopped is not waited for.
        own = copy_context()
        self._thread = Thread(target=own.run, args=(self._run,), name="tilewright-durability", daemon=True)

    def __enter__(self) -> Durability:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._waiting.put(None)
        self._thread.join()

    def add(self, tile: Settled, worker: str, paths: Sequence[str]) -> None:
        """Take note that a worker has stored a tile in these files. Raises StoreError where earlier ones could not be
        forced to disk."""
        self._raise()
        self._waiting.put((tile, worker, paths))

    def finish(self) -> None:
        """Wait until all tiles are on disk, and recorded so. Raises StoreError where they are not."""
        self._waiting.put(None)
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if isinstance(self._error, StoreError):
            raise self._error
        if self._error is not None:
            raise StoreError(
                f"output: tiles cannot be forced to disk: {self._error}; see that the disk is whole and has room, and"
                " run it again, which computes those once more (--durability none does without)"
            ) from self._error

    def _run(self) -> None:
        ended = False
        while not ended:
            batch = [self._waiting.get()]
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            tiles = [one for one in batch if one is not None]
            ended = len(tiles) < len(batch)
            if not tiles or self._error is not None:
                continue
            try:
                self._force(tiles)
            except BaseException as error:  # told to whoever stores the next tile, or waits for the last
                self._error = error

    def _force(self, tiles: Sequence[tuple[Settled, str, Sequence[str]]]) -> None:
        of_hosts: dict[str, tuple[str, list[str]]] = {}
        for _, worker, paths in tiles:
            host = "" if _is_here(worker) else _host_of(worker)
            of_hosts.setdefault(host, (worker, []))[1].extend(paths)
        try:
            for worker, paths in of_hosts.values():
                self._sync(worker, paths)
        except OSError:
            with suppress(StoreError):  # the record may lie on the same disk
                self._lose([tile for tile, _, _ in tiles])
            raise
        self._settle([tile for tile, _, _ in tiles])


@dataclass
class Keeping:
    """What is kept of tiles as they are stored: a record, if the output has a place for one, and durability where that
    was asked for and the output is in files."""

    ledger: Ledger | None
    array: zarr.Array[Any]
    durability: Durability | None = None
    beside: zarr.Array[Any] | None = None
    """The array of the numbers of pairs."""

    def record(self, report: TileReport) -> None:
        if self.ledger is None:
            return
        stored = Stored(report.stored, report.found, synced=False, counts=report.counts)
        self.ledger.record(report.index, stored)
        self._settle(report.index, report.worker, stored)

    def settle(self, tiles: Mapping[int, Stored]) -> None:
        """Force tiles of an earlier run to disk, from this host: nobody knows which worker wrote them."""
        for index, stored in tiles.items():
            self._settle(index, "inproc://", stored)

    def _settle(self, index: int, worker: str, stored: Stored) -> None:
        if self.durability is not None:
            every = [(self.array, one) for one in stored.objects]
            if self.beside is not None:
                every += [(self.beside, one) for one in stored.counts]
            paths = [
                str(object_path(array, one.place).absolute())
                for array, one in every
                if one.nbytes and folder_of(array) is not None
            ]
            self.durability.add((index, stored), worker, paths)

    def finish(self) -> None:
        """Wait until all is on disk, and keep the checksums with the product."""
        if self.durability is not None:
            self.durability.finish()
        if self.ledger is not None:
            self.ledger.keep()

    def removed(self, folder: Path | None) -> None:
        """Delete the record, as `Ledger.remove`."""
        if self.ledger is not None:
            self.ledger.remove(folder)
