"""The dot product of two stored vectors."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from tilewright.kernels.arguments import check_callable, check_choice
from tilewright.kernels.device_choice import DEVICES
from tilewright.pipeline import config
from tilewright.pipeline.attributes import packing_notice
from tilewright.pipeline.cluster import Cluster, open_cluster
from tilewright.pipeline.dot import dot_stored
from tilewright.pipeline.errors import ShapeError
from tilewright.pipeline.events import Listener, Notice, counted, log_notices, on_waiting
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
        One of its subclasses: an array that is not there or holds no numbers, lengths that differ.
    """
    config.check_all(cluster_file=cluster_file)
    check_choice("device", device, DEVICES)
    check_callable("listener", listener)
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
        open_cluster(cluster, cluster_file) as client,
        workers_held(client, waiting=on_waiting(listener, "dot", "ends it")),
    ):
        facts = survey(client, device)
        listener(Notice(f"multiplying on {facts[0].name} with {counted(len(facts), 'worker')}"))
        return dot_stored(client, left, right, device=facts[0].device, listener=listener)


def timed_dot(x: Source, y: Source, **options: Any) -> DotRun:
    """``dot`` with what the command line prints besides the value."""
    start = time.perf_counter()
    value = dot(x, y, **options)
    return DotRun(value, math.prod(open_array(x, ndim=1, role="X").shape), time.perf_counter() - start)
