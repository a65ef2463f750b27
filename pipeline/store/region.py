"""A region of an array as the parts of chunks that it touches, shared by reading and writing; arrays of more than two
dimensions as matrices, whose regions are boxes of the array; and arrays some of whose elements a mask declares
missing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import zarr

from tilewright.kernels.numbers import ceil_div

SCRAP_NBYTES = 2**20
"""Size of the buffer through which whole rows pass where only a part of each is wanted: it stays in cache."""


class ChunkPart(NamedTuple):
    """The part of one chunk that a region wants."""

    chunk: tuple[int, ...]
    inside: tuple[slice, ...]
    """Where it lies in the chunk."""
    target: tuple[slice, ...]
    """Where it goes in the region."""


def chunks_in(region: Sequence[slice], chunks: tuple[int, ...]) -> Iterator[ChunkPart]:
    """The chunks that a region touches, in row order; none for an empty region."""
    if any(part.stop <= part.start for part in region):
        return
    axes = []
    for part, side in zip(region, chunks, strict=True):
        axis = []
        for index in range(part.start // side, (part.stop - 1) // side + 1):
            first, last = max(part.start, index * side), min(part.stop, (index + 1) * side)
            inside = slice(first - index * side, last - index * side)
            axis.append((index, inside, slice(first - part.start, last - part.start)))
        axes.append(axis)
    if not axes:  # an array without dimensions is one chunk
        yield ChunkPart((), (), ())
        return
    places, insides, targets = zip(*(zip(*axis, strict=True) for axis in axes), strict=True)
    yield from map(
        ChunkPart, itertools.product(*places), itertools.product(*insides), itertools.product(*targets)
    )


def pieces_of_whole(region: Sequence[slice], unit: tuple[int, ...] | None) -> Iterator[ChunkPart]:
    """The parts of a region of an array that is one chunk, each in one rectangle of a grid; None: the region itself."""
    if unit is None:
        if all(part.start < part.stop for part in region):
            target = tuple(slice(0, part.stop - part.start) for part in region)
            yield ChunkPart((0,) * len(region), tuple(region), target)
        return
    for piece in chunks_in(region, unit):
        place = (
            slice(whole.start + part.start, whole.start + part.stop)
            for whole, part in zip(region, piece.target, strict=True)
        )
        yield ChunkPart((0,) * len(region), tuple(place), piece.target)


def chunk_name(chunk: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, chunk)) + ")"


@dataclass(frozen=True)
class FlatSide:
    """Axes of an array that are flattened, the last one fastest, into one side of a matrix.

    >>> FlatSide((4, 180, 360), (1, 45, 360)).unit  # lines of 45 rows
    16200
    >>> FlatSide((4, 180, 360), (2, 45, 90)).unit  # a chunk lies in 45 × 2 stretches: two maps are the least whole ones
    129600
    """

    lengths: tuple[int, ...]
    chunks: tuple[int, ...]
    """The sides of a chunk along these axes, all 1 or more."""

    @property
    def length(self) -> int:
        return math.prod(self.lengths)

    @property
    def _cut(self) -> int:
        """The first axis along which a chunk has more than one element; the last where there is none."""
        return next((axis for axis, side in enumerate(self.chunks) if side > 1), len(self.chunks) - 1)

    @property
    def is_regular(self) -> bool:
        """Whether a chunk is one stretch of the side, all but the last of one length, as it is of an array's own
        axis: so its elements along the side lie as they would in a chunk of a matrix."""
        cut = self._cut
        even = math.prod(self.lengths[:cut]) == 1 or self.lengths[cut] % self.chunks[cut] == 0
        return even and self.chunks[cut + 1 :] == self.lengths[cut + 1 :]

    @property
    def unit(self) -> int:
        """The shortest length at whose multiples no chunk is cut."""
        if self.is_regular:
            return math.prod(self.chunks)
        held = [min(side, length) for side, length in zip(self.chunks, self.lengths, strict=True)]
        cut = next((axis for axis, side in enumerate(held) if side > 1), len(held) - 1)
        even = math.prod(self.lengths[:cut]) == 1 or self.lengths[cut] % held[cut] == 0
        return max(1, (held[cut] if even else self.lengths[cut]) * math.prod(self.lengths[cut + 1 :]))

    def place(self, index: int) -> tuple[int, ...]:
        """Of a regular side: the indices of a chunk, along the axes, by its index along the side."""
        cut = self._cut
        found = [0] * len(self.lengths)
        counts = [*self.lengths[:cut], ceil_div(self.lengths[cut], self.chunks[cut])]
        for axis in range(cut, 0, -1):
            index, found[axis] = divmod(index, counts[axis])
        found[0] = index
        return tuple(found)

    def boxes(self, part: slice) -> Iterator[tuple[slice, tuple[slice, ...]]]:
        """The boxes that a stretch consists of, at most 2 d - 1 of d axes: the place of each along the side, and its
        extent along the axes."""
        yield from _boxes(part.start, part.stop, self.lengths, 0)


def _boxes(
    start: int, stop: int, lengths: tuple[int, ...], first: int
) -> Iterator[tuple[slice, tuple[slice, ...]]]:
    """Those of ``start`` to ``stop``, counted from ``first`` on."""
    if start >= stop:
        return
    if len(lengths) == 1:
        yield slice(first + start, first + stop), (slice(start, stop),)
        return
    inner = math.prod(lengths[1:])
    line, last = start // inner, stop // inner
    if start > line * inner:  # the rest of a line
        begin, end = start - line * inner, min(stop, (line + 1) * inner) - line * inner
        for place, box in _boxes(begin, end, lengths[1:], first + line * inner):
            yield place, (slice(line, line + 1), *box)
        line += 1
    if line < last:
        whole = (slice(0, length) for length in lengths[1:])
        yield slice(first + line * inner, first + last * inner), (slice(line, last), *whole)
    if stop > max(line, last) * inner:
        for place, box in _boxes(0, stop - last * inner, lengths[1:], first + last * inner):
            yield place, (slice(last, last + 1), *box)


@dataclass(frozen=True)
class Box:
    """A part of a flattened array's region that is a box of the array."""

    rows: slice
    columns: slice
    """Where it goes in the region."""
    region: tuple[slice, ...]
    """Where it lies in the array, along each axis."""


class _Seen:
    """What all that is seen as a matrix has of the stored array beneath it, and of its own shape and dtype."""

    ndim: ClassVar[int] = 2
    array: Any

    if TYPE_CHECKING:

        @property
        def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def store(self) -> Any:
        return self.array.store

    @property
    def path(self) -> str:
        return self.array.path

    @property
    def metadata(self) -> Any:
        return self.array.metadata

    @property
    def attrs(self) -> Any:
        return self.array.attrs


@dataclass(frozen=True)
class Flattened(_Seen):
    """A stored array of any number of dimensions as a matrix, of which nothing is stored again.

    Each axis is in one of two groups, which are flattened into the matrix's sides, the last axis of each fastest:
    element (i, j) is that of ``array.transpose(rows + columns).reshape(shape)``.
    """

    array: zarr.Array[Any]
    rows: tuple[int, ...]
    """The axes that become rows, at least one."""
    columns: tuple[int, ...]

    @property
    def sides(self) -> tuple[FlatSide, FlatSide]:
        shape, chunks = self.array.shape, [max(1, side) for side in self.array.chunks]
        rows, columns = (
            FlatSide(tuple(shape[axis] for axis in axes), tuple(chunks[axis] for axis in axes))
            for axes in (self.rows, self.columns)
        )
        return rows, columns

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.sides
        return rows.length, columns.length

    @property
    def unit(self) -> tuple[int, int]:
        """Rows and columns of the least rectangle at whose multiples no chunk is cut."""
        rows, columns = self.sides
        return rows.unit, columns.unit

    def boxes(self, region: Sequence[slice]) -> Iterator[Box]:
        """The boxes that a region consists of."""
        rows, columns = self.sides
        top, left = region[0].start, region[1].start
        across = list(columns.boxes(region[1]))
        for down, of_rows in rows.boxes(region[0]):
            for along, of_columns in across:
                extent = dict(zip(self.rows + self.columns, of_rows + of_columns, strict=True))
                yield Box(
                    slice(down.start - top, down.stop - top),
                    slice(along.start - left, along.stop - left),
                    tuple(extent[axis] for axis in range(len(extent))),
                )

    def block(self, region: np.ndarray, box: Box) -> np.ndarray:
        """The box of a region that is held as a matrix with contiguous rows, with the array's axes: a view."""
        axes = self.rows + self.columns
        part = region[box.rows, box.columns]
        sides = [box.region[axis].stop - box.region[axis].start for axis in axes]
        return part.reshape(sides).transpose(np.argsort(axes))

    def touched(self, region: Sequence[slice], unit: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The first and the last piece of such sides along each axis that a region, which is not empty, touches."""
        boxes = [box.region for box in self.boxes(region)]
        extents = [
            (min(part.start for part in parts), max(part.stop for part in parts))
            for parts in zip(*boxes, strict=True)
        ]
        first = tuple(start // side for (start, _), side in zip(extents, unit, strict=True))
        return first, tuple((stop - 1) // side for (_, stop), side in zip(extents, unit, strict=True))


@dataclass(frozen=True)
class HeldMask:
    """A mask that is small enough to go along with every task: a bit an element, row by row."""

    bits: bytes
    shape: tuple[int, ...]

    @classmethod
    def of(cls, mask: np.ndarray) -> HeldMask:
        return cls(np.packbits(mask).tobytes(), mask.shape)

    def whole(self) -> np.ndarray:
        """Whether each element is missing: not to be written to."""
        return _unpacked(self)


@lru_cache(maxsize=4)
def _unpacked(mask: HeldMask) -> np.ndarray:
    bits = np.frombuffer(mask.bits, np.uint8)
    return np.unpackbits(bits, count=math.prod(mask.shape)).view(bool).reshape(mask.shape)


WIDER = {"i1": "i2", "u1": "i2", "i2": "i4", "u2": "i4", "i4": "i8", "u4": "i8", "i8": "f8", "u8": "f8"}
"""What integers are read as beside a mask: a type with a number that none of them is. Of 64 bits there is none but
NaN; such integers are multiplied in double precision wherever some of them are missing."""


UNPACKED = np.dtype(np.float64)
"""What packed numbers are read as: what xarray makes of them by a scale in double precision, which is the usual one."""


@dataclass(frozen=True)
class Packing:
    """What a stored number stands for by CF's conventions: ``stored * scale + offset``, as xarray makes it."""

    scale: float = 1.0
    offset: float = 0.0
    turned: bool = False
    """Whether the integers are unsigned ones by the same bits, or signed ones where they are stored unsigned."""

    def unpacked(self, stored: np.ndarray, out: np.ndarray) -> None:
        """Write what numbers stand for into an array of `UNPACKED`."""
        if self.turned:
            stored = stored.view(f"{'u' if stored.dtype.kind == 'i' else 'i'}{stored.dtype.itemsize}")
        np.multiply(stored, self.scale, out=out, dtype=UNPACKED)
        if self.offset:
            out += self.offset


@dataclass(frozen=True)
class Masked(_Seen):
    """A stored matrix in which a mask says what is missing: there it reads as ``missing``, elsewhere as it is stored,
    or as what that stands for.

    Its parts are those of the matrix, so that a mask in larger chunks may be decoded for several of them.
    """

    array: zarr.Array[Any] | Flattened
    mask: zarr.Array[Any] | HeldMask
    """True where an element is missing."""
    axes: tuple[int, ...]
    """For each axis of the mask the axis of the stored array that it lies along: as long as that, or 1 element for all
    of it. Along other axes the mask is the same everywhere."""
    codes: tuple[int | float | complex, ...] = ()
    """Stored numbers that are missing too, wherever they are."""
    packing: Packing | None = None
    """What the numbers stand for; None: themselves."""

    @classmethod
    def by_codes(
        cls,
        array: zarr.Array[Any] | Flattened,
        codes: tuple[int | float | complex, ...],
        packing: Packing | None = None,
    ) -> Masked:
        """A matrix of which such numbers are missing, and in floats NaN, and nothing else."""
        return cls(array, HeldMask.of(np.zeros((), bool)), (), codes, packing)

    @property
    def has_mask(self) -> bool:
        """Whether anything is missing because of where it lies."""
        return len(self.mask.shape) > 0

    @property
    def dtype(self) -> np.dtype:
        found = self.array.dtype.newbyteorder("=")
        if self.packing is not None:
            return UNPACKED
        return np.dtype(WIDER.get(found.str[1:], found)) if self.has_mask else found

    @property
    def missing(self) -> int | Literal["nan"]:
        """The number that stands for what is missing."""
        if self.dtype.kind in "fc":
            return "nan"
        if self.has_mask:
            return int(np.iinfo(self.dtype).min)
        return int(self.codes[0].real)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.array.shape
        return rows, columns

    def holds_code(self, stored: np.ndarray) -> np.ndarray:
        """Where elements, as they are stored, are such numbers."""
        found = np.zeros(stored.shape, bool)
        for code in self.codes:
            found |= stored == np.asarray(code, stored.dtype)
        return found

    def read_as(self, stored: np.ndarray, out: np.ndarray) -> None:
        """Write what elements read as, but for those that are missing."""
        if self.packing is not None:
            self.packing.unpacked(stored, out)
        elif stored is not out:
            out[...] = stored

    def boxes(
        self, region: Sequence[slice], block: np.ndarray
    ) -> Iterator[tuple[np.ndarray, tuple[slice, ...]]]:
        """For each box of a region of the matrix, held as ``block``: the view of it, with the axes of the stored array,
        and what of the mask goes there."""
        boxes: Iterator[tuple[np.ndarray, tuple[slice, ...]]]
        if isinstance(self.array, Flattened):
            boxes = ((self.array.block(block, box), box.region) for box in self.array.boxes(region))
        else:
            boxes = iter([(block, tuple(region))])
        for view, extent in boxes:
            yield (
                view,
                tuple(
                    extent[axis] if length > 1 or base_of(self).shape[axis] == 1 else slice(0, 1)
                    for axis, length in zip(self.axes, self.mask.shape, strict=True)
                ),
            )

    def laid_along(self, part: np.ndarray) -> np.ndarray:
        """A part of the mask with the axes of the stored array, those that it lacks of one element: a view."""
        ordered = part.transpose(np.argsort(self.axes))
        sides = dict(zip(sorted(self.axes), ordered.shape, strict=True))
        return ordered.reshape([sides.get(axis, 1) for axis in range(base_of(self).ndim)])


def is_beside_mask(array: StoredArray) -> bool:
    """Whether a mask says what of a matrix is missing, and not only numbers."""
    return isinstance(array, Masked) and array.has_mask


@dataclass(frozen=True)
class Section(_Seen):
    """Some rows and columns of a stored matrix, as a matrix: those that came to it since something was made of it."""

    array: zarr.Array[Any] | Flattened | Masked
    rows: tuple[int, int]
    """The first and the last + 1."""
    columns: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    def within(self, region: Sequence[slice]) -> tuple[slice, slice]:
        """Where a region lies in the whole matrix."""
        rows, columns = (
            slice(first + part.start, first + part.stop)
            for part, (first, _) in zip(region, (self.rows, self.columns), strict=True)
        )
        return rows, columns


StoredArray: TypeAlias = "zarr.Array[Any] | Flattened | Masked | Section"
"""What is read: a stored array itself, one that is seen as a matrix, one beside a mask, or a section of any of these.
They are put around each other in this order."""


def whole_of(stored: StoredArray) -> zarr.Array[Any] | Flattened | Masked:
    """What a section is of; anything else as it is."""
    return stored.array if isinstance(stored, Section) else stored


def unmasked(stored: StoredArray) -> zarr.Array[Any] | Flattened:
    """The whole matrix without its mask."""
    stored = whole_of(stored)
    return stored.array if isinstance(stored, Masked) else stored


def numbers_dtype(stored: StoredArray) -> np.dtype:
    """The dtype of a matrix's own numbers: as they are stored, or of what they stand for; not the wider one beside a
    mask."""
    whole = whole_of(stored)
    unpacked = isinstance(whole, Masked) and whole.packing is not None
    return whole.dtype if unpacked else unmasked(whole).dtype.newbyteorder("=")


def parts_of(stored: StoredArray) -> list[zarr.Array[Any]]:
    """The array that is stored, and the mask beside it where that is stored too."""
    whole = whole_of(stored)
    mask = whole.mask if isinstance(whole, Masked) else None
    return [base_of(whole), *([mask] if isinstance(mask, zarr.Array) else [])]


def stored_masks(named: Mapping[str, StoredArray]) -> dict[str, zarr.Array[Any]]:
    """The masks beside some arrays that are stored themselves, by what messages call them."""
    return {
        f"{name}'s mask": whole.mask
        for name, stored in named.items()
        if isinstance(whole := whole_of(stored), Masked) and isinstance(whole.mask, zarr.Array)
    }


def base_of(stored: StoredArray) -> zarr.Array[Any]:
    """The array that is stored."""
    stored = unmasked(stored)
    return stored.array if isinstance(stored, Flattened) else stored
