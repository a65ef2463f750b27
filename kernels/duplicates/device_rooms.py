"""Memory of a GPU that is kept under names from one call to the next, and grows."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.kernels.deferred import cuda
from tilewright.kernels.numbers import power_of_two


class Rooms:
    """Arrays by name; used by one thread, and one stream, at a time."""

    def __init__(self) -> None:
        self._arrays: dict[str, Any] = {}

    @property
    def nbytes(self) -> int:
        return sum(array.size * array.dtype.itemsize for array in self._arrays.values())

    def of(self, name: str, size: int, dtype: Any) -> Any:
        """An array of at least so many elements; what it held is not kept."""
        array = self._arrays.get(name)
        if array is None or array.size < size:
            self._arrays.pop(name, None)
            array = None  # freed before more is allocated
            # A power of two, so that few are allocated: that makes the whole device wait.
            array = self._arrays[name] = cuda.device_array(power_of_two(size), dtype)
        return array

    def uploaded(self, name: str, values: np.ndarray, stream: Any) -> Any:
        """An array that begins with these values, once the stream has passed this."""
        array = self.of(name, len(values), values.dtype)
        array[: len(values)].copy_to_device(values, stream=stream)
        return array
