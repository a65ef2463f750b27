"""Device memory that kernels need between their launches: one growing buffer for each stream of each
device, and for each purpose."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from threading import get_ident
from typing import Any

import numpy as np

from tilewright.kernels.deferred import cuda
from tilewright.kernels.errors import DeviceMemoryError
from tilewright.kernels.gpu.device_choice import current_device
from tilewright.kernels.gpu.memory import allocating
from tilewright.kernels.gpu.recording import Recording, Rehearsal
from tilewright.kernels.gpu.streams import DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM
from tilewright.kernels.shipped.described import ADDRESS, described

_buffers: dict[tuple[int, int, int, str], Any] = {}
"""By device, handle of the stream and, where a handle means a stream of its own in each thread, the thread; and by
purpose."""
_lent: set[tuple[int, int, int, str]] = set()
"""Which are borrowed now."""
_lock = threading.RLock()


@contextlib.contextmanager
def borrowed(nbytes: int, stream: Any, purpose: str = "") -> Iterator[Any]:
    """The address of at least ``nbytes`` of device memory that belong to ``stream`` of the current device.

    Only work enqueued inside the ``with`` block may use it. Later work on the same stream gets the same memory, so only
    one thread at a time may enqueue. The memory is kept until `release`. For a recording the address is a `Place`.

    purpose: memory for another one may be borrowed inside the block, by a kernel that is launched there.
    """
    if isinstance(stream, Recording):
        yield stream.borrow(nbytes)
        return
    if described() is not None:
        yield ADDRESS
        return
    if isinstance(stream, Rehearsal):
        stream = stream.stream
    with _lock:
        handle = int(stream) if stream else DEFAULT_STREAM
        thread = get_ident() if handle == PER_THREAD_DEFAULT_STREAM else 0
        key = current_device(), handle, thread, purpose
        if key in _lent:
            raise RuntimeError("scratch memory is borrowed twice at once, for one purpose")
        buffer = _buffers.get(key)
        if buffer is None or buffer.size < nbytes:
            if buffer is not None:
                cuda.synchronize()  # kernels under way may use it, and not every allocator waits for them
                del _buffers[key], buffer  # first: old and new may not both fit
            buffer = _buffers[key] = _allocated(nbytes, stream, key[0])
        _lent.add(key)
        try:
            yield int(buffer.device_ctypes_pointer.value)
        finally:
            _lent.discard(key)


def _allocated(nbytes: int, stream: Any, device: int) -> Any:
    """New memory on the current device; if there is none left, in place of what other streams were lent."""
    what = "the kernel's workspace"
    try:
        with allocating(what, nbytes, on_gpu=True):
            return cuda.device_array(nbytes, np.uint8, stream=stream)
    except DeviceMemoryError:
        others = [key for key in _buffers if key[0] == device and key not in _lent]
        if not others:
            raise
    cuda.synchronize()  # kernels under way may use them
    for key in others:
        del _buffers[key]
    with allocating(what, nbytes, on_gpu=True):
        return cuda.device_array(nbytes, np.uint8, stream=stream)


def release() -> None:
    """Give all scratch memory back. Waits for the devices, since kernels under way may use it."""
    with _lock:
        for device in {key[0] for key in _buffers}:
            with cuda.gpus[device]:
                cuda.synchronize()
        _buffers.clear()
