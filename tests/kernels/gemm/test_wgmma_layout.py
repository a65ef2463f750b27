"""Where the Hopper kernel's bytes go, run lane by lane in Python: shares of stages in clusters, and C's way out
through shared memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.kernels.gemm.lane_by_lane import replace_instructions
from tilewright.kernels.gpu.device_choice import SIMULATOR

if SIMULATOR:
    pytest.skip("the simulator has no tensor cores", allow_module_level=True)

from numba import types

from tilewright.kernels.gemm.hopper import wgmma_epilogue, wgmma_mainloop, wgmma_registers
from tilewright.kernels.gemm.hopper.wgmma_config import (
    C_BOX_LINES,
    C_BOX_NBYTES,
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
    replace_instructions(monkeypatch, module, SimpleNamespace(**instructions))
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


def check_boxes(
    config: Config, tile: np.ndarray, write: Any, write_together: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that each box, when the copy engine takes it, holds its part of the tile as the tensor map's swizzle says.

    write: the name of the instruction by which lanes write, which they are noted by. write_together(memory, events):
    writes what all lanes wrote by one of them.
    """
    staging, boxes, columns = 4096, config.boxes, config.box_c[0]
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

    instructions = dict.fromkeys(("store_matrices", "store_shared_words"), None) | {write: note("write")}
    as_python(
        monkeypatch,
        wgmma_epilogue,
        unroll=unroll,
        bulk_wait=bulk_wait,
        half_pair=lambda low, high: (int(low), int(high)),
        bfloat_pair=None,
        float_word=lambda number: number,
        copy_engine_fence=note("fence"),
        tensor_store=note("store"),
        bulk_commit=note("commit"),
        **instructions,
    )
    store_boxes = wgmma_epilogue.box_store(config)
    for lane in range(WARP):
        current = lane
        store_boxes(sums_of(lane, tile), staging, 77, 160, 512, lane)

    memory = np.full(staging + boxes * C_BOX_NBYTES, 0xFF, np.uint8)
    steps = [[event for event in lane if event[0] in ("write", "fence")] for lane in done]
    stores = [event for event in done[0] if event[0] == "store"]
    assert len(stores) == config.tile_n // columns
    assert not any(event[0] in ("wait", "store", "commit") for lane in done[1:] for event in lane)
    ready = 0
    for together in zip(*steps, strict=True):
        assert len({event[0] for event in together}) == 1
        if together[0][0] == "write":
            write_together(memory, together)
            continue
        _, target, source, x, y, z = stores[ready]
        assert (target, x, y, z) == (77, 512 + ready * columns, 160, 0)
        assert source == staging + ready % boxes * C_BOX_NBYTES
        box = memory[source : source + C_BOX_NBYTES]
        plain = np.array([box[swizzled(i)] for i in range(C_BOX_NBYTES)], np.uint8)
        found = plain.view(tile.dtype).reshape(C_BOX_LINES, columns)
        np.testing.assert_array_equal(found, tile[:, ready * columns : (ready + 1) * columns])
        box[:] = 0xFF
        ready += 1
    assert ready == len(stores)


@pytest.mark.parametrize("boxes", [1, 2, 4])
def test_boxes_hold_the_tile(boxes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of elements of 16 bits, which lanes write by matrices, no two lines of one to the same banks."""
    config = Config("f16", "f16", types.float16, boxes=boxes)
    tile = np.arange(C_BOX_LINES * config.tile_n, dtype=np.uint16).reshape(C_BOX_LINES, config.tile_n)

    def write_together(memory: np.ndarray, together: Any) -> None:
        for matrix in range(4):
            banks = set()
            for row in range(8):
                place = together[8 * matrix + row][1]
                assert place % 16 == 0
                banks.add(place // 16 % 8)
                words = [pair for lane in range(4) for pair in together[4 * row + lane][2 + matrix]]
                memory[place : place + 16] = np.array(words, np.uint16).view(np.uint8)
            assert len(banks) == 8, "lines of a matrix share banks"

    check_boxes(config, tile, "store_matrices", write_together, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "c_type", "boxes", "columns"),
    [
        ("e4m3", types.float32, 1, 192),
        ("e4m3", types.float32, 3, 192),
        ("e5m2", types.float32, 4, 128),
        ("s8", types.int32, 2, 256),
    ],
)
def test_boxes_of_32_bits_hold_the_tile(
    kind: str, c_type: Any, boxes: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same of elements that lanes write by pairs, and no two of a half warp to the same banks."""
    config = Config(kind, kind, c_type, boxes=boxes, tile_n=columns)
    number = np.uint32 if config.integer else np.float32
    tile = np.arange(C_BOX_LINES * columns, dtype=number).reshape(C_BOX_LINES, columns)

    def write_together(memory: np.ndarray, together: Any) -> None:
        for half in (together[: WARP // 2], together[WARP // 2 :]):
            assert len({place // 8 % 16 for _, place, *_ in half}) == 16, "lanes write to the same banks"
        for _, place, *pair in together:
            assert place % 8 == 0
            assert (memory[place : place + 8] == 0xFF).all(), "written twice"
            memory[place : place + 8] = np.array(pair, number).view(np.uint8)

    check_boxes(config, tile, "store_shared_words", write_together, monkeypatch)


def test_a_tile_fills_each_box_as_often_as_every_other() -> None:
    """Of six boxes of a tile in four places the next tile would begin with one that was just filled."""
    with pytest.raises(ValueError, match="takes its boxes in turn"):
        Config("e4m3", "e4m3", types.float32, boxes=4, tile_n=192)


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


# --- A's 32-bit elements through registers ------------------------------------------------------------------

REGISTERS = Config("tf32", "tf32", types.float32, m_major_a=True, c_by_columns=True)


class Fragments(list[Any]):
    """Registers that must not be written while products may still read them."""

    busy = False

    def __setitem__(self, index: Any, value: Any) -> None:
        assert not self.busy, "a register is written while a product may still read it"
        super().__setitem__(index, value)


class Consumer:
    """One thread of a consumer: what it loads, multiplies and signals, over a ring that is always full."""

    def __init__(self, memory: np.ndarray, ring: int) -> None:
        self.memory, self.ring = memory, ring
        self.loads: list[int] = []
        self.waited: list[tuple[int, int]] = []
        self.released: list[int] = []
        self.products: list[tuple[list[int], int, int]] = []
        self.groups: list[list[Fragments]] = []
        self.open: list[Fragments] = []
        self.fenced = False

    def wait_full(self, barrier: int, parity: int) -> None:
        self.waited.append(((barrier - self.ring - REGISTERS.stages * REGISTERS.stage_nbytes) // 8, parity))

    def load(self, address: int) -> tuple[int, int]:
        assert address % 8 == 0
        assert (address - self.ring) // REGISTERS.stage_nbytes == self.waited[-1][0], (
            "not the stage waited for"
        )
        self.loads.append(address)
        self.fenced = False
        return tuple(int(word) for word in self.memory[address : address + 8].view(np.uint32))  # type: ignore[return-value]

    def fence(self) -> None:
        self.fenced = True

    def multiply(self, sums: Any, fragments: Fragments, b: int, keep: int) -> None:
        assert self.fenced, "products that may read registers before they are written"
        fragments.busy = True
        self.open.append(fragments)
        self.products.append((list(fragments), b, keep))

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_products(self, pending: int) -> None:
        while len(self.groups) > pending:
            for fragments in self.groups.pop(0):
                fragments.busy = False

    def release(self, barrier: int, peer: int) -> None:
        place = (barrier - self.ring - REGISTERS.stages * (REGISTERS.stage_nbytes + 8)) // 8
        assert len(self.released) == len(self.products) - len(self.groups) - 1, "a stage still under way"
        self.released.append(place)


def run_consumer(
    k_steps: int, thread: int, memory: np.ndarray, ring: int, monkeypatch: pytest.MonkeyPatch, place: int = 0
) -> Consumer:
    """``register_multiplier`` as one thread of a consumer (counted over both of them) runs it."""
    me = Consumer(memory, ring)

    def unroll(function: Any, count: int, arguments: tuple[Any, ...]) -> None:
        for i in range(count):
            function(i, *arguments)

    as_python(monkeypatch, wgmma_mainloop, shared_tile=lambda *given: 0)
    as_python(
        monkeypatch,
        wgmma_registers,
        unroll=unroll,
        wgmma_registers=lambda n, steps: me.multiply,
        wgmma_wait=lambda pending: lambda: me.wait_products(pending),
        wgmma_fence=me.fence,
        wgmma_commit=me.commit,
        barrier_wait=me.wait_full,
        barrier_arrive=me.release,
        load_shared_pair=me.load,
        tf32_operand=lambda word: word,
    )
    monkeypatch.setattr(wgmma_registers.cuda, "threadIdx", SimpleNamespace(x=128 + thread), raising=False)
    monkeypatch.setattr(
        wgmma_registers.cuda,
        "local",
        SimpleNamespace(array=lambda count, dtype: Fragments([None] * count)),
        raising=False,
    )
    multiply_plane = wgmma_registers.register_multiplier(REGISTERS)
    following = wgmma_mainloop.next_place(REGISTERS)
    expected = place, 0
    for _ in range(k_steps):
        expected = following(*expected)
    assert multiply_plane(None, ring, k_steps, thread // 128, thread % 32, place, 0) == expected
    return me


def test_fragments_hold_the_rows_and_no_banks_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fragment of a stage against the tile as the copy engine's swizzle leaves it in shared memory."""
    depth, ring = REGISTERS.depth, 2048
    tile = np.arange(REGISTERS.tile_m * depth, dtype=np.uint32).reshape(REGISTERS.tile_m, depth)
    memory = np.zeros(ring + REGISTERS.stages * REGISTERS.stage_nbytes, np.uint8)
    box_nbytes = depth * STAGE_DEPTH_NBYTES
    for box in range(REGISTERS.tile_m // depth):
        lines = np.ascontiguousarray(tile[box * depth : (box + 1) * depth].T).view(np.uint8).ravel()
        start = ring + REGISTERS.stage_nbytes + box * box_nbytes  # in place 1
        for i in range(box_nbytes):
            memory[start + swizzled(i)] = lines[i]
    threads = [run_consumer(1, thread, memory, ring, monkeypatch, place=1) for thread in range(256)]
    found = np.full(tile.shape, 0xFFFFFFFF, np.uint32)
    for thread, done in enumerate(threads):
        warp, (g, t) = thread // WARP, divmod(thread % WARP, 4)
        ((fragments, _, keep),) = done.products
        assert keep == 0
        for register, word in enumerate(fragments):
            step, right, half = register // 4, register // 2 % 2, register % 2
            assert found[16 * warp + 2 * g + half, 8 * step + t + 4 * right] == 0xFFFFFFFF
            found[16 * warp + 2 * g + half, 8 * step + t + 4 * right] = word
    np.testing.assert_array_equal(found, tile)
    for first in range(0, 256, WARP // 2):  # the lanes that an 8-byte access serves at a time
        for together in zip(*(done.loads for done in threads[first : first + WARP // 2]), strict=True):
            assert len({address // 8 % 16 for address in together}) == 16, "lanes read from the same banks"


@pytest.mark.parametrize("k_steps", [1, 2, 3, 4, 5, 8, 9, 14])
def test_stages_are_given_back_after_their_products(k_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage is waited for, multiplied and given back once, in order; registers are free when written."""
    memory = np.zeros(REGISTERS.stages * REGISTERS.stage_nbytes, np.uint8)
    done = run_consumer(k_steps, 0, memory, 0, monkeypatch)
    stages = REGISTERS.stages
    assert done.waited == [(step % stages, step // stages % 2) for step in range(k_steps)]
    assert done.released == [step % stages for step in range(k_steps)]
    assert [keep != 0 for _, _, keep in done.products] == [step > 0 for step in range(k_steps)]
    assert not done.groups
    other = run_consumer(k_steps, 31, memory, 0, monkeypatch)
    assert not other.released, "only the first lanes tell the producers"


# --- sums that are carried to totals ------------------------------------------------------------------------


class Promoting:
    """One thread of a consumer whose products are numbers of their stage, each a power of two, so that a total shows
    which went into it and how often."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.waited: list[tuple[int, int]] = []
        self.released: list[int] = []
        self.under_way: list[int] = []
        self.issued = 0
        self.sums = np.full(config.tile_n // 2, np.nan)

    def wait_full(self, barrier: int, parity: int) -> None:
        self.waited.append(((barrier - self.config.stages * self.config.stage_nbytes) // 8, parity))

    def multiply(self, sums: Any, a: int, b: int, keep: int) -> None:
        self.sums[:] = (self.sums if keep else 0) + 2.0**self.issued
        self.issued += 1

    def commit(self) -> None:
        self.under_way.append(self.waited[-1][0])

    def wait_products(self, pending: int) -> None:
        del self.under_way[: max(0, len(self.under_way) - pending)]

    def release(self, barrier: int, peer: int) -> None:
        place = (barrier - self.config.stages * (self.config.stage_nbytes + 8)) // 8
        assert place not in self.under_way[-self.config.stages :], "a stage still under way"
        self.released.append(place)


@pytest.mark.parametrize("promoted", [1, 2, 4])
@pytest.mark.parametrize("k_steps", [1, 2, 3, 4, 5, 7, 12])
def test_sums_are_carried_to_totals(promoted: int, k_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config("e4m3", "e5m2", types.float32, promoted=promoted, tile_n=16, stages=5)
    me = Promoting(config)
    carried: list[float] = []

    class Totals(list[float]):
        def __setitem__(self, index: Any, value: Any) -> None:
            assert not me.under_way, "sums are read while products are under way"
            if index == 0:
                carried.append(value)
            super().__setitem__(index, value)

    def unroll(function: Any, count: int, arguments: tuple[Any, ...]) -> None:
        for i in range(count):
            function(i, *arguments)

    as_python(
        monkeypatch,
        wgmma_mainloop,
        unroll=unroll,
        shared_tile=lambda *given: 0,
        wgmma=lambda *given, **more: me.multiply,
        wgmma_wait=lambda pending: lambda: me.wait_products(pending),
        wgmma_fence=lambda: None,
        wgmma_commit=me.commit,
        barrier_wait=me.wait_full,
        barrier_arrive=me.release,
    )
    monkeypatch.setattr(wgmma_mainloop.types, "float32", float, raising=False)
    for name in ("clear_total", "add_to_total"):
        monkeypatch.setattr(wgmma_mainloop, name, getattr(wgmma_mainloop, name).py_func)
    multiply = wgmma_mainloop.promoted_multiplier(config)
    totals = Totals([np.nan] * 8)
    place, parity = multiply(totals, me.sums, 0, k_steps, 1, 0, 3, 1)
    assert me.waited == [((3 + step) % 5, 1 ^ ((3 + step) // 5 % 2)) for step in range(k_steps)]
    assert me.released == [stage for stage, _ in me.waited]
    assert (place, parity) == ((3 + k_steps) % 5, 1 ^ ((3 + k_steps) // 5 % 2))
    assert totals == [2.0**k_steps - 1] * 8
    whole = [2.0 ** min(end, k_steps) - 1 for end in range(promoted, k_steps + promoted, promoted)]
    assert carried == [0, *whole], "sums of other lengths"


@pytest.mark.parametrize(("m", "n"), [(64, 256), (64, 251), (37, 256), (63, 9), (1, 1)])
@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize("pitch", [64, 67])
def test_columns_are_written_once(
    m: int, n: int, accumulate: int, pitch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warpgroup's sums to a C whose columns lie side by side; lanes that write together fill sectors."""
    tile = np.random.default_rng(m + n).integers(1, 1000, (64, 256)).astype(np.float32)
    before = np.full(pitch * n, 0.5, np.float32)
    out, count = before.copy(), np.zeros(pitch * n, int)
    pairs: list[int] = []

    class Counted:
        def __getitem__(self, place: int) -> Any:
            return out[place]

        def __setitem__(self, place: int, value: Any) -> None:
            out[place] = value
            count[place] += 1

    def store_pair(array: Any, place: int, first: Any, second: Any) -> None:
        assert place % 2 == 0
        array[place], array[place + 1] = first, second
        pairs.append(place)

    def unroll(function: Any, steps: int, arguments: tuple[Any, ...]) -> None:
        for i in range(steps):
            function(i, *arguments)

    as_python(
        monkeypatch,
        wgmma_epilogue,
        unroll=unroll,
        store_pair=store_pair,
        load_pair=lambda array, place: (array[place], array[place + 1]),
    )
    monkeypatch.setattr(
        wgmma_epilogue.cuda,
        "local",
        SimpleNamespace(array=lambda count, dtype: np.full(count, np.nan, np.float32)),
        raising=False,
    )
    identity = (np.float32, np.float32, np.float32)
    store = wgmma_epilogue.column_store(256, identity)
    written = []
    for thread in range(128):
        warp, (g, t) = thread // WARP, divmod(thread % WARP, 4)
        row = 16 * warp + 2 * g
        sums = [
            tile[row + half, 8 * j + 2 * t + side]
            for j in range(32)
            for half in range(2)
            for side in range(2)
        ]
        whole = 16 * warp + C_BOX_LINES <= m
        pairs = []
        store(sums, 0, Counted(), row, 2 * t, 1, pitch, m, n, whole and pitch % 2 == 0, accumulate, 0)
        written.append(pairs)
        assert bool(pairs) == (whole and pitch % 2 == 0 and 2 * t < n)
    found = out.reshape(n, pitch).T[:m]
    np.testing.assert_array_equal(found, tile[:m, :n] + np.float32(0.5 * accumulate))
    inside = np.zeros((n, pitch), int)
    inside[:, :m] = 1
    np.testing.assert_array_equal(count.reshape(n, pitch), inside)
    if pitch % 8 == 0 and (m, n) == (64, 256):
        for first in range(0, 128, WARP // 2):
            for together in zip(*written[first : first + WARP // 2], strict=True):
                sectors = [place // 8 for place in together]
                assert all(sectors.count(sector) == 4 for sector in sectors), "sectors written in part"


def test_configurations_without_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="k side by side"):
        Config("tf32", "tf32", types.float32, n_major_b=True)
    with pytest.raises(ValueError, match="come from registers"):
        Config("f16", "f16", types.float16, m_major_a=True, c_by_columns=True)
    with pytest.raises(ValueError, match="written from registers"):
        Config("tf32", "tf32", types.float32, m_major_a=True, boxes=2)
