"""Which form of the search a kind of device has: for a CPU and, where there is one, for a GPU."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from tilewright.kernels.choices import DeviceKind

_HOST, _DEVICE = "tilewright.kernels.neighbours.host", "tilewright.kernels.neighbours.device"


def has_device_form() -> bool:
    """Whether neighbours can be found by a GPU."""
    return importlib.util.find_spec(_DEVICE) is not None


def nearest_for(device: DeviceKind) -> Any:
    """The class that finds the k nearest on such a device: `host.Nearest`, or its twin."""
    return importlib.import_module(_DEVICE if device == "cuda" else _HOST).Nearest


def pairs_for(device: DeviceKind) -> Any:
    """The class that finds pairs beyond a threshold: `host.Beyond`, or its twin."""
    return importlib.import_module(_DEVICE if device == "cuda" else _HOST).Beyond
