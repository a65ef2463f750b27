"""Products of bytes on the int8 tensor cores that every GPU since compute capability 8.0 has: ``mma.sync``.

The sibling of the Hopper kernel (`wgmma`) for planes of bytes: same operands and epilogues, another main loop. Operands
come into a ring of stages in shared memory by asynchronous copies, several stages ahead; fragments come out of it by
``ldmatrix``, one step of k ahead of their use. Lines are stored so that the eight that one ``ldmatrix`` phase reads lie
in eight different groups of banks.

The blocks are persistent, and the copies do not know where a plane or a tile ends: the first stages of the
next one are on their way while the sums of this one are reduced and written.

Sources: the fragment layouts are the PTX ISA's (9.7.14.5, m16n8k32 for 8-bit integers; 9.7.14.5.15,
``ldmatrix``); a ring fed by ``cp.async`` with fragments double-buffered in registers is CUTLASS's
``MmaMultistage``; written anew for Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numba.cuda import types

from tilewright.kernels.gemm.exact.residue_epilogue import residue_epilogue
from tilewright.kernels.gemm.exact.residues import MODULI, PLAN_KIND, PLAN_PLANES, RESIDUES
from tilewright.kernels.gemm.hopper.wgmma import cluster_tile
from tilewright.kernels.gemm.hopper.wgmma_epilogue import sum_store
from tilewright.kernels.numbers import WARP
from tilewright.kernels.ptx import async_copy, memory, warp_mma
from tilewright.kernels.ptx.unroll import unroll

STRIP = 16
"""Rows of one matrix instruction."""
MMA_N = 8
"""Columns of one."""
STEP = 32
"""Bytes of k that one takes."""
CHUNK = 16
"""Bytes of one copy, and of a line that ``ldmatrix`` reads."""
BANK_LINE = 128
"""Bytes in one round through all banks of shared memory."""
MATRIX_LINES = 8
"""Lines that are read at once, each a chunk: they must lie in different places of a bank line."""

ARGUMENTS = (
    types.uint64,  # a: address of the first byte, a multiple of 16
    types.int64,  # a_line: bytes from line to line, a multiple of 16
    types.int64,  # a_plane: bytes from plane to plane, likewise
    types.uint64,  # b
    types.int64,  # b_line
    types.int64,  # b_plane
    types.uint64,  # c
    types.int64,  # row_stride, in elements
    types.int64,  # column_stride
    types.int32,  # m
    types.int32,  # n
    types.int32,  # k: bytes of a line
    types.int32,  # paired
    types.int32,  # accumulate
    types.uint64,  # plan
    types.uint64,  # workspace
)
"""What every variant takes: scalars only, so that one compilation serves all layouts."""

# Inlined before type inference: local arrays that cross a call would live in memory instead of registers.
inlined = cuda.jit(device=True, inline="always")


@dataclass(frozen=True)
class Tile:
    """How one block works."""

    m: int
    n: int
    depth: int
    """Bytes of k in a stage: 64 or 128."""
    warps: tuple[int, int]
    """Warps down and across the block tile."""
    stages: int
    """Stages in shared memory: one being multiplied, the rest being copied."""
    band: int = 16
    """Tiles below each other before the walk moves on in n, so that blocks share lines in L2."""

    @property
    def threads(self) -> int:
        return self.warps[0] * self.warps[1] * WARP

    @property
    def stage_nbytes(self) -> int:
        return (self.m + self.n) * self.depth

    @property
    def shared_nbytes(self) -> int:
        return self.stages * self.stage_nbytes

    @property
    def chunks(self) -> int:
        """Chunks in a line of a stage, copied by neighbouring threads."""
        return self.depth // CHUNK

    @property
    def lines_a_pass(self) -> int:
        """Lines that all threads together copy at once."""
        return self.threads // self.chunks

    @property
    def warp_m(self) -> int:
        return self.m // self.warps[0]

    @property
    def warp_n(self) -> int:
        return self.n // self.warps[1]

    @property
    def bank_lines(self) -> int:
        """Lines in a bank line. Chunk c of line l is stored at c XOR (l / bank_lines mod chunks): the same chunk
        of eight lines below each other then fills a bank line."""
        return BANK_LINE // self.depth

    def check(self) -> None:
        """A tile that breaks these is a mistake in the table below, not a user's."""
        assert self.depth in (64, 128), f"{self}: the swizzle knows lines of 64 and 128 bytes"
        assert self.m % self.lines_a_pass == self.n % self.lines_a_pass == 0, f"{self}: every pass is full"
        assert self.lines_a_pass % MATRIX_LINES == 0, f"{self}: the swizzle is the same in every pass"
        assert self.warp_m % STRIP == self.warp_n % 32 == 0, (
            f"{self}: warp tiles are whole strips and quarters"
        )


SMALL_SHARED = Tile(m=128, n=256, depth=64, warps=(2, 4), stages=4)
"""96 KiB of shared memory: every GPU since 8.0 gives a block 99 KiB."""
LARGE_SHARED = Tile(m=128, n=256, depth=128, warps=(2, 4), stages=3)
"""144 KiB: half the barriers, for the GPUs that give a block 163 KiB (8.0, 8.7)."""
LARGEST_SHARED = Tile(m=128, n=256, depth=128, warps=(2, 4), stages=4)
"""192 KiB: one stage more being copied, for the GPUs that give a block 227 KiB (9.0, 10.0)."""


@dataclass(frozen=True)
class Config:
    """One compiled variant. ``kind_a`` and ``kind_b`` are ``s8`` or ``u8``; C's type is ``c_type``."""

    kind_a: str
    kind_b: str
    c_type: Any
    """Numba scalar type of C's elements."""
    plan_kind: int = -1
    """If not negative: read the plan first, and return unless its kind is this."""
    tile: Tile = SMALL_SHARED


def _copier(tile: Tile) -> Any:
    """A device function that starts copying a stage.

    ``copy(target, a_from, a_step, a_left, b_from, b_step, b_left, k_left)``: the thread's first chunk of A goes to
    the shared address ``target``, its next ones ``lines_a_pass`` lines on, where they lie ``a_step`` bytes on in
    memory; likewise B's, after A's tile. From the thread's first line on the operands have ``a_left`` and ``b_left``
    lines, from its chunk on ``k_left`` bytes of each; what lies outside becomes zero, which adds nothing to any sum. Of
    B only whole chunks are cut off, since the bytes beyond A's end are zeros already.
    """
    passes_a, passes_b = tile.m // tile.lines_a_pass, tile.n // tile.lines_a_pass
    lines_a_pass, pass_nbytes = tile.lines_a_pass, tile.lines_a_pass * tile.depth
    a_nbytes = tile.m * tile.depth
    i32, u32, u64 = types.int32, types.uint32, types.uint64

    @inlined
    def copy(target, a_from, a_step, a_left, b_from, b_step, b_left, k_left):  # type: ignore[no-untyped-def]
        part = k_left if k_left < i32(CHUNK) else i32(CHUNK)
        part = part if part > i32(0) else i32(0)
        lines = b_left if k_left > i32(0) else i32(0)
        for i in range(passes_a):
            nbytes = part if i32(i * lines_a_pass) < a_left else i32(0)
            async_copy.copy_async_part(u32(target + u32(i * pass_nbytes)), u64(a_from + i * a_step), nbytes)
        for i in range(passes_b):
            nbytes = i32(CHUNK) if i32(i * lines_a_pass) < lines else i32(0)
            async_copy.copy_async_part(
                u32(target + u32(a_nbytes + i * pass_nbytes)), u64(b_from + i * b_step), nbytes
            )

    return copy


def _loader(tile: Tile, tiles_m: int, tiles_n: int, s: int) -> Any:
    """A device function that loads a warp's fragments of step ``s`` of a stage.

    ``load(a, b, at_a, at_b)``: from the addresses of the lane's first line, at step 0, to the set of registers that
    step ``s`` uses, in the order of `warp_mma.mma_bytes`.
    """
    first_a, first_b = s % 2 * 4 * tiles_m, s % 2 * 2 * tiles_n
    offset, strip_nbytes, pairs = s * STEP, STRIP * tile.depth, tiles_n // 2
    u32 = types.uint32

    @inlined
    def load(a, b, at_a, at_b):  # type: ignore[no-untyped-def]
        # Steps differ in the chunk, which the swizzle combines by XOR; strips in the line, which it does not.
        from_a, from_b = u32(at_a ^ u32(offset)), u32(at_b ^ u32(offset))
        for i in range(tiles_m):
            warp_mma.load_matrices(a, first_a + 4 * i, u32(from_a + u32(i * strip_nbytes)))
        for j in range(pairs):
            warp_mma.load_matrices(b, first_b + 4 * j, u32(from_b + u32(j * strip_nbytes)))

    return load


def _steps(load_next: list[Any], multiply: Any, tiles_m: int, tiles_n: int) -> Any:
    """A device function that takes all steps of a stage but the first and last: a loop unrolled by hand, since register
    arrays need constant indices."""
    if not load_next:

        @inlined
        def nothing(sums, a, b, at_a, at_b):  # type: ignore[no-untyped-def]
            pass

        return nothing
    load, s = load_next[-1], len(load_next)
    earlier = _steps(load_next[:-1], multiply, tiles_m, tiles_n)
    use_a, use_b = s % 2 * 4 * tiles_m, s % 2 * 2 * tiles_n

    @inlined
    def run(sums, a, b, at_a, at_b):  # type: ignore[no-untyped-def]
        earlier(sums, a, b, at_a, at_b)
        load(a, b, at_a, at_b)
        multiply(sums, a, use_a, b, use_b)

    return run


def _strips(store: Any, tiles_m: int, strip_sums: int) -> Any:
    """``store`` for every strip of a warp tile, unrolled for the same reason."""
    if tiles_m == 0:

        @inlined
        def nothing(  # type: ignore[no-untyped-def]
            sums, out, row, column, row_stride, column_stride, m, n, paired, accumulate, workspace
        ):
            pass

        return nothing
    earlier, base, down = (
        _strips(store, tiles_m - 1, strip_sums),
        (tiles_m - 1) * strip_sums,
        (tiles_m - 1) * STRIP,
    )

    @inlined
    def store_strips(  # type: ignore[no-untyped-def]
        sums, out, row, column, row_stride, column_stride, m, n, paired, accumulate, workspace
    ):
        earlier(sums, out, row, column, row_stride, column_stride, m, n, paired, accumulate, workspace)
        store(
            sums,
            base,
            out,
            row + down,
            column,
            row_stride,
            column_stride,
            m,
            n,
            paired,
            accumulate,
            workspace,
        )

    return store_strips


def _walk(tile: Tile) -> tuple[Any, Any]:
    """Device functions for the walk of the copies over tiles, planes and stages.

    ``corner(index, ...)``: where the thread's first chunks of tile ``index`` of the walk lie, A's and B's, and how
    many lines the operands have from there on. ``advance(..., work)``: what these, the bytes of k left, and the numbers
    of stage, plane and tile become after a stage; ``work`` is what never changes. After the last tile no bytes are
    left.
    """
    tile_m, tile_n, depth, band = tile.m, tile.n, tile.depth, tile.band
    i32, i64 = types.int32, types.int64

    @inlined
    def corner(index, tiles_down, tiles_across, a, a_line, b, b_line, m, n, line, chunk):  # type: ignore[no-untyped-def]
        tile_row, tile_column = cluster_tile(index, tiles_down, tiles_across, band)
        row, column = i32(tile_row * tile_m + line), i32(tile_column * tile_n + line)
        a_from = i64(a) + i64(row) * a_line + i64(chunk * CHUNK)
        b_from = i64(b) + i64(column) * b_line + i64(chunk * CHUNK)
        return a_from, b_from, i32(m - row), i32(n - column)

    @inlined
    def advance(a_from, b_from, a_left, b_left, k_left, stage, plane, index, work):  # type: ignore[no-untyped-def]
        k_steps, planes, tiles, tile_stride, tiles_down, tiles_across = work[0]
        a, a_line, a_plane, b, b_line, b_plane, m, n, k, line, chunk = work[1]
        a_from = i64(a_from + depth)
        b_from = i64(b_from + depth)
        k_left = i32(k_left - depth)
        stage = i32(stage + 1)
        if stage == k_steps:
            stage = i32(0)
            plane = i32(plane + 1)
            k_left = i32(k - chunk * CHUNK)
            a_from = i64(a_from + a_plane - i64(k_steps) * depth)
            b_from = i64(b_from + b_plane - i64(k_steps) * depth)
            if plane == planes:
                plane = i32(0)
                index = i32(index + tile_stride)
                if index < tiles:
                    a_from, b_from, a_left, b_left = corner(
                        index, tiles_down, tiles_across, a, a_line, b, b_line, m, n, line, chunk
                    )
                else:
                    a_left = b_left = i32(0)
        return a_from, b_from, a_left, b_left, k_left, stage, plane, index

    return corner, advance


def kernel_function(config: Config) -> Callable[..., Any]:
    """The kernel of ``config`` as a function of ``ARGUMENTS``, for ``cuda.jit`` or ``cuda.compile_ptx``.

    A is m lines and B n lines of k bytes, one plane or several; only those bytes of a line are read. C is m ×
    n with the given strides; every element is written (added to when ``accumulate``), unless the plan says
    that the work is another kernel's. Ragged sides come in as zeros and are not written. ``paired``: C is
    row-major and two neighbouring elements can be written at once. ``workspace``: for residues, a byte for
    every modulus and every element of a tile, for each block.

    Grid: at most as many blocks as tiles, one a multiprocessor. Block: ``tile.threads``. Shared memory
    (dynamic): ``tile.shared_nbytes``. Registers, of 255: m n / threads sums, two sets of fragments (half as
    many for warp tiles of 64 × 64), no spills.
    """
    tile = config.tile
    tile.check()
    tile_m, tile_n, depth, stages, band = tile.m, tile.n, tile.depth, tile.stages, tile.band
    warps_n, warp_m, warp_n = tile.warps[1], tile.warp_m, tile.warp_n
    tiles_m, tiles_n, steps = warp_m // STRIP, warp_n // MMA_N, depth // STEP
    strip_sums, registers = 4 * tiles_n, 4 * tiles_n * tiles_m
    registers_a, registers_b = 2 * 4 * tiles_m, 2 * 2 * tiles_n
    use_a, use_b = (steps - 1) % 2 * 4 * tiles_m, (steps - 1) % 2 * 2 * tiles_n
    chunks, lines_a_pass, bank_lines = tile.chunks, tile.lines_a_pass, tile.bank_lines
    a_nbytes, stage_nbytes, ring_nbytes = tile_m * depth, tile.stage_nbytes, tile.shared_nbytes
    pending = stages - 2
    config_kind = config.plan_kind
    guarded, residues = config_kind >= 0, config_kind == RESIDUES
    kept_words = len(MODULI) * tile_m * tile_n // 4
    c_type = config.c_type

    copy = _copier(tile)
    corner, advance = _walk(tile)
    multiply = warp_mma.mma_bytes(config.kind_a, config.kind_b, tiles_m, tiles_n)
    loaders = [_loader(tile, tiles_m, tiles_n, s) for s in range(steps)]
    load_first, load_second = loaders[0], loaders[1]
    middle_steps = _steps(loaders[2:], multiply, tiles_m, tiles_n)
    store = _strips(sum_store(warp_n, (c_type, c_type, c_type)), tiles_m, strip_sums)
    keep_residues, add_residues = residue_epilogue(tile.threads, warp_n, tiles_m, c_type)
    i32, i64, u32 = types.int32, types.int64, types.uint32

    @inlined
    def clear(i, sums):  # type: ignore[no-untyped-def]
        sums[i] = i32(0)

    def kernel(  # type: ignore[no-untyped-def]
        a,
        a_line,
        a_plane,
        b,
        b_line,
        b_plane,
        c,
        row_stride,
        column_stride,
        m,
        n,
        k,
        paired,
        accumulate,
        plan,
        workspace,
    ):
        planes = i32(1)
        if guarded:
            settings = memory.global_array(plan, i64)
            if settings[PLAN_KIND] != config_kind:
                return
            planes = i32(settings[PLAN_PLANES])
        ring = memory.shared_address(cuda.shared.array(0, types.uint8, alignment=BANK_LINE))
        sums = cuda.local.array(registers, i32)
        a_regs = cuda.local.array(registers_a, u32)
        b_regs = cuda.local.array(registers_b, u32)
        out = memory.global_array(c, c_type)
        kept = memory.global_array(workspace, u32)

        # Narrowed, here and below: Numba widens to 64 bits what meets a constant, and registers are scarce.
        thread = i32(cuda.threadIdx.x)
        lane, warp = i32(thread % WARP), i32(thread // WARP)
        warp_row, warp_column = i32(warp // warps_n * warp_m), i32(warp % warps_n * warp_n)

        # Where this thread's first chunk goes in a stage, and where its lane's first lines of fragments lie. The
        # four matrices of a load are eight lines and one chunk each: of A first the other lines, then the other
        # chunk; of B first the other chunk.
        line, chunk = i32(thread // chunks), i32(thread % chunks)
        put = u32(ring + u32(line * depth + CHUNK * (chunk ^ (line // bank_lines % chunks))))
        line_a, half_a = i32(lane % 16), i32(lane // 16)
        line_b, half_b = i32(lane % 8 + lane // 16 * 8), i32(lane // 8 % 2)
        get_a = (warp_row + line_a) * depth + CHUNK * (half_a ^ (line_a // bank_lines % chunks))
        get_b = (warp_column + line_b) * depth + CHUNK * (half_b ^ (line_b // bank_lines % chunks))
        get_a, get_b = u32(ring + u32(get_a)), u32(ring + u32(a_nbytes + get_b))

        tiles_down, tiles_across = i32((m + tile_m - 1) // tile_m), i32((n + tile_n - 1) // tile_n)
        tiles, tile_stride = i32(tiles_down * tiles_across), i32(cuda.gridDim.x)
        k_steps = i32((k + depth - 1) // depth)
        a_step, b_step = i64(a_line * lines_a_pass), i64(b_line * lines_a_pass)

        # What is to be copied next.
        index, plane_filled, stage_filled = i32(cuda.blockIdx.x), i32(0), i32(0)
        a_from, b_from, a_left, b_left = corner(
            index, tiles_down, tiles_across, a, a_line, b, b_line, m, n, line, chunk
        )
        k_left = i32(k - chunk * CHUNK)
        counts = k_steps, planes, tiles, tile_stride, tiles_down, tiles_across
        work = counts, (a, a_line, a_plane, b, b_line, b_plane, m, n, k, line, chunk)

        # Fill all stages but one. After the last tile stages are filled with zeros, so that the count of groups under
        # way never depends on the sides.
        for stage in range(stages - 1):
            target = u32(put + u32(stage * stage_nbytes))
            copy(target, a_from, a_step, a_left, b_from, b_step, b_left, k_left)
            async_copy.commit_copies()
            a_from, b_from, a_left, b_left, k_left, stage_filled, plane_filled, index = advance(
                a_from, b_from, a_left, b_left, k_left, stage_filled, plane_filled, index, work
            )
        reading, writing = u32(0), u32((stages - 1) * stage_nbytes)
        async_copy.wait_copies(pending)
        cuda.syncthreads()  # the first stage has arrived for every thread
        load_first(a_regs, b_regs, get_a, get_b)

        for tile_index in range(i32(cuda.blockIdx.x), tiles, tile_stride):
            for plane in range(planes):
                unroll(clear, registers, (sums,))
                for _ in range(k_steps):
                    at_a, at_b = u32(get_a + reading), u32(get_b + reading)
                    load_second(a_regs, b_regs, at_a, at_b)
                    # Into the stage that was multiplied last: the last barrier ensures that every thread has read it.
                    target = u32(put + writing)
                    copy(target, a_from, a_step, a_left, b_from, b_step, b_left, k_left)
                    async_copy.commit_copies()
                    multiply(sums, a_regs, 0, b_regs, 0)
                    a_from, b_from, a_left, b_left, k_left, stage_filled, plane_filled, index = advance(
                        a_from, b_from, a_left, b_left, k_left, stage_filled, plane_filled, index, work
                    )
                    middle_steps(sums, a_regs, b_regs, at_a, at_b)
                    writing = reading
                    reading = u32(reading + u32(stage_nbytes))
                    if reading == u32(ring_nbytes):
                        reading = u32(0)
                    async_copy.wait_copies(pending)
                    # The next stage has arrived for every thread, and every thread has read this one (its last step is
                    # in registers), which the next round overwrites.
                    cuda.syncthreads()
                    load_first(a_regs, b_regs, u32(get_a + reading), u32(get_b + reading))
                    multiply(sums, a_regs, use_a, b_regs, use_b)
                if residues:
                    keep_residues(sums, plane, planes, kept, cuda.blockIdx.x * kept_words + 4 * thread)
            tile_row, tile_column = cluster_tile(tile_index, tiles_down, tiles_across, band)
            row = i64(tile_row * tile_m + warp_row + lane // 4)
            column = i64(tile_column * tile_n + warp_column + 2 * (lane % 4))
            if residues:
                add_residues(
                    planes,
                    kept,
                    cuda.blockIdx.x * kept_words + 4 * thread,
                    out,
                    row * row_stride + column * column_stride,
                    row_stride,
                    column_stride,
                    m - row,
                    n - column,
                    accumulate,
                )
            else:
                in_pairs = paired != 0 and (tile_column + 1) * tile_n <= n
                store(
                    sums, out, row, column, row_stride, column_stride, m, n, in_pairs, accumulate, workspace
                )
        async_copy.wait_copies(0)  # no block ends with copies under way

    return kernel
