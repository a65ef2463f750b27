"""What GPUs this process can use, and what each of them can do.

Everything comes from the CUDA driver and needs no context, so asking about eight GPUs neither takes memory
on them nor starts them. The one figure the driver gives only inside a context, free memory, comes from NVML;
where NVML is missing it is read through a context of Numba's own.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Device:
    """One GPU as the CUDA driver describes it. Sizes are in bytes and clock rates in kHz."""

    index: int
    """The number by which CUDA knows it in this process, after ``CUDA_VISIBLE_DEVICES``."""
    name: str
    uuid: str
    pci_bus: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_total: int
    memory_free: int | None
    """None where neither NVML nor a context of ours could tell."""
    max_threads_per_block: int
    max_block_dim: tuple[int, int, int]
    max_grid_dim: tuple[int, int, int]
    max_threads_per_multiprocessor: int
    warp_size: int
    shared_memory_per_block: int
    """What a kernel gets without asking."""
    shared_memory_per_block_optin: int
    """What a kernel gets when it asks (``cuFuncSetAttribute``)."""
    shared_memory_per_multiprocessor: int
    registers_per_block: int
    registers_per_multiprocessor: int
    l2_cache: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_bits: int
    peers: tuple[int, ...]
    """Indices of the GPUs whose memory this one can read and write directly, over NVLink or PCIe."""
    nvlinks: int | None
    """Active NVLink links; None where NVML cannot tell."""
    driver_cuda: tuple[int, int]
    """The newest CUDA version that the driver supports."""
    runtime_cuda: tuple[int, int] | None
    """The CUDA runtime library installed beside Python; None where there is none."""
    driver_version: str | None
    """The driver's own version, such as 580.159.04; None where NVML is missing."""

    @property
    def memory_bandwidth(self) -> float:
        """Peak bytes a second of device memory: two transfers per clock over the whole bus."""
        return 2 * self.memory_clock_rate * 1e3 * self.memory_bus_bits / 8

    def to_json(self) -> dict[str, object]:
        """The fields as JSON types (tuples become lists), in order of declaration."""
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()
        }


class _DriverRefused(Exception):
    """The driver answered a question with an error; the message names it."""


def _ask(function: Any, *arguments: Any) -> Any:
    """Call a ``cuda.bindings`` function, which returns (status, value), and return the value."""
    status, *values = function(*arguments)
    if int(status) != 0:
        raise _DriverRefused(getattr(status, "name", str(status)))
    return values[0] if len(values) == 1 else values or None


def _start_driver() -> tuple[Any, int]:
    """The driver's bindings and the number of GPUs it shows; raises whatever stands in the way."""
    from cuda.bindings import driver

    _ask(driver.cuInit, 0)
    return driver, int(_ask(driver.cuDeviceGetCount))


def why_no_gpu() -> str:
    """A plain sentence that says why no GPU can be used, or an empty string when one can."""
    try:
        _, count = _start_driver()
    except ImportError as error:
        return f"No GPU: the CUDA bindings are not installed ({error}). Install tilewright[cu13] or [cu12]."
    except _DriverRefused as error:
        if str(error) == "CUDA_ERROR_NO_DEVICE":
            return (
                "No GPU: the NVIDIA driver is installed but shows this process no device "
                "(is CUDA_VISIBLE_DEVICES set?)."
            )
        return f"No GPU: the NVIDIA driver answered {error}."
    except Exception:  # the loader's own class differs between releases of the bindings
        return "No GPU: the NVIDIA driver library (libcuda) is not on this machine."
    if count == 0:
        return "No GPU: the NVIDIA driver shows this process no device (is CUDA_VISIBLE_DEVICES set?)."
    return ""


def devices() -> list[Device]:
    """Every GPU this process can use, in CUDA's order; an empty list where there is none.

    A GPU that fails to answer is an error worth seeing, so only the absence of a driver or of devices is
    turned into an empty list; :func:`why_no_gpu` then says which it was.

    Examples
    --------
    >>> import tilewright as tw
    >>> [device.name for device in tw.devices()]  # doctest: +SKIP
    ['NVIDIA H100 80GB HBM3']
    """
    if why_no_gpu():
        return []
    driver, count = _start_driver()
    with _nvml() as nvml:
        return [_describe(driver, nvml, index, count) for index in range(count)]


def _describe(driver: Any, nvml: Any, index: int, count: int) -> Device:
    handle = _ask(driver.cuDeviceGet, index)

    def attribute(name: str) -> int:
        code = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_ask(driver.cuDeviceGetAttribute, code, handle))

    def three(name: str) -> tuple[int, int, int]:
        return attribute(f"{name}_X"), attribute(f"{name}_Y"), attribute(f"{name}_Z")

    uuid = "GPU-" + _dashed(bytes(_ask(driver.cuDeviceGetUuid, handle).bytes).hex())
    pci = f"{attribute('PCI_DOMAIN_ID'):08x}:{attribute('PCI_BUS_ID'):02x}:{attribute('PCI_DEVICE_ID'):02x}.0"
    board = _board(nvml, pci)
    free = board.memory_free
    if free is None:
        free = _free_through_context(index)
    return Device(
        index=index,
        name=_ask(driver.cuDeviceGetName, 256, handle).split(b"\0")[0].decode(),
        uuid=uuid,
        pci_bus=pci,
        compute_capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
        memory_total=int(_ask(driver.cuDeviceTotalMem, handle)),
        memory_free=free,
        max_threads_per_block=attribute("MAX_THREADS_PER_BLOCK"),
        max_block_dim=three("MAX_BLOCK_DIM"),
        max_grid_dim=three("MAX_GRID_DIM"),
        max_threads_per_multiprocessor=attribute("MAX_THREADS_PER_MULTIPROCESSOR"),
        warp_size=attribute("WARP_SIZE"),
        shared_memory_per_block=attribute("MAX_SHARED_MEMORY_PER_BLOCK"),
        shared_memory_per_block_optin=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_memory_per_multiprocessor=attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        registers_per_block=attribute("MAX_REGISTERS_PER_BLOCK"),
        registers_per_multiprocessor=attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        l2_cache=attribute("L2_CACHE_SIZE"),
        clock_rate=attribute("CLOCK_RATE"),
        memory_clock_rate=attribute("MEMORY_CLOCK_RATE"),
        memory_bus_bits=attribute("GLOBAL_MEMORY_BUS_WIDTH"),
        peers=tuple(
            other
            for other in range(count)
            if other != index and _ask(driver.cuDeviceCanAccessPeer, handle, _ask(driver.cuDeviceGet, other))
        ),
        nvlinks=board.nvlinks,
        driver_cuda=_version(int(_ask(driver.cuDriverGetVersion))),
        runtime_cuda=_runtime_version(),
        driver_version=board.driver_version,
    )


@dataclass(frozen=True)
class _Board:
    """What only NVML knows of a GPU; all None where NVML is missing."""

    memory_free: int | None = None
    nvlinks: int | None = None
    driver_version: str | None = None


@contextlib.contextmanager
def _nvml() -> Any:
    """The initialised ``pynvml`` module for the block's length, or None where it cannot be used."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, no library, or no permission: its figures are then simply unknown
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _board(nvml: Any, pci: str) -> _Board:
    # NVML numbers the machine's GPUs, CUDA the process's: the PCI address is the name they share.
    if nvml is None:
        return _Board()
    try:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(pci.encode())
        free = int(nvml.nvmlDeviceGetMemoryInfo(handle).free)
        version = nvml.nvmlSystemGetDriverVersion()
    except nvml.NVMLError:
        return _Board()
    links = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            links += int(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except nvml.NVMLError:
            break  # the GPU has no link of this number, or none at all
    return _Board(free, links, version.decode() if isinstance(version, bytes) else version)


def _free_through_context(index: int) -> int | None:
    """Bytes free on a GPU, through a context of Numba's (which the kernels need anyway)."""
    try:
        from numba import cuda

        with cuda.gpus[index]:
            return int(cuda.current_context().get_memory_info().free)
    except Exception:  # the simulator, or a GPU that another process holds exclusively
        return None


def _runtime_version() -> tuple[int, int] | None:
    try:
        from cuda.bindings import runtime

        return _version(int(_ask(runtime.getLocalRuntimeVersion)))
    except Exception:  # no cudart beside Python: Numba does without it
        return None


def _version(packed: int) -> tuple[int, int]:
    return packed // 1000, packed % 1000 // 10


def _dashed(digits: str) -> str:
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
