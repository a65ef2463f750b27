"""The device code of `zstd.py` and `lz4.py` compiled for the CPU, one thread to a block, with every access checked: for
tests, which compare it with libzstd and LZ4."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.decoding import lz4, zstd, zstd_copies
from tilewright.kernels.decoding.zstd_tables import ENCODED, GOOD, KIND, LITERAL_NBYTES


@numba.njit
def _no_barrier() -> None:
    """One thread waits for nobody."""


_checked = numba.njit(boundscheck=True)
# Of the module, not of a function around the loops: what a loop closes over is another object in every process, and so
# would be the name under which Numba keeps its code.
_literals, _sequences = zstd.functions(_checked, _no_barrier)
_positions, _spread, _frame = zstd_copies.copies(_checked, _no_barrier)
_lz4_block = lz4.functions(_checked, _no_barrier)


@_checked
def _decode_frames(
    stored: Any,
    words: Any,
    blocks: Any,
    frames: Any,
    constants: Any,
    literal: Any,
    literal_words: Any,
    sequence: Any,
    lengths: Any,
    targets: Any,
    out: Any,
    good: Any,
) -> None:
    tree = np.zeros(zstd.TREE_ENTRIES, np.uint16)
    weights, norm = np.zeros(zstd.SYMBOLS, np.uint8), np.zeros(zstd.SYMBOLS, np.int32)
    table = np.zeros(zstd.SEQUENCE_ENTRIES, np.int32)
    following = np.zeros(zstd.MATCH_CODES, np.int32)
    work, held = (
        np.zeros(zstd.WORK_WORDS, np.int32),
        np.zeros(zstd_copies.HEAD_WORDS + zstd_copies.SEQUENCE_WORDS, np.int64),
    )
    room = np.zeros(zstd_copies.HELD_NBYTES, np.uint8)
    for number in range(len(blocks)):
        if blocks[number, KIND] != ENCODED:
            lengths[number] = blocks[number, LITERAL_NBYTES]
            continue
        _literals(
            stored, words, blocks, number, literal, literal_words, tree, weights, table, norm, work, 0, 1
        )
        found = _sequences(stored, words, blocks, number, sequence, constants, table, norm, following)
        lengths[number] = found if work[0] == GOOD else -1
    for number in range(len(frames)):
        good[number] = _positions(blocks, frames, number, lengths, targets)
    for number in range(len(blocks)):
        _spread(stored, blocks, number, literal, lengths, targets, out, 0, 1)
    for number in range(len(frames)):
        if good[number]:
            good[number] = _frame(blocks, frames, number, literal, sequence, targets, out, held, room, 0, 1)


@_checked
def _decode_lz4(stored: Any, table: Any, out: Any, good: Any) -> None:
    window, ring = np.zeros(lz4.WINDOW_NBYTES, np.uint8), np.zeros(lz4.RING_NBYTES, np.uint8)
    for number in range(len(table)):
        good[number] = _lz4_block(stored, table, number, out, window, ring, 0, 1)


@functools.cache
def _kept(loop: Any) -> Any:
    """A loop whose code is kept from one process to the next: the one that decodes frames takes ten seconds."""
    return kept(loop)


def decode_frames(
    stored: np.ndarray,
    blocks: np.ndarray,
    frames: np.ndarray,
    literal_nbytes: int,
    sequence_count: int,
    out: np.ndarray,
) -> np.ndarray:
    """Decode frames as a GPU does; which of them are good. stored: uint8, of a multiple of 4 bytes, 8 of them behind
    the last block. out: uint8, written. Raises IndexError for an access outside of any array."""
    lengths, targets = np.zeros(len(blocks), np.int64), np.full(len(blocks), -1, np.int64)
    good = np.zeros(len(frames), np.bool_)
    literal = np.zeros(literal_nbytes // 4 * 4 + 4, np.uint8)
    _kept(_decode_frames)(
        stored,
        stored.view(np.uint32),
        blocks,
        frames,
        zstd.constants(),
        literal,
        literal.view(np.uint32),
        np.zeros(max(1, sequence_count), np.uint64),
        lengths,
        targets,
        out,
        good,
    )
    return good


def decode_lz4(stored: np.ndarray, table: np.ndarray, out: np.ndarray) -> np.ndarray:
    """As `decode_frames`, of blocks of LZ4 (`lz4.py`)."""
    good = np.zeros(len(table), np.bool_)
    _kept(_decode_lz4)(stored, table, out, good)
    return good
