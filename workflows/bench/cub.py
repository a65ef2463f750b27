"""CUB's histograms and dot products, compiled by nvcc where that is installed: the fastest published, and so peers."""

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

# Of each function: called first with workspace = nullptr, it returns the bytes of workspace that it needs in *nbytes.
# The result is a cudaError_t.
HISTOGRAM = """
#include <cstdint>
#include <cub/device/device_histogram.cuh>

// counts: 256 unsigned integers in device memory.
extern "C" int peer(void *workspace, size_t *nbytes, const uint8_t *data, const uint8_t *, unsigned *counts,
                    int64_t length, cudaStream_t stream) {
    return cub::DeviceHistogram::HistogramEven(workspace, *nbytes, data, counts, 257, 0, 256, length, stream);
}
"""
FOUR_CHANNELS = """
#include <cstdint>
#include <cub/device/device_histogram.cuh>

// Every fourth byte is counted by itself, as in pixels of four channels. counts: 4 x 256; length: a multiple of 4.
extern "C" int peer(void *workspace, size_t *nbytes, const uint8_t *data, const uint8_t *, unsigned *counts,
                    int64_t length, cudaStream_t stream) {
    cuda::std::array<unsigned *, 4> rows{counts, counts + 256, counts + 512, counts + 768};
    cuda::std::array<int, 4> levels{257, 257, 257, 257}, lower{0, 0, 0, 0}, upper{256, 256, 256, 256};
    return cub::DeviceHistogram::MultiHistogramEven<4, 4>(
        workspace, *nbytes, data, rows, levels, lower, upper, length / 4, stream);
}
"""
DOT = """
#include <cstdint>
#include <cub/device/device_reduce.cuh>
#include <cuda/std/complex>
#include <cuda/std/functional>
#include <cuda_fp16.h>
#include <thrust/iterator/counting_iterator.h>

struct Product {
    const ELEMENT *x, *y;
    __device__ SUM operator()(int64_t i) const {
#ifdef CONJUGATE
        const ELEMENT a = x[i], b = y[i];
        return {a.real() * b.real() + a.imag() * b.imag(), a.real() * b.imag() - a.imag() * b.real()};
#else
        return SUM(x[i]) * SUM(y[i]);
#endif
    }
};

extern "C" int peer(void *workspace, size_t *nbytes, const ELEMENT *x, const ELEMENT *y, SUM *result, int64_t length,
                    cudaStream_t stream) {
    return cub::DeviceReduce::TransformReduce(workspace, *nbytes, thrust::counting_iterator<int64_t>(0), result, length,
                                              cuda::std::plus<>{}, Product{x, y}, SUM{}, stream);
}
"""
COMPILE_SECONDS = 120
DOT_TYPES = {
    "float16": ("__half", "float", np.float32),
    "float32": ("float", "float", np.float32),
    "float64": ("double", "double", np.float64),
    "int8": ("int8_t", "uint32_t", np.uint32),
    "int32": ("uint32_t", "uint32_t", np.uint32),
    "int64": ("uint64_t", "uint64_t", np.uint64),
    "complex64": ("cuda::std::complex<float>", "cuda::std::complex<float>", np.complex64),
    "complex128": ("cuda::std::complex<double>", "cuda::std::complex<double>", np.complex128),
}
"""By dtype: the types of elements and of sums in C++, and of sums in NumPy. Unsigned sums wrap."""

Ready = tuple[Callable[[], None], Any]
"""A function that does the work on the default stream, and what holds its answer, with ``copy_to_host``."""


@functools.cache
def _library(source: str, capability: tuple[int, int], definitions: tuple[str, ...] = ()) -> Any:
    """The compiled function ``peer``, or None where there is no nvcc or it fails (an nvcc without CUB, say)."""
    if shutil.which("nvcc") is None:
        return None
    with tempfile.TemporaryDirectory(prefix="tilewright-cub-") as folder:
        code, target = Path(folder) / "cub.cu", Path(folder) / "cub.so"
        code.write_text(source)
        architecture = f"-arch=sm_{capability[0]}{capability[1]}"
        options = ["-O3", architecture, "-shared", "-Xcompiler", "-fPIC", *definitions]
        try:
            subprocess.run(
                ["nvcc", *options, str(code), "-o", str(target)],
                check=True,
                capture_output=True,
                timeout=COMPILE_SECONDS,
            )
            function = ctypes.CDLL(str(target)).peer  # the file may go once it is loaded
        except (subprocess.SubprocessError, OSError):
            return None
    function.restype = ctypes.c_int
    pointer = ctypes.c_void_p
    sized = ctypes.POINTER(ctypes.c_size_t)
    function.argtypes = [pointer, sized, pointer, pointer, pointer, ctypes.c_int64, pointer]
    return function


def byte_histograms(data: Any, capability: tuple[int, int]) -> dict[str, Ready]:
    """The ways that CUB has to count the bytes of a device array, by name; empty where it cannot be had."""
    found = {}
    function = _library(HISTOGRAM, capability)
    if function is not None:
        found["CUB HistogramEven"] = _ready(function, data, data, (1, 256), np.uint32, _added)
    function = _library(FOUR_CHANNELS, capability) if data.size % 4 == 0 else None
    if function is not None:
        # The four histograms are added on the host, which the peer is given for free.
        found["CUB MultiHistogramEven, 4 channels"] = _ready(
            function, data, data, (4, 256), np.uint32, _added
        )
    return found


def dot_product(x: Any, y: Any, capability: tuple[int, int]) -> Ready | None:
    """CUB's reduction of the products of two device arrays (x conjugated); None where it cannot be had."""
    if str(x.dtype) not in DOT_TYPES:
        return None
    element, total, kind = DOT_TYPES[str(x.dtype)]
    conjugate = ("-DCONJUGATE",) if x.dtype.kind == "c" else ()
    function = _library(DOT, capability, (f"-DELEMENT={element}", f"-DSUM={total}", *conjugate))
    if function is None:
        return None
    return _ready(function, x, y, (1,), kind, lambda found: found[0].astype(x.dtype))


def _added(counts: np.ndarray) -> np.ndarray:
    return np.asarray(counts.sum(axis=0))


def _ready(
    function: Any,
    x: Any,
    y: Any,
    shape: tuple[int, ...],
    kind: Any,
    finish: Callable[[np.ndarray], Any],
) -> Ready:
    from numba import cuda

    from tilewright.kernels.gpu.device_array import address

    result = cuda.device_array(shape, kind)
    nbytes = ctypes.c_size_t()

    def call(workspace: int | None) -> None:
        status = function(
            workspace, ctypes.byref(nbytes), address(x), address(y), address(result), x.size, None
        )
        if status:
            raise RuntimeError(f"CUB failed with CUDA error {status}")

    call(None)
    workspace = cuda.device_array(max(1, nbytes.value), np.uint8)
    return functools.partial(call, address(workspace)), _Kept(result, workspace, finish)


class _Kept:
    """The answer, and the workspace that must live as long as it does."""

    def __init__(self, result: Any, workspace: Any, finish: Callable[[np.ndarray], Any]) -> None:
        self.result = result
        self.workspace = workspace
        self._finish = finish

    def copy_to_host(self) -> Any:
        return self._finish(self.result.copy_to_host())
