"""CUB's histogram, compiled by nvcc where that is installed: the fastest published one, and so the peer."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SOURCE = """
#include <cstdint>
#include <cub/device/device_histogram.cuh>

// counts: 256 unsigned integers in device memory. Called first with workspace = nullptr, it returns the bytes of
// workspace that it needs in *nbytes. The result is a cudaError_t.
extern "C" int byte_histogram(void *workspace, size_t *nbytes, const uint8_t *data, unsigned *counts,
                              int64_t length, cudaStream_t stream) {
    return cub::DeviceHistogram::HistogramEven(workspace, *nbytes, data, counts, 257, 0, 256, length, stream);
}
"""
COMPILE_SECONDS = 120


@functools.cache
def _library(capability: tuple[int, int]) -> Any:
    """The compiled function, or None where there is no nvcc or it fails (an nvcc without CUB, say)."""
    if shutil.which("nvcc") is None:
        return None
    with tempfile.TemporaryDirectory(prefix="tilewright-cub-") as folder:
        source, target = Path(folder) / "cub.cu", Path(folder) / "cub.so"
        source.write_text(SOURCE)
        architecture = f"-arch=sm_{capability[0]}{capability[1]}"
        command = [
            "nvcc",
            "-O3",
            architecture,
            "-shared",
            "-Xcompiler",
            "-fPIC",
            str(source),
            "-o",
            str(target),
        ]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
            function = ctypes.CDLL(str(target)).byte_histogram  # the file may go once it is loaded
        except (subprocess.SubprocessError, OSError):
            return None
    function.restype = ctypes.c_int
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    return function


def byte_histogram(data: Any, capability: tuple[int, int]) -> tuple[Callable[[], None], Any] | None:
    """A function that counts the bytes of a device array on the default stream, and the device array of 256
    uint32 counts it writes; None where CUB cannot be had.
    """
    from numba import cuda

    from tilewright.kernels.device_array import address

    function = _library(capability)
    if function is None:
        return None
    counts = cuda.device_array(256, np.uint32)
    nbytes = ctypes.c_size_t()

    def call(workspace: int | None) -> None:
        status = function(workspace, ctypes.byref(nbytes), address(data), address(counts), data.size, None)
        if status:
            raise RuntimeError(f"CUB's histogram failed with CUDA error {status}")

    call(None)
    workspace = cuda.device_array(max(1, nbytes.value), np.uint8)
    return functools.partial(call, address(workspace)), _Kept(counts, workspace)


class _Kept:
    """The counts, and the workspace that must live as long as they do."""

    def __init__(self, counts: Any, workspace: Any) -> None:
        self.counts = counts
        self.workspace = workspace

    def copy_to_host(self) -> np.ndarray:
        return np.asarray(self.counts.copy_to_host())
