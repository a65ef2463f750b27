"""Neighbours and pairs that a caller gets as arrays of NumPy: stored for a moment, in memory where it has room."""

from __future__ import annotations

from dataclasses import replace

from tilewright.kernels.neighbours.order import Neighbours, Pairs
from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.pipeline.errors import OutputError
from tilewright.pipeline.in_memory import read_whole, stored_for_a_moment
from tilewright.pipeline.neighbours import job
from tilewright.pipeline.neighbours.options import NeighbourRequest, open_sides
from tilewright.pipeline.neighbours.plan import INDEX_NBYTES, PAIR_NBYTES
from tilewright.pipeline.store.sources.memory import free_nbytes


def neighbours_of(request: NeighbourRequest) -> Neighbours:
    """The k nearest, as arrays. Raises as ``job.topk``, and OutputError where memory does not hold them twice."""
    checked = request.checked()
    sides = open_sides(checked)
    nbytes = sides.m * checked.k * (INDEX_NBYTES + sides.values.itemsize)
    with stored_for_a_moment(nbytes, f"the result, {sides.m} × {checked.k} neighbours,") as path:
        job.topk(replace(request, out=path))
        return Neighbours(read_whole(path / "indices"), read_whole(path / "values"))


def pairs_of(request: NeighbourRequest) -> Pairs:
    """The pairs, as arrays. Raises as ``job.pairs``, and OutputError where memory does not hold them beside what is
    stored of them."""
    with stored_for_a_moment(0, "the result") as path:
        run = job.pairs(replace(request, out=path))
        nbytes, free = run.count * PAIR_NBYTES, free_nbytes()
        if free is not None and nbytes > free:
            raise OutputError(
                f"output: the result, {counted(run.count, 'pair')}, has {format_nbytes(nbytes)};"
                f" {format_nbytes(free)} of memory are free: give out, the path where it is to be stored"
            )
        return Pairs(read_whole(path / "row"), read_whole(path / "column"), read_whole(path / "value"))
