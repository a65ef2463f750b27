"""Histograms in plain Numba CUDA: the first three rungs of the ladder, which the simulator runs too.

1. ``global-atomic``: every token is one atomic addition in device memory. The only limit is the memory's
   atomic units, and on a text with few distinct bytes all of them queue for the same addresses. It serves
   every kind and any number of documents, so it is also the portable sibling of all faster kernels.
2. ``shared-atomic``: a block counts into 256 bins of shared memory and adds them to device memory once. A warp whose
   lanes meet the same byte still takes turns.
3. ``per-warp``: the same with 256 bins for each warp, so that warps no longer wait for each other.

Each kernel adds into ``counts``, int64[(documents, bins)], and reads ``data``, uint8[n]; both are contiguous.
The counted positions are start <= i < stop, and documents lie between neighbouring entries of ``offsets``,
int64[documents + 1]. Any grid and block give the same counts.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, int32, int64, types, uint8

from tilewright.kernels.gpu import launch
from tilewright.kernels.gpu.compiled import compile_kernel, multiprocessors
from tilewright.kernels.gpu.device_choice import SIMULATOR, current_device
from tilewright.kernels.histograms import tokens
from tilewright.kernels.histograms.tokens import BIGRAM, CODE_MASK, CODEPOINT, Kind
from tilewright.kernels.numbers import WARP, ceil_div

BYTES = 256
THREADS = 256
WARPS = THREADS // WARP
BYTES_PER_THREAD = 64
"""Enough for a block to earn back the clearing and adding up of its bins."""
BLOCKS_PER_MULTIPROCESSOR = 8
MAX_BLOCK_BYTES = 1 << 30
"""Bins of a block hold 32 bits with sign."""

folded_bin = cuda.jit(device=True, inline="always")(tokens.folded_bin)
document_at = cuda.jit(device=True, inline="always")(tokens.document_at)
character_at = cuda.jit(device=True, inline="always")(tokens.character_at)


@cuda.jit(device=True, inline="always")
def token_bin(data, i, lo, hi, code):  # type: ignore[no-untyped-def]
    """The bin of the token that begins at byte ``i`` of the document ``data[lo:hi]``, or -1 for none."""
    if code == CODEPOINT:
        character = character_at(data, i, lo, hi)
        return character & CODE_MASK if character != 0 else -1
    if code == BIGRAM:
        return int(data[i]) << 8 | int(data[i + 1]) if i + 1 < hi else -1
    return folded_bin(int(data[i]), code)


def global_atomic(data, offsets, start, stop, code, counts):  # type: ignore[no-untyped-def]
    """Rung 1. One thread takes every grid-th position. No shared memory."""
    documents = offsets.shape[0] - 1
    i = start + cuda.grid(1)
    while i < stop:
        document = document_at(offsets, i)
        if 0 <= document < documents:
            target = token_bin(data, i, offsets[document], offsets[document + 1], code)
            if target >= 0:
                cuda.atomic.add(counts, (document, target), int64(1))
        i += cuda.gridsize(1)


def shared_atomic(data, offsets, start, stop, code, counts):  # type: ignore[no-untyped-def]
    """Rung 2, for one document of bytes, ascii or letters. Shared memory: 1 KiB."""
    bins = cuda.shared.array(BYTES, int32)
    thread = cuda.threadIdx.x
    for value in range(thread, BYTES, cuda.blockDim.x):
        bins[value] = 0
    cuda.syncthreads()  # all bins are zero before any thread counts

    i = start + cuda.grid(1)
    while i < stop:
        cuda.atomic.add(bins, int(data[i]), int32(1))
        i += cuda.gridsize(1)
    cuda.syncthreads()  # every thread's counts are in before they are read

    for value in range(thread, BYTES, cuda.blockDim.x):
        target = folded_bin(value, code)
        if target >= 0 and bins[value] > 0:
            cuda.atomic.add(counts, (0, target), int64(bins[value]))


def per_warp(data, offsets, start, stop, code, counts):  # type: ignore[no-untyped-def]
    """Rung 3, for one document of bytes, ascii or letters. At most 256 threads. Shared memory: 8 KiB."""
    bins = cuda.shared.array((WARPS, BYTES), int32)
    thread = cuda.threadIdx.x
    for entry in range(thread, WARPS * BYTES, cuda.blockDim.x):
        bins[entry // BYTES, entry % BYTES] = 0
    cuda.syncthreads()  # all bins are zero before any thread counts

    warp = thread // WARP
    i = start + cuda.grid(1)
    while i < stop:
        cuda.atomic.add(bins, (warp, int(data[i])), int32(1))
        i += cuda.gridsize(1)
    cuda.syncthreads()  # every warp's counts are in before they are added up

    for value in range(thread, BYTES, cuda.blockDim.x):
        target = folded_bin(value, code)
        if target >= 0:
            total = int64(0)
            for table in range(WARPS):
                total += bins[table, value]
            if total > 0:
                cuda.atomic.add(counts, (0, target), total)


KERNELS = {"global-atomic": global_atomic, "shared-atomic": shared_atomic, "per-warp": per_warp}
SIGNATURE = types.void(uint8[::1], int64[::1], int64, int64, int32, int64[:, ::1])


@functools.cache
def kernel(name: str) -> Any:
    """Rung ``name``, for `launch.enqueue`."""
    return compile_kernel(KERNELS[name], SIGNATURE)


def launch_portable(
    name: str,
    data: Any,
    offsets: Any,
    start: int,
    stop: int,
    kind: Kind,
    counts: Any,
    stream: Any,
    grid: tuple[int, int] | None = None,
) -> None:
    """Enqueue rung ``name`` with ``grid`` = (blocks, threads), or with one chosen for the size."""
    if stop > start:
        blocks, threads = grid or default_grid(stop - start)
        launch.enqueue(
            kernel(name), blocks, threads, stream, 0, data, offsets, start, stop, kind.code, counts
        )


def default_grid(nbytes: int) -> tuple[int, int]:
    if SIMULATOR:  # each of its threads is a thread of the host
        return 2, WARP
    most = BLOCKS_PER_MULTIPROCESSOR * multiprocessors(current_device())
    blocks = min(ceil_div(nbytes, THREADS * BYTES_PER_THREAD), most)
    return max(blocks, ceil_div(nbytes, MAX_BLOCK_BYTES)), THREADS
