"""What a plan and its placement have to know about workers: what they are, what they have, who is on whose host."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dask.system import CPU_COUNT

from tilewright.kernels.choices import DeviceKind


@dataclass(frozen=True)
class WorkerFacts:
    """What a plan has to know about a worker."""

    device: DeviceKind
    """``cuda`` or ``cpu``: what ``auto`` means there."""
    name: str
    """The GPU's name, or ``CPU``."""
    device_free_nbytes: int | None
    """Free memory of its GPU; None on a CPU."""
    host_limit_nbytes: int | None
    """The worker's memory limit; None: it has none."""
    cores: int
    """Cores that a product on its CPU uses: OMP_NUM_THREADS where that is set (as Dask does for several processes of a
    host), else all."""
    usable_cores: int = 1
    """Cores that its process may use, regardless of OMP_NUM_THREADS."""
    host_cores: int = 1
    """All cores of its host."""
    address: str = ""
    """Where other workers reach it."""
    pause_nbytes: int | None = None
    """From so many bytes of its process on Dask gives it no more tasks; None: it always does."""
    threads: int = 1
    """Dask's, each of which runs a task."""


def pause_nbytes(limit_nbytes: int | None, fraction: float | bool | None) -> int | None:
    """From how many bytes on Dask gives a worker no more tasks. fraction: of its limit, as Dask's setting gives it."""
    return int(limit_nbytes * fraction) if limit_nbytes and fraction else None


def cores_here() -> int:
    """Cores that BLAS uses in this process. Dask starts several processes of one host with OMP_NUM_THREADS=1."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdigit() and int(threads) > 0 else CPU_COUNT


@dataclass(frozen=True)
class Sharers:
    """Workers of one host that need the same panels of A, and of B, as a tile does, its own worker included."""

    a: tuple[str, ...] = ()
    b: tuple[str, ...] = ()

    def reached_from(self, worker: str) -> Sharers:
        """These for a worker of the same host; none for a worker of another, to which Dask gave the tile instead."""
        here = all(host_of(other) == host_of(worker) for other in self.a + self.b)
        return self if here else Sharers()


def host_of(address: str) -> str:
    """The part of a worker's address that it shares with other workers of its host."""
    return address.rpartition(":")[0]
