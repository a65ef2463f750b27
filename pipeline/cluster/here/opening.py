"""From what a caller says of a cluster to a client: of this process alone where that is all there would be, else of
Dask's (`pipeline/cluster/cluster.py`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from tilewright.kernels.cpu.loops import start_compiler
from tilewright.kernels.gpu.device_choice import start_driver
from tilewright.pipeline.cluster.here.checks import (
    allow_open_files,
    check_folder,
    check_not_forked,
    check_not_started_by_workers,
)
from tilewright.pipeline.cluster.here.client import HereClient
from tilewright.pipeline.cluster.profiles import Cluster, Profile, load_profiles

if TYPE_CHECKING:
    from distributed import Client

THREADS = "threads_per_worker"
"""The one key of a profile, beside its kind, that says something of threads in this process."""


@contextmanager
def open_executor(
    cluster: Cluster,
    config: str | os.PathLike[str] | None = None,
    *,
    loops: bool = True,
    graphs: bool = False,
) -> Iterator[Client]:
    """What does the work of a run: as `open_cluster` says, but where that would be one worker of this process, threads
    of this process by themselves, without Dask's scheduler. The same functions of `pipeline/cluster/` hand out work to
    both, watch it and end it.

    graphs: whether Dask's own graphs are to be computed. Raises as `open_cluster`.
    """
    if isinstance(cluster, HereClient):
        yield cast("Client", cluster)
        return
    found = _threads_here(cluster, config) if not graphs else None
    if found is None:
        from tilewright.pipeline.cluster.cluster import open_cluster

        with open_cluster(cluster, config, loops=loops) as client:
            yield client
        return
    called, threads = found
    check_not_forked()
    check_not_started_by_workers(called)
    check_folder(called)
    allow_open_files(0)
    if loops:
        start_compiler()
    with HereClient(threads) as here:
        yield cast("Client", here)


def start_device(device: str, cluster: Cluster, config: str | os.PathLike[str] | None = None) -> None:
    """Have a GPU made ready while Python goes on, where a run that asks for such a device will work in this process on
    one. Raises ClusterError for a file of profiles that cannot be read."""
    if device != "cpu" and _threads_here(cluster, config) is not None:
        start_driver()


def _threads_here(cluster: Cluster, config: str | os.PathLike[str] | None) -> tuple[str, int] | None:
    """What messages call the profile, and its threads, where all that it says is how many of this process work; None
    for all else, errors too, of which Dask's way tells."""
    if not isinstance(cluster, str) or "://" in cluster:
        return None
    profile: Profile | None = load_profiles(config).get(cluster)
    if profile is None or profile.options["kind"] != "local" or profile.options.keys() != {"kind", THREADS}:
        return None
    threads: Any = profile.options[THREADS]
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        return None
    return profile.called(cluster), threads
