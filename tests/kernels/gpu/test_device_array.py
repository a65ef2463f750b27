"""What stands between a caller's array and a device array, as far as it needs no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilewright.kernels.errors import OptionError
from tilewright.kernels.gpu import device_array
from tilewright.kernels.gpu.device_array import (
    DeviceRegion,
    address,
    alignment,
    as_device_array,
    is_device_array,
    memory_of,
)
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.gpu.streams import DEFAULT_STREAM, as_stream


class Exporter:
    """An array of another library, as its interface tells it; nothing reads the memory."""

    def __init__(self, **told: Any) -> None:
        self.told = told

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        told = {"shape": (3, 4), "typestr": "<f4", "data": (0x7F0000000010, False), "version": 3}
        return told | self.told


pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no arrays of other libraries")


def test_an_exported_array_is_seen_without_copying() -> None:
    view = as_device_array(Exporter())
    assert (view.shape, view.strides, view.dtype, view.size) == ((3, 4), (16, 4), np.float32, 12)
    assert address(view) == 0x7F0000000010
    assert alignment(address(view)) == 16
    assert not view.read_only
    assert view.stream == DEFAULT_STREAM


def test_strides_and_the_read_only_flag_are_kept() -> None:
    view = as_device_array(Exporter(strides=(-4, 12), data=(64, True)))
    assert view.strides == (-4, 12)
    assert view.read_only


@pytest.mark.parametrize(("strides", "first"), [((32, 4), 2 * 32 + 3 * 4), ((4, 32), 2 * 4 + 3 * 32)])
def test_a_region_lies_in_its_matrix(strides: tuple[int, int], first: int) -> None:
    matrix = Exporter(shape=(8, 8), strides=strides, data=(0x1000, True))
    region = DeviceRegion(matrix, slice(2, 7), slice(3, 5))
    assert is_device_array(region)
    memory = memory_of(region)
    assert memory == (0x1000 + first, (5, 2), strides, np.float32, DEFAULT_STREAM, True)
    inner = memory_of(DeviceRegion(region, slice(1, 2), slice(1, 2)))
    assert inner.pointer == memory.pointer + sum(strides)
    view = as_device_array(region)
    assert (view.shape, view.strides, address(view)) == ((5, 2), strides, 0x1000 + first)


def test_a_region_is_exported_with_the_stream_of_its_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_array, "current_device", lambda: 0)
    monkeypatch.setattr(device_array, "external_stream", lambda handle, device: handle)
    plain, streamed = (
        DeviceRegion(Exporter(shape=(8, 8), **more), slice(2, 7), slice(3, 5))
        for more in ({}, {"stream": 77})
    )
    assert "stream" not in plain.__cuda_array_interface__
    assert memory_of(streamed).stream == 77


def test_a_masked_array_is_refused() -> None:
    with pytest.raises(OptionError, match="masked"):
        as_device_array(Exporter(mask=Exporter()))


def test_what_lives_on_a_device_is_told_by_its_interface() -> None:
    assert is_device_array(Exporter())
    assert not is_device_array(np.zeros(3))
    assert not is_device_array([1, 2])


@pytest.mark.parametrize(("pointer", "aligned"), [(0, 128), (1, 1), (48, 16), (4096, 128)])
def test_alignment(pointer: int, aligned: int) -> None:
    assert alignment(pointer) == aligned


def test_a_stream_that_is_none_is_named() -> None:
    with pytest.raises(OptionError, match="is not a CUDA stream"):
        as_stream("main")
