"""64-bit integers with two multiplications an element of a product instead of three.

With x = x1 2^32 + x0 and y = y1 2^32 + y0, modulo 2^64 a product is x0 y0 + 2^32 (x0 y1 + x1 y0): one multiplication
with a result of 64 bits, two of 32. A sum over k of the middle terms is Winograd's inner product,

    sum(x0 y1 + x1 y0) = sum((x0 + y0) (x1 + y1)) - sum(x0 x1) - sum(y0 y1)    modulo 2^32,

whose last two sums belong to a row of A and to a column of B: the block works them out once, not for each element.

What it buys: on Hopper one unit of a multiprocessor multiplies integers, 64 a clock, a result of 64 bits counting
twice. Three multiplications an element take four turns of it, so at most 16 elements a clock; two take three turns.
The two additions run on a unit of their own, if they are kept there: left alone, the compiler makes half of them
multiplications by one, and all is lost. So each adds a third number, which only the adding unit can. It is a one:

    sum(x0 y1 + x1 y0) = sum((x0 + y0 + 1) (x1 + y1 + 1)) - sum(x0 x1 + x0 + x1) - sum(y0 y1 + y0 + y1) - sum(1)

modulo 2^32. A constant is part of the instruction; a zero that the compiler does not know would be read from a
register by every addition.

Source: Winograd, "A new algorithm for inner product", 1968; applied to halves of a number rather than to pairs of k.
"""

from __future__ import annotations

from typing import Any

import numba
from numba import cuda

from tilewright.kernels import ptx
from tilewright.kernels.gemm.warp_tiling import WARP, Tiling, padding, vector_elements
from tilewright.kernels.launch import ceil_div

ITEMSIZE = 8
SHARES = 4
"""Into so many parts a slab's depth is cut for the sums of lines, one a thread."""


@cuda.jit(device=True, inline="always")
def in_another_register(x: Any) -> Any:
    """The low half of x (uint64) in a register of the compiler's choice.

    Low halves come from memory in even registers, sums of 64 bits begin at even ones, and of each kind, even and odd,
    an instruction reads two registers at a time: without this, every wide multiply-add would wait a cycle. What is
    added is a zero that the compiler does not know, or it would leave the number where it is.
    """
    zero = numba.uint32(cuda.blockIdx.y)  # the grid has no second axis
    return numba.uint32(numba.uint32(x) + zero)


@cuda.jit(device=True, inline="always")
def multiply_add(total: Any, high: Any, t: Any, x: Any, x0: Any, y: Any) -> None:
    """``total[t] += x0 y0`` (uint64), ``high[t] += (x0 + y0 + 1) (x1 + y1 + 1)`` (uint32).

    ``x0`` is x's low half once more, `in_another_register`; one of them serves a line of products.
    """
    one = numba.uint32(1)
    y0, y1 = numba.uint32(y), numba.uint32(y >> numba.uint64(32))
    total[t] = ptx.multiply_add_wide(x0, y0, total[t])
    low_sum = numba.uint32(numba.uint32(numba.uint32(x) + y0) + one)
    high_sum = numba.uint32(numba.uint32(numba.uint32(x >> numba.uint64(32)) + y1) + one)
    high[t] = ptx.multiply_add_low(low_sum, high_sum, high[t])


def line_passes(tiling: Tiling) -> int:
    """Pairs of lines (rows of A, columns of B) and shares of the depth that a thread looks after."""
    pairs = (tiling.block_m + tiling.block_n) // vector_elements(ITEMSIZE)
    return ceil_div(pairs * SHARES, tiling.threads)


def line_functions(tiling: Tiling) -> tuple[Any, Any]:
    """Device functions ``add_lines(lines, shared, slab, thread)`` and ``settle(total, high, lines, shared, thread,
    depth)``.

    ``add_lines`` adds a thread's part of the slab at ``shared[slab]`` to its sums of x0 x1 + x0 + x1, or of y's, 2
    `line_passes` uint32. ``settle`` turns ``total`` and ``high``, after ``depth`` elements of k with those filled in
    as zeros, into the sums of products: all threads call it, and no copy to shared memory, which it uses, may be under
    way.
    """
    vector, passes, threads = vector_elements(ITEMSIZE), line_passes(tiling), tiling.threads
    block_m, block_n, block_k = tiling.block_m, tiling.block_n, tiling.block_k
    leading_a, leading_b = block_m + padding(ITEMSIZE), block_n + padding(ITEMSIZE)
    both, pairs, b_part = block_m + block_n, (block_m + block_n) // vector, block_k * leading_a
    share = block_k // SHARES
    assert share * SHARES == block_k, f"{tiling}: the depth of a slab is shared evenly"
    warps_m, warp_m, warp_n = tiling.warps_m, tiling.warp_m, tiling.warp_n
    lanes_m, lanes_n, thread_m, thread_n = tiling.lanes_m, tiling.lanes_n, tiling.thread_m, tiling.thread_n
    vectors_m, vectors_n = thread_m // vector, thread_n // vector
    i32, u32, u64 = numba.int32, numba.uint32, numba.uint64

    @cuda.jit(device=True, inline="always")
    def add_lines(lines: Any, shared: Any, slab: Any, thread: Any) -> None:
        loaded = cuda.local.array(vector, u64)
        for p in range(passes):
            # Pairs beyond the last are the last once more, and their sums are left alone.
            item = min(i32(i32(thread) + i32(p * threads)), i32(pairs * SHARES - 1))
            line, part = u32(u32(item) % u32(pairs) * u32(vector)), u32(u32(item) // u32(pairs))
            in_a = line < u32(block_m)
            pitch = u32(leading_a) if in_a else u32(leading_b)
            start = line if in_a else u32(line + u32(b_part - block_m))
            place = slab + u64(u32(start + u32(part * u32(share)) * pitch))
            for q in range(share):
                ptx.load_vector(loaded, 0, shared, place + u64(u32(q) * pitch))
                for v in range(vector):
                    low, high = u32(loaded[v]), u32(loaded[v] >> u64(32))
                    both_halves = u32(u32(low + high) + lines[p * vector + v])
                    lines[p * vector + v] = ptx.multiply_add_low(low, high, both_halves)

    @cuda.jit(device=True, inline="always")
    def take_off(high: Any, shared: Any, origin: Any, vectors: Any, lanes: Any, rows: Any) -> None:
        sums = cuda.local.array(vector, u64)
        for g in range(vectors):
            for w in range(SHARES):
                ptx.load_vector(sums, 0, shared, origin + u64(w * both + g * lanes * vector))
                for v in range(vector):
                    place = g * vector + v
                    if rows:
                        for j in range(thread_n):
                            high[place * thread_n + j] = u32(high[place * thread_n + j] - u32(sums[v]))
                    else:
                        for i in range(thread_m):
                            high[i * thread_n + place] = u32(high[i * thread_n + place] - u32(sums[v]))

    @cuda.jit(device=True, inline="always")
    def settle(total: Any, high: Any, lines: Any, shared: Any, thread: Any, depth: Any) -> None:
        cuda.syncthreads()  # everyone has read the last slab, which the sums overwrite
        sums = cuda.local.array(vector, u64)
        for p in range(passes):
            item = u32(u32(thread) + u32(p * threads))
            if item < u32(pairs * SHARES):
                for v in range(vector):
                    sums[v] = u64(lines[p * vector + v])
                place = u32(item // u32(pairs) * u32(both) + item % u32(pairs) * u32(vector))
                ptx.store_vector(shared, u64(place), sums, 0)
        cuda.syncthreads()  # the sums of all lines are there
        warp, lane = u32(thread // u32(WARP)), u32(thread % u32(WARP))
        row = u32(warp % u32(warps_m) * u32(warp_m) + lane % u32(lanes_m) * u32(vector))
        column = u32(warp // u32(warps_m) * u32(warp_n) + lane // u32(lanes_m) * u32(vector))
        take_off(high, shared, u64(row), vectors_m, lanes_m, True)
        take_off(high, shared, u64(column) + u64(block_m), vectors_n, lanes_n, False)
        for t in range(thread_m * thread_n):
            total[t] = u64(total[t] + (u64(u32(high[t] - u32(depth))) << u64(32)))

    return add_lines, settle
