"""What a matrix kernel does with its sums in a product by residues: reduce them, keep them, put C together.

Each thread keeps the residues of its own elements of C, a byte for each modulus, in a workspace that
belongs to its block and is used again for every tile; so the workspace does not grow with C, and no barrier
is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from tilewright.kernels.gemm.exact.residues import (
    DIGIT_BOUND,
    FRACTION_BITS,
    MODULI,
    modulus_set,
)
from tilewright.kernels.gemm.exact.scaled_residues import DEPTH_LIMIT
from tilewright.kernels.numbers import round_up
from tilewright.kernels.ptx import memory
from tilewright.kernels.ptx.unroll import unroll

BATCH = 3
"""Moduli whose residues are loaded together, so that the loads overlap; tables are padded with zeros to
it."""
TILE_ELEMENTS = 128 * 256
WORKSPACE_NBYTES = len(MODULI) * TILE_ELEMENTS
"""Bytes of a block's workspace: one residue of every element of its tile for every modulus."""
LARGEST_SUM = DEPTH_LIMIT * DIGIT_BOUND**2
"""Of float64 products, which are deeper than those of integers."""


def reduction_table() -> np.ndarray:
    """For each modulus (p, offset, magic), uint32: offset is a multiple of p that makes any sum non-negative,
    and (x * magic) >> 32 is x // p or one less, for any x up to twice the largest sum and a little."""
    rows = [(p, round_up(LARGEST_SUM, p), (1 << 32) // p) for p in MODULI]
    return np.array(rows, np.uint32)


def combination_tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each number of moduli: factors (uint64) and fractions (uint32) of each, padded with zeros; and P (uint64)."""
    size = len(MODULI)
    factors, fractions = np.zeros((size + 1, size), np.uint64), np.zeros((size + 1, size), np.uint32)
    products = np.zeros(size + 1, np.uint64)
    for count in range(1, size + 1):
        chosen = modulus_set(count)
        products[count] = chosen.product
        for i, modulus in enumerate(chosen.moduli):
            factors[count, i], fractions[count, i] = modulus.factor, modulus.fraction
    return factors, fractions, products


@cuda.jit(device=True, inline="always")
def reduced(value: Any, p: Any, offset: Any, magic: Any) -> Any:
    """A sum modulo p, by a row of `reduction_table`."""
    x = types.uint32(value + offset)
    rest = types.uint32(x - types.uint32((types.uint64(x) * types.uint64(magic)) >> 32) * p)
    return min(rest, types.uint32(rest - p))  # below p the difference wraps to something large


def residue_epilogue(
    threads: int, columns: int, strips: int, c_type: Any
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The device functions ``keep_residues`` and ``add_residues`` for ``threads`` threads.

    Each holds ``strips`` strips of sums, 16 rows below each other, of two rows and ``columns`` columns as
    ``wgmma_epilogue.sum_store`` describes them; a multiple of 32 columns. In the workspace, the residues of
    four of a thread's elements are one word (byte e for element e), four such words are contiguous for one 16-byte
    access, and the threads follow each other.
    """
    reduction = reduction_table()
    factors, fractions, products = combination_tables()
    strip_quarters = columns // 32
    quarters = strips * strip_quarters
    quarter_words = 4 * threads
    plane_words = quarters * quarter_words
    batch_words = 4 * BATCH
    half = 1 << (FRACTION_BITS - 1)
    u32, u64 = types.uint32, types.uint64

    @cuda.jit(device=True, inline="always")
    def keep_quarter(quarter, sums, words, kept, first, p, offset, magic):  # type: ignore[no-untyped-def]
        for i in range(4):
            word = u32(0)
            for e in range(4):
                word |= u32(reduced(sums[16 * quarter + 4 * i + e], p, offset, magic) << (8 * e))
            words[i] = word
        memory.store_vector(kept, first + quarter * quarter_words, words, 0)

    @cuda.jit(device=True, inline="always")
    def keep_residues(sums, plane, planes, kept, first):  # type: ignore[no-untyped-def]
        words = cuda.local.array(4, u32)
        p, offset, magic = reduction[plane, 0], reduction[plane, 1], reduction[plane, 2]
        unroll(keep_quarter, quarters, (sums, words, kept, first + plane * plane_words, p, offset, magic))

    @cuda.jit(device=True, inline="always")
    def add_quarter(  # type: ignore[no-untyped-def]
        quarter, planes, kept, first, out, start, row_stride, column_stride, rows, columns, accumulate
    ):
        totals = cuda.local.array(16, u64)
        parts = cuda.local.array(16, u32)
        words = cuda.local.array(batch_words, u32)
        for e in range(16):
            totals[e] = u64(0)
            parts[e] = u32(half)
        place = first + quarter * quarter_words
        for plane in range(0, planes, BATCH):
            for i in range(BATCH):
                # Beyond the last plane this reads what an earlier tile left; the tables multiply that by zero.
                memory.load_vector(words, 4 * i, kept, place + (plane + i) * plane_words)
            for i in range(BATCH):
                factor, fraction = factors[planes, plane + i], fractions[planes, plane + i]
                for e in range(16):
                    residue = (words[4 * i + e // 4] >> u32(8 * (e % 4))) & u32(255)
                    totals[e] += u64(residue) * factor
                    parts[e] += u32(residue * fraction)
        product = products[planes]
        if strips == 1:  # the compiler does not know that all quarters then lie in the first strip
            top, left = 0, 32 * quarter
        else:
            top, left = quarter // strip_quarters * 16, quarter % strip_quarters * 32
        for e in range(16):
            value = totals[e] - u64(parts[e] >> u32(FRACTION_BITS)) * product
            row, column = top + 8 * ((e % 4) // 2), left + 8 * (e // 4) + e % 2
            if row < rows and column < columns:
                target = start + row * row_stride + column * column_stride
                if accumulate != 0:
                    out[target] += c_type(value)
                else:
                    out[target] = c_type(value)

    @cuda.jit(device=True, inline="always")
    def add_residues(  # type: ignore[no-untyped-def]
        planes,
        kept,
        first,
        out,
        start,
        row_stride,
        column_stride,
        rows,
        columns,
        accumulate,
        plan,
        row,
        column,
    ):
        for quarter in range(quarters):
            add_quarter(
                quarter,
                planes,
                kept,
                first,
                out,
                start,
                row_stride,
                column_stride,
                rows,
                columns,
                accumulate,
            )

    return keep_residues, add_residues
