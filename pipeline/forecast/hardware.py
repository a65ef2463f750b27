"""Workers that a user names because they are elsewhere: so many, of a GPU that is known by its data sheet, or of a rate
that the user knows."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from tilewright.kernels.arguments import as_count, check_choice, shown
from tilewright.kernels.choices import GPUS, DeviceName, GpuName
from tilewright.kernels.numbers import format_nbytes
from tilewright.pipeline import config
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.worker.survey import facts_here

T = 1e12
GB = 1e9


@dataclass(frozen=True)
class Gpu:
    """What the vendor publishes of a GPU: peaks of dense matrices, without sparsity. How fast its memory is does not
    matter: what a job goes through comes over the bus, which is slower."""

    name: str
    memory_nbytes: float
    bus_rate: float
    """Of the PCI Express bus, bytes a second in one direction: half of what data sheets give."""
    float16: float
    """Operations a second of the tensor cores; bfloat16 has the same."""
    tf32: float
    float32: float
    """Of the ordinary cores, which multiply float32 in full."""
    float64: float
    """Of the tensor cores where they take float64, else of the ordinary ones."""
    int8: float
    measured: bool
    """Whether `published.py` has its shares from GPUs of this architecture."""
    sheet: str
    """Where the figures are from."""


_A100 = "NVIDIA A100 Tensor Core GPU, data sheet 1758950 (2021)"
_A40 = f"{_A100}, for the memory its first edition (2020)"
_H100 = (
    "NVIDIA H100 Tensor Core GPU, data sheet 2430615 (2022 to 2023), with sparsity, of which half is taken"
)
_H200 = "NVIDIA H200 Tensor Core GPU, data sheet (2023 to 2024), with sparsity, of which half is taken"
_L40S = "NVIDIA L40S, data sheet (2023); float64, a 64th of float32, by the white paper of NVIDIA's Ada architecture"

MODELS: dict[GpuName, Gpu] = {
    "a100": Gpu("NVIDIA A100 80 GB", 80 * GB, 32 * GB, 312 * T, 156 * T, 19.5 * T, 19.5 * T, 624 * T, False, _A100),
    "a100-40gb": Gpu("NVIDIA A100 40 GB", 40 * GB, 32 * GB, 312 * T, 156 * T, 19.5 * T, 19.5 * T, 624 * T, False, _A40),
    "h100": Gpu("NVIDIA H100 SXM", 80 * GB, 64 * GB, 989 * T, 494 * T, 67 * T, 67 * T, 1979 * T, True, _H100),
    "h100-pcie": Gpu("NVIDIA H100 PCIe", 80 * GB, 64 * GB, 756 * T, 378 * T, 51 * T, 51 * T, 1513 * T, True, _H100),
    "h200": Gpu("NVIDIA H200 SXM", 141 * GB, 64 * GB, 989 * T, 494 * T, 67 * T, 67 * T, 1979 * T, True, _H200),
    "l40s": Gpu("NVIDIA L40S", 48 * GB, 32 * GB, 362 * T, 183 * T, 91.6 * T, 1.43 * T, 733 * T, False, _L40S),
}  # fmt: skip
"""By the name that ``--gpu`` takes. Others can be had by ``--rate`` and ``--device-memory``."""

CALLED: dict[GpuName, str] = {
    "a100": r"a100(-(sxm4|pcie))?(-80(gb?)?(-pcie)?)?",
    "a100-40gb": r"a100(-(sxm4|pcie))?-40(gb?)?",
    "h100": r"h100(-sxm5?)?(-80(gb?)?(-hbm3)?)?",
    "h100-pcie": r"h100-pcie(-80(gb?)?)?",
    "h200": r"h200(-sxm)?(-141(gb?)?(-hbm3e)?)?",
    "l40s": r"l40s(-48(gb?)?)?",
}
"""What else a model is called: as types of GPUs and features of nodes, by sites and by Slurm itself, which makes them
of the driver's names. Whole names alone count: others are of other boards (``h100_nvl``), or of parts of one
(``a100_3g.20gb``)."""

FREE_SHARE = 0.9
"""Of a GPU's memory, where nothing else runs: the driver and the code of kernels take some."""
GPU_CORES = 16
"""Cores of a host for each of its GPUs: those of the hosts that were measured."""
HOST_GPUS = 8
"""The most GPUs that share a host, where nobody says more."""
MOST_WORKERS = 10**6
"""The most workers that a plan may be asked for: each is an entry in a list, and more than any cluster has would only
fill memory."""


@dataclass(frozen=True)
class Hardware:
    """Workers that a plan is for."""

    workers: int = 1
    gpu: Gpu | None = None
    """Of each; None: they are like this machine, or as ``device`` and ``device_memory`` say."""
    rate: float | None = None
    """Operations a second that each multiplies at, as the user says."""
    found: tuple[WorkerFacts, ...] | None = None
    """What the workers have, where that is known; None: it follows from the above."""
    on_host: int = HOST_GPUS
    """The most that share a host."""
    cores: int = GPU_CORES
    """Of a host, for each of them."""
    queued: bool = False
    """Whether they are those of a job, which waits in a queue before."""

    @classmethod
    def named(cls, workers: Any = None, gpu: Any = None, rate: Any = None) -> Hardware | None:
        """What a user says of it; None where that is nothing. Raises OptionError."""
        if workers is None and gpu is None and rate is None:
            return None
        count = as_count(1 if workers is None else workers)
        if count is None or count < 1:
            raise OptionError(
                f"workers={shown(workers)}: a product needs a whole number of workers, one or more"
            )
        if count > MOST_WORKERS:
            raise OptionError(f"workers={shown(workers)}: a plan is for {MOST_WORKERS} workers at most")
        if gpu is not None:
            check_choice("gpu", gpu, GPUS)
        if rate is not None and not (isinstance(rate, int | float) and 0 < rate < math.inf):
            raise OptionError(
                f"rate={shown(rate)}: operations a second of one worker, such as 5e13 (--rate 50T)"
            )
        return cls(count, None if gpu is None else MODELS[gpu], rate)

    def check(self, device: DeviceName) -> None:
        """Raise OptionError where a plan is to be for another device too."""
        if self.gpu is not None and device == "cpu":
            raise OptionError(
                f"gpu={self.gpu.name!r} beside device='cpu': say which of them multiplies, and leave the other away"
                " (--gpu, --device)"
            )

    def facts(
        self, device: str, host_memory: int | None, device_memory: int | str | None
    ) -> list[WorkerFacts]:
        """The workers. Of a GPU that is named nothing is asked of this machine; hosts have memory enough unless
        ``host_memory`` says how much. Raises OptionError where they have not the memory that is asked for."""
        if self.found is not None:
            return list(self.found)
        if self.gpu is None:
            return [facts_here(device, host_memory, device_memory)] * self.workers
        free = free_nbytes(self.gpu, config.get("device-memory", device_memory))
        cores = GPU_CORES, GPU_CORES, GPU_CORES * min(self.workers, HOST_GPUS)
        return [WorkerFacts("cuda", self.gpu.name, free, host_memory, *cores)] * self.workers


def free_nbytes(gpu: Gpu, asked: int | None) -> int:
    """What such a GPU has for tiles and panels at most. Raises OptionError where more is asked for than it has."""
    if asked is not None and asked > gpu.memory_nbytes:
        raise OptionError(
            f"device_memory={format_nbytes(asked)} (--device-memory): {gpu.name} has"
            f" {format_nbytes(int(gpu.memory_nbytes))}; give at most that"
        )
    return int(FREE_SHARE * gpu.memory_nbytes)


def model_called(name: str) -> Gpu | None:
    """The model that a site, Slurm, the driver or this table calls so; None for what is none, or one of which nothing
    is known."""
    if (ours := next((gpu for gpu in MODELS.values() if gpu.name == name), None)) is not None:
        return ours
    plain = re.sub(r"[ _]+", "-", name.strip().lower()).removeprefix("nvidia-").removeprefix("tesla-")
    return next((MODELS[model] for model, form in CALLED.items() if re.fullmatch(form, plain)), None)
