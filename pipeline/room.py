"""Room for results of any size: arrays in memory up to a limit, beyond it in files that vanish with them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import dask
import numpy as np

from tilewright.pipeline.errors import StoreError


class Room:
    """Gives arrays, of which those beyond ``nbytes`` lie in nameless files in Dask's ``temporary-directory``, or the
    system's. The system writes their pages to disk where memory is wanted."""

    def __init__(self, nbytes: int, folder: Path | None = None) -> None:
        self._left = nbytes
        self._folder = folder
        self.spilled = 0
        """Bytes that lie in files."""

    def array(self, length: int, dtype: Any) -> np.ndarray:
        """A new array whose contents are undefined.

        Raises StoreError where there is no room on the disk, either.
        """
        dtype = np.dtype(dtype)
        nbytes = length * dtype.itemsize
        if nbytes <= self._left or not nbytes:
            self._left -= nbytes
            return np.empty(length, dtype)
        folder = self._folder or dask.config.get("temporary-directory", None)
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                # Its blocks are taken now: a full disk would end the process at the first write to memory.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                memory = np.memmap(file, dtype, mode="r+", shape=(length,))
        except OSError as error:
            raise StoreError(
                f"no room for {nbytes} bytes of counts in {folder or tempfile.gettempdir()}:"
                f" {error.strerror or error}; let Dask's temporary-directory name a larger place"
            ) from error
        self.spilled += nbytes
        return np.asarray(memory)

    def kept(self, array: np.ndarray) -> np.ndarray:
        """The array, or a copy of it in a file, where memory is short."""
        if array.nbytes <= self._left:
            self._left -= array.nbytes
            return array
        copy = self.array(len(array), array.dtype)
        copy[...] = array
        return copy

    def given_back(self, nbytes: int) -> None:
        """So much of the memory is free again."""
        self._left += nbytes
