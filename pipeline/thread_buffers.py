"""Memory that a thread of a worker keeps from one task to the next: taking it anew costs as much as filling it."""

from __future__ import annotations

import threading
import weakref

import numpy as np


class _Kept:
    """What one thread keeps."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, bool], np.ndarray] = {}
        """By name and by whether they are pinned."""


_of_this_thread = threading.local()
_of_all_threads: weakref.WeakSet[_Kept] = weakref.WeakSet()
_lock = threading.Lock()


def thread_buffer(name: str, nbytes: int, *, pinned: bool) -> np.ndarray:
    """``nbytes`` of memory, uint8, kept by this thread under ``name`` and reused by its next task, until
    `free_thread_buffers`.

    ``pinned`` takes host memory that a GPU copies from at full speed. The contents are undefined.
    """
    key = (name, pinned)
    buffers = _kept_here().buffers
    buffer = buffers.get(key)
    if buffer is None or len(buffer) < nbytes:
        buffer = None
        buffers.pop(key, None)  # the smaller one is freed before the larger one is taken
        if pinned:
            from numba import cuda

            buffer = cuda.pinned_array(nbytes, np.uint8)
        else:
            buffer = np.empty(nbytes, np.uint8)
        buffers[key] = buffer
    return buffer[:nbytes]


def free_thread_buffers() -> None:
    """Free what all threads of this process keep; what a task uses is freed when it lets go of it.

    Where some of it is pinned, call it from a thread that is attached to the GPU.
    """
    with _lock:
        for kept in _of_all_threads:
            kept.buffers.clear()


def _kept_here() -> _Kept:
    kept: _Kept | None = getattr(_of_this_thread, "kept", None)
    if kept is None:
        kept = _of_this_thread.kept = _Kept()
        with _lock:
            _of_all_threads.add(kept)
    return kept
