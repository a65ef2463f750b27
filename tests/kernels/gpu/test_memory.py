"""A failure to get memory says what it was for, whichever library it comes from; everything else passes."""

from __future__ import annotations

import pickle
import re
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tblib.pickling_support
from numba.cuda.cudadrv.driver import CudaAPIError

from tilewright.kernels.errors import DeviceMemoryError, TilewrightError
from tilewright.kernels.gemm import scratch
from tilewright.kernels.gpu import memory
from tilewright.kernels.gpu.driver_error import DriverError, driver_error
from tilewright.kernels.gpu.memory import allocating, is_out_of_memory, memory_that_ran_out
from tilewright.kernels.gpu.streams import PER_THREAD_DEFAULT_STREAM


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


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "host (MemoryError)"),
        (MemoryError("Unable to allocate\n2 GiB"), "host (Unable to allocate 2 GiB)"),
        (
            MemoryError("std::bad_alloc: out_of_memory: CUDA error"),
            "GPU (std::bad_alloc: out_of_memory: CUDA error)",
        ),
        (
            cuda_error(2, "CUDA_ERROR_OUT_OF_MEMORY"),
            "GPU ([2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY)",
        ),
        (CUDAError("CUDA_ERROR_OUT_OF_MEMORY: no"), "GPU (CUDA_ERROR_OUT_OF_MEMORY: no)"),
        (driver_error("launching", 2), "GPU (launching: CUDA_ERROR_OUT_OF_MEMORY)"),
        (driver_error("cuMemHostAlloc", 2), "host (cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY)"),
    ],
    ids=repr,
)
def test_whose_memory_ran_out(error: Exception, told: str) -> None:
    assert is_out_of_memory(error)
    assert memory_that_ran_out(error) == told


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")], ids=repr)
def test_a_limit_on_addresses_is_told_of(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``ulimit -v`` memory, and room for threads, run out however much the host has left."""
    monkeypatch.setattr(memory, "free_nbytes", lambda *, on_gpu: 20 * 2**30)
    monkeypatch.setattr(memory, "_used_addresses", lambda: 2**30)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (5 * 2**29, resource.RLIM_INFINITY))
    told = (
        "a tile ran out of host memory and 20 GiB are free, but this process may use 2.5 GiB of addresses (ulimit -v),"
        " and has 1.5 GiB of those left: raise that limit"
    )
    with (
        pytest.raises(DeviceMemoryError, match=re.escape(told)) as caught,
        allocating("a tile", on_gpu=False),
    ):
        raise error
    assert memory.is_address_limit(caught.value)
    monkeypatch.setattr(memory, "free_nbytes", lambda *, on_gpu: 2**30)
    with (
        pytest.raises(DeviceMemoryError, match=r"1 GiB are free \(") as caught,
        allocating("a tile", on_gpu=False),
    ):
        raise error
    assert not memory.is_address_limit(caught.value), "the host has less than the limit leaves"
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


class _Buffer:
    """What an allocation of scratch memory leaves."""

    def __init__(self, nbytes: int, address: int) -> None:
        self.size = nbytes
        self.device_ctypes_pointer = SimpleNamespace(value=address)


class _Pool:
    """Device memory of which scratch memory asks for a part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
        self.left, self.made, self.waits = nbytes, 0, 0
        monkeypatch.setattr(scratch.cuda, "device_array", self.allocate)
        monkeypatch.setattr(scratch.cuda, "synchronize", self.wait)
        monkeypatch.setattr(scratch, "current_device", lambda: 0)
        monkeypatch.setattr(scratch, "_buffers", {})

    def wait(self) -> None:
        self.waits += 1

    def allocate(self, nbytes: int, *args: Any, **options: Any) -> _Buffer:
        if sum(buffer.size for buffer in scratch._buffers.values()) + nbytes > self.left:
            raise cuda_error(2, "CUDA_ERROR_OUT_OF_MEMORY")
        self.made += 1
        return _Buffer(nbytes, 1000 * self.made)


def test_what_other_streams_were_lent_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = _Pool(monkeypatch, 100)
    for stream in (11, 12):
        with scratch.borrowed(40, stream):
            pass
    assert pool.waits == 0
    with scratch.borrowed(90, 13) as place:
        assert place == 3000
    assert pool.waits == 1, "kernels under way may use what is taken away"
    assert [key[1] for key in scratch._buffers] == [13]
    with pytest.raises(DeviceMemoryError, match="workspace"), scratch.borrowed(101, 14):
        raise AssertionError("there was nothing to borrow")


def test_each_thread_borrows_for_its_own_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    _Pool(monkeypatch, 1000)
    places: dict[int, set[int]] = {PER_THREAD_DEFAULT_STREAM: set(), 11: set()}

    def borrow(stream: int) -> None:
        with scratch.borrowed(40, stream) as place:
            places[stream].add(place)

    for stream in places:
        with ThreadPoolExecutor(2) as pool:
            meeting = threading.Barrier(2)
            list(
                pool.map(lambda _, stream=stream, meeting=meeting: (meeting.wait(), borrow(stream)), range(2))
            )
    assert [len(found) for found in places.values()] == [2, 1]
