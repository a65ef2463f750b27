"""How a new array is stored: the sides of its chunks and shards, and the codec of its chunks, as a caller asks for them
in words."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numcodecs
import numpy as np
import zarr
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec
from zarr.codecs.numcodecs import LZ4
from zarr.errors import ZarrUserWarning
from zarr.storage import LocalStore, MemoryStore

from tilewright.kernels.arguments import as_count, shown
from tilewright.kernels.choices import CODECS
from tilewright.kernels.numbers import ceil_div
from tilewright.kernels.words import did_you_mean
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.store.arrays import Source, in_store, local_path
from tilewright.pipeline.store.new.far_groups import format_at

Sides: TypeAlias = "int | str | tuple[int, int] | list[int]"
"""The sides of a chunk or a shard: rows and columns, as a pair or as ``"1024x1024"``, or one number for both."""

LEVELS = {"none": None, "zstd": (1, 22), "lz4": (1, 65537), "gzip": (1, 9)}
"""What may follow a codec's name: its level, from the fastest up; of lz4 its acceleration, from the smallest up."""
BLOSC_LEVELS = (0, 9)

MOST_ENCODED_NBYTES = 2**31 - 2**25
"""The largest chunk that is compressed. numcodecs' codecs take less than 2 GiB, LZ4's 32 MiB less than that."""
INNER_NBYTES = 2**22
"""The largest chunk of a shard where nobody says how large they are: so much is read for a single element."""


Created = TypeVar("Created")


@dataclass(frozen=True)
class Codec:
    """How chunks are compressed."""

    name: str
    level: int | None = None
    """None: its own default."""

    def __str__(self) -> str:
        return self.name if self.level is None else f"{self.name}:{self.level}"

    def compressor(self, zarr_format: int) -> Any:
        """zarr-python's codec, or in format 2 numcodecs'; None where chunks are stored plain."""
        given: dict[str, Any] = {} if self.level is None else {"level": self.level}
        if self.name == "none":
            return None
        if self.name == "zstd":
            return numcodecs.Zstd(**given) if zarr_format == 2 else ZstdCodec(**given)
        if self.name == "gzip":
            return numcodecs.GZip(**given) if zarr_format == 2 else GzipCodec(**given)
        if self.name == "lz4":
            faster = {} if self.level is None else {"acceleration": self.level}
            return numcodecs.LZ4(**faster) if zarr_format == 2 else quietly(lambda: LZ4(**faster))
        inner: Any = self.name.removeprefix("blosc-")
        clevel: dict[str, Any] = {} if self.level is None else {"clevel": self.level}
        return (
            numcodecs.Blosc(cname=inner, **clevel) if zarr_format == 2 else BloscCodec(cname=inner, **clevel)
        )


@dataclass(frozen=True)
class Storage:
    """How a new array is to be stored; what is None is up to Tilewright."""

    chunks: tuple[int, int] | None = None
    shards: tuple[int, int] | None = None
    codec: Codec | None = None

    def __bool__(self) -> bool:
        return self != Storage()

    @property
    def unit(self) -> tuple[int, int] | None:
        """The sides of what is written as one object; None where nobody said."""
        return self.shards or self.chunks

    def within(self, shape: tuple[int, ...]) -> Storage:
        """The same of an array of this shape: a chunk has no more rows and columns than there are, a shard no more
        chunks. What lies beyond would be stored with it, and formed in memory first."""
        chunks = self.chunks and (_cut(self.chunks[0], shape[0]), _cut(self.chunks[1], shape[1]))
        if self.shards is None:
            return replace(self, chunks=chunks)
        units = chunks or (1, 1)
        shards = tuple(
            min(shard, ceil_div(max(side, 1), unit) * unit)
            for shard, side, unit in zip(self.shards, shape, units, strict=True)
        )
        return replace(self, chunks=chunks, shards=(shards[0], shards[1]))

    def facts(self) -> dict[str, Any]:
        """What a record says of it, for JSON."""
        sides = {"chunks": self.chunks, "shards": self.shards}
        named = {name: list(side) for name, side in sides.items() if side is not None}
        return named if self.codec is None else {**named, "codec": str(self.codec)}

    def options(
        self, unit: tuple[int, ...], itemsize: int, zarr_format: int | None, *, compressed: bool
    ) -> dict[str, Any]:
        """Arguments of ``zarr.create_array`` for an array of such pieces. compressed: whether it is where nobody
        said."""
        found: dict[str, Any] = {"chunks": tuple(unit), "compressors": "auto" if compressed else None}
        if self.shards is not None:
            found |= {"chunks": self.chunks or _inner(self.shards, itemsize), "shards": self.shards}
        if self.codec is not None:
            found["compressors"] = self.codec.compressor(zarr_format or 3)
        return found

    def check(self, out: Source | None, dtype: np.dtype) -> None:
        """Raise OptionError where an output that is to be created cannot be stored so. out: None, if nobody says where
        it goes."""
        if not self:
            return
        if self.shards is not None and out is not None and format_at(out) == 2:
            raise OptionError(
                f"shards={_text(self.shards)}: C lies in a group of Zarr's format 2, which has no shards; leave shards"
                " (--shards) away, or store C outside that group"
            )
        if self.codec is None or self.codec.name == "none":
            return
        chunks = self.chunks or (self.shards and _inner(self.shards, dtype.itemsize))
        if chunks is not None and math.prod(chunks) * dtype.itemsize > MOST_ENCODED_NBYTES:
            raise OptionError(
                f"chunks={_text(chunks)} of {dtype} are of {math.prod(chunks) * dtype.itemsize:,} bytes, and"
                f" {self.codec} takes at most {MOST_ENCODED_NBYTES:,}; give smaller chunks (--chunks), or codec='none'"
            )

    def model(self, out: Source | None, shape: tuple[int, ...], dtype: np.dtype, **more: Any) -> Any:
        """An open array that is stored as the new one will be, of which nothing is written: for what a plan has to know
        of its codec and its shards. more: as for `options`."""
        path = None if out is None else local_path(out)
        zarr_format = None if out is None else format_at(out)
        options = self.options(itemsize=dtype.itemsize, zarr_format=zarr_format, **more)
        made = quietly(
            lambda: zarr.create_array(
                MemoryStore(),
                shape=shape,
                dtype=dtype,
                fill_value=0,
                zarr_format=zarr_format or 3,
                **options,
            )
        )
        is_local = out is None or path is not None
        return in_store(made, LocalStore(Path(path or "c.zarr").absolute())) if is_local else made


def _cut(side: int, whole: int) -> int:
    return min(side, max(whole, 1))


AS_IT_COMES = Storage()
"""Where nobody said anything."""


def as_storage(chunks: Sides | None = None, shards: Sides | None = None, codec: str | None = None) -> Storage:
    """How a new array is stored, of what a caller gives.

    Raises OptionError for what is none, and for shards that are not made of whole chunks.

    >>> as_storage("1024x512", codec="zstd:3")
    Storage(chunks=(1024, 512), shards=None, codec=Codec(name='zstd', level=3))
    """
    found = Storage(_as_sides("chunks", chunks), _as_sides("shards", shards), _as_codec(codec))
    if found.chunks is not None and found.shards is not None:
        for shard, chunk in zip(found.shards, found.chunks, strict=True):
            if shard % chunk:
                raise OptionError(
                    f"shards={_text(found.shards)} are not whole chunks of {_text(found.chunks)}: each side of a shard"
                    f" is a multiple of the chunk's, and {shard} is none of {chunk}; change one of the two (--shards,"
                    " --chunks)"
                )
    return found


def quietly(create: Callable[[], Created]) -> Created:
    """Create an array, or its codec, without zarr-python's warning that format 3 does not specify LZ4 yet."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Numcodecs codecs are not in", ZarrUserWarning)
        return create()


BEYOND = 10**1000
"""Sides that long are no longer written out by Python, in messages for example; shorter ones are cut to the array's."""


def _as_sides(name: str, given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    parts: list[Any]
    if isinstance(given, str):
        words = re.split(r"[x×,]", given.strip())
        parts = [int(word) if word.strip().isdecimal() else None for word in words]
    else:
        parts = [as_count(part) for part in (given if isinstance(given, tuple | list) else [given])]
    if len(parts) == 1:
        parts *= 2
    if len(parts) != 2 or any(part is None or not 1 <= part < BEYOND for part in parts):
        raise OptionError(
            f"{name}={shown(given)} are no sides of a matrix's {name}: give rows and columns, whole numbers of 1 or"
            f" more, such as {name}='1024x1024' (--{name} 1024x1024), or one number for both"
        )
    return parts[0], parts[1]


def _as_codec(given: Any) -> Codec | None:
    if given is None:
        return None
    name, colon, level = given.partition(":") if isinstance(given, str) else ("", "", "")
    if name not in CODECS:
        raise OptionError(
            f"codec={shown(given)} is unknown; it may be {', '.join(CODECS)}, most of them with a level behind a"
            f" colon, such as zstd:3 (--codec){did_you_mean(name, CODECS)}"
        )
    if not colon:
        return Codec(name)
    limits = LEVELS.get(name, BLOSC_LEVELS)
    what = "acceleration" if name == "lz4" else "level"
    if limits is None:
        raise OptionError(f"codec={shown(given)}: chunks that are stored plain have no level; give 'none'")
    least, most = limits
    if not level.isdecimal() or not least <= int(level) <= most:
        raise OptionError(
            f"codec={shown(given)}: the {what} of {name} is a whole number from {least} to {most}, such as"
            f" {name}:{min(most, max(least, 3))}; or give {name} alone for its default (--codec)"
        )
    return Codec(name, int(level))


def _inner(shards: tuple[int, int], itemsize: int) -> tuple[int, int]:
    """The sides of the chunks of shards where nobody says them: even parts of at most `INNER_NBYTES`.

    >>> _inner((8192, 8192), 4)
    (1024, 1024)
    """
    sides = list(shards)
    while math.prod(sides) * itemsize > INNER_NBYTES:
        longer = 0 if sides[0] >= sides[1] else 1
        if sides[longer] == 1:
            break
        # The least factor of the longer side: what is cut stays whole chunks of the shard.
        parts = next(
            (factor for factor in range(2, sides[longer]) if sides[longer] % factor == 0), sides[longer]
        )
        sides[longer] //= parts
    return sides[0], sides[1]


def _text(sides: tuple[int, int]) -> str:
    return "x".join(map(str, sides))
