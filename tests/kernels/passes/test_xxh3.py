"""XXH3 of parts of a panel: the kernel's, against libxxhash over the bytes of each part, row after row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.gemm.machine_code import assemble, assert_no_spills, sampled
from tests.kernels.gpu import fake_gpu
from tests.sampling import examples
from tilewright.kernels.gpu.device_choice import SIMULATOR

ITEMS = [1, 2, 4, 8, 16]
"""Bytes of the elements of every dtype."""

Part = tuple[int, int, int, int]
"""First row, row after the last, first column, column after the last."""


def naive(panel: np.ndarray, parts: Sequence[Part]) -> list[int]:
    return [
        xxhash.xxh3_64_intdigest(panel[top:bottom, left:right].tobytes())
        for top, bottom, left, right in parts
    ]


def hashed(panel: np.ndarray, pitch: int, lead: int, parts: Sequence[Part]) -> tuple[list[int], int]:
    """The kernel's hashes of parts of a panel that lies ``lead`` elements behind the begin of a buffer, its rows
    ``pitch`` elements apart, and the bytes that it loaded at once."""
    from numba import cuda

    from tilewright.kernels.gpu.device_array import Memory, address
    from tilewright.kernels.gpu.transfer import device_memory, pinned_bytes
    from tilewright.kernels.passes import xxh3_device

    item, (rows, columns) = panel.itemsize, panel.shape
    buffer = np.full(-(-(lead + rows * pitch) * item // 16) * 16, 0xA5, np.uint8)
    inner = buffer[lead * item : (lead + rows * pitch) * item].reshape(rows, pitch * item)
    inner[:, : columns * item] = panel.view(np.uint8).reshape(rows, columns * item)
    places = [
        ((lead + top * pitch + left) * item, bottom - top, (right - left) * item)
        for top, bottom, left, right in parts
    ]
    table = xxh3_device.table_of(0, pitch * item, places)  # memory begins at a multiple of 256 bytes
    device = cuda.to_device(buffer.view(table.dtype))
    if SIMULATOR:
        results = cuda.to_device(np.zeros(table.words + 1, np.uint64))
        few = results.view(table.dtype)
        xxh3_device.enqueue_hashes(device, table, cuda.to_device(table.parts), results, few, 0)
        return xxh3_device.hashes_from(table, results.copy_to_host()), table.unit
    assert address(device) % 256 == 0
    stream = cuda.stream()
    memory = pinned_bytes(table.parts.nbytes + (table.words + 1) * 8)
    given_parts = memory[: table.parts.nbytes].view(np.uint64).reshape(table.parts.shape)
    given_parts[...] = table.parts
    pinned = memory[table.parts.nbytes :].view(np.uint64)
    count = device.size
    flat = Memory(address(device), (count,), (table.dtype.itemsize,), table.dtype, stream, True)
    given_memory = map(device_memory, (given_parts, pinned, pinned.view(table.dtype)))
    xxh3_device.enqueue_hashes(flat, table, *given_memory, stream)
    stream.synchronize()
    return xxh3_device.hashes_from(table, pinned), table.unit


def elements(rng: np.random.Generator, rows: int, columns: int, item: int) -> np.ndarray:
    panel = rng.integers(0, 256, (rows, columns * item), np.uint8)
    return panel.view(f"V{item}").reshape(rows, columns)


pytest_device = pytest.mark.parametrize(
    "device",
    [pytest.param("simulator", marks=pytest.mark.simulator), pytest.param("gpu", marks=pytest.mark.gpu)],
)


@pytest_device
@pytest.mark.parametrize("item", ITEMS)
def test_parts_of_every_length(device: str, item: int, rng: np.random.Generator) -> None:
    """Around the bytes from which XXH3 has other rules, and where a stripe, a block, or what is added up at once
    ends."""
    lengths = [1, 15, 16, 17, 128, 239, 240, 241, 256, 304, 1023, 1024, 1025, 1088, 2047, 2048, 2049, 4099]
    if device == "gpu":
        lengths += [64 * 1024 + by for by in (-1, 0, 1, 65)] + [128 * 1024, 2**20 + 7, 4 * 2**20]
    elif item > 1:  # in the simulator a KiB takes tens of milliseconds
        lengths = lengths[1::2]
    counts = sorted({max(1, length // item) for length in lengths})
    panel = elements(rng, 2, max(counts), item)
    parts = [(0, 1, 0, counts[-1])]
    parts += [(1, 2, counts[-1] - count, counts[-1]) for count in counts]
    assert hashed(panel, max(counts), 0, parts)[0] == naive(panel, parts)


@pytest_device
@pytest.mark.parametrize(
    ("item", "columns", "pitch", "lead", "cut", "unit"),
    [
        (1, 61, 61, 0, 13, 1),
        (1, 62, 62, 2, 26, 2),
        (1, 60, 64, 0, 20, 4),
        (2, 41, 41, 0, 7, 2),
        (4, 30, 33, 1, 8, 4),
        (4, 30, 32, 0, 10, 8),
        (4, 32, 32, 0, 8, 16),
        (8, 17, 17, 0, 6, 8),
        (8, 18, 20, 0, 6, 16),
        (16, 5, 7, 3, 2, 16),
    ],
)
def test_parts_of_a_panel(
    device: str,
    item: int,
    columns: int,
    pitch: int,
    lead: int,
    cut: int,
    unit: int,
    rng: np.random.Generator,
) -> None:
    """Cut at columns, loaded by as many bytes at once as all of them are multiples of."""
    rows = 400 if device == "gpu" else 20
    panel = elements(rng, rows, columns, item)
    edges = [0, cut, columns - columns % cut, columns]
    parts = [
        (top, top + height, left, right)
        for top, height in [(0, rows), (3, rows // 2), (rows - 1, 1)]
        for left, right in pairwise(edges)
        if left < right
    ]
    assert hashed(panel, pitch, lead, parts) == (naive(panel, parts), unit)


@st.composite
def panels(draw: st.DrawFn, most: int) -> tuple[int, int, int, int, int, list[Part]]:
    item = draw(st.sampled_from(ITEMS))
    rows, columns = draw(st.integers(1, most)), draw(st.integers(1, most))
    pitch, lead = columns + draw(st.sampled_from([0, 0, 1, 3, 16])), draw(st.sampled_from([0, 0, 1, 5]))
    parts = []
    for _ in range(draw(st.integers(1, 6))):
        top, left = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
        parts.append((top, draw(st.integers(top + 1, rows)), left, draw(st.integers(left + 1, columns))))
    return item, rows, columns, pitch, lead, parts


def assert_hashed(drawn: tuple[int, int, int, int, int, list[Part]], seed: int) -> None:
    item, rows, columns, pitch, lead, parts = drawn
    panel = elements(np.random.default_rng(seed), rows, columns, item)
    assert hashed(panel, pitch, lead, parts)[0] == naive(panel, parts)


@pytest.mark.simulator
@settings(max_examples=examples(12))
@given(drawn=panels(40), seed=st.integers(0, 99))
def test_any_part_of_any_panel(drawn: Any, seed: int) -> None:
    assert_hashed(drawn, seed)


@pytest.mark.gpu
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(drawn=panels(700), seed=st.integers(0, 99))
def test_any_part_of_any_panel_on_a_gpu(drawn: Any, seed: int) -> None:
    assert_hashed(drawn, seed)


@pytest.mark.gpu
def test_more_parts_than_blocks_of_threads(rng: np.random.Generator) -> None:
    from tilewright.kernels.passes.xxh3_device import MOST_BLOCKS

    panel = elements(rng, 3 * MOST_BLOCKS, 300, 4)
    parts = [(row, row + 1, 0, 300 - row % 299) for row in range(len(panel))]
    assert hashed(panel, 300, 0, parts)[0] == naive(panel, parts)


@pytest.mark.simulator
def test_no_parts_have_no_hashes(rng: np.random.Generator) -> None:
    assert hashed(elements(rng, 2, 2, 4), 2, 0, []) == ([], 16)
    assert hashed(elements(rng, 2, 2, 4), 2, 0, [(1, 1, 0, 2)])[0] == [xxhash.xxh3_64_intdigest(b"")]


@pytest.mark.skipif(SIMULATOR, reason="the simulator launches by itself")
def test_a_launch_names_the_panel_its_parts_and_where_their_hashes_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tilewright.kernels.gpu.device_array import Memory
    from tilewright.kernels.gpu.transfer import device_memory
    from tilewright.kernels.passes import xxh3_device

    gpu = fake_gpu.install(monkeypatch)
    table = xxh3_device.table_of(0x7F00_0000_0000, 1040, [(8, 5, 1000), (1040, 3, 40)])
    assert (table.unit, table.pitch, table.words) == (8, 130, 1 + 15)
    assert table.parts.tolist() == [[1, 125, 5, 0], [130, 5, 3, 1]]
    panel = Memory(0x7F00_0000_0000, (4096,), (8,), table.dtype, 0, True)
    results = np.zeros(table.words, np.uint64)
    told, found, few = map(device_memory, (table.parts, results, results.view(table.dtype)))
    xxh3_device.enqueue_hashes(panel, table, told, found, few, 7)
    (launched,) = gpu.take()
    assert launched.shape == (2, 1, 1, xxh3_device.THREADS, 1, 1)
    assert (launched.stream, launched.shared_nbytes) == (7, 0)
    places, words = table.parts.ctypes.data, results.ctypes.data
    assert launched.values == (
        *(0, 0, 4096, 8, 0x7F00_0000_0000, 4096, 8),
        130,
        *(0, 0, 8, 8, places, 2, 4, 32, 8),
        *(0, 0, 16, 8, words, 16, 8),
        *(0, 0, 16, 8, words, 16, 8),
    )


def compiled_variants() -> list[Any]:
    if SIMULATOR:
        return []
    from tilewright.kernels.passes.xxh3_device import variants

    return sampled(list(variants()), 4)


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("variant", compiled_variants())
@pytest.mark.parametrize("target", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_becomes_machine_code(variant: Any, target: tuple[int, int], tmp_path: Path) -> None:
    from numba import cuda

    text, _ = cuda.compile_ptx(variant.function, variant.signature, cc=target)
    report = assemble(text, f"sm_{target[0]}{target[1]}", tmp_path)
    assert_no_spills(report)
    assert " 0 bytes stack frame" in report, "what is loaded ahead is in registers"
