"""What a worker's unit does to panels before they are multiplied, and to tiles before they are stored: what units
share, and the CPU's way. The GPU's is in `gpu_fusion.py`.

Panels stay in the caches as they are stored. One *scratch* panel of A, and one of B, hold what the panel that is just
being multiplied becomes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from tilewright.kernels.cpu.loops import cpu_threads
from tilewright.kernels.passes import transform_host
from tilewright.kernels.passes.transform_host import (
    BUT_EQUAL,
    BUT_NAN,
    EVERY,
    PRESENCE,
    SQUARES,
    VALUES,
    Changes,
)
from tilewright.pipeline.plan.pairs import Form, Pairwise, combined
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.plan.told import Product
from tilewright.pipeline.plan.transform import Epilogue, Transform, finished, missing_element
from tilewright.pipeline.worker.panels import Placed, shape_of

Region: TypeAlias = tuple[slice, slice]
"""Rows and columns of an array."""
Fill: TypeAlias = Callable[[Placed], None]
"""Brings what C held in a tile's place into a buffer."""

FINISHED_NBYTES = 2**19
"""Bytes of sums that a thread of the CPU finishes at once: with what NumPy makes of them they stay in a cache."""


@dataclass(frozen=True)
class PackedPanel:
    """A panel as a CPU multiplies bytes (`centred.py`)."""

    pieces: list[Any]
    """Along k: `centred_bytes.Packed`."""


Scratch: TypeAlias = Placed | PackedPanel
"""What a panel is multiplied as."""


class Fusion(Protocol):
    """The transforms and the epilogue of a product, on one device."""

    def scratch(self, operand: int, panel: Placed) -> Any:
        """The `Scratch` of a transformed panel of A (0) or B (1); the panel itself where that has no transform."""

    def transform(self, operand: int, panel: Placed, region: Region, form: Form = "values") -> Any:
        """Begin to transform a panel, which holds this region of its array; returns its scratch panel. What is
        multiplied next sees all of it. form: what is made of the results."""

    def finishing(self, tile: Placed, region: Region, before: Fill) -> Any:
        """A context that gives the finished tile of C, of which the sums over all of k are in ``tile``, and in the
        `accumulators` behind it; until it ends nobody else gets the same buffer. ``before`` is called where what C held
        is added."""

    def close(self) -> None: ...


FORMS: dict[Form, int] = {"values": VALUES, "squares": SQUARES, "presence": PRESENCE}
"""What kernels of the host call them."""


def accumulators(plan: MatmulPlan, tile: Placed) -> list[Placed]:
    """The sums that a tile is made of, whose buffer holds them one behind the other: for a plain product the tile."""
    if plan.accumulators == 1:
        return [tile]
    sides = plan.tile_rows, plan.tile_columns
    size = plan.layout.c_size(*sides)
    starts = (plan.layout.plane(*sides, place) for place in range(plan.accumulators))
    return [Placed(tile.flat[start : start + size], tile.shape, tile.lines) for start in starts]


def changes_of(transform: Transform, stored: np.dtype, region: Region, form: Form = "values") -> Changes:
    """What becomes of a region of a matrix of this dtype."""
    rows, columns = region
    missing = missing_element(transform, stored)
    there = BUT_NAN if transform.missing == "nan" else EVERY if missing is None else BUT_EQUAL
    return Changes(
        _part(transform.row_offsets, rows),
        _part(transform.column_offsets, columns),
        transform.offset,
        _part(transform.row_factors, rows),
        _part(transform.column_factors, columns),
        there,
        missing,
        transform.conjugate,
        FORMS[form],
    )


def pieces_of_all(*matrices: Placed) -> list[Region]:
    """Matrices of one shape without the padding between their cells: rows and columns of blocks whose lines are
    contiguous in all of them."""
    cut = next((one for one in matrices if one.lines.apart), matrices[0])
    rows, columns = cut.shape
    return cut.pieces(slice(0, rows), slice(0, columns))


def within(region: Region, piece: Region) -> Region:
    """Where a piece lies that is counted from the first row and column of a region."""
    rows, columns = (
        slice(whole.start + part.start, whole.start + part.stop)
        for whole, part in zip(region, piece, strict=True)
    )
    return rows, columns


def _part(vector: np.ndarray | None, part: slice) -> np.ndarray | None:
    return None if vector is None else vector[part]


class Buffers:
    """The buffers that a fusion needs, as the plan counts them: allocated at first use, once."""

    def __init__(self, plan: MatmulPlan, allocate: Callable[[int, np.dtype], Any]) -> None:
        self.plan, self._allocate = plan, allocate
        self._made: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.finishing = threading.Lock()
        """Held by whoever uses the buffers of a tile's size."""

    def operand(self, which: int, panel: Placed) -> Placed:
        """The scratch panel of an operand, for a panel of this shape."""
        plan = self.plan
        layout, depth = plan.fused_layout, min(plan.panel_depth, plan.k)
        size = layout.b_size(plan.tile_columns, depth) if which else layout.a_size(plan.tile_rows, depth)
        flat = self._buffer("ab"[which], size, plan.operands[which])
        return Placed(flat, panel.shape, layout.b() if which else layout.a())

    def tile(self, sums: Placed) -> Placed:
        """Where the finished tile goes: where its sums are, if it has their size."""
        plan = self.plan
        if plan.stored.itemsize == plan.sums.itemsize:
            flat = sums.flat if plan.stored == plan.sums else sums.flat.view(plan.stored)
            return Placed(flat, sums.shape, sums.lines)
        lines = plan.fused_layout.c()
        size = plan.fused_layout.c_size(plan.tile_rows, plan.tile_columns)
        return Placed(self._buffer("tile", size, plan.stored), sums.shape, lines)

    def before(self, sums: Placed) -> Placed:
        """For what C held in a tile's place."""
        plan = self.plan
        size = plan.before_layout.c_size(plan.tile_rows, plan.tile_columns)
        flat = self._buffer("before", size, np.dtype(plan.before_dtype))
        return Placed(flat, sums.shape, plan.before_layout.c())

    def _buffer(self, name: str, size: int, dtype: np.dtype) -> Any:
        with self._lock:
            if name not in self._made:
                self._made[name] = self._allocate(size, dtype)
            return self._made[name]

    @property
    def apart(self) -> bool:
        """Whether a tile is finished into, or by, a buffer that all tiles share."""
        return bool(self.plan.before_dtype) or self.plan.stored.itemsize != self.plan.sums.itemsize

    def packed(self, which: int, nbytes: int) -> Any:
        """For a panel of an operand that is packed."""
        return self._buffer("ab"[which], nbytes, np.dtype(np.uint8))

    def free(self) -> None:
        with self._lock:
            self._made.clear()


class HostFusion:
    """The CPU transforms and finishes in a few bands at once, on threads of its own."""

    def __init__(self, product: Product, allocate: Callable[[int, np.dtype], Any]) -> None:
        self._product, self._plan = product, product.plan
        self._buffers = Buffers(product.plan, allocate)
        self._pool = ThreadPoolExecutor(cpu_threads(), "tilewright-fuse")

    def scratch(self, operand: int, panel: Placed) -> Scratch:
        return self._buffers.operand(operand, panel) if self._of(operand) is not None else panel

    def transform(self, operand: int, panel: Placed, region: Region, form: Form = "values") -> Scratch:
        transform = self._of(operand)
        if transform is None:
            return panel
        place = self._buffers.operand(operand, panel)
        for piece in pieces_of_all(panel, place):
            target = place.cut(*piece)
            made = target if target.flags.c_contiguous else np.empty_like(target, order="C")
            changes = changes_of(transform, panel.dtype, within(region, piece), form)
            transform_host.transform(np.ascontiguousarray(panel.cut(*piece)), made, changes, self._pool)
            if made is not target:  # where there is padding between the cells of a line, as for a GPU
                target[...] = made
        return place

    def _of(self, operand: int) -> Transform | None:
        return self._product.fused.transforms[operand]

    @contextmanager
    def finishing(self, tile: Placed, region: Region, before: Fill) -> Iterator[Placed]:
        epilogue, pairwise = self._product.fused.epilogue, self._product.fused.pairwise
        if pairwise is not None:
            planes = accumulators(self._plan, tile)
            target = self._buffers.tile(tile)
            for piece in pieces_of_all(*planes, target):
                sums = [plane.cut(*piece) for plane in planes]
                combine(pairwise, sums, target.cut(*piece), within(region, piece), self._pool)
            yield target
            return
        if epilogue is None:
            yield tile
            return
        with self._buffers.finishing if self._buffers.apart else _NO_LOCK:
            target = held = self._buffers.tile(tile)
            if epilogue.beta:
                held = self._buffers.before(tile)
                before(held)
            for piece in pieces_of_all(tile, target, held):
                was = held.cut(*piece) if epilogue.beta else None
                sums, part = tile.cut(*piece), within(region, piece)
                finish(epilogue, sums, target.cut(*piece), part, was, self._pool)
            yield target

    def close(self) -> None:
        self._pool.shutdown()
        self._buffers.free()


class NoFusion:
    """Of a product that is nothing but that."""

    def scratch(self, operand: int, panel: Placed) -> Placed:
        return panel

    def transform(self, operand: int, panel: Placed, region: Region, form: Form = "values") -> Placed:
        return panel

    @contextmanager
    def finishing(self, tile: Placed, region: Region, before: Fill) -> Iterator[Placed]:
        yield tile

    def close(self) -> None:
        """It holds nothing."""


class _NoLock:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


_NO_LOCK = _NoLock()


def finish(
    epilogue: Epilogue,
    sums: np.ndarray,
    target: np.ndarray,
    region: Region,
    before: np.ndarray | None = None,
    pool: ThreadPoolExecutor | None = None,
) -> None:
    """Write what becomes of sums, which are those of a region of C: `transform.finished`, band by band.

    sums, target, before: rows × columns, any strides. target: of C's dtype, or float32 for float16; written. It may be
    where the sums are, of elements of the same size.
    """
    rows, columns = region
    height, width = shape_of(region)
    step = max(1, FINISHED_NBYTES // max(1, width * sums.itemsize))

    def work(start: int) -> None:
        band = slice(start, min(start + step, height))
        lines = slice(rows.start + band.start, rows.start + band.stop)
        held = None if before is None else before[band]
        target[band] = finished(epilogue, sums[band], lines, columns, target.dtype, held)

    bands = range(0, height, step) if width else range(0)
    for _ in map(work, bands) if pool is None else pool.map(work, bands):
        pass


def combine(
    pairwise: Pairwise,
    sums: Sequence[np.ndarray],
    target: np.ndarray,
    region: Region,
    pool: ThreadPoolExecutor | None = None,
) -> None:
    """Write what becomes of the sums of a region of C, in the order of ``pairwise.forms``: `pairs.combined`, band by
    band.

    sums, target: rows × columns, any strides. target: of C's dtype, or float32 for float16; written. It may be where
    one of the sums is, of elements of the same size.
    """
    rows, columns = region
    height, width = shape_of(region)
    step = max(1, FINISHED_NBYTES // max(1, width * sum(one.itemsize for one in sums)))

    def work(start: int) -> None:
        band = slice(start, min(start + step, height))
        lines = slice(rows.start + band.start, rows.start + band.stop)
        parts = {forms: one[band] for forms, one in zip(pairwise.forms, sums, strict=True)}
        target[band] = combined(pairwise, parts, lines, columns, target.dtype)

    bands = range(0, height, step) if width else range(0)
    for _ in map(work, bands) if pool is None else pool.map(work, bands):
        pass
