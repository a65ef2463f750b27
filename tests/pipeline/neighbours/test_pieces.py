"""Finished blocks of neighbours are held and kept, and what cannot be kept is said."""

from __future__ import annotations

from pathlib import Path

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


def test_a_block_that_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    pieces = Pieces.begin(tmp_path / "pieces", "digest")
    (tmp_path / "pieces" / "4-7.draft").mkdir()
    pieces.keep(PIECE, FOUND)
    with pytest.raises(StoreError, match="cannot keep what blocks have found"):
        pieces.settle()
    pieces.close()
    pieces.drop()
    assert not (tmp_path / "pieces").exists()
