"""CUDA streams: from what a caller may pass to a Numba stream, ordered after the work of the arrays' exporters."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from tilewright.kernels.arguments import shown
from tilewright.kernels.deferred import cuda
from tilewright.kernels.errors import OptionError
from tilewright.kernels.gpu.device_choice import SIMULATOR

DEFAULT_STREAM = 0
LEGACY_DEFAULT_STREAM = 1
"""How ``__cuda_array_interface__`` spells the default stream, since its 0 would be ambiguous."""
PER_THREAD_DEFAULT_STREAM = 2
"""The handle that means another stream in each thread."""


def check_stream(stream: Any) -> None:
    """Raise OptionError for what cannot be a CUDA stream; no GPU is asked whether it is one."""
    if stream is None:
        return
    handle = getattr(stream, "ptr", getattr(stream, "cuda_stream", stream))  # CuPy, PyTorch
    if isinstance(handle, bool) or not (
        (isinstance(handle, int) and handle >= 0) or hasattr(handle, "synchronize")
    ):
        raise OptionError(
            f"stream={shown(stream)} is not a CUDA stream; pass one of Numba, CuPy or PyTorch, its handle, or None"
        )


def as_stream(stream: Any) -> Any:
    """A Numba stream from what a caller may pass: None, a handle, or a stream of Numba, CuPy or PyTorch."""
    check_stream(stream)
    if stream is None or SIMULATOR:
        return DEFAULT_STREAM
    for attribute in ("ptr", "cuda_stream"):  # CuPy, PyTorch
        stream = getattr(stream, attribute, stream)
    if isinstance(stream, int):
        return cuda.external_stream(stream) if stream not in (0, LEGACY_DEFAULT_STREAM) else DEFAULT_STREAM
    return stream


def _handle(stream: Any) -> int:
    handle = int(stream) if stream else DEFAULT_STREAM
    return DEFAULT_STREAM if handle == LEGACY_DEFAULT_STREAM else handle


@functools.cache
def external_stream(handle: int, device: int) -> Any:
    return cuda.external_stream(handle)


def launch_stream(stream: Any, arrays: Iterable[Any]) -> Any:
    """The stream to launch on, made to wait for whatever the arrays' exporters have under way.

    Without a stream of the caller's choice, work goes on the stream that the first array carrying one was
    exported with: a kernel then runs in order with the CuPy or PyTorch work around it.
    """
    if SIMULATOR:
        return DEFAULT_STREAM
    exported = [array.stream for array in arrays if array.stream is not DEFAULT_STREAM and array.stream]
    if stream is not None:
        chosen = as_stream(stream)
    elif exported:
        chosen = exported[0] if _handle(exported[0]) else DEFAULT_STREAM
    else:
        return DEFAULT_STREAM
    for other in exported:
        if _handle(other) != _handle(chosen):
            event = cuda.event(timing=False)
            event.record(other)
            event.wait(chosen)
    return chosen


_kept: deque[tuple[Any, tuple[Any, ...]]] = deque()
"""Events, and what may be freed once they have passed."""
_keeping = threading.Lock()


def keep_until_passed(stream: Any, *arrays: Any) -> None:
    """Keep device arrays, whose last reference the caller gives up, until what is enqueued on the stream has run.

    The driver waits for the device when it frees memory. A pool, such as RAPIDS', does not: it gives the memory to the
    next who asks, whatever stream they use it on. The last arrays are kept until the next call.
    """
    if SIMULATOR:
        return
    event = cuda.event(timing=False)
    event.record(stream)
    with _keeping:
        _kept.append((event, arrays))
        while _kept and _kept[0][0].query():
            _kept.popleft()
