"""Device memory of another process on the same host: its address here, and rectangles copied from it.

CUDA's interprocess communication maps an allocation of one process into another ("CUDA C++ Programming Guide",
Interprocess Communication); where both GPUs can reach each other, a copy from it goes over NVLink, or over PCIe.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Set
from contextlib import suppress
from typing import Any

import numpy as np

from tilewright.kernels.deferred import cuda
from tilewright.kernels.errors import DeviceUnavailableError
from tilewright.kernels.gpu.device_choice import SIMULATOR, driver_bindings
from tilewright.kernels.gpu.driver_error import checked


def available() -> bool:
    """Whether device memory can be shared with other processes at all: not in the simulator, which has none."""
    return not SIMULATOR


ANCHOR_NBYTES = 2 * 2**20
"""The least that the driver allocates, so that nothing else shares the allocation."""

_anchors: dict[bytes, Any] = {}
"""A small allocation of every other process met, kept open as long as this process lasts. Once nothing of a process is
open, the driver drops the connection, and takes 10 to 20 ms to make it again."""
_own_anchor: list[tuple[Any, Any]] = []
"""The small allocation that others keep open, and its IPC handle; empty until first needed."""
_lock = threading.Lock()


def export(array: Any) -> bytes:
    """What another process of this host opens to reach a device array's memory, which this process still owns.

    Raises the driver's error where that memory cannot be shared; not every allocator's can.
    """
    context = cuda.current_context()
    with _lock:
        if not _own_anchor:
            memory = cuda.device_array(ANCHOR_NBYTES, np.uint8)
            _own_anchor.append((memory, context.get_ipc_handle(memory.gpu_data)))
    return pickle.dumps((context.get_ipc_handle(array.gpu_data), _own_anchor[0][1]))


class ImportedMemory:
    """Memory of other processes, open here until ``close``. For one thread at a time.

    What is open here is not freed, even when the process that owns it has ended. It is not closed after every copy,
    since closing may make the driver wait for kernels.
    """

    def __init__(self) -> None:
        self._opened: dict[tuple[str, bytes], tuple[Any, int]] = {}
        """By owner and exported bytes: the handle that closes it, and its address here."""

    def address(self, owner: str, exported: bytes) -> int:
        """The device address, in this process, of what another one exported; to be read, not written.

        owner: any name for that process; ``close`` takes it.

        Raises
        ------
        DeviceUnavailableError
            This process does not see that GPU, or its own cannot reach it.
        """
        key = owner, exported
        if key not in self._opened:
            handle, anchor = pickle.loads(exported)
            name = bytes(anchor.handle.reserved)
            with _lock:
                if name not in _anchors:
                    _open(anchor)
                    _anchors[name] = anchor
            self._opened[key] = handle, _open(handle)
        return self._opened[key][1]

    def close(self, keep: Set[str] = frozenset()) -> None:
        """Close all memory but that of the owners in ``keep``."""
        for key in [key for key in self._opened if key[0] not in keep]:
            handle, _ = self._opened.pop(key)
            with suppress(
                Exception
            ):  # a GPU that has failed closes nothing any more, and the process ends with it
                handle.close()


def _open(handle: Any) -> int:
    """The address here of another process's array."""
    context = cuda.current_context()
    try:
        reachable = handle.can_access_peer(context)
    except RuntimeError as error:  # what Numba raises for a GPU that this process does not see
        raise DeviceUnavailableError(f"the GPU of that memory is not seen here: {error}") from error
    if not reachable:
        raise DeviceUnavailableError("this GPU cannot reach the memory of that one")
    return int(handle.open_direct(context).device_ctypes_pointer.value)


def copy_rectangle(source: int, target: int, pitch: int, rows: int, width: int, stream: Any) -> None:
    """Copy ``rows`` rows of ``width`` bytes from one device address to another, ``pitch`` bytes apart at both.

    Enqueued on ``stream``; either address may be of another GPU.
    """
    if not rows or not width:
        return
    driver = driver_bindings()
    rectangle = driver.CUDA_MEMCPY2D()
    rectangle.WidthInBytes, rectangle.Height = width, rows
    rectangle.srcMemoryType = rectangle.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    rectangle.srcDevice, rectangle.srcPitch = driver.CUdeviceptr(source), pitch
    rectangle.dstDevice, rectangle.dstPitch = driver.CUdeviceptr(target), pitch
    copied = driver.cuMemcpy2DAsync(rectangle, driver.CUstream(int(stream)))
    checked(f"copying {rows} rows of {width} bytes between GPUs", copied)
