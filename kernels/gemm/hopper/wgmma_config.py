"""The configuration of a variant of the Hopper matrix kernel: its operands, its tile, its ring of stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WARPGROUP = 128
ROWS_PER_WARPGROUP = 64
STAGE_DEPTH_NBYTES = 128
"""Bytes of k in a stage: the width of the widest swizzle."""
SWIZZLE_NBYTES = 1024
"""A swizzled tile repeats every eight lines of 128 bytes; tiles begin at multiples of it."""
STEP_NBYTES = 32
"""Bytes of k that one ``wgmma`` takes."""
STEPS = STAGE_DEPTH_NBYTES // STEP_NBYTES
BARRIER_NBYTES = 8
C_LINE_NBYTES = 128
C_BOX_LINES = 16
"""Rows of C that a warp holds."""
C_BOX_NBYTES = C_LINE_NBYTES * C_BOX_LINES
FOUND_NBYTES = 16
"""Of an element that is kept: its word, its list, and nothing."""
FOUND_PLACES = 64
"""Of a consumer warp, for elements that are kept: fewer than a warp's threads wait there, and each may add one."""
OPERAND_NBYTES = {"s8": 1, "u8": 1, "e4m3": 1, "e5m2": 1, "bf16": 2, "f16": 2, "tf32": 4}
LOW_SHIFT = 11
"""The low one of two float16 parts of a number is held times 2**11: as large as the high one can be."""
INTEGER_KINDS = ("s8", "u8")


@dataclass(frozen=True)
class Config:
    """One compiled variant. ``kind_a`` and ``kind_b`` are PTX operand types; C's type is ``c_type``."""

    kind_a: str
    kind_b: str
    c_type: Any
    """Numba scalar type of C's elements."""
    m_major_a: bool = False
    """A lies in memory with m, not k, contiguous. The tensor cores then take 32-bit elements from registers."""
    n_major_b: bool = False
    """B lies in memory with n, not k, contiguous (16-bit operands only)."""
    plan_kind: int = -1
    """If not negative: read the plan first, and return unless its kind is this; with `residues.ANY_SINGLE` it is one of
    `residues.SINGLE_KINDS`, which then says what bytes are, whatever ``kind_a`` and ``kind_b`` do."""
    parts: int = 1
    """The operands are float32 numbers, split into three bfloat16 planes each (3), or into two of float16 (2), of lines
    times powers of two that lie at ``workspace``."""
    promoted: int = 0
    """Stages after which the sums of the tensor cores, which keep few bits of those of float8, are added to totals in
    ordinary float32 arithmetic; 0: they add up all of k."""
    flagged_only: bool = False
    """Write only the rows and columns of C that the flags at ``workspace`` name."""
    bfloat16_c: bool = False
    """C holds bfloat16, and ``c_type`` is uint16."""
    c_by_columns: bool = False
    """C lies in memory with m contiguous (32-bit elements, A from registers)."""
    selection: str = ""
    """Of C, only elements that reach their row's bound are kept, in lists (`selection`): the metric, perhaps
    after `selection.FARTHER`."""
    least: bool = False
    """Of C only the least element is wanted, in the plan (int32 sums)."""
    mutual: bool = False
    """With ``selection``: both sides are rows of one matrix, and elements come into the lists of both."""
    tile_n: int = 256
    consumers: int = 2
    stages: int = 4
    cluster: int = 2
    """Blocks of a cluster below each other: they share B."""
    group: int = 4
    """Cluster tiles below each other before the walk moves on in n."""
    boxes: int = 0
    """Boxes of 16 rows × 128 bytes that each consumer warp has in shared memory, from which the copy engine writes a C
    of 16- or 32-bit elements while the next tile begins: a divisor of those of a tile, so that each tile begins with
    the one that was filled first. 0: C is written from registers."""

    def __post_init__(self) -> None:
        if self.n_major_b and OPERAND_NBYTES[self.kind_b] == 4:
            raise ValueError("the tensor cores take 32-bit elements of B with k side by side only")
        if self.c_by_columns and not self.a_in_registers:
            raise ValueError("C is written by columns only where A's rows come from registers")
        if self.a_in_registers and (self.boxes or self.parts != 1 or self.plan_kind >= 0):
            raise ValueError("with A in registers: one plane, no plan, and C is written from registers")
        if self.boxes and self.tile_n // self.box_c[0] % self.boxes:
            raise ValueError("a warp takes its boxes in turn, as many for each tile")
        if self.promoted and (self.integer or self.parts != 1 or self.a_in_registers or self.selection):
            raise ValueError(
                "promoted are sums of one plane of floats, of operands in shared memory, to all of C"
            )
        if self.selection and (self.boxes or self.plan_kind >= 0 or self.a_in_registers or self.flagged_only):
            raise ValueError("what selects writes lists, not C, and takes the plan's place")

    @property
    def a_in_registers(self) -> bool:
        """Whether the tensor cores take A from registers: 32-bit elements with m contiguous."""
        return self.m_major_a and OPERAND_NBYTES[self.kind_a] == 4

    @property
    def tile_m(self) -> int:
        return self.consumers * ROWS_PER_WARPGROUP

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP

    @property
    def depth(self) -> int:
        """Elements of k in a stage."""
        return STAGE_DEPTH_NBYTES // OPERAND_NBYTES[self.kind_a]

    @property
    def a_nbytes(self) -> int:
        """Of A's tile in a stage; B's follows it."""
        return self.tile_m * STAGE_DEPTH_NBYTES

    @property
    def stage_nbytes(self) -> int:
        return (self.tile_m + self.tile_n) * STAGE_DEPTH_NBYTES

    @property
    def shared_nbytes(self) -> int:
        """Dynamic shared memory: the ring, its barriers, boxes of C or what is kept of it, and room to begin at a
        multiple of the swizzle."""
        if self.warp_nbytes:
            return self.boxes_offset + 4 * self.consumers * self.warp_nbytes + SWIZZLE_NBYTES
        return self.stages * (self.stage_nbytes + 2 * BARRIER_NBYTES) + SWIZZLE_NBYTES

    @property
    def warp_nbytes(self) -> int:
        """Of a consumer warp: its boxes of C, or places for what is kept and bounds and factors of a tile's columns."""
        if self.selection:
            return FOUND_PLACES * FOUND_NBYTES + 2 * 4 * self.tile_n
        return self.boxes * C_BOX_NBYTES

    @property
    def boxes_offset(self) -> int:
        """From the ring to the boxes of C, or to what is kept: after the barriers, at a multiple of the swizzle."""
        return self.stages * self.stage_nbytes + SWIZZLE_NBYTES

    @property
    def box_a(self) -> tuple[int, int]:
        """(elements of a line, lines) of one bulk copy of A."""
        return (self.depth, self.depth) if self.m_major_a else (self.depth, self.tile_m)

    @property
    def box_b(self) -> tuple[int, int]:
        return (self.depth, self.depth) if self.n_major_b else (self.depth, self.tile_n // self.cluster)

    @property
    def box_c(self) -> tuple[int, int]:
        return (C_LINE_NBYTES * 8 // self.c_type.bitwidth, C_BOX_LINES)

    @property
    def integer(self) -> bool:
        return self.kind_a in INTEGER_KINDS
