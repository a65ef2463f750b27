"""The dot product of two stored vectors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import zarr

from tilewright.kernels.arguments import check_callable, check_choice
from tilewright.kernels.gemm import check
from tilewright.kernels.gemm.base import NUMPY_ELEMENTS
from tilewright.kernels.gpu.device_choice import DEVICES
from tilewright.kernels.numbers import counted
from tilewright.pipeline import config
from tilewright.pipeline.cluster.answers import ask_all
from tilewright.pipeline.cluster.cluster import Cluster, open_cluster
from tilewright.pipeline.cluster.watch import workers_held
from tilewright.pipeline.dot import dot_stored
from tilewright.pipeline.errors import DamagedError, ShapeError, StoreError
from tilewright.pipeline.events import Caution, Listener, Notice, log_notices, on_waiting
from tilewright.pipeline.plan.sums import dtype_reason
from tilewright.pipeline.product.ledger import input_digest
from tilewright.pipeline.store.arrays import Source, name_of, open_array
from tilewright.pipeline.store.attributes import masked_caution, masks_of, packing_notice
from tilewright.pipeline.store.probe import check_read_alike, shared_inputs
from tilewright.pipeline.transfer.files import let_a_tick_pass
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
    x: Source,
    y: Source,
    *,
    dtype: str | np.dtype | None = None,
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

    A sum of integers that may have wrapped all the same, by its dtype, the length and the largest elements, is told to
    the listener. On one kind of device the result is the same to the last bit for any chunks, any number of workers and
    any order in which they finish.

    Raises
    ------
    TilewrightError
        One of its subclasses: an array that is not there or holds no numbers, lengths that differ, a dtype to which a
        vector does not cast; StoreError also for a vector that is no remote URL and was written to during the run.
    """
    return timed_dot(
        x, y, dtype=dtype, cluster=cluster, cluster_file=cluster_file, device=device, listener=listener
    ).value


def timed_dot(
    x: Source,
    y: Source,
    *,
    dtype: str | np.dtype | None = None,
    cluster: Cluster = "local",
    cluster_file: str | None = None,
    device: str = "auto",
    listener: Listener = log_notices,
) -> DotRun:
    """``dot`` with what the command line prints besides the value."""
    start = time.perf_counter()
    config.check_all(cluster_file=cluster_file)
    check_choice("device", device, DEVICES)
    check_callable("listener", listener)
    left, right = open_array(x, ndim=1, role="X"), open_array(y, ndim=1, role="Y")
    shared = shared_inputs({"X": left, "Y": right}, copied=True)
    left, right = shared.values()
    if left.shape != right.shape:
        raise ShapeError(
            f"{name_of(left)} has {left.shape[0]} elements and {name_of(right)} has {right.shape[0]};"
            " they must have equally many"
        )
    n = left.shape[0]
    of_x, of_y = (np.dtype(vector.dtype).newbyteorder("=") for vector in (left, right))
    names = f"X: {name_of(left)}", f"Y: {name_of(right)}"
    result = check.result_dtype(of_x, of_y, dtype, names, NUMPY_ELEMENTS, k=n)
    reason = dtype_reason(result, of_x, of_y, n, "numpy.vdot")
    vectors = {"X": left, "Y": right}
    for role, vector in vectors.items():
        if note := packing_notice(role, vector):
            listener(Caution(note))
    masks = {role: found for role, vector in vectors.items() if (found := masks_of(vector)) is not None}
    with (
        _unchanged(X=left, Y=right) as looked,
        open_cluster(cluster, cluster_file) as client,
        workers_held(client, waiting=on_waiting(listener, "dot", "ends it")),
    ):
        facts = survey(client, device)
        check_read_alike(partial(ask_all, client), shared)
        listener(Notice(f"multiplying on {facts[0].name} with {counted(len(facts), 'worker')}"))
        if reason:
            listener(Notice(f"the sum is {reason}"))
        let_a_tick_pass(looked)
        total = dot_stored(
            client,
            left,
            right,
            result,
            device=facts[0].device,
            listener=listener,
            masks=[masks.get(role) for role in vectors],
        )
    masked = {role: count for role, count in zip(vectors, total.masked, strict=True) if role in masks}
    if note := masked_caution(masked, masks, "the product"):
        listener(Caution(note))
    return DotRun(total.value, n, time.perf_counter() - start, reason, total.wraps, masked)


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
