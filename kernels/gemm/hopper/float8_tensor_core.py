"""float8 matrices on Hopper's tensor cores, with sums that are carried to ordinary float32 every 128 elements of k.

Both operands must have k contiguous in shared memory, as int8's must: one that lies otherwise, or whose lines begin
anywhere, goes through the pass that turns and aligns bytes (`exact.byte_planes`). Either kind of float8 is multiplied
by either.

The tensor cores align the 32 products of an instruction, and the sum that they are added to, to the largest of them,
and cut off what lies more than 13 bits below its leading one. So sums are short: `INTERVAL` elements of k, of which
``tolerance.FLOAT8_SUMS`` bounds the error; these are added up in float32. Source of the idea: DeepSeek-AI,
"DeepSeek-V3 technical report" (2024), section 3.3.2, and its library DeepGEMM.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba.cuda import types

from tilewright.kernels.float8 import FLOAT8, PTX_KINDS
from tilewright.kernels.gemm.base import GemmKernel, Problem, Variant
from tilewright.kernels.gemm.exact import byte_planes
from tilewright.kernels.gemm.exact.exact_integer import (
    TURN_RESIDENT_BLOCKS,
    lines_of,
    multiply_bytes,
    resident_blocks,
)
from tilewright.kernels.gemm.hopper.half_tensor_core import on_hopper, supports_float8
from tilewright.kernels.gemm.hopper.wgmma import lower_tiles
from tilewright.kernels.gemm.hopper.wgmma_config import STAGE_DEPTH_NBYTES, Config
from tilewright.kernels.gemm.hopper.wgmma_launch import launch_product, output_of, pass_variant, variant
from tilewright.kernels.gpu.compiled import multiprocessors
from tilewright.kernels.gpu.device_choice import current_device
from tilewright.kernels.numbers import ceil_div

PROMOTED_STAGES = 1
"""Stages of k whose products the tensor cores add up."""
INTERVAL = PROMOTED_STAGES * STAGE_DEPTH_NBYTES
"""The same in elements of k."""
BYTES = np.dtype(np.uint8)


@dataclass(frozen=True)
class Tile:
    """128 rows of C and so many columns, for which a consumer's sums and totals fit into its registers."""

    columns: int
    stages: int
    boxes: int
    cost: int
    """What a tile takes, to compare with the others': by their times on an H100 without the stores of C, and estimated
    for 256 columns."""
    pieces: int = 1


TILES = (
    Tile(192, stages=4, boxes=4, cost=224),
    # Sums of half of the columns at a time: all of them and the totals would be too many registers.
    Tile(256, stages=4, boxes=2, cost=301, pieces=2),
    Tile(128, stages=5, boxes=4, cost=160),
)
GROUP = 8
"""Cluster tiles below each other: what all blocks read at one time is then least, about as high as wide."""


@functools.cache
def config_of(kind_a: str, kind_b: str, tile: Tile = TILES[0]) -> Config:
    """C leaves through shared memory: at this rate of products a tile's stores from registers, each to eight lines,
    would take a tenth of the time."""
    return Config(
        kind_a,
        kind_b,
        types.float32,
        promoted=PROMOTED_STAGES,
        pieces=tile.pieces,
        tile_n=tile.columns,
        stages=tile.stages,
        boxes=tile.boxes,
        group=GROUP,
    )


def tile_for(m: int, n: int, processors: int, *, lower: bool = False) -> Tile:
    """The tiles in which an m × n product, or its half below the diagonal, takes least time: all multiprocessors work
    on one wave of tiles after the other, and the last is seldom full. The sums do not depend on it."""

    def cost(tile: Tile) -> int:
        config = config_of("e4m3", "e4m3", tile)
        rows = config.cluster * config.tile_m
        down, across = ceil_div(m, rows), ceil_div(n, tile.columns)
        tiles = lower_tiles(down, across, GROUP, rows, tile.columns, 0) if lower else down * across
        return ceil_div(tiles, processors // config.cluster) * tile.cost

    return min(TILES, key=cost)


def launch(a: Any, b: Any, c: Any, accumulate: bool, stream: Any, *, lower: bool = False) -> None:
    """See ``GemmKernel.launch``. float8 of any layout, to float32."""
    output = output_of(c, types.float32, lower=lower)
    operands = [
        (lines_of(matrix, side, BYTES), PTX_KINDS[matrix.dtype]) for side, matrix in enumerate((a, b))
    ]
    if output.transposed:  # column-major C: its transpose is B's transpose times A's
        operands.reverse()
    (left, kind_a), (right, kind_b) = operands
    processors = multiprocessors(current_device())
    tile = tile_for(output.rows, output.columns, processors, lower=output.diagonal is not None)
    multiply_bytes(
        config_of(kind_a, kind_b, tile),
        (kind_a, kind_b),
        left,
        right,
        output,
        accumulate,
        stream,
        launch_product,
        whole=True,
    )


def supports(problem: Problem) -> bool:
    """float8 to float32, large enough, on Hopper."""
    return supports_float8(on_hopper)(problem)


def variants() -> Iterable[Variant]:
    """The products of all kinds, and the passes."""
    for tile, kinds in itertools.product(TILES, itertools.product(PTX_KINDS.values(), repeat=2)):
        yield variant(f"{kinds[0]} by {kinds[1]}, {tile.columns} columns", config_of(*kinds, tile))
    for turned in (False, True):
        yield pass_variant(
            f"float8 {'turned' if turned else 'aligned'}",
            byte_planes.pass_function(BYTES, turned=turned, residues=False),
            byte_planes.ARGUMENTS,
            byte_planes.THREADS,
            resident_blocks(turned, False),
        )
    yield pass_variant(
        "float8 turned by vectors",
        byte_planes.turn_function(),
        byte_planes.ARGUMENTS,
        byte_planes.THREADS,
        TURN_RESIDENT_BLOCKS,
    )


FLOAT8_WGMMA = GemmKernel(
    name="float8-wgmma",
    summary=f"float8 on the tensor cores, sums of {INTERVAL} products carried to float32",
    supports=supports,
    launch=launch,
    recordable=True,
    halves=True,
    variants=variants,
)
assert set(PTX_KINDS) == set(FLOAT8)
