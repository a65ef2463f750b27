"""A fake GPU: what a launch hands to the driver is recorded, so that the code up to there runs anywhere."""

from __future__ import annotations

import ctypes
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from tilewright.kernels.gemm import product, scratch
from tilewright.kernels.gemm.cores import skinny_launch, warp_tiled_launch
from tilewright.kernels.gemm.exact import exact_integer
from tilewright.kernels.gemm.hopper import float_operand, half_tensor_core, split_float, wgmma_launch
from tilewright.kernels.gemm.tensor import double_mma_launch, double_tensor_core, mma, mma_launch
from tilewright.kernels.gpu import compiled, device_array, device_choice, driver_launch, launch

SCRATCH = 0x600000000000
MAPS = 0x500000000000
"""Where tensor maps lie."""
PROCESSORS = 132


class Launched(NamedTuple):
    """One call of the driver's."""

    kernel: str
    shape: tuple[int, ...]
    shared_nbytes: int
    stream: int
    values: tuple[Any, ...]
    """In place of a tensor map's address what it tells of: planes and boxes."""
    cluster: int = 1


class Array:
    """An array of another library, on the GPU that is not there; ``reads`` counts how often it was asked."""

    def __init__(
        self,
        pointer: int,
        shape: tuple[int, ...],
        dtype: str,
        strides: tuple[int, ...] | None = None,
        read_only: bool = False,
    ) -> None:
        self.reads = 0
        self._told = {
            "shape": shape,
            "typestr": np.dtype(dtype).str,
            "data": (pointer, read_only),
            "strides": strides,
            "version": 3,
        }

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self.reads += 1
        return self._told


class FakeGPU:
    """Launches in their order; every kernel's handle is itself."""

    def __init__(self, seconds: float) -> None:
        self.launched: list[Launched] = []
        self.maps: dict[int, Any] = {}
        """What tensor maps tell, by their addresses."""
        self.store = wgmma_launch.MapStore(MAPS, self._write_map, lambda: None)
        self._seconds = seconds

    def _write_map(self, place: int, planes: Any, box: tuple[int, int]) -> None:
        self.maps[place] = planes, box

    def cuLaunchKernel(self, kernel: Any, *rest: Any) -> tuple[int]:
        *shape, shared_nbytes, stream, _, extra = rest
        return self._launch(kernel, tuple(shape), shared_nbytes, stream, extra, 1)

    def cuLaunchKernelEx(self, config: Any, kernel: Any, _: Any, extra: Any) -> tuple[int]:
        *shape, shared_nbytes, stream, cluster = config
        return self._launch(kernel, tuple(shape), shared_nbytes, stream, extra, cluster)

    def _launch(
        self,
        kernel: Any,
        shape: tuple[int, ...],
        shared_nbytes: int,
        stream: int,
        extra: Any,
        cluster: int,
    ) -> tuple[int]:
        allowed = max(compiled.DEFAULT_SHARED_NBYTES, kernel._shared_nbytes)
        assert shared_nbytes <= allowed, f"{kernel.py_func.__name__} was compiled for fewer bytes"
        if self._seconds:
            time.sleep(self._seconds)  # other threads run, as they do while the driver works
        told = ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p))
        arguments, nbytes = told[1], ctypes.c_size_t.from_address(told[3] or 0).value
        values = kernel.layout.unpack(ctypes.string_at(arguments or 0, nbytes))
        if self.maps:
            values = tuple(self.maps.get(value, value) for value in values)
        self.launched.append(
            Launched(kernel.py_func.__name__, shape, shared_nbytes, stream, tuple(values), cluster)
        )
        return (0,)

    def take(self) -> list[Launched]:
        found, self.launched = self.launched, []
        return found


def install(
    monkeypatch: pytest.MonkeyPatch, *, seconds: float = 0.0, capability: tuple[int, int] = (9, 0)
) -> FakeGPU:
    """One GPU, of Hopper's capability, in place of whatever is there; a launch takes it so many seconds."""
    fake = FakeGPU(seconds)
    driver = SimpleNamespace(
        cuLaunchKernel=fake.cuLaunchKernel,
        cuLaunchKernelEx=fake.cuLaunchKernelEx,
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
    )
    monkeypatch.setattr(driver_launch, "_cluster_config", lambda *told: told)
    monkeypatch.setattr(wgmma_launch, "_map_store", lambda device: fake.store)
    monkeypatch.setattr(exact_integer, "_compile_wide", lambda *told: None)
    monkeypatch.setattr(driver_launch, "driver_bindings", lambda: driver)
    monkeypatch.setattr(launch, "_prepared", lambda kernel, device: (kernel, kernel.layout))
    for module in (device_choice, device_array):
        monkeypatch.setattr(module, "device_count", lambda: 1)
    monkeypatch.setattr(device_choice, "capability", lambda device: capability)
    for module in (skinny_launch, double_mma_launch):
        monkeypatch.setattr(module, "capability", lambda device: capability)
    monkeypatch.setattr(mma_launch, "_tile", lambda device: mma.SMALL_SHARED)
    hopper = (float_operand, half_tensor_core, split_float, wgmma_launch, exact_integer)
    for module in (skinny_launch, double_tensor_core, warp_tiled_launch, *hopper):
        if hasattr(module, "multiprocessors"):
            monkeypatch.setattr(module, "multiprocessors", lambda device: PROCESSORS)
    monkeypatch.setattr(compiled, "device_capability", lambda device: capability)
    monkeypatch.setattr(device_choice, "model", lambda device: None)  # so that nothing was measured
    # Scratch memory is borrowed for a recording as ever, else it lies at one place.
    borrowed = scratch.borrowed

    def at_one_place(nbytes: int, stream: Any) -> Any:
        return borrowed(nbytes, stream) if hasattr(stream, "plan") else nullcontext(SCRATCH)

    for module in (scratch, product, skinny_launch, warp_tiled_launch, double_tensor_core, *hopper):
        if hasattr(module, "borrowed"):
            monkeypatch.setattr(module, "borrowed", at_one_place)
    for decision in (product._recorded, product._decide):
        decision.cache_clear()
        monkeypatch.setattr(product, decision.__name__, decision.__wrapped__)
    return fake
