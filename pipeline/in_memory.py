"""Results that a caller gets as arrays of NumPy: products that are stored for a moment, in memory where it has room."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import dask
import numpy as np
import zarr

from tilewright.kernels.numbers import format_nbytes
from tilewright.pipeline.errors import OutputError
from tilewright.pipeline.store.region_read import read_region
from tilewright.pipeline.store.sources.memory import free_nbytes

SHARED_MEMORY = Path("/dev/shm")
"""Where files lie in memory."""
SPARE = 9 / 8
"""What a stored product takes there, of its size: chunks at its edges are whole."""


def array_of(
    shape: tuple[int, ...], dtype: np.dtype, multiply: Callable[[Path], object], what: str = "C"
) -> np.ndarray:
    """A product as an array.

    multiply: stores it at a path, of `stored_for_a_moment`.

    Raises OutputError, before anything is computed, where memory does not hold it twice; else what ``multiply`` does.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    with stored_for_a_moment(nbytes, f"{what}, {' × '.join(map(str, shape))} of {dtype},") as path:
        multiply(path)
        return read_whole(path)


@contextmanager
def stored_for_a_moment(nbytes: int, what: str) -> Iterator[Path]:
    """A path for a result of so many bytes, on this host, where it lies while the block runs: in memory, or in Dask's
    ``temporary-directory`` where that has more room. Raises OutputError as `array_of`. what: it is, in words."""
    free = free_nbytes()
    if free is not None and 2 * nbytes > free:
        raise OutputError(
            f"output: {what} has {format_nbytes(nbytes)} and is held twice while it is returned; {format_nbytes(free)}"
            " of memory are free: give out, the path where it is to be stored"
        )
    with tempfile.TemporaryDirectory(prefix="tilewright-result-", dir=_folder(nbytes)) as folder:
        yield Path(folder) / "c.zarr"


def read_whole(path: Path) -> np.ndarray:
    """A stored array as one of NumPy."""
    found = zarr.open_array(path, mode="r")
    return read_region(found, tuple(slice(0, side) for side in found.shape))


def _folder(nbytes: int) -> str | None:
    """Where files of so many bytes lie best; None: where the system has temporary ones."""
    try:
        facts = os.statvfs(SHARED_MEMORY)
        if facts.f_bavail * facts.f_frsize > SPARE * nbytes + 2**20 and os.access(SHARED_MEMORY, os.W_OK):
            return str(SHARED_MEMORY)
    except OSError:
        pass
    folder: str | None = dask.config.get("temporary-directory", None)
    return folder
