"""float8, which NumPy itself does not have: the two kinds that are multiplied, and their numbers inside a kernel.

``float8_e4m3fn`` has no infinities, ``float8_e5m2`` has those of IEEE 754. Arrays of them come from `ml_dtypes
<https://github.com/jax-ml/ml_dtypes>`_ (NumPy) and from PyTorch. Both kinds are subsets of float16, so that widening
them is exact; kernels see bytes.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tilewright.kernels.deferred import cuda
from tilewright.kernels.errors import DTypeError

NAMES = ("float8_e4m3fn", "float8_e5m2")
"""Of other kinds, such as ``float8_e4m3fnuz``, tensor cores have no products."""


def _dtype(name: str) -> np.dtype:
    try:
        import ml_dtypes
    except ImportError:
        # As for bfloat16: any dtype of one byte that equals no other will do.
        return np.dtype([(name, np.uint8)])
    return np.dtype(getattr(ml_dtypes, name))


E4M3, E5M2 = _dtype(NAMES[0]), _dtype(NAMES[1])
FLOAT8 = (E4M3, E5M2)
PTX_KINDS = {E4M3: "e4m3", E5M2: "e5m2"}
"""What instructions call them."""
_BY_NAME = dict(zip(NAMES, FLOAT8, strict=True))


def float8_of(dtype: Any) -> np.dtype | None:
    """The kind that another library's dtype is, `torch.float8_e5m2` for one; None where it is none of these. By its
    name, so nothing is imported."""
    try:
        return _BY_NAME.get(str(dtype).rpartition(".")[2])
    except Exception:  # some classes' fails; then it is the name of no element type
        return None


def bytes_of(tensor: Any) -> tuple[Any, np.dtype]:
    """A PyTorch tensor of float8 as one of bytes in the same memory, and its kind: PyTorch exports no float8.

    Raises DTypeError for a tensor of another kind of float8.
    """
    import torch

    kind = float8_of(tensor.dtype)
    if kind is None:
        raise DTypeError(
            f"{tensor.dtype} cannot be multiplied here; of float8 the kinds {' and '.join(NAMES)} are allowed: convert "
            "it first, as by tensor.float()"
        )
    return tensor.view(torch.uint8), kind


@functools.cache
def numbers_of(kind: np.dtype) -> np.ndarray:
    """The float32 number of each of the 256 codes."""
    codes = np.arange(256, dtype=np.uint16)
    sign, rest = codes & 0x80, codes & 0x7F
    if kind == E5M2:
        return (codes << 8).astype(np.uint16).view(np.float16).astype(np.float32)
    # The exponent's bias is 7 there and 15 here: 2**8 lies between, for subnormal numbers too.
    found = (sign << 8 | rest << 7).astype(np.uint16).view(np.float16).astype(np.float32) * np.float32(256)
    found[rest == 0x7F] = np.nan
    return found


def to_float32(array: np.ndarray) -> np.ndarray:
    """A float8 array as a new one of float32, by rows; nothing is rounded."""
    return numbers_of(array.dtype)[array.view(np.uint8)]


@functools.cache
def widening(kind: np.dtype) -> Any:
    """``widened(code)``: inside a kernel, the float32 equal to the float8 number of this code (a byte).

    On integers and one exact multiplication, so that it serves every GPU and the simulator.
    """
    from numba.core import config

    bits_float: Any
    if config.ENABLE_CUDASIM:

        def bits_float(bits: np.int32) -> np.float32:
            return bits.view(np.float32)

    else:
        from numba.cuda import libdevice

        bits_float = libdevice.int_as_float

    u32, i32, f32 = np.uint32, np.int32, np.float32
    # The lowest of float32's exponent bits that hold this kind's, what lies between the two biases, the first code
    # that is no finite number, and the first NaN.
    shift, factor = (20, 2.0**120) if kind == E4M3 else (21, 2.0**112)
    beyond = 0x7F if kind == E4M3 else 0x7C
    infinity = 0x7C

    @cuda.jit(device=True, inline="always")
    def widened(code: Any) -> Any:
        rest = u32(code) & u32(0x7F)
        sign = u32((u32(code) & u32(0x80)) << u32(24))
        if rest >= u32(beyond):
            finite_above = u32(0x7F800000) if rest == u32(infinity) else u32(0x7FC00000)
            return bits_float(i32(u32(sign | finite_above)))
        return f32(bits_float(i32(u32(sign | u32(rest << u32(shift))))) * f32(factor))

    return widened
