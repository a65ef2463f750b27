"""Who writes to an array: other runs are kept out by a lock where it lies in a folder, else by a lease.

The lock keeps out runs of this host. A lease is an object beside the array that names its run's process, which writes
it anew every `BEAT_SECONDS`. A run that finds one waits for the next beat: where it comes, the other lives; where it
does not, the other is over. No clocks are compared, and of a process of this machine it is seen at once. It is written
only if it is still as it was seen, so that of two runs which begin within the same moment one gets in; a run that was
taken for dead, and is not, finds that at its next beat. Stores that know no such conditions may let both in: there the
one whose record is no longer the newest at its end is told so (`journal.py`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tilewright.pipeline.errors import OutputExistsError, StoreError
from tilewright.pipeline.transfer.files import sync_folder

if TYPE_CHECKING:  # they would import zarr, which text does without
    from tilewright.pipeline.store.objects import Objects
    from tilewright.pipeline.store.remote.conditional import Tagged

logger = logging.getLogger(__name__)

LEASE_NAME = "tilewright-writer.json"

BEAT_SECONDS = 10.0
"""An object is written so often while a run goes on."""
PATIENCE_BEATS = 2.5
"""How many beats a run waits for, of which one may be late."""

TURN_SECONDS, TURN_STEP = 10.0, 0.01
"""How long a process waits for its turn to change a small file, which takes others milliseconds; and how often it
looks."""

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What file systems answer that have no locks, such as Lustre where it is mounted without."""
WITHOUT_LOCKS = (
    "this file system has no locks on folders, by which a second run is kept out; have it mounted with them (Lustre:"
    " -o flock, or localflock for those of one host), or choose another place"
)

_held: set[str] = set()
"""The leases of this process."""


def lock_folder(path: Path, *, create: bool = False) -> int:
    """Keep other runs of this host out of a growing output, until the returned descriptor goes to `unlock_folder`.

    Runs of other hosts only where the file system shows them a lock on a folder, which NFS does not.

    ``create`` makes the folder where there is none: it is locked before anything is in it, so that only one of several
    runs that begin at once writes there.

    Raises
    ------
    OutputExistsError
        Another run writes there, or what stands there is no folder. A link to a folder is none: what it leads to would
        stay where it is, and the link would get C's name.
    OSError
        There is nothing, or it cannot be opened or made.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        if create:
            made = [folder for folder in path.absolute().parents if not folder.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in made:  # or a power cut may take all that comes to lie in it
                sync_folder(folder.parent)
            with suppress(FileExistsError):  # not exist_ok, which looks again: it may be gone by then
                path.mkdir()
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            if create:
                continue  # the run that had it has just given it its name, or removed it
            raise
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise not_ours(path) from error
            raise
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_locked_by(descriptor, path):
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise OutputExistsError(
                f"output: another run is writing {path}; wait for it, or choose another path"
            ) from error
        except OSError as error:
            os.close(descriptor)
            if error.errno in NO_LOCKS:
                raise OSError(error.errno, f"{error.strerror}: {WITHOUT_LOCKS}", os.fspath(path)) from error
            raise
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # before we locked it, another run renamed or removed what we opened


def unlock_folder(descriptor: int) -> None:
    """Give up the lock of `lock_folder`, or another of flock's. Closing alone does not while a child of this process,
    forked meanwhile, has the descriptor too."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


@contextmanager
def in_turn(
    folder: Path, seconds: float = TURN_SECONDS, sleep: Callable[[float], None] = time.sleep
) -> Iterator[None]:
    """Processes of this host that change a small file of a folder do so one after the other, each in such a block.

    Where the file system has no locks on folders, as NFS, nobody is kept out. Raises TimeoutError where another does
    not end within so many seconds, OSError where the folder cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(max(1, round(seconds / TURN_STEP))):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                sleep(TURN_STEP)
            except OSError:  # no locks here
                break
        else:
            raise TimeoutError(f"another process has kept {folder} locked for {seconds:g} s")
        yield
    finally:
        with suppress(OSError):
            unlock_folder(descriptor)


def is_locked_by(descriptor: int, path: Path) -> bool:
    """Whether the folder or file that a descriptor has locked is the one that stands at ``path``."""
    return stands_at(path, os.fstat(descriptor))


def stands_at(path: Path, found: os.stat_result) -> bool:
    """Whether the folder or file that was found is still the one at ``path``."""
    try:
        return os.path.samestat(found, path.lstat())
    except FileNotFoundError:
        return False


def not_ours(partial: Path) -> OutputExistsError:
    return OutputExistsError(
        f"output: {partial} is needed for the growing array and holds something else; move it away"
    )


class Lease:
    """The right to write to an array, until `release`."""

    def __init__(self, objects: Objects, token: str, before: Tagged | None) -> None:
        """before: what was there when nobody had it."""
        self._objects, self._token, self._seen = objects, token, before
        self._beat = 0
        self._lost: OutputExistsError | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tilewright-lease", daemon=True)

    def renew(self) -> None:
        """Write the object now. Raises OutputExistsError where another run has taken it, StoreError."""
        self._beat += 1
        holder = {**_this_process(), "token": self._token, "beat": self._beat}
        data = json.dumps(holder).encode()
        written = self._objects.put_if(LEASE_NAME, data, self._seen)
        if written is None:
            there = self._objects.tagged(LEASE_NAME)
            other = _said_by(there)
            if other is not None and other.get("token") != self._token:
                self._lost = _written_by(self._objects, other)
                raise self._lost
            # It is our own, of an earlier beat whose answer was lost, or somebody has removed it.
            written = self._objects.put_if(LEASE_NAME, data, there)
            if written is None:
                raise _written_by(self._objects, _said_by(self._objects.tagged(LEASE_NAME)) or {})
        self._seen = written

    def begin(self) -> None:
        _held.add(self._token)
        try:
            self.renew()
        except BaseException:
            _held.discard(self._token)
            raise
        self._thread.start()

    @property
    def is_exclusive(self) -> bool:
        """Whether the store refuses another run that asks for it in the same moment."""
        return self._seen is None or not self._seen.unconditional

    def check(self) -> None:
        """Raise OutputExistsError where another run has taken it meanwhile: this one was taken for dead."""
        if self._lost is not None:
            raise self._lost

    def _run(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self.renew()
            except OutputExistsError:
                if self._lost is not None:
                    return  # said by `check`
            except StoreError as error:  # if that lasts, tiles cannot be written either
                logger.debug("%s", error)

    def release(self) -> None:
        """Let other runs write there."""
        self._ended.set()
        self._thread.join()
        _held.discard(self._token)
        if self._lost is not None:
            return
        try:
            self._objects.drop(LEASE_NAME)
        except StoreError as error:
            logger.debug("the next run will wait to see that this one is over: %s", error)


def take_lease(
    objects: Objects,
    say: Callable[[str], None] = logger.warning,
    wait: Callable[[float], object] = time.sleep,
) -> Lease:
    """Wait, if need be, to see that no other run writes there.

    say: is told what is waited for, and where a run that begins at once is not kept out. wait: returns after so many
    seconds.

    Raises
    ------
    OutputExistsError
        Another run writes there.
    StoreError
        The store cannot be read or written.
    """
    there = objects.tagged(LEASE_NAME)
    found = _said_by(there)
    if found is not None and _is_over(found) is None:
        seconds = PATIENCE_BEATS * BEAT_SECONDS
        say(f"waiting {seconds:.0f} s to see whether the run that wrote to {objects.name} is over")
        wait(seconds)
        there = objects.tagged(LEASE_NAME)
        if _said_by(there) not in (None, found):
            raise _written_by(objects, found)
    elif found is not None and not _is_over(found):
        raise _written_by(objects, found)
    lease = Lease(objects, uuid.uuid4().hex, there)
    lease.begin()
    if not lease.is_exclusive:
        say(
            f"{objects.name}: its storage knows no conditional writes, so that another run that begins in the same"
            " moment is not kept out; of two, the first one ends with an error; start one at a time"
        )
    return lease


def _written_by(objects: Objects, holder: dict[str, Any]) -> OutputExistsError:
    return OutputExistsError(
        f"output: another run is writing {objects.name} (process {holder.get('pid')} on {holder.get('host')}); wait for"
        " it, or choose another path"
    )


def _said_by(there: Tagged | None) -> dict[str, Any] | None:
    """What the object says; None where there is none, or it says nothing."""
    try:
        found = json.loads(there.data) if there is not None and there.data else None
    except ValueError:
        return None
    return found if isinstance(found, dict) and found else None


def _this_process() -> dict[str, Any]:
    process = psutil.Process()
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": process.pid,
        "started": process.create_time(),
    }


def _machine() -> str:
    """What tells apart machines, their starts, and containers whose processes have numbers of their own."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}" if boot.exists() else ""


def _is_over(holder: dict[str, Any]) -> bool | None:
    """Whether the run that a lease names is over; None where that cannot be seen from here."""
    machine = _machine()
    if not machine or holder.get("machine") != machine:
        return None
    if holder.get("pid") == os.getpid():
        return holder.get("token") not in _held
    try:
        return bool(psutil.Process(holder.get("pid")).create_time() != holder.get("started"))
    except (psutil.Error, TypeError, ValueError):
        return True
