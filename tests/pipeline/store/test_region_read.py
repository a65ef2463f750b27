"""Whatever way an array is stored, a region of it is what NumPy slices out of it."""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
import zstandard
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st
from numcodecs.abc import Codec
from zarr.abc.store import RangeByteRequest, Store
from zarr.codecs.numcodecs import LZMA
from zarr.storage import FsspecStore, LocalStore

import tilewright as tw
from tests.kernels.gemm.pipes import pipe_at
from tests.pipeline.store.stored_arrays import (
    CODECS,
    KINDS,
    OUT_OF_SIGHT,
    any_way,
    as_remote,
    chunk_file,
    encoded,
    stored,
)
from tilewright.pipeline.errors import DamagedError, StoreError
from tilewright.pipeline.store import region_read
from tilewright.pipeline.store.arrays import name_of
from tilewright.pipeline.store.chunks import decode, find_chunk, layout_of
from tilewright.pipeline.store.region_read import read_region, read_targets, region_reads
from tilewright.pipeline.threads import run_all


@pytest.mark.sample(1)
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
    with ThreadPoolExecutor(2) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(region_read, "READ_NBYTES", data.draw(st.sampled_from([1, 100, 10**6])))
        parts = region_reads(array, region)
        assert read_targets(array, region) == [part.target for part in parts]
        run_all(pool, [partial(part.read, wide[:, : column[1] - column[0]][part.target]) for part in parts])
    np.testing.assert_array_equal(wide[:, : column[1] - column[0]], full[region])
    assert (wide[:, column[1] - column[0] :] == -1).all(), "bytes beside the region were written"
    np.testing.assert_array_equal(read_region(array, region), full[region])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_chunks_never_written_hold_the_fill_value(kind: str, tmp_path: Path) -> None:
    options = dict(KINDS[kind])
    dtype = options.pop("dtype", "f4")
    if options.pop("sharded", False):
        options["shards"] = (8, 8)
    array = zarr.create_array(
        tmp_path / "x.zarr", shape=(9, 9), chunks=(4, 4), dtype=dtype, fill_value=7, **options
    )
    np.testing.assert_array_equal(read_region(array, (slice(1, 9), slice(0, 5))), np.full((8, 5), 7, "f4"))


@pytest.mark.parametrize("columns", [slice(0, 300), slice(1, 300), slice(20, 30), slice(299, 300)])
@pytest.mark.parametrize("long_row", [1, 10**6])
@pytest.mark.parametrize("scrap", [1, 5000, 10**6])
def test_every_way_to_read_part_of_a_chunk(
    columns: slice, long_row: int, scrap: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_read, "LONG_ROW_NBYTES", long_row)
    monkeypatch.setattr(region_read, "SCRAP_NBYTES", scrap)
    full = np.arange(50 * 300, dtype="i2").reshape(50, 300)
    array = stored("v3-plain", tmp_path / "x.zarr", full, (50, 300))
    out = np.full((43, 304), -1, "i2")[:, : columns.stop - columns.start]
    for part in region_reads(array, (slice(3, 46), columns)):
        part.read(out[part.target])
    np.testing.assert_array_equal(out, full[3:46, columns])


def test_vectors_are_read_too(tmp_path: Path) -> None:
    full = np.arange(100, dtype="f8")
    array = stored("v3-plain", tmp_path / "x.zarr", full, (7,))
    np.testing.assert_array_equal(read_region(array, (slice(3, 95),)), full[3:95])


def test_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    array = stored("v3-plain", tmp_path / "x.zarr", np.ones((8, 8), "f4"), (4, 4))
    victim = tmp_path / "x.zarr" / "c" / "1" / "0"
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"chunk \(1, 0\) of .*x\.zarr.* 63 bytes .* 64"):
        read_region(array, (slice(0, 8), slice(0, 8)))


@pytest.mark.parametrize("found", ["a pipe", "a folder"])
@pytest.mark.parametrize("in_loops", [False, True])
@pytest.mark.parametrize("codecs", ["3 none", "3 zstd", "3 gzip", "3 sharded"])
def test_what_has_come_in_place_of_a_chunk_is_named_and_not_waited_for(
    codecs: str, in_loops: bool, found: str, tmp_path: Path
) -> None:
    array = any_way(codecs, tmp_path / "x.zarr", np.ones((1000, 1000), "f4"), (500, 500))
    victim = chunk_file(array, (0, 0))
    victim.unlink()
    if found == "a folder":
        victim.mkdir()
    (first, *_) = region_reads(array, (slice(0, 1000), slice(0, 1000)), in_loops=in_loops)
    target = np.empty(first.shape, "f4")
    with (
        pipe_at(victim) if found == "a pipe" else nullcontext(),
        pytest.raises(
            DamagedError, match=rf"chunk \(0, 0\) of .*x\.zarr cannot be read .*: it is {found} and no file"
        ),
    ):
        first.read(target)


@pytest.mark.sample(28)
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
    (part,) = region_reads(array, (slice(16, 32), slice(0, 64)))
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
        read_region(array, (slice(0, 64), slice(0, 64)))


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
    np.testing.assert_array_equal(read_region(array, (slice(0, 8), slice(0, 8))), full)
    np.testing.assert_array_equal(read_region(array, (slice(0, 8), slice(1, 5))), full[:, 1:5])


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
        read_region(array, (slice(0, 16), slice(0, 16)))
    np.testing.assert_array_equal(read_region(array, (slice(0, 8), slice(0, 16))), full[:8])


@pytest.fixture
def short_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every read of a file gives seven bytes at most, as a network's file system may; the lengths of all of them."""
    pread, preadv = os.pread, os.preadv
    lengths = []

    def short_pread(descriptor: int, nbytes: int, offset: int) -> bytes:
        found = pread(descriptor, min(nbytes, 7), offset)
        lengths.append(len(found))
        return found

    def short_preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        lengths.append(preadv(descriptor, [buffers[0][:7]], offset))
        return lengths[-1]

    monkeypatch.setattr(os, "pread", short_pread)
    monkeypatch.setattr(os, "preadv", short_preadv)
    return lengths


@pytest.mark.parametrize("codecs", ["3 none", "3 zstd", "3 gzip", "3 crc32c"])
@pytest.mark.parametrize("shards", [None, (16, 16)])
def test_reads_that_give_less_than_asked_for_are_gone_on_with(
    shards: tuple[int, int] | None, codecs: str, tmp_path: Path, short_reads: list[int]
) -> None:
    full = np.random.default_rng(1).random((16, 24))
    array = encoded(tmp_path / "x.zarr", codecs, full, (8, 8), shards=shards)
    short_reads.clear()
    np.testing.assert_array_equal(read_region(array, (slice(0, 16), slice(0, 24))), full)
    np.testing.assert_array_equal(read_region(array, (slice(3, 14), slice(2, 20))), full[3:14, 2:20])
    assert max(short_reads) == 7
    assert len(short_reads) > full.nbytes / 7, "all bytes came that way"


@pytest.mark.parametrize("codecs", ["3 none", "3 gzip"])
def test_a_file_that_ends_while_it_is_read_is_an_error(
    codecs: str, tmp_path: Path, short_reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    array = encoded(tmp_path / "x.zarr", codecs, np.random.default_rng(1).random((8, 8)), (8, 8))
    short_reads.clear()

    def ended(function: Any, nothing: Any) -> Any:
        return lambda *arguments: function(*arguments) if len(short_reads) < 3 else nothing

    monkeypatch.setattr(os, "pread", ended(os.pread, b""))
    monkeypatch.setattr(os, "preadv", ended(os.preadv, 0))
    with pytest.raises(
        StoreError, match=r"chunk \(0, 0\) of .*: the file ended at byte 21 while it was being read"
    ):
        read_region(array, (slice(0, 8), slice(0, 8)))


@pytest.mark.parametrize("codecs", ["3 none", "3 zstd", "3 crc32c"])
@pytest.mark.parametrize("index", ["start", "end"])
def test_a_shard_is_read_wherever_its_index_lies_gaps_as_the_fill_value(
    index: str, codecs: str, tmp_path: Path
) -> None:
    full = np.arange(100, 356, dtype="f4").reshape(16, 16)
    full[:4, 4:8] = 7  # a chunk of nothing but the fill value is not stored
    shards = {"shape": (8, 8), "index_location": index}
    array = encoded(tmp_path / "x.zarr", codecs, full, (4, 4), shards=shards)
    layout = layout_of(array, "x")
    assert layout is not None
    assert layout.shards is not None
    assert layout.shards.index_first is (index == "start")
    with open(chunk_file(array, (0, 0)), "rb") as shard:
        assert find_chunk(layout, shard.fileno(), (0, 0), {}) is not None
        assert find_chunk(layout, shard.fileno(), (0, 1), {}) is None
    np.testing.assert_array_equal(read_region(array, (slice(0, 16), slice(0, 16))), full)
    np.testing.assert_array_equal(read_region(array, (slice(1, 11), slice(3, 13))), full[1:11, 3:13])


def test_an_array_that_only_zarr_can_read_names_its_damaged_chunk(tmp_path: Path) -> None:
    array = stored("v2-filtered", tmp_path / "x.zarr", np.ones((8, 8), "f4"), (4, 4))
    assert layout_of(array, "x") is None
    chunk_file(array, (1, 0)).write_bytes(b"\x00garbage")
    with pytest.raises(StoreError, match=r"chunk \(1, 0\) of .*x\.zarr"):
        read_region(array, (slice(0, 8), slice(0, 8)))


class Failing(Codec):  # type: ignore[misc]
    """A filter of format 2 that is no codec of numcodecs', and cannot be read for a moment."""

    codec_id = "tilewright-test-failing"
    error: Exception | None = None

    def encode(self, buf: Any) -> Any:
        return buf

    def decode(self, buf: Any, out: Any = None) -> Any:
        if Failing.error is not None:
            raise Failing.error
        return buf


numcodecs.register_codec(Failing)


@pytest.mark.parametrize(
    "codecs",
    [
        [numcodecs.LZMA(preset=0)],
        *(
            [numcodecs.LZMA(preset=0), last]
            for last in (
                numcodecs.Zstd(),
                numcodecs.Blosc(),
                numcodecs.LZ4(),
                numcodecs.GZip(),
                numcodecs.BZ2(),
                numcodecs.CRC32(),
                numcodecs.Fletcher32(),
            )
        ),
    ],
    ids=lambda codecs: ", ".join(codec.codec_id for codec in codecs),
)
def test_what_zarr_cannot_decode_is_damaged_whatever_its_codec_raises(
    codecs: list[Any], tmp_path: Path
) -> None:
    """RuntimeError for most codecs, OSError for gzip and bz2."""
    array = zarr.create_array(
        tmp_path / "x.zarr",
        shape=(8, 8),
        chunks=(4, 4),
        dtype="f4",
        zarr_format=2,
        filters=codecs,
        compressors=None,
    )
    array[...] = np.ones((8, 8), "f4")
    assert layout_of(array, "x") is None
    victim = chunk_file(array, (1, 0))
    good = victim.read_bytes()
    victim.write_bytes(b"\x00garbage" + good[8:])
    with pytest.raises(DamagedError, match=r"(?s)chunk \(1, 0\) of .*x\.zarr.*restore the chunk"):
        read_region(array, (slice(0, 8), slice(0, 8)))
    victim.write_bytes(good)
    np.testing.assert_array_equal(read_region(array, (slice(0, 8), slice(0, 8))), np.ones((8, 8), "f4"))


def failing_to_decode(error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch) -> zarr.Array[Any]:
    """An array all of whose chunks raise the error where they are decoded."""
    array = zarr.create_array(
        folder / "x.zarr", shape=(8, 8), chunks=(4, 4), dtype="f4", zarr_format=2, filters=[Failing()]
    )
    array[...] = np.ones((8, 8), "f4")
    monkeypatch.setattr(Failing, "error", error)
    return array


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), OSError(5, "no answer")], ids=repr)
def test_what_zarr_cannot_read_for_a_moment_is_not_damaged(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = failing_to_decode(error, tmp_path, monkeypatch)
    with pytest.raises(StoreError, match=r"chunk \(0, 0\) of .*x\.zarr") as raised:
        read_region(array, (slice(0, 8), slice(0, 8)))
    assert not isinstance(raised.value, DamagedError)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no more"),
        RuntimeError("Zstd decompression error: b'Allocation error : not enough memory'"),
    ],
    ids=repr,
)
def test_a_chunk_is_not_damaged_where_its_decoder_finds_no_memory(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = failing_to_decode(error, tmp_path, monkeypatch)
    with pytest.raises(type(error), match=re.escape(str(error))):
        read_region(array, (slice(0, 8), slice(0, 8)))
    with pytest.raises(type(error), match=re.escape(str(error))):
        decode([Failing()], b"", 8, None)


def test_what_a_remote_store_gives_may_be_whole_the_next_time(tmp_path: Path) -> None:
    coded = zarr.create_array(tmp_path / "x.zarr", shape=(8, 8), chunks=(4, 4), dtype="f4")
    coded[...] = np.ones((8, 8), "f4")
    chunk_file(coded, (0, 0)).write_bytes(b"\x00garbage")
    array = as_remote(tmp_path / "x.zarr")
    with pytest.raises(StoreError, match=r"chunk \(0, 0\) of .*x\.zarr.*Zstd.*restore the chunk") as raised:
        read_region(array, (slice(0, 8), slice(0, 8)))
    assert not isinstance(raised.value, DamagedError)


class ServerError(Exception):
    """As aiohttp's, which are no OSErrors and cannot be pickled."""

    def __init__(self, status: int, url: str) -> None:
        super().__init__(f"{status} for {url}")
        self.request = threading.Lock()


def refusing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """From now on no URL gives chunks."""
    get = FsspecStore.get

    async def refuse(store: FsspecStore, key: str, *arguments: Any, **options: Any) -> Any:
        if "/" in key:
            raise error
        return await get(store, key, *arguments, **options)

    monkeypatch.setattr(FsspecStore, "get", refuse)


@pytest.mark.parametrize(
    "error", [ServerError(503, "x"), PermissionError(13, "no"), ConnectionRefusedError(111, "no")], ids=repr
)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_store_that_does_not_give_a_chunk_is_to_be_looked_at(
    error: Exception, sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored("v3-sharded" if sharded else "v3-plain", tmp_path / "x.zarr", np.ones((8, 8), "f4"), (4, 4))
    array = as_remote(tmp_path / "x.zarr")
    refusing(monkeypatch, error)
    with pytest.raises(StoreError) as raised:
        read_region(array, (slice(0, 8), slice(0, 8)))
    shard = "in shard " * sharded
    assert str(raised.value) == (
        f"chunk (0, 0) of file://{tmp_path}/x.zarr cannot be read ({shard}file://{tmp_path}/x.zarr/c/0/0):"
        f" {type(error).__name__}: {error}; see that the storage answers, and lets you read, and run it again"
    )
    assert not isinstance(raised.value, DamagedError)


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
@pytest.mark.parametrize(
    "error", [ServerError(503, "x"), PermissionError(13, "no"), OSError(5, "no answer")], ids=repr
)
@pytest.mark.parametrize("store", [LocalStore, FsspecStore])
def test_a_part_of_a_shard_that_zarr_is_not_given_is_not_damaged(
    error: Exception, store: type[Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a codec that zarr alone decodes; from 3.3 on it raises what it is answered in a group."""
    array = zarr.create_array(
        tmp_path / "x.zarr", shape=(8, 8), chunks=(4, 4), shards=(8, 8), dtype="f4", compressors=[LZMA()]
    )
    array[...] = np.ones((8, 8), "f4")
    if store is FsspecStore:
        array = as_remote(tmp_path / "x.zarr")
    get: Any = store.get

    async def refuse(asked: Any, *arguments: Any, **options: Any) -> Any:
        if any(isinstance(one, RangeByteRequest) for one in (*arguments, *options.values())):
            raise error
        return await get(asked, *arguments, **options)

    monkeypatch.setattr(store, "get", refuse)
    with pytest.raises(StoreError) as raised:
        read_region(array, (slice(0, 8), slice(0, 8)))
    name = name_of(array)
    assert str(raised.value) == (
        f"chunk (0, 0) of {name} cannot be read (in shard {name}/c/0/0): {type(error).__name__}: {error}; see that the"
        " storage answers, and lets you read, and run it again"
    )
    assert not isinstance(raised.value, DamagedError)
    assert raised.value.__cause__ is error


def test_what_a_server_refuses_ends_a_product_with_our_error(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored("v3-plain", tmp_path / "x.zarr", np.ones((8, 8), "f4"), (4, 4))
    refusing(monkeypatch, ServerError(503, "x"))
    x = as_remote(tmp_path / "x.zarr")
    with pytest.raises(StoreError, match=r"^chunk \(0, 0\) of .*: ServerError: 503 for x; see that the"):
        tw.matmul(x, x, tmp_path / "c", cluster=client, device="cpu")


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
        read_region(array, (slice(0, 8), slice(0, 8)))


def test_an_array_that_goes_away_while_it_is_read_is_missed(tmp_path: Path) -> None:
    array = any_way("3 none", tmp_path / "x.zarr", np.ones((8, 8), "f4"), (4, 4))
    chunk_file(array, (0, 0)).unlink()
    first, *others = region_reads(array, (slice(0, 8), slice(0, 8)))
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
    array = as_remote(tmp_path / "x.zarr")
    region = (slice(0, 8), slice(0, 8))
    np.testing.assert_array_equal(read_region(array, region), np.full((8, 8), fill, "f4"))
    (tmp_path / "x.zarr").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=r"x\.zarr.*: there is no Zarr array at .*zarr\.json: not found"):
        read_region(array, region)
