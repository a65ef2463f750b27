"""The shapes of a warp-tiled product: how a tile of C is shared by warps and threads, and how slabs are
copied.

Plain arithmetic on frozen values; no device code.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.kernels.numbers import WARP
from tilewright.kernels.ptx.memory import VECTOR_NBYTES

SECTOR_NBYTES = 32
"""The least that global memory moves: lanes that read along k cover whole sectors."""


@dataclass(frozen=True)
class Tiling:
    """The shape of the work of a block, a warp and a thread, in elements."""

    block_m: int
    block_n: int
    block_k: int
    """Depth of a slab."""
    warp_m: int
    warp_n: int
    lanes_m: int
    """Threads of a warp along the rows of its tile; 32 / lanes_m lie along the columns."""
    stages: int
    """Slabs in shared memory: one being read, the others arriving."""
    blocks_per_multiprocessor: int = 1
    by_columns: bool = False
    """Whether a thread multiplies its fragments column by column rather than row by row. The order decides
    which operands the register file's reuse cache serves, so it was chosen by measuring."""
    copy_step: int = -1
    """The step of a slab in which the copies of a later one are issued, -1 for before its first; found by measuring
    too."""
    group: int = 16
    """Tile rows that are walked together: blocks running at one time then share A and B in the L2 cache."""

    @property
    def lanes_n(self) -> int:
        return WARP // self.lanes_m

    @property
    def thread_m(self) -> int:
        return self.warp_m // self.lanes_m

    @property
    def thread_n(self) -> int:
        return self.warp_n // self.lanes_n

    @property
    def warps_m(self) -> int:
        return self.block_m // self.warp_m

    @property
    def threads(self) -> int:
        return self.warps_m * (self.block_n // self.warp_n) * WARP

    @property
    def launch_bounds(self) -> tuple[int, int]:
        return self.threads, self.blocks_per_multiprocessor


# How an operand's slab is read from global memory. "Outer" is the index that is not k: row of A, column of B.
ALONG_K = "k"
"""Unit stride along k: element copies, neighbouring threads along k, transposed on the way."""
ALONG_OUTER = "outer"
"""Unit stride along the outer index, not 16-byte aligned: element copies, neighbouring threads along it."""
VECTOR = "vector"
"""Unit stride along the outer index, aligned, extent a multiple of a vector: 128-bit copies."""
LAYOUTS = (ALONG_K, ALONG_OUTER, VECTOR)


def vector_elements(itemsize: int) -> int:
    return VECTOR_NBYTES // itemsize


def padding(itemsize: int) -> int:
    """Elements by which a line of a slab is longer than its tile: one vector.

    Lanes along k then store to different groups of banks, and lines stay aligned.
    """
    return vector_elements(itemsize)


def stage_elements(tiling: Tiling, itemsize: int) -> int:
    return tiling.block_k * (tiling.block_m + tiling.block_n + 2 * padding(itemsize))


def shared_nbytes(tiling: Tiling, itemsize: int) -> int:
    return tiling.stages * stage_elements(tiling, itemsize) * itemsize


@dataclass(frozen=True)
class SlabCopy:
    """Which thread copies which part of a slab (outer × k elements) of one operand.

    ``outer_lanes × k_lanes`` threads start side by side, each with a copy of ``width`` elements; each makes
    ``passes`` such copies along the outer index and ``repeats`` along k.
    """

    layout: str
    width: int
    outer_lanes: int
    k_lanes: int
    passes: int
    repeats: int

    @property
    def outer_step(self) -> int:
        """Elements of the outer index from one pass to the next."""
        return self.outer_lanes * self.width


def slab_copy(layout: str, outer: int, depth: int, threads: int, itemsize: int) -> SlabCopy:
    """Share out the copies of a slab of ``outer`` × ``depth`` elements among ``threads`` threads."""
    width = vector_elements(itemsize) if layout == VECTOR else 1
    if layout == ALONG_K:
        k_lanes = min(SECTOR_NBYTES // itemsize, depth)
        outer_lanes = threads // k_lanes
    else:
        outer_lanes = min(outer // width, threads)
        k_lanes = threads // outer_lanes
    passes, repeats = outer // (outer_lanes * width), depth // k_lanes
    shared_evenly = passes * outer_lanes * width == outer and repeats * k_lanes == depth
    if not shared_evenly or outer_lanes * k_lanes != threads:
        raise ValueError(f"{threads} threads do not share a slab of {outer} x {depth} evenly ({layout})")
    return SlabCopy(layout, width, outer_lanes, k_lanes, passes, repeats)
