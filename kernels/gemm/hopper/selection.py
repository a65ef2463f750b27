"""The epilogue that keeps less than C: only elements that reach their row's bound leave the multiprocessor.

A sum becomes a score, larger where it is better, as `tilewright.kernels.neighbours.order` defines keys: the sum itself
(`DOT`), sum × (row's factor × column's) (`COSINE`), or the negative squared distance, 2 sum - (row's factor + column's)
and at most 0 (`L2`). Scores that are at least the row's bound are appended to a list, as words of 64 bits that sort by
score and then by column: the larger is the better, and of equal scores the one in the smaller column. A first look at
all the scores of a thread is one comparison each. Only threads that find one count theirs, take that many places of
each list by one atomic addition, and write.

The kernel's arguments for C then say where the lists are:

- ``c``: the words, uint64; list after list, or one list for all rows, with the rows (int32) after it;
- ``row_stride``: places from list to list, and 1 counter a row; 0: one list, one counter;
- ``column_stride``: the number of the first column, for the words;
- ``paired``: places of a list: what does not fit is counted, and not written;
- ``accumulate``: column - row (both from the first of this product) of elements that are left out;
- ``plan``: m bounds (of the score's type), m factors of rows (the same), and the counters (int32);
- ``workspace``: factors of columns, in memory that goes on for a tile after the last;
- ``diagonal``: with ``steps``, only columns up to row + diagonal are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda import types

from tilewright.kernels.ptx import floats, integers, memory
from tilewright.kernels.ptx.unroll import unroll

DOT, COSINE, L2 = "dot", "cosine", "l2"
FARTHER = "farther "
"""Before one of them: scores are its negative, so that what is farthest is kept."""
NO_COLUMN = -(1 << 31)
"""``accumulate`` where no element is left out."""


def _float_order(score: Any) -> Any:
    """The bits of a float32, not NaN, as a word that sorts as the number does; both zeros give one word."""
    bits = floats.float_bits(score + types.float32(0.0))
    return bits ^ (types.uint32(types.int32(bits) >> 31) | types.uint32(0x80000000))


def _integer_order(score: Any) -> Any:
    return types.uint32(score) ^ types.uint32(0x80000000)


def order_of(*, integer: bool) -> Callable[..., Any]:
    """``order(score)``: a word of 32 bits, larger where the score is."""
    return cuda.jit(device=True, inline="always")(_integer_order if integer else _float_order)


def scoring(form: str, score_type: Any) -> Callable[..., Any]:
    """``score(sum, row_factor, column_factor)``, operations rounded one by one; of l2 not yet at most 0."""
    metric = form.removeprefix(FARTHER)
    farther, two = form.startswith(FARTHER), score_type(2)
    # Not -value: the compiler would compare the sums themselves, and keep both.
    negative = floats.negative if score_type is types.float32 else integers.negative

    @cuda.jit(device=True, inline="always")
    def score(value, of_row, of_column):  # type: ignore[no-untyped-def]
        if metric == COSINE:
            return value * (of_row * of_column)  # farther: the row's is negative
        if metric == L2:
            if farther:
                return (of_row + of_column) - two * value
            return two * value - (of_row + of_column)
        return negative(value) if farther else value

    return score


def selection(columns: int, form: str, *, integer: bool) -> Callable[..., Any]:
    """``select(sums, ...)``: a thread's sums of ``columns`` columns, laid out as `wgmma_epilogue.sum_store` says."""
    groups = columns // 8
    order = order_of(integer=integer)
    metric, farther = form.removeprefix(FARTHER), form.startswith(FARTHER)
    factored, clamped = metric != DOT, metric == L2
    score_type = types.int32 if integer else types.float32
    highest = score_type(2**31 - 1) if integer else score_type(float("inf"))
    zero = score_type(0)
    score = scoring(form, score_type)
    i32, i64, u32, u64 = types.int32, types.int64, types.uint32, types.uint64

    @cuda.jit(device=True, inline="always")
    def score_group(j, sums, factors, column, upper, lower):  # type: ignore[no-untyped-def]
        left, right = memory.load_pair(factors, column + 8 * j) if factored else (zero, zero)
        sums[4 * j] = score(sums[4 * j], upper, left)
        sums[4 * j + 1] = score(sums[4 * j + 1], upper, right)
        sums[4 * j + 2] = score(sums[4 * j + 2], lower, left)
        sums[4 * j + 3] = score(sums[4 * j + 3], lower, right)

    @cuda.jit(device=True, inline="always")
    def look(j, sums, upper, lower, found):  # type: ignore[no-untyped-def]
        found[0] |= i32(sums[4 * j] >= upper) | i32(sums[4 * j + 1] >= upper)
        found[0] |= i32(sums[4 * j + 2] >= lower) | i32(sums[4 * j + 3] >= lower)

    @cuda.jit(device=True, inline="always")
    def count_group(j, sums, bounds, counts, ends, left_out):  # type: ignore[no-untyped-def]
        for half in range(2):
            for side in range(2):
                at = 8 * j + side
                inside = at < ends[half] and at != left_out[half]
                counts[half] += i32(inside and sums[4 * j + 2 * half + side] >= bounds[half])

    @cuda.jit(device=True, inline="always")
    def write_group(  # type: ignore[no-untyped-def]
        j, sums, bounds, ends, left_out, keys, lists, places, capacity, last, row, single
    ):
        for half in range(2):
            for side in range(2):
                at = 8 * j + side
                value = sums[4 * j + 2 * half + side]
                if at < ends[half] and at != left_out[half] and value >= bounds[half]:
                    place = places[half]
                    places[half] = place + 1
                    if place < capacity:
                        if clamped and (value < zero if farther else value > zero):
                            value = zero
                        # Of columns that lie further right the lower half is less.
                        word = u64(order(value)) << u64(32) | u64(last - u32(at))
                        memory.global_array(keys + u64(8) * (lists[half] + u64(place)), u64)[0] = word
                        if single:
                            rows = keys + u64(8) * u64(capacity) + u64(4) * u64(place)
                            memory.global_array(rows, i32)[0] = row + i32(8 * half)

    @cuda.jit(device=True, inline="always")
    def select(  # type: ignore[no-untyped-def]
        sums, keys, stride, first, capacity, shift, plan, factors_at, row, column, m, n, steps, diagonal
    ):
        given = memory.global_array(plan, score_type)
        bounds = cuda.local.array(2, score_type)
        bounds[0] = given[row] if row < m else highest
        bounds[1] = given[row + 8] if row + 8 < m else highest
        if factored or farther:
            factors = memory.global_array(factors_at, score_type)
            upper = given[m + row] if factored and row < m else zero
            lower = given[m + row + 8] if factored and row + 8 < m else zero
            if farther and metric == COSINE:
                upper, lower = -upper, -lower
            unroll(score_group, groups, (sums, factors, column, upper, lower))
        found = cuda.local.array(1, i32)
        found[0] = 0
        unroll(look, groups, (sums, bounds[0], bounds[1], found))
        if found[0] != 0:
            counts = cuda.local.array(2, i32)
            ends = cuda.local.array(2, i32)
            left_out = cuda.local.array(2, i32)
            lists = cuda.local.array(2, u64)
            counters = memory.global_array(plan + u64(8 * i64(m)), i32)
            for half in range(2):
                at = row + 8 * half
                counts[half] = 0
                last = min(i64(n), at + diagonal + 1) if steps > 0 else i64(n)
                ends[half] = i32(last - column) if at < m else i32(0)
                left_out[half] = i32(at + shift - column)
                lists[half] = u64(at * stride)
            unroll(count_group, groups, (sums, bounds, counts, ends, left_out))
            for half in range(2):
                if counts[half] > 0:
                    counter = i64(0) if stride == 0 else row + 8 * half
                    counts[half] = cuda.atomic.add(counters, counter, counts[half])
            last_word = u32(0xFFFFFFFF) - u32(first + column)
            unroll(
                write_group,
                groups,
                (
                    sums, bounds, ends, left_out, keys, lists, counts, capacity, last_word, i32(row),
                    stride == 0,
                ),
            )  # fmt: skip

    return select
