"""Properties of GPUs: honest on a machine without one, complete and plausible on a machine with one."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest

from tilewright.kernels.gpu import device
from tilewright.kernels.gpu.device import Device, devices, why_no_gpu
from tilewright.kernels.gpu.device_choice import model


def fake_bindings(count: int, status: str = "") -> tuple[Any, Any]:
    """Stands for ``_start_driver``: either a count of devices or the driver's refusal."""

    def start() -> tuple[Any, int]:
        if status:
            raise device._DriverRefused(status)
        return types.SimpleNamespace(), count

    return start, count


def test_devices_and_the_reason_agree() -> None:
    assert bool(devices()) == (why_no_gpu() == "")


@pytest.mark.parametrize(
    ("status", "word"),
    [
        ("CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    ],
)
def test_a_driver_that_refuses_is_a_sentence_not_an_exception(
    monkeypatch: pytest.MonkeyPatch, status: str, word: str
) -> None:
    monkeypatch.setattr(device, "_start_driver", fake_bindings(0, status)[0])
    assert devices() == []
    sentence = why_no_gpu()
    assert word in sentence
    assert sentence.startswith("No GPU: ")
    assert sentence.endswith((".", ")."))


def test_no_visible_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_start_driver", fake_bindings(0)[0])
    assert devices() == []
    assert "CUDA_VISIBLE_DEVICES" in why_no_gpu()


def test_no_driver_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> tuple[Any, int]:
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(device, "_start_driver", start)
    assert devices() == []
    assert "libcuda" in why_no_gpu()


def example() -> Device:
    return Device(
        index=1,
        name="Example GPU",
        uuid="GPU-0",
        pci_bus="00000000:01:00.0",
        compute_capability=(9, 0),
        multiprocessors=132,
        memory_total=150 * 10**9,
        memory_free=None,
        max_threads_per_block=1024,
        max_block_dim=(1024, 1024, 64),
        max_grid_dim=(2**31 - 1, 65535, 65535),
        max_threads_per_multiprocessor=2048,
        warp_size=32,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=227 << 10,
        shared_memory_per_multiprocessor=228 << 10,
        registers_per_block=65536,
        registers_per_multiprocessor=65536,
        l2_cache=60 << 20,
        clock_rate=1_980_000,
        memory_clock_rate=3_201_000,
        memory_bus_bits=6144,
        peers=(0, 2),
        nvlinks=18,
        driver_cuda=(13, 0),
        runtime_cuda=None,
        driver_version=None,
    )


def test_to_json_is_json_and_loses_nothing() -> None:
    record = example().to_json()
    assert json.loads(json.dumps(record)) == record
    assert record["peers"] == [0, 2]
    assert record["compute_capability"] == [9, 0]
    assert record["memory_free"] is None
    assert len(record) == len(Device.__dataclass_fields__)


def test_bandwidth_counts_both_edges_of_the_clock() -> None:
    assert example().memory_bandwidth == pytest.approx(4.917e12, rel=1e-3)


def test_versions_are_unpacked() -> None:
    assert device._version(13050) == (13, 5)
    assert device._version(12080) == (12, 8)


@pytest.mark.gpu
def test_a_real_gpu_agrees_with_numba() -> None:
    from numba import cuda

    found = devices()
    assert len(found) == len(cuda.gpus)
    for entry, other in zip(found, cuda.gpus, strict=True):
        assert entry.compute_capability == tuple(other.compute_capability)
        assert entry.multiprocessors == other.MULTIPROCESSOR_COUNT
        assert entry.max_block_dim == (
            other.MAX_BLOCK_DIM_X,
            other.MAX_BLOCK_DIM_Y,
            other.MAX_BLOCK_DIM_Z,
        )
        assert entry.warp_size == 32
        assert entry.memory_free is not None
        assert 0 < entry.memory_free <= entry.memory_total
        assert entry.shared_memory_per_block <= entry.shared_memory_per_block_optin
        assert entry.index not in entry.peers


@pytest.mark.gpu
def test_free_memory_falls_when_memory_is_taken() -> None:
    import numpy as np
    from numba import cuda

    cuda.current_context()
    before = devices()[0].memory_free
    held = cuda.device_array(1 << 28, np.uint8)
    after = devices()[0].memory_free
    assert before is not None
    assert after is not None
    assert before - after >= held.nbytes // 2


@pytest.mark.gpu
def test_free_memory_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_board", lambda nvml, pci: device._Board())
    entry = devices()[0]
    assert entry.memory_free is not None
    assert 0 < entry.memory_free <= entry.memory_total
    assert entry.nvlinks is None


@pytest.mark.gpu
def test_the_model_is_the_name_that_nvidia_gives() -> None:
    assert [model(device.index) for device in devices()] == [device.name for device in devices()]
