"""The factors of a fused product, as the check sees them: a plain product of wider sides.

C = epilogue(T_a(op(A)) T_b(op(B))) is linear in what is multiplied, so it is the product of

    [ alpha R T_a(op(A)) | -alpha w R p | o | 1 | beta before ]
    by [ T_b(op(B)) F ; q F ; 1 ; u + offset ; identity ]

with R and F the factors of C's rows and columns, p and q its pairs of weight w, o and u its offsets. Terms that there
are not are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import zarr

from tilewright.kernels.cpu.loops import Allowance
from tilewright.kernels.cpu.thin import NUMPY_ELEMENTS
from tilewright.kernels.passes import transform_host
from tilewright.pipeline.check.sides import Done, Side, StoredSide, Work
from tilewright.pipeline.check.vectors import Probe
from tilewright.pipeline.plan.transform import (
    Epilogue,
    Fused,
    Transform,
    as_number,
    number_dtype,
    times,
    transformed,
)
from tilewright.pipeline.plan.transform import wide_dtype as finishing_dtype
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.worker.fusion import changes_of

EPILOGUE_ROUNDINGS = 8
"""Operations of an epilogue that round an element of C: as many terms more of its sum would round no less."""

BAND_ELEMENTS = 2**18
"""About so many elements of a block are transformed and scaled at once: 2 MiB in double precision."""

IDENTITY_SIDE = 256
"""Side of the blocks on the diagonal of an identity matrix."""

FUSED_NBYTES = 32
"""What an element that is transformed and scaled takes more than a stored one: two copies of complex numbers."""

_by_numpy = Allowance(NUMPY_ELEMENTS)
"""Elements that this process transforms before it loads the loop."""


@dataclass(frozen=True)
class FusedSide(StoredSide):
    """A stored matrix, transformed, with op applied, and its lines scaled."""

    transform: Transform | None = None
    row_scale: np.ndarray | None = None
    """One a row of the side, of what `number_dtype` gives, or a single one; so is the other, one a column."""
    column_scale: np.ndarray | None = None
    rounded: bool = True
    """Whether elements are rounded to what products are formed in before they are scaled."""
    largest_finite: float | None = None
    """What NaN and infinity are replaced by. In what C held they spoil one element of C each, and not a whole row as in
    a factor: by so large a number its group's sum may overflow there, and is not compared if it has."""
    left: bool = False
    """Whether it is a left factor, whose blocks' products with vectors may be added up in any order."""
    more_nbytes: ClassVar[int] = FUSED_NBYTES

    @property
    def sent_nbytes(self) -> int:
        vectors = [one.nbytes for one in (self.row_scale, self.column_scale) if one is not None]
        return super().sent_nbytes + sum(vectors) + (self.transform.nbytes if self.transform else 0)

    @property
    def transposed(self) -> FusedSide:
        return replace(
            self, transpose=not self.transpose, row_scale=self.column_scale, column_scale=self.row_scale
        )

    def bands(
        self, rows: slice, columns: slice, block: np.ndarray
    ) -> Iterator[tuple[slice, slice, np.ndarray]]:
        """Some lines of the block as they are stored, so that what is made of them stays in a cache, in memory that was
        used before: fresh memory takes longer than the loops. Not of a right factor's columns, in each block of which
        rounding errors are allowed for."""
        step = max(1, BAND_ELEMENTS // max(1, block.shape[1]))
        if self.transpose and not self.left:
            step = max(1, block.shape[0])
        for start in range(0, block.shape[0], step):
            band = block[start : start + step]
            lines = columns if self.transpose else rows
            part = slice(lines.start + start, lines.start + start + len(band))
            yield (rows, part, band) if self.transpose else (part, columns, band)

    def made(self, block: np.ndarray, rows: slice, columns: slice, probe: Probe) -> np.ndarray:
        block = self._transformed(block, rows, columns)
        if self.rounded:
            block = super().made(block, rows, columns, probe)
        elif self.transpose:
            block = block.T
        if self.row_scale is None and self.column_scale is None:
            return block if self.rounded else block.astype(probe.dtype)
        with np.errstate(all="ignore"):
            block = block.astype(probe.dtype)
            for scale, part in ((self.row_scale, (rows, np.newaxis)), (self.column_scale, columns)):
                if scale is not None:
                    block *= (scale if scale.ndim == 0 else scale[part]).astype(probe.dtype)
        if self.largest_finite is not None:
            block[~np.isfinite(block)] = self.largest_finite
        return block

    def _transformed(self, block: np.ndarray, rows: slice, columns: slice) -> np.ndarray:
        if self.transform is None:
            return block
        region = (columns, rows) if self.transpose else (rows, columns)
        if _by_numpy.takes(block.size):
            return transformed(self.transform, block, *region)
        target = np.empty(block.shape, self.transform.dtype)
        changes = changes_of(self.transform, block.dtype, region)
        transform_host.transform(np.ascontiguousarray(block), target, changes)
        return target

    def largest_of(self, block: np.ndarray, rows: slice, columns: slice) -> float:
        return super().largest_of(self._transformed(block, rows, columns), rows, columns)


@dataclass(frozen=True)
class VectorsSide:
    """A few columns, or rows, in memory."""

    values: np.ndarray
    """Of two dimensions."""
    name: str = "its vectors"

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def sent_nbytes(self) -> int:
        return self.values.nbytes

    @property
    def transposed(self) -> VectorsSide:
        return replace(self, values=self.values.T)

    def each_block(self, rows: slice, columns: slice, probe: Probe, work: Work[Done]) -> Iterator[Done]:
        block = self.values[rows, columns].astype(probe.dtype)
        if block.size:
            yield work(slice(0, block.shape[0]), slice(0, block.shape[1]), block)


@dataclass(frozen=True)
class IdentitySide:
    """An identity matrix, of which only blocks on the diagonal are made: the others hold nothing to be added up."""

    side: int
    name: str = "an identity matrix"
    nbytes: int = 0
    sent_nbytes: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.side, self.side

    @property
    def transposed(self) -> IdentitySide:
        return self

    def each_block(self, rows: slice, columns: slice, probe: Probe, work: Work[Done]) -> Iterator[Done]:
        first, last = max(rows.start, columns.start), min(rows.stop, columns.stop)
        for start in range(first, last, IDENTITY_SIDE):
            stop = min(start + IDENTITY_SIDE, last)
            block = np.eye(stop - start, dtype=probe.dtype)
            down, across = (slice(start - side.start, stop - side.start) for side in (rows, columns))
            yield work(down, across, block)


@dataclass(frozen=True)
class JoinedSide:
    """Matrices side by side (axis 1), or one above the other (axis 0)."""

    parts: tuple[Any, ...]
    """Sides."""
    axis: int

    @property
    def shape(self) -> tuple[int, int]:
        length = sum(part.shape[self.axis] for part in self.parts)
        other = self.parts[0].shape[1 - self.axis]
        return (other, length) if self.axis else (length, other)

    @property
    def name(self) -> str:
        return str(self.parts[0].name)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def sent_nbytes(self) -> int:
        return sum(part.sent_nbytes for part in self.parts)

    @property
    def transposed(self) -> JoinedSide:
        return JoinedSide(tuple(part.transposed for part in self.parts), 1 - self.axis)

    def each_block(self, rows: slice, columns: slice, probe: Probe, work: Work[Done]) -> Iterator[Done]:
        whole = (rows, columns)[self.axis]
        for part, inside, before in self._within(whole):

            def moved(down: slice, across: slice, block: np.ndarray, by: int = before) -> Done:
                if self.axis:
                    return work(down, slice(across.start + by, across.stop + by), block)
                return work(slice(down.start + by, down.stop + by), across, block)

            region = (rows, inside) if self.axis else (inside, columns)
            yield from part.each_block(*region, probe, moved)

    def _within(self, stretch: slice) -> Iterator[tuple[Side, slice, int]]:
        """The parts that lie in a stretch of the side that is joined: what of each, and how far from the stretch's
        start that begins."""
        first = 0
        for part in self.parts:
            length = part.shape[self.axis]
            start, stop = max(stretch.start, first), min(stretch.stop, first + length)
            if start < stop:
                yield part, slice(start - first, stop - first), start - stretch.start
            first += length

    def step(self, line_nbytes: int, tasks: int) -> int:
        """As `StoredSide.step`."""
        return min(part.step(line_nbytes, tasks) for part in self.parts if isinstance(part, StoredSide))

    def largest(self, rows: slice) -> float:
        """As `StoredSide.largest`, of what is multiplied."""
        part = self.parts[0]
        if not self.axis:
            rows = slice(min(rows.start, part.shape[0]), min(rows.stop, part.shape[0]))
        return float(part.largest(rows)) if rows.start < rows.stop else 0.0


@dataclass(frozen=True)
class FusedProduct:
    """The sides whose product a fused one is."""

    left: JoinedSide
    right: JoinedSide
    terms: int
    """Products that an element of C is a sum of, and roundings of its epilogue."""
    gain: float
    """The most that the epilogue multiplies a sum by; 1 if that is less."""
    compute: np.dtype
    """What C's elements are formed in."""


def inner_terms(fused: Fused, n: int, k: int) -> int:
    """The inner side of the product that C is of such factors."""
    epilogue = fused.epilogue
    if epilogue is None:
        return k
    return k + 3 + (n if epilogue.beta else 0)


def fused_product(
    factors: tuple[StoredArray, StoredArray],
    transposed: tuple[bool, bool],
    fused: Fused,
    dtype: np.dtype,
    sums: np.dtype,
    before: zarr.Array[Any] | None,
) -> FusedProduct:
    """The product of these factors as one without transforms and epilogue. dtype: C's. sums: what it is summed in."""
    epilogue = fused.epilogue or Epilogue()
    compute = finishing_dtype(dtype, sums)
    number = number_dtype(compute)
    sides = [StoredSide(array, transpose) for array, transpose in zip(factors, transposed, strict=True)]
    (m, k), n = sides[0].shape, sides[1].shape[1]

    def of(value: Any) -> np.ndarray | None:
        return None if value is None else np.asarray(value).astype(number)

    with np.errstate(all="ignore"):
        rows, columns = of(epilogue.row_factors), of(epilogue.column_factors)
        alpha = as_number(epilogue.alpha, number)
        down = np.asarray(alpha if rows is None else times(alpha, rows))
        scaled = epilogue.alpha != 1 or rows is not None
        scale = down if scaled else None
        left: list[Any] = [FusedSide(*_stored(sides[0]), fused.transforms[0], scale, left=True)]
        right: list[Any] = [FusedSide(*_stored(sides[1]), fused.transforms[1], None, columns)]
        across = np.ones(n, number) if columns is None else columns
        of_left, of_right = [], []
        if epilogue.has_pairs:
            weight = as_number(epilogue.pair_weight, number)
            of_left.append(-times(times(weight, down), of(epilogue.row_pairs)))
            of_right.append(times(across, of(epilogue.column_pairs)))
        if epilogue.row_offsets is not None:
            of_left.append(of(epilogue.row_offsets))
            of_right.append(np.ones(n, number))
        if epilogue.column_offsets is not None or epilogue.offset:
            offset = as_number(epilogue.offset, number)
            of_left.append(np.ones(m, number))
            more = of(epilogue.column_offsets)
            of_right.append(np.full(n, offset) if more is None else more + offset)
        gain = float(np.max(np.abs(down), initial=0.0)) * float(np.max(np.abs(across), initial=0.0))
    if of_left:
        left.append(VectorsSide(np.column_stack(of_left)))
        right.append(VectorsSide(np.stack(of_right)))
    if epilogue.beta and before is not None:
        beta = np.asarray(as_number(epilogue.beta, number))
        most = None if dtype.kind in "iu" else float(np.finfo(dtype).max)
        left.append(FusedSide(before, False, None, beta, rounded=False, largest_finite=most))
        right.append(IdentitySide(n))
    roundings = EPILOGUE_ROUNDINGS if fused.epilogue is not None else 0
    return FusedProduct(
        JoinedSide(tuple(left), 1),
        JoinedSide(tuple(right), 0),
        k + len(of_left) + roundings,
        max(1.0, gain) if np.isfinite(gain) else 1.0,
        compute,
    )


def _stored(side: StoredSide) -> tuple[StoredArray, bool]:
    return side.array, side.transpose
