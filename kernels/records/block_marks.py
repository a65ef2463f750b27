"""Where blocks of bzip2 begin: marks of 48 bits, at any bit."""

from __future__ import annotations

import numpy as np
from numba import njit

from tilewright.kernels.cpu.loops import kept

BLOCK, END = 0x314159265359, 0x177245385090
"""The marks of a block, and of a stream's end; the digits of pi, and of its square root."""
MARK_BITS = 48


def _byte_inside() -> np.ndarray:
    """bool[256]: whether a byte is the fifth or, where the mark begins within a byte, the fifth behind that of its
    beginning, for any mark and shift."""
    found = np.zeros(256, np.bool_)
    for mark in (BLOCK, END):
        for shift in range(8):
            found[(mark << 8 >> shift) >> 16 & 0xFF] = True
    return found


BYTE_INSIDE = _byte_inside()


@kept
@njit(nogil=True)
def find_marks(data, start, stop, byte_inside, places, ends):  # type: ignore[no-untyped-def]
    """Find marks that begin from bit ``start`` on: all before bit ``stop``, and the first behind it.

    data: uint8. byte_inside: `BYTE_INSIDE`. places: int64, written: the bit at which each begins; ends: bool, written:
    whether it is that of a stream's end. Returns how many there are; ``len(places)`` where there may be more.
    """
    count = 0
    for i in range(start // 8, len(data) - 5):
        # Of the seven bytes from i on, that at i + 4 lies within the mark whatever its shift.
        if not byte_inside[data[i + 4]]:
            continue
        word = np.uint64(0)
        for k in range(7):
            word = (word << np.uint64(8)) | (np.uint64(data[i + k]) if i + k < len(data) else np.uint64(0))
        for shift in range(8):
            if i * 8 + shift < start or i * 8 + shift + 48 > len(data) * 8:
                continue
            found = (word >> np.uint64(8 - shift)) & np.uint64(0xFFFFFFFFFFFF)
            if found == np.uint64(BLOCK) or found == np.uint64(END):
                places[count] = i * 8 + shift
                ends[count] = found == np.uint64(END)
                count += 1
                if count == len(places) or i * 8 + shift >= stop:
                    return count
    return count
