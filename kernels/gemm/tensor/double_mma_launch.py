"""Launching the float64 ``mma.sync`` kernel with a given tile, for whole products and for thin ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilewright.kernels.gemm.base import Capability
from tilewright.kernels.gemm.cores.repitch import Matrix, lines_aligned
from tilewright.kernels.gemm.tensor.double_mma import ITEM, Layout, Tile, compiled
from tilewright.kernels.gpu.device_choice import capability, current_device
from tilewright.kernels.gpu.launch import enqueue
from tilewright.kernels.numbers import ceil_div

NATIVE: Capability = (9, 0)
"""The first capability with float64 matrix instructions larger than 8 × 8 × 4."""
CAPABILITIES = ((8, 0), (9, 0), (10, 0))
"""Where float64 tensor cores are more than a compatibility feature, and blocks may have 128 KB of shared
memory."""


def contiguous(strides: tuple[int, int], rows: int, columns: int, itemsize: int) -> tuple[bool, int] | None:
    """``(by_rows, pitch)`` of a matrix, pitch in bytes between its lines; None where neither side is
    contiguous.

    ``strides`` are in bytes. A single row or column lies either way; the way whose lines are longer is taken.
    """
    by_rows = strides[1] == itemsize or columns == 1
    by_columns = strides[0] == itemsize or rows == 1
    if by_rows and not (by_columns and columns == 1):
        return True, strides[0]
    return (False, strides[1]) if by_columns else None


def fitting(tile: Tile, layout: Layout) -> Tile:
    """The tile, with fragments of half the depth where addresses leave too few registers for whole ones.

    With 64 sums a thread, two sets of fragments of eight k just fit. Copies by halves, and lines along k on both
    sides, need more addresses, which ptxas would otherwise spill.
    """
    crowded = tile.m * tile.n * layout.parts // tile.threads >= 64 and tile.step == 8
    simple = layout.a_whole and layout.b_whole and not (layout.a_along_k and layout.b_along_k)
    return replace(tile, step=4) if crowded and not simple else tile


def enqueue_tile(
    a: Matrix,
    b: Matrix,
    c: Matrix,
    accumulate: bool,
    stream: Any,
    tile: Tile,
    splits: int = 1,
    padded: tuple[bool, bool] = (False, False),
    *,
    lower: bool = False,
) -> None:
    """Enqueue ``c (+)= a b`` with a tile. ``c`` lies by rows.

    With several ``splits``, slabs of k are dealt out to them, and the sum of split r goes to rows r m to (r + 1) m of
    ``c``. ``padded`` says of A and of
    B that their lines are aligned and go on with zeros to the end of a chunk. lower: as ``GemmKernel`` says.
    """
    (m, k), n = a.shape, c.shape[1]
    itemsize = a.dtype.itemsize
    parts = itemsize // ITEM
    native = capability(current_device()) >= NATIVE  # type: ignore[operator]
    a_by_rows, a_pitch = contiguous(a.strides, m, k, itemsize)  # type: ignore[misc]
    b_by_rows, b_pitch = contiguous(b.strides, k, n, itemsize)  # type: ignore[misc]
    c_pitch = c.strides[0]
    layout = Layout(
        parts=parts,
        a_along_k=a_by_rows,
        b_along_k=not b_by_rows,
        a_whole=padded[0] or a.whole(a_by_rows),
        b_whole=padded[1] or b.whole(b_by_rows),
        c_whole=lines_aligned(c.pointer, c_pitch, m * splits),
        native=native,
        dealt=splits > 1,
    )
    tile = fitting(tile, layout)
    grid = (ceil_div(m, tile.m) * ceil_div(n, tile.n), splits)
    enqueue(
        compiled(tile, layout),
        grid,
        tile.threads,
        stream,
        tile.shared_nbytes(parts),
        a.pointer,
        a_pitch // ITEM,
        b.pointer,
        b_pitch // ITEM,
        c.pointer,
        c_pitch // ITEM,
        m * c_pitch // ITEM,
        m,
        n,
        k,
        accumulate,
        lower,
    )
