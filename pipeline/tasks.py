"""What one Dask task does. Everything here runs on a worker and is told all it needs by its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distributed import get_worker

from tilewright.pipeline.plan import Tile
from tilewright.pipeline.stream import Product, TileReport, close_engine, engine_for


@dataclass(frozen=True)
class WorkerFacts:
    """What a plan has to know of a worker."""

    device: str
    """``cuda`` or ``cpu``: what ``auto`` means there."""
    name: str
    """The GPU's name, or ``CPU``."""
    device_free_nbytes: int | None
    """Free memory of its GPU; None on a CPU."""
    host_limit_nbytes: int | None
    """The memory limit of the worker; None when it has none."""
    threads: int


def worker_facts(device: str, dask_worker: Any) -> WorkerFacts:
    """Look at this worker and resolve ``device`` (``auto``, ``cuda`` or ``cpu``) on it.

    ``dask_worker`` is filled in by ``Client.run``, which calls this on the worker's event loop.

    Raises
    ------
    DeviceUnavailableError
        ``cuda`` was asked for and this worker has no usable GPU.
    """
    from tilewright.kernels.launch import resolve_device

    limit = dask_worker.memory_manager.memory_limit
    found = resolve_device(device)
    name, free = "CPU", None
    if found == "cuda":
        from numba import cuda

        free = int(cuda.current_context().get_memory_info().free)
        name = cuda.get_current_device().name
        name = name.decode() if isinstance(name, bytes) else str(name)
    return WorkerFacts(found, name, free, limit or None, dask_worker.state.nthreads)


def multiply_tile(product: Product, tile: Tile) -> TileReport:
    """Compute one tile of C and store it. Doing it twice stores the same bytes twice, so a retry is safe."""
    return engine_for(product, get_worker().address).multiply(tile)


def end_run(run: str, abandon: bool) -> None:
    """Free what this worker holds for a run; with ``abandon``, give up the tiles under way at the next panel."""
    close_engine(run, abandon=abandon)
