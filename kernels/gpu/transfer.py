"""Copies between host memory and a device that are enqueued on a stream: rectangles of a matrix, text, whole arrays.

Numba copies contiguous arrays only; a tile's part of a stored chunk is a rectangle with a pitch of its own, which
the driver's two-dimensional copy takes as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.kernels.deferred import cuda
from tilewright.kernels.gpu.device_array import Memory, address
from tilewright.kernels.gpu.device_choice import SIMULATOR, current_device, driver_bindings
from tilewright.kernels.gpu.driver_error import checked
from tilewright.kernels.gpu.streams import DEFAULT_STREAM


def pinned_bytes(nbytes: int) -> np.ndarray:
    """Page-locked host memory, uint8, for asynchronous copies. At least one byte: the driver gives no address to an
    empty buffer."""
    block: np.ndarray = cuda.pinned_array(max(nbytes, 1), np.uint8)
    return block


def device_memory(pinned: np.ndarray) -> Memory:
    """Pinned host memory as a kernel gets it, which reads and writes it over the bus. Under unified addressing, which
    every 64-bit system has, the GPU knows it by the host's address."""
    pointer = pinned.ctypes.data if pinned.size else 0
    return Memory(pointer, pinned.shape, pinned.strides, pinned.dtype, DEFAULT_STREAM, False)


_kept_streams: dict[tuple[int, str], Any] = {}
_making_streams = threading.Lock()


def upload_stream() -> Any:
    """The stream on which all threads of this process send blocks to the current device.

    They share one: with a stream for each thread the copy engine loses 5 µs between any two copies, on top of the 3 µs
    that each takes.
    """
    return _kept_stream("upload", cuda.stream)


def download_stream() -> Any:
    """The stream on which all threads of this process get blocks from the current device; it runs beside uploads."""
    return _kept_stream("download", cuda.stream)


def urgent_stream(purpose: str) -> Any:
    """The stream of this process and device for some purpose, whose kernels get each multiprocessor that falls free
    before those of products do.

    For short kernels whose results are waited for. On an ordinary stream the hash of a panel came when a product had
    ended that was enqueued after it, and the next product was enqueued when the hash was there: on each of four GPUs 2
    to 20 ms were lost between two products of 37.
    """
    return _kept_stream(purpose, _first_in_line)


def _kept_stream(purpose: str, make: Callable[[], Any]) -> Any:
    key = current_device(), purpose
    with _making_streams:
        if key not in _kept_streams:
            _kept_streams[key] = make()
        return _kept_streams[key]


def _first_in_line() -> Any:
    if SIMULATOR:
        return cuda.stream()
    cuda.current_context()  # the stream is made in it
    driver = driver_bindings()
    error, _, greatest = driver.cuCtxGetStreamPriorityRange()
    checked("cuCtxGetStreamPriorityRange", (error,))
    made = checked("cuStreamCreateWithPriority", driver.cuStreamCreateWithPriority(0, greatest))
    return cuda.external_stream(int(made))


def upload_rectangle(source: np.ndarray, target: int, pitch_nbytes: int, stream: Any) -> None:
    """Copy a C-ordered host matrix to the device address ``target``, rows ``pitch_nbytes`` apart there.

    source: rows × columns, contiguous in pinned memory; it is read until the stream has passed the copy.
    """
    _copy(source, target, pitch_nbytes, stream, to_device=True)


def download_rectangle(source: int, pitch_nbytes: int, target: np.ndarray, stream: Any) -> None:
    """Copy rows that begin at the device address ``source``, ``pitch_nbytes`` apart, to a C-ordered host matrix.

    target: rows × columns, contiguous in pinned memory; complete once the stream has passed the copy.
    """
    _copy(target, source, pitch_nbytes, stream, to_device=False)


def _copy(host: np.ndarray, device: int, pitch_nbytes: int, stream: Any, *, to_device: bool) -> None:
    if host.size == 0:
        return
    driver = driver_bindings()
    rows, columns = host.shape
    width = columns * host.itemsize
    rectangle = driver.CUDA_MEMCPY2D()
    rectangle.WidthInBytes, rectangle.Height = width, rows
    kinds = driver.CUmemorytype
    if to_device:
        rectangle.srcMemoryType, rectangle.dstMemoryType = (
            kinds.CU_MEMORYTYPE_HOST,
            kinds.CU_MEMORYTYPE_DEVICE,
        )
        rectangle.srcHost, rectangle.srcPitch = host.ctypes.data, width
        rectangle.dstDevice, rectangle.dstPitch = driver.CUdeviceptr(device), pitch_nbytes
    else:
        rectangle.srcMemoryType, rectangle.dstMemoryType = (
            kinds.CU_MEMORYTYPE_DEVICE,
            kinds.CU_MEMORYTYPE_HOST,
        )
        rectangle.srcDevice, rectangle.srcPitch = driver.CUdeviceptr(device), pitch_nbytes
        rectangle.dstHost, rectangle.dstPitch = host.ctypes.data, width
    copied = driver.cuMemcpy2DAsync(rectangle, driver.CUstream(int(stream)))
    checked(f"copying {rows} rows of {width} bytes between host and GPU", copied)


STAGED = 4
"""Pinned buffers of a host thread: as many uploads may be under way before the next waits for the oldest."""


class _Staging(threading.local):
    """A host thread's pinned buffers, each with an event recorded after the last copy out of it."""

    def __init__(self) -> None:
        self.buffers: dict[int, list[tuple[np.ndarray, Any]]] = {}

    def take(self, nbytes: int) -> tuple[np.ndarray, Any]:
        """A buffer of at least ``nbytes`` that no copy reads any more, and its event: the least recently taken one."""
        buffers = self.buffers.setdefault(current_device(), [])
        if len(buffers) < STAGED:
            chosen = (pinned_bytes(nbytes), cuda.event(timing=False))
        else:
            chosen = buffers.pop(0)
            chosen[1].synchronize()
            if len(chosen[0]) < nbytes:
                chosen = (pinned_bytes(nbytes), chosen[1])
        buffers.append(chosen)
        return chosen


_staging = _Staging()


def download(array: Any, stream: Any) -> np.ndarray:
    """A host array with the elements of a contiguous device array; there once this returns.

    The stream is waited for before the copy begins: a copy to memory that is not pinned waits by itself, and copies of
    other threads wait with it for what this stream has to do.
    """
    stream.synchronize()
    found: np.ndarray = array.copy_to_host(stream=stream)
    stream.synchronize()
    return found


def upload(host: np.ndarray, stream: Any) -> Any:
    """A device array with the elements of a contiguous host array, which may be changed as soon as this
    returns.

    The copy is enqueued on ``stream`` from pinned memory, so that the host does not wait for earlier work there, as it
    would with pageable memory.
    """
    driver = driver_bindings()
    device = cuda.device_array(host.shape, host.dtype, stream=stream)
    if host.size:
        pinned, event = _staging.take(host.nbytes)
        np.copyto(pinned[: host.nbytes].view(host.dtype), host.reshape(-1))
        queue = driver.CUstream(int(stream) if stream else 0)
        target = driver.CUdeviceptr(address(device))
        copied = driver.cuMemcpyHtoDAsync(target, pinned.ctypes.data, host.nbytes, queue)
        checked(f"copying {host.nbytes} bytes to the GPU", copied)
        event.record(stream)
    return device
