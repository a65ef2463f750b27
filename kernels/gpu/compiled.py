"""From a kernel's function to what the driver launches: compiled once for a compute capability, and kept on disk.

Numba turns the function into LLVM's language, one kernel at a time; NVIDIA's libraries turn that into machine code,
which takes as long, but on several threads (`compile_together`). Machine code that came with the installation
(`tilewright.kernels.shipped`), or was kept on disk (`tilewright.kernels.gpu.code_cache`), is loaded as it is, without
Numba.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from tilewright.kernels.deferred import cuda, numba
from tilewright.kernels.gpu import code_cache
from tilewright.kernels.gpu.code_cache import MachineCode
from tilewright.kernels.gpu.driver_error import DriverError, checked
from tilewright.kernels.gpu.memory import is_out_of_memory
from tilewright.kernels.shipped import lacking, packs
from tilewright.kernels.shipped.described import described, gpus

COMPILING_THREADS = 8
"""The most kernels whose machine code is made at once."""
SPECIFIC = (9, 0)
"""From this compute capability on, code is for one architecture alone (sm_90a), as some instructions need."""

LEAST_LINKER = (12, 3)
"""The oldest nvJitLink that takes Numba's code before it is optimized."""
DEFAULT_SHARED_NBYTES = 48 * 1024
"""Shared memory that a block may have without opting in."""

Capability = tuple[int, int]

logger = logging.getLogger(__name__)


_array_operations = threading.Lock()
_target = threading.local()
"""``capability``: what this thread compiles for."""


def import_array_operations() -> None:
    """Import numba-cuda's module of array operations, as its first compilation would.

    numba-cuda 0.30 looks up ``numpy.row_stack`` there, which NumPy 2.5 removed; NumPy has it again until the module is
    imported, and not any longer, so that no other library takes it for an older NumPy. Any thread may call this.
    """
    module, missing = "numba.cuda.np.arrayobj", "row_stack"
    with _array_operations:
        if hasattr(np, missing):
            return
        setattr(np, missing, lambda arrays: np.vstack(arrays))
        try:
            importlib.import_module(module)
        finally:
            delattr(np, missing)


@functools.cache
def _ask_for_target() -> None:
    """Have Numba compile what a kernel calls for the capability that the kernel is compiled for.

    numba-cuda 0.30 takes that of the current GPU, which may be another or none. Whatever this package does not compile
    goes by that still.
    """
    dispatcher = importlib.import_module("numba.cuda.dispatcher")
    current = dispatcher.get_current_device

    def device() -> Any:
        capability = getattr(_target, "capability", None)
        return current() if capability is None else SimpleNamespace(compute_capability=capability)

    dispatcher.get_current_device = device  # type: ignore[attr-defined]


@contextmanager
def compiling_for(capability: Capability) -> Iterator[None]:
    """While this thread compiles a kernel: what it calls is compiled for the same capability, be there a GPU or not."""
    _ask_for_target()
    _target.capability = capability
    try:
        yield
    finally:
        del _target.capability


def device_function(function: Callable[..., Any]) -> Any:
    """A function for kernels and for other such functions, put in the place of its calls by NVIDIA's compiler.

    Numba's own ``inline="always"`` copies a function's statements into its caller, block by block and each with all of
    the function's names, so that its time grows with the square of a function's length: a kernel of some hundred lines
    that calls others several levels deep took 26 s to compile, and takes 2 this way (docs/experiments.md). Numba then
    compiles each function once. What comes out is the same where no argument has to be known to Numba as a constant.
    """
    from numba.core import config

    options = {} if config.ENABLE_CUDASIM else {"forceinline": True}
    return cuda.jit(device=True, **options)(function)


def argument_layout(arguments: Iterable[Any]) -> struct.Struct:
    """How Numba passes arguments of these types to a kernel, as `struct` writes it."""
    return struct.Struct("".join(_code(argument) for argument in arguments))


def _code(argument: Any) -> str:
    if isinstance(argument, numba.types.Array):
        # Two pointers that kernels never use, items, bytes of an item, address, sides, strides in bytes.
        return "QQqqQ" + 2 * argument.ndim * "q"
    if isinstance(argument, numba.types.Integer):
        code = {8: "b", 16: "h", 32: "i", 64: "q"}[argument.bitwidth]
        return code if argument.signed else code.upper()
    return {numba.types.boolean: "?", numba.types.float32: "f", numba.types.float64: "d"}[argument]


class CompiledKernel:
    """A kernel of one signature, compiled for a GPU when it is first asked for there; any thread may ask."""

    def __init__(
        self, function: Any, signature: Any, launch_bounds: tuple[int, int] | None, shared_nbytes: int
    ) -> None:
        self.py_func = function
        self.signature = signature
        self.launch_bounds = launch_bounds
        self.layout = argument_layout(signature.args)
        """How a launch packs the arguments."""
        self._shared_nbytes = shared_nbytes
        self._lock = threading.Lock()
        self._codes: dict[Capability, MachineCode] = {}
        self._sources: dict[Capability, Iterator[MachineCode]] = {}
        self._libraries: dict[Capability, Any] = {}
        self._functions: dict[int, Any] = {}

    def machine_code(self, capability: Capability) -> MachineCode:
        """The code for GPUs of a compute capability: this process's, else what came with the installation, else what
        was kept on disk, else compiled."""
        with self._lock:
            return self._code(capability)

    def function(self, device: int) -> Any:
        """The driver's handle for launches on GPU ``device``, a ``CUfunction``."""
        found = self._functions.get(device)
        if found is None:
            with self._lock:
                found = self._functions.get(device) or self._load(device)
        return found

    def _allow_shared(self, function: Any, device: int) -> None:
        """Let launches on a GPU have the kernel's dynamic shared memory; beyond 48 KiB the driver must be asked.

        The device's limit is ``MAX_SHARED_MEMORY_PER_BLOCK_OPTIN``.
        """
        from cuda.bindings import driver

        nbytes = self._shared_nbytes
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        kernel, number = driver.CUkernel(int(function)), driver.CUdevice(device)
        allowed = driver.cuKernelSetAttribute(attribute, nbytes, kernel, number)
        checked(f"{self.py_func.__name__}: {nbytes} bytes of shared memory", allowed)

    def _key(self, capability: Capability) -> str | None:
        """The name of the code on disk; None where it is not to be kept."""
        from tilewright.kernels.gpu import fingerprint

        if code_cache.directory() is None:
            return None
        told = (str(self.signature), self.launch_bounds, capability, fingerprint.surroundings())
        try:
            return fingerprint.fingerprint(self.py_func, *told)
        except fingerprint.Unknown:  # a user's own kernel, over objects that cannot be fingerprinted
            return None

    def shipped_key(self) -> str | None:
        """What the code is shipped under; None where it depends on more than this package's source says."""
        from tilewright.kernels.gpu import fingerprint

        try:
            return fingerprint.by_source(self.py_func, str(self.signature), self.launch_bounds)
        except fingerprint.Unknown:  # a user's own kernel, or one of a test
            return None

    def _shipped(self, capability: Capability) -> MachineCode | None:
        """The code that came with the installation, if it was made from what the kernel is in this process."""
        pack = packs.usable(capability)
        key = None if pack is None else self.shipped_key()
        return None if pack is None or key is None else packs.load(pack, key, self.layout.format)

    def _in_turn(self, capability: Capability) -> Iterator[MachineCode]:
        """The code from each place that has it, the quickest first; the last is compiled."""
        if (shipped := self._shipped(capability)) is not None:
            yield shipped
        key = self._key(capability)
        if key is not None and (kept := code_cache.load(key)) is not None:
            yield kept
        began = time.perf_counter()
        made = compile_function(self.py_func, self.signature, capability, self.launch_bounds)
        seconds, pack = time.perf_counter() - began, packs.usable(capability)
        name = self.py_func.__name__
        lacking.add(lacking.Compilation(name, seconds, None if pack is None else pack.path))
        logger.debug("compiled %s %s in %.2f s", name, self.signature, seconds)
        if key is not None:
            code_cache.store(key, made)
        yield made

    def _next_code(self, capability: Capability) -> MachineCode | None:
        """The code from the first place, or else from the next; None after the last."""
        sources = self._sources.setdefault(capability, self._in_turn(capability))
        try:
            code = next(sources, None)
        except BaseException:  # it has ended with the error, and begins anew for the next who asks
            del self._sources[capability]
            raise
        if code is not None:
            self._codes[capability] = code
        return code

    def _code(self, capability: Capability) -> MachineCode:
        if capability not in self._codes:
            self._next_code(capability)
        return self._codes[capability]

    def _load(self, device: int) -> Any:
        if (gpu := described()) is not None:  # its number stands for it: nothing is launched
            gpu.kernels.append(self)
            return self._functions.setdefault(device, 0)
        from cuda.bindings import driver

        capability = device_capability(device)
        while capability not in self._libraries:
            try:
                self._libraries[capability] = _loaded(self._code(capability))
            except DriverError as error:
                # The code is whole, but this driver refuses it. If it refuses what was compiled here, the error stands.
                if is_out_of_memory(error) or self._next_code(capability) is None:
                    raise
        _, kernel = self._libraries[capability]
        function = driver.CUfunction(int(kernel))  # launches take a CUkernel too, in the caller's context
        if self._shared_nbytes > DEFAULT_SHARED_NBYTES:
            self._allow_shared(function, device)
        self._functions[device] = function
        return function


def _loaded(code: MachineCode) -> tuple[Any, Any]:
    """The driver's library of a kernel, which belongs to no context, and the kernel in it; DriverError if refused."""
    from cuda.bindings import driver

    loaded = driver.cuLibraryLoadData(code.cubin, [], [], 0, [], [], 0)
    library = checked(f"loading the machine code of {code.entry}", loaded)
    found = driver.cuLibraryGetKernel(library, code.entry.encode())
    return library, checked(f"finding {code.entry} in its machine code", found)


@functools.cache
def device_capability(device: int) -> Capability:
    major, minor = gpus()[device].compute_capability
    return int(major), int(minor)


@functools.cache
def multiprocessors(device: int) -> int:
    return int(gpus()[device].MULTIPROCESSOR_COUNT)


@functools.cache
def shared_limit(device: int) -> int:
    """The most shared memory that a block may have, having opted in; bytes."""
    return int(gpus()[device].MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)


def compile_function(
    function: Any, signature: Any, capability: Capability, launch_bounds: tuple[int, int] | None
) -> MachineCode:
    """Machine code of a kernel's function, as ``numba.cuda.jit(signature, launch_bounds=...)`` makes it.

    Needs no GPU. Numba holds its lock until the code is one for the linker, which then runs beside other kernels'.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode

    import_array_operations()
    target = (*capability, "a" if capability >= SPECIFIC else "")
    # With information for debuggers the code must come as PTX, which the linker does not optimize.
    optimized = _can_optimize_at_link() and not numba.config.CUDA_DEBUGINFO_DEFAULT
    with compiling_for(capability):
        made, _ = cuda.compile_all(
            function,
            signature,
            device=False,
            abi="numba",
            cc=target,
            output="ltoir" if optimized else "ptx",
            launch_bounds=launch_bounds,
        )
    wrapped = [
        ObjectCode.from_ltoir(code) if optimized else ObjectCode.from_ptx(code.encode()) for code in made
    ]
    arch = "sm_{}{}{}".format(*target)
    options = LinkerOptions(arch=arch, link_time_optimization=True if optimized else None)
    cubin = bytes(Linker(*wrapped, options=options).link("cubin").code)
    return MachineCode(_entry(cubin), cubin)


def _can_optimize_at_link() -> bool:
    from cuda.bindings import nvjitlink

    try:
        return bool(nvjitlink.version() >= LEAST_LINKER)
    except RuntimeError:  # it is not installed: the driver links
        return False


def _entry(cubin: bytes) -> str:
    """The kernel's name in its machine code: of its functions only a kernel has a bank of constants, its arguments."""
    (name,) = set(re.findall(rb"\.nv\.constant0\.(\w+)", cubin))
    return str(name.decode())


def compile_kernel(
    function: Any, signature: Any, *, launch_bounds: tuple[int, int] | None = None, shared_nbytes: int = 0
) -> Any:
    """A kernel of one signature for `tilewright.kernels.gpu.launch.enqueue`, compiled at its first launch on a GPU.

    shared_nbytes: the most dynamic shared memory of its launches; it may be left out up to 48 KiB. In the simulator
    this is Numba's own kernel.
    """
    from numba.core import config

    if config.ENABLE_CUDASIM:
        return cuda.jit(signature)(function)
    return CompiledKernel(function, signature, launch_bounds, shared_nbytes)


def compile_together(kernels: Iterable[Any], capability: Capability) -> None:
    """Get the machine code of several kernels ready, compiling what is missing on several threads."""
    missing = [kernel for kernel in kernels if capability not in kernel._codes]
    if (gpu := described()) is not None:
        gpu.kernels += missing
        return
    if not missing:
        return
    threads = min(len(missing), COMPILING_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
        list(pool.map(lambda kernel: kernel.machine_code(capability), missing))
