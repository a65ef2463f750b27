"""The checksum of stored bytes: XXH3 with 64 bits (https://github.com/Cyan4973/xxHash), by the library ``xxhash``.

It notices damage, not forgery: any change of the bytes changes it, but for a chance of 2^-64.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import xxhash

from tilewright.pipeline.transfer.files import open_file

READ_NBYTES = 2**20
"""Bytes of a file that are read at once: they stay in the core's cache until they are summed."""


new_checksum = xxhash.xxh3_64
"""A checksum of nothing yet: ``update`` adds bytes, without the interpreter's lock, ``intdigest`` gives it."""


def checksum_of_file(path: str | os.PathLike[str]) -> tuple[int, int]:
    """The bytes of a file, and their checksum. Raises OSError."""
    descriptor = open_file(path)
    try:
        return checksum_of_descriptor(descriptor)
    finally:
        os.close(descriptor)


def checksum_of_descriptor(descriptor: int) -> tuple[int, int]:
    """The same of a file that is open for reading. Raises OSError."""
    found, nbytes = new_checksum(), 0
    memory = memoryview(bytearray(READ_NBYTES))
    while got := os.preadv(descriptor, [memory], nbytes):
        found.update(memory[:got])
        nbytes += got
    return nbytes, found.intdigest()


UPDATE_NAMES = ("XXH3_64bits_update_dispatch", "XXH3_64bits_update")
"""The C function that adds bytes: one for this machine's vectors where the library has it."""


@functools.cache
def _library() -> tuple[ctypes.CDLL, int] | None:
    """The C library inside the module, and the address of its function; None where it does not show its names."""
    library = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
    try:
        library.XXH3_createState.restype = ctypes.c_void_p
        for name in ("XXH3_64bits_reset", "XXH3_freeState", "XXH3_64bits_digest"):
            getattr(library, name).argtypes = (ctypes.c_void_p,)
        library.XXH3_64bits_digest.restype = ctypes.c_uint64
        update = next(getattr(library, name) for name in UPDATE_NAMES if hasattr(library, name))
    except (AttributeError, StopIteration):
        return None
    return library, ctypes.cast(update, ctypes.c_void_p).value or 0


class LoopChecksum:
    """A checksum for loops, which add bytes by calling a C function by its address."""

    def __init__(self, words: np.ndarray, library: ctypes.CDLL | None) -> None:
        self.words = words
        """uint64[2]: the function, and what it is called with first; zeros where nothing is to be summed."""
        self._library = library

    def value(self) -> int | None:
        """The checksum of what was added; None where the loop could add nothing."""
        return None if self._library is None else int(self._library.XXH3_64bits_digest(int(self.words[1])))


@contextmanager
def loop_checksum() -> Iterator[LoopChecksum]:
    """A checksum of nothing yet for one call of a loop."""
    found = _library()
    if found is None:
        yield LoopChecksum(np.zeros(2, np.uint64), None)
        return
    library, update = found
    state = library.XXH3_createState()
    if not state:
        raise MemoryError("no memory for a checksum")
    try:
        library.XXH3_64bits_reset(state)
        yield LoopChecksum(np.array([update, state], np.uint64), library)
    finally:
        library.XXH3_freeState(state)
