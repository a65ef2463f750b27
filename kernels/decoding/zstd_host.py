"""The device code of `zstd.py` and `lz4.py` compiled for the CPU, one thread to a block, with every access checked: for
tests, which compare it with libzstd and LZ4."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from tilewright.kernels.decoding import lz4, zstd, zstd_copies
from tilewright.kernels.decoding.zstd_tables import ENCODED, GOOD, KIND, LITERAL_NBYTES


@numba.njit
def _no_barrier() -> None:
    """One thread waits for nobody."""


@functools.cache
def _frames_loop() -> Any:
    jit = numba.njit(boundscheck=True)
    literals, sequences = zstd.functions(jit, _no_barrier)
    positions, spread, frame = zstd_copies.copies(jit, _no_barrier)

    @numba.njit(boundscheck=True)
    def loop(
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
            literals(
                stored, words, blocks, number, literal, literal_words, tree, weights, table, norm, work, 0, 1
            )
            found = sequences(stored, words, blocks, number, sequence, constants, table, norm, following)
            lengths[number] = found if work[0] == GOOD else -1
        for number in range(len(frames)):
            good[number] = positions(blocks, frames, number, lengths, targets)
        for number in range(len(blocks)):
            spread(stored, blocks, number, literal, lengths, targets, out, 0, 1)
        for number in range(len(frames)):
            if good[number]:
                good[number] = frame(
                    blocks, frames, number, literal, sequence, targets, out, held, room, 0, 1
                )

    return loop


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
    _frames_loop()(
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


@functools.cache
def _lz4_loop() -> Any:
    block = lz4.functions(numba.njit(boundscheck=True), _no_barrier)

    @numba.njit(boundscheck=True)
    def loop(stored: Any, table: Any, out: Any, good: Any) -> None:
        window, ring = np.zeros(lz4.WINDOW_NBYTES, np.uint8), np.zeros(lz4.RING_NBYTES, np.uint8)
        for number in range(len(table)):
            good[number] = block(stored, table, number, out, window, ring, 0, 1)

    return loop


def decode_lz4(stored: np.ndarray, table: np.ndarray, out: np.ndarray) -> np.ndarray:
    """As `decode_frames`, of blocks of LZ4 (`lz4.py`)."""
    good = np.zeros(len(table), np.bool_)
    _lz4_loop()(stored, table, out, good)
    return good
