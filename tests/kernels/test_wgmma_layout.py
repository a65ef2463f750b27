"""Where the Hopper kernel's bytes go, run lane by lane in Python: shares of stages in clusters, and C's way out
through shared memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tilewright.kernels.launch import SIMULATOR

if SIMULATOR:
    pytest.skip("the simulator has no tensor cores", allow_module_level=True)

from numba import types

from tilewright.kernels.gemm import wgmma_epilogue, wgmma_mainloop
from tilewright.kernels.gemm.wgmma_config import (
    C_BOX_LINES,
    C_BOX_NBYTES,
    C_LINE_NBYTES,
    STAGE_DEPTH_NBYTES,
    Config,
)

WARP = 32


def python_types() -> SimpleNamespace:
    return SimpleNamespace(int32=int, uint32=int, uint64=int)


def as_python(monkeypatch: pytest.MonkeyPatch, module: Any, **instructions: Any) -> None:
    """Device functions of a module become plain Python over these instructions."""
    cuda = SimpleNamespace(jit=lambda **options: lambda function: function, syncwarp=lambda: None)
    monkeypatch.setattr(module, "cuda", cuda)
    monkeypatch.setattr(module, "ptx", SimpleNamespace(**instructions))
    monkeypatch.setattr(module, "types", python_types())


def swizzled(offset: int) -> int:
    """Where the 128-byte swizzle puts the byte at ``offset`` of a box: 16-byte chunks, their number XOR the
    line's."""
    return offset ^ ((offset >> 7 & 7) << 4)


def sums_of(lane: int, tile: np.ndarray) -> list[Any]:
    """A lane's accumulators of 16 rows (PTX ISA, the layout of ``wgmma``'s D)."""
    row, column = lane // 4, 2 * (lane % 4)
    return [
        tile[row + 8 * half, column + 8 * j + side]
        for j in range(tile.shape[1] // 8)
        for half in range(2)
        for side in range(2)
    ]


@pytest.mark.parametrize("boxes", [1, 2, 4])
def test_boxes_hold_the_tile(boxes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each box, when the copy engine takes it, holds its part of the tile as the tensor map's swizzle says."""
    config = Config("f16", "f16", types.float16, boxes=boxes)
    tile = np.arange(C_BOX_LINES * config.tile_n, dtype=np.uint32).reshape(C_BOX_LINES, config.tile_n)
    staging = 4096
    done: list[list[tuple[Any, ...]]] = [[] for _ in range(WARP)]
    current = 0

    def note(name: str) -> Any:
        return lambda *arguments: done[current].append((name, *arguments))

    def unroll(function: Any, count: int, arguments: tuple[Any, ...]) -> None:
        for i in range(count):
            function(i, *arguments)

    def bulk_wait(pending: int, *, read: bool) -> Any:
        assert read
        assert pending == boxes - 1
        return note("wait")

    as_python(
        monkeypatch,
        wgmma_epilogue,
        unroll=unroll,
        bulk_wait=bulk_wait,
        half_pair=lambda low, high: (int(low), int(high)),
        bfloat_pair=None,
        store_matrices=note("matrices"),
        copy_engine_fence=note("fence"),
        tensor_store=note("store"),
        bulk_commit=note("commit"),
    )
    store_boxes = wgmma_epilogue.box_store(config)
    for lane in range(WARP):
        current = lane
        store_boxes(sums_of(lane, tile), staging, 77, 160, 512, lane)

    memory = np.full(staging + boxes * C_BOX_NBYTES, 0xFF, np.uint8)
    steps = [[event for event in lane if event[0] in ("matrices", "fence")] for lane in done]
    stores = [event for event in done[0] if event[0] == "store"]
    columns = C_LINE_NBYTES // 2
    assert len(stores) == config.tile_n // columns
    assert not any(event[0] in ("wait", "store", "commit") for lane in done[1:] for event in lane)
    ready = 0
    for together in zip(*steps, strict=True):
        assert len({event[0] for event in together}) == 1
        if together[0][0] == "matrices":
            for matrix in range(4):
                banks = set()
                for row in range(8):
                    place = together[8 * matrix + row][1]
                    assert place % 16 == 0
                    banks.add(place // 16 % 8)
                    words = [pair for lane in range(4) for pair in together[4 * row + lane][2 + matrix]]
                    memory[place : place + 16] = np.array(words, np.uint16).view(np.uint8)
                assert len(banks) == 8, "lines of a matrix share banks"
        else:
            _, target, source, x, y, z = stores[ready]
            assert (target, x, y, z) == (77, 512 + ready * columns, 160, 0)
            assert source == staging + ready % boxes * C_BOX_NBYTES
            box = memory[source : source + C_BOX_NBYTES]
            plain = np.array([box[swizzled(i)] for i in range(C_BOX_NBYTES)], np.uint8)
            found = plain.view(np.uint16).reshape(C_BOX_LINES, columns)
            expected = tile[:, ready * columns : (ready + 1) * columns]
            np.testing.assert_array_equal(found, expected.astype(found.dtype))
            box[:] = 0xFF
            ready += 1
    assert ready == len(stores)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_shares_fill_every_stage(cluster: int, side_by_side: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cluster's producers load fills each block's stage once, each byte from its place in A or B."""
    config = Config(
        "f16", "f16", types.float16, cluster=cluster, m_major_a=side_by_side, n_major_b=side_by_side
    )
    loads: list[tuple[Any, ...]] = []
    here = 0
    expected_bytes = []

    def tensor_load_multicast(into: int, which: str, full: int, x: int, y: int, z: int, blocks: int) -> None:
        assert blocks == (1 << cluster) - 1
        loads.extend((block, into, which, x, y) for block in range(cluster))

    as_python(
        monkeypatch,
        wgmma_mainloop,
        barrier_wait=lambda *given: None,
        barrier_expect=lambda full, nbytes: expected_bytes.append(nbytes),
        tensor_load=lambda into, which, full, x, y, z: loads.append((here, into, which, x, y)),
        tensor_load_multicast=tensor_load_multicast,
    )
    fill = wgmma_mainloop.filler(config)
    rows, column = [(3 * cluster + rank) * config.tile_m for rank in range(cluster)], 5 * config.tile_n
    for here in range(cluster):
        fill("a", "b", 0, rows[here], column, 1, 1, here, 0, 0)
    assert expected_bytes == [config.stage_nbytes] * cluster
    boxes = {"a": config.box_a, "b": config.box_b}
    for block in range(cluster):
        first = {"a": rows[block], "b": column}
        filled = np.zeros(config.stage_nbytes, np.int8)
        for target, into, which, x, y in loads:
            if target == block:
                nbytes = boxes[which][0] * boxes[which][1] * 2
                filled[into : into + nbytes] += 1
                line = (into - (config.a_nbytes if which == "b" else 0)) // STAGE_DEPTH_NBYTES
                outer, k = (x, y) if side_by_side else (y, x)
                assert (outer, k) == (first[which] + line, 0)
        assert (filled == 1).all()
