"""Chunks of zlib and of gzip: decompressed as numcodecs does, by another library."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import numcodecs
import numpy as np
import pytest

from tilewright.pipeline.store.chunks import DamagedChunkError, decode

WHOLE = bytes(range(256)) * 40
HALF = len(WHOLE) // 2


def decoded(codec: str, stored: bytes) -> bytes:
    return decode([numcodecs.get_codec({"id": codec})], stored, len(WHOLE), None).tobytes()


@pytest.mark.parametrize(
    ("codec", "stored"),
    [
        ("zlib", zlib.compress(WHOLE)),
        ("zlib", zlib.compress(WHOLE) + b"behind"),
        ("gzip", gzip.compress(WHOLE)),
        ("gzip", gzip.compress(WHOLE) + bytes(7)),
        ("gzip", gzip.compress(WHOLE[:HALF]) + gzip.compress(WHOLE[HALF:])),
        ("gzip", gzip.compress(WHOLE) + gzip.compress(b"")),
    ],
)
def test_chunks_decode_as_by_numcodecs(codec: str, stored: bytes) -> None:
    assert bytes(numcodecs.get_codec({"id": codec}).decode(stored)) == WHOLE
    assert decoded(codec, stored) == WHOLE


def flipped(stored: bytes) -> bytes:
    middle = len(stored) // 2
    return stored[:middle] + bytes([stored[middle] ^ 255]) + stored[middle + 1 :]


@pytest.mark.parametrize(("codec", "compress"), [("zlib", zlib.compress), ("gzip", gzip.compress)])
def test_damaged_chunks_are_told(codec: str, compress: Callable[[bytes], bytes]) -> None:
    stored = compress(WHOLE)
    for damaged, told in (
        (stored[:-1], "cut short"),
        (stored[: len(stored) // 2], "cut short"),
        (b"", "cut short"),
        (flipped(stored), "Error"),
        (stored[:-4] + bytes(4), "checksum"),
        (compress(WHOLE + b"more"), "decodes to 10244 bytes and a chunk has 10240"),
    ):
        with pytest.raises(DamagedChunkError, match=told):
            decoded(codec, damaged)
    for behind, told in ((b"behind", "other bytes follow"), (b"no member at all", "wrapper")):
        with pytest.raises(DamagedChunkError, match=told):
            decoded("gzip", gzip.compress(WHOLE) + behind)


def test_what_came_before_compression_is_undone() -> None:
    numbers = np.arange(1000, dtype="<f4")
    codecs = [numcodecs.Shuffle(4), numcodecs.Zlib(1), numcodecs.CRC32C()]
    stored = numbers
    for codec in codecs:
        stored = codec.encode(stored)
    assert decode(codecs, stored, numbers.nbytes, None).tobytes() == numbers.tobytes()
