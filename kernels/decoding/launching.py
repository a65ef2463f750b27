"""Kernels that decode a batch of Zstandard's frames, or of LZ4's blocks, on a GPU: `zstd.py` and `lz4.py`, launched."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numba
from numba import cuda

from tilewright.kernels.decoding import lz4, zstd, zstd_copies
from tilewright.kernels.decoding.lz4 import RING_NBYTES, WINDOW_NBYTES
from tilewright.kernels.decoding.zstd import (
    SEQUENCE_ENTRIES,
    SYMBOLS,
    TREE_ENTRIES,
    WEIGHT_ENTRIES,
    WORK_WORDS,
)
from tilewright.kernels.decoding.zstd_copies import HEAD_WORDS, HELD_NBYTES, SEQUENCE_WORDS
from tilewright.kernels.decoding.zstd_tables import ENCODED, GOOD, KIND, LITERAL_NBYTES
from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.gpu.compiled import device_function
from tilewright.kernels.numbers import ceil_div
from tilewright.kernels.passes.launcher import Launcher

WARP = 32
ENTROPY_THREADS = 2 * WARP
"""One warp for a block's literals, of which four threads go along the streams, and one for its sequences."""
SPREAD_THREADS = 256
POSITION_THREADS = 32
NORM_ENTRIES = 64
FRAME_WORK_WORDS = HEAD_WORDS + SEQUENCE_WORDS * WARP


@device_function
def _barrier() -> None:
    """Waits for all threads of a warp, and for what they wrote."""
    cuda.syncwarp()


@functools.cache
def _copies() -> zstd_copies.Copies:
    return zstd_copies.copies(device_function, _barrier)


def _entropy_function() -> Any:
    """The plain function of the kernel that decodes the literals and sequences of blocks.

    stored, words: the same memory, flat, uint8 and uint32, read, with 8 bytes behind the last block. blocks: int64,
    blocks × BLOCK_WORDS. constants: `zstd.constants`. literal, literal_words: the
    same memory, flat, uint8 and uint32, and sequence: flat, uint64, written. lengths:
    int64, written: what each block holds, or -1. Grid: blocks. Block: ENTROPY_THREADS. Shared memory: 12 KiB.
    """
    literals, sequences = zstd.functions(device_function, _barrier)

    def entropy_kernel(
        stored: Any,
        words: Any,
        blocks: Any,
        constants: Any,
        literal: Any,
        literal_words: Any,
        sequence: Any,
        lengths: Any,
    ) -> None:
        tree = cuda.shared.array(TREE_ENTRIES, numba.uint16)
        weights = cuda.shared.array(SYMBOLS, numba.uint8)
        starts = cuda.shared.array(SYMBOLS, numba.int32)
        small_table = cuda.shared.array(WEIGHT_ENTRIES, numba.int32)
        work = cuda.shared.array(WORK_WORDS, numba.int32)
        table = cuda.shared.array(SEQUENCE_ENTRIES, numba.int32)
        norm = cuda.shared.array(NORM_ENTRIES, numba.int32)
        following = cuda.shared.array(NORM_ENTRIES, numba.int32)
        found = cuda.shared.array(1, numba.int64)
        number = numba.int64(cuda.blockIdx.x)
        thread = numba.int64(cuda.threadIdx.x)
        encoded = blocks[number, KIND] == ENCODED
        if encoded:
            if thread < WARP:
                literals(
                    stored,
                    words,
                    blocks,
                    number,
                    literal,
                    literal_words,
                    tree,
                    weights,
                    small_table,
                    starts,
                    work,
                    thread,
                    numba.int64(WARP),
                )
            elif thread == WARP:
                found[0] = sequences(
                    stored, words, blocks, number, sequence, constants, table, norm, following
                )
        cuda.syncthreads()  # both warps are done
        if thread == 0:
            if not encoded:
                lengths[number] = blocks[number, LITERAL_NBYTES]
            elif work[0] == GOOD:
                lengths[number] = found[0]
            else:
                lengths[number] = -1

    return entropy_kernel


def _positions_function() -> Any:
    """The plain function of the kernel that says where each block goes. blocks, frames: int64, × BLOCK_WORDS and ×
    FRAME_WORDS. lengths: int64, read. targets, good: int64, written, for blocks and frames. Grid: any. Block:
    POSITION_THREADS, a frame each."""
    positions = _copies().positions

    def positions_kernel(blocks: Any, frames: Any, lengths: Any, targets: Any, good: Any) -> None:
        number = numba.int64(cuda.grid(1))
        if number < frames.shape[0]:
            good[number] = 1 if positions(blocks, frames, number, lengths, targets) else 0

    return positions_kernel


def _spread_function() -> Any:
    """The plain function of the kernel that puts blocks without sequences in their places. Grid: blocks. Block:
    SPREAD_THREADS."""
    spread = _copies().spread

    def spread_kernel(stored: Any, blocks: Any, literal: Any, lengths: Any, targets: Any, out: Any) -> None:
        lane, lanes = numba.int64(cuda.threadIdx.x), numba.int64(cuda.blockDim.x)
        spread(stored, blocks, numba.int64(cuda.blockIdx.x), literal, lengths, targets, out, lane, lanes)

    return spread_kernel


def _frames_function() -> Any:
    """The plain function of the kernel that puts frames together. good: int64, read and written. Grid: frames. Block:
    WARP. Shared memory: 3 KiB."""
    frame = _copies().frame

    def frames_kernel(
        blocks: Any, frames: Any, literal: Any, sequence: Any, targets: Any, out: Any, good: Any
    ) -> None:
        work = cuda.shared.array(FRAME_WORK_WORDS, numba.int64)
        held = cuda.shared.array(HELD_NBYTES, numba.uint8)
        number, lane = numba.int64(cuda.blockIdx.x), numba.int64(cuda.threadIdx.x)
        if good[number] == 1:
            done = frame(
                blocks, frames, number, literal, sequence, targets, out, work, held, lane, numba.int64(WARP)
            )
            cuda.syncwarp()  # all have seen that it was good
            if lane == 0 and not done:
                good[number] = 0

    return frames_kernel


def _lz4_function() -> Any:
    """The plain function of the kernel that decodes blocks of LZ4. table: int64, blocks × `lz4.WORDS`. good: int64,
    written. Grid: blocks. Block: WARP. Shared memory: 5 KiB."""
    block = lz4.functions(device_function, _barrier)

    def lz4_kernel(stored: Any, table: Any, out: Any, good: Any) -> None:
        number, lane = numba.int64(cuda.blockIdx.x), numba.int64(cuda.threadIdx.x)
        window = cuda.shared.array(WINDOW_NBYTES, numba.uint8)
        ring = cuda.shared.array(RING_NBYTES, numba.uint8)
        done = block(stored, table, number, out, window, ring, lane, numba.int64(WARP))
        if lane == 0:
            good[number] = 1 if done else 0

    return lz4_kernel


_I64 = numba.types.Array(numba.int64, 1, "C")
_TABLE = numba.types.Array(numba.int64, 2, "C")
_U8, _U32, _U64, _I32 = (
    numba.types.Array(kind, 1, "C") for kind in (numba.uint8, numba.uint32, numba.uint64, numba.int32)
)

ENTROPY = Launcher(_entropy_function, lambda: numba.void(_U8, _U32, _TABLE, _I32, _U8, _U32, _U64, _I64))
POSITIONS = Launcher(_positions_function, lambda: numba.void(_TABLE, _TABLE, _I64, _I64, _I64))
SPREAD = Launcher(_spread_function, lambda: numba.void(_U8, _TABLE, _U8, _I64, _I64, _U8))
FRAMES = Launcher(_frames_function, lambda: numba.void(_TABLE, _TABLE, _U8, _U64, _I64, _U8, _I64))
LZ4 = Launcher(_lz4_function, lambda: numba.void(_U8, _TABLE, _U8, _I64))


def decode_zstd(
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
    stream: Any,
) -> None:
    """Enqueue the decoding of frames: ``good`` gets 1 for those that are in their places, else 0. What the arguments
    are, the kernels say."""
    block_count, frame_count = blocks.shape[0], frames.shape[0]
    if not frame_count:
        return
    ENTROPY.enqueue(
        (),
        block_count,
        ENTROPY_THREADS,
        stream,
        stored,
        words,
        blocks,
        constants,
        literal,
        literal_words,
        sequence,
        lengths,
    )
    grid = ceil_div(frame_count, POSITION_THREADS)
    POSITIONS.enqueue((), grid, POSITION_THREADS, stream, blocks, frames, lengths, targets, good)
    SPREAD.enqueue((), block_count, SPREAD_THREADS, stream, stored, blocks, literal, lengths, targets, out)
    FRAMES.enqueue((), frame_count, WARP, stream, blocks, frames, literal, sequence, targets, out, good)


def decode_lz4(stored: Any, table: Any, out: Any, good: Any, stream: Any) -> None:
    """Enqueue the decoding of blocks of LZ4: ``good`` gets 1 for those that fill what they have to, else 0."""
    if table.shape[0]:
        LZ4.enqueue((), table.shape[0], WARP, stream, stored, table, out, good)


def prepare() -> None:
    """Compile and load all of these kernels on the current GPU; nothing is launched."""
    for launcher in (ENTROPY, POSITIONS, SPREAD, FRAMES, LZ4):
        launcher.prepare()


def variants() -> Iterable[Variant]:
    """What tests compile to machine code."""
    for name, launcher in (
        ("entropy", ENTROPY),
        ("positions", POSITIONS),
        ("spread", SPREAD),
        ("frames", FRAMES),
        ("lz4", LZ4),
    ):
        yield launcher.variant(f"decode {name}")
