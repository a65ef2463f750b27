"""Machine code of kernels, kept on disk between processes: it makes a process's first call faster, and is never needed.

One file a kernel, in ``$XDG_CACHE_HOME/tilewright/code``, by default below ``~/.cache``; its name is the hash of
everything that the code depends on (`tilewright.kernels.gpu.fingerprint`), so no file ever goes stale.
``TILEWRIGHT_CODE_CACHE`` names another folder; ``off`` keeps nothing. A file is written beside its place and renamed,
so any number of processes may read and write. A damaged file counts as missing, and is replaced; a folder that cannot
be read or written costs the time of compiling, nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from tilewright.kernels.gpu import user_cache

ENVIRONMENT = "TILEWRIGHT_CODE_CACHE"
SUFFIX = ".kernel"
MAGIC = b"tilewright kernel 1\n"
CAPACITY_NBYTES = 256 << 20
"""What the folder may hold; the files that were used least recently go first. A kernel takes 5 to 150 KB."""
USED_SECONDS = 24 * 3600
"""A file's use is noted once a day at most, so that not every read writes."""
DRAFT_SECONDS = 3600
"""A draft older than this was left by a process that died."""


class MachineCode(NamedTuple):
    """A kernel as the driver loads it, for one compute capability."""

    entry: str
    """The name of the kernel in it."""
    cubin: bytes


def directory() -> Path | None:
    """Where code is kept; None where nothing is to be kept."""
    return user_cache.chosen(ENVIRONMENT, lambda: user_cache.folder("code"))


def load(key: str) -> MachineCode | None:
    """The code kept under a key; None where there is none, or none that is whole."""
    folder = directory()
    if folder is None:
        return None
    path = folder / (key + SUFFIX)
    try:
        content = path.read_bytes()
        seconds = time.time() - path.stat().st_mtime
    except OSError:
        return None
    found = _unpacked(content)
    if found is not None and seconds > USED_SECONDS:
        with contextlib.suppress(OSError):
            os.utime(path)
    return found


def store(key: str, code: MachineCode) -> None:
    """Keep code under a key, in one step; does nothing where it cannot be written."""
    folder = directory()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".draft", delete=False) as draft:
            try:
                draft.write(_packed(code))
                draft.close()
                os.replace(draft.name, folder / (key + SUFFIX))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(draft.name)
                raise
    except OSError:
        return
    _tidy_once(folder)


def _packed(code: MachineCode) -> bytes:
    body = code.entry.encode() + b"\n" + code.cubin
    return MAGIC + hashlib.sha256(body).digest() + body


def _unpacked(content: bytes) -> MachineCode | None:
    start = len(MAGIC) + hashlib.sha256().digest_size
    if (
        not content.startswith(MAGIC)
        or hashlib.sha256(content[start:]).digest() != content[len(MAGIC) : start]
    ):
        return None
    entry, _, cubin = content[start:].partition(b"\n")
    return MachineCode(entry.decode(), cubin)


_tidied: set[Path] = set()
_tidy_lock = threading.Lock()


def _tidy_once(folder: Path) -> None:
    """Call `tidy` with the first file that a process writes to a folder."""
    with _tidy_lock:
        if folder in _tidied:
            return
        _tidied.add(folder)
    tidy(folder)


def tidy(folder: Path) -> None:
    """Remove the files used least recently beyond `CAPACITY_NBYTES`, and abandoned drafts.

    Several processes may do so at once. A file that is gone before it is read is compiled anew.
    """
    files = []
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            told = path.stat()
            if path.suffix == ".draft" and time.time() - told.st_mtime > DRAFT_SECONDS:
                path.unlink()
            elif path.suffix == SUFFIX:
                files.append((told.st_mtime, told.st_size, path))
    total = 0
    for _, nbytes, path in sorted(files, key=lambda file: file[0], reverse=True):
        total += nbytes
        if total > CAPACITY_NBYTES:
            with contextlib.suppress(OSError):
                path.unlink()
