"""How the matrix kernels write the sums of tensor cores to C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda import types

from tilewright.kernels import ptx


def sum_store(
    c_type: Any, columns: int, *, integer: bool = True, flagged_only: bool = False
) -> Callable[..., Any]:
    """``store(sums, base, out, row, column, ...)``: a thread's sums of ``columns`` columns to C, or added to
    it.

    A thread holds rows ``row`` and ``row`` + 8 and, of every eight columns, two neighbours, from ``sums[base]``
    on (PTX ISA, the accumulator layout of ``wgmma``, and of ``mma.m16n8`` side by side). Whole tiles of a
    row-major C are written in pairs: four lanes then fill a sector of 32 bytes, or two.
    """
    pairs = columns // 8
    wide_type = c_type if integer else types.float32

    @cuda.jit(device=True, inline="always")
    def store_pair(j, sums, first, out, start):  # type: ignore[no-untyped-def]
        ptx.store_pair(out, start + 8 * j, c_type(sums[4 * j + first]), c_type(sums[4 * j + first + 1]))

    @cuda.jit(device=True, inline="always")
    def add_pair(j, sums, first, out, start):  # type: ignore[no-untyped-def]
        left, right = ptx.load_pair(out, start + 8 * j)
        left, right = (
            wide_type(left) + wide_type(sums[4 * j + first]),
            wide_type(right) + wide_type(sums[4 * j + first + 1]),
        )
        ptx.store_pair(out, start + 8 * j, c_type(left), c_type(right))

    @cuda.jit(device=True, inline="always")
    def store_elements(  # type: ignore[no-untyped-def]
        j, sums, first, out, start, stride, columns, accumulate, flags, row_flag
    ):
        for side in range(2):
            if 8 * j + side < columns and (not flagged_only or row_flag != 0 or flags[8 * j + side] != 0):
                place = start + (8 * j + side) * stride
                value = wide_type(sums[4 * j + first + side])
                if accumulate != 0:
                    value += wide_type(out[place])
                out[place] = c_type(value)

    @cuda.jit(device=True, inline="always")
    def store_row(  # type: ignore[no-untyped-def]
        sums, first, out, start, stride, columns, accumulate, paired, flags, row_flag
    ):
        if paired and accumulate == 0 and not flagged_only:
            ptx.unroll(store_pair, pairs, (sums, first, out, start))
        elif paired and not flagged_only:
            ptx.unroll(add_pair, pairs, (sums, first, out, start))
        else:
            ptx.unroll(
                store_elements,
                pairs,
                (sums, first, out, start, stride, columns, accumulate, flags, row_flag),
            )

    @cuda.jit(device=True, inline="always")
    def store(  # type: ignore[no-untyped-def]
        sums, base, out, row, column, row_stride, column_stride, m, n, paired, accumulate, workspace
    ):
        start = row * row_stride + column * column_stride
        row_flags = ptx.global_array(workspace, types.uint8)
        flags = ptx.global_array(workspace + types.uint64(m + column), types.uint8)
        if row < m:
            row_flag = row_flags[row] if flagged_only else types.uint8(0)
            store_row(sums, base, out, start, column_stride, n - column, accumulate, paired, flags, row_flag)
        if row + 8 < m:
            row_flag = row_flags[row + 8] if flagged_only else types.uint8(0)
            start += 8 * row_stride
            store_row(
                sums, base + 2, out, start, column_stride, n - column, accumulate, paired, flags, row_flag
            )

    return store
