"""Memory of loops that is kept from one call to the next: tables, and what keys are sorted by way of.

The system clears memory that it hands out, page by page as each is touched, and takes it back once it is freed: where a
loop goes once over tens of megabytes, that can take as long as the loop.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

LEAST_NBYTES = 2**20
"""Below that, libraries keep memory themselves."""
MOST_NBYTES = 2**27
"""What a process keeps, at most."""
LINE_NBYTES = 64
"""A line of the cache; all memory begins with one."""

_lock = threading.Lock()
_spare: list[np.ndarray] = []
"""The longest unused first."""


def take(length: int, dtype: Any, *, zeros: bool = False) -> np.ndarray:
    """An array for the caller alone, until `give_back`; it need not be given back. Of any contents, or of zeros."""
    nbytes = length * np.dtype(dtype).itemsize
    memory = _taken(nbytes + LINE_NBYTES) if nbytes >= LEAST_NBYTES else None
    used = memory is not None
    if memory is None:
        memory = (np.zeros if zeros else np.empty)(nbytes + LINE_NBYTES, np.uint8)
    skip = -memory.ctypes.data % LINE_NBYTES
    array = memory[skip : skip + nbytes].view(dtype)
    if used and zeros:
        array.fill(0)
    return array


def _taken(nbytes: int) -> np.ndarray | None:
    """The smallest that is kept of those that are large enough, and not twice as large."""
    with _lock:
        fit = [place for place, each in enumerate(_spare) if nbytes <= each.nbytes < 2 * nbytes]
        return _spare.pop(min(fit, key=lambda place: _spare[place].nbytes)) if fit else None


def give_back(*arrays: np.ndarray) -> None:
    """Keep memory that was taken, and that nobody looks at any more, for others. Arrays may be parts of what `take`
    gave, and several of the same."""
    found = {id(each.base): each.base for each in arrays if each.base is not None}
    with _lock:
        _spare.extend(each for each in found.values() if LEAST_NBYTES < each.nbytes <= MOST_NBYTES)
        while sum(each.nbytes for each in _spare) > MOST_NBYTES:
            del _spare[0]
