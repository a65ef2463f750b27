"""The plan of a product as a batch job before there is one: for the workers that its profile asks for."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import dask

from tilewright.kernels.choices import DeviceName
from tilewright.kernels.numbers import format_nbytes
from tilewright.pipeline import config
from tilewright.pipeline.cluster.here.worker import memory_limit, pause_share
from tilewright.pipeline.cluster.profiles import load_profiles
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.forecast.hardware import Gpu, Hardware, free_nbytes, model_called
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.worker.survey import facts_here, pause_nbytes
from tilewright.workflows.batch.profile import BatchProfile, job_settings, read_profile


@dataclass(frozen=True)
class PlannedJob:
    """A job that nobody has submitted."""

    called: str
    """What messages call its profile."""
    profile: BatchProfile
    gpu: Gpu | None = None
    """What its GPUs are, as the user says; None: what the profile says."""

    def settings(self) -> AbstractContextManager[Any]:
        """Has the settings hold that hold in the job."""
        return dask.config.set(
            {f"tilewright.{name}": value for name, value in job_settings(self.profile).items()}
        )

    @property
    def by_profile(self) -> tuple[Gpu, str] | None:
        """The model that the profile says its GPUs are, and where it does; None where it says none, or several."""
        if not self.profile.gpus:
            return None
        named = [
            (model, f"{key}: {name}") for key, name in self.profile.gpu_names if (model := model_called(name))
        ]
        return named[0] if len({model.name for model, _ in named}) == 1 else None

    def model(self, device: DeviceName) -> Gpu | None:
        """What its GPUs are, if it works on them and that is known."""
        if device == "cpu":
            return None
        return self.gpu or (self.by_profile[0] if self.by_profile is not None else None)

    def hardware(self, device: DeviceName, rate: float | None) -> Hardware:
        """What is known of its workers, which do so many operations a second; None: as their GPUs do."""
        profile = self.profile
        on_node = profile.gpus or profile.ntasks_per_node
        cores = profile.cpus_per_gpu if profile.gpus else profile.cpus_per_task
        return Hardware(profile.workers, self.model(device), rate, on_host=on_node, cores=cores, queued=True)

    def facts(
        self, device: DeviceName, device_memory: int | str | None, warn: Callable[[str], None]
    ) -> list[WorkerFacts]:
        """What its workers will tell of themselves. Of GPUs it is what a data sheet says of their model; where nobody
        says what they are, what ``device_memory`` says, or the first one here has. Of nodes that the profile says no
        memory of it is what this machine has. ``warn`` is told what was taken for granted.

        Raises OptionError where the job has no such device, DeviceUnavailableError as `facts_here`."""
        profile = self.profile
        if device == "cuda" and not profile.gpus:
            raise OptionError(
                f"device='cuda' (--device): {self.called} asks for no GPU; say gpus_per_node there, or take another"
                " device"
            )
        if self.gpu is not None and not profile.gpus:
            raise OptionError(
                f"gpu={self.gpu.name!r} (--gpu): {self.called} asks for no GPU; say gpus_per_node there, or leave --gpu"
                " away (--rate says how fast a worker without one is)"
            )
        on_gpu = profile.gpus > 0 and device != "cpu"
        model = self.model(device)
        if model is not None:
            here = WorkerFacts("cuda", model.name, self._free_nbytes(model, device_memory, warn), None, 1)
        else:
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

    def _free_nbytes(self, model: Gpu, device_memory: int | str | None, warn: Callable[[str], None]) -> int:
        """What each GPU has for tiles and panels; ``warn`` is told how it is known which model it is."""
        asked = config.get("device-memory", device_memory)
        said = self.by_profile
        if self.gpu is not None:
            if said is not None and said[0] != self.gpu:
                warn(
                    f"{self.called} says {said[1]}, and the plan is for {self.gpu.name}, as --gpu (gpu) says"
                )
            return free_nbytes(model, asked)
        warn(
            f"the GPUs are taken for {model.name}, since {self.called} says {said[1] if said else ''}; if they are"
            " others, name them (--gpu)"
        )
        # Sites call boards of several sizes alike: whoever says how much theirs have free knows it better.
        return max(free_nbytes(model, None), asked or 0)


def planned_job(
    cluster: Any, cluster_file: str | os.PathLike[str] | None, gpu: Gpu | None = None
) -> PlannedJob | None:
    """The job that a profile of kind slurm asks for; None for what is none. gpu: what its GPUs are, as the user says.
    Raises ClusterError for one that cannot be read, or asks for what Slurm does not have."""
    if not isinstance(cluster, str) or "://" in cluster:
        return None
    profile = load_profiles(cluster_file).get(cluster)
    if profile is None or profile.options["kind"] != "slurm":
        return None
    called = profile.called(cluster)
    return PlannedJob(called, read_profile(called, profile.options), gpu)
