"""Checksums of chunks where they lie on a GPU: those that Zstandard and Zarr's codec ``crc32c`` store beside them.

Methods: XXH64 (Collet, xxHash specification 0.1.1; seed 0), of which Zstandard keeps the lower half; CRC32C (RFC 3720),
whose parts are joined as they are linear: behind a run of zeros each byte of a sum becomes what a table says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numba
import numpy as np
from numba import cuda

from tilewright.kernels.decoding.tables import BEGIN, LENGTH
from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.passes.launcher import Launcher

LANES = 4
"""XXH64's: each takes every fourth word of 8 bytes."""
XXH64_THREADS = 32
"""A warp for each stretch: four threads go along it, each with a lane, and one joins them. Lanes are chains of
dependent multiplications, 1 GB/s a stretch, so the stretches of a batch are hashed at once."""
CRC_THREADS = 128
CRC_RUN = 1024
"""Bytes that a thread takes at once."""
CRC_TABLES = 5 * 256
CRC32C_REFLECTED = 0x82F63B78
"""The polynomial of CRC32C, its bits the other way round."""

PRIMES = np.array(
    [0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5],
    np.uint64,
)


def _xxh64_function() -> Any:
    """The plain function of the kernel that hashes stretches.

    words, bytes_: the same memory, flat, of uint64 and of uint8, read. table: int64, stretches × SUM_WORDS. sums:
    uint64, written: each hash. Grid: stretches. Block: XXH64_THREADS. Shared memory: 32 bytes.
    """
    # The simulator's integers have no end of their own.
    word = (lambda value: int(value) & (2**64 - 1)) if SIMULATOR else numba.uint64
    one, two, three, four, five = (int(prime) for prime in PRIMES)

    @cuda.jit(device=True, inline="always")
    def rotated(value: Any, count: Any) -> Any:
        return word((value << word(count)) | (value >> word(64 - count)))

    @cuda.jit(device=True, inline="always")
    def taken(lane: Any, value: Any) -> Any:
        return word(rotated(word(lane + word(value * word(two))), 31) * word(one))

    def xxh64_kernel(words: Any, bytes_: Any, table: Any, sums: Any) -> None:
        lanes = cuda.shared.array(LANES, numba.uint64)
        number, thread = cuda.blockIdx.x, cuda.threadIdx.x
        begin, length = table[number, BEGIN], table[number, LENGTH]
        stripes = length // 32
        if thread < LANES:
            lane = word(0)
            if thread == 0:
                lane = word(word(one) + word(two))
            elif thread == 1:
                lane = word(two)
            elif thread == 3:
                lane = word(word(0) - word(one))
            at = begin // 8 + thread
            for _ in range(stripes):
                lane = taken(lane, word(words[at]))
                at += LANES
            lanes[thread] = lane
        cuda.syncthreads()  # the lanes are in before they are joined
        if thread == 0:
            found = word(five)
            if stripes:
                found = word(rotated(word(lanes[0]), 1) + rotated(word(lanes[1]), 7))
                found = word(found + word(rotated(word(lanes[2]), 12) + rotated(word(lanes[3]), 18)))
                for place in range(LANES):
                    found = word(found ^ taken(word(0), word(lanes[place])))
                    found = word(word(found * word(one)) + word(four))
            found = word(found + word(length))
            at = stripes * 32
            while at + 8 <= length:
                found = word(found ^ taken(word(0), word(words[(begin + at) // 8])))
                found = word(word(rotated(found, 27) * word(one)) + word(four))
                at += 8
            if at + 4 <= length:
                few = word(0)
                for place in range(4):
                    few |= word(bytes_[begin + at + place]) << word(8 * place)
                found = word(found ^ word(few * word(one)))
                found = word(word(rotated(found, 23) * word(two)) + word(three))
                at += 4
            while at < length:
                found = word(found ^ word(word(bytes_[begin + at]) * word(five)))
                found = word(rotated(found, 11) * word(one))
                at += 1
            found = word(word(found ^ (found >> word(33))) * word(two))
            found = word(word(found ^ (found >> word(29))) * word(three))
            sums[number] = found ^ (found >> word(32))

    return xxh64_kernel


def _reflected_table() -> np.ndarray:
    """What a byte does to a CRC32C: uint32[256]."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(CRC32C_REFLECTED), table >> 1).astype(np.uint32)
    return table


def crc_tables() -> np.ndarray:
    """uint32[5 * 256]: what a byte does to a CRC32C, then for each of its four bytes what becomes of it behind
    `CRC_RUN` zeros."""
    table = _reflected_table()
    bits = (np.uint32(1) << np.arange(32, dtype=np.uint32)).astype(np.uint32)
    for _ in range(CRC_RUN):
        bits = table[bits & 255] ^ (bits >> np.uint32(8))
    tables = [table]
    for byte in range(4):
        values = np.zeros(256, np.uint32)
        for bit in range(8):
            values[(np.arange(256) >> bit & 1) == 1] ^= bits[8 * byte + bit]
        tables.append(values)
    return np.concatenate(tables)


def _crc_function() -> Any:
    """The plain function of the kernel that makes CRC32C of stretches: of runs of CRC_RUN bytes first, a thread each,
    which one thread then joins. The first run is the one that is short. A stretch has four bytes at least.

    bytes_: flat, uint8, read. table: int64, stretches × SUM_WORDS. tables: `crc_tables`. sums: uint64, written. Grid:
    stretches. Block: CRC_THREADS. Shared memory: 6 KiB.
    """
    word = (lambda value: int(value) & 0xFFFFFFFF) if SIMULATOR else numba.uint32

    def crc_kernel(bytes_: Any, table: Any, tables: Any, sums: Any) -> None:
        known = cuda.shared.array(CRC_TABLES, numba.uint32)
        runs = cuda.shared.array(CRC_THREADS, numba.uint32)
        number, thread = cuda.blockIdx.x, cuda.threadIdx.x
        for place in range(thread, CRC_TABLES, CRC_THREADS):
            known[place] = tables[place]
        begin, length = table[number, BEGIN], table[number, LENGTH]
        count = (length + CRC_RUN - 1) // CRC_RUN
        lead = count * CRC_RUN - length
        found = word(0)
        for first in range(0, count, CRC_THREADS):
            cuda.syncthreads()  # the tables are in, and the last runs are joined
            run = first + thread
            if run < count:
                here = word(0)
                at, stop = max(0, run * CRC_RUN - lead), (run + 1) * CRC_RUN - lead
                while at < stop:
                    value = word(bytes_[begin + at])
                    if at < 4:
                        value = word(value ^ word(255))  # what a CRC32C begins with
                    here = word(known[(here ^ value) & word(255)]) ^ (here >> word(8))
                    at += 1
                runs[thread] = here
            cuda.syncthreads()  # the runs are in before they are joined
            if thread == 0:
                for run in range(min(CRC_THREADS, count - first)):
                    moved = word(known[256 + (found & word(255))]) ^ word(
                        known[512 + ((found >> word(8)) & word(255))]
                    )
                    moved ^= word(known[768 + ((found >> word(16)) & word(255))])
                    moved ^= word(known[1024 + (found >> word(24))])
                    found = moved ^ word(runs[run])
        if thread == 0:
            sums[number] = word(found ^ word(0xFFFFFFFF))

    return crc_kernel


_WORDS, _BYTES = (numba.types.Array(kind, 1, "C") for kind in (numba.uint64, numba.uint8))
_TABLE = numba.types.Array(numba.int64, 2, "C")

XXH64 = Launcher(_xxh64_function, lambda: numba.void(_WORDS, _BYTES, _TABLE, _WORDS))
_TABLES = numba.types.Array(numba.uint32, 1, "C")
CRC32C = Launcher(_crc_function, lambda: numba.void(_BYTES, _TABLE, _TABLES, _WORDS))


def xxh64(words: Any, bytes_: Any, table: Any, sums: Any, count: int, stream: Any) -> None:
    """Enqueue the XXH64 of the first ``count`` stretches of a table. words, bytes_: the same memory."""
    if count:
        XXH64.enqueue((), count, XXH64_THREADS, stream, words, bytes_, table, sums)


def crc32c(bytes_: Any, table: Any, tables: Any, sums: Any, count: int, stream: Any) -> None:
    """Enqueue the CRC32C of the first ``count`` stretches of a table. tables: `crc_tables`."""
    if count:
        CRC32C.enqueue((), count, CRC_THREADS, stream, bytes_, table, tables, sums)


def variants() -> Iterable[Variant]:
    """What tests compile to machine code."""
    yield XXH64.variant("xxh64")
    yield CRC32C.variant("crc32c")
