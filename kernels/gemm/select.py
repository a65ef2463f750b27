"""Which kernel multiplies a given pair of matrices: the first of the ladder that takes them.

To add a kernel: import its record in `ladder` and put it where it belongs in the order of preference.
"""

from __future__ import annotations

import functools

from tilewright.kernels.gemm.base import GemmKernel, Problem
from tilewright.kernels.launch import SIMULATOR


@functools.cache
def ladder() -> tuple[GemmKernel, ...]:
    """Every kernel, most preferred first. Imported here, so that a machine without CUDA never loads them."""
    from tilewright.kernels.gemm.global_memory import GLOBAL_MEMORY
    from tilewright.kernels.gemm.tiled import TILED

    kernels = (
        TILED,
        GLOBAL_MEMORY,
    )
    if SIMULATOR:
        return tuple(kernel for kernel in kernels if kernel.portable)
    from tilewright.kernels.gemm.exact_integer import EXACT_INTEGER

    return (EXACT_INTEGER, *kernels)


def select(problem: Problem) -> GemmKernel:
    """The kernel for a problem whose dtypes and shapes were checked. The tiled one takes everything."""
    if problem.k == 0:
        from tilewright.kernels.gemm.tiled import TILED

        return TILED  # the one that promises zeros here
    return next(kernel for kernel in ladder() if kernel.supports(problem))
