"""Where the record of an output's finished tiles lies: a file that grows, or objects of a store that cannot append.

An object store takes whole objects only. So lines that come within `SEGMENT_SECONDS` make one object, a *segment*, and
who opens the journal anew writes all that is to stay as the first segment of a new *generation*, and then removes the
older ones: what is read is the newest generation that has its first segment, up to the first that is missing.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import zarr

from tilewright.pipeline import config
from tilewright.pipeline.errors import OutputExistsError
from tilewright.pipeline.store.objects import Objects, folder_of, objects_of
from tilewright.pipeline.transfer.files import sync_folder

logger = logging.getLogger(__name__)

SEGMENT_SECONDS = 5.0
"""The least time between two segments that nobody waits for: a killed client loses the lines of that time."""

SEGMENTS_NAME = "tilewright-ledger"
"""The folder of segments, below the array's path: readers of Zarr know no such keys."""

SEGMENT = re.compile(r"([0-9]{6,})-([0-9a-f]{8})-([0-9]{6,})\.jsonl")


class Journal(Protocol):
    """Lines that are appended and read back. All methods raise StoreError, or OSError, where the storage refuses."""

    name: str
    """For messages."""

    def exists(self) -> bool:
        """Whether there are any lines, or a copy of them, whether or not they can be read now."""

    def read(self) -> bytes | None:
        """All lines; None where there are none."""

    def twin(self) -> bytes | None:
        """All lines of a second copy, where one is kept."""

    def begin(self, data: bytes) -> None:
        """Put these lines in the place of all that was there, durably, and in one step."""

    def append(self, data: bytes, *, sync: bool) -> None:
        """Add lines. sync: they are durable when this returns."""

    def keep(self, name: str, data: bytes) -> None:
        """Put a file, or an object, of that name beside the array's, durably."""

    def close(self) -> None:
        """Add what is left. To be called whatever happened."""

    def remove(self, folder: Path | None = None) -> None:
        """Close and delete the journal. folder: where the array is by now, if that is in files."""


class FileJournal:
    """A file of lines, and a second one with the same, for when somebody removes or damages the first."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path, self._twin_path = path, twin_of(path)
        self._file: Any = None
        self._twin: Any = None

    def exists(self) -> bool:
        return self._path.is_file() or self._twin_path.is_file()

    def read(self) -> bytes | None:
        return _read(self._path)

    def twin(self) -> bytes | None:
        return _read(self._twin_path)

    def begin(self, data: bytes) -> None:
        """The whole file is written: a line appended after one that a crash tore would be lost with it."""
        write_whole(self._twin_path, data)  # first: it is read only where the other is not to be had
        write_whole(self._path, data)
        # Unbuffered, so that a line which could not be written leaves nothing for closing to write.
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 -- lives as long as the run; see close
        self._twin = open(self._twin_path, "ab", buffering=0)  # noqa: SIM115 -- likewise

    def append(self, data: bytes, *, sync: bool) -> None:
        if self._file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if sync:
            os.fsync(self._file.fileno())
        if self._twin is not None:
            try:
                whole = self._twin.write(data) == len(data)
            except OSError:
                whole = False
            if not whole:  # lacking a line that takes back another, it would lie
                self._end_twin()

    def _end_twin(self) -> None:
        if self._twin is not None:
            self._twin.close()
            self._twin = None
        self._twin_path.unlink(missing_ok=True)

    def keep(self, name: str, data: bytes) -> None:
        write_whole(self._path.with_name(name), data)

    def close(self) -> None:
        for file in (self._file, self._twin):
            if file is not None:
                file.close()

    def remove(self, folder: Path | None = None) -> None:
        self.close()
        path = self._path if folder is None else folder / self._path.name
        twin_of(path).unlink(missing_ok=True)  # first: alone it would count
        path.unlink(missing_ok=True)


def twin_of(path: Path) -> Path:
    """Where the second copy of a journal's file lies."""
    return path.with_name(f"{path.stem}.twin{path.suffix}")


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_whole(path: Path, data: bytes | Callable[[BinaryIO], None]) -> None:
    """Put a file in place in one step, durably. data: what it holds, or what writes that. Raises OSError."""
    draft = path.with_suffix(".draft")
    with open(draft, "wb") as file:
        if callable(data):
            data(file)
        else:
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


class _Segment(NamedTuple):
    generation: int
    tag: str
    """Tells apart two runs that began the same generation at once."""
    number: int

    @property
    def key(self) -> str:
        return f"{self.generation:06}-{self.tag}-{self.number:06}.jsonl"


class ObjectJournal:
    """Segments in a folder below an array's path. Threads may append at once."""

    def __init__(self, objects: Objects, check: Callable[[], None] | None = None) -> None:
        """check: raises where this run may write there no more."""
        self.name = f"{objects.name}/{SEGMENTS_NAME}"
        self._check = check
        self._objects = objects
        self._next: _Segment | None = None
        """None while it is not open for writing."""
        self._waiting = bytearray()
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._putting = threading.Lock()
        """Whoever holds it writes the next segment."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tilewright-journal", daemon=True)

    def exists(self) -> bool:
        return bool(self._newest())

    def read(self) -> bytes | None:
        segments = self._newest()
        if not segments:
            return None
        with ThreadPoolExecutor(config.threads("read-threads"), "tilewright-journal") as pool:
            found = list(pool.map(self._objects.get, map(self._key, segments)))
        # What comes behind a missing segment is left out: that may have withdrawn what is said there.
        whole = found[: found.index(None)] if None in found else found
        return b"".join(data for data in whole if data is not None) or None

    def twin(self) -> bytes | None:
        return None

    def _segments(self) -> list[_Segment]:
        found = map(SEGMENT.fullmatch, self._objects.names(SEGMENTS_NAME))
        return sorted(_Segment(int(one[1]), one[2], int(one[3])) for one in found if one is not None)

    def _newest(self) -> list[_Segment]:
        """The segments of the newest generation, in their order, without those behind a gap."""
        segments = self._segments()
        begun = [(one.generation, one.tag) for one in segments if one.number == 0]
        if not begun:
            return []
        its = [one for one in segments if (one.generation, one.tag) == max(begun)]
        return [one for place, one in enumerate(its) if one.number == place]

    def _key(self, segment: _Segment) -> str:
        return f"{SEGMENTS_NAME}/{segment.key}"

    def begin(self, data: bytes) -> None:
        older = self._segments()
        generation = max((one.generation for one in older), default=-1) + 1
        first = _Segment(generation, uuid.uuid4().hex[:8], 0)
        self._objects.put(self._key(first), data)
        self._next = first._replace(number=1)
        for segment in older:
            self._objects.drop(self._key(segment))
        self._thread.start()

    def append(self, data: bytes, *, sync: bool) -> None:
        if self._check is not None:
            self._check()
        with self._changed:
            self._waiting += data
            self._changed.notify()
        if sync:
            self._put_waiting()
        if self._error is not None:
            raise self._error

    def _put_waiting(self) -> None:
        with self._putting:
            with self._changed:
                data = bytes(self._waiting)
            if not data or self._next is None:
                return
            self._objects.put(self._key(self._next), data)
            self._next = self._next._replace(number=self._next.number + 1)
            with self._changed:
                del self._waiting[: len(data)]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
            try:
                self._put_waiting()
            except BaseException as error:  # told to whoever appends next
                self._error = error
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closing, SEGMENT_SECONDS)

    def keep(self, name: str, data: bytes) -> None:
        """Raises OutputExistsError where another run has begun the journal anew meanwhile."""
        now = self._newest()
        ours = self._next
        if ours is not None and now and now[0][:2] != ours[:2] and now[0].generation >= ours.generation:
            raise OutputExistsError(
                f"output: another run has taken {self._objects.name} over; let only one write there at a time"
            )
        self._objects.put(name, data)

    def close(self) -> None:
        """What cannot be written any more is only logged: it is called where an error ends the run, too."""
        self._end()
        try:
            self._put_waiting()
        except Exception as error:
            logger.warning("the next run will compute the last tiles again: %s", error)
        self._next = None

    def _end(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def remove(self, folder: Path | None = None) -> None:
        self._end()
        self._next = None
        # The first segment goes first: without it the others are nothing.
        for segment in sorted(self._segments(), key=lambda one: (one.number, one)):
            self._objects.drop(self._key(segment))


def journal_in(array: zarr.Array[Any], name: str, check: Callable[[], None] | None = None) -> Journal | None:
    """The journal of an array that is written in place, or was; None where its store has no place for one.

    name: of its file, where it is in files. check: raises where this run may write there no more.
    """
    folder = folder_of(array)
    if folder is not None:
        return FileJournal(folder / name)
    objects = objects_of(array)
    return None if objects is None else ObjectJournal(objects, check)
