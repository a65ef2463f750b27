"""Numbers in files that are no Zarr, as an array of Zarr: a store that knows in which stretches of a file they lie.

So the planner, the readers of chunks, the record of what was read and the check take such an array as any other, and
`chunks.layout_of` says where its bytes are. The idea of a map of chunks into foreign files is kerchunk's.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import zarr
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from tilewright.pipeline.errors import DTypeError, StoreError

METADATA_NAME = ".zarray"
ATTRIBUTES_NAME = ".zattrs"
DIMENSIONS = "_ARRAY_DIMENSIONS"
"""As in `attributes.py`, which is above this."""

UNIT_ELEMENTS = 2**20
"""Elements of a rectangle in which a stretch of a file that holds a whole array is planned: any other would do, since
nothing there is decoded, and C's chunks are made like it."""
UNIT_SIDE = 1024

MOST_TABLE_NBYTES = 2**20
"""Up to so many bytes a map of chunks goes along with every task; a longer one each process reads from the file."""

ABSENT = -1
"""The offset of a chunk that was never written."""

ITEM_NBYTES = {"i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}
"""Of the dtypes that are multiplied."""


@dataclass(frozen=True, eq=False)
class Mapped:
    """An array in a local file."""

    path: str
    """The file's, absolute."""
    name: str
    """What the array is called in messages."""
    shape: tuple[int, ...]
    dtype: np.dtype
    """As stored, including the byte order; never bool."""
    chunks: tuple[int, ...]
    """Of the file's, or of a whole array the rectangle in which it is planned."""
    offset: int | None = None
    """Where the whole array begins in the file, or..."""
    table: np.ndarray | None = None
    """...offset and length of each chunk in bytes: int64, the grid's counts × 2; `ABSENT` for those never written."""
    column_major: bool = False
    """Whether the elements of the whole array lie in Fortran's order."""
    filters: tuple[Mapping[str, Any], ...] = ()
    """numcodecs' settings, in the order of encoding."""
    fill: Any = 0
    """What chunks hold that were never written."""
    variable: str = ""
    """The array's name within the file."""
    digest: str = ""
    """Of the numbers, where they lie in memory and the file is nameless."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    sight: tuple[str, int, int] | None = None
    """Of such a file: the boot of its host's system, and the file's device and number there."""

    table_digest: str = ""
    """Of the table."""
    table_again: Callable[[str, str, str], np.ndarray] | None = None
    """Reads the table once more, in another process, by path, variable and digest."""

    @property
    def whole(self) -> bool:
        """Whether all of the array is one stretch of the file."""
        return self.offset is not None

    def extent(self, chunk: tuple[int, ...]) -> tuple[int, int] | None:
        """Offset and length of a chunk, or of the whole array; None where it was never written."""
        if self.table is None:
            return self.offset or 0, math.prod(self.shape) * self.dtype.itemsize
        offset, nbytes = (int(number) for number in self.table[chunk])
        return None if offset == ABSENT else (offset, nbytes)

    def documents(self) -> dict[str, bytes]:
        """The metadata as Zarr's format 2 has them, by their keys."""
        settings = [dict(one) for one in self.filters]
        filters, compressor = settings[:-1], settings[-1] if settings else None
        array = {
            "zarr_format": 2,
            "shape": list(self.shape),
            "chunks": list(self.chunks),
            "dtype": self.dtype.str,
            "fill_value": None,
            "order": "F" if self.column_major else "C",
            "filters": filters or None,
            "compressor": compressor,
            "dimension_separator": ".",
        }
        return {
            METADATA_NAME: json.dumps(array).encode(),
            ATTRIBUTES_NAME: json.dumps(dict(self.attributes), default=as_json).encode(),
        }


def as_json(value: Any) -> Any:
    """An attribute of another library as JSON has it."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class MappedStore(Store):
    """A store that holds one array, at its root, which is read and never written. Its pickled copy is the map."""

    def __init__(self, mapped: Mapped, keeps: Any = None) -> None:
        """keeps: what is to live as long as this, in this process."""
        super().__init__(read_only=True)
        self._is_open = True
        self.mapped = mapped
        self.keeps = keeps

    def __getstate__(self) -> Mapped:
        table = self.mapped.table
        long = table is not None and table.nbytes > MOST_TABLE_NBYTES
        return replace(self.mapped, table=None) if long else self.mapped

    def __setstate__(self, mapped: Mapped) -> None:
        if mapped.table is None and mapped.table_again is not None:
            table = mapped.table_again(mapped.path, mapped.variable, mapped.table_digest)
            mapped = replace(mapped, table=table)
        self.__init__(mapped)  # type: ignore[misc]
        if mapped.sight is not None and sight_of(mapped.path) != mapped.sight:
            raise StoreError(
                f"{mapped.name} lies in the memory of a process on another host, which only workers of that host can"
                " read; store it where all workers see it (numpy.save, or zarr.save), and give the path"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MappedStore) and (self is other or self.origin == other.origin)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return self.mapped.name

    @property
    def origin(self) -> list[Any]:
        """What tells the array from others, for `json.dumps`."""
        mapped = self.mapped
        if mapped.digest:
            return ["memory", mapped.digest, list(mapped.shape), mapped.dtype.str]
        return ["mapped", mapped.path, mapped.variable, mapped.offset]

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        found = self.mapped.documents().get(key)
        data = self._chunk(key) if found is None else found
        return None if data is None else prototype.buffer.from_bytes(_cut(data, byte_range))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, part) for key, part in key_ranges]

    async def exists(self, key: str) -> bool:
        return key in self.mapped.documents() or self._place(key) is not None

    def _place(self, key: str) -> tuple[int, ...] | None:
        """The chunk of a key; None where there is none."""
        try:
            place = tuple(int(part) for part in key.split("."))
        except ValueError:
            return None
        sides = zip(self.mapped.shape, self.mapped.chunks, strict=True)
        counts = [-(-side // unit) for side, unit in sides]
        inside = len(place) == len(counts) and all(
            0 <= one < count for one, count in zip(place, counts, strict=True)
        )
        return place if inside and self.mapped.extent(place) is not None else None

    def _chunk(self, key: str) -> bytes | None:
        mapped, place = self.mapped, self._place(key)
        if place is None:
            return None
        if not mapped.whole:
            extent = mapped.extent(place)
            assert extent is not None
            with open(mapped.path, "rb") as file:
                return os.pread(file.fileno(), extent[1], extent[0])
        order: Any = "F" if mapped.column_major else "C"
        whole = np.memmap(mapped.path, mapped.dtype, "r", mapped.offset or 0, mapped.shape, order)
        chunk = np.zeros(mapped.chunks, mapped.dtype, order)
        part = whole[
            tuple(slice(one * side, (one + 1) * side) for one, side in zip(place, mapped.chunks, strict=True))
        ]
        chunk[tuple(map(slice, part.shape))] = part
        return chunk.tobytes(order="A")

    @property
    def supports_writes(self) -> bool:
        return False

    @property
    def supports_deletes(self) -> bool:
        return False

    @property
    def supports_listing(self) -> bool:
        return True

    async def set(self, key: str, value: Buffer) -> None:
        self._refuse()

    async def set_partial_values(self, key_start_values: Iterable[tuple[str, int, Any]]) -> None:
        self._refuse()

    async def delete(self, key: str) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise StoreError(f"{self.mapped.name} is no Zarr array, and is not written to; choose another output")

    async def list(self) -> AsyncIterator[str]:
        for key in self.mapped.documents():
            yield key
        sides = zip(self.mapped.shape, self.mapped.chunks, strict=True)
        for place in itertools.product(*(range(-(-side // unit)) for side, unit in sides)):
            if self.mapped.extent(place) is not None:
                yield ".".join(map(str, place))

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        async for key in self.list():
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        if not prefix.strip("/"):
            async for key in self.list():
                yield key


def _cut(data: bytes, part: ByteRequest | None) -> bytes:
    if isinstance(part, RangeByteRequest):
        return data[part.start : part.end]
    if isinstance(part, OffsetByteRequest):
        return data[part.offset :]
    return data[-part.suffix :] if isinstance(part, SuffixByteRequest) else data


def sight_of(path: str) -> tuple[str, int, int] | None:
    """What tells a file in memory from any on another host, or in another container; None where there is none."""
    try:
        facts = os.stat(path)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return boot, facts.st_dev, facts.st_ino


def mapped_array(mapped: Mapped, keeps: Any = None) -> zarr.Array[Any]:
    """The array of a map. keeps: as `MappedStore` has it."""
    return zarr.open_array(MappedStore(mapped, keeps), mode="r", zarr_format=2)


def stored_dtype(dtype: np.dtype, role: str, name: str) -> np.dtype:
    """The dtype that numbers are read as: bool as bytes of 0 and 1. Raises DTypeError for what is no number."""
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    if dtype.itemsize not in ITEM_NBYTES.get(dtype.kind, ()):
        raise DTypeError(
            f"{role}: {name} holds {dtype}; only bool, integers, floats and complex numbers of at most 64 bits each can"
            " be used: cast it (.astype)"
        )
    return dtype


def unit_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The rectangle in which a plain array is planned: of a matrix a square, of other arrays what lies together.

    >>> unit_of((5000, 700)), unit_of((10, 400, 8000)), unit_of((3 * 2**20,))
    ((1024, 700), (1, 131, 8000), (1048576,))
    """
    if len(shape) == 2:
        return tuple(max(1, min(side, UNIT_SIDE)) for side in shape)
    left, sides = UNIT_ELEMENTS, []
    for side in reversed(shape):
        sides.append(max(1, min(side, left)))
        left = left // side if 0 < side <= left else 0
    return tuple(reversed(sides))


NETCDF_FILL = "_tilewright_netcdf_fill"
"""The attribute that an open array of a file of HDF5 has where netCDF fills it by its default, and nobody named
another: netCDF4-python takes that number for a missing one, and xarray does not."""
NETCDF_FILLS = {
    "i1": -127, "u1": 255, "i2": -32767, "u2": 65535, "i4": -(2**31) + 1, "u4": 2**32 - 1,
    "i8": -(2**63) + 2, "u8": 2**64 - 2, "f4": float(np.float32(9.96921e36)), "f8": 9.9692099683868690e36,
}  # fmt: skip
"""NC_FILL_BYTE and its like: what netCDF-C fills variables by, of each dtype, where nobody names another number."""
BOOL = {"dtype": "bool"}
"""The attribute by which xarray tells that integers are bool, where a format has none."""


def named(
    dimensions: Sequence[Any] | None, attributes: Mapping[str, Any] | None = None, dtype: Any = None
) -> dict[str, Any]:
    """An array's attributes, with the names of its dimensions as xarray keeps them in format 2. dtype: as it was given;
    bool, which is read as bytes, is told by `BOOL`."""
    found = dict(attributes or {})
    if dtype is not None and np.dtype(dtype).kind == "b":
        found |= BOOL
    if dimensions and all(isinstance(name, str) for name in dimensions):
        found[DIMENSIONS] = list(dimensions)
    return found
