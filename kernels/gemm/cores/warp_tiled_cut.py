"""Which products the warp-tiled kernel takes, and how it cuts them: which tiling, whether k is split, which edges are
launched separately.

Pure arithmetic. The cut is a function of the sides, the dtype, the layouts and the number of multiprocessors
alone, so the order in which an element of C is added up, and with it every bit of the answer, is the same in
every run. Every tiling adds up in the same order; only splitting k changes it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from tilewright.kernels.gemm.base import Problem
from tilewright.kernels.gemm.cores.repitch import as_unsigned
from tilewright.kernels.gemm.cores.warp_tiling import ALONG_K, VECTOR, Tiling
from tilewright.kernels.numbers import WARP, ceil_div, round_up

DTYPES = tuple(np.dtype(code) for code in ("f4", "c8", "u4", "u8"))
"""What is multiplied; signed integers are multiplied as unsigned ones."""
ACCEPTED = (*DTYPES, np.dtype("i4"), np.dtype("i8"))
MAX_SIDE = 2**31 - 1
"""Sides are counted in 32 bits, k too; addresses have 64."""

RATE = {"f4": 96, "c8": 24, "u4": 60, "u8": 14}
"""Multiply-adds of elements that a busy multiprocessor of an H200 finishes a cycle, by dtype."""
LAUNCH_CYCLES = 16_000
"""What a launch costs: about 8 µs, most of it on the host."""
SUM_CYCLES = 24_000
"""What summing split products costs besides moving bytes: another launch, and waiting for the last block."""
REDUCED_NBYTES_PER_CYCLE = 1500
"""Partial sums that the whole device reads and adds a cycle."""
BLOCK_CYCLES = 2_000
"""Filling a block's pipeline; storing its tile takes a cycle an element more."""
SCHEDULERS = 4
"""Of a multiprocessor."""
STRIP = 32
"""Up to this many ragged rows or columns may be computed by a launch of thin tiles."""
TAIL_BANDS = 4
"""Up to this many rows of tiles may be computed by another launch, with smaller tiles or with k split, where the last
wave of large tiles would leave most multiprocessors idle."""
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LEAST_DEPTH = 256
"""k is not split more finely."""
MAX_PARTIAL_NBYTES = 64 * 2**20
"""Scratch memory for partial sums; in the kernel of thin products also for a stretch of C where neither of its sides is
contiguous."""


@dataclass(frozen=True)
class Candidate:
    tiling: Tiling
    efficiency: float
    """Its speed with a full device, relative to the fastest tiling of the dtype."""


# Block m, n, k; warp m, n; lanes along m; stages; blocks a multiprocessor; by columns; copy step. Measured
# on an H200: among some 200 of them these were the fastest, and they spill nothing.
_WIDE = Tiling(128, 256, 8, 64, 64, 8, 4, 1, copy_step=1)
_TALL = Tiling(256, 128, 8, 64, 64, 8, 4, 1, by_columns=True)
LARGE_FLOAT = {
    (VECTOR, VECTOR): Tiling(128, 128, 8, 64, 64, 8, 4, 2, by_columns=True, copy_step=3),
    (VECTOR, ALONG_K): replace(_TALL, copy_step=3),
    (ALONG_K, ALONG_K): _TALL,
}
"""The tiling of large float32 products by the layouts of A and B, where ``_WIDE`` is not the fastest."""
# Tiles of 32 columns with four warps: more blocks, and a warp for every scheduler, where C is small, but fewer
# multiply-adds for each load from shared memory.
_TINY = (
    Candidate(Tiling(64, 32, 16, 32, 16, 8, 3, 4, by_columns=True), 0.6),
    Candidate(Tiling(32, 32, 16, 32, 16, 8, 3, 4, by_columns=True), 0.6),
)
_SMALL = (
    Candidate(Tiling(64, 64, 16, 64, 32, 8, 3, 4, by_columns=True), 0.94),
    Candidate(Tiling(128, 32, 16, 64, 32, 8, 3, 4, by_columns=True), 0.9),
    Candidate(Tiling(32, 128, 16, 32, 64, 8, 3, 4, by_columns=True), 0.93),
    *_TINY,
)
_SQUARE = Tiling(64, 64, 8, 32, 32, 8, 4, 3, by_columns=True)
_SQUARE_WIDE = Tiling(64, 64, 8, 32, 16, 8, 4, 2)
_SMALL_PAIRS = (
    Candidate(Tiling(128, 32, 8, 32, 32, 8, 4, 3, by_columns=True), 0.9),
    Candidate(Tiling(32, 128, 8, 32, 32, 8, 4, 3, by_columns=True), 0.9),
    Candidate(Tiling(32, 32, 8, 16, 16, 8, 4, 4, by_columns=True), 0.75),
)


SHORT = {
    np.dtype("f4"): _SMALL[0],
    np.dtype("u4"): _SMALL[0],
    np.dtype("c8"): Candidate(_SQUARE, 1.0),
    np.dtype("u8"): Candidate(_SQUARE_WIDE, 1.0),
}
"""The tiling where k is less than a slab of any other: the time goes into writing C."""


def candidates(dtype: np.dtype, a_layout: str, b_layout: str) -> tuple[Candidate, ...]:
    """The tilings worth considering, the one for large products first."""
    if dtype == np.float32:
        return (Candidate(LARGE_FLOAT.get((a_layout, b_layout), _WIDE), 1.0), *_SMALL)
    if dtype == np.uint32:
        return (Candidate(Tiling(128, 128, 8, 64, 64, 8, 4, 2), 1.0), *_SMALL)
    if dtype == np.complex64:
        return (Candidate(Tiling(64, 128, 8, 32, 64, 4, 4, 2), 1.0), Candidate(_SQUARE, 0.98), *_SMALL_PAIRS)
    # Lines of the longer side of a thread's tile: each line takes a move (`wide_integer.in_another_register`).
    return (
        Candidate(_SQUARE_WIDE, 1.0),
        Candidate(Tiling(128, 32, 8, 32, 32, 8, 4, 2), 0.9),
        Candidate(Tiling(32, 128, 8, 32, 32, 8, 4, 2), 0.9),
        Candidate(Tiling(32, 32, 8, 16, 16, 8, 4, 4, by_columns=True), 0.75),
    )


@dataclass(frozen=True)
class Part:
    """One launch: rows ``row`` ... ``row + m`` and columns ``column`` ... ``column + n`` of C."""

    row: int
    column: int
    m: int
    n: int
    tiling: Tiling
    depth: int
    """How much of k a block multiplies; a multiple of the slab's depth unless it is all of k."""
    splits: int


def split_depth(k: int, splits: int, block_k: int) -> int:
    return k if splits == 1 else round_up(ceil_div(k, splits), block_k)


@functools.lru_cache(maxsize=4096)
def tiles_of(m: int, n: int, tiling: Tiling, diagonal: int | None = None) -> int:
    """Tiles of a part of C: all, or those that have an element on or below a diagonal, column - row.

    >>> tiles_of(256, 256, _TALL), tiles_of(512, 512, _TALL, 0)
    (2, 6)
    """
    down, across = ceil_div(m, tiling.block_m), ceil_div(n, tiling.block_n)
    if diagonal is None:
        return down * across
    ends = (min((row + 1) * tiling.block_m, m) + diagonal for row in range(down))
    return sum(min(across, max(0, ceil_div(end, tiling.block_n))) for end in ends)


def cycles(
    m: int,
    n: int,
    k: int,
    dtype: np.dtype,
    candidate: Candidate,
    splits: int,
    processors: int,
    diagonal: int | None = None,
) -> float:
    """An estimate of a launch's time, in cycles of a multiprocessor. diagonal: as of `tiles_of`."""
    tiling = candidate.tiling
    at_once = tiling.blocks_per_multiprocessor
    blocks = tiles_of(m, n, tiling, diagonal) * splits
    depth = split_depth(k, splits, tiling.block_k)
    area = tiling.block_m * tiling.block_n
    work = area * depth / (RATE[dtype.str[1:]] * candidate.efficiency) + BLOCK_CYCLES + area
    waves, rest = divmod(blocks, processors * at_once)
    resident = ceil_div(rest, processors)
    # The last wave may leave multiprocessors with few warps: two on each of the schedulers reach full speed,
    # one alone four fifths of it, none nothing.
    warps = resident * tiling.threads / (WARP * SCHEDULERS)
    share = min(1.0, 0.6 + 0.2 * warps) if warps >= 1 else 0.8 * warps
    last = resident / share if resident else 0.0
    spent = work * (waves * at_once + last) + LAUNCH_CYCLES
    if splits > 1:
        spent += SUM_CYCLES + m * n * splits * dtype.itemsize / REDUCED_NBYTES_PER_CYCLE
    return spent


def _fastest(
    m: int,
    n: int,
    k: int,
    dtype: np.dtype,
    layouts: tuple[str, str],
    processors: int,
) -> tuple[float, Part]:
    def options() -> list[tuple[float, Part]]:
        found = []
        # A slab deeper than k would be read from beyond the operands' end.
        able = [one for one in candidates(dtype, *layouts) if one.tiling.block_k <= k]
        for candidate in able or [SHORT[dtype]]:
            for wanted in SPLITS:
                depth = split_depth(k, wanted, candidate.tiling.block_k)
                splits = ceil_div(k, depth)
                if splits > 1 and (
                    depth < LEAST_DEPTH
                    or k - (splits - 1) * depth < candidate.tiling.block_k
                    or m * n * splits * dtype.itemsize > MAX_PARTIAL_NBYTES
                ):
                    continue
                spent = cycles(m, n, k, dtype, candidate, splits, processors)
                found.append((spent, Part(0, 0, m, n, candidate.tiling, depth, splits)))
        return found

    return min(options(), key=lambda option: option[0])


def most_nbytes(m: int, n: int, k: int, dtype: np.dtype) -> int:
    """An upper bound for the partial sums of a product of these sides or smaller ones, or of a part of one, whatever
    its layouts and the GPU."""
    splits = max(splits for splits in SPLITS if splits == 1 or (splits - 1) * LEAST_DEPTH < k)
    if as_unsigned(dtype) not in DTYPES or splits == 1:
        return 0
    return min(MAX_PARTIAL_NBYTES, splits * m * n * dtype.itemsize)


@functools.lru_cache(maxsize=4096)
def cut(
    m: int,
    n: int,
    k: int,
    dtype: np.dtype,
    layouts: tuple[str, str],
    processors: int,
    lower: bool = False,
) -> tuple[Part, ...]:
    """The launches that make up a product, or the part of it on and below the diagonal; they write disjoint parts of
    C.

    That part is cut as all of C is, or not at all: whichever takes less by its own waves of tiles. Its tiles are those
    of all of C, since of smaller ones, which would leave out more, the estimate is too good.
    """
    spent, whole = _fastest(m, n, k, dtype, layouts, processors)
    rows, columns = m % whole.tiling.block_m, n % whole.tiling.block_n
    best: tuple[Part, ...] = (whole,)
    strips = [(x, y) for x, y in ((rows, columns), (rows, 0), (0, columns)) if max(x, y) <= STRIP]
    strips += [(rows + band * whole.tiling.block_m, 0) for band in range(1, TAIL_BANDS + 1)]
    for strip_m, strip_n in strips:
        if strip_m + strip_n == 0 or strip_m >= m or strip_n >= n:
            continue
        parts = []
        total = 0.0
        for row, column, height, width in (
            (0, 0, m - strip_m, n - strip_n),
            (0, n - strip_n, m - strip_m, strip_n),
            (m - strip_m, 0, strip_m, n),
        ):
            if height and width:
                seconds, part = _fastest(height, width, k, dtype, layouts, processors)
                total += seconds
                parts.append(replace(part, row=row, column=column))
        if total < spent:
            spent, best = total, tuple(parts)
    if not lower:
        return best
    by_tiling = {one.tiling: one for one in (*candidates(dtype, *layouts), SHORT[dtype])}

    def of_lower(parts: tuple[Part, ...]) -> float:
        return sum(
            cycles(
                *(part.m, part.n, k, dtype, by_tiling[part.tiling], part.splits, processors),
                part.row - part.column,
            )
            for part in parts
        )

    return min((whole,), best, key=of_lower)


def _readable(outer: int, outer_stride: int, k: int, k_stride: int) -> bool:
    """Whether an operand with these strides (elements) can be copied: one is 1, none runs backwards."""
    return min(outer_stride, k_stride) >= 0 and 1 in (outer_stride, k_stride) and max(outer, k) <= MAX_SIDE


def supports(problem: Problem) -> bool:
    a, b, c = problem.a, problem.b, problem.c
    return (
        c.dtype in ACCEPTED
        and a.dtype == b.dtype == c.dtype
        and min(operand.alignment for operand in (a, b, c)) >= c.dtype.itemsize
        and problem.precision == "full"
        and problem.capability is not None
        and problem.capability >= (8, 0)
        and _readable(problem.m, a.strides[0], problem.k, a.strides[1])
        and _readable(problem.n, b.strides[1], problem.k, b.strides[0])
        and 1 in c.strides
        and min(c.strides) > 0
    )
