"""Regions of stored matrices as rectangles of bytes in files, brought to a device that host memory pretends to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, Crc32cCodec, TransposeCodec, ZstdCodec

from tests.kernels.gemm.pipes import pipe_at
from tests.kernels.gpu.pretended_driver import BLOCK, Driver, run
from tests.sampling import examples
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.store.region_read import region_reads, region_uploads
from tilewright.pipeline.transfer.file_rectangles import Rectangle, StoredChunk
from tilewright.pipeline.transfer.file_upload import Upload
from tilewright.pipeline.transfer.zstd_chunks import ChunkUpload

CHECKED = {2: numcodecs.Zstd(level=1, checksum=True), 3: ZstdCodec(level=1, checksum=True)}
"""Zstandard's codec, by Zarr's format."""


def store(folder: Path, data: np.ndarray, **options: object) -> zarr.Array:
    array = zarr.create_array(
        str(folder), shape=data.shape, dtype=data.dtype, **{"compressors": None, **options}
    )
    array[...] = data
    return zarr.open_array(str(folder), mode="r")


def bring(array: zarr.Array, region: tuple[slice, slice], pitch: int, threads: int) -> tuple[np.ndarray, int]:
    """The region, where a wider matrix would have it, and how many chunks the loop moved."""
    rows, columns = (part.stop - part.start for part in region)
    device = np.zeros((rows, pitch), array.dtype)
    parts, others = region_uploads(array, region, device.ctypes.data, device.strides[0])
    driver = Driver()  # the upload has its functions' addresses alone
    rectangles = [part.source for part in parts if isinstance(part.source, Rectangle)]
    chunks = [part.source for part in parts if isinstance(part.source, StoredChunk)]
    assert not (rectangles and chunks)
    upload = (
        ChunkUpload(chunks, BLOCK, driver.functions_zstd)
        if chunks
        else Upload(rectangles, BLOCK, threads, driver.functions)
    )
    run(upload, threads)
    for read in others + [read for place in upload.failed() for read in parts[place].reads()]:
        read.read(device[read.target])
    moved = len(parts) - len(upload.failed())
    assert driver.copies >= moved
    assert not device[:, columns:].any()
    return device[:, :columns], moved


@settings(deadline=None, max_examples=examples(60))
@given(data=st.data())
def test_any_region_of_any_grid(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    chunks = data.draw(st.integers(1, 17)), data.draw(st.integers(1, 17))
    zarr_format = data.draw(st.sampled_from([2, 3]))
    options: dict[str, object] = {"chunks": chunks, "zarr_format": zarr_format}
    if zarr_format == 3 and data.draw(st.booleans()):
        options["shards"] = chunks[0] * data.draw(st.integers(1, 3)), chunks[1] * data.draw(st.integers(1, 3))
    options["compressors"] = data.draw(st.sampled_from([None, "auto", CHECKED[zarr_format]]))
    kind = data.draw(st.sampled_from(["<f4", "<f8", ">f4", "<i8", "|u1"]))
    values = np.arange(1, shape[0] * shape[1] + 1).reshape(shape).astype(kind)
    array = store(tmp_path_factory.mktemp("array"), values, **options)
    region = []
    for side in shape:
        start = data.draw(st.integers(0, side - 1))
        region.append(slice(start, data.draw(st.integers(start + 1, side))))
    whole = (region[0], region[1])
    pitch = region[1].stop - region[1].start + data.draw(st.integers(0, 5))
    found, moved = bring(array, whole, pitch, data.draw(st.integers(1, 3)))
    np.testing.assert_array_equal(found, values[whole])
    touched = len(
        {
            (r // chunks[0], c // chunks[1])
            for r in range(shape[0])[whole[0]]
            for c in range(shape[1])[whole[1]]
        }
    )
    assert moved == (touched if array.dtype.isnative else 0)


@pytest.mark.parametrize("compressors", [None, "auto"])
@pytest.mark.parametrize("shards", [None, (20, 20), {"shape": (20, 20), "index_location": "start"}])
def test_a_chunk_that_was_never_written_is_the_fill_value(
    tmp_path: Path, shards: Any, compressors: str | None
) -> None:
    array = zarr.create_array(
        str(tmp_path / "a"),
        shape=(20, 20),
        chunks=(10, 10),
        shards=shards,
        dtype="f4",
        fill_value=7,
        compressors=compressors,
    )
    array[:10, 10:] = 3
    found, moved = bring(array, (slice(0, 20), slice(0, 20)), 20, 2)
    np.testing.assert_array_equal(found, array[...])
    assert moved == 1


@pytest.mark.parametrize(
    "options",
    [
        {"compressors": BloscCodec()},
        {"compressors": [ZstdCodec(), Crc32cCodec()]},
        {"compressors": "auto", "filters": [TransposeCodec(order=(1, 0))]},
        {"compressors": "auto", "zarr_format": 2, "order": "F"},
    ],
)
def test_what_else_is_encoded_is_left_to_those_who_decode(tmp_path: Path, options: dict[str, object]) -> None:
    values = np.arange(400, dtype=np.float32).reshape(20, 20)
    array = store(tmp_path / "a", values, chunks=(10, 10), **options)
    whole = slice(0, 20), slice(0, 20)
    parts, others = region_uploads(array, whole, 0, 80)
    assert parts == []
    assert len(others) == len(region_reads(array, whole)) == 4
    found, _ = bring(array, whole, 20, 1)
    np.testing.assert_array_equal(found, values)


def test_a_damaged_chunk_that_is_compressed_is_an_error_that_names_it(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((20, 20))
    array = store(tmp_path / "a", values, chunks=(10, 10), compressors=CHECKED[3])
    damaged = tmp_path / "a" / "c" / "1" / "0"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1  # the checksum's last byte, behind all that the chunk has
    damaged.write_bytes(data)
    with pytest.raises(StoreError, match=r"chunk \(1, 0\) of .* cannot be read .*checksum"):
        bring(array, (slice(0, 20), slice(0, 20)), 20, 2)


@pytest.mark.parametrize("compressors", [None, "auto"])
@pytest.mark.parametrize("shards", [None, (20, 20)])
def test_a_pipe_in_place_of_a_chunk_is_an_error_that_names_it(
    tmp_path: Path, shards: tuple[int, int] | None, compressors: str | None
) -> None:
    ones = np.ones((20, 20), np.float32)
    array = store(tmp_path / "a", ones, chunks=(10, 10), shards=shards, compressors=compressors)
    with (
        pipe_at(tmp_path / "a" / "c" / "0" / "0"),
        pytest.raises(StoreError, match=r"chunk \(0, 0\) of .* cannot be read .*: it is a pipe"),
    ):
        bring(array, (slice(0, 20), slice(0, 20)), 20, 2)


@pytest.mark.parametrize(("by", "found"), [(-4, 396), (4, 404), (-400, 0)])
def test_a_chunk_of_another_length_is_an_error_that_names_it(tmp_path: Path, by: int, found: int) -> None:
    array = store(tmp_path / "a", np.ones((20, 20), np.float32), chunks=(10, 10))
    damaged = tmp_path / "a" / "c" / "1" / "0"
    damaged.write_bytes((damaged.read_bytes() + bytes(4))[: 400 + by])
    with pytest.raises(StoreError, match=rf"chunk \(1, 0\) of .* {found} bytes"):
        bring(array, (slice(0, 20), slice(0, 20)), 20, 2)


@pytest.mark.parametrize(
    ("place", "number"), [(0, 10**6), (0, 2**63 + 5), (1, 2**64 - 8), (1, 396), (0, 2**64 - 2)]
)
def test_an_inner_chunk_that_cannot_be_where_its_shard_says_is_an_error(
    tmp_path: Path, place: int, number: int
) -> None:
    """place: of the number in the first chunk's entry, offset and length."""
    ones = np.ones((20, 20), np.float32)
    array = store(tmp_path / "a", ones, chunks=(10, 10), shards=(20, 20))
    shard = tmp_path / "a" / "c" / "0" / "0"
    data = bytearray(shard.read_bytes())
    begin = len(data) - 4 * 16 - 4  # the index lies at the end, and its checksum behind it
    data[begin + 8 * place : begin + 8 * place + 8] = number.to_bytes(8, "little")
    data[-4:] = google_crc32c.value(bytes(data[begin:-4])).to_bytes(4, "little")
    shard.write_bytes(data)
    with pytest.raises(StoreError, match=r"chunk \(0, 0\) of .* cannot be read"):
        bring(array, (slice(0, 20), slice(0, 20)), 20, 2)
