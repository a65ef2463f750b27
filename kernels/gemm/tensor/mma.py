"""Products on the tensor cores that every GPU since compute capability 8.0 has: ``mma.sync``, of bytes and of floats.

The sibling of the Hopper kernel (`wgmma`) for lines that lie with k contiguous: same operands and epilogues, another
main loop. A line is bytes to it: the 32 of a step are 32 integers, 16 halves or 8 TF32 numbers to the tensor cores.
Floats may also lie with the other side contiguous: fragments of 16-bit ones are turned on the way out of shared memory,
those of TF32 are read number by number.

Operands come into a ring of stages in shared memory by asynchronous copies, several stages ahead; fragments come out of
it by ``ldmatrix``, one step of k ahead of their use. Lines are stored so that the eight that one ``ldmatrix`` phase
reads lie in eight different groups of banks.

The blocks are persistent, and the copies do not know where a plane or a tile ends: the first stages of the
next one are on their way while the sums of this one are reduced and written.

Sources: the fragment layouts are the PTX ISA's (9.7.14.5, m16n8k32 for 8-bit integers, m16n8k16 and m16n8k8 for
floats; 9.7.14.5.15, ``ldmatrix``); a ring fed by ``cp.async`` with fragments double-buffered in registers is CUTLASS's
``MmaMultistage``; written anew for Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numba.cuda import types

from tilewright.kernels.gemm.exact.residue_epilogue import residue_epilogue
from tilewright.kernels.gemm.exact.residues import (
    ANY_SINGLE,
    MODULI,
    PLAN_KIND,
    PLAN_PLANES,
    RESIDUES,
    SINGLE_KINDS,
)
from tilewright.kernels.gemm.exact.scaled_epilogue import OWN_WORDS, least_report, scaled_epilogue
from tilewright.kernels.gemm.hopper.wgmma import cluster_tile
from tilewright.kernels.gemm.hopper.wgmma_epilogue import conversions, sum_store
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
HALF_NBYTES, SINGLE_NBYTES = 2, 4
"""Of the elements that ``ldmatrix`` can turn, and of those that are read one by one instead."""
SINGLE_LINES = 4
"""Lines that such reads touch at once, in each eight numbers: two chunks."""
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


SPLIT_SHARED = Tile(m=128, n=128, depth=128, warps=(2, 4), stages=3)
"""96 KiB, and half as many sums a thread: those of a stage and their totals are both in registers."""
SMALL_SHARED = Tile(m=128, n=256, depth=64, warps=(2, 4), stages=4)
"""96 KiB of shared memory: every GPU since 8.0 gives a block 99 KiB."""
LARGE_SHARED = Tile(m=128, n=256, depth=128, warps=(2, 4), stages=3)
"""144 KiB: half the barriers, for the GPUs that give a block 163 KiB (8.0, 8.7)."""
LARGEST_SHARED = Tile(m=128, n=256, depth=128, warps=(2, 4), stages=4)
"""192 KiB: one stage more being copied, for the GPUs that give a block 227 KiB (9.0, 10.0)."""


@dataclass(frozen=True)
class Config:
    """One compiled variant. ``kind_a`` and ``kind_b`` are PTX operand types; C's type is ``c_type``."""

    kind_a: str
    kind_b: str
    c_type: Any
    """Numba scalar type of C's elements."""
    plan_kind: int = -1
    """If not negative: read the plan first, and return unless its kind is this; with `residues.ANY_SINGLE` it is one of
    `residues.SINGLE_KINDS`, which then says what bytes are, whatever ``kind_a`` and ``kind_b`` do."""
    tile: Tile = SMALL_SHARED
    bfloat16_c: bool = False
    """C holds bfloat16, and ``c_type`` is uint16."""
    m_major_a: bool = False
    """A lies in memory with m, not k, contiguous (floats only)."""
    n_major_b: bool = False
    promoted: bool = False
    """The tensor cores' sums of a stage, which they truncate, are added up in ordinary float32, which rounds."""
    parts: tuple[tuple[int, int], ...] = ()
    """Planes of A and of B, of at most four each, whose products are added up, in this order. Without any, sums are of
    one plane, or of each in its turn."""
    flagged_only: bool = False
    """Write only the rows and columns of C that the flags at ``workspace`` name."""
    least: bool = False
    """Of C only the least element is wanted, in the plan (int32 sums)."""

    @property
    def integer(self) -> bool:
        return self.kind_a in ("s8", "u8")

    @property
    def element_nbytes(self) -> int:
        """Of the elements of operands that lie turned."""
        return SINGLE_NBYTES if self.kind_a == "tf32" else HALF_NBYTES


@dataclass(frozen=True)
class _Side:
    """How one operand comes in: lines of k bytes, or of elements of its outer side, one for each k."""

    tile: Tile
    outer: int
    """Its side of the block tile."""
    turned: bool
    """Whether its outer side is contiguous."""
    whole: bool
    """Whether chunks that k ends in are copied whole."""
    element_nbytes: int = HALF_NBYTES
    """Of those that lie turned."""

    @property
    def chunks(self) -> int:
        """Chunks in a line of a stage, copied by neighbouring threads."""
        return self.outer * self.element_nbytes // CHUNK if self.turned else self.tile.chunks

    @property
    def line_nbytes(self) -> int:
        return self.chunks * CHUNK

    @property
    def lines(self) -> int:
        """Lines in a stage."""
        return self.deep if self.turned else self.outer

    @property
    def deep(self) -> int:
        """A stage's part of k: in bytes, or in lines of what lies turned."""
        return self.tile.depth // self.element_nbytes if self.turned else self.tile.depth

    @property
    def by_words(self) -> bool:
        """Whether fragments are read number by number."""
        return self.turned and self.element_nbytes == SINGLE_NBYTES

    @property
    def lines_a_pass(self) -> int:
        return self.tile.threads // self.chunks

    @property
    def passes(self) -> int:
        return self.lines // self.lines_a_pass

    @property
    def swizzle(self) -> tuple[int, int, int]:
        """Chunk c of line l is stored at c XOR the third times (l / the first, mod the second)."""
        if self.by_words:
            return 1, SINGLE_LINES, MATRIX_LINES // SINGLE_LINES
        return (1, MATRIX_LINES, 1) if self.turned else (self.tile.bank_lines, self.tile.chunks, 1)

    def check(self) -> None:
        period = self.swizzle[0] * self.swizzle[1]
        assert self.lines % self.lines_a_pass == 0, f"{self}: every pass is full"
        assert self.lines_a_pass % period == 0, f"{self}: the swizzle is the same in every pass"


def _copier(side: _Side) -> Any:
    """A device function that starts copying an operand's part of a stage.

    ``copy(target, source, step, left, k_left)``: the thread's first chunk goes to the shared address ``target``, its
    next ones ``lines_a_pass`` lines on, where they lie ``step`` bytes on in memory. From the thread's first line on the
    operand has ``left`` lines, from its chunk on ``k_left`` bytes of each; of one that lies turned, ``k_left`` lines
    and ``left`` bytes. What lies outside becomes zero, which adds nothing to any sum. ``whole``: only whole chunks are
    cut off, where the bytes beyond the other operand's end are zeros, and these are integers.
    """
    passes, lines_a_pass, pass_nbytes = side.passes, side.lines_a_pass, side.lines_a_pass * side.line_nbytes
    turned, whole = side.turned, side.whole
    i32, u32, u64 = types.int32, types.uint32, types.uint64

    @inlined
    def copy(target, source, step, left, k_left):  # type: ignore[no-untyped-def]
        inside, lines = (left, k_left) if turned else (k_left, left)
        if whole:
            part = i32(CHUNK) if inside > i32(0) else i32(0)
        else:
            part = inside if inside < i32(CHUNK) else i32(CHUNK)
            part = part if part > i32(0) else i32(0)
        for i in range(passes):
            nbytes = part if i32(i * lines_a_pass) < lines else i32(0)
            async_copy.copy_async_part(u32(target + u32(i * pass_nbytes)), u64(source + i * step), nbytes)

    return copy


def _fragments(side: _Side, count: int, each: int, s: int, *, left: bool) -> Any:
    """A device function that loads an operand's fragments of step ``s`` of a stage: ``load(registers, at)``, from the
    address of the lane's first line at step 0, ``count`` times four registers, of 16 rows or columns each. left: of
    A."""
    if side.by_words:
        return _word_fragments(side, count, each, s, left=left)
    first = s % 2 * each
    turned, line_nbytes = side.turned, side.line_nbytes
    u32 = types.uint32

    @inlined
    def load(registers, at):  # type: ignore[no-untyped-def]
        if turned:
            # Steps differ in the lines, 16 of them; what lies side by side in the chunk, combined by XOR.
            start = u32(at + u32(s * (STEP // HALF_NBYTES) * line_nbytes))
            for i in range(count):
                warp_mma.load_turned(registers, first + 4 * i, u32(start ^ u32(2 * CHUNK * i)))
        else:
            # Steps differ in the chunk, which the swizzle combines by XOR; strips in the line, which it does not.
            start = u32(at ^ u32(s * STEP))
            for i in range(count):
                warp_mma.load_matrices(registers, first + 4 * i, u32(start + u32(STRIP * i * line_nbytes)))

    return load


def _word_fragments(side: _Side, count: int, each: int, s: int, *, left: bool) -> Any:
    """The same of numbers of 32 bits that lie turned. A lane reads one of a line, of rows or columns that lie eight
    apart: the eight that lanes read of each of four lines are in banks of their own."""
    first, line_nbytes, eights = s % 2 * each, side.line_nbytes, 2 * count
    lines = STEP // SINGLE_NBYTES
    # Eight numbers are two chunks. Four times eight fill a bank line, within which the swizzle combines by XOR.
    aside = BANK_LINE // SINGLE_LINES
    u32 = types.uint32

    @inlined
    def load(registers, at):  # type: ignore[no-untyped-def]
        for half in range(2):
            start = u32(at + u32((s * lines + half * SINGLE_LINES) * line_nbytes))
            for i in range(eights):
                place = u32(u32(start ^ u32(i % SINGLE_LINES * aside)) + u32(i // SINGLE_LINES * BANK_LINE))
                register = 4 * (i // 2) + 2 * half + i % 2 if left else 2 * i + half
                registers[first + register] = memory.load_shared_word(place)

    return load


def _loader(side_a: _Side, side_b: _Side, tiles_m: int, tiles_n: int, s: int) -> Any:
    """A device function that loads a warp's fragments of step ``s`` of a stage.

    ``load(a, b, at_a, at_b)``: from the addresses of the lane's first line, at step 0, to the set of registers that
    step ``s`` uses, in the order of `warp_mma.mma_lines`.
    """
    load_a = _fragments(side_a, tiles_m, 4 * tiles_m, s, left=True)
    load_b = _fragments(side_b, tiles_n // 2, 2 * tiles_n, s, left=False)

    @inlined
    def load(a, b, at_a, at_b):  # type: ignore[no-untyped-def]
        load_a(a, at_a)
        load_b(b, at_b)

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


def _corner(side: _Side) -> Any:
    """``corner(first, base, line_nbytes, extent, line, chunk)``: where the thread's first chunk of a tile lies that
    begins at row or column ``first`` of ``extent``, and how many lines (turned: bytes) are left from there on."""
    turned, size = side.turned, side.element_nbytes
    i32, i64 = types.int32, types.int64

    @inlined
    def corner(first, base, line_nbytes, extent, line, chunk):  # type: ignore[no-untyped-def]
        if turned:
            at = i64(base) + i64(line) * line_nbytes + i64(first) * size + i64(chunk * CHUNK)
            return at, i32((extent - first) * size - chunk * CHUNK)
        return i64(base) + i64(first + line) * line_nbytes + i64(chunk * CHUNK), i32(extent - first - line)

    return corner


def _plane_number(numbers: list[int]) -> Any:
    """``number(place)``: which plane comes at this place of the order; without one, planes come as they lie."""
    table = sum(number << 2 * place for place, number in enumerate(numbers))
    listed = bool(numbers)
    i32 = types.int32

    @inlined
    def number(place):  # type: ignore[no-untyped-def]
        return i32(table >> i32(2 * place) & 3) if listed else i32(place)

    return number


def _walk(config: Config, side_a: _Side, side_b: _Side) -> tuple[Any, Any]:
    """Device functions for the walk of the copies over tiles, planes and stages.

    ``corner(index, ...)``: where the thread's first chunks of tile ``index`` of the walk lie, A's and B's, and how
    many lines (turned: bytes) the operands have from there on. ``advance(..., work)``: what these, what is left of k,
    and the numbers of stage, plane and tile become after a stage; ``work`` is what never changes. After the last tile
    nothing is left.
    """
    tile = config.tile
    tile_m, tile_n, band = tile.m, tile.n, tile.band
    corner_a, corner_b = _corner(side_a), _corner(side_b)
    plane_a, plane_b = (_plane_number([part[side] for part in config.parts]) for side in range(2))
    deep_a, deep_b = side_a.deep, side_b.deep
    turned_a, turned_b = side_a.turned, side_b.turned
    i32, i64 = types.int32, types.int64

    @inlined
    def corner(index, tiles_down, tiles_across, a, b):  # type: ignore[no-untyped-def]
        tile_row, tile_column = cluster_tile(index, tiles_down, tiles_across, band)
        a_from, a_left = corner_a(i32(tile_row * tile_m), a[0], a[1], a[3], a[4], a[5])
        b_from, b_left = corner_b(i32(tile_column * tile_n), b[0], b[1], b[3], b[4], b[5])
        a_from, b_from = i64(a_from + plane_a(0) * a[2]), i64(b_from + plane_b(0) * b[2])
        return a_from, b_from, a_left, b_left

    @inlined
    def advance(  # type: ignore[no-untyped-def]
        a_from, b_from, a_left, b_left, a_k_left, b_k_left, stage, plane, index, work
    ):
        k_steps, planes, tiles, tile_stride, tiles_down, tiles_across = work[0]
        a, b = work[1], work[2]
        a_step = i64(a[1] * deep_a) if turned_a else i64(deep_a)
        b_step = i64(b[1] * deep_b) if turned_b else i64(deep_b)
        a_from = i64(a_from + a_step)
        b_from = i64(b_from + b_step)
        a_k_left = i32(a_k_left - deep_a)
        b_k_left = i32(b_k_left - deep_b)
        stage = i32(stage + 1)
        if stage == k_steps:
            stage = i32(0)
            a_k_left, b_k_left = i32(a[6]), i32(b[6])
            a_from = i64(a_from + (plane_a(plane + 1) - plane_a(plane)) * a[2] - i64(k_steps) * a_step)
            b_from = i64(b_from + (plane_b(plane + 1) - plane_b(plane)) * b[2] - i64(k_steps) * b_step)
            plane = i32(plane + 1)
            if plane == planes:
                plane = i32(0)
                index = i32(index + tile_stride)
                if index < tiles:
                    a_from, b_from, a_left, b_left = corner(index, tiles_down, tiles_across, a, b)
                else:
                    a_left = b_left = i32(0)
        return a_from, b_from, a_left, b_left, a_k_left, b_k_left, stage, plane, index

    return corner, advance


def kernel_function(config: Config) -> Callable[..., Any]:
    """The kernel of ``config`` as a function of ``ARGUMENTS``, for ``cuda.jit`` or ``cuda.compile_ptx``.

    A is m lines and B n lines of k bytes, one plane or several; only those bytes of a line are used. ``m_major_a``,
    ``n_major_b``: A or B is a line of m or n elements for each k. C is m × n
    with the given strides; every element is written (added to when ``accumulate``), unless the plan says
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
    c_type, integer, promoted = config.c_type, config.integer, config.promoted
    element_nbytes = config.element_nbytes
    side_a = _Side(tile, tile_m, config.m_major_a, False, element_nbytes)
    side_b = _Side(tile, tile_n, config.n_major_b, integer, element_nbytes)
    for side in (side_a, side_b):
        side.check()
    turned_a, turned_b = side_a.turned, side_b.turned
    chunks_a, chunks_b = side_a.chunks, side_b.chunks
    line_a_nbytes, line_b_nbytes = side_a.line_nbytes, side_b.line_nbytes
    passes_a, passes_b = side_a.lines_a_pass, side_b.lines_a_pass
    (shared_a, wrap_a, times_a), (shared_b, wrap_b, times_b) = side_a.swizzle, side_b.swizzle
    words_a, words_b = side_a.by_words, side_b.by_words
    a_nbytes, stage_nbytes, ring_nbytes = tile_m * depth, tile.stage_nbytes, tile.shared_nbytes
    pending = stages - 2
    parted, summed = bool(config.parts), max(1, len(config.parts))
    config_kind = config.plan_kind
    guarded, residues, any_single = config_kind >= 0, config_kind == RESIDUES, config_kind == ANY_SINGLE
    kept_words = len(MODULI) * tile_m * tile_n // 4
    sum_type = types.int32 if integer else types.float32

    copy_a, copy_b = _copier(side_a), _copier(side_b)
    corner, advance = _walk(config, side_a, side_b)
    loaders = [_loader(side_a, side_b, tiles_m, tiles_n, s) for s in range(steps)]
    load_first, load_second = loaders[0], loaders[1]
    converted = (c_type, c_type, c_type) if integer else conversions(config)
    store = _strips(sum_store(warp_n, converted, flagged_only=config.flagged_only), tiles_m, strip_sums)
    if residues and c_type in (types.float32, types.float64):
        keep_residues, add_residues = scaled_epilogue(tile.threads, warp_n, tiles_m, c_type)
        own_words = OWN_WORDS
    else:
        keep_residues, add_residues = residue_epilogue(tile.threads, warp_n, tiles_m, c_type)
        own_words = 4
    finds_least = config.least
    report_least = least_report(warp_n, tiles_m)
    i32, i64, u32 = types.int32, types.int64, types.uint32

    @inlined
    def clear(i, sums):  # type: ignore[no-untyped-def]
        sums[i] = sum_type(0)

    @inlined
    def promote(i, totals, sums):  # type: ignore[no-untyped-def]
        totals[i] += sums[i]
        sums[i] = sum_type(0)

    def plane_multiplier(kind_a, kind_b):  # type: ignore[no-untyped-def]
        """A device function for the stages of one plane of one tile, which adds to ``sums``."""
        multiply = warp_mma.mma_lines(kind_a, kind_b, tiles_m, tiles_n)
        middle_steps = _steps(loaders[2:], multiply, tiles_m, tiles_n)

        @inlined
        def multiply_plane(  # type: ignore[no-untyped-def]
            sums, totals, a_regs, b_regs, walk, reading, writing, put, get, work
        ):
            a_from, b_from, a_left, b_left, a_k_left, b_k_left, stage_filled, plane_filled, index = walk
            put_a, put_b, a_step, b_step = put
            get_a, get_b = get
            for _ in range(work[0][0]):
                at_a, at_b = u32(get_a + reading), u32(get_b + reading)
                load_second(a_regs, b_regs, at_a, at_b)
                # Into the stage that was multiplied last: the last barrier ensures that every thread has read it.
                copy_a(u32(put_a + writing), a_from, a_step, a_left, a_k_left)
                copy_b(u32(put_b + writing), b_from, b_step, b_left, b_k_left)
                async_copy.commit_copies()
                multiply(sums, a_regs, 0, b_regs, 0)
                a_from, b_from, a_left, b_left, a_k_left, b_k_left, stage_filled, plane_filled, index = (
                    advance(
                        a_from,
                        b_from,
                        a_left,
                        b_left,
                        a_k_left,
                        b_k_left,
                        stage_filled,
                        plane_filled,
                        index,
                        work,
                    )
                )
                middle_steps(sums, a_regs, b_regs, at_a, at_b)
                writing = reading
                reading = u32(reading + u32(stage_nbytes))
                if reading == u32(ring_nbytes):
                    reading = u32(0)
                async_copy.wait_copies(pending)
                # The next stage has arrived for every thread, and every thread has read this one (its last step is in
                # registers), which the next round overwrites.
                cuda.syncthreads()
                load_first(a_regs, b_regs, u32(get_a + reading), u32(get_b + reading))
                multiply(sums, a_regs, use_a, b_regs, use_b)
                if promoted:
                    unroll(promote, registers, (totals, sums))
            walk = a_from, b_from, a_left, b_left, a_k_left, b_k_left, stage_filled, plane_filled, index
            return walk, reading, writing

        return multiply_plane

    multiply_plane = plane_multiplier(config.kind_a, config.kind_b)
    of_kind = [plane_multiplier(*kinds) for kinds in SINGLE_KINDS] if any_single else [multiply_plane] * 4
    signed, unsigned_a, unsigned_b, unsigned = of_kind

    @inlined
    def multiply_planned(  # type: ignore[no-untyped-def]
        kind, sums, totals, a_regs, b_regs, walk, reading, writing, put, get, work
    ):
        if kind == 0:
            return signed(sums, totals, a_regs, b_regs, walk, reading, writing, put, get, work)
        if kind == 1:
            return unsigned_a(sums, totals, a_regs, b_regs, walk, reading, writing, put, get, work)
        if kind == 2:
            return unsigned_b(sums, totals, a_regs, b_regs, walk, reading, writing, put, get, work)
        return unsigned(sums, totals, a_regs, b_regs, walk, reading, writing, put, get, work)

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
        planes, plan_kind = i32(summed), i64(0)
        if guarded:
            settings = memory.global_array(plan, i64)
            plan_kind = settings[PLAN_KIND]
            if plan_kind >= RESIDUES if any_single else plan_kind != config_kind:
                return
            planes = i32(settings[PLAN_PLANES])
        ring = memory.shared_address(cuda.shared.array(0, types.uint8, alignment=BANK_LINE))
        sums = cuda.local.array(registers, sum_type)
        totals = cuda.local.array(registers, sum_type)
        a_regs = cuda.local.array(registers_a, u32)
        b_regs = cuda.local.array(registers_b, u32)
        out = memory.global_array(c, c_type)
        kept = memory.global_array(workspace, u32)

        # Narrowed, here and below: Numba widens to 64 bits what meets a constant, and registers are scarce.
        thread = i32(cuda.threadIdx.x)
        lane, warp = i32(thread % WARP), i32(thread // WARP)
        warp_row, warp_column = i32(warp // warps_n * warp_m), i32(warp % warps_n * warp_n)

        # Where this thread's first chunks go in a stage, and where its lane's first lines of fragments lie. The four
        # matrices of a load are eight lines and one chunk each: of A first the other rows, then the other k; of B first
        # the other k. Of what lies turned the lines are k, and the chunks rows or columns.
        line_a, chunk_a = i32(thread // chunks_a), i32(thread % chunks_a)
        line_b, chunk_b = i32(thread // chunks_b), i32(thread % chunks_b)
        xor_a, xor_b = i32(line_a // shared_a % wrap_a * times_a), i32(line_b // shared_b % wrap_b * times_b)
        put_a = u32(ring + u32(line_a * line_a_nbytes + CHUNK * (chunk_a ^ xor_a)))
        put_b = u32(ring + u32(line_b * line_b_nbytes + CHUNK * (chunk_b ^ xor_b)))
        put_b = u32(put_b + u32(a_nbytes))
        eight, second, fourth = i32(lane % 8), i32(lane // 8 % 2), i32(lane // 16)
        inner_a, inner_b = i32(0), i32(0)
        if words_a:
            from_a, at_chunk_a = i32(lane % 4), i32(warp_row * SINGLE_NBYTES // CHUNK + fourth)
            inner_a = i32(lane // 4 % 4 * SINGLE_NBYTES)
        elif turned_a:
            from_a, at_chunk_a = i32(eight + 8 * fourth), i32(warp_row * HALF_NBYTES // CHUNK + second)
        else:
            from_a, at_chunk_a = i32(warp_row + eight + 8 * second), fourth
        if words_b:
            from_b, at_chunk_b = i32(lane % 4), i32(warp_column * SINGLE_NBYTES // CHUNK + fourth)
            inner_b = i32(lane // 4 % 4 * SINGLE_NBYTES)
        elif turned_b:
            from_b, at_chunk_b = i32(eight + 8 * second), i32(warp_column * HALF_NBYTES // CHUNK + fourth)
        else:
            from_b, at_chunk_b = i32(warp_column + eight + 8 * fourth), second
        at_chunk_a = i32(at_chunk_a ^ (from_a // shared_a % wrap_a * times_a))
        at_chunk_b = i32(at_chunk_b ^ (from_b // shared_b % wrap_b * times_b))
        get_a = u32(from_a * line_a_nbytes + CHUNK * at_chunk_a + inner_a)
        get_b = u32(from_b * line_b_nbytes + CHUNK * at_chunk_b + inner_b)
        get_a, get_b = u32(ring + get_a), u32(ring + u32(a_nbytes) + get_b)

        tiles_down, tiles_across = i32((m + tile_m - 1) // tile_m), i32((n + tile_n - 1) // tile_n)
        tiles, tile_stride = i32(tiles_down * tiles_across), i32(cuda.gridDim.x)
        k_steps = i32((k + depth - 1) // depth)
        a_step, b_step = i64(a_line * passes_a), i64(b_line * passes_b)

        # What is to be copied next.
        a_k = i32(k // element_nbytes - line_a) if turned_a else i32(k - chunk_a * CHUNK)
        b_k = i32(k // element_nbytes - line_b) if turned_b else i32(k - chunk_b * CHUNK)
        of_a = a, a_line, a_plane, m, line_a, chunk_a, a_k
        of_b = b, b_line, b_plane, n, line_b, chunk_b, b_k
        index, plane_filled, stage_filled = i32(cuda.blockIdx.x), i32(0), i32(0)
        a_from, b_from, a_left, b_left = corner(index, tiles_down, tiles_across, of_a, of_b)
        a_k_left, b_k_left = a_k, b_k
        work = (k_steps, planes, tiles, tile_stride, tiles_down, tiles_across), of_a, of_b

        # Fill all stages but one. After the last tile stages are filled with zeros, so that the count of groups under
        # way never depends on the sides.
        for stage in range(stages - 1):
            copy_a(u32(put_a + u32(stage * stage_nbytes)), a_from, a_step, a_left, a_k_left)
            copy_b(u32(put_b + u32(stage * stage_nbytes)), b_from, b_step, b_left, b_k_left)
            async_copy.commit_copies()
            a_from, b_from, a_left, b_left, a_k_left, b_k_left, stage_filled, plane_filled, index = advance(
                a_from, b_from, a_left, b_left, a_k_left, b_k_left, stage_filled, plane_filled, index, work
            )
        reading, writing = u32(0), u32((stages - 1) * stage_nbytes)
        put, get = (put_a, put_b, a_step, b_step), (get_a, get_b)
        async_copy.wait_copies(pending)
        cuda.syncthreads()  # the first stage has arrived for every thread
        load_first(a_regs, b_regs, get_a, get_b)

        for tile_index in range(i32(cuda.blockIdx.x), tiles, tile_stride):
            for plane in range(planes):
                if plane == 0 or not parted:
                    unroll(clear, registers, (sums,))
                if promoted:
                    unroll(clear, registers, (totals,))
                walk = a_from, b_from, a_left, b_left, a_k_left, b_k_left, stage_filled, plane_filled, index
                if any_single:
                    walk, reading, writing = multiply_planned(
                        plan_kind, sums, totals, a_regs, b_regs, walk, reading, writing, put, get, work
                    )
                else:
                    walk, reading, writing = multiply_plane(
                        sums, totals, a_regs, b_regs, walk, reading, writing, put, get, work
                    )
                a_from, b_from, a_left, b_left, a_k_left, b_k_left, stage_filled, plane_filled, index = walk
                if residues:
                    keep_residues(
                        sums, plane, planes, kept, cuda.blockIdx.x * kept_words + own_words * thread
                    )
            tile_row, tile_column = cluster_tile(tile_index, tiles_down, tiles_across, band)
            row = i64(tile_row * tile_m + warp_row + lane // 4)
            column = i64(tile_column * tile_n + warp_column + 2 * (lane % 4))
            if residues:
                add_residues(
                    planes,
                    kept,
                    cuda.blockIdx.x * kept_words + own_words * thread,
                    out,
                    row * row_stride + column * column_stride,
                    row_stride,
                    column_stride,
                    m - row,
                    n - column,
                    accumulate,
                    plan,
                    row,
                    column,
                )
            elif finds_least:
                report_least(sums, plan, m - row, n - column)
            else:
                in_pairs = paired != 0 and (tile_column + 1) * tile_n <= n
                store(
                    totals if promoted else sums,
                    out,
                    row,
                    column,
                    row_stride,
                    column_stride,
                    m,
                    n,
                    in_pairs,
                    accumulate,
                    workspace,
                )
        async_copy.wait_copies(0)  # no block ends with copies under way

    return kernel
