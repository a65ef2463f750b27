"""The epilogue that keeps less than C: only elements that reach their row's bound leave the multiprocessor.

A sum becomes a score, larger where it is better, as `tilewright.kernels.neighbours.order` defines keys: the sum itself
(`DOT`), sum × (row's factor × column's) (`COSINE`), or the negative squared distance, 2 sum - (row's factor + column's)
and at most 0 (`L2`). Scores that are at least the row's bound are appended to a list, as words of 64 bits that sort by
score and then by column: the larger is the better, and of equal scores the one in the smaller column.

A first look at all the scores of a thread is one comparison each. Where a warp has found any it walks the groups of
eight columns in which it did. Few warps have more than a handful, so that what is compiled is a short loop that
picks a group's scores out of the registers: written out for all groups it took longer to fetch than to do. What is
found waits in shared memory until there is one for each thread of the warp, perhaps for tiles: then each takes a place
of a list by an atomic addition, and writes a word there. So a warp waits once for 32 answers of the second-level cache,
where it had waited for each, and with it the tensor cores.

The kernel's arguments for C then say where the lists are:

- ``c``: the words, uint64; list after list, or one list for all rows, with the rows (int32) after it;
- ``row_stride``: places from list to list, and 1 counter a row; 0: one list, one counter;
- ``column_stride``: the number of the first column, for the words;
- ``paired``: places of a list: what does not fit is counted, and not written;
- ``accumulate``: column - row (both from the first of this product) of elements that are left out;
- ``plan``: m bounds (of the score's type), m factors of rows (the same), and the counters (int32);
- ``workspace``: factors of columns, in memory that goes on for a tile after the last;
- ``map_c``: 0, or where the numbers lie by which words name columns (uint32), by those that they have else;
- ``diagonal``: with ``steps``, only columns up to row + diagonal are wanted.

Where both sides of the product are rows of one matrix (`mutual`), each element is of two rows, and may come into the
lists of both; that of the column names the row. Then ``accumulate`` is the place of the first row, there are a list, a
bound, a factor, a counter and a number, by which words name it (uint32), of each of the ``map_c`` rows of the matrix,
and an element beside the diagonal comes into one list alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda import types

from tilewright.kernels.gemm.hopper.wgmma_config import FOUND_NBYTES, FOUND_PLACES
from tilewright.kernels.numbers import WARP
from tilewright.kernels.ptx import floats, integers, memory
from tilewright.kernels.ptx.async_copy import commit_copies, copy_async_word, wait_copies
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


def selection(
    columns: int, form: str, *, integer: bool, mutual: bool = False
) -> tuple[Callable[..., Any], ...]:
    """``prepare(staging, ...)``, ``select(sums, lines, staging, waiting, ...)`` and ``put_away(staging, first, last,
    ...)``.

    Before a tile's products prepare reads the bounds and factors of a thread's two rows, which it returns, and has
    those of the columns copied to shared memory. select then looks at the thread's sums of ``columns`` columns, laid
    out as `wgmma_epilogue.sum_store` says, and returns how many elements, fewer than a warp's threads, wait at
    ``staging``, a shared address, of which ``waiting`` were there before; put_away writes those that are left to their
    lists. All threads of a warp call them together.
    """
    groups, parts = columns // 8, columns // 8 // AMONG
    order = order_of(integer=integer)
    metric, farther = form.removeprefix(FARTHER), form.startswith(FARTHER)
    factored, clamped = metric != DOT, metric == L2
    score_type = types.int32 if integer else types.float32
    highest = score_type(2**31 - 1) if integer else score_type(float("inf"))
    nothing = score_type(-(2**31)) if integer else score_type(float("nan"))
    zero = score_type(0)
    score = scoring(form, score_type)
    number = types.int32 if integer else floats.word_float
    i32, i64, u32, u64 = types.int32, types.int64, types.uint32, types.uint64
    bounds_at = FOUND_PLACES * FOUND_NBYTES
    factors_at = bounds_at + 4 * columns
    copies = columns // WARP

    @cuda.jit(device=True, inline="always")
    def copy_number(i, target, source, first, last):  # type: ignore[no-untyped-def]
        copy_async_word(target + u32(4 * WARP * i), source + u64(4) * u64(min(first + WARP * i, last)))

    @cuda.jit(device=True, inline="always")
    def prepare(  # type: ignore[no-untyped-def]
        staging, lane, first, shift, plan, of_columns, lists, row, tile_first, m
    ):
        given = memory.global_array(plan, score_type)
        mine = staging + u32(4) * u32(lane)
        cuda.syncwarp()  # nobody reads those of the tile before any more
        if mutual:  # behind the last column there are no bounds
            at = i64(first + tile_first + lane)
            unroll(copy_number, copies, (mine + u32(bounds_at), plan, at, i64(lists - 1)))
        if factored:  # in memory that goes on
            at = i64(tile_first + lane)
            unroll(copy_number, copies, (mine + u32(factors_at), of_columns, at, at + columns))
        if mutual or factored:
            commit_copies()
        at_row = i64(row + shift) if mutual else i64(row)  # its list, bound and factor
        upper = given[at_row] if row < m else highest
        lower = given[at_row + 8] if row + 8 < m else highest
        of_upper = given[lists + at_row] if factored and row < m else zero
        of_lower = given[lists + at_row + 8] if factored and row + 8 < m else zero
        return upper, lower, of_upper, of_lower

    @cuda.jit(device=True, inline="always")
    def pair_at(address):  # type: ignore[no-untyped-def]
        left, right = memory.load_shared_pair(address)
        return number(left), number(right)

    @cuda.jit(device=True, inline="always")
    def score_group(j, sums, factors, upper, lower):  # type: ignore[no-untyped-def]
        left, right = pair_at(factors + u32(32 * j)) if factored else (zero, zero)
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
    def look_both_ways(j, sums, upper, lower, mask, bounds):  # type: ignore[no-untyped-def]
        left, right = pair_at(bounds + u32(32 * j))
        above = (sums[4 * j] >= upper) | (sums[4 * j + 1] >= upper)
        below = (sums[4 * j + 2] >= lower) | (sums[4 * j + 3] >= lower)
        of_left = (sums[4 * j] >= left) | (sums[4 * j + 2] >= left)
        of_right = (sums[4 * j + 1] >= right) | (sums[4 * j + 3] >= right)
        mask[0] |= u32(above | below | of_left | of_right) << u32(j)
        if j % AMONG == AMONG - 1:
            cuda.syncwarp()  # the compiler would read all bounds before it compares with one, and lack registers

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
    def put_away(  # type: ignore[no-untyped-def]
        staging, first, last, lane, keys, stride, capacity, plan, lists, names
    ):
        # Writes what waits in the places from first to last, at most one for each thread.
        cuda.syncwarp()
        place, base = i32(first) + i32(lane), i32(0)
        counters = memory.global_array(plan + u64(8) * u64(lists), i32)
        if stride == 0:  # one list: one addition for all
            if lane == 0 and last > first:
                base = cuda.atomic.add(counters, 0, i32(last - first))
            base = cuda.shfl_sync(0xFFFFFFFF, base, 0) + i32(lane)
        if place < last:
            at = staging + u32(FOUND_NBYTES) * u32(place)
            low, high = memory.load_shared_pair(at)
            of_list = i64(memory.load_shared_word(at + u32(8)))
            if names != 0:
                named = memory.global_array(names, u32)
                low = u32(0xFFFFFFFF) - named[i64(u32(0xFFFFFFFF) - low)]
            if stride != 0:
                base = cuda.atomic.add(counters, of_list, 1)
            if base < capacity:
                target = keys + u64(8) * (u64(of_list * stride) + u64(base))
                memory.global_array(target, u64)[0] = u64(high) << u64(32) | u64(low)
                if stride == 0:
                    found = keys + u64(8) * u64(capacity) + u64(4) * u64(base)
                    memory.global_array(found, i32)[0] = i32(of_list)
        cuda.syncwarp()

    @cuda.jit(device=True, inline="always")
    def select(  # type: ignore[no-untyped-def]
        sums,
        lines,
        staging,
        waiting,
        lane,
        keys,
        stride,
        first,
        capacity,
        shift,
        plan,
        lists,
        names,
        row,
        column,
        m,
        n,
        steps,
        diagonal,
    ):
        upper, lower, of_upper, of_lower = lines
        at_row = i64(row + shift) if mutual else i64(row)
        at_column = i64(first + column)
        side_by_side = staging + u32(8) * u32(lane & 3)  # of which the thread has every eighth column's
        if mutual or factored:
            wait_copies(0)
            cuda.syncwarp()
        if factored or farther:
            if farther and metric == COSINE:
                of_upper, of_lower = -of_upper, -of_lower
            unroll(score_group, groups, (sums, side_by_side + u32(factors_at), of_upper, of_lower))
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
            unroll(look_both_ways, groups, (sums, upper, lower, mask, side_by_side + u32(bounds_at)))
        else:
            unroll(look, groups, (sums, upper, lower, mask))
        hit = integers.warp_or(mask[0])
        scores = cuda.local.array(4, score_type)
        below = (u32(1) << u32(lane)) - u32(1)
        while hit != 0:
            j = i32(cuda.ffs(hit)) - 1
            hit &= hit - u32(1)
            unroll(pick_among, parts, (j, sums, scores))
            mine = u32(scores[0] >= upper) | u32(scores[1] >= upper) << u32(1)
            mine |= u32(scores[2] >= lower) << u32(2) | u32(scores[3] >= lower) << u32(3)
            if mutual:
                left, right = pair_at(side_by_side + u32(bounds_at + 32 * j))
                for i in range(4):
                    other, of_row = at_column + 8 * j + i % 2, at_row + 8 * (i // 2)
                    # Behind the last column there are no bounds, and what is no score may be as large.
                    reached = scores[i] >= (right if i % 2 == 1 else left)
                    mine |= u32(reached and other < lists and other != of_row) << u32(4 + i)
            found = cuda.ballot_sync(0xFFFFFFFF, mine != 0)
            while found != 0:
                if mine != 0:
                    i = i32(cuda.ffs(mine)) - 1
                    mine &= mine - u32(1)
                    left, right = (scores[2], scores[3]) if i & 2 != 0 else (scores[0], scores[1])
                    value = right if i & 1 != 0 else left
                    if clamped and (value < zero if farther else value > zero):
                        value = zero
                    of_row, other = u32(at_row) + u32(i & 2) * u32(4), u32(at_column) + u32(8 * j + (i & 1))
                    # Of two numbers that of the larger has the less in its lower half.
                    of_column = mutual and i >= 4
                    low = u32(0xFFFFFFFF) - (of_row if of_column else other)
                    at = staging + u32(FOUND_NBYTES) * u32(waiting + i32(cuda.popc(found & below)))
                    memory.store_shared_quad(at, low, order(value), other if of_column else of_row, u32(0))
                waiting += i32(cuda.popc(found))
                if waiting >= WARP:
                    waiting -= i32(WARP)
                    put_away(
                        staging,
                        waiting,
                        waiting + i32(WARP),
                        lane,
                        keys,
                        stride,
                        capacity,
                        plan,
                        lists,
                        names,
                    )
                found = cuda.ballot_sync(0xFFFFFFFF, mine != 0)
        return waiting

    return prepare, select, put_away
