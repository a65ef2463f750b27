"""The lock of a folder that a run writes to, which keeps out other runs of this host."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from tilewright.pipeline.errors import OutputExistsError
from tilewright.pipeline.transfer.files import sync_folder


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
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # before we locked it, another run renamed or removed what we opened


def unlock_folder(descriptor: int) -> None:
    """Give up the lock of `lock_folder`. Closing alone does not while a child of this process, forked meanwhile, has
    the descriptor too."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def is_locked_by(descriptor: int, path: Path) -> bool:
    """Whether the folder that a descriptor has locked is the one that stands at ``path``."""
    return stands_at(path, os.fstat(descriptor))


def stands_at(path: Path, found: os.stat_result) -> bool:
    """Whether the folder that was found is still the one at ``path``."""
    try:
        return os.path.samestat(found, path.lstat())
    except FileNotFoundError:
        return False


def not_ours(partial: Path) -> OutputExistsError:
    return OutputExistsError(
        f"output: {partial} is needed for the growing array and holds something else; move it away"
    )
