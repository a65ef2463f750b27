"""Functions that kernels call on the device, put in the place of the calls by NVIDIA's compiler.

Numba's own ``inline="always"`` copies a function's statements into its caller, block by block and each with all of the
function's names, so that its time grows with the square of a function's length: a kernel of some hundred lines that
calls others several levels deep took 26 s to compile, and takes 2 this way (docs/experiments.md). Numba then compiles
each function once. What comes out is the same where no argument has to be known to Numba as a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewright.kernels.deferred import cuda
from tilewright.kernels.gpu.device_choice import SIMULATOR


def device_function(function: Callable[..., Any]) -> Any:
    """A function for kernels and for other such functions."""
    options = {} if SIMULATOR else {"forceinline": True}
    return cuda.jit(device=True, **options)(function)
