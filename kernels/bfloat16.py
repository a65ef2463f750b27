"""bfloat16, which NumPy itself does not have: its dtype here, and the bits of its numbers inside a kernel.

Arrays of it come from `ml_dtypes <https://github.com/jax-ml/ml_dtypes>`_ (NumPy, and CuPy from 14 on) and from
PyTorch. A bfloat16 is the upper half of a float32, so kernels see 16-bit integers and widen them by a shift.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tilewright.kernels.deferred import cuda
from tilewright.kernels.float8 import E4M3, E5M2, NAMES


def _dtype() -> np.dtype:
    try:
        import ml_dtypes
    except ImportError:
        # Without it there are only PyTorch's tensors, which come and go by their address: any dtype of two bytes that
        # equals no other will do.
        return np.dtype([("bfloat16", np.uint16)])
    return np.dtype(ml_dtypes.bfloat16)


BFLOAT16 = _dtype()
EPSILON, SMALLEST_SUBNORMAL = 2.0**-7, 2.0**-133
"""The distance from 1 to the next number, and the smallest number above 0; `numpy.finfo` does not know them."""


def dtype_name(dtype: np.dtype) -> str:
    """NumPy's name for a dtype, or that of one which NumPy does not have: ``bfloat16``, or float8."""
    for kind, name in ((BFLOAT16, "bfloat16"), (E4M3, NAMES[0]), (E5M2, NAMES[1])):
        if dtype == kind:
            return name
    return str(dtype)


def is_bfloat16(dtype: Any) -> bool:
    """Whether another library's dtype, `torch.bfloat16` for one, is bfloat16; by its name, so nothing is imported."""
    try:
        return str(dtype).rpartition(".")[2] == "bfloat16"
    except Exception:  # some classes' fails; then it is the name of no element type
        return False


@functools.cache
def device_functions() -> tuple[Any, Any]:
    """``widened(bits)``: the float32 equal to the bfloat16 of these 16 bits. ``rounded(value)``: the bits (uint16) of
    the bfloat16 nearest to a float32, ties to even; a NaN stays one, without its sign and payload.

    On integers alone, so that they serve every GPU and the simulator: an instruction for it exists from 8.0 on.
    """
    from numba.core import config

    float_bits: Any
    bits_float: Any
    if config.ENABLE_CUDASIM:

        def float_bits(value: np.float32) -> np.int32:
            return value.view(np.int32)

        def bits_float(bits: np.int32) -> np.float32:
            return bits.view(np.float32)

    else:
        from numba.cuda import libdevice

        # Not the intrinsics of `ptx`, which look different in every process to the cache of compiled kernels.
        float_bits, bits_float = libdevice.float_as_int, libdevice.int_as_float

    u16, u32, i32 = np.uint16, np.uint32, np.int32

    @cuda.jit(device=True, inline="always")
    def widened(bits: Any) -> Any:
        return bits_float(i32(u32(u32(bits) << u32(16))))

    @cuda.jit(device=True, inline="always")
    def rounded(value: Any) -> Any:
        if value != value:
            return u16(0x7FC0)
        bits = u32(float_bits(value))
        # Half of what is cut, or one less where the last bit kept is even, carries into that bit; into infinity too.
        carried = u32(bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1)))
        return u16(carried >> u32(16))

    return widened, rounded
