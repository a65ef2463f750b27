"""The kernel that counts whole documents, run lane by lane in Python, and beside the CPU twin."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from tests.kernels.gemm import lane_by_lane
from tests.kernels.gemm.lane_by_lane import (
    WARP,
    Block,
    _current,
    _Flat,
    byte_dot,
    byte_permute,
    byte_rotate,
)
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.histograms.host import count_host
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.kernels.numbers import ceil_div

if SIMULATOR:
    pytest.skip("the simulator runs no PTX", allow_module_level=True)


from tilewright.kernels.histograms import documents as module

BASE = 0x400
"""Where the table begins in the block's shared window: not at its beginning."""
DEVICE_FUNCTIONS = (
    "amount",
    "count_word",
    "count_byte",
    "weight_ahead",
    "exchanged",
    "other_case",
    "vote",
)


def _integer(bits: int, signed: bool, dtype: Any) -> Any:
    """A Numba integer type: called, it converts; as a dtype, it has one."""

    class Integer:
        def __new__(cls, value: Any) -> Any:
            kept = int(value) & ((1 << bits) - 1)
            return kept - (1 << bits) if signed and kept >> (bits - 1) else kept

    Integer.numpy = np.dtype(dtype)  # type: ignore[attr-defined]
    return Integer


def _from_all(value: Any) -> list[Any]:
    """What every lane of the warp has."""
    block, thread = _current.block, _current.thread
    block.operands[thread] = value
    block.pause(thread, "warp")
    values = list(block.operands[thread // WARP * WARP : (thread // WARP + 1) * WARP])
    block.pause(thread, "warp")  # everyone has them before the next replaces them
    return values


class _Cuda(lane_by_lane._Cuda):
    def __init__(self) -> None:
        super().__init__(np.uint32)
        self.local = types.SimpleNamespace(array=lambda count, dtype: [0] * count)
        self.atomic = types.SimpleNamespace(add=self._add)

    @staticmethod
    def _add(array: Any, index: Any, amount: int) -> None:
        array[int(index)] += amount

    @staticmethod
    def jit(**options: Any) -> Any:
        return lambda function: function

    @staticmethod
    def syncwarp() -> None:
        _current.block.pause(_current.thread, "warp")

    @staticmethod
    def shfl_xor_sync(mask: int, value: int, bits: int) -> Any:
        return _from_all(value)[_current.thread % WARP ^ bits]

    @staticmethod
    def ballot_sync(mask: int, flag: bool) -> int:
        return sum(bool(value) << lane for lane, value in enumerate(_from_all(flag)))

    @staticmethod
    def popc(bits: int) -> int:
        return bits.bit_count()


def _shared_add(address: int, amount: int) -> None:
    place, rest = divmod(address - BASE, 4)
    assert rest == 0
    assert place % WARP == _current.thread % WARP, "two lanes of a warp could meet in a bank"
    shared = _current.block.shared
    assert place % module.ROW_WORDS // WARP == _current.thread // WARP, "counted in another warp's table"
    (counter,) = (byte for byte in range(4) if amount == 1 << 8 * byte)
    assert (int(shared[place]) >> 8 * counter) & 0xFF < 0xFF, "a counter of eight bits overflows"
    shared[place] += np.uint32(amount)


def _load_vector(registers: list[int], first: int, array: Any, index: int) -> None:
    assert index % 4 == 0
    assert not isinstance(array, _Flat) or array._address % 16 == 0
    for word in range(4):
        registers[first + word] = int(array[index + word])


def _store_vector(array: np.ndarray, index: int, registers: list[int], first: int) -> None:
    count = 16 // array.itemsize
    assert index % count == 0
    array[index : index + count] = registers[first : first + count]


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DEVICE_FUNCTIONS:
        monkeypatch.setattr(module, name, getattr(module, name).py_func)
    for bits in (8, 32, 64):
        monkeypatch.setattr(module, f"uint{bits}", _integer(bits, False, f"u{bits // 8}"), raising=False)
        monkeypatch.setattr(module, f"int{bits}", _integer(bits, True, f"i{bits // 8}"), raising=False)
    monkeypatch.setattr(module, "cuda", _Cuda())
    monkeypatch.setattr(module, "global_array", lambda address, dtype: _Flat(address, dtype.numpy))
    for function in (byte_permute, byte_rotate, byte_dot):
        monkeypatch.setattr(module, function.__name__, function)
    for function in (_shared_add, _load_vector, _store_vector):
        monkeypatch.setattr(module, function.__name__[1:], function)
    monkeypatch.setattr(module, "shared_address", lambda array: BASE)


def counted(data: np.ndarray, offsets: np.ndarray, by: str, weight: int) -> np.ndarray:
    """The rows that the kernel writes, from slices of ``weight``; rows above `LARGE` are cleared before."""
    kind, documents = KINDS[by], len(offsets) - 1
    counts = np.full((documents, kind.bins), -1)
    counts[np.diff(offsets) > module.LARGE] = 0
    flat = counts.reshape(-1)
    total = int(offsets[-1] - offsets[0]) + documents * module.OVERHEAD
    kernel = module.source()
    for place in range(ceil_div(total, weight * 2 * module.WARPS)):
        shared = np.full(module.SHARED_NBYTES // 4, 0xDEADBEEF, np.uint32)
        block = Block(module.THREADS, shared, late=False)
        block.run(lambda: kernel(data.ctypes.data, offsets, weight, kind.code, kind.bins, flat), (place, 0))
        assert not shared.any(), "the table is not clear at the end"
    return counts


def check(data: np.ndarray, offsets: np.ndarray, by: str, weight: int) -> None:
    want = count_host(data, KINDS[by], offsets, int(offsets[0]), int(offsets[-1]))
    np.testing.assert_array_equal(counted(data, offsets, by, weight), want)


def letters(length: int, rng: np.random.Generator) -> np.ndarray:
    return rng.choice(np.frombuffer(b"AZazMm@[`{ \xe9\xff\x00e", np.uint8), length)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("by", "weight"),
    [
        ("byte", 700),
        ("ascii", 5000),
        ("letter", 700),
        *(
            pytest.param(by, w, marks=pytest.mark.slow)
            for by, w in (("byte", 5000), ("ascii", 700), ("letter", 5000))
        ),
    ],
)
def test_documents_of_many_lengths(
    by: str, weight: int, on_the_host: None, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Empty, unaligned, one vector, and longer than one slice; several large ones in a row."""
    monkeypatch.setattr(module, "LARGE", 600)
    monkeypatch.setattr(module, "OVERHEAD", 100)
    lengths = [0, 1, 15, 16, 17, 40, 511, 512, 600, 601, 0, 0, 1300, 2500, 3, 700, 600, 5, 0]
    offsets = np.cumsum([7, *lengths])
    data = letters(int(offsets[-1]) + 9, rng)
    check(data, offsets, by, weight)


@pytest.mark.parametrize(
    "value", [*(pytest.param(value, marks=pytest.mark.slow) for value in (0x00, 0xFF)), 0x65]
)
def test_no_counter_overflows(value: int, on_the_host: None) -> None:
    """One letter over and over, in as many bytes as fill a lane's counter, and in more; nearly one letter."""
    chunk = module.GROUPS * module.GROUP * module.HALF * module.VECTOR
    offsets = np.cumsum([3, chunk, chunk + 13 + 15, chunk + 13, 2 * chunk + 31])
    data = np.full(offsets[-1], value, np.uint8)
    data[offsets[2] + 13 : offsets[2] + 13 + chunk : 16 * module.HALF] ^= (
        0x80  # in a first word of every vector
    )
    check(data, offsets, "byte", 1 << 20)


@pytest.mark.sample(2)
@pytest.mark.parametrize("spoiled", [(0, 0), (0, 4), (1, 9), (2, 4), (5, 8), (3, 15)])
def test_two_bytes_that_differ_hide_no_overflow(
    spoiled: tuple[int, int], on_the_host: None, rng: np.random.Generator
) -> None:
    """A lane that meets 256 bytes alike, its byte ahead and its byte behind among them, and up to two others in its
    first vector; the other lanes meet noise.
    """
    chunk = module.GROUPS * module.GROUP * module.HALF * module.VECTOR
    held = rng.integers(0, 256, chunk + 64, dtype=np.uint8)
    start = -held.ctypes.data % module.VECTOR + module.VECTOR
    data = held[
        start - 2 : start + chunk + 2
    ]  # two bytes ahead of the first whole vector, two behind the last
    vectors = data[2:-2].reshape(-1, module.VECTOR)
    vectors[:: module.HALF] = 7
    data[0] = data[-2] = 7
    vectors[0, list(spoiled)] = 8
    check(data, np.array([0, len(data)]), "byte", 1 << 20)


def test_every_byte_value(on_the_host: None, rng: np.random.Generator) -> None:
    data = np.concatenate([np.arange(256, dtype=np.uint8), rng.integers(0, 256, 3000, dtype=np.uint8)])
    check(data, np.array([0, 256, 3256]), "byte", 1 << 20)


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", [0, *(pytest.param(p, marks=pytest.mark.slow) for p in (5, 2000)), -1])
def test_one_byte_above_127(place: int, on_the_host: None) -> None:
    """The rows of those bytes are left alone but where one occurs: ahead of the vectors, in one, behind them."""
    data = np.full(8192 + 3, ord("e"), np.uint8)
    data[3:4099][place] = 0x80
    for by in ("byte", "ascii"):
        check(data, np.array([3, 4099, 8195]), by, 1 << 20)


@pytest.mark.sample(1)
@pytest.mark.parametrize("documents", [1, 17, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 40))])
def test_a_slice_finds_its_first_document(
    documents: int, on_the_host: None, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Sixteen lanes search at once: documents of one length, and of very different ones."""
    monkeypatch.setattr(module, "OVERHEAD", 16)
    for lengths in (np.full(documents, 33), rng.integers(0, 3, documents) * 77):
        offsets = np.cumsum([5, *lengths])
        check(letters(int(offsets[-1]), rng), offsets, "byte", 60)


def test_a_kind_with_other_bins_is_refused() -> None:
    with pytest.raises(ValueError, match="byte, ascii and letter"):
        module.launch_slices(None, np.zeros(2, np.int64), 0, KINDS["bigram"], None, 0)
