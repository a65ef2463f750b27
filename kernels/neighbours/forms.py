"""Which form of the search a kind of device has: for a CPU and, where there is one, for a GPU."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np

from tilewright.kernels.choices import DeviceKind, PrecisionName
from tilewright.kernels.neighbours.order import MetricName

_HOST, _DEVICE = "tilewright.kernels.neighbours.host", "tilewright.kernels.neighbours.device"


def has_device_form() -> bool:
    """Whether neighbours can be found by a GPU."""
    return importlib.util.find_spec(_DEVICE) is not None


def finds_on_gpu(
    a: np.dtype, b: np.dtype, depth: int, metric: MetricName, columns: int, k: int | None
) -> bool:
    """Whether a GPU finds the neighbours, or where k is None the pairs, of rows of these dtypes and length. columns:
    rows of B."""
    if not has_device_form():
        return False
    found: bool = importlib.import_module(_DEVICE).supports(a, b, depth, metric, columns, k or 1)
    return found


def compares_once(dtype: np.dtype, precision: PrecisionName) -> bool:
    """Whether a GPU may compare rows of this dtype among themselves once each pair, in bands: its tensor cores take
    them, if it is one of Hopper's."""
    return importlib.import_module(_DEVICE).tensor_kinds(dtype, dtype, precision) is not None


def nearest_for(device: DeviceKind) -> Any:
    """The class that finds the k nearest on such a device: `host.Nearest`, or its twin, which takes arrays on the GPU
    and a ``precision``."""
    return importlib.import_module(_DEVICE if device == "cuda" else _HOST).Nearest


def mutual_for(device: DeviceKind) -> Any:
    """The module that finds the k nearest of rows among themselves, which GPUs have alone: `mutual`."""
    assert device == "cuda"
    return importlib.import_module("tilewright.kernels.neighbours.mutual")


def pairs_for(device: DeviceKind) -> Any:
    """The class that finds pairs beyond a threshold: `host.Beyond`, or its twin, with the same difference."""
    return importlib.import_module(_DEVICE if device == "cuda" else _HOST).Beyond
