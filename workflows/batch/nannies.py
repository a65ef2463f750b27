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

from tilewright.workflows.batch.folder import JobFolder
from tilewright.workflows.batch.profile import LOOPBACK, BatchProfile

DEATH_SECONDS = 60
"""How long workers look for their scheduler before they end: by then the job has ended too."""


def options_of(profile: BatchProfile, scheduler_file: Path, task: str) -> dict[str, Any]:
    """What a nanny, or dask-cuda's, is given."""
    return {
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


async def run(profile: BatchProfile, scheduler_file: Path, task: str) -> None:
    options = options_of(profile, scheduler_file, task)
    if profile.gpus:
        from dask_cuda import CUDAWorker

        workers = CUDAWorker(**options)
    else:
        from distributed import Nanny

        workers = Nanny(**options)
    await workers
    await workers.finished()


if __name__ == "__main__":
    folder, attempt = JobFolder(Path(sys.argv[1])), int(sys.argv[2])
    asyncio.run(
        run(
            folder.submitted().profile,
            folder.scheduler_file(attempt),
            os.environ.get("SLURM_PROCID", "0"),
        )
    )
