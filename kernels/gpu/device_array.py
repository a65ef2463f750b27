"""From a caller's array to a device array, and what can be done with one without a kernel: views and copies.

A caller's device array is anything with ``__cuda_array_interface__`` (Numba, CuPy, PyTorch). Here it becomes
a Numba device array over the same memory, without a copy and without making the host wait.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from tilewright.kernels.bfloat16 import BFLOAT16, dtype_name, is_bfloat16
from tilewright.kernels.deferred import cuda
from tilewright.kernels.errors import OptionError, ShapeError
from tilewright.kernels.float8 import FLOAT8, bytes_of, float8_of
from tilewright.kernels.gpu.device_choice import SIMULATOR, current_device, device_count, driver_bindings
from tilewright.kernels.gpu.recording import ALIGNMENT
from tilewright.kernels.gpu.streams import DEFAULT_STREAM, external_stream
from tilewright.kernels.shipped.described import described, described_array

MAX_ALIGNMENT = ALIGNMENT


def is_device_array(value: Any) -> bool:
    """Whether ``value`` lives on a GPU (or, in the simulator, pretends to)."""
    kind = type(value)
    if getattr(kind, "__cuda_ndarray__", False):
        return True
    if hasattr(kind, "__cuda_array_interface__"):
        # Ask the class: asking the array would build its interface. PyTorch's tensors may lie on the host.
        return value.is_cuda if kind.__module__.partition(".")[0] == "torch" else True
    return hasattr(value, "__cuda_array_interface__")


class Memory(NamedTuple):
    """Where an array lies on a device: all that a launch needs to know of it."""

    pointer: int
    """The address of the first element; 0 when it is empty."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    dtype: np.dtype
    stream: Any
    """The stream it was exported with, or `DEFAULT_STREAM`."""
    read_only: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...], np.dtype, int]:
        """What a decision may depend on: shape, strides, dtype, and the address modulo `MAX_ALIGNMENT`."""
        return self.shape, self.strides, self.dtype, self.pointer % MAX_ALIGNMENT


def memory_of(value: Any) -> Memory:
    """Where a device array lies. Another library's array is asked once: the answer takes a microsecond."""
    if getattr(value, "__cuda_ndarray__", False):
        pointer, read_only = address(value), getattr(value, "read_only", False)
        return Memory(pointer, value.shape, value.strides, value.dtype, value.stream, read_only)
    if SIMULATOR:
        return memory_of(cuda.as_cuda_array(value))
    try:
        interface = value.__cuda_array_interface__
    except KeyError:  # what PyTorch raises for types that it does not export
        if not _is_float8_tensor(value):
            raise
        tensor, kind = bytes_of(value)
        return _exported_memory(tensor, tensor.__cuda_array_interface__)._replace(dtype=kind)
    return _exported_memory(value, interface)


def _is_float8_tensor(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and "float8" in str(value.dtype)


def _exported_memory(owner: Any, interface: Any) -> Memory:
    if interface.get("mask") is not None:
        raise OptionError("masked device arrays are not supported; pass the data without its mask")
    pointer, read_only = interface["data"]
    dtype = _exported_dtype(owner, interface["typestr"])
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    strides = _contiguous_strides(shape, dtype.itemsize) if strides is None else tuple(strides)
    handle = interface.get("stream")
    stream = DEFAULT_STREAM if handle is None else external_stream(handle, current_device())
    return Memory(pointer or 0, shape, strides, dtype, stream, read_only)


@functools.lru_cache(maxsize=1024)
def _contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def _exported_dtype(owner: Any, typestr: str) -> np.dtype:
    """The dtype of an exported array. The interface has no code for bfloat16: CuPy and PyTorch give ``<V2``, two bytes
    of anything, PyTorch 2.5 gave ``<f2``. So the array's own dtype is asked. Nor has it one for float8."""
    if typestr[1:] not in ("V2", "f2", "V1", "f1", "u1"):
        return _dtype(typestr)
    own = getattr(owner, "dtype", None)
    try:
        return _named_dtype(own, typestr)
    except TypeError:  # what cannot be remembered, for it has no hash
        return _named_dtype.__wrapped__(own, typestr)


@functools.lru_cache(maxsize=256)
def _named_dtype(own: Any, typestr: str) -> np.dtype:
    """The dtype of an array by its own dtype's name, which takes microseconds to be made; else by its code."""
    if typestr[1:] in ("V2", "f2") and is_bfloat16(own):
        return BFLOAT16
    kind = float8_of(own) if typestr[1:] in ("V1", "f1", "u1") else None
    return _dtype(typestr) if kind is None else kind


@functools.lru_cache(maxsize=1024)
def _dtype(typestr: str) -> np.dtype:
    return np.dtype(typestr)


def as_device_array(value: Any, memory: Memory | None = None) -> Any:
    """A Numba device array over the memory of ``value``, which keeps ``value`` alive. Copies nothing.

    ``memory`` is what `memory_of` said of it, where that was asked before. The exporter's stream is kept in the
    result's ``stream``; `launch_stream` orders work after it.
    """
    if getattr(value, "__cuda_ndarray__", False):
        return value
    if SIMULATOR:
        return cuda.as_cuda_array(value)
    memory = memory_of(value) if memory is None else memory
    if memory.dtype.itemsize == 1 and _is_float8_tensor(value):
        value, _ = bytes_of(value)  # which Numba can be given
    return _exported_array()(value, memory)


@functools.cache
def _exported_array() -> Any:
    """The class of `as_device_array`'s results for other libraries' arrays.

    `numba.cuda.as_cuda_array` takes 20 µs for attributes that only slicing and copying need. Here those are made on
    first use; a launch needs only what the interface says. Of a GPU that is only described it is what describes arrays.
    """
    if described() is not None:
        return described_array
    from numba.cuda.cudadrv.devicearray import DeviceNDArray

    class ExportedArray(DeviceNDArray):
        def __new__(cls, owner: Any = None, memory: Any = None, **described: Any) -> Any:
            return super().__new__(cls) if memory is not None else DeviceNDArray(**described)

        def __init__(self, owner: Any, memory: Memory) -> None:
            self._owner = owner
            self.pointer, self.shape, self.strides, self.dtype, self.stream, self.read_only = memory
            self.ndim = len(self.shape)
            self.size = memory.size

        @functools.cached_property
        def _whole(self) -> Any:
            return cuda.as_cuda_array(self._owner, sync=False)

        @functools.cached_property
        def gpu_data(self) -> Any:
            return self._whole.gpu_data

        @functools.cached_property
        def alloc_size(self) -> int:
            return int(self._whole.alloc_size)

        @functools.cached_property
        def _dummy(self) -> Any:
            return self._whole._dummy

    return ExportedArray


class DeviceRegion:
    """Rows and columns of a device matrix, for the functions of this package; nothing is copied.

    Numba's own slicing lists all rows of a region that is not contiguous: 10 ms for 8192 rows, in which no other Python
    thread runs.
    """

    def __init__(self, matrix: Any, rows: slice, columns: slice) -> None:
        """The slices have a start and a stop, within the matrix, and no step."""
        memory = memory_of(matrix)
        self._matrix = matrix  # keeps the memory alive
        self.dtype = memory.dtype
        self.shape = rows.stop - rows.start, columns.stop - columns.start
        self.strides = memory.strides
        start = rows.start * memory.strides[0] + columns.start * memory.strides[1]
        self.__cuda_array_interface__ = {
            "shape": self.shape,
            "strides": self.strides,
            "typestr": memory.dtype.str,
            "data": (memory.pointer + start, memory.read_only),
            "version": 3,
        }
        if memory.stream:
            self.__cuda_array_interface__["stream"] = int(memory.stream)


def to_device(array: np.ndarray, stream: Any = DEFAULT_STREAM) -> Any:
    """`numba.cuda.to_device` of an array whose elements fill one region of memory. Numba copies through Python's
    buffers, which know no bfloat16 and no float8, so these are copied as their bits."""
    kind = _bits(array.dtype)
    if kind is None:
        return cuda.to_device(array, stream=stream)
    bits = cuda.to_device(array.view(kind), stream=stream)
    return strided_view(bits, bits.shape, bits.strides, array.dtype)


def _bits(dtype: Any) -> np.dtype | None:
    """The unsigned integers that stand for the elements of a type that NumPy does not have; None for any other."""
    if dtype == BFLOAT16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint8) if dtype in FLOAT8 else None


def to_host(array: Any, target: np.ndarray, stream: Any = DEFAULT_STREAM) -> None:
    """``copy_to_host`` of a Numba device array into a host array of the same shape, strides and dtype."""
    kind = _bits(target.dtype)
    if kind is not None:
        array, target = as_kernel_argument(array), target.view(kind)
    array.copy_to_host(target, stream=stream)


def strided_view(array: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any = None) -> Any:
    """A Numba device array over the same memory with another shape, strides (bytes) and, if given, dtype."""
    dtype = array.dtype if dtype is None else dtype
    if SIMULATOR:
        plain = _bits(dtype) or dtype  # NumPy asks for the type's code, and float8 has none that it knows
        host = np.lib.stride_tricks.as_strided(array._ary.view(plain), shape, strides)
        return type(array)(host.view(dtype), stream=array.stream)
    return type(array)(
        shape=shape, strides=strides, dtype=dtype, stream=array.stream, gpu_data=array.gpu_data
    )


def transposed(array: Any) -> Any:
    """The transpose of a two-dimensional device array as a view (``DeviceNDArray.T`` would copy it)."""
    if SIMULATOR:
        return array.T
    if isinstance(array, tuple):  # a matrix that is no Numba array
        return array.transposed()  # type: ignore[attr-defined]
    return strided_view(array, array.shape[::-1], array.strides[::-1])


def as_kernel_argument(argument: Any) -> Any:
    """An argument as signatures made with `numba_type` take it: a bfloat16 or float8 array as its bits."""
    kind = _bits(getattr(argument, "dtype", None))
    return argument if kind is None else strided_view(argument, argument.shape, argument.strides, kind)


def address(array: Any) -> int:
    """The address of the first element of a Numba device array; 0 when it is empty."""
    if SIMULATOR:
        return int(array._ary.ctypes.data)
    pointer = getattr(array, "pointer", None)
    return array.device_ctypes_pointer.value or 0 if pointer is None else pointer


def alignment(pointer: int) -> int:
    """The largest power of two, at most 128, that divides an address (bytes)."""
    return min(pointer & -pointer, MAX_ALIGNMENT) if pointer else MAX_ALIGNMENT


def check_alignment(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype, pointer: int
) -> None:
    """ShapeError unless every element of a device array lies where a GPU can read it. A kernel that reads any other
    takes the process's context, and all that lies in it, with it.

    Kernels read the two parts of a complex number by themselves where it is no whole vector. strides: in bytes.
    pointer: the address of the first element, modulo `MAX_ALIGNMENT` at least.
    """
    needed = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    if 0 in shape:
        return
    if pointer % needed:
        raise ShapeError(
            f"{name} begins {pointer % needed} bytes behind a multiple of {needed}, and GPUs read "
            f"{dtype_name(dtype)} at multiples of {needed} bytes alone; copy the array to one of its own"
        )
    if any(side > 1 and stride % needed for side, stride in zip(shape, strides, strict=True)):
        raise ShapeError(
            f"{name} has strides {tuple(strides)} bytes, and GPUs read {dtype_name(dtype)} at multiples of {needed} "
            "bytes alone; copy the array to one of its own"
        )


def device_index(array: Any) -> int:
    """The number of the GPU that holds a Numba device array."""
    if array.size == 0 or device_count() == 1:
        return current_device()
    driver = driver_bindings()
    ordinal = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    error, device = driver.cuPointerGetAttribute(ordinal, address(array))
    if error:
        raise OptionError(f"the address {address(array):#x} is not of a GPU's memory ({error.name})")
    return int(device)
