"""The options that say how work is run, whatever the work: as public functions take them, and as requests hold them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, TypedDict, get_args

import numpy as np

from tilewright.kernels.arguments import check_callable, check_choice
from tilewright.kernels.choices import DEVICES, DeviceName, PrecisionName
from tilewright.pipeline import config
from tilewright.pipeline.cluster.profiles import Cluster
from tilewright.pipeline.events import Listener, log_notices
from tilewright.pipeline.forecast.hardware import Hardware
from tilewright.pipeline.store.labels.alignment import Align
from tilewright.pipeline.store.new.storage import Sides

Durability: TypeAlias = Literal["full", "none"]
DURABILITIES: tuple[Durability, ...] = get_args(Durability)


class RunOptions(TypedDict, total=False):
    """What public functions that store something made of matrices take by name, all of them alike."""

    align: Align
    precision: PrecisionName
    cluster: Cluster
    cluster_file: str | None
    device: DeviceName
    device_memory: int | str | None
    resume: bool
    verify: bool
    overwrite: bool
    listener: Listener


class StorageOptions(RunOptions, total=False):
    """The same of those that store one matrix."""

    durability: Durability
    same_bits: bool
    chunks: Sides | None
    shards: Sides | None
    codec: str | None


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """Where something is computed, and how exactly: what all requests for work on matrices have."""

    precision: PrecisionName = "full"
    cluster: Cluster = "local"
    cluster_file: str | None = None
    device: DeviceName = "auto"
    device_memory: int | str | None = None
    listener: Listener = log_notices
    hardware: Hardware | None = None
    """Of a plan: the workers that it is for, where these are not the cluster's."""

    def check_place(self) -> None:
        """Raise OptionError unless these are good; the cluster and the precision are not looked at."""
        config.check_all(device_memory=self.device_memory, cluster_file=self.cluster_file)
        check_choice("device", self.device, DEVICES)
        check_callable("listener", self.listener)


@dataclass(frozen=True, kw_only=True)
class MatrixRequest(RunRequest):
    """The same for what ends in one stored matrix."""

    dtype: str | np.dtype | None = None
    resume: bool = True
    verify: bool = True
    overwrite: bool = False
    durability: Durability = "full"
    same_bits: bool = False

    def run_options(self) -> dict[str, Any]:
        """All of these by name, for the request of a part of the work."""
        return {each.name: getattr(self, each.name) for each in fields(MatrixRequest)}
