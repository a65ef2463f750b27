"""The workers of one task of a job, each under one of Dask's nannies, which starts it anew where it dies."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # before what takes long to import; worker processes inherit it

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from tilewright.pipeline.cluster.node.places import LOOPBACK, folder_here
from tilewright.pipeline.errors import ClusterError
from tilewright.workflows.batch.folder import JobFolder
from tilewright.workflows.batch.profile import BatchProfile

EVERYWHERE = "0.0.0.0"
DEATH_SECONDS = 60
"""How long workers look for their scheduler before they end: by then the job has ended too."""


def options_of(profile: BatchProfile, scheduler_file: Path, task: str) -> dict[str, Any]:
    """What a nanny, or dask-cuda's, is given. Raises ClusterError where this node has no such folder as the profile
    says."""
    options = {
        "scheduler_file": str(scheduler_file),
        "nthreads": profile.threads,
        "memory_limit": profile.memory_limit(),
        "interface": profile.interface,
        "name": f"{os.environ.get('SLURMD_NODENAME', 'node')}-{task}",
        "death_timeout": DEATH_SECONDS,
        "host": profile.host,
        "dashboard": False,
        "dashboard_address": f"{LOOPBACK}:0",  # what they serve by HTTP all the same is not encrypted
    }  # and certificates by the environment, where Dask's settings look for them
    if profile.local_directory is not None:
        options["local_directory"] = folder_here("the profile", profile.local_directory)
    if profile.nanny_port is not None:
        options["port"] = profile.nanny_port
    if profile.worker_port is not None:
        options["listen_at"] = profile.worker_port
    if profile.metrics_port is not None:
        options["metrics_at"] = (_metrics_host(profile.interface), profile.metrics_port)
    return options


def _metrics_host(interface: str | None) -> str:
    """Where metrics are served: on the job's network, or on all where the profile names none."""
    from distributed.utils import get_ip_interface

    return EVERYWHERE if interface is None else get_ip_interface(interface)


async def run(profile: BatchProfile, scheduler_file: Path, task: str) -> None:
    from tilewright.pipeline.cluster.node.workers import NodeNanny, NodeWorker

    options = options_of(profile, scheduler_file, task)
    fixed = {"listen_at", "metrics_at"} & options.keys()
    if profile.gpus:
        from dask_cuda import CUDAWorker

        if fixed:
            options["worker_class"] = NodeWorker
        workers = CUDAWorker(**options)
    else:
        from distributed import Nanny

        workers = (NodeNanny if fixed else Nanny)(**options)
    await workers
    await workers.finished()


if __name__ == "__main__":
    folder, attempt = JobFolder(Path(sys.argv[1])), int(sys.argv[2])
    try:
        asyncio.run(
            run(
                folder.submitted().profile,
                folder.scheduler_file(attempt),
                os.environ.get("SLURM_PROCID", "0"),
            )
        )
    except ClusterError as error:
        sys.exit(str(error))
