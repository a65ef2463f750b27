"""Streams whose calls keep the interpreter's lock, for threads that enqueue beside dozens of others."""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

import numpy as np

from tilewright.kernels.gpu.device_array import address
from tilewright.kernels.gpu.device_choice import SIMULATOR, driver_library
from tilewright.kernels.gpu.driver_error import driver_error
from tilewright.kernels.gpu.driver_launch import describe_launch, packed_arguments


class LockKeepingStream:
    """A stream whose copies, launches (but those in clusters) and events keep the interpreter's lock.

    Among dozens of threads, one that releases the lock for a call of a few microseconds waits 50 µs to get it back, and
    all others wait with it. So use it for calls that only enqueue, a few ahead: whatever blocks such a call, as another
    thread that pins memory does, blocks all threads. The calling thread must be attached to the GPU.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._driver = None if SIMULATOR else _lock_keeping_driver()
        self._handle = 0 if SIMULATOR else int(stream)

    def __int__(self) -> int:
        return self._handle

    def copy_to_device(self, source: np.ndarray, target: Any) -> None:
        """Copy ``source``, uint8[n] in pinned memory, n > 0, to the first n bytes of a device array."""
        if self._driver is None:
            target[: len(source)].copy_to_device(source)
            return
        place = source.ctypes.data
        status = self._driver.cuMemcpyHtoDAsync_v2(address(target), place, source.nbytes, self._handle)
        if status:
            raise driver_error(f"copying {source.nbytes} bytes to the GPU", status)

    def launch(
        self,
        name: str,
        function: Any,
        layout: struct.Struct,
        values: list[Any],
        shape: tuple[int, int, int, int, int, int],
        shared_nbytes: int,
    ) -> None:
        """Launch a kernel by the driver's handle; ``values`` are the arguments as ``layout`` packs them."""
        assert self._driver is not None  # the simulator launches for itself
        extra = packed_arguments(layout, values)
        status = self._driver.cuLaunchKernel(int(function), *shape, shared_nbytes, self._handle, None, extra)
        if status:
            raise driver_error(describe_launch(name, shape, shared_nbytes), status)

    def record(self, event: Any) -> None:
        """Record a Numba event, which passes when all work enqueued so far is done."""
        if self._driver is None:
            event.record(self._stream)
            return
        status = self._driver.cuEventRecord(int(event.handle), self._handle)
        if status:
            raise driver_error("recording an event", status)

    def follow(self, event: Any) -> None:
        """Have work enqueued from now on wait for a Numba event as it was last recorded."""
        if self._driver is None:
            event.wait(self._stream)
            return
        status = self._driver.cuStreamWaitEvent(self._handle, int(event.handle), 0)
        if status:
            raise driver_error("waiting for an event", status)

    def wait(self, event: Any) -> None:
        """Wait on the host for a Numba event; if it has passed already, the lock is kept."""
        if self._driver is None or self._driver.cuEventQuery(int(event.handle)):
            event.synchronize()


@functools.cache
def _lock_keeping_driver() -> ctypes.PyDLL:
    found = driver_library()
    assert found is not None  # a stream exists, so the driver does
    library = ctypes.PyDLL(found._name, handle=found._handle)
    place, number = ctypes.c_void_p, ctypes.c_uint
    library.cuMemcpyHtoDAsync_v2.argtypes = [place, place, ctypes.c_size_t, place]
    library.cuLaunchKernel.argtypes = [place, *[number] * 7, place, place, place]
    library.cuEventRecord.argtypes = [place, place]
    library.cuStreamWaitEvent.argtypes = [place, place, number]
    library.cuEventQuery.argtypes = [place]
    return library
