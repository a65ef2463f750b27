"""The passes over operands, thread by thread in Python: every layout, ragged edges, and where bytes go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tilewright.kernels.bfloat16 import dtype_name
from tilewright.kernels.float8 import PTX_KINDS, to_float32
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.numbers import WARP

if SIMULATOR:
    pytest.skip("the simulator has no inline PTX", allow_module_level=True)

from tests.kernels.gemm import lane_by_lane
from tilewright.kernels.gemm.exact import byte_planes, residues, scaled_residues
from tilewright.kernels.gemm.exact.residues import PLAN_KIND
from tilewright.kernels.gemm.hopper import float_operand, float_planes, line_powers, wgmma
from tilewright.kernels.gemm.hopper.wgmma_config import LOW_SHIFT

SENTINEL = 0xA5


class Memory:
    """Host memory at a multiple of 128 bytes, which may be read and written nowhere else."""

    def __init__(self, nbytes: int) -> None:
        held = np.full(nbytes + 128, SENTINEL, np.uint8)
        start = -held.ctypes.data % 128
        self.bytes = held[start : start + nbytes]
        self.address = self.bytes.ctypes.data

    def holds(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.bytes.size


@pytest.fixture
def memories() -> list[Memory]:
    """What a kernel may touch."""
    return []


@pytest.fixture
def shared_accesses(memories: list[Memory], monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, int]]]:
    """Python in the place of the device; and for each thread, its accesses to shared memory: what, which word."""
    types = SimpleNamespace(**vars(lane_by_lane.INTEGER_TYPES), float32=np.float32)
    seen: list[list[tuple[str, int]]] = [[] for _ in range(float_planes.THREADS)]

    class Flat:
        def __init__(self, address: int, kind: Any) -> None:
            self.address, self.kind = int(address), kind
            self.dtype = kind.dtype if isinstance(kind, lane_by_lane.Integer) else np.dtype(kind)

        def place(self, index: Any, count: int = 1) -> np.ndarray:
            assert int(index) == index
            nbytes = count * self.dtype.itemsize
            address = self.address + int(index) * self.dtype.itemsize
            assert count == 1 or address % 16 == 0, "a vector that is not aligned"
            memory = next((memory for memory in memories if memory.holds(address, nbytes)), None)
            assert memory is not None, "an access outside of the matrices"
            start = address - memory.address
            return memory.bytes[start : start + nbytes].view(self.dtype)

        def __getitem__(self, index: Any) -> Any:
            value = self.place(index)[0]
            return int(value) if isinstance(self.kind, lane_by_lane.Integer) else value

        def __setitem__(self, index: Any, value: Any) -> None:
            self.place(index)[0] = value

    def load_vector(registers: Any, first: int, array: Any, index: Any) -> None:
        if isinstance(array, Flat):
            found = array.place(index, 4)
        else:
            assert index % 4 == 0
            seen[lane_by_lane._current.thread].append(("load", index))
            found = array.words[index : index + 4]
        for lane in range(4):
            registers[first + lane] = int(found[lane]) if found.dtype.kind == "u" else found[lane]

    def store_vector(array: Any, index: Any, registers: Any, first: int) -> None:
        if isinstance(array, Flat):
            array.place(index, 4)[:] = registers[first : first + 4]
        else:
            assert index % 4 == 0
            seen[lane_by_lane._current.thread].append(("store", index))
            array.words[index : index + 4] = registers[first : first + 4]

    class Shared:
        """The block's shared memory as words."""

        def __init__(self, count: int, dtype: Any, alignment: int) -> None:
            self.words = lane_by_lane._current.block.shared
            assert (count, dtype, alignment) == (self.words.size, types.uint32, 16)

        def __setitem__(self, index: int, word: int) -> None:
            seen[lane_by_lane._current.thread].append(("store", index))
            self.words[index] = word

    def byte_permute(low: int, high: int, selector: int) -> int:
        data = low.to_bytes(4, "little") + high.to_bytes(4, "little")
        return int.from_bytes(bytes(data[selector >> 4 * i & 15] for i in range(4)), "little")

    def float_bits(value: Any) -> int:
        return int(np.float32(value).view(np.uint32))

    def bits_float(bits: int) -> np.float32:
        return np.uint32(bits).view(np.float32)

    instructions = SimpleNamespace(
        unroll=lane_by_lane.INTEGER_PTX.unroll,
        global_array=Flat,
        load_vector=load_vector,
        store_vector=store_vector,
        float_bits=float_bits,
        bits_float=bits_float,
        word_float=bits_float,
        half_bits=lambda value: int(np.float16(value).view(np.uint16)),
        half_value=lambda word: np.float32(np.uint16(word).view(np.float16)),
        tf32_bits=lambda value: (float_bits(value) + 0x1000) & 0xFFFFE000,
        byte_permute=byte_permute,
    )
    cuda = lane_by_lane._IntegerCuda()
    cuda.shared = SimpleNamespace(array=Shared)
    for module in (float_planes, byte_planes):
        monkeypatch.setattr(module, "cuda", cuda)
        lane_by_lane.replace_instructions(monkeypatch, module, instructions)
        monkeypatch.setattr(module, "types", types)
        monkeypatch.setattr(module, "cluster_tile", wgmma.cluster_tile.py_func)
    monkeypatch.setattr(byte_planes, "turn_words", byte_planes.turn_words.py_func)
    for name in ("bfloat16_bits", "bfloat16_or_special", "half_of_e4m3", "is_finite", "sign_bits"):
        monkeypatch.setattr(float_planes, name, getattr(float_planes, name).py_func)
    return seen


def held(values: np.ndarray, pitch: int, shift: int = 0) -> tuple[Memory, int]:
    """Rows ``pitch`` elements apart from ``shift`` elements behind an aligned address on; the address."""
    rows, columns = values.shape
    memory = Memory((shift + (rows - 1) * pitch + columns) * values.itemsize)
    flat = memory.bytes.view(values.dtype)
    for row in range(rows):
        start = shift + row * pitch
        flat[start : start + columns] = values[row]
    return memory, memory.address + shift * values.itemsize


def tf32(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def lines_of(
    target: Memory, lines: int, width: int, line_nbytes: int, dtype: Any, plane: int = 0
) -> np.ndarray:
    """A plane's lines; nothing is written more than three elements behind them."""
    whole = target.bytes.reshape(-1, line_nbytes)[plane * lines : (plane + 1) * lines]
    written = (width + 3) // 4 * 4 * np.dtype(dtype).itemsize
    assert (whole[:, written:] == SENTINEL).all(), "more than a quad written behind a line"
    return np.ascontiguousarray(whole[:, : width * np.dtype(dtype).itemsize]).view(dtype)


def assert_no_bank_conflicts(accesses: list[list[tuple[str, int]]], together: int, nbytes: int) -> None:
    """What so many neighbouring threads access at once, ``nbytes`` each, fills a line of all banks."""
    words = nbytes // 4
    for first in range(0, len(accesses), together):
        for group in zip(*accesses[first : first + together], strict=True):
            assert len({what for what, _ in group}) == 1
            assert len({word // words % (32 // words) for _, word in group}) == together, "a bank conflict"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("lines", "width", "pitch", "shift"),
    [
        (128, 64, 128, 0),  # whole tiles of vectors
        (128, 64, 132, 4),
        (64, 64, 65, 0),  # rows that no vector access can use
        (64, 128, 64, 3),
        (70, 67, 72, 0),  # ragged both ways
        (1, 5, 1, 1),
    ],
)
def test_turned(
    lines: int,
    width: int,
    pitch: int,
    shift: int,
    memories: list[Memory],
    shared_accesses: list[list[tuple[str, int]]],
    rng: np.random.Generator,
) -> None:
    source = rng.standard_normal((width, lines)).astype(np.float32)
    memory, address = held(source, pitch, shift)
    line_nbytes = float_operand.line_nbytes(width, "tf32")
    target = Memory(lines * line_nbytes)
    memories += [memory, target]
    side = float_planes.TURN_SIDE
    blocks = -(-lines // side) * -(-width // side)
    arguments = (address, 1, pitch, lines, width, target.address, line_nbytes // 4, 0, 0, 0, 1, 0)
    lane_by_lane.run(
        float_planes.turn_function(),
        (blocks, 1),
        float_planes.THREADS,
        4 * side * side,
        np.uint32,
        arguments,
        late=False,
    )
    found = lines_of(target, lines, width, line_nbytes, np.uint32)
    np.testing.assert_array_equal(found, tf32(source.T.copy()))
    assert {len(accesses) for accesses in shared_accesses} == {8 * blocks}
    assert_no_bank_conflicts(shared_accesses, together=8, nbytes=16)


BYTE_TILE = byte_planes.TURN_SIDE


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("lines", "depth", "k_stride", "shift"),
    [
        (2 * BYTE_TILE, BYTE_TILE, 2 * BYTE_TILE + 16, 16),
        (BYTE_TILE + 5, BYTE_TILE + 1, BYTE_TILE + 16, 0),  # whole and ragged tiles
        (3, 70, 16, 0),
    ],
)
def test_bytes_turned(
    lines: int,
    depth: int,
    k_stride: int,
    shift: int,
    memories: list[Memory],
    shared_accesses: list[list[tuple[str, int]]],
    rng: np.random.Generator,
) -> None:
    source = rng.integers(0, 256, (depth, lines)).astype(np.uint8)
    memory, address = held(source, k_stride, shift)
    line_nbytes = (depth + 127) // 128 * 128
    target = Memory(lines * line_nbytes)
    memories += [memory, target]
    blocks = -(-lines // BYTE_TILE) * -(-depth // BYTE_TILE)
    arguments = (address, 1, k_stride, lines, depth, target.address, line_nbytes // 4, 0, 0, 0)
    function = byte_planes.turn_function()
    lane_by_lane.run(
        function, (blocks, 1), byte_planes.THREADS, BYTE_TILE**2, np.uint32, arguments, late=False
    )
    written = target.bytes.reshape(lines, line_nbytes)
    np.testing.assert_array_equal(written[:, :depth], source.T)
    assert (written[:, (depth + 15) // 16 * 16 :] == SENTINEL).all()
    if lines % BYTE_TILE == depth % BYTE_TILE == 0:
        stores, loads = (
            [[access for access in accesses if access[0] == what] for accesses in shared_accesses]
            for what in ("store", "load")
        )
        assert {len(accesses) for accesses in stores} == {16 * blocks}
        assert_no_bank_conflicts(stores, together=WARP, nbytes=4)
        assert_no_bank_conflicts(loads, together=8, nbytes=16)


def test_a_band_of_tiles_ends_ragged() -> None:
    """Blocks of the turning pass cover every tile once, in a band that is not full too."""
    tiles_down, tiles_across = 2 * float_planes.TURN_BAND + 3, 5
    visited = {
        wgmma.cluster_tile.py_func(i, tiles_down, tiles_across, float_planes.TURN_BAND)
        for i in range(tiles_down * tiles_across)
    }
    assert visited == {(i, j) for i in range(tiles_down) for j in range(tiles_across)}


LAYOUTS = [
    pytest.param(3, 8, 8, 1, 0, id="vectors, one segment"),
    pytest.param(2, float_planes.SEGMENT + 20, float_planes.SEGMENT + 24, 1, 4, id="vectors, two segments"),
    pytest.param(2, 1030, 1032, 1, 0, id="ragged width"),
    pytest.param(3, 100, 101, 1, 0, id="odd rows"),
    pytest.param(3, 100, 104, 1, 2, id="begins between vectors"),
    pytest.param(3, 50, 120, 2, 0, id="nothing side by side"),
]


def run_pass(
    form: str,
    source: np.ndarray,
    layout: tuple[int, int, int],
    memories: list[Memory],
    blocks: int,
    plan: int = 0,
    flags: int = 0,
    powers: int = 0,
) -> tuple[Memory, int]:
    """The target and its bytes a line, of ``source`` held as (pitch, stride, shift) says."""
    lines, width = source.shape
    pitch, stride, shift = layout
    spread = np.zeros((lines, (width - 1) * stride + 1), source.dtype)
    spread[:, ::stride] = source
    memory, address = held(spread, pitch, shift)
    line_nbytes = float_operand.line_nbytes(width, form)
    itemsize = float_planes.itemsize(form)
    target = Memory({"split": 3, "halves": 2}.get(form, 1) * lines * line_nbytes)
    memories += [memory, target]
    arguments = (
        address,
        pitch,
        stride,
        lines,
        width,
        target.address,
        line_nbytes // itemsize,
        lines * line_nbytes // itemsize,
        plan,
        flags,
        1,
        powers,
    )
    function = float_planes.pass_function(form)
    lane_by_lane.run(function, (blocks, 1), float_planes.THREADS, 0, np.uint32, arguments, late=False)
    return target, line_nbytes


@pytest.mark.usefixtures("shared_accesses")
@pytest.mark.parametrize("kind", PTX_KINDS, ids=dtype_name)
@pytest.mark.parametrize(
    ("width", "pitch", "stride", "shift"),
    [(256, 260, 1, 4), (255, 259, 1, 0), (256, 256, 1, 2), (64, 200, 2, 0)],
    ids=["by words", "odd rows", "begins between words", "nothing side by side"],
)
def test_float8_is_widened(
    kind: np.dtype, width: int, pitch: int, stride: int, shift: int, memories: list[Memory]
) -> None:
    source = np.roll(np.arange(256, dtype=np.uint8), 17)[None, :width].repeat(3, 0)
    target, line_nbytes = run_pass(PTX_KINDS[kind], source, (pitch, stride, shift), memories, blocks=2)
    found = lines_of(target, 3, width, line_nbytes, np.float16)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(found, to_float32(source.view(kind)).astype(np.float16))
    np.testing.assert_array_equal(np.signbit(found)[found == 0], (source >= 128)[found == 0])


@pytest.mark.usefixtures("shared_accesses")
@pytest.mark.parametrize(
    ("lines", "width", "pitch", "stride", "shift", "form"),
    [
        # In every run each layout in two of the forms, by turns.
        pytest.param(
            *layout.values, form, id=f"{layout.id}-{form}", marks=pytest.mark.slow if (i + j) % 2 else ()
        )
        for i, layout in enumerate(LAYOUTS)
        for j, form in enumerate(["bf16", "f16", "tf32", "copy"])
    ],
)
def test_rounded(
    form: str,
    lines: int,
    width: int,
    pitch: int,
    stride: int,
    shift: int,
    memories: list[Memory],
    rng: np.random.Generator,
) -> None:
    source = rng.standard_normal((lines, width)).astype(np.float32)
    if form == "copy":
        source = source.astype(np.float16)
    target, line_nbytes = run_pass(form, source, (pitch, stride, shift), memories, blocks=2)
    expected = {
        "bf16": bfloat16,
        "f16": lambda values: values.astype(np.float16).view(np.uint16),
        "tf32": tf32,
        "copy": lambda values: values.view(np.uint16),
    }[form](source)
    found = lines_of(target, lines, width, line_nbytes, expected.dtype)
    np.testing.assert_array_equal(found, expected)


def planned(kind: int) -> Memory:
    """A plan that says which parts numbers are split into."""
    plan = Memory(256)
    plan.bytes[:] = 0
    plan.bytes.view(np.int64)[float_planes.PARTS_PLAN + PLAN_KIND] = kind
    return plan


@pytest.mark.sample(2)
@pytest.mark.usefixtures("shared_accesses")
@pytest.mark.parametrize(("lines", "width", "pitch", "stride", "shift"), LAYOUTS)
def test_halves(
    lines: int,
    width: int,
    pitch: int,
    stride: int,
    shift: int,
    memories: list[Memory],
    rng: np.random.Generator,
) -> None:
    """Two float16 parts of what is scaled hold it to within 2**-23, or 2**-50 of the line's largest; what is not
    finite is as in `test_split`."""
    source = (rng.standard_normal((lines, width)) * 1e-9).astype(np.float32)
    hard = (
        np.float32([1, -1.00000024, 1.00000012, 1.99999988])
        * np.float32(2.0) ** np.arange(-33, 1, dtype="f4")[:, None]
    )
    some = min(hard.size, width - 4)
    source[0, 4 : 4 + some] = np.abs(source[0]).max() * hard.ravel()[:some] / 2
    source[1, width - 1], source[1, 2] = np.inf, np.nan
    finite = np.where(np.isfinite(source), source, np.float32(0))
    tops = np.floor(np.log2(np.abs(finite).max(axis=1))).astype(np.int32)
    plan, flags, powers = planned(float_planes.HALVES), Memory(lines), Memory(4 * lines)
    flags.bytes[:] = 0
    powers.bytes.view(np.int32)[:] = line_powers.TOP - tops
    memories += [plan, flags, powers]
    target, line_nbytes = run_pass(
        "halves", source, (pitch, stride, shift), memories, 3, plan.address, flags.address, powers.address
    )
    high, low = (
        lines_of(target, lines, width, line_nbytes, np.float16, plane).astype(np.float64)
        for plane in range(2)
    )
    scaled = finite * 2.0 ** (line_powers.TOP - tops[:, None])
    np.testing.assert_array_equal(high, scaled.astype(np.float16))
    allowed = np.maximum(2.0**-23 * np.abs(scaled), 2.0 ** (line_powers.TOP - 50))
    assert (np.abs(high + low * 2.0**-LOW_SHIFT - scaled) <= allowed).all()
    assert flags.bytes.tolist() == [line == 1 for line in range(lines)]
    assert plan.bytes.view(np.int64)[PLAN_KIND] == float_planes.NONFINITE


@pytest.mark.parametrize(("form", "kind"), [("halves", float_planes.THIRDS), ("split", float_planes.HALVES)])
@pytest.mark.usefixtures("shared_accesses")
def test_parts_that_are_not_wanted_are_not_made(form: str, kind: int, memories: list[Memory]) -> None:
    plan, flags, powers = planned(kind), Memory(3), Memory(12)
    memories += [plan, flags, powers]
    target, _ = run_pass(
        form,
        np.ones((3, 8), np.float32),
        (8, 1, 0),
        memories,
        1,
        plan.address,
        flags.address,
        powers.address,
    )
    assert (target.bytes == SENTINEL).all()


class Ranging(lane_by_lane._IntegerCuda):
    """The device for passes over lines: with atomic operations, one thread at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = SimpleNamespace(
            array=lambda shape, dtype: lane_by_lane._current.block.shared.reshape(shape)
        )
        self.atomic = SimpleNamespace(max=self._most, min=self._least)

    @staticmethod
    def _most(array: Any, index: int, value: int) -> None:
        array[index] = max(array[index], value)

    @staticmethod
    def _least(array: Any, index: int, value: int) -> None:
        array[index] = min(array[index], value)

    def grid(self, dimensions: int) -> int:
        return lane_by_lane._current.place[0] * line_powers.THREADS + lane_by_lane._current.thread

    def gridsize(self, dimensions: int) -> int:
        return lane_by_lane._current.grid[0] * line_powers.THREADS


@pytest.mark.parametrize("turned", [False, True], ids=["lines of k", "lines side by side"])
@pytest.mark.parametrize("wide", [None, "apart", "small"])
def test_powers_of_lines(
    turned: bool, wide: str | None, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Each brings its line's largest number to [2**14, 2**15); where one cannot, the plan says so."""
    lines, depth = 5, 2500
    source = (rng.standard_normal((lines, depth)) * 10.0 ** np.arange(-8, 12, 4)[:, None]).astype(np.float32)
    source[np.abs(source) < 1e-4 * np.abs(source).max(axis=1, keepdims=True)] = 0
    source[0, 7], source[1, 9], source[2] = np.inf, np.nan, 0
    source[3, 4] = (
        np.abs(source[3]).max() * np.float32(2.0**-line_powers.MOST_APART) * 2
    )  # as small as may be
    if wide == "apart":
        source[3, 5] = source[3, 4] / 4
    elif wide == "small":
        source[0] *= np.float32(2.0**-80)
    held_as = np.ascontiguousarray(source.T) if turned else source
    most, least, powers, plan = (np.zeros(size, np.int32) for size in (lines, lines, lines, 64))
    strides = (1, lines) if turned else (depth, 1)
    types = SimpleNamespace(**lane_by_lane.INTEGER_TYPES.__dict__)
    monkeypatch.setattr(line_powers, "cuda", Ranging())
    monkeypatch.setattr(line_powers, "types", types)
    instructions = SimpleNamespace(
        global_array=lane_by_lane._FlatIntegers,
        bits_float=lambda bits: np.uint32(bits).view(np.float32),
    )
    lane_by_lane.replace_instructions(monkeypatch, line_powers, instructions)

    def run(function: Any, grid: tuple[int, int], *arguments: Any) -> None:
        given = tuple(each.ctypes.data if isinstance(each, np.ndarray) else each for each in arguments)
        nbytes = 2 * line_powers.THREADS // WARP * 4
        lane_by_lane.run(function, grid, line_powers.THREADS, nbytes, np.int32, given, late=False)

    run(line_powers.begin_function(), (1, 1), plan, most, least, lines)
    grid = (1, -(-depth // line_powers.DEPTH)) if turned else (lines, 1)
    run(line_powers.range_function(turned=turned), grid, held_as, *strides, lines, depth, most, least)
    run(line_powers.power_function(), (1, 1), plan, most, least, powers, lines)
    finite = np.abs(np.where(np.isfinite(source), source, 0))
    np.testing.assert_array_equal(most.view(np.float32), finite.max(axis=1))
    some = [0, 1, 3, 4]
    smallest = np.where(finite > 0, finite, np.inf).min(axis=1)
    np.testing.assert_array_equal(least.view(np.float32)[some], smallest[some])
    kind = plan.view(np.int64)[float_planes.PARTS_PLAN + PLAN_KIND]
    assert kind == (float_planes.HALVES if wide is None else float_planes.THIRDS)
    if wide is None:
        scaled = finite.max(axis=1) * 2.0**powers
        assert ((scaled[some] >= 2.0**14) & (scaled[some] < 2.0**15)).all()
        assert powers[2] == 0


@pytest.mark.sample(2)
@pytest.mark.usefixtures("shared_accesses")
@pytest.mark.parametrize(("lines", "width", "pitch", "stride", "shift"), LAYOUTS)
def test_split(
    lines: int,
    width: int,
    pitch: int,
    stride: int,
    shift: int,
    memories: list[Memory],
    rng: np.random.Generator,
) -> None:
    """Three parts add up to the number; what is not finite is zero, its line flagged, and the plan says so."""
    source = rng.standard_normal((lines, width)).astype(np.float32)
    source[1, width - 1], source[1, 2] = np.inf, np.nan
    plan, flags = planned(float_planes.THIRDS), Memory(lines)
    flags.bytes[:] = 0
    memories += [plan, flags]
    target, line_nbytes = run_pass(
        "split", source, (pitch, stride, shift), memories, 3, plan.address, flags.address
    )
    parts = [widened(lines_of(target, lines, width, line_nbytes, np.uint16, plane)) for plane in range(3)]
    finite = np.where(np.isfinite(source), source, np.float32(0))
    np.testing.assert_array_equal(parts[0], widened(bfloat16(finite)))
    np.testing.assert_array_equal(sum(part.astype(np.float64) for part in parts), finite)
    assert flags.bytes.tolist() == [line == 1 for line in range(lines)]
    assert plan.bytes.view(np.int64)[PLAN_KIND] == float_planes.NONFINITE


def python_residues(monkeypatch: pytest.MonkeyPatch, arrays: dict[int, np.ndarray]) -> None:
    """Python in the place of the device for the pass that makes residues: one thread at a time."""
    types = SimpleNamespace(**vars(lane_by_lane.INTEGER_TYPES), float32=np.float32, float64=np.float64)

    def dot_of_bytes(word: int, weights: int, added: int) -> int:
        signed = np.array([weights], np.uint32).view(np.int8)
        return (sum((word >> 8 * e & 255) * int(signed[e]) for e in range(4)) + int(added)) % (1 << 32)

    def permute(left: int, right: int, selector: int) -> int:
        held = left % (1 << 32) | right << 32
        return sum((held >> 8 * (selector >> 4 * e & 7) & 255) << 8 * e for e in range(4))

    stand_ins = {
        "types": types,
        "cuda": SimpleNamespace(
            jit=lambda **options: lambda function: function,
            local=SimpleNamespace(array=lambda count, kind: [0] * count),
            fma=lambda x, y, z: np.float32(np.float64(x) * np.float64(y) + np.float64(z)),
            blockIdx=SimpleNamespace(x=0),
            gridDim=SimpleNamespace(x=1),
            threadIdx=SimpleNamespace(x=0),
        ),
        "memory": SimpleNamespace(global_array=lambda address, kind: arrays[int(address)]),
        "integers": SimpleNamespace(dot_of_bytes=dot_of_bytes, byte_permute=permute),
        "floats": SimpleNamespace(
            nearest_wide=lambda x: int(np.rint(x)),
            subtract32=lambda x, y: np.float32(x - y),
            word_float=lambda word: np.array([word], np.uint32).view(np.float32)[0],
            float_word=lambda x: int(np.array([x], np.float32).view(np.uint32)[0]),
        ),
        "power_of_two": lambda exponent: 2.0**exponent,
        "line_factors": byte_planes.line_factors.py_func,
        "_scaled": byte_planes._scaled.py_func,
        "_same": byte_planes._same.py_func,
        "THREADS": 1,
    }
    tables = byte_planes.residue_table().astype(object), byte_planes.inverse_table()
    monkeypatch.setattr(byte_planes, "residue_table", lambda: tables[0])
    monkeypatch.setattr(byte_planes, "inverse_table", lambda: tables[1])
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(byte_planes, name, stand_in)


@pytest.mark.parametrize(("dtype", "count"), [("int64", 18), ("uint32", 10), ("float64", 14), ("float32", 7)])
@pytest.mark.parametrize("side", [0, 1])
def test_residues_are_those_of_the_integers(
    dtype: str, count: int, side: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, depth, shifts = 3, 10, np.array([5, -3, 60])
    if dtype.startswith("float"):
        values = rng.standard_normal((lines, depth)).astype(dtype)
        whole = scaled_residues.integers(values.astype(np.float64), shifts)
    else:
        info = np.iinfo(dtype)
        values = rng.integers(info.min, info.max, (lines, depth), dtype, endpoint=True)
        whole = values.astype(np.int64)
    line_words = 4
    words = np.zeros(count * lines * line_words, np.uint32)
    plan = np.zeros(residues.PLAN_LENGTH, object)
    plan[residues.PLAN_KIND], plan[residues.PLAN_PLANES] = residues.RESIDUES, count
    plan[residues.PLAN_SHIFTS_A], plan[residues.PLAN_SHIFTS_B] = 4, 5
    arrays = {0: plan, 1: values.reshape(-1), 2: words, 3: plan, 4: shifts, 5: shifts}
    python_residues(monkeypatch, arrays)
    run = byte_planes.pass_function(np.dtype(dtype), turned=False, residues=True)
    run(1, depth, 1, lines, depth, 2, line_words, lines * line_words, 3, side)
    found = words.view(np.uint8).reshape(count, lines, 4 * line_words)[:, :, :depth].view(np.int8)
    for plane, modulus in enumerate(residues.modulus_set(count).moduli):
        scale = modulus.weight if side == 0 else 1
        for got, wanted in zip(found[plane].reshape(-1), whole.reshape(-1), strict=True):
            assert (int(got) - scale * int(wanted)) % modulus.p == 0
