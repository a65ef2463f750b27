"""A GPU that is not there: what is prepared for it, as for one that is, comes to its list of kernels.

Host code chooses kernels by a GPU's capability, its multiprocessors and its shared memory, and launches them, for a
`recording.Rehearsal`, without doing so. All that it asks a GPU for comes through `gpus`, all memory that it would touch
is a `DescribedArray`. So what a job needs is what its own code asks for, and is not written down a second time.

A process has described GPUs only or none: what was chosen is remembered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.kernels.deferred import cuda

ADDRESS = 1 << 40
"""Of all memory that is not there: aligned as a driver's."""


@dataclass
class DescribedGpu:
    """What is asked of a GPU, by the names that Numba gives it."""

    compute_capability: tuple[int, int]
    MULTIPROCESSOR_COUNT: int
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: int
    """In bytes."""
    name: None = None
    """No model, so that nothing measured on one counts."""
    kernels: list[Any] = field(default_factory=list)
    """All `CompiledKernel` that were asked for, in that order; some often."""


_described: DescribedGpu | None = None


def describe(gpu: DescribedGpu) -> None:
    """Make this process one that has no GPU but this; before it asks for any."""
    global _described
    _described = gpu


def described() -> DescribedGpu | None:
    return _described


def gpus() -> Any:
    """The GPUs of this process, by their numbers."""
    return cuda.gpus if _described is None else (_described,)


class DescribedArray:
    """An array on a GPU that is not there, with what this package uses of Numba's."""

    __cuda_ndarray__ = True
    stream = 0
    read_only = False

    def __init__(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        dtype: Any,
        stream: Any = 0,
        gpu_data: int = ADDRESS,
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.shape, self.ndim, self.size = tuple(shape), len(shape), math.prod(shape)
        steps = [self.dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        self.strides = tuple(steps) if strides is None else tuple(strides)
        self.pointer = self.gpu_data = gpu_data

    def __getitem__(self, part: slice) -> DescribedArray:
        start, stop, _ = part.indices(self.size)
        place = self.pointer + start * self.dtype.itemsize
        return DescribedArray((stop - start,), None, self.dtype, gpu_data=place)

    def reshape(self, shape: tuple[int, ...]) -> DescribedArray:
        return DescribedArray(shape, None, self.dtype, gpu_data=self.pointer)


def described_array(_: Any, memory: Any) -> DescribedArray:
    """As `device_array.as_device_array` makes one of memory."""
    return DescribedArray(memory.shape, memory.strides, memory.dtype, gpu_data=memory.pointer)
