"""Files of NumPy, ``.npy``: a header, and behind it one plain chunk that is the whole array."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.lib import format as npy_format

from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.store.sources.mapped import Mapped, mapped_array, named, stored_dtype, unit_of
from tilewright.pipeline.transfer.files import first_bytes

MAGIC = b"\x93NUMPY"


def is_npy(path: Path) -> bool:
    """Whether a regular file begins as one of NumPy."""
    return first_bytes(path, len(MAGIC)) == MAGIC


def open_npy(path: Path, name: str, role: str) -> zarr.Array[Any]:
    """The array of a file. Raises StoreError for one that is damaged or holds Python's objects, DTypeError for one that
    holds no numbers."""
    try:
        with open(path, "rb") as file:
            version = npy_format.read_magic(file)
            read: Any = (
                npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
            )
            shape, column_major, dtype = read(file)
            offset, stored = file.tell(), os.fstat(file.fileno()).st_size
    except (OSError, ValueError, EOFError) as error:
        raise StoreError(f"{role}: {name} is no whole file of NumPy ({error}); save it again") from error
    if dtype.hasobject:
        raise StoreError(f"{role}: {name} holds objects of Python; save it as an array of numbers")
    found = stored_dtype(dtype, role, name)
    needed = offset + int(np.prod(shape, dtype=object)) * dtype.itemsize
    if stored < needed:
        raise StoreError(
            f"{role}: {name} has {stored} bytes, and an array of shape {shape} of {dtype} ends at byte {needed}: it was"
            " cut short; save it again"
        )
    return mapped_array(
        Mapped(
            str(path.absolute()),
            name,
            tuple(shape),
            found,
            unit_of(shape),
            offset,
            column_major=column_major,
            attributes=named(None, None, dtype),
        )
    )
