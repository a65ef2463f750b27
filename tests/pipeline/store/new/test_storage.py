"""What may be said of how a new array is stored."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.choices import CODECS
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.store.new.storage import (
    AS_IT_COMES,
    INNER_NBYTES,
    MOST_ENCODED_NBYTES,
    Codec,
    Storage,
    as_storage,
)


@pytest.mark.parametrize("given", ["16x32", "16×32", "16,32", " 16x32 ", (16, 32), [16, np.int64(32)]])
def test_sides_are_read(given: Any) -> None:
    assert as_storage(given) == Storage(chunks=(16, 32))
    assert as_storage(shards=given).unit == (16, 32)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "x",
        "16x",
        "16x32x8",
        "0",
        "-1",
        "1.5",
        "²",
        (16,) * 3,
        (16, 0),
        (16, 1.0),
        True,
        2.0,
        {},
        (None, 1),
    ],
)
def test_other_sides_are_refused(given: Any) -> None:
    with pytest.raises(
        OptionError, match=r"shards=.* are no sides of a matrix's shards: give rows and columns"
    ):
        as_storage(shards=given)


@pytest.mark.parametrize(
    "given", ["zstd", "zstd:22", "lz4:65537", "gzip:1", "none", "blosc-lz4hc:0", "blosc-zlib:9"]
)
def test_codecs_are_read(given: str) -> None:
    codec = as_storage(codec=given).codec
    assert str(codec) == given
    for zarr_format in (2, 3):
        assert (codec.compressor(zarr_format) is None) == (given == "none")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("ZSTD", f"it may be {', '.join(CODECS)}"),
        ("", "is unknown"),
        (3, "is unknown"),
        ("blosc", "is unknown"),
        ("zstd:", "the level of zstd is a whole number from 1 to 22, such as zstd:3"),
        ("zstd:23", "from 1 to 22"),
        ("gzip:0", "from 1 to 9"),
        ("lz4:x", "the acceleration of lz4 is a whole number from 1 to 65537"),
        ("blosc-zstd:10", "from 0 to 9"),
        ("none:1", "have no level"),
    ],
)
def test_other_codecs_are_refused(given: Any, told: str) -> None:
    with pytest.raises(OptionError) as caught:
        as_storage(codec=given)
    assert told in str(caught.value)


def test_shards_are_of_whole_chunks() -> None:
    with pytest.raises(OptionError, match=r"shards=64x50 are not whole chunks of 16x16.*50 is none of 16"):
        as_storage(16, (64, 50))


@given(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), st.sampled_from([1, 2, 4, 8, 16]))
def test_chunks_of_shards_fill_them(shards: tuple[int, int], itemsize: int) -> None:
    found = Storage(shards=shards).options((1, 1), itemsize, 3, compressed=False)
    chunks = found["chunks"]
    assert all(shard % chunk == 0 for shard, chunk in zip(shards, chunks, strict=True))
    assert math.prod(chunks) * itemsize <= INNER_NBYTES


def test_nothing_said_is_what_was_before(tmp_path: Path) -> None:
    assert not AS_IT_COMES
    assert as_storage() == AS_IT_COMES
    assert AS_IT_COMES.options((4, 5), 4, None, compressed=True) == {"chunks": (4, 5), "compressors": "auto"}
    AS_IT_COMES.check(tmp_path / "c", np.dtype("f8"))


def test_chunks_beyond_what_codecs_take_are_refused(tmp_path: Path) -> None:
    side = math.isqrt(MOST_ENCODED_NBYTES // 8)
    for codec in ("zstd", "none"):
        Storage((side, side), codec=Codec(codec)).check(tmp_path / "c", np.dtype("f8"))
    Storage((2 * side, side), codec=Codec("none")).check(tmp_path / "c", np.dtype("f8"))
    with pytest.raises(OptionError, match="give smaller chunks"):
        Storage((2 * side, side), codec=Codec("zstd")).check(tmp_path / "c", np.dtype("f8"))


def test_a_model_writes_nothing(tmp_path: Path) -> None:
    model = as_storage(8, 16, "gzip:2").model(
        tmp_path / "c", (40, 40), np.dtype("f4"), unit=(16, 16), compressed=False
    )
    assert (model.chunks, model.shards) == ((8, 8), (16, 16))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("chunks", "shards", "shape", "cut"),
    [
        ((100, 3), None, (7, 9), ((7, 3), None)),
        ((10**20, 10**20), None, (7, 0), ((7, 1), None)),
        ((4, 4), (8, 400), (100, 10), ((4, 4), (8, 12))),
        ((100, 4), (200, 8), (7, 50), ((7, 4), (7, 8))),
        (None, (1000, 6), (7, 50), (None, (7, 6))),
    ],
)
def test_nothing_is_stored_beyond_the_array(chunks: Any, shards: Any, shape: Any, cut: Any) -> None:
    found = as_storage(chunks, shards).within(shape)
    assert (found.chunks, found.shards) == cut
    assert as_storage(found.chunks, found.shards) == found
