"""The dot product of two stored vectors."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import zarr

from tilewright.pipeline import config
from tilewright.pipeline.attributes import packing_notice
from tilewright.pipeline.cluster import Cluster, open_cluster
from tilewright.pipeline.dot import dot_stored
from tilewright.pipeline.errors import DamagedError, ShapeError, StoreError
from tilewright.pipeline.events import Listener, Notice, counted, log_notices, on_waiting
from tilewright.pipeline.file_changes import let_a_tick_pass
from tilewright.pipeline.ledger import input_digest
from tilewright.pipeline.store import Source, check_shared, name_of, open_array
from tilewright.pipeline.submit import survey, workers_held


@dataclass(frozen=True)
class DotRun:
    """A finished dot product, for the command line."""

    value: Any
    """A NumPy scalar."""
    elements: int
    seconds: float
    """Including the start of the cluster."""

    def to_json(self) -> dict[str, Any]:
        number = self.value.item()
        if isinstance(number, complex):
            number = {"real": number.real, "imag": number.imag}
        return {
            "value": number,
            "dtype": self.value.dtype.name,
            "elements": self.elements,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        return str(self.value.item())


def dot(
    x: Source,
    y: Source,
    *,
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: str = "auto",
    listener: Listener = log_notices,
) -> Any:
    """Sum of conj(x[i]) y[i] over two stored vectors, as ``numpy.vdot``: a NumPy scalar.

    Parameters
    ----------
    x, y
        One-dimensional arrays of numbers of equal length n: paths, URLs or open ``zarr.Array``s.
    cluster
        A profile of ``cluster_file``, a scheduler's address, a ``distributed.Client``, or a cluster of Dask's,
        such as a ``distributed.LocalCluster``, which is left open.
    device
        ``auto`` (the GPU if there is one), ``cuda`` or ``cpu``.

    The dtype is ``numpy.result_type(x, y)``; integers wrap as NumPy's do. On one kind of device the result is
    the same to the last bit for any chunks, any number of workers and any order in which they finish.

    Raises
    ------
    TilewrightError
        One of its subclasses: an array that is not there or holds no numbers, lengths that differ; StoreError also for
        a vector that is no remote URL and was written to during the run.
    """
    config.check_all()
    left, right = open_array(x, ndim=1, role="X"), open_array(y, ndim=1, role="Y")
    check_shared(left, "X", copied=True)
    check_shared(right, "Y", copied=True)
    if left.shape != right.shape:
        raise ShapeError(
            f"{name_of(left)} has {left.shape[0]} elements and {name_of(right)} has {right.shape[0]};"
            " they must have equally many"
        )
    for role, vector in (("X", left), ("Y", right)):
        if note := packing_notice(role, vector):
            listener(Notice(note))
    with (
        _unchanged(X=left, Y=right) as looked,
        open_cluster(cluster, cluster_file) as client,
        workers_held(client, waiting=on_waiting(listener, "dot", "ends it")),
    ):
        facts = survey(client, device)
        listener(Notice(f"multiplying on {facts[0].name} with {counted(len(facts), 'worker')}"))
        let_a_tick_pass(looked)
        return dot_stored(client, left, right, device=facts[0].device, listener=listener)


@contextmanager
def _unchanged(**vectors: zarr.Array[Any]) -> Iterator[float]:
    """Gives the time, by `time.monotonic`, at which the vectors were looked at. Raises StoreError at the end, or in
    place of an error about a damaged chunk, if one is not what it was."""
    before = {role: input_digest(vector) for role, vector in vectors.items()}

    def check() -> None:
        changed = [role for role, vector in vectors.items() if input_digest(vector) != before[role]]
        if changed:
            names = " and ".join(f"{role}, {name_of(vectors[role])}," for role in changed)
            raise StoreError(
                f"{names} changed while X and Y were multiplied, so that the result may be of neither the old nor the"
                " new; let nobody write to them until it is done"
            )

    try:
        yield time.monotonic()
    except DamagedError as error:
        try:
            check()
        except StoreError as change:
            raise change from error
        raise
    check()


def timed_dot(x: Source, y: Source, **options: Any) -> DotRun:
    """``dot`` with what the command line prints besides the value."""
    start = time.perf_counter()
    value = dot(x, y, **options)
    return DotRun(value, math.prod(open_array(x, ndim=1, role="X").shape), time.perf_counter() - start)
