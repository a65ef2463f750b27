"""What stands between a caller's array and a launch, as far as it needs no GPU."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tilewright.kernels import launch
from tilewright.kernels.errors import OptionError


class Exporter:
    """An array of another library, as its interface tells it; nothing reads the memory."""

    def __init__(self, **told: Any) -> None:
        self.told = told

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        told = {"shape": (3, 4), "typestr": "<f4", "data": (0x7F0000000010, False), "version": 3}
        return told | self.told


pytestmark = pytest.mark.skipif(launch.SIMULATOR, reason="the simulator has no arrays of other libraries")


@pytest.mark.parametrize(
    ("a", "b", "groups"), [(0, 5, 0), (1, 5, 1), (5, 5, 1), (6, 5, 2), (2**40, 3, 366503875926)]
)
def test_ceil_div(a: int, b: int, groups: int) -> None:
    assert launch.ceil_div(a, b) == groups


def test_an_exported_array_is_seen_without_copying() -> None:
    view = launch.as_device_array(Exporter())
    assert (view.shape, view.strides, view.dtype, view.size) == ((3, 4), (16, 4), np.float32, 12)
    assert launch.address(view) == 0x7F0000000010
    assert launch.alignment(launch.address(view)) == 16
    assert not view.read_only
    assert view.stream == launch.DEFAULT_STREAM


def test_strides_and_the_read_only_flag_are_kept() -> None:
    view = launch.as_device_array(Exporter(strides=(-4, 12), data=(64, True)))
    assert view.strides == (-4, 12)
    assert view.read_only


@pytest.mark.parametrize(("strides", "first"), [((32, 4), 2 * 32 + 3 * 4), ((4, 32), 2 * 4 + 3 * 32)])
def test_a_region_lies_in_its_matrix(strides: tuple[int, int], first: int) -> None:
    matrix = Exporter(shape=(8, 8), strides=strides, data=(0x1000, True))
    region = launch.DeviceRegion(matrix, slice(2, 7), slice(3, 5))
    assert launch.is_device_array(region)
    memory = launch.memory_of(region)
    assert memory == (0x1000 + first, (5, 2), strides, np.float32, launch.DEFAULT_STREAM, True)
    inner = launch.memory_of(launch.DeviceRegion(region, slice(1, 2), slice(1, 2)))
    assert inner.pointer == memory.pointer + sum(strides)
    view = launch.as_device_array(region)
    assert (view.shape, view.strides, launch.address(view)) == ((5, 2), strides, 0x1000 + first)


def test_a_masked_array_is_refused() -> None:
    with pytest.raises(OptionError, match="masked"):
        launch.as_device_array(Exporter(mask=Exporter()))


def test_what_lives_on_a_device_is_told_by_its_interface() -> None:
    assert launch.is_device_array(Exporter())
    assert not launch.is_device_array(np.zeros(3))
    assert not launch.is_device_array([1, 2])


@pytest.mark.parametrize(("pointer", "aligned"), [(0, 128), (1, 1), (48, 16), (4096, 128)])
def test_alignment(pointer: int, aligned: int) -> None:
    assert launch.alignment(pointer) == aligned


def test_a_stream_that_is_none_is_named() -> None:
    with pytest.raises(OptionError, match="is not a CUDA stream"):
        launch.as_stream("main")


def test_the_cpu_cannot_serve_device_arrays() -> None:
    with pytest.raises(OptionError, match="copy them to the host first"):
        launch.resolve_device("cpu", device_arrays=True)
    assert launch.resolve_device("auto", device_arrays=True) == "cuda"


@pytest.mark.parametrize(
    ("initialised", "count", "asked_further"),
    [(0, 0, False), (0, 1, True), (0, 8, True), (launch.CUDA_ERROR_NO_DEVICE, 0, False), (999, 0, True)],
)
def test_a_driver_without_a_gpu_is_seen_before_anything_is_imported_for_it(
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

    monkeypatch.setattr(launch.ctypes, "CDLL", load)
    assert launch._driver_shows_a_gpu() is asked_further
    assert tried == list(launch.DRIVER_LIBRARIES[:3])


def test_where_there_is_no_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(launch.ctypes, "CDLL", refuse)
    assert launch._driver_shows_a_gpu() is False


class LockKeepingDriver:
    """The functions that a stream which keeps the lock calls; they answer ``status``, and memory is the host's."""

    def __init__(self) -> None:
        self.status = 0
        self.called: list[tuple[Any, ...]] = []
        self.arguments = b""

    def cuMemcpyHtoDAsync_v2(self, target: int, source: int, nbytes: int, stream: int) -> int:
        ctypes.memmove(target, source, nbytes)
        return self._answer("copy", stream)

    def cuLaunchKernel(self, function: int, *rest: Any) -> int:
        *shape, shared_nbytes, stream, parameters, extra = rest
        assert parameters is None
        told = ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p))
        self.arguments = ctypes.string_at(
            told[1] or 0, ctypes.cast(told[3] or 0, ctypes.POINTER(ctypes.c_size_t))[0]
        )
        return self._answer("launch", stream, function, *shape, shared_nbytes)

    def cuEventRecord(self, event: int, stream: int) -> int:
        return self._answer("record", stream, event)

    def cuEventQuery(self, event: int) -> int:
        return self._answer("query", event)

    def _answer(self, *called: Any) -> int:
        self.called.append(called)
        return self.status


class Event:
    handle = 9

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> tuple[launch.LockKeepingStream, LockKeepingDriver]:
    driver = LockKeepingDriver()
    results = SimpleNamespace(CUresult=lambda status: SimpleNamespace(name=f"CUDA_ERROR_{status}"))
    monkeypatch.setattr(launch, "_lock_keeping_driver", lambda: driver)
    monkeypatch.setattr(launch, "_driver", lambda: results)
    monkeypatch.setattr(launch, "_prepared", lambda kernel, device: (5, struct.Struct("=qi")))
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    return launch.LockKeepingStream(7), driver


def kernel_in_question() -> None: ...


KERNEL = SimpleNamespace(py_func=kernel_in_question)


def test_a_stream_that_keeps_the_lock_copies_launches_and_records(
    keeping: tuple[launch.LockKeepingStream, LockKeepingDriver],
) -> None:
    stream, driver = keeping
    source, target = np.arange(50, dtype=np.uint8), np.zeros(60, np.uint8)
    stream.copy_to_device(source, SimpleNamespace(pointer=target.ctypes.data))
    np.testing.assert_array_equal(target, [*range(50), *[0] * 10])
    launch.enqueue(KERNEL, 3, (64, 2), stream, 128, 2**40, -5)
    assert driver.arguments == struct.pack("=qi", 2**40, -5)
    stream.record(Event())
    assert driver.called == [("copy", 7), ("launch", 7, 5, 3, 1, 1, 64, 2, 1, 128), ("record", 7, 9)]


def test_only_an_event_that_has_not_passed_is_waited_for(
    keeping: tuple[launch.LockKeepingStream, LockKeepingDriver],
) -> None:
    stream, driver = keeping
    event = Event()
    stream.wait(event)
    assert event.waits == 0
    driver.status = 600  # not ready, or any error, which waiting raises
    stream.wait(event)
    assert event.waits == 1


def test_what_the_driver_refuses_a_stream_that_keeps_the_lock_is_named(
    keeping: tuple[launch.LockKeepingStream, LockKeepingDriver],
) -> None:
    stream, driver = keeping
    driver.status = 700
    source = np.zeros(50, np.uint8)
    with pytest.raises(RuntimeError, match="copying 50 bytes to the GPU: CUDA_ERROR_700"):
        stream.copy_to_device(source, SimpleNamespace(pointer=source.ctypes.data))
    with pytest.raises(
        RuntimeError, match=r"launching kernel_in_question on grid \(3, 1, 1\).*: CUDA_ERROR_700"
    ):
        launch.enqueue(KERNEL, 3, 64, stream, 0, 1, 2)
    with pytest.raises(RuntimeError, match="recording an event: CUDA_ERROR_700"):
        stream.record(Event())
