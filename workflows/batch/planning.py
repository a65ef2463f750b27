"""The plan of a command as a batch job before there is one: for the workers that its profile asks for."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import dask

from tilewright.kernels.choices import DeviceName
from tilewright.kernels.gpu.device_choice import cuda_available
from tilewright.kernels.numbers import format_nbytes
from tilewright.kernels.words import did_you_mean
from tilewright.pipeline import config
from tilewright.pipeline.cluster.here.worker import memory_limit, pause_share
from tilewright.pipeline.cluster.profiles import load_profiles
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.forecast.hardware import MODELS, Gpu, Hardware, free_nbytes, model_called
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.worker.survey import facts_here, pause_nbytes
from tilewright.workflows.batch.gpu_names import model_in
from tilewright.workflows.batch.profile import BatchProfile, doubts_of, job_settings, read_profile


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

        Raises OptionError where the job has no such device, or nobody knows what memory its GPUs have."""
        model = self._checked(device)
        if self.gpu is None and self._on_gpu(device):
            for doubt in doubts_of(self.called, self.profile):
                warn(doubt)
        if model is not None:
            worker = WorkerFacts("cuda", model.name, self._free_nbytes(model, device_memory, warn), None, 1)
        elif self._on_gpu(device):
            worker = self._of_unknown_gpu(device_memory)
        else:
            worker = facts_here("cpu", None, device_memory)
        return self._on_nodes(worker, warn)

    def facts_of_texts(self, device: DeviceName, warn: Callable[[str], None]) -> list[WorkerFacts]:
        """The same for work on texts, to which it does not matter how much memory a GPU has. Raises OptionError where
        the job has no such device."""
        model = self._checked(device)
        name = model.name if model is not None else "GPU"
        on_gpu = WorkerFacts("cuda", name, None, None, 1)
        return self._on_nodes(on_gpu if self._on_gpu(device) else facts_here("cpu", None, None), warn)

    def _checked(self, device: DeviceName) -> Gpu | None:
        """As `model`; raises OptionError where the job has no GPU, and one was named."""
        if device == "cuda" and not self.profile.gpus:
            raise OptionError(
                f"device='cuda' (--device): {self.called} asks for no GPU; say gpus_per_node there, or take another"
                " device"
            )
        if self.gpu is not None and not self.profile.gpus:
            raise OptionError(
                f"gpu={self.gpu.name!r} (--gpu): {self.called} asks for no GPU; say gpus_per_node there, or leave --gpu"
                " away (--rate says how fast a worker without one is)"
            )
        return self.model(device)

    def _on_gpu(self, device: DeviceName) -> bool:
        return self.profile.gpus > 0 and device != "cpu"

    def _of_unknown_gpu(self, device_memory: int | str | None) -> WorkerFacts:
        """A worker on a GPU of which the profile does not say what it is: it has what ``device_memory`` says, or what
        the first one here has."""
        asked = config.get("device-memory", device_memory)
        if asked is None and not cuda_available():
            unknown = [name for _, name in self.profile.gpu_names[:1] if model_in(name) is None]
            near = "".join(did_you_mean(name, MODELS, name="{}") for name in unknown)
            raise OptionError(
                f"{self.called} says {self._said_of_gpus()}, by which it is not known how much memory its GPUs have,"
                f" and there is none here{near}{' N' if near else '; n'}ame their model (--gpu, gpu), say how much each"
                " has free (--device-memory, device_memory), or name it in the profile, as gpus_per_node:"
                f" h100:{self.profile.gpus}; known are {', '.join(MODELS)}"
            )
        return facts_here("cuda", None, device_memory)

    def _said_of_gpus(self) -> str:
        """What the profile says of its GPUs, with its keys."""
        said = [f"gpus_per_node: {self.profile.gpus_per_node}"]
        if self.profile.constraint is not None:
            said.append(f"constraint: {self.profile.constraint}")
        return " and ".join(said)

    def _on_nodes(self, worker: WorkerFacts, warn: Callable[[str], None]) -> list[WorkerFacts]:
        """Workers like this one, on the nodes that the profile asks for, with their memory and cores."""
        profile = self.profile
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
            worker,
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
