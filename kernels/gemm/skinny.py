"""Products with a thin side (m or n up to 64): as fast as the large operand can be read, for every float
dtype, and integers of 32 and 64 bits, which wrap.

With n <= 64 columns, A (m × k) is read once and nearly all that is moved is A: below some n (about 20 for
float32 on an H200) memory is the limit, above it the arithmetic. So the design is one for streaming:
asynchronous copies keep several 128-byte-wide panels of A on their way into shared memory, every thread then
adds up a few rows times a few columns in registers. B is thin: it is fetched element by element, which takes
any strides and transposes on the way.

Where m / block rows gives too few blocks to fill the GPU (matrix-vector products, and Gram matrices, where m
and n are both small and k is huge), k is cut into ranges. Each range writes its partial product to a
workspace, and a second kernel adds them up in their order, so that the answer is the same bits every time.

m thin is the same with the transposed product, C' = B' A'. float64 and complex128 with more than a few
columns go to the narrow tiles of the tensor-core kernel; there k is dealt out slab by slab instead of in ranges. That
kernel writes C by rows. So where C's long side is contiguous, as in a short, wide C by rows, the tiles are short and
wide instead of tall and narrow, and C is written where it lies.

Source: tall-and-skinny products bound by memory, e.g. Ernst, Hager, Thies, Wellein, "Performance engineering
for real and complex tall & skinny matrix multiplication kernels on GPUs", 2021; written anew for Numba.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
from numba import cuda
from numba.cuda import types

from tilewright.kernels.compiled import compile_kernel, multiprocessors
from tilewright.kernels.device_choice import capability, current_device
from tilewright.kernels.gemm import double_tensor_core as tensor
from tilewright.kernels.gemm import matvec
from tilewright.kernels.gemm.base import GemmKernel, Problem, Variant
from tilewright.kernels.gemm.scratch import borrowed
from tilewright.kernels.gemm.warp_tiled_launch import Matrix, as_unsigned, enqueue_sum, matrix
from tilewright.kernels.gemm.warp_tiled_launch import supports as tiled_supports
from tilewright.kernels.launch import allow_dynamic_shared, ceil_div, enqueue
from tilewright.kernels.ptx import async_copy, memory

WIDEST = 64
"""The thin side's greatest length."""
LINE_NBYTES = 128
"""Of k in one stage: what a warp reads best from a row, and one round through all banks of shared memory."""
CHUNK_NBYTES = 16
LINE_CHUNKS = LINE_NBYTES // CHUNK_NBYTES
FLOATS = tuple(np.dtype(name) for name in ("float32", "float64", "complex64", "complex128"))
INTEGERS = tuple(np.dtype(name) for name in ("uint32", "uint64"))
"""Signed ones have the same sums and products, bit for bit."""
DTYPES = FLOATS + INTEGERS

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
        dtype = np.dtype(self.layout.dtype)
        return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype

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
        return ceil_div(self.depth * self.b_pitch, self.chunk) * self.chunk

    @property
    def shared_nbytes(self) -> int:
        return self.tile.stages * (self.a_size + self.b_size) * self.real.itemsize

    def check(self) -> None:
        """A tile that breaks these is a mistake in `choose_tile`, not a user's."""
        tile, elements = self.tile, self.chunk // self.parts
        assert tile.m % tile.rows == tile.n % tile.columns == 0, f"{tile}: threads share the tile evenly"
        assert tile.threads % 32 == 0, f"{tile}: whole warps"
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
    """A device function that adds ``steps`` elements of k to a thread's sums: ``multiply(sums, a, b)``.

    ``a`` holds them row by row (k contiguous), ``b`` k by k; all are register arrays of numbers.
    """
    rows, columns, parts = shape.tile.rows, shape.tile.columns, shape.parts

    @inlined
    def multiply(sums, a, b, k):  # type: ignore[no-untyped-def]
        for i in range(rows):
            for j in range(columns):
                left = (i * steps + k) * parts
                right = j * parts
                total = (i * columns + j) * parts
                sums[total] += a[left] * b[right]
                if parts == 2:
                    sums[total] -= a[left + 1] * b[right + 1]
                    sums[total + 1] += a[left] * b[right + 1]
                    sums[total + 1] += a[left + 1] * b[right]

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

# --- Choosing and launching ----------------------------------------------------------------------------------

MAX_SPLITS = 1024
FILL_STAGES = 6
"""What starting and ending a block costs, in stages of k."""
SUM_STAGES = 4
"""What the launch that adds up split products costs, in the same unit: where k is short, more than splitting saves."""
MAX_PARTIAL_NBYTES = 64 * 2**20
"""Scratch memory for partial products, or for a stretch of C where neither of its sides is contiguous."""
SHORT_ROWS = 64
"""Rows of a block where m is no larger."""
LONG_ROWS = 256
MAX_THREADS = 256
WARP = 32


def choose_tile(dtype: np.dtype, m: int, n: int, a_along_k: bool) -> Tile:
    """The tile for m rows and n <= WIDEST columns: n rounded up to a power of two, so that little is
    wasted."""
    parts = 2 if dtype.kind == "c" else 1
    padded = 1 << (n - 1).bit_length()
    columns = min(padded, 8 // parts)
    least_rows = 1 if a_along_k else CHUNK_NBYTES // dtype.itemsize
    single = dtype.itemsize // parts == 4
    rows = max(8 if single and padded >= 16 else 4, least_rows)
    if a_along_k and padded <= 2:
        rows = 2  # little arithmetic: more threads, to issue the copies
    height = SHORT_ROWS if m <= SHORT_ROWS else LONG_ROWS
    if max(m, n) <= SHORT_ROWS // 2:
        # Rows beyond m would be multiplied for nothing. Threads down share a swizzle by eights.
        height = max(LINE_CHUNKS * least_rows, 1 << (max(m, n) - 1).bit_length())
        rows = min(rows, height // LINE_CHUNKS)
        while columns > 1 and height // rows * (padded // columns) < WARP:
            columns //= 2
    while height // rows * (padded // columns) < WARP:
        if columns > 1:
            columns //= 2
        elif rows > least_rows:
            rows //= 2
        else:
            height *= 2
    while height // rows * (padded // columns) > MAX_THREADS:
        height //= 2
    return Tile(m=height, n=padded, rows=rows, columns=columns)


def choose_splits(blocks: int, depths: int, slots: int, partial_nbytes: int) -> int:
    """Into how many ranges to cut k (``depths`` stages): the number that keeps the GPU busy for the shortest
    time.

    There are ``blocks`` without cutting, ``slots`` run at once, and each range costs ``partial_nbytes``. Time is
    counted in stages of a block: waves of blocks times the stages of each, the start of each, and the sum.
    """
    most = max(1, min(MAX_SPLITS, depths, MAX_PARTIAL_NBYTES // partial_nbytes))

    def stages(splits: int) -> int:
        summed = SUM_STAGES if splits > 1 else 0
        return ceil_div(blocks * splits, slots) * (ceil_div(depths, splits) + FILL_STAGES) + summed

    return min(range(1, most + 1), key=stages)


TENSOR_COLUMNS = {np.dtype(np.float64): 2, np.dtype(np.complex128): 0}
"""Beyond this many columns the tensor cores take over from the ordinary cores."""
SINGLE_COLUMNS = 16
"""Beyond this many columns, products on the ordinary cores (float32, complex64, integers) are limited by arithmetic,
and the warp-tiled kernel is faster."""
SHORT_SIDE = 32
"""Where neither side is longer, that kernel's tiles are too large for C, and this one is faster again."""


def tensor_tile(parts: int, m: int, n: int) -> tensor.Tile:
    """A narrow tile of the tensor-core kernel, for m rows and n <= WIDEST columns."""
    padded = max(16, 1 << (n - 1).bit_length())
    if parts == 1 and m <= SHORT_ROWS:
        # Rows beyond m would be multiplied for nothing, and arithmetic is the limit here. Deep stages keep all of a
        # block's memory busy with copies.
        if padded == WIDEST:
            return tensor.Tile(m=64, n=64, depth=32, warps=(2, 2), step=8, stages=3, blocks=2)
        stages = 4 if padded == 32 else 5
        return tensor.Tile(m=64, n=padded, depth=32, warps=(4, 1), step=8, stages=stages, blocks=2)
    # Tall warp tiles, so that a warp reads no row of A that another reads too; complex sums take twice the
    # registers, so from 32 columns on two warps share the columns.
    if parts == 1:
        step = 4 if padded == WIDEST else 8  # 64 sums a thread leave no room for deeper fragments
        return tensor.Tile(m=128, n=padded, depth=16, warps=(4, 1), step=step, stages=4, blocks=2)
    warps = (2, 2) if padded >= 32 else (4, 1)
    return tensor.Tile(m=64, n=padded, depth=16, warps=warps, step=4, stages=4, blocks=2)


def turned(tile: tensor.Tile, parts: int) -> tensor.Tile:
    """The tile for the transposed product, with the same sums: as many rows as the other has columns."""
    # Fragments of complex numbers are read twice from B, so its columns are what warps do not share.
    warps = tile.warps[::-1] if parts == 1 else (1, tile.warps[0] * tile.warps[1])
    return replace(tile, m=tile.n, n=tile.m, warps=warps)


SHARED_NBYTES = 227 * 1024
"""What the blocks of a multiprocessor share, on Hopper."""
RESERVED_NBYTES = 1024
"""What the system takes of it for each block."""


@functools.cache
def compiled(tile: Tile, layout: Layout) -> Any:
    """The kernel, compiled for a GPU by its first launch there."""
    return compile_kernel(kernel_function(tile, layout), SIGNATURE, launch_bounds=(tile.threads, 1))


def _lies_along_k(a: Matrix) -> bool:
    """Whether A's rows are contiguous; for a single row or column its other side decides."""
    k = a.shape[1]
    by_rows = a.strides[1] == a.dtype.itemsize or k == 1
    return by_rows and not (k == 1 and a.strides[0] == a.dtype.itemsize)


def _layout(a: Matrix, b: Matrix, tile: Tile) -> Layout:
    (m, k), n, itemsize = a.shape, b.shape[1], a.dtype.itemsize
    along_k = _lies_along_k(a)
    pitch, contiguous, lines = (a.strides[0], k, m) if along_k else (a.strides[1], m, k)
    a_whole = a.pointer % CHUNK_NBYTES == contiguous * itemsize % CHUNK_NBYTES == 0
    b_along_k = abs(b.strides[0]) <= abs(b.strides[1])
    aligned = b.pointer % CHUNK_NBYTES == b.strides[0] % CHUNK_NBYTES == n * itemsize % CHUNK_NBYTES == 0
    return Layout(
        dtype=a.dtype.name,
        a_along_k=along_k,
        a_whole=a_whole and (pitch % CHUNK_NBYTES == 0 or lines == 1),
        b_along_k=b_along_k,
        b_whole=aligned and not b_along_k and b.strides[1] == itemsize and tile.n * itemsize >= CHUNK_NBYTES,
    )


def _enqueue_tile(
    a: Matrix, b: Matrix, c: Matrix, accumulate: bool, stream: Any, tile: Tile, splits: int, split_k: int
) -> None:
    """Enqueue ``c (+)= a b``; range r of k goes to rows r m to (r + 1) m of ``c``."""
    (m, k), n = a.shape, b.shape[1]
    layout = _layout(a, b, tile)
    kernel = compiled(tile, layout)
    nbytes = _Shape(tile, layout).shared_nbytes
    allow_dynamic_shared(kernel, nbytes)
    enqueue(
        kernel,
        (ceil_div(m, tile.m), splits),
        tile.threads,
        stream,
        nbytes,
        a.pointer,
        a.strides[0] if layout.a_along_k else a.strides[1],
        b.pointer,
        *b.strides,
        c.pointer,
        *c.strides,
        m * c.strides[0],
        m,
        n,
        k,
        split_k,
        accumulate,
    )


@functools.lru_cache(maxsize=4096)
def _cut(
    dtype: np.dtype, m: int, n: int, k: int, a_along_k: bool, on_tensor_cores: bool, multiprocessors: int
) -> tuple[Any, int, int]:
    """The tile, the ranges of k and the length of each; on the tensor cores, which deal k out, only the number of
    ranges counts."""
    parts = 2 if dtype.kind == "c" else 1
    tile: Any
    if on_tensor_cores:
        tile = tensor_tile(parts, m, n)
        depth, nbytes = tile.depth // parts, tile.shared_nbytes(parts)
    else:
        tile = choose_tile(dtype, m, n, a_along_k)
        depth = LINE_NBYTES // dtype.itemsize
        nbytes = _Shape(tile, Layout(dtype.name, a_along_k, True, True)).shared_nbytes
    depths = ceil_div(k, depth)
    slots = multiprocessors * (SHARED_NBYTES // (nbytes + RESERVED_NBYTES))
    splits = choose_splits(ceil_div(m, tile.m), depths, slots, m * n * dtype.itemsize)
    split_k = ceil_div(depths, splits) * depth
    return tile, ceil_div(k, split_k), split_k


def _multiply_vector(a: Matrix, b: Matrix, c: Matrix, accumulate: bool, stream: Any) -> None:
    """Enqueue ``c (+)= a b`` for a single column."""
    (m, k), dtype, itemsize = a.shape, a.dtype, a.dtype.itemsize
    along_k = _lies_along_k(a)
    pitch, contiguous, lines = (a.strides[0], k, m) if along_k else (a.strides[1], m, k)
    aligned = a.pointer % CHUNK_NBYTES == 0 and (pitch % CHUNK_NBYTES == 0 or lines == 1)
    layout = matvec.Layout(dtype.name, along_k, aligned and contiguous * itemsize % CHUNK_NBYTES == 0)
    kernel = matvec.compiled(layout)
    most = min(MAX_SPLITS, MAX_PARTIAL_NBYTES // (m * itemsize))
    splits, split_k = matvec.split(layout, m, k, multiprocessors(current_device()), most)
    grid = (ceil_div(m, layout.block_rows), splits)

    def multiply(out: int, step: int, add: bool) -> None:
        places = (a.pointer, pitch, b.pointer, b.strides[0], out, step, m * step)
        enqueue(kernel, grid, matvec.WARPS * WARP, stream, 0, *places, m, k, split_k, add)

    if splits == 1:
        multiply(c.pointer, c.strides[0], accumulate)
        return
    with borrowed(splits * m * itemsize, stream) as scratch:
        multiply(scratch, itemsize, False)
        partial = Matrix(scratch, (splits * m, 1), (itemsize, itemsize), dtype)
        enqueue_sum(partial, c, splits, accumulate, stream)


def launch(a: Any, b: Any, c: Any, accumulate: bool, stream: Any) -> None:
    """Enqueue ``c (+)= a b`` for m or n up to `WIDEST`."""
    left, right, target = matrix(a), matrix(b), matrix(c)
    if target.shape[0] < target.shape[1]:
        left, right, target = right.transposed(), left.transposed(), target.transposed()
    (m, n), k, dtype = target.shape, left.shape[1], target.dtype
    itemsize = dtype.itemsize
    if n == 1 and dtype in FLOATS and matvec.preferred(dtype, _lies_along_k(left), k):
        _multiply_vector(left, right, target, accumulate, stream)
        return
    on_tensor_cores = n > TENSOR_COLUMNS.get(dtype, WIDEST) and _tensor_accepts(left, right)
    tile, splits, split_k = _cut(
        dtype,
        m,
        n,
        k,
        _lies_along_k(left),
        on_tensor_cores,
        multiprocessors(current_device()),
    )

    by_rows = target.strides[1] == itemsize or n == 1
    if on_tensor_cores and not by_rows and target.strides[0] == itemsize:
        tile = turned(tile, itemsize // tensor.ITEM)
        left, right, target = right.transposed(), left.transposed(), target.transposed()
        m, n, by_rows = n, m, True

    def multiply(rows: Matrix, out: Matrix, add: bool) -> None:
        if on_tensor_cores:
            tensor.enqueue_tile(rows, right, out, add, stream, tile, splits)
        else:
            _enqueue_tile(rows, right, out, add, stream, tile, splits, split_k)

    if splits == 1 and (by_rows or not on_tensor_cores):
        multiply(left, target, accumulate)
        return
    # Partial products are few enough for all rows at once. With one, and neither side of C contiguous, they may not be.
    most = m if splits > 1 else max(1, MAX_PARTIAL_NBYTES // (n * itemsize))
    for first in range(0, m, most):
        length = min(most, m - first)
        with borrowed(splits * length * n * itemsize, stream) as scratch:
            partial = Matrix(scratch, (splits * length, n), (n * itemsize, itemsize), dtype)
            multiply(left.slice(first, length, 0, k), partial.slice(0, length, 0, n), False)
            enqueue_sum(partial, target.slice(first, length, 0, n), splits, accumulate, stream)


def most_nbytes(m: int, n: int, k: int, dtype: np.dtype) -> int:
    """An upper bound for the scratch memory of a product of these sides or smaller ones, or of a strip of one up to
    `WIDEST` wide, whatever its layouts and the GPU."""
    if as_unsigned(dtype) not in DTYPES:
        return 0
    splits = min(MAX_SPLITS, ceil_div(k, LINE_NBYTES // dtype.itemsize))
    if splits == 1 and dtype not in TENSOR_COLUMNS:
        return 0
    return min(MAX_PARTIAL_NBYTES, splits * min(m, n, WIDEST) * max(m, n) * dtype.itemsize)


def _tensor_accepts(a: Matrix, b: Matrix) -> bool:
    if capability(current_device()) not in tensor.CAPABILITIES:
        return False
    return all(
        tensor.contiguous(x.strides, x.shape[0], x.shape[1], x.dtype.itemsize) is not None
        and (x.dtype.kind != "c" or x.pointer % x.dtype.itemsize == 0)
        for x in (a, b)
    )


def supports(problem: Problem) -> bool:
    """One dtype throughout, m or n up to `WIDEST` and the operand across it contiguous one way."""
    a, b, c = problem.a, problem.b, problem.c
    if problem.capability is None or problem.capability < (8, 0):
        return False
    if as_unsigned(c.dtype) not in DTYPES or not a.dtype == b.dtype == c.dtype:
        return False
    thin_side, long_side = sorted((c.rows, c.columns))
    ordinary = c.dtype in (np.float32, np.complex64) or c.dtype.kind in "iu"
    better_tiled = ordinary and thin_side > SINGLE_COLUMNS and long_side > SHORT_SIDE
    if thin_side > WIDEST or (better_tiled and tiled_supports(replace(problem, precision="full"))):
        return False
    large = b if c.rows < c.columns else a
    # Sides are 32-bit numbers in the kernel, with room for the last, ragged panel.
    sides = max(problem.m, problem.n, problem.k) < 2**31 - 2**16
    aligned = min(a.alignment, b.alignment) >= c.dtype.itemsize
    return sides and aligned and (large.row_major or large.column_major)


def variants() -> Iterable[Variant]:
    """Every dtype at a few widths, both layouts of A and B, with and without whole chunks."""
    yield from matvec.variants()
    for dtype in DTYPES:
        parts = 2 if dtype.kind == "c" else 1
        for n, m in ((1, 10**6), (3, WIDEST), (8, 10**6), (16, WIDEST), (64, 10**6)):
            for along_k in (True, False):
                tile = choose_tile(dtype, m, n, along_k)
                for whole in (True, False):
                    layout = Layout(dtype.name, along_k, whole, n == 8, whole and n >= 16)
                    yield Variant(
                        f"skinny {tile} {layout}",
                        kernel_function(tile, layout),
                        SIGNATURE,
                        options={"launch_bounds": (tile.threads, 1)},
                    )
        if dtype in TENSOR_COLUMNS:
            # Complex tiles are the same for any rows.
            narrow = [tensor_tile(parts, m, n) for m in (WIDEST, 10**6) for n in (16, 32, 64)]
            tiles = dict.fromkeys(narrow + [turned(tile, parts) for tile in narrow])
            for shape, along_k in itertools.product(tiles, (True, False)):
                yield Variant(
                    f"skinny tensor {shape} a_along_k={along_k}",
                    tensor.kernel_function(
                        shape, tensor.Layout(parts, along_k, not along_k, True, True, True, True, dealt=True)
                    ),
                    tensor.SIGNATURE,
                    tensor.NATIVE,
                    {"launch_bounds": (shape.threads, shape.blocks)},
                )


SKINNY = GemmKernel(
    name="skinny",
    summary="m or n up to 64: the large operand streamed once through shared memory, k cut where m is short",
    supports=supports,
    launch=launch,
    recordable=True,
    variants=variants,
)
