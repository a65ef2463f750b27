"""Bytes, ascii and letters at the memory's speed: counters that no two lanes of a warp share.

The table in shared memory has a row of 32 counters for each byte value, and lane l of every warp counts in
column l: in a bank of its own, so no text makes lanes wait for each other, whether it repeats one letter or
is noise. A row is 128 bytes; a shift and a three-input logical operation make a counter's place out of a word
of text, and an atomic addition that returns nothing counts it: three instructions a byte, where the memory
leaves time for seven.

The multiprocessor adds to a shared counter of each bank in every cycle. That beats any way to save additions, such as
comparing neighbours or packing counters: both cost more instructions than they save.

A counter holds 32 bits; a lane reaches 2^32 only where a block counts 2^37 bytes, more than a GPU holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda, int64, types, uint8, uint32, uint64

from tilewright.kernels.gpu import launch
from tilewright.kernels.gpu.compiled import compile_kernel, multiprocessors
from tilewright.kernels.gpu.device_array import address
from tilewright.kernels.gpu.device_choice import current_device
from tilewright.kernels.histograms import tokens
from tilewright.kernels.histograms.tokens import Kind
from tilewright.kernels.numbers import ceil_div
from tilewright.kernels.ptx.memory import global_array, load_vector, shared_add, shared_address

BYTES = 256
COLUMNS = 32
VECTOR = 16
"""Bytes of one load."""
WORDS = VECTOR // 4
TABLE_WORDS = BYTES * COLUMNS

folded_bin = cuda.jit(device=True, inline="always")(tokens.folded_bin)


@cuda.jit(device=True, inline="always")
def column_of(thread):  # type: ignore[no-untyped-def]
    """Where a thread's column begins in each row, in bytes."""
    return (thread & uint32(COLUMNS - 1)) << uint32(2)


@cuda.jit(device=True, inline="always")
def count_byte(value, column, table):  # type: ignore[no-untyped-def]
    """Count ``value``; ``table`` is the table's address in shared memory."""
    shared_add((uint32(value) << uint32(7) | column) + table, uint32(1))


@cuda.jit(device=True, inline="always")
def count_word(word, column, table):  # type: ignore[no-untyped-def]
    """Count the four bytes of ``word``."""
    row = uint32(0x7F80)  # a byte value times 128
    shared_add((((word << uint32(7)) & row) | column) + table, uint32(1))
    shared_add((((word >> uint32(1)) & row) | column) + table, uint32(1))
    shared_add((((word >> uint32(9)) & row) | column) + table, uint32(1))
    shared_add((((word >> uint32(17)) & row) | column) + table, uint32(1))


@cuda.jit(device=True, inline="always")
def row_sum(counters, row):  # type: ignore[no-untyped-def]
    """The sum of a row of the table. Threads that take neighbouring rows begin in different banks."""
    total = uint64(0)
    for column in range(uint32(COLUMNS)):
        total += uint64(counters[row * uint32(COLUMNS) + ((uint32(column) + row) & uint32(COLUMNS - 1))])
    return total


def source(threads: int, unroll: int) -> Callable[..., None]:
    """``lane_private(address, start, stop, code, counts)`` for blocks of ``threads``, as a plain function.

    Adds the bytes at ``address + start`` up to ``address + stop`` (uint64; any alignment) to ``counts``,
    int64 of at least the kind's bins. Each thread has ``unroll`` 16-byte loads under way. Static shared
    memory: `TABLE_WORDS` counters, 32 KiB. Any number of blocks.
    """
    registers_needed = WORDS * unroll

    def lane_private(address, start, stop, code, counts):  # type: ignore[no-untyped-def]
        counters = cuda.shared.array(TABLE_WORDS, uint32)
        table = shared_address(counters)
        thread = uint32(cuda.threadIdx.x)
        for place in range(thread, uint32(TABLE_WORDS), uint32(threads)):
            counters[place] = uint32(0)
        cuda.syncthreads()  # all counters are zero before any thread counts

        column = column_of(thread)
        first = uint64(address) + uint64(start)
        length = uint64(stop - start)
        head = min((~first + uint64(1)) & uint64(VECTOR - 1), length)
        vectors = (length - head) // uint64(VECTOR)
        text = global_array(first, uint8)
        words = global_array(first + head, uint32)
        registers = cuda.local.array(registers_needed, uint32)
        step = uint64(cuda.gridDim.x) * uint64(threads)
        vector = uint64(cuda.blockIdx.x) * uint64(threads) + uint64(thread)
        while vector + uint64(unroll - 1) * step < vectors:
            for turn in range(unroll):
                load_vector(
                    registers,
                    uint32(turn * WORDS),
                    words,
                    (vector + uint64(turn) * step) * uint64(WORDS),
                )
            for word in range(registers_needed):
                count_word(registers[word], column, table)
            vector += uint64(unroll) * step
        while vector < vectors:
            load_vector(registers, uint32(0), words, vector * uint64(WORDS))
            for word in range(WORDS):
                count_word(registers[word], column, table)
            vector += step
        if cuda.blockIdx.x == 0:  # the bytes before the first whole vector and after the last
            if uint64(thread) < head:
                count_byte(text[uint64(thread)], column, table)
            tail = head + vectors * uint64(VECTOR) + uint64(thread)
            if tail < length:
                count_byte(text[tail], column, table)
        cuda.syncthreads()  # every lane's counts are in before they are added up

        if thread < uint32(BYTES):
            target = folded_bin(int64(thread), code)
            total = row_sum(counters, thread)
            if target >= 0 and total > uint64(0):
                cuda.atomic.add(counts, target, int64(total))

    return lane_private


SIGNATURE = types.void(types.uint64, types.int64, types.int64, types.int32, types.Array(types.int64, 1, "C"))
THREADS = 1024
UNROLL = 4
BLOCKS_PER_MULTIPROCESSOR = 2


@functools.cache
def kernel(threads: int = THREADS, unroll: int = UNROLL) -> Any:
    return compile_kernel(source(threads, unroll), SIGNATURE)


def launch_bytes(data: Any, start: int, stop: int, kind: Kind, counts: Any, stream: Any) -> None:
    """Add the bytes ``data[start:stop]`` to ``counts``, a device array int64[bins], on ``stream``."""
    most = BLOCKS_PER_MULTIPROCESSOR * multiprocessors(current_device())
    blocks = min(ceil_div(stop - start, THREADS * VECTOR * UNROLL), most)
    launch.enqueue(kernel(), blocks, THREADS, stream, 0, address(data), start, stop, kind.code, counts)
