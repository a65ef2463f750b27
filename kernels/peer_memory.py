"""Device memory of another process on the same host: its address here, and rectangles copied from it.

CUDA's interprocess communication maps an allocation of one process into another ("CUDA C++ Programming Guide",
Interprocess Communication); where both GPUs can reach each other, a copy from it goes over NVLink, or over PCIe.
"""

from __future__ import annotations

import functools
import pickle
import threading
from typing import Any

import numpy as np

from tilewright.kernels.deferred import cuda
from tilewright.kernels.errors import DeviceUnavailableError
from tilewright.kernels.launch import SIMULATOR


def available() -> bool:
    """Whether device memory can be given to other processes at all: not by the simulator, which has none."""
    return not SIMULATOR


ANCHOR_NBYTES = 2 * 2**20
"""As much as the driver allocates at least, so that nothing else shares it."""

_anchors: dict[bytes, Any] = {}
"""Of every other process that was met, a little memory that stays open as long as this process lasts. Where nothing of
a process is open any more, the driver forgets the way there, and takes 10 to 20 ms to find it again."""
_anchors_lock = threading.Lock()


@functools.cache
def _anchor() -> tuple[Any, Any]:
    """The little memory that others keep open, and what opens it."""
    memory = cuda.device_array(ANCHOR_NBYTES, np.uint8)
    return memory, cuda.current_context().get_ipc_handle(memory.gpu_data)


def export(array: Any) -> bytes:
    """What another process of this host opens to reach the memory of a device array, which stays this one's.

    Raises what the driver does where that memory cannot be shared: not all allocators' can.
    """
    return pickle.dumps((cuda.current_context().get_ipc_handle(array.gpu_data), _anchor()[1]))


class ImportedMemory:
    """Memory of other processes, each allocation opened once and until ``close``. For one thread at a time."""

    def __init__(self) -> None:
        self._opened: dict[bytes, tuple[Any, int]] = {}
        """By the driver's name of an allocation: what closes it, and the address where it begins here."""

    def address(self, exported: bytes) -> int:
        """The device address, in this process, of what another one exported; to be read, not written.

        Raises
        ------
        DeviceUnavailableError
            This process does not see that GPU, or its own cannot reach it.
        """
        handle, anchor = pickle.loads(exported)
        with _anchors_lock:
            if _name(anchor) not in _anchors:
                _open(anchor)
                _anchors[_name(anchor)] = anchor
        if _name(handle) not in self._opened:
            self._opened[_name(handle)] = handle, _open(handle)
        return self._opened[_name(handle)][1] + int(handle.offset)

    def close(self) -> None:
        """Let go of all of it."""
        opened, self._opened = self._opened, {}
        for handle, _ in opened.values():
            handle.close()


def _name(handle: Any) -> bytes:
    return bytes(handle.handle.reserved)


def _open(handle: Any) -> int:
    """The address here of the allocation that another process's array lies in."""
    context = cuda.current_context()
    try:
        reachable = handle.can_access_peer(context)
    except RuntimeError as error:  # Numba's word for a GPU that is none of ours
        raise DeviceUnavailableError(f"the GPU of that memory is not seen here: {error}") from error
    if not reachable:
        raise DeviceUnavailableError("this GPU cannot reach the memory of that one")
    return int(handle.open_direct(context).device_ctypes_pointer.value) - int(handle.offset)


def copy_rectangle(source: int, target: int, pitch: int, rows: int, width: int, stream: Any) -> None:
    """Copy ``rows`` rows of ``width`` bytes from one device address to another, ``pitch`` bytes apart at both.

    Enqueued on ``stream``; either address may be of another GPU.
    """
    from numba.cuda.cudadrv.driver import binding, driver

    if not rows or not width:
        return
    rectangle = binding.CUDA_MEMCPY2D()
    rectangle.WidthInBytes, rectangle.Height = width, rows
    rectangle.srcMemoryType = rectangle.dstMemoryType = binding.CUmemorytype.CU_MEMORYTYPE_DEVICE
    rectangle.srcDevice, rectangle.srcPitch = binding.CUdeviceptr(source), pitch
    rectangle.dstDevice, rectangle.dstPitch = binding.CUdeviceptr(target), pitch
    driver.cuMemcpy2DAsync(rectangle, binding.CUstream(int(stream)))
