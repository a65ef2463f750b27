"""``precision="split"``: products of scaled lines by residues, on the int8 tensor cores; of float64, and of float32.

What is computed, and why it is as accurate as sums in the dtype itself, says `scaled_residues`. Here it is enqueued,
panel by panel of k:

1. a pass over each operand for the norms of its lines,
2. one for a sample of it, and the product of both samples, of which only the least element is wanted,
3. the host reads that: how many moduli are enough, or that none are;
4. the powers of two, the residues, and one product for each modulus; or else the product by another kernel, which is
   float64's own, and for float32 the one that splits into parts of 16 bits.

The host waits in step 3 for what was enqueued on the stream before: its launches would otherwise have to fit any number
of moduli, and the other kernel.

Where an operand holds NaN or infinity, the other kernel multiplies the panel too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numba.cuda import types

from tilewright.kernels.gemm.base import Capability, GemmKernel, Operand, Problem, Variant
from tilewright.kernels.gemm.cores.repitch import Matrix, matrix
from tilewright.kernels.gemm.exact import byte_planes, scaled_passes
from tilewright.kernels.gemm.exact.exact_integer import (
    CLUSTER,
    CLUSTER_SIDE,
    LINE_UNIT,
    MMA,
    MOST_MULTIPROCESSORS,
    PLAN_NBYTES,
    WGMMA,
    Engine,
    Lines,
    make_planes,
    planes_at,
    resident_blocks,
)
from tilewright.kernels.gemm.exact.outcomes import note
from tilewright.kernels.gemm.exact.residue_epilogue import WORKSPACE_NBYTES
from tilewright.kernels.gemm.exact.residues import PLAN_LEAST, PLAN_LENGTH, PLAN_NONFINITE, RESIDUES
from tilewright.kernels.gemm.exact.scaled_residues import (
    COUNTS,
    DEPTH_LIMIT,
    FLOAT32,
    FLOAT64,
    LEAST_DEPTH,
    Sample,
    moduli_for,
    sample_of,
)
from tilewright.kernels.gemm.exact.whole_floats import C_TYPES, lines_of
from tilewright.kernels.gemm.hopper.split_float import SPLIT
from tilewright.kernels.gemm.hopper.wgmma_config import Config
from tilewright.kernels.gemm.hopper.wgmma_launch import (
    HOPPER,
    Launchable,
    Output,
    Planes,
    compile_launchable,
    output_of,
    pass_variant,
    read_plan,
    variant,
)
from tilewright.kernels.gemm.ladder.tiled import TILED
from tilewright.kernels.gemm.scratch import borrowed
from tilewright.kernels.gemm.tensor import mma, mma_launch
from tilewright.kernels.gemm.tensor.double_tensor_core import DOUBLE_TENSOR_CORE
from tilewright.kernels.gemm.tensor.float_mma import SPLIT_MMA
from tilewright.kernels.gpu.compiled import multiprocessors
from tilewright.kernels.gpu.device_choice import capability, current_device
from tilewright.kernels.gpu.recording import Rehearsal
from tilewright.kernels.numbers import ceil_div, round_up

PLANES_NBYTES = 4 << 30
"""What the residues of both operands of one panel of k may take: more than those of integers, since a panel more means
that all of C is put together once more."""
LEAST_WORK = {FLOAT64: 1 << 35}
"""m n k below which passes and launches cost more than is saved, of the dtypes that are multiplied so. float32 is none
of them: two float16 parts are faster (`hopper.split_float`)."""
FAST_FLOAT64: tuple[Capability, ...] = ((8, 0), (9, 0), (10, 0))
"""Where float64 units are fast enough that putting float32 products together by them pays."""
LEAST_SIDE = 1024
BLOCKS_PER_MULTIPROCESSOR = 8
NORM_RESIDENT_BLOCKS = 4
GROUP = 8
"""Of `wgmma_config.Config`: measured, 2 to 16 give 75, 73, 75, 75 T op/s at n = 8192, and 69, 61, 64, 64 at 16384."""
FLOAT64_NBYTES = 8


@dataclass(frozen=True)
class Layout:
    """Where things lie in the scratch memory, in bytes from its beginning; and how long a panel of k is."""

    depth: int
    sums: int
    norms: tuple[int, int]
    shifts: tuple[int, int]
    workspace: int
    planes: tuple[int, int]
    nbytes: int


def panel_depth(dtype: np.dtype, m: int, n: int, k: int) -> int:
    """Elements of k in a panel; panels are about equally deep."""
    unit = COUNTS[dtype][-1] * (m + n) * LINE_UNIT
    most = min(DEPTH_LIMIT, max(PLANES_NBYTES // unit, 1) * LINE_UNIT)
    return round_up(ceil_div(k, ceil_div(k, most)), LINE_UNIT)


def layout(dtype: np.dtype, m: int, n: int, k: int, processors: int) -> Layout:
    """How the scratch memory of a product is used; which of A and B lies along C's rows makes no difference."""
    depth = panel_depth(dtype, m, n, k)
    chunks = ceil_div(depth, scaled_passes.CHUNK)
    sums = PLAN_NBYTES
    norms = round_up(sums + scaled_passes.SIZES * chunks * max(m, n) * FLOAT64_NBYTES, LINE_UNIT)
    norms_b = norms + 2 * m * FLOAT64_NBYTES
    shifts = norms_b + 2 * n * FLOAT64_NBYTES
    shifts_b = shifts + 4 * m
    workspace = round_up(shifts_b + 4 * n, LINE_UNIT)
    blocks = min(processors, CLUSTER * ceil_div(m, CLUSTER_SIDE) * ceil_div(n, CLUSTER_SIDE))
    planes = workspace + blocks * WORKSPACE_NBYTES
    line_nbytes = max(COUNTS[dtype][-1] * depth, sample_of(depth).width)
    planes_b = planes + m * line_nbytes
    return Layout(
        depth,
        sums,
        (norms, norms_b),
        (shifts, shifts_b),
        workspace,
        (planes, planes_b),
        planes_b + n * line_nbytes,
    )


def most_nbytes(dtype: np.dtype, m: int, n: int, k: int) -> int:
    """An upper bound for the scratch memory of a product of these sides or smaller ones, by residues alone."""
    if dtype not in LEAST_WORK or min(m, n) < LEAST_SIDE or m * n * k < LEAST_WORK[dtype]:
        return 0
    exact = layout(dtype, m, n, k, MOST_MULTIPROCESSORS)
    # Of shorter sides more of k fits into a panel.
    deepest = COUNTS[dtype][-1] * (m + n) * round_up(min(k, DEPTH_LIMIT), LINE_UNIT)
    chunks = ceil_div(min(k + LINE_UNIT, DEPTH_LIMIT), scaled_passes.CHUNK)
    sums = scaled_passes.SIZES * chunks * max(m, n) * FLOAT64_NBYTES
    return max(exact.nbytes, exact.planes[0] + sums + min(PLANES_NBYTES, deepest))


def outcome(dtype: np.dtype, count: int | None, nonfinite: bool) -> str:
    """In words, how a panel is multiplied, and why."""
    if count is not None:
        return f"split-{dtype} by {count} moduli"
    other = "float64 in full" if dtype == FLOAT64 else "float32 in parts of 16 bits"
    return f"{other} ({'NaN or infinity in a panel' if nonfinite else 'numbers of too different sizes'})"


@functools.cache
def _norms(dtype: np.dtype, turned: bool) -> Launchable:
    return compile_launchable(
        scaled_passes.norm_function(dtype, turned=turned),
        scaled_passes.NORM_ARGUMENTS,
        threads=scaled_passes.THREADS,
        blocks_per_multiprocessor=NORM_RESIDENT_BLOCKS,
    )


@functools.cache
def _sample(dtype: np.dtype, turned: bool) -> Launchable:
    return compile_launchable(
        scaled_passes.sample_function(dtype, turned=turned),
        scaled_passes.SAMPLE_ARGUMENTS,
        threads=scaled_passes.THREADS,
        blocks_per_multiprocessor=NORM_RESIDENT_BLOCKS,
    )


@functools.cache
def _join() -> Launchable:
    return compile_launchable(
        scaled_passes.join_function(), scaled_passes.JOIN_ARGUMENTS, threads=scaled_passes.THREADS
    )


@functools.cache
def _shift() -> Launchable:
    return compile_launchable(
        scaled_passes.shift_function(), scaled_passes.SHIFT_ARGUMENTS, threads=scaled_passes.THREADS
    )


@functools.cache
def _begin() -> Launchable:
    return compile_launchable(scaled_passes.begin_function(), scaled_passes.BEGIN_ARGUMENTS, threads=1)


def _whole(lines: Lines) -> tuple[int, int, int, int, int]:
    return lines.address, lines.line_stride, lines.k_stride, lines.lines, lines.depth


def _grid(lines: Lines, across: int) -> int | tuple[int, int]:
    if lines.turned:
        return ceil_div(lines.lines, scaled_passes.THREADS), across
    return min(lines.lines, BLOCKS_PER_MULTIPROCESSOR * multiprocessors(current_device()))


def _find_norms(lines: Lines, sums: int, norms: int, plan: int, stream: Any) -> None:
    chunks = ceil_div(lines.depth, scaled_passes.CHUNK) if lines.turned else 1
    _norms(lines.dtype, lines.turned).launch(_grid(lines, chunks), stream, *_whole(lines), sums)
    blocks = ceil_div(lines.lines, scaled_passes.THREADS)
    _join().launch(blocks, stream, sums, chunks, lines.lines, norms, plan)


def _take_sample(lines: Lines, sample: Sample, target: int, norms: int, stream: Any) -> Planes:
    grid = _grid(lines, sample.blocks)
    _sample(lines.dtype, lines.turned).launch(
        grid, stream, *_whole(lines), target, sample.blocks, sample.stride, norms
    )
    return Planes(target, sample.width, lines.lines, 1, sample.width, lines.lines * sample.width, "s8")


def launch(
    a: Any, b: Any, c: Any, accumulate: bool, stream: Any, engine: Engine = WGMMA, *, lower: bool = False
) -> None:
    """See ``GemmKernel.launch``."""
    dtype = c.dtype
    output = output_of(c, C_TYPES[dtype.itemsize], lower=lower)
    left, right = lines_of(matrix(a), dtype), lines_of(matrix(b).transposed(), dtype)
    if output.transposed:  # column-major C: its transpose is B's transpose times A's
        left, right = right, left
    depth = panel_depth(dtype, left.lines, right.lines, left.depth)
    whole_a, whole_b, whole_c = matrix(a), matrix(b), matrix(c)
    for first in range(0, left.depth, depth):
        length = min(depth, left.depth - first)
        add = accumulate or first > 0
        found = _panel(left.panel(first, length), right.panel(first, length), output, add, stream, engine)
        if found is None or isinstance(stream, Rehearsal):
            panels = (
                whole_a.slice(0, whole_a.shape[0], first, length),
                whole_b.slice(first, length, 0, whole_b.shape[1]),
            )
            other = next(
                kernel for kernel in _others(dtype) if kernel.supports(_problem(*panels, whole_c, add, dtype))
            )
            other.launch(*panels, whole_c, add, stream, **({"lower": True} if lower else {}))


def _panel(a: Lines, b: Lines, output: Output, accumulate: bool, stream: Any, engine: Engine) -> int | None:
    """Multiply a panel by residues, and say by how many moduli; None where nothing was done, since none are enough."""
    where = layout(a.dtype, a.lines, b.lines, a.depth, multiprocessors(current_device()))
    sample = sample_of(a.depth)
    one = a == b  # a matrix by its own transpose
    with borrowed(where.nbytes, stream) as plan:
        norms = [plan + place for place in where.norms]
        shifts = [plan + place for place in where.shifts]
        targets = [plan + place for place in where.planes]
        _begin().launch(1, stream, plan, *shifts)
        samples: list[Planes] = []
        for side, lines in enumerate((a, b)):
            if side == 1 and one:
                norms[1] = norms[0]
                samples.append(samples[0])
                continue
            _find_norms(lines, plan + where.sums, norms[side], plan, stream)
            samples.append(_take_sample(lines, sample, targets[side], norms[side], stream))
        least = engine.config("s8", "s8", types.int32, least=True)
        unwritten = Output(plan, a.lines, b.lines, b.lines, 1, types.int32, False, output.diagonal)
        engine.launch_product(
            least, samples[0], samples[1], unwritten, sample.width, False, stream, plan=plan
        )
        count = (
            COUNTS[a.dtype][0] if isinstance(stream, Rehearsal) else _decide(a.dtype, plan, sample, stream)
        )
        if count is None:
            return None
        line_nbytes = round_up(a.depth, LINE_UNIT)
        planes = []
        for side, lines in enumerate((a, b)):
            blocks = ceil_div(lines.lines, scaled_passes.THREADS)
            _shift().launch(blocks, stream, norms[side], lines.lines, shifts[side], plan, count)
        for side, lines in enumerate((a, b)):
            make_planes(lines, targets[side], line_nbytes, plan, side, stream, residues=True)
            planes.append(planes_at(targets[side], lines, line_nbytes, count, "s8"))
        engine.launch_product(
            engine.config("s8", "s8", output.c_type, plan_kind=RESIDUES, **_walk(engine)),
            planes[0],
            planes[1],
            output,
            a.depth,
            accumulate,
            stream,
            plan=plan,
            workspace=plan + where.workspace,
        )
    return count


def _walk(engine: Engine) -> dict[str, int]:
    """How the blocks walk C."""
    return {"group": GROUP} if engine is WGMMA else {}


def _decide(dtype: np.dtype, plan: int, sample: Sample, stream: Any) -> int | None:
    """Wait for what the passes have found, and choose the number of moduli: None where the panel is not for them."""
    settings = read_plan(plan, PLAN_LENGTH, stream)
    least, nonfinite = int(settings[PLAN_LEAST]), bool(settings[PLAN_NONFINITE])
    count = None if nonfinite else moduli_for(dtype, least, sample.places)
    note(outcome(dtype, count, nonfinite))
    return count


def _problem(a: Matrix, b: Matrix, c: Matrix, accumulate: bool, dtype: np.dtype) -> Problem:
    """What another kernel is to multiply: in the precision that it has."""
    size = dtype.itemsize
    of_a, of_b, of_c = (
        Operand(each.shape[0], each.shape[1], dtype, (each.strides[0] // size, each.strides[1] // size), size)
        for each in (a, b, c)
    )
    precision = "full" if dtype == FLOAT64 else "split"
    return Problem(of_a, of_b, of_c, accumulate, precision, capability(current_device()))


def _others(dtype: np.dtype) -> tuple[GemmKernel, ...]:
    """The kernels that multiply what residues do not, the first that can."""
    return (DOUBLE_TENSOR_CORE, TILED) if dtype == FLOAT64 else (SPLIT, SPLIT_MMA)


def _worthwhile(problem: Problem) -> bool:
    """float64 or float32 throughout, the caller said ``precision="split"``, it pays, and another takes it too."""
    m, n, k, dtype = problem.m, problem.n, problem.k, problem.c.dtype
    if (
        problem.precision != "split"
        or dtype not in LEAST_WORK
        or {problem.a.dtype, problem.b.dtype} != {dtype}
    ):
        return False
    if min(m, n) < LEAST_SIDE or k < LEAST_DEPTH or m * n * k < LEAST_WORK[dtype] or max(m, n, k) >= 1 << 31:
        return False
    if dtype == FLOAT32 and problem.capability not in FAST_FLOAT64:
        return False
    depth = panel_depth(dtype, m, n, k)
    shallowest = k - (ceil_div(k, depth) - 1) * depth
    if shallowest < LEAST_DEPTH:
        return False
    other = replace(problem, precision="full") if dtype == FLOAT64 else problem
    return any(kernel.supports(other) for kernel in _others(dtype))


def supports(problem: Problem) -> bool:
    """What is worthwhile, on Hopper."""
    return problem.capability == HOPPER and _worthwhile(problem)


def supports_mma(problem: Problem) -> bool:
    """What is worthwhile, on any GPU with these tensor cores (on Hopper too, where the ladder prefers the other)."""
    capable = problem.capability is not None and problem.capability >= mma_launch.AMPERE
    return capable and _worthwhile(problem)


def _passes(minimum: Capability) -> Iterable[Variant]:
    threads, blocks = scaled_passes.THREADS, NORM_RESIDENT_BLOCKS
    for dtype, turned in [(dtype, turned) for dtype in COUNTS for turned in (False, True)]:
        of = f"{dtype}{', turned' if turned else ''}"
        norms = scaled_passes.norm_function(dtype, turned=turned)
        yield pass_variant(f"norms of {of}", norms, scaled_passes.NORM_ARGUMENTS, threads, blocks, minimum)
        sample = scaled_passes.sample_function(dtype, turned=turned)
        yield pass_variant(
            f"sample of {of}", sample, scaled_passes.SAMPLE_ARGUMENTS, threads, blocks, minimum
        )
        yield pass_variant(
            f"residues of {of}",
            byte_planes.pass_function(dtype, turned=turned, residues=True),
            byte_planes.ARGUMENTS,
            byte_planes.THREADS,
            resident_blocks(turned, True),
            minimum,
        )
    for name, function, arguments in (
        ("norms of sums", scaled_passes.join_function(), scaled_passes.JOIN_ARGUMENTS),
        ("powers of two", scaled_passes.shift_function(), scaled_passes.SHIFT_ARGUMENTS),
    ):
        yield pass_variant(name, function, arguments, threads, 1, minimum)
    yield pass_variant(
        "beginning", scaled_passes.begin_function(), scaled_passes.BEGIN_ARGUMENTS, 1, 1, minimum
    )


def variants() -> Iterable[Variant]:
    """The products, that of the samples, and the passes."""
    for c_type in C_TYPES.values():
        yield variant(f"residues to {c_type}", Config("s8", "s8", c_type, plan_kind=RESIDUES))
    yield variant("the least of the samples", Config("s8", "s8", types.int32, least=True))
    yield from _passes(HOPPER)


def variants_mma() -> Iterable[Variant]:
    """The same with every tile."""
    for tile in mma_launch.TILES:
        shape = f"{tile.stages} × {tile.depth} bytes deep"
        for c_type in C_TYPES.values():
            product = mma.Config("s8", "s8", c_type, RESIDUES, tile)
            yield mma_launch.variant(f"residues to {c_type}, {shape}", product)
        least = mma.Config("s8", "s8", types.int32, tile=tile, least=True)
        yield mma_launch.variant(f"the least of the samples, {shape}", least)
    yield from _passes(mma_launch.AMPERE)


SPLIT_RESIDUES = GemmKernel(
    name="split-residues-wgmma",
    summary="floats as scaled integers by residues on the int8 tensor cores, where that is as accurate",
    supports=supports,
    launch=launch,
    halves=True,
    variants=variants,
)
SPLIT_RESIDUES_MMA = GemmKernel(
    name="split-residues-mma",
    summary="the same by mma.sync, for the GPUs that have int8 tensor cores but not Hopper's",
    supports=supports_mma,
    launch=functools.partial(launch, engine=MMA),
    variants=variants_mma,
)

assert PLAN_LENGTH * 8 <= PLAN_NBYTES
