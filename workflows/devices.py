"""What GPUs there are, as a table."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from tilewright.kernels.gpu.device import Device, why_no_gpu
from tilewright.kernels.gpu.device import devices as devices
from tilewright.kernels.numbers import format_nbytes

__all__ = ["Device", "device_table", "devices", "why_no_gpu"]


def device_table(found: list[Device]) -> Table:
    """One column for each GPU, one row for each fact."""
    table = Table(show_header=True, header_style="bold", title_justify="left")
    table.add_column("")
    for device in found:
        table.add_column(f"GPU {device.index}", overflow="fold")
    rows = [_facts(device) for device in found]
    for row, (name, _) in enumerate(rows[0]):
        table.add_row(name, *(facts[row][1] for facts in rows))
    return table


def _facts(device: Device) -> list[tuple[str, str]]:
    return [
        ("name", device.name),
        ("UUID", device.uuid),
        ("PCI address", device.pci_bus),
        ("compute capability", _version(device.compute_capability)),
        ("multiprocessors", str(device.multiprocessors)),
        ("memory", format_nbytes(device.memory_total)),
        ("memory free", _known(device.memory_free, format_nbytes)),
        ("peak memory rate", f"{device.memory_bandwidth / 1e9:.0f} GB/s"),
        (
            "clock, memory clock",
            f"{device.clock_rate / 1e6:.2f} GHz, {device.memory_clock_rate / 1e6:.2f} GHz",
        ),
        ("memory bus", f"{device.memory_bus_bits} bits"),
        ("L2 cache", format_nbytes(device.l2_cache)),
        ("threads per block", str(device.max_threads_per_block)),
        ("threads per multiprocessor", str(device.max_threads_per_multiprocessor)),
        ("threads per warp", str(device.warp_size)),
        ("largest block", _sides(device.max_block_dim)),
        ("largest grid", _sides(device.max_grid_dim)),
        ("shared memory per block", format_nbytes(device.shared_memory_per_block)),
        ("the same, when asked for", format_nbytes(device.shared_memory_per_block_optin)),
        ("shared memory per multiprocessor", format_nbytes(device.shared_memory_per_multiprocessor)),
        ("registers per block", str(device.registers_per_block)),
        ("registers per multiprocessor", str(device.registers_per_multiprocessor)),
        ("reaches the memory of", ", ".join(f"GPU {peer}" for peer in device.peers) or "no other GPU"),
        ("NVLink links", _known(device.nvlinks, str)),
        ("driver", _known(device.driver_version, str)),
        ("CUDA of the driver", _version(device.driver_cuda)),
        ("CUDA runtime", _known(device.runtime_cuda, _version)),
    ]


def _version(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"


def _sides(sides: tuple[int, int, int]) -> str:
    return " × ".join(map(str, sides))


def _known(value: Any, say: Any) -> str:
    return "not known" if value is None else str(say(value))
