"""Regions of stored matrices as rectangles of bytes in files, brought to a device that host memory pretends to be."""

from __future__ import annotations

from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.pretended_driver import BLOCK, Driver, run
from tilewright.kernels.file_upload import Upload
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.store import region_reads, region_uploads


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
    plain, others = region_uploads(array, region, device.ctypes.data, device.strides[0])
    driver = Driver()  # the upload has its functions' addresses alone
    upload = Upload([part.rectangle for part in plain], BLOCK, driver.functions)
    run(upload, threads)
    for read in others + [read for place in upload.failed() for read in plain[place].reads()]:
        read.read(device[read.target])
    assert driver.copies >= len(plain) - len(upload.failed())
    assert not device[:, columns:].any()
    return device[:, :columns], len(plain) - len(upload.failed())


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_region_of_any_grid(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    chunks = data.draw(st.integers(1, 17)), data.draw(st.integers(1, 17))
    options: dict[str, object] = {"chunks": chunks, "zarr_format": data.draw(st.sampled_from([2, 3]))}
    if options["zarr_format"] == 3 and data.draw(st.booleans()):
        options["shards"] = chunks[0] * data.draw(st.integers(1, 3)), chunks[1] * data.draw(st.integers(1, 3))
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


@pytest.mark.parametrize("shards", [None, (20, 20)])
def test_a_chunk_that_was_never_written_is_the_fill_value(
    tmp_path: Path, shards: tuple[int, int] | None
) -> None:
    array = zarr.create_array(
        str(tmp_path / "a"),
        shape=(20, 20),
        chunks=(10, 10),
        shards=shards,
        dtype="f4",
        fill_value=7,
        compressors=None,
    )
    array[:10, 10:] = 3
    found, moved = bring(array, (slice(0, 20), slice(0, 20)), 20, 2)
    np.testing.assert_array_equal(found, array[...])
    assert moved == 1


def test_compressed_chunks_are_left_to_those_who_decode(tmp_path: Path) -> None:
    array = store(tmp_path / "a", np.ones((20, 20), np.float32), chunks=(10, 10), compressors="auto")
    plain, others = region_uploads(array, (slice(0, 20), slice(0, 20)), 0, 80)
    assert plain == []
    assert len(others) == len(region_reads(array, (slice(0, 20), slice(0, 20)))) == 4


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
