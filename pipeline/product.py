"""What workers are told to multiply, and what they report of each tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr

from tilewright.pipeline.events import Span
from tilewright.pipeline.plan import MatmulPlan

STAGES = ("read", "upload", "compute", "download", "write")
THREADS = {"load": ("read", "upload"), "compute": ("compute",), "write": ("download", "write")}
"""The threads that a tile passes through, and the stages that each of them counts."""


@dataclass(frozen=True)
class Product:
    """What to multiply and how; the same for every tile, so one engine serves them all."""

    a: zarr.Array[Any]
    b: zarr.Array[Any]
    c: zarr.Array[Any]
    plan: MatmulPlan
    device: str
    """``cuda`` or ``cpu``: decided before the first task, never by one."""
    precision: str
    run: str
    """Names the run among all that a worker may serve."""
    neighbours: int = 1
    """Workers of a host, of the one with most of them."""
    sharing: frozenset[str] = frozenset()
    """Addresses of workers that may give each other panels, where they are of one host."""


@dataclass(frozen=True)
class TileReport:
    """What one finished tile, or part of one, tells. Elements cross the wire only where k is cut: ``partial``."""

    index: int
    worker: str
    seconds: float
    stages: dict[str, float]
    """Busy seconds of each stage for this tile."""
    kernels: frozenset[str]
    """What multiplied it; nothing where there was nothing to add up."""
    read_nbytes: int
    """Bytes of A and B that were read for it; what the worker held already is not read again."""
    shared_nbytes: int = 0
    """Bytes of A and B that were copied for it from other workers' GPUs."""
    partial: np.ndarray | None = None
    """The tile's sum over one part of k, rows × columns, when the plan cuts k into parts; else it is stored."""
    spans: tuple[Span, ...] = ()
    """When this worker's threads were busy with the tile: one for each panel loaded, each multiplied, and the write."""
    stored_nbytes: int = 0
    """Bytes that its chunks take up as they are stored; 0 where it is not stored, or in a remote array."""
