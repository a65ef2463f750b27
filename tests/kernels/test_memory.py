"""A failure to get memory says what it was for, whichever library it comes from; everything else passes."""

from __future__ import annotations

import pickle
import re
import resource
from typing import Any

import numpy as np
import pytest
import tblib.pickling_support
from numba.cuda.cudadrv.driver import CudaAPIError

from tilewright.kernels import memory
from tilewright.kernels.driver_error import DriverError, driver_error
from tilewright.kernels.errors import DeviceMemoryError, TilewrightError
from tilewright.kernels.gemm import scratch
from tilewright.kernels.memory import allocating, is_out_of_memory


class CUDAError(Exception):
    """As cuda.core calls its own."""


def cuda_error(code: int, name: str) -> CudaAPIError:
    """As Numba raises it, which knows the number and puts the name into words."""
    return CudaAPIError(code, f"Call to cuMemAlloc results in {name}")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        cuda_error(2, "CUDA_ERROR_OUT_OF_MEMORY"),
        CUDAError("CUDA_ERROR_OUT_OF_MEMORY: The API call failed"),
        driver_error("launching a kernel", 2),
        np._core._exceptions._ArrayMemoryError((10**6,), np.dtype("f8")),  # type: ignore[attr-defined]
        RuntimeError("Zstd decompression error: b'Allocation error : not enough memory'"),
    ],
)
def test_what_was_asked_for_and_what_is_free(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_nbytes", lambda *, on_gpu: 3 * 2**20)
    with (
        pytest.raises(DeviceMemoryError, match=r"a tile needs 1.5 GiB of GPU memory and 3 MiB are free"),
        allocating("a tile", 1536 * 2**20, on_gpu=True),
    ):
        raise error
    with (
        pytest.raises(DeviceMemoryError, match=r"a tile ran out of host memory and 3 MiB are free") as caught,
        allocating("a tile", on_gpu=False),
    ):
        raise error
    assert caught.value.__cause__ is error
    assert isinstance(caught.value, TilewrightError)


@pytest.mark.parametrize(
    "error",
    [
        cuda_error(700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        CUDAError("CUDA_ERROR_INVALID_VALUE: no"),
        driver_error("launching a kernel", 719),
        OSError("CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("Zstd decompression error: b'Data corruption detected'"),
        ValueError("2"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_pass_as_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, allocating("a tile", 1, on_gpu=True):
        raise error
    assert caught.value is error
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")], ids=repr)
def test_a_limit_on_addresses_is_told_of(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``ulimit -v`` memory, and room for threads, run out however much the host has left."""
    monkeypatch.setattr(memory, "free_nbytes", lambda *, on_gpu: 20 * 2**30)
    monkeypatch.setattr(memory, "_used_addresses", lambda: 2**30)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (5 * 2**29, resource.RLIM_INFINITY))
    told = (
        "a tile ran out of host memory and 20 GiB are free, but this process may use 2.5 GiB of addresses (ulimit -v),"
        " and has 1.5 GiB of those left"
    )
    with pytest.raises(DeviceMemoryError, match=re.escape(told)), allocating("a tile", on_gpu=False):
        raise error
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    if isinstance(error, RuntimeError):
        assert not is_out_of_memory(error)


def test_addresses_in_use_are_more_than_resident_memory() -> None:
    assert memory._used_addresses() > memory.peak_nbytes() // 2 > 0


def test_the_first_to_say_it_is_kept() -> None:
    with (
        pytest.raises(DeviceMemoryError, match=r"^a panel needs"),
        allocating("a tile", on_gpu=False),
        allocating("a panel", 2**20, on_gpu=False),
    ):
        raise MemoryError


def test_it_travels() -> None:
    # As Dask sends it: with its traceback.
    tblib.pickling_support.install(DeviceMemoryError)
    sent = DeviceMemoryError("a tile needs more")
    got = pickle.loads(pickle.dumps(sent))
    assert type(got) is DeviceMemoryError
    assert str(got) == str(sent)


def test_what_the_driver_refused_travels() -> None:
    error = driver_error("launching a kernel", 2)
    assert str(error) == "launching a kernel: CUDA_ERROR_OUT_OF_MEMORY"
    tblib.pickling_support.install(DriverError)
    got = pickle.loads(pickle.dumps(error))
    assert type(got) is DriverError
    assert str(got) == str(error)
    assert is_out_of_memory(got)


def test_what_is_free_on_the_host_and_where_nobody_knows() -> None:
    free = memory.free_nbytes(on_gpu=False)
    assert free is not None
    assert 2**20 < free < 2**50


def test_a_refused_workspace_says_how_large_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise cuda_error(2, "CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(scratch.cuda, "device_array", refuse)
    monkeypatch.setattr(scratch, "current_device", lambda: 0)
    with (
        pytest.raises(DeviceMemoryError, match=r"the kernel's workspace needs 64 MiB of GPU memory"),
        scratch.borrowed(64 * 2**20, 12345),
    ):
        raise AssertionError("there was nothing to borrow")
    assert not [key for key in scratch._buffers if key[1] == 12345]
