"""What the loops that move bytes without the interpreter's lock share: calling functions by address.

Numba calls only functions that it knows by name when it compiles. Taking addresses as arguments keeps the machine code
free of what differs between processes, so that it can lie in Numba's disk cache.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from tilewright.kernels.gpu.device_choice import SIMULATOR, driver_library

MONOTONIC = 1
SEEK_END = 2


def caller(result_bits: int, count: int) -> Any:
    """The intrinsic ``call(address, *arguments)`` of a C function of ``count`` integers or pointers."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, result = ir.IntType(64), ir.IntType(result_bits)
        kind = ir.FunctionType(result, [word] * count).as_pointer()
        found = builder.call(builder.inttoptr(arguments[0], kind), arguments[1:])
        return found if result_bits == word.width else builder.sext(found, word)

    word = numba.types.int64
    typed = word(numba.types.uint64, *[word] * count)
    typings: dict[int, Callable[..., Any]] = {
        1: lambda context, function, a: (typed, lower),
        2: lambda context, function, a, b: (typed, lower),
        3: lambda context, function, a, b, c: (typed, lower),
        4: lambda context, function, a, b, c, d: (typed, lower),
    }
    return intrinsic(typings[count])


call1, call2, call4 = (caller(32, count) for count in (1, 2, 4))
long_call2, long_call3, long_call4 = (caller(64, count) for count in (2, 3, 4))


@intrinsic
def take_numbers(context: Any, place: Any, count: Any) -> Any:
    """Atomically add ``count`` to the integer at an address; returns the old value, the first of ``count`` numbers that
    are this thread's alone."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place, count = arguments
        return builder.atomic_rmw(
            "add", builder.inttoptr(place, ir.IntType(64).as_pointer()), count, "monotonic"
        )

    return numba.types.int64(numba.types.uint64, numba.types.int64), lower


def _nanoseconds(clock: int, now: Any) -> int:
    """The monotonic clock. clock: address of clock_gettime. now: int64[2], which it fills."""
    call2(clock, MONOTONIC, numba.int64(now.ctypes.data))
    return now[0] * 1_000_000_000 + now[1]


nanoseconds = numba.njit(_nanoseconds)
"""The same for loops to call."""


@functools.cache
def addresses(system: tuple[str, ...], driver: tuple[str, ...]) -> np.ndarray:
    """uint64, one for each function of the system's C library and then of the driver, by their names.

    Raises OSError or AttributeError where the driver or one of them is missing.
    """
    c_library, cuda_library = ctypes.CDLL(None), driver_library()
    if cuda_library is None:
        raise OSError("no NVIDIA driver")
    found = [getattr(c_library, name) for name in system] + [getattr(cuda_library, name) for name in driver]
    return np.array([ctypes.cast(function, ctypes.c_void_p).value for function in found], np.uint64)


@functools.cache
def available(system: tuple[str, ...], driver: tuple[str, ...]) -> bool:
    """Whether a loop can call them: on a real device, under a system that has them."""
    if SIMULATOR or os.name != "posix":
        return False
    try:
        addresses(system, driver)
    except (OSError, AttributeError):
        return False
    return True
