"""Open and read files without ever waiting for something else, such as a pipe, that stands where a file is expected."""

from __future__ import annotations

import os
import stat

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


def read_at(descriptor: int, target: memoryview, offset: int) -> int:
    """Read from a file that was opened with `READ_FLAGS` alone, as by `open_anything`; returns how many bytes, 0 at the
    end."""
    try:
        return os.preadv(descriptor, [target], offset)
    except BlockingIOError:
        os.set_blocking(descriptor, True)  # as in `open_file`
        return os.preadv(descriptor, [target], offset)


def check_is_file(found: os.stat_result) -> None:
    """Raise NotAFileError where something is no regular file."""
    if not stat.S_ISREG(found.st_mode):
        raise NotAFileError(f"it is {KINDS.get(stat.S_IFMT(found.st_mode), 'something else')} and no file")
