"""The fast kernel of the ordinary cores: warp tiles, a multi-stage ``cp.async`` pipeline, register fragments.

One generator serves float32, complex64 and the 32- and 64-bit integers. A block computes a tile of C by
walking k in slabs; slabs of A and B travel to shared memory while earlier ones are multiplied. There both
operands lie with their outer index (row of A, column of B) contiguous, whatever their layout in global
memory, so one inner loop serves all layouts: the transposition happens on the way in.

Sources: Kerr et al., "CUTLASS: Fast linear algebra in CUDA C++" (2017), for the hierarchy of tiles; Gray's
notes on the Maxwell SGEMM (2014) for register blocking, the serpentine order and the register reuse cache;
NVIDIA's CUDA C++ Programming Guide for ``cp.async``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import cuda

from tilewright.kernels.gemm.cores.register_arithmetic import (
    element_of,
    multiply_line,
    store_element,
)
from tilewright.kernels.gemm.cores.warp_tiling import (
    ALONG_K,
    SlabCopy,
    Tiling,
    padding,
    slab_copy,
    stage_elements,
    vector_elements,
)
from tilewright.kernels.gemm.exact import wide_integer
from tilewright.kernels.numbers import WARP
from tilewright.kernels.ptx import async_copy, memory
from tilewright.kernels.ptx.unroll import unroll


def _copiers(itemsize: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return {
        4: (async_copy.copy_async_4, async_copy.copy_async_4_or_zero),
        8: (async_copy.copy_async_8, async_copy.copy_async_8_or_zero),
        16: (async_copy.copy_async_16, async_copy.copy_async_16_or_zero),
    }[itemsize]


def _slab_functions(copy: SlabCopy, leading: int, itemsize: int) -> tuple[Any, Any, Any]:
    """Device functions that start a thread on an operand, copy its part of a slab, and of a ragged one."""
    whole, or_zero = _copiers(copy.width * itemsize)
    layout, width, passes, repeats = copy.layout, copy.width, copy.passes, copy.repeats
    outer_lanes, k_lanes, outer_step = copy.outer_lanes, copy.k_lanes, copy.outer_step
    u32, u64 = numba.uint32, numba.uint64

    @cuda.jit(device=True, inline="always")
    def k_of(thread: Any) -> Any:
        if layout == ALONG_K:
            return u64(thread % u32(k_lanes))
        return u64(thread // u32(outer_lanes))

    @cuda.jit(device=True, inline="always")
    def outer_of(thread: Any) -> Any:
        if layout == ALONG_K:
            return u64(thread // u32(k_lanes))
        return u64(thread % u32(outer_lanes)) * u64(width)

    @cuda.jit(device=True, inline="always")
    def start(
        addresses: Any, base: Any, thread: Any, origin: Any, extent: Any, outer_stride: Any, k_stride: Any
    ) -> None:
        # Beyond the edge the last line is read instead: that affects only elements beyond C's edge. Where vectors are
        # copied, lines are whole vectors, or padded to whole ones.
        last = u64(extent) - u64(1)
        if width > 1:
            last = last // u64(width) * u64(width)
        for p in range(passes):
            outer = min(u64(origin) + outer_of(thread) + u64(p * outer_step), last)
            if layout == ALONG_K:
                addresses[p] = base + outer * u64(outer_stride) + k_of(thread) * u64(itemsize)
            else:
                addresses[p] = base + outer * u64(itemsize) + k_of(thread) * u64(k_stride)

    @cuda.jit(device=True, inline="always")
    def copy_whole(shared: Any, slab: Any, addresses: Any, k_stride: Any, thread: Any) -> None:
        target = slab + k_of(thread) * u64(leading) + outer_of(thread)
        for p in range(passes):
            for q in range(repeats):
                if layout == ALONG_K:
                    source = addresses[p] + u64(q * k_lanes * itemsize)
                else:
                    source = addresses[p] + u64(q * k_lanes) * u64(k_stride)
                whole(shared, target + u64(q * k_lanes * leading + p * outer_step), source)

    @cuda.jit(device=True, inline="always")
    def copy_ragged(shared: Any, slab: Any, addresses: Any, k_stride: Any, thread: Any, depth: Any) -> None:
        target = slab + k_of(thread) * u64(leading) + outer_of(thread)
        for p in range(passes):
            for q in range(repeats):
                if layout == ALONG_K:
                    source = addresses[p] + u64(q * k_lanes * itemsize)
                else:
                    source = addresses[p] + u64(q * k_lanes) * u64(k_stride)
                wanted = k_of(thread) + u64(q * k_lanes) < depth
                or_zero(shared, target + u64(q * k_lanes * leading + p * outer_step), source, wanted)

    return start, copy_whole, copy_ragged


@functools.cache
def warp_tiled_function(
    dtype: np.dtype, tiling: Tiling, a_layout: str, b_layout: str, short: bool = False
) -> Any:
    """The kernel's plain function, specialised at compile time.

    ``c (+)= a b`` for a (m × k), b (k × n), c (m × n, rows contiguous, written), all of ``dtype``. With a
    grid of several z, block z multiplies the z-th ``depth`` of k and writes to rows z m ... (z + 1) m - 1
    of ``c``. ``c_vectors`` says that 128-bit stores to c are aligned and n is a multiple of a vector. Of elements in
    columns beyond their row + ``diagonal`` only those in tiles with others are written.

    Grid: (tiles of C, 1, splits). Block: ``tiling.threads``. Shared memory: ``shared_nbytes``, dynamic.
    Ragged edges: outer indices are clamped while reading and checked while writing; the ragged slab of k
    comes first and is filled with zeros, so the loop over the others checks nothing. So no block may have less of k
    than one slab, except in a ``short`` kernel, for one z and k of less than a slab. Within a block k ascends, so an
    element's bits depend on ``depth`` alone. Expected registers: what the launch bounds leave, up to 255, without
    spilling. Error of an element of a float product: at most k units in the last place of the sum of its products'
    magnitudes, one rounding a multiply-add.
    """
    element = element_of(dtype)
    number, itemsize = element.number, dtype.itemsize
    register, parts = element.register, element.parts
    block_m, block_n, block_k, stages = tiling.block_m, tiling.block_n, tiling.block_k, tiling.stages
    warp_m, warp_n, lanes_m, lanes_n = tiling.warp_m, tiling.warp_n, tiling.lanes_m, tiling.lanes_n
    thread_m, thread_n, group, threads = tiling.thread_m, tiling.thread_n, tiling.group, tiling.threads
    vector = vector_elements(itemsize)
    vectors_m, vectors_n = thread_m // vector, thread_n // vector
    leading_a, leading_b = block_m + padding(itemsize), block_n + padding(itemsize)
    stage = stage_elements(tiling, itemsize)
    end = stage * stages
    b_part = block_k * leading_a
    warps_m = tiling.warps_m
    a_copy = slab_copy(a_layout, block_m, block_k, threads, itemsize)
    b_copy = slab_copy(b_layout, block_n, block_k, threads, itemsize)
    start_a, copy_a, copy_ragged_a = _slab_functions(a_copy, leading_a, itemsize)
    start_b, copy_b, copy_ragged_b = _slab_functions(b_copy, leading_b, itemsize)
    a_passes, b_passes = a_copy.passes, b_copy.passes
    multiply, store = multiply_line(element, tiling), store_element(element)
    lines, copy_step = thread_n if tiling.by_columns else thread_m, tiling.copy_step
    if short:
        copy_step = block_k  # never: there is no other slab
    totals, lefts, rights = thread_m * thread_n * parts, thread_m * parts, thread_n * parts
    two_lefts, two_rights, last_step = 2 * lefts, 2 * rights, block_k - 1
    in_flight = stages - 2
    vector_parts = vector * parts
    i32, i64, u32, u64 = numba.int32, numba.int64, numba.uint32, numba.uint64

    by_halves = element.by_halves
    highs = totals if by_halves else 1
    join = wide_integer.join
    loads = vectors_m + vectors_n

    @cuda.jit(device=True, inline="always")
    def load_fragment(
        g: Any, left: Any, right: Any, shared: Any, a_place: Any, b_place: Any, step: Any
    ) -> None:
        # Fragments of two steps alternate: one is loaded while the other is multiplied.
        half = step % 2
        if g < vectors_m:
            place = a_place + u64(step * leading_a + g * lanes_m * vector)
            memory.load_vector(left, half * lefts + g * vector_parts, shared, place)
        else:
            g -= vectors_m
            place = b_place + u64(step * leading_b + g * lanes_n * vector)
            memory.load_vector(right, half * rights + g * vector_parts, shared, place)

    @cuda.jit(device=True, inline="always")
    def step_of_k(
        step: Any, total: Any, high: Any, left: Any, right: Any, shared: Any, a_place: Any, b_place: Any,
        filling: Any, thread: Any, a_addresses: Any, a_stride: Any, b_addresses: Any, b_stride: Any,
    ) -> None:  # fmt: skip
        for g in range(loads):
            load_fragment(g, left, right, shared, a_place, b_place, step + 1)
        if step == copy_step:
            copy_a(shared, filling, a_addresses, a_stride, thread)
            copy_b(shared, filling + u64(b_part), b_addresses, b_stride, thread)
        unroll(multiply, lines, (total, high, left, right, step % 2))

    @cuda.jit(device=True, inline="always")
    def store_row(
        i: Any, total: Any, old: Any, c: Any, row0: Any, column0: Any, m: Any, n: Any,
        accumulate: Any, c_vectors: Any,
    ) -> None:  # fmt: skip
        row = u32(row0 + u32(i // vector * lanes_m * vector + i % vector))
        if row < m:
            line = u64(cuda.blockIdx.z) * u64(m) + u64(row)
            for g in range(vectors_n):
                column = u32(column0 + u32(g * lanes_n * vector))
                slot = (i * thread_n + g * vector) * parts
                if c_vectors:
                    if column < n:
                        place = line * (u64(c.strides[0]) // u64(itemsize)) + u64(column)
                        if accumulate:
                            memory.load_vector(old, 0, c, place)
                            for v in range(vector_parts):
                                total[slot + v] = register(old[v] + total[slot + v])
                        memory.store_vector(c, place, total, slot)
                else:
                    for v in range(vector):
                        if u32(column + u32(v)) < n:
                            store(c, line, u64(column + u32(v)), total, slot + v * parts, accumulate)

    def warp_tiled_kernel(
        a: Any, b: Any, c: Any, depth: int, accumulate: bool, c_vectors: bool, diagonal: int
    ) -> None:
        shared = cuda.shared.array(0, number, alignment=16)
        total = cuda.local.array(totals, register)
        high = cuda.local.array(highs, u32)
        old = cuda.local.array(vector_parts, register)
        left = cuda.local.array(two_lefts, register)
        right = cuda.local.array(two_rights, register)
        a_addresses = cuda.local.array(a_passes, u64)
        b_addresses = cuda.local.array(b_passes, u64)

        m, n, k = u32(a.shape[0]), u32(b.shape[1]), a.shape[1]
        a_stride, b_stride = u64(a.strides[1]), u64(b.strides[0])  # bytes from one k to the next
        thread = u32(cuda.threadIdx.x)

        # Whole tiles first, in groups of rows; then the ragged last column and row, which are short work and
        # fill the last wave.
        tile = u32(cuda.blockIdx.x)
        whole_m, whole_n = u32(m // u32(block_m)), u32(n // u32(block_n))
        whole = u32(whole_m * whole_n)
        if tile < whole:
            wide = u32(u32(group) * whole_n)
            first = u32(tile // wide * u32(group))
            rows = min(u32(whole_m - first), u32(group))
            tile_m = u32(first + tile % wide % rows)
            tile_n = u32(tile % wide // rows)
        elif tile - whole < whole_m and n % u32(block_n) != 0:
            tile_m, tile_n = u32(tile - whole), whole_n
        else:
            tile_m = whole_m
            tile_n = u32(tile - whole)
            if n % u32(block_n) != 0:
                tile_n = u32(tile_n - whole_m)
        row0, column0 = u32(tile_m * u32(block_m)), u32(tile_n * u32(block_n))
        if i64(column0) > i64(row0) + i64(block_m - 1) + diagonal:
            return  # all of the tile lies above the diagonal

        k_begin = u64(cuda.blockIdx.z) * u64(depth)
        k_length = u32(min(u64(depth), u64(k) - k_begin))
        slabs = u32((k_length + u32(block_k - 1)) // u32(block_k))
        # The ragged slab comes first: 1 to block_k deep.
        ragged = u32(k_length - u32(slabs - u32(1)) * u32(block_k))
        a_base, b_base = memory.address_of(a) + k_begin * a_stride, memory.address_of(b) + k_begin * b_stride
        start_a(a_addresses, a_base, thread, row0, m, a.strides[0], a_stride)
        start_b(b_addresses, b_base, thread, column0, n, b.strides[1], b_stride)

        warp, lane = u32(thread // u32(WARP)), u32(thread % u32(WARP))
        warp_row, warp_column = (
            u32(warp % u32(warps_m) * u32(warp_m)),
            u32(warp // u32(warps_m) * u32(warp_n)),
        )
        lane_row, lane_column = (
            u32(lane % u32(lanes_m) * u32(vector)),
            u32(lane // u32(lanes_m) * u32(vector)),
        )
        row, column = u32(warp_row + lane_row), u32(warp_column + lane_column)
        a_place, b_place = u64(row), u64(b_part) + u64(column)

        copy_ragged_a(shared, u64(0), a_addresses, a_stride, thread, ragged)
        copy_ragged_b(shared, u64(b_part), b_addresses, b_stride, thread, ragged)
        async_copy.commit_copies()
        # Bytes from the slab copied last to the one to be copied next. After the last slab the copies repeat it:
        # reading the cache again costs less than a branch.
        a_ahead, b_ahead = ragged * a_stride, ragged * b_stride
        to_copy = i32(slabs) - i32(1)
        for s in range(1, stages - 1):
            if to_copy <= 0:
                a_ahead = b_ahead = u64(0)
            for p in range(a_passes):
                a_addresses[p] += a_ahead
            for p in range(b_passes):
                b_addresses[p] += b_ahead
            if not short:
                copy_a(shared, u64(s * stage), a_addresses, a_stride, thread)
                copy_b(shared, u64(s * stage + b_part), b_addresses, b_stride, thread)
            async_copy.commit_copies()
            a_ahead, b_ahead = u64(block_k) * a_stride, u64(block_k) * b_stride
            to_copy = i32(to_copy - i32(1))

        for t in range(totals):
            total[t] = register(0)
        for t in range(highs):
            high[t] = u32(0)
        async_copy.wait_copies(in_flight)
        cuda.syncthreads()  # the first slab has arrived for every thread
        reading, filling = u64(0), u64((stages - 1) * stage)
        for g in range(loads):
            load_fragment(g, left, right, shared, a_place, b_place, 0)
        for _ in range(slabs):
            if to_copy <= 0:
                a_ahead = b_ahead = u64(0)
            for p in range(a_passes):
                a_addresses[p] += a_ahead
            for p in range(b_passes):
                b_addresses[p] += b_ahead
            if copy_step < 0:
                copy_a(shared, filling, a_addresses, a_stride, thread)
                copy_b(shared, filling + u64(b_part), b_addresses, b_stride, thread)
            unroll(
                step_of_k,
                last_step,
                (
                    total, high, left, right, shared, reading + a_place, reading + b_place,
                    filling, thread, a_addresses, a_stride, b_addresses, b_stride,
                ),
            )  # fmt: skip
            a_ahead, b_ahead = u64(block_k) * a_stride, u64(block_k) * b_stride
            to_copy = i32(to_copy - i32(1))
            async_copy.commit_copies()
            filling = reading
            reading += u64(stage)
            if reading == u64(end):
                reading = u64(0)
            async_copy.wait_copies(in_flight)
            # The next slab has arrived for every thread, and every thread has read the one to be overwritten.
            cuda.syncthreads()
            for g in range(loads):
                load_fragment(g, left, right, shared, reading + a_place, reading + b_place, 0)
            unroll(multiply, lines, (total, high, left, right, last_step % 2))
        async_copy.wait_copies(0)
        if by_halves:
            join(total, high, totals)

        unroll(
            store_row,
            thread_m,
            (total, old, c, u32(row0 + row), u32(column0 + column), m, n, accumulate, c_vectors),
        )

    return warp_tiled_kernel
