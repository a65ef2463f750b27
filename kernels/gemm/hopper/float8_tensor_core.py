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
from tilewright.kernels.gemm.hopper.wgmma_config import STAGE_DEPTH_NBYTES, Config
from tilewright.kernels.gemm.hopper.wgmma_launch import launch_product, output_of, pass_variant, variant

PROMOTED_STAGES = 1
"""Stages of k whose products the tensor cores add up."""
INTERVAL = PROMOTED_STAGES * STAGE_DEPTH_NBYTES
"""The same in elements of k."""
BYTES = np.dtype(np.uint8)


@functools.cache
def config_of(kind_a: str, kind_b: str) -> Config:
    """A tile of 128 × 192: of one as wide as int8's, sums and totals would not fit into the registers. C leaves through
    shared memory: at this rate of products a tile's stores from registers, each to eight lines, take a tenth of the
    time."""
    return Config(kind_a, kind_b, types.float32, promoted=PROMOTED_STAGES, tile_n=192, stages=5, boxes=1)


def launch(a: Any, b: Any, c: Any, accumulate: bool, stream: Any, *, lower: bool = False) -> None:
    """See ``GemmKernel.launch``. float8 of any layout, to float32."""
    output = output_of(c, types.float32, lower=lower)
    operands = [
        (lines_of(matrix, side, BYTES), PTX_KINDS[matrix.dtype]) for side, matrix in enumerate((a, b))
    ]
    if output.transposed:  # column-major C: its transpose is B's transpose times A's
        operands.reverse()
    (left, kind_a), (right, kind_b) = operands
    multiply_bytes(
        config_of(kind_a, kind_b),
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
    for kinds in itertools.product(PTX_KINDS.values(), repeat=2):
        yield variant(f"{kinds[0]} by {kinds[1]}", config_of(*kinds))
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
