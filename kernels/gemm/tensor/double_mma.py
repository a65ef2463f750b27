"""float64 and complex128 on the float64 tensor cores: warp tiles of ``mma.sync`` fed by ``cp.async``.

The floor is arithmetic: a multiprocessor of an H200 does 128 float64 multiply-adds a clock on its tensor
cores, so a 128 × 128 × 16 step lasts 2048 clocks, in which shared memory could deliver 256 KB and has to
deliver 96. What is left to do is to keep the four tensor cores from ever waiting:

- operands come into shared memory by asynchronous copies, several stages ahead;
- fragments come out of it without bank conflicts, one step of k ahead of their use;
- block tiles are walked in bands that share their rows of A and columns of B in the second-level cache.

complex128 is the same product with twice the k. A complex number lies in memory as two neighbouring float64,
so a row of A is a real row a' = (re, im, re, im, ...), and

    real part of C = a' · (re, -im, re, -im, ...),     imaginary part = a' · (im, re, im, re, ...),

where the vectors on the right are columns of B: A's fragments are read as they lie, B's twice, once with
neighbours exchanged, and a sign bit is flipped in every other lane. That is four real products; the form with
three (Gauss) would save a quarter of the work, but loses the accuracy of the smaller part.

Fragments are read 64 bits at a time. 128 bits would halve the loads, but the instruction wants its registers
in another order than memory has them, and the moves cost more than the loads: shared memory has bandwidth to
spare.

Sources: the fragment layouts are the PTX ISA's; multi-stage ``cp.async`` pipelines with fragments
double-buffered in registers are CUTLASS's (``MmaMultistage``); written anew for Numba.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numba.cuda import libdevice, types

from tilewright.kernels.gpu.compiled import compile_kernel
from tilewright.kernels.numbers import WARP
from tilewright.kernels.ptx import async_copy, memory, warp_mma

MMA_M, MMA_N = 16, 8
"""Rows and columns of one matrix instruction."""
LANE_K = 4
"""Lanes of a warp that share a row of a fragment: the step in k between two registers of one lane."""
HALF_M = 8
"""Rows between the two registers of A, or pairs of C, that one lane holds for the same column."""
CHUNK = 2
"""float64 numbers in 16 bytes, the unit of a copy."""
BANK_LINE = 16
"""float64 numbers in 128 bytes, once through all banks of shared memory."""
ITEM = 8
"""Bytes of a float64."""
SIGN_BIT = -(2**63)

# Inlined before type inference: local arrays that cross a call would live in memory instead of registers.
inlined = cuda.jit(device=True, inline="always")


@dataclass(frozen=True)
class Tile:
    """How one block works. Sides are in elements of C (real or complex), ``depth`` and ``step`` in float64
    of k."""

    m: int
    n: int
    depth: int
    """k in one stage of the pipeline, a complex number counting as two."""
    warps: tuple[int, int]
    """Warps down and across the block tile."""
    step: int
    """k in one fragment, and in one matrix instruction: 4, 8 or 16."""
    stages: int
    """Stages of the pipeline in shared memory: one being multiplied, the one before, the rest being copied."""
    blocks: int = 1
    """Blocks that must fit on one multiprocessor; caps the registers."""
    band: int = 8
    """Rows of block tiles that are walked together, column by column, so that they share B's columns in
    L2."""

    @property
    def threads(self) -> int:
        return self.warps[0] * self.warps[1] * WARP

    def shared_nbytes(self, parts: int) -> int:
        """The stages; at the end the same memory holds the tile of C."""
        return max(self.stages * (self.m + self.n) * self.depth, self.m * self.n * parts) * ITEM


@dataclass(frozen=True)
class Layout:
    """What is decided when the kernel is compiled, besides the tile."""

    parts: int
    """float64 numbers in an element: 1 for float64, 2 for complex128."""
    a_along_k: bool
    """Whether neighbours in A's memory are neighbours in k (A by rows); else along m."""
    b_along_k: bool
    """Whether neighbours in B's memory are neighbours in k (B by columns); else along n."""
    a_whole: bool
    """Whether A comes in 16-byte chunks: address and pitch multiples of 16, contiguous side even."""
    b_whole: bool
    c_whole: bool
    """Whether C is written in 16-byte chunks."""
    native: bool
    """Whether the matrix instructions are those of compute capability 9.0."""
    dealt: bool = False
    """Whether k is dealt out, slab by slab, to the blocks of ``gridDim.y``; else each block takes all of it."""


@dataclass(frozen=True)
class _Side:
    """How one operand's tile lies in shared memory: lines of float64, as the operand has them in memory.

    A line runs along k or along the operand's other side. A fragment load is free of bank conflicts when each
    half of a warp (lanes 16 q to 16 q + 15: four g, with all four t) touches sixteen different places modulo
    16. Place p of line l is therefore stored at p XOR swizzle(l), where:

    - along k, the lines are the four g, each read at four neighbours t: 4 (l mod 4);
    - across k, real, the lines are the four t, each read at four neighbours g: 4 (l mod 4) again;
    - across k, complex, two lines t // 2, each read at eight neighbours (g, t mod 2): 8 (l mod 2).
    """

    extent: int
    depth: int
    parts: int
    along_k: bool
    threads: int

    @property
    def lines(self) -> int:
        return self.extent if self.along_k else self.depth // self.parts

    @property
    def pitch(self) -> int:
        """float64 numbers in a line."""
        return self.depth if self.along_k else self.extent * self.parts

    @property
    def size(self) -> int:
        return self.lines * self.pitch

    @property
    def chunks(self) -> int:
        """Chunks in a line, copied by neighbouring threads."""
        return self.pitch // CHUNK

    @property
    def lines_a_pass(self) -> int:
        """Lines that all threads together copy at once."""
        return self.threads // self.chunks

    @property
    def swizzle(self) -> tuple[int, int]:
        """``(mask, factor)``: swizzle(l) = (l & mask) * factor."""
        return (3, 4) if self.along_k or self.parts == 1 else (1, 8)

    def check(self, tile: Tile) -> None:
        """A tile that breaks these is a mistake in the table below, not a user's."""
        assert self.threads % self.chunks == 0, f"{tile}: a pass copies whole lines"
        assert self.lines % self.lines_a_pass == 0, f"{tile}: every pass is full"
        assert self.pitch % BANK_LINE == 0, f"{tile}: lines begin at the first bank"


def _copier(side: _Side, whole: bool) -> Any:
    """A device function that starts copying one tile from global to shared memory.

    ``copy(shared, base, source, line_step, lines, length)``: the calling thread's first chunk is at address
    ``source``, its next one ``line_step`` bytes on. From the tile's corner on, the operand has ``lines`` lines
    and ``length`` elements of each; what lies outside becomes zero, which adds nothing to any sum. Chunks that
    are not ``whole`` are copied by halves.
    """
    chunks, pitch, parts = side.chunks, side.pitch, side.parts
    lines_a_pass = side.lines_a_pass
    passes = side.lines // lines_a_pass
    mask, factor = side.swizzle
    elements = CHUNK // parts
    second = elements - 1  # which element of a chunk its second half belongs to
    copy_chunk, copy_half = async_copy.copy_async_16_or_zero, async_copy.copy_async_8_or_zero
    i32, u64 = types.int32, types.uint64

    @inlined
    def copy(shared, base, source, line_step, lines, length):  # type: ignore[no-untyped-def]
        thread = cuda.threadIdx.x
        chunk = i32(thread % chunks)
        for i in range(passes):
            line = i32(thread // chunks + i * lines_a_pass)
            target = base + line * pitch + ((chunk * CHUNK) ^ ((line & mask) * factor))
            origin = u64(source + i * line_step)
            if whole:
                copy_chunk(shared, target, origin, line < lines and i32(chunk * elements) < length)
            else:
                copy_half(shared, target, origin, line < lines and i32(chunk * elements) < length)
                inside = line < lines and i32(chunk * elements + second) < length
                copy_half(shared, target + 1, u64(origin + ITEM), inside)

    return copy


def _loader(side: _Side, step: int, halves: int) -> Any:
    """A device function that loads a warp's fragments, of 8 · ``halves`` rows or columns each.

    ``load(registers, first, shared, base, origin, tiles, k, g, t)``: the operand's tile begins at
    ``shared[base]``, the warp's part of it, ``tiles`` fragments, at row or column ``origin``, the step at ``k``.
    Register ``first + (i steps + s) halves + h`` becomes row or column g + 8 h of fragment i at k + t + 4 s: the
    order in which `warp_mma.mma_f64` takes them.
    """
    pitch, parts, along_k = side.pitch, side.parts, side.along_k
    mask, factor = side.swizzle
    steps = step // LANE_K
    height = HALF_M * halves
    u64 = types.uint64  # a signed index would be tested for wrap-around at every access

    @inlined
    def load(registers, first, shared, base, origin, tiles, k, g, t):  # type: ignore[no-untyped-def]
        # Everything that differs between lanes is in ``lane``; the rest becomes the loads' constant offsets. The
        # swizzle and the constants touch the same bits only where they are combined by XOR.
        for s in range(steps):
            inner = k + s * LANE_K
            if along_k:
                lane = base + (origin + g) * pitch + (((g & mask) * factor ^ t) ^ (inner % BANK_LINE))
                constant = inner // BANK_LINE * BANK_LINE
            elif parts == 1:
                lane = base + t * pitch + origin + (((t & mask) * factor) ^ g)
                constant = inner * pitch
            else:
                lane = base + (t >> 1) * pitch + 2 * origin + (((t >> 1) * factor) ^ (2 * g + (t & 1)))
                constant = (inner >> 1) * pitch
            for i in range(tiles):
                for h in range(halves):
                    line = i * height + h * HALF_M
                    if along_k:
                        place = lane + (constant + line * pitch)
                    elif parts == 1:
                        # The swizzle reaches up to bit 3, so that bit of the line is combined by XOR too.
                        place = (lane ^ (line & HALF_M)) + (constant + (line & ~HALF_M))
                    else:
                        place = lane + (constant + 2 * line)
                    registers[first + (i * steps + s) * halves + h] = shared[u64(place)]

    return load


def _real_product(mma: Any, tiles_m: int, tiles_n: int, steps: int) -> Any:
    """A device function that multiplies one step's fragments: ``multiply(c, a, first_a, b, first_b, t)``."""

    @inlined
    def multiply(c, a, first_a, b, first_b, t):  # type: ignore[no-untyped-def]
        for i in range(tiles_m):
            for j in range(tiles_n):
                mma(c, (i * tiles_n + j) * 4, a, first_a + i * steps * 2, b, first_b + j * steps)

    return multiply


def _complex_product(mma: Any, tiles_m: int, tiles_n: int, steps: int) -> Any:
    """The same for complex128. The second half of ``b`` has neighbours exchanged, that of ``c`` is imaginary."""
    imaginary = tiles_m * tiles_n * 4
    size = tiles_n * steps

    @inlined
    def multiply(c, a, first_a, b, first_b, t):  # type: ignore[no-untyped-def]
        # Odd lanes hold imaginary parts, which the real part subtracts. Done this late, since the loads have arrived by
        # now.
        flip = types.int64(t & 1) * SIGN_BIT
        for x in range(size):
            bits = libdevice.double_as_longlong(b[first_b + x]) ^ flip
            b[first_b + x] = libdevice.longlong_as_double(bits)
        for i in range(tiles_m):
            for j in range(tiles_n):
                register = (i * tiles_n + j) * 4
                left = first_a + i * steps * 2
                mma(c, register, a, left, b, first_b + j * steps)
                mma(c, imaginary + register, a, left, b, first_b + size + j * steps)

    return multiply


def _sequence(steps: list[Any]) -> Any:
    """A device function that calls the given ones in turn: a loop unrolled by hand, since register arrays need constant
    indices and LLVM does not unroll every long loop."""
    if len(steps) == 1:
        return steps[0]
    head, tail = steps[0], _sequence(steps[1:])

    @inlined
    def run(  # type: ignore[no-untyped-def]
        acc, a_regs, b_regs, shared, reading, warp_row, warp_column, g, t
    ):
        head(acc, a_regs, b_regs, shared, reading, warp_row, warp_column, g, t)
        tail(acc, a_regs, b_regs, shared, reading, warp_row, warp_column, g, t)

    return run


def kernel_function(tile: Tile, layout: Layout) -> Any:
    """The kernel as a plain function, for `cuda.jit`, `cuda.compile_ptx` and the tests that assemble it.

    ``c (+)= a b``: a is m × k, b k × n, c m × n with contiguous rows. Addresses are in bytes; the pitches of a, b and c
    count float64 numbers from one line to the next, lines being what the `Layout` says they are. Where k is ``dealt``,
    block y of ``gridDim.y`` = s takes the slabs y, y + s, y + 2 s ... of it, and writes its partial product at c + y ·
    ``c_split`` float64 numbers, for a sum in fixed order afterwards. So all blocks together read neighbouring memory:
    with a range of k for each, and so reads that lie a range apart, they ran at 0.5 to 0.76 of the memory's speed.

    Grid: (tiles of C, s), s = 1 where k is not dealt. Block: ``tile.threads``. Shared memory (dynamic):
    ``tile.shared_nbytes``.
    Registers: accumulators m n parts / threads float64, and two sets of fragments of each operand: of one step of k
    that is multiplied, and of the next. Ragged edges come in as zeros and are not written; k = 0 gives zeros. The order
    of the sums is fixed by the tile and s.
    """
    parts, threads = layout.parts, tile.threads
    side_a = _Side(tile.m, tile.depth, parts, layout.a_along_k, threads)
    side_b = _Side(tile.n, tile.depth, parts, layout.b_along_k, threads)
    warp_m, warp_n = tile.m // tile.warps[0], tile.n // tile.warps[1]
    tiles_m, tiles_n = warp_m // MMA_M, warp_n // MMA_N
    step, depth, stages, band = tile.step, tile.depth, tile.stages, tile.band
    steps, instruction_steps = depth // step, step // LANE_K
    side_a.check(tile)
    side_b.check(tile)
    assert warp_m % MMA_M == warp_n % (2 * MMA_N) == 0, f"{tile}: warp tiles begin where the swizzle does"
    assert steps % 2 == 0, f"{tile}: the two sets of fragments of B alternate within a stage"

    copy_a, copy_b = _copier(side_a, layout.a_whole), _copier(side_b, layout.b_whole)
    load_a, load_b = _loader(side_a, step, 2), _loader(side_b, step, 1)
    mma = warp_mma.mma_f64(step, native=layout.native)
    product = _real_product if parts == 1 else _complex_product
    multiply = product(mma, tiles_m, tiles_n, instruction_steps)
    global_array, commit, wait = memory.global_array, async_copy.commit_copies, async_copy.wait_copies
    load_chunk, store_chunk = memory.load_vector, memory.store_vector

    a_along_k, b_along_k, c_whole = layout.a_along_k, layout.b_along_k, layout.c_whole
    dealt = layout.dealt
    a_chunks, a_lines = side_a.chunks, side_a.lines_a_pass
    b_chunks, b_lines = side_b.chunks, side_b.lines_a_pass
    size_a, size_stage = side_a.size, side_a.size + side_b.size
    ring = stages * size_stage
    depth_elements, chunk_elements = depth // parts, CHUNK // parts
    fragment_a = instruction_steps * 2
    fragments_a = tiles_m * fragment_a
    half_b = tiles_n * instruction_steps
    fragments_b = half_b * parts
    registers_a, registers_b = 2 * fragments_a, 2 * fragments_b
    sums = tiles_m * tiles_n * 4
    total = sums * parts
    tile_m, tile_n, warps_n = tile.m, tile.n, tile.warps[1]
    pending = stages - 2
    out_chunks, out_pitch = tile.n * parts // CHUNK, tile.n * parts
    # Two rows that a quarter of a warp writes at once differ in this bit of their places.
    out_flip = BANK_LINE // 2 if parts == 1 else CHUNK
    f64, i32, i64 = types.float64, types.int32, types.int64

    def step_function(s: int) -> Any:
        """Load the fragments of the next step of k, then multiply those of this one."""
        use_a, fill_a = (x % 2 * fragments_a for x in (s, s + 1))
        use_b, fill_b = (x % 2 * fragments_b for x in (s, s + 1))
        next_k = (s + 1) % steps * step

        @inlined
        def advance(  # type: ignore[no-untyped-def]
            acc, a_regs, b_regs, shared, reading, warp_row, warp_column, g, t
        ):
            load_a(a_regs, fill_a, shared, reading, warp_row, tiles_m, next_k, g, t)
            load_b(b_regs, fill_b, shared, reading + size_a, warp_column, tiles_n, next_k, g, t)
            if parts == 2:
                load_b(
                    b_regs, fill_b + half_b, shared, reading + size_a, warp_column, tiles_n, next_k, g, t ^ 1
                )
            multiply(acc, a_regs, use_a, b_regs, use_b, t)

        return advance

    first_steps, last_step = _sequence([step_function(s) for s in range(steps - 1)]), step_function(steps - 1)

    def kernel(  # type: ignore[no-untyped-def]
        a_address,
        a_pitch,
        b_address,
        b_pitch,
        c_address,
        c_pitch,
        c_split,
        m,
        n,
        k,
        accumulate,
        lower,
    ):
        c = global_array(c_address, f64)
        shared = cuda.shared.array(0, f64, alignment=128)
        acc = cuda.local.array(total, f64)
        a_regs = cuda.local.array(registers_a, f64)
        b_regs = cuda.local.array(registers_b, f64)
        pair = cuda.local.array(2, f64)

        thread = cuda.threadIdx.x
        # Narrowed, here and below: Numba widens to 64 bits what meets a constant, and registers are scarce.
        lane = thread & 31
        g = lane >> 2
        t = lane & 3
        warp = thread >> 5
        warp_row = (warp // warps_n) * warp_m
        warp_column = (warp % warps_n) * warp_n

        across = (n + tile_n - 1) // tile_n
        down = (m + tile_m - 1) // tile_m
        in_band = i32(band * across)
        first_row = (cuda.blockIdx.x // in_band) * band
        within = cuda.blockIdx.x % in_band
        rows = i32(min(band, down - first_row))
        row0 = i32((first_row + within % rows) * tile_m)
        column0 = i32((within // rows) * tile_n)
        if lower and column0 > row0 + (tile_m - 1):
            return  # all of the tile lies above the diagonal
        if dealt:
            turns = i32(cuda.gridDim.y)
            first_k = i32(cuda.blockIdx.y * depth_elements)
        else:
            turns = i32(1)
            first_k = i32(0)
        step_k = i32(depth_elements * turns)
        lead = i32((stages - 1) * step_k)

        # Where this thread's first chunk of each operand lies.
        a_line, a_chunk = thread // a_chunks, thread % a_chunks * CHUNK
        b_line, b_chunk = thread // b_chunks, thread % b_chunks * CHUNK
        if a_along_k:
            a_offset = i64(row0 + a_line) * a_pitch + i64(first_k) * parts + a_chunk
            a_advance = i64(depth * ITEM) * turns
        else:
            a_offset = i64(first_k + a_line) * a_pitch + i64(row0) * parts + a_chunk
            a_advance = step_k * a_pitch * ITEM
        if b_along_k:
            b_offset = i64(column0 + b_line) * b_pitch + i64(first_k) * parts + b_chunk
            b_advance = i64(depth * ITEM) * turns
        else:
            b_offset = i64(first_k + b_line) * b_pitch + i64(column0) * parts + b_chunk
            b_advance = step_k * b_pitch * ITEM
        a_next = i64(a_address) + a_offset * ITEM
        b_next = i64(b_address) + b_offset * ITEM
        left_m, left_n, left_k = i32(m - row0), i32(n - column0), i32(k - first_k)
        a_line_step = a_lines * a_pitch * ITEM
        b_line_step = b_lines * b_pitch * ITEM

        for x in range(total):
            acc[x] = 0.0

        # Fill all stages but one. Stages beyond the end of k are filled with zeros, so that the count of groups
        # under way never depends on k.
        for stage in range(stages - 1):
            if a_along_k:
                copy_a(shared, stage * size_stage, a_next, a_line_step, left_m, left_k)
            else:
                copy_a(shared, stage * size_stage, a_next, a_line_step, left_k, left_m)
            if b_along_k:
                copy_b(shared, stage * size_stage + size_a, b_next, b_line_step, left_n, left_k)
            else:
                copy_b(shared, stage * size_stage + size_a, b_next, b_line_step, left_k, left_n)
            commit()
            a_next += a_advance
            b_next += b_advance
            left_k = i32(left_k - step_k)
        reading = i32(0)
        writing = i32((stages - 1) * size_stage)
        wait(pending)
        cuda.syncthreads()  # the first stage has arrived for every thread
        load_a(a_regs, 0, shared, reading, warp_row, tiles_m, 0, g, t)
        load_b(b_regs, 0, shared, reading + size_a, warp_column, tiles_n, 0, g, t)
        if parts == 2:
            load_b(b_regs, half_b, shared, reading + size_a, warp_column, tiles_n, 0, g, t ^ 1)

        # Copying runs ``lead`` ahead of multiplying; one counter serves both.
        while left_k > -lead:
            # Into the stage that was multiplied last: the last barrier ensures that every thread has read it.
            if a_along_k:
                copy_a(shared, writing, a_next, a_line_step, left_m, left_k)
            else:
                copy_a(shared, writing, a_next, a_line_step, left_k, left_m)
            if b_along_k:
                copy_b(shared, writing + size_a, b_next, b_line_step, left_n, left_k)
            else:
                copy_b(shared, writing + size_a, b_next, b_line_step, left_k, left_n)
            commit()
            a_next += a_advance
            b_next += b_advance
            left_k = i32(left_k - step_k)
            writing = i32(writing + size_stage)
            if writing == ring:
                writing = i32(0)
            first_steps(acc, a_regs, b_regs, shared, reading, warp_row, warp_column, g, t)
            reading = i32(reading + size_stage)
            if reading == ring:
                reading = i32(0)
            wait(pending)
            # The next stage has arrived for every thread, and every thread has read this one (its last step is in
            # registers), which the next round overwrites.
            cuda.syncthreads()
            last_step(acc, a_regs, b_regs, shared, reading, warp_row, warp_column, g, t)

        # The sums go through shared memory, so that whole lines of C are written.
        wait(0)
        cuda.syncthreads()  # every thread has read the last stage, and no copy is under way
        for i in range(tiles_m):
            for h in range(2):
                row = warp_row + i * MMA_M + h * HALF_M + g
                line = row * out_pitch
                flip = (row & 1) * out_flip
                for j in range(tiles_n):
                    register = (i * tiles_n + j) * 4 + 2 * h
                    column = warp_column + j * MMA_N + 2 * t
                    if parts == 1:
                        store_chunk(shared, line + (column ^ flip), acc, register)
                    else:
                        for e in range(2):
                            pair[0] = acc[register + e]
                            pair[1] = acc[sums + register + e]
                            store_chunk(shared, line + ((2 * (column + e)) ^ flip), pair, 0)
        cuda.syncthreads()  # the whole tile of C is in shared memory

        place = (thread % out_chunks) * CHUNK
        left = n - column0 - (thread % out_chunks) * chunk_elements
        inside0 = left > 0
        inside1 = left > chunk_elements - 1
        origin = i64(cuda.blockIdx.y) * c_split + i64(column0) * parts + place
        for row in range(thread // out_chunks, min(tile_m, m - row0), threads // out_chunks):
            load_chunk(pair, 0, shared, row * out_pitch + (place ^ ((row & 1) * out_flip)))
            index = origin + i64(row0 + row) * c_pitch
            if accumulate:
                if inside0:
                    pair[0] += c[index]
                if inside1:
                    pair[1] += c[index + 1]
            if c_whole and inside1:
                store_chunk(c, index, pair, 0)
            else:
                if inside0:
                    c[index] = pair[0]
                if inside1:
                    c[index + 1] = pair[1]

    return kernel


SIGNATURE = types.void(
    *(types.uint64, types.int64) * 3, types.int64, *(types.int32,) * 3, types.boolean, types.boolean
)
"""Address and pitch of A, of B and of C; c_split; m, n, k; accumulate; lower: whether tiles that lie above C's diagonal
as a whole are left out."""


@functools.cache
def compiled(tile: Tile, layout: Layout) -> Any:
    """The kernel, compiled for a GPU by its first launch there."""
    return compile_kernel(
        kernel_function(tile, layout),
        SIGNATURE,
        launch_bounds=(tile.threads, tile.blocks),
        shared_nbytes=tile.shared_nbytes(layout.parts),
    )
