"""Files of the system: opened and read without ever waiting for something else, such as a pipe, that stands where one
is expected; and what tells that one was written to while it was in use.

Two looks of one process at a file compare its length, the time of its last modification, and the time of its last
change of status, which whoever writes to a file cannot set back. That also changes with the file's mode, owner or
number of hard links, and counts as a change: nothing else is left of a rewrite after which the first time was put back.
Looks of two hosts compare length and modification time alone, since each may get the rest from elsewhere. Numbers of
inodes decide nothing: file systems in user space, FAT and some network shares make them up anew.

What stays unnoticed: stores through a memory map until the system takes note of them, a single call that was writing
when the first look was taken, a change by another host that a network file system does not show yet, a second write
within one tick of a clock as coarse as FAT's, and a link that is turned to another file of the same length and times.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""For reading at offsets. O_NONBLOCK means nothing for files. Without it opening a pipe blocks until somebody writes to
it, which may be never; with it, reading the pipe fails at once."""

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

TICK_SECONDS = 0.02
"""Longer than local file systems take to give a written file another time: up to 10 ms on Linux, the period of its
clock."""

TIME_STEPS_NS = (100, 10**3, 10**6, 10**9, 2 * 10**9)
"""To which file systems round times down: Windows shares, some servers, SFTP, FAT."""


class NotAFileError(OSError):
    """Something else stands where a file is expected; the message names it."""


def open_file(path: str | os.PathLike[str]) -> int:
    """The descriptor of a file, for reading. Raises NotAFileError, and what the system refuses."""
    descriptor = open_anything(path)
    try:
        check_is_file(os.fstat(descriptor))
        os.set_blocking(descriptor, True)  # wait for a file that has to be fetched from tape
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_anything(path: str | os.PathLike[str]) -> int:
    """As `open_file`, but without the calls that find out what it is: for many small files they cost time, and reading
    something else fails. `read_at` reads from it."""
    try:
        return os.open(path, READ_FLAGS)
    except BlockingIOError:  # another process has a lease on it, and gives it up to an open that waits
        return os.open(path, READ_FLAGS & ~os.O_NONBLOCK)


def read_file(path: str | os.PathLike[str]) -> bytes:
    """All of a small file. Raises as `open_file`."""
    with os.fdopen(open_file(path), "rb") as file:
        return file.read()


def first_bytes(path: Path, nbytes: int) -> bytes:
    """How a regular file begins; nothing where it is none, or cannot be read."""
    try:
        if not path.is_file():
            return b""
        with open(path, "rb") as file:
            return file.read(nbytes)
    except OSError:
        return b""


def read_at(descriptor: int, target: memoryview, offset: int) -> int:
    """Read from a file that was opened with `READ_FLAGS` alone, as by `open_anything`; returns how many bytes, 0 at the
    end."""
    try:
        return os.preadv(descriptor, [target], offset)
    except BlockingIOError:
        os.set_blocking(descriptor, True)  # as in `open_file`
        return os.preadv(descriptor, [target], offset)


REMEDIES = {
    errno.ENOSPC: "free room there, or names of files where those ran out (df -i), and run it again",
    errno.EDQUOT: "free room there or raise the quota, and run it again",
    errno.EFBIG: "the file system or a limit (ulimit -f) allows no longer file: raise that, and run it again",
    errno.EROFS: "make the file system writable, and run it again",
    errno.EIO: "see that the disk is whole, and run it again",
    errno.EACCES: "give this process that permission, or choose another path",
}
"""What to do where storage fails or is closed to us, by the number of the system's error."""
REMEDIES[errno.EPERM] = REMEDIES[errno.EACCES]


def with_remedy(error: OSError) -> str:
    """What an error says, and what to do about it where storage fails."""
    return f"{error}{_remedy(error)}"


def reason_with_remedy(error: OSError) -> str:
    """The same without the error's number and path, for a message that names the path itself."""
    return f"{error.strerror or error}{_remedy(error)}"


def _remedy(error: OSError) -> str:
    remedy = REMEDIES.get(error.errno or 0)
    return f"; {remedy}" if remedy else ""


def sync_files(paths: Sequence[str | os.PathLike[str]], root: str | os.PathLike[str]) -> None:
    """Force files to disk, and all folders from theirs up to ``root``, which they lie below: a power cut leaves a file
    only where it leaves the name of each folder on the way to it.

    One that is not there is left out, since somebody has removed it; its folder is forced to disk all the same. Raises
    OSError, as where the disk failed to take what was written earlier.
    """
    for path in paths:
        _sync(path, os.O_RDONLY)
    top = os.fspath(root)
    folders = dict.fromkeys(os.path.dirname(os.fspath(path)) for path in paths)
    waiting = list(folders)
    while waiting:
        folder = waiting.pop()
        above = os.path.dirname(folder)
        if len(folder) > len(top) and above not in folders:
            folders[above] = None
            waiting.append(above)
    for folder in folders:
        sync_folder(folder)


AT_FDCWD = -100
RENAME_EXCHANGE = 2
"""Of Linux's ``fcntl.h``."""


def exchange(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Let two files or folders of one file system swap their names in one step, so that neither name is ever without
    one. Returns False, with nothing changed, where the system or the file system cannot: Linux can since 3.15, on ext4,
    XFS, Btrfs, tmpfs, overlays and more, but not on NFS or SMB. Raises OSError for all else."""
    renameat2 = _renameat2()
    if renameat2 is None:
        return False
    if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), os.fspath(one), None, os.fspath(other))


@functools.cache
def _renameat2() -> Any | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
        function.restype = ctypes.c_int
    return function


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Force the names in a folder to disk. Raises OSError."""
    try:
        _sync(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # one that may be written and not read cannot be opened, and so not forced alone
        os.sync()


def _sync(path: str | os.PathLike[str], flags: int) -> None:
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        sync_descriptor(descriptor)
    except OSError as error:  # which does not know what it is about
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        os.close(descriptor)


def sync_descriptor(descriptor: int) -> None:
    """Force an open file to disk. Raises OSError."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems in user space have nothing to force, and say so.
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise


def check_is_file(found: os.stat_result) -> None:
    """Raise NotAFileError where something is no regular file."""
    if not stat.S_ISREG(found.st_mode):
        raise NotAFileError(f"it is {KINDS.get(stat.S_IFMT(found.st_mode), 'something else')} and no file")


def same_time(one: int, other: int) -> bool:
    """Whether two times of one file, nanoseconds since the epoch, differ by no more than rounding on one of two
    hosts."""
    low, high = sorted((one, other))
    return low == high or any(high // step * step == low for step in TIME_STEPS_NS)


def let_a_tick_pass(
    since: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once files that were looked at by ``since``, as ``clock`` gives it, would get another time when written
    to."""
    left = since + TICK_SECONDS - clock()
    if left > 0:
        sleep(left)
