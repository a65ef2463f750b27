"""The loop from a device to files, with a driver of Python functions whose device is host memory."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.gpu.pretended_driver import BLOCK, Driver, lanes
from tests.sampling import examples
from tilewright.kernels.gpu.device_choice import SIMULATOR, driver_library
from tilewright.pipeline.transfer import file_download
from tilewright.pipeline.transfer.file_download import DRIVER, store


@contextmanager
def lane() -> Iterator[np.ndarray]:
    ((words, memory),) = lanes(1)
    yield words
    assert (memory[:, BLOCK:] == 0xEE).all(), "written behind a block"


@settings(deadline=None, max_examples=examples(30))
@given(
    rows=st.integers(1, 30),
    width=st.sampled_from([1, 7, 64, 333, 999, 1000, 1001, 2500]),
    gap=st.sampled_from([0, 0, 3, 500]),
)
def test_rectangles_of_any_shape_come_to_the_file(
    tmp_path_factory: pytest.TempPathFactory, rows: int, width: int, gap: int
) -> None:
    path, driver = tmp_path_factory.mktemp("files") / "out", Driver()
    device = np.random.default_rng(rows).integers(0, 256, (rows, width + gap), np.uint8)
    with lane() as words, open(path, "wb") as file:
        good, checksum, writing, waiting = store(
            file.fileno(), device.ctypes.data, width + gap, rows, width, BLOCK, words, driver.functions_out
        )
    assert good
    assert checksum == xxhash.xxh3_64_intdigest(path.read_bytes())
    assert min(writing, waiting) >= 0
    np.testing.assert_array_equal(np.fromfile(path, np.uint8).reshape(rows, width), device[:, :width])
    assert driver.copies == driver.records


def test_a_row_that_is_nearly_a_block_does_not_take_a_block_with_another(tmp_path: Path) -> None:
    device, driver = np.zeros((5, 700), np.uint8), Driver()
    with lane() as words, open(tmp_path / "out", "wb") as file:
        assert store(file.fileno(), device.ctypes.data, 700, 5, 600, BLOCK, words, driver.functions_out)[0]
    assert driver.copies == 5


@pytest.mark.parametrize("refusing", DRIVER)
def test_what_the_driver_refuses_is_said(tmp_path: Path, refusing: str) -> None:
    device, driver = np.zeros((40, 200), np.uint8), Driver()
    driver.refuse = {refusing}
    width = 100 if refusing == "cuMemcpy2DAsync_v2" else 200
    with lane() as words, open(tmp_path / "out", "wb") as file:
        place = device.ctypes.data
        assert not store(file.fileno(), place, 200, 40, width, BLOCK, words, driver.functions_out)[0]


def test_what_the_file_refuses_is_said(tmp_path: Path) -> None:
    device, driver = np.zeros(10_000, np.uint8), Driver()
    (tmp_path / "out").touch()
    with lane() as words, open(tmp_path / "out", "rb") as file:
        assert not store(
            file.fileno(), device.ctypes.data, 10_000, 1, 10_000, BLOCK, words, driver.functions_out
        )[0]
    assert os.path.getsize(tmp_path / "out") == 0


def test_a_file_that_may_not_grow_is_said(tmp_path: Path) -> None:
    """The system writes a part of what it is asked to, and then refuses."""
    device, driver = np.ones(10_000, np.uint8), Driver()
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4500, limits[1]))
        with lane() as words, open(tmp_path / "out", "wb") as file:
            good, *_ = store(
                file.fileno(), device.ctypes.data, 10_000, 1, 10_000, BLOCK, words, driver.functions_out
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not good
    assert os.path.getsize(tmp_path / "out") == 4500


def test_it_is_available_where_the_driver_is() -> None:
    assert file_download.available() == (driver_library() is not None and not SIMULATOR)
