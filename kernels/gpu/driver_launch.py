"""A launch as the driver takes it: a kernel's handle, and its arguments packed into a thread's own memory."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Any

from tilewright.kernels.deferred import cuda
from tilewright.kernels.gpu.device_choice import driver_bindings
from tilewright.kernels.gpu.driver_error import driver_error


class _Frame(threading.local):
    """A thread's own memory for the arguments of a launch; the driver copies them while it launches."""

    CAPACITY = 4096
    """What CUDA allows for the arguments of a kernel, bytes."""

    def __init__(self) -> None:
        arguments = ctypes.create_string_buffer(self.CAPACITY)
        nbytes = ctypes.c_size_t()
        # CU_LAUNCH_PARAM_BUFFER_POINTER, ..., CU_LAUNCH_PARAM_BUFFER_SIZE, ..., CU_LAUNCH_PARAM_END
        self._extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(arguments), 2, ctypes.addressof(nbytes), 0)
        self.parts = arguments, nbytes, ctypes.addressof(self._extra)
        """The buffer, how many bytes of it are filled, and the address of the list that tells the driver of both."""


_frame = _Frame()


def packed_arguments(layout: struct.Struct, values: list[Any]) -> int:
    """Pack the arguments of this thread's next launch; returns the address that the driver takes as ``extra``."""
    arguments, nbytes, extra = _frame.parts
    layout.pack_into(arguments, 0, *values)
    nbytes.value = layout.size
    return extra


@functools.lru_cache(maxsize=256)
def _cluster_config(
    grid_x: int,
    grid_y: int,
    grid_z: int,
    block_x: int,
    block_y: int,
    block_z: int,
    shared_nbytes: int,
    handle: int,
    cluster: int,
) -> Any:
    """The driver's description of a launch in clusters; cached, since making one takes longer than the launch."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x = cluster
    attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid_x, grid_y, grid_z
    config.blockDimX, config.blockDimY, config.blockDimZ = block_x, block_y, block_z
    config.sharedMemBytes = shared_nbytes
    config.hStream = driver.CUstream(handle)
    config.attrs, config.numAttrs = [attribute], 1
    return config


def start_kernel(
    name: str,
    function: Any,
    layout: struct.Struct,
    values: list[Any],
    shape: tuple[int, int, int, int, int, int],
    shared_nbytes: int,
    handle: int,
    cluster: int,
) -> None:
    """Launch a kernel by the driver's handles; ``values`` are the arguments as ``layout`` packs them."""
    driver = driver_bindings()
    extra = packed_arguments(layout, values)
    start: Any
    place: tuple[Any, ...]
    if cluster > 1:
        config = _cluster_config(*shape, shared_nbytes, handle, cluster)
        start, place = driver.cuLaunchKernelEx, (config, function, 0, extra)
    else:
        start, place = driver.cuLaunchKernel, (function, *shape, shared_nbytes, handle, 0, extra)
    (status,) = start(*place)
    if not status:
        return
    if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
        # A thread that has not touched the GPU yet: Numba makes its context current.
        cuda.current_context()
        (status,) = start(*place)
    if status:
        raise driver_error(describe_launch(name, shape, shared_nbytes), status)


def describe_launch(name: str, shape: tuple[int, int, int, int, int, int], shared_nbytes: int) -> str:
    return f"launching {name} on grid {shape[:3]}, block {shape[3:]}, {shared_nbytes} bytes of dynamic shared memory"
