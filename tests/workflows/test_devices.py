"""The table of GPUs, on descriptions made by hand."""

from __future__ import annotations

import io
from dataclasses import fields, replace

import pytest
from rich.console import Console

from tilewright.kernels.gpu.device import Device, devices
from tilewright.workflows.devices import device_table

DEVICE = Device(
    index=0,
    name="Example 100",
    uuid="GPU-1",
    pci_bus="0000:01:00.0",
    compute_capability=(9, 0),
    multiprocessors=132,
    memory_total=141 * 2**30,
    memory_free=140 * 2**30,
    max_threads_per_block=1024,
    max_block_dim=(1024, 1024, 64),
    max_grid_dim=(2**31 - 1, 65535, 65535),
    max_threads_per_multiprocessor=2048,
    warp_size=32,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    registers_per_block=65536,
    registers_per_multiprocessor=65536,
    l2_cache=50 * 2**20,
    clock_rate=1980000,
    memory_clock_rate=3201000,
    memory_bus_bits=6144,
    peers=(1,),
    nvlinks=18,
    driver_cuda=(13, 0),
    runtime_cuda=None,
    driver_version=None,
)


def test_the_table_shows_every_fact_of_every_gpu() -> None:
    other = replace(DEVICE, index=1, peers=(), memory_free=None)
    out = io.StringIO()
    Console(file=out, width=120).print(device_table([DEVICE, other]))
    text = out.getvalue()
    for fact in (
        "GPU 0",
        "GPU 1",
        "Example 100",
        "9.0",
        "132",
        "141 GiB",
        "140 GiB",
        "227 KiB",
        "228 KiB",
        "1024 × 1024 × 64",
        "2147483647 × 65535 × 65535",
        "4917 GB/s",
        "13.0",
        "no other GPU",
        "18",
    ):
        assert fact in text
    assert text.count("not known") == 5


def test_no_fact_is_left_out() -> None:
    def shown(device: Device) -> str:
        out = io.StringIO()
        Console(file=out, width=120).print(device_table([device]))
        return out.getvalue()

    for field in fields(Device):
        value = getattr(DEVICE, field.name)
        if isinstance(value, str) or field.name == "driver_version":
            other: object = "other"
        elif isinstance(value, tuple) or field.name == "runtime_cuda":
            other = tuple(2 * side for side in value) if value else (12, 9)
        else:
            other = 4 * value + 1
        assert shown(replace(DEVICE, **{field.name: other})) != shown(DEVICE), field.name


@pytest.mark.gpu
def test_the_gpus_of_this_machine_fill_the_table() -> None:
    out = io.StringIO()
    found = devices()
    assert found
    Console(file=out, width=200).print(device_table(found))
    assert all(device.name in out.getvalue() for device in found)
