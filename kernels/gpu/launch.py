"""How every kernel is launched: in how many blocks, enqueued on a stream, replayed from a recording, timed."""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from tilewright.kernels.deferred import cuda
from tilewright.kernels.gpu.compiled import CompiledKernel
from tilewright.kernels.gpu.device_array import address, as_kernel_argument
from tilewright.kernels.gpu.device_choice import SIMULATOR, current_device
from tilewright.kernels.gpu.driver_launch import start_kernel
from tilewright.kernels.gpu.lock_keeping import LockKeepingStream
from tilewright.kernels.gpu.recording import Found, Plan, Recording, Rehearsal, Step
from tilewright.kernels.gpu.streams import DEFAULT_STREAM


@functools.cache
def _prepared(kernel: CompiledKernel, device: int) -> tuple[Any, struct.Struct]:
    """The driver's handle of a kernel on a device, and its arguments' layout."""
    return kernel.function(device), kernel.layout


def enqueue(
    kernel: Any,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    stream: Any,
    shared_nbytes: int,
    *arguments: Any,
    cluster: int = 1,
) -> None:
    """Launch a kernel that `compile_kernel` made, as ``kernel[grid, block, stream, shared_nbytes](*arguments)`` does,
    and also, as that cannot, in clusters of ``cluster`` adjacent blocks (the grid a multiple of it).

    Numba takes 15 to 20 µs for a launch, this a third: arguments must be what the signature says (Numba device arrays,
    Python integers, booleans, floats), and are packed without being looked at. Beyond 48 KiB, ``shared_nbytes`` is what
    the kernel was compiled with (`compile_kernel`).
    """
    if SIMULATOR:
        kernel[grid, block, stream, shared_nbytes](*map(as_kernel_argument, arguments))
        return
    function, layout = _prepared(kernel, current_device())
    if isinstance(stream, Rehearsal):
        return
    flat: list[Any] = []
    for argument in arguments:
        if hasattr(argument, "shape"):
            flat += (0, 0, argument.size, argument.dtype.itemsize, address(argument))
            flat += argument.shape
            flat += argument.strides
        else:
            flat.append(argument)
    grid_x, grid_y, grid_z = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
    block_x, block_y, block_z = (block, 1, 1) if isinstance(block, int) else (*block, 1, 1)[:3]
    shape = (grid_x, grid_y, grid_z, block_x, block_y, block_z)
    name = kernel.py_func.__name__
    if isinstance(stream, Recording):
        stream.add(name, function, layout, flat, shape, shared_nbytes, cluster)
        return
    if isinstance(stream, LockKeepingStream) and cluster == 1:
        stream.launch(name, function, layout, flat, shape, shared_nbytes)
        return
    handle = int(stream) if stream else DEFAULT_STREAM
    start_kernel(name, function, layout, flat, shape, shared_nbytes, handle, cluster)


def replay(plan: Plan, bases: Sequence[int], stream: Any) -> None:
    """Enqueue the launches of a plan for the current device; ``bases`` are the addresses it left open."""
    handle = int(stream) if stream else DEFAULT_STREAM
    for step in plan.steps:
        values = list(step.values)
        for index, base, offset in step.places:
            values[index] = bases[base] + offset
        if step.found is None:
            # Without a call in between: this is most of what a small product costs.
            start_kernel(
                step.name,
                step.function,
                step.layout,
                values,
                step.shape,
                step.shared_nbytes,
                handle,
                step.cluster,
            )
        else:
            _start_with_found(step, step.found, values, bases, handle)


def _start_with_found(
    step: Step, source: Found, values: list[Any], bases: Sequence[int], handle: int
) -> None:
    with source.lock:
        found = source.find(bases)
        for index, number in step.found_places:
            values[index] = found[number]
        start_kernel(
            step.name,
            step.function,
            step.layout,
            values,
            step.shape,
            step.shared_nbytes,
            handle,
            step.cluster,
        )


def make_ready(plan: Plan, bases: Sequence[int]) -> None:
    """Find what the launches of a plan will look for, so that a replay with these addresses finds it there."""
    for step in plan.steps:
        if step.found is not None:
            with step.found.lock:
                step.found.find(bases)


class CUDATimer:
    """Times the device work enqueued on a stream inside a ``with`` block, by events.

    ``seconds`` waits for that work to finish. In the simulator, which has no device clock, it is host time.
    """

    def __init__(self, stream: Any = DEFAULT_STREAM) -> None:
        self._stream = stream
        self._start = cuda.event()
        self._stop = cuda.event()
        self._host_seconds = 0.0

    def __enter__(self) -> CUDATimer:
        self._host_seconds = -time.perf_counter()
        self._start.record(self._stream)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.record(self._stream)
        self._host_seconds += time.perf_counter()

    @property
    def seconds(self) -> float:
        if SIMULATOR:
            return self._host_seconds
        self._stop.synchronize()
        return float(cuda.event_elapsed_time(self._start, self._stop)) / 1e3
