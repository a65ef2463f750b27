"""Which device computes: what ``auto | cuda | cpu`` means in this process, and the GPU that a thread works on.

The driver itself is asked whether there is a GPU at all, before anything of CUDA is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from typing import Any

from tilewright.kernels.arguments import check_choice
from tilewright.kernels.choices import DEVICES, DeviceKind
from tilewright.kernels.deferred import cuda
from tilewright.kernels.errors import DeviceUnavailableError, OptionError
from tilewright.kernels.gpu.compiled import device_capability
from tilewright.kernels.shipped.described import gpus

SIMULATOR = os.environ.get("NUMBA_ENABLE_CUDASIM", "0").strip() not in ("", "0")
"""Whether this process runs Numba's CUDA simulator (``NUMBA_ENABLE_CUDASIM=1``) in place of a GPU."""
DRIVER_LIBRARIES = tuple(
    os.path.join(folder, name)
    for folder in ("", "/usr/lib", "/usr/lib64")
    for name in ("libcuda.so.1", "libcuda.so")
)
"""Where Numba and CUDA's bindings look for the driver, on Linux."""
CUDA_ERROR_NO_DEVICE = 100
"""The driver's number for it (``CUresult``)."""


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

    Only a certain no counts as no: any other error of the driver is left to Numba, which reports it.
    """
    driver = driver_library()
    if driver is None:
        return False
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return bool(status != CUDA_ERROR_NO_DEVICE and (status or count.value))


@functools.cache
def start_driver() -> threading.Thread | None:
    """Have the driver make the first GPU's context, on a thread of its own, before anything of CUDA is imported: that
    takes 0.2 s, in which Python goes on. None where there is no driver. What fails here is told where it fails again.
    """
    if SIMULATOR or (driver := driver_library()) is None:
        return None

    def start() -> None:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        # Kept, as Numba keeps its own, until the process ends.
        _ = (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), 0)
            or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        )

    thread = threading.Thread(target=start, name="tilewright-start-driver", daemon=True)
    thread.start()
    return thread


def resolve_device(device: str, *, device_arrays: bool = False) -> DeviceKind:
    """The device, ``cuda`` or ``cpu``, that ``auto | cuda | cpu`` means here.

    ``device_arrays`` says that the operands already lie on a GPU, which only ``auto`` and ``cuda`` can serve.

    Raises OptionError for any other word, or for ``cpu`` with device arrays, and DeviceUnavailableError for
    ``cuda`` where no GPU can be used: never a silent fall-back.
    """
    device = check_choice("device", device, DEVICES)
    if device == "auto" and device_arrays:
        return "cuda"
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


def current_device() -> int:
    """The number of the GPU that this thread works on."""
    if device_count() == 1:
        return 0
    error, device = driver_bindings().cuCtxGetDevice()
    return int(cuda.get_current_device().id) if error else int(device)  # a thread without a context gets one


@functools.cache
def device_count() -> int:
    """GPUs that this process sees."""
    return 1 if SIMULATOR else len(gpus())


@functools.cache
def capability(index: int) -> tuple[int, int] | None:
    """Compute capability of GPU ``index``, (9, 0) for Hopper; None in the simulator."""
    return None if SIMULATOR else device_capability(index)


@functools.cache
def model(index: int) -> str | None:
    """What the driver calls GPU ``index``, "NVIDIA H100 80GB HBM3"; None in the simulator, and of one that is only
    described."""
    name = None if SIMULATOR else gpus()[index].name
    return name.decode() if isinstance(name, bytes) else name and str(name)


@functools.cache
def driver_bindings() -> Any:
    """CUDA's bindings of the driver, which a process without a GPU does not import."""
    from cuda.bindings import driver

    return driver
