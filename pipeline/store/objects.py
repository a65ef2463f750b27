"""Stored objects of local arrays: where they lie, and whether they are as they were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zarr
from zarr.storage import LocalStore

from tilewright.kernels.numbers import counted
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.plan.stored import StoredObject
from tilewright.pipeline.transfer.checksum import checksum_of_file
from tilewright.pipeline.transfer.files import NotAFileError


def object_path(array: zarr.Array[Any], place: tuple[int, ...]) -> Path:
    """Where a stored object of a local array lies, by its indices among those."""
    assert isinstance(array.store, LocalStore)
    return array.store.root / array.path / array.metadata.encode_chunk_key(place)


def fault_of(array: zarr.Array[Any], stored: StoredObject, *, whole: bool) -> tuple[str, int | None] | None:
    """What is wrong with a stored object, in words, and the checksum that it has; None where it is as it was written.

    whole: whether its bytes are read and compared; else only its length is.

    Raises StoreError where it cannot be looked at, which says nothing of what it is.
    """
    path = object_path(array, stored.place)
    try:
        nbytes, checksum = path.stat().st_size, None
        if whole:
            nbytes, checksum = checksum_of_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return ("it is missing", None) if stored.nbytes else None
    except NotAFileError as error:
        return str(error), None
    except OSError as error:
        raise StoreError(
            f"output: cannot look at {path}, which was stored: {error.strerror or error}; it is kept: let this process"
            " read it and run it again, or start over with --no-resume (resume=False)"
        ) from error
    if nbytes != stored.nbytes:
        return f"it has {counted(nbytes, 'byte')} and had {stored.nbytes}", checksum
    if whole and checksum != stored.checksum:
        return "its bytes are not those that were written", checksum
    return None
