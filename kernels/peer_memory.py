"""Device memory of another process on the same host: its address here, and rectangles copied from it.

CUDA's interprocess communication maps an allocation of one process into another ("CUDA C++ Programming Guide",
Interprocess Communication); where both GPUs can reach each other, a copy from it goes over NVLink, or over PCIe.
"""

from __future__ import annotations

import pickle
from typing import Any

from tilewright.kernels.errors import DeviceUnavailableError
from tilewright.kernels.launch import SIMULATOR


def available() -> bool:
    """Whether device memory can be given to other processes at all: not by the simulator, which has none."""
    return not SIMULATOR


def export(array: Any) -> bytes:
    """What another process of this host opens to reach the memory of a device array, which stays this one's.

    Raises what the driver does where that memory cannot be shared: not all allocators' can.
    """
    from numba import cuda

    return pickle.dumps(cuda.current_context().get_ipc_handle(array.gpu_data))


class ImportedMemory:
    """Memory of other processes, each allocation opened once and until ``close``. For one thread at a time."""

    def __init__(self) -> None:
        self._opened: dict[bytes, tuple[Any, int]] = {}
        """By the driver's handle of an allocation: what closes it, and the address where it begins here."""

    def address(self, exported: bytes) -> int:
        """The device address, in this process, of what another one exported; to be read, not written.

        Raises
        ------
        DeviceUnavailableError
            This process does not see that GPU, or its own cannot reach it.
        """
        from numba import cuda

        handle = pickle.loads(exported)
        allocation = bytes(handle.handle.reserved)  # small arrays share one, and the driver opens it once
        if allocation not in self._opened:
            context = cuda.current_context()
            try:
                reachable = handle.can_access_peer(context)
            except RuntimeError as error:  # Numba's word for a GPU that is none of ours
                raise DeviceUnavailableError(f"the GPU of that memory is not seen here: {error}") from error
            if not reachable:
                raise DeviceUnavailableError("this GPU cannot reach the memory of that one")
            memory = handle.open_direct(context)
            self._opened[allocation] = handle, int(memory.device_ctypes_pointer.value) - handle.offset
        return self._opened[allocation][1] + int(handle.offset)

    def close(self) -> None:
        """Let go of all of it."""
        opened, self._opened = self._opened, {}
        for handle, _ in opened.values():
            handle.close()


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
