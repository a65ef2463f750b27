"""What is to be moved from a file to a device: rows of bytes, and when they are worth picking out of their lines."""

from __future__ import annotations

from typing import NamedTuple

ANY_LENGTH = -1

LONG_ROW_NBYTES = 64 * 2**10
"""Parts of rows that are shorter are read with what lies between them and picked out: handling each costs more."""
LEAST_USEFUL_SHARE = 1 / 16
"""Below this share of wanted bytes in the rows, even short parts are read one by one."""


class Rectangle(NamedTuple):
    """Rows of bytes in a file, and where they go. Lengths and distances are in bytes."""

    path: str
    offset: int
    """Of the first row in the file."""
    file_nbytes: int
    """What the file must have, or `ANY_LENGTH`."""
    rows: int
    width: int
    stride: int
    """From one row to the next in the file."""
    target: int
    """Address of the first row's place on the device."""
    pitch: int
    """From one row to the next on the device."""
