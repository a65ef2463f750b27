"""Neighbours and pairs that a caller gets as arrays of NumPy: stored for a moment, in memory where it has room."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import zarr

from tilewright.kernels.neighbours.order import Neighbours, Pairs
from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.pipeline.errors import OutputError
from tilewright.pipeline.in_memory import folder_for
from tilewright.pipeline.neighbours import job
from tilewright.pipeline.neighbours.options import NeighbourRequest, open_sides
from tilewright.pipeline.neighbours.plan import INDEX_NBYTES, PAIR_NBYTES
from tilewright.pipeline.store.sources.memory import free_nbytes


def neighbours_of(request: NeighbourRequest) -> Neighbours:
    """The k nearest, as arrays. Raises as ``job.topk``, and OutputError where memory does not hold them twice."""
    checked = request.checked()
    sides = open_sides(checked)
    nbytes = sides.m * checked.k * (INDEX_NBYTES + sides.values.itemsize)
    _check_memory(nbytes, f"{sides.m} × {checked.k} neighbours")
    with _place(nbytes) as path:
        job.topk(replace(request, out=path))
        return Neighbours(*(_array(path, name) for name in Neighbours._fields))


def pairs_of(request: NeighbourRequest) -> Pairs:
    """The pairs, as arrays. Raises as ``job.pairs``, and OutputError where memory does not hold them twice."""
    with _place(0) as path:
        run = job.pairs(replace(request, out=path))
        _check_memory(run.count * PAIR_NBYTES, counted(run.count, "pair"))
        return Pairs(*(_array(path, name) for name in Pairs._fields))


def _array(path: Path, name: str) -> np.ndarray:
    return np.asarray(zarr.open_array(path / name, mode="r")[...])


@contextmanager
def _place(nbytes: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tilewright-result-", dir=folder_for(nbytes)) as folder:
        yield Path(folder) / "found.zarr"


def _check_memory(nbytes: int, what: str) -> None:
    free = free_nbytes()
    if free is not None and 2 * nbytes > free:
        raise OutputError(
            f"output: {what} have {format_nbytes(nbytes)} and are held twice while they are returned;"
            f" {format_nbytes(free)} of memory are free: give out, the path where they are to be stored"
        )
