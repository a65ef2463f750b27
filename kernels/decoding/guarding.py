"""Blocks kept from a decoder that trusts what it reads, where the stored bytes that they are part of are not what was
written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numba
from numba import cuda

from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.numbers import ceil_div
from tilewright.kernels.passes.launcher import Launcher

THREADS = 128


def guard_kernel(
    sums: Any, expected: Any, owners: Any, sources: Any, nbytes: Any, harmless: Any, harmless_nbytes: Any
) -> None:
    """Put a harmless block in the place of each whose chunk has another checksum than it should.

    sums: uint64, expected: int64, a chunk each, read. owners: int64, blocks, read: the place of each one's chunk.
    sources, nbytes: int64, blocks, written. harmless, harmless_nbytes: the address of the other block, and its length.
    Grid: any. Block: THREADS. No shared memory, no barrier: each thread writes the row of its own block.
    """
    number = cuda.grid(1)
    if number < owners.shape[0]:
        chunk = owners[number]
        if numba.int64(sums[chunk]) != expected[chunk]:
            sources[number] = harmless
            nbytes[number] = harmless_nbytes


_I64, _U64 = (numba.types.Array(kind, 1, "C") for kind in (numba.int64, numba.uint64))

GUARD = Launcher(
    lambda: guard_kernel,
    lambda: numba.void(_U64, _I64, _I64, _I64, _I64, numba.int64, numba.int64),
)


def guard(
    sums: Any,
    expected: Any,
    owners: Any,
    sources: Any,
    nbytes: Any,
    harmless: int,
    harmless_nbytes: int,
    stream: Any,
) -> None:
    """Enqueue `guard_kernel`."""
    count = owners.shape[0]
    if count:
        grid = ceil_div(count, THREADS)
        arguments = sums, expected, owners, sources, nbytes, harmless, harmless_nbytes
        GUARD.enqueue((), grid, THREADS, stream, *arguments)


def variants() -> Iterable[Variant]:
    """What tests compile to machine code."""
    yield GUARD.variant("guard blocks")
