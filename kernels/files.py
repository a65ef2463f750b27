"""How files are opened whose bytes are read: without waiting for what else may stand where a file is expected."""

from __future__ import annotations

import os
import stat

READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""For reading at offsets. Without the last, opening a pipe waits until somebody writes to it, which may be never; with
it, and for files it means nothing, reading the pipe fails at once."""

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotAFileError(OSError):
    """What was found where a file is expected, in words."""


def open_file(path: str | os.PathLike[str]) -> int:
    """The descriptor of a file, for reading. Raises NotAFileError, and what the system refuses."""
    try:
        descriptor = os.open(path, READ_FLAGS)
    except BlockingIOError:  # another process has a lease on it, and gives that up for who waits
        descriptor = os.open(path, READ_FLAGS & ~os.O_NONBLOCK)
    try:
        check_is_file(os.fstat(descriptor))
        os.set_blocking(descriptor, True)  # a file that has to be fetched from tape is waited for
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_at(descriptor: int, target: memoryview, offset: int) -> int:
    """Read from a file that was opened by `READ_FLAGS` alone; how many bytes, 0 at the end."""
    try:
        return os.preadv(descriptor, [target], offset)
    except BlockingIOError:
        os.set_blocking(descriptor, True)  # as in `open_file`
        return os.preadv(descriptor, [target], offset)


def check_is_file(found: os.stat_result) -> None:
    """Raise NotAFileError where something is no regular file."""
    if not stat.S_ISREG(found.st_mode):
        raise NotAFileError(f"it is {KINDS.get(stat.S_IFMT(found.st_mode), 'something else')} and no file")
