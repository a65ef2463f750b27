"""The command that multiplies two stored vectors: checks its arguments, opens both, opens a cluster and has it multiply
them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.kernels.arguments import check_callable, check_choice, check_flag
from tilewright.kernels.choices import DEVICES, DeviceName
from tilewright.kernels.numbers import counted
from tilewright.pipeline import config
from tilewright.pipeline.cluster.here.opening import open_executor
from tilewright.pipeline.cluster.profiles import Cluster
from tilewright.pipeline.cluster.watch import workers_held
from tilewright.pipeline.dot import multiply_vectors, open_parts, open_vectors
from tilewright.pipeline.events import Caution, Listener, Notice, log_notices, on_waiting
from tilewright.pipeline.records import place_of
from tilewright.pipeline.store.arrays import Input
from tilewright.pipeline.store.labels.alignment import Align
from tilewright.pipeline.store.sources.dasks import any_pending
from tilewright.pipeline.worker.survey import survey


@dataclass(frozen=True)
class DotRun:
    """A finished dot product, for the command line."""

    value: Any
    """A NumPy scalar."""
    elements: int
    seconds: float
    """Including the start of the cluster."""
    dtype_reason: str
    """One line: the value's dtype, and why it is that; empty where a vector holds floats."""
    wraps: str
    """``possible`` where sums of integers may have wrapped, by the dtype, the length and the largest elements; else
    ``no``."""
    masked: dict[str, int] = field(default_factory=dict)
    """How many elements of ``X`` and of ``Y`` stand for missing numbers by CF's attributes and were multiplied as the
    numbers that are stored; a vector without such attributes is not in it."""

    def to_json(self) -> dict[str, Any]:
        number = self.value.item()
        if isinstance(number, complex):
            number = {"real": number.real, "imag": number.imag}
        return {
            "value": number,
            "dtype": self.value.dtype.name,
            "dtype_reason": self.dtype_reason,
            "wraps": self.wraps,
            "elements": self.elements,
            "seconds": self.seconds,
            "masked": self.masked,
        }

    def __str__(self) -> str:
        return str(self.value.item())


def dot(
    x: Input,
    y: Input,
    *,
    align: Align = "labels",
    dtype: str | np.dtype | None = None,
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: DeviceName = "auto",
    state: str | os.PathLike[str] | None = None,
    resume: bool = True,
    listener: Listener = log_notices,
) -> np.number[Any]:
    """Sum of conj(x[i]) y[i] over two stored vectors, as ``numpy.vdot``: a NumPy scalar.

    Parameters
    ----------
    x, y
        One-dimensional arrays of numbers of equal length n: paths, URLs or open arrays of zarr-python.
    align
        What pairs the elements of x and y. ``labels``: where they lie, and where both have coordinates these have to be
        the same; other ones are refused. ``position``: where they lie alone.
    dtype
        The result's dtype. Without it, integers get the smallest of int32, uint32, int64 and uint64 that holds n times
        the largest product of the two dtypes (and no narrower one than NumPy's; NumPy's type widened to 64 bits where
        none does), and all else ``numpy.result_type(x, y)``. Unsigned integers may become any type, signed ones any but
        unsigned, floats any floats or complex numbers, complex numbers complex ones.
    cluster
        A profile of ``cluster_file``, a scheduler's address, a ``distributed.Client``, or a cluster of Dask's,
        such as a ``distributed.LocalCluster``, which is left open.
    device
        ``auto`` (the GPU if there is one), ``cuda`` or ``cpu``.
    state
        A file, made if it is not there, in which finished pieces are kept: a run that was stopped goes on from there,
        unless a vector was written to since. The vectors have to lie in local files.
    resume
        Whether to go on from what ``state`` keeps; if not, that is forgotten.

    Notes
    -----
    A sum of integers that may have wrapped all the same, by its dtype, the length and the largest elements, is told to
    the listener. On one kind of device the result is the same to the last bit for any chunks, any number of workers and
    any order in which they finish.

    Raises
    ------
    TilewrightError
        One of its subclasses: an array that is not there or holds no numbers, lengths that differ, a dtype to which a
        vector does not cast; StoreError also for a vector that is no remote URL and was written to during the run;
        OptionError for a ``state`` of other work, and OutputExistsError for one that another run has open.

    Examples
    --------
    >>> import numpy as np
    >>> import tilewright as tw
    >>> int(tw.dot(np.arange(4), np.arange(4)))
    14
    """
    return timed_dot(**locals()).value


def timed_dot(
    x: Input,
    y: Input,
    *,
    align: Align = "labels",
    dtype: str | np.dtype | None = None,
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: DeviceName = "auto",
    state: str | os.PathLike[str] | None = None,
    resume: bool = True,
    listener: Listener = log_notices,
) -> DotRun:
    """``dot`` with what the command line prints besides the value."""
    start = time.perf_counter()
    config.check_all(cluster_file=cluster_file)
    check_choice("device", device, DEVICES)
    check_callable("listener", listener)
    resume = check_flag("resume", resume)
    place = None if state is None else place_of(state)
    vectors = open_vectors(x, y, dtype, align)
    for note in vectors.notes:
        listener(Caution(note))
    where, graphs = (cluster, cluster_file), any_pending(vectors.arrays.values())
    with (
        open_executor(*where, loops=device == "cpu", graphs=graphs) as client,
        workers_held(client, waiting=on_waiting(listener, "dot", "ends it")),
    ):
        facts = survey(client, device, loops=("cpu",))
        listener(Notice(f"multiplying on {facts[0].name} with {counted(len(facts), 'worker')}"))
        if vectors.dtype_reason:
            listener(Notice(f"the sum is {vectors.dtype_reason}"))
        of_device = facts[0].device
        with open_parts(place, vectors, of_device, resume=resume) as kept:
            total = multiply_vectors(client, vectors, device=of_device, listener=listener, kept=kept)
    masked = {
        role: count for role, count in zip(vectors.arrays, total.masked, strict=True) if role in vectors.masks
    }
    elements = vectors.arrays["X"].shape[0]
    return DotRun(
        total.value, elements, time.perf_counter() - start, vectors.dtype_reason, total.wraps, masked
    )
