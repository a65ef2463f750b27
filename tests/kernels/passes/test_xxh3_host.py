"""XXH3 with 128 bits of many texts equals that of libxxhash, at every length where it takes another way."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.passes.xxh3_host import xxh3_128_of


def expected(texts: list[bytes]) -> list[list[int]]:
    return [
        [int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")]
        for digest in map(xxhash.xxh3_128_digest, texts)
    ]


def hashed(texts: list[bytes]) -> list[list[int]]:
    data = np.frombuffer(b"".join(texts), np.uint8)
    found: list[list[int]] = xxh3_128_of(data, np.cumsum([0, *map(len, texts)])).tolist()
    return found


def test_texts_of_every_length(rng: np.random.Generator) -> None:
    every = [
        *range(300),
        511,
        512,
        513,
        1023,
        1024,
        1025,
        1088,
        1089,
        2047,
        2048,
        2049,
        4096,
        10_001,
        100_000,
    ]
    texts = [rng.integers(0, 256, length, np.uint8).tobytes() for length in every]
    assert hashed(texts) == expected(texts)
    ones = [b"\xff" * length for length in every]
    assert hashed(ones) == expected(ones)


@given(st.lists(st.binary(max_size=400), max_size=6))
def test_any_texts(texts: list[bytes]) -> None:
    assert hashed(texts) == expected(texts)


@pytest.mark.parametrize("first", [0, 1, 7])
def test_a_range_of_memory(first: int) -> None:
    data = np.arange(2000, dtype=np.uint8)
    found = xxh3_128_of(data, np.array([first, first + 20, first + 20, first + 1500]))
    memory = data.tobytes()
    wanted = expected([memory[first : first + 20], b"", memory[first + 20 : first + 1500]])
    assert found.tolist() == wanted
