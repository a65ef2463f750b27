"""The loop from files to a device, with a driver of Python functions whose device is host memory."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.gemm.pipes import pipe_at
from tests.kernels.gpu.pretended_driver import BLOCK, Driver, run
from tests.open_files import open_under
from tests.sampling import examples
from tilewright.kernels.gpu.device_choice import SIMULATOR, driver_library
from tilewright.pipeline.transfer import calls, file_upload
from tilewright.pipeline.transfer.file_rectangles import ANY_LENGTH, Rectangle
from tilewright.pipeline.transfer.file_upload import DRIVER, LONGEST_RUN, Upload, _run_length


@pytest.fixture
def driver() -> Driver:
    return Driver()


def write(path: Path, nbytes: int, seed: int = 0) -> np.ndarray:
    data = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    path.write_bytes(data.tobytes())
    return data


@settings(deadline=None, max_examples=examples(60))
@given(data=st.data(), threads=st.integers(1, 3))
def test_rectangles_of_any_shape_come_to_their_places(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, threads: int
) -> None:
    folder, driver = tmp_path_factory.mktemp("files"), Driver()
    device = np.zeros((4, 200_000), np.uint8)
    expected = device.copy()
    rectangles = []
    for place in range(data.draw(st.integers(0, 4))):
        rows, width = (
            data.draw(st.integers(1, 30)),
            data.draw(st.sampled_from([1, 7, 64, 999, 1000, 1001, 2500])),
        )
        stride = width + data.draw(st.sampled_from([0, 0, 1, 50, 20 * width]))
        pitch = width + data.draw(st.sampled_from([0, 0, 3, 500]))
        offset = data.draw(st.integers(0, 100))
        path = folder / f"{place}.bin"
        stored = write(path, offset + (rows - 1) * stride + width + data.draw(st.integers(0, 9)), place)
        length = data.draw(st.sampled_from([ANY_LENGTH, len(stored)]))
        target = device[place].ctypes.data
        rectangles.append(Rectangle(str(path), offset, length, rows, width, stride, target, pitch))
        for row in range(rows):
            begin = offset + row * stride
            expected[place, row * pitch : row * pitch + width] = stored[begin : begin + width]
    upload = Upload(rectangles, BLOCK, threads, driver.functions)
    run(upload, threads)
    assert upload.failed() == []
    np.testing.assert_array_equal(device, expected)
    assert driver.copies == driver.records == upload.blocks
    assert driver.waits == upload.blocks


def test_rows_of_which_much_is_wanted_are_read_several_at_once(driver: Driver, tmp_path: Path) -> None:
    write(tmp_path / "a", 100 * 50)
    device = np.zeros(100 * 40, np.uint8)
    wide = Rectangle(str(tmp_path / "a"), 0, 5000, 100, 40, 50, device.ctypes.data, 40)
    assert Upload([wide], BLOCK, 1, driver.functions).blocks == 5
    narrow = wide._replace(width=3, pitch=3)  # a sixteenth of 50 is more than that: read row by row, packed
    assert Upload([narrow], BLOCK, 1, driver.functions).blocks == 1


def test_a_thread_takes_adjacent_blocks_and_fewer_towards_the_end(driver: Driver, tmp_path: Path) -> None:
    stored, threads = write(tmp_path / "a", 200 * BLOCK), 3
    device = np.zeros(200 * BLOCK, np.uint8)
    rectangle = Rectangle(
        str(tmp_path / "a"), 0, ANY_LENGTH, 1, len(device), len(device), device.ctypes.data, len(device)
    )
    run(Upload([rectangle], BLOCK, threads, driver.functions), threads)
    np.testing.assert_array_equal(device, stored)
    blocks = {
        number: stream
        for stream, targets in driver.targets.items()
        for number in ((target - device.ctypes.data) // BLOCK for target in targets)
    }
    assert sorted(blocks) == list(range(200))
    for first in range(0, 136, LONGEST_RUN):  # as long as there are 48 and more left for two runs each
        assert len({blocks[number] for number in range(first, first + LONGEST_RUN)}) == 1
    left = [200 - number for number in range(200) if _run_length(200 - number, threads) < LONGEST_RUN]
    assert left[0] == 2 * threads * LONGEST_RUN - 1
    assert [_run_length(count, threads) for count in (12, 11, 1)] == [2, 1, 1]


def test_what_cannot_be_read_is_named_and_the_rest_is_moved(driver: Driver, tmp_path: Path) -> None:
    good = write(tmp_path / "good", 3000)
    write(tmp_path / "short", 2000)
    device = np.zeros((4, 3000), np.uint8)

    def whole(name: str, place: int, length: int = ANY_LENGTH) -> Rectangle:
        address = device[place].ctypes.data
        return Rectangle(str(tmp_path / name), 0, length, 1, 3000, 3000, address, 3000)

    missing, longer, wrong = whole("missing", 0), whole("short", 1), whole("good", 2, 2999)
    pipes = [whole("pipe", 0), whole("pipe", 0, 3000)]
    upload = Upload([missing, longer, wrong, whole("good", 3, 3000), *pipes], BLOCK, 2, driver.functions)
    with pipe_at(tmp_path / "pipe"):
        run(upload, 2)
    assert upload.failed() == [0, 1, 2, 4, 5]
    np.testing.assert_array_equal(device[3], good)
    assert not device[[0, 2]].any()


@pytest.mark.parametrize("refusing", DRIVER)
def test_what_the_driver_refuses_is_named(driver: Driver, tmp_path: Path, refusing: str) -> None:
    write(tmp_path / "a", 4000)
    device = np.zeros(8000, np.uint8)
    driver.refuse = {refusing}
    pitch = 200 if refusing == "cuMemcpy2DAsync_v2" else 100
    rectangle = Rectangle(str(tmp_path / "a"), 0, 4000, 40, 100, 100, device.ctypes.data, pitch)
    upload = Upload([rectangle], BLOCK, 1, driver.functions)
    run(upload, 1)
    assert upload.failed() == [0]


def test_no_descriptor_is_left_open(driver: Driver, tmp_path: Path) -> None:
    device = np.zeros(100 * 30, np.uint8)
    rectangles = []
    for place in range(100):
        write(tmp_path / str(place), 30)
        rectangles.append(
            Rectangle(
                str(tmp_path / str(place)),
                0,
                31 * (place % 2) or 30,
                1,
                30,
                30,
                device.ctypes.data + 30 * place,
                30,
            )
        )
    upload = Upload(rectangles, BLOCK, 3, driver.functions)
    run(upload, 3)
    assert upload.failed() == list(range(1, 100, 2))
    assert open_under(tmp_path) == []


def test_it_is_available_where_the_driver_is() -> None:
    assert file_upload.available() == (driver_library() is not None and not SIMULATOR)


def test_a_driver_by_another_of_its_names_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As images have it that bring the library's short name alone."""
    load, tried = ctypes.CDLL, []

    def found(name: str | None) -> object:
        if name is None:
            return load(None)
        tried.append(name)
        if name != "libcuda.so":
            raise OSError(name)
        return SimpleNamespace(**{function: load(None).open for function in DRIVER})

    monkeypatch.setattr(ctypes, "CDLL", found)
    addresses = calls.addresses.__wrapped__(file_upload.SYSTEM, DRIVER)
    assert tried == ["libcuda.so.1", "libcuda.so"]
    assert addresses.tolist()[-len(DRIVER) :] == [addresses[0]] * len(DRIVER)
