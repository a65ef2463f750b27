"""How array elements look inside a kernel, by dtype: their Numba types, and their conversions."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tilewright.kernels.bfloat16 import BFLOAT16, device_functions
from tilewright.kernels.deferred import cuda, numba
from tilewright.kernels.float8 import FLOAT8, widening
from tilewright.kernels.gpu.device_choice import SIMULATOR


@functools.cache
def conversion(dtype: np.dtype) -> Any:
    """Converts a number to an element of ``dtype`` inside a kernel; integers wrap, as in hardware.

    On a GPU that is the Numba type itself. The simulator runs kernels as Python, where NumPy would refuse a
    number that is out of range. bfloat16 takes a float32 and gives its bits, as `numba_type` has them.
    """
    if dtype == BFLOAT16:
        return device_functions()[1]
    if SIMULATOR:
        return lambda value: np.asarray(value).astype(dtype)[()]
    return numba.from_dtype(dtype)


@functools.cache
def reading(stored: np.dtype, number: np.dtype) -> Any:
    """Converts a stored element to a number of another dtype inside a kernel: `conversion`, also from bfloat16 and
    float8."""
    convert = conversion(number)
    if stored in FLOAT8:
        widened = widening(stored)
    elif stored == BFLOAT16:
        widened, _ = device_functions()
    else:
        return convert

    @cuda.jit(device=True, inline="always")
    def widen_and_convert(bits: Any) -> Any:
        return convert(widened(bits))

    return widen_and_convert


def numba_type(dtype: np.dtype) -> Any:
    """The Numba type of a dtype's elements in a kernel: that of the same name; for bfloat16 and float8, their bits as
    uint16 and uint8."""
    if dtype in FLOAT8:
        return numba.uint8
    return numba.uint16 if dtype == BFLOAT16 else numba.from_dtype(dtype)
