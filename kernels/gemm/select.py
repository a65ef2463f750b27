"""Which kernel multiplies a given pair of matrices: the one that was measured fastest on this GPU, else the first of
the ladder that takes them.

To add a kernel: import its record in `_specialised`, or in `_portable` if the simulator can run it, and put it where it
belongs in the order of preference.
"""

from __future__ import annotations

import dataclasses
import functools

from tilewright.kernels.gemm import tuning
from tilewright.kernels.gemm.base import GemmKernel, Problem
from tilewright.kernels.gpu.device_choice import SIMULATOR


def _portable() -> tuple[GemmKernel, ...]:
    from tilewright.kernels.gemm.ladder.global_memory import GLOBAL_MEMORY
    from tilewright.kernels.gemm.ladder.tiled import TILED

    return (TILED, GLOBAL_MEMORY)


def _specialised() -> tuple[GemmKernel, ...]:
    from tilewright.kernels.gemm.cores.skinny_launch import SKINNY
    from tilewright.kernels.gemm.cores.warp_tiled_launch import WARP_TILED
    from tilewright.kernels.gemm.exact.exact_integer import EXACT_INTEGER, EXACT_INTEGER_MMA
    from tilewright.kernels.gemm.exact.split_complex import SPLIT_COMPLEX
    from tilewright.kernels.gemm.exact.split_residues import SPLIT_RESIDUES, SPLIT_RESIDUES_MMA
    from tilewright.kernels.gemm.hopper.float8_tensor_core import FLOAT8_WGMMA
    from tilewright.kernels.gemm.hopper.half_tensor_core import ASKED, BFLOAT, HALF
    from tilewright.kernels.gemm.hopper.split_float import SPLIT
    from tilewright.kernels.gemm.ladder.register_blocked import REGISTER_BLOCKED
    from tilewright.kernels.gemm.tensor.double_tensor_core import DOUBLE_TENSOR_CORE
    from tilewright.kernels.gemm.tensor.float_mma import (
        ASKED_MMA,
        BFLOAT_MMA,
        FLOAT8_MMA,
        HALF_MMA,
        SPLIT_MMA,
    )

    return (
        EXACT_INTEGER,
        EXACT_INTEGER_MMA,
        SKINNY,
        SPLIT_RESIDUES,
        SPLIT_COMPLEX,
        SPLIT,
        *ASKED,
        HALF,
        BFLOAT,
        FLOAT8_WGMMA,
        SPLIT_RESIDUES_MMA,
        SPLIT_MMA,
        *ASKED_MMA,
        HALF_MMA,
        BFLOAT_MMA,
        FLOAT8_MMA,
        DOUBLE_TENSOR_CORE,
        WARP_TILED,
        REGISTER_BLOCKED,
    )


@functools.cache
def ladder() -> tuple[GemmKernel, ...]:
    """Every kernel, most preferred first. Imported here, so that a machine without CUDA never loads them.

    The simulator has only the portable ones: it knows no PTX.
    """
    return _portable() if SIMULATOR else (*_specialised(), *_portable())


def select(problem: Problem) -> GemmKernel:
    """The kernel for a problem whose dtypes and shapes were checked.

    The one that was measured fastest here, if any was (`tuning`), else the first that takes it; the tiled
    kernel takes everything. A precision below full is a permission: where no kernel uses it for this shape,
    the kernels that multiply in full come before the portable ones.
    """
    if problem.k == 0:
        return _portable()[0]  # the one that promises zeros here
    able = [kernel for kernel in ladder() if kernel.supports(problem)]
    if problem.precision != "full":
        in_full = dataclasses.replace(problem, precision="full")
        able = [kernel for kernel in able if not kernel.portable]
        able += [kernel for kernel in ladder() if kernel.supports(in_full)]
    remembered = tuning.preferred(problem)
    return next((kernel for kernel in able if kernel.name == remembered), able[0])
