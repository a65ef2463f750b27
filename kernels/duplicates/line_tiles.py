"""How a GPU cuts a text to find its newlines, and what it keeps of them: arithmetic that a plan needs too, where there
is no GPU."""

from __future__ import annotations

from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.numbers import ceil_div, power_of_two

THREADS = 4 if SIMULATOR else 256
SPAN = 8 if SIMULATOR else 64
"""Bytes of a thread."""
TILE = THREADS * SPAN
"""Bytes of a block, whose newlines are counted together."""
NUMBER_NBYTES = 8


def newlines_nbytes(nbytes: int, most: int) -> int:
    """Memory for the newlines of a text of so many bytes, at most ``most`` of them, and for their number in each tile:
    `Rooms` gives both by powers of two.

    >>> newlines_nbytes(3 * 2**20, 2**22) == 8 * 2**22 + 8 * 2**8
    True
    """
    return NUMBER_NBYTES * (power_of_two(min(nbytes, most)) + power_of_two(ceil_div(nbytes, TILE)))
