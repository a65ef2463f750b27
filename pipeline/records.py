"""The record of finished pieces, with which a count or a sum that was stopped goes on where it stood.

A file of lines, each one JSON object: the first says what is computed, each other what one finished piece gave. Every
line ends with a checksum of the rest, so that what a crash tore, or storage damaged, is not taken for a result: it is
passed over, and its piece is computed again. Only the submitting process appends. A line is in the system's hands when
`append` returns, so that the end of a process loses none; a thread of its own forces lines to disk, once in
`SYNC_SECONDS` at most, and `close` returns when all are there.

The file is locked for as long as a run has it open. Runs of other hosts are kept out where the file system shows them
the lock, as NFS does.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard

from tilewright.kernels.arguments import shown
from tilewright.pipeline.config import path_text
from tilewright.pipeline.errors import OptionError, OutputExistsError, StoreError
from tilewright.pipeline.sealed_lines import sealed, unsealed
from tilewright.pipeline.store.locks import unlock_folder
from tilewright.pipeline.store.remote.files import is_url, without_local_protocol
from tilewright.pipeline.transfer.files import sync_descriptor, sync_folder

VERSION = 1
"""Of the lines' format, and of what they mean."""

SYNC_SECONDS = 0.5
"""The least time between two forced writes; what a power cut takes is what was finished since the last."""

SCAN_NBYTES = 2**20

COMPRESSION_LEVEL = 1

_BEGIN = b'{"version": '
"""How every record begins: a file that does not is somebody's own."""

ANEW = "start over with --no-resume (resume=False), which forgets what it holds, or give another place"
"""What to do about a record that cannot be gone on with."""


class Line(NamedTuple):
    """Where one line stands in the file."""

    offset: int
    nbytes: int


class Record:
    """An open record, locked for this run: `open_record` gives it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._head: dict[str, Any] = {}
        self._torn = False
        """Whether the file ends in the middle of a line."""
        self._lock = threading.Condition()
        self._unsynced = False
        self._closing = False
        self._problem: OSError | None = None
        self._syncing = threading.Thread(target=self._sync, name="tilewright-record", daemon=True)

    def _begin(self, head: dict[str, Any], resume: bool) -> None:
        """Make sure that the first line says what is computed. Raises OptionError where it says something else."""
        self._head = {"version": VERSION, **head}
        begins = os.pread(self._descriptor, len(_BEGIN), 0)
        if begins != _BEGIN[: len(begins)]:
            raise OptionError(f"{self.path} holds something else than finished pieces; give another place")
        if not resume:
            os.ftruncate(self._descriptor, 0)
        line, data = next(self._lines(), (Line(0, 0), b""))
        found = self._parsed(line, data)
        if found is None and os.fstat(self._descriptor).st_size == len(data):
            # New, or its run was killed before the first line was whole.
            os.ftruncate(self._descriptor, 0)
            self._write(self._head)
            sync_descriptor(self._descriptor)
            sync_folder(self.path.parent)
        else:
            self._check_head(found, "the first")
        self._torn = not self._ends_whole()
        self._syncing.start()

    def _check_head(self, found: dict[str, Any] | None, which: str) -> None:
        if found is None:
            raise StoreError(f"{which} line of {self.path} is damaged, so nobody knows what it is of; {ANEW}")
        head = self._head
        differing = [name for name in head if found.get(name) != head[name]]
        if not differing:
            return
        said = ", ".join(
            f"{name} is {_shown(found.get(name))} there and {_shown(head[name])} here" for name in differing
        )
        raise OptionError(f"{self.path} keeps pieces of other work: {said}; {ANEW}")

    def entries(self) -> Iterator[tuple[Line, dict[str, Any]]]:
        """What earlier runs finished, in the order in which they did, without what is damaged.

        Raises OptionError and StoreError as for the first line where the lines of another record were put behind these.
        """
        lines = self._lines()
        next(lines, None)
        for line, data in lines:
            entry = self._parsed(line, data)
            if data.startswith(_BEGIN):
                self._check_head(entry, "another first")
            elif entry is not None:
                yield line, entry

    def entry(self, line: Line) -> dict[str, Any]:
        """One entry again. Raises StoreError if it changed under our lock."""
        data = os.pread(self._descriptor, line.nbytes, line.offset)
        entry = self._parsed(line, data)
        if entry is None:
            raise StoreError(f"{self.path} was written to while it was in use; {ANEW}")
        return entry

    def _lines(self) -> Iterator[tuple[Line, bytes]]:
        """Every line, without its end; the last may have none."""
        offset, left = 0, b""
        while data := os.pread(self._descriptor, SCAN_NBYTES, offset + len(left)):
            *lines, left = (left + data).split(b"\n")
            for line in lines:
                yield Line(offset, len(line)), line
                offset += len(line) + 1
        if left:
            yield Line(offset, len(left)), left

    def _parsed(self, line: Line, data: bytes) -> dict[str, Any] | None:
        return unsealed(data.decode(errors="replace")) if len(data) == line.nbytes else None

    def _ends_whole(self) -> bool:
        size = os.fstat(self._descriptor).st_size
        return os.pread(self._descriptor, 1, size - 1) == b"\n"

    def append(self, entry: dict[str, Any]) -> None:
        """Note a finished piece; the end of this process does not lose it any more.

        Raises StoreError if the disk is full or refuses the write, or has refused to keep what was written before.
        """
        with self._lock:
            if self._problem is not None:
                raise self._cannot_write(self._problem)
            try:
                self._write(entry)
            except OSError as error:
                raise self._cannot_write(error) from error
            self._unsynced = True
            self._lock.notify()

    def _write(self, entry: dict[str, Any]) -> None:
        line = (b"\n" if self._torn else b"") + sealed(entry).encode() + b"\n"
        self._torn = True
        written = os.pwrite(self._descriptor, line, os.fstat(self._descriptor).st_size)
        if written != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False

    def _cannot_write(self, error: OSError) -> StoreError:
        return StoreError(
            f"cannot write the record of finished pieces, {self.path}: {error.strerror or error}"
        )

    def _sync(self) -> None:
        """Force lines to disk while others are appended."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._unsynced or self._closing)
                if self._closing:
                    return
                self._unsynced = False
            try:
                sync_descriptor(self._descriptor)
            except OSError as error:
                with self._lock:
                    self._problem = error
                return
            with self._lock:
                self._lock.wait_for(lambda: self._closing, SYNC_SECONDS)

    def close(self) -> None:
        """Force all lines to disk and let other runs have the file. Raises StoreError if the disk refuses."""
        with self._lock:
            if self._descriptor < 0:
                return
            self._closing = True
            self._lock.notify()
        if self._syncing.is_alive():
            self._syncing.join()
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if self._problem is not None:
                raise self._cannot_write(self._problem)
            sync_descriptor(descriptor)
        except OSError as error:
            raise self._cannot_write(error) from error
        finally:
            unlock_folder(descriptor)


@contextmanager
def open_record(path: Path, head: dict[str, Any], *, resume: bool = True) -> Iterator[Record]:
    """The record at ``path``, which is made if there is none, for as long as the block runs.

    head: what is computed, as JSON types: all that decides what a piece gives and is not in its entry. ``resume`` false
    forgets what the file held.

    Raises
    ------
    OptionError
        It is of other work: another head.
    OutputExistsError
        Another run has it open.
    StoreError
        Its folder is not there; it cannot be opened, locked or written; or its first line is damaged.
    """
    record = Record(path, _locked(path))
    try:
        try:
            record._begin(head, resume)
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise record._cannot_write(error) from error
        yield record
    finally:
        record.close()


def place_of(state: Any) -> Path:
    """Where a caller wants finished pieces to be kept. Raises OptionError for what is no path."""
    if text := path_text(state):
        if is_url(text):
            raise OptionError(
                f"state={shown(state)} is a URL; finished pieces are kept in a file that grows, which object stores do"
                " not have: give a folder of this machine"
            )
        return Path(without_local_protocol(text))
    raise OptionError(f"state={shown(state)} is no path; give one of this machine, or None to keep nothing")


def remove_record(path: Path) -> None:
    """Delete a record that is no longer needed, unless another run has it open by now."""
    try:
        descriptor = _locked(path, create=False)
    except (StoreError, OutputExistsError):
        return
    try:
        with suppress(FileNotFoundError):
            path.unlink()
    finally:
        unlock_folder(descriptor)


def _locked(path: Path, *, create: bool = True) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    while True:
        try:
            descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise StoreError(
                f"cannot open the record of finished pieces, {path}: {error.strerror}; choose another place, or make"
                " this one writable"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass  # its run has just removed it
        except BlockingIOError as error:
            os.close(descriptor)
            raise OutputExistsError(
                f"another run has {path} open, in which it keeps its finished pieces; wait for it, or give another"
                " place"
            ) from error
        except OSError as error:
            os.close(descriptor)
            raise StoreError(
                f"cannot lock {path}: {error.strerror}; give a place whose file system has locks"
            ) from error
        os.close(descriptor)


def _shown(value: Any) -> str:
    return "unknown" if value is None else json.dumps(value)


def packed(numbers: np.ndarray) -> str:
    """Integers, of one dimension, as text that is as short as their values allow: their bytes, little-endian and no
    wider than the largest needs, compressed, in base64."""
    narrow = np.min_scalar_type(numbers.max()) if len(numbers) and numbers.min() >= 0 else numbers.dtype
    dtype = np.dtype(narrow).newbyteorder("<")
    return f"{dtype.str} {packed_bytes(numbers.astype(dtype).tobytes())}"


def unpacked(text: str) -> np.ndarray:
    """The integers of `packed`, in its dtype."""
    dtype, _, data = text.partition(" ")
    return np.frombuffer(unpacked_bytes(data), np.dtype(dtype))


_of_thread = threading.local()
"""Each thread's compressor: to make one takes longer than to compress the few bytes of an entry."""


def packed_bytes(data: bytes) -> str:
    compressor = getattr(_of_thread, "compressor", None)
    if compressor is None:
        compressor = _of_thread.compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL)
    return base64.b64encode(compressor.compress(data)).decode()


def unpacked_bytes(text: str) -> bytes:
    data: bytes = zstandard.ZstdDecompressor().decompress(base64.b64decode(text))
    return data
