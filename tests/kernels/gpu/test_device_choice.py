"""Which device is chosen, as far as it needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tilewright.kernels.errors import OptionError
from tilewright.kernels.gpu import device_choice

pytestmark = pytest.mark.skipif(device_choice.SIMULATOR, reason="the simulator counts as a GPU")


def test_the_cpu_cannot_serve_device_arrays() -> None:
    with pytest.raises(OptionError, match="copy them to the host first"):
        device_choice.resolve_device("cpu", device_arrays=True)
    assert device_choice.resolve_device("auto", device_arrays=True) == "cuda"


@pytest.mark.parametrize(
    ("initialised", "count", "asked_further"),
    [
        (0, 0, False),
        (0, 1, True),
        (0, 8, True),
        (device_choice.CUDA_ERROR_NO_DEVICE, 0, False),
        (999, 0, True),
    ],
)
def test_a_driver_without_a_gpu_is_seen_before_any_import_for_it(
    initialised: int, count: int, asked_further: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count_devices(place: Any) -> int:
        place._obj.value = count
        return 0

    driver = SimpleNamespace(cuInit=lambda flags: initialised, cuDeviceGetCount=count_devices)
    tried = []

    def load(name: str) -> Any:
        tried.append(name)
        if len(tried) < 3:
            raise OSError(name)
        return driver

    monkeypatch.setattr(device_choice.ctypes, "CDLL", load)
    assert device_choice._driver_shows_a_gpu() is asked_further
    assert tried == list(device_choice.DRIVER_LIBRARIES[:3])


def test_where_there_is_no_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(device_choice.ctypes, "CDLL", refuse)
    assert device_choice._driver_shows_a_gpu() is False
