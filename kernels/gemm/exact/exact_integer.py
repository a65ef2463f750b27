"""Exact products of integers of any width on int8 tensor cores: Hopper's ``wgmma``, or ``mma.sync``.

8-bit operands are multiplied as they are. Wider ones go through a pass that keeps their lowest bytes and
finds their range, on the device; a plan made there says whether one byte of each was enough, or how many
residues are needed. Every kernel that could be needed is enqueued, and those that the plan does not need return at
once: the host never waits for the range.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba.cuda import types

from tilewright.kernels.gemm.base import (
    INTEGERS,
    PLANES_NBYTES,
    Capability,
    GemmKernel,
    Operand,
    Problem,
    Variant,
)
from tilewright.kernels.gemm.exact import byte_planes
from tilewright.kernels.gemm.exact.residue_epilogue import WORKSPACE_NBYTES
from tilewright.kernels.gemm.exact.residues import (
    ANY_SINGLE,
    DEPTH_LIMIT,
    MODULI,
    PLAN_LENGTH,
    RESIDUES,
    SINGLE_DEPTH_LIMIT,
)
from tilewright.kernels.gemm.hopper.wgmma_config import Config
from tilewright.kernels.gemm.hopper.wgmma_launch import (
    HOPPER,
    Launchable,
    Output,
    Planes,
    compile_launchable,
    compiled,
    launch_product,
    output_of,
    pass_variant,
    variant,
)
from tilewright.kernels.gemm.scratch import borrowed
from tilewright.kernels.gemm.tensor import mma, mma_launch
from tilewright.kernels.gpu.compiled import compile_together, device_capability, multiprocessors
from tilewright.kernels.gpu.device_array import address
from tilewright.kernels.gpu.device_choice import current_device
from tilewright.kernels.numbers import ceil_div, round_up

LINE_UNIT = 128
"""Lines of a plane begin at multiples of it (bytes), as suits the copy engine and the memory."""
LEAST_WORK = 1 << 28
"""m n k below which the passes and launches of wide operands cost more than the simple kernels. That `half_tensor_core`
begins at the same size where it has passes is by chance."""
LEAST_BYTES_WORK = 1 << 22
"""The same of 8-bit operands that are multiplied as they lie, in one launch. At an address that is new their tensor
maps are made first: from 2^20 on, at those of before, it was as fast."""
LEAST_COPIED_BYTES_WORK = 1 << 23
"""And of those of which one is turned or aligned first, in a launch each."""
LEAST_SIDE = 64
BLOCKS_PER_MULTIPROCESSOR = 8
TURN_RESIDENT_BLOCKS = 6
"""Blocks on a multiprocessor of the pass that only turns bytes: 40 registers a thread."""
MOST_MULTIPROCESSORS = 192
"""No GPU so far has more; each keeps residues of its own."""
CLUSTER = 2
CLUSTER_SIDE = 256
"""Rows, and columns, of C that the blocks of a cluster work on together: asserted below."""
PLAN_NBYTES = 256
_C_TYPES = {1: types.int8, 2: types.int16, 4: types.int32, 8: types.int64}
"""How C's elements are written, by their size: modulo 2**bits a signed number is an unsigned one."""


@dataclass(frozen=True)
class Engine:
    """A main loop on some tensor cores; the planes, the plan and what is done with the sums are shared.

    Its blocks, one a multiprocessor, work on tiles of ``residue_epilogue.TILE_ELEMENTS``.
    """

    config: Callable[..., Any]
    """``config(kind_a, kind_b, c_type, plan_kind=-1, least=False)``, and what else such a configuration has: what
    `launch_product` takes first."""
    launch_product: Callable[..., None]
    """As `wgmma_launch.launch_product`."""
    compiled: Callable[[Any], Launchable]
    """``compiled(config)``: what `launch_product` launches."""


BOXES = 2
"""Of products whose sums are C's elements: these leave through shared memory (`Config.boxes`)."""


def _config(
    kind_a: str, kind_b: str, c_type: Any, plan_kind: int = -1, *, least: bool = False, **more: Any
) -> Config:
    boxes = BOXES if c_type == types.int32 and plan_kind != RESIDUES and not least else 0
    return Config(kind_a, kind_b, c_type, plan_kind=plan_kind, least=least, boxes=boxes, **more)


WGMMA = Engine(_config, launch_product, compiled)
"""Hopper's, compute capability 9.0 alone."""
MMA = Engine(mma_launch.config_here, mma_launch.launch_product, mma_launch.compiled)
"""``mma.sync``, which every GPU since 8.0 has."""


@dataclass(frozen=True)
class Lines:
    """A matrix as the passes and the tensor cores take it: lines (rows of A, columns of B) of k elements."""

    address: int
    dtype: np.dtype
    lines: int
    depth: int
    line_stride: int
    """In elements, as k_stride."""
    k_stride: int

    @property
    def turned(self) -> bool:
        """Whether neighbours in memory are neighbouring lines, not neighbours in k."""
        return self.line_stride == 1 and self.k_stride != 1

    @property
    def turned_by_vectors(self) -> bool:
        """Whether it is a matrix of bytes that `byte_planes.turn_function` takes."""
        aligned = self.address % 16 == 0 and self.k_stride % 16 == 0
        return self.turned and self.dtype.itemsize == 1 and aligned

    def panel(self, first: int, depth: int) -> Lines:
        """The stretch of k that begins at ``first``."""
        start = self.address + first * self.k_stride * self.dtype.itemsize
        return Lines(start, self.dtype, self.lines, depth, self.line_stride, self.k_stride)

    def bytes_in_place(self, kind: str) -> Planes | None:
        """An 8-bit matrix as the copy engine can load it where it lies; None if it cannot."""
        if self.dtype.itemsize != 1 or self.k_stride != 1:
            return None
        planes = Planes(
            self.address,
            self.depth,
            self.lines,
            1,
            self.line_stride,
            self.line_stride * self.lines,
            kind,
        )
        return planes if planes.loadable and self.line_stride >= self.depth else None


@dataclass(frozen=True)
class Layout:
    """Where things lie in the scratch memory, and how long a panel of k is. All in bytes but the depths."""

    single_depth: int
    """Elements of k in a panel whose elements are one byte each."""
    residue_depth: int
    """Elements of k in a panel of residues."""
    planes_a: int
    planes_b: int
    nbytes: int


def layout(m: int, n: int, k: int, processors: int, *, residues: bool) -> Layout:
    """How the scratch memory of a product is used on a GPU of ``processors`` multiprocessors; at most PLANES_NBYTES
    for planes where that is possible. Which of A and B lies along C's rows makes no difference: the tiles of a cluster
    form a square.
    """
    longest = round_up(k, LINE_UNIT)
    affordable = PLANES_NBYTES // (m + n) // LINE_UNIT * LINE_UNIT
    single = max(LINE_UNIT, min(longest, SINGLE_DEPTH_LIMIT, affordable))
    count = len(MODULI) if residues else 1
    affordable = PLANES_NBYTES // (count * (m + n)) // LINE_UNIT * LINE_UNIT
    residue = max(LINE_UNIT, min(single, DEPTH_LIMIT, affordable))
    line_nbytes = max(single, count * residue) if residues else single
    clusters = ceil_div(m, CLUSTER_SIDE) * ceil_div(n, CLUSTER_SIDE)
    blocks = min(processors, CLUSTER * clusters)
    planes_a = PLAN_NBYTES + (blocks * WORKSPACE_NBYTES if residues else 0)
    planes_b = planes_a + m * line_nbytes
    return Layout(single, residue, planes_a, planes_b, planes_b + n * line_nbytes)


def scratch_nbytes(m: int, n: int, k: int, itemsize: int) -> int:
    """An upper bound for the device memory that a product of these sides or smaller ones borrows, for operands of up
    to ``itemsize`` bytes an element; nothing where it is too small for the tensor cores.

    A smaller product may borrow more than a larger one: of a longer side, fewer whole units of k fit.
    """
    residues = itemsize > 1
    if min(m, n) < LEAST_SIDE or m * n * k < (LEAST_WORK if residues else LEAST_BYTES_WORK):
        return 0
    deepest = min(round_up(k, LINE_UNIT), SINGLE_DEPTH_LIMIT)
    if residues:
        deepest = max(deepest, len(MODULI) * min(deepest, DEPTH_LIMIT))
    exact = layout(m, n, k, MOST_MULTIPROCESSORS, residues=residues)
    return max(exact.nbytes, exact.planes_a + min(PLANES_NBYTES, (m + n) * deepest))


def resident_blocks(turned: bool, residues: bool) -> int:
    """Blocks of a pass on a multiprocessor: what a tile keeps in registers leaves no room for more."""
    if turned:
        return 2
    return 3 if residues else 4


@functools.cache
def _pass(dtype: np.dtype, turned: bool, residues: bool) -> Launchable:
    return compile_launchable(
        byte_planes.pass_function(dtype, turned=turned, residues=residues),
        byte_planes.ARGUMENTS,
        threads=byte_planes.THREADS,
        blocks_per_multiprocessor=resident_blocks(turned, residues),
    )


@functools.cache
def _turn() -> Launchable:
    return compile_launchable(
        byte_planes.turn_function(),
        byte_planes.ARGUMENTS,
        threads=byte_planes.THREADS,
        blocks_per_multiprocessor=TURN_RESIDENT_BLOCKS,
    )


@functools.cache
def reset() -> Launchable:
    """`byte_planes.reset_function`."""
    return compile_launchable(byte_planes.reset_function(), byte_planes.RESET_ARGUMENTS, threads=1)


@functools.cache
def decide() -> Launchable:
    """`byte_planes.plan_function`."""
    return compile_launchable(byte_planes.plan_function(), byte_planes.PLAN_ARGUMENTS, threads=1)


def make_planes(
    matrix: Lines,
    target: int,
    line_nbytes: int,
    plan: int,
    side: int,
    stream: Any,
    *,
    residues: bool,
    ranged: bool = True,
) -> None:
    """Enqueue the pass that writes the planes of ``matrix`` at ``target`` and, if ``ranged``, finds its range."""
    if matrix.turned_by_vectors and not residues and not ranged:
        kernel, extent = _turn(), byte_planes.TURN_SIDE
        blocks = ceil_div(matrix.lines, extent) * ceil_div(matrix.depth, extent)
    else:
        kernel, work = _pass(matrix.dtype, matrix.turned, residues), matrix.lines
        if matrix.turned:
            tiles = ceil_div(matrix.lines, byte_planes.TURN_LINES)
            work = tiles * ceil_div(matrix.depth, byte_planes.TURN_QUADS * byte_planes.QUAD)
        blocks = min(work, multiprocessors(current_device()) * BLOCKS_PER_MULTIPROCESSOR)
    kernel.launch(
        blocks,
        stream,
        matrix.address,
        matrix.line_stride,
        matrix.k_stride,
        matrix.lines,
        matrix.depth,
        target,
        line_nbytes // 4,
        matrix.lines * line_nbytes // 4,
        plan,
        side,
    )


def planes_at(target: int, matrix: Lines, line_nbytes: int, count: int, kind: str) -> Planes:
    """The planes that `make_planes` writes."""
    return Planes(target, matrix.depth, matrix.lines, count, line_nbytes, matrix.lines * line_nbytes, kind)


def launch(
    a: Any, b: Any, c: Any, accumulate: bool, stream: Any, engine: Engine = WGMMA, *, lower: bool = False
) -> None:
    """See ``GemmKernel.launch``. Integers of any width and layout; C wraps modulo 2**bits."""
    itemsize = c.dtype.itemsize
    output = output_of(c, _C_TYPES[itemsize], lower=lower)
    left, right = _lines(a, 0, itemsize), _lines(b, 1, itemsize)
    if output.transposed:  # column-major C: its transpose is B's transpose times A's
        left, right = right, left
    multiply = _bytes if left.dtype.itemsize == right.dtype.itemsize == 1 else _wide
    multiply(left, right, output, accumulate, stream, engine)


def _lines(matrix: Any, side: int, result_itemsize: int) -> Lines:
    itemsize = matrix.dtype.itemsize
    # Modulo 2**bits of the result a wider or equally wide operand may as well be read as signed: the numbers are
    # then smaller, and fewer residues hold the product.
    signed = itemsize >= result_itemsize
    return lines_of(matrix, side, np.dtype(f"i{itemsize}") if signed else matrix.dtype)


def lines_of(matrix: Any, side: int, dtype: np.dtype) -> Lines:
    """A device array, A of a product (side 0) or B (1), read as elements of a type as wide as its own."""
    strides = [stride // dtype.itemsize for stride in matrix.strides]
    return Lines(
        address(matrix), dtype, matrix.shape[side], matrix.shape[1 - side], strides[side], strides[1 - side]
    )


def _bytes(a: Lines, b: Lines, output: Output, accumulate: bool, stream: Any, engine: Engine) -> None:
    """8-bit integers, whose range need not be found."""
    kinds = tuple("s8" if matrix.dtype.kind == "i" else "u8" for matrix in (a, b))
    config = engine.config(kinds[0], kinds[1], output.c_type)
    # A result of at most 32 bits may wrap inside the tensor cores; a wider one is added up panel by panel.
    whole = output.c_type.bitwidth <= 32
    multiply_bytes(config, kinds, a, b, output, accumulate, stream, engine.launch_product, whole=whole)


def multiply_bytes(
    config: Any,
    kinds: Sequence[str],
    a: Lines,
    b: Lines,
    output: Output,
    accumulate: bool,
    stream: Any,
    launch_product: Callable[..., None],
    *,
    whole: bool,
) -> None:
    """Enqueue the product of operands of one byte an element: no pass where the copy engine can load them as they lie.

    kinds: PTX's names of their elements. whole: whether the product may go over all of k at once, however long.
    """
    where = layout(a.lines, b.lines, a.depth, 0, residues=False)
    in_place = all(
        matrix.bytes_in_place(kind) is not None for matrix, kind in zip((a, b), kinds, strict=True)
    )
    depth = a.depth if in_place and whole else where.single_depth
    with contextlib.nullcontext(0) if in_place else borrowed(where.nbytes, stream) as scratch:
        targets = scratch + where.planes_a, scratch + where.planes_b
        for first in range(0, a.depth, depth):
            length = min(depth, a.depth - first)
            loaded: list[Planes] = []
            for side, matrix in enumerate((a, b)):
                if (
                    side == 1 and b == a
                ):  # a matrix by its own transpose; the copy engine sees bytes of any kind
                    loaded.append(loaded[0])
                    continue
                panel = matrix.panel(first, length)
                planes = panel.bytes_in_place(kinds[side])
                if planes is None:
                    make_planes(
                        panel,
                        targets[side],
                        where.single_depth,
                        scratch,
                        side,
                        stream,
                        residues=False,
                        ranged=False,
                    )
                    planes = planes_at(targets[side], panel, where.single_depth, 1, kinds[side])
                loaded.append(planes)
            add = accumulate or first > 0
            launch_product(config, loaded[0], loaded[1], output, length, add, stream)


@functools.cache
def _compile_wide(
    a: tuple[np.dtype, bool], b: tuple[np.dtype, bool], c_type: Any, engine: Engine, device: int
) -> None:
    """Have the kernels that `_wide` enqueues compiled, beside each other: one by one they take 20 s.

    a, b: dtype of an operand, and whether it is turned.
    """
    configs = [engine.config("s8", "s8", c_type, plan_kind=kind) for kind in (ANY_SINGLE, RESIDUES)]
    compile_passes((a, b), configs, engine, device, residues=True)


def compile_passes(
    operands: Iterable[tuple[np.dtype, bool]],
    configs: Iterable[Any],
    engine: Engine,
    device: int,
    *,
    residues: bool = False,
) -> None:
    """Have the passes over operands compiled beside each other, and products.

    operands: dtype of each, and whether it is turned. residues: whether those too that write residues.
    """
    needed = [engine.compiled(config) for config in configs]
    kinds = (False, True) if residues else (False,)
    needed += [_pass(*operand, kind) for operand in operands for kind in kinds]
    needed += [reset(), decide()]
    compile_together({launchable.kernel for launchable in needed}, device_capability(device))


def _wide(a: Lines, b: Lines, output: Output, accumulate: bool, stream: Any, engine: Engine) -> None:
    """Wider operands: find the range, then one product of bytes or one for each modulus, as the plan says."""
    device = current_device()
    where = layout(a.lines, b.lines, a.depth, multiprocessors(device), residues=True)
    _compile_wide((a.dtype, a.turned), (b.dtype, b.turned), output.c_type, engine, device)
    with borrowed(where.nbytes, stream) as scratch:
        targets = scratch + where.planes_a, scratch + where.planes_b
        for first in range(0, a.depth, where.single_depth):
            length = min(where.single_depth, a.depth - first)
            panels = a.panel(first, length), b.panel(first, length)
            add = accumulate or first > 0
            residue_depth = min(where.residue_depth, length)
            reset().launch(1, stream, scratch)
            one = a == b  # a matrix by its own transpose: the lines of both are the same
            for side, panel in ((byte_planes.BOTH, panels[0]),) if one else enumerate(panels):
                target = targets[0 if one else side]
                make_planes(panel, target, where.single_depth, scratch, side, stream, residues=False)
            decide().launch(1, stream, scratch, residue_depth)
            engine.launch_product(
                engine.config("s8", "s8", output.c_type, plan_kind=ANY_SINGLE),
                planes_at(targets[0], panels[0], where.single_depth, 1, "s8"),
                planes_at(targets[0 if one else 1], panels[1], where.single_depth, 1, "s8"),
                output,
                length,
                add,
                stream,
                plan=scratch,
            )
            for start in range(0, length, residue_depth):
                depth = min(residue_depth, length - start)
                parts = a.panel(first + start, depth), b.panel(first + start, depth)
                _residues(parts, targets, output, where, scratch, add or start > 0, stream, engine)


def _residues(
    panels: tuple[Lines, Lines],
    targets: tuple[int, int],
    output: Output,
    where: Layout,
    scratch: int,
    accumulate: bool,
    stream: Any,
    engine: Engine,
) -> None:
    """One panel of a product by residues; all of it returns at once where the plan says otherwise."""
    planes = []
    for side, panel in enumerate(panels):
        make_planes(panel, targets[side], where.residue_depth, scratch, side, stream, residues=True)
        planes.append(planes_at(targets[side], panel, where.residue_depth, len(MODULI), "s8"))
    engine.launch_product(
        engine.config("s8", "s8", output.c_type, plan_kind=RESIDUES),
        planes[0],
        planes[1],
        output,
        panels[0].depth,
        accumulate,
        stream,
        plan=scratch,
        workspace=scratch + PLAN_NBYTES,
    )


def _least_work(problem: Problem) -> int:
    """m n k from which on operands of these dtypes and layouts pay on tensor cores."""
    if not problem.a.dtype.itemsize == problem.b.dtype.itemsize == 1:
        return LEAST_WORK
    in_place = all(
        _problem_lines(operand, side).bytes_in_place("u8") is not None
        for side, operand in enumerate((problem.a, problem.b))
    )
    return LEAST_BYTES_WORK if in_place else LEAST_COPIED_BYTES_WORK


def _problem_lines(operand: Operand, side: int) -> Lines:
    """A of a problem (side 0), or B (1). Of its address only the alignment is known: that is given as the address."""
    sides = operand.rows, operand.columns
    strides = operand.strides
    return Lines(
        operand.alignment, operand.dtype, sides[side], sides[1 - side], strides[side], strides[1 - side]
    )


def _worthwhile(problem: Problem) -> bool:
    """Integers, large enough that the passes over the operands are small against the product."""
    operands = (problem.a, problem.b, problem.c)
    return (
        all(operand.dtype in INTEGERS for operand in operands)
        and min(problem.m, problem.n) >= LEAST_SIDE
        and problem.m * problem.n * problem.k >= _least_work(problem)
        and max(problem.m, problem.n, problem.k) < 1 << 31
    )


def supports(problem: Problem) -> bool:
    """What is worthwhile, on Hopper."""
    return problem.capability == HOPPER and _worthwhile(problem)


def supports_mma(problem: Problem) -> bool:
    """What is worthwhile, on any GPU with these tensor cores (on Hopper too, where the ladder prefers the
    other)."""
    capable = problem.capability is not None and problem.capability >= mma_launch.AMPERE
    return capable and _worthwhile(problem)


def _passes(minimum: Capability) -> Iterable[Variant]:
    """The passes for the narrowest and widest elements."""
    for dtype, turned, residues in itertools.product(
        (np.int8, np.uint32, np.int64), (False, True), (False, True)
    ):
        yield pass_variant(
            f"{np.dtype(dtype).name} to {'residues' if residues else 'bytes'}{', turned' if turned else ''}",
            byte_planes.pass_function(np.dtype(dtype), turned=turned, residues=residues),
            byte_planes.ARGUMENTS,
            byte_planes.THREADS,
            resident_blocks(turned, residues),
            minimum,
        )
    for name, turned in itertools.product(("float32", "float64"), (False, True)):  # of whole_floats
        yield pass_variant(
            f"{name} to bytes{', turned' if turned else ''}",
            byte_planes.pass_function(np.dtype(name), turned=turned, residues=False),
            byte_planes.ARGUMENTS,
            byte_planes.THREADS,
            resident_blocks(turned, False),
            minimum,
        )
    turn = byte_planes.turn_function()
    yield pass_variant(
        "bytes turned by vectors",
        turn,
        byte_planes.ARGUMENTS,
        byte_planes.THREADS,
        TURN_RESIDENT_BLOCKS,
        minimum,
    )
    yield pass_variant("plan", byte_planes.plan_function(), byte_planes.PLAN_ARGUMENTS, 1, 1, minimum)
    yield pass_variant("reset", byte_planes.reset_function(), byte_planes.RESET_ARGUMENTS, 1, 1, minimum)


def variants() -> Iterable[Variant]:
    """The products for every width of C, and the passes."""
    for nbytes, c_type in _C_TYPES.items():
        bits = 8 * nbytes
        yield variant(f"bytes to int{bits}", _config("s8", "u8", c_type))
        yield variant(f"residues to int{bits}", _config("s8", "s8", c_type, RESIDUES))
        yield variant(f"planned bytes to int{bits}", _config("s8", "s8", c_type, ANY_SINGLE))
    for c_type in (types.float32, types.float64):
        yield variant(f"bytes to {c_type}", Config("u8", "s8", c_type))
    yield from _passes(HOPPER)


def variants_mma() -> Iterable[Variant]:
    """The same with every tile. The passes come in between, so that the first and the last variant have different
    tiles."""
    *larger, small = mma_launch.TILES

    def products(tile: mma.Tile) -> Iterable[Variant]:
        for nbytes, c_type in _C_TYPES.items():
            for name, kinds, plan_kind in (
                ("bytes", ("s8", "u8"), -1),
                ("planned bytes", ("s8", "s8"), ANY_SINGLE),
                ("residues", ("s8", "s8"), RESIDUES),
            ):
                config = mma.Config(*kinds, c_type, plan_kind, tile)
                shape = f"{tile.stages} × {tile.depth} bytes deep"
                yield mma_launch.variant(f"{name} to int{8 * nbytes}, {shape}", config)
        for c_type in (types.float32, types.float64):
            config = mma.Config("u8", "s8", c_type, tile=tile)
            yield mma_launch.variant(f"bytes to {c_type}, {tile.stages} × {tile.depth} bytes deep", config)

    yield from products(small)
    yield from _passes(mma_launch.AMPERE)
    for tile in larger:
        yield from products(tile)


EXACT_INTEGER = GemmKernel(
    name="exact-integer-wgmma",
    summary="int8 tensor cores; wider integers by their lowest byte or by residues, as their range asks",
    supports=supports,
    launch=launch,
    recordable=True,
    halves=True,
    variants=variants,
)
EXACT_INTEGER_MMA = GemmKernel(
    name="exact-integer-mma",
    summary="the same by mma.sync, for the GPUs that have int8 tensor cores but not Hopper's",
    supports=supports_mma,
    launch=functools.partial(launch, engine=MMA),
    recordable=True,
    variants=variants_mma,
)

_ANY = Config("s8", "s8", types.int32)
assert PLAN_LENGTH * 8 <= PLAN_NBYTES
assert _ANY.cluster == CLUSTER
assert _ANY.cluster * _ANY.tile_m == _ANY.tile_n == CLUSTER_SIDE
