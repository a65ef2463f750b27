"""The kernel that counts Unicode characters, run lane by lane in Python, beside Python's own decoder."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest

from tests.kernels.gemm import lane_by_lane
from tests.kernels.gemm.lane_by_lane import INTEGER_PTX, INTEGER_TYPES, _current, _FlatIntegers, _IntegerCuda
from tests.kernels.histograms.test_histogram import EDGES, MALFORMED, WELL_FORMED
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.histograms import tokens

if SIMULATOR:
    pytest.skip("the simulator runs no PTX", allow_module_level=True)

from tilewright.kernels.histograms import wide as module

THREADS = 160
"""A block here: more than there are rows to add up, no more so that a lane has several vectors."""
DEVICE_FUNCTIONS = (
    "character_at",
    "characters_in",
    "clear",
    "count_byte",
    "count_character",
    "count_code",
    "count_value",
    "count_word",
    "counted",
    "decoded",
    "empty_if_full",
    "four_bytes",
    "one_of",
    "place_of",
    "plane",
    "word_ahead",
    "word_behind",
)
PIECES = MALFORMED + [word.encode("utf-8", "surrogatepass") for word in WELL_FORMED] + [b"\xef\xbf\xbd", b" "]


class _Cuda(_IntegerCuda):
    def __init__(self) -> None:
        super().__init__()
        self.atomic = SimpleNamespace(add=self._add)

    @staticmethod
    def _add(array: Any, index: Any, amount: int) -> None:
        array[int(index)] += amount

    @staticmethod
    def popc(bits: int) -> int:
        return bits.bit_count()

    @staticmethod
    def ffs(bits: int) -> int:
        return (bits & -bits).bit_length()


def _shared_add(address: int, amount: int) -> None:
    _shared_fetch_add(address, amount)


def _shared_fetch_add(address: int, amount: int) -> int:
    assert address % 4 == 0
    before = int(_current.block.shared[address // 4])
    _current.block.shared[address // 4] = (before + amount) % (1 << 32)
    return before


def _shared_fetch_and(address: int, mask: int) -> int:
    before = int(_current.block.shared[address // 4])
    _current.block.shared[address // 4] = before & mask % (1 << 32)
    return before


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = module.narrow
    for name in DEVICE_FUNCTIONS:
        monkeypatch.setattr(module, name, getattr(module, name).py_func)
    for name in ("column_of", "row_sum"):
        monkeypatch.setattr(narrow, name, getattr(narrow, name).py_func)
    for where in (module, narrow):
        for name in ("int32", "int64", "uint8", "uint32", "uint64"):
            monkeypatch.setattr(where, name, getattr(INTEGER_TYPES, name), raising=False)
        monkeypatch.setattr(where, "shared_add", _shared_add)
    monkeypatch.setattr(module, "cuda", _Cuda())
    monkeypatch.setattr(module, "THREADS", THREADS)
    for function in (_shared_fetch_add, _shared_fetch_and):
        monkeypatch.setattr(module, function.__name__[1:], function)
    for function in (lane_by_lane.byte_dot, lane_by_lane.funnel_right):
        monkeypatch.setattr(module, function.__name__, function)
    monkeypatch.setattr(module, "load_vector", INTEGER_PTX.load_vector)
    monkeypatch.setattr(module, "shared_address", INTEGER_PTX.shared_address)


def counted(
    data: np.ndarray, pieces: list[tuple[int, int]], lo: int, hi: int, monkeypatch: pytest.MonkeyPatch
) -> dict[int, int]:
    """What the kernel counts in the ``pieces`` of the document ``data[lo:hi]``, each launched by itself."""
    counts = np.zeros(0x110000, np.int64)
    first, last = data.ctypes.data + lo, data.ctypes.data + hi

    class Document(_FlatIntegers):
        def __getitem__(self, index: Any) -> int:
            at = self._address + int(index) * self._dtype.itemsize
            assert first <= at, "read what lies ahead of the text"
            assert at + self._dtype.itemsize <= last, "read what lies behind the text"
            return super().__getitem__(index)

    monkeypatch.setattr(module, "global_array", Document)
    for start, stop in pieces:
        lane_by_lane.run(
            module.codepoint_source(),
            (1 + len(pieces) // 2, 1),
            THREADS,
            module.CODEPOINT_NBYTES,
            np.uint32,
            (data.ctypes.data, start, stop, lo, hi, counts),
            late=False,
        )
    return {int(code): int(counts[code]) for code in np.flatnonzero(counts)}


def expected(text: bytes) -> Counter[int]:
    return Counter(map(ord, text.decode("utf-8", errors="replace")))


def placed(text: bytes, shift: int) -> tuple[np.ndarray, int]:
    """The text, beginning ``shift`` bytes behind an aligned address, in other characters' continuations."""
    held = np.full(len(text) + 64, 0x90, np.uint8)
    lo = -held.ctypes.data % 16 + 16 + shift
    held[lo : lo + len(text)] = np.frombuffer(text, np.uint8)
    return held, lo


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "shift"),
    [
        # Edges of the rules at random stand for noise, which seldom meets one.
        pytest.param(kind, shift, marks=() if shift == quick else pytest.mark.slow)
        for kind, quick in (("pieces", 0), ("noise", None), ("edges", 13), ("Chinese", 0))
        for shift in (0, 1, 13)
    ],
)
def test_characters_of_a_document(
    kind: str, shift: int, on_the_host: None, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than two vectors for each lane, with parts of characters at both ends; and cut in three."""
    text = {
        "pieces": b"".join(PIECES[i] for i in rng.integers(0, len(PIECES), 1500)),
        "noise": rng.bytes(6500),
        "edges": rng.choice(np.frombuffer(EDGES, np.uint8), 6500).tobytes(),
        "Chinese": ("日本語テキスト漢字" * 250).encode()[1:-1],
    }[kind]
    data, lo = placed(text, shift)
    hi = lo + len(text)
    assert counted(data, [(lo, hi)], lo, hi, monkeypatch) == expected(text)
    cuts = [lo, lo + 777, lo + 834, hi]
    assert counted(data, list(itertools.pairwise(cuts)), lo, hi, monkeypatch) == expected(text)


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "length", [16, 35, *(pytest.param(length, marks=pytest.mark.slow) for length in (17, 18, 19, 20, 32))]
)
def test_characters_at_the_ends_of_vectors(
    length: int, on_the_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The document ends in or soon behind a vector, with a character that is whole, or lacks bytes."""
    for ending in ("é", "€", "😀"):
        for missing in (0, 1):
            encoded = ending.encode()[: len(ending.encode()) - missing]
            text = b"\x80" + b"e" * (length - 1 - len(encoded)) + encoded
            data, lo = placed(text, 0)
            assert counted(data, [(lo, lo + length)], lo, lo + length, monkeypatch) == expected(text)


@numba.njit
def _reference(contexts: np.ndarray) -> np.ndarray:
    """The masks that `characters_in` should give, from one character at a time."""
    character_at = _character_at
    masks = np.zeros((len(contexts), 2), np.int64)
    for row in range(len(contexts)):
        for place in range(16):
            found = character_at(contexts[row], place + 4, 0, 24)
            if found != 0 and contexts[row, place + 4] >= 0x80:
                malformed = found & 0x1FFFFF == 0xFFFD and contexts[row, place + 4] != 0xEF
                if contexts[row, place + 4] == 0xEF and found & 0x1FFFFF == 0xFFFD:
                    malformed = (
                        contexts[row, place + 5] != 0xBF
                        or contexts[row, place + 6] != 0xBD
                        or found >> 21 != 3
                    )
                masks[row, 1 if malformed else 0] |= 1 << place
    return masks


_character_at = numba.njit(tokens.character_at)


def test_all_places_of_a_vector_at_once(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Every four bytes at the edges of the rules, at every place of a vector, among others; and noise."""
    monkeypatch.setattr(module, "plane", module.plane.py_func)
    monkeypatch.setattr(module, "uint32", lambda value: value)
    monkeypatch.setattr(
        module,
        "byte_dot",
        lambda a, b, c: c + sum(((a >> 8 * place) & 0xFF) * ((b >> 8 * place) & 0xFF) for place in range(4)),
    )
    edges = np.frombuffer(EDGES, np.uint8)
    fours = np.stack(np.meshgrid(*[edges] * 4, indexing="ij"), axis=-1).reshape(-1, 4)
    contexts = rng.choice(edges, (len(fours), 24))
    first = rng.integers(0, 21, len(fours))
    contexts[np.arange(len(fours))[:, None], first[:, None] + np.arange(4)] = fours
    noise = rng.integers(0, 256, (30_000, 24), dtype=np.uint8)
    for rows in (contexts, noise):
        words = np.ascontiguousarray(rows).view("<u4").astype(np.int64)
        good, bad = module.characters_in.py_func([words[:, word] for word in range(6)])
        np.testing.assert_array_equal(np.stack([good, bad], axis=1), _reference(rows))


@pytest.mark.parametrize(
    "character", ["\x80", "߿", "ࠀ", "퟿", "\ue000", "�", "\U00010000", "😀", "\U0010ffff"]
)
def test_decoded(character: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "uint32", lambda value: value)
    four = int.from_bytes((character.encode() + b"\xff\xff")[:4], "little")
    assert module.decoded.py_func(four) == ord(character)
