"""Out of memory: one error of ours, for a GPU's memory and for the host's.

Numba raises CudaAPIError, cuda.core CUDAError, our own calls of the driver DriverError, RAPIDS' memory manager, NumPy
and Python MemoryError, numcodecs RuntimeError with libzstd's words; none of them says how much was free.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilewright.kernels.errors import DeviceMemoryError
from tilewright.kernels.gpu.driver_error import OUT_OF_MEMORY, DriverError
from tilewright.kernels.numbers import format_nbytes
from tilewright.kernels.words import in_one_line

ZSTD_OUT_OF_MEMORY = "Allocation error : not enough memory"
"""libzstd's words for it (``ZSTD_getErrorName``)."""
RMM_OUT_OF_MEMORY = "out_of_memory"
"""In the words of RAPIDS' memory manager (``rmm::out_of_memory``), which raises MemoryError for a GPU's memory."""
PINNING = "cuMemHost"
"""Begins the names of the driver's calls for pinned memory, which is the host's."""
NO_THREAD = "can't start new thread"
"""Python's words for it, and for too many threads."""

_BY_DRIVER = "CudaAPIError", "CUDAError"
"""Names of errors: neither class can be imported where there is no GPU, nor where a release moves it."""
ADDRESS_LIMIT = "(ulimit -v)"
"""In the message of an error: a limit on addresses kept the process from memory that was free."""


@contextmanager
def allocating(what: str, nbytes: int | None = None, *, on_gpu: bool) -> Iterator[None]:
    """If the block fails to get memory, say what the memory was for.

    what: begins the message ("a tile of C"). nbytes: what the block asks for; None where only the library that asks
    knows. on_gpu: whether the block asks for a GPU's memory, not the host's.

    Raises DeviceMemoryError from such a failure; every other error passes as it is.
    """
    try:
        yield
    except DeviceMemoryError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(_message(what, nbytes, error, on_gpu)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the host."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, RuntimeError) and ZSTD_OUT_OF_MEMORY in str(error):
        return True
    if isinstance(error, RuntimeError) and NO_THREAD in str(error):
        return allowed_nbytes() is not None  # a thread's stack has no room
    if isinstance(error, DriverError):
        return error.code == OUT_OF_MEMORY
    if type(error).__name__ not in _BY_DRIVER:
        return False
    code = getattr(error, "code", None)
    if code is not None and str(code).isdigit():
        return int(code) == OUT_OF_MEMORY
    return "CUDA_ERROR_OUT_OF_MEMORY" in str(error)


def memory_that_ran_out(error: BaseException) -> str:
    """Whose memory an error says ran out (`is_out_of_memory`), "GPU" or "host", and in brackets its own words."""
    words = in_one_line(str(error))
    by_driver = isinstance(error, DriverError) or type(error).__name__ in _BY_DRIVER
    on_gpu = PINNING not in words if by_driver else RMM_OUT_OF_MEMORY in words
    return f"{'GPU' if on_gpu else 'host'} ({words or type(error).__name__})"


def is_address_limit(error: BaseException) -> bool:
    """Whether an error says that memory ran out because of a limit on addresses, in this process or a worker's: it asks
    to raise that, and neither a smaller piece of work nor more memory helps."""
    return ADDRESS_LIMIT in str(error)


def free_nbytes(*, on_gpu: bool) -> int | None:
    """Bytes that the current GPU, or the host, has left; None where that is not known."""
    try:
        if on_gpu:
            from numba import cuda

            return int(cuda.current_context().get_memory_info().free)
        with open("/proc/meminfo", encoding="ascii") as file:
            found = next(line for line in file if line.startswith("MemAvailable:"))
        return int(found.split()[1]) * 1024
    except Exception:
        # A memory manager that does not count, or a GPU that no longer answers: the error being reported comes first.
        return None


def allowed_nbytes() -> int | None:
    """How much memory this process may map, in bytes, used or not (``ulimit -v``); None where there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _used_addresses() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):  # not on Linux
        return 0
    return pages * resource.getpagesize()


def peak_nbytes() -> int:
    """The most resident memory that this process has held, in bytes.

    It is here, and not beside its caller, since a process that is asked imports the whole module of the function.
    """
    status = Path("/proc/self/status")
    if status.exists():  # getrusage's figure starts at the parent's, which a worker does not hold
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS


def _message(what: str, nbytes: int | None, error: BaseException, on_gpu: bool) -> str:
    place = "GPU" if on_gpu else "host"
    asked = f"{what} needs {format_nbytes(nbytes)} of {place} memory" if nbytes is not None else None
    free = free_nbytes(on_gpu=on_gpu)
    left = f"{format_nbytes(free)} are free" if free is not None else "how much is free cannot be told"
    if not on_gpu and (allowed := allowed_nbytes()) is not None:
        unused = max(0, allowed - _used_addresses())
        if free is None or unused < free:
            left += (
                f", but this process may use {format_nbytes(allowed)} of addresses {ADDRESS_LIMIT}, and has"
            )
            left += f" {format_nbytes(unused)} of those left: raise that limit"
    cause = in_one_line(str(error)) or type(error).__name__
    return f"{asked or f'{what} ran out of {place} memory'} and {left} ({cause})"
