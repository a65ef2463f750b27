"""The kernel of products with a thin side on the ordinary cores: the large operand streamed through shared memory.

With n <= 64 columns, A (m × k) is read once and nearly all that is moved is A. So asynchronous copies keep several
128-byte-wide panels of A on their way into shared memory, every thread then adds up a few rows times a few columns in
registers. B is thin: it is fetched element by element, which takes any strides and transposes on the way.

Which products it is for, and how they are cut, is in `tilewright.kernels.gemm.cores.skinny_launch`.

Source: tall-and-skinny products bound by memory, e.g. Ernst, Hager, Thies, Wellein, "Performance engineering
for real and complex tall & skinny matrix multiplication kernels on GPUs", 2021; written anew for Numba.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numba import cuda
from numba.cuda import types

from tilewright.kernels.gemm.cores.register_arithmetic import product_adder, real_dtype
from tilewright.kernels.gpu.compiled import compile_kernel
from tilewright.kernels.numbers import WARP, ceil_div, round_up
from tilewright.kernels.ptx import async_copy, memory

LINE_NBYTES = 128
"""Of k in one stage: what a warp reads best from a row, and one round through all banks of shared memory."""
CHUNK_NBYTES = 16
LINE_CHUNKS = LINE_NBYTES // CHUNK_NBYTES

# Inlined before type inference: local arrays that cross a call would live in memory instead of registers.
inlined = cuda.jit(device=True, inline="always")


@dataclass(frozen=True)
class Tile:
    """How one block works: ``m`` rows of A by all ``n`` columns; a thread adds up ``rows`` × ``columns`` of
    them."""

    m: int
    n: int
    rows: int
    columns: int
    stages: int = 3

    @property
    def threads_down(self) -> int:
        return self.m // self.rows

    @property
    def threads(self) -> int:
        return self.threads_down * (self.n // self.columns)


@dataclass(frozen=True)
class Layout:
    """What is decided when the kernel is compiled, besides the tile."""

    dtype: str
    a_along_k: bool
    """Whether neighbours in A's memory are neighbours in k; else along m."""
    a_whole: bool
    """Whether A comes in 16-byte chunks: address and pitch multiples of 16 bytes, contiguous side too."""
    b_along_k: bool
    """Whether neighbouring threads fetch neighbours in k of B; else along n."""
    b_whole: bool = False
    """Whether B lies along n and comes in 16-byte chunks; else element by element."""


@dataclass(frozen=True)
class _Shape:
    """The numbers that follow from tile and layout. Complex elements are two numbers, others one."""

    tile: Tile
    layout: Layout

    @property
    def real(self) -> np.dtype:
        return real_dtype(np.dtype(self.layout.dtype))

    @property
    def parts(self) -> int:
        """Numbers in an element."""
        return np.dtype(self.layout.dtype).itemsize // self.real.itemsize

    @property
    def chunk(self) -> int:
        """Numbers in a 16-byte chunk."""
        return CHUNK_NBYTES // self.real.itemsize

    @property
    def depth(self) -> int:
        """Elements of k in a stage."""
        return LINE_NBYTES // np.dtype(self.layout.dtype).itemsize

    @property
    def a_lines(self) -> int:
        return self.tile.m if self.layout.a_along_k else self.depth

    @property
    def a_chunks(self) -> int:
        """Chunks in a line of A's panel."""
        return LINE_CHUNKS if self.layout.a_along_k else self.tile.m * LINE_CHUNKS // self.depth

    @property
    def a_size(self) -> int:
        return self.a_lines * self.a_chunks * self.chunk

    @property
    def b_pitch(self) -> int:
        """Numbers from one k to the next in B's panel; one chunk more than used, so that k falls in other
        banks."""
        width = self.tile.n * self.parts
        return width + self.chunk if width >= self.chunk else width

    @property
    def b_size(self) -> int:
        return round_up(self.depth * self.b_pitch, self.chunk)

    @property
    def shared_nbytes(self) -> int:
        return self.tile.stages * (self.a_size + self.b_size) * self.real.itemsize

    def check(self) -> None:
        """A tile that breaks these is a mistake in `skinny_launch.choose_tile`, not a user's."""
        tile, elements = self.tile, self.chunk // self.parts
        assert tile.m % tile.rows == tile.n % tile.columns == 0, f"{tile}: threads share the tile evenly"
        assert tile.threads % WARP == 0, f"{tile}: whole warps"
        assert tile.threads_down % LINE_CHUNKS == 0, f"{tile}: a thread's rows share their swizzle"
        assert self.layout.a_along_k or tile.rows % elements == 0, f"{tile}: a thread's rows are whole chunks"
        assert not self.layout.b_whole or (tile.n % elements == 0 and not self.layout.b_along_k), f"{tile}: B"
        assert (self.a_lines * self.a_chunks) % tile.threads == 0, f"{tile}: every pass of copies is full"


def _copier_a(shape: _Shape) -> Any:
    """A device function that starts copying a panel of A: ``copy(shared, base, source, pitch, lines,
    length)``.

    ``source`` is the address of the panel's first element, ``pitch`` the bytes between its lines; the
    operand has ``lines`` lines and ``length`` elements of a line from there. What lies outside becomes zero.

    Along k, chunk c of row r is stored at c XOR (r mod 8), so that eight threads that read chunk c of eight
    neighbouring rows touch all banks once.
    """
    chunks, chunk, parts = shape.a_chunks, shape.chunk, shape.parts
    elements = chunk // parts
    threads, along_k, whole = shape.tile.threads, shape.layout.a_along_k, shape.layout.a_whole
    passes = shape.a_lines * chunks // threads
    itemsize = CHUNK_NBYTES // elements
    copy_chunk = async_copy.copy_async_16_or_zero
    copy_element = {
        4: async_copy.copy_async_4_or_zero,
        8: async_copy.copy_async_8_or_zero,
        16: copy_chunk,
    }[itemsize]
    last = LINE_CHUNKS - 1
    i64, u64 = types.int64, types.uint64

    @inlined
    def copy(shared, base, source, pitch, lines, length):  # type: ignore[no-untyped-def]
        for i in range(passes):
            index = cuda.threadIdx.x + i * threads
            line = index // chunks
            place = index % chunks
            stored = place ^ (line & last) if along_k else place
            target = base + (line * chunks + stored) * chunk
            origin = source + line * pitch + place * CHUNK_NBYTES
            first = place * elements
            if whole:
                copy_chunk(shared, target, u64(origin), line < lines and first < length)
            else:
                for e in range(elements):
                    inside = line < lines and first + e < length
                    copy_element(shared, target + e * parts, u64(origin + i64(e * itemsize)), inside)

    return copy


def _copier_b(shape: _Shape) -> Any:
    """The same for B: ``copy(shared, base, source, row_step, column_step, rows,
    columns)``.

    Steps are in bytes. The panel is stored k by k, whichever way B lies in memory.
    """
    depth, n, parts, pitch = shape.depth, shape.tile.n, shape.parts, shape.b_pitch
    threads, along_k = shape.tile.threads, shape.layout.b_along_k
    # Elements copied at once, and the copy that does it.
    together = shape.chunk // parts if shape.layout.b_whole else 1
    wide = n // together
    count = depth * wide
    passes = ceil_div(count, threads)
    copy_some = {
        4: async_copy.copy_async_4_or_zero,
        8: async_copy.copy_async_8_or_zero,
        16: async_copy.copy_async_16_or_zero,
    }[shape.real.itemsize * parts * together]
    u64 = types.uint64

    @inlined
    def copy(shared, base, source, row_step, column_step, rows, columns):  # type: ignore[no-untyped-def]
        for i in range(passes):
            index = cuda.threadIdx.x + i * threads
            if along_k:
                row = index % depth
                column = index // depth
            else:
                row = index // wide
                column = index % wide * together
            if index < count:
                origin = u64(source + row * row_step + column * column_step)
                copy_some(
                    shared, base + row * pitch + column * parts, origin, row < rows and column < columns
                )

    return copy


def _multiplier(shape: _Shape, steps: int) -> Any:
    """A device function that adds the products of one element of k to a thread's sums: ``multiply(sums, a, b, k)``.

    ``a`` holds ``steps`` elements of k row by row (k contiguous), of which it takes the k-th, and ``b`` that element of
    each column; all are register arrays of numbers.
    """
    rows, columns, parts = shape.tile.rows, shape.tile.columns, shape.parts
    add_product = product_adder(parts)

    @inlined
    def multiply(sums, a, b, k):  # type: ignore[no-untyped-def]
        for i in range(rows):
            for j in range(columns):
                add_product(sums, (i * columns + j) * parts, a, (i * steps + k) * parts, b, j * parts)

    return multiply


def kernel_function(tile: Tile, layout: Layout) -> Any:
    """The kernel as a plain function, for `cuda.jit` and `cuda.compile_ptx`.

    ``c (+)= a b``: a is m × k, b k × n with n <= ``tile.n``, c m × n; ``a_pitch`` are the bytes between A's
    lines, the other steps bytes between rows and columns. With ``gridDim.y`` > 1, k is cut into ranges of
    ``split_k``, and range y is written ``c_split`` bytes · y behind c.

    Grid: (blocks of ``tile.m`` rows, ranges of k). Block: ``tile.threads``. Shared memory (dynamic):
    ``stages`` panels of A and B. Ragged edges come in as zeros and are not written. Each element of a range
    is added up in the order of k by one thread.
    """
    shape = _Shape(tile, layout)
    shape.check()
    parts, chunk, depth, stages = shape.parts, shape.chunk, shape.depth, tile.stages
    elements = chunk // parts
    itemsize = shape.real.itemsize * parts
    along_k = layout.a_along_k
    number = numba.from_dtype(shape.real)
    copy_a, copy_b = _copier_a(shape), _copier_b(shape)
    # Along k a 16-byte load brings several k of one row; across, several rows at one k.
    steps = elements if along_k else 1
    multiply = _multiplier(shape, steps)
    rows, columns, down = tile.rows, tile.columns, tile.threads_down
    total = rows * columns * parts
    a_count, b_count = rows * steps * parts, columns * parts
    loads = rows if along_k else rows // elements
    a_pitch_shared, b_pitch = shape.a_chunks * chunk, shape.b_pitch
    vector_b = b_count % chunk == 0
    a_size, stage_size = shape.a_size, shape.a_size + shape.b_size
    ring, pending, last = stages * stage_size, stages - 2, LINE_CHUNKS - 1
    tile_m = tile.m
    global_array, load = memory.global_array, memory.load_vector
    commit, wait = async_copy.commit_copies, async_copy.wait_copies
    i32, i64, u64 = types.int32, types.int64, types.uint64

    def kernel(  # type: ignore[no-untyped-def]
        a_address,
        a_pitch,
        b_address,
        b_row,
        b_column,
        c_address,
        c_row,
        c_column,
        c_split,
        m,
        n,
        k,
        split_k,
        accumulate,
    ):
        shared = cuda.shared.array(0, number, alignment=128)
        sums = cuda.local.array(total, number)
        a_regs = cuda.local.array(a_count, number)
        b_regs = cuda.local.array(b_count, number)

        thread = cuda.threadIdx.x
        x = thread % down
        y = thread // down
        row0 = i32(cuda.blockIdx.x * tile_m)
        first_k = i32(cuda.blockIdx.y * split_k)
        left = i32(min(split_k, k - first_k))
        count = (left + depth - 1) // depth
        if along_k:
            a_next = i64(a_address) + i64(row0) * a_pitch + i64(first_k) * itemsize
            a_advance = i64(LINE_NBYTES)
        else:
            a_next = i64(a_address) + i64(first_k) * a_pitch + i64(row0) * itemsize
            a_advance = depth * a_pitch
        b_next = i64(b_address) + i64(first_k) * b_row
        b_advance = depth * b_row

        for z in range(total):
            sums[z] = number(0)

        # Panels beyond the end of k are filled with zeros, so that the count of groups under way never depends on k.
        for stage in range(stages - 1):
            if along_k:
                copy_a(shared, stage * stage_size, a_next, a_pitch, m - row0, left)
            else:
                copy_a(shared, stage * stage_size, a_next, a_pitch, left, m - row0)
            copy_b(shared, stage * stage_size + a_size, b_next, b_row, b_column, left, n)
            commit()
            a_next += a_advance
            b_next += b_advance
            left = i32(left - depth)
        reading = i32(0)
        writing = i32((stages - 1) * stage_size)

        for _ in range(count):
            wait(pending)
            # The panels to read have arrived for every thread, and every thread has read those to be overwritten.
            cuda.syncthreads()
            if along_k:
                copy_a(shared, writing, a_next, a_pitch, m - row0, left)
            else:
                copy_a(shared, writing, a_next, a_pitch, left, m - row0)
            copy_b(shared, writing + a_size, b_next, b_row, b_column, left, n)
            commit()
            a_next += a_advance
            b_next += b_advance
            left = i32(left - depth)

            b_base = reading + a_size + y * b_count
            for q in range(depth // steps):
                for i in range(loads):
                    if along_k:
                        place = reading + (x + i * down) * a_pitch_shared + (q ^ (x & last)) * chunk
                    else:
                        place = reading + q * a_pitch_shared + (x + i * down) * chunk
                    load(a_regs, i * chunk, shared, u64(place))
                for s in range(steps):
                    line = b_base + (q * steps + s) * b_pitch
                    if vector_b:
                        for v in range(b_count // chunk):
                            load(b_regs, v * chunk, shared, u64(line + v * chunk))
                    else:
                        for v in range(b_count):
                            b_regs[v] = shared[u64(line + v)]
                    multiply(sums, a_regs, b_regs, s)
            reading = i32(reading + stage_size)
            if reading == ring:
                reading = i32(0)
            writing = i32(writing + stage_size)
            if writing == ring:
                writing = i32(0)
        wait(0)

        base = i64(c_address) + i64(cuda.blockIdx.y) * c_split
        for i in range(rows):
            if along_k:
                row = row0 + x + i * down
            else:
                row = row0 + (x + (i // elements) * down) * elements + i % elements
            for j in range(columns):
                column = y * columns + j
                if row < m and column < n:
                    out = global_array(base + i64(row) * c_row + column * c_column, number)
                    for p in range(parts):
                        value = sums[(i * columns + j) * parts + p]
                        if accumulate:
                            value += out[p]
                        out[p] = value

    return kernel


SIGNATURE = types.void(
    types.uint64,
    types.int64,
    types.uint64,
    *(types.int64,) * 2,
    types.uint64,
    *(types.int64,) * 3,
    *(types.int32,) * 4,
    types.boolean,
)
"""A and its pitch; B and its steps; C, its steps and c_split; m, n, k, split_k; accumulate."""


def shared_nbytes(tile: Tile, layout: Layout) -> int:
    """Dynamic shared memory of a block."""
    return _Shape(tile, layout).shared_nbytes


@functools.cache
def compiled(tile: Tile, layout: Layout) -> Any:
    """The kernel, compiled for a GPU by its first launch there."""
    nbytes, function = shared_nbytes(tile, layout), kernel_function(tile, layout)
    return compile_kernel(function, SIGNATURE, launch_bounds=(tile.threads, 1), shared_nbytes=nbytes)
