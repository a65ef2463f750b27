"""The dot product on one device: its checks, and the choice of GPU or CPU.

`tilewright.kernels.dots.device` has the GPU's part, `tilewright.kernels.dots.host` the CPU's.
"""

from __future__ import annotations

import contextlib
from typing import Any, TypedDict, Unpack, overload

import numpy as np

from tilewright.kernels.arguments import check_flag, host_array
from tilewright.kernels.choices import DeviceArray, DeviceName, HostArray
from tilewright.kernels.deferred import cuda
from tilewright.kernels.errors import DTypeError, OptionError, ShapeError
from tilewright.kernels.gemm import check
from tilewright.kernels.gemm.base import NUMPY_ELEMENTS
from tilewright.kernels.gpu.device_array import (
    address,
    as_device_array,
    check_alignment,
    device_index,
    is_device_array,
)
from tilewright.kernels.gpu.device_choice import current_device, resolve_device
from tilewright.kernels.gpu.streams import check_stream, launch_stream


class DotOptions(TypedDict, total=False):
    """The keywords of `dot`."""

    conjugate: bool
    dtype: Any
    device: DeviceName
    stream: Any


@overload
def dot(x: HostArray, y: HostArray, **options: Unpack[DotOptions]) -> np.number[Any]: ...
@overload
def dot(x: DeviceArray, y: DeviceArray, **options: Unpack[DotOptions]) -> DeviceArray: ...
def dot(
    x: Any,
    y: Any,
    *,
    conjugate: bool = True,
    dtype: Any = None,
    device: DeviceName = "auto",
    stream: Any = None,
) -> Any:
    """Sum of conj(x[i]) * y[i], as `numpy.vdot`; with ``conjugate=False``, of x[i] * y[i].

    Parameters
    ----------
    x, y
        Vectors of equal length, both NumPy arrays or both device arrays, of any strides; int8 to int64, uint8 to
        uint64, float16, float32, float64, complex64 or complex128. Elements of device arrays lie at multiples of their
        size (complex numbers: half of it).
    dtype
        The result's type, to which both inputs must cast ``same_kind``: int8 vectors with ``dtype=int64`` give a sum
        that does not wrap at 2**7. The default is ``numpy.result_type``.
    device
        ``auto`` (the GPU if there is one), ``cuda`` or ``cpu``. Device arrays are multiplied where they lie.
    stream
        The stream to launch on. The default is the one that the arrays were exported with, else the default stream. For
        device arrays the function returns before the product is finished.

    Notes
    -----
    Integers wrap modulo 2**bits of the result's dtype, and of no narrower one. Floating-point products are added up in
    double precision, on GPU and CPU, and rounded once. The answer is bit-identical from run to run on one kind of
    device; empty vectors give zero.

    Returns a NumPy scalar for NumPy arrays and a device array of shape () for device arrays. Raises
    ShapeError, DTypeError, OptionError or DeviceUnavailableError before anything is launched.

    Examples
    --------
    >>> import numpy as np
    >>> from tilewright.kernels import dot
    >>> complex(dot(np.array([1j, 2]), np.array([1j, 2]), device="cpu"))
    (5+0j)
    """
    conjugate = check_flag("conjugate", conjugate)
    check_stream(stream)
    on_device = [is_device_array(x), is_device_array(y)]
    if on_device[0] != on_device[1]:
        raise OptionError("one of x and y lies on a GPU and the other does not; bring them to one side")
    if on_device[0]:
        x, y = as_device_array(x), as_device_array(y)
    else:
        x, y = host_array("x", x), host_array("y", y)
    result = _checked(x, y, dtype)
    where = resolve_device(device, device_arrays=on_device[0])
    if where == "cpu":
        from tilewright.kernels.dots.host import dot_host

        return dot_host(x, y, result, conjugate)
    from tilewright.kernels.dots import device as dot_device

    if not on_device[0]:
        return dot_device.from_host(x, y, result, conjugate)  # has streams of its own
    home, other = device_index(x), device_index(y)
    if home != other:
        raise OptionError(f"x lies on GPU {home} and y on GPU {other}; copy them to the same")
    for name, vector in (("x", x), ("y", y)):
        check_alignment(name, vector.shape, vector.strides, vector.dtype, address(vector))
    with contextlib.nullcontext() if home == current_device() else cuda.gpus[home]:
        queue = launch_stream(stream, [x, y])
        return dot_device.on_device(x, y, result, conjugate, queue)


def _checked(x: Any, y: Any, dtype: Any) -> np.dtype:
    """The result's dtype, once shapes and dtypes are found good."""
    for name, vector in (("x", x), ("y", y)):
        if vector.ndim != 1:
            raise ShapeError(f"{name} has {vector.ndim} dimensions; a dot product takes vectors")
        if vector.dtype.kind not in "iufc" or vector.dtype.itemsize // (1 + (vector.dtype.kind == "c")) > 8:
            raise DTypeError(
                f"{name} holds {vector.dtype}; a dot product takes integers, float16 to float64 and complex"
            )
        if not vector.dtype.isnative:
            raise DTypeError(f"{name} holds {vector.dtype} in foreign byte order; convert it first")
    if len(x) != len(y):
        raise ShapeError(f"x has {len(x)} elements and y has {len(y)}; they must have equally many")
    return check.result_dtype(x.dtype, y.dtype, dtype, ("x", "y"), NUMPY_ELEMENTS)
