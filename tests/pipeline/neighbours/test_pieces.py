"""Finished blocks of neighbours are held and kept, and what cannot be kept is said."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.neighbours.pieces import Piece, Pieces

FOUND = {"indices": np.arange(6).reshape(3, 2), "values": np.ones((3, 2), np.float32)}
PIECE = Piece(4, 7, 6, 1)


@pytest.mark.parametrize("held_nbytes", [0, 72, 2**20])
def test_what_was_found_is_given_back_and_kept_for_the_next_run(tmp_path: Path, held_nbytes: int) -> None:
    pieces = Pieces.begin(tmp_path / "pieces", "digest")
    pieces.held_nbytes = held_nbytes
    pieces.keep(PIECE, FOUND)
    pieces.keep(Piece(7, 10, 6, 0), FOUND)
    for name, array in FOUND.items():
        np.testing.assert_array_equal(pieces.arrays(PIECE)[name], array)
    assert [block.shape for block in pieces.each([PIECE, Piece(7, 10, 6, 0)], "indices")] == [(3, 2)] * 2
    pieces.settle()
    pieces.close()
    again = Pieces.begin(tmp_path / "pieces", "digest")
    assert again.finished() == [PIECE, Piece(7, 10, 6, 0)]
    np.testing.assert_array_equal(again.arrays(PIECE)["indices"], FOUND["indices"])


@pytest.mark.parametrize("digest", ["digest", ""])
@pytest.mark.parametrize("held_nbytes", [0, 2**20])
def test_the_last_block_is_written_where_the_output_is_not(
    tmp_path: Path, held_nbytes: int, digest: str
) -> None:
    """Where memory does not hold it, it is written as others are."""
    last = Piece(7, 10, 6, 0)
    for fails in (False, True):
        pieces = Pieces.begin(tmp_path / f"pieces-{fails}", digest)
        pieces.held_nbytes = held_nbytes
        pieces.keep(PIECE, FOUND)
        pieces.keep(last, FOUND, last=True)
        np.testing.assert_array_equal(pieces.arrays(last)["indices"], FOUND["indices"])
        if fails:
            pieces.save_last()
        pieces.close()
        written = {path.name for path in (tmp_path / f"pieces-{fails}").glob("*.npz")}
        assert written - {"4-7.npz"} == ({"7-10.npz"} if not held_nbytes or (fails and digest) else set())
        assert "4-7.npz" in written


def test_two_threads_find_what_is_still_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One puts blocks into the output while the other compares some."""
    pieces = Pieces.begin(tmp_path / "pieces", "digest")
    pieces.held_nbytes = 0
    save, waited, go_on = pieces._save, threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> None:
        go_on.wait(10)
        save(*arguments)

    def wait() -> None:
        waited.set()
        pieces.settle()

    monkeypatch.setattr(pieces, "_save", slowly)
    pieces.keep(PIECE, FOUND)
    waiting = threading.Thread(target=wait)
    waiting.start()
    assert waited.wait(10)
    threading.Timer(0.3, go_on.set).start()
    np.testing.assert_array_equal(pieces.arrays(PIECE)["indices"], FOUND["indices"])
    waiting.join(10)
    pieces.close()


def test_a_block_that_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    pieces = Pieces.begin(tmp_path / "pieces", "digest")
    (tmp_path / "pieces" / "4-7.draft").mkdir()
    pieces.keep(PIECE, FOUND)
    with pytest.raises(StoreError, match="cannot keep what blocks have found"):
        pieces.settle()
    pieces.close()
    pieces.drop()
    assert not (tmp_path / "pieces").exists()
