"""A part is hashed whenever it may hold other numbers than before, and else only once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tilewright.pipeline.store import content
from tilewright.pipeline.store.content import SETTLED_NS, PartHashes, content_hash

CORNERS = (0, 1, 0, 8)


class Reader:
    """Reads a file of eight numbers, later than it was written; counts how often they are hashed."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.hashed = path, 0
        self.ahead = 2 * SETTLED_NS
        self._hashes = PartHashes(lambda: time.time_ns() + self.ahead)

        def counted(block: np.ndarray) -> int:
            self.hashed += 1
            return content_hash(block)

        monkeypatch.setattr(content, "content_hash", counted)

    def hash(self, then: Callable[[], None] = lambda: None) -> int:
        """then: what happens right after the file was read."""

        path = str(self.path)
        before = self._hashes.status(path, CORNERS)
        held = np.fromfile(self.path, "u1").reshape(1, 8)
        then()
        return self._hashes.of(path, CORNERS, held, before)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    np.arange(8, dtype="u1").tofile(tmp_path / "0")
    return Reader(tmp_path / "0", monkeypatch)


def rewrite(path: Path, value: int) -> None:
    """With its time of modification, in another tick of the clock."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        np.full(8, value, "u1").tofile(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_file_that_nobody_wrote_to_is_hashed_once(reader: Reader) -> None:
    assert len({reader.hash() for _ in range(3)}) == 1
    assert reader.hashed == 1


def test_a_file_whose_time_was_put_back_is_hashed_again(reader: Reader) -> None:
    first = reader.hash()
    rewrite(reader.path, 9)
    second = reader.hash()
    assert second != first
    assert second == content_hash(np.full((1, 8), 9, "u1"))
    assert [reader.hash(), reader.hash()] == [second, second]
    assert reader.hashed == 3, "what is read again and differs is not trusted at once"


def test_a_file_that_changes_as_it_is_read_is_not_taken_for_what_it_was(reader: Reader) -> None:
    first = reader.hash(then=lambda: rewrite(reader.path, 9))
    assert first == content_hash(np.arange(8, dtype="u1").reshape(1, 8))
    assert reader.hash() == content_hash(np.full((1, 8), 9, "u1"))


def test_a_file_of_just_now_is_hashed_every_time(reader: Reader) -> None:
    """A second write within the same tick of its file system's clock would not show."""
    reader.ahead = 0
    for _ in range(3):
        reader.hash()
    assert reader.hashed == 3


def test_of_too_many_parts_the_rest_is_hashed_every_time(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "MOST_KNOWN", 0)
    assert len({reader.hash() for _ in range(3)}) == 1
    assert reader.hashed == 3


def test_what_is_no_file_is_hashed_every_time(reader: Reader, tmp_path: Path) -> None:
    hashes = PartHashes()
    for path in (None, str(tmp_path / "missing")):
        for value in (1, 2):
            block = np.full((1, 8), value, "u1")
            before = hashes.status(path, CORNERS)
            assert hashes.of(path, CORNERS, block, before) == content_hash(block)
