"""How every kernel is launched: grids, timers, streams, and the way from a caller's array to a device array.

A caller's device array is anything with ``__cuda_array_interface__`` (Numba, CuPy, PyTorch). Here it becomes
a Numba device array over the same memory, without a copy and without making the host wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from tilewright.kernels.bfloat16 import BFLOAT16, device_functions, is_bfloat16
from tilewright.kernels.compiled import (
    DEFAULT_SHARED_NBYTES,
    CompiledKernel,
    argument_layout,
    device_capability,
)
from tilewright.kernels.deferred import cuda, numba
from tilewright.kernels.errors import DeviceUnavailableError, OptionError
from tilewright.kernels.recording import ALIGNMENT, Plan, Recording

SIMULATOR = os.environ.get("NUMBA_ENABLE_CUDASIM", "0").strip() not in ("", "0")
"""Whether this process runs Numba's CUDA simulator (``NUMBA_ENABLE_CUDASIM=1``) in place of a GPU."""

DEVICES = ("auto", "cuda", "cpu")
DEFAULT_STREAM = 0
LEGACY_DEFAULT_STREAM = 1
"""How ``__cuda_array_interface__`` spells the default stream, since its 0 would be ambiguous."""
MAX_ALIGNMENT = ALIGNMENT
DRIVER_LIBRARIES = tuple(
    os.path.join(folder, name)
    for folder in ("", "/usr/lib", "/usr/lib64")
    for name in ("libcuda.so.1", "libcuda.so")
)
"""Where Numba and CUDA's bindings look for the driver, on Linux."""
CUDA_ERROR_NO_DEVICE = 100
"""The driver's number for it (``CUresult``)."""


def ceil_div(a: int, b: int) -> int:
    """The least number of groups of ``b`` that hold ``a`` things; a >= 0, b > 0."""
    return -(-a // b)


@functools.cache
def conversion(dtype: np.dtype) -> Any:
    """What makes an element of ``dtype`` of a number inside a kernel; integers wrap, as the hardware does.

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
    """What makes a number of one dtype of an element of another inside a kernel: `conversion`, but for bfloat16."""
    convert = conversion(number)
    if stored != BFLOAT16:
        return convert
    widened, _ = device_functions()

    @cuda.jit(device=True, inline="always")
    def widen_and_convert(bits: Any) -> Any:
        return convert(widened(bits))

    return widen_and_convert


def numba_type(dtype: np.dtype) -> Any:
    """What a kernel takes elements of a dtype for: the Numba type of the same name; bfloat16 as its bits, uint16."""
    return numba.uint16 if dtype == BFLOAT16 else numba.from_dtype(dtype)


@functools.cache
def cuda_available() -> bool:
    """Whether a GPU can be used from this process. The simulator counts as one."""
    return SIMULATOR or (_driver_shows_a_gpu() and bool(cuda.is_available()))


def driver_library() -> ctypes.CDLL | None:
    """The NVIDIA driver's library, for calls past Numba; None where there is none."""
    for library in DRIVER_LIBRARIES:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(library)
    return None


def _driver_shows_a_gpu() -> bool:
    """Whether there is an NVIDIA driver that counts at least one GPU, before anything is imported for it.

    Only what it says for certain is a no here: any other of its errors is left to Numba, which reports it.
    """
    driver = driver_library()
    if driver is None:
        return False
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return bool(status != CUDA_ERROR_NO_DEVICE and (status or count.value))


def is_device_array(value: Any) -> bool:
    """Whether ``value`` lives on a GPU (or, in the simulator, pretends to)."""
    kind = type(value)
    if getattr(kind, "__cuda_ndarray__", False):
        return True
    if hasattr(kind, "__cuda_array_interface__"):
        # The class is asked, since asking an array builds its interface; PyTorch's tensors may be elsewhere.
        return value.is_cuda if kind.__module__.partition(".")[0] == "torch" else True
    return hasattr(value, "__cuda_array_interface__")


def resolve_device(device: str, *, device_arrays: bool = False) -> str:
    """The device, ``cuda`` or ``cpu``, that ``auto | cuda | cpu`` means here.

    ``device_arrays`` says that the operands already lie on a GPU, which only ``auto`` and ``cuda`` can serve.

    Raises OptionError for any other word, or for ``cpu`` with device arrays, and DeviceUnavailableError for
    ``cuda`` where no GPU can be used: never a silent fall-back.
    """
    if device == "auto" and device_arrays:
        return "cuda"
    if device not in DEVICES:
        raise OptionError(f"device={device!r} is unknown; it may be {', '.join(map(repr, DEVICES))}")
    if device_arrays:
        if device == "cpu":
            raise OptionError(
                "device='cpu' was asked for, but the arrays lie on a GPU; copy them to the host first "
                "(copy_to_host() in Numba, .get() in CuPy), or pass device='auto'"
            )
        return "cuda"
    if device == "auto":
        return "cuda" if cuda_available() else "cpu"
    if device == "cuda" and not cuda_available():
        raise DeviceUnavailableError(
            "device='cuda' was asked for, but no CUDA GPU can be used here; check `tilewright devices`, "
            "CUDA_VISIBLE_DEVICES and the driver, or pass device='auto' or 'cpu'"
        )
    return device


class Memory(NamedTuple):
    """Where an array lies on a device: all that a launch wants to know of it."""

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
    """Where a device array lies. An array of another library is asked once: its answer takes it a microsecond."""
    if getattr(value, "__cuda_ndarray__", False):
        pointer, read_only = address(value), getattr(value, "read_only", False)
        return Memory(pointer, value.shape, value.strides, value.dtype, value.stream, read_only)
    if SIMULATOR:
        return memory_of(cuda.as_cuda_array(value))
    return _exported_memory(value, value.__cuda_array_interface__)


def _exported_memory(owner: Any, interface: Any) -> Memory:
    if interface.get("mask") is not None:
        raise OptionError("masked device arrays are not supported; pass the data without its mask")
    pointer, read_only = interface["data"]
    dtype = _exported_dtype(owner, interface["typestr"])
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    strides = _contiguous_strides(shape, dtype.itemsize) if strides is None else tuple(strides)
    handle = interface.get("stream")
    stream = DEFAULT_STREAM if handle is None else _external_stream(handle, current_device())
    return Memory(pointer or 0, shape, strides, dtype, stream, read_only)


@functools.lru_cache(maxsize=1024)
def _contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def as_device_array(value: Any, memory: Memory | None = None) -> Any:
    """A Numba device array over the memory of ``value``, which keeps ``value`` alive. Copies nothing.

    ``memory`` is what `memory_of` said of it, where that was asked before. The exporter's stream is kept in the
    result's ``stream``; `launch_stream` orders work after it.
    """
    if getattr(value, "__cuda_ndarray__", False):
        return value
    if SIMULATOR:
        return cuda.as_cuda_array(value)
    return _exported_array()(value, memory_of(value) if memory is None else memory)


class DeviceRegion:
    """Rows and columns of a device matrix, for the functions of this package; nothing is copied.

    Numba's own slices list every row that is not contiguous with the next: 10 ms, in which no other thread of Python
    runs, for 8192 of them.
    """

    def __init__(self, matrix: Any, rows: slice, columns: slice) -> None:
        """The slices have a start and a stop, within the matrix, and no step."""
        memory = memory_of(matrix)
        self._matrix = matrix  # whose memory it is
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


@functools.cache
def _external_stream(handle: int, device: int) -> Any:
    return cuda.external_stream(handle)


def _exported_dtype(owner: Any, typestr: str) -> np.dtype:
    """The dtype of an exported array. The interface has no word for bfloat16: CuPy and PyTorch say ``<V2``, two bytes
    of anything, and PyTorch 2.5 said ``<f2``; so the array itself is asked."""
    if typestr[1:] in ("V2", "f2") and is_bfloat16(getattr(owner, "dtype", None)):
        return BFLOAT16
    return _dtype(typestr)


@functools.lru_cache(maxsize=1024)
def _dtype(typestr: str) -> np.dtype:
    return np.dtype(typestr)


@functools.cache
def _exported_array() -> Any:
    """The class of `as_device_array`'s results for other libraries' arrays.

    `numba.cuda.as_cuda_array` takes 20 µs for what slicing and copying may need some day. Here that is made
    when it is asked for, and a launch needs only what the interface says.
    """
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


def to_device(array: np.ndarray, stream: Any = DEFAULT_STREAM) -> Any:
    """`numba.cuda.to_device` of an array whose elements fill one region of memory. Numba copies through Python's
    buffers, which know no bfloat16: its bits travel as uint16."""
    if array.dtype != BFLOAT16:
        return cuda.to_device(array, stream=stream)
    bits = cuda.to_device(array.view(np.uint16), stream=stream)
    return strided_view(bits, bits.shape, bits.strides, BFLOAT16)


def to_host(array: Any, target: np.ndarray, stream: Any = DEFAULT_STREAM) -> None:
    """``copy_to_host`` of a Numba device array into a host array of the same shape, strides and dtype."""
    if target.dtype == BFLOAT16:
        array, target = _as_signed(array), target.view(np.uint16)
    array.copy_to_host(target, stream=stream)


def strided_view(array: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any = None) -> Any:
    """A Numba device array over the same memory with another shape, strides (bytes) and, if given, dtype."""
    dtype = array.dtype if dtype is None else dtype
    if SIMULATOR:
        host = np.lib.stride_tricks.as_strided(array._ary.view(dtype), shape, strides)
        return type(array)(host, stream=array.stream)
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


def address(array: Any) -> int:
    """The address of the first element of a Numba device array; 0 when it is empty."""
    if SIMULATOR:
        return int(array._ary.ctypes.data)
    pointer = getattr(array, "pointer", None)
    return array.device_ctypes_pointer.value or 0 if pointer is None else pointer


def alignment(pointer: int) -> int:
    """The largest power of two, at most 128, that divides an address (bytes)."""
    return min(pointer & -pointer, MAX_ALIGNMENT) if pointer else MAX_ALIGNMENT


def current_device() -> int:
    """The number of the GPU that this thread works on."""
    if device_count() == 1:
        return 0
    error, device = _driver().cuCtxGetDevice()
    return int(cuda.get_current_device().id) if error else int(device)  # a thread without a context gets one


@functools.cache
def device_count() -> int:
    """GPUs that this process sees."""
    return 1 if SIMULATOR else len(cuda.gpus)


def device_index(array: Any) -> int:
    """The number of the GPU that holds a Numba device array."""
    if array.size == 0 or device_count() == 1:
        return current_device()
    driver = _driver()
    ordinal = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    error, device = driver.cuPointerGetAttribute(ordinal, address(array))
    if error:
        raise OptionError(f"the address {address(array):#x} is not of a GPU's memory ({error.name})")
    return int(device)


@functools.cache
def capability(index: int) -> tuple[int, int] | None:
    """Compute capability of GPU ``index``, (9, 0) for Hopper; None in the simulator."""
    return None if SIMULATOR else device_capability(index)


def as_stream(stream: Any) -> Any:
    """A Numba stream from what a caller may pass: None, a handle, or a stream of Numba, CuPy or PyTorch."""
    if stream is None or SIMULATOR:
        return DEFAULT_STREAM
    for attribute in ("ptr", "cuda_stream"):  # CuPy, PyTorch
        stream = getattr(stream, attribute, stream)
    if isinstance(stream, int):
        return cuda.external_stream(stream) if stream not in (0, LEGACY_DEFAULT_STREAM) else DEFAULT_STREAM
    if not hasattr(stream, "synchronize"):
        raise OptionError(
            f"stream={stream!r} is not a CUDA stream; pass one of Numba, CuPy or PyTorch, its handle, or None"
        )
    return stream


def _handle(stream: Any) -> int:
    handle = int(stream) if stream else DEFAULT_STREAM
    return DEFAULT_STREAM if handle == LEGACY_DEFAULT_STREAM else handle


def launch_stream(stream: Any, arrays: Iterable[Any]) -> Any:
    """The stream to launch on, made to wait for whatever the arrays' exporters have under way.

    Without a stream of the caller's choice, work goes on the stream that the first array carrying one was
    exported with: a kernel then runs in order with the CuPy or PyTorch work around it.
    """
    if SIMULATOR:
        return DEFAULT_STREAM
    exported = [array.stream for array in arrays if array.stream is not DEFAULT_STREAM and array.stream]
    if stream is not None:
        chosen = as_stream(stream)
    elif exported:
        chosen = exported[0] if _handle(exported[0]) else DEFAULT_STREAM
    else:
        return DEFAULT_STREAM
    for other in exported:
        if _handle(other) != _handle(chosen):
            event = cuda.event(timing=False)
            event.record(other)
            event.wait(chosen)
    return chosen


def allow_dynamic_shared(kernel: Any, nbytes: int) -> None:
    """Let a kernel of one eager signature be launched with ``nbytes`` of dynamic shared memory on this
    device.

    Beyond 48 KiB a kernel must ask for it, once per device. The device's limit is
    ``MAX_SHARED_MEMORY_PER_BLOCK_OPTIN``; the launch fails beyond it.
    """
    if nbytes > DEFAULT_SHARED_NBYTES:
        _raise_shared_limit(kernel, nbytes, current_device())


@functools.cache
def _raise_shared_limit(kernel: Any, nbytes: int, device: int) -> None:
    from numba.cuda.cudadrv.driver import binding, driver

    if isinstance(kernel, CompiledKernel):
        kernel.allow_shared(nbytes, device)
        return
    (compiled,) = kernel.overloads.values()
    function = compiled._codelibrary.get_cufunc()
    attribute = binding.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver.cuKernelSetAttribute(attribute, nbytes, function.handle, function.device.id)


class _Frame(threading.local):
    """A thread's own memory for the arguments of a launch; the driver copies them while it launches."""

    CAPACITY = 4096
    """What CUDA allows for the arguments of a kernel, bytes."""

    def __init__(self) -> None:
        arguments = ctypes.create_string_buffer(self.CAPACITY)
        nbytes = ctypes.c_size_t()
        # CU_LAUNCH_PARAM_BUFFER_POINTER, ..., CU_LAUNCH_PARAM_BUFFER_SIZE, ..., CU_LAUNCH_PARAM_END
        self._extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(arguments), 2, ctypes.addressof(nbytes), 0)
        self.parts = arguments, nbytes, ctypes.addressof(self._extra)
        """The buffer, how much of it is filled, and the address of what the driver is told of both."""


_frame = _Frame()


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


@functools.cache
def _prepared(kernel: Any, device: int) -> tuple[Any, struct.Struct]:
    """The driver's handle of a kernel of one signature on a device, and its arguments' layout."""
    if isinstance(kernel, CompiledKernel):
        return kernel.function(device), kernel.layout
    from numba.cuda.cudadrv.driver import binding

    (compiled,) = kernel.overloads.values()
    function = compiled._codelibrary.get_cufunc()
    return binding.CUfunction(int(function.handle)), argument_layout(compiled.argument_types)


@functools.lru_cache(maxsize=256)
def _cluster_config(
    grid_x: int,
    grid_y: int,
    grid_z: int,
    block_x: int,
    block_y: int,
    block_z: int,
    shared_nbytes: int,
    handle: int,
    cluster: int,
) -> Any:
    """The driver's description of a launch in clusters; making one takes longer than launching it."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x = cluster
    attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid_x, grid_y, grid_z
    config.blockDimX, config.blockDimY, config.blockDimZ = block_x, block_y, block_z
    config.sharedMemBytes = shared_nbytes
    config.hStream = driver.CUstream(handle)
    config.attrs, config.numAttrs = [attribute], 1
    return config


def enqueue(
    kernel: Any,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    stream: Any,
    shared_nbytes: int,
    *arguments: Any,
    cluster: int = 1,
) -> None:
    """Launch a kernel of one eager signature: what ``kernel[grid, block, stream, shared_nbytes](*arguments)``
    does, and what it cannot do: in clusters of that many blocks side by side (the grid a multiple of it).

    Numba takes 15 to 20 µs for it, this a third: arguments must be what the signature says (Numba device
    arrays, Python integers, booleans, floats), and are packed without being looked at.
    """
    if SIMULATOR:
        kernel[grid, block, stream, shared_nbytes](*map(_as_signed, arguments))
        return
    function, layout = _prepared(kernel, current_device())
    flat: list[Any] = []
    for argument in arguments:
        if hasattr(argument, "shape"):
            flat += (0, 0, argument.size, argument.dtype.itemsize, address(argument))
            flat += argument.shape
            flat += argument.strides
        else:
            flat.append(argument)
    grid_x, grid_y, grid_z = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
    block_x, block_y, block_z = (block, 1, 1) if isinstance(block, int) else (*block, 1, 1)[:3]
    shape = (grid_x, grid_y, grid_z, block_x, block_y, block_z)
    name = kernel.py_func.__name__
    if isinstance(stream, Recording):
        stream.add(name, function, layout, flat, shape, shared_nbytes, cluster)
        return
    if isinstance(stream, LockKeepingStream) and cluster == 1:
        stream.launch(name, function, layout, flat, shape, shared_nbytes)
        return
    handle = int(stream) if stream else DEFAULT_STREAM
    _start(name, function, layout, flat, shape, shared_nbytes, handle, cluster)


def replay(plan: Plan, bases: Sequence[int], stream: Any) -> None:
    """Enqueue the launches of a plan for the current device; ``bases`` are the addresses it left open."""
    handle = int(stream) if stream else DEFAULT_STREAM
    for step in plan.steps:
        values = list(step.values)
        for index, base, offset in step.places:
            values[index] = bases[base] + offset
        _start(
            step.name,
            step.function,
            step.layout,
            values,
            step.shape,
            step.shared_nbytes,
            handle,
            step.cluster,
        )


def _start(
    name: str,
    function: Any,
    layout: struct.Struct,
    values: list[Any],
    shape: tuple[int, int, int, int, int, int],
    shared_nbytes: int,
    handle: int,
    cluster: int,
) -> None:
    """Launch a kernel by the driver's handles; ``values`` are the arguments as ``layout`` packs them."""
    driver = _driver()
    extra = _packed(layout, values)
    start: Any
    place: tuple[Any, ...]
    if cluster > 1:
        config = _cluster_config(*shape, shared_nbytes, handle, cluster)
        start, place = driver.cuLaunchKernelEx, (config, function, 0, extra)
    else:
        start, place = driver.cuLaunchKernel, (function, *shape, shared_nbytes, handle, 0, extra)
    (status,) = start(*place)
    if not status:
        return
    if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
        # A thread that has not touched the GPU yet: Numba makes its context current.
        cuda.current_context()
        (status,) = start(*place)
    if status:
        raise _failed(_launch_of(name, shape, shared_nbytes), status)


def _packed(layout: struct.Struct, values: list[Any]) -> int:
    """Where the driver finds the arguments of this thread's next launch."""
    arguments, nbytes, extra = _frame.parts
    layout.pack_into(arguments, 0, *values)
    nbytes.value = layout.size
    return extra


def _launch_of(name: str, shape: tuple[int, int, int, int, int, int], shared_nbytes: int) -> str:
    return f"launching {name} on grid {shape[:3]}, block {shape[3:]}, {shared_nbytes} bytes of dynamic shared memory"


def _failed(what: str, status: int) -> RuntimeError:
    return RuntimeError(f"{what}: {_driver().CUresult(status).name}")


def _as_signed(argument: Any) -> Any:
    """An argument as a signature made with `numba_type` has it: bfloat16 arrays as their bits."""
    if getattr(argument, "dtype", None) == BFLOAT16:
        return strided_view(argument, argument.shape, argument.strides, np.dtype(np.uint16))
    return argument


class LockKeepingStream:
    """A stream whose copies, launches (but those in clusters) and events keep the interpreter's lock.

    Where dozens of threads work beside each other, one that lets go of the lock for a call of a few microseconds waits
    50 for its return, and all others wait with it. So it is for calls that only enqueue, a few ahead; what makes them
    wait, as memory that another thread pins, makes all threads wait. Its thread must be attached to the GPU.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._driver = None if SIMULATOR else _lock_keeping_driver()
        self._handle = 0 if SIMULATOR else int(stream)

    def __int__(self) -> int:
        return self._handle

    def copy_to_device(self, source: np.ndarray, target: Any) -> None:
        """Copy ``source``, uint8[n] in pinned memory, n > 0, to the first n bytes of a device array."""
        if self._driver is None:
            target[: len(source)].copy_to_device(source)
            return
        place = source.ctypes.data
        status = self._driver.cuMemcpyHtoDAsync_v2(address(target), place, source.nbytes, self._handle)
        if status:
            raise _failed(f"copying {source.nbytes} bytes to the GPU", status)

    def launch(
        self,
        name: str,
        function: Any,
        layout: struct.Struct,
        values: list[Any],
        shape: tuple[int, int, int, int, int, int],
        shared_nbytes: int,
    ) -> None:
        """Launch a kernel by the driver's handle; ``values`` are the arguments as ``layout`` packs them."""
        assert self._driver is not None  # the simulator launches for itself
        extra = _packed(layout, values)
        status = self._driver.cuLaunchKernel(int(function), *shape, shared_nbytes, self._handle, None, extra)
        if status:
            raise _failed(_launch_of(name, shape, shared_nbytes), status)

    def record(self, event: Any) -> None:
        """Have a Numba event passed when all that was enqueued is done."""
        if self._driver is None:
            event.record(self._stream)
            return
        status = self._driver.cuEventRecord(int(event.handle), self._handle)
        if status:
            raise _failed("recording an event", status)

    def follow(self, event: Any) -> None:
        """Let what is enqueued from now on wait for a Numba event as it was last recorded."""
        if self._driver is None:
            event.wait(self._stream)
            return
        status = self._driver.cuStreamWaitEvent(self._handle, int(event.handle), 0)
        if status:
            raise _failed("waiting for an event", status)

    def wait(self, event: Any) -> None:
        """Wait on the host for a Numba event; one that has passed keeps the lock too."""
        if self._driver is None or self._driver.cuEventQuery(int(event.handle)):
            event.synchronize()


@functools.cache
def _lock_keeping_driver() -> ctypes.PyDLL:
    found = driver_library()
    assert found is not None  # there is a stream
    library = ctypes.PyDLL(found._name, handle=found._handle)
    place, number = ctypes.c_void_p, ctypes.c_uint
    library.cuMemcpyHtoDAsync_v2.argtypes = [place, place, ctypes.c_size_t, place]
    library.cuLaunchKernel.argtypes = [place, *[number] * 7, place, place, place]
    library.cuEventRecord.argtypes = [place, place]
    library.cuStreamWaitEvent.argtypes = [place, place, number]
    library.cuEventQuery.argtypes = [place]
    return library


class CUDATimer:
    """Times the device work enqueued on a stream inside a ``with`` block, by events.

    ``seconds`` waits for that work to finish. In the simulator, which has no device clock, it is host time.
    """

    def __init__(self, stream: Any = DEFAULT_STREAM) -> None:
        self._stream = stream
        self._start = cuda.event()
        self._stop = cuda.event()
        self._host_seconds = 0.0

    def __enter__(self) -> CUDATimer:
        self._host_seconds = -time.perf_counter()
        self._start.record(self._stream)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.record(self._stream)
        self._host_seconds += time.perf_counter()

    @property
    def seconds(self) -> float:
        if SIMULATOR:
            return self._host_seconds
        self._stop.synchronize()
        return float(cuda.event_elapsed_time(self._start, self._stop)) / 1e3
