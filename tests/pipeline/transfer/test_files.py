"""Opening a file for reading, and what else may stand in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.kernels.gemm.pipes import pipe_at
from tests.open_files import open_under
from tilewright.pipeline.transfer import files
from tilewright.pipeline.transfer.files import READ_FLAGS, NotAFileError, open_file, read_at


def test_a_file_is_opened_and_read_from_as_ever(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    descriptor = open_file(tmp_path / "file")
    try:
        room = memoryview(bytearray(4))
        assert (read_at(descriptor, room, 3), bytes(room)) == (4, b"3456")
        assert read_at(descriptor, room, 10) == 0
        assert os.get_blocking(descriptor)
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "nothing")


def test_what_is_no_file_is_named_and_not_waited_for(tmp_path: Path) -> None:
    with pipe_at(tmp_path / "pipe"), pytest.raises(NotAFileError, match="it is a pipe and no file"):
        open_file(tmp_path / "pipe")
    with pytest.raises(NotAFileError, match="it is a folder and no file"):
        open_file(tmp_path)
    with pytest.raises(NotAFileError, match="it is a device and no file"):
        open_file("/dev/null")
    assert open_under(tmp_path) == []


def test_a_file_that_takes_its_time_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one with a lease on it, or one that lies on tape: their file systems refuse who does not wait."""
    (tmp_path / "file").write_bytes(b"0123456789")
    system_open, system_read = os.open, os.preadv

    def slow_open(path: str, flags: int) -> int:
        if flags & os.O_NONBLOCK:
            raise BlockingIOError
        return system_open(path, flags)

    def slow_read(descriptor: int, targets: list[memoryview], offset: int) -> int:
        if not os.get_blocking(descriptor):
            raise BlockingIOError
        return system_read(descriptor, targets, offset)

    room = memoryview(bytearray(4))
    descriptor = os.open(tmp_path / "file", READ_FLAGS)
    monkeypatch.setattr(files.os, "open", slow_open)
    monkeypatch.setattr(files.os, "preadv", slow_read)
    for opened in (descriptor, open_file(tmp_path / "file")):
        assert (read_at(opened, room, 3), bytes(room)) == (4, b"3456")
        os.close(opened)
