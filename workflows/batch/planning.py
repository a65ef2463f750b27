"""The plan of a product as a batch job before there is one: for the workers that its profile asks for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import dask

from tilewright.kernels.choices import DeviceName
from tilewright.kernels.numbers import format_nbytes
from tilewright.pipeline.cluster.here.worker import memory_limit, pause_share
from tilewright.pipeline.cluster.profiles import load_profiles
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.worker.survey import facts_here, pause_nbytes
from tilewright.workflows.batch.profile import BatchProfile, job_settings, read_profile


@dataclass(frozen=True)
class PlannedJob:
    """A job that nobody has submitted."""

    called: str
    """What messages call its profile."""
    profile: BatchProfile

    def settings(self) -> AbstractContextManager[Any]:
        """Has the settings hold that hold in the job."""
        return dask.config.set(
            {f"tilewright.{name}": value for name, value in job_settings(self.profile).items()}
        )

    def facts(
        self, device: DeviceName, device_memory: int | str | None, warn: Callable[[str], None]
    ) -> list[WorkerFacts]:
        """What its workers will tell of themselves. Of GPUs it is what ``device_memory`` says, or the first one here
        has; of nodes that the profile says no memory of, what this machine has, which is told by ``warn``.

        Raises OptionError where the job has no such device, DeviceUnavailableError as `facts_here`."""
        profile = self.profile
        if device == "cuda" and not profile.gpus:
            raise OptionError(
                f"device='cuda' (--device): {self.called} asks for no GPU; say gpus_per_node there, or take another"
                " device"
            )
        on_gpu = profile.gpus > 0 and device != "cpu"
        here = facts_here("cuda" if on_gpu else "cpu", None, device_memory)
        limit = profile.memory_limit()
        if isinstance(limit, float):
            node = memory_limit()
            warn(
                f"{self.called} does not say how much memory a node has (mem), so it is taken for that of this machine,"
                f" {format_nbytes(node)}"
            )
            limit = int(limit * node)
        workers = profile.gpus or profile.ntasks_per_node
        alike = replace(
            here,
            host_limit_nbytes=limit,
            pause_nbytes=pause_nbytes(limit, pause_share()),
            cores=1 if profile.gpus else profile.cpus,  # Dask lets a process use one where nobody says more
            usable_cores=profile.cpus,
            host_cores=profile.cpus * profile.tasks,
            threads=profile.threads,
        )
        return [
            replace(alike, address=f"tcp://node-{node}:{worker}")
            for node in range(profile.nodes)
            for worker in range(workers)
        ]


def planned_job(cluster: Any, cluster_file: str | None) -> PlannedJob | None:
    """The job that a profile of kind slurm asks for; None for what is none. Raises ClusterError for one that cannot be
    read, or asks for what Slurm does not have."""
    if not isinstance(cluster, str) or "://" in cluster:
        return None
    profile = load_profiles(cluster_file).get(cluster)
    if profile is None or profile.options["kind"] != "slurm":
        return None
    called = profile.called(cluster)
    return PlannedJob(called, read_profile(called, profile.options))
