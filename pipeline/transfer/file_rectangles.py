"""What the loops move from files to a device, and when rows are read together with the bytes between them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

ANY_LENGTH = -1

LONG_ROW_NBYTES = 64 * 2**10
"""Shorter parts of rows are read with the bytes between them and then picked out: reading each by itself costs more."""
FEW_NBYTES = 64 << 20
"""Of a text: fewer are on a GPU sooner without the loop that brings them, unless it is loaded."""
LEAST_USEFUL_SHARE = 1 / 16
"""Below this share of wanted bytes in the rows, even short parts are read one by one."""


class Rectangle(NamedTuple):
    """Rows of bytes in a file, and where they go. Lengths and distances are in bytes."""

    path: str
    offset: int
    """Of the first row in the file."""
    file_nbytes: int
    """The length that the file must have, or `ANY_LENGTH`."""
    rows: int
    width: int
    stride: int
    """From one row to the next in the file."""
    target: int
    """Address of the first row's place on the device."""
    pitch: int
    """From one row to the next on the device."""


class StoredChunk(NamedTuple):
    """A compressed chunk in a file, the part of it that is wanted, and where that goes. Columns are in bytes."""

    path: str
    offset: int
    """Where it begins in the file."""
    nbytes: int
    """Its length in the file, or `ANY_LENGTH`: up to the file's end."""
    rows: int
    stride: int
    """Bytes of a row of the chunk, once it is decompressed."""
    top: int
    left: int
    height: int
    width: int
    """The wanted part."""
    target: int
    """Address of its first row's place on the device."""
    pitch: int
    """Bytes from one row to the next there."""


def name_table(paths: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """File names as the system takes them, each once: uint8, zero-terminated; and int64, where the name of each path
    begins."""
    starts: dict[str, int] = {}
    places, names, end = [], [], 0
    for path in paths:
        if path not in starts:
            starts[path] = end
            names.append(os.fsencode(path) + b"\0")
            end += len(names[-1])
        places.append(starts[path])
    return np.frombuffer(b"".join(names) or b"\0", np.uint8).copy(), np.array(places, np.int64)
