"""A stream that keeps the interpreter's lock: what it hands to the driver, as far as it needs no GPU."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tilewright.kernels.gpu import launch, lock_keeping
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.gpu.lock_keeping import LockKeepingStream

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator launches in its own way")


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

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:
        assert flags == 0
        return self._answer("follow", stream, event)

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
def keeping(monkeypatch: pytest.MonkeyPatch) -> tuple[LockKeepingStream, LockKeepingDriver]:
    driver = LockKeepingDriver()
    monkeypatch.setattr(lock_keeping, "_lock_keeping_driver", lambda: driver)
    monkeypatch.setattr(launch, "_prepared", lambda kernel, device: (5, struct.Struct("=qi")))
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    return LockKeepingStream(7), driver


def kernel_in_question() -> None: ...


KERNEL = SimpleNamespace(py_func=kernel_in_question)


def test_a_stream_that_keeps_the_lock_copies_launches_and_records(
    keeping: tuple[LockKeepingStream, LockKeepingDriver],
) -> None:
    stream, driver = keeping
    source, target = np.arange(50, dtype=np.uint8), np.zeros(60, np.uint8)
    stream.copy_to_device(source, SimpleNamespace(pointer=target.ctypes.data))
    np.testing.assert_array_equal(target, [*range(50), *[0] * 10])
    launch.enqueue(KERNEL, 3, (64, 2), stream, 128, 2**40, -5)
    assert driver.arguments == struct.pack("=qi", 2**40, -5)
    stream.record(Event())
    stream.follow(Event())
    assert driver.called == [
        ("copy", 7),
        ("launch", 7, 5, 3, 1, 1, 64, 2, 1, 128),
        ("record", 7, 9),
        ("follow", 7, 9),
    ]


def test_only_an_event_that_has_not_passed_is_waited_for(
    keeping: tuple[LockKeepingStream, LockKeepingDriver],
) -> None:
    stream, driver = keeping
    event = Event()
    stream.wait(event)
    assert event.waits == 0
    driver.status = 600  # not ready, or any error, which waiting raises
    stream.wait(event)
    assert event.waits == 1


def test_what_the_driver_refuses_a_stream_that_keeps_the_lock_is_named(
    keeping: tuple[LockKeepingStream, LockKeepingDriver],
) -> None:
    stream, driver = keeping
    driver.status = 700
    source = np.zeros(50, np.uint8)
    with pytest.raises(RuntimeError, match="copying 50 bytes to the GPU: CUDA_ERROR_ILLEGAL_ADDRESS"):
        stream.copy_to_device(source, SimpleNamespace(pointer=source.ctypes.data))
    with pytest.raises(
        RuntimeError, match=r"launching kernel_in_question on grid \(3, 1, 1\).*: CUDA_ERROR_ILLEGAL_ADDRESS"
    ):
        launch.enqueue(KERNEL, 3, 64, stream, 0, 1, 2)
    with pytest.raises(RuntimeError, match="recording an event: CUDA_ERROR_ILLEGAL_ADDRESS"):
        stream.record(Event())
    with pytest.raises(RuntimeError, match="waiting for an event: CUDA_ERROR_ILLEGAL_ADDRESS"):
        stream.follow(Event())
