"""What one Dask task does. Everything here runs on a worker and is told all it needs by its arguments."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from dask.system import CPU_COUNT
from distributed import get_worker

from tilewright.pipeline.errors import TilewrightError
from tilewright.pipeline.plan import Tile
from tilewright.pipeline.stream import (
    Product,
    TileReport,
    close_engine,
    close_idle_engines,
    engine_for,
    store_sum,
)


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
    cores: int
    """Cores that a product on its CPU uses: all, or what OMP_NUM_THREADS leaves a process of many."""


def cores_here() -> int:
    """Cores that BLAS uses in this process: Dask starts processes of one host with OMP_NUM_THREADS=1."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdigit() and int(threads) > 0 else CPU_COUNT


def worker_facts(device: str, dask_worker: Any) -> WorkerFacts | TilewrightError:
    """Look at this worker and resolve ``device`` (``auto``, ``cuda`` or ``cpu``) on it.

    ``dask_worker`` is filled in by ``Client.run``, which calls this on the worker's event loop.

    An error of ours is returned rather than raised, which the worker would report at length on its own account:
    ``cuda`` was asked for and this worker has no usable GPU.
    """
    from tilewright.kernels.launch import resolve_device

    limit = dask_worker.memory_manager.memory_limit
    try:
        found = resolve_device(device)
    except TilewrightError as error:
        return error
    close_idle_engines()
    name, free = "CPU", None
    if found == "cuda":
        from numba import cuda

        context = cuda.current_context()
        context.memory_manager.deallocations.clear()  # what Numba has let go of but not yet given back counts as free
        free = int(context.get_memory_info().free)
        name = cuda.get_current_device().name
        name = name.decode() if isinstance(name, bytes) else str(name)
    return WorkerFacts(found, name, free, limit or None, cores_here())


def multiply_tile(product: Product, tile: Tile) -> TileReport:
    """Compute one tile of C and store it. Doing it twice stores the same bytes twice, so a retry is safe."""
    return engine_for(product, get_worker().address).multiply(tile)


def multiply_part(product: Product, tile: Tile, part: int) -> TileReport:
    """The sum of one tile over one part of k; it stays on the worker until ``add_parts`` asks for it."""
    return engine_for(product, get_worker().address).multiply(tile, part)


def add_parts(product: Product, tile: Tile, *parts: TileReport) -> TileReport:
    """Store one tile as the sum of its parts, in their order; the report counts what all of them took."""
    start = time.perf_counter()
    store_sum(product, tile, [part.partial for part in parts if part.partial is not None])
    seconds = time.perf_counter() - start
    stages = {stage: sum(part.stages[stage] for part in parts) for stage in parts[0].stages}
    stages["write"] += seconds
    seconds += max(part.seconds for part in parts)
    read = sum(part.read_nbytes for part in parts)
    return TileReport(tile.index, get_worker().address, seconds, stages, parts[0].kernel, read)


def end_run(run: str, abandon: bool) -> None:
    """Free what this worker holds for a run; with ``abandon``, give up the tiles under way at the next panel."""
    close_engine(run, abandon=abandon)
