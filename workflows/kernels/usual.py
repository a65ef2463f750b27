"""The kernels that usual jobs need on a GPU: what the code of these jobs asks for on one that is only described.

What is written here is which jobs are usual. A process asks for one GPU (`described.describe`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from tilewright.kernels.bfloat16 import BFLOAT16, dtype_name
from tilewright.kernels.float8 import FLOAT8
from tilewright.kernels.gemm.check import result_dtype
from tilewright.kernels.gemm.workspace import Parent, workspace_nbytes
from tilewright.kernels.gpu.recording import Rehearsal
from tilewright.kernels.shipped.described import DescribedArray, DescribedGpu, described
from tilewright.pipeline.plan.inputs import Limits, StoredMatrix, accumulator_dtype
from tilewright.pipeline.plan.memory import LINE_NBYTES, Lines
from tilewright.pipeline.plan.product import MatmulPlan, plan_tiles
from tilewright.pipeline.plan.slabs import cuts_of
from tilewright.pipeline.plan.told import Product
from tilewright.pipeline.worker.panels import Placed
from tilewright.pipeline.worker.units import mirrored_pieces, prepare_job

DTYPES = tuple(np.dtype(code) for code in ("f4", "f8", "f2", "i1", "u1", "i2", "i4", "i8", "c8", "c16"))
"""Of both factors, in pipelines; of `tilewright.kernels.matmul` bfloat16 and float8 too."""
SIDES = (
    *(2**power for power in range(8, 17)),
    *(384, 640, 768, 1500, 2000, 3000, 5000, 6000, 10000, 12000, 20000, 50000),
    *(999, 2001, 4097, 10001),
)
"""Of square matrices. Which tiles a kernel has depends on how many there are for a GPU, and which of its ways to load
them on whether lines begin at multiples of 16 bytes: those of odd sides do not."""
CHUNK_SIDES = (512, 1024, 2048, 4096)
"""Of their chunks, and of those of the product, of whole ones of which tiles consist."""
LAYOUTS = (
    (False, False, False),
    (True, False, False),
    (False, True, False),
    (True, False, True),
    (False, True, True),
)
"""Which of A and B is stored transposed, and whether B is A, so that the product is symmetric."""
DEVICE_NBYTES = 16 << 30
"""What a plan may use: that of small GPUs, so that large products are cut into several tiles."""
TEXT_NBYTES = 1 << 30

GPUS = {
    (8, 0): ((108,), 166912),
    (8, 6): ((84, 46), 101376),
    (8, 9): ((142, 58), 101376),
    (9, 0): ((132, 114), 232448),
    (10, 0): ((148,), 232448),
    (12, 0): ((188, 170), 101376),
}
"""By compute capability: the multiprocessors of usual models, and the most shared memory of a block in bytes."""


@dataclass(frozen=True)
class Usual:
    """One kind of job, by a name for reports."""

    name: str
    ask: Callable[[], None]
    """Asks for its kernels on the GPU of this process."""


def gpus_of(capability: tuple[int, int]) -> list[DescribedGpu]:
    counts, shared = GPUS[capability]
    return [DescribedGpu(capability, count, shared) for count in counts]


def usual_jobs() -> Iterator[Usual]:
    """All of them; the quickest to be missed first."""
    for dtype in DTYPES:
        yield Usual(f"matmul {dtype_name(dtype)}", partial(_ask_for_products, dtype))
    for dtype in (BFLOAT16, *FLOAT8):
        yield Usual(f"matmul {dtype_name(dtype)}", partial(_ask_for_product_of_arrays, dtype))
    yield Usual("hashes", _ask_for_hashes)
    yield Usual("histograms", _ask_for_histograms)
    yield Usual("dot", _ask_for_dots)
    yield Usual("decoding", _ask_for_decoding)
    yield Usual("duplicates", _ask_for_signatures)
    yield Usual("tokens", _ask_for_tokens)


@dataclass(frozen=True)
class Needed:
    """A kernel that a job needs."""

    job: str
    """The first that asked for it."""
    kernel: Any


def kernels_of(jobs: Iterable[Usual]) -> dict[str, Needed]:
    """The kernels that jobs ask for on this process's GPU, each once, by what they are shipped under."""
    gpu = described()
    assert gpu is not None, "the process has described one"
    found: dict[str, Needed] = {}
    for job in jobs:
        before = len(gpu.kernels)
        job.ask()
        for kernel in dict.fromkeys(gpu.kernels[before:]):
            key = kernel.shipped_key()
            if key is not None:
                found.setdefault(key, Needed(job.name, kernel))
    return found


def _ask_for_products(dtype: np.dtype) -> None:
    """Products of square matrices, either of which may be transposed, and of one by its own transpose, checked as by
    default; and the hashes of their panels."""
    _ask_for_hashes()
    for side, unit in sorted({(side, min(side, unit)) for side in SIDES for unit in CHUNK_SIDES}):
        for transpose_a, transpose_b, symmetric in LAYOUTS:
            _ask_for_plan(_plan(dtype, side, unit, transpose_a, transpose_b, symmetric))


def _plan(
    dtype: np.dtype, side: int, unit: int, transpose_a: bool, transpose_b: bool, symmetric: bool
) -> MatmulPlan:
    matrix = StoredMatrix(side, side, dtype, (unit, unit), plain=True)
    c_dtype = result_dtype(dtype, dtype, k=side)
    sums = accumulator_dtype(c_dtype)
    workspace = partial(
        workspace_nbytes,
        dtype=sums,
        precision="full",
        parent=Parent(side, side, side, transpose_a, transpose_b),
        operands=(dtype, dtype),
    )
    limits = Limits(1, DEVICE_NBYTES, workspace_nbytes=workspace, line_nbytes=LINE_NBYTES)
    return plan_tiles(
        *(matrix, matrix, c_dtype, (unit, unit), limits),
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        symmetric=symmetric,
    )


def _ask_for_plan(plan: MatmulPlan) -> None:
    """What a GPU's unit prepares for the tiles of a plan, and launches once they are multiplied."""
    from tilewright.kernels.passes import contents_device
    from tilewright.kernels.passes.transpose_device import transpose

    nothing = cast(Any, None)
    product = Product(nothing, nothing, nothing, plan, "cuda", "full", "")
    layout, queue = plan.layout, Rehearsal(0)
    (start, stop), *_ = plan.panels()
    last = list(plan.panels())[-1]
    depths = {stop - start, last[1] - last[0]}
    shapes = {(tile.rows, tile.columns, plan.on_diagonal(tile)): tile for tile in plan.tiles()}
    for tile in shapes.values():
        target = _placed(plan.sums, (tile.rows, tile.columns), layout.c())
        cuts = cuts_of(plan, tile.rows)
        for depth in depths:
            a = _placed(plan.a_dtype, layout.a_shape(tile.rows, depth), layout.a())
            diagonal = plan.on_diagonal(tile)
            b = a if diagonal else _placed(plan.b_dtype, layout.b_shape(tile.columns, depth), layout.b())
            prepare_job(product, a, b, target, 0, diagonal, cuts if len(cuts) > 1 else ())
        if plan.symmetric and plan.on_diagonal(tile):
            for below, above in mirrored_pieces(target, plan.cell_rows):
                same = below == above
                transpose(_array(target, below), _array(target, above), queue, swap=False, same=same)
    for dtype in {np.dtype(plan.a_dtype), np.dtype(plan.b_dtype), plan.stored}:
        contents_device.KERNELS.prepare(dtype)


def _placed(dtype: Any, shape: tuple[int, int], lines: Lines) -> Placed:
    flat = DescribedArray((shape[0] * lines.pitch(shape[1]),), None, dtype)
    return Placed(flat, shape, lines)


def _array(tile: Placed, piece: tuple[slice, slice]) -> Any:
    from tilewright.kernels.gpu.device_array import as_device_array

    return as_device_array(tile.cut(*piece))


def _ask_for_product_of_arrays(dtype: np.dtype) -> None:
    """`tilewright.matmul` of arrays that lie by rows, either of them transposed or none."""
    from tilewright.kernels.gemm.product import prepare

    for side in SIDES:
        a, b, out = (
            DescribedArray((side, side), None, each, gpu_data=place << 40)
            for place, each in enumerate((dtype, dtype, result_dtype(dtype, dtype)), 1)
        )
        for transposes in ((False, False), (True, False), (False, True)):
            prepare(a, b, out, transpose_a=transposes[0], transpose_b=transposes[1])


def _ask_for_hashes() -> None:
    from tilewright.kernels.passes import xxh3_device

    for unit in xxh3_device.UNITS:
        xxh3_device.KERNELS.prepare(unit)


def _ask_for_histograms() -> None:
    from tilewright.kernels.histograms.documents import LARGE, launch_documents
    from tilewright.kernels.histograms.portable import launch_portable
    from tilewright.kernels.histograms.select import MANY_WIDE, add_counts
    from tilewright.kernels.histograms.tokens import BIGRAM, KINDS
    from tilewright.kernels.records import device_json

    queue = Rehearsal(0)
    text = DescribedArray((TEXT_NBYTES,), None, np.uint8)
    offsets = DescribedArray((3,), None, np.int64)
    for kind in KINDS.values():
        counts = DescribedArray((kind.bins,), None, np.int64)
        add_counts(text, 0, TEXT_NBYTES, 0, TEXT_NBYTES, kind, counts, queue)
        rows = DescribedArray((2, kind.bins), None, np.int64)
        if kind.code < BIGRAM:
            launch_documents(text, offsets, 2 * LARGE, True, kind, rows, queue)
        else:
            launch_portable(MANY_WIDE, text, offsets, 0, TEXT_NBYTES, kind, rows, queue)
    device_json.prepare()


def _ask_for_tokens() -> None:
    """Words, lines, and n-grams of each unit, whose kernels take any n."""
    from tilewright.kernels.histograms.device_token_counting import prepare
    from tilewright.kernels.histograms.token_kinds import UNITS, TokenKind

    for name, unit, n in (
        ("word", "word", 1),
        ("line", "line", 1),
        *((f"ngram:3:{unit}", unit, 3) for unit in UNITS),
    ):
        prepare(TokenKind(name, unit, n))


def _ask_for_dots() -> None:
    from tilewright.kernels.dots.device import in_two_passes

    for dtype in DTYPES:
        vector, out = (DescribedArray((length,), None, dtype) for length in (1 << 20, 1))
        for conjugate in (False, True)[: 1 + (dtype.kind == "c")]:
            in_two_passes(vector, vector, conjugate, out, Rehearsal(0))


def _ask_for_signatures() -> None:
    from tilewright.kernels.choices import HASHES, SHINGLES
    from tilewright.kernels.duplicates.device_signing import prepare
    from tilewright.kernels.duplicates.signing import Signing
    from tilewright.kernels.histograms.token_kinds import TokenKind

    for unit in SHINGLES:
        for casefold in (False, True):
            for name in HASHES:
                prepare(Signing(TokenKind("shingle", unit, 5, casefold), name, "affine32", 128, 1, 21, 6))


def _ask_for_decoding() -> None:
    from tilewright.kernels.decoding import launching

    launching.prepare()
