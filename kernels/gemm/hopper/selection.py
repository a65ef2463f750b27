"""The epilogue that keeps less than C: only elements that reach their row's bound leave the multiprocessor.

A sum becomes a score, larger where it is better, as `tilewright.kernels.neighbours.order` defines keys: the sum itself
(`DOT`), sum × (row's factor × column's) (`COSINE`), or the negative squared distance, 2 sum - (row's factor + column's)
and at most 0 (`L2`). Scores that are at least the row's bound are appended to a list, as words of 64 bits that sort by
score and then by column: the larger is the better, and of equal scores the one in the smaller column.

A first look at all the scores of a thread is one comparison each. Where a warp has found any it walks the groups of
eight columns in which it did, twice: to count, for which each thread then takes as many places of its rows' lists by an
atomic addition, and to write. Few tiles have more than one or two such groups, so that what is compiled is a short loop
that picks a group's scores out of the registers: written out for all groups it took longer to fetch than to do.

The kernel's arguments for C then say where the lists are:

- ``c``: the words, uint64; list after list, or one list for all rows, with the rows (int32) after it;
- ``row_stride``: places from list to list, and 1 counter a row; 0: one list, one counter;
- ``column_stride``: the number of the first column, for the words;
- ``paired``: places of a list: what does not fit is counted, and not written;
- ``accumulate``: column - row (both from the first of this product) of elements that are left out;
- ``plan``: m bounds (of the score's type), m factors of rows (the same), and the counters (int32);
- ``workspace``: factors of columns, in memory that goes on for a tile after the last;
- ``diagonal``: with ``steps``, only columns up to row + diagonal are wanted.

Where both sides of the product are rows of one matrix (`mutual`), each element is of two rows, and may come into the
lists of both; that of the column names the row. Then ``accumulate`` is the number of the first row, there are a list,
a bound, a factor and a counter of each of the ``map_c`` rows of the matrix, and an element beside the diagonal comes
into one list alone.
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
AMONG = 8
"""Groups among which one is picked by choosing each of its registers from theirs."""
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


def selection(columns: int, form: str, *, integer: bool, mutual: bool = False) -> Callable[..., Any]:
    """``select(sums, ...)``: a thread's sums of ``columns`` columns, laid out as `wgmma_epilogue.sum_store` says."""
    groups, parts = columns // 8, columns // 8 // AMONG
    order = order_of(integer=integer)
    metric, farther = form.removeprefix(FARTHER), form.startswith(FARTHER)
    factored, clamped = metric != DOT, metric == L2
    score_type = types.int32 if integer else types.float32
    highest = score_type(2**31 - 1) if integer else score_type(float("inf"))
    nothing = score_type(-(2**31)) if integer else score_type(float("nan"))
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
    def leave_out(j, sums, ends, left_out):  # type: ignore[no-untyped-def]
        for half in range(2):
            for side in range(2):
                at = 8 * j + side
                if at >= ends[half] or at == left_out[half]:
                    sums[4 * j + 2 * half + side] = nothing

    @cuda.jit(device=True, inline="always")
    def look(j, sums, upper, lower, mask):  # type: ignore[no-untyped-def]
        above = (sums[4 * j] >= upper) | (sums[4 * j + 1] >= upper)
        below = (sums[4 * j + 2] >= lower) | (sums[4 * j + 3] >= lower)
        mask[0] |= u32(above | below) << u32(j)

    @cuda.jit(device=True, inline="always")
    def look_both_ways(j, sums, upper, lower, mask, given, column):  # type: ignore[no-untyped-def]
        left, right = memory.load_pair(given, column + 8 * j)
        above = (sums[4 * j] >= upper) | (sums[4 * j + 1] >= upper)
        below = (sums[4 * j + 2] >= lower) | (sums[4 * j + 3] >= lower)
        of_left = (sums[4 * j] >= left) | (sums[4 * j + 2] >= left)
        of_right = (sums[4 * j + 1] >= right) | (sums[4 * j + 3] >= right)
        mask[0] |= u32(above | below | of_left | of_right) << u32(j)

    @cuda.jit(device=True, inline="always")
    def pick_one(j, first, wanted, sums, scores):  # type: ignore[no-untyped-def]
        if first + j == wanted:
            for i in range(4):
                scores[i] = sums[4 * (first + j) + i]

    @cuda.jit(device=True, inline="always")
    def pick_among(part, wanted, sums, scores):  # type: ignore[no-untyped-def]
        # A branch that the whole warp takes or not; within it the compiler chooses by one instruction a register.
        if wanted // AMONG == part:
            unroll(pick_one, AMONG, (part * AMONG, wanted, sums, scores))

    @cuda.jit(device=True, inline="always")
    def write(target, value, number):  # type: ignore[no-untyped-def]
        if clamped and (value < zero if farther else value > zero):
            value = zero
        # Of two numbers that of the larger has the less in its lower half.
        low = u32(0xFFFFFFFF) - u32(number)
        memory.global_array(target, u64)[0] = u64(order(value)) << u64(32) | u64(low)

    @cuda.jit(device=True, inline="always")
    def select(  # type: ignore[no-untyped-def]
        sums,
        keys,
        stride,
        first,
        capacity,
        shift,
        plan,
        factors_at,
        total,
        row,
        column,
        m,
        n,
        steps,
        diagonal,
    ):
        given = memory.global_array(plan, score_type)
        rows = i64(total) if mutual else i64(m)
        at_row = i64(row + shift) if mutual else i64(row)  # its list, bound and factor
        at_column = i64(first + column)
        upper = given[at_row] if row < m else highest
        lower = given[at_row + 8] if row + 8 < m else highest
        if factored or farther:
            factors = memory.global_array(factors_at, score_type)
            of_upper = given[rows + at_row] if factored and row < m else zero
            of_lower = given[rows + at_row + 8] if factored and row + 8 < m else zero
            if farther and metric == COSINE:
                of_upper, of_lower = -of_upper, -of_lower
            unroll(score_group, groups, (sums, factors, column, of_upper, of_lower))
        # From here on columns are counted from the thread's first.
        ends = cuda.local.array(2, i32)
        left_out = cuda.local.array(2, i32)
        for half in range(2):
            at = row + 8 * half
            last = min(i64(n), at + diagonal + 1) if steps > 0 else i64(n)
            ends[half] = i32(last - column) if at < m else i32(0)
            left_out[half] = i32(-1) if mutual else i32(at + shift - column)
        whole = ends[0] >= columns and ends[1] >= columns
        beside = u32(left_out[0]) >= u32(columns) and u32(left_out[1]) >= u32(columns)
        if not (whole and beside):
            unroll(leave_out, groups, (sums, ends, left_out))
        mask = cuda.local.array(1, u32)
        mask[0] = 0
        if mutual:
            unroll(look_both_ways, groups, (sums, upper, lower, mask, given, at_column))
        else:
            unroll(look, groups, (sums, upper, lower, mask))
        hit = integers.warp_or(mask[0])
        if hit != 0:
            scores = cuda.local.array(4, score_type)
            counts = cuda.local.array(2, i32)
            counts[0], counts[1] = 0, 0
            counters = memory.global_array(plan + u64(8 * rows), i32)
            rest = hit
            while rest != 0:
                j = i32(cuda.ffs(rest)) - 1
                rest &= rest - u32(1)
                unroll(pick_among, parts, (j, sums, scores))
                counts[0] += i32(scores[0] >= upper) + i32(scores[1] >= upper)
                counts[1] += i32(scores[2] >= lower) + i32(scores[3] >= lower)
                if mutual:
                    for i in range(4):
                        other, of_row = at_column + 8 * j + i % 2, at_row + 8 * (i // 2)
                        value = scores[i]
                        # Behind the last column there are no bounds, and what is no score may be as large.
                        if other < rows and value >= given[other] and other != of_row:
                            place = cuda.atomic.add(counters, other, 1)
                            if place < capacity:
                                write(keys + u64(8) * u64(other * stride + place), value, of_row)
            for half in range(2):
                if counts[half] > 0:
                    counter = i64(0) if stride == 0 else at_row + 8 * half
                    counts[half] = cuda.atomic.add(counters, counter, counts[half])
            rest = hit
            while rest != 0:
                j = i32(cuda.ffs(rest)) - 1
                rest &= rest - u32(1)
                unroll(pick_among, parts, (j, sums, scores))
                for i in range(4):
                    half = i // 2
                    value = scores[i]
                    if value >= (lower if half == 1 else upper):
                        place = counts[half]
                        counts[half] = place + 1
                        if place < capacity:
                            target = keys + u64(8) * (u64((at_row + 8 * half) * stride) + u64(place))
                            write(target, value, at_column + 8 * j + i % 2)
                            if stride == 0:
                                found = keys + u64(8) * u64(capacity) + u64(4) * u64(place)
                                memory.global_array(found, i32)[0] = i32(row + 8 * half)

    return select
