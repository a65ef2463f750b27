"""The loops that bring compressed chunks to a device and back, with a driver whose device is host memory."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.gemm.pipes import pipe_at
from tests.kernels.gpu.pretended_driver import BLOCK, Driver, lanes, run
from tests.open_files import open_under
from tests.sampling import examples
from tilewright.kernels.gpu.device_choice import SIMULATOR, driver_library
from tilewright.pipeline.transfer import file_download, file_upload, zstd, zstd_chunks
from tilewright.pipeline.transfer.file_rectangles import ANY_LENGTH, StoredChunk
from tilewright.pipeline.transfer.zstd_chunks import ChunkUpload, store_chunk


def content_of(rows: int, stride: int, kind: str) -> np.ndarray:
    """Bytes that compress well, or not at all, or to next to nothing."""
    values = {"text": 5, "noise": 256, "zeros": 1}[kind]
    return np.random.default_rng(rows).integers(0, values, (rows, stride), np.uint8)


def compressed(content: np.ndarray, *, checksum: bool = False, sized: bool = True) -> bytes:
    compressor = zstandard.ZstdCompressor(write_checksum=checksum, write_content_size=sized)
    return compressor.compress(content.tobytes())


def chunk_at(path: Path, content: np.ndarray, device: np.ndarray) -> StoredChunk:
    """All of a chunk in a file of its own."""
    rows, stride = content.shape
    place = device.ctypes.data
    return StoredChunk(str(path), 0, ANY_LENGTH, rows, stride, 0, 0, rows, stride, place, stride)


@settings(deadline=None, max_examples=examples(30))
@given(data=st.data(), threads=st.integers(1, 3), memory=st.sampled_from([11, 700, 2**20]))
def test_any_part_of_any_chunk_comes_to_its_place(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, threads: int, memory: int
) -> None:
    folder, driver = tmp_path_factory.mktemp("files"), Driver()
    device = np.zeros((4, 100_000), np.uint8)
    expected = device.copy()
    chunks = []
    for place in range(data.draw(st.integers(1, 4))):
        rows = data.draw(st.integers(1, 30))
        stride = data.draw(st.sampled_from([1, 7, 64, 333, 999, 1000, 1001, 2500]))
        content = content_of(rows, stride, data.draw(st.sampled_from(["text", "noise", "zeros"])))
        stored = compressed(content, checksum=data.draw(st.booleans()), sized=data.draw(st.booleans()))
        top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, stride - 1))
        height, width = data.draw(st.integers(1, rows - top)), data.draw(st.integers(1, stride - left))
        if data.draw(st.booleans()):  # all of it, the most usual case
            top, left, height, width = 0, 0, rows, stride
        pitch = width + data.draw(st.sampled_from([0, 0, 3, 500]))
        offset, behind = data.draw(st.integers(0, 50)), data.draw(st.integers(0, 50))
        path = folder / str(place)
        path.write_bytes(bytes(offset) + stored + bytes(behind))
        length = len(stored) if behind else data.draw(st.sampled_from([len(stored), ANY_LENGTH]))
        target = device[place].ctypes.data
        chunks.append(
            StoredChunk(str(path), offset, length, rows, stride, top, left, height, width, target, pitch)
        )
        for row in range(height):
            expected[place, row * pitch : row * pitch + width] = content[top + row, left : left + width]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zstd, "STORED_NBYTES", memory)
        upload = ChunkUpload(chunks, BLOCK, driver.functions_zstd)
        assert upload.blocks == len(chunks)
        run(upload, threads)
    assert upload.failed() == []
    np.testing.assert_array_equal(device, expected)
    assert driver.copies == driver.records


def test_a_chunk_that_is_not_as_it_should_be_is_named_the_rest_moved(tmp_path: Path) -> None:
    content = content_of(40, 100, "text")
    good = compressed(content, checksum=True)
    flipped = bytearray(good)
    flipped[-1] ^= 1
    stored = {
        "missing": None,
        "empty": b"",
        "no frame": b"This was never compressed.",
        "cut short": good[:-1],
        "checksum": bytes(flipped),
        "too short": compressed(content[:39]),
        "too long": compressed(np.concatenate([content, content[:1]])),
        "something behind": good + b"x",
        "another frame behind": good + compressed(content[:1]),
        "of two frames": compressed(content[:20]) + compressed(content[20:]),
        "good": good,
    }
    device = np.zeros((len(stored), *content.shape), np.uint8)
    chunks = []
    for place, (name, data) in enumerate(stored.items()):
        if data is not None:
            (tmp_path / name).write_bytes(data)
        chunks.append(chunk_at(tmp_path / name, content, device[place]))
    chunks.append(chunks[-1]._replace(nbytes=len(good) + 1))  # more than the file has
    chunks.append(chunks[0]._replace(path=str(tmp_path / "pipe")))
    chunks.append(chunks[-1]._replace(nbytes=len(good)))
    driver = Driver()
    upload = ChunkUpload(chunks, BLOCK, driver.functions_zstd)
    with pipe_at(tmp_path / "pipe"):
        run(upload, 2)
    names = [*stored, "beyond the file's end", "pipe", "pipe of that length"]
    assert [names[place] for place in upload.failed()] == [*list(stored)[:-2], *names[-3:]]
    for moved in (-1, -2):  # two frames that make a chunk together are one
        np.testing.assert_array_equal(device[moved], content)
    assert open_under(tmp_path) == []


@pytest.mark.parametrize("refusing", file_upload.DRIVER)
def test_what_the_driver_refuses_on_the_way_in_is_named(tmp_path: Path, refusing: str) -> None:
    content, driver = content_of(40, 100, "text"), Driver()
    (tmp_path / "a").write_bytes(compressed(content))
    device = np.zeros((40, 200), np.uint8)
    driver.refuse = {refusing}
    chunk = chunk_at(tmp_path / "a", content, device)
    upload = ChunkUpload(
        [chunk._replace(pitch=200) if "2D" in refusing else chunk], BLOCK, driver.functions_zstd
    )
    run(upload, 1)
    assert upload.failed() == [0]


def test_a_block_that_cannot_be_waited_for_is_not_filled(tmp_path: Path) -> None:
    content, driver = content_of(40, 100, "text"), Driver()
    (tmp_path / "a").write_bytes(compressed(content))
    chunk = chunk_at(tmp_path / "a", content, np.zeros_like(content))
    driver.refuse = {"cuEventSynchronize"}
    ((words, memory),) = lanes(1)
    upload = ChunkUpload([chunk], BLOCK, driver.functions_zstd)
    upload.run(words)
    assert upload.failed() == [0]
    assert (memory == 0xEE).all(), "what was in it may be on its way to the device"


def stored_by_loop(
    path: Path, device: np.ndarray, width: int, driver: Driver, *, level: int, checksum: bool = False
) -> bool:
    ((words, memory),) = lanes(1)
    with open(path, "wb") as file:
        good, total, working, waiting = store_chunk(
            file.fileno(),
            device.ctypes.data,
            device.shape[1],
            device.shape[0],
            width,
            level,
            checksum,
            BLOCK,
            words,
            driver.functions_zstd_out,
        )
    assert min(working, waiting) >= 0
    assert not good or total == xxhash.xxh3_64_intdigest(path.read_bytes())
    assert (memory[:, BLOCK:] == 0xEE).all(), "written behind a block"
    return good


@settings(deadline=None, max_examples=examples(30))
@given(
    rows=st.integers(1, 30),
    width=st.sampled_from([1, 7, 64, 333, 999, 1000, 1001, 2500]),
    gap=st.sampled_from([0, 0, 3, 500]),
    kind=st.sampled_from(["text", "noise", "zeros"]),
    level=st.sampled_from([0, 1, 3, 9, -5]),
    checksum=st.booleans(),
    room=st.sampled_from([1, 50, 2**20]),
)
def test_rectangles_of_any_shape_are_compressed(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    width: int,
    gap: int,
    kind: str,
    level: int,
    checksum: bool,
    room: int,
) -> None:
    path, driver = tmp_path_factory.mktemp("files") / "out", Driver()
    device = content_of(rows, width + gap, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zstd_chunks, "WRITTEN_NBYTES", room)
        patch.setattr(zstd_chunks, "_spare", [])
        for _ in range(2):  # the second time with the encoder of the first
            assert stored_by_loop(path, device, width, driver, level=level, checksum=checksum)
            stored = path.read_bytes()
            header = zstandard.get_frame_parameters(stored)
            assert (header.content_size, header.has_checksum) == (rows * width, checksum)
            found = np.frombuffer(numcodecs.Zstd().decode(stored), np.uint8)
            np.testing.assert_array_equal(found.reshape(rows, width), device[:, :width])
    assert driver.copies == driver.records


def test_the_level_is_the_codec_s(tmp_path: Path) -> None:
    device, driver = content_of(1000, 300, "text"), Driver()
    for level in (1, 19):
        assert stored_by_loop(tmp_path / str(level), device, 300, driver, level=level, checksum=False)
    fast, small = ((tmp_path / str(level)).stat().st_size for level in (1, 19))
    assert small < fast


@pytest.mark.parametrize("refusing", file_download.DRIVER)
def test_what_the_driver_refuses_on_the_way_out_is_said(tmp_path: Path, refusing: str) -> None:
    device, driver = np.zeros((40, 200), np.uint8), Driver()
    driver.refuse = {refusing}
    width = 100 if "2D" in refusing else 200
    assert not stored_by_loop(tmp_path / "a", device, width, driver, level=0)


def test_a_file_that_may_not_grow_is_said(tmp_path: Path) -> None:
    device, driver = content_of(100, 1000, "noise"), Driver()
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4500, limits[1]))
        good = stored_by_loop(tmp_path / "a", device, 1000, driver, level=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not good
    assert os.path.getsize(tmp_path / "a") == 4500


def test_what_large_windows_took_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoders: list[zstd.Decoder] = []
    encoders: list[object] = []
    monkeypatch.setattr(zstd, "_spare", decoders)
    monkeypatch.setattr(zstd_chunks, "_spare", encoders)
    content, driver = content_of(100, 1000, "text"), Driver()
    device = np.zeros_like(content)
    for bits, kept in ((26, False), (20, True)):
        parameters = zstandard.ZstdCompressionParameters(window_log=bits)
        compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        (tmp_path / "a").write_bytes(compressor.compress(content.tobytes()) + compressor.flush())
        upload = ChunkUpload([chunk_at(tmp_path / "a", content, device)], BLOCK, driver.functions_zstd)
        run(upload, 1)
        assert upload.failed() == []
        assert len(decoders) == kept
    large = np.zeros((2**13, 2**10), np.uint8)
    for level, kept in ((19, False), (3, True)):
        assert stored_by_loop(tmp_path / "b", large, 2**10, driver, level=level)
        assert len(encoders) == kept


def test_they_are_available_where_the_driver_is() -> None:
    assert zstd_chunks.available() == (driver_library() is not None and not SIMULATOR)
