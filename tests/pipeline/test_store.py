"""Whatever way an array is stored, a region of it is what NumPy slices out of it."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec
from zarr.codecs.numcodecs import LZ4, Zlib
from zarr.storage import MemoryStore

from tilewright.pipeline import chunks as chunks_module
from tilewright.pipeline import store
from tilewright.pipeline.chunks import Zstd
from tilewright.pipeline.errors import (
    DamagedError,
    DTypeError,
    ShapeError,
    StoreError,
)
from tilewright.pipeline.threads import run_all

KINDS: dict[str, dict[str, Any]] = {
    "v3-plain": {"zarr_format": 3, "compressors": None},
    "v3-sharded": {"zarr_format": 3, "compressors": None, "sharded": True},
    "v2-plain": {"zarr_format": 2, "compressors": None, "order": "C"},
    "v2-filtered": {"zarr_format": 2, "filters": [numcodecs.Delta("<f4")]},
}
"""What is read and written by ways of its own; v2-filtered is left to zarr. ``CODECS`` holds the rest."""

CODECS: dict[str, tuple[int, Callable[[], list[Any]]]] = {
    "3 none": (3, list),
    "3 zstd": (3, lambda: [ZstdCodec(level=3, checksum=True)]),
    "3 gzip": (3, lambda: [GzipCodec()]),
    "3 blosc": (3, lambda: [BloscCodec(cname="lz4", shuffle="bitshuffle")]),
    "3 lz4": (3, lambda: [LZ4()]),
    "3 zlib": (3, lambda: [Zlib()]),
    "3 crc32c": (3, lambda: [Crc32cCodec()]),
    "3 gzip, blosc, crc32c": (3, lambda: [GzipCodec(), BloscCodec(), Crc32cCodec()]),
    "2 none": (2, list),
    "2 zstd": (2, lambda: [numcodecs.Zstd()]),
    "2 gzip": (2, lambda: [numcodecs.GZip()]),
    "2 blosc": (2, lambda: [numcodecs.Blosc()]),
    "2 lz4": (2, lambda: [numcodecs.LZ4()]),
    "2 zlib": (2, lambda: [numcodecs.Zlib()]),
}
"""Zarr's format and what makes bytes of bytes, for every chain that is decoded without zarr."""


def stored(kind: str, target: Any, data: np.ndarray, chunks: tuple[int, ...]) -> zarr.Array[Any]:
    options = dict(KINDS[kind])
    dtype = options.pop("dtype", data.dtype)
    if options.pop("sharded", False):
        options["shards"] = tuple(2 * side for side in chunks)
    array = zarr.create_array(target, shape=data.shape, chunks=chunks, dtype=dtype, fill_value=7, **options)
    array[...] = data
    return array


def encoded(
    target: Any,
    codecs: str,
    data: np.ndarray,
    chunks: tuple[int, ...],
    *,
    big: bool = False,
    by_columns: bool = False,
    shards: tuple[int, ...] | None = None,
) -> zarr.Array[Any]:
    zarr_format, chain = CODECS[codecs]
    options: dict[str, Any] = {"compressors": chain() or None}
    if zarr_format == 3:
        options["serializer"] = BytesCodec(endian="big" if big else "little")
        options["filters"] = [TransposeCodec(order=(1, 0))] if by_columns else None
        options["shards"] = shards
    else:
        options["order"] = "F" if by_columns else "C"
    dtype = data.dtype.newbyteorder(">" if big and zarr_format == 2 else "<")
    array = zarr.create_array(
        target,
        shape=data.shape,
        chunks=chunks,
        dtype=dtype,
        fill_value=7,
        zarr_format=zarr_format,
        **options,
    )
    array[...] = data
    return array


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
@pytest.mark.parametrize("codecs", CODECS)
@settings(max_examples=8)  # for each of fourteen chains
@given(data=st.data())
def test_known_codecs_are_read_and_written_as_zarr_does(
    codecs: str,
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "SCRAP_NBYTES", data.draw(st.sampled_from([1, 100, store.SCRAP_NBYTES])))
        check_codecs(codecs, tmp_path_factory, data)


def check_codecs(codecs: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
    width = data.draw(
        st.one_of(st.just(columns), st.integers(1, 12))
    )  # chunks as wide as the array: in place
    chunks = data.draw(st.integers(1, 12)), width
    row = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    column = sorted(data.draw(st.tuples(st.integers(0, columns), st.integers(0, columns))))
    dtype = data.draw(st.sampled_from(["f4", "i2", "c16", "u1"]))
    counts = data.draw(st.one_of(st.none(), st.tuples(st.integers(1, 3), st.integers(1, 3))))
    forms: dict[str, Any] = {"big": data.draw(st.booleans()), "by_columns": data.draw(st.booleans())}
    if counts is not None and codecs.startswith("3"):
        forms["shards"] = counts[0] * chunks[0], counts[1] * chunks[1]
    full = np.arange(1, rows * columns + 1).reshape(rows, columns).astype(dtype)
    folder = tmp_path_factory.mktemp("store")
    array = encoded(folder / "x.zarr", codecs, full, chunks, **forms)
    assert chunks_module.layout_of(array, "x") is not None
    np.testing.assert_array_equal(store.read_region(array, (slice(0, rows), slice(0, columns))), full)
    region = (slice(*row), slice(*column))
    wide = np.full((row[1] - row[0], column[1] - column[0] + 3), 99, dtype)
    for part in store.region_reads(array, region, in_loops=data.draw(st.booleans())):
        part.read(wide[:, : column[1] - column[0]][part.target])
    np.testing.assert_array_equal(wide[:, : column[1] - column[0]], full[region])
    assert (wide[:, column[1] - column[0] :] == 99).all(), "bytes beside the region were written"

    victim = data.draw(
        st.sampled_from(sorted(p for p in array.store.root.rglob("*") if p.name[-1].isdigit()))
    )
    if victim.is_file():
        victim.unlink()  # as if it had never been written
    np.testing.assert_array_equal(
        store.read_region(array, (slice(0, rows), slice(0, columns))), np.asarray(array[...])
    )

    ours = encoded(folder / "y.zarr", codecs, np.zeros_like(full), chunks, **forms)
    for piece in store.region_writes(ours, (slice(0, rows), slice(0, columns))):
        source = full[piece.source]
        piece.write(source[start : start + 2] for start in range(0, source.shape[0], 2))
    np.testing.assert_array_equal(ours[...], full)  # as zarr reads it, not as we do


@pytest.mark.parametrize("in_loops", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_zstandard_never_lies_in_memory_as_a_whole(
    sharded: bool, in_loops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is no sound chunk of the array is told as in the ordinary way."""
    full = np.random.default_rng(0).standard_normal((8, 12))
    array = encoded(tmp_path / "x.zarr", "3 zstd", full, (4, 6), **({"shards": (4, 6)} if sharded else {}))
    monkeypatch.setattr(store, "SCRAP_NBYTES", 100)
    decoded: list[tuple[int, ...]] = []
    decode = store._decode_part

    def counting(layout: Any, data: bytes, piece: Any, target: np.ndarray) -> None:
        decoded.append(piece.chunk)
        decode(layout, data, piece, target)

    monkeypatch.setattr(store, "_decode_part", counting)

    def read(region: tuple[slice, slice]) -> None:
        for part in store.region_reads(array, region, in_loops=in_loops):
            block = np.full(part.shape, 99.0)
            part.read(block)
            np.testing.assert_array_equal(block, full[region][part.target])

    read((slice(0, 8), slice(0, 12)))
    read((slice(0, 4), slice(1, 12)))
    read((slice(3, 6), slice(2, 3)))
    assert decoded == []
    if sharded:
        return
    file = chunk_file(array, (1, 1))
    good = file.read_bytes()
    for region in ((slice(4, 8), slice(6, 12)), (slice(4, 5), slice(7, 8))):
        for bad in (good[:-1], good[:-1] + bytes([good[-1] ^ 1]), good + b"x", b"", b"no frame"):
            file.write_bytes(bad)
            with pytest.raises(StoreError, match=r"chunk \(1, 1\) of .* cannot be read"):
                read(region)
        file.write_bytes(zstandard.compress(bytes(4 * 6 * 8 + 1)))
        with pytest.raises(StoreError, match="decodes to 193 bytes and a chunk has 192"):
            read(region)
    assert len(decoded) == 12
    file.unlink()
    full[4:, 6:] = 7  # the fill value
    read((slice(0, 8), slice(0, 12)))

    def encode(*_: Any) -> None:
        raise AssertionError("as a whole")

    monkeypatch.setattr(store, "encode", encode)
    for piece in store.region_writes(array, (slice(0, 8), slice(0, 12))):
        source = -full[piece.source]
        piece.write(source[start : start + 3] for start in range(0, source.shape[0], 3))
    np.testing.assert_array_equal(array[...], -full)
    assert zstandard.get_frame_parameters(file.read_bytes()).content_size == 4 * 6 * 8


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(data=st.data())
def test_a_region_is_what_numpy_slices(
    kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    rows, columns = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
    chunks = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    row = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    column = sorted(data.draw(st.tuples(st.integers(0, columns), st.integers(0, columns))))
    full = np.arange(rows * columns, dtype="f4").reshape(rows, columns)
    array = stored(kind, tmp_path_factory.mktemp("store") / "x.zarr", full, chunks)
    region = (slice(*row), slice(*column))
    wide = np.full(
        (row[1] - row[0], column[1] - column[0] + 3), -1, "f4"
    )  # rows further apart than their length
    with ThreadPoolExecutor(2) as pool:
        parts = store.region_reads(array, region, most_nbytes=data.draw(st.sampled_from([1, 100, 10**6])))
        run_all(pool, [partial(part.read, wide[:, : column[1] - column[0]][part.target]) for part in parts])
    np.testing.assert_array_equal(wide[:, : column[1] - column[0]], full[region])
    assert (wide[:, column[1] - column[0] :] == -1).all(), "bytes beside the region were written"
    np.testing.assert_array_equal(store.read_region(array, region), full[region])


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
@pytest.mark.parametrize("codecs", CODECS)
def test_local_chunks_are_read_and_written_without_zarr(
    codecs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = np.arange(200, dtype="f4").reshape(10, 20)
    array = encoded(tmp_path / "x.zarr", codecs, full, (4, 6))

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("zarr was asked although the chunks lie plain")

    monkeypatch.setattr(zarr.Array, "get_basic_selection", forbidden)
    monkeypatch.setattr(zarr.Array, "__setitem__", forbidden)
    np.testing.assert_array_equal(store.read_region(array, (slice(1, 9), slice(3, 20))), full[1:9, 3:20])
    (piece,) = store.region_writes(array, (slice(4, 8), slice(6, 12)))
    piece.write([np.full((4, 6), -1, "f4")])
    assert (store.read_region(array, (slice(4, 8), slice(6, 12))) == -1).all()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_chunks_never_written_hold_the_fill_value(kind: str, tmp_path: Path) -> None:
    options = dict(KINDS[kind])
    dtype = options.pop("dtype", "f4")
    if options.pop("sharded", False):
        options["shards"] = (8, 8)
    array = zarr.create_array(
        tmp_path / "x.zarr", shape=(9, 9), chunks=(4, 4), dtype=dtype, fill_value=7, **options
    )
    np.testing.assert_array_equal(
        store.read_region(array, (slice(1, 9), slice(0, 5))), np.full((8, 5), 7, "f4")
    )


@pytest.mark.parametrize("columns", [slice(0, 300), slice(1, 300), slice(20, 30), slice(299, 300)])
@pytest.mark.parametrize("long_row", [1, 10**6])
@pytest.mark.parametrize("scrap", [1, 5000, 10**6])
def test_every_way_to_read_part_of_a_chunk(
    columns: slice, long_row: int, scrap: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LONG_ROW_NBYTES", long_row)
    monkeypatch.setattr(store, "SCRAP_NBYTES", scrap)
    full = np.arange(50 * 300, dtype="i2").reshape(50, 300)
    array = stored("v3-plain", tmp_path / "x.zarr", full, (50, 300))
    out = np.full((43, 304), -1, "i2")[:, : columns.stop - columns.start]
    for part in store.region_reads(array, (slice(3, 46), columns)):
        part.read(out[part.target])
    np.testing.assert_array_equal(out, full[3:46, columns])


def test_vectors_are_read_too(tmp_path: Path) -> None:
    full = np.arange(100, dtype="f8")
    array = stored("v3-plain", tmp_path / "x.zarr", full, (7,))
    np.testing.assert_array_equal(store.read_region(array, (slice(3, 95),)), full[3:95])


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(data=st.data())
def test_what_is_written_in_bands_is_what_numpy_holds(
    kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    rows, columns = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
    chunks = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    full = np.arange(1, rows * columns + 1, dtype="f4").reshape(rows, columns)
    array = stored(kind, tmp_path_factory.mktemp("store") / "x.zarr", np.zeros_like(full), chunks)
    unit = store.write_unit(array)
    cut = (
        min(rows, unit[0] * data.draw(st.integers(0, 3))),
        min(columns, unit[1] * data.draw(st.integers(0, 3))),
    )
    step = data.draw(st.integers(1, 5))
    for region in [
        (slice(*row), slice(*column))
        for row in ((0, cut[0]), (cut[0], rows))
        for column in ((0, cut[1]), (cut[1], columns))
    ]:
        part = full[region]
        for piece in store.region_writes(array, region):
            source = part[piece.source]
            piece.write(source[row : row + step] for row in range(0, source.shape[0], step))
    np.testing.assert_array_equal(array[...], full)  # as zarr reads it, not as we do
    names = [path.name for path in Path(str(array.store.root)).rglob("*")]
    assert not [name for name in names if name.endswith(".partial")]


@pytest.mark.parametrize("level", [-100, 0, 22, 23, 100])
def test_every_level_that_numcodecs_takes_is_written_in_bands_too(
    level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes those above libzstd's highest for the highest, and format 2 keeps them as they were given."""
    monkeypatch.setattr(store, "SCRAP_NBYTES", 100)
    full = np.arange(10 * 9, dtype="f4").reshape(10, 9)
    array = zarr.create_array(
        str(tmp_path / "x.zarr"),
        shape=full.shape,
        chunks=(10, 9),
        dtype=full.dtype,
        zarr_format=2,
        compressors=numcodecs.Zstd(level=level),
    )
    (piece,) = store.region_writes(array, (slice(0, 10), slice(0, 9)))
    piece.write([full[:4], full[4:]])
    np.testing.assert_array_equal(array[...], full)


@pytest.mark.parametrize("codecs", ["3 none", "2 none", "3 zstd", "2 zstd", "3 blosc", "2 filtered"])
@pytest.mark.parametrize("able", [True, False])
def test_whole_chunks_are_written_by_another_where_it_can(codecs: str, able: bool, tmp_path: Path) -> None:
    """All rows of plain ones, and of those at the lower edge those that there are."""
    full = np.arange(1, 1 + 10 * 9, dtype="f4").reshape(10, 9)
    empty, plain, zstd = np.zeros_like(full), codecs.endswith("none"), codecs.endswith("zstd")
    if codecs == "2 filtered":
        array = stored("v2-filtered", tmp_path / "x.zarr", empty, (4, 6))
    else:
        array = encoded(tmp_path / "x.zarr", codecs, empty, (4, 6))
    filled = []
    for piece in store.region_writes(array, (slice(0, 10), slice(0, 9))):
        rows = full[piece.source]

        def fill(descriptor: int, how: Zstd | None, rows: np.ndarray = rows) -> bool:
            filled.append(rows.shape)
            data = rows.tobytes() if able else b"half of it, and then the disk was full" * 100
            if zstd:
                assert how is not None
                data = zstandard.compress(data, how.level)
            else:
                assert how is None
            assert os.pwrite(descriptor, data, 0) == len(data)
            return able

        bands = (row[None] for row in rows)
        piece.write(bands, fill)
        if rows.shape in filled and able:
            assert next(bands) is not None, "what another wrote is not written again"
    np.testing.assert_array_equal(array[...], full)
    wanted = [(2, 6), (4, 6), (4, 6)] if plain else [(4, 6), (4, 6)] if zstd else []
    assert sorted(filled) == wanted
    if plain:
        files = [path for path in (tmp_path / "x.zarr").rglob("*") if path.is_file()]
        assert {path.stat().st_size for path in files if path.name[0].isdigit()} == {4 * 6 * 4}


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), r"cannot write chunk \(0, 0\).*No space left"),
        (RuntimeError("the device is lost"), "^the device is lost$"),
        (MemoryError("no room for a band"), "^no room for a band$"),
    ],
)
def test_a_failed_write_leaves_nothing(error: Exception, told: str, tmp_path: Path) -> None:
    array = stored("v3-plain", tmp_path / "x.zarr", np.ones((4, 4), "f4"), (4, 4))

    def broken() -> Any:
        yield np.zeros((2, 4), "f4")
        raise error

    (piece,) = store.region_writes(array, (slice(0, 4), slice(0, 4)))
    with pytest.raises(StoreError if isinstance(error, OSError) else type(error), match=told):
        piece.write(broken())
    assert (array[...] == 1).all(), "the old chunk stands until the new one is whole"
    assert [path.name for path in (tmp_path / "x.zarr" / "c" / "0").iterdir()] == ["0"]


def test_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    array = stored("v3-plain", tmp_path / "x.zarr", np.ones((8, 8), "f4"), (4, 4))
    victim = tmp_path / "x.zarr" / "c" / "1" / "0"
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"chunk \(1, 0\) of .*x\.zarr.* 63 bytes .* 64"):
        store.read_region(array, (slice(0, 8), slice(0, 8)))


def chunk_file(array: zarr.Array[Any], chunk: tuple[int, ...]) -> Path:
    root: Path = array.store.root
    return root / array.metadata.encode_chunk_key(chunk)


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "longer", "shorter"])
@pytest.mark.parametrize("codecs", CODECS)
def test_a_chunk_that_does_not_decode_is_named(codecs: str, damage: str, tmp_path: Path) -> None:
    full = np.arange(64 * 64, dtype="f4").reshape(64, 64)
    array = encoded(tmp_path / "x.zarr", codecs, full, (16, 64))
    side = {"longer": 32, "shorter": 8}.get(damage, 16)
    other = encoded(tmp_path / "other.zarr", codecs, full, (side, 64))
    good = chunk_file(other, (0, 0)).read_bytes()
    victim = chunk_file(array, (1, 0))
    victim.write_bytes(
        {"cut": good[: len(good) // 2], "empty": b"", "garbage": b"\x00garbage"}.get(damage, good)
    )
    (part,) = store.region_reads(array, (slice(16, 32), slice(0, 64)))
    file = f"x.zarr/{array.metadata.encode_chunk_key((1, 0))}"
    for width in (64, 70):  # decoded in its place, and beside it
        around = np.full((64, width), -1, "f4")
        with pytest.raises(
            DamagedError, match=rf"chunk \(1, 0\) of .*x\.zarr cannot be read \(.*{re.escape(file)}\)"
        ):
            part.read(around[16:32, :64])
        assert (around[:16] == -1).all()
        assert (around[32:] == -1).all(), "bytes behind the chunk were written"
        assert (around[:, 64:] == -1).all()


@pytest.mark.parametrize("codecs", ["3 crc32c", "3 zstd", "3 gzip, blosc, crc32c", "3 gzip"])
def test_a_chunk_that_fails_its_checksum_is_named(codecs: str, tmp_path: Path) -> None:
    array = encoded(tmp_path / "x.zarr", codecs, np.random.default_rng(1).random((64, 64)), (32, 64))
    victim = chunk_file(array, (1, 0))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises(StoreError, match=r"chunk \(1, 0\) of .*x\.zarr.*(?i:checksum|crc|corrupt|invalid)"):
        store.read_region(array, (slice(0, 64), slice(0, 64)))


@pytest.mark.parametrize("kind", ["frames", "unknown-length"])
def test_zstandard_of_other_writers_is_read(kind: str, tmp_path: Path) -> None:
    """Several frames make one chunk too, and a frame need not say how long its contents are."""
    full = np.arange(64, dtype="f4").reshape(8, 8)
    array = encoded(tmp_path / "x.zarr", "3 zstd", full, (8, 8))
    if kind == "frames":
        data = zstandard.compress(full[:3].tobytes()) + zstandard.compress(full[3:].tobytes())
    else:
        writer = zstandard.ZstdCompressor(write_content_size=False)
        data = writer.compress(full.tobytes())
        assert zstandard.frame_content_size(data) < 0
    chunk_file(array, (0, 0)).write_bytes(data)
    np.testing.assert_array_equal(store.read_region(array, (slice(0, 8), slice(0, 8))), full)
    np.testing.assert_array_equal(store.read_region(array, (slice(0, 8), slice(1, 5))), full[:, 1:5])


@pytest.mark.parametrize("codecs", ["3 none", "3 zstd", "3 crc32c"])
@pytest.mark.parametrize("damage", ["index", "cut", "offset"])
def test_a_damaged_shard_is_named(codecs: str, damage: str, tmp_path: Path) -> None:
    full = np.arange(256, dtype="f4").reshape(16, 16)
    array = encoded(tmp_path / "x.zarr", codecs, full, (4, 4), shards=(8, 8))
    victim = chunk_file(array, (1, 0))
    data = bytearray(victim.read_bytes())
    index_nbytes = 4 * 16 + 4
    if damage == "index":
        data[-index_nbytes] ^= 1
    elif damage == "offset":  # with a checksum that is right
        index = np.frombuffer(bytes(data[-index_nbytes:-4]), "<u8").copy()
        index[0] += 2**40
        data[-index_nbytes:] = bytes(numcodecs.CRC32C(location="end").encode(index))
    else:
        del data[20:]
    victim.write_bytes(data)
    with pytest.raises(DamagedError, match=r"chunk \(2, 0\) of .*x\.zarr.* \(in shard .*x\.zarr/c/1/0\)"):
        store.read_region(array, (slice(0, 16), slice(0, 16)))
    np.testing.assert_array_equal(store.read_region(array, (slice(0, 8), slice(0, 16))), full[:8])


def test_an_array_that_only_zarr_can_read_names_its_damaged_chunk(tmp_path: Path) -> None:
    array = stored("v2-filtered", tmp_path / "x.zarr", np.ones((8, 8), "f4"), (4, 4))
    assert chunks_module.layout_of(array, "x") is None
    chunk_file(array, (1, 0)).write_bytes(b"\x00garbage")
    with pytest.raises(StoreError, match=r"chunk \(1, 0\) of .*x\.zarr"):
        store.read_region(array, (slice(0, 8), slice(0, 8)))


def test_open_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"A: there is no Zarr array at .*nope"):
        store.open_array(tmp_path / "nope", ndim=2, role="A")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "array"}')
    with pytest.raises(StoreError, match=r"half is not a Zarr array \(its metadata lack 'data_type'\)"):
        store.open_array(tmp_path / "half", ndim=2, role="A")
    whole = zarr.create_array(tmp_path / "odd", shape=(4, 4), chunks=(2, 2), dtype="f4").metadata.to_dict()
    empty = {"name": "regular", "configuration": {"chunk_shape": (0, 2)}}
    for metadata, match in (
        (None, "is not a Zarr array"),
        ([1], "is not a Zarr array"),
        (whole | {"shape": "ab"}, "is not a Zarr array"),
        (whole | {"chunk_grid": empty}, r"has shape \(4, 4\) in chunks of \(0, 2\), which hold no element"),
    ):
        (tmp_path / "odd" / "zarr.json").write_text(json.dumps(metadata))
        with pytest.raises(StoreError, match=rf"A: .*odd {match}"):
            store.open_array(tmp_path / "odd", ndim=2, role="A")
    zarr.open_group(tmp_path / "group", mode="w")
    with pytest.raises(StoreError, match=r"B: .*group is not a Zarr array"):
        store.open_array(tmp_path / "group", ndim=2, role="B")
    (tmp_path / "file").write_text("no array")
    with pytest.raises(StoreError, match=r"file"):
        store.open_array(tmp_path / "file", ndim=2, role="A")
    zarr.create_array(tmp_path / "cube", shape=(2, 2, 2), chunks=(1, 1, 1), dtype="f4")
    with pytest.raises(ShapeError, match=r"shape \(2, 2, 2\).*2 dimensions"):
        store.open_array(tmp_path / "cube", ndim=2, role="A")
    zarr.create_array(tmp_path / "dates", shape=(2, 2), chunks=(1, 1), dtype="M8[s]", zarr_format=2)
    with pytest.raises(DTypeError, match=r"datetime64"):
        store.open_array(tmp_path / "dates", ndim=2, role="A")


def test_memory_stores_are_known() -> None:
    array = zarr.create_array(MemoryStore(), shape=(2, 2), chunks=(1, 1), dtype="f4")
    assert store.in_memory(array)


OUT_OF_SIGHT = ["3 none", "3 zstd", "2 none", "2 zlib", "3 sharded", "2 filtered"]


def any_way(kind: str, target: Path, data: np.ndarray, chunks: tuple[int, ...]) -> zarr.Array[Any]:
    """An array that is read and written in one of the ways that there are."""
    if kind == "2 filtered":
        return stored("v2-filtered", target, data, chunks)
    if kind == "3 sharded":
        return stored("v3-sharded", target, data, chunks)
    return encoded(target, kind, data, chunks)


@pytest.mark.parametrize("kind", OUT_OF_SIGHT)
@pytest.mark.parametrize("left", ["nothing", "an empty folder"])
def test_an_array_that_is_out_of_sight_is_no_array_of_fill_values(
    kind: str, left: str, tmp_path: Path
) -> None:
    """As on a host without the mount, or with nothing mounted on it."""
    array = any_way(kind, tmp_path / "x.zarr", np.ones((8, 8), "f4"), (4, 4))
    (tmp_path / "x.zarr").rename(tmp_path / "elsewhere")
    if left == "an empty folder":
        (tmp_path / "x.zarr").mkdir()
    with pytest.raises(
        StoreError, match=r"x\.zarr: there is no Zarr array at .*x\.zarr on .*; put it on storage that all"
    ):
        store.read_region(array, (slice(0, 8), slice(0, 8)))


@pytest.mark.parametrize("kind", OUT_OF_SIGHT)
def test_an_array_that_is_out_of_sight_is_not_written(kind: str, tmp_path: Path) -> None:
    array = any_way(kind, tmp_path / "x.zarr", np.ones((8, 8), "f4"), (4, 4))
    (tmp_path / "x.zarr").rename(tmp_path / "elsewhere")
    piece = store.region_writes(array, (slice(0, 8), slice(0, 8)))[0]
    with pytest.raises(StoreError, match="there is no Zarr array at"):
        piece.write([np.ones([part.stop - part.start for part in piece.source], "f4")])
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_an_array_that_goes_away_while_it_is_read_is_missed(tmp_path: Path) -> None:
    array = any_way("3 none", tmp_path / "x.zarr", np.ones((8, 8), "f4"), (4, 4))
    chunk_file(array, (0, 0)).unlink()
    first, *others = store.region_reads(array, (slice(0, 8), slice(0, 8)))
    out = np.zeros((4, 4), "f4")
    first.read(out)
    assert (out == 7).all(), "a chunk that was never written, of an array that is there"
    (tmp_path / "x.zarr").rename(tmp_path / "elsewhere")
    for part in (first, *others):
        with pytest.raises(StoreError, match="there is no Zarr array at"):
            part.read(out)


@pytest.mark.parametrize("fill", [0, 7, float("nan")])
def test_a_remote_array_that_is_out_of_sight_is_missed(fill: float, tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "x.zarr", shape=(8, 8), chunks=(4, 4), dtype="f4", fill_value=fill)
    # By fsspec, as any other URL.
    array = store.open_array(f"file://{tmp_path}/x.zarr", ndim=2, role="A")
    region = (slice(0, 8), slice(0, 8))
    np.testing.assert_array_equal(store.read_region(array, region), np.full((8, 8), fill, "f4"))
    (tmp_path / "x.zarr").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=r"x\.zarr.*: there is no Zarr array at .*zarr\.json: not found"):
        store.read_region(array, region)


@pytest.mark.parametrize("form", ["path", "text", "open array"])
def test_a_relative_path_means_the_same_to_workers_that_run_elsewhere(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is named as it was given; links in it are left for each host to follow."""
    home = tmp_path / "a::b"  # which in a text would be a URL
    (home / "here").mkdir(parents=True)
    (home / "link").symlink_to("here")
    full = np.arange(64, dtype="f4").reshape(8, 8)
    any_way("3 none", home / "here" / "x.zarr", full, (4, 4))
    monkeypatch.chdir(home)
    given: Any = {"path": Path("link/x.zarr"), "text": "link/x.zarr"}.get(form)
    given = given or zarr.open_array("link/x.zarr", mode="r")
    array = store.open_array(given, ndim=2, role="A")
    monkeypatch.chdir(tmp_path)
    for one in (array, pickle.loads(pickle.dumps(array))):
        np.testing.assert_array_equal(store.read_region(one, (slice(0, 8), slice(0, 8))), full)
        assert store.name_of(one) == "link/x.zarr"
        assert store.place_of(one) == str(home / "link" / "x.zarr")
    if form == "open array":
        assert str(given.store.root) == "link/x.zarr", "the caller's array is the caller's"
